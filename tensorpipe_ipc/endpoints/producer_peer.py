"""ProducerPeer: one producer, as a consumer knows it."""

from __future__ import annotations

from tensorpipe_ipc.endpoints.peer import Peer
from tensorpipe_ipc.endpoints.presence import Sight
from tensorpipe_ipc.endpoints.reassembly import Reassembly
from tensorpipe_ipc.wire.header import Hello

__all__ = ["ProducerPeer"]


class ProducerPeer(Peer):
    """See Peer.

    Attributes:
        began: ``taken`` when the two met.
        is_back: whether it had been given up, and counted.
        round: the number by which this consumer last asked it to send what is missing.
        credited: up to which sequence it may have been told that its messages were taken.
        served: the last of the producer's own ``round``, its connections, that was dealt with.
        asked_at: when this consumer asked because of a gap, until the gap is filled.
        reassembly: the large message that is coming from it in pieces.
        largest: bytes of the largest payloads that came from it in pieces, of one message.
        waiting: messages that are known to be in its queue. There may be more, as nobody else takes them.
    """

    def __init__(self, routing: bytes, hello: Hello, sight: Sight | None = None) -> None:
        super().__init__(routing, hello, sight)
        self.began = 0
        self.is_back = False
        self.credited = 0
        self.round = 1
        self.served = hello.round
        self.asked_at = 0.0
        self.reassembly: Reassembly | None = None
        self.largest = 0
        self.waiting = 0

    @property
    def resends(self) -> bool:
        """Return whether it sends again what a connection swallowed."""
        return self.hello.round > 0

    def misses(self, sequence: int) -> bool:
        """See Peer."""
        return self.queue is None and sequence > self.taken
