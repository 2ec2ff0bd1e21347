"""Queue's methods beyond put and get: many at a time, tasks, shutdown, statistics."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import multiprocessing
import os
import queue
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from children import descriptors_left, in_thread, wait_until
from crash_points import SIGNAL_CHECKS, in_child, reap, run_traced
from inside import keep_pure, open_queue_of, set_lease_budget, shared_queue_of

from tensorpipe_ipc.errors import Closed, Empty, Full, SharedMemoryError, ShutDown, UnsupportedLeaf
from tensorpipe_ipc.memory.segment import CAPACITY, LOOKS, PAGE
from tensorpipe_ipc.queues.context import get_context
from tensorpipe_ipc.queues.tensor_queue import JoinableQueue, Queue
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.open_queue import OpenQueue
from tensorpipe_ipc.shared_queue.put_end import PutEnd
from tensorpipe_ipc.shared_queue.survey import survey
from tensorpipe_ipc.shared_queue.token_pipe import TokenPipe

LIMIT = 20


def temporary(count: int, size: int) -> Iterator[Any]:
    """Objects that nobody else keeps: tensors, and what has to be pickled."""
    for i in range(count):
        yield torch.full((size,), i) if i % 2 else {i: torch.full((size,), i), "set": {i}}


def test_an_exception_of_a_handler_ends_put_many_at_once() -> None:
    """It does not wait for room for the objects that were read before."""

    class Alarm(Exception):
        pass

    def alarm(*_: Any) -> None:
        raise Alarm

    def objects() -> Iterator[int]:
        yield 1
        signal.raise_signal(signal.SIGUSR1)

    there = Queue(1)
    there.put("first")
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        with pytest.raises(Alarm):
            there.put_many(objects(), LIMIT)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (there.get(timeout=LIMIT), there.empty()) == ("first", True)


@pytest.mark.parametrize("kind", [RuntimeError, KeyError, IndexError, TypeError, OSError, MemoryError])
@pytest.mark.parametrize(
    "obj",
    [{"a": torch.zeros(3), "b": torch.zeros(4)}, [np.zeros(3), {1}], torch.zeros(2, 3).t()],
    ids=["tree", "pickle", "gaps"],
)
def test_an_exception_of_a_handler_comes_out_of_put_wherever_it_came(obj: object, kind: type[Exception]) -> None:
    """It is of a type that the code there may raise, too, and deal with: a watchdog's, say."""
    if kind is KeyError and isinstance(obj, list):
        return  # pickle itself takes it for a type that has no reducer

    class Watchdog(kind):  # type: ignore[misc, valid-type]
        pass

    def bark(*_: Any) -> None:
        raise Watchdog

    there = Queue()
    keep_pure(there)  # whose steps can be counted
    for _ in range(3):
        there.put(obj)
        there.get(timeout=LIMIT)
    before = signal.signal(signal.SIGUSR1, bark)
    swallowed, point, left = list[int](), 0, 0
    try:
        while left <= 0:
            point += 1
            with contextlib.suppress(Watchdog):
                left = run_traced(
                    lambda: there.put(obj), point, lambda: signal.raise_signal(signal.SIGUSR1), SIGNAL_CHECKS, False
                )
                swallowed += [point] * (left <= 0)
            while not there.empty():
                there.get(timeout=LIMIT)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert point > 30
    assert swallowed == []
    assert there.statistics().lost == 0


def test_an_exception_of_a_handler_comes_out_of_empty_wherever_it_came() -> None:
    """A TimeoutError, as a watchdog raises, is an OSError."""

    def bark(*_: Any) -> None:
        raise TimeoutError("too late")

    there = Queue()
    there.put_many(range(5))
    there.shutdown()
    before = signal.signal(signal.SIGUSR1, bark)
    point, left = 0, 0
    try:
        while left <= 0:
            point += 1
            with contextlib.suppress(TimeoutError):
                left = run_traced(there.empty, point, lambda: signal.raise_signal(signal.SIGUSR1), SIGNAL_CHECKS, False)
                assert left > 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert point > 10
    assert not there.empty()


def test_a_put_many_that_failed_keeps_nothing() -> None:
    """The error's traceback refers to the call's frame: that is no cycle, which only the collector would free."""
    there, tensor = Queue(), torch.ones(100_000)
    kept = weakref.ref(tensor.untyped_storage())
    gc.disable()
    try:
        with contextlib.suppress(Exception):
            there.put_many([tensor[::2], lambda: None])
        del tensor
        assert there.get().sum() == 50_000
        assert kept() is None
        assert there.statistics().leases == 0
    finally:
        gc.enable()


def number(obj: Any) -> int:
    """Return the number that fills a tensor, or the first tensor of a dict."""
    tensor = obj if isinstance(obj, torch.Tensor) else next(iter(obj.values()))
    first = int(tensor[0])
    assert tensor.tolist() == [first] * len(tensor)
    return first


@pytest.mark.parametrize("size", [10, 3000, 30_000])
@pytest.mark.parametrize("maxsize", [0, 1000])
def test_put_many_has_read_each_object_whatever_became_of_it(size: int, maxsize: int) -> None:
    """Objects from a generator, gone before the next is made, arrive whole and in order."""
    there = Queue(maxsize)
    there.put_many(temporary(150, size))
    got: list[int] = []
    while len(got) < 150:
        got += map(number, there.get_many(40))
    assert got == list(range(150))


def test_put_many_says_how_many_it_put() -> None:
    """Full has the number; these are in the queue, and the others can be put later."""
    there = Queue(10)
    with pytest.raises(queue.Full) as full:
        there.put_many(range(25), timeout=0.05)
    assert isinstance(full.value, Full)
    assert full.value.put == 10
    assert there.get_many(64) == list(range(10))
    there.put_many(range(10, 20), timeout=0)
    assert there.get_many(3) == [10, 11, 12]


def test_put_many_waits_for_room() -> None:
    """More than the queue holds pass through it while another process takes them."""
    there, back = Queue(7), Queue()

    def take() -> None:
        count = 0
        while count < 500:
            got = there.get_many(5, LIMIT)
            count += len(got)
            back.put(got)

    pid = in_child(take)
    there.put_many(range(500), timeout=LIMIT)
    got: list[int] = []
    while len(got) < 500:
        got += back.get(timeout=LIMIT)
    assert got == list(range(500))
    assert reap(pid) == 0


