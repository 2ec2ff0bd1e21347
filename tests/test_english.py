"""The English of docstrings: they begin with an actor, a verb or a noun, and not with a question word."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("tensorpipe_ipc", "tests", "bench", "examples")
QUESTIONS = {
    *("Who", "Whoever", "Whom", "Whose", "What", "Which", "Whether"),
    *("How", "When", "Where", "Why", "Those"),
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def wrong(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first sentence of each docstring that begins with a question word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node) or ""
            if text and text.split()[0].rstrip(",.:;") in QUESTIONS:
                yield node.body[0].lineno, text.partition("\n")[0]


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_with_a_question_word(folder: str) -> None:
    """Each docstring names its actor, or begins with a verb: "Return whether ..." and not "Whether ..."."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [f"{file}:{line}: {text}" for file in files for line, text in wrong(file.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)
