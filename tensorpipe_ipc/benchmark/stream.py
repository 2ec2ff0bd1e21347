"""``throughput``: how many messages go in a second."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from tensorpipe_ipc.benchmark.crew import Crew
from tensorpipe_ipc.benchmark.measuring import (
    TURN,
    FloorTimes,
    Plan,
    Tell,
    deadlines_of,
    floor_times,
    floors_of,
    memory_of,
    plan_of,
    rounds_of,
    started,
)
from tensorpipe_ipc.benchmark.messages import Make
from tensorpipe_ipc.benchmark.pipelines import Pipeline
from tensorpipe_ipc.benchmark.programs import AHEAD, AHEAD_AT_MOST, STREAM, Streamed, shares
from tensorpipe_ipc.benchmark.report import ThroughputReport, ThroughputResult
from tensorpipe_ipc.benchmark.summary import interval
from tensorpipe_ipc.errors import MeasurementFailed
from tensorpipe_ipc.tracking import MemoryTracker

__all__ = ["checked", "throughput"]

MOST = 20_000  # messages of a turn
LEAST, FEWEST = 64, 4  # messages of a turn, at least: of fewer, most is the first's way; of large ones the latter
MORE = 64  # times as many as in the one before, at most
CHECKED = 256 << 20  # bytes of messages that are compared, one by one, before the clock counts
GIB = 1 << 30


class _Round(NamedTuple):
    seconds: float
    producer_cpu: int  # nanoseconds
    consumer_cpu: int
    floors: FloorTimes


def throughput(
    pipeline: Pipeline | None = None,
    sizes: Iterable[str | int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tree: str = "tensor",
    make: Make | None = None,
    producers: int = 1,
    consumers: int = 1,
    method: str | None = None,
    pin: bool = True,
    seconds: float = 8.0,
    patience: float = 30.0,
    tell: Tell | None = None,
) -> ThroughputReport:
    """Measure how many messages go in a second, and what CPU time they take.

    Messages are made before the clock starts; up to 64 MiB of them are put again and again. Into ``Ends`` each is put once
    only, as some queues share what is put; so a turn has as many as 256 MiB hold, and at least four.

    Args:
        pipeline, sizes, dtype, tree, make, method, pin, patience, tell: as ``latency`` has them. What is lent
            (``loan=True``) is filled, by one copy, while the clock runs.
        producers: how many processes put, all at once.
        consumers: how many processes get, all from one pipeline.
        seconds: as ``latency`` has it: until the median rate is known to 5 %.

    Raises:
        Exception: as ``latency`` does.
    """
    plan = plan_of(
        pipeline,
        sizes,
        dtype=dtype,
        tree=tree,
        make=make,
        producers=producers,
        consumers=consumers,
        method=method,
        pin=pin,
        seconds=seconds,
        patience=patience,
        tell=tell,
    )
    with started(plan) as (crew, setup):
        deadlines = deadlines_of(plan)
        return ThroughputReport(
            setup, tuple(_result(plan, crew, number, deadlines) for number in range(len(plan.cases)))
        )


def checked(put: list[Streamed], got: list[Streamed], every: bool, what: str) -> None:
    """See that what was put is what was got.

    Args:
        every: whether each message was looked at, and not only each consumer's last.
        what: in words, for errors.

    Raises:
        MeasurementFailed: it is not.
    """
    sent, taken = sum(each.messages for each in put), sum(each.messages for each in got)
    if sent != taken:
        raise MeasurementFailed(f"{what}: {sent} messages were put, and {taken} came")
    left: dict[int, int] = {}
    for each in put:
        for number, bits in enumerate(each.digests):
            times = len(range(number, each.messages, len(each.digests)))
            left[bits] = left.get(bits, 0) + times
    for bits in (bits for each in got for bits in each.digests):
        left[bits] = left.get(bits, 0) - 1
        if left[bits] < 0:
            which = "one of" if every else "the last that a consumer took of"
            raise MeasurementFailed(f"{what}: {which} {sent} messages is none that was put: it came damaged, or twice")


def _result(plan: Plan, crew: Crew, number: int, deadlines: Iterator[float]) -> ThroughputResult:
    case, deadline = plan.cases[number], next(deadlines)
    count = _at_least(plan, case.nbytes)
    each = _stream(plan, crew, number, count).seconds / count
    while (fitting := _fitting(plan, case.nbytes, each)) > 2 * count:  # of a few messages, most is the first's
        count = min(fitting, MORE * count)
        each = _stream(plan, crew, number, count).seconds / count
    _stream(plan, crew, number, max(plan.producers, min(count, CHECKED // max(1, case.nbytes))), every=True)
    with MemoryTracker(None) as memory:
        rounds, settled = rounds_of(
            plan,
            number,
            deadline,
            lambda: _stream(plan, crew, number, count),
            lambda found: found.seconds,
        )
    seconds = [found.seconds / count for found in rounds]
    low, high = interval(seconds)
    rate = 1 / statistics.median(seconds)
    return ThroughputResult(
        name=case.name,
        nbytes=case.nbytes,
        messages_per_second=rate,
        low_per_second=1 / high,
        high_per_second=1 / low,
        gib_per_second=rate * case.nbytes / GIB,
        producer_cpu_s_per_million=statistics.median(found.producer_cpu for found in rounds) / count / 1000,
        consumer_cpu_s_per_million=statistics.median(found.consumer_cpu for found in rounds) / count / 1000,
        floors=floors_of([found.floors for found in rounds]),
        times_memcpy=statistics.median(
            found.seconds / count * 1e9 / statistics.median(found.floors.memcpy) for found in rounds
        ),
        messages_a_round=count,
        rounds=len(rounds),
        settled=settled,
        memory=memory_of(memory),
    )


def _fitting(plan: Plan, nbytes: int, seconds_each: float) -> int:
    """Return how many messages a turn has."""
    most = MOST if plan.pipeline.has_read else AHEAD_AT_MOST // max(1, nbytes)
    wanted = min(TURN, plan.seconds / len(plan.cases) / 12) / seconds_each
    return max(_at_least(plan, nbytes), min(MOST, most, int(wanted)) // plan.producers * plan.producers)


def _at_least(plan: Plan, nbytes: int) -> int:
    each = max(FEWEST, min(LEAST // plan.producers, AHEAD // max(1, nbytes)))
    return plan.producers * each


def _stream(plan: Plan, crew: Crew, number: int, count: int, *, every: bool = False) -> _Round:
    case = plan.cases[number]
    floors = floor_times(crew, case, number)
    ahead = max(2, AHEAD // max(1, case.nbytes)) if plan.pipeline.has_read else count
    what = f"{case.name}, stream"
    put, got = crew.run(STREAM, number, shares(count, plan.producers), ahead, every, what=what)
    checked(put, got, every, what)
    ended = max(each.at for each in got if each.messages)
    return _Round(
        (ended - min(each.at for each in put)) / 1e9,
        sum(each.cpu for each in put),
        sum(each.cpu for each in got),
        floors,
    )