def test_get_many_waits_for_one_and_takes_what_is_there() -> None:
    """It returns as soon as there is one; Empty when there is none in time; what it cannot mean is refused."""
    there = Queue()
    with pytest.raises(Empty):
        there.get_many(5, timeout=0.01)
    with pytest.raises(ValueError, match="give a whole number of 1 to"):
        there.get_many(0)
    there.put_many("abc")
    assert there.get_many(2) == ["a", "b"]
    assert there.get_many(1000) == ["c"]


@pytest.mark.parametrize("joinable", [False, True])  # whose objects are taken one by one
def test_get_many_hands_each_over_as_get_would(joinable: bool) -> None:
    """Arrays in the place of tensors; narrow ones as they crossed; as leases, or in memory of their own."""
    there = (JoinableQueue if joinable else Queue)(wire_dtype=torch.float16)

    def through(**options: Any) -> list[Any]:
        there.put_many(torch.full((10,), float(i)) for i in range(4))
        got: list[Any] = []
        while len(got) < 4:
            got += there.get_many(4, LIMIT, **options)
        return got

    for found in through(as_numpy=True):
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float32
    assert {found.dtype for found in through(restore=False)} == {torch.float16}
    kept = through(restore=False, copy=False)
    assert there.statistics().leases == 4
    with pytest.raises(ValueError, match="copy='no'"):
        through(copy="no")
    kept = there.get_many(4)
    assert float(kept[0][0]) == 0


def test_what_get_many_cannot_hand_over_is_kept_for_the_next_get() -> None:
    """NumPy has no bfloat16: those before it are returned, and the next get names it. As a tensor it still comes."""
    there = Queue()
    there.put_many([torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.zeros(3)])
    (first,) = there.get_many(3, as_numpy=True)
    assert first.dtype == np.float32
    for _ in range(2):
        with pytest.raises(UnsupportedLeaf, match="bfloat16"):
            there.get_many(3, as_numpy=True)
    got: list[Any] = []
    while len(got) < 2:
        got += there.get_many(3, timeout=LIMIT)
    assert [each.dtype for each in got] == [torch.bfloat16, torch.float32]


def test_what_was_kept_for_the_next_get_is_lost_and_counted_where_no_get_comes_any_more() -> None:
    """The process that had it lives on: nobody waits for that."""
    there = JoinableQueue(1)
    lost = there.statistics().lost
    there.put(torch.ones(3, dtype=torch.bfloat16))
    (told, tell), (end, keep) = os.pipe(), os.pipe()

    def gives_up() -> None:
        with contextlib.suppress(UnsupportedLeaf):
            there.get(as_numpy=True)
        there.close()
        os.close(keep)
        os.write(tell, b"x")
        os.read(end, 1)

    pid = in_child(gives_up)
    os.read(told, 1)
    joins = threading.Thread(target=there.join)
    joins.start()
    joins.join(LIMIT)
    try:
        assert not joins.is_alive()
        assert there.statistics().lost == lost + 1
        there.put("next", timeout=LIMIT)
    finally:
        for each in (keep, told, tell, end):
            os.close(each)
        assert reap(pid) == 0
        joins.join()


def test_statistics_count_each_object_once_whatever_came_with_it() -> None:
    """A doorbell among the tickets is none; and one that was set aside counts when it is got."""
    there = Queue()
    there.put(torch.ones(3))
    shared_queue_of(there).tickets.ring_doorbell()
    there.put(torch.ones(3, dtype=torch.bfloat16))
    assert len(there.get_many(64, as_numpy=True)) == 1
    assert there.statistics().messages_got == 1
    assert there.get(timeout=LIMIT).shape == (3,)
    found = there.statistics()
    assert (found.messages_got, found.bytes_got) == (found.messages_put, found.bytes_put)


def test_what_was_only_put_aside_was_not_tried() -> None:
    """A doorbell among the tickets sends a get around once more: its objects have failed to arrive no more often for that."""
    there = Queue()
    there.put(torch.ones(3, dtype=torch.bfloat16))
    there.put("next")
    for _ in range(7):  # it is dropped with the eighth try
        shared_queue_of(there).tickets.ring_doorbell()
        with pytest.raises(UnsupportedLeaf, match="bfloat16"):
            there.get_many(3, as_numpy=True)
    assert there.get(timeout=LIMIT).dtype == torch.bfloat16
    assert there.get(timeout=LIMIT) == "next"
    assert there.statistics().undecodable == 0


def test_what_came_before_its_turn_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of the log, and is set aside: it has failed to arrive no more often for that."""
    there, count, taken = Queue(), 8_300, TokenPipe._take_behind  # more than a pipe holds
    objects = [torch.full((1,), number, dtype=torch.bfloat16) if number > 8_000 else number for number in range(count)]
    for each in objects:
        there.put(each)

    def come_early(pipe: TokenPipe, *arguments: Any) -> int:
        monkeypatch.undo()
        return -taken(pipe, *arguments)

    monkeypatch.setattr(TokenPipe, "_take_behind", come_early)
    for number, each in enumerate(objects):
        for _ in range(7 * (number > 8_000)):  # it is dropped with the eighth try
            with pytest.raises(UnsupportedLeaf, match="bfloat16"):
                there.get(as_numpy=True)
        assert there.get(timeout=LIMIT) == each
    assert TokenPipe._take_behind is taken
    assert there.statistics().undecodable == 0


@pytest.mark.parametrize("shut", [False, True])
def test_get_many_leaves_nothing_behind_that_it_took(shut: bool) -> None:
    """A doorbell among the tickets has each served by itself, but in the same call: the caller may be about to end."""
    there = Queue()
    there.put_many(range(3))
    shared_queue_of(there).tickets.ring_doorbell()
    there.put_many(range(3, 6))
    if shut:
        there.shutdown()
    assert there.get_many(10, LIMIT) == list(range(6))
    assert not shared_queue_of(there).gets.holds_back


def test_an_object_that_cannot_be_sent_is_not_sent_and_those_after_it_neither() -> None:
    """The error is the object's own, and says how many are in the queue, which goes on."""
    there = Queue()
    with pytest.raises(AttributeError) as raised:
        there.put_many([1, 2, lambda: None, 3])
    assert raised.value.put == 2  # type: ignore[attr-defined]
    there.put_many([3, 4])
    assert there.get_many(5) == [1, 2, 3, 4]


@pytest.mark.parametrize("maxsize", [0, 200])
def test_one_that_can_never_fit_is_told_apart_from_those_before_it(maxsize: int) -> None:
    """The rest may be put again from there: nothing comes twice."""
    there, huge = Queue(maxsize), torch.ones(1).expand(1 << 45)
    objects: list[Any] = [*range(100), huge, *range(100, 120)]
    with pytest.raises((SharedMemoryError, MemoryError)) as raised:
        there.put_many(objects, LIMIT)
    assert raised.value.put == 100  # type: ignore[union-attr]
    there.put_many(objects[101:])
    assert [there.get(timeout=LIMIT) for _ in range(120)] == list(range(120))


