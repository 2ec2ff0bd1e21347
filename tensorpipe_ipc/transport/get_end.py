"""The end that gets: ticket -> content -> credit -> HELD or FREE. Its steps, G1 to G7, are numbered in undertaker.py.

An exception (a signal handler's, at any point) leaves what was taken on record. It is set aside, for the next get.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

from tensorpipe_ipc.errors import Empty, ProtocolError, SharedMemoryError, ShutDown
from tensorpipe_ipc.memory.arena import (
    CREDIT,
    GENERATION_AT,
    GENERATIONS,
    HEADER,
    HOLDER,
    METADATA,
    NBYTES,
    QUEUED,
    SMALLEST,
)
from tensorpipe_ipc.memory.leases import Octets
from tensorpipe_ipc.memory.rows import BATCH, GET, Operation
from tensorpipe_ipc.transport import tasks
from tensorpipe_ipc.transport.queue_end import FORWARDED, METADATA_AT, PAYLOAD_AT, QueueEnd
from tensorpipe_ipc.transport.token_pipe import BELL, Buffers
from tensorpipe_ipc.transport.undertaker import NEXT_LAP, InDoubt

__all__ = ["COPY", "LEASE", "LEASE_FROM", "Decode", "GetEnd", "Message"]

LEASE_FROM = 32 << 10  # bytes; a copy of 16 KiB costs what a lease does, and a lease pins a block
COPY, LEASE = 1 << 62, 1  # in its place: never a lease; always one, or an error


class Message(NamedTuple):
    """What get returns unless it is told how to decode: the content is the receiver's, writable."""

    metadata: bytes
    payload: bytearray | Octets  # a copy, or an array whose death gives the block back


Decode = Callable[[bytes, "bytearray | Octets"], Any]


