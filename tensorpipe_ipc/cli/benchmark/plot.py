"""The figures of ``latency`` and ``throughput`` as pictures, by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tensorpipe_ipc.benchmark.report import LatencyReport, ThroughputReport

__all__ = ["draw_latency", "draw_throughput"]

_TIMES = {
    0.1: "0.1 µs",
    1: "1 µs",
    10: "10 µs",
    100: "100 µs",
    1e3: "1 ms",
    1e4: "10 ms",
    1e5: "100 ms",
    1e6: "1 s",
    1e7: "10 s",
}
_APART = 0.055  # of the picture's height: how far labels are from each other, at least


class _Line(NamedTuple):
    name: str
    colour: str  # Okabe and Ito's, which people with any colour vision tell apart
    style: str
    width: float
    value: Callable[[Any], float | None]


_ONE_WAY = (
    _Line("p50, round trip", "#CC79A7", "-.", 1.6, lambda result: result.round_trip and result.round_trip.p50_us),
    _Line("p99", "#E69F00", "--", 1.6, lambda result: result.one_way.p99_us),
    _Line("p50, one way", "#D55E00", "-", 3.0, lambda result: result.one_way.p50_us),
    _Line("one memcpy", "#0072B2", ":", 1.6, lambda result: result.floors.memcpy.p50_us),
    _Line("one wake-up", "#009E73", ":", 1.6, lambda result: result.floors.wake_up.p50_us),
)
_EACH = (
    _Line("a message of a stream", "#D55E00", "-", 3.0, lambda result: 1e6 / result.messages_per_second),
    _Line(
        "its CPU time, both ends",
        "#E69F00",
        "--",
        1.6,
        lambda result: result.producer_cpu_s_per_million + result.consumer_cpu_s_per_million,
    ),
    _Line("one memcpy", "#0072B2", ":", 1.6, lambda result: result.floors.memcpy.p50_us),
)


def draw_latency(report: LatencyReport, file: str) -> None:
    """Draw one way's p50 and p99, and both floors, into a file."""
    _draw(report.results, _ONE_WAY, f"One way, from before put to after get\n{report.setup.pipeline}", file)


def draw_throughput(report: ThroughputReport, file: str) -> None:
    """Draw what a message of a stream takes, its CPU time, and one memcpy, into a file."""
    _draw(report.results, _EACH, f"What one message of a stream takes\n{report.setup.pipeline}", file)


def _draw(results: Sequence[Any], lines: Sequence[_Line], title: str, file: str) -> None:
    import matplotlib.figure

    results = sorted(results, key=lambda result: result.nbytes)
    figure = matplotlib.figure.Figure(figsize=(10, 6), layout="constrained")
    axis = figure.subplots()
    ends = []
    for line in lines:
        points = [(result.nbytes, line.value(result)) for result in results]
        known = [(nbytes, value) for nbytes, value in points if value is not None]
        if not known:
            continue
        sizes, values = zip(*known, strict=True)
        axis.plot(sizes, values, line.style, color=line.colour, linewidth=line.width, marker="o", markersize=5)
        if sizes[-1] == results[-1].nbytes:
            ends.append((line, sizes[-1], values[-1]))
        else:  # of larger messages there are too few
            axis.annotate(
                line.name, (sizes[-1], values[-1]), (8, 0), textcoords="offset points", color=line.colour, va="center"
            )
    axis.set(xscale="log", yscale="log", xlabel="message, in bytes of tensors", ylabel="time")
    axis.set_xticks([result.nbytes for result in results], [result.name for result in results])
    axis.minorticks_off()
    low, high = axis.get_ylim()
    axis.set_yticks(
        [at for at in _TIMES if low <= at <= high], [name for at, name in _TIMES.items() if low <= at <= high]
    )
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.set_title(title, loc="left", fontsize=11)
    _label(axis, ends)
    figure.savefig(file, dpi=110)


def _label(axis: Any, ends: Sequence[tuple[_Line, float, float]]) -> None:
    """Each line's name beside its end, moved up where two would meet."""
    below = -1.0
    for line, nbytes, value in sorted(ends, key=lambda end: end[2]):
        at = axis.transAxes.inverted().transform(axis.transData.transform((nbytes, value)))[1]
        below = max(at, below + _APART)
        axis.annotate(
            line.name,
            xy=(nbytes, value),
            xytext=(1.03, below),
            textcoords=axis.transAxes,
            color=line.colour,
            va="center",
            fontweight="bold" if line.width > 2 else "normal",
            arrowprops={"arrowstyle": "-", "color": line.colour, "lw": 0.6, "shrinkA": 1, "shrinkB": 3},
            annotation_clip=False,
        )
