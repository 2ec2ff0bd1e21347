"""Putting by reference: whether a tree can go so into a queue, and what its message says then.

It can when its large tensors lie in one block that this process holds (made there, or a lease), and *nothing but the
tree's own tensors* lies there: no other tensor, storage, array or DLPack capsule that is still alive, here or in a
forked child. Afterwards these tensors are empty, so that nobody can write under the receiver's lease.

**Counting the aliases.** What keeps a block is, from the outside in::

    Python's names ─> tensor ─> TensorImpl ─┬─> StorageImpl ─> array ─> block
                       views: TensorImpl ───┤
                       base of a view ──────┘

* The array's references: as many as storages that the tree has on it. (Every tensor that is made on a block gets a
  buffer of its own, which holds the array once, and a mark. A storage without it holds another tensor, see ``wire.direct``.)
* Each storage's use count: the tree's tensors on it, the tensors of which they are views, and torch's Python object for
  the storage, which nobody else may refer to.
* Each TensorImpl's use count: its Python object, and the tree's views of it. Autograd or DLPack would be one more.

How many of its tensors' Python names there are does not matter: they all see it empty. Who says ``move`` knows that. But a
worker of a DataLoader puts a batch without saying so. That goes by reference, too, where nobody else has a
name for any part of it, and is copied where somebody has: a cache, say (``is_sole_reference``).

Which of these counts torch has, and what it counts, differs from one version to another. So they are not believed
before ``_counts`` has seen that they tell a tensor without aliases from one with each kind of alias. Where they do not,
everything is copied.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.memory.leases import Handover, Leases, Octets
from tensorpipe_ipc.wire.direct import is_marked, mark
from tensorpipe_ipc.wire.dtypes import WIDEST
from tensorpipe_ipc.wire.flatten import Flat, kinds_of
from tensorpipe_ipc.wire.layout import ALIGN, BULK, LEASE_FROM
from tensorpipe_ipc.wire.message import EncodedMessage
from tensorpipe_ipc.wire.spec import Op

__all__ = ["Frame", "handover_of", "is_sole_reference", "placed", "region_of", "values_and_frames"]

INLINE = (1 << 64) - 1  # the place of a frame whose bytes stand behind the places
_LENGTH = struct.Struct("<I")


def handover_of(flat: Flat, leases: Leases, *, offered: bool = False) -> Handover | None:
    """Return the block that a tree's large leaves lie in, if it can go by reference as far as its tensors say; else None.

    Args:
        offered: accept only a block that was offered for that.
    """
    strided = [leaf for leaf in flat.leaves if leaf.layout is torch.strided and leaf.device.type == "cpu"]
    large = max(strided, key=lambda leaf: leaf.nbytes, default=None)
    held = None if large is None else leases.find(large.untyped_storage().data_ptr())
    if held is None or not leases.may_leave(held.anchor) or (offered and held.anchor.word not in leases.offered):
        return None
    ours = [leaf for leaf in strided if held.has(leaf.untyped_storage().data_ptr())]
    nbytes = sum(leaf.nbytes for leaf in ours)
    if nbytes < LEASE_FROM or 2 * nbytes < held.nbytes:
        return None  # a small part of the block: a copy of it gives the block back
    if not _can_be_emptied(flat, ours) or not _counts():
        return None
    owners = _sole_owners(ours, held.anchor)
    if owners is None:
        return None
    places = list(map(_shown, ours))
    return Handover(held, functools.partial(_empty, owners), functools.partial(_are_sole_still, ours, places))


def _can_be_emptied(flat: Flat, ours: list[torch.Tensor]) -> bool:
    """Return whether all leaves are the caller's own tensors, not arrays, storages or parameters shown as tensors."""
    ids = {id(leaf) for leaf in ours}
    operations = kinds_of(flat.spec)
    return all(
        operation == Op.TENSOR and (torch.is_inference_mode_enabled() or not leaf.is_inference())
        for operation, leaf in zip(operations, flat.leaves, strict=True)
        if id(leaf) in ids
    )


def _empty(owners: Iterable[torch.Tensor]) -> None:
    for owner in owners:
        owner.set_()  # type: ignore[call-overload, unused-ignore]


def _shown(leaf: torch.Tensor) -> tuple[Any, ...]:
    """Return what a tensor shows: its place, shape, and so on."""
    flags = leaf.is_conj(), leaf.is_neg(), leaf.requires_grad
    return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), flags


def _are_sole_still(leaves: list[torch.Tensor], places: list[tuple[Any, ...]], array: weakref.ref[Any]) -> bool:
    """Return whether the leaves are still the sole owners, and show what they did: another thread may have changed them.

    The handover itself refers to the array and the bases by now.
    """
    return list(map(_shown, leaves)) == places and _sole_owners(leaves, array, callers=1) is not None


