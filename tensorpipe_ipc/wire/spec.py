"""The spec: what stands where in a tree, as plain bytes; and the types that may stand in one by name.

A spec is one node, written depth first. Counts are u32, little-endian; `key` and `name` are a u16 length and that
many bytes (a key is msgpack, a name UTF-8)::

    00 NONE                          10 TENSOR                     20 LIST   count  nodes
    01 VALUE  (the next value)       11 TENSOR_GRAD                21 TUPLE  count  nodes
    02 INT    beyond 64 bits         12 PARAMETER                  22 DICT   count  keys   nodes
    03 COMPLEX                       13 FROZEN (parameter)         23 NAMEDTUPLE  name  count  names  nodes
    04 STR    with lone surrogates   14 NDARRAY                    24 DATACLASS   name  count  names  nodes
    05 DTYPE  code u8                15 BYTES
    06 SIZE   count  count x i64     16 UNTYPED (storage)
    07 DEVICE name                   17 TYPED (storage)  code u8
    08 SCALAR code u8 (NumPy's)      25 ORDERED dict: its DICT, and its attributes: NONE or a DICT
                                     26 CUSTOM  name  node: what a registered ``to`` made

TENSOR to TYPED are the leaves: the next tensor of the message, dressed as what it was. Values are bool, int, float and
str (INT takes one, in hexadecimal; COMPLEX takes two, and so does a complex SCALAR; STR takes one, its UTF-8 bytes as
Latin-1). They vary from
message to message, so they are not in the spec: a steady stream has one spec. Whether one object stands twice in a tree
is not kept; whether two leaves share memory is (``sharing``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "BY_NAME",
    "BY_TYPE",
    "MAX_DEPTH",
    "MAX_NODES",
    "MAX_TEXT",
    "METADATA",
    "Op",
    "Registered",
    "is_too_nested",
    "register_type",
]

MAX_DEPTH = 64  # containers within containers: deep enough for people, and far from Python's recursion limit
MAX_NODES = 1 << 17  # a tree of more single nodes wants to be a tensor; it also bounds what a hostile spec can ask for
MAX_TEXT = 0xFFFF  # bytes of a key or name
# Of an ordered dict. No other crosses: NumPy reads memory where an attribute (``__array_interface__``) says, ctypes likewise.
METADATA = "_metadata"

_NESTING = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])  # with which msgpack begins a map or an array
_PLAIN = bytes(set(range(256)) - set(_NESTING))
# Such bytes in a key that is a tuple: msgspec recurses, and how deep it may differs from Python to Python.
_MOST_NESTING = 500


def is_too_nested(key: bytes | memoryview) -> bool:
    """Return whether a key's msgpack may be nested deeper than msgspec can read. A long tuple may look so, too."""
    if not key or key[0] not in _NESTING:
        return False
    pieces = (bytes(key[at : at + 4096]) for at in range(0, len(key), 4096))
    return sum(len(piece.translate(None, _PLAIN)) for piece in pieces) > _MOST_NESTING


class Op:
    """The first byte of a node. Plain ints: an IntEnum member costs ten times as much to compare."""

    NONE, VALUE, INT, COMPLEX, STR, DTYPE, SIZE, DEVICE, SCALAR = range(0x00, 0x09)
    TENSOR, TENSOR_GRAD, PARAMETER, FROZEN, NDARRAY, BYTES, UNTYPED, TYPED = range(0x10, 0x18)
    LIST, TUPLE, DICT, NAMEDTUPLE, DATACLASS, ORDERED, CUSTOM = range(0x20, 0x27)


T = TypeVar("T", bound=type)


class Registered(NamedTuple):
    """A class whose instances may travel: its name on the wire, and its fields, in order, or what takes it apart."""

    cls: type
    op: int
    name: str
    fields: tuple[str, ...]
    to: Callable[[Any], Any] | None = None
    from_: Callable[[Any], Any] | None = None


BY_TYPE: dict[type, Registered] = {}
BY_NAME: dict[str, Registered] = {}


def register_type(
    cls: T,
    *,
    name: str | None = None,
    to: Callable[[Any], Any] | None = None,
    from_: Callable[[Any], Any] | None = None,
) -> T:
    """Let instances of a class travel. Call it on both ends; for a NamedTuple or dataclass it also works as a decorator.

    The receiver makes a NamedTuple or dataclass without running any of its code: a dataclass's fields are set one by one,
    without ``__init__`` and ``__post_init__``. Any other class needs ``to`` and ``from_``::

        tp.register_type(Pose, to=lambda pose: (pose.rotation, pose.frame), from_=lambda parts: Pose(*parts))

    A class that is defined anew (a notebook cell run again) replaces its elder when it is registered again.

    Args:
        cls: the class.
        name: what it is called on the wire, the same on both ends; by default ``cls.__qualname__``.
        to: takes an instance apart: gives a tree of what can travel. It runs in ``put``.
        from_: makes an instance of such a tree. It runs in ``get``, and a peer may have made up the tree: an exception drops
            the message.

    Returns:
        ``cls``.

    Raises:
        TypeError: ``cls`` is neither a NamedTuple nor a dataclass, or one that derives from dict, say, as transformers' outputs
            do; and ``to`` or ``from_`` is missing.
        ValueError: another class is registered under that name, or it is too long or no UTF-8.
    """
    fields: tuple[str, ...]
    if to is not None or from_ is not None:
        if not (isinstance(cls, type) and callable(to) and callable(from_)):
            raise TypeError(f"to={to!r} and from_={from_!r} for {cls!r}: give a class and two functions")
        op, fields = Op.CUSTOM, ()
    elif isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields"):
        op, fields = Op.NAMEDTUPLE, tuple(cls._fields)
    elif isinstance(cls, type) and dataclasses.is_dataclass(cls):
        if (builtin := _builtin_base(cls)) is not object:
            raise TypeError(
                f"{cls!r} derives from {builtin.__name__}, whose own code would have to make it; give to= and from_="
            )
        op, fields = Op.DATACLASS, tuple(field.name for field in dataclasses.fields(cls))
    else:
        raise TypeError(f"{cls!r} is neither a NamedTuple nor a dataclass; give to= and from_=, or send its parts")
    entry = Registered(cls, op, name or cls.__qualname__, fields, to, from_)
    if len(entry.name.encode()) > MAX_TEXT:
        raise ValueError(f"a name of {len(entry.name.encode()):,} bytes for {cls!r}, the limit is {MAX_TEXT:,}")
    known = BY_NAME.setdefault(entry.name, entry)
    if (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"{known.cls!r} is registered as {entry.name!r} already; give {cls!r} another name=")
    BY_NAME[entry.name] = BY_TYPE[cls] = entry  # a class defined anew (a notebook cell run again) replaces its elder
    return cls


def _builtin_base(cls: type) -> type:
    """Return the nearest base that is no class of Python code, and whose ``__new__`` alone makes instances; or object."""
    return next(base for base in cls.__mro__ if isinstance(vars(base).get("__new__"), BuiltinFunctionType))
