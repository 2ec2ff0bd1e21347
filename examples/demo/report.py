"""The demo's output: a bar while it runs, tables after it, a message's bytes. At most 80 columns wide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from examples.demo.anatomy import Part
from examples.demo.ledger import Hop

__all__ = ["Report", "percentile", "progress"]

WIDTH = 80
MIB = 1 << 20
SHOWN = 8  # bytes of a part in hex
T = TypeVar("T")


class Report:
    """Prints to standard output."""

    def __init__(self) -> None:
        self._console = Console(width=WIDTH, highlight=False)

    def say(self, text: str, style: str = "") -> None:
        """Print a line; it may say anything, square brackets too."""
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)

    def stream(self, items: int, nbytes: int, seconds: float) -> None:
        """Print how fast it went."""
        table = _table("As fast as they go", "", "items", "MiB", "seconds", "items/s", "MiB/s")
        mib = nbytes / MIB
        table.add_row(
            "images and results",
            f"{items:,}",
            f"{mib:,.1f}",
            f"{seconds:.2f}",
            f"{items / seconds:,.1f}",
            f"{mib / seconds:,.1f}",
        )
        self._console.print(table)

    def hops(self, hops: Iterable[Hop]) -> None:
        """Print how long one message takes."""
        table = _table("One at a time: one way, from put to get", "", "", "bytes", "items", "p50 us", "p99 us")
        table.columns[1].justify = "left"
        for hop in hops:
            times = [f"{percentile(hop.one_way_ns, share) / 1e3:,.0f}" for share in (0.5, 0.99)]
            table.add_row(hop.name, hop.kind, f"{hop.nbytes:,}", f"{len(hop.one_way_ns):,}", *times)
        self._console.print(table)
        self.say("By time.monotonic_ns: CLOCK_MONOTONIC is one clock for all processes of a host.", "dim")

    def processes(self, rows: Iterable[tuple[str, int, Sequence[int]]]) -> None:
        """Print the memory that each process holds: name, pid and (resident, unique, ...) of each."""
        table = _table("Memory after the work", "", "pid", "resident MiB", "unique MiB")
        for name, pid, memory in rows:
            table.add_row(name, str(pid), f"{memory[0] / MIB:,.0f}", f"{memory[1] / MIB:,.0f}")
        self._console.print(table)

    def wire(self, parts: Iterable[Part]) -> None:
        """A message's bytes and what they mean."""
        table = _table("The first message on the wire", "frame", "byte", "hex", "meaning")
        table.columns[0].justify = "right"
        table.columns[2].justify = table.columns[3].justify = "left"
        table.columns[2].no_wrap = True
        before = 0
        for part in parts:
            if part.frame != before:
                table.add_section()
            before = part.frame
            table.add_row(str(part.frame), str(part.start), _hex(part.data), Text(part.meaning))
        self._console.print(table)


def progress(items: Iterator[T], total: int) -> Iterator[T]:
    """Each item in turn, with a bar on standard error that says how far it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, width=WIDTH)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting two processes", total=total)
        for count, item in enumerate(items, 1):
            # The two goodbyes at the end are no items.
            bar.update(task, description="received and checked", completed=min(count, total))
            yield item


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest of ``values`` that so large a share of them does not exceed (nearest rank)."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _hex(data: bytes) -> str:
    shown = data[:SHOWN].hex(" ")
    return f"{shown} ..." if len(data) > SHOWN else shown
