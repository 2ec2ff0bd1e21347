"""Rendezvous: how two programs on one host come to share a queue: whether they may, what one offers, what the other opens.

Each pair of a producer and a consumer has one queue (``shared_queue.shared_memory``). Its ``maxsize`` is the smaller of their
windows. The binder makes queues in memory that all ends bound by this process share, and offers them in its rendezvous file.
Connectors claim them, and say so in the conversation that the two have anyway (``greeting``). An end that cannot share tells
the reason, which ``statistics().transport`` repeats, and the pair uses frames. The choice holds as long as the connection.

**What is opened is what was offered**, in a file that only this user can have written. Descriptor numbers and process ids are
reused. So the folder of the binder's process in /proc is held open while its start time is compared; each descriptor's inode is
compared after it was opened; the segment's seals, size, magic and version are checked before a byte of it is read; and the
queue's record must contain the offer's token. The kernel decides whether this process may open them (ptrace's rules for
reading: same uid and gid, or the capability). Nothing that is shared has a name that could be left behind. What the peer says
of itself over the socket decides what is tried, and what people are told. It opens nothing.

**How long a queue lives.** Each process that has the queue has its own read lock on the queue's record
(``queue_record.RowPresenceLock``). So the queue outlives either end, and messages that a binder had put before it was killed
can still be taken. The queue is destroyed when both ends are gone.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import weakref
from typing import Any

from tensorpipe_ipc.endpoints.rendezvous_file import QueueOffer
from tensorpipe_ipc.errors import ProtocolError, SharedMemoryError
from tensorpipe_ipc.memory.arena import HEADER, SMALLEST, UNIT, Arena
from tensorpipe_ipc.memory.row import ROWS_END
from tensorpipe_ipc.memory.segment import Segment
from tensorpipe_ipc.owned_fd import OwnedFd, owned
from tensorpipe_ipc.process import Identity, ProcessKey, identity, process_key
from tensorpipe_ipc.shared_queue.attachment import Attachment, attachment_of
from tensorpipe_ipc.shared_queue.get_end import GetEnd
from tensorpipe_ipc.shared_queue.open_queue import OpenQueue
from tensorpipe_ipc.shared_queue.queue_record import QueueRecord, RowPresenceLock
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue
from tensorpipe_ipc.shared_queue.token_pipe import CAPACITY, Buffers, TokenPipe
from tensorpipe_ipc.wire.header import Hello

__all__ = ["WISHES", "PairQueue", "make", "objection", "reach"]

WISHES = ("auto", "off", "require")
_STAT = 1 << 12  # bytes; more than /proc/PID/stat has
_PIDS, _ENDS = 1 << 24, 1 << 40  # of the word that says who has claimed a queue: Linux has no more pids than 1 << 22
_SIZE = 1 << 38  # of addresses: a process may be connected to hundreds of binders, and has 128 TiB


class _CheckedGets(GetEnd):
    """Get what another end wrote, which may be a stranger: all of it is looked at before it is used.

    The producer's ``flush`` waits for the places of its messages: they come back once the messages were made.
    """

    credits_what_is_made = True

    def word_of(self, ticket: int) -> int:
        """See GetEnd.

        Raises:
            ProtocolError: a ticket that names no block.
        """
        self._room_of(ticket >> 32 << SMALLEST - 3)
        return super().word_of(ticket)

    def _room_of(self, word: int) -> int:
        """Return how many bytes the block has whose state is at ``word``.

        Raises:
            ProtocolError: there is no block.
        """
        unit = word * 8 // UNIT
        extent = self.words[ROWS_END // 8 + unit] if unit < self.arena.segment.size // UNIT else 0
        room = 1 << (extent >> 16 & 0x3F)
        if not extent or word << 3 & min(room, UNIT) - 1:
            raise ProtocolError(f"a ticket for {word << 3:#x}, where there is no block")
        return room

    def give(self, credit: Buffers) -> None:
        """See GetEnd.

        Raises:
            ProtocolError: the other end has put something into the pipe: it has no room.
        """
        try:
            super().give(credit)
        except BlockingIOError:
            assert self.credits is not None
            if self.credits.unread() <= self.record.maxsize:
                raise
            raise ProtocolError("its pipe of credits holds more than it was made for") from None

    def give_up(self) -> None:
        """See GetEnd. A ticket that was set aside may name no block: then all that is left goes with the queue."""
        queue = self._queue
        try:
            super().give_up()
        except IndexError:
            self.lost += len(queue.aside)
            queue.aside.clear()
            queue.unfinished.clear()

    def places(self, word: int) -> tuple[int, int, int, int]:
        """See GetEnd. The other end may write here at any moment: each word is read once, and what was read is looked at.

        Raises:
            ProtocolError: lengths that go beyond the block, or a payload where none of ours begins.
        """
        room, places = self._room_of(word), super().places(word)
        metadata_at, length, payload_at, nbytes = places
        end = max(metadata_at + length, payload_at + nbytes)
        if end > room or nbytes > self.arena.capacity or min(metadata_at, payload_at) < HEADER:
            raise ProtocolError(f"{length} bytes of metadata and {nbytes} of payload in a block of {room}")
        if payload_at % HEADER:
            raise ProtocolError(f"a payload at {payload_at}, which is no multiple of {HEADER}")
        return places


class PairQueue(SharedMemoryQueue):
    """A queue between two ends that do not trust each other. A forked child's copy of it is of no use, and is closed there.

    Attributes:
        offer: how it was made known.
    """

    kept_by, gets_by = RowPresenceLock, _CheckedGets
    waits_in_read = False  # but for several descriptors at a time
    offer: QueueOffer

    def __init__(self, queue: OpenQueue) -> None:
        super().__init__(queue)
        self._is_claimed = False  # by an end of this process
        self.puts.names_holders = False  # the end does, once its put has waited for as long as it may
        self.rows.after_fork(self.close)

    def claim(self, maxsize: int, end: int = 0) -> bool:
        """Take a queue that is there for whoever comes. Whether nobody had, of all processes and of this one's threads.

        The lock goes with this process, or when it closes the queue. What was claimed once is nobody else's after that.

        Args:
            maxsize: how many messages may be in it from now on; not more than before.
            end: the token of the end that takes it.
        """
        if self.words[self.record.claimed] or self._is_claimed:
            return False
        # With no call, and so no other thread and no exception, since it was asked.
        self._is_claimed, done = True, False
        byte = self.record.block + 1
        try:
            if self.rows.try_lock(byte, 1) and not self.words[self.record.claimed]:
                self.words[self.record.claimed] = (end % _ENDS) * _PIDS + os.getpid()
                if maxsize < self.maxsize:
                    assert self.credits is not None
                    os.read(self.credits.fd, 8 * (self.maxsize - maxsize))
                    self.record.narrow(maxsize)
                done = True
        finally:
            if not done:
                self._is_claimed = False
                self.rows.unlock(byte, 1)
        return done

    def accept(self) -> None:
        """Go by what the connector that took it has left of it."""
        self.record.maxsize = min(self.maxsize, QueueRecord(self.arena, self.number).maxsize)

    @property
    def claimant(self) -> int:
        """The process whose connector has taken it; 0 as long as none has."""
        return self.words[self.record.claimed] % _PIDS

    def is_claimed_by(self, hello: Hello) -> bool:
        """Return whether the end that says a HELLO has taken it."""
        claim = self.words[self.record.claimed]
        return claim % _PIDS == hello.identity.pid and claim // _PIDS == hello.end % _ENDS

    def is_being_claimed(self) -> bool:
        """Return whether a connector of another process has the lock."""
        return self.rows.is_locked(self.record.block + 1)

    def let_go(self) -> None:
        """Have an end of this process let go of it. To the kernel a binder here and its connector are one."""
        self._is_claimed = False

    def is_deserted(self) -> bool:
        """Return whether the connector that took it has let go of it, or is dead."""
        return self.claimant > 0 and not self._is_claimed and not self.is_being_claimed()


def objection(ours: Hello, theirs: Hello) -> str:
    """Return why two ends cannot share memory, as far as their HELLOs tell; "" if nothing is in the way."""
    for hello in (ours, theirs):
        if hello.shared_memory is None:
            return f"it is off at the {hello.role}"
    assert ours.shared_memory is not None
    assert theirs.shared_memory is not None
    one, other = ours.identity, theirs.identity
    for hello in (ours, theirs):
        if not hello.identity.boot:
            return f"/proc cannot be read at the {hello.role}"
    if one.boot != other.boot and one.boot.split()[:1] == other.boot.split()[:1]:
        return "the other end is in another time namespace"
    if one.boot != other.boot:
        return f"the other end is on another host ({one.host}, {other.host})"
    if one.namespace != other.namespace:
        return f"the other end is in another pid namespace ({one.namespace}, {other.namespace})"
    if ours.shared_memory.uid != theirs.shared_memory.uid:
        return f"the other end is another user's (uid {ours.shared_memory.uid}, uid {theirs.shared_memory.uid})"
    if min(ours.window, theirs.window) > CAPACITY:
        return f"a maxsize of {min(ours.window, theirs.window)} is more than {CAPACITY}"
    return theirs.shared_memory.why_not


def make(maxsize: int) -> PairQueue:
    """Return a queue for a pair, in the memory of the ends that this process binds.

    Raises:
        SharedMemoryError: no memory, no pipe or no descriptor is left.
    """
    queue = PairQueue.create(_own_attachment(), maxsize)
    assert isinstance(queue, PairQueue)
    assert queue.credits is not None
    if queue.tickets.spills or queue.credits.spills:
        queue.close()
        raise SharedMemoryError(errno.ENOSPC, "no pipe of 64 KiB is to be had (fs.pipe-user-pages-soft)")
    segment, tickets, credits = queue.arena.segment.descriptor, queue.tickets.fd, queue.credits.fd
    queue.offer = QueueOffer(
        1 + int.from_bytes(os.urandom(7), "little"),
        queue.number,
        maxsize,
        *((descriptor, os.fstat(descriptor).st_ino) for descriptor in (segment, tickets, credits)),
    )
    queue.words[queue.record.pair] = queue.offer.token
    _made[queue.offer.token] = queue
    return queue


def reach(binder: Identity, offer: QueueOffer, maxsize: int) -> PairQueue:
    """Return the queue that a binder offers.

    Args:
        binder: its process.
        maxsize: what the queue's must be.

    Raises:
        SharedMemoryError: it cannot be had; the text says why.
    """
    here = _made.get(offer.token) if binder == identity() else None
    if here is not None:
        return here
    if offer.token in _reaching:
        raise SharedMemoryError(errno.EBUSY, "another end of this process is just taking it")
    _reaching[offer.token] = None  # with no call since it was asked
    try:
        return _reach(binder, offer, maxsize)
    except SharedMemoryError:
        raise
    except OSError as failed:
        raise SharedMemoryError(
            failed.errno, f"the descriptors of {binder} cannot be opened: {failed.strerror}"
        ) from failed
    finally:
        _reaching.pop(offer.token, None)


def _reach(binder: Identity, offer: QueueOffer, maxsize: int) -> PairQueue:
    with owned(os.open, f"/proc/{binder.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as process:
        if _started(process.fileno()) != binder.started:
            raise SharedMemoryError(errno.EINVAL, f"{binder} is gone, and its number is another's")
        with _opened(process.fileno(), offer.segment, os.O_RDWR, stat.S_ISREG) as memory:
            attachment = attachment_of(Segment.known(memory.fileno()))
        tickets, credits = (
            _opened(process.fileno(), each, os.O_RDWR | os.O_NONBLOCK, stat.S_ISFIFO)
            for each in (offer.tickets, offer.credits)
        )
    attachment.attach()
    if offer.number & 0xFFFFFFFF in {queue.number & 0xFFFFFFFF for queue in attachment.handles()}:
        # To the kernel all ends of this process are one: who let go of it would do so for both.
        raise SharedMemoryError(errno.EBUSY, "another end of this process has it")
    record, presence_lock = QueueRecord.reach(attachment.arena, offer.number)
    if attachment.arena.words[record.pair] != offer.token:
        raise SharedMemoryError(errno.EINVAL, f"queue {offer.number:#x} is not the one that was offered")
    if attachment.arena.words[record.claimed]:  # and who has it may have made it smaller
        raise SharedMemoryError(errno.EBUSY, "another end has just taken it")
    if not record.maxsize == offer.maxsize == maxsize:
        raise SharedMemoryError(
            errno.EINVAL, f"a queue of maxsize {record.maxsize} was offered, {maxsize} was agreed on"
        )
    pipes = TokenPipe.reach(tickets, blocking=False), TokenPipe.reach(credits, blocking=False)
    queue = PairQueue(OpenQueue(attachment, offer.number, *pipes, presence_lock))
    queue.offer = offer
    return queue


def _opened(process: int, offered: tuple[int, int], flags: int, is_kind: Any) -> OwnedFd:
    """Return a descriptor of another process, opened anew, if it is what was offered."""
    descriptor, inode = offered
    name = f"fd/{descriptor}"
    if is_kind(os.stat(name, dir_fd=process).st_mode):
        found = owned(functools.partial(os.open, dir_fd=process), name, flags | os.O_CLOEXEC)
        status = os.fstat(found.fileno())
        if is_kind(status.st_mode) and status.st_ino == inode:
            return found
        found.close()  # whoever keeps the error keeps what it knows of
    raise SharedMemoryError(errno.EINVAL, f"descriptor {descriptor} of the other end is not what it offered")


def _started(process: int) -> float:
    """Return when the process of a /proc directory started."""
    with owned(functools.partial(os.open, dir_fd=process), "stat", os.O_RDONLY | os.O_CLOEXEC) as file:
        return float(os.pread(file.fileno(), _STAT, 0).rpartition(b")")[2].split()[19])


def _own_attachment() -> Attachment:
    """Not the one of the queues without a context: what lies there may be pickled."""
    return _own.get(process_key()) or _own.setdefault(process_key(), Attachment(Arena(Segment.create(_SIZE))))


_made: weakref.WeakValueDictionary[int, PairQueue] = weakref.WeakValueDictionary()  # by token
_reaching: dict[int, None] = {}  # by token: those that a thread is just about to have
_own: weakref.WeakValueDictionary[ProcessKey, Attachment] = (
    weakref.WeakValueDictionary()
)  # by process: it goes with the last queue
