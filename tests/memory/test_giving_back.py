"""Memory goes to who needs it, whatever it was used for and whoever had it; and it is given back when nobody does."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import os
import queue
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from arenas import blocks_in_use, drained, small_context
from children import in_thread, wait_until
from crash_points import SIGNAL_CHECKS, die, in_child, reap, run_traced
from inside import (
    be_at_block,
    before_each_look_at_a_spilled_message,
    before_each_try_of_a_block,
    first_unit_of,
    keep_pure,
    leave_addresses,
    look_for_idle,
    make_look_due,
    open_queue_of,
    set_lease_budget,
    shared_queue_of,
    side_of,
    standby_attachment_of,
    take_all_extents,
)
from programs import InFork, ran_in_fork
from wholeness import strides

import tensorpipe_ipc as tp
import tensorpipe_ipc.memory.arena
from tensorpipe_ipc.errors import Empty, Full, OutOfMemory, SharedMemoryError
from tensorpipe_ipc.headroom import headroom
from tensorpipe_ipc.memory import barrier, leases
from tensorpipe_ipc.memory.arena import GENERATION_AT, Arena, size_class_of
from tensorpipe_ipc.memory.segment import GROWN, PAGE_LOCKED, Segment, segment_at
from tensorpipe_ipc.queues import call_queue
from tensorpipe_ipc.shared_queue.open_queue import OpenQueue
from tensorpipe_ipc.shared_queue.survey import survey

MIB = 1 << 20
PART = MIB >> 2
LIMIT = 20  # seconds


@pytest.fixture
def ctx() -> Iterator[Any]:
    yield from context_of(32 * PART)


@pytest.fixture
def medium_ctx() -> Iterator[Any]:
    yield from context_of(16 * MIB)


@pytest.fixture
def large_ctx() -> Iterator[Any]:
    yield from context_of(32 * MIB)


def context_of(capacity: int) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = small_context(capacity=capacity)
    yield made
    vars(made).clear()
    torch.set_num_threads(threads)


def resident(there: Any) -> Any:
    return there.statistics().resident


def octets(nbytes: int, value: int = 1) -> Any:
    return torch.full((nbytes,), value % 251, dtype=torch.uint8)


def peak_memory(*, start: bool = False) -> Any:
    """Return the most bytes that this process has had in memory since the last start."""
    if start:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
            peak.write("5")
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def worth(memory: Any, nbytes: int) -> Any:
    """Return about how many messages of a size take so much memory."""
    return max(1, memory // (1 << size_class_of(nbytes + 100) if nbytes < 4096 else nbytes + 5000))


def burst(there: Any, nbytes: int, count: int) -> None:
    for _ in range(count):
        there.put(octets(nbytes), timeout=LIMIT / 2)
    for _ in range(count):
        there.get(copy=True)


def wait_for(what: Any) -> None:
    until = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


class Helper:
    """A forked process that does something, says so, and then stays alive, idle."""

    def __init__(self, action: Callable[[], Any], *, goes_on: bool = False) -> None:
        self._told, tell = os.pipe()
        self.pid = in_child(lambda: self._run(action, tell, goes_on))
        os.close(tell)

    def _run(self, action: Callable[[], Any], tell: Any, goes_on: Any) -> None:
        if goes_on:
            os.write(tell, b".")
            action()
        else:
            kept = action()
            os.write(tell, b".")
            signal.pause()
            del kept

    def __enter__(self) -> Any:
        if os.read(self._told, 1) != b".":
            self.__exit__()
            pytest.fail("the helper failed")
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._told)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.mark.parametrize("nbytes", [400, 3000, 20_000, 300_000])
def test_after_a_burst_of_small_messages_there_is_room_for_large_ones(ctx: Any, nbytes: int) -> None:
    there = ctx.Queue()
    burst(there, nbytes, worth(20 * PART, nbytes))
    for number in range(2):
        there.put(octets(12 * PART, number), timeout=0)
    assert [int(there.get(copy=True)[-1]) for _ in range(2)] == [0, 1]
    burst(there, nbytes, worth(20 * PART, nbytes))
    assert resident(there) <= 33 * PART


@pytest.mark.parametrize("state", ["idle", "stopped", "dead"])
@pytest.mark.parametrize("nbytes", [400, 100_000, 24 * PART])
def test_what_lies_free_with_another_process_is_found(ctx: Any, nbytes: int, state: Any) -> None:
    """Also with one that is alive, and will never use it; or is stopped, and cannot say so."""
    there, other = ctx.Queue(), ctx.Queue()
    there.put(0)  # so that no large one is let in as the first
    with Helper(lambda: burst(other, nbytes, worth(24 * PART, nbytes))) as helper:
        assert resident(there) > 20 * PART
        if state == "stopped":
            os.kill(helper.pid, signal.SIGSTOP)
        elif state == "dead":
            os.kill(helper.pid, signal.SIGKILL)
        for number in range(2):
            there.put(octets(13 * PART, number), timeout=0 if number else 1)
        assert there.get() == 0
        assert [int(there.get(copy=True)[-1]) for _ in range(2)] == [0, 1]
        assert resident(there) <= 33 * PART


def test_what_lies_free_beside_messages_with_another_process_is_found(ctx: Any) -> None:
    """Each free block is of the size that is wanted. No page is free, as on each a message waits."""
    waiting, taken, mine = ctx.Queue(), ctx.Queue(), ctx.Queue()
    mine.put(0)  # so that nothing is let in as the first

    def leave_every_other() -> None:
        with contextlib.suppress(Full):
            while True:
                waiting.put(octets(1500), timeout=0)
                taken.put(octets(1500), timeout=0)
        drained(taken)

    with Helper(leave_every_other):
        for number in range(waiting.qsize() - 64):
            mine.put(octets(1500, number % 251), timeout=1 if not number else 0)
        assert mine.get() == 0
        assert [int(each[-1]) for each in drained(mine)] == [number % 251 for number in range(waiting.qsize() - 64)]
        assert resident(mine) <= 33 * PART


def test_the_text_of_what_was_moved_lies_on_memory_that_is_told(ctx: Any) -> None:
    """It lies behind the tensors. Where it was not told, others believed that less could be given back than was wanted."""
    there, mine = ctx.Queue(), ctx.Queue()
    mine.put(0)

    def move_and_take() -> None:
        for _ in range(7):
            sent = ctx.empty((int(2.1 * PART),), torch.uint8).fill_(1)
            there.put({"x": sent, "text": "x" * int(1.8 * PART)}, move=True, timeout=1)
            assert not sent.numel()
            del sent
        assert {len(each["text"]) for each in drained(there)} == {int(1.8 * PART)}

    with Helper(move_and_take):
        mine.put(octets(27 * PART), timeout=0)
        assert mine.get() == 0
        assert len(mine.get(copy=True)) == 27 * PART
        assert resident(mine) <= 33 * PART


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [100, 3000, 100_000, 4 * PART])
def test_a_queue_that_is_read_does_not_have_the_memory_of_an_unread_one_grow(ctx: Any, nbytes: int) -> None:
    """A message may always be placed in a queue that has none. Its memory does not go to the other queue again and again."""
    read, unread, full = ctx.Queue(), ctx.Queue(), 0
    for number in range(2 * 32 * PART // max(256, nbytes)):
        read.put(octets(nbytes, number % 251), timeout=LIMIT)
        assert int(read.get(copy=True)[-1]) == number % 251
        try:
            unread.put(octets(nbytes), timeout=0)
        except Full:
            full += 1
            if full > 3:
                break
    assert full > 3
    assert resident(unread) <= 33 * PART + nbytes


@pytest.mark.parametrize("where", ["before it fills new memory", "as it takes a block", "as it gives back"])
def test_who_is_stopped_does_not_keep_what_lies_with_others(
    large_ctx: Any, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of this is his, or may be: then other memory is found that is enough."""
    many, one, mine = (large_ctx.Queue() for _ in range(3))
    told, tell = os.pipe()

    def have() -> None:
        for _ in range(60):
            many.put(octets(300_000))
        os.write(tell, b".")
        signal.pause()

    def stop(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def stops() -> None:
        arena = large_ctx.tensorpipe_attachment().arena
        if where == "before it fills new memory":
            monkeypatch.setattr(Segment, "reserve", stop)
        one.put(octets(12 * MIB))
        os.read(told, 1)
        if where == "as it takes a block":
            ((start, *_),) = (each for each in arena.all_extents() if each[2] >= 12)
            be_at_block(arena, start)
            stop()
        monkeypatch.setattr(Segment, "punch", stop)
        one.trim()

    pids = [in_child(have)]
    try:
        os.read(told, 1)
        held = [many.get(copy=number % 3 > 0) for number in range(60)]
        mine.put(octets(1))
        pids.append(in_child(stops))
        if where != "before it fills new memory":
            one.get(timeout=LIMIT, copy=True)
            os.write(tell, b".")
        assert os.WIFSTOPPED(os.waitpid(pids[-1], os.WUNTRACED)[1])
        mine.put(octets(10 * MIB), timeout=2)
        assert resident(mine) <= 32 * MIB
        assert all((each == 1).all() for each in held)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            reap(pid)
        os.close(told)
        os.close(tell)


def test_what_was_asked_for_and_never_filled_is_found(large_ctx: Any) -> None:
    there = large_ctx.Queue()
    there.put(0)

    def action() -> None:
        large_ctx.empty((24 * MIB,), torch.uint8)

    with Helper(action):
        there.put(octets(20 * MIB), timeout=1)


def test_a_queue_whose_record_lay_where_a_killed_process_took_memory_is_destroyed(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what waits in it, when nobody has it any more."""
    there = ctx.Queue()
    there.put(octets(20 * PART))
    arena = ctx.tensorpipe_attachment().arena

    def take_all() -> None:
        ctx.tensorpipe_attachment().attach()
        monkeypatch.setattr(barrier, "quick", die)
        take_all_extents(arena)

    assert reap(in_child(take_all)) == -signal.SIGKILL
    del there
    gc.collect()
    ctx.tensorpipe_attachment().recover_dead()
    ctx.tensorpipe_attachment().destroy_left_queues()
    assert not arena.is_in_use()
    other = ctx.Queue()
    other.put(0)
    for _ in range(2):
        other.put(octets(13 * PART), timeout=1)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [300, 5000, 20_000])
@pytest.mark.parametrize("mine", [True, False])
def test_a_few_small_messages_do_not_keep_the_memory_of_many(ctx: Any, nbytes: int, mine: Any) -> None:
    """A few waiting messages, which lie anywhere between the taken ones, keep little memory."""
    waiting, taken = ctx.Queue(), ctx.Queue()
    every = worth(MIB, nbytes)

    def action() -> None:
        count = 0
        with contextlib.suppress(Full):
            while True:
                (taken if count % every else waiting).put(octets(nbytes, count // every), timeout=0)
                count += 1
        for _ in range(taken.qsize()):
            taken.get(copy=True)

    with Helper(action) if not mine else contextlib.nullcontext(action()):
        left = waiting.qsize()
        assert left > 4
        waiting.put(octets(20 * PART, 100), timeout=1)
        got = [waiting.get(copy=True) for _ in range(left + 1)]
        assert [(int(x[0]), int(x[-1])) for x in got] == [(n, n) for n in [*range(left), 100]]
        burst(taken, nbytes, 3 * every)
        assert resident(taken) <= 33 * PART


class Interrupted(Exception):
    """As a signal's handler raises it."""


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("function", ["_start", "_has_pages", "_allocate", "allocate"])
def test_an_exception_when_memory_was_taken_gives_it_back(ctx: Any, function: Any, many: Any) -> None:
    there = ctx.Queue()

    def tracer(frame: Any, event: Any, _: Any) -> Any:
        if event == "return":
            raise Interrupted
        return tracer

    sys.settrace(lambda frame, *_: tracer if frame.f_code.co_name == function else None)
    try:
        with pytest.raises(Interrupted):
            there.put_many([octets(20_000)] * 3) if many else there.put(octets(20_000))
    finally:
        sys.settrace(None)
    assert blocks_in_use(ctx) == {}
    there.put_many([octets(20_000, value) for value in (1, 2, 3)])
    assert [int(there.get()[-1]) for _ in range(3)] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.limit(200)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # raised between open() and its ``with``
@strides(61, 397)
def test_an_exception_at_any_step_of_a_put_leaves_all_memory_to_be_used(medium_ctx: Any, step: Any) -> None:
    """Of a process whose memory nobody else takes."""
    there = medium_ctx.Queue()

    def action() -> None:
        for nbytes in (3 * MIB, 400, 3000, 20_000, 9 * MIB):
            there.put(octets(nbytes), timeout=LIMIT)
        for _ in range(5):
            there.get(copy=True)
        there.put(octets(14 * MIB), timeout=LIMIT)

    point, done = 1, False
    while not done:
        burst(there, 3000, 100)
        burst(there, 2 * MIB, 1)
        with contextlib.suppress(Interrupted):
            done = run_traced(action, point, _interrupt, SIGNAL_CHECKS, before=False) > 0
        for _ in range(there.qsize()):
            there.get(copy=True)
        there.trim()
        left = list(medium_ctx.tensorpipe_attachment().arena.all_extents())
        assert len(left) == 1, (
            f"after an exception at step {point} there is more left than what the queue's record lies in"
        )
        point += step


def _interrupt() -> None:
    raise Interrupted


def test_who_lost_free_memory_gets_other_memory(ctx: Any) -> None:
    """And nothing of what it puts then is anybody else's."""
    there, back, go = ctx.Queue(), ctx.Queue(), ctx.Queue()

    def action() -> None:
        burst(back, 20_000, 200)
        go.put(1)
        for _ in range(200):
            value = there.get()
            back.put(octets(20_000, int(value)))

    with Helper(action, goes_on=True) as helper:
        assert go.get(timeout=LIMIT) == 1
        for number in range(200):
            if number % 20 == 0:
                assert there.trim() >= 0
            there.put(number)
            got = back.get(timeout=LIMIT)
            assert got.shape == (20_000,)
            assert int(got[0]) == int(got[-1]) == number % 251
        assert reap_quietly(helper.pid)


def reap_quietly(pid: int) -> Any:
    wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))
    return True


