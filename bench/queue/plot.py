"""One way by size as a picture: one line per rival, the floors dotted, each named where it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from bench.plot import apart
from bench.queue.field import FLOORS, OURS, SPIN, THEIRS
from bench.queue.findings import Finding

__all__ = ["draw"]

# Okabe and Ito's colours, which people with any colour vision tell apart. Ours are solid, floors dotted.
COLOURS = {
    OURS: "#D55E00",
    SPIN: "#E69F00",
    **dict(zip(THEIRS, ("#0072B2", "#56B4E9", "#009E73", "#7F7F00", "#CC79A7", "#000000"), strict=True)),
    **dict.fromkeys(FLOORS, "#777777"),
}
TICKS = {1: "1 µs", 10: "10 µs", 100: "100 µs", 1e3: "1 ms", 1e4: "10 ms", 1e5: "100 ms", 1e6: "1 s"}


def draw(findings: Sequence[Finding], path: str) -> None:
    """Write the picture, if one way was measured."""
    rows = [row for finding in findings if finding.item == "one-way" for row in finding.rows]
    if not rows:
        return
    figure, axis = pyplot.subplots(figsize=(10, 7), layout="constrained")
    ends = []
    for rival in dict.fromkeys(row.rival for row in rows):
        of = [row for row in rows if row.rival == rival]
        line = ":" if rival in FLOORS else "-" if rival in (OURS, SPIN) else "--"
        axis.plot(
            [row.nbytes for row in of],
            [row.p50 for row in of],
            line,
            color=COLOURS[rival],
            linewidth=3 if rival == OURS else 1.6,
            marker="o",
            markersize=4,
        )
        ends.append((rival, of[-1].nbytes, of[-1].p50))
    _label(axis, ends)
    sizes = dict.fromkeys((row.nbytes, row.measure) for row in rows)
    axis.set(xscale="log", yscale="log", xlabel="tensor", ylabel="one way, p50")
    axis.set_xticks([nbytes for nbytes, _ in sizes], [name for _, name in sizes])
    axis.set_yticks(list(TICKS), list(TICKS.values()))
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.set(xlim=(250, 2e10), ylim=(1, max(row.p50 for row in rows) * 3))
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.suptitle(
        "From put to get: a wake-up for small tensors, one copy for large ones", x=0.01, ha="left", fontsize=14
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _label(axis: Any, ends: Sequence[tuple[str, int, float]]) -> None:
    ends = sorted(ends, key=lambda end: end[2])
    for (rival, nbytes, time), at in zip(ends, apart([math.log10(end[2]) for end in ends], 0.2), strict=True):
        axis.annotate(
            rival,
            xy=(nbytes, time),
            xytext=(nbytes * 3, 10**at),
            color=COLOURS[rival],
            va="center",
            fontweight="bold" if rival in (OURS, SPIN) else "normal",
            arrowprops={"arrowstyle": "-", "color": COLOURS[rival], "lw": 0.6, "shrinkA": 1, "shrinkB": 3},
        )
