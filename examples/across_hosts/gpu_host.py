"""Two programs on two hosts: this one consumes, and binds; ``data_host.py`` runs on the other host. Start either first.

Make keys once, ``tensorpipe-ipc keygen gpu`` here and ``tensorpipe-ipc keygen data`` there, and give each host the other's
``.key`` file. The two ``.key_secret`` files stay where they are. Without keys on both sides nothing leaves a host::

    python gpu_host.py 'tcp://*:5555' gpu.key_secret data.key
"""

from __future__ import annotations

import sys

import tensorpipe_ipc as tp


def main(endpoint: str, own: str, *clients: str) -> None:
    """Take tensors until the producer says goodbye, and check each against the sum that came with it."""
    with tp.Consumer(endpoint, security=tp.Curve(own, clients=clients)) as consumer:
        for message in consumer:
            assert float(message["tensor"].sum()) == message["sum"]
        done = consumer.statistics()
        print(f"gpu host: {done.messages} tensors taken, every sum as it was sent; turned away: {done.rejected}")


if __name__ == "__main__":
    main(*sys.argv[1:])
