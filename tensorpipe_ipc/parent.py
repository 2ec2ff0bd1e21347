"""A worker's wait for its parent, which may be killed meanwhile: then nothing comes any more, and the worker ends, too.

multiprocessing gives each child a pipe whose other end its parent holds. (So do siblings that were forked later; they end
first, and then it is closed.) While the worker waits, the kernel is to send it SIGTERM when that pipe is closed. That costs
three short system calls where the worker would sleep anyhow. A wait with a timeout would wake all workers for each task,
two thirds of what a small task costs; and a thread would be one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import os
import select
import signal
from contextlib import AbstractContextManager

__all__ = ["ends_with_parent"]


def ends_with_parent() -> AbstractContextManager[None]:
    """End this process if its parent dies while it waits in the body, or is dead. Nothing in a process that has no parent of
    multiprocessing's, where nobody is to be waited for."""
    return _watch(os.getpid())


class _Watch:
    """The descriptor that tells of the parent's end, which is to tell this process, and does so within the body."""

    def __init__(self, sentinel: int, pid: int) -> None:
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, pid)
        fcntl.fcntl(sentinel, 10, signal.SIGTERM)  # F_SETSIG, which some builds of fcntl do not name
        self._sentinel, self._flags = sentinel, fcntl.fcntl(sentinel, fcntl.F_GETFL) & ~os.O_ASYNC
        self._poll = select.poll()
        self._poll.register(sentinel, select.POLLIN)

    def __enter__(self) -> None:
        try:
            fcntl.fcntl(self._sentinel, fcntl.F_SETFL, self._flags | os.O_ASYNC)
            if self._poll.poll(0):
                raise SystemExit
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        fcntl.fcntl(self._sentinel, fcntl.F_SETFL, self._flags)


@functools.lru_cache(maxsize=1)
def _watch(pid: int) -> AbstractContextManager[None]:
    parent = multiprocessing.parent_process()
    return contextlib.nullcontext() if parent is None else _Watch(parent.sentinel, pid)
