"""Narrowing: floats that are wider than a wire dtype cross as it. It stands in front of any serializer.

What is narrowed: tensors and arrays of float64, float32, float16 and bfloat16 that are wider than the wire dtype. Everything
else goes as it is: integers, bools, and complex numbers (there is no narrow kind of those but complex32, which torch calls
experimental; send ``view_as_real``), typed and untyped storages, which travel as themselves, and sparse, quantized and
nested tensors. A tree with nothing to narrow goes as it would without.

Large tensors without gaps are cast straight into the place that they travel in (a block, or the pieces that become frames,
each when its turn comes): nothing is made in between. float32 to float16, 100 MB, one core, in pieces of 1 MiB: 14 ms of its
time, where copying them takes 15. The look for overflows takes another 5 ms, once a piece has left: at its narrow items, while
they are in the cache, as the bits of those that overflowed are the largest there are. Only a piece that has such is counted
item by item. The relative error of every item would take 40 to 200 ms more: so it is found of up to 4,096 evenly spaced items
a tensor, when its last piece has left.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tensorpipe_ipc.borrowed import is_zero_tensor
from tensorpipe_ipc.errors import OutOfMemory, UnsupportedLeaf
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.serializers.base import Serializer, any_size, check_memory, check_size, dense_order, has_memory
from tensorpipe_ipc.wire.dtypes import NARROW, is_narrowed
from tensorpipe_ipc.wire.layout import BULK, LazyPayload
from tensorpipe_ipc.wire.message import see_that_it_tells
from tensorpipe_ipc.wire.metas import OPAQUE, TensorMeta, narrowed_meta
from tensorpipe_ipc.wire.threads import alone_in_a_child, always_alone_in_a_child

__all__ = ["Narrowing", "narrowing"]

PIECE = 1 << 18  # items: 1 MiB of float32, which stay in the cache between the cast and the look
_UNSIGNED = {1: np.uint8, 2: np.uint16}
LOOKED_AT = 4096  # items of a tensor, for the relative error


def narrowing(serializer: Serializer, dtype: Any) -> Narrowing | None:
    """Return a serializer with wide floats narrowed to ``dtype`` before it; None for None.

    Raises:
        TypeError: it is no dtype.
        ValueError: it is another dtype; those that can be are named.
    """
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"wire_dtype={dtype!r} is a {type(dtype).__name__}; give a torch.dtype, or None")
    if dtype not in NARROW:
        raise ValueError(f"wire_dtype={dtype}: give one of {', '.join(map(str, NARROW))}, or None")
    return Narrowing(serializer, dtype)


class Narrowing:
    """A serializer's encoding half, with wide floats narrowed before it.

    Attributes:
        name: the serializer's.
        wire_dtype: what they cross as.
        overflowed: items beyond the wire dtype's range: finite ones that became inf. float8_e4m3fn has no inf: with it, those
            that became its largest number, 448, or nan (that depends on torch's version), inf among them.
        worst: the largest relative error among the items that were looked at, those that overflowed left out.
    """

    def __init__(self, serializer: Serializer, wire_dtype: torch.dtype) -> None:
        self._serializer, self.name, self.wire_dtype = serializer, serializer.name, wire_dtype
        self.overflowed, self.worst = 0, 0.0
        self._edge = math.inf
        self._bits = torch.int16 if wire_dtype.itemsize == 2 else torch.int8
        largest = (
            torch.tensor(torch.finfo(wire_dtype).max, dtype=torch.float64, device="cpu").to(wire_dtype).view(self._bits)
        )
        self._suspect = int(largest) + 1  # as bits without the sign: inf or nan
        if str(wire_dtype) == "torch.float8_e4m3fn":
            self._edge = 464.0  # beyond it 448 is not the nearest
            self._suspect = int(largest)
        self._made_in_place = bool(getattr(serializer, "is_memory", False))

    @alone_in_a_child
    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        """See ``Serializer.encode``.

        Raises:
            UnsupportedLeaf: the serializer has no bytes for such a tensor, or none for one of the wire dtype.
            SharedMemoryError: as ``Serializer.encode``, where the serializer has a limit.
        """
        if not is_narrowed(tensor.dtype, self.wire_dtype) or not _is_plain(tensor):
            return self._serializer.encode(tensor)
        check_size(tensor, getattr(self._serializer, "most", any_size)(), self.wire_dtype.itemsize)
        tensor, own = tensor.detach().resolve_neg(), tensor.dtype
        nbytes = tensor.numel() * self.wire_dtype.itemsize
        if self._made_in_place and nbytes >= BULK:
            order = None if tensor.is_contiguous() else dense_order(tensor)
            dense = tensor if order is None else tensor.permute(order)
            if dense.is_contiguous():  # if not, it has gaps, and is gathered as it is cast
                return narrowed_meta(own, self.wire_dtype, tensor.shape, order), _Cast(self, dense, nbytes)
        narrow = self._cast(tensor)
        try:
            meta, payload = self._serializer.encode(narrow)
        except UnsupportedLeaf as refused:
            raise UnsupportedLeaf(f"as the wire_dtype {self.wire_dtype}: {refused.reason}") from refused.__cause__
        if self._made_in_place and meta.nbytes:  # a view through ctypes does not keep what it is a view of
            payload = narrow.as_strided((narrow.numel(),), (1,)).view(torch.uint8).numpy().data
        if meta is OPAQUE:
            raise UnsupportedLeaf(
                f"serializer {self.name!r} says nothing of dtypes, so none can be restored; send without wire_dtype"
            )
        return narrowed_meta(own, self.wire_dtype, meta.shape, meta.order), payload

    @alone_in_a_child
    def encode_span(self, span: torch.Tensor) -> tuple[int, Any]:
        """Return bytes and payload of memory that several tensors share: a row of items, to be narrowed."""
        nbytes = len(span) * self.wire_dtype.itemsize
        if self._made_in_place and nbytes >= BULK:
            return nbytes, _Cast(self, span, nbytes)
        octets = self._cast(span).view(torch.uint8)
        meta, payload = self._serializer.encode(octets)
        see_that_it_tells(self._serializer.name, meta)
        return nbytes, octets.numpy().data if self._made_in_place else payload

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        check_memory(tensor, self.wire_dtype.itemsize)
        narrow = self.cast(tensor)
        self.note_error(tensor)
        return narrow.cpu()

    def cast(self, wide: torch.Tensor) -> torch.Tensor:
        """Return a tensor's items, narrow, where it is; overflows are counted."""
        try:
            narrow = torch.empty_like(wide, dtype=self.wire_dtype)
        except RuntimeError as error:  # torch has no type for it
            reraise_from_handler(error)
            raise _no_memory(wide, self.wire_dtype, error) from None
        narrow.copy_(wide)
        if self.any_suspect(narrow):
            self.count(narrow, wide)
        return narrow

    def any_suspect(self, narrow: torch.Tensor) -> bool:
        """Return whether items may have overflowed. If False, none has."""
        return bool(narrow.numel()) and self._largest(narrow) >= self._suspect

    def count(self, narrow: torch.Tensor, wide: torch.Tensor) -> None:
        """Count the items that overflowed. On the CPU in parts, as each takes several copies."""
        if wide.is_cpu and wide.numel() > PIECE:
            dim = max(range(wide.dim()), key=lambda each: wide.shape[each])
            rows = max(1, wide.shape[dim] * PIECE // wide.numel())
            for narrow_part, wide_part in zip(
                torch.split(narrow, rows, dim), torch.split(wide, rows, dim), strict=True
            ):
                self._count(narrow_part, wide_part)
        else:
            self._count(narrow, wide)

    def _count(self, narrow: torch.Tensor, wide: torch.Tensor) -> None:
        finite = torch.isfinite(narrow.to(wide.dtype))
        self.overflowed += int((torch.isfinite(wide) & ~finite | (wide.abs() > self._edge) & finite).sum())

    def _largest(self, narrow: torch.Tensor) -> int:
        """Return the bits, without the sign, of the item that is the farthest from 0; nan is farther than inf."""
        bits = narrow.view(self._bits)
        if not bits.is_cpu:
            return int((bits & torch.iinfo(self._bits).max).amax())
        signed = bits.numpy()  # by NumPy: two looks and nothing made, a fourth of the time
        unsigned = signed.view(_UNSIGNED[signed.itemsize])
        return max(int(signed.max()), int(unsigned.max()) - (1 << 8 * signed.itemsize - 1))

    def note_error(self, wide: torch.Tensor) -> None:
        """Note the largest relative error of some items."""
        if not wide.numel():
            return
        if wide.is_contiguous():
            wide = wide.view(-1)
        for dim, size in sorted(enumerate(wide.shape), key=lambda each: -each[1]):
            step = min(size, math.ceil(wide.numel() / LOOKED_AT))
            if step > 1:
                wide = wide[(slice(None),) * dim + (slice(None, None, step),)]
        narrow = wide.to(self.wire_dtype)
        wide = wide.to(torch.float64)
        error = narrow.to(torch.float64).sub_(wide).div_(wide).abs_()
        if self._edge < math.inf:
            error[wide.abs() > self._edge] = 0
        error.nan_to_num_(0, 0, 0)  # not of zeros, nor of what overflowed, nor of nan
        self.worst = max(self.worst, float(error.max()))


class _Cast(LazyPayload):
    """A large tensor without gaps on its way to being narrowed. However often it is written, what it loses is counted once."""

    __slots__ = ("_counted", "_made", "_narrowing", "_nbytes", "row")

    def __init__(self, narrowing: Narrowing, tensor: torch.Tensor, nbytes: int) -> None:
        self._narrowing, self.row, self._nbytes = narrowing, tensor.view(-1), nbytes
        self._counted = 0  # items, from the first on, whose losses are
        self._made: torch.Tensor | None = None  # on its device, if that is not the CPU

    def __len__(self) -> int:
        return self._nbytes

    @alone_in_a_child
    def write_into(self, place: memoryview) -> None:
        step = PIECE * self._narrowing.wire_dtype.itemsize if self.row.is_cpu else len(place)
        for start in range(0, len(place), step):
            part = place[start : start + step]
            self.write_part(part, start)
            self.sent(part, start)

    @alone_in_a_child
    def write_part(self, place: memoryview, start: int) -> None:
        narrow, first, stop = self._part(place, start)
        if self.row.is_cpu:
            narrow.copy_(self.row[first:stop])
            return
        if self._made is None:
            self._made = self._narrowing.cast(self.row)
        narrow.copy_(self._made[first:stop])

    @alone_in_a_child
    def sent(self, place: memoryview, start: int) -> None:
        narrow, first, stop = self._part(place, start)
        begin = max(first, self._counted)
        narrow = narrow[begin - first :]
        if self.row.is_cpu and self._narrowing.any_suspect(narrow):
            self._narrowing.count(narrow, self.row[begin:stop])
        self._counted = max(self._counted, stop)
        if stop == len(self.row):
            self._narrowing.note_error(self.row)

    def _part(self, place: memoryview, start: int) -> tuple[torch.Tensor, int, int]:
        """Return a place as narrow items, and the numbers of the first of them and of the one after the last."""
        narrow = torch.frombuffer(place, dtype=self._narrowing.wire_dtype)
        first = start // narrow.itemsize
        return narrow, first, first + len(narrow)

    @always_alone_in_a_child  # torch fills new memory where a program wants all of its operations to be deterministic
    def frame(self) -> memoryview:
        check_memory(self.row, self._narrowing.wire_dtype.itemsize)
        try:
            narrow = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:  # torch has no type for it
            reraise_from_handler(error)
            raise _no_memory(self.row, self._narrowing.wire_dtype, error) from None
        memory: memoryview = narrow.numpy().data
        self.write_into(memory)
        return memory


def _no_memory(tensor: torch.Tensor, wire_dtype: torch.dtype, error: RuntimeError) -> OutOfMemory:
    return OutOfMemory(
        f"a tensor of shape {list(tensor.shape)} takes {tensor.numel() * wire_dtype.itemsize:,} bytes as {wire_dtype}: "
        f"{error}; send it in parts. It was not sent"
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's items are described by their dtype alone. All other tensors are the serializer's."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or is_zero_tensor(tensor))
        and has_memory(tensor)
    )
