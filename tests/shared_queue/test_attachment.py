"""A process may die at any store and any system call of put, get, attach and of the recovering process's own work."""

from __future__ import annotations

from typing import Any

import pytest
from crash_points import dies_at
from inside import keep_spare, lists_of
from wholeness import check_whole, drain, points, stride

from tensorpipe_ipc.errors import Full
from tensorpipe_ipc.memory.arena import size_class_of
from tensorpipe_ipc.memory.row import GET, PUT
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue

pytestmark = pytest.mark.kills

MAXSIZE = 3
# of the recovering process's steps at each of the states that it may find; others at the next
STRIDE = stride(299)
SIZES = {"copied": 400, "leased": 100_000}


def test_a_process_killed_at_any_step_of_attaching_leaves_a_row_that_the_next_one_takes(
    attachment: Attachment, payload: Any
) -> None:
    queue = SharedMemoryQueue.create(attachment, MAXSIZE)
    for _ in points(lambda point: dies_at(point, attachment.attach), stride=stride(3)):
        check_whole(attachment, queue, payload)
    assert attachment.rows.used() == [0, 1]  # one after another, all had the same


@pytest.mark.parametrize("nbytes", [400, 5 << 20])
def test_a_process_killed_at_any_step_of_claiming_memory_leaves_a_layout_that_can_be_walked(
    attachment: Attachment, nbytes: int
) -> None:
    arena = attachment.arena

    def first() -> None:
        arena.attach()
        free, fresh, *_ = lists_of(arena)
        free.clear()
        fresh.clear()

    for _ in points(lambda point: dies_at(point, lambda: arena.allocate(nbytes), first), stride=stride(13)):
        attachment.recover_dead(adopt_extents=True)
        extents = list(arena.all_extents())
        assert {row for *_, row in extents} <= {0}
        for (start, _, units, _), (following, *_) in zip(extents, extents[1:], strict=False):
            assert start + (units << 20) <= following
        for start, _, _, _ in extents:  # so that there are none each time
            arena.words[arena.table + (start >> 20)] = 0
        for blocks in lists_of(arena):
            blocks.clear()
    assert arena.allocate(nbytes)


