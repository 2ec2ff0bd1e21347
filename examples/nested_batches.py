"""Nested batches: a message is a tree, and arrives as the tree it was.

Lists, tuples and dicts nest; NamedTuples and dataclasses travel once they are registered, on both ends: nothing is ever
imported by a name that came from outside. Tensors that share memory arrive sharing it, and it travels once.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any, NamedTuple

import numpy as np
import torch

import tensorpipe_ipc as tp


@tp.register_type
class Sample(NamedTuple):
    """One image of a batch and what is known of it."""

    image: torch.Tensor
    boxes: torch.Tensor
    name: str


def batch() -> dict[str, Any]:
    """A detection batch: images that are views of one block, a different number of boxes in each."""
    block = torch.arange(4 * 3 * 32 * 32, dtype=torch.float32).view(4, 3, 32, 32)
    samples = [Sample(image, torch.zeros(number, 4), f"image {number}") for number, image in enumerate(block)]
    return {"block": block, "samples": samples, "mean": np.float64(0.5) * np.ones(3), "epoch": (1, None, True)}


def produce(endpoint: str) -> None:
    """Send one."""
    with tp.Producer(endpoint) as producer:
        producer.put(batch())


def main() -> None:
    """Receive it, and look at what it has become."""
    endpoint = f"nested-batches-{os.getpid()}"
    with tp.Consumer(endpoint) as consumer:
        other = multiprocessing.get_context("spawn").Process(target=produce, args=(endpoint,), daemon=True)
        other.start()
        got, nbytes = consumer.get(timeout=60), consumer.statistics().bytes
        other.join()
    assert [type(sample) for sample in got["samples"]] == [Sample] * 4
    print(f"boxes of each image: {[tuple(sample.boxes.shape) for sample in got['samples']]}, mean {got['mean']}")
    got["block"].fill_(7)
    assert all(bool((sample.image == 7).all()) for sample in got["samples"])
    print(f"the images are views of the block here too, which travelled once: {nbytes:,} bytes")


if __name__ == "__main__":
    main()
