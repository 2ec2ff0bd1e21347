"""Participant: an end's use of its conversation, as far as a producer's and a consumer's are one."""

from __future__ import annotations

import time
from collections.abc import Callable

from tensorpipe_ipc.endpoints.conversation import Conversation, Opening
from tensorpipe_ipc.endpoints.events import Arrived, Event
from tensorpipe_ipc.endpoints.peer import Peer, ending_by
from tensorpipe_ipc.libc import trim_malloc
from tensorpipe_ipc.memory.arena import IDLE
from tensorpipe_ipc.wire.header import Ending, failed

__all__ = ["Participant"]

_NEXT_TO_NOTHING = 1 << 16  # bytes, of what the ends say about themselves
STALE = 0.01  # seconds; a producer in full swing looks for credits after it has sent, which is off the message's way
_AT_ONCE = 0.02  # seconds that one call deals with what comes, beyond its own deadline; there may be no end of it
_CLAIMANTS = 0.02  # seconds that a closing binder hears those that have claimed a queue
_WAITING = 0.5  # seconds that a closing producer hears consumers that wait for it, which take some milliseconds each
_KNOCKING = 1.0  # seconds that it first reads who has knocked meanwhile; that takes 20 us each
_NOT_FOUND_YET = 0.25  # seconds from its bind that a producer that fails hears: who waits tries each 0.2 s
_NO_KEY_SHOWN_YET = 0.35  # and with keys a handshake comes first
_STEP = 0.01  # seconds of waiting for what may come


