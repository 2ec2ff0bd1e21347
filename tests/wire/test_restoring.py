"""Restoring: every item is what torch makes of it, wherever it lies."""

from __future__ import annotations

import pytest
import torch

from tensorpipe_ipc.wire.dtypes import NARROW, is_narrowed
from tensorpipe_ipc.wire.restoring import restore

ALL = [(own, to) for own in (torch.float64, torch.float32, torch.float16) for to in NARROW if is_narrowed(own, to)]


def _every_item(dtype: torch.dtype, count: int) -> torch.Tensor:
    """All bit patterns of a dtype, again and again, in every neighbourhood."""
    bits = torch.arange(count) * 257 % (1 << 8 * dtype.itemsize)
    return bits.to({1: torch.uint8, 2: torch.int16}[dtype.itemsize]).view(dtype)


@pytest.mark.parametrize("count", [0, 1, 257, (1 << 18) + 1, 70_000])
@pytest.mark.parametrize(("own", "to"), ALL, ids=str)
def test_every_item_is_as_torch_has_it(own: torch.dtype, to: torch.dtype, count: int) -> None:
    """Few and many, nan and inf too."""
    narrow = _every_item(to, count)
    wide = torch.zeros(count, dtype=own)
    restore(wide, narrow)
    assert torch.equal(wide.nan_to_num(nan=-7.5), narrow.to(own).nan_to_num(nan=-7.5))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_tensors_with_gaps_and_in_another_order(dtype: torch.dtype) -> None:
    """They keep their shapes."""
    narrow = _every_item(dtype, 90_000).view(300, 300)
    for tensor in (narrow.t(), narrow[:, ::2]):
        wide = torch.zeros(tensor.shape)
        restore(wide, tensor)
        assert torch.equal(wide.nan_to_num(nan=-7.5), tensor.float().nan_to_num(nan=-7.5))
    wide = torch.zeros(300, 600)[:, ::2]
    restore(wide, narrow)
    assert torch.equal(wide.nan_to_num(nan=-7.5), narrow.float().nan_to_num(nan=-7.5))
