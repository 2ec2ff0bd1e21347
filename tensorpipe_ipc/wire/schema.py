"""The schema: the part of a DATA header that says how to read the message, equal for all messages of a steady stream.

Little-endian::

    u8 n, n bytes    name of the serializer
    u32 n, n bytes   spec of the tree (see ``spec``)
    u32 n, n x       spans: u64 bytes of memory, u64 bytes of payload
    u32 n, n x       leaf metas (see ``metas``)

A *payload* is what a serializer made of one tensor. The spans' payloads come first, then those of the leaves that are
no views, in order. A span is memory that several leaves share: it travels once, and they arrive as views of it.

Each schema is checked once and kept, by its bytes. Nothing is made of what it announces until frames have arrived that
bear it out: a header costs its receiver no more than its own length.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.wire.arrival import AS_SENT, TENSORS, DecodeOptions, is_restored, restored_span, widened
from tensorpipe_ipc.wire.direct import mark, mark_all
from tensorpipe_ipc.wire.dtypes import BY_TORCH, WIDEST, Dtype
from tensorpipe_ipc.wire.layout import BULK, LEASE_FROM, layout, places_of
from tensorpipe_ipc.wire.metas import MAX_NBYTES, OPAQUE, LeafMeta, TensorMeta, unpack_meta
from tensorpipe_ipc.wire.rebuild import Plan, cloned, empty
from tensorpipe_ipc.wire.room import see_room_to_take
from tensorpipe_ipc.wire.spec import MAX_NODES, Op

__all__ = ["ALIAS", "PLAIN_DIMS", "Decoder", "Schema", "decode_values", "keep", "schema_of"]

ALIAS = -1  # as ``own`` of Schema.tree: the payload is the receiver's own and aligned; lie on it, however small
SPAN = struct.Struct("<QQ")
_U32 = struct.Struct("<I")
_LEAST_META = 12
# Bytes that are kept of a schema, at most: for each of its own (a key's tuple of one takes 48 for its one, and 56 from Python
# 3.14 on), and for each leaf, span, and node that something is made for.
_KEPT_OF_DATA, _KEPT_OF_NODE = 56, 960
PLAIN_DIMS, _PLAIN_CODES = 8, 13  # as in _compiled.c
_FEW = 512  # values, which take 40 KB at most as Python objects; more are first walked to their end without making any


class _Skipped(msgspec.Struct, array_like=True):
    """An array of anything: msgspec passes over the items that it has no field for."""


decode_values = msgspec.msgpack.Decoder(list[bool | int | float | str]).decode
_skip_values = msgspec.msgpack.Decoder(_Skipped).decode


class Decoder(Protocol):
    """A serializer, as far as a message needs one to be read."""

    zero_copy: bool

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        """Return the tensor of a payload."""


class Schema:
    """A DATA header's schema, read and found valid: how to make trees of the messages that have it.

    Attributes:
        serializer: the name of the serializer that made the payloads.
        nbytes: of all payloads.
        data: its bytes.
        cost: bytes of memory that it takes up while it is kept, roughly and at most.
        is_kept: whether it was kept for the next messages.
        everyday: the compiled path's own notes; False: it makes no trees of this; None: it has not asked, or too early.
    """

    def __init__(self, data: bytes) -> None:
        """Check a schema, and make nothing of it yet.

        Raises:
            ProtocolError: which rule it breaks.
            UnsupportedLeaf: it names a type that is not registered here, or has other fields.
        """
        name, at = _block(data, 0, 1)
        spec, at = _block(data, at, 4)
        self.serializer = str(name, "ascii", "replace")
        self.data = data
        self._plan = Plan(spec)
        self._spans, self._spans_at = _count(data, at, SPAN.size)
        if self._spans > self._plan.leaves:
            raise ProtocolError(f"{self._spans} spans for a tree of {self._plan.leaves} leaves")
        self._packed, self._bulk, self.nbytes = layout(self._sizes())
        self._opened: _Opened | None = None
        self.is_kept = False
        self.everyday: Any = None
        kept = self._plan.made + self._plan.leaves + self._spans + 1
        self.cost = _KEPT_OF_DATA * len(data) + _KEPT_OF_NODE * kept

    def check(self, frames: Sequence[memoryview]) -> None:
        """See that the frames after the header are as many and as long as the schema says.

        Raises:
            ProtocolError: they are not.
        """
        if self._opened is not None and [len(frame) for frame in frames] == self._opened.frame_sizes:
            return  # as always, but for the first message of a stream
        expected = bool(self._packed) + self._bulk
        if len(frames) != expected:
            raise ProtocolError(f"{len(frames)} payload frames, the header announces {expected}")
        for index, (frame, size) in enumerate(zip(frames, self._frame_sizes(), strict=True)):
            if len(frame) != size:
                raise ProtocolError(f"payload frame {index} is of {len(frame)} bytes, the header announces {size}")

    def tree(
        self,
        values: memoryview,
        frames: Sequence[memoryview],
        serializer: Decoder,
        own: int,
        arrival: DecodeOptions = AS_SENT,
    ) -> Any:
        """Return the message's tree.

        Args:
            values: the header's values.
            frames: the frames after the header, which have passed ``check``.
            serializer: the one named ``self.serializer``.
            own: payloads of up to so many bytes are copied out of their frame; larger ones may lie on it. Those under
                ``BULK`` are copied in any case: they lie crooked.
            arrival: what becomes of the leaves.

        Raises:
            ProtocolError: values or payloads that do not fit.
            UnsupportedLeaf: a leaf is wanted as an array, and NumPy lacks its dtype.
        """
        opened = self._open()
        as_sent = arrival is AS_SENT and not opened.narrowed
        if as_sent and self._plan.is_leaf and len(frames) == 1 and not len(values):  # the most common tree: one tensor
            return _decode(serializer, opened.metas[0], frames[0][:], own)
        payloads = [frames[frame][start:end] if frame >= 0 else _NOTHING for frame, start, end in opened.places]
        return self._built(opened, values, payloads, serializer, own, arrival)

    def _built(
        self,
        opened: _Opened,
        values: memoryview,
        payloads: list[memoryview],
        serializer: Decoder,
        own: int,
        arrival: DecodeOptions,
    ) -> Any:
        items, rest = _values(values, self._plan.values), iter(payloads)
        memory = [_span(serializer, meta, next(rest), own) for meta in opened.spans]
        if arrival is not AS_SENT or opened.narrowed:
            return self._arrive(opened, memory, rest, items, serializer, own, arrival)
        leaves = [
            _decode(serializer, meta, next(rest), own) if leaf.span is None else _view(memory[leaf.span], leaf)
            for leaf, meta in zip(opened.leaves, opened.metas, strict=True)
        ]
        return self._plan.build(leaves, items)

    def _arrive(
        self,
        opened: _Opened,
        memory: list[torch.Tensor],
        payloads: Iterator[memoryview],
        items: list[Any],
        serializer: Decoder,
        own: int,
        arrival: DecodeOptions,
    ) -> Any:
        """Return the tree, with its leaves as they are wanted."""
        kinds = self._plan.kinds
        wide = [is_restored(leaf, kind, arrival) for leaf, kind in zip(opened.leaves, kinds, strict=True)]
        moved = [arrival.unstage is not None and kind in TENSORS for kind in kinds]
        there: dict[int, torch.Tensor] = {}  # spans, moved as a whole: a view may be larger than what it is a view of
        for span, members in opened.members().items():
            first = opened.leaves[members[0]]
            is_wide = first.own is not None and any(wide[index] for index in members)
            for index in members:
                wide[index] = is_wide
            if arrival.unstage is not None and any(moved[index] for index in members):
                there[span] = arrival.unstage(memory[span])  # narrow, if it came so: a half of the way's bytes
                there[span] = restored_span(there[span], first) if is_wide else there[span]
            if not all(moved[index] for index in members):
                here = memory[span].cpu()  # an array's or a storage's may have stayed on its GPU
                memory[span] = restored_span(here, first) if is_wide else here
        leaves = []
        for index, (leaf, meta) in enumerate(zip(opened.leaves, opened.metas, strict=True)):
            if leaf.span is not None:
                span_memory = there if moved[index] else memory
                leaves.append(_view(span_memory[leaf.span], leaf, restored=wide[index]))
                continue
            tensor = _decode(serializer, meta, next(payloads), min(own, 0) if wide[index] else own)
            if moved[index] and arrival.unstage is not None:
                tensor = arrival.unstage(tensor)
            elif arrival.unstage is not None and not tensor.is_cpu:
                tensor = tensor.cpu()
            if wide[index] and leaf.own is not None:
                tensor = widened(tensor, leaf.own.torch)
            leaves.append(tensor)
        return self._plan.build(leaves, items, as_numpy=arrival.as_numpy)

    def tree_in(
        self, values: bytes | memoryview, region: memoryview, serializer: Decoder, arrival: DecodeOptions = AS_SENT
    ) -> Any:
        """Return the tree of a message whose payloads lie in one block: the small ones, then the large, all at multiples of 64.

        Args:
            values: as in a header.
            region: the payloads. It is the receiver's own, and writable: tensors may lie on it.
            serializer: the one named ``self.serializer``.
            arrival: what becomes of the leaves.

        Raises:
            ProtocolError: values or payloads that do not fit.
            UnsupportedLeaf: a leaf is wanted as an array, and NumPy lacks its dtype.
        """
        opened = self._opened or self._open()
        if len(region) != opened.block_size:
            raise ProtocolError(f"payloads of {len(region)} bytes, the schema announces {opened.block_size}")
        as_sent = arrival is AS_SENT and not opened.narrowed
        if as_sent and self._plan.is_leaf and not values:
            payload = region if type(region) is memoryview else region[:]
            tensor = serializer.decode(opened.metas[0], payload)
            if len(payload) >= LEASE_FROM and serializer.zero_copy:
                mark(tensor)
            return tensor
        if as_sent and not opened.spans and (decode_in := getattr(serializer, "decode_in", None)) is not None:
            items = _values(memoryview(values), self._plan.values) if values or self._plan.values else []
            leaves = decode_in(opened.metas, region, opened.in_block)
            mark_all(leaves, len(region))
            return self._plan.build(leaves, items)
        payloads = [region[start:end] for start, end in opened.in_block]
        return self._built(opened, memoryview(values), payloads, serializer, ALIAS, arrival)

    def meta_of_one(self) -> TensorMeta | None:
        """Return the meta of a message that is one tensor and crosses as it is; None of others, and of one not read yet."""
        opened = self._opened
        return opened.metas[0] if opened is not None and self._plan.is_leaf and not opened.narrowed else None

    def is_opened(self) -> bool:
        """Return whether a message has come that bears it out."""
        return self._opened is not None

    def plain(
        self,
    ) -> tuple[bytes, tuple[dict[str, None], ...], list[tuple[int, tuple[int, ...], int]], int, int] | None:
        """Return what is to be known to build its trees of one block, if all in them is plain; None if anything is not.

        Returns:
            The spec; its dicts, in order, with their keys alone; the code, the shape and the place in the block of each
            leaf; the bytes of the block; and how many values there are.
        """
        opened = self._opened
        if opened is None or self.serializer != "raw" or opened.narrowed or opened.spans:
            return None
        dicts, leaves = self._plan.plain_dicts(), []
        if dicts is None:
            return None
        for meta, (start, end) in zip(opened.metas, opened.in_block, strict=True):
            if (
                not meta.direct
                and meta.dtype is not torch.bfloat16
                or meta.order is not None
                or not 0 < end - start == meta.nbytes
            ):
                return None
            if len(meta.shape) > PLAIN_DIMS or meta.dtype is None or BY_TORCH[meta.dtype].code > _PLAIN_CODES:
                return None
            leaves.append((BY_TORCH[meta.dtype].code, tuple(meta.shape), start))
        return self._plan.spec, dicts, leaves, opened.block_size, self._plan.values

    def _open(self) -> _Opened:
        if self._opened is None:
            leaves, metas, to_any = list(self._leaves()), _Metas(), self._plan.has_storages
            wide = {leaf.span for leaf in leaves if leaf.row is not None and (to_any or leaf.row.alignment == WIDEST)}
            rows = [leaf.row and leaf.row._replace(alignment=WIDEST) if to_any else leaf.row for leaf in leaves]
            self._opened = _Opened(
                [
                    metas[_OCTET_OF_ANY if span in wide else _OCTET, (nbytes,), None]
                    for span, (nbytes, _) in enumerate(self._span_sizes())
                ],
                leaves,
                [metas[row, leaf.shape, leaf.order] for row, leaf in zip(rows, leaves, strict=True)],
                *places_of(list(self._sizes())),
                any(leaf.own is not None for leaf in leaves),
            )
        return self._opened

    def _sizes(self) -> Iterator[int]:
        """Check the spans and metas, and give the payloads' sizes. They are read anew each time, so that none is kept."""
        for span in self._span_sizes():
            if max(span) > MAX_NBYTES:
                raise ProtocolError(f"a span of {max(span)} bytes, the limit is {MAX_NBYTES}")
            yield span[1]
        for leaf in self._leaves():
            if leaf.span is None:
                yield leaf.nbytes

    def _span_sizes(self) -> Iterator[tuple[Any, ...]]:
        return SPAN.iter_unpack(memoryview(self.data)[self._spans_at : self._spans_at + self._spans * SPAN.size])

    def _leaves(self) -> Iterator[LeafMeta]:
        """Check the leaf metas, and give them, one by one."""
        count, at = _count(self.data, self._spans_at + self._spans * SPAN.size, _LEAST_META)
        if count != self._plan.leaves:
            raise ProtocolError(f"{count} leaf metas for a tree of {self._plan.leaves} leaves")
        narrowed = bytearray(2 * self._spans)  # of each span: codes of the dtypes that its views have, and had
        for index in range(count):
            leaf, at = unpack_meta(self.data, at)
            if leaf.span is not None:
                self._check_view(index, leaf)
                codes = bytes((leaf.row.code, leaf.own.code)) if leaf.row and leaf.own else b"\xff\xff"
                known = slice(2 * leaf.span, 2 * leaf.span + 2)
                if narrowed[known] not in (b"\0\0", codes):
                    raise ProtocolError(f"views of span {leaf.span} that were narrowed, and others that were not alike")
                narrowed[known] = codes
            if leaf.own is not None and self._plan.kinds[index] in (Op.BYTES, Op.UNTYPED, Op.TYPED):
                raise ProtocolError(
                    f"bytes of {leaf.row and leaf.row.torch} that were {leaf.own.torch}: only numbers are narrowed"
                )
            yield leaf
        if at != len(self.data):
            raise ProtocolError(f"{len(self.data) - at} bytes after the end of the schema")

    def _check_view(self, index: int, leaf: LeafMeta) -> None:
        assert leaf.span is not None
        if leaf.span >= self._spans:
            raise ProtocolError(f"a view of span {leaf.span}, of which there are {self._spans}")
        (nbytes, _) = SPAN.unpack_from(self.data, self._spans_at + leaf.span * SPAN.size)
        if leaf.view_end() > nbytes:
            raise ProtocolError(f"a view up to byte {leaf.view_end()} of a span of {nbytes}")
        kind = self._plan.kinds[index]
        if kind == Op.BYTES:  # each is copied out of what it came in
            raise ProtocolError(f"bytes that are a view of span {leaf.span}; they must have a payload of their own")
        if kind in (Op.UNTYPED, Op.TYPED) and (leaf.offset or leaf.view_end() < nbytes):
            raise ProtocolError(f"a storage that is a part of span {leaf.span}; it must be all of it")

    def frame_sizes(self) -> list[int]:
        """Return the length of each payload frame."""
        return list(self._frame_sizes())

    def _frame_sizes(self) -> Iterable[int]:
        if self._opened is not None:
            return self._opened.frame_sizes
        bulk = (size for size in self._sizes() if size >= BULK)
        return chain([self._packed], bulk) if self._packed else bulk


