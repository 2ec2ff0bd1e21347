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
long it has been silent. ZeroMQ's heartbeats end a silent connection, in either direction (``zmq_sockets``), and connections are
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

``admission`` decides which ends become peers. Two ends on one host replace DATA and CREDIT by a queue in shared memory, and
say all else as before. ``greeting``, ``negotiation`` and ``rendezvous`` tell how they come to it. Messages that wait in a queue
outlive the conversation. While a line that was cut is made anew, both ends go on with the queue.

There is no thread. ``hear`` reads one message, and appends what it says to ``events``. The end (``sender``, ``receiver``) deals
with the events, and then says that it has ``heard`` the message. Until then the message is in hand: where an exception cuts
this short, it is read again. So is a message by which a peer has left: the end is to know that first.
The conversation asks its owner a few things (``Owner``), and knows no more of it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec

from tensorpipe_ipc.endpoints import absence, rendezvous_file
from tensorpipe_ipc.endpoints.absence import COMPLAINT, Absence
from tensorpipe_ipc.endpoints.admission import Admission
from tensorpipe_ipc.endpoints.events import Arrived, Credited, Event, GivenUp, Greeted, PieceArrived, Torn
from tensorpipe_ipc.endpoints.greeting import REPEAT, Greeting, is_late_answer
from tensorpipe_ipc.endpoints.negotiation import Negotiation
from tensorpipe_ipc.endpoints.peer import How, Peer
from tensorpipe_ipc.endpoints.peers import MOST_PEERS, Peers
from tensorpipe_ipc.endpoints.presence import LastWords, Presence, Sight
from tensorpipe_ipc.endpoints.published_status import Attached, PublishedStatus, StatusPage
from tensorpipe_ipc.endpoints.standby_queues import StandbyQueues
from tensorpipe_ipc.endpoints.strangers import CROWD, IDLES, Strangers
from tensorpipe_ipc.errors import ProtocolError, Refused, TensorPipeError, VersionMismatch
from tensorpipe_ipc.handlers import is_a_signals, reraise_from_handler
from tensorpipe_ipc.limits import check_bool, check_count, check_timeout
from tensorpipe_ipc.memory.leases import keeping, settle_kept
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.security import Curve
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.wire.header import (
    Ending,
    Header,
    Hello,
    Kind,
    Refusal,
    cut,
    ending_of,
    pack_control,
    pack_goodbye,
    pack_refusal,
    shown,
    unpack,
    unpack_begin,
    unpack_control,
)
from tensorpipe_ipc.zeromq.addresses import parse
from tensorpipe_ipc.zeromq.binder import Binder
from tensorpipe_ipc.zeromq.connector import Connector
from tensorpipe_ipc.zeromq.zmq_sockets import SLICE, FrameSocket, SocketError

__all__ = ["Conversation", "Opening", "Owner", "log"]

log = logging.getLogger("tensorpipe_ipc")

_MAX_REJECTION = 2000  # bytes of text
_CONNECTS = 0.25  # seconds that a closing connector tries to get the binder
_TOLD = 0.1  # seconds until a connection's end is known, where the other process has closed it
_AT_ONCE = 0.02  # seconds that one look at the peers may take
_LEAVE_AT_ONCE = 16  # peers that leave in one look
_NAMED = 16  # peers, in the text of an error


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


class Owner(Protocol):
    """The end that a conversation belongs to, as far as it is asked.

    Attributes:
        role: "producer" or "consumer".
    """

    role: str

    def hello(self, peer: Peer | None, *, is_news: bool = False) -> Hello:
        """Return what the end says of itself.

        Args:
            peer: to that peer; None: to anybody.
            is_news: whether a connector says so for the first time by a new connection.
        """

    def new_peer(self, routing: bytes, hello: Hello, sight: Sight) -> Any:
        """Return a peer of the role's kind, which is not attached yet. May be called in vain."""

    def give_back_idle(self) -> int:
        """Give back memory that lies idle with the end. Return the number of bytes."""

    def finishes(self) -> bool:
        """Return whether a connector that knows nobody has something of the binder before: then it meets the next one later."""


