"""The report of a measurement: frozen, documented under each field, to JSON and back, and as a table of 80 columns."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tensorpipe_ipc.benchmark.summary import Percentiles

__all__ = ["Floors", "LatencyReport", "LatencyResult", "MemoryUse", "Setup", "ThroughputReport", "ThroughputResult"]

MIB = 1 << 20
WIDTH = 80
_LATENCY_FOOT = (
    "One way, in microseconds: from before put to after get, by CLOCK_MONOTONIC, which all processes of a host share. One "
    "message at a time is on its way, a consumer waits for it, and each was compared. wake-up: 8 bytes through a pipe to a "
    "process that is blocked; memcpy: one copy of that size; both in turns with the messages, between the same processes. "
    "x floor: p50 as a multiple of {floor}, the median of the rounds' own."
)
_ROUND_TRIP_FOOT = (
    " Round trip: until the producer has got the answer, which is the message, put back by the consumer as soon as it has it; "
    "x floor: of twice as much."
)
_THROUGHPUT_FOOT = (
    "From before the first put to after the last get, on CLOCK_MONOTONIC, which all processes of a host share. CPU s: of all "
    "producers and consumers, for a million messages. us each: what one message takes of the time; memcpy: what one copy of "
    "that size takes, in turns with the stream; x copy: one as a multiple of the other. Medians of rounds. Before them, "
    "a stream was compared message by message; of each round, the count and every consumer's last message were."
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The setup of a measurement, and its machine."""

    pipeline: str
    """The pipeline, with its options."""
    copies: bool
    """Whether a message crosses by a copy, so that a memcpy is part of its floor."""
    producers: int
    """How many processes put."""
    consumers: int
    """How many processes get."""
    method: str
    """How they were started: fork, spawn or forkserver."""
    pin: bool
    """Whether each was bound to a CPU."""
    load: float
    """How many processes wanted to run when it began, averaged over a minute: what others want, they take from this."""
    machine: dict[str, str]
    """The processor's name, how many CPUs they might use ("cores"), the system, and versions."""


@dataclasses.dataclass(frozen=True)
class Floors:
    """The least that the machine lets a message take, found in turns with the messages."""

    wake_up: Percentiles
    """8 bytes through a pipe, one way, to a process that is blocked in read."""
    memcpy: Percentiles
    """One copy of the message's bytes into memory that was written before."""


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """The memory that the measurement's processes, the caller's among them, took between warm-up and end."""

    unique_growth_bytes: int
    """Memory that one process alone has (USS), of all."""
    shared_growth_bytes: int
    """Memory that several have, each page once."""
    arena_bytes: int
    """At its end: shared memory of queues. Pages that a living process has touched are part of the others, too."""


@dataclasses.dataclass(frozen=True)
class LatencyResult:
    """Of one kind of message."""

    name: str
    """Its size, its shape, or the name of what makes it."""
    nbytes: int
    """Bytes of its tensors and arrays."""
    one_way: Percentiles
    """From before put to after get."""
    p50_low_us: float
    """The median is no less, with 95 % confidence, as far as the rounds tell."""
    p50_high_us: float
    """Nor more."""
    floors: Floors
    """What the machine took meanwhile."""
    times_floor: float
    """The p50, as a multiple of a wake-up, and, unless messages are lent, one memcpy. The median of the rounds' own."""
    rounds: int
    """In how many it was measured, and the floors with it."""
    settled: bool
    """Whether the median (of the round trips, if there were) is known to 5 % of it. If not, the time was over."""
    memory: MemoryUse
    """What it cost."""
    round_trip: Percentiles | None = None
    """From before the producer's put to after its get of the answer; None: not asked for."""
    round_trip_times_floor: float | None = None
    """Its p50, as ``times_floor`` has it, of twice as much."""


@dataclasses.dataclass(frozen=True)
class ThroughputResult:
    """Of one kind of message. Figures are medians of rounds."""

    name: str
    """Its size, its shape, or the name of what makes it."""
    nbytes: int
    """Bytes of its tensors and arrays."""
    messages_per_second: float
    """By all producers, to all consumers."""
    low_per_second: float
    """That median is no less, with 95 % confidence, as far as the rounds tell."""
    high_per_second: float
    """Nor more."""
    gib_per_second: float
    """Of the messages' bytes, 2**30 each."""
    producer_cpu_s_per_million: float
    """CPU seconds of the producers for a million messages."""
    consumer_cpu_s_per_million: float
    """And of the consumers."""
    floors: Floors
    """What the machine took meanwhile."""
    times_memcpy: float
    """The time that one message takes of the whole, as a multiple of one memcpy. The median of the rounds' own."""
    messages_a_round: int
    """How many."""
    rounds: int
    """In how many it was measured, and the floors with it."""
    settled: bool
    """Whether the rate is known to 5 % of it. If not, the time was over."""
    memory: MemoryUse
    """What it cost."""


_Report = TypeVar("_Report", bound="_OfResults")


