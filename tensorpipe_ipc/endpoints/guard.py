"""Guard: one end, one thread at a time, in the process that made it, until it is closed.

Any thread may close an end. It says so first, and whoever waits in a use of the end looks for that in every slice.

What is open when the program ends is closed then, and nothing is opened any more. A process that multiprocessing started does
not end as a program does: there multiprocessing's own list is what is gone through. So both have it, and whichever is first
does it. Both come before multiprocessing waits for children, which may wait for a goodbye, and after all threads but daemons
have ended. Older CPythons have a process of multiprocessing's wait for those threads last, so here it waits for them first.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import util
from typing import Any

from tensorpipe_ipc.borrowed import is_owned, join_threads
from tensorpipe_ipc.errors import Busy, Closed
from tensorpipe_ipc.forks import watch
from tensorpipe_ipc.sections import begin_anew

__all__ = ["Guard", "close_at_last"]


_AT_EXIT = 2.0  # seconds
_LOOK = 1.0  # seconds
_LONGEST = 3600.0  # seconds, in one wait
_FIRST = (
    100  # of multiprocessing's priorities: before pools and managers are ended, whose processes may have the other ends
)


class Guard:
    """``with guard:`` around every use of an end. It never waits: a second user gets an error instead.

    An exception that a signal's handler raises must not leave the lock taken. Python code can be interrupted before its
    first line; so what ends a use is the lock's own method, in C.

    Attributes:
        what: the end, in words.
        closed: set when the end is closed.
        closing: set when a thread is about to close it.
        user: the thread that last used it.
        looks: whether a thread that only asks for statistics is at it, or about to be: others wait for that.
        until: when a thread that closes it will have done so, of the monotonic clock.
    """

    __slots__ = (
        "__exit__",
        "_is_inherited",
        "_is_owned",
        "_lock",
        "_pid",
        "closed",
        "closing",
        "looks",
        "until",
        "user",
        "what",
    )
    __exit__: Callable[..., None]

    def __init__(self, what: str) -> None:
        self.closed = self.closing = self.looks = False
        self.what, self.until = what, 0.0
        self.user = weakref.ref(threading.current_thread())
        self._pid, self._is_inherited = os.getpid(), False
        self._lock = threading.RLock()  # which knows its owner
        self._is_owned: Callable[[], bool] = functools.partial(is_owned, self._lock)
        self.__exit__ = self._lock.__exit__

    def __enter__(self) -> None:
        """Begin a use.

        Raises:
            Closed: the end is closed, or belongs to the process that this one was forked from.
            Busy: another thread uses it, or this thread's signal handler interrupted a use.
        """
        # As ``foreign``, without two calls: each put and get comes by.
        if self._is_inherited or os.getpid() != self._pid:
            self.check_process()
        if self._is_owned():
            raise Busy(f"{self.what} is in use by what this signal's handler interrupted")
        try:
            # A look takes 20 ms at most. It may have ended between the first two tries.
            if not (self._lock.acquire(False) or self._lock.acquire(timeout=_LOOK * self.looks)):
                self.check()  # another thread may be closing it
                raise Busy(f"{self.what} is in use by another thread; give each thread an end of its own")
            self.check()
            self.user = weakref.ref(threading.current_thread())  # its number is the next one's once it has ended
        except BaseException:
            if self._is_owned():
                self._lock.release()
            raise

    def check_process(self) -> None:
        """See that this is the process that made the end.

        Raises:
            Closed: it is a fork of that.
        """
        if self.foreign:
            raise Closed(
                f"{self.what} belongs to pid {self._pid}, of which this is a fork (pid {os.getpid()}): ZeroMQ's sockets "
                "do not survive a fork; make the end in the process that uses it"
            )

    def is_anothers(self) -> bool:
        """Return whether a thread that goes on, and is not this one, was the last to use the end: it may just be about to."""
        user = self.user()
        if user is None or user is threading.current_thread() or isinstance(user, threading._DummyThread):
            return False  # of one that Python did not start nobody can tell whether it goes on
        return user.is_alive()

    def check(self) -> None:
        """See that the end is open, and nobody is about to close it.

        Raises:
            Closed: it is not, or somebody is.
        """
        if self.closing:
            raise Closed(f"{self.what} is closed")

    @contextmanager
    def to_close(self) -> Iterator[bool]:
        """Wait until nobody uses the end, nor closes it, to close it. Yield whether it still is to be closed.

        Another thread that uses it ends with ``Closed`` within a slice.

        Raises:
            Busy: this thread's signal handler interrupted a use.
        """
        if self.foreign or (self.closed and self._is_owned()):
            yield False
            return
        if self._is_owned():
            raise Busy(f"{self.what} is in use by what this signal's handler interrupted")
        self.closing = True
        with self._lock:
            yield not self.closed

    @contextmanager
    def at_last(self) -> Iterator[bool]:
        """Close an end that was dropped, or is open at exit, where a daemon thread may still be in a use of it.

        ZeroMQ ends the process where two threads are in one socket. So it is waited for, as that use ends with ``Closed``
        within a slice, or is a close, which has its time. Yield whether the end is to be closed: what a thread does not leave
        is left to the kernel.
        """
        if self.foreign or self.closed:
            yield False
            return
        self.closing = True
        while not self._lock.acquire(timeout=min(max(0.0, self.until - time.monotonic()) + _AT_EXIT, _LONGEST)):
            if self.until <= time.monotonic():
                yield False
                return
        try:
            yield not self.closed
        finally:
            self._lock.release()

    def set_closed(self) -> None:
        """Note that the end is closed."""
        self.closed = True
        _open.pop(id(self), None)

    @property
    def state(self) -> str:
        """In words, for ``repr``."""
        return f"of pid {self._pid}, forked" if self.foreign else "closed" if self.closed else "open"

    @property
    def foreign(self) -> bool:
        """Return whether this is a fork of the process that made the end."""
        # The former: a descendant may have its dead ancestor's number.
        return self._is_inherited or os.getpid() != self._pid

    def disown(self) -> None:
        """Note that this process is a fork of the one that made the end, unless it made it since: in another hook."""
        self._is_inherited = self._is_inherited or os.getpid() != self._pid


_open: dict[int, tuple[Guard, weakref.finalize[..., Any], Callable[[], Any]]] = {}  # by number of the guard
_is_prepared = _was_prepared = False  # whether this process has been told of ``_end``; or an ancestor
_is_ending = False


def close_at_last(end: Any, guard: Guard, function: Callable[..., Any], *arguments: Any) -> weakref.finalize[..., Any]:
    """Have an end closed by a call when it is dropped, and at the latest when the program ends. The call must not know it.

    Raises:
        Closed: the program is ending.
    """
    finish = weakref.finalize(end, function, *arguments)
    _prepare()  # after the first finalizer: what is told last is asked first, before what an end has is gone
    # What closes it, too: the finalizer may have been cut short, or another thread may be in it.
    _open[id(guard)] = guard, finish, functools.partial(function, *arguments)
    if _is_ending:  # asked last: an end that is not among those which are being closed is not to be opened
        guard.closing = True
        guard.set_closed()
        finish.detach()
        raise Closed(f"{guard.what} is not opened: the program is ending, and closes all ends that it has")
    return finish


def _prepare() -> None:
    global _is_prepared, _was_prepared
    watch(_in_child)
    if not _was_prepared:
        atexit.register(_end)
        _was_prepared = True
    if not _is_prepared:
        util.Finalize(None, _end, exitpriority=_FIRST)
        _is_prepared = True


def _in_child() -> None:
    """In a forked child: nothing is its own yet."""
    global _is_prepared, _is_ending
    _is_prepared = _is_ending = False
    begin_anew()
    for number, (guard, *_) in list(_open.items()):
        guard.disown()
        if guard.foreign:
            _open.pop(number, None)


def _end() -> None:
    """Close all ends, the newest first, when those threads have ended for which the process waits."""
    global _is_ending
    try:
        if threading.current_thread() is threading.main_thread():
            join_threads()
    finally:
        _is_ending = True
        with ExitStack() as steps:  # each is closed though another raises
            for number in list(_open):
                steps.callback(_close_once, number)


def _close_once(number: int) -> None:
    """Close an end, if it is open. What a thread does not leave is waited for once, though ``_end`` is called twice: unless an
    exception cuts it short."""
    _, finish, close = _open.get(number, (None, None, None))
    if close is not None and finish is not None:
        close()
        finish.detach()
        _open.pop(number, None)
