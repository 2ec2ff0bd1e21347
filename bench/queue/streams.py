"""Streams: how many messages a second, one sender and one receiver, at most 64 messages (of 4 MB: 4) on their way."""

from __future__ import annotations

from collections.abc import Sequence

from bench.queue.crew import Crew, Program
from bench.queue.field import ICEORYX, MEMCPY, OURS, SLOW, THEIRS, Effort, Make, field
from bench.queue.findings import Finding, Limit, Ratio, Row, ratio_of, row_of
from bench.queue.programs import STREAM, STREAM_MANY
from bench.queue.rivals import FasterFifo, Memcpy, Ours
from tensorpipe_ipc.queues.tensor_queue import Queue

__all__ = ["measure", "per_message"]

ROUNDS = 8
SMALL, LARGE = 400, 4_000_000
BATCHES, FASTER_BATCHES = "ours, put_many", "faster-fifo, put_many"
UNBOUNDED = "ours, no bound"


def measure(effort: Effort) -> Finding:
    """Streams of 400 B, one by one and in batches, and of 4 MB."""
    effort.tell("streams of 400 B")
    small: dict[str, Make] = {OURS: Ours, UNBOUNDED: lambda bound, nbytes: Ours(0, nbytes), **THEIRS}
    programs = {FASTER_BATCHES: STREAM_MANY}
    small[FASTER_BATCHES] = FasterFifo
    notes = []
    if hasattr(Queue, "put_many") and hasattr(Queue, "get_many"):
        # 64 at once need more room than one at a time, or both ends wait for each other
        small[BATCHES], programs[BATCHES] = lambda bound, nbytes: Ours(4 * bound, nbytes), STREAM_MANY
    else:
        notes.append(f"{BATCHES}: Queue has no put_many and get_many yet")
    rows: list[Row] = []
    ratios: list[Ratio] = []
    with field(small, SMALL, bound=64) as all_:
        count = effort.of(4096, 128) // 64 * 64
        times = all_.rounds(
            effort.of(ROUNDS, 2),
            lambda name, crew: per_message(
                crew, programs.get(name, STREAM), SMALL, count // 16 if name in SLOW else count
            ),
        )
    notes += all_.notes
    rows += [row_of("400 B", name, SMALL, rounds) for name, rounds in times.items()]
    ratios += ratio_of(times, OURS, Limit(ICEORYX, least=1.2), f"400 B: {OURS} to {ICEORYX}")
    ratios += ratio_of(times, BATCHES, Limit(ICEORYX, least=2), f"400 B: {BATCHES} to {ICEORYX}")
    effort.tell("streams of 4 MB")
    large: dict[str, Make] = {MEMCPY: Memcpy, OURS: Ours, **THEIRS}
    with field(large, LARGE, bound=4) as all_:
        count = effort.of(32, 8)
        times = all_.rounds(effort.of(ROUNDS, 2), lambda _, crew: per_message(crew, STREAM, LARGE, count))
    rows += [row_of("4 MB", name, LARGE, rounds) for name, rounds in times.items()]
    ratios += ratio_of(times, OURS, Limit(MEMCPY, least=0.9), f"4 MB: {OURS} to {MEMCPY}")
    return Finding("stream", "Stream, one sender and one receiver", "a second", rows, ratios, notes)


def per_message(crew: Crew, program: Program, nbytes: int, count: int) -> Sequence[float]:
    """Microseconds a message of one stream."""
    start, end = crew.run(program, nbytes, count)
    return [(end - start if end else start) / 1e3 / count]
