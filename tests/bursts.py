"""A program whose puts, or gets, are hit by exceptions of a signal's handler: each call by one at most.

``python -m tests.bursts put|get ENDPOINT BINDS SHARED_MEMORY`` prints what the two ends saw, as JSON. It has a process, and so
its alarm clock, to itself.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import sys
from types import FrameType
from typing import Any

import tensorpipe_ipc as tp

COUNT = 3000  # messages
PATIENCE = 20.0
OFTEN = 0.001  # seconds between two signals
WITHIN = {tp.Consumer.get.__code__, tp.Producer.put.__code__}


class Interrupted(Exception):
    """The exception that the handler raises."""


class Burst:
    """Signals whose handler raises out of an end's call, once in each.

    Attributes:
        raised: how often it did.
        is_due: whether it has not yet raised in this call.
    """

    def __init__(self, seed: int) -> None:
        self.raised = 0
        self.is_due = False
        self._random = random.Random(seed)

    def __enter__(self) -> Burst:
        signal.signal(signal.SIGALRM, self._raise)
        signal.setitimer(signal.ITIMER_REAL, OFTEN, OFTEN)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, lambda *_: None)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code not in WITHIN:
            frame = None if frame.f_code.co_name == "__del__" else frame.f_back
        if frame is not None and self.is_due:
            signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-6, OFTEN), OFTEN)
            self.raised += 1
            self.is_due = False
            raise Interrupted


def put_all(endpoint: str, bind: bool, shared_memory: Any, line: Any) -> None:
    """Be the other end of ``get``."""
    with tp.Producer(endpoint, bind=bind, shared_memory=shared_memory) as producer:
        if bind:
            line.send(producer.endpoint)
        for number in range(COUNT):
            producer.put(number, PATIENCE)


def take_all(endpoint: str, bind: bool, shared_memory: Any, line: Any) -> None:
    """Be the other end of ``put``. Say what came, and how it ended."""
    got, end = list[int](), "EndOfStream"
    with tp.Consumer(endpoint, bind=bind, shared_memory=shared_memory) as consumer:
        if bind:
            line.send(consumer.endpoint)
        try:
            for number in consumer:
                got.append(number)
        except tp.PeerLost as error:
            end = str(error)
        line.send((got, end))


def put(endpoint: str, bind: bool, shared_memory: Any, line: Any) -> dict[str, Any]:
    """Put while exceptions come. Return what was put, and what came."""
    with tp.Producer(endpoint, bind=bind, shared_memory=shared_memory) as producer:
        if bind:
            line.send(producer.endpoint)
        producer.put(0, PATIENCE)  # the two have met: where each call is cut short at once, they never would
        returned = [0]
        with Burst(1) as burst:
            for number in range(1, COUNT):
                burst.is_due = True
                try:
                    producer.put(number, PATIENCE)
                    returned.append(number)
                except Interrupted:
                    continue
        producer.flush(PATIENCE)
    got, end = line.recv()
    return {"raised": burst.raised, "returned": returned, "got": got, "lost": 0, "end": end}


def get(endpoint: str, bind: bool, shared_memory: Any, line: Any) -> dict[str, Any]:
    """Take while exceptions come. Return what came."""
    with tp.Consumer(endpoint, bind=bind, shared_memory=shared_memory) as consumer:
        if bind:
            line.send(consumer.endpoint)
        got, end = [consumer.get(PATIENCE)], ""
        with Burst(2) as burst:
            while not end:
                burst.is_due = True
                try:
                    got.append(consumer.get(PATIENCE))
                except Interrupted:
                    continue
                except (tp.Empty, tp.EndOfStream, tp.PeerLost) as error:
                    end = type(error).__name__
        lost = consumer.statistics().lost
    return {"raised": burst.raised, "got": got, "lost": lost, "end": end}


def main(what: str, endpoint: str, binds: bool, shared_memory: str) -> None:
    """Run both ends: this one in this process, and the other in a fork that was made before any end."""
    # pyzmq looks for signals when it frees a frame, too, where nobody could catch what a handler raises.
    sys.unraisablehook = lambda _: None
    context = multiprocessing.get_context("fork")
    line, theirs = context.Pipe()
    this, other = (put, take_all) if what == "put" else (get, put_all)

    def be_other() -> None:
        other(theirs.recv() if binds else endpoint, not binds, shared_memory, theirs)

    process = context.Process(target=be_other)
    process.start()
    theirs.close()
    print(json.dumps(this(endpoint if binds else line.recv(), binds, shared_memory, line)))
    process.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "binds", sys.argv[4])
