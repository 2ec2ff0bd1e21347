"""loan(): tensors that are filled where they will be read; and TensorSpec."""

from __future__ import annotations

import queue
import time
from typing import Any

import numpy as np
import pytest
import torch
from arenas import CAPACITY, blocks_in_use, drained

from tensorpipe_ipc.errors import Closed, SharedMemoryError
from tensorpipe_ipc.memory.loans import TensorSpec


@pytest.mark.parametrize("shape", [(100, 200), torch.Size([100, 200]), [100, 200], 20_000])
def test_a_shape_is_lent_and_arrives_where_it_was_filled(ctx: Any, shape: Any) -> None:
    there = ctx.Queue()
    with there.loan(shape, torch.int64) as batch:
        address = batch.data_ptr()
        batch.fill_(3)
    assert batch.shape == (0,)
    got = there.get()
    assert (got.data_ptr(), got.dtype, got.unique().tolist()) == (address, torch.int64, [3])
    assert got.numel() == 20_000


def test_a_tree_lies_in_one_block_and_travels_with_its_plain_values(ctx: Any) -> None:
    there = ctx.Queue()
    specs = {
        "x": TensorSpec((300, 300)),
        "parts": (TensorSpec((5,), torch.int64), [TensorSpec((0, 4)), TensorSpec(())]),
        "mask": TensorSpec((300, 301), torch.bool),
        "name": "a",
        "step": 1,
    }
    with there.loan(specs) as tree:
        assert blocks_in_use(ctx) == {"held": 1}
        for tensor in (tree["x"], *tree["parts"][1], tree["parts"][0], tree["mask"]):
            assert tensor.data_ptr() % 64 == 0
            tensor.fill_(1)
        tree["step"] = 2
        address = tree["x"].data_ptr(), tree["parts"][0].data_ptr(), tree["mask"].data_ptr()
    got = there.get()
    assert (got["x"].data_ptr(), got["parts"][0].data_ptr(), got["mask"].data_ptr()) == address
    assert (got["x"].sum(), got["mask"].sum(), got["parts"][0].sum(), got["parts"][1][1]) == (90_000, 90_300, 5, 1)
    assert (got["parts"][1][0].shape, got["name"], got["step"]) == ((0, 4), "a", 2)
    assert got["x"].untyped_storage().nbytes() == 360_000  # each has a storage of its own
    got.clear()
    assert blocks_in_use(ctx) == {}


def test_an_exception_gives_it_back_and_goes_on(ctx: Any) -> None:
    there = ctx.Queue()
    with pytest.raises(ZeroDivisionError), there.loan((1000, 1000)) as batch:
        batch[0] = 1 / 0
    assert there.empty()
    del batch
    assert blocks_in_use(ctx) == {}


def test_full_on_leaving_keeps_what_was_written_and_it_can_be_put_later(ctx: Any) -> None:
    there = ctx.Queue(1)
    there.put(1)
    with pytest.raises(queue.Full), there.loan((1000, 100), timeout=0.01) as batch:
        batch.fill_(3)
    assert batch.sum() == 300_000
    address = batch.data_ptr()
    assert there.get() == 1
    there.put(batch, move=True)
    assert there.get().data_ptr() == address


def test_full_on_entering_comes_in_time(ctx: Any) -> None:
    there = ctx.Queue()
    there.put(1)  # a queue with nothing in it may always place one
    held = [ctx.empty((1 << 20,)).fill_(1) for _ in range(CAPACITY // (1 << 22) - 1)]
    began = time.monotonic()
    with pytest.raises(queue.Full, match="bytes free"), there.loan((1 << 20,), timeout=0.1):
        pass
    assert time.monotonic() - began >= 0.1
    with pytest.raises(SharedMemoryError, match="never fit"), there.loan((1 << 30,)):
        pass
    held.clear()
    with there.loan((1 << 20,), timeout=5):
        pass
    assert drained(there)[1].shape == (1 << 20,)


def test_what_is_still_used_is_copied(ctx: Any) -> None:
    there = ctx.Queue()
    with there.loan((1000, 100)) as batch:
        array = batch.numpy()
        array[:] = 3
    array[:] = 4
    assert there.get().sum() == 300_000
    del array, batch
    assert blocks_in_use(ctx) == {}


def test_a_small_or_an_empty_loan_is_sent_too(ctx: Any) -> None:
    there = ctx.Queue()
    for shape in ((3,), (0, 5), ()):
        with there.loan(shape) as batch:
            batch.fill_(2)
        got = there.get()
        assert (got.shape, got.unique().tolist()) == (shape, [2.0] if got.numel() else [])


def test_a_loan_is_for_one_block_at_a_time(ctx: Any) -> None:
    there = ctx.Queue()
    loan = there.loan((3,))
    with loan as one:
        one.fill_(1)
        with pytest.raises(RuntimeError, match="entered and not left"), loan:
            pass
    with loan as other:
        other.fill_(2)
    assert [there.get().tolist() for _ in range(2)] == [[1.0] * 3, [2.0] * 3]


def test_a_closed_queue_lends_nothing(ctx: Any) -> None:
    there = ctx.Queue()
    there.close()
    with pytest.raises(Closed), there.loan((3,)):
        pass


def test_a_spec_is_compared_by_value_and_checked() -> None:
    assert TensorSpec([3, 4]) == TensorSpec((3, 4), torch.float32)
    assert len({TensorSpec((3,)), TensorSpec((3,))}) == 1
    assert TensorSpec((3, 4), torch.float64).nbytes == 96
    with pytest.raises(ValueError, match="not negative"):
        TensorSpec((3, -1))


def test_a_dtype_that_is_not_torchs_is_named(ctx: Any) -> None:
    """A string or NumPy's dtype is a TypeError of loan, which says what to give."""
    for dtype in ("float32", np.float32, None):
        with pytest.raises(TypeError, match="give a torch.dtype, as torch.float32"):
            ctx.Queue().loan((3,), dtype)
