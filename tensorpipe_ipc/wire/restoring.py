"""Restoring: floats that crossed as a narrower dtype are made what they were, into memory that is there already.

torch restores float16 and bfloat16 as fast as memory goes, and eight bits a thousand items at a time: float8_e4m3fn takes it
FIGURES. So of eight bits two items are looked up at once, in a table of all pairs that there can be.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from tensorpipe_ipc.wire.dtypes import BY_CODE

__all__ = ["restore", "restore_bytes"]

_LOOKED_UP = 1 << 14  # pairs from which on a table is worth it


def restore_bytes(place: memoryview, narrow: memoryview, crossed: int, own: int) -> None:
    """Fill ``place`` with the items of ``narrow``, whole ones of the dtype with the code ``crossed``, as those of ``own``.

    Args:
        place: aligned to items of ``own``, and of their length.
        narrow: anywhere; it need not be writable.
    """
    octets = np.frombuffer(narrow, np.uint8)
    if octets.ctypes.data % 8 or not octets.flags.writeable:  # torch's kernels crash on crooked items
        octets = octets.copy()
    there = torch.frombuffer(place, dtype=BY_CODE[own].torch)
    restore(there, torch.from_numpy(octets).view(BY_CODE[crossed].torch))


def restore(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """Fill a tensor with the items of a narrower one of its shape."""
    pairs = narrow.numel() // 2
    is_row = narrow.is_cpu and narrow.is_contiguous() and wide.is_contiguous()
    if (narrow.itemsize, wide.itemsize) == (1, 4) and is_row and pairs >= _LOOKED_UP:
        wide, narrow = wide.view(-1), narrow.view(-1)
        octets = narrow[: 2 * pairs].view(torch.uint8).numpy().view(np.uint16)
        np.take(_pairs(narrow.dtype, wide.dtype), octets, out=wide[: 2 * pairs].numpy().view(np.uint64), mode="clip")
        wide, narrow = wide[2 * pairs :], narrow[2 * pairs :]
    wide.copy_(narrow)


@functools.cache
def _pairs(crossed: torch.dtype, own: torch.dtype) -> np.ndarray[Any, Any]:
    """All pairs of items of eight bits, restored: 512 KiB."""
    both = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.uint8))
    return both.view(crossed).to(own).numpy().view(np.uint64)
