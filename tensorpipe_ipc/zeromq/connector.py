"""Connector: the socket of the end that connects. A line for each connection, one after another.

A line that has ended is read out first, and then closed: what its binder said before it died, or closed, is not lost. Meanwhile
the next binder is tried, and may be there. Two binders never mix.

* A try that failed is made again after 10 ms, and ever later, up to 0.2 s; with keys after 0.2 s at once, as one with the
  wrong ones would go on for ever. So a binder that was started anew, with other keys or a longer list, is found. It is made
  inside put, get and flush, as no thread does it. Who waits on the descriptor alone is told when it is due, each second.
* A host's name is looked up beside that (``names``). Each try is by the next of its addresses, once one is known,
  and every second try is by that which last stood.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import zmq

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.zeromq.addresses import Address, check_chain, check_folder, check_socket_file, is_shared
from tensorpipe_ipc.zeromq.curve import read_keys, use_keys
from tensorpipe_ipc.zeromq.line import Line
from tensorpipe_ipc.zeromq.names import Host
from tensorpipe_ipc.zeromq.timer_fd import TimerFd
from tensorpipe_ipc.zeromq.zmq_contexts import acquire, has_descriptors, if_bound_here, is_bound_here, open_socket
from tensorpipe_ipc.zeromq.zmq_sockets import SLICE, FrameSocket, Unreachable

__all__ = ["Connector"]

_SHORTEST, _LONGEST = 0.01, 0.2  # seconds between two tries
_RARELY = 1.0  # seconds, at most, where each wakes somebody who waits on the descriptor alone
_AT_ONCE = 0.005  # seconds that a try is waited for, whatever the timeout: a binder on this host is there by then
_LAST_WORDS = 1.0  # seconds that what was said by a line that is hung up may take to leave


class Connector(FrameSocket):
    """See FrameSocket.

    Attributes:
        self_connections: how often it had itself on the line.
    """

    def __init__(self, address: Address, **options: Any) -> None:
        """See FrameSocket."""
        super().__init__(address, **options)
        self._context: zmq.Context[Any]
        self._keys: dict[int, bytes] = {}
        self._host = Host(address) if address.has_name else None
        self._line: Line | None = None  # that is tried, or by which is sent
        self._last: Line | None = None  # the one before it, which has ended and is not read out
        self._open: dict[Line, None] = {}  # both, and what an exception has kept from being one of them, or closed
        self._is_deferred = False  # whether ``_line`` waits for that
        self._connections = 0  # so far
        self._is_shared = False  # whether others may put a socket where this end looks for one
        self._pause = self._shortest = _SHORTEST if self._security is None else _LONGEST
        self._due = 0.0  # when the next try is
        self._timer: TimerFd | None = None  # for who waits on ``fileno``
        self._is_short = False  # whether there was no descriptor left for a try
        self._fds: list[int] = []  # of the lines, that are watched
        self._is_settled = False  # whether ``_settle`` is done since there are other lines
        self._failed: Line | None = None  # the last whose handshake failed
        self._failures = 0
        self._was_reached = False  # whether somebody listened there at the last try, and was no end, or stopped
        self._objection = ""  # to what is at the address, at the last look: nothing is sent there
        self.self_connections = 0

    def open(self, told: Callable[[Exception], None]) -> None:  # noqa: ARG002 - nobody comes to a connector
        """See FrameSocket."""
        if self._host is not None and self.address.text.endswith(":*"):  # as libzmq says of a number
            raise Refused(f"{self.address.text} cannot be connected to: {os.strerror(errno.EINVAL)}")
        if self.address.path:
            check_folder(self.address.path)  # the socket may come later: it must be nobody else who puts it there
            check_socket_file(self.address.path)
            self._is_shared = is_shared(os.path.dirname(self.address.path))
        self._context = acquire(self, own=False)
        if self._security is not None:
            self._keys = read_keys(self._security, bind=False)  # once: put is not to fail by a file that was moved
            self.key = self._keys[int(zmq.CURVE_SERVERKEY)].decode()
        if self._may_be_there():
            self._try()
        else:
            self._pace()

    def _may_be_there(self) -> bool:
        """Return whether a try can succeed, as far as that is known.

        Where others may put something, they may do so at any time, and also where a folder was removed: libzmq would follow
        their link, and wait where that leads.
        """
        if self.address.scheme == "inproc":
            return is_bound_here(self.address.text)
        if self._host is not None:
            return self._host.is_found()
        if not self.address.path:
            return True
        try:
            check_chain(os.path.dirname(self.address.path))
            is_there, self._objection = check_socket_file(self.address.path), ""
        except Refused as why:
            is_there, self._objection = False, str(why)
        except OSError:  # nobody of this user gets there
            is_there, self._objection = False, ""
        self._was_reached = self._was_reached and is_there
        return is_there

    def _try(self) -> None:
        """Try to get the binder."""
        if self.address.scheme != "inproc":
            self._connect()
        elif not if_bound_here(self.address.text, self._connect):
            self._pace()
            self._settle()

    def _connect(self) -> None:
        socket: zmq.Socket[bytes] = open_socket(self._context, zmq.DEALER)
        self._set_up(socket, {})
        if self._keys:
            use_keys(socket, self._keys, bind=False)
        address = self.address if self._host is None else self._host.next()
        line = Line(socket, address, self.tears, is_shared=self._is_shared)
        self._is_settled = False
        self._open[line] = None
        line.open(self._context)
        self._go_on(line, self._last)

    def _go_on(self, line: Line | None, last: Line | None) -> None:
        """Go on with other lines. They are exchanged in one step; what an exception then leaves to do ``_settle`` does."""
        self._is_settled = self._is_deferred = False
        has_ended = line is None and self._line is not None
        if self._last is not None and last is not self._last:
            self._last.reader.give_back_at_last()  # nobody looks there any more
        if line is not self._line:
            self.connection, self.routing = 0, b""
        self._line, self._last, self.reads_out = line, last, last.routing if last is not None else b""
        if has_ended:
            self._pace()
        self._settle()

    def _hear(self) -> None:
        """Take note of what has become of the lines, and try again where that is due."""
        if not self._is_settled:
            self._settle()
        if self._line is not None:
            self._hear_of(self._line)
        if self._last is not None and not self._last.has_unread():
            self._go_on(self._line, None)
        if self._line is None:
            self._try_if_due()

    def _hear_of(self, line: Line) -> None:
        line.hear()
        if line.is_up and not line.routing:
            self._is_settled = False
            self._connections += 1
            line.routing = self._connections.to_bytes(4, "little")
            self._pause, self._failed, self._failures = self._shortest, None, 0
            if self._host is not None:
                self._host.stood()
            self._settle()
        if line.is_up:
            self.connection, self.routing = self._connections, line.routing
        elif line.has_ended:
            self.connection, self.routing = 0, b""
            self._put_down(line)

    def _put_down(self, line: Line) -> None:
        """A line has ended. It is read out after the one before it."""
        if line.has_unread():
            if self._last is None:
                self._go_on(None, line)
            return
        if line.failure is not None:
            self._failures += 1
            if self._failed is None or line.was_answered:
                self._failed = line
        self._was_reached = line.is_reached and not line.routing and not line.is_to_itself
        if line.stranger is not None:
            self._objection = (
                f"{self.address.path} is a socket of uid {line.stranger}, not of uid {os.geteuid()}; use another path"
            )
        self.self_connections += line.is_to_itself
        self._go_on(None, self._last)

    def _pace(self) -> None:
        self._is_settled = False
        if self._host is not None and self._host.is_awaited:
            self._due = time.monotonic() + self._host.patience()
            return
        self._due = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST if self._timer is None else _RARELY)

    def _try_if_due(self) -> None:
        is_due = time.monotonic() >= self._due
        may_be_there = (is_due or self.address.scheme == "inproc") and self._may_be_there()
        if not (is_due or may_be_there):
            return
        self._is_short = may_be_there and not has_descriptors()  # where libzmq finds none, it ends the process
        if may_be_there and not self._is_short:
            try:
                self._try()
            except zmq.ZMQError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._is_short = True  # others took them meanwhile
        if self._is_short or not may_be_there:
            self._pace()
            self._settle()
            return
        deadline = time.monotonic() + _AT_ONCE
        while (line := self._line) is not None and not line.is_up and (left := deadline - time.monotonic()) > 0:
            line.wait(left)
            self._hear_of(line)

    def _settle(self) -> None:
        """Have what waits tell of the lines that there are now, and of the time for the next try. Close all others."""
        if self._poll_fd is not None:
            for fd in self._fds:
                self._poll_fd.unwatch(fd)
            self._fds = self._own_fds()
            for fd in self._fds:
                self._poll_fd.watch(fd, edge=False)
        if self._timer is not None:
            self._timer.set(max(_SHORTEST, self._due - time.monotonic()) if self._line is None else 0)
        for line in [each for each in self._open if each not in (self._line, self._last)]:
            line.close(_LAST_WORDS)
            del self._open[line]
        self._is_settled = True

    def _socket_to(self, peer: bytes) -> zmq.Socket[bytes]:
        """See FrameSocket."""
        if not self.reaches(peer):
            raise Unreachable
        assert self._line is not None
        return self._line.socket

    def receive(self, timeout: float) -> tuple[bytes, list[Any]] | None:
        """See FrameSocket."""
        self._is_silent = False
        line = self._line_to_read()
        if line is None:
            self.is_connected(timeout)
            return None
        frames = self._read(line.reader, line.socket, timeout)
        return None if frames is None else (line.routing, [frame.buffer for frame in frames])

    def _line_to_read(self) -> Line | None:
        """Return the line whose message is next: that of the one before this one, but for what this one begins with."""
        line = self._line if self._line is not None and self._line.routing else None
        if self._last is None or (line is not None and not self._is_deferred and line.has_unread()):
            return line
        if self._last.has_unread():
            return self._last
        self._go_on(self._line, None)
        return line

    def defer(self) -> None:
        """See FrameSocket."""
        self._is_deferred = True

    def has_incoming(self) -> bool:
        """See FrameSocket."""
        line = self._line_to_read()
        self._is_silent = line is None or not line.has_unread()
        if line is not None and self._is_silent:
            line.reader.give_back_at_last()
        return not self._is_silent

    def has_unread(self, routing: bytes) -> bool:
        """See FrameSocket."""
        return any(line.routing == routing and line.has_unread() for line in self._lines())

    def _lines(self) -> list[Line]:
        return [line for line in (self._last, self._line) if line is not None]

    def is_connected(self, timeout: float = 0) -> bool:
        """See FrameSocket."""
        self._is_silent = False
        self._hear()
        if self.connection or timeout <= 0:
            return self.connection > 0
        deadline = time.monotonic() + timeout
        while not self.connection and (left := deadline - time.monotonic()) > 0:
            if self._line is not None:
                self._line.wait(min(left, SLICE))
            else:
                time.sleep(max(0.0, min(left, self._due - time.monotonic())))
            self._hear()
        return self.connection > 0

    def try_now(self, timeout: float) -> bool:
        """See FrameSocket."""
        self._hear()
        if self._line is None:
            self._due = 0.0
            self._hear()
        deadline = time.monotonic() + timeout
        while self._host is not None and self._host.is_due_soon and (left := deadline - time.monotonic()) > 0:
            time.sleep(max(0.0, min(left, self._due - time.monotonic())))
            self._hear()
        line = self._line
        while (
            not self.connection
            and line is not None
            and line is self._line
            and (left := deadline - time.monotonic()) > 0
        ):
            line.wait(min(left, SLICE))
            self._hear()
        return self.connection > 0

    def drop(self, routing: bytes) -> None:
        """See FrameSocket."""
        if self._last is not None and self._last.routing == routing:
            self._go_on(self._line, None)
        line = self._line
        if line is not None and line.routing == routing:
            self._go_on(None, self._last)

    def is_orphaned(self, routing: bytes) -> bool:
        """See FrameSocket."""
        line = self._line
        return line is not None and line.routing == routing and line.is_orphaned()

    def is_replaced(self, routing: bytes) -> bool:
        """See FrameSocket."""
        line = self._line
        return line is not None and line.routing == routing and line.is_replaced()

    def connect_error(self) -> str:
        """See FrameSocket."""
        self._hear()
        if self._objection:
            return f"nothing was sent there: {self._objection}"
        if self._is_short:
            return "too few descriptors are left to connect with: close some, or raise the limit (ulimit -n)"
        if self._failed is None:
            line = self._line
            is_reached = self._was_reached if line is None else line.is_reached and not line.routing
            if not is_reached:
                return "" if self._host is None else self._host.trouble()
            if self._security is not None:  # an end lets somebody in only inside its calls
                return "somebody listens there, and has not answered yet: an end that is busy, or stopped, or another program"
            return "somebody listens there, and does not answer as an end does: another program, or stopped"
        times = f" ({self._failures} times)" if self._failures > 1 else ""
        why = self._failed.why_it_failed(has_keys=self._security is not None)
        return f"handshake with {self.address.text} failed{times}: {why}"

    def _own_fds(self) -> list[int]:
        return [fd for line in self._lines() for fd in line.filenos()]

    def _see_to(self, found: list[int]) -> None:
        if any(fd in found for fd in self._fds) or (self._timer is not None and self._timer.fd in found):
            self.is_connected()  # which silences it

    def _polling(self) -> Any:
        if self._poll_fd is None:
            self._is_settled = False
            super()._polling()
            self._settle()
        return self._poll_fd

    def fileno(self) -> int:
        """See FrameSocket."""
        if self._timer is None or self._timer.fd < 0:  # there may have been no descriptor for it, the last time
            self._is_settled, self._timer = False, TimerFd()
        if self._timer.fd >= 0:
            self.watch(self._timer.fd)
        if not self._is_settled:
            self._settle()
        fd = super().fileno()
        self._timer.check()
        return fd

    def look(self) -> bool:
        """See FrameSocket."""
        self._hear()
        return self.has_incoming()

    def _connection_fds(self) -> list[int]:
        return [] if self._line is None or not self._line.is_up else [self._line.fd]

    def _close_sockets(self, linger: float) -> None:
        with ExitStack() as steps:
            for line in self._open:
                steps.callback(line.close, linger)
            if self._timer is not None:
                steps.callback(self._timer.close)
