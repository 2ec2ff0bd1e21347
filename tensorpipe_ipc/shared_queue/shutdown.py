"""Shutdown: refuse further puts to a queue, and wake every process that waits for its tickets.

**Doorbells.** A shutdown begins with doorbells in the pipe of tickets: ``SHUT``, or ``DROP`` where waiting messages are to be
dropped. There is one for each word into which a living process may be reading, and some for processes that begin to wait
meanwhile. Then the words ``dropped`` and ``shut`` are set, and the doorbells are given again. A process that takes a doorbell
does all of this itself, unless it is done. So a shutdown that a kill cut short either never began, or has a doorbell for each
sleeper.

A process that takes a doorbell puts it back into the pipe before it clears its word. So doorbells go round, and a doorbell
that a killed or stopped process took is missed by nobody. One pass over what the pipe held tells that only doorbells are
left (``TokenPipe.take_past_doorbells``). A doorbell in a dead row's word is handled by the recovering process. A get that finds
nothing more rings until there are as many doorbells as words again.

A full pipe has no room for doorbells, and then ``shut`` is 1. Each get tries to give them before it takes a ticket. Once they
are in, ``shut`` is TOLD. So they are in long before the last ticket can be taken. All other waits look at ``shut`` in each
slice, and a get looks at it before it waits.

**Puts under way.** A put looks at ``shut`` between P4 and P5: when T is set, and the block not yet QUEUED. So a put that has
not seen ``shut`` had stored its T before ``shut`` was stored. ``settle_puts`` waits for such words, for a limited time: before
a shutdown returns, and before a get reports that nothing is left. No fence orders the store of T and the look at ``shut``. But
several system calls come before the look at the words, and a store stays in a processor's buffer for less than one. Only a
process that is stopped between P4 and P6 gives its ticket later. A later get takes that ticket, and where ``dropped`` is set
``join`` drops it. A handler of a signal may shut a queue down within a put of its own thread, which cannot go on meanwhile. So
a put looks once more right before P6, where no handler runs between the two.
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
        words[record.spilled] = 1  # first: from here on the pipe's length is not the number of its messages
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
