"""The page's tables, as rows of cells, for HTML, Markdown and the README alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from bench.page.results import Results, rows

__all__ = [
    "LEGEND",
    "Table",
    "deaths",
    "failures",
    "headline",
    "markdown",
    "one_way",
    "peers",
    "set_off",
    "short",
    "short_time",
    "size",
    "stream",
    "two",
]


LEGEND = (
    "In brackets: as a multiple of ours, in the same rounds. Of a time, more than 1× is slower; of messages a second, less is. "
    "The machine's floor is one wake-up and one memcpy."
)
DEATHS = ("a consumer is killed while it waits", "a producer is killed while it puts")
FLOORS = {"pipe, 8 bytes": "floor: one wake-up", "one memcpy": "floor: one memcpy"}
SHORT = {
    "ours": "tensorpipe_ipc.Queue",
    "torch Queue, fd": "torch.multiprocessing.Queue",
    "mp.Queue, NumPy": "multiprocessing.Queue, NumPy",
    "pyzmq, copy=False": "pyzmq, copy=False",
}


class Table(NamedTuple):
    """Headings and rows. Cells are text; what begins with a star is set off."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def shown(peer: str) -> str:
    """Return the name of a peer where its note does not stand beside it."""
    return FLOORS.get(peer, peer)


def headline(results: Results, only: Collection[str] | None = None) -> Table:
    """Of each peer the figures that matter, and what a kill does.

    Args:
        only: these peers, and ours and the floors.
    """
    sizes = sorted({row["nbytes"] for row in rows(results, "one way")})
    chosen = [nbytes for nbytes in sizes if nbytes in (400, 4_000_000) or nbytes == sizes[-1]]
    lines = []
    for one in results["peers"]:
        peer, family = one["peer"], one["family"]
        if one["missing"] or (only is not None and peer not in only and family != "floor" and "ours" not in family):
            continue
        cells = [shown(peer), *(_figure(results, "one way", peer, nbytes=nbytes) for nbytes in chosen)]
        cells += [_figure(results, "trees", peer, leaves=100), _figure(results, "stream", peer, nbytes=400)]
        killed = rows(results, "deaths", peer=peer)
        lines.append(set_off([*cells, *([killed[0]["consumer"], killed[0]["producer"]] if killed else ["-", "-"])]))
    headings = [f"{size(nbytes)}, one way" for nbytes in chosen]
    return Table(["", *headings, "dict of 100 tensors, one way", "400 B, messages a second", *DEATHS], lines)


def short(results: Results) -> Table:
    """Five rows: ours, what people have, and the least that the machine allows: a wake-up and one memcpy, together."""
    sizes = sorted({row["nbytes"] for row in rows(results, "one way")})
    chosen = [nbytes for nbytes in sizes if nbytes in (400, 4_000_000) or nbytes == sizes[-1]]
    lines = []
    for peer, name in SHORT.items():
        cells = [name, *(_figure(results, "one way", peer, nbytes=nbytes) for nbytes in chosen)]
        cells += [_figure(results, "trees", peer, leaves=100), _figure(results, "stream", peer, nbytes=400)]
        lines.append(cells)
    floors = [_floor(results, nbytes) for nbytes in chosen]
    lines.append(["the machine's floor", *floors, "-", "-"])
    lines[0] = [f"*{cell}" for cell in lines[0]]
    return Table(
        [
            "",
            *(f"{size(nbytes)}, one way" for nbytes in chosen),
            "dict of 100 tensors, one way",
            "400 B, messages a second",
        ],
        lines,
    )


def _floor(results: Results, nbytes: int) -> str:
    """One wake-up and one memcpy of so many bytes."""
    found = [row for peer in FLOORS for row in rows(results, "one way", peer=peer, nbytes=nbytes)]
    return short_time(sum(row["us"]["median"] for row in found)) if len(found) == len(FLOORS) else "-"


