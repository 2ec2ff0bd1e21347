"""Whereabouts: why nobody comes to an address, as far as it can be found out at once; and which ends this process has there.

It serves sentences for people only. Nothing here waits for longer than a moment, and no name is looked up.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from typing import NamedTuple

from tensorpipe_ipc.zeromq.addresses import Address

__all__ = ["End", "binder_here", "forget", "note", "others_here", "why_nobody"]

_MOMENT = 0.05  # seconds that a try to connect may take
_RESET = struct.pack("ii", 1, 0)
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class End(NamedTuple):
    """An end of this process.

    Attributes:
        made_at: file and line of the program that made it.
    """

    address: str
    role: str
    binds: bool
    made_at: str
    pid: int


_open_here: dict[int, End] = {}


def note(key: int, address: str, role: str, *, binds: bool) -> None:
    """Note an end that was just made."""
    _open_here[key] = End(address, role, binds, _made_at(), os.getpid())


def forget(key: int) -> None:
    """Forget an end that is closed. Again: nothing."""
    _open_here.pop(key, None)


def binder_here(address: str) -> End | None:
    """Return the end of this process that has an address."""
    return next((end for end in _at(address) if end.binds), None)


def others_here(address: str, role: str, *, met_by_binder: bool) -> End | None:
    """Return an end of this process that has another role at an address, and may be met: of the two, one binds."""
    return next((end for end in _at(address) if end.role != role and end.binds is not met_by_binder), None)


def _at(address: str) -> list[End]:
    """Return those of this process, which may be a fork of the one that made them."""
    return [end for end in list(_open_here.values()) if end.address == address and end.pid == os.getpid()]


def why_nobody(address: Address) -> str:
    """Say why a connector is not connected to an address: whether anybody listens there."""
    if address.scheme == "inproc":
        return "no end of this process has bound it"
    nobody = "nobody listens there; one of the two ends must be open with bind=True"
    host, _, port = address.text.partition("://")[2].rpartition(":")
    target = address.path or (host.strip("[]"), int(port or 0))
    if not address.path:
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return f"it is not connected; see whether the name {host} resolves, and whether an end there has bound the port"
    family = socket.AF_UNIX if address.path else socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.settimeout(_MOMENT)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # nothing of it stays at the port
            probe.connect(target)
            if not address.path and probe.getsockname() == probe.getpeername():  # the kernel gave it that very port
                return nobody
    except (ConnectionRefusedError, FileNotFoundError):
        return nobody
    except OSError as failed:
        return f"it cannot be reached: {failed.strerror or failed}"
    return "somebody listens there, and does not answer as an end of this package does: another program may have the address"


def _made_at() -> str:
    """Return file and line of the innermost caller outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
