"""The end that puts: credit -> block filled -> QUEUED -> ticket. Its steps, P1 to P8, are numbered in recovery.py.

An exception (a signal handler's, at any point) leaves the operation as death would, and the process finishes it itself,
as the recovering process would: ``_finish``. See open_queue.py.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Protocol

import numpy as np

from tensorpipe_ipc.errors import Full, SharedMemoryError, ShutDown
from tensorpipe_ipc.headroom import headroom
from tensorpipe_ipc.memory.arena import (
    CREDIT,
    FORWARDED,
    GENERATION_AT,
    GENERATIONS,
    HEADER,
    HOLDER,
    METADATA,
    METADATA_AT,
    NBYTES,
    PAYLOAD_AT,
    QUICK,
    SMALLEST,
    WRITTEN,
    Taker,
    size_class_of,
)
from tensorpipe_ipc.memory.leases import Handover, keeping
from tensorpipe_ipc.memory.row import BATCH, MICROSECONDS, PUT, WAITS, Operation, Record
from tensorpipe_ipc.memory.segment import LOOKS, PAGE_LOCKED
from tensorpipe_ipc.shared_queue import tasks
from tensorpipe_ipc.shared_queue.open_queue import IN_A_FORK, OpenQueue
from tensorpipe_ipc.shared_queue.queue_record import SLOT_BITS, SLOTS
from tensorpipe_ipc.shared_queue.token_pipe import DOORBELL, SLICE, Buffers, TokenPipe
from tensorpipe_ipc.shared_queue.tokens import NEXT_LAP, Seen

__all__ = ["Copy", "Payload", "PutEnd"]

_SMALL_BEYOND = 1 << 19  # bytes, by blocks, of equal messages that one queue may have beyond the capacity
_LOOKS = 4096  # at own spilled tickets, before one put: they take some ms


class Payload(Protocol):
    """The bytes of a message, as put takes them."""

    nbytes: int

    def write_into(self, place: memoryview) -> None:
        """Write all of them. ``place`` is 64-byte aligned and has exactly ``nbytes``."""


class Copy:
    """A payload's bytes in memory of their own: what it was made of may change."""

    def __init__(self, payload: Payload) -> None:
        self.nbytes = payload.nbytes
        memory = np.empty(
            self.nbytes + HEADER, np.uint8
        )  # torch may fill what it makes, by threads that a child has not
        start = -memory.ctypes.data % HEADER
        self._place = memory[start : start + self.nbytes].data
        payload.write_into(self._place)

    def write_into(self, place: memoryview) -> None:
        """See Payload."""
        place[:] = self._place


def _nothing() -> None:
    """See ``PutEnd.while_waiting``."""


