"""The end that gets: ticket -> content -> credit -> HELD or FREE. Its steps, G1 to G7, are numbered in recovery.py.

An exception (a signal handler's, at any point) leaves what was taken on record, and ``see_to`` sees to it: see open_queue.py.
As long as a message's block was not let go, the message is set aside for the next get, unless it is broken. After that it is
lost, and counted, as if the process had died there.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple

from tensorpipe_ipc.errors import (
    Empty,
    PeerLost,
    ProtocolError,
    SharedMemoryError,
    ShutDown,
    UnsupportedLeaf,
)
from tensorpipe_ipc.handlers import is_a_signals, passed_a_handler
from tensorpipe_ipc.memory.arena import (
    CREDIT,
    FORWARDED,
    GENERATION_AT,
    HEADER,
    HOLDER,
    METADATA,
    METADATA_AT,
    NBYTES,
    PAYLOAD_AT,
    QUEUED,
    SMALLEST,
)
from tensorpipe_ipc.memory.leases import LEAST, Octets, keeping, settle_kept
from tensorpipe_ipc.memory.row import BATCH, GET, Operation, Record
from tensorpipe_ipc.memory.segment import GROWN
from tensorpipe_ipc.shared_queue import tasks
from tensorpipe_ipc.shared_queue.open_queue import IN_A_FORK, Aside, OpenQueue
from tensorpipe_ipc.shared_queue.queue_record import TOLD
from tensorpipe_ipc.shared_queue.token_pipe import DOORBELL, DROP, LAST_DOORBELL, SHUT, Buffers
from tensorpipe_ipc.shared_queue.tokens import NEXT_LAP, InDoubt, Seen
from tensorpipe_ipc.wire.in_block import A_PICKLE
from tensorpipe_ipc.wire.layout import LEASE_FROM
from tensorpipe_ipc.wire.room import lacks_memory, made_with_room, see_room_to_take

__all__ = ["BeginAnew", "COPY", "LEASE", "LEASE_FROM", "Decode", "GetEnd", "Message", "lease_from"]

COPY, LEASE = 1 << 62, 1  # in its place: never a lease; always one, or an error
_TRIES = 8  # to decode a message
_WORD = (1 << 64) - 1  # what another process wrote may be anything
_A_PICKLE = bytes([A_PICKLE])
_BY_WISH = {"auto": LEASE_FROM, True: COPY, False: LEASE}


class Message(NamedTuple):
    """A message as get returns it unless it is told how to decode: the content is the receiver's, writable."""

    metadata: bytes
    payload: bytearray | Octets  # a copy, or an array whose death gives the block back


Decode = Callable[[bytes, "bytearray | Octets"], Any]


def lease_from(copy: Any) -> int:
    """From how many bytes of payload on a message comes as a lease, by what users give as ``copy``.

    Raises:
        ValueError: it is not "auto", True or False.
    """
    if not isinstance(copy, (bool, str)) or copy not in _BY_WISH:
        raise ValueError(f"copy={copy!r}: give 'auto', True or False")
    return _BY_WISH[copy]


