"""The shared-memory Queue beside torch's and multiprocessing's queues, faster-fifo, iceoryx2, a wake-up and a memcpy.

Each ratio stands beside the limit that we hold it to. The limits are shown and fail nothing: the machine has its say.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from bench.measure import keep, machine, versions
from bench.progress import steps
from bench.queue import fans, flat, loans, one_way, streams, trees
from bench.queue.field import Effort
from bench.queue.findings import Finding
from bench.queue.plot import draw
from bench.queue.table import show

__all__ = ["add_arguments", "run"]

ITEMS: dict[str, Callable[[Effort], Finding]] = {
    "one-way": one_way.measure,
    "loan": loans.measure,
    "stream": streams.measure,
    "tree": trees.measure,
    "fan": fans.measure,
    "flat": flat.measure,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--scale", type=float, default=1.0, help="a fraction of the rounds and messages (20: 10 million)"
    )
    parser.add_argument("--only", action="append", choices=ITEMS, metavar="ITEM", help=f"one of {', '.join(ITEMS)}")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", metavar="PNG", help="draw one way by size there")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print tables, and write what was asked for."""
    torch.set_num_threads(1)  # before anything is forked: no threads of torch's
    host = {**machine(), **versions("pyzmq", "iceoryx2", "faster-fifo")}
    chosen = arguments.only or list(ITEMS)
    findings = []
    with steps(dict.fromkeys(chosen, 1.0)) as done:
        for item in chosen:
            done.begin(item)
            findings.append(ITEMS[item](Effort(arguments.scale, done.tell)))
    show(findings, host)
    keep(arguments.json, host, scale=arguments.scale, items=[each.plain() for each in findings])
    if arguments.plot:
        draw(findings, arguments.plot)
