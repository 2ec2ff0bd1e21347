"""ZeroMQ's door: contexts, sockets and their errors. The rest of the package sees frames and peers only.

A binder has a ROUTER, a connector a DEALER. High-water marks are off: what may be in flight is counted by credits, so
nothing waits in ZeroMQ beyond them. But for what a consumer says over tcp, where a stranger may ask for ever and never read.
What a producer says there, beside its messages, is not said again before ZeroMQ has let go of what was said before.

* A DEALER over ipc or tcp learns from a monitor whether it is connected. One that receives has IMMEDIATE off: what came by a
  connection that ended is kept. One that sends has it on: libzmq drops what was to go by a connection as soon as that ends, so
  nothing that was meant for a binder that died reaches the one after it. What came by it and was not read is dropped, too: a
  last credit, or a goodbye, which stands in the other end's file.
* A bind never takes over a live owner's ipc socket, which libzmq's own bind does without a word (``address_claim``).
* Each connection has a name that ROUTER makes. A connector that named itself would need ROUTER_HANDOVER, by which a new
  connection takes the name of an old one. That one goes on without a pipe; over tcp libzmq ends the process (!_io_error) if
  something comes by it, and it is reset: whoever reaches the port could do so. HELLO says who it is that comes again. One that
  chose a name nevertheless is hung up on.
* LINGER is 0 from the start, and close says how long. A session whose connection ends is told the linger of that moment,
  and libzmq's own is "for ever": with a message left in its pipe, and nobody to send it to, term never returned.
* Memory of the caller is never lent to ZeroMQ; that which a producer keeps over tcp is. pyzmq does this with a thread of
  its own (zmq.utils.garbage), which runs from the first loan until this process's last end is closed.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import zmq

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.process import is_dead
from tensorpipe_ipc.security import Curve
from tensorpipe_ipc.transport.address_claim import claim, unclaim
from tensorpipe_ipc.transport.addresses import Address, check_folder, check_socket_file, is_shared
from tensorpipe_ipc.transport.curve import Gate, use_keys
from tensorpipe_ipc.transport.fragments import LARGEST_FRAGMENT, in_fragments, joined
from tensorpipe_ipc.transport.handshakes import Handshakes
from tensorpipe_ipc.transport.kernel_sockets import hang_up, listener, prepare_for_bulk, process_behind
from tensorpipe_ipc.transport.poll_fd import PollFd
from tensorpipe_ipc.transport.zmq_contexts import acquire, has_descriptors, hold_reaper, release, router
from tensorpipe_ipc.wire.layout import BULK

__all__ = ["FrameSocket", "SocketError", "Unreachable", "library"]

SLICE = 0.1  # seconds: the longest that a wait goes without looking at who is still there
_LETTING_GO = 0.1  # seconds: libzmq's threads let go of a name some time after close
_LET_GO = 1.0  # seconds that closing waits for a port, at most
_numbers = itertools.count()
_EVENT = struct.Struct("=HI")  # of a monitor: which, and a number that goes with it
_SLICE_MS = int(SLICE * 1000)
# Plain ints: each `|` of pyzmq's enum members costs a microsecond.
_WAIT, _DO_NOT_WAIT, _NO_COPY = (0,), (int(zmq.NOBLOCK),), (False,)  # for recv
_MORE, _LAST, _POLLIN, _POLLOUT = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.POLLOUT)
_EVENTS = int(zmq.EVENTS)
# Milliseconds. A connection by which nothing has come for 1.6 s is given up, and made anew. An attempt to connect that the
# kernel would repeat after 1, 3, 7 ... s is made again by us, so that a line that is back is found within a second.
_HEARTBEATS = {
    zmq.HEARTBEAT_IVL: 400,
    zmq.HEARTBEAT_TIMEOUT: 1600,
    zmq.HEARTBEAT_TTL: 1600,
    zmq.TCP_MAXRT: 3000,
    zmq.CONNECT_TIMEOUT: 700,
}
# Bytes of one frame: more than fits, and not "no limit", which a hostile length would take at its word.
_LARGEST = 1 << 40
_BACKLOG = 1024
# Frames that a message has beside those of ``BULK`` bytes or more, and the rest of each where long ones are cut: the sender's
# name, the header, an empty one that ends what was cut off. An empty frame is two bytes on the wire, and hundreds here.
_FRAMES = 4
# Messages of one frame that ZeroMQ may hold for a peer: more than one that reads ever leaves there.
_UNREAD = 64
_NAME = 5  # bytes of the name that a ROUTER makes for a connection
_SURPLUS_AT_ONCE = 5000
_DROPPED_AT_ONCE = 500  # messages of those who were hung up on
_GIVE_BACK_AFTER = 200_000  # of them, which libzmq held in 13 MB
_HUNG_UP = 4096  # connections that may have said more before they were hung up on
_MOST_UNREAD = 1024  # peers, until those are forgotten that have read


SocketError = zmq.ZMQError  # of this end's own socket, whatever came


class Unreachable(Exception):
    """The peer is not connected (any more). Never seen by users."""


class FrameSocket:
    """One ROUTER or DEALER: frames to and from peers, each known by its routing id (a DEALER's one peer: b"").

    Attributes:
        address: where; with the port that was chosen, if any was to do.
        binds: whether this end has the address.
        connection: the number of a connector's connection, as it was last seen; 0 while there is none, or this end binds.
            Over inproc it is there before its binder is.
        surplus: why the message that ``receive`` returned is none: it had more frames than one of so many bytes has, and the
            first few were kept; or came by a connection that is refused. "" of others.
        torn_at: when an exception last hit inside a receive, and took a part of a message, or perhaps none, with it.
        dropped: messages that had come by connections that were hung up on.
    """

    def __init__(
        self, address: Address, *, bind: bool, receives: bool, window: int = 0, security: Curve | None = None
    ) -> None:
        """Nothing is opened yet.

        Args:
            address: where.
            bind: whether to have the address.
            receives: whether this is the end that the messages come to.
            window: how many messages may be in flight to or from one peer.
            security: keys to use.
        """
        self.address = address
        self.binds = bind
        self.connection = 0
        self._connections = 1  # over inproc, so far
        self._is_left = False  # whether its binder has closed there, and not all that it said is read

        self._poll_fd: PollFd | None = None
        self._fd = -1  # once there is an epoll
        self._handshake_fds: list[int] = []
        self._is_silent = False  # nothing had come at the last look, and its descriptor tells if anything does
        self._is_shown = False  # whether anybody has asked for fileno
        self._frames: list[Any] = []  # of the message that is being received
        self._came = 0  # bytes of them
        self.surplus = ""
        self._surplus = False  # whether it has more frames than a message of so many bytes has: they are not kept
        self._torn = False  # whether that was cut short
        self.torn_at = 0.0
        self.dropped = 0
        self._hung_up: dict[bytes, None] = {}  # by routing id
        self._heard: Any = None  # the last frame that came to an end that sends
        self._window = window
        self._unread: dict[bytes, _Unread] = {}  # by peer, over tcp, of an end that sends
        self._may_be_unread = address.scheme == "tcp" and not receives
        self._receives = receives
        self._security = security
        self._has_keys = security is not None
        self._cuts = self._has_keys or address.scheme == "tcp"
        self._handshakes: Handshakes | None = None
        self._gate: Gate | None = None
        self._gate_fd = -1
        self._monitored = not bind and address.scheme != "inproc"
        self._is_shared = False  # whether others may put a socket where a connector looks for one
        self._is_believed = True  # whether it is known who sent the message that is being received
        self._made: list[os.stat_result] = []  # the socket file of a binder
        self._listening = -1  # the descriptor, of libzmq's, by which a binder is connected to; until it is closed
        self._socket: zmq.Socket[bytes] | Any = None

    def open(self, told: Callable[[Exception], None]) -> None:
        """Bind or connect. May be cut short anywhere by an exception; then ``close`` leaves nothing of it.

        Args:
            told: is called with a ``Refused`` for everybody who comes with a key that is not on the list.

        Raises:
            ValueError: keys that are needed were not named.
            Refused: the address is in use, not allowed, or not safe, or a key file cannot be used.
        """
        context = self._context = acquire(self, own=self.binds and self._has_keys)
        self._socket = router(context) if self.binds else context.socket(zmq.DEALER)
        if self._security is not None:
            use_keys(self._socket, self._security, bind=self.binds)
            if self.binds:
                self._gate = Gate(context, self._security, told)
        self._open(self.address)

    def _open(self, address: Address) -> None:
        if not self.binds and address.path:
            check_folder(address.path)  # the socket may come later: it must be nobody else who puts it there
            check_socket_file(address.path)
            self._is_shared = is_shared(os.path.dirname(address.path))
        options: dict[Any, Any] = {
            zmq.SNDHWM: min(2 * self._window + _UNREAD, 1 << 30) if self._receives and address.scheme == "tcp" else 0,
            # Over tcp libzmq ends the process (!_io_error) where a connection ends whose reading a mark has stopped.
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: LARGEST_FRAGMENT if self._cuts else _LARGEST,
            zmq.LINGER: 0,
            zmq.RCVTIMEO: _SLICE_MS,
            zmq.RECONNECT_IVL: 200 if self._has_keys else 10,  # with the wrong ones it goes on for ever
            zmq.RECONNECT_IVL_MAX: 200,
            zmq.HANDSHAKE_IVL: 3000,
            zmq.BACKLOG: _BACKLOG,  # so that a burst of strangers does not crowd out a friend, who would wait a second
        }
        options |= (
            {zmq.ROUTER_MANDATORY: 1} if self.binds else {zmq.IMMEDIATE: int(not (self._monitored and self._receives))}
        )
        if address.scheme == "tcp":
            options |= {zmq.IPV6: 1, **_HEARTBEATS}
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        if self.binds:
            if address.path:
                self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())  # whoever else connects is hung up on
            claim(address, lambda: self._bind(address), self._made)
            if address.scheme == "tcp":  # the port that was chosen; of 127.0.0.1 libzmq says [::ffff:127.0.0.1]
                port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
                self.address = address._replace(text=f"{address.text.rpartition(':')[0]}:{port}")
        else:
            if address.scheme != "inproc":
                self._handshakes = Handshakes(
                    self._context, self._socket, address, self._has_keys, is_shared=self._is_shared
                )
            try:
                self._socket.connect(address.text)
            except zmq.ZMQError as error:
                raise Refused(f"{address.text} cannot be connected to: {error.strerror}") from None

    def _bind(self, address: Address) -> None:
        _watch_forks()
        _binders.add(self)
        if address.scheme == "tcp":
            self._bind_to_port(address)
            return
        if not address.path:
            self._bind_to(address)
            return
        try:
            made = listener(address.path, _BACKLOG)
        except OSError as error:
            raise Refused(f"{address.text} cannot be bound: {error.strerror}") from None
        with made:
            self._socket.setsockopt(zmq.USE_FD, made.fileno())
            self._bind_to(address)
            self._listening = made.detach()  # it is libzmq's now

    def _bind_to_port(self, address: Address) -> None:
        told = f"inproc://listening-{next(_numbers)}"
        self._socket.monitor(told, zmq.EVENT_LISTENING)
        try:
            with closing(self._context.socket(zmq.PAIR)) as monitor:
                monitor.connect(told)
                self._bind_to(address)
                if monitor.poll(int(_LET_GO * 1000)):
                    self._listening = _EVENT.unpack(monitor.recv())[1]
        finally:
            self._socket.disable_monitor()

    def drop_listener(self) -> None:
        """In a forked child: close the copy of the socket that listens, which would keep the address from the next binder."""
        fd, self._listening = self._listening, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def _bind_to(self, address: Address) -> None:
        deadline = time.monotonic() + _LETTING_GO
        try:
            while True:
                try:
                    self._socket.bind(address.text)
                    return
                except zmq.ZMQError as error:
                    if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                        raise
                time.sleep(_LETTING_GO / 20)  # an end of this process that was just closed may still have it
        except zmq.ZMQError as error:
            if error.errno in (zmq.EADDRINUSE, errno.EACCES):
                raise Refused(f"{address.text} is in use: {error.strerror}; close its owner or use another") from None
            raise Refused(f"{address.text} cannot be bound: {error.strerror}") from None

    def send(self, peer: bytes, frames: Sequence[Any], connection: int = 0) -> None:
        """Send one message, which is copied.

        ZeroMQ could read large frames from the caller's memory. But then an exception of a signal's handler, or another
        thread's close, would leave it reading what the caller writes anew; and put would wait for a consumer that is stopped.

        Args:
            peer: its routing id.
            frames: bytes-like objects.
            connection: the number of a connector's connection that it is to go by.

        Raises:
            Unreachable: the peer is not connected, or by another connection. Nothing was sent.
        """
        self.lend(peer, frames, large=False, connection=connection)

    def lend(
        self,
        peer: bytes,
        frames: Sequence[Any],
        *,
        large: bool = True,
        mark: bool = False,
        connection: int | None = None,
    ) -> list[Any]:
        """Send one message, whose large frames ZeroMQ may read from the caller's memory for as long as it likes.

        Args:
            large: False: they are copied.
            mark: lend the last one, however small: with it ZeroMQ has let go of all that went before, to this peer.
            connection: as ``send``; None: any.

        Returns:
            A tracker for each that was lent: it is ``done`` when ZeroMQ has let go of it, whoever got it.

        Raises:
            Unreachable: the peer is not connected. Nothing was sent.
        """
        self._is_silent = False
        if not self.binds and not (self.is_connected() and connection in (None, self.connection)):
            raise Unreachable
        if self._cuts:
            frames = in_fragments(frames)
        send, last = self._socket.send, len(frames) - 1
        trackers = []
        try:
            if self.binds:
                send(peer, _MORE)
            for index, frame in enumerate(frames):
                flags = _MORE if index < last else _LAST
                if large and len(frame) >= BULK:
                    hold_reaper()
                    trackers.append(send(frame, flags, copy=False, track=True))
                elif mark and index == last:
                    trackers.append(send(_marked(bytes(frame)), flags, copy=False, track=True))
                else:
                    send(frame, flags)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise Unreachable from None
            raise
        except BaseException:  # a signal's handler raised
            self._abort()
            raise
        return trackers

    def send_small(self, peer: bytes, frame: bytes, connection: int | None = None) -> bool:
        """Send a message of one frame, which is copied.

        Nothing is sent, and True returned, to one over tcp that has not read what was sent to it so before.

        Args:
            peer: its routing id.
            frame: its bytes.
            connection: as ``lend``.

        Returns:
            Whether the peer is connected, by that connection. If not, nothing was sent.
        """
        self._is_silent = False
        if not self.binds and not (self.is_connected() and connection in (None, self.connection)):
            return False
        unread = self._unread.get(peer)
        if unread is not None and not unread.tracker.done:
            if unread.count >= _UNREAD:
                return True
            unread.count += 1
        marked = None
        if self._may_be_unread and (unread is None or unread.tracker.done):
            with suppress(RuntimeError):  # pyzmq's thread has ended with the program
                marked = _marked(frame)
        try:
            if self.binds:
                self._socket.send(peer, _MORE)
            if marked is None:
                self._socket.send(frame, _LAST)
            else:
                self._note_unread(peer, self._socket.send(marked, _LAST, copy=False, track=True))
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        except BaseException:  # a signal's handler raised
            self._abort()
            raise
        return True

    def _note_unread(self, peer: bytes, tracker: Any) -> None:
        if len(self._unread) >= _MOST_UNREAD:
            self._unread = {peer: unread for peer, unread in self._unread.items() if not unread.tracker.done}
        self._unread[peer] = _Unread(tracker)

    def _abort(self) -> None:
        """End a message that was cut off, somewhere, by an exception: its last frame is empty, as no payload frame is.

        Where nothing is open, it goes to nobody (ROUTER) or is a message of its own (DEALER): the receiver drops both.
        """
        with suppress(zmq.ZMQError):
            self._socket.send(b"", _LAST)

    def receive(self, timeout: float) -> tuple[bytes, list[Any]] | None:
        """The next message: who sent it, and its frames as buffers that are nobody else's. None if there is none in time.

        What had come by connections that were hung up on is dropped; None, too, where that is much.

        It is the next one again until ``received`` is called, so that an exception of a signal's handler does not lose it.
        One that hits inside pyzmq's own ``recv`` does: pyzmq looks for signals when it has the frame.

        Args:
            timeout: seconds, at most ``SLICE``.
        """
        self._is_silent = False
        if self._torn and not self._mend():
            return None
        frames = self._frames
        if not frames:
            if self._gate is not None:
                self._gate.attend(self._socket, timeout)
                timeout = 0
            try:
                if 0 < timeout < SLICE and not self._socket.poll(max(1, int(timeout * 1000))):
                    return None
                self._torn = True
                self._came = 0
                flags = _WAIT if timeout >= SLICE else _DO_NOT_WAIT
                if not self.binds:
                    self._receive_frame(flags)
                elif not self._receive_name(flags):
                    self._torn = False
                    return None
                while frames[-1].more and not self._surplus:
                    self._came += len(frames[-1])
                    self._surplus = len(frames) > _FRAMES + 2 * self._came // BULK
                    self._receive_frame(_DO_NOT_WAIT)  # libzmq has the whole message
            except zmq.Again:
                self._torn = False
                return None
            self._torn = False
            self._is_believed = not self._is_shared
        if self._surplus and not self._drop_surplus():
            return None
        if not self._is_believed and self._may_be_a_strangers():
            return None
        if not self._receives:
            self._heard = frames[-1]
        routing = frames[0] if self.binds else b""
        if routing in self._hung_up:  # and it had many frames
            self.received()
            return None
        if self.binds and len(routing) != _NAME:
            # It may be long, and costs with each message.
            self.surplus = "a connection that has chosen a name of its own"
            self.hang_up()
            return b"", [frames[-1].buffer]
        buffers = [frame.buffer for frame in frames[self.binds :]]
        return routing, joined(buffers) if self._cuts else buffers

    def hang_up(self) -> None:
        """Have nothing more come by the connection that a binder's message in hand came by.

        Whoever it is may connect anew. What had come by it before is dropped as it is read. The descriptor may be a younger
        connection's by now: then that is made anew, and over tcp nothing is lost by it.
        """
        self._hung_up[self._frames[0]] = None
        while len(self._hung_up) > _HUNG_UP:
            del self._hung_up[next(iter(self._hung_up))]
        with suppress(zmq.ZMQError):
            hang_up(self._frames[-1].get(zmq.SRCFD), self.address)

    def _may_be_a_strangers(self) -> bool:
        """Ask who listens where a message came from, by a connection that may be newer than the last look. Whether another
        user may: then nothing of it is believed. libzmq tells of a connection before anything comes by it."""
        before = self._handshakes.turned_away if self._handshakes is not None else 0
        self._hear_handshakes()
        self._is_believed = True
        if self._handshakes is None or self._handshakes.turned_away == before:
            return False
        self.received()
        return True

    def _mend(self) -> bool:
        """An exception hit while frames came. If one is missing, the rest of its message is nobody's: drop a part of it in
        each turn. Return whether that is done."""
        if len(self._frames) <= self.binds or self._frames[-1].more:
            if not self._drop_frames():
                return False
            self._frames, self._surplus = [], False
            self.torn_at = time.monotonic()
        self._torn = False
        return True

    def _drop_surplus(self) -> bool:
        """Let frames go that belong to no message. Whether all are."""
        if not self._drop_frames():
            return False
        self.surplus = f"a message of {self._came} bytes in over {len(self._frames) - 1} frames"
        self._surplus = False
        _give_back_memory()
        return True

    def _drop_frames(self) -> bool:
        """Drop what is left of a message: a few thousand frames in each turn, so that waits end in time. Whether it is done."""
        for _ in range(_SURPLUS_AT_ONCE):
            if not self._socket.getsockopt(zmq.RCVMORE):
                return True
            self._socket.recv(_LAST, copy=False)
        return False

    def _receive_name(self, flags: tuple[int]) -> bool:
        """Receive who sent the next message to a binder, and its first frame. Drop, as fast as can be, what comes before it of
        those who were hung up on. Return whether there is one, after no more of that than takes a millisecond."""
        frames, receive = self._frames, self._socket.recv
        for _ in range(_DROPPED_AT_ONCE):
            frames.extend(map(receive, flags))
            flags = _DO_NOT_WAIT
            self._receive_frame(flags)
            if frames[0] not in self._hung_up or frames[1].more:
                return True
            self.dropped += 1
            frames.clear()
            if self.dropped % _GIVE_BACK_AFTER == 0:
                _give_back_memory()
        return False

    def _receive_frame(self, flags: tuple[int]) -> None:
        """One step in C from libzmq to the list: an exception comes before it or after it."""
        self._frames.extend(map(self._socket.recv, flags, _NO_COPY))

    def received(self) -> None:
        """The message that ``receive`` returned has been dealt with."""
        self._frames, self.surplus = [], ""

    def prepare_for_bulk(self) -> None:
        """Have the connection that the last message came by set up for large frames, the other way."""
        if self.address.scheme != "inproc" and self._heard is not None and not self.address.is_remote:
            with suppress(zmq.ZMQError):  # ZeroMQ has noted none, of one that speaks an old version
                prepare_for_bulk(self._heard.get(zmq.SRCFD), self.address)

    def process_behind(self) -> int:
        """Return the process that the last message came from, to a binder over ipc; 0 where it is not known."""
        if self.binds and self.address.path and self._frames:
            with suppress(zmq.ZMQError):  # as above
                return process_behind(self._frames[-1].get(zmq.SRCFD), self.address)
        return 0

    def has_incoming(self) -> bool:
        """Whether ``receive`` would find something now."""
        if self._gate is not None:
            self._gate.answer()
        self._is_silent = not (self._frames or self._events() & _POLLIN)
        return not self._is_silent

    def is_connected(self, timeout: float = 0) -> bool:
        """Whether a connector has its binder on the line, within ``timeout`` seconds."""
        self._is_silent = False
        if self._monitored:
            if timeout > 0 and not self.connection and self._handshakes is not None:
                self._handshakes.monitor.poll(max(1, int(timeout * 1000)))
            self._hear_handshakes()
        else:
            if timeout > 0:
                self._socket.poll(max(1, int(timeout * 1000)), _POLLOUT)
            self._events()
        return self.connection > 0

    def _hear_handshakes(self) -> None:
        if self._surplus or self._torn:  # nothing is heard while a message is read half: read on
            self._drop_surplus() if self._surplus else self._mend()
        if self._handshakes is not None:
            self._handshakes.hear()
            self.connection = self._handshakes.connection

    def is_orphaned(self) -> bool:
        """Return whether a connector has a connection with a dead process: a child of that holds it open."""
        pid = self._handshakes.listener if self._handshakes is not None and self.connection else 0
        return pid > 0 and is_dead(pid)

    def connect_anew(self) -> None:
        """Hang up on what a connector has on the line, and try to get its binder."""
        if self._handshakes is not None:
            self._handshakes.connect_anew()
            self.connection = 0

    def trouble(self) -> str:
        """Why a connector does not get in; "" as long as nothing is known to be in the way."""
        return "" if self._handshakes is None else self._handshakes.trouble()

    def _events(self) -> int:
        """What can be done now. Looking silences ZeroMQ's descriptor: all that it may have told of is noted here."""
        events = int(self._socket.getsockopt(_EVENTS))
        if not self._monitored and not self.binds:
            if events & _POLLOUT:
                self.connection = self._connections
            elif self.connection or self._is_left:  # its binder has closed: over inproc libzmq connects once only
                self._connections += self.connection > 0
                self.connection = 0
                # All that it said is read first: libzmq mixes the next one's with it.
                self._is_left = bool(events & _POLLIN)
                if not self._is_left:
                    self._socket.connect(self.address.text)
        return events

    @property
    def is_watched(self) -> bool:
        """Whether anybody has asked for ``fileno``, so that it must be kept up to date."""
        return self._is_shown

    def watch(self, fd: int, *, edge: bool = False) -> None:
        """Have ``wait_any``, and ``fileno``, tell of another descriptor. Again: nothing.

        Args:
            edge: tell when something is added, not as long as there is something.
        """
        self._polling().watch(fd, edge)

    def unwatch(self, fd: int) -> None:
        """The end of that; before the descriptor is closed."""
        self._polling().unwatch(fd)

    def wait_any(self, timeout: float) -> list[int]:
        """Wait up to ``timeout`` seconds, at most a slice, until something comes. The descriptors, of whatever is watched.

        Of a message it tells only once ``has_incoming`` has said that there is none; a connector's binder is something, too.
        """
        poll_fd = self._poll_fd or self._polling()
        if self._gate is not None:
            self._gate.answer()
        found = poll_fd.wait(min(timeout, SLICE))
        if self._fd in found:
            self._is_silent = False
        if self._gate is not None and self._gate_fd in found:
            self._gate.answer()
        if any(fd in found for fd in self._handshake_fds):
            self.is_connected()  # which silences it
        return found

    def is_silent(self) -> bool:
        """Whether nothing has come, for ``wait_any``'s sake; without a look where that would have told."""
        return self._is_silent or not self.has_incoming()

    def _polling(self) -> PollFd:
        if self._poll_fd is None:
            self._fd = int(self._socket.getsockopt(zmq.FD))
            watched = [self._fd]
            if self._handshakes is not None:
                self._handshake_fds = [self._handshakes.fileno()]
                watched += self._handshake_fds
            if self._gate is not None:
                self._gate_fd = self._gate.fileno()
                watched.append(self._gate_fd)
            self._poll_fd = PollFd(watched)
        return self._poll_fd

    def fileno(self) -> int:
        """A descriptor that is readable whenever something has come since ``look``, and as long as ``show`` says so."""
        poll_fd = self._polling()
        if not self._is_shown and self._handshakes is not None and (alarm := self._handshakes.alarm()) >= 0:
            poll_fd.watch(alarm, False)
            self._handshake_fds.append(alarm)
        self._is_shown = True
        return poll_fd.fd

    def look(self) -> bool:
        """Whether ``receive`` would find something now. What has changed until now, ``fileno`` will not tell any more."""
        self._hear_handshakes()
        return self.has_incoming() or (self._gate is not None and self._gate.is_behind)

    def show(self, ready: bool) -> None:
        """Have ``fileno`` be readable, or only when something comes."""
        if self._poll_fd is not None:
            self._poll_fd.show(ready)

    def close(self, linger: float) -> None:
        """Close. What was sent goes on leaving for up to ``linger`` seconds. Again: what an exception left undone."""
        self._listening = -1  # first: its number may soon be another's
        with ExitStack() as steps:  # from the last to the first; each is done though an exception cuts another short
            steps.callback(release, self)
            steps.callback(self._close_sockets, linger)
            for made in self._made:
                steps.callback(unclaim, self.address.path, made)  # libzmq leaves the file
            if self.binds and self.address.scheme == "tcp" and self._socket is not None:
                steps.callback(self._give_port_back, linger)
            if self._poll_fd is not None:
                steps.callback(self._poll_fd.close)

    def _give_port_back(self, linger: float) -> None:
        """Wait until libzmq's thread has let go of the port: another program may bind it as soon as this end is closed.

        It hangs up with the port; what was sent goes on leaving.
        """
        if not has_descriptors():  # then libzmq's thread closes it a moment later
            return
        told = f"inproc://let-go-{next(_numbers)}"
        with suppress(zmq.ZMQError):
            self._socket.setsockopt(zmq.LINGER, int(linger * 1000))
            self._socket.monitor(told, zmq.EVENT_CLOSED)
            with closing(self._context.socket(zmq.PAIR)) as monitor:
                monitor.connect(told)
                self._socket.unbind(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
                monitor.poll(int(_LET_GO * 1000))
                self._socket.disable_monitor()

    def _close_sockets(self, linger: float) -> None:
        with ExitStack() as steps:
            if self._socket is not None:
                steps.callback(self._socket.close, linger=int(linger * 1000))
            if self._gate is not None:
                steps.callback(self._gate.close)
            if self._handshakes is not None:
                steps.callback(self._handshakes.close)


_binders: weakref.WeakSet[FrameSocket] = weakref.WeakSet()
_hooked: list[bool] = []


def _watch_forks() -> None:
    if not _hooked:
        _hooked.append(True)
        os.register_at_fork(after_in_child=_drop_listeners)


def _drop_listeners() -> None:
    for binder in list(_binders):
        binder.drop_listener()


def _marked(frame: bytes) -> zmq.Frame:
    """A small frame that is lent. What tracks it tells when ZeroMQ has let go of it, and of all before it."""
    hold_reaper()
    return zmq.Frame(frame, track=True, copy=False, copy_threshold=0)


class _Unread:
    """The messages that were sent to one peer, and may still be with ZeroMQ."""

    __slots__ = ("count", "tracker")

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker  # of the first of them
        self.count = 1


def _give_back_memory() -> None:
    """Have malloc give back what libzmq held many frames in, at 64 bytes each: it would keep it for more of them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's only
    if trim is not None:
        trim(0)


def library() -> tuple[str, str, bool]:
    """The versions of pyzmq and libzmq, and whether that has CURVE."""
    return zmq.__version__, zmq.zmq_version(), bool(zmq.has("curve"))
