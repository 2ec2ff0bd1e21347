"""Fans: four senders to one receiver, and one to four, on the same two cores as one to one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from bench.queue.crew import Crew
from bench.queue.field import OURS, Effort, Field, Make, available
from bench.queue.findings import Finding, Limit, Ratio, ratio_of, row_of
from bench.queue.programs import SHARED_STREAM, Sharing
from bench.queue.rivals import FasterFifo, NumpyQueue, Ours

__all__ = ["measure"]

NBYTES = 400
BOUND = 64
MESSAGES = 4096
ROUNDS = 8
RIVALS: dict[str, Make] = {OURS: Ours, "mp.Queue, NumPy": NumpyQueue, "faster-fifo, NumPy": FasterFifo}
SHAPES = {"1 to 1": (1, 1), "4 to 1": (4, 1), "1 to 4": (1, 4)}


def measure(effort: Effort) -> Finding:
    """The total rate of each shape."""
    effort.tell("fans")
    taking_part, notes = available(RIVALS)
    with ExitStack() as stack:
        crews = {}
        for name, make in taking_part.items():
            for shape, (senders, receivers) in SHAPES.items():
                crew = crews[f"{name}, {shape}"] = Crew(make(BOUND, NBYTES), None, senders, receivers)
                stack.callback(crew.close)
        messages = effort.of(MESSAGES, 128)
        times = Field(crews, notes).rounds(
            effort.of(ROUNDS, 2), lambda name, crew: _shared(crew, SHAPES[name[-6:]], messages)
        )
    rows = [row_of("400 B", name, NBYTES, rounds) for name, rounds in times.items()]
    ratios: list[Ratio] = []
    for shape in ("4 to 1", "1 to 4"):
        ratios += ratio_of(times, f"{OURS}, {shape}", Limit(f"{OURS}, 1 to 1", least=0.8), f"{OURS}: {shape} to 1 to 1")
    return Finding("fan", "Streams of several, all together", "a second", rows, ratios, notes)


def _shared(crew: Crew, shape: tuple[int, int], messages: int) -> Sequence[float]:
    senders, receivers = shape
    each = messages // senders
    answers = crew.run(SHARED_STREAM, NBYTES, Sharing(senders, receivers, each))
    starts, taken = answers[:senders], answers[senders:]
    if sum(count for count, _ in taken) != each * senders:
        raise RuntimeError(f"{each * senders} messages were sent, {taken} taken")
    return [(max(end for _, end in taken) - min(starts)) / 1e3 / (each * senders)]
