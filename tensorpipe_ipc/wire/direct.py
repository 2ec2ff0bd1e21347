"""The mark of a storage that lies directly on a message's memory, as this library made it.

Such a storage holds the memory by one reference of its own. A storage that NumPy or DLPack made of such a tensor lies at
the same place, but holds the tensor, and not the memory. So only marked storages tell, by their number, whether a tree has all
that lies on a block (``memory.handover``). torch keeps a storage's Python object, with the mark, as long as the storage.
"""

from __future__ import annotations

import torch

from tensorpipe_ipc.wire.layout import LEASE_FROM

__all__ = ["is_marked", "mark", "mark_all"]

_WORTHWHILE = 16 << 10  # bytes a tensor, on average


def mark(tensor: torch.Tensor) -> None:
    """Mark the storage of a tensor that was just made on memory, if it has one. It takes 0.2 us."""
    if tensor.layout is torch.strided:
        tensor.untyped_storage().is_direct = True  # type: ignore[attr-defined]


def mark_all(tensors: list[torch.Tensor], nbytes: int) -> None:
    """Mark those of a message of ``nbytes``; of small ones none: a copy costs less than the marks."""
    if nbytes >= max(LEASE_FROM, _WORTHWHILE * len(tensors)):
        for tensor in tensors:
            mark(tensor)


def is_marked(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage was marked."""
    return hasattr(storage, "is_direct")
