"""The parts of documents that show figures, between two marks, made from the one file that has all figures.

The README has a table of five rows and a picture. ``docs/performance.md`` has the tables and the pictures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.page import details, pictures, tables
from bench.page.results import Results
from bench.page.words import STOCK

__all__ = ["DOCUMENTS", "FOLDER", "PICTURES", "SHOWN", "begin_of", "end_of", "parts_of", "renew", "render"]

Figures = Mapping[str, Any]  # the file: ``date``, ``command``, ``machine``, ``load``, and of each part what it found

DOCUMENTS = ("README.md", "docs/performance.md")
FOLDER = "docs/benchmarks"
PICTURES = {"one way": "One way by size", "stream": "Throughput by size"}


def begin_of(part: str) -> str:
    """Return the line before what shows a part."""
    return f"<!-- figures of {part}: from here -->"


def end_of(part: str) -> str:
    """Return the line behind it."""
    return f"<!-- figures of {part}: to here -->"


def renew(figures: Figures, root: str | Path) -> None:
    """Replace what stands between the marks of the documents, and the pictures.

    Args:
        root: the project's folder.

    Raises:
        ValueError: a document lacks a mark.
    """
    root = Path(root)
    texts = {root / name: render((root / name).read_text(encoding="utf-8"), figures) for name in DOCUMENTS}
    _draw(figures["parts"]["all"], root / FOLDER)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def render(text: str, figures: Figures) -> str:
    """Return a document with the figures of each part that it has marks of.

    Raises:
        ValueError: it has no mark, or one that is not followed by its end, or of a part that is none.
    """
    parts = parts_of(text)
    if not parts:
        raise ValueError(f"no line like {begin_of('all')!r} says where figures would stand")
    for part in parts:
        before, begin, rest = text.partition(begin_of(part))
        _, end, after = rest.partition(end_of(part))
        if not end or part not in SHOWN:
            raise ValueError(f"behind {begin!r} there is no {end_of(part)!r}, or {part!r} is none of {list(SHOWN)}")
        text = f"{before}{begin}\n{SHOWN[part](figures)}\n{end}{after}"
    return text


def parts_of(text: str) -> list[str]:
    """Return the parts that a document shows."""
    return re.findall(re.escape(begin_of("PART")).replace("PART", "(.+)"), text)


def _five_rows(figures: Figures) -> str:
    results = figures["parts"]["all"]
    shown = f"![{PICTURES['one way']}]({FOLDER}/{_file('one way')})" if "one way" in _drawn(results) else ""
    return "\n\n".join((tables.markdown(tables.short(results)), f"{tables.LEGEND} {_where(figures)}", shown))


def _all(figures: Figures) -> str:
    """Of each family of peers the fastest, and torch's default."""
    results = figures["parts"]["all"]
    quickest = {peer for peer, _, _ in pictures.fastest(results, "one way", "nbytes")} | {STOCK}
    folder = Path(FOLDER).name
    shown = "\n".join(
        f"![{title}]({folder}/{_file(name)})" for name, title in PICTURES.items() if name in _drawn(results)
    )
    legend = f"Of each family of peers the fastest. {tables.LEGEND}"
    return "\n\n".join((tables.markdown(tables.headline(results, quickest)), legend, shown))


def _where(figures: Figures) -> str:
    machine = figures["machine"]
    where = ", ".join([machine["processor"], f"{machine['cores']} cores", machine["system"]])
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "pyzmq") if name in machine)
    return f"`{figures['command']}`, {figures['date']}, {where}, {versions}, load {figures['load']:.1f} when it began."


def _detail(part: str, show: Callable[[Mapping[str, Any]], list[tables.Table]]) -> Callable[[Figures], str]:
    def shown(figures: Figures) -> str:
        found = figures["parts"][part]
        return "\n\n".join([*map(tables.markdown, show(found)), f"`{found['command']}`"])

    return shown


SHOWN: dict[str, Callable[[Figures], str]] = {
    "five rows": _five_rows,
    "all": _all,
    "where": _where,
    **{part: _detail(source, show) for part, (source, show) in details.DETAILS.items()},
}


def _drawn(results: Results) -> set[str]:
    return {row["item"] for row in results["rows"]} & set(PICTURES)


def _draw(results: Results, folder: Path) -> None:
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name in _drawn(results):
        figure = pictures.PICTURES[name](results)
        figure.savefig(folder / _file(name), metadata={"Date": None})
        pyplot.close(figure)


def _file(name: str) -> str:
    return f"{name.replace(' ', '-')}.svg"
