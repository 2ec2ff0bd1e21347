"""Fan in: several producers, one consumer.

Many processes collect, one learns: each producer connects to the consumer's endpoint, in any order. What is promised is the
order within each producer; messages of different producers mix as they come. Iterating ends when every producer that came has
said goodbye. That is also so when the first has gone before the second comes, and so here none goes before all have come.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from multiprocessing.synchronize import Barrier

import torch

import tensorpipe_ipc as tp

PRODUCERS, STEPS = 3, 50


def collect(endpoint: str, actor: int, all_have_come: Barrier) -> None:
    """One of the producers."""
    with tp.Producer(endpoint, maxsize=4) as producer:  # at most four that are not taken: it waits for the consumer
        for step in range(STEPS):
            producer.put({"actor": actor, "step": step, "observation": torch.full((64, 64), actor * STEPS + step)})
            if step == 0:
                all_have_come.wait()  # whose first message is put, is known to the consumer


def main() -> None:
    """The consumer."""
    endpoint = f"fan-in-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(PRODUCERS)
    with tp.Consumer(endpoint) as consumer:
        arguments = [(endpoint, actor, barrier) for actor in range(PRODUCERS)]
        actors = [context.Process(target=collect, args=each, daemon=True) for each in arguments]
        for process in actors:
            process.start()
        seen: Counter[int] = Counter()
        for message in consumer:
            actor, step = message["actor"], message["step"]
            assert step == seen[actor], "messages of one producer come in order"
            assert torch.equal(message["observation"], torch.full((64, 64), actor * STEPS + step))
            seen[actor] += 1
        for process in actors:
            process.join()
    for actor, count in sorted(seen.items()):
        print(f"producer {actor}: {count} messages, in order, none lost, none twice")


if __name__ == "__main__":
    main()