def test_a_part_of_a_batch_is_put_though_no_descriptor_is_left() -> None:
    """As many as have room in memory; the places that the others would have had come back."""
    there = Queue(60)
    shared_queue_of(there).arena.words[CAPACITY] = 64 << 20
    big = torch.ones(20 << 20, dtype=torch.uint8)
    held = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    there.put(0)
    assert there.get() == 0
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        with pytest.raises(Full) as full:
            there.put_many([big] * 5, 0)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert full.value.put == there.qsize() > 0
    for _ in range(full.value.put):
        there.get()
    for number in range(60):
        there.put_nowait(number)
    with pytest.raises(Full):
        there.put_nowait(60)


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_generator_may_fill_one_tensor_again_and_again(size: int) -> None:
    """Each object is read when it is taken out of the iterable."""
    there, buffer = Queue(), torch.empty(size)

    def frames() -> Iterator[torch.Tensor]:
        for number in range(130):
            yield buffer.fill_(number)

    there.put_many(frames())
    assert [int(there.get(timeout=LIMIT)[-1]) for _ in range(130)] == list(range(130))


class Frames(list[torch.Tensor]):
    """A list whose objects are made as they are taken, in one tensor."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[0].fill_(number) for number in range(5))


def test_a_list_of_another_kind_may_fill_one_tensor_again_and_again() -> None:
    """As a generator may: it only looks like a list."""
    there = Queue()
    there.put_many(Frames([torch.empty(100_000)]))
    assert [int(there.get(timeout=LIMIT)[-1]) for _ in range(5)] == list(range(5))


_scratch = torch.zeros(30_000)


class Lazy:
    """It is written into memory that all of its kind have, when it is pickled."""

    def __init__(self, value: int, size: int) -> None:
        self.value, self.size = value, size

    def __reduce__(self) -> Any:
        return _first, (_scratch[: self.size].fill_(self.value),)


def _first(tensor: torch.Tensor) -> float:
    return tensor[0].item()


@pytest.mark.parametrize("size", [10, 30_000])
def test_objects_that_are_pickled_through_one_buffer_keep_their_own_content(size: int) -> None:
    """Of a list, too, put_many has read each before it takes the next apart."""
    there = Queue()
    there.put_many([Lazy(i, size) for i in range(70)])
    assert [there.get() for _ in range(70)] == list(range(70))


def test_a_generator_that_fails_leaves_what_it_made_before() -> None:
    """And the error says how many those are."""
    there = Queue()

    def fails() -> Iterator[int]:
        yield from range(70)
        raise ArithmeticError

    with pytest.raises(ArithmeticError) as raised:
        there.put_many(fails())
    assert raised.value.put == there.qsize() == 70  # type: ignore[attr-defined]


def test_more_queues_than_a_process_can_batch_for_work_one_by_one() -> None:
    """put_many and get_many with 70 queues; the 65th is only slower."""
    queues = [Queue(5) for _ in range(70)]
    for there in queues:
        there.put_many([1, 2, 3], LIMIT)
    for there in queues:
        got: list[Any] = []
        while len(got) < 3:
            got += there.get_many(3, LIMIT)
        assert got == [1, 2, 3]


@pytest.mark.parametrize("call", ["put_many", "get_many"])
def test_more_threads_than_a_process_can_batch_for_work_one_by_one(call: str) -> None:
    """70 threads wait in one queue at once; the 65th is only slower."""
    there, got = Queue(1), list[int]()
    if call == "put_many":
        there.put(-1)

    def work(number: int) -> None:
        if call == "put_many":
            there.put_many([number], LIMIT)
        else:
            got.extend(there.get_many(1, LIMIT))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(70)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LIMIT
    while len(open_queue_of(shared_queue_of(there)).operations) < 70:
        assert time.monotonic() < until
        time.sleep(0.001)
    if call == "put_many":
        got += [there.get(timeout=LIMIT) for _ in range(71)][1:]
    else:
        for number in range(70):
            there.put(number, timeout=LIMIT)
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(got) == list(range(70))


def test_bells_do_not_make_a_timeout_longer() -> None:
    """A get with a timeout has one deadline, whatever wakes it."""
    there, over = Queue(), threading.Event()

    def ring_doorbell() -> None:
        while not over.wait(0.05):
            shared_queue_of(there).tickets.ring_doorbell()

    ringer = threading.Thread(target=ring_doorbell)
    ringer.start()
    for take in (lambda: there.get(timeout=0.4), lambda: there.get_many(3, 0.4)):
        began = time.monotonic()
        with pytest.raises(Empty):
            take()
        assert 0.4 <= time.monotonic() - began < LIMIT
    over.set()
    ringer.join(LIMIT)


class Scarce:
    """Can be made again when there is memory: at the third attempt."""

    attempts = 0
    lacks: Callable[[], Exception]

    def __reduce__(self) -> Any:
        return _made_if_there_is_memory, ()


def _made_if_there_is_memory() -> str:
    Scarce.attempts += 1
    if Scarce.attempts % 3:
        raise Scarce.lacks()
    return "made"


def _never_made() -> None:
    raise Scarce.lacks()


class Never:
    """Never can."""

    def __reduce__(self) -> Any:
        return _never_made, ()


_made: list[weakref.ref[torch.Tensor]] = []


def _runs_out(made: torch.Tensor) -> None:
    _made.append(weakref.ref(made))
    raise MemoryError


class Large:
    """An object that get can only remake in part, for lack of memory."""

    def __reduce__(self) -> Any:
        return _runs_out, (torch.ones(3),)


@pytest.mark.parametrize("take", [lambda there: there.get(timeout=LIMIT), lambda there: there.get_many(2, LIMIT)])
def test_what_was_made_in_vain_is_let_go_of_before_the_next_try(take: Callable[[Queue], object]) -> None:
    """It is what the next try would run out of memory for."""
    there = Queue()
    there.put(Large())
    _made.clear()
    for _ in range(3):
        with contextlib.suppress(MemoryError):
            take(there)
        assert _made[-1]() is None
    assert len(_made) == 3


@pytest.mark.parametrize(
    "lacks",
    [MemoryError, torch.cuda.OutOfMemoryError, lambda: OSError(errno.EMFILE, "descriptors"), RecursionError],
    ids=["memory", "memory of a GPU", "descriptors", "depth"],
)
def test_what_fails_for_want_of_memory_comes_again_and_what_is_broken_is_dropped_at_once(
    lacks: Callable[[], Exception],
) -> None:
    """The one that was tried often enough is dropped, too. What was dropped is counted, and others come."""
    there = Queue()
    Scarce.attempts, Scarce.lacks = 0, lacks
    error = type(lacks())
    for each in (Scarce(), Breaks(), Never(), "last"):
        there.put(each)
    for _ in range(2):
        with pytest.raises(error):
            there.get(timeout=LIMIT)
    assert there.get(timeout=LIMIT) == "made"
    with pytest.raises(ArithmeticError):
        there.get(timeout=LIMIT)
    tries = 0
    while True:
        try:
            assert there.get(timeout=LIMIT) == "last"
            break
        except error:
            tries += 1
    assert 2 <= tries <= 20
    assert there.statistics().undecodable == 2
    assert there.empty()


def _looks_at_its_caller_and_fails() -> None:
    caller = sys._getframe(1)
    raise ArithmeticError(f"called in line {caller.f_lineno}")


class LacksItsFile:
    """An object that opens a file when it is made again, or locks it, and cannot."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: Any) -> None:
        raise OSError(state["number"], "the object's own")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EAGAIN, errno.EINTR, errno.EACCES])
