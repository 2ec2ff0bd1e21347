"""MemoryTracker: each page once, by the kernel's own figures; processes that come and go; what it leaves behind."""

from __future__ import annotations

import builtins
import json
import mmap
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import children
import containers
import pytest
import torch
from crash_points import in_child, reap
from programs import ran

import tensorpipe_ipc as tp
from tensorpipe_ipc import tracking
from tensorpipe_ipc.process import Memory, memory
from tensorpipe_ipc.tracking import together

MIB = 1 << 20


def _rollup(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


class Forked:
    """A child that does something, says so, and ends when it is told to."""

    def __init__(self, begin: Any) -> None:
        here, its = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                kept = begin()
                os.write(its, b"x")
                signal.pause()
                del kept
            finally:
                os._exit(0)
        os.close(its)
        assert os.read(here, 1) == b"x", "the child failed"
        os.close(here)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_five_processes_on_one_lease_count_it_once() -> None:
    """The figures are those of /proc/*/smaps_rollup within 1 %, and 256 MiB that five processes read count once."""
    torch.set_num_threads(1)
    queue = tp.Queue()
    with queue.loan((256 * MIB,), torch.uint8) as lent:
        lent.fill_(1)
    lease = queue.get(timeout=10)
    page = lease[::4096]
    root = Forked(lambda: (page.sum(), [Forked(page.sum) for _ in range(4)]))
    try:
        with tp.MemoryTracker(None, pid=root.pid) as tracked:
            found = tracked.sample()
            each = [_rollup(of.pid) for of in tracked.processes]
    finally:
        for of in tracked.processes[1:]:
            os.kill(of.pid, signal.SIGKILL)
        root.end()
    unique = sum(of["Private_Clean"] + of["Private_Dirty"] for of in each)
    proportional = sum(of["Pss"] for of in each)
    assert found.processes == 5
    assert found.rss == pytest.approx(sum(of["Rss"] for of in each), rel=0.01)
    assert found.uss == pytest.approx(unique, rel=0.01)
    assert found.pss == pytest.approx(proportional, rel=0.01)
    least = max(of["Shared_Clean"] + of["Shared_Dirty"] for of in each)
    assert found.shared == pytest.approx(max(proportional - unique, least), rel=0.01)
    assert found.rss > 5 * 256 * MIB, "each of the five has touched all of it"
    assert tracked.peak.rss >= found.rss
    assert found.uss is not None
    assert found.shared is not None
    assert found.uss + found.shared < found.rss - 3 * 256 * MIB, "counted once"
    (arena,) = tracked.arenas
    assert arena.leased == 256 * MIB
    assert 256 * MIB <= arena.resident < 258 * MIB
    assert [part.pid for part in arena.parts if part.held] == [os.getpid()]
    assert arena.capacity > 0


def test_memory_of_one_process_is_of_one_word_each() -> None:
    """rss is uss and shared; a family of one has its figures."""
    of = memory()
    assert of.rss == of.uss + of.shared
    assert together([of]) == of
    assert together([]) == Memory(0, 0, 0, 0, 0)


def test_a_peak_between_two_samples_is_seen_without_a_thread() -> None:
    """The kernel keeps the peak: 96 MiB that came and went are in peak.rss, not in growth; and no thread was started."""
    threads = threading.active_count()
    with tp.MemoryTracker(None, children=False) as tracked:
        assert threading.active_count() == threads
        held = mmap.mmap(-1, 96 * MIB)  # and not malloc's, which may have as much lying ready
        held.write(b"x" * len(held))
        held.close()
    assert tracked.peak.rss - tracked.samples[0].rss > 90 * MIB
    assert (tracked.growth.rss or 0) < 30 * MIB
    assert len(tracked.samples) == 2


def test_growth_is_what_stays() -> None:
    """48 MiB that are kept are growth, of unique memory too."""
    with tp.MemoryTracker(None, children=False) as tracked:
        held = mmap.mmap(-1, 48 * MIB)  # and not malloc's, which may have as much lying ready
        held.write(b"x" * len(held))
    assert tracked.growth.rss > 40 * MIB
    assert (tracked.growth.uss or 0) > 40 * MIB
    held.close()


def test_children_come_and_go() -> None:
    """A child that is started meanwhile is counted while it lives, as one that ended afterwards; a grandchild, too."""
    with tp.MemoryTracker(None) as tracked:
        before = tracked.sample().processes
        known = {each.pid for each in tracked.processes}  # pytest's and multiprocessing's own
        child = Forked(lambda: Forked(lambda: b"x" * (32 * MIB)))
        during = tracked.sample()
        (grandchild,) = [each for each in tracked.processes if each.pid not in {*known, child.pid}]
        os.kill(grandchild.pid, signal.SIGKILL)
        child.end()
        assert tracked.sample().processes == before
    assert during.processes == before + 2
    assert grandchild.peak.uss >= 32 * MIB
    assert {each.pid for each in tracked.processes if each.ended} == {child.pid, grandchild.pid}


def test_a_child_that_ended_is_listed_once_before_its_parent_waits_for_it_and_after() -> None:
    """A child that nobody has waited for is one process, however often samples are taken."""
    with tp.MemoryTracker(None) as tracked:
        before = tracked.sample().processes
        child = Forked(lambda: None)
        tracked.sample()
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert [tracked.sample().processes for _ in range(2)] == [before, before]
        child.end()
        tracked.sample()
    (listed,) = [each for each in tracked.processes if each.pid == child.pid]
    assert listed.ended
    assert listed.last.rss


def test_a_tracked_process_that_ended_is_listed_once() -> None:
    child = Forked(lambda: None)
    with tp.MemoryTracker(None, pid=child.pid) as tracked:
        child.end()
        assert [tracked.sample().processes for _ in range(2)] == [0, 0]
    assert [(each.pid, each.ended) for each in tracked.processes] == [(child.pid, True)]


def test_the_thread_samples_and_ends() -> None:
    """With an interval samples come by themselves, quick ones among them; afterwards the thread is gone."""
    with tp.MemoryTracker(0.001) as tracked:
        (thread,) = [each for each in threading.enumerate() if each.name == "MemoryTracker"]
        while len(tracked.samples) < 5 or all(sample.uss is not None for sample in tracked.samples):
            thread.join(0.001)
            assert thread.is_alive()
    assert not thread.is_alive()
    assert [sample.seconds for sample in tracked.samples] == sorted(sample.seconds for sample in tracked.samples)
    assert all(sample.rss > 0 for sample in tracked.samples)
    assert 0 < tracked.share < 1


def test_it_ends_while_a_child_that_was_forked_meanwhile_lives_on() -> None:
    """As the workers of a pool do, until their parent has ended."""
    with tp.MemoryTracker():
        child = in_child(signal.pause)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    assert reap(child) == -signal.SIGKILL


@pytest.mark.slow
def test_what_samples_cost_that_were_asked_for_counts_beside_the_threads() -> None:
    """A program that asks for many reads it in the share."""
    began = time.monotonic()
    with tp.MemoryTracker(0.001) as tracked:
        asked = time.thread_time()
        for _ in range(50):
            tracked.sample()
        asked = time.thread_time() - asked
        count = len(tracked.samples)
        children.wait_until(lambda: len(tracked.samples) > count + 2)
    assert tracked.share * (time.monotonic() - began) > 0.9 * asked


@pytest.mark.slow
def test_a_long_time_takes_no_more_memory_and_keeps_the_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older samples are dropped, but not the first, nor what the highest of each figure was."""
    monkeypatch.setattr(tracking, "MOST", 10)
    with tp.MemoryTracker(None, children=False) as tracked:
        first = tracked.samples[0]
        held = mmap.mmap(-1, 96 * MIB)
        held.write(b"x" * len(held))
        highest = tracked.sample()
        held.close()
        lengths = {(tracked.sample(), len(tracked.samples))[1] for _ in range(100)}
        assert tracked.samples[0] is first
        assert highest not in tracked.samples
        assert max(lengths) < 10
        assert (tracked.peak.uss or 0) >= (highest.uss or 0) > 96 * MIB
    assert tracked.growth.seconds > 0
    assert (tracked.growth.uss or 0) < 48 * MIB


def test_it_tracks_once_and_here(tmp_path: Path) -> None:
    """Used again, outside of its block, or in a fork, it says so; a forked child may leave the block."""
    tracker = tp.MemoryTracker(None)
    with pytest.raises(tp.Closed, match="not at work"):
        tracker.sample()
    with tracker:
        pid = os.fork()
        if not pid:
            try:
                tracker.sample()
            except tp.Closed:
                tracker.__exit__(None, None, None)
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    with pytest.raises(tp.Closed, match="tracks once"):
        tracker.__enter__()


@pytest.mark.parametrize("interval", [0, 0.0001, -1, float("nan")])
def test_an_interval_out_of_range_is_named(interval: float) -> None:
    """Below a millisecond it would measure itself."""
    with pytest.raises(ValueError, match="at least 0.001"):
        tp.MemoryTracker(interval)


def test_nobody_is_no_process() -> None:
    """A process that is not there is an error on entering, and leaves nothing open."""
    with pytest.raises(ProcessLookupError, match="no process 4194305"), tp.MemoryTracker(pid=(1 << 22) + 1):
        pass


def test_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is plain text with every process; the JSON holds all; a picture is drawn, or it is said what is missing."""
    with tp.MemoryTracker(None) as tracked:
        queue = tp.Queue()
        queue.put(torch.ones(1 << 20))
        tracked.sample()
    said = tracked.report()
    assert f"pid {os.getpid()}, peak" in said
    assert re.search(r"all, each page once +[\d,.]+ +[\d,.]+ +[\d,.]+ +[\d,.]+ +[\d,.]+\n", said)
    assert f"pid {os.getpid()} (alive): 0 held with 0.0, 1 waiting, 0 being filled" in said
    written = json.loads(tracked.to_json())
    assert set(written) == {"share_of_a_core", "peak", "growth", "processes", "arenas", "samples"}
    assert written["peak"]["rss"] == tracked.peak.rss
    assert written["arenas"][-1]["in_use"] == 4 << 20
    pid = os.fork()  # matplotlib keeps its fonts open
    if not pid:
        try:
            tracked.plot(str(tmp_path / "memory.png"))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "memory.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("no", name="matplotlib")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'tensorpipe-ipc[plot]'")):
        tracked.plot(str(tmp_path / "other.png"))


