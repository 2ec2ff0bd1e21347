"""Tree: one peer's processes, all under one that does what it is told: stand a crew up, run a program, end.

Peers set things that hold for a whole process (torch's sharing strategy), start threads and daemons (zenoh, Ray) or
wedge (what is killed in ``deaths``): each has a tree of its own, in a process group of its own, and a folder of its own
for temporary files, and all of that goes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from bench.all.links import Shape
from bench.all.peers import Peer
from bench.queue.crew import Crew, Program

__all__ = ["PeerFailed", "Tree", "marks", "named", "remove"]

PATIENCE = 90.0  # seconds for one task
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class PeerFailed(Exception):
    """A peer could not do what all are asked to; says why in one line."""


class Tree:
    """A peer's processes.

    Attributes:
        name: the peer's.

    Raises:
        PeerFailed: it is not to be had here.
    """

    def __init__(self, name: str, peer: Peer) -> None:
        self.name = name
        self._folder = tempfile.mkdtemp(prefix="bench-")  # short: sockets have their paths there
        context = multiprocessing.get_context("fork")
        self._control, controlled = context.Pipe()
        self._process: Any = context.Process(target=_lead, args=(peer, self._folder, controlled))
        self._process.start()
        controlled.close()
        try:
            self.answer()
        except PeerFailed:
            self.end()
            raise

    def run(self, program: Program, *arguments: Any) -> list[Any]:
        """Have the crew run a program: what its processes return, the senders' first."""
        self.tell("run", program, arguments)
        found: list[Any] = self.answer()
        return found

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have a function called in the tree, with what makes the peer's rivals before the arguments."""
        self.tell("call", function, arguments)
        return self.answer()

    def processes(self) -> list[psutil.Process]:
        """All processes of the tree."""
        try:
            lead = psutil.Process(self._process.pid)
            return [lead, *lead.children(recursive=True)]
        except psutil.Error:
            return []

    def leave(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(OSError):
            self._control.send(None)

    def end(self) -> None:
        """Wait a while until it has ended; else end it."""
        self.leave()
        self._process.join(10)
        self.kill()

    def kill(self) -> list[str]:
        """End all of it, now, and remove what stays of it in /dev/shm half a second later.

        Returns:
            The paths of what stayed: what one of its processes had mapped, or what is called after one by number.
        """
        processes = self.processes()
        mapped = marks(processes)
        for process in reversed(processes):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.join()
        mapped |= named(process.pid for process in processes)  # what was made meanwhile
        self._control.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if mapped:
            time.sleep(0.5)  # a daemon that cleans up has its chance
        left = [path for path in mapped if os.path.exists(path)]
        remove(left)
        return left

    def tell(self, *task: Any) -> None:
        """Begin a task; ``answer`` waits for its end. ("stand", shape) stands a crew up, in the place of the one
        before; ("fall",) takes it down."""
        with contextlib.suppress(OSError):  # who has ended has no answer
            self._control.send(task)

    def answer(self) -> Any:
        """Return the result of a task.

        Raises:
            PeerFailed: it failed, or did not end in time.
        """
        try:
            if not self._control.poll(PATIENCE):
                raise PeerFailed(f"no answer within {PATIENCE:g} s")
            fine, answer = self._control.recv()
        except (EOFError, OSError):
            raise PeerFailed("its processes ended") from None
        if not fine:
            raise PeerFailed(answer)
        return answer


def marks(processes: Sequence[psutil.Process]) -> set[str]:
    """Paths in /dev/shm that one of these processes has mapped, or that have its number in their names."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {entry.path for entry in process.memory_maps() if entry.path.startswith("/dev/shm/")}
    return found | named(process.pid for process in processes)


def named(pids: Iterable[int]) -> set[str]:
    """Paths in /dev/shm that have one of these numbers in their names: also of processes that are gone."""
    numbers = set(map(str, pids))
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if numbers & set(re.findall(r"\d+", name))}


def remove(paths: Iterable[str]) -> None:
    """Remove files that may be gone already."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _lead(peer: Peer, folder: str, control: Connection) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the conductor ends us
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # daemons of ours stay under us, to be measured and ended
    torch.set_num_threads(1)
    tempfile.tempdir = folder
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    crew: Any = None
    make: Any = None
    rival: Any = None

    def stand(shape: Shape) -> None:
        nonlocal crew, rival
        fall()
        rival = make(shape)
        crew = rival if peer.crew else Crew(rival, None, shape.senders, shape.receivers, halves=True, patience=60)

    def fall() -> None:
        nonlocal crew, rival
        marked = set() if peer.crew else marks(psutil.Process().children(recursive=True))
        if crew is not None:
            crew.close()
        if hasattr(rival, "dispose"):
            rival.dispose()
        crew = rival = None
        remove(marked)  # what a peer forgets when it is closed

    task: Any = ("begin",)
    while task is not None:
        try:
            answer: Any = None
            if task[0] == "begin":
                make = peer.maker()
            elif task[0] == "stand":
                stand(task[1])
            elif task[0] == "run":
                answer = crew.run(task[1], *task[2])
            elif task[0] == "fall":
                fall()
            else:
                fall()
                answer = task[1](make, *task[2])
            control.send((True, answer))
        except Exception as error:
            control.send((False, _told(error)))
        task = control.recv()
    with contextlib.suppress(Exception):
        leave = getattr(rival, "leave", None)
        fall()
        if leave is not None:
            leave()


def _told(error: Exception) -> str:
    """Return the reason in one line: the last one of what went wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, ImportError):
        return f"cannot be imported: {lines[0]}"
    traceback.print_exc()
    return " ".join(lines[-1].split())[:300]
