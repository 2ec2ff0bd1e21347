"""The cost of tensors that a receiver holds: descriptors and memory of a peer's whole tree, beyond those with none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil

from bench.all.field import Field
from bench.all.links import Shape
from bench.all.peers import FLOORS, Peer
from bench.all.programs import HOLD, LET_GO, Message
from bench.all.tree import PeerFailed, Tree

__all__ = ["HELD", "measure", "weigh"]

HELD = (1, 10, 100, 1000)
NBYTES = 40_000


def measure(field: Field, seconds: float) -> Iterator[dict[str, Any]]:  # noqa: ARG001
    """Rows by number of tensors held. Takes the time it takes: nothing here is a time."""
    field.begin("held")
    floors = [field.peers[name] for name in FLOORS if name in field.peers]
    for name in field.stand(Shape(64, NBYTES), lambda peer: peer not in floors):
        field.tell(f"tensors held: {name}")
        try:
            yield from _of(field.trees[name], field.peers[name])
        except PeerFailed as error:
            field.fail(name, str(error))


def _of(tree: Tree, peer: Peer) -> Iterator[dict[str, Any]]:
    what = Message(NBYTES)
    tree.run(HOLD, what, 3)  # until both have what they need
    tree.run(LET_GO)
    descriptors, memory = weigh(tree)
    held = 0
    for count in HELD:
        row: dict[str, Any] = {
            "item": "held",
            "peer": tree.name,
            "family": peer.family,
            "held": count,
            "nbytes": NBYTES,
        }
        try:
            tree.run(HOLD, what, count - held)
        except PeerFailed as error:
            yield {**row, "failed": str(error)}
            raise PeerFailed(f"at {count:,} tensors held: {error}") from None
        held = count
        now = weigh(tree)
        yield {**row, "descriptors": now[0] - descriptors, "memory": now[1] - memory}
    tree.run(LET_GO)


def weigh(tree: Tree) -> tuple[int, int]:
    """Descriptors, and proportional memory in bytes (a page that several map counts once), of all processes."""
    descriptors = memory = 0
    for process in tree.processes():
        try:
            descriptors += process.num_fds()
            memory += process.memory_full_info().pss
        except psutil.Error:
            continue
    return descriptors, memory
