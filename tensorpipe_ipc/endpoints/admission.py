"""Admission: which ends a conversation takes in as its peers, which it refuses, and how each comes to a queue.

A binder reads a connector's HELLO here, and a connector its binder's WELCOME. An end that fits becomes a peer. A binder
refuses one that does not fit, or for which there is no place, and says why.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec

from tensorpipe_ipc.endpoints import rendezvous
from tensorpipe_ipc.endpoints.events import Greeted
from tensorpipe_ipc.endpoints.greeting import is_old_answer
from tensorpipe_ipc.endpoints.negotiation import misfit
from tensorpipe_ipc.endpoints.peer import How, Peer
from tensorpipe_ipc.endpoints.peers import MOST_PEERS
from tensorpipe_ipc.endpoints.presence import Sight
from tensorpipe_ipc.errors import ProtocolError, Refused
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.wire.header import Hello, SharedMemoryTerms, Whereabouts, cut, pack_refusal, whereabouts_in

__all__ = ["Admission"]

_MAX_ROLE = 16  # of one that is none
_ASKED = 64  # peers that are asked whether their connection has ended, to make room for another


class Admission:
    """One end's decisions about those that want to become its peers."""

    def __init__(self, conversation: Any) -> None:
        """Take a proxy of the conversation: the two would keep each other."""
        self._here = conversation

    # -- a HELLO

    def hear_hello(self, routing: bytes, hello: Hello) -> None:
        """Have a binder take in the connector that says HELLO, or refuse it."""
        here = self._here
        if here.peers.has_left(hello) or here.peers.is_said_before(routing, hello):
            here.strangers.end(routing)
            return
        if here.is_leaving and not self._has_claimed(hello):
            return  # there is no queue for it any more: it meets the next binder
        ours = here.owner.hello(None)
        reason = misfit(ours, hello) or here.negotiation.violated_requirement(hello, rendezvous.objection(ours, hello))
        if not reason and here.peers.find_again(routing, hello):
            here.hears_again = True  # once the owner knows which peer has left
            return
        if routing not in here.peers and not reason:
            reason = self._no_place_for(hello)
        peer = None
        if not reason:
            peer = self.admit(routing, hello)
            if peer is None:
                return
            peer.process = here.socket.process_behind()
            reason = here.negotiation.violated_requirement(hello, peer.why_not)
        if reason:
            self._refuse(routing, hello, reason)
        else:
            here.events.append(Greeted(peer, hello.sequence))

    def is_hello_in_sight(self, frames: list[Any]) -> bool:
        """Return whether this is the HELLO of an end of this user, for whom there is always time.

        One that is seen no more, as it has closed, has claimed a queue: its token, too, no stranger knows. This look is in
        nobody's part of the time, so nothing is read that it does not need.
        """
        with contextlib.suppress(ProtocolError):
            hello = whereabouts_in(frames[0])
            return hello is not None and (self._has_claimed(hello) or self._is_in_sight(hello))
        return False

    def _refuse(self, routing: bytes, hello: Hello, reason: str) -> None:
        here = self._here
        here.reject(Refused(reason))
        if routing in here.peers:
            here.peers.leaves(here.peers[routing], How.REFUSED)
        if hello.shared_memory is not None and here.standby.take(hello.shared_memory.attached) is not None:
            here.publish()  # it had claimed one
        here.answer(routing, pack_refusal(reason))

    def _no_place_for(self, hello: Hello) -> str:
        """Say why a newcomer cannot come in; "" if it can."""
        here = self._here
        taken = {peer.hello.end for peer in here.peers.values()} | {here.end}
        if hello.end and hello.end in taken:
            return "it says that it is an end which is attached already, or this one"
        if len(here.peers) >= MOST_PEERS and not self._make_room(hello):
            return f"{MOST_PEERS} peers are attached to {here.endpoint} already, and it takes no more"
        return ""

    def _make_room(self, hello: Hello) -> bool:
        """Strike off a peer out of sight, for a newcomer. Return whether there was one.

        One whose connection has ended, and for whom nothing is kept, makes room for anybody. So connections that last for a
        moment do not shut others out for as long as one waits for who may come back. Where there is none, any gives way to an
        end that is in sight: whoever is not this user can hold all places, and keeps none of this user's ends out. So does one
        that is seen to be gone: anybody can say this folder's mark, and a token that nobody has.
        """
        here = self._here
        out = [peer for peer in here.peers.values() if not peer.is_seen() and peer.queue is None]
        out.sort(key=lambda peer: (peer.is_kept_for, not peer.away_at, peer.heard))
        for peer in [each for each in out if each.sight.is_out_of_sight][:_ASKED]:
            if not peer.is_kept_for and not here.peers.has_connection(peer):
                here.peers.leaves(peer, How.LOST)
                return True
        if not out or not self._is_in_sight(hello):
            return False
        reason = (
            f"{MOST_PEERS} peers are attached to {here.endpoint}: one that is out of sight gave way to one in sight"
        )
        here.reject(Refused(reason), out[0])
        here.peers.leaves(out[0], How.LOST if out[0].has_exchanged else How.REFUSED)
        here.answer(out[0].routing, pack_refusal(reason))
        return True

    def _is_in_sight(self, hello: Hello | Whereabouts) -> bool:
        """Return whether an end that says HELLO is seen to be open."""
        with contextlib.closing(self._here.peers.sight_of(hello)) as sight:
            return not sight.is_out_of_sight and not sight.is_gone()

    def _has_claimed(self, hello: Hello | Whereabouts) -> bool:
        """Return whether one that says HELLO has claimed a queue, and was not heard of yet."""
        return hello.shared_memory is not None and self._here.standby.is_claimed(hello.shared_memory.attached)

    # -- a peer and its queue

    def admit(self, routing: bytes, hello: Hello) -> Peer | None:
        """Attach the end that says HELLO or WELCOME, if it is not, and arrange for a queue.

        Returns:
            The peer; None if another has left by that, and the message is to be heard again; or if it says nothing new.
        """
        here = self._here
        if {hello.role, here.role} != {"producer", "consumer"}:
            raise ProtocolError(f"a WELCOME from a {cut(hello.role, _MAX_ROLE)} to a {here.role}")
        peer: Peer | None = here.peers.get(routing)
        if peer is not None and is_old_answer(peer, hello):
            return None
        if peer is not None and (not peer.is_still(hello) or here.negotiation.begins_anew(peer, hello)):
            here.peers.leaves(peer, How.LOST)
            here.hears_again = True  # once the owner knows which peer has left
            return None
        if peer is None:
            peer = here.owner.new_peer(routing, hello, here.peers.sight_of(hello))
            here.peers.join(peer)
        here.refusal = None
        peer.hello = hello
        peer.heard_of()
        self._arrange(peer)
        terms = peer.settled, peer.by_file, peer.queue is None, peer.why_not, hello.shared_memory, here.refusal
        if terms != peer.published:  # publishing looks at all peers, and one may greet again and again
            here.publish()
            peer.published = terms
        return peer

    def _arrange(self, peer: Peer) -> None:
        """See to it that the two have a queue, or know why not. May be cut short anywhere, and called again."""
        here = self._here
        if peer.settled or peer.by_file:
            return
        if peer.queue is not None:  # it was claimed after a WELCOME, and this is the next one
            peer.settled = True
            return
        peer.why_not = rendezvous.objection(here.owner.hello(None), peer.hello)
        if not peer.why_not:
            (self._give_queue if here.socket.binds else here.greeting.claim_of)(peer)
        if peer.why_not:
            violated_requirement = here.negotiation.violated_requirement(peer.hello, peer.why_not)
            peer.settled = not violated_requirement
            if not here.socket.binds:
                here.refusal = Refused(f"{here.endpoint}: {violated_requirement}") if violated_requirement else None

    def _give_queue(self, peer: Peer) -> None:
        """Let a connector that says so have what it has claimed."""
        here, terms = self._here, peer.hello.shared_memory
        if terms is None or here.standby.take(terms.attached, peer) is None:
            here.publish()  # which makes more, if they are taken
            peer.why_not = here.standby.trouble

    def is_undecided(self, peer: Peer) -> bool:
        """Return whether a peer that is gone may be one that has claimed a queue, and whose next HELLO was not heard."""
        here = self._here
        if not here.socket.binds or peer.settled or peer.sight.is_out_of_sight:
            return False
        return any(queue.is_claimed_by(peer.hello) for queue in here.standby.queues())

    def take_in_deserted(self) -> None:
        """Take in, and at once let go, those who claimed a queue, put into it, and died before their HELLO had left.

        One that said a HELLO before it claimed the queue is a peer already, and counts once: as what is taken in here.
        """
        here = self._here
        if not here.standby.any_claimed:
            return
        for queue in here.standby.deserted(here.peers.came, here.peers.may_be_unread):
            here.publish()
            if here.has_keys or not queue.tickets.unread():  # who has shown no key is not heard
                continue
            dead = msgspec.structs.replace(identity(), pid=queue.claimant, started=0.0)
            terms = SharedMemoryTerms("auto", os.geteuid(), attached=queue.offer.token)
            role = "producer" if here.role == "consumer" else "consumer"
            hello = Hello(role, dead, queue.maxsize, shared_memory=terms)
            for known in [each for each in here.peers.values() if not each.settled and queue.is_claimed_by(each.hello)]:
                known.hello = msgspec.structs.replace(known.hello, shared_memory=terms)
                here.peers.leaves(known, How.LOST)
            peer = here.owner.new_peer(os.urandom(8), hello, Sight())
            peer.queue, peer.settled = queue, True
            here.peers.join(peer)
            here.peers.leaves(peer, How.LOST)
