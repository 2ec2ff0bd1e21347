"""One way of a message through shared memory: a queue of tickets, the credits that bound it, the blocks they name.

::

    put:  credit -> block filled -> QUEUED -> ticket        get:  ticket -> content -> credit -> HELD or FREE

Which step stands on record in which word at which moment, and why nothing is lost wherever a process dies, is argued
in docs/design/crash-argument.md. The program whose steps are numbered there, P1 to P8 and G1 to G7, stands in
``put_end`` and ``get_end``; ``recovery`` rolls them back. The tokens are drawn in ``tokens``.

Small messages decided the code: a plain blocking ``readv`` where nothing but a message can end the wait; operations from a
list of one's own rather than from a lock or a thread-local; no HELD state for a message that is copied out; few calls.
"""

from __future__ import annotations

import contextlib
import os
import sys
from array import array
from collections.abc import Callable
from multiprocessing import context
from typing import Any

from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.get_end import COPY, LEASE, LEASE_FROM, Decode, GetEnd, Message, lease_from
from tensorpipe_ipc.shared_queue.open_queue import OpenQueue
from tensorpipe_ipc.shared_queue.put_end import Copy, Payload, PutEnd
from tensorpipe_ipc.shared_queue.queue_record import PresenceLock, QueueRecord
from tensorpipe_ipc.shared_queue.tasks import Tasks
from tensorpipe_ipc.shared_queue.token_pipe import TokenPipe
from tensorpipe_ipc.shared_queue.tokens import NEXT_LAP

__all__ = ["COPY", "LEASE", "LEASE_FROM", "Copy", "Decode", "Message", "Payload", "SharedMemoryQueue", "lease_from"]


class SharedMemoryQueue:
    """Both ends of one queue, for any number of processes and threads. Inherited by fork, pickled while spawning.

    Attributes:
        kept_by: what says that a process has the queue.
        gets_by: what gets from it.
        waits_in_read: whether get without a timeout waits in a plain blocking read.
        puts, gets: its ends, and what this process counts at each. Their methods are the queue's, too.
        opened: what its ends share.
        attachment, arena, rows, leases, words, number, record, tickets, credits: see OpenQueue.
    """

    kept_by: type[PresenceLock] = PresenceLock
    gets_by: type[GetEnd] = GetEnd
    waits_in_read = True

    def __init__(self, queue: OpenQueue) -> None:
        self.opened = queue
        self.attachment, self.arena, self.rows = queue.attachment, queue.arena, queue.rows
        self.leases, self.words, self.number, self.record = queue.leases, queue.words, queue.number, queue.record
        self.tickets, self.credits = queue.tickets, queue.credits
        self.puts, self.gets = puts, gets = PutEnd(queue), self.gets_by(queue)
        # The ends' own methods, which saves a call. One of them alone does not keep the queue open: this object does.
        self.put, self.put_many, self.put_held, self.block_for = puts.put, puts.put_many, puts.put_held, puts.block_for
        self.get, self.get_many, self.fileno = gets.get, gets.get_many, gets.fileno
        self.qsize, self.waiting, self.is_empty = queue.qsize, queue.waiting, queue.is_empty

    @property
    def maxsize(self) -> int:
        """Return how many messages may be in the queue; 0: any number."""
        return self.record.maxsize

    @property
    def tasks(self) -> Tasks:
        """Return which of its messages are not dealt with, if it can be joined."""
        return self.opened.tasks

    @classmethod
    def create(cls, attachment: Attachment, maxsize: int = 0, *, tasks: bool = False) -> SharedMemoryQueue:
        """Return a new, empty one.

        Args:
            maxsize: how many messages may be in it; 0: any number.
            tasks: whether it is to be joined.

        Raises:
            ValueError: ``maxsize`` is negative or above 16,777,215.
            SharedMemoryError: no memory, no pipe or no descriptor is left.
        """
        attachment.attach()
        attachment.recover_dead()
        attachment.destroy_left_queues()
        record, presence_lock = QueueRecord.create(attachment.arena, maxsize, tasks, cls.kept_by)
        tickets = TokenPipe.create(maxsize or None, blocking=cls.waits_in_read)
        credits = TokenPipe.create(maxsize, blocking=False) if maxsize else None
        queue = cls(OpenQueue(attachment, record.number, tickets, credits, presence_lock))
        if credits is not None:
            tokens = memoryview(array("Q", range(NEXT_LAP, NEXT_LAP + maxsize))).cast("B")  # lap 1 of each slot
            for start in range(0, len(tokens), 512):
                credits.give([tokens[start : start + 512]])
        return queue

    def shut_down(self, *, drop: bool) -> None:
        """Refuse puts from now on, in every process, and gets once nothing is left.

        Args:
            drop: drop what waits, so that gets are refused at once.
        """
        self.attachment.attach()
        self.attachment.shutdown.begin(self.opened.handle, drop=drop)
        self.attachment.shutdown.settle_puts(self.opened.handle, self.attachment.recover_dead)
        if drop:
            self.gets.drop_all()

    def wait_for_tasks(self) -> None:
        """Wait until no task is left.

        Finish meanwhile what exceptions ended here, and what the dead began: a shutdown that was to drop what waits, too. Free
        what only forks' children kept, and memory that lies idle.
        """
        looks: int | None = None

        def idle() -> None:
            nonlocal looks
            looks = self.attachment.recover_in_turn(looks)
            self.attachment.mind_idle(waits=True)
            self.opened.take_up()
            if self.words[self.record.dropped]:
                self.gets.drop_all()

        self.tasks.wait(idle)

    def done(self, direction: int) -> tuple[int, int]:
        """Messages and bytes of payload that this process has put, or got."""
        words = self.words
        counters = [each.counters for each in self.opened.operations if words[each.purpose] & 0xFF == direction]
        return sum(words[first] for first in counters), sum(words[first + 1] for first in counters)

    def close(self) -> None:
        """This process has the queue no more. What was received stays; what waits is for others to get, if there are any.

        In a fork that has not been told yet it does nothing: all that the queue has begun is its parent's.
        """
        queue = self.opened
        if queue.process != os.getpid():
            return
        if queue.is_open and self.attachment.queues.get(self.number, queue.handle) is queue.handle:
            self.gets.give_up()
            self.opened.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else modules are half gone, and the kernel takes all back in a moment
            with contextlib.suppress(AttributeError, OSError):
                self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return SharedMemoryQueue, (self.opened,)
