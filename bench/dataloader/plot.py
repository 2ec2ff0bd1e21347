"""The ratios as a picture: a bar for each row, from 1 to how many times as fast ours is."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from bench.dataloader.rows import Row

__all__ = ["draw"]

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = {
    "images": "#D55E00",
    "crops": "#E69F00",
    "tabular": "#009E73",
    "detection": "#0072B2",
    "pool": "#CC79A7",
    "executor": "#56B4E9",
}


def draw(rows: Sequence[Row], path: str) -> None:
    """Write the picture."""
    figure, axis = pyplot.subplots(figsize=(9, 1.5 + 0.3 * len(rows)), layout="constrained")
    names = [f"{row.case}, {row.what}, {row.workers} worker{'s' * (row.workers > 1)}" for row in rows]
    axis.barh(
        range(len(rows)),
        [row.ratio - 1 for row in rows],
        left=1,
        xerr=[[row.ratio - row.lowest for row in rows], [row.highest - row.ratio for row in rows]],
        color=[COLOURS[row.case] for row in rows],
        ecolor="#777777",
        capsize=2,
    )
    for index, row in enumerate(rows):
        axis.annotate(f" {row.ratio:.1f}", (max(row.highest, 1), index), va="center")
    axis.set(xscale="log", xlabel="times as fast as with a stock context")
    ticks = [0.5, 1, 2, 5, 10, 20, 50]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set(xlim=(min(0.7, *(row.lowest for row in rows)), 1.5 * max(2.0, *(row.highest for row in rows))))
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.minorticks_off()
    axis.axvline(1, color="#000000", linewidth=1)
    axis.grid(alpha=0.25, axis="x")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.suptitle("Batches that are made where they will be read", x=0.01, ha="left", fontsize=14)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
