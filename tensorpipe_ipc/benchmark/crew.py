"""Crew: the processes of a measurement, which do what they are told and then wait for the next task.

::

    the caller ─ control ─> each producer and consumer      what to do; what was found
    consumer ─ turn ─> producer                             a token: whoever takes it may send the next message
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from tensorpipe_ipc.benchmark.messages import Make
from tensorpipe_ipc.benchmark.pipelines import OVER, End, Made
from tensorpipe_ipc.benchmark.runner import READY, Member, Runner, obey
from tensorpipe_ipc.errors import MeasurementFailed

__all__ = ["Crew", "Line", "Program", "Station", "Tokens"]

_OVER = True


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
        self._control.send((READY, None))
        if self.produces:
            self._control.recv()

    def is_over(self) -> bool:
        """Return whether this consumer was told that all messages have been taken."""
        return self._control.poll(0) and self._control.recv() is _OVER

    def serve(self, lines: Sequence[Line], control: Connection) -> None:
        """Do what the caller says, with the lines between the processes."""
        self._control = control
        ends: dict[tuple[int, bool], End] = {}
        obey(control, functools.partial(self._do, lines, ends))
        for end in ends.values():
            end.close()

    def _do(self, lines: Sequence[Line], ends: dict[tuple[int, bool], End], task: Any) -> Any:
        function, number, arguments = task
        line = lines[number]
        if function is None:
            is_back, address = arguments
            made = line.back if is_back else line.there
            assert made is not None
            end = ends[number, is_back] = made.open(self.produces is not is_back, address, self.is_over)
            return end.address
        self.end, self.back, self.make = ends[number, False], ends.get((number, True)), line.make
        return function(self, *arguments)


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
        self._runner = Runner(context, patience)
        self._context, self._lines = context, lines
        self._counts, self._pin = (producers, consumers), pin
        self._open: set[int] = set()

    def __enter__(self) -> Crew:
        self._turn, self._wake = Tokens(self._context), Tokens(self._context)
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.__exit__(kind, value, trace)
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
        self._runner.what = what
        self._open_ends(line)
        producers, consumers = self._split()
        producers = producers if program.produce is not None else []
        consumers = consumers if program.consume is not None else []
        for members, function in ((consumers, program.consume), (producers, program.produce)):
            for member in members:
                self._runner.send(member, (function, line, arguments))
        self._runner.answers([*producers, *consumers], READY)
        for member in producers:
            self._runner.send(member, None)
        if program.takes_turns:
            self._turn.give()
        found = self._runner.answers(producers)
        if program.is_shared and len(consumers) > 1:
            self._stop(line, consumers)
        taken = self._runner.answers(consumers)
        if program.takes_turns:
            if not self._turn.is_there():  # the one after the last
                raise MeasurementFailed(f"{what}: a turn is missing: a message was lost on its way")
            self._turn.take()
        return found, taken

    def _start(self) -> None:
        cpus, jobs = sorted(os.sched_getaffinity(0)), list[Any]()
        for produces, count in zip((True, False), self._counts, strict=True):
            for index in range(count):
                cpu = {cpus[(index if produces else -1 - index) % len(cpus)]} if self._pin else None
                name = "producer" if produces else "consumer"
                station = Station(index, produces, self._counts[1] > 1, self._turn, self._wake)
                serve = functools.partial(station.serve, self._lines)
                jobs.append((f"{name} {index}" if count > 1 else name, serve, cpu))
        self._runner.start(jobs)

    def _split(self) -> tuple[list[Member], list[Member]]:
        return self._runner.members[: self._counts[0]], self._runner.members[self._counts[0] :]

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
                    self._runner.send(member, (None, number, (is_back, address)))
                address = self._runner.answers(members)[0]
        self._open.add(number)

    def _stop(self, number: int, consumers: list[Member]) -> None:
        """Tell several consumers, none of whom knows how much the others have taken, that all is taken."""
        if not self._lines[number].there.ends_by_message:
            for member in consumers:
                self._runner.send(member, _OVER)
            return
        first = self._runner.members[0]
        self._runner.send(first, (_say_that_it_is_over, number, (len(consumers),)))
        self._runner.answers([first])

    def _end(self) -> None:
        self._runner.end()
        self._turn.close()
        self._wake.close()


def _say_that_it_is_over(station: Station, consumers: int) -> None:
    for _ in range(consumers):
        station.end.put(station.end.ready(OVER))