class _Opened(NamedTuple):
    """The parts of a schema, kept for all messages that have it, once the first of them has brought its frames."""

    spans: list[TensorMeta]  # of each, as a row of bytes
    leaves: list[LeafMeta]
    metas: list[TensorMeta]
    places: list[tuple[int, int, int]]  # of each payload: frame, start, end; frame -1: nowhere, it is empty
    frame_sizes: list[int]
    in_block: list[tuple[int, int]]  # of each payload: start and end, where all lie in one block
    block_size: int  # of all of them, there
    narrowed: bool  # whether any leaf has another dtype of its own

    def members(self) -> dict[int, list[int]]:
        """Return the leaves that are views of each span."""
        found: dict[int, list[int]] = {}
        for index, leaf in enumerate(self.leaves):
            if leaf.span is not None:
                found.setdefault(leaf.span, []).append(index)
        return found


class _Metas(dict[tuple[Dtype | None, tuple[int, ...], tuple[int, ...] | None], TensorMeta]):
    """The metas of one schema, each made once, and kept with it: what a peer sends must not stay in a sender's tables."""

    def __missing__(self, key: tuple[Dtype | None, tuple[int, ...], tuple[int, ...] | None]) -> TensorMeta:
        meta = self[key] = OPAQUE if key[0] is None else TensorMeta(*key)
        return meta


