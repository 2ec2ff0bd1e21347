"""Attachment: one process's use of a segment, which all its queues there share.

It has the process's row, leases and blocks in an arena (memory/), and knows the queues that the process has. Waits for
something that a dead process may have taken with it are cut into slices, with ``recover_dead`` after each.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
import weakref
from collections.abc import Collection, Iterable
from multiprocessing import context
from typing import Any

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.headroom import headroom
from tensorpipe_ipc.memory.arena import Arena, Taker
from tensorpipe_ipc.memory.leases import Leases, settle_kept
from tensorpipe_ipc.memory.row import Operation
from tensorpipe_ipc.memory.segment import GROWN, LOOKS, Segment
from tensorpipe_ipc.shared_queue.orphans import Orphans
from tensorpipe_ipc.shared_queue.recovery import Recovery
from tensorpipe_ipc.shared_queue.shutdown import Shutdown
from tensorpipe_ipc.shared_queue.tokens import QueueHandle, block_of

__all__ = ["Attachment", "attachment_of", "default_attachment"]

_PATIENCE = 0.5  # seconds
_AT_ONCE = 64  # rows that one look at memory is for: nobody else can take theirs meanwhile
_GLANCE = 0.02  # seconds in which who has what is gathered for an error's text


class Attachment:
    """One process's use of one arena.

    Attributes:
        queues: those that this process has, by number.
        orphans, shutdown, recovery: what is done to queues that are gone, that are shut down, that a dead process used.
        lasts: whether a context has it, which may trim it and make further queues.
    """

    lasts = False

    def __init__(self, arena: Arena) -> None:
        self.arena, self.words, self.rows = arena, arena.words, arena.rows
        self.leases = Leases(arena)
        self.leases.user = weakref.ref(self)
        self.queues: weakref.WeakValueDictionary[int, QueueHandle] = weakref.WeakValueDictionary()
        self.orphans, self.shutdown = Orphans(arena), Shutdown(self.rows)
        self.recovery = Recovery(arena, self.queues, self.orphans, self.shutdown)
        self.rows.after_fork(self._forget)
        self._forget()
        _known.setdefault(id(arena.segment), self)

    def _forget(self) -> None:
        self._left: dict[int, list[Operation]] = {}  # by queue that this process has no more: what is on record of it
        self._destroy_again = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return attachment_of, (self.arena.segment,)

    def attach(self) -> None:
        """Have the arena take a row, if it has none."""
        if self.rows.index < 0:
            self.arena.attach(lambda row: bool(self.recovery.finish([row])))
            if self.rows.incarnation > 1:  # a process died: its queues may be nobody's now
                self.orphans.destroy_all()

    def recover_dead(self, *, adopt_extents: bool = False) -> bool:
        """Finish every dead row that this process can finish. Return whether all rows were looked at.

        One of which only others can finish the rest is passed over: a try in vain holds its lock, and walks all memory.

        Args:
            adopt_extents: take over their extents, too; for when memory is short.
        """
        if self.rows.is_recovering or self.rows.index < 0:  # another thread is at it; or a handler forked within a wait
            return False
        owners = {row for *_, row in self.arena.all_extents()} if adopt_extents else set[int]()
        rows = (row for row in self.rows.used() if row in owners or not self.rows.is_finished(row))
        is_left = self.recovery.is_left_to_others
        self._recover((row for row in rows if not (self.rows.is_swept(row) and is_left(row))), owners)
        return True

    def recover_in_turn(self, looks: int | None) -> int:
        """In a slice of a wait, finish every dead row, unless another wait has looked since: it costs more with each process.

        Args:
            looks: what this returned in the slice before; None: this is the first.

        Returns:
            The number of looks so far, of all who wait.
        """
        words = self.words
        if looks in (None, words[LOOKS]) and self.recover_dead():
            words[LOOKS] = words[LOOKS] + 1 & (1 << 32) - 1
        return words[LOOKS]

    def _recover_marked(self) -> None:
        """Finish the dead rows of which others could not finish the rest, and this process can. It costs next to nothing."""
        self._recover(row for row in self.rows.unjudged() if not self.recovery.is_left_to_others(row))

    def _recover(self, rows: Iterable[int], owners: Collection[int] = ()) -> None:
        """Finish those rows whose processes are dead."""
        rest = iter(rows)
        while some := list(itertools.islice(rest, _AT_ONCE)):
            with self.rows.locked(some) as dead:
                done = self.recovery.finish([row for row in dead if not self.rows.is_finished(row)])
                for row in dead:
                    if row in owners and self.rows.is_finished(row):
                        self.arena.inherit(row)
            if done:  # their queues may be nobody's now
                self.orphans.destroy_all()

    def mind_idle(self, *, waits: bool = False) -> None:
        """Give back memory that lies idle, after a look for the dead and for queues that nobody has, if that is due.

        Args:
            waits: see ``Arena.mind_idle``. Where another process looks instead, it may be one that can finish less.
        """
        self.arena.mind_idle(self._look_around, waits=waits)
        if waits and self.rows.index >= 0:
            self._recover_marked()

    def _look_around(self) -> None:
        self.recover_dead()
        self.destroy_left_queues()
        self.orphans.destroy_all()  # also those of a process that ended before it had a row

    def make_room(self, nbytes: int) -> None:
        """Free what can be freed, so that a message of ``nbytes`` finds room."""
        self.recover_dead(adopt_extents=True)
        now = time.monotonic()
        if now >= self._destroy_again:  # it walks all blocks: a wait for room makes room again and again
            self._destroy_again = now + _PATIENCE
            self.orphans.destroy_all()
        self.leases.settle()
        settle_kept()
        self.arena.collect(nbytes)

    def trim(self) -> int:
        """Give back all memory of the arena that no process needs now. Return the number of bytes."""
        self.attach()
        before = self.arena.segment.resident()
        self.orphans.destroy_all()
        self._give_back()
        return max(0, before - self.arena.segment.resident())

    def _give_back(self) -> None:
        """Give back what is free. Each look at all queues walks all memory, so there is none but for those of the dead."""
        self.recover_dead()
        self.leases.settle()
        self.arena.trim()

    def allocate(self, nbytes: int, taker: Taker) -> int:
        """Return a block for so many bytes, now. Its state is WRITING, and the taker has it.

        Raises:
            SharedMemoryError: there is no room. The text says who holds what.
        """
        self.attach()
        self.mind_idle()
        block = self.arena.allocate(nbytes, taker=taker)
        if not block:
            self.make_room(nbytes)
            block = self.arena.allocate(nbytes, taker=taker, collected=True)
        if not block and self.trim():  # what the machine leaves may have fallen meanwhile
            block = self.arena.allocate(nbytes, taker=taker, collected=True)
        if not block:
            raise SharedMemoryError(errno.ENOSPC, f"{self.arena.why_no_room(nbytes)}; {self.describe_holders()}")
        return block

    def allocate_if_likely(self, nbytes: int, taker: Taker) -> int:
        """Return a block as ``allocate`` does, but with a look at all memory only where one is due.

        Raises:
            SharedMemoryError: there is no room, or a look is not due.
        """
        self.attach()
        self.mind_idle()
        block = self.arena.allocate(nbytes, taker=taker)
        if not block and self.arena.is_look_due(nbytes):
            began = time.monotonic()
            self.make_room(nbytes)
            looked = time.monotonic() - began
            block = self.arena.allocate(nbytes, taker=taker, collected=True)
            if not block:
                self.arena.note_look(looked)
        if not block:
            raise SharedMemoryError(errno.ENOSPC, self.arena.why_no_room(nbytes))
        return block

    def describe_holders(self) -> str:
        """Return what the arena costs and who has how much of it, for people."""
        arena = self.arena
        found, is_all = arena.some_holders(_GLANCE)
        holders = ", ".join(
            f"{self.rows.describe(row)} has {count} blocks with {nbytes} bytes"
            for row, (count, nbytes) in sorted(found.items())
        )
        return (
            f"the arena costs {arena.segment.resident()} of at most {arena.capacity} bytes, and the machine leaves "
            f"{headroom()}; {holders or 'nobody holds a block'}{'' if is_all else ', of those that were looked at'}"
        )

    def leave(self, queue: int, operations: list[Operation]) -> None:
        """Note that this process has a queue no more. What its operations count goes with the queue."""
        self._left[queue] = operations
        self.destroy_left_queues()
        self._give_back_last()

    def enter_context(self) -> None:
        """Note that a context has the attachment."""
        self.lasts, self.leases.gives_back = True, False

    def leave_context(self) -> None:
        """Note that no context has the attachment any more."""
        self.lasts = False
        self._give_back_last()

    def _give_back_last(self) -> None:
        """Give back free memory, now and when tensors are let go, if this process cannot put, get or trim here any more.

        If no process has a queue, the process that had the last one does so while there are tensors: its own, or those of
        others that are attached or were forked. If others still have queues, the process that made the segment does so: they
        keep all of the segment, and may never use it.
        """
        process = os.getpid()
        if self.queues or self.lasts or self.rows.index < 0 or self.rows.process != process or not self.words[GROWN]:
            return
        is_maker = self.arena.maker == process
        is_kept = bool(self.leases.live or self.leases.has_forked or self._others_live())
        if is_maker or is_kept:
            others_have_queues = self.orphans.destroy_all()
            if (others_have_queues and is_maker) or (is_kept and not others_have_queues):
                self.rest()

    def _others_live(self) -> bool:
        """Return whether another process is attached, which keeps the segment as long as it has tensors there."""
        rows = self.rows
        return any(rows.is_alive(row) for row in rows.used() if row != rows.index)

    def rest(self) -> None:
        """Give back idle memory, now and when tensors are let go, if no queue is claimed: then no process would do so later."""
        if self.words[GROWN] and not any(self.words[queue.record.claimed] for queue in self.handles()):
            self.leases.gives_back = True
            self._give_back()

    def handles(self) -> list[QueueHandle]:
        """Return what ``queues`` has now, while other threads change it."""
        return [handle for ref in self.queues.valuerefs() if (handle := ref()) is not None]

    def destroy_left_queues(self) -> None:
        """Destroy the queues that this process had, if no process has them now."""
        for queue in list(self._left):
            if self.orphans.destroy(queue):
                for operation in self._left.pop(queue, ()):
                    for ticket in self.words[operation.ticket : operation.ticket + operation.size]:
                        self.leases.early.pop(block_of(ticket) >> 3, None)  # a get that failed, and is not made again
                    self.recovery.clear(operation)
                    self.rows.retire(operation)


_known: weakref.WeakValueDictionary[int, Attachment] = weakref.WeakValueDictionary()  # by the id of their segments


_default: weakref.WeakValueDictionary[str, Attachment] = weakref.WeakValueDictionary()


def default_attachment(method: str = "") -> Attachment:
    """Return the attachment to an arena that many queues share. It goes with the last queue, context and tensor there.

    So a program that makes a queue for each job, and keeps results, has one arena, and not one for each job.

    Args:
        method: the start method of whose context the queues are; "": those without a context of this package.

    Raises:
        SharedMemoryError: it could not be made.
    """
    return _default.get(method) or _default.setdefault(method, Attachment(Arena(Segment.create())))


def attachment_of(segment: Segment) -> Attachment:
    """Return this process's attachment to a segment: the one that it has, or a new one. A process has one row there."""
    return _known.get(id(segment)) or Attachment(Arena(segment))
