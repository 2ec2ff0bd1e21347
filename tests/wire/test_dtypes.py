"""The table of dtypes against torch itself."""

from __future__ import annotations

import exchange
import numpy as np
import pytest
import torch

from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.wire.arrival import restored_span
from tensorpipe_ipc.wire.dtypes import BY_CODE, BY_NUMPY, BY_TORCH
from tensorpipe_ipc.wire.metas import LeafMeta


def test_every_dtype_that_owns_whole_bytes_is_listed() -> None:
    """The table has every dtype of torch, but for quantized ones, bits without a type, and parts of bytes."""
    known = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    parts = {dtype for dtype in known if str(dtype).removeprefix("torch.").rstrip("1234567") in ("int", "uint")}
    without_numbers = {
        dtype for dtype in known if "bits" in str(dtype) or str(dtype).startswith(("torch.q", "torch.quint"))
    }
    assert known - parts - without_numbers - set(BY_TORCH) == set()
    assert not set(BY_TORCH) & without_numbers


def test_the_table_agrees_with_torch_and_numpy() -> None:
    """Item sizes are torch's, codes are unique bytes, and each NumPy dtype is the one torch converts to."""
    assert len(BY_CODE) == len(BY_TORCH)
    for dtype, row in BY_TORCH.items():
        assert 0 < row.code < 256
        assert row.itemsize == torch.empty(1, dtype=dtype).element_size()
        if row.numpy is not None:
            assert torch.empty(1, dtype=dtype).numpy().dtype == row.numpy
            assert BY_NUMPY[row.numpy] is row


@pytest.mark.parametrize(("nbytes", "items"), [(0, 0), (2, 1), (4, 2), (3, None), (1, None)])
def test_a_span_holds_whole_items(nbytes: int, items: int | None) -> None:
    """Of a narrow dtype, before they get their own one back."""
    meta = LeafMeta(BY_TORCH[torch.float16], own=BY_TORCH[torch.float32])
    span = torch.zeros(nbytes, dtype=torch.uint8)
    if items is None:
        with pytest.raises(ProtocolError, match=rf"a span of {nbytes} bytes, which are no items of torch.float16"):
            restored_span(span, meta)
    else:
        assert len(restored_span(span, meta)) == 4 * items


@pytest.mark.parametrize("code", np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?")
def test_every_name_of_a_numpy_dtype_travels(code: str) -> None:
    """C has two names for some integers, and so has NumPy: torch knows one."""
    array = np.arange(6).astype(code).reshape(2, 3)
    if array.dtype not in BY_NUMPY:
        return
    for sent in (array, array[:, ::-1], array[:0]):
        came = exchange.round_trip(sent)
        assert came.dtype == sent.dtype
        assert (came == sent).all()
