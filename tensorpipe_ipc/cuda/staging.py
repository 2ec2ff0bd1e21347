"""CUDA's door: tensors of GPUs on their way through shared memory. Every call of CUDA's that this package makes stands here.

::

    put    GPU tensor ─ side stream, after the caller's ─> block        get    block ─ side stream ─> GPU tensor
           the put waits for the copy's event, then queues                     the caller's stream waits for its event;
                                                                               the block is held until it is done

**Page-locked.** A block's pages are registered with CUDA when the process first copies to or from them, and stay so: then
both copies are DMA, and the CPU copies nothing. Of a segment of a terabyte only what is used can be locked; so it is done
by block, from its first page to a tensor's last: two tensors of a message may share a page. A page-locked page
must never be punched out, as the GPU would go on with the old one; so whoever locks any says so at the segment's head, and no
process punches from then on: an arena that GPUs use does not shrink. Nor is it unmapped before the process ends.

Where registration fails, one warning says why and what to do, and copies are pageable from then on: the driver's own
way, which is slower, and right. Small tensors, and frames of endpoints that share no memory, are copied so in any case.

CUDA is not initialised by anything here that is not handed a GPU's tensor or the name of a GPU. In a child that was forked
from a process that used CUDA it cannot be used, as torch says; here that is ``Closed``, before anything is taken or put.

Which calls are made stands in ``Cuda``; tests put a recording in its place. Without a GPU, only that has been tested.
Tensors that stay on their GPU (``cuda_ipc=True``) go by device_blocks.py, which copies through here.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import deque
from typing import Any

import torch

from tensorpipe_ipc import borrowed
from tensorpipe_ipc.errors import Closed
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.memory.extents import block_around
from tensorpipe_ipc.memory.segment import PAGE, PAGE_LOCKED, Segment, segment_at
from tensorpipe_ipc.serializers.base import check_memory, dense_order
from tensorpipe_ipc.wire.arrival import AS_SENT, DecodeOptions
from tensorpipe_ipc.wire.layout import BULK, LazyPayload
from tensorpipe_ipc.wire.metas import METAS, TensorMeta, meta_of

__all__ = [
    "Cuda",
    "Staged",
    "Staging",
    "StagingEncoder",
    "allocated",
    "arrival_of",
    "staged",
    "staging",
    "unstager",
    "wanted",
]

MOST_PENDING = 8  # copies to a GPU that may be under way, each of which holds its block
_ERRORS = {
    1: "CUDA does not take this memory (cudaErrorInvalidValue)",
    2: "there is not as much memory to lock (raise the limit: ulimit -l unlimited, docker run --ulimit memlock=-1)",
    801: "this system cannot page-lock memory that was mapped elsewhere (cudaErrorNotSupported; WSL2, some containers)",
}
_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class Cuda:
    """The calls, one by one."""

    def is_initialized(self) -> bool:
        """Return whether this process uses CUDA."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def is_bad_fork(self) -> bool:
        """Return whether this is a fork of a process that used CUDA."""
        return borrowed.is_bad_fork()

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies on one."""
        return tensor.is_cuda

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that a tensor lies on."""
        return tensor.device

    def register(self, address: int, nbytes: int) -> int:
        """Page-lock memory, for all GPUs. CUDA's error code; 0: done."""
        portable = 1  # cudaHostRegisterPortable
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, portable))  # type: ignore[no-untyped-call]
        if code:  # CUDA keeps it, and the next kernel of this thread would raise it: have that be this one
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
        return code

    def unregister(self, address: int) -> None:
        """Let go of what ``register`` locked."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def side_stream(self, device: torch.device) -> Any:
        """Return a stream of our own."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wait(self, stream: Any) -> None:
        """Wait until a stream has done what it was told up to now."""
        stream.synchronize()

    def current_stream(self, device: torch.device) -> Any:
        """Return the caller's stream."""
        return torch.cuda.current_stream(device)

    def order(self, later: Any, earlier: Any) -> None:
        """Have what ``later`` does from now on come after what ``earlier`` was told up to now."""
        later.wait_stream(earlier)

    def event(self) -> Any:
        """Return a new event."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy(self, stream: Any, to: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Begin a copy on a stream. Return the event of its end."""
        event = self.event()
        with torch.cuda.stream(stream):
            to.copy_(tensor, non_blocking=True)
            event.record(stream)
        return event

    def empty_like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor of a GPU's, in the memory of the caller's stream."""
        return torch.empty_like(tensor, device=device)

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor on a GPU, by torch's own way; itself where it lies there."""
        return tensor.to(device)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """A tensor's memory is not used again before a stream is done with it."""
        tensor.record_stream(stream)

    def resolve(self, device: torch.device) -> torch.device:
        """Return a device with its number."""
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            raise RuntimeError(f"it has {count}")
        return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


