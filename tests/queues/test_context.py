"""get_context(): multiprocessing's contexts with our queues, which share one arena, here and in children."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import threading
import time
import weakref
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import Any

import echoing_process
import pytest
import torch
from arenas import CAPACITY, small_context
from inside import reading_end_of, set_lease_budget, shared_queue_of

import tensorpipe_ipc as tp
from tensorpipe_ipc.errors import SharedMemoryError

LIMIT = 20
METHODS = ["fork", "spawn", "forkserver"]


def segments() -> Any:
    """Return how many mappings of segments this process has, and how many descriptors lead to one."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:tensorpipe_ipc (" in line for line in maps)
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return mapped, sum("memfd:tensorpipe_ipc (" in link for link in links)


@pytest.mark.parametrize("method", METHODS)
def test_a_context_is_multiprocessings_with_our_queues(method: str) -> None:
    ctx = tp.get_context(method)
    assert isinstance(ctx, BaseContext)
    assert isinstance(ctx, type(multiprocessing.get_context(method)))
    assert ctx.get_start_method() == method
    assert issubclass(ctx.Process, multiprocessing.get_context(method).Process)
    assert tp.get_context(method) is ctx.get_context() is ctx.get_context(method) is ctx
    assert type(ctx.get_context("spawn")).__module__ == "tensorpipe_ipc.queues.context"
    assert (type(ctx.Queue()), type(ctx.SimpleQueue())) == (tp.Queue, tp.SimpleQueue)
    assert type(ctx.JoinableQueue(3)) is tp.JoinableQueue
    assert ctx.Lock().acquire(timeout=1)


def test_the_default_method_is_multiprocessings_and_stays_unset() -> None:
    chosen = multiprocessing.get_start_method(allow_none=True)
    expected = chosen or multiprocessing.get_all_start_methods()[0]
    assert tp.get_context().get_start_method() == expected
    assert multiprocessing.get_start_method(allow_none=True) == chosen
    with pytest.raises(ValueError, match="nosuch"):
        tp.get_context("nosuch")


def test_a_pool_works() -> None:
    with tp.get_context("fork").Pool(1) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
        pool.close()
        pool.join()


def test_all_queues_of_a_context_share_one_arena_which_is_made_at_first_use_and_goes_with_it() -> None:
    before = segments()
    ctx = small_context().__class__()
    assert segments() == before
    queues = [ctx.Queue(), ctx.Queue(3), ctx.JoinableQueue(), shared_queue_of(ctx.SimpleQueue())]
    tensor = ctx.empty(3)
    assert len({id(shared_queue_of(each).attachment) for each in queues}) == 1
    assert segments()[0] == before[0] + 1
    del ctx, queues, tensor
    assert segments() == before


@pytest.mark.parametrize("given", [None, multiprocessing.get_context("fork")], ids=["none", "multiprocessing's"])
@pytest.mark.parametrize("last", ["queue", "lease"])
def test_without_a_context_of_ours_queues_share_a_default_arena_until_the_last_user_goes(given: Any, last: Any) -> None:
    before = segments()
    one, other = tp.Queue(ctx=given), tp.Queue()
    assert shared_queue_of(one).attachment is shared_queue_of(other).attachment
    one.put(torch.ones(100_000))
    kept = one.get() if last == "lease" else other
    del one, other
    assert segments()[0] == before[0] + 1
    if last == "lease":
        assert kept.sum() == 100_000
    del kept
    assert segments() == before


def use(ctx: Any, queues: Any, back: Any) -> None:
    """In a child: whether what was pickled apart has met again; and a lease goes on without a copy."""
    torch.set_num_threads(1)  # those of OpenMP do not survive a fork
    (one,), (other,) = queues
    x = one.get(timeout=LIMIT)
    same = shared_queue_of(one).attachment is shared_queue_of(other).attachment is ctx.tensorpipe_attachment()
    other.put(x, move=True)
    y = ctx.empty(100_000).fill_(5)
    other.put(y, move=True)
    back.put((same, segments(), tuple(x.shape), tuple(y.shape)))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_child_has_the_same_arena_once(method: str) -> None:
    ctx = small_context(method)
    one, other = ctx.Queue(), ctx.Queue(2)
    process = ctx.Process(target=use, args=(ctx, ([one], [other]), ctx.Queue()))
    back = process._args[2]
    process.start()
    x = ctx.empty(100_000).fill_(3)  # not before: what a forked child may read is copied
    address = x.data_ptr()
    one.put(x, move=True)
    got = other.get(timeout=LIMIT)
    assert (got.data_ptr(), got.sum()) == (address, 300_000)
    assert other.get(timeout=LIMIT).sum() == 500_000
    same, (mapped, _), *shapes = back.get(timeout=LIMIT)
    assert (same, mapped, shapes) == (True, 1, [(0,), (0,)])
    process.join(LIMIT)
    assert process.exitcode == 0
    process.close()
    vars(ctx).clear()


def test_a_copy_of_a_context_is_the_context() -> None:
    """A program that copies its DataLoader copies the context in it."""
    ctx = small_context("fork")
    ctx.Queue()
    assert copy.deepcopy([ctx])[0] is copy.copy(ctx) is ctx


