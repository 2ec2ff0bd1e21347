"""However a program with a DataLoader ends, or its workers do: all end soon, and nothing is left.

As torch's own ``test_proper_exit``, with the ways to die that it leaves out, since they hang there now and then.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from arenas import small_context
from programs import outliving
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

LIMIT = 25.0  # seconds: a worker looks for its program every five, and so does the loader for its workers
SIZE = 50_000


class How(NamedTuple):
    """One case."""

    method: str  # how the end comes
    iterable: bool
    pin_memory: bool
    hold: bool  # a reference to the iterator until the interpreter ends
    persistent: bool


METHODS = {"none": 0, "loader error": 1, "loader kill": -signal.SIGKILL, "worker error": 1, "worker kill": 1}
GRID = [How(*each) for each in itertools.product(METHODS, *[(False, True)] * 4)]


def fails(method: str) -> None:
    """Kill this process, or raise an error, as ``method`` says."""
    if method.endswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("as it was told to")


class Items(Dataset):
    """Large tensors, one of which may be the end."""

    def __init__(self, method: str) -> None:
        self.method = method

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        if i == 13 and self.method.startswith("worker"):
            fails(self.method)
        return torch.full((SIZE,), float(i))


class Stream(IterableDataset):
    """The same, as a stream."""

    def __init__(self, method: str) -> None:
        self.items = Items(method)

    def __iter__(self) -> Any:
        return (self.items[i] for i in range(get_worker_info().id, 24, 2))


held = []


def run(how: Any, line: Any) -> None:
    """The program."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # tracebacks are expected
    warnings.simplefilter("ignore")  # torch's, that there is no GPU to page-lock for
    torch.set_num_threads(1)
    ctx = small_context("fork")
    loader = DataLoader(
        (Stream if how.iterable else Items)(how.method),
        2,
        num_workers=2,
        pin_memory=how.pin_memory,
        persistent_workers=how.persistent,
        multiprocessing_context=ctx,
        collate_fn=ctx.collate,
    )
    batches = iter(loader)
    line.send([worker.pid for worker in batches._workers])
    if how.hold:
        held.append(batches)
    for number, batch in enumerate(batches):
        assert batch.shape[1:] == (SIZE,)
        if number == 4 and how.method.startswith("loader"):
            fails(how.method)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            each, id=" ".join(str(value) for value in each), marks=[] if each == GRID[-1] else pytest.mark.kills
        )
        for each in GRID
    ],
)
def test_all_end_soon_and_leave_nothing(how: Any) -> None:
    fork = multiprocessing.get_context("fork")
    line, theirs = fork.Pipe()
    program = fork.Process(target=run, args=(how, theirs))
    program.start()
    assert line.poll(LIMIT)
    workers = line.recv()
    program.join(LIMIT)
    code = program.exitcode
    left = outliving([program.pid, *workers], LIMIT)
    program.join()
    line.close()
    theirs.close()
    program.close()
    assert (code, left) == (METHODS[how.method], [])
