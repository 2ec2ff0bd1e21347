"""The DataLoader's turns: batches a second, of an epoch with workers that persist."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from bench.dataloader.rivals import both, memory, rounds
from bench.dataloader.rows import Row, Turn, row_of
from bench.dataloader.samples import Case, Detection, Samples, check_detection, check_pair

__all__ = ["CASES", "measure"]

ROUNDS = 5
WORKERS = (1, 2)


def _normalised(image: torch.Tensor) -> torch.Tensor:
    """Normalise a decoded image as is usual: a flip, a mean and a deviation."""
    return image.flip(-1).sub(0.45).div(0.225).mul(0.225).add(0.45).round_()


def _cropped(image: torch.Tensor) -> torch.Tensor:
    """A crop out of a larger image, flipped."""
    return torch.nn.functional.pad(image, (32, 32, 32, 32))[32:-32, 32:-32].flip(-1)


def _scaled(row: torch.Tensor) -> torch.Tensor:
    """A row of a table, normalised."""
    return row.sub(1).div(2).mul(2).add(1)


CASES: dict[str, Case] = {
    "images": Case((3, 224, 224), torch.float32, _normalised, 64, 24, 2.0),
    "crops": Case((1024, 1024), torch.uint8, _cropped, 16, 48, 1.5),
    "tabular": Case((16,), torch.float32, _scaled, 32, 800, 4.0),
    "detection": Case((3, 160, 160), torch.uint8, lambda image: image.flip(-1), 16, 100, 5.0),
}


class _Collate:
    """A detector's collate function: images and masks are stacked, targets stay a list. 114 tensors of a batch of 16."""

    def __init__(self, stack: Callable[[Any], Any]) -> None:
        self._stack = stack

    def __call__(self, samples: list[Any]) -> Any:
        masks = [image[0] > 7 for image, _ in samples]
        images, masks = self._stack([(image, mask) for (image, _), mask in zip(samples, masks, strict=True)])
        return images, masks, [target for _, target in samples]


class _Loading:
    """One rival's loader."""

    def __init__(self, name: str, works: bool, workers: int, scale: float, ctx: Any) -> None:
        case = CASES[name]
        self._batches = max(8, round(case.batches * scale))
        length, stack = self._batches * case.batch_size, default_collate if ctx is None else ctx.collate
        detects = name == "detection"
        self._check = check_detection if detects else check_pair
        self._loader = DataLoader(
            (Detection if detects else Samples)(case, length, works),
            case.batch_size,
            num_workers=workers,
            collate_fn=_Collate(stack) if detects else stack,
            multiprocessing_context="fork" if ctx is None else ctx,
            persistent_workers=True,
        )

    def turn(self, looks: bool) -> Turn:
        """An epoch. Its first batches, which find the workers idle, do not count."""
        first, found = self._batches // 4, [(0, 0)]
        start = 0.0
        for number, batch in enumerate(self._loader):
            if number == first:
                start = time.perf_counter()
            self._check(batch)
            if looks and number % max(1, first) == 0:
                found.append(memory())
        rate = (self._batches - first - 1) / (time.perf_counter() - start)
        return Turn(rate, *map(max, zip(*found, strict=True)))

    def close(self) -> None:
        """End its workers."""
        self._loader._iterator = None


def measure(name: str, scale: float) -> list[Row]:
    """All rows of a case."""
    rows = []
    for works in (False, True):
        for workers in WORKERS:
            with both(lambda ctx, works=works, workers=workers: _Loading(name, works, workers, scale, ctx)) as lines:  # type: ignore[misc]
                turns = rounds(lines, max(2, round(ROUNDS * scale)) + 1)
            looked = {rival: each[-1] for rival, each in turns.items()}
            counted = {
                rival: [turn._replace(uss=looked[rival].uss, pss=looked[rival].pss) for turn in each[:-1]]
                for rival, each in turns.items()
            }
            rows.append(
                row_of(name, "work" if works else "ready", workers, 1.0 if works else CASES[name].limit, counted)
            )
    return rows
