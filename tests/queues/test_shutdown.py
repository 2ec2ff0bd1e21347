"""A shutdown is told to all who wait, whoever is killed or stopped meanwhile; and no put slips past it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import queue
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from children import asleep
from crash_points import SIGNAL_CHECKS, dies_at, in_child, reap, run_traced
from inside import (
    before_a_put_counts_its_task,
    drop_one,
    instead_of_hearing,
    instead_of_looking_at_the_log,
    reading_end_of,
    shared_queue_of,
)
from wholeness import points, stride, strides

from tensorpipe_ipc.errors import Empty, Full, SharedMemoryError, ShutDown, UnsupportedLeaf
from tensorpipe_ipc.queues.tensor_queue import JoinableQueue, Queue
from tensorpipe_ipc.shared_queue import shutdown
from tensorpipe_ipc.shared_queue.token_pipe import CAPACITY, SHUT

LIMIT = 20  # seconds
LARGE = torch.ones(1 << 20)  # made here: the threads of OpenMP do not survive a fork
SOON = 0.1  # seconds: a shutdown that was not begun within these is begun anew

Wait = Callable[[Queue], object]
GETS: dict[str, Wait] = {
    "get": lambda there: there.get(),
    "get in time": lambda there: there.get(timeout=LIMIT),
    "get_many": lambda there: there.get_many(64),
    "get_many in time": lambda there: there.get_many(64, LIMIT),
}


def refused(there: Queue, wait: Wait) -> None:
    """A wait that is to end in ShutDown."""
    with pytest.raises(ShutDown):
        wait(there)


@contextlib.contextmanager
def waiters(there: Queue, actions: list[Callable[[], object]]) -> Iterator[list[int]]:
    """Forked processes that wait in these actions, and are killed at the end if they still live."""
    pids = [in_child(action) for action in actions]
    try:
        for pid in pids:
            while not asleep(pid):
                os.sched_yield()
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("end", "immediate"),
    [
        (signal.SIGKILL, False),
        (signal.SIGSTOP, True),
        pytest.param(signal.SIGKILL, True, marks=pytest.mark.kills),
        pytest.param(signal.SIGSTOP, False, marks=pytest.mark.kills),
    ],
)
@pytest.mark.parametrize("wait", GETS)
def test_all_who_wait_are_told_though_those_woken_first_are_killed_or_stopped(
    wait: str, end: signal.Signals, immediate: bool
) -> None:
    """Each has a doorbell of its own, so it is no matter what becomes of another's."""
    there = Queue()

    def struck() -> None:
        instead_of_hearing(shared_queue_of(there), lambda _: os.kill(os.getpid(), end))
        GETS[wait](there)

    lucky = [lambda: refused(there, GETS[wait])] * 6
    with waiters(there, [struck, *lucky[:3], struck, *lucky[3:]]) as pids:
        there.shutdown(immediate)
        assert [reap(pid) for number, pid in enumerate(pids) if number % 4] == [0] * 6


def _is_told(step: int, waits: list[Wait], maxsize: int, shut: Wait) -> None:
    """Kill a shutdown at every step: those who wait are all told, or it has not begun. A queue with a bound is full."""
    ended, tell = os.pipe()
    begun = 0

    def is_refused(there: Queue, wait: Wait) -> None:
        refused(there, wait)
        os.write(tell, b".")

    def killed(point: int) -> bool:
        nonlocal begun
        there = Queue(maxsize)
        shared_queue_of(there).attachment.attach()
        for number in range(maxsize):
            there.put(number)
        with waiters(there, [lambda wait=wait: is_refused(there, wait) for wait in waits]) as pids:  # type: ignore[misc]
            was_killed = dies_at(point, lambda: shut(there), shared_queue_of(there).attachment.attach)
            if select.select([ended], [], [], SOON)[0]:
                begun += 1
            else:
                there.shutdown()
            assert [reap(pid) for pid in pids] == [0] * len(waits)
        os.read(ended, len(pids))
        return was_killed

    for _ in points(killed, stride=step):
        pass
    assert begun
    os.close(ended)
    os.close(tell)


