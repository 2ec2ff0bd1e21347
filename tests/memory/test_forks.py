"""Forks while tensors lie on shared memory: nobody writes under anybody's tensor, and what was let go comes back."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arenas import CAPACITY, blocks_in_use, left_in, small_context
from children import in_thread
from crash_points import SIGNAL_CHECKS, in_child, reap, run_traced
from inside import set_lease_budget, shared_queue_of
from programs import ran, ran_in_fork

import tensorpipe_ipc as tp
from tensorpipe_ipc.errors import Empty, Full, SharedMemoryError

SIZE = 100_000  # items
LIMIT = 20


class Gate:
    """A pipe by which one process lets another go on."""

    def __init__(self) -> None:
        self.descriptors = self._read, self._write = os.pipe()

    def wait(self) -> None:
        """Until it is open. Bounded by the alarm of each child."""
        assert os.read(self._read, 1)

    def open(self) -> None:
        """For one who waits."""
        os.write(self._write, b"x")

    def close(self) -> None:
        """Nobody uses it any more."""
        os.close(self._read)
        os.close(self._write)


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    """Five gates."""
    made = [Gate() for _ in range(5)]
    yield made
    for gate in made:
        gate.close()


def leased(ctx: Any, value: float = 7.0, size: int = SIZE, **how: Any) -> torch.Tensor:
    """A tensor that was got from a queue."""
    there = ctx.Queue()
    there.put(torch.full((size,), value))
    return there.get(**how)  # type: ignore[no-any-return]


def use_memory(ctx: Any) -> None:
    """Write to blocks of all kinds that are free."""
    there = ctx.Queue()
    for size in (10, SIZE, SIZE, SIZE):
        there.put(torch.full((size,), 100.0))
        kept = there.get()
    del kept


@pytest.mark.parametrize("uses_queues", [False, True], ids=["only forks", "uses queues"])
def test_a_fork_of_a_fork_reads_what_its_grandparent_let_go(ctx: Any, gates: list[Gate], uses_queues: bool) -> None:
    """The child in between has ended by then, and had forked another one before."""
    box, (ready, go, *_) = [leased(ctx)], gates

    def grandchild() -> None:
        ready.open()
        go.wait()
        assert box[0].unique().tolist() == [7.0]

    def child() -> None:
        if uses_queues:
            use_memory(ctx)
        assert reap(in_child(lambda: None)) == 0
        in_child(lambda: os._exit(0) if in_child(grandchild) else None)

    assert reap(in_child(child)) == 0
    ready.wait()
    box.clear()
    for _ in range(3):
        assert blocks_in_use(ctx) == {"held": 1}
        use_memory(ctx)
    go.open()
    wait_until(lambda: blocks_in_use(ctx) == {})


def wait_until(happened: Callable[[], bool]) -> None:
    """Poll for what another process does."""
    deadline = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("last", ["child", "parent"])
def test_a_move_that_waits_for_room_leaves_a_child_forked_meanwhile_its_own(
    ctx: Any, gates: list[Gate], last: str
) -> None:
    """Neither what the child writes nor what the receiver writes is seen by the other."""
    there, sent, (wrote, go, *_) = ctx.Queue(1), ctx.empty(SIZE).fill_(1), gates
    there.put("full")
    thread = threading.Thread(target=there.put, args=(sent,), kwargs={"move": True, "timeout": LIMIT})
    thread.start()
    wait_until(lambda: there.statistics().waits == 0 and thread_sleeps(thread))

    def child() -> None:
        go.wait()
        assert sent.unique().tolist() == [1.0]
        sent.fill_(7)
        wrote.open()
        go.wait()
        assert sent.unique().tolist() == [7.0]

    pid = in_child(child)
    assert there.get() == "full"
    thread.join(LIMIT)
    got = there.get(timeout=LIMIT)
    go.open()
    wrote.wait()
    assert got.unique().tolist() == [1.0]
    got.fill_(3)
    del got
    use_memory(ctx)
    go.open()
    assert reap(pid) == 0
    assert sent.unique().tolist() == [1.0]  # it was copied, and stayed
    there.put(sent, move=True)
    assert sent.shape == (0,)
    assert there.get().unique().tolist() == [1.0]


def thread_sleeps(thread: threading.Thread) -> bool:
    """Return whether a thread waits in the kernel."""
    with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "S"


def test_a_move_keeps_its_timeout_where_a_fork_makes_it_a_copy(ctx: Any, gates: list[Gate]) -> None:
    """The room that it had found is another's then, and the time that is left counts."""
    there, sent, (go, *_) = ctx.Queue(1), ctx.empty(SIZE).fill_(1), gates
    there.put("full")
    outcome: list[Any] = []

    def put() -> None:
        began = time.monotonic()
        try:
            there.put(sent, move=True, timeout=0.6)
            outcome.append("put")
        except Exception as error:
            outcome.append(type(error).__name__)
        outcome.append(time.monotonic() - began)

    thread = threading.Thread(target=put)
    thread.start()
    wait_until(lambda: thread_sleeps(thread))
    pid = in_child(go.wait)
    thread.join(LIMIT)
    go.open()
    assert reap(pid) == 0
    assert outcome[0] == "Full"
    assert outcome[1] < 0.6 + 0.4
    assert there.get() == "full"
    there.put(sent, move=True, timeout=0)
    assert there.get(timeout=0).sum() == SIZE


RECEIVED: dict[str, Callable[[Any], torch.Tensor]] = {
    "a lease": leased,
    "a small lease": lambda ctx: leased(ctx, size=10, copy=False),
    "a lease of 20 KiB": lambda ctx: leased(ctx, size=5000, copy=False),
    "a lease of many": lambda ctx: leased_many(ctx)[1],
    "made in the arena": lambda ctx: ctx.empty(SIZE).fill_(7),
    "made small in the arena": lambda ctx: ctx.empty(3).fill_(7),
    "lent": lambda ctx: ctx.Queue().loan((SIZE,)).__enter__().fill_(7),
    "forwarded": lambda ctx: forwarded(ctx),
    "with history": lambda ctx: leased(ctx).requires_grad_(),
}


