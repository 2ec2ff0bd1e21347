"""Binder: the socket of the end that has the address. One ROUTER, and everybody who connects.

* A bind never takes over a live owner's ipc socket, which libzmq's own bind does without a word (``address_claim``).
* Each connection has a name that ROUTER makes. A connector that named itself would need ROUTER_HANDOVER, by which a new
  connection takes the name of an old one. That one goes on without a pipe; over tcp libzmq ends the process (!_io_error) if
  something comes by it, and it is reset: whoever reaches the port could do so. HELLO says who it is that comes again. One that
  chose a name nevertheless is hung up on.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Any

import zmq

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.forks import no_fork, watch
from tensorpipe_ipc.zeromq.address_claim import claim, unclaim
from tensorpipe_ipc.zeromq.addresses import Address
from tensorpipe_ipc.zeromq.curve import Gate, read_keys, use_keys
from tensorpipe_ipc.zeromq.frame_reader import NamedFrameReader
from tensorpipe_ipc.zeromq.kernel_sockets import connections_to, hang_up, listener, process_behind
from tensorpipe_ipc.zeromq.names import places
from tensorpipe_ipc.zeromq.zmq_contexts import (
    acquire,
    check_descriptors,
    forget_bound,
    note_bound,
    open_socket,
    repeated,
    router,
)
from tensorpipe_ipc.zeromq.zmq_sockets import FrameSocket

__all__ = ["Binder"]

_LETTING_GO = 0.1  # seconds: libzmq's threads let go of a name some time after close
_LET_GO = 1.0  # seconds that closing waits for a port, at most
_GLANCE = 0.0005  # seconds between two looks at it
_EVENT = struct.Struct("=HI")  # of a monitor: which, and a number that goes with it
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_BACKLOG = 1024  # so that a burst of strangers does not crowd out a friend, who would wait a second
# Seconds from the gate's answer until a connector, inside a call, has said HELLO. One whose knock was too old by then knocks
# again 0.2 s later.
_FIRST_WORD = 0.35
# Seconds after a refusal by which libzmq has let go of the handshake: one who stays has 3 s.
_LET_GO_OF = 4.0
_NAME = 5  # bytes of the name that a ROUTER makes for a connection
_numbers = itertools.count()


class Binder(FrameSocket):
    """See FrameSocket."""

    binds = True

    def __init__(self, address: Address, **options: Any) -> None:
        """See FrameSocket."""
        super().__init__(address, **options)
        self._socket: zmq.Socket[bytes] | Any = None
        self._reader: NamedFrameReader | Any = None
        self._fd = self._gate_fd = -1  # once they are watched
        self._gate: Gate | None = None
        self._places: list[str] = []  # what may be bound; the first that is this host's will be
        self._made: list[os.stat_result] = []  # the socket file
        self._listening = (-1, 0)  # the descriptor, of libzmq's, by which this end is connected to; and its inode
        # A descriptor that libzmq is given, and has from the moment on at which it is bound.
        self._handed: list[int] = []
        self._refused_at = self._give_back_at = 0.0  # the last refusal that was seen to; 0: nothing is to be given back

    def open(self, told: Callable[[Exception], None]) -> None:
        """See FrameSocket."""
        address = self.address
        try:
            self._places = [place.text for place in places(address)]  # before anything is held that others wait for
        except OSError as error:
            raise Refused(f"{address.text} cannot be bound: {error.strerror}") from None
        context = self._context = acquire(self, own=self._security is not None)
        self._socket = router(context)
        self._reader = NamedFrameReader(self._socket, self.tears)
        if self._security is not None:
            keys = read_keys(self._security, bind=True)
            use_keys(self._socket, keys, bind=True)
            self.key = keys[int(zmq.CURVE_PUBLICKEY)].decode()
            self._gate = Gate(context, self._security, told)
        self._set_up(self._socket, {zmq.ROUTER_MANDATORY: 1, zmq.BACKLOG: _BACKLOG})
        if address.path:
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())  # whoever else connects is hung up on
        claim(address, self._bind, self._made)
        if address.scheme == "tcp":  # the port that was chosen; of 127.0.0.1 libzmq says [::ffff:127.0.0.1]
            port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            self.address = address._replace(text=f"{address.text.rpartition(':')[0]}:{port}")

    def _bind(self) -> None:
        address = self.address
        watch(_drop_listeners)
        _binders.add(self)
        if address.scheme == "tcp":
            self._bind_to_port()
            return
        if not address.path:
            self._bind_to_address()
            note_bound(self, address.text)
            return
        try:
            made = listener(address.path, _BACKLOG)
        except OSError as error:
            raise Refused(f"{address.text} cannot be bound: {error.strerror}") from None
        # Nobody owns it from here on: two that close it would end the process, where one that closes it late costs nothing.
        self._handed.extend(map(socket.SocketType.detach, (made,)))
        self._listens_by(self._handed[0])
        self._socket.setsockopt(zmq.USE_FD, self._handed[0])
        self._bind_to_address()
        self._handed.clear()

    def _bind_to_port(self) -> None:
        told = f"inproc://tensorpipe_ipc.listening-{next(_numbers)}"
        repeated(self._socket.monitor, told, zmq.EVENT_LISTENING)
        try:
            with closing(open_socket(self._context, zmq.PAIR)) as monitor, no_fork():  # a child knows what it has of it
                monitor.connect(told)
                self._bind_to_address()
                if monitor.poll(int(_LET_GO * 1000)):
                    self._listens_by(_EVENT.unpack(monitor.recv())[1])
        finally:
            self._socket.disable_monitor()

    def _listens_by(self, fd: int) -> None:
        self._listening = fd, os.fstat(fd).st_ino

    def _bind_to_address(self) -> None:
        text, left = self.address.text, len(self._places)
        check_descriptors()  # strangers at another end's port may have taken them since the end began to open
        for place in self._places:
            left -= 1
            try:
                self._bind_once_free(place)
                return
            except zmq.ZMQError as error:
                if error.errno in (zmq.EADDRINUSE, errno.EACCES):
                    raise Refused(f"{text} is in use: {error.strerror}; close its owner or use another") from None
                if not left:
                    raise Refused(f"{text} cannot be bound: {error.strerror}") from None

    def _bind_once_free(self, place: str) -> None:
        deadline = time.monotonic() + _LETTING_GO
        while True:
            try:
                self._socket.bind(place)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise
            time.sleep(_LETTING_GO / 20)  # an end of this process that was just closed may still have it

    def drop_listener(self) -> None:
        """In a forked child: close the copy of the socket that listens, which would keep the address from the next binder."""
        fd, inode = self._listening
        with suppress(OSError):
            if os.fstat(fd).st_ino == inode:  # and not another's since libzmq closed it
                os.close(fd)

    def _socket_to(self, peer: bytes) -> zmq.Socket[bytes]:  # noqa: ARG002 - the ROUTER knows
        """See FrameSocket."""
        socket: zmq.Socket[bytes] = self._socket
        return socket

    def receive(self, timeout: float) -> tuple[bytes, list[Any]] | None:
        """See FrameSocket. What had come by connections that were hung up on is dropped."""
        self._is_silent = False
        reader = self._reader
        if self._gate is not None and not reader.frames:
            self._gate.attend(self._socket, timeout)
            self._look_for_refused(self._gate)
            timeout = 0
        frames = self._read(reader, self._socket, timeout)
        self.dropped = reader.dropped
        if frames is None:
            return None
        routing = frames[0]
        if reader.is_hung_up(routing):  # and it had many frames
            reader.dropped += 1
            reader.waste()
            self.received()
            return None
        if len(routing) != _NAME:
            # It may be long, and costs with each message.
            reader.surplus = "a connection that has chosen a name of its own"
            self.hang_up()
            return b"", [frames[-1].buffer]
        return routing, [frame.buffer for frame in frames[1:]]

    def _look_for_refused(self, gate: Gate) -> None:
        """Have memory given back that refused handshakes left, some time after each, however many follow."""
        if self._give_back_at and time.monotonic() >= self._give_back_at:
            self._give_back_at = 0.0
            self._reader.connections_ended()
        if not self._give_back_at and gate.refused_at > self._refused_at:
            self._refused_at, self._give_back_at = gate.refused_at, time.monotonic() + _LET_GO_OF

    def hang_up(self) -> None:
        """See FrameSocket.

        Whoever it is may connect anew. What had come by it before is dropped as it is read. The descriptor may be a younger
        connection's by now: then that is made anew, and over tcp nothing is lost by it.
        """
        frames = self._reader.frames
        with suppress(zmq.ZMQError):  # ZeroMQ has noted none, of one that was gone at once
            hang_up(frames[-1].get(zmq.SRCFD), self.address)
        self._reader.hang_up(frames[0])

    def process_behind(self) -> int:
        """See FrameSocket."""
        if self.address.path and self._reader.frames:
            with suppress(zmq.ZMQError):  # ZeroMQ has noted none, of one that was gone at once
                return (process_behind(self._reader.frames[-1].get(zmq.SRCFD), self.address) or (0, 0))[0]
        return 0

    def has_just_let_somebody_in(self) -> bool:
        """See FrameSocket."""
        return self._gate is not None and time.monotonic() - self._gate.let_in_at < _FIRST_WORD

    def is_behind(self) -> bool:
        """See FrameSocket."""
        if self._gate is None:
            return False
        self._gate.answer()
        return self._gate.is_behind

    def has_incoming(self) -> bool:
        """See FrameSocket. Beside a queue that always has messages nothing else finds that nothing more has come."""
        if self._gate is not None:
            self._gate.answer()
            self._look_for_refused(self._gate)
        self._is_silent = not (self._reader.frames or int(self._socket.getsockopt(_EVENTS)) & _POLLIN)
        if self._is_silent:
            self._reader.give_back_at_last()
        return not self._is_silent

    def is_connected(self, timeout: float = 0) -> bool:  # noqa: ARG002 - it waits for nobody
        """See FrameSocket."""
        return False

    def look(self) -> bool:
        """See FrameSocket."""
        return self.has_incoming() or (self._gate is not None and self._gate.is_behind)

    def wait_any(self, timeout: float) -> list[int]:
        """See FrameSocket."""
        if self._gate is not None:
            self._gate.answer()
        return super().wait_any(timeout)

    def _own_fds(self) -> list[int]:
        self._fd = int(self._socket.getsockopt(zmq.FD))
        if self._gate is None:
            return [self._fd]
        self._gate_fd = self._gate.fileno()
        return [self._fd, self._gate_fd]

    def _see_to(self, found: list[int]) -> None:
        if self._fd in found:
            self._is_silent = False
        if self._gate is not None and self._gate_fd in found:
            self._gate.answer()

    def _connection_fds(self) -> list[int]:
        return [] if self._listening[0] < 0 else connections_to(self.address)

    def _close_sockets(self, linger: float) -> None:
        with ExitStack() as steps:
            if self._socket is not None:
                if self.address.scheme == "tcp":
                    steps.callback(self._wait_for_port)
                steps.callback(self._socket.close, linger=int(linger * 1000))
                steps.callback(self._close_handed)
            if self._gate is not None:
                steps.callback(self._gate.close)

    def _close_handed(self) -> None:
        """Close a descriptor that libzmq was to have, where an exception has kept it from that."""
        if self._handed and not self._socket.closed:
            is_bound = bool(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
            fd = self._handed.pop()
            if not is_bound:
                os.close(fd)

    def _give_address_back(self) -> None:
        with ExitStack() as steps:
            for made in self._made:
                steps.callback(unclaim, self.address.path, made)  # libzmq leaves the file
            if self.address.scheme == "inproc":
                steps.callback(forget_bound, self, self.address.text)

    def _wait_for_port(self) -> None:
        """Wait until libzmq's thread has let go of the port: another program may bind it as soon as this end is closed.

        The ROUTER is not unbound first. Until it is closed, what comes by its connections, and a reset, could end the process
        as a linger does (``FrameSocket.close``).
        """
        (fd, inode), deadline = self._listening, time.monotonic() + _LET_GO
        with suppress(OSError):
            while os.fstat(fd).st_ino == inode and time.monotonic() < deadline:
                time.sleep(_GLANCE)


_binders: weakref.WeakSet[Binder] = weakref.WeakSet()


def _drop_listeners() -> None:
    for binder in list(_binders):
        binder.drop_listener()