@pytest.mark.slow
@pytest.mark.limit(40)
def test_a_handler_and_a_forked_child_read_figures_while_samples_are_taken() -> None:
    """Neither waits for whoever samples. A sample that a handler asks for in the middle of one is refused."""
    refused: list[Exception] = []

    def handler(*_: object) -> None:
        memory.report()
        try:
            memory.sample()
        except tp.Busy as error:
            refused.append(error)

    with tp.MemoryTracker(0.001) as memory, children.ticking(0.002, handler):
        while not refused:
            memory.sample()
    with tp.MemoryTracker(0.001) as memory:
        for _ in range(150):
            assert reap(in_child(lambda: memory.peak)) == 0


@pytest.mark.slow
def test_a_lack_of_descriptors_takes_no_living_process_for_ended() -> None:
    """A sample comes out full, or raises. Once there are descriptors again, the next one finds all processes."""
    code = """
import os, resource, threading, time
import tensorpipe_ipc as tp
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
told, tell = os.pipe()
if not os.fork():
    os.close(tell)
    os.read(told, 1)
    os._exit(0)
done = threading.Event()
def fill_and_free():
    while not done.is_set():
        taken = []
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            for fd in taken:
                os.close(fd)
with tp.MemoryTracker(None) as memory:
    before = memory.sample().processes
    thread = threading.Thread(target=fill_and_free)
    thread.start()
    found, refused, deadline = set(), 0, time.monotonic() + 20
    while refused < 300 and time.monotonic() < deadline:
        try:
            found.add(memory.sample().processes)
        except OSError:
            refused += 1
    done.set()
    thread.join()
    while memory.sample().processes < 2 and time.monotonic() < deadline + 20:
        pass  # a child may be missing from the kernel's list while a thread ends
    print(refused > 0, before, found <= {2}, memory.sample().processes, any(each.ended for each in memory.processes))
"""
    done = ran("-c", code)
    assert (done.out, done.err) == ("True 2 True 2 False\n", "")


