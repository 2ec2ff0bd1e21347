"""The growth of our Queue's one-way time and memory: with size, leaves, leases held, queue depth, peers and messages passed.

At full scale, up to 1 GiB, 10,000 leaves, 10,000 leases, 10,000 waiting messages, 32 processes and 10 million messages;
a size that would take more than a sixth of the memory that is left is left out, and said so.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console

from bench.growth import items
from bench.measure import machine
from bench.page import results
from bench.page.write import write
from bench.progress import steps

__all__ = ["add_arguments", "run"]

ITEMS: dict[str, Callable[[float, Callable[[str], None]], Iterator[dict[str, Any]]]] = {
    "size": items.by_size,
    "leaves": items.by_leaves,
    "leases": items.by_leases,
    "depth": items.by_depth,
    "peers": items.by_peers,
    "messages": items.by_messages,
}

SECONDS = 15.0  # of each, as far as a bar needs to know


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--scale", type=float, default=1.0, help="a fraction of the rounds and of the messages passed")
    parser.add_argument("--only", action="append", choices=ITEMS, metavar="ITEM", help=f"one of {', '.join(ITEMS)}")
    parser.add_argument("--folder", default="bench/results", help="where the results and the page go")


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write results and page."""
    load = os.getloadavg()[0]
    torch.set_num_threads(1)  # before anything is forked: no threads of torch's
    chosen = arguments.only or list(ITEMS)
    rows: list[dict[str, Any]] = []
    with steps(dict.fromkeys(chosen, SECONDS)) as done:
        for item in chosen:
            done.begin(item)
            rows += [{"item": "growth", "with": item, **row} for row in ITEMS[item](arguments.scale, done.tell)]
    found = results.of("growth", f"python -m bench {shlex.join(sys.argv[1:])}", machine(), rows, load)
    write(found, arguments.folder, Console(width=100))
