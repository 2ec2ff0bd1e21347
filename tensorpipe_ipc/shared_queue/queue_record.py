"""QueueRecord: the facts of one queue that all its processes share, and the lock that says that a process has the queue.

::

    the record, a KEPT block of the arena
    word 8        9           10          11       12          13        14       15         16
    ├─ maxsize ───┼─ watch ───┼─ spilled ─┼─ shut ─┼─ dropped ┼─ tasks ─┼─ pair ─┼─ claimed ─┼─ laps[maxsize]
    one writer:     anybody                            anybody            creator  its lock    its taker

    the queue's number    55 ──────── 32 31 ───────── 0
                          │ generation  │ block >> 9  │
                          └─────────────┴─────────────┘

========  ====================================================================================================
word      meaning if set
========  ====================================================================================================
watch     one of ``spilled``, ``shut``, ``dropped`` is set, and there is reason to look at the log or for doorbells
spilled   the log was ever used (token_pipe.py), or doorbells stand in the pipe for another reason
shut      no more puts; TOLD: and all waiting processes have been told
dropped   no more gets either: waiting messages are dropped
tasks     the queue can be joined; OF_OTHERS: and some process finishes what others took (tasks.py)
pair      the queue lies between two endpoints (for onlookers)
claimed   a connector has taken this queue, which a binder had ready; it holds the lock of the record's second byte
laps      of each slot, the last lap in which its credit was taken
========  ====================================================================================================

The lock of the record's third byte is the turn to take from the spill log.

**When the log is empty again.** While the log holds tokens, takers must look at it, and none may sleep where only the pipe
wakes it. So a giver sets ``watch`` before it appends to the log, and again afterwards, before its put is over. A taker that
finds pipe and log empty, and the queue not shut down, clears ``watch`` and looks at the log once more. If there is something in
it, the taker sets ``watch`` again. If it saw nothing, the append came after that look, and the giver's second store comes after
the clearing. Only a giver that is stopped or killed between append and store leaves a token unwatched, and its put has not
returned. The recovering process sets ``watch`` for the dead. A shutdown sets ``shut`` before ``watch``, and the taker looks at
``shut`` last, too.

A taker that is killed or stopped between its clearing and its look leaves ``watch`` clear. So no wait relies on it alone. Where
the log was ever used (``spilled``), a get waits in slices, and looks at the log in each; whoever takes a doorbell sets
``watch``, if there is a reason; and a put looks at ``shut`` itself.

**The presence lock.** Each process that has the queue has an open file description of the segment that carries a read lock
(OFD) on the record's first byte. The kernel drops that lock with the last descriptor, however the process ends. So a process
that can write-lock the byte knows that the queue is gone, and is alone in destroying it (``Orphans.destroy``). No number is
used twice: the block's generation goes up, so an outdated number is recognised.

A queue that children have, too, has a description of its own, which they inherit or receive (``PresenceLock``). A queue that
one process keeps to itself is locked through the description that carries the process's row (``RowPresenceLock``), which a
forked child closes. Closing such a queue unlocks it, so a process never has it twice (``endpoints.rendezvous``). The process
that destroys a queue takes the lock through a description that is made for it (``Rows.alone``). So the process's own lock
is in its way as the locks of others are. And no queue is made or reached in a record that another thread is destroying.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory.arena import GENERATION_AT, GENERATIONS, KEPT, SMALLEST, Arena
from tensorpipe_ipc.memory.ofd_locks import read_lock
from tensorpipe_ipc.memory.rows import Rows
from tensorpipe_ipc.owned_fd import OwnedFd, handed, reopened

__all__ = [
    "FACTS",
    "OF_OTHERS",
    "SLOTS",
    "SLOT_BITS",
    "TOLD",
    "PresenceLock",
    "QueueRecord",
    "RowPresenceLock",
    "facts_of",
    "number_of",
]

SLOT_BITS = 24  # of a credit, which is (slot, lap)
SLOTS = (1 << SLOT_BITS) - 1
TOLD = 2  # of the word ``shut``
OF_OTHERS = 2  # of the word ``tasks``
_MAXSIZE, _WATCH, _SPILLED, _SHUT, _DROPPED, _TASKS, _PAIR, _CLAIMED, _LAPS = range(8, 17)
FACTS = 8 * _LAPS


class PresenceLock:
    """The descriptor that keeps a queue: inherited by fork, pickled to a child that is being spawned."""

    __slots__ = ("_owned",)

    def __init__(self, owned: OwnedFd | None) -> None:
        self._owned = owned

    @classmethod
    def begin(cls, arena: Arena, block: int) -> PresenceLock | None:
        """Lock the record in a block. None if somebody has it alone.

        Raises:
            SharedMemoryError: no descriptor is left.
        """
        try:
            owned = reopened(arena.segment.descriptor, os.O_RDWR)
        except OSError as failed:
            raise SharedMemoryError(
                failed.errno, f"the segment could not be opened again: {failed.strerror}"
            ) from failed
        return cls(owned) if read_lock(owned.fileno(), block) else None

    def close(self) -> None:
        """This process has the queue no more."""
        if self._owned is not None:
            self._owned.close()

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        assert self._owned is not None
        return _rebuild, (reduction.DupFd(self._owned.fileno()),)


class RowPresenceLock(PresenceLock):
    """The lock that keeps a queue and that no child inherits: its description carries this process's row."""

    __slots__ = ("_block", "_rows")

    def __init__(self, rows: Rows, block: int) -> None:
        super().__init__(None)
        self._rows, self._block = rows, block

    @classmethod
    def begin(cls, arena: Arena, block: int) -> RowPresenceLock | None:
        """See PresenceLock."""
        presence_lock = cls(arena.rows, block)  # first: it lets go of the lock, whatever comes
        return presence_lock if arena.rows.share_lock(block) else None

    def close(self) -> None:
        """See PresenceLock. The lock of the connector that claimed the queue (the second byte) goes, too."""
        if self._block:
            self._rows.unlock(self._block, 2)
            self._block = 0

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else modules are half gone, and the kernel takes it back in a moment
            with contextlib.suppress(OSError, AttributeError):
                self.close()


