"""Blocks: who has them, where they come from, what they cost."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from children import in_thread
from crash_points import die, in_child, interrupted_at, reap
from inside import (
    first_unit_of,
    give_up_free_extents,
    look_for_idle,
    make_look_due,
    take_all_extents,
    while_extents_are_taken,
)

import tensorpipe_ipc.memory.arena
from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory import barrier
from tensorpipe_ipc.memory.arena import (
    FREE,
    HEADER,
    HELD,
    HOLDER,
    QUEUED,
    UNIT,
    WRITING,
    Arena,
    payload_at,
    size_class_of,
)
from tensorpipe_ipc.memory.rows import Rows
from tensorpipe_ipc.memory.segment import CAPACITY, GROWN, Segment

# Runs something in a forked child, which then waits with what it returned; and kills it.
StartChild = Callable[[Callable[[], object]], int]
Kill = Callable[[int], None]


@pytest.fixture(autouse=True)
def attached(arena: Arena) -> None:
    """Each test begins in a process that has its row."""
    arena.attach()


def step(arena: Arena, block: int) -> int:
    """Return which step of its life a block is at."""
    return arena.words[block >> 3] & 15


def queue(arena: Arena, block: int) -> None:
    """Have a block lie in a queue."""
    arena.words[block >> 3] += (1 << 32) + QUEUED - WRITING


def free(arena: Arena, block: int) -> None:
    """Free a block, as whichever process took the message does."""
    arena.words[block >> 3] &= ~HOLDER


def extents_of(arena: Arena, row: int) -> list[tuple[int, int, int]]:
    """Return the extents of a row: offset, kind and units of each."""
    return [(start, size_class, units) for start, size_class, units, owner in arena.all_extents() if owner == row]


def test_kinds_have_room_for_header_and_content() -> None:
    """A block is as small as its header and its content allow, and its payload begins at a cache line."""
    for nbytes in (0, 1, 448, 449, 960, 4032, 4033, UNIT - 64, UNIT - 63, 100 << 20):
        assert nbytes + 64 <= 1 << size_class_of(nbytes)
        assert nbytes + 64 > 1 << size_class_of(nbytes) - 1 or size_class_of(nbytes) == 9
    assert payload_at(4096, 0) == 4160
    assert payload_at(4096, 1) == 4224


def test_blocks_do_not_overlap(arena: Arena) -> None:
    """Blocks of any sizes lie beside each other, and each is its taker's to write."""
    blocks = [(arena.allocate(nbytes), size_class_of(nbytes)) for nbytes in (0, 100, 500, 5000, 70_000, 3 << 20) * 5]
    ranges = sorted((block, block + (1 << size_class)) for block, size_class in blocks)
    assert all(stop <= start for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert all(step(arena, block) == WRITING for block, _ in blocks)


def test_the_most_recently_freed_block_comes_first(arena: Arena) -> None:
    """The next message uses the memory that is warmest."""
    first, second = arena.allocate(400), arena.allocate(400)
    arena.discard(first)
    arena.discard(second)
    assert arena.allocate(400) == second


def test_a_block_that_another_process_frees_is_found(arena: Arena, child: StartChild) -> None:
    """A producer uses the block again that a consumer has freed."""
    block = arena.allocate(400)
    queue(arena, block)
    child(lambda: free(arena, block))
    assert arena.allocate(400) == block


def test_held_blocks_cost_nothing_and_free_ones_among_them_are_found(arena: Arena) -> None:
    """With ten thousand leases, the blocks that go round stay few; one among the old is found in due time."""
    held = [arena.allocate(400) for _ in range(10_000)]
    for block in held:
        queue(arena, block)
    used = set()
    for _ in range(1000):
        block = arena.allocate(400)
        used.add(block)
        queue(arena, block)
        free(arena, block)
    assert len(used) <= 2
    free(arena, held[5000])
    out = []
    for _ in range(10_100 // 4 + 100):
        out.append(arena.allocate(400))
    assert held[5000] in out


def test_looking_for_free_blocks_is_bounded_work(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put beside 5,000 messages that wait reads fewer than 100 words of shared memory."""
    for _ in range(5000):
        queue(arena, arena.allocate(400))
    looks = list[int]()
    words = arena.words

    class Counting:
        def __getitem__(self, index: int) -> int:
            looks.append(index)
            return words[index]

        def __setitem__(self, index: int, value: int) -> None:
            words[index] = value

    monkeypatch.setattr(arena, "words", Counting())
    arena.allocate(400)
    assert len(looks) < 100  # two for each block: its extent, and its state


def test_a_further_extent_takes_no_more_steps_beside_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog takes one more each time: else its time would grow with its square. No look for idle memory is due."""
    arena, began = Arena(Segment.create(1 << 32), capacity=1 << 30), time.monotonic()
    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "monotonic", lambda: began)
    arena.attach()
    steps = list[int]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        steps[-1] += event == "line"
        return trace

    for _ in range(400):
        steps.append(0)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert arena.allocate(600_000)
        finally:
            sys.settrace(before)
    assert max(steps[-20:]) < 2 * max(steps[20:40])


def test_looks_for_idle_memory_take_a_twentieth_of_the_time(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """So much waits that each takes a second."""
    clock, looks = [1000.0], list[float]()

    def look() -> None:
        looks.append(clock[0])
        clock[0] += 1

    arena.attach()
    for name in ("monotonic", "thread_time"):
        monkeypatch.setattr(tensorpipe_ipc.memory.arena, name, lambda: clock[0])
    monkeypatch.setattr(arena, "_give_back_idle", look)
    arena.words[GROWN] = 1
    make_look_due(arena)
    while clock[0] < 1100:
        arena.mind_idle()
        clock[0] += 0.5
    assert 4 <= len(looks) <= 6


def test_capacity_is_never_passed_and_memory_of_other_sizes_is_given_back_for_it() -> None:
    """A large message gets the memory that small ones had, and more than the capacity only if it is forced."""
    arena = Arena(Segment.create(1 << 32), capacity=16 << 20)
    arena.attach()
    small = [arena.allocate(1 << 20) for _ in range(14)]
    for block in small:
        arena.segment.octets[block + 64 : block + 64 + (1 << 20)] = 1
    assert arena.allocate(4 << 20) == 0
    for block in small:
        arena.discard(block)
    large = arena.allocate(12 << 20)
    assert large
    arena.segment.octets[large + 64 : large + (12 << 20)] = 1
    assert arena.segment.resident() <= 17 << 20
    with pytest.raises(SharedMemoryError, match="can never fit"):
        arena.allocate(17 << 20)
    assert arena.allocate(8 << 20) == 0
    assert arena.allocate(8 << 20, force=True)


def test_near_a_cgroups_limit_growth_is_refused(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that the machine has no memory for gets none, whatever the capacity."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.headroom", lambda: 3 << 20)
    assert arena.allocate(2 << 20)
    assert arena.allocate(4 << 20) == 0


def test_extents_that_lie_idle_are_given_back(arena: Arena) -> None:
    """The next process that allocates gives back memory that was free at two looks and unused in between."""
    blocks = [arena.allocate(900_000) for _ in range(4)]
    for block in blocks:
        arena.segment.octets[block + 64 : block + 900_000] = 1
        arena.discard(block)
    for used in (True, False):
        make_look_due(arena)
        arena.discard(arena.allocate(400))
        if used:
            block = arena.allocate(900_000)
            queue(arena, block)
            free(arena, block)
    assert 850_000 < arena.segment.resident() < 2 << 20  # that one was used in between
    assert len({arena.allocate(900_000) for _ in range(4)}) == 4


@pytest.mark.parametrize("ending", ["killed", "stopped for a time"])
def test_who_is_kept_from_giving_back_leaves_it_to_the_next_look(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Idle memory is given back at a later look, though nobody needs it and the arena does not grow."""
    blocks = [arena.allocate(900_000) for _ in range(4)]
    for block in blocks:
        free(arena, block)
    look_for_idle(arena)

    def look_and_die() -> None:
        arena.attach()
        look_for_idle(arena)
        monkeypatch.setattr(barrier, "quick", die)
        look_for_idle(arena)

    if ending == "killed":
        assert reap(in_child(look_and_die)) == -signal.SIGKILL
    else:
        other = Rows(arena.segment)
        other.attach(lambda row: False)
        assert other.try_lock((1 << 62) + min(blocks) // UNIT, 64)
        look_for_idle(arena)
        other.detach()
    assert arena.segment.resident() > 3 << 20
    for _ in range(3):
        look_for_idle(arena)
    assert arena.segment.resident() < 1 << 20


def test_processes_claim_extents_that_do_not_overlap(arena: Arena, child: StartChild) -> None:
    """Five processes that use one segment have five parts of it."""

    def claim() -> list[int]:
        arena.attach()
        return [arena.allocate(nbytes) for nbytes in (400, 5 << 20, 70_000) * 4]

    for _ in range(4):
        child(claim)
    claim()
    extents = list(arena.all_extents())
    assert len({row for *_, row in extents}) == 5
    for (start, _, units, _), (following, *_) in zip(extents, extents[1:], strict=False):
        assert start + units * UNIT <= following


def test_a_dead_processs_blocks_are_freed_and_its_extents_go_to_who_adopts_the_row(
    arena: Arena, child: StartChild, kill: Kill
) -> None:
    """Memory that a killed process wrote or held is free, and its successor allocates from it. Messages that it queued stay."""

    def work() -> int:
        arena.attach()
        one, two, three = (arena.allocate(5000) for _ in range(3))
        queue(arena, two)
        arena.words[three >> 3] += HELD - WRITING
        return one

    kill(child(work))
    with arena.rows.locked([1]) as dead:
        assert dead
        arena.finish(1)
    steps = sorted(step(arena, block) for extent in extents_of(arena, 1) for block in arena.states(*extent)[0].tolist())
    assert steps == [FREE, FREE, QUEUED]

    def adopt() -> None:
        arena.attach()
        assert arena.rows.index == 1
        assert arena.allocate(5000)
        assert [owner for *_, owner in arena.all_extents()] == [1]

    child(adopt)


def test_a_living_process_takes_over_a_dead_ones_memory(arena: Arena, child: StartChild, kill: Kill) -> None:
    """A process uses the pages of a killed one, and needs no more for a message of that size."""

    def work() -> int:
        arena.attach()
        return arena.allocate(5 << 20)

    kill(child(work))
    with arena.rows.locked([1]):
        arena.finish(1)
        arena.inherit(1)
    assert not extents_of(arena, 1)
    resident = arena.segment.resident()
    assert arena.allocate(5 << 20)
    assert arena.segment.resident() < resident + (16 << 10)


def test_a_large_segment_costs_no_more_than_what_is_used_and_walking_it_costs_nothing() -> None:
    """Only pages that messages need cost memory; a look at all of the segment makes none."""
    arena = Arena(Segment.create(), capacity=64 << 20)
    arena.attach()
    arena.allocate(400)
    arena.allocate(30 << 20)
    before = arena.segment.resident()
    assert before < (30 << 20) + (128 << 10)
    arena.holders()
    arena.sweep([0])
    assert arena.segment.resident() == before


@pytest.mark.parametrize("nbytes", [448, 4032, 8128, (1 << 19) - 64, (1 << 20) - 64, (1 << 21) - 64])
def test_no_look_at_an_extent_searches_beyond_it(arena: Arena, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a full extent ends with it. The kernel looks for a hole until it finds one, so n looks would cost n * n."""
    seek, searched = os.lseek, list[int]()

    def measure(descriptor: int, place: int, how: int) -> int:
        found = seek(descriptor, place, how)
        if how == os.SEEK_HOLE:
            searched.append(found - place)
        return found

    for _ in range(4 << 20 >> size_class_of(nbytes)):
        block = arena.allocate(nbytes)
        arena.segment.octets[block + HEADER : block + HEADER + nbytes] = 1
    monkeypatch.setattr(os, "lseek", measure)
    count = sum(len(arena.states(*extent)[0]) for extent in extents_of(arena, arena.rows.index))
    assert count >= 4 << 20 >> size_class_of(nbytes)
    assert max(searched, default=0) < UNIT


def test_room_is_made_for_whole_pages(child: StartChild, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message, where pages have 64 KiB, finds room that another process's free memory makes, to the page."""
    monkeypatch.setattr(Segment, "page", 64 << 10)
    arena = Arena(Segment.create(1 << 30), capacity=64 << 20)
    arena.attach()
    child(lambda: (arena.attach(), free(arena, arena.allocate(3 << 20))))
    arena.words[CAPACITY] = arena.segment.resident() + (12 << 20) + (32 << 10)
    assert not arena.allocate(12 << 20)
    arena.collect(12 << 20)
    assert arena.allocate(12 << 20)


def test_units_that_another_process_is_claiming_are_left_to_it(arena: Arena) -> None:
    """A message gets its memory behind what another process is just claiming, which may be stopped there for long."""
    other = Rows(arena.segment)
    other.attach(lambda _: True)
    arena.discard(arena.allocate(400))
    start, _, units, _ = list(arena.all_extents())[-1]
    following = start + units * UNIT
    assert other.try_lock((1 << 62) + following // UNIT, 2)
    assert arena.allocate(5000) == following + 2 * UNIT


@pytest.mark.slow
def test_threads_that_begin_at_once_get_blocks_of_their_own() -> None:
    """One of the threads attaches; all claim units, and the kernel would let each have the same."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            assert_threads_get_blocks_of_their_own(Arena(Segment.create(1 << 28), capacity=1 << 28))
    finally:
        sys.setswitchinterval(interval)


def assert_threads_get_blocks_of_their_own(arena: Arena, threads: int = 4) -> None:
    """Have threads allocate at the same time, and look whether any of their blocks overlap."""
    begin, blocks = threading.Barrier(threads), list[tuple[int, int]]()

    def allocate() -> None:
        begin.wait(10)
        arena.attach()
        blocks.extend(
            (arena.allocate(nbytes), 1 << size_class_of(nbytes)) for nbytes in (400, 5000, 1 << 20, 3 << 20) * 4
        )

    at_it = [threading.Thread(target=allocate) for _ in range(threads)]
    for thread in at_it:
        thread.start()
    for thread in at_it:
        thread.join(30)
    ranges = sorted((block, block + nbytes) for block, nbytes in blocks)
    assert len(ranges) == 16 * threads
    assert all(stop <= start for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert {arena.words[block >> 3] & HOLDER for block, _ in blocks} == {arena.writing}
    assert arena.writing


def test_no_room_for_addresses_says_so() -> None:
    """A message that no addresses can ever be found for raises; one that others may make room for is refused for now."""
    small = Arena(Segment.create(1 << 28), capacity=1 << 30)
    small.attach()
    for _ in range(3):
        assert small.allocate(30 << 20, force=True)
    assert not small.allocate(30 << 20, force=True)  # others may be given back
    with pytest.raises(SharedMemoryError, match="MiB of addresses"):
        small.allocate(200 << 20, force=True)


def test_the_last_unit_is_used_too() -> None:
    """All addresses of a segment hold messages, to the last MiB."""
    small = Arena(Segment.create(1 << 28), capacity=1 << 30)
    small.attach()
    for unit in range(first_unit_of(small), 256):
        assert small.allocate(UNIT - HEADER, force=True) == unit * UNIT
    assert not small.allocate(UNIT - HEADER, force=True)


@pytest.mark.parametrize("own", [False, True])
def test_who_attaches_finishes_the_dead_row_that_it_adopts(
    arena: Arena, child: StartChild, kill: Kill, own: bool
) -> None:
    """A process that adopts a dead row finishes it as it is told, or else itself: what the dead one wrote is free."""
    kill(child(lambda: (arena.attach(), arena.allocate(5000))))
    other, asked = Arena(arena.segment, capacity=64 << 20), list[object]()
    other.attach((lambda row: asked.append(row) or other.finish(row)) if own else None)
    assert (other.rows.index, other.rows.incarnation, asked) == (1, 2, [1] * own)
    assert [owner for *_, owner in other.all_extents()] == [1]
    assert not other.is_in_use()
    other.attach(lambda _: asked.append("again"))
    assert (other.rows.incarnation, asked) == (2, [1] * own)
    other.rows.detach()


@pytest.mark.parametrize("units", [1, 4])
@pytest.mark.parametrize("ending", ["done", "refused", "failed"])
def test_units_that_another_thread_is_claiming_are_left_to_it(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, units: int, ending: str
) -> None:
    """Threads never claim the same memory. It is free for the next claim when one was refused, or failed."""
    lock, meanwhile, first = arena.rows.try_lock, list[int](), first_unit_of(arena) * UNIT

    def lock_late(start: int, length: int) -> bool:
        monkeypatch.setattr(arena.rows, "try_lock", lock)
        meanwhile.append(in_thread(lambda: arena.allocate((4 // units << 20) - HEADER))())
        if ending == "failed":
            raise KeyboardInterrupt
        return ending == "done" and lock(start, length)

    monkeypatch.setattr(arena.rows, "try_lock", lock_late)
    with pytest.raises(KeyboardInterrupt) if ending == "failed" else contextlib.nullcontext():
        meanwhile.append(arena.allocate((units << 20) - HEADER))
    (theirs, *mine) = meanwhile
    assert theirs >= first + (units << 20)  # behind all that is being claimed
    if ending == "done":
        assert mine == [first]
    else:
        assert not set(mine) & {first, theirs}
        assert arena.allocate((units << 20) - HEADER) == first


def test_a_gap_is_filled_by_what_fits_to_the_unit(arena: Arena) -> None:
    """Memory between two messages that was given up is used for what fits; anything larger lies behind them."""
    first, gap, last = (arena.allocate((units << 20) - HEADER) for units in (1, 2, 1))
    arena.discard(gap)
    arena.trim()
    assert arena.allocate((4 << 20) - HEADER) == last + UNIT
    assert arena.allocate((2 << 20) - HEADER) == gap == first + UNIT
    arena.discard(gap)
    arena.trim()
    assert [arena.allocate(UNIT - HEADER) for _ in range(3)] == [gap, gap + UNIT, last + 5 * UNIT]


def test_a_block_that_a_failed_put_gives_up_is_free_once(arena: Arena) -> None:
    """A block is given to one taker only, though another thread looks for free blocks at each step of giving it up."""
    block, size_class = arena.allocate(400), size_class_of(400)

    def other_thread(frame: FrameType, event: str, _: object) -> Any:
        sys.settrace(None)
        arena.reclaim_freed(size_class)
        sys.settrace(lambda *_: None)
        return other_thread

    sys.settrace(lambda frame, *_: other_thread if frame.f_code.co_name == "discard" else None)
    try:
        arena.discard(block)
    finally:
        sys.settrace(None)
    arena.reclaim_freed(size_class)
    assert arena.free[size_class].count(block) == 1
    blocks = [arena.allocate(400) for _ in range(100)]
    assert len(set(blocks)) == 100
    assert block in blocks


@pytest.mark.slow
def test_an_exception_at_any_moment_of_giving_up_free_memory_loses_none(arena: Arena) -> None:
    """The next time gives up all that an exception left. No block is in two hands after it, and no memory in none."""
    point, interrupted = 1, True
    while interrupted:
        blocks = [arena.allocate(nbytes) for nbytes in (300_000, 300_000)]
        assert blocks == [first_unit_of(arena) * UNIT + at for at in (0, UNIT // 2)], f"after step {point - 1}"
        for block in blocks:
            free(arena, block)
        arena.reclaim()
        interrupted = interrupted_at(point, lambda: give_up_free_extents(arena))
        give_up_free_extents(arena)
        arena.trim()
        assert not list(arena.all_extents()), f"after an exception at step {point}"
        point += 1
    assert point > 100


def test_a_finalizer_that_allocates_while_free_blocks_are_looked_for(arena: Arena) -> None:
    """A finalizer may run wherever Python makes a tuple, say. No block is given to two takers after that, and none is lost."""
    nbytes, taken, hoard, thresholds = 100_000, list[int](), list[tuple[object]](), gc.get_threshold()
    size_class = size_class_of(nbytes)

    class Allocating:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            taken.append(arena.allocate(nbytes))

    for made in range(1, 10):
        while len(arena.recent[size_class]) <= tensorpipe_ipc.memory.arena.RECENT:
            taken.append(arena.allocate(nbytes))
        gc.disable()
        hoard += [(object(),) for _ in range(2500)]  # so Python has none to use again
        Allocating()
        gc.set_threshold(gc.get_count()[0] + made, *thresholds[1:])
        gc.enable()
        try:
            arena.reclaim_freed(size_class)
        finally:
            gc.set_threshold(*thresholds)
        gc.collect(0)
        assert len(set(taken)) == len(taken)
        while taken:
            free(arena, taken.pop())
        taken += [
            arena.allocate(nbytes) for _ in range(sum(each[2] for each in arena.all_extents()) * UNIT >> size_class)
        ]
        assert len(set(taken)) == len(taken)
        while taken:
            free(arena, taken.pop())
    arena.trim()
    assert not list(arena.all_extents())


def test_a_thread_drops_what_another_process_took_while_one_looks_for_free_extents(arena: Arena) -> None:
    """Memory that another process took meanwhile is that one's. This process goes on with the rest."""
    free(arena, arena.allocate(400))
    other, theirs, ours = Arena(arena.segment), list[int](), list[int]()

    def take_and_drop() -> None:
        other.attach()
        take_all_extents(other)
        theirs.append(other.allocate(400))
        ours.append(arena.allocate(400))

    with while_extents_are_taken(take_and_drop):
        arena.trim()
    assert theirs[0] == first_unit_of(arena) * UNIT
    assert [step(arena, block) for block in theirs + ours] == [WRITING, WRITING]
    ours += [arena.allocate(400) for _ in range(3000)]
    assert len(set(theirs + ours)) == 3002
    other.rows.detach()
    arena.finish(1)
    for block in ours:
        arena.discard(block)
    arena.trim()
    assert not list(arena.all_extents())


def test_a_claim_of_units_keeps_the_lock_of_a_queue_that_is_being_destroyed(arena: Arena, child: StartChild) -> None:
    """A process that is alone with a queue's record stays so, whatever memory it gets meanwhile, and lets go of locks for."""
    block = arena.allocate(400)
    with arena.rows.alone(block) as alone:
        assert alone
        for nbytes in (400, 2 << 20, 400):  # which claims units, and lets go of their locks
            assert arena.allocate(nbytes)
        take_all_extents(arena)  # this one's lock, too
        child(lambda: (arena.attach(), is_false(arena.rows.alone(block))))


def is_false(context: contextlib.AbstractContextManager[bool]) -> None:
    """Look whether what is asked for is refused."""
    with context as what:
        assert not what
