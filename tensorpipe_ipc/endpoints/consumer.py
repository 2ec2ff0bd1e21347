"""Consumer: the end that messages are taken out of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from tensorpipe_ipc.cuda import on_device
from tensorpipe_ipc.cuda.staging import arrival_of
from tensorpipe_ipc.endpoints.conversation import Opening
from tensorpipe_ipc.endpoints.end import End
from tensorpipe_ipc.endpoints.negotiation import how_to_accept
from tensorpipe_ipc.endpoints.peer import How, Peer, lost_or_failed
from tensorpipe_ipc.endpoints.receiver import NOTHING, Receiver
from tensorpipe_ipc.errors import (
    Empty,
    EndOfStream,
    OutOfMemory,
    PeerLost,
    ProtocolError,
    SharedMemoryError,
    UnsupportedLeaf,
)
from tensorpipe_ipc.handlers import is_a_signals
from tensorpipe_ipc.limits import check_count, deadline_of, remaining
from tensorpipe_ipc.memory.handover import region_of, values_and_frames
from tensorpipe_ipc.memory.leases import Octets
from tensorpipe_ipc.security import Curve
from tensorpipe_ipc.serializers import Serializer, serializer_named
from tensorpipe_ipc.serializers.conformance import Checked, NoMemoryForIt
from tensorpipe_ipc.shared_queue.shared_memory import lease_from
from tensorpipe_ipc.wire.arrival import AS_SENT
from tensorpipe_ipc.wire.header import Header
from tensorpipe_ipc.wire.in_block import BY_REFERENCE, OFFERS, ON_DEVICE, parts_of
from tensorpipe_ipc.wire.layout import BULK
from tensorpipe_ipc.wire.room import lacks_memory, made_with_room
from tensorpipe_ipc.wire.schema import ALIAS, Schema, keep, schema_of
from tensorpipe_ipc.zeromq.zmq_sockets import PEER_TIMEOUT

__all__ = ["Consumer", "ConsumerStatistics"]

_EVERYTHING = 1 << 62
_RAISED = (OutOfMemory, UnsupportedLeaf, PeerLost, SharedMemoryError)  # out of get, where a message cannot be read
_ENDED = object()  # in the place of a message: the stream has ended
_TURNS = (
    256  # messages that are no user's, after which it is looked whether the stream has ended, though more may have come
)
_KEPT = 1 << 16  # bytes of metadata: larger ones are looked up anew each time, and not kept
_OWN = {"auto": BULK - 1, True: _EVERYTHING, False: 0}  # payloads of up to so many bytes are copied out of their frame


@dataclasses.dataclass(frozen=True)
class ConsumerStatistics:
    """A consumer's figures so far."""

    messages: int
    """Messages taken."""
    bytes: int
    """Bytes of their payloads."""
    lost: int
    """Messages of which only the gap came: they were lost on the way. And those that an exception of a signal's handler, Ctrl-C
    say, took out of the hand of ``get``."""
    duplicates: int
    """Messages that came again after a connection broke, and were dropped (over tcp)."""
    rejected: int
    """Incoming messages that were dropped: they broke a rule of the protocol, came from strangers, or found no memory."""
    last_rejection: str
    """Why the last of them was dropped; empty if there was none."""
    peers: tuple[str, ...]
    """The producers that are attached, in words."""
    transport: str
    """How messages travel, and why so."""
    ended: int = 0
    """Producers that said goodbye."""
    failed: int = 0
    """Producers that ended by an exception."""
    vanished: int = 0
    """Producers that went without a goodbye, or were given up, and did not come back."""


