"""Device blocks: memory of a GPU that one process lends to others on the same GPU (CUDA IPC).

::

    put    GPU tensor ─> device block, and the put waits          get    device block ─> memory of the receiver's own,
           its name goes into the message, in place of bytes             and the get waits: then the message's block is let go

**A block** is an allocation of its own, made once, whole units of 2 MiB (smaller ones share theirs with strangers, and a
handle opens all of it). Its handle is made with it, once. A receiver opens the handle once, and keeps it open while the owner
lives. A process lends memory of one GPU, the first that it was asked for: tensors of others are staged.
torch's own way of sharing would make an event, and a count in /dev/shm, for each tensor sent, and bind the sender's memory
to the receiver's tensors.

**What is received is a copy**, so it may be sent on, and lives on when its sender is gone. It is one copy more than
lending the memory itself would take, at the speed of the GPU's memory.

**Both sides wait on the CPU**, and no event crosses. An event that was recorded by a process which was killed may never
be done, and a stream that was told to wait for it would hang. So a name is sent when its bytes are there; and a device
block is used again when the message's block in shared memory is free. Its consumer frees that after the copy; for a dead
consumer the recovering process does. A dead consumer has only read, and harms nobody if its GPU still reads for a moment.

**What dies with its sender.** A message that goes so lies in the sender's GPU memory, and is lost if that process ends
before it was taken; the receiver gets ``PeerLost``.

**Which calls** are made stands in ``DeviceMemory``: the driver's own, through ctypes, as torch has none for these. Without a
GPU, only a stand-in for them has been tested.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Annotated, Any
from uuid import UUID

import msgspec
import torch

from tensorpipe_ipc.cuda.staging import Staged, Staging, staging
from tensorpipe_ipc.errors import PeerLost, ProtocolError, SharedMemoryError
from tensorpipe_ipc.process import Identity, identity, is_alive
from tensorpipe_ipc.wire.layout import ALIGN

__all__ = ["BlockName", "DeviceBlock", "DeviceBlocks", "DeviceMemory", "device_blocks", "places_in"]

UNIT = 2 << 20  # bytes; the driver hands out smaller allocations in parts of one, and exports it as a whole
SHARE = 8  # of a GPU's memory, at most the eighth part is lent
HANDLE = 64  # bytes
PATTERN = 64  # bytes of a block that a self-test looks at


class BlockName(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The facts that another process needs to read a device block. Plain data, which may have come from anybody.

    Attributes:
        gpu: the GPU's UUID.
        token, number: of the block's owner, and of the block among the owner's.
        handle: CUDA's, of the whole allocation.
        nbytes: of the block.
        owner: the process whose memory it is.
    """

    gpu: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    token: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE, max_length=HANDLE)]
    nbytes: Annotated[int, msgspec.Meta(ge=UNIT, lt=1 << 48)]
    owner: Identity


