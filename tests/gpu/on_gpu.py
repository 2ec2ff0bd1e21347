"""Programs for a real GPU: ``python tests/gpu/on_gpu.py NAME [DEVICE]``.

Each function is a program of its own, which prints "done" at its end. CUDA, once used, keeps threads, descriptors and
mappings that the tests' guard would find. With "cpu" as DEVICE the programs also run on a machine without a GPU.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

import tensorpipe_ipc as tp
from tensorpipe_ipc.cuda.staging import Cuda, staging
from tensorpipe_ipc.wire.dtypes import BY_TORCH

DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cuda"
IS_GPU = DEVICE != "cpu"
LARGE = 1 << 20  # bytes
MESSAGES = 100_000 if IS_GPU else 500


def bits(dtype: torch.dtype, seed: int, device: str = DEVICE) -> torch.Tensor:
    """Random bits of a dtype."""
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(0, 2 if dtype is torch.bool else 256, (LARGE,), dtype=torch.uint8, generator=generator)
    return octets.view(dtype).to(device)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype and bits."""
    return one.dtype == other.dtype and torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


def main_of(name: str) -> None:
    """Run one, with our warnings as errors: nothing should stand in the way of page locks."""
    warnings.simplefilter("error", RuntimeWarning)
    torch.set_num_threads(1)
    globals()[name]()
    if IS_GPU:
        assert staging().pageable == "", staging().pageable
    print("done")


def round_trip() -> None:
    """Every dtype and layout, to the GPU, to the CPU and back to where it was; put may be followed by overwriting."""
    queue = tp.Queue(4)
    for number, dtype in enumerate(BY_TORCH):
        x = bits(dtype, number)
        want = x.cpu().clone()
        queue.put({"x": x, "small": x[:3], "n": number})
        x.copy_(bits(dtype, number + 1))  # as soon as put has returned
        for device in (DEVICE, None):
            got = queue.get(device=device)
            assert got["x"].is_cuda == (IS_GPU and device is not None)
            assert same(got["x"], want), dtype
            assert same(got["small"], want[:3]), dtype
            if device is not None:
                queue.put({"x": got["x"], "small": got["small"], "n": number})  # sent on
    image = torch.randn(8, 3, 224, 224, device=DEVICE).to(memory_format=torch.channels_last)
    queue.put(image)
    got = queue.get(device=DEVICE)
    assert torch.equal(got, image)
    assert got.stride() == image.stride()
    staging().finish()
    del got
    assert queue.statistics().leases == 0
    narrow = tp.Queue(wire_dtype=torch.float16)
    narrow.put(image)
    got = narrow.get(device=DEVICE)
    assert got.dtype is torch.float32
    assert torch.equal(got, image.half().float())
    if IS_GPU:
        with tp.MemoryTracker(None) as memory:
            pass
        assert memory.peak.gpu


def streams() -> None:
    """Put reads a tensor after all earlier work of the caller's stream, on default and other streams.

    Work of that stream after get reads whole tensors.
    """
    if not IS_GPU:
        return
    queue, x = tp.Queue(), torch.zeros(1 << 24, device=DEVICE)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for number in range(20):
                x.fill_(-1)
                torch.cuda._sleep(1_000_000)  # cycles: put must not overtake
                x.fill_(number)
                queue.put(x)
                x.fill_(-1)
                got = queue.get(device=DEVICE)
                total = (got - number).abs().sum()  # of the same stream, and with no wait by hand
                assert float(total) == 0
        stream.synchronize()