@pytest.mark.parametrize("count", [1000, 7000], ids=["in the pipe", "in the log, too"])
def test_who_lost_free_memory_makes_no_memory_of_what_it_knew(large_ctx: Any, count: int) -> None:
    """It had put many messages; the other process got them all, and gave the memory back."""
    there = large_ctx.Queue()
    for _ in range(count):
        there.put(octets(3000))

    def action() -> None:
        for _ in range(count):
            there.get(copy=True)
        there.trim()

    with Helper(action):
        large_ctx.tensorpipe_attachment().arena.reclaim()  # as where there is no room: it looks at all that it had
        assert _pages_of_no_extent(large_ctx) == []
        burst(there, 3000, 1000)
        assert _pages_of_no_extent(large_ctx) == []
        there.trim()
        assert resident(there) < MIB


def test_memory_that_is_nobodys_is_found(large_ctx: Any) -> None:
    """A look at blocks may be a moment too late, and make pages where others have just given up the memory."""
    there = large_ctx.Queue()
    burst(there, 3000, 5000)
    there.trim()
    arena = large_ctx.tensorpipe_attachment().arena
    first = first_unit_of(arena) + 40 << 20
    for page in range(first, first + 16 * MIB, 4096):
        assert arena.words[page >> 3] == 0
    assert resident(there) > 16 * MIB
    there.put(1)
    there.put(octets(24 * MIB), timeout=0)  # not the one that may be beyond the capacity
    assert (there.get(), len(there.get())) == (1, 24 * MIB)


def _pages_of_no_extent(ctx: Any) -> Any:
    arena = ctx.tensorpipe_attachment().arena
    extents = [(start, start + (units << 20)) for start, _, units, _ in arena.all_extents()]
    pages = arena.written(first_unit_of(arena) << 20, arena.segment.size)
    return [run for run in pages if not any(start <= run[0] and run[1] <= stop for start, stop in extents)]


def test_after_a_peak_what_was_freed_last_is_used_first(large_ctx: Any) -> None:
    """Not the cold memory of the peak, one after the other."""
    there = large_ctx.Queue()
    for _ in range(12):
        there.put(octets(MIB))
    peak = [there.get(copy=False) for _ in range(12)]
    del peak
    places = set()
    for _ in range(12):
        there.put(octets(MIB))
        places.add(there.get(copy=False).data_ptr())
    assert len(places) <= 2


def test_a_block_that_grows_is_charged(ctx: Any) -> None:
    """Blocks are sizes of a power of two: written in part once, they have pages for that part."""
    there = ctx.Queue()
    there.put(0)
    for nbytes in (4 * PART + 5000, 8 * PART - 5000):
        for _ in range(16):
            with contextlib.suppress(Full):
                there.put(octets(nbytes), timeout=0)
        assert 20 * PART < resident(there) <= 33 * PART
        while there.qsize():
            there.get(copy=True)
        there.put(0)


