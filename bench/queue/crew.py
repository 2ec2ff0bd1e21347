"""Crew: processes with one rival between them, that do what they are told and then wait for the next task.

Senders are pinned to the first core and receivers to the last, or to half of the cores each. All crews of a comparison
stand ready together, so that rounds can go from one to the next.
"""

from __future__ import annotations

import functools
import mmap
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from bench.queue.rivals import Rival
from tensorpipe_ipc.benchmark.runner import Runner, obey

__all__ = ["Crew", "Link", "Program"]

PATIENCE = 180.0  # seconds for one task
_GRACE = 10.0  # seconds for rivals that end threads and daemons of their own
_CORES = sorted(os.sched_getaffinity(0))


class Program(NamedTuple):
    """A task: what each sender and what each receiver does, with the link and the task's arguments."""

    send: Callable[..., Any]
    receive: Callable[..., Any]


class Link:
    """The link between the processes of a crew.

    Attributes:
        there, back: from senders to receivers, and the other way where there is one.
        kept: what a program leaves for the next.
        sends, index: whether this process is a sender, and which of its kind.
        board: a page that all of them share; what is written there is a program's affair.
    """

    def __init__(self, there: Rival, back: Rival | None = None) -> None:
        self.there, self.back = there, back
        self.kept: list[Any] = []
        self.sends, self.index = True, 0
        self.board = mmap.mmap(-1, mmap.PAGESIZE)
        self._ready, self._tell = os.pipe()

    def open(self, sends: bool) -> None:
        """Open this process's end."""
        self.there.open(sends)
        if self.back is not None:
            self.back.open(not sends)

    def close(self) -> None:
        """Close it."""
        self.kept.clear()
        self.there.close()
        if self.back is not None:
            self.back.close()

    def is_ready(self) -> None:
        """Tell a sender, blocked in ``wait_until_ready``, that this receiver is about to receive."""
        os.write(self._tell, b"\0")

    def wait_until_ready(self) -> None:
        """Wait for a receiver, without disturbing a sender's own threads."""
        os.read(self._ready, 1)

    def end(self) -> None:
        """Close what the processes inherited."""
        os.close(self._ready)
        os.close(self._tell)
        self.board.close()


class Crew:
    """The processes, and their control.

    Args:
        halves: each kind has half of the cores, for rivals that have threads of their own; else one core.
        patience: seconds for one task.
    """

    def __init__(
        self,
        there: Rival,
        back: Rival | None = None,
        senders: int = 1,
        receivers: int = 1,
        *,
        halves: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        self._link, self._runner = Link(there, back), Runner(multiprocessing.get_context("fork"), patience)
        self._runner.what = type(there).__name__
        half = max(1, len(_CORES) // 2) if halves else 1
        jobs = []
        for sends, count, cores in ((True, senders, _CORES[:half]), (False, receivers, _CORES[-half:])):
            for index in range(count):
                serve = functools.partial(_serve, self._link, sends, index)
                jobs.append((f"{'sender' if sends else 'receiver'} {index}", serve, cores))
        try:
            self._runner.start(jobs)
            self.run(Program(_open, _open))
        except BaseException:
            self._runner.end()
            raise

    def run(self, program: Program, *arguments: Any) -> list[Any]:
        """Have a task done, and give what each process returns: the senders' first.

        Raises:
            RuntimeError: one of them failed, or did not end in time.
            PeerLost: one of them died.
        """
        try:
            for member in self._runner.members:
                self._runner.send(member, (program, arguments))
            return self._runner.answers(self._runner.members)
        except BaseException:
            self._runner.end()
            raise

    def close(self) -> None:
        """End all processes."""
        self._runner.close(_GRACE)
        self._link.end()
        del self._link


def _serve(link: Link, sends: bool, index: int, control: Connection) -> None:
    link.index, link.sends = index, sends
    obey(control, functools.partial(_do, link))
    link.close()


def _do(link: Link, task: tuple[Program, tuple[Any, ...]]) -> Any:
    program, arguments = task
    return (program.send if link.sends else program.receive)(link, *arguments)


def _open(link: Link) -> None:
    link.open(link.sends)
