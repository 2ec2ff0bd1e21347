"""Quickstart: tensors from one process to another.

One side makes a Producer, the other a Consumer, on the same endpoint. Here it is a bare name, which any program of the same
user can use. A message is any tree of tensors, arrays, numbers and strings; it arrives as it was put, and what arrives is
the receiver's own. Iterating a consumer ends when its producers have said goodbye.
"""

from __future__ import annotations

import multiprocessing
import os

import torch

import tensorpipe_ipc as tp


def produce(endpoint: str) -> None:
    """Put five messages. Leaving the ``with`` block waits until they are taken, and says goodbye."""
    with tp.Producer(endpoint) as producer:
        for step in range(5):
            producer.put({"step": step, "image": torch.full((3, 224, 224), step / 4)})


def main() -> None:
    """Receive them from another process."""
    endpoint = f"quickstart-{os.getpid()}"
    with tp.Consumer(endpoint) as consumer:
        other = multiprocessing.get_context("spawn").Process(target=produce, args=(endpoint,), daemon=True)
        other.start()
        for message in consumer:
            step, image = message["step"], message["image"]
            assert torch.equal(image, torch.full((3, 224, 224), step / 4))
            image.mul_(2)  # it is ours: writing to it disturbs nobody
            print(f"step {step}: {tuple(image.shape)} {image.dtype}, every item as it was put")
        other.join()
        print(f"{consumer.statistics().messages} messages from pid {other.pid} to pid {os.getpid()}, and its goodbye")


if __name__ == "__main__":  # a spawned process imports this file again
    main()
