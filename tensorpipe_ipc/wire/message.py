"""A tree ready to be sent: ``encode`` gives the parts, ``EncodedMessage.frames`` lays them out. ``schema`` is the mirror.

Payloads under ``BULK`` bytes stand behind the header in its frame, each at the next multiple of 64 from where they
begin; each larger one is a frame of its own, so that it is copied neither to be sent nor to be received. What a payload
is, and what is written of it, stands in ``schema``.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
import sys
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch.storage import UntypedStorage

from tensorpipe_ipc.errors import OutOfMemory, SharedMemoryError, UnsupportedLeaf
from tensorpipe_ipc.wire.flatten import Flat, flatten, leaf_path
from tensorpipe_ipc.wire.header import MAX_BODY, MAX_HEADER, Kind, pack
from tensorpipe_ipc.wire.layout import ALIGN, BULK, KeptBytes, LazyPayload
from tensorpipe_ipc.wire.metas import TensorMeta
from tensorpipe_ipc.wire.schema import SPAN
from tensorpipe_ipc.wire.sharing import Sharing, storages_of
from tensorpipe_ipc.wire.spec import Op

__all__ = ["EncodedMessage", "Encoder", "encode", "encode_values", "schema_of_one", "see_that_it_tells"]

_U32 = struct.Struct("<I")
_NO_SPANS_ONE_LEAF = _U32.pack(0) + _U32.pack(1)
_ONE_TENSOR = bytes([Op.TENSOR])
MAX_VALUES = MAX_HEADER // 2  # the other half is the schema's, whose nodes are counted
_SHORT_SPEC = 4096  # bytes: longer ones are not kept
encode_values = msgspec.msgpack.Encoder().encode


class Encoder(Protocol):
    """A serializer, as far as a message needs one to be sent."""

    name: str

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        """Return a tensor's meta and its bytes. One that narrows floats has a ``wire_dtype``, and an ``encode_span`` for memory
        that several of them share."""


class EncodedMessage(NamedTuple):
    """A tree ready to be sent. ``payloads`` may be views of the tensors' memory, which ``keep`` keeps alive."""

    schema: bytes
    values: bytes
    payloads: list[Any]
    nbytes: int  # of all payloads
    keep: Any

    @property
    def size(self) -> int:
        """Return the bytes of its frames, or a few more."""
        return self.nbytes + len(self.schema) + len(self.values) + ALIGN * (len(self.payloads) + 1)

    def frames(self, sequence: int) -> list[Any]:
        """Return the message's frames, as bytes-like objects that keep the memory they are views of."""
        first, large = self.parts(sequence)
        return [first, *map(self._kept, large)]

    def parts(self, sequence: int) -> tuple[bytes, list[Any]]:
        """Return the first frame, and the payloads that have a frame each: bytes-like, or ``LazyPayload``.

        Raises:
            OutOfMemory: there is none for the frame.
        """
        try:
            header = pack(Kind.DATA, sequence, self.schema, self.values)
            if len(self.payloads) == 1:
                return (header, self.payloads) if self.nbytes >= BULK else (header + bytes(self.payloads[0]), [])
            small = [payload for payload in self.payloads if 0 < len(payload) < BULK]
            large = [payload for payload in self.payloads if len(payload) >= BULK]
            return _packed(header, small) if small else header, large
        except MemoryError:
            raise self.no_memory("there is no memory for it") from None

    def no_memory(self, why: str) -> OutOfMemory:
        """Return the error that says so."""
        return OutOfMemory(
            f"a message of {self.size:,} bytes is copied to be sent, and {why}; send it in parts. It was not sent"
        )

    def _kept(self, payload: Any) -> Any:
        """Return a large payload that keeps the memory it is a view of, wherever it goes: ZeroMQ may read it after put was
        interrupted and the caller's tensor is gone. A view through ctypes does not do so by itself."""
        if isinstance(payload, LazyPayload):
            return payload.frame()
        owner = payload.obj if isinstance(payload, memoryview) else payload
        if isinstance(owner, (ctypes.Array, KeptBytes)):
            owner.keep = self.keep  # type: ignore[union-attr]
        return payload


