"""Small-tensor trees: a dict of tensors of 1 kB, one way, for all who take dicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.all.field import Field, rows_of
from bench.all.links import Shape
from bench.all.programs import LEAF, Message
from bench.all.sizes import one_way

__all__ = ["LEAVES", "measure"]

LEAVES = (1, 10, 100)


def measure(field: Field, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows by number of leaves."""
    field.begin("trees")
    standing = field.stand(Shape(4, 4 * max(LEAVES) * LEAF), lambda peer: peer.trees)
    for leaves in LEAVES:
        field.tell(f"dict of {leaves:,} tensors, one way")
        what = Message(LEAF, leaves)
        found = field.rounds(
            standing,
            lambda tree, count: one_way(tree, what, count),  # noqa: B023
            seconds / len(LEAVES),
            0.06,
            100,
            f"{leaves} leaves",
        )
        yield from rows_of(found, item="trees", leaves=leaves, nbytes=LEAF * leaves)
