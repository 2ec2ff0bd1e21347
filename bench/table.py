"""The results of ``serializers`` as tables for people: at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.results import Result

__all__ = ["progress", "show"]

WIDTH = 100
COLUMNS = {
    "out ms": 7,
    "out MB/s": 10,
    "in ms": 8,
    "in MB/s": 10,
    "buffer KB": 8,
    "out peak KB": 8,
    "in peak KB": 8,
    "max diff": 8,
}
T = TypeVar("T")


def progress(shapes: Sequence[T]) -> Iterator[T]:
    """Each shape in turn, with a bar that says how far it is."""
    with Progress(console=Console(stderr=True, width=WIDTH), transient=True) as bar:
        task = bar.add_task("measuring", total=len(shapes))
        for shape in shapes:
            bar.update(task, description=f"measuring {_shape(shape)}")
            yield shape
            bar.advance(task)


def show(results: Sequence[Result], ratios: Sequence[dict[str, Any]], host: dict[str, str]) -> None:
    """Print everything: the results, how raw compares, what was measured how, and where."""
    console = Console(width=WIDTH)
    console.print(_results(results))
    console.print(_ratios(ratios))
    console.print(
        "float32 noise; medians of alternating rounds; MB/s: MiB of tensor per second; buffer: payload and\n"
        "metadata; peak: resident memory beyond the tensor (out) or beyond its bytes (in): VmHWM, reset\n"
        "before the call, in a fresh process for each row.",
        style="dim",
        highlight=False,
    )
    items = [f"{name} {value}" for name, value in host.items()]
    console.print(f"{' · '.join(items[:3])}\n{' · '.join(items[3:])}", style="dim", highlight=False)


def _results(results: Sequence[Result]) -> Table:
    table = Table(title="A tensor to bytes (out) and back (in)", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("shape, method", no_wrap=True)
    for name, width in COLUMNS.items():
        table.add_column(name, justify="right", min_width=width)
    before = None
    for result in results:
        if result.shape != before:
            table.add_row(_shape(result.shape), style="underline")
            before = result.shape
        table.add_row(
            f" {result.method}",
            f"{result.serialize_ms:.4f}",
            f"{result.serialize_mb_s:,.0f}",
            f"{result.deserialize_ms:.4f}",
            f"{result.deserialize_mb_s:,.0f}",
            f"{result.buffer_kb:,.1f}",
            _kb(result.serialize_peak_kb),
            _kb(result.deserialize_peak_kb),
            f"{result.max_difference:g}",
            style="bold" if result.method == "raw (ours)" else "",
        )
    return table


def _ratios(ratios: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        title="raw against those by hand, in the same run", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    table.add_column("shape", no_wrap=True)
    table.add_column("out, against data_ptr", justify="right")
    table.add_column("in, against the best", justify="right")
    for row in ratios:
        table.add_row(
            _shape(row["shape"]),
            f"{row['serialize_vs_data_ptr'][0]:,.2f} times as fast",
            f"{row['deserialize_vs_best'][0]:,.2f} times as fast ({row['best'].removesuffix(' by hand')})",
        )
    return table


def _shape(shape: Any) -> str:
    return "(" + ",".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def _kb(value: float) -> str:
    return "?" if value < 0 else f"{value:,.0f}"
