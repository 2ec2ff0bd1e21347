"""Finishing what the dead began: the argument why no kill at any instruction loses, doubles or blocks anything.

A process is dead when its row's lock can be had (memory/rows.py). Whoever gets the lock, the *recovering process*, goes on
with the dead process's program where it stopped, writing into the dead row as that process would have. So it may be
killed at any point itself, and the next one goes on. Nothing is inferred about the living or the stopped.

What each end of a queue does, a store or system call per line, in this order (shared_queue/put_end.py, get_end.py)::

    put                                              get
    P1  readv(credits) -> C          (bounded)       G1  readv(tickets) -> T
    P2  laps[slot of C] = lap of C   (bounded)       G2  G = next lap of the block's credit      (bounded)
    P3  block WRITING; its header, credit C, content G3  writev(credits) <- G                    (bounded)
    P4  T = (block, generation + 1)                  G4  (the content is copied, or a lease is made; no shared store)
    P5  block QUEUED, generation + 1                 G5  block FREE (copied) or HELD (leased)
    P6  writev(tickets) <- T                         G6  T = 0
    P7  C = 0                        (bounded)       G7  G = 0                                   (bounded)
    P8  T = 0

C, T and G are the three words of the operation (memory/row.py). A *ticket* is (block, generation), a *credit* (slot,
lap): no token is ever given twice. It is in one place at a time, and moves on in one direction only:

    giver's word, in doubt  ->  pipe or log  ->  taker's word  ->  stamped
                                                                   ticket: the block is not QUEUED with it any more
                                                                   credit: laps[slot] >= lap

**Was a token in doubt given?** The giver is dead, so it will not be given from now on. If it was, it is beyond the
first arrow. We look at pipe and log (``TokenPipe.snapshot``), then at all takers' words, then at the stamp: in the
direction in which it moves. So it cannot slip past us: had it left the pipe before we looked there, then it was in a
word by then; had it left the word before we looked there, it had been stamped by then (takers stamp before they
clear: G5 before G6, P2 before P7). Found anywhere, it was given. Found nowhere, it was not, and will not be.

**A dead put.** T is set (killed in P4 to P8):

* given: the credit travels with the block. C = 0, then T = 0. Killed between: T is set, and is found given again.
* not given: the block is made WRITING with the generation before the ticket's, as it was before P5. In no block whose
  ticket was given can that be found, whatever other threads did with it since, for generations do not go down. So the
  verdict stands even when the recovering process dies. Then T = 0.

**A dead put of a held block** (``move=True``; a lease forwarded, or a tensor of ``empty``). The steps are the same but
for P3, which finds the block HELD by the row, writes header and metadata where no tensor lies, and leaves the state
alone. Killed before P4 the block is HELD, and free after the sweep. Between P4 and P5 T names a block that is HELD with
the generation before the ticket's: not given, by the same argument as WRITING. After P5 nothing tells it from another
put. Not given, it becomes WRITING and FREE: its producer is dead, and the children of its forks cannot read it, for a
process whose row has a fork marker does not move (``handover.py``). The living make it HELD again, with the same generation,
so the lease simply goes on.

T comes before QUEUED, not after it: killed between, a block would be QUEUED with no ticket anywhere, for ever.

Then, if C is set, the credit goes back, as the living would give it: its slot is stamped as in P2, for it may have been killed
before that; G = (slot, lap + 1), in doubt until found given; C = 0; G = 0. Nobody else has the slot before G is given, so
that stamp is nobody else's. With C = 0 and G set it was given. The WRITING block becomes FREE in the sweep.

**A dead get.** T is set (killed in G1 to G6): the message is lost with the consumer (C5), once: the count and the
ticket counted last share one word. If G is not set, the block was not touched by G5 (G2 comes before), so its header
still has the credit: G = its next lap. G is in doubt until found given. Then the block, if it still is QUEUED with
this ticket, is FREE. T = 0, then G = 0. With T = 0 and G set, the credit was given.

A token in a dead taker's word that is in the snapshot too was not taken: the kernel copies before it removes, and a
copy into a page that has just been swapped out can fail half-way through a batch. The word is cleared, nothing else.

**Many at once** is the same with runs of words: each step is done for all messages before the next, and the system calls
take or give all their tokens together. What is argued above is argued of each triple of words by itself. Where queues can
be joined, a tally stands beside the words: shared_queue/tasks.py.

**A shutdown** is begun by doorbells in the pipe of tickets (``SHUT``; ``DROP`` where what waits is dropped): as many as there
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

**Then the sweep**: what the dead row wrote or held becomes FREE (memory/arena.py). Not the blocks that a word names
which we cannot judge, as we do not have its queue: that row stays unfinished for somebody who has. If nobody has it
(shared_queue/queue_record.py, "Life"), the queue is gone with its tokens, and so is the doubt: words that name it are
cleared, and *destroying* it frees what waits in it and, last, its record. It is done under the lock that says that nobody
has the queue, by one process at a time; so no other program can be at these blocks.

**Memory changes hands** meanwhile, also that of the living, and addresses are used for other blocks: memory/extents.py. Not
where a block is not FREE, so all blocks that are argued of here stay where they are. Only a word that is out of date may name
a place that is no block any more: a ticket that was given and taken, or a queue that is destroyed. Of the first the state is
compared in all its 64 bits, generation included; the second is asked for as a block (``Arena.begins``). Who walks all blocks
to free some keeps their extents while it looks (``Arena._walk``); in one that is changing hands it frees nothing, and the
row or queue is not done yet.

What follows: a token of a dead process is in a pipe, in a living process's hands, or accounted for. C4 holds since
after P6 no step of the producer is needed; C2 since a ticket is given only after P5; C6 since every wait for
something that a process may have taken with it is cut into slices, with ``recover_dead`` after each."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing import context
from typing import Any

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory.arena import (
    CREDIT,
    GENERATION_AT,
    GENERATIONS,
    HELD,
    HOLDER,
    KEPT,
    METADATA,
    QUEUED,
    SMALLEST,
    WRITING,
    Arena,
    Taker,
)
from tensorpipe_ipc.memory.extents import IN_DOUBT
from tensorpipe_ipc.memory.headroom import headroom
from tensorpipe_ipc.memory.leases import Leases
from tensorpipe_ipc.memory.row import GET, LOST, PUT, WALKING, Operation, Record, hazard_word, row_word
from tensorpipe_ipc.memory.segment import GROWN, LOOKS, Segment
from tensorpipe_ipc.shared_queue import tasks
from tensorpipe_ipc.shared_queue.queue_record import SLOT_BITS, SLOTS, TOLD, QueueRecord, number_of
from tensorpipe_ipc.shared_queue.token_pipe import DOORBELL, DROP, LAST_DOORBELL, SHUT, SLICE, TokenPipe

__all__ = ["NEXT_LAP", "Ends", "InDoubt", "Attachment", "block_of", "default_attachment", "snapshot", "attachment_of"]

NEXT_LAP = 1 << SLOT_BITS
_FINGERPRINT = (1 << 40) - 1
_SPARE_DOORBELLS, _MOST_DOORBELLS = 8, 4096  # for those who begin to wait meanwhile; a pipe holds no more
_PATIENCE = 0.5  # seconds
_GLANCE = 0.02  # seconds in which who has what is gathered for an error's text
_LATE = 0.03  # seconds for which a get may outlast its timeout


class Ends:
    """The means to judge a queue's tokens. It goes with the queue."""

    __slots__ = ("__weakref__", "credits", "record", "tickets")

    def __init__(self, tickets: TokenPipe, credits: TokenPipe | None, record: QueueRecord) -> None:
        self.tickets, self.credits, self.record = tickets, credits, record


