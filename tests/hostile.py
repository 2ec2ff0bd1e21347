"""Ends that break the rules of shared memory, as only somebody who has attached to it can."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import warnings
from typing import Any

import children
import torch
import zoo
from inside import side_of

import tensorpipe_ipc as tp

_ODD = (0, 1, 2, 64, 65, 1 << 16, 1 << 31, (1 << 31) + 64, 1 << 32, 1 << 48, 1 << 62, (1 << 64) - 1)


def scribble(ends: children.Ends, endpoint: str, seed: int, rounds: int) -> int:
    """Put messages, and write over what lies in their blocks, and wrong tickets into the pipe, before they are taken.

    The words are those of its own blocks and of its queue's record: where the state, the lengths, the places and the metadata
    stand; maxsize, shutdown, laps. Now and then it comes anew, as the binder will have let it go by then.

    Returns:
        How many words and tickets it wrote.
    """
    rng = random.Random(seed)
    warnings.simplefilter("ignore")  # what it leaves is not taken, and it knows
    written, made_up = 0, set[int]()
    for _ in range(rounds):
        if ends.producer is None or rng.random() < 0.2:
            _come_back(ends, endpoint)
        with contextlib.suppress(tp.Full):
            ends.producer.put({"x": torch.zeros(rng.choice((3, 1000, 20_000))), "n": 1}, 0.05)
        queue = side_of(ends.producer).any_queue()
        if queue is None:
            continue
        for ticket in queue.tickets.snapshot() or ():
            word = ticket >> 32 << 6
            if ticket in made_up:  # what it names is not its own
                continue
            for _ in range(rng.choice((0, 1, 1, 2, 8))):
                index = rng.choice((0, 1, 2, 3, 4, 5, rng.randrange(6, 64)))
                value = rng.choice(
                    (rng.choice(_ODD), rng.getrandbits(64), queue.words[word + index] ^ 1 << rng.randrange(64))
                )
                queue.words[word + index] = value
                written += 1
        if rng.random() < 0.1:
            record = queue.record.block >> 3
            queue.words[record + rng.randrange(8, 16 + queue.maxsize)] = rng.choice((1, rng.choice(_ODD)))
            written += 1
        if rng.random() < 0.1:
            ticket = rng.getrandbits(64)
            made_up.add(ticket)
            with contextlib.suppress(BlockingIOError):
                os.write(queue.tickets.fd, ticket.to_bytes(8, "little"))
            written += 1
    with contextlib.suppress(tp.TensorPipeError):
        children.abandon(ends)
    return written


def _come_back(ends: children.Ends, endpoint: str) -> None:
    if ends.producer is not None:
        ends.producer.close()
    ends.producer = tp.Producer(endpoint, shared_memory="require", linger=0)
    with contextlib.suppress(tp.Full):
        ends.producer.put("again", children.PATIENCE)


def zoo_under_audit(
    ends: children.Ends, names: list[str], serializer: str, endpoint: str, shared_memory: str
) -> tuple[int, list[str]]:
    """Send each animal of the zoo from one end to another, and count what would be unpickling or running code.

    Returns:
        How many animals came, and the events. One more animal is a real unpickling, which must be among them.
    """
    watched = ("pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen", "marshal.loads")
    seen: list[str] = []
    is_on = False
    sys.addaudithook(lambda event, arguments: seen.append(event) if is_on and event in watched else None)
    came = 0
    with (
        tp.Consumer(endpoint, accept=[serializer], shared_memory=shared_memory) as consumer,
        tp.Producer(consumer.endpoint, serializer=serializer, shared_memory=shared_memory, linger=0) as producer,
    ):
        meet = children.in_thread(lambda: producer.put(torch.ones(1), children.PATIENCE))
        consumer.get(children.PATIENCE)  # torch.save imports parts of torch when it is called for the first time
        meet()
        for name in names:
            tree: Any = zoo.make(name)
            is_on = True
            try:
                producer.put(tree, children.PATIENCE)
                consumer.get(children.PATIENCE)
                came += 1
            except tp.UnsupportedLeaf:
                pass
            finally:
                is_on = False
    is_on = True
    pickle.loads(pickle.dumps(os.getpid))  # noqa: S301 - so that it is known to be seen
    is_on = False
    return came, seen
