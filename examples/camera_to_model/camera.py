"""A camera at 60 Hz: each frame is filled where the model will read it. ``model.py`` is the other program.

``producer.loan`` lends a tensor in the memory that the two share. What the camera writes to it is sent without a copy on
leaving the block, together with the time at which it was taken. An argument is how many frames to take.
"""

from __future__ import annotations

import sys
import time

import torch

import tensorpipe_ipc as tp

HZ = 60
FRAME = {"image": tp.TensorSpec((1080, 1920, 3), torch.uint8), "number": 0, "taken": 0}


def main(count: str = "120") -> None:
    """Take frames at a steady pace, and send each."""
    with tp.Producer("camera-to-model") as producer:
        with producer.loan(FRAME):  # the first waits for the model
            due = time.monotonic()
        for number in range(1, int(count)):
            due += 1 / HZ
            time.sleep(max(0.0, due - time.monotonic()))
            with producer.loan(FRAME) as frame:
                frame["image"].fill_(number % 256)  # stand-in for the camera's own read_into(buffer)
                frame["number"], frame["taken"] = number, time.monotonic_ns()
        producer.flush()
        print(f"camera: {count} frames at {HZ} Hz, by way of {producer.statistics().transport}")


if __name__ == "__main__":
    main(*sys.argv[1:])
