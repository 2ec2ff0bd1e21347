"""One way, by size: from before put to after get, the receiver blocked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.queue.crew import Crew
from bench.queue.field import (
    FLOORS,
    ICEORYX,
    MEMCPY,
    OURS,
    PIPE,
    SPIN,
    THEIRS,
    TORCH,
    Effort,
    field,
    ours_and_spinning,
)
from bench.queue.findings import Finding, Limit, Ratio, ratio_of, row_of
from bench.queue.programs import ONE_WAY, warm

__all__ = ["SIZES", "measure", "one_way_of"]


class Size(NamedTuple):
    """One size: what it is called, how often it is measured, and what ours is held to there."""

    name: str
    rounds: int
    messages: int  # a round
    limits: tuple[tuple[str, Limit], ...] = ()


SIZES = {
    400: Size(
        "400 B",
        15,
        250,
        (
            (OURS, Limit(PIPE, most=1.4)),
            (OURS, Limit(TORCH, least=30)),
            (SPIN, Limit(ICEORYX, most=1)),  # it polls, and so does this
        ),
    ),
    4_000: Size("4 kB", 5, 60),
    40_000: Size("40 kB", 5, 60),
    400_000: Size("400 kB", 5, 40),
    4_000_000: Size("4 MB", 8, 10, ((OURS, Limit(MEMCPY, most=1.15)), (OURS, Limit(TORCH, least=5)))),
    100_000_000: Size("100 MB", 4, 2, ((OURS, Limit(MEMCPY, most=1.1)), (OURS, Limit(TORCH, least=5)))),
}


def measure(effort: Effort) -> Finding:
    """All rivals and both floors, at each size."""
    rows, ratios, notes = [], [], []
    ours, note = ours_and_spinning()
    for nbytes, size in SIZES.items():
        effort.tell(f"{size.name} one way")
        with field({**FLOORS, **ours, **THEIRS}, nbytes) as all_:
            messages = effort.of(size.messages, 2)
            times = all_.rounds(effort.of(size.rounds, 2), lambda _, crew: one_way_of(crew, nbytes, messages))  # noqa: B023
        rows += [row_of(size.name, name, nbytes, rounds) for name, rounds in times.items()]
        found: list[Ratio] = []
        for name, limit in size.limits:
            found += ratio_of(times, name, limit)
        ratios += [ratio._replace(what=f"{size.name}: {ratio.what}") for ratio in found]
        notes = note + all_.notes
    return Finding("one-way", "One way", "us", rows, ratios, notes)


def one_way_of(crew: Crew, nbytes: int, messages: int) -> Sequence[float]:
    """Microseconds of a turn's messages, one way each."""
    starts, ends = crew.run(ONE_WAY, nbytes, messages)
    return [(end - start if end else start) / 1e3 for start, end in zip(warm(starts), warm(ends), strict=True)]