def leased_many(ctx: Any) -> list[torch.Tensor]:
    """Small leases that came together."""
    there = ctx.Queue()
    there.put_many([torch.full((20,), 7.0)] * 3)
    return there.get_many(3, copy=False)  # type: ignore[no-any-return]


def forwarded(ctx: Any) -> torch.Tensor:
    """Put a leased tensor with ``move=True`` and return it as it came, by reference."""
    there = ctx.Queue()
    there.put(leased(ctx), move=True)
    return there.get()  # type: ignore[no-any-return]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", RECEIVED)
def test_what_a_child_writes_does_not_reach_its_parent(ctx: Any, name: str, depth: int) -> None:
    """It has the values that were there when it was forked, and then its own; so has each child of a child."""
    tensor = RECEIVED[name](ctx)

    def child(left: int) -> None:
        value = 7.0 if left == depth else 10.0 * (left + 1)
        assert tensor.detach().unique().tolist() == [value]
        tensor.detach().fill_(10 * left)
        use_memory(ctx)
        if left > 1:
            assert reap(in_child(lambda: child(left - 1))) == 0
        assert tensor.detach().unique().tolist() == [10.0 * left]
        if tensor.requires_grad:
            (tensor * tensor).sum().backward()
            assert tensor.grad is not None
            assert tensor.grad.unique().tolist() == [20.0 * left]

    pid = in_child(lambda: child(depth))
    assert reap(pid) == 0
    assert tensor.detach().unique().tolist() == [7.0]
    use_memory(ctx)
    assert tensor.detach().unique().tolist() == [7.0]
    tensor = torch.empty(0)
    assert blocks_in_use(ctx) == {}


def test_a_child_that_can_have_no_pages_of_its_own_is_warned(ctx: Any) -> None:
    """The kernel bounds how many mappings a process may have."""

    def parent() -> None:
        tensor = leased(ctx)
        libc, pages = ctypes.CDLL(None), mmap.mmap(-1, 1 << 30)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        for page in range(0, 1 << 30, 2 * mmap.PAGESIZE):
            if libc.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ):
                break
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            pid = os.fork()
        if not pid:
            assert "what it writes there may reach its parent: Cannot allocate memory" in str(warned[-1].message)
            assert tensor[5] == 7
            os._exit(0)
        assert reap(pid) == 0

    assert reap(in_child(parent)) == 0


def test_what_a_child_writes_does_not_reach_an_end_of_its_parent(ctx: Any) -> None:
    """The same for what came through an endpoint, and for what is lent by one."""
    with tp.Consumer("forks") as consumer, tp.Producer("forks") as producer:
        producer.put(torch.full((SIZE,), 7.0), timeout=LIMIT)
        tensor = consumer.get(timeout=LIMIT)
        with producer.loan((SIZE,)) as lent:
            lent.fill_(7)

            def child() -> None:
                for each in (tensor, lent):
                    assert each.unique().tolist() == [7.0]
                    each.fill_(8)

            assert reap(in_child(child)) == 0
            assert tensor.unique().tolist() == lent.unique().tolist() == [7.0]
        assert consumer.get(timeout=LIMIT).unique().tolist() == [7.0]
        assert producer.statistics().transport == "shared memory"


def test_a_child_that_wrote_to_inherited_tensors_still_works_with_the_memory_around_them(ctx: Any) -> None:
    """Leases of all sizes lie between blocks that the child uses: it gets, puts, moves and makes, and so does its parent."""
    there, back = ctx.Queue(), ctx.Queue()
    sizes = [10, 100, 1000, 5000, 10_000, SIZE] * 5
    for size in sizes:
        there.put(torch.full((size,), 7.0))
    held = [there.get(copy=False) for _ in sizes]
    for size in sizes:
        there.put(torch.full((size,), float(size)))

    def child() -> None:
        for tensor in held:
            tensor.zero_()
        for size in sizes:
            got = there.get(timeout=LIMIT, copy=False)
            assert got.unique().tolist() == [float(size)]
            back.put(got.add_(1), move=True)
            back.put(ctx.empty(size).fill_(size + 2), move=True)
        assert all(tensor.sum() == 0 for tensor in held)

    pid = in_child(child)
    for size in sizes:
        for more in (1, 2):
            assert back.get(timeout=LIMIT).unique().tolist() == [size + more]
    assert all(tensor.unique().tolist() == [7.0] for tensor in held)
    assert reap(pid) == 0
    held.clear()
    ctx.tensorpipe_attachment().recover_dead()
    assert blocks_in_use(ctx) == {}


def test_a_child_that_recovers_its_killed_parent_leaves_it_what_the_child_reads(ctx: Any, gates: list[Gate]) -> None:
    """The dead parent's leases are the child's to read, and are nobody's when the child has ended."""
    ready, go, *_ = gates

    def parent() -> None:
        tensor = leased(ctx)

        def child() -> None:
            go.wait()
            tensor[0] = 8
            for _ in range(3):
                ctx.tensorpipe_attachment().recover_dead(adopt_extents=True)
                use_memory(ctx)
            assert (tensor[0], tensor[1:].unique().tolist()) == (8, [7.0])

        in_child(child)
        ready.open()
        signal.pause()

    pid = in_child(parent)
    ready.wait()
    os.kill(pid, signal.SIGKILL)
    reap(pid)
    ctx.tensorpipe_attachment().recover_dead(adopt_extents=True)
    use_memory(ctx)
    assert blocks_in_use(ctx) == {"held": 1}
    go.open()
    wait_until(lambda: left_in(ctx) == {})


