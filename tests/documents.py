"""The Python blocks of the README and of docs/: found in the text, completed as their page says, and run as programs.

A block is a program of its own, unless an HTML comment on the lines before it says more::

    <!-- preamble: NAME            the code in the comment stands before the block's, in the same file; blocks below that say
    ...code... -->                 <!-- preamble: NAME --> have the same one
    <!-- epilogue                  the code in the comment stands behind the block's
    ...code... -->
    <!-- beside: NAME -->          all blocks of the page with this name run at the same time, a process each
    <!-- keys: NAME NAME -->       `tensorpipe-ipc keygen` has made these keys before it starts
    <!-- not run: WHY -->          it is compiled, and no more

A text block behind ``<!-- prints -->`` is what the Python block before it prints; ``...`` stands for anything.
A block's folder is empty but for the keys. Host names and port 5555 become loopback and a port that is free.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Block", "Program", "blocks_of", "programs_of"]

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+) *(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=ticks) *$", re.M | re.S
)
_COMMENT = re.compile(
    r"<!-- *(?P<what>preamble|epilogue|beside|keys|not run|prints)(?:: *(?P<name>[^\n]*?))?(?: *\n(?P<code>.*?))? *-->\s*\Z",
    re.S,
)
_LANGUAGES = ("python", "py")


class Block(NamedTuple):
    """One fenced Python block, and what its page says of it."""

    page: str
    line: int
    code: str
    beside: str = ""
    keys: tuple[str, ...] = ()
    not_run: str = ""
    prints: str | None = None


class Program(NamedTuple):
    """Blocks that run at the same time; most often one."""

    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        return " ".join(dict.fromkeys(f"{block.page}:{block.line}" for block in self.blocks))


def blocks_of(page: Path, root: Path) -> list[Block]:
    """Return the Python blocks of a page, in order.

    Raises:
        ValueError: a comment names a preamble that is not there, or stands before no block.
    """
    text, name = page.read_text(encoding="utf-8"), page.relative_to(root).as_posix()
    found: list[Block] = []
    preambles: dict[str, str] = {}
    seen = 0
    for fence in _FENCE.finditer(text):
        said = _said_before(text, fence.start())
        seen += len(said)
        options = {what: (argument, code) for what, argument, code in said}
        code = _dedented(fence["code"], len(fence["indent"]))
        if fence["language"] not in _LANGUAGES:
            if "prints" in options:
                found[-1] = found[-1]._replace(prints=code)
            continue
        if "preamble" in options:
            argument, given = options["preamble"]
            if given is not None:
                preambles[argument] = _dedented(given, len(fence["indent"]))
            if argument not in preambles:
                raise ValueError(f"{name}: no preamble {argument!r} stands above")
            code = preambles[argument] + code
        if "epilogue" in options:
            code += _dedented(options["epilogue"][1] or "", len(fence["indent"]))
        line = text.count("\n", 0, fence.start()) + 1
        found.append(
            Block(
                name,
                line,
                code,
                options.get("beside", ("", None))[0],
                tuple(options.get("keys", ("", None))[0].split()),
                options.get("not run", ("", None))[0],
            )
        )
    written = len(re.findall(r"<!-- *(?:preamble|epilogue|beside|keys|not run|prints)\b", text))
    if seen != written:
        raise ValueError(f"{name}: {written - seen} comments for blocks stand before none")
    return found


def programs_of(blocks: list[Block]) -> list[Program]:
    """Return the blocks of one page, those together that run beside each other."""
    together: dict[str, list[Block]] = {}
    for block in blocks:
        together.setdefault(block.beside or f"line {block.line}", []).append(block)
    return [Program(tuple(each)) for each in together.values()]


def _said_before(text: str, at: int) -> list[tuple[str, str, str | None]]:
    """The comments that stand directly before a place, in order."""
    found = []
    while True:
        begin = text.rfind("<!--", 0, at)
        match = _COMMENT.match(text[begin:at]) if begin >= 0 else None
        if match is None:
            return found[::-1]
        found.append((match["what"], match["name"] or "", match["code"]))
        at = begin
        at = len(text[:at].rstrip(" "))


def _dedented(code: str, width: int) -> str:
    lines = (line[width:] if line[:width].isspace() else line for line in code.splitlines())
    return "".join(f"{line}\n" for line in lines)
