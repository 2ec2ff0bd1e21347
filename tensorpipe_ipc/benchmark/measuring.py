"""The course of both measurements: check the request, start processes, then give each kind of message its rounds.

**How many rounds.** A few messages warm up and tell what one takes, which decides how many a turn has. Then rounds follow,
in each of which the messages and both floors have a turn, until the median of the rounds' figures is known to 5 %
(``summary.is_settled``), or the time is over; but at least ``LEAST`` of them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from tensorpipe_ipc.benchmark.crew import Crew, Line
from tensorpipe_ipc.benchmark.machine import machine
from tensorpipe_ipc.benchmark.messages import Case, Make, case_of, cases_of
from tensorpipe_ipc.benchmark.pipelines import OverQueue, Pipeline
from tensorpipe_ipc.benchmark.programs import MEMCPY, WAKE_UP
from tensorpipe_ipc.benchmark.report import Floors, MemoryUse, Setup
from tensorpipe_ipc.benchmark.summary import is_settled, percentiles
from tensorpipe_ipc.headroom import headroom
from tensorpipe_ipc.limits import check_count, check_timeout
from tensorpipe_ipc.queues.context import get_context
from tensorpipe_ipc.tracking import MemoryTracker

__all__ = [
    "TURN",
    "FloorTimes",
    "Plan",
    "Tell",
    "deadlines_of",
    "floor_times",
    "floors_of",
    "memory_of",
    "plan_of",
    "rounds_of",
    "started",
]

SIZES = ("400B", "4MB", "100MB")
LEAST = 3  # rounds
TURN = 0.1  # seconds that the messages of one turn are to take, at most
MEMORY, MEMORY_EACH = (
    8,
    4,
)  # messages that are in memory at once: those in the pipeline and the floor's; each producer's
GIB = 1 << 30
WAKE_UPS, COPIES = 50, 32  # of a floor's turn, at most
COPIED = 32 << 20  # bytes of a floor's turn, at most, but for the first three copies

Tell = Callable[[float, str], None]
"""Is told how far it is, from 0 to 1, and what is measured."""

T = TypeVar("T")


class Plan(NamedTuple):
    """A request, checked."""

    pipeline: Pipeline
    cases: Sequence[Case]
    producers: int
    consumers: int
    method: str | None
    pin: bool
    seconds: float
    patience: float
    tell: Tell
    round_trip: bool


class FloorTimes(NamedTuple):
    """One round's, in nanoseconds."""

    wake_up: list[int]
    memcpy: list[int]


def plan_of(
    pipeline: Pipeline | None,
    sizes: Iterable[str | int] | None,
    *,
    dtype: torch.dtype,
    tree: str,
    make: Make | None,
    producers: int,
    consumers: int,
    method: str | None,
    pin: bool,
    seconds: float,
    patience: float,
    tell: Tell | None,
    round_trip: bool = False,
) -> Plan:
    """Check what was asked for. Arguments are those of ``latency``.

    Raises:
        ValueError, TypeError: something is out of range, or goes not with something else. Both are named.
    """
    pipeline = OverQueue() if pipeline is None else pipeline
    if make is not None and sizes is not None:
        raise ValueError("sizes and make: what make returns has its own size; give one of the two")
    producers, consumers = check_count(producers, "producers"), check_count(consumers, "consumers")
    pipeline.check(producers, consumers)
    if round_trip:
        _check_answers(pipeline, producers, consumers)
    if make is None:
        cases = cases_of(SIZES if sizes is None else sizes, dtype, tree, pipeline.device)
    else:
        cases = [case_of(make)]
    if not cases:
        raise ValueError("sizes: give at least one")
    times, room = MEMORY * (1 + round_trip) + MEMORY_EACH * producers, headroom()
    if make is None and sizes is None:
        cases = [case for case in cases if times * case.nbytes <= room] or cases[:1]
    for case in cases:
        if times * case.nbytes > room:
            raise ValueError(
                f"size {case.name}: to measure it takes about {times} times as much memory, {times * case.nbytes / GIB:,.1f} "
                f"GiB, and {room / GIB:,.1f} GiB are free; give a smaller one"
            )
    if method is None and pipeline.device not in (None, "cpu"):
        method = "spawn"  # which CUDA needs
    return Plan(
        pipeline,
        cases,
        producers,
        consumers,
        method,
        bool(pin),
        check_timeout(seconds, "seconds", ""),
        check_timeout(patience, "patience", ""),
        tell or _tell_nobody,
        round_trip,
    )