class PutEnd:
    """A producer's side of a queue.

    Attributes:
        waits, seconds_waited: of this process's puts, for room.
        beyond: how many messages of any size this process lets wait in the queue before it puts none beyond the capacity.
        names_holders: whether Full says who holds what, but for want of a place to a put that does not wait.
        while_waiting: is called again and again as long as a put waits for memory.
        singles, batches: spare operations. The compiled path takes them, too.
        backlog: own tickets in the spill log.
    """

    beyond = 1
    names_holders = True
    while_waiting: Callable[[], object] = staticmethod(_nothing)

    def __init__(self, queue: OpenQueue) -> None:
        self._queue, self.attachment, self.arena, self.rows = queue, queue.attachment, queue.arena, queue.rows
        self.words, self.memory, self._octets = queue.words, queue.memory, queue.octets
        self.tickets, self.credits, self.record = queue.tickets, queue.credits, queue.record
        self._watch, self._shut = self.record.watch, self.record.shut
        self._laps, self._slots = self.record.laps, self.record.slots
        self._has_tasks = self.record.has_tasks
        self._tag, self._tickets_fd = queue.number & 0xFFFFFFFF, queue.tickets.fd
        self.rows.after_fork(self._forget)
        self._forget()

    def _forget(self) -> None:
        self.singles, self.batches = list[Operation](), list[Operation]()  # spare ones
        self._spare = {1: self.singles, BATCH: self.batches}
        self._handovers: dict[int, Handover] = {}  # by the word of the operation that puts a held block
        self.backlog: deque[int] = deque()  # own tickets in the spill log
        self.waits, self.seconds_waited = 0, 0.0

    def put(self, payload: Payload, metadata: bytes = b"", timeout: float | None = None) -> None:
        """Copy a message into shared memory and queue it. Once this returns, it survives this process.

        Args:
            payload: read before this returns.
            metadata: a few bytes that travel before it.
            timeout: seconds to wait for room; None: for ever; 0: not at all.

        Raises:
            Full: there was no room in time. The text says who holds what.
            SharedMemoryError: the message is larger than the arena's capacity, or the machine has no memory for it.
            ShutDown: the queue was shut down, before or while this waited. Nothing was put.
        """
        queue = self._queue
        if queue.unfinished or keeping:
            queue.take_up()
        if self.words[self._shut]:  # before a copy is made
            self._refuse_if_shut()
        try:
            operation = self.singles[-1]
            del self.singles[-1]
        except IndexError:
            operation = queue.operation(PUT)
        process = queue.process
        try:
            words, credit = self.words, 0
            deadline = None if timeout is None else monotonic() + timeout
            if self.credits is not None:
                self._take_credits(operation, 1, deadline)  # P1, P2
                credit = words[operation.credit]
            nbytes = payload.nbytes
            room = (len(metadata) + 63 & -64) + nbytes
            size_class = size_class_of(room)
            block = self._block(size_class, room, deadline, operation)
            self._fill(block, credit, payload, metadata)  # P3
            word = block >> 3
            generation = ((words[word] >> GENERATION_AT) + 1) % GENERATIONS
            words[operation.ticket] = block >> SMALLEST << 32 | generation  # P4
            operation.block = 0  # from here on the word says what is to be done
            self._send(operation, word, generation)
        except BaseException:
            if process == queue.process:  # else of a fork within: what it was about is the parent's to do
                queue.unfinished += ([self._finish, operation],)  # before any call
                queue.take_up()
            raise
        words[operation.counters] += 1
        words[operation.counters + 1] += nbytes
        self.singles.append(operation)

    def send_taken(self, taken: list[Operation], size: tuple[int, int]) -> None:
        """Go on with a put of the compiled path from P4 on: there is a log, or the pipe is full, or the queue is shut down.

        Args:
            taken: the operation; it is in here until this sees to it.
            size: how many messages it has, and the bytes of their payloads.

        Raises:
            ShutDown: as ``put`` does.
        """
        count, nbytes = size
        operation, queue, words, process = taken[0], self._queue, self.words, self._queue.process
        if operation not in queue.operations:
            raise RuntimeError(IN_A_FORK)
        operation.is_credited = self.credits is not None  # it has taken what it needs, for all its messages
        try:
            del taken[0]
            self._send_many(operation, words[operation.ticket : operation.ticket + count].tolist())
        except BaseException:
            if process == queue.process:  # as in put
                queue.unfinished += ([self._finish, operation],)  # before any call
                queue.take_up()
            raise
        words[operation.counters] += count
        words[operation.counters + 1] += nbytes
        self._spare[operation.size].append(operation)

    def finish_sent(self, entry: list[Any]) -> None:
        """As ``_finish``, after an exception on the way to ``send_taken``."""
        entry[1].is_credited = self.credits is not None
        self._finish(entry)

    def _send_many(self, operation: Operation, tickets: list[int]) -> None:
        """As ``_send``, of several messages, whose tickets the operation's words name."""
        words = self.words
        if words[self._shut]:
            self._refuse_if_shut()
        for ticket in tickets:
            words[ticket >> 32 << SMALLEST - 3] = ticket % GENERATIONS << GENERATION_AT | self.arena.queued  # P5
        buffers = [operation.ticket_buffers[0][: 8 * len(tickets)]]
        if self.tickets.spills:
            self._give_or_spill(buffers, tickets)
        else:
            if words[self._shut]:  # as in _send
                self._refuse_if_shut()
            try:
                os.writev(self._tickets_fd, buffers)  # P6
            except BlockingIOError:
                raise self._full_of_doorbells() from None
        for i in range(len(tickets)):
            words[operation.credit + i] = 0  # P7
            words[operation.ticket + i] = 0  # P8

    def _send(self, operation: Operation, word: int, generation: int) -> None:
        """The block is filled, and the operation's word names it: what remains, P5 to P8."""
        words = self.words
        if words[self._shut]:
            self._refuse_if_shut()  # now that the word says so: see shutdown.py
        if self._has_tasks:
            tasks.count_put(words, operation.tally)  # J1
        words[word] = generation << GENERATION_AT | self.arena.queued  # P5
        if self.tickets.spills:
            self._give_or_spill(operation.ticket_buffers, words[operation.ticket : operation.ticket + 1])
        else:
            if words[self._shut]:  # a handler may have shut it, and no call comes in between now
                self._refuse_if_shut()
            try:
                os.writev(self._tickets_fd, operation.ticket_buffers)  # P6
            except BlockingIOError:
                raise self._full_of_doorbells() from None
        if self._has_tasks:
            tasks.settle_put(words, operation.tally, given=True)  # J2
        words[operation.credit] = 0  # P7
        words[operation.ticket] = 0  # P8

    def _fill(self, block: int, credit: int, payload: Payload, metadata: bytes) -> None:
        words, word, nbytes, length = self.words, block >> 3, payload.nbytes, len(metadata)
        words[word + CREDIT] = credit
        words[word + NBYTES] = nbytes
        words[word + METADATA] = length << 32 | self._tag
        start = block + HEADER
        self.memory[start : start + length] = metadata
        start += length + 63 & -64
        payload.write_into(self._octets[start : start + nbytes])

    def put_many(self, messages: Sequence[tuple[Payload, bytes]], timeout: float | None = None) -> int:
        """Put as many as have room, with one system call for all of their tickets. They stay in order.

        Args:
            messages: at most 64, each a payload and its metadata.
            timeout: seconds to wait for the first one's room.

        Returns:
            How many were put, from the first on; at least one, if there is any.

        Raises:
            As ``put`` does, and then none was put.
        """
        if not messages:
            return 0
        queue = self._queue
        if queue.unfinished or keeping:
            queue.take_up()
        if self.words[self._shut]:
            self._refuse_if_shut()
        deadline = None if timeout is None else monotonic() + timeout
        words, count, process = self.words, len(messages), queue.process
        operation = None if self._has_tasks else queue.batch(PUT, self.batches)  # last: no exception takes it away
        if operation is None:  # only single operations count tasks
            self.put(*messages[0], timeout)
            return 1
        try:
            if self.credits is not None:
                count = self._take_credits(operation, count, deadline)  # P1, P2
            for i, (payload, metadata) in enumerate(messages[:count]):
                room = (len(metadata) + 63 & -64) + payload.nbytes
                size_class = size_class_of(room)
                block = self._block(size_class, room, deadline, operation, waits=not i)
                if not block:
                    break
                operation.blocks += (block,)
                operation.block = 0
                self._fill(block, words[operation.credit + i], payload, metadata)  # P3
            tickets = [
                block >> SMALLEST << 32 | ((words[block >> 3] >> GENERATION_AT) + 1) % GENERATIONS
                for block in operation.blocks
            ]
            nbytes = sum(payload.nbytes for payload, _ in messages[: len(tickets)])
            for i in range(len(tickets)):
                words[operation.ticket + i] = tickets[i]  # P4
            operation.blocks = []
            self._send_many(operation, tickets)
            if self.credits is not None and len(tickets) < count:
                self._give_unused(operation, len(tickets), count)
            count = len(tickets)
        except BaseException:
            if process == queue.process:  # as in put
                queue.unfinished += ([self._finish, operation],)  # before any call
                queue.take_up()
            raise
        words[operation.counters] += count
        words[operation.counters + 1] += nbytes
        self.batches.append(operation)
        return count

    def put_held(self, handover: Handover, metadata: bytes, timeout: float | None = None) -> bool:
        """Queue a block that this process holds, as it lies. Whatever is raised, its lease goes on.

        Args:
            handover: the block; nobody may use its tensors meanwhile. Once it is queued, they are empty.
            metadata: as for put.
            timeout: as for put.

        Returns:
            Whether it was done. If not, the block has no room for the metadata; or a child that was forked meanwhile has its
            tensors, too, or an alias was made of one.

        Raises:
            Full: there was no room in time. The text says who holds what.
        """
        queue = self._queue
        if queue.unfinished or keeping:
            queue.take_up()
        at = _room(handover, len(metadata))
        if not at or self.words[handover.word] != handover.held:
            return False
        if not self.arena.reach(handover.word << 3, at + len(metadata)):
            return False
        try:
            operation = self.singles[-1]
            del self.singles[-1]
        except IndexError:
            operation = queue.operation(PUT)
        is_seen_to, process = False, queue.process
        try:
            words, credit = self.words, 0
            if words[self._shut]:
                self._refuse_if_shut()
            deadline = None if timeout is None else monotonic() + timeout
            if self.credits is not None:
                self._take_credits(operation, 1, deadline)  # P1, P2
                credit = words[operation.credit]
            with self.rows.no_fork:  # nothing in here waits: a credit is room in a pipe without a log
                try:
                    self._hand_over(operation, handover, metadata, at, credit)
                except BaseException:  # seen to before anybody forks
                    is_seen_to = True
                    if process == queue.process:
                        queue.unfinished += ([self._finish, operation],)  # before any call
                        queue.take_up()
                    raise
        except BaseException as error:
            if not is_seen_to and process == queue.process:
                queue.unfinished += ([self._finish, operation],)  # before any call
                queue.take_up()
            if isinstance(error, _MayNotLeave):
                return False
            raise
        words[operation.counters] += 1
        words[operation.counters + 1] += handover.nbytes
        self.singles.append(operation)
        return True

    def _hand_over(self, operation: Operation, handover: Handover, metadata: bytes, at: int, credit: int) -> None:
        """P3 to P8 of a held block, and the emptying of its tensors.

        Raises:
            _MayNotLeave: somebody else has some, too.
        """
        words, word, length = self.words, handover.word, len(metadata)
        self._handovers[operation.ticket] = handover
        handover.begin()
        if not handover.may_leave():
            raise _MayNotLeave
        words[word + CREDIT] = credit  # P3
        words[word + NBYTES] = handover.nbytes
        words[word + METADATA] = (FORWARDED | length) << 32 | self._tag
        words[word + METADATA_AT], words[word + PAYLOAD_AT] = at - (word << 3), handover.start - (word << 3)
        self.memory[at : at + length] = metadata
        generation = ((handover.held >> GENERATION_AT) + 1) % GENERATIONS
        words[operation.ticket] = word >> SMALLEST - 3 << 32 | generation  # P4
        self._send(operation, word, generation)
        self._settle_handover(operation)

    def _settle_handover(self, operation: Operation) -> None:
        """See to the held block of an operation that is over or undone, if it was of one."""
        handover = self._handovers.get(operation.ticket)
        if handover is not None:
            handover.settle()
            self._handovers.pop(operation.ticket, None)

    def block_for(self, timeout: float | None, nbytes: int, taker: Taker) -> int:
        """Take a block to be held, and put later. Its state is WRITING, and the taker has it.

        Returns:
            0: there is no room, and nothing in the queue whose taking may make some. For one message only, and not for loans,
            of which there may be many, is there memory beyond the capacity.

        Raises:
            Full: there was no room in time. The text says who holds what.
            SharedMemoryError: there can never be room for so much.
        """
        self.attachment.attach()
        deadline = None if timeout is None else monotonic() + timeout
        self.attachment.mind_idle()
        block = self.arena.allocate(nbytes, taker=taker)
        if block or not (self._queue.qsize() or self.arena.is_look_due(nbytes) or headroom() < nbytes):
            return block
        return self._wait_for_block(nbytes, deadline, taker, force=False)

    def _refuse_if_shut(self) -> None:
        if self.words[self.record.shut]:
            raise ShutDown(f"the queue was shut down: nothing more can be put (maxsize {self.record.maxsize})")

    def _take_credits(self, operation: Operation, most: int, deadline: float | None) -> int:
        """Wait for one, and take as many more as are there. They stand in the operation's first words."""
        credits, words, first = self.credits, self.words, operation.credit
        assert credits is not None
        operation.is_credited = False
        buffers = operation.credit_buffers if most == operation.size else [operation.credit_buffers[0][: 8 * most]]
        while True:
            # early or not: credits have no order
            count = abs(credits.take_nowait(buffers)) or self._wait_for_credits(credits, buffers, deadline)
            if DOORBELL in words[first : first + count]:
                taken = [credit for credit in words[first : first + count] if credit != DOORBELL]
                zeros = [0] * (count - len(taken))  # in one store: an exception is not to find a credit in two words
                words[first : first + count] = memoryview(array("Q", taken + zeros))
                count = len(taken)
            for i in range(first, first + count):
                credit = words[i]
                words[self._laps + (credit & SLOTS) % self._slots] = credit >> SLOT_BITS
            if count:
                operation.is_credited = True
                return count

    def _wait_for_credits(self, credits: TokenPipe, buffers: Buffers, deadline: float | None) -> int:
        self._refuse_if_shut()  # at once, and not after the first slice
        began = monotonic()
        looks = self.words[LOOKS]

        def idle() -> None:
            nonlocal looks
            self._refuse_if_shut()
            looks = self.attachment.recover_in_turn(looks)
            self.attachment.mind_idle(waits=True)
            self._queue.take_up()

        try:
            count = abs(credits.take(buffers, deadline, idle, exclusive=True))
            if not count:  # who does not wait does not look in slices, and the dead may have one
                self.attachment.recover_dead()
                count = abs(credits.take_nowait(buffers))
        finally:
            self.waits += 1
            self.seconds_waited += monotonic() - began
            self._tell_waits()
        if not count:
            self._refuse_if_shut()
            waited = deadline is None or deadline > began
            raise Full(self._why_full("has no free place", names_holders=waited and self.names_holders))
        return count

    def _block(
        self, size_class: int, nbytes: int, deadline: float | None, taker: Operation, *, waits: bool = True
    ) -> int:
        arena = self.arena
        # As Arena._start, with a hazard of the operation's own: no call is made while it is set.
        free = arena.free[size_class]
        if size_class > QUICK or not free:
            self.look_for_freed(size_class)
        if free:  # last: no other thread may take the last one since
            block = free[-1]
            del free[-1]
            words, word, hazard = self.words, block >> 3, taker.hazard
            words[hazard] = block
            if words[arena.table + (block >> 20)] == arena.own[size_class]:
                state = words[word] or words[arena.floors + (block >> 20)] << GENERATION_AT
                if not state & HOLDER and (size_class <= arena.whole or words[word + WRITTEN] >= nbytes + HEADER):
                    words[word] = state | arena.writing
                    taker.block = block
                    words[hazard] = 0
                    arena.recent[size_class].append(block)
                    return block
            words[hazard] = 0
            free.append(block)
        rests, block = self._has_just_looked(nbytes), 0
        if rests and waits and self._may_go_beyond(nbytes):  # asked once: readers and others who put come in between
            rests, block = False, arena.allocate_without_look(nbytes, taker)
        block = block or arena.allocate(nbytes, taker=taker, collected=rests)
        return block or (self._wait_for_block(nbytes, deadline, taker) if waits else 0)

    def _block_beyond(self, nbytes: int, taker: Operation | Taker) -> int:
        """Return a block beyond the capacity, if the message may lie there, and none of its size is the first; else 0.

        Without a look at all that is free, which takes milliseconds: beside a queue that fills the arena each put comes here.
        """
        if not self._has_just_looked(nbytes) or not self._may_go_beyond(nbytes):
            return 0  # in that order: how many wait in a queue that has spilled is slow to find
        return self.arena.allocate_without_look(nbytes, taker)

    def _has_just_looked(self, nbytes: int) -> bool:
        """Return whether there was no room within the capacity for such a message, and it is too early to look again."""
        return self.arena.has_been_beyond(size_class_of(nbytes)) and not self.arena.is_look_due(nbytes)

    def _may_go_beyond(self, nbytes: int) -> bool:
        """Return whether a message may lie beyond the capacity: the queue has none, or so few that if all had this one's block,
        they were small together."""
        waiting = self._queue.qsize()
        return waiting < self.beyond or (waiting + 1) << size_class_of(nbytes) <= _SMALL_BEYOND

    def _pause(self, seconds: float, step: float, nbytes: int, taker: Operation | Taker | None) -> int:
        """Wait for room, and return a block beyond the capacity as soon as the message may lie there; 0: it may not.

        Args:
            taker: None: do not look for it.
        """
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            if taker is not None and (block := self._block_beyond(nbytes, taker)):
                return block
            time.sleep(min(step, left))
        return 0

    def look_for_freed(self, size_class: int) -> None:
        """Look for blocks that others have freed; and give back memory that lies idle."""
        self.attachment.mind_idle()
        self.arena.reclaim_freed(size_class)

    def _wait_for_block(
        self, nbytes: int, deadline: float | None, taker: Operation | Taker, *, force: bool = True
    ) -> int:
        """The arena is full. A queue with nothing in flight may place one message all the same, or some small ones: so queues
        that share an arena cannot starve each other in a circle. But never more than the machine has; and where nobody has a
        block that could come free, there is nothing to wait for.

        Args:
            force: False: such a queue's block is none, and 0 is returned.
        """
        pause, began, in_vain = 0.0005, monotonic(), 0
        self.waits += 1
        try:
            # The messages before may be taken sooner than all memory is looked at.
            until = began + SLICE if deadline is None else min(began + SLICE, deadline)
            while force and monotonic() < until and self._has_just_looked(nbytes):
                if self._may_go_beyond(nbytes):
                    if block := self.arena.allocate_without_look(nbytes, taker):
                        return block
                    break  # the machine has no memory there
                time.sleep(pause)
            while True:
                if self.words[self._shut]:
                    self._refuse_if_shut()
                self.while_waiting()
                looked = monotonic()
                was_in_use = self.arena.is_in_use()  # first: what comes free from here on may be missed below
                self.attachment.make_room(nbytes)
                looked = monotonic() - looked  # many small blocks take long: then it is looked for less often
                block = self.arena.allocate(nbytes, taker=taker, collected=True)
                if block:
                    self.arena.note_room()
                elif self._may_go_beyond(nbytes) if force else not self._queue.qsize():
                    self.arena.note_look(looked)
                    block = self.arena.allocate(nbytes, force=True, taker=taker, collected=True) if force else 0
                    if not block and force and self.attachment.trim():
                        block = self.arena.allocate(nbytes, force=True, taker=taker, collected=True)
                if block:
                    return block
                if not self._queue.qsize():
                    # Others may have put, and got, between the two looks. Where pages are locked, what they freed helps only as
                    # it lies, and is found by one look more.
                    in_vain = 0 if was_in_use or self.arena.is_in_use() else in_vain + 1
                    if in_vain > self.words[PAGE_LOCKED] and self.arena.lacks(nbytes):
                        raise SharedMemoryError(errno.ENOMEM, self._why_full(f"finds {self.arena.why_no_room(nbytes)}"))
                    if not force and headroom() >= nbytes:
                        return 0
                else:
                    in_vain = 0
                remaining = SLICE if deadline is None else deadline - monotonic()
                if remaining <= 0 and not 0 < in_vain <= self.words[PAGE_LOCKED]:
                    what = f"finds {self.arena.why_no_room(nbytes)}"
                    raise Full(self._why_full(what, names_holders=self.names_holders))
                seconds = min(max(pause, min(2 * looked, 10 * SLICE)), remaining)
                block = self._pause(seconds, pause, nbytes, taker if force else None)
                if block:
                    return block
                pause = min(2 * pause, SLICE)
        finally:
            self.seconds_waited += monotonic() - began
            self._tell_waits()

    def _tell_waits(self) -> None:
        """For onlookers: how often and how long this process waited to put here, beside any one of its operations."""
        for operation in self._queue.operations[:1]:
            self.words[operation.counters + WAITS] = self.waits
            self.words[operation.counters + MICROSECONDS] = int(self.seconds_waited * 1e6)

    def _give_or_spill(self, buffers: Buffers, tickets: Iterable[int]) -> None:
        """Order is kept by spilling as long as an own spilled ticket waits: token_pipe.py, rule 1."""
        backlog = self.backlog
        # There may be a million. What is left is looked at by later puts, which spill until then: that is never wrong.
        for _ in range(_LOOKS):
            if not backlog:
                break
            first = backlog[0]
            if self._waits(first):
                backlog.rotate(-1)  # it may wait for long, with a process that is stopped; the next is looked at next
                break
            if backlog and backlog[0] == first:  # else another thread, or a handler, dropped it meanwhile
                del backlog[0]  # with no call since the look
        words, watch, shut = self.words, self._watch, self._shut
        if not backlog:
            try:
                if words[shut]:  # as in _send
                    self._refuse_if_shut()
                os.writev(self._tickets_fd, buffers)  # P6
                return
            except BlockingIOError:
                self.record.set(self.record.spilled)
        backlog.extend(tickets)
        self.tickets.check_log()
        if words[shut]:  # as in _send
            self._refuse_if_shut()
        os.pwritev(self.tickets.log, buffers, 0, os.RWF_APPEND)  # P6
        words[watch] = 1  # once more: see "The log is empty again" in queue_record.py
        self.tickets.ring_doorbell()

    def _waits(self, ticket: int) -> bool:
        """Return whether what this process put with a ticket was not taken yet."""
        block, state = ticket >> 32 << SMALLEST, ticket % GENERATIONS << GENERATION_AT | self.arena.queued
        # Read by the file: where the page was given back, reading it in the mapping would make it anew.
        return os.pread(self.arena.segment.descriptor, 8, block) == state.to_bytes(8, sys.byteorder)

    def _why_full(self, what: str, *, names_holders: bool = True) -> str:
        """Return the text of an error. To look up who holds memory takes many times as long as a put."""
        waiting = f"the queue (maxsize {self.record.maxsize}, {self._queue.qsize()} waiting) {what}"
        return f"{waiting}; {self.attachment.describe_holders()}" if names_holders else waiting

    def _full_of_doorbells(self) -> SharedMemoryError:
        """Return what to raise where a pipe without a log has no room: a shutdown that a kill cut short has rung for many."""
        what = (
            "has no room for a ticket: doorbells of a shutdown that was cut short fill its pipe, until they are taken"
        )
        return SharedMemoryError(errno.EAGAIN, self._why_full(what))

    def _finish(self, entry: list[Any]) -> None:
        """Finish what an exception ended.

        Args:
            entry: of ``unfinished``: the operation.

        Raises:
            InDoubt: whether its ticket or its credit was given cannot be judged now.
        """
        operation: Operation = entry[1]
        words, blocks, spare = self.words, operation.blocks, self._spare[operation.size]
        named = {ticket >> 32 for ticket in words[operation.ticket : operation.ticket + operation.size]}
        if operation.block:
            blocks += (operation.block,)
            operation.block = 0
        while blocks:
            if blocks[-1] >> SMALLEST not in named:
                words[blocks[-1] >> 3] &= ~HOLDER  # it counts as in flight: the next reclaim finds it free
            del blocks[-1]
        record = Record(
            operation.purpose, operation.size, operation.credit, operation.ticket, operation.given, operation.tally
        )
        is_held = operation.ticket in self._handovers
        seen = Seen(self._queue.handle)
        for each in record.each():  # credits and tickets, as far as they were not given
            self.attachment.recovery.finish_put(
                seen, self.rows.index, each, frees=not is_held, has_credit=operation.is_credited
            )
        self._settle_handover(operation)
        del entry[:]  # from here on there is no call
        spare += (operation,)

    def _give_unused(self, operation: Operation, start: int, stop: int) -> None:
        """Give back credits of a batch that were taken and not needed, as a get gives those of its messages."""
        words, credit, given = self.words, operation.credit, operation.given
        assert self.credits is not None
        for i in range(start, stop):
            words[given + i] = words[credit + i] + NEXT_LAP
        self.credits.give([operation.given_buffers[0][8 * start : 8 * stop]])
        for i in range(start, stop):
            words[credit + i] = 0
        for i in range(start, stop):
            words[given + i] = 0


class _MayNotLeave(Exception):
    """Others have tensors of a block that is to be handed over, too."""


def _room(handover: Handover, nbytes: int) -> int:
    """Return where in a held block metadata can lie: in front of what the tensors lie on, or behind it; 0: nowhere."""
    block = handover.word << 3
    end = block + (1 << size_class_of(handover.start - block - HEADER + handover.nbytes))
    behind = handover.start + handover.nbytes + 63 & -64
    if block + HEADER + nbytes <= handover.start:
        return block + HEADER
    return behind if behind + nbytes <= end else 0
