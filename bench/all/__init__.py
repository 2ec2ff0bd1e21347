"""Everything that people use, beside ours, in one run: time, throughput, trees, memory, fans, and what a kill does.

Each peer has a process tree of its own. Rounds go from one to the next, so that whatever disturbs the machine disturbs
all alike; content is checked after the clock has been read; who cannot take part is listed with the reason. It takes
about as long as ``--budget`` says, however slow a peer is, and leaves the results and a page that shows them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.all import deaths, fans, held, leaves, sizes
from bench.all.field import Field
from bench.all.peers import FLOORS, OURS, PEERS, Peer
from bench.measure import machine, versions
from bench.page import results
from bench.page.write import write
from bench.wanted import not_installed

__all__ = ["add_arguments", "run"]

# What is measured, and its share of the budget. Those without a share take what they take: about half a minute each.
ITEMS: dict[str, tuple[Callable[[Field, float], Iterator[dict[str, Any]]], float]] = {
    "sizes": (sizes.measure, 0.65),
    "trees": (leaves.measure, 0.15),
    "held": (held.measure, 0.0),
    "fans": (fans.measure, 0.2),
    "deaths": (deaths.measure, 0.0),
}
LONGEST = 540.0  # seconds, or three budgets: on a machine that is busy, what is left then is left out, and listed


def _reasons(missing: Mapping[str, str]) -> dict[str, str]:
    """Why peers are missing: as Python has it, and, where it was not installed, what the installer said."""
    said = not_installed()
    packages = {name: PEERS[name].package for name in missing}
    return {
        name: f"{reason}; pip install {packages[name]}: {said[packages[name]]}" if packages[name] in said else reason
        for name, reason in missing.items()
    }


def _note(peer: Peer) -> str:
    """How a peer is used, and where it is not, as it cannot be."""
    lacks = [] if peer.trees or peer.family == "floor" else ["takes no dicts"]
    lacks += [] if peer.many or peer.family == "floor" else ["its ends cannot be shared"]
    return "; ".join([peer.note, *lacks])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--budget", type=float, default=180, help="seconds for all that is timed, about")
    parser.add_argument("--only", action="append", choices=ITEMS, metavar="ITEM", help=f"one of {', '.join(ITEMS)}")
    parser.add_argument(
        "--peer", action="append", choices=PEERS, metavar="PEER", help="only these; ours and the floors always"
    )
    parser.add_argument("--folder", default="bench/results", help="where the results and the page go")


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write results and page."""
    torch.set_num_threads(1)  # before anything is forked: no threads of torch's
    chosen = arguments.only or list(ITEMS)
    names = [name for name in PEERS if not arguments.peer or name in (*arguments.peer, *FLOORS, OURS)]
    rows: list[dict[str, Any]] = []
    # It draws when it is told to: a thread that does so by itself would be forked half-way through something.
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, transient=True, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("starting", total=len(chosen))

        def tell(what: str) -> None:
            bar.update(task, description=what, refresh=True)

        signal.signal(signal.SIGTERM, signal.default_int_handler)  # all trees end with us
        with Field(names, tell) as field:
            end = time.monotonic() + max(LONGEST, 3 * arguments.budget)
            for item in chosen:
                measure, share = ITEMS[item]
                if time.monotonic() < end:
                    rows += measure(field, share * arguments.budget)
                else:
                    field.failed.append({"peer": "all", "item": item, "reason": "the time was over: see --budget"})
                bar.advance(task)
            missing, failed = _reasons(field.missing), field.failed
    found = results.of(
        "all",
        f"python -m bench {' '.join(sys.argv[1:])}",
        {**machine(), **versions("pyzmq", *[peer.package for peer in PEERS.values() if peer.package])},
        rows,
        peers=[
            {"peer": name, "family": PEERS[name].family, "note": _note(PEERS[name]), "missing": missing.get(name, "")}
            for name in names
        ],
        failed=failed,
    )
    write(found, arguments.folder, Console(width=100))
