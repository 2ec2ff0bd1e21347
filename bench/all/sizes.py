"""One way by size, and streams by size: all peers, with ours and the floors in every round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from bench.all.field import Field, rows_of
from bench.all.links import Shape
from bench.all.peers import FLOORS, OURS, PIPE
from bench.all.programs import ONE_WAY, STREAM, Message
from bench.all.tree import Tree
from bench.queue.programs import warm

__all__ = ["SIZES", "measure"]

SIZES = (400, 4_000, 40_000, 400_000, 4_000_000, 40_000_000)
HUGE, LONG = 100_000_000, 360  # bytes that only such a share of the budget, in seconds, has time for
LARGE = 1_000_000
HELD = 6  # messages that a peer may hold at once, counted generously
MOST = 200  # messages of a turn, one way
STREAM_MOST, STREAM_BYTES = 4096, 400_000_000  # of a turn, as a stream


def measure(field: Field, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows of both, size by size."""
    field.begin("sizes")
    sizes = (*SIZES, HUGE) if seconds >= LONG else SIZES
    for nbytes in sizes:
        groups = _groups(field, nbytes)
        for names in groups:
            yield from _at(field, names, nbytes, seconds / len(sizes) / len(groups))


def _at(field: Field, names: Sequence[str], nbytes: int, seconds: float) -> Iterator[dict[str, Any]]:
    field.tell(f"{nbytes:,} bytes: starting {len(names)} peers")
    shape = Shape(bound=64 if nbytes < LARGE else 4, nbytes=nbytes)
    group = {id(field.peers[name]) for name in names}
    standing = field.stand(shape, lambda peer: id(peer) in group)
    field.tell(f"{nbytes:,} bytes, one way")
    large = nbytes >= 10 * LARGE
    least = 2 if large else 3
    found = field.rounds(
        standing,
        lambda tree, count: one_way(tree, Message(nbytes), count),
        seconds / 2,
        0.06,
        MOST,
        "one way",
        least,
        large,
    )
    yield from rows_of(found, item="one way", nbytes=nbytes)
    field.tell(f"{nbytes:,} bytes, stream")
    most = min(STREAM_MOST, max(4, STREAM_BYTES // nbytes))
    found = field.rounds(
        [name for name in standing if name != PIPE],
        lambda tree, count: stream(tree, Message(nbytes), count),
        seconds / 2,
        0.06,
        most,
        "stream",
        4,
        large,
    )
    yield from rows_of(found, item="stream", nbytes=nbytes)
    field.fall(standing)  # what was large is let go


def one_way(tree: Tree, what: Message, count: int) -> Sequence[float]:
    """Microseconds of each message, but for the first ones."""
    starts, ends = tree.run(ONE_WAY, what, count)
    return [(end - start if end else start) / 1e3 for start, end in zip(warm(starts), warm(ends), strict=True)]


def stream(tree: Tree, what: Message, count: int) -> Sequence[float]:
    """Microseconds a message of one stream."""
    start, end = tree.run(STREAM, what, count)
    return [(end - start if end else start) / 1e3 / count]


def _groups(field: Field, nbytes: int) -> list[list[str]]:
    """All at once where memory allows it; else in groups, with ours and the floors in each."""
    always = [name for name in (*FLOORS, OURS) if name in field.trees]
    others = [name for name in field.trees if name not in always]
    room = int(psutil.virtual_memory().available / 2 / (HELD * nbytes))
    size = max(1, min(len(others), room - len(always)))
    return [always + others[start : start + size] for start in range(0, len(others), size)] or [always]
