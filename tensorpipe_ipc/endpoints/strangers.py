"""Strangers: how much of an end's time and memory those may take that reach its tcp port and are no peers, or bring nothing.

* Strangers are those that are no peers, and peers out of sight: with greetings, and with what brings nothing until something
  that they say has. They have a fifth of the time together, and more for a moment, as many may come at once. Over that, one
  that is no peer is hung up on unheard, unless it is seen to be an end of this user. It connects anew by itself, until there
  is time for it. A peer's greeting is not heard then: it greets again, if it wants an answer. A peer that says anything else
  then that brings nothing is hung up on with the next.
* A stranger that says more than one thing at a time is hung up on, and one that has said several: those of many connections are
  read so seldom that each seems to come at its own time.
* A peer that keeps the rules says little that brings nothing: greetings, one for each message that an exception has torn. One
  that says much of that at a time is hung up on. What has come before does not count, as all that was in flight comes again
  where a line is cut. Nor do pieces of messages.
* A connection whose end has no more to say by it may still bring what was on its way, and no more.

Over ipc only this user connects, and nobody is hung up on.
"""

from __future__ import annotations

import time
from typing import Any

from tensorpipe_ipc.endpoints.peer import Peer
from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.wire.layout import BULK

__all__ = ["CROWD", "IDLES", "Strangers", "remember"]

CROWD = ProtocolError("more strangers say something than there is a fifth of the time for")
IDLES = ProtocolError("it said too much that brings nothing, and was hung up on")
SHARE = 5  # times as long as it took to hear one, nothing is heard from strangers
_AT_ONCE = 1.0  # seconds of that which are let go by: many may come at a time
IDLE = 16  # messages that bring nothing and that a peer may say at a time, beside four times what may be in flight
_IDLE_AGAIN = 1.0  # seconds
ANSWER_AGAIN = 0.1  # seconds in which one connection is answered once
ANSWERS = 4  # that one connection has in all
REMEMBERED = 1000  # ends that have ended, at most
# Connections: each has its turn, and is forgotten before that where there are more. There are never so many peers.
_CONNECTIONS = 1 << 14


class Strangers:
    """One end's accounts of them, by the routing ids of their connections."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._heard_from = 0.0  # when there is time for somebody who is no peer
        self._answered: dict[bytes, tuple[float, int]] = {}  # when one that is no peer was answered, and how often
        self._idle: dict[bytes, tuple[int, float]] = {}  # what brought nothing, and since when that is counted
        self._to_go: dict[bytes, None] = {}  # who is hung up on if anything but a goodbye comes next
        self._over: dict[bytes, int] = {}  # what was said since by connections whose ends have no more to say by them

    def is_over(self, routing: bytes) -> bool:
        """Return whether the end of a connection has ended, or has another connection now."""
        return routing in self._over

    def end(self, routing: bytes) -> None:
        """Note that the end of a connection has no more to say by it."""
        remember(self._over, routing, 0, _CONNECTIONS)

    def says_too_much(self, routing: bytes, nbytes: int) -> bool:
        """Count what came by a connection that is over. Return whether that is more than may have been on its way.

        Of a large message's pieces, that is any number. The connection may have ended, and its descriptor be that of the end's
        next one.
        """
        self._over[routing] += nbytes < BULK
        return self._over[routing] > IDLE + 4 * self._window

    def was_answered(self, routing: bytes) -> bool:
        """Return whether one that is no peer was answered just now, or several times: it may ask for ever, and never read."""
        last, count = self._answered.get(routing, (0.0, 0))
        return count >= ANSWERS or time.monotonic() - last < ANSWER_AGAIN

    def note_answered(self, routing: bytes) -> None:
        """Note that one that is no peer was answered, or need not be."""
        last, count = self._answered.pop(routing, (0.0, 0))
        now = time.monotonic()
        remember(self._answered, routing, (now, count + (now - last > ANSWER_AGAIN)), _CONNECTIONS)

    def are_a_crowd(self) -> bool:
        """Return whether there is no time for a stranger now."""
        return time.monotonic() < self._heard_from

    def took(self, seconds: float) -> None:
        """Note how long it took to hear one."""
        now = time.monotonic()
        due = max(self._heard_from, now - _AT_ONCE) + SHARE * seconds
        self._heard_from = min(due, now + _AT_ONCE)  # peers among them are heard all the same

    def have_go(self, routing: bytes) -> None:
        """Have a peer hung up on with its next message. What it has said by now may be its last, but for its goodbye."""
        remember(self._to_go, routing, None, _CONNECTIONS)

    def is_to_go(self, routing: bytes) -> bool:
        """Return whether a peer is to be hung up on."""
        return routing in self._to_go

    def is_idle_too_long(self, peer: Peer) -> bool:
        """Count a peer's message that brought nothing. Return whether it says too much of that at a time."""
        if not peer.settled and peer.is_seen():  # it asks until there is a queue for it
            return False
        now = time.monotonic()
        count, since = self._idle.get(peer.routing, (0, now))
        count, since = (1, now) if now - since > _IDLE_AGAIN else (count + 1, since)
        remember(self._idle, peer.routing, (count, since), _CONNECTIONS)
        if count <= IDLE:
            return False
        window = min(self._window, peer.hello.window)
        return count > IDLE + 4 * (window if peer.is_seen() else min(window, peer.brought))


def remember(known: dict[Any, Any], one: Any, value: Any = None, most: int = REMEMBERED) -> None:
    """Add one to those of whom the last ``most`` are known."""
    known[one] = value
    while len(known) > most:
        del known[next(iter(known))]
