"""The view of the others when a process is killed (SIGKILL), as observed: they go on, get an error, or hang.

*Consumer*: one is killed while it waits for a message; then 20 messages are put. Where ends can be shared, a second
consumer was waiting too, and is looked at; else the producer. *Producer*: one is killed in the middle of a stream of
4 MB messages; then, where ends can be shared, another puts 20 small ones, and the consumer is looked at.

Every wait is bounded: who has come no further after ``WAIT`` seconds hangs. Each is tried several times, as it depends
on where exactly the signal strikes. *Left*: files in /dev/shm that the tree had mapped and that stay when all of it is
killed while its receiver holds tensors; they are removed then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from bench.all.field import Field
from bench.all.links import Shape
from bench.all.peers import FLOORS
from bench.all.programs import HOLD, Message
from bench.all.tree import PeerFailed, marks, named, remove

__all__ = ["measure"]

WAIT = 5.0  # seconds
TRIES = 3
MESSAGES, SMALL, LARGE = 20, 4_000, 4_000_000
_FORK = multiprocessing.get_context("fork")

Make = Callable[[Shape], Any]


def measure(field: Field, seconds: float) -> Iterator[dict[str, Any]]:  # noqa: ARG001
    """One row of each peer. Takes the time that the waits take: all peers are tried at once."""
    field.begin("deaths")
    names = [name for name in field.trees if name not in FLOORS]
    field.tell("processes are killed")
    seen: dict[str, dict[str, Counter[str]]] = {name: {"consumer": Counter(), "producer": Counter()} for name in names}
    for _ in range(TRIES):
        for victim in ("consumer", "producer"):
            here = [name for name in names if name in field.trees]
            for name in here:
                peer = field.peers[name]
                field.trees[name].tell("call", _of_ray if peer.crew else _of, (victim, peer.many))
            for name in here:
                try:
                    seen[name][victim][field.trees[name].answer()] += 1
                except PeerFailed as error:
                    field.fail(name, str(error), f"{victim} killed")
    for name in [name for name in names if name in field.trees]:
        field.tell(f"all processes are killed: {name}")
        yield {"item": "deaths", "peer": name, "tries": TRIES, **_told(seen[name]), "left": _left(field, name)}


def _told(seen: dict[str, Counter[str]]) -> dict[str, str]:
    words = {}
    for victim, outcomes in seen.items():
        parts = [text if count == TRIES else f"{text} ({count} of {TRIES})" for text, count in outcomes.most_common()]
        words[victim] = "; ".join(parts)
    return words


def _of(make: Make, victim: str, many: bool) -> str:
    """One try."""
    count = 2 if many else 1
    consumer = victim == "consumer"
    rival = make(Shape(64, LARGE, 1 if consumer else count, count if consumer else 1))
    crowd = Crowd(rival)
    try:
        return (_consumer_dies if consumer else _producer_dies)(crowd, many)
    finally:
        marked = crowd.end()
        if hasattr(rival, "dispose"):
            rival.dispose()
        remove(marked)  # the dead do not


def _consumer_dies(crowd: Crowd, many: bool) -> str:
    dies = crowd.start(_consume, 10**9)
    lives = crowd.start(_consume, 10**9) if many else None
    producer = crowd.start(_produce, SMALL, MESSAGES)
    crowd.all_open()
    time.sleep(0.3)  # they wait by now
    crowd.kill(dies)
    crowd.go()
    if lives is None:
        return crowd.outcome(producer, MESSAGES, "puts, and is not told")
    return crowd.outcome(lives, MESSAGES, "goes on")


def _producer_dies(crowd: Crowd, many: bool) -> str:
    consumer = crowd.start(_consume, 10**9)
    dies = crowd.start(_produce, LARGE, 10**9)
    lives = crowd.start(_produce, SMALL, MESSAGES) if many else None
    crowd.all_open()
    crowd.go(dies)
    if not crowd.comes(consumer, 3):
        return "hangs before"
    time.sleep(random.uniform(0, 0.02))
    crowd.kill(dies)
    if lives is not None:
        crowd.go(lives)
    return crowd.outcome(consumer, MESSAGES if many else 10**9, "goes on", small=True)


class Crowd:
    """Processes around one rival, each with a count of what it has done, and a note of the error that ended it."""

    def __init__(self, rival: Any) -> None:
        self.rival = rival
        self.members: list[tuple[Any, Any, Any]] = []  # process, the pipe it tells by, the pipe it waits for
        self.seen: dict[int, tuple[int, int, str]] = {}
        self.marked: set[str] = set()  # what the dead had in /dev/shm

    def start(self, program: Callable[..., None], *arguments: int) -> int:
        told, tell = _FORK.Pipe(duplex=False)
        wait, go = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_member, args=(self.rival, program, arguments, tell, wait), daemon=True)
        process.start()
        tell.close()
        wait.close()
        self.members.append((process, told, go))
        return len(self.members) - 1

    def all_open(self) -> None:
        for index, (_, told, _go) in enumerate(self.members):
            if not told.poll(10 * WAIT):
                raise PeerFailed("an end did not open")
            if (answer := told.recv()) is not None:
                raise PeerFailed(f"an end did not open: {answer}")
            self.seen[index] = (0, 0, "")
        if hasattr(self.rival, "opened"):
            self.rival.opened()

    def go(self, index: int | None = None) -> None:
        for number, (process, _, go) in enumerate(self.members):
            if index in (None, number) and process.is_alive():
                with contextlib.suppress(OSError):
                    go.send(True)

    def kill(self, index: int) -> None:
        process = self.members[index][0]
        self.marked |= marks([psutil.Process(process.pid)])
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.marked |= named([process.pid])  # what it made meanwhile

    def look(self, index: int, patience: float) -> bool:
        """Read what a member has told; whether there was anything."""
        told = self.members[index][1]
        if not told.poll(patience):
            return False
        try:
            self.seen[index] = told.recv()
        except EOFError:
            done, small, error = self.seen[index]
            self.seen[index] = (done, small, error or "it ended")
        return True

    def comes(self, index: int, count: int) -> bool:
        """Return whether a member gets so far."""
        deadline = time.monotonic() + WAIT
        while (left := deadline - time.monotonic()) > 0:
            self.look(index, left)
            done, _, error = self.seen[index]
            if done >= count or error:
                return done >= count
        return False

    def outcome(self, index: int, count: int, fine: str, small: bool = False) -> str:
        """Return what became of a member that was to do so much."""
        deadline = time.monotonic() + WAIT
        while (left := deadline - time.monotonic()) > 0:
            self.look(index, left)
            done, of_them_small, error = self.seen[index]
            done = of_them_small if small else done
            if done >= count:
                return fine
            if error:
                return f"error: {error}"
        return f"{count - done} of {count} never come" if 0 < done and count == MESSAGES else "hangs"

    def end(self) -> set[str]:
        marked = marks(psutil.Process().children())
        for process, told, go in self.members:
            process.kill()
            process.join()
            told.close()
            go.close()
        return marked | self.marked | named(process.pid for process, _, _ in self.members)


def _member(rival: Any, program: Callable[..., None], arguments: tuple[int, ...], tell: Any, wait: Any) -> None:
    try:
        rival.open(program is _produce)
    except Exception as error:
        tell.send(f"{type(error).__name__}: {error}")
        return
    tell.send(None)
    done = [0, 0]
    try:
        if program is _produce:
            wait.recv()
        program(rival, done, tell, *arguments)
        time.sleep(10 * WAIT)  # whoever reads has still to come
    except Exception as error:
        tell.send((*done, type(error).__name__))


def _produce(rival: Any, done: list[int], tell: Any, nbytes: int, count: int) -> None:
    for _ in range(count):
        rival.send(rival.fresh(nbytes))
        done[0] += 1
        if done[0] == MESSAGES:
            tell.send((*done, ""))


def _consume(rival: Any, done: list[int], tell: Any, count: int) -> None:
    while done[0] < count:
        nbytes = rival.receive().nbytes
        done[0] += 1
        done[1] += nbytes == SMALL
        if done[0] <= 10 or nbytes == SMALL:
            tell.send((*done, ""))


def _of_ray(make: Make, victim: str, _: bool) -> str:
    """One try with Ray, which has processes of its own, and whose driver is the producer."""
    if victim == "producer":
        return "not tried: it is the driver, with which its cluster ends"
    crew = make(Shape(64, LARGE))
    crew.run(HOLD, Message(SMALL), 1)
    os.kill(crew.receiver(), signal.SIGKILL)
    result: list[str] = []

    def put() -> None:
        import ray

        try:
            for _ in range(MESSAGES):
                ray.get(crew.call(crew.fresh(SMALL)), timeout=WAIT)
            result.append("puts, and is not told")
        except ray.exceptions.GetTimeoutError:
            result.append("hangs")
        except Exception as error:
            result.append(f"error: {type(error).__name__}")

    put()
    with contextlib.suppress(Exception):
        crew.close()
    return result[0]


def _left(field: Field, name: str) -> int | None:
    """Count the files of a tree that stay in /dev/shm when all its processes are killed at once."""
    tree = field.trees[name]
    try:
        tree.tell("stand", Shape(64, SMALL * 10))
        tree.answer()
        tree.run(HOLD, Message(SMALL * 10), 10)
    except PeerFailed as error:
        field.fail(name, str(error), "left")
        return None
    left = field.trees.pop(name).kill()
    return len(left)
