"""``latency``: how long messages take, one at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
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
from tensorpipe_ipc.benchmark.programs import ONE_WAY, ROUND_TRIP, Arrival, shares
from tensorpipe_ipc.benchmark.report import LatencyReport, LatencyResult
from tensorpipe_ipc.benchmark.summary import interval, percentiles
from tensorpipe_ipc.errors import MeasurementFailed
from tensorpipe_ipc.tracking import MemoryTracker

__all__ = ["latency", "one_ways"]

MOST = 500  # messages of a turn
MORE = 8  # times as many as in the one before, at most


class _Times(NamedTuple):
    """Nanoseconds of each message of a turn."""

    there: list[int]
    and_back: list[int]  # none, where round trips are not asked for


class _Round(NamedTuple):
    times: _Times
    floors: FloorTimes


def latency(
    pipeline: Pipeline | None = None,
    sizes: Iterable[str | int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tree: str = "tensor",
    make: Make | None = None,
    producers: int = 1,
    consumers: int = 1,
    round_trip: bool = False,
    method: str | None = None,
    pin: bool = True,
    seconds: float = 8.0,
    patience: float = 30.0,
    tell: Tell | None = None,
) -> LatencyReport:
    """Measure how long messages take from before put to after get, one at a time, beside a wake-up and a memcpy.

    Args:
        pipeline: ``OverQueue``, ``OverEndpoint``, or ``Ends`` with a put and a get of your own; None: ``OverQueue()``.
        sizes: of messages: bytes ("400B", "4MB", 400) or the shape of a tensor ("64x3x224x224"); None: 400 B, 4 MB,
            and 100 MB, if there is memory for it: some 12 times as much.
        dtype: of all tensors.
        tree: "tensor": a message is one; "dict:N": it is a dict of N, which have the size together.
        make: makes a message, any that the pipeline takes, in the place of ``sizes``, ``dtype`` and ``tree``.
        producers: how many processes put, in turns: whichever the kernel wakes first.
        consumers: how many processes wait for each message.
        round_trip: the consumer puts back what it got, by another pipeline like that one; one way and round trip are both
            told. For one producer, one consumer and no loans.
        method: how processes are started: "fork", "spawn" or "forkserver", as multiprocessing has it; None: as
            multiprocessing does by default, and "spawn" for a GPU. Your own functions must then be such that it can.
        pin: bind each process to a CPU: producers from the first on, consumers from the last.
        seconds: for all rounds of all sizes. It takes less where the medians are known to 5 % before, and more only for
            three rounds of each.
        patience: seconds after which a turn that is not over has failed.
        tell: is told, now and then, how far it is (0 to 1), and what is measured.

    Raises:
        ValueError, TypeError: an argument is out of range, or a device is none here.
        UnknownSerializer: no serializer of that name.
        MeasurementFailed: a message came damaged, or not at all, or one of the processes failed.
        PeerLost: one of the processes died.
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
        round_trip=round_trip,
    )
    with started(plan) as (crew, setup):
        deadlines = deadlines_of(plan)
        return LatencyReport(setup, tuple(_result(plan, crew, number, deadlines) for number in range(len(plan.cases))))


def one_ways(starts: Iterable[Sequence[Arrival]], ends: Iterable[Sequence[Arrival]], what: str) -> list[int]:
    """Nanoseconds that each message took, in the order of time, however many put and got them.

    As one message at a time was on its way, what was got first is what was put first.

    Args:
        what: in words, for errors.

    Raises:
        MeasurementFailed: one came damaged, twice, or not at all.
    """
    put, got = (sorted(arrival for each in of for arrival in each) for of in (starts, ends))
    if len(put) != len(got):
        raise MeasurementFailed(f"{what}: {len(put)} messages were put, and {len(got)} came")
    for number, (start, end) in enumerate(zip(put, got, strict=True), 1):
        if start.digest != end.digest or end.at < start.at:
            raise MeasurementFailed(
                f"{what}: message {number} of {len(put)} is not the one that was put: it came damaged, twice, or before its "
                "turn"
            )
    return [end.at - start.at for start, end in zip(put, got, strict=True)]


def _result(plan: Plan, crew: Crew, number: int, deadlines: Iterator[float]) -> LatencyResult:
    case, deadline = plan.cases[number], next(deadlines)
    turn = _Turn(plan, crew, number)
    turn.messages()
    turn.messages()
    turn.floors()
    with MemoryTracker(None) as memory:
        rounds, settled = rounds_of(
            plan, number, deadline, turn.round, lambda found: statistics.median(found.times[-1] or found.times[0])
        )
    medians = [statistics.median(found.times.there) / 1000 for found in rounds]
    trips = [time for found in rounds for time in found.times.and_back]
    low, high = interval(medians)
    return LatencyResult(
        name=case.name,
        nbytes=case.nbytes,
        one_way=percentiles([time for found in rounds for time in found.times.there]),
        p50_low_us=low,
        p50_high_us=high,
        floors=floors_of([found.floors for found in rounds]),
        times_floor=statistics.median(_times_floor(plan, found, found.times.there) for found in rounds),
        round_trip=percentiles(trips) if trips else None,
        round_trip_times_floor=(
            statistics.median(_times_floor(plan, found, found.times.and_back) / 2 for found in rounds)
            if trips
            else None
        ),
        rounds=len(rounds),
        settled=settled,
        memory=memory_of(memory),
    )


class _Turn:
    """One kind of message's turn, with as many messages as there is time for: a message takes what it took last."""

    def __init__(self, plan: Plan, crew: Crew, number: int) -> None:
        self._plan, self._crew, self._number, self._case = plan, crew, number, plan.cases[number]
        self._seconds = min(TURN, plan.seconds / len(plan.cases) / 12)
        self.count = (
            2 * plan.producers
        )  # the first is slow; and a second needs memory of its own, as the first is still held

    def round(self) -> _Round:
        floors = self.floors()
        return _Round(self.messages(), floors)

    def floors(self) -> FloorTimes:
        return floor_times(self._crew, self._case, self._number)

    def messages(self) -> _Times:
        """Return a turn of messages, which decides how many the next one has."""
        producers, begun = self._plan.producers, time.monotonic()
        what = f"{self._case.name}, {'round trip' if self._plan.round_trip else 'one way'}"
        counts = shares(self.count, producers)
        trips: list[int] = []
        if self._plan.round_trip:
            found, ends = self._crew.run(ROUND_TRIP, self._number, counts, what=what)
            starts = [[start for start, _ in found[0]]]
            trips = one_ways(starts, [[end for _, end in found[0]]], what)
        else:
            starts, ends = self._crew.run(ONE_WAY, self._number, counts, what=what)
        times = one_ways(starts, ends, what)
        at = sorted(start.at for each in starts for start in each)
        each = (at[-1] - at[0]) / 1e9 / (len(at) - 1) if len(at) > 1 else time.monotonic() - begun
        fitting = min(int(self._seconds / each), MORE * self.count, MOST)
        self.count = producers * max(1, fitting // producers)
        return _Times(times, trips)


def _times_floor(plan: Plan, found: _Round, times: list[int]) -> float:
    copied = statistics.median(found.floors.memcpy) if plan.pipeline.copies else 0
    return statistics.median(times) / (statistics.median(found.floors.wake_up) + copied)
