"""Absence: say why nobody has come to an end, as far as this process knows. It has a list of its own open ends for that.

It serves sentences for people only, and changes nothing.
"""

from __future__ import annotations

import os
import sys
import time
from typing import NamedTuple

from tensorpipe_ipc.process import ProcessKey, process_key
from tensorpipe_ipc.zeromq.zmq_sockets import FrameSocket

__all__ = ["COMPLAINT", "Absence", "OwnEnd", "binder_here", "forget", "note"]

COMPLAINT = 5.0  # seconds
_LONELY = 0.2  # seconds that a connection may take
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class OwnEnd(NamedTuple):
    """An end of this process.

    Attributes:
        made_at: file and line of the program that made it.
    """

    address: str
    role: str
    binds: bool
    made_at: str
    process: ProcessKey


_open_here: dict[int, OwnEnd] = {}


def note(key: int, address: str, role: str, *, binds: bool) -> None:
    """Note an end that was just made."""
    _open_here[key] = OwnEnd(address, role, binds, _made_at(), process_key())


def forget(key: int) -> None:
    """Forget an end that is closed. Again: nothing."""
    _open_here.pop(key, None)


def binder_here(address: str) -> OwnEnd | None:
    """Return the end of this process that has an address."""
    return next((end for end in _at(address) if end.binds), None)


def _at(address: str) -> list[OwnEnd]:
    """Return those of this process, which may be a fork of the one that made them."""
    return [end for end in list(_open_here.values()) if end.address == address and end.process == process_key()]


def _made_at() -> str:
    """Return file and line of the innermost caller outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Absence:
    """The time that one end has waited, alone."""

    def __init__(self, role: str, socket: FrameSocket) -> None:
        """
        Args:
            role: of the end: "producer" or "consumer".
            socket: the end's.
        """
        self._role, self._socket = role, socket
        self._since = 0.0
        self._was_told = False

    def is_over(self) -> None:
        """Note that somebody is there."""
        self._since, self._was_told = 0.0, False

    def is_to_be_told(self) -> bool:
        """Return whether the end has waited for some seconds by now; once. To be called in each slice of its wait."""
        now = time.monotonic()
        self._since = self._since or now
        if self._was_told or now - self._since <= COMPLAINT:
            return False
        self._was_told = True
        return True

    def why(self) -> str:
        """Say that nobody has come, and what may be the reason."""
        other = "consumer" if self._role == "producer" else "producer"
        why = self._why_nobody(other)
        return f"no {other} has come to {self._socket.address.text} yet{why and f': {why}'}"

    def _why_nobody(self, other: str) -> str:
        socket = self._socket
        for end in _at(socket.address.text):
            if end.role == other and end.binds is not socket.binds:
                return f"the {other} of this very process, made at {end.made_at}, has to be in use meanwhile, in another thread"
        if socket.binds or socket.connect_error():
            return ""
        if socket.connection and socket.address.scheme != "inproc":
            return f"the {other} is there and has not answered: it computes, or is stopped"
        if not self._since or time.monotonic() - self._since <= _LONELY:
            return ""
        if socket.address.scheme == "inproc":
            return "no end of this process has bound it"
        unknown = ", or no host has that name" if socket.address.has_name else ""
        unknown += ", or its answer takes over 0.7 s" if socket.address.is_remote else ""
        return f"nobody listens there{unknown}; one of the two ends must be open with bind=True"
