"""The rows of attached processes. A lock that the kernel drops tells the living from the dead."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_points import interrupted_at
from programs import ran_in_fork

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory import rows as rows_module
from tensorpipe_ipc.memory.row import (
    BATCH,
    GET,
    HAZARDS,
    PURPOSES,
    PUT,
    SINGLES,
    answer_word,
    hazard_word,
    record_of,
    row_word,
)
from tensorpipe_ipc.memory.rows import Rows
from tensorpipe_ipc.memory.segment import Segment


@pytest.fixture
def rows() -> Iterator[Any]:
    made = Rows(Segment.create(1 << 28))
    made.attach(lambda _: True)
    yield made
    made.detach()
    vars(made).clear()  # pytest still refers to it when nothing_left_behind looks


def attached(rows: Any) -> Any:
    rows.attach(lambda _: True)
    return rows


def test_a_process_has_one_row(rows: Any) -> None:
    assert (rows.index, rows.incarnation, rows.used()) == (0, 1, [0])
    rows.attach(lambda _: True)
    assert (rows.index, rows.incarnation, rows.used()) == (0, 1, [0])
    with rows.locked([0]) as dead:  # nor does it take its own for a dead one's
        assert not dead
    assert Rows(rows.segment).used() == [0]


def test_a_row_is_dead_at_once_when_its_process_is_killed_and_not_when_it_is_stopped(
    rows: Any, child: Any, kill: Any
) -> None:
    pid = child(lambda: attached(rows))
    assert rows.used() == [0, 1]
    assert rows.is_alive(1)
    os.kill(pid, signal.SIGSTOP)
    with rows.locked([1]) as dead:
        assert not dead
    assert rows.describe(1) == f"pid {pid} (alive)"
    kill(pid)
    assert not rows.is_alive(1)
    with rows.locked([1]) as dead:
        assert dead
    assert rows.describe(1) == f"pid {pid} (dead)"


def test_a_grandchild_does_not_keep_its_killed_parents_row_alive(rows: Any, child: Any, kill: Any) -> None:
    told, tell = os.pipe()

    def parent() -> None:
        attached(rows)
        if os.fork() == 0:
            os.write(tell, os.getpid().to_bytes(4, "little"))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            signal.pause()

    pid = child(parent)
    grandchild = int.from_bytes(os.read(told, 4), "little")
    kill(pid)
    assert not rows.is_alive(1)
    os.kill(grandchild, signal.SIGKILL)
    os.close(told)
    os.close(tell)


def test_exec_is_death(rows: Any, child: Any) -> None:
    told, tell = os.pipe()
    os.set_inheritable(tell, True)
    pid = os.fork()
    if pid == 0:
        attached(rows)
        code = f"import os, signal; os.write({tell}, b'x'); signal.alarm(20); signal.pause()"
        os.execv(sys.executable, [sys.executable, "-c", code])
    os.read(told, 1)
    assert not rows.is_alive(1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(told)
    os.close(tell)


def test_other_descriptors_of_the_memfd_may_come_and_go(rows: Rows, child: Any) -> None:
    """A process stays alive to others whichever of its descriptors of the shared memory it duplicates, or opens anew."""

    def process() -> None:
        attached(rows)
        same = os.fstat(rows.segment.descriptor)
        own = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
        of_it = [fd for fd in own if os.path.samestat(os.fstat(fd), same)]
        assert len(of_it) > 1  # one is for the locks
        for descriptor in of_it:
            os.close(os.dup(descriptor))
        os.close(os.open(f"/proc/self/fd/{rows.segment.descriptor}", os.O_RDWR))

    child(process)
    assert rows.is_alive(1)


def test_a_dead_row_is_adopted_before_a_fresh_one_and_only_when_it_is_finished(
    rows: Any, child: Any, kill: Any
) -> None:
    kill(child(lambda: attached(rows)))
    asked = []
    child(lambda: (rows.attach(lambda row: asked.append(row) or False), assert_is(rows.index, 2)))
    child(lambda: (attached(rows), assert_is((rows.index, rows.incarnation), (1, 2))))
    assert rows.used() == [0, 1, 2]


def assert_is(value: Any, expected: Any) -> None:
    assert value == expected


def test_a_finished_row_is_not_finished_again(rows: Any, child: Any, kill: Any) -> None:
    kill(child(lambda: attached(rows)))
    with rows.locked([1]) as dead:
        assert dead
        rows.finished(1)
    child(lambda: (rows.attach(lambda _: False), assert_is(rows.index, 1)))
    assert not rows.is_finished(1)


@pytest.mark.parametrize(("before", "after"), [(1, 2), ((1 << 16) - 2, (1 << 16) - 1), ((1 << 16) - 1, 1)])
def test_incarnations_go_round(rows: Any, before: Any, after: Any) -> None:
    """A block's state has 16 bits for it, and 0 is a row that nobody ever had."""
    rows.words[rows_module.INCARNATIONS + 1] = rows.words[rows_module.FINISHED + 1] = before
    second = Rows(rows.segment)
    second.attach(lambda _: False)
    assert (second.index, second.incarnation, rows.words[rows_module.INCARNATIONS + 1]) == (1, after, after)
    second.detach()


