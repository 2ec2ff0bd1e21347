"""Kill a process at every machine instruction of a put and of a get: ``python tests/single_steps.py``, by hand, for hours.

For each n, a forked child is stepped through n instructions of a call of the compiled path (ptrace), and killed. Then its
parent checks that all is whole. What lies before the call's C source is Python's own, and steps through it, too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time

from crash_points import in_child
from killed_calls import CALLS, DeadlyQueue

from tensorpipe_ipc import compiled

_TRACEME, _SINGLE_STEP = 0, 9
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Go through them, and tell how many instructions each call has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only each n-th instruction")
    parser.add_argument("--first", type=int, default=0, help="instructions that are not tried again")
    parser.add_argument("--size", type=int, default=400, help="bytes of a message; from 32 KiB on it comes as a lease")
    parser.add_argument("--maxsize", type=int, default=4)
    parser.add_argument("calls", nargs="*", help=f"of {', '.join(CALLS)}; all of them")
    options = parser.parse_args()
    if compiled.why_off():
        print(f"there is no compiled path: {compiled.why_off()}")
        return 1
    for name in options.calls or CALLS:
        deadly, count, began = DeadlyQueue(name, options.size, options.maxsize), options.first, time.monotonic()
        while _killed_after(count, deadly):
            deadly.check()
            count += options.every
            if not count % 500:
                print(f"\r{name}: {count:,} instructions, {time.monotonic() - began:.0f} s", end="", flush=True)
        deadly.check()
        print(
            f"\r{name}: killed after each of {count:,} instructions, and all whole; left and lost: {sorted(deadly.seen)}"
        )
        deadly.close()
    return 0


def _killed_after(count: int, deadly: DeadlyQueue) -> bool:
    """Have a child die after so many instructions of a call. Return whether the call was not complete by then."""

    def child() -> None:
        deadly.prepare()
        _trace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        deadly.call()
        os.kill(os.getpid(), signal.SIGSTOP)

    pid = in_child(child)
    assert os.WSTOPSIG(os.waitpid(pid, 0)[1]) == signal.SIGSTOP
    is_within = True
    for _ in range(count):
        _trace(_SINGLE_STEP, pid)
        is_within = os.WSTOPSIG(os.waitpid(pid, 0)[1]) == signal.SIGTRAP
        if not is_within:
            break
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return is_within


def _trace(request: int, pid: int) -> None:
    if _libc.ptrace(request, pid, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")


if __name__ == "__main__":
    sys.exit(main())
