"""Figures of many times: percentiles, how well the median is known, and whether that is well enough."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

__all__ = ["PRECISION", "Percentiles", "interval", "is_settled", "percentiles"]

LEAST_ROUNDS = 6  # of fewer, no interval holds the median with 95 % confidence
PRECISION = 0.05  # of the median: how well it has to be known
BEYOND = 2  # times that have to lie beyond a percentile, or it says nothing


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Of times in microseconds. None where fewer than two times lie beyond."""

    p50_us: float
    """The median."""
    p90_us: float | None
    """Nine in ten took no longer."""
    p99_us: float | None
    """99 in a hundred took no longer."""
    p999_us: float | None
    """999 in a thousand took no longer."""
    max_us: float
    """None took longer."""
    samples: int
    """How many there were."""


def percentiles(nanoseconds: Sequence[int]) -> Percentiles:
    """Sum up times, interpolating between neighbours, as NumPy does."""
    times = np.asarray(nanoseconds, np.float64) / 1000
    count = len(times)

    def at(percent: float) -> float | None:
        return float(np.percentile(times, percent)) if count * (100 - percent) >= 100 * BEYOND else None

    return Percentiles(float(np.median(times)), at(90), at(99), at(99.9), float(times.max()), count)


def interval(figures: Sequence[float]) -> tuple[float, float]:
    """Return the two figures between which the true median lies, with 95 % confidence.

    The ranks are those of the binomial distribution: nothing is taken for granted about that of the figures. With fewer
    than six it is all that was seen, and less is certain.
    """
    ordered, rank = sorted(figures), 0
    below = 1.0  # in how many of 2**n cases so few, or none, lie below the median
    while below <= 0.025 * 2.0 ** len(ordered):
        rank += 1
        below += math.comb(len(ordered), rank)
    low = max(0, rank - 1)
    return ordered[low], ordered[-1 - low]


def is_settled(figures: Sequence[float]) -> bool:
    """Return whether the rounds' figures tell their median to ``PRECISION`` of it, either way."""
    if len(figures) < LEAST_ROUNDS:
        return False
    low, high = interval(figures)
    return high - low <= 2 * PRECISION * statistics.median(figures)
