"""Fragments: over tcp, and with keys, a long frame goes as several, for two reasons.

libzmq reads a frame to its end before it looks at what is in it, and so also one of somebody whom it does not know yet. How
long a frame may be it has one limit for, which is the same before and after. So that limit is a fragment's: before it has
shown a key, an end can make a binder hold one of them only.

Heartbeats pass between frames, and not within one: whoever needs longer for one than a silence may last is taken for dead,
again and again. So fragments are shorter until a line was found to be quick, and 0.5 Mbit/s are enough::

    frame of n bytes    size | size | ... | the rest: fewer bytes, perhaps none      size: FRAGMENT, or SHORT_FRAGMENT

One of exactly either size is followed by the next one. Both ends do so: either both have keys or they do not talk.
Over tcp large payloads come in pieces of 1 MiB (``resend_buffer``), which are cut on such a line only. To join costs a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.libc import count_frames
from tensorpipe_ipc.wire.room import lacks_room

__all__ = ["FRAGMENT", "LARGEST_FRAGMENT", "SHORT_FRAGMENT", "in_fragments", "joined"]

FRAGMENT, SHORT_FRAGMENT = (1 << 20) + 64, (1 << 16) + 64  # bytes
LARGEST_FRAGMENT = FRAGMENT + 1024  # as it goes over the wire: CURVE adds 33 bytes
_FOLLOWED = (FRAGMENT, SHORT_FRAGMENT)


def in_fragments(frames: Iterable[Any], size: int) -> list[Any]:
    """Return a message's frames, the long ones cut. Nothing is copied.

    Args:
        size: ``FRAGMENT`` or ``SHORT_FRAGMENT``.
    """
    found: list[Any] = []
    for frame in frames:
        if len(frame) < SHORT_FRAGMENT:
            found.append(frame)
            continue
        view = memoryview(frame).cast("B")
        found += [view[start : start + size] for start in range(0, len(view), size)]
        if len(found[-1]) in _FOLLOWED:
            found.append(b"")
    return found


def joined(fragments: Sequence[memoryview]) -> tuple[list[memoryview], str]:
    """Return the frames again, and ""; or what is there of the first, and why there is no memory for all of them."""
    found: list[memoryview] = []
    try:
        for frame in _frames(fragments):
            found.append(frame)
    except MemoryError as error:
        reraise_from_handler(error)
        return found[:1] or [*fragments[:1]], str(error) or "there is no memory to put its fragments together"
    return found, ""


def _frames(fragments: Sequence[memoryview]) -> Iterator[memoryview]:
    run: list[memoryview] = []
    for fragment in fragments:
        run.append(fragment)
        if len(fragment) not in _FOLLOWED:
            yield _one(run)
            run = []
    if run:  # cut off by its sender
        yield _one(run)


def _one(run: list[memoryview]) -> memoryview:
    if len(run) == 1:
        return run[0]
    nbytes = sum(map(len, run))
    left = lacks_room(nbytes, of_addresses=True)
    if left is not None:
        raise MemoryError(
            f"its frame of {nbytes:,} bytes came in parts, and {left:,} bytes of memory are left to join them"
        )
    count_frames(nbytes)
    whole = bytearray(nbytes)
    start = 0
    for fragment in run:
        whole[start : start + len(fragment)] = fragment
        start += len(fragment)
    return memoryview(whole)
