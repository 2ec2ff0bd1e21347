"""The progress of a run: a bar on a terminal; elsewhere, as in a log, a line for each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Steps", "steps"]


class Steps:
    """Steps of which each is expected to take some seconds. Within one the bar follows the clock, as far as it is told."""

    def __init__(self, seconds: dict[str, float], show: Callable[[float, str], None]) -> None:
        """
        Args:
            seconds: that each step may take, by name and in order.
            show: is told the part that is done, from 0 to 1, and what is done now.
        """
        self._total, self._show = sum(seconds.values()), show
        self._seconds, self._before, self._now = seconds, 0.0, ""
        self._begun = time.monotonic()

    def begin(self, step: str) -> None:
        """A step begins, and the one before is done."""
        self._before += self._seconds.get(self._now, 0.0)
        self._now, self._begun = step, time.monotonic()

    def tell(self, what: str) -> None:
        """Show what is done now."""
        passed = min(time.monotonic() - self._begun, self._seconds.get(self._now, 0.0))
        self._show((self._before + passed) / self._total, what)


@contextmanager
def steps(seconds: dict[str, float]) -> Iterator[Steps]:
    """Show them on standard error. It draws when it is told to: a thread that does so by itself would be forked half-way."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, transient=True, console=console, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(part: float, what: str) -> None:
            if console.is_terminal:
                bar.update(task, completed=part, description=what, refresh=True)
            else:
                console.print(f"{part:4.0%} {what}", highlight=False)

        yield Steps(seconds, show)
