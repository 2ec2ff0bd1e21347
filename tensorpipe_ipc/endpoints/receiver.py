"""Receiver: the consumer's side of a conversation. Order, credit given back, and when the stream has ended."""

from __future__ import annotations

import select
import time
import weakref
from collections import deque
from typing import Any

from tensorpipe_ipc.compiled import CompiledPath
from tensorpipe_ipc.endpoints.conversation import Opening, log
from tensorpipe_ipc.endpoints.events import Arrived, Credited, Event, GivenUp, Greeted, Joined, Left, PieceArrived, Torn
from tensorpipe_ipc.endpoints.participant import Participant
from tensorpipe_ipc.endpoints.peer import How, to_leave_out
from tensorpipe_ipc.endpoints.peers import MOST_PEERS
from tensorpipe_ipc.endpoints.presence import Sight
from tensorpipe_ipc.endpoints.producer_peer import ProducerPeer
from tensorpipe_ipc.endpoints.reassembly import BufferPool, Reassembly
from tensorpipe_ipc.endpoints.rendezvous import PairQueue
from tensorpipe_ipc.errors import Empty, OutOfMemory, ProtocolError, ShutDown
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.memory.leases import keeping
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.serializers import ONLY_BY_NAME, accepted_by_default
from tensorpipe_ipc.shared_queue.get_end import Decode
from tensorpipe_ipc.wire.header import MAX_NAMES, Ending, Header, Hello, Kind, names_size, pack, piece_of
from tensorpipe_ipc.wire.layout import BULK
from tensorpipe_ipc.zeromq.timer_fd import TimerFd
from tensorpipe_ipc.zeromq.zmq_sockets import SLICE

__all__ = ["NOTHING", "Receiver"]

_MISSES = 8  # messages that are waited for, after one that was not there, before a queue is asked first again
_AGAIN = 0.5  # seconds
REMEMBERED = 1000  # producers that vanished, at most
_TOLD = 16  # producers that did not end well, and are named
_POLL_UNIT = 0.001  # seconds; poll rounds up a shorter wait, and each piece of a large message would wait as long
_A_TURN = 0.0003  # seconds of what is rejected
_TICK = 0.2  # seconds between two looks at who is still there, for who waits on the descriptor alone
NOTHING: Any = object()  # there is no message, as None might be one