def _sole_owners(
    leaves: Iterable[torch.Tensor], lies_on: Callable[[], Any], *, callers: int = 0
) -> list[torch.Tensor] | None:
    """Return all tensors on an array, if they are only these leaves and the bases of those that are views; else None.

    Args:
        lies_on: returns the array.
        callers: the number of the caller's own references to the array, and to each base.
    """
    owners = {id(leaf): leaf for leaf in leaves}
    uses = dict.fromkeys(owners, 1)  # the expected use count of each TensorImpl: its Python object, and its views
    bases = {id(base): base for base in (leaf._base for leaf in owners.values()) if base is not None}
    for leaf in owners.values():
        if leaf._base is not None:
            uses[id(leaf._base)] = uses.get(id(leaf._base), 1) + 1
    for known in owners.keys() & bases.keys():
        del bases[known]
    together = [*owners.values(), *bases.values()]
    if [each._use_count() for each in together] != [uses[id(each)] for each in together]:  # type: ignore[attr-defined]
        return None
    storages = {storage._cdata: storage for storage in (each.untyped_storage() for each in together)}
    if not all(map(is_marked, storages.values())):
        return None
    lying = Counter(each.untyped_storage()._cdata for each in together)
    if any(torch._C._storage_Use_Count(address) != lying[address] + 1 for address in storages):
        return None
    del together  # or its references would be counted
    of_base, of_storage, of_object = _references_of_the_unknown()
    if any(count != of_base + callers for count in _references(bases)):
        return None
    if any(count != of_storage for count in _references(storages)):
        return None
    if _references({0: lies_on()}) != [len(storages) + of_object + callers]:
        return None
    return [*owners.values(), *bases.values()]


@functools.cache
def _references_of_the_unknown() -> tuple[int, int, int]:
    """Return Python's reference counts of a base, a storage and any object, if only one dict refers to each."""
    view = torch.empty(2, device="cpu")[1:]
    unknown: list[dict[int, Any]] = [{0: view._base}, {0: view.untyped_storage()}, {0: object()}]
    of_base, of_storage, of_object = (_references(each)[0] for each in unknown)
    return of_base, of_storage, of_object


def _references(objects: dict[int, Any]) -> list[int]:
    return [sys.getrefcount(each) for each in objects.values()]


_ALIASES: list[Callable[[torch.Tensor], Any]] = [
    lambda tensor: tensor[1:],
    lambda tensor: tensor.view(2, -1),
    lambda tensor: tensor.detach(),
    lambda tensor: tensor.data,
    lambda tensor: tensor.numpy(),
    lambda tensor: tensor.numpy().data,
    lambda tensor: np.asarray(tensor)[1:],
    lambda tensor: torch.from_numpy(tensor.numpy()),
    lambda tensor: np.from_dlpack(tensor),  # type: ignore[arg-type, unused-ignore]
    lambda tensor: tensor.__dlpack__(),
    lambda tensor: torch.utils.dlpack.from_dlpack(tensor),
    lambda tensor: tensor.untyped_storage(),
    lambda tensor: torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype),  # type: ignore[no-untyped-call]
    lambda tensor: (tensor * torch.ones(1, requires_grad=True, device="cpu")).sum(),
]


