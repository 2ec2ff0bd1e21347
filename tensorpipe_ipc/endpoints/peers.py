"""The peers of an end: who joined, who is away, who has left, and how.

A peer is gone when its end is seen to be gone, or when it was out of sight for too long, and all that came from it was read.
Its end's own file tells how it ended, even where its GOODBYE did not come (``presence``).
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from tensorpipe_ipc.endpoints.events import Event, Joined, Left
from tensorpipe_ipc.endpoints.greeting import REPEAT
from tensorpipe_ipc.endpoints.negotiation import Negotiation
from tensorpipe_ipc.endpoints.peer import How, Peer
from tensorpipe_ipc.endpoints.presence import LastWords, Presence, Sight, is_binders
from tensorpipe_ipc.endpoints.strangers import Strangers, remember
from tensorpipe_ipc.process import is_dead
from tensorpipe_ipc.wire.header import Ending, Hello, Whereabouts
from tensorpipe_ipc.zeromq.zmq_sockets import SLICE, FrameSocket

__all__ = ["MOST_PEERS", "Peers"]

MOST_PEERS = 1024  # of a binder: each may cost four descriptors, and is looked at several times a second
IN_TURN = 4 * MOST_PEERS  # messages of others, within which one comes of each connection that has any: they take turns
_ON_ITS_WAY = 5.0  # seconds of silence until messages that an end had sent, and that do not come, are given up
_NOTHING = b""  # said to see whether there is a connection; whoever gets it drops it, and keeps 64 bytes until then


class Peers(dict[bytes, Any]):
    """The peers of one end, by the routing ids of their connections.

    Attributes:
        last_left: the one that left last, None as long as none did.
        came: how many messages have come, of all.
    """

    def __init__(
        self,
        socket: FrameSocket,
        presence: Presence | None,
        negotiation: Negotiation,
        strangers: Strangers,
        events: deque[Event],
        *,
        keeps: bool,
        patience: float,
    ) -> None:
        """
        Args:
            socket, presence, negotiation, strangers: the conversation's.
            events: gets who joined and who left.
            keeps: whether what is in flight in frames outlives its connection.
            patience: seconds until a peer out of sight is given up.
        """
        super().__init__()
        self._socket, self._presence, self._negotiation = socket, presence, negotiation
        self._strangers, self._events = strangers, events
        self._keeps, self._patience = keeps, patience
        self.last_left: Peer | None = None
        self.came = 1
        # Those that said how they ended: they do not come again. Those out of sight do not push out the others.
        self._ended_ends: dict[int, None] = {}
        self._ended_afar: dict[int, None] = {}

    # -- who joins

    def binder(self) -> Any:
        """Return a connector's peer: the last that it met, where the one before is being read out."""
        return next(reversed(self.values()), None)

    def has_left(self, hello: Hello) -> bool:
        """Return whether this is an end that has told how it ended: what still comes of it was on its way."""
        return hello.end in self._ended_ends or hello.end in self._ended_afar

    def sight_of(self, hello: Hello | Whereabouts) -> Sight:
        """Look whether the end that says HELLO is open."""
        if self._presence is None:
            return Sight()
        if hello.folder and is_binders(hello.end) is self._socket.binds:
            return Sight(why_not=f"it names an end that {'binds' if self._socket.binds else 'connects'}")
        return self._presence.sight_of(hello.end, hello.folder)

    def join(self, peer: Peer) -> None:
        """Attach a peer. One that has died by then is only heard to its end: nothing is put to it."""
        peer.gone_at = time.monotonic() if peer.sight.is_gone() else 0.0
        peer.silence = self._socket.silence
        event = Joined(peer)
        self[peer.routing] = peer
        self._events.append(event)  # no exception comes between the two

    def is_said_before(self, routing: bytes, hello: Hello) -> bool:
        """Return whether an end said so by the connection before the one that it is known by.

        ZeroMQ hands out what came by each in no order. By each new connection a connector counts its ``round`` up.
        """
        if routing in self or not hello.end:
            return False
        return any(peer.is_still(hello) and hello.round < peer.hello.round for peer in self.values())

    def find_again(self, routing: bytes, hello: Hello) -> bool:
        """Know an end again that comes by a new connection. Nobody but its binders has heard a connector's token.

        Returns:
            Whether one has left by that, as what was in flight went with its line. Its message is heard again.
        """
        if routing in self:
            return False
        for peer in [each for each in self.values() if hello.end and each.is_still(hello)]:
            if self._socket.binds:
                self._strangers.end(peer.routing)
            else:
                self._socket.drop(peer.routing)
            if peer.ends_with_its_line and not self._keeps:
                # A consumer that binds goes on from where this end's HELLO said, whatever it had taken by then.
                self.leaves(peer, How.LOST, position=hello.sequence if self._socket.binds else None)
                return True
            del self[peer.routing]  # no exception comes between this and the last of it
            peer.routing, peer.gone_at = routing, 0.0
            self[routing] = peer
        return False

    # -- who leaves

    def leaves(self, peer: Peer, how: How, ending: Ending | None = None, position: int | None = None) -> None:
        """A peer is gone. An exception may come anywhere in this; then it is done again, with what was found out.

        Args:
            how: as far as is known. An end that closed says more in its own file.
            ending: how it says that it ended.
            position: the last message that it sent, or took, as it says.
        """
        if self.get(peer.routing) is not peer:
            return
        if peer.left is None:
            last_words = peer.sight.last_words() if how is How.LOST else None
            if last_words is not None:
                ending, position = last_words.ending, self._position_of(last_words)
                how = How.FAILED if ending.failure else How.GOODBYE
            if peer.hello.end and how in (How.GOODBYE, How.FAILED):
                remember(self._ended_afar if peer.sight.is_out_of_sight else self._ended_ends, peer.hello.end)
                if self._socket.binds:
                    self._strangers.end(peer.routing)
            self._negotiation.transport(self.values())  # it is told as it last was
            peer.leave(how, ending, position)
        self.last_left = peer
        event = Left(peer)
        del self[peer.routing]
        self._events.append(event)  # no exception comes between the two

    def is_gone(self, peer: Peer, again: bool) -> bool:
        """Return whether nothing more can come from a peer: it is gone, and all that came from it was taken."""
        gone = peer.sight.is_gone() or again and peer.sight.is_out_of_sight and self._is_orphaned(peer)
        if not self._socket.binds:
            connected = self._socket.reaches(peer.routing)
        elif gone or again:
            connected = self.has_connection(peer)
        else:
            connected = True
        if gone:
            peer.gone_at = peer.gone_at or time.monotonic()
            if self._may_have_unread(peer):
                return False
            return not connected or time.monotonic() - peer.gone_at >= self._silence_of(peer)
        return not connected and not self._may_have_unread(peer) and not self.waits_for(peer)

    def has_connection(self, peer: Peer) -> bool:
        """Return whether a binder's peer is connected."""
        return self._socket.send_small(peer.routing, _NOTHING)

    def _is_orphaned(self, peer: Peer) -> bool:
        """Return whether a peer over ipc is dead, whoever still holds its connection open."""
        return is_dead(peer.process) if peer.process else self._socket.is_orphaned(peer.routing)

    def _may_have_unread(self, peer: Peer) -> bool:
        """Return whether something of a peer that has ended may have come and was not read yet.

        However seldom messages are taken, they are; and however much comes from others, its own come in their turn.
        """
        peer.unread_from = peer.unread_from or self.came
        return self.came - peer.unread_from < IN_TURN and self._socket.has_unread(peer.routing)

    def may_be_unread(self, came: int) -> bool:
        """Return whether a message may be unread that was there when so many had come."""
        return self.came - came < IN_TURN and self._socket.has_incoming()

    def _silence_of(self, peer: Peer) -> float:
        """Return how long nothing must come from one that is gone, and whose connection has not ended.

        What it sent last may still be on its way. Only where a child that was forked from it holds the connection open, or
        another has bound its address, will that never end. Of one whose messages lie in a queue nothing but a goodbye can be
        on its way; and one that said how far it had come, and came no further, sends nothing.
        """
        last_words = peer.sight.last_words()
        if last_words is not None:
            return _ON_ITS_WAY if peer.misses(self._position_of(last_words)) else 0
        return REPEAT if peer.queue is None else SLICE / 4

    def _position_of(self, last_words: LastWords) -> int:
        return last_words.positions.get(self._presence.token, 0) if self._presence is not None else 0

    def waits_for(self, peer: Peer) -> bool:
        """Return whether a peer whose connection has ended is away, and not gone.

        Over ipc a connector makes its connection anew when the binder before this one has left, and may do so after it met
        this one: that ends nothing between two that see each other, but for a connector's frames, which are lost. A connector
        that has claimed a queue has it, whether or not its binder has answered.
        """
        if peer.queue is None and not (peer.settled and (self._keeps or self._socket.binds)):
            return False
        return peer.may_return(self._patience if self._keeps or peer.by_file else 0.0)
