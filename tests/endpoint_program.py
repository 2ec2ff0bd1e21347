"""A program of the endpoints' campaign: it opens ends when it is told to, several at a time, each in a thread of its own.

``python -m tests.endpoint_program FOLDER`` reads what to do on its standard input; most programs are forked from the campaign
instead (``serve``). They share nothing but endpoints. What an end does, and what it is told, it writes down in files that
outlive it: where it is in its *words* (``ends``), and what a consumer got in its journal, in the order in which it came.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import re
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

import tensorpipe_ipc as tp
from tests.campaign import HELD, LARGE, LARGEST, LIFE, check_again, choose_path, content_of, entry_of, journal
from tests.inside import own_memory

JOURNAL_WORDS = 1 << 20
MOST_ENDS = 1 << 14
STATE, FATE, BEGUN, RETURNED, LOST, TOLD = range(
    6
)  # an end's words; TOLD: of the messages LOST, how many an error named
WORDS = 8
OPEN, LEAVING, ENDED, FAILED = range(1, 5)  # STATE
CLOSE, RAISE = 1, 2  # FATE
GOODBYE, FAILURE, LOSS, NAMED = range(1, 5)  # entries about no message: how a stream ended; NAMED: an end that failed
NUMBER = (1 << 24) - 1  # of such an entry: the end that failed
TIMEOUTS = (0.3, 0.02, 0.0)
LINGER = 40.0  # seconds: more than anything may take


class Spec(NamedTuple):
    """The options of an end. If ``waits``, another thread closes the end while the end's own thread waits;
    if ``polls``, it waits on its descriptor. ``keys``: the folder that they are in; "": it has none.
    ``capacity``: bytes of the shared memory of all binders of its process; 0: what the machine allows."""

    who: int
    role: str
    endpoint: str
    bind: bool
    maxsize: int
    shared_memory: str
    producers: int | str
    peer_timeout: float
    waits: bool
    keys: str
    polls: bool
    capacity: int

    @property
    def largest(self) -> int:
        """Return the bytes of its largest messages: of those it takes a few to fill its memory."""
        return self.capacity // 16 or LARGEST

    @property
    def timeout(self) -> float | None:
        """Return the seconds that it waits in put: where memory is short, long enough to meet a death."""
        return None if self.waits else 1.0 if self.capacity else 0.3


class Deliberate(Exception):
    """The exception that ends the block of an end that is to fail."""


class Program:
    """The ends of one program."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.words = journal(f"{folder}/ends", MOST_ENDS * WORDS)
        self.open: dict[int, Any] = {}
        self.memory: object = None
        self.threads: list[threading.Thread] = []

    def serve(self, commands: Iterable[str]) -> None:
        """Do what each line says, until one says that it is enough."""
        for line in commands:
            if line == "end\n":
                break
            told = json.loads(line)
            target, argument = (self.close, told) if isinstance(told, int) else (self.run, Spec(*told))
            if isinstance(argument, Spec) and argument.capacity and self.memory is None:
                self.memory = own_memory(argument.capacity)
            thread = threading.Thread(target=target, args=(argument,), name=str(told))
            self.threads.append(thread)
            thread.start()
        for thread in self.threads:
            thread.join()

    def run(self, spec: Spec) -> None:
        """Open an end, use it and leave it."""
        mine = self.words[spec.who * WORDS : (spec.who + 1) * WORDS]
        try:
            (self.produce if spec.role == "put" else self.consume)(spec, mine)
            mine[STATE] = ENDED
        except BaseException:
            sys.stderr.write(f"{spec}: {traceback.format_exc()}")
            sys.stderr.flush()
            mine[STATE] = FAILED  # the last of it, as the campaign ends then

    def said(self, spec: Spec, words: object) -> None:
        """Write down what an end was told last, for the report of a hang."""
        if words is not None:
            with open(f"{self.folder}/said{spec.who}", "w", encoding="utf-8") as file:
                file.write(str(words))

    def close(self, who: int) -> None:
        """Close an end that its own thread waits in."""
        with contextlib.suppress(KeyError):
            self.open[who].close()

    def produce(self, spec: Spec, mine: memoryview) -> None:
        """Put numbered messages until the end's fate says otherwise."""
        choose = random.Random(spec.who)
        producer = tp.Producer(
            spec.endpoint,
            bind=spec.bind,
            maxsize=spec.maxsize,
            linger=LINGER,
            shared_memory=spec.shared_memory,  # type: ignore[arg-type]
            peer_timeout=spec.peer_timeout,
            security=security(spec),
        )
        try:
            with producer:
                self.open[spec.who] = producer
                mine[STATE] = OPEN
                while not mine[FATE]:
                    fork_now_and_then(choose)
                    for _ in range(choose.randrange(1, 40)):
                        self.said(spec, put(producer, spec, mine))
                    time.sleep(choose.random() * 0.01)
                mine[STATE] = LEAVING
                if mine[FATE] == RAISE:
                    raise Deliberate(f"end {spec.who} fails")
                if spec.who % 2:
                    flush(producer, mine)
        except tp.PeerLost as lost:
            mine[TOLD] += untaken(lost)
        except (Deliberate, tp.Closed):
            pass
        finally:
            self.open.pop(spec.who, None)
        mine[LOST] = producer.statistics().lost

    def consume(self, spec: Spec, mine: memoryview) -> None:
        """Take messages, and note each and all else that is told, until the end's fate says otherwise."""
        words = journal(f"{self.folder}/got{spec.who}", JOURNAL_WORDS)
        held: deque[Any] = deque()
        consumer = tp.Consumer(
            spec.endpoint,
            bind=spec.bind,
            maxsize=spec.maxsize,
            shared_memory=spec.shared_memory,  # type: ignore[arg-type]
            producers=spec.producers,  # type: ignore[arg-type]
            peer_timeout=spec.peer_timeout,
            security=security(spec),
        )
        with contextlib.suppress(Deliberate, tp.Closed), consumer:
            self.open[spec.who] = consumer
            mine[STATE] = OPEN
            choose = random.Random(spec.who)
            while not mine[FATE]:
                fork_now_and_then(choose)
                if spec.polls:
                    if not select.select([consumer.fileno()], [], [], 0.25)[0]:
                        continue
                    message = get(consumer, 0, words, spec.largest)
                else:
                    message = get(consumer, None if spec.waits else TIMEOUTS[spec.who % 3], words, spec.largest)
                if isinstance(message, Exception):
                    self.said(spec, message)
                elif message[2].numel() >= LARGE:
                    held.append(message)
                del message
                if len(held) > (4 * HELD if spec.capacity else HELD):
                    check_again(held.popleft(), words, spec.largest)
            mine[STATE] = LEAVING
            if mine[FATE] == RAISE:
                raise Deliberate(f"end {spec.who} fails")
        self.open.pop(spec.who, None)
        while held:
            check_again(held.popleft(), words, spec.largest)


