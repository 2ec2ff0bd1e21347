"""Ledger: what the demo's main process has received, whether it was right, and how long it took."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from examples.demo.filters import by_whole_numbers
from examples.demo.pictures import Picture, decode
from examples.demo.pipeline import Job
from tensorpipe_ipc.cli.failure import Failure

__all__ = ["Hop", "Ledger"]

# Of each picture there is one result to compare with, made once and kept for a while: the photographs return often.
_expected = functools.lru_cache(maxsize=16)(lambda picture: by_whole_numbers(decode(picture)))


class Hop(NamedTuple):
    """The record of one kind of message between two processes."""

    name: str
    kind: str
    nbytes: int  # of one message's tensor
    one_way_ns: Sequence[int]


class Ledger:
    """Everything that was received.

    Attributes:
        job: what was to be done.
        nbytes: of the images and results that were streamed.
        processes: name, pid and memory of those that are done.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.nbytes = 0
        self.processes: list[tuple[str, int, list[int]]] = []
        self._items = 0
        self._wrong: list[str] = []
        self._began_ns = self._ended_ns = 0
        self._one_way: dict[tuple[str, str, int], list[int]] = {}

    def enter(self, item: dict[str, Any]) -> None:
        """Take note of a message that has just arrived, and compare its result."""
        now_ns = time.monotonic_ns()
        if "memory" in item:
            self.processes.append((item["process"], item["pid"], item["memory"]))
            return
        picture, result = self.job.picture(item["number"]), item["result"]
        if item["number"] < self.job.streamed:
            self._began_ns = self._began_ns or item["read_ns"]
            self._ended_ns = now_ns
            self.nbytes += _image_bytes(result) + result.nbytes
        else:
            self._note("reader to worker", picture, _image_bytes(result), item["taken_ns"] - item["read_ns"])
            self._note("worker to main", picture, result.nbytes, now_ns - item["sent_ns"])
        if item["number"] != self._items or not torch.equal(result, _expected(picture)):
            self._wrong.append(f"item {item['number']} ({picture.kind} {picture.source})")
        self._items += 1

    def check(self) -> None:
        """See that all came, in order, and all were right.

        Raises:
            Failure: they did not, or were not.
        """
        if self._wrong:
            raise Failure(f"{len(self._wrong)} of {self._items} results are wrong or out of order: {self._wrong[0]}")
        if self._items != self.job.items:
            raise Failure(f"{self._items} results arrived, of {self.job.items}")

    @property
    def seconds(self) -> float:
        """From the first put of the stream to its last result."""
        return (self._ended_ns - self._began_ns) / 1e9

    def hops(self) -> list[Hop]:
        """Return the record of the messages that went one at a time."""
        return [Hop(*key, times) for key, times in sorted(self._one_way.items())]

    def _note(self, name: str, picture: Picture, nbytes: int, took_ns: int) -> None:
        self._one_way.setdefault((name, picture.kind, nbytes), []).append(took_ns)


def _image_bytes(result: torch.Tensor) -> int:
    """An image has a byte where its result has a float32: as many channels as there are filters."""
    return result.nbytes // 4
