"""Shutdown: refuse further puts to a queue, and wake all that wait for its tickets.

A shutdown begins with doorbells in the pipe of tickets (``SHUT``; ``DROP`` where what waits is dropped): as many as there
are words into which a living process may be reading, and some for those that come. Then ``dropped`` and ``shut`` are set, then
the doorbells are given again. Whoever takes such a doorbell does all of this, unless it is done. So a shutdown that is cut
short by a kill was either not begun, or each sleeper has a doorbell of its own. Whoever takes one puts it back into the pipe
before it leaves the word: doorbells go round, and none that a killed or stopped process took is missed by another. One pass
over what the pipe held says that only doorbells are left (``TokenPipe.take_past_bells``). A doorbell in a dead row's word is
heard by the recovering process. Who finds nothing more rings until there are as many doorbells as words once more. A full pipe
has no room for them, and ``shut`` is 1. Then each get tries to give them before it takes, until they are in, and ``shut`` is
TOLD. So they are in long before the last ticket can be taken.
All other waits look at ``shut`` in each slice, and a get looks before it waits.

A put looks at ``shut`` when T is set and the block not yet QUEUED, between P4 and P5. So a put that has not seen it has its
T on record before ``shut`` was stored: ``settle_puts`` waits for these words, for a time, before a shutdown returns, and before
a get says that nothing is left. (The store of T and the look are not ordered by a fence. The looks at the words come after
several system calls, and a store stays in a processor's buffer for less than one.) Only a process that is stopped between
P4 and P6 gives its ticket later; it is got by whoever still gets, and where ``dropped`` is set ``join`` drops it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tensorpipe_ipc.memory.row import GET, PUT
from tensorpipe_ipc.memory.rows import Rows
from tensorpipe_ipc.shared_queue.queue_record import TOLD
from tensorpipe_ipc.shared_queue.token_pipe import DROP, SHUT, SLICE
from tensorpipe_ipc.shared_queue.tokens import QueueHandle

__all__ = ["Shutdown"]

_SPARE_DOORBELLS, _MOST_DOORBELLS = 8, 4096  # for those who begin to wait meanwhile; a pipe holds no more
_PATIENCE = 0.5  # seconds
_LATE = 0.03  # seconds for which a get may outlast its timeout


class Shutdown:
    """Shut down queues of one segment."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.words = rows, rows.words

    def begin(self, queue: QueueHandle, *, drop: bool) -> None:
        """Shut a queue down, and wake all that wait for its tickets. Any process may do so, any number of times."""
        words, record = self.words, queue.record
        self.wake(queue, drop=drop)
        if drop:
            words[record.dropped] = 1
        record.set(record.shut)
        told = self.wake(queue, drop=drop)
        record.set(record.shut)  # a taker may have been about to clear ``watch``: queue_record.py
        if told:
            words[record.shut] = TOLD

    def wake(self, queue: QueueHandle, *, drop: bool = False, again: bool = False) -> bool:
        """Tell all that wait for a queue's tickets that it is shut down: one doorbell for each word that may take one.

        Args:
            again: whether this was done before. Doorbells that are in the pipe count then, so they do not pile up.

        Returns:
            Whether the pipe had room for all doorbells.
        """
        rows = self.rows
        waiting = sum(
            record.size for row in rows.used() if rows.is_alive(row) for record in rows.records(row, queue.number, GET)
        )
        is_dropped = drop or self.words[queue.record.dropped]
        missing = min(_SPARE_DOORBELLS + waiting, _MOST_DOORBELLS) - (queue.tickets.unread() if again else 0)
        return queue.tickets.ring_doorbell(DROP if is_dropped else SHUT, missing)

    def settle_puts(self, queue: QueueHandle, recover: Callable[[], object], deadline: float | None = None) -> None:
        """Wait until puts that are about to give their tickets have done so, or have seen that the queue is shut.

        Only a process that is stopped, or hardly gets to run, takes longer than ``_PATIENCE``, or than ``_LATE`` after the
        deadline of a get.

        Args:
            recover: called between two looks: it finishes the puts of the dead.
        """
        now, pause = time.monotonic(), 0.0001
        until = now + (_PATIENCE if deadline is None else min(_PATIENCE, max(0, deadline - now) + _LATE))
        pending = dict(self._tickets_named(queue.number))
        while pending and time.monotonic() < until:
            time.sleep(min(pause, max(0, until - time.monotonic())))
            pause = min(2 * pause, SLICE)
            recover()
            pending = {word: ticket for word, ticket in pending.items() if self.words[word] == ticket}

    def _tickets_named(self, number: int) -> Iterator[tuple[int, int]]:
        for row in self.rows.used():
            for record in self.rows.records(row, number, PUT):
                for word in range(record.ticket, record.ticket + record.size):
                    if self.words[word]:
                        yield word, self.words[word]