@pytest.mark.slow
def test_many_processes_stay_within_the_capacity_together(ctx: Any) -> None:
    """Each puts at once whatever fits, in all sizes."""
    there = ctx.Queue()
    there.put(0)
    most, stop = [0], threading.Event()

    def action(seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(30):
            with contextlib.suppress(Full):
                there.put(octets(int(torch.randint(100, 9 * PART, (1,)))), timeout=0)

    def look() -> None:
        while not stop.is_set():
            most[0] = max(most[0], resident(there))
            stop.wait(0.002)

    onlooker = threading.Thread(target=look)
    pids = [in_child(lambda seed=seed: action(seed)) for seed in range(8)]
    onlooker.start()
    try:
        assert [reap(pid) for pid in pids] == [0] * 8
    finally:
        stop.set()
        onlooker.join()
    assert 20 * PART < most[0] <= 35 * PART


def test_a_put_that_may_not_wait_does_not_look_for_long(medium_ctx: Any) -> None:
    """A few per cent of what it took to put all that waits: in processor time, as others may be running."""
    there, each, costs = medium_ctx.Queue(), [octets(100)] * 64, []
    began = time.thread_time()
    with contextlib.suppress(Full):
        while True:
            there.put_many(each, timeout=0)
    filling, waiting = time.thread_time() - began, there.qsize()
    assert waiting > 30_000
    for _ in range(7):
        began = time.thread_time()
        with pytest.raises(Full, match=f"{waiting} waiting"):
            there.put(octets(MIB), timeout=0)
        costs.append(time.thread_time() - began)
    assert min(costs) < 0.08 * filling


def test_a_large_message_after_many_small_ones_looks_at_what_the_machine_leaves_a_few_times(
    medium_ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes longer than to give a block back."""
    there, looks = medium_ctx.Queue(), []
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.headroom", lambda: looks.append(1) or headroom())
    for _ in range(500):
        there.put(octets(20_000))
    drained(there)
    del looks[:]
    there.put(octets(8 * MIB), timeout=0)
    assert 0 < len(looks) < 20


ADDRESSES = """
import resource, torch, contextlib
import tensorpipe_ipc as tp
import tensorpipe_ipc.memory.arena
torch.set_num_threads(1)
with open("/proc/self/statm") as line:
    used = int(line.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (900 << 20), used + (900 << 20)))
queue = tp.Queue()
print(queue._queue.arena.segment.size >> 20 <= 512)
for round in range(2):  # the first takes most of the addresses there are
    for nbytes in (400, 5_000, 70_000, 1 << 20, 3 << 20, 9 << 20, 20 << 20, 50 << 20):
        for _ in range(max(1, min(3000, (60 << 20) // nbytes))):
            queue.put(torch.ones(nbytes, dtype=torch.uint8), timeout=5)
        while queue.qsize():
            queue.get(copy=True)
print("done")
"""


def test_a_put_after_a_burst_whose_memory_another_process_gave_back_does_not_ask_for_each_block(
    large_ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took seconds after a million messages."""
    there, number, asked = large_ctx.Queue(), 64 * 100, []
    for _ in range(100):
        there.put_many([1] * 64)
    while number:
        number -= len(there.get_many(64))
    before_each_try_of_a_block(monkeypatch, lambda: asked.append(1))
    with Helper(large_ctx.trim):
        for value in range(100):
            there.put(value, timeout=0)
        assert drained(there) == list(range(100))
    assert 32 < len(asked) < 400


def test_a_put_after_a_burst_that_was_taken_does_not_look_at_each_message(
    large_ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 0.8 s after 500,000, also with no timeout left. The order stays, and so does what others put."""
    there, number, looks = large_ctx.Queue(), 64 * 400, []
    for first in range(0, number, 64):
        there.put_many(range(first, first + 64))  # more than a pipe holds
    got = [value for _ in range(number // 64) for value in there.get_many(64)]
    got += drained(there)
    assert got == list(range(number))
    before_each_look_at_a_spilled_message(monkeypatch, lambda: looks.append(1))
    there.put(0, timeout=0)
    assert 0 < len(looks) <= 4096
    for value in range(1, 100):
        there.put(value, timeout=0)
    assert drained(there) == list(range(100))
    looks.clear()
    there.put(1, timeout=0)
    there.put(2, timeout=0)
    assert drained(there) == [1, 2]
    assert len(looks) < 200  # it is over: what was a burst costs later puts nothing


def test_memory_that_cannot_be_given_back_is_used_again(large_ctx: Any) -> None:
    """As that of an arena whose pages a GPU has locked: also once there was no room for something larger."""
    there = large_ctx.Queue()
    large_ctx.tensorpipe_attachment().arena.words[PAGE_LOCKED] = 1
    burst(there, 3 * MIB, 10)
    there.put(octets(1))
    with pytest.raises(Full):
        there.put(octets(10 * MIB), timeout=0)
    there.get()
    before = resident(there)
    burst(there, 3 * MIB, 10)
    assert resident(there) == before


def fill_and_empty(there: Any) -> None:
    """Put whatever there is memory for, and get it."""
    with contextlib.suppress(Full):
        while True:
            there.put(octets(20_000), timeout=0)
    for _ in range(there.qsize()):
        there.get(copy=True)


@pytest.mark.parametrize("nbytes", [3000, 5000])
def test_a_put_that_may_not_wait_finds_what_lies_free_beside_the_little_that_is_its_own(ctx: Any, nbytes: int) -> None:
    there, other = ctx.Queue(), ctx.Queue()
    burst(there, 3000, 100)
    there.put(octets(10))
    with Helper(lambda: fill_and_empty(other)):
        assert resident(there) > 31 * PART
        for _ in range(60):
            there.put(octets(nbytes), timeout=0)


@pytest.mark.parametrize("state", ["alive", "dead"])
def test_a_lease_of_a_small_message_finds_what_lies_free_with_another_process(ctx: Any, state: Any) -> None:
    """It needs a block of its own."""
    there, other = ctx.Queue(), ctx.Queue()

    for _ in range(40):
        there.put(octets(300, 7))
    with Helper(lambda: fill_and_empty(other)) as helper:
        assert resident(there) > 31 * PART
        if state == "dead":
            os.kill(helper.pid, signal.SIGKILL)
        assert all((lease == 7).all() for lease in [there.get(copy=False) for _ in range(40)])


@pytest.mark.parametrize("nbytes", [300, 5000])
def test_a_lease_that_the_budget_refuses_looks_for_no_memory(
    ctx: Any, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took milliseconds where there was much: too long for a program that gets a copy then."""
    there, attachment = ctx.Queue(), ctx.tensorpipe_attachment()
    there.put(octets(nbytes, 7))
    set_lease_budget(attachment.leases, 4000)
    monkeypatch.setattr(attachment, "make_room", None)
    with pytest.raises(SharedMemoryError, match="no lease"):
        there.get(copy=False)
    assert int(there.get(copy=True)[0]) == 7


def few_addresses(ctx: Any, units: int) -> None:
    """Leave an arena so many MiB of addresses, as under ``ulimit -v``."""
    leave_addresses(ctx.tensorpipe_attachment().arena, units)


def test_where_addresses_are_few_blocks_that_are_free_with_another_process_are_found(ctx: Any) -> None:
    there, other = ctx.Queue(), ctx.Queue()
    few_addresses(ctx, 2)

    def action() -> None:
        burst(other, 100_000, 3)
        other.put(octets(100_000, 77))

    with Helper(action):
        for number in range(5):
            there.put(octets(100_000, number), timeout=1)
        with pytest.raises(Full, match="no 5064 bytes free, and of 2 MiB of addresses no 1 MiB in a row"):
            there.put(octets(5000), timeout=0)
        for queue_, values in ((there, range(5)), (other, [77])):
            assert [(int(x[0]), int(x[-1])) for x in drained(queue_)] == [(value, value) for value in values]


def test_where_addresses_are_few_memory_that_is_free_with_another_process_is_found(ctx: Any) -> None:
    """It lies between messages that wait, and all of it is needed."""
    there, other, waiting = ctx.Queue(), ctx.Queue(), ctx.Queue()
    few_addresses(ctx, 11)
    there.put(octets(500_000))

    def action() -> None:
        for number in range(72):
            (other if number % 8 else waiting).put(octets(100_000, number), timeout=0)
        for _ in range(other.qsize()):
            other.get(copy=True)

    with Helper(action):
        assert resident(there) > 30 * PART
        there.put(octets(500_000, 1), timeout=0)
        assert [int(x[-1]) for x in drained(waiting)] == list(range(0, 72, 8))


@pytest.mark.slow
def test_few_addresses_do_for_all_sizes_in_turn(tmp_path: Path) -> None:
    done = ran_in_fork("-c", ADDRESSES, folder=tmp_path)
    assert (done.status, done.out) == (0, "True\ndone\n"), done.err


def test_trim_gives_back_what_nobody_needs(large_ctx: Any) -> None:
    there, other = large_ctx.Queue(), large_ctx.Queue()
    held = octets(3 * MIB, 7)
    there.put(held)
    lease = there.get(copy=False)
    with Helper(lambda: burst(other, 100_000, 60)):
        burst(there, 2 * MIB, 8)
        before = resident(there)
        assert before > 20 * MIB
        given = large_ctx.trim()
        assert given > 16 * MIB
        assert resident(there) == before - given < 5 * MIB
        assert torch.equal(lease, held)
        assert there.trim() == 0
        burst(there, 2 * MIB, 8)


def test_what_lies_idle_is_given_back_by_one_that_joins(large_ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    there, other = large_ctx.JoinableQueue(), large_ctx.Queue()
    there.put("task")
    make_look_due(large_ctx.tensorpipe_attachment().arena)
    with Helper(lambda: burst(other, 2 * MIB, 8)):
        before = resident(there)
        joiner = threading.Thread(target=there.join)
        joiner.start()
        wait_for(lambda: resident(there) < before - 12 * MIB)
        there.get()
        there.task_done()
        joiner.join(LIMIT)
        assert not joiner.is_alive()


@pytest.mark.parametrize("timeout", [0, LIMIT, None])
@pytest.mark.parametrize("at_once", [1, 2])
def test_what_lies_idle_is_given_back_by_one_that_always_finds_a_message(
    large_ctx: Any, timeout: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works off what others left, and nobody puts any more."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    there, other = large_ctx.Queue(), large_ctx.Queue()
    there.put_many([bytes(8)] * 8000)
    make_look_due(large_ctx.tensorpipe_attachment().arena)
    with Helper(lambda: burst(other, 2 * MIB, 8)):
        before = resident(there)
        assert before > 15 * MIB

        def take() -> bool:
            assert there.get(timeout=timeout) if at_once == 1 else there.get_many(at_once, timeout=timeout)
            return resident(there) < before - 12 * MIB

        wait_for(take)
        assert there.qsize(), "it may have waited"


@pytest.mark.parametrize("who", ["waits", "waits with a timeout", "polls", "puts"])
def test_what_lies_idle_is_given_back(large_ctx: Any, who: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever gets or puts, also if it never had that memory."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    there, other, go = large_ctx.Queue(), large_ctx.Queue(), large_ctx.Queue()
    make_look_due(large_ctx.tensorpipe_attachment().arena)

    def wait() -> None:
        there.get(timeout=LIMIT if who == "waits with a timeout" else None)

    with Helper(lambda: burst(other, 2 * MIB, 8)):
        assert resident(there) > 15 * MIB
        if who == "puts":
            wait_for(
                lambda: (go.put(octets(5000)), go.get(), go.put(octets(20_000)), go.get()) and resident(there) < 3 * MIB
            )
        elif who == "polls":
            wait_for(lambda: drained(there) == [] and resident(there) < 3 * MIB)
        else:
            waiter = threading.Thread(target=wait)
            waiter.start()
            wait_for(lambda: resident(there) < 3 * MIB)
            there.put(1)
            waiter.join(LIMIT)
            assert not waiter.is_alive()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("looks", [1, 2])
def test_a_process_keeps_those_that_wait_from_looking_once_it_has_looked_twice(
    large_ctx: Any, looks: int, waits: bool
) -> None:
    """Memory that nobody used since the last look is idle. One that ends after its first look finds nothing; others must."""
    there = large_ctx.Queue()
    there.put(octets(2 * MIB))
    arena, seen = large_ctx.tensorpipe_attachment().arena, list[bool]()

    def look() -> None:
        there.qsize()
        large_ctx.tensorpipe_attachment().attach()
        for _ in range(looks):
            make_look_due(arena)
            arena.mind_idle(waits=waits)

    assert reap(in_child(look)) == 0
    make_look_due(arena)
    arena.mind_idle(lambda: seen.append(True), waits=True)
    assert seen == [True] * (looks == 1)


def test_whoever_gives_back_a_part_with_each_call_keeps_nobody_that_waits_from_looking(
    large_ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that finds a message each time, after seconds of work, gives back what it can in a moment. Others must go on."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.AT_ONCE", 0.0)
    there, seen = large_ctx.Queue(), list[bool]()
    arena = large_ctx.tensorpipe_attachment().arena
    there.put_many([octets(2 * MIB) for _ in range(8)])
    del (got := there.get_many(8))[:]
    assert not got

    def look() -> None:
        there.qsize()
        large_ctx.tensorpipe_attachment().attach()
        for _ in range(3):
            make_look_due(arena)
            arena.mind_idle()
        assert arena.is_giving_back

    assert reap(in_child(look)) == 0
    make_look_due(arena)
    arena.mind_idle(lambda: seen.append(True), waits=True)
    assert seen


class Unready:
    """It is never made: whoever makes it says so, and sleeps."""

    ready = (-1, -1)

    def __init__(self, content: Any) -> None:
        self.content = content

    def __setstate__(self, state: Any) -> None:
        os.write(self.ready[1], b"x")
        signal.pause()


@pytest.mark.limit(40)
def test_who_polls_finishes_what_only_it_can_finish_though_another_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer is killed with a large message in hand, and a third process, which has another queue alone, needs the room."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.2)
    ctx, (told, tell) = small_context(capacity=16 * MIB), os.pipe()
    other, large = ctx.Queue(), octets(12 * MIB)  # here: torch's threads are not in a child
    other.put(1)

    def need_room() -> None:
        os.read(told, 1)
        other.put(large, timeout=LIMIT / 2)

    needy = in_child(need_room)
    there, (ready, begun) = ctx.Queue(), os.pipe()
    monkeypatch.setattr(Unready, "ready", (ready, begun))
    there.put(Unready(octets(7 * MIB)))
    dying = in_child(lambda: there.get(copy=False))
    os.read(ready, 1)
    os.kill(dying, signal.SIGKILL)
    reap(dying)
    os.write(tell, b"x")
    while not os.waitid(os.P_PID, needy, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        with contextlib.suppress(Empty):
            there.get(timeout=1.0)
    assert reap(needy) == 0
    for each in (told, tell, ready, begun):
        os.close(each)


def test_of_many_that_wait_in_get_one_looks_for_what_lies_idle(large_ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look walks all memory, and what is in use keeps them at it."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    there, other, (told, tell) = large_ctx.Queue(), large_ctx.Queue(), os.pipe()
    for _ in range(8):
        other.put(octets(MIB))
    arena = large_ctx.tensorpipe_attachment().arena
    asked, look = Arena.mind_idle, Arena._give_back_idle

    def wait() -> None:
        monkeypatch.setattr(Arena, "mind_idle", lambda *_, **wish: (os.write(tell, b"?"), asked(*_, **wish))[1])
        monkeypatch.setattr(Arena, "_give_back_idle", lambda arena: (os.write(tell, b"!"), look(arena))[1])
        there.get()

    waiting = [in_child(wait) for _ in range(8)]
    said = b""
    while said.count(b"?") < 200:
        said += os.read(told, 100)
    there.put_many(waiting)
    assert [reap(each) for each in waiting] == [0] * 8
    assert arena.words[GROWN]
    assert 2 < said.count(b"!") < 100
    os.close(told)
    os.close(tell)


@pytest.mark.parametrize("last", ["the child of who made it", "who did not make it"])
def test_what_waits_in_a_queue_is_given_back_once_who_had_it_last_has_ended_and_never_used_it(
    large_ctx: Any, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that fails before its first get; and this process has other queues, and makes and drops no more."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    there, (held, let_go) = large_ctx.Queue(), os.pipe()
    make_look_due(large_ctx.tensorpipe_attachment().arena)

    def fill_and_leave() -> int:
        tasks = large_ctx.Queue()
        for _ in range(8):
            tasks.put(octets(2 * MIB), timeout=LIMIT)
        return in_child(lambda: os.read(held, 1))

    if last == "the child of who made it":
        maker, worker = 0, fill_and_leave()
    else:
        maker = in_child(lambda: there.put(fill_and_leave()))
        worker = there.get(timeout=LIMIT)
        assert reap(maker) == 0
    assert resident(there) > 15 * MIB
    os.write(let_go, b"x")
    if maker == 0:
        assert reap(worker) == 0
    wait_for(lambda: drained(there) == [] and resident(there) < MIB)
    os.close(held)
    os.close(let_go)


@pytest.mark.slow
def test_what_many_processes_made_that_each_needed_little_is_given_back(
    large_ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process for each task, whose result has less than a MiB."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    there, taken = large_ctx.Queue(), []
    for _ in range(8):
        worker = in_child(lambda: there.put(octets(900_000)))
        taken.append(there.get(timeout=LIMIT))
        assert reap(worker) == 0
    assert resident(there) > 6 * MIB
    taken.clear()
    wait_for(lambda: drained(there) == [] and resident(there) < MIB)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_look_for_idle_memory_that_is_cut_short_is_done_again(
    large_ctx: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process, or by the same one."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    there = large_ctx.Queue()
    arena = large_ctx.tensorpipe_attachment().arena
    burst(there, 2 * MIB, 4)

    def cut_short(*_: Any) -> Any:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt

    def look() -> None:
        arena.all_extents = cut_short  # type: ignore[method-assign]
        there.put(0)
        with contextlib.suppress(KeyboardInterrupt):
            look_for_idle(arena)
        del arena.all_extents

    if how == "killed":
        assert reap(in_child(look)) == -signal.SIGKILL
    else:
        look()
    wait_for(lambda: drained(there) is not None and resident(there) < MIB)


@pytest.mark.parametrize(("nbytes", "count"), [(100_000, 128), (5000, 1200)])
def test_what_lies_idle_between_a_few_leases_is_given_back(
    large_ctx: Any, nbytes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they stay as they are; what was given back is used again."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    there, taken = large_ctx.Queue(), []
    make_look_due(large_ctx.tensorpipe_attachment().arena)
    for number in range(count):
        there.put(octets(nbytes, number % 100))
        taken.append(there.get(copy=False))
    before, taken = resident(there), taken[::20]
    there.put(octets(10, 1))
    wait_for(lambda: there.get() is not None and (there.put(octets(10, 1)) or resident(there) < before // 5))
    assert all((lease == number * 20 % 100).all() for number, lease in enumerate(taken))
    burst(there, nbytes, count // 2)
    assert resident(there) < before
    assert all((lease == number * 20 % 100).all() for number, lease in enumerate(taken))


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [None, LIMIT])
def test_what_a_killed_process_had_is_given_back_by_who_waits(
    large_ctx: Any, timeout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a message that does not come: who waits never needs memory."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    there, other = large_ctx.Queue(), large_ctx.Queue()
    for _ in range(3):
        other.put(octets(4 * MIB))

    with Helper(lambda: [other.get(copy=False) for _ in range(3)]) as holder:
        waiter = threading.Thread(target=there.get, kwargs={"timeout": timeout})
        waiter.start()
        os.kill(holder.pid, signal.SIGKILL)
        segment = large_ctx.tensorpipe_attachment().arena.segment
        wait_for(lambda: segment.resident() < MIB)  # and not by ``statistics``, which finishes what the dead began
        there.put(1)
        waiter.join(LIMIT)
        assert not waiter.is_alive()


@pytest.mark.parametrize("way", ["empty", "loan"])
def test_what_a_killed_process_had_is_given_back_by_who_makes_tensors_to_put(
    large_ctx: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    there = large_ctx.Queue()
    make_look_due(large_ctx.tensorpipe_attachment().arena)
    for _ in range(8):
        there.put(octets(2 * MIB))
    told, tell = os.pipe()

    def hold() -> None:
        held = [there.get() for _ in range(8)]
        os.write(tell, bytes([len(held)]))
        die()

    child = in_child(hold)
    assert os.read(told, 1) == b"\x08"
    assert reap(child) == -signal.SIGKILL

    def put_and_take() -> bool:
        time.sleep(0.11)  # so that a look is due when the tensor is made, and not when it is put
        if way == "empty":
            tensor = large_ctx.empty(MIB, dtype=torch.uint8)
            there.put(tensor, move=True)
        else:
            with there.loan(MIB, torch.uint8) as tensor:
                tensor.fill_(1)
        del tensor
        there.get()
        return segment.resident() < 3 * MIB  # and not by ``statistics``, as above

    segment = large_ctx.tensorpipe_attachment().arena.segment
    wait_for(put_and_take)
    os.close(told)
    os.close(tell)


def test_memory_that_an_exception_left_half_made_is_found(large_ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By others: who began the put is idle now."""
    there, steps, reserve = large_ctx.Queue(), [], Segment.reserve

    def interrupted(segment: Any, start: Any, stop: Any) -> Any:
        steps.append(start)
        if len(steps) == 5:
            raise Interrupted
        return reserve(segment, start, stop)

    def begin() -> None:
        monkeypatch.setattr(Segment, "reserve", interrupted)
        with pytest.raises(Interrupted):
            there.put(octets(24 * MIB))

    with Helper(begin):
        assert resident(there) > 15 * MIB
        there.put(1)
        there.put(octets(24 * MIB), timeout=0)
        assert (there.get(), len(there.get())) == (1, 24 * MIB)


@pytest.mark.parametrize("ending", ["raises", "dies"])
def test_memory_that_was_made_and_not_told_of_is_found(
    large_ctx: Any, ending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By others, who need it all: who made it is idle now, or another has its row."""
    there, steps, reserve = large_ctx.Queue(), [], Segment.reserve

    def interrupted(segment: Any, start: Any, stop: Any) -> Any:
        steps.append(reserve(segment, start, stop))
        if len(steps) == 5:
            if ending == "dies":
                die()
            raise Interrupted
        return steps[-1]

    def begin() -> None:
        monkeypatch.setattr(Segment, "reserve", interrupted)
        with pytest.raises(Interrupted):
            there.put(octets(24 * MIB))

    if ending == "dies":
        assert reap(in_child(begin)) == -signal.SIGKILL
    with Helper(begin if ending == "raises" else lambda: there.put(1)):
        assert resident(there) > 15 * MIB
        if ending == "raises":
            there.put(1)
        there.put(octets(30 * MIB), timeout=0)
        assert (there.get(), len(there.get())) == (1, 30 * MIB)


def between_endpoints() -> Any:
    """Return the bytes that the one segment of this process takes."""
    (segment,) = survey([os.getpid()])
    return segment.resident


@pytest.mark.parametrize("way", ["a consumer waits", "a consumer trims", "a producer trims"])
def test_what_lies_idle_between_endpoints_is_given_back(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a burst that is over: by a consumer that waits for the next one, or by either end's trim."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1 if way == "a consumer waits" else 1e9)
    with tp.Consumer("idle", shared_memory="require") as consumer, tp.Producer("idle") as producer:
        putting = in_thread(lambda: [producer.put(octets(2 * MIB), LIMIT) for _ in range(8)])
        for _ in range(8):
            consumer.get(LIMIT)
        putting()
        if way == "a consumer waits":
            waiting = in_thread(lambda: consumer.get(LIMIT))
            wait_for(lambda: between_endpoints() < MIB)
            producer.put(1, LIMIT)
            assert waiting() == 1
        else:
            end = consumer if way == "a consumer trims" else producer
            before = between_endpoints()
            given = end.trim()
            assert given > 2 * MIB
            assert between_endpoints() == before - given < MIB
            assert end.trim() == 0


def test_a_consumer_of_many_producers_gives_back_as_much_in_a_call_as_one_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They share one arena: to mind it once for each would take that many times as long."""
    minded = itertools.count()
    with contextlib.ExitStack() as stack:
        consumer = stack.enter_context(tp.Consumer("shared", shared_memory="require"))
        producers = [stack.enter_context(tp.Producer("shared")) for _ in range(4)]
        for producer in producers:
            putting = in_thread(functools.partial(producer.put, octets(100), LIMIT))
            consumer.get(LIMIT)
            putting()
        monkeypatch.setattr(tensorpipe_ipc.memory.arena.Arena, "mind_idle", lambda *_, **__: next(minded))
        side_of(consumer).look_around(at_once=True)
        assert next(minded) == 1


def test_a_consumer_that_waits_for_its_next_producer_keeps_no_more_than_it_holds() -> None:
    with tp.Consumer("next", producers=2, shared_memory="require") as consumer:
        with tp.Producer("next") as producer:
            putting = in_thread(lambda: [producer.put(octets(MIB, n), LIMIT) for n in range(12)])
            got = [consumer.get(LIMIT) for _ in range(12)][:3]
            putting()
        with pytest.raises(queue.Empty):
            consumer.get(0.2)
        assert between_endpoints() < 4 * MIB
        del got[1:]
        assert between_endpoints() < 2 * MIB
        with tp.Producer("next") as producer:
            producer.put(octets(MIB, 77), LIMIT)
            assert consumer.get(LIMIT).unique().tolist() == [77]
        assert got[0].unique().tolist() == [0]


@pytest.mark.parametrize("between", ["a queue's ends", "a context's", "a context's, which goes last", "endpoints"])
def test_what_outlasts_the_last_queue_keeps_no_more_than_its_own_memory(between: Any) -> None:
    """Nobody would find what is free there; and some tensors last as long as their program."""
    if between == "endpoints":
        with tp.Consumer("last", shared_memory="require") as consumer, tp.Producer("last") as producer:
            putting = in_thread(lambda: [producer.put(octets(MIB, n), LIMIT) for n in range(12)])
            got = [consumer.get(LIMIT) for _ in range(12)]
            putting()
            del got[6:]
            segment = segment_at(got[0].data_ptr())
    else:
        ctx = tp.get_context("fork").__class__() if "context" in between else None
        there = tp.Queue(ctx=ctx)
        if between == "a context's":
            del ctx
        there.put_many([octets(MIB, n) for n in range(12)])
        got = [there.get() for _ in range(12)][:6]
        segment = segment_at(got[0].data_ptr())
        del there
        ctx = None
    gc.collect()
    assert segment.resident() < 7 * MIB
    del got[2:]
    assert segment.resident() < 3 * MIB
    assert [each.unique().tolist() for each in got] == [[0], [1]]


def test_what_a_childs_end_frees_after_the_last_queue_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child may read what its parent lets go of, as long as it lives."""
    monkeypatch.setattr(leases, "PAUSE", 0.0)
    there = tp.Queue()
    there.put_many([octets(MIB, n) for n in range(12)])
    got = [there.get() for _ in range(12)]
    segment = segment_at(got[0].data_ptr())
    with Helper(lambda: None):
        del there
        gc.collect()
        del got[4:]
        assert segment.resident() > 11 * MIB
    del got[2:]
    assert segment.resident() < 3 * MIB
    assert [each.unique().tolist() for each in got] == [[0], [1]]


def fill(there: Any, nbytes: int) -> None:
    """Put until there is no room."""
    with contextlib.suppress(Full):
        while True:
            there.put(octets(nbytes), timeout=0)


def test_who_comes_to_a_full_arena_gets_leases(ctx: Any) -> None:
    """Its own needs are no message beyond the capacity."""
    there = ctx.Queue()
    fill(there, 40_000)

    def get() -> None:
        for _ in range(3):
            assert segment_at(there.get(timeout=LIMIT, copy=False).data_ptr())

    assert reap(in_child(get)) == 0


@pytest.mark.slow
def test_small_objects_of_many_processes_beside_a_full_arena_keep_nobody_from_leases(ctx: Any) -> None:
    """Each had memory for some before, and uses it."""
    there, others = ctx.Queue(), [ctx.Queue() for _ in range(6)]
    there.put(0)
    there.get()
    begun, filled = os.pipe(), os.pipe()

    def put(other: Any) -> None:
        other.put(octets(300))
        os.write(begun[1], b".")
        os.read(filled[0], 1)
        fill(other, 300)

    putting = [in_child(functools.partial(put, other)) for other in others]
    for _ in putting:
        os.read(begun[0], 1)
    fill(there, 500_000)
    os.write(filled[1], b"." * len(putting))
    assert [reap(child) for child in putting] == [0] * len(putting)
    assert segment_at(there.get(timeout=LIMIT, copy=False).data_ptr())
    for end in (*begun, *filled):
        os.close(end)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dropped"])
def test_a_message_beyond_the_capacity_leaves_others_their_free_memory(keeps: bool, ctx: Any) -> None:
    """A process that comes then gets it, and needs memory for itself. Others put and get as before."""
    full, empty, between = (ctx.Queue() for _ in range(3))
    for _ in range(2):
        for _ in range(30):
            between.put(octets(300))
        for _ in range(30):
            between.get()
    further = [ctx.Queue() for _ in range(10)]
    fill(full, 20_000)
    empty.put(octets(60_000), timeout=LIMIT)
    for each in further:  # for which this process needs memory, too
        with contextlib.suppress(Empty):
            each.get_many(9, 0)
    taken, done = os.pipe(), os.pipe()

    def get() -> None:
        message = empty.get(timeout=LIMIT)
        if not keeps:
            del message
        os.write(taken[1], b".")
        os.read(done[0], 1)

    child = in_child(get)
    os.read(taken[0], 1)
    puts_go_on(between)
    os.write(done[1], b".")
    assert reap(child) == 0
    for end in (*taken, *done):
        os.close(end)


def test_where_pages_are_locked_a_message_beyond_the_capacity_holds_nothing_back(ctx: Any) -> None:
    """Nothing can be given back there: what is free is used."""
    full, empty, between = (ctx.Queue() for _ in range(3))
    ctx.tensorpipe_attachment().arena.words[PAGE_LOCKED] = 1
    fill(full, 20_000)
    empty.put(octets(60_000), timeout=LIMIT)
    empty.get(timeout=LIMIT)
    while full.qsize():
        full.get(timeout=LIMIT)
    for _ in range(3):
        between.put(octets(20_000), timeout=1)


def test_where_pages_are_locked_leases_pin_no_more_than_the_capacity(ctx: Any) -> None:
    """Messages beyond it are copied, however many processes get."""
    there = ctx.Queue()
    ctx.tensorpipe_attachment().arena.words[PAGE_LOCKED] = 1
    (told, tell), (done, say_done) = os.pipe(), os.pipe()

    def keep() -> None:
        message = there.get(timeout=LIMIT)
        os.write(tell, b"l" if segment_at(message.data_ptr()) else b"c")
        os.read(done, 1)

    children, leases = [], 0
    for _ in range(6):
        there.put(octets(3 * MIB), timeout=LIMIT)
        children.append(in_child(keep))
        leases += os.read(told, 1) == b"l"
    assert leases == 2, "of 3 MiB in 8 MiB"
    os.write(say_done, b"." * len(children))
    assert [reap(child) for child in children] == [0] * len(children)
    for end in (told, tell, done, say_done):
        os.close(end)


def puts_go_on(there: Any) -> None:
    for number in range(20):
        for _ in range(3):
            there.put(octets(300, number), timeout=1)
        for _ in range(3):
            assert there.get(timeout=LIMIT)[0] == number


@pytest.mark.parametrize("count", [1, 40])
def test_queues_that_are_made_beside_a_full_arena_keep_nobody_from_its_memory(count: int, ctx: Any) -> None:
    """Their own records need some. Others use what is free, and lease what they get."""
    full, between, made, done = ctx.Queue(), ctx.Queue(), os.pipe(), os.pipe()
    for _ in range(2):
        between.put_many([octets(300)] * 12)
        between.get_many(12)
    fill(full, 20_000)

    def make() -> None:
        queues = [ctx.Queue() for _ in range(count)]
        os.write(made[1], b".")
        os.read(done[0], 1)
        del queues

    child = in_child(make)
    os.read(made[0], 1)
    puts_go_on(between)
    while full.qsize():
        assert segment_at(full.get(timeout=LIMIT, copy=False).data_ptr())
    os.write(done[1], b".")
    assert reap(child) == 0
    for end in (*made, *done):
        os.close(end)


@pytest.mark.parametrize("locks_pages", [False, True])
def test_a_lease_that_was_asked_for_of_a_message_beyond_the_capacity_lies_within_it(
    locks_pages: bool, ctx: Any
) -> None:
    """As soon as there is room for it. Nothing is lost meanwhile."""
    full, empty = ctx.Queue(), ctx.Queue()
    ctx.tensorpipe_attachment().arena.words[PAGE_LOCKED] = int(locks_pages)
    fill(full, 200_000)
    empty.put(octets(200_000, 7), timeout=LIMIT)
    for _ in range(3):
        with pytest.raises(SharedMemoryError, match="under lease"):
            empty.get(timeout=LIMIT, copy=False)
    full.get(timeout=LIMIT)
    got = empty.get(timeout=LIMIT, copy=False)
    assert segment_at(got.data_ptr())
    assert got.unique().tolist() == [7]
    if not locks_pages:
        ctx.Queue().trim()
        assert resident(full) <= 32 * PART


def test_a_message_beyond_the_capacity_that_was_taken_is_none_any_more_where_pages_are_locked(ctx: Any) -> None:
    """Its memory cannot be given back; leases of what comes then are made all the same, without a look at all that is free."""
    full, empty, looks = ctx.Queue(), ctx.Queue(), []
    arena = ctx.tensorpipe_attachment().arena
    arena.words[PAGE_LOCKED] = 1
    fill(full, 20_000)
    empty.put(octets(60_000), timeout=LIMIT)
    empty.get(timeout=LIMIT)
    while full.qsize():
        full.get(timeout=LIMIT)
    states = arena.states
    arena.states = lambda *extent: looks.append(extent) or states(*extent)
    for _ in range(20):
        full.put(octets(20_000), timeout=LIMIT)
        assert segment_at(full.get(timeout=LIMIT, copy=False).data_ptr())
    assert not looks


def test_what_processes_put_in_turns_beyond_the_capacity_does_not_add_up(ctx: Any) -> None:
    """Each finds its queue empty, and what the one before had there is free again. They stay, and do nothing more."""
    full, empty, done = ctx.Queue(), ctx.Queue(), os.pipe()
    fill(full, 20_000)
    children = []
    for number in range(8):

        def put(number: int = number) -> None:
            empty.put(octets(MIB, number), timeout=LIMIT)
            os.read(done[0], 1)

        children.append(in_child(put))
        assert empty.get(timeout=LIMIT, copy=True)[0] == number
    assert resident(full) <= 8 * MIB + 3 * MIB
    os.write(done[1], b"." * len(children))
    assert [reap(child) for child in children] == [0] * len(children)
    for end in done:
        os.close(end)


def test_where_pages_are_locked_and_all_is_free_a_lease_is_made_of_a_message_beyond_the_capacity(ctx: Any) -> None:
    """It is of another size than all that is free; nothing can be given back for a copy within."""
    full, other = ctx.Queue(), ctx.Queue()
    fill(full, 20_000)
    ctx.tensorpipe_attachment().arena.words[PAGE_LOCKED] = 1
    other.put(octets(MIB), timeout=LIMIT)
    with pytest.raises(SharedMemoryError, match="under lease"):
        other.get(timeout=LIMIT, copy=False)
    while full.qsize():
        full.get(timeout=LIMIT)
    for _ in range(3):
        held = other.get(timeout=LIMIT, copy=False)
        assert segment_at(held.data_ptr())
        del held
        other.put(octets(MIB), timeout=LIMIT)


@pytest.mark.parametrize("nbytes", [300, 20_000, MIB])
def test_a_put_into_an_empty_queue_beside_one_that_fills_the_arena_does_not_look_at_all_that_is_there(
    nbytes: int, ctx: Any
) -> None:
    """The one before it has left its block, which is used again."""
    full, empty, looks = ctx.Queue(), ctx.Queue(), []
    fill(full, 20_000)
    fill(full, 300)
    for _ in range(2):
        empty.put(octets(nbytes), timeout=LIMIT)
        empty.get(timeout=LIMIT, copy=True)
    arena = ctx.tensorpipe_attachment().arena
    states = arena.states
    arena.states = lambda *extent: looks.append(extent) or states(*extent)
    before = resident(full)
    for number in range(20):
        empty.put(octets(nbytes, number), timeout=LIMIT)
        assert empty.get(timeout=LIMIT, copy=True)[-1] == number
    assert len(looks) < 20, "fewer than one for each, though a look for idle memory may fall among them"
    assert resident(full) == before


def _filled(ctx: Any) -> Any:
    """Return a queue that fills the arena, down to small blocks."""
    full = ctx.Queue()
    fill(full, 20_000)
    fill(full, 300)
    return full


@pytest.mark.parametrize("nbytes", [2 * MIB, 20_000])
def test_no_holder_is_read_out_of_what_a_message_says_where_an_extent_changes_hands_meanwhile(
    medium_ctx: Any, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, arena = medium_ctx.Queue(), medium_ctx.tensorpipe_attachment().arena
    for _ in range(3000):
        there.put(octets(300))
    drained(there)
    states = arena.states

    def late(*extent: Any) -> Any:
        monkeypatch.undo()
        medium_ctx.trim()
        there.put(torch.full((nbytes // 8,), 2))  # as a block's state, it says that a message waits there
        return states(*extent)

    monkeypatch.setattr(arena, "states", late)
    (holder,) = there.statistics().holders
    assert (holder.blocks, holder.nbytes) == (1, nbytes)


def _looks_of(arena: Any) -> list[int]:
    """Return a list that gets what each look at all memory is for."""
    looks, collect = list[int](), arena.collect
    arena.collect = lambda nbytes: looks.append(nbytes) or collect(nbytes)
    return looks


def test_a_queue_beside_one_that_fills_the_arena_has_room_for_some_small_messages(ctx: Any) -> None:
    """As programs put a few requests before any is answered; and no more than 512 KiB of them."""
    full, other = _filled(ctx), ctx.Queue()
    before = resident(full)
    for number in range(20):
        other.put({"number": number, "x": octets(2000, number)}, timeout=LIMIT)
    with pytest.raises(queue.Full):
        other.put(octets(200_000), timeout=0.1)
    fill(other, 2000)
    assert resident(full) <= before + 640 * 1024
    for number in range(20):
        assert other.get(timeout=LIMIT)["number"] == number


def test_messages_of_falling_sizes_beside_a_queue_that_fills_the_arena_add_up_to_a_little(ctx: Any) -> None:
    """Each would be one of a few if all were as small."""
    full, other = _filled(ctx), ctx.Queue()
    before = resident(full)
    other.put(octets(500_000), timeout=LIMIT)
    for size_class in range(18, 8, -1):
        fill(other, (1 << size_class) * 3 // 4)
    assert other.qsize() > 500
    assert resident(full) <= before + 500_000 + 5 * MIB // 2


def test_loans_beside_a_queue_that_fills_the_arena_do_not_look_at_all_that_is_there(ctx: Any) -> None:
    """There is no memory beyond the capacity for them: they lie in memory of their own, and are copied."""
    _full, empty, looks = _filled(ctx), ctx.Queue(), _looks_of(ctx.tensorpipe_attachment().arena)
    for number in range(20):
        with empty.loan(400_000, torch.uint8, timeout=LIMIT) as loan:
            loan.fill_(number)
        assert (empty.get(timeout=LIMIT, copy=True) == number).all()
    assert len(looks) < 10


def test_idle_memory_is_given_back_a_little_with_each_call(medium_ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call takes as long as all of it would. Here each extent takes a second."""
    there, arena = medium_ctx.Queue(), medium_ctx.tensorpipe_attachment().arena
    fill(there, 500_000)
    drained(there)
    full, clock, take = resident(there), [0.0], arena._take

    def slow_take(extents: Any, **options: Any) -> Any:
        clock[0] += 1
        return take(extents, **options)

    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "PARTS", 1)
    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "monotonic", lambda: clock[0])
    monkeypatch.setattr(arena, "_take", slow_take)
    look_for_idle(arena)
    look_for_idle(arena)
    given = [full - resident(there)]
    while given[-1] < full - MIB:
        arena.mind_idle()
        given.append(full - resident(there))
        assert MIB // 4 < given[-1] - given[-2] <= 2 * MIB
    assert len(given) > 4
    assert clock[0] == len(given)


def test_what_the_dead_had_is_looked_for_though_much_is_yet_to_be_given_back(
    medium_ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every few seconds, as ever. Here each call comes a second later, and gives back one part."""
    there, arena, clock = medium_ctx.Queue(), medium_ctx.tensorpipe_attachment().arena, itertools.count()
    fill(there, 500_000)
    drained(there)
    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "PARTS", 1)
    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "AT_ONCE", 0)
    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "monotonic", lambda: float(next(clock)))
    look_for_idle(arena)
    look_for_idle(arena)
    looks = list[bool]()
    while not looks:
        assert resident(there) > MIB
        arena.mind_idle(lambda: looks.append(True))


def test_idle_memory_between_tensors_that_are_kept_is_given_back_in_even_time(
    medium_ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each extent's blocks are listed anew once, however many parts there are."""
    there, arena, listed = medium_ctx.Queue(), medium_ctx.tensorpipe_attachment().arena, itertools.count()
    fill(there, 260_000)
    kept = [there.get(copy=number % 3 > 0) for number in range(there.qsize())][::3]
    extents, sort, before = len(list(arena.all_extents())), arena._sorted, resident(there)
    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "PARTS", 1)
    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "AT_ONCE", 0)
    monkeypatch.setattr(arena, "_sorted", lambda *extent: next(listed) < 0 or sort(*extent))
    look_for_idle(arena)
    look_for_idle(arena)
    while arena.is_giving_back:
        arena.mind_idle()
    assert extents > 10
    assert next(listed) <= extents
    assert resident(there) < before * 2 // 3
    assert kept


def test_small_messages_between_parts_of_what_is_given_back_stay_within_the_capacity(
    medium_ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of their blocks have been given back, and others have taken that memory."""
    there, slow, other = medium_ctx.Queue(), medium_ctx.Queue(), medium_ctx.Queue()
    arena = medium_ctx.tensorpipe_attachment().arena
    for number in range(arena.capacity // 4096 * 9 // 10):
        (there if number % 100 else slow).put(octets(3000))
    while there.qsize():
        there.get(copy=True)
    arena.reclaim()  # as where there was no room in between
    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "PARTS", 1)
    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "AT_ONCE", 0)
    look_for_idle(arena)
    look_for_idle(arena)
    for _ in range(8):
        arena.mind_idle()
    assert arena.is_giving_back

    def fill_nearly() -> None:
        while resident(other) < arena.capacity - MIB:
            other.put(octets(200_000))

    with Helper(fill_nearly), contextlib.suppress(Full):
        while True:
            there.put(octets(3000), timeout=0)
    assert resident(there) <= arena.capacity + MIB


@pytest.mark.slow
def test_a_get_that_waits_gives_all_idle_memory_back_as_soon_as_it_is_due(medium_ctx: Any) -> None:
    """Though each part takes long, as here: no look comes between them."""
    there, told = medium_ctx.Queue(), medium_ctx.Queue()

    def read_and_wait() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensorpipe_ipc.memory.arena, "AT_ONCE", 1e-9)
            patch.setattr(tensorpipe_ipc.memory.arena, "PARTS", 1)
            for number in range(24):
                assert there.get(copy=True)[-1] == number
            told.put("read")
            there.get()

    child = in_child(read_and_wait)
    for number in range(24):
        there.put(octets(500_000, number))
    assert told.get(timeout=LIMIT) == "read"
    wait_until(lambda: resident(there) < MIB)
    there.put("end")
    assert reap(child) == 0


@pytest.mark.parametrize("comes", ["while it sleeps", "once it has counted"])
def test_a_put_behind_a_message_beyond_the_capacity_waits_for_its_reader_before_it_looks(
    ctx: Any, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """A look at all memory takes longer than that, and finds nothing: each put of a stream would look."""
    _full, there, arena, looks = _filled(ctx), ctx.Queue(4), ctx.tensorpipe_attachment().arena, list[Any]()
    there.put(octets(600_000, 0))
    with pytest.raises(queue.Full):
        there.put(octets(600_000, 1), timeout=0.1)
    reclaim, sleep, qsize, got = arena.reclaim, time.sleep, OpenQueue.qsize, list[int]()

    def read(seconds: float) -> None:
        sleep(seconds)
        if qsize(open_queue):
            got.append(int(there.get(copy=True)[-1]))

    def read_after(queue: OpenQueue) -> int:
        count = qsize(queue)
        read(0)
        return count

    open_queue = open_queue_of(shared_queue_of(there))
    with monkeypatch.context() as patch:
        patch.setattr(arena, "reclaim", lambda *kinds: looks.append(kinds) or reclaim(*kinds))
        if comes == "while it sleeps":
            patch.setattr(time, "sleep", read)
        else:
            patch.setattr(OpenQueue, "qsize", read_after)
        for number in range(1, 20):
            there.put(octets(600_000, number), timeout=LIMIT)
    assert got == list(range(19))
    assert len(looks) < 5


def _worked_on(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, after some work: an idle worker is not kept waiting, and its call looks."""
    time.sleep(0.02)
    return tensor.clone()


def test_an_executor_beside_a_queue_that_fills_the_arena_does_not_look_at_it_for_each_call(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a call waits, others rest after a look in vain, for ten times as long. Here they rest to the end."""
    monkeypatch.setattr(call_queue, "REST", 1_000_000)
    _full, calls, looks = _filled(ctx), 60, _looks_of(ctx.tensorpipe_attachment().arena)
    with ProcessPoolExecutor(4, mp_context=ctx) as executor:  # with room for five of these calls
        futures = [executor.submit(_worked_on, octets(100_000, number)) for number in range(calls)]
        for number, future in enumerate(futures):
            assert (future.result(LIMIT) == octets(100_000, number)).all()
    del executor, futures, future
    assert len(looks) < calls // 2


def _meet(pipes: Any, x: Any) -> Any:
    """Return as soon as the other call is there."""
    os.write(pipes[int(x[-1])][1], b"1")
    assert select.select([pipes[1 - int(x[-1])][0]], [], [], LIMIT)[0]
    return x


def test_calls_that_wait_for_each_other_come_to_workers_that_were_late_beside_a_queue_that_fills_the_arena(
    ctx: Any,
) -> None:
    """No result wakes the executor for the second one: it must not hold that back."""
    full, pipes = _filled(ctx), [os.pipe() for _ in range(3)]
    executor = ProcessPoolExecutor(2, ctx, os.read, (pipes[2][0], 1))  # a worker begins with that
    with executor:
        futures = [executor.submit(functools.partial(_meet, pipes), octets(1_000_000, number)) for number in range(2)]
        wait_until(lambda: executor._call_queue.qsize() == 2)  # type: ignore[attr-defined]
        os.write(pipes[2][1], b"12")
        assert [int(future.result(LIMIT)[-1]) for future in futures] == [0, 1]
    for each in sum(pipes, ()):
        os.close(each)
    del futures, full


@pytest.mark.slow
def test_leases_of_what_lay_beyond_the_capacity_pin_no_more_pages_than_the_budget() -> None:
    """They lie on copies within, in blocks that have pages of larger messages. So there is room for messages beside them."""
    ctx = small_context()
    full, others, held = ctx.Queue(), [ctx.Queue() for _ in range(70)], []
    fill(full, 1_000_000)
    for other in others:
        other.put(octets(530_000), timeout=LIMIT)
    while full.qsize():
        full.get(copy=True)
    for other in others:
        with contextlib.suppress(SharedMemoryError):
            held.append(other.get(copy=False, timeout=LIMIT))
        if other.qsize():
            other.get(copy=True)
    assert len(held) >= 30
    fill(full, 1_000_000)
    assert full.qsize() >= 30


def test_a_lease_of_what_lay_beyond_the_capacity_takes_no_more_pages_than_it_needs(ctx: Any) -> None:
    """All that lies free within has pages of a larger message, and the budget is just large enough."""
    full, empty = ctx.Queue(), ctx.Queue()
    set_lease_budget(ctx.tensorpipe_attachment().leases, 5 * MIB // 2)
    full.put(octets(4 * MIB - 4096), timeout=LIMIT)
    fill(full, 20_000)
    empty.put(octets(9 * MIB // 4), timeout=LIMIT)
    full.get(copy=True)
    assert segment_at(empty.get(copy=False, timeout=LIMIT).data_ptr())


class _Fields(torch.utils.data.Dataset[dict[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[int, torch.Tensor]:
        return {field: torch.full((40_000,), index, dtype=torch.uint8) for field in range(5)}


def test_a_dataloader_beside_a_queue_that_fills_the_arena_does_not_look_at_all_that_is_there(ctx: Any) -> None:
    """Each tensor of a batch asks for shared memory, and has memory of its own. The loader has several requests out."""
    _full, looks = _filled(ctx), torch.zeros(1, dtype=torch.int64).share_memory_()
    arena = ctx.tensorpipe_attachment().arena
    collect = arena.collect
    arena.collect = lambda nbytes: looks.add_(1) and collect(nbytes)
    loader = torch.utils.data.DataLoader(_Fields(), 2, num_workers=1, prefetch_factor=4, multiprocessing_context=ctx)
    for number, batch in enumerate(loader):
        assert all((batch[field][:, 0] == torch.tensor([2 * number, 2 * number + 1])).all() for field in range(5))
    assert int(looks) < 20, "of 100 tensors, and of 20 batches"


def test_messages_of_several_sizes_beside_a_queue_that_fills_the_arena_leave_each_other_their_blocks(ctx: Any) -> None:
    """Of two processes, too. Their memory is looked at as a whole a few times only."""
    full, there, back = _filled(ctx), ctx.Queue(), ctx.Queue()
    before = resident(full)

    def answer() -> None:
        for number in range(40):
            assert there.get(timeout=LIMIT, copy=True)[-1] == number
            back.put(octets(20_000, number), timeout=LIMIT)

    child = in_child(answer)
    looks = _looks_of(ctx.tensorpipe_attachment().arena)
    for number in range(40):
        there.put(octets(20_000 if number % 2 else 300, number), timeout=LIMIT)
        assert back.get(timeout=LIMIT, copy=True)[-1] == number
    assert reap(child) == 0
    assert len(looks) < 20
    assert resident(full) <= before + 5 * 65_536


def test_what_can_never_fit_is_refused_also_after_one_of_half_its_size_was_placed_beyond_the_capacity() -> None:
    """The two have one size class."""
    ctx = small_context(capacity=5 * MIB)
    full, empty = ctx.Queue(), ctx.Queue()
    fill(full, 20_000)
    for _ in range(2):
        empty.put(octets(9 * MIB // 2), timeout=LIMIT)
        assert empty.get(timeout=LIMIT, copy=True).numel() == 9 * MIB // 2
        with pytest.raises(SharedMemoryError, match=f"can never fit: the arena's capacity is {5 * MIB} bytes"):
            empty.put(octets(7 * MIB), timeout=LIMIT)
    assert not empty.qsize()


def test_several_processes_beside_a_queue_that_fills_the_arena_use_each_others_blocks(ctx: Any) -> None:
    """Their messages together are larger than what may lie free beyond the capacity. None looks at all memory each time."""
    full, asks, answers = _filled(ctx), [ctx.Queue() for _ in range(4)], ctx.Queue()
    arena, rounds = ctx.tensorpipe_attachment().arena, 20

    def answer(asked: Any) -> None:
        looks = _looks_of(arena)
        for number in range(rounds):
            assert asked.get(timeout=LIMIT, copy=True)[-1] == number
            answers.put(octets(400_000, number), timeout=LIMIT)
        assert len(looks) < rounds // 2

    children = [in_child(functools.partial(answer, asked)) for asked in asks]
    for number in range(rounds):
        for asked in asks:
            asked.put(octets(400_000, number), timeout=LIMIT)
            assert answers.get(timeout=LIMIT, copy=True)[-1] == number
            assert resident(full) <= 8 * MIB + 3 * MIB // 2
    assert [reap(child) for child in children] == [0] * len(children)


@pytest.mark.parametrize("large", [300, 3 * MIB])
def test_puts_into_many_empty_queues_beside_one_that_fills_the_arena_share_their_looks(large: int, ctx: Any) -> None:
    """Of messages larger than a sixteenth of the capacity, too, beside small ones."""
    _full, others = _filled(ctx), [ctx.Queue() for _ in range(20)]
    looks = _looks_of(ctx.tensorpipe_attachment().arena)
    for number in range(3):
        for other in others:
            for nbytes in (large, 5_000):
                other.put(octets(nbytes, number), timeout=LIMIT)
                assert other.get(timeout=LIMIT, copy=True)[-1] == number
    assert len(looks) < 20, "of 120 puts"


@pytest.mark.slow
def test_where_pages_are_locked_processes_with_messages_of_many_sizes_take_no_more_and_more(ctx: Any) -> None:
    """Nothing is given back there, but a process takes another's block before it makes one more."""
    full, children, largest = _filled(ctx), 6, 400_000
    ctx.tensorpipe_attachment().arena.words[PAGE_LOCKED] = 1
    queues, before = [ctx.Queue() for _ in range(children)], resident(full)

    def work(seed: int) -> None:
        draw, own = random.Random(seed), queues[seed]
        for number in range(2000):
            nbytes = int(2 ** draw.uniform(12, math.log2(largest)))
            own.put(octets(nbytes, number), timeout=LIMIT)
            assert (own.get(timeout=LIMIT, copy=True) == octets(nbytes, number)).all()

    assert [reap(each) for each in [in_child(functools.partial(work, seed)) for seed in range(children)]] == [
        0
    ] * children
    assert resident(full) <= before + 2 * children * (2 * largest), "two blocks of each size class for each"


def test_puts_do_not_count_what_waits_once_the_arena_that_was_full_has_room(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a queue that has spilled that is slow."""
    full, other, counts, qsize = _filled(ctx), ctx.Queue(), list[int](), OpenQueue.qsize
    other.put(octets(8000), timeout=LIMIT)
    other.get(timeout=LIMIT, copy=True)
    drained(full)
    ctx.tensorpipe_attachment().trim()
    monkeypatch.setattr(OpenQueue, "qsize", lambda queue: counts.append(0) or qsize(queue))
    for number in range(100):
        other.put(octets(8000, number), timeout=LIMIT)
    monkeypatch.undo()
    assert [int(each[-1]) for each in drained(other)] == list(range(100))
    assert not counts


@pytest.mark.slow
def test_what_lay_beyond_the_capacity_does_not_for_long_when_another_queue_was_read(ctx: Any) -> None:
    """The memory that filled it was another process's, and lies free with that."""
    full, empty, (done, say_done) = ctx.Queue(), ctx.Queue(), os.pipe()

    def fill_and_stay() -> None:
        fill(full, 20_000)
        os.write(filled[1], b".")
        os.read(done, 1)

    filled = os.pipe()
    child = in_child(fill_and_stay)
    os.read(filled[0], 1)
    empty.put(octets(MIB), timeout=LIMIT)
    assert segment_at(empty.get(timeout=LIMIT).data_ptr()) is None
    while full.qsize():
        full.get(timeout=LIMIT)

    def is_leased() -> bool:
        empty.put(octets(MIB), timeout=LIMIT)
        return segment_at(empty.get(timeout=LIMIT).data_ptr()) is not None

    wait_for(is_leased)
    os.write(say_done, b".")
    assert reap(child) == 0
    for end in (*filled, done, say_done):
        os.close(end)


def test_a_message_lies_within_the_capacity_again_when_there_is_room(ctx: Any) -> None:
    """It can be leased then: beside what filled the arena it was copied."""
    full, empty = ctx.Queue(), ctx.Queue()
    fill(full, 200_000)
    for _ in range(3):
        empty.put(octets(200_000), timeout=LIMIT)
        assert segment_at(empty.get(timeout=LIMIT).data_ptr()) is None
    while full.qsize():
        full.get(timeout=LIMIT)
    ctx.tensorpipe_attachment().trim()
    empty.put(octets(200_000), timeout=LIMIT)
    assert segment_at(empty.get(timeout=LIMIT).data_ptr())


@pytest.mark.slow
def test_what_is_let_go_at_once_after_the_last_queue_is_given_back_though_children_came_between() -> None:
    """They ended long ago: nobody would look again, as no queue is left."""
    there, got = tp.Queue(), []
    for number in range(12):
        there.put(octets(MIB, number))
        got.append(there.get())
        assert reap(in_child(lambda: None)) == 0
    segment = segment_at(got[0].data_ptr())
    del there
    gc.collect()
    del got[2:]
    assert segment.resident() < 3 * MIB
    assert [each.unique().tolist() for each in got] == [[0], [1]]


@pytest.mark.parametrize("between", ["a queue's ends", "a context's", "endpoints"])
def test_what_is_free_is_given_back_with_the_last_queue_though_a_forked_child_keeps_the_segment(between: Any) -> None:
    """A long-lived child, as of another pool, never uses it: each queue of its parent's past cost all that it ever had."""
    if between == "endpoints":
        first, last = tp.Consumer("last", shared_memory="require"), tp.Producer("last")
        putting = in_thread(lambda: [last.put(octets(MIB, n), LIMIT) for n in range(12)])
        got = [first.get(LIMIT) for _ in range(12)][:1]
        putting()
    else:
        ctx = tp.get_context("fork").__class__() if "context" in between else None
        first = last = tp.Queue(ctx=ctx)
        first.put_many([octets(MIB, n) for n in range(12)])
        got = [first.get() for _ in range(12)][:1]
        ctx = None
    segment = segment_at(got[0].data_ptr())
    del got
    with Helper(lambda: None):
        assert segment.resident() > 11 * MIB
        first.close()
        last.close()
        first = last = None
        gc.collect()
        assert segment.resident() < MIB


def test_what_is_free_is_given_back_with_the_last_queue_though_another_process_keeps_a_tensor() -> None:
    """A consumer takes weights and closes, say: it kept all that its producer had ever needed, as long as the weights."""

    def keep() -> Any:
        with tp.Consumer("keeper", bind=False, shared_memory="require") as consumer:
            return [consumer.get(LIMIT) for _ in range(12)][0]

    keeper = Helper(keep)  # before there is the segment: forked later, it would have that from its parent
    with tp.Producer("keeper", bind=True, shared_memory="require") as producer:
        for n in range(12):
            producer.put(octets(MIB, n), LIMIT)
        with keeper:
            assert between_endpoints() > 11 * MIB
            producer.close()
            (segment,) = survey([keeper.pid])
            assert segment.resident < 2 * MIB


@pytest.mark.slow
def test_threads_put_while_others_take_their_memory_away(ctx: Any) -> None:
    """Nothing is ever in two messages: each arrives as it was."""
    queues, failed = [ctx.Queue() for _ in range(3)], []

    def trim() -> None:
        for _ in range(60):
            ctx.trim()

    def use(there: Any, seed: int) -> None:
        try:
            for number in range(150):
                sizes = [(number * 7919 + seed * 31 + each * 104_729) % 90_000 + 1 for each in range(4)]
                for each, nbytes in enumerate(sizes):
                    there.put(octets(nbytes, number + each + seed), timeout=LIMIT)
                for each, nbytes in enumerate(sizes):
                    got = there.get(timeout=LIMIT)
                    assert torch.equal(got, octets(nbytes, number + each + seed))
        except BaseException as error:
            failed.append(error)

    pids = [in_child(trim), in_child(trim)]
    threads = [threading.Thread(target=use, args=(there, seed)) for seed, there in enumerate(queues)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LIMIT)
    assert not failed
    assert [reap(pid) for pid in pids] == [0, 0]


def test_a_put_does_not_wait_for_the_memory_of_another_threads_large_one(
    large_ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the system makes pages for 8 MiB, which may take long, others put small messages and large ones."""
    there, began, goes_on = large_ctx.Queue(), threading.Event(), threading.Event()
    reserve = Segment.reserve

    def reserve_late(segment: Segment, start: int, stop: int) -> bool:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert goes_on.wait(LIMIT)
        return reserve(segment, start, stop)

    monkeypatch.setattr(Segment, "reserve", reserve_late)
    put = in_thread(lambda: there.put(octets(8 * MIB)))
    assert began.wait(LIMIT)
    for nbytes in (100, 3000, 100_000, 5 * MIB):
        there.put(octets(nbytes), timeout=LIMIT)
    with pytest.raises(Full):
        there.put(octets(20 * MIB), timeout=0)  # there is room for no more beside that one
    goes_on.set()
    put()
    assert sum(len(there.get(copy=True)) for _ in range(5)) == 13 * MIB + 103_100


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [100, 3000, 5000])
def test_puts_that_find_no_room_take_none(ctx: Any, nbytes: int) -> None:
    """However often they fail, what lies in the arena stays within its capacity."""
    there = ctx.Queue()

    def fill() -> int:
        with contextlib.suppress(Full):
            while True:
                there.put(octets(nbytes), timeout=0)
        return int(there.qsize())

    most = fill()
    assert [fill() for _ in range(5)] == [most] * 5
    assert resident(there) <= 32 * PART


def test_a_list_that_is_behind_has_no_generation_come_twice(ctx: Any) -> None:
    """An entry may be there when the block's page was given back, and its extent taken anew."""
    there, arena, seen = ctx.Queue(), ctx.tensorpipe_attachment().arena, list[int]()
    keep_pure(there)  # the compiled path takes another one first
    size_class = size_class_of(2600)
    for _ in range(4):
        for _ in range(100):
            there.put(octets(2500))
        block = arena.recent[size_class][-1]
        for _ in range(100):
            there.get(copy=True)
        there.trim()
        first = arena.allocate(2500)
        arena.discard(first)
        arena.free[size_class].append(block)
        there.put(octets(2500))
        assert arena.recent[size_class][-1] == block
        seen.append(arena.words[block >> 3] >> GENERATION_AT)
        there.get(copy=True)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("serializer", ["raw", "numpy"])
@pytest.mark.parametrize("wire_dtype", [None, torch.float16])
def test_a_producer_refuses_what_can_never_fit_before_it_is_gathered(serializer: str, wire_dtype: Any) -> None:
    """It knows the capacity once a consumer has come, and says the sizes at once; no memory is used for it."""
    with (
        tp.Consumer("narrow") as consumer,
        tp.Producer("narrow", serializer=serializer, wire_dtype=wire_dtype) as producer,
    ):
        producer.put(1, timeout=LIMIT)
        assert consumer.get(timeout=LIMIT) == 1
        began = time.monotonic()
        with pytest.raises(SharedMemoryError, match=r"\d{11,12} bytes.* can never fit"):
            producer.put([torch.ones(1, 1000).expand(40_000_000, 1000)], timeout=1)  # 160 GB
        assert time.monotonic() - began < 1
        producer.put(2, timeout=LIMIT)
        assert consumer.get(timeout=LIMIT) == 2


@pytest.mark.parametrize("wire_dtype", [None, torch.float16])
def test_a_producer_that_knows_no_capacity_yet_says_that_there_is_no_memory(wire_dtype: Any) -> None:
    """Nobody has come, and more is to be gathered than there are addresses for."""
    with tp.Producer("nobody", serializer="numpy", wire_dtype=wire_dtype) as producer:
        with pytest.raises(OutOfMemory, match="It was not sent"):
            producer.put(torch.ones(1, 1).expand(1 << 30, 1 << 28), timeout=1)


CONSUMER = """
import sys
import tensorpipe_ipc as tp
import tensorpipe_ipc.memory.arena
from tensorpipe_ipc.memory import arena
arena.headroom = lambda: 2 << 20
with tp.Consumer(sys.argv[1], bind=False, shared_memory="require") as consumer:
    print(len(consumer.get(timeout=15)))
"""


def test_one_capacity_counts_for_both_ends(tmp_path: Path) -> None:
    """A consumer on whose side the machine has less takes what the producer may put."""
    endpoint = f"capacity-{os.getpid()}"
    with tp.Producer(endpoint, bind=True, shared_memory="require") as producer:
        with InFork("-c", CONSUMER, endpoint, folder=tmp_path) as consumer:
            producer.put(octets(5 * MIB), timeout=LIMIT)
            producer.flush(timeout=LIMIT)
            done = consumer.end()
    assert (done.status, done.out) == (0, f"{5 * MIB}\n"), done.err


@pytest.mark.parametrize("serializer", ["raw", "numpy", "torch_save"])
@pytest.mark.parametrize("wire_dtype", [None, torch.float16])
def test_what_can_never_fit_is_refused_before_it_is_gathered(ctx: Any, serializer: str, wire_dtype: Any) -> None:
    """The sizes are named at once, and no memory is used for it."""
    there = ctx.Queue(serializer=serializer, wire_dtype=wire_dtype)
    wide = torch.ones(1, 1000).expand(40_000_000, 1000)  # 160 GB
    conjugate = torch.ones(1, 1000, dtype=torch.complex64).conj().expand(20_000_000, 1000)
    for tree in (wide, [wide], {"x": wide, "y": torch.ones(3)}, conjugate):
        began = time.monotonic()
        with pytest.raises(SharedMemoryError, match=r"\d{11,12} bytes.* can never fit"):
            there.put(tree, timeout=1)
        assert time.monotonic() - began < 1
    there.put(1)
    assert there.get() == 1


def test_a_tree_that_can_never_fit_is_refused_before_all_of_it_is_gathered(ctx: Any) -> None:
    """Each of its tensors would fit: no more is copied than the capacity, and one of them."""
    there, wide = ctx.Queue(), [torch.ones(1, 1000).expand(1000, 1000) for _ in range(400)]  # 1.6 GB
    before = peak_memory(start=True)
    with pytest.raises(SharedMemoryError, match=r"of the 400 tensors take \d+ bytes.* can never fit"):
        there.put(wide)
    assert peak_memory() - before < 100 * MIB
    there.put(1)
    assert there.get() == 1


@pytest.mark.parametrize("page", [pytest.param(16 << 10, marks=pytest.mark.kills), 64 << 10])
def test_pages_may_be_larger(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on arm64: what is given back are whole pages of that size, and nothing else is lost."""
    monkeypatch.setattr(Segment, "page", page)
    ctx = small_context(capacity=32 * PART)
    there = ctx.Queue()
    for nbytes in (400, 9000, 40_000, 100_000, 5 * PART):
        burst(there, nbytes, worth(20 * PART, nbytes))
        there.put(octets(nbytes, 9))
        there.put(octets(20 * PART), timeout=0)
        assert torch.equal(there.get(), octets(nbytes, 9))
        assert len(there.get(copy=True)) == 20 * PART
        assert resident(there) <= 33 * PART
    assert ctx.trim() > 0
    assert resident(there) < 2 * PART
    vars(ctx).clear()


def test_a_killed_consumers_memory_is_found_by_who_waits(ctx: Any) -> None:
    """One that held leases, with another alive that has free memory: together they are enough."""
    there, other = ctx.Queue(), ctx.Queue()
    there.put(octets(10 * PART))
    there.put(0)

    def hold() -> Any:
        burst(other, 5 * PART, 2)
        return there.get(copy=False)

    with Helper(hold) as holder:
        with pytest.raises(Full):
            there.put(octets(25 * PART), timeout=0)
        os.kill(holder.pid, signal.SIGKILL)
        there.put(octets(25 * PART), timeout=LIMIT)
        assert (there.get(), len(there.get(copy=True))) == (0, 25 * PART)
        with pytest.raises(queue.Empty):
            there.get_nowait()


def test_threads_make_queues_while_another_looks_whether_any_is_taken() -> None:
    """It looks at all that there are; that there are more of them meanwhile is no error."""
    with tp.Consumer("grown") as consumer:
        attachment = standby_attachment_of(consumer)
        ends, done = next(iter(attachment.queues.values())), threading.Event()
        numbers = range(1 << 40, (1 << 40) + 3000)

        def make() -> None:
            while not done.is_set():
                for number in numbers:
                    attachment.queues[number] = ends
                for number in numbers:
                    del attachment.queues[number]

        making, interval = in_thread(make), sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                attachment.words[GROWN] = 1
                attachment.rest()
        finally:
            sys.setswitchinterval(interval)
            done.set()
            making()


def put_and_stay(there: Any, stays: Any) -> None:
    for number in range(20):
        there.put(octets(MIB, number))
    assert stays.wait(LIMIT)  # and not in a queue, where it would give idle memory back


def fork_one_that_puts(there: Any, stays: Any) -> None:
    assert reap(in_child(lambda: put_and_stay(there, stays))) == 0


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.kills)])
def test_a_child_of_one_that_has_not_used_its_queue_keeps_no_memory(method: str) -> None:
    """Its parent was given the queue, and forks: the child is no copy of anything that was in use."""
    ctx = tp.get_context(method)
    there, stays = ctx.Queue(), ctx.Event()
    process = ctx.Process(target=fork_one_that_puts, args=(there, stays))
    process.start()
    for number in range(20):
        assert there.get(timeout=LIMIT)[0] == number
    wait_for(lambda: there.trim() >= 0 and resident(there) < MIB)
    stays.set()
    process.join(LIMIT)
    assert process.exitcode == 0
    process.close()
    vars(ctx).clear()


def test_a_search_for_room_goes_on_though_another_thread_puts_a_size_that_was_never_put(ctx: Any) -> None:
    """The first thread looks through what is free, size by size; the other adds a size each time it looks at one."""
    there, sizes = ctx.Queue(), iter([900, 1_900, 3_900, 10_000, 20_000, 40_000, 80_000])
    there.put(octets(7 * MIB))
    searched = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if event == "call" and frame.f_code.co_filename == tensorpipe_ipc.memory.arena.__file__:
            if frame.f_code.co_name == "<genexpr>" and (nbytes := next(sizes, 0)):
                searched.append(nbytes)
                in_thread(lambda: there.put(octets(nbytes, nbytes), timeout=LIMIT))()
        return None

    def put_traced() -> None:
        sys.settrace(trace)
        try:
            there.put(octets(2 * MIB), timeout=0.01)
        finally:
            sys.settrace(None)

    with pytest.raises(Full):
        in_thread(put_traced)()
    assert len(searched) > 1
    assert [(len(each), int(each[0])) for each in drained(there)[1:]] == [(nbytes, nbytes % 251) for nbytes in searched]


@pytest.mark.slow
def test_a_put_after_a_burst_makes_no_pages_of_what_was_given_back(large_ctx: Any) -> None:
    """It looks at which of the messages that lay beyond the pipe still wait: their memory has gone back."""
    there, beside, count = large_ctx.Queue(), large_ctx.Queue(), 20_000
    for number in range(count):
        there.put(number)
        if not number % 1000:
            beside.put(number)  # so that no part of the memory is free as a whole
    for number in range(count):
        assert there.get(timeout=LIMIT) == number
    there.trim()
    before = resident(there)
    there.put(0)
    assert resident(there) - before <= 8 * os.sysconf("SC_PAGE_SIZE")
    assert there.get(timeout=LIMIT) == 0
