"""TokenPipe: tokens of 8 bytes through a kernel pipe.

The kernel provides order, atomicity and wake-ups, so they survive any kill. A token is a number above ``LAST_DOORBELL``
(tickets and credits: tokens.py). ``writev`` gives it from, and ``readv`` takes it into, a word of the acting process's own
row in shared memory (memory/row.py). The kernel copies a token into the taker's word, and only then removes it from the pipe:
under the pipe's mutex, in one system call that no signal can interrupt. So at every moment a token stands in the pipe or in a
word of some row, and it is on record which process has taken it. A signal handler's exception changes nothing about that. It
would lose the return value of ``os.read``.

**Descriptors.** A pipe costs two. ``fd`` reads and writes and never blocks. ``read_end`` is for the plain wait in a blocking
``readv``. Nobody waits for credits in that way, so their pipe has ``fd`` alone. (``RWF_NOWAIT`` would make ``read_end``
unnecessary. But Linux 6.18 refuses it for a pipe that was opened again through /proc, and a pipe that is open for both
directions can be had in no other way.) The flag O_NONBLOCK belongs to an open file description, which processes share. So
each of the two is used in one way by all processes.

**Capacity.** A pipe of 16 pages of 4 KiB holds 512 tokens a page. The page at the head may be nearly empty, and the tail of a
page is wasted when a batch does not fit into it. A batch has at most 64 tokens, so it wastes less than 64 of a page's 512.
Hence 15 x 449 = 6,735 tokens always fit. ``CAPACITY`` is what this package relies on if the pipe has 16 pages, of whatever
size. A pipe of fewer pages holds ``_capacity`` tokens, which is none for one page. A queue that may have more gets a log.

**The spill log** serves queues without a bound, or with a larger one. It is a memfd. Givers append tokens when the pipe is
full, and takers ``readv`` them through one shared file offset. The kernel moves that offset under a mutex, so each token is
taken once, into a word, as from the pipe. ``pwritev`` with ``RWF_APPEND`` appends under the inode's lock and leaves the offset
alone, so one descriptor does both. Three rules keep the order of each giver's tokens:

1. A giver whose last spilled token has not been taken spills the next one, too (the caller knows that: ``spill``).
2. A taker looks at the log only when the pipe is empty, *and it saw the token at the log's head before it saw the pipe
   empty*. Everything that the giver had put into the pipe before was taken by then.
3. Between these two looks other takers may have drained the log and filled the pipe again, so the taker may get another
   token than the one it saw. It notices, because no token is given twice. Such a token is *early*: ``take`` returns a
   negative count, and the caller keeps the token. It serves it after as many tokens as stood in the pipe, or when it finds
   the pipe empty (``take_piped``). Meanwhile it takes nothing from the log, which would be later than the early token.

Rule 3 is necessary: with a shared offset alone, a taker that is stopped between the two looks overtakes a pipe that was
filled meanwhile. But a taker that dies with an early token loses it. So takers exclude each other between the looks, by a lock
that the kernel drops when its holder dies (``turn``). The holder gets the token that it saw. A taker that waits ``_TURN`` in
vain, because the holder is stopped, goes on without the turn, and then either of the two may get an early token. It does not
wait for the turn again for ``_NO_TURN``, as there may be a million tokens.

A giver that spilled writes one ``DOORBELL`` to the pipe, if it can. If it cannot, the pipe is full and no taker is asleep.
``SHUT`` and ``DROP`` tell takers that the queue is shut down (shutdown.py). So a taker without a timeout waits in a plain
blocking ``readv``. That is the fastest wait, and a killed neighbour cannot rob it of its wake-up: the kernel hands the token
over or wakes the next taker. An eventfd beside the pipe would need epoll for every wait (two more system calls, 1 us).

**Waking.** A token wakes one of the takers that sleep in ``readv``. The kernel lets no taker die between its wake-up and its
taking: it takes the token, and then dies. But a taker that polls may be killed between its wake-up and its ``readv``. With
EPOLLEXCLUSIVE, which wakes one waiter instead of all, it would take the wake-up with it, and takers that sleep in ``readv``
have no slices in which to notice. (The kill campaign has shown this: two tokens in the pipe, two takers asleep.) So waits with
a timeout use ``poll`` and share wake-ups with nobody. Where all takers wait in slices, as for credits, a token wakes one of
them (``exclusive``). Such a wait registers an epoll for its own length, and the process's next wait uses it again, for any
pipe. That costs a descriptor for each waiting thread, and none for a queue.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
import resource
import select
import sys
import termios
import time
import weakref
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any, Protocol

from tensorpipe_ipc import owned_fd
from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.handlers import passed_a_handler, reraise_from_handler
from tensorpipe_ipc.libc import libc, punch_hole
from tensorpipe_ipc.owned_fd import OwnedFd, handed, owned, reopened
from tensorpipe_ipc.process import ProcessKey, process_key

__all__ = [
    "DOORBELL",
    "DOORBELLS",
    "CAPACITY",
    "DROP",
    "LAST_DOORBELL",
    "SHUT",
    "SLICE",
    "Buffers",
    "TokenPipe",
    "Turn",
]

# These wake takers and are no tokens: look at the log; the queue is shut down; and its messages are dropped.
DOORBELL, SHUT, DROP = 1, 2, 3
LAST_DOORBELL = 3
DOORBELLS = frozenset((DOORBELL, SHUT, DROP))
CAPACITY = 6400  # tokens that always fit into a pipe of 16 pages, see above
SLICE = 0.05  # seconds; C6 promises 100 ms, a wait may begin just before the death, and probing takes time too

_PAGES = 16  # of a pipe, as Linux makes them by default
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032  # fcntl has the names from Python 3.10 on, on some builds only
_SPLICE_F_NONBLOCK = 2
_AT_ONCE = 256  # doorbells in one write, which is whole or not at all up to 4,096 bytes
_TURN = 0.01  # seconds
_NO_TURN = 0.1  # seconds
_MARGIN = 1 << 20  # bytes of the log
_FIRST = 1 << 12  # bytes of the pipe
_PUNCH_STEP = 1 << 16  # bytes of the log between two attempts to give its memory back

Buffers = list[memoryview]  # what os.readv fills and os.writev reads: one view of one or more words


class Turn(Protocol):
    """The turn to take from the log: a lock between processes, which the kernel drops when its holder dies."""

    def take(self) -> bool:
        """Try to get the turn, without waiting. Return whether that succeeded."""

    def leave(self) -> None:
        """Give the turn up."""


class TokenPipe:
    """One pipe, and perhaps a spill log. A child inherits it by fork, or unpickles it while it is being spawned.

    Attributes:
        fd: the pipe, open to read and write, non-blocking. As every process has it, there is no end of file and no EPIPE.
        read_end: the pipe, open to read, blocking; -1 for a pipe on which nobody waits in ``readv``.
        spills: whether there is a log.
        turn: the turn to take from the log; None if the order of takers does not matter.
    """

    def __init__(self, fd: OwnedFd, log: OwnedFd | None = None, read_end: OwnedFd | None = None) -> None:
        self._owned = fd, log, read_end
        self.fd, self.log, self.read_end = (-1 if each is None else each.fileno() for each in self._owned)
        self.spills = log is not None
        self.turn: Turn | None = None
        self._punched, self._turn_missed = 0, -math.inf
        self._epolls: _Epolls | None = None

    @classmethod
    def create(cls, tokens: int | None, *, blocking: bool = True) -> TokenPipe:
        """Make a new pipe, with a log if it may hold more than the pipe does.

        Args:
            tokens: the most that may be in it at once; None: any number.
            blocking: whether takers wait in a plain blocking ``readv``.

        Raises:
            SharedMemoryError: no descriptor is left.
        """
        try:
            read_end, write_end = owned_fd.pipe()
            with write_end:
                # A user beyond the pipe budget (fs.pipe-user-pages-soft) gets a pipe of one or two pages.
                if fcntl.fcntl(write_end, _F_GETPIPE_SZ) != _PAGES * mmap.PAGESIZE:
                    with contextlib.suppress(OSError):
                        fcntl.fcntl(write_end, _F_SETPIPE_SZ, _PAGES * mmap.PAGESIZE)
                fd, log = reopened(write_end.fileno(), os.O_RDWR | os.O_NONBLOCK), None
                if tokens is None or tokens > _capacity(fd.fileno()):
                    with owned(os.memfd_create, "tensorpipe_ipc spill log", os.MFD_CLOEXEC) as memory:
                        # Opened anew: only a description made by open() has a locked file offset.
                        log = reopened(memory.fileno(), os.O_RDWR)
            return cls(fd, log, read_end if blocking else None)
        except OSError as failed:
            raise SharedMemoryError(failed.errno, f"no pipe for a queue: {failed.strerror}") from failed

    @classmethod
    def reach(cls, fd: OwnedFd, *, blocking: bool = True) -> TokenPipe:
        """Return another process's pipe, which has no log.

        Args:
            fd: the pipe, opened here, O_RDWR and non-blocking.
            blocking: whether takers wait in a plain blocking ``readv``.

        Raises:
            OSError: no descriptor is left.
        """
        return cls(fd, read_end=reopened(fd.fileno(), os.O_RDONLY) if blocking else None)

    # ---- taking ----

    def take_nowait(self, buffers: Buffers) -> int:
        """Take the tokens that are there, at most as many as ``buffers`` holds.

        Returns:
            The number of tokens; negative if they are early (see above).
        """
        try:
            if not self.spills:
                return os.readv(self.fd, buffers) >> 3
            return self._take_or_spilled(buffers)
        except BlockingIOError:
            return 0

    def _take_or_spilled(self, buffers: Buffers) -> int:
        if not self._head():
            return os.readv(self.fd, buffers) >> 3
        with contextlib.suppress(BlockingIOError):
            return os.readv(self.fd, buffers) >> 3
        has_turn = self._take_turn()
        try:
            return self._take_spilled(buffers)
        finally:
            if has_turn and self.turn is not None:
                self.turn.leave()

    def tell_of_more(self) -> bool:
        """After taking: ring if the pipe is empty and the log is not, so that ``fileno`` stays readable.

        Returns:
            Whether both are empty.
        """
        if self.unread():
            return False
        if self._head():
            self.ring_doorbell()
            return False
        return True

    def _head(self) -> bytes:
        """Return the token at the log's head; b"" if the log is empty."""
        return os.pread(self.log, 8, os.lseek(self.log, 0, os.SEEK_CUR))

    def _take_turn(self) -> bool:
        """Wait for the turn, but not long. Return whether this process has it, so that no other takes from the log."""
        if self.turn is None:
            return False
        until = 0.0
        while not self.turn.take():
            now = time.monotonic()
            until = until or now + _TURN
            if now > until:
                self._turn_missed = now
            if now < self._turn_missed + _NO_TURN:
                return False
            time.sleep(0)  # which lets other threads run, as sched_yield does not
        return True

    def _take_spilled(self, buffers: Buffers) -> int:
        head = self._head()
        with contextlib.suppress(BlockingIOError):
            return os.readv(self.fd, buffers) >> 3
        return self._take_behind(head, buffers) if head else 0  # 0: others have taken it

    def take_past_doorbells(self, buffers: Buffers, put_back: Callable[[int], None]) -> int:
        """Do what ``take_nowait`` does, in a pipe that is never empty for long, because doorbells go round.

        Once as many entries have passed as the pipe held when the log's head was seen, nothing of those is left in the pipe.

        Args:
            put_back: called with the number of doorbells that were taken; it puts them back.

        Returns:
            The number of entries, with tokens among them; negative if they are early; 0 if there were only doorbells.
        """
        has_turn = self.spills and self._take_turn()
        try:
            head = self._head() if self.spills else b""
            left, looked = self.unread(), False
            while left > 0:
                taken = self.take_piped(buffers)
                if not taken:
                    break
                if max(buffers[0][: 8 * taken].cast("Q")) > LAST_DOORBELL:
                    return taken
                put_back(taken)
                left -= taken
                if not looked:  # there may be thousands, and as many messages in the log
                    looked = True
                    if self._holds_doorbells_only():
                        break
            return self._take_behind(head, buffers) if head else 0
        finally:
            if has_turn and self.turn is not None:
                self.turn.leave()

    def _holds_doorbells_only(self) -> bool:
        """Return whether the pipe holds no token now; False if that cannot be told."""
        content = self._content()
        return content is not None and max(memoryview(content).cast("Q"), default=0) <= LAST_DOORBELL

    def _take_behind(self, head: bytes, buffers: Buffers) -> int:
        """Take from the log. Its head was seen before the pipe was seen empty."""
        taken = os.readv(self.log, buffers) >> 3
        self._punch()
        # One look serves a whole batch: the tokens behind the head that was seen were spilled at that time, or later.
        in_order = (buffers[0][:8] == head and taken == 1) or self._holds_no_token()
        return taken if in_order else -taken

    def _holds_no_token(self) -> bool:
        """Return whether the pipe holds doorbells at most now, as it does for good after a shutdown."""
        return not self.unread() or self._holds_doorbells_only()

    def take_piped(self, buffers: Buffers) -> int:
        """Take tokens from the pipe only, and return their number."""
        try:
            return os.readv(self.fd, buffers) >> 3
        except BlockingIOError:
            return 0

    def take(
        self,
        buffers: Buffers,
        deadline: float | None,
        idle: Callable[[], object] | None = None,
        *,
        exclusive: bool = False,
    ) -> int:
        """Wait for tokens and take them. Return their number; 0 when the deadline has passed.

        Args:
            deadline: on ``time.monotonic``'s clock; None for no deadline.
            idle: called after each slice in which nothing came.
            exclusive: have each token wake only one waiter. All waiters of the pipe must then wait in this way.
        """
        taken = self.take_nowait(buffers)
        if taken or deadline is not None and deadline <= time.monotonic():
            return taken
        waiting = self._exclusive() if exclusive else _Shared(self.fd)
        try:
            while True:
                pause = SLICE if deadline is None else min(SLICE, deadline - time.monotonic())
                if pause <= 0:
                    return 0
                if not waiting.poll(pause) and idle is not None:
                    idle()
                taken = self.take_nowait(buffers)
                if taken:
                    return taken
        finally:
            waiting.end()

    def _exclusive(self) -> _Exclusive | _Shared:
        if self._epolls is None:
            self._epolls = _epolls.get(process_key()) or _epolls.setdefault(process_key(), _Epolls())
        try:
            return _Exclusive(self.fd, self._epolls.spare)
        except OSError:  # no descriptor is left
            return _Shared(self.fd)

    def fileno(self) -> int:
        """Return a descriptor that is readable while the pipe holds anything, a doorbell included.

        The pipe holds a doorbell while the log holds tokens: a process that writes to the log rings, and so does one that
        empties the pipe. (If it is killed in between, the next put or get makes up for it.)
        """
        return self.fd

    def unread(self) -> int:
        """Return how many tokens and doorbells the pipe holds now, without the log."""
        count = array.array("i", [0])
        fcntl.ioctl(self.fd, termios.FIONREAD, count)
        return count[0] >> 3

    def spilled(self) -> int:
        """Return how many tokens wait in the log."""
        if not self.spills:
            return 0
        return max(0, os.fstat(self.log).st_size - os.lseek(self.log, 0, os.SEEK_CUR)) >> 3

    # ---- giving ----

    def give(self, buffers: Buffers) -> None:
        """Give the tokens in ``buffers`` at once: at most 64, and none of them zero. It never waits.

        Raises:
            BlockingIOError: a pipe without a log holds more than it was made for, which only a stranger can have put there.
                No token was given.
        """
        try:
            os.writev(self.fd, buffers)
        except BlockingIOError:
            if not self.spills:
                raise
            self.spill(buffers)
            self.ring_doorbell()

    def spill(self, buffers: Buffers) -> None:
        """Append tokens to the log (rule 1). The caller must ring then.

        Raises:
            SharedMemoryError: as ``check_log``. No token was given.
        """
        self.check_log()
        os.pwritev(self.log, buffers, 0, os.RWF_APPEND)

    def check_log(self) -> None:
        """Check that more tokens can be appended to the log.

        Raises:
            SharedMemoryError: the log is as large as this process may write files (``ulimit -f``).
        """
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        # Near the limit the kernel writes a part, perhaps of a token. And other processes may be writing, too.
        if limit != resource.RLIM_INFINITY and os.fstat(self.log).st_size > limit - _MARGIN:
            raise SharedMemoryError(
                errno.EFBIG,
                f"more waits than the queue's pipe holds, and of the rest no list may be kept: this process may write files of "
                f"{limit} bytes (ulimit -f). Raise that, or give the queue a maxsize of at most {CAPACITY}",
            )

    def ring_doorbell(self, doorbell: int = DOORBELL, count: int = 1) -> bool:
        """Put doorbells into the pipe. Each wakes one taker. If there is no room for them, no taker is asleep.

        Returns:
            Whether all of them had room.
        """
        if count > _AT_ONCE and self.unread() and self.unread() + count > _capacity(self.fd):
            return False  # else a part of them would pile up with each try
        try:
            for done in range(0, count, _AT_ONCE):
                os.write(self.fd, doorbell.to_bytes(8, sys.byteorder) * min(_AT_ONCE, count - done))
        except BlockingIOError:
            return False
        return True

    # ---- looking ----

    def waiting(self) -> int | None:
        """Return how many tokens wait in the pipe and the log now, without doorbells; None: try later."""
        content = self._content()
        return None if content is None else len(frozenset(memoryview(content).cast("Q")) - DOORBELLS) + self.spilled()

    def begins_with_tokens(self) -> bool:
        """Return whether there are tokens among the first in the pipe. It takes a hundredth of the time of ``waiting``."""
        try:
            reader, writer = owned_fd.pipe(os.O_NONBLOCK)
            with reader, writer:
                nbytes = _tee(self.fd, writer.fileno(), _FIRST)
                content = os.read(reader.fileno(), nbytes) if nbytes else b""
        except OSError as error:
            reraise_from_handler(error)
            return False
        return not DOORBELLS.issuperset(memoryview(content).cast("Q"))

    def snapshot(self) -> frozenset[int] | None:
        """Return all tokens that wait in the pipe and the log now, and remove none of them; None: try later."""
        content = self._content()
        return None if content is None else frozenset(memoryview(content + self._spilled_content()).cast("Q"))

    def _content(self) -> bytes | None:
        """Return the pipe's content, and take nothing; None: try later.

        ``tee`` copies it under the pipe's mutex, as far as the scratch pipe has pages.
        """
        try:
            reader, writer = owned_fd.pipe(os.O_NONBLOCK)
            with reader, writer:
                return self._copied(reader.fileno(), writer.fileno())
        except OSError as error:
            if passed_a_handler(error.__traceback__):  # TimeoutError is one, too
                raise
            return None

    def _copied(self, scratch_read: int, scratch_write: int) -> bytes:
        size = fcntl.fcntl(self.fd, _F_GETPIPE_SZ)
        is_whole = fcntl.fcntl(scratch_write, _F_GETPIPE_SZ) >= size
        if not is_whole:
            with contextlib.suppress(PermissionError):  # the user's budget of pipes is used up
                fcntl.fcntl(scratch_write, _F_SETPIPE_SZ, size)
                is_whole = True
        if not _tee(self.fd, scratch_write, size):
            return b""
        if not is_whole and not _has_room(scratch_write):
            raise BlockingIOError(errno.EAGAIN, "the scratch pipe is full: a part of the pipe proves nothing")
        return os.read(scratch_read, size)

    def _spilled_content(self) -> bytes:
        if not self.spills:
            return b""
        # One look at the takers' offset: they go on meanwhile, and the tokens that were given last stand at the end.
        start = os.lseek(self.log, 0, os.SEEK_CUR)
        return os.pread(self.log, max(0, os.fstat(self.log).st_size - start) & -8, start)

    def _punch(self) -> None:
        """Give back, once in a while, the memory of the log's part that takers have read."""
        offset = os.lseek(self.log, 0, os.SEEK_CUR) & -mmap.PAGESIZE
        if offset - self._punched >= _PUNCH_STEP:
            start, self._punched = self._punched, offset
            # Not by a mapping: a process may have no addresses left, or lock all that it maps. Refused, it costs memory.
            punch_hole(self.log, start, offset)

    # ---- lifetime ----

    def renew(self) -> None:
        """Have a forked child's waits share nothing with its parent's."""
        self._epolls = None

    def close(self) -> None:
        """Close this process's descriptors."""
        self._epolls = None
        self.fd = self.read_end = self.log = -1
        for each in self._owned:
            if each is not None:
                each.close()

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        shared = (self.fd, self.log, self.read_end)
        return _rebuild, tuple(reduction.DupFd(each) if each >= 0 else None for each in shared)


