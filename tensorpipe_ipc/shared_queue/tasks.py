"""The number of a queue's tasks that are not done: counts in the rows of those who put, took and finished them.

Each operation (memory/row.py) has a tally of what was done with it, in a word that only its process writes::

    tally    63 ───────── 1 0
             │ n           │ 1 while a step is being counted
             └─────────────┴─┘

    put                                 get                                task_done
    P4  T = the ticket                  J3  n + 1, and the low bit         D   n + 1
    J1  n + 1, and the low bit          G5  block FREE or HELD
    P5  …  P6  the ticket is given      G6  T = 0
    J2  low bit = 0                     J4  low bit = 0
    P8  T = 0

All puts are counted *before* their tickets are given, so whoever adds up first the done, then the put, never finds as
many when a task is left: a task is counted as put before anybody can take it. Equal sums mean that nothing was left at
the moment between.

**After a death** nothing is counted twice or not at all. Put: the low bit is set only while T is; the recovering process finds
out whether the ticket was given, clears the bit if so and takes back J1 if not, and then clears T. Get: with T set, the
low bit says whether J3 was; if not, the recovering process does it, and then what follows. At last it counts what the dead had
taken and not finished as *settled*, in one store (``settle_dead``): nobody else will finish it.

But a process that does more tasks than it took does those of others, as a program does that takes results from its workers
and calls ``task_done`` itself. Then what a dead one took says nothing of what is left. So it notes that in the queue's record
(OF_OTHERS), before it counts the first of these, and from then on nobody looks at what was settled."""

from __future__ import annotations

import time
from collections.abc import Callable, Set

from tensorpipe_ipc.memory.row import DONE, GET, PUT, SETTLED, Operation
from tensorpipe_ipc.memory.rows import Rows
from tensorpipe_ipc.shared_queue.queue_record import OF_OTHERS, QueueRecord

__all__ = ["Tasks", "count_put", "count_taken", "settle_dead", "settle_put"]

_PAUSE, _LONGEST_PAUSE = 0.0002, 0.05  # seconds between two looks of join, at first and at most
_LATE = 8  # join is late by this part of the time that it has waited, at most


def count_put(words: memoryview, tally: int) -> None:
    """J1."""
    words[tally] += 3


def settle_put(words: memoryview, tally: int, *, given: bool) -> None:
    """J2, or J1 undone; nothing where neither is due."""
    if words[tally] & 1:
        words[tally] -= 1 if given else 3


def count_taken(words: memoryview, tally: int) -> None:
    """J3, unless it was done."""
    if not words[tally] & 1:
        words[tally] += 3


def settle_dead(rows: Rows, row: int, in_doubt: Set[int]) -> None:
    """Count what a dead row's process took, and did not finish, as settled. The caller has the row's lock.

    Args:
        in_doubt: the queues of which somebody else must look at an operation first.
    """
    words, left = rows.words, dict[int, int]()
    records = list(rows.records(row))
    for record in records:
        if record.size == 1 and words[record.tally] > 1:
            queue, direction = words[record.purpose_word] >> 8, words[record.purpose_word] & 0xFF
            if direction != PUT and queue not in in_doubt:
                left[queue] = left.get(queue, 0) + (words[record.tally] >> 1) * (1 if direction == GET else -1)
    for queue, count in left.items():
        if count > 0:
            record = next(rows.records(row, queue, SETTLED), None) or rows.unused_record(row)
            words[record.purpose_word] = queue << 8 | SETTLED
            words[record.tally] += count << 1


class Tasks:
    """The tasks of one queue, as one process sees them."""

    def __init__(self, rows: Rows, record: QueueRecord, own: list[Operation]) -> None:
        """``own``: this process's operations on the queue, that put and get. The list may grow."""
        self._rows, self._words, self._record, self._own = rows, rows.words, record, own
        self.operations: list[Operation] = []

    def done(self) -> None:
        """One task more is done.

        Raises:
            ValueError: more than were put.
        """
        if not self._has_taken():
            done = self._sum(DONE)
            if self._sum(PUT) <= done:
                raise ValueError("task_done() called too many times")
            self._words[self._record.tasks] = OF_OTHERS
        tally = self.tally()
        self._words[tally] += (
            2  # with no call: no other thread comes in between, and no exception of a signal's handler
        )

    def tally(self) -> int:
        """Return the index of the word in which this process counts what is done: 2 is to be added for each task."""
        if not self.operations:
            self.operations += (self._rows.operation(self._record.number, DONE),)
        return self.operations[0].tally

    def _has_taken(self) -> bool:
        """Return whether this process took more than it finished: the usual case, which needs no look at other rows."""
        # The done first: other threads take and finish some meanwhile, and what is in hand is not to be overlooked.
        words, done = self._words, sum(self._words[each.tally] - each.tally_before for each in self.operations)
        got = [each for each in self._own if each.size == 1 and self._words[each.purpose] & 0xFF == GET]
        return sum(words[each.tally] - each.tally_before for each in got) > done

    def unfinished(self) -> int:
        """Tasks put and not done."""
        done, settled = self._sum(DONE), self._sum(SETTLED)
        if self._words[self._record.tasks] == OF_OTHERS:
            settled = 0
        return self._sum(PUT) - done - settled

    def wait(self, idle: Callable[[], object]) -> None:
        """Wait until nothing is left. Nobody wakes us: each looks, 20 times a second once it has waited for a while.

        Args:
            idle: called 20 times a second from the start.
        """
        began = looked = time.monotonic()
        while self.unfinished() > 0:
            time.sleep(min(max(_PAUSE, (time.monotonic() - began) / _LATE), _LONGEST_PAUSE))
            if time.monotonic() - looked > _LONGEST_PAUSE:
                idle()
                looked = time.monotonic()

    def _sum(self, direction: int) -> int:
        return sum(self._words[record.tally] >> 1 for record in self._rows.singles(self._record.number, direction))
