"""The checks that prove a user's serializer, and the guard around it afterwards.

They need no test framework: ``check_serializer(MySerializer())`` raises at the first tensor that does not come back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tensorpipe_ipc.errors import OutOfMemory, ProtocolError, TensorPipeError, UnsupportedLeaf
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.serializers.base import Serializer, dense_order, expect
from tensorpipe_ipc.wire.dtypes import BY_TORCH, WIDEST
from tensorpipe_ipc.wire.layout import BULK, kept
from tensorpipe_ipc.wire.metas import TensorMeta
from tensorpipe_ipc.wire.room import lacks_memory, see_room_to_take
from tensorpipe_ipc.wire.threads import alone_in_a_child

__all__ = ["Checked", "NoMemoryForIt", "check_serializer"]


class NoMemoryForIt(ProtocolError):
    """A user's serializer finds no memory for what a peer may have made up. It is dropped, and told as OutOfMemory."""


class Checked:
    """A user's serializer, held to its contract on every call: its errors become ours, its results are checked.

    Attributes:
        wary: the same for messages that anybody may have made up, unless it is that. Want of memory is ``NoMemoryForIt``.
    """

    def __init__(self, serializer: Serializer, *, is_wary: bool = False) -> None:
        self.serializer, self._is_wary = serializer, is_wary
        self.wary = None if is_wary else Checked(serializer, is_wary=True)
        self.name = serializer.name
        self.zero_copy = bool(serializer.zero_copy)

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        """As the serializer's, with a payload that keeps the tensor: it may be a view of a copy that nobody else has.

        Raises:
            UnsupportedLeaf: or anything else that it raises of its own.
            OutOfMemory: it found no memory.
        """
        try:
            meta, payload = self.serializer.encode(tensor)
            if not isinstance(meta, TensorMeta):
                raise TypeError(f"encode() gave a {type(meta).__name__} for a meta; return describe(tensor)")
            return meta, kept(memoryview(payload).cast("B"), tensor)
        except TensorPipeError:
            raise
        except Exception as error:
            reraise_from_handler(error)
            if lacks_memory(error):
                raise OutOfMemory(
                    f"serializer {self.name!r} found no memory for {tensor.dtype} {list(tensor.shape)}: {error}; "
                    "send it in parts. It was not sent"
                ) from error
            raise UnsupportedLeaf(
                f"serializer {self.name!r} failed on {tensor.dtype} {list(tensor.shape)}: {error!r}"
            ) from error

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        """As the serializer's, but copied where torch's kernels would crash on items that lie as these do.

        Raises:
            ProtocolError: a tensor of another kind, or with gaps or overlaps; or anything that it raises of its own, also what
                is no Exception, as a foreign runtime's panic.
            OutOfMemory: there was no memory.
        """
        try:
            tensor = expect(self.serializer.decode(meta, payload), meta)
            if not _has_memory(tensor):
                return tensor
            _see_that_it_is_dense(tensor)
            return _straightened(tensor) if _is_crooked(tensor, meta) else tensor
        except (TensorPipeError, KeyboardInterrupt, SystemExit):  # a handler's, which may have been reset meanwhile
            raise
        except BaseException as error:
            reraise_from_handler(error)
            if lacks_memory(error):
                kind = NoMemoryForIt if self._is_wary else OutOfMemory
                raise kind(f"serializer {self.name!r} found no memory to decode {meta!r}: {error}") from None
            raise ProtocolError(f"serializer {self.name!r} could not decode {meta!r}: {error!r}") from error


def _is_crooked(tensor: torch.Tensor, meta: TensorMeta) -> bool:
    """Return whether wide items lie where a serializer's own head has moved them."""
    row = BY_TORCH.get(tensor.dtype)
    is_wide = WIDEST in (meta.alignment, row.alignment if row else 0)
    return is_wide and tensor.data_ptr() % WIDEST != 0


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() > 0


def _see_that_it_is_dense(tensor: torch.Tensor) -> None:
    """See that a tensor has no more items than memory: else whoever copies it takes what a peer only says."""
    if not tensor.is_contiguous() and dense_order(tensor) is None:
        raise ProtocolError(
            f"decode() gave a tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())}, which has gaps or "
            "overlaps; return its contiguous()"
        )


