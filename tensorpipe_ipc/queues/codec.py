"""Codec: it turns any object into a queue's message, and back.

A tree's message lies in one block (``wire.in_block``). An object that is not a tree is pickled (``pickling``): then the
message's tree is the list of its leaves, and the pickle stands in the place of the values. A long pickle is the first leaf
instead. If the object has no leaves, the pickle is the message. An object that goes by reference lies in its block already:
its metadata give the places of its leaves instead of the values (``handover.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parameter import Parameter
from torch.storage import UntypedStorage

from tensorpipe_ipc.cuda import on_device
from tensorpipe_ipc.cuda.staging import arrival_of, staged
from tensorpipe_ipc.errors import Full, SharedMemoryError, ShutDown, UnsupportedLeaf
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.memory.handover import handover_of, placed, region_of, values_and_frames
from tensorpipe_ipc.memory.leases import Handover, Octets
from tensorpipe_ipc.queues import pickling
from tensorpipe_ipc.queues.pickling import Handle, Pickled, is_shared_by_torch
from tensorpipe_ipc.serializers import Serializer, limited, serializer_named
from tensorpipe_ipc.serializers.narrowing import Narrowing, narrowing
from tensorpipe_ipc.shared_queue.shared_memory import LEASE_FROM, Decode, SharedMemoryQueue
from tensorpipe_ipc.wire.arrival import AS_SENT, DecodeOptions
from tensorpipe_ipc.wire.direct import mark
from tensorpipe_ipc.wire.flatten import Flat, flatten, may_be_tree
from tensorpipe_ipc.wire.in_block import (
    A_PICKLE,
    BY_REFERENCE,
    OFFERS,
    ON_DEVICE,
    PICKLED,
    in_one_block,
    metadata_of,
    one_tensor_in_block,
    parts_of,
)
from tensorpipe_ipc.wire.layout import Block
from tensorpipe_ipc.wire.message import EncodedMessage, Encoder, encode
from tensorpipe_ipc.wire.metas import TensorMeta
from tensorpipe_ipc.wire.rebuild import array_of
from tensorpipe_ipc.wire.schema import ALIAS, keep, schema_of

__all__ = ["Apart", "Codec", "Payload"]

# Bytes of a pickle: only a longer one is a leaf. A leaf costs as much as another tensor, and makes each schema a new one.
_BRIEF = 1 << 12
_A_PICKLE = metadata_of(A_PICKLE, b"", b"")
_MOST_ALONE = 1024
_alone: dict[bytes, TensorMeta] = {}  # by metadata: of messages that were one tensor, as it was sent
_NOT_PUT = (Full, ShutDown, SharedMemoryError)


# An object taken apart: the flat tree, or the pickle; and the storages of the leaves, if each has memory of its own.
Apart = tuple[Flat | None, Pickled | None, list[UntypedStorage] | None]


class Payload(Protocol):
    """The bytes to write into a block."""

    nbytes: int

    def write_into(self, place: memoryview) -> None:
        """Write all bytes into ``place``."""


class _Referring:
    """The payload of a message that refers to torch's shared memory.

    Attributes:
        handles: torch's handles of that memory.
        was_read: whether the payload was written in full: only then may the message have been put.
    """

    __slots__ = ("_payload", "handles", "nbytes", "was_read")

    def __init__(self, payload: Payload, handles: Sequence[Handle]) -> None:
        self.handles, self.nbytes, self._payload, self.was_read = handles, payload.nbytes, payload, False

    def write_into(self, place: memoryview) -> None:
        """Write all bytes into ``place``, and note it."""
        self._payload.write_into(place)
        self.was_read = True


class Codec:
    """Encodes a queue's objects to bytes, and decodes them.

    Attributes:
        is_everyday: whether the compiled path may encode and decode: by raw, and nothing is narrowed, or stays on a GPU.
        shared_by_torch: the number of storages sent by torch's own handle.
        narrowing: the serializer that narrows floats; None without a wire dtype.
        cuda_sender: the sender that keeps GPU tensors on their GPU; None without ``cuda_ipc``.
    """

    def __init__(
        self, queue: SharedMemoryQueue, serializer: Serializer, narrowing: Narrowing | None, *, cuda_ipc: bool
    ) -> None:
        pickling.watch_forks()
        serializer = limited(serializer, lambda: queue.arena.capacity)
        narrowing = Narrowing(serializer, narrowing.wire_dtype) if narrowing is not None else None
        self._queue, self._serializer, self.narrowing = queue, serializer, narrowing
        self.cuda_sender = on_device.CudaIpcSender(queue) if cuda_ipc else None
        self._in_one_block = in_one_block if self.cuda_sender is None else self.cuda_sender.in_one_block
        self._is_plain = narrowing is None and not cuda_ipc
        self._last_had_no_leaves = False
        self.is_everyday = self._is_plain and serializer.name == "raw"
        self.shared_by_torch = 0

    def __reduce__(self) -> tuple[Any, ...]:
        wire_dtype = None if self.narrowing is None else self.narrowing.wire_dtype
        return _again, (self._queue, self._serializer.name, wire_dtype, self.cuda_sender is not None)

    def take_apart(self, obj: Any) -> Apart:
        """Take an object apart: into a tree, if a tree keeps all that pickle keeps of it, or else into a pickle.

        Each object in it is reduced once at most. What takes a registered object apart may be called again.

        Raises:
            Exception: any error that the object raises when it is pickled.
        """
        if not self._last_had_no_leaves and may_be_tree(obj):  # a queue's objects are alike
            flat = _flat(obj, by_to=False, few=True)
            if flat is not None:
                apart, shared = _memory_of(flat.leaves)
                if not shared and flat.is_plain(apart is not None):
                    return flat, None, apart
        try:
            return None, pickling.dump(obj), None
        except Exception as error:
            reraise_from_handler(error)
            flat = _flat(obj) if may_be_tree(obj) else None
            if flat is None or flat.has_one_twice() or any(map(is_shared_by_torch, flat.leaves)):
                raise
            return flat, None, None  # it has registered types that pickle cannot find by name

    def encode(self, obj: Any, apart: Apart | None = None) -> tuple[Payload, bytes]:
        """Return the payload to write into a block for an object, and its metadata.

        Args:
            apart: the result of ``take_apart``, if the caller has called it already.

        Raises:
            UnsupportedLeaf: for example, a tensor has autograd history.
            Exception: any error that the object raises when it is pickled.
        """
        if apart is None and type(obj) is torch.Tensor and self._is_plain and obj.is_cpu and not obj.requires_grad:
            try:  # the most common object
                storage = obj.untyped_storage()
                is_shared = storage.is_shared()
            except (NotImplementedError, RuntimeError) as error:  # it has none
                reraise_from_handler(error)
                is_shared = True
            if not is_shared:
                self._last_had_no_leaves = False
                try:
                    return one_tensor_in_block(obj, storage, self._serializer)
                except UnsupportedLeaf:
                    pass  # what is to be done then stands below
        if apart is not None:
            flat, pickled, storages = apart
        elif type(obj) is torch.Tensor and not is_shared_by_torch(obj):
            flat, pickled, storages = None, None, None
        else:
            flat, pickled, storages = self.take_apart(obj)
        if pickled is None:
            try:
                message = encode(
                    obj, staged(self.narrowing or self._serializer), b"", flat, apart=storages, arrays=False
                )
            except UnsupportedLeaf:
                pickled = pickling.dump(obj)
            else:
                self._last_had_no_leaves = not message.payloads
                return self._in_one_block(message, 0)
        return self._encode_pickled(obj, pickled)

    def _encode_pickled(self, obj: Any, pickled: Pickled) -> tuple[Payload, bytes]:
        data, leaves, handles = pickled
        self._last_had_no_leaves = not leaves
        if not leaves:
            payload: Payload = Block([data], len(data), None)
            return self._referring(payload, handles) if handles else payload, _A_PICKLE
        encoder = staged(self.narrowing or self._serializer)
        try:
            payload, metadata = self._in_one_block(_with_pickle(data, leaves, encoder), PICKLED)
        except UnsupportedLeaf as error:
            pickling.take_back(handles)
            # The error's path is one in the list of leaves, and its reason may concern the pickle: give the caller's own.
            refused = _refusal(obj, encoder)
            if refused is not None and (refused.reason == error.reason or _flat(obj) is not None):
                try:
                    raise refused from None
                finally:
                    del refused  # its traceback has this frame, which would keep the object until garbage is collected
            del refused
            raise UnsupportedLeaf(f"in {type(obj).__qualname__}: {error.reason}") from error.__cause__
        except BaseException:
            pickling.take_back(handles)
            raise
        return self._referring(payload, handles) if handles else payload, metadata

    def _referring(self, payload: Payload, handles: Sequence[Handle]) -> Payload:
        self.shared_by_torch += len(handles)
        return _Referring(payload, handles)

    def take_back(self, payload: Payload, error: BaseException) -> None:
        """Use up the handles of a message that was not put, so that no descriptor stays open for it.

        Args:
            error: the error that ended the put. If a signal's handler raised it, and the payload was written in full, the
                message may have been put: then the handles stay.
        """
        if type(payload) is _Referring and (isinstance(error, _NOT_PUT) or not payload.was_read):
            self.shared_by_torch -= len(payload.handles)
            pickling.take_back(payload.handles)

    def handed_over(self, obj: Any, apart: Apart, *, offered: bool) -> tuple[Handover, bytes] | None:
        """Return the block by which an object can go by reference, and its metadata; None if it must be copied.

        Args:
            offered: accept only a block that was offered for that.
        """
        flat, pickled, _ = apart
        if flat is None:
            assert pickled is not None
            flat = None if pickled[2] else _flat(list(pickled[1]))
            if flat is None:
                return None  # ``encode`` raises the error, or takes back handles that are not sent
        handover = handover_of(flat, self._queue.leases, offered=offered)
        if handover is None:
            return None
        try:
            if pickled is None:
                message, flags = encode(obj, self._serializer, b"", flat, arrays=False), BY_REFERENCE
            else:
                message, flags = _with_pickle(pickled[0], pickled[1], self._serializer), BY_REFERENCE | PICKLED
        except UnsupportedLeaf:  # of what lies beside it: ``encode`` sends that as a pickle, or raises the error
            return None
        placement = placed(message, handover)
        return None if placement is None else (handover, metadata_of(flags, message.schema, placement))

    def decode_as(self, restore: bool, as_numpy: bool, device: Any) -> Decode:
        """Return the function that one get uses to decode a message.

        Raises:
            ValueError: ``device`` names no device, or both ``device`` and ``as_numpy`` are given.
        """
        if restore and not as_numpy and device is None:
            return self.decode
        return functools.partial(self.decode, arrival=arrival_of(restore, as_numpy, device))

    def decode(self, metadata: bytes, payload: bytearray | Octets, *, arrival: DecodeOptions = AS_SENT) -> Any:
        """Return the object of a message.

        Raises:
            ProtocolError: the bytes are not a message.
            UnsupportedLeaf: ``as_numpy``, and NumPy lacks a tensor's dtype or layout.
            Exception: any error that the object raises when it is rebuilt.
        """
        meta = _alone.get(metadata)
        if meta is not None and arrival is AS_SENT:
            tensor = self._serializer.decode(meta, region_of(payload, self._serializer)[:])
            if len(payload) >= LEASE_FROM and self._serializer.zero_copy:
                mark(tensor)
            return tensor
        if metadata == _A_PICKLE:
            return pickling.load(payload, (), _as_wanted(arrival))
        how, read, placement = parts_of(metadata)
        schema, values = schema_of(read), memoryview(placement)
        if how & (ON_DEVICE | OFFERS):
            told = on_device.unpack_placement(placement)
            values = memoryview(told.values)
            if how & OFFERS:
                on_device.report_self_test(self._queue, told, arrival)
        if how & BY_REFERENCE:
            values, frames = values_and_frames(values, schema.frame_sizes(), payload)
        if how & PICKLED:
            data, values = values, values[:0]
        if how & ON_DEVICE:
            tree = on_device.tree_of(told, values, schema, payload, self._serializer, arrival)
            if type(tree) is on_device.Undeliverable:
                return tree
        elif how & BY_REFERENCE:
            tree = schema.tree(values, frames, self._serializer, ALIAS, arrival)
        else:
            tree = schema.tree_in(values, region_of(payload, self._serializer), self._serializer, arrival)
            if not how and arrival is AS_SENT and not placement and (meta := schema.meta_of_one()) is not None:
                if len(_alone) >= _MOST_ALONE:  # a stream of ever new shapes
                    _alone.clear()
                _alone[metadata] = meta
        if not schema.is_kept:
            keep(schema)
        if not how & PICKLED:
            return tree
        convert = _as_wanted(arrival)
        return pickling.load(data, tree, convert) if data else pickling.load(tree[0], tree[1:], convert)


def _memory_of(leaves: list[torch.Tensor]) -> tuple[list[UntypedStorage] | None, bool]:
    """Return the storages of the leaves, if each has memory of its own, and whether one lies in torch's shared memory.

    It takes 0.15 us for each leaf.
    """
    try:
        if len(leaves) == 1:
            storage = leaves[0].untyped_storage()
            return [storage], storage.is_shared() and is_shared_by_torch(leaves[0])
        storages = list(map(torch.Tensor.untyped_storage, leaves))
        apart = len(set(map(UntypedStorage.data_ptr, storages))) == len(storages)
        shared = True in map(UntypedStorage.is_shared, storages)
    except (NotImplementedError, RuntimeError) as error:  # one has no storage
        reraise_from_handler(error)
        storages, apart, shared = [], len(leaves) < 2, True
    return storages if apart else None, shared and any(map(is_shared_by_torch, leaves))


def _flat(obj: Any, *, by_to: bool = True, few: bool = False) -> Flat | None:
    """Return an object's flat tree; None if the object is not a tree. For ``by_to`` and ``few`` see ``flatten``."""
    try:
        return flatten(obj, by_to=by_to, few=few)
    except UnsupportedLeaf:
        return None


