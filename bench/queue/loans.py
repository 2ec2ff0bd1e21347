"""Loans and moves: 100 MB that are handed over and not copied, beside 400 B that are."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import tensorpipe_ipc
from bench.queue.field import Effort, Make, field
from bench.queue.findings import Finding, Limit, ratio_of, row_of
from bench.queue.one_way import one_way_of
from bench.queue.rivals import Ours, pattern
from tensorpipe_ipc.queues.tensor_queue import Queue

__all__ = ["measure"]

SMALL, LARGE = 400, 100_000_000
PUT, LOAN, MOVE = "put of 400 B", "loan of 100 MB", "move of 100 MB"
ROUNDS, MESSAGES = 6, 5


class _Loans(Ours):
    """Loans that are filled before the clock starts; it runs from the end of their with block."""

    def __init__(self, bound: int, nbytes: int = 0) -> None:
        super().__init__(bound, nbytes)
        self.send = lambda loan: loan.__exit__(None, None, None)

    def fresh(self, nbytes: int) -> Any:
        """An open loan."""
        queue: Any = self.queue
        loan = queue.loan((nbytes,), torch.uint8)
        loan.__enter__().copy_(pattern(nbytes))
        return loan


class _Moves(Ours):
    """Tensors that lie in the memory of the queue's context before the clock starts."""

    def __init__(self, bound: int, nbytes: int = 0) -> None:  # noqa: ARG002
        package: Any = tensorpipe_ipc
        self._context = package.get_context("fork")
        queue: Any = self._context.Queue(bound)
        self.send, self.receive = lambda tensor: queue.put(tensor, move=True), queue.get
        self.queue = queue

    def fresh(self, nbytes: int) -> Any:
        """A tensor in the context's memory."""
        return self._context.empty((nbytes,), dtype=torch.uint8).copy_(pattern(nbytes))


def measure(effort: Effort) -> Finding:
    """Measure what can be handed over without a copy, and a small put for comparison."""
    effort.tell("loans and moves")
    ours: dict[str, Make] = {PUT: Ours}
    notes = []
    if hasattr(Queue, "loan"):
        ours[LOAN] = _Loans
    else:
        notes.append(f"{LOAN}: Queue has no loan yet")
    if hasattr(tensorpipe_ipc, "get_context") and "move" in inspect.signature(Queue.put).parameters:
        ours[MOVE] = _Moves
    else:
        notes.append(f"{MOVE}: Queue.put has no move yet")
    sizes = {PUT: SMALL, LOAN: LARGE, MOVE: LARGE}
    with field(ours, LARGE) as all_:
        messages = effort.of(MESSAGES, 2)
        times = all_.rounds(effort.of(ROUNDS, 2), lambda name, crew: one_way_of(crew, sizes[name], messages))
    rows = [row_of("handed over", name, sizes[name], rounds) for name, rounds in times.items()]
    ratios = [ratio for name in (LOAN, MOVE) for ratio in ratio_of(times, name, Limit(PUT, most=2))]
    return Finding("loan", "One way, without a copy", "us", rows, ratios, notes)