class Receiver(Participant):
    """A consumer's.

    Attributes:
        is_everyday: whether the compiled path may take messages: they arrive as they were sent, and copies are made "auto".
        duplicates: messages that came again, and were dropped.
        producers: how many must end for the stream to end; 0: all that came; None: it never ends.
        ended: producers that have left since the last stream ended; with ``producers``, some of them may be the next streams'.
        unwell: those of them that failed, vanished, or left messages on the way, each with how many had left by then.
        left: how many left in each way, in all.
        asked: who was last asked for a message.
        in_hand: whether a message was taken that ``get`` has not returned. If an exception of a signal's handler takes it
            away, the next use counts it as lost.
    """

    role = "consumer"

    def __init__(self, opening: Opening, *, accept: tuple[str, ...] | None, producers: int | None = 0) -> None:
        self._accept = accept
        size = names_size(self._accepted())
        if size > MAX_NAMES:
            raise ValueError(
                f"the names of {len(self._accepted())} serializers take {size} bytes of this end's HELLO, the limit is "
                f"{MAX_NAMES}: name fewer in accept="
            )
        super().__init__(opening)
        # By descriptor: who has a queue; also who left, until that is empty.
        self._sharing: dict[int, ProducerPeer] = {}
        self._ready: deque[ProducerPeer | None] = deque()  # who had something at the last look; None: the socket
        # The only one, where its queue is likely to have something when it is asked.
        self._only: ProducerPeer | None = None
        self._misses = 0
        self._spent = 0.0  # when the last turn began, in this thread's processor time
        self._listens_from = 0.0  # when it is the socket's turn again, though a queue has something
        self._rests = False  # whether it is not before, either, if none has: what came last was rejected
        self.is_everyday = False
        self.asked: ProducerPeer
        self.duplicates = 0
        conversation = weakref.proxy(self.conversation)
        self._buffers = BufferPool(lambda: int(conversation.trim()))
        # The last that any peer was told. One that was given up is told a higher one when it is back, and so sends again.
        self._round = 1 - opening.bind
        # By end: what was last taken from those who vanished, and may come back, in which stream that was, and what never came.
        self._known: dict[int, tuple[int, int, int]] = {}
        self._stream = 1
        self.producers = producers
        self.ended = 0
        self.unwell: list[tuple[int, ProducerPeer]] = []
        self.left = dict.fromkeys(How, 0)
        self._timer: TimerFd | None = None
        self._due = 0.0  # when it is
        self.in_hand = False
        self._torn = 0  # messages that are known to have been torn, of the socket's tears

    # -- what its conversation asks

    def hello(self, peer: ProducerPeer | None, *, is_news: bool = False) -> Hello:
        """See Owner. A connector's binder may have met it by the last connection, and sent what was lost with that."""
        if is_news:
            self._round += 1
            for each in self.peers.values():
                each.round = self._round
        here = self.conversation
        return Hello(
            self.role,
            identity(),
            self.window,
            accepts=self._accepted(),
            sequence=0 if peer is None else peer.taken,
            shared_memory=here.negotiation.terms(peer),
            end=here.end,
            folder=here.folder,
            round=self._round if peer is None else peer.round,
        )

    def new_peer(self, routing: bytes, hello: Hello, sight: Sight) -> ProducerPeer:
        """See Owner. One that was given up may be back."""
        peer = ProducerPeer(routing, hello, sight)
        self._round += self.socket.binds
        peer.round = self._round
        taken, stream, never_came = self._known.get(hello.end, (0, 0, 0))
        peer.began = peer.taken = max(taken, hello.sequence)
        if stream >= self._stream:  # it had not gone: its end will tell of all that is missing
            peer.never_came = never_came + peer.taken - taken
        return peer

    def finishes(self) -> bool:
        """See Owner. As long as it has not noted who left, it does not know."""
        return bool(self._sharing) or bool(self.conversation.events) or self.has_ended()

    # -- events

    def _handle(self, event: Event) -> Arrived | None:
        """See Participant."""
        if isinstance(event, Arrived):
            return self._arrived(event)
        if isinstance(event, PieceArrived):
            self._piece(event.peer, event.header, event.frames)
        elif isinstance(event, GivenUp):
            if self._expects(event.peer, event.header):
                self._take_up_to(event.peer, event.header.sequence, in_hand=False)
        elif isinstance(event, Greeted):
            self._greeted(event.peer, event.sequence)
        elif isinstance(event, Joined):
            self._joined(event.peer)
        elif isinstance(event, Left):
            self._left(event.peer)
        elif isinstance(event, Torn):
            self._ask_for_torn()
            self.lost += event.lost
            self.conversation.events.popleft()  # with no call since then
        elif isinstance(event, Credited):
            raise ProtocolError(f"CREDIT {event.sequence} for a consumer (from {event.peer})")
        return None

    def _joined(self, peer: ProducerPeer) -> None:
        end, known = peer.hello.end, self._known
        its = next((count for count, each in self.unwell if each.hello.end == end), self.ended)
        unwell = [(count - (count > its), each) for count, each in self.unwell if each.hello.end != end]
        if end in known:  # one that was given up is back
            taken, stream, _ = known[end]
            self.lost += peer.began - taken  # what was given up with it
            if stream >= self._stream:  # its end was not told yet
                self.unwell = unwell
            peer.is_back = True
            del known[end]
            self.ended -= stream >= self._stream and self.ended > 0  # as the end of which it was counted
            self.left[How.LOST] -= 1
        self.conversation.events.popleft()  # with no call since the first of these figures
        self._share(peer)

    def _greeted(self, peer: ProducerPeer, sequence: int) -> None:
        """A peer says how far it has sent messages. All that it sent before saying so has come in before, or never will."""
        self._share(peer)
        if peer.queue is None and sequence > peer.taken:
            # One that sends again will not send those: it has given them up. But for what one that connects says by the
            # connection by which the two met: then the end that was here before had them.
            has_met = not peer.resends or not self.socket.binds
            if has_met or peer.taken > peer.began or peer.hello.round > peer.served:
                self._never_come(peer, sequence - peer.taken)
            peer.taken, peer.reassembly = sequence, None
            self.conversation.say(peer.routing, pack(Kind.CREDIT, sequence))
        elif peer.queue is None and sequence < peer.taken and not self.socket.binds:
            self.conversation.say(peer.routing, pack(Kind.CREDIT, peer.taken))  # of what came by the connection before
        if peer.hello.round > peer.served:  # a new connection of the other end's
            if self.socket.binds:
                self._next_round(peer)
            peer.served = peer.hello.round  # last: what an exception cuts short is done again
        self.conversation.welcome(peer)

    def _left(self, peer: ProducerPeer) -> None:
        assert peer.left is not None
        if (
            peer.last_position is not None and peer.last_position > peer.taken
        ):  # messages that have not come by now never will
            self._never_come(peer, peer.last_position - peer.taken)
            peer.taken = peer.last_position
        # A HELLO that names a queue not offered here was meant for the binder before this one. Who is there comes again.
        terms = peer.hello.shared_memory
        meant_another = self.socket.binds and terms is not None and bool(terms.attached)
        has_sent = peer.settled or peer.is_back or peer.taken > peer.began or peer.reassembly is not None
        has_sent = has_sent or (peer.queue is not None and self._holds_any(peer.queue))
        if peer.left is How.LOST and not has_sent and (meant_another or not peer.sight.is_gone()):
            self.conversation.events.popleft()
            self.conversation.publish()
            return
        # One that sent nothing pushes out none that did.
        is_news = peer.taken > peer.hello.sequence or len(self._known) < REMEMBERED
        if peer.left is How.LOST and peer.resends and peer.hello.end and is_news:
            stream = self._stream + (self.ended // self.producers if self.producers else 0)
            self._known[peer.hello.end] = peer.taken, stream, peer.never_came
            while len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
        if peer.left is How.LOST and peer.queue is not None:
            peer.queue.attachment.recover_dead()
        counts = peer.left in (How.GOODBYE, How.FAILED, How.LOST)
        is_unwell = counts and (peer.left is not How.GOODBYE or peer.never_came > 0)
        if is_unwell and self.producers is None:  # a stream that never ends
            log.warning("%s: %s", self.endpoint, peer)
        unwell = self.unwell
        if is_unwell and self.producers is not None:
            unwell = self._with_one_more(self.ended + 1, peer)
        self.left[peer.left] += 1
        self.unwell, peer.reassembly = unwell, None
        self.ended += counts
        self.conversation.events.popleft()  # with no call since the first of these figures
        self._forget_if_drained(peer)
        self.conversation.publish()

    def _with_one_more(self, count: int, peer: ProducerPeer) -> list[tuple[int, ProducerPeer]]:
        """Return ``unwell`` with another producer: of each stream that is still to be told as few as are named."""
        size = self.producers or MOST_PEERS
        of_its_stream = [each for each in self.unwell if (each[0] - 1) // size == (count - 1) // size]
        left_out = of_its_stream[to_leave_out([each.left for _, each in of_its_stream], _TOLD)]
        return [*(each for each in self.unwell if each not in left_out), (count, peer)][-MOST_PEERS:]

    # -- queues

    @property
    def shares_memory(self) -> bool:
        """Return whether there is any queue."""
        return bool(self._sharing)

    def _share(self, peer: ProducerPeer) -> None:
        """Have waits tell of a queue's messages, if the two have one. Again: nothing.

        Where the kernel has no more watches, looks find its messages, as soon as no other queue has any.
        """
        if peer.queue is not None:
            fd = peer.queue.tickets.fileno()
            self._sharing[fd] = peer
            peer.compiled = CompiledPath(peer.queue, None, is_everyday=self.is_everyday, tells_size=True)
            self._only = None
            try:
                self.socket.watch(fd)
            except OSError as error:
                reraise_from_handler(error)

    def _unshare(self, peer: ProducerPeer) -> None:
        """Let go of a peer's queue, if the two have one. Again: nothing."""
        self._only = None
        if peer.queue is not None:
            peer.queue.gets.give_up()
            self.lost += peer.queue.gets.lost  # first: ``lost_so_far`` asks those that are shared
            peer.queue.gets.lost = 0
            fd = peer.queue.tickets.fileno()
            self._sharing.pop(fd, None)
            self.socket.unwatch(fd)
            peer.queue.let_go()
            peer.queue = peer.compiled = None

    def has_ended(self) -> bool:
        """Return whether the producers of a stream have left, and nothing of theirs is left."""
        here = self.conversation
        if self.producers is None or here.events or here.hears_again:  # somebody may be about to come
            return False
        if self.producers:
            return self.ended >= self.producers and not any(peer.left for peer in self._sharing.values())
        return self.ended > 0 and not self.peers and not self._sharing and not here.standby.any_claimed

    def is_expectant(self) -> bool:
        """Return whether a first producer is missing, or a further one of a stream. The next stream may begin at any time."""
        return self.peers.last_left is None or bool(self.producers and self.ended)

    def ended_unwell(self) -> list[ProducerPeer]:
        """Return which producers of a stream that has ended did not end well. Its are the first ``producers`` that left."""
        return [peer for count, peer in self.unwell if count <= (self.producers or self.ended)]

    def next_stream(self) -> None:
        """Begin the next stream, as the end of this one is being told. No exception can come at its end, or when it returns."""
        ended = self.producers or self.ended
        unwell = [(count - ended, peer) for count, peer in self.unwell if count > ended]
        self.unwell, self._stream = unwell, self._stream + 1
        self.ended -= ended

    def holds_back(self) -> bool:
        """Return whether an interrupted get left a message that no descriptor tells of."""
        return any(peer.queue is not None and peer.queue.gets.holds_back for peer in self._sharing.values())

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to do for ``pump`` or ``take``, or all has ended."""
        timer = self._open_timer()
        fd = self.socket.fileno()
        timer.check()
        self.ensure_greeted()
        self.refresh()
        return fd

    def refresh(self) -> None:
        """Bring ``fileno`` up to date, after whatever was done with the link."""
        if self.socket.is_watched:
            ready = (
                self.socket.look()
                or bool(self.conversation.events)
                or self.conversation.greeting.is_owed()
                or self.conversation.greeting.has_lost_connection()
            )
            self.socket.show(ready or self.has_ended() or self.holds_back())
            self._tick()

    def _tick(self) -> None:
        """Have the descriptor tell from time to time, while there is anybody, that it is to be looked who still is there."""
        assert self._timer is not None  # ``fileno`` made it
        now = time.monotonic()
        is_to_look = (
            bool(self.peers) or self.conversation.standby.any_claimed or self.conversation.greeting.knows_nobody()
        )
        if is_to_look and now >= self._due:
            self._due = now + _TICK
            self._timer.set(_TICK)
        elif not is_to_look and self._due:
            self._due = 0.0
            self._timer.set(0)

    def _open_timer(self) -> TimerFd:
        if self._timer is None or self._timer.fd < 0:  # there may have been no descriptor for it, the last time
            self._due, self._timer = 0.0, TimerFd()  # which is yet to be set
        if self._timer.fd >= 0:
            self.socket.watch(self._timer.fd)
        return self._timer

    def next_ready(self, timeout: float) -> ProducerPeer | None:
        """One whose queue has something, each in its turn. None: nobody's, within ``timeout`` seconds and a slice; or
        something came to the socket, whose turn it is then."""
        if self._only is not None and not self.is_stale():
            return self._only
        if not self._ready:
            self._look_for_ready(timeout)
        return self._ready.popleft() if self._ready else None

    def _look_for_ready(self, timeout: float) -> None:
        ready, sharing = self._ready, self._sharing
        self._only = None
        self.look_now_and_then()  # exceptions may cut every wait short
        self._drained = began = time.monotonic()
        ready.extend(peer for peer in sharing.values() if peer.queue is not None and peer.queue.gets.holds_back)
        listens, incoming = began >= self._listens_from, False
        found = [] if listens else self.socket.wait_any(0)
        if self._rests and not (listens or ready or any(fd in sharing for fd in found)):
            found += self._wait_for_queues(min(timeout, SLICE, self._listens_from - began))
        if listens or not (ready or any(fd in sharing for fd in found)):  # it is its turn, or no queue has anything
            spent = time.thread_time()
            self.ensure_greeted()
            incoming = not self.socket.is_silent()
            if not incoming:  # else it is known what it was when it has been heard
                self._listened(spent, rests=False)
            found = self.socket.wait_any(0 if incoming or ready else timeout)
        for fd in found:
            if fd in sharing:
                peer = sharing[fd]
                peer.waiting = peer.waiting or 1
                ready.append(peer)
            elif self._timer is not None and fd == self._timer.fd:
                self._timer.set(0)
                self._due = 0.0
        if incoming:
            ready.append(None)
        elif not ready:
            self.look_around()
            ready.extend(peer for peer in sharing.values() if peer.queue is not None and peer.queue.tickets.unread())

    def _wait_for_queues(self, timeout: float) -> list[int]:
        """Wait for those that had something a moment ago. Return which have now: a quick consumer empties them each time."""
        lately = [fd for fd, peer in self._sharing.items() if peer.heard > self._drained - SLICE]
        if not lately or timeout < _POLL_UNIT:
            return []
        queues = select.poll()
        for fd in lately:
            queues.register(fd, select.POLLIN)
        return [fd for fd, _ in queues.poll(timeout // _POLL_UNIT)]

    def pump(self, timeout: float) -> Arrived | None:
        """See Participant. While a queue has messages, all that is none of its own has a fifth of the time.

        A turn comes once for each of the caller's messages at most. So where strangers reach the port, one that begins with
        what is rejected goes on with more of that for a while: else hundreds of their connections would be heard one by one.
        """
        if not self._sharing:
            return super().pump(timeout)
        here = self.conversation
        here.look_now_and_then()  # which is no talk of anybody's
        self._spent = time.thread_time()
        before = rejected = here.rejected
        arrived = super().pump(timeout)
        while here.hangs_up and arrived is None and here.rejected > rejected and self._has_time():
            rejected = here.rejected
            arrived = super().pump(0)
        if arrived is None or here.rejected > before:
            self._listened(self._spent, rests=here.rejected > before)
        return arrived

    def _has_time(self) -> bool:
        """Return whether a turn that began with what is rejected goes on: something has come, and it has not taken long."""
        return time.thread_time() - self._spent < _A_TURN and self.socket.has_incoming()

    def was_in_vain(self) -> None:
        """Note that what ``pump`` returned is rejected: its time is that of all that is no message."""
        if self._sharing:
            self._listened(self._spent, rests=True)

    def _listened(self, spent: float, *, rests: bool) -> None:
        # Of the last turn only: what was heard while no queue had anything took nothing from one. A rest that is too short to
        # wait for is carried over; else many short turns would never wait.
        now = time.monotonic()
        owed = min(max(self._listens_from - now, 0), _POLL_UNIT)
        self._listens_from = now + owed + 4 * (time.thread_time() - spent)
        self._rests = rests

    def take(self, peer: ProducerPeer, decode: Decode, lease_from: int) -> Any:
        """Return the next message of a peer's queue, as ``decode`` makes it; NOTHING, if there is none after all."""
        queue = peer.queue
        if queue is None:
            return NOTHING
        self.asked = peer
        message = self._take(peer, queue, decode, lease_from)
        if message is not NOTHING:
            self.in_hand = peer.settled = True  # its binder has accepted the queue, or it would have nothing
            peer.heard = time.monotonic()
            self._misses -= 1
            if self._misses < 0 and len(self._sharing) == 1 and len(self.peers) == 1:
                self._only = peer
        if peer.left:
            self._forget_if_drained(peer)
        return message

    def comes_again(self, peer: ProducerPeer) -> bool:
        """Return whether a message of a peer's queue for which there was no memory comes again."""
        return peer.queue is not None and peer.queue.gets.holds_back

    @property
    def lost_so_far(self) -> int:
        """Messages that were lost: ``lost``, and by exceptions that came inside a get of a queue, or behind it."""
        queues = [peer.queue for peer in list(self._sharing.values())]  # any thread may ask
        return self.lost + self.in_hand + sum(queue.gets.lost for queue in queues if queue is not None)

    def count_in_hand(self) -> None:
        """Count the message as lost that an exception of a signal's handler took out of the last get's hand, if it did."""
        if self.in_hand:
            self.lost += 1
            self.in_hand = False

    def _take(self, peer: ProducerPeer, queue: Any, decode: Decode, lease_from: int) -> Any:
        try:
            if queue.gets.holds_back:
                peer.waiting = 0  # it may take what is there, too
                return queue.get(0, decode, lease_from)
            for found in peer.compiled.take((decode,)) if peer.compiled is not None else ():
                peer.waiting -= peer.waiting > 0
                return found
            if peer.waiting <= 0:
                peer.waiting = queue.tickets.unread()
                if not peer.waiting:
                    self._only, self._misses = None, _MISSES
                    return NOTHING
            peer.waiting -= 1
            if peer.compiled is not None and not peer.compiled.is_asked and queue.opened.operations:
                peer.compiled.open()
            # None is the fastest way, as nobody else takes what is there; only a hostile producer does.
            timeout = 0 if keeping or queue.words[queue.record.watch] else None
            return queue.get(timeout, decode, lease_from)
        except (Empty, BlockingIOError):  # the latter: somebody else has taken what was there
            self._only = None
        except MemoryError as error:
            if queue.gets.undecodable:  # it was dropped: no get finds memory for it
                queue.gets.undecodable = 0
                peer.settled = True  # as after any other
                self.conversation.reject(error, peer)
            raise
        except (ProtocolError, IndexError, ShutDown) as error:  # a ticket that names no message
            peer.settled = True
            self.conversation.reject(error, peer)
            self._break_off(peer)
        return NOTHING

    def _break_off(self, peer: ProducerPeer) -> None:
        """Nothing that its queue holds can be believed any more."""
        if peer.left:
            self._unshare(peer)
        else:
            peer.ending = Ending("it broke the rules of the queue")
            self.peers.leaves(peer, How.LOST)
            self._handle_events()
            self._unshare(peer)

    def _forget_if_drained(self, peer: ProducerPeer) -> None:
        if peer.queue is not None and not self._holds_any(peer.queue):
            self._unshare(peer)

    def _holds_any(self, queue: PairQueue) -> bool:
        """Return whether a message is in a queue, or was taken out of it and comes again."""
        return queue.tickets.unread() > 0 or queue.gets.holds_back

    # -- frames

    def accepts(self, serializer: str) -> bool:
        """Return whether messages made by that serializer are taken here."""
        return serializer not in ONLY_BY_NAME if self._accept is None else serializer in self._accept

    def _accepted(self) -> tuple[str, ...]:
        return accepted_by_default() if self._accept is None else self._accept

    def taken(self, arrived: Arrived) -> None:
        """Tell the producer that its message was taken: it may send another. Those that it skipped are counted as lost.

        An exception that comes before it is counted as taken has it come again.
        """
        peer = arrived.peer
        self._take_up_to(peer, arrived.header.sequence, in_hand=True)
        self.conversation.events.popleft()
        self._handle_events()

    def _take_up_to(self, peer: ProducerPeer, sequence: int, *, in_hand: bool) -> None:
        peer.credited = sequence  # first: an exception may come when it was said, and before it is counted as taken
        self.conversation.say(peer.routing, pack(Kind.CREDIT, sequence))
        skipped = sequence - peer.taken - 1
        if skipped:
            self._never_come(peer, skipped)
        peer.taken, self.in_hand = sequence, in_hand  # no exception comes between what that did last and this
        peer.reassembly, peer.asked_at = None, 0.0

    def _arrived(self, arrived: Arrived) -> Arrived | None:
        """Return a message that is the next one; None, to be dropped, if it is not."""
        peer, header = arrived.peer, arrived.header
        if not self._expects(peer, header):
            peer.repeated += 1
            self.socket.waste()
            return None
        if peer.reassembly is not None and not arrived.refused:
            if len(arrived.frames) == 1 and self._lacks_pieces(peer, header):
                return None
            return Arrived(peer, *peer.reassembly.completed(header, arrived.frames))
        return arrived

    def _expects(self, peer: ProducerPeer, header: Header) -> bool:
        """Return whether a message is the peer's next one.

        One that was taken before is dropped. So is one that comes after a gap, if the gap can be filled.
        """
        self._check_uses_frames(peer)
        if header.sequence <= peer.taken:
            self.duplicates += 1
            return False
        return self._is_next(peer, header)

    def _check_uses_frames(self, peer: ProducerPeer) -> None:
        if peer.queue is not None:
            raise ProtocolError("a message in frames from a producer that shares memory")
        # Elsewhere an honest one may not have come to say why not: an exception took its word, or it is said with the next.
        if not peer.settled and self.conversation.negotiation.wish == "require":
            raise ProtocolError("a message in frames from a producer that has claimed no queue; this end requires it")

    def _is_next(self, peer: ProducerPeer, header: Header) -> bool:
        if header.sequence == peer.taken + 1 or not peer.resends:
            return True
        self._ask(peer)
        return False

    def _ask(self, peer: ProducerPeer) -> None:
        """Ask for what is missing; again only if that was of no use for a while."""
        now = time.monotonic()
        if now - peer.asked_at > _AGAIN:
            peer.asked_at = now
            self._next_round(peer)
            self.conversation.ask(peer)

    def _tend(self) -> None:
        """See Participant."""
        for peer in [each for each in self._sharing.values() if each.left]:  # an exception may have kept it
            self._forget_if_drained(peer)

    def _ask_for_torn(self) -> None:
        """Ask for what an exception tore. It may have been the last."""
        for peer in self.peers.values():
            if peer.resends and peer.queue is None:
                peer.asked_at = 0.0
                self._ask(peer)

    def _next_round(self, peer: ProducerPeer) -> None:
        self._round = peer.round = max(self._round, peer.round) + 1

    def _piece(self, peer: ProducerPeer, header: Header, frames: list[Any]) -> None:
        """A piece of a message came, or fragments of one. It is put in its place; DATA of the same number completes it."""
        self._check_uses_frames(peer)
        if len(frames) < 2:
            raise ProtocolError(f"a PIECE of {len(frames)} frames from {peer}")
        if header.sequence <= peer.taken or not self._is_next(peer, header):
            peer.repeated += 1
            return
        reassembly = peer.reassembly
        gives_up = reassembly is not None and reassembly.sequence != header.sequence
        if reassembly is None or gives_up:
            reassembly = peer.reassembly = Reassembly(header.sequence, piece_of(header), self._buffers, peer.largest)
        before, said, is_in_place = reassembly.filled, piece_of(header), True
        try:
            for fragment in frames[1:]:
                is_in_place = is_in_place and reassembly.add(said, fragment)
                said = said._replace(offset=said.offset + len(fragment))
        except ProtocolError:
            peer.reassembly = None  # its message will not come again as another
            raise
        peer.repeated += not gives_up
        if reassembly.is_complete and not reassembly.refused:
            peer.largest = max(peer.largest, reassembly.total)
        if not is_in_place:
            self._ask(peer)
        elif reassembly.filled > before and not gives_up:
            peer.brought += 1
            if reassembly.filled >= before + BULK:
                self._spent = time.thread_time()  # its time is a message's, and no talk

    def _lacks_pieces(self, peer: ProducerPeer, header: Header) -> bool:
        """Return whether pieces are missing of a message that is expected, and will come again.

        An exception of a signal's handler took them; its producer keeps them, and was asked, or is now."""
        reassembly, is_torn = peer.reassembly, peer.asked_at > 0 or self.conversation.is_torn
        if (
            not peer.resends
            or not is_torn
            or reassembly is None
            or reassembly.sequence != header.sequence
            or reassembly.is_complete
        ):
            return False
        self._ask(peer)
        return True

    def check_memory(self, arrived: Arrived) -> None:
        """See that there was memory for the pieces, or the fragments, of a message that is complete.

        Raises:
            OutOfMemory: there was none.
        """
        if arrived.refused:
            raise OutOfMemory(f"{self.endpoint}: a message from {arrived.peer} was dropped: {arrived.refused}")
        peer = arrived.peer
        reassembly = peer.reassembly
        if reassembly is None or reassembly.sequence != arrived.header.sequence or not reassembly.refused:
            return
        if reassembly.is_complete:  # else nobody has sent what there is no memory for
            raise OutOfMemory(f"{self.endpoint}: {peer} sent {reassembly.refused}")

    def give_back_idle(self) -> int:
        """See Participant."""
        return self._buffers.give_back_idle()

    def _drop_idle(self) -> int:
        """See Participant."""
        return self._buffers.drop_idle()

    def take_leave(self, linger: float) -> tuple[str, float]:  # noqa: ARG002 - a consumer waits for nobody
        """See Participant."""
        # What an exception left to come again, though its producer was told that it was taken.
        for peer in self.peers.values():
            lost = max(0, peer.credited - peer.taken)
            peer.credited = 0  # with no call since
            self.lost += lost
        return "", self.socket.farewell if self.say_goodbye() else 0.0

    def _let_go(self) -> None:
        """See Participant."""
        self._buffers.close()
        for peer in list(self._sharing.values()):
            self._unshare(peer)

    def close(self, linger: float) -> None:
        """See Participant."""
        try:
            super().close(linger)
        finally:
            if self._timer is not None:
                self._timer.close()

    def _never_come(self, peer: ProducerPeer, count: int) -> None:
        """Count messages that a peer had sent, and that will not come: its stream does not end well.

        It does where exceptions inside this end's own get tore them, of which its caller knows: one message each, of a peer
        that sends nothing again.
        """
        own = 0 if peer.resends else min(count, self.socket.tears.count - self._torn)
        self._torn += own
        self.lost += count
        peer.never_came += count - own

    def why_empty(self) -> str:
        """Return who is expected to send something."""
        here = self.conversation
        if here.peers:
            why = here.named(map(str, sorted(here.peers.values(), key=lambda peer: peer.heard)))
        else:
            why = (
                here.why_alone() if here.peers.last_left is None else f"no producer is attached: {here.peers.last_left}"
            )
        left = f"; {self.ended} of {self.producers} producers have left" if self.producers and self.ended else ""
        return f"{why}{left}{here.unheard()}"
