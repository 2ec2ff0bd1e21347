"""Calls of the compiled path in which a process dies, and what such a death may leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from arenas import small_context
from crash_points import LIMIT
from inside import shared_queue_of
from wholeness import check_whole, drain

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "put": lambda queue, obj: queue.put(obj),
    "put_many": lambda queue, obj: queue.put_many([obj] * 3),
    "get": lambda queue, _: queue.get(),
    "get_many": lambda queue, _: queue.get_many(2),
}


class Bytes:
    """A payload."""

    def __init__(self, content: bytes) -> None:
        self.content, self.nbytes = content, len(content)

    def write_into(self, place: Any) -> None:
        place[:] = self.content


def warm(queue: Any, obj: Any, count: int = 3) -> None:
    """Have this process's compiled path do what follows: it takes the operations and the blocks that Python has left."""
    for _ in range(count):
        queue.put_many([obj] * min(count, queue._maxsize))
        found: list[Any] = []
        while len(found) < min(count, queue._maxsize):
            found += queue.get_many(64, timeout=LIMIT)
        queue.put(obj)
        found = [queue.get(timeout=LIMIT)]
        del found


class DeadlyQueue:
    """A queue with which forked children die in a call.

    Attributes:
        seen: after each death, how many messages were left and how many were told as lost.
    """

    def __init__(self, name: str, size: int, maxsize: int) -> None:
        """
        Args:
            name: of one of ``CALLS``.
            size: bytes of each message.
            maxsize: of the queue; 0: none.
        """
        self._ctx = small_context()
        self._attachment = self._ctx.tensorpipe_attachment()
        self.queue, self.obj = self._ctx.Queue(maxsize), torch.full((size,), 5, dtype=torch.uint8)
        self._name, self._lost = name, 0
        self.seen = set[tuple[int, int]]()

    def prepare(self) -> None:
        """Do in the child what comes before the call."""
        warm(self.queue, self.obj)
        if self._name.startswith("get"):
            self.queue.put_many([self.obj] * 3)

    def call(self) -> None:
        """Do it."""
        CALLS[self._name](self.queue, self.obj)

    def check(self) -> None:
        """Check in the parent that nothing is missing or there twice, whatever the child has done."""
        inner = shared_queue_of(self.queue)
        self._attachment.recover_dead()
        got, lost = drain(inner), self._attachment.recovery.lost() - self._lost
        self._lost += lost
        assert all(each == bytes(self.obj.numpy()) for each in got)
        if self._name.startswith("put"):
            assert lost == 0
            assert len(got) in (0, 1 if self._name == "put" else 3)
        else:
            assert len(got) in (3, 2 if self._name == "get" else 1)
            assert lost <= 3 - len(got)
        self.seen.add((len(got), lost))
        check_whole(self._attachment, inner, Bytes)

    def close(self) -> None:
        """Let go of its arena."""
        drain(shared_queue_of(self.queue))
        vars(self._ctx).clear()
