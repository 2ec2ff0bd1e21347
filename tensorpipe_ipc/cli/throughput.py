"""``tensorpipe-ipc throughput``: measures how many messages go in a second, and what CPU time and memory they take."""

from __future__ import annotations

import argparse

from tensorpipe_ipc.cli import benchmark
from tensorpipe_ipc.cli.benchmark.plot import draw_throughput

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    benchmark.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    from tensorpipe_ipc.benchmark import throughput

    return benchmark.run(arguments, throughput, draw_throughput)
