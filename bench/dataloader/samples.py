"""The datasets that the loaders load: some work for their samples, some have them ready; and the check of a batch.

A sample is full of its own number, so that each batch can be checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

__all__ = ["Case", "Detection", "Samples", "check_detection", "check_pair"]

BANK = 16  # different samples; a dataset that does no work gives the same ones again and again


class Case(NamedTuple):
    """A kind of batch.

    Attributes:
        shape, dtype: of a sample.
        work: makes a sample of a raw one.
        batch_size, batches: of a turn.
        limit: what the ratio is held to where the samples are ready.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    work: Callable[[torch.Tensor], torch.Tensor]
    batch_size: int
    batches: int
    limit: float


class Samples(Dataset[Any]):
    """Pairs of a tensor and its number."""

    def __init__(self, case: Case, length: int, works: bool) -> None:
        self._case, self._length, self._works = case, length, works
        self._bank = [torch.full(case.shape, number).to(case.dtype) for number in range(BANK)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        sample = self._bank[i % BANK]
        return (self._case.work(sample) if self._works else sample), i % BANK


class Detection(Samples):
    """An image and seven small tensors for what is on it."""

    def __getitem__(self, i: int) -> Any:
        image, number = super().__getitem__(i)
        boxes = 1 + i % 3
        target = {
            "boxes": torch.full((boxes, 4), float(number)),
            "labels": torch.full((boxes,), number),
            "area": torch.ones(boxes),
            "crowd": torch.zeros(boxes, dtype=torch.bool),
            "size": torch.tensor([160, 160]),
            "original": torch.tensor([640, 480]),
            "id": torch.tensor(number),
        }
        return image, target


def check_pair(batch: Any) -> None:
    """See that a batch is what it should be: the first and last item of each sample.

    Raises:
        ValueError: it is not.
    """
    samples, numbers = batch
    flat = samples.flatten(1)
    if not (torch.equal(flat[:, 0].long(), numbers) and torch.equal(flat[:, -1].long(), numbers)):
        raise ValueError("a batch came damaged")


def check_detection(batch: Any) -> None:
    """The same of a batch of images and targets."""
    images, masks, targets = batch
    numbers = torch.stack([target["id"] for target in targets])
    check_pair((images, numbers))
    if not torch.equal(masks[:, 0, 0], numbers > 7) or any(
        not bool((target["boxes"] == target["id"]).all()) for target in targets
    ):
        raise ValueError("targets came damaged")
