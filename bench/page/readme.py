"""What the README shows of a run of ``bench all``: one table and two pictures, made from the results' file."""

from __future__ import annotations

from pathlib import Path

from bench.page import pictures, tables
from bench.page.results import Results, rows

__all__ = ["draw", "table"]

COLUMNS = (
    "dict of 100, one way",
    "400 B, a second",
    "a consumer is killed",
    "a producer is killed",
)


def table(results: Results) -> str:
    """Of all peers, as Markdown: the figures that matter, and what a kill does. The command stands below."""
    sizes = sorted({row["nbytes"] for row in rows(results, "one way")})
    shown = [nbytes for nbytes in sizes if nbytes in (400, 4_000_000) or nbytes == sizes[-1]]
    lines = []
    for peer in (one["peer"] for one in results["peers"] if not one["missing"]):
        cells = [_time(results, "one way", peer, nbytes=nbytes) for nbytes in shown]
        cells.append(_time(results, "trees", peer, leaves=100))
        stream = rows(results, "stream", peer=peer, nbytes=400)
        cells.append(f"{1e6 / stream[0]['us']['median']:,.0f}" if stream else "-")
        killed = rows(results, "deaths", peer=peer)
        cells += [killed[0]["consumer"], killed[0]["producer"]] if killed else ["-", "-"]
        lines.append([f"*{peer}", *(f"*{cell}" for cell in cells)] if peer == "ours" else [peer, *cells])
    headings = ["", *(f"{tables.size(nbytes)}, one way" for nbytes in shown), *COLUMNS]
    below = f"`{results['command']}` · {results['machine']['processor']}, {results['machine']['cores']} cores"
    return f"{tables.markdown(tables.Table(headings, lines))}\n\n{below}"


def draw(results: Results, folder: str | Path) -> None:
    """One way by size, and memory and descriptors: ``one-way.svg`` and ``held.svg``."""
    from matplotlib import pyplot

    for name in ("one way", "held"):
        figure = pictures.PICTURES[name](results)
        Path(folder).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(folder) / f"{name.replace(' ', '-')}.svg", metadata={"Date": None})
        pyplot.close(figure)


def _time(results: Results, item: str, peer: str, **what: int) -> str:
    found = rows(results, item, peer=peer, **what)
    return tables.short_time(found[0]["us"]["median"]) if found else "-"
