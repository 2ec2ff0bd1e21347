"""Programs run as users run them: in a process group of their own, bounded, and with nothing of them left at the end."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix, util
from pathlib import Path
from typing import NamedTuple

import containers
import pytest

ROOT = Path(__file__).resolve().parents[1]
BOUND = 100.0  # seconds: five processes that import torch at once on a busy machine need twenty
_number = itertools.count()
PATIENCE = 10.0  # seconds for what a program has started to end after it


class Done(NamedTuple):
    """The outcome of a program."""

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


class InFork:
    """A program that runs meanwhile, in a process that has torch imported already: most of a short program's time.

    The processes that it spawns have it, too; else they begin as spawned ones do. A program whose own start or end is
    what a test looks at is for ``started``. At the end of a ``with``, whatever is left of its process group is killed.

    Args:
        arguments: what stands after ``python``: a file, ``-m`` and a module, or ``-c`` and code; and its arguments.
        folder: where what it says may stand meanwhile.
        place: the folder in which it runs.
    """

    def __init__(self, *arguments: str, folder: Path, place: Path = ROOT) -> None:
        self._what, self._lines = arguments, 0
        self._out, self._err = (folder / f"{next(_number)}.{name}" for name in ("out", "err"))
        self._out.touch()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_be_program, args=(arguments, place, self._out, self._err))
        self._process.start()
        self.pid = self._process.pid or 0

    def line(self) -> str:
        """Wait for the next line that it prints."""
        deadline = time.monotonic() + BOUND
        while len(lines := self._out.read_text().splitlines(keepends=True)) <= self._lines or lines[-1][-1] != "\n":
            assert self._process.exitcode is None, f"{self._what} has ended; it said {self._err.read_text()!r}"
            assert time.monotonic() < deadline, f"{self._what} says nothing"
            time.sleep(0.001)
        self._lines += 1
        return lines[self._lines - 1]

    def end(self, bound: float = BOUND) -> Done:
        """Wait for its end, for so many seconds."""
        self._process.join(bound)
        status = self._process.exitcode
        assert status is not None, f"{self._what} does not end; it said {self._err.read_text()!r}"
        return Done(status, self._out.read_text(), _own_words(self._err.read_text()))

    def __enter__(self) -> InFork:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()  # which is not in its group yet if it has only begun
        self._process.join()
        self._process.close()


def ran_in_fork(*arguments: str, folder: Path) -> Done:
    """Run a Python program as ``InFork`` does."""
    with InFork(*arguments, folder=folder) as program:
        return program.end()


def ran_with_small_dev_shm(code: str, folder: Path) -> Done:
    """Run code where /dev/shm has 64 KiB, as in a container."""
    if not containers.HAS_SMALL:
        pytest.skip("no mount namespace may be made here")
    enter = f"import containers; containers.enter({containers.SMALL!r})\n"
    return ran_in_fork("-c", enter + code, folder=folder)


@contextlib.contextmanager
def spawning_by_fork() -> Iterator[None]:
    """Have this process spawn by a fork of the tests' fork server, which has imported torch."""
    before, popen_spawn_posix.Popen = popen_spawn_posix.Popen, popen_forkserver.Popen  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        popen_spawn_posix.Popen = before  # type: ignore[misc]


def _be_program(arguments: Sequence[str], place: Path, out: Path, err: Path) -> None:
    os.setsid()
    for number, file in ((1, out), (2, err)):
        with open(file, "wb") as opened:
            os.dup2(opened.fileno(), number)
    os.environ["PYTHONPATH"] = str(ROOT)
    os.chdir(place)
    _spawn_from_here()
    warnings.resetwarnings()
    warnings.simplefilter("default")
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
    warnings.filterwarnings(
        "ignore", "This DataLoader will create", UserWarning
    )  # more workers than there are cores here
    multiprocessing.set_start_method(None, force=True)  # what a program begins with, and not what this process is of
    how, *rest = arguments
    if how == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif how == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(how, run_name="__main__")


def _spawn_from_here() -> None:
    """Have what this process spawns forked from what it is now: multiprocessing's fork server, itself by fork."""
    forkserver._forkserver.__init__()  # type: ignore[attr-defined, misc]  # not the one that this process is of
    forkserver.set_forkserver_preload([])
    start, util.spawnv_passfds = util.spawnv_passfds, _fork_and_do  # type: ignore[attr-defined]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start  # type: ignore[attr-defined]
    popen_spawn_posix.Popen = popen_forkserver.Popen  # type: ignore[misc, assignment]


def _fork_and_do(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Do what multiprocessing starts an interpreter for (``arguments`` end with the code) in a fork of this one."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            exec(arguments[-1])
        os._exit(0)
    return pid


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
    """Return those processes that are still there after ``patience`` seconds, and kill them."""
    deadline = time.monotonic() + patience
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _lives(pid: int) -> bool:
    """Return whether a process lives. A zombie does not."""
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