@pytest.mark.slow
@strides(29, 97)
def test_a_shutdown_that_is_killed_at_any_step_is_not_begun_or_ends_all_waits(step: int) -> None:
    """Also where nobody does anything with the queue any more."""
    _is_told(step, [GETS["get"], GETS["get"], GETS["get_many"]], 0, lambda there: there.shutdown())


@pytest.mark.slow
@strides(29, 197)
@pytest.mark.parametrize("immediate", [False, True])
def test_a_shutdown_that_is_killed_at_any_step_is_not_begun_or_refuses_all_puts(step: int, immediate: bool) -> None:
    """Each that waits for room is told."""
    puts: list[Wait] = [lambda there: there.put(1), lambda there: there.put(1, timeout=LIMIT)]
    puts += [lambda there: there.put_many([1, 2])]
    _is_told(step, puts, 1, lambda there: there.shutdown(immediate))


def test_a_shutdown_whose_only_bell_went_down_with_its_taker_is_finished_by_who_looks() -> None:
    """Both were killed, the process that shut down and the one that it woke: the word of the dead one still says it."""
    there = Queue(1)
    there.put(0)
    there.get()

    def struck() -> None:
        instead_of_hearing(shared_queue_of(there), lambda _: os.kill(os.getpid(), signal.SIGKILL))
        there.get()

    with waiters(there, [struck]) as pids:
        shared_queue_of(there).tickets.ring_doorbell(SHUT)  # all that the first one came to
        assert reap(pids[0]) == -signal.SIGKILL
        assert there.statistics().lost == 0
        refused(there, lambda there: there.put(1))
        refused(there, lambda there: there.get())


@pytest.mark.parametrize("immediate", [False, True])
@pytest.mark.parametrize("count", [1, 8])
def test_blocked_puts_are_refused_and_put_nothing(immediate: bool, count: int) -> None:
    """As in Python 3.13: also where an immediate shutdown makes room; and join has nothing to wait for."""
    there = JoinableQueue(1)
    there.put(0)
    put: list[Wait] = [lambda there: there.put(1), lambda there: there.put(1, timeout=LIMIT)]
    put += [lambda there: there.put_many([1, 2, 3]), lambda there: there.put(LARGE, move=True)]
    with waiters(there, [lambda wait=wait: refused(there, wait) for wait in (put * 2)[:count]]) as pids:  # type: ignore[misc]
        there.shutdown(immediate)
        assert [reap(pid) for pid in pids] == [0] * count
    if not immediate:
        assert there.get() == 0
        there.task_done()
    there.join()
    refused(there, lambda there: there.get())
    assert there.qsize() == 0
    assert there.statistics().lost == 0


def test_no_put_succeeds_once_shutdown_has_returned() -> None:
    """Get returns every message that a put had put successfully before the shutdown."""
    for _ in range(5):
        there = Queue()
        told, tell = os.pipe()

        def put(there: Queue = there, tell: int = tell) -> None:
            with contextlib.suppress(ShutDown):
                for number in range(1_000_000):
                    there.put(number)
                    os.write(tell, b".")

        with waiters_of(put) as pid:
            for _ in range(20):
                os.read(told, 1)
            there.shutdown()
            got = 0
            with contextlib.suppress(ShutDown):
                while True:
                    assert there.get(timeout=LIMIT) == got
                    got += 1
            assert reap(pid) == 0
        os.close(tell)
        noted = 20
        while part := os.read(told, 1 << 16):
            noted += len(part)
        assert got == noted
        os.close(told)


