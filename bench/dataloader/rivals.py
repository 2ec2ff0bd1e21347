"""Two processes that do the same with a stock context and with ours, each when it is told to."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

import tensorpipe_ipc as tp
from bench.dataloader.rows import OURS, STOCK, Turn

__all__ = ["both", "memory", "rounds"]

PATIENCE = 180.0  # seconds for one turn
_PR_SET_PDEATHSIG = 1

Make = Callable[[Any], Any]  # of a context, or None for the stock one: what has a turn(), and a close()


@contextlib.contextmanager
def both(make: Make) -> Iterator[dict[str, Connection]]:
    """A line to each rival, which makes what has the turns in its own process."""
    fork = multiprocessing.get_context("fork")
    lines, processes = {}, []
    try:
        for name in (STOCK, OURS):
            lines[name], theirs = fork.Pipe()
            processes.append(fork.Process(target=_serve, args=(make, name, theirs)))
            processes[-1].start()
            theirs.close()
        yield lines
    finally:
        for line in lines.values():
            with contextlib.suppress(OSError):  # a rival that failed
                line.send(None)  # closing it says nothing: forks have it, too
            line.close()
        for process in processes:
            process.join(20)
            process.kill()
            process.join()


def rounds(lines: dict[str, Connection], count: int) -> dict[str, list[Turn]]:
    """So many rounds, after one that warms up.

    Raises:
        RuntimeError: a rival failed, gave something else than it was to give, or did not answer.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in lines}
    for number in range(count + 1):
        for name, line in lines.items():
            line.send(number == count)  # memory is looked at in the last
            if not line.poll(PATIENCE):
                raise RuntimeError(f"{name}: no answer within {PATIENCE:g} s")
            answer = line.recv()
            if not isinstance(answer, Turn):
                raise RuntimeError(f"{name} failed:\n{answer}")
            if number:
                turns[name].append(answer)
    return turns


def memory() -> tuple[int, int]:
    """Unique and proportional memory of this process and all its children, in bytes."""
    found = [each.memory_full_info() for each in (psutil.Process(), *psutil.Process().children(recursive=True))]
    return sum(each.uss for each in found), sum(each.pss for each in found)


def _serve(make: Make, name: str, line: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    made = None
    try:
        made = make(tp.get_context("fork") if name == OURS else None)
        while (looks := line.recv()) is not None:
            line.send(made.turn(looks))
    except Exception:
        line.send(traceback.format_exc())
    finally:
        if made is not None:
            made.close()
