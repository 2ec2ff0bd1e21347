"""Two programs that find shared memory by themselves: this one reads, ``writer.py`` writes. Start either first.

What arrives lies where the writer put it: it is not copied again, and it outlives the writer.
"""

from __future__ import annotations

import sys

import tensorpipe_ipc as tp


def main(endpoint: str = "two-programs") -> None:
    """Keep all ten tensors, and look at them when the writer is gone."""
    with tp.Consumer(endpoint) as consumer:
        kept = list(consumer)
        found = consumer.statistics()
    assert [tensor.unique().tolist() for tensor in kept] == [[number] for number in range(10)]
    print(f"reader: {found.bytes:,} bytes in {found.messages} messages, by way of {found.transport}")


if __name__ == "__main__":
    main(*sys.argv[1:])