def failed_lock() -> None:
    """A page-lock that failed leaves nothing in CUDA that the next kernel of the program raises."""
    if IS_GPU:
        cuda, page = Cuda(), torch.empty(3 << 12, dtype=torch.uint8)
        address = -(-page.data_ptr() // 4096) * 4096
        assert cuda.register(address, 4096) == 0
        assert cuda.register(address, 8192) != 0
        assert torch.full((3,), 2.0, device=DEVICE).sum().item() == 6
        cuda.unregister(address)


def two_devices() -> None:
    """Tensors of two GPUs in one tree; each may arrive on either."""
    if not IS_GPU or torch.cuda.device_count() < 2:
        print("one GPU only")
        return
    for cuda_ipc in (False, True):
        queue = tp.Queue(cuda_ipc=cuda_ipc)
        for number in range(4):
            tree = [bits(torch.float16, number, "cuda:0"), bits(torch.int32, number, "cuda:1")]
            queue.put(tree)
            got = queue.get(device=f"cuda:{number % 2}")
            assert all(tensor.device.index == number % 2 for tensor in got)
            assert all(map(same, got, tree))


def no_growth() -> None:
    """100,000 messages leave neither memory nor descriptors behind, staged and by CUDA IPC."""
    for cuda_ipc in (False, True):
        with _other(_echo, cuda_ipc=cuda_ipc) as (there, back, _):
            x = bits(torch.uint8, 1)
            for number in range(MESSAGES):
                there.put(x)
                got = back.get(timeout=60, device=DEVICE)
                if number == MESSAGES // 10:
                    before = _held()
            after = _held()
            assert same(got, x)
            print(
                f"cuda_ipc={cuda_ipc}: {there.statistics().on_device} on the GPU; {there.statistics().staged_because!r}"
            )
            assert after[0] < before[0] + (16 << 20), (before, after)
            assert after[1:] == before[1:], (before, after)


def by_ipc() -> None:
    """Between two processes large tensors stay on the GPU, or it is said why not; they are copies; every dtype."""
    with _other(_echo, cuda_ipc=True) as (there, back, _):
        for _ in range(2):
            there.put(bits(torch.uint8, 0))
            first = back.get(timeout=60, device=DEVICE)
        for number, dtype in enumerate(BY_TORCH):
            x = bits(dtype, number)
            there.put({"x": x, "n": torch.arange(4)})
            want = x.cpu().clone()
            x.copy_(bits(dtype, number + 1))
            got = back.get(timeout=60, device=DEVICE)
            assert same(got["x"], want), dtype
        assert same(first, bits(torch.uint8, 0)), "what was received stays"
        found = there.statistics()
        print(f"{found.on_device} on the GPU; {found.staged_because!r}")
        if IS_GPU:
            assert found.on_device or found.staged_because
            assert found.on_device == 0 or found.on_device >= len(BY_TORCH)


def kills() -> None:
    """A consumer that is killed, wherever it is, takes one message with it, and no memory; a producer, what lay in its GPU."""
    for cuda_ipc in (False, True):
        for _ in range(10 if IS_GPU else 1):
            with _other(_swallow, cuda_ipc=cuda_ipc) as (there, back, process):
                x = bits(torch.uint8, 3)
                there.put(x)
                assert back.get(timeout=60) == "one"
                for _ in range(8):
                    there.put(x)
                process.kill()
                process.join()
                while not there.empty():
                    assert same(there.get(timeout=10, device=DEVICE), x)
                assert there.statistics().lost <= 1
                for _ in range(20):
                    there.put(x)
                    assert same(there.get(timeout=10, device=DEVICE), x)
        with _other(_echo, cuda_ipc=cuda_ipc) as (there, back, process):
            for _ in range(4):
                there.put(x)
                back.get(timeout=60, device=DEVICE)
            there.put(x)
            while back.empty():
                pass
            process.kill()
            process.join()
            try:
                assert same(back.get(timeout=10, device=DEVICE), x)
            except tp.PeerLost as lost:
                assert cuda_ipc, lost
            back.put(x)
            assert same(back.get(timeout=10, device=DEVICE), x)


def fork() -> None:
    """After a fork CUDA cannot be used: that is Closed, on get before anything is taken, and on put."""
    if not IS_GPU:
        return
    queue, x = tp.Queue(), bits(torch.uint8, 0)
    queue.put(x)
    pid = os.fork()
    if not pid:
        refused = 0
        for action in (lambda: queue.get(device=DEVICE), lambda: queue.put(x), lambda: queue.put(x[:3])):
            try:
                action()
            except tp.Closed as error:
                refused += "spawn" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert same(queue.get(device=DEVICE), x)


def _held() -> tuple[int, int, int, int]:
    process = psutil.Process()
    reserved = torch.cuda.memory_reserved() if IS_GPU else 0
    used = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] if IS_GPU else 0
    return process.memory_full_info().uss, process.num_fds(), reserved, used >> 28  # others use it, too


@contextmanager
def _other(target: Any, *, cuda_ipc: bool) -> Iterator[tuple[Any, Any, Any]]:
    """A process that takes from one queue and puts into another."""
    ctx = tp.get_context("spawn")
    there, back = ctx.Queue(8, cuda_ipc=cuda_ipc), ctx.Queue(8, cuda_ipc=cuda_ipc)
    process = ctx.Process(target=target, args=(there, back, DEVICE), daemon=True)
    process.start()
    try:
        yield there, back, process
    finally:
        process.kill()
        process.join()


def _echo(there: Any, back: Any, device: str) -> None:
    torch.set_num_threads(1)
    while True:
        back.put(there.get(device=device))


def _swallow(there: Any, back: Any, device: str) -> None:
    torch.set_num_threads(1)
    there.get(device=device)
    back.put("one")
    while True:
        there.get(device=device)


PROGRAMS = (round_trip, streams, failed_lock, two_devices, by_ipc, kills, fork, no_growth)

if __name__ == "__main__":
    main_of(sys.argv[1])
