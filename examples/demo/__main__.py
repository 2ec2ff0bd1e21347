"""``make demo``, or ``python -m examples.demo``: real pictures through a pipeline of three processes, every result checked.

A reader decodes pictures, a worker convolves them, this process receives and compares each result with one of its own,
made from the same file in another way. Exit status 0 means that all were equal, 1 that something failed, which one line
says; 2 is wrong usage, or something that is not installed, and 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorpipe_ipc as tp
from examples.demo import anatomy
from examples.demo.ledger import Ledger
from examples.demo.pictures import Picture, in_folder, shipped
from examples.demo.pipeline import WINDOW, Job, Pipeline, frame_of
from tensorpipe_ipc.cli.ending import ended_by_sigterm
from tensorpipe_ipc.cli.failure import Failure, status_of
from tensorpipe_ipc.process import memory
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.wire.message import encode

__all__ = ["main"]

LIBRARIES = ("rich", "PIL", "sklearn")  # the last for the pictures that it brings
ITEMS = 120
PACED = 40  # items that go one at a time, after the stream
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: the arguments; None for those of the process.

    Returns:
        The exit status.
    """
    remedies = dict.fromkeys(LIBRARIES, "make demo installs it, as does pip install 'tensorpipe-ipc[demo]'")
    return status_of("demo", lambda: _run(_parser().parse_args(argv)), remedies)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo", description="Real pictures through a pipeline of three processes.")
    parser.add_argument("--serializer", default="raw", metavar="NAME", help="raw (default), numpy or torch_save")
    parser.add_argument(
        "--endpoint",
        metavar="WHERE",
        help="ipc (sockets in a folder of its own), tcp (free ports on loopback), or the first part of two bare "
        "names; by default a bare name that nobody else has",
    )
    parser.add_argument("--items", type=_count, default=ITEMS, metavar="N", help=f"how many to stream ({ITEMS})")
    parser.add_argument("--images", metavar="FOLDER", help="your own pictures instead of scikit-learn's")
    parser.add_argument("--wire", action="store_true", help="show the bytes of one message and what they mean")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Run the pipeline and report.

    Raises:
        Failure: a result is wrong, a process died, or there are no pictures.
    """
    serializer_named(arguments.serializer)
    with ended_by_sigterm(), _endpoints(arguments.endpoint) as (frames, results):
        for library in LIBRARIES[: 2 if arguments.images else 3]:
            importlib.import_module(library)  # here, where its absence can be told, and not in a child
        from examples.demo.report import Report

        report = Report()
        pictures = _pictures(arguments, report)
        job = Job(pictures, arguments.items, min(PACED, arguments.items), arguments.serializer, frames, results)
        if arguments.wire:
            report.wire(anatomy.parts(encode(frame_of(job, 0), serializer_named(job.serializer)).frames(1)))
        _stream(job, report)
    return 0


def _stream(job: Job, report: Any) -> None:
    from examples.demo.report import progress

    ledger = Ledger(job)
    with (
        tp.Consumer(job.results, accept=[job.serializer], maxsize=WINDOW) as consumer,
        Pipeline(job, consumer) as pipeline,
    ):
        pids = ", ".join(f"{child.name} (pid {child.pid})" for child in pipeline.children)
        report.say(f"{pids}, main (pid {os.getpid()}); serializer {job.serializer}")
        report.say(f"over {consumer.endpoint}")
        sys.stdout.flush()
        for item in progress(iter(pipeline), job.items):
            ledger.enter(item)
    ledger.check()
    _show(ledger, report)


def _show(ledger: Ledger, report: Any) -> None:
    job = ledger.job
    report.say(
        f"All {job.items} results equal this process's own, bit for bit:\n"
        "conv2d in float32 there, shifted sums of integers here.",
        "bold green",
    )
    report.stream(job.streamed, ledger.nbytes, ledger.seconds)
    report.hops(ledger.hops())
    report.processes([*ledger.processes, ("main", os.getpid(), list(memory()))])


def _pictures(arguments: argparse.Namespace, report: Any) -> list[Picture]:
    if not arguments.images:
        return shipped()
    found, skipped = in_folder(arguments.images, arguments.items + PACED)
    for line in skipped:
        report.say(f"skipped {line}", "yellow")
    return found


@contextmanager
def _endpoints(where: str | None) -> Iterator[tuple[str, str]]:
    """Two endpoints, of which nothing is left afterwards.

    Raises:
        Failure: ``where`` is not one that the demo knows.
    """
    if where == "tcp":
        yield "tcp://127.0.0.1:*", "tcp://127.0.0.1:*"
    elif where == "ipc":
        with tempfile.TemporaryDirectory(prefix="tp-demo-") as folder:
            yield f"ipc://{folder}/frames", f"ipc://{folder}/results"
    else:
        name = where or f"demo-{os.getpid()}"
        if not _NAME.fullmatch(name):
            raise Failure(f"--endpoint {name}: give ipc, tcp, or a name of up to 32 letters, digits, '_', '-' and '.'")
        yield f"{name}-frames", f"{name}-results"


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
