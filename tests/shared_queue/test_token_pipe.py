"""Tokens through a pipe and its spill log: order, exactly once, who has them after a kill."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from crash_points import LIMIT, in_child, reap, told_by_child
from inside import log_of, take_spilled, take_turn

from tensorpipe_ipc.memory import ofd_locks
from tensorpipe_ipc.memory.segment import Segment
from tensorpipe_ipc.shared_queue import token_pipe
from tensorpipe_ipc.shared_queue.token_pipe import CAPACITY, DOORBELL, SHUT, TokenPipe

FIRST = 1000  # of the words that a test uses


class Words:
    """Words of a segment, as the rows of processes have them."""

    def __init__(self) -> None:
        self.segment = Segment.create(1 << 28)
        self.values = self.segment.words

    def buffers(self, word: int, count: int = 1) -> Any:
        return [memoryview(self.segment.memory)[8 * word : 8 * (word + count)]]


@pytest.fixture
def words() -> Iterator[Any]:
    made = Words()
    yield made
    vars(made).clear()  # pytest still refers to it when nothing_left_behind looks


@pytest.fixture(params=[None, CAPACITY], ids=["with log", "pipe alone"])
def pipe(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = TokenPipe.create(request.param)
    assert made.spills == (request.param is None)
    yield made
    made.close()


def give(pipe: TokenPipe, words: Any, *tokens: Any) -> None:
    for i, token in enumerate(tokens):
        words.values[FIRST + i] = token
    pipe.give(words.buffers(FIRST, len(tokens)))


def spill(pipe: TokenPipe, buffers: Any) -> None:
    pipe.spill(buffers)
    pipe.ring_doorbell()


def take(pipe: TokenPipe, words: Any, count: int = 1) -> Any:
    taken = abs(pipe.take_nowait(words.buffers(FIRST + 100, count)))
    return words.values[FIRST + 100 : FIRST + 100 + taken].tolist()


def test_tokens_come_in_the_order_given_one_or_many_at_a_time(pipe: TokenPipe, words: Any) -> None:
    give(pipe, words, 11)
    give(pipe, words, 12, 13, 14)
    assert pipe.unread() == 4
    assert take(pipe, words) == [11]
    assert take(pipe, words, 64) == [12, 13, 14]
    assert take(pipe, words) == []


def test_capacity_holds_whatever_the_batches(words: Any) -> None:
    """As many tokens as CAPACITY always fit, so that giving a credit or a ticket under one never waits."""
    choose = random.Random(1)
    for sizes in ([1], [64], [33], [63], range(1, 65)):
        pipe = TokenPipe.create(CAPACITY)
        words.values[FIRST] = 7
        given = 0
        for _ in range(3):  # the head's page half read, too
            while given < CAPACITY:
                count = min(choose.choice(list(sizes)), CAPACITY - given)
                for i in range(count):
                    words.values[FIRST + i] = 7
                assert os.writev(pipe.fd, words.buffers(FIRST, count)) == 8 * count  # non-blocking: it must fit
                given += count
            for _ in range(choose.randrange(1, 700)):
                given -= len(take(pipe, words))
        pipe.close()


def test_beyond_the_pipe_tokens_go_to_the_log_and_come_back_in_order(words: Any) -> None:
    pipe = TokenPipe.create(None)
    spilled = False
    for token in range(10, 30_010):
        words.values[FIRST] = token
        if spilled:
            spill(pipe, words.buffers(FIRST))
        else:
            pipe.give(words.buffers(FIRST))
            spilled = pipe.spilled() > 0
    assert pipe.snapshot() - {DOORBELL} == set(range(10, 30_010))
    got = []
    while len(got) < 30_000:
        got += [token for token in take(pipe, words, 3) if token != DOORBELL]
    assert got == list(range(10, 30_010))
    assert pipe.spilled() == 0
    pipe.close()


def test_who_takes_from_the_log_does_not_pass_a_thousand_bells_by_hand(words: Any) -> None:
    """They are there for all who wait when a queue is shut down, and stay. Passed one by one, each message would cost 2 ms."""
    pipe, passed = TokenPipe.create(None), []
    for token in range(10, 20):
        words.values[FIRST] = token
        pipe.spill(words.buffers(FIRST))
    assert pipe.ring_doorbell(SHUT, 1000)

    def put_back(count: int) -> None:
        passed.append(count)
        assert pipe.ring_doorbell(SHUT, count)

    for token in range(10, 20):
        assert pipe.take_past_doorbells(words.buffers(FIRST), put_back)
        assert words.values[FIRST] == token
    assert sum(passed) <= 20
    assert pipe.unread() == 1000
    pipe.close()


def test_who_takes_past_bells_takes_first_what_stands_behind_them(words: Any) -> None:
    pipe = TokenPipe.create(None)
    assert pipe.ring_doorbell(SHUT, 5)
    give(pipe, words, 10)
    words.values[FIRST] = 11
    pipe.spill(words.buffers(FIRST))
    got = []
    for _ in range(2):
        assert pipe.take_past_doorbells(words.buffers(FIRST), lambda count: pipe.ring_doorbell(SHUT, count)) == 1
        got.append(words.values[FIRST])
    assert got == [10, 11]
    assert pipe.take_past_doorbells(words.buffers(FIRST), lambda count: pipe.ring_doorbell(SHUT, count)) == 0
    pipe.close()


def test_the_logs_memory_is_given_back_as_it_is_read(words: Any) -> None:
    the_logs_memory_is_given_back(words)


def test_the_logs_memory_is_given_back_by_a_process_that_locks_its_own(words: Any) -> None:
    def locks() -> None:
        assert ctypes.CDLL(None).mlockall(2 | 4) == 0  # MCL_FUTURE, MCL_ONFAULT
        the_logs_memory_is_given_back(words)

    assert told_by_child(locks) == "None"


def the_logs_memory_is_given_back(words: Any) -> None:
    pipe = TokenPipe.create(None)
    for i in range(64):
        words.values[FIRST + i] = 5
    for _ in range(2000):
        spill(pipe, words.buffers(FIRST, 64))
        while take(pipe, words, 64):
            pass
    log = os.fstat(log_of(pipe))
    assert log.st_size == 2000 * 64 * 8
    assert log.st_blocks * 512 <= 1 << 18
    pipe.close()


def test_a_taker_stopped_between_its_looks_notices_that_its_token_is_early(
    words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 3: meanwhile others drain the log, fill the pipe, and spill again."""
    pipe = TokenPipe.create(None)
    words.values[FIRST] = 10
    spill(pipe, words.buffers(FIRST))
    assert take(pipe, words) == [DOORBELL]
    readv = os.readv
    looks = []

    def stopped(descriptor: int, buffers: Any) -> Any:
        looks.append(descriptor)
        if looks == [pipe.fd] * 2:  # the second look, which is between the two that matter
            with pytest.raises(BlockingIOError):  # what it sees: the pipe is empty
                readv(descriptor, buffers)
            assert take(pipe, words) == [10]
            give(pipe, words, 11)
            words.values[FIRST] = 12
            spill(pipe, words.buffers(FIRST))
            raise BlockingIOError
        return readv(descriptor, buffers)

    monkeypatch.setattr(os, "readv", stopped)
    assert pipe.take_nowait(words.buffers(FIRST + 50)) == -1
    assert words.values[FIRST + 50] == 12  # early: 11 waits in the pipe
    monkeypatch.undo()
    assert take(pipe, words) == [11]
    pipe.close()


