"""CURVE's door: what keys ZeroMQ's sockets get, and the gate at which a binder lets in those that it knows.

libzmq asks a ZAP handler, a socket at inproc://zeromq.zap.01 of the same context, whether a client's key may come in; without
one, it lets in any key. The usual handler is a thread. Here it is ``Gate``, which answers inside the binder's own put, get
and flush, and whose descriptor is part of ``fileno``. As a context has one such address, a binder with keys has a context
of its own. Who knocks while the binder is busy elsewhere waits, for up to 3 s, and knocks again. The knock before stays, and
nobody tells that its connection has ended. So all are read, and the newest are answered first.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.security import Curve
from tensorpipe_ipc.zeromq.zmq_contexts import open_socket

__all__ = ["DOMAIN", "Gate", "check_available", "key_pair", "read_keys", "use_keys"]

DOMAIN = b"tensorpipe_ipc"
_HANDLER = "inproc://zeromq.zap.01"
_AT_ONCE = 0.01  # seconds of answering in one go: who waits for a message has a timeout to keep
_READING = 0.05  # seconds of reading knocks in one go, where a binder that computed for long finds thousands
# Knocks that are read and wait for an answer. Of more, the oldest are dropped: who still waits knocks again.
_KNOCKS = 4096
_REQUEST = 9  # frames: routing id, empty, version, request, domain, address, identity, mechanism, key
_POLLIN, _EVENTS, _DO_NOT_WAIT = int(zmq.POLLIN), int(zmq.EVENTS), int(zmq.NOBLOCK)
_YES, _NO = (b"200", b"OK", b"", b""), (b"400", b"not on the list", b"", b"")


def key_pair() -> tuple[bytes, bytes]:
    """Return a new public and secret key, in Z85.

    Raises:
        Refused: this libzmq has no CURVE.
    """
    check_available()
    return zmq.curve_keypair()


def check_available() -> None:
    """See that there is CURVE.

    Raises:
        Refused: this libzmq was built without it.
    """
    if not zmq.has("curve"):
        raise Refused(f"libzmq {zmq.zmq_version()} was built without CURVE (libsodium): install pyzmq's own wheel")


def read_keys(security: Curve, *, bind: bool) -> dict[int, bytes]:
    """Read the keys of an end, by libzmq's options.

    Raises:
        ValueError: the keys of the other side were not named.
        Refused: a key file that cannot be used, or no CURVE.
    """
    check_available()
    public, secret = security.own_keys()
    keys = {} if bind else {int(zmq.CURVE_SERVERKEY): security.server_key()}
    return keys | {int(zmq.CURVE_PUBLICKEY): public, int(zmq.CURVE_SECRETKEY): secret}


def use_keys(socket: zmq.Socket[bytes], keys: dict[int, bytes], *, bind: bool) -> None:
    """Have a socket that is not bound or connected yet use CURVE, and nothing else."""
    for option, key in keys.items():
        socket.setsockopt(option, key)
    if bind:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody comes in, and not anybody


class Gate:
    """A binder's ZAP handler: who is on the list may come in.

    Attributes:
        socket: where libzmq asks.
        is_behind: whether somebody knocked who was not answered yet, and whom no descriptor tells of.
        let_in_at: when somebody was last let in.
        refused_at: when somebody was last refused; 0: nobody was.
    """

    def __init__(self, context: zmq.Context[Any], security: Curve, told: Callable[[Exception], None]) -> None:
        """
        Args:
            context: the binder's own.
            security: who may come in.
            told: is called with a ``Refused`` for everybody who may not.
        """
        self._allowed = frozenset(map(z85.decode, security.client_keys()))
        self._told = told
        self.is_behind = False
        self.let_in_at, self.refused_at = -math.inf, 0.0
        self._knocks: deque[list[bytes]] = deque(maxlen=_KNOCKS)
        self._is_cut_off = False  # whether an exception left an answer begun, and not ended
        self.socket: zmq.Socket[bytes] = open_socket(context, zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_HANDLER)

    def fileno(self) -> int:
        """ZeroMQ's descriptor of it."""
        return int(self.socket.getsockopt(zmq.FD))

    def answer(self) -> None:
        """Answer those who knocked, the last first. Afterwards the descriptor tells of the next one."""
        if not self._knocks and not self._is_there():
            self.is_behind = False
            return
        deadline = time.monotonic() + _READING
        while self._is_there() and time.monotonic() < deadline:
            self._knocks.append(self._request())
        self.is_behind = self._is_there()
        if self.is_behind:  # those that were read are older, and have gone
            return
        deadline = time.monotonic() + _AT_ONCE
        while self._knocks and time.monotonic() < deadline:
            self._answer(self._knocks.pop())
        self.is_behind = bool(self._knocks)

    def _is_there(self) -> bool:
        return bool(int(self.socket.getsockopt(_EVENTS)) & _POLLIN)

    def attend(self, socket: zmq.Socket[bytes], timeout: float) -> None:
        """Wait up to ``timeout`` seconds until something comes to ``socket``, and answer meanwhile."""
        self.answer()
        deadline = time.monotonic() + timeout
        while True:
            left = 0 if self.is_behind else max(0.0, deadline - time.monotonic())
            ready = zmq.zmq_poll([(socket, _POLLIN), (self.socket, _POLLIN)], int(left * 1000))
            if self.is_behind or any(found is self.socket for found, _ in ready):
                self.answer()
            if any(found is socket for found, _ in ready) or time.monotonic() >= deadline:
                return

    def _request(self) -> list[bytes]:
        while self.socket.getsockopt(zmq.RCVMORE):  # an exception of a signal's handler hit inside the last one
            self.socket.recv(_DO_NOT_WAIT)
        if not self._is_there():  # that was all there was
            return []
        return self.socket.recv_multipart(_DO_NOT_WAIT)

    def _answer(self, request: list[bytes]) -> None:
        """One whom an exception keeps from getting an answer, or gets half of one, knocks again."""
        if len(request) != _REQUEST:
            return
        routing, _, version, number, domain, address, _, mechanism, key = request
        knows = mechanism == b"CURVE" and domain == DOMAIN and key in self._allowed
        with suppress(zmq.ZMQError):  # it is gone
            if self._is_cut_off:
                self.socket.send(b"", _DO_NOT_WAIT)
            self._is_cut_off = True
            self.socket.send_multipart([routing, b"", version, number, *(_YES if knows else _NO)], _DO_NOT_WAIT)
        self._is_cut_off = False
        if knows:
            self.let_in_at = time.monotonic()
        else:
            self.refused_at = time.monotonic()
            self._told(Refused(f"{address.decode(errors='replace')[:64]} came with a key that is not on the list"))

    def close(self) -> None:
        """Close it: nobody comes in any more."""
        self.socket.close(linger=0)
        self._told = _nobody


def _nobody(_: Exception) -> None:
    """Tell nobody: the end is closed."""