class DeviceMemory:
    """The calls, one by one. Each raises SharedMemoryError with CUDA's name for what failed."""

    def gpus(self) -> list[bytes]:
        """UUIDs of the GPUs that this process sees, by their index."""
        gpus = range(torch.cuda.device_count())
        try:
            return [UUID(str(torch.cuda.get_device_properties(index).uuid)).bytes for index in gpus]
        except (AttributeError, ValueError, RuntimeError) as error:
            raise SharedMemoryError(errno.ENOTSUP, f"torch does not tell the UUIDs of GPUs here: {error}") from None

    def total(self, index: int) -> int:
        """Return bytes of memory that a GPU has."""
        return int(torch.cuda.get_device_properties(index).total_memory)

    def allocate(self, index: int, nbytes: int) -> int:
        """Its address."""
        address = ctypes.c_uint64()
        self._call(index, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, index: int, address: int) -> None:
        """Give an allocation back."""
        self._call(index, "cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, index: int, address: int) -> bytes:
        """Return the handle of an allocation."""
        handle = _Handle()
        self._call(index, "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, index: int, handle: bytes) -> tuple[int, int]:
        """Address and bytes, in this process, of the allocation that a handle names."""
        address, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        peers = ctypes.c_uint(1)  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only value that is allowed
        self._call(index, "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), peers)
        try:
            self._call(index, "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        except BaseException:
            self.close(index, address.value)
            raise
        return address.value, size.value - (address.value - base.value)

    def close(self, index: int, address: int) -> None:
        """Let go of what was opened."""
        self._call(index, "cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def tensor_at(self, index: int, address: int, nbytes: int) -> torch.Tensor:
        """Memory of a GPU as bytes. It is not kept by them."""
        return torch.as_tensor(_Window(address, nbytes), device=torch.device("cuda", index))

    def _call(self, index: int, name: str, *arguments: Any) -> None:
        """In the context that torch has on a GPU: which one is current is a matter of each thread's last call."""
        driver, current = _driver(), ctypes.c_void_p()
        _check(driver, "cuCtxPushCurrent_v2", driver.cuCtxPushCurrent_v2(_context(index)))
        try:
            _check(driver, name, getattr(driver, name)(*arguments))
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(current))


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE),)


class _Window:
    """Memory in the form that torch takes it in."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise SharedMemoryError(errno.ENOTSUP, f"CUDA's driver cannot be called: {error}") from None
    _check(driver, "cuInit", driver.cuInit(0))
    return driver


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """Return the context that torch uses, too. It is never given back."""
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index))
    retain = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    _check(driver, "cuDevicePrimaryCtxRetain", retain)
    return context


def _check(driver: Any, name: str, code: int) -> None:
    if code:
        said = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(said))
        raise SharedMemoryError(errno.EIO, f"{name}: {(said.value or b'error').decode()} ({code})")


class DeviceBlock:
    """Memory of a GPU that this process lends.

    Attributes:
        name: what is sent of it.
        memory: its bytes.
        used_by: a weak reference to the message that is being put. While that lives, the block is in use.
        is_claimed: of a message that was put: whether it is still in the queue, or being taken.
    """

    __slots__ = ("is_claimed", "memory", "name", "used_by")

    def __init__(self, name: BlockName, memory: torch.Tensor) -> None:
        self.name, self.memory = name, memory
        self.used_by: Callable[[], Any] = _nobody
        self.is_claimed: Callable[[], bool] = _is_not

    def is_free(self) -> bool:
        """Return whether nobody will read it any more."""
        return self.used_by() is None and not self.is_claimed()


class DeviceBlocks:
    """One process's device blocks, and those of others that it has opened.

    Attributes:
        staging: what copies.
        token: a random number that stands for this process's blocks.
        index: the GPU's whose memory it lends; None as long as it was not asked for any.
    """

    def __init__(self, at_work: Staging, memory: DeviceMemory | None = None) -> None:
        self.staging, self._memory = at_work, memory or DeviceMemory()
        self.token = 1 + int.from_bytes(os.urandom(5), "little") % ((1 << 40) - 1)
        self.index: int | None = None
        self._numbers = count()
        self._made: dict[int, DeviceBlock] = {}
        self._free: defaultdict[int, list[DeviceBlock]] = defaultdict(list)  # by bytes, the last used last
        self._lent: list[DeviceBlock] = []
        self._test: DeviceBlock | None = None
        self._opened: dict[tuple[int, int], tuple[int, int, torch.Tensor, Identity]] = {}
        self._nbytes = 0
        self._refused = ""  # why CUDA exports none of the GPU's memory

    # ---- lending

    def lends(self, index: int) -> bool:
        """Return whether this process lends memory of a GPU."""
        self.index = index if self.index is None else self.index
        return index == self.index

    def take(self, nbytes: int, user: Any) -> DeviceBlock | None:
        """Return a block for a message, the last used first; None where as much is lent as may be.

        Args:
            user: the message, on which the block stays taken as long as it lives.

        Raises:
            SharedMemoryError: CUDA makes or exports none.
        """
        size = max(UNIT, 1 << (nbytes - 1).bit_length())
        self._take_back()
        try:
            block = self._free[size].pop()
        except IndexError:
            made = self._make(size)
            if made is None:
                return None
            block = made
        block.used_by, block.is_claimed = weakref.ref(user), _is_not
        self._lent.append(block)
        return block

    def test_block(self) -> DeviceBlock:
        """Return the block whose first bytes any receiver knows.

        Raises:
            SharedMemoryError: CUDA makes or exports none.
        """
        if self._test is None:
            block = self._make(UNIT, is_test=True)
            assert block is not None
            pattern = torch.frombuffer(bytearray(_pattern(block.name)), dtype=torch.uint8)
            block.memory[:PATTERN].copy_(pattern)  # from pageable memory: it is there when this returns
            self._test = block
        return self._test

    def fill(self, block: DeviceBlock, places: Sequence[tuple[Staged, int]]) -> None:
        """Copy tensors of the block's GPU into it, each at its place. When this returns, they are there."""
        events = []
        for staged, start in places:
            tensor = staged.tensor
            there = block.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            events.append(self.staging.copy_from(tensor, there))
        for event in events:
            event.synchronize()

    def _take_back(self) -> None:
        for block in [block for block in list(self._lent) if block.is_free()]:
            try:
                self._lent.remove(block)
            except ValueError:  # another thread takes it
                continue
            self._free[block.name.nbytes].append(block)

    def _make(self, size: int, *, is_test: bool = False) -> DeviceBlock | None:
        if self._refused:  # as WSL2 does, and some containers: it will not change
            raise SharedMemoryError(errno.ENOTSUP, self._refused)
        assert self.index is not None
        if not is_test and self._nbytes + size > self._memory.total(self.index) // SHARE:
            return None
        gpu = self._memory.gpus()[self.index]
        address = self._memory.allocate(self.index, size)
        try:
            handle = self._memory.export(self.index, address)
        except SharedMemoryError as error:
            self._refused = str(error)
            self._memory.free(self.index, address)
            raise
        name = BlockName(gpu, self.token, next(self._numbers), handle, size, identity())
        block = self._made[name.number] = DeviceBlock(name, self._memory.tensor_at(self.index, address, size))
        self._nbytes += size
        return block

    # ---- reading

    def passes(self, name: BlockName) -> bool:
        """Return whether a test block can be read, and holds what it should.

        Raises:
            SharedMemoryError: this process sees no such GPU, or CUDA refuses.
        """
        found, event = self.copy_out(name, 0, PATTERN, None)
        assert event is None
        return bytes(found.tolist()) == _pattern(name)

    def copy_out(
        self, name: BlockName, start: int, nbytes: int, device: torch.device | None
    ) -> tuple[torch.Tensor, Any]:
        """Begin to copy bytes of a block. They, and the copy's event, on which the caller has to wait.

        Args:
            device: the GPU that they are wanted on; None: the CPU. Then they are there, and there is no event.

        Raises:
            PeerLost: the process that lent the block is gone, and its memory with it.
            SharedMemoryError: this process sees no such GPU, or CUDA refuses.
            ProtocolError: the block is smaller.
        """
        source = self._memory_of(name)
        if start + nbytes > len(source):
            raise ProtocolError(f"{nbytes} bytes at {start} of a device block of {len(source)}")
        source = source[start : start + nbytes]
        if device is None:
            return source.to("cpu", copy=True), None
        return self.staging.copy_to(device, source)

    def _memory_of(self, name: BlockName) -> torch.Tensor:
        if name.token == self.token:  # CUDA does not open what a process exported itself
            if name.number not in self._made:
                raise ProtocolError(f"device block {name.number} of this process, which has {len(self._made)}")
            return self._made[name.number].memory
        key = name.token, name.number
        found = self._opened.get(key)
        if found is None:
            self._close_those_of_the_dead()
            found = self._opened[key] = self._open(name)
        return found[2]

    def _open(self, name: BlockName) -> tuple[int, int, torch.Tensor, Identity]:
        gpus = self._memory.gpus()
        if name.gpu not in gpus:
            raise SharedMemoryError(
                errno.ENODEV, f"GPU {name.gpu.hex()} of {name.owner} is none that this process sees"
            )
        index = gpus.index(name.gpu)
        try:
            address, size = self._memory.open(index, name.handle)
        except SharedMemoryError as error:
            if not is_alive(name.owner):
                raise PeerLost(f"a message that lay in the GPU memory of {name.owner} was lost with it") from error
            raise
        return index, address, self._memory.tensor_at(index, address, min(size, name.nbytes)), name.owner

    def _close_those_of_the_dead(self) -> None:
        for key in [key for key, (_, _, _, owner) in list(self._opened.items()) if not is_alive(owner)]:
            opened = self._opened.pop(key, None)
            if opened is not None:  # else another thread has just seen to it
                self._memory.close(*opened[:2])


def places_in(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where payloads begin that follow each other in a device block, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // ALIGN) * ALIGN
        starts.append(start)
        end = start + size
    return starts, end


def _pattern(name: BlockName) -> bytes:
    return (name.token << 24 | name.number & 0xFFFFFF).to_bytes(8, "little") * (PATTERN // 8)


def _nobody() -> None:
    return None


def _is_not() -> bool:
    return False


def device_blocks() -> DeviceBlocks:
    """This process's."""
    return _own.get(None) or _own.setdefault(None, DeviceBlocks(staging()))


_own: dict[None, DeviceBlocks] = {}  # one, also where two threads ask first at one moment
