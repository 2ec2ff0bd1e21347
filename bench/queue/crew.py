"""Crew: processes with one rival between them, that do what they are told and then wait for the next task.

Senders are pinned to the first core and receivers to the last. All crews of a comparison stand ready together, so that
rounds can go from one to the next.
"""

from __future__ import annotations

import contextlib
import ctypes
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
    """What lies between the processes of a crew.

    Attributes:
        there, back: from senders to receivers, and the other way where there is one.
        kept: what a program leaves for the next.
    """

    def __init__(self, there: Rival, back: Rival | None = None) -> None:
        self.there, self.back = there, back
        self.kept: list[Any] = []
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


class Crew:
    """The processes, and their control."""

    def __init__(self, there: Rival, back: Rival | None = None, senders: int = 1, receivers: int = 1) -> None:
        self._link = Link(there, back)
        self._members = [self._start(True) for _ in range(senders)] + [self._start(False) for _ in range(receivers)]
        self._answers()  # all have opened their ends

    def _start(self, sends: bool) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("fork")
        control, controlled = context.Pipe()
        process = context.Process(target=_serve, args=(self._link, sends, controlled), daemon=True)
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
            ready = wait(list(waiting), PATIENCE)
            if not ready:
                self.kill()
                raise RuntimeError(f"{type(self._link.there).__name__}: no answer within {PATIENCE:g} s")
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


def _serve(link: Link, sends: bool, control: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the conductor ends us
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should it be killed: who polls would not notice
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {_CORES[0] if sends else _CORES[-1]})
    link.open(sends)
    control.send((True, None))
    while (task := control.recv()) is not None:
        program, arguments = task
        try:
            answer = True, (program.send if sends else program.receive)(link, *arguments)
        except Exception:
            answer = False, traceback.format_exc()
        control.send(answer)
    link.close()
