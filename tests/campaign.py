"""The kill campaign: a Queue under random SIGKILL and SIGSTOP, and a judge that knows what it has promised.

``python -m tests.campaign --kills 1000 --messages 1000000 --seed 7``; with ``--endpoints``, over Producer and Consumer
(``endpoint_campaign``).

One process, the supervisor, makes a queue, forks producers and consumers (some come from a fork server instead, and get
the queue as a spawned process does), stops, continues and kills them at random moments, and starts others in their
place. The queue's memory is small, the messages are small and large in turns, and some producers put a few and are idle from
then on. The supervisor is never killed itself, and neither are the journals: files that every process maps. A journal's entry
is one aligned word, which no kill can cut in two.

* A producer notes each message before ``put`` (begun) and after it (returned).
* What a message must contain follows from its producer and its number; it is compared byte for byte.
* A consumer notes a message while it is being decoded: before ``get`` lets go of the ticket. So a message is in a
  journal, or its consumer was killed inside ``get``, and then it has to be among those that the queue counts as lost.
* A consumer keeps its last large messages, and looks at their bytes again before it lets go.
* Now and then it forks a helper, which outlives the leases or its parent, writes to them, forks another one, and ends; each
  of them finds what it had inherited or written. Some of these forks fall into a put by reference that waits in a thread.

The judge: what came was begun, came once, in its producer's order and intact, under whatever forks and writes meanwhile
(C1, C2, C3, C7); what is missing though its ``put`` had returned is no more than what was counted as lost (C4, C5); at most
one for each consumer killed; some living process goes on soon after each death (C6); the memory never costs more than it
may, and nobody waits for room while others go on; in the end every place of the queue is free again, every block, and
nothing is left in /dev/shm or among the supervisor's descriptors and mappings (C8).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import itertools
import mmap
import multiprocessing
import operator
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tensorpipe_ipc.errors import Empty, Full
from tensorpipe_ipc.memory.arena import HOLDER, KEPT, Arena
from tensorpipe_ipc.memory.segment import Segment
from tensorpipe_ipc.queues.tensor_queue import Queue
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.wire.schema import decode_values
from tests.guard import others
from tests.inside import (
    codec_of,
    have_messages_decoded_by,
    have_values_decoded_by,
    load_compiled_path_again,
    shared_queue_of,
)

BOUNDS = (0, 2, 100)  # maxsize of one round after another
PRODUCERS = CONSUMERS = 3
IDLE = 2  # producers that are idle soon
CAPACITY = 64 << 20  # bytes that the queue's memory may cost
OVER = CAPACITY // 10  # bytes beyond it: two that look at once may both find room
SIZES = (0, 60, 60, 400, 400, 400, 4000, 20_000)  # bytes: copied
LARGE = 60_000  # bytes: under a lease
DOUBLED = (0, 0, 0, 1, 2, 3, 4, 5)  # how often a large message's size is
LARGEST = 2 * LARGE << DOUBLED[-1]
WAVE = 500  # messages of a producer's: so many small ones, then so many with large ones among them
SMALL_ONLY = 1 << 20  # the bit of a producer's number which says that it puts small messages only
FEW = {
    0: 2000,
    SMALL_ONLY: 20_000,
}  # messages of a producer that is idle from then on: what it has free by then is its own
HOLD = 0.4  # seconds that all consumers are stopped now and then, so that the memory fills
LULL = 4.0  # seconds after that in which nobody is killed, and everybody must go on
ROOM = 3.0  # seconds that a put may wait in a lull
BATCH = 10  # messages that every fourth process puts or gets at once
HELD = 3  # large messages that a consumer keeps
BACKLOG = 20_000  # messages at which the producers of an unbounded queue pause: more than its pipe holds
LIFE = 600  # seconds after which a child ends by itself, should the supervisor be gone
HANG = 20.0  # seconds without a message, or in one put, while nobody is stopped: a hang
MARGIN = 5.0  # seconds beyond it, until an error that is raised after so long would have ended the child
BEGUN, RETURNED = 0, 1  # words of a producer's journal; a consumer's begins with its length
PAUSE, STOP, FORKS, TORN = 0, 1, 2, 3  # words of the board; how many helpers about, and what one found to be wrong
HELPED = 25  # every how many large messages a consumer forks; the first time at its first
MIXED = "TENSORPIPE_IPC_CAMPAIGN_MIXED"  # in the environment: each process takes the compiled path or none, at random
BROKEN = 1 << 39  # the bit of a consumer's entry which says that the content was wrong
NUMBERS = BROKEN - 1

TELL = 5.0  # seconds between two reports of how far a campaign is

_pool = np.random.default_rng(1).integers(0, 256, 2 * LARGEST, dtype=np.uint8)


def content_of(who: int, number: int, largest: int = LARGEST) -> np.ndarray[Any, Any]:
    """The bytes of a producer's message. Producers of odd numbers begin with a wave that has large ones among them.

    Args:
        largest: how many they are at most; where that is few, every second message of such a wave has them.
    """
    mixed = (who * 0x9E3779B97F4A7C15 + number * 0xC2B2AE3D27D4EB4F) >> 7 & 0xFFFFFFFF
    size = SIZES[mixed >> 5 & 7]
    if mixed % (16 if largest == LARGEST else 2) == 0 and (number // WAVE + who) % 2 and who < SMALL_ONLY:
        least = LARGE << DOUBLED[mixed >> 5 & 7]
        size = min(least + (mixed >> 8) % least, largest)
    start = (mixed >> 8) % (len(_pool) - LARGEST)
    return _pool[start : start + size]


def journal(path: Path | str, words: int) -> memoryview:
    """A file of words that outlives whoever writes to it."""
    with open(path, "a+b") as file:
        file.truncate(8 * words)
        return memoryview(mmap.mmap(file.fileno(), 8 * words)).cast("B").cast("Q")


JOURNAL_WORDS = 1 << 21


# ---- the processes that are killed ----


def produce(queue: Queue, who: int, folder: str, most: int = NUMBERS) -> None:
    """Put numbered messages until there have been enough; after ``most`` of them none, and live on."""
    begin(who)
    words, board = journal(f"{folder}/put{who}", 2), journal(f"{folder}/board", 8)
    timeout = (None, HANG)[who % 2]
    size = BATCH if who % 4 == 0 else 1
    for number in itertools.count(step=size):
        while board[PAUSE] or (number >= most and not board[STOP]):
            time.sleep(0.001 if board[PAUSE] else 0.05)
        if board[STOP]:
            return
        messages = [(who, n, torch.from_numpy(content_of(who, n))) for n in range(number, number + size)]
        words[BEGUN] = number + size
        if size == 1:
            queue.put(messages[0], timeout=timeout)
        else:
            queue.put_many(messages, timeout=timeout)
        words[RETURNED] = number + size


def consume(queue: Queue, who: int, folder: str, until_empty: bool = False) -> None:
    """Get messages until None comes, and note each."""
    if not until_empty:
        begin(who)
    words = journal(f"{folder}/got{who}", JOURNAL_WORDS)
    noting = Noting(queue, words)
    timeout = 0.5 if until_empty else (None, 0.05)[who % 2]
    in_batches = who % 4 == 0 and not until_empty

    held: deque[Any] = deque()
    helping = None if until_empty else Helping(queue, who, folder)
    going = True
    while going:
        try:
            with noting:
                messages = queue.get_many(BATCH, timeout=timeout) if in_batches else [queue.get(timeout=timeout)]
        except Empty:
            going = not until_empty
            continue
        going = None not in messages
        for _ in range(messages.count(None) - 1):  # those are for the others
            queue.put(None)
        noting.check(message for message in messages if message is not None)
        held += [message for message in messages if message is not None and message[2].numel() >= LARGE]
        if helping and held and messages[-1] is held[-1]:
            messages.clear()
            helping.perhaps(held, words)
        del messages
        while len(held) > HELD:
            check_again(held.popleft(), words)
    while held:
        check_again(held.popleft(), words)
    noting.end()


def choose_path() -> None:
    """Have this process take the compiled path or none, at random, in a campaign that mixes them."""
    if MIXED in os.environ:
        load_compiled_path_again(random.SystemRandom().choice("01"))


class Noting:
    """Has a consumer's gets note each message in its journal while it is decoded: as soon as its number is known.

    The compiled path has Python decode but a message's values, and may then leave it to Python. Its content is looked at
    later.
    """

    def __init__(self, queue: Queue, words: memoryview) -> None:
        self._queue: Any = queue
        self._words: Any = words
        self._decode, self._is_getting = codec_of(queue).decode, False
        have_messages_decoded_by(queue, self._decoded)
        self._early = set[int]()  # entries of values that the compiled path had decoded in the get that goes on
        have_values_decoded_by(self._values)

    def __enter__(self) -> None:
        self._is_getting = True

    def __exit__(self, *_: object) -> None:
        self._is_getting = False

    def end(self) -> None:
        """Note nothing any more."""
        have_messages_decoded_by(self._queue, None)
        have_values_decoded_by(decode_values)
        self._queue = self._decode = self._words = None  # the compiled path keeps what it has called

    def check(self, messages: Iterable[Any]) -> None:
        """Look at the content of those that a get has returned, unless that was done."""
        for message in messages:
            entry = entry_of(message)
            if entry & BROKEN and entry & ~BROKEN in self._early:
                self._note(entry)
        self._early.clear()

    def _decoded(self, metadata: bytes, payload: Any) -> Any:
        message = self._decode(metadata, payload)
        if message is not None:
            entry = entry_of(message)
            if entry not in self._early:
                self._note(entry)
        return message

    def _values(self, data: Any) -> list[Any]:
        values = decode_values(data)
        if self._is_getting:
            entry = values[0] << 40 | values[1]
            self._early.add(entry)
            self._note(entry)
        return values

    def _note(self, entry: int) -> None:
        self._words[self._words[0] + 1] = entry
        self._words[0] += 1


class Helping:
    """A consumer's helpers: processes that are forked while it has leases, and so have them, too."""

    def __init__(self, queue: Queue, who: int, folder: str) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are reaped by the kernel
        attachment = shared_queue_of(queue).attachment
        self.side = Queue(1, ctx=SimpleNamespace(tensorpipe_attachment=lambda: attachment))
        self.side.put(None)
        self.board, self.choose, self.large = journal(f"{folder}/board", 8), random.Random(who), 0

    def perhaps(self, held: deque[Any], words: memoryview) -> None:
        """Fork, if it is time. Half of the times while a thread is about to give the last lease away."""
        self.large += 1
        if self.large % HELPED != 1:
            return
        if self.choose.random() < 0.5:
            self.fork(list(held), depth=2)
            return
        box = [held.pop()]
        thread = threading.Thread(target=self.side.put, args=(box[0],), kwargs={"move": True})
        thread.start()
        time.sleep(self.choose.choice((0, 0.001)))
        self.fork([*held, *box], depth=1)
        self.side.get()
        thread.join()
        box.clear()
        held.append(self.side.get())
        self.side.put(None)
        check_again(held[-1], words)

    def fork(self, inherited: list[Any], depth: int) -> None:
        """A helper, and by it another one."""
        self.board[FORKS] += 1
        choose = random.Random(self.choose.random())
        if os.fork():
            return
        try:
            signal.alarm(LIFE)
            self.help([message for message in inherited if len(message[2])], depth, choose)
        except BaseException:
            self.board[TORN] = BROKEN
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0)

    def help(self, inherited: list[Any], depth: int, choose: random.Random) -> None:
        """Look, write, look again; and have another one do so with what was there before or after."""
        expected = [message[2].numpy().copy() for message in inherited]
        for message, there in zip(inherited, expected, strict=True):
            if depth and not np.array_equal(there, content_of(*message[:2])):
                self.board[TORN] = entry_of(message) | BROKEN
        writes_first = choose.random() < 0.5
        for writes in (writes_first, not writes_first):
            if writes:
                for message, there in zip(inherited, expected, strict=True):
                    first, last = sorted(choose.randrange(len(there)) for _ in range(2))
                    there[first:last] = message[2].numpy()[first:last] = choose.randrange(256)
            elif depth:
                self.fork(inherited, 0)
            time.sleep(choose.random() * 0.03)  # its parents and others go on, and use memory again
        for message, there in zip(inherited, expected, strict=True):
            if not np.array_equal(message[2].numpy(), there):
                self.board[TORN] = entry_of(message) | BROKEN


