"""Everything that people use, beside ours, in one run: time, throughput, trees, memory, fans, and what a kill does.

Each peer has a process tree of its own. Rounds go from one to the next, so that whatever disturbs the machine disturbs
all alike; content is checked after the clock has been read; who cannot take part is listed with the reason. It takes
about as long as ``--budget`` says, however slow a peer is, and leaves the results and a page that shows them.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from rich.console import Console

from bench.all import deaths, fans, held, leaves, sizes
from bench.all.field import Field
from bench.all.peers import FLOORS, OURS, PEERS, Peer
from bench.measure import machine, versions
from bench.page import results
from bench.page.write import write
from bench.progress import steps
from bench.wanted import not_installed

__all__ = ["add_arguments", "reasons", "run", "version_of"]

# What is measured, its share of the budget, and the seconds that it takes beside, mostly to start and to kill processes.
ITEMS: dict[str, tuple[Callable[[Field, float], Iterator[dict[str, Any]]], float, float]] = {
    "sizes": (sizes.measure, 0.65, 60),
    "trees": (leaves.measure, 0.15, 10),
    "held": (held.measure, 0.0, 20),
    "fans": (fans.measure, 0.2, 40),
    "deaths": (deaths.measure, 0.0, 60),
}
BUDGET = 160.0
# Of budgets, or seconds: on a machine that is busy, what has a share and has not begun then is left out, and listed. So
# `make bench`, which also installs and measures growth, ends within a quarter of an hour.
MOST, LEAST = 2.5, 300.0


def reasons(missing: Mapping[str, str]) -> dict[str, str]:
    """Return why peers are missing: Python's reason, and the installer's where one was not installed."""
    said = not_installed()
    packages = {name: PEERS[name].package for name in missing}
    return {
        name: f"{reason}; pip install {packages[name]}: {said[packages[name]]}" if packages[name] in said else reason
        for name, reason in missing.items()
    }


def version_of(peer: Peer) -> str:
    """Of what a peer is a part of, or comes with."""
    if not peer.package and peer.part_of == "python":
        return f"Python {platform.python_version()}"
    return " ".join(word for pair in versions(peer.package or peer.part_of).items() for word in pair)


def _note(peer: Peer) -> str:
    """Return how a peer is used, or why it cannot be."""
    lacks = [] if peer.trees or peer.family == "floor" else ["takes no dicts"]
    lacks += [] if peer.many or peer.family == "floor" else ["its ends cannot be shared"]
    return "; ".join([peer.note, *lacks])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help=f"seconds for all that is timed, about ({BUDGET:g})"
    )
    parser.add_argument("--only", action="append", choices=ITEMS, metavar="ITEM", help=f"one of {', '.join(ITEMS)}")
    parser.add_argument(
        "--peer", action="append", choices=PEERS, metavar="PEER", help="only these; ours and the floors always"
    )
    parser.add_argument("--folder", default="bench/results", help="where the results and the page go")


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write results and page."""
    load = os.getloadavg()[0]
    torch.set_num_threads(1)  # before anything is forked: no threads of torch's
    chosen = arguments.only or list(ITEMS)
    names = [name for name in PEERS if not arguments.peer or name in (*arguments.peer, *FLOORS, OURS)]
    rows: list[dict[str, Any]] = []
    with steps({item: ITEMS[item][1] * arguments.budget + ITEMS[item][2] for item in chosen}) as done:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # all trees end with us
        with Field(names, done.tell) as field:
            end = time.monotonic() + max(LEAST, MOST * arguments.budget)
            for item in chosen:
                measure, share, _ = ITEMS[item]
                done.begin(item)
                if not share or time.monotonic() < end:
                    rows += measure(field, share * arguments.budget)
                else:
                    field.failed.append({"peer": "all", "item": item, "reason": "the time was over: see --budget"})
            missing, failed = reasons(field.missing), field.failed
    found = results.of(
        "all",
        f"python -m bench {shlex.join(sys.argv[1:])}",
        {**machine(), **versions("pyzmq", *[peer.package for peer in PEERS.values() if peer.package])},
        rows,
        load,
        peers=[
            {
                "peer": name,
                "family": PEERS[name].family,
                "version": version_of(PEERS[name]),
                "note": _note(PEERS[name]),
                "missing": missing.get(name, ""),
            }
            for name in names
        ],
        failed=failed,
    )
    write(found, arguments.folder, Console(width=100))
