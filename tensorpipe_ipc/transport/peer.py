"""Peer: one other end, as an end of this process knows it."""

from __future__ import annotations

import time
from collections import deque

from tensorpipe_ipc.process import Identity, identity, is_alive
from tensorpipe_ipc.transport.assembly import Assembly
from tensorpipe_ipc.transport.rendezvous import PairQueue
from tensorpipe_ipc.transport.unacknowledged import Kept
from tensorpipe_ipc.wire.header import Hello

__all__ = ["PATIENCE", "Peer"]

_SILENCE = 2.0  # seconds without a sign of life after which a connection is given up (zmq_sockets)
PATIENCE = 60.0  # seconds without a connection after which a process that cannot be seen from here counts as gone


class Peer:
    """One other end, as this end knows it.

    Attributes:
        routing: its routing id.
        hello: what it said of itself.
        sent: sequence of the last message sent to it (by a producer).
        taken: sequence of the last message taken: by it, as it told a producer; from it, by a consumer.
        heard: when something last came from it, by time.monotonic().
        dead_at: when its process was first seen dead.
        away_at: when its connection was first seen to have ended, until it is heard of again; 0 while it is not.
        kept: what was sent to it over tcp and is not known to be taken, oldest first.
        round: how often a consumer asked this peer to send what it misses.
        served: the other end's ``round`` that was dealt with last.
        began: ``taken`` when the two met.
        asked_at: when a consumer asked because of a gap, until the gap is filled.
        assembly: the large message that a consumer is getting from it in pieces.
        left: how it left, "" while it is there: "said goodbye", "vanished".
        queue: in shared memory, that messages go through; None: they go in frames. ``sent`` and ``taken`` count frames only.
        by_file: whether a connector met it by the rendezvous file, and it has not said WELCOME to that.
        settled: whether both ends know which of the two it is. It stays so.
        why_not: why there is no queue.
        missed: the token of an offer whose queue was not to be found.
        turn: when a producer last chose it, of all the times that it chose from several.
        room: places in the queue that a producer knows to be free, or messages that a consumer knows to be there; there may
            be more, as nobody else takes them.
    """

    __slots__ = (
        "asked_at",
        "assembly",
        "away_at",
        "began",
        "by_file",
        "dead_at",
        "heard",
        "hello",
        "kept",
        "left",
        "left_at",
        "missed",
        "queue",
        "room",
        "round",
        "routing",
        "sent",
        "served",
        "settled",
        "taken",
        "turn",
        "why_not",
    )

    def __init__(self, routing: bytes, hello: Hello) -> None:
        self.routing = routing
        self.hello = hello
        self.sent = 0
        self.taken = 0
        self.heard = time.monotonic()
        self.dead_at = 0.0
        self.away_at = 0.0
        self.kept: deque[Kept] = deque()
        self.round = 1
        self.served = hello.round
        self.began = 0
        self.asked_at = 0.0
        self.assembly: Assembly | None = None
        self.left = ""
        self.left_at = 0.0
        self.queue: PairQueue | None = None
        self.by_file = False
        self.settled = False
        self.why_not = ""
        self.missed = 0
        self.turn = 0
        self.room = 0

    @property
    def identity(self) -> Identity:
        """The process it is in."""
        return self.hello.identity

    def is_still(self, hello: Hello) -> bool:
        """Whether it is the same end that says so."""
        return self.hello.end == hello.end and self.hello.identity == hello.identity

    @property
    def resends(self) -> bool:
        """Whether it is a producer that sends again what a connection swallowed."""
        return self.hello.round > 0

    @property
    def is_near(self) -> bool:
        """Whether it is on this host."""
        return bool(self.identity.boot) and self.identity.boot == identity().boot

    def may_return(self) -> bool:
        """Whether it is to be waited for, now that its connection has ended. Noted is since when.

        A process that can be seen is waited for while it lives, stopped or not. One that cannot has ``PATIENCE`` seconds.
        """
        now = time.monotonic()
        self.away_at = self.away_at or now
        if self.identity.same_namespace(identity()):
            return is_alive(self.identity)
        return now - self.away_at < PATIENCE

    def heard_of(self) -> None:
        """Note that something came from it."""
        self.heard, self.away_at = time.monotonic(), 0.0

    def leave(self, how: str) -> None:
        """Note that it left, and when."""
        self.left, self.left_at = how, time.monotonic()

    def __str__(self) -> str:
        now = time.monotonic()
        if self.left:
            return f"{self.hello.role} {self.identity} {self.left} {now - self.left_at:.1f} s ago"
        state = "alive" if is_alive(self.identity) else "dead"
        if self.away_at:
            since = max(self.heard, self.away_at - _SILENCE)  # of one with nothing to say, ZeroMQ heard a while longer
            state = state if self.identity.same_namespace(identity()) else "out of reach"
            return f"{self.hello.role} {self.identity} ({state}, not heard of for {now - since:.1f} s)"
        if self.by_file:
            return f"{self.hello.role} {self.identity} ({state}, met by its file, not heard from yet)"
        return f"{self.hello.role} {self.identity} ({state}, last heard from {now - self.heard:.1f} s ago)"
