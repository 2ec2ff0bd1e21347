"""A queue that nobody has any more leaves nothing in the arena, however those who had it went."""

import os
import signal

import pytest
from crash_points import dies_at, in_child, reap
from wholeness import points, strides

from tensorpipe_ipc.memory.arena import HOLDER
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue


def used(undertaker):
    """Blocks that are not free."""
    arena = undertaker.arena
    return sum(
        bool(arena.words[block >> 3] & HOLDER)
        for start, kind, units, _ in arena._all_extents()
        for block in arena._blocks(start, kind, units)
    )


@pytest.mark.parametrize("maxsize", [0, 5, 7000])
def test_closing_the_last_handle_frees_what_waits_and_the_record(undertaker, payload, maxsize):
    queue = SharedMemoryQueue.create(undertaker, maxsize)
    for size in (1, 400, 100_000):
        queue.put(payload(bytes(size)))
    assert used(undertaker) == 4
    queue.close()
    assert used(undertaker) == 0
    assert SharedMemoryQueue.create(undertaker, maxsize).number != queue.number


def test_dropping_it_is_closing_it(undertaker, payload):
    queue = SharedMemoryQueue.create(undertaker, 0)
    queue.put(payload(b"waits"))
    before = len(os.listdir("/proc/self/fd"))
    del queue
    assert used(undertaker) == 0
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_lease_outlives_its_queue(undertaker, payload):
    queue = SharedMemoryQueue.create(undertaker, 0)
    queue.put(payload(b"x" * 100_000))
    message = queue.get(0)
    del queue
    assert used(undertaker) == 1
    assert bytes(message.payload) == b"x" * 100_000
    del message
    assert used(undertaker) == 0


def test_while_a_child_has_it_it_lives(undertaker, payload):
    queue = SharedMemoryQueue.create(undertaker, 0)
    read_end, write_end = os.pipe()
    pid = in_child(lambda: os.read(read_end, 1))
    queue.put(payload(b"for the child"))
    queue.close()
    assert used(undertaker) == 2
    os.write(write_end, b".")
    assert reap(pid) == 0
    undertaker.bury_left()
    assert used(undertaker) == 0
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("who", ["looks", "makes a queue"])
def test_a_queue_of_which_all_died_is_buried_by_whoever_next_looks(undertaker, payload, who):
    def make_and_die():
        queue = SharedMemoryQueue.create(undertaker, 3)
        queue.put(payload(bytes(100)))
        queue.put(payload(bytes(100_000)))
        queue.get(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert reap(in_child(make_and_die)) == -signal.SIGKILL
    assert used(undertaker) == 2  # the record, and what waits
    if who == "looks":
        undertaker.look()
    else:
        SharedMemoryQueue.create(undertaker).close()
    assert used(undertaker) == 0


@strides(11, 97)
@pytest.mark.parametrize("end", ["put", "get"])
def test_a_row_whose_queue_is_gone_is_finished_all_the_same(undertaker, payload, end, step):
    """The words of a process that died half-way name a queue that nobody has: they are cleared, its blocks are freed."""

    def half():
        queue = SharedMemoryQueue.create(undertaker, 3)
        queue.put(payload(bytes(400)))
        if end == "put":
            queue.put(payload(bytes(100_000)))
        else:
            queue.get(0)

    for _ in points(lambda point: dies_at(point, half, undertaker.attach), stride=step):
        undertaker.look()
        undertaker.bury_all()
        undertaker.look()
        assert used(undertaker) == 0
        assert all(
            undertaker.rows.is_finished(row) for row in undertaker.rows.used() if not undertaker.rows.is_alive(row)
        )
    undertaker.look()
    undertaker.bury_all()


@strides(7, 31)
@pytest.mark.parametrize("maxsize", [0, 3])
def test_who_buries_may_die_at_any_step(undertaker, payload, maxsize, step):
    def leave():
        queue = SharedMemoryQueue.create(undertaker, maxsize)
        queue.put(payload(bytes(400)))
        queue.put(payload(bytes(100_000)))
        os._exit(0)

    def dies(point):
        assert reap(in_child(leave)) == 0
        return dies_at(point, undertaker.bury_all, undertaker.attach)

    for _ in points(dies, stride=step):
        undertaker.look()
        undertaker.bury_all()
        assert used(undertaker) == 0


def test_a_number_is_not_used_twice(undertaker):
    numbers = set()
    for _ in range(100):
        queue = SharedMemoryQueue.create(undertaker, 0)
        numbers.add(queue.number)
        queue.close()
    assert len(numbers) == 100
    assert len({number & 0xFFFFFFFF for number in numbers}) == 1  # though its place is
