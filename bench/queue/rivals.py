"""The rivals: ways for tensors from one process to another, each behind the same four methods.

Each is used as its own users would who want it fast. Who pickles gets NumPy arrays, made before the clock starts, and
hands arrays over: nothing is charged to it for tensors. iceoryx2 copies into a loan, and its receiver polls without
pause and copies out. ``Floor`` and ``Memcpy`` are no rivals but the least that there can be: a wake-up, and a copy.

A rival is made before its processes are forked; ``open`` is called in each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import mmap
import multiprocessing
import os
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
import torch.multiprocessing

from tensorpipe_ipc.queues.tensor_queue import Queue

__all__ = [
    "ARRIVED",
    "FasterFifo",
    "Floor",
    "Iceoryx",
    "Memcpy",
    "NumpyPipe",
    "NumpyQueue",
    "Ours",
    "Rival",
    "TorchQueue",
    "TorchSimpleQueue",
    "missing",
    "pattern",
    "spin_option",
]

ARRIVED = torch.tensor([7, 9], dtype=torch.uint8)  # what a floor hands over: it has no content
_FORK = multiprocessing.get_context("fork")
_numbers = count()


@cache
def pattern(nbytes: int) -> torch.Tensor:
    """Return the content of a message of that size: 7 first, 9 last."""
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    tensor[0], tensor[-1] = 7, 9
    return tensor


class Rival(Protocol):
    """One way. ``bound``: how many messages may be in it, 0 for no bound; ``nbytes``: of the largest message."""

    alone: bool  # nothing arrives: the sender's own time is the time
    send: Callable[[Any], Any]
    receive: Callable[[], Any]

    def open(self, sends: bool) -> None:
        """Called in each process, before all else there."""

    def fresh(self, nbytes: int) -> Any:
        """A message to be sent, in memory that is new and the sender's own."""

    def close(self) -> None:
        """Called in each process, after all else."""


class _Tensors:
    alone = False
    send: Callable[[Any], Any]
    receive: Callable[[], Any]

    def open(self, sends: bool) -> None:
        """Nothing to do: it is inherited open."""

    def fresh(self, nbytes: int) -> Any:
        """A tensor."""
        return pattern(nbytes).clone()

    def close(self) -> None:
        """Nothing to do."""


class _Arrays(_Tensors):
    def fresh(self, nbytes: int) -> Any:
        """An array."""
        return pattern(nbytes).numpy().copy()


class Ours(_Tensors):
    """The Queue of this package."""

    def __init__(self, bound: int, nbytes: int = 0, **options: Any) -> None:  # noqa: ARG002
        self.queue = Queue(bound, **options)
        self.send, self.receive = self.queue.put, self.queue.get

    def close(self) -> None:
        """Use it no more here."""
        self.queue.close()


class TorchQueue(_Tensors):
    """torch.multiprocessing.Queue."""

    def __init__(self, bound: int, nbytes: int = 0) -> None:  # noqa: ARG002
        self._queue = torch.multiprocessing.get_context("fork").Queue(bound)
        self.send, self.receive = self._queue.put, self._queue.get

    def close(self) -> None:
        """Let its feeder thread end."""
        self._queue.close()


class TorchSimpleQueue(_Tensors):
    """torch.multiprocessing.SimpleQueue, which has no feeder thread and no bound but its pipe's."""

    def __init__(self, bound: int, nbytes: int = 0) -> None:  # noqa: ARG002
        self._queue = torch.multiprocessing.get_context("fork").SimpleQueue()
        self.send, self.receive = self._queue.put, self._queue.get


class NumpyQueue(_Arrays):
    """multiprocessing.Queue, with arrays."""

    def __init__(self, bound: int, nbytes: int = 0) -> None:  # noqa: ARG002
        self._queue = _FORK.Queue(bound)
        self.send, self.receive = self._queue.put, self._queue.get

    def close(self) -> None:
        """Let its feeder thread end."""
        self._queue.close()


class NumpyPipe(_Arrays):
    """multiprocessing.Pipe, with arrays: no thread and no lock, one process at each end."""

    def __init__(self, bound: int, nbytes: int = 0) -> None:  # noqa: ARG002
        receiver, sender = _FORK.Pipe(duplex=False)
        self.send, self.receive = sender.send, receiver.recv


