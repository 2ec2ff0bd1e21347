"""The registry of serializers, by name: each turns a tensor into bytes, and back.

``raw``, ``numpy`` and ``torch_save`` are always there; ``register_serializer`` adds a user's own, once it has
proved itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tensorpipe_ipc.errors import UnknownSerializer
from tensorpipe_ipc.serializers.base import Serializer
from tensorpipe_ipc.serializers.conformance import Checked, check_serializer
from tensorpipe_ipc.serializers.numpy_array import NumpyArray
from tensorpipe_ipc.serializers.raw import Raw
from tensorpipe_ipc.serializers.torch_save import TorchSave

__all__ = [
    "ONLY_BY_NAME",
    "Serializer",
    "accepted_by_default",
    "limited",
    "register_serializer",
    "serializer_named",
    "serializer_names",
]

_BUILT_IN: tuple[Serializer, ...] = (Raw(), NumpyArray(), TorchSave())
_SERIALIZERS: dict[str, Serializer] = {serializer.name: serializer for serializer in _BUILT_IN}
ONLY_BY_NAME = (TorchSave.name,)  # what a consumer accepts only if it says so
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def register_serializer(serializer: Serializer) -> None:
    """Make a serializer selectable by its name, in this process. Do it on both ends.

    It must first pass the conformance checks (``check_serializer``), which send every kind of tensor through it.

    Args:
        serializer: see ``Serializer``.

    Raises:
        TypeError: an attribute or method is missing, or a check failed: the tensor and what went wrong are named.
        ValueError: its name is no name, or is taken by another serializer.
    """
    if not isinstance(serializer, Serializer):
        raise TypeError(f"{serializer!r} lacks one of name, zero_copy, encode() and decode()")
    name = serializer.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"serializer name {name!r}: 1 to 64 letters, digits, '_', '-' and '.'")
    known = _SERIALIZERS.get(name)
    if known is not None and not (isinstance(known, Checked) and type(known.serializer) is type(serializer)):
        raise ValueError(f"a serializer named {name!r} is registered already")
    check_serializer(serializer)
    _SERIALIZERS[name] = Checked(serializer)


def serializer_named(name: str) -> Serializer:
    """Return the serializer of that name.

    Raises:
        UnknownSerializer: there is none; the known ones are named.
    """
    try:
        return _SERIALIZERS[name]
    except (KeyError, TypeError):
        raise UnknownSerializer(
            f"unknown serializer {name!r} (known: {', '.join(serializer_names())}); register_serializer() adds one"
        ) from None


def limited(serializer: Serializer, most: Callable[[], int]) -> Serializer:
    """Return a serializer that refuses what is too large before it copies it; of a user's own, itself.

    Args:
        serializer: any. The class of one that is built in takes ``most``.
        most: tells the bytes that a tensor may have.
    """
    kind: Callable[..., Serializer] = type(serializer)
    return kind(most) if serializer in _BUILT_IN else serializer


def serializer_names() -> tuple[str, ...]:
    """Return the names of all serializers of this process, sorted."""
    return tuple(sorted(_SERIALIZERS))


def accepted_by_default() -> tuple[str, ...]:
    """Return the names that a consumer accepts unless it names its own: ``raw``, ``numpy``, and what was registered here.

    ``torch_save`` is read by torch's unpickler, which is an allow-list and no safe format: it is accepted by name only.
    """
    return tuple(name for name in serializer_names() if name not in ONLY_BY_NAME)
