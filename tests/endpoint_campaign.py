"""The kill campaign over endpoints: unrelated programs under SIGKILL and SIGSTOP, the binder among them.

``python -m tests.campaign --endpoints --kills 200 --seed 7``. Each program (``endpoint_program``) is started by a command
line of its own and finds the others by the endpoint's name; shared memory is required. Rounds alternate between many
producers with one consumer that binds, and one producer that binds with many consumers.

The judge: what came was begun, came once, and came to each consumer in its producer's order and intact (C1, C2, C3, C7).
What is missing though its ``put`` had returned was in flight towards a consumer that was killed in the producer's time:
nothing, where none was (C4); at most ``maxsize`` and one for each, where some were; and of producers that lived on, what
their statistics count as lost, and at most one message for each killed consumer that had just taken it (C5). Somebody
goes on soon after each death that leaves both sides alive (C6). In the end the folder of the endpoint is clean as soon as
the next binder has come and gone, and no process is left (C8).
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tensorpipe_ipc as tp
from tensorpipe_ipc.transport.addresses import parse, runtime_folder
from tensorpipe_ipc.transport.rendezvous_file import path_of
from tests.campaign import HANG, RETURNED, Figures, Judge, journal, nothing_left
from tests.endpoint_program import ENDPOINT, JOURNAL_WORDS, LOST, STOP_CONSUMERS, STOP_PRODUCERS

ROUNDS = (((64, True), (3, False)), ((3, True), (64, False)))  # by seed: maxsize, and whether the consumer binds
CROWD = 3  # of the side that connects
PATIENCE = 60.0  # seconds for a program to start
SPARE = 2  # programs that have imported everything and wait
ROOT = Path(__file__).resolve().parents[1]


class Program:
    """One program, and when it was what."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.endpoint_program", str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid, self.folder = self._process.pid, folder
        self.role, self.who, self.words = "", 0, memoryview(b"")
        self.began = self.ended = 0.0
        self.killed = False

    def await_readiness(self) -> None:
        """Wait until it has imported everything: seconds, on a machine that does other things too."""
        assert self._process.stdout is not None
        with self._process.stdout as file:
            ready, _, _ = select.select([file], [], [], PATIENCE)
            assert ready, "a program does not start"
            assert file.readline() == "here\n", "a program ended before it began"

    def begin(self, role: str, who: int, maxsize: int, binds: bool) -> None:
        """Tell it what it is."""
        self.role, self.who, self.began = role, who, time.monotonic()
        self.words = journal(self.folder / f"{role}{who}", 4 if role == "put" else JOURNAL_WORDS)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{role} {who} {maxsize} {'binds' if binds else 'connects'}\n")
        self._process.stdin.close()

    def kill(self) -> None:
        """SIGKILL."""
        self.ended, self.killed = time.monotonic(), True
        os.kill(self.pid, signal.SIGKILL)
        self.reap(-signal.SIGKILL)

    def reap(self, expected: int = 0) -> None:
        """Wait for its end."""
        try:
            status = self._process.wait(HANG + 40)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.role}{self.who} does not end") from None
        self.ended = self.ended or time.monotonic()
        assert status == expected, f"{self.role}{self.who} ended with {status}, not {expected}"

    def discard(self) -> None:
        """The end of one that was never told anything, or of a campaign that failed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    @property
    def begun(self) -> bool:
        """Whether it has put or taken anything."""
        return bool(self.words[RETURNED if self.role == "put" else 0])

    def overlaps(self, other: Program) -> bool:
        """Whether the two lived at one time."""
        return self.began <= other.ended and other.began <= self.ended


class Fate(NamedTuple):
    """What became of a producer's messages."""

    returned: int
    missing: int
    lost: int  # as it counted them
    killed: bool
    dead_consumers: int  # in its time

    def check(self, maxsize: int) -> None:
        """Nothing is missing that was promised."""
        least = 0 if self.killed else self.lost
        most = self.dead_consumers * (maxsize + 1) if self.killed else self.lost + self.dead_consumers
        assert least <= self.missing <= most, f"missing: {self}, with maxsize {maxsize}"


class EndpointJudge(Judge):
    """Compares what was put with what was got; what may be missing follows from who was killed when."""

    def fates(self, programs: list[Program]) -> list[Fate]:
        """All that was promised, and what became of each producer's messages."""
        dead = [each for each in programs if each.role == "got" and each.killed]
        found = []
        for program in programs:
            if program.role != "put":
                continue
            begun, returned = self.put[program.who]
            counts = self.got.get(program.who, np.zeros(1, np.uint8))
            assert counts.max() <= 1, f"message {int(counts.argmax())} of producer {program.who} came twice"
            assert not counts[begun:].any(), f"a message of producer {program.who} came that it never put"
            missing = returned - int(counts[:returned].sum())
            killed_here = sum(map(program.overlaps, dead))
            found.append(Fate(returned, missing, program.words[LOST], program.killed, killed_here))
        return found


