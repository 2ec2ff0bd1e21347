"""What the README shows of a run of ``bench all``: a table and two pictures, between two marks, made from the results' file."""

from __future__ import annotations

from pathlib import Path

from bench.page import pictures, tables
from bench.page.results import Results
from bench.page.words import STOCK, headline

__all__ = ["BEGIN", "END", "PICTURES", "update"]

BEGIN, END = "<!-- bench all: from here -->", "<!-- bench all: to here -->"
PICTURES = {"one way": "One way by size", "stream": "Throughput by size"}
FOLDER = "docs/benchmarks"  # beside the README


def update(results: Results, readme: str | Path) -> None:
    """Replace what stands between the marks, and the pictures in ``docs/benchmarks`` beside it.

    Raises:
        ValueError: the marks are not there.
    """
    readme = Path(readme)
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{readme} has no lines {BEGIN!r} and {END!r}, between which the table would stand")
    _draw(results, readme.parent / FOLDER)
    readme.write_text(f"{before}{begin}\n{_text(results)}\n{end}{after}", encoding="utf-8")


def _text(results: Results) -> str:
    """Of each family of peers the fastest, and torch's default."""
    quickest = {peer for peer, _, _ in pictures.fastest(results, "one way", "nbytes")} | {STOCK}
    shown = "\n".join(
        f"![{title}]({FOLDER}/{_file(name)})" for name, title in PICTURES.items() if name in _drawn(results)
    )
    return "\n\n".join(
        (
            headline(results),
            tables.markdown(tables.headline(results, quickest)),
            f"Of each family of peers the fastest; the page has all. {tables.LEGEND} `{results['command']}`, "
            f"{results['date']}, {results['machine']['processor']}, {results['machine']['cores']} cores, load "
            f"{results.get('load', 0):.1f} when it began.",
            shown,
        )
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
