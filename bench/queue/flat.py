"""The things that must not grow: with leases held, processes attached and messages passed."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from queue import Empty
from typing import Any

from bench.queue.crew import Crew
from bench.queue.field import Effort, Field
from bench.queue.findings import Finding, Limit, Ratio, ratio_of, row_of
from bench.queue.one_way import one_way_of
from bench.queue.programs import HOLD, MEMORY, STREAM
from bench.queue.rivals import Ours

__all__ = ["crowd", "measure"]

LEASED = 40_000  # bytes: enough to be a lease
LEASES, ATTACHED = 10_000, 32
MESSAGES, AT_MOST = 500_000, 10_000_000
ROUNDS = 10
NBYTES, BOUND = 400, 64
CHUNK = 4096  # messages made at a time


def measure(effort: Effort) -> Finding:
    """One way of 400 B in three crews at once: one as it is, one with leases, one with many attached; then memory."""
    effort.tell("leases held, processes attached")
    held, attached = effort.of(LEASES, 100), max(3, round(ATTACHED * min(1, effort.scale)))
    few, leases, many = "none, 2 attached", f"{held:,} leases", f"{attached} attached"
    with contextlib.ExitStack() as stack:
        crews = {name: Crew(Ours(0)) for name in (few, leases)}
        crowded = Ours(0)
        crews[many] = Crew(crowded)
        for crew in crews.values():
            stack.callback(crew.close)
        stack.enter_context(crowd(crowded, attached - 2))
        crews[leases].run(HOLD, LEASED, held)
        field = Field(crews, [])
        messages, rounds = effort.of(200, 10), effort.of(ROUNDS, 2)
        small = field.rounds(rounds, lambda _, crew: one_way_of(crew, NBYTES, messages))
        del crews[many]
        large = field.rounds(rounds, lambda _, crew: one_way_of(crew, LEASED, messages))
    rows = [row_of("400 B, one way", name, NBYTES, found) for name, found in small.items()]
    rows += [row_of("40 kB, one way", name, LEASED, found) for name, found in large.items()]
    ratios = [
        ratio
        for name in (leases, many)
        for ratio in ratio_of(small, name, Limit(few, most=1.2), f"400 B: {name} / {few}")
    ]
    ratios += ratio_of(large, leases, Limit(few, most=1.2), f"40 kB: {leases} / {few}")
    memory, note = _memory(effort)
    return Finding("flat", "What must not grow", "us", rows, ratios + memory, [note])


@contextlib.contextmanager
def crowd(rival: Ours, count: int) -> Iterator[None]:
    """So many more processes that are attached to a queue, and wait for this one to let them go."""
    context = multiprocessing.get_context("fork")
    attached, done = context.Semaphore(0), context.Event()
    processes: list[Any] = [context.Process(target=_attach, args=(rival, attached, done)) for _ in range(count)]
    for process in processes:
        process.start()
    for _ in processes:
        if not attached.acquire(timeout=60):
            raise RuntimeError("a process did not attach")
    try:
        yield
    finally:
        done.set()
        for process in processes:
            process.join()


def _attach(rival: Ours, attached: Any, done: Any) -> None:
    with contextlib.suppress(Empty):
        rival.queue.get_nowait()
    attached.release()
    done.wait()


def _memory(effort: Effort) -> tuple[list[Ratio], str]:
    """Unique memory of both ends, after many messages to before them."""
    messages = min(AT_MOST, effort.of(MESSAGES, CHUNK))
    with contextlib.ExitStack() as stack:
        crew = Crew(Ours(BOUND))
        stack.callback(crew.close)
        for _ in range(3):  # until both have what they need
            crew.run(STREAM, NBYTES, CHUNK)
        before = crew.run(MEMORY)
        for index in range(messages // CHUNK):
            if not index % 8:
                effort.tell(f"memory: {index * CHUNK:,} of {messages:,} messages")
            crew.run(STREAM, NBYTES, CHUNK)
        after = crew.run(MEMORY)
    limit = Limit("", most=1.01)
    ratios, words = [], []
    for end, was, now in zip(("sender", "receiver"), before, after, strict=True):
        value = now / was
        what = f"{end}'s memory after {messages:,} / before"
        ratios.append(Ratio(what, value, value, value, str(limit), limit.met(value)))
        words.append(f"{end} {was / 1e6:.1f} to {now / 1e6:.1f} MB")
    return ratios, f"unique memory over {messages:,} messages of 400 B: {', '.join(words)}"