def _rebuild(duplicate: Any) -> PresenceLock:
    return PresenceLock(handed(duplicate))


class QueueRecord:
    """One queue's record, by its number.

    Attributes:
        block: the record's offset in the segment.
        maxsize: how many messages may be in the queue; 0: any number.
        slots: how many words of laps it has: maxsize, as it was at first. What a hostile end says of others stays in these.
        has_tasks: whether the queue can be joined.
        turn: the byte whose lock is the turn of those who take from the spill log.
        watch, spilled, shut, dropped, tasks, pair, claimed, laps: indexes of these words.
    """

    def __init__(self, arena: Arena, number: int) -> None:
        self.arena, self.words, self.number = arena, arena.words, number
        self.block = (number & 0xFFFFFFFF) << SMALLEST
        word = self.block >> 3
        self.maxsize = self.words[word + _MAXSIZE]
        self.slots = self.maxsize or 1
        self.tasks = word + _TASKS
        self.has_tasks = bool(self.words[self.tasks])
        self.watch, self.spilled, self.shut = word + _WATCH, word + _SPILLED, word + _SHUT
        self.dropped, self.pair, self.laps = word + _DROPPED, word + _PAIR, word + _LAPS
        self.claimed, self.turn = word + _CLAIMED, self.block + 2

    @classmethod
    def create(
        cls, arena: Arena, maxsize: int, tasks: bool, kept_by: type[PresenceLock]
    ) -> tuple[QueueRecord, PresenceLock]:
        """Make a new queue's record, and lock it.

        Raises:
            ValueError: ``maxsize`` is negative or above 16,777,215.
            SharedMemoryError: no memory or no descriptor is left.
        """
        if not 0 <= maxsize <= SLOTS:
            raise ValueError(f"maxsize must be from 0 (no bound) to {SLOTS}, not {maxsize}")
        nbytes = 8 * (_LAPS + maxsize)
        block, presence_lock = _block_and_lock(arena, nbytes, kept_by)
        words, word = arena.words, block >> 3
        words[word + _MAXSIZE : word + _LAPS] = memoryview(bytes(8 * (_LAPS - _MAXSIZE))).cast("Q")
        words[word + _MAXSIZE], words[word + _TASKS] = maxsize, tasks
        words[word + _LAPS : word + _LAPS + maxsize] = memoryview(bytes(8 * maxsize)).cast("Q")
        generation = ((words[word] >> GENERATION_AT) + 1) % GENERATIONS
        words[word] = generation << GENERATION_AT | KEPT
        return cls(arena, number_of(arena, block)), presence_lock

    @classmethod
    def reach(cls, arena: Arena, number: int) -> tuple[QueueRecord, PresenceLock]:
        """Return the record of a queue that another process named, and a presence lock for this process, which has none yet.

        Raises:
            SharedMemoryError: there is no such queue, or not any more; or no descriptor is left.
        """
        block = (number & 0xFFFFFFFF) << SMALLEST
        if block + 8 * _LAPS > arena.segment.size or number >> 56:
            raise SharedMemoryError(errno.EINVAL, f"{number:#x} is no queue's number")
        presence_lock, record = RowPresenceLock.begin(arena, block), cls(arena, number)
        if presence_lock is None or not record.exists():
            raise SharedMemoryError(errno.ENOENT, f"queue {number:#x} is gone")
        return record, presence_lock

    def set(self, word: int) -> None:
        """Set one of the words that are to be watched."""
        self.words[word] = 1
        self.words[self.watch] = 1

    def unwatch(self, is_empty: Callable[[], bool]) -> None:
        """Have put and get look at the pipe alone again, now that the log is empty (see above)."""
        words = self.words
        if not words[self.shut]:
            words[self.watch] = 0
            if not is_empty() or words[self.shut]:
                words[self.watch] = 1

    def narrow(self, maxsize: int) -> None:
        """Have it say another maxsize: so many credits have been left in the queue."""
        self.words[(self.block >> 3) + _MAXSIZE] = self.maxsize = maxsize

    def exists(self) -> bool:
        """Return whether this is still the queue's record. If not, it has been destroyed."""
        state = self.words[self.block >> 3] if self.arena.begins(self.block) else 0
        return state & 15 == KEPT and state >> GENERATION_AT & 0xFFFFFF == self.number >> 32


