"""Pool and ProcessPoolExecutor with one of our contexts: tensors go through shared memory, both ways; deaths as in stock."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import multiprocessing.pool
import os
import signal
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arenas import CAPACITY, left_in, small_context
from children import asleep, wait_until
from crash_points import in_child, reap
from inside import reading_end_of, shared_queue_of
from programs import outliving, ran_in_fork
from torch.utils.data import DataLoader, Dataset

import tensorpipe_ipc as tp
from tensorpipe_ipc.memory.row import GET
from tensorpipe_ipc.queues.call_queue import UNREAD, CallQueue
from tensorpipe_ipc.queues.pool import WAITING

SIZE = 100_000  # items
LIMIT = 20
TOKENS = os.sysconf("SC_PAGE_SIZE") // 8  # in a pipe of one page
METHODS = ["fork", *(pytest.param(method, marks=pytest.mark.kills) for method in ("forkserver", "spawn"))]


@contextlib.contextmanager
def context_of(method: str) -> Iterator[Any]:
    """A context of a start method, with nothing left in its memory at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ctx = small_context(method)
    yield ctx
    assert left_in(ctx) == {}
    vars(ctx).clear()
    torch.set_num_threads(threads)


def descriptors() -> Any:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def double(x: Any) -> Any:
    """Of a tensor, an array or a tree; and how many descriptors the worker has, and who it is."""
    torch.set_num_threads(1)
    return {"twice": x * 2, "descriptors": descriptors(), "pid": os.getpid()}


def add(x: Any, y: int = 0) -> Any:
    """Of anything."""
    return x + y


def fail(x: Any) -> None:
    raise KeyError(f"no {x}")


