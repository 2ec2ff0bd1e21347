"""The results as a table for people: at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench.dataloader.rows import Row

__all__ = ["show"]

WIDTH = 80
FOOT = (
    "A second: batches, or calls. Ratio: the median of the rounds' (lowest..highest);\n"
    "over 1: ours is ahead. Memory: of all processes together, in MB, stock and ours.\n"
    "Ready: the dataset has its samples; work: it makes them. Every batch is checked.\n"
    "Images: 64 of 3x224x224 float32; crops: 16 of 1024x1024 uint8; tabular: 32 rows\n"
    "of 16; detection: 114 tensors, 112 of them small. A tensor of a call has 4 MB."
)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def show(rows: Sequence[Row], host: dict[str, str]) -> None:
    """Print everything: the figures, the ratios and their limits, how and where."""
    console = Console(width=WIDTH, highlight=False)
    table = Table(title="A stock context beside ours", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("", no_wrap=True, min_width=15)
    headings = {"w": 2, "stock/s": 7, "ours/s": 7, "ratio": 15, "limit": 5, "unique": 9, "prop.": 9}
    for heading, width in headings.items():
        table.add_column(heading, justify="right", width=width, no_wrap=True)
    before = ""
    for row in rows:
        if row.case != before:
            table.add_row(row.case, style="underline")
            before = row.case
        table.add_row(
            f" {row.what}",
            str(row.workers),
            f"{row.stock:,.0f}",
            f"{row.ours:,.0f}",
            f"{_short(row.ratio)} ({_short(row.lowest)}..{_short(row.highest)})",
            f"{row.limit:.2f}",
            f"{row.stock_uss:,.0f} {row.ours_uss:,.0f}",
            f"{row.stock_pss:,.0f} {row.ours_pss:,.0f}",
            style="green" if row.met else "red",
        )
    console.print(table)
    console.print()
    console.print(FOOT, style="dim")
    items = [f"{name} {value}" for name, value in host.items()]
    console.print("\n".join(" · ".join(line) for line in (items[:2], items[2:5], items[5:])), style="dim")
