"""Recovery: finish or undo what a dead process began. The argument why no kill loses, doubles or blocks anything.

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

A *doorbell* in a dead row's word is rung again, and a shutdown that a dead process began is completed (``shutdown``).

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

from collections.abc import Iterator, Mapping

from tensorpipe_ipc.memory.arena import CREDIT, GENERATION_AT, GENERATIONS, HELD, HOLDER, QUEUED, WRITING, Arena
from tensorpipe_ipc.memory.row import GET, LOST, PUT, Operation, Record, row_word
from tensorpipe_ipc.shared_queue import tasks
from tensorpipe_ipc.shared_queue.orphans import Orphans
from tensorpipe_ipc.shared_queue.queue_record import SLOT_BITS, SLOTS
from tensorpipe_ipc.shared_queue.shutdown import Shutdown
from tensorpipe_ipc.shared_queue.token_pipe import DOORBELL, DROP, LAST_DOORBELL
from tensorpipe_ipc.shared_queue.tokens import NEXT_LAP, InDoubt, QueueHandle, block_of, snapshot

__all__ = ["Recovery"]

_FINGERPRINT = (1 << 40) - 1


class Recovery:
    """Finish the rows of dead processes, as far as this process has the queues that they used."""

    def __init__(self, arena: Arena, queues: Mapping[int, QueueHandle], orphans: Orphans, shutdown: Shutdown) -> None:
        """
        Args:
            queues: those that this process has, by number; as they come and go.
        """
        self.arena, self.words, self.rows = arena, arena.words, arena.rows
        self._queues, self._orphans, self._shutdown = queues, orphans, shutdown

    def finish(self, row: int) -> bool:
        """Finish a dead row, whose lock the caller has. Return whether nothing is left to do."""
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
        number, direction = purpose >> 8, purpose & 0xFF
        runs = [slice(first, first + record.size) for first in (record.credit, record.ticket, record.given)]
        busy = any(any(words[run]) for run in runs)
        if not busy and not (record.size == 1 and words[record.tally]):
            return
        queue = self._queues.get(number)
        if queue is not None:
            if direction in (PUT, GET):
                finish = self.finish_put if direction == PUT else self.finish_get
                for each in record.each():
                    finish(queue, row, each)
        elif self._orphans.destroy(number):
            self.clear(record)
        elif busy:
            raise InDoubt

    def clear(self, record: Record | Operation) -> None:
        """Clear the words of an operation whose queue is gone."""
        for first in (record.credit, record.ticket, record.given):
            for word in range(first, first + record.size):
                self.words[word] = 0
        if record.size == 1:
            self.words[record.tally] = 0

    # ---- a put ----

    def finish_put(self, queue: QueueHandle, row: int, record: Record, *, frees: bool = False) -> None:
        """Finish a put of a dead row; or of this process's own, which an exception ended.

        Args:
            frees: whether to free a block whose ticket was not given. Else it is WRITING again, and the sweep frees it.
        """
        words, ungiven = self.words, 0
        ticket = words[record.ticket]
        if ticket:
            if self._ticket_given(queue, row, ticket):
                words[record.credit] = 0
                if queue.tickets.spilled():
                    queue.record.set(queue.record.spilled)
                    queue.tickets.ring_doorbell()
            else:
                ungiven = block_of(ticket)
                words[ungiven >> 3] = self._ungiven(row, ticket)
            if queue.record.has_tasks:
                tasks.settle_put(words, record.tally, given=not ungiven)
            words[record.ticket] = 0
            if frees and ungiven:
                words[ungiven >> 3] &= ~HOLDER  # with no call since then: nobody else knows of it
        self._return_credit(queue, record)

    def _return_credit(self, queue: QueueHandle, record: Record) -> None:
        words, credits = self.words, queue.credits
        credit = words[record.credit]
        if credit == DOORBELL and credits is not None:
            credits.ring_doorbell()
            words[record.credit] = 0
        elif credit and credits is not None:
            if not words[record.given] and credit not in snapshot(credits):
                # P2, which may not have been done
                words[queue.record.laps + (credit & SLOTS)] = credit >> SLOT_BITS
                words[record.given] = credit + NEXT_LAP
            if words[record.given]:
                self.give_credit(queue, record.given)
            words[record.credit] = 0
        words[record.given] = 0

    def _ticket_given(self, queue: QueueHandle, row: int, ticket: int) -> bool:
        word = block_of(ticket) >> 3
        queued = ticket % GENERATIONS << GENERATION_AT | self.rows.holder(row) | QUEUED
        if self.words[word] != queued:
            writing = self._ungiven(row, ticket)
            return self.words[word] not in (writing, writing ^ WRITING ^ HELD)
        return (
            ticket in snapshot(queue.tickets) or ticket in self._taken(queue.number, GET) or self.words[word] != queued
        )

    def _ungiven(self, row: int, ticket: int) -> int:
        """Return the state of a block before its ticket was given."""
        return (ticket - 1) % GENERATIONS << GENERATION_AT | self.rows.holder(row) | WRITING

    # ---- a get ----

    def finish_get(self, queue: QueueHandle, row: int, record: Record) -> None:
        """Finish a get of a dead row; or of this process's own, which an exception ended between G5 and G6."""
        words = self.words
        ticket = words[record.ticket]
        if 0 < ticket <= LAST_DOORBELL:
            if ticket == DOORBELL:
                queue.tickets.ring_doorbell()
            else:
                self._shutdown.begin(queue, drop=ticket == DROP)
        elif ticket and (words[record.given] or ticket not in snapshot(queue.tickets)):
            self._lose(queue, row, record)
            if queue.record.has_tasks:
                tasks.count_taken(words, record.tally)
        words[record.ticket] = 0
        words[record.given] = 0
        if queue.record.has_tasks:
            words[record.tally] -= words[record.tally] & 1  # J4, with no call since the ticket went

    def _lose(self, queue: QueueHandle, row: int, record: Record) -> None:
        words = self.words
        ticket = words[record.ticket]
        word = block_of(ticket) >> 3
        if queue.credits is not None:
            if not words[record.given]:
                words[record.given] = words[word + CREDIT] + NEXT_LAP & (1 << 64) - 1
            self.give_credit(queue, record.given)
        self._count(row, ticket)
        if words[word] >> GENERATION_AT == ticket % GENERATIONS and words[word] & 15 == QUEUED:
            words[word] = words[word] & ~HOLDER

    def _count(self, row: int, ticket: int) -> None:
        """Count one more message as lost with this row, unless this ticket was the last one counted."""
        words, word, mark = self.words, row_word(row) + LOST, _fingerprint(ticket)
        if words[word] & _FINGERPRINT != mark:
            # With no call since the look: other threads may lose some, too.
            words[word] = (words[word] >> 40) + 1 << 40 | mark

    def lost(self) -> int:
        """Count the messages lost since the segment exists: with consumers that had taken them, or by exceptions."""
        return sum(self.words[row_word(row) + LOST] >> 40 for row in self.rows.used())

    # ---- tokens in doubt ----

    def give_credit(self, queue: QueueHandle, word: int) -> None:
        """Give the credit that stands in a word, unless it was given."""
        credit, credits = self.words[word], queue.credits
        assert credits is not None
        if not (
            credit in snapshot(credits)
            or credit in self._taken(queue.number, PUT)
            or self.words[queue.record.laps + (credit & SLOTS)] >= credit >> SLOT_BITS
        ):
            credits.give([memoryview(self.arena.segment.memory)[8 * word : 8 * word + 8]])

    def _taken(self, number: int, direction: int) -> set[int]:
        return set(self._takers_words(number, direction))

    def _takers_words(self, number: int, direction: int) -> Iterator[int]:
        """Yield every take word of one end of a queue, of the living and the dead."""
        for row in self.rows.used():
            for record in self.rows.records(row, number, direction):
                first = record.credit if direction == PUT else record.ticket
                yield from self.words[first : first + record.size]


def _fingerprint(ticket: int) -> int:
    """Return 40 bits made of all of a ticket's: large blocks lie at round places, and begin at generation 0."""
    return ticket * 0x9E3779B97F4A7C15 >> 24 & _FINGERPRINT
