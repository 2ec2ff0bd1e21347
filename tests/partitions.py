"""The campaign over a bad line: ``python -m tests.partitions --disconnects 1000 --partitions 100 --seed 7``.

A producer and a consumer, a process each, in frames over tcp, and a proxy between them (``proxy``) that cuts the connection,
with FIN or RST, or lets nothing through in one direction or both for a while. Rounds alternate between a consumer that binds
and a producer that does.

The judge: the consumer is to get message 0, 1, 2, ... with the bytes that it must have, and as many as were put: none lost,
none twice, none out of order. Of a partition that lasts, each end says within 3 s that the other has not been heard of.
Within 1 s after its end messages come again. Neither end counts anything as lost.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import multiprocessing
import random
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tensorpipe_ipc as tp

if __name__ == "__main__":  # as pytest does, by pyproject.toml
    sys.path.insert(0, str(Path(__file__).parent))

from proxy import Proxy

MAXSIZE = 16
SIZES = (0, 60, 400, 4000, 20_000, 100_000, 1_000_000)  # bytes; every 50th message is LARGE and goes in pieces
LARGE = 3_000_000
SHORT, LONG = (0.05, 1.0), 3.2  # seconds that a partition lasts; every fourth is long enough to be noticed
NOTICED, RESUMED = 3.0, 1.0  # seconds
MARGIN = 1.0  # seconds, on a machine that does other things too
HANG = 30.0
PUT, GOT, STOP, PRODUCER_AWAY, CONSUMER_AWAY, FAILED = range(6)  # words of the board

_pool = np.random.default_rng(1).integers(0, 256, 1 << 22, dtype=np.uint8)


def content_of(number: int) -> Any:
    """The bytes of a message."""
    mixed = number * 0xC2B2AE3D27D4EB4F >> 7 & 0xFFFFFFFF
    size = LARGE if number % 50 == 49 else SIZES[mixed % len(SIZES)]
    start = (mixed >> 8) % (len(_pool) - LARGE)
    return _pool[start : start + size]


@dataclasses.dataclass
class Figures:
    """The counts and times of a run."""

    disconnects: int = 0
    partitions: int = 0
    messages: int = 0
    resent: int = 0
    duplicates: int = 0
    noticed: list[float] = dataclasses.field(default_factory=list)
    resumed: list[float] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.disconnects:,} disconnects, {self.partitions:,} partitions, {self.messages:,} messages: "
            "0 lost, 0 doubled, 0 out of order; "
            f"{self.resent:,} sent again, {self.duplicates:,} duplicates dropped; "
            f"a partition noticed after {_spread(self.noticed)}, messages again after {_spread(self.resumed)}"
        )


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s (at most {max(seconds):.2f} s)" if seconds else "-"


def produce(line: Connection, board: Any, binds: bool) -> None:
    """Put message after message until the board says that it is enough, and wait until all are taken."""
    endpoint = line.recv() if not binds else "tcp://127.0.0.1:0"
    with tp.Producer(endpoint, bind=binds, maxsize=MAXSIZE, linger=HANG, shared_memory="off") as producer:
        line.send(producer.endpoint)
        while not board[STOP]:
            try:
                producer.put((board[PUT], torch.from_numpy(content_of(board[PUT]))), 0.1)
            except tp.Full as full:
                _note(board, PRODUCER_AWAY, str(full))
            else:
                board[PUT] += 1
        producer.flush(HANG)
        found = producer.statistics()
        assert (found.lost, found.in_flight) == (0, 0), found
        line.send(found.resent)


def consume(line: Connection, board: Any, binds: bool) -> None:
    """Take message after message, and see that each is the next and what it must be."""
    endpoint = line.recv() if not binds else "tcp://127.0.0.1:0"
    with tp.Consumer(endpoint, bind=binds, shared_memory="off") as consumer:
        line.send(consumer.endpoint)
        while True:
            try:
                number, content = consumer.get(0.1)
            except tp.Empty as empty:
                _note(board, CONSUMER_AWAY, str(empty))
                continue
            except tp.EndOfStream:
                break
            assert number == board[GOT], f"message {number} came in the place of {board[GOT]}"
            assert np.array_equal(content.numpy(), content_of(number)), f"message {number} came damaged"
            board[GOT] += 1
        found = consumer.statistics()
        assert (found.lost, found.messages, found.rejected) == (0, board[PUT], 0), found
        line.send(found.duplicates)


def _note(board: Any, word: int, says: str) -> None:
    """Write down, in microseconds, when an end first said that the other is away."""
    if not board[word] and re.search(r"not heard of for \d+\.\d s", says):
        board[word] = int(time.monotonic() * 1e6)


def _run(role: Callable[[Connection, Any, bool], None], line: Connection, board: Any, binds: bool) -> None:
    torch.set_num_threads(1)
    try:
        role(line, board, binds)
    except BaseException:
        traceback.print_exc()
        board[FAILED] = 1
        raise


class Round:
    """One pair of ends, and what is done to the line between them."""

    def __init__(self, producer_binds: bool, choose: random.Random, figures: Figures) -> None:
        context = multiprocessing.get_context("fork")
        self.board = multiprocessing.RawArray(ctypes.c_int64, 8)
        self.choose, self.figures = choose, figures
        self.lines, self.processes = [], []
        for role, binds in ((produce, producer_binds), (consume, not producer_binds)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(role, theirs, self.board, binds), daemon=True)
            process.start()
            theirs.close()
            self.lines.append(ours)
            self.processes.append(process)
        self.binder, self.connector = self.lines if producer_binds else self.lines[::-1]

    def run(self, disconnects: int, partitions: int) -> None:
        """Do all that to the line, in any order, and judge."""
        port = int(self.hear(self.binder).rpartition(":")[2])
        with Proxy(port) as self.proxy:
            self.connector.send(self.proxy.endpoint)
            self.hear(self.connector)
            deeds = [self.disconnect] * disconnects + [self.partition] * partitions
            self.choose.shuffle(deeds)
            self.await_progress()
            for deed in deeds:
                deed()
            self.await_progress()
            self.board[STOP] = 1
            self.figures.resent += self.hear(self.lines[0])
            self.figures.duplicates += self.hear(self.lines[1])
            self.figures.messages += self.board[GOT]
        for process in self.processes:
            process.join(HANG)
            assert process.exitcode == 0

    def hear(self, line: Connection) -> Any:
        """Return the next thing that an end says."""
        assert line.poll(2 * HANG), "an end does not answer"
        return line.recv()

    def close(self) -> None:
        """Whatever is left of it ends."""
        for process, line in zip(self.processes, self.lines, strict=True):
            process.kill()
            process.join()
            line.close()

    def disconnect(self) -> None:
        """Cut the connection, in the middle of things."""
        if self.choose.random() < 0.5:
            self.await_progress()
        time.sleep(self.choose.expovariate(1 / 0.02))  # the moment of the cut: nothing waits for it
        while not self.proxy.cut(reset=self.choose.random() < 0.5):
            time.sleep(0.005)
            assert not self.board[FAILED]
        self.figures.disconnects += 1

    def partition(self) -> None:
        """Let nothing through for a while."""
        self.await_progress()
        self.board[PRODUCER_AWAY] = self.board[CONSUMER_AWAY] = 0
        began = time.monotonic()
        self.proxy.silence(*self.choose.choice((("there",), ("back",), ("there", "back"))))
        if self.figures.partitions % 4:
            time.sleep(self.choose.uniform(*SHORT))
        else:
            self.await_notice(began)
        self.proxy.heal()
        self.figures.resumed.append(self.await_progress())
        assert self.figures.resumed[-1] < RESUMED + MARGIN, f"nothing came for {self.figures.resumed[-1]:.2f} s"
        self.figures.partitions += 1

    def await_notice(self, began: float) -> None:
        """Both ends say that the other is away, and for how long."""
        while time.monotonic() < began + LONG or not (self.board[PRODUCER_AWAY] and self.board[CONSUMER_AWAY]):
            assert not self.board[FAILED]
            assert time.monotonic() < began + LONG + MARGIN, f"not noticed, {list(self.board)}"
            time.sleep(0.01)
        seconds = [self.board[word] / 1e6 - began for word in (PRODUCER_AWAY, CONSUMER_AWAY)]
        assert max(seconds) < NOTICED + MARGIN
        self.figures.noticed += seconds

    def await_progress(self) -> float:
        """Another message comes. How long that took."""
        began, before = time.monotonic(), self.board[GOT]
        while self.board[GOT] == before:
            assert not self.board[FAILED], "an end failed"
            assert time.monotonic() - began < HANG, f"nothing came for {HANG} seconds: {list(self.board)}"
            time.sleep(0.001)
        return time.monotonic() - began


def campaign(disconnects: int, partitions: int, seed: int) -> Figures:
    """Run it, half with a consumer that binds and half with a producer that does.

    Raises:
        AssertionError: something that was promised does not hold.
    """
    choose, figures = random.Random(seed), Figures()
    for producer_binds in (False, True):
        this = Round(producer_binds, choose, figures)
        try:
            share = 1 + (not producer_binds)
            this.run((disconnects - figures.disconnects) // share, (partitions - figures.partitions) // share)
        finally:
            this.close()
    return figures


def main() -> None:
    """Run the campaign that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}: {campaign(arguments.disconnects, arguments.partitions, arguments.seed)}", flush=True)


if __name__ == "__main__":
    main()
