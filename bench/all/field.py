"""The field: the trees of all who take part, and rounds in which each has a turn, for as long as the budget allows.

A turn is sized by time and not by messages: after a first, short one, each peer gets as many messages as it can send in
``turn`` seconds, so that the slow do not eat the budget of the quick. Who fails is out until the next item, with the
reason, and the others go on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.all.links import Shape
from bench.all.peers import OURS, PEERS, Peer
from bench.all.tree import PeerFailed, Tree

__all__ = ["Field", "Spread", "Turn", "rows_of", "spread", "spread_to"]

LEAST, MOST = 5, 15  # rounds
LATE = 2  # times the seconds of all rounds, after which one has to do: the machine is busy with something else
Turn = Callable[[Tree, int], Sequence[float]]  # a tree, how many messages: microseconds of each


class Spread(NamedTuple):
    """The median of the rounds', the lowest and the highest."""

    median: float
    lowest: float
    highest: float


class Field:
    """Trees by name.

    Attributes:
        missing: who is not to be had here, and why.
        failed: what went wrong with whom, by item.
    """

    def __init__(self, names: Sequence[str], tell: Callable[[str], None], peers: Mapping[str, Peer] = PEERS) -> None:
        self.peers, self.tell = peers, tell
        self.trees: dict[str, Tree] = {}
        self.missing: dict[str, str] = {}
        self.failed: list[dict[str, str]] = []
        self._item = ""
        for name in names:
            tell(f"starting {name}")
            try:
                self.trees[name] = Tree(name, peers[name])
            except PeerFailed as error:
                self.missing[name] = str(error)

    def begin(self, item: str) -> None:
        """Start an item: who failed in the one before has another try."""
        self._item = item
        for name in self.peers:
            if name not in self.trees and name not in self.missing and any(one["peer"] == name for one in self.failed):
                try:
                    self.trees[name] = Tree(name, self.peers[name])
                except PeerFailed as error:
                    self.fail(name, str(error))

    def fail(self, name: str, reason: str, where: str = "") -> None:
        """Note that a peer could not, and end it."""
        self.failed.append({"peer": name, "item": f"{self._item} {where}".strip(), "reason": reason})
        if name in self.trees:
            self.trees.pop(name).kill()

    def stand(self, shape: Shape, fits: Callable[[Peer], bool] = lambda peer: True) -> list[str]:
        """Stand crews up: the names of those who stand."""
        standing = []
        asked = [name for name in self.trees if fits(self.peers[name])]
        for name in asked:  # all at once: most of it is waiting
            self.trees[name].tell("stand", shape)
        for name in asked:
            try:
                self.trees[name].answer()
                standing.append(name)
            except PeerFailed as error:
                self.fail(name, str(error), _size(shape.nbytes))
        return standing

    def fall(self, names: Sequence[str]) -> None:
        """Take crews down, and so let go of what they have."""
        asked = [name for name in names if name in self.trees]
        for name in asked:
            self.trees[name].tell("fall")
        for name in asked:
            try:
                self.trees[name].answer()
            except PeerFailed as error:
                self.fail(name, str(error))

    def rounds(
        self,
        names: Sequence[str],
        turn: Turn,
        seconds: float,
        each: float,
        most: int,
        where: str,
        least: int = 3,
        cold: bool = False,
    ) -> dict[str, list[Sequence[float]]]:
        """Rounds in which every peer has its turn.

        Args:
            names: who takes part.
            turn: what to do.
            seconds: of the whole; there are at least five rounds (fewer, where that takes three times as long) and at most
                fifteen.
            each: seconds of one turn, about.
            most, least: messages of one turn.
            where: what this is, for who fails.
            cold: without a round that warms up: for turns that take seconds.

        Returns:
            Of each peer that did not fail, of each round, what the turn gave.
        """
        end = time.monotonic() + seconds
        counts: dict[str, int] = {}
        found: dict[str, list[Sequence[float]]] = {}
        for number in range(1 if cold else 0, MOST + 1):
            now = time.monotonic()
            if (number > LEAST and now > end) or (number > 1 and now > end + LATE * seconds):
                break
            for name in [name for name in names if name in self.trees]:
                try:
                    start = time.monotonic()
                    times = turn(self.trees[name], counts.get(name, least))
                    took = (time.monotonic() - start) / counts.get(name, least)
                except PeerFailed as error:
                    self.fail(name, str(error), where)
                    found.pop(name, None)
                    continue
                if number:
                    found.setdefault(name, []).append(times)
                else:
                    counts[name] = min(most, max(least, int(each / took)))
        return found

    def close(self) -> None:
        """End all trees."""
        for tree in self.trees.values():
            tree.leave()
        for tree in self.trees.values():
            tree.end()
        self.trees.clear()

    def __enter__(self) -> Field:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:  # as after Ctrl-C: who is busy would not hear that it is to end
            for tree in self.trees.values():
                tree.kill()
            self.trees.clear()
        self.close()


def spread(rounds: Sequence[Sequence[float]]) -> Spread:
    """Of one peer's rounds."""
    medians = [statistics.median(times) for times in rounds]
    return Spread(statistics.median(medians), min(medians), max(medians))


def spread_to(theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> Spread:
    """Of one peer's rounds as multiples of ours in the same rounds: over 1, it takes longer than ours."""
    pairs = zip(theirs, ours, strict=False)
    ratios = [statistics.median(one) / statistics.median(other) for one, other in pairs]
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


def rows_of(found: Mapping[str, Sequence[Sequence[float]]], **what: Any) -> Iterator[dict[str, Any]]:
    """As the results keep it: microseconds a message, and as a multiple of ours."""
    for name, rounds in found.items():
        if not rounds:
            continue
        row = {**what, "peer": name, "us": spread(rounds)._asdict(), "rounds": len(rounds)}
        row["messages"] = sum(map(len, rounds))
        if OURS in found and found[OURS]:
            row["to_ours"] = spread_to(rounds, found[OURS])._asdict()
        yield row


def _size(nbytes: int) -> str:
    return f"at {nbytes:,} bytes"