def test_an_error_of_the_object_itself_comes_once_and_is_one_task(number: int) -> None:
    """A worker calls task_done once for each get, whatever became of it. An OSError may be for want of descriptors, or not."""
    there = JoinableQueue()
    there.put(LacksItsFile(number))
    there.put("next")
    with pytest.raises(OSError, match="the object's own"):
        there.get(timeout=LIMIT)
    there.task_done()
    assert there.get(timeout=LIMIT) == "next"
    assert there.statistics().undecodable == 1
    there.task_done()
    there.join()


class LooksAtItsCaller:
    """An object that cannot be made again: the code that makes it knows its caller's frame, as a signal's handler does."""

    def __reduce__(self) -> Any:
        return _looks_at_its_caller_and_fails, ()


def test_code_that_looks_at_its_caller_is_no_handler() -> None:
    """Its exception says that the object cannot be made: it is dropped at once, and the next get gets the next object."""
    there = Queue()
    for each in (LooksAtItsCaller(), "next"):
        there.put(each)
    with pytest.raises(ArithmeticError, match="called in line"):
        there.get(timeout=LIMIT)
    assert there.get(timeout=LIMIT) == "next"
    assert there.statistics().undecodable == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_object_that_ends_the_program_each_time_it_is_made_is_dropped_at_last(error: BaseException) -> None:
    """As one might that is of a module which ends the program that imports it. Whoever goes on gets what comes after it."""
    there = Queue()
    there.put(Raises(error))
    there.put("last")
    tries = 0
    while True:
        try:
            assert there.get(timeout=LIMIT) == "last"
            break
        except type(error):
            tries += 1
            assert tries < 20
    assert tries > 0
    assert there.statistics().undecodable == 1
    assert there.empty()


class Raises:
    """Pickled well, and never made again."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return _raise, (self._error,)


def _raise(error: BaseException) -> None:
    raise error


def test_the_dead_hold_nothing_as_soon_as_one_looks() -> None:
    """In statistics, that is: what a killed process had under lease is nobody's."""
    there = Queue()
    there.put(torch.ones(1 << 20))
    told, tell = os.pipe()

    def hold() -> None:
        held = there.get()
        os.write(tell, b".")
        signal.pause()
        del held

    pid = in_child(hold)
    os.read(told, 1)
    assert any(f"pid {pid} " in holder.process for holder in there.statistics().holders)
    os.kill(pid, signal.SIGKILL)
    reap(pid)
    assert not any(f"pid {pid} " in holder.process for holder in there.statistics().holders)
    os.close(told)
    os.close(tell)


def test_an_object_that_cannot_be_made_again_does_not_take_others_with_it() -> None:
    """Its error is raised to who gets it, and the objects around it arrive."""
    there = Queue()
    there.put_many([1, Breaks(), 3])
    got: list[Any] = []
    errors = 0
    while 3 not in got:
        try:
            got += there.get_many(5, timeout=LIMIT)
        except ArithmeticError:
            errors += 1
    assert got == [1, 3]
    assert errors >= 1


class Breaks:
    """Pickled well, and never made again."""

    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_what_comes_at_the_second_try_lies_under_one_lease() -> None:
    """A first try that failed, and whose traceback somebody has, costs nothing of what may be under lease."""
    there, kept = Queue(), list[Exception]()
    set_lease_budget(shared_queue_of(there).leases, 147 * PAGE)  # for three such messages
    for _ in range(3):
        there.put(torch.ones(100_000, dtype=torch.bfloat16))
        try:
            there.get(as_numpy=True)
        except UnsupportedLeaf as error:
            kept.append(error)
            assert there.get(copy=False).sum() == 100_000
    kept.clear()
    there.put(torch.ones(300_000, dtype=torch.bfloat16))
    assert there.get(copy=False).sum() == 300_000


class Hoarder:
    """It keeps what it is made of, whatever becomes of it, and is made at the second try."""

    kept: list[torch.Tensor] = []

    def __setstate__(self, state: torch.Tensor) -> None:
        self.kept.append(state)
        if len(self.kept) == 1:
            raise MemoryError("once")

    def __getstate__(self) -> torch.Tensor:
        return torch.full((100_000,), 7.0)


def test_what_a_failed_try_has_kept_does_not_change() -> None:
    """The block is the lease's of both tries, and free when the tensors of both are gone."""
    there = Queue()
    there.put(Hoarder())
    with pytest.raises(MemoryError):
        there.get()
    there.get()
    del Hoarder.kept[1]
    for _ in range(3):
        there.put(torch.zeros(100_000))
        there.get()
    assert Hoarder.kept.pop().unique().tolist() == [7.0]


def test_a_wake_up_among_the_messages_is_no_failure_of_one() -> None:
    """An object that cannot be made again at its first try, short of memory say, is there for the second."""
    there = Queue()
    shared_queue_of(there).tickets.ring_doorbell()
    there.put_many([BreaksOnce(), 2])
    BreaksOnce.tries = 0
    with pytest.raises(MemoryError):
        there.get_many(5, timeout=LIMIT)
    assert [there.get(timeout=LIMIT), there.get(timeout=LIMIT)] == ["made", 2]


class BreaksOnce:
    """Pickled well, and made again at the second try."""

    tries = 0

    def __reduce__(self) -> Any:
        return BreaksOnce.make, ()

    @classmethod
    def make(cls) -> str:
        """Return a word, but run out of memory at the first try."""
        cls.tries += 1
        if cls.tries == 1:
            raise MemoryError
        return "made"


