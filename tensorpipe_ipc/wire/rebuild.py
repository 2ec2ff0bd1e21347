"""Trees, put together again: a ``Plan`` reads a spec (see ``spec``) once and builds each message's tree by it.

A spec that arrives is hostile until ``_check`` has walked it, which allocates nothing. ``flatten`` is the mirror.
"""

from __future__ import annotations

import functools
import reprlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn.parameter import Parameter
from torch.storage import TypedStorage

from tensorpipe_ipc.errors import ProtocolError, UnsupportedLeaf
from tensorpipe_ipc.handlers import passed_a_handler
from tensorpipe_ipc.wire.dtypes import BY_CODE, BY_TORCH, Dtype
from tensorpipe_ipc.wire.layout import overlaps
from tensorpipe_ipc.wire.spec import BY_NAME, MAX_DEPTH, MAX_NODES, Op, Registered, is_too_nested

__all__ = ["Plan", "array_of"]

Buffer = bytes | memoryview
Build = Callable[[Iterator[torch.Tensor], Iterator[Any]], Any]


_ONE_TENSOR = bytes([Op.TENSOR])
_MOST_SAID = 300  # characters of what arrived that an error repeats
_FEW_KEYS = 8  # of a dict, which cannot cost much, however they hash; and a dict's least size
_MOST_ALIKE = 4  # keys of one hash: -1 and -2 have one, and numbers that are 2**61 - 1 apart
_MOST_LOOKS = (
    48  # a key, on average; by chance there are 0.7 in vain, and up to 21 of multiples of a large power of two
)
_SIZE_MASK = (1 << 64) - 1


class Plan:
    """The plan by which trees of one spec are built. It is made and checked at a stream's first message, and used for each.

    Attributes:
        leaves: how many leaves the spec has.
        values: how many values.
        made: how many nodes something is made for, which is kept: all but values and plain leaves.
        is_leaf: whether the tree is one plain tensor and nothing else.
    """

    def __init__(self, spec: Buffer) -> None:
        """Check a spec, and make nothing of it yet.

        Raises:
            ProtocolError: the bytes are no spec, are too deep or hold too many nodes.
            UnsupportedLeaf: it names a type that is not registered here, or has other fields.
        """
        self.leaves, self.values, self.made = _check(spec)
        self.is_leaf = spec == _ONE_TENSOR
        self._spec = spec
        self._build: Build | None = None
        self._build_arrays: Build | None = None
        self._kinds: bytearray | None = None

    @property
    def kinds(self) -> bytearray:
        """The op of each leaf, in the order of the spec. Found when first asked for: not of a message that is refused."""
        if self._kinds is None:
            self._kinds = bytearray()
            _check(self._spec, self._kinds)
        return self._kinds

    def build(self, leaves: Sequence[torch.Tensor], values: Sequence[Any], *, as_numpy: bool = False) -> Any:
        """Put a tree together.

        Args:
            leaves: ``self.leaves`` tensors, in the order of the spec. They become part of the tree.
            values: ``self.values`` values.
            as_numpy: whether tensors become NumPy arrays on their memory.

        Raises:
            UnsupportedLeaf: a tensor that is to become an array is of a dtype or a layout that NumPy lacks.
            ProtocolError: a leaf or value does not fit its place (a gradient on integers, a complex number of strings),
                or a dict has a key twice.
        """
        if len(leaves) != self.leaves or len(values) != self.values:
            raise ProtocolError(
                f"{len(leaves)} leaves and {len(values)} values for a tree of {self.leaves} and {self.values}"
            )
        if as_numpy:
            build = self._build_arrays = self._build_arrays or _read(self._spec, 0, _ARRAY_READERS)[0]
        else:
            build = self._build = self._build or _read(self._spec, 0, _READERS)[0]
        try:
            return build(iter(leaves), iter(values))
        except (TypeError, ValueError, RuntimeError, AttributeError, OverflowError, LookupError) as error:
            if isinstance(error, (ProtocolError, UnsupportedLeaf)) or passed_a_handler(error.__traceback__):
                raise
            raise ProtocolError(
                f"a leaf or value does not fit its place in the tree: {str(error)[:_MOST_SAID]}"
            ) from None


