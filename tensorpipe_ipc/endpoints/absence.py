"""Absence: say why nobody has come to an end, as far as that can be found out.

It serves sentences for people only, and changes nothing.
"""

from __future__ import annotations

import time

from tensorpipe_ipc.endpoints import whereabouts
from tensorpipe_ipc.zeromq.zmq_sockets import FrameSocket

__all__ = ["COMPLAINT", "Absence"]

COMPLAINT = 5.0  # seconds
_LONELY = 0.2  # seconds until it is found out why nobody comes
_PROBE_AGAIN = 0.5  # seconds


class Absence:
    """The time that one end has waited for anybody at all."""

    def __init__(self, role: str, socket: FrameSocket) -> None:
        """
        Args:
            role: of the end: "producer" or "consumer".
            socket: the end's.
        """
        self._role, self._socket = role, socket
        self._since = 0.0
        self._was_told = False
        self._probed = (0.0, "")  # when it was last found out why nobody comes, and why

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
        here = whereabouts.others_here(socket.address.text, self._role, met_by_binder=socket.binds)
        if here is not None:
            return f"the {other} of this very process, made at {here.made_at}, has to be in use meanwhile, in another thread"
        if socket.binds or socket.connect_error():
            return ""
        if socket.connection and socket.address.scheme != "inproc":
            return f"the {other} is there and has not answered: it computes, or is stopped"
        now, (probed, why) = time.monotonic(), self._probed
        if self._since and now - self._since > _LONELY and (not why or now - probed > _PROBE_AGAIN):
            why = whereabouts.why_nobody(socket.address)
            self._probed = now, why
        return why