def encode(
    tree: Any,
    serializer: Encoder,
    instead: bytes = b"",
    flat: Flat | None = None,
    *,
    apart: list[UntypedStorage] | None = None,
    arrays: bool = True,
) -> EncodedMessage:
    """Make a message of a tree. Nothing is copied that the serializer does not copy.

    Args:
        instead: what stands in the place of the values of a tree that has none.
        flat: the tree taken apart, where somebody has done that.
        apart: the storages of the leaves, where each is known to have memory of its own.
        arrays: see ``Sharing``.

    Raises:
        UnsupportedLeaf: something in the tree cannot be sent, by this serializer or at all. Its path is named.
        SharedMemoryError: its tensors take more bytes than the serializer's ``most``. No more than one beyond was copied.
    """
    if type(tree) is torch.Tensor and not tree.requires_grad:  # the most common tree of all
        storages = storages_of([tree])
        try:
            meta, payload = serializer.encode(tree)
        except UnsupportedLeaf as error:
            raise _at(error, tree, 0) from error.__cause__
        if storages and tree.untyped_storage() is not storages[0]:
            return encode(tree.detach(), serializer, instead)
        nbytes = len(payload)
        return EncodedMessage(
            schema_of_one(serializer.name, meta, nbytes), instead, [payload], nbytes, (tree, storages)
        )
    flat = flatten(tree) if flat is None else flat
    leaves = flat.leaves
    values = encode_values(flat.values) if flat.values else instead
    if len(values) > MAX_VALUES:
        raise UnsupportedLeaf(
            f"{len(values):,} bytes of text and numbers, the limit is {MAX_VALUES:,}; send long text as bytes"
        )
    if len(leaves) == 1:  # most streams: one tensor, which shares memory with nobody
        storages = apart or storages_of(leaves)
        try:
            meta, payload = serializer.encode(leaves[0])
        except UnsupportedLeaf as error:
            raise _at(error, tree, 0) from error.__cause__
        if storages and leaves[0].untyped_storage() is not storages[0]:
            return encode(tree, serializer, instead, flat._replace(leaves=[leaves[0].detach()]))
        nbytes = len(payload)
        schema = _one_leaf(serializer.name, b"".join(flat.spec))
        schema += meta.packed if nbytes == meta.nbytes else meta.pack(nbytes)
        _see_that_it_fits(schema, values)
        return EncodedMessage(schema, values, [payload], nbytes, (leaves, storages))
    payloads: list[Any] = []
    spans: list[bytes] = []
    views: dict[int, bytes] = {}
    storages = storages_of(leaves) if apart is None else apart
    if apart is None:
        shared = Sharing(leaves, storages, getattr(serializer, "wire_dtype", None), flat.spec, arrays=arrays)
        spans, views = [_encode_span(span, serializer, payloads) for span in shared.spans], shared.views
    metas, nbytes = _encode_leaves(tree, leaves, serializer, views, payloads)
    schema = b"".join(
        [_head(serializer.name, b"".join(flat.spec)), _U32.pack(len(spans)), *spans, _U32.pack(len(metas)), *metas]
    )
    _see_that_it_fits(schema, values)
    if storages_of(leaves) != storages:
        flat = flat._replace(leaves=[leaf.detach() for leaf in leaves])
        return encode(tree, serializer, instead, flat, arrays=arrays)
    return EncodedMessage(schema, values, payloads, nbytes, (leaves, storages))


def schema_of_one(name: str, meta: TensorMeta, nbytes: int) -> bytes:
    """Return the schema of a tree that is one tensor, whose payload has so many bytes.

    Args:
        name: the serializer's.
    """
    return _short_leaf(name, _ONE_TENSOR) + (meta.packed if nbytes == meta.nbytes else meta.pack(nbytes))


def _see_that_it_fits(schema: bytes, values: bytes) -> None:
    if len(schema) + len(values) > MAX_BODY:
        raise UnsupportedLeaf(
            f"{len(schema):,} bytes of keys and shapes and {len(values):,} of text and numbers, over {MAX_BODY:,} "
            "together; send many small tensors as one, and long text as bytes"
        )


def _one_leaf(name: str, spec: bytes) -> bytes:
    """Return the schema of a tree that has one leaf, up to the leaf's meta."""
    return _short_leaf(name, spec) if len(spec) <= _SHORT_SPEC else _head(name, spec) + _NO_SPANS_ONE_LEAF


@functools.lru_cache(maxsize=64)
def _short_leaf(name: str, spec: bytes) -> bytes:
    return _head(name, spec) + _NO_SPANS_ONE_LEAF


def _head(name: str, spec: bytes) -> bytes:
    return bytes([len(name)]) + name.encode() + _U32.pack(len(spec)) + spec


def see_that_it_tells(name: str, meta: TensorMeta) -> None:
    """See that a serializer gives a meta of memory that several tensors share: of that, nothing else travels.

    Args:
        name: the serializer's.
        meta: what it gave, of uint8.

    Raises:
        UnsupportedLeaf: it does not.
    """
    if meta.dtype is not torch.uint8:
        raise UnsupportedLeaf(
            f"memory that several tensors share, of which serializer {name!r} gives no meta but {meta!r}; send clones, or have "
            "encode() return describe(tensor)"
        )


def _encode_span(span: torch.Tensor, serializer: Encoder, payloads: list[Any]) -> bytes:
    if span.dtype is torch.uint8:
        nbytes, (meta, payload) = len(span), serializer.encode(span)
        see_that_it_tells(serializer.name, meta)
    else:
        nbytes, payload = serializer.encode_span(span)  # type: ignore[attr-defined]
    payloads.append(payload)
    return SPAN.pack(nbytes, len(payload))


def _encode_leaves(
    tree: Any, leaves: list[torch.Tensor], serializer: Encoder, views: dict[int, bytes], payloads: list[Any]
) -> tuple[list[bytes], int]:
    """Add the payloads of leaves that are no views. Return the metas of all leaves, and the bytes of all payloads."""
    encode_one = serializer.encode
    metas: list[bytes] = []
    limit = getattr(serializer, "most", None)
    most, total = limit() if limit else sys.maxsize, sum(map(len, payloads))
    try:
        for leaf in leaves:
            if views and (view := views.get(len(metas))) is not None:
                metas.append(view)
                continue
            meta, payload = encode_one(leaf)
            payloads.append(payload)
            nbytes = len(payload)
            metas.append(meta.packed if nbytes == meta.nbytes else meta.pack(nbytes))
            total += nbytes
            if total > most:  # the next one may have to be gathered
                raise SharedMemoryError(
                    errno.ENOSPC,
                    f"{len(metas)} of the {len(leaves)} tensors take {total} bytes to send and can never fit: the capacity is "
                    f"{most} bytes; send them in parts",
                )
    except UnsupportedLeaf as error:
        raise _at(error, tree, len(metas)) from error.__cause__
    return metas, total


def _at(error: UnsupportedLeaf, tree: Any, index: int) -> UnsupportedLeaf:
    return error.within(leaf_path(tree, index))


def _packed(header: bytes, payloads: list[Any]) -> bytes:
    pieces: list[Any] = [header]
    for payload in payloads:
        pieces.append(payload)
        pieces.append(bytes(-len(payload) % ALIGN))
    pieces.pop()  # it ends with the last payload
    return b"".join(pieces)