@functools.cache
def _counts() -> bool:
    """Return whether this torch's counts can be used: they show each kind of alias, and none where no alias exists."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about typed storages
            return all(map(_is_seen, _ALIASES))
    except (AttributeError, TypeError, RuntimeError) as error:
        reraise_from_handler(error)
        return False


def _is_seen(alias: Callable[[torch.Tensor], Any]) -> bool:
    tensor, array = _tensor_and_array()
    view = tensor[1:]
    alone = _sole_owners([tensor, view], array) and not _sole_owners([tensor], array)
    kept = alias(tensor)
    hidden = _sole_owners([tensor, view], array)
    if isinstance(kept, torch.Tensor) and kept._base is None and not kept.requires_grad:
        hidden = hidden or _sole_owners([kept], array)
    del kept, tensor
    return bool(alone and not hidden and _sole_owners([view], array))


def _tensor_and_array() -> tuple[torch.Tensor, Callable[[], Any]]:
    array = np.zeros(64, np.uint8)
    tensor = torch.frombuffer(memoryview(array)[:32], dtype=torch.float32)  # type: ignore[arg-type, unused-ignore]
    mark(tensor)
    return tensor, weakref.ref(array)


# ---- other references to the tree ----

_WITHOUT_TENSORS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def is_sole_reference(pair: Any) -> bool:
    """Return whether a tuple holds the only references to its containers and tensors.

    The tuple itself and each of its members may have one more: the variables of the DataLoader's worker that made the tuple.
    Return False also if the tuple contains an object of an unknown kind, which may hold tensors.
    """
    held: dict[int, int] = {}  # references from within the tree
    known: dict[int, Any] = {}
    if type(pair) is not tuple or not all(_found(each, held, known) for each in pair):
        return False
    _, _, alone = _references_of_the_unknown()
    named = set(map(id, pair))
    counts = zip(known, _references(known), strict=True)
    return all(count <= alone + held[key] + (key in named) for key, count in counts)


def _found(node: Any, held: dict[int, int], known: dict[int, Any]) -> bool:
    """Note a node and its content. Return whether all of it is of known kinds."""
    if type(node) is torch.Tensor or isinstance(node, (dict, list, tuple)):
        held[id(node)] = held.get(id(node), 0) + 1
        if id(node) in known:
            return True
        known[id(node)] = node
        if type(node) is torch.Tensor:
            return not vars(node)
        if type(node) not in (dict, list, tuple) and not _is_plain_tuple(node):
            return False
        if isinstance(node, dict) and not all(type(key) in _WITHOUT_TENSORS for key in node):
            return False
        return all(_found(each, held, known) for each in (node.values() if isinstance(node, dict) else node))
    if isinstance(node, np.ndarray) and type(node) not in (np.ndarray, np.memmap):
        return False  # it may have attributes
    return type(node) in _WITHOUT_TENSORS or (isinstance(node, (np.ndarray, np.generic)) and not node.dtype.hasobject)


def _is_plain_tuple(node: Any) -> bool:
    """Return whether it is a named tuple without attributes of its own: those are no items, and others may have them, too."""
    return isinstance(node, tuple) and hasattr(node, "_fields") and not hasattr(node, "__dict__")


# ---- the message ----


def placed(message: EncodedMessage, handover: Handover) -> bytes | None:
    """Return the bytes that replace the message's values, if its large frames lie in the block; else None.

    ::

        u32 n, values (n bytes) | u64 for each frame: its place in the payload, or INLINE | the frame that is INLINE
    """
    small = [payload for payload in message.payloads if 0 < len(payload) < BULK]
    large = [payload for payload in message.payloads if len(payload) >= BULK]
    frame, places = _packed(small, handover) if small else (b"", [])
    places += [_place(payload, handover) for payload in large]
    if INLINE in places[len(places) - len(large) :] or set(places) <= {INLINE}:
        return None
    return _LENGTH.pack(len(message.values)) + message.values + struct.pack(f"<{len(places)}Q", *places) + frame


def _packed(small: list[Any], handover: Handover) -> tuple[bytes, list[int]]:
    """Return the frame of the small payloads, and its place. The place is in the block if they lie there as in a frame."""
    pieces, end, first = list[bytes](), 0, _place(small[0], handover)
    as_in_a_frame = first != INLINE
    for payload in small:
        start = -(-end // ALIGN) * ALIGN
        pieces.append(bytes(start - end) + bytes(payload))
        end = start + len(payload)
        as_in_a_frame = as_in_a_frame and _place(payload, handover) == first + start
    return (b"", [first]) if as_in_a_frame else (b"".join(pieces), [INLINE])


def _place(payload: Any, handover: Handover) -> int:
    address = (
        ctypes.addressof(payload) if isinstance(payload, ctypes.Array) else np.frombuffer(payload, np.uint8).ctypes.data
    )
    place = address - handover.address
    # Anything may be looked at as complex128, on which torch's kernels crash at other places.
    is_crooked = address % WIDEST != 0
    return int(place) if 0 <= place <= handover.nbytes - len(payload) and not is_crooked else INLINE


def values_and_frames(said: memoryview, sizes: list[int], payload: Any) -> tuple[memoryview, list[Any]]:
    """Return the values and the frames of a message that ``placed`` wrote.

    Args:
        said: the bytes that ``placed`` returned.
        sizes: the sizes of the frames.
        payload: the block's payload.

    Raises:
        ProtocolError: ``placed`` did not write these bytes for frames of these sizes.
    """
    start = _LENGTH.size + (_LENGTH.unpack_from(said)[0] if len(said) >= _LENGTH.size else 0)
    end = start + 8 * len(sizes)
    if not sizes or end > len(said):
        raise ProtocolError(f"{len(said)} bytes that say where {len(sizes)} frames lie, and up to {end} are announced")
    places = struct.unpack_from(f"<{len(sizes)}Q", said, start)
    inline = said[end:]
    if len(inline) != (sizes[0] if places[0] == INLINE else 0) or INLINE in places[1:]:
        raise ProtocolError(f"{len(inline)} bytes behind the places of frames of {sizes}")
    for place, size in zip(places, sizes, strict=True):
        if place != INLINE and (place + size > len(payload) or place % WIDEST):
            raise ProtocolError(f"a frame of {size} bytes at {place} in a payload of {len(payload)}")
    frames = [
        memoryview(bytearray(inline)) if place == INLINE else Frame(payload, place, size)
        for place, size in zip(places, sizes, strict=True)
    ]
    return said[_LENGTH.size : start], frames


class Frame:
    """A part of a payload. Each slice has a buffer of its own, and so counts as one reference to the array."""

    __slots__ = ("_array", "_place", "_size")

    def __init__(self, array: Any, place: int, size: int) -> None:
        self._array, self._place, self._size = array, place, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        start, stop, _ = part.indices(self._size)
        return memoryview(self._array)[self._place + start : self._place + stop]


def region_of(payload: bytearray | Octets, serializer: Any) -> Any:
    """Return what the tensors of a payload may lie on. Each one's buffer must count as a reference; the arrays of a
    serializer's ``decode_in`` do."""
    if type(payload) is bytearray or hasattr(serializer, "decode_in"):
        return memoryview(payload)  # type: ignore[arg-type, unused-ignore]
    return Frame(payload, 0, len(payload))