class GetEnd:
    """A consumer's side of a queue. A subclass may look more closely at what it reads: ``word_of`` and ``places``.

    Attributes:
        credits_what_is_made: whether a message's place is given back once it was made, and not once it was taken.
        singles, batches: spare operations. The compiled path takes them, too.
        spin: seconds for which a get looks for a message before it sleeps.
        undecodable: messages that this process dropped, as decoding them failed.
        lost: messages that this process lost, as an exception came when their blocks had been let go.
    """

    credits_what_is_made = False

    def __init__(self, queue: OpenQueue) -> None:
        self._queue, self.attachment, self.arena, self.rows = queue, queue.attachment, queue.arena, queue.rows
        self.leases, self.words, self.memory, self._octets = queue.leases, queue.words, queue.memory, queue.octets
        self.tickets, self.credits, self.record = queue.tickets, queue.credits, queue.record
        self._watch, self._spilled, self._has_tasks = self.record.watch, self.record.spilled, self.record.has_tasks
        self._tickets_fd = queue.tickets.fd
        # Where nobody waits in readv, whoever takes without a timeout knows that there is something.
        self._waits_in_read = queue.tickets.read_end >= 0
        self._read_end = queue.tickets.read_end if self._waits_in_read else queue.tickets.fd
        self.spin, self._spins, self._is_polled = 0.0, 0, False
        self.rows.after_fork(self._forget)
        self._forget()

    def _forget(self) -> None:
        self.singles, self.batches = list[Operation](), list[Operation]()  # spare ones
        self._spare = {1: self.singles, BATCH: self.batches}
        self.stopped = list[StopIteration]()  # of objects, that the compiled path could not raise
        self.undecodable = self.lost = 0

    @property
    def holds_back(self) -> bool:
        """Return whether an interrupted get left something that the next one serves. The descriptor does not tell of it."""
        return bool(self._queue.aside or self._queue.unfinished)

    def get(self, timeout: float | None = None, decode: Decode = Message, lease_from: int = LEASE_FROM) -> Any:
        """Take the next message.

        Args:
            timeout: seconds to wait for one; None: for ever; 0: not at all.
            decode: makes what is returned, of metadata and payload. It may be called again with the same message: after an
                exception that says nothing of the message (a signal handler's, or ``_may_pass``) that is what the
                next get takes, ``_TRIES`` times. After any other it is dropped, and counted.
            lease_from: bytes of payload from which on it is a lease; or COPY, or LEASE.

        Raises:
            Empty: none came in time.
            ShutDown: the queue was shut down, and holds nothing more.
            SharedMemoryError: LEASE was asked for, and this process has as much under lease as it may. The message is
                the next that this process gets.
        """
        queue = self._queue
        try:
            # Within the try: CPython 3.11 looks for the handler of what comes in a jump back where the instruction before its
            # target stands.
            deadline = timeout and monotonic() + timeout
            while True:
                if self.stopped:
                    raise self.stopped.pop()
                try:
                    if queue.aside or queue.unfinished:
                        queue.take_up()
                        if self.words[self.record.dropped]:
                            self._end_all_aside(_DROPPED)
                        message = self._get_aside(decode, lease_from)
                        if message is not _NOTHING:
                            return message
                    return self._get(deadline, decode, lease_from)
                except BeginAnew:
                    continue
        except BaseException:
            self._tell_of_left()
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``get`` would not wait; now and then when it would, too.

        Of what an exception left to be got again the pipe knows nothing. A doorbell tells of it, from the first call on.
        """
        self._is_polled = True
        if self.holds_back:
            self._ring_doorbell_if_polled()
        return self.tickets.fileno()

    def _ring_doorbell_if_polled(self) -> None:
        """Have the descriptor, if anybody asks it, tell of what the next get of this process finds, but not in the pipe."""
        if self._is_polled and not self.tickets.unread():
            self.words[self.record.spilled] = 1  # the pipe's length is not the number of its messages any more
            self.tickets.ring_doorbell()

    def _tell_of_left(self) -> None:
        """After an exception, which may have come when a doorbell was taken: have others hear of what is in the log."""
        if self.words[self._spilled] and self.tickets.spills:
            self.tickets.tell_of_more()
        if self.holds_back:
            self._ring_doorbell_if_polled()

    def _get(
        self,
        deadline: float | None,
        decode: Decode,
        lease_from: int = LEASE_FROM,
        taken: list[Operation] | None = None,
    ) -> Any:
        """G1 to G7, in one function, so that one handler sees every exception together with all that is known.

        Args:
            deadline: on ``time.monotonic``'s clock; None: none; 0: now; or ``_PIPED``.
            taken: has an operation whose ticket was taken (G1), as long as this has not begun.
        """
        queue = self._queue
        if keeping and taken is None:
            settle_kept()
        if taken is None and self.words[GROWN]:  # here: one that always finds a message never waits
            self.attachment.mind_idle()
        try:
            spares = self.singles if taken is None else taken
            operation = spares[-1]
            del spares[-1]
        except IndexError:
            operation = queue.operation(GET)
        process = queue.process
        try:
            words = self.words
            if taken is not None:
                pass
            elif self.spin and self._spin(operation.ticket_buffers):
                pass
            elif deadline is None and not (words[self._watch] or words[self._spilled] or keeping):
                if not (words[GROWN] and self._waits_in_read) or not self._take_idly(operation.ticket_buffers):
                    os.readv(self._read_end, operation.ticket_buffers)  # G1
            elif words[self._watch] or deadline == _PIPED or not self.tickets.take_piped(operation.ticket_buffers):
                # Where there is no log yet, one call has looked, and not three.
                self._wait(operation, operation.ticket_buffers, deadline, decode)
            ticket = words[operation.ticket]
            if ticket <= LAST_DOORBELL:
                self._hear(ticket)
                words[operation.ticket] = 0
                raise BeginAnew
            if words[self._watch]:
                self._tell_of_more()
            word = self.word_of(ticket)
            if self.credits is not None and not self.credits_what_is_made:
                words[operation.given] = words[word + CREDIT] + NEXT_LAP & _WORD  # G2
                self.credits.give(operation.given_buffers)  # G3
                operation.is_credited = True
            message = self.open(word, decode, lease_from)  # G4
            if process != queue.process:
                return message  # of a fork within; the steps that remain are the parent's
            if self.credits is not None and self.credits_what_is_made:
                words[operation.given] = words[word + CREDIT] + NEXT_LAP & _WORD  # G2
                self.give(operation.given_buffers)  # G3
                if process != queue.process:
                    return message  # as above
            nbytes = words[word + NBYTES]
            if self._has_tasks:
                tasks.count_taken(words, operation.tally)  # J3
            self._let_go(word)  # G5
            words[operation.ticket] = 0  # G6; from here on there is no call, so no exception: the message is returned
            words[operation.given] = 0  # G7
            operation.is_credited = False
            if self._has_tasks:
                words[operation.tally] -= 1  # J4
            words[operation.counters] += 1
            words[operation.counters + 1] = words[operation.counters + 1] + nbytes & _WORD
            self.singles += (operation,)
            return message
        except BaseException as error:
            if process == queue.process:
                queue.unfinished += ([self.see_to, operation, None, error],)  # before any call
                queue.take_up()
            raise

    def get_taken(self, taken: list[Operation], decode: Decode) -> Any:
        """Go on with a get of the compiled path, or a get_many, which has taken tickets and left the rest.

        Args:
            taken: the operation; it is in here until this sees to it.
            decode: as for ``get``.

        Raises:
            As ``get`` does. ``BeginAnew``: it was no message.
        """
        if taken[0] not in self._queue.operations:
            raise RuntimeError(IN_A_FORK)
        try:
            if taken[0].size == 1:
                return self._get(None, decode, LEASE_FROM, taken)
            return self._get_many(BATCH, None, decode, LEASE_FROM, taken)
        except BaseException:
            self._tell_of_left()
            raise

    def take_up(self) -> None:
        """After an exception within the compiled path: see to what it took, and have it got again."""
        self._queue.take_up()
        self._tell_of_left()

    def get_many(
        self, most: int, timeout: float | None = None, decode: Decode = Message, lease_from: int = LEASE_FROM
    ) -> list[Any]:
        """Take what is there, with one system call, and at least one message: wait for that as ``get`` does.

        Args:
            most: at most so many, and at most 64.
            timeout: seconds to wait for the first one; None: for ever; 0: not at all.
            decode, lease_from: as for ``get``, of each.

        Raises:
            As ``get`` does.
        """
        try:
            deadline = timeout and monotonic() + timeout  # within the try, as in get
            while True:
                if self._has_tasks or most == 1 or self.holds_back or self.stopped:
                    return [self.get(deadline and max(0, deadline - monotonic()), decode, lease_from)]
                try:
                    return self._get_many(min(most, BATCH), deadline, decode, lease_from)
                except BeginAnew:
                    continue
        except BaseException:
            self._tell_of_left()
            raise

    def _get_many(
        self,
        most: int,
        deadline: float | None,
        decode: Decode,
        lease_from: int,
        taken: list[Operation] | None = None,
    ) -> list[Any]:
        queue, messages = self._queue, list[Any]()
        if keeping and taken is None:
            settle_kept()
        if taken is None and self.words[GROWN]:  # as in _get
            self.attachment.mind_idle()
        if taken is None:
            operation = queue.batch(GET, self.batches)
            if operation is None:
                return [self._get(deadline, decode, lease_from)]
        else:
            operation = taken[-1]
            del taken[-1]
        process = queue.process
        try:
            words, given = self.words, operation.given
            buffers = operation.ticket_buffers if most == BATCH else [operation.ticket_buffers[0][: 8 * most]]
            if taken is not None:
                count = BATCH
            elif deadline is None and not (words[self._watch] or words[self._spilled] or keeping):
                count = self._take_idly(buffers) if words[GROWN] else 0
                count = count or os.readv(self._read_end, buffers) >> 3  # G1
            else:
                count = self._wait(operation, buffers, deadline, decode)
            found = self._tickets_in(operation, count)
            if not found:
                raise BeginAnew
            if words[self._watch]:
                self._tell_of_more()
            blocks = [self.word_of(words[operation.ticket + i]) for i in found]
            if self.credits is not None:
                for i, word in zip(found, blocks, strict=True):
                    words[given + i] = words[word + CREDIT] + NEXT_LAP & _WORD  # G2
                buffer = operation.given_buffers[0]
                many = [buffer[: 8 * count]] if len(found) == count else [buffer[8 * i : 8 * i + 8] for i in found]
                self.credits.give(many)  # G3
                operation.is_credited = True
            for word in blocks:
                try:
                    messages.append(self.open(word, decode, lease_from))  # G4
                except Exception as error:
                    if process != queue.process or not messages or is_a_signals(error, error.__traceback__):
                        raise
                    break  # those before it are returned, and it is the next get's
                if process != queue.process:
                    return messages  # as in _get; the further ones are the parent's alone
            done = blocks[: len(messages)]
            nbytes, rest = sum(words[word + NBYTES] for word in done), found[len(messages) :]
            left = [Aside(operation, i) for i in rest]
            got, waiting, stop = len(done), len(left), rest[0] if rest else count
            if left:
                self._ring_doorbell_if_polled()
            for word in done:
                self._let_go(word)  # G5
            words[operation.ticket : operation.ticket + stop] = _ZEROS[:stop]  # G6; from here on there is no call
            words[given : given + stop] = _ZEROS[:stop]  # G7
            words[operation.counters] += got
            words[operation.counters + 1] = words[operation.counters + 1] + nbytes & _WORD
            operation.waiting = waiting
            queue.aside += left
            if not waiting:
                operation.is_credited = False
                self.batches += (operation,)
            return messages
        except BaseException as error:
            if process == queue.process:
                queue.unfinished += ([self.see_to, operation, None, error],)  # before any call
                queue.take_up()
            raise

    def _hear(self, doorbell: int) -> None:
        """Do what a doorbell says, which was taken. (``DOORBELL`` says: look at the log.) One of a shutdown goes back: it may
        be what another would have been woken by."""
        words, record = self.words, self.record
        if doorbell == DOORBELL:
            if self.tickets.spilled():  # who cleared it meanwhile may be dead, or stopped: see queue_record.py
                words[record.watch] = 1
            return
        words[record.watch] = 1  # as above
        if not (words[record.shut] and (doorbell == SHUT or words[record.dropped])):
            self.attachment.shutdown.begin(self._queue.handle, drop=doorbell == DROP)
        self.tickets.ring_doorbell(doorbell)

    def _tickets_in(self, operation: Operation, count: int) -> list[int]:
        """Return which of an operation's first words have tickets in them, once the doorbells among them are heard."""
        words, found = self.words, list[int]()
        for i, ticket in enumerate(words[operation.ticket : operation.ticket + count].tolist()):
            if ticket > LAST_DOORBELL:
                found.append(i)
            elif ticket:
                self._hear(ticket)
                words[operation.ticket + i] = 0
        return found

    def _wait(self, operation: Operation, buffers: Buffers, deadline: float | None, decode: Decode) -> int:
        if deadline == _PIPED:
            taken = self.tickets.take_piped(buffers)
        elif self.words[self.record.shut]:
            taken = self._take_after_shutdown(operation, buffers, deadline, decode)
        else:
            taken = self.tickets.take(
                buffers, deadline, self._look_again if deadline is None else self._look_for_the_end
            )
        if taken < 0 and decode is not _drop:  # early: what is in the pipe goes first
            raise BeginAnew(self.tickets.unread())
        if not taken:
            raise Empty("no message came in time")
        return abs(taken)

    def _look_for_the_end(self) -> None:
        if self.words[self.record.shut]:
            raise BeginAnew
        self.leases.settle(at_once=False)
        settle_kept()
        self.attachment.mind_idle(waits=True)

    def _look_again(self) -> None:
        self.leases.settle(at_once=False)
        settle_kept()
        self.attachment.mind_idle(waits=True)
        if self.words[self.record.shut] or not (self.words[self._watch] or self.words[self._spilled] or keeping):
            raise BeginAnew

    def _tell_of_more(self) -> None:
        """After a taking, where the log was used: see to it that others, and ``fileno``, hear of what is left."""
        tickets = self.tickets
        if tickets.spills and tickets.tell_of_more():
            if self._queue.aside:
                tickets.ring_doorbell()
            else:
                self.record.unwatch(lambda: not tickets.spilled())

    def _take_idly(self, buffers: Buffers) -> int:
        """Before a wait that cannot be cut into slices, give back memory that lies idle, as long as there may be some. How many
        tickets were taken: none, once nothing is left to give back, or others took what came.

        By poll, which takes nobody's wake-up: see "Waking" in token_pipe.py.
        """
        if taken := self.tickets.take_piped(buffers):
            return taken
        pipe = select.poll()
        pipe.register(self.tickets.fd, select.POLLIN)
        arena = self.arena
        while self.words[GROWN] and not keeping and not pipe.poll(0 if arena.is_giving_back else 1000 * arena.rest):
            self.attachment.mind_idle(waits=True)
        if keeping:  # such a wait is cut into slices after all
            raise BeginAnew
        return 0

    def _spin(self, buffers: Buffers) -> bool:
        """Look for a ticket again and again before going to sleep, which saves both sides the wake-up.

        Learned: after eight spins in vain, one get in 64 tries again.
        """
        self._spins += 1
        if self._spins > 8 and self._spins & 63 or self.words[self._watch]:
            return False
        read, fd, until = os.readv, self._tickets_fd, monotonic() + self.spin
        while monotonic() < until:
            try:
                read(fd, buffers)
            except BlockingIOError:
                continue
            self._spins = 0
            return True
        return False

    def _take_after_shutdown(
        self, operation: Operation, buffers: Buffers, deadline: float | None, decode: Decode
    ) -> int:
        """Take what is left, but no doorbell: each of these goes back into the pipe.

        Others may sleep on it, and this process may be killed or stopped at any point.
        """
        words, first, tickets, last_look = self.words, operation.ticket, self.tickets, False

        def put_back(count: int) -> None:
            for word in range(first, first + count):
                self._hear(words[word])
                words[word] = 0

        while decode is _drop or not words[self.record.dropped]:
            # The pipe may have been full when the doorbells were to be given. First: who takes the last ticket may be killed
            # then.
            if words[self.record.shut] != TOLD and self.attachment.shutdown.wake(self._queue.handle):
                words[self.record.shut] = TOLD
            taken = tickets.take_past_doorbells(buffers, put_back)
            if taken:
                return taken
            if last_look:
                break
            self.attachment.shutdown.settle_puts(self._queue.handle, self.attachment.recover_dead, deadline)
            last_look = True
        self.attachment.shutdown.wake(self._queue.handle, again=True)
        if decode is not _drop and words[self.record.dropped] and not self._queue.is_empty():
            self.drop_all()  # whoever began that was killed at it, or left it by an exception
        raise ShutDown("the queue was shut down, and nothing is left in it")

    def word_of(self, ticket: int) -> int:
        """Return the index of the state of the block that a ticket names.

        Raises:
            ProtocolError: the block does not wait to be got: it is not QUEUED, nor did a fork during the get make it HELD.
        """
        word = ticket >> 32 << SMALLEST - 3
        state = self.words[word]
        if state & 15 != QUEUED and word not in self.leases.early or state >> GENERATION_AT != ticket & 0xFFFFFFFF:
            raise ProtocolError(f"ticket {ticket:#x} names a block whose state is {state:#x}")
        return word

    def places(self, word: int) -> tuple[int, int, int, int]:
        """Return where in a block its metadata begins, the metadata's length, where its payload begins, and the payload's."""
        words = self.words
        nbytes, length = words[word + NBYTES], words[word + METADATA] >> 32
        if length < FORWARDED:
            return HEADER, length, HEADER + (length + 63 & -64), nbytes
        return words[word + METADATA_AT], length - FORWARDED, words[word + PAYLOAD_AT], nbytes

    def open(self, word: int, decode: Decode, lease_from: int = LEASE_FROM) -> Any:
        """Return what ``decode`` makes of the message in the block whose state is at ``word``.

        Raises:
            SharedMemoryError: LEASE was asked for, and there is none.
            OutOfMemory: there is no memory for a copy.
        """
        if decode is _drop:  # what nobody reads is not copied
            return None
        block = word << 3
        at, length, start, nbytes = self.places(word)
        metadata, start = self.memory[block + at : block + at + length], block + start
        if lease_from == LEASE and (not nbytes or metadata[:1] == _A_PICKLE):  # no tensors, which would lie there
            lease_from = LEASE_FROM
        if nbytes < LEASE_FROM and nbytes < lease_from:
            return decode(metadata, bytearray(self._octets[start : start + nbytes]))
        array = self._lease(block, start, nbytes, must=lease_from == LEASE) if nbytes >= lease_from else None
        if array is None and lease_from == LEASE:
            raise _NoLease(
                errno.ENOSPC,
                f"no lease for a message of {nbytes} bytes: this process may have {self.leases.budget} bytes under lease, all "
                f"memory in use is to be {self.arena.capacity} bytes at most, and there is none inside a fork. Let go of "
                "tensors, or get a copy",
            )
        if array is None:
            array = self._copy(block, start, nbytes, may_lease=lease_from < COPY)
        return made_with_room(self.attachment.trim, decode, metadata, array)

    def _copy(self, block: int, start: int, nbytes: int, *, may_lease: bool) -> Octets:
        """Return a copy of a payload; a lease of it, if it may be, where there is no memory for a copy."""
        try:
            see_room_to_take(nbytes, self.attachment.trim)
            copy: Octets = self.leases.octets[start : start + nbytes].copy()
            return copy
        except MemoryError:
            if not may_lease or self.rows.is_within_fork() or self.arena.is_beyond(block):
                raise
        return self.leases.lease_anyway(block, start, nbytes)

    def _lease(self, block: int, start: int, nbytes: int, *, must: bool) -> Octets | None:
        array = self.leases.lease(block, start, nbytes, must=must)
        if array is None and must and self.leases.needs_block(block, start, nbytes):
            self.attachment.make_room(max(nbytes, LEAST))  # what is free may lie with somebody
            array = self.leases.lease(block, start, nbytes, must=must)
        return array

    def _let_go(self, word: int) -> None:
        """The block is HELD if the message lies on it, else FREE."""
        words, live = self.words, self.leases.live
        anchor = live.get(word)
        if anchor is None:
            words[word] &= ~HOLDER
            return
        with self.rows.no_fork:  # a child either has it as its own, or does not have it
            words[word] = anchor.held
            if word not in live or live[word] is not anchor:  # its array died before, and nobody else frees it
                words[word] &= ~HOLDER
        if self.leases.early:
            self.leases.early.pop(word, None)

    def see_to(self, entry: list[Any]) -> None:
        """See to the tickets that an exception left with this process: each message comes again, is dropped, or is lost.

        Args:
            entry: of ``unfinished``: the operation; the ticket that was being served, or None for all that it took; the
                exception.
        """
        _, operation, aside, error = entry
        words, left = self.words, list[Aside]()
        taken = [aside] if aside else [Aside(operation, i) for i in self._tickets_in(operation, operation.size)]
        gives_first = self.credits is not None and not self.credits_what_is_made
        # Where a place could not be given back, which comes first, nothing is said of the message.
        is_credited = operation.is_credited or (aside is not None and aside.is_credited)
        was_made = not (gives_first and isinstance(error, SharedMemoryError) and not is_credited)
        is_failure = was_made and not (
            isinstance(error, (BeginAnew, _NoLease, _NoCredit)) or passed_a_handler(error.__traceback__)
        )
        tries = taken[0].tries + is_failure if taken else 0
        is_broken = is_failure and (tries >= _TRIES or not _may_pass(error))
        ended = list[tuple[Aside, int]]()
        for each in taken:
            if each is taken[0] and is_broken:
                ended.append((each, _UNDECODABLE))
            elif self._is_due(words[operation.ticket + each.index]):
                left.append(each)
            else:
                ended.append((each, _LOST))
        before = error.before if isinstance(error, BeginAnew) else 0
        if left and left[0] is taken[0]:
            left[0].tries, left[0].before = tries, before
        entries, count = [[self._end_aside, each, fate] for each, fate in ended], len(taken)
        del entry[:]  # from here on there is no call
        if not aside:
            operation.waiting = count
        if before:
            self._queue.aside += left
        else:
            self._queue.aside[:0] = left
        self._queue.unfinished += entries
        if not taken:
            operation.is_credited = False
            self._spare[operation.size] += (operation,)
        if entries:  # last: it may be that one cannot be judged now, and the others come first whatever becomes of it
            self._queue.take_up()

    def _end(self, aside: Aside, fate: int) -> None:
        """End the get of a message that nobody receives, as the recovering process would. It may be called again.

        Raises:
            InDoubt: as ``see_to`` does.
        """
        words, operation, i = self.words, aside.operation, aside.index
        ticket, given = words[operation.ticket + i], operation.given + i
        if not ticket:
            return
        has_left = fate == _GIVEN_UP and self.credits_what_is_made
        returns_credit = self.credits is not None and not (operation.is_credited or aside.is_credited or has_left)
        if self._is_due(ticket):
            word = ticket >> 32 << SMALLEST - 3
            if returns_credit and not words[given]:
                self._give_anew(aside, word, given)
                returns_credit = False
            self._let_go(word)
        record = Record(operation.purpose, 1, operation.credit + i, operation.ticket + i, given, operation.tally)
        done = self._done()
        is_lost = fate in (_LOST, _GIVEN_UP)
        self.attachment.recovery.end_get(
            Seen(self._queue.handle), self.rows.index, record, is_lost=is_lost, returns_credit=returns_credit
        )
        if fate == _UNDECODABLE:  # with no call since the ticket went
            self.undecodable += 1
        elif done:
            words[done] += 2  # nobody has it: join is not to wait for it
        if is_lost:
            self.lost += 1

    def _end_aside(self, entry: list[Any]) -> None:
        """The same for one that had been set aside."""
        _, aside, fate = entry
        self._end(aside, fate)
        del entry[:]  # with no call since the ticket went
        operation = aside.operation
        operation.waiting -= 1
        if not operation.waiting:
            operation.is_credited = False
            self._spare[operation.size] += (operation,)

    def _end_all_aside(self, fate: int) -> None:
        queue = self._queue
        queue.take_up()
        while queue.aside:
            aside = queue.aside[0]
            del queue.aside[0]
            queue.unfinished += (
                [self._end_aside, aside, fate],
            )  # with no call since the loop asked whether there is one
            queue.take_up()

    def give_up(self) -> None:
        """This process gets no more: what was set aside is lost, and counted, as if it had died."""
        self._end_all_aside(_GIVEN_UP)

    def _is_due(self, ticket: int) -> bool:
        """Return whether the block of a ticket waits to be got: it was not let go, or will be again."""
        word = ticket >> 32 << SMALLEST - 3
        state = self.words[word]
        return (state & 15 == QUEUED or word in self.leases.early) and state >> GENERATION_AT == ticket & 0xFFFFFFFF

    def _get_aside(self, decode: Decode, lease_from: int) -> Any:
        """Serve what exceptions left, and tickets that came too early once they are due; else ``_NOTHING``."""
        queue = self._queue
        while queue.aside:
            aside = queue.aside[0]  # with no call since it was asked whether there is one
            if aside.before > 0:
                aside.before -= 1
                try:
                    return self._get(_PIPED, decode, lease_from)
                except (Empty, ShutDown):
                    aside.before = 0
                    continue
            if len(queue.aside) > 1:
                self._ring_doorbell_if_polled()
            if not queue.aside or queue.aside[0] is not aside:
                continue
            del queue.aside[0]  # with no call since it was looked at
            process = queue.process
            try:
                return self._serve(aside, decode, lease_from)
            except BaseException as error:
                if process == queue.process:
                    queue.unfinished += ([self.see_to, aside.operation, aside, error],)  # before any call
                    queue.take_up()
                raise
        return _NOTHING

    def _serve(self, aside: Aside, decode: Decode, lease_from: int) -> Any:
        """Bring a get that was set aside to its end.

        Raises:
            SharedMemoryError: whether its place was given back cannot be judged now.
        """
        operation, i, process, words = aside.operation, aside.index, self._queue.process, self.words
        word, given = self.word_of(words[operation.ticket + i]), operation.given + i
        if not self.credits_what_is_made:
            self._give_credit(aside, word, given)  # G2, G3
        message = self.open(word, decode, lease_from)  # G4
        if process != self._queue.process:
            return message  # as in _get
        if self.credits_what_is_made:
            self._give_credit(aside, word, given)  # G2, G3
            if process != self._queue.process:
                return message  # as in _get
        nbytes = words[word + NBYTES]
        if self._has_tasks:
            tasks.count_taken(words, operation.tally)  # J3
        self._let_go(word)  # G5
        words[operation.ticket + i] = 0  # G6; from here on there is no call, as in _get
        words[given] = 0  # G7
        if self._has_tasks:
            words[operation.tally] -= 1  # J4
        words[operation.counters] += 1
        words[operation.counters + 1] = words[operation.counters + 1] + nbytes & _WORD
        operation.waiting -= 1
        if not operation.waiting:
            operation.is_credited = False
            self._spare[operation.size] += (operation,)
        return message

    def _give_credit(self, aside: Aside, word: int, given: int) -> None:
        """Give back the place of a message that was set aside, unless that was done.

        Args:
            word: the index of the state of its block.
            given: the index of the word that is to name the credit.

        Raises:
            SharedMemoryError: whether it was done cannot be judged now. It is no fault of the message.
        """
        if self.credits is None or aside.is_credited or aside.operation.is_credited:
            return
        if not self.words[given]:
            self._give_anew(aside, word, given)
            return
        try:
            self.attachment.recovery.give_credit(Seen(self._queue.handle), given)  # G3
        except InDoubt:
            error = _NoCredit(errno.EMFILE, "no descriptor, or no pipe, is left to finish a get with")
            raise error from None
        aside.is_credited = True

    def _give_anew(self, aside: Aside, word: int, given: int) -> None:
        """Give back a place that cannot have been given back, as no word says so yet. Arguments as above."""
        operation, start = aside.operation, 8 * (given - aside.operation.given)
        self.words[given] = self.words[word + CREDIT] + NEXT_LAP & _WORD  # G2
        self.give([operation.given_buffers[0][start : start + 8]])  # G3
        aside.is_credited = True

    def give(self, credit: Buffers) -> None:
        """Give a credit back."""
        assert self.credits is not None
        self.credits.give(credit)

    def drop_all(self) -> None:
        """Get what is left, of a queue that was shut down, for nobody."""
        words, done = self.words, self._done()
        while True:
            self._end_all_aside(_DROPPED)  # also what came too early
            try:
                if done:
                    self._get(0, _drop)
                    words[done] += 2  # with no call since it was taken
                else:
                    self._get_many(BATCH, 0, _drop, COPY)
            except BeginAnew:
                continue
            except ShutDown:
                return

    def _done(self) -> int:
        """Return the word that counts the tasks which this process has done; 0: nothing is counted."""
        return self._queue.tasks.tally() if self._has_tasks else 0


