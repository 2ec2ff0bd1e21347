"""The programs of the two ends, and the moments at which the clock runs.

All times are of CLOCK_MONOTONIC (``time.perf_counter_ns`` on Linux), which is one clock for all processes of a host: a
time that one process read may be taken from one that another read.

*One way*: from before the producer's put to after the consumer's get. One message is on its way at a time. A consumer says
that it is about to wait; then a producer makes a message, in memory that is new, and stays awake for ``PAUSE``, in which
the consumer has blocked. What a message's bits amount to is taken before the clock starts and after it has stopped.

*Round trip*: likewise, but the consumer puts back what it got, and the producer's clock stops when it has got that.

*Stream*: from before the first put to after the last get; messages are made before. CPU time is that of the processes while
they put, and while they get.

*Wake-up*: one way of 8 bytes through a pipe, to a process that is blocked in read. *Memcpy*: one copy of a message's bytes
into memory that was written before. These two are the least that the machine lets a message take.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tensorpipe_ipc.benchmark.crew import Program, Station
from tensorpipe_ipc.benchmark.messages import digest
from tensorpipe_ipc.benchmark.pipelines import OVER

__all__ = ["MEMCPY", "ONE_WAY", "ROUND_TRIP", "STREAM", "WAKE_UP", "Arrival", "Streamed", "shares"]

PAUSE = (
    30_000  # nanoseconds: a consumer needs 5,000 to block; an idle core that has slept for longer is woken more slowly
)
AHEAD = 64 << 20  # bytes of messages that are made before a stream, if need be put again and again
AHEAD_AT_MOST = 256 << 20  # where each may be put only once

_clock = time.perf_counter_ns


class Arrival(NamedTuple):
    """One end of one message's way."""

    at: int
    """Nanoseconds of the clock."""
    digest: int
    """Of the message."""


class Streamed(NamedTuple):
    """One process's part of a stream."""

    messages: int
    at: int
    """When the producer began, or the consumer ended: nanoseconds of the clock."""
    cpu: int
    """Nanoseconds of CPU time."""
    digests: Sequence[int]
    """Of the messages that were put, in order and without repetition; of those that were looked at, of the got."""


def shares(count: int, among: int) -> list[int]:
    """``count`` messages among so many processes."""
    return [count // among + (index < count % among) for index in range(among)]


def _one_way_produce(station: Station, counts: Sequence[int]) -> list[Arrival]:
    put, ready, take = station.end.put, station.end.ready, station.turn.take
    found = []
    station.arrive()
    for _ in range(counts[station.index]):
        take()
        message = station.make()
        bits = digest(message)
        message = ready(message)
        _stay_awake()
        start = _clock()
        put(message)
        found.append(Arrival(start, bits))
    station.end.finish()  # or a consumer may be told that all is over before it has seen the last
    return found


def _one_way_consume(station: Station, counts: Sequence[int]) -> list[Arrival]:
    get, give, left = station.end.get, station.turn.give, sum(counts)
    found: list[Arrival] = []
    station.arrive()
    while station.shares or len(found) < left:
        message = get()
        at = _clock()
        if message is OVER:
            break
        found.append(Arrival(at, digest(message)))
        give()
    return found


def _round_trip_produce(station: Station, counts: Sequence[int]) -> list[tuple[Arrival, Arrival]]:
    """Return each message's start, and its answer's end."""
    put, take, back = station.end.put, station.turn.take, station.back
    assert back is not None
    get, found = back.get, []
    station.arrive()
    for _ in range(counts[station.index]):
        take()
        message = station.make()
        bits = digest(message)
        _stay_awake()
        start = _clock()
        put(message)
        answer = get()
        end = _clock()
        found.append((Arrival(start, bits), Arrival(end, digest(answer))))
    return found


def _round_trip_consume(station: Station, counts: Sequence[int]) -> list[Arrival]:
    get, give, back = station.end.get, station.turn.give, station.back
    assert back is not None
    answer, found = back.put, []
    station.arrive()
    for _ in range(sum(counts)):
        message = get()
        at = _clock()
        answer(message)
        found.append(Arrival(at, digest(message)))
        give()
    return found


def _wake_up_produce(station: Station, count: int) -> list[int]:
    found = []
    station.arrive()
    if station.index:
        return []
    _, wake = station.wake.descriptors()
    for _ in range(count):
        station.turn.take()
        _stay_awake()
        start = _clock()
        os.write(wake, b"8 bytes.")
        found.append(start)
    return found


def _wake_up_consume(station: Station, count: int) -> list[int]:
    found = []
    station.arrive()
    if station.index:
        return []
    wake, _ = station.wake.descriptors()
    for _ in range(count):
        os.read(wake, 8)
        found.append(_clock())
        station.turn.give()
    return found


def _memcpy(station: Station, nbytes: int, count: int) -> list[int]:
    station.arrive()
    if station.index:
        return []
    kept = station.kept
    if not kept or kept[0].nbytes != nbytes:
        # Written, so that their pages are there.
        kept[:] = [torch.ones(nbytes, dtype=torch.uint8, device="cpu") for _ in range(3)]
    source, *places = kept
    found = []
    for number in range(count):
        source.fill_(number & 0x7F)  # as a message is written before it is put
        place = places[number % len(places)]
        start = _clock()
        ctypes.memmove(place.data_ptr(), source.data_ptr(), nbytes)
        found.append(_clock() - start)
    return found


def _stream_produce(station: Station, counts: Sequence[int], ahead: int, checks: bool) -> Streamed:  # noqa: ARG001
    put, ready, finish = station.end.put, station.end.ready, station.end.finish
    count = counts[station.index]
    messages = [station.make() for _ in range(min(count, ahead))]
    bits = [digest(message) for message in messages]
    station.arrive()
    cpu, start = time.process_time_ns(), _clock()
    for number in range(count):
        put(ready(messages[number % len(messages)]))
    finish()
    return Streamed(count, start, time.process_time_ns() - cpu, bits)


def _stream_consume(station: Station, counts: Sequence[int], ahead: int, checks: bool) -> Streamed:  # noqa: ARG001
    get, left, taken = station.end.get, sum(counts), 0
    bits: list[int] = []
    message = last = None
    station.arrive()
    cpu, end = time.process_time_ns(), _clock()
    while station.shares or taken < left:
        message = get()
        if message is OVER:
            break
        taken, last = taken + 1, message
        end = _clock()
        if checks:
            bits.append(digest(message))
    used = time.process_time_ns() - cpu
    if not checks and last is not None:
        bits.append(digest(last))
    return Streamed(taken, end, used, bits)


def _stay_awake() -> None:
    end = _clock() + PAUSE
    while _clock() < end:
        pass


ONE_WAY = Program(_one_way_produce, _one_way_consume, takes_turns=True, is_shared=True)
ROUND_TRIP = Program(_round_trip_produce, _round_trip_consume, takes_turns=True)
WAKE_UP = Program(_wake_up_produce, _wake_up_consume, takes_turns=True)
MEMCPY = Program(_memcpy, None)
STREAM = Program(_stream_produce, _stream_consume, is_shared=True)