def _check_answers(pipeline: Pipeline, producers: int, consumers: int) -> None:
    if (producers, consumers) != (1, 1):
        raise ValueError(f"round_trip with {producers} producers and {consumers} consumers: it is of one and one")
    if getattr(pipeline, "loan", False):
        raise ValueError(
            "round_trip with loan=True: an answer is what came, and is not filled anew; give one of the two"
        )
    if pipeline.back is None:
        raise ValueError("round_trip: give Ends a back=Ends(...) too, with the consumer's put and the producer's get")


@contextmanager
def started(plan: Plan) -> Iterator[tuple[Crew, Setup]]:
    """The processes, with their pipelines, as long as the body lasts."""
    context = get_context(plan.method)
    setup = Setup(
        pipeline=repr(plan.pipeline),
        copies=plan.pipeline.copies,
        producers=plan.producers,
        consumers=plan.consumers,
        method=context.get_start_method(),
        pin=plan.pin,
        load=os.getloadavg()[0],
        machine=machine(),
    )
    plan.tell(0.0, "starting")
    with tempfile.TemporaryDirectory(prefix="tp-bench-", ignore_cleanup_errors=True) as folder:
        back = plan.pipeline.back if plan.round_trip else None
        lines = [
            Line(
                plan.pipeline.made(context, case.nbytes, plan.consumers, Path(folder) / str(number)),
                None if back is None else back.made(context, case.nbytes, 1, Path(folder) / f"{number}-back"),
                case.make,
            )
            for number, case in enumerate(plan.cases)
        ]
        crew = Crew(
            context,
            lines,
            producers=plan.producers,
            consumers=plan.consumers,
            pin=plan.pin,
            patience=plan.patience,
        )
        with crew:
            yield crew, setup


def rounds_of(
    plan: Plan, number: int, deadline: float, turn: Callable[[], T], figure: Callable[[T], float]
) -> tuple[list[T], bool]:
    """Return the figures of the rounds, and whether they are settled.

    Args:
        number: which kind of message it is.
        deadline: when it has to be done, by time.monotonic().
        turn: does a round.
        figure: what of a round is to be known well.
    """
    begun, case = time.monotonic(), plan.cases[number]
    plan.tell(number / len(plan.cases), case.name)
    found: list[T] = []
    figures: list[float] = []
    while True:
        before = time.monotonic()
        found.append(turn())
        figures.append(figure(found[-1]))
        now = time.monotonic()
        settled = is_settled(figures)
        if settled or (len(found) >= LEAST and 2 * now - before > deadline):
            return found, settled
        part = min(1.0, (now - begun) / max(1e-9, deadline - begun))
        plan.tell((number + part) / len(plan.cases), case.name)


def deadlines_of(plan: Plan) -> Iterator[float]:
    """Return the deadline of each kind of message. Time that one does not need is the next ones'."""
    end = time.monotonic() + plan.seconds
    for left in range(len(plan.cases), 0, -1):
        now = time.monotonic()
        yield now + max(0.0, end - now) / left


def floor_times(crew: Crew, case: Case, number: int) -> FloorTimes:
    """Return a turn of both floors."""
    starts, ends = crew.run(WAKE_UP, number, WAKE_UPS, what=f"{case.name}, waking up")
    copies = max(3, min(COPIES, COPIED // max(1, case.nbytes)))
    copied, _ = crew.run(MEMCPY, number, case.nbytes, copies, what=f"{case.name}, copying")
    return FloorTimes([end - start for start, end in zip(starts[0], ends[0], strict=True)], copied[0])


def floors_of(rounds: Sequence[FloorTimes]) -> Floors:
    """Return all rounds' together."""
    wake_ups = [time for each in rounds for time in each.wake_up]
    return Floors(percentiles(wake_ups), percentiles([time for each in rounds for time in each.memcpy]))


def memory_of(memory: MemoryTracker) -> MemoryUse:
    """Return the memory that a tracker without a thread found between its samples."""
    growth, last = memory.growth, memory.samples[-1]
    return MemoryUse(growth.uss or 0, growth.shared or 0, last.arena or 0)


def _tell_nobody(part: float, what: str) -> None:
    del part, what
