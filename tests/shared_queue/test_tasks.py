"""Tasks are counted once each, whoever dies where; join neither ends early nor waits for the dead."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from children import in_thread
from crash_points import LIMIT, dies_at, in_child, interrupted_at, reap
from inside import keep_spare, open_queue_of, shared_queue_of
from wholeness import drain, points, stride

from tensorpipe_ipc.errors import Empty
from tensorpipe_ipc.memory.row import DONE, GET, PUT
from tensorpipe_ipc.queues.tensor_queue import JoinableQueue, Queue
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue

STRIDE = stride(5)


@pytest.fixture(params=[0, 4])
def queue(attachment: Attachment, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = SharedMemoryQueue.create(attachment, request.param, tasks=True)
    yield made
    made.close()
    vars(made).clear()  # pytest still refers to it when nothing_left_behind looks


def test_puts_and_dones_are_summed_over_processes(attachment: Attachment, payload: Any, queue: Any) -> None:
    def work() -> None:
        queue.put(payload(b"from a child"))
        queue.get(LIMIT)
        queue.tasks.done()

    queue.put(payload(b"from here"))
    for _ in range(3):
        assert reap(in_child(work)) == 0
    attachment.recover_dead()
    assert queue.tasks.unfinished() == 1
    queue.get(0)
    assert queue.tasks.unfinished() == 1
    queue.tasks.done()
    queue.tasks.wait(attachment.recover_dead)
    with pytest.raises(ValueError, match="too many times"):
        queue.tasks.done()


@pytest.mark.kills
def test_a_producer_killed_at_any_step_is_counted_exactly_if_its_message_is_there(
    attachment: Attachment, payload: Any, queue: Any
) -> None:
    seen = set()

    def first() -> None:
        attachment.attach()
        keep_spare(queue, PUT)
        attachment.arena.discard(attachment.arena.allocate(1))  # so that the steps are the same each time

    for _ in points(lambda point: dies_at(point, lambda: queue.put(payload(b"x")), first), stride=stride(2)):
        attachment.recover_dead()
        left = queue.tasks.unfinished()
        assert left == len(drain(queue))
        seen.add(left)
        for _ in range(left):
            queue.tasks.done()
        assert queue.tasks.unfinished() == 0
    assert seen == {0, 1}


@pytest.mark.kills
def test_what_a_dead_consumer_had_taken_counts_as_done_and_nothing_else(
    attachment: Attachment, payload: Any, queue: Any
) -> None:
    seen = set()

    def first() -> None:
        attachment.attach()
        keep_spare(queue, GET)

    def work() -> None:
        queue.get(0)
        queue.tasks.done()

    def dies(point: int) -> Any:
        drain_done(queue)
        queue.put(payload(b"1"), timeout=0)
        queue.put(payload(b"2"), timeout=0)
        return dies_at(point, work, first)

    for _ in points(dies, stride=STRIDE):
        attachment.recover_dead()
        left = queue.tasks.unfinished()
        assert left == len(drain(queue))
        seen.add(left)
        for _ in range(left):
            queue.tasks.done()
        assert queue.tasks.unfinished() == 0
    assert seen == {1, 2}


def test_join_does_not_wait_for_who_alone_can_judge_what_a_dead_worker_did_to_another_queue(
    attachment: Attachment, payload: Any, queue: Any
) -> None:
    """The worker was killed in a put. Nobody here has that queue, and who has it sleeps in get."""
    other, (told, telling) = SharedMemoryQueue.create(attachment, 4), os.pipe()

    class Endless:
        nbytes = 8

        def write_into(self, place: memoryview) -> None:
            os.write(telling, b"in put")
            time.sleep(LIMIT)

    sleeper = in_child(lambda: other.get(None))
    worker = in_child(lambda: (queue.get(None), other.put(Endless())))
    other.close()
    queue.put(payload(b"a task"))
    assert os.read(told, 6) == b"in put"
    os.kill(worker, signal.SIGKILL)
    reap(worker)
    in_thread(lambda: queue.tasks.wait(attachment.recover_dead))()
    os.kill(sleeper, signal.SIGKILL)
    reap(sleeper)
    os.close(told)
    os.close(telling)


def drain_done(queue: Any) -> None:
    while True:
        try:
            queue.get(0)
        except Empty:
            return
        queue.tasks.done()


@pytest.mark.kills
def test_a_recovering_process_killed_at_any_step_of_counting_is_followed_by_another(
    attachment: Attachment, payload: Any, queue: Any
) -> None:
    def work() -> None:
        attachment.attach()
        queue.get(0)
        queue.get(0)
        queue.tasks.done()
        os._exit(0)

    def dies(point: int) -> Any:
        for content in (b"1", b"2", b"3"):
            queue.put(payload(content), timeout=0)
        assert reap(in_child(work)) == 0
        return dies_at(point, attachment.attach)

    for _ in points(dies, stride=stride(97)):
        attachment.recover_dead()
        assert queue.tasks.unfinished() == 1
        assert drain(queue) == [b"3"]
        queue.tasks.done()
        assert queue.tasks.unfinished() == 0


def test_a_row_that_changes_hands_keeps_what_it_counted(attachment: Attachment, payload: Any, queue: Any) -> None:
    other = SharedMemoryQueue.create(attachment, 0, tasks=True)

    def put_into(target: Any) -> None:
        target.put(payload(b"x"))
        os._exit(0)

    for target in (queue, other, queue, other):  # one after another, all have the same row
        assert reap(in_child(lambda: put_into(target))) == 0  # noqa: B023
    attachment.recover_dead()
    assert len(attachment.rows.used()) == 2
    assert (queue.tasks.unfinished(), other.tasks.unfinished()) == (2, 2)


def test_a_shutdown_that_drops_finishes_the_dropped(attachment: Attachment, payload: Any, queue: Any) -> None:
    queue.put(payload(b"1"))
    queue.put(payload(b"2"))
    queue.shut_down(drop=True)
    queue.tasks.wait(attachment.recover_dead)
    assert queue.tasks.unfinished() == 0


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("second", [0, 2, 9, 16])
def test_join_does_not_wait_for_what_an_exception_inside_get_lost(
    attachment: Attachment, payload: Any, queue: Any, second: Any
) -> None:
    """Also where another comes in the get after it."""
    lost, got, sweeps = attachment.recovery.lost(), [], 0
    # There is one moment at which a message is lost, and a look that is due by the clock may shift it.
    while attachment.recovery.lost() == lost and sweeps < 20:
        sweeps, point, raised = sweeps + 1, 1, True
        while raised:
            queue.put(payload(bytes(100_000)), timeout=0)
            raised = interrupted_at(point, lambda: got.append(queue.get(0)))
            with contextlib.suppress(Empty):
                if raised and second:
                    interrupted_at(second, lambda: got.append(queue.get(0)))
                while True:
                    got.append(queue.get(0))
            for _ in got:
                queue.tasks.done()
            assert queue.tasks.unfinished() == 0, f"an exception at moment {point}"
            got.clear()
            point += 1
    assert point > 20
    assert attachment.recovery.lost() > lost


@pytest.mark.slow
@pytest.mark.usefixtures("handler")
def test_a_shutdown_that_drops_finishes_the_dropped_though_an_exception_came_in_another(
    attachment: Attachment, payload: Any
) -> None:
    point, raised = 1, True
    while raised:
        queue = SharedMemoryQueue.create(attachment, 0, tasks=True)
        queue.put(payload(b"1"))
        queue.put(payload(b"2"))
        attachment.shutdown.begin(open_queue_of(queue).handle, drop=True)
        raised = interrupted_at(point, queue.gets.drop_all)
        queue.gets.drop_all()
        assert queue.tasks.unfinished() == 0, f"an exception at moment {point}"
        queue.close()
        point += 7  # most are in the look for those who wait
    assert point > 100


def test_when_the_queue_is_gone_its_counts_go(attachment: Attachment, payload: Any, queue: Any) -> None:
    queue.put(payload(b"1"))
    number, rows = queue.number, attachment.rows
    queue.get(0)
    queue.tasks.done()
    assert {attachment.words[record.tally] for record in rows.records(rows.index, number)} == {2}
    queue.close()
    assert [
        record
        for each in (PUT, GET, DONE)
        for record in rows.records(rows.index, number, each)
        if attachment.words[record.tally]
    ] == []


@pytest.mark.kills
def test_generations_of_workers_take_no_more_records_than_one(attachment: Attachment, payload: Any, queue: Any) -> None:
    def work() -> None:
        queue.put(payload(b"x"))
        queue.get(0)
        queue.tasks.done()
        os._exit(0)

    for _ in range(30):
        assert reap(in_child(work)) == 0
    rows = attachment.rows
    counting = [record for record in rows.records(1) if record.size == 1 and attachment.words[record.tally]]
    assert len(counting) == 3
    assert queue.tasks.unfinished() == 0


def test_a_worker_killed_as_a_get_ends_is_seen_first_by_one_that_lacks_its_queue() -> None:
    """All but the last step of its count was done. The next worker does its own tasks, and those alone."""
    other = Queue()

    def work() -> None:
        tasks = JoinableQueue()
        for number in range(4):
            tasks.put(number)

        def get_and_die() -> None:
            tasks.get()
            (operation,) = open_queue_of(shared_queue_of(tasks)).operations[-1:]
            shared_queue_of(tasks).words[operation.tally] += 1  # as before J4
            os.kill(os.getpid(), signal.SIGKILL)

        assert reap(in_child(get_and_die)) == -signal.SIGKILL
        os.kill(os.getpid(), signal.SIGSTOP)

        def get_and_report() -> None:
            for _ in range(3):
                tasks.get(timeout=LIMIT)
                tasks.task_done()

        assert reap(in_child(get_and_report)) == 0
        in_thread(tasks.join)(LIMIT)

    worker = in_child(work)
    os.waitpid(worker, os.WUNTRACED)
    other.put(1)
    other.statistics()  # it looks for the dead
    os.kill(worker, signal.SIGCONT)
    assert reap(worker) == 0
