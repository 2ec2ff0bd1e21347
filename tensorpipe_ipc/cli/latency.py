"""``tensorpipe-ipc latency``: measures how long messages take one way, beside a wake-up and a memcpy of this machine."""

from __future__ import annotations

import argparse
import functools

from tensorpipe_ipc.cli import benchmark
from tensorpipe_ipc.cli.benchmark.plot import draw_latency

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    benchmark.add_arguments(parser)
    parser.add_argument(
        "--round-trip", action="store_true", help="there and back too: the consumer puts back what it got"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    from tensorpipe_ipc.benchmark import latency

    return benchmark.run(arguments, functools.partial(latency, round_trip=arguments.round_trip), draw_latency)
