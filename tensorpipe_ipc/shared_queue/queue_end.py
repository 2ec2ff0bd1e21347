"""QueueEnd: what both ends of a queue in shared memory have in common, and the operations on record that they work with.

**Exceptions.** A signal handler may raise wherever CPython looks for signals: after a call, on entering a function and on
jumping back; and again while the first exception propagates. The promise is the same as for a death, except that this process
finishes its operation itself, as the recovering process would:

* A put is done, or nothing of it is left. A get loses its message at most, and counts it, and only if the message's block
  had been let go. Otherwise its ticket is set aside, and the next get serves it.
* An operation's words say what put or get had begun. The ``except`` clause puts the operation into ``_left`` before any call
  at which another exception could come. It is finished from there, at once or by the next put or get.
* Code that takes an entry out of a list, or marks something as done, makes no call until that is on record again. So a list's
  last entry is taken by ``values[-1]`` and ``del values[-1]``: after ``values.pop()`` an exception may come. No other thread
  runs in between either, because CPython switches threads at the same moments.

Python 3.10 looks for signals also when a function has returned, before the caller has its result. What is lost there is not
counted, as in the caller's own ``message = queue.get()``.

**Forks** may happen within a put or a get: in a signal handler, a finalizer or ``__setstate__``. The operation under way
belongs to the parent. In the child it ends at the first exception, or when the message is decoded, and stores nothing to
shared memory: ``_process`` differs there. A child must not return into a put or into a wait; nothing can stop it there.
"""

from __future__ import annotations

import os
from threading import get_ident

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory.row import BATCH, GET, PUT, Operation
from tensorpipe_ipc.memory.rows import Rows
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.queue_record import PresenceLock, QueueRecord
from tensorpipe_ipc.shared_queue.tasks import Tasks
from tensorpipe_ipc.shared_queue.token_pipe import DOORBELL, DROP, SHUT, TokenPipe
from tensorpipe_ipc.shared_queue.tokens import QueueHandle

__all__ = ["Aside", "QueueEnd"]


class _Turn:
    """A lock of a byte of the record, by the description that carries this process's row.

    To the kernel all threads of this process are one holder, so they are told apart here.
    """

    __slots__ = ("_byte", "_rows", "_thread")

    def __init__(self, rows: Rows, byte: int) -> None:
        self._rows, self._byte, self._thread = rows, byte, 0

    def take(self) -> bool:
        """See token_pipe.Turn."""
        thread = get_ident()
        if self._thread not in (0, thread):
            return False
        self._thread = thread  # no call since the look: no other thread has come in between
        try:
            if self._rows.try_lock(self._byte, 1):
                return True
        except BaseException:  # a signal handler's, when it was just locked, perhaps
            self.leave()
            raise
        self._thread = 0
        return False

    def leave(self) -> None:
        """See token_pipe.Turn."""
        self._rows.unlock(self._byte, 1)
        self._thread = 0


class QueueEnd:
    """The ground that PutEnd and GetEnd stand on.

    Attributes:
        maxsize: how many messages may be in the queue; 0: any number.
        tickets, credits: the queue's pipes; no credits where there is no bound.
        record: what all processes know of it.
        tasks: which of its messages are not dealt with, if it can be joined.
    """

    def __init__(
        self,
        attachment: Attachment,
        number: int,
        tickets: TokenPipe,
        credits: TokenPipe | None,
        presence_lock: PresenceLock,
    ) -> None:
        self.attachment, self.arena, self.rows = attachment, attachment.arena, attachment.rows
        self.leases = attachment.leases
        self.words, self.memory = self.arena.words, self.arena.segment.memory
        self._view = memoryview(self.memory)
        self.number, self.tickets, self.credits, self._presence_lock = number, tickets, credits, presence_lock
        self.record = QueueRecord(self.arena, number)
        self.maxsize, self._tag = self.record.maxsize, number & 0xFFFFFFFF
        self._watch, self._laps, self._has_tasks = self.record.watch, self.record.laps, self.record.has_tasks
        self._tickets_fd = tickets.fd
        # Where nobody waits in readv, whoever takes without a timeout knows that there is something.
        self._read_end = tickets.read_end if tickets.read_end >= 0 else tickets.fd
        self._handle = attachment.queues[number] = QueueHandle(self.record, tickets, credits)
        self.leases.gives_back = False
        self.rows.after_fork(self._renew)
        self._forget()

    def _forget(self) -> None:
        """This process has done nothing with the queue yet."""
        self._process = os.getpid()
        self.tickets.turn = _Turn(self.rows, self.record.turn)
        self._batches: dict[int, list[Operation]] = {PUT: [], GET: []}  # spare ones
        self._operations: list[Operation] = []  # all of them
        self._left: list[Operation | Aside] = []  # what exceptions ended
        self.tasks = Tasks(self.rows, self.record, self._operations)

    def _renew(self) -> None:
        self.tickets.renew()
        if self.credits is not None:
            self.credits.renew()
        self._forget()

    def _operation(self, direction: int) -> Operation:
        """Return a further operation: this process's first, or others are under way in threads or interrupted code."""
        self.attachment.attach()
        operation = self.rows.operation(self.number, direction)
        self._operations += (operation,)
        return operation

    def _batch(self, direction: int) -> Operation | None:
        """None: this process's row has no room for one more; for single ones it has."""
        spare = self._batches[direction]
        if spare:
            operation = spare[-1]
            del spare[-1]
            return operation
        self.attachment.attach()
        try:
            operation = self.rows.operation(self.number, direction, BATCH)
        except SharedMemoryError:
            return None
        self._operations += (operation,)
        return operation

    def _take_up(self) -> None:
        """Finish what exceptions ended, as far as it can be judged now."""
        for _ in range(len(self._left)):
            try:
                left = self._left[0]
                del self._left[0]
            except IndexError:  # another thread takes it up
                return
            done = False
            try:
                done = left.cause is None or self._finish(left)
            finally:
                if not done:
                    self._left.append(left)

    def _finish(self, left: Operation | Aside) -> bool:
        """Finish a put, or have a get served later. Whether that could be done."""
        raise NotImplementedError

    def qsize(self) -> int:
        """Return how many messages wait. Others may put and get meanwhile."""
        words, waiting = self.words, self.tickets.unread()
        if not (words[self.record.spilled] or words[self.record.shut]) or not (waiting or words[self._watch]):
            return waiting
        exactly = self.tickets.waiting()
        return self.waiting() if exactly is None else exactly

    def waiting(self) -> int:
        """``qsize`` or a few more, without looking at each token."""
        return self.tickets.unread() + (self.tickets.spilled() if self.words[self._watch] else 0)

    def _hear(self, doorbell: int) -> None:
        """Do what a doorbell says, which was taken. (``DOORBELL`` says: look at the log.) One of a shutdown goes back: it may
        be what another would have been woken by."""
        words, record = self.words, self.record
        if doorbell == DOORBELL:
            return
        if not (words[record.shut] and (doorbell == SHUT or words[record.dropped])):
            self.attachment.shutdown.begin(self._handle, drop=doorbell == DROP)
        self.tickets.ring_doorbell(doorbell)


class Aside:
    """A ticket of a get that was not completed, to be served by a later one.

    Attributes:
        operation, index: where it stands.
        before: how many others go first.
        tries: how often its message could not be decoded.
        cause: the exception that ended the last try, until that is seen to.
    """

    __slots__ = ("before", "cause", "index", "operation", "tries")

    def __init__(self, operation: Operation, index: int) -> None:
        self.operation, self.index = operation, index
        self.before = self.tries = 0
        self.cause: BaseException | None = None