def _check(spec: Buffer, kinds: bytearray | None = None) -> tuple[int, int, int]:
    """Count a spec's leaves, values, and nodes that something is made for, and raise if it is none. Allocates next to nothing.

    Args:
        kinds: gets the op of each leaf.
    """
    at = leaves = values = nodes = made = 0
    open_counts = [1]
    while open_counts:
        if not open_counts[-1]:
            open_counts.pop()
            continue
        open_counts[-1] -= 1
        nodes += 1
        if nodes > MAX_NODES:
            raise ProtocolError(f"a tree of over {MAX_NODES:,} nodes")
        op = _byte(spec, at)
        at += 1
        if op <= Op.STR:
            values += (op != Op.NONE) + (op == Op.COMPLEX)
        elif Op.TENSOR <= op <= Op.UNTYPED:
            leaves += 1
        elif op < Op.LIST:
            made += 1
            leaves += op == Op.TYPED
            at = _check_constant(spec, op, at)
            values += 1 + BY_CODE[spec[at - 1]].torch.is_complex if op == Op.SCALAR else 0
        elif op <= Op.CUSTOM:
            made += 1
            count, at = _check_container(spec, op, at)
            open_counts.append(count)
            if len(open_counts) > MAX_DEPTH + 1:
                raise ProtocolError(f"a tree nested deeper than {MAX_DEPTH} containers")
        else:
            raise ProtocolError(f"unknown node 0x{op:02x} at byte {at - 1} of the spec")
        if kinds is not None and Op.TENSOR <= op <= Op.TYPED:
            kinds.append(op)
    if at != len(spec):
        raise ProtocolError(f"{len(spec) - at} bytes after the end of the spec")
    return leaves, values, made


def _check_constant(spec: Buffer, op: int, at: int) -> int:
    """Check a node that says more than its kind and has no nodes in it. Return where it ends."""
    if op in (Op.TYPED, Op.DTYPE, Op.SCALAR):
        row = BY_CODE.get(_byte(spec, at))
        if row is None or (op == Op.SCALAR and row.numpy is None):
            raise ProtocolError(f"dtype code {spec[at]} is not in the table")
        return at + 1
    if op == Op.DEVICE:
        end = _skip(spec, at)
        _read_device(spec[at + 2 : end])
        return end
    if op == Op.SIZE:
        count, at = _count(spec, at, 8)
        return at + 8 * count
    raise ProtocolError(f"unknown node 0x{op:02x} at byte {at - 1} of the spec")


def _check_container(spec: Buffer, op: int, at: int) -> tuple[int, int]:
    if op == Op.ORDERED:
        if _byte(spec, at) != Op.DICT:
            raise ProtocolError(f"node 0x{spec[at]:02x} in an ordered dict, which begins with a dict")
        return 2, at
    if op in (Op.NAMEDTUPLE, Op.DATACLASS, Op.CUSTOM):
        return _check_registered(spec, op, at)
    count, at = _count(spec, at, 1 if op in (Op.LIST, Op.TUPLE) else 3)
    if op == Op.DICT:
        for _ in range(count):
            end = _skip(spec, at)
            _read_key(spec[at + 2 : end])
            at = end
    return count, at


def _check_registered(spec: Buffer, op: int, at: int) -> tuple[int, int]:
    end = _skip(spec, at)
    name = _text(spec[at + 2 : end])
    entry = BY_NAME.get(name)
    if entry is None:
        raise UnsupportedLeaf(
            f"the message holds a {name[:_MOST_SAID]!r}, which is not registered here: call register_type()"
        )
    if Op.CUSTOM in (op, entry.op):
        if op != entry.op:
            raise UnsupportedLeaf(
                f"the message's {name!r} is made by from_= on one end only: register it alike on both"
            )
        return 1, end
    count, at = _count(spec, end, 3)
    if (entry.op, len(entry.fields)) != (op, count):
        raise UnsupportedLeaf(f"the message's {name!r} has {count} fields, the one registered here {entry.fields}")
    for field in entry.fields:
        end = _skip(spec, at)
        if _text(spec[at + 2 : end]) != field:
            raise UnsupportedLeaf(f"the message's {name!r} has another field in the place of {field!r}")
        at = end
    return count, at