def begin(who: int) -> None:
    """Set the child up: its path, its alarm, its stack dump, its threads and its random numbers."""
    choose_path()
    signal.alarm(LIFE)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    random.seed(who)


def entry_of(message: Any, largest: int = LARGEST) -> int:
    """The word that says which message came, and whether it was intact."""
    who, number, tensor = message
    intact = tensor.dtype is torch.uint8 and np.array_equal(tensor.numpy(), content_of(who, number, largest))
    return int(who << 40 | number | (0 if intact else BROKEN))


def check_again(message: Any, words: memoryview, largest: int = LARGEST) -> None:
    """Check that the memory under a lease has not changed, and write a broken message into the journal."""
    entry = entry_of(message, largest)
    if entry & BROKEN:
        words[words[0] + 1] = entry
        words[0] += 1


class Forked:
    """A child of the supervisor's own, by ``os.fork``."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            status = 99
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                target(*arguments)
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)

    def reap(self) -> int:
        """Wait for its end, and say how it ended."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Served:
    """A child from the fork server, to which the queue is passed as to a spawned one."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
        self._process.start()
        self.pid = self._process.pid or 0

    def reap(self) -> int:
        """Wait for its end, and say how it ended."""
        self._process.join(HANG)
        status = self._process.exitcode
        if status is None:
            os.kill(self.pid, signal.SIGUSR1)  # says where it is
            self._process.join(1)
        assert status is not None, "a child does not end"
        self._process.close()
        return status


# ---- the judge ----

_told = [time.monotonic()]


@dataclasses.dataclass
class Figures:
    """The results of a campaign."""

    kills: int = 0
    stops: int = 0
    closes: int = 0  # of ends, by themselves or by an exception
    put: int = 0  # messages whose put had returned
    got: int = 0
    resident: int = 0  # bytes that the queue's memory cost at most
    lost: int = 0  # counted by the queue: taken by consumers that were killed inside get
    silence: float = 0.0  # the longest time without a message, in seconds, while nobody was stopped
    missing: int = 0  # put had returned, and nobody got it
    forks: int = 0  # by consumers and their helpers
    stalls: list[float] = dataclasses.field(default_factory=list)  # seconds from a death to a survivor's next message
    told: list[float] = dataclasses.field(default_factory=list)  # seconds until a consumer was told of a stream's end

    def __str__(self) -> str:
        said = (
            f"{self.kills:,} kills, {self.closes:,} closes, {self.stops:,} stops, about {self.forks:,} forks of helpers, "
            f"{self.put:,} messages put, {self.got:,} got, {self.missing} missing, {self.lost} counted as lost with their "
            "consumers"
        )
        if self.stalls:
            said += f"; after a death the next message came within {spread(self.stalls)}"
        if self.resident:
            said += f"; never was there none for over {self.silence:.2f} s"
            said += f"; at most {self.resident / (1 << 20):.1f} MiB resident"
        if self.told:
            said += f"; {len(self.told):,} ends of streams were told within {spread(self.told)}"
        return said

    def tell(self) -> None:
        """Say how far it is, every few seconds."""
        if time.monotonic() - _told[0] > TELL:
            _told[0] = time.monotonic()
            print(f"  {self.kills:,} kills, {self.closes:,} closes, {self.got:,} messages", file=sys.stderr, flush=True)

    def add(self, part: Figures) -> None:
        """Take in what came of one part."""
        for field in dataclasses.fields(self):
            join = max if field.name in ("silence", "resident") else operator.add
            setattr(self, field.name, join(getattr(self, field.name), getattr(part, field.name)))


def spread(seconds: list[float]) -> str:
    """Return the median, the 99th percentile and the maximum of some times, in words."""
    found = sorted(seconds)
    return (
        f"{statistics.median(found) * 1e3:.1f} ms (median), {found[len(found) * 99 // 100] * 1e3:.0f} ms (99 %), "
        f"{found[-1] * 1e3:.0f} ms (most)"
    )


class Judge:
    """Compares what was put with what was got, journal by journal."""

    def __init__(self) -> None:
        self.put: dict[int, tuple[int, int]] = {}  # by producer: begun, returned
        self.got: dict[int, np.ndarray[Any, Any]] = {}  # by producer: how often each message came
        self.count = self.most_lost = 0

    def producer(self, who: int, words: memoryview) -> None:
        """A producer's journal."""
        self.put[who] = words[BEGUN], words[RETURNED]

    def consumer(self, words: memoryview, killed_with: int = 0) -> None:
        """A consumer's journal. Its last entry may not be in its length yet.

        Args:
            killed_with: how many messages it may have taken with it.
        """
        self.most_lost += killed_with
        length = words[0] + (1 if words[words[0] + 1] else 0)
        entries = np.frombuffer(words, np.uint64, length, 8)
        assert not (entries & np.uint64(BROKEN)).any(), f"content is wrong: {broken(entries)}"
        producers, numbers = entries >> np.uint64(40), entries & np.uint64(NUMBERS)
        self.count += length
        for who in np.unique(producers).tolist():
            of_one = numbers[producers == who].astype(np.int64)
            wrong = np.flatnonzero(np.diff(of_one) <= 0)
            assert not len(wrong), f"out of order: of producer {who} came {around(of_one, wrong)}"
            seen = self.got.setdefault(who, np.zeros(1 << 10, np.uint8))
            if of_one[-1] >= len(seen):
                self.got[who] = seen = np.concatenate([seen, np.zeros(of_one[-1], np.uint8)])
            seen[of_one] += 1

    def verdict(self, lost: int) -> int:
        """Everything that was promised holds. How many messages are missing."""
        missing = 0
        for who, counts in self.got.items():
            assert counts.max() <= 1, f"message {int(counts.argmax())} of producer {who} came twice"
            assert not counts[self.put[who][0] :].any(), f"a message of producer {who} came that it never put"
        for who, (_, returned) in self.put.items():
            came = self.got.get(who, np.zeros(0, np.uint8))[:returned]
            missing += returned - int(came.sum())
        assert missing <= lost, f"{missing} messages are missing whose put had returned, {lost} were counted as lost"
        assert lost <= self.most_lost, f"{lost} messages counted as lost, {self.most_lost} at most can be"
        return missing


