"""Tokens of 8 bytes through a kernel pipe: order, atomicity and wake-ups come from the kernel, and so survive any kill.

A token is a number other than 0 and ``BELL`` (tickets and credits: transport/shared_memory.py). It is given from, and
taken into, a word of the acting process's own row in shared memory (memory/row.py), by ``writev`` and ``readv`` on
that very word. The kernel copies a token into the taker's word and only then removes it from the pipe, under the
pipe's mutex, in one system call that no signal can cut in two. So at every moment a token stands in the pipe or in a
word of some row, and who has taken it is on record. An exception that a signal handler raises finds it there too: the
return value of ``os.read`` would be lost.

**Non-blocking** flags belong to an open file description, and are set only on those that this process opened itself.

**Capacity.** A 64 KiB pipe is 16 pages of 512 tokens. The page at the head may be nearly empty, and the tail of a
page is wasted when a batch does not fit into it. Batches of at most 64 tokens waste less than 64 of each page's 512,
so that 15 x 449 = 6,735 tokens always fit. ``CAPACITY`` is what we rely on.

**The spill log**, for queues without a bound (or with a larger one): a memfd to which tokens are appended when the
pipe is full, and from which consumers ``readv`` through one shared file offset: the kernel moves it under a mutex, so
each token is taken once, into a word, like from the pipe. Order per giver is kept by three rules:

1. A giver whose last spilled token has not been taken spills the next too (the caller knows it: ``spill``).
2. A taker looks at the log only when the pipe is empty, *and saw the token at the log's head before it saw the pipe
   empty*: what its giver had put into the pipe before has then been taken.
3. Between these two looks others may have drained the log and filled the pipe again, so the token it gets may be
   another. It notices, since tokens are never given twice. Then this one is *early*: take returns a negative count,
   and the caller keeps it until it has taken as many tokens as stood in the pipe, or found the pipe empty
   (``take_piped``). It takes nothing from the log meanwhile: that would be later than the early one.

Rule 3 is needed: one shared offset "read after the pipe is empty" alone lets a taker that is stopped between the two
looks overtake a pipe filled meanwhile. But a taker that ends with an early token loses it. So takers exclude each other
between the looks, by an OFD lock on the log, which the kernel drops when they die: who has it gets the head that it saw.
Who does not get it for ``_TURN``, because the one who has it is stopped, goes on without, and either may come early.

A giver that spilled writes one ``BELL`` to the pipe if it can. If it cannot, the pipe is full and no taker is asleep.
``BELL`` also wakes takers for a shutdown: they look at the queue's flags, and pass it on. So a taker without a
timeout waits in a plain blocking ``readv``, which is the fastest wait, and the one that a killed neighbour cannot rob
of its wake-up: the kernel hands the token over or wakes the next. A bell eventfd beside the pipe would need epoll for
every wait (two more system calls, 1 us).

**Waking.** A token wakes one of those who sleep in ``readv``, and the kernel lets none of them be killed between its
wake-up and the taking: it takes, and then dies. But who was woken out of epoll may be killed before its ``readv``. With
EPOLLEXCLUSIVE, which wakes one waiter instead of all, it would take the wake-up with it, and those who sleep in ``readv``
have no slices in which to notice. (The kill campaign saw that: two tokens in the pipe, two takers asleep.) So waits with a
timeout share wake-ups with nobody, unless whoever waits for this pipe does so in slices, as for credits (``idle``).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import select
import sys
import termios
import time
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory.ofd_locks import lock, unlock

__all__ = ["BELL", "CAPACITY", "SLICE", "Buffers", "TokenPipe"]

BELL = 1
CAPACITY = 6400  # tokens, see above
SLICE = 0.05  # seconds; C6 promises 100 ms, a wait may begin just before the death, and probing takes time too

_PIPE_BYTES = 1 << 16
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032  # fcntl has the names from Python 3.10 on, on some builds only
_SPLICE_F_NONBLOCK = 2
_BELL = BELL.to_bytes(8, "little" if memoryview(b"\1\0").cast("H")[0] == 1 else "big")
_TURN = 0.01  # seconds
_PUNCH_STEP = 1 << 16  # bytes of the log between two attempts to give its memory back

Buffers = list[memoryview]  # what os.readv fills and os.writev reads: one view of one or more words


class TokenPipe:
    """One pipe, and perhaps a spill log. Inherited by fork; pickled to a child while that is being spawned.

    Attributes:
        read_end, write_end: shared, blocking. Every process keeps both open, so there is no end of file and no EPIPE.
        own_write: the same, opened by this process, non-blocking.
        spills: whether there is a log.
    """

    def __init__(self, read_end: int, write_end: int, log_read: int = -1, log_append: int = -1) -> None:
        self.read_end, self.write_end = read_end, write_end
        self._log_read, self._log_append = log_read, log_append
        self.spills = log_read >= 0
        self._punched = 0
        self._turn = -1  # the log again, by a description of this process's own, once it takes from it
        self._epoll: select.epoll | None = None
        self.own_read = _open_own(read_end, os.O_RDONLY | os.O_NONBLOCK)
        self.own_write = _open_own(write_end, os.O_WRONLY | os.O_NONBLOCK)

    @classmethod
    def create(cls, tokens: int | None) -> TokenPipe:
        """A new one, with a log if need be.

        Args:
            tokens: how many may be in it at once; None: any number.

        Raises:
            SharedMemoryError: no descriptor is left.
        """
        opened: list[int] = []
        try:
            opened += os.pipe2(os.O_CLOEXEC)
            # A user who has used up his pipe budget (fs.pipe-user-pages-soft) gets one of one or two pages.
            with contextlib.suppress(OSError):
                fcntl.fcntl(opened[1], _F_SETPIPE_SZ, _PIPE_BYTES)
            enough = fcntl.fcntl(opened[1], _F_GETPIPE_SZ) >= _PIPE_BYTES
            if tokens is None or tokens > CAPACITY or not enough:
                log = os.memfd_create("tensorpipe_ipc spill log", os.MFD_CLOEXEC)
                try:
                    # Opened anew for reading: only a description made by open() has a locked file offset.
                    opened.append(_open_own(log, os.O_RDONLY))
                    opened.append(_open_own(log, os.O_RDWR | os.O_APPEND))
                finally:
                    os.close(log)
            ends, opened = opened, []  # from here on they are the pipe's, whatever happens
            return cls(*ends)
        except OSError as failed:
            for each in opened:
                os.close(each)
            raise SharedMemoryError(failed.errno, f"no pipe for a queue: {failed.strerror}") from failed

    @classmethod
    def reach(cls, read_end: int, write_end: int) -> TokenPipe:
        """That of another process, which has no log; both ends were opened here, and may be non-blocking."""
        for end in (read_end, write_end):
            os.set_blocking(end, True)
        return cls(read_end, write_end)

    # ---- taking ----

    def take_nowait(self, buffers: Buffers) -> int:
        """Take what is there, at most as many tokens as ``buffers`` holds.

        Returns:
            How many. Negative: they are early (see above).
        """
        try:
            if not self.spills:
                return os.readv(self.own_read, buffers) >> 3
            return self._take_or_spilled(buffers)
        except BlockingIOError:
            return 0

    def _take_or_spilled(self, buffers: Buffers) -> int:
        if not self._head():
            return os.readv(self.own_read, buffers) >> 3
        with contextlib.suppress(BlockingIOError):
            return os.readv(self.own_read, buffers) >> 3
        has_turn = self._take_turn()
        try:
            return self._take_spilled(buffers)
        finally:
            if has_turn:
                unlock(self._turn, 0, 1)

    def _head(self) -> bytes:
        """The token at the log's head; b"" if it is empty."""
        return os.pread(self._log_read, 8, os.lseek(self._log_read, 0, os.SEEK_CUR))

    def _take_turn(self) -> bool:
        """Whether no other process takes from the log now, until the lock is let go of. False where that is not known."""
        if self._turn < 0:
            try:
                opened = _open_own(self._log_append, os.O_RDWR)
            except OSError:  # no descriptor is left
                return False
            if self._turn < 0:
                self._turn = opened
            else:  # another thread was faster
                os.close(opened)
        until = 0.0
        while not lock(self._turn, 0, 1):
            now = time.monotonic()
            until = until or now + _TURN
            if now > until:
                return False
            os.sched_yield()
        return True

    def _take_spilled(self, buffers: Buffers) -> int:
        head = self._head()
        with contextlib.suppress(BlockingIOError):
            return os.readv(self.own_read, buffers) >> 3
        if not head:  # others have taken it
            return 0
        taken = os.readv(self._log_read, buffers) >> 3
        self._punch()
        # One look for a whole batch: what stood behind the head that was seen was spilled at that time, or later.
        in_order = buffers[0][:8] == head and (taken == 1 or not self.unread())
        return taken if in_order or not self.unread() else -taken

    def take_piped(self, buffers: Buffers) -> int:
        """Take what is in the pipe, and leave the log alone. How many."""
        try:
            return os.readv(self.own_read, buffers) >> 3
        except BlockingIOError:
            return 0

    def take(self, buffers: Buffers, deadline: float | None, idle: Callable[[], None] | None = None) -> int:
        """Wait for tokens and take them; 0 when the deadline has passed.

        Args:
            deadline: on ``time.monotonic``'s clock; None: none.
            idle: called after each slice in which nothing came. Given by all who wait for this pipe, or by none.
        """
        while True:
            taken = self.take_nowait(buffers)
            if taken:
                return taken
            pause = SLICE
            if deadline is not None:
                pause = min(pause, deadline - time.monotonic())
                if pause <= 0:
                    return 0
            if not self._waiting(exclusive=idle is not None).poll(pause) and idle is not None:
                idle()

    def _waiting(self, *, exclusive: bool) -> select.epoll:
        epoll = self._epoll
        if epoll is None:
            epoll = select.epoll()
            epoll.register(self.own_read, select.EPOLLIN | (select.EPOLLEXCLUSIVE if exclusive else 0))
            self._epoll = epoll
        return epoll

    def fileno(self) -> int:
        """Readable while the pipe holds anything, a bell included."""
        return self.own_read

    def unread(self) -> int:
        """How many tokens (and bells) the pipe holds now, not counting the log."""
        count = array.array("i", [0])
        fcntl.ioctl(self.own_read, termios.FIONREAD, count)
        return count[0] >> 3

    def spilled(self) -> int:
        """How many tokens wait in the log."""
        if not self.spills:
            return 0
        return max(0, os.fstat(self._log_read).st_size - os.lseek(self._log_read, 0, os.SEEK_CUR)) >> 3

    # ---- giving ----

    def give(self, buffers: Buffers) -> None:
        """Give the tokens in ``buffers``, all at once: at most 64, and none of them zero.

        Waits only for a pipe without a log, and there only if more than ``CAPACITY`` tokens are in it.
        """
        if not self.spills:
            os.writev(self.write_end, buffers)
            return
        try:
            os.writev(self.own_write, buffers)
        except BlockingIOError:
            self.spill(buffers)

    def spill(self, buffers: Buffers) -> None:
        """Give the tokens to the log at once (rule 1)."""
        os.writev(self._log_append, buffers)
        self.ring()

    def ring(self) -> None:
        """Wake one taker, if any is asleep."""
        with contextlib.suppress(BlockingIOError):
            os.write(self.own_write, _BELL)

    # ---- for the undertaker ----

    def snapshot(self) -> frozenset[int] | None:
        """All tokens that wait in the pipe and the log now, none of them removed. None: try later.

        ``tee`` copies the pipe's content under its mutex, if the scratch pipe has as many pages.
        """
        # The pipe's descriptors are in ``scratch`` before a signal's handler can raise, and both are closed in one call.
        scratch: list[int] = []
        closing = map(os.close, scratch)
        try:
            try:
                for ends in map(os.pipe2, (os.O_CLOEXEC | os.O_NONBLOCK,)):
                    scratch.extend(ends)
                content = self._copied(*scratch)
            finally:
                list(closing)
        except OSError:
            return None
        return frozenset(memoryview(content + self._spilled_content()).cast("Q"))

    def _copied(self, scratch_read: int, scratch_write: int) -> bytes:
        size = fcntl.fcntl(self.own_read, _F_GETPIPE_SZ)
        if fcntl.fcntl(scratch_write, _F_GETPIPE_SZ) < size:
            fcntl.fcntl(scratch_write, _F_SETPIPE_SZ, size)  # refused: a part of the pipe proves nothing
        return os.read(scratch_read, size) if _tee(self.own_read, scratch_write, size) else b""

    def _spilled_content(self) -> bytes:
        if not self.spills:
            return b""
        start = os.lseek(self._log_read, 0, os.SEEK_CUR)
        return os.pread(self._log_read, self.spilled() << 3, start)

    def _punch(self) -> None:
        """Give back the memory of what everybody has read of the log, once in a while."""
        offset = os.lseek(self._log_read, 0, os.SEEK_CUR) & -mmap.PAGESIZE
        if offset - self._punched >= _PUNCH_STEP:
            start, self._punched = self._punched, offset
            with mmap.mmap(self._log_append, offset - start, prot=mmap.PROT_WRITE, offset=start) as read:
                read.madvise(mmap.MADV_REMOVE)

    # ---- lifetime ----

    def renew(self) -> None:
        """In a forked child: an epoll and a lock of its own. The parent's would share one list of waiters, and the lock."""
        self._epoll = None
        turn, self._turn = self._turn, -1
        if turn >= 0:
            os.close(turn)

    def close(self) -> None:
        """Close this process's descriptors."""
        epoll, self._epoll = self._epoll, None
        if epoll is not None:
            epoll.close()
        names = ("read_end", "write_end", "_log_read", "_log_append", "_turn", "own_read", "own_write")
        for name in names:
            descriptor = getattr(self, name, -1)
            setattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else modules are half gone, and the kernel takes it back in a moment
            with contextlib.suppress(OSError, AttributeError):
                self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        shared = (self.read_end, self.write_end, self._log_read, self._log_append)
        return _rebuild, tuple(reduction.DupFd(each) if each >= 0 else None for each in shared)


def _rebuild(*duplicates: Any) -> TokenPipe:
    return TokenPipe(*(-1 if each is None else each.detach() for each in duplicates))


def _open_own(descriptor: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)


def _tee(source: int, target: int, size: int) -> int:
    """Bytes copied; 0 for an empty pipe."""
    copied: int = _libc().tee(source, target, ctypes.c_size_t(size), _SPLICE_F_NONBLOCK)
    if copied >= 0:
        return copied
    number = ctypes.get_errno()
    if number != errno.EAGAIN:
        raise OSError(number, os.strerror(number))
    return 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
