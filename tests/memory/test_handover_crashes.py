"""A process may die at any store and any system call of a moving put, of forwarding, of empty and of a loan."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from arenas import blocks_in_use, drained
from crash_points import dies_at
from inside import keep_spare, look_at_counts, shared_queue_of
from wholeness import stride

from tensorpipe_ipc.memory.loans import TensorSpec
from tensorpipe_ipc.memory.row import PUT

pytestmark = [pytest.mark.kills, pytest.mark.limit(300)]

SIZE = 20_000
MAXSIZE = 3


def warm(there: Any) -> None:
    """So that the steps are the same each time: a row, and an operation."""
    assert look_at_counts()()
    shared_queue_of(there).attachment.attach()
    keep_spare(shared_queue_of(there), PUT)


def put_held(there: Any, tree: Any) -> Any:
    """The shared stores of a moving put, as something to be called."""
    queue, calls = shared_queue_of(there), []
    queue.put_held = lambda *arguments: calls.append(arguments) or True
    there.put(tree, move=True)
    queue.put_held = queue.puts.put_held
    assert calls, "it was copied"
    return lambda: queue.put_held(*calls[0])


def check_whole(ctx: Any, *queues: Any) -> None:
    """Nothing is missing and nothing is there twice: blocks, places, credits."""
    assert blocks_in_use(ctx) == {}
    for there in queues:
        for i in range(shared_queue_of(there).maxsize):
            there.put(i, timeout=0)
        if shared_queue_of(there).maxsize:
            with pytest.raises(queue.Full):
                there.put("one too many", timeout=0)
        assert drained(there) == list(range(shared_queue_of(there).maxsize))


def points(dies: Any, step: int = 1) -> Iterator[Any]:
    for point in range(1, 5000, step):
        if not dies(point):
            assert point > 10, "nothing was traced"
            return
        yield point
    raise AssertionError("it never completes")


@pytest.mark.parametrize("maxsize", [0, MAXSIZE, 10_000])
@pytest.mark.parametrize("forwarded", [False, True], ids=["made", "forwarded"])
def test_a_process_killed_at_any_step_of_a_moving_put_leaves_a_whole_message_or_none(
    ctx: Any, maxsize: int, forwarded: Any
) -> None:
    one, there = ctx.Queue(), ctx.Queue(maxsize)
    seen, steps = set(), []

    def first() -> None:
        warm(there)
        tensor = one.get() if forwarded else ctx.empty(SIZE).fill_(3)
        steps.append(put_held(there, [tensor, "text"]))

    def dies(point: int) -> Any:
        if forwarded:
            one.put(torch.full((SIZE,), 3.0))
        return dies_at(point, lambda: steps[-1](), first)

    for _ in points(dies, stride(3)):
        ctx.tensorpipe_attachment().recover_dead()
        got = drained(there)
        seen.add(len(got))
        for tensor, text in got:
            assert (tensor.sum(), text) == (3 * SIZE, "text")
            del tensor
        got.clear()
        if maxsize < 100:
            check_whole(ctx, one, there)
    assert seen == {0, 1}
    assert len(drained(there)) == 1
    check_whole(ctx, one, there)


def test_a_recovering_process_killed_at_any_step_of_finishing_a_moving_put_is_followed_by_another(ctx: Any) -> None:
    there, steps, verdicts, far = ctx.Queue(MAXSIZE), [], set(), stride(299)

    def first() -> None:
        warm(there)
        steps.append(put_held(there, ctx.empty(SIZE).fill_(3)))

    attachment = ctx.tensorpipe_attachment()
    for point in points(lambda point: dies_at(point, lambda: steps[-1](), first), stride(11)):
        verdict = set()
        for step in range(1 + point % far, 3000, far):
            complete = not dies_at(step, attachment.attach)  # it finishes the dead row, to adopt it
            attachment.recover_dead()
            got = drained(there)
            verdict.add(len(got))
            got.clear()
            check_whole(ctx, there)
            if complete:
                break
            assert dies_at(point, lambda: steps[-1](), first)
        attachment.recover_dead()
        drained(there)
        assert len(verdict) == 1
        verdicts |= verdict
    drained(there)
    assert verdicts == {0, 1}


def test_a_process_killed_at_any_step_of_making_a_tensor_leaves_nothing(ctx: Any) -> None:
    def first() -> None:
        ctx.tensorpipe_attachment().attach()
        arena = ctx.tensorpipe_attachment().arena
        arena.discard(arena.allocate(4 * SIZE + 1000))

    for _ in points(lambda point: dies_at(point, lambda: ctx.empty(SIZE), first), stride(11)):
        ctx.tensorpipe_attachment().recover_dead(adopt_extents=True)
        assert blocks_in_use(ctx) == {}


def test_a_process_killed_at_any_step_of_a_loan_leaves_a_whole_message_or_none(ctx: Any) -> None:
    there, seen = ctx.Queue(MAXSIZE), set()

    def fill_a_loan() -> None:
        with there.loan({"x": TensorSpec((SIZE,)), "y": TensorSpec((3,), torch.int64), "n": 5}) as tree:
            tree["x"].fill_(3)
            tree["y"].fill_(7)

    for _ in points(lambda point: dies_at(point, fill_a_loan, lambda: warm(there)), stride(97)):
        ctx.tensorpipe_attachment().recover_dead(adopt_extents=True)
        got = drained(there)
        seen.add(len(got))
        for tree in got:
            assert (tree["x"].sum(), tree["y"].tolist(), tree["n"]) == (3 * SIZE, [7, 7, 7], 5)
            tree.clear()
        check_whole(ctx, there)
    assert 0 in seen
    assert len(drained(there)) == 1