class Round:
    """One endpoint, and the programs at it."""

    def __init__(
        self, maxsize: int, fans_in: bool, choose: random.Random, folder: Path, figures: Figures, spares: list[Program]
    ) -> None:
        self.maxsize, self.choose, self.folder, self.figures = maxsize, choose, folder, figures
        self.binder = "got" if fans_in else "put"
        self.board = journal(folder / "board", 8)
        self.all: list[Program] = []
        self.at_work: list[Program] = []
        self.stopped: list[Program] = []
        self.spares = spares

    def start(self, role: str) -> None:
        """A new program."""
        program = self.spares.pop(0)
        program.await_readiness()
        self.spares.append(Program(self.folder))
        self.all.append(program)
        self.at_work.append(program)
        program.begin(role, len(self.all), self.maxsize, role == self.binder)

    def got(self) -> int:
        """How many messages have come so far."""
        return sum(program.words[0] for program in self.all if program.role == "got")

    def run(self, kills: int, messages: int) -> None:
        """Kill so many, and see at least so many messages come."""
        for role in ("put", "got"):
            for _ in range(1 if role == self.binder else CROWD):
                self.start(role)
        killed, last, since = 0, -1, time.monotonic()
        while killed < kills or self.got() < messages:
            self.await_somebody_begun()
            time.sleep(min(1.0, self.choose.expovariate(1 / 0.2)))  # the moment of the kill: nothing waits for it
            if killed < kills:
                killed += self.strike()
            got, now = self.got(), time.monotonic()
            if got != last or self.stopped:
                last, since = got, now
            self.figures.silence = max(self.figures.silence, now - since)
            assert now - since < HANG, f"nothing came for {HANG} seconds: {self.states()}"

    def await_somebody_begun(self) -> None:
        """Wait until those that a kill would leave are at work, most often: what is to be seen is deaths in full swing."""
        deadline = time.monotonic() + self.choose.expovariate(1)
        while time.monotonic() < deadline and not all(program.begun for program in self.at_work):
            time.sleep(0.01)

    def strike(self) -> int:
        """Stop, continue or kill somebody, or a whole side. How many were killed."""
        fate, victim = self.choose.random(), self.choose.choice(self.at_work)
        if fate < 0.2 and not self.stopped:
            os.kill(victim.pid, signal.SIGSTOP)
            self.stopped.append(victim)
            self.figures.stops += 1
            return 0
        if self.stopped and fate < 0.6:
            self.go_on()
            return 0
        whole_side = [program for program in self.at_work if program.role == victim.role]
        return self.kill(whole_side if fate > 0.95 else [victim])

    def go_on(self) -> None:
        """Have those that were stopped go on."""
        for program in self.stopped:
            os.kill(program.pid, signal.SIGCONT)
        self.stopped.clear()

    def kill(self, victims: list[Program]) -> int:
        """SIGKILL, and others in their places."""
        for program in victims:
            program.kill()
            self.at_work.remove(program)
            if program in self.stopped:
                self.stopped.remove(program)
        self.figures.kills += len(victims)
        if not self.stopped and {program.role for program in self.at_work if program.begun} == {"put", "got"}:
            self.await_progress(time.monotonic())
        for program in victims:
            self.start(program.role)
        return len(victims)

    def await_progress(self, died: float) -> None:
        """C6: the survivors go on."""
        before = self.got()
        while self.got() == before:
            waited = time.monotonic() - died
            assert waited < HANG, f"{waited:.1f} s after a death nobody has gone on: {self.states()}"
            time.sleep(0.0005)
        self.figures.stalls.append(time.monotonic() - died)

    def finish(self) -> None:
        """Have all end by themselves, judge, and see that nothing is left."""
        self.go_on()
        self.board[STOP_PRODUCERS] = 1
        self.end("put")
        self.board[STOP_CONSUMERS] = 1
        self.end("got")
        self.judge()
        tp.Consumer(ENDPOINT).close()
        own = (ENDPOINT, os.path.basename(path_of(parse(ENDPOINT))))
        left = [name for name in os.listdir(runtime_folder()) if name.startswith(own)]
        assert not left, f"left in the runtime folder: {left}"

    def end(self, role: str) -> None:
        """Wait until the programs of that role have ended."""
        for program in [each for each in self.at_work if each.role == role]:
            program.reap()
            self.at_work.remove(program)

    def judge(self) -> None:
        """Everything that was promised holds."""
        judge = EndpointJudge()
        for program in self.all:
            (judge.producer(program.who, program.words) if program.role == "put" else judge.consumer(program.words))
        for fate in judge.fates(self.all):
            fate.check(self.maxsize)
            self.figures.missing += fate.missing
            self.figures.lost += fate.lost
            self.figures.put += fate.returned
        self.figures.got += judge.count

    def states(self) -> str:
        """Who is there, for the report of a hang. Where they are they say themselves, on standard error."""
        for program in self.at_work:
            os.kill(program.pid, signal.SIGUSR1)
            time.sleep(0.2)
        return ", ".join(f"{program.role}{program.who} ({program.words[0]})" for program in self.at_work)


def campaign(kills: int, messages: int, seed: int) -> Figures:
    """Run it, in a round with many producers and one with many consumers.

    Raises:
        AssertionError: something that was promised does not hold.
    """
    choose, figures = random.Random(seed), Figures()
    rounds = ROUNDS[seed % 2]
    for number, (maxsize, fans_in) in enumerate(rounds):
        share = len(rounds) - number
        with nothing_left():
            folder = Path(tempfile.mkdtemp(prefix="campaign-"))
            spares = [Program(folder) for _ in range(SPARE)]
            this = Round(maxsize, fans_in, choose, folder, figures, spares)
            try:
                this.run((kills - figures.kills) // share, (messages - figures.got) // share)
                this.finish()
            finally:
                for program in (*this.at_work, *spares):
                    program.discard()
                for words in (this.board, *(program.words for program in this.all)):
                    words.release()
                shutil.rmtree(folder)
    return figures
