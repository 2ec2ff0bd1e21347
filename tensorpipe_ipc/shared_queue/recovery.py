"""Recovery: finish or undo what a dead process began.

This file owns the argument why no kill, at any instruction, loses, doubles or blocks a message. The put and get that it
speaks of stand in put_end.py and get_end.py.

A process is dead when its row's lock can be taken (memory/rows.py). The process that takes the lock is the *recovering
process*. It continues the dead process's program where that stopped, and writes into the dead row as the dead process
would have. So the recovering process may itself be killed at any point, and the next one continues. Nothing is inferred
about processes that live or are stopped.

**The steps**, one store or system call a line, in this order::

    put                                              get
    P1  readv(credits) -> C          (bounded)       G1  readv(tickets) -> T
    P2  laps[slot of C] = lap of C   (bounded)       G2  G = next lap of the block's credit      (bounded)
    P3  block WRITING; its header, credit C, content G3  writev(credits) <- G                    (bounded)
    P4  T = (block, generation + 1)                  G4  (the content is copied, or a lease is made; no shared store)
    P5  block QUEUED, generation + 1                 G5  block FREE (copied) or HELD (leased)
    P6  writev(tickets) <- T                         G6  T = 0
    P7  C = 0                        (bounded)       G7  G = 0                                   (bounded)
    P8  T = 0

C, T and G are the three words of an operation (memory/row.py). A *ticket* is (block, generation), a *credit* (slot, lap).
No token is ever given twice. A token is in one place at a time, and moves in one direction only:

    giver's word, in doubt  ->  pipe or log  ->  taker's word  ->  stamped
                                                                   ticket: the block is not QUEUED with it any more
                                                                   credit: laps[slot] >= lap

**Was a token in doubt given?** Its giver is dead and will not give it from now on. If the giver did give it, the token
has passed the first arrow. The recovering process looks at the pipe and its log (``TokenPipe.snapshot``), then at the words
of all takers, then at the stamp. It looks in the direction in which the token moves, so the token cannot slip past it. A
token that left the pipe before that look was in a word by then. A token that left the word before that look had been
stamped by then, because takers stamp before they clear (G5 before G6, P2 before P7). A token that is found anywhere was
given. A token that is found nowhere was not given, and never will be. All words of a dead process are judged by one look at
each pipe and one at the words: a token that was given then has been given ever since, and none is given afterwards.

**A dead put.** T is set if it was killed in P4 to P8:

* The ticket was given: the credit travels with the block. C = 0, then T = 0. A kill between the two leaves T set, and the
  next recovering process finds the ticket given again.
* The ticket was not given: the block becomes WRITING with the generation before the ticket's, as it was before P5. No block
  whose ticket was given can be in that state, whatever other threads did with it since, because generations never go
  down. So the verdict stands even if the recovering process dies. Then T = 0.

T is stored before the block becomes QUEUED. In the other order, a kill between the two would leave a block QUEUED for ever,
with no ticket anywhere.

If C is still set, the recovering process gives the credit back, as a living process would. It stamps the slot as in P2, as
the kill may have come before that step. Then G = (slot, lap + 1), which is in doubt until it is found given; then C = 0;
then G = 0. No other process has the slot before G is given, so the stamp belongs to nobody else. C = 0 with G set means that
the credit was given. The WRITING block becomes FREE in the sweep.

**A dead put of a held block** (``move=True``: a forwarded lease, or a tensor of ``empty``) takes the same steps but for P3.
P3 finds the block HELD by the row, writes header and metadata where no tensor lies, and leaves the state alone.

* Killed before P4: the block is HELD, and the sweep frees it.
* Killed between P4 and P5: T names a block that is HELD with the generation before the ticket's. It was not given, by the
  same argument as for WRITING.
* Killed after P5: this is an ordinary put.

A block that was not given becomes WRITING, then FREE. Its producer is dead, and no child of a fork can read it, because a
process whose row has a fork marker does not move blocks (``handover.py``). A living process makes the block HELD again, with
the same generation, so its lease simply goes on.

**A dead get.** T is set if it was killed in G1 to G6. The message is lost with the consumer (C5), and counted once: the count
shares one word with the ticket that was counted last. If G is not set, G5 has not touched the block (G2 comes before it), so
its header still has the credit: G = the credit's next lap, in doubt until it is found given. Then the block becomes FREE, if
it is still QUEUED with this ticket. Then T = 0, then G = 0. T = 0 with G set means that the credit was given.

A living process whose put failed judges only what it does not know: it has noted whether it took C (``Operation.is_credited``).
And a G that no word says yet was given by nobody.

A token that stands in a dead taker's word and also in the snapshot was not taken. The kernel copies a token before it
removes it, and a copy into a page that has just been swapped out can fail half-way through a batch. The recovering process
clears that word and does nothing else.

A queue between two endpoints has one consumer, which takes G4 before G2: neither reads what the other writes. Where it is dead,
the credit does not come back: the producer counts the messages whose credits are missing as lost.

**A batch** uses runs of words. Up to P6 each step is done for all messages before the next step begins, and one system call
takes or gives all tokens. The argument above holds for each triple of words by itself. In a queue that can be joined, a
tally stands beside the words (shared_queue/tasks.py). A *doorbell* in a dead row's word is rung again, and a shutdown that a
dead process began is completed (shared_queue/shutdown.py).

**Then the sweep** frees what the dead row wrote or held (memory/arena.py). It spares blocks that are named by a word which
this process cannot judge, because it does not have that queue. Such a row is marked, and left to processes that have the queue.
If no process has it (shared_queue/orphans.py), the queue and its tokens are gone, and the doubt with them: the words that name
the queue are cleared, and what waits in it is freed. That is done under the lock that says that no process has the queue, by
one process at a time. So no other program can touch these blocks.

**Memory changes hands meanwhile**, also that of living processes, and addresses are used for other blocks (memory/extents.py).
This never happens to a block that is not FREE, so every block named above stays where it is. Only an outdated word may name
a place that is no longer a block: a ticket that was given and taken, or a destroyed queue. A ticket's block is compared in all
64 bits of its state, generation included. A queue's block is checked with ``Arena.begins``. A process that walks all blocks to
free some of them keeps their extents while it looks (``Arena.walk``). In an extent that is changing hands it frees nothing,
and the row or queue is not done yet.

**What follows.** A dead process's token is in a pipe, in a living process's word, or accounted for. C4 holds because no step
after P6 needs the producer. C2 holds because a ticket is given only after P5. C6 holds because every wait for something that a
process may have taken with it is cut into slices, with ``Attachment.recover_dead`` after each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tensorpipe_ipc.memory.arena import CREDIT, GENERATION_AT, GENERATIONS, HELD, HOLDER, QUEUED, WRITING, Arena
from tensorpipe_ipc.memory.row import GET, LOST, PUT, Operation, Record, row_word
from tensorpipe_ipc.shared_queue import tasks
from tensorpipe_ipc.shared_queue.orphans import Orphans
from tensorpipe_ipc.shared_queue.queue_record import SLOT_BITS, SLOTS
from tensorpipe_ipc.shared_queue.shutdown import Shutdown
from tensorpipe_ipc.shared_queue.token_pipe import DOORBELL, DROP, LAST_DOORBELL
from tensorpipe_ipc.shared_queue.tokens import NEXT_LAP, InDoubt, QueueHandle, Seen, block_of

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

    def finish(self, rows: Sequence[int]) -> set[int]:
        """Finish dead rows, whose locks the caller has. Return those in which nothing is left to do.

        Memory is looked at once for all of them: many may have died at once.
        """
        spared = {row: self._judge(row) for row in rows}
        swept, done = self.arena.sweep(rows, spared) if rows else set[int](), set[int]()
        for row in rows:
            self.rows.leave_unjudged(row, is_so=bool(spared[row]), is_swept=row in swept)
            if row in swept and not spared[row]:
                self.rows.finished(row)
                done.add(row)
        return done

    def _judge(self, row: int) -> set[int]:
        """Finish what was begun in a dead row, and return the blocks of what only others can judge."""
        if self.rows.is_swept(row):  # no longer: what is found not to have been sent is for the sweep
            self.rows.leave_unjudged(row, is_so=True, is_swept=False)
        spared, in_doubt, seen = set[int](), set[int](), dict[int, Seen]()
        for record in self.rows.records(row):
            try:
                self._finish_record(row, record, seen)
            except InDoubt:
                spared.update(block_of(self.words[record.ticket + i]) for i in range(record.size))
                in_doubt.add(self.words[record.purpose_word] >> 8)
        tasks.settle_dead(self.rows, row, in_doubt)  # whatever its children may still read
        return spared

    def _finish_record(self, row: int, record: Record, seen: dict[int, Seen]) -> None:
        words, purpose = self.words, self.words[record.purpose_word]
        number, direction = purpose >> 8, purpose & 0xFF
        busy = self._is_busy(record)
        if not busy and not (record.size == 1 and words[record.tally]):
            return
        if not busy and direction == GET:  # of the get, J4 is all that can be left: no queue is needed for that
            words[record.tally] -= words[record.tally] & 1
        queue = self._queues.get(number)
        if queue is not None:
            if direction in (PUT, GET):
                finish = self.finish_put if direction == PUT else self.finish_get
                seen_here = seen.setdefault(number, Seen(queue))
                for each in record.each():
                    finish(seen_here, row, each)
        elif self._orphans.destroy(number):
            self.clear(record)
        elif busy:
            raise InDoubt

    def is_left_to_others(self, row: int) -> bool:
        """Return whether all that a dead row is yet to be judged for was begun in queues that only other processes have."""
        queues = {self.words[each.purpose_word] >> 8 for each in self.rows.records(row) if self._is_busy(each)}
        return bool(queues) and all(
            number not in self._queues and self._orphans.is_anothers(number) for number in queues
        )

    def _is_busy(self, record: Record) -> bool:
        runs = [slice(first, first + record.size) for first in (record.credit, record.ticket, record.given)]
        return any(any(self.words[run]) for run in runs)

    def clear(self, record: Record | Operation) -> None:
        """Clear the words of an operation whose queue is gone."""
        for first in (record.credit, record.ticket, record.given):
            for word in range(first, first + record.size):
                self.words[word] = 0
        if record.size == 1:
            self.words[record.tally] = 0

    # ---- a put ----

    def finish_put(
        self, seen: Seen, row: int, record: Record, *, frees: bool = False, has_credit: bool = False
    ) -> None:
        """Finish a put of a dead row; or of this process's own, which an exception ended.

        Args:
            seen: of the queue. For all operations of a dead process it may be the same; another one may have died since.
            frees: whether to free a block whose ticket was not given. Else it is WRITING again, and the sweep frees it.
            has_credit: whether the credit is known to have been taken, if its word says one.
        """
        words, queue, ungiven = self.words, seen.queue, 0
        ticket = words[record.ticket]
        if ticket:
            if self._ticket_given(seen, row, ticket):
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
        self._return_credit(seen, record, has_credit)

    def _return_credit(self, seen: Seen, record: Record, has_credit: bool) -> None:
        words, queue, credits = self.words, seen.queue, seen.queue.credits
        credit = words[record.credit]
        if credit == DOORBELL and credits is not None:
            credits.ring_doorbell()
            words[record.credit] = 0
        elif credit and credits is not None:
            if words[record.given]:
                self.give_credit(seen, record.given)
            elif has_credit or credit not in seen.tokens_of(credits):
                # P2, which may not have been done
                words[queue.record.laps + (credit & SLOTS) % queue.record.slots] = credit >> SLOT_BITS
                words[record.given] = credit + NEXT_LAP
                self._give(queue, record.given)  # nobody can have given it before
            words[record.credit] = 0
        words[record.given] = 0

    def _ticket_given(self, seen: Seen, row: int, ticket: int) -> bool:
        word = block_of(ticket) >> 3
        queued = ticket % GENERATIONS << GENERATION_AT | self.rows.holder(row) | QUEUED
        if self.words[word] != queued:
            writing = self._ungiven(row, ticket)
            return self.words[word] not in (writing, writing ^ WRITING ^ HELD)
        is_there = ticket in seen.tokens_of(seen.queue.tickets)
        return is_there or ticket in self._taken(seen, GET) or self.words[word] != queued

    def _ungiven(self, row: int, ticket: int) -> int:
        """Return the state of a block before its ticket was given."""
        return (ticket - 1) % GENERATIONS << GENERATION_AT | self.rows.holder(row) | WRITING

    # ---- a get ----

    def finish_get(self, seen: Seen, row: int, record: Record) -> None:
        """Finish a get of a dead row."""
        words, queue = self.words, seen.queue
        ticket = words[record.ticket]
        if 0 < ticket <= LAST_DOORBELL:
            if ticket == DOORBELL:
                queue.tickets.ring_doorbell()
            else:
                self._shutdown.begin(queue, drop=ticket == DROP)
            words[record.ticket] = 0
        elif ticket and not words[record.given] and ticket in seen.tokens_of(queue.tickets):
            words[record.ticket] = 0
        # Nobody else gets from a pair's queue: there the credit stays away, and the producer finds that this was not taken.
        self.end_get(seen, row, record, returns_credit=not words[queue.record.pair])

    def end_get(
        self, seen: Seen, row: int, record: Record, *, is_lost: bool = True, returns_credit: bool = True
    ) -> None:
        """End the get of a message that nobody receives: of a dead row; or of this process's own, after an exception.

        Args:
            seen: as for ``finish_put``.
            is_lost: whether it counts as lost.
            returns_credit: whether its place is to be given back.
        """
        words, queue = self.words, seen.queue
        ticket = words[record.ticket]
        if ticket:
            word = block_of(ticket) >> 3
            if queue.credits is not None and returns_credit:
                if not words[record.given]:
                    words[record.given] = words[word + CREDIT] + NEXT_LAP & (1 << 64) - 1
                self.give_credit(seen, record.given)
            if is_lost:
                self._count(row, ticket)
            if words[word] >> GENERATION_AT == ticket % GENERATIONS and words[word] & 15 == QUEUED:
                words[word] = words[word] & ~HOLDER
            if queue.record.has_tasks:
                tasks.count_taken(words, record.tally)
        words[record.ticket] = 0
        words[record.given] = 0
        if queue.record.has_tasks:
            words[record.tally] -= words[record.tally] & 1  # J4, with no call since the ticket went

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

    def give_credit(self, seen: Seen, word: int) -> None:
        """Give the credit that stands in a word, unless it was given."""
        credit, queue, credits = self.words[word], seen.queue, seen.queue.credits
        assert credits is not None
        if not (
            credit in seen.tokens_of(credits)
            or credit in self._taken(seen, PUT)
            or self.words[queue.record.laps + (credit & SLOTS) % queue.record.slots] >= credit >> SLOT_BITS
        ):
            self._give(queue, word)

    def _give(self, queue: QueueHandle, word: int) -> None:
        assert queue.credits is not None
        try:
            queue.credits.give([memoryview(self.arena.segment.memory)[8 * word : 8 * word + 8]])
        except BlockingIOError:
            if not self.words[queue.record.pair]:  # else the producer has filled its pipe itself
                raise

    def _taken(self, seen: Seen, direction: int) -> frozenset[int]:
        """Return what stands in all takers' words. The caller has looked at the pipe before."""
        if direction not in seen.taken:
            seen.taken[direction] = frozenset(self._takers_words(seen.queue.number, direction))
        return seen.taken[direction]

    def _takers_words(self, number: int, direction: int) -> Iterator[int]:
        """Yield every take word of one end of a queue, of the living and the dead."""
        for row in self.rows.used():
            for record in self.rows.records(row, number, direction):
                first = record.credit if direction == PUT else record.ticket
                yield from self.words[first : first + record.size]


def _fingerprint(ticket: int) -> int:
    """Return 40 bits made of all of a ticket's: large blocks lie at round places, and begin at generation 0."""
    return ticket * 0x9E3779B97F4A7C15 >> 24 & _FINGERPRINT
