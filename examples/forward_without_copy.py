"""A pipeline whose stages pass one piece of memory on: made once, worked on in place, never copied.

``ctx.empty`` makes a tensor in the context's shared memory. ``put(x, move=True)`` gives it away by reference: the name here
is empty afterwards, as it is the receiver's now. The receiver may write to it, and move it on in the same way.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import tensorpipe_ipc as tp


def double(source: Any, target: Any) -> None:
    """A stage: work on what comes, in place, and pass it on."""
    x, way = source.get()
    x.mul_(2)
    target.put((x, [*way, os.getpid()]), move=True)
    assert x.shape == (0,), "it was copied"


def main() -> None:
    """Send a tensor through two stages and back."""
    ctx = tp.get_context("spawn")
    first, second, last = ctx.Queue(), ctx.Queue(), ctx.Queue()
    stages = [ctx.Process(target=double, args=ends, daemon=True) for ends in ((first, second), (second, last))]
    for stage in stages:
        stage.start()
    x = ctx.empty((1000, 1000)).fill_(1)
    address = x.data_ptr()
    first.put((x, [os.getpid()]), move=True)
    print(f"moved: what is left of it here has shape {tuple(x.shape)}")
    back, way = last.get()
    assert torch.equal(back, torch.full((1000, 1000), 4.0))
    assert way == [os.getpid(), *(stage.pid for stage in stages)]
    print(f"back from 2 processes, every item times 4, at the same address: {back.data_ptr() == address}")
    for stage in stages:
        stage.join()


if __name__ == "__main__":  # a spawned process imports this file again
    main()
