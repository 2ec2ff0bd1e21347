"""The pictures of ``bench all``: of each family of peers the fastest is drawn, the tables have all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.page.lines import BYTES, COUNTS, FINE_TIMES, RATES, TIMES, Line, figure, panel
from bench.page.results import Results, rows
from bench.page.tables import shown

__all__ = ["PICTURES", "fastest"]

Row = dict[str, Any]


def one_way(results: Results) -> Any:
    """Time from put to get, by size."""
    return _by_size(results, "one way", "From put to get, the receiver waiting: lower is better", "time, median", TIMES)


def stream(results: Results) -> Any:
    """Bytes a second, by size."""
    drawn, (axis,) = figure("A stream of tensors, one sender, one receiver: higher is better")
    found = fastest(results, "stream", "nbytes")
    lines = [
        Line(
            shown(name),
            family,
            [row["nbytes"] for row in of],
            [row["nbytes"] / row["us"]["median"] for row in of],  # bytes a microsecond: megabytes a second
        )
        for name, family, of in found
    ]
    panel(axis, lines, across="size of a tensor", up="bytes a second", x_ticks=BYTES, y_ticks=RATES)
    return drawn


def trees(results: Results) -> Any:
    """Time of a dict, by number of tensors in it."""
    drawn, (axis,) = figure("A dict of 1 kB tensors, from put to get: lower is better")
    lines = [
        Line(name, family, [row["leaves"] for row in of], [row["us"]["median"] for row in of])
        for name, family, of in fastest(results, "trees", "leaves")
    ]
    panel(axis, lines, across="tensors in the dict", up="time, median", x_ticks=COUNTS, y_ticks=FINE_TIMES)
    return drawn


def held(results: Results) -> Any:
    """Descriptors and memory, by number of tensors that are held."""
    drawn, axes = figure("What tensors of 40 kB cost while a receiver holds them: lower is better", 2, 5.4)
    for axis, what, up, unit in (
        (axes[0], "descriptors", "file descriptors, all processes", 1.0),
        (axes[1], "memory", "proportional memory, all processes, MB", 1e6),
    ):
        lines = []
        for (family, name), of in _holders(results).items():
            points = [
                (count, statistics.median(row[what] for row in of if row["held"] == count and what in row) / unit)
                for count in dict.fromkeys(row["held"] for row in of if what in row)
            ]
            lines.append(Line(name, family, [x for x, _ in points], [max(y, 0.5) for _, y in points]))
        title = "descriptors" if unit == 1 else "memory (a copy of the tensors is 40 MB at 1,000)"
        ticks = {0.5: "0" if unit == 1 else "0.5 or less", **COUNTS}
        panel(axis, _merged(lines), across="tensors held", up=up, x_ticks=COUNTS, y_ticks=ticks, title=title)
    return drawn


def fans(results: Results) -> Any:
    """Messages a second, by number of senders and of receivers."""
    drawn, axes = figure("Streams of 4 kB tensors that several share: higher is better", 2, 5.4)
    rates = [1e3 / row["us"]["median"] for row in rows(results, "fans")]
    for axis, one, many in ((axes[0], "receivers", "senders"), (axes[1], "senders", "receivers")):
        lines = [
            Line(name, family, [row[many] for row in of], [1e3 / row["us"]["median"] for row in of])
            for name, family, of in fastest(results, "fans", many, **{one: 1})
        ]
        counts = {float(count): str(count) for count in (1, 2, 4, 8, 16, 32)}
        panel(
            axis,
            lines,
            across=f"{many}, one {one[:-1]}",
            up="thousand messages a second, all together",
            x_ticks=counts,
            y_ticks={value: f"{value:g}" for value in (0.01, 0.1, 1, 10, 100, 1000)},
            reach=(min(rates), max(rates)),  # one scale for both
        )
    return drawn


PICTURES: dict[str, Callable[[Results], Any]] = {
    "one way": one_way,
    "stream": stream,
    "trees": trees,
    "held": held,
    "fans": fans,
}


def fastest(results: Results, item: str, by: str, **what: Any) -> list[tuple[str, str, list[Row]]]:
    """Of each family, the peer that is fastest at most points: its name, the family, its rows in order."""
    found = []
    for family, of in _families(results, item, **what).items():
        peers = dict.fromkeys(row["peer"] for row in of)
        by_peer = {peer: sorted((row for row in of if row["peer"] == peer), key=lambda row: row[by]) for peer in peers}
        if family == "floor":
            found += [(peer, family, mine) for peer, mine in by_peer.items()]
            continue
        most = max(map(len, by_peer.values()))
        wins = {
            peer: sum(
                row["us"]["median"] <= min(other["us"]["median"] for other in of if other[by] == row[by])
                for row in mine
            )
            for peer, mine in by_peer.items()
            if len(mine) == most
        }
        best = max(wins, key=lambda peer: wins[peer])
        found.append((best, family, by_peer[best]))
    return found


def _families(results: Results, item: str, **what: Any) -> dict[str, list[Row]]:
    family_of = {peer["peer"]: peer["family"] for peer in results["peers"]}
    found: dict[str, list[Row]] = {}
    for row in rows(results, item, **what):
        found.setdefault(family_of[row["peer"]], []).append(row)
    return found


def _holders(results: Results) -> dict[tuple[str, str], list[Row]]:
    """Families, but torch's two strategies by themselves: they hold in different ways."""
    found: dict[tuple[str, str], list[Row]] = {}
    for family, of in _families(results, "held").items():
        for row in of:
            name = f"torch, {row['peer'].rpartition(', ')[2]}" if family == "torch" else family
            found.setdefault((family, name), []).append(row)
    return found


def _merged(lines: Sequence[Line]) -> list[Line]:
    """Lines, but those that end where another does drawn as one with it. Ours stays by itself."""
    merged: list[Line] = []
    for line in lines:
        for index, other in enumerate(merged):
            if "ours" not in (line.family, other.family) and abs(line.ys[-1] - other.ys[-1]) <= 0.15 * line.ys[-1]:
                merged[index] = other._replace(name=f"{other.name}; {line.name}", family="several")
                break
        else:
            merged.append(line)
    return [line._replace(name=_short(line.name.split("; "))) for line in merged]


def _short(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else " and ".join(names) if len(names) == 2 else f"{len(names)} others"


def _by_size(results: Results, item: str, title: str, up: str, ticks: dict[float, str]) -> Any:
    drawn, (axis,) = figure(title)
    lines = [
        Line(shown(name), family, [row["nbytes"] for row in of], [row["us"]["median"] for row in of])
        for name, family, of in fastest(results, item, "nbytes")
    ]
    panel(axis, lines, across="size of a tensor", up=up, x_ticks=BYTES, y_ticks=ticks)
    return drawn
