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
WELCOME, so that only connectors that have shown their keys come in. What was claimed after a WELCOME is used after the next
one: the binder is there, and answers. So it knows whose the messages are, though the connector's process ends at once.

The binder trusts only the token: a random number that only this user can have read. It compares the token with those of the
queues that it made. A connector that says another token gets no queue, and is told so. If a connector cannot see the file, or
cannot open what it offers, both ends use frames, and tell the reason.

A connector that said HELLO before it found the file gets two answers. It ignores the first, which names no queue.
"""

from __future__ import annotations

import contextlib
import errno
import time
from typing import Any

from tensorpipe_ipc.endpoints import rendezvous, rendezvous_file
from tensorpipe_ipc.endpoints.negotiation import misfit
from tensorpipe_ipc.endpoints.peer import How, Peer
from tensorpipe_ipc.endpoints.rendezvous import PairQueue
from tensorpipe_ipc.errors import Refused, SharedMemoryError
from tensorpipe_ipc.wire.header import Hello, Kind, pack_control
from tensorpipe_ipc.zeromq.addresses import runtime_folder
from tensorpipe_ipc.zeromq.zmq_sockets import FrameSocket

__all__ = ["REPEAT", "Greeting", "is_late_answer", "is_old_answer"]

REPEAT = 0.5  # seconds between a waiting connector's first HELLOs
_RARELY = 32.0  # seconds between its later ones: a binder that computes, or does not read, keeps each of them
AGAIN = 0.02  # seconds between two looks for a file


class Greeting:
    """A connector's HELLOs, and the queues that it claims. A binder's does nothing.

    Attributes:
        said_at: when HELLO was last said, by time.monotonic(); 0: it is due.
        routing: by which connection.
    """

    def __init__(self, conversation: Any, socket: FrameSocket) -> None:
        """
        Args:
            conversation: the ``Conversation`` that this is a part of.
            socket: its own.
        """
        self._here, self._socket = conversation, socket
        self._is_connectors = not socket.binds
        self.said_at = 0.0
        self.routing = b""
        self._repeat_after = REPEAT
        self._looked_for_file = 0.0

    # -- saying HELLO

    def say_if_due(self) -> None:
        """Say HELLO, when it is due. It is the first that is said by each of a connector's connections."""
        here, socket = self._here, self._socket
        if not self._is_connectors or not socket.is_connected() or (not here.peers and here.owner.finishes()):
            return
        now, is_news = time.monotonic(), self.is_owed()
        if not is_news and now - self.said_at < self._repeat_after:
            return
        if is_news:
            here.refusal = None  # which came by the last connection
        if socket.send_small(
            socket.routing, pack_control(Kind.HELLO, here.owner.hello(here.peers.binder(), is_news=is_news))
        ):
            self._repeat_after = REPEAT if is_news or not self.said_at else min(2 * self._repeat_after, _RARELY)
            self.said_at, self.routing = now, socket.routing

    def say_again(self) -> None:
        """Have HELLO be due at once: there is news for the binder, or it is asked for news."""
        self.said_at = 0.0

    def say_seldom(self) -> None:
        """Have the next HELLO wait: the binder reads what is said to it, and may say otherwise at any moment."""
        self._repeat_after = REPEAT

    def ensure(self, timeout: float) -> bool:
        """Have a connector say HELLO that knows nobody, or whose connection is a new one.

        False if its binder is not on the line within ``timeout`` seconds, and nothing has come from one that was.
        """
        here, socket = self._here, self._socket
        if not self._is_connectors:
            return True
        if not here.peers:
            self.hang_up_on_left()
            if here.owner.finishes():
                return socket.has_incoming()
        elif not self.is_owed():
            return True
        came = socket.has_incoming()  # perhaps by a connection that has ended since
        if not socket.is_connected(0 if came else timeout):
            return came
        if not here.peers and not socket.reads_out:
            self._meet_by_file()
        self.say_if_due()
        return True

    def is_owed(self) -> bool:
        """Return whether a connector was seen to get its binder since it last said HELLO."""
        return self._socket.routing not in (b"", self.routing)

    def awaits_welcome(self) -> bool:
        """Return whether a connector has said HELLO by its connection and knows of no answer: its binder may know it."""
        here = self._here
        if not self._is_connectors or here.peers or here.refusal is not None or not self.routing:
            return False
        return self._socket.reaches(self.routing) and not self.left_by(self.routing)

    # -- the binder that has left

    def knows_nobody(self) -> bool:
        """Return whether a connector has a connection, and has heard nothing by it."""
        return self._is_connectors and not self._here.peers and bool(self._socket.routing)

    def is_left_over(self) -> bool:
        """Return whether a connector's connection stands, though its binder has left by it or is dead, or another is there now.

        A child that was forked from the binder's process holds it open, for as long as it lives: nobody hears there.
        """
        routing = self._socket.routing
        if not self.knows_nobody():
            return False
        return self.left_by(routing) or self._socket.is_orphaned(routing) or self._socket.is_replaced(routing)

    def left_by(self, routing: bytes) -> bool:
        """Return whether a connector's last binder has left by a connection, and did not just refuse this end."""
        left = self._here.peers.last_left
        return self._is_connectors and left is not None and left.routing == routing and left.left is not How.REFUSED_US

    def hang_up_on_left(self) -> None:
        """Have a connector look for the next binder, where it is still connected to one that has left, and all is read."""
        if self.is_left_over() and not self._socket.has_unread(self._socket.routing):
            self._socket.drop(self._socket.routing)

    def has_lost_connection(self) -> bool:
        """Return whether a connector was last seen without its binder, and has a peer that has not left, nor is away."""
        peers = self._here.peers.values() if self._is_connectors else ()
        return any(peer.routing != self._socket.routing and not peer.away_at for peer in peers)

    # -- meeting by the rendezvous file

    def _meet_by_file(self) -> None:
        """Meet the binder by its file, if there is a good one."""
        here, now = self._here, time.monotonic()
        may_meet = not here.negotiation.never_shares and not here.has_keys and here.refusal is None
        if not may_meet or now - self._looked_for_file < AGAIN:
            return
        self._looked_for_file = now
        found = rendezvous_file.read(self._socket.address)
        ours = here.owner.hello(None)
        if found is None or misfit(ours, found.hello) or rendezvous.objection(ours, found.hello):
            return
        # Asked last: so the file is that of who is on the line.
        if here.peers.has_left(found.hello) or self.is_left_over():
            return
        sight = here.peers.sight_of(found.hello)  # one: what it closes with later is read there
        queue, has_met = None, False
        try:
            with contextlib.suppress(SharedMemoryError):
                queue = None if sight.is_gone() else self._claimed(found)
            if queue is not None:
                peer = here.owner.new_peer(self._socket.routing, found.hello, sight)
                peer.queue, peer.settled, peer.by_file = queue, True, True
                here.peers.join(peer)
                has_met = True
                self.say_again()
                here.publish()
        finally:
            if not has_met:
                sight.close()
                if queue is not None:
                    queue.let_go()

    def claim_of(self, peer: Peer) -> None:
        """Claim one of the queues of a binder that has said WELCOME. If all are taken, it is asked to make more."""
        self.say_again()  # what becomes of it, the binder is to know at once
        found = self._file_of(peer)
        why_not = f"the binder's rendezvous file is not to be seen in {_own_folder()} here"
        try:
            queue = None if found is None else self._claimed(found)
            if queue is not None:
                peer.queue, peer.by_file = queue, True  # and settled with the next WELCOME
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
        socket = self._socket
        is_known = self._here.has_keys or socket.address.scheme != "tcp"
        return rendezvous_file.find(socket.address, peer.hello.end, socket.key, anywhere=is_known)

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
                if queue.claim(min(self._here.window, offer.maxsize), self._here.end):
                    return queue
        if failed is not None:
            raise failed
        return None


def _own_folder() -> str:
    """Return where this end looks for a binder's file, in words."""
    try:
        return runtime_folder()
    except Refused:
        return "this user's runtime folder, of which there is none"


def is_old_answer(peer: Peer, hello: Hello) -> bool:
    """Return whether a WELCOME answers what a connector said before it claimed a queue."""
    if not peer.by_file or not peer.is_still(hello) or hello.shared_memory is None:
        return False
    terms = hello.shared_memory
    peer.by_file = peer.token not in (terms.attached, terms.unknown) and not terms.why_not
    return peer.by_file


def is_late_answer(peer: Peer | None, hello: Hello) -> bool:
    """Return whether a WELCOME comes from the binder before the one whose file led here, and which is there."""
    return peer is not None and peer.by_file and not peer.is_still(hello) and not peer.sight.is_gone()
