"""The results of ``serializers`` as a picture: time against size, one line per method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from bench.results import Result

__all__ = ["apart", "draw"]

# Okabe and Ito's colours, which people with any colour vision tell apart. Ours are solid, those by hand dashed.
STYLES: dict[str, tuple[str, str]] = {
    "raw (ours)": ("#D55E00", "-"),
    "numpy (ours)": ("#0072B2", "-"),
    "torch_save (ours)": ("#009E73", "-"),
    "data_ptr by hand": ("#E69F00", "--"),
    "numpy by hand": ("#56B4E9", "--"),
    "torch.save by hand": ("#666666", "--"),
}
TICKS = {1e-3: "1 µs", 1e-2: "10 µs", 1e-1: "100 µs", 1.0: "1 ms", 10.0: "10 ms", 100.0: "100 ms"}
SIZES = {400: "400 B", 4000: "4 kB", 40_000: "40 kB", 4_000_000: "4 MB", 100_000_000: "100 MB"}


def draw(results: Sequence[Result], path: str) -> None:
    """Write the picture: to serialize on the left, to deserialize on the right, with the same scales."""
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6), sharey=True, layout="constrained")
    for axis, field, title in (
        (axes[0], "serialize_ms", "serialize"),
        (axes[1], "deserialize_ms", "deserialize"),
    ):
        _panel(axis, results, field)
        axis.set_title(title, loc="left", fontsize=13, fontweight="bold")
    axes[0].set_ylabel("time for one tensor")
    figure.suptitle(
        "raw hands over the tensor's own memory, so its time hardly grows with the tensor",
        x=0.01,
        ha="left",
        fontsize=14,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, results: Sequence[Result], field: str) -> None:
    ends: list[tuple[str, float, float]] = []
    for method, (colour, line) in STYLES.items():
        of = [result for result in results if result.method == method]
        sizes = [math.prod(result.shape) * 4 for result in of]
        times = [getattr(result, field) for result in of]
        width = 3.0 if method.startswith("raw") else 1.6
        axis.plot(sizes, times, line, color=colour, linewidth=width, marker="o", markersize=4)
        ends.append((method, sizes[-1], times[-1]))
    _label(axis, ends)
    axis.set(xscale="log", yscale="log", xlabel="tensor")
    axis.set_xticks(list(SIZES), list(SIZES.values()))
    axis.set_yticks(list(TICKS), list(TICKS.values()))
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.set(xlim=(250, 2.5e10), ylim=(3e-4, 600))  # room for the labels
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _label(axis: Any, ends: Sequence[tuple[str, float, float]]) -> None:
    """Each line's name at its end, moved apart where lines end together."""
    ends = sorted(ends, key=lambda end: end[2])
    places = apart([math.log10(time) for _, _, time in ends])
    for (method, size, time), at in zip(ends, places, strict=True):
        axis.annotate(
            method,
            xy=(size, time),
            xytext=(size * 3, 10**at),
            color=STYLES[method][0],
            va="center",
            fontsize=10,
            fontweight="bold" if method.startswith("raw") else "normal",
            arrowprops={"arrowstyle": "-", "color": STYLES[method][0], "lw": 0.6, "shrinkA": 1, "shrinkB": 3},
        )


def apart(heights: Sequence[float], least: float = 0.26) -> list[float]:
    """Sorted heights, moved up and down as little as it takes to have them ``least`` apart."""
    places = list(heights)
    for _ in range(100):
        for low in range(len(places) - 1):
            missing = least - (places[low + 1] - places[low])
            if missing > 0:
                places[low] -= missing / 2
                places[low + 1] += missing / 2
    return places
