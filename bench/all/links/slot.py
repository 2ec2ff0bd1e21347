"""One slot of ``multiprocessing.shared_memory`` and two semaphores, as people write it by hand."""

from __future__ import annotations

import multiprocessing
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from bench.all.links import Shape
from bench.queue.rivals import _Arrays

__all__ = ["Slot"]

_FORK = multiprocessing.get_context("fork")


class Slot(_Arrays):
    """The sender copies an array into the slot, the receiver copies it out; each waits for the other."""

    def __init__(self, shape: Shape) -> None:
        self._memory = SharedMemory(create=True, size=8 + max(8, shape.nbytes))
        self._length: Any = np.ndarray((1,), np.int64, self._memory.buf)
        self._free, self._filled = _FORK.Semaphore(1), _FORK.Semaphore(0)
        self.send, self.receive = self._put, self._get

    def _put(self, array: Any) -> None:
        self._free.acquire()
        self._length[0] = array.nbytes
        np.ndarray(array.shape, array.dtype, self._memory.buf, 8)[:] = array
        self._filled.release()

    def _get(self) -> Any:
        self._filled.acquire()
        array = np.ndarray((int(self._length[0]),), np.uint8, self._memory.buf, 8).copy()
        self._free.release()
        return array

    def dispose(self) -> None:
        """Remove its name, once all processes have ended."""
        self._length = None
        self._memory.close()
        self._memory.unlink()
