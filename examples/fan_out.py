"""Fan out: one producer, several consumers.

Here the producer binds the endpoint and the workers connect to it. A message goes to one worker: the one that has least to
do, of equals the one that waited longest. So a slow one does not hold up the others. Their results come back as in ``fan_in``.
An end hears the others inside its own calls only, so hand out and gather in turns.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter

import torch

import tensorpipe_ipc as tp

WORKERS, TASKS, WINDOW = 3, 60, 2


def work(tasks: str, results: str, worker: int) -> None:
    """Square what comes, until None comes. Worker 0 is slow."""
    with tp.Consumer(tasks, bind=False, maxsize=WINDOW) as consumer, tp.Producer(results) as producer:
        while (x := consumer.get()) is not None:
            time.sleep(0.02 if worker == 0 else 0.002)
            producer.put({"worker": worker, "x": x, "square": x**2})


def main() -> None:
    """Hand out the tasks and gather the results."""
    ends = f"tasks-{os.getpid()}", f"results-{os.getpid()}"
    start = multiprocessing.get_context("spawn").Process
    workers = [start(target=work, args=(*ends, worker), daemon=True) for worker in range(WORKERS)]
    done: dict[float, int] = {}
    with tp.Producer(ends[0], bind=True) as producer, tp.Consumer(ends[1]) as gathered:
        for process in workers:
            process.start()
        while len(producer.statistics().peers) < WORKERS:  # else the first to come gets everything until then
            time.sleep(0.01)
        for number in range(TASKS + WORKERS * WINDOW):
            if number >= WORKERS * WINDOW:  # all have their hands full, or nothing is left to hand out
                result = gathered.get(timeout=60)
                assert torch.equal(result["square"], result["x"] ** 2)
                done[float(result["x"][0])] = result["worker"]
            if number < TASKS:
                producer.put(torch.full((100,), float(number)))
        for _ in workers:
            producer.put(None)  # nobody has anything to do, so each gets one
        for process in workers:
            process.join()
    print(f"{len(done)} tasks, each done once; by each worker: {dict(sorted(Counter(done.values()).items()))}")


if __name__ == "__main__":
    main()