def test_a_child_that_closes_all_descriptors_reads_what_its_parent_let_go(ctx: Any, gates: list[Gate]) -> None:
    """As daemons do, which fork once more."""
    box, (go, *_) = [leased(ctx)], gates

    def daemon() -> None:
        kept = {*go.descriptors, 2}
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in kept:
                with contextlib.suppress(OSError):
                    os.close(number)
        go.wait()
        assert box[0].unique().tolist() == [7.0]
        os._exit(0)

    pid = in_child(daemon)
    box.clear()
    for _ in range(3):
        assert blocks_in_use(ctx) == {"held": 1}
        use_memory(ctx)
    go.open()
    assert reap(pid) == 0
    assert blocks_in_use(ctx) == {}


def test_a_long_lived_child_keeps_what_it_can_read_and_no_more(ctx: Any, gates: list[Gate]) -> None:
    """A lease that was made after it was forked, and let go after another fork, comes back when that one's child is gone."""
    go, short, *_ = gates
    old = [leased(ctx)]
    pid = in_child(go.wait)
    recent = [leased(ctx, 3.0)]
    other = in_child(short.wait)
    recent.clear()
    assert blocks_in_use(ctx) == {"held": 2}
    short.open()
    reap(other)
    assert blocks_in_use(ctx) == {"held": 1}
    old.clear()
    assert blocks_in_use(ctx) == {"held": 1}
    go.open()
    reap(pid)
    assert blocks_in_use(ctx) == {}


def test_what_a_child_lets_go_is_free_though_the_child_lives(ctx: Any, gates: list[Gate]) -> None:
    """Once its parent has let go, too. A child of the child counts, and the memory is shared again in all of them."""
    wrote, first, second, third, _ = gates
    box = [leased(ctx), leased(ctx, 3.0)]

    def child() -> None:
        box[0].fill_(9)

        def grandchild() -> None:
            box.pop(0)
            third.wait()
            assert box.pop().unique().tolist() == [3.0]
            wrote.open()
            third.wait()
            use_memory(ctx)

        pid = in_child(grandchild)
        assert box[0].unique().tolist() == [9.0]
        box.clear()
        wrote.open()
        first.wait()
        use_memory(ctx)
        third.open()
        second.wait()
        third.open()
        assert reap(pid) == 0

    pid = in_child(child)
    wrote.wait()
    assert box[0].unique().tolist() == [7.0]
    box.clear()
    use_memory(ctx)
    assert blocks_in_use(ctx) == {"held": 2}  # the grandchild has one
    first.open()
    wrote.wait()
    ctx.tensorpipe_attachment().recover_dead()
    assert blocks_in_use(ctx) == {}
    use_memory(ctx)
    second.open()
    assert reap(pid) == 0


def test_a_line_of_processes_each_forked_by_the_one_before_needs_few_rows(ctx: Any, gates: list[Gate]) -> None:
    """Each has a lease when it forks and ends, and the next one lets go of it."""
    done, *_ = gates
    rows = ctx.tensorpipe_attachment().rows

    def generation(left: int) -> None:
        kept = leased(ctx, float(left))
        if left and os.fork():
            os._exit(0)
        assert kept.unique().tolist() == [float(left)]
        del kept
        if left:
            generation(left - 1)
        ctx.tensorpipe_attachment().recover_dead()
        assert len(rows.used()) < 6
        done.open()

    assert reap(in_child(lambda: generation(12))) == 0
    done.wait()


@pytest.mark.slow
def test_epochs_with_fresh_workers_and_batches_alive_at_the_fork_cost_no_more_memory(ctx: Any) -> None:
    """A queue uses memory that workers of an earlier epoch kept again, though memory is never short."""
    there, batches, resident = ctx.Queue(), list[torch.Tensor](), list[int]()
    for _ in range(12):
        workers = [in_child(lambda: there.put(torch.ones(SIZE))) for _ in range(2)]
        batches.append(there.get(timeout=LIMIT))
        batches.append(there.get(timeout=LIMIT))
        for worker in workers:
            reap(worker)
        assert all(batch.sum() == SIZE for batch in batches)
        del batches[:-1]  # the last is alive when the next epoch's are forked
        time.sleep(0.11)  # so seldom does it look
        resident.append(there.statistics().resident)
    # How many are kept at a time, until it looks again, chance has it: fewer than one for each of eleven epochs.
    assert resident[-1] - resident[0] <= 7 * (4 * SIZE + 4096)
    batches.clear()


def test_a_get_that_waits_gives_back_what_children_kept(ctx: Any, gates: list[Gate]) -> None:
    """Else others would find no room for as long as nothing comes."""
    there, data, (helped, go, *_) = ctx.Queue(), ctx.Queue(), gates
    leases = ctx.tensorpipe_attachment().leases
    set_lease_budget(leases, CAPACITY)

    def produce() -> None:
        large = torch.ones(CAPACITY - (8 << 20), dtype=torch.uint8)
        data.put(large)
        helped.wait()
        data.put("waits, so that the next one has to find room")
        go.open()
        data.put(large, timeout=LIMIT / 2)
        there.put("done")

    pid = in_child(produce)
    got = data.get(copy=False, timeout=LIMIT)
    helper = in_child(go.wait)
    del got
    helped.open()
    assert there.get() == "done"
    assert reap(pid) == reap(helper) == 0


def _polled(there: Any) -> None:
    with contextlib.suppress(Empty):
        there.get_nowait()


def _put_in_vain(full: Any) -> None:
    with contextlib.suppress(Full):
        full.put(1)
        full.put(2, timeout=0.2)


