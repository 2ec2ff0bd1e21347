"""Tokens: the tickets and credits of a queue, and the pipes that carry them.

::

    ticket    63 ────────── 32 31 ──────── 0       credit    63 ─────── 24 23 ──── 0
              │ block >> 9    │ generation │                 │ lap >= 1   │ slot   │
              └───────────────┴────────────┘                 └────────────┴────────┘

A queue with ``maxsize`` has that many slots. Each slot has one credit, which goes round: the pipe of credits, a
producer's word, the header of a queued block, a consumer's word, and back with the next lap. As credits have identity,
nobody ever recounts them: only those that a dead process's row names are questioned.
"""

from __future__ import annotations

from tensorpipe_ipc.memory.arena import SMALLEST
from tensorpipe_ipc.shared_queue.queue_record import SLOT_BITS, QueueRecord
from tensorpipe_ipc.shared_queue.token_pipe import TokenPipe

__all__ = ["NEXT_LAP", "InDoubt", "QueueHandle", "Seen", "block_of"]

NEXT_LAP = 1 << SLOT_BITS


class QueueHandle:
    """One queue as this process has it: its number, its record and its pipes. It lives as long as the process has the queue."""

    __slots__ = ("__weakref__", "credits", "number", "record", "tickets")

    def __init__(self, record: QueueRecord, tickets: TokenPipe, credits: TokenPipe | None) -> None:
        self.number, self.record, self.tickets, self.credits = record.number, record, tickets, credits


class InDoubt(Exception):
    """A token cannot be judged now: there is no scratch pipe, or a smaller one, or this process does not have its queue."""


class Seen:
    """The tokens in a queue's pipes, and in their logs. Each pipe is looked at once, when that is first asked for.

    A look takes as long as much waits. One is enough for all operations of a dead process: see recovery.py.

    Attributes:
        taken: by direction, what stood in all takers' words after the look at the pipe that they take from.
    """

    def __init__(self, queue: QueueHandle) -> None:
        self.queue, self._seen = queue, dict[TokenPipe, frozenset[int]]()
        self.taken = dict[int, frozenset[int]]()

    def tokens_of(self, pipe: TokenPipe) -> frozenset[int]:
        """Return the tokens that were in a pipe and its log.

        Raises:
            InDoubt: there is no descriptor for a scratch pipe, or it is too small for what waits.
        """
        if pipe not in self._seen:
            tokens = pipe.snapshot()
            if tokens is None:
                raise InDoubt
            self._seen[pipe] = tokens
        return self._seen[pipe]


def block_of(ticket: int) -> int:
    """Return the offset in the segment of the block that a ticket names."""
    return ticket >> 32 << SMALLEST
