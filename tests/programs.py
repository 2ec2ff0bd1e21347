"""Programs run as users run them: in a process group of their own, bounded, and with nothing of them left at the end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BOUND = 100.0  # seconds: five processes that import torch at once on a busy machine need twenty
PATIENCE = 10.0  # seconds for what a program has started to end after it


class Done(NamedTuple):
    """How a program ended."""

    status: int
    out: str
    err: str


@contextlib.contextmanager
def started(*arguments: str, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A Python program that runs meanwhile. Whatever is left of its process group at the end is killed.

    Args:
        prefix: a command that runs it.
    """
    program = subprocess.Popen(
        [*prefix, sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where the tests themselves run with Ctrl-C ignored (in the background of a shell), programs must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield program
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        for stream in (program.stdout, program.stderr):
            assert stream is not None
            stream.close()


def ran_in_fork(path: Path, folder: Path) -> Done:
    """Run a program in a process that has imported torch already, which spares it the larger part of its time.

    Processes that it spawns begin from nothing, as they always do.

    Args:
        path: the program.
        folder: where what it says may stand meanwhile.
    """
    out, err = folder / "out", folder / "err"
    process = multiprocessing.get_context("forkserver").Process(target=_be_program, args=(path, out, err))
    process.start()
    process.join(BOUND)
    status = process.exitcode
    if status is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    process.close()
    assert status is not None, f"{path} does not end; it said {err.read_text()!r}"
    return Done(status, out.read_text(), _own_words(err.read_text()))


def _be_program(path: Path, out: Path, err: Path) -> None:
    os.setsid()
    for number, file in ((1, out), (2, err)):
        with open(file, "wb") as opened:
            os.dup2(opened.fileno(), number)
    os.environ["PYTHONPATH"] = str(ROOT)
    warnings.resetwarnings()
    warnings.simplefilter("default")
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")


def ended(program: subprocess.Popen[str]) -> Done:
    """Wait for a program's end. That it had to wait for others to start, as on a busy machine, is no part of what it says."""
    out, err = program.communicate(timeout=BOUND)
    return Done(program.returncode, out, _own_words(err))


def _own_words(err: str) -> str:
    return "".join(line for line in err.splitlines(keepends=True) if " has waited for 5 s: " not in line)


def ran(*arguments: str) -> Done:
    """Run a Python program."""
    with started(*arguments) as program:
        return ended(program)


def left_of(group: int) -> list[str]:
    """The commands of a program's group that live on. They have a while to go: multiprocessing's tracker ends after all."""
    deadline = time.monotonic() + PATIENCE
    while (left := _living(group)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def outliving(pids: Iterable[int], patience: float) -> list[int]:
    """Those of some processes that are still there after so many seconds. They are killed."""
    deadline = time.monotonic() + patience
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _lives(pid: int) -> bool:
    """Whether a process is there, and not only its name."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _living(group: int) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, its_group = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found
