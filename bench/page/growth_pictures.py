"""The pictures of ``bench growth``: one-way time on the left, memory on the right, one picture for each way to grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.page import tables
from bench.page.lines import BYTES, COUNTS, TIMES, Line, figure, panel
from bench.page.results import Results, rows

__all__ = ["ACROSS", "PICTURES", "summary", "table"]

MEGABYTES = {1e-2: "10 kB", 1e-1: "100 kB", 1.0: "1 MB", 10.0: "10 MB", 100.0: "100 MB", 1e3: "1 GB", 1e4: "10 GB"}
ACROSS = {
    "size": ("tensor", "With the size of a tensor"),
    "leaves": ("tensors of 1 kB in a dict", "With the number of tensors in a message"),
    "leases": ("leases of 40 kB that the receiver holds", "With leases held: one way of 40 kB"),
    "depth": ("messages waiting in the queue", "With the queue's depth: a put and a get of 400 B"),
    "peers": ("processes attached", "With processes attached: one way of 400 B"),
    "messages": ("messages passed before", "With messages passed: one way of 400 B"),
}


def _picture(what: str, results: Results) -> Any:
    across, title = ACROSS[what]
    drawn, (time, memory) = figure(title, 2, 4.2)
    found = [row for row in rows(results, "growth", **{"with": what}) if "us" in row]
    ticks = BYTES if what == "size" else {float(n): str(n) for n in (2, 4, 8, 16, 32)} if what == "peers" else COUNTS
    xs = [row["at"] for row in found]
    times = [row["us"]["median"] for row in found]
    panel(
        time,
        [Line("ours", "ours", xs, times)] if xs else [],
        across=across,
        up="time, p50",
        x_ticks=ticks,
        y_ticks=TIMES,
    )
    if xs:
        time.set_ylim(min(times) / 4, max(times) * 4)  # what is level looks level
        within = {at: text for at, text in TIMES.items() if min(times) / 4 <= at <= max(times) * 4}
        time.set_yticks(list(within), list(within.values()))
    panel(
        memory,
        [Line("ours", "ours", xs, [max(row["memory"] / 1e6, 0.01) for row in found])] if xs else [],
        across=across,
        up="proportional memory of both, more than before",
        x_ticks=ticks,
        y_ticks=MEGABYTES,
    )
    return drawn


PICTURES: dict[str, Callable[[Results], Any]] = {what: partial(_picture, what) for what in ACROSS}


def summary(results: Results) -> Iterator[str]:
    """First and last of each."""
    for what, (across, _) in ACROSS.items():
        found = [row for row in rows(results, "growth", **{"with": what}) if "us" in row]
        if found:
            first, last = found[0], found[-1]
            times = " to ".join(tables.short_time(row["us"]["median"]) for row in (first, last))
            grown = tables.size(max(0, last["memory"]))
            yield f"{first['at']:,} to {last['at']:,} {across}: {times}; at the end {grown} more than before"


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
