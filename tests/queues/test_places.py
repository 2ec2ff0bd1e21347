"""The places of a queue with maxsize: each comes back when its object was taken, whatever becomes of the get that took it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from queue import Full
from typing import Any
from unittest import mock

import pytest
import torch
from arenas import small_context
from children import in_thread
from containers import ALONE_WITHOUT_PIPES, run_there
from crash_points import in_child, reap

from tensorpipe_ipc.errors import SharedMemoryError, ShutDown
from tensorpipe_ipc.queues.tensor_queue import JoinableQueue, Queue
from tensorpipe_ipc.shared_queue.recovery import Recovery
from tensorpipe_ipc.shared_queue.token_pipe import TokenPipe

LIMIT = 20  # seconds


class Makes:
    """An object that calls a function where it is got."""

    function: Callable[[], object] = staticmethod(lambda: None)

    def __getstate__(self) -> str:
        return "any"

    def __setstate__(self, state: str) -> None:
        Makes.function()


@pytest.fixture(autouse=True)
def makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Makes, "function", staticmethod(lambda: None))


def have_no_memory() -> None:
    """Raise as where there is none."""
    raise MemoryError


WAYS = pytest.mark.parametrize("many", [False, True], ids=["get", "get_many"])


def take(there: Queue, many: bool) -> object:
    """Get an object, by get_many where ``many``."""
    return there.get_many(9, LIMIT)[0] if many else there.get(timeout=LIMIT)


@WAYS
@pytest.mark.parametrize("maxsize", [1, 3])
def test_who_could_not_make_what_it_took_keeps_no_place(
    maxsize: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives on, and does something else, though the message comes again with its next get."""
    there = Queue(maxsize)
    for _ in range(maxsize):
        there.put(Makes(), timeout=LIMIT)
    with monkeypatch.context() as patch:
        patch.setattr(Makes, "function", staticmethod(have_no_memory))
        with pytest.raises(MemoryError):
            take(there, many)
    free = maxsize if many else 1
    for number in range(free):
        there.put(number, timeout=LIMIT)
    got = [there.get(timeout=LIMIT) for _ in range(maxsize + free)]
    assert [type(each) for each in got] == [Makes] * maxsize + [int] * free


@WAYS
def test_an_object_may_put_into_its_queue_while_it_is_made(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free by then, as in multiprocessing."""
    there = Queue(1)
    there.put(Makes())
    monkeypatch.setattr(Makes, "function", staticmethod(lambda: there.put("put meanwhile", timeout=LIMIT)))
    assert type(take(there, many)) is Makes
    assert there.get(timeout=LIMIT) == "put meanwhile"


@pytest.mark.parametrize("ends", ["killed", "stopped"])
def test_who_is_killed_while_it_closes_keeps_no_place(ends: str) -> None:
    """It had a message set aside. Another queue of the same memory has its block by then."""
    there, other = Queue(1), Queue()
    other.put(Makes())
    other.get(timeout=LIMIT)
    there.put(Makes())

    def close() -> None:
        Makes.function = staticmethod(have_no_memory)  # type: ignore[assignment]
        with contextlib.suppress(MemoryError):
            there.get(timeout=LIMIT)
        end_get = Recovery.end_get

        def strike(*args: Any, **options: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL if ends == "killed" else signal.SIGSTOP)
            end_get(*args, **options)

        Recovery.end_get = strike  # type: ignore[method-assign,assignment]
        there.close()

    closing = in_child(close)
    os.waitid(os.P_PID, closing, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    for _ in range(50):
        other.put(Makes())
    if ends == "stopped":
        os.kill(closing, signal.SIGCONT)
    assert reap(closing) == (-signal.SIGKILL if ends == "killed" else 0)
    for number in range(3):
        there.put(number, timeout=LIMIT)
        assert there.get(timeout=LIMIT) == number
    assert [type(other.get(timeout=LIMIT)) for _ in range(50)] == [Makes] * 50


class Faulty:
    """An object that cannot be made again."""

    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise ValueError("faulty")


def all_descriptors() -> list[int]:
    """Take all descriptors that this process may have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, most))
    used = list[int]()
    with contextlib.suppress(OSError):
        while True:  # numbers are what is limited, so there must be no gap
            used.append(os.dup(0))
    return used


