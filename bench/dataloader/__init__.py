"""DataLoader, Pool and ProcessPoolExecutor with a stock context and with ours, side by side in one run.

Each rival has a process of its own, which has the workers, so that memory can be told apart. Rounds alternate between the
two, and a ratio is the median of the rounds' ratios. The limits are shown and fail nothing: the machine has its say.
"""

from __future__ import annotations

import argparse
import json

import torch
from rich.console import Console
from rich.progress import Progress

from bench.dataloader import loaders, pools
from bench.dataloader.plot import draw
from bench.dataloader.rows import Row
from bench.dataloader.table import show
from bench.measure import machine

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    cases = [*loaders.CASES, *pools.CASES]
    parser.add_argument("--scale", type=float, default=1.0, help="a fraction of the rounds and batches")
    parser.add_argument("--only", action="append", choices=cases, metavar="CASE", help=f"one of {', '.join(cases)}")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", metavar="PNG", help="draw the ratios there")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write what was asked for."""
    torch.set_num_threads(1)  # before anything is forked: no threads of torch's
    host = machine()
    chosen = arguments.only or [*loaders.CASES, *pools.CASES]
    rows: list[Row] = []
    # It draws when it is told to: a thread that does so by itself would be forked half-way through something.
    with Progress(transient=True, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("measuring", total=len(chosen))
        for case in chosen:
            bar.update(task, description=f"measuring {case}", refresh=True)
            rows += (loaders if case in loaders.CASES else pools).measure(case, arguments.scale)
            bar.advance(task)
    show(rows, host)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"machine": host, "scale": arguments.scale, "rows": [row._asdict() for row in rows]}, file)
    if arguments.plot:
        draw(rows, arguments.plot)
