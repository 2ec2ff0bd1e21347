"""Notices: what every open end tells whoever looks for it: who is attached to it, how messages travel, and why so.

An end is a library without a thread: while its program computes, or is stopped, it answers nobody. So it writes down
beforehand what there is to tell, whenever that changes, in the file that it has open anyway (``presence``). Whoever may look
at the process's descriptors, which is its user, finds that under /proc, in whatever container and folder it is.

::

    u32 crc32 of the rest | u32 n | JSON (n bytes)
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec

from tensorpipe_ipc.endpoints.presence import SUFFIX, Presence
from tensorpipe_ipc.owned_fd import opened_file
from tensorpipe_ipc.process import Identity, open_files

__all__ = ["Attached", "PublishedStatus", "StatusPage", "framed", "published_statuses", "read_status"]

_HEAD = struct.Struct("<II")
_LONGEST = 1 << 23  # bytes: of 1,024 peers, each with all that it may say of itself, in JSON's escapes
_TRIES = 20  # of reading what is just being written anew
_LONG = 0.001  # seconds of work for the status of an end with some hundred peers
_RARELY = 20  # times as long nothing more is published then


class Attached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer of an end.

    Attributes:
        role: "producer" or "consumer".
        identity: its process.
        transport: how messages travel between the two, and why so.
        wanted: whether both ends want shared memory.
    """

    role: str
    identity: Identity
    transport: str
    wanted: bool


class PublishedStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One end.

    Attributes:
        endpoint: in full.
        role: "producer" or "consumer".
        binds: whether it has the address.
        identity: its process.
        peers: those who are attached.
        refusal: why the binder does not take it in; "" if it does.
    """

    endpoint: str
    role: str
    binds: bool
    identity: Identity
    peers: tuple[Attached, ...] = ()
    refusal: str = ""


_decode = msgspec.json.Decoder(PublishedStatus).decode


class StatusPage:
    """The place where one end publishes its status; with many peers rarely, as each message may change it."""

    def __init__(self, presence: Presence | None) -> None:
        """
        Args:
            presence: the end's; None: nobody is told.
        """
        self._presence = presence
        self._is_current = False
        self._next_at = 0.0

    def outdate(self) -> None:
        """Note that the status has changed."""
        self._is_current = False

    def refresh(self, status: Callable[[], PublishedStatus]) -> None:
        """Publish the status, if it has changed and it is time."""
        if self._presence is None or self._is_current or time.monotonic() < self._next_at:
            return
        began = time.thread_time()
        self._presence.publish(framed(status()))
        self._is_current = True
        took = time.thread_time() - began
        self._next_at = time.monotonic() + took * _RARELY if took > _LONG else 0.0


def published_statuses() -> Iterator[PublishedStatus]:
    """Return those of all processes that this one may look at."""
    # Each file once: who has it open may have it a thousand times.
    read = dict[tuple[int, int], PublishedStatus | None]()
    told = set[tuple[int, int]]()
    for pid, link, path in open_files():
        if path.removesuffix(" (deleted)").endswith(SUFFIX):
            with contextlib.suppress(OSError):
                status = os.stat(link)
                file = status.st_dev, status.st_ino
                if file not in read:
                    read[file] = _read(link)
                found = read[file]
                # Its peers have the file open, too, and perhaps others of the same process.
                if found is not None and file not in told and _is_of(pid, found.identity):
                    told.add(file)
                    yield found


def _read(path: str) -> PublishedStatus | None:
    before = None
    for _ in range(_TRIES):
        with opened_file(path) as file:
            data = os.pread(file.fileno(), _HEAD.size + _LONGEST, 0)
        found = read_status(io.BytesIO(data))
        if found is not None or data == before:  # it is not just being written, but nothing
            return found
        before = data
    return None


def framed(status: PublishedStatus) -> bytes:
    """Return the bytes of a published status."""
    text = msgspec.json.encode(status)
    return _HEAD.pack(zlib.crc32(text), len(text)) + text


def read_status(file: BinaryIO) -> PublishedStatus | None:
    """Return what was posted there; None if that is nothing, or just being written. Whoever wrote it may be anybody."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    crc, length = _HEAD.unpack(head)
    text = file.read(min(length, _LONGEST))
    if zlib.crc32(text) == crc:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            return _decode(text)
    return None


def _is_of(pid: int, identity: Identity) -> bool:
    """Return whether it is that process's own, and no copy that a fork inherited.

    In its own namespace the process has another number.
    """
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
        numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return bool(numbers) and int(numbers[-1]) == identity.pid