def die(x: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def unpicklable(x: Any) -> Any:
    return lambda: x


@pytest.mark.parametrize("method", METHODS)
def test_a_pool_sends_tensors_through_shared_memory_both_ways(method: str) -> None:
    with context_of(method) as ctx:
        with ctx.Pool(2) as pool:
            assert isinstance(pool, multiprocessing.pool.Pool)
            sent = [torch.full((SIZE,), float(i)) for i in range(8)]
            # all at once, and all kept: torch's way takes a descriptor for each
            results = pool.map(double, sent, chunksize=1)
            assert [int(each["twice"][SIZE // 2]) for each in results] == [2 * i for i in range(8)]
            assert [int(each[0]) for each in sent] == list(range(8)), "what was sent is the sender's as before"
            arena = ctx.tensorpipe_attachment().leases
            assert all(arena.find(each["twice"].data_ptr()) is not None for each in results)
            assert max(each["descriptors"] for each in results) <= min(each["descriptors"] for each in results) + 2
            del results
            assert int(pool.apply(add, (np.arange(SIZE), 1))[-1]) == SIZE
            assert pool.starmap(add, [(1, 2), ("a", "b")]) == [3, "ab"]
            assert sorted(pool.imap_unordered(abs, range(-50, 0))) == list(range(1, 51))
            with pytest.raises(KeyError, match="no [12]"):
                pool.map(fail, [1, 2])
            with pytest.raises(multiprocessing.pool.MaybeEncodingError):
                pool.apply(unpicklable, (1,))
            assert pool.apply_async(add, (1, 2)).get(LIMIT) == 3
            pool.close()
            pool.join()
        del pool  # with what it told its workers at the end


def test_a_pool_of_multiprocessings_own_class_and_one_that_renews_its_workers(ctx: Any) -> None:
    with multiprocessing.pool.Pool(1, maxtasksperchild=2, context=ctx) as pool:
        pids = {each["pid"] for each in pool.map(double, [torch.ones(SIZE)] * 6, chunksize=1)}
        assert len(pids) == 3


def stand_at(gate: Any) -> None:
    globals()["gate"] = gate


def wait_for_gate(x: Any) -> Any:
    with globals()["gate"]:
        return x


@pytest.mark.slow
def test_a_pool_takes_tasks_from_an_iterable_as_its_workers_take_them(ctx: Any) -> None:
    gate, taken, sent = ctx.Lock(), [], torch.ones(SIZE)
    with ctx.Pool(2, stand_at, (gate,)) as pool:
        with gate:
            results = pool.imap(wait_for_gate, (taken.append(i) or sent for i in range(1000)))
            until = time.monotonic() + LIMIT
            while not shared_queue_of(pool._inqueue).full() and time.monotonic() < until:
                os.sched_yield()
            assert len(taken) <= WAITING + 5  # two at the gate, and one that finds no room
        assert all(int(each.sum()) == SIZE for each in results)
        assert len(taken) == 1000
    del results, pool


def test_a_pool_that_ends_does_not_wait_for_what_a_worker_took(ctx: Any) -> None:
    tasks = ctx.SimpleQueue()
    tasks.put(1)
    assert tasks._rlock.acquire()
    assert reading_end_of(tasks).poll()
    assert tasks.get() == 1, "as if by a worker"
    assert reading_end_of(tasks).recv() is None


@pytest.mark.slow
def test_a_pool_that_waits_for_room_for_a_task_can_be_terminated(ctx: Any) -> None:
    gate = ctx.Lock()
    with gate:
        pool = ctx.Pool(1, stand_at, (gate,))
        results = pool.imap(wait_for_gate, [torch.ones(SIZE)] * 1000)
        until = time.monotonic() + LIMIT
        while not shared_queue_of(pool._inqueue).full() and time.monotonic() < until:
            os.sched_yield()
        pool.terminate()
        pool.join()
    del results, pool
    assert left_in(ctx) == {}


def test_a_killed_worker_of_a_pool_is_replaced_and_its_task_alone_is_lost(ctx: Any) -> None:
    with ctx.Pool(2) as pool:
        lost = pool.apply_async(die, (torch.ones(SIZE),))
        sums = [int(each["twice"].sum()) for each in pool.map(double, [torch.ones(SIZE)] * 6, chunksize=1)]
        assert sums == [2 * SIZE] * 6
        with pytest.raises(multiprocessing.TimeoutError):
            lost.get(0.2)
        assert int(pool.apply(add, (torch.ones(SIZE), 1))[0]) == 2
    del lost, pool
    assert left_in(ctx) == {}


def test_terminating_a_busy_pool_ends_it(ctx: Any) -> None:
    pool = ctx.Pool(2)
    results = [pool.apply_async(double, (torch.ones(SIZE),)) for _ in range(200)]
    assert results[0].get(LIMIT)["twice"].sum() == 2 * SIZE
    pool.terminate()
    pool.join()
    del results, pool
    assert left_in(ctx) == {}


@pytest.mark.parametrize("method", METHODS)
def test_an_executor_sends_tensors_through_shared_memory_both_ways(method: str) -> None:
    with context_of(method) as ctx:
        with ProcessPoolExecutor(2, mp_context=ctx) as executor:
            results = list(executor.map(double, [torch.full((SIZE,), float(i)) for i in range(8)]))
            assert [int(each["twice"][SIZE // 2]) for each in results] == [2 * i for i in range(8)]
            arena = ctx.tensorpipe_attachment().leases
            assert all(arena.find(each["twice"].data_ptr()) is not None for each in results)
            assert max(each["descriptors"] for each in results) <= min(each["descriptors"] for each in results) + 2
            del results
            assert list(executor.map(abs, range(-50, 0), chunksize=7)) == list(range(50, 0, -1))
            with pytest.raises(KeyError, match="no 1"):
                executor.submit(fail, 1).result(LIMIT)
            with pytest.raises((AttributeError, TypeError), match="pickle|local object"):
                executor.submit(unpicklable, 1).result(LIMIT)
            with pytest.raises((AttributeError, TypeError), match="pickle|local object"):
                executor.submit(lambda: 1).result(LIMIT)
            assert executor.submit(add, 1, y=2).result(LIMIT) == 3
        del executor


def test_what_an_executor_calls_is_sent_as_it_is_at_the_time() -> None:
    """Functions go by their names. What has state goes with each call."""
    with context_of("fork") as ctx, ProcessPoolExecutor(1, mp_context=ctx) as executor:
        assert list(executor.map(add, [1, 2], [3, 4])) == [4, 6]
        partial = functools.partial(add, [1])
        assert list(executor.map(partial, [[0]])) == [[1, 0]]
        partial.args[0].append(5)
        assert list(executor.map(partial, [[0]])) == [executor.submit(partial, [0]).result(LIMIT)] == [[1, 5, 0]]
    del executor


OTHER_PYTHON = """
import warnings, multiprocessing
from concurrent.futures import ProcessPoolExecutor, process

if __name__ == "__main__":
    import torch
    import tensorpipe_ipc as tp

    worker = process.__dict__.pop("_process_worker")
    import tensorpipe_ipc.queues.call_queue  # as the first executor's first worker has it imported
    process._process_worker = worker

    warnings.simplefilter("error")
    warnings.filterwarnings("default", "this Python's ProcessPoolExecutor has no _process_worker")
    with ProcessPoolExecutor(2, mp_context=tp.get_context("fork")) as executor:
        print([executor.submit(torch.add, torch.ones(3), i).result(20).tolist() for i in range(2)])
"""


def test_an_executor_of_a_python_that_has_other_parts_works_and_says_so_once(tmp_path: Path) -> None:
    """Its calls go as they do there."""
    done = ran_in_fork("-c", OTHER_PYTHON, folder=tmp_path)
    assert (done.status, done.out.strip()) == (0, "[[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]"), done.err
    assert done.err.count("RuntimeWarning: this Python's ProcessPoolExecutor has no _process_worker") == 1


@pytest.mark.parametrize("beyond_the_pipe", [False, True], ids=["in the pipe", "beyond the pipe"])
def test_an_executors_results_are_read_before_all_calls_are_sent(
    monkeypatch: pytest.MonkeyPatch, beyond_the_pipe: bool
) -> None:
    """Also where workers answer each call before the next one is sent, and results wait that a pipe has no place for."""
    most = TOKENS + 100 if beyond_the_pipe else UNREAD
    monkeypatch.setattr("tensorpipe_ipc.queues.call_queue.UNREAD", most)
    send, unread, count = CallQueue.put, [], 3 * most

    def put(calls: Any, item: Any, block: bool = True, timeout: Any = None) -> None:
        send(calls, item, block, timeout)
        if item is not None:
            results, until = calls._results, time.monotonic() + LIMIT
            if beyond_the_pipe and not unread:
                fcntl.fcntl(reading_end_of(results).fileno(), 1031, 8 * TOKENS)  # F_SETPIPE_SZ
            while results.qsize() + shared_queue_of(results).done(GET)[0] < calls._sent and time.monotonic() < until:
                os.sched_yield()
            unread.append(results.qsize())

    monkeypatch.setattr(CallQueue, "put", put)
    with context_of("fork") as ctx, ProcessPoolExecutor(1, mp_context=ctx) as executor:
        assert list(executor.map(abs, range(-count, 0))) == list(range(count, 0, -1))
    del executor
    assert len(unread) == count
    assert max(unread) == most


def test_results_that_fill_the_memory_do_not_stop_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one thread sends calls and reads results: it does not wait for memory that only results can give back."""
    monkeypatch.setattr("tensorpipe_ipc.queues.call_queue.PATIENCE", 10 * LIMIT)
    count, size = 12, 5_000_000  # of float32: 20 MB each, through 64 MB
    with context_of("fork") as ctx, ProcessPoolExecutor(2, mp_context=ctx) as executor:
        futures = [executor.submit(double, torch.full((size,), float(i))) for i in range(count)]
        for i in range(count):
            assert int(futures.pop(0).result(LIMIT)["twice"][-1]) == 2 * i
    del executor


def test_a_call_for_which_the_machine_has_no_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorpipe_ipc.queues.call_queue.PATIENCE", 0.1)
    with context_of("fork") as ctx, ProcessPoolExecutor(1, mp_context=ctx) as executor:
        held, large = ctx.empty((8 << 20,), torch.uint8), torch.ones(30 << 20, dtype=torch.uint8)
        assert executor.submit(add, 1, 2).result(LIMIT) == 3
        with monkeypatch.context() as full:
            full.setattr("tensorpipe_ipc.memory.arena.headroom", lambda: 0)
            with pytest.raises(tp.Full, match="finds no"):
                executor.submit(add, large).result(LIMIT)
            assert executor.submit(add, 1, 2).result(LIMIT) == 3
        assert int(executor.submit(add, large, 1).result(LIMIT)[-1]) == 2
        del held
    del executor


def test_an_executors_workers_may_be_renewed_and_its_calls_cancelled() -> None:
    with context_of("forkserver") as ctx:
        with ProcessPoolExecutor(1, mp_context=ctx) as executor:
            futures = [executor.submit(double, torch.ones(SIZE)) for _ in range(20)]
            executor.shutdown(cancel_futures=True)
            done = [each for each in futures if not each.cancelled()]
            assert 0 < len(done) < 20
            assert all(int(each.result()["twice"][0]) == 2 for each in done)
        del done, futures, executor


def test_a_killed_worker_breaks_an_executor_as_in_stock(ctx: Any) -> None:
    executor = ProcessPoolExecutor(2, mp_context=ctx)
    futures = [executor.submit(double, torch.ones(SIZE)) for _ in range(4)]
    began = time.monotonic()
    with pytest.raises(BrokenProcessPool):
        executor.submit(die, torch.ones(SIZE)).result(LIMIT)
    assert time.monotonic() - began < LIMIT
    executor.shutdown()
    del futures
    assert left_in(ctx) == {}


def test_an_executor_of_another_context_is_left_alone(ctx: Any) -> None:
    other = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=other) as theirs, ProcessPoolExecutor(1, mp_context=ctx) as ours:
        assert theirs.submit(add, 1, 2).result(LIMIT) == ours.submit(add, 1, 2).result(LIMIT) == 3
        assert type(theirs._call_queue).__module__ == "concurrent.futures.process"
        assert type(ours._call_queue).__module__ == "tensorpipe_ipc.queues.call_queue"


def ignore_termination() -> None:
    """As workers do whose program is to end them in its own way."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def occupy(pid: int, at_work: tuple[int, int]) -> None:
    """Have a worker be at work for good; another is done once that one is, and not before: it would take both tasks."""
    if os.getpid() != pid:
        os.read(at_work[0], 1)
        return
    os.write(at_work[1], b"x")
    while True:
        signal.pause()


def run_and_tell(kind: Any, line: Any) -> None:
    """A program that has workers, tells who they are, and waits to be killed."""
    ctx = small_context("fork")
    if kind.startswith("masked"):  # as programs do that wait for signals by sigwait
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if kind.startswith("deaf"):
        executor = ProcessPoolExecutor(2, mp_context=ctx, initializer=ignore_termination)
        assert executor.submit(add, 1, 2).result() == 3
        pids = list(executor._processes)
    elif kind.endswith("pool"):
        at_work = os.pipe()  # the workers inherit it
        pool = ctx.Pool(2)
        pids = [each.pid for each in pool._pool]
        if kind.startswith("busy"):
            occupied = pool.starmap_async(occupy, [(pids[-1], at_work)] * 2, 1)
            waiting = [pool.apply_async(time.sleep, (0.5,)) for _ in range(200)]
            waiting[0].wait()
            assert not occupied.ready()
    else:
        executor = ProcessPoolExecutor(2, mp_context=ctx)
        assert executor.submit(add, 1, 2).result() == 3
        pids = list(executor._processes)
    if kind.startswith("forking"):  # as a Manager's server is, which lives on
        pids.append(in_child(signal.pause))
    line.send(pids)
    signal.pause()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("pool", marks=pytest.mark.kills),
        "busy pool",
        "executor",
        "deaf executor",
        "masked executor",
        "forking pool",
        pytest.param("forking executor", marks=pytest.mark.slow),
    ],
)
def test_workers_end_when_their_program_is_killed(kind: Any) -> None:
    """Also where they block SIGTERM, tasks wait, one is at work, or another child was forked later. Stock's keep the pipe."""
    fork = multiprocessing.get_context("fork")
    line, theirs = fork.Pipe()
    program = fork.Process(target=run_and_tell, args=(kind, theirs))
    program.start()
    assert line.poll(LIMIT)
    pids = line.recv()
    at_work = [pids.pop()] if kind.startswith(("busy", "forking")) else []
    program.kill()
    program.join()
    try:
        assert outliving(pids, LIMIT) == []
    finally:
        for pid in at_work:
            os.kill(pid, signal.SIGKILL)
    line.close()
    theirs.close()


def work_unread(kind: str, told: int, gate: int) -> None:
    """A program that has two workers. The results of two tasks do not fit into the memory."""
    ctx, task = small_context("fork"), functools.partial(tell_and_make, told, gate)
    if kind == "loader":
        dataset: Any = Telling(told, gate)
        loader = iter(DataLoader(dataset, None, num_workers=2, multiprocessing_context=ctx))
        assert loader is not None
    elif kind == "pool":
        pool = ctx.Pool(2)
        pool.map_async(task, range(10), 1)
    else:
        executor = ProcessPoolExecutor(2, mp_context=ctx)
        executor.map(task, range(10))
    signal.pause()


def tell_and_make(told: int, gate: int, _: int) -> torch.Tensor:
    """Tell who is at work. When that may be done, return much."""
    os.write(told, f"{os.getpid()}\n".encode())
    os.read(gate, 1)
    return torch.empty(CAPACITY // 6)


class Telling(Dataset[torch.Tensor]):
    """A dataset of those."""

    def __init__(self, told: int, gate: int) -> None:
        self._pipes = told, gate

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> torch.Tensor:
        return tell_and_make(*self._pipes, number)


def unread_in(pipe: int) -> int:
    """Return how many bytes lie in a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("kind", ["pool", "executor", "loader"])
def test_a_worker_whose_result_waits_for_memory_ends_when_its_program_is_killed(kind: str) -> None:
    """Results that nobody read have it, and nobody has those but the workers themselves."""
    (begun, told), (gate, opener) = os.pipe(), os.pipe()
    program = multiprocessing.get_context("fork").Process(target=work_unread, args=(kind, told, gate))
    program.start()
    pids = b""
    while pids.count(b"\n") < 2:
        pids += os.read(begun, 100)
    assert program.pid is not None
    os.kill(program.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
    workers = set(map(int, pids.split()))
    os.write(opener, b"." * 10)
    wait_until(lambda: unread_in(gate) <= 8 and all(map(asleep, workers)))
    program.kill()
    program.join()
    assert outliving(workers, LIMIT) == []
    program.close()
    for fd in (begun, told, gate, opener):
        os.close(fd)


def test_a_forked_child_sees_its_siblings_end() -> None:
    """By its sentinel, and not before."""
    ctx = tp.get_context("fork")
    go, ending = os.pipe()

    def watch() -> None:
        os.close(ending)
        assert connection.wait([first.sentinel], 0) == []
        os.write(seen[1], b".")
        assert connection.wait([first.sentinel], LIMIT) == [first.sentinel]

    first = ctx.Process(target=os.read, args=(go, 1))
    first.start()
    seen = os.pipe()
    second = ctx.Process(target=watch)
    second.start()
    assert os.read(seen[0], 1) == b"."
    os.write(ending, b".")
    for process in (first, second):
        process.join(LIMIT)
        assert process.exitcode == 0
        process.close()
    for fd in (go, ending, *seen):
        os.close(fd)


def test_a_process_that_a_fork_starts_reads_nothing_of_the_forks_own() -> None:
    """Of its siblings it asks as multiprocessing does: a fork server's tell by the sentinel how they ended."""
    ctx = tp.get_context("forkserver")
    there = ctx.Queue()
    sibling = ctx.Process(target=there.get)
    sibling.start()

    def act() -> None:
        pipes = [os.pipe() for _ in range(20)]
        for _, writer in pipes:
            os.write(writer, b"01234567")
        child = tp.get_context("fork").Process(target=os.getpid)
        child.start()
        child.join(LIMIT)
        assert child.exitcode == 0
        assert [os.read(reader, 100) for reader, _ in pipes] == [b"01234567"] * 20

    assert reap(in_child(act)) == 0
    there.put(1)
    sibling.join(LIMIT)
    assert sibling.exitcode == 0
    sibling.close()
