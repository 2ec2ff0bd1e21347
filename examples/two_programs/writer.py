"""Two programs that find shared memory by themselves: this one writes, ``reader.py`` reads. Start either first.

Nothing here says so: one user on one host is enough. ``statistics().transport`` tells which way messages went and, where it
was not through shared memory, why. (``tensorpipe-ipc doctor two-programs`` tells the same from outside.)
"""

from __future__ import annotations

import sys

import torch

import tensorpipe_ipc as tp


def main(endpoint: str = "two-programs") -> None:
    """Put ten tensors of 4 MB. The first waits until there is a reader."""
    with tp.Producer(endpoint) as producer:
        for number in range(10):
            producer.put(torch.full((1_000_000,), number, dtype=torch.int32))
        producer.flush()
        found = producer.statistics()
        print(f"writer: {found.bytes:,} bytes in {found.messages} messages, by way of {found.transport}")


if __name__ == "__main__":
    main(*sys.argv[1:])
