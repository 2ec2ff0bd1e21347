"""Line: one try of a connector to get its binder, and the one connection that comes of it.

Each has a DEALER of its own, which connects once. So what comes by a connection comes from one binder, and nothing that is
said to a binder ever reaches the next: libzmq, left to connect again by itself, would go on with the same socket.

When a connection stands, the two ends agree on a mechanism and, with keys, prove that they have them. How that ends libzmq
tells a monitor. Over inproc there is none: there a line is up from the start, as none is tried before its binder is there,
and has ended when nothing can be sent any more.

Over ipc, whoever may write to the folder may have put a socket there. So the kernel is asked who listens before a line counts
as up; until then nothing is sent by it, and nothing read. One of another user's has ended at once. So has one that is gone
before the kernel was asked, where others may write to the folder. There, too, has one whose socket has another name, unless the
file at the address is this user's socket, and was so before the line was tried: else a link of another user's may have led
it to this user's other socket. And so has one to itself (``kernel_sockets.is_to_itself``), which would keep the address from
its binder.

The monitor has no high-water mark: libzmq's thread would stand still as soon as nobody reads it. So it would where the monitor
is closed and the DEALER still tells: a line has to be closed, and not just dropped.
"""

from __future__ import annotations

import itertools
import os
import stat
import struct
from typing import Any

import zmq

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.process import is_dead
from tensorpipe_ipc.zeromq.addresses import Address
from tensorpipe_ipc.zeromq.frame_reader import FrameReader, Tears
from tensorpipe_ipc.zeromq.kernel_sockets import is_to_itself, process_behind
from tensorpipe_ipc.zeromq.zmq_contexts import open_socket, repeated

__all__ = ["Line"]

_EVENT = struct.Struct("=HI")  # which, and a number that goes with it
_CONNECTED, _UP = int(zmq.EVENT_CONNECTED), int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_PROTOCOL, _BROKEN_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_TOLD = _CONNECTED | _UP | _AUTH | _PROTOCOL | _BROKEN_OFF | int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_numbers = itertools.count()
_POLLIN, _POLLOUT, _EVENTS = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.EVENTS)
_DO_NOT_WAIT = int(zmq.NOBLOCK)
_NEVER = 1 << 30  # milliseconds
_NO_FILE = (0, 0, 0)


