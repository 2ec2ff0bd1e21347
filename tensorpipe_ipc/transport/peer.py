"""Peer: one other end, as an end of this process knows it."""

from __future__ import annotations

import time

from tensorpipe_ipc.process import Identity, is_alive
from tensorpipe_ipc.transport.rendezvous import PairQueue
from tensorpipe_ipc.wire.header import Hello

__all__ = ["Peer"]


class Peer:
    """One other end, as this end knows it.

    Attributes:
        routing: its routing id.
        hello: what it said of itself.
        number: what a producer calls it in its credit pipe.
        credit_fd: the producer's credit pipe, opened by a consumer; -1 if it has none.
        sent: sequence of the last message sent to it (by a producer).
        taken: sequence of the last message taken: by it, as it told a producer; from it, by a consumer.
        heard: when something last came from it, by time.monotonic().
        dead_at: when its process was first seen dead.
        left: how it left, "" while it is there: "said goodbye", "vanished".
        queue: in shared memory, that messages go through; None: they go in frames. ``sent`` and ``taken`` count frames only.
        settled: whether both ends know which of the two it is. It stays so.
        why_not: why there is no queue.
        missed: the token of an offer whose queue was not to be found.
        room: places in the queue that a producer knows to be free, or messages that a consumer knows to be there; there may
            be more, as nobody else takes them.
    """

    __slots__ = (
        "credit_fd",
        "dead_at",
        "heard",
        "hello",
        "left",
        "left_at",
        "missed",
        "number",
        "queue",
        "room",
        "routing",
        "sent",
        "settled",
        "taken",
        "why_not",
    )

    def __init__(self, routing: bytes, hello: Hello) -> None:
        self.routing = routing
        self.hello = hello
        self.number = 0
        self.credit_fd = -1
        self.sent = 0
        self.taken = 0
        self.heard = time.monotonic()
        self.dead_at = 0.0
        self.left = ""
        self.left_at = 0.0
        self.queue: PairQueue | None = None
        self.settled = False
        self.why_not = ""
        self.missed = 0
        self.room = 0

    @property
    def identity(self) -> Identity:
        """The process it is in."""
        return self.hello.identity

    def leave(self, how: str) -> None:
        """Note that it left, and when."""
        self.left, self.left_at = how, time.monotonic()

    def __str__(self) -> str:
        now = time.monotonic()
        if self.left:
            return f"{self.hello.role} {self.identity} {self.left} {now - self.left_at:.1f} s ago"
        state = "alive" if is_alive(self.identity) else "dead"
        return f"{self.hello.role} {self.identity} ({state}, last heard from {now - self.heard:.1f} s ago)"
