"""A queue that nobody has any more leaves nothing in the arena, however those who had it went."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from crash_points import dies_at, in_child, interrupted_at, reap, told_by_child
from wholeness import check_whole, points, strides

from tensorpipe_ipc.memory.arena import HOLDER
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue


def used(attachment: Attachment) -> Any:
    """Blocks that are not free."""
    arena = attachment.arena
    return sum(
        bool(arena.words[block >> 3] & HOLDER)
        for start, size_class, units, _ in arena.all_extents()
        for block in arena.states(start, size_class, units)[0].tolist()
    )


@pytest.mark.parametrize("maxsize", [0, 5, 7000])
def test_closing_the_last_handle_frees_what_waits_and_the_record(
    attachment: Attachment, payload: Any, maxsize: int
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    for size in (1, 400, 100_000):
        queue.put(payload(bytes(size)))
    assert used(attachment) == 4
    queue.close()
    assert used(attachment) == 0
    assert SharedMemoryQueue.create(attachment, maxsize).number != queue.number


def test_dropping_it_is_closing_it(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment, 0)
    queue.put(payload(b"waits"))
    before = len(os.listdir("/proc/self/fd"))
    del queue
    assert used(attachment) == 0
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_lease_outlives_its_queue(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment, 0)
    queue.put(payload(b"x" * 100_000))
    message = queue.get(0)
    del queue
    assert used(attachment) == 1
    assert bytes(message.payload) == b"x" * 100_000
    del message
    assert used(attachment) == 0


def test_while_a_child_has_it_it_lives(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment, 0)
    read_end, write_end = os.pipe()
    pid = in_child(lambda: os.read(read_end, 1))
    queue.put(payload(b"for the child"))
    queue.close()
    assert used(attachment) == 2
    os.write(write_end, b".")
    assert reap(pid) == 0
    attachment.destroy_left_queues()
    assert used(attachment) == 0
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("who", ["looks", "makes a queue"])
def test_a_queue_of_which_all_died_is_destroyed_by_whoever_next_looks(
    attachment: Attachment, payload: Any, who: Any
) -> None:
    def make_and_die() -> None:
        queue = SharedMemoryQueue.create(attachment, 3)
        queue.put(payload(bytes(100)))
        queue.put(payload(bytes(100_000)))
        queue.get(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert reap(in_child(make_and_die)) == -signal.SIGKILL
    assert used(attachment) == 2  # the record, and what waits
    if who == "looks":
        attachment.recover_dead()
    else:
        SharedMemoryQueue.create(attachment).close()
    assert used(attachment) == 0


@pytest.mark.slow
@strides(11, 97)
@pytest.mark.parametrize("end", ["put", "get"])
def test_a_row_whose_queue_is_gone_is_finished_all_the_same(
    attachment: Attachment, payload: Any, end: Any, step: Any
) -> None:
    """The words of a process that died half-way name a queue that nobody has: they are cleared, its blocks are freed."""

    def half() -> None:
        queue = SharedMemoryQueue.create(attachment, 3)
        queue.put(payload(bytes(400)))
        if end == "put":
            queue.put(payload(bytes(100_000)))
        else:
            queue.get(0)

    for _ in points(lambda point: dies_at(point, half, attachment.attach), stride=step):
        attachment.recover_dead()
        attachment.orphans.destroy_all()
        attachment.recover_dead()
        assert used(attachment) == 0
        assert all(
            attachment.rows.is_finished(row) for row in attachment.rows.used() if not attachment.rows.is_alive(row)
        )
    attachment.recover_dead()
    attachment.orphans.destroy_all()


@strides(7, 31)
@pytest.mark.parametrize("maxsize", [0, 3])
def test_who_buries_may_die_at_any_step(attachment: Attachment, payload: Any, maxsize: int, step: Any) -> None:
    def leave() -> None:
        queue = SharedMemoryQueue.create(attachment, maxsize)
        queue.put(payload(bytes(400)))
        queue.put(payload(bytes(100_000)))
        os._exit(0)

    def dies(point: int) -> Any:
        assert reap(in_child(leave)) == 0
        return dies_at(point, attachment.orphans.destroy_all, attachment.attach)

    for _ in points(dies, stride=step):
        attachment.recover_dead()
        attachment.orphans.destroy_all()
        assert used(attachment) == 0


def test_a_number_is_not_used_twice(attachment: Attachment) -> None:
    numbers = set()
    for _ in range(100):
        queue = SharedMemoryQueue.create(attachment, 0)
        numbers.add(queue.number)
        queue.close()
    assert len(numbers) == 100
    assert len({number & 0xFFFFFFFF for number in numbers}) == 1  # though its place is


def fail(*_: Any) -> None:
    raise MemoryError


@pytest.mark.slow
@pytest.mark.parametrize("maxsize", [0, 3])
def test_an_exception_at_any_moment_of_close_has_the_next_close_go_on(
    attachment: Attachment, payload: Any, maxsize: int
) -> None:
    """The message that an interrupted get had taken is lost with the queue, and counted; nothing of the queue stays."""
    point, raised = 1, True
    while raised:
        queue, lost = SharedMemoryQueue.create(attachment, maxsize), attachment.recovery.lost()
        for content in (b"taken, and put aside", b"waits"):
            queue.put(payload(content))
        with pytest.raises(MemoryError):
            queue.get(0, fail)
        raised = interrupted_at(point, queue.close)
        queue.close()
        del queue
        attachment.destroy_left_queues()
        attachment.orphans.destroy_all()
        assert attachment.recovery.lost() == lost + 1, f"an exception at moment {point}"
        assert used(attachment) == 0, f"an exception at moment {point}"
        point += 1 if point < 100 else 37


@pytest.mark.slow
def test_an_exception_at_any_moment_of_recovery_leaves_the_dead_to_others(attachment: Attachment, payload: Any) -> None:
    """The dead process's row is free for any other process at once, and this one goes on with it at its next look."""
    queue = SharedMemoryQueue.create(attachment, 3)

    def dies() -> None:
        attachment.attach()
        queue.get(0, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    point, raised = 1, True
    while raised:
        queue.put(payload(b"taken by the dead"))
        assert reap(in_child(dies)) == -signal.SIGKILL
        raised = interrupted_at(point, attachment.recover_dead)
        assert told_by_child(lambda: attachment.attach() or attachment.rows.index) == "1", f"at moment {point}"
        attachment.recover_dead()
        assert all(map(attachment.rows.is_finished, range(1, len(attachment.rows.used())))), f"at moment {point}"
        point += 1 if point < 60 else 23
    check_whole(attachment, queue, payload)
