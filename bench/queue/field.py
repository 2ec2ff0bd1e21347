"""The field: who takes part in a comparison, each with a crew that stands ready, and rounds in which all have a turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from bench.queue.crew import Crew
from bench.queue.rivals import (
    FasterFifo,
    Floor,
    Iceoryx,
    Memcpy,
    NumpyPipe,
    NumpyQueue,
    Ours,
    Rival,
    TorchQueue,
    TorchSimpleQueue,
    missing,
    spin_option,
)

__all__ = [
    "FLOORS",
    "ICEORYX",
    "MEMCPY",
    "NUMPY",
    "OURS",
    "PIPE",
    "SLOW",
    "SPIN",
    "THEIRS",
    "TORCH",
    "Effort",
    "Field",
    "Make",
    "available",
    "field",
    "ours_and_spinning",
]

OURS, SPIN, TORCH, NUMPY, ICEORYX = "ours", "ours, spinning", "torch Queue", "mp.Queue, NumPy", "iceoryx2, polling"
PIPE, MEMCPY = "pipe, 8 bytes", "one memcpy"

FLOORS: dict[str, type[Rival]] = {PIPE: Floor, MEMCPY: Memcpy}
THEIRS: dict[str, type[Rival]] = {
    TORCH: TorchQueue,
    "torch SimpleQueue": TorchSimpleQueue,
    NUMPY: NumpyQueue,
    "mp.Pipe, NumPy": NumpyPipe,
    "faster-fifo, NumPy": FasterFifo,
    ICEORYX: Iceoryx,
}

SLOW = {TORCH, "torch SimpleQueue"}  # a millisecond a tensor: they get a sixteenth of the messages of a turn

Make = Callable[[int, int], Rival]


class Effort(NamedTuple):
    """The effort of a run, and the listener that is told of it."""

    scale: float
    tell: Callable[[str], None]

    def of(self, number: int, least: int = 1) -> int:
        """A number of rounds or messages, scaled."""
        return max(least, round(number * self.scale))


class Field:
    """Crews by name.

    Attributes:
        notes: who is not there, and why.
    """

    def __init__(self, crews: dict[str, Crew], notes: list[str]) -> None:
        self.crews, self.notes = crews, notes

    def rounds(self, count: int, turn: Callable[[str, Crew], Sequence[float]]) -> dict[str, list[Sequence[float]]]:
        """Give everybody a turn in each of ``count`` rounds, after one that does not count."""
        found: dict[str, list[Sequence[float]]] = {name: [] for name in self.crews}
        for number in range(count + 1):
            for name, crew in self.crews.items():
                times = turn(name, crew)
                if number:
                    found[name].append(times)
        return found


@contextmanager
def field(rivals: Mapping[str, Make], nbytes: int, bound: int = 0, both_ways: bool = False) -> Iterator[Field]:
    """Stand a crew up for each rival that is to be had here.

    Args:
        rivals: by name, what makes each.
        nbytes: of the largest message.
        bound: how many messages may be on their way; 0: any number.
        both_ways: whether messages go back, too.
    """
    taking_part, notes = available(rivals)
    with ExitStack() as stack:
        crews = {}
        for name, make in taking_part.items():
            back = make(bound, nbytes) if both_ways else None
            crews[name] = Crew(make(bound, nbytes), back)
            stack.callback(crews[name].close)
        yield Field(crews, notes)


def available(rivals: Mapping[str, Make]) -> tuple[dict[str, Make], list[str]]:
    """Return the rivals that can take part here, and why the others cannot."""
    reasons = {name: missing(make) for name, make in rivals.items()}
    notes = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    return {name: make for name, make in rivals.items() if not reasons[name]}, notes


def ours_and_spinning() -> tuple[dict[str, Make], list[str]]:
    """Our Queue, and where it can spin before it blocks, also so; or a note that it cannot."""
    option = spin_option()
    if not option:
        return {OURS: Ours}, [f"{SPIN}: Queue has no option spin yet"]
    return {OURS: Ours, SPIN: lambda bound, nbytes: Ours(bound, nbytes, **option)}, []