def _rebuild(*duplicates: Any) -> TokenPipe:
    fd, *others = (None if each is None else handed(each) for each in duplicates)
    assert fd is not None
    return TokenPipe(fd, *others)


def _capacity(descriptor: int) -> int:
    """Return how many tokens always fit into a pipe."""
    pages = fcntl.fcntl(descriptor, _F_GETPIPE_SZ) // mmap.PAGESIZE
    return CAPACITY if pages >= _PAGES else max(0, pages - 1) * (mmap.PAGESIZE // 8 - 63)


class _Shared:
    """A wait for a pipe in which each token wakes all waiters."""

    def __init__(self, fd: int) -> None:
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def poll(self, seconds: float) -> bool:
        return bool(self._poll.poll(seconds * 1000))

    def end(self) -> None:
        pass


class _Exclusive:
    """A wait in which each token wakes one waiter."""

    def __init__(self, fd: int, spare: list[select.epoll]) -> None:
        self._fd, self._spare, self._process = fd, spare, process_key()
        try:
            self._epoll = spare.pop()
        except IndexError:
            self._epoll = select.epoll()
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLEXCLUSIVE)

    def poll(self, seconds: float) -> bool:
        return bool(self._epoll.poll(seconds))

    def end(self) -> None:
        if self._process != process_key():  # a child that was forked within the wait: the epoll is its parent's
            return
        with contextlib.suppress(OSError):  # the pipe was closed meanwhile; then this epoll goes, too
            self._epoll.unregister(self._fd)
            self._spare.append(self._epoll)


class _Epolls:
    """Epoll descriptors that no wait of this process uses now. They are closed with the last pipe that needed them."""

    def __init__(self) -> None:
        self.spare: list[select.epoll] = []


_epolls: weakref.WeakValueDictionary[ProcessKey, _Epolls] = weakref.WeakValueDictionary()  # by process


def _has_room(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return bool(poll.poll(0))


def _tee(source: int, target: int, size: int) -> int:
    """Copy a pipe's content into another pipe. Return the number of bytes."""
    copied: int = libc().tee(source, target, ctypes.c_size_t(size), _SPLICE_F_NONBLOCK)
    if copied >= 0:
        return copied
    number = ctypes.get_errno()
    if number != errno.EAGAIN:
        raise OSError(number, os.strerror(number))
    return 0
