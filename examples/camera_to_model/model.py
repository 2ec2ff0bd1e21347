"""A model that looks at each frame of ``camera.py``, which is another program: how long after it was taken?

The frame is a lease: it lies where the camera filled it, and is given back when the last tensor on it is gone. The clock is
CLOCK_MONOTONIC, which is one for all programs of a host.
"""

from __future__ import annotations

import time

import torch

import tensorpipe_ipc as tp


def main() -> None:
    """Take frames until the camera says goodbye, and print the time from one end to the other."""
    torch.set_num_threads(1)
    ages = []
    with tp.Consumer("camera-to-model") as consumer:
        for frame in consumer:
            age = time.monotonic_ns() - frame["taken"]
            if frame["number"]:  # the first one waited for this program
                assert frame["image"][::270, ::480].unique().tolist() == [frame["number"] % 256]
                ages.append(age / 1e6)
    ages.sort()
    p50, p99 = ages[len(ages) // 2], ages[len(ages) * 99 // 100]
    print(f"model: {len(ages)} frames of 6.2 MB, from taken to had: p50 {p50:.2f} ms, p99 {p99:.2f} ms")


if __name__ == "__main__":
    main()
