"""Two programs on two hosts: this one produces, and connects to ``gpu_host.py``, where it is said how the keys are made.

::

    python data_host.py tcp://gpu:5555 data.key_secret gpu.key
"""

from __future__ import annotations

import sys

import torch

import tensorpipe_ipc as tp


def main(endpoint: str, own: str, server: str) -> None:
    """Put twenty tensors, of which the first waits until the consumer has let this end in."""
    with tp.Producer(endpoint, security=tp.Curve(own, server=server)) as producer:
        for number in range(20):
            tensor = torch.full((100_000,), float(number))
            producer.put({"tensor": tensor, "sum": float(tensor.sum())})
        producer.flush()
        print(f"data host: {producer.statistics().messages} tensors put, and all taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
