"""``tensorpipe-ipc top`` as people see it: live, on a terminal, until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from inside import shared_queue_of

from tensorpipe_ipc import cli
from tensorpipe_ipc.shared_queue.survey import survey

PATIENCE = 20.0
_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A terminal of 40 lines and 120 columns, and the command that runs on it."""

    def __init__(self, *arguments: str, on_hangup: Any = signal.SIG_DFL) -> None:
        self.pid, self.line = pty.fork()
        if not self.pid:
            status = 99
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGHUP, on_hangup)
                os.environ.update(TERM="xterm", COLUMNS="120", LINES="40")
                sys.stdout = open(1, "w", closefd=False)  # and not where pytest collects what is printed
                status = cli.main(list(arguments))
            finally:
                os._exit(status)
        self.seen = ""

    def read_until(self, condition: Callable[[str], object]) -> str:
        """Return the output since the last call, without codes that move the cursor, once it meets the condition."""
        deadline, shown = time.monotonic() + PATIENCE, ""
        while not condition(shown):
            ready, _, _ = select.select([self.line], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"this is all that came:\n{shown}"
            self.seen += os.read(self.line, 1 << 16).decode(errors="replace")
            shown = _CODES.sub("", self.seen)
        self.seen = ""
        return shown

    def interrupt(self) -> int:
        """Ctrl-C, as the keyboard sends it. The exit status."""
        os.write(self.line, b"\x03")
        while True:
            with contextlib.suppress(OSError):  # EIO: nobody has the other side any more
                if os.read(self.line, 1 << 16):
                    continue
            break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(autouse=True)
def _ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs' queues do not take the terminal's lines, nor come and go between two looks."""
    pids = [os.getpid()]  # and not the pid of the process on the terminal
    monkeypatch.setattr("tensorpipe_ipc.cli.top.survey", lambda: survey(pids))


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Makes them."""
    made: list[Terminal] = []

    def make(*arguments: str, **options: Any) -> Terminal:
        made.append(Terminal(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        os.close(each.line)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)


def test_it_shows_what_changes(ctx: Any, terminal: Callable[..., Terminal]) -> None:
    """``top`` shows waiting messages, rates and holders, and shows them anew on a change. Ctrl-C ends it with 130."""
    queue = ctx.Queue(8)
    number = shared_queue_of(queue).number & 0xFFFFFFFF
    queue.put(torch.ones(1 << 18))
    screen = terminal("top", "--interval", "0.05")
    row = rf"{number}\s+%d of 8\s+%d\.0"
    screen.read_until(lambda shown: re.search(row % (1, 1), shown))
    queue.put(torch.ones(1 << 18))
    shown = screen.read_until(lambda shown: re.search(row % (2, 2), shown) and f"pid {os.getpid()}" in shown)
    assert "put/s" in shown
    assert "waiting" in shown
    held = queue.get()
    screen.read_until(lambda shown: re.search(rf"pid {os.getpid()}\s+0\s+1\s+1\s+1\.0", shown))
    assert len(held)
    assert screen.interrupt() == 130


def test_there_may_be_nothing_to_show(terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without queues it says so, and goes on looking."""
    monkeypatch.setattr("tensorpipe_ipc.cli.top.survey", list)
    screen = terminal("top", "--interval", "0.05")
    for _ in range(2):
        screen.read_until(lambda shown: "no queue of yours" in shown)
    assert screen.interrupt() == 130


@pytest.mark.parametrize(("on_hangup", "status"), [(signal.SIG_DFL, -signal.SIGHUP), (signal.SIG_IGN, 129)])
def test_on_a_closed_terminal_it_ends(terminal: Callable[..., Terminal], on_hangup: Any, status: int) -> None:
    """It does not outlive the window it was shown in, nor where that signal is ignored, as below ``nohup``."""
    screen = terminal("top", "--interval", "0.05", on_hangup=on_hangup)
    screen.read_until(bool)
    os.close(screen.line)
    screen.line = os.open(os.devnull, os.O_RDONLY)
    assert os.waitstatus_to_exitcode(os.waitpid(screen.pid, 0)[1]) == status


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--json"], "--json goes with --once"),
        (["--interval", "nan"], "--interval=nan: give 0 to"),
        (["--interval", "-1", "--once"], "--interval=-1.0: give 0 to"),
    ],
)
def test_what_it_cannot_do_it_says(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Instead of a traceback, or of a table where JSON was asked for."""
    assert cli.main(["top", *arguments]) == 1
    assert says in capsys.readouterr().err
