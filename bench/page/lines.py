"""Lines on logarithmic axes, each named where it ends: what all pictures of the page are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from bench.plot import apart

__all__ = ["BYTES", "COUNTS", "FINE_TIMES", "RATES", "TIMES", "Line", "figure", "panel", "style"]

matplotlib.rcParams["svg.hashsalt"] = "bench"  # the same results give the same file

# Okabe and Ito's colours and three more, which people with any colour vision tell apart with the dashes. Ours are solid.
FAMILIES: dict[str, tuple[str, Any]] = {
    "ours": ("#D55E00", "-"),
    "ours, endpoints": ("#D55E00", (0, (1, 1))),
    "torch": ("#0072B2", (0, (5, 2))),
    "multiprocessing": ("#56B4E9", (0, (5, 2))),
    "slot by hand": ("#009E73", (0, (3, 1, 1, 1))),
    "bytes by hand": ("#117733", (0, (1, 2))),
    "faster-fifo": ("#7F7F00", (0, (5, 2))),
    "ZeroMQ, NNG": ("#CC79A7", (0, (5, 2))),
    "gloo": ("#000000", (0, (3, 1, 1, 1))),
    "zenoh": ("#E69F00", (0, (3, 1, 1, 1))),
    "iceoryx2": ("#6A3D9A", (0, (3, 1, 1, 1))),
    "Ray": ("#882255", (0, (1, 2))),
    "floor": ("#888888", ":"),
}
TIMES = {
    1e-1: "0.1 µs",
    1e0: "1 µs",
    1e1: "10 µs",
    1e2: "100 µs",
    1e3: "1 ms",
    1e4: "10 ms",
    1e5: "100 ms",
    1e6: "1 s",
    1e7: "10 s",
}
BYTES = {
    8: "8 B",
    400: "400 B",
    4e3: "4 kB",
    4e4: "40 kB",
    4e5: "400 kB",
    4e6: "4 MB",
    4e7: "40 MB",
    1e8: "100 MB",
    2**30: "1 GiB",
}
FINE_TIMES = {
    value * power: f"{value * power:g} µs" if power < 1e3 else f"{value * power / 1e3:g} ms"
    for power in (1.0, 10.0, 100.0, 1e3, 1e4)
    for value in (1, 2, 5)
}
RATES = {1e-1: "100 kB/s", 1e0: "1 MB/s", 1e1: "10 MB/s", 1e2: "100 MB/s", 1e3: "1 GB/s", 1e4: "10 GB/s"}
COUNTS = {10.0**power: f"{10**power:,}" for power in range(8)}


STEP = 0.05  # between two names, of the height


class Line(NamedTuple):
    """One line: its name, its family's style, and its points."""

    name: str
    family: str
    xs: Sequence[float]
    ys: Sequence[float]


def style(family: str) -> tuple[str, Any]:
    """Colour and dashes."""
    return FAMILIES.get(family, ("#444444", "-"))


def figure(title: str, panels: int = 1, height: float = 6.2) -> tuple[Any, list[Any]]:
    """A figure with a title that says what is seen, and its axes."""
    drawn, axes = pyplot.subplots(
        1, panels, figsize=(6.6 * panels if panels > 1 else 9.5, height), layout="constrained"
    )
    drawn.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return drawn, list(axes) if panels > 1 else [axes]


def panel(
    axis: Any,
    lines: Sequence[Line],
    *,
    across: str,
    up: str,
    x_ticks: Mapping[float, str],
    y_ticks: Mapping[float, str],
    log_x: bool = True,
    log_y: bool = True,
    title: str = "",
    reach: Sequence[float] = (),
) -> None:
    """Draw lines, name them at their ends, and give both axes what people read: quantities with units.

    Args:
        reach: what the vertical axis has to reach besides.
    """
    lines = [line for line in lines if line.xs]
    if not lines:
        axis.set_axis_off()
        return
    for line in lines:
        colour, dashes = style(line.family)
        width = 3.2 if line.family == "ours" else 1.7
        axis.plot(line.xs, line.ys, linestyle=dashes, color=colour, linewidth=width, marker="o", markersize=3.5)
    axis.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear", xlabel=across, ylabel=up)
    _ranges(axis, lines, reach, log_x, log_y)
    if len(lines) > 1:
        _names(axis, lines, log_x, log_y)
    for ticks, limits, put in (
        (x_ticks, axis.get_xlim(), axis.set_xticks),
        (y_ticks, axis.get_ylim(), axis.set_yticks),
    ):
        within = {at: text for at, text in ticks.items() if limits[0] <= at <= limits[1]}
        put(list(within), list(within.values()))
    last = max(max(line.xs) for line in lines)
    shown = {at: text for at, text in x_ticks.items() if axis.get_xlim()[0] <= at <= last * 1.01}
    axis.set_xticks(list(shown), list(shown.values()))
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_bounds(axis.get_xlim()[0], last)  # no axis below the names
    if title:
        axis.set_title(title, loc="left", fontsize=11)


def _ranges(axis: Any, lines: Sequence[Line], reach: Sequence[float], log_x: bool, log_y: bool) -> None:
    xs = [x for line in lines for x in line.xs]
    ys = [*reach, *(y for line in lines for y in line.ys)]
    low, high = min(xs), max(xs)
    room = 0.38 if len(lines) > 1 else 0.05  # for the names
    if log_x:
        low, high = low / 1.3, high * max(1.3, (high / low) ** room)
    else:
        low, high = low - 0.05 * (high - low), high + room * max(1e-9, high - low)
    axis.set_xlim(low, high)
    if log_y:
        axis.set_ylim(min(ys) / 1.8, max(ys) * 1.8)
    else:
        axis.set_ylim(min(0, *ys), max(ys) * 1.08 or 1)


def _within(places: Sequence[float]) -> list[float]:
    """Sorted places, moved so that none is above or below the axis, and still apart."""
    kept: list[float] = []
    top = 1.0
    for place in reversed(places):
        top = min(place, top - STEP / 2 if not kept else kept[-1] - STEP)
        kept.append(top)
    bottom = -STEP
    found = []
    for place in reversed(kept):
        bottom = max(place, bottom + STEP)
        found.append(bottom)
    return found


def _names(axis: Any, lines: Sequence[Line], log_x: bool, log_y: bool) -> None:
    ends = sorted(lines, key=lambda line: line.ys[-1])
    bottom, top = axis.get_ylim()
    scale = (math.log10(top / bottom) if log_y else top - bottom) or 1
    heights = [(math.log10(line.ys[-1] / bottom) if log_y else line.ys[-1] - bottom) / scale for line in ends]
    places = _within(apart(heights, min(STEP, 0.95 / len(ends))))
    low, high = axis.get_xlim()
    last = max(max(line.xs) for line in lines)
    at = last * (high / last) ** 0.14 if log_x else last + (high - last) * 0.1
    for line, place in zip(ends, places, strict=True):
        colour, _ = style(line.family)
        axis.annotate(
            line.name,
            xy=(line.xs[-1], line.ys[-1]),
            xytext=(at, bottom * 10 ** (place * scale) if log_y else bottom + place * scale),
            color=colour,
            va="center",
            fontsize=9,
            fontweight="bold" if line.family == "ours" else "normal",
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)},
        )
