"""The demo's work: a bank of three filters over a picture, once by ``conv2d`` and once by whole numbers.

The two must agree bit for bit, and not only nearly: every weight is a multiple of 2**-16 and every sum stays below 2**8,
so float32, which has 24 bits, rounds nothing, in whatever order a processor adds.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["FILTERS", "by_conv2d", "by_whole_numbers"]

_LUMA = torch.tensor([77, 150, 29])  # of 256: how bright red, green and blue look (ITU-R BT.601)
_BINOMIAL = torch.tensor([1, 4, 6, 4, 1])
_SMOOTH, _SLOPE = torch.tensor([0, 1, 2, 1, 0]), torch.tensor([0, -1, 0, 1, 0])

# Each filter in whole numbers, and what they are parts of.
FILTERS = {
    "Gaussian": (torch.outer(_BINOMIAL, _BINOMIAL), 256),
    "Sobel across": (torch.outer(_SMOOTH, _SLOPE), 8),
    "Sobel down": (torch.outer(_SLOPE, _SMOOTH), 8),
}


def by_conv2d(image: torch.Tensor) -> torch.Tensor:
    """All filters over a picture's brightness: float32, filters x height x width.

    Args:
        image: uint8, 3 x height x width.
    """
    return torch.nn.functional.conv2d(image.float()[None], _weights(), padding=2)[0]


def by_whole_numbers(image: torch.Tensor) -> torch.Tensor:
    """The same by shifting and adding integers, without conv2d."""
    brightness = (image.long() * _LUMA[:, None, None]).sum(0)
    height, width = brightness.shape
    padded = torch.zeros(height + 4, width + 4, dtype=torch.int64)
    padded[2:-2, 2:-2] = brightness
    results = []
    for taps, parts in FILTERS.values():
        total = torch.zeros_like(brightness)
        for down, across in taps.nonzero().tolist():
            total += taps[down, across] * padded[down : down + height, across : across + width]
        results.append(total.double() / (256 * parts))
    return torch.stack(results).float()


@functools.cache
def _weights() -> torch.Tensor:
    """Filters x channels x 5 x 5."""
    return torch.stack(
        [taps.float() / parts * (_LUMA.float() / 256)[:, None, None] for taps, parts in FILTERS.values()]
    )
