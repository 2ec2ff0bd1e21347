"""Two programs, two terminals: this one produces, ``consumer.py`` consumes. Start either first.

They share nothing but the endpoint: neither is the other's parent. An argument is another endpoint than the usual one, such
as ``tcp://127.0.0.1:5555``; give it to both.
"""

from __future__ import annotations

import os
import sys

import torch

import tensorpipe_ipc as tp


def main(endpoint: str = "across-unrelated-programs") -> None:
    """Put twenty tensors. The first waits until there is a consumer."""
    with tp.Producer(endpoint) as producer:
        for number in range(20):
            numbers = torch.arange(number, number + 100_000)
            producer.put({"number": number, "tensor": numbers, "sum": int(numbers.sum())})
        producer.flush()
        print(f"producer (pid {os.getpid()}): {producer.statistics().messages} tensors put, and all taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
