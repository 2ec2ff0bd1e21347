"""Any picklable object, with its tensors out of the pickle: for queues, whose ends are one family of processes.

Endpoints never come here. The pickler is multiprocessing's own (so that locks, connections and whatever else knows how to
travel to a relative still do), with one thing changed: a tensor, array or storage is not pickled, nor moved into torch's
shared memory, but named by its number, and travels beside the pickle as a leaf of the message.
"""

from __future__ import annotations

import collections
import copyreg
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import numpy as np
import torch
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.storage import TypedStorage, UntypedStorage

from tensorpipe_ipc.wire.dtypes import BY_NUMPY

__all__ = ["dump", "dump_without_leaves", "load", "load_without_leaves"]


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.leaves: list[Any] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not _is_leaf(obj):
            return None
        number = self._numbers.setdefault(id(obj), len(self.leaves))  # the leaves' list keeps it, so ids stay theirs
        if number == len(self.leaves):
            self.leaves.append(obj)
        return number


def _refuse(_: Any) -> Any:
    raise _HasLeaves


class _WithoutLeaves(pickle.Pickler):
    """Asks about no object: what has its own way into a pickle is found by its type, and leaves have the way out. Four
    times as fast for a small object; ForkingPickler's own table alone, which it copies each time, takes 3 us."""

    _leaves: Any = dict.fromkeys((torch.Tensor, Parameter, np.ndarray, TypedStorage, *torch._storage_classes), _refuse)
    _registered: Any = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    dispatch_table = collections.ChainMap[Any, Any](_leaves, _registered, cast(Any, copyreg.dispatch_table))


class _HasLeaves(Exception):
    """There is a leaf in it."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, leaves: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._leaves = leaves

    def persistent_load(self, pid: Any) -> Any:
        return self._leaves[pid]


def dump(obj: Any) -> tuple[bytes, list[Any]]:
    """An object's pickle, and the leaves that it names by number.

    Raises:
        Exception: whatever the object raises when it is pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    return file.getvalue(), pickler.leaves


def load(data: bytes, leaves: list[Any]) -> Any:
    """The object of a pickle and its leaves.

    Raises:
        Exception: whatever the object raises when it is made again.
    """
    return _Unpickler(data, leaves).load()


def dump_without_leaves(obj: Any) -> bytes | None:
    """An object's pickle; None if it has leaves.

    Raises:
        Exception: whatever the object raises when it is pickled.
    """
    file = io.BytesIO()
    try:
        _WithoutLeaves(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    except _HasLeaves:
        return None
    return file.getvalue()


def load_without_leaves(data: Any) -> Any:
    """The object of a pickle that has none.

    Raises:
        Exception: whatever the object raises when it is made again.
    """
    return pickle.loads(data)  # noqa: S301 - of a relative of this process


def _is_leaf(obj: Any) -> bool:
    kind = type(obj)
    if kind is torch.Tensor or kind is Parameter:
        if (
            isinstance(obj, UninitializedParameter)
            or obj.layout is not torch.strided
            or obj.is_nested
            or obj.is_quantized
        ):
            return False
        return not obj.is_meta
    if kind is np.ndarray:
        return obj.dtype in BY_NUMPY and obj.dtype.isnative
    # Not obj.device: torch warns of that, whoever asks.
    return kind is UntypedStorage or (isinstance(obj, TypedStorage) and obj._untyped_storage.device.type == "cpu")
