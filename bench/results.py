"""The results of ``serializers``, for the table and the plot."""

from __future__ import annotations

from typing import NamedTuple

from bench.measure import Ratio

__all__ = ["Result"]


class Result(NamedTuple):
    """The result of one rival at one shape."""

    method: str
    shape: tuple[int, ...]
    serialize_ms: float
    deserialize_ms: float
    serialize_mb_s: float
    deserialize_mb_s: float
    buffer_kb: float
    max_difference: float
    serialize_peak_kb: float  # resident memory at most, beyond the tensor; -1: not known
    deserialize_peak_kb: float  # the same, beyond the bytes
    serialize_vs_raw: Ratio  # its time as a multiple of raw's in the same rounds
    deserialize_vs_raw: Ratio
