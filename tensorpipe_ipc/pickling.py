"""Any picklable object, with its tensors out of the pickle: for queues, whose ends are one family of processes.

Endpoints never come here. The pickler is multiprocessing's own (so that locks, connections and whatever else knows how to
travel to a relative still do), with one thing changed: a tensor, array or storage is not pickled, nor moved into torch's
shared memory, but leaves its place, and travels beside the pickle as a leaf of the message.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import Parameter
from torch.storage import TypedStorage, UntypedStorage

from tensorpipe_ipc.wire.dtypes import BY_NUMPY

__all__ = ["dump", "dump_without_leaves", "load"]


class _Pickler(pickle.Pickler):
    """multiprocessing's ForkingPickler, which copies its table of reducers each time, and then looks into it in Python."""

    leaves: list[Any]

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _KINDS and _is_leaf(obj):
            self.leaves.append(obj)
            return _itself, (_PLACE,)
        reduce = _registered.get(kind)
        return NotImplemented if reduce is None else reduce(obj)


_KINDS: frozenset[Any] = frozenset((torch.Tensor, Parameter, np.ndarray, TypedStorage, *torch._storage_classes))
_registered: Any = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
_PLACE = pickle.PickleBuffer(bytearray(1))  # what is pickled out of band, as the standard has it: there stands a leaf


def _refuse(_: Any) -> Any:
    raise _HasLeaves


class _Refusing(dict[Any, Any]):
    def __missing__(self, kind: Any) -> Any:
        return _registered.get(kind) or copyreg.dispatch_table[kind]


class _WithoutLeaves(pickle.Pickler):
    """Asks about no object: leaves are found by their type, and have the way out. 1.3 us less for a small tuple."""

    dispatch_table = _Refusing.fromkeys(_KINDS, _refuse)


class _HasLeaves(Exception):
    """There is a leaf in it."""


def _is_data(buffer: pickle.PickleBuffer) -> bool:
    """Whether a buffer goes into the pickle: any object's own does."""
    return buffer is not _PLACE


def _itself(leaf: Any) -> Any:
    return leaf


def dump(obj: Any) -> tuple[bytes, list[Any]]:
    """An object's pickle, and the leaves whose places are in it, in their order.

    Raises:
        Exception: whatever the object raises when it is pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=_is_data)
    pickler.leaves = []
    pickler.dump(obj)
    return file.getvalue(), pickler.leaves


def dump_without_leaves(obj: Any) -> bytes | None:
    """An object's pickle; None if there may be leaves in it.

    Raises:
        Exception: whatever the object raises when it is pickled.
    """
    file = io.BytesIO()
    try:
        _WithoutLeaves(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    except _HasLeaves:
        return None
    return file.getvalue()


def load(data: Any, leaves: Sequence[Any] = ()) -> Any:
    """The object of a pickle and its leaves.

    Raises:
        Exception: whatever the object raises when it is made again.
    """
    return pickle.loads(data, buffers=leaves)  # noqa: S301 - of a relative of this process


def _is_leaf(obj: Any) -> bool:
    kind = type(obj)
    if kind is torch.Tensor or kind is Parameter:
        return obj.layout is torch.strided and not (obj.is_nested or obj.is_quantized or obj.is_meta)
    if kind is np.ndarray:
        return obj.dtype in BY_NUMPY and obj.dtype.isnative
    # Not obj.device: torch warns of that, whoever asks.
    return kind is UntypedStorage or (isinstance(obj, TypedStorage) and obj._untyped_storage.device.type == "cpu")
