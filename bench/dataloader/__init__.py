"""DataLoader, Pool and ProcessPoolExecutor with a stock context and with ours, side by side in one run.

Each rival has a process of its own, which has the workers, so that memory can be told apart. Rounds alternate between the
two, and a ratio is the median of the rounds' ratios. The limits are shown and fail nothing: the machine has its say.
"""

from __future__ import annotations

import argparse

import torch

from bench.dataloader import loaders, pools
from bench.dataloader.plot import draw
from bench.dataloader.rows import Row
from bench.dataloader.table import show
from bench.measure import keep, machine
from bench.progress import steps

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
    with steps(dict.fromkeys(chosen, 1.0)) as done:
        for case in chosen:
            done.begin(case)
            done.tell(case)
            rows += (loaders if case in loaders.CASES else pools).measure(case, arguments.scale)
    show(rows, host)
    keep(arguments.json, host, scale=arguments.scale, rows=[row._asdict() for row in rows])
    if arguments.plot:
        draw(rows, arguments.plot)