class FasterFifo(_Arrays):
    """faster-fifo's Queue, with arrays, and room for four of the largest messages."""

    def __init__(self, bound: int, nbytes: int = 0) -> None:
        make = importlib.import_module("faster_fifo").Queue
        queue = self.queue = make(max_size_bytes=max(1 << 20, 4 * nbytes + (1 << 16)), maxsize=bound or 10**9)
        self.send = lambda tree: queue.put(tree, timeout=60)
        self.receive = lambda: queue.get(timeout=60)


class Iceoryx(_Tensors):
    """iceoryx2 by its Python binding: publish and subscribe of slices of bytes."""

    def __init__(self, bound: int, nbytes: int) -> None:  # noqa: ARG002
        self._library = importlib.import_module("iceoryx2")
        self._name = f"tensorpipe_ipc bench/{os.getpid()}/{next(_numbers)}"
        self._largest = nbytes
        self._room = 64 if nbytes < 1 << 20 else 4  # messages that wait; who finds no room tries again

    def open(self, sends: bool) -> None:
        """Open the service, and this end's port."""
        iox = self._library
        iox.set_log_level(iox.LogLevel.Error)
        builder = iox.NodeBuilder.new().signal_handling_mode(iox.SignalHandlingMode.Disabled)
        node = builder.create(iox.ServiceType.Ipc)
        service = (
            node.service_builder(iox.ServiceName.new(self._name))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(self._room)
            .max_publishers(1)
            .max_subscribers(1)
            .payload_alignment(iox.Alignment.new(64))
            .open_or_create()
        )
        self._opened = [node, service]
        if sends:
            self._port = (
                service.publisher_builder()
                .initial_max_slice_len(self._largest)
                .backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered)
                .create()
            )
            self.send = self._publish
        else:
            self._port = service.subscriber_builder().buffer_size(self._room).create()
            self.receive = self._poll

    def _publish(self, tensor: torch.Tensor) -> None:
        loan = self._port.loan_slice_uninit(tensor.nbytes)
        ctypes.memmove(loan.payload_ptr, tensor.data_ptr(), tensor.nbytes)
        loan.assume_init().send()

    def _poll(self) -> torch.Tensor:
        receive = self._port.receive
        while (sample := receive()) is None:
            pass
        nbytes = sample.payload().len()
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        ctypes.memmove(tensor.data_ptr(), sample.payload_ptr, nbytes)
        sample.delete()  # or it counts as borrowed until Python lets go of it
        return tensor

    def close(self) -> None:
        """Remove its files: processes that are forked end without letting go of their objects."""
        self._port.delete()
        del self._port
        self._opened.clear()


class Floor(_Tensors):
    """8 bytes through a pipe, to a process that is blocked in read."""

    def __init__(self, bound: int = 0, nbytes: int = 0) -> None:  # noqa: ARG002
        self._ends = _FORK.Pipe(duplex=False)  # which close themselves
        read_end, write_end = (end.fileno() for end in self._ends)
        self.send = lambda tree: os.write(write_end, b"8 bytes.")
        self.receive = lambda: ARRIVED if os.read(read_end, 8) else None


class Memcpy(_Tensors):
    """One copy into shared memory that is warm, rotating over as many buffers as are in flight, plus the two kept."""

    alone = True

    def __init__(self, bound: int, nbytes: int) -> None:
        buffers = max(1, bound) + 2
        self._memory = mmap.mmap(-1, nbytes * buffers)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._places = [start + index * nbytes for index in range(buffers)]
        self._turn = 0
        self.send = self._copy
        self.receive = lambda: ARRIVED

    def open(self, sends: bool) -> None:
        """Warm it, in the process that copies."""
        if sends:
            np.frombuffer(self._memory, np.uint8)[:] = 1

    def _copy(self, tensor: torch.Tensor) -> None:
        self._turn = (self._turn + 1) % len(self._places)
        ctypes.memmove(self._places[self._turn], tensor.data_ptr(), tensor.nbytes)


def missing(rival: object) -> str:
    """Return why a rival cannot take part here; "" where it can."""
    needs: dict[object, str] = {FasterFifo: "faster_fifo", Iceoryx: "iceoryx2"}
    if rival in needs:
        try:
            importlib.import_module(needs[rival])
        except ImportError as error:
            return f"{error} (pip install 'tensorpipe-ipc[peers]')"
    return ""


def spin_option() -> dict[str, Any]:
    """Return the option that makes our Queue spin before it blocks, where it can."""
    with contextlib.suppress(KeyError):
        return {inspect.signature(Queue).parameters["spin"].name: 1e-3}  # longer than the sender pauses
    return {}
