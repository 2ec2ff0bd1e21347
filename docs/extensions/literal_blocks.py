"""For the reference: the lines below a docstring's "::" become a fenced block, in Python's colours where they are Python."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_LITERAL = re.compile(r"(?:^|(?<=\S))::\n\n((?:(?: {4}[^\n]*)?\n)*(?: {4}[^\n]*)(?:\n|\Z))", re.MULTILINE)


class LiteralBlocks(griffe.Extension):
    """Markdown for reStructuredText's literal blocks, in every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one module, class, function or attribute."""
        if obj.docstring is not None and "::" in obj.docstring.value:
            obj.docstring.value = _LITERAL.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    code = textwrap.dedent(match[1]).strip("\n")
    colon = ":\n\n" if match.string[: match.start()].rpartition("\n")[2].strip() else ""
    return f"{colon}```{_language(code)}\n{code}\n```\n"


def _language(code: str) -> str:
    try:
        compile(code, "docstring", "exec")
    except SyntaxError:
        return "text"
    return "python"