@alone_in_a_child
def _straightened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a dense tensor. It is copied as bytes, by NumPy: torch's own copy crashes on complex128.

    Raises:
        OutOfMemory: there is no memory for it.
    """
    if tensor.is_neg():
        return tensor.resolve_neg()
    plain = tensor.detach().conj() if tensor.is_conj() else tensor.detach()
    row = plain.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    if row.nbytes >= BULK:
        see_room_to_take(row.nbytes)
    copy = torch.from_numpy(row.numpy().copy()).view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)
    return copy.conj() if tensor.is_conj() else copy


def check_serializer(serializer: Serializer) -> None:
    """Send every kind of tensor through a serializer and back.

    Each must come back dense, with its dtype, shape and items. Neither it nor its bytes must be changed, as they may be read
    again. It must be refused, if at all, with an UnsupportedLeaf. A serializer with an attribute ``lossy = True`` need not give
    equal items, but of uint8: memory that several tensors share, ``bytes`` and pickles are sent through it as that. What comes
    back may lie on the payload only if ``zero_copy`` says so, and never on one that is read-only.

    Raises:
        TypeError: a check failed: which, and on what.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental", UserWarning)
        taken = [label for label, tensor in _samples() if _comes_back(serializer, label, tensor)]
    if not taken:
        raise TypeError(f"serializer {serializer.name!r} refuses every kind of tensor")


def _comes_back(serializer: Serializer, label: str, tensor: torch.Tensor) -> bool:
    before = _bits(tensor)
    try:
        meta, payload = Checked(serializer).encode(tensor)
    except UnsupportedLeaf as error:
        if error.__cause__ is not None:
            raise TypeError(f"{error.reason} (sample: {label})") from error.__cause__
        return False
    if before != _bits(tensor):
        raise TypeError(f"serializer {serializer.name!r} changed the tensor that it encoded ({label})")
    received = memoryview(bytearray(payload))
    for buffer in (received.toreadonly(), received, received):  # twice: a message may be read again
        try:
            again = Checked(serializer).decode(meta, buffer)
        except ProtocolError as error:
            raise TypeError(f"serializer {serializer.name!r} cannot read what it wrote ({label}): {error}") from error
        if received != payload:
            raise TypeError(
                f"serializer {serializer.name!r} changed its payload as it decoded {label}; leave the bytes as they are, as a "
                "message may be read again"
            )
        if not again.is_cpu:
            raise TypeError(f"serializer {serializer.name!r} decoded {label} to {again.device}; it must be the CPU")
        if (again.dtype, again.shape) != (tensor.dtype, tensor.shape):
            raise TypeError(
                f"serializer {serializer.name!r} gave {label} back as {again.dtype} of shape {list(again.shape)}"
            )
        is_exact = before == _bits(again)
        if not is_exact and tensor.dtype is torch.uint8:
            raise TypeError(
                f"serializer {serializer.name!r} gave {label} back with other items; it must be exact, also with lossy = True: "
                "memory that tensors share, bytes and pickles are sent as uint8"
            )
        if not is_exact and not getattr(serializer, "lossy", False):
            raise TypeError(
                f"serializer {serializer.name!r} gave {label} back with other items; say lossy = True if so"
            )
        if (buffer.readonly or not serializer.zero_copy) and _lies_on(again, received):
            raise TypeError(
                f"serializer {serializer.name!r} decoded {label} onto its payload, which "
                + ("is read-only" if buffer.readonly else "it may with zero_copy = True only")
            )
    return True


def _lies_on(tensor: torch.Tensor, payload: memoryview) -> bool:
    """Return whether the tensor changes with the payload."""
    before = _bits(tensor)
    kept = bytes(payload)
    payload[:] = bytes(byte ^ 0xFF for byte in kept)
    changed = _bits(tensor) != before
    payload[:] = kept
    return changed


def _bits(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.itemsize == 1:  # torch cannot clone all of them, where algorithms are to be deterministic
        tensor = tensor.view(torch.uint8)
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def _samples() -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in BY_TORCH:
        # Any bits are a number of any dtype here, but for bool.
        items = torch.arange(96, dtype=torch.uint8, device="cpu")
        yield (
            f"{dtype} of shape (2, 3)",
            (items % 2).bool()[:6].view(2, 3) if dtype is torch.bool else items.view(dtype)[:6].view(2, 3),
        )
    # Of few enough items that torch starts no threads: who registers at import may fork afterwards.
    yield "all values of uint8", torch.arange(1 << 13, device="cpu").to(torch.uint8)
    grid = torch.arange(24, dtype=torch.float32, device="cpu").view(2, 3, 4)
    yield "0-d", torch.tensor(3.5, device="cpu")
    yield "empty", torch.empty(0, 3, device="cpu")
    yield "transposed", grid.transpose(0, 2)
    yield "every other item", grid[:, :, ::2]
    yield "many equal items", torch.zeros(1 << 13, device="cpu")
    yield "expanded", torch.tensor([1.0, 2.0], device="cpu").expand(3, 2)
    yield "with a storage offset", grid[1, 1:]
    yield "conjugated", torch.tensor([1 + 2j, 3 - 4j], device="cpu").conj()
    yield "requires_grad", torch.ones(3, requires_grad=True, device="cpu")
