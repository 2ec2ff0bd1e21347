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
from collections.abc import Iterator
from multiprocessing import process

__all__ = ["ends_with_parent"]


@contextlib.contextmanager
def ends_with_parent() -> Iterator[None]:
    """End this process if its parent dies while it waits in the body, or is dead. Nothing in a process that has no parent of
    multiprocessing's, where nobody is to be waited for."""
    parent = multiprocessing.parent_process()
    if parent is None:
        yield
        return
    sentinel = _armed(parent, os.getpid())
    flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        if _poll(sentinel, os.getpid()).poll(0):
            raise SystemExit
        yield
    finally:
        fcntl.fcntl(sentinel, fcntl.F_SETFL, flags)


@functools.lru_cache(maxsize=1)
def _armed(parent: process.BaseProcess, pid: int) -> int:
    """The descriptor that tells of the parent's end, which is to tell this process."""
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, pid)
    fcntl.fcntl(parent.sentinel, 10, signal.SIGTERM)  # F_SETSIG, which some builds of fcntl do not name
    return parent.sentinel


@functools.lru_cache(maxsize=1)
def _poll(sentinel: int, _: int) -> select.poll:
    poll = select.poll()
    poll.register(sentinel, select.POLLIN)
    return poll