class _Schemas(dict[bytes, Schema]):
    """The schemas of the streams that this process receives: each is read once. Bounded by its bytes, not by trust."""

    LIMIT = 1 << 24
    size = 0

    def add(self, data: bytes, schema: Schema) -> None:
        """Add one. Where they are too large together, the oldest go, and some more: then not each time."""
        if self.setdefault(data, schema) is not schema:
            return  # another thread has read it, too
        self.size += schema.cost
        if self.size > self.LIMIT:
            self.size = sum(each.cost for each in list(self.values()))  # anew: threads may count at a time
            for oldest in list(self)[:-1]:
                if self.size <= self.LIMIT // 16 * 15:
                    break
                gone = self.pop(oldest, None)  # None: another thread is at it, too
                self.size -= 0 if gone is None else gone.cost


_SCHEMAS = _Schemas()
_NOTHING = memoryview(b"")
_OCTET = BY_TORCH[torch.uint8]
_OCTET_OF_ANY = _OCTET._replace(alignment=WIDEST)  # of memory that may be looked at as items of any dtype


def schema_of(data: bytes) -> Schema:
    """Return the schema of these bytes. It is read anew each time, unless it is kept.

    Raises:
        ProtocolError: they are none.
    """
    return _SCHEMAS.get(data) or Schema(data)