def _figure(results: Results, item: str, peer: str, **what: int) -> str:
    """One figure with its ratio, short."""
    for row in rows(results, item, peer=peer, **what):
        microseconds = row["us"]["median"]
        text = f"{1e6 / microseconds:,.0f}" if item == "stream" else short_time(microseconds)
        if peer != "ours" and "to_ours" in row:
            ratio = row["to_ours"]["median"]
            text += f" ({two(1 / ratio if item == 'stream' else ratio)}×)"
        return text
    return "-"


def one_way(results: Results) -> Table:
    """Each peer's time, and as a multiple of ours in the same rounds."""
    return _by_size(results, "one way", lambda row: short_time(row["us"]["median"]))


def stream(results: Results) -> Table:
    """Each peer's messages a second."""
    return _by_size(results, "stream", lambda row: f"{1e6 / row['us']['median']:,.0f}/s", turned=True)


def _by_size(results: Results, item: str, told: Any, turned: bool = False) -> Table:
    found = rows(results, item)
    sizes = list(dict.fromkeys(row["nbytes"] for row in found))
    lines = []
    for peer in dict.fromkeys(row["peer"] for row in found):
        cells = [shown(peer)]
        for nbytes in sizes:
            at = next((row for row in found if row["peer"] == peer and row["nbytes"] == nbytes), None)
            cells.append("-" if at is None else f"{told(at)}{_ratio(at, turned)}")
        lines.append(set_off(cells))
    return Table(["", *(size(nbytes) for nbytes in sizes)], lines)


def _ratio(row: dict[str, Any], turned: bool) -> str:
    if row["peer"] == "ours" or "to_ours" not in row:
        return ""
    median, low, high = (row["to_ours"][name] for name in ("median", "lowest", "highest"))
    if turned:
        median, low, high = 1 / median, 1 / high, 1 / low
    return f" ({two(median)}×; {two(low)}..{two(high)})"


def deaths(results: Results) -> Table:
    """Return the table of what is seen when a process is killed."""
    lines = []
    for row in rows(results, "deaths"):
        left = "-" if row["left"] is None else str(row["left"])
        lines.append(set_off([row["peer"], row["consumer"], row["producer"], left]))
    return Table(["", *DEATHS, "left in /dev/shm"], lines)


def peers(results: Results) -> Table:
    """Return how each peer was used, or why it is missing."""
    lines = []
    for peer in results["peers"]:
        text = f"*not here: {peer['missing']}" if peer["missing"] else peer["note"]
        lines.append(set_off([shown(peer["peer"]), peer.get("version", ""), text]))
    return Table(["", "version", "how it is used, and why that is fair"], lines)


def failures(results: Results) -> Table:
    """Return the table of what peers could not do."""
    return Table(["", "where", "why"], [[one["peer"], one["item"], one["reason"]] for one in results["failed"]])


def markdown(table: Table) -> str:
    """As Markdown has it."""
    lines = ["| " + " | ".join(table.headings) + " |", "|" + "---|" * len(table.headings)]
    for row in table.rows:
        lines.append("| " + " | ".join(f"**{cell[1:]}**" if cell[:1] == "*" else cell for cell in row) + " |")
    return "\n".join(lines)


def short_time(microseconds: float) -> str:
    """With the unit that people would choose."""
    for limit, divisor, unit in ((1e3, 1, "µs"), (1e6, 1e3, "ms"), (float("inf"), 1e6, "s")):
        if microseconds < limit:
            value = microseconds / divisor
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
    raise AssertionError


def size(nbytes: float) -> str:
    """Likewise."""
    for limit, divisor, unit in ((1e3, 1, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB"), (float("inf"), 1e9, "GB")):
        if nbytes < limit:
            return f"{nbytes / divisor:.3g} {unit}"
    raise AssertionError


def two(value: float) -> str:
    """Return a number with two digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def set_off(cells: list[str]) -> list[str]:
    """Return a row's cells, set off if it is one of ours."""
    return [f"*{cell}" for cell in cells] if cells[0].startswith("ours") else cells
