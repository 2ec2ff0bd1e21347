"""The result of a case: both rivals' figures, their ratio, and the limit that it is held to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["OURS", "STOCK", "Row", "Turn", "row_of"]

STOCK, OURS = "stock", "ours"


class Turn(NamedTuple):
    """One rival's turn: a rate, and the memory of all its processes together, in bytes, at the most."""

    rate: float
    uss: int
    pss: int


class Row(NamedTuple):
    """The result of one case. Rates are batches or calls a second, memory is in MB: unique and proportional."""

    case: str
    what: str
    workers: int
    stock: float
    ours: float
    ratio: float
    lowest: float
    highest: float
    limit: float
    met: bool
    stock_uss: float
    ours_uss: float
    stock_pss: float
    ours_pss: float


def row_of(case: str, what: str, workers: int, limit: float, turns: Mapping[str, Sequence[Turn]]) -> Row:
    """A row of rounds, in each of which both had a turn."""
    ratios = [ours.rate / stock.rate for stock, ours in zip(turns[STOCK], turns[OURS], strict=True)]
    ratio = statistics.median(ratios)
    stock, ours = (statistics.median(turn.rate for turn in turns[name]) for name in (STOCK, OURS))
    memory = [
        max(getattr(turn, kind) for turn in turns[name]) / 1e6 for kind in ("uss", "pss") for name in (STOCK, OURS)
    ]
    return Row(case, what, workers, stock, ours, ratio, min(ratios), max(ratios), limit, ratio >= limit, *memory)
