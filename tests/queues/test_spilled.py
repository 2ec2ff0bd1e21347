"""Queues of which more was put than a pipe holds: their descriptor tells of the rest, and later they are as they were."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import pytest
import torch
from crash_points import in_child, reap
from inside import backlog_of, before_each_look_at_a_spilled_message, reading_end_of, shared_queue_of

from tensorpipe_ipc.errors import Empty, SharedMemoryError, ShutDown, UnsupportedLeaf
from tensorpipe_ipc.queues.tensor_queue import Queue
from tensorpipe_ipc.shared_queue.token_pipe import TokenPipe

LIMIT = 20  # seconds
MANY = 10_000  # more than a pipe holds


def all_there(there: Queue, got: list[object]) -> None:
    """Take what is there."""
    with contextlib.suppress(Empty):
        while True:
            got.append(there.get_nowait())


def by_select(there: Queue, got: list[object]) -> None:
    while len(got) < MANY:
        assert select.select([there], [], [], LIMIT)[0], f"silent after {len(got)}"
        with contextlib.suppress(Empty):
            got.append(there.get_nowait())


def by_wait(there: Queue, got: list[object]) -> None:
    reader = reading_end_of(there)
    while len(got) < MANY:
        assert connection.wait([reader], LIMIT) == [reader], f"silent after {len(got)}"
        with contextlib.suppress(Empty):
            got += there.get_many(100, 0)


def by_asyncio(there: Queue, got: list[object]) -> None:
    async def collect() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def one() -> None:
            with contextlib.suppress(Empty):
                got.append(there.get_nowait())
            if len(got) == MANY:
                done.set()

        loop.add_reader(there.fileno(), one)
        try:
            await asyncio.wait_for(done.wait(), LIMIT)
        finally:
            loop.remove_reader(there.fileno())

    asyncio.run(collect())


@pytest.mark.parametrize("collect", [by_select, by_wait, by_asyncio])
@pytest.mark.parametrize("maxsize", [0, MANY])
def test_the_descriptor_tells_of_every_message(maxsize: int, collect: Callable[[Queue, list[object]], None]) -> None:
    """However many wait, who only asks the descriptor gets them all, in order."""
    there = Queue(maxsize)
    for number in range(MANY):
        there.put(number)
    got: list[object] = []
    collect(there, got)
    assert got == list(range(MANY))
    all_there(there, got)
    assert len(got) == MANY
    assert not select.select([there], [], [], 0)[0]
    assert there.empty()


@pytest.mark.parametrize("put", [lambda there, obj: there.put(obj), lambda there, obj: there.put_many([obj])])
def test_after_a_burst_threads_put_at_once(
    put: Callable[[Queue, str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look at what was spilled. What the one has dropped the other does not drop again: put raised IndexError."""
    there, got, others = Queue(), list[object](), list[threading.Thread]()
    for number in range(MANY):
        there.put(number)
    all_there(there, got)

    def another_comes_first() -> None:
        if not others:
            others.append(threading.Thread(target=there.put, args=("another's",)))
            others[0].start()
            others[0].join(LIMIT)

    before_each_look_at_a_spilled_message(monkeypatch, another_comes_first)
    put(there, "first")
    put(there, "second")
    assert len(others) == 1
    all_there(there, got)
    assert got == [*range(MANY), "another's", "first", "second"]


def test_one_that_is_stopped_while_it_takes_what_was_spilled_keeps_others_waiting_once() -> None:
    """They go on without what it has for itself. Each get, and each object that a shutdown dropped, waited 10 ms for it."""
    there, number = Queue(), 4000
    fcntl.fcntl(there.fileno(), 1031, 4096)  # F_SETPIPE_SZ: 512 tokens
    for each in range(number):
        there.put(each)

    def stops() -> None:
        tickets = shared_queue_of(there).tickets
        tickets._take_spilled = lambda _: os.kill(os.getpid(), signal.SIGSTOP) or 0  # type: ignore[method-assign, func-returns-value]
        got: list[object] = []
        all_there(there, got)

    pid = in_child(stops)
    try:
        os.waitpid(pid, os.WUNTRACED)
        left, until = there.qsize(), time.monotonic() + LIMIT / 2
        assert left > number - 600
        for _ in range(left):
            there.get_nowait()
            assert time.monotonic() < until
        with pytest.raises(Empty):
            there.get_nowait()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_an_interrupted_put_had_spilled_is_found_while_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands at the log's end. Taken for not put, its block was used again, and a get raised ProtocolError."""
    there, number, got = Queue(), 600, list[object]()
    fcntl.fcntl(there.fileno(), 1031, 4096)  # F_SETPIPE_SZ: 512 tokens
    for each in range(number):
        there.put(each)
    while len(got) < 550:
        got.append(there.get_nowait())
    ring_doorbell, size, points = TokenPipe.ring_doorbell, TokenPipe.spilled, ["judged", "spilled"]

    def interrupted(*arguments: Any) -> bool:
        if points[-1:] == ["spilled"]:
            points.pop()
            raise KeyboardInterrupt
        return ring_doorbell(*arguments)

    def one_is_taken(pipe: TokenPipe) -> int:
        if points == ["judged"]:
            points.pop()
            got.append(there.get_nowait())
        return size(pipe)

    monkeypatch.setattr(TokenPipe, "ring_doorbell", interrupted)
    monkeypatch.setattr(TokenPipe, "spilled", one_is_taken)
    with pytest.raises(KeyboardInterrupt):
        there.put("interrupted")
    assert not points
    there.put("later")
    all_there(there, got)
    assert got == [*range(number), "interrupted", "later"]


