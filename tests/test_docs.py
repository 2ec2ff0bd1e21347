"""What the documents name is there: every test that they say shows something, and every file that they point to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "SECURITY.md", "docs/reliability.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_tests_that_are_named_exist(document: str) -> None:
    """A test that a document names stands in the file that it says."""
    text = (ROOT / document).read_text()
    for file, name in re.findall(r"`((?:\w+/)*test_\w+\.py)::(test_\w+)`", text):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{document}: {file}::{name}"
    for file in re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)`", text):
        assert (ROOT / "tests" / file).is_file(), f"{document}: {file}"


def test_each_fault_has_its_row() -> None:
    """The table of faults is whole: each row has its number, a promise and a test."""
    rows = [
        line.split("|") for line in (ROOT / "docs/reliability.md").read_text().splitlines() if line.startswith("| ")
    ]
    rows = [row for row in rows if row[1].strip().isdigit()]
    assert [int(row[1]) for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        assert row[3].strip(), row[1]
        assert "test_" in row[4], row[1]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    """Every relative link of a document is a file or folder."""
    path = ROOT / document
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{document}: {target}"
