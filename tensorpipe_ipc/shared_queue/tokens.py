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

__all__ = ["NEXT_LAP", "InDoubt", "QueueHandle", "block_of", "snapshot"]

NEXT_LAP = 1 << SLOT_BITS


class QueueHandle:
    """One queue as this process has it: its number, its record and its pipes. It lives as long as the process has the queue."""

    __slots__ = ("__weakref__", "credits", "number", "record", "tickets")

    def __init__(self, record: QueueRecord, tickets: TokenPipe, credits: TokenPipe | None) -> None:
        self.number, self.record, self.tickets, self.credits = record.number, record, tickets, credits


class InDoubt(Exception):
    """A token cannot be judged now: there is no scratch pipe, or a smaller one, or this process does not have its queue."""


def snapshot(pipe: TokenPipe) -> frozenset[int]:
    """Return the tokens that are in a pipe and its log at this moment.

    Raises:
        InDoubt: there is no descriptor for a scratch pipe, or it is too small for what waits.
    """
    tokens = pipe.snapshot()
    if tokens is None:
        raise InDoubt
    return tokens


def block_of(ticket: int) -> int:
    """Return the offset in the segment of the block that a ticket names."""
    return ticket >> 32 << SMALLEST
