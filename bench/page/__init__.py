"""The page of results that ``all`` or ``growth`` has written before: HTML, Markdown and pictures, made again from the file."""

from __future__ import annotations

import argparse

from rich.console import Console

from bench.page import readme, results
from bench.page.write import write

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("file", help="results, as bench/results/*.json are")
    parser.add_argument("--folder", default="bench/results", help="where the page goes")
    parser.add_argument(
        "--readme",
        metavar="FILE",
        help="put five rows there, between its marks, and all of it into docs/performance.md beside it",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the page, or the README's part of it."""
    found = results.read(arguments.file)
    if arguments.readme and found["kind"] != "all":
        raise SystemExit(f"{arguments.file} is of `bench {found['kind']}`; the README shows a run of `bench all`")
    if arguments.readme:
        readme.update(found, arguments.readme)
    else:
        write(found, arguments.folder, Console(width=100))
