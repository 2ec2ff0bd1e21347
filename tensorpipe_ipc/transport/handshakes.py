"""Handshakes: whether a connector is on the line, why it does not get in, and its next try.

When a connection stands, the two ends agree on a mechanism and, with keys, prove that they have them. How that ends libzmq
tells a monitor. Where the connection just ended it tries again by itself; once it got an answer that is a no, it never does.
So that a binder which was started anew, with other keys or a longer list, is found, the connector connects anew then. So it
does where it got on the line with itself (``kernel_sockets.is_to_itself``), which would keep the address from its binder.

Over ipc, whoever may write to the folder may have put a socket there. So the kernel is asked who listens, of each connection,
before anything is sent by it, and before anything is believed that came; one of another user's is hung up, and what came unread
is dropped. So is one that is gone before the kernel was asked, where others may write to the folder.

The monitor has no high-water mark: libzmq's thread would stand still as soon as nobody reads it.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
from contextlib import suppress
from typing import Any

import zmq

from tensorpipe_ipc.transport.addresses import Address
from tensorpipe_ipc.transport.alarm import Alarm
from tensorpipe_ipc.transport.kernel_sockets import is_to_itself, listener_behind

__all__ = ["Handshakes"]

_EVENT = struct.Struct("=HI")  # which, and a number that goes with it
_AGAIN = 0.25  # seconds between two tries
_CONNECTED, _UP = int(zmq.EVENT_CONNECTED), int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_PROTOCOL, _BROKEN_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_TOLD = _CONNECTED | _UP | int(zmq.EVENT_DISCONNECTED) | _AUTH | _PROTOCOL | _BROKEN_OFF
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_numbers = itertools.count()
_POLLIN, _EVENTS, _DO_NOT_WAIT = int(zmq.POLLIN), int(zmq.EVENTS), int(zmq.NOBLOCK)
_RCVMORE = int(zmq.RCVMORE)


class Handshakes:
    """A connector's, with its binder.

    Attributes:
        connection: the number of the connection as it was last heard of; 0 while there is none.
        monitor: what libzmq tells of them by.
        with_itself: how often it had itself on the line.
        stranger: the other user whose socket is at the address, at the last look; None: none.
        listener: the process that listens at the other end, over ipc, as far as it is seen from here; else 0.
        turned_away: how often it hung up on what was, or may have been, another user's socket.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        socket: zmq.Socket[bytes],
        address: Address,
        has_keys: bool,
        *,
        is_shared: bool = False,
    ) -> None:
        """
        Args:
            context: the socket's.
            socket: the connector's, not connected yet.
            address: what it will connect to.
            has_keys: whether it uses CURVE.
            is_shared: whether other users may put a socket where it connects to.
        """
        self.connection = self._connections = 0
        self._socket, self._address, self._has_keys = socket, address.text, has_keys
        self._path = address.path
        self.stranger: int | None = None
        self.turned_away = 0
        self.listener = 0
        self._is_shared = is_shared
        self._failure: tuple[int, int] | None = None
        self._failures = 0
        self._is_over = False  # libzmq will not try again
        self._is_torn = False  # an exception of a signal's handler may have taken word of a connection with it
        self.with_itself = 0
        self._alarm: Alarm | None = None
        self._tried = time.monotonic()
        told = f"inproc://handshakes-{next(_numbers)}"  # libzmq may not have let go yet of that of one that is gone
        socket.monitor(told, _TOLD)
        self.monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.connect(told)

    def hear(self) -> None:
        """Take note of what has happened, and try again where that is due. Not while a message is read half: hanging up takes
        the rest away, and libzmq ends the process then."""
        if self._socket.getsockopt(_RCVMORE):
            return
        monitor = self.monitor
        if self._is_torn:  # it is not known whether there is one
            self.connect_anew()
        while int(monitor.getsockopt(_EVENTS)) & _POLLIN:
            self._is_torn = True
            event = monitor.recv(_DO_NOT_WAIT)
            if len(event) == _EVENT.size:  # the other frames are addresses
                self._note(*_EVENT.unpack(event))
            self._is_torn = False
        if self._is_over:
            if time.monotonic() - self._tried >= _AGAIN:
                self.connect_anew()
            elif self._alarm is not None:
                self._alarm.set(_AGAIN)

    def fileno(self) -> int:
        """A descriptor that tells of something to hear."""
        return int(self.monitor.getsockopt(zmq.FD))

    def alarm(self) -> int:
        """A descriptor that tells that the next try is due, for who waits on descriptors alone; -1 where there is none."""
        if self._alarm is None:
            self._alarm = Alarm()
            self.hear()
        return self._alarm.fd

    def _note(self, event: int, number: int) -> None:
        if event == _CONNECTED:
            if self._path:
                self._see_who_listens(number)
            elif is_to_itself(number):
                self.with_itself += 1
                self._hang_up()
            return
        if self._is_over and event == _UP:  # of the connection that was hung up
            return
        self._connections += 1
        self.connection = self._connections if event == _UP else 0
        if event == _UP:
            self._failure, self._failures = None, 0
        elif event in (_AUTH, _PROTOCOL, _BROKEN_OFF):
            if event != _BROKEN_OFF or self._failure is None:  # an answer says more than none
                self._failure = event, number
            self._failures += 1
            self._is_over = self._is_over or event != _BROKEN_OFF

    def _see_who_listens(self, fd: int) -> None:
        self.listener, uid = listener_behind(fd, self._path) or (0, None)
        self.stranger = None if uid == os.geteuid() else uid
        if self.stranger is not None or (uid is None and self._is_shared):
            self.turned_away += 1
            self._hang_up()

    def _hang_up(self) -> None:
        self._tried, self._is_over = time.monotonic(), True
        with suppress(zmq.ZMQError):  # it has let go of it by itself
            self._socket.disconnect(self._address)

    def connect_anew(self) -> None:
        """Hang up, and try again. What was to be sent by the connection is dropped."""
        self._hang_up()
        self._socket.connect(self._address)
        self.connection = 0
        self._is_over = self._is_torn = False
        if self._alarm is not None:
            self._alarm.set(0)

    def trouble(self) -> str:
        """Why it does not get in; "" as long as nothing is known to be in the way."""
        self.hear()
        if self.stranger is not None:
            return (
                f"{self._path} is a socket of uid {self.stranger}, not of uid {os.geteuid()}: nothing was sent to it; "
                "remove it, or use a path in a folder of your own"
            )
        if self._failure is None:
            return ""
        times = f" ({self._failures} times)" if self._failures > 1 else ""
        return f"handshake with {self._address} failed{times}: {self._reason(*self._failure)}"

    def _reason(self, event: int, number: int) -> str:
        if event == _AUTH:
            return "the binder's clients= do not list this end's public key"
        if event == _PROTOCOL and number == _MISMATCH:
            if self._has_keys:
                return "the binder has no keys: give it security=Curve(...), or leave security out here"
            return "the binder wants keys: give security=Curve(...)"
        if event == _PROTOCOL:
            return f"what the binder said makes no sense (libzmq's {number:#x})"
        if self._has_keys:
            return "the binder broke it off: server= may not be its public key; or it is busy, and lets in nobody yet"
        return "the binder broke it off: it may want keys, or be no end of ours"

    def close(self) -> None:
        """Close the monitor; before the socket, and after what waits for its descriptors."""
        if self._alarm is not None:
            self._alarm.close()
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(linger=0)
