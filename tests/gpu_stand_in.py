"""A GPU that is none: it records what it is told, and its memory is files, which any process may map as CUDA IPC would let it.

Tensors of the stand-in's GPUs are CPU tensors that it knows. Every copy really happens, when its event is done.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tensorpipe_ipc.cuda import on_device, staging
from tensorpipe_ipc.cuda.device_blocks import DeviceBlocks, DeviceMemory
from tensorpipe_ipc.cuda.staging import Cuda, Staging
from tensorpipe_ipc.errors import SharedMemoryError

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Event:
    """Of copies, which are done when somebody waits for it, or ``finished`` is set."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls, self.copies, self.finished = calls, list[Any](), True

    def query(self) -> bool:
        return self.finished

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.done()

    def done(self) -> None:
        for copy in self.copies:
            copy()
        self.finished, self.copies = True, []  # which keep what was copied


class Recording(Cuda):
    """Says what it was asked to do."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[Any] = []
        self.code = code
        self.on_gpu: list[tuple[torch.Tensor, torch.device]] = []
        self.events: list[Event] = []
        self.bad_fork = False
        self.registered: dict[int, int] = {}  # by address: bytes

    def put_on(self, tensor: torch.Tensor, device: torch.device = GPU) -> torch.Tensor:
        self.on_gpu.append((tensor, device))
        return tensor

    def is_initialized(self) -> bool:
        return not self.bad_fork

    def is_bad_fork(self) -> bool:
        return self.bad_fork

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        return self.device_of(tensor).type == "cuda"

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        memory = tensor.untyped_storage().data_ptr()
        for known, device in self.on_gpu:
            if known is tensor or known.untyped_storage().data_ptr() == memory:
                return device
        return tensor.device

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor if self.device_of(tensor) == device else self.put_on(tensor.clone(), device)

    def register(self, address: int, nbytes: int) -> int:
        assert not address % 4096
        assert not nbytes % 4096
        self.calls.append("register")
        if any(start < address + nbytes and address < start + length for start, length in self.registered.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        if not self.code:
            self.registered[address] = nbytes
        return self.code

    def unregister(self, address: int) -> None:
        self.calls.append("unregister")
        del self.registered[address]

    def side_stream(self, device: torch.device) -> Any:
        self.calls.append(f"stream {device}")
        return f"side {device}"

    def wait(self, stream: Any) -> None:
        self.calls.append(f"wait for {stream}")
        for event in self.events:
            event.done()

    def current_stream(self, device: torch.device) -> Any:
        return f"current {device}"

    def order(self, later: Any, earlier: Any) -> None:
        self.calls.append(f"{later} after {earlier}")

    def event(self) -> Any:
        self.events.append(Event(self.calls))
        return self.events[-1]

    def copy(self, stream: Any, to: torch.Tensor, tensor: torch.Tensor) -> Any:
        self.calls.append(f"copy on {stream}")
        event = self.event()
        event.copies.append(functools.partial(_copy, to, _window(tensor)))
        event.finished = False
        return event

    def empty_like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.calls.append(f"empty on {device}")
        return self.put_on(torch.zeros_like(tensor), device)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        self.calls.append(f"keep for {stream}")

    def resolve(self, device: torch.device) -> torch.device:
        return device if device.index is not None else GPU


class Files(DeviceMemory):
    """Memory of GPUs as files in a folder.

    Attributes:
        refuses: what CUDA says instead of opening a handle.
        visible: UUIDs of the GPUs.
    """

    def __init__(self, folder: Path, size: int = 1 << 28) -> None:
        self.folder, self.size = folder, size
        self.refuses = ""
        self.visible = [bytes(16), bytes(15) + b"\1"]
        self.calls: list[str] = []
        self._names: dict[int, Path] = {}
        self._maps: dict[int, mmap.mmap] = {}

    def gpus(self) -> list[bytes]:
        return self.visible

    def total(self, index: int) -> int:
        return self.size

    def allocate(self, index: int, nbytes: int) -> int:
        self.calls.append(f"allocate {nbytes}")
        path = self.folder / uuid.uuid4().hex
        with path.open("xb") as file:
            file.truncate(nbytes)
        address = self._map(path)[0]
        self._names[address] = path
        return address

    def free(self, index: int, address: int) -> None:
        self.calls.append("free")
        self._names.pop(address).unlink()
        del self._maps[address]

    def export(self, index: int, address: int) -> bytes:
        self.calls.append("export")
        if self.refuses:
            raise SharedMemoryError(5, self.refuses)
        return self._names[address].name.encode().ljust(64, b"\0")

    def open(self, index: int, handle: bytes) -> tuple[int, int]:
        self.calls.append("open")
        path = self.folder / handle.rstrip(b"\0").decode()
        if self.refuses or not path.is_file():
            raise SharedMemoryError(5, self.refuses or "cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)")
        return self._map(path)

    def close(self, index: int, address: int) -> None:
        self.calls.append("close")
        del self._maps[address]

    def tensor_at(self, index: int, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(memoryview(self._maps[address])[:nbytes], dtype=torch.uint8)

    def _map(self, path: Path) -> tuple[int, int]:
        descriptor = os.open(path, os.O_RDWR)
        try:
            mapped = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        self._maps[address] = mapped
        return address, len(mapped)


def _window(tensor: torch.Tensor) -> Any:
    """Its memory as it will be when it is read: as a GPU, it does not keep what it reads."""
    if not tensor.is_contiguous():
        return tensor
    octets = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(octets, dtype=torch.uint8)


def _copy(to: torch.Tensor, origin: torch.Tensor) -> None:
    (to if to.shape == origin.shape and to.dtype == origin.dtype else to.view(-1).view(torch.uint8)).copy_(origin)


class StandIn:
    """The stand-in for CUDA in this process."""

    def __init__(self, folder: Path, size: int = 1 << 28) -> None:
        self.cuda, self.files = Recording(), Files(folder, size)
        self.staging = Staging(self.cuda)
        self.blocks = DeviceBlocks(self.staging, self.files)

    def install(self, patch: Callable[[Any, str, Any], None] = setattr) -> StandIn:
        """Have the package use it in this process."""
        patch(staging, "staging", lambda: self.staging)
        patch(on_device, "device_blocks", lambda: self.blocks)
        patch(on_device, "LOOK", 0.0)  # who gets from a queue is looked at before each put
        return self

    def close(self) -> None:
        """Let go of everything, as the end of the process would."""
        for part in (self.cuda, self.files, self.blocks, self.staging):
            vars(part).clear()


def install(ends: Any, folder: str) -> None:
    """Give a child (``children``) a stand-in for CUDA."""
    StandIn(Path(folder)).install()


def take_sums(ends: Any, count: int) -> list[tuple[float, bool]]:
    """Take GPU tensors in a child. Return their sums, and whether each came from a device block."""
    got = []
    for _ in range(count):
        files = on_device.device_blocks()._memory
        before = len(files.calls)
        tensor = ends.consumer.get(10)
        staging.staging().finish()
        got.append((float(tensor.double().sum()), "open" in files.calls[before:]))
    return got
