"""Events: what a conversation tells the end that it belongs to.

A conversation appends each event once it is true, and the end takes it out once it is dealt with. So an exception of a
signal's handler loses none: what was not taken out is dealt with again. ``Joined`` and ``Left`` change figures that must change
once. The end takes those out in the same breath.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tensorpipe_ipc.wire.header import Header

__all__ = ["Arrived", "Credited", "Event", "GivenUp", "Greeted", "Joined", "Left", "PieceArrived", "Torn"]


class Joined(NamedTuple):
    """A new peer is attached. If it has a queue already, messages may lie there."""

    peer: Any


class Greeted(NamedTuple):
    """A peer said HELLO or WELCOME. A binder answers it, once it has noted where the peer stands.

    Attributes:
        sequence: the message that the peer last sent, or took, as it says.
    """

    peer: Any
    sequence: int


class Arrived(NamedTuple):
    """A message came in frames. It stays the first event until it is taken, or dropped.

    Attributes:
        refused: why there is no memory for more than its first frame; "" if there is.
    """

    peer: Any
    header: Header
    frames: list[Any]
    refused: str = ""


class PieceArrived(NamedTuple):
    """A piece of a large message came."""

    peer: Any
    header: Header
    frames: list[Any]


class GivenUp(NamedTuple):
    """A producer gave a message up while it sent it. Its sequence is used up."""

    peer: Any
    header: Header


class Credited(NamedTuple):
    """A consumer took all messages up to a sequence."""

    peer: Any
    sequence: int


class Left(NamedTuple):
    """A peer is gone; ``peer.left`` says how, and ``peer.last_position`` how far it had come."""

    peer: Any


class Torn(NamedTuple):
    """An exception tore something out of a receive: perhaps a message, perhaps a credit.

    Attributes:
        lost: messages that came after a WELCOME which was torn, by a connection that ended before the next WELCOME.
    """

    lost: int = 0


Event = Joined | Greeted | Arrived | PieceArrived | GivenUp | Credited | Left | Torn