@pytest.mark.slow
@pytest.mark.parametrize(("maxsize", "waiting", "step"), [(0, 0, 1), (200, 0, 1), (0, 2 * CAPACITY, stride(7))])
@pytest.mark.parametrize("many", [False, True])
def test_no_put_succeeds_once_a_handler_within_it_has_shut_the_queue_down(
    many: bool, maxsize: int, waiting: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no moment at which a handler may run: what a put is to have put, those saw that got until ShutDown."""
    monkeypatch.setattr(shutdown, "_PATIENCE", 0.001)
    got: list[Any] = []

    def shut_down(there: Queue) -> None:
        there.shutdown()
        with contextlib.suppress(ShutDown):
            while True:
                got.extend(there.get_many(64, timeout=0))

    point, left = 1 - step, 0
    while left <= 0:
        point += step
        there, count = Queue(maxsize), 0
        there.put_many([-1] * waiting)
        got.clear()
        try:
            put = functools.partial(there.put_many, [7, 8]) if many else functools.partial(there.put, 7)
            left = run_traced(put, point, functools.partial(shut_down, there), SIGNAL_CHECKS, before=False)
            count = 2 if many else 1
        except ShutDown:
            left = 0
        if left <= 0:
            assert len([each for each in got if each > 0]) == count, point
        there.close()
    assert point > 10


@contextlib.contextmanager
def waiters_of(action: Callable[[], object]) -> Iterator[int]:
    pid = in_child(action)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def test_a_put_that_is_stopped_before_its_last_look_is_refused_after_the_shutdown() -> None:
    """Its message is not in the queue, and the shutdown did not wait for it."""
    there = JoinableQueue()

    def put() -> None:
        before_a_put_counts_its_task(lambda: os.kill(os.getpid(), signal.SIGSTOP))
        refused(there, lambda there: there.put(1))

    with waiters_of(put) as pid:
        os.waitpid(pid, os.WUNTRACED)
        there.shutdown(immediate=True)
        there.join()
        os.kill(pid, signal.SIGCONT)
        assert reap(pid) == 0
    there.join()
    assert there.qsize() == 0


def test_tasks_that_were_taken_are_still_to_be_done_after_an_immediate_shutdown() -> None:
    """As in Python 3.13: what was dropped counts as done, and nothing else."""
    tasks = JoinableQueue()
    tasks.put_many(range(5))
    tasks.get()
    tasks.shutdown(immediate=True)
    waiter = threading.Thread(target=tasks.join)
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    tasks.task_done()
    waiter.join(LIMIT)
    assert not waiter.is_alive()
    with pytest.raises(ValueError, match="too many times"):
        tasks.task_done()


@pytest.mark.parametrize("maxsize", [0, 10])
def test_the_doorbells_of_a_shutdown_do_not_count_as_objects(maxsize: int) -> None:
    """Neither while it begins, nor where it was killed at it."""
    there = Queue(maxsize)
    there.put(0)
    there.get()
    there.put(1)

    def struck() -> None:
        wake = shutdown.Shutdown.wake

        def rings_and_dies(*args: Any, **options: Any) -> None:
            wake(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        shutdown.Shutdown.wake = rings_and_dies  # type: ignore[assignment,method-assign]
        there.shutdown()

    assert reap(in_child(struck)) == -signal.SIGKILL
    assert (there.is_shut, there.qsize(), there.empty(), there.full()) == (False, 1, False, False)
    assert there.get(timeout=LIMIT) == 1
    assert there.qsize() == 0


def test_a_put_that_finds_the_pipe_full_of_doorbells_is_refused_and_takes_nothing() -> None:
    """A shutdown for many that was killed before it was on record leaves them: the caller learns of it by a typed error."""
    there = Queue(CAPACITY - 1)
    there.put(0)
    for _ in range(CAPACITY // 2):
        shared_queue_of(there).tickets.ring_doorbell(SHUT)
    count = 1

    def fill() -> None:
        nonlocal count
        for _ in range(CAPACITY):
            there.put(count, timeout=0)
            count += 1

    for put in (fill, lambda: there.put_many([count, count + 1], timeout=0)):
        with pytest.raises(SharedMemoryError, match="doorbells of a shutdown that was cut short"):
            put()
    assert [there.get(timeout=LIMIT) for _ in range(count)] == [*range(count)]
    refused(there, lambda there: there.get())
    assert there.statistics().lost == 0


def test_a_full_queue_that_is_shut_down_says_shut_down_and_not_full() -> None:
    """And an empty one not Empty."""
    there = Queue(1)
    there.put(0)
    with pytest.raises(Full):
        there.put_nowait(1)
    there.shutdown()
    waits = there.statistics().waits
    for put in (
        lambda there: there.put_nowait(1),
        lambda there: there.put(1),
        lambda there: there.put_many([1], LIMIT),
    ):
        refused(there, put)
    assert there.statistics().waits == waits  # it was refused at once
    assert there.get() == 0
    refused(there, lambda there: there.get_nowait())
    refused(there, lambda there: there.get(timeout=0.01))
    assert not isinstance(ShutDown(), (Full, Empty, queue.Empty))
    assert select.select([there], [], [], LIMIT)[0], "get would not wait, so the descriptor is to say so"


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def finds_nothing_and_dies(there: Queue) -> None:
    """Have a get see the end, and be killed before it can tell anybody."""
    shared_queue_of(there).attachment.shutdown.settle_puts = lambda *_: dies()  # type: ignore[method-assign]
    there.get()


def drops_all_and_dies(there: Queue) -> None:
    """Drop all that is left, and be killed before it can tell anybody once more."""
    shutdown, told = shared_queue_of(there).attachment.shutdown, list[None]()
    wake = shutdown.wake

    def twice(*args: Any, **options: Any) -> None:
        told.append(None)
        if len(told) == 3:
            dies()
        wake(*args, **options)

    shutdown.wake = twice  # type: ignore[method-assign]
    there.shutdown(immediate=True)


@pytest.mark.parametrize("wait", ["get", "get_many"])
@pytest.mark.parametrize("other", [finds_nothing_and_dies, drops_all_and_dies])
def test_one_that_was_stopped_asleep_is_told_though_another_took_all_bells_and_was_killed(
    other: Callable[[Queue], None], wait: str
) -> None:
    """Bells that one process takes are there for those who sleep, whatever becomes of it."""
    there = Queue()
    with waiters(there, [lambda: refused(there, GETS[wait])]) as [sleeper]:
        os.kill(sleeper, signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper, os.WSTOPPED | os.WNOWAIT)
        if other is finds_nothing_and_dies:
            there.shutdown()
        assert reap(in_child(lambda: other(there))) == -signal.SIGKILL
        os.kill(sleeper, signal.SIGCONT)
        assert reap(sleeper) == 0


@pytest.mark.parametrize("last", ["get", "get_many"])
def test_one_about_to_sleep_is_told_though_the_pipe_was_full_and_its_last_taker_is_killed(
    monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """A full pipe has no room for what tells of the end. So there is some before the last message can be taken."""
    there, read = Queue(), os.readv
    for _ in range(fcntl.fcntl(there.fileno(), fcntl.F_GETPIPE_SZ) >> 3):
        there.put(None)

    def stop_and_read(*arguments: Any) -> int:
        monkeypatch.setattr(os, "readv", read)
        os.kill(os.getpid(), signal.SIGSTOP)
        return read(*arguments)

    def get_at_last() -> None:
        monkeypatch.setattr(os, "readv", stop_and_read)
        refused(there, GETS["get"])

    def take_and_die() -> None:
        monkeypatch.setattr(os, "readv", lambda *arguments: dies() if read(*arguments) else 0)
        GETS[last](there)

    sleeper = in_child(get_at_last)
    os.waitid(os.P_PID, sleeper, os.WSTOPPED | os.WNOWAIT)
    there.shutdown()
    while there.qsize() > 64:
        there.get_many(64)
    while there.qsize() > 1:
        there.get()
    assert reap(in_child(take_and_die)) == -signal.SIGKILL
    os.kill(sleeper, signal.SIGCONT)
    assert reap(sleeper) == 0


def test_gets_after_a_shutdown_leave_the_pipe_as_it_is() -> None:
    """However often a program asks for the end of a queue, the tokens that tell of it do not pile up."""
    there = Queue()
    there.shutdown()
    refused(there, GETS["get"])
    before = shared_queue_of(there).tickets.unread()
    for wait in (*GETS.values(), *GETS.values()):
        refused(there, wait)
    assert shared_queue_of(there).tickets.unread() <= before + 2 * 64 * 2  # a batch's words are told of, too


def test_who_polls_is_told_of_a_shutdown() -> None:
    """``poll`` says that ``recv`` would not wait, also where it is not to wait itself."""
    there = Queue()
    assert not reading_end_of(there).poll()
    there.shutdown()
    assert reading_end_of(there).poll()
    refused(there, lambda there: reading_end_of(there).recv())


def test_an_immediate_shutdown_drops_what_was_to_be_got_again() -> None:
    """An object that did not come in the form that was asked for is dropped, too: get and join end."""
    there = JoinableQueue()
    there.put(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedLeaf):
        there.get(as_numpy=True)
    there.shutdown(immediate=True)
    assert there.empty()
    refused(there, GETS["get"])
    there.join()


def test_an_immediate_shutdown_elsewhere_drops_what_was_to_be_got_again_here() -> None:
    """An immediate shutdown drops a message that another process was to get again. Its next get raises ShutDown."""
    there = JoinableQueue()
    there.put(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedLeaf):
        there.get(as_numpy=True)
    assert reap(in_child(lambda: there.shutdown(immediate=True))) == 0
    refused(there, GETS["get"])
    there.join()


def test_who_leaves_a_spilled_queue_that_was_shut_down_takes_what_it_returned_and_nothing_else() -> None:
    """A batch from the log comes at a time, though bells stand in the pipe; and nothing is set aside."""
    count, there = 2 * CAPACITY, Queue()
    there.put_many(range(count))
    there.shutdown()
    told, tell = os.pipe()

    def take_some(took: int) -> None:
        got = list[int]()
        while len(got) < CAPACITY // 4 + 10:
            got += there.get_many(64)
        assert got == [*range(took, took + len(got))]
        there.close()
        os.write(tell, len(got).to_bytes(8, "little"))

    took = 0
    for _ in range(6):
        assert reap(in_child(functools.partial(take_some, took))) == 0
        took += int.from_bytes(os.read(told, 8), "little")
    rest = list[int]()
    with contextlib.suppress(ShutDown):
        while True:
            rest += there.get_many(64)
    assert rest == [*range(took, count)]
    os.close(told)
    os.close(tell)


@pytest.mark.parametrize("how", ["is killed", "is left by an exception"])
def test_an_immediate_shutdown_that_was_cut_short_is_finished_by_whoever_gets(how: str) -> None:
    """Else what waited would keep its memory as long as there is the queue."""
    there = Queue()
    for _ in range(10):
        there.put(LARGE)

    def cut(self: object) -> None:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt

    def shut() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(shared_queue_of(there).gets), "drop_all", cut)
            with contextlib.suppress(KeyboardInterrupt):
                there.shutdown(immediate=True)

    reap(in_child(shut))
    assert there.qsize() == 10
    refused(there, lambda queue: queue.get(timeout=LIMIT))
    assert (there.qsize(), there.empty()) == (0, True)
    assert there.trim() > 9 * LARGE.nbytes


def test_an_immediate_shutdown_drops_a_backlog_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, a million took a minute: it reads few times for what it drops."""
    there, reads, count, readv = Queue(), list[int](), 6400, os.readv
    for _ in range(count // 64):
        there.put_many([None] * 64)
    monkeypatch.setattr(os, "readv", lambda *arguments: reads.append(1) or readv(*arguments))
    there.shutdown(immediate=True)
    assert 0 < len(reads) < count // 16
    assert there.empty()


def test_an_immediate_shutdown_drops_what_came_too_early_out_of_the_spill_log() -> None:
    """It saw the head of the log, and another process, which drops, too, took that before it."""
    there = JoinableQueue()
    fcntl.fcntl(there.fileno(), 1031, 4096)  # F_SETPIPE_SZ: 512 tokens
    for number in range(520):
        there.put(number)
    tickets = shared_queue_of(there).tickets
    tickets.turn = None  # which whoever is stopped may have
    taken = list[bool]()

    def another_drops() -> None:
        drop_one(shared_queue_of(there))
        shared_queue_of(there).tasks.done()

    def another_takes_it(look: Callable[[], bytes]) -> bytes:
        found = look()
        only_doorbells = tickets.unread() and tickets.waiting() == tickets.spilled()  # are in the pipe
        if found and only_doorbells and not taken:
            taken.append(True)
            assert reap(in_child(another_drops)) == 0
        return found

    with instead_of_looking_at_the_log(tickets, another_takes_it):
        there.shutdown(immediate=True)
    assert taken
    assert shared_queue_of(there).tasks.unfinished() == 0
    assert there.qsize() == 0
