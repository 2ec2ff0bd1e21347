"""The campaign over endpoints: ends that close, fail, and are killed, while their peers are stopped or cut off.

``python -m tests.campaign --endpoints --kills 300 --closes 1000 --seed 7``. A few programs (``endpoint_program``), each with
several ends, and streams between them: one to one, three to one, one to three; over ipc and tcp, through shared memory and in
frames, with keys and without, directly or by a bad line (``proxy``), in each other's sight or out of it. Some consumers wait on
their descriptor, and programs fork children that outlive them for a while. In some campaigns shared memory is short: all waits,
sends and deaths meet with puts that wait for it. The supervisor ends ends: it has them close
or leave by an exception, or kills their program; often while a peer's program is stopped, or the line silent or cut. A
program that was not killed lives on, and new ends are opened in it, or in another, in the place of those that are gone.

The judge knows how each end ended, so also how each stream must end at its consumers:

* With EndOfStream after goodbyes, with StreamFailed that names the end after an exception, with PeerLost after a kill. It is
  told within ``BOUND`` seconds, once, and after all messages of those whose end it tells; and not while no producer has ended.
* What came was begun, came once, and to each consumer in its producer's order and intact.
* What is missing though its ``put`` had returned is what the producer's statistics count as lost, and what the PeerLost that it
  was told names, but for one message that a killed consumer had just taken. Where no consumer ended, nothing is missing.
* An end that is to close has closed, and ends that are there exchange messages, within ``BOUND`` seconds.
* In the end all programs end by themselves, and the runtime folder has nothing of the endpoints.

Seconds in which one of a stream's programs is stopped, or its line cut off, do not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tensorpipe_ipc as tp
from tensorpipe_ipc.security import write_key_pair
from tensorpipe_ipc.zeromq.curve import key_pair
from tests.campaign import BROKEN, NUMBERS, Figures, Forked, around, broken, journal, nothing_left
from tests.endpoint_program import (
    BEGUN,
    CLOSE,
    ENDED,
    FAILED,
    FAILURE,
    FATE,
    GOODBYE,
    JOURNAL_WORDS,
    LEAVING,
    LOSS,
    LOST,
    MOST_ENDS,
    NAMED,
    NUMBER,
    OPEN,
    RAISE,
    RETURNED,
    STATE,
    TOLD,
    WORDS,
    Spec,
    serve,
)
from tests.proxy import Proxy

BOUND = 15.0  # seconds that anything may take, on a machine that does other things too
PEER_TIMEOUT = 3.0  # seconds
STARTING = 60.0  # seconds for a program that imports everything on a busy machine
HELD = 1.2  # seconds, at most, that a program is stopped or a line is silent: less than PEER_TIMEOUT
SHORT = 1 << 21  # bytes of a program's shared memory, where it is short
NEAR = 3  # programs; one more is out of the others' sight
KINDS = {"close": {GOODBYE}, "raise": {FAILURE}, "kill": {LOSS}}
TOLD_AS = {GOODBYE: "EndOfStream", FAILURE: "StreamFailed", LOSS: "PeerLost"}
ROOT = Path(__file__).resolve().parents[1]


class Kind(NamedTuple):
    """The properties of a stream."""

    name: str
    producers: int = 1
    consumers: int = 1
    consumer_binds: bool = True
    scheme: str = "ipc"
    shares: bool = True
    line: bool = False
    far: bool = False  # the side that connects is in another runtime folder
    maxsize: int = 16
    has_keys: bool = False
    counts: bool = False  # the consumer is told how many producers make a stream


KINDS_OF_STREAMS = (
    Kind("pair"),
    Kind("pair_of_a_producer_that_binds", consumer_binds=False, maxsize=64),
    Kind("frames", shares=False),
    Kind("frames_of_a_producer_that_binds", consumer_binds=False, shares=False, maxsize=3),
    Kind("fan_in", producers=3, counts=True),
    Kind("fan_out", consumers=3, consumer_binds=False),
    Kind("tcp", scheme="tcp"),
    Kind("tcp_fan_in", producers=3, scheme="tcp", shares=False),
    Kind("line", scheme="tcp", shares=False, line=True),
    Kind("line_to_a_producer_that_binds", scheme="tcp", consumer_binds=False, shares=False, line=True),
    Kind("line_out_of_sight", scheme="tcp", shares=False, line=True, far=True),
    Kind("keyed", has_keys=True),
    Kind("keyed_pair_of_a_producer_that_binds", has_keys=True, consumer_binds=False),
    Kind("keyed_frames", has_keys=True, shares=False, maxsize=4),
    Kind("keyed_tcp", has_keys=True, scheme="tcp"),
    Kind("keyed_tcp_fan_in", has_keys=True, scheme="tcp", producers=3, shares=False),
    Kind("keyed_tcp_fan_out", has_keys=True, scheme="tcp", consumers=3, consumer_binds=False),
    Kind("keyed_line", scheme="tcp", shares=False, line=True, has_keys=True),
    Kind(
        "keyed_line_to_a_producer_that_binds",
        scheme="tcp",
        shares=False,
        line=True,
        has_keys=True,
        consumer_binds=False,
    ),
    Kind("tcp_fan_out", scheme="tcp", consumers=3, consumer_binds=False, shares=False),
    Kind("fan_out_frames", consumers=3, consumer_binds=False, shares=False),
    Kind("fan_in_frames", producers=3, shares=False),
    Kind("shared_line", scheme="tcp", line=True, has_keys=True),
    Kind("shared_line_to_a_producer_that_binds", scheme="tcp", line=True, has_keys=True, consumer_binds=False),
    Kind("line_out_of_sight_to_a_producer", scheme="tcp", consumer_binds=False, shares=False, line=True, far=True),
)


class Host:
    """A program that ends live in."""

    def __init__(self, folder: Path, far: bool, by_command: bool) -> None:
        self.far, self.dead, self.stopped = far, False, False
        runtime = str(folder / ("far" if far else "near"))
        ear, self._mouth = os.pipe()
        self._process: subprocess.Popen[bytes] | Forked
        if by_command:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.endpoint_program", str(folder)],
                cwd=ROOT,
                stdin=ear,
                env={**os.environ, "XDG_RUNTIME_DIR": runtime},
            )
        else:
            self._process = Forked(serve, str(folder), ear, runtime)
        os.close(ear)
        self.pid = self._process.pid

    def tell(self, command: object) -> None:
        """Have it do something."""
        os.write(self._mouth, (command if isinstance(command, str) else json.dumps(command)).encode() + b"\n")

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False
        if not self.dead:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        if not self.dead:
            os.kill(self.pid, signal.SIGKILL)
            status = self.reap()
            assert status == -signal.SIGKILL, f"a program ended by itself, with {status}"

    def reap(self) -> int:
        """Wait for its end, and say how it ended."""
        self.dead = True
        os.close(self._mouth)
        return self._process.reap() if isinstance(self._process, Forked) else self._process.wait()


class Line:
    """A proxy, in a process of its own: so nobody who is forked has its sockets."""

    def __init__(self, port: int) -> None:
        self.silent = False
        ear, self._mouth = os.pipe()
        told, telling = os.pipe()
        self._process = Forked(_lead, port, ear, telling)
        os.close(ear)
        os.close(telling)
        with open(told, encoding="ascii") as file:
            self.port = int(file.readline())

    def do(self, what: str) -> None:
        """A word of ``_DEEDS``."""
        self.silent = what in ("silence", "there", "back")
        os.write(self._mouth, what[0].encode())

    def close(self) -> None:
        """End it."""
        os.close(self._mouth)
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.reap()


_DEEDS: dict[str, Callable[[Proxy], object]] = {
    "silence": lambda line: line.silence(),
    "there": lambda line: line.silence("there"),
    "back": lambda line: line.silence("back"),
    "heal": lambda line: line.heal(),
    "cut": lambda line: line.cut(),
    "reset": lambda line: line.cut(reset=True),
}


def _lead(port: int, ear: int, telling: int) -> None:
    deeds = {name[0]: deed for name, deed in _DEEDS.items()}
    with Proxy(port) as line:
        os.write(telling, f"{line.port}\n".encode())
        while word := os.read(ear, 1):
            deeds[word.decode()](line)


class End:
    """One end, what became of it, and what it has told."""

    def __init__(self, stream: Stream, role: str, who: int, host: Host) -> None:
        self.stream, self.role, self.who, self.host = stream, role, who, host
        kind, campaign = stream.kind, stream.campaign
        self.words = campaign.words[who * WORDS : (who + 1) * WORDS]
        self.waits = who % 4 == 0
        binds = (role == "got") == kind.consumer_binds
        spec = Spec(
            who,
            role,
            stream.endpoint if binds or stream.line is None else f"tcp://127.0.0.1:{stream.line.port}",
            binds,
            kind.maxsize,
            "require" if kind.shares else "off",
            kind.producers if kind.counts else "auto",
            PEER_TIMEOUT,
            self.waits,
            str(campaign.keys) if kind.has_keys else "",
            role == "got" and not self.waits and who % 5 < 2,
            campaign.capacity,
        )
        self.journal = journal(campaign.folder / f"got{who}", JOURNAL_WORDS) if role == "got" else memoryview(b"")
        self.began, self.gone_at = time.monotonic(), 0.0  # gone: it has closed, or is dead
        self.how, self.ends_at = "", np.inf  # it was made to end: how, a key of KINDS, and when
        self.allowed: set[int] = set()  # how that may be told
        self.since = stream.clock  # when it was made, or made to end; at the earliest when it was seen to be open
        self.seen = False
        self.read = 0  # entries
        self.met: dict[int, int] = {}  # by producer: its last message here
        self.pending: set[int] = set()  # producers met whose end was not told
        self.told_of: set[int] = set()  # producers whose end was
        self.named: list[int] = []
        self.heard: list[str] = []  # what it was told, of whom
        self.due: float | None = None  # by the stream's clock: since when an end is to be told here
        host.tell(spec)

    def __repr__(self) -> str:
        return f"{self.role}{self.who} ({self.how or 'there'}, in pid {self.host.pid}, {list(self.words)})"

    @property
    def lives(self) -> bool:
        """Return whether the end is open, and not told to end."""
        return not self.how and self.words[STATE] == OPEN

    def end(self, how: str) -> None:
        """Have it close, or leave by an exception."""
        self.how, self.ends_at = how, time.monotonic()
        self.allowed, self.since = set(KINDS[how]), self.stream.clock
        self.words[FATE] = CLOSE if how == "close" else RAISE
        if self.waits and how == "close":
            self.host.tell(self.who)
        self.stream.campaign.figures.closes += 1

    def killed(self) -> None:
        """Its program was."""
        if not self.gone_at:
            self.gone_at, self.since = time.monotonic(), self.stream.clock
            self.ends_at = min(self.ends_at, self.gone_at)
            if self.words[STATE] != ENDED:
                said = self.words[STATE] == LEAVING or self.waits
                self.allowed = {LOSS} | (self.allowed if said else set())
                self.how = "kill"

    def overlaps(self, other: End) -> bool:
        """Return whether the two ends existed at one time."""
        return self.began <= (other.gone_at or np.inf) and other.began <= (self.gone_at or np.inf)

    # ---- of a consumer ----

    def count(self) -> int:
        """Return how many entries the end has made."""
        return self.journal[0]

    def said(self) -> str:
        """Return the last thing, other than a message, that the end was told."""
        with contextlib.suppress(OSError):
            return (self.stream.campaign.folder / f"said{self.who}").read_text(encoding="utf-8")
        return ""

    def look(self) -> None:
        """Read what it has written since, and judge it as far as that can be done at once."""
        until = self.count()
        if until == self.read:
            return
        entries = np.frombuffer(self.journal, np.uint64, until - self.read, 8 * (self.read + 1))
        self.read = until
        start = 0
        for place in [*np.flatnonzero(entries >> np.uint64(40) == 0).tolist(), len(entries)]:
            self.take(entries[start:place])
            if place < len(entries):
                self.hear(int(entries[place]) >> 24, int(entries[place]) & NUMBER)
            start = place + 1

    def take(self, entries: np.ndarray) -> None:
        """Messages that came."""
        if not len(entries):
            return
        assert not (entries & np.uint64(BROKEN)).any(), f"{self}: content is wrong: {broken(entries)}"
        producers, numbers = entries >> np.uint64(40), entries & np.uint64(NUMBERS)
        for who in np.unique(producers).tolist():
            of_one = np.concatenate([[self.met.get(who, -1)], numbers[producers == who].astype(np.int64)])
            wrong = np.flatnonzero(np.diff(of_one) <= 0)
            assert not len(wrong), f"{self}: out of order, or twice: of producer {who} came {around(of_one, wrong)}"
            assert who not in self.told_of, f"{self}: a message of producer {who} came after its end was told"
            self.met[who] = int(of_one[-1])
            self.pending.add(who)
            self.stream.came.setdefault(who, []).append(of_one[1:])
        self.stream.campaign.figures.got += len(entries)

    def hear(self, kind: int, who: int) -> None:
        """An end of the stream was told."""
        if kind == NAMED:
            self.named.append(who)
            return
        named, self.named = self.named, []
        ended = {end.who: end for end in self.stream.all if end.role == "put" and end.how and end.overlaps(self)}
        open_ones = {who: end for who, end in ended.items() if who not in self.told_of}
        told = f"{self.stream.kind.name}: {self} was told {TOLD_AS[kind]} {named}, where there ended {list(open_ones.values())}"
        told = f"{told} of {self.stream.all[-9:]}; before it was told {self.heard} ({self.said()})"
        self.heard.append(f"{TOLD_AS[kind]} {named} after messages of {sorted(self.pending)}")
        assert open_ones, f"{told}: none did"
        if self.stream.kind.counts:  # one that it has met, and nothing of whose came, counts too: others go on then
            self.pending &= set(ended)
            if not set(open_ones) <= set(self.met):  # and of whom of the others this tells nobody knows
                self.pending &= set(named)
        pending = [ended.get(who) for who in self.pending]
        assert None not in pending, f"{told}: of {self.pending} one is still there"
        if kind == GOODBYE:
            assert all(end.allowed & {GOODBYE} for end in pending if end), told
        else:
            assert any(end.allowed & {kind} for end in open_ones.values()), told
        assert all(open_ones[who].allowed & {FAILURE} for who in named if who in open_ones), told
        assert set(named) <= set(open_ones), f"{told}: told before"
        missing = {end.who for end in pending if end and end.allowed == {FAILURE}} - set(named)
        assert not missing, f"{told}: the failure of {missing} is not"
        assert named or kind != FAILURE, f"{told}: of whom?"
        self.told_of |= self.pending | set(named)
        self.pending.clear()
        if self.due is not None:
            self.stream.campaign.figures.told.append(self.stream.clock - self.due)
            self.due = None


class Stream:
    """One endpoint, the ends at it, and what is done to them."""

    def __init__(self, kind: Kind, campaign: Campaign) -> None:
        self.kind, self.campaign, self.choose = kind, campaign, campaign.choose
        self.endpoint = kind.name if kind.scheme == "ipc" else f"tcp://127.0.0.1:{_free_port(self.choose)}"
        self.line = Line(int(self.endpoint.rpartition(":")[2])) if kind.line else None
        self.all: list[End] = []
        self.now: list[End] = []  # those that are there
        self.came: dict[int, list[np.ndarray]] = {}  # by producer: numbers of its messages
        self.clock, self.looked = 0.0, time.monotonic()
        self.waits_for_telling = True
        self.next_deed = 0.0
        self.undo: tuple[float, Callable[[], None]] | None = None
        self.progress: dict[int, tuple[int, float]] = {}  # by end: messages, and by the clock since when no more
        self.fill()

    # ---- who is there ----

    def of(self, role: str) -> list[End]:
        """The ends of one side that are there."""
        return [end for end in self.now if end.role == role]

    def fill(self, beside: Host | None = None) -> None:
        """Open ends where one is missing."""
        anew = not self.kind.counts or not self.of("put")  # a stream is of three producers, and then of three others
        for role, count in (("put", self.kind.producers * anew), ("got", self.kind.consumers)):
            for _ in range(count - len(self.of(role))):
                far = self.kind.far and (role == "got") != self.kind.consumer_binds
                hosts = [host for host in self.campaign.hosts if host.far == far]
                host = beside if beside in hosts and self.choose.random() < 0.5 else self.choose.choice(hosts)
                assert host is not None
                end = End(self, role, self.campaign.next_who(), host)
                self.all.append(end)
                self.now.append(end)

    def is_calm(self) -> bool:
        """Return whether no end is stopped or cut off."""
        return not any(end.host.stopped for end in self.now) and not (self.line is not None and self.line.silent)

    def step(self, ending: bool = False) -> None:
        """See where everybody is, and do what is to be done."""
        now = time.monotonic()
        self.clock += (now - self.looked) * self.is_calm()
        self.looked = now
        if self.undo is not None and now > self.undo[0]:
            undo, self.undo = self.undo[1], None
            undo()
        for end in self.all:
            if end.role == "got" and end.words[STATE] and (end in self.now or end.read < end.count()):
                end.look()
        for end in list(self.now):
            self.see(end)
        self.see_to_tellings()
        self.see_to_progress()
        if ending:
            return
        self.replace()
        if self.is_settled() and now > self.next_deed and self.undo is None:
            self.deed()
            self.next_deed = now + self.choose.expovariate(1 / 0.2)

    def see(self, end: End) -> None:
        """Look at the state of an end, and fail if it takes too long to begin or to end."""
        state = end.words[STATE]
        if state and not end.seen:
            end.seen, end.since = True, self.clock
        waited = self.clock - end.since
        assert state != FAILED, f"{self.kind.name}: {end} failed, after {self.all[-8:]}"
        if end.gone_at or state == ENDED:
            assert end.how, f"{self.kind.name}: {end} ended by itself"
            end.gone_at = end.gone_at or time.monotonic()
            self.now.remove(end)
            if end.role == "got":
                end.look()
        elif end.how:
            bound = BOUND if state else STARTING  # its program may still import what it needs
            self.campaign.see(waited < bound, f"{self.kind.name}: {end} does not end since {waited:.1f} s", end)
        elif not state:
            self.campaign.see(waited < STARTING, f"{self.kind.name}: {end} does not begin since {waited:.1f} s", end)

    def see_to_tellings(self) -> None:
        """Every consumer learns how its stream ended."""
        producers = self.of("put")
        for end in self.of("got"):
            if not self.owes_telling(end, producers):
                end.due = None
                continue
            end.due = self.clock if end.due is None else end.due
            bound = BOUND + (PEER_TIMEOUT if self.kind.far else 0)
            owing = [each for each in self.all if each.who in end.pending]
            waited = self.clock - end.due
            self.campaign.see(
                waited < bound, f"{self.kind.name}: {end} is not told of {owing} since {waited:.1f} s", end
            )

    def owes_telling(self, consumer: End, producers: list[End]) -> bool:
        """Return whether a consumer must still be told that its stream has ended."""
        return not producers and consumer.lives and self.is_owed(consumer)

    def is_owed(self, consumer: End) -> bool:
        """Return whether a consumer has met producers whose end it must be told, once they are gone."""
        return bool(consumer.pending) and (not self.kind.counts or len(consumer.pending) % self.kind.producers == 0)

    def see_to_progress(self) -> None:
        """Messages pass, where both sides are there."""
        consumers = [end for end in self.of("got") if end.lives]
        for end in self.of("put"):
            if not (end.lives and consumers):
                self.progress.pop(end.who, None)
                continue
            came = end.words[RETURNED] + sum(consumer.count() << 32 for consumer in consumers)
            before, since = self.progress.get(end.who, (-1, self.clock))
            if before >> 32 == came >> 32 or before & 0xFFFFFFFF == came & 0xFFFFFFFF:
                waited = self.clock - since
                self.campaign.see(
                    waited < BOUND, f"{self.kind.name}: {end} and {consumers}: nothing passes since {waited:.1f} s", end
                )
            else:
                self.progress[end.who] = (came, self.clock)
            self.progress.setdefault(end.who, (came, self.clock))

    def replace(self) -> None:
        """Open others in the places of those that are gone, if it is time."""
        producers, consumers = self.of("put"), self.of("got")
        if len(producers) == self.kind.producers and len(consumers) == self.kind.consumers:
            return
        if self.kind.counts and not producers:
            for consumer in consumers:
                if consumer.pending and not self.owes_telling(consumer, producers) and consumer.lives:
                    consumer.end("close")  # it has not met all three, so nobody knows how many it waits for
                if consumer.pending:
                    return
        elif self.waits_for_telling and any(self.owes_telling(each, producers) for each in consumers):
            return
        self.waits_for_telling = self.choose.random() < 0.7
        gone = [end for end in self.all[-8:] if end.gone_at and not end.host.dead]
        self.fill(gone[-1].host if gone else None)

    def is_settled(self) -> bool:
        """Return whether all ends are open, and messages of every producer have come."""
        if not all(end.lives for end in self.now) or not self.of("put") or not self.of("got"):
            return False
        met = {who for consumer in self.of("got") for who in consumer.met}
        return all(end.who in met for end in self.of("put"))

    # ---- what is done ----

    def deed(self) -> None:
        """Have an end close or fail, often while a peer is stopped or cut off."""
        end = self.choose.choice(self.now)
        how = "raise" if self.choose.random() < 0.3 else "close"
        chance, held = self.choose.random(), time.monotonic() + self.choose.uniform(0, HELD)
        peers = [peer.host for peer in self.now if peer.role != end.role and peer.host is not end.host]
        line = self.line
        if line is not None and chance < 0.6:
            deed = self.choose.choice(("silence", "there", "back", "cut", "reset"))
            line.do(deed)
            self.undo = (held, lambda: line.do("heal"))
            end.end(how)
            if self.kind.far:  # a goodbye that did not leave, or a message that did not come
                end.allowed.add(LOSS)
        else:
            if chance < 0.4 and peers and not any(host.stopped for host in self.campaign.hosts):
                peer = self.choose.choice(peers)
                peer.stop()
                self.campaign.figures.stops += 1
                self.undo = (held, peer.go_on)
            end.end(how)

    # ---- the end ----

    def close_all(self, role: str) -> None:
        """Have all of one side close by themselves. So does one that is to fail, and that waits for another end: none comes."""
        others = self.of("got" if role == "put" else "put")
        for end in self.of(role):
            waits = end.how == "raise" and end.waits and not others and not self.is_owed(end)
            if not end.how or waits and end.words[STATE] == OPEN:
                end.end("close")

    def judge(self) -> None:
        """No message is missing that must not be."""
        for end in self.all:
            if end.role == "put":
                self.judge_producer(end)

    def judge_producer(self, end: End) -> None:
        """Check a producer's missing messages against the losses that the producer was told of."""
        begun, returned, lost, told = (end.words[word] for word in (BEGUN, RETURNED, LOST, TOLD))
        numbers = np.sort(np.concatenate([*self.came.get(end.who, []), np.zeros(0, np.int64)]))
        assert not len(numbers) or numbers[-1] < begun, f"{end}: message {numbers[-1]} came that it never put"
        twice = numbers[1:][np.diff(numbers) == 0]
        assert not len(twice), f"{end}: messages {twice[:5]} came twice"
        missing = returned - int((numbers < returned).sum())
        left = [each for each in self.all if each.role == "got" and each.overlaps(end)]
        dead = sum(each.how == "kill" for each in left)
        most = self.kind.maxsize
        if end.how == "kill":
            gone = sum(bool(each.how) for each in left)
            fate = Fate(
                returned,
                missing,
                0,
                missing,
                0,
                gone * (most + 1) + (0 if self.kind.shares else most * max(1, len(left))),
            )
        else:
            left = [each for each in left if each.ends_at < end.gone_at]
            unsure = 0 if self.kind.shares else most * (len(left) if self.kind.far else dead)
            by_error = end.how == "close" and not end.waits  # where another error leaves its block, it is warned
            fate = Fate(returned, missing, lost, told if by_error else lost, dead, unsure)
            assert left or not lost, f"{self.kind.name}: {end} lost messages, and no consumer ended: {fate}"
        fate.check(f"{self.kind.name}: {end}, {left}", killed=end.how == "kill")
        figures = self.campaign.figures
        figures.put, figures.missing, figures.lost = (
            figures.put + returned,
            figures.missing + missing,
            figures.lost + lost,
        )

    def release(self) -> None:
        """Let go of everything."""
        for end in self.all:
            end.words.release()
            end.journal.release()
        if self.line is not None:
            self.line.close()


