"""OpenQueue: one queue in shared memory as this process has it, and what exceptions left of its puts and gets.

PutEnd and GetEnd work with it. They know nothing of each other.

**Exceptions.** A signal handler may raise wherever CPython looks for signals: after a call, on entering a function and on
jumping back; and again while the first exception propagates. The promise is the same as for a death, except that this process
finishes its operation itself, as the recovering process would:

* A put is done, or nothing of it is left. A get loses its message at most, and counts it, and only if the message's block
  had been let go. Otherwise its ticket is set aside, and the next get serves it.
* An operation's words say what put or get had begun. The ``except`` clause puts the operation into ``unfinished`` before any
  call at which another exception could come. It is finished from there, at once or by the next put or get. Either finishes
  both: what a put left may be a credit that others wait for, and what a get left may be the credit that a put waits for.
* Code that takes an entry out of a list, or marks something as done, makes no call until that is on record again. So a list's
  last entry is taken by ``values[-1]`` and ``del values[-1]``: after ``values.pop()`` an exception may come. No other thread
  runs in between either, because CPython switches threads at the same moments.

Python 3.10 looks for signals also when a function has returned, before the caller has its result. What is lost there is not
counted, as in the caller's own ``message = queue.get()``.

**Forks** may happen within a put or a get: in a signal handler, a finalizer or ``__setstate__``. The operation under way
belongs to the parent. In the child it ends at the first exception, or when the message is decoded, and stores nothing to
shared memory: ``process`` differs there. A child must not return into a put or into a wait; nothing can stop it there.
"""

from __future__ import annotations

import os
from threading import get_ident
from typing import Any

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory.leases import settle_kept
from tensorpipe_ipc.memory.row import BATCH, Operation
from tensorpipe_ipc.memory.rows import Rows
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.queue_record import PresenceLock, QueueRecord
from tensorpipe_ipc.shared_queue.tasks import Tasks
from tensorpipe_ipc.shared_queue.token_pipe import TokenPipe
from tensorpipe_ipc.shared_queue.tokens import InDoubt, QueueHandle

__all__ = ["IN_A_FORK", "Aside", "OpenQueue"]

IN_A_FORK = "a child that was forked in the middle of a call has returned into it"


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


class Aside:
    """A ticket of a get that was not completed, to be served by a later one.

    Attributes:
        operation, index: where it stands.
        before: how many others go first.
        tries: how often its message could not be decoded.
        is_credited: whether its place was given back since it was set aside.
    """

    __slots__ = ("before", "index", "is_credited", "operation", "tries")

    def __init__(self, operation: Operation, index: int) -> None:
        self.operation, self.index = operation, index
        self.before = self.tries = 0
        self.is_credited = False


class OpenQueue:
    """One queue, as this process has it. A forked child begins anew: it has done nothing with the queue yet.

    Attributes:
        attachment, arena, rows, leases, words, memory: this process's use of the memory that the queue lies in.
        octets: that memory, as one view.
        number, record, tickets, credits: the queue, and its pipes; no credits where there is no bound.
        handle: what attachment.queues has, as long as the queue is open here.
        is_open: whether it is. In a cycle that is collected, attachment.queues has forgotten it before it is closed.
        process: this one. It differs after a fork within a put or a get.
        operations: all that this process has for the queue.
        unfinished: what exceptions ended: an entry has the function that finishes it and empties the entry, and what it needs.
        aside: tickets that gets of this process took and did not complete. The next gets serve them, before others.
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
        self.octets = memoryview(self.memory)
        self.number, self.tickets, self.credits, self.presence_lock = number, tickets, credits, presence_lock
        self.record = QueueRecord(self.arena, number)
        self.handle = attachment.queues[number] = QueueHandle(self.record, tickets, credits)
        self.is_open = True
        self.leases.gives_back = False
        self.rows.after_fork(self._renew)
        self._forget()

    def _forget(self) -> None:
        self.process = os.getpid()
        self.tickets.turn = _Turn(self.rows, self.record.turn)
        self.operations: list[Operation] = []
        self.unfinished: list[list[Any]] = []
        self.aside: list[Aside] = []
        self.tasks = Tasks(self.rows, self.record, self.operations)

    def _renew(self) -> None:
        self.tickets.renew()
        if self.credits is not None:
            self.credits.renew()
        self._forget()

    def operation(self, direction: int, size: int = 1) -> Operation:
        """Return a further operation: this process's first, or others are under way in threads or interrupted code.

        Raises:
            SharedMemoryError: this process's row has no room for one more.
        """
        self.attachment.attach()
        operation = self.rows.operation(self.number, direction, size)
        self.operations += (operation,)
        return operation

    def batch(self, direction: int, spare: list[Operation]) -> Operation | None:
        """Return an operation for a batch, a spare one if there is any.

        Returns:
            None: this process's row has no room for one more; for single ones it has.
        """
        if spare:
            operation = spare[-1]
            del spare[-1]
            return operation
        self.attachment.attach()
        try:
            return self.operation(direction, BATCH)
        except SharedMemoryError:
            return None

    def take_up(self) -> None:
        """Finish what exceptions ended, as far as it can be judged now, and free what only a fork's children kept."""
        process = self.process
        self.leases.settle(at_once=False)
        settle_kept()
        for _ in range(len(self.unfinished)):
            if not self.unfinished:  # another thread takes it up
                return
            entry = self.unfinished[0]
            del self.unfinished[0]
            try:
                if entry:
                    entry[0](entry)
            except BaseException as error:
                if process == self.process:  # else of a fork within: it is the parent's to do
                    self.unfinished.append(entry)
                if not isinstance(error, InDoubt):
                    raise

    def qsize(self) -> int:
        """Return how many messages wait, those among them that an interrupted get of this process had taken.

        Others may put and get meanwhile.
        """
        words, waiting = self.words, self.tickets.unread()
        has_log = words[self.record.spilled] and (waiting or self.tickets.spilled())
        if has_log or waiting and words[self.record.shut]:
            exactly = self.tickets.waiting()
            waiting = self.waiting() if exactly is None else exactly
        return waiting + len(self.aside)

    def is_empty(self) -> bool:
        """Return whether no message waits, those included that an interrupted get of this process had taken."""
        words = self.words
        if self.aside or (
            (words[self.record.spilled] or words[self.record.shut]) and self.tickets.begins_with_tokens()
        ):
            return False
        return not self.qsize()

    def waiting(self) -> int:
        """Return how many messages wait, or a few more, without looking at each token."""
        return self.tickets.unread() + (self.tickets.spilled() if self.words[self.record.spilled] else 0)

    def close(self) -> None:
        """This process has the queue no more. What waits is for others to get, if there are any."""
        self.is_open = False
        self.attachment.queues.pop(self.number, None)
        self.tickets.close()
        if self.credits is not None:
            self.credits.close()
        self.presence_lock.close()
        kept = []
        for operation in (*self.operations, *self.tasks.operations):
            run = self.words[operation.credit : operation.credit + (4 if operation.size == 1 else 3 * operation.size)]
            if any(run):
                kept.append(operation)
            else:
                self.rows.retire(operation)
        self.attachment.leave(self.number, kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenQueue, (self.attachment, self.number, self.tickets, self.credits, self.presence_lock)