@pytest.mark.slow
def test_a_lack_of_descriptors_ends_no_tracker() -> None:
    """Samples are left out meanwhile, and taken again afterwards. The block's own exception comes out of it."""
    code = """
import os, resource, time
import tensorpipe_ipc as tp
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
def fill(taken):
    while True:
        try:
            taken.append(os.dup(0))
        except OSError:
            return taken
try:
    with tp.MemoryTracker(0.001) as memory:
        taken = fill([])
        end = time.monotonic() + 1
        while time.monotonic() < end:
            fill(taken)
        for fd in taken:
            os.close(fd)
        before = memory.samples[-1].seconds
        deadline = time.monotonic() + 20
        while not any(each.seconds > before and each.uss is not None for each in memory.samples):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        fill([])
        raise KeyError("the program's own")
except KeyError as error:
    print(error)
"""
    done = ran("-c", code)
    assert (done.out, done.err) == ('"the program\'s own"\n', ""), done


@pytest.mark.skipif(
    os.geteuid() or containers.HIDDEN not in containers.WAYS, reason="only root may hide processes from another user"
)
def test_a_child_of_another_user_that_is_hidden_is_left_out() -> None:
    def track() -> None:
        until, told = os.pipe()
        child = os.fork()
        if not child:
            os.close(told)
            os.read(until, 1)
            os._exit(0)
        containers.enter(containers.HIDDEN)  # the child stays the first user's
        with tp.MemoryTracker(interval=None) as memory:
            assert memory.sample().processes == 1
        assert [each.pid for each in memory.processes] == [os.getpid()]
        assert str(os.getpid()) in memory.report()
        os.close(told)
        os.waitpid(child, 0)

    assert reap(in_child(track)) == 0
