"""``tensorpipe-ipc latency``: measures how long messages take one way, beside a wake-up and a memcpy of this machine."""

from __future__ import annotations

import argparse

from tensorpipe_ipc.cli import benchmark
from tensorpipe_ipc.cli.benchmark.plot import draw_latency

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    benchmark.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    from tensorpipe_ipc.benchmark import latency

    return benchmark.run(arguments, latency, draw_latency)