def test_a_record_that_nobody_uses(rows: Any) -> None:
    """Of a dead row: the last that has no purpose, or nothing in its words; none, when all have."""
    words, base = rows.words, row_word(1)
    for number in range(SINGLES):
        words[base + PURPOSES + number] = 7 << 8 | PUT
        words[record_of(1, number).credit] = 1
    with pytest.raises(SharedMemoryError, match="all 1920 operations of row 1 are in use"):
        rows.unused_record(1)
    for word in ("credit", "ticket", "given", "tally"):
        words[record_of(1, 5).credit] = 0
        assert rows.unused_record(1) == record_of(1, 5)
        words[getattr(record_of(1, 5), word)] = 1
        with pytest.raises(SharedMemoryError):
            rows.unused_record(1)
        words[getattr(record_of(1, 5), word)] = 0
    words[base + PURPOSES + 9] = 0
    assert rows.unused_record(1) == record_of(1, 9)


def test_only_one_thread_recovers(rows: Any, child: Any, kill: Any) -> None:
    kill(child(lambda: attached(rows)))
    inside = []

    def other() -> None:
        with rows.locked([1]) as dead:
            inside.append(dead)

    with rows.locked([1]) as dead:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)
        with rows.locked([1]) as again:  # a signal handler that came in between
            inside.append(again)
        assert dead
    assert inside == [[], []]


