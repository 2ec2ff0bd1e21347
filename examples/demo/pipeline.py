"""The demo's processes: a reader decodes, a worker convolves, and whoever made the ``Pipeline`` receives.

::

    reader --- frames ---> worker --- results ---> the process that made them

The worker binds ``frames`` and the main process ``results``. Every message bears the time of its put by
``time.monotonic_ns()``, which on one host is the same clock in all processes (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import torch

import tensorpipe_ipc as tp
from examples.demo.filters import by_conv2d
from examples.demo.pictures import Picture, decode
from tensorpipe_ipc.cli.failure import Failure
from tensorpipe_ipc.process import memory

__all__ = ["Job", "Pipeline", "frame_of"]

WINDOW = 8  # messages in flight on each hop: enough to keep all three busy, and at most 30 MB of results
PACE = 0.04  # seconds between the items that go one at a time: twice what the worker needs for a photograph
POLL = 0.1  # seconds until a child that died is noticed


class Job(NamedTuple):
    """The task of all three processes."""

    pictures: list[Picture]
    streamed: int  # items to send as fast as they go
    paced: int  # and after those, one at a time
    serializer: str
    frames: str  # endpoint of the first hop
    results: str  # and of the second

    def picture(self, number: int) -> Picture:
        """Return the picture that item ``number`` is made from."""
        return self.pictures[number % len(self.pictures)]

    @property
    def items(self) -> int:
        """Return how many items there are."""
        return self.streamed + self.paced


def frame_of(job: Job, number: int) -> dict[str, Any]:
    """The message that the reader sends of one item."""
    return {"number": number, "image": decode(job.picture(number)), "read_ns": time.monotonic_ns()}


class Pipeline:
    """The reader and the worker, as long as the ``with`` block lasts. However it is left, both are gone after it."""

    def __init__(self, job: Job, consumer: tp.Consumer) -> None:
        self._job = job._replace(results=consumer.endpoint)
        self._consumer = consumer
        self.children: list[Any] = []

    def __enter__(self) -> Pipeline:
        context = multiprocessing.get_context("spawn")
        address, told = context.Pipe(duplex=False)  # which port the worker got, if it was left open
        stages: list[tuple[str, Callable[[Job, Connection], None], Connection]]
        stages = [("reader", _read, address), ("worker", _work, told)]
        # Ctrl-C goes to all processes of a terminal. Children that ignore it, from their first moment on, leave it to
        # the main process to end them, without three tracebacks.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for name, stage, end in stages:
                child = context.Process(target=_run, args=(stage, self._job, end), name=name, daemon=True)
                child.start()
                self.children.append(child)
        finally:
            signal.signal(signal.SIGINT, before)
            address.close()
            told.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.terminate()
        for child in self.children:
            child.join(2)
            child.kill()
            child.join()
        if value is not None:
            with suppress(
                tp.Refused
            ):  # the worker's socket may be there still: binding takes it over, closing removes it
                tp.Consumer(self._job.frames).close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield what the worker sends, until both have said goodbye.

        Raises:
            Failure: one of them died. It is named.
        """
        while True:
            try:
                yield self._consumer.get(timeout=POLL)
            except tp.Empty:
                self._see_that_all_live()
            except (tp.EndOfStream, tp.PeerLost) as end:
                for child in self.children:
                    child.join(2)
                self._see_that_all_live()
                if isinstance(end, tp.PeerLost):
                    raise
                return

    def _see_that_all_live(self) -> None:
        dead = [child for child in self.children if child.exitcode]
        if dead:  # one that was killed is the cause of one that gave up
            first = min(dead, key=lambda child: child.exitcode)
            raise Failure(f"the {first.name} (pid {first.pid}) {_end(first.exitcode)}; {self._consumer!r}")


def _end(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _run(stage: Callable[[Job, Connection], None], job: Job, end: Connection) -> None:
    """A child's main function. SIGTERM ends it at once: what it leaves in the runtime folder, its parent takes away."""
    threading.Thread(target=_outlive, daemon=True).start()
    torch.set_num_threads(1)  # three processes that each take all cores get in each other's way
    try:
        stage(job, end)
    except (tp.TensorPipeError, EOFError) as error:  # EOFError: the worker died before it told its address
        sys.exit(f"{multiprocessing.current_process().name}: {error or 'the worker is gone'}")


def _outlive() -> None:
    """End this process when its parent was killed: nobody else would."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _read(job: Job, address: Connection) -> None:
    with tp.Producer(address.recv(), serializer=job.serializer, maxsize=WINDOW, linger=0) as frames:
        for number in range(job.items):
            if number >= job.streamed:
                time.sleep(PACE)
            frames.put(frame_of(job, number))
        frames.put(_farewell())
        frames.flush()


def _work(job: Job, told: Connection) -> None:
    with (
        tp.Consumer(job.frames, accept=[job.serializer], maxsize=WINDOW) as frames,
        tp.Producer(job.results, serializer=job.serializer, maxsize=WINDOW, linger=0) as results,
    ):
        told.send(frames.endpoint)
        for item in frames:
            taken_ns = time.monotonic_ns()
            if "image" in item:
                result = by_conv2d(item.pop("image"))
                item = {**item, "taken_ns": taken_ns, "result": result, "sent_ns": time.monotonic_ns()}
            results.put(item)
        results.put(_farewell())
        results.flush()


def _farewell() -> dict[str, Any]:
    """The last message of a process: what memory it holds after its work."""
    return {"process": multiprocessing.current_process().name, "pid": os.getpid(), "memory": list(memory())}
