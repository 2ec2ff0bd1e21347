"""Results as a file: what was measured, with which command, where and when. One dict, as JSON has it."""

from __future__ import annotations

import datetime
import json
import platform
import re
from pathlib import Path
from typing import Any

__all__ = ["Results", "name_of", "of", "read", "rows"]

Results = dict[str, Any]


def of(kind: str, command: str, host: dict[str, str], found: list[dict[str, Any]], load: float, **more: Any) -> Results:
    """Results of now and here.

    Args:
        kind: the bench's command.
        command: the whole of it.
        host: on what was measured: processor, cores, versions.
        found: rows, each a dict with at least ``item``.
        load: how many processes wanted to run when it began, averaged over a minute: what others want, they take from it.
        more: what else the page tells.
    """
    return {
        "kind": kind,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": {"name": _plain(platform.node()) or "machine", **host},
        "load": load,
        "rows": found,
        **more,
    }


def name_of(results: Results) -> str:
    """Return the name of its files: date and machine, and the kind where that is not ``all``."""
    kind = "" if results["kind"] == "all" else f"-{results['kind']}"
    return f"{results['date']}-{results['machine']['name']}{kind}"


def read(path: str | Path) -> Results:
    """Results from their file.

    Raises:
        ValueError: the file holds something else.
    """
    found = json.loads(Path(path).read_text())
    if not isinstance(found, dict) or not {"kind", "command", "machine", "rows"} <= set(found):
        raise ValueError(f"{path} holds no results of `bench all` or `bench growth`")
    return found


def rows(results: Results, item: str, **what: Any) -> list[dict[str, Any]]:
    """The rows of an item that have these values."""
    wanted = {"item": item, **what}.items()
    return [row for row in results["rows"] if all(row.get(name) == value for name, value in wanted)]


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-").lower()
