"""Orphans: queues that no process has any more. What waits in them is freed, and last their record.

Each process that has a queue has a read lock on its record (queue_record.py). A process that gets the write lock knows that
the queue is gone, and is alone in destroying it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorpipe_ipc.memory.arena import HOLDER, KEPT, METADATA, QUEUED, Arena
from tensorpipe_ipc.memory.extents import IN_DOUBT
from tensorpipe_ipc.memory.row import WALKING, hazard_word
from tensorpipe_ipc.shared_queue.queue_record import QueueRecord, number_of

__all__ = ["Orphans"]


class Orphans:
    """Destroy the queues of one arena that no process has."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.words, self.rows = arena, arena.words, arena.rows
        self.rows.after_fork(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._is_destroying = False

    def destroy_all(self) -> bool:
        """Destroy every queue that no process has any more. Return whether there are others."""
        are_gone = [self.destroy(number_of(self.arena, block)) for block in self.records()]
        return not all(are_gone)

    def records(self) -> Iterator[int]:
        """Yield the block of each queue's record."""
        for start, kind, units in self.arena.unleased():
            yield from self.arena.blocks_that(start, kind, units, 15, (KEPT,))

    def is_anothers(self, number: int) -> bool:
        """Return whether another process has a queue that this one has not, or is just destroying it."""
        record = QueueRecord(self.arena, number)
        return record.exists() and self.rows.is_locked(record.block)

    def destroy(self, number: int) -> bool:
        """Free what waits in a queue, and its record, if no process has the queue.

        It never waits. It keeps out other threads of this process, and signal handlers: to the kernel they are one holder.

        Returns:
            Whether the queue is gone, now or before.
        """
        record = QueueRecord(self.arena, number)
        if not record.exists():
            return True
        if self.rows.index < 0 or self._is_destroying:
            return False
        self._is_destroying = True  # with no call since the look: no other thread and no handler comes in between
        try:
            with self.rows.alone(record.block) as nobody_has_it:
                return nobody_has_it and self._destroy(record)
        finally:
            self._is_destroying = False

    def _destroy(self, record: QueueRecord) -> bool:
        """Free what waits in a queue, and its record, whose lock is held. Return whether that was all."""
        words, hazard = self.words, hazard_word(self.rows.index, WALKING)
        with self.arena.staying(record.block, hazard) as word:
            if not record.exists():
                return True
            if word & IN_DOUBT:
                return False
        done = self._free_queued(record.number & 0xFFFFFFFF, hazard)
        if done:
            words[record.block >> 3] &= ~HOLDER  # its extent is not given up before: the record is KEPT
        return done

    def _free_queued(self, tag: int, hazard: int) -> bool:
        words, done = self.words, True
        for start, kind, units, in_doubt in self.arena.walk(hazard):
            for block in self.arena.blocks_that(start, kind, units, 15, (QUEUED,)):
                word = block >> 3
                if words[word + METADATA] & 0xFFFFFFFF == tag:
                    if in_doubt:
                        done = False
                    else:
                        words[word] &= ~HOLDER
        return done
