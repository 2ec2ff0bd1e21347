"""Crew: the processes of a measurement, which do what they are told and then wait for the next task.

::

    the caller ─ control ─> each producer and consumer      what to do; what was found
    consumer ─ turn ─> producer                             a token: whoever takes it may send the next message

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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

import torch

from tensorpipe_ipc.benchmark.messages import Make
from tensorpipe_ipc.benchmark.pipelines import OVER, End, Made
from tensorpipe_ipc.errors import MeasurementFailed, PeerLost, TensorPipeError
from tensorpipe_ipc.transport import presence, rendezvous_file

__all__ = ["Crew", "Line", "Program", "Station", "Tokens"]

_PR_SET_PDEATHSIG = 1
_GRACE = 2.0  # seconds for those that were told to end


class Program(NamedTuple):
    """A task: what each producer and what each consumer does, at its station and with the task's arguments."""

    produce: Callable[..., Any] | None
    consume: Callable[..., Any] | None
    takes_turns: bool = False
    """Whether one message at a time is on its way: then the first turn is given when all are ready."""
    is_shared: bool = False
    """Whether several consumers share what comes, so that each has to be told when all of it is taken."""


class Line(NamedTuple):
    """The ways of one kind of message."""

    there: Made
    """From producers to consumers."""
    back: Made | None
    """From the one consumer to the one producer, where it is asked to answer."""
    make: Make
    """Makes messages."""


class Tokens:
    """A pipe of 8 bytes each. Both its ends block."""

    def __init__(self, context: Any) -> None:
        self._taken, self._given = context.Pipe(duplex=False)

    def give(self) -> None:
        """Let somebody have one."""
        os.write(self._given.fileno(), b"8 bytes.")

    def take(self) -> None:
        """Wait for one."""
        os.read(self._taken.fileno(), 8)

    def is_there(self) -> bool:
        """Return whether a message can be taken at once."""
        found: bool = self._taken.poll(0)
        return found

    def descriptors(self) -> tuple[int, int]:
        """Return the descriptors to read from and to write to."""
        return self._taken.fileno(), self._given.fileno()

    def close(self) -> None:
        """Close it here."""
        self._taken.close()
        self._given.close()


