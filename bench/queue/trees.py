"""Trees: a dict of tensors of 1 kB, there and back; and what each leaf costs, from 1 leaf to 10,000."""

from __future__ import annotations

from collections.abc import Sequence

from bench.queue.crew import Crew
from bench.queue.field import NUMPY, OURS, SLOW, THEIRS, TORCH, Effort, Make, field
from bench.queue.findings import Finding, Limit, Ratio, Row, ratio_of, row_of
from bench.queue.programs import LEAF, ROUND_TRIP, warm
from bench.queue.rivals import Iceoryx, Ours

__all__ = ["measure"]

LEAVES = {1: 100, 10: 60, 100: 40, 1000: 8, 10_000: 2}  # and how many messages a round
ROUNDS = 8
COMPARED = 100


def measure(effort: Effort) -> Finding:
    """100 leaves for all who take dicts, then ours alone by leaves."""
    effort.tell(f"dict of {COMPARED} tensors")
    rivals: dict[str, Make] = {OURS: Ours, **{name: make for name, make in THEIRS.items() if make is not Iceoryx}}
    with field(rivals, 4 * COMPARED * LEAF, both_ways=True) as all_:
        count = effort.of(20, 3)
        times = all_.rounds(
            effort.of(ROUNDS, 2), lambda name, crew: _round_trips(crew, COMPARED, 2 if name in SLOW else count)
        )
    rows = [row_of("100 leaves", name, COMPARED * LEAF, rounds) for name, rounds in times.items()]
    ratios = [
        *ratio_of(times, OURS, Limit(NUMPY, least=3)),
        *ratio_of(times, OURS, Limit(TORCH, least=30)),
    ]
    notes = [*all_.notes, "iceoryx2: takes no dicts"]
    more, flat = _by_leaves(effort)
    return Finding("tree", "Round trip of a dict of 1 kB tensors", "us", rows + more, ratios + flat, notes)


def _by_leaves(effort: Effort) -> tuple[list[Row], list[Ratio]]:
    per_leaf: dict[int, list[list[float]]] = {leaves: [] for leaves in LEAVES}
    with field({OURS: Ours}, 0, both_ways=True) as all_:
        crew = all_.crews[OURS]
        for number in range(effort.of(ROUNDS, 2) + 1):
            for leaves, messages in LEAVES.items():
                effort.tell(f"dict of {leaves} tensors")
                found = [time / leaves for time in _round_trips(crew, leaves, effort.of(messages, 2))]
                if number:
                    per_leaf[leaves].append(found)
    times = {f"{leaves:,}": found for leaves, found in per_leaf.items()}
    rows = [row_of("us a leaf, ours", f"{name} leaves", LEAF, found) for name, found in times.items()]
    flat = Limit("100", most=1.5)
    return rows, [
        ratio for name in ("1,000", "10,000") for ratio in ratio_of(times, name, flat, f"a leaf of {name} / of 100")
    ]


def _round_trips(crew: Crew, leaves: int, count: int) -> Sequence[float]:
    times, _ = crew.run(ROUND_TRIP, leaves, count)
    return [time / 1e3 for time in warm(times)]
