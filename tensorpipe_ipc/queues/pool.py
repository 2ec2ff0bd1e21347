"""Pool: multiprocessing's own, over our SimpleQueue, which a context gives it."""

from __future__ import annotations

import multiprocessing.pool
import os
from typing import Any

from tensorpipe_ipc.queues.simple_queue import SimpleQueue

__all__ = ["Pool"]

WAITING = 128  # tasks, at the most, beside what tells each worker that no more will come


class Pool(multiprocessing.pool.Pool):
    """Its thread that looks after the workers is woken by their ends, and when all calls are done; not by each result."""

    _change_notifier: Any
    _ctx: Any

    def __init__(self, processes: int | None = None, *args: Any, **kwargs: Any) -> None:
        self._room = WAITING + (processes or os.cpu_count() or 1)
        super().__init__(processes, *args, **kwargs)

    def _setup_queues(self) -> None:
        """Tasks are taken from ``imap``'s iterable as workers take them. Stock's bound is that of a pipe, 64 KiB of pickles."""
        self._inqueue = SimpleQueue(maxsize=self._room, ctx=self._ctx)
        self._outqueue = self._ctx.SimpleQueue()
        self._quick_put, self._quick_get = self._inqueue._writer.send, self._outqueue._reader.recv

    def _get_sentinels(self) -> list[Any]:
        return [self._change_notifier._reader]
