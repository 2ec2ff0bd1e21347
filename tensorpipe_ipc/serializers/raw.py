"""``raw``: a tensor's bytes are its own memory, read through ``data_ptr``. Nothing is copied to encode it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.serializers.base import OFFSETS, any_size, describe, has_memory, plain
from tensorpipe_ipc.wire.metas import METAS, NUMPY_DIMS, TensorMeta
from tensorpipe_ipc.wire.rebuild import empty

__all__ = ["Raw"]

_Tensor = torch.Tensor


class Raw:
    """The serializer ``raw``: every dtype of the table, strided tensors only.

    Attributes:
        most: tells the bytes that a tensor may have which has to be gathered.
    """

    name = "raw"
    zero_copy = True
    is_memory = True  # a payload is the tensor's items and nothing else: whoever makes them elsewhere need not ask

    def __init__(self, most: Callable[[], int] = any_size) -> None:
        self.most = most

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        """Return the tensor's meta and a view of its memory (of a gathered copy, where it has gaps).

        Raises:
            UnsupportedLeaf: sparse, quantized, nested, meta, a subclass, or a dtype that is not in the table.
        """
        # The common case, told with as few questions as can be: 0.7 us for all. ctypes.string_at, which copies and
        # keeps no shape, takes 0.8 for 1,000 floats. Whatever is unusual answers no, or raises, and goes the slow way.
        try:
            meta = METAS[tensor.dtype][tensor.shape]
            if (
                type(tensor) is _Tensor
                and tensor.is_cpu
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and not (meta.complex and tensor.is_conj())
            ):
                address = tensor.data_ptr()
                if address >> OFFSETS or has_memory(tensor):
                    return meta, meta.window(address)
        except (RuntimeError, KeyError) as error:
            reraise_from_handler(error)
        return _encode_other(tensor, self.most())

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        """Return a tensor on the payload's own memory; on a copy of it, where that may not be written to.

        Raises:
            ProtocolError: the payload is not of the size that the meta says.
        """
        if meta.direct and len(payload) == meta.nbytes and not payload.readonly:
            return torch.from_numpy(np.ndarray(meta.shape, meta.numpy_dtype, payload))
        if len(payload) != meta.nbytes or meta.dtype is None:
            raise ProtocolError(f"a payload of {len(payload)} bytes for a tensor of {meta.nbytes} ({meta!r})")
        if not meta.nbytes:
            return empty(meta.dtype, "cpu").reshape(meta.shape).detach()
        if payload.readonly:
            payload = memoryview(bytearray(payload))
        shape = meta.shape if meta.order is None else [meta.shape[dim] for dim in meta.order]
        if meta.numpy_dtype is not None and len(shape) <= NUMPY_DIMS:  # half the time of frombuffer + view
            tensor = torch.from_numpy(np.ndarray(shape, meta.numpy_dtype, payload))
        else:
            # Through NumPy, which refers to what the payload is a view of: each tensor counts as one reference to that.
            tensor = torch.frombuffer(np.ndarray(meta.nbytes, np.uint8, payload), dtype=meta.dtype).view(shape)
        if meta.order is None:
            return tensor
        return tensor.permute([meta.order.index(dim) for dim in range(len(shape))])

    def decode_in(
        self, metas: Sequence[TensorMeta], region: memoryview, places: Sequence[tuple[int, int]]
    ) -> list[torch.Tensor]:
        """As ``decode``, for many payloads in one writable region, without a view made of each: two thirds of the time.

        Raises:
            ProtocolError: as ``decode``.
        """
        array, tensor, decode = np.ndarray, torch.from_numpy, self.decode
        return [
            tensor(array(meta.shape, meta.numpy_dtype, region, start))
            if meta.direct and end - start == meta.nbytes
            else decode(meta, region[start:end])
            for meta, (start, end) in zip(metas, places, strict=True)
        ]


def _encode_other(tensor: torch.Tensor, most: int) -> tuple[TensorMeta, Any]:
    tensor = plain(tensor, most)
    meta = describe(tensor)
    if not meta.nbytes:
        return meta, b""
    # Through NumPy, so that the buffer keeps the memory, which may be a gathered copy that nobody else holds.
    # Its memory is dense, so that it can be read as one row; reshape() would keep the odd stride of a single item.
    return meta, tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
