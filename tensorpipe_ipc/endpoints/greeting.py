"""Greeting: how a connector meets its binder, even one that is too busy to answer, and how the two come to a queue.

A connector says HELLO as soon as it is connected, and again while no answer comes. If the binder has a rendezvous file
(``rendezvous_file``), the connector need not wait for the answer::

    connector                                        binder
       |                                                |  makes queues, and writes them into its rendezvous file
       | <- - - - - - - - the file - - - - - - - - - -  |
       |  claims one of them, puts into it              |     (computes)
       |  HELLO    attached: token                      |
       | ---------------------------------------------> |     has time: the queue is theirs from then on
       |  WELCOME  attached: the same token             |     makes another one for the next connector
       | <--------------------------------------------- |

The HELLO goes out together with the claim, because a connector looks for the file only once it is connected. So a binder that
has time again finds both. It sees that a queue is claimed before it hears by which connector, and no stream ends while there
is such a claim. A connector that was killed before its HELLO had left counts as a peer that vanished. Its messages are
there to be taken.

The binder has two such queues while nobody is attached (``standby_queues``), and then one. A connector that finds none says
HELLO, and looks again with the WELCOME. By then the file offers a queue again. With keys, nothing is claimed before the
WELCOME, so that only connectors that have shown their keys come in.

The binder trusts only the token: a random number that only this user can have read. It compares the token with those of the
queues that it made. A connector that says another token gets no queue, and is told so. If a connector cannot see the file, or
cannot open what it offers, both ends use frames, and tell the reason.

A connector that said HELLO before it found the file gets two answers. It ignores the first, which names no queue.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import Any

import msgspec

from tensorpipe_ipc.endpoints import rendezvous, rendezvous_file
from tensorpipe_ipc.endpoints.negotiation import Negotiation
from tensorpipe_ipc.endpoints.peer import How, Peer
from tensorpipe_ipc.endpoints.presence import Sight
from tensorpipe_ipc.endpoints.rendezvous import PairQueue
from tensorpipe_ipc.endpoints.role import Role, misfit
from tensorpipe_ipc.endpoints.standby_queues import StandbyQueues
from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.wire.header import Hello, Kind, SharedMemoryTerms, pack_control
from tensorpipe_ipc.zeromq.addresses import runtime_folder
from tensorpipe_ipc.zeromq.zmq_sockets import FrameSocket

__all__ = ["REPEAT", "Greeting"]

REPEAT = 0.5  # seconds between a waiting connector's first HELLOs
_RARELY = 32.0  # seconds between its later ones: a binder that computes, or does not read, keeps each of them
_AGAIN = 0.02  # seconds between two looks for a file


class Greeting(Role):
    """The part of a link by which its end meets another.

    Attributes:
        standby: a binder's queues for those to come.
    """

    socket: FrameSocket
    negotiation: Negotiation
    peers: dict[bytes, Peer]
    ended_ends: dict[int, None]
    ended_afar: dict[int, None]
    last_left: Peer | None
    window: int
    has_keys: bool
    _refusal: Exception | None

    def __init__(self) -> None:
        self.standby = StandbyQueues()
        self._greeted = 0.0  # when a connector last said HELLO
        self._greeted_on = b""  # and by which of its connections
        self._greets_after = REPEAT  # how long after
        self._looked_for_file = 0.0
        self._came = 1  # messages, whosever
        self._is_leaving = False

    def _say(self, peer: bytes, frame: bytes) -> bool:
        raise NotImplementedError

    def _leaves(self, peer: Peer, how: How) -> None:
        raise NotImplementedError

    def _sight_of(self, hello: Hello) -> Sight:
        raise NotImplementedError

    def _publish(self) -> None:
        raise NotImplementedError

    def _is_unread(self, came: int) -> bool:
        """Return whether one may be unread that was there when so many had come."""
        raise NotImplementedError

    def finishes(self) -> bool:
        """Return whether a connector that knows nobody has something of the binder before: then it meets the next one later."""
        return False

    def pump(self, timeout: float) -> Any:
        """See Link."""
        raise NotImplementedError

    # -- a connector's

    def say_hello_if_due(self) -> None:
        """A connector's HELLO, when it is due. It is the first that is said by each of its connections."""
        if not self.socket.is_connected() or (not self.peers and self.finishes()):
            return
        now, is_news = time.monotonic(), self.owes_greeting()
        if not is_news and now - self._greeted < self._greets_after:
            return
        if is_news:
            self._refusal = None  # which came by the last connection
            self.reconnected()
        if self.socket.send_small(self.socket.routing, pack_control(Kind.HELLO, self.own_hello(self.binder()))):
            self._greets_after = REPEAT if is_news or not self._greeted else min(2 * self._greets_after, _RARELY)
            self._greeted, self._greeted_on = now, self.socket.routing

    def binder(self) -> Peer | None:
        """Return a connector's peer: the last that it met, where the one before is being read out."""
        return next(reversed(self.peers.values()), None)

    def ensure_greeted(self, timeout: float) -> bool:
        """Have a connector say HELLO that knows nobody, or whose connection is a new one.

        False if its binder is not on the line within ``timeout`` seconds, and nothing has come from one that was.
        """
        if self.socket.binds:
            return True
        if not self.peers:
            self.hang_up_on_left()
            if self.finishes():
                return self.socket.has_incoming()
        elif not self.owes_greeting():
            return True
        came = self.socket.has_incoming()  # perhaps by a connection that has ended since
        if not self.socket.is_connected(0 if came else timeout):
            return came
        if not self.peers and not self.socket.reads_out:
            self.meet_by_file()
        self.say_hello_if_due()
        return True

    def is_left_over(self) -> bool:
        """Return whether a connector's connection stands, though its binder has left by it, or is dead.

        A child that was forked from the binder's process holds it open, for as long as it lives: nobody hears there.
        """
        if self.socket.binds or self.peers or not self.socket.routing:
            return False
        return self.left_by(self.socket.routing) or self.socket.is_orphaned(self.socket.routing)

    def left_by(self, routing: bytes) -> bool:
        """Return whether a connector's last binder has left by a connection, and did not just refuse this end."""
        left = self.last_left
        return left is not None and left.routing == routing and left.left is not How.REFUSED_US

    def hang_up_on_left(self) -> None:
        """Have a connector look for the next binder, where it is still connected to one that has left."""
        if self.is_left_over():
            self.socket.drop(self.socket.routing)

    def owes_greeting(self) -> bool:
        """Return whether a connector was seen to get its binder since it last said HELLO."""
        return self.socket.routing not in (b"", self._greeted_on)

    def connect_error(self) -> str:
        """Return what keeps a connector from getting in, to be added to a sentence; "" if nothing is known to."""
        trouble = "" if self.peers else self.socket.connect_error()
        return f"; {trouble}" if trouble else ""

    def awaits_welcome(self) -> bool:
        """Return whether a connector has said HELLO by its connection and knows of no answer: its binder may know it."""
        if self.socket.binds or self.peers or self._refusal is not None or not self._greeted_on:
            return False
        return self.socket.reaches(self._greeted_on) and not self.left_by(self._greeted_on)

    def has_lost_connection(self) -> bool:
        """Return whether a connector was last seen without its binder, and has a peer that has not left, nor is away."""
        if self.socket.binds:
            return False
        return any(peer.routing != self.socket.routing and not peer.away_at for peer in self.peers.values())

    def meet_by_file(self) -> None:
        """Meet the binder by its file, if there is a good one."""
        now = time.monotonic()
        if not self._may_meet or self._refusal is not None or now - self._looked_for_file < _AGAIN:
            return
        self._looked_for_file = now
        found = rendezvous_file.read(self.socket.address)
        ours = self.own_hello(None)
        if found is None or misfit(ours, found.hello) or rendezvous.objection(ours, found.hello):
            return
        if self.has_left(found.hello):
            return
        sight = self._sight_of(found.hello)  # one: what it closes with later is read there
        queue, has_met = None, False
        try:
            with contextlib.suppress(SharedMemoryError):
                queue = None if sight.is_gone() else self._claimed(found)
            if queue is not None:
                peer = Peer(self.socket.routing, found.hello, sight)
                peer.queue, peer.settled, peer.by_file = queue, True, True
                self.met(peer)
                self.peers[peer.routing] = peer
                has_met = True
                self._attach_claimed_queue(peer)
                self._publish()
        finally:
            if not has_met:
                sight.close()
                if queue is not None:
                    queue.let_go()

    def has_left(self, hello: Hello) -> bool:
        """Return whether this is an end that has told how it ended: what still comes of it was on its way."""
        return hello.end in self.ended_ends or hello.end in self.ended_afar

    def take_standby(self, peer: Peer) -> None:
        """Claim one of the queues of a binder that has said WELCOME. If all are taken, it is asked to make more."""
        self._greeted = 0.0  # what becomes of it, the binder is to know at once
        found = self._file_of(peer)
        why_not = f"the binder's rendezvous file is not to be seen in {runtime_folder()} here"
        try:
            queue = None if found is None else self._claimed(found)
            if queue is not None:
                peer.queue, peer.settled, peer.by_file = queue, True, True
                self._attach_claimed_queue(peer)
            if found is not None:
                return
        except SharedMemoryError as failed:
            if self._file_of(peer) != found:  # meanwhile others had what it offered
                return
            why_not = failed.strerror or str(failed)
        # A binder that is just dying, or closing, has none either: then it does not answer once more, or says goodbye.
        if peer.missed and not peer.sight.is_gone():
            peer.why_not = why_not
        peer.missed = True

    def _file_of(self, peer: Peer) -> rendezvous_file.Rendezvous | None:
        """Read the rendezvous file of a binder that has said WELCOME."""
        is_known = self.has_keys or self.socket.address.scheme != "tcp"
        return rendezvous_file.find(self.socket.address, peer.hello.end, self.socket.key, anywhere=is_known)

    def _claimed(self, found: rendezvous_file.Rendezvous) -> PairQueue | None:
        """Return a queue of those that a binder offers, taken; None if others have taken all.

        Raises:
            SharedMemoryError: those that are there cannot be had.
        """
        failed: SharedMemoryError | None = None
        for offer in found.offers:
            try:
                queue = rendezvous.reach(found.hello.identity, offer, offer.maxsize)
            except SharedMemoryError as error:
                if error.errno != errno.EBUSY:  # else another end has taken it
                    failed = error
            else:
                if queue.claim(min(self.window, offer.maxsize)):
                    return queue
        if failed is not None:
            raise failed
        return None

    @property
    def _may_meet(self) -> bool:
        return not self.negotiation.never_shares and not self.has_keys

    def _attach_claimed_queue(self, peer: Peer) -> None:
        self.shares(peer)
        self._greeted = 0.0

    def turned_away(self) -> None:
        """The binder has refused this end, which may have met it by its file."""
        for peer in [each for each in self.peers.values() if each.by_file]:
            self._leaves(peer, How.REFUSED_US)

    def is_old_answer(self, peer: Peer, hello: Hello) -> bool:
        """Return whether a WELCOME answers what a connector said before it claimed a queue."""
        if not peer.by_file or not peer.is_still(hello) or hello.shared_memory is None:
            return False
        terms = hello.shared_memory
        peer.by_file = peer.token not in (terms.attached, terms.unknown) and not terms.why_not
        return peer.by_file

    def is_late_answer(self, peer: Peer | None, hello: Hello) -> bool:
        """Return whether a WELCOME comes from the binder before the one whose file led here, and which is there."""
        return peer is not None and peer.by_file and not peer.is_still(hello) and not peer.sight.is_gone()

    # -- a binder's

    def expect(self) -> None:
        """Write the file, once this end can say HELLO."""
        if not self.socket.binds:
            return
        rendezvous_file.sweep()
        if not self.negotiation.never_shares:
            self.standby.open(self.socket.address, self.socket.key, self.own_hello(None))
            self._publish()

    def restock(self, room: int) -> None:
        """Bring the file up to date, now that so many peers may still come."""
        if self.standby.is_open:
            self.standby.stock(self.own_hello(None), room, is_alone=not self.peers)

    def give_standby(self, peer: Peer) -> None:
        """Let a connector that says so have what it has claimed."""
        terms = peer.hello.shared_memory
        self.unshare(peer)
        if terms is None or self.standby.take(terms.attached, peer) is None:
            self._publish()  # which makes more, if they are taken
            peer.why_not = self.standby.trouble

    def has_claimed(self, hello: Hello) -> bool:
        """Return whether one that says HELLO has claimed a queue, and was not heard of yet."""
        return hello.shared_memory is not None and self.standby.is_claimed(hello.shared_memory.attached)

    def unheard(self) -> str:
        """Return who has claimed a queue and was not heard of yet, to be added to a sentence; "" if nobody has."""
        pids = ", ".join(map(str, self.standby.claimants))
        return f"; pid {pids} has come by the rendezvous file and has not said HELLO: is it stopped?" if pids else ""

    def refuse_standby(self, hello: Hello) -> None:
        """Drop the queue that a connector has claimed that is not let in."""
        if hello.shared_memory is not None and self.standby.take(hello.shared_memory.attached) is not None:
            self._publish()

    def hear_claimants(self) -> None:
        """Before closing, offer no queue any more, and hear the connectors that have claimed one, so that they get a
        goodbye."""
        self._is_leaving = True
        self.standby.withdraw()
        deadline = time.monotonic() + _AGAIN
        while self.standby.any_claimed and self.socket.has_incoming() and time.monotonic() < deadline:
            if self.pump(0) is not None:
                self.socket.received()

    def see_to_deserted(self) -> None:
        """Take in, and at once let go, those who claimed a queue, put into it, and died before their HELLO had left."""
        if not self.standby.any_claimed:
            return
        for queue in self.standby.deserted(self._came, self._is_unread):
            self._publish()
            if self.has_keys or not queue.tickets.unread():  # who has shown no key is not heard
                continue
            dead = msgspec.structs.replace(identity(), pid=queue.claimant, started=0.0)
            terms = SharedMemoryTerms("auto", os.geteuid(), attached=queue.offer.token)
            role = "producer" if self.role == "consumer" else "consumer"
            peer = Peer(os.urandom(8), Hello(role, dead, queue.maxsize, shared_memory=terms))
            peer.queue, peer.settled = queue, True
            self.met(peer)
            self.peers[peer.routing] = peer
            self.shares(peer)
            self._leaves(peer, How.LOST)
