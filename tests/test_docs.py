"""The documents name only tests, files, commands with their options, and texts of errors that exist."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from pathlib import Path

import pytest

from tensorpipe_ipc import cli

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/reliability.md")
PAGES = [*(ROOT / name for name in DOCUMENTS[:3]), *sorted((ROOT / "docs").rglob("*.md"))]
LEAST = 8  # characters of a text by which it is looked for
_CODE = re.compile(r"[=\[(]|^[\w.-]+$|^(?:queue|consumer|producer)\b|^ulimit ")  # names and calls
_GAPS = re.compile(
    r"\w+://|failed: | in time\b|\.\.\.|'[^']*'|\([^)]*\)|\b(?:consumer|producer)\b|\d[\d.,]*"
)  # what differs from one error to the next


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_tests_that_are_named_exist(document: str) -> None:
    """A test that a document names stands in the file that it says."""
    text = (ROOT / document).read_text()
    for file, name in re.findall(r"`((?:\w+/)*test_\w+\.py)::(test_\w+)`", text):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{document}: {file}::{name}"
    for file in re.findall(r"(?:\w+/)*test_\w+\.py", text):
        assert (ROOT / "tests" / file.removeprefix("tests/")).is_file(), f"{document}: {file}"


def test_each_fault_has_a_promise_and_a_test() -> None:
    """The tables of faults are whole: each row has its number, a promise, and a row of tests."""
    faults, _, tests = (ROOT / "docs/reliability.md").read_text().partition("## Tests")
    promises, shown = _numbered(faults), _numbered(tests)
    assert list(promises) == list(shown) == list(range(1, len(promises) + 1))
    for number, (_fault, promise, _not_promised) in promises.items():
        assert promise, number
        assert "test_" in shown[number][1], number


def _numbered(text: str) -> dict[int, list[str]]:
    """Return the cells of each row of a table that begins with a number."""
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {int(row[0]): row[1:] for row in rows if row[0].isdigit()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a document is a file or folder."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    """A reader can come to each page."""
    nav = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r": ([\w/-]+\.md)$", nav, re.MULTILINE))
    assert named == {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}


def test_the_commands_that_are_shown_exist() -> None:
    """Every `tensorpipe-ipc ...` of a shell block is taken by the command line, with its options."""
    shown = []
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            shown += re.findall(r"^(?:\w*\$ *)?tensorpipe-ipc +([^#\n]*)", block, re.MULTILINE)
    assert len(shown) > 10
    for line in shown:
        assert isinstance(cli._parser().parse_args(shlex.split(line)), argparse.Namespace), line


def test_the_make_targets_that_are_named_exist() -> None:
    """Of the README and of what contributors read."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE)) <= targets, page


def test_the_texts_of_errors_are_those_that_are_raised() -> None:
    """The page on troubles quotes errors as the code raises them: whoever looks for an error's text finds it there."""
    said = _texts_of_the_code()
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("## Errors of this library")[2]
    quoted = [text for line in page.splitlines() if line.startswith("|") for text in re.findall(r"`([^`]+)`", line)]
    assert len(quoted) > 25
    for text in quoted:
        for part in _GAPS.split(text):
            part = part.strip(" :;,")
            if len(part) >= LEAST and not _CODE.search(part):
                assert part in said, f"{part!r} of {text!r}"


def _texts_of_the_code() -> str:
    """Every string of the package; where something is put into one, a gap."""
    found = []
    for path in (ROOT / "tensorpipe_ipc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)
