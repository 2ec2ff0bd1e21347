"""Peer: one other end, as an end of this process knows it."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import Any

from tensorpipe_ipc.compiled import CompiledPath
from tensorpipe_ipc.endpoints.presence import Sight
from tensorpipe_ipc.endpoints.rendezvous import PairQueue
from tensorpipe_ipc.errors import EndOfStream, PeerLost, StreamFailed
from tensorpipe_ipc.process import Identity
from tensorpipe_ipc.wire.header import Ending, Hello, failed

__all__ = ["How", "Peer", "ending_by", "lost_or_failed", "to_leave_out"]


class How(enum.Enum):
    """A way in which a peer left."""

    GOODBYE = "said goodbye"
    FAILED = "failed"
    LOST = "vanished"
    REFUSED = "was refused"
    REFUSED_US = "refused this end"


class Peer:
    """One other end, as this end knows it. ``ConsumerPeer`` and ``ProducerPeer`` add what is a role's.

    Attributes:
        routing: the routing id of its connection.
        hello: what it said of itself.
        taken: sequence of the last message taken: by it, as it told a producer; from it, by a consumer.
        heard: when something last came from it, by time.monotonic().
        process: the process that made its connection, as the kernel says, to a binder over ipc; 0: not known.
        gone_at: when it was first seen to be gone, while more may have been on its way.
        unread_from: how many messages had come, of all peers, when it was first seen to have ended, or lost its connection,
            since something last came from it; 0 while it is not.
        away_at: when its connection was first seen to have ended, until it is heard of again; 0 while it is not.
        sight: what is seen of its presence.
        left: how it left; None while it is there.
        ending: how it says that it ended.
        last_position: how far it had come in frames when it left, as it says; None where it did not say so.
        never_came: messages that it had sent, and that will not come.
        queue: in shared memory, that messages go through; None: they go in frames.
        compiled: what the queue's puts and gets ask first, once this end uses it.
        by_file: whether a connector has claimed one of its queues, and it has not said WELCOME to that.
        settled: whether both ends know if messages go through a queue. It stays so.
        silence: seconds without a sign of life after which its connection is given up.
        why_not: why there is no queue.
        published: what greetings may change of what is told of it, when that was told last.
        missed: whether a queue that its binder should have was not to be found, at the last look.
        brought: how many of its messages brought something: get returned what they hold, or raised it; or they gave room.
        repeated: how many of its messages brought nothing, and might have: that had come before, or came too early; and pieces,
            but none that throws away those of another message.
    """

    def __init__(self, routing: bytes, hello: Hello, sight: Sight | None = None) -> None:
        self.routing = routing
        self.hello = hello
        self.taken = 0
        self.heard = time.monotonic()
        self.process = 0
        self.gone_at = 0.0
        self.unread_from = 0
        self.away_at = self.silence = 0.0
        self.sight = sight or Sight()
        self.left: How | None = None
        self.left_at = 0.0
        self.ending = Ending()
        self.last_position: int | None = None
        self.never_came = 0
        self.queue: PairQueue | None = None
        self.compiled: CompiledPath | None = None
        self.by_file = False
        self.settled = False
        self.why_not = ""
        self.missed = False
        self.published: Any = None
        self.brought = self.repeated = 0

    @property
    def position(self) -> int:
        """The sequence of the last message to or from the peer that this end has dealt with."""
        return self.taken

    def misses(self, sequence: int) -> bool:  # noqa: ARG002 - a consumer misses messages
        """Return whether messages up to a sequence, which the peer says that it sent, are still to come."""
        return False

    @property
    def is_kept_for(self) -> bool:
        """Return whether this end keeps messages for it, to send them again."""
        return False

    @property
    def ends_with_its_line(self) -> bool:
        """Return whether what is in flight to it went with its connection, so that it begins anew by the next one."""
        return False

    @property
    def has_exchanged(self) -> bool:
        """Return whether any message went between the two."""
        return self.taken > 0

    @property
    def identity(self) -> Identity:
        """The process it is in."""
        return self.hello.identity

    @property
    def token(self) -> int:
        """That of the queue which the two have; 0 if there is none."""
        return self.queue.offer.token if self.queue is not None else 0

    def is_still(self, hello: Hello) -> bool:
        """Return whether it is the same end that says so."""
        return self.hello.end == hello.end and self.hello.identity == hello.identity

    def may_return(self, patience: float) -> bool:
        """Return whether it is to be waited for, now that its connection has ended. Note since when.

        An end that is seen to be open is waited for, stopped or not.

        Args:
            patience: seconds since its last sign of life after which one that is out of sight is given up.
        """
        self.away_at = self.away_at or time.monotonic()
        if self.sight.is_out_of_sight:
            return self.silent_for() < patience
        return not self.sight.is_gone()

    def silent_for(self) -> float:
        """Seconds since the last sign of life of one whose connection has ended; of one that says nothing ZeroMQ had some."""
        return time.monotonic() - max(self.heard, self.away_at - self.silence)

    def is_there(self) -> bool:
        """Return whether messages may be sent to it: it is neither away, nor seen to be gone and yet to be heard to the end."""
        return self.settled and not self.away_at and not self.gone_at

    def is_seen(self) -> bool:
        """Return whether it is an end of this user that is seen to be open: no stranger knows the token of such a one."""
        return not self.sight.is_out_of_sight and not self.sight.is_gone()

    def heard_of(self) -> None:
        """Note that something came from it."""
        self.heard, self.away_at, self.unread_from = time.monotonic(), 0.0, 0

    def leave(self, how: How, ending: Ending | None = None, position: int | None = None) -> None:
        """Note that it left, how, and when. May be cut short anywhere, and called again.

        Args:
            ending: how it says that it ended.
            position: the last message that it sent to this end in frames, or took from it, as it says.
        """
        self.left_at = time.monotonic()
        self.ending = ending or self.ending
        self.last_position = position if self.queue is None else None
        self.left = how
        self.sight.close()

    def __str__(self) -> str:
        now = time.monotonic()
        who = f"{self.hello.role} {self.identity}"
        if self.left is not None:
            origin = f" (raised by {self.ending.origin})" if self.ending.origin else ""
            why = f": {self.ending.failure}{origin}" if self.ending.failure else ""
            missed = f", and {self.never_came} of its messages did not come" if self.never_came else ""
            return f"{who} {self.left.value} {now - self.left_at:.1f} s ago{missed}{why}"
        out_of_sight = f"out of sight: {self.sight.why_not}" if self.sight.is_out_of_sight else ""
        state = out_of_sight or ("gone" if self.sight.is_gone() else "present")
        if self.away_at:
            return f"{who} ({state}, not heard of for {self.silent_for():.1f} s)"
        if self.by_file:
            return f"{who} ({state}, met by its file, not heard from yet)"
        return f"{who} ({state}, last heard from {now - self.heard:.1f} s ago)"


def ending_by(error: BaseException | None) -> Ending:
    """Return how an end ends whose ``with`` block is left by an exception, or by none.

    A stream that has ended, and ``sys.exit`` without a status or with 0, end it well. What another end failed by is passed on.
    """
    if error is None or isinstance(error, EndOfStream):
        return Ending()
    name = type(error).__name__
    try:
        if isinstance(error, SystemExit) and not error.code:
            return Ending()
        if isinstance(error, StreamFailed) and error.failure:
            return failed(error.failure, error.origin)
        text = str(error)
        return failed(f"{name}: {text}" if text else name)
    except Exception as unspeakable:  # the user's own code: whatever it does, the end has failed, and is closed
        return failed(f"{name} (and its text raises {type(unspeakable).__name__})")


def to_leave_out(left: list[How | None], most: int) -> slice:
    """Return which of the peers that left make room for one more, as ``most`` are named: the first of them.

    But the first that failed stays: others may have been ended because of that.

    Args:
        left: how each left, in order.
    """
    first = int(left[:1] == [How.FAILED])
    return slice(first, first + max(0, 1 + len(left) - most))


def lost_or_failed(text: str, peers: Sequence[Peer]) -> PeerLost:
    """Return the error that tells of peers that did not end well: StreamFailed, if one of them failed."""
    for peer in peers:
        if peer.left is How.FAILED:
            error = StreamFailed(text)
            error.failure = peer.ending.failure
            error.origin = peer.ending.origin or f"{peer.hello.role} {peer.identity}"
            return error
    return PeerLost(text)
