"""The page of results that ``all`` or ``growth`` has written before: HTML, Markdown and pictures, made again from the file."""

from __future__ import annotations

import argparse

from rich.console import Console

from bench.page import results
from bench.page.write import write

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("file", help="results, as bench/results/*.json are")
    parser.add_argument("--folder", default="bench/results", help="where the page goes")


def run(arguments: argparse.Namespace) -> None:
    """Write the page."""
    write(results.read(arguments.file), arguments.folder, Console(width=100))
