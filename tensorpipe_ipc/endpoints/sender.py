"""Sender: the producer's side of a conversation. Credits, which consumer gets the next message, and what is sent again."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tensorpipe_ipc.compiled import CompiledPath
from tensorpipe_ipc.endpoints.consumer_peer import ConsumerPeer
from tensorpipe_ipc.endpoints.conversation import Opening
from tensorpipe_ipc.endpoints.events import Arrived, Credited, Event, GivenUp, Greeted, Joined, Left, PieceArrived
from tensorpipe_ipc.endpoints.participant import Participant
from tensorpipe_ipc.endpoints.peer import How, Peer, to_leave_out
from tensorpipe_ipc.endpoints.presence import Sight
from tensorpipe_ipc.endpoints.rendezvous import PairQueue
from tensorpipe_ipc.endpoints.resend_buffer import ResendBuffer, SentMessage
from tensorpipe_ipc.errors import Full, OutOfMemory, ProtocolError, SharedMemoryError, ShutDown
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.limits import deadline_of, remaining
from tensorpipe_ipc.memory.leases import Handover
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.serializers.base import any_size
from tensorpipe_ipc.wire.header import Hello, Kind, pack
from tensorpipe_ipc.wire.in_block import in_one_block
from tensorpipe_ipc.wire.layout import BULK, Block
from tensorpipe_ipc.wire.message import EncodedMessage
from tensorpipe_ipc.zeromq.zmq_sockets import SLICE, Unreachable

__all__ = ["Held", "NotHandedOver", "Sender"]

Held = tuple[Handover, bytes]
REMEMBERED = 1000  # peers that vanished, at most
_CREDIT = 0.1  # seconds that word of what was taken may be on its way, in frames, whatever the linger
_FAREWELL = 0.2  # seconds that a goodbye has to leave, whatever the linger: over tcp an end without one may come back
_TOLD = 16  # consumers that left something behind, and are named
_MARK = 1 << 20  # bytes of small frames, after which it is looked whether ZeroMQ lets go of them
_FRAME = 64  # bytes of ZeroMQ's own
_A_TURN = 0.02  # seconds of what is heard in passing, at most, that count
_MEMORY = 0.02  # seconds until it is looked for again, if no consumer says anything


def _in_one_block(queue: PairQueue, message: EncodedMessage) -> tuple[Block, bytes]:  # noqa: ARG001 - other ways ask it
    return in_one_block(message)


class NotHandedOver(Exception):
    """Raised where tensors that were to go by reference have to be copied."""


class Sender(Participant):
    """A producer's.

    Attributes:
        resent: messages that were sent again.
        in_one_block: what of a message goes into a block of a queue's.
        is_everyday: whether the compiled path may put: the serializer is raw, and nothing is narrowed, or stays on a GPU.
    """

    role = "producer"

    def __init__(self, opening: Opening, serializer: str) -> None:
        super().__init__(opening)
        self._serializer = serializer
        self._sent = 0  # of a connector, which counts on when its binder is another
        # From here on a binder counts: a consumer may go on taking what the binder before it had sent, and say so.
        self._first = int.from_bytes(os.urandom(6), "little")
        self._framed = 0  # in flight, in frames
        self._vanished: dict[int, int] = {}  # by end: what was last sent to those who may have lost their line only
        self._sharing: dict[int, ConsumerPeer] = {}  # by descriptor of its credits: those with a queue
        self._unsure = True  # whether any of those may have more room than it is known to have, and no descriptor tells
        # Who had a queue and nothing to do at the last look, longest waiting first.
        self._idle: deque[ConsumerPeer] = deque()
        self._credits = 0  # that brought something
        self._listens_from = self._resends_from = 0.0  # by time.monotonic(): in passing; and what is asked for again
        self._turns = 0  # how often several peers were chosen from
        self._next: ConsumerPeer | None = None  # who was chosen for a message that the compiled path left
        self._resend_buffer = ResendBuffer()
        self.resent = 0
        self._short: tuple[ConsumerPeer, str] | None = None  # for whom there was no memory at the last try, and why
        self._left_behind: list[tuple[Peer, int]] = []
        self.is_everyday = False
        self.in_one_block: Callable[[PairQueue, EncodedMessage], tuple[Block, bytes]] = _in_one_block

    # -- what its conversation asks

    def hello(self, peer: ConsumerPeer | None, *, is_news: bool = False) -> Hello:  # noqa: ARG002 - a consumer tells it
        """See Owner."""
        here = self.conversation
        if peer is not None:
            sent = peer.taken if self.keeps else peer.sent
        else:
            sent = 0 if self.socket.binds else self._sent
        return Hello(
            self.role,
            identity(),
            self.window,
            serializer=self._serializer,
            sequence=sent,
            shared_memory=here.negotiation.terms(peer),
            end=here.end,
            folder=here.folder,
            round=max(1, self.socket.connection) if self.keeps else 0,
        )

    def new_peer(self, routing: bytes, hello: Hello, sight: Sight) -> ConsumerPeer:
        """See Owner. It counts on where the last connection ended, which the other end may not have noticed."""
        peer = ConsumerPeer(routing, hello, sight)
        peer.sent = peer.taken = self._vanished.get(hello.end, self._first) if self.socket.binds else self._sent
        self._turns += 1
        peer.turn = self._turns
        return peer

    def finishes(self) -> bool:
        """See Owner."""
        return False

    # -- events

    def _handle(self, event: Event) -> Arrived | None:
        """See Participant."""
        if isinstance(event, Credited):
            taken = event.peer.taken
            self._credited(event.peer, event.sequence)
            if event.peer.taken != taken:
                event.peer.brought += 1
                self._credits += 1
        elif isinstance(event, Greeted):
            self._greeted(event.peer, event.sequence)
        elif isinstance(event, Joined):
            self._joined(event.peer)
        elif isinstance(event, Left):
            self._left(event.peer)
        elif isinstance(event, PieceArrived):
            raise ProtocolError(f"a PIECE for a producer (from {event.peer}, sequence {event.header.sequence})")
        elif isinstance(event, (Arrived, GivenUp)):
            raise ProtocolError(f"DATA for a producer (from {event.peer}, sequence {event.header.sequence})")
        return None

    def _joined(self, peer: ConsumerPeer) -> None:
        if self.keeps and not self.socket.binds and peer.hello.sequence != self._sent:
            self.conversation.greeting.say_again()  # it is told at once from where on
        self._share(peer)

    def _greeted(self, peer: ConsumerPeer, sequence: int) -> None:
        """A peer says how far it has taken messages; it does so again by each new connection.

        A consumer that did not hear of this end by the connection before drops what comes before its WELCOME.
        """
        self._share(peer)
        if peer.queue is None:
            self.socket.prepare_for_bulk()
            self._credited(peer, sequence)
        self.conversation.welcome(peer)
        peer.greeted = True
        if peer.queue is None and peer.asks():
            self._resend_as_asked()

    def _credited(self, peer: ConsumerPeer, sequence: int) -> None:
        if peer.taken < sequence <= peer.sent:
            self._framed -= sequence - peer.taken
            peer.taken = sequence
        while peer.kept and peer.kept[0].sequence <= peer.taken:
            kept = peer.kept.popleft()
            peer.note_carried(kept)
            self._resend_buffer.let_go(kept)
            if kept.lent:
                peer.unread.append(kept)

    def _left(self, peer: ConsumerPeer) -> None:
        if peer.last_position is not None:
            self._credited(peer, peer.last_position)
        while peer.kept:
            self._resend_buffer.let_go(peer.kept.popleft())
        if self.socket.binds and peer.queue is None and peer.hello.end:
            if peer.left is How.LOST and peer.sent != self._first:  # else it pushes out none to whom something was sent
                self._vanished[peer.hello.end] = peer.sent
                while len(self._vanished) > REMEMBERED:
                    del self._vanished[next(iter(self._vanished))]
            elif peer.left is not How.LOST:
                self._vanished.pop(peer.hello.end, None)
        if peer.queue is not None and peer.left is How.LOST:
            peer.queue.attachment.recover_dead()
        untaken, left_behind = peer.load(), self._left_behind  # until flush, or close, has told
        if untaken:
            left_out = left_behind[to_leave_out([each.left for each, _ in left_behind], _TOLD)]
            left_behind = [*(each for each in left_behind if each not in left_out), (peer, untaken)]
        self._reckon_framed()
        self.lost += untaken
        self._left_behind = left_behind
        self.conversation.events.popleft()  # with no call since the first of these two
        self._unshare(peer)
        self.conversation.publish()

    def _share(self, peer: ConsumerPeer) -> None:
        """Have waits tell of a queue's credits, if the two have one. Again: nothing."""
        if peer.queue is not None:
            assert peer.queue.credits is not None
            fd = peer.queue.credits.fileno()
            peer.load()
            self._sharing[fd] = peer
            peer.compiled = CompiledPath(peer.queue, None, is_everyday=self.is_everyday)
            self._unsure = True
            try:  # told of each credit that comes: with several consumers there may be some, and still no room in all
                self.socket.watch(fd, edge=True)
            except OSError as error:  # the kernel has no more watches: looks find it
                reraise_from_handler(error)

    def _unshare(self, peer: ConsumerPeer) -> None:
        """Let go of a peer's queue, if the two have one. Again: nothing."""
        if peer.queue is not None:
            if peer.queue.credits is not None:
                fd = peer.queue.credits.fileno()
                self._sharing.pop(fd, None)
                self.socket.unwatch(fd)
            peer.queue.let_go()
            peer.queue = peer.compiled = None

    # -- messages in flight

    @property
    def in_flight(self) -> int:
        """Messages sent and neither taken nor lost."""
        return self._framed + sum(map(ConsumerPeer.load, self._sharing.values())) if self._sharing else self._framed

    @property
    def known_in_flight(self) -> int:
        """The same, as far as it is known without a look. Any thread may ask."""
        queues = [(peer.queue, peer.room) for peer in list(self._sharing.values())]
        return self._framed + sum(queue.maxsize - room for queue, room in queues if queue is not None)

    def look_for_room(self) -> None:
        """Bring up to date what is known of each consumer."""
        for peer in self._sharing.values():
            peer.load()

    @property
    def shares_memory(self) -> bool:
        """Return whether there is any queue."""
        return bool(self._sharing)

    def hear_in_passing(self) -> None:
        """Hear what has come, while there is room.

        Where strangers reach the port, what brings no credit has a fifth of the time: else each put pays for a greeting.
        """
        if time.monotonic() < self._listens_from:
            return
        credited, spent = self._credits, time.thread_time()
        self.drain(in_passing=True)
        if self._credits == credited and self.conversation.hangs_up:
            self._listens_from = time.monotonic() + 4 * min(time.thread_time() - spent, _A_TURN)

    def drain(self, *, in_passing: bool = False, due: int = 1) -> None:
        """See Participant. One consumer's credits are read together, which is cheaper than one after each put."""
        due = max(due, self._framed) if len(self.peers) == 1 else due
        if self.keeps and self._framed:
            self.socket.is_connected()  # what is in flight may have been swallowed: by a new connection it greets anew
        super().drain(in_passing=in_passing, due=due)

    @property
    def settled(self) -> int:
        """Return how many consumers are attached."""
        there = (peer for peer in self.peers.values() if peer.settled and not peer.away_at)
        return sum(not peer.sight.is_gone() for peer in there)

    def needs_credit(self) -> bool:
        """Return whether it is time to look for credit: not worth it for every message, unless several consumers compete."""
        return self._framed > 0 and (self._framed * 2 >= self.window or len(self.peers) > 1)

    def wait(self, timeout: float) -> None:
        """Wait for credit, or anything else that comes, up to ``timeout`` seconds (cut to a slice)."""
        if not self._sharing:
            self.pump(timeout)
            self.drain(in_passing=True)
        elif not self.socket.is_silent() or self._hear_of_room(timeout):
            self.drain(in_passing=True)
        else:
            self.look_around()

    def take_leave(self, linger: float) -> tuple[str, float]:
        """See Participant."""
        deadline = deadline_of(max(linger, _CREDIT) if self._framed else linger)
        try:
            if self.in_flight:
                self.drain()  # what was taken by now counts as taken, also without linger
            while self.in_flight and remaining(deadline) > 0:
                self.wait(remaining(deadline))
            if self.in_flight:
                self.drain()
                self.look_around(at_once=True)  # a consumer that has just closed says what it took
        finally:
            left, blocked = self.in_flight, self.why_blocked() + self.conversation.connect_error()
            told = self.say_goodbye()
        if not left:
            return "", max(min(linger, self.socket.farewell), _FAREWELL) if told else 0.0
        return (
            f"Producer on {self.endpoint} closed with {left} messages that were not taken within {linger} s: {blocked}",
            _FAREWELL if told else 0.0,
        )

    def told_losses(self) -> tuple[str, list[Peer]]:
        """See Participant."""
        losses, self._left_behind = self._left_behind, []
        told = [f"{peer} with {count} messages that it had not taken" for peer, count in losses]
        return "; ".join(told), [peer for peer, _ in losses]

    def _let_go(self) -> None:
        """See Participant."""
        self._framed = self.in_flight
        self._resend_buffer.drop_idle()
        for peer in list(self._sharing.values()):
            self._unshare(peer)

    def choose(self) -> ConsumerPeer | None:
        """Return the consumer that has least to do, if it has room; of several, the one that waited longest."""
        before, self._next = self._next, None
        if len(self.peers) == 1:
            (peer,) = self.peers.values()
            if peer.queue is not None:
                return peer if peer.settled and not peer.gone_at and peer.has_room() else None
            has_room = peer.sent - peer.taken < self._room(peer)
            return peer if has_room and peer.is_there() and peer.reads() else None
        if before is not None and not before.left and self._may_have(before):
            return before
        while self._idle:
            peer = self._idle.popleft()
            if peer.is_idle():
                return self._chosen(peer)
        if self._sharing:
            self._hear_of_room(0)
        return self._least_loaded()

    def _least_loaded(self, *, beside: ConsumerPeer | None = None) -> ConsumerPeer | None:
        """That of ``choose``; and the others who have nothing to do are noted, to be next without another look.

        Args:
            beside: one for whom there is no memory. Only those are meant for whom messages lie elsewhere.
        """
        best, best_load = None, 1 << 62
        for peer in self.peers.values():
            queue = peer.queue
            if beside is not None and (queue is None) is (beside.queue is None):
                continue
            load = self._load(peer)
            if load > best_load or load == best_load and best is not None and peer.turn > best.turn:
                continue
            if self._may_have(peer):
                best, best_load = peer, load
        if best is None:
            return None
        if not best_load and beside is None:
            self._idle.extend(sorted(filter(ConsumerPeer.is_idle, self.peers.values()), key=_turn))
        return self._chosen(best)

    def _load(self, peer: ConsumerPeer) -> int:
        """Return how many messages a peer is known to have."""
        return peer.sent - peer.taken if peer.queue is None else peer.queue.maxsize - peer.room

    def _may_have(self, peer: ConsumerPeer) -> bool:
        return self._load(peer) < self._room(peer) and peer.is_there() and peer.reads()

    def _chosen(self, peer: ConsumerPeer) -> ConsumerPeer:
        """Return the peer, who goes to the end of the line."""
        self._turns += 1
        peer.turn = self._turns
        return peer

    def _hear_of_room(self, timeout: float) -> bool:
        """Bring ``room`` up to date of those who gave credit. Whether anything has come within ``timeout`` seconds.

        One call tells who did since the last time, so that what a message costs does not grow with the number of peers.
        """
        unsure, self._unsure = self._unsure, True  # an exception takes with it what was told
        found = self.socket.wait_any(timeout)
        for peer in self.peers.values() if unsure else map(self._sharing.get, found):
            if peer is not None and peer.queue is not None:
                peer.load()
        self._unsure = False
        return bool(found)

    def _tend(self) -> None:
        """See Participant. Room is looked for, too: there are kernels (Linux 5.5 to 5.13) that do not tell of each credit."""
        self._unsure = True
        for peer in [each for each in self._sharing.values() if each.left]:  # an exception may have kept it
            self._unshare(peer)
        for peer in self.peers.values():
            self._finish_last(peer)
        self._resend_as_asked()

    def send(
        self,
        peer: ConsumerPeer,
        message: EncodedMessage,
        timeout: float,
        *,
        held: Held | None = None,
        waits: bool = True,
    ) -> bool:
        """Send a peer's next message. False if it just left, or is away, or finds no memory in a slice: nothing was sent.

        Where there is no memory for it, the message goes to one that needs other memory. If there is none, this waits for
        whatever comes from any of them: one that is slow, or stopped, is not to hold up the others.

        Args:
            peer: that of ``choose``.
            timeout: seconds.
            held: the block that the message lies in already, and the metadata that say so; it goes as it lies.
            waits: whether the put may wait. Then Full names who holds memory, which takes many times as long as a put.

        Raises:
            NotHandedOver: it cannot, as the peer does not share that memory, or somebody else has the tensors. Send a copy.
            Full: no memory within ``timeout`` seconds, which are less than a slice.
            OutOfMemory: there is none for so large a message, ever.
        """
        self._short, is_alone, began = None, len(self.peers) == 1, time.monotonic()
        try:
            return self._send_to(peer, message, timeout if is_alone else 0, held)
        except Full as full:
            if not is_alone and self._send_elsewhere(peer, message, held):
                return True
            self._short = peer, str(full)  # not itself: it keeps the frames
            if is_alone or timeout <= 0:
                self.raise_if_short(waits)
        if self._sharing:
            self._hear_of_room(0)  # of the place that the try gave back
        self.wait(min(timeout, max(_MEMORY, 2 * (time.monotonic() - began))))
        self.look_around()
        return False

    def _send_elsewhere(self, peer: ConsumerPeer, message: EncodedMessage, held: Held | None) -> bool:
        """Send a message to a peer that needs other memory than one for whom there is none. Return whether it was sent."""
        other = self._least_loaded(beside=peer)
        if other is None:
            return False
        try:
            return self._send_to(other, message, 0, held)
        except (Full, OutOfMemory):  # it is the other peer's
            return False

    def raise_if_short(self, names_holders: bool) -> None:
        """Raise Full if the last message was not sent for want of memory.

        Args:
            names_holders: whether it says who has how much, which takes many times as long as a put.
        """
        if self._short is not None:
            (peer, full), self._short = self._short, None
            text = f"{self.endpoint}: no memory in time: {full}: {self.why_blocked()}"
            if names_holders and peer.queue is not None:
                text += f"; {peer.queue.attachment.describe_holders()}"
            raise Full(text) from None

    def _send_to(self, peer: ConsumerPeer, message: EncodedMessage, timeout: float, held: Held | None) -> bool:
        if peer.queue is not None:
            return self._put(peer, peer.queue, message, timeout, held)
        if held is not None:
            raise NotHandedOver
        try:
            self._resend_buffer.check(message)
        except OutOfMemory:
            if not self.give_back_idle():  # it must not be why
                raise
            self._resend_buffer.check(message)
        if self.keeps:
            return self._send_kept(peer, message, timeout)
        frames = message.frames(peer.sent + 1)  # first, as there may be no memory for it
        before = self._sent
        try:
            self._sent = peer.sent = peer.sent + 1
            self._framed += 1
            self.socket.send(peer.routing, frames)
        except Unreachable:
            self._sent = before
            peer.sent -= 1
            self._framed -= 1
            self.drain()  # what it took before it left counts as taken
            if self.peers.get(peer.routing) is not peer:
                return False
            if self.socket.has_unread(peer.routing):
                peer.gone_at = peer.gone_at or time.monotonic()  # it is heard to its end, and nothing is put to it
            else:
                self._lose(peer)
            return False
        except BaseException:  # its number is used up, and the consumer told so; if it has left, this is dropped there
            with contextlib.suppress(Unreachable):
                self.socket.send(peer.routing, [pack(Kind.DATA, peer.sent), b""])
            raise
        return True

    def _send_kept(self, peer: ConsumerPeer, message: EncodedMessage, timeout: float) -> bool:
        """Send a message that is kept until it is taken. Whatever becomes of the connection, it is sent from then on."""
        if not self._resend_buffer.has_room(message.size):
            self._resend_buffer.nbytes = sum(kept.nbytes for each in self.peers.values() for kept in each.kept)
            if timeout <= 0:
                raise Full(self._resend_buffer.why_full())
            self.wait(timeout)
            return False
        self._finish_last(peer)
        kept = SentMessage(peer.sent + 1)
        parts = self._resend_buffer.keep(kept, message)
        connected, before = True, self._sent
        try:
            self._sent = peer.sent = kept.sequence
            self._framed += 1
            peer.kept.append(kept)
            for part in parts:
                connected = connected and self._lend(peer, kept, part)
                if not connected and len(kept.parts) == 1:
                    break
            else:
                kept.is_whole = True
        except BaseException:  # as above
            self._finish_last(peer)
            raise
        if not connected and len(kept.parts) == 1:  # nothing of it has left
            self._sent = before
            peer.sent -= 1
            self._framed -= 1
            peer.kept.pop()
            self._resend_buffer.let_go(kept)
        if not connected and not self.peers.waits_for(peer):
            self._lose(peer)
        return connected or peer.sent == kept.sequence

    def _finish_last(self, peer: ConsumerPeer) -> None:
        """Give up the last message put to a peer, if an exception cut its sending short, and say that there is none."""
        if peer.kept and not peer.kept[-1].is_whole:
            kept = peer.kept[-1]
            self._resend_buffer.give_up(kept)
            self._lend(peer, kept, kept.parts[0])
            kept.is_whole = True

    def _lend(self, peer: ConsumerPeer, kept: SentMessage, part: list[Any]) -> bool:
        """Send one part of what is kept. False if there is no connection."""
        small = sum(len(frame) + _FRAME for frame in part if len(frame) < BULK)
        peer.unmarked += small
        mark = peer.unmarked >= _MARK
        try:
            kept.lent += self.socket.lend(peer.routing, part, mark=mark, is_slow=peer.has_slow_line())
        except Unreachable:
            return False
        kept.weight += sum(map(len, part)) - small
        if mark:
            kept.weight, peer.unmarked = kept.weight + peer.unmarked, 0
        return True

    def _reckon_framed(self) -> None:
        self._framed = sum(each.sent - each.taken for each in self.peers.values() if each.queue is None)

    def _resend_as_asked(self) -> None:
        """Send again what peers miss that have asked for it, first to the one to whom that was done longest ago.

        It has a fifth of the time at most, as a few bytes ask for all that is kept. Nothing is sent that still is on its way
        from the last time, as a peer may ask for ever, and read nothing: then later.
        """
        asking = [peer for peer in self.peers.values() if peer.queue is None and peer.greeted and peer.asks()]
        for peer in sorted(asking, key=_resent_at):
            if time.monotonic() < self._resends_from:
                return
            if all(kept.has_left() for kept in peer.kept):
                spent = time.thread_time()  # without what it was stopped for
                self._resend(peer)
                peer.served = peer.hello.round  # now: an exception in between has it done again
                peer.resent_at = time.monotonic()
                self._resends_from = peer.resent_at + 4 * (time.thread_time() - spent)

    def _resend(self, peer: ConsumerPeer) -> None:
        self._finish_last(peer)
        peer.unmarked += _MARK * bool(peer.kept)  # that it is known when the first of them has left
        for kept in peer.kept:
            kept.lent, kept.weight = [], 0
            if not all(self._lend(peer, kept, part) for part in kept.parts):
                return
            self.resent += 1

    def _put(
        self, peer: ConsumerPeer, queue: PairQueue, message: EncodedMessage, timeout: float, held: Held | None
    ) -> bool:
        unsure, self._unsure = self._unsure, True  # unless it is put, as it was reckoned
        peer.room -= 1
        try:
            if held is None:
                queue.put(*self.in_one_block(queue, message), min(timeout, SLICE))
            elif held[0].leases is not queue.leases or not queue.put_held(*held, min(timeout, SLICE)):
                raise NotHandedOver
        except (Full, SharedMemoryError) as error:
            idle = self._resend_buffer.drop_idle()  # it must not be why
            if not idle and (timeout < SLICE or isinstance(error, SharedMemoryError)):
                raise
            self._short = peer, str(error)  # what follows may take until the time is over
            self.drain()
            self.look_around()
            return False
        except ShutDown:  # which we never do
            self._lose(peer)
            return False
        self._unsure = unsure
        if peer.compiled is not None and not peer.compiled.is_asked:
            peer.compiled.open()
        return True

    def put_compiled(self, tree: Any) -> int:
        """Put a tree by the compiled path, if it is an everyday one, and a consumer has room. Return the bytes of its tensors;
        0: it was not put, and nothing was changed."""
        peer = None if self.is_stale() else self.choose()
        if peer is None or peer.compiled is None:
            self._next = peer
            return 0
        unsure, self._unsure = self._unsure, True  # as in _put
        peer.room -= 1
        try:
            nbytes = peer.compiled.put(tree)
        except ShutDown:
            self._lose(peer)
            return 0
        if not nbytes:
            peer.room += 1
            self._next = peer
        self._unsure = unsure
        return nbytes

    def knows_the_way(self) -> bool:
        """Return whether it is known how messages go: somebody has come, or they go in frames in any case."""
        return self.conversation.negotiation.never_shares or any(peer.settled for peer in self.peers.values())

    def any_queue(self) -> PairQueue | None:
        """Return a queue that messages may go into, in which least waits; None if all go in frames. All queues of a binder
        share their memory."""
        settled = [peer for peer in self._sharing.values() if peer.settled]
        return min(settled, key=lambda peer: (peer.load(), peer.turn)).queue if settled else None

    def has_framed(self) -> bool:
        """Return whether messages to any consumer go in frames."""
        return any(peer.queue is None and peer.settled for peer in self.peers.values())

    def patience(self) -> float:
        """Return for how many seconds one peer's memory may be waited for at a time."""
        return SLICE if len(self.peers) == 1 else _MEMORY

    def _drop_idle(self) -> int:
        """See Participant."""
        return self._resend_buffer.drop_idle()

    def _carried(self) -> int:
        """See Participant."""
        return self.conversation.nbytes + self._resend_buffer.carried

    def most(self) -> int:
        """Return the bytes that a message may have: a capacity, where all consumers share memory. Any thread may ask."""
        queues = [peer.queue for peer in list(self.peers.values())]
        return min((queue.arena.capacity if queue is not None else any_size() for queue in queues), default=any_size())

    def why_blocked(self) -> str:
        """Return who or what keeps this producer from sending."""
        here = self.conversation
        if here.peers:
            peers = sorted(here.peers.values(), key=lambda peer: peer.load(), reverse=True)
            untaken = (f"{peer} holds {peer.load()} untaken of {self._room(peer)}" for peer in peers)
            return here.named(untaken) + here.unheard()
        if here.peers.last_left is not None:
            lost = f"with {self.lost} messages in flight lost so far"
            return f"no consumer is attached: {here.peers.last_left}, {lost}{here.unheard()}"
        return here.why_alone() + here.unheard()

    def _room(self, peer: ConsumerPeer) -> int:
        return min(self.window, peer.hello.window)

    def _lose(self, peer: ConsumerPeer) -> None:
        """Have a peer leave that was found to be gone."""
        self.peers.leaves(peer, How.LOST)
        self._handle_events()


def _turn(peer: ConsumerPeer) -> int:
    return peer.turn


def _resent_at(peer: ConsumerPeer) -> float:
    return peer.resent_at