def test_when_all_rows_are_taken_it_says_so(rows: Any, child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_ROWS", 2)
    child(lambda: attached(rows))
    second = Rows(rows.segment)
    with pytest.raises(SharedMemoryError, match="all 2 rows"):
        second.attach(lambda _: True)


def test_threads_get_different_operations_and_spare_ones_are_used_again(rows: Any) -> None:
    operations = [rows.operation(7, PUT) for _ in range(3)] + [rows.operation(7, GET, BATCH)]
    words = [
        word
        for each in operations
        for first in (each.credit, each.ticket, each.given)
        for word in range(first, first + each.size)
    ]
    assert len(words) == len(set(words)) == 3 * 3 + 3 * BATCH
    assert [record.ticket for record in rows.records(0, 7, PUT)] == [each.ticket for each in operations[:3]]
    assert [record.ticket for record in rows.records(0, 7, GET)] == [operations[3].ticket]
    rows.retire(operations[0])
    assert rows.operation(8, GET) is operations[0]
    assert len(list(rows.records(0, 7))) == 3


def test_so_many_operations_that_there_is_no_room_say_so(rows: Any) -> None:
    for _ in range(rows_module.BATCHES):
        rows.operation(7, PUT, BATCH)
    with pytest.raises(SharedMemoryError, match="operations"):
        rows.operation(7, PUT, BATCH)


def test_after_a_fork_the_child_has_no_row_and_is_told(rows: Any, child: Any) -> None:
    class Owner:
        told = False

        def forget(self) -> None:
            self.told = True

    owner = Owner()
    rows.after_fork(owner.forget)
    child(lambda: (assert_is((rows.index, owner.told), (-1, True)), attached(rows), assert_is(rows.index, 1)))
    assert (rows.index, owner.told) == (0, False)


def test_a_fork_while_a_thread_attaches_waits(tmp_path: Path) -> None:
    """Else the child would inherit a descriptor that nobody knows, and with it the parent's row."""
    code = (
        "import os, threading\n"
        "from tensorpipe_ipc.memory.rows import Rows\n"
        "from tensorpipe_ipc.memory.segment import Segment\n"
        "rows = Rows(Segment.create(1 << 28))\n"
        "forked = []\n"
        "def fork():\n"
        "    pid = os.fork()\n"
        "    if pid == 0: os._exit(len(os.listdir('/proc/self/fd')) - before)\n"
        "    forked.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "thread = threading.Thread(target=fork)\n"
        "Rows(rows.segment).attach(lambda _: True)\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "real = rows._find\n"
        "def find(descriptor, finish):\n"
        "    thread.start()\n"
        "    thread.join(0.2)\n"
        "    return real(descriptor, finish)\n"
        "rows._find = find\n"
        "rows.attach(lambda _: True)\n"
        "thread.join(20)\n"
        "print(forked)\n"
    )
    done = ran_in_fork("-c", code, folder=tmp_path)
    assert done.out == "[0]\n", done.err


def test_what_a_dead_row_counted_goes_on(rows: Any) -> None:
    """A single operation's tally, for the end that it was of, once; others begin at zero, and pass over such words."""
    words = rows.words
    rows.words[rows_module.INCARNATIONS + 1] = rows.words[rows_module.FINISHED + 1] = 1
    counted, idle, batch = record_of(1, 0), record_of(1, 2), record_of(1, SINGLES)
    for record in (counted, idle, batch):
        words[record.purpose_word] = 7 << 8 | PUT
    words[counted.tally] = words[batch.credit] = 5
    words[counted.counters] = words[batch.counters + 3] = 9
    second = Rows(rows.segment)
    second.attach(lambda _: False)
    try:
        assert second.index == 1
        assert not any(words[first] for first in (counted.counters, batch.counters + 3))
        other = second.operation(8, PUT)
        assert (other.tally, other.tally_before) == (record_of(1, 1).tally, 0)
        first, following = second.operation(7, PUT), second.operation(7, PUT)
        assert (first.tally, first.tally_before) == (counted.tally, 5)
        assert (following.tally, following.tally_before) == (idle.tally, 0)
    finally:
        second.detach()


def test_who_is_interrupted_while_it_attaches_has_no_row(rows: Any) -> None:
    """Its lock is gone with its descriptor, so that others, and itself, may have the row."""
    second, third = Rows(rows.segment), Rows(rows.segment)
    before = os.listdir("/proc/self/fd")

    def interrupt(row: int, _: int) -> Any:
        assert (row, second.index, second.is_alive(row)) == (1, -1, False)  # to itself it is free
        assert rows.is_alive(row)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        second.attach(lambda _: True, interrupt)
    assert (second.index, os.listdir("/proc/self/fd"), rows.is_alive(1)) == (-1, before, False)
    for each, row in ((third, 1), (second, 2)):
        each.attach(lambda _: True)
        assert each.index == row
    for each in (second, third):
        each.detach()


def test_a_row_that_somebody_had_since_it_looked_is_no_fresh_one(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be dead by now, and not finished."""
    second = Rows(rows.segment)
    monkeypatch.setattr(second, "used", list)
    rows.words[rows_module.INCARNATIONS + 1] = 1
    second.attach(lambda _: True)
    assert second.index == 2
    second.detach()


def test_without_a_descriptor_it_says_so(rows: Any) -> None:
    second, (before, hard) = Rows(rows.segment), resource.getrlimit(resource.RLIMIT_NOFILE)
    left = os.dup(0)
    os.close(left)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (left, hard))
        with pytest.raises(SharedMemoryError, match="the segment could not be opened again: Too many open files"):
            second.attach(lambda _: True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    assert second.index == -1
    second.attach(lambda _: True)
    assert second.index == 1
    second.detach()


def test_the_parts_of_a_row_follow_each_other_to_the_word() -> None:
    """As drawn in row.py: none overlaps the next, and all lie within the row."""
    base = row_word(3)
    assert (base, row_word(4)) == (4 << 15, 5 << 15)
    assert (record_of(3, 0).purpose_word, record_of(3, 0).credit) == (base + 16, base + 2000)
    last, first, end = record_of(3, 1919), record_of(3, 1920), record_of(3, 1983)
    assert (last.tally, first.credit, first.tally) == (base + 9679, base + 9680, 0)
    assert (end.purpose_word, end.given + 64) == (base + 1999, base + 21968)
    assert (record_of(3, 0).counters, end.counters + 4) == (base + 21968, base + 29904)
    assert (answer_word(3, 512), answer_word(3, 511)) == (base + 29904, base + 30415)
    assert (record_of(3, 0).hazard, end.hazard, hazard_word(3, HAZARDS)) == (base + 30416, base + 32399, base + 32402)
    assert [each.size for each in first.each()] == [1] * 64
    assert list(last.each()) == [last]


def test_an_exception_as_dead_rows_are_locked_keeps_nobody_from_them_later(rows: Any, child: Any, kill: Any) -> None:
    """At each step of it. They can be locked again, and are not while they are."""
    kill(child(lambda: attached(rows)))

    def lock() -> None:
        with rows.locked([1]):
            pass

    for point in itertools.count(1):
        if not interrupted_at(point, lock):
            break
        with rows.locked([1]) as dead:
            assert dead == [1], f"after step {point}"
    assert point > 5
