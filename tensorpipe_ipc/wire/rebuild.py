"""Trees, put together again: a ``Plan`` reads a spec (see ``spec``) once and builds each message's tree by it.

A spec that arrives is hostile until a first ``_Walk`` has checked it, which keeps nothing. A second one makes the builders,
once the message's frames are there. ``flatten`` is the mirror.
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
from tensorpipe_ipc.wire.layout import BULK, overlaps
from tensorpipe_ipc.wire.room import lacks_memory, see_room_to_take
from tensorpipe_ipc.wire.spec import BY_NAME, MAX_DEPTH, MAX_NODES, METADATA, Op, Registered, is_too_nested
from tensorpipe_ipc.wire.threads import alone_in_a_child

__all__ = ["Plan", "array_of", "cloned", "empty"]

Buffer = bytes | memoryview
Build = Callable[[Iterator[torch.Tensor], Iterator[Any]], Any]


_ONE_TENSOR = bytes([Op.TENSOR])
_MOST_SAID = 300  # characters of what arrived that an error repeats
_FEW_KEYS = 8  # of a dict, which cannot cost much, however they hash; and a dict's least size
# Looks for a key, on average. By chance there are 0.7 in vain, and up to 21 of multiples of a large power of two.
_MOST_LOOKS = 48
_SIZE_MASK = (1 << 64) - 1


class Plan:
    """The plan by which trees of one spec are built. It is made and checked at a stream's first message, and used for each.

    Attributes:
        leaves: how many leaves the spec has.
        values: how many values.
        has_storages: whether any leaf is a storage, whose bytes may be looked at as items of any dtype.
        made: how many nodes something is made for, which is kept: all but values and plain leaves.
        is_leaf: whether the tree is one plain tensor and nothing else.
    """

    def __init__(self, spec: Buffer) -> None:
        """Check a spec, and make nothing of it yet.

        Raises:
            ProtocolError: the bytes are no spec, are too deep or hold too many nodes.
            UnsupportedLeaf: it names a type that is not registered here, or has other fields.
        """
        walk = _Walk(spec)
        self.leaves, self.values, self.made = walk.leaves, walk.values, walk.made
        self.has_storages = walk.has_storages
        self.is_leaf = spec == _ONE_TENSOR
        self._spec = spec
        self._build: Build | None = None
        self._build_arrays: Build | None = None
        self._kinds: bytearray | None = None

    @property
    def kinds(self) -> bytearray:
        """The op of each leaf, in the order of the spec. Found when first asked for: not of a message that is refused."""
        if self._kinds is None:
            kinds = bytearray()
            _Walk(self._spec, kinds=kinds)
            self._kinds = kinds  # whole: another thread may ask meanwhile, and an exception may come
        return self._kinds

    @property
    def spec(self) -> bytes:
        """Return the spec."""
        return bytes(self._spec)

    def plain_dicts(self) -> tuple[dict[str, None], ...] | None:
        """Return the dicts, in order, with their keys alone, if there is nothing but plain tensors, values, None, lists,
        tuples, and dicts with str keys, each once; None if there is anything else."""
        dicts = list[dict[str, None]]()
        at = _see_plain(self.spec, 0, dicts)
        return tuple(dicts) if at == len(self._spec) else None

    def build(self, leaves: Sequence[torch.Tensor], values: Sequence[Any], *, as_numpy: bool = False) -> Any:
        """Put a tree together.

        Args:
            leaves: ``self.leaves`` tensors, in the order of the spec. They become part of the tree.
            values: ``self.values`` values.
            as_numpy: whether tensors become NumPy arrays on their memory.

        Raises:
            UnsupportedLeaf: a tensor that is to become an array is of a dtype or a layout that NumPy lacks.
            ProtocolError: a leaf or value does not fit its place (a gradient on integers, a complex number of lists),
                or a dict has a key twice.
        """
        if len(leaves) != self.leaves or len(values) != self.values:
            raise ProtocolError(
                f"{len(leaves)} leaves and {len(values)} values for a tree of {self.leaves} and {self.values}"
            )
        if as_numpy:
            build = self._build_arrays = self._build_arrays or _Walk(self._spec, _ARRAY_READERS).build
        else:
            build = self._build = self._build or _Walk(self._spec, _READERS).build
        try:
            return build(iter(leaves), iter(values))
        except (TypeError, ValueError, RuntimeError, AttributeError, OverflowError, LookupError) as error:
            says_nothing_of_it = isinstance(error, RecursionError) or lacks_memory(error)  # both may be RuntimeErrors
            is_known = isinstance(error, (ProtocolError, UnsupportedLeaf))
            if is_known or says_nothing_of_it or passed_a_handler(error.__traceback__):
                raise
            raise ProtocolError(
                f"a leaf or value does not fit its place in the tree: {str(error)[:_MOST_SAID]}"
            ) from None


def _see_plain(spec: bytes, at: int, dicts: list[dict[str, None]]) -> int:
    """Return where a node ends that ``_Walk`` has checked, and add its dicts; -1 if it is not plain."""
    op, at = spec[at], at + 1
    if op in (Op.NONE, Op.VALUE, Op.TENSOR):
        return at
    if op not in (Op.LIST, Op.TUPLE, Op.DICT):
        return -1
    count, at = int.from_bytes(spec[at : at + 4], "little"), at + 4
    own = []
    for _ in range(count if op == Op.DICT else 0):
        end = at + 2 + int.from_bytes(spec[at : at + 2], "little")
        own.append(msgspec.msgpack.decode(spec[at + 2 : end]))
        at = end
    if not all(type(key) is str for key in own) or len(set(own)) < len(own):
        return -1
    if op == Op.DICT:
        dicts.append(dict.fromkeys(own))
    for _ in range(count):
        at = _see_plain(spec, at, dicts)
        if at < 0:
            break
    return at


class _Walk:
    """A walk over a spec, which checks each node, and with readers makes its builder, too. Without, it keeps nothing.

    Attributes:
        leaves, values, made, has_storages: as of a ``Plan``.
        build: what builds the tree.
    """

    def __init__(self, spec: Buffer, readers: dict[int, Build] | None = None, kinds: bytearray | None = None) -> None:
        """
        Args:
            readers: what builds a node that says no more than its kind.
            kinds: gets the op of each leaf.
        """
        self._spec, self._makes, self._readers, self._kinds = spec, readers is not None, readers or _READERS, kinds
        self._at = self._nodes = self.leaves = self.values = self.made = 0
        self.has_storages = False
        self.build = self._node(0)
        if self._at != len(spec):
            raise ProtocolError(f"{len(spec) - self._at} bytes after the end of the spec")

    def _node(self, depth: int) -> Build:
        """Return the builder of the next node."""
        self._see(1)
        op = self._peek()
        self._at += 1
        if Op.TENSOR <= op <= Op.TYPED:
            self.leaves += 1
            self.has_storages = self.has_storages or op >= Op.UNTYPED
            if self._kinds is not None:
                self._kinds.append(op)
        elif op <= Op.STR:
            self.values += (op != Op.NONE) + (op == Op.COMPLEX)
        simple = self._readers.get(op)
        if simple is not None:
            return simple
        self.made += 1
        if op < Op.LIST:
            return self._constant(op)
        if op > Op.CUSTOM:
            raise ProtocolError(f"unknown node 0x{op:02x} at byte {self._at - 1} of the spec")
        if depth >= MAX_DEPTH:
            raise ProtocolError(f"a tree nested deeper than {MAX_DEPTH} containers")
        return self._container(op, depth + 1)

    def _constant(self, op: int) -> Build:
        """Return the builder of a node that says more than its kind and has no nodes in it."""
        if op in (Op.TYPED, Op.DTYPE, Op.SCALAR):
            row = BY_CODE.get(self._peek())
            if row is None or (op == Op.SCALAR and row.numpy is None):
                raise ProtocolError(f"dtype code {self._peek()} is not in the table")
            self._at += 1
            if op == Op.SCALAR:
                self.values += 1 + row.torch.is_complex
                return _scalar_reader(row)
            return _typed_storage_reader(row.torch) if op == Op.TYPED else _constant(row.torch)
        if op == Op.DEVICE:
            return _constant(_read_device(self._text()))
        if op == Op.SIZE:
            count, at = self._count(8), self._at
            self._at += 8 * count
            sizes = struct.unpack_from(f"<{count}q", self._spec, at) if self._makes else ()
            return _constant(torch.Size(sizes))
        raise ProtocolError(f"unknown node 0x{op:02x} at byte {self._at - 1} of the spec")

    def _container(self, op: int, depth: int) -> Build:
        entry: Registered | None = None
        if op == Op.ORDERED:
            count = 2
            if self._peek() != Op.DICT:
                raise ProtocolError(f"node 0x{self._peek():02x} in an ordered dict, which begins with a dict")
        elif op in (Op.NAMEDTUPLE, Op.DATACLASS, Op.CUSTOM):
            entry, count = self._registered(op)
        else:
            count = self._count(3 if op == Op.DICT else 1)
        keys, children = list[Any](), list[Build]()
        for _ in range(count if op == Op.DICT else 0):
            key = self._key(self._text())
            if self._makes:
                keys.append(key)
        for _ in range(count):
            child = self._node(depth)
            if self._makes:
                children.append(child)
        return _container_reader(op, entry, keys, children) if self._makes else _next_leaf

    def _registered(self, op: int) -> tuple[Registered, int]:
        """Return what a registered type's name stands for, and how many nodes follow."""
        name = _decoded(self._text())
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
            return entry, 1
        count = self._count(3)
        if (entry.op, len(entry.fields)) != (op, count):
            raise UnsupportedLeaf(f"the message's {name!r} has {count} fields, the one registered here {entry.fields}")
        for field in entry.fields:
            if _decoded(self._text()) != field:
                raise UnsupportedLeaf(f"the message's {name!r} has another field in the place of {field!r}")
        return entry, count

    def _key(self, data: Buffer) -> Any:
        if is_too_nested(data):
            raise ProtocolError(f"a dict key of {len(data)} bytes that is nested too deeply, or too long for a tuple")
        try:
            return self._frozen(msgspec.msgpack.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a dict key that is no msgpack: {error}") from None

    def _frozen(self, key: Any) -> Any:
        if type(key) is list:
            self._see(1 + len(key))
            return tuple(self._frozen(item) for item in key)
        if key is None or type(key) in (str, int, bool, float, bytes):
            return key
        raise ProtocolError(f"a dict key of type {type(key).__name__}")

    def _see(self, nodes: int) -> None:
        """Count nodes: those of the tree, and each tuple of a key with its items."""
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise ProtocolError(f"a tree of over {MAX_NODES:,} nodes")

    def _peek(self) -> int:
        """Return the next byte, and stay before it."""
        if self._at >= len(self._spec):
            raise ProtocolError(f"spec cut short at byte {self._at}")
        return self._spec[self._at]

    def _count(self, least: int) -> int:
        """Return a count. ``least``: bytes that each of what it counts takes at least."""
        start = self._at + 4
        if start > len(self._spec):
            raise ProtocolError(f"spec cut short at byte {self._at}")
        count = int.from_bytes(self._spec[self._at : start], "little")
        if count * least > len(self._spec) - start:
            raise ProtocolError(
                f"a count of {count} at byte {self._at} of the spec, with {len(self._spec) - start} bytes left"
            )
        self._at = start
        return count

    def _text(self) -> Buffer:
        """Return a key's or name's bytes."""
        start = self._at + 2
        end = start + int.from_bytes(self._spec[self._at : start], "little")
        if start > len(self._spec) or end > len(self._spec):
            raise ProtocolError(f"spec cut short at byte {self._at}")
        self._at = end
        return self._spec[start:end]


def _decoded(data: Buffer) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise ProtocolError(f"a name that is no UTF-8: {bytes(data[:40])!r}") from None


def _read_device(data: Buffer) -> torch.device:
    try:
        return torch.device(_decoded(data))
    except RuntimeError:
        raise ProtocolError(f"a device named {bytes(data[:40])!r}") from None


def _container_reader(op: int, entry: Registered | None, keys: list[Any], children: list[Build]) -> Build:
    if op == Op.DICT:
        return _dict_reader(keys, children)
    if op == Op.ORDERED:
        return _ordered_reader(*children)
    make = _list_reader(children)
    if op == Op.LIST:
        return make
    if op == Op.TUPLE:
        return lambda leaves, values: tuple(make(leaves, values))
    assert entry is not None
    return _custom_reader(entry.name, *children) if op == Op.CUSTOM else _registered_reader(entry, make)


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
            if type(own) is not dict or own.keys() != {METADATA}:
                raise ProtocolError(f"attributes of an ordered dict that are not its {METADATA}")
            vars(made).update(own)
        return made

    return build


def _custom_reader(name: str, parts: Build) -> Build:
    def build(leaves: Iterator[torch.Tensor], values: Iterator[Any]) -> Any:
        make = BY_NAME[name].from_
        if make is None:
            raise UnsupportedLeaf(f"the message's {name!r} is registered anew here, without from_=")
        made = parts(leaves, values)
        try:
            return make(made)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, or what a foreign runtime raises: a peer made the parts up
            if isinstance(error, Exception) or passed_a_handler(error.__traceback__):
                raise
            raise ProtocolError(f"from_ of {name!r} raised {type(error).__name__}") from error

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


def _registered_reader(entry: Registered, make: Build) -> Build:
    fields = entry.fields

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


def _storage(leaf: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a leaf that is all of it: a serializer may have decoded to a part of a larger memory."""
    storage = _dense(leaf).untyped_storage()
    return storage if storage.nbytes() == leaf.nbytes else cloned(leaf, leaf.nbytes).untyped_storage()


# Torch fills new memory of all dtypes but this where algorithms are to be deterministic.
_NOT_FILLED = {getattr(torch, "float4_e2m1fn_x2", None)}


def empty(dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return a tensor without items, also of a dtype of which torch makes none where algorithms are to be deterministic."""
    if dtype in _NOT_FILLED:
        return torch.empty(0, dtype=torch.uint8, device=device).view(dtype).detach()
    return torch.empty(0, dtype=dtype, device=device)


@alone_in_a_child
def cloned(leaf: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return a copy of a leaf, of which so many bytes came: a sparse one does not say so itself.

    Raises:
        OutOfMemory: there is no memory for it.
    """
    if nbytes >= BULK:
        see_room_to_take(nbytes)
    if leaf.dtype in _NOT_FILLED:
        return leaf.view(torch.uint8).clone().view(leaf.dtype)
    return leaf.clone()


def _apart(leaf: torch.Tensor) -> torch.Tensor:
    """Return a leaf that becomes an array, whose items lie apart: whoever copies it gets no more than came."""
    if not leaf.is_contiguous() and overlaps(leaf.shape, leaf.stride()):
        raise ValueError(f"an array of {list(leaf.shape)} with strides {list(leaf.stride())}, whose items overlap")
    return leaf


@functools.cache
def _typed_storage_reader(dtype: torch.dtype) -> Build:
    def build(leaves: Iterator[torch.Tensor], _: Iterator[Any]) -> TypedStorage:
        return TypedStorage(wrap_storage=_storage(next(leaves)), dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]

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
    Op.UNTYPED: lambda leaves, values: _storage(next(leaves)),
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
