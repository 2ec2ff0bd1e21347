"""Negotiation: whether two ends go together, and how the two come to share a queue, or to know why not.

``conversation`` carries what is said here. What may be shared, and how it is opened, stands in ``rendezvous``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from tensorpipe_ipc.endpoints import rendezvous
from tensorpipe_ipc.endpoints.peer import Peer
from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.wire.header import Hello, SharedMemoryTerms, cut
from tensorpipe_ipc.zeromq.addresses import Address

__all__ = ["Negotiation", "how_to_accept", "misfit"]


class Negotiation:
    """One end's side of it.

    Attributes:
        wish: "auto", "off" or "require".
    """

    def __init__(self, address: Address, wish: str, role: str, *, binds: bool) -> None:
        """
        Args:
            address: of the endpoint.
            role: of this end.
            binds: whether it has the address, and so makes the queues.

        Raises:
            ValueError: no such wish.
            SharedMemoryError: shared memory is required, and the endpoint is inproc.
        """
        if wish not in rendezvous.WISHES:
            raise ValueError(f"shared_memory={wish!r}: give 'auto', 'off' or 'require'")
        if wish == "require" and address.scheme == "inproc":
            raise SharedMemoryError(
                errno.EINVAL,
                f"{address.text}: shared_memory='require', but inproc is within one process and uses frames",
            )
        self.wish = wish
        self._scheme, self._role, self._binds = address.scheme, role, binds
        self._transport = "not known before another end comes"

    def terms(self, peer: Peer | None) -> SharedMemoryTerms | None:
        """Return what this end says of shared memory, to ``peer``."""
        if self.never_shares:
            return None
        if peer is None:
            return SharedMemoryTerms(self.wish, os.geteuid())
        theirs, token = peer.hello.shared_memory, peer.token
        said = theirs.attached if self._binds and theirs is not None else 0
        unknown = said if said != token else 0
        return SharedMemoryTerms(self.wish, os.geteuid(), attached=token, unknown=unknown, why_not=cut(peer.why_not))

    @property
    def never_shares(self) -> bool:
        """Return whether this end uses frames, whoever comes."""
        return self.wish == "off" or self._scheme == "inproc"

    def violated_requirement(self, theirs: Hello, why_not: str) -> str:
        """Return why what one of the two ends requires cannot be; "" if it can."""
        wish = theirs.shared_memory.wish if theirs.shared_memory is not None else "off"
        if not why_not or "require" not in (self.wish, wish):
            return ""
        who = self._role if self.wish == "require" else theirs.role
        return f"the {who} requires shared memory, but {why_not}"

    def begins_anew(self, peer: Peer, theirs: Hello) -> bool:
        """Return whether the other end knows another queue of the two, or none: its connection was gone for a while."""
        terms = theirs.shared_memory
        if terms is None or terms.attached == peer.token:
            return False
        return not terms.why_not if peer.settled else peer.queue is not None

    def transport(self, peers: Iterable[Peer]) -> str:
        """Return how messages travel, and why so; as it last was, where nobody is there. Any thread may ask."""
        frames = f"frames over {self._scheme}"
        if self._scheme == "inproc":
            return frames
        if self.wish == "off":
            return f"{frames}: shared memory is off here"
        found = {self.transport_with(peer) for peer in list(peers) if peer.settled or peer.queue is not None}
        if found:
            self._transport = "; ".join(sorted(found, reverse=True))
        return self._transport

    def transport_with(self, peer: Peer) -> str:
        """Return how messages travel between this end and one that is attached, and why so."""
        if peer.queue is not None:
            return "shared memory"
        why_not = "shared memory is off here" if self.wish == "off" else peer.why_not
        return f"frames over {self._scheme}" + (f": {why_not}" if why_not else "")

    def is_wanted_with(self, peer: Peer) -> bool:
        """Return whether both ends want shared memory, if it can be had."""
        return not self.never_shares and peer.hello.shared_memory is not None


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
