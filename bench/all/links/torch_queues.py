"""torch.multiprocessing's Queue and SimpleQueue, with either of its sharing strategies, which hold for a whole process."""

from __future__ import annotations

import torch.multiprocessing

from bench.all.links import Shape
from bench.queue.rivals import Rival, TorchQueue, TorchSimpleQueue

__all__ = ["queue", "simple_queue"]


def queue(shape: Shape, strategy: str) -> Rival:
    """A Queue."""
    torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    return TorchQueue(shape.bound)


def simple_queue(shape: Shape, strategy: str) -> Rival:
    """A SimpleQueue."""
    torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    return TorchSimpleQueue(shape.bound)
