"""Fragments: over tcp, and with keys, a long frame goes as several. Before it has shown a key, an end can make a binder hold
one of them only.

libzmq reads a frame to its end before it looks at what is in it, and so also one of somebody whom it does not know yet. How
long a frame may be it has one limit for, which is the same before and after. So that limit is a fragment's::

    frame of n bytes    FRAGMENT | FRAGMENT | ... | the rest: fewer than FRAGMENT bytes, perhaps none

One of exactly ``FRAGMENT`` bytes is followed by the next one. Both ends do so: either both have keys or they do not talk.
Over tcp large payloads come in pieces that are shorter anyway (``resend_buffer``). To join the rest costs a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.wire.room import lacks_room

__all__ = ["LARGEST_FRAGMENT", "FRAGMENT", "in_fragments", "joined"]

FRAGMENT = (1 << 20) + 64  # bytes; what goes over tcp in pieces of 1 MiB (``resend_buffer``) is not cut again
LARGEST_FRAGMENT = FRAGMENT + 1024  # as it goes over the wire: CURVE adds 33 bytes


def in_fragments(frames: Iterable[Any]) -> list[Any]:
    """Return a message's frames, the long ones cut. Nothing is copied."""
    found: list[Any] = []
    for frame in frames:
        if len(frame) < FRAGMENT:
            found.append(frame)
        else:
            view = memoryview(frame).cast("B")
            found += [view[start : start + FRAGMENT] for start in range(0, len(view) + 1, FRAGMENT)]
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
        if len(fragment) != FRAGMENT:
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
    whole = bytearray(nbytes)
    start = 0
    for fragment in run:
        whole[start : start + len(fragment)] = fragment
        start += len(fragment)
    return memoryview(whole)
