"""All figures of the documents: every comparison in turn, into one file, and from that file into the documents."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.measure import machine, versions
from bench.page import documents
from bench.progress import steps

__all__ = ["FILE", "PARTS", "add_arguments", "run"]

ROOT = Path(__file__).resolve().parents[1]
FILE = "docs/benchmarks/figures.json"
# The arguments of each part, and about how many seconds it takes.
PARTS: dict[str, tuple[tuple[str, ...], float]] = {
    "all": ((), 420),
    "queue": ((), 110),
    "dataloader": ((), 200),
    "endpoints": (("--scale", "0.5"), 70),
    "tcp": (("--scale", "0.5"), 40),
    "precision": (("--scale", "0.5"), 60),
    "serializers": (("--scale", "0.5"), 100),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--file", default=ROOT / FILE, help=f"where all figures are ({FILE})")
    parser.add_argument("--show", action="store_true", help="measure nothing; renew the documents from the file")


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the file, and renew the documents beside it."""
    file = Path(arguments.file)
    if not arguments.show:
        file.write_text(json.dumps(_measured(), indent=1) + "\n", encoding="utf-8")
    documents.renew(json.loads(file.read_text(encoding="utf-8")), ROOT)


def _measured() -> dict[str, Any]:
    load, found = os.getloadavg()[0], dict[str, Any]()
    with steps({part: seconds for part, (_, seconds) in PARTS.items()}) as done:
        for part in PARTS:
            done.begin(part)
            done.tell(part)
            found[part] = _found(part)
    return {
        "command": "python -m bench figures",
        "date": datetime.date.today().isoformat(),
        "machine": {**machine(), **versions("pyzmq")},
        "load": load,
        "parts": found,
    }


def _found(part: str) -> dict[str, Any]:
    """Run one comparison in a process of its own. Return what it wrote."""
    arguments = [part, *PARTS[part][0]]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        output = ["--folder", folder] if part == "all" else ["--json", f"{folder}/found.json"]
        subprocess.run([sys.executable, "-m", "bench", *arguments, *output], cwd=ROOT, check=True, stdout=sys.stderr)
        (written,) = Path(folder).glob("*.json")
        found: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return {**found, "command": f"python -m bench {' '.join(arguments)}"}