class Staging:
    """One process's copies between blocks and GPUs.

    Attributes:
        pageable: why copies are not DMA; "" as long as nothing is in the way.
    """

    def __init__(self, cuda: Cuda | None = None) -> None:
        self.cuda = cuda or Cuda()
        self.pageable = ""
        self._locked: dict[int, int] = {}  # by address of its first page: bytes
        self._segments: set[Segment] = set()  # they must not be unmapped while pages are locked
        self._streams: dict[torch.device, Any] = {}
        self._pending: deque[tuple[Any, torch.Tensor]] = deque()

    def stage(self, tensor: torch.Tensor, place: torch.Tensor) -> None:
        """Copy a GPU's tensor into a block. When this returns, it is there.

        Args:
            tensor: dense.
            place: of the block's memory, of the same dtype and shape.
        """
        if not self._lock(place):
            place.copy_(tensor)
            return
        event = self.copy_from(tensor, place)
        try:
            event.synchronize()  # the ticket may be given only when the bytes are there
        except BaseException:
            event.synchronize()
            raise

    def copy_from(self, tensor: torch.Tensor, place: torch.Tensor) -> Any:
        """Begin to copy a GPU's tensor as the caller's stream left it. The copy's event."""
        device = self.cuda.device_of(tensor)
        stream = self._stream(device)
        self.cuda.order(stream, self.cuda.current_stream(device))
        try:
            event = self.cuda.copy(stream, place, tensor)
            self.cuda.keep_for(tensor, stream)
        except BaseException:
            self.cuda.wait(stream)  # or the place would be another's while the GPU writes there
            raise
        return event

    def copy_to(self, device: torch.device, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin to copy a tensor into memory of a GPU's, for the caller's stream. The copy, and its event."""
        made = self.cuda.empty_like(tensor, device)
        stream, current = self._stream(device), self.cuda.current_stream(device)
        self.cuda.order(stream, current)  # whose memory may have been in use there a moment ago
        try:
            event = self.cuda.copy(stream, made, tensor)
            self.cuda.order(current, stream)
            self.cuda.keep_for(made, stream)
        except BaseException:
            self.cuda.wait(stream)
            raise
        return made, event

    def unstage(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor on a GPU, of one on the CPU. What it lies on is held until it was read.

        Args:
            device: with its number.
        """
        self.release()
        if self.cuda.is_on_gpu(tensor):  # it stayed on one
            return self.cuda.move(tensor, device)
        if tensor.layout is not torch.strided or tensor.nbytes < BULK or not self._lock(tensor):
            return self.cuda.move(tensor, device)
        made, event = self.copy_to(device, tensor)
        self._pending.append((event, tensor))
        return made

    def release(self) -> None:
        """Let go of what copies that are done lay on; of too many that are not, wait for the oldest."""
        while (oldest := self._oldest()) is not None:
            if not oldest[0].query():
                if len(self._pending) < MOST_PENDING:
                    return
                oldest[0].synchronize()
            self._let_go_of(oldest)

    def finish(self) -> None:
        """Wait for all copies, and let go."""
        while (oldest := self._oldest()) is not None:
            oldest[0].synchronize()
            self._let_go_of(oldest)

    def _oldest(self) -> tuple[Any, torch.Tensor] | None:
        try:
            return self._pending[0]
        except IndexError:
            return None

    def _let_go_of(self, done: tuple[Any, torch.Tensor]) -> None:
        with contextlib.suppress(ValueError):  # another thread has waited for it, too
            self._pending.remove(done)

    def _stream(self, device: torch.device) -> Any:
        found = self._streams.get(device)
        if found is None:
            found = self._streams[device] = self.cuda.side_stream(device)
        return found

    def _lock(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's pages are page-locked now. Only a segment's are: others may be freed at any time."""
        segment = None if self.pageable else segment_at(tensor.data_ptr())
        if segment is None:
            return False
        segment.words[PAGE_LOCKED] = 1  # before it is so
        self._segments.add(segment)
        origin = segment.octets.ctypes.data
        block = block_around(segment, tensor.data_ptr() - origin)
        start = origin + block
        nbytes = -(-(tensor.data_ptr() + tensor.nbytes - start) // PAGE) * PAGE
        locked = self._locked.get(start, 0)
        if locked >= nbytes:
            return True
        if locked:
            self.finish()
            self.cuda.unregister(start)
            del self._locked[start]
        code = self.cuda.register(start, nbytes)
        if code == _ALREADY:  # a part of it is, by the program: that part may not be relied on
            return False
        if code:
            self.pageable = _ERRORS.get(code, f"cudaHostRegister failed with error {code}")
            _warn(self.pageable)
            return False
        self._locked[start] = nbytes
        return True


class StagingEncoder:
    """An encoder before which large GPU tensors are made payloads that are copied straight into their block."""

    def __init__(self, encoder: Any, at_work: Staging) -> None:
        self._encoder, self._staging, self.name = encoder, at_work, encoder.name
        self.wire_dtype = getattr(encoder, "wire_dtype", None)
        self.encode_span = getattr(encoder, "encode_span", None)
        self._stages = bool(getattr(encoder, "is_memory", False))

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        """See ``Serializer.encode``."""
        if not self._stages or not self._staging.cuda.is_on_gpu(tensor) or type(tensor) is not torch.Tensor:
            return self._encoder.encode(tensor)  # type: ignore[no-any-return]
        known = tensor.layout is torch.strided and tensor.dtype in METAS and not (tensor.is_conj() or tensor.is_neg())
        if not known or tensor.nbytes < BULK:
            return self._encoder.encode(tensor)  # type: ignore[no-any-return]
        tensor = tensor.detach()
        order = None if tensor.is_contiguous() else dense_order(tensor)
        if order is None and not tensor.is_contiguous():  # it is gathered
            return self._encoder.encode(tensor)  # type: ignore[no-any-return]
        dense = tensor if order is None else tensor.permute(order)
        return meta_of(tensor.dtype, tensor.shape, order), Staged(self._staging, dense)


class Staged(LazyPayload):
    """A large GPU tensor on its way into a block.

    Attributes:
        tensor: dense, its dimensions in the order of memory.
    """

    __slots__ = ("_staging", "tensor")

    def __init__(self, at_work: Staging, tensor: torch.Tensor) -> None:
        self._staging, self.tensor = at_work, tensor

    def __len__(self) -> int:
        return self.tensor.nbytes

    def write_into(self, place: memoryview) -> None:
        """See ``LazyPayload``."""
        there = torch.frombuffer(place, dtype=self.tensor.dtype).view(self.tensor.shape)
        self._staging.stage(self.tensor, there)

    def write_part(self, place: memoryview, start: int) -> None:
        """See ``LazyPayload``. The place is no block, and stays pageable."""
        octets = self.tensor.view(-1).view(torch.uint8)
        torch.frombuffer(place, dtype=torch.uint8).copy_(octets[start : start + len(place)])

    def frame(self) -> memoryview:
        """See ``LazyPayload``."""
        check_memory(self.tensor)
        octets = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu")
        octets.copy_(self.tensor)
        memory: memoryview = octets.view(-1).view(torch.uint8).numpy().data
        return memory


def staging() -> Staging:
    """This process's."""
    return _own.get(None) or _own.setdefault(None, Staging())


_own: dict[None, Staging] = {}  # one, also where two threads ask first at one moment: it holds what copies lie on


def staged(encoder: Any, at_work: Staging | None = None) -> Any:
    """Return an encoder for the tensors that this process may have: one that stages, where it uses CUDA."""
    at_work = at_work or staging()
    return StagingEncoder(encoder, at_work) if at_work.cuda.is_initialized() else encoder


def unstager(device: Any, at_work: Staging | None = None) -> Any:
    """Return what moves tensors to a device; None for the CPU and for None.

    Raises:
        Closed: it is a GPU, and this is a fork of a process that used CUDA.
        ValueError: it is no device's name, or there is no such device here.
    """
    wanted = _device(device)
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        _see_it_takes_tensors(wanted)
        return lambda tensor: tensor.to(wanted)
    at_work = at_work or staging()
    if at_work.cuda.is_bad_fork():
        raise Closed(
            f"device={str(wanted)!r}: CUDA was used in the process that this one was forked from, and cannot be used after a "
            "fork; start it with spawn or forkserver"
        )
    try:
        chosen = at_work.cuda.resolve(wanted)
    except (AssertionError, RuntimeError) as error:  # so torch says that it is built without CUDA, or finds no driver
        raise ValueError(f"device={str(wanted)!r}: torch has no such GPU here: {error}") from error
    return functools.partial(at_work.unstage, device=chosen)


def wanted(arrival: DecodeOptions) -> torch.device | None:
    """Return the GPU that a receiver wants tensors on; None if that is none."""
    found = getattr(arrival.unstage, "keywords", {}).get("device")
    return found if isinstance(found, torch.device) else None


@functools.cache  # but for what it raises
def _see_it_takes_tensors(device: torch.device) -> None:
    try:
        torch.empty(1, device="cpu").to(device)
    except Exception as error:  # each backend that is missing has a type of its own
        reraise_from_handler(error)
        raise ValueError(f"device={str(device)!r}: torch has no such device here: {error}") from error


def _device(device: Any) -> torch.device:
    try:
        return torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        reraise_from_handler(error)
        raise ValueError(f"device={device!r} names no device: {error}") from None


def arrival_of(restore: bool, as_numpy: bool, device: Any) -> DecodeOptions:
    """Return what a receiver wants, checked.

    Raises:
        ValueError: arrays on a device; or as ``unstager``.
        Closed: as ``unstager``.
    """
    if as_numpy and _device(device).type != "cpu":
        raise ValueError(
            f"as_numpy=True with device={str(device)!r}: NumPy's arrays lie on the CPU; give one of the two"
        )
    unstage = unstager(device)
    return (
        AS_SENT
        if restore and not as_numpy and unstage is None
        else DecodeOptions(bool(restore), bool(as_numpy), unstage)
    )


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"shared memory could not be page-locked: {reason}; GPU tensors are copied by the CPU from now on",
        RuntimeWarning,
        stacklevel=2,
    )


def allocated() -> dict[str, int]:
    """Return bytes that torch has allocated in this process, by GPU. Empty, and CUDA is left alone, where it was not used."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {f"cuda:{index}": torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())}
