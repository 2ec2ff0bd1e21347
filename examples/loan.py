"""A loan: fill a tensor where it will be read.

``queue.loan`` lends tensors that lie in the queue's shared memory. What is written to them is read by the other process
in the same place: nothing is copied, however large they are. On leaving the ``with`` block they are sent, and the names
here are empty; on an exception they are given back.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import tensorpipe_ipc as tp

SHAPE = (16, 3, 224, 224)


def decode(batches: Any) -> None:
    """Stand-in for a decoder that writes images to where it is told."""
    for step in range(3):
        with batches.loan({"images": tp.TensorSpec(SHAPE, torch.uint8), "step": step}) as batch:
            batch["images"].fill_(step)
    try:
        with batches.loan(SHAPE, torch.uint8):
            raise ValueError("a broken image")
    except ValueError as error:
        batches.put(f"{error}: the loan was given back")
    batches.put(None)


def main() -> None:
    """Receive what another process decodes."""
    ctx = tp.get_context("spawn")
    batches = ctx.Queue()
    decoder = ctx.Process(target=decode, args=(batches,), daemon=True)
    decoder.start()
    for batch in iter(batches.get, None):
        if isinstance(batch, str):
            print(batch)
            continue
        images, step = batch["images"], batch["step"]
        assert torch.equal(images, torch.full(SHAPE, step, dtype=torch.uint8))
        print(f"batch {step}: {images.nbytes:,} bytes written by pid {decoder.pid}, read in place by pid {os.getpid()}")
    decoder.join()


if __name__ == "__main__":  # a spawned process imports this file again
    main()