_SMALL_CALLS: dict[str, Callable[[Any, Any], object]] = {
    "puts": lambda there, own: there.put(1),
    "puts and gets": lambda there, own: (there.put(1), there.get(timeout=LIMIT)),
    "puts and gets copies": lambda there, own: (there.put(torch.ones(SIZE)), there.get(timeout=LIMIT, copy=True)),
    "puts and gets many": lambda there, own: (there.put_many([1, 2]), there.get_many(2, LIMIT)),
    "polls": lambda there, own: _polled(own.Queue()),
    "waits to put": lambda there, own: _put_in_vain(own.Queue(1)),
}


@pytest.mark.parametrize("memory", ["the same", "another"])
@pytest.mark.parametrize("calls", _SMALL_CALLS)
def test_what_a_child_kept_comes_back_whatever_its_parent_does(
    ctx: Any, gates: list[Gate], calls: str, memory: str
) -> None:
    """Others find room by that, though the parent makes no lease, nor waits, and may use queues of another memory only."""
    own = ctx if memory == "the same" else small_context()
    there, data, (helped, *_) = own.Queue(), ctx.Queue(), gates
    set_lease_budget(ctx.tensorpipe_attachment().leases, CAPACITY)
    large = torch.ones(CAPACITY - (8 << 20), dtype=torch.uint8)
    data.put(large)
    got = data.get(copy=False, timeout=LIMIT)
    helper = in_child(helped.wait)
    del got
    data.put("waits, so that the next one has to find room")
    helped.open()
    assert reap(helper) == 0
    producer = in_child(lambda: data.put(large, timeout=LIMIT / 2))
    ended, status = 0, 0
    while not ended:  # at the latest when the put gives up
        _SMALL_CALLS[calls](there, own)
        ended, status = os.waitpid(producer, os.WNOHANG)
    assert status == 0


def _joined(own: Any) -> Any:
    """Return a queue whose only task is not done."""
    made = own.JoinableQueue()
    made.put(1)
    return made


@pytest.mark.parametrize("memory", ["the same", "another"])
@pytest.mark.parametrize("calls", ["puts", "puts and gets", "polls", "joins"])
def test_what_a_child_kept_comes_back_with_the_next_call(ctx: Any, gates: list[Gate], calls: str, memory: str) -> None:
    """One is enough, however soon it comes after the child's end."""
    own = ctx if memory == "the same" else small_context()
    there, data, tasks, (helped, *_) = own.Queue(), ctx.Queue(), _joined(own), gates
    set_lease_budget(ctx.tensorpipe_attachment().leases, CAPACITY)
    large = torch.ones(CAPACITY - (8 << 20), dtype=torch.uint8)
    data.put(large)
    got = data.get(copy=False, timeout=LIMIT)
    helper = in_child(helped.wait)
    data.put("waits, so that the next one has to find room")
    del got
    helped.open()
    assert reap(helper) == 0
    if calls == "joins":
        joining = in_thread(tasks.join)
    else:
        _SMALL_CALLS[calls](there, own)
    assert reap(in_child(lambda: data.put(large, timeout=LIMIT / 2))) == 0
    if calls == "joins":
        tasks.get()
        tasks.task_done()
        joining()


@pytest.mark.slow
@pytest.mark.limit(120)  # a process for each moment
def test_what_a_handler_gets_while_its_process_takes_a_queue_into_use_stays_as_it_is(ctx: Any) -> None:
    """At each moment of a process's first put the handler of a signal may get a lease, and keep it."""
    there, other, point, has_more = ctx.Queue(), ctx.Queue(), 0, True
    while has_more:
        point += 1 + point // 20
        told, go = Gate(), Gate()
        there.put(torch.full((SIZE,), 5.0))

        def use_first(point: int, told: Gate, go: Gate) -> None:
            kept = list[torch.Tensor]()
            get = lambda: kept.append(there.get(timeout=LIMIT))  # noqa: E731
            run_traced(lambda: other.put(len(kept)), point, get, SIGNAL_CHECKS, before=False)
            there.put(len(kept))
            told.open()
            go.wait()
            assert all(each.eq(5).all() for each in kept)

        child = in_child(functools.partial(use_first, point, told, go))
        told.wait()
        has_more = there.qsize() == 1  # else no handler has run, and the first message is still there
        for _ in range(2):
            there.put(torch.full((SIZE,), 99.0))  # in memory that is free
        go.open()
        assert reap(child) == 0, f"at point {point}"
        while there.qsize():
            there.get(timeout=LIMIT)
        other.get(timeout=LIMIT)
        for gate in (told, go):
            gate.close()
    assert point > 500


@pytest.mark.slow
def test_a_child_that_a_handler_forks_while_its_process_takes_a_queue_into_use_has_a_part_of_its_own(ctx: Any) -> None:
    """It stays in the handler. Each is seen to hold what it got, and its parent's death to free that."""
    there, pids, point, has_more = ctx.Queue(), ctx.Queue(), 0, True
    while has_more:
        point += 1 + point // 10
        go = Gate()
        for value in (5.0, 6.0):
            there.put(torch.full((SIZE,), value))

        def holders() -> set[int]:
            """Tell who holds messages, but for this process, which has put them."""
            return {int(each.process.split()[1]) for each in there.statistics().holders} - {os.getpid()}

        def hold(count: int, go: Gate) -> None:
            kept = there.get(timeout=LIMIT)
            pids.put((os.getpid(), count))
            go.wait()
            os._exit(not kept.eq(kept[0]).all())

        def use_first(point: int, go: Gate) -> None:
            forked = list[int]()

            def fork() -> None:
                forked.append(os.fork())
                if not forked[0]:
                    hold(1, go)

            run_traced(ctx.tensorpipe_attachment().attach, point, fork, SIGNAL_CHECKS, before=False)
            hold(len(forked), go)

        parent = in_child(functools.partial(use_first, point, go))
        told = [pids.get(timeout=LIMIT)]
        has_more = told[0][1] == 1
        told += [pids.get(timeout=LIMIT)] if has_more else []
        assert holders() == {pid for pid, _ in told}, f"at point {point}"
        os.kill(parent, signal.SIGKILL)
        assert reap(parent) == -signal.SIGKILL
        assert holders() == {pid for pid, _ in told} - {parent}, f"at point {point}"
        go.open()
        while holders():
            time.sleep(0.001)  # it ends by itself, and nobody can wait for it
        while there.qsize():
            there.get(timeout=LIMIT)
        go.close()
    assert point > 50


