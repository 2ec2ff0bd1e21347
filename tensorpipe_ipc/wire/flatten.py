"""Trees, taken apart: ``flatten`` walks a tree once and gives its leaves, its values and its spec (see ``spec``).

Nothing is copied and nothing is pickled: what has no place on the wire is refused with its path and with advice.
``rebuild`` is the mirror.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.storage import TypedStorage, UntypedStorage

from tensorpipe_ipc.errors import OutOfMemory, UnsupportedLeaf
from tensorpipe_ipc.wire.dtypes import BY_NUMPY, BY_TORCH
from tensorpipe_ipc.wire.room import lacks_room
from tensorpipe_ipc.wire.spec import BY_TYPE, MAX_DEPTH, MAX_NODES, MAX_TEXT, METADATA, Op, is_too_nested

__all__ = ["KEYS", "Flat", "flatten", "kinds_of", "leaf_path", "may_be_tree"]

_U16 = struct.Struct("<H")
_COUNT = struct.Struct("<BI")
_OP = [bytes([op]) for op in range(Op.CUSTOM + 1)]
_TENSOR = _OP[Op.TENSOR]
_TOO_MANY = f"more than {MAX_NODES:,} nodes, which is the limit: does it hold the same containers many times?"
_FEW = 64  # values, besides four for each tensor
_VALUES = frozenset((bool, int, float, str, type(None)))
_MANY_VALUES = "many more numbers or strings than tensors"
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} containers, or it contains itself"


class Flat(NamedTuple):
    """A tree taken apart."""

    spec: list[bytes]  # pieces of the spec: joined, they are what the wire carries
    leaves: list[torch.Tensor]  # in the order of the spec; arrays and storages as tensors on the same memory
    values: list[Any]  # bool, int, float, str
    in_keys: list[int]  # of each tuple in a key: the nodes that it and its items count for
    nodes: list[int | None]  # ids of what may stand there twice, but tensors; None for what pickle keeps more of
    made: list[Any]  # for this tree alone: else the next object may have the same id
    by_to: bool  # see ``flatten``
    few: bool  # the same

    def is_plain(self, apart: bool) -> bool:
        """Return whether a copy of the tree is all that pickle would make of it.

        Pickle keeps what stands there twice one object, and what an instance of a registered type has besides its fields.

        Args:
            apart: whether each leaf is known to have memory of its own, and so to be another object.
        """
        nodes = self.nodes
        if not nodes:
            return apart or not self.has_one_twice()
        if apart:
            return None not in nodes and len(set(nodes)) == len(nodes)
        return None not in nodes and not self.has_one_twice()

    def has_one_twice(self) -> bool:
        """Return whether a container, tensor, array, storage or bytes object stands in the tree more than once."""
        nodes = [node for node in self.nodes if node is not None]
        return len({*nodes, *map(id, self.leaves)}) < len(nodes) + len(self.leaves)


def flatten(tree: Any, *, by_to: bool = True, few: bool = False) -> Flat:
    """Take a tree apart. Nothing is copied.

    Args:
        tree: any.
        by_to: call ``to`` of types that are registered with it. Else their instances cannot be sent.
        few: refuse a tree with many more numbers, strings and the like than tensors, before all of them were looked at. Pickle
            takes a small part of the time for them, and none for a schema that is new with each length of a list.

    Raises:
        UnsupportedLeaf: something in it cannot be sent; its path, its type and what to do are named.
    """
    flat = Flat([], [], [], [], [], [], by_to, few)
    _walk(tree, flat, 0)
    count = len(flat.spec) + sum(flat.in_keys)
    if count > MAX_NODES:
        raise UnsupportedLeaf(f"{count:,} nodes, the limit is {MAX_NODES:,}; send numbers as a tensor")
    return flat


def kinds_of(spec: Iterable[bytes]) -> list[int]:
    """Return the op of each leaf, of a spec in pieces."""
    return [piece[0] for piece in spec if Op.TENSOR <= piece[0] <= Op.TYPED]


def may_be_tree(node: Any) -> bool:
    """Return whether ``flatten`` takes an object of this type. It does not look inside."""
    kind = type(node)
    return kind in _WRITERS or kind in (dict, list, tuple) or kind in BY_TYPE or isinstance(node, TypedStorage)


def _walk(node: Any, flat: Flat, depth: int) -> None:
    kind = type(node)
    if kind is torch.Tensor:
        if node.requires_grad:
            _grad_tensor(node, flat)
        else:
            flat.spec.append(_OP[Op.TENSOR])
            flat.leaves.append(node)
        return
    writer = _WRITERS.get(kind)
    if writer is not None:
        writer(node, flat)
    elif depth >= MAX_DEPTH:
        raise UnsupportedLeaf(_TOO_DEEP)
    elif len(flat.spec) > MAX_NODES:  # before the end: what holds the same lists many times would take years
        raise UnsupportedLeaf(_TOO_MANY)
    elif flat.few and _has_many(flat):
        raise UnsupportedLeaf(_MANY_VALUES)
    elif kind is dict:
        if depth:
            flat.nodes.append(id(node))
        _walk_dict(node, flat, depth)
    elif kind is list or kind is tuple:
        if depth and (node or kind is list):  # there is but one ()
            flat.nodes.append(id(node))
        flat.spec.append(_COUNT.pack(Op.LIST if kind is list else Op.TUPLE, len(node)))
        _walk_items(node, flat, depth)
    else:
        _walk_other(node, flat, depth)


def _has_many(flat: Flat, more: int = 0) -> bool:
    return len(flat.values) + more > _FEW + 4 * len(flat.leaves)


def _see_few(flat: Flat, items: Iterable[Any], count: int) -> None:
    """See that a long container is none of values, as its first two items tell."""
    if all(type(item) in _VALUES for item in islice(items, 2)) and _has_many(flat, count):
        raise UnsupportedLeaf(_MANY_VALUES)


def _walk_dict(node: dict[Any, Any], flat: Flat, depth: int) -> None:
    if flat.few and len(node) > _FEW:
        _see_few(flat, node.values(), len(node))
    keys = [KEYS.get(key) if type(key) is str else None for key in node]
    flat.spec.append(
        _COUNT.pack(Op.DICT, len(node))
        + b"".join([known or _pack_key(key, flat) for known, key in zip(keys, node, strict=True)])
    )
    key: Any = None
    try:
        for key, child in node.items():  # noqa: B007 - the error's path needs it
            if type(child) is torch.Tensor and not child.requires_grad:
                flat.spec.append(_TENSOR)
                flat.leaves.append(child)
            else:
                _walk(child, flat, depth + 1)
    except UnsupportedLeaf as error:
        raise error.within(f"[{_shown(key)}]") from None


def _walk_items(node: Sequence[Any], flat: Flat, depth: int) -> None:
    if flat.few and len(node) > _FEW:
        _see_few(flat, node, len(node))
    index = 0
    try:
        for index, child in enumerate(node):  # noqa: B007 - the error's path needs it
            if type(child) is torch.Tensor and not child.requires_grad:
                flat.spec.append(_TENSOR)
                flat.leaves.append(child)
            else:
                _walk(child, flat, depth + 1)
    except UnsupportedLeaf as error:
        raise error.within(f"[{index}]") from None


def _walk_ordered(node: OrderedDict[Any, Any], flat: Flat, depth: int) -> None:
    if depth + 1 >= MAX_DEPTH:
        raise UnsupportedLeaf(_TOO_DEEP)
    flat.nodes.append(None)  # what shares its attributes is pickle's to keep
    flat.spec.append(_OP[Op.ORDERED])
    _walk_dict(node, flat, depth + 1)
    own = vars(node)
    if own.keys() - {METADATA}:
        raise UnsupportedLeaf(
            f"an OrderedDict with attributes {sorted(map(str, own))}: of those only a state_dict's {METADATA} is sent; "
            "delete the others, or send vars() of it beside it"
        )
    flat.made.append(dict(own) or None)
    try:
        _walk(flat.made[-1], flat, depth + 1)
    except UnsupportedLeaf as error:
        raise error.within(".__dict__") from None


def _walk_other(node: Any, flat: Flat, depth: int) -> None:
    entry = BY_TYPE.get(type(node))
    if entry is None:
        if type(node) is OrderedDict:
            _walk_ordered(node, flat, depth)
            return
        if isinstance(node, np.generic) and node.dtype in BY_NUMPY:  # np.longlong is another type of int64
            flat.nodes.append(None)
            _scalar(node, flat)
            return
        if isinstance(node, TypedStorage):  # torch.HalfStorage and its like are names for it
            _typed_storage(node, flat)
            return
        raise UnsupportedLeaf(_advice(node))
    if entry.to is not None:
        if not flat.by_to:
            raise UnsupportedLeaf(f"a {type(node).__qualname__}, which is not to be taken apart")
        flat.nodes.append(id(node))
        flat.spec.append(_OP[entry.op] + _name(entry.name))
        flat.made.append(entry.to(node))
        _walk(flat.made[-1], flat, depth + 1)
        return
    flat.nodes.extend((id(node), None))
    flat.spec.append(
        _OP[entry.op] + _name(entry.name) + struct.pack("<I", len(entry.fields)) + b"".join(map(_name, entry.fields))
    )
    for field in entry.fields:
        flat.made.append(getattr(node, field))
        try:
            _walk(flat.made[-1], flat, depth + 1)
        except UnsupportedLeaf as error:
            raise error.within(f".{field}") from None


KEYS: dict[str, bytes] = {}  # packed, of short ones
_KEYS_LIMIT = 1 << 14  # a stream has few keys; one of ever new keys starts over instead of growing


def _pack_key(key: Any, flat: Flat) -> bytes:
    try:
        data = msgspec.msgpack.encode(_plain_key(key, flat))
    except (OverflowError, UnicodeEncodeError) as error:
        raise UnsupportedLeaf(f"dict key {_shown(key)} cannot be written: {error}") from None
    if len(data) > MAX_TEXT:
        raise UnsupportedLeaf(f"a dict key of {len(data):,} bytes, the limit is {MAX_TEXT:,}")
    if is_too_nested(data):
        raise UnsupportedLeaf(f"a dict key of {len(data):,} bytes that is too long for a tuple; send a str or bytes")
    packed = _U16.pack(len(data)) + data
    if type(key) is str and len(data) <= 64:
        if len(KEYS) >= _KEYS_LIMIT:
            KEYS.clear()
        KEYS[key] = packed
    return packed


def _plain_key(key: Any, flat: Flat, depth: int = 0) -> Any:
    if type(key) is tuple:
        if depth >= MAX_DEPTH:
            raise UnsupportedLeaf(f"a dict key of tuples nested deeper than {MAX_DEPTH}")
        flat.in_keys.append(1 + len(key))
        return [_plain_key(item, flat, depth + 1) for item in key]
    if key is None or type(key) in (str, int, bool, float, bytes):
        return key
    raise UnsupportedLeaf(
        f"a dict key is a {type(key).__name__}; keys may be str, int, bool, float, bytes, None and tuples of them"
    )


def _shown(key: Any) -> str:
    """Return a key of the types that may travel, as an error shows it."""
    try:
        return repr(key)
    except ValueError:  # Python shows no integer of over 4,300 digits
        return f"of type {type(key).__name__}"


def _name(name: str) -> bytes:
    data = name.encode()
    return _U16.pack(len(data)) + data


# -- single nodes: each writer appends one node to the spec


def _none(_: None, flat: Flat) -> None:
    flat.spec.append(_OP[Op.NONE])


def _value(node: Any, flat: Flat) -> None:
    flat.spec.append(_OP[Op.VALUE])
    flat.values.append(node)


def _int(node: int, flat: Flat) -> None:
    if -(1 << 63) <= node < 1 << 64:
        _value(node, flat)
    else:
        flat.spec.append(_OP[Op.INT])
        flat.values.append(hex(node))


def _complex(node: complex, flat: Flat) -> None:
    flat.spec.append(_OP[Op.COMPLEX])
    flat.values.extend((node.real, node.imag))


def _scalar(node: np.generic, flat: Flat) -> None:
    row = BY_NUMPY[node.dtype]
    flat.spec.append(bytes([Op.SCALAR, row.code]))
    value = node.item()
    flat.values.extend((value.real, value.imag) if type(value) is complex else (value,))


def _str(node: str, flat: Flat) -> None:
    try:
        node.encode()
    except UnicodeEncodeError:
        flat.spec.append(_OP[Op.STR])
        flat.values.append(node.encode("utf-8", "surrogatepass").decode("latin-1"))
    else:
        _value(node, flat)


def _dtype(node: torch.dtype, flat: Flat) -> None:
    row = BY_TORCH.get(node)
    if row is None:
        raise UnsupportedLeaf(f"{node} has no code on the wire; send its name, str({node})")
    flat.spec.append(bytes([Op.DTYPE, row.code]))


def _size(node: torch.Size, flat: Flat) -> None:
    flat.spec.append(_COUNT.pack(Op.SIZE, len(node)) + struct.pack(f"<{len(node)}q", *node))


def _device(node: torch.device, flat: Flat) -> None:
    flat.spec.append(_OP[Op.DEVICE] + _name(str(node)))


def _leaf(op: int, tensor: torch.Tensor, flat: Flat) -> None:
    flat.spec.append(_OP[op])
    flat.leaves.append(tensor)


def _grad_tensor(node: torch.Tensor, flat: Flat) -> None:
    if not node.is_leaf:
        raise UnsupportedLeaf("a tensor that requires_grad and has a history, which cannot travel; send .detach()")
    _leaf(Op.TENSOR_GRAD, node, flat)


def _parameter(node: Parameter, flat: Flat) -> None:
    _leaf(Op.PARAMETER if node.requires_grad else Op.FROZEN, node, flat)


def _ndarray(node: np.ndarray[Any, Any], flat: Flat) -> None:
    if node.dtype not in BY_NUMPY or not node.dtype.isnative:
        raise UnsupportedLeaf(_array_advice(node))
    flat.nodes.append(id(node))
    _leaf(Op.NDARRAY, _array_memory(node), flat)


def _array_memory(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor on the array's own memory, or on a copy where torch has no such view of it."""
    if array.dtype.char == "Q":  # C's unsigned long long: another name of uint64, which torch does not know
        array = array.view(np.uint64)
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = _copied(array)
    if array.flags.writeable:
        return torch.from_numpy(array)
    return torch.from_numpy(np.asarray(_ReadOnly(array)))  # torch warns of an array that says it is read-only