def fork_now_and_then(choose: random.Random) -> None:
    """Fork a child that has copies of all descriptors, and does nothing, for some seconds."""
    if choose.random() < 0.02:
        seconds = choose.random() * 4
        if os.fork() == 0:
            time.sleep(seconds)
            os._exit(0)


def security(spec: Spec) -> tp.Curve | None:
    """Return the keys of an end, if it has any."""
    if not spec.keys:
        return None
    if spec.bind:
        return tp.Curve(f"{spec.keys}/binder.key_secret", clients=[f"{spec.keys}/friend.key"])
    return tp.Curve(f"{spec.keys}/friend.key_secret", server=f"{spec.keys}/binder.key")


def put(producer: tp.Producer, spec: Spec, mine: memoryview) -> object:
    """Put one message, a large one of every second producer as a loan. What was said, if it could not be."""
    number = mine[RETURNED]
    content = torch.from_numpy(content_of(spec.who, number, spec.largest))
    mine[BEGUN] = number + 1
    try:
        if mine[FATE]:
            return None
        if len(content) >= LARGE and spec.who % 2:
            tree = [spec.who, number, tp.TensorSpec((len(content),), torch.uint8)]
            with producer.loan(tree, timeout=spec.timeout) as made:
                made[2].copy_(content)
        else:
            producer.put([spec.who, number, content], spec.timeout)
    except tp.Full as full:
        return full
    except tp.PeerLost as lost:
        mine[TOLD] += untaken(lost)
        return lost
    mine[RETURNED] = number + 1
    return None


def flush(producer: tp.Producer, mine: memoryview) -> None:
    """Wait until all is taken. What it is told stays in the block: else it would leave it, and be a failure."""
    try:
        producer.flush(LINGER)
    except tp.PeerLost as lost:
        mine[TOLD] += untaken(lost)


def untaken(lost: tp.PeerLost) -> int:
    """Return how many untaken messages of lost consumers an error names."""
    return sum(map(int, re.findall(r"with (\d+) messages", str(lost))))


def get(consumer: tp.Consumer, timeout: float | None, words: memoryview, largest: int) -> Any:
    """Take a message and note it, or note what is told instead."""
    try:
        message = consumer.get(timeout)
    except tp.Empty as empty:
        time.sleep(0 if timeout else 0.01)
        return empty
    except tp.EndOfStream as end:
        note(words, GOODBYE << 24)
        return end
    except tp.PeerLost as lost:
        for who in dict.fromkeys(map(int, re.findall(r"end (\d+) fails", str(lost)))):
            note(words, NAMED << 24 | who)
        note(words, (FAILURE if isinstance(lost, tp.StreamFailed) else LOSS) << 24)
        return lost
    note(words, entry_of(message, largest))
    return message


def note(words: memoryview, entry: int) -> None:
    """Write down an entry."""
    words[words[0] + 1] = entry
    words[0] += 1


def prepare() -> None:
    """Set the program up: its death signal, its path, its alarm, its stack dump, its threads and its warnings."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    choose_path()
    signal.alarm(LIFE)
    faulthandler.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody has to reap those that it forks
    faulthandler.register(signal.SIGUSR1)  # the campaign asks where everybody is, when somebody does not go on
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # an end that fails warns of what it lost


def serve(folder: str, descriptor: int, runtime: str) -> None:
    """Be a program: one that was forked."""
    os.environ["XDG_RUNTIME_DIR"] = runtime
    prepare()
    with open(descriptor, encoding="ascii") as commands:
        Program(folder).serve(iter(commands.readline, ""))


if __name__ == "__main__":
    prepare()
    Program(sys.argv[1]).serve(iter(sys.stdin.readline, ""))