def keep(schema: Schema) -> None:
    """Keep a schema for the next messages, as one was read that bears it out: what is rejected drives none of others out."""
    if not schema.is_kept:
        schema.is_kept = True
        _SCHEMAS.add(schema.data, schema)


def _block(data: bytes, at: int, width: int) -> tuple[memoryview, int]:
    """Return a length of ``width`` bytes, and so many bytes after it (not a copy of them); and where they end."""
    start = at + width
    end = start + int.from_bytes(data[at:start], "little")
    if start > len(data) or end > len(data):
        raise ProtocolError(f"schema cut short at byte {at}")
    return memoryview(data)[start:end], end


def _count(data: bytes, at: int, least: int) -> tuple[int, int]:
    if at + 4 > len(data):
        raise ProtocolError(f"schema cut short at byte {at}")
    (count,) = _U32.unpack_from(data, at)
    if count > MAX_NODES or count * least > len(data) - at - 4:
        raise ProtocolError(f"a count of {count} at byte {at} of the schema, with {len(data) - at - 4} bytes left")
    return count, at + 4


def _values(data: memoryview, count: int) -> list[Any]:
    if not count and not len(data):
        return []
    if _announced(data) != count:
        raise ProtocolError(f"{_announced(data)} values for a tree of {count}")
    try:
        if count > _FEW:
            _skip_values(data)
        values: list[Any] = decode_values(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"values that cannot be read: {error}") from None
    return values


