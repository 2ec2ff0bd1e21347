"""One barrier for all processors, so that those who use memory all the time need none.

Two processes that each store a word and then read the other's must have a full barrier between the two, or both may read
what was there before: a processor keeps stores back for a moment. Python has no such barrier. But one side may pay for both:
after ``membarrier`` every thread of the machine has passed one, wherever it was. So the side that is rare calls it.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import time

__all__ = ["barrier"]

_NUMBERS = {"x86_64": 324, "amd64": 324, "aarch64": 283, "arm64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_GLOBAL = 1  # MEMBARRIER_CMD_GLOBAL: waits until each running thread has been through the scheduler, some 5 to 20 ms
_PAUSE = 0.02  # seconds; a store leaves its processor within microseconds


def barrier() -> None:
    """Return when every store that any thread began before is seen by all.

    Where the kernel refuses (a sandbox, cores without ticks), wait for 20 ms: no processor keeps a store back that long, and
    one that runs something else or sleeps has been through the scheduler, which is a barrier.
    """
    if _call() != 0:
        time.sleep(_PAUSE)


def _call() -> int:
    number = _NUMBERS.get(platform.machine().lower())
    return -1 if number is None else int(_libc().syscall(number, _GLOBAL, 0, 0))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