@pytest.mark.parametrize("maxsize", [0, MAXSIZE])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("memory", ["warm", "fresh"])
def test_a_producer_killed_at_any_step_leaves_a_whole_message_or_none(
    attachment: Attachment, payload: Any, maxsize: int, size: int, memory: Any
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    content = b"x" * size
    seen = set()

    def first() -> None:
        """So that the steps are the same each time: a row, an operation, and a free block that was used or was not."""
        attachment.attach()
        keep_spare(queue, PUT)
        arena, size_class = attachment.arena, size_class_of(size + 64)
        arena.discard(arena.allocate(size + 64))
        arena.reclaim()
        if memory == "fresh":
            free, fresh, _, older = lists_of(arena)
            fresh[size_class].append(free[size_class].pop())
            free[size_class].clear()
            older[size_class].clear()

    steps = stride(2 if memory == "warm" else 7)
    for _ in points(lambda point: dies_at(point, lambda: queue.put(payload(content), b"m"), first), stride=steps):
        attachment.recover_dead()
        got = drain(queue)
        assert got in ([], [content])
        seen.add(len(got))
        check_whole(attachment, queue, payload)
    assert seen == {0, 1}
    assert drain(queue) == [content]  # the last child was not killed before its put had returned
    assert attachment.recovery.lost() == 0


@pytest.mark.parametrize("maxsize", [0, MAXSIZE])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_a_consumer_killed_at_any_step_loses_at_most_the_message_it_took_and_that_is_counted(
    attachment: Attachment, payload: Any, maxsize: int, size: int
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    first, second = b"1" * size, b"2" * size
    seen = set()

    def dies_in_get(point: int) -> Any:
        queue.put(payload(first), timeout=0)
        queue.put(payload(second), timeout=0)
        return dies_at(point, queue.get, attachment.attach)

    for _ in points(dies_in_get, stride=stride(2)):
        before = attachment.recovery.lost()
        attachment.arena.reclaim()
        others = [b"3" * size, b"4" * size]
        for content in others:  # others go on, perhaps with the block and the credit that the dead had just let go
            try:
                queue.put(payload(content), timeout=0)
            except Full:
                others.remove(content)
        attachment.recover_dead()
        got = drain(queue)
        assert got[-len(others) :] == others
        got = got[: -len(others)]
        assert got in ([first, second], [second])
        lost = attachment.recovery.lost() - before
        assert lost in ((0,) if len(got) == 2 else (0, 1))  # 0: get had returned
        seen.add((len(got), lost))
        check_whole(attachment, queue, payload)
    assert {(2, 0), (1, 1)} <= seen
    assert drain(queue) == [second]


class Half:
    """A put or a get that dies half-way, again and again at the same step."""

    def __init__(self, attachment: Attachment, queue: Any, payload: Any, role: str) -> None:
        self.attachment, self.queue, self.payload, self.role = attachment, queue, payload, role

    def first(self) -> None:
        """So that the steps are the same each time: a row, an operation and a free block."""
        self.attachment.attach()
        keep_spare(self.queue, PUT)
        keep_spare(self.queue, GET)
        arena = self.attachment.arena
        arena.discard(arena.allocate(4))
        arena.reclaim()

    def action(self) -> Any:
        return self.queue.put(self.payload(b"half")) if self.role == "put" else self.queue.get()

    def dies(self, point: int) -> Any:
        if self.role == "get":
            self.queue.put(self.payload(b"half"), timeout=0)
        return dies_at(point, self.action, self.first)

    def state(self) -> Any:
        """Return a dead row's words, the state of the block that they name, and the lengths of the pipes."""
        rows, words, queue, state = self.attachment.rows, self.attachment.words, self.queue, []
        for row in rows.used():
            if not rows.is_alive(row):
                for record in rows.records(row, queue.number):
                    tokens = [words[word] for word in (record.credit, record.ticket, record.given)]
                    block = tokens[1] >> 32 << 9
                    state += [*map(bool, tokens), words[block >> 3] & 15 if block else 0]
        return (*state, queue.tickets.unread(), queue.credits.unread() if queue.credits else 0)

    def points(self) -> Any:
        """For each state that it can be left in, one step after which it is."""
        found = {}
        for point in points(self.dies):
            found.setdefault(self.state(), point)
            self.attachment.recover_dead()
            drain(self.queue)
        drain(self.queue)
        return sorted(found.values())


# With the usual stride it takes seconds, with a stride of 1 twenty minutes on a busy machine.
@pytest.mark.limit(3600)
@pytest.mark.parametrize("maxsize", [0, MAXSIZE])
@pytest.mark.parametrize("role", ["put", "get"])
def test_a_recovering_process_killed_at_any_step_is_followed_by_another(
    attachment: Attachment, payload: Any, role: str, maxsize: int
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    half = Half(attachment, queue, payload, role)
    states = half.points()
    assert len(states) > (5 if maxsize else 3)
    for number, point in enumerate(states):

        def dies(step: Any, point: Any = point) -> Any:
            assert half.dies(point)
            return dies_at(step, attachment.attach)  # it finishes the dead row, to adopt it

        lost, outcomes = attachment.recovery.lost(), set()
        for _ in points(dies, 1 + number % STRIDE, STRIDE):
            attachment.arena.reclaim()
            queue.put(payload(b"else"), timeout=0)  # others go on, perhaps in a block that was just let go
            attachment.recover_dead()
            *got, last = drain(queue)
            assert last == b"else"
            outcomes.add((len(got), attachment.recovery.lost() - lost))
            check_whole(attachment, queue, payload)
            lost = attachment.recovery.lost()
        assert len(outcomes) == 1  # the same verdict, and the same count, wherever the recovering process died
        assert outcomes <= ({(0, 0), (1, 0)} if role == "put" else {(0, 0), (0, 1), (1, 0)})
        drain(queue)
