"""Forks: a lock while which no thread of this process forks, and functions that are called around each fork.

A child gets a copy of every descriptor. Of one that another thread is just opening, the child knows nothing: it would keep the
file, and its locks, for as long as it lives. So ``no_fork`` is held from the opening until the descriptor is noted down. A fork
waits for it, for microseconds. Only where a port is bound that is in use, it waits up to 0.1 s.

A child has another lock. A thread that holds its parent's may have forked it, in a signal's handler, and may never come back
from there to let go.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import threading
from collections.abc import Callable

__all__ = ["call_all", "no_fork", "watch"]

_lock = [threading.RLock()]  # this process's
_locks = map(_lock.__getitem__, itertools.repeat(0))
_acquire = functools.partial(next, map(operator.methodcaller("acquire"), _locks))
_release = functools.partial(next, map(operator.methodcaller("release"), _locks))
_before: list[Callable[[], None]] = []
_in_parent: list[Callable[[], None]] = []
_in_child: list[Callable[[], None]] = []
_registered: list[bool] = []


def no_fork() -> threading.RLock:
    """Return the lock while which no thread of this process forks."""
    if not _registered:
        # Each twice, the second time for what a handler's exception cut short: Python forks all the same.
        for _ in range(2):
            os.register_at_fork(
                before=lambda: call_all(_before),
                after_in_parent=lambda: call_all(_in_parent),
                after_in_child=lambda: call_all(_in_child),
            )
        # Around these, and in C: an exception within would keep all other threads from forking for good.
        for _ in range(2):
            os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_release)
        for _ in range(2):
            os.register_at_fork(after_in_child=lambda: _lock.__setitem__(0, threading.RLock()))
        _registered.append(True)  # last: an exception of a handler before it, or another thread, has it done twice
    return _lock[0]


def watch(
    in_child: Callable[[], None],
    *,
    before: Callable[[], None] | None = None,
    in_parent: Callable[[], None] | None = None,
) -> None:
    """Have functions called around each fork from now on, in the order in which they came here. Again: nothing.

    Args:
        in_child: called in the child, perhaps twice.
        before: called before the fork, perhaps twice.
        in_parent: called in the parent after it, perhaps twice.
    """
    no_fork()
    for hooks, hook in ((_before, before), (_in_parent, in_parent), (_in_child, in_child)):
        if hook is not None and hook not in hooks:
            hooks.append(hook)


def call_all(hooks: list[Callable[[], None]], first: int = 0) -> None:
    """Call each, whatever one of them raises. Python writes the first such error to stderr."""
    for index in range(first, len(hooks)):
        try:
            hooks[index]()
        except BaseException:
            call_all(hooks, index + 1)
            raise
