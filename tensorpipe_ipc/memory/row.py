"""One row: who its process is, and what that is doing with which queue.

::

    one row, in 64-bit words
    0             16               2000                 9680                  21968                  29904    30416    32402
    ├─ identity ──┼─ purpose[1984] ┼─ 1920 × 4 words ───┼─ 64 × 3 × 64 words ─┼─ 1984 × 4 words ─────┼─ [512] ┼─ 1986 ─┤
      incarnation    of each           single operations:    batch operations:     counters of each       answers  hazards
      pid, start     operation         credit ticket given   credit[64]            operation: messages
      lost, untracked                tally                 ticket[64] given[64]  nbytes waits µs waited

What a process is doing with a queue is on record in an *operation*: three words, or three runs of 64
for a batch. A token that a process takes or gives stands in such a word before the kernel sees it, or is put there by
the kernel itself: see shared_queue/shared_memory.py. ``purpose`` says which queue the operation belongs to and whether
it is a put or a get, and is stored before the words are first used. Operations are kept for reuse in plain Python
lists, from which threads and re-entering signal handlers take one each. A single operation also has a *tally* of what
it did, for queues that can be joined (shared_queue/tasks.py). A record whose tally is not zero is left to its queue.
*Answers* say to whom of those who offer device blocks what: see on_device.py. *Untracked* is 1 once a child was forked
for which no descriptor was left: rows.py. *Unjudged* is not 0 once its process was found dead, and something was begun
there that only others can judge: rows.py. *Hazards* are memory/extents.py's: one for each operation, and two more.
*Reserved* is memory that the process is about to have (arena.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tensorpipe_ipc.memory.segment import Segment

__all__ = [
    "ANSWERS",
    "BATCH",
    "BATCHES",
    "BYTES",
    "DONE",
    "GET",
    "INCARNATION",
    "LOST",
    "MAX_ROWS",
    "MESSAGES",
    "MICROSECONDS",
    "NAMESPACE",
    "PID",
    "PURPOSES",
    "PUT",
    "ROWS_END",
    "ROW_WORDS",
    "SINGLES",
    "STARTED",
    "SWEPT",
    "UNJUDGED",
    "UNSWEPT",
    "UNTRACKED",
    "WAITS",
    "FORK_MARKERS",
    "ALLOCATING",
    "HAZARDS",
    "RESERVED",
    "SETTLED",
    "WALKING",
    "Operation",
    "Record",
    "answer_word",
    "clear_counters",
    "counters_word",
    "hazard_word",
    "record_of",
    "row_byte",
    "row_word",
]

MAX_ROWS = 512  # processes attached at one time
_ROWS_START = 1 << 18
_ROW_BYTES = 1 << 18
ROWS_END = _ROWS_START + MAX_ROWS * _ROW_BYTES
ROW_WORDS = _ROW_BYTES // 8

# words of a row
INCARNATION, PID, STARTED, NAMESPACE, LOST, UNTRACKED, UNJUDGED = range(7)
SWEPT, UNSWEPT = 1, 2  # of UNJUDGED: whether all else that the dead process had is free
FORK_MARKERS = 1 << 16  # forks of a process that are told apart: a lock for each, on the bytes after the row's first
RESERVED = 8
PURPOSES = 16
SINGLES = 1920  # operations under way at once: one for each thread, for each end of each queue it uses
BATCHES = 64
BATCH = 64  # tokens in one batch: see "Capacity" in shared_queue/token_pipe.py
_SINGLES_AT = PURPOSES + SINGLES + BATCHES
_BATCHES_AT = _SINGLES_AT + 4 * SINGLES
_COUNTERS_AT = _BATCHES_AT + 3 * BATCH * BATCHES
_ANSWERS_AT = _COUNTERS_AT + 4 * (SINGLES + BATCHES)
ANSWERS = 512
_HAZARDS_AT = _ANSWERS_AT + ANSWERS
ALLOCATING, WALKING = SINGLES + BATCHES, SINGLES + BATCHES + 1  # hazards that belong to no operation
HAZARDS = WALKING + 1
MESSAGES, BYTES, WAITS, MICROSECONDS = range(4)  # the counters of an operation

PUT, GET, DONE, SETTLED = 1, 2, 3, 4  # the low byte of a purpose; the queue's number stands above it


class Operation:
    """Three words (or runs of words) in one's own row, with the views that system calls fill and read.

    Attributes:
        credit, ticket, given: index of the (first) word for a credit taken, a ticket taken or given, a credit given.
        tally: index of the word that counts; of single operations.
        tally_before: what it was when this process took the operation over.
        counters: index of the first of the four words that tell what this process did with it.
        hazard: index of the word that names the extent which it takes a block from.
        indices: ``credit``, ``ticket``, ``given``, ``counters`` and ``hazard``.
        credit_buffers, ticket_buffers, given_buffers: the same for ``os.readv`` and ``os.writev``.
        block: of a put, the one that it has just taken, and that is nowhere else on record; 0: none.
        blocks: of a batch, those that were filled, and that its words do not name yet.
        waiting: of a get, how many of its tickets were set aside and are not served yet.
        is_credited: as far as this process has noted: of a get, whether the places of all that it took were given back; of a
            put, whether it has taken the places that its words say.
    """

    __slots__ = (
        "block",
        "blocks",
        "counters",
        "credit",
        "credit_buffers",
        "given",
        "given_buffers",
        "hazard",
        "indices",
        "is_credited",
        "purpose",
        "size",
        "tally",
        "tally_before",
        "ticket",
        "ticket_buffers",
        "waiting",
    )

    def __init__(self, segment: Segment, record: Record) -> None:
        self.purpose, self.size, self.tally = record.purpose_word, record.size, record.tally
        self.credit, self.ticket, self.given = record.credit, record.ticket, record.given
        self.tally_before = self.block = self.waiting = 0
        self.blocks: list[int] = []
        self.is_credited = False
        self.counters, self.hazard = record.counters, record.hazard
        self.indices = self.credit, self.ticket, self.given, self.counters, self.hazard
        octets = memoryview(segment.memory)
        self.credit_buffers, self.ticket_buffers, self.given_buffers = (
            [octets[8 * word : 8 * (word + record.size)]] for word in (self.credit, self.ticket, self.given)
        )


class Record(NamedTuple):
    """The places of an operation's words, in anybody's row."""

    purpose_word: int
    size: int  # how many tokens: 1 or BATCH
    credit: int
    ticket: int
    given: int
    tally: int  # of a single operation
    counters: int = 0  # for onlookers
    hazard: int = 0

    def each(self) -> Iterator[Record]:
        """A batch as so many single ones."""
        purpose_word, size, credit, ticket, given, tally, *_ = self
        if size == 1:
            yield self
        else:
            for i in range(size):
                yield Record(purpose_word, 1, credit + i, ticket + i, given + i, tally)


def row_word(row: int) -> int:
    """Index of a row's first word."""
    return _ROWS_START // 8 + row * ROW_WORDS


