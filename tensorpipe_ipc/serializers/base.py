"""The protocol of a serializer, and the ground that all of them share: ``plain`` memory to read from.

A serializer says what *one tensor's* bytes are. Containers, numbers, shared memory and gradients are dealt with before
it is asked, so that every serializer works for every tree, on every transport.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from tensorpipe_ipc.borrowed import is_zero_tensor
from tensorpipe_ipc.errors import Closed, OutOfMemory, ProtocolError, SharedMemoryError, UnsupportedLeaf
from tensorpipe_ipc.handlers import raise_signals, reraise_from_handler
from tensorpipe_ipc.wire.dtypes import BY_TORCH, WIDEST
from tensorpipe_ipc.wire.metas import TensorMeta, meta_of
from tensorpipe_ipc.wire.room import lacks_room
from tensorpipe_ipc.wire.threads import alone_in_a_child

__all__ = [
    "OFFSETS",
    "Serializer",
    "any_size",
    "check_memory",
    "check_size",
    "copied",
    "dense_order",
    "describe",
    "expect",
    "gathered",
    "has_memory",
    "plain",
    "straight",
]

_ANY = 1 << 62  # bytes: more than any tensor has
OFFSETS = 44  # bits: no offset has more, and most addresses have
_Copy = TypeVar("_Copy")
_unlooked = 0  # bytes that were copied since the last one


def any_size() -> int:
    """Return the bytes that a tensor may have where there is no limit."""
    return _ANY


@runtime_checkable
class Serializer(Protocol):
    """A serializer, as `register_serializer` takes it. Any thread uses it, so it keeps no state between calls.

    Attributes:
        name: what both ends call it: up to 64 letters, digits, '_', '-' and '.'.
        zero_copy: whether ``decode`` may return a tensor that lies on the payload's own memory. Such a tensor is
            copied where the receiver wants memory of its own.
    """

    name: str
    zero_copy: bool

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        """Return a tensor's meta and its bytes.

        Args:
            tensor: any dtype, shape, strides and device; ``plain`` makes it contiguous CPU memory.

        Returns:
            ``describe(tensor)`` (or ``OPAQUE``, where the bytes say all there is to say), and a bytes-like object. It
            may be a view of the tensor's memory: the caller keeps the tensor until the bytes were read.

        Raises:
            UnsupportedLeaf: it has no bytes for such a tensor. Say what to use instead.
        """

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        """Return the tensor again: on the CPU, of ``meta``'s dtype and shape, without gaps or overlaps.

        Args:
            meta: what ``encode`` returned, read from the wire and found valid.
            payload: what ``encode`` returned, in memory that nobody else writes. Nobody has looked at its content. Leave
                it as it is: a message may be read again. It may be read-only; then the tensor must not lie on it.

        Raises:
            ProtocolError: the payload is not what ``encode`` makes for such a meta.
        """


def plain(tensor: torch.Tensor, most: int = _ANY) -> torch.Tensor:
    """Return the same items as memory that can be read: on the CPU, dense, no conjugate or negative bit, no history.

    Dense means without gaps, in whatever order of dimensions; what has gaps or overlaps is gathered, once.

    Args:
        tensor: any.
        most: bytes that it may have, if it is copied here.

    Raises:
        SharedMemoryError: it would have more.
        UnsupportedLeaf: its memory is no plain memory (sparse, quantized, nested, meta, a subclass), or is gone.
        OutOfMemory: it has to be copied, and there is no memory for that.
        Closed: it is a GPU's, and this is a fork of a process that used CUDA.
    """
    _refuse_exotic(tensor)
    if tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor) or not tensor.is_cpu:
        check_size(tensor, most)
    if not tensor.is_cpu:
        check_memory(tensor)
        tensor = _to_cpu(tensor)
    tensor = tensor.detach()
    if not (is_zero_tensor(tensor) or has_memory(tensor)):
        raise UnsupportedLeaf(f"a tensor of shape {list(tensor.shape)} whose memory was let go (storage resized to 0)")
    if tensor.is_conj() or tensor.is_neg():
        tensor = copied(tensor, lambda: straight(tensor).resolve_conj().resolve_neg())
    if is_zero_tensor(tensor):
        return copied(tensor, tensor.clone)
    if not tensor.is_contiguous() and dense_order(tensor) is None:
        return gathered(tensor, most)
    return tensor


def check_size(tensor: torch.Tensor, most: int, itemsize: int = 0) -> None:
    """See that a plain tensor may fit, before it is copied.

    Args:
        tensor: a strided one.
        most: bytes.
        itemsize: bytes that each of its items is sent as; 0: its own.

    Raises:
        SharedMemoryError: it takes more.
    """
    nbytes = tensor.numel() * (itemsize or tensor.itemsize)
    if nbytes > most:
        raise SharedMemoryError(
            errno.ENOSPC,
            f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} takes {nbytes} bytes to send "
            f"and can never fit: the capacity is {most} bytes; send it before it is expanded, or in parts",
        )


def check_memory(tensor: torch.Tensor, itemsize: int = 0) -> None:
    """See that there is memory for a plain tensor's copy, before it is made: a full cgroup kills.

    Args:
        tensor: a strided one.
        itemsize: bytes of each of the copy's items; 0: its own.

    Raises:
        OutOfMemory: there is not.
    """
    nbytes = tensor.numel() * (itemsize or tensor.itemsize)
    left = lacks_room(nbytes)
    if left is not None:
        raise _no_memory(tensor, nbytes, f"{left:,} bytes of memory are left")


@alone_in_a_child
def copied(tensor: torch.Tensor, copy: Callable[[], _Copy]) -> _Copy:
    """Return what ``copy`` makes of a plain tensor, in as many bytes.

    Raises:
        OutOfMemory: there is no memory for it.
    """
    check_memory(tensor)
    before = sys.exc_info()[1]
    try:
        return copy()
    except (RuntimeError, MemoryError) as error:  # torch has no type for it; whatever else it may be, its own text says
        raise_signals(error, before)
        raise _no_memory(tensor, tensor.nbytes, f"{error}") from None


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor's memory is there, or there are no items. Of a storage that is gone, torch adds the offset
    to a null pointer."""
    return bool(tensor.data_ptr() >> OFFSETS or not tensor.numel() or tensor.untyped_storage().data_ptr())


