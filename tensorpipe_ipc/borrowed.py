"""Private names of other libraries, and what is done where a version of theirs lacks them.

Each is looked up here, once. Where one is missing, a warning says what that costs, and the rest goes on. A file that tests a
library in another way says so itself (``memory.handover``, ``queues.call_queue``, ``queues.worker_memory``).
"""

from __future__ import annotations

import importlib
import io
import threading
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing  # its reducers

__all__ = [
    "check_sparse",
    "is_bad_fork",
    "is_owned",
    "is_zero_tensor",
    "join_threads",
    "pyzmq_reaper",
    "rebuild_subclass",
    "rebuild_tensor",
    "rebuild_untyped",
    "reducers",
    "running_threads",
    "shared_descriptor",
    "sharer",
    "storage_classes",
    "to_be_checked",
    "typed_storage_warning",
]


def _borrowed(path: str, instead: Any, cost: str, parts: tuple[str, ...] = ()) -> Any:
    """Return what a dotted name stands for; ``instead``, with a warning, where it is missing.

    Args:
        path: the module, then a colon, then the names within.
        cost: what is not there without it.
        parts: names that it must have.
    """
    module, _, names = path.partition(":")
    try:
        found = importlib.import_module(module)
        for name in filter(None, names.split(".")):
            found = getattr(found, name)
        for part in parts:
            getattr(found, part)
    except (AttributeError, ImportError):
        warnings.warn(f"tensorpipe_ipc finds no {path.replace(':', '.')} here: {cost}", RuntimeWarning, stacklevel=3)
        return instead
    return found


def _owns(lock: Any) -> bool:
    """Return whether this thread owns a lock, as its own words tell."""
    return f"owner={threading.get_ident()} " in repr(lock)


_LOCK = type(threading.RLock())
is_owned: Callable[[Any], bool] = getattr(_LOCK, "_is_owned", _owns)
"""Return whether this thread owns an RLock."""

is_zero_tensor: Callable[[torch.Tensor], bool] = _borrowed(
    "torch:Tensor._is_zerotensor", lambda _: False, "tensors of zeros without memory are sent as they claim to be"
)
"""Return whether a tensor stands for zeros, and has no memory."""

is_bad_fork: Callable[[], bool] = _borrowed(
    "torch.cuda:_is_in_bad_fork", lambda: False, "a GPU's tensor in a forked process fails by CUDA's own error"
)
"""Return whether this is a fork of a process that used CUDA."""

storage_classes: tuple[type, ...] = tuple(
    _borrowed("torch:_storage_classes", (), "storages of old kinds go as pickles, and not as memory")
)
"""torch's typed storages."""

typed_storage_warning: Any = _borrowed(
    "torch.storage:_warn_typed_storage_removal",
    SimpleNamespace(),
    "torch may warn of its own format of quantized tensors",
)
"""torch's warning of typed storages, with its note whether it has warned."""


rebuild_tensor: Any = _borrowed(
    "torch:_utils._rebuild_tensor_v2", None, "a slice of a tensor's subclass is sent with all of its storage"
)
"""The function that makes a pickled tensor anew, of (typed storage, offset, shape, strides, requires_grad, hooks)."""

rebuild_untyped: Any = _borrowed(
    "torch:_utils._rebuild_tensor_v3", None, "a tensor of a subclass, and of uint16, say, is lost"
)
"""The same, of (untyped storage, offset, shape, strides, requires_grad, hooks, dtype)."""

rebuild_subclass: Any = _borrowed(
    "torch:_tensor._rebuild_from_type_v2", None, "a slice of a tensor's subclass is sent with all of its storage"
)
"""The same for a subclass, of (the function for a plain tensor, the subclass, that function's arguments, attributes)."""

to_be_checked: list[Any] = _borrowed(
    "torch:_utils._sparse_tensors_to_validate", [], "after a torch.save file that was refused, the next may be, too"
)
"""Sparse tensors that torch has loaded and not yet checked, of the whole process."""


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("this torch lacks what checks the indices of a sparse tensor")


_check_coo = _borrowed("torch:_validate_sparse_coo_tensor_args", _refuse, "sparse tensors are refused")
_check_compressed = _borrowed("torch:_validate_sparse_compressed_tensor_args", _refuse, "sparse tensors are refused")


def check_sparse(tensor: torch.Tensor) -> None:
    """See that a sparse tensor's indices lie within it, as ``torch.load`` does where the program's setting says so.

    Raises:
        RuntimeError: they do not.
    """
    arguments: tuple[Any, ...]
    if tensor.layout is torch.sparse_coo:
        check, arguments = _check_coo, (tensor._indices(), tensor._values(), tensor.size(), tensor.is_coalesced())
    else:
        by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        outer, inner = (
            (tensor.crow_indices, tensor.col_indices) if by_rows else (tensor.ccol_indices, tensor.row_indices)
        )
        check, arguments = _check_compressed, (outer(), inner(), tensor.values(), tensor.size(), tensor.layout)
    try:
        check(*arguments, check_pinning=False)  # else it may ask CUDA
    except TypeError:  # a torch that does not ask
        check(*arguments)


shared_descriptor: Callable[[Any], int] = _borrowed(
    "torch:UntypedStorage._get_shared_fd", lambda _: 0, "files that torch has mapped are sent by its own handles"
)
"""Return the descriptor of a storage in torch's shared memory; -1 where it is a file that torch has mapped.

Raises:
    RuntimeError: it is shared by name.
"""

running_threads: dict[int, Any] | None = _borrowed(
    "threading:_active", None, "an exception while a producer over tcp starts may lose what it sends"
)
"""The threads that run, by their numbers."""

join_threads: Callable[[], None] = _borrowed(
    "threading:_shutdown",
    lambda: None,
    "a process of multiprocessing's that still has threads closes its ends under them",
)
"""Wait for all threads but daemons, and first have idle pools end theirs, as a program does that ends. It is done once."""

pyzmq_reaper: Any = _borrowed(
    "zmq.utils.garbage:gc",
    None,
    "its thread for lent memory is left to pyzmq",
    ("_lock", "is_alive", "pid", "thread"),
)
"""pyzmq's thread for lent memory."""

sharer: Any = _borrowed(
    "multiprocessing.resource_sharer:_resource_sharer",
    None,
    "what a child of os.fork shares by descriptors may arrive as another thing, and a process does not wait for its receivers",
    ("_afterfork", "_cache", "_thread"),
)
"""multiprocessing's table of the descriptors that this process shares, and its thread that hands them out."""

reducers: Mapping[Any, Callable[[Any], Any]] = _borrowed(
    "multiprocessing.reduction:ForkingPickler._extra_reducers",
    ForkingPickler(io.BytesIO()).dispatch_table,
    "what is registered with ForkingPickler from now on does not count",
)
"""multiprocessing's reducers, by type, those that torch has registered among them."""