def _announced(data: memoryview) -> int:
    """Return how many items a msgpack array announces; -1 for no array. Asked before msgspec makes a list of them."""
    first = data[0] if len(data) else 0
    if first in (0xDC, 0xDD):
        return int.from_bytes(data[1 : 3 if first == 0xDC else 5], "big")
    return first - 0x90 if 0x90 <= first <= 0x9F else -1


def _decode(serializer: Decoder, meta: TensorMeta, payload: memoryview, own: int) -> torch.Tensor:
    size = len(payload)
    if own >= 0 and (size < BULK or _address(payload) % meta.alignment):
        if size >= BULK:
            see_room_to_take(size)
        payload = memoryview(bytearray(payload))
        own = 0  # it is the tensor's own already
    tensor = serializer.decode(meta, payload)
    if own == ALIAS and serializer.zero_copy:
        mark(tensor)
    if size > own or not serializer.zero_copy:
        return tensor
    return cloned(tensor, size)


def _address(payload: memoryview) -> int:
    """Return where a payload lies.

    A small frame lies anywhere in ZeroMQ's receive buffer; a large one is a malloc of its own, after a head of 40 bytes.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(payload))


def _span(serializer: Decoder, meta: TensorMeta, payload: memoryview, own: int) -> torch.Tensor:
    """Memory that is all of its storage, for views count from there."""
    span = _decode(serializer, meta, payload, own)
    is_all = span.is_contiguous() and span.untyped_storage().nbytes() == span.nbytes
    return span if is_all else cloned(span, len(payload))


def _view(span: torch.Tensor, leaf: LeafMeta, *, restored: bool = False) -> torch.Tensor:
    assert leaf.row is not None
    row = leaf.own if restored and leaf.own is not None else leaf.row
    try:
        return empty(row.torch, span.device).set_(
            span.untyped_storage(), leaf.offset // leaf.row.itemsize, leaf.shape, leaf.strides
        )
    except (RuntimeError, TypeError) as error:
        reraise_from_handler(error)
        raise ProtocolError(f"a view that its span does not hold: {error}") from None
