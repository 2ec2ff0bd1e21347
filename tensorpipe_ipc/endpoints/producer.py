"""Producer: the end that messages are put into."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import warnings
import weakref
from typing import Any, Literal

import torch

from tensorpipe_ipc.compiled import why_off
from tensorpipe_ipc.cuda.on_device import CudaIpcSender
from tensorpipe_ipc.cuda.staging import staged
from tensorpipe_ipc.endpoints.consumer_peer import ConsumerPeer
from tensorpipe_ipc.endpoints.conversation import Opening
from tensorpipe_ipc.endpoints.end import End
from tensorpipe_ipc.endpoints.peer import lost_or_failed
from tensorpipe_ipc.endpoints.rendezvous import PairQueue
from tensorpipe_ipc.endpoints.sender import Held, NotHandedOver, Sender
from tensorpipe_ipc.errors import Busy, Closed, Full
from tensorpipe_ipc.limits import check_count, check_seconds, deadline_of, remaining
from tensorpipe_ipc.memory.handover import handover_of, placed
from tensorpipe_ipc.memory.leases import Handover
from tensorpipe_ipc.memory.loan import Loan
from tensorpipe_ipc.memory.loans import TensorSpec, make_tensors
from tensorpipe_ipc.security import Curve
from tensorpipe_ipc.serializers import limited, serializer_named
from tensorpipe_ipc.serializers.narrowing import narrowing
from tensorpipe_ipc.wire.flatten import flatten
from tensorpipe_ipc.wire.in_block import BY_REFERENCE, metadata_of
from tensorpipe_ipc.wire.layout import Block
from tensorpipe_ipc.wire.message import EncodedMessage, encode
from tensorpipe_ipc.wire.room import made_with_room
from tensorpipe_ipc.zeromq.zmq_sockets import PEER_TIMEOUT

__all__ = ["Producer", "ProducerStatistics"]


@dataclasses.dataclass(frozen=True)
class ProducerStatistics:
    """A producer's figures so far."""

    messages: int
    """Messages put."""
    bytes: int
    """Bytes of their payloads."""
    in_flight: int
    """Messages that no consumer has taken yet."""
    lost: int
    """Messages that were in flight when the consumer that had them left. What ``get`` had returned there is not among them; but
    in frames a consumer that was killed, or cut off, may have had some of them."""
    resent: int
    """Messages sent again, as it was not known whether they had come when a connection broke (over tcp)."""
    rejected: int
    """Incoming messages that were dropped because they broke a rule of the protocol, or came from strangers."""
    last_rejection: str
    """Which rule the last of them broke; empty if there was none."""
    waits: int
    """How often put had to wait for a consumer or for credit."""
    seconds_waited: float
    """How long it waited, in all."""
    peers: tuple[str, ...]
    """The consumers that are attached, in words."""
    transport: str
    """How messages travel, and why so."""
    overflowed: int
    """Items that ``wire_dtype`` made infinite (in float8_e4m3fn, which has no inf: 448 or nan). Those of tensors
    under 64 KiB count at each try: also where the put ended in ``Full``."""
    worst_error: float
    """The largest relative error that ``wire_dtype`` made, of up to 4,096 items of each tensor."""
    on_device: int = 0
    """Messages to the consumers that are attached whose large GPU tensors stayed on their GPU (``cuda_ipc``)."""
    staged_because: str = ""
    """Why the last one with such tensors, to any of them, did not, but went through the CPU's memory; "" where it did."""


