"""Train a small network on scikit-learn's digits: two lines of the loop are ours, the rest is as it was.

The same training, with the same seed, with a stock DataLoader and with ours: the batches are equal bit for bit, and so is
what was learned. A size may be given: ``train_digits.py EPOCHS``.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import tensorpipe_ipc as tp


def data() -> list[Any]:
    """The digits, some to learn from and some to be tested with."""
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    return random_split(digits, [0.8, 0.2], torch.Generator().manual_seed(0))


def train(learn: Any, epochs: int, **options: Any) -> tuple[nn.Module, float]:
    """A network that has seen the digits so many times, and the seconds it took."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    loader = DataLoader(learn, 64, shuffle=True, num_workers=2, persistent_workers=True, **options)
    start = time.perf_counter()
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return network, time.perf_counter() - start


def main(epochs: int) -> None:
    """Train twice, and compare."""
    torch.set_num_threads(1)  # of OpenMP: its threads do not survive the fork of a worker
    learn, test = data()
    ctx = tp.get_context("fork")
    stock, stock_seconds = train(learn, epochs, multiprocessing_context="fork")
    ours, our_seconds = train(learn, epochs, multiprocessing_context=ctx)
    images, labels = next(iter(DataLoader(test, len(test))))
    accuracy = (ours(images).argmax(1) == labels).float().mean()
    same = all(torch.equal(one, other) for one, other in zip(stock.parameters(), ours.parameters(), strict=True))
    print(f"{epochs} epochs of {len(learn)} digits: {accuracy:.0%} of {len(test)} others read right")
    print(f"stock loader {stock_seconds:.2f} s, ours {our_seconds:.2f} s; the same weights, bit for bit: {same}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