NO_DESCRIPTOR = """
import os, resource, sys, torch, warnings
import tensorpipe_ipc as tp

warnings.simplefilter("always")
torch.set_num_threads(1)
ctx = tp.get_context("fork")
there = ctx.Queue()
first = sys.argv[1] == "later"
def lease():
    there.put(torch.full((100_000,), 7.0))
    return there.get()
if first:
    box = [lease()]
read, write = os.pipe()
full = os.dup(0)
os.close(full)
resource.setrlimit(resource.RLIMIT_NOFILE, (full, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if not first:
    box = [lease()]
pid = os.fork()
if not pid:
    os.read(read, 1)
    os._exit(box[0].unique().tolist() != [7.0])
with warnings.catch_warnings(record=True) as more:
    warnings.simplefilter("always")
    other = os.fork()
    if not other:
        os._exit(0)
    os.waitpid(other, 0)
box.clear()
there.trim()  # which frees what nobody can read
for _ in range(5):
    there.put(torch.zeros(100_000))
    there.get()
os.write(write, b"x")
print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "held:", len(there.statistics().holders))
"""


@pytest.mark.parametrize("used_up", ["later", "before"])
def test_a_fork_without_a_free_descriptor_protects_what_its_child_reads(used_up: str, tmp_path: Path) -> None:
    """By a descriptor that was opened with the first lease; without it, the lease is kept for good, and a warning says so."""
    done = ran_in_fork("-c", NO_DESCRIPTOR, used_up, folder=tmp_path)
    assert "child: 0" in done.out, done.err
    assert done.err.count("no descriptor was left by which to see when it ends") == (used_up == "before")
    assert "Exception" not in done.err


def test_leases_are_not_refused_where_nothing_is_under_lease(ctx: Any) -> None:
    """Many leases were, and were let go after one too many was refused."""
    there = ctx.Queue()
    leases = ctx.tensorpipe_attachment().leases
    set_lease_budget(leases, 2000 * mmap.PAGESIZE)  # a small lease costs a page
    for _ in range(2001):
        there.put(torch.ones(100))
    held = [there.get(copy=False) for _ in range(2000)]
    for _ in range(2):
        with pytest.raises(SharedMemoryError, match="under lease"):
            there.get(copy=False)
    held.clear()
    assert there.get(copy=False).sum() == 100
    assert blocks_in_use(ctx) == {}


def test_nothing_grows_with_the_queues_that_were_ever_made(ctx: Any) -> None:
    """Not even what is to be done after a fork."""

    def make(count: int) -> int:
        for _ in range(count):
            there = ctx.Queue(3)
            there.put(1)
            there.get()
            shared_queue_of(there).close()
        del there
        gc.collect()
        return sys.getallocatedblocks()

    make(20)
    before = make(20)
    assert make(200) - before < 100


def test_nothing_grows_with_queues_that_go_in_cycles(ctx: Any) -> None:
    """The collector clears weak references before it finalizes: the operations are given back all the same."""

    def fail() -> None:
        there = ctx.Queue()
        there.put(1)
        there.get()
        try:
            raise ValueError
        except ValueError as error:
            failure = error  # noqa: F841 - a frame, its exception and that one's traceback refer to each other

    for number in range(1000):
        fail()
        if number % 20 == 0:
            gc.collect()
    there = ctx.Queue()
    there.put("one more")
    assert there.get() == "one more"


WHILE_A_GET_ENDS = """
import os, threading
began, forks, has_got = threading.Event(), threading.Event(), threading.Event()
waits = [False]

def let_it_end():  # registered first, it is called last: the package has seen to what is under lease by then
    if waits[0]:
        forks.set()
        has_got.wait(0.2)  # and it may not have, as the fork waits for this

os.register_at_fork(before=let_it_end)
import torch, tensorpipe_ipc as tp

class Slow:
    def __init__(self):
        self.tensor = torch.full((100_000,), 7.0)
    def __setstate__(self, state):
        began.set()
        forks.wait(10)
        self.__dict__ = state

got = []
def get():
    got.append(queue.get())
    has_got.set()

queue = tp.Queue()
queue.put(Slow())
threading.Thread(target=get).start()
began.wait(10)
waits[0] = True
child = os.fork()
if not child:
    for each in got:
        each.tensor.fill_(9)
    os._exit(0)
os.waitpid(child, 0)
has_got.wait(10)
print(got[0].tensor.unique().tolist())
"""


@pytest.mark.slow
def test_a_get_that_ends_while_another_thread_forks_is_not_written_to_by_the_child() -> None:
    """Either the child does not have it, or it has it as its own."""
    done = ran("-W", "ignore", "-c", WHILE_A_GET_ENDS)
    assert (done.status, done.out) == (0, "[7.0]\n"), done.err


@pytest.mark.slow
def test_a_fork_in_a_signals_handler_in_the_middle_of_a_move_has_no_part_of_it(ctx: Any) -> None:
    """Wherever it falls: the child's tensor is whole and its own, or empty, as the tensor is its receiver's."""
    there, point, outcomes = ctx.Queue(), 1, set[int]()
    there.put(ctx.empty(SIZE).fill_(1), move=True)
    there.get()
    while True:
        left, size = forked_in_a_move(ctx, there, point)
        outcomes.add(size)
        assert blocks_in_use(ctx) == {}
        if left > 0:
            break
        point += 11
    # 3.10 has a trace function see each frame's arguments in a dict, which is an alias: all of it is copied.
    assert outcomes == ({0, SIZE} if sys.version_info >= (3, 11) else {SIZE})


