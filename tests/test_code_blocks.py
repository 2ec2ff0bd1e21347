"""Every Python block of the README and of docs/ runs, alone or beside those that it talks to, and says nothing unforeseen."""

from __future__ import annotations

import contextlib
import doctest
import re
from pathlib import Path

import pytest
from documents import Block, Program, blocks_of, programs_of
from programs import ROOT, Done, InFork

from tensorpipe_ipc.cli import main

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [program for page in PAGES for program in programs_of(blocks_of(page, ROOT))]
BOUND = 30.0  # seconds for one that takes a fraction of one


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_block(program: Program, tmp_path: Path, free_port: int) -> None:
    """It ends well within its time, with nothing on stderr, and prints what its page says that it prints."""
    folder, said = tmp_path / "folder", tmp_path / "said"
    folder.mkdir()
    said.mkdir()
    for name in dict.fromkeys(name for block in program.blocks for name in block.keys):
        assert main(["keygen", str(folder / name)]) == 0
    running: list[tuple[Block, InFork]] = []
    with contextlib.ExitStack() as stack:
        for block in program.blocks:
            path = said / f"{Path(block.page).stem}_{block.line}.py"
            path.write_text(_here(block.code, free_port))
            compile(path.read_text(), str(path), "exec")
            if not block.not_run:
                running.append((block, stack.enter_context(InFork(str(path), folder=said, place=folder))))
        for block, forked in running:
            _check(block, forked.end(BOUND))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("<!-- preamble: nobody -->\n```python\n1\n```\n", "no preamble 'nobody'"),
        ("<!-- beside: two -->\nno block\n", "1 comments for blocks stand before none"),
    ],
)
def test_a_comment_that_means_no_block_is_seen(text: str, what: str, tmp_path: Path) -> None:
    """A page whose comment is misspelt, or stands in the wrong place, is not taken for one that needs none."""
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=what):
        blocks_of(tmp_path / "page.md", tmp_path)


def test_what_a_block_prints_is_compared() -> None:
    """Another output than the page's is a failure, and so is a word on stderr."""
    block = Block("page.md", 1, "", prints="a ... c\n")
    _check(block, Done(0, "a b c\n", ""))
    for done in (Done(0, "a b\n", ""), Done(0, "a b c\n", "a warning"), Done(1, "a b c\n", "")):
        with pytest.raises(AssertionError, match="page.md:1"):
            _check(block, done)


def _here(code: str, port: int) -> str:
    """The code for this one machine: its host names are loopback, and its port is one that nobody has."""
    return re.sub(r"tcp://(?!127\.)[a-z]\w*:5555", f"tcp://127.0.0.1:{port}", code).replace(":5555", f":{port}")


def _check(block: Block, done: Done) -> None:
    assert (done.status, done.err) == (0, ""), f"{block.page}:{block.line} ended with {done.status}: {done.err}"
    if block.prints is not None:
        same = doctest.OutputChecker().check_output(block.prints, done.out, doctest.ELLIPSIS)
        assert same, f"{block.page}:{block.line} printed\n{done.out}\nand its page says\n{block.prints}"