def left_by_a_taker_that_died(there: Queue, last: int) -> None:
    """Leave a queue as a taker does that is killed, or stopped, just when it has found the log empty, and a put spills then.

    It had the doorbell, and has cleared the flag that tells of the log.
    """
    for number in range(MANY):
        there.put(number)
    got: list[object] = []
    all_there(there, got)
    inner = shared_queue_of(there)
    for number in range(MANY):
        there.put(number)
    while there.get_nowait() != last:
        pass
    while inner.tickets.unread():
        os.read(inner.tickets.fd, 8)
    assert inner.tickets.spilled() == MANY - 1 - last
    inner.words[inner.record.watch] = 0


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [None, LIMIT])
def test_what_a_taker_that_died_has_left_in_the_log_is_found(timeout: float | None) -> None:
    """By who waits, with no word of anybody else."""
    there = Queue()
    left_by_a_taker_that_died(there, MANY - 3)
    assert there.qsize() == 2
    assert not there.empty()
    assert [there.get(timeout=timeout) for _ in range(2)] == [MANY - 2, MANY - 1]


def test_a_shutdown_holds_though_a_taker_that_died_has_cleared_the_flag_that_tells_of_it() -> None:
    there = Queue()
    left_by_a_taker_that_died(there, MANY - 2)
    assert there.get() == MANY - 1
    there.shutdown()
    inner = shared_queue_of(there)
    for refused in (lambda: there.put(1), lambda: there.put_many([1, 2]), there.get, lambda: there.get(timeout=LIMIT)):
        inner.words[inner.record.watch] = 0
        with pytest.raises(ShutDown):
            refused()


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 300])
def test_bursts_and_droughts_again_and_again_lose_nothing_and_keep_the_order(size: int) -> None:
    """Producers that fill a small pipe, consumers of each kind that drain it: each message comes once, in its order."""
    there, rounds, count = Queue(), 5 if size else 20, 64 if size else 20
    fcntl.fcntl(there.fileno(), 1031, 4096)  # F_SETPIPE_SZ: 512 tokens
    told, tell = os.pipe()
    total = 2 * rounds * count * 30

    def produce(name: int) -> None:
        for start in range(0, rounds * count * 30, count * 30):
            batch = [(name, number, b"." * size) for number in range(start, start + count * 30)]
            there.put_many(batch) if size else [there.put(each) for each in batch]
            if start % (5 * count) == 0:
                time.sleep(0.001)  # so that it runs dry now and then

    def consume(kind: int) -> None:
        with contextlib.suppress(ShutDown):
            consume_all(kind)

    def consume_all(kind: int) -> None:
        while True:
            if kind == 0:
                some = [there.get()]
            elif kind == 1:
                some = there.get_many(50)
            else:
                select.select([there], [], [])
                some = []
                all_there(there, some)
            for each in some:
                os.write(
                    tell, kind.to_bytes(4, "little") + each[0].to_bytes(4, "little") + each[1].to_bytes(8, "little")
                )

    producers = [in_child(lambda name=name: produce(name)) for name in range(2)]  # type: ignore[misc]
    consumers = [in_child(lambda kind=kind: consume(kind)) for kind in range(3)]  # type: ignore[misc]
    seen: dict[tuple[int, int], list[int]] = {}
    left = total
    while left:
        assert select.select([told], [], [], LIMIT)[0], f"{left} of {total} never came"
        part = os.read(told, 16 * 4096)
        for at in range(0, len(part), 16):
            kind, name = int.from_bytes(part[at : at + 4], "little"), int.from_bytes(part[at + 4 : at + 8], "little")
            seen.setdefault((kind, name), []).append(int.from_bytes(part[at + 8 : at + 16], "little"))
            left -= 1
    assert [reap(pid) for pid in producers] == [0, 0]
    for name in range(2):
        assert sorted(n for (_, of), found in seen.items() if of == name for n in found) == list(range(total // 2))
    for found in seen.values():
        assert found == sorted(found)
    there.shutdown()
    assert [reap(pid) for pid in consumers] == [0, 0, 0]
    os.close(told)
    os.close(tell)


def test_one_thread_at_a_time_takes_from_the_log() -> None:
    """Another waits for a moment, and goes on without, as it does where another process has the turn and is stopped."""
    there = Queue()
    turn, told = shared_queue_of(there).tickets.turn, list[bool]()
    there.put(1)
    assert turn is not None
    assert turn.take()
    assert turn.take()  # a signal's handler, in the same thread
    thread = threading.Thread(target=lambda: told.append(turn.take()))
    thread.start()
    thread.join(LIMIT)
    turn.leave()
    thread = threading.Thread(target=lambda: told.append(turn.take()))
    thread.start()
    thread.join(LIMIT)
    turn.leave()
    assert told == [False, True]
    there.get()


class Broken:
    """It cannot be made again."""

    def __reduce__(self) -> object:
        return int, ("x",)


@pytest.mark.parametrize("maxsize", [0, 5])
@pytest.mark.parametrize("before", [[], [0]])
def test_the_descriptor_tells_of_what_comes_again(maxsize: int, before: list[int]) -> None:
    """The descriptor is readable while messages wait that were taken beside an object that cannot be made again.

    They wait here, and not in the pipe.
    """
    there = Queue(maxsize)
    with select.epoll() as poll:
        poll.register(there.fileno(), select.EPOLLIN)
        there.put_many([*before, Broken(), 1, 2, 3])
        if before:
            assert there.get_many(64) == before
            assert poll.poll(LIMIT), "silent"
        with pytest.raises(ValueError, match="invalid literal"):
            there.get_many(64)
        got = list[object]()
        while len(got) < 3:
            assert poll.poll(LIMIT), f"silent after {got}"
            assert there.qsize() == 3 - len(got)
            got.append(there.get_nowait())
    assert got == [1, 2, 3]
    for number in range(5):
        there.put_nowait(number)
    assert there.full() == bool(maxsize)
    assert [there.get_nowait() for _ in range(5)] == [0, 1, 2, 3, 4]


def test_the_descriptor_tells_of_an_object_that_is_to_come_in_another_form() -> None:
    """After a get in the wrong form the descriptor is readable, and the next get returns the object."""
    there = Queue()
    there.put(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedLeaf):
        there.get(as_numpy=True)
    assert connection.wait([reading_end_of(there)], LIMIT) == [reading_end_of(there)]
    assert there.get_nowait().shape == (3,)


def test_a_process_that_may_write_but_small_files_is_told_and_loses_nothing() -> None:
    """Messages for which the limit leaves no room stay with the caller. The others arrive, and so do later ones."""
    there = Queue()

    def puts() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(SharedMemoryError, match="ulimit -f") as refused:
            there.put_many(list(range(MANY)))
        done = refused.value.put  # type: ignore[attr-defined]
        assert there.qsize() == done
        assert [there.get_nowait() for _ in range(1000)] == list(range(1000))  # which makes room in the pipe
        there.put(done)

    assert reap(in_child(puts)) == 0
    got = list[object]()
    all_there(there, got)
    assert len(got) > 1000
    assert got == list(range(1000, 1000 + len(got)))


class OnlyIn:
    """An object that other processes have no memory for."""

    def __init__(self, process: int) -> None:
        self.process = process

    def __setstate__(self, state: dict[str, int]) -> None:
        if os.getpid() != state["process"]:
            raise MemoryError


def test_what_one_process_took_and_keeps_does_not_pile_up_with_who_puts() -> None:
    """It was first in a list of what had been spilled, which then grew with each message."""
    there, got = Queue(), list[object]()
    there.put_many(range(MANY))
    for _ in range(MANY):
        got.append(there.get())
        if len(got) == MANY - 1:
            there.put(OnlyIn(os.getpid()))  # into the log, as the last one before it waits there
    told, tell = os.pipe()

    def keep_one() -> None:
        with contextlib.suppress(MemoryError):
            there.get(timeout=LIMIT)
        os.write(tell, b".")
        signal.pause()

    child = in_child(keep_one)
    try:
        assert os.read(told, 1) == b"."
        for number in range(1000):
            there.put(number)
            assert there.get(timeout=LIMIT) == number
        assert backlog_of(shared_queue_of(there)) < 10
    finally:
        os.kill(child, signal.SIGKILL)
        reap(child)
        os.close(told)
        os.close(tell)


@pytest.mark.slow
def test_a_burst_beyond_the_pipe_costs_next_to_nothing_once_it_was_taken() -> None:
    """A put and a get make about as many calls as before: two more, which ask whether there was one."""
    there = Queue()

    def calls() -> int:
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            there.put(1)
            there.get(timeout=LIMIT)
        finally:
            sys.setprofile(None)
        return count

    for _ in range(3):
        before = calls()
    for number in range(20_000):  # more than a pipe holds
        there.put(number)
    assert [there.get(timeout=LIMIT) for _ in range(20_000)] == list(range(20_000))
    for _ in range(100):  # the next ones look, and find that there is nothing more
        calls()
    assert calls() <= before + 5
