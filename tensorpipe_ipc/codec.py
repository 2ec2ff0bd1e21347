"""Codec: any object, to a message of a queue's and back.

A tree's message lies in one block (``wire.in_block``). What is no tree is pickled (``pickling``): then the tree is the list
of its leaves, and the pickle stands where the values would; a long one is the first of the leaves. If it has no leaves, the
pickle is the message. What goes by reference lies in its block already; where, its metadata say in the place of the values
(``moving``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tensorpipe_ipc import moving, pickling
from tensorpipe_ipc.errors import UnsupportedLeaf
from tensorpipe_ipc.memory.leases import Handover, Octets
from tensorpipe_ipc.memory.staging import arrival_of, staged
from tensorpipe_ipc.serializers import Serializer, serializer_named
from tensorpipe_ipc.serializers.narrowing import Narrowing, narrowing
from tensorpipe_ipc.transport import on_device
from tensorpipe_ipc.transport.shared_memory import LEASE_FROM, Decode, SharedMemoryQueue
from tensorpipe_ipc.wire.arrival import AS_SENT, Arrival
from tensorpipe_ipc.wire.flatten import flatten, may_be_tree
from tensorpipe_ipc.wire.in_block import (
    A_PICKLE,
    BY_REFERENCE,
    OFFERS,
    ON_DEVICE,
    PICKLED,
    in_one_block,
    metadata_of,
    parts_of,
)
from tensorpipe_ipc.wire.layout import Block
from tensorpipe_ipc.wire.message import Encoder, Outgoing, encode
from tensorpipe_ipc.wire.schema import ALIAS, schema_of

__all__ = ["Codec"]

_BRIEF = 1 << 12  # bytes of a pickle: as a leaf it costs as much as another tensor, and no two schemas are the same
_A_PICKLE = metadata_of(A_PICKLE, b"", b"")


class Codec:
    """What a queue's objects cross as.

    Attributes:
        narrowing: what narrows floats, None without a wire dtype.
        lender: who keeps GPU tensors on their GPU, None without ``cuda_ipc``.
    """

    def __init__(
        self, queue: SharedMemoryQueue, serializer: Serializer, narrowing: Narrowing | None, *, cuda_ipc: bool
    ) -> None:
        self._queue, self._serializer, self.narrowing = queue, serializer, narrowing
        self.lender = on_device.Lender(queue) if cuda_ipc else None
        self._in_one_block = in_one_block if self.lender is None else self.lender.in_one_block
        self._last_had_no_leaves = False

    def __reduce__(self) -> tuple[Any, ...]:
        wire_dtype = None if self.narrowing is None else self.narrowing.wire_dtype
        return _again, (self._queue, self._serializer.name, wire_dtype, self.lender is not None)

    def encode(self, obj: Any) -> tuple[Block, bytes]:
        """What is to be written into a block for an object, and its metadata.

        Raises:
            UnsupportedLeaf: a tensor with autograd history, say.
            Exception: whatever the object raises when it is pickled.
        """
        data, leaves, refused = None, list[Any](), None
        if self._last_had_no_leaves:  # a queue's objects are much alike: this one may have none, too
            data = _pickled_without_leaves(obj)
        if data is None and not may_be_tree(obj):
            data, leaves = pickling.dump(obj)
        if data is None:
            try:
                message = encode(obj, staged(self.narrowing or self._serializer))
            except UnsupportedLeaf as error:
                refused, (data, leaves) = error, pickling.dump(obj)
        self._last_had_no_leaves = not (leaves if data is not None else message.payloads)
        if data is None:
            return self._in_one_block(message, 0)
        if leaves:
            return self._in_one_block(self._encode_pickled(obj, data, leaves, refused), PICKLED)
        return Block([data], len(data), None), _A_PICKLE

    def _encode_pickled(self, obj: Any, data: bytes, leaves: list[Any], refused: UnsupportedLeaf | None) -> Outgoing:
        try:
            return _with_pickle(data, leaves, staged(self.narrowing or self._serializer))
        except UnsupportedLeaf as error:
            # Its path is not the caller's, and its reason may be one of the pickle's making.
            if refused is not None and (refused.reason == error.reason or _is_tree(obj)):
                raise refused from None
            raise UnsupportedLeaf(f"in {type(obj).__qualname__}: {error.reason}") from error.__cause__

    def handed_over(self, obj: Any, *, offered: bool) -> tuple[Handover, bytes] | None:
        """The block that an object can go by reference with, and its metadata; None if it cannot, or was not to
        (``offered``: only a block that was offered for that)."""
        try:
            data, flat = None, flatten(obj)
        except UnsupportedLeaf:
            data, leaves = pickling.dump(obj)
            try:
                flat = flatten(leaves)
            except UnsupportedLeaf:
                return None  # the usual way says what is wrong
        handover = moving.handover_of(flat, self._queue.leases, offered=offered)
        if handover is None or sum(leaf.nbytes for leaf in flat.leaves) < LEASE_FROM:
            return None
        message = encode(obj, self._serializer) if data is None else _with_pickle(data, leaves, self._serializer)
        said = moving.placed(message, handover)
        flags = BY_REFERENCE if data is None else BY_REFERENCE | PICKLED
        return None if said is None else (handover, metadata_of(flags, message.schema, said))

    def decode_as(self, restore: bool, as_numpy: bool, device: Any) -> Decode:
        """What makes an object of a message, for one get.

        Raises:
            ValueError: ``device`` names none, or goes with ``as_numpy``.
        """
        if restore and not as_numpy and device is None:
            return self.decode
        return functools.partial(self.decode, arrival=arrival_of(restore, as_numpy, device))

    def decode(self, metadata: bytes, payload: bytearray | Octets, *, arrival: Arrival = AS_SENT) -> Any:
        """The object of a message.

        Raises:
            ProtocolError: the bytes are no message.
            UnsupportedLeaf: ``as_numpy``, and a tensor is of a dtype that NumPy lacks.
            Exception: whatever the object raises when it is made again.
        """
        if metadata == _A_PICKLE:
            return pickling.load(payload)
        how, read, said = parts_of(metadata)
        schema, values = schema_of(read), memoryview(said)
        if how & (ON_DEVICE | OFFERS):
            told = on_device.said_of(said)
            values = memoryview(told.values)
            if how & OFFERS:
                on_device.answer(self._queue, told, arrival)
        if how & BY_REFERENCE:
            values, frames = moving.values_and_frames(values, schema.frame_sizes(), payload)
        if how & PICKLED:
            data, values = values, values[:0]
        if how & ON_DEVICE:
            tree = on_device.tree_of(told, values, schema, payload, self._serializer, arrival)
            if type(tree) is on_device.Undeliverable:
                return tree
        elif how & BY_REFERENCE:
            tree = schema.tree(values, frames, self._serializer, ALIAS, arrival)
        else:
            # Each payload's buffer must count, see ``moving``; but those of ``decode_in`` are arrays, which do.
            many = hasattr(self._serializer, "decode_in") or type(payload) is bytearray
            region: Any = memoryview(payload) if many else moving.Frame(payload, 0, len(payload))  # type: ignore[arg-type, unused-ignore]
            tree = schema.tree_in(values, region, self._serializer, arrival)
        if not how & PICKLED:
            return tree
        return pickling.load(data, tree) if data else pickling.load(tree[0], tree[1:])


def _pickled_without_leaves(obj: Any) -> bytes | None:
    """An object's pickle; None where it has leaves, or cannot be pickled: it may still be a tree."""
    try:
        return pickling.dump_without_leaves(obj)
    except Exception:
        return None


def _is_tree(obj: Any) -> bool:
    try:
        flatten(obj)
    except UnsupportedLeaf:
        return False
    return True


def _again(queue: SharedMemoryQueue, serializer: str, wire_dtype: torch.dtype | None, cuda_ipc: bool) -> Codec:
    named = serializer_named(serializer)
    return Codec(queue, named, narrowing(named, wire_dtype), cuda_ipc=cuda_ipc)


def _with_pickle(data: bytes, leaves: list[Any], encoder: Encoder) -> Outgoing:
    """The message of a pickle and its leaves."""
    if len(data) > _BRIEF:
        return encode([data, *leaves], encoder)
    return encode(leaves, encoder, data)