def _byte(spec: Buffer, at: int) -> int:
    if at >= len(spec):
        raise ProtocolError(f"spec cut short at byte {at}")
    return spec[at]


def _count(spec: Buffer, at: int, least: int) -> tuple[int, int]:
    """Return a count, and where what it counts begins. ``least``: bytes that each of them takes at least."""
    if at + 4 > len(spec):
        raise ProtocolError(f"spec cut short at byte {at}")
    count = int.from_bytes(spec[at : at + 4], "little")
    if count * least > len(spec) - at - 4:
        raise ProtocolError(f"a count of {count} at byte {at} of the spec, with {len(spec) - at - 4} bytes left")
    return count, at + 4


def _skip(spec: Buffer, at: int) -> int:
    """Past a key or name."""
    end = at + 2 + int.from_bytes(spec[at : at + 2], "little")
    if at + 2 > len(spec) or end > len(spec):
        raise ProtocolError(f"spec cut short at byte {at}")
    return end


def _read(spec: Buffer, at: int, readers: dict[int, Build]) -> tuple[Build, int]:
    """Return the builder of the node at ``at``, and where the next node begins. The spec has passed ``_check``."""
    op = spec[at]
    at += 1
    simple = readers.get(op)
    if simple is not None:
        return simple, at
    if op == Op.SCALAR:
        return _scalar_reader(BY_CODE[spec[at]]), at + 1
    if op == Op.TYPED:
        return _typed_storage_reader(BY_CODE[spec[at]].torch), at + 1
    if op == Op.DTYPE:
        return _constant(BY_CODE[spec[at]].torch), at + 1
    if op == Op.DEVICE:
        end = _skip(spec, at)
        return _constant(_read_device(spec[at + 2 : end])), end
    if op == Op.SIZE:
        count, at = _count(spec, at, 8)
        return _constant(torch.Size(struct.unpack_from(f"<{count}q", spec, at))), at + 8 * count
    return _read_container(spec, op, at, readers)


def _read_container(spec: Buffer, op: int, at: int, readers: dict[int, Build]) -> tuple[Build, int]:
    name = ""
    if op == Op.ORDERED:
        items, at = _read(spec, at, readers)
        attributes, at = _read(spec, at, readers)
        return _ordered_reader(items, attributes), at
    if op in (Op.NAMEDTUPLE, Op.DATACLASS, Op.CUSTOM):
        end = _skip(spec, at)
        name, at = _text(spec[at + 2 : end]), end
    if op == Op.CUSTOM:
        parts, at = _read(spec, at, readers)
        return _custom_reader(name, parts), at
    count, at = _count(spec, at, 1)
    keys: list[Any] = []
    if op not in (Op.LIST, Op.TUPLE):
        for _ in range(count):
            end = _skip(spec, at)
            if op == Op.DICT:
                keys.append(_read_key(spec[at + 2 : end]))
            at = end
    children = []
    for _ in range(count):
        child, at = _read(spec, at, readers)
        children.append(child)
    if op == Op.DICT:
        return _dict_reader(keys, children), at
    if op == Op.LIST:
        return _list_reader(children), at
    if op == Op.TUPLE:
        make = _list_reader(children)
        return (lambda leaves, values: tuple(make(leaves, values))), at
    return _registered_reader(BY_NAME[name], children), at


def _text(data: Buffer) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise ProtocolError(f"a name that is no UTF-8: {bytes(data[:40])!r}") from None


