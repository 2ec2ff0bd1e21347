"""A SIGKILL cannot wedge a queue: whoever dies, the others go on, and what was put is delivered.

multiprocessing.Queue hangs for ever after this: the killed consumer waits with the queue's lock in its hand. Here there is
no lock. What a killed process had begun is finished, or undone, by whoever comes across it next.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

import torch

from tensorpipe_ipc import Queue


def consume(queue: Queue, ready: Queue) -> None:
    """Say that we are there, and wait for ever."""
    ready.put("here")
    queue.get()


def produce(queue: Queue, ready: Queue) -> None:
    """Put three tensors, say so, and be killed before anybody took them."""
    for step in range(3):
        queue.put(torch.full((1000, 1000), float(step)))
    ready.put("put")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Kill a consumer in its get, then a producer after its puts, and take what the producer had put."""
    queue, ready, context = Queue(), Queue(), multiprocessing.get_context("spawn")
    consumer = context.Process(target=consume, args=(queue, ready))
    consumer.start()
    assert ready.get() == "here"
    consumer.kill()
    consumer.join()
    producer = context.Process(target=produce, args=(queue, ready))
    producer.start()
    assert ready.get() == "put"
    producer.join()
    took = [float(queue.get(timeout=10).mean()) for _ in range(3)]
    print(f"consumer and producer killed ({consumer.exitcode}, {producer.exitcode}); got {took}, nothing hangs")


if __name__ == "__main__":  # a spawned process imports this file again
    main()
