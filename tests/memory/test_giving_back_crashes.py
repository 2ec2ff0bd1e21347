"""A process that takes memory from others may be killed or stopped at any step; so may the process that has it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_points import die, dies_at, in_child, reap
from inside import instead_of_barriers, take_all_extents
from wholeness import points, stride

from tensorpipe_ipc.memory import barrier
from tensorpipe_ipc.memory.arena import HELD, HOLDER, QUEUED, WRITING, Arena, size_class_of
from tensorpipe_ipc.memory.row import ALLOCATING, hazard_word
from tensorpipe_ipc.memory.segment import Segment

CAPACITY = 16 << 20
SIZES = (400, 3000, 20_000, 300_000, 3 << 20)


@pytest.fixture
def arena() -> Iterator[Any]:
    made = Arena(Segment.create(1 << 29), CAPACITY)
    made.attach()
    yield made
    vars(made).clear()


class Ledger:
    """Puts and takes blocks as a queue does, and sees to it that no block has a generation twice."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.seen = arena, {}

    def use(self) -> None:
        arena, words, held = self.arena, self.arena.words, []
        for nbytes in SIZES:
            for _ in range(2):
                block = arena.allocate(nbytes) or (arena.collect(nbytes), arena.allocate(nbytes))[1]
                assert block, f"no room for {nbytes}"
                word = block >> 3
                assert words[word] & HOLDER == arena.writing
                generation = (words[word] >> 32) + 1
                assert generation > self.seen.get(block, 0), "a generation came again"
                self.seen[block] = generation
                arena.segment.octets[block + 64 : block + 64 + nbytes] = len(held) + 1
                words[word] = generation << 32 | arena.queued
                held.append((block, nbytes))
        for number, (block, nbytes) in enumerate(held):
            content = arena.segment.octets[block + 64 : block + 64 + nbytes]
            assert content.min() == content.max() == number + 1, "a block lies in another"
            words[block >> 3] &= ~HOLDER


def check_layout(arena: Arena) -> None:
    extents = list(arena.all_extents())
    for (start, _, units, _), (following, *_) in zip(extents, extents[1:], strict=False):
        assert start + (units << 20) <= following


def settle(arena: Arena) -> None:
    """Finish the dead, as others would at their next look."""
    for row in arena.rows.used():
        with arena.rows.locked([row]) as dead:
            if dead and not arena.rows.is_finished(row):
                assert arena.finish(row)


@pytest.mark.kills
@pytest.mark.limit(300)
@pytest.mark.parametrize("work", ["trim", "collect"])
def test_who_takes_memory_may_die_at_any_step(arena: Arena, work: Any) -> None:
    ledger = Ledger(arena)

    def action() -> None:
        if work == "trim":
            arena.trim()
        else:
            arena.collect(15 << 20)

    def dies(point: int) -> Any:
        ledger.use()
        return dies_at(point, action, first=arena.attach)

    for _ in points(dies, stride=stride(97)):
        settle(arena)
        check_layout(arena)
        ledger.use()
    settle(arena)
    arena.trim()
    assert arena.segment.resident() < 1 << 20
    assert not list(arena.all_extents())


@pytest.mark.kills
@pytest.mark.limit(300)
def test_who_allocates_may_die_at_any_step_while_others_take(arena: Arena) -> None:
    """The dead one's extents, in doubt or not, come to who needs them; nothing is left over."""
    ledger = Ledger(arena)

    def action() -> None:
        for nbytes in SIZES:
            block = arena.allocate(nbytes)
            arena.words[block >> 3] += (1 << 32) + QUEUED - WRITING
            arena.words[block >> 3] &= ~HOLDER
        arena.trim()

    for _ in points(lambda point: dies_at(point, action, first=arena.attach), stride=stride(499)):
        settle(arena)
        check_layout(arena)
        ledger.use()
    settle(arena)
    arena.trim()
    assert not list(arena.all_extents())