def test_a_segment_unpickled_twice_is_attached_once() -> None:
    ctx = small_context("spawn")
    attachment = ctx.tensorpipe_attachment()
    rebuild, (segment,) = _reduced(attachment)
    again, (_, size) = _reduced(segment)
    assert again(_Duplicate(os.dup(segment.descriptor)), size) is segment
    assert rebuild(segment) is attachment
    vars(ctx).clear()


class _Duplicate:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def detach(self) -> Any:
        return self.descriptor


def _reduced(thing: Any) -> Any:
    from multiprocessing import context, spawn  # noqa: F401

    context.set_spawning_popen(_Popen())
    try:
        return thing.__reduce__()
    finally:
        context.set_spawning_popen(None)


class _Popen:
    def duplicate_for_child(self, fd: int) -> Any:
        return fd

    def DupFd(self, fd: int) -> Any:
        return fd


def test_empty_makes_tensors_of_any_shape_and_dtype_and_refuses_with_sizes() -> None:
    ctx = small_context()
    for shape in ((), (3,), (0, 3), (2, 3, 4), 5):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2):
            made = ctx.empty(shape, dtype)
            assert made.shape == torch.Size(torch.empty(shape).shape)
            assert made.dtype == dtype
            assert made.is_contiguous()
    held = [ctx.empty(1 << 20).fill_(1) for _ in range(CAPACITY // (1 << 22) - 1)]
    who = rf"pid {os.getpid()} \(alive\) has (16 blocks|.*, of those that were looked at)"  # on a busy machine
    with pytest.raises(SharedMemoryError, match=rf"at most {CAPACITY} bytes, .*; {who}"):
        ctx.empty(1 << 20)
    held.clear()
    assert ctx.empty(1 << 20).fill_(1).sum() == 1 << 20
    del made
    vars(ctx).clear()


def test_empty_is_not_refused_by_the_lease_budget_and_does_not_use_it_up() -> None:
    ctx = small_context()
    leases = ctx.tensorpipe_attachment().leases
    set_lease_budget(leases, 500_000)
    held = [ctx.empty(100_000) for _ in range(10)]
    there = ctx.Queue()
    there.put(torch.ones(100_000))
    held.append(there.get(copy=False))
    del held
    vars(ctx).clear()


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.kills)])
def test_an_echoing_child_of_each_method(method: str) -> None:
    ctx = tp.get_context(method)
    there, back = ctx.Queue(), ctx.Queue()
    process = ctx.Process(target=echoing_process.echo, args=(there, back))
    process.start()
    there.put({"x": torch.ones(100_000), "n": 1})
    assert back.get(timeout=LIMIT)["x"].sum() == 100_000
    there.put(None)
    process.join(LIMIT)
    assert process.exitcode == 0
    process.close()


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.kills)])
def test_a_program_that_a_worker_runs_has_nothing_of_its_queues(method: str) -> None:
    """One that goes on in the background would keep them, and all that waits in them, after everybody else has ended."""
    ctx = tp.get_context(method)
    bounded, back = ctx.Queue(3), ctx.JoinableQueue()
    process = ctx.Process(target=echoing_process.tell_what_a_program_has, args=(bounded, back))
    process.start()
    has = back.get(timeout=LIMIT)
    process.join(LIMIT)
    process.close()
    assert [each for each in has if "tensorpipe_ipc" in each] == []


def test_what_reaches_for_a_queues_reader() -> None:
    """``connection.wait`` waits for several queues by their ``_reader``, and finds them again in what it returns."""
    queues = [tp.Queue(), tp.get_context("fork").Queue(3), tp.JoinableQueue()]
    by_reader = {reading_end_of(each): each for each in queues}
    assert connection.wait([reading_end_of(each) for each in queues], 0) == []
    assert not any(reading_end_of(each).poll() for each in queues)
    queues[1].put("there")
    ready = connection.wait(list(by_reader), 10)
    assert ready == [reading_end_of(queues[1])]
    assert reading_end_of(queues[1]).poll()
    assert by_reader[ready[0]].get() == "there"
    assert not reading_end_of(queues[1]).poll(0.01)


@pytest.mark.parametrize("kind", [tp.Queue, tp.JoinableQueue, tp.SimpleQueue])
def test_a_queues_reader_is_the_same_one_as_long_as_anybody_has_it(kind: Any) -> None:
    """Programs look for it by ``is`` in what ``wait`` returns. And it keeps no queue."""
    one, other = kind(), kind()
    one.put("there")
    (ready,) = connection.wait([one._reader, other._reader], 10)
    assert ready is one._reader
    assert ready is not other._reader
    assert one._writer is not other._writer
    writer = one._writer
    assert writer is one._writer
    gone = weakref.ref(one)
    del one, ready, writer
    assert gone() is None


def test_a_queues_reader_is_not_ready_where_get_would_wait() -> None:
    """Though something is in the pipe that only wakes others; and it is ready where ``get`` would say that all is over."""
    there = tp.Queue()
    shared_queue_of(there).record.set(shared_queue_of(there).record.spilled)
    shared_queue_of(there).tickets.ring_doorbell()
    began = time.monotonic()
    assert not reading_end_of(there).poll(0.1)
    assert time.monotonic() - began >= 0.1
    timer = threading.Timer(0.1, there.put, args=["there"])
    timer.start()
    assert reading_end_of(there).poll(None)
    timer.join()
    assert reading_end_of(there).recv() == "there"
    there.shutdown()
    assert reading_end_of(there).poll(None)
    with pytest.raises(tp.ShutDown):
        reading_end_of(there).recv()