def forked_in_a_move(ctx: Any, there: Any, point: int) -> tuple[int, int]:
    """Fork at a step of a put that moves a tensor. Return how many steps were left, and the tensor's size."""
    sent, pids = ctx.empty(SIZE).fill_(point), list[int]()

    def fork() -> None:
        pid = os.fork()
        if pid:
            pids.append(pid)
            return
        value = sent.unique().tolist()
        sent.fill_(-1)
        os._exit(value not in ([], [float(point)]))

    left = run_traced(lambda: there.put(sent, move=True), point, fork, SIGNAL_CHECKS, before=False)
    got = there.get(timeout=LIMIT)
    assert [reap(pid) for pid in pids] in ([], [0])
    assert got.unique().tolist() == [float(point)]
    return left, len(sent)


class Interrupt(Exception):
    """The exception that a signal's handler raises."""


@pytest.mark.slow
def test_an_exception_of_a_signals_handler_in_a_fork_leaves_the_leases_protected(
    ctx: Any, gates: list[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment of what is done around the fork, in the parent and in the child. Other threads can fork afterwards."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # nobody could catch it
    point, left = 1, 0
    with tp.Consumer("forking"):  # an end has something to do around a fork, too
        while left <= 0:
            left = forked_with_an_exception(ctx, gates[0], point)
            wait_until(
                lambda: blocks_in_use(ctx) == {}
            )  # once a child was seen to keep them for a moment after its end
            assert in_thread(lambda: reap(in_child(lambda: None)))() == 0
            point += 2
    assert point > 50
    assert len(os.listdir("/proc/self/fd")) < 60


def forked_with_an_exception(ctx: Any, gate: Gate, point: int) -> int:
    """Raise an exception at a step of a fork. Return how many steps were left to go to it."""
    box, pids = [leased(ctx)], list[int]()

    def fork() -> None:
        pid = os.fork()
        if pid:
            pids.append(pid)
            return
        try:
            sys.settrace(None)
            box[0][5] = 8
            gate.wait()
            os._exit(box[0][:5].tolist() != [7.0] * 5)
        finally:
            os._exit(99)

    def interrupt() -> None:
        raise Interrupt

    left = run_traced(fork, point, interrupt, SIGNAL_CHECKS, before=False)
    assert box[0].unique().tolist() == [7.0]
    box.clear()
    use_memory(ctx)
    gate.open()
    assert reap(pids[0]) == 0
    return left


@pytest.mark.slow
@pytest.mark.limit(110)
def test_forks_and_kills_at_random_harm_nobodys_tensors(tmp_path: Path) -> None:
    """A short campaign: all leases are compared byte for byte, in those who got them, their helpers, and theirs."""
    done = ran_in_fork("-m", "tests.campaign", "--kills", "9", "--messages", "9000", "--seed", "3", folder=tmp_path)
    assert done.status == 0, done.err
    assert re.search(r"about [1-9]\d* forks of helpers", done.out), done.out


def test_a_child_that_has_other_files_by_the_numbers_of_its_descriptors(tmp_path: Path) -> None:
    """It is told so, and its parent's queue and tensors are as they were."""
    queue = tp.Queue()
    queue.put(torch.full((SIZE,), 5.0))
    kept = queue.get(timeout=LIMIT)
    file = tmp_path / "file"
    file.touch()
    if not (child := os.fork()):
        try:
            os.closerange(3, 256)
            while os.open(file, os.O_RDWR) < 128:
                pass
            queue.put(1, timeout=1)
        except SharedMemoryError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    queue.put(torch.full((SIZE,), 6.0))
    assert queue.get(timeout=LIMIT).unique().tolist() == [6]
    assert kept.unique().tolist() == [5]
    assert not file.stat().st_size


COLLECTED_IN_A_CHILD = """
import gc, os, sys, time, weakref
kind, waits = sys.argv[1], [False]
(goes, go), (is_done, done) = os.pipe(), os.pipe()

def collect():  # registered first, it is called first: the package has not told the child that it is one
    if waits[0]:
        os.read(goes, 1)
        gc.collect()
        os.write(done, b"x")

os.register_at_fork(after_in_child=collect)
import numpy as np, tensorpipe_ipc as tp
gc.disable()

def leased(value):
    queue.put(np.full(100_000, value))
    return queue.get()

class Cycle:
    def __init__(self, *it):
        self.it, self.me = it, self

class FailsOnce:
    has_failed = False

    def __reduce__(self):
        return FailsOnce.rebuilt, (np.full(100_000, 3.0),)

    @staticmethod
    def rebuilt(array):
        if not FailsOnce.has_failed:
            FailsOnce.has_failed = True
            raise MemoryError("once")
        return array

queue = tp.Queue()
first, garbage = leased(1.0), Cycle(leased(2.0) if kind == "tensor" else None)
goes_0, go_0 = os.pipe()
reader = os.fork()  # the first is kept for it
if not reader:
    os.read(goes_0, 1)
    os._exit(0)
if kind == "tensor":
    del first
os.write(go_0, b"x")
os.waitpid(reader, 0)
if kind == "queue":
    for number in range(9):
        leased(float(number))
    queue.put(FailsOnce())
    try:
        queue.get()
    except MemoryError:  # the next get takes it
        pass
    garbage, queue = Cycle(queue), None
elif kind == "end":
    consumer = tp.Consumer("fork-collects-%d" % os.getpid())
    producer = tp.Producer(consumer.endpoint)
    producer.put(np.full(100_000, 4.0))
    assert consumer.get(20)[0] == 4
    producer.put(np.full(100_000, 5.0))
    garbage = Cycle(producer, consumer)
    del producer, consumer
reached = weakref.ref(garbage)
del garbage
time.sleep(0.2)  # who may read is looked at ten times a second
waits[0] = True
child = os.fork()
if not child:
    os._exit(0)
waits[0] = False
queue = queue or tp.Queue()
held = [leased(float(number)) for number in range(10, 16)]
os.write(go, b"x")
os.read(is_done, 1)
more = [leased(float(number)) for number in range(20, 50)]
os.waitpid(child, 0)
if kind == "queue":
    assert reached().it[0].get(timeout=20)[0] == 3
elif kind == "end":
    consumer = reached().it[1]
    consumer.trim()
    assert consumer.get(20)[0] == 5
    del consumer
gc.enable()
gc.collect()
more += [leased(float(number)) for number in range(50, 80)]
print([np.unique(each).tolist() for each in held + more] == [[float(n)] for n in [*range(10, 16), *range(20, 80)]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "queue", "end"])
def test_what_a_child_collects_before_it_is_told_is_its_parents(kind: str) -> None:
    """A collection falls into a hook of another library, which comes before the package's own."""
    done = ran("-W", "ignore", "-c", COLLECTED_IN_A_CHILD, kind)
    assert (done.status, done.out) == (0, "True\n"), done.err


COLLECTED_DURING_A_FORK = """
import faulthandler, gc, os, sys, threading
faulthandler.dump_traceback_later(30, exit=True)
kind, lock, forks = sys.argv[1], threading.Lock(), threading.Event()
# As logging and concurrent.futures do. Registered first, it is called last.
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
os.register_at_fork(before=forks.set)
import numpy as np, tensorpipe_ipc as tp
gc.disable()

class Cycle:
    def __init__(self, *it):
        self.it, self.me = it, self

def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)

array = np.full(100_000, 1.0)
kept = tp.Queue()
made = Cycle()
if kind == "queue":
    made.it = tp.Queue(), tp.Queue(5), tp.JoinableQueue()
    for queue in made.it:
        queue.put(array)
elif kind == "context":
    del kept
    ctx = tp.get_context()
    queue = ctx.Queue()
    queue.put(array)
    made.it = ctx, ctx.empty(100_000), queue.get()
    del ctx, queue
elif kind == "tensor":
    kept.put(array)
    made.it = kept.get(),
elif kind == "loan":
    queue = tp.Queue()
    made.it = queue, queue.loan((1000,))
    made.it[1].__enter__()
elif kind == "end":
    consumer = tp.Consumer("collected-%d" % os.getpid())
    producer = tp.Producer(consumer.endpoint)
    producer.put(array)
    made.it = producer, consumer, consumer.get(20), tp.Consumer("idle-%d" % os.getpid())
    producer.put(array)
    del consumer, producer
elif kind == "frames":
    consumer = tp.Consumer("tcp://127.0.0.1:0", shared_memory="off")
    producer = tp.Producer(consumer.endpoint, shared_memory="off")
    putting = threading.Thread(target=producer.put, args=(array,))
    putting.start()
    made.it = producer, consumer, consumer.get(20)
    putting.join()
    del consumer, producer, putting
del made
forks.clear()
with lock:  # which the fork waits for
    forking = threading.Thread(target=fork)
    forking.start()
    forks.wait()
    gc.collect()
forking.join()
print("collected")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["queue", "context", "tensor", "loan", "end", "frames"])
def test_what_is_collected_during_a_fork_does_not_wait_for_it(kind: str) -> None:
    """The fork waits for a lock that the collecting thread holds."""
    done = ran("-W", "ignore", "-c", COLLECTED_DURING_A_FORK, kind)
    assert (done.status, done.out) == (0, "collected\n"), done.err


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_child_waits_for_none_of_torchs_threads_to_check_a_sparse_tensor(layout: torch.layout) -> None:
    """Of any size: torch splits its check of the indices among threads, however few they are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    there = tp.Queue(serializer="torch_save")
    torch.ones(1000, 1000).add_(1)  # the parent has used them
    there.put(torch.eye(3).to_sparse(layout=layout))

    def child_does() -> None:
        assert there.get(timeout=1).layout is layout
        assert torch.get_num_threads() == 2

    try:
        assert reap(in_child(child_does, alarm=LIMIT)) == 0
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "kind", ["gaps", "an array with gaps", "narrowed", "narrowed, with gaps", "restored", "frames"]
)
def test_a_child_has_none_of_torchs_threads_and_waits_for_none(kind: str) -> None:
    """Its parent has used them. In the child an operation that torch splits among threads does not end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    there, back = (
        tp.Queue(wire_dtype=torch.float16 if kind.startswith(("narrowed", "restored")) else None) for _ in range(2)
    )
    items = torch.ones(1000, 1000)
    items.add_(1)
    sent = {"an array with gaps": items.numpy()[:, ::2], "narrowed": items}.get(kind, items[:, ::2])

    def child_does() -> None:
        if kind == "restored":
            assert there.get(timeout=LIMIT)[0, 0] == 2
        if kind == "frames":
            with tp.Consumer("tcp://127.0.0.1:0", shared_memory="off", copy=True) as consumer:
                back.put(consumer.endpoint)
                assert consumer.get(LIMIT)[0, 0] == 2
        back.put(sent, timeout=1)
        assert torch.get_num_threads() == 2

    try:
        child = in_child(child_does)
        if kind == "restored":
            there.put(sent)
        if kind == "frames":
            with tp.Producer(back.get(timeout=LIMIT), shared_memory="off") as producer:
                producer.put(sent, LIMIT)
        got = back.get(timeout=LIMIT)
        assert torch.as_tensor(got).eq(2).all()
        assert reap(child) == 0
    finally:
        torch.set_num_threads(threads)


# A hook that is registered first is called last before a fork: a signal's handler may run there as well.
LATE = """
import os, signal, sys
import torch
torch.set_num_threads(1)
is_due = False
os.register_at_fork(before=lambda: is_due and signal.raise_signal(signal.SIGUSR1))
import tensorpipe_ipc as tp

way, got = sys.argv[1], []
ctx = tp.get_context("fork")
queue = ctx.Queue()
if way != "nothing else is held":
    queue.put(torch.ones(100_000))
    got.append(queue.get())

def handle(*_):
    if way == "made":
        got.append(ctx.empty(100_000).fill_(1))
    elif way == "lent":
        loan = queue.loan((100_000,))
        got.append(loan.__enter__().fill_(1))
    elif way == "as a lease":
        try:
            queue.get(copy=False)
        except tp.SharedMemoryError as error:
            assert "inside a fork" in str(error)
        got.append(queue.get(copy=True))
    else:
        got.append(queue.get())

signal.signal(signal.SIGUSR1, handle)
queue.put(torch.ones(100_000))
reader, writer = os.pipe()
is_due = True
child = os.fork()
is_due = False
if not child:
    os.read(reader, 1)  # until its parent has let go, and used the memory anew
    assert all(bool((tensor == 1).all()) for tensor in got)
    for tensor in got:
        tensor.fill_(2)
    os._exit(0)
kept = got[-1].clone()
assert len(got) == 1 + (way != "nothing else is held")
if way.startswith("let go"):
    got.clear()
    others = [queue.put(torch.full((100_000,), 9.0)) for _ in range(4)]
os.write(writer, b".")
assert os.waitpid(child, 0)[1] == 0
assert all(bool((tensor == 1).all()) for tensor in got)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["got", "nothing else is held", "as a lease", "made", "lent", "let go"])
def test_what_a_handler_gets_in_the_last_moment_before_a_fork_is_its_own(way: str) -> None:
    """The child's writes do not reach it, and the child reads no other message there."""
    done = ran("-c", LATE, way)
    assert (done.status, done.err) == (0, "")