class Participant:
    """A producer or a consumer, as its conversation's owner. ``Sender`` and ``Receiver`` handle the events.

    Attributes:
        conversation: with the other ends.
        socket, peers: the conversation's.
        ending: how this end ends, when it does.
        lost: messages that were in flight when a peer left, or that a connection swallowed.
    """

    role = ""

    def __init__(self, opening: Opening) -> None:
        """Nothing is opened yet."""
        self.conversation = Conversation(self, opening)  # type: ignore[arg-type]
        self.socket, self.peers = self.conversation.socket, self.conversation.peers
        self.window, self.keeps = opening.window, self.conversation.keeps
        self.ending = Ending()
        self.lost = 0
        self._drained = 0.0
        self._tended = 0  # after how many looks around
        self._idle_from, self._carried_then = 0.0, 0

    @property
    def endpoint(self) -> str:
        """The address, with the port that was chosen if it was left open."""
        return self.conversation.endpoint

    def _handle(self, event: Event) -> Arrived | None:
        """Deal with an event. May be cut short anywhere by an exception, and called again with it.

        Returns:
            A message that is the next one, and stays the first event until it is taken.

        Raises:
            ProtocolError: the message breaks a rule.
        """
        raise NotImplementedError

    def _tend(self) -> None:
        """Do what is due now and then, after a look who is still there."""
        raise NotImplementedError

    def take_leave(self, linger: float) -> tuple[str, float]:
        """Wait up to ``linger`` seconds until all is taken, and say goodbye.

        Returns:
            What was not taken, in words, and how long the goodbye may take to leave.
        """
        raise NotImplementedError

    def told_losses(self) -> tuple[str, list[Peer]]:
        """Return who left without having taken what was put to it, in words, which nobody was told of; it is told by that."""
        return "", []

    def _let_go(self) -> None:
        """Let go of the queues."""
        raise NotImplementedError

    def close(self, linger: float) -> None:
        """Close the socket, and let go of all. May be cut short anywhere by an exception, and called again."""
        self.conversation.has_parted = True
        try:
            self.conversation.transport()  # is told as it last was
            self._let_go()
        finally:
            self.conversation.disconnect(linger, self.ending)

    def pump(self, timeout: float) -> Arrived | None:
        """Wait for one message, up to ``timeout`` seconds and a slice, and deal with it.

        Returns:
            It, again until it is taken, where it is for the user; None for all else, and for nothing.
        """
        self.conversation.hear(timeout)
        arrived = self._handle_events()
        while self.conversation.hears_again and not self.conversation.events:
            self.conversation.hear(0)
            arrived = self._handle_events()
        return arrived

    def _handle_events(self) -> Arrived | None:
        conversation, events = self.conversation, self.conversation.events
        while events:
            event, arrived = events[0], None
            try:
                arrived = self._handle(event)
            except Exception as error:
                conversation.reject_or_raise(error, getattr(event, "peer", None))
            if arrived is not None:
                return arrived
            if events and events[0] is event:
                events.popleft()
        conversation.heard()
        if conversation.looks != self._tended:
            self._tended = conversation.looks
            self._tend()
            self._mind_idle()
        return None

    def ensure_greeted(self) -> None:
        """Have a connector greet a binder that is there now."""
        self.conversation.greeting.ensure(0)
        self._handle_events()

    def drain(self, *, in_passing: bool = False, due: int = 1) -> None:
        """Deal with what has arrived, and do not wait; with no more than can be dealt with at once.

        Args:
            in_passing: with ``due`` messages, or for a fifth of the time on the whole: there may be no end of what comes.
            due: how many messages are wanted.
        """
        self.ensure_greeted()
        began = now = time.monotonic()
        enough = began + (now - self._drained) / 4 if in_passing else began + _AT_ONCE
        while now < began + _AT_ONCE and (due > 0 or now < enough) and self._has_something():
            self.pump(0)
            due, now = due - 1, time.monotonic()
        self._drained = time.monotonic()

    def _has_something(self) -> bool:
        return bool(self.conversation.events) or self.socket.has_incoming()

    def is_stale(self) -> bool:
        """Return whether it is long ago that the last was drained: somebody may have said goodbye since."""
        return time.monotonic() - self._drained > STALE

    def is_late(self, deadline: float | None) -> bool:
        """Return whether a deadline is over, and so is the time for what has come meanwhile."""
        return deadline is not None and time.monotonic() > deadline + _AT_ONCE

    def look_around(self, *, at_once: bool = False) -> None:
        """See who is still there; see ``Conversation.look_around``."""
        self.conversation.look_around(at_once=at_once)
        self._handle_events()

    def _mind_idle(self) -> None:
        """Give back what lies ready for messages in frames, as long as next to nothing came or went so for ``IDLE`` seconds.

        What malloc keeps only ``trim`` gives back: that may take a second, in a process with much in small pieces.
        """
        now, carried = time.monotonic(), self._carried()
        if carried - self._carried_then > _NEXT_TO_NOTHING:
            self._idle_from, self._carried_then = now + IDLE, carried
        elif now >= self._idle_from:
            self._drop_idle()

    def trim(self) -> int:
        """Give back all memory that lies ready, also what malloc keeps. Return its bytes, malloc's not counted."""
        nbytes = self._drop_idle() + self.conversation.trim()
        trim_malloc()
        return nbytes

    def give_back_idle(self) -> int:
        """Give back the memory that lies ready for further messages, where it is short. Return the number of bytes."""
        return self._drop_idle() + self.conversation.trim()

    def _drop_idle(self) -> int:
        """Let go of what lies ready for messages in frames. Return the number of bytes."""
        raise NotImplementedError

    def _carried(self) -> int:
        """Return how many bytes came and went by the socket, ever, as far as memory was kept for them."""
        return self.conversation.nbytes

    def look_now_and_then(self) -> None:
        """See who is still there, where that was not done for a while."""
        self.conversation.look_now_and_then()
        if self.conversation.events:
            self._handle_events()

    def raise_refusal(self) -> None:
        """Raise what the binder refused this end with, if it did, and is still there. It is asked again.

        Raises:
            Refused: the binder does not take this end in.
            VersionMismatch: the binder speaks another version.
        """
        conversation = self.conversation
        if conversation.refusal is not None:
            conversation.greeting.say_if_due()
            self.drain()
        if conversation.refusal is not None and not self.socket.reaches(conversation.greeting.routing):
            conversation.refusal = None  # who said so is gone: the next one may let this end in
            conversation.publish()
        if conversation.refusal is not None:
            raise conversation.refusal

    def end_by(self, error: BaseException | None) -> None:
        """Take down how this end ends: its ``with`` block was left by an exception, or by none."""
        if error is not None:  # it stays so where another exception comes while its text is asked for
            self.ending = failed(type(error).__name__)
        self.ending = ending_by(error)

    def say_goodbye(self) -> bool:
        """Hear the connectors that wait for this end's answer, and say goodbye. Return whether anybody was told.

        Consumers may have waited since before this end's program was busy. Producers that have said HELLO to a consumer which
        leaves meet the next one, but for those that have claimed a queue.
        """
        try:
            self._hear_who_waits()
        finally:  # an exception of a signal's handler costs those who were not heard, and no other
            told = self.conversation.say_goodbye(self.ending)
        return told

    def _hear_who_waits(self) -> None:
        conversation, socket = self.conversation, self.socket
        if self.role == "producer":
            if socket.binds and self.ending.failure:
                found = _NO_KEY_SHOWN_YET if conversation.has_keys else _NOT_FOUND_YET
                self._hear_until(conversation.opened_at + found, lambda: True)
            self._hear_until(time.monotonic() + _KNOCKING, socket.is_behind)
            self._hear_until(
                time.monotonic() + _WAITING, lambda: self._has_something() or socket.has_just_let_somebody_in()
            )
            if not socket.binds:  # the next binder is to know of this end, if its own is dead
                self.look_around(at_once=True)
                conversation.part_from_the_gone()
                self._handle_events()
        conversation.withdraw()
        self._hear_until(
            time.monotonic() + _CLAIMANTS, lambda: conversation.standby.any_claimed and self._has_something()
        )

    def _hear_until(self, deadline: float, is_needed: Callable[[], bool]) -> None:
        while is_needed() and (left := deadline - time.monotonic()) > 0:
            if self.pump(min(left, _STEP)) is not None:  # nobody takes it any more
                self.conversation.events.popleft()
                self.conversation.heard()
