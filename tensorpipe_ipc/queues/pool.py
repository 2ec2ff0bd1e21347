"""Pool: multiprocessing's own Pool, over this package's SimpleQueue, which a context supplies."""

from __future__ import annotations

import multiprocessing.pool
import os
from typing import Any

from tensorpipe_ipc.queues.simple_queue import SimpleQueue

__all__ = ["Pool"]

WAITING = 128  # tasks, at most, besides the one mark for each worker that says that no more tasks will come


class Pool(multiprocessing.pool.Pool):
    """A Pool whose worker-handling thread wakes when a worker ends and when all calls are done, and not for each result."""

    _change_notifier: Any
    _ctx: Any

    def __init__(self, processes: int | None = None, *args: Any, **kwargs: Any) -> None:
        self._room = WAITING + (processes or os.cpu_count() or 1)
        super().__init__(processes, *args, **kwargs)

    def _setup_queues(self) -> None:
        """Make the queues. The bound on tasks lets ``imap`` read its iterable only as fast as workers take tasks.

        The bound of multiprocessing's own Pool is its pipe: 64 KiB of pickles.
        """
        self._inqueue = SimpleQueue(maxsize=self._room, ctx=self._ctx)
        self._outqueue = self._ctx.SimpleQueue()
        self._quick_put, self._quick_get = self._inqueue._writer.send, self._outqueue._reader.recv

    def _get_sentinels(self) -> list[Any]:
        return [self._change_notifier._reader]