@pytest.mark.slow
def test_threads_get_leases_while_another_thread_forks(ctx: Any) -> None:
    """They wait for the fork, for microseconds, and are refused nothing."""
    there, refused, done = ctx.Queue(), list[Exception](), threading.Event()
    there.put(torch.ones(20_000))
    held = there.get(copy=False)  # so that a fork has something to do

    def use() -> None:
        while not done.is_set():
            there.put(torch.ones(20_000))
            try:
                assert there.get(copy=False, timeout=LIMIT).is_shared() is not None
            except Exception as error:
                refused.append(error)
                done.set()

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
    done.set()
    for thread in threads:
        thread.join(LIMIT)
    assert refused == []
    assert bool((held == 1).all())


def test_join_waits_for_no_task_of_a_dead_worker_though_a_child_of_its_lives_and_may_read_it(ctx: Any) -> None:
    """The child may read what stays for it; the task is settled all the same."""
    tasks, forked, done = ctx.JoinableQueue(), os.pipe(), os.pipe()

    def work() -> None:
        held = tasks.get(timeout=LIMIT)
        if not os.fork():
            os.read(done[0], 1)
            os._exit(0)
        os.write(forked[1], b".")
        signal.pause()
        del held

    for number in range(2):
        tasks.put(torch.full((SIZE,), float(number)))
    worker = os.fork()
    if not worker:
        work()
    os.read(forked[0], 1)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    assert tasks.get(timeout=LIMIT)[0] == 1
    tasks.task_done()
    try:
        in_thread(tasks.join)()
    finally:
        os.write(done[1], b".")
    for end in (*forked, *done):
        os.close(end)
    wait_until(lambda: left_in(ctx) == {})