def _copied(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    nbytes = array.size * array.itemsize
    left = lacks_room(nbytes)
    if left is not None:
        raise _no_memory(array, f"{left:,} bytes of memory are left")
    try:
        copy: np.ndarray[Any, Any] = array.copy()  # ascontiguousarray() leaves a single item its odd stride
    except MemoryError as error:
        raise _no_memory(array, str(error)) from None
    return copy


def _no_memory(array: np.ndarray[Any, Any], why: str) -> OutOfMemory:
    return OutOfMemory(
        f"an array of shape {list(array.shape)} and strides {list(array.strides)} is copied to be sent, in "
        f"{array.size * array.itemsize:,} bytes: {why}; send it in parts. It was not sent"
    )


class _ReadOnly:
    """Shows a read-only array's memory as if it were writable, and keeps the array. Nobody writes to it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        shown = dict(array.__array_interface__)
        shown["data"] = (shown["data"][0], False)
        self.__array_interface__ = shown


def _bytes(node: bytes, flat: Flat) -> None:
    if len(node) > 1:  # shorter ones are the same for all of Python
        flat.nodes.append(id(node))
    _leaf(
        Op.BYTES,
        _array_memory(np.frombuffer(node, np.uint8)) if node else torch.empty(0, dtype=torch.uint8, device="cpu"),
        flat,
    )


def _untyped_storage(node: UntypedStorage, flat: Flat) -> None:
    flat.nodes.append(id(node))
    _leaf(Op.UNTYPED, _storage_memory(node), flat)


def _typed_storage(node: TypedStorage, flat: Flat) -> None:
    row = BY_TORCH.get(node.dtype)
    if row is None:
        raise UnsupportedLeaf(f"a typed storage of {node.dtype}, which has no code on the wire; send its bytes")
    flat.nodes.append(id(node))
    flat.spec.append(bytes([Op.TYPED, row.code]))
    flat.leaves.append(_storage_memory(node._untyped_storage))


def _storage_memory(storage: UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


_WRITERS: dict[type, Callable[[Any, Flat], None]] = {
    type(None): _none,
    bool: _value,
    int: _int,
    float: _value,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    torch.dtype: _dtype,
    torch.Size: _size,
    torch.device: _device,
    torch.Tensor: _leaf,  # type: ignore[dict-item]  # _walk has dealt with it; here it counts as a known type
    Parameter: _parameter,
    np.ndarray: _ndarray,
    np.memmap: _ndarray,
    UntypedStorage: _untyped_storage,
    TypedStorage: _typed_storage,
    **{dtype.type: _scalar for dtype in BY_NUMPY},
}


# -- what to say of what cannot be sent


def _advice(node: Any) -> str:
    kind = f"{type(node).__module__}.{type(node).__qualname__}"
    if isinstance(node, UninitializedParameter):
        return f"{kind} has no shape yet; initialise it before sending"
    if isinstance(node, torch.Tensor):
        return f"{kind} is a tensor subclass; send .as_subclass(torch.Tensor), or its parts"
    if isinstance(node, np.generic):
        return f"{kind} is a NumPy scalar that torch has no dtype for; send .item() or str() of it"
    if isinstance(node, np.ndarray):
        return f"{kind} is an array subclass; send np.asarray() of it"
    if dataclasses.is_dataclass(node) or (isinstance(node, tuple) and hasattr(node, "_fields")):
        return f"{kind} is not registered; call tensorpipe_ipc.register_type({type(node).__name__}) on both ends"
    for base in (dict, list, tuple, str, bytes, int, float, complex):
        if isinstance(node, base):
            return f"{kind} is a subclass of {base.__name__} and would lose its type; send {base.__name__}() of it"
    if isinstance(node, (set, frozenset, range)):
        return f"{kind} has no place on the wire; send list() of it"
    if isinstance(node, (bytearray, memoryview)):
        return f"{kind} has no place on the wire; send bytes() or torch.frombuffer() of it"
    return (
        f"{kind} cannot travel between unrelated processes (nothing is pickled there); send tensors, arrays, numbers, "
        "str, bytes and lists, tuples and dicts of them, or use a Queue, which pickles within one family of processes"
    )


def _array_advice(array: np.ndarray[Any, Any]) -> str:
    dtype = array.dtype
    if dtype.newbyteorder("=") in BY_NUMPY:
        return f"an array of {dtype.str!r}, foreign byte order; send .astype({dtype.newbyteorder('=').name!r})"
    if dtype.kind in "mM":
        return f"an array of {dtype}, which torch does not have; send .view('int64')"
    if dtype.hasobject:
        return f"an array of {dtype} holds Python objects; send a list, or an array of numbers"
    return f"an array of {dtype}, which torch does not have; send .astype() of a dtype it has, or .view('uint8')"


def leaf_path(tree: Any, index: int) -> str:
    """Return the path of leaf number ``index`` in the order of ``flatten``, as ``['mask'][3]``. It walks again: for errors."""
    return next(islice(_leaf_paths(tree, ""), index, None), "")


def _leaf_paths(node: Any, path: str) -> Iterator[str]:
    if type(node) in (dict, OrderedDict):
        for key, child in node.items():
            yield from _leaf_paths(child, f"{path}[{key!r}]")
    elif type(node) in (list, tuple):
        for index, child in enumerate(node):
            yield from _leaf_paths(child, f"{path}[{index}]")
    elif type(node) in BY_TYPE:
        entry = BY_TYPE[type(node)]
        if entry.to is not None:
            yield from _leaf_paths(entry.to(node), path)
        for field in entry.fields:
            yield from _leaf_paths(getattr(node, field), f"{path}.{field}")
    elif isinstance(node, (torch.Tensor, np.ndarray, bytes, UntypedStorage, TypedStorage)):
        yield path
