"""CUDA's door: every call of CUDA's that this package makes stands here."""

from __future__ import annotations

import torch

__all__ = ["allocated"]


def allocated() -> dict[str, int]:
    """Bytes that torch has allocated in this process, by GPU. Empty, and CUDA is left alone, where it was not used."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {f"cuda:{index}": torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())}