class GetEnd(QueueEnd):
    """What a consumer does with a queue.

    Attributes:
        spin: seconds for which a get looks for a message before it sleeps.
    """

    spin, _spins = 0.0, 0

    def _forget(self) -> None:
        super()._forget()
        self._getting: list[Operation] = []  # spare ones
        self._aside: deque[_Aside] = deque()  # gets that are to be served before others
        self._owed: list[_Aside] = []  # gets that were served, and are to be completed
        self._failed = 0  # the ticket whose get ended in an exception

    @property
    def holds_back(self) -> bool:
        """Whether an interrupted get left something that the next one serves. The descriptor does not tell of it."""
        return bool(self._aside)

    def get(self, timeout: float | None = None, decode: Decode = Message, lease_from: int = LEASE_FROM) -> Any:
        """Take the next message.

        Args:
            timeout: seconds to wait for one; None: for ever; 0: not at all.
            decode: makes what is returned, of metadata and payload. It may be called again with the same message, after
                an exception: that may have been a signal handler's, so the message is kept for the next get. When that
                ends in an exception too, the message is dropped.
            lease_from: bytes of payload from which on it is a lease; or COPY, or LEASE.

        Raises:
            Empty: none came in time.
            ShutDown: the queue was shut down, and holds nothing more.
            SharedMemoryError: LEASE was asked for, and this process has as much under lease as it may. The message is
                the next that this process gets.
        """
        while True:
            try:
                if self._aside:
                    return self._get_aside(decode, lease_from)
                return self._get(timeout, decode, lease_from)
            except _Again:
                continue
            except _NoLease:
                self._failed = 0  # it is no fault of the message
                raise

    def _get(self, timeout: float | None, decode: Decode, lease_from: int = LEASE_FROM) -> Any:
        """G1 to G7, in one function, so that one handler sees every exception together with all that is known."""
        try:
            operation = self._getting.pop()
        except IndexError:
            operation = self._operation(GET)
        message: Any = _NOTHING
        try:
            words = self.words
            if self.spin and self._spin(operation.ticket_buffers):
                pass
            elif timeout is None and not words[self._watch]:
                os.readv(self._read_end, operation.ticket_buffers)  # G1
            else:
                self._wait(operation, operation.ticket_buffers, timeout, decode)
            ticket = words[operation.ticket]
            if ticket == BELL:
                words[operation.ticket] = 0
                raise _Again
            word = self._word_of(ticket)
            if self.credits is not None:
                words[operation.given] = words[word + CREDIT] + NEXT_LAP  # G2
                self.credits.give(operation.given_buffers)  # G3
            message = self._open(word, decode, lease_from)  # G4
            self._let_go(word)  # G5
            if self._has_tasks:
                tasks.count_taken(words, operation.tally)  # J3
            words[operation.ticket] = 0  # G6
            words[operation.given] = 0  # G7
            if self._has_tasks:
                tasks.settle_taken(words, operation.tally)  # J4
            counted = operation.messages = operation.messages + 1
            words[operation.counters] = counted
            counted = operation.nbytes = operation.nbytes + words[word + NBYTES]
            words[operation.counters + 1] = counted
            self._getting.append(operation)
            return message
        except BaseException:
            self._interrupted(operation, [message])
            raise

    def get_many(self, most: int, timeout: float | None = None, decode: Decode = Message) -> list[Any]:
        """Take what is there, with one system call, and at least one message: wait for that as ``get`` does.

        Args:
            most: at most so many, and at most 64.
            timeout: seconds to wait for the first one; None: for ever; 0: not at all.
            decode: makes each of what is returned.

        Raises:
            As ``get`` does.
        """
        if self._aside or self._has_tasks or most == 1:
            return [self.get(timeout, decode)]
        while True:
            with contextlib.suppress(_Again):
                return self._get_many(min(most, BATCH), timeout, decode)
            if self._aside:
                return [self.get(timeout, decode)]

    def _get_many(self, most: int, timeout: float | None, decode: Decode) -> list[Any]:
        operation = self._batch(GET)
        messages = list[Any]()
        try:
            words = self.words
            buffers = operation.ticket_buffers if most == BATCH else [operation.ticket_buffers[0][: 8 * most]]
            if timeout is None and not words[self._watch]:
                count = os.readv(self._read_end, buffers) >> 3  # G1
            else:
                count = self._wait(operation, buffers, timeout, decode)
            tickets = words[operation.ticket : operation.ticket + count].tolist()
            if BELL in tickets:
                raise _Again  # each is served by itself
            blocks = [self._word_of(ticket) for ticket in tickets]
            if self.credits is not None:
                for i, word in enumerate(blocks):
                    words[operation.given + i] = words[word + CREDIT] + NEXT_LAP  # G2
                self.credits.give([operation.given_buffers[0][: 8 * count]])  # G3
            for word in blocks:
                messages.append(self._open(word, decode))  # G4
            for word in blocks:
                self._let_go(word)  # G5
            for i in range(count):
                words[operation.ticket + i] = 0  # G6
            if self.credits is not None:
                for i in range(count):
                    words[operation.given + i] = 0  # G7
            operation.messages += count
            operation.nbytes += sum(words[word + NBYTES] for word in blocks)
            words[operation.counters], words[operation.counters + 1] = operation.messages, operation.nbytes
            self._batches[GET].append(operation)
            return messages
        except BaseException:
            self._interrupted(operation, messages)
            raise

    def _wait(self, operation: Operation, buffers: Buffers, timeout: float | None, decode: Decode) -> int:
        if self._owed:
            self._pay()
        if timeout == _PIPED:
            taken = self.tickets.take_piped(buffers)
            if self.words[operation.ticket] == BELL:
                self._pass_on(self.tickets)
        elif self.words[self.record.shut]:
            taken = self._take_after_shutdown(operation, buffers, decode)
        else:
            taken = self.tickets.take(buffers, None if timeout is None else monotonic() + timeout)
        if taken < 0:
            self._set_aside(operation, [], self.tickets.unread())
            raise _Again
        if not taken:
            raise Empty(f"no message within {timeout} seconds")
        return taken

    def _spin(self, buffers: Buffers) -> bool:
        """Look for a ticket again and again before going to sleep, which saves both sides the wake-up.

        Learned: after eight spins in vain, one get in 64 tries again.
        """
        self._spins += 1
        if self._spins > 8 and self._spins & 63 or self.words[self._watch]:
            return False
        read, own_read, until = os.readv, self.tickets.own_read, monotonic() + self.spin
        while monotonic() < until:
            try:
                read(own_read, buffers)
            except BlockingIOError:
                continue
            self._spins = 0
            return True
        return False

    def _take_after_shutdown(self, operation: Operation, buffers: Buffers, decode: Decode) -> int:
        """What is left, but no bell: the last one to find nothing passes it on, so that all who wait see the end."""
        words = self.words
        while decode is _drop or not words[self.record.dropped]:
            taken = self.tickets.take_nowait(buffers)
            if not taken:
                break
            if words[operation.ticket] != BELL:
                return taken
            words[operation.ticket] = 0
            if any(words[operation.ticket + 1 : operation.ticket + abs(taken)]):
                raise _Again  # each is served by itself
        self._pass_on(self.tickets)
        raise ShutDown("the queue was shut down, and nothing is left in it")

    def _word_of(self, ticket: int) -> int:
        """Index of the state of the block that a ticket names."""
        word = ticket >> 32 << SMALLEST - 3
        state = self.words[word]
        if state & 15 != QUEUED or state >> GENERATION_AT != ticket & 0xFFFFFFFF:
            raise ProtocolError(f"ticket {ticket:#x} names a block whose state is {state:#x}")
        return word

    def _open(self, word: int, decode: Decode, lease_from: int = LEASE_FROM) -> Any:
        words, block = self.words, word << 3
        nbytes, length = words[word + NBYTES], words[word + METADATA] >> 32
        start = block + HEADER
        if length < FORWARDED:
            metadata = self.memory[start : start + length]
            start += length + 63 & -64
        else:
            at, start = block + words[word + METADATA_AT], block + words[word + PAYLOAD_AT]
            metadata = self.memory[at : at + length - FORWARDED]
        if nbytes < LEASE_FROM and nbytes < lease_from:
            return decode(metadata, bytearray(self._view[start : start + nbytes]))
        array = self.leases.lease(block, start, nbytes) if nbytes >= lease_from else None
        if array is None and lease_from == LEASE:
            raise _NoLease(
                errno.ENOSPC,
                f"no lease for a message of {nbytes} bytes: this process may have {self.leases.budget} bytes under lease. "
                "Let go of tensors, or get a copy",
            )
        return decode(metadata, self.leases.octets[start : start + nbytes].copy() if array is None else array)

    def _let_go(self, word: int) -> None:
        """The block is HELD if the message lies on it, else FREE."""
        anchor = self.leases.live.get(word)
        self.words[word] = self.words[word] & ~HOLDER if anchor is None else anchor.held

    def _interrupted(self, operation: Operation, messages: list[Any]) -> None:
        """An exception ended a get: keep what it had. Nothing that was taken is lost."""
        if not self._is_aside(operation):
            self._set_aside(operation, messages)

    def _set_aside(self, operation: Operation, messages: list[Any], before: int = 0) -> None:
        """Have later gets serve what stands in an operation.

        Args:
            messages: those of its tickets that were decoded, from the first on.
            before: how many others go first.
        """
        words, left = self.words, list[_Aside]()
        for i in range(operation.size):
            ticket, message = words[operation.ticket + i], messages[i] if i < len(messages) else _NOTHING
            if ticket == BELL:
                words[operation.ticket + i] = 0
                self._pass_on(self.tickets)
            elif ticket:
                left.append(_Aside(operation, i, message, 0))
            elif message is not _NOTHING:
                left.append(_Aside(None, 0, message, 0))
        if before:
            left[0].before = before
            self._aside.extend(left)
        else:
            for aside in left:
                if aside.message is _NOTHING:  # the one that was being decoded
                    aside.message = self._unless_again(words[operation.ticket + aside.index])
                    break
            self._aside.extendleft(reversed(left))
        self._put_away(operation)

    def _unless_again(self, ticket: int) -> Any:
        """A get of this ticket ended in an exception; when that was so before, too, its message is dropped."""
        before, self._failed = self._failed, ticket
        return _DROPPED if ticket == before else _NOTHING

    def _is_aside(self, operation: Operation) -> bool:
        return any(operation is aside.operation for aside in (*self._aside, *self._owed))

    def _put_away(self, operation: Operation) -> None:
        """For the next get, unless something is left in it."""
        spare = self._getting if operation.size == 1 else self._batches[GET]
        if not self._is_aside(operation) and not any(operation is other for other in spare):
            spare.append(operation)

    def _get_aside(self, decode: Decode, lease_from: int) -> Any:
        """Serve what an interrupted get left, or a ticket that came too early once it is due."""
        for aside in list(self._aside)[:1]:
            if aside.before > 0:
                aside.before -= 1
                with contextlib.suppress(Empty, ShutDown):
                    return self._get(_PIPED, decode, lease_from)
                aside.before = 0
        try:
            for taken in iter(self._aside.popleft, None):  # noqa: B007, see Note [Taking from a list]
                break
        except IndexError:  # another thread serves it
            raise _Again from None
        return self._serve(taken, decode, lease_from)

    def _serve(self, aside: _Aside, decode: Decode, lease_from: int) -> Any:
        operation, message = aside.operation, aside.message
        try:
            if operation is not None:
                ticket = self.words[operation.ticket + aside.index]
                if ticket and message is _NOTHING:
                    message = self._open(self._word_of(ticket), decode, lease_from)
                try:
                    self._complete(operation, aside.index)
                except InDoubt:
                    self._owed.append(_Aside(operation, aside.index, _DROPPED, 0))
                self._put_away(operation)
            if message is _DROPPED:
                raise _Again
            if operation is not None:
                operation.messages += 1
                self.words[operation.counters] = operation.messages
            return message
        except _Again:
            raise
        except BaseException:
            if operation is not None and message is _NOTHING:
                message = self._unless_again(self.words[operation.ticket + aside.index])
            self._aside.appendleft(_Aside(operation, aside.index, message, 0))
            raise

    def _complete(self, operation: Operation, index: int) -> None:
        """G2 to G7 of a ticket but for G4, whichever of them were done."""
        words, ticket_word, given_word = self.words, operation.ticket + index, operation.given + index
        ticket = words[ticket_word]
        if ticket:
            word = ticket >> 32 << SMALLEST - 3
            if self.credits is not None:
                words[given_word] = words[given_word] or words[word + CREDIT] + NEXT_LAP
                self.undertaker.give_credit(self._ends, self.number, given_word)
            if words[word] & 15 == QUEUED and words[word] >> GENERATION_AT == ticket % GENERATIONS:
                self._let_go(word)
            if self._has_tasks:
                tasks.count_taken(words, operation.tally)
        words[ticket_word] = 0
        words[given_word] = 0
        if self._has_tasks:
            tasks.settle_taken(words, operation.tally)

    def _pay(self) -> None:
        """Complete gets whose messages were delivered before it could be found out whether their credits were given."""
        for aside in list(self._owed):
            operation = aside.operation
            assert operation is not None
            with contextlib.suppress(InDoubt):
                self._complete(operation, aside.index)
                self._owed.remove(aside)
                self._put_away(operation)

    def drop_all(self) -> None:
        """Get what is left, of a queue that was shut down, for nobody."""
        while True:
            try:
                self._get(0, _drop)
                if self._has_tasks:
                    self.tasks.done()
            except _Again:
                continue
            except ShutDown:
                return


class _NoLease(SharedMemoryError):
    """Only a lease was wanted, and there is none."""


class _Again(Exception):
    """There was nothing to deliver, but it is not time to wait either."""


class _Aside:
    """A get that was not completed, to be served by a later one."""

    __slots__ = ("before", "index", "message", "operation")

    def __init__(self, operation: Operation | None, index: int, message: Any, before: int) -> None:
        self.operation, self.index = operation, index  # None: nothing is on record any more
        self.message = message
        self.before = before  # how many others go first


def _drop(metadata: bytes, payload: bytearray | Octets) -> None:
    """What a shutdown makes of a message."""


_PIPED = -1.0  # a timeout: not at all, and from the pipe only, as something later in the log must not overtake
_NOTHING, _DROPPED = object(), object()

# Note [Taking from a list]: `for x in iter(values.pop, None): break` takes an element with no moment at which a signal
# handler could raise between removal and assignment: CPython (3.11 on) looks for signals after calls, and this is none.
# The ordinary `pop` on the way of every put and get may lose an operation so, but only one with no token in it.
