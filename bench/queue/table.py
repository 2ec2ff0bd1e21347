"""The results as tables for people: at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench.queue.findings import Finding, Ratio, Row

__all__ = ["show"]

WIDTH = 80
FOOT = (
    "One way: from before put to after get on CLOCK_MONOTONIC, the receiver blocked\n"
    "(iceoryx2's polls). Round trip: there and back. Medians of alternating rounds;\n"
    "ratios: the median of the rounds' own (lowest..highest). A process pinned to\n"
    "each of two cores; every message is new private memory, its first and last\n"
    "item are looked at (of streams: each 64th's), the last two are kept. Who gets\n"
    "arrays hands arrays over."
)


def show(findings: Sequence[Finding], host: dict[str, str]) -> None:
    """Print everything: each item's figures, its ratios and their limits, who is missing, how and where."""
    console = Console(width=WIDTH, highlight=False)
    for finding in findings:
        console.print(_figures(finding))
        if finding.ratios:
            console.print(_ratios(finding.ratios))
        for note in finding.notes:
            console.print(f" {note}", style="dim")
        console.print()
    console.print(FOOT, style="dim")
    items = [f"{name} {value}" for name, value in host.items()]
    lines = (items[:2], items[2:5], items[5:])
    console.print("\n".join(" · ".join(line) for line in lines), style="dim")


def _figures(finding: Finding) -> Table:
    rates = finding.unit == "a second"
    table = Table(title=f"{finding.title}, {finding.unit}", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("", min_width=28, no_wrap=True)
    for heading in ("messages", "MB") if rates else ("p50", "p90", "p99", "of"):
        table.add_column(heading, justify="right", min_width=11)
    before = ""
    for row in finding.rows:
        if row.measure != before:
            table.add_row(row.measure, style="underline")
            before = row.measure
        cells = _rate(row) if rates else [_us(row.p50), _us(row.p90), _us(row.p99), f"{row.samples:,}"]
        table.add_row(f" {row.rival}", *cells, style="bold" if row.rival.startswith("ours") else "")
    return table


def _rate(row: Row) -> list[str]:
    return [f"{1e6 / row.p50:,.0f}", f"{row.nbytes / row.p50:,.0f}"]


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _ratios(ratios: Sequence[Ratio]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("", min_width=40, no_wrap=True)
    for heading, width in (("ratio", 7), ("lowest..highest", 15), ("limit", 13)):
        table.add_column(heading, justify="right", min_width=width)
    for ratio in ratios:
        spread = f"{_short(ratio.lowest)}..{_short(ratio.highest)}"
        table.add_row(ratio.what, _short(ratio.value), spread, ratio.limit, style="green" if ratio.met else "red")
    return table


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
