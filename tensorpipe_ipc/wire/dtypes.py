"""The one table of dtypes: torch dtype <-> wire code <-> item size <-> NumPy dtype.

A dtype is listed when its items own whole bytes. Codes are part of the wire format: never renumber one, only append.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["BY_CODE", "BY_NUMPY", "BY_TORCH", "NARROW", "WIDEST", "Dtype", "is_narrowed"]


class Dtype(NamedTuple):
    """One row of the table."""

    code: int  # its byte on the wire
    torch: torch.dtype
    itemsize: int  # bytes of one item
    numpy: np.dtype[Any] | None  # None: NumPy has no such dtype
    alignment: int = 8  # torch's kernels crash on items that lie at no multiple of it


WIDEST = 16  # bytes of the widest item

# name in torch, wire code, name in NumPy. A torch too old to know a dtype simply lacks its row.
_ROWS: tuple[tuple[str, int, str | None], ...] = (
    ("bool", 1, "bool"),
    ("uint8", 2, "uint8"),
    ("int8", 3, "int8"),
    ("uint16", 4, "uint16"),
    ("int16", 5, "int16"),
    ("uint32", 6, "uint32"),
    ("int32", 7, "int32"),
    ("uint64", 8, "uint64"),
    ("int64", 9, "int64"),
    ("float16", 10, "float16"),
    ("float32", 11, "float32"),
    ("float64", 12, "float64"),
    ("bfloat16", 13, None),
    ("float8_e4m3fn", 14, None),
    ("float8_e4m3fnuz", 15, None),
    ("float8_e5m2", 16, None),
    ("float8_e5m2fnuz", 17, None),
    ("float8_e8m0fnu", 18, None),
    ("float4_e2m1fn_x2", 19, None),  # two 4-bit floats to a byte; torch counts the pairs
    ("complex32", 20, None),
    ("complex64", 21, "complex64"),
    ("complex128", 22, "complex128"),
)


def _table() -> list[Dtype]:
    rows = []
    for name, code, numpy_name in _ROWS:
        dtype = getattr(torch, name, None)
        if dtype is not None:
            numpy_dtype = np.dtype(numpy_name) if numpy_name else None
            alignment = WIDEST if name in ("complex128", "float64") else 8  # view_as_complex() makes one of the other
            rows.append(Dtype(code, dtype, dtype.itemsize, numpy_dtype, alignment))
    return rows


BY_TORCH: dict[torch.dtype, Dtype] = {row.torch: row for row in _table()}
BY_CODE: dict[int, Dtype] = {row.code: row for row in BY_TORCH.values()}
BY_NUMPY: dict[np.dtype[Any], Dtype] = {row.numpy: row for row in BY_TORCH.values() if row.numpy is not None}

NARROW: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name) for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)
)  # what floats may be narrowed to


def is_narrowed(own: torch.dtype, to: torch.dtype) -> bool:
    """Return whether tensors of the dtype ``own`` cross as ``to``, where asked for: real floats that are wider than it."""
    return own.is_floating_point and own in _PLAIN_FLOATS and to in NARROW and own.itemsize > to.itemsize


_PLAIN_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # the others' scales are kept elsewhere
