"""The pictures of ``bench growth``: one-way time on the left, memory on the right, one picture for each way to grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench.page import tables
from bench.page.lines import BYTES, COUNTS, FINE_TIMES, TIMES, Line, figure, panel
from bench.page.results import Results, rows

__all__ = ["ACROSS", "PICTURES", "sentence", "summary", "table"]

LEAST = 0.1  # MB: what is less is drawn there
MEGABYTES = {value * 10.0**power: "" for power in range(-1, 5) for value in (1, 2, 5)}
MEGABYTES = {at: f"{at / 1e3:g} GB" if at >= 1e3 else f"{at:g} MB" for at in MEGABYTES}
MEGABYTES[LEAST] = f"{LEAST:g} MB or less"
ACROSS = {
    "size": ("tensor", "With the size of a tensor"),
    "leaves": ("tensors of 1 kB in a dict", "With the number of tensors in a message"),
    "leases": ("leases of 40 kB that the receiver holds", "With leases held: one way of 40 kB"),
    "depth": ("messages waiting in the queue", "With the queue's depth: a put and a get of 400 B"),
    "peers": ("processes attached beside the receiver", "With processes attached: one way of 400 B"),
    "messages": ("messages passed before", "With messages passed: one way of 400 B"),
}


def _picture(what: str, results: Results) -> Any:
    across, title = ACROSS[what]
    drawn, (time, memory) = figure(title, 2, 4.2)
    found = [row for row in rows(results, "growth", **{"with": what}) if "us" in row]
    ticks = COUNTS
    if what == "size":
        ticks = {at: BYTES[at] for at in (8, 4e3, 4e5, 4e7, 2**30)}
    elif what in ("peers", "messages"):
        ticks = {float(row["at"]): _count(row["at"]) for row in found}
    xs = [row["at"] for row in found]
    times = [row["us"]["median"] for row in found]
    megabytes = [max(row["memory"] / 1e6, LEAST) for row in found]
    panel(
        time,
        [Line("ours", "ours", xs, times)] if xs else [],
        across=across,
        up="time, median",
        x_ticks=ticks,
        y_ticks=TIMES,
    )
    panel(
        memory,
        [Line("ours", "ours", xs, megabytes)] if xs else [],
        across=across,
        up="memory of both ends, more than before",
        x_ticks=ticks,
        y_ticks=MEGABYTES,
    )
    if xs:
        _level(time, times, FINE_TIMES, TIMES)
        _level(
            memory, megabytes, MEGABYTES, {at: text for at, text in MEGABYTES.items() if text[0] == "1" or at == LEAST}
        )
    return drawn


def _level(axis: Any, ys: Sequence[float], fine: Mapping[float, str], coarse: Mapping[float, str]) -> None:
    """Give an axis so much room that what is level looks level, and as many ticks as that has room for."""
    low, high = min(ys) / 4, max(ys) * 4
    axis.set_ylim(low, high)
    within = {at: text for at, text in (fine if high / low < 100 else coarse).items() if low <= at <= high}
    axis.set_yticks(list(within), list(within.values()))


def _count(number: int) -> str:
    return f"{number / 1e6:.2g} M" if number >= 1e6 else f"{number / 1e3:.0f} k" if number >= 1e4 else f"{number:,}"


PICTURES: dict[str, Callable[[Results], Any]] = {what: partial(_picture, what) for what in ACROSS}


def summary(results: Results) -> Iterator[str]:
    """First and last of each."""
    yield from filter(None, (sentence(results, what) for what in ACROSS))


def sentence(results: Results, what: str) -> str:
    """First and last of one; nothing where it was not measured."""
    found = [row for row in rows(results, "growth", **{"with": what}) if "us" in row]
    if not found:
        return ""
    first, last = found[0], found[-1]
    times = " to ".join(tables.short_time(row["us"]["median"]) for row in (first, last))
    ends = (tables.size(row["at"]) if what == "size" else f"{row['at']:,}" for row in (first, last))
    across = "a tensor" if what == "size" else ACROSS[what][0]
    return f"{' to '.join(ends)} {across}: {times}; at the end {tables.size(max(0, last['memory']))} more than before."


def table(results: Results, what: str) -> tables.Table:
    """All rows of one way to grow."""
    lines = []
    for row in rows(results, "growth", **{"with": what}):
        if "us" not in row:
            lines.append([f"{row['at']:,}", f"left out: {row['left out']}", ""])
            continue
        times = [tables.short_time(row["us"][name]) for name in ("median", "lowest", "highest")]
        lines.append([f"{row['at']:,}", f"{times[0]} ({times[1]}..{times[2]})", tables.size(max(0, row["memory"]))])
    return tables.Table([ACROSS[what][0], "time", "memory"], lines)
