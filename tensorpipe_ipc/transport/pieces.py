"""Pieces: with keys, a long frame goes as several, so that who has not shown a key yet can make a binder hold one piece only.

libzmq reads a frame to its end before it looks at what is in it, and so also one of somebody whom it does not know yet. How
long a frame may be it has one limit for, which is the same before and after. So that limit is a piece's::

    frame of n bytes    PIECE | PIECE | ... | the rest: fewer than PIECE bytes, perhaps none

A piece of exactly ``PIECE`` bytes is followed by the next one. Both ends do so, as either both have keys or they do not talk.
To join them costs a copy; to encrypt them costs several times as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["LARGEST_PIECE", "PIECE", "in_pieces", "joined"]

PIECE = 1 << 20  # bytes
LARGEST_PIECE = PIECE + 1024  # as it goes over the wire: CURVE adds 33 bytes


def in_pieces(frames: Iterable[Any]) -> list[Any]:
    """A message's frames, the long ones cut. Nothing is copied."""
    found: list[Any] = []
    for frame in frames:
        if len(frame) < PIECE:
            found.append(frame)
        else:
            view = memoryview(frame).cast("B")
            found += [view[start : start + PIECE] for start in range(0, len(view) + 1, PIECE)]
    return found


def joined(pieces: Sequence[memoryview]) -> list[memoryview]:
    """The frames again."""
    found: list[memoryview] = []
    run: list[memoryview] = []
    for piece in pieces:
        run.append(piece)
        if len(piece) != PIECE:
            found.append(_one(run))
            run = []
    if run:  # cut off by its sender
        found.append(_one(run))
    return found


def _one(run: list[memoryview]) -> memoryview:
    if len(run) == 1:
        return run[0]
    whole = bytearray(sum(map(len, run)))
    start = 0
    for piece in run:
        whole[start : start + len(piece)] = piece
        start += len(piece)
    return memoryview(whole)