def row_byte(row: int) -> int:
    """Return the byte whose lock says that a row's process lives."""
    return _ROWS_START + row * _ROW_BYTES


def counters_word(row: int, number: int) -> int:
    """Index of the first of the four counters of a row's operation."""
    return row_word(row) + _COUNTERS_AT + 4 * number


def answer_word(row: int, token: int) -> int:
    """Index of the word in which a row answers who goes by a token. Two may share one; then each is asked again."""
    return row_word(row) + _ANSWERS_AT + token % ANSWERS


def hazard_word(row: int, number: int) -> int:
    """Index of one of a row's hazards: that of an operation, by its number, ``ALLOCATING`` or ``WALKING``."""
    return row_word(row) + _HAZARDS_AT + number


def record_of(row: int, number: int) -> Record:
    """Return the record of a row's operation, by its number: the single ones are first."""
    base = row_word(row)
    if number < SINGLES:
        size, first = 1, base + _SINGLES_AT + 4 * number
    else:
        size, first = BATCH, base + _BATCHES_AT + 3 * BATCH * (number - SINGLES)
    tally = first + 3 if size == 1 else 0
    return Record(
        base + PURPOSES + number,
        size,
        first,
        first + size,
        first + 2 * size,
        tally,
        counters_word(row, number),
        hazard_word(row, number),
    )


def clear_counters(words: memoryview, first: int) -> None:
    """Begin to count anew."""
    for word in range(first, first + 4):
        words[word] = 0