def test_what_the_dead_had_is_free_where_a_killed_process_took_memory(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody needs memory now. It had said what it takes, and was killed before it knew whether it could have it."""
    told, tell = os.pipe()

    def own() -> None:
        arena.attach()
        for nbytes in SIZES:
            arena.words[arena.allocate(nbytes) >> 3] += HELD - WRITING
        os.write(tell, b".")
        signal.pause()

    def take_all() -> None:
        arena.attach()
        monkeypatch.setattr(barrier, "quick", die)
        take_all_extents(arena)

    pid = in_child(own)
    assert os.read(told, 1) == b"."
    assert reap(in_child(take_all)) == -signal.SIGKILL
    os.kill(pid, signal.SIGKILL)
    reap(pid)
    assert arena.is_in_use()
    settle(arena)
    assert not arena.is_in_use()
    os.close(told)
    os.close(tell)


def test_who_is_stopped_while_it_takes_a_block_keeps_one_extent(arena: Arena) -> None:
    """Before it has written the block's state, and after it has said which it takes: nobody else uses that extent, all others
    are taken; and when it goes on, it has the block or another, not one that somebody has."""
    told, tell = os.pipe()

    def allocate() -> None:
        arena.attach()
        blocks = [arena.allocate(300_000) for _ in range(8)]
        for block in blocks:
            arena.words[block >> 3] += (1 << 32) + QUEUED - WRITING
            arena.words[block >> 3] &= ~HOLDER

        arena.reclaim()
        wanted = arena.free[size_class_of(300_000)][-1] >> 20
        word = hazard_word(arena.rows.index, ALLOCATING)
        words = arena.words

        class Stopping:
            """The words, whose store of a hazard stops the process."""

            def __getitem__(self, index: int) -> Any:
                return words[index]

            def __setitem__(self, index: int, value: Any) -> None:
                words[index] = value
                if index == word and value and arena.words is self:
                    arena.words = words  # once
                    os.write(tell, wanted.to_bytes(4, "little"))
                    os.kill(os.getpid(), signal.SIGSTOP)

        arena.words = Stopping()
        block = arena.allocate(300_000)
        arena.segment.octets[block + 64 : block + 300_000] = 77
        assert words[block >> 3] & HOLDER == arena.writing
        os.write(tell, (block >> 20).to_bytes(4, "little"))
        signal.pause()

    pid = in_child(allocate)
    try:
        wanted = int.from_bytes(os.read(told, 4), "little")
        while " T " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.001)
        arena.trim()
        left = [(start >> 20, row) for start, _, _, row in arena.all_extents()]
        assert left == [(wanted, arena.rows.index)]
        Ledger(arena).use()
        os.kill(pid, signal.SIGCONT)
        got = int.from_bytes(os.read(told, 4), "little")
        assert got != wanted  # it was lost
        arena.trim()
        assert [start >> 20 for start, *_ in arena.all_extents()] == [got]
        Ledger(arena).use()
    finally:
        os.kill(pid, signal.SIGKILL)
        reap(pid)
        os.close(told)
        os.close(tell)


def test_a_barrier_that_the_kernel_refuses_is_waited_for(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is given back all the same, after 20 ms in which every processor has stored what it had."""
    instead_of_barriers(monkeypatch, lambda command, call: -1)
    Ledger(arena).use()
    began = time.monotonic()
    assert arena.trim() > 0
    assert time.monotonic() - began >= 0.02


def test_who_takes_memory_waits_for_nobody_unless_a_process_cannot_be_reached(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that no quick barrier reaches has everybody have a slow one, from then on: also when it is gone."""
    asked, slow, quick = list[int](), 1 << 0, 1 << 1  # MEMBARRIER_CMD_GLOBAL, MEMBARRIER_CMD_GLOBAL_EXPEDITED

    def count(command: int, call: Callable[[int], int]) -> int:
        asked.append(command)
        return call(command)

    def refuse() -> None:
        instead_of_barriers(monkeypatch, lambda command, call: -1)
        Arena(arena.segment).attach()

    def commands() -> list[int]:
        Ledger(arena).use()
        asked.clear()
        assert arena.trim() > 0
        return asked

    call = instead_of_barriers(monkeypatch, count)
    reap(in_child(Arena(arena.segment).attach))
    if call(0) < 0 or not call(0) & quick:
        pytest.skip("the kernel has no quick barrier")
    assert set(commands()) == {quick}
    assert reap(in_child(refuse)) == 0
    assert commands() == [quick, slow]
