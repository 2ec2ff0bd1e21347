"""The guard around every test: what a test may leave behind (nothing), and how long it may take.

``snapshot`` before, ``left`` after: what is there now and was not. ``time_limit`` and ``hang_limit`` bound what runs
under them. The fixtures and hooks that put them around each test stand in ``conftest``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import re
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from tensorpipe_ipc.borrowed import pyzmq_reaper

SHM = Path("/dev/shm")
ICEORYX2 = "iox2_"  # how the names of iceoryx2's files begin, which stay for the machine's next user of it
PATIENCE = 2.0  # seconds that what was closed has to go: libzmq's reaper and a killed child's parent are not at once
_OTHERS: set[tuple[int, int]] = set()  # device and inode of what was seen to be another program's
_MAPPED = re.compile(r" ([0-9a-f]+):([0-9a-f]+) ([1-9]\d*) ")
_SHARED = re.compile(
    rb"s [0-9a-f]{8,} \S+ \d+ *(.*)"
)  # a mapping that others may have too; before it, how it is accessed


class Residue(NamedTuple):
    """All that a process holds: one set of names per kind of thing, in words for people."""

    children: set[str]
    threads: set[str]
    descriptors: set[str]
    shared_memory: set[str]  # entries of /dev/shm
    sockets: set[str]  # socket files in the folders that were asked about, and all files of the runtime folder
    mappings: Counter[str]  # of shared memory into this process: how many of each file


def snapshot(folders: Iterable[Path] = ()) -> Residue:
    """Return all that this process holds now.

    Args:
        folders: where to look for socket files, besides the runtime folder.
    """
    _stop_reaper()
    return Residue(_children(), _threads(), _descriptors(), _shared_memory(), _files(folders), _mappings())


def left(before: Residue, folders: Iterable[Path] = (), patience: float = PATIENCE) -> list[str]:
    """Return all that is there now and was not at ``before``. Wait up to ``patience`` seconds for it to go.

    Anything that comes and goes meanwhile, in /dev/shm say, belongs to other programs.
    """
    found = stays = _difference(before, snapshot(folders))
    deadline = time.monotonic() + patience
    while found:
        gc.collect()  # takes 50 ms once torch is imported, so only where something is left
        seen, found = set(found), _difference(before, snapshot(folders))
        stays = [each for each in found if each in seen]
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return [_told(each) for each in stays]


def runtime_folder() -> Path:
    """Return the folder of this package's own sockets."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tensorpipe_ipc" if base else Path(f"/tmp/tensorpipe_ipc-{os.getuid()}")


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Fail what runs under it after so many seconds, unless it hangs in C (``hang_limit``)."""

    def expire(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"{what} took over {seconds:g} s")

    before: Callable[[int, FrameType | None], Any] | int | None = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def hang_limit(seconds: float) -> Iterator[None]:
    """End the process, and say where, if what runs under it hangs in C, where ``time_limit`` is not heard."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _difference(before: Residue, after: Residue) -> list[str]:
    found = []
    for kind, then, now in zip(Residue._fields, before, after, strict=True):
        new = now - then  # type: ignore[operator]
        if kind == "shared_memory":
            new = new - others(new)
        found += [f"{kind}: {name}" for name in sorted(new)]
    return found


def _stop_reaper() -> None:
    """Stop pyzmq's thread for lent memory, which pyzmq leaves running, where nothing is lent."""
    if pyzmq_reaper is not None and not pyzmq_reaper.refs:
        pyzmq_reaper.stop()


def _children() -> set[str]:
    multiprocessing.active_children()  # waits for those that have ended
    return {f"process {pid}" for pid in _descendants(os.getpid())}  # by number: a fork that execs changes its name


def _descendants(pid: int) -> set[int]:
    """All processes under one. The kernel's own lists of them; psutil reads all of /proc, which takes 10 ms."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found |= {child} | _descendants(child)
    return found


def _told(found: str) -> str:
    """With a process's command, which it may change between two looks."""
    return f"{found}: {_command(found.split()[-1])}" if found.startswith("children: ") else found


def _command(process: str) -> str:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone by now"
    return command[:120].strip() or "a zombie that nobody waited for"


def _threads() -> set[str]:
    """Python's threads, and libzmq's, which Python does not see. torch keeps a pool of its own, and may."""
    # Of one that Python did not start it does not hear that it has ended.
    tasks = list(Path("/proc/self/task").iterdir())
    lives = {int(task.name) for task in tasks}
    found = {f"{thread.name} ({thread.ident})" for thread in threading.enumerate() if thread.native_id in lives}
    for task in tasks:
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            if name.startswith("ZMQ"):
                found.add(f"{name} ({task.name})")
    return found


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def _shared_memory() -> set[str]:
    return {entry.name for entry in SHM.iterdir()} if SHM.is_dir() else set()


def others(names: Iterable[str]) -> set[str]:
    """Return the entries of /dev/shm that are gone, or in use by another program on this machine.

    They are known by their inodes, as glibc maps a semaphore under another name than it gets in the end.
    """
    found, unknown = set(), {}
    for name in names:
        try:
            status = os.stat(SHM / name)
        except FileNotFoundError:
            found.add(name)
            continue
        which = (status.st_dev, status.st_ino)
        if name.startswith(ICEORYX2) or which in _OTHERS:
            found.add(name)
        else:
            unknown[name] = which
    if unknown:
        _OTHERS.update(_in_use_elsewhere() & set(unknown.values()))
    return found | {name for name, which in unknown.items() if which in _OTHERS or not os.path.exists(SHM / name)}


def _in_use_elsewhere() -> set[tuple[int, int]]:
    """Device and inode of all that other programs map, or have open in /dev/shm."""
    ours, found = {os.getpid(), *_descendants(os.getpid())}, set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) not in ours:
            with contextlib.suppress(OSError):
                for major, minor, inode in _MAPPED.findall((process / "maps").read_text(errors="replace")):
                    found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
                for link in (process / "fd").iterdir():
                    if os.readlink(link).startswith(f"{SHM}/"):
                        status = os.stat(link)
                        found.add((status.st_dev, status.st_ino))
    return found


def _files(folders: Iterable[Path]) -> set[str]:
    found = {str(path) for path in runtime_folder().rglob("*")} if runtime_folder().is_dir() else set()
    for folder in folders:
        for path in folder.rglob("*") if folder.is_dir() else ():
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    found.add(str(path))
    return found


def _mappings() -> Counter[str]:
    found: Counter[str] = Counter()
    maps = Path("/proc/self/maps").read_bytes()
    for match in _SHARED.finditer(maps):
        name = match[1].decode(errors="replace")
        if maps[match.start() - 2] == ord("w") or name.startswith(("/memfd:", "/dev/shm/")):
            found[name or "anonymous"] += 1
    return found