def _refusal(obj: Any, encoder: Encoder) -> UnsupportedLeaf | None:
    """Return the error that sending an object as a tree raises; None if there is no error."""
    try:
        encode(obj, encoder)
    except UnsupportedLeaf as error:
        return error
    return None


def _as_wanted(arrival: DecodeOptions) -> Callable[[Any], Any] | None:
    """Return the function that converts a tensor in torch's shared memory for the get; None: it stays as it is."""
    if not arrival.as_numpy and arrival.unstage is None:
        return None
    return functools.partial(_made, arrival)


def _made(arrival: DecodeOptions, tensor: torch.Tensor) -> Any:
    plain = tensor.detach()
    if arrival.as_numpy:
        return array_of(plain)
    assert arrival.unstage is not None
    moved = arrival.unstage(plain).requires_grad_(tensor.requires_grad)
    return Parameter(moved, tensor.requires_grad) if isinstance(tensor, Parameter) else moved


def _again(queue: SharedMemoryQueue, serializer: str, wire_dtype: torch.dtype | None, cuda_ipc: bool) -> Codec:
    named = serializer_named(serializer)
    return Codec(queue, named, narrowing(named, wire_dtype), cuda_ipc=cuda_ipc)


def _with_pickle(data: bytes, leaves: Sequence[Any], encoder: Encoder) -> EncodedMessage:
    """Return the message of a pickle and its leaves."""
    if len(data) > _BRIEF:
        return encode([data, *leaves], encoder, arrays=False)
    return encode(list(leaves), encoder, data, arrays=False)
