"""The parts of documents that show a run of ``bench all``, between two marks, made from the results' file.

The README has a table of five rows and a picture. ``docs/performance.md`` beside it has the whole table and all pictures.
"""

from __future__ import annotations

from pathlib import Path

from bench.page import pictures, tables
from bench.page.results import Results
from bench.page.words import STOCK

__all__ = ["BEGIN", "END", "FOLDER", "PAGE", "PICTURES", "update"]

BEGIN, END = "<!-- bench all: from here -->", "<!-- bench all: to here -->"
PICTURES = {"one way": "One way by size", "stream": "Throughput by size"}
PAGE = "docs/performance.md"  # beside the README
FOLDER = "docs/benchmarks"


def update(results: Results, readme: str | Path) -> None:
    """Replace what stands between the marks of the README and of the page, and the pictures in ``docs/benchmarks``.

    Raises:
        ValueError: the marks are not there.
    """
    readme = Path(readme)
    page = readme.parent / PAGE
    texts = {readme: _with(readme, _short(results))}
    if page.exists():
        texts[page] = _with(page, _long(results))
    _draw(results, readme.parent / FOLDER)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def _with(path: Path, text: str) -> str:
    """A document with another text between its marks."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r}, between which the table would stand")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _short(results: Results) -> str:
    shown = f"![{PICTURES['one way']}]({FOLDER}/{_file('one way')})" if "one way" in _drawn(results) else ""
    return "\n\n".join((tables.markdown(tables.short(results)), f"{tables.LEGEND} {_where(results)}", shown))


def _long(results: Results) -> str:
    """Of each family of peers the fastest, and torch's default."""
    quickest = {peer for peer, _, _ in pictures.fastest(results, "one way", "nbytes")} | {STOCK}
    folder = Path(FOLDER).name
    shown = "\n".join(
        f"![{title}]({folder}/{_file(name)})" for name, title in PICTURES.items() if name in _drawn(results)
    )
    legend = f"Of each family of peers the fastest. {tables.LEGEND} {_where(results)}"
    return "\n\n".join((tables.markdown(tables.headline(results, quickest)), legend, shown))


def _where(results: Results) -> str:
    machine = results["machine"]
    return (
        f"`{results['command']}`, {results['date']}, {machine['processor']}, {machine['cores']} cores, load "
        f"{results.get('load', 0):.1f} when it began."
    )


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