class Line:
    """A connector's.

    Attributes:
        routing: what its connection is called by; b"" before it was up.
        is_up: whether the connection stands, as far as was heard.
        has_ended: whether it, or the try, is over. What came by it can be read still, if it was ever up.
        socket: the DEALER.
        reader: of what came.
        failure: how the handshake failed: what libzmq told, and the number that went with it; None: it did not.
        stranger: the other user whose socket is at the address; None: none.
        is_to_itself: whether it got the connector itself on the line.
        is_reached: whether somebody listens there. If it is not up, that may be another program.
        fd: the descriptor of its connection, which is libzmq's; -1 before there was one.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: Address, tears: Tears, *, is_shared: bool = False) -> None:
        """
        Args:
            socket: a DEALER, set up but not connected yet.
            address: what to connect to.
            tears: counts what exceptions take out of its reader.
            is_shared: whether other users may put a socket there.
        """
        self.socket = socket
        self.reader = FrameReader(socket, tears)
        self.routing = b""
        self.is_up = self.has_ended = False
        self.failure: tuple[int, int] | None = None
        self.stranger: int | None = None
        self.is_to_itself = self.is_reached = False
        self.fd = -1
        self._address, self._is_shared = address, is_shared
        self._listener = 0  # the process that listens at the other end, over ipc, as far as it is seen from here
        self._file = _NO_FILE  # the socket file that led there
        self._is_torn = False  # an exception of a signal's handler may have taken word of the connection with it
        self._monitor: zmq.Socket[bytes] | None = None
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER)  # not 0: that takes away what came and is not read yet

    def open(self, context: zmq.Context[Any]) -> None:
        """Begin to connect.

        Raises:
            Refused: libzmq cannot connect to such an address.
        """
        if self._address.scheme != "inproc":
            # A number that no other has had: libzmq may not have let go yet of that of one that is gone.
            told = f"inproc://tensorpipe_ipc.line-{next(_numbers)}"
            repeated(self.socket.monitor, told, _TOLD)
            self._monitor = open_socket(context, zmq.PAIR)
            self._monitor.setsockopt(zmq.LINGER, 0)
            self._monitor.setsockopt(zmq.RCVHWM, 0)
            self._monitor.connect(told)
        self._file = _socket_file(self._address)  # first: of one that comes in between this line is hung up
        try:
            self.socket.connect(self._address.text)
        except zmq.ZMQError as error:
            raise Refused(f"{self._address.text} cannot be connected to: {error.strerror}") from None

    def filenos(self) -> list[int]:
        """Return the descriptors that tell of something to hear, and to read. Before it is up, nobody asks for the latter."""
        tells = [] if self._monitor is None else [self._monitor]
        if self.routing or not tells:
            tells.append(self.socket)
        return [int(each.getsockopt(zmq.FD)) for each in tells]

    def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until there is something to hear."""
        milliseconds = max(1, int(timeout * 1000))
        if self._monitor is not None:
            self._monitor.poll(milliseconds)
        else:
            self.socket.poll(milliseconds, _POLLOUT)

    def hear(self) -> None:
        """Take note of what has happened."""
        monitor = self._monitor
        if monitor is None:
            if int(self.socket.getsockopt(_EVENTS)) & _POLLOUT:
                self.is_up = not self.has_ended
            else:
                self._end()
            return
        if self._is_torn:  # it is not known whether there is a connection
            self._end()
        while int(monitor.getsockopt(_EVENTS)) & _POLLIN:
            self._is_torn = True
            event = monitor.recv(_DO_NOT_WAIT)
            if len(event) == _EVENT.size and not self.has_ended:  # the other frames are addresses
                self._note(*_EVENT.unpack(event))
            self._is_torn = False

    def _note(self, event: int, number: int) -> None:
        if event == _CONNECTED:
            self.is_reached, self.fd = True, number
            if self._address.path:
                self._see_who_listens(number)
            elif is_to_itself(number):
                self.is_to_itself = True
                self._end()
        elif event == _UP:
            self.is_up = True
        else:
            if event in (_AUTH, _PROTOCOL, _BROKEN_OFF):
                self.failure = event, number
            self._end()

    def _see_who_listens(self, fd: int) -> None:
        self._listener, uid = process_behind(fd, self._address) or (0, None)
        self.stranger = None if uid == os.geteuid() else uid
        is_believed = self._listener > 0 or not self._is_shared or (uid is not None and self._stood_there())
        if self.stranger is not None or not is_believed:
            self._end()

    def _stood_there(self) -> bool:
        """Return whether the file at the address was the same one all the time: no link of another user's has led elsewhere."""
        return self._file != _NO_FILE and _socket_file(self._address) == self._file

    def _end(self) -> None:
        self.is_up, self.has_ended = False, True

    def is_orphaned(self) -> bool:
        """Return whether the connection is with a dead process: a child of that holds it open."""
        return self.is_up and self._listener > 0 and is_dead(self._listener)

    def is_replaced(self) -> bool:
        """Return whether another has taken the place of who is on the line: its socket file is at the address.

        A child of the process that closed that end holds the connection open.
        """
        if not self.is_up or self._file == _NO_FILE:
            return False
        return _socket_file(self._address) not in (_NO_FILE, self._file)

    def has_unread(self) -> bool:
        """Return whether something has come that was not dealt with yet."""
        return bool(self.routing) and bool(self.reader.frames or int(self.socket.getsockopt(_EVENTS)) & _POLLIN)

    def why_it_failed(self, *, has_keys: bool) -> str:
        """Say why the handshake failed.

        Args:
            has_keys: whether this end uses CURVE.
        """
        assert self.failure is not None
        event, number = self.failure
        if event == _AUTH:
            return "the binder's clients= do not list this end's public key"
        if event == _PROTOCOL and number == _MISMATCH:
            if has_keys:
                return "the binder has no keys: give it security=Curve(...), or leave security out here"
            return "the binder wants keys: give security=Curve(...)"
        if event == _PROTOCOL:
            return f"what the binder said makes no sense (libzmq's {number:#x})"
        if has_keys:
            return "the binder broke it off: server= may not be its public key; or it is busy, and lets in nobody yet"
        return "the binder broke it off: it may be stopped, want keys, or be no end of ours"

    @property
    def was_answered(self) -> bool:
        """Return whether the handshake failed by an answer, which says more than none."""
        return self.failure is not None and self.failure[0] != _BROKEN_OFF

    def close(self, linger: float) -> None:
        """Close. What was sent by a connection that stands goes on leaving for up to ``linger`` seconds; not over tcp.

        Again: what an exception left undone, or nothing.
        """
        if not self.socket.closed:
            if not self.has_ended:
                self.hear()
            self.socket.disable_monitor()
            lingers = self.is_up and self._address.scheme != "tcp"  # see FrameSocket.close
            self.socket.close(linger=int(linger * 1000) if lingers else 0)
        if self._monitor is not None:
            self._monitor.close(linger=0)


def _socket_file(address: Address) -> tuple[int, int, int]:
    """Return what tells this user's socket at an ipc address from all before and after: a number alone may be used again."""
    try:
        found = os.lstat(address.path) if address.path else None
    except OSError:
        found = None
    if found is None or not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        return _NO_FILE
    return found.st_dev, found.st_ino, found.st_mtime_ns