class Fate(NamedTuple):
    """The outcome of a producer's messages."""

    returned: int
    missing: int
    lost: int  # as it counted them
    told: int  # as PeerLost named them
    dead: int  # consumers that were killed in its time: each may have had one that it had taken and not written down
    unsure: int  # messages of which nobody can know whether they were taken

    def check(self, whose: str, *, killed: bool = False) -> None:
        """Nothing is missing that was promised, and all that is missing was told."""
        if killed:
            assert self.missing <= self.unsure, f"missing: {self} of {whose}"
            return
        assert self.missing <= self.lost + self.dead, f"missing, and not counted: {self} of {whose}"
        assert self.lost <= self.missing + self.unsure, f"counted, and not missing: {self} of {whose}"
        assert self.told == self.lost, f"not told: {self} of {whose}"


class Campaign:
    """The programs, the streams between them, and the deeds."""

    def __init__(self, kinds: list[Kind], choose: random.Random, folder: Path, figures: Figures) -> None:
        self.choose, self.folder, self.figures = choose, folder, figures
        self.words = journal(folder / "ends", MOST_ENDS * WORDS)
        self._who = 0
        self.capacity = SHORT if choose.random() < 0.3 else 0
        for name in ("near", "far"):
            (folder / name).mkdir(0o700)
        self.keys = folder / "keys"
        self.keys.mkdir(0o700)
        for name in ("binder", "friend"):
            write_key_pair(str(self.keys / name), *key_pair())
        self.hosts = [Host(folder, far, by_command=False) for far in [False] * NEAR + [True]]
        self.streams = [Stream(kind, self) for kind in kinds]

    def next_who(self) -> int:
        """A number for an end."""
        self._who += 1
        return self._who

    def run(self, kills: int, closes: int, messages: int) -> None:
        """Kill so many programs, have so many ends close, and see at least so many messages come."""
        figures, next_kill = self.figures, 0.0
        wanted = Figures(kills=figures.kills + kills, closes=figures.closes + closes, got=figures.got + messages)
        pace = 0.5 if not kills else min(2.0, 0.3 * max(1, closes) / kills)
        while figures.kills < wanted.kills or figures.closes < wanted.closes or figures.got < wanted.got:
            time.sleep(0.002)
            for stream in self.streams:
                stream.step()
            if figures.kills < wanted.kills and time.monotonic() > next_kill:
                if next_kill:
                    self.kill(self.choose.choice(self.hosts))
                next_kill = time.monotonic() + self.choose.expovariate(1 / pace)
            figures.tell()

    def kill(self, host: Host) -> None:
        """SIGKILL for one program, and another in its place."""
        host.kill()
        self.figures.kills += 1
        for stream in self.streams:
            for end in stream.now:
                if end.host is host:
                    end.killed()
        place = self.hosts.index(host)
        by_command = not host.far and self.choose.random() < 0.1
        self.hosts[place] = Host(self.folder, host.far, by_command)

    def finish(self) -> None:
        """Have all ends close, all programs end, judge, and see that nothing is left."""
        for role in ("put", "got"):
            while any(end.role == role for stream in self.streams for end in stream.now):
                for stream in self.streams:
                    stream.close_all(role)
                    stream.step(ending=True)
                time.sleep(0.002)
            while role == "put" and any(self.owing(stream) for stream in self.streams):
                for stream in self.streams:
                    stream.step(ending=True)
                time.sleep(0.002)
        for host in self.hosts:
            host.tell("end")
            status = host.reap()
            assert status == 0, f"a program ended with {status}"
        for stream in self.streams:
            stream.judge()
        # A child that a killed program had just forked has its descriptors until it has run: on a busy machine, a while.
        deadline = time.monotonic() + 5
        while left := [name for name in self.left() if not name.endswith((".lock", "/.lock"))]:
            assert time.monotonic() < deadline, f"left in the runtime folder: {left}"

    def owing(self, stream: Stream) -> bool:
        """Return whether a consumer of a stream must still be told of its end."""
        return any(stream.owes_telling(end, stream.of("put")) for end in stream.of("got"))

    def left(self) -> list[str]:
        """Return the files in the runtime folders, once new ends have swept away all that killed ends left there."""
        for name in ("near", "far"):
            child = Forked(_sweep, str(self.folder / name), [stream.endpoint for stream in self.streams])
            assert child.reap() == 0
        return [str(path) for path in self.folder.glob("*/tensorpipe_ipc/*")]

    def see(self, well: bool, complaint: str, end: End) -> None:
        """See that it is so; else ask everybody who has to do with an end where they are."""
        if well:
            return
        for host in {each.host for each in end.stream.now if not each.host.dead}:
            print(f"pid {host.pid}, with {[each for each in end.stream.now if each.host is host]}:", file=sys.stderr)
            sys.stderr.flush()
            os.kill(host.pid, signal.SIGUSR1)
            time.sleep(0.5)
        for each in end.stream.now:
            print(f"{each}: {each.said()}", file=sys.stderr, flush=True)
        raise AssertionError(complaint)

    def release(self) -> None:
        """Let go of everything."""
        for host in self.hosts:
            if not host.dead:
                os.kill(host.pid, signal.SIGKILL)
                host.reap()
        for stream in self.streams:
            stream.release()
        self.words.release()


def _sweep(runtime: str, endpoints: list[str]) -> None:
    os.environ["XDG_RUNTIME_DIR"] = runtime
    for endpoint in endpoints:
        tp.Consumer(endpoint).close()


def _free_port(choose: random.Random) -> int:
    """A tcp port of loopback that nobody has, and that the kernel gives nobody who does not name it."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
            return int(probe.getsockname()[1])


def campaign(
    kills: int, messages: int, closes: int, seed: int, kinds: tuple[Kind, ...] = KINDS_OF_STREAMS, most: int = 5
) -> Figures:
    """Run it, with some kinds of streams at a time.

    Args:
        closes: how many ends close, or fail.
        most: streams at a time.

    Raises:
        AssertionError: something that was promised does not hold.
    """
    choose, figures = random.Random(seed), Figures()
    with nothing_left():
        folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        try:
            this = Campaign(choose.sample(kinds, min(most, len(kinds))), choose, folder, figures)
            try:
                this.run(kills, closes, messages)
                this.finish()
            finally:
                this.release()
        finally:
            shutil.rmtree(folder)
    return figures