class InDoubt(Exception):
    """A token cannot be judged now: no scratch pipe to be had, or its queue is not known here."""


class Attachment:
    """Finishes dead rows of one arena, as far as this process has the queues that they used.

    Attributes:
        queues: the ends of each queue that this process has, by number.
        lasts: a context has it, which may trim it and make further queues.
    """

    lasts = False

    def __init__(self, arena: Arena) -> None:
        self.arena, self.words, self.rows = arena, arena.words, arena.rows
        self.leases = Leases(arena)
        self.queues: weakref.WeakValueDictionary[int, Ends] = weakref.WeakValueDictionary()
        self.rows.after_fork(self._forget)
        self._forget()
        _known.setdefault(id(arena.segment), self)

    def _forget(self) -> None:
        self._left: dict[int, list[Operation]] = {}  # by queue that this process has no more: what is on record of it
        self._destroying, self._destroy_again = threading.Lock(), 0.0
        self._looks = -1

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return attachment_of, (self.arena.segment,)

    def attach(self) -> None:
        """Have the arena take a row, if it has none."""
        if self.rows.index < 0:
            self.arena.attach(self.finish)
            if self.rows.incarnation > 1:  # a process died: its queues may be nobody's now
                self.destroy_orphaned_queues()

    def recover_dead(self, *, adopt_extents: bool = False) -> int:
        """Finish every dead row that can be finished. How many were.

        Args:
            adopt_extents: take over their extents, too; for when memory is short.
        """
        count, died, is_done = 0, False, True
        owners = {row for *_, row in self.arena._all_extents()} if adopt_extents else set[int]()
        for row in self.rows.used():
            if row in owners or not self.rows.is_finished(row):
                with self.rows.locked(row) as dead:
                    was_finished = dead and self.rows.is_finished(row)
                    if dead and (was_finished or self.finish(row)):
                        count += 1
                        died = died or not was_finished
                        if row in owners:
                            self.arena.inherit(row)
                    elif dead:
                        is_done = False
        if died:  # its queues may be nobody's now
            self.destroy_orphaned_queues()
        if is_done:
            self.words[LOOKS] = self.words[LOOKS] + 1 & (1 << 32) - 1
        return count

    def recover_dead_in_turn(self, *, begins: bool = False) -> None:
        """Look, unless anybody has looked, and left nothing to do, since this process last asked.

        For waits in slices: what a look costs grows with the number of processes, and of many who wait one is enough.

        Args:
            begins: a wait does, and its first look is due after a slice.
        """
        if not begins and self.words[LOOKS] == self._looks:
            self.recover_dead()
        self._looks = self.words[LOOKS]

    def make_room(self, nbytes: int) -> None:
        """Have free all that can be, so that a message of so many bytes finds room."""
        self.recover_dead(adopt_extents=True)
        now = time.monotonic()
        if now >= self._destroy_again:  # it walks all blocks: a wait for room makes room again and again
            self._destroy_again = now + _PATIENCE
            self.destroy_orphaned_queues()
        self.leases.settle()
        self.arena.collect(nbytes)

    def trim(self) -> int:
        """Give back all memory of the arena that nobody needs now, whoever has it. Bytes."""
        self.attach()
        self.recover_dead()
        self.destroy_orphaned_queues()
        self.leases.settle()
        return self.arena.trim()

    def allocate(self, nbytes: int, taker: Taker) -> int:
        """A block for so many bytes, now. Its state is WRITING, and the taker has it.

        Raises:
            SharedMemoryError: there is no room. The text says who holds what.
        """
        self.attach()
        block = self.arena.allocate(nbytes, taker=taker)
        if not block:
            self.make_room(nbytes)
            block = self.arena.allocate(nbytes, taker=taker, collected=True)
        if not block:
            raise SharedMemoryError(errno.ENOSPC, f"{self.arena.why_no_room(nbytes)}; {self.describe_holders()}")
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

    def finish(self, row: int) -> bool:
        """Finish a dead row, whose lock the caller has. Whether nothing is left to do."""
        spared: set[int] = set()
        for record in self.rows.records(row):
            try:
                self._finish_record(row, record)
            except InDoubt:
                spared.update(block_of(self.words[record.ticket + i]) for i in range(record.size))
        done = self.arena.sweep(row, spared) and not spared
        if done:
            tasks.settle_dead(self.rows, row)
            self.rows.finished(row)
        return done

    def _finish_record(self, row: int, record: Record) -> None:
        words, purpose = self.words, self.words[record.purpose_word]
        queue, direction = purpose >> 8, purpose & 0xFF
        runs = [slice(first, first + record.size) for first in (record.credit, record.ticket, record.given)]
        busy = any(any(words[run]) for run in runs)
        if not busy and not (record.size == 1 and words[record.tally]):
            return
        ends = self.queues.get(queue)
        if ends is not None:
            if direction in (PUT, GET):
                finish = self.finish_put if direction == PUT else self.finish_get
                for each in record.each():
                    finish(ends, queue, row, each)
        elif self.destroy_if_orphaned(queue):
            self._clear(record)
        elif busy:
            raise InDoubt

    def _clear(self, record: Record | Operation) -> None:
        for first in (record.credit, record.ticket, record.given):
            for word in range(first, first + record.size):
                self.words[word] = 0
        if record.size == 1:
            self.words[record.tally] = 0

    # ---- a put ----

    def finish_put(self, ends: Ends, queue: int, row: int, record: Record, *, frees: bool = False) -> None:
        """Also for the living, in their own row, when an exception ended a put.

        Args:
            frees: a block whose ticket was not given is to be free. Else it is WRITING again, and the sweep frees it.
        """
        words, ungiven = self.words, 0
        ticket = words[record.ticket]
        if ticket:
            if self._ticket_given(ends, queue, row, ticket):
                words[record.credit] = 0
                if ends.tickets.spilled():
                    ends.record.set(ends.record.spilled)
                    ends.tickets.ring_doorbell()
            else:
                ungiven = block_of(ticket)
                words[ungiven >> 3] = self._ungiven(row, ticket)
            if ends.record.has_tasks:
                tasks.settle_put(words, record.tally, given=not ungiven)
            words[record.ticket] = 0
            if frees and ungiven:
                words[ungiven >> 3] &= ~HOLDER  # with no call since then: nobody else knows of it
        self._return_credit(ends, queue, record)

    def _return_credit(self, ends: Ends, queue: int, record: Record) -> None:
        words, credits = self.words, ends.credits
        credit = words[record.credit]
        if credit == DOORBELL and credits is not None:
            credits.ring_doorbell()
            words[record.credit] = 0
        elif credit and credits is not None:
            if not words[record.given] and credit not in snapshot(credits):
                words[ends.record.laps + (credit & SLOTS)] = (
                    credit >> SLOT_BITS
                )  # P2: who gave it may be dead, and in doubt
                words[record.given] = credit + NEXT_LAP
            if words[record.given]:
                self.give_credit(ends, queue, record.given)
            words[record.credit] = 0
        words[record.given] = 0

    def _ticket_given(self, ends: Ends, queue: int, row: int, ticket: int) -> bool:
        word = block_of(ticket) >> 3
        queued = ticket % GENERATIONS << GENERATION_AT | self.rows.holder(row) | QUEUED
        if self.words[word] != queued:
            writing = self._ungiven(row, ticket)
            return self.words[word] not in (writing, writing ^ WRITING ^ HELD)
        return ticket in snapshot(ends.tickets) or ticket in self._taken(queue, GET) or self.words[word] != queued

    def _ungiven(self, row: int, ticket: int) -> int:
        """The state of a block before its ticket was given."""
        return (ticket - 1) % GENERATIONS << GENERATION_AT | self.rows.holder(row) | WRITING

    # ---- a get ----

    def finish_get(self, ends: Ends, queue: int, row: int, record: Record) -> None:
        """Also for the living, in their own row, when an exception came between G5 and G6."""
        words = self.words
        ticket = words[record.ticket]
        if 0 < ticket <= LAST_DOORBELL:
            if ticket == DOORBELL:
                ends.tickets.ring_doorbell()
            else:
                self.shut(ends, queue, drop=ticket == DROP)
        elif ticket and (words[record.given] or ticket not in snapshot(ends.tickets)):
            self._lose(ends, queue, row, record)
            if ends.record.has_tasks:
                tasks.count_taken(words, record.tally)
        words[record.ticket] = 0
        words[record.given] = 0
        if ends.record.has_tasks:
            words[record.tally] -= words[record.tally] & 1  # J4, with no call since the ticket went

    def _lose(self, ends: Ends, queue: int, row: int, record: Record) -> None:
        words = self.words
        ticket = words[record.ticket]
        word = block_of(ticket) >> 3
        if ends.credits is not None:
            if not words[record.given]:
                words[record.given] = words[word + CREDIT] + NEXT_LAP & (1 << 64) - 1
            self.give_credit(ends, queue, record.given)
        self._count(row, ticket)
        if words[word] >> GENERATION_AT == ticket % GENERATIONS and words[word] & 15 == QUEUED:
            words[word] = words[word] & ~HOLDER

    def _count(self, row: int, ticket: int) -> None:
        """One more message lost with this row, unless this ticket was the last one counted."""
        words, word, mark = self.words, row_word(row) + LOST, _fingerprint(ticket)
        if words[word] & _FINGERPRINT != mark:
            words[word] = (
                words[word] >> 40
            ) + 1 << 40 | mark  # with no call since the look: threads may lose some, too

    def lost(self) -> int:
        """Count the messages lost since the segment exists: with consumers that had taken them, or by exceptions."""
        return sum(self.words[row_word(row) + LOST] >> 40 for row in self.rows.used())

    # ---- a shutdown ----

    def shut(self, ends: Ends, queue: int, *, drop: bool) -> None:
        """Have a queue be shut down, and all who wait for its tickets woken. Any number of times, by anybody."""
        words, record = self.words, ends.record
        self.wake(ends, queue, drop=drop)
        if drop:
            words[record.dropped] = 1
        record.set(record.shut)
        told = self.wake(ends, queue, drop=drop)
        record.set(record.shut)  # a taker may have been about to clear ``watch``: queue_record.py
        if told:
            words[record.shut] = TOLD

    def wake(self, ends: Ends, queue: int, *, drop: bool = False, again: bool = False) -> bool:
        """Tell all who wait for a queue's tickets that it is shut down: one doorbell for each word that may take one.

        Args:
            again: it was told before. Bells that are there count, as whoever takes one puts it back: they do not pile up.

        Returns:
            Whether the pipe had room for all doorbells.
        """
        rows = self.rows
        waiting = sum(
            record.size for row in rows.used() if rows.is_alive(row) for record in rows.records(row, queue, GET)
        )
        is_dropped = drop or self.words[ends.record.dropped]
        missing = min(_SPARE_DOORBELLS + waiting, _MOST_DOORBELLS) - (ends.tickets.unread() if again else 0)
        return ends.tickets.ring_doorbell(DROP if is_dropped else SHUT, missing)

    def settle_puts(self, queue: int, deadline: float | None = None) -> None:
        """Wait until puts that are about to give their tickets have done so, or have seen that the queue is shut.

        Only those of a process that is stopped, or that hardly gets to run, take longer than ``_PATIENCE``; or than
        ``_LATE`` after the deadline of a get.
        """
        now, pause = time.monotonic(), 0.0001
        until = now + (_PATIENCE if deadline is None else min(_PATIENCE, max(0, deadline - now) + _LATE))
        pending = dict(self._tickets_named(queue))
        while pending and time.monotonic() < until:
            time.sleep(min(pause, max(0, until - time.monotonic())))
            pause = min(2 * pause, SLICE)
            self.recover_dead()
            pending = {word: ticket for word, ticket in pending.items() if self.words[word] == ticket}

    def _tickets_named(self, queue: int) -> Iterator[tuple[int, int]]:
        for row in self.rows.used():
            for record in self.rows.records(row, queue, PUT):
                for word in range(record.ticket, record.ticket + record.size):
                    if self.words[word]:
                        yield word, self.words[word]

    # ---- queues that are gone ----

    def leave(self, queue: int, operations: list[Operation]) -> None:
        """This process has a queue no more. What its operations count goes with the queue."""
        self._left[queue] = operations
        self.destroy_left_queues()
        self._give_back_last()

    def leave_context(self) -> None:
        """No context has it any more."""
        self.lasts = False
        self._give_back_last()

    def _give_back_last(self) -> None:
        """Give back what is free, now and when tensors are let go of, if this process cannot put, get or trim here any more.

        Where nobody has a queue that is to be seen to by whoever had the last one, if there are tensors: its own, or those of
        others that are attached or were forked. And by the one that made the segment, where others still have queues: they
        keep all of it, and may never use it.
        """
        if self.queues or self.lasts or self.rows.index < 0 or not self.words[GROWN]:
            return
        is_maker = self.arena.maker == os.getpid()
        is_kept = bool(self.leases.live or self.leases.has_forked or self._others_live())
        if is_maker or is_kept:
            self.destroy_orphaned_queues()
            others_have_queues = any(self._records())
            if (others_have_queues and is_maker) or (is_kept and not others_have_queues):
                self.rest()

    def _others_live(self) -> bool:
        """Return whether another process is attached, which keeps the segment as long as it has tensors there."""
        rows = self.rows
        return any(rows.is_alive(row) for row in rows.used() if row != rows.index)

    def rest(self) -> None:
        """Give back what lies idle, now and when tensors are let go of, if no queue is taken: nobody minds it then."""
        refs = self.queues.valuerefs()  # at once: other threads add some
        here = [ends for ref in refs if (ends := ref()) is not None]
        if self.words[GROWN] and not any(self.words[ends.record.claimed] for ends in here):
            self.leases.gives_back = True
            self.trim()

    def destroy_left_queues(self) -> None:
        """Destroy what this process had, where nobody has it now."""
        for queue in list(self._left):
            if self.destroy_if_orphaned(queue):
                for operation in self._left.pop(queue, ()):
                    for ticket in self.words[operation.ticket : operation.ticket + operation.size]:
                        self.leases.early.pop(block_of(ticket) >> 3, None)  # a get that failed, and is not made again
                    self._clear(operation)
                    self.rows.retire(operation)

    def destroy_orphaned_queues(self) -> None:
        """Destroy whatever queue nobody has any more: for when there is no room."""
        for block in self._records():
            self.destroy_if_orphaned(number_of(self.arena, block))

    def _records(self) -> Iterator[int]:
        """The blocks of all queues' records."""
        for start, kind, units, _ in self.arena._all_extents():
            yield from self.arena.blocks_that(start, kind, units, 15, (KEPT,))

    def destroy_if_orphaned(self, queue: int) -> bool:
        """Free what waits in a queue, and its record, if nobody has the queue. Whether that was so, now or before.

        Never waits. Other threads of this process, and signal handlers, are kept out: to the kernel they are one holder.
        """
        record = QueueRecord(self.arena, queue)
        if not record.exists():
            return True
        destroying = self._destroying  # a forked child has another
        if self.rows.index < 0 or not destroying.acquire(blocking=False):
            return False
        try:
            with self.rows.alone(record.block) as nobody_has_it:
                return nobody_has_it and self._destroy(record)
        finally:
            destroying.release()

    def _destroy(self, record: QueueRecord) -> bool:
        """Free what waits in a queue, and its record, whose lock is held. Whether that was all."""
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
        for start, kind, units, in_doubt in self.arena._walk(hazard):
            for block in self.arena.blocks_that(start, kind, units, 15, (QUEUED,)):
                word = block >> 3
                if words[word + METADATA] & 0xFFFFFFFF == tag:
                    if in_doubt:
                        done = False
                    else:
                        words[word] &= ~HOLDER
        return done

    # ---- tokens in doubt ----

    def give_credit(self, ends: Ends, queue: int, word: int) -> None:
        """Give the credit that stands in a word, unless it was given."""
        credit, credits = self.words[word], ends.credits
        assert credits is not None
        if not (
            credit in snapshot(credits)
            or credit in self._taken(queue, PUT)
            or self.words[ends.record.laps + (credit & SLOTS)] >= credit >> SLOT_BITS
        ):
            credits.give([memoryview(self.arena.segment.memory)[8 * word : 8 * word + 8]])

    def _taken(self, queue: int, direction: int) -> set[int]:
        return set(self._takers_words(queue, direction))

    def _takers_words(self, queue: int, direction: int) -> Iterator[int]:
        """Every take word of one end of a queue, of the living and the dead."""
        for row in self.rows.used():
            for record in self.rows.records(row, queue, direction):
                first = record.credit if direction == PUT else record.ticket
                yield from self.words[first : first + record.size]


_known: weakref.WeakValueDictionary[int, Attachment] = weakref.WeakValueDictionary()  # by the id of their segments


_default: weakref.WeakValueDictionary[str, Attachment] = weakref.WeakValueDictionary()


def default_attachment() -> Attachment:
    """That of the arena which all queues without a context of ours share. It goes with the last of them.

    Raises:
        SharedMemoryError: it could not be made.
    """
    return _default.get("") or _default.setdefault("", Attachment(Arena(Segment.create())))


def attachment_of(segment: Segment) -> Attachment:
    """The recovering process that this process has for a segment already, if it does: one row for each process."""
    return _known.get(id(segment)) or Attachment(Arena(segment))


def snapshot(pipe: TokenPipe) -> frozenset[int]:
    """The tokens that are in a pipe and its log at this moment."""
    tokens = pipe.snapshot()
    if tokens is None:
        raise InDoubt
    return tokens


def _fingerprint(ticket: int) -> int:
    """40 bits of a ticket's 64, from all of them: large blocks lie at round places, and new ones begin at generation 0."""
    return ticket * 0x9E3779B97F4A7C15 >> 24 & _FINGERPRINT


def block_of(ticket: int) -> int:
    """The block's offset in the segment."""
    return ticket >> 32 << SMALLEST