class _InHand(NamedTuple):
    """The message that was read, and is being dealt with."""

    routing: bytes
    nbytes: int  # of it
    peer: Peer | None  # by whose connection it came
    worth: int  # how many of its messages had brought something, or might have
    began: float  # in this thread's processor time, if it came from a stranger; else 0
    has_waited: bool  # whether there was time for it, and else would not have been heard


class Conversation:
    """One end's side of the conversation.

    Attributes:
        events: what the owner has not dealt with yet, oldest first.
        owner: the end.
        role: "producer" or "consumer".
        greeting: a connector's HELLOs.
        standby: a binder's queues for those to come.
        presence: this end's own; None within one process.
        peers: those who are there, by routing id.
        peer_timeout: seconds until a peer out of sight is given up.
        opened_at: when it bound or began to connect.
        has_parted: whether this end is not open yet, or has begun to close: it says nothing.
        refusal: what its binder refused this connector with; None if it did not.
        is_leaving: whether it takes in nobody any more but connectors that have claimed a queue of it.
        hangs_up: whether strangers reach this end, and are hung up on.
        strangers: its accounts of those that are no peers.
        nbytes: of all messages that came, ever.
        rejected: incoming messages that were dropped.
        last_rejection: why the last was; "" as long as none was.
        hears_again: whether the message in hand is to be read again.
        looks: how often this end has looked who is still there.
    """

    def __init__(self, owner: Owner, opening: Opening) -> None:
        """Nothing is opened yet."""
        bind, security = opening.bind, opening.security
        if security is not None and not isinstance(security, Curve):
            raise TypeError(
                f"security={security!r} is a {type(security).__name__}; give a tensorpipe_ipc.Curve, or None"
            )
        self.owner: Owner = weakref.proxy(owner)
        self.role = owner.role
        self.has_keys = security is not None
        address = parse(opening.endpoint, has_keys=self.has_keys)
        self.negotiation = Negotiation(address, opening.shared_memory, self.role, binds=bind)
        self.window = opening.window
        self.keeps = address.scheme == "tcp"  # what is in flight in frames outlives its connection
        self.peer_timeout = opening.peer_timeout
        self.events: deque[Event] = deque()
        self.has_parted = True
        self.refusal: Exception | None = None
        self.nbytes = self.rejected = 0
        self.last_rejection = ""
        self._in_hand: _InHand | None = None
        self.hears_again = False
        self.is_leaving = False
        self._early: list[tuple[bytes, Header, list[Any]]] = []  # messages of a binder whose WELCOME was torn
        self.strangers = Strangers(opening.window)
        self.hangs_up = bind and address.scheme == "tcp"  # over ipc nobody but this user connects
        self.looks = 0
        self._looked = 0.0  # when
        self.opened_at = 0.0
        self._asked = 0.0  # when a binder last asked who is still connected
        self._tears = 0  # of the socket, that were dealt with
        self.socket: FrameSocket = (Binder if bind else Connector)(
            address,
            receives=self.role == "consumer",
            window=opening.window,
            security=security,
            peer_timeout=opening.peer_timeout,
        )
        self.presence = Presence(binds=bind) if address.scheme != "inproc" else None
        self.end = self.presence.token if self.presence is not None else int.from_bytes(os.urandom(7), "little")
        self.peers = Peers(
            self.socket,
            self.presence,
            self.negotiation,
            self.strangers,
            self.events,
            keeps=self.keeps,
            patience=opening.peer_timeout,
        )
        self.standby = StandbyQueues()
        self.greeting = Greeting(weakref.proxy(self), self.socket)
        self._admission = Admission(weakref.proxy(self))
        self._absence = Absence(self.role, self.socket)
        self._status = StatusPage(self.presence)

    # -- opening and closing

    def open(self) -> None:
        """Bind or connect, and be seen. Whatever ends it, nothing is left of it then.

        Raises:
            ValueError: keys that are needed were not named.
            Refused: the address is in use, not allowed, or not safe, or a key file cannot be used; or too few descriptors are
                left.
        """
        try:
            self._open_socket()
            self.opened_at = time.monotonic()
            absence.note(id(self), self.endpoint, self.role, binds=self.socket.binds)
            if self.presence is not None:
                self.presence.open()
            self.publish()
            self._expect()
            self.has_parted = False
        except BaseException as error:
            self.has_parted = True
            self.disconnect(0)
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):  # others took them meanwhile
                reraise_from_handler(error)
                raise Refused(f"{self.endpoint} cannot be opened: {error} (raise ulimit -n)") from None
            raise

    def _open_socket(self) -> None:
        self.socket.prepare_to_lend()
        try:
            self.socket.open(self.reject)
        except Refused:
            here = absence.binder_here(self.endpoint) if self.socket.binds else None
            if here is None:
                raise
            raise Refused(
                f"{self.endpoint} belongs to a {here.role} of this very process (pid {os.getpid()}), made at {here.made_at}: "
                "close it, or use another name"
            ) from None
        self.socket.prepare_to_wait()

    def _expect(self) -> None:
        """Have a binder write its rendezvous file, now that it can say HELLO."""
        if self.socket.binds:
            rendezvous_file.sweep()
            if not self.negotiation.never_shares:
                self.standby.open(self.socket.address, self.socket.key, self.owner.hello(None))
                self.publish()

    @property
    def folder(self) -> int:
        """The mark of the runtime folder that this end is in; 0 where it is in none."""
        return self.presence.folder if self.presence is not None else 0

    @property
    def endpoint(self) -> str:
        """The address, with the port that was chosen if it was left open."""
        return self.socket.address.text

    def withdraw(self) -> None:
        """Before closing, offer no queue any more. The connectors that have claimed one are still to be heard."""
        self.is_leaving = True
        self.standby.withdraw()

    def say_goodbye(self, ending: Ending) -> bool:
        """Tell everybody who is there how this end ends, and write it into its file. Return whether anybody was told.

        Those who are gone are not: what is sent to them never leaves, and closing would wait for it as long as it may linger.
        """
        was_unheard = self._is_unheard_of(ending)
        if was_unheard:
            self.greeting.hang_up_on_left()
            self.socket.try_now(_CONNECTS)
        if not self.keeps and any(peer.by_file for peer in self.peers.values()):
            self.socket.is_connected(_CONNECTS)
        if (self.peers or was_unheard) and self.greeting.is_owed():
            self.greeting.say_if_due()
        self.socket.prepare_to_part()
        there = [peer for peer in self.peers.values() if not peer.sight.is_gone()]
        told = [self._part_from(peer, ending) for peer in there]
        if self.greeting.awaits_welcome():
            told.append(self.say(self.greeting.routing, pack_goodbye(self.owner.hello(None).sequence, ending)))
        self._end_presence(ending)
        return any(told)

    def _is_unheard_of(self, ending: Ending) -> bool:
        """Return whether a producer is to say HELLO before its goodbye, as whoever has the address now may wait for it.

        A consumer is waited for by nobody. Nor is a producer that ended well by another binder than its own.
        """
        # Of an end that met its binder by the file only, that binder has not heard.
        met = [peer for peer in (*self.peers.values(), self.peers.last_left) if peer is not None and not peer.by_file]
        if self.socket.binds or self.role != "producer" or (met and not ending.failure):
            return False
        if any(not peer.away_at and not peer.sight.is_gone() for peer in self.peers.values()):
            return False
        return not self._is_still_refused() and not self.greeting.awaits_welcome()

    def _is_still_refused(self) -> bool:
        """Return whether the binder that refused this end is there. Of one that has just gone, ZeroMQ tells a little later."""
        until = time.monotonic() + _TOLD
        while self.refusal is not None and self.socket.reaches(self.greeting.routing):
            if time.monotonic() > until:
                return True
            time.sleep(0.001)
        return False

    def part_from_the_gone(self) -> None:
        """Have peers leave that are seen to be gone, whoever still holds their connections open."""
        for peer in list(self.peers.values()):
            if peer.sight.is_gone():
                self.peers.leaves(peer, How.LOST)

    def _part_from(self, peer: Peer, ending: Ending) -> bool:
        """Say goodbye to a peer. A connector may have said HELLO by a new connection, and not been answered: perhaps there the
        next binder hears it, which has nothing to do with how far this end came with the one before."""
        if self.socket.binds or peer is not self.peers.binder() or self.greeting.routing == peer.routing:
            return self.say(peer.routing, pack_goodbye(peer.position, ending))
        return self.say(self.greeting.routing, pack_goodbye(peer.position, ending, peer.hello.end))

    def _end_presence(self, ending: Ending) -> None:
        if self.presence is not None:
            by_frames = [peer for peer in self.peers.values() if peer.queue is None and peer.hello.end]
            self.presence.end(LastWords(ending, {peer.hello.end: peer.position for peer in by_frames}))

    def disconnect(self, linger: float, ending: Ending | None = None) -> None:
        """Close the socket; what was sent goes on leaving for up to ``linger`` seconds. Again: what an exception left."""
        with contextlib.ExitStack() as steps:  # from the last to the first; each is done though another raises
            steps.callback(self.peers.clear)
            steps.callback(self.events.clear)
            steps.callback(self.socket.close, linger)
            steps.callback(self.standby.close)
            if self.presence is not None:
                steps.callback(self.presence.close)
            for peer in self.peers.values():
                steps.callback(peer.sight.close)
            steps.callback(self._end_presence, ending or Ending())
            steps.callback(absence.forget, id(self))

    # -- what goes out

    def say(self, routing: bytes, frame: bytes) -> bool:
        """Send a message of one frame. Return whether that connection stands."""
        return self.socket.send_small(routing, frame)

    def welcome(self, peer: Peer) -> None:
        """Have a binder answer a peer's HELLO, now that it is known where the peer stands."""
        if self.socket.binds:
            self.say(peer.routing, pack_control(Kind.WELCOME, self.owner.hello(peer)))

    def ask(self, peer: Peer) -> None:
        """Say HELLO or WELCOME to a peer once more, with news of where this end stands."""
        self.say(peer.routing, pack_control(Kind.WELCOME if self.socket.binds else Kind.HELLO, self.owner.hello(peer)))

    def answer(self, routing: bytes, frame: bytes) -> None:
        """Say something to an end that is no peer, unless it was answered just now."""
        if not self.strangers.was_answered(routing):
            self.strangers.note_answered(routing)
            self.say(routing, frame)

    # -- what comes in

    def hear(self, timeout: float) -> None:
        """Wait for one message, and append what it says to ``events``; nothing, where some are to be dealt with first.

        Args:
            timeout: seconds; cut to ``SLICE``, so that what is due in between gets done.
        """
        timeout = min(timeout, SLICE)
        if self.events:
            return
        if not self.hears_again:
            if not self.greeting.ensure(timeout) or self.events:
                return
            self.look_now_and_then()
            if self.events:
                return
        incoming = self.socket.receive(timeout)
        self.hears_again = False
        if incoming is None:
            self.look_around()
            return
        routing, frames = incoming
        if self.socket.reads_out and self._is_early(routing, frames):
            self.socket.defer()
            return
        if self.peers and routing not in self.peers and not self.socket.binds and self._is_anothers(frames):
            for peer in list(self.peers.values()):
                self.peers.leaves(peer, How.LOST)  # what it said is read. That is told before what the next one says
            return
        self.peers.came += 1
        peer = self.peers.get(routing)
        if self.hangs_up and not self._may_speak(routing, peer, frames):
            self.socket.waste()
            self.socket.received()
            return
        has_waited = self.hangs_up and (peer is None or _is_a(Kind.HELLO, frames))
        is_strange = self.hangs_up and (peer is None or ((not peer.brought or has_waited) and not peer.is_seen()))
        worth = 0 if peer is None else peer.brought + peer.repeated
        began, refused, nbytes = time.thread_time() if is_strange else 0.0, "", sum(map(len, frames))
        try:
            if peer is not None or not self.socket.binds:  # a stranger's long frame is not worth a copy
                frames, refused = self._joined(frames)
            self._interpret(routing, frames, refused)
        except Exception as error:
            self.reject_or_raise(error, self.peers.get(routing))
            if isinstance(error, VersionMismatch):
                self._answer_misfit(routing, error)
        if not self.hears_again:
            message = _InHand(routing, nbytes, peer, worth, began, has_waited)
            self._in_hand = message  # only now: what an exception cuts short after its first event is read again

    def _joined(self, frames: list[Any]) -> tuple[list[Any], str]:
        """Return the frames, put together. Idle memory must not be why there is none for that.

        But for a piece's: each fragment goes to its place as it came, without a copy.
        """
        if len(frames) > 2 and _is_a(Kind.PIECE, frames):
            return frames if len(frames[-1]) else frames[:-1], ""
        whole, refused = self.socket.joined(frames)
        return self.socket.joined(frames) if refused and self.owner.give_back_idle() else (whole, refused)

    def heard(self) -> None:
        """Note that the events of the message in hand were dealt with, if there is one."""
        message, self._in_hand = self._in_hand, None
        if message is None:
            return
        self.nbytes += message.nbytes
        if self.hangs_up:
            self._judge(message)
        self.socket.received()
        if not self.greeting.said_at:  # the owner, or this, has news for a binder
            self.greeting.say_if_due()

    def reject_or_raise(self, error: Exception, peer: Peer | None) -> None:
        """Reject the message in hand, which raised this while it was dealt with. The next one comes, whatever it was.

        Raises:
            the error, where it says nothing of the message.
        """
        if isinstance(error, (TensorPipeError, SocketError)) or is_a_signals(error, error.__traceback__):
            if not isinstance(error, ProtocolError):
                raise error
        self.socket.waste()
        self.reject(error, peer)

    def _may_speak(self, routing: bytes, peer: Peer | None, frames: list[Any]) -> bool:
        """Return whether a message is heard that came to a port which strangers reach. If not, it may be hung up on."""
        strangers = self.strangers
        if strangers.is_over(routing):
            if strangers.says_too_much(routing, sum(map(len, frames))):
                self.reject(IDLES)
                self.socket.hang_up()
            return False
        if peer is not None:
            if strangers.is_to_go(routing) and not _is_a(Kind.GOODBYE, frames):
                self.reject(IDLES, peer)
                self.socket.hang_up()
                return False
            if not strangers.are_a_crowd() or not _is_a(Kind.HELLO, frames):
                return True
            if peer.is_seen() or self._admission.is_hello_in_sight(frames):  # it may have closed, and tell of its queue
                return True
            if strangers.is_idle_too_long(peer):
                strangers.have_go(routing)
            return False
        is_again = strangers.was_answered(routing)
        if not is_again and not (strangers.are_a_crowd() and not self._admission.is_hello_in_sight(frames)):
            return True
        if is_again:  # why, the first one has told
            self.rejected += 1
        else:
            self.reject(CROWD)
        self.socket.hang_up()
        return False

    def _judge(self, message: _InHand) -> None:
        """Count what a message has brought, and hang up on those that take more of this end's time than they may.

        What brings nothing is in the strangers' time. A peer's is heard whether there is any or not. So that no peer keeps
        newcomers out, it is hung up on if there was none.
        """
        routing, strangers = message.routing, self.strangers
        before = message.peer
        peer = self.peers.get(routing, before)  # it may say that it is another by now
        is_strange = bool(message.began) and not (routing in self.peers and self.peers[routing].is_seen())
        surplus = self.socket.surplus
        if peer is None or before is None or surplus or before.brought + before.repeated == message.worth:
            self.socket.waste()
            if is_strange:  # before it is asked whether there is time: one message alone may take it all
                strangers.took(time.thread_time() - message.began)
            if peer is None:
                strangers.note_answered(routing)
            elif surplus or (strangers.is_to_go(routing) and peer.left is None):
                # No end says more frames than a message has; and what was heard as a goodbye was none.
                self.reject(IDLES, peer)
                self.socket.hang_up()
            elif strangers.is_idle_too_long(peer) or (
                is_strange and not message.has_waited and strangers.are_a_crowd()
            ):
                strangers.have_go(routing)

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
        if hello is None or self.peers.has_left(hello) or is_late_answer(self.peers.binder(), hello):
            return False
        return not any(peer.is_still(hello) for peer in self.peers.values())

    def reject(self, error: Exception, peer: Peer | None = None) -> None:
        """Count a message that was dropped. Say whose it was, where that is known."""
        self.rejected += 1
        said = str(error) if isinstance(error, TensorPipeError) else f"{type(error).__name__}: {error}"
        whose = "" if peer is None else f" (from {peer.hello.role} {peer.identity})"
        # What reads a message may repeat of it what a terminal would obey.
        self.last_rejection = cut(shown(said + whose), _MAX_REJECTION)

    # -- what a message says

    def _interpret(self, routing: bytes, frames: list[Any], refused: str = "") -> None:
        surplus = self.socket.surplus
        if surplus or not len(frames[-1]):
            self._hear_cut_off(routing, frames)
            if surplus:
                raise ProtocolError(surplus)
            return
        header = unpack_begin(frames[0]) if refused else unpack(frames[0])
        kind = header.kind
        if len(frames) > 1 and kind not in (Kind.DATA, Kind.PIECE):
            raise ProtocolError(f"a {Kind.NAMES[kind]} of {len(frames)} frames")
        if kind >= Kind.DATA:
            peer = self.peers.get(routing)
            if peer is None and refused:
                raise ProtocolError(refused)
            if peer is None:
                self._hear_unknown(routing, header, frames)
            elif not peer.by_file:  # else it says WELCOME first: this came by the connection with the one before it
                peer.heard, peer.unread_from = time.monotonic(), 0
                self._hear_peer(peer, header, frames, refused)
        elif kind == Kind.HELLO:
            if self.socket.binds:
                self._admission.hear_hello(routing, unpack_control(header, Hello))
            else:  # a binder that does not know us asks who we are
                self.greeting.say_again()
                self.greeting.say_if_due()
        elif self.socket.binds:
            raise ProtocolError(f"a {Kind.NAMES[kind]} from a connector; only a binder says that")
        elif kind == Kind.WELCOME:
            self._hear_welcome(routing, unpack_control(header, Hello))
        else:
            self._hear_refusal(unpack_control(header, Refusal))

    def _hear_peer(self, peer: Peer, header: Header, frames: list[Any], refused: str) -> None:
        if header.kind == Kind.DATA:
            self.events.append(Arrived(peer, header, frames, refused))
        elif header.kind == Kind.CREDIT:
            self.events.append(Credited(peer, header.sequence))
        elif header.kind == Kind.PIECE:
            self.events.append(PieceArrived(peer, header, frames))
        else:
            ending = ending_of(header)
            position = header.sequence if ending.to in (0, self.end) else None
            self.peers.leaves(peer, How.FAILED if ending.failure else How.GOODBYE, ending, position)

    def _hear_cut_off(self, routing: bytes, frames: list[Any]) -> None:
        """A message that its sender gave up, as an empty last frame says: its sequence is used up, and that is all."""
        peer = self.peers.get(routing)
        if len(frames) > 1 and peer is not None and not peer.by_file:
            header = unpack(frames[0])
            if header.kind == Kind.DATA and header.sequence > peer.taken:
                self.events.append(GivenUp(peer, header))

    def _hear_unknown(self, routing: bytes, header: Header, frames: list[Any]) -> None:
        """Handle a message of an end that has not said HELLO here. It met a binder that died, or no binder at all.

        What is left of a connection that a new one has replaced comes in this way, too. So does what is left of one whose end
        has ended: the end's file may tell that before its GOODBYE has come.
        """
        if self.strangers.is_over(routing) or self.greeting.left_by(routing):
            return
        if not self.socket.binds and self._misses_welcome(routing, header, frames):
            return
        self.reject(ProtocolError(f"{Kind.NAMES[header.kind]} from an end that has not said HELLO"))
        if self.socket.binds:
            self.answer(routing, pack_control(Kind.HELLO, self.owner.hello(None)))

    def _misses_welcome(self, routing: bytes, header: Header, frames: list[Any]) -> bool:
        """Return whether an exception tore the WELCOME of a connector's binder, which goes on with messages.

        They are kept until it says WELCOME again, at most as many as may be in flight. Over tcp the connection is made anew,
        and all comes again by that.
        """
        if (
            header.kind not in (Kind.DATA, Kind.PIECE)
            or routing != self.greeting.routing
            or not self.socket.tears.count
        ):
            return False
        if self.keeps:
            self.socket.drop(routing)
            return True
        if header.kind != Kind.DATA or len(self._early) >= self.window:
            return False
        self._give_up_early(routing)
        self._early.append((routing, header, frames))
        self.greeting.say_again()
        self.greeting.say_if_due()
        return True

    def _give_up_early(self, *but: bytes) -> None:
        """Count messages as lost that came before a WELCOME, by another connection than those that may still bring it."""
        if self._early and self._early[0][0] not in but:
            event = Torn(len(self._early))
            self._early = []
            self.events.append(event)  # no exception comes between the two

    def _answer_misfit(self, routing: bytes, error: VersionMismatch) -> None:
        """Tell an end of another version so."""
        if self.socket.binds:
            self.answer(routing, pack_refusal(f"this binder refuses: {error}"))
        elif not self.peers:
            self.refusal = error

    def _hear_welcome(self, routing: bytes, hello: Hello) -> None:
        if not self.peers.has_left(hello) and not is_late_answer(self.peers.binder(), hello):
            if self.peers.find_again(routing, hello):
                self.hears_again = True  # once the owner knows which peer has left
                return
            self._give_up_early(routing)
            early = [(header, frames) for _, header, frames in self._early]
            begins_at = min(hello.sequence, early[0][0].sequence - 1) if early else hello.sequence
            peer = self._admission.admit(routing, msgspec.structs.replace(hello, sequence=begins_at))
            if peer is not None:
                self.events.extend(Arrived(peer, header, frames) for header, frames in early)
                self._early = []
                self.events.append(Greeted(peer, hello.sequence))

    def _hear_refusal(self, refused: Refusal) -> None:
        self.refusal = Refused(f"{self.endpoint}: {refused.reason}")
        self.greeting.say_seldom()
        for peer in [each for each in self.peers.values() if each.by_file]:  # this end met it by its file
            self.peers.leaves(peer, How.REFUSED_US)
        self.publish()

    # -- who leaves

    def look_around(self, *, at_once: bool = False) -> None:
        """See who is still there, when nothing has come; not too often, but at once where a connection was lost."""
        now = time.monotonic()
        is_early = now - self._looked < SLICE / 2 and not at_once and not self.greeting.has_lost_connection()
        if is_early or self.hears_again:
            return
        self._looked = now
        self.looks += 1
        self._refresh_status()
        if self.socket.tears.count > self._tears:
            self._tears = self.socket.tears.count
            self._tore()
        self._give_up_early(self.socket.routing, self.socket.reads_out)
        if keeping:  # a get that has messages to take looks there, too
            settle_kept()
        for attachment in self._attachments():  # each once: a binder's peers share one
            attachment.mind_idle(waits=True)
        again = now - (self._asked if self.socket.binds else self.greeting.said_at) >= REPEAT
        for peer in list(self.peers.values()):
            if self.peers.is_gone(peer, again) and not self._admission.is_undecided(peer):
                self.peers.leaves(peer, How.LOST)
                again = True
                # There may be a thousand, and letting go of one takes the owner a millisecond.
                if time.monotonic() - now > _AT_ONCE or len(self.events) >= _LEAVE_AT_ONCE:
                    break
        self._admission.take_in_deserted()
        if again and self.socket.binds:
            self._asked = now
        elif not self.socket.binds:
            self.greeting.hang_up_on_left()
            self.greeting.say_if_due()

    def look_now_and_then(self) -> None:
        """See who is still there, also while there is no end of what comes."""
        if time.monotonic() - self._looked > REPEAT:
            self.look_around()

    def _tore(self) -> None:
        """An exception tore something out of a receive, perhaps a CREDIT: have those who may have sent it say it again."""
        self.greeting.say_again()  # a connector's HELLO is answered by that
        if self.socket.binds:
            for peer in self.peers.values():
                if peer.queue is None:
                    self.say(peer.routing, pack_control(Kind.HELLO, self.owner.hello(None)))
        self.events.append(Torn())

    @property
    def is_torn(self) -> bool:
        """Return whether an exception tore something out of a receive, and nobody was asked for it yet."""
        return self.socket.tears.count > self._tears

    # -- what there is to tell

    def publish(self) -> None:
        """Tell whoever may look who is attached, and how; and offer queues to those to come."""
        if self.peers:
            self._absence.is_over()
        if self.standby.is_open:
            room = MOST_PEERS - sum(peer.settled and not peer.sight.is_out_of_sight for peer in self.peers.values())
            self.standby.stock(self.owner.hello(None), room, is_alone=not self.peers)
        self._status.outdate()
        self._refresh_status()

    def _refresh_status(self) -> None:
        self._status.refresh(self._status_now)

    def _status_now(self) -> PublishedStatus:
        way, wanted = self.negotiation.transport_with, self.negotiation.is_wanted_with
        peers = (Attached(each.hello.role, each.identity, way(each), wanted(each)) for each in self.peers.values())
        refusal = str(self.refusal or "")
        return PublishedStatus(self.endpoint, self.role, self.socket.binds, identity(), tuple(peers), refusal)

    def transport(self) -> str:
        """Return how messages travel, and why so."""
        return self.negotiation.transport(self.peers.values())

    def complain_if_alone(self, why: Callable[[], str]) -> None:
        """Log, once, that this end has waited for some seconds alone. To be called in each slice of a wait.

        Args:
            why: says who is missing.
        """
        if not self.peers and self._absence.is_to_be_told():
            log.warning("%s has waited for %.0f s: %s%s", self.endpoint, COMPLAINT, why(), self.connect_error())

    def why_alone(self) -> str:
        """Say that nobody has come, and what may be the reason."""
        turned_away = (
            f"; {self.rejected} times somebody was turned away: {self.last_rejection}" if self.rejected else ""
        )
        return self._absence.why() + turned_away

    def connect_error(self) -> str:
        """Return what keeps a connector from getting in, to be added to a sentence; "" if nothing is known to."""
        trouble = "" if self.peers else self.socket.connect_error()
        return f"; {trouble}" if trouble else ""

    def unheard(self) -> str:
        """Return who has claimed a queue and was not heard of yet, to be added to a sentence; "" if nobody has."""
        ended = self.standby.dead_claimants
        silent = [pid for pid in self.standby.claimants if pid not in ended]
        said = f"; pid {', '.join(map(str, ended))} has ended before its HELLO came" if ended else ""
        if silent:
            pids = ", ".join(map(str, silent))
            said += f"; pid {pids} has come by the rendezvous file and has not said HELLO: is it stopped?"
        return said

    def named(self, peers: Iterator[str]) -> str:
        """Name the peers in a text: of many, those that come first. The most telling come first."""
        told = list(itertools.islice(peers, _NAMED))
        left = len(self.peers) - len(told)
        return "; ".join(told) + (f"; and {left} more" if left else "")

    def trim(self) -> int:
        """Give back all memory of this end's queues that nobody needs now, whichever process has it. Return its bytes."""
        return sum(attachment.trim() for attachment in self._attachments())

    def _attachments(self) -> Collection[Attachment]:
        """Return the pieces of memory that this end's queues lie in."""
        queues = [*(peer.queue for peer in self.peers.values() if peer.queue), *self.standby.queues()]
        return {id(queue.attachment): queue.attachment for queue in queues}.values()


def _is_a(kind: int, frames: list[Any]) -> bool:
    with contextlib.suppress(ProtocolError, VersionMismatch):
        return unpack_begin(frames[0]).kind == kind
    return False


def _welcome_in(frames: list[Any]) -> Hello | None:
    """Return what a WELCOME says; None if it is none."""
    with contextlib.suppress(ProtocolError):
        header = unpack(frames[0])
        if header.kind == Kind.WELCOME:
            return unpack_control(header, Hello)
    return None