def _read_key(data: Buffer) -> Any:
    if is_too_nested(data):
        raise ProtocolError(f"a dict key of {len(data)} bytes that is nested too deeply, or too long for a tuple")
    try:
        return _frozen_key(msgspec.msgpack.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a dict key that is no msgpack: {error}") from None


def _frozen_key(key: Any) -> Any:
    if type(key) is list:
        return tuple(_frozen_key(item) for item in key)
    if key is None or type(key) in (str, int, bool, float, bytes):
        return key
    raise ProtocolError(f"a dict key of type {type(key).__name__}")


def _read_device(data: Buffer) -> torch.device:
    try:
        return torch.device(_text(data))
    except RuntimeError:
        raise ProtocolError(f"a device named {bytes(data[:40])!r}") from None


def _constant(value: Any) -> Build:
    return lambda leaves, values: value


def _list_reader(children: list[Build]) -> Build:
    count = len(children)
    if all(child is _next_leaf for child in children):
        return lambda leaves, values: list(islice(leaves, count))
    return lambda leaves, values: [child(leaves, values) for child in children]


def _see_that_they_spread(keys: list[Any]) -> None:
    """Refuse keys that a dict would look for again and again: made up by a peer, a megabyte of them takes it minutes.

    What a str or bytes hashes to nobody can know. Of numbers, and tuples of them, everybody can. So the looks that a dict
    takes are counted here, as it grows, by its own rule: twice as many lines as keys, and Ctrl-C is heard between them.
    """
    if sum(type(key) not in (str, bytes) for key in keys) <= _FEW_KEYS:
        return
    hashes = [hash(key) & _SIZE_MASK for key in keys]
    alike = sorted(hashes)
    if any(one == other for one, other in zip(alike, alike[_MOST_ALIKE:])):  # noqa: B905 - the second is shorter
        raise ProtocolError(f"over {_MOST_ALIKE} keys of a dict that hash alike")
    size = _FEW_KEYS
    while True:
        _count_looks(hashes[: size * 2 // 3], size - 1)
        if size * 2 // 3 >= len(hashes):
            return
        size *= 2


def _count_looks(hashes: list[int], mask: int) -> None:
    table, left = bytearray(mask + 1), _MOST_LOOKS * (len(hashes) + 4)
    for perturb in hashes:
        at = perturb & mask
        while table[at]:
            perturb >>= 5
            at = at * 5 + perturb + 1 & mask
            left -= 1
            if not left:
                raise ProtocolError(f"{len(hashes)} keys of a dict that take over {_MOST_LOOKS} looks each to find")
        table[at] = 1


def _dict_reader(keys: list[Any], children: list[Build]) -> Build:
    _see_that_they_spread(keys)
    if len(dict.fromkeys(keys)) != len(keys):
        raise ProtocolError("a dict with the same key twice")
    if all(child is _next_leaf for child in children):
        return lambda leaves, values: dict(zip(keys, leaves))  # noqa: B905 - leaves go on after the last key
    pairs = list(zip(keys, children, strict=True))
    return lambda leaves, values: {key: child(leaves, values) for key, child in pairs}


def _ordered_reader(items: Build, attributes: Build) -> Build:
    def build(leaves: Iterator[torch.Tensor], values: Iterator[Any]) -> OrderedDict[Any, Any]:
        made = OrderedDict(items(leaves, values))
        own = attributes(leaves, values)
        if own is not None:
            if type(own) is not dict or any(type(key) is not str or hasattr(OrderedDict, key) for key in own):
                raise ValueError("attributes of an ordered dict that would hide its own")
            vars(made).update(own)
        return made

    return build


def _custom_reader(name: str, parts: Build) -> Build:
    def build(leaves: Iterator[torch.Tensor], values: Iterator[Any]) -> Any:
        make = BY_NAME[name].from_
        if make is None:
            raise UnsupportedLeaf(f"the message's {name!r} is registered anew here, without from_=")
        return make(parts(leaves, values))

    return build


@functools.cache
def _scalar_reader(row: Dtype) -> Build:
    assert row.numpy is not None
    kind: Any = row.numpy.type
    if row.numpy.kind == "c":

        def build_complex(leaves: Iterator[torch.Tensor], values: Iterator[Any]) -> Any:
            with np.errstate(over="ignore"):
                return kind(_read_complex(leaves, values))

        return build_complex
    least, most = (np.iinfo(kind).min, np.iinfo(kind).max) if row.numpy.kind in "iu" else (0, 0)

    def build(_: Iterator[torch.Tensor], values: Iterator[Any]) -> Any:
        value = next(values)
        if type(value) is str or most and not (type(value) is int and least <= value <= most):
            said = value[:_MOST_SAID] if isinstance(value, (str, bytes)) else value
            raise ValueError(f"{reprlib.repr(said)} for a NumPy scalar of {row.numpy}")
        with np.errstate(over="ignore"):
            return kind(value)

    return build


def _registered_reader(entry: Registered, children: list[Build]) -> Build:
    fields, make = entry.fields, _list_reader(children)

    def cls() -> Any:
        """Return the class that has the name now: one that was defined anew (a notebook cell run again) replaces its elder."""
        now = BY_NAME[entry.name]
        if (now.op, now.fields) != (entry.op, fields):
            raise UnsupportedLeaf(f"the message's {entry.name!r} is registered anew here, with other fields")
        return now.cls

    if entry.op == Op.NAMEDTUPLE:
        return lambda leaves, values: tuple.__new__(cls(), make(leaves, values))

    def build(leaves: Iterator[torch.Tensor], values: Iterator[Any]) -> Any:
        instance: Any = object.__new__(cls())
        for field, value in zip(fields, make(leaves, values), strict=True):
            object.__setattr__(instance, field, value)
        return instance

    return build


def _next_leaf(leaves: Iterator[torch.Tensor], _: Iterator[Any]) -> torch.Tensor:
    return next(leaves)


def _dense(leaf: torch.Tensor) -> torch.Tensor:
    """Return a leaf whose bytes are counted one by one: an expanded one would be made as long as it says that it is."""
    if not leaf.is_contiguous():
        raise ValueError(
            f"{list(leaf.shape)} with strides {list(leaf.stride())} where bytes without gaps or overlaps belong"
        )
    return leaf


def _apart(leaf: torch.Tensor) -> torch.Tensor:
    """Return a leaf that becomes an array, whose items lie apart: whoever copies it gets no more than came."""
    if not leaf.is_contiguous() and overlaps(leaf.shape, leaf.stride()):
        raise ValueError(f"an array of {list(leaf.shape)} with strides {list(leaf.stride())}, whose items overlap")
    return leaf


@functools.cache
def _typed_storage_reader(dtype: torch.dtype) -> Build:
    def build(leaves: Iterator[torch.Tensor], _: Iterator[Any]) -> TypedStorage:
        return TypedStorage(wrap_storage=_dense(next(leaves)).untyped_storage(), dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]

    return build


def _read_complex(_: Iterator[torch.Tensor], values: Iterator[Any]) -> complex:
    return complex(float(next(values)), float(next(values)))


_READERS: dict[int, Build] = {
    Op.NONE: lambda leaves, values: None,
    Op.VALUE: lambda leaves, values: next(values),
    Op.INT: lambda leaves, values: int(next(values), 16),
    Op.COMPLEX: _read_complex,
    Op.STR: lambda leaves, values: next(values).encode("latin-1").decode("utf-8", "surrogatepass"),
    Op.TENSOR: _next_leaf,
    Op.TENSOR_GRAD: lambda leaves, values: next(leaves).requires_grad_(),
    Op.PARAMETER: lambda leaves, values: Parameter(next(leaves)),
    Op.FROZEN: lambda leaves, values: Parameter(next(leaves), requires_grad=False),
    Op.NDARRAY: lambda leaves, values: _apart(next(leaves)).numpy(),
    Op.BYTES: lambda leaves, values: _dense(next(leaves)).numpy().tobytes(),
    Op.UNTYPED: lambda leaves, values: _dense(next(leaves)).untyped_storage(),
}


def array_of(tensor: torch.Tensor) -> Any:
    """Return a NumPy array on a tensor's memory.

    Raises:
        UnsupportedLeaf: it is of a dtype or a layout that NumPy lacks.
    """
    row = BY_TORCH.get(tensor.dtype)  # of a quantized one there is none
    if row is None or row.numpy is None:
        raise UnsupportedLeaf(
            f"NumPy has no {tensor.dtype}: get it without as_numpy, or have the producer send .float() or .view(torch.uint8)"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested tensors" if tensor.is_nested else f"tensors of layout {tensor.layout}"
        raise UnsupportedLeaf(f"NumPy has no {layout}: get it without as_numpy, or have the producer send .to_dense()")
    return tensor.numpy()


_ARRAY_READERS: dict[int, Build] = {
    **_READERS,
    **dict.fromkeys(
        (Op.TENSOR, Op.TENSOR_GRAD, Op.PARAMETER, Op.FROZEN), lambda leaves, values: array_of(next(leaves))
    ),
}
