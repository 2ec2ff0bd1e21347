"""Several senders, several receivers: streams of 4 kB, all together, for the peers whose ends can be shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from bench.all.field import Field, rows_of
from bench.all.links import Shape
from bench.all.programs import SHARED, Message, Sharing
from bench.all.tree import PeerFailed, Tree

__all__ = ["SHAPES", "measure"]

SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8))
NBYTES, BOUND = 4_000, 64
MOST = 2000  # messages of a turn
_turns = count(1)


def measure(field: Field, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows by shape."""
    field.begin("fans")
    for senders, receivers in SHAPES:
        field.tell(f"{senders} to {receivers}")
        standing = field.stand(Shape(BOUND, NBYTES, senders, receivers), lambda peer: peer.many)
        found = field.rounds(
            standing,
            lambda tree, number: _shared(tree, senders, receivers, number),  # noqa: B023
            seconds / len(SHAPES),
            0.08,
            MOST,
            f"{senders} to {receivers}",
            64,
        )
        field.fall(standing)
        yield from rows_of(found, item="fans", nbytes=NBYTES, senders=senders, receivers=receivers)


def _shared(tree: Tree, senders: int, receivers: int, messages: int) -> Sequence[float]:
    each = max(1, messages // senders)
    answers = tree.run(SHARED, Message(NBYTES), Sharing(senders, receivers, each, next(_turns)))
    starts, taken = answers[:senders], answers[senders:]
    if sum(number for number, _ in taken) != each * senders:
        raise PeerFailed(f"{each * senders} messages were sent, {sum(number for number, _ in taken)} taken")
    return [(max(end for _, end in taken) - min(starts)) / 1e3 / (each * senders)]