def around(numbers: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> list[int]:
    """The numbers near the first of these places."""
    found: list[int] = numbers[max(0, places[0] - 12) : places[0] + 12].tolist()
    return found


def broken(entries: np.ndarray[Any, Any]) -> list[str]:
    """Return the first five messages that a journal calls broken, in words."""
    found = entries[(entries & np.uint64(BROKEN)) != 0].tolist()
    return [f"producer {entry >> 40}, message {entry & NUMBERS}" for entry in found[:5]]


# ---- the supervisor ----


class Round:
    """One queue, and the processes at it until it is drained and judged."""

    def __init__(self, maxsize: int, choose: random.Random, folder: Path, figures: Figures, served: bool) -> None:
        self.choose, self.folder, self.figures = choose, folder, figures
        attachment = Attachment(Arena(Segment.create(), CAPACITY))
        self.queue = Queue(maxsize, ctx=SimpleNamespace(tensorpipe_attachment=lambda: attachment))
        self.kinds = (Forked, Forked, Forked, Served) if served else (Forked,)
        self.judge = Judge()
        self.board = journal(folder / "board", 8)
        self.next_who = 1
        self.stopped: set[int] = set()  # places in ``at_work``
        self.held_until = self.lull_until = 0.0
        self.putting: dict[int, tuple[int, float]] = {}  # by producer: the message that it was seen at first, and when
        self.at_work: list[tuple[Any, int, str, memoryview]] = []  # process, who, role, journal

    def start(self, role: str) -> tuple[Any, int, str, memoryview]:
        """A new process."""
        who, self.next_who = self.next_who, self.next_who + 1
        if role == "idle":
            who |= self.choose.choice((0, SMALL_ONLY))
        words = journal(
            self.folder / f"{'got' if role == 'got' else 'put'}{who}", JOURNAL_WORDS if role == "got" else 2
        )
        target, more = (consume, ()) if role == "got" else (produce, (FEW[who & SMALL_ONLY],) if role == "idle" else ())
        return self.choose.choice(self.kinds)(target, self.queue, who, str(self.folder), *more), who, role, words

    def got(self) -> int:
        """Return how many messages have come so far."""
        return self.judge.count + sum(words[0] for _, _, role, words in self.at_work if role == "got")

    def run(self, kills: int, messages: int) -> None:
        """Kill so many, and see at least so many messages come."""
        for role in ["put"] * PRODUCERS + ["idle"] * IDLE + ["got"] * CONSUMERS:
            self.at_work.append(self.start(role))
        killed, last, since = 0, -1, time.monotonic()
        while killed < kills or self.got() < messages:
            time.sleep(min(0.1, self.choose.expovariate(1 / 0.005)))  # the moment of the kill: nothing waits for it
            self.board[PAUSE] = self.queue.qsize() > BACKLOG
            self.look()
            if killed < kills:
                killed += self.strike()
            got, now = self.got(), time.monotonic()
            self.figures.silence = max(self.figures.silence, now - since if not self.stopped else 0)
            if got != last or self.stopped:
                last, since = got, now
            assert now - since < HANG, (
                f"nothing came for {HANG} seconds at {self.queue.qsize()} waiting: {self.states()}"
            )

    def look(self) -> None:
        """See that memory costs no more than it may, and that nobody waits for room while others go on."""
        resident, now = shared_queue_of(self.queue).arena.segment.resident(), time.monotonic()
        self.figures.resident = max(self.figures.resident, resident)
        assert resident <= CAPACITY + OVER, (
            f"{resident:,} bytes are resident, of {CAPACITY:,}: {self.queue.statistics()}"
        )
        for _, who, role, words in self.at_work:
            if role != "got" and words[BEGUN] > words[RETURNED] and not self.stopped and not self.board[PAUSE]:
                at, since = self.putting.get(who, (-1, now))
                self.putting[who] = (words[BEGUN], since if at == words[BEGUN] else now)
                # A large one may wait as long as small ones fill the memory (docs/limits.md).
                is_small = all(len(content_of(who, n)) < LARGE for n in range(words[RETURNED], words[BEGUN]))
                most = ROOM if self.lull_until and is_small else HANG + MARGIN
                assert now - since < most or at != words[BEGUN], (
                    f"producer {who} waits for room since {now - since:.1f} s: {self.queue.statistics()}; {self.states()}"
                )
            else:
                self.putting.pop(who, None)
        self.figures.tell()

    def strike(self) -> int:
        """Stop, continue or kill somebody, or everybody. How many were killed."""
        if self.held_until or self.lull_until:
            return self.end_of_lull(time.monotonic())
        fate, victim = self.choose.random(), self.choose.randrange(len(self.at_work))
        if fate < 0.004 and not self.stopped:
            return self.hold()
        if fate < 0.02:
            return self.kill(list(range(len(self.at_work))))
        if self.at_work[victim][2] == "idle" and fate > 0.3:
            return 0
        if fate < 0.25 and not self.stopped:
            os.kill(self.at_work[victim][0].pid, signal.SIGSTOP)
            self.stopped.add(victim)
            self.figures.stops += 1
            return 0
        if self.stopped and fate < 0.6:
            self.go_on()
            return 0
        return self.kill([*self.stopped, victim][:1])

    def hold(self) -> int:
        """Stop all consumers for a while, so that the memory fills."""
        self.stopped = {place for place, (_, _, role, _) in enumerate(self.at_work) if role == "got"}
        for place in self.stopped:
            os.kill(self.at_work[place][0].pid, signal.SIGSTOP)
        self.held_until = time.monotonic() + HOLD
        self.lull_until = self.held_until + LULL
        return 0

    def end_of_lull(self, now: float) -> int:
        """Have the consumers go on when they were held long enough, and see that everybody goes on then."""
        if self.held_until and now > self.held_until:
            self.held_until = 0.0
            self.go_on()
        elif not self.held_until and now > self.lull_until:
            self.lull_until = 0.0
        return 0

    def go_on(self) -> None:
        """Have those that were stopped go on."""
        for place in self.stopped:
            os.kill(self.at_work[place][0].pid, signal.SIGCONT)
        self.stopped.clear()

    def kill(self, places: list[int]) -> int:
        """SIGKILL, and others in their places."""
        for place in places:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself: reaping it says so
                os.kill(self.at_work[place][0].pid, signal.SIGKILL)
        self.stopped.difference_update(places)
        if not self.stopped and not self.board[PAUSE] and self.survivors_at_work(places):
            self.await_progress(self.got(), time.monotonic())
        for place in places:
            process, who, role, words = self.at_work[place]
            assert process.reap() == -signal.SIGKILL, "a child ended by itself"
            self.bury(who, role, words)
            self.at_work[place] = self.start(role)
        self.figures.kills += len(places)
        return len(places)

    def survivors_at_work(self, dead: list[int]) -> bool:
        """Return whether a surviving producer and a surviving consumer have begun. A child takes a moment to start."""
        begun = {role for k, (_, _, role, words) in enumerate(self.at_work) if k not in dead and words[0] > 1}
        return begun >= {"put", "got"}

    def await_progress(self, before: int, died: float) -> None:
        """C6: the survivors go on."""
        while self.got() == before:
            waited = time.monotonic() - died
            assert waited < HANG, f"{waited:.1f} s after a death nobody has gone on: {self.states()}"
            self.look()
            time.sleep(0.0005)
        self.figures.stalls.append(time.monotonic() - died)

    def bury(self, who: int, role: str, words: memoryview, killed: bool = True) -> None:
        """Hand a journal to the judge."""
        if role == "got":
            self.judge.consumer(words, killed * (1 if who % 4 else BATCH))
        else:
            self.judge.producer(who, words)
        words.release()
        os.unlink(self.folder / f"{'got' if role == 'got' else 'put'}{who}")

    def states(self) -> str:
        """Return where each child is, for the report of a hang."""
        found = []
        for process, who, role, _ in self.at_work:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGUSR1)  # it says where it is, on standard error
                found.append(f"{role}{who} in {Path(f'/proc/{process.pid}/wchan').read_text()}")
        return ", ".join(found)

    def kill_all(self) -> None:
        """All at once, and nobody in their places."""
        for process, *_ in self.at_work:
            os.kill(process.pid, signal.SIGKILL)
        for process, who, role, words in self.at_work:
            process.reap()
            self.bury(who, role, words)
        self.figures.kills += len(self.at_work)
        self.at_work.clear()

    def end_all(self) -> None:
        """Have all end by themselves, first the producers."""
        self.board[STOP], self.board[PAUSE] = 1, 0
        for ending in ("put", "got"):
            for process, who, role, words in self.at_work:
                if (role == "got") == (ending == "got"):
                    assert process.reap() == 0, "a child failed"
                    self.bury(who, role, words, killed=False)
            for _ in range(CONSUMERS if ending == "put" else 0):
                self.queue.put(None)
        self.at_work.clear()

    def finish(self) -> None:
        """Drain, judge, and see that nothing is left."""
        inner = shared_queue_of(self.queue)
        inner.attachment.recover_dead()
        self.figures.forks += self.board[FORKS]
        consume(self.queue, 0, str(self.folder), until_empty=True)
        rest = journal(self.folder / "got0", JOURNAL_WORDS)
        self.judge.consumer(rest)
        lost = inner.attachment.recovery.lost()
        self.figures.missing += self.judge.verdict(lost)
        self.figures.lost += lost
        self.figures.got += self.judge.count
        self.figures.put += sum(returned for _, returned in self.judge.put.values())
        self.check_whole()

    def check_whole(self) -> None:
        """Every place of the queue is free, and every block."""
        for number in range(shared_queue_of(self.queue).maxsize):
            self.queue.put(number, timeout=1)
        if shared_queue_of(self.queue).maxsize:
            with contextlib.suppress(Full):
                self.queue.put(-1, timeout=0)
                raise AssertionError("the queue has more places than it should")
        for number in range(shared_queue_of(self.queue).maxsize):
            assert self.queue.get(timeout=1) == number
        until = time.monotonic() + HANG
        while not (states := self.states_of_blocks()) <= {0, KEPT}:  # the last helpers may be at work
            assert time.monotonic() < until, f"blocks that nobody has are not free: {sorted(map(hex, states))}"
            time.sleep(0.01)
        assert not self.board[TORN], f"a helper found what nobody wrote: {broken(np.array([self.board[TORN]]))}"

    def states_of_blocks(self) -> set[int]:
        """Return the states of all blocks, with their holders."""
        inner = shared_queue_of(self.queue)
        inner.leases.settle()
        inner.attachment.recover_dead()
        inner.attachment.orphans.destroy_all()
        arena = inner.arena
        return {
            arena.words[block >> 3] & HOLDER
            for start, kind, units, _ in arena.all_extents()
            for block in arena.states(start, kind, units)[0].tolist()
        }


