"""A worker's wait for its parent, which may be killed meanwhile: then nothing comes any more, and the worker ends, too.

multiprocessing gives each child a pipe whose other end its parent holds. (So do siblings that were forked later; they end
first, and then it is closed.) While the worker waits, the kernel is to send it SIGTERM when that pipe is closed. That costs
three short system calls where the worker would sleep anyhow. A wait with a timeout would wake all workers for each task,
two thirds of what a small task costs; and a thread would be one. A worker that ignores or
blocks SIGTERM, or handles it, wakes up once in a second and looks.
"""

from __future__ import annotations

import fcntl
import functools
import multiprocessing
import os
import queue
import select
import signal
import time
from collections.abc import Callable
from typing import Any

__all__ = ["get_from_parent"]

_LOOK = 1.0  # seconds


def get_from_parent(get: Callable[[float | None], Any], timeout: float | None = None) -> Any:
    """Return what ``get(timeout)`` returns. If this process's parent dies meanwhile, or is dead, end this process.

    A process that has no parent of multiprocessing's waits for nobody.

    Args:
        get: waits so many seconds, and raises queue.Empty then.
        timeout: None: for ever.
    """
    watch = _watch(os.getpid())
    if watch is None:
        return get(timeout)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.SIGTERM not in signal.pthread_sigmask(
        signal.SIG_BLOCK, ()
    ):
        with watch:
            return get(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _LOOK if deadline is None else deadline - time.monotonic()
        try:
            return get(max(0, min(left, _LOOK)))
        except queue.Empty:
            if left <= _LOOK and deadline is not None:
                raise
            watch.look()


class _Watch:
    """The descriptor that tells of the parent's end, which is to tell this process, and does so within the body."""

    def __init__(self, sentinel: int, pid: int) -> None:
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, pid)
        fcntl.fcntl(sentinel, 10, signal.SIGTERM)  # F_SETSIG, which some builds of fcntl do not name
        self._sentinel, self._flags = sentinel, fcntl.fcntl(sentinel, fcntl.F_GETFL) & ~os.O_ASYNC
        self._poll = select.poll()
        self._poll.register(sentinel, select.POLLIN)

    def look(self) -> None:
        """End this process if its parent is dead."""
        if self._poll.poll(0):
            raise SystemExit

    def __enter__(self) -> None:
        try:
            fcntl.fcntl(self._sentinel, fcntl.F_SETFL, self._flags | os.O_ASYNC)
            self.look()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        fcntl.fcntl(self._sentinel, fcntl.F_SETFL, self._flags)


@functools.lru_cache(maxsize=1)
def _watch(pid: int) -> _Watch | None:
    parent = multiprocessing.parent_process()
    return None if parent is None else _Watch(parent.sentinel, pid)