class Station:
    """The tools of one process of the crew.

    Attributes:
        index: its number among producers, or among consumers.
        shares: whether there are several consumers.
        end, make: its end of the pipeline that is measured now, and what makes its messages.
        back: its end of that which answers take, if there is one.
        turn, wake: pipes that it has in common with the others.
        kept: what a program leaves for the next.
    """

    def __init__(self, index: int, produces: bool, shares: bool, turn: Tokens, wake: Tokens) -> None:
        self.index, self.produces, self.shares, self.turn, self.wake = index, produces, shares, turn, wake
        self.kept: list[Any] = []
        self.end: End
        self.back: End | None
        self.make: Make
        self._control: Connection

    def arrive(self) -> None:
        """Say that this process is ready; a producer waits until all are."""
        self._control.send((_READY, None))
        if self.produces:
            self._control.recv()

    def is_over(self) -> bool:
        """Return whether this consumer was told that all messages have been taken."""
        return self._control.poll(0) and self._control.recv() is _OVER

    def serve(self, control: Connection, lines: Sequence[Line], cpu: int | None) -> None:
        """The process's main function."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # who waits in a get would not notice
        torch.set_num_threads(1)
        gc.freeze()  # a collection would write to all that was inherited: memory would grow by that, and times by 50 ms
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})
        self._control = control
        ends: dict[tuple[int, bool], End] = {}
        with contextlib.suppress(EOFError):  # the caller is gone
            while (task := control.recv()) is not None:
                control.send(self._answer(task, lines, ends))
        for end in ends.values():
            end.close()

    def _answer(self, task: Any, lines: Sequence[Line], ends: dict[tuple[int, bool], End]) -> tuple[str, Any]:
        try:
            function, number, arguments = task
            line = lines[number]
            if function is None:
                is_back, address = arguments
                made = line.back if is_back else line.there
                assert made is not None
                end = ends[number, is_back] = made.open(self.produces is not is_back, address, self.is_over)
                return _DONE, end.address
            self.end, self.back, self.make = ends[number, False], ends.get((number, True)), line.make
            return _DONE, function(self, *arguments)
        except TensorPipeError as error:
            return _REFUSED, error
        except Exception:
            return _FAILED, traceback.format_exc()


_READY, _DONE, _REFUSED, _FAILED, _OVER = "ready", "done", "refused", "failed", True


class _Member(NamedTuple):
    name: str
    process: Any
    control: Connection


class Crew:
    """The processes, and their control."""

    def __init__(
        self,
        context: Any,
        lines: Sequence[Line],
        *,
        producers: int,
        consumers: int,
        pin: bool,
        patience: float,
    ) -> None:
        """Nothing is started yet.

        Args:
            context: whose processes they are.
            lines: that they have between them.
            pin: whether each is bound to a CPU: producers from the first on, consumers from the last.
            patience: seconds for one task.
        """
        self._context, self._lines, self._patience = context, lines, patience
        self._counts, self._pin = (producers, consumers), pin
        self._open: set[int] = set()
        self._members: list[_Member] = []
        self._said: dict[tuple[str, str], Any] = {}  # by members, of each kind, before they are asked
        self._what = "starting"

    def __enter__(self) -> Crew:
        self._turn, self._wake = Tokens(self._context), Tokens(self._context)
        if self._context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # which would let signals in again, where they are held back below
        try:
            with _without_ctrl_c():  # children begin with it held back, until they ignore it
                self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for member in self._members:
                    with contextlib.suppress(OSError):
                        member.control.send(None)
                deadline = time.monotonic() + _GRACE
                for member in self._members:
                    member.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            self._end()

    def run(self, program: Program, line: int, *arguments: Any, what: str) -> tuple[list[Any], list[Any]]:
        """Have a task done.

        Args:
            line: the number of that which is used.
            what: in words, for errors.

        Returns:
            What each producer and what each consumer found.

        Raises:
            PeerLost: one of them died.
            MeasurementFailed: one of them failed, or it took longer than ``patience``.
            TensorPipeError: what one of them met.
        """
        self._what = what
        self._open_ends(line)
        producers, consumers = self._split()
        producers = producers if program.produce is not None else []
        consumers = consumers if program.consume is not None else []
        for members, function in ((consumers, program.consume), (producers, program.produce)):
            for member in members:
                self._send(member, (function, line, arguments))
        self._answers([*producers, *consumers], _READY)
        for member in producers:
            self._send(member, None)
        if program.takes_turns:
            self._turn.give()
        found = self._answers(producers)
        if program.is_shared and len(consumers) > 1:
            self._stop(line, consumers)
        taken = self._answers(consumers)
        if program.takes_turns:
            if not self._turn.is_there():  # the one after the last
                raise MeasurementFailed(f"{what}: a turn is missing: a message was lost on its way")
            self._turn.take()
        return found, taken

    def _start(self) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        for produces, count in zip((True, False), self._counts, strict=True):
            for index in range(count):
                cpu = cpus[(index if produces else -1 - index) % len(cpus)] if self._pin else None
                control, controlled = self._context.Pipe()
                name = "producer" if produces else "consumer"
                process = self._context.Process(
                    target=Station(index, produces, self._counts[1] > 1, self._turn, self._wake).serve,
                    args=(controlled, self._lines, cpu),
                    name=f"{name} {index}" if count > 1 else name,
                    daemon=True,
                )
                with warnings.catch_warnings():  # "multi-threaded": of threads that do nothing
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                controlled.close()
                self._members.append(_Member(f"the {process.name} (pid {process.pid})", process, control))

    def _split(self) -> tuple[list[_Member], list[_Member]]:
        return self._members[: self._counts[0]], self._members[self._counts[0] :]

    def _open_ends(self, number: int) -> None:
        """Have everybody open an end of a line's pipelines: first those who bind, as the others need their address."""
        if number in self._open:
            return
        producers, consumers = self._split()
        line = self._lines[number]
        for made, is_back in ((line.there, False), (line.back, True)):
            if made is None:
                continue
            put, get = (consumers, producers) if is_back else (producers, consumers)
            address = None
            for members in (put, get) if made.producer_binds else (get, put):
                for member in members:
                    self._send(member, (None, number, (is_back, address)))
                address = self._answers(members)[0]
        self._open.add(number)

    def _stop(self, number: int, consumers: list[_Member]) -> None:
        """Tell several consumers, none of whom knows how much the others have taken, that all is taken."""
        if not self._lines[number].there.ends_by_message:
            for member in consumers:
                self._send(member, _OVER)
            return
        first = self._members[0]
        self._send(first, (_say_that_it_is_over, number, (len(consumers),)))
        self._answers([first])

    def _send(self, member: _Member, what: Any) -> None:
        try:
            member.control.send(what)
        except OSError:
            raise self._death(member) from None

    def _answers(self, members: Sequence[_Member], wanted: str = _DONE) -> list[Any]:
        """Return the next answer of each, once all have answered as wanted. Others may be done meanwhile, but not fail."""
        lines = {member.control: member for member in self._members}
        watched = {member.process.sentinel: member for member in self._members}
        deadline = time.monotonic() + self._patience
        while waiting := [member.name for member in members if (member.name, wanted) not in self._said]:
            ready = wait([*lines, *watched], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MeasurementFailed(
                    f"{self._what}: after {self._patience:g} s {', '.join(waiting)} had not done its part: a message was lost "
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

    def _heard(self, member: _Member) -> tuple[str, Any]:
        """Return one process's answer, or raise its failure."""
        try:
            kind, answer = member.control.recv()
        except (EOFError, OSError):
            raise self._death(member) from None
        if kind == _REFUSED:
            raise answer
        if kind == _FAILED:
            raise MeasurementFailed(f"{self._what}: {member.name} failed:\n{answer}")
        return kind, answer

    def _death(self, member: _Member) -> PeerLost:
        member.process.join(_GRACE)
        status = member.process.exitcode
        how = "is gone" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        return PeerLost(f"{self._what}: {member.name} {how}")

    def _end(self) -> None:
        """Kill whoever is left, and close everything."""
        with _without_ctrl_c():
            for member in self._members:
                member.process.kill()
            for member in self._members:
                member.process.join()
                member.process.close()
                member.control.close()
            self._members.clear()
            self._turn.close()
            self._wake.close()
            rendezvous_file.sweep()  # what the killed have left
            presence.sweep()


def _say_that_it_is_over(station: Station, consumers: int) -> None:
    for _ in range(consumers):
        station.end.put(station.end.ready(OVER))


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