def _may_pass(error: BaseException) -> bool:
    """Return whether the same message may well be decoded later: there is memory then, or a descriptor, or the caller asks for
    another form of it. Or a handler in C raised, as Ctrl-C's own does; or the message did, by ``sys.exit``, and always will."""
    if isinstance(error, PeerLost):  # what it refers to went with its sender
        return False
    if isinstance(error, OSError) and not isinstance(error, SharedMemoryError):
        return error.errno in _LACKS or not _passed_decoding(error.__traceback__)
    may = (SharedMemoryError, UnsupportedLeaf, RecursionError)  # the last: get was called near the limit
    return isinstance(error, may) or lacks_memory(error) or not isinstance(error, Exception)


def _passed_decoding(trace: TracebackType | None) -> bool:
    """Return whether an exception came while the message was decoded, and not in a system call of the get itself."""
    while trace is not None:
        if trace.tb_frame.f_code is GetEnd.open.__code__:
            return True
        trace = trace.tb_next
    return False


class _NoLease(SharedMemoryError):
    """Only a lease was wanted, and there is none."""


class _NoCredit(SharedMemoryError):
    """A message's place cannot be given back now. That is no fault of the message."""


class BeginAnew(Exception):
    """There was nothing to deliver, but it is not time to wait either.

    Attributes:
        before: how many messages go before those that were taken, as these are early.
    """

    def __init__(self, before: int = 0) -> None:
        self.before = before


def _drop(metadata: bytes, payload: bytearray | Octets) -> None:
    """Drop a message, as a shutdown does."""


_LACKS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}  # what may be there later: descriptors, memory
_PIPED = -1.0  # a deadline: do not wait, and from the pipe only, as something later in the log must not overtake
_NOTHING = object()
_LOST, _UNDECODABLE, _DROPPED, _GIVEN_UP = range(4)  # what becomes of a message that nobody receives
_ZEROS = memoryview(bytes(8 * BATCH)).cast("Q")
