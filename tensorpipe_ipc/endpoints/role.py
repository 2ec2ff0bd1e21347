"""The part that an end's role adds to the conversation: a producer's (``sender``), a consumer's (``receiver``)."""

from __future__ import annotations

from typing import Any

from tensorpipe_ipc.endpoints.peer import Peer
from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.wire.header import Header, Hello

__all__ = ["Role", "how_to_accept", "misfit"]


class Role:
    """The questions that ``Link`` asks of its role, and the news that it tells it.

    Where nothing is said here, a role need not do anything.
    """

    role = ""

    def own_hello(self, peer: Peer | None) -> Hello:
        """Return what this end says of itself, to ``peer``."""
        raise NotImplementedError

    def met(self, peer: Peer) -> None:
        """A new peer. No call comes after anything that must not be done twice."""

    def shares(self, peer: Peer) -> None:
        """The two have a queue; said perhaps more than once."""

    def unshare(self, peer: Peer) -> None:
        """The end of that, if they had one. May be called again."""
        if peer.queue is not None:
            peer.queue.let_go()
            peer.queue = None

    def stands_at(self, peer: Peer, sequence: int) -> None:
        """A HELLO or WELCOME said which message the peer last sent, or took."""

    def answered(self, peer: Peer) -> None:
        """A binder has said WELCOME to a peer."""

    def parted(self, peer: Peer) -> None:
        """The peer is gone. No call comes after anything that must not be done twice."""

    def let_go(self, peer: Peer) -> None:
        """Let go of what a peer that is gone had. May be called again."""

    def position(self, peer: Peer) -> int:  # noqa: ARG002 - a producer and a consumer have one
        """Return the sequence of the last message to or from the peer that this end has dealt with."""
        return 0

    def ended_at(self, peer: Peer, sequence: int) -> None:
        """A peer that leaves says its own ``position`` towards this end."""

    def misses(self, peer: Peer, sequence: int) -> bool:  # noqa: ARG002 - a consumer looks
        """Return whether messages up to a sequence, which a peer says that it sent, are still to come."""
        return False

    def reconnected(self) -> None:
        """A connector is about to say HELLO by a new connection."""

    def came_again(self, peer: Peer, sequence: int) -> None:
        """A connector has said HELLO, and how far it has come, by a new connection. May be called again."""

    def piece(self, peer: Peer, header: Header, frames: list[Any]) -> None:
        """A piece of a message came."""
        raise ProtocolError(f"a PIECE for a {self.role} (from {peer}, {header.sequence}, {len(frames)} frames)")

    def lacks_pieces(self, peer: Peer, header: Header) -> bool:  # noqa: ARG002 - a consumer looks
        """Return whether pieces are missing of a message that is expected, and will come again."""
        return False

    def expects(self, peer: Peer, header: Header) -> bool:
        """Return whether a DATA message is the peer's next one."""
        raise ProtocolError(f"DATA for a {self.role} (from {peer}, sequence {header.sequence})")

    def taken(self, peer: Peer, header: Header, *, is_whole: bool = True) -> None:
        """The message that was expected is taken, or its sender has given it up."""

    def credited(self, peer: Peer, sequence: int) -> None:
        """The peer took a message."""
        raise ProtocolError(f"CREDIT {sequence} for a {self.role} (from {peer})")


def how_to_accept(serializer: str) -> str:
    """Say how a consumer accepts a serializer."""
    return f"to take it, open the consumer with accept={list(dict.fromkeys(['raw', serializer]))}"


def misfit(ours: Hello, theirs: Hello) -> str:
    """Return why two ends do not go together; "" if they do."""
    if theirs.role == ours.role or theirs.role not in ("producer", "consumer"):
        return f"both ends are a {ours.role}: one side must be a producer and the other a consumer"
    producer, consumer = (theirs, ours) if ours.role == "consumer" else (ours, theirs)
    if producer.serializer not in consumer.accepts:
        return (
            f"the producer ({producer.identity}) sends with serializer {producer.serializer!r}, which the consumer "
            f"({consumer.identity}) does not accept (it accepts: {', '.join(consumer.accepts) or 'none'}); "
            + how_to_accept(producer.serializer)
        )
    return ""