def straight(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that torch may compute with: itself, or a copy made by NumPy.

    Torch's kernels may crash on complex128 that is halfway between two multiples of its size.
    """
    if tensor.dtype is not torch.complex128 or is_zero_tensor(tensor) or tensor.data_ptr() % WIDEST == 0:
        return tensor
    array = (tensor.conj() if tensor.is_conj() else tensor).numpy()
    return torch.from_numpy(np.array(array.conj() if tensor.is_conj() else array, order="C"))


def _no_memory(tensor: torch.Tensor, nbytes: int, why: str) -> OutOfMemory:
    return OutOfMemory(
        f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} is copied to be sent, in "
        f"{nbytes:,} bytes of memory of its own (its storage has {tensor.untyped_storage().nbytes():,}): {why}; "
        "send it before it is expanded, or in parts. It was not sent"
    )


def gathered(tensor: torch.Tensor, most: int = _ANY) -> torch.Tensor:
    """Return a tensor without gaps or overlaps: itself, or a copy.

    Raises:
        SharedMemoryError: it takes more than ``most`` bytes.
        OutOfMemory: there is no memory for the copy.
    """
    check_size(tensor, most)
    return tensor if tensor.is_contiguous() else copied(tensor, lambda: straight(tensor).contiguous())


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.cpu()
    except RuntimeError as error:
        reraise_from_handler(error)
        if "fork" not in str(error):
            raise
        raise Closed(
            "CUDA was used in the process that this one was forked from, and cannot be used after a fork; start it with "
            "spawn or forkserver"
        ) from error


def describe(tensor: torch.Tensor) -> TensorMeta:
    """Return the meta of a plain tensor.

    Raises:
        UnsupportedLeaf: its dtype is not in the table.
    """
    if tensor.dtype not in BY_TORCH:
        raise UnsupportedLeaf(f"a tensor of {tensor.dtype}, which has no code on the wire")
    order = None if tensor.is_contiguous() else dense_order(tensor)
    return meta_of(tensor.dtype, tensor.shape, order)


def expect(tensor: Any, meta: TensorMeta) -> torch.Tensor:
    """``tensor``, if it is one of ``meta``'s dtype and shape.

    Raises:
        ProtocolError: it is not.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ProtocolError(f"the payload holds a {type(tensor).__name__}, not a tensor")
    if meta.dtype is None:
        return tensor
    if tensor.is_nested or tensor.layout is not torch.strided:  # a nested one has no shape to ask for
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise ProtocolError(f"the payload holds a tensor that is {kind}, the header says {meta!r}")
    if (tensor.dtype, tensor.shape) != (meta.dtype, meta.shape):
        raise ProtocolError(
            f"the payload holds {tensor.dtype} {list(tensor.shape)}, the header says {meta.dtype} {list(meta.shape)}"
        )
    return tensor


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions from outermost to innermost in memory, or None for a tensor with gaps or overlaps."""
    strides, shape = tensor.stride(), tensor.shape
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim] != 1), reverse=True)
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= shape[dim]
    return tuple(order)


def _refuse_exotic(tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedLeaf(
            f"{type(tensor).__module__}.{type(tensor).__qualname__} is a tensor subclass; "
            "send .as_subclass(torch.Tensor), or its parts"
        )
    if tensor.is_nested:
        raise UnsupportedLeaf("a nested tensor; send .unbind() of it, or use serializer='torch_save'")
    if tensor.is_quantized:
        raise UnsupportedLeaf("a quantized tensor; send .int_repr() and its scale, or use serializer='torch_save'")
    if tensor.is_mkldnn:
        raise UnsupportedLeaf("an mkldnn tensor, whose memory only mkldnn can read; send .to_dense()")
    if tensor.layout is not torch.strided:
        raise UnsupportedLeaf(f"a tensor of layout {tensor.layout}; send .to_dense(), or use serializer='torch_save'")
    if tensor.is_meta:
        raise UnsupportedLeaf("a meta tensor, which has no items; send its shape and dtype")
