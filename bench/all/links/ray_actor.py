"""Ray: messages as arguments of an actor's method, called one by one or as a compiled graph. The actor receives."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import ray

from bench.all.links import Shape
from bench.queue.crew import Program
from bench.queue.rivals import _Arrays, _Tensors

__all__ = ["Calls", "Graph"]

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 60.0  # seconds for one call
STORE = 1 << 30  # bytes of Ray's object store


class _Receiver:
    """The actor: what a crew's receiving process is elsewhere."""

    def __init__(self, cores: set[int]) -> None:
        os.sched_setaffinity(0, cores)
        self._link = SimpleNamespace(is_ready=lambda: None, there=SimpleNamespace(alone=False), kept=[], index=0)
        self._answer: Any = None

    def pid(self) -> int:
        return os.getpid()

    def begin(self, take: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Start a program's receiver, or do what has none."""
        started = take(self._link, *arguments)
        if started is not None:
            self._receiver = started
            next(started)

    def take(self, message: Any) -> None:
        """One message: the clock is read in here."""
        try:
            self._receiver.send(message)
        except StopIteration as end:
            self._answer = end.value

    def end(self) -> Any:
        return self._answer


class _Ray:
    """A driver, which sends, and an actor. It stands where a ``Crew`` stands for the others."""

    def __init__(self, shape: Shape) -> None:
        cores = sorted(os.sched_getaffinity(0))
        half = max(1, len(cores) // 2)
        if not ray.is_initialized():
            os.environ.update(PYTHONPATH=f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", RAY_USAGE_STATS_ENABLED="0")
            ray.init(
                num_cpus=1,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                object_store_memory=STORE,
                _temp_dir=gettempdir(),
            )
        self._cores, self._bound = set(cores), max(1, shape.bound)
        self.actor = ray.remote(_Receiver).remote(set(cores[-half:]))
        self._sent: deque[Any] = deque()
        self.there = self  # what programs look for at a link
        self.alone, self.index, self.kept = False, 0, []  # type: ignore[var-annotated]
        self.wait_until_ready = self._all_taken
        os.sched_setaffinity(0, set(cores[:half]))
        ray.get(self.actor.pid.remote(), timeout=PATIENCE)

    def call(self, message: Any) -> Any:
        """Begin a call: what stands for its result."""
        return self.actor.take.remote(message)

    def send(self, message: Any) -> None:
        """Have it called, with at most ``bound`` calls on their way."""
        self._sent.append(self.call(message))
        if len(self._sent) > self._bound:
            ray.get(self._sent.popleft(), timeout=PATIENCE)

    def _all_taken(self) -> None:
        while self._sent:
            ray.get(self._sent.popleft(), timeout=PATIENCE)

    def run(self, program: Program, *arguments: Any) -> list[Any]:
        """As a crew does it."""
        take = getattr(program.receive, "take", program.receive)
        ray.get(self.actor.begin.remote(take, arguments), timeout=PATIENCE)
        sent = program.send(self, *arguments)
        self._all_taken()
        return [sent, ray.get(self.actor.end.remote(), timeout=PATIENCE)]

    def receiver(self) -> int:
        """The process that receives."""
        return int(ray.get(self.actor.pid.remote(), timeout=PATIENCE))

    def close(self) -> None:
        """End the actor; the cluster stays for the next."""
        ray.kill(self.actor)
        os.sched_setaffinity(0, self._cores)

    def leave(self) -> None:
        """End the cluster."""
        ray.shutdown()


class Calls(_Ray, _Arrays):
    """Actor calls with NumPy arrays: the small ones travel in the call, the others are read where Ray's store has them."""


class Graph(_Ray, _Tensors):
    """A compiled graph of the one method, with tensors. An array on the channel would have to be gone before the next."""

    def __init__(self, shape: Shape) -> None:
        from ray.dag import InputNode

        super().__init__(shape)
        with InputNode() as message:
            graph = self.actor.take.bind(message)
        self._graph = graph.experimental_compile(
            _buffer_size_bytes=shape.nbytes + (1 << 16), _max_inflight_executions=self._bound + 1
        )

    def call(self, message: Any) -> Any:
        """Execute the graph."""
        return self._graph.execute(message)

    def close(self) -> None:
        """Take the graph down, too."""
        self._graph.teardown()
        super().close()