def test_takers_of_the_log_take_turns_but_nobody_waits_for_one_that_is_stopped(
    words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A taker between its two looks at the log keeps others from it for a moment. Its own token is not early."""
    pipe, turns = TokenPipe.create(None), os.memfd_create("turns")
    pipe.turn = FileTurn(turns)
    words.values[FIRST] = 10
    spill(pipe, words.buffers(FIRST))
    assert take(pipe, words) == [DOORBELL]
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            pipe.turn = FileTurn(turns)
            assert take_turn(pipe)
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            words.values[FIRST + 60] = 0
            os._exit(0 if take_spilled(pipe, words.buffers(FIRST + 60)) == 0 else 1)
        os._exit(2)
    os.read(ready[0], 1)
    assert not take_turn(pipe)
    assert take(pipe, words) == [10]
    os.write(go[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert take_turn(pipe)  # the kernel let go of the dead child's
    for descriptor in (*ready, *go, turns, pipe.turn.descriptor):
        os.close(descriptor)
    pipe.close()


class FileTurn:
    """A lock of a file's first byte, by a description of this process's own."""

    def __init__(self, file: Any) -> None:
        self.descriptor = os.open(f"/proc/self/fd/{file}", os.O_RDWR)

    def take(self) -> Any:
        return ofd_locks.lock(self.descriptor, 0, 1)

    def leave(self) -> None:
        ofd_locks.unlock(self.descriptor, 0, 1)


def test_a_wait_ends_at_its_deadline_or_at_once(pipe: TokenPipe, words: Any) -> None:
    began = time.monotonic()
    idle = []
    assert pipe.take(words.buffers(FIRST), began + 0.2, lambda: idle.append(1)) == 0
    assert time.monotonic() >= began + 0.2
    assert len(idle) >= 3
    give(pipe, words, 11)
    assert pipe.take(words.buffers(FIRST + 1), None) == 1


def test_one_descriptor_never_blocks_and_the_other_does(pipe: TokenPipe) -> None:
    assert not os.get_blocking(pipe.fd)
    assert os.get_blocking(pipe.read_end)


def descriptors() -> Any:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("tokens", "blocking", "count"), [(CAPACITY, True, 2), (CAPACITY, False, 1), (None, True, 3)])
def test_a_pipe_costs_few_descriptors(words: Any, tokens: Any, blocking: Any, count: int) -> None:
    before = descriptors()
    pipe = TokenPipe.create(tokens, blocking=blocking)
    give(pipe, words, 11)
    take(pipe, words)
    pipe.take(words.buffers(FIRST), time.monotonic() + 0.01)
    assert descriptors() == before + count
    pipe.close()
    assert descriptors() == before


def test_waits_that_share_wake_ups_cost_a_descriptor_together(words: Any) -> None:
    before = descriptors()
    pipes = [TokenPipe.create(CAPACITY, blocking=False) for _ in range(5)]
    for pipe in pipes:
        assert not pipe.take(words.buffers(FIRST), time.monotonic() + 0.01, exclusive=True)
    assert descriptors() == before + 6
    for pipe in pipes:
        pipe.close()
    assert descriptors() == before


@pytest.mark.parametrize("pages", [1, 2, 3, 16])
def test_a_pipe_of_few_pages_never_makes_a_giver_wait(words: Any, pages: Any) -> None:
    """A user who has used up his budget of pipes (fs.pipe-user-pages-soft) gets small ones; what they cannot hold spills."""
    pipe = TokenPipe.create(2 * CAPACITY, blocking=False)
    fcntl.fcntl(pipe.fd, 1031, pages * 4096)  # F_SETPIPE_SZ
    tokens = list(range(10, 10 + 2 * CAPACITY))
    for first in range(0, len(tokens), 50):
        give(pipe, words, *tokens[first : first + 50])
    got = []
    while len(got) < len(tokens):
        got += [token for token in take(pipe, words, 64) if token != DOORBELL]
    assert sorted(got) == tokens
    pipe.close()


def test_writers_of_the_log_do_not_move_its_readers_place(words: Any) -> None:
    """Appends of several processes are whole, and each token is taken once, in the order of its giver."""
    pipe, count = TokenPipe.create(None), 500

    def giver(number: int) -> None:
        for i in range(count):
            words.values[FIRST + 10 * number] = (number + 1) << 32 | i + 10
            words.values[FIRST + 10 * number + 1] = (number + 1) << 32 | i + 10 + count
            spill(pipe, words.buffers(FIRST + 10 * number, 2))

    children = [in_child(lambda number=number: giver(number)) for number in range(3)]
    got, deadline = [], time.monotonic() + LIMIT
    while len(got) < 6 * count and time.monotonic() < deadline:
        got += [token for token in take(pipe, words, 7) if token != DOORBELL]
    assert [reap(child) for child in children] == [0, 0, 0]
    for number in (1, 2, 3):
        own = [token & 0xFFFFFFFF for token in got if token >> 32 == number]
        assert own == [token for i in range(10, 10 + count) for token in (i, i + count)]
    pipe.close()


def test_a_snapshot_takes_nothing(pipe: TokenPipe, words: Any) -> None:
    assert pipe.snapshot() == frozenset()
    give(pipe, words, *range(10, 70))
    take(pipe, words)
    for _ in range(2):
        assert pipe.snapshot() == frozenset(range(11, 70))
    assert pipe.unread() == 59


def test_a_snapshot_of_a_longer_pipe_is_not_a_part(words: Any) -> None:
    pipe = TokenPipe.create(CAPACITY)
    fcntl.fcntl(pipe.fd, 1031, 1 << 18)  # F_SETPIPE_SZ
    for first in range(64, 64 * 400, 64):
        give(pipe, words, *range(first, first + 64))
    assert pipe.snapshot() == frozenset(range(64, 64 * 400))
    pipe.close()


def test_a_snapshot_for_which_there_is_no_scratch_pipe_says_so(
    pipe: TokenPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "pipe2", refuse)
    assert pipe.snapshot() is None


def test_what_an_alarm_raises_within_a_snapshot_is_no_lack_of_descriptors(
    pipe: TokenPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TimeoutError is an OSError: get then said that no descriptor was left, and the alarm was lost."""

    def alarm(number: int, frame: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(token_pipe, "_tee", lambda *_: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        with pytest.raises(TimeoutError):
            pipe.snapshot()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.kills
@pytest.mark.parametrize("log", [False, True], ids=["pipe", "log"])
def test_random_kills_of_takers_and_givers_leave_every_token_somewhere(words: Any, log: Any) -> None:
    """Each token is, after any kill, in pipe or log, in one word, or was noted by a taker: exactly once."""
    pipe = TokenPipe.create(None if log else CAPACITY)
    choose = random.Random(log)
    notes_read, notes = os.pipe()
    os.set_blocking(notes_read, False)
    count, noted, next_token = 300, {}, 10

    def taker(word: int) -> None:
        while True:
            if pipe.take(words.buffers(word), None):
                token = words.values[word]
                if token != DOORBELL:
                    os.write(notes, token.to_bytes(8, "little"))
                words.values[word] = 0

    def giver(word: int, first: Any) -> None:
        for token in range(first, first + count):
            words.values[word] = token
            spill(pipe, words.buffers(word)) if log else pipe.give(words.buffers(word))
            words.values[word] = 0

    def collect() -> None:
        try:
            while True:
                content = os.read(notes_read, 1 << 16)
                for token in memoryview(content).cast("Q"):
                    noted[token] = noted.get(token, 0) + 1
        except BlockingIOError:
            pass

    in_doubt = 0
    for _ in range(60):
        takers = [in_child(lambda word=word: taker(word)) for word in (FIRST, FIRST + 1)]
        first, next_token = next_token, next_token + count
        pids = [in_child(lambda first=first: giver(FIRST + 2, first)), *takers]
        time.sleep(choose.uniform(0, 0.012))  # when to kill; nothing waits for it
        for pid in choose.sample(pids, 3):
            os.kill(pid, signal.SIGKILL)
            reap(pid)
        collect()
        waiting = pipe.snapshot() - {DOORBELL}
        in_words = {words.values[word] for word in (FIRST, FIRST + 1)} - {0, DOORBELL}
        doubt = words.values[FIRST + 2]
        seen = sorted(waiting | in_words | set(noted) & set(range(first, next_token)))
        last = max(seen, default=first - 1)
        assert set(range(first, last + 1)) <= set(seen), "a token is nowhere"
        assert not waiting & set(noted), "a token was taken and is still there"
        assert doubt in (0, last, last + 1)
        in_doubt += doubt != 0
        for word in range(FIRST, FIRST + 3):
            words.values[word] = 0
        while take(pipe, words, 64):
            pass
    assert set(noted.values()) <= {1}
    assert len(noted) > 100
    assert in_doubt < 60
    os.close(notes_read)
    os.close(notes)
    pipe.close()
