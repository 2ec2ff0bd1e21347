"""Blocks: who has them, where they come from, what they cost."""

import gc
import os
import signal
import sys
import threading

import pytest
from crash_points import die, in_child, interrupted_at, reap

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
from tensorpipe_ipc.memory.segment import CAPACITY, Segment


@pytest.fixture(autouse=True)
def attached(arena):
    arena.attach()


def step(arena, block):
    return arena.words[block >> 3] & 15


def queue(arena, block):
    arena.words[block >> 3] += (1 << 32) + QUEUED - WRITING


def free(arena, block):
    arena.words[block >> 3] &= ~HOLDER


def test_kinds_have_room_for_header_and_content():
    for nbytes in (0, 1, 448, 449, 960, 4032, 4033, UNIT - 64, UNIT - 63, 100 << 20):
        assert nbytes + 64 <= 1 << size_class_of(nbytes)
        assert nbytes + 64 > 1 << size_class_of(nbytes) - 1 or size_class_of(nbytes) == 9
    assert payload_at(4096, 0) == 4160
    assert payload_at(4096, 1) == 4224


def test_blocks_do_not_overlap(arena):
    blocks = [(arena.allocate(nbytes), size_class_of(nbytes)) for nbytes in (0, 100, 500, 5000, 70_000, 3 << 20) * 5]
    ranges = sorted((block, block + (1 << kind)) for block, kind in blocks)
    assert all(stop <= start for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert all(step(arena, block) == WRITING for block, _ in blocks)


def test_the_most_recently_freed_block_comes_first(arena):
    first, second = arena.allocate(400), arena.allocate(400)
    arena.discard(first)
    arena.discard(second)
    assert arena.allocate(400) == second


def test_a_block_that_another_process_frees_is_found(arena, child):
    block = arena.allocate(400)
    queue(arena, block)
    child(lambda: free(arena, block))
    assert arena.allocate(400) == block


def test_held_blocks_cost_nothing_and_free_ones_among_them_are_found(arena):
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


def test_looking_for_free_blocks_is_bounded_work(arena, monkeypatch):
    for _ in range(5000):
        queue(arena, arena.allocate(400))
    looks = []
    words = arena.words

    class Counting:
        def __getitem__(self, index):
            looks.append(index)
            return words[index]

        def __setitem__(self, index, value):
            words[index] = value

    arena.words = Counting()
    arena.allocate(400)
    assert len(looks) < 100  # two for each block: its extent, and its state


def test_capacity_is_never_passed_and_memory_of_other_sizes_is_given_back_for_it():
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


def test_near_a_cgroups_limit_growth_is_refused(arena, monkeypatch):
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.headroom", lambda: 3 << 20)
    assert arena.allocate(2 << 20)
    assert arena.allocate(4 << 20) == 0


def test_extents_that_lie_idle_are_given_back(arena):
    """The next process that allocates gives back memory that was free at two looks and unused in between."""
    blocks = [arena.allocate(900_000) for _ in range(4)]
    for block in blocks:
        arena.segment.octets[block + 64 : block + 900_000] = 1
        arena.discard(block)
    for used in (True, False):
        arena._look_at = 0
        arena.discard(arena.allocate(400))
        if used:
            block = arena.allocate(900_000)
            queue(arena, block)
            free(arena, block)
    assert 850_000 < arena.segment.resident() < 2 << 20  # that one was used in between
    assert len({arena.allocate(900_000) for _ in range(4)}) == 4


@pytest.mark.parametrize("ending", ["killed", "stopped for a time"])
def test_who_is_kept_from_giving_back_leaves_it_to_the_next_look(arena, monkeypatch, ending):
    """Though nobody needs memory, and the arena does not grow: all are idle."""
    for block in [arena.allocate(900_000) for _ in range(4)]:
        free(arena, block)
    arena._give_back_idle()

    def look_and_die():
        arena.attach()
        arena._give_back_idle()
        monkeypatch.setattr(barrier, "quick", die)
        arena._give_back_idle()

    if ending == "killed":
        assert reap(in_child(look_and_die)) == -signal.SIGKILL
    else:
        other = Rows(arena.segment)
        other.attach(lambda row: False)
        assert other.try_lock((1 << 62) + arena._first_unit, 64)
        arena._give_back_idle()
        other.detach()
    assert arena.segment.resident() > 3 << 20
    for _ in range(3):
        arena._look_at = 0
        arena.mind_idle()
    assert arena.segment.resident() < 1 << 20


def test_processes_claim_extents_that_do_not_overlap(arena, child):
    def claim():
        arena.attach()
        return [arena.allocate(nbytes) for nbytes in (400, 5 << 20, 70_000) * 4]

    for _ in range(4):
        child(claim)
    claim()
    extents = list(arena.all_extents())
    assert len({row for *_, row in extents}) == 5
    for (start, _, units, _), (following, *_) in zip(extents, extents[1:], strict=False):
        assert start + units * UNIT <= following


def test_a_dead_processs_blocks_are_freed_and_its_extents_go_to_who_adopts_the_row(arena, child, kill):
    def work():
        arena.attach()
        one, two, three = (arena.allocate(5000) for _ in range(3))
        queue(arena, two)
        arena.words[three >> 3] += HELD - WRITING
        return one

    kill(child(work))
    with arena.rows.locked(1) as dead:
        assert dead
        arena.finish(1)
    steps = sorted(step(arena, block) for extent in arena._extents(1) for block in arena._blocks(*extent))
    assert steps == [FREE, FREE, QUEUED]

    def adopt():
        arena.attach()
        assert arena.rows.index == 1
        assert arena.allocate(5000)
        assert [owner for *_, owner in arena.all_extents()] == [1]

    child(adopt)


def test_a_living_process_takes_over_a_dead_ones_memory(arena, child, kill):
    def work():
        arena.attach()
        return arena.allocate(5 << 20)

    kill(child(work))
    with arena.rows.locked(1):
        arena.finish(1)
        arena.inherit(1)
    assert not list(arena._extents(1))
    resident = arena.segment.resident()
    assert arena.allocate(5 << 20)
    assert arena.segment.resident() < resident + (16 << 10)


def test_a_large_segment_costs_no_more_than_what_is_used_and_walking_it_costs_nothing():
    arena = Arena(Segment.create(), capacity=64 << 20)
    arena.attach()
    arena.allocate(400)
    arena.allocate(30 << 20)
    before = arena.segment.resident()
    assert before < (30 << 20) + (128 << 10)
    arena.holders()
    arena.sweep(0)
    assert arena.segment.resident() == before


@pytest.mark.parametrize("nbytes", [448, 4032, 8128, (1 << 19) - 64, (1 << 20) - 64, (1 << 21) - 64])
def test_no_look_at_an_extent_searches_beyond_it(arena, nbytes, monkeypatch):
    """However full all are: the kernel looks for a hole until it finds one, so n looks would cost n * n."""
    seek, searched = os.lseek, []

    def measure(descriptor, place, how):
        found = seek(descriptor, place, how)
        if how == os.SEEK_HOLE:
            searched.append(found - place)
        return found

    for _ in range(4 << 20 >> size_class_of(nbytes)):
        block = arena.allocate(nbytes)
        arena.segment.octets[block + HEADER : block + HEADER + nbytes] = 1
    monkeypatch.setattr(os, "lseek", measure)
    count = sum(len(arena.states(*extent)[0]) for extent in arena._extents(arena.rows.index))
    assert count >= 4 << 20 >> size_class_of(nbytes)
    assert max(searched, default=0) < UNIT


def test_room_is_made_for_whole_pages(child, monkeypatch):
    monkeypatch.setattr(Segment, "page", 64 << 10)
    arena = Arena(Segment.create(1 << 30), capacity=64 << 20)
    arena.attach()
    child(lambda: (arena.attach(), free(arena, arena.allocate(3 << 20))))
    arena.words[CAPACITY] = arena.segment.resident() + (12 << 20) + (32 << 10)
    assert not arena.allocate(12 << 20)
    arena.collect(12 << 20)
    assert arena.allocate(12 << 20)


def test_units_that_another_process_is_claiming_are_left_to_it(arena):
    other = Rows(arena.segment)
    other.attach(lambda _: True)
    arena.discard(arena.allocate(400))
    start, _, units, _ = list(arena.all_extents())[-1]
    following = start + units * UNIT
    assert other.try_lock((1 << 62) + following // UNIT, 2)  # it may be stopped there for long
    assert arena.allocate(5000) == following + 2 * UNIT


def test_threads_that_begin_at_once_get_blocks_of_their_own():
    """One of them attaches; all claim units, of which the kernel would let each have the same."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            assert_threads_get_blocks_of_their_own(Arena(Segment.create(1 << 28), capacity=1 << 28))
    finally:
        sys.setswitchinterval(interval)


def assert_threads_get_blocks_of_their_own(arena, threads=4):
    begin, blocks = threading.Barrier(threads), list[tuple[int, int]]()

    def allocate():
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


def test_no_room_for_addresses_says_so(child):
    small = Arena(Segment.create(1 << 28), capacity=1 << 30)
    small.attach()
    for _ in range(3):
        assert small.allocate(30 << 20, force=True)
    assert not small.allocate(30 << 20, force=True)  # others may be given back
    with pytest.raises(SharedMemoryError, match="MiB of addresses"):
        small.allocate(200 << 20, force=True)


def test_the_last_unit_is_used_too():
    small = Arena(Segment.create(1 << 28), capacity=1 << 30)
    small.attach()
    for unit in range(small._first_unit, 256):
        assert small.allocate(UNIT - HEADER, force=True) == unit * UNIT
    assert not small.allocate(UNIT - HEADER, force=True)


@pytest.mark.parametrize("own", [False, True])
def test_who_attaches_finishes_the_dead_row_that_it_adopts(arena, child, kill, own):
    """As told, or else itself; then what the dead one was writing is free."""
    kill(child(lambda: (arena.attach(), arena.allocate(5000))))
    other, asked = Arena(arena.segment, capacity=64 << 20), []
    other.attach((lambda row: asked.append(row) or other.finish(row)) if own else None)
    assert (other.rows.index, other.rows.incarnation, asked) == (1, 2, [1] * own)
    assert [owner for *_, owner in other.all_extents()] == [1]
    assert not other.is_in_use()
    other.attach(lambda _: asked.append("again"))
    assert (other.rows.incarnation, asked) == (2, [1] * own)
    other.rows.detach()


def test_units_that_another_thread_is_claiming_are_left_to_it(arena):
    """Any of those that are wanted; and they are free for the next claim when that one is done, or failed."""
    unit = arena._first_unit
    for theirs in (unit, unit + 2):
        arena._claiming[theirs] = [theirs]
        assert not arena._claim_at(unit, 3, 22)
        assert arena._claiming == {theirs: [theirs]}
        del arena._claiming[theirs]
    arena._claiming[unit + 3] = [unit + 3]
    assert arena._claim_at(unit, 3, 22)
    assert not arena._claim_at(unit + 2, 1, 20)
    assert arena._claiming == {unit + 3: [unit + 3]}
    assert list(arena.all_extents()) == [(unit * UNIT, 22, 3, arena.rows.index)]


def test_a_gap_is_filled_by_what_fits_to_the_unit(arena):
    unit = arena._first_unit
    assert arena._claim_at(unit, 2, 21)
    assert arena._claim_at(unit + 4, 1, 20)
    assert [arena._gap(unit, units) for units in (1, 2, 3)] == [unit + 2, unit + 2, unit + 5]
    assert arena._gap(unit + 3, 1) == unit + 3
    assert arena._gap(unit + 3, 2) == unit + 5


def test_a_block_that_a_failed_put_gives_up_is_free_once(arena):
    """Whatever another thread does meanwhile, which looks for free blocks at each step of it."""
    block, kind = arena.allocate(400), size_class_of(400)

    def other_thread(frame, event, _):
        sys.settrace(None)
        arena.reclaim_freed(kind)
        sys.settrace(lambda *_: None)
        return other_thread

    sys.settrace(lambda frame, *_: other_thread if frame.f_code.co_name == "discard" else None)
    try:
        arena.discard(block)
    finally:
        sys.settrace(None)
    arena.reclaim_freed(kind)
    assert arena.free[kind].count(block) == 1
    blocks = [arena.allocate(400) for _ in range(100)]
    assert len(set(blocks)) == 100
    assert block in blocks


def test_an_exception_at_any_moment_of_giving_up_free_memory_loses_none(arena):
    """The next time gives up all that it left: no block is out of the lists, and no unit stays claimed."""
    point, interrupted = 1, True
    while interrupted:
        for block in [arena.allocate(nbytes) for nbytes in (300_000, 300_000)]:
            free(arena, block)
        arena.reclaim()
        interrupted = interrupted_at(point, lambda: arena._take(arena._withdraw()))
        assert not arena._claiming, f"after an exception at step {point}"
        arena._take(arena._withdraw())
        assert not arena._mine, f"after an exception at step {point}"
        arena.trim()
        assert not list(arena.all_extents())
        point += 1
    assert point > 100


def test_a_finalizer_that_allocates_while_free_blocks_are_looked_for(arena):
    """Up to Python 3.11 garbage is collected when a tuple is made, say. No block is in the lists twice after that."""
    nbytes, taken, hoard, thresholds = 100_000, list[int](), list[tuple[object]](), gc.get_threshold()
    kind = size_class_of(nbytes)

    class Allocating:
        def __init__(self):
            self.itself = self

        def __del__(self):
            taken.append(arena.allocate(nbytes))

    for made in range(1, 10):
        while len(arena.recent[kind]) <= tensorpipe_ipc.memory.arena.RECENT:
            taken.append(arena.allocate(nbytes))
        gc.disable()
        hoard += [(object(),) for _ in range(2500)]  # so Python has none to use again
        Allocating()
        gc.set_threshold(gc.get_count()[0] + made, *thresholds[1:])
        gc.enable()
        try:
            arena.reclaim_freed(kind)
        finally:
            gc.set_threshold(*thresholds)
        gc.collect(0)
        listed = [block for blocks in arena._lists(kind) for block in blocks]
        assert len(set(listed)) == len(listed) == sum(mine.blocks for mine in arena._mine.values())
        while taken:
            free(arena, taken.pop())


def test_a_thread_drops_what_another_process_took_while_one_looks_for_free_extents(arena, monkeypatch):
    block, removed = arena.allocate(400), tensorpipe_ipc.memory.arena._removed
    free(arena, block)
    arena.reclaim_freed(size_class_of(400))

    def drop_first(blocks, units):
        if units:
            monkeypatch.setattr(tensorpipe_ipc.memory.arena, "_removed", removed)
            arena.words[arena.table + (block >> 20)] += 1
            arena._drop_lost(size_class_of(400))
        return removed(blocks, units)

    monkeypatch.setattr(tensorpipe_ipc.memory.arena, "_removed", drop_first)
    assert arena._withdraw() == []
    assert not arena._mine
    assert not any(arena._lists(size_class_of(400)))


def test_a_claim_of_units_keeps_the_lock_of_a_queue_that_is_being_destroyed(arena, child):
    """Claims let go of locks by the description that rows are locked by; what is alone with a record has another."""
    block = arena.allocate(400)
    with arena.rows.alone(block) as alone:
        assert alone
        for nbytes in (400, 2 << 20, 400):  # which claims units, and lets go of their locks
            assert arena.allocate(nbytes)
        assert not arena._claim_at(block // UNIT, 1, 20)
        child(lambda: (arena.attach(), is_false(arena.rows.alone(block))))


def is_false(context):
    with context as what:
        assert not what
