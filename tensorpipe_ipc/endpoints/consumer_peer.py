"""ConsumerPeer: one consumer, as a producer knows it."""

from __future__ import annotations

import time
from collections import deque

from tensorpipe_ipc.endpoints.peer import Peer
from tensorpipe_ipc.endpoints.presence import Sight
from tensorpipe_ipc.endpoints.resend_buffer import SentMessage
from tensorpipe_ipc.wire.header import Hello

__all__ = ["ConsumerPeer"]

_QUICK = 4e6  # bytes a second: a frame of 1 MiB takes a sixth of what a silence may last
_LONG = 1 << 20  # bytes
_UNREAD = 1 << 24  # bytes that it may say it took before it has read them; there is always a moment between the two


class ConsumerPeer(Peer):
    """See Peer.

    Attributes:
        sent: sequence of the last message sent to it in frames.
        kept: what was sent to it over tcp and is not known to be taken, oldest first.
        unread: what it says it took, though ZeroMQ was not seen to have let go of it.
        unmarked: bytes that were copied to ZeroMQ for it since the last of which is told when it lets go.
        greeted: whether it was answered, or has answered: in frames nothing is put to it before.
        served: the last of its ``round`` that was dealt with.
        resent_at: when something was last sent again to it, by time.monotonic().
        quick: the routing id of the last connection that was found to be quick.
        turn: when the producer last chose it, of all the times that it chose from several.
        room: places in its queue that are known to be free. There may be more, as the consumer frees them.
    """

    def __init__(self, routing: bytes, hello: Hello, sight: Sight | None = None) -> None:
        super().__init__(routing, hello, sight)
        self.greeted = False
        self.sent = 0
        self.kept: deque[SentMessage] = deque()
        self.unread: deque[SentMessage] = deque()
        self.unmarked = 0
        self.served = hello.round
        self.resent_at = 0.0
        self.quick = b""
        self.turn = 0
        self.room = 0

    @property
    def position(self) -> int:
        """See Peer."""
        return self.sent

    @property
    def is_kept_for(self) -> bool:
        """See Peer."""
        return bool(self.kept)

    @property
    def ends_with_its_line(self) -> bool:
        """See Peer."""
        return self.queue is None and self.settled

    @property
    def has_exchanged(self) -> bool:
        """See Peer."""
        return self.sent > 0 or self.taken > 0

    def is_there(self) -> bool:
        """See Peer."""
        return (self.greeted or self.queue is not None) and super().is_there()

    def asks(self) -> bool:
        """Return whether it has come by another connection since, and may miss something."""
        return self.hello.round > self.served

    def note_carried(self, kept: SentMessage) -> None:
        """Note that a message has got over: if that was quick, so is the line, until there is another connection.

        A short burst may be let by where a line is slow. So where one was torn that had been quick, only a long one tells.
        """
        is_first = self.quick in (b"", self.routing)
        if (is_first or kept.nbytes >= _LONG) and kept.nbytes > _QUICK * (time.monotonic() - kept.sent_at):
            self.quick = self.routing

    def has_slow_line(self) -> bool:
        """Return whether the line may be slow: it was not found to be quick."""
        return self.quick != self.routing

    def load(self) -> int:
        """Return how many messages it has and did not take. Bring ``room`` up to date."""
        if self.queue is None:
            return self.sent - self.taken
        assert self.queue.credits is not None
        # A hostile one writes tokens into its own pipe.
        self.room = min(self.queue.credits.unread(), self.queue.maxsize)
        return self.queue.maxsize - self.room

    def has_room(self) -> bool:
        """Return whether its queue has room. Nobody else puts there: what was free is free until this end puts."""
        if self.room <= 0:
            self.load()
        return self.room > 0

    def is_idle(self) -> bool:
        """Return whether its queue is known to be empty. Nobody else puts there: it is so until this end puts."""
        queue = self.queue
        return queue is not None and self.room == queue.maxsize and self.is_there() and not self.left

    def reads(self) -> bool:
        """Return whether it takes what is sent to it off the line, and does not only say so."""
        while self.unread and self.unread[0].has_left():
            self.unread.popleft()
        return not self.unread or sum(kept.left_behind() for kept in self.unread) <= _UNREAD
