"""Narrowing: floats that are wider than a wire dtype cross as it. It stands in front of any serializer.

What is narrowed: tensors and arrays of float64, float32, float16 and bfloat16 that are wider than the wire dtype. Everything
else goes as it is: integers, bools, and complex numbers (there is no narrow kind of those but complex32, which torch calls
experimental; send ``view_as_real``), typed and untyped storages, which travel as themselves, and sparse, quantized and
nested tensors. A tree with nothing to narrow goes as it would without.

Large tensors are cast straight into the place that they travel in (a block, or the buffer that becomes a frame): nothing is
made in between. float32 to float16, 100 MB, one core: 11 ms, where a memcpy of it takes 14. The look for overflows takes
another 8 ms (each piece while it is in the cache; only one that goes beyond the wire dtype's range is counted item by item).
The relative error of every item would take 40 to 200 ms more: so it is found of up to 4,096 evenly spaced items a tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tensorpipe_ipc.errors import UnsupportedLeaf
from tensorpipe_ipc.serializers.base import Serializer, dense_order
from tensorpipe_ipc.wire.dtypes import BY_TORCH, NARROW, is_narrowed
from tensorpipe_ipc.wire.layout import BULK, Written
from tensorpipe_ipc.wire.metas import OPAQUE, TensorMeta, narrowed_meta

__all__ = ["Narrowing", "narrowing"]

PIECE = 1 << 17  # items: 512 KiB of float32, which stay in the cache between the cast and the look
LOOKED_AT = 4096  # items of a tensor, for the relative error


def narrowing(serializer: Serializer, dtype: Any) -> Narrowing | None:
    """A serializer with wide floats narrowed to ``dtype`` before it; None for None.

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
        self._limit = torch.finfo(wire_dtype).max
        self._edge = 464.0 if str(wire_dtype) == "torch.float8_e4m3fn" else math.inf  # beyond it 448 is not the nearest
        self._made_in_place = bool(getattr(serializer, "is_memory", False))

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        """See ``Serializer.encode``.

        Raises:
            UnsupportedLeaf: the serializer has no bytes for such a tensor, or none for one of the wire dtype.
        """
        if not is_narrowed(tensor.dtype, self.wire_dtype) or not _is_plain(tensor):
            return self._serializer.encode(tensor)
        tensor, own = tensor.detach().resolve_neg(), tensor.dtype
        if self._made_in_place:
            order = None if tensor.is_contiguous() else dense_order(tensor)
            meta = narrowed_meta(own, self.wire_dtype, tensor.shape, order)
            if meta.nbytes >= BULK:
                return meta, _Cast(self, tensor if order is None else tensor.permute(order), meta.nbytes)
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

    def encode_span(self, span: torch.Tensor) -> tuple[int, Any]:
        """Bytes and payload of memory that several tensors share: a row of items, to be narrowed."""
        nbytes = len(span) * self.wire_dtype.itemsize
        if self._made_in_place and nbytes >= BULK:
            return nbytes, _Cast(self, span, nbytes)
        octets = self._cast(span).view(torch.uint8)
        _, payload = self._serializer.encode(octets)
        return nbytes, octets.numpy().data if self._made_in_place else payload

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        narrow = torch.empty_like(tensor, dtype=self.wire_dtype)
        if tensor.is_cpu and tensor.is_contiguous():
            self.cast_into(narrow, tensor)
        else:
            self._cast_piece(narrow, tensor)
            self._look(tensor, narrow)
        return narrow.cpu()

    def cast_into(self, narrow: torch.Tensor, wide: torch.Tensor) -> None:
        """Fill a contiguous tensor with another's items, and note what is lost."""
        if not wide.is_contiguous():
            self._cast_piece(narrow, wide)
        else:
            there, here = narrow.view(-1), wide.view(-1)
            for start in range(0, len(here), PIECE):
                self._cast_piece(there[start : start + PIECE], here[start : start + PIECE])
        self._look(wide, narrow)

    def _cast_piece(self, narrow: torch.Tensor, wide: torch.Tensor) -> None:
        narrow.copy_(wide)
        if not wide.numel():
            return
        least, most = torch.aminmax(wide)
        if not (float(least) >= -self._limit and float(most) <= self._limit):  # nan, too
            finite = torch.isfinite(narrow.to(wide.dtype))
            self.overflowed += int((torch.isfinite(wide) & ~finite | (wide.abs() > self._edge) & finite).sum())

    def _look(self, wide: torch.Tensor, narrow: torch.Tensor) -> None:
        """Note the largest relative error of some items."""
        if not wide.numel():
            return
        if wide.is_contiguous() and narrow.is_contiguous():
            wide, narrow = wide.view(-1), narrow.view(-1)
        for dim, size in sorted(enumerate(wide.shape), key=lambda each: -each[1]):
            step = min(size, math.ceil(wide.numel() / LOOKED_AT))
            if step > 1:
                part = (slice(None),) * dim + (slice(None, None, step),)
                wide, narrow = wide[part], narrow[part]
        wide = wide.to(torch.float64)
        error = narrow.to(torch.float64).sub_(wide).div_(wide).abs_()
        if self._edge < math.inf:
            error[wide.abs() > self._edge] = 0
        error.nan_to_num_(0, 0, 0)  # not of zeros, nor of what overflowed, nor of nan
        self.worst = max(self.worst, float(error.max()))


class _Cast(Written):
    """A large tensor on its way to being narrowed."""

    __slots__ = ("_narrowing", "_nbytes", "_tensor")

    def __init__(self, narrowing: Narrowing, tensor: torch.Tensor, nbytes: int) -> None:
        self._narrowing, self._tensor, self._nbytes = narrowing, tensor, nbytes

    def __len__(self) -> int:
        return self._nbytes

    def write_into(self, place: memoryview) -> None:
        narrowing = self._narrowing
        narrow = torch.frombuffer(place, dtype=narrowing.wire_dtype).view(self._tensor.shape)
        if self._tensor.is_cpu:
            narrowing.cast_into(narrow, self._tensor)
        else:
            narrow.copy_(narrowing._cast(self._tensor))

    def frame(self) -> memoryview:
        narrow = torch.empty(self._nbytes, dtype=torch.uint8)
        memory: memoryview = narrow.numpy().data
        self.write_into(memory)
        return memory


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of whose items there is nothing to say but their dtype. The others are the serializer's."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (
            tensor.is_nested or tensor.is_quantized or tensor.is_mkldnn or tensor.is_meta or tensor._is_zerotensor()
        )
        and bool(not tensor.numel() or tensor.data_ptr())
        and tensor.dtype in BY_TORCH
    )