def number_of(arena: Arena, block: int) -> int:
    """Return the number of the queue whose record lies in a KEPT block."""
    return (arena.words[block >> 3] >> GENERATION_AT & 0xFFFFFF) << 32 | block >> SMALLEST


def facts_of(record: bytes) -> tuple[int, bool, bool, bool]:
    """Of the first ``FACTS`` bytes of a queue's record: maxsize, and whether it was shut down, can be joined, is a pair's."""
    words = memoryview(record).cast("Q")
    return words[_MAXSIZE], bool(words[_SHUT]), bool(words[_TASKS]), bool(words[_PAIR])


def _block_and_lock(arena: Arena, nbytes: int, kept_by: type[PresenceLock]) -> tuple[int, PresenceLock]:
    """Return a block, and the read lock on its first byte.

    Whoever destroyed the queue whose record lay there before may still have the byte's lock, and may be stopped: then another
    block is taken.
    """
    refused = []
    try:
        while True:
            block = arena.allocate(nbytes, force=True)
            if not block:
                arena.collect(nbytes)
                block = arena.allocate(nbytes, force=True)
            if not block:
                raise SharedMemoryError(errno.ENOMEM, f"no memory for a queue's record of {nbytes} bytes")
            refused.append(block)
            presence_lock = kept_by.begin(arena, block)
            if presence_lock is not None:
                refused.pop()
                return block, presence_lock
    finally:
        for block in refused:
            arena.discard(block)
