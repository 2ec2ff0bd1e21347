"""Two programs, two terminals: this one consumes, ``producer.py`` produces. Start either first.

They share nothing but the endpoint: neither is the other's parent. This one binds it, so it is who decides where it is; an
argument is another endpoint than the usual one, such as ``tcp://127.0.0.1:5555``; give it to both.
"""

from __future__ import annotations

import os
import sys

import tensorpipe_ipc as tp


def main(endpoint: str = "across-unrelated-programs") -> None:
    """Take tensors until the producer says goodbye, and check each against the sum that came with it."""
    with tp.Consumer(endpoint) as consumer:
        for message in consumer:
            assert int(message["tensor"].sum()) == message["sum"]
        print(f"consumer (pid {os.getpid()}): {consumer.statistics().messages} tensors taken, every sum as it was sent")


if __name__ == "__main__":
    main(*sys.argv[1:])
