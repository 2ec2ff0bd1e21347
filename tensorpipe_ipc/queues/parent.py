"""A worker's wait for tasks from its parent. If the parent is killed, no task will arrive, and the worker ends, too.

multiprocessing gives each child a pipe whose other end its parent holds. While the worker waits, the kernel sends it SIGTERM
when that pipe is closed. What the parent forks later closes that end (``context``), but what another thread forks in that
moment may hold it, too. No worker begins a further task then, as each asks first whether its parent is another by now.
That costs three short system calls, at a time when the worker would sleep anyway. Two other ways are worse. A wait with a
timeout would wake all workers for each task, which is two thirds of the cost of a small task. A watching thread would be one
more thread in each worker. A worker that ignores, blocks or handles SIGTERM wakes once a second and checks the pipe.
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

__all__ = ["end_if_parent_is_dead", "get_from_parent"]

_LOOK = 1.0  # seconds


def get_from_parent(get: Callable[[float | None], Any], timeout: float | None = None) -> Any:
    """Return the result of ``get(timeout)``. If this process's parent is dead or dies meanwhile, end this process.

    In a process that multiprocessing did not start, only call ``get``.

    Args:
        get: a function that waits at most its argument's seconds, and then raises queue.Empty.
        timeout: seconds to wait; None: for ever.
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
    watch.look()
    while True:
        left = _LOOK if deadline is None else deadline - time.monotonic()
        try:
            return get(max(0, min(left, _LOOK)))
        except queue.Empty:
            if left <= _LOOK and deadline is not None:
                raise
            watch.look()


def end_if_parent_is_dead() -> None:
    """End this process if multiprocessing started it, and its parent is dead: nobody wants what waits for it to be done."""
    watch = _watch(os.getpid())
    if watch is not None:
        watch.look()


class _Watch:
    """The pipe that is closed when the parent ends. Inside the ``with`` body, the kernel sends SIGTERM when that happens."""

    def __init__(self, sentinel: int, pid: int, parent: int) -> None:
        """
        Args:
            sentinel: the pipe's descriptor.
            pid: this process's.
            parent: the parent's, if the kernel knows it as the parent; else 0.
        """
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, pid)
        fcntl.fcntl(sentinel, 10, signal.SIGTERM)  # F_SETSIG: some builds of fcntl lack the name
        self._sentinel, self._flags = sentinel, fcntl.fcntl(sentinel, fcntl.F_GETFL) & ~os.O_ASYNC
        self._poll = select.poll()
        self._poll.register(sentinel, select.POLLIN)
        self._parent = parent

    def look(self) -> None:
        """End this process if its parent is dead."""
        # A sibling that has long work to do may keep the pipe open.
        if self._poll.poll(0) or (self._parent and os.getppid() != self._parent):
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
    if parent is None or parent.pid is None:
        return None
    return _Watch(parent.sentinel, pid, parent.pid if os.getppid() == parent.pid else 0)  # a fork server is another
