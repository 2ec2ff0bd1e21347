"""The results of the items, for the table, the plot and the file; and the way from rounds to figures.

Every figure is a median of rounds, in each of which every rival had its turn; every ratio is the median of the rounds'
own ratios, so that whatever disturbs the machine for a while disturbs both its sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Finding", "Limit", "Ratio", "Row", "Times", "ratio_of", "row_of"]

Times = Mapping[str, Sequence[Sequence[float]]]  # of each rival, of each round: microseconds, or rates


class Row(NamedTuple):
    """The result of one rival. ``p90`` and ``p99`` are of all rounds together; None where there are too few."""

    measure: str
    rival: str
    nbytes: int
    p50: float
    p90: float | None
    p99: float | None
    samples: int


class Limit(NamedTuple):
    """The limit of a ratio: shown, and never a failure, for the machine has its say too."""

    against: str
    least: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        return f">= {self.least:g}" if self.most is None else f"<= {self.most:g}"

    def met(self, value: float) -> bool:
        """Return whether a ratio keeps the limit."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


class Ratio(NamedTuple):
    """One rival's figure as a multiple of another's. For rates and for 'times as fast', more is better."""

    what: str
    value: float
    lowest: float
    highest: float
    limit: str
    met: bool


class Finding(NamedTuple):
    """The result of one item.

    Attributes:
        unit: of the rows' figures.
        notes: who did not take part, and why.
    """

    item: str
    title: str
    unit: str
    rows: list[Row]
    ratios: list[Ratio]
    notes: list[str]

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            **self._asdict(),
            "rows": [row._asdict() for row in self.rows],
            "ratios": [ratio._asdict() for ratio in self.ratios],
        }


def row_of(measure: str, rival: str, nbytes: int, rounds: Sequence[Sequence[float]]) -> Row:
    """Sum up what one rival's rounds found."""
    every = sorted(value for found in rounds for value in found)
    return Row(
        measure,
        rival,
        nbytes,
        statistics.median(map(statistics.median, rounds)),
        every[len(every) * 9 // 10] if len(every) >= 20 else None,
        every[len(every) * 99 // 100] if len(every) >= 200 else None,
        len(every),
    )


def ratio_of(times: Times, rival: str, limit: Limit, what: str = "", factor: float = 1.0) -> list[Ratio]:
    """One rival's median to another's, round by round; with a limit on how much faster it is ('>='), turned round.

    Args:
        times: of times, not rates.
        factor: for figures that count different things.

    Returns:
        One ratio, or none where one of the two did not take part.
    """
    if rival not in times or limit.against not in times:
        return []
    pairs = zip(times[rival], times[limit.against], strict=True)
    found = [statistics.median(ours) * factor / statistics.median(theirs) for ours, theirs in pairs]
    if limit.most is None:
        found = [1 / value for value in found]
    value = statistics.median(found)
    verb = "faster than" if limit.most is None else "/"
    text = what or f"{rival} {verb} {limit.against}"
    return [Ratio(text, value, min(found), max(found), str(limit), limit.met(value))]
