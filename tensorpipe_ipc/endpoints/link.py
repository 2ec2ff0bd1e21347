"""The conversation between two ends over ZeroMQ frames: which peers are there, which left, which may not come in.

A connector says HELLO as soon as it is connected. The binder compares the two HELLOs. It answers WELCOME with its own, or
REFUSED with the reason. Then DATA flows one way and CREDIT the other, until one of the two says GOODBYE::

    producer                                    consumer
       |  HELLO  (or the other way round:          |
       | ----------------------------------------> |
       |                                  WELCOME  |     the connector says HELLO, the binder WELCOME)
       | <---------------------------------------- |
       |  DATA 1, DATA 2, ... up to the window     |
       | ----------------------------------------> |
       |                    CREDIT 1, CREDIT 2     |     sent when get() takes a message: acknowledgement and credit
       | <---------------------------------------- |
       |  GOODBYE                                  |
       | ----------------------------------------> |

Both sides count a producer's messages to one peer, beginning where its HELLO or WELCOME says. So a message that was lost with a
connection is noticed, and none is taken twice. A waiting connector repeats its HELLO, at growing intervals, because a binder
that was restarted in between does not know it. The binder answers with a WELCOME, so that each learns where the other stands.
A binder that misses something, or does not know its peer, says HELLO to make the connector repeat its own.

**When a connection ends**, what came by it is still read, and a connector reads all of it before it hears the next binder. Over
ipc and inproc a connection ends because a process died or closed its end. Then the peer is gone, and the messages that it had
not taken are lost. Over tcp the line may have been cut. So a producer keeps what was not acknowledged (``resend_buffer``), and
a peer without a connection is *away*, and remains a peer. No new message is put to it, and Full and Empty name it and tell how
long it has been silent. ZeroMQ's heartbeats end a silent connection within 2 s, in either direction, and connections are
checked every half second. A connector connects anew inside its own calls. With each new connection, and at each gap, the
consumer raises its ``round`` in its HELLO or WELCOME. Then the producer sends again all that it keeps. The consumer takes each
message that is its next, and drops the others. So every message is taken once and in order, however often the line breaks, and
a break costs one more transmission of what was in flight.

An end waits for a peer that is away as long as the peer's end is seen to be open (``presence``). A peer that is out of sight is
given up ``peer_timeout`` seconds after its last sign of life. Then it counts as gone; it does so at once if its end is seen to
be gone, or if another end answers in its place. What was kept for it is lost, and PeerLost tells that once. If it comes back,
the two go on with the messages that are put from then on, and the consumer counts the gap.

**How an end ended** stands in its GOODBYE, and also in its own file, with its position for each peer. So messages that were on
their way when a connection broke are counted exactly, and a goodbye is known although it never left.

Two ends on one host replace DATA and CREDIT by a queue in shared memory, and say all else as before. ``greeting``,
``negotiation`` and ``rendezvous`` tell how they come to it. Messages that wait in a queue outlive the conversation. While a
line that was cut is made anew, both ends go on with the queue.

There is no thread. Messages that have arrived are handled inside put, get, flush and close.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from tensorpipe_ipc.endpoints import rendezvous, whereabouts
from tensorpipe_ipc.endpoints.greeting import REPEAT, Greeting
from tensorpipe_ipc.endpoints.negotiation import Negotiation
from tensorpipe_ipc.endpoints.peer import How, Peer, ending_by
from tensorpipe_ipc.endpoints.presence import LastWords, Presence, Sight, is_binders
from tensorpipe_ipc.endpoints.published_status import Attached, PublishedStatus, framed
from tensorpipe_ipc.endpoints.role import misfit
from tensorpipe_ipc.errors import ProtocolError, Refused, TensorPipeError, VersionMismatch
from tensorpipe_ipc.handlers import is_a_signals
from tensorpipe_ipc.limits import check_bool, check_count, check_timeout
from tensorpipe_ipc.process import identity, is_dead
from tensorpipe_ipc.security import Curve
from tensorpipe_ipc.wire.header import (
    Ending,
    Header,
    Hello,
    Kind,
    Refusal,
    cut,
    ending_of,
    failed,
    pack_control,
    pack_goodbye,
    pack_refusal,
    shown,
    unpack,
    unpack_control,
)
from tensorpipe_ipc.wire.layout import BULK
from tensorpipe_ipc.zeromq.addresses import parse
from tensorpipe_ipc.zeromq.binder import Binder
from tensorpipe_ipc.zeromq.connector import Connector
from tensorpipe_ipc.zeromq.zmq_sockets import SLICE, SocketError

__all__ = ["PEER_TIMEOUT", "Link", "Opening", "log"]

log = logging.getLogger("tensorpipe_ipc")

_STRANGERS = 5  # times as long as it took to hear one, nothing is heard from strangers
_STRANGERS_AT_ONCE = 1.0  # seconds of that which are let go by: many may come at a time
_CROWD = ProtocolError("more strangers say something than there is a fifth of the time for")
_IDLE = 16  # messages that bring nothing and that a peer may say at a time, beside four times what may be in flight
_IDLES = ProtocolError("it said too much that brings nothing, and was hung up on")
_IDLE_AGAIN = 1.0  # seconds
_STALE = 0.01  # seconds; a producer in full swing looks for credits after it has sent, which is off the message's way
_ANSWER_AGAIN = 0.1  # seconds
_MAX_REJECTION = 2000  # bytes of text
_MAX_ROLE = 16  # of one that is none
PEER_TIMEOUT = 60.0  # seconds
_AT_ONCE = 0.02  # seconds that one call deals with what comes, beyond its own deadline; there may be no end of it
_ON_ITS_WAY = 5.0  # seconds of silence until messages that an end had sent, and that do not come, are given up
_COMPLAINT = 5.0  # seconds
_CONNECTS = 0.25  # seconds that a closing connector tries to get the binder whose queue it has claimed
_LONELY = 0.2  # seconds until it is found out why nobody comes
_REMEMBERED = 1000  # ends that have ended, and connections
_POST_LONG = 0.001  # seconds of work for the status of an end with some hundred peers
_POST_RARELY = 20  # times as long nothing more is posted then
MOST_PEERS = 1024  # of a binder: each may cost four descriptors, and is looked at several times a second
_IN_TURN = 4 * MOST_PEERS  # messages of others, within which one comes of each connection that has any: they take turns
_NOTHING = b""  # said to see whether there is a connection; whoever gets it drops it, and keeps 64 bytes until then
_NAMED = 16  # peers, in the text of an error
_ASKED = 64  # peers that are asked whether their connection has ended, to make room for another


class Opening(NamedTuple):
    """The arguments by which an end of either kind is opened."""

    endpoint: str
    bind: bool
    window: int
    shared_memory: str
    security: Curve | None
    peer_timeout: float

    @classmethod
    def checked(
        cls, endpoint: str, bind: bool, maxsize: int, shared_memory: str, security: Curve | None, peer_timeout: float
    ) -> Opening:
        """Take what a user gave. The endpoint, the shared memory and the keys are looked at where the end is opened.

        Raises:
            TypeError, ValueError: ``bind`` is no bool, ``maxsize`` no count, or ``peer_timeout`` no number of seconds.
        """
        window, patience = (
            check_count(maxsize, "maxsize"),
            check_timeout(peer_timeout, "peer_timeout", "math.inf for ever"),
        )
        return cls(endpoint, check_bool(bind, "bind"), window, shared_memory, security, patience)


class Link(Greeting):
    """One end's side of the conversation. ``SendLink`` and ``ReceiveLink`` add what is the producer's and the consumer's.

    Attributes:
        presence: this end's own; None within one process.
        peers: those who are there, by routing id.
        peer_timeout: seconds until a peer out of sight is given up.
        ending: how this end ends, when it does.
        has_parted: whether it has begun to close, and says nothing any more.
        last_left: the one that left last, None as long as none did.
        lost: messages that were in flight when a peer left, or that a connection swallowed.
        rejected: incoming messages that were dropped because they broke a rule.
        last_rejection: which rule; "" as long as none was.
    """

    def __init__(self, opening: Opening) -> None:
        """Nothing is opened yet."""
        super().__init__()
        bind, security = opening.bind, opening.security
        if security is not None and not isinstance(security, Curve):
            raise TypeError(
                f"security={security!r} is a {type(security).__name__}; give a tensorpipe_ipc.Curve, or None"
            )
        self.has_keys = security is not None
        address = parse(opening.endpoint, has_keys=self.has_keys)
        self.negotiation = Negotiation(address, opening.shared_memory, self.role, binds=bind)
        self.window = opening.window
        self.keeps = address.scheme == "tcp"  # what is in flight in frames outlives its connection
        self.peer_timeout = opening.peer_timeout
        self.ending = Ending()
        self._alone_since = 0.0
        self._has_complained = False
        self._probed = (0.0, "")  # when it was last found out why nobody comes, and why
        self.peers: dict[bytes, Peer] = {}
        self.has_parted = False
        self.last_left: Peer | None = None
        self.lost = 0
        self.rejected = 0
        self.last_rejection = ""
        self._refusal: Exception | None = None
        # Those that said how they ended: they do not come again. Strangers do not push those out that were in sight.
        self.ended_ends: dict[int, None] = {}
        self.ended_afar: dict[int, None] = {}
        # By routing id: what was said since by connections of ends that have ended, or have another now.
        self._over: dict[bytes, int] = {}
        self._answered: dict[bytes, float] = {}  # by routing id: when one that is no peer was answered
        self._hangs_up = bind and address.scheme == "tcp"  # over ipc nobody but this user connects
        self._strangers_from = 0.0  # when there is time for somebody who is no peer
        self._drained = 0.0
        self._looked = 0.0  # when it was last seen to who is still there
        self._tears = 0  # of the socket, that were dealt with
        self._is_posted = False  # whether this end's file is up to date
        self._posts_from = 0.0  # when it may be brought up to date again
        self.socket = (Binder if bind else Connector)(
            address, receives=self.role == "consumer", window=opening.window, security=security
        )
        self.presence = Presence(binds=bind) if address.scheme != "inproc" else None
        self.end = self.presence.token if self.presence is not None else int.from_bytes(os.urandom(7), "little")

    def open(self) -> None:
        """Bind or connect, and be seen. Whatever ends it, nothing is left of it then.

        Raises:
            ValueError: keys that are needed were not named.
            Refused: the address is in use, not allowed, or not safe, or a key file cannot be used.
        """
        try:
            self._open_socket()
            whereabouts.note(id(self), self.endpoint, self.role, binds=self.socket.binds)
            if self.presence is not None:
                self.presence.open()
            self._publish()
            self.expect()
        except BaseException:
            self.has_parted = True
            self.disconnect(0)
            raise

    def _open_socket(self) -> None:
        try:
            self.socket.open(self.reject)
        except Refused:
            here = whereabouts.binder_here(self.endpoint) if self.socket.binds else None
            if here is None:
                raise
            raise Refused(
                f"{self.endpoint} belongs to a {here.role} of this very process (pid {os.getpid()}), made at {here.made_at}: "
                "close it, or use another name"
            ) from None

    @property
    def folder(self) -> int:
        """The mark of the runtime folder that this end is in; 0 where it is in none."""
        return self.presence.folder if self.presence is not None else 0

    @property
    def endpoint(self) -> str:
        """The address, with the port that was chosen if it was left open."""
        return self.socket.address.text

    # -- what goes out

    def _say(self, peer: bytes, frame: bytes) -> bool:
        return self.socket.send_small(peer, frame)

    def end_by(self, error: BaseException | None) -> None:
        """Take down how this end ends: its ``with`` block was left by an exception, or by none."""
        if error is not None:  # it stays so where another exception comes while its text is asked for
            self.ending = failed(type(error).__name__)
        self.ending = ending_by(error)

    def say_goodbye(self) -> bool:
        """Tell everybody who is there how this end ends, and write it into its file. Return whether anybody was told.

        Those who are gone are not: what is sent to them never leaves, and closing would wait for it as long as it may linger.
        """
        self.hear_claimants()
        if not self.keeps and any(peer.by_file for peer in self.peers.values()):
            self.socket.is_connected(_CONNECTS)
        if (self.peers or not self.keeps) and self.owes_greeting():
            self.say_hello_if_due()
        there = [peer for peer in self.peers.values() if not peer.sight.is_gone()]
        told = [self._say(self._way_to(peer), pack_goodbye(self.position(peer), self.ending)) for peer in there]
        if self.awaits_welcome():
            told.append(self._say(self._greeted_on, pack_goodbye(self.own_hello(None).sequence, self.ending)))
        self._end_presence()
        return any(told)

    def _way_to(self, peer: Peer) -> bytes:
        """Return the connection for a last word: a connector may have said HELLO by a new one, and not been answered yet."""
        return self._greeted_on if not self.socket.binds and peer is self.binder() else peer.routing

    def _end_presence(self) -> None:
        if self.presence is not None:
            by_frames = [peer for peer in self.peers.values() if peer.queue is None and peer.hello.end]
            self.presence.end(LastWords(self.ending, {peer.hello.end: self.position(peer) for peer in by_frames}))

    # -- what comes in

    def pump(self, timeout: float) -> tuple[Peer, Header, list[Any]] | None:
        """Wait for one message and deal with it, if it is the conversation's own business.

        Args:
            timeout: seconds; cut to ``SLICE``, so that what is due in between gets done.

        Returns:
            The peer, header and frames of a DATA message, again until it is ``taken``; None for all else, and for nothing.
        """
        met = len(self.peers)
        if not self.ensure_greeted(min(timeout, SLICE)):
            return None
        if len(self.peers) > met:
            return None  # by the file, which may lead to more than a socket has
        self.look_now_and_then()
        incoming = self.socket.receive(min(timeout, SLICE))
        if incoming is None:
            self.look_around()
            return None
        if self.socket.reads_out and self._is_early(*incoming):
            self.socket.defer()
            return None
        if self.peers and incoming[0] not in self.peers and not self.socket.binds and self._is_anothers(incoming[1]):
            for peer in list(self.peers.values()):
                self._leaves(peer, How.LOST)  # what it said is read. That is told before what the next one says
            return None
        self._came += 1
        data = self._hear_bounded(*incoming) if self._hangs_up else self._hear_or_reject(*incoming)
        if data is None:
            self.socket.received()
        return data

    def _is_early(self, routing: bytes, frames: list[Any]) -> bool:
        """Return whether what came by a connector's connection is to wait until that of the one before is read out.

        All that a binder says is, but for one that is the same as before: it sends again what was not read.
        """
        if routing == self.socket.reads_out:
            return False
        hello = _welcome_in(frames)
        return hello is None or not any(peer.is_still(hello) for peer in self.peers.values())

    def _is_anothers(self, frames: list[Any]) -> bool:
        """Return whether a connector's message is the WELCOME of another binder than it knows, in that one's place."""
        hello = _welcome_in(frames)
        if hello is None or self.has_left(hello) or self.is_late_answer(self.binder(), hello):
            return False
        return not any(peer.is_still(hello) for peer in self.peers.values())

    def _hear_bounded(self, routing: bytes, frames: list[Any]) -> tuple[Peer, Header, list[Any]] | None:
        """Hear what came to a port that strangers reach, and hang up on those who take more of this end's time than they may.

        Strangers have a fifth of the time together, and more for a moment, as many may come at once: those who are no peers,
        and peers out of sight that have brought nothing yet. Over that, one that is no peer is hung up on unheard, unless it is
        seen to be an end of this user. It connects anew by itself, until there is time for it. So is one that is no peer, and
        says more than one thing at a time.
        """
        if routing in self._over:
            self._pass_over(routing, len(frames[-1]))
            return None
        peer, now = self.peers.get(routing), time.monotonic()
        if peer is None:
            is_again = now - self._answered.get(routing, 0.0) < _ANSWER_AGAIN
            is_too_much = now < self._strangers_from and not self._is_hello_in_sight(frames)
            if is_again or is_too_much:
                if is_again:  # why, the first one has told
                    self.rejected += 1
                else:
                    self.reject(_CROWD)
                self.socket.hang_up()
                return None
        is_strange = peer is None or not peer.brought and not _is_seen(peer)
        began = time.thread_time() if is_strange else 0.0
        stood = peer.taken if peer is not None else 0
        data = self._hear_or_reject(routing, frames)
        if peer is None:
            if routing not in self.peers:
                self._note_answered(routing, now)
        elif data is not None or peer.taken != stood or len(frames[-1]) >= BULK:
            peer.brought += 1
            peer.idle = 0
        elif self._is_idle_too_long(self.peers.get(routing, peer), now):  # it may say that it is another by now
            self.reject(_IDLES, peer)
            self.socket.hang_up()
        if is_strange and not _is_seen(self.peers.get(routing)):
            due = max(self._strangers_from, now - _STRANGERS_AT_ONCE) + _STRANGERS * (time.thread_time() - began)
            self._strangers_from = min(due, now + _STRANGERS_AT_ONCE)  # peers among them are heard all the same
        return data

    def _pass_over(self, routing: bytes, nbytes: int) -> None:
        """Drop what comes by a connection whose end has no more to say by it: a few times what may have been on its way.

        Of a large message's pieces, that is any number. It may have ended, and its descriptor be that of the end's next one.
        """
        self._over[routing] += nbytes < BULK
        if self._over[routing] > _IDLE + 4 * self.window:
            self.reject(_IDLES)
            self.socket.hang_up()

    def _is_hello_in_sight(self, frames: list[Any]) -> bool:
        """Return whether this is the HELLO of an end of this user, for whom there is always time.

        One that is seen no more, as it has closed, has claimed a queue: its token, too, no stranger knows.
        """
        with contextlib.suppress(ProtocolError):
            header = unpack(frames[0])
            if header.kind == Kind.HELLO:
                hello = unpack_control(header, Hello)
                return self.has_claimed(hello) or self._is_in_sight(hello)
        return False

    def _is_idle_too_long(self, peer: Peer, now: float) -> bool:
        """Count what brought nothing. Return whether a peer says too much of that at a time.

        A peer that keeps the rules says such things where a line is cut: all that was in flight comes once or twice again.
        """
        if not peer.settled and _is_seen(peer):  # it asks until there is a queue for it
            return False
        if now - peer.idle_from > _IDLE_AGAIN:
            peer.idle, peer.idle_from = 0, now
        peer.idle += 1
        if peer.idle <= _IDLE:
            return False
        window = min(self.window, peer.hello.window)
        return peer.idle > _IDLE + 4 * (window if _is_seen(peer) else min(window, peer.brought))

    def _hear_or_reject(self, routing: bytes, frames: list[Any]) -> tuple[Peer, Header, list[Any]] | None:
        try:
            return self._hear(routing, frames)
        except ProtocolError as error:
            self.reject(error, self.peers.get(routing))
            self._answer_misfit(routing, error)
        except Exception as error:
            if isinstance(error, (TensorPipeError, SocketError)) or is_a_signals(error, error.__traceback__):
                raise
            self.reject(error, self.peers.get(routing))  # whatever a message does to what reads it, the next one comes
        return None

    def drain(self, *, in_passing: bool = False, due: int = 1) -> None:
        """Deal with what has arrived, and do not wait; with no more than can be dealt with at once.

        Args:
            in_passing: with ``due`` messages, or for a fifth of the time on the whole: there may be no end of what comes.
            due: how many messages are wanted.
        """
        self.ensure_greeted(0)
        began = now = time.monotonic()
        enough = began + (now - self._drained) / 4 if in_passing else began + _AT_ONCE
        while now < began + _AT_ONCE and (due > 0 or now < enough) and self.socket.has_incoming():
            self.pump(0)
            due, now = due - 1, time.monotonic()
        self._drained = time.monotonic()

    def is_stale(self) -> bool:
        """Return whether it is long ago that the last was drained: somebody may have said goodbye since."""
        return time.monotonic() - self._drained > _STALE

    def is_late(self, deadline: float | None) -> bool:
        """Return whether a deadline is over, and so is the time for what has come meanwhile."""
        return deadline is not None and time.monotonic() > deadline + _AT_ONCE

    def complain_if_alone(self) -> None:
        """Log, once, that this end has waited for some seconds, and nobody ever came. To be called in each slice of a wait."""
        if self.peers or self.last_left is not None or self._has_complained:
            return
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since > _COMPLAINT:
            self._has_complained = True
            log.warning(
                "%s has waited for %.0f s: %s%s", self.endpoint, _COMPLAINT, self.why_alone(), self.connect_error()
            )

    def why_alone(self) -> str:
        """Say that nobody has come, and what may be the reason."""
        other = "consumer" if self.role == "producer" else "producer"
        why = self._why_nobody(other)
        turned_away = (
            f"; {self.rejected} times somebody was turned away: {self.last_rejection}" if self.rejected else ""
        )
        return f"no {other} has come to {self.endpoint} yet{why and f': {why}'}{turned_away}"

    def named(self, peers: Iterator[str]) -> str:
        """Name the peers in a text, the first of them only where there are many."""
        told = list(itertools.islice(peers, _NAMED))
        left = len(self.peers) - len(told)
        return "; ".join(told) + (f"; and {left} more" if left else "")

    def _why_nobody(self, other: str) -> str:
        here = whereabouts.others_here(self.endpoint, self.role, met_by_binder=self.socket.binds)
        if here is not None:
            return f"the {other} of this very process, made at {here.made_at}, has to be in use meanwhile, in another thread"
        if self.socket.binds or self.socket.connect_error():
            return ""
        if self.socket.connection and self.socket.address.scheme != "inproc":
            return f"the {other} is there and has not answered: it computes, or is stopped"
        now, (probed, why) = time.monotonic(), self._probed
        if self._alone_since and now - self._alone_since > _LONELY and (not why or now - probed > REPEAT):
            why = whereabouts.why_nobody(self.socket.address)
            self._probed = now, why
        return why

    def reject(self, error: Exception, peer: Peer | None = None) -> None:
        """Count a message that was dropped. Say whose it was, where that is known."""
        self.rejected += 1
        said = str(error) if isinstance(error, TensorPipeError) else f"{type(error).__name__}: {error}"
        whose = "" if peer is None else f" (from {peer.hello.role} {peer.identity})"
        # What reads a message may repeat of it what a terminal would obey.
        self.last_rejection = cut(shown(said + whose), _MAX_REJECTION)

    def _hear(self, routing: bytes, frames: list[Any]) -> tuple[Peer, Header, list[Any]] | None:
        surplus = self.socket.surplus
        if surplus or not len(frames[-1]):
            self._hear_cut_off(routing, frames)
            if surplus:
                raise ProtocolError(surplus)
            return None
        header = unpack(frames[0])
        kind = header.kind
        if kind >= Kind.DATA:
            peer = self.peers.get(routing)
            if peer is None:
                self._meet_stranger(routing, kind)
                return None
            if peer.by_file:  # it says WELCOME first: this came by the connection with the one before it
                return None
            peer.heard, peer.unread_from = time.monotonic(), 0
            if kind == Kind.DATA:
                if not self.expects(peer, header):
                    return None
                if peer.reassembly is not None:
                    if len(frames) == 1 and self.lacks_pieces(peer, header):
                        return None
                    header, frames = peer.reassembly.completed(header, frames)
                return peer, header, frames
            if kind == Kind.CREDIT:
                self.credited(peer, header.sequence)
            elif kind == Kind.PIECE:
                self.piece(peer, header, frames)
            else:
                self._ends(peer, ending_of(header), header.sequence)
        elif kind == Kind.HELLO:
            self._hear_hello(routing, header)
        elif self.socket.binds:
            raise ProtocolError(f"a {Kind.NAMES[kind]} from a connector; only a binder says that")
        elif kind == Kind.WELCOME:
            hello = unpack_control(header, Hello)
            if not self.has_left(hello) and not self.is_late_answer(self.binder(), hello):
                self._find_again(routing, hello)
                self._admit(routing, hello)
            self.say_hello_if_due()
        else:
            self._refusal = Refused(f"{self.endpoint}: {unpack_control(header, Refusal).reason}")
            self._greets_after = REPEAT  # it reads what is said to it, and may say otherwise at any moment
            self.turned_away()
            self._publish()
        return None

    def _hear_cut_off(self, routing: bytes, frames: list[Any]) -> None:
        """A message that its sender gave up, as an empty last frame says: its sequence is used up, and that is all."""
        peer = self.peers.get(routing)
        if len(frames) > 1 and peer is not None and not peer.by_file:
            header = unpack(frames[0])
            if header.kind == Kind.DATA and header.sequence > peer.taken and self.expects(peer, header):
                self.taken(peer, header, is_whole=False)

    def _answer_misfit(self, routing: bytes, error: ProtocolError) -> None:
        """Tell an end of another version so; do not answer garbage."""
        if not isinstance(error, VersionMismatch):
            return
        if self.socket.binds:
            self._answer(routing, pack_refusal(f"this binder refuses: {error}"))
        elif not self.peers:
            self._refusal = error

    def _meet_stranger(self, routing: bytes, kind: int) -> None:
        """Handle a message of an end that has not said HELLO here. It met a binder that died, or no binder at all.

        What is left of a connection that a new one has replaced comes in this way, too. So does what is left of one whose end
        has ended: the end's file may tell that before its GOODBYE has come.
        """
        if routing in self._over or not self.socket.binds and self.left_by(routing):
            return
        self.reject(ProtocolError(f"{Kind.NAMES[kind]} from an end that has not said HELLO"))
        if self.socket.binds:
            self._answer(routing, pack_control(Kind.HELLO, self.own_hello(None)))

    def _answer(self, routing: bytes, frame: bytes) -> None:
        """Say something to an end that is no peer, unless it was answered just now: it may ask for ever, and never read."""
        now = time.monotonic()
        if now - self._answered.get(routing, 0.0) < _ANSWER_AGAIN:
            return
        self._note_answered(routing, now)
        self._say(routing, frame)

    def _note_answered(self, routing: bytes, now: float) -> None:
        if len(self._answered) >= MOST_PEERS:
            self._answered.clear()
        self._answered[routing] = now

    def _hear_hello(self, routing: bytes, header: Header) -> None:
        if not self.socket.binds:  # a binder that does not know us asks who we are
            self._greeted = 0.0
            self.say_hello_if_due()
            return
        hello = unpack_control(header, Hello)
        if self.has_left(hello) or self._is_said_before(routing, hello):
            _remember(self._over, routing, 0)
            return
        if self._is_leaving and not self.has_claimed(hello):
            return  # there is no queue for it any more: it meets the next binder
        reason = misfit(self.own_hello(None), hello) or self.negotiation.violated_requirement(
            hello, rendezvous.objection(self.own_hello(None), hello)
        )
        if not reason:
            self._find_again(routing, hello)
        if routing not in self.peers and not reason:
            reason = self._no_place_for(hello)
        if not reason:
            peer = self._admit(routing, hello)
            peer.process = self.socket.process_behind()
            reason = self.negotiation.violated_requirement(hello, peer.why_not)
        if reason:
            self.reject(Refused(reason))
            if routing in self.peers:
                self._leaves(self.peers[routing], How.REFUSED)
            self.refuse_standby(hello)
            self._answer(routing, pack_refusal(reason))
            return
        self._say(routing, pack_control(Kind.WELCOME, self.own_hello(peer)))
        self.answered(peer)

    def _is_said_before(self, routing: bytes, hello: Hello) -> bool:
        """Return whether an end said so by the connection before the one that it is known by.

        ZeroMQ hands out what came by each in no order. By each new connection a connector counts its ``round`` up.
        """
        if routing in self.peers or not hello.end:
            return False
        return any(peer.is_still(hello) and hello.round < peer.hello.round for peer in self.peers.values())

    def _find_again(self, routing: bytes, hello: Hello) -> None:
        """Know an end again that comes by a new connection. Nobody but its binders has heard a connector's token."""
        if routing in self.peers:
            return
        for peer in [each for each in self.peers.values() if hello.end and each.is_still(hello)]:
            if self.socket.binds:
                _remember(self._over, peer.routing, 0)
            else:
                self.socket.drop(peer.routing)
            self.came_again(peer, hello.sequence)
            if peer.left is not None:
                continue
            del self.peers[peer.routing]  # no exception comes between this and the last of it
            peer.routing, peer.gone_at = routing, 0.0
            self.peers[routing] = peer

    def _no_place_for(self, hello: Hello) -> str:
        """Say why a newcomer cannot come in; "" if it can."""
        taken = {peer.hello.end for peer in self.peers.values()} | {self.end}
        if hello.end and hello.end in taken:
            return "it says that it is an end which is attached already, or this one"
        if len(self.peers) >= MOST_PEERS and not self._make_room(hello):
            return f"{MOST_PEERS} peers are attached to {self.endpoint} already, and it takes no more"
        return ""

    def _make_room(self, hello: Hello) -> bool:
        """Strike off a peer out of sight, for a newcomer. Return whether there was one.

        One whose connection has ended, and for whom nothing is kept, makes room for anybody. So connections that last for a
        moment do not shut others out for as long as one waits for who may come back. Where there is none, any gives way to an
        end that is in sight: whoever is not this user can hold all places, and keeps none of this user's ends out.
        """
        out = [peer for peer in self.peers.values() if peer.sight.is_out_of_sight and peer.queue is None]
        out.sort(key=lambda peer: (bool(peer.kept), not peer.away_at, peer.heard))
        for peer in out[:_ASKED]:
            if not peer.kept and not self._say(peer.routing, _NOTHING):
                self._leaves(peer, How.LOST)
                return True
        if not out or not self._is_in_sight(hello):
            return False
        reason = (
            f"{MOST_PEERS} peers are attached to {self.endpoint}: one that is out of sight gave way to one in sight"
        )
        self.reject(Refused(reason), out[0])
        self._leaves(out[0], How.LOST if out[0].sent or out[0].taken else How.REFUSED)
        self._answer(out[0].routing, pack_refusal(reason))
        return True

    def _is_in_sight(self, hello: Hello) -> bool:
        """Return whether an end that says HELLO is seen to be open."""
        with contextlib.closing(self._sight_of(hello)) as sight:
            return not sight.is_out_of_sight and not sight.is_gone()

    def _admit(self, routing: bytes, hello: Hello) -> Peer:
        if {hello.role, self.role} != {"producer", "consumer"}:
            raise ProtocolError(f"a WELCOME from a {cut(hello.role, _MAX_ROLE)} to a {self.role}")
        peer = self.peers.get(routing)
        if peer is not None and self.is_old_answer(peer, hello):
            return peer
        if peer is None or not peer.is_still(hello) or self.negotiation.begins_anew(peer, hello):
            before = peer
            if before is not None:
                self._leaves(before, How.LOST)
            peer = Peer(routing, hello, self._sight_of(hello))
            if before is not None:  # by the same connection
                peer.idle, peer.idle_from = before.idle, before.idle_from
            self.met(peer)
            self.peers[routing] = peer  # no exception comes between what met did last and this
        self._refusal = None
        peer.hello = hello
        peer.heard_of()
        self._arrange(peer)
        self.stands_at(peer, hello.sequence)
        self._publish()
        return peer

    def _arrange(self, peer: Peer) -> None:
        """See to it that the two have a queue, or know why not. May be cut short anywhere, and called again."""
        if not peer.settled:
            peer.why_not = rendezvous.objection(self.own_hello(None), peer.hello)
            if not peer.why_not:
                (self.give_standby if self.socket.binds else self.take_standby)(peer)
            if peer.why_not:
                self.unshare(peer)
                violated_requirement = self.negotiation.violated_requirement(peer.hello, peer.why_not)
                peer.settled = not violated_requirement
                if not self.socket.binds:
                    self._refusal = (
                        Refused(f"{self.endpoint}: {violated_requirement}") if violated_requirement else None
                    )
        if peer.queue is not None:
            self.shares(peer)

    def _sight_of(self, hello: Hello) -> Sight:
        """See Meeting."""
        if self.presence is None:
            return Sight()
        if hello.folder and is_binders(hello.end) is self.socket.binds:
            return Sight(why_not=f"it names an end that {'binds' if self.socket.binds else 'connects'}")
        return self.presence.sight_of(hello.end, hello.folder)

    def _ends(self, peer: Peer, ending: Ending, position: int) -> None:
        """A peer ends, and has come so far with this end."""
        if peer.queue is None:
            self.ended_at(peer, position)
        peer.ending = ending
        self._leaves(peer, How.FAILED if ending.failure else How.GOODBYE)

    def _leaves(self, peer: Peer, how: How) -> None:
        """A peer is gone. An exception may come anywhere in this; then it is done again, with what was found out."""
        if peer.routing in self.peers:
            how = peer.left or how
            last_words = peer.sight.last_words() if how is How.LOST else None
            if peer.hello.end and (last_words is not None or how in (How.GOODBYE, How.FAILED)):
                _remember(self.ended_afar if peer.sight.is_out_of_sight else self.ended_ends, peer.hello.end)
                if self.socket.binds:
                    _remember(self._over, peer.routing, 0)
            if last_words is not None:
                self._ends(peer, last_words.ending, self._position_of(last_words))
                return
            self.transport()  # it is told as it last was
            peer.leave(how)
            self.last_left = peer
            self.parted(peer)
            del self.peers[peer.routing]  # no exception comes between what parted did last and this
            self.let_go(peer)
            self._publish()

    def _publish(self) -> None:
        """Tell whoever may look who is attached, and how."""
        self.restock(MOST_PEERS - sum(peer.settled and not peer.sight.is_out_of_sight for peer in self.peers.values()))
        self._is_posted = False
        self._publish_status()

    def _publish_status(self) -> None:
        """Bring this end's file up to date; with many peers, in a part of the time only, as each message may change it."""
        if self.presence is not None and not self._is_posted and time.monotonic() >= self._posts_from:
            began = time.thread_time()
            way, wanted = self.negotiation.transport_with, self.negotiation.is_wanted_with
            peers = (Attached(each.hello.role, each.identity, way(each), wanted(each)) for each in self.peers.values())
            refusal = str(self._refusal or "")
            status = PublishedStatus(self.endpoint, self.role, self.socket.binds, identity(), tuple(peers), refusal)
            self.presence.publish(framed(status))
            self._is_posted = True
            took = time.thread_time() - began
            self._posts_from = time.monotonic() + took * _POST_RARELY if took > _POST_LONG else 0.0

    def disconnect(self, linger: float) -> None:
        """Close the socket; what was sent goes on leaving for up to ``linger`` seconds. Again: what an exception left."""
        with contextlib.ExitStack() as steps:  # from the last to the first; each is done though another raises
            steps.callback(self.peers.clear)
            steps.callback(self.socket.close, linger)
            steps.callback(self.standby.close)
            if self.presence is not None:
                steps.callback(self.presence.close)
            for peer in self.peers.values():
                steps.callback(peer.sight.close)
            steps.callback(self._end_presence)
            steps.callback(whereabouts.forget, id(self))

    def transport(self) -> str:
        """Return how messages travel, and why so."""
        return self.negotiation.transport(self.peers.values())

    def look_around(self, *, at_once: bool = False) -> None:
        """See who is still there, when nothing has come; not too often, but at once where a connection was lost."""
        now = time.monotonic()
        if now - self._looked < SLICE / 2 and not at_once and not self.has_lost_connection():
            return
        self._looked = now
        self._publish_status()
        if self.socket.tears.count > self._tears:
            self._tears = self.socket.tears.count
            self.tore()
        again = now - self._greeted >= REPEAT
        for peer in list(self.peers.values()):
            if peer.queue is not None:
                peer.queue.arena.mind_idle(peer.queue.attachment.recover_dead)
            if self._is_gone(peer, again):
                self._leaves(peer, How.LOST)
                again = True
                if time.monotonic() - now > _AT_ONCE:  # there may be a thousand
                    break
        self.see_to_deserted()
        if again and self.socket.binds:
            self._greeted = now
        elif not self.socket.binds:
            self.hang_up_on_left()
            self.say_hello_if_due()

    def look_now_and_then(self) -> None:
        """See who is still there, also while there is no end of what comes."""
        if time.monotonic() - self._looked > REPEAT:
            self.look_around()

    def trim(self) -> int:
        """Give back all memory of this end's queues that nobody needs now, whichever process has it. Return its bytes."""
        attachments = {id(peer.queue.attachment): peer.queue.attachment for peer in self.peers.values() if peer.queue}
        return sum(attachment.trim() for attachment in attachments.values())

    def tore(self) -> None:
        """An exception tore something out of a receive, perhaps a CREDIT: have those who may have sent it say it again."""
        self._greeted = 0.0  # a connector's HELLO is answered by that
        if self.socket.binds:
            for peer in self.peers.values():
                if peer.queue is None:
                    self._say(peer.routing, pack_control(Kind.HELLO, self.own_hello(None)))

    def _is_gone(self, peer: Peer, again: bool) -> bool:
        """Return whether nothing more can come from a peer: it is gone, and all that came from it was taken."""
        gone = peer.sight.is_gone() or again and peer.sight.is_out_of_sight and self._is_orphaned(peer)
        if not self.socket.binds:
            connected = self.socket.reaches(peer.routing)
        elif gone or again:
            connected = self._say(peer.routing, _NOTHING)
        else:
            connected = True
        if gone:
            peer.gone_at = peer.gone_at or time.monotonic()
            if self._may_have_unread(peer):
                return False
            return not connected or time.monotonic() - peer.gone_at >= self._silence_of(peer)
        return not connected and not self._may_have_unread(peer) and not self.waits_for(peer)

    def _is_orphaned(self, peer: Peer) -> bool:
        """Return whether a peer over ipc is dead, whoever still holds its connection open."""
        return is_dead(peer.process) if peer.process else self.socket.is_orphaned(peer.routing)

    def _may_have_unread(self, peer: Peer) -> bool:
        """Return whether something of a peer that has ended may have come and was not read yet.

        However seldom messages are taken, they are; and however much comes from others, its own come in their turn.
        """
        peer.unread_from = peer.unread_from or self._came
        return self._came - peer.unread_from < _IN_TURN and self.socket.has_unread(peer.routing)

    def _is_unread(self, came: int) -> bool:
        """See Meeting."""
        return self._came - came < _IN_TURN and self.socket.has_incoming()

    def _silence_of(self, peer: Peer) -> float:
        """Return how long nothing must come from one that is gone, and whose connection has not ended.

        What it sent last may still be on its way. Only where a child that was forked from it holds the connection open, or
        another has bound its address, will that never end. Of one whose messages lie in a queue nothing but a goodbye can be
        on its way; and one that said how far it had come, and came no further, sends nothing.
        """
        last_words = peer.sight.last_words()
        if last_words is not None:
            return _ON_ITS_WAY if self.misses(peer, self._position_of(last_words)) else 0
        return REPEAT if peer.queue is None else SLICE / 4

    def _position_of(self, last_words: LastWords) -> int:
        return last_words.positions.get(self.presence.token, 0) if self.presence is not None else 0

    def waits_for(self, peer: Peer) -> bool:
        """Return whether a peer whose connection has ended is away, and not gone.

        Over ipc a connector makes its connection anew when the binder before this one has left, and may do so after it met
        this one: that ends nothing between two that see each other, but for a connector's frames, which are lost.
        """
        if not peer.settled or not (self.keeps or self.socket.binds or peer.queue is not None):
            return False
        return peer.may_return(self.peer_timeout if self.keeps or peer.by_file else 0.0)

    def raise_refusal(self) -> None:
        """Raise what the binder refused this end with, if it did, and is still there. It is asked again.

        Raises:
            Refused: the binder does not take this end in.
            VersionMismatch: the binder speaks another version.
        """
        if self._refusal is not None:
            self.say_hello_if_due()
            self.drain()
        if self._refusal is not None and not self.socket.reaches(self._greeted_on):
            self._refusal = None  # who said so is gone: the next one may let this end in
            self._publish()
        if self._refusal is not None:
            raise self._refusal


def _welcome_in(frames: list[Any]) -> Hello | None:
    """Return what a WELCOME says; None if it is none."""
    with contextlib.suppress(ProtocolError):
        header = unpack(frames[0])
        if header.kind == Kind.WELCOME:
            return unpack_control(header, Hello)
    return None


def _is_seen(peer: Peer | None) -> bool:
    """Return whether a peer is an end of this user that is seen to be open: no stranger knows the token of such a one."""
    return peer is not None and not peer.sight.is_out_of_sight and not peer.sight.is_gone()


def _remember(known: dict[Any, Any], one: Any, value: Any = None) -> None:
    """Add one to those of whom the last thousand are known."""
    known[one] = value
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