def held_by_this_process() -> tuple[int, int]:
    """Descriptors, and mappings of shared memory."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/memfd:tensorpipe_ipc")


def names_in_dev_shm() -> set[str]:
    """Semaphores left out: a queue makes none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def new_in_dev_shm(before: set[str]) -> set[str]:
    """But for those of other programs on this machine."""
    new = names_in_dev_shm() - before
    return new - others(new)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """C8, as far as the supervisor can see."""
    before, names = held_by_this_process(), names_in_dev_shm()
    yield
    gc.collect()
    after = held_by_this_process()
    assert after == before, f"descriptors and mappings: {before} before, {after} after"
    until = time.monotonic() + HANG
    while left := new_in_dev_shm(names):  # what another program is just making is nobody's for a moment
        assert time.monotonic() < until, f"left in /dev/shm: {left}"
        time.sleep(0.05)


def campaign(
    kills: int, messages: int, closes: int, seed: int, bounds: tuple[int, ...] = BOUNDS, served: bool = True
) -> Figures:
    """Run it, in one round for each bound.

    Args:
        closes: 0; a queue has no ends that could be closed.

    Raises:
        AssertionError: something that was promised does not hold.
    """
    assert not closes
    torch.set_num_threads(1)
    choose, figures = random.Random(seed), Figures()
    if served:
        start_fork_server()
    for number, maxsize in enumerate(bounds):
        share = len(bounds) - number
        with nothing_left():
            folder = Path(tempfile.mkdtemp(prefix="campaign-"))
            try:
                this = Round(maxsize, choose, folder, figures, served)
                try:
                    this.run((kills - figures.kills) // share, (messages - figures.got) // share)
                    this.kill_all() if kills else this.end_all()
                    this.finish()
                finally:
                    for process, *_ in this.at_work:
                        with contextlib.suppress(OSError):  # one of them may be reaped
                            os.kill(process.pid, signal.SIGKILL)
                            process.reap()
                del this
            finally:
                shutil.rmtree(folder)
    return figures


def start_fork_server() -> None:
    """Start it before anything is compared with what was there before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorpipe_ipc.queues.tensor_queue"])
    process = context.Process(target=os.getpid)
    process.start()
    process.join()
    process.close()


def main() -> None:
    """Repeat campaigns of some kills until there were enough, and say after each what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--messages", type=int, help="1,000,000, between endpoints any number, if not said")
    parser.add_argument(
        "--closes", type=int, help="of endpoints, also by an exception; three for each kill if not said"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=int, help="kills in one campaign; 300, of endpoints 20, if not said")
    parser.add_argument("--endpoints", action="store_true", help="over Producer and Consumer")
    parser.add_argument(
        "--mixed", action="store_true", help="half of the processes take the compiled path, and the others none"
    )
    arguments = parser.parse_args()
    if arguments.mixed:
        os.environ[MIXED] = "1"
    wanted = Figures(kills=arguments.kills, put=1_000_000 if arguments.messages is None else arguments.messages)
    run: Callable[..., Figures] = campaign
    if arguments.endpoints:
        from tests.endpoint_campaign import campaign as run

        wanted.closes = 3 * wanted.kills if arguments.closes is None else arguments.closes
        wanted.put = arguments.messages or 0
    part, total, seed = arguments.part or (20 if arguments.endpoints else 300), Figures(), arguments.seed
    while total.kills < wanted.kills or total.put < wanted.put or total.closes < wanted.closes:
        left = {name: max(0, getattr(wanted, name) - getattr(total, name)) for name in ("kills", "put", "closes")}
        parts = max(1, left["kills"] // part)
        shares = [-(-count // parts) for count in left.values()]
        try:
            total.add(run(*shares, seed))
        except BaseException:
            print(f"seed {seed}, {shares} kills, messages, closes: failed, after {total}", file=sys.stderr, flush=True)
            raise
        print(f"seed {seed}: {total}", flush=True)
        seed += 1


if __name__ == "__main__":
    main()
