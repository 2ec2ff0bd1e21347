"""A lease lasts as long as the storage on it: one test for each promise."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from crash_points import interrupted_at

from tensorpipe_ipc.memory.arena import FREE, HELD, Arena
from tensorpipe_ipc.memory.leases import Leases

NBYTES = 40_000


class Held:
    """A leased block with a tensor on it."""

    def __init__(self, arena: Arena) -> None:
        arena.attach()
        self.arena, self.leases = arena, Leases(arena)
        self.block = arena.allocate(NBYTES)

    def tensor(self) -> Any:
        array = self.leases.lease(self.block, self.block + 64, NBYTES)
        self.arena.words[self.block >> 3] = self.leases.live[self.block >> 3].held
        return torch.frombuffer(array, dtype=torch.float32)

    @property
    def step(self) -> Any:
        gc.collect()
        return self.arena.words[self.block >> 3] & 15


@pytest.fixture
def held(arena: Arena) -> Iterator[Any]:
    made = Held(arena)
    yield made
    vars(made).clear()


def autograd(tensor: torch.Tensor) -> Any:
    leaf = tensor.requires_grad_()
    return (leaf * leaf).sum()


KEEPERS = {
    "view": lambda t: t.view(100, 100)[3],
    "detach": lambda t: t.detach(),
    "numpy": lambda t: t.numpy(),
    "storage": lambda t: t.untyped_storage(),
    "dlpack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "saved for backward": autograd,
    "cycle": lambda t: (lambda box: box.append(box) or box)([t]),
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS.keys())
def test_it_is_kept_by(held: Any, keep: Any) -> None:
    kept = keep(held.tensor())
    assert held.step == HELD
    if isinstance(kept, list):
        kept.clear()
    del kept
    assert held.step == FREE


def test_an_array_that_is_lost_before_the_block_is_held_frees_nothing(held: Any) -> None:
    before = held.arena.words[held.block >> 3]
    held.leases.lease(held.block, held.block + 64, NBYTES)
    assert held.arena.words[held.block >> 3] == before


def test_the_generation_stays(held: Any) -> None:
    held.arena.words[held.block >> 3] += 5 << 32
    held.tensor()
    gc.collect()
    assert held.arena.words[held.block >> 3] == 5 << 32


def test_it_may_end_on_any_thread(held: Any) -> None:
    box = [held.tensor()]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join(20)
    assert held.step == FREE


def test_a_forked_childs_copy_ends_without_a_word(held: Any, child: Any) -> None:
    tensor = held.tensor()
    kept, anchors = [tensor], list(held.leases.live.values())  # with its anchor alive, the child's release is called
    child(lambda: (kept.clear(), gc.collect()))
    assert held.step == HELD
    assert float(tensor[0]) == 0.0
    del anchors


def test_a_late_release_frees_nobody_elses_block(held: Any) -> None:
    tensor = held.tensor()
    held.arena.words[held.block >> 3] = 9 << 32 | held.arena.queued  # not ours any more
    del tensor
    gc.collect()
    assert held.arena.words[held.block >> 3] == 9 << 32 | held.arena.queued


def test_beyond_the_budget_there_is_no_lease_until_one_ends(arena: Arena) -> None:
    arena.attach()
    leases = Leases(arena, budget=3 * 40_960)  # NBYTES and its header, by pages
    blocks = [arena.allocate(NBYTES) for _ in range(4)]
    arrays = [leases.lease(block, block + 64, NBYTES) for block in blocks]
    assert [array is None for array in arrays] == [False, False, False, True]
    arrays.clear()
    assert leases.lease(blocks[3], blocks[3] + 64, NBYTES) is not None


def test_a_fork_keeps_leases_that_it_may_read(held: Any, child: Any, kill: Any) -> None:
    tensor = held.tensor()
    pid = child(lambda: None)
    del tensor
    assert held.step == HELD
    held.leases.settle()
    assert held.step == HELD
    kill(pid)
    held.leases.settle()
    assert held.step == FREE


def test_a_fork_keeps_the_leases_of_its_killed_parent(held: Any, child: Any, kill: Any) -> None:
    told, tell = os.pipe()

    def parent() -> Any:
        held.arena.attach()
        held.block = held.arena.allocate(NBYTES)
        tensor = held.tensor()
        if os.fork() == 0:
            os.write(tell, os.getpid().to_bytes(4, "little"))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            signal.pause()
        return tensor

    pid = child(parent)
    grandchild = int.from_bytes(os.read(told, 4), "little")
    kill(pid)
    rows = held.arena.rows
    with rows.locked([1]) as dead:
        assert dead
        assert not held.arena.finish(1)
    assert [count for row, (count, _) in held.arena.holders().items() if row == 1] == [1]
    os.kill(grandchild, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while rows.has_fork_marker(1):
        assert time.monotonic() < deadline
    with rows.locked([1]):
        assert held.arena.finish(1)
    assert 1 not in held.arena.holders()
    os.close(told)
    os.close(tell)


def test_leases_younger_than_the_fork_are_not_kept(held: Any, child: Any) -> None:
    other = held.tensor()
    child(lambda: None)
    held.block = held.arena.allocate(NBYTES)
    tensor = held.tensor()
    del tensor
    assert held.step == FREE
    del other


def test_a_fork_without_leases_leaves_no_fork_marker(held: Any, child: Any) -> None:
    child(lambda: None)
    assert not held.arena.rows.has_fork_marker(held.arena.rows.index)
    assert held.arena.rows.forks == 0


def test_what_gives_its_memory_back_is_nobodys_until_then(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may look for dead leases, and allocate, at any moment."""
    held.leases.gives_back, given, other = True, [], []
    shrink = held.arena.shrink

    def shrink_late(block: int) -> None:
        held.leases.settle()
        held.arena.reclaim()
        other.append(held.arena.allocate(NBYTES))
        held.arena.segment.octets[other[0] + 64 : other[0] + NBYTES] = 7
        shrink(block)
        given.append(block)

    monkeypatch.setattr(held.arena, "shrink", shrink_late)
    held.tensor()
    assert held.step == FREE
    assert given == [held.block]
    assert (held.arena.segment.octets[other[0] + 64 : other[0] + NBYTES] == 7).all()