class Producer(End):
    """The end that messages are put into. One or many consumers take them out, in this process or another.

    One side binds the endpoint, the others connect; who starts first does not matter. A message goes to one consumer: with
    several, to the one that has least to do.

    Leaving a ``with`` block waits until all is taken, as ``flush`` does, up to ``linger`` seconds. It raises ``PeerLost`` for
    what was not, or warns of it where an exception is on its way. An exception that leaves the block, ``KeyboardInterrupt``
    and ``sys.exit(3)`` among them, ends the stream as *failed*: its consumers get ``StreamFailed``, after all that was put,
    with the type and text of it. So does what a consumer in the block raises because the stage before this one failed.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        bind: bool = False,
        serializer: str = "raw",
        wire_dtype: torch.dtype | None = None,
        maxsize: int = 64,
        shared_memory: Literal["auto", "off", "require"] = "auto",
        linger: float = 5.0,
        security: Curve | None = None,
        cuda_ipc: bool = False,
        peer_timeout: float = PEER_TIMEOUT,
    ) -> None:
        """Open the end. It does not wait for anybody.

        Args:
            endpoint: ``ipc:///path`` (in a folder that is there), ``tcp://host:port`` (loopback, unless there are keys),
                ``inproc://name``, or a bare name.
            bind: whether this side has the address.
            serializer: the name of the serializer for tensors: "raw", "numpy", "torch_save", or one registered.
            wire_dtype: torch.float16, bfloat16, float8_e4m3fn or float8_e5m2: real floating-point tensors and arrays that
                are wider than it cross as it, and get their own dtype back on arrival. ``statistics()`` says what that cost.
                All else goes as it is.
            maxsize: the most messages that may have been put to one consumer and not yet been taken. The consumer's own
                limit counts too.
            shared_memory: "auto": messages go through shared memory to consumers of this user on this host, and in frames
                to others; "off": in frames in any case; "require": consumers that cannot be reached through it are refused.
            linger: seconds that ``close`` waits for messages to be taken.
            security: keys, and whose are let in; both sides need them, and over tcp between hosts they must be.
            cuda_ipc: through shared memory large GPU tensors stay on their GPU, where the consumer wants them on a GPU
                (``device=``), sees theirs, and has passed a self-test. They arrive as copies in memory of the consumer's own.
                Such a message is lost if this process ends before it was taken. Else they are staged, and ``statistics()``
                says why. With ``wire_dtype`` they always are.
            peer_timeout: over tcp, seconds after the last sign of life until a consumer counts as gone that is out of sight: on
                another host, of another user, or with another runtime folder. Others are seen to be there or not. Between
                hosts a silent connection is made anew after a sixth of it, or after 10 seconds.

        Raises:
            UnknownSerializer: no serializer of that name; the known ones are named.
            TypeError: ``bind`` is no bool, ``maxsize`` no int, or ``security`` no Curve.
            ValueError: the endpoint is none, its ipc path is too long, ``wire_dtype`` or an option is out of range;
                ``security`` does not name the keys of the other side.
            Refused: the address is in use by a live process, is not safe, in no folder, or not loopback and there are no keys;
                a key file cannot be used.
            SharedMemoryError: shared memory is required, and the endpoint is inproc.
            Closed: the program is ending.
        """
        named = serializer_named(serializer)
        narrowing(named, wire_dtype)  # raises, if it is none
        linger = check_seconds(linger, "linger")
        opening = Opening.checked(endpoint, bind, maxsize, shared_memory, security, peer_timeout)
        self._sender = Sender(opening, serializer)
        self._serializer = limited(named, self._sender.most)
        self._narrowing = narrowing(self._serializer, wire_dtype)
        self._lenders: weakref.WeakKeyDictionary[PairQueue, CudaIpcSender] | None = None
        if cuda_ipc:
            self._lenders = weakref.WeakKeyDictionary()
            self._sender.in_one_block = functools.partial(_lent, self._lenders)
        self._sender.is_everyday = serializer == "raw" and self._narrowing is None and not cuda_ipc and not why_off()
        self._messages = self._bytes = self._waits = 0
        self._seconds_waited = 0.0
        super().__init__(self._sender, linger)

    def put(self, tree: Any, timeout: float | None = None, *, move: bool = False) -> None:
        """Send one message. When this returns, the tree has been read: it may be changed or dropped.

        Through shared memory it survives this process from then on. In frames it does so once ``flush`` has returned. Over
        tcp it is kept until it is known to be taken, and sent again where a connection broke before.

        An exception that a signal's handler raises meanwhile leaves the message sent, once, or not sent.

        Args:
            tree: tensors, arrays, storages, numbers, str, bytes, None, and lists, tuples, dicts, registered NamedTuples
                and dataclasses of them.
            timeout: seconds to wait for a consumer with room; None for as long as it takes, 0 for not at all.
            move: give the tensors away, by reference where that is possible: where the large ones lie in one block that
                this end lent (``loan``), the consumer shares that memory, and no view, array, storage or DLPack capsule of
                it, nor a child forked since, is left besides the tensors in the tree. These are then *empty*, of shape
                (0,). Otherwise the tree is copied, and stays as it was.

        Raises:
            Full: no consumer had room in time, or, over tcp, 256 MiB are kept for them. Who holds what is named; nothing was
                sent.
            UnsupportedLeaf: something in the tree cannot be sent; its path is named, and what to do. Nothing was sent.
            Refused: the consumer does not accept this serializer, or one of the two requires shared memory, and what is in
                the way of it; both ends are named.
            SharedMemoryError: the message is larger than shared memory may ever be.
            OutOfMemory: something in the tree has gaps or overlaps, and there is no memory to gather it in; or there is none
                to copy so large a message into, in frames. Nothing was sent.
            Closed: the end is closed or was forked.
            Busy: another thread uses it.
        """
        if self._sender.is_everyday and not move and self._sender.shares_memory:
            deadline_of(timeout)  # which refuses what is no time
            with self._guard:
                self._sender.raise_refusal()
                nbytes = self._sender.put_compiled(tree)
                if nbytes:
                    self._messages += 1
                    self._bytes += nbytes
                    if self._sender.needs_credit():  # as in _send
                        self._sender.hear_in_passing()
                    return
        held = None
        handover = self._handover_of(tree) if move else None
        if handover is not None:
            message = encode(tree, self._serializer)
            said = placed(message, handover)
            held = None if said is None else (handover, metadata_of(BY_REFERENCE, message.schema, said))
            message = message._replace(payloads=[], keep=None)  # its views are aliases of the tensors, too
        if held is None:
            message = self._copied(tree)
        deadline = deadline_of(timeout)
        with self._guard:
            self._send(tree, message, deadline, held=held, waits=timeout is None or timeout > 0)

    def loan(self, tensors: Any, dtype: torch.dtype = torch.float32, *, timeout: float | None = None) -> Loan:
        """Tensors that lie where the consumer will read them, to be filled, and sent without a copy::

            with producer.loan((3, 1080, 1920), torch.uint8) as frame:
                camera.read_into(frame)

        On leaving the block they are put as ``put(..., move=True)`` does: no alias of them should be left (else they are
        copied), and they are empty then. On an exception they are not put; their memory is free when they are gone. Where
        there is no room in time, Full is raised, and they stay the caller's. Where messages go in frames, they lie in
        memory of torch's own, and stay as they are.

        Args:
            tensors: a shape; or a tree of ``TensorSpec`` and plain values in dicts, lists and tuples, to be sent as it is
                when the block is left.
            dtype: with a shape.
            timeout: seconds to wait on entering for a consumer, as it decides where the tensors lie, and for memory; and on
                leaving for room; None: for ever.
        """
        return Loan(self, tensors, dtype, timeout)

    def lend(self, specs: list[TensorSpec], timeout: float | None) -> list[torch.Tensor]:
        """Lend, as ``loan`` does on entering: tensors in one block where that is possible, not initialised."""
        deadline = deadline_of(timeout)
        with self._guard:
            while any(spec.nbytes for spec in specs):
                queue, left = self._place(deadline), remaining(deadline)
                if queue is None:
                    break
                try:
                    seconds = min(left, self._sender.patience())
                    return make_tensors(specs, queue.leases, functools.partial(queue.block_for, seconds))
                except Full as full:  # who keeps the memory may have died, and its death is seen to here
                    if self._sender.has_framed():
                        break
                    if left <= seconds:
                        holders = f"; {queue.attachment.describe_holders()}" if timeout != 0 else ""
                        raise Full(f"{self.endpoint}: {full}{holders}") from None
                self._guard.check()
                self._sender.look_around()
        return made_with_room(self._give_back_idle, make_tensors, specs)

    def put_nowait(self, tree: Any) -> None:
        """``put(tree, timeout=0)``."""
        self.put(tree, 0)

    def wait_for(self, consumers: int = 1, timeout: float | None = None) -> None:
        """Wait until so many consumers are attached.

        Args:
            consumers: at least 1.
            timeout: seconds; None for as long as it takes.

        Raises:
            Full: fewer came in time.
        """
        check_count(consumers, "consumers")
        deadline = deadline_of(timeout)
        with self._guard:
            self._sender.drain()
            while self._sender.settled < consumers:
                self._wait(deadline, f"{self._sender.settled} of {consumers} consumers attached")

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every message that was put has been taken.

        Over tcp a connection that breaks may swallow a consumer's word of that. It repeats it in its next ``get``.

        Args:
            timeout: seconds; None for as long as it takes.

        Raises:
            Full: some were not taken in time. Who holds them is named.
            PeerLost: a consumer left with messages that it had not taken. They are lost; it is told once. ``StreamFailed``
                where an exception ended that consumer.
        """
        deadline = deadline_of(timeout)
        with self._guard:
            self._sender.drain()
            self._sender.look_around()  # as in _place
            while self._sender.in_flight:
                self._wait(deadline, "messages not taken")
            self._tell_of_losses()

    def statistics(self) -> ProducerStatistics:
        """Return a snapshot of what happened so far; of an end that is closed, the last one.

        Any thread may ask. Where another one uses the end, it is as that one has seen it.

        Raises:
            Closed: the end was forked.
        """
        self._guard.check_process()
        if not (self._guard.closing or self._guard.is_anothers()):
            self._guard.looks = True
            try:
                with contextlib.suppress(Busy, Closed), self._guard:
                    self._sender.drain()
                    self._sender.look_around()
                    self._sender.look_for_room()
            finally:
                self._guard.looks = False
        sender, lenders = self._sender, list((self._lenders or {}).values())
        peers = () if self._guard.closed else tuple(str(peer) for peer in list(sender.peers.values()) if peer.settled)
        return ProducerStatistics(
            messages=self._messages,
            bytes=self._bytes,
            in_flight=sender.known_in_flight,
            lost=sender.lost,
            resent=sender.resent,
            rejected=sender.conversation.rejected + sender.socket.dropped,
            last_rejection=sender.conversation.last_rejection,
            waits=self._waits,
            seconds_waited=self._seconds_waited,
            peers=peers,
            transport=sender.conversation.transport(),
            overflowed=self._narrowing.overflowed if self._narrowing is not None else 0,
            worst_error=self._narrowing.worst if self._narrowing is not None else 0.0,
            on_device=sum(lender.on_device for lender in lenders),
            staged_because=next((each.staged_because for each in lenders if each.staged_because), ""),
        )

    def close(self) -> None:
        """Wait up to ``linger`` seconds until all messages are taken, say goodbye and close. Again: nothing.

        A warning says how many messages were not taken, and which consumers left without having taken theirs, unless
        ``flush`` has told.

        Any thread may do it. One that waits in ``put`` or ``flush`` meanwhile gets ``Closed`` within 100 ms.
        """
        told, _ = self._close()
        if told:
            warnings.warn(told, RuntimeWarning, stacklevel=2)

    def __repr__(self) -> str:
        in_flight = "" if self._guard.foreign else f" in_flight={self._sender.known_in_flight}"
        return f"<Producer {self.endpoint} {self._guard.state} put={self._messages}{in_flight}>"

    def _handover_of(self, tree: Any) -> Handover | None:
        """Return the block that the tree's tensors lie in and may leave with, if they do."""
        with self._guard:
            queue = self._sender.any_queue()
        if queue is None:
            return None
        flat = made_with_room(self._give_back_idle, flatten, tree)
        return handover_of(flat, queue.leases)

    def _place(self, deadline: float | None) -> PairQueue | None:
        """Return a queue whose memory messages will go through, once there is a consumer; None if they go in frames."""
        sender = self._sender
        sender.drain()
        sender.look_around()  # the put that follows may come too soon to look
        sender.raise_refusal()
        while not sender.knows_the_way():
            self._wait(deadline, "no consumer")
        return sender.any_queue()

    def _copied(self, tree: Any) -> EncodedMessage:
        """Return a tree as it goes where its tensors are not handed over."""
        return made_with_room(self._give_back_idle, encode, tree, staged(self._narrowing or self._serializer))

    def _give_back_idle(self) -> int:
        with self._guard:
            return self._sender.give_back_idle()

    def _send(
        self, tree: Any, message: EncodedMessage, deadline: float | None, *, held: Held | None, waits: bool
    ) -> None:
        sender, until = self._sender, None
        while True:
            peer = self._reserve(deadline)
            try:
                if sender.send(peer, message, remaining(deadline), held=held, waits=waits):
                    break
                if deadline is not None:  # strangers may have left many connections that have ended
                    until = max(deadline, time.monotonic()) if until is None else until  # to encode may have taken long
                if sender.is_late(until):
                    sender.raise_if_short(waits)
                    self._wait(deadline, "no consumer that stayed")
            except NotHandedOver:
                message, held = self._copied(tree), None
            self._guard.check()  # it may have waited for memory
        self._messages += 1
        self._bytes += message.nbytes
        if sender.needs_credit():  # now that the message is on its way
            sender.hear_in_passing()

    def _reserve(self, deadline: float | None) -> ConsumerPeer:
        """Return a consumer with room."""
        sender = self._sender
        sender.raise_refusal()
        if sender.is_stale():
            sender.hear_in_passing()
            sender.look_around()  # one can put for long after the other end is gone
        peer = sender.choose()
        if peer is None:
            sender.drain(in_passing=remaining(deadline) > 0)
            peer = sender.choose()
        if peer is None:
            self._waits += 1
            started = time.monotonic()
            try:
                while peer is None:
                    self._wait(deadline, "no room")
                    peer = sender.choose()
            finally:
                self._seconds_waited += time.monotonic() - started
        return peer

    def _wait(self, deadline: float | None, what: str) -> None:
        self._guard.check()
        left = remaining(deadline)
        if left <= 0:
            raise Full(
                f"{self.endpoint}: {what} in time: {self._sender.why_blocked()}{self._sender.conversation.connect_error()}"
            )
        self._sender.wait(left)
        self._sender.conversation.complain_if_alone(self._sender.why_blocked)
        self._sender.raise_refusal()

    def _tell_of_losses(self) -> None:
        losses, peers = self._sender.told_losses()
        if losses:
            raise lost_or_failed(f"{self.endpoint}: {losses}", peers)


def _lent(
    lenders: weakref.WeakKeyDictionary[PairQueue, CudaIpcSender], queue: PairQueue, message: EncodedMessage
) -> tuple[Block, bytes]:
    lender = lenders.get(queue) or lenders.setdefault(queue, CudaIpcSender(queue))
    return lender.in_one_block(message)
