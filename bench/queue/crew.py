"""Crew: processes with one rival between them, that do what they are told and then wait for the next task.

Senders are pinned to the first core and receivers to the last, or to half of the cores each. All crews of a comparison
stand ready together, so that rounds can go from one to the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from bench.queue.rivals import Rival

__all__ = ["Crew", "Link", "Program"]

PATIENCE = 180.0  # seconds for one task
_PR_SET_PDEATHSIG = 1
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
        index: which of its kind (senders, receivers) this process is.
        board: a page that all of them share; what is written there is a program's affair.
    """

    def __init__(self, there: Rival, back: Rival | None = None) -> None:
        self.there, self.back = there, back
        self.kept: list[Any] = []
        self.index = 0
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
        self._link, self._patience = Link(there, back), patience
        half = max(1, len(_CORES) // 2) if halves else 1
        self._cores = {True: set(_CORES[:half]), False: set(_CORES[-half:])}
        self._members = [self._start(True, index) for index in range(senders)]
        self._members += [self._start(False, index) for index in range(receivers)]
        self._answers()  # all have opened their ends

    def _start(self, sends: bool, index: int) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("fork")
        control, controlled = context.Pipe()
        process = context.Process(
            target=_serve, args=(self._link, sends, index, self._cores[sends], controlled), daemon=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # "multi-threaded": torch's threads, which do nothing
            process.start()
        controlled.close()
        return process, control

    def run(self, program: Program, *arguments: Any) -> list[Any]:
        """Have a task done, and give what each process returns: the senders' first.

        Raises:
            RuntimeError: one of them failed, or did not end in time.
        """
        for _, control in self._members:
            control.send((program, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        waiting = {control: index for index, (_, control) in enumerate(self._members)}
        while waiting:
            ready = wait(list(waiting), self._patience)
            if not ready:
                self.kill()
                raise RuntimeError(f"{type(self._link.there).__name__}: no answer within {self._patience:g} s")
            for control in ready:
                assert isinstance(control, Connection)
                try:
                    fine, answer = control.recv()
                except EOFError:
                    fine, answer = False, "it ended"
                if not fine:
                    self.kill()
                    raise RuntimeError(f"a process of {type(self._link.there).__name__} failed:\n{answer}")
                answers[waiting.pop(control)] = answer
        return [answers[index] for index in range(len(answers))]

    def close(self) -> None:
        """End all processes."""
        for _, control in self._members:
            with contextlib.suppress(OSError):
                control.send(None)
        for process, control in self._members:
            process.join(10)
            control.close()
        self.kill()
        self._link.end()
        del self._link

    def kill(self) -> None:
        """End those that have not ended."""
        for process, _ in self._members:
            if process.is_alive():
                process.kill()
                process.join()


def _serve(link: Link, sends: bool, index: int, cores: set[int], control: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the conductor ends us
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should it be killed: who polls would not notice
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores)
    link.index = index
    try:
        link.open(sends)
    except Exception:
        control.send((False, traceback.format_exc()))
        return
    control.send((True, None))
    while (task := control.recv()) is not None:
        program, arguments = task
        try:
            answer = True, (program.send if sends else program.receive)(link, *arguments)
        except Exception:
            answer = False, traceback.format_exc()
        control.send(answer)
    link.close()