@contextlib.contextmanager
def joined_after(tasks: JoinableQueue) -> Iterator[None]:
    """Join waits, and returns once the block has done the rest of the tasks."""
    waiter = threading.Thread(target=tasks.join, daemon=True)
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive()
    yield
    waiter.join(LIMIT)
    assert not waiter.is_alive()


def work(tasks: JoinableQueue, count: int) -> None:
    """Deal with some."""
    for _ in range(count):
        tasks.get(timeout=LIMIT)
        tasks.task_done()


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.kills)])
def test_join_waits_for_other_processes(method: str) -> None:
    """It returns when each object was dealt with, wherever; then task_done is refused."""
    tasks = JoinableQueue(5)
    workers = [multiprocessing.get_context(method).Process(target=work, args=(tasks, 20)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for i in range(40):
        tasks.put(torch.full((3,), i))
    tasks.join()
    assert tasks.qsize() == 0
    with pytest.raises(ValueError, match="too many times"):
        tasks.task_done()
    for worker in workers:
        worker.join(LIMIT)
        assert worker.exitcode == 0
        worker.close()


def test_join_does_not_wait_for_what_a_killed_worker_had_taken() -> None:
    """A worker takes three, finishes one, and is killed: two went down with it. The rest is still waited for."""
    tasks = JoinableQueue()

    def die() -> None:
        work(tasks, 1)
        tasks.get()
        tasks.get()
        os.kill(os.getpid(), signal.SIGKILL)

    tasks.put_many(range(4))
    assert reap(in_child(die)) == -signal.SIGKILL
    with joined_after(tasks):
        work(tasks, 1)


def test_threads_that_do_their_own_tasks_do_not_do_those_of_others() -> None:
    """At each moment within a task_done another thread may take an object and finish it. Join does not wait for a killed worker
    even so: no more was done here than was taken."""
    queues: list[JoinableQueue] = []
    left = 0
    while left <= 0:
        tasks = JoinableQueue()
        tasks.put_many(range(3))
        tasks.get()
        queues += (tasks,)
        between = functools.partial(work, tasks, 1)
        left = run_traced(tasks.task_done, len(queues), between, SIGNAL_CHECKS, before=False)
    queues[-1].get()  # the last had no such moment
    queues[-1].task_done()

    def die() -> None:
        for each in queues:
            each.get(timeout=LIMIT)
        os.kill(os.getpid(), signal.SIGKILL)

    assert len(queues) > 5
    assert reap(in_child(die)) == -signal.SIGKILL
    waiter = threading.Thread(target=lambda: [each.join() for each in queues], daemon=True)
    waiter.start()
    waiter.join(LIMIT)
    assert not waiter.is_alive()


def test_join_waits_for_who_does_the_tasks_of_workers_that_end() -> None:
    """The program takes results from its workers, and calls task_done itself, also when these have ended."""
    tasks, results = JoinableQueue(), Queue()

    def forward() -> None:
        for _ in range(3):
            results.put(tasks.get(timeout=LIMIT))

    for _ in range(2):
        tasks.put_many(range(3))
        child = in_child(forward)
        results.get(timeout=LIMIT)
        tasks.task_done()
        assert reap(child) == 0
        with joined_after(tasks):
            for _ in range(2):
                results.get(timeout=LIMIT)
                tasks.task_done()


def test_tasks_of_workers_that_ended_long_ago_can_be_done() -> None:
    """All workers have ended, and that is known, before the program calls task_done for what they took."""
    tasks, results = JoinableQueue(), Queue()
    tasks.put_many(range(4))
    for _ in range(2):
        assert reap(in_child(lambda: results.put(tasks.get(timeout=LIMIT)))) == 0
        Queue()  # who makes one looks who has ended
    for _ in range(2):
        results.get(timeout=LIMIT)
        tasks.task_done()
    with joined_after(tasks):
        work(tasks, 2)
    with pytest.raises(ValueError, match="too many times"):
        tasks.task_done()


def test_of_many_that_wait_in_join_one_looks_for_the_dead() -> None:
    """A look costs more with each process, and all would look as one: what a killed worker had taken counts as done."""
    tasks, (told, tell), (looked, look) = JoinableQueue(), os.pipe(), os.pipe()
    tasks.put(1)
    recover = Attachment.recover_dead

    def take() -> None:
        tasks.get()
        os.write(tell, b"x")
        signal.pause()

    def wait() -> None:
        Attachment.recover_dead = lambda each, **wish: (os.write(look, b"!"), recover(each, **wish))[1]  # type: ignore[method-assign]
        tasks.join()

    worker = in_child(take)
    os.read(told, 1)
    waiting, began = [in_child(wait) for _ in range(8)], time.monotonic()
    while time.monotonic() < began + 0.8:
        time.sleep(0.01)
    os.set_blocking(looked, False)
    looks = len(os.read(looked, 1 << 16))
    os.kill(worker, signal.SIGKILL)
    reap(worker)
    assert [reap(each) for each in waiting] == [0] * 8
    assert 0 < looks <= 48, "each of the eight looks sixteen times"
    for each in (told, tell, looked, look):
        os.close(each)


@pytest.mark.parametrize("put", [Queue.put_nowait, lambda there, obj: there.put_many([obj], 0)])
def test_a_put_that_does_not_wait_finds_the_place_of_who_was_killed_in_get(put: Callable[[Queue, Any], None]) -> None:
    """The killed process had taken the object, and not given its place back: the queue is empty, and was full for ever."""
    there = Queue(maxsize=1)
    there.put(1)

    def die() -> None:
        assert shared_queue_of(there).credits is not None
        shared_queue_of(there).credits.give = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        there.get()

    assert reap(in_child(die)) == -signal.SIGKILL
    assert (there.empty(), there.full()) == (True, False)
    put(there, 2)
    assert there.get(timeout=LIMIT) == 2


def _leave_a_dead_one_unfinished() -> int:
    """Have a process die of which a child has a tensor. Return that child, which is not ours to wait for."""
    lent, (told, tell) = Queue(), os.pipe()
    lent.put(torch.zeros(30_000))

    def get_and_fork() -> None:
        tensor = lent.get(timeout=LIMIT)
        heir = os.fork()
        if not heir:
            signal.alarm(LIMIT)
            signal.pause()
        os.write(tell, heir.to_bytes(4, "little"))
        signal.pause()
        del tensor

    parent = in_child(get_and_fork)
    heir = int.from_bytes(os.read(told, 4), "little")
    os.kill(parent, signal.SIGKILL)
    reap(parent)
    os.close(told)
    os.close(tell)
    return heir


@pytest.mark.parametrize(("queues", "beside"), [(1, ""), (8, ""), (1, "one that nobody can finish")])
def test_of_many_puts_that_wait_one_looks_for_the_dead(queues: int, beside: str) -> None:
    """Of many puts that wait, for one queue or for eight, one looks for the dead, as a look costs more with each process.

    The place of a killed consumer is found all the same.
    """
    full = [Queue(maxsize=1) for _ in range(queues)]
    for there in full:
        there.put(0)
    told, tell = os.pipe()
    heir = _leave_a_dead_one_unfinished() if beside else 0

    def take_and_stop() -> None:
        assert shared_queue_of(full[0]).credits is not None
        shared_queue_of(full[0]).credits.give = lambda _: (os.write(tell, b"x"), signal.pause())  # type: ignore[assignment, method-assign]
        full[0].get()

    consumer = in_child(take_and_stop)
    os.read(told, 1)
    producers = [in_child(functools.partial(full[number % queues].put, number)) for number in range(1, 9)]
    rows, words = shared_queue_of(full[0]).rows, shared_queue_of(full[0]).words
    while len(rows.used()) < 2 + len(producers):
        time.sleep(0.01)
    before = words[LOOKS]
    time.sleep(0.4)
    looks = words[LOOKS] - before
    os.kill(consumer, signal.SIGKILL)
    reap(consumer)
    assert [there.get(timeout=LIMIT) for there in full[1:]] == [0] * (queues - 1)
    assert sorted(full[number % queues].get(timeout=LIMIT) for number in range(1, 9)) == list(range(1, 9))
    assert [reap(each) for each in producers] == [0] * len(producers)
    assert 0 < looks <= 24, "each of the eight looks eight times"
    if heir:
        os.kill(heir, signal.SIGKILL)
    os.close(told)
    os.close(tell)


def test_what_only_another_process_can_finish_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that look for the dead do not look at all memory each time in vain, with a lock that the other one wants."""
    full, looks, (told, tell) = Queue(maxsize=1), list[int](), os.pipe()
    full.put(0)

    def have_a_queue_that_a_dead_one_has_used() -> None:
        there = Queue(maxsize=1)
        there.put(0)

        def get_and_stop() -> None:
            assert shared_queue_of(there).credits is not None
            shared_queue_of(there).credits.give = lambda _: (os.write(tell, b"x"), signal.pause())  # type: ignore[assignment, method-assign]
            there.get()

        taker = in_child(get_and_stop)
        os.read(told, 1)
        os.kill(taker, signal.SIGKILL)
        reap(taker)
        os.kill(os.getpid(), signal.SIGSTOP)
        there.put(1, timeout=LIMIT)

    other = in_child(have_a_queue_that_a_dead_one_has_used)
    os.waitpid(other, os.WUNTRACED)
    arena = shared_queue_of(full).arena
    sweep = arena.sweep
    monkeypatch.setattr(arena, "sweep", lambda row, spared: looks.append(row) or sweep(row, spared))
    for _ in range(20):
        with pytest.raises(Full):
            full.put_nowait(1)
    assert 1 <= len(looks) <= 3
    os.kill(other, signal.SIGCONT)
    assert reap(other) == 0
    for end in (told, tell):
        os.close(end)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT])
def test_what_only_another_process_could_finish_is_anybodys_once_nobody_has_the_queue(end: signal.Signals) -> None:
    """Asking for statistics is enough. The other process was killed, or has dropped the queue and lives."""
    mine, (told, tell), sent = Queue(), os.pipe(), torch.zeros(50_000)

    def get_and_die(there: Queue) -> None:
        inner, taken = shared_queue_of(there), list[tuple[int, int]]()
        assert inner.credits is not None
        give, operations = inner.credits.give, open_queue_of(inner).operations

        def give_and_note(buffers: Any) -> None:
            taken.extend((each.ticket, inner.words[each.ticket]) for each in operations)
            give(buffers)

        inner.credits.give = give_and_note  # type: ignore[method-assign]
        tensor = there.get(copy=False)
        for word, ticket in taken:  # as if it had died within, when the lease was made
            inner.words[word] = ticket
        os.kill(os.getpid(), signal.SIGKILL)
        del tensor

    def have_a_queue_that_a_dead_one_has_used() -> None:
        there = Queue(maxsize=1)
        there.put(sent)
        reap(in_child(functools.partial(get_and_die, there)))
        os.kill(os.getpid(), signal.SIGSTOP)
        del there
        gc.collect()
        os.read(told, 1)

    other = in_child(have_a_queue_that_a_dead_one_has_used)
    os.waitpid(other, os.WUNTRACED)
    assert [holder.nbytes >= 200_000 for holder in mine.statistics().holders] == [True]
    os.kill(other, end)
    wait_until(lambda: not mine.statistics().holders)
    os.write(tell, b"x")
    assert reap(other) == (0 if end == signal.SIGCONT else -signal.SIGKILL)
    for each in (told, tell):
        os.close(each)


def test_many_that_died_at_once_are_finished_by_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look walks all memory: a call is not held up for as many as there were."""
    there, looks = Queue(), list[int]()
    arena = shared_queue_of(there).arena

    def hold_one() -> None:
        tensor = torch.zeros(20_000)
        there.put(tensor)
        kept.append(there.get(copy=False))
        os.write(tell, b"x")
        signal.pause()

    kept, (told, tell) = list[Any](), os.pipe()
    children = [in_child(hold_one) for _ in range(5)]
    for _ in children:
        os.read(told, 1)
    for each in children:
        os.kill(each, signal.SIGKILL)
        reap(each)
    walk = arena.walk
    monkeypatch.setattr(arena, "walk", lambda hazard: looks.append(hazard) or walk(hazard))
    assert not there.statistics().holders
    assert len(looks) == 1
    for end in (told, tell):
        os.close(end)


def test_what_a_dead_process_held_is_freed_though_only_another_can_finish_what_it_put() -> None:
    """A child of it read that when somebody looked first. That look is not the last."""
    mine, (told, tell) = Queue(), os.pipe()
    mine.put(torch.zeros(50_000))

    def have_a_queue_that_a_dead_one_has_used() -> None:
        there = Queue(maxsize=1)

        def hold_and_fork_and_die() -> None:
            tensor = mine.get(copy=False)
            os.write(tell, in_child(signal.pause).to_bytes(4, "little"))
            shared_queue_of(there).puts._send = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            there.put(0)
            del tensor

        reap(in_child(hold_and_fork_and_die))
        os.kill(os.getpid(), signal.SIGSTOP)

    other = in_child(have_a_queue_that_a_dead_one_has_used)
    os.waitpid(other, os.WUNTRACED)
    heir = int.from_bytes(os.read(told, 4), "little")

    def held() -> int:
        return sum(holder.nbytes for holder in mine.statistics().holders)

    assert held() >= 200_000
    os.kill(heir, signal.SIGKILL)
    wait_until(lambda: held() < 200_000)
    os.kill(other, signal.SIGKILL)
    assert reap(other) == -signal.SIGKILL
    wait_until(lambda: not mine.statistics().holders)
    for end in (told, tell):
        os.close(end)


def test_what_one_of_two_that_died_at_once_held_is_freed_though_the_others_put_is_in_doubt() -> None:
    """It is what the other one was just putting. A look that cannot judge that finds both."""
    mine, sent = Queue(), torch.zeros(50_000)
    send = PutEnd._send

    def send_and_die(self: PutEnd, operation: Any, word: int, generation: int) -> None:
        ticket = self.words[operation.ticket]
        send(self, operation, word, generation)
        self.words[operation.ticket] = ticket  # as before P8
        os.kill(os.getpid(), signal.SIGKILL)

    def have_a_queue_that_two_dead_ones_have_used() -> None:
        there = Queue(maxsize=2)

        def put_and_die() -> None:
            PutEnd._send = send_and_die  # type: ignore[method-assign]
            there.put(sent)

        def hold_and_die() -> None:
            shared_queue_of(there).attachment.attach()  # while the other one lives, or it would see to it
            os.write(tell, b"x")
            tensor = there.get(timeout=LIMIT, copy=False)
            os.kill(os.getpid(), signal.SIGKILL)
            del tensor

        told, tell = os.pipe()
        holder = in_child(hold_and_die)
        os.read(told, 1)
        for each in (in_child(put_and_die), holder):
            assert reap(each) == -signal.SIGKILL
        os.kill(os.getpid(), signal.SIGSTOP)
        assert not there.statistics().holders

    other = in_child(have_a_queue_that_two_dead_ones_have_used)
    os.waitpid(other, os.WUNTRACED)
    mine.statistics()
    os.kill(other, signal.SIGCONT)
    assert reap(other) == 0


def test_a_dead_ones_place_is_found_beside_puts_that_wait_for_another_queue() -> None:
    """Threads that wait for a queue look for the dead, but cannot finish what was begun in a queue that they do not have."""
    full = Queue(maxsize=1)
    full.put(0)

    def wait_in_threads() -> None:
        for _ in range(32):
            threading.Thread(target=full.put, args=(1,), daemon=True).start()
        signal.pause()

    others = in_child(wait_in_threads)
    there = Queue(maxsize=1)

    def die() -> None:
        PutEnd._fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
        there.put(1)

    try:
        assert reap(in_child(die)) == -signal.SIGKILL
        in_thread(lambda: there.put(2))(LIMIT)
        assert there.get(timeout=LIMIT) == 2
    finally:
        os.kill(others, signal.SIGKILL)
        reap(others)


def test_a_dead_ones_place_is_found_beside_puts_that_cannot_look() -> None:
    """A look takes a descriptor. A process that has none left judges nothing, and is not to keep others from looking."""
    there, other = Queue(maxsize=1), Queue()
    told, tell = os.pipe()
    ready, set_off = os.pipe()

    def try_in_vain() -> None:
        other.put(0)
        other.get()  # it has a row
        os.write(tell, b"x")
        os.read(ready, 1)
        with descriptors_left(0):
            while True:
                with contextlib.suppress(Full):
                    there.put(1, timeout=0.02)

    def die() -> None:
        PutEnd._fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
        there.put(2)

    starved = in_child(try_in_vain)
    try:
        os.read(told, 1)
        assert reap(in_child(die)) == -signal.SIGKILL
        os.write(set_off, b"x")
        putting = in_thread(lambda: there.put(3))
        wait_until(lambda: not there.empty())
    finally:
        os.kill(starved, signal.SIGKILL)
        reap(starved)
    while there.get(timeout=LIMIT) != 3:
        pass
    putting()
    for end in (told, tell, ready, set_off):
        os.close(end)


@pytest.mark.parametrize("maxsize", [0, 3])
def test_shutdown_lets_what_waits_be_taken_and_nothing_be_put(maxsize: int) -> None:
    """As queue.Queue of Python 3.13; ShutDown is its error, too, where there is one."""
    there = Queue(maxsize)
    there.put(1)
    there.shutdown()
    with pytest.raises(getattr(queue, "ShutDown", ShutDown)):
        there.put(2)
    with pytest.raises(ShutDown):
        there.put_many([2])
    assert there.get() == 1
    for take in (there.get, there.get_nowait, lambda: there.get_many(3), lambda: there.get(timeout=5)):
        with pytest.raises(ShutDown):
            take()
    assert there.empty()


def test_an_immediate_shutdown_drops_what_waits() -> None:
    """Gets are refused at once, and tasks that were dropped need no task_done."""
    tasks = JoinableQueue()
    tasks.put_many(range(5))
    tasks.shutdown(immediate=True)
    with pytest.raises(ShutDown):
        tasks.get()
    tasks.join()


@pytest.mark.parametrize("end", ["put", "get", "get in time", "put in time"])
def test_shutdown_wakes_who_waits_in_other_processes(end: str) -> None:
    """All of them, whatever they wait for."""
    there = Queue(1)
    told, tell = os.pipe()
    if end.startswith("put"):
        there.put(0)

    def wait() -> None:
        os.write(tell, b".")
        timeout = LIMIT if end.endswith("time") else None
        with pytest.raises(ShutDown):
            there.put(1, timeout=timeout) if end.startswith("put") else there.get(timeout=timeout)

    children = [in_child(wait) for _ in range(3)]
    for _ in children:
        os.read(told, 1)
    there.shutdown()
    assert [reap(pid) for pid in children] == [0, 0, 0]
    os.close(told)
    os.close(tell)


def test_statistics_say_what_was_done_and_who_holds_what() -> None:
    """Counts are this process's, exact; holders have a pid."""
    there = Queue(3)
    for _ in range(3):
        there.put(torch.zeros(100_000, dtype=torch.uint8))
    with pytest.raises(Full):
        there.put(torch.zeros(1), timeout=0.01)
    lease = there.get()
    statistics = there.statistics()
    assert (statistics.messages_put, statistics.bytes_put) == (3, 300_000)
    assert (statistics.messages_got, statistics.bytes_got) == (1, 100_000)
    assert (statistics.in_flight, statistics.leases, statistics.bytes_leased) == (2, 1, 100_000)
    assert statistics.waits == 1
    assert statistics.seconds_waited > 0
    (holder,) = statistics.holders
    assert str(os.getpid()) in holder.process
    assert (holder.blocks, holder.nbytes) == (3, 300_000)
    assert 300_000 < statistics.resident < statistics.capacity
    assert statistics.lost == 0
    del lease
    assert there.statistics().leases == 0


def test_what_an_ended_process_has_put_is_not_told_of_the_next_to_come() -> None:
    """That takes its place in the shared memory. Nothing tells the pid of the one before any more."""
    ctx = get_context("fork")
    there, other, full, told = ctx.Queue(), ctx.Queue(), ctx.Queue(1), ctx.Queue()
    tensor = torch.zeros(100_000, dtype=torch.uint8)

    def put() -> None:
        for _ in range(5):
            there.put(tensor)

    def come() -> None:
        told.put("here")
        other.get(timeout=LIMIT)

    assert reap(in_child(put)) == 0
    full.put(0)
    child = in_child(come)
    assert told.get(timeout=LIMIT) == "here"
    holders = {holder.process: (holder.blocks, holder.nbytes) for holder in there.statistics().holders}
    assert holders["a process that has ended"] == (5, 500_000)
    assert not any(f"pid {child} " in each for each in holders)
    with pytest.raises(Full, match="a process that has ended has 5 blocks with 500000 bytes") as raised:
        full.put(1, timeout=0.01)
    assert f"pid {child} " not in str(raised.value)
    parts = [part for view in survey([os.getpid()]) for part in view.parts]
    assert {part.queued for part in parts if part.pid == child} == {0}
    assert sum(part.queued for part in parts if str(part) == "a process that has ended") == 5
    other.put("end")
    assert reap(child) == 0


def test_counts_are_exact_with_threads() -> None:
    """Each of four threads puts and gets a hundred."""
    there = Queue()

    def both() -> None:
        for i in range(100):
            there.put(i)
            there.get()

    threads = [threading.Thread(target=both) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statistics = there.statistics()
    assert (statistics.messages_put, statistics.messages_got) == (400, 400)


def test_tasks_are_done_and_waited_for_after_close_as_with_multiprocessing() -> None:
    """Only put and get need the queue open."""
    there = JoinableQueue()
    there.put(1)
    there.get()
    there.close()
    there.task_done()
    there.join()
    with pytest.raises(ValueError, match="too many times"):
        there.task_done()


def test_spin_is_bounded_and_delivers() -> None:
    """With a spin everything arrives as without; a spin of more than a millisecond is refused."""
    with pytest.raises(ValueError, match="0.001"):
        Queue(spin=1)
    there = Queue(spin=50e-6)
    there.put_many(range(100))
    assert [there.get() for _ in range(100)] == list(range(100))
    with pytest.raises(Empty):
        there.get(timeout=0.01)


@pytest.mark.parametrize("call", ["put_many", "get_many", "shutdown"])
def test_a_closed_queue_refuses(call: str) -> None:
    """Each method says that it is closed."""
    there = JoinableQueue()
    there.close()
    arguments: dict[str, Any] = {"put_many": ([1],), "get_many": (1,)}
    with pytest.raises(Closed, match="is closed"):
        getattr(there, call)(*arguments.get(call, ()))


class Broken:
    """It cannot be made again."""

    def __reduce__(self) -> Any:
        return int, ("x",)


class Slow:
    """Making it again takes until it is let go on."""

    reached, go_on = threading.Event(), threading.Event()

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return self._made, (self.number,)

    @classmethod
    def _made(cls, number: int) -> int:
        cls.reached.set()
        assert cls.go_on.wait(LIMIT)
        return number


class Slower(Slow):
    """Another one."""

    reached, go_on = threading.Event(), threading.Event()


def test_a_batch_that_was_put_aside_is_served_by_threads_while_others_take_more() -> None:
    """Messages that one thread takes do not overwrite a message of the batch that another thread still serves."""
    for each in (Slow, Slower):
        each.reached.clear()
        each.go_on.clear()
    there, slow, batch = Queue(20), list[Any](), list[Any]()
    there.put_many([Broken(), Slow(1), 2])
    with pytest.raises(ValueError, match="invalid literal"):
        there.get_many(3)
    first = threading.Thread(target=lambda: slow.append(there.get()))
    first.start()
    assert Slow.reached.wait(LIMIT)
    assert there.get() == 2
    there.put_many([Slower(10), 11, 12])
    second = threading.Thread(target=lambda: batch.extend(there.get_many(3)))
    second.start()
    assert Slower.reached.wait(LIMIT)
    Slow.go_on.set()
    first.join()
    there.put_many(range(20, 37))  # where 11 would lie, had it been let go
    Slower.go_on.set()
    second.join()
    assert (slow, batch) == ([1], [10, 11, 12])
    assert [there.get() for _ in range(17)] == list(range(20, 37))


def test_an_exception_that_another_thread_handles_says_nothing_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that comes again does so, whichever thread sees to it, and whatever that one is about."""
    there, reached, go_on = Queue(), threading.Event(), threading.Event()
    take_up = OpenQueue.take_up

    def late(self: OpenQueue) -> None:
        if threading.current_thread() is other:
            reached.set()
            assert go_on.wait(LIMIT)
        take_up(self)

    def asks_for_numpy() -> None:
        with contextlib.suppress(UnsupportedLeaf):
            there.get(as_numpy=True)

    there.put(torch.zeros(3, dtype=torch.bfloat16))
    other = threading.Thread(target=asks_for_numpy)
    monkeypatch.setattr(OpenQueue, "take_up", late)
    other.start()
    assert reached.wait(LIMIT)
    try:
        raise LookupError("of the user's own")
    except LookupError:
        assert there.get(timeout=LIMIT).shape == (3,)
    finally:
        go_on.set()
        other.join()
    assert there.statistics().undecodable == 0


def test_what_a_signals_handler_raises_out_of_put_many_says_no_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some may be in the queue that are not counted: whoever put them again by that number would put them twice."""

    class TimerFd(Exception):
        pass

    there, writev = Queue(), os.writev

    def interrupted(*args: Any) -> None:
        writev(*args)
        raise TimerFd

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", interrupted)
        with pytest.raises(TimerFd) as raised:
            there.put_many(list(range(10)))
    assert there.get_many(64) == list(range(10))
    assert getattr(raised.value, "put", None) is None
