"""The turns of Pool.map and ProcessPoolExecutor.map: calls a second, with tensors of 4 MB or none."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from bench.dataloader.rivals import both, memory, rounds
from bench.dataloader.rows import Row, Turn, row_of

__all__ = ["CASES", "measure"]

ROUNDS = 15  # one is at times three times as quick as the next, whosever turn it is
WORKERS = 2
ITEMS = 1_000_000
# A turn of ours with 40 tensors takes but 35 ms, much of it the processes' coming up.
CALLS = {"a tensor there": 100, "a tensor back": 100, "there and back": 100, "no tensor": 4000}
LIMITS = {"a tensor there": 3.0, "a tensor back": 3.0, "there and back": 3.0, "no tensor": 1 / 1.05}
CASES = ("pool", "executor")


def _taken(tensor: torch.Tensor) -> float:
    return float(tensor[-1])


def _made(number: int) -> torch.Tensor:
    return torch.full((ITEMS,), float(number))


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def _next(number: int) -> int:
    return number + 1


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "a tensor there": _taken,
    "a tensor back": _made,
    "there and back": _doubled,
    "no tensor": _next,
}


class _Mapping:
    """One rival's workers. Results are looked at and let go as they come."""

    def __init__(self, case: str, what: str, scale: float, ctx: Any) -> None:
        self._what, self._count = what, max(8, round(CALLS[what] * scale))
        ctx = ctx if ctx is not None else multiprocessing.get_context("fork")
        self._pool: Any = (
            ctx.Pool(WORKERS, torch.set_num_threads, (1,))
            if case == "pool"
            else ProcessPoolExecutor(WORKERS, ctx, torch.set_num_threads, (1,))
        )
        self._map = getattr(self._pool, "imap" if case == "pool" else "map")

    def turn(self, looks: bool) -> Turn:
        """All calls. Each gets a tensor that was never sent before: torch's is quicker to send again."""
        numbers = range(self._count)
        takes = self._what in ("a tensor there", "there and back")
        arguments = [_made(number) for number in numbers] if takes else list(numbers)
        start = time.perf_counter()
        for number, result in zip(numbers, self._map(FUNCTIONS[self._what], arguments), strict=True):
            _check(self._what, number, result)
        rate = self._count / (time.perf_counter() - start)
        return Turn(rate, *(memory() if looks else (0, 0)))

    def close(self) -> None:
        """End its workers."""
        if hasattr(self._pool, "shutdown"):
            self._pool.shutdown()
        else:
            self._pool.terminate()
            self._pool.join()


def _check(what: str, number: int, result: Any) -> None:
    expected = {
        "a tensor there": number,
        "a tensor back": number,
        "there and back": 2 * number,
        "no tensor": number + 1,
    }
    if (float(result[-1]) if isinstance(result, torch.Tensor) else result) != expected[what]:
        raise ValueError(f"call {number} gave something else")


def measure(name: str, scale: float) -> list[Row]:
    """All rows of a case."""
    rows = []
    for what in CALLS:
        with both(lambda ctx, what=what: _Mapping(name, what, scale, ctx)) as lines:  # type: ignore[misc]
            turns = rounds(lines, max(2, round(ROUNDS * scale)))
        rows.append(row_of(name, what, WORKERS, LIMITS[what], turns))
    return rows