class Consumer(End):
    """The end that messages are taken out of. One or many producers put them in, in this process or another.

    One side binds the endpoint, the others connect; who starts first does not matter. Messages of one producer come in the
    order in which they were put.

    A *stream* ends when its producers have left, and all that they put is taken. How it ended ``get`` tells once: by
    ``EndOfStream`` where all said goodbye, by ``StreamFailed`` where an exception ended one of them, by ``PeerLost`` where one
    went without a word, or messages of its did not come. The next ``get`` waits for the next stream. Iterating ends with the
    stream.

    Leaving a ``with`` block by an exception tells the producers that this end failed, and why.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        bind: bool = True,
        accept: Iterable[str] | None = None,
        device: Any = None,
        copy: bool | str = "auto",
        restore: bool = True,
        as_numpy: bool = False,
        maxsize: int = 64,
        shared_memory: Literal["auto", "off", "require"] = "auto",
        security: Curve | None = None,
        producers: int | Literal["auto"] | None = "auto",
        peer_timeout: float = PEER_TIMEOUT,
    ) -> None:
        """Open the end. It does not wait for anybody.

        Args:
            endpoint: ``ipc:///path`` (in a folder that is there), ``tcp://host:port`` (loopback, unless there are keys),
                ``inproc://name``, or a bare name.
            bind: whether this side has the address.
            accept: names of the serializers that producers may use. None: "raw", "numpy", and what is registered here;
                "torch_save" only where it is named.
            device: where tensors are wanted: a ``torch.device`` or its name. None or "cpu": as they come. To a GPU large ones
                are copied straight from shared memory, which is held until that is done.
            copy: "auto": small tensors arrive as torch's own memory, large ones lie on what they came in, which is nobody
                else's, and lives as long as they do: a frame, or a block of shared memory, of which they are a *lease* (as
                long as this process has not too much under lease); True: all are copied, through shared memory as one copy
                of the message; False: none copied. A part that is kept keeps all of a block or a copy: ``clone()`` it.
            restore: whether floats that a producer's ``wire_dtype`` narrowed get their own dtype back, in memory of their
                own. False: they come as they crossed, and may lie on what they came in (but for what goes to NumPy, of a
                dtype that NumPy lacks).
            as_numpy: NumPy arrays in the place of tensors, on the same memory: nothing is copied for it.
            maxsize: the most messages that each producer may have in flight towards this end.
            shared_memory: "auto": messages come through shared memory from producers of this user on this host, and in
                frames from others; "off": in frames in any case; "require": producers that cannot use it are refused.
            security: keys, and whose are let in; both sides need them, and over tcp between hosts they must be.
            producers: when a stream ends. "auto": as soon as all producers that came have left, and one came. A number: when so
                many have left, however late they come. None: never, as for a server; then one that fails or vanishes is logged
                and counted, and not raised.
            peer_timeout: over tcp, seconds after the last sign of life until a producer counts as gone that is out of sight: on
                another host, of another user, or with another runtime folder. Others are seen to be there or not. Between
                hosts a silent connection is made anew after a sixth of it, or after 10 seconds.

        Raises:
            UnknownSerializer: a name in ``accept`` is not registered; the known ones are named.
            TypeError: ``bind`` is no bool, ``maxsize`` no int, ``accept`` a str, or ``security`` no Curve.
            ValueError: the endpoint is none, its ipc path is too long, ``copy`` or another option is out of range, or
                ``device`` names none, or goes with ``as_numpy``; ``security`` does not name the keys of the other side;
                the names of the accepted serializers take more than 2,640 bytes, with 2 for each.
            Refused: the address is in use by a live process, is not safe, in no folder, or not loopback and there are no keys;
                a key file cannot be used.
            SharedMemoryError: shared memory is required, and the endpoint is inproc.
            Closed: the program is ending.
        """
        if isinstance(accept, str):
            raise TypeError(f"accept={accept!r} is a str; give a list of names: [{accept!r}]")
        names = None if accept is None else tuple(dict.fromkeys(serializer_named(name).name for name in accept))
        self._lease_from, self._own = lease_from(copy), _OWN[copy]
        self._arrival = arrival_of(restore, as_numpy, device)
        self._receiver = Receiver(
            Opening.checked(endpoint, bind, maxsize, shared_memory, security, peer_timeout),
            accept=names,
            producers=_number_of(producers),
        )
        self._receiver.is_everyday = copy == "auto" and self._arrival is AS_SENT and self._receiver.accepts("raw")
        self._messages = self._bytes = 0
        self._last_metadata = b""  # of a block: in a stream of bare tensors they are the same again
        self._last_parts: Any = None
        super().__init__(self._receiver)

    def get(self, timeout: float | None = None) -> Any:
        """Take one message. What is returned belongs to the caller, and may be written to.

        An exception that a signal's handler raises meanwhile loses the message in hand at most, and counts it as lost.

        Args:
            timeout: seconds to wait; None for as long as it takes, 0 for not at all.

        Returns:
            The tree that was put.

        Raises:
            Empty: nothing came in time.
            EndOfStream: the producers of the stream said goodbye, and all is taken; told once.
            StreamFailed: they have left, all that they put is taken, and an exception ended one of them; told once.
            PeerLost: they have left, and one went without a goodbye, or messages of its did not come; told once. Or a message
                lay in the GPU memory of one that is gone (``cuda_ipc``).
            UnsupportedLeaf: the message holds a type that is not registered here, or, ``as_numpy``, a tensor of a dtype or a
                layout that NumPy lacks. It is dropped.
            OutOfMemory: there is no memory for a message that came in frames, or no address (``ulimit -v``), or ``device`` has
                none. It is dropped. Or there is none for a copy of one in shared memory: it comes again, up to eight times.
            Refused: the producer's serializer is not accepted (where this end connects), or one of the two requires shared
                memory, and what is in the way of it.
            SharedMemoryError: copy=False, and this process has as much under lease as it may (half of what shared memory
                may hold). The message comes again. Or this process cannot read the GPU memory that the message lay in
                (``cuda_ipc``): then it is dropped.
            Closed: the end is closed, also by another thread meanwhile, or was forked.
            Busy: another thread uses it.
        """
        deadline, receiver = deadline_of(timeout), self._receiver
        taken = NOTHING
        try:
            with self._guard:
                try:
                    taken = self._get(deadline)
                finally:
                    receiver.refresh()
                if taken is _ENDED:
                    raise self._told_end()
        except BaseException:  # a signal's handler may have raised it
            if taken.__class__ is tuple:
                receiver.lost += 1
            raise
        self._messages += 1
        self._bytes += taken[1]
        return taken[0]

    def get_nowait(self) -> Any:
        """``get(timeout=0)``."""
        return self.get(0)

    def fileno(self) -> int:
        """Return a descriptor for select, poll and asyncio: readable when ``get_nowait`` would not raise ``Empty``.

        It may be readable when there is nothing after all (somebody said HELLO): take with ``get_nowait`` until ``Empty``.

        Raises:
            OSError: no descriptor is left for it.
            Closed, Busy: as ``get``.
        """
        with self._guard:
            return self._receiver.fileno()

    def statistics(self) -> ConsumerStatistics:
        """Return a snapshot of what happened so far; of an end that is closed, the last one. Any thread may ask.

        Raises:
            Closed: the end was forked.
        """
        self._guard.check_process()
        receiver = self._receiver
        return ConsumerStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=receiver.lost_so_far,
            duplicates=receiver.duplicates,
            rejected=receiver.conversation.rejected + receiver.socket.dropped,
            last_rejection=receiver.conversation.last_rejection,
            peers=() if self._guard.closed else tuple(map(str, list(receiver.peers.values()))),
            transport=receiver.conversation.transport(),
            ended=receiver.left[How.GOODBYE],
            failed=receiver.left[How.FAILED],
            vanished=receiver.left[How.LOST],
        )

    def close(self) -> None:
        """Say goodbye to the producers and close. Messages that were not taken are lost, and they are told. Again: nothing.

        Any thread may do it. One that waits in ``get`` meanwhile gets ``Closed`` within 100 ms.
        """
        self._close()

    def __iter__(self) -> Iterator[Any]:
        """Take messages until the stream ends.

        Raises:
            StreamFailed, PeerLost: as ``get``, where it does not end well.
        """
        while True:
            try:
                yield self.get()
            except EndOfStream:
                return

    def __repr__(self) -> str:
        state = self._guard.state
        return f"<Consumer {self.endpoint} {state} taken={self._messages} producers={len(self._receiver.peers)}>"

    def _get(self, deadline: float | None) -> Any:
        """Return a tree and its bytes; or ``_ENDED``, which is to be told."""
        receiver, turns, has_given_back = self._receiver, 0, False
        receiver.count_in_hand()
        while True:
            self._guard.check()
            has_ended = receiver.has_ended()
            # Before anything of a connector's next binder, or of a further producer than those of the stream.
            if has_ended and (receiver.producers or not receiver.socket.binds):
                return _ENDED
            turns += 1
            # What came was no message, and more of it may come.
            if turns > 1 and receiver.is_late(deadline) and self._is_over(0):
                return _ENDED
            left = remaining(deadline)
            patience = 0 if has_ended else left
            if receiver.shares_memory:
                peer = receiver.next_ready(patience)
                if peer is not None:
                    try:
                        taken = receiver.take(peer, self._decode_block, self._lease_from)
                    except MemoryError as error:
                        if is_a_signals(error, error.__traceback__):
                            raise
                        # What is idle of frames must not be why. One that was dropped is told.
                        if has_given_back or not receiver.comes_again(peer) or not receiver.give_back_idle():
                            raise self._no_memory(error, peer) from None
                        has_given_back = True
                        continue
                    if taken.__class__ is tuple:
                        receiver.in_hand = False  # it is get's; there is no call in between
                        return taken
                    if taken is not NOTHING:
                        taken, refused = NOTHING, taken
                        try:
                            self._raise_or_reject(refused, peer)
                        finally:
                            del refused  # its traceback has this frame, too
                    continue
                patience = 0
            arrived = receiver.pump(patience)
            receiver.raise_refusal()
            if arrived is not None:
                try:
                    receiver.check_memory(arrived)
                    taken = self._decode(arrived.header, arrived.frames)
                except Exception as error:
                    if is_a_signals(error, error.__traceback__):
                        raise
                    receiver.was_in_vain()
                    arrived.peer.brought += lacks_memory(error) or isinstance(error, (*_RAISED, NoMemoryForIt))
                    receiver.taken(arrived)
                    self._raise_or_reject(error, arrived.peer)
                else:
                    arrived.peer.brought += 1
                    receiver.taken(arrived)
                    receiver.in_hand = False  # as above
                    return taken
            elif (turns % _TURNS == 0 or not receiver.socket.has_incoming()) and self._is_over(left):
                return _ENDED

    def _is_over(self, left: float) -> bool:
        """Return whether the stream has ended, as nothing has come.

        Raises:
            Empty: the time is over, too.
        """
        receiver = self._receiver
        if receiver.has_ended():
            return True
        if receiver.is_expectant():
            receiver.conversation.complain_if_alone(receiver.why_empty)
        if left <= 0:
            raise Empty(
                f"{self.endpoint}: no message in time: {receiver.why_empty()}{receiver.conversation.connect_error()}"
            )
        return False

    def _decode(self, header: Header, frames: list[Any]) -> tuple[Any, int]:
        schema = schema_of(header.schema)
        if not self._receiver.accepts(schema.serializer):
            raise ProtocolError(
                f"serializer {schema.serializer!r} is not accepted here; {how_to_accept(schema.serializer)}"
            )
        payloads, nbytes = header.payloads(frames), schema.nbytes
        schema.check(payloads)
        serializer = _wary(schema.serializer)
        parts = header.values, payloads, serializer, self._own, self._arrival
        tree = made_with_room(self._receiver.give_back_idle, schema.tree, *parts)
        keep(schema)
        return tree, nbytes

    def _decode_block(self, metadata: bytes, payload: bytearray | Octets) -> Any:
        """Return a message in a block: its tree and bytes, or the error that it is."""
        try:
            if metadata == self._last_metadata:
                parts = self._last_parts
            else:
                parts = self._parts(metadata)
                self._last_metadata, self._last_parts = b"", parts if len(metadata) <= _KEPT else None
                self._last_metadata = metadata if len(metadata) <= _KEPT else b""
            how, schema, values, serializer = parts
            tree = self._tree_in(how, schema, values, serializer, payload)
            if type(tree) is on_device.Undeliverable:
                return _bare(tree.error)
            if not schema.is_kept:
                keep(schema)
            return tree, schema.nbytes
        except MemoryError:  # the message stays for the next get
            raise
        except Exception as error:
            if is_a_signals(error, error.__traceback__):
                raise
            if lacks_memory(error):
                raise MemoryError(str(_bare(error))) from None  # its traceback may have what was half made
            return _bare(error)

    def _tree_in(
        self, how: int, schema: Schema, values: Any, serializer: Serializer, payload: bytearray | Octets
    ) -> Any:
        """Return the tree of a message in a block, or why its device memory cannot be had."""
        if how & (ON_DEVICE | OFFERS):
            told = on_device.unpack_placement(values)
            if how & ON_DEVICE:
                return on_device.tree_of(told, told.values, schema, payload, serializer, self._arrival)
            queue = self._receiver.asked.queue
            assert queue is not None
            on_device.report_self_test(queue, told, self._arrival)
            values = told.values
        if how & BY_REFERENCE:
            said, frames = values_and_frames(memoryview(values), schema.frame_sizes(), payload)
            return schema.tree(said, frames, serializer, ALIAS, self._arrival)
        return schema.tree_in(values, region_of(payload, serializer), serializer, self._arrival)

    def _parts(self, metadata: bytes) -> tuple[int, Any, bytes, Serializer]:
        """Return whether it goes by reference; schema, values and serializer."""
        how, read, values = parts_of(metadata)
        if how not in (0, BY_REFERENCE, ON_DEVICE, OFFERS):
            raise ProtocolError(
                f"a message with flags {how:#x} in a block; endpoints take one of {BY_REFERENCE}, {ON_DEVICE}, {OFFERS}"
            )
        schema = schema_of(read)
        if not self._receiver.accepts(schema.serializer):
            raise ProtocolError(
                f"serializer {schema.serializer!r} is not accepted here; {how_to_accept(schema.serializer)}"
            )
        return how, schema, values, _wary(schema.serializer)

    def _no_memory(self, error: Exception, peer: Peer) -> OutOfMemory:
        if isinstance(error, OutOfMemory):
            return error
        why = f"{type(error).__name__}: {error}"
        return OutOfMemory(f"{self.endpoint}: there is no memory for a message from {peer} ({why})")

    def _raise_or_reject(self, error: Exception, peer: Peer) -> None:
        """Tell the caller of a message that was taken and could not be read, where that is its business; else count it.

        Whatever reading it raised, its peer is to blame, and the next message is as good as any.
        """
        if lacks_memory(error) or isinstance(error, NoMemoryForIt):
            error = self._no_memory(error, peer)
            self._receiver.conversation.reject(error, peer)
        if isinstance(error, UnsupportedLeaf):
            error = UnsupportedLeaf(
                f"{error.reason} ({self.endpoint}: a message from {peer}, which was dropped)", error.path
            )
        if isinstance(error, _RAISED):
            self._receiver.in_hand = False
            try:
                raise error
            finally:
                del error  # its traceback has this frame, which would keep the message until garbage is collected
        self._receiver.conversation.reject(error, peer)
        self._receiver.in_hand = False

    def _told_end(self) -> Exception:
        """Return what tells of the end of a stream. With that it is told; an exception that comes before has it told later."""
        unwell = self._receiver.ended_unwell()
        told = f"{self.endpoint}: every producer has said goodbye, and all is taken"
        end: Exception = EndOfStream(told)
        if unwell:
            told = "; ".join(map(str, unwell))
            end = lost_or_failed(f"{self.endpoint}: the stream has ended, and not well: {told}", unwell)
        self._receiver.next_stream()
        return end


def _wary(name: str) -> Serializer:
    """Return a serializer for what a peer has sent."""
    serializer = serializer_named(name)
    return serializer.wary or serializer if isinstance(serializer, Checked) else serializer


def _number_of(producers: Any) -> int | None:
    """Return how many producers a stream has; 0: as many as come."""
    return 0 if producers == "auto" else None if producers is None else check_count(producers, "producers")


def _bare(error: Exception) -> Exception:
    """Return an error as its words alone: the frames of its traceback hold the message, and it in turn, until garbage is
    collected."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error
