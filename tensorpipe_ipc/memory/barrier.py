"""One barrier for all processors, so that those who use memory all the time need none.

Two processes that each store a word and then read the other's must have a full barrier between the two, or both may read
what was there before: a processor keeps stores back for a moment. Python has no such barrier. But one side may pay for both,
by ``membarrier``: after it every thread that counts has passed one, wherever it was. So the side that is rare calls it.

The kernel has two. The *quick* one interrupts the processors that run a process which has *joined* (a microsecond); of all
others it says nothing. Joining is one call. The kernel keeps it with a process's memory: all threads have it, and so does
a child that is forked, but not a program that is executed. The *slow* one waits until each running thread, whoever's, has been
through the scheduler (5 to 20 ms, much longer where all processors are busy). Where the kernel refuses that, too (a sandbox,
processors without ticks), 20 ms of sleep stand for it: no processor keeps a store back that long, and one that runs
something else or sleeps has been through the scheduler, which is a barrier. Who calls which: extents.py, "Changing hands".
"""

from __future__ import annotations

import platform
import time

from tensorpipe_ipc.libc import libc

__all__ = ["join", "quick", "slow"]

_NUMBERS = {"x86_64": 324, "amd64": 324, "aarch64": 283, "arm64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_GLOBAL, _GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 1 << 0, 1 << 1, 1 << 2  # MEMBARRIER_CMD_...
_PAUSE = 0.02  # seconds: a store leaves its processor within microseconds


def join() -> bool:
    """Let quick barriers reach this process. Return whether they do: a kernel before 4.16, or a sandbox, may refuse."""
    return _call(_REGISTER_GLOBAL_EXPEDITED) == 0


def quick() -> bool:
    """Wait until all threads see every store that threads of joined processes began before the call.

    Return False if the kernel refuses: then nothing is guaranteed.
    """
    return _call(_GLOBAL_EXPEDITED) == 0


def slow() -> None:
    """Wait until all threads see every store that any thread began before the call."""
    if _call(_GLOBAL) != 0:
        time.sleep(_PAUSE)


def _call(command: int) -> int:
    number = _NUMBERS.get(platform.machine().lower())
    return -1 if number is None else int(libc().syscall(number, command, 0, 0))