@dataclasses.dataclass(frozen=True)
class _OfResults:
    setup: Setup
    """The setup of a measurement, and its machine."""
    results: tuple[Any, ...]

    def to_json(self) -> str:
        """Everything, as a JSON object."""
        return json.dumps({"kind": type(self).__name__, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls: type[_Report], text: str) -> _Report:
        """Read a report that ``to_json`` made.

        Raises:
            ValueError: it is of another kind, or no JSON.
            KeyError, TypeError: it is of another version.
        """
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("kind") != cls.__name__:
            raise ValueError(f"no {cls.__name__}: {text[:40]!r}...")
        return cls(Setup(**found["setup"]), tuple(map(_result_of(cls), found["results"])))

    def _foot(self, text: str) -> list[str]:
        setup = self.setup
        who = f"{_count(setup.producers, 'producer')} and {_count(setup.consumers, 'consumer')}, started by {setup.method}"
        pinned = "each bound to a CPU" if setup.pin else "bound to no CPU"
        said = f"{who}, {pinned}; load {setup.load:.1f}"
        machine = ", ".join(f"{name} {value}" for name, value in setup.machine.items())
        return ["", *_wrapped(text, ""), *_wrapped(setup.pipeline), *_wrapped(said), *_wrapped(machine)]


@dataclasses.dataclass(frozen=True)
class LatencyReport(_OfResults):
    """The time that messages take, one way."""

    results: tuple[LatencyResult, ...]
    """One for each kind of message."""

    def __str__(self) -> str:
        """Return a table for people, with what it means."""
        lines = [_row("one way, us", ("p50", "p90", "p99", "p99.9", "max"), ("wake-up", "memcpy", "x floor"))]
        for result in self.results:
            floors = [_us(floor.p50_us) for floor in (result.floors.wake_up, result.floors.memcpy)]
            lines.append(_row(result.name, _figures(result.one_way), (*floors, f"{result.times_floor:.2f}")))
            if result.round_trip is not None:
                times_floor = f"{result.round_trip_times_floor:.2f}"
                lines.append(_row("round trip", _figures(result.round_trip), ("", "", times_floor)))
        for result in self.results:
            spread = f"p50 from {_us(result.p50_low_us)} to {_us(result.p50_high_us)}"
            lines += _wrapped(
                f"{result.name}: {_rounds(result, result.one_way.samples)}, {spread}; {_memory(result.memory)}"
            )
        floor = "both together" if self.setup.copies else "a wake-up, as nothing is copied"
        foot = _LATENCY_FOOT.format(floor=floor)
        if any(result.round_trip for result in self.results):
            foot += _ROUND_TRIP_FOOT
        return "\n".join([*lines, *self._foot(foot)])


@dataclasses.dataclass(frozen=True)
class ThroughputReport(_OfResults):
    """The number of messages a second."""

    results: tuple[ThroughputResult, ...]
    """One for each kind of message."""

    def __str__(self) -> str:
        """Return a table for people, with what it means."""
        lines = [_row("stream", ("messages/s", "GiB/s", "CPU s"), ("us each", "memcpy", "x copy"), 12)]
        for result in self.results:
            cpu = result.producer_cpu_s_per_million + result.consumer_cpu_s_per_million
            rates = (f"{result.messages_per_second:,.0f}", f"{result.gib_per_second:.3g}", _us(cpu))
            times = (
                _us(1e6 / result.messages_per_second),
                _us(result.floors.memcpy.p50_us),
                _us(result.times_memcpy),
            )
            lines.append(_row(result.name, rates, times, 12))
        for result in self.results:
            spread = f"{result.low_per_second:,.0f} to {result.high_per_second:,.0f} a second"
            rounds = _rounds(result, result.rounds * result.messages_a_round)
            lines += _wrapped(f"{result.name}: {rounds}, {spread}; {_memory(result.memory)}")
        return "\n".join([*lines, *self._foot(_THROUGHPUT_FOOT)])


def _result_of(report: type[Any]) -> Callable[[dict[str, Any]], Any]:
    kind = LatencyResult if report is LatencyReport else ThroughputResult

    def made(found: dict[str, Any]) -> Any:
        floors = Floors(*(Percentiles(**found["floors"][name]) for name in ("wake_up", "memcpy")))
        nested: dict[str, Any] = {"floors": floors, "memory": MemoryUse(**found["memory"])}
        if "one_way" in found:
            nested["one_way"] = Percentiles(**found["one_way"])
        if found.get("round_trip") is not None:
            nested["round_trip"] = Percentiles(**found["round_trip"])
        return kind(**{**found, **nested})

    return made


def _row(name: str, left: Sequence[str], right: Sequence[str], width: int = 9) -> str:
    cells = "".join(f"{cell:>{width}}" for cell in left) + "".join(f"{cell:>8}" for cell in right)
    room = WIDTH - len(cells)
    return f"{name:{room}}{cells}" if len(name) <= room else f"{name[:WIDTH]}\n{'':{room}}{cells}"


def _figures(times: Percentiles) -> tuple[str, ...]:
    return tuple(map(_us, (times.p50_us, times.p90_us, times.p99_us, times.p999_us, times.max_us)))


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 100 else f"{value:.1f}"


def _rounds(result: LatencyResult | ThroughputResult, messages: int) -> str:
    known = "" if result.settled else " (not settled: the time was over)"
    return f"{messages:,} messages in {result.rounds} rounds{known}"


def _memory(memory: MemoryUse) -> str:
    return f"memory grew by {memory.unique_growth_bytes / MIB:,.1f} MiB unique, {memory.shared_growth_bytes / MIB:,.1f} shared"


def _count(number: int, of: str) -> str:
    return f"{number} {of}" if number == 1 else f"{number} {of}s"


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent)
