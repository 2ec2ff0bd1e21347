"""One item of growth each: rows of where it was measured (``at``), microseconds (``us``) and bytes (``memory``).

Memory is the proportional memory of both processes, beyond what they had at the first row.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import psutil

from bench.all.programs import HOLD, LEAF, ONE_WAY, STREAM, Message
from bench.queue.crew import Crew, Link, Program
from bench.queue.flat import crowd
from bench.queue.programs import warm
from bench.queue.rivals import Ours, pattern
from tensorpipe_ipc.queues.tensor_queue import Queue

__all__ = ["by_depth", "by_leases", "by_leaves", "by_messages", "by_peers", "by_size"]

SIZES = (8, 64, 400, 4_000, 40_000, 400_000, 4_000_000, 40_000_000, 1 << 28, 1 << 30)
LEAVES = (1, 10, 100, 1_000, 10_000)
LEASES = (1, 10, 100, 1_000, 10_000)
DEPTHS = (1, 10, 100, 1_000, 10_000)
PEERS = (1, 2, 4, 8, 16, 32)
MESSAGES = 10_000_000
ROUNDS = 9
SMALL, LEASED, LARGE = 400, 40_000, 100_000_000
CHUNK, BOUND = 4096, 64
SECONDS = 0.1  # of a turn, about

Tell = Callable[[str], None]
Rows = Iterator[dict[str, Any]]


def by_size(scale: float, tell: Tell) -> Rows:
    """One message of so many bytes at a time."""
    room = psutil.virtual_memory().available / 6  # made, sent, two kept, and what the arena keeps
    whats = {nbytes: Message(nbytes) for nbytes in SIZES if nbytes <= room}
    yield from _alternating(whats, scale, tell, "size")
    for nbytes in SIZES:
        if nbytes > room:
            yield {"at": nbytes, "left out": f"a sixth of the memory that is left has {room:,.0f} bytes"}


def by_leaves(scale: float, tell: Tell) -> Rows:
    """A dict of so many tensors of 1 kB at a time."""
    yield from _alternating({leaves: Message(LEAF, leaves) for leaves in LEAVES}, scale, tell, "leaves")


def _alternating(whats: dict[int, Message], scale: float, tell: Tell, word: str) -> Rows:
    """Each message in a crew of its own, all in every round."""
    found: dict[int, list[Sequence[float]]] = {at: [] for at in whats}
    counts: dict[int, int] = {}
    memory: dict[int, int] = {}
    for number in range(max(2, round(ROUNDS * scale)) + 1):
        with ExitStack() as stack:
            for at, what in whats.items():
                if not number and what.nbytes > LARGE:  # seconds each, of which a warmer start would take little
                    continue
                tell(f"growth with {word}: {at:,}")
                crew = Crew(Ours(0), halves=True)
                stack.callback(crew.close)
                before = sum(crew.run(MEMORY))
                start = time.monotonic()
                times = _one_way(crew, what, counts.get(at, 3))
                counts.setdefault(at, max(3, min(200, int(3 * SECONDS / (time.monotonic() - start)))))
                memory[at] = sum(crew.run(MEMORY)) - before
                stack.close()  # a large one's memory goes before the next
                if number:
                    found[at].append(times)
    for at, rounds in found.items():
        yield {"at": at, "us": _median(rounds), "memory": memory[at]}


def by_leases(scale: float, tell: Tell) -> Rows:
    """One way of 40 kB, which arrives as a lease, while the receiver holds so many."""
    with ExitStack() as stack:
        crew = Crew(Ours(0), halves=True)
        stack.callback(crew.close)
        held, before = 0, sum(crew.run(MEMORY))
        for leases in LEASES:
            tell(f"growth with leases held: {leases:,}")
            crew.run(HOLD, Message(LEASED), leases - held)
            held = leases
            rounds = [_one_way(crew, Message(LEASED), 50) for _ in range(max(2, round(ROUNDS * scale)))]
            yield {"at": leases, "us": _median(rounds), "memory": sum(crew.run(MEMORY)) - before}


def by_depth(scale: float, tell: Tell) -> Rows:
    """A put and a get of 400 B, while so many messages wait in the queue."""
    with ExitStack() as stack:
        crew = Crew(Ours(0), halves=True)
        stack.callback(crew.close)
        before, waiting = sum(crew.run(MEMORY)), 0
        for depth in DEPTHS:
            tell(f"growth with messages that wait: {depth:,}")
            turns = crew.run(DEPTH, depth - waiting, max(2, round(ROUNDS * scale)))[0]
            waiting = depth
            yield {"at": depth, "us": _median(turns), "memory": sum(crew.run(MEMORY)) - before}


def by_peers(scale: float, tell: Tell) -> Rows:
    """One way of 400 B to a process beside which so many are attached, of whom one sends."""
    for count in PEERS:
        tell(f"growth with processes attached: {count}")
        with ExitStack() as stack:
            rival = Ours(0)
            crew = Crew(rival, halves=True)
            stack.callback(crew.close)
            stack.enter_context(crowd(rival, count - 1))
            before = sum(crew.run(MEMORY))
            rounds = [_one_way(crew, Message(SMALL), 100) for _ in range(max(2, round(ROUNDS * scale)))]
            yield {"at": count, "us": _median(rounds), "memory": sum(crew.run(MEMORY)) - before}


def by_messages(scale: float, tell: Tell) -> Rows:
    """One way of 400 B after so many messages have passed."""
    most = max(4 * CHUNK, round(MESSAGES * min(1.0, scale)))
    with ExitStack() as stack:
        crew = Crew(Ours(BOUND), halves=True)
        stack.callback(crew.close)
        for _ in range(3):  # until both have what they need
            crew.run(STREAM, Message(SMALL), CHUNK)
        before, passed, at = sum(crew.run(MEMORY)), 3 * CHUNK, 4 * CHUNK
        while at <= most:
            while passed < at:
                tell(f"growth with messages passed: {passed:,} of {most:,}")
                for _ in range(min(16, -(-(at - passed) // CHUNK))):
                    crew.run(STREAM, Message(SMALL), CHUNK)
                    passed += CHUNK
            rounds = [_one_way(crew, Message(SMALL), 100) for _ in range(3)]
            yield {"at": max(at, passed), "us": _median(rounds), "memory": sum(crew.run(MEMORY)) - before}
            at = min(at * 4, most) if at < most else most + 1


def _one_way(crew: Crew, what: Message, count: int) -> Sequence[float]:
    starts, ends = crew.run(ONE_WAY, what, count)
    return [(end - start) / 1e3 for start, end in zip(warm(starts), warm(ends), strict=True)]


def _median(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    medians = sorted(sorted(times)[len(times) // 2] for times in rounds)
    return {"median": medians[len(medians) // 2], "lowest": medians[0], "highest": medians[-1]}


def _memory(_: Link) -> int:
    gc.collect()
    return int(psutil.Process().memory_full_info().pss)


def _deepen(link: Link, more: int, rounds: int) -> list[list[float]]:
    queue: Queue = getattr(link.there, "queue")  # noqa: B009
    message, turns = pattern(SMALL), []
    for _ in range(more):
        queue.put(message)
    for _ in range(rounds):
        times = []
        for _ in range(50):
            start = time.perf_counter()
            queue.put(message)
            queue.get()
            times.append((time.perf_counter() - start) * 1e6)
        turns.append(times)
    return turns


def _stand_by(link: Link, more: int, rounds: int) -> None:
    """The receiver takes nothing, and is attached."""


MEMORY = Program(_memory, _memory)
DEPTH = Program(_deepen, _stand_by)