def test_what_gives_its_memory_back_is_free_whatever_ends_that(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(block: int) -> None:
        raise KeyboardInterrupt

    held.leases.gives_back = True
    monkeypatch.setattr(held.arena, "shrink", fail)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    held.tensor()
    assert held.step == FREE
    monkeypatch.undo()
    held.tensor()  # what was cut short keeps the arena until the next one goes


@pytest.mark.slow
def test_what_only_a_child_kept_is_free_wherever_an_exception_came(held: Any, child: Any, kill: Any) -> None:
    """A signal's handler may raise at any moment of the look that finds the child gone: the block is nobody's then."""
    point, goes_on = 0, True
    while goes_on:
        point += 1
        held.block = held.arena.allocate(NBYTES)
        tensor = held.tensor()
        pid = child(lambda: None)
        del tensor
        kill(pid)
        held.leases.gives_back = True
        goes_on = interrupted_at(point, held.leases.settle)
        held.leases.settle()
        assert held.step == FREE, point
    assert point > 5


def test_one_that_an_exception_ends_while_it_is_made_says_nothing(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal's handler may raise there; its array dies without a word on stderr."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(held.arena.rows, "reserve_fork_marker", interrupt)
    held.arena.rows.spare = None
    with pytest.raises(KeyboardInterrupt):
        held.leases.lease(held.block, held.block + 64, NBYTES)
    assert not held.leases.live


def test_a_tensor_that_is_let_go_of_drops_a_signals_exception_at_one_moment_at_most(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what is raised in a finalizer, and a worker that missed its Ctrl-C waits for ever."""
    dropped = []
    monkeypatch.setattr("sys.unraisablehook", lambda _: dropped.append(1))
    other = held.arena.allocate(NBYTES)
    another = held.leases.lease(other, other + 64, NBYTES)  # as a loop has, whose next message is there already
    for point in range(1, 20):
        tensors = [held.tensor()]
        interrupted_at(point, tensors.pop)
    assert len(dropped) <= 1
    del another