@pytest.mark.parametrize("maxsize", [0, 9])
def test_what_came_behind_a_faulty_object_keeps_its_turn_though_no_descriptor_is_left(maxsize: int) -> None:
    """The place of the faulty one cannot be given back now: that is no matter for the others."""

    def act() -> None:
        there = Queue(maxsize)
        there.put(0)
        assert there.get_many(1) == [0]
        for each in (Faulty(), 1, 2, 3):
            there.put(each)
        used = all_descriptors()
        with pytest.raises(ValueError, match="faulty"):
            there.get_many(9)
        there.put(4)
        assert [there.get(timeout=LIMIT) for _ in range(4)] == [1, 2, 3, 4]
        assert there.statistics().undecodable == 1
        for descriptor in used:
            os.close(descriptor)

    assert reap(in_child(act)) == 0


def test_places_of_what_came_before_its_turn_come_back_where_a_users_budget_of_pipes_is_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No place of a message that was set aside because it came early was given back: nothing need be judged."""
    count, taken = 9_000, TokenPipe._take_behind  # more than a pipe holds

    def come_early(pipe: TokenPipe, *arguments: Any) -> int:
        monkeypatch.undo()
        return -taken(pipe, *arguments)

    def act() -> None:
        monkeypatch.setattr(TokenPipe, "_take_behind", come_early)
        got = list[int]()
        while len(got) < count:
            got += there.get_many(64, LIMIT)
        assert got == list(range(count))
        assert TokenPipe._take_behind is taken

    there = Queue(2 * count)
    for number in range(count):
        there.put(number)
    assert run_there(ALONE_WITHOUT_PIPES, act) == 0


def test_a_put_that_is_refused_keeps_no_place_though_no_descriptor_is_left() -> None:
    """It had one, and knows that."""
    large = torch.zeros(16 << 20)  # here: torch's threads are not in a child

    def act() -> None:
        there = small_context(capacity=16 << 20).Queue(2)
        there.put(0)
        there.get(timeout=LIMIT)
        all_descriptors()
        for _ in range(2):
            with pytest.raises(SharedMemoryError, match="can never fit"):
                there.put(large)
        for number in range(2):
            there.put(number, timeout=LIMIT)
        assert [there.get(timeout=LIMIT) for _ in range(2)] == [0, 1]

    assert reap(in_child(act)) == 0


@pytest.mark.parametrize("ends", ["shutdown", "close"])
def test_what_came_before_its_turn_is_dropped_where_a_users_budget_of_pipes_is_used_up(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place comes back, and join does not wait for it."""
    count, taken = 9_000, TokenPipe._take_behind  # more than a pipe holds
    there = JoinableQueue(count + 1)
    for number in range(count):
        there.put(number)

    def come_early(pipe: TokenPipe, *arguments: Any) -> int:
        monkeypatch.undo()
        came = taken(pipe, *arguments)
        there.put("another's")
        return -came

    def act() -> None:
        monkeypatch.setattr(TokenPipe, "_take_behind", come_early)
        got = 0
        while TokenPipe._take_behind is not taken:
            there.get(timeout=LIMIT)
            there.task_done()
            got += 1
        if ends == "close":
            there.close()
            assert there.statistics().lost == 1
            return
        there.shutdown(immediate=True)
        with pytest.raises(ShutDown):
            there.get(timeout=LIMIT)
        there.join()

    assert run_there(ALONE_WITHOUT_PIPES, act) == 0
    if ends == "close":
        assert there.qsize() + fill(there) == count + 1


def fill(there: Queue) -> int:
    """Put until there is no room. Return how often."""
    count = 0
    with contextlib.suppress(Full):
        while True:
            there.put(count, timeout=0)
            count += 1
    return count


@pytest.mark.parametrize("then", ["nothing", "a shutdown and a put"])
def test_join_does_not_wait_for_the_task_of_a_put_that_was_cut_short_while_no_descriptor_was_left(then: str) -> None:
    """It could not be judged then whether its message had been put; once there are descriptors, it is."""

    def act() -> None:
        there = JoinableQueue()
        there.put(0)
        there.get()
        there.task_done()
        used = all_descriptors()
        with mock.patch("os.writev", side_effect=InterruptedError), pytest.raises(InterruptedError):
            there.put(1)
        for descriptor in used:
            os.close(descriptor)
        if then != "nothing":
            there.shutdown()
            with pytest.raises(ShutDown):
                there.put(2)
        in_thread(there.join)()

    assert reap(in_child(act)) == 0