RAISES_WHILE_A_FORK_WAITS = """
import os, signal, threading
import tensorpipe_ipc as tp
from tensorpipe_ipc.forks import no_fork

queue = tp.Queue()
queue.put(0)
assert queue.get() == 0
held, waits, raised, forked = (threading.Event() for _ in range(4))
os.register_at_fork(before=waits.set, after_in_parent=forked.set)  # registered last, the first is called first
main = threading.get_ident()

class Alarm(Exception):
    pass

def handle(*_):
    raised.set()
    raise Alarm

def hold():
    with no_fork():
        held.set()
        waits.wait(20)  # it returns once the fork waits: only then does this thread have its turn
        signal.pthread_kill(main, signal.SIGUSR1)
        raised.wait(20)
        forked.wait(0.5)  # it had better not
threading.Thread(target=hold, daemon=True).start()
held.wait(20)
signal.signal(signal.SIGUSR1, handle)
child = os.fork()
if not child:
    signal.alarm(20)
    queue.put(1)
    os._exit(0 if queue.get() == 1 else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
queue.put(2)
print(raised.is_set(), status, queue.get())
"""


@pytest.mark.slow
def test_a_child_whose_fork_a_handlers_exception_met_uses_its_queue() -> None:
    """A fork waits for another thread meanwhile. Python says that it ignores what a hook of a fork raises, and forks."""
    done = ran("-c", RAISES_WHILE_A_FORK_WAITS)
    assert (done.status, done.out) == (0, "True 0 2\n"), done.err


@pytest.mark.parametrize("how", ["gets", "forks"])
def test_threads_of_a_child_that_a_handler_forks_while_its_thread_keeps_others_from_it(how: str, ctx: Any) -> None:
    """The handler may never return to where the thread would let go of that."""
    from tensorpipe_ipc.forks import no_fork

    there = ctx.Queue()
    there.put(7)

    def use_a_thread() -> None:
        if how == "gets":
            assert in_thread(lambda: there.get(timeout=LIMIT))(LIMIT) == 7
        else:
            assert reap(in_thread(lambda: in_child(lambda: None))(LIMIT)) == 0
        with no_fork():
            pass

    with no_fork():
        child = in_child(use_a_thread)
    assert reap(child) == 0
    with no_fork():
        assert reap(in_child(lambda: None)) == 0
