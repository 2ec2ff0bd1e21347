"""The common part of ``latency`` and ``throughput``: their options, a bar while they measure, and their output."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tensorpipe_ipc.benchmark.pipelines import OverEndpoint, OverQueue, Pipeline
from tensorpipe_ipc.cli.ending import ended_by_sigterm
from tensorpipe_ipc.cli.failure import Failure
from tensorpipe_ipc.limits import check_timeout

__all__ = ["add_arguments", "options_of", "pipeline_of", "run"]

_COPY: dict[str, Any] = {"auto": "auto", "always": True, "never": False}
_WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of both."""
    what = parser.add_argument_group("what is sent")
    what.add_argument(
        "--sizes",
        metavar="SIZE,...",
        help="bytes of messages, or a tensor's shape: 400B,4MiB,64x3x224x224 (400B,4MB,100MB)",
    )
    what.add_argument("--dtype", default="float32", help="of all tensors (float32)")
    what.add_argument(
        "--tree", default="tensor", help="tensor: a bare one (default); dict:N: a dict of N that have the size together"
    )
    what.add_argument("--device", help="where tensors lie before put and after get: cuda:0, say")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--transport",
        default="queue",
        choices=("queue", "ipc", "tcp"),
        help="a Queue (default), or an endpoint",
    )
    how.add_argument("--shared-memory", choices=("auto", "off"), help="at an endpoint: off: in frames (auto)")
    how.add_argument("--serializer", default="raw", metavar="NAME", help="raw (default), numpy or torch_save")
    how.add_argument("--loan", action="store_true", help="messages are filled where they will be read: no copy")
    how.add_argument(
        "--copy", default="auto", choices=_COPY, help="whether get copies: large ones not (auto), always, never"
    )
    how.add_argument("--spin", type=float, metavar="SECONDS", help="how long a queue's get looks before it sleeps (0)")
    who = parser.add_argument_group("who")
    who.add_argument("--producers", type=int, default=1, metavar="N", help="processes that put (1)")
    who.add_argument("--consumers", type=int, default=1, metavar="N", help="processes that get (1)")
    who.add_argument(
        "--method", choices=("fork", "spawn", "forkserver"), help="how they are started (fork; GPU: spawn)"
    )
    who.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="bind each to a CPU (it does)")
    parser.add_argument("--seconds", type=float, default=8.0, help="for all rounds, at most (8)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", metavar="FILE", help="draw them by size there: .png, .pdf or .svg")


def run(
    arguments: argparse.Namespace,
    measure: Callable[..., Any],
    draw: Callable[[Any, str], None],
) -> int:
    """Measure, print, and write what was asked for.

    Raises:
        Failure: an option is out of range or goes not with another, or a file cannot be written.
    """
    for library in ("rich", *(("matplotlib",) if arguments.plot else ())):
        importlib.import_module(library)  # here, where its absence can be told, before anything is measured
    for file in (arguments.json, arguments.plot):
        _check_writable(file)
    torch.set_num_threads(1)  # before anything is forked
    try:
        pipeline, options = pipeline_of(arguments), options_of(arguments)
        with ended_by_sigterm(), _bar() as tell:
            report = measure(pipeline, tell=tell, **options)
    except (ValueError, TypeError) as error:
        raise Failure(str(error)) from error
    print(report)
    if arguments.json:
        Path(arguments.json).write_text(report.to_json() + "\n", encoding="utf-8")
    if arguments.plot:
        draw(report, arguments.plot)
    return 0


def pipeline_of(arguments: argparse.Namespace) -> Pipeline:
    """Return the pipeline that the options ask for.

    Raises:
        Failure: an option is for the other kind.
    """
    shared = {
        "serializer": arguments.serializer,
        "loan": arguments.loan,
        "copy": _COPY[arguments.copy],
        "device": arguments.device,
    }
    if arguments.transport == "queue":
        if arguments.shared_memory is not None:
            raise Failure("--shared-memory is for --transport ipc and tcp: a queue lies in it")
        return OverQueue(spin=arguments.spin or 0.0, **shared)
    if arguments.spin is not None:
        raise Failure(f"--spin is for --transport queue: an endpoint over {arguments.transport} does not spin")
    return OverEndpoint(arguments.transport, shared_memory=arguments.shared_memory or "auto", **shared)


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the other arguments of the measurement, from the options.

    Raises:
        Failure: there is no such dtype.
    """
    dtype = getattr(torch, arguments.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise Failure(f"--dtype {arguments.dtype}: torch has no such dtype; give float32, bfloat16, uint8, int64, ...")
    method = arguments.method
    if method is None and arguments.device is None:
        method = "fork"
    return {
        "sizes": None if arguments.sizes is None else arguments.sizes.split(","),
        "dtype": dtype,
        "tree": arguments.tree,
        "producers": arguments.producers,
        "consumers": arguments.consumers,
        "method": method,
        "pin": arguments.pin,
        "seconds": check_timeout(arguments.seconds, "--seconds", ""),
    }


@contextmanager
def _bar() -> Iterator[Callable[[float, str], None]]:
    """A bar on standard error. It draws when it is told to: a thread that does so by itself would be forked half-way."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, width=_WIDTH)
    with Progress(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=1.0)

        def tell(part: float, what: str) -> None:
            bar.update(task, completed=part, description=f"measuring {what}", refresh=True)

        yield tell


def _check_writable(file: str | None) -> None:
    if file is not None and not os.access(Path(file).resolve().parent, os.W_OK):
        raise Failure(f"{file}: cannot be written, as its folder is not there or not yours")
