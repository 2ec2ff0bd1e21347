"""Runner: processes that do what they are told, and then wait for the next task.

However a ``with`` block is left, all of them are gone after it. They ignore Ctrl-C, from their first moment on, and leave it
to the caller's process; and the kernel kills them if that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

import torch

from tensorpipe_ipc.endpoints import presence, rendezvous_file
from tensorpipe_ipc.errors import MeasurementFailed, PeerLost, TensorPipeError

__all__ = ["DONE", "READY", "Member", "Runner", "obey"]

_PR_SET_PDEATHSIG = 1
_GRACE = 2.0  # seconds for those that were told to end
READY, DONE, _REFUSED, _FAILED = "ready", "done", "refused", "failed"


class Member(NamedTuple):
    """One of the processes, and the line to it."""

    name: str
    process: Any
    control: Connection


def obey(control: Connection, do: Callable[[Any], Any]) -> None:
    """Do each task that comes, and answer, until the caller says that it is over, or is gone."""
    with contextlib.suppress(EOFError):
        while (task := control.recv()) is not None:
            control.send(_answer(do, task))


def _answer(do: Callable[[Any], Any], task: Any) -> tuple[str, Any]:
    try:
        return DONE, do(task)
    except TensorPipeError as error:
        return _REFUSED, error
    except Exception:
        return _FAILED, traceback.format_exc()


class Runner:
    """The processes, and the caller's side of their lines.

    Attributes:
        members: the processes.
        what: they are doing, in words, for errors.
    """

    def __init__(self, context: Any, patience: float) -> None:
        """Nothing is started yet.

        Args:
            context: whose processes they are.
            patience: seconds for one task.
        """
        self.members: list[Member] = []
        self.what = "starting"
        self._context, self._patience = context, patience
        self._said: dict[tuple[str, str], Any] = {}  # by members, of each kind, before they are asked

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.end()

    def close(self, grace: float = _GRACE) -> None:
        """Tell all processes that it is over, and end them.

        Args:
            grace: seconds that they have for it, before they are killed.
        """
        try:
            for member in self.members:
                with contextlib.suppress(OSError):
                    member.control.send(None)
            deadline = time.monotonic() + grace
            for member in self.members:
                member.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            self.end()

    def start(self, jobs: Sequence[tuple[str, Callable[[Connection], None], Collection[int] | None]]) -> None:
        """Start a process for each job.

        Args:
            jobs: its name, what it does with its line to the caller, and the CPUs that it is bound to, if it is.
        """
        if self._context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # which would let signals in again, where they are held back below
        with _without_ctrl_c():  # children begin with it held back, until they ignore it
            for name, serve, cpus in jobs:
                control, controlled = self._context.Pipe()
                process = self._context.Process(target=_begin, args=(serve, controlled, cpus), name=name, daemon=True)
                with warnings.catch_warnings():  # "multi-threaded": of threads that do nothing
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                controlled.close()
                self.members.append(Member(f"the {process.name} (pid {process.pid})", process, control))

    def send(self, member: Member, what: Any) -> None:
        """Tell a process something.

        Raises:
            PeerLost: it died.
        """
        try:
            member.control.send(what)
        except OSError:
            raise self._death(member) from None

    def answers(self, members: Sequence[Member], wanted: str = DONE) -> list[Any]:
        """Return the next answer of each, once all have answered as wanted. Others may be done meanwhile, but not fail.

        Raises:
            PeerLost: one of the processes died.
            MeasurementFailed: one of them failed, or it took longer than ``patience``.
            TensorPipeError: what one of them met.
        """
        lines = {member.control: member for member in self.members}
        watched = {member.process.sentinel: member for member in self.members}
        deadline = time.monotonic() + self._patience
        while waiting := [member.name for member in members if (member.name, wanted) not in self._said]:
            ready = wait([*lines, *watched], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MeasurementFailed(
                    f"{self.what}: after {self._patience:g} s {', '.join(waiting)} had not done its part: a message was lost "
                    "on its way, or the pipeline stands still, or more patience is needed"
                )
            for control, member in lines.items():
                if control in ready:
                    kind, answer = self._heard(member)
                    self._said[member.name, kind] = answer
            for sentinel, member in watched.items():
                if sentinel in ready:
                    raise self._death(member)
        return [self._said.pop((member.name, wanted)) for member in members]

    def _heard(self, member: Member) -> tuple[str, Any]:
        """Return one process's answer, or raise its failure."""
        try:
            kind, answer = member.control.recv()
        except (EOFError, OSError):
            raise self._death(member) from None
        if kind == _REFUSED:
            raise answer
        if kind == _FAILED:
            raise MeasurementFailed(f"{self.what}: {member.name} failed:\n{answer}")
        return kind, answer

    def _death(self, member: Member) -> PeerLost:
        member.process.join(_GRACE)
        status = member.process.exitcode
        how = "is gone" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        return PeerLost(f"{self.what}: {member.name} {how}")

    def end(self) -> None:
        """Kill all processes that are left, and close everything. Again: nothing."""
        with _without_ctrl_c():
            for member in self.members:
                member.process.kill()
            for member in self.members:
                member.process.join()
                member.process.close()
                member.control.close()
            self.members.clear()
            rendezvous_file.sweep()  # what the killed have left
            presence.sweep()


def _begin(serve: Callable[[Connection], None], control: Connection, cpus: Collection[int] | None) -> None:
    """A process's main function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # who waits in a get would not notice
    torch.set_num_threads(1)
    gc.freeze()  # a collection would write to all that was inherited: memory would grow by that, and times by 50 ms
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    serve(control)


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Hold SIGINT back until the end of the body, and from what it starts.

    To block it is not enough, as it may come to any thread, also NumPy's own, and Python's handler then runs in the main
    one all the same. Processes that are started inherit that it is blocked.
    """
    came: list[int] = []
    handler: Any = None
    if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
        handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
