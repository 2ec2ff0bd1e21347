"""Pool: multiprocessing's own, over our SimpleQueue, which a context gives it."""

from __future__ import annotations

import multiprocessing.pool
from typing import Any

__all__ = ["Pool"]


class Pool(multiprocessing.pool.Pool):
    """Its thread that looks after the workers is woken by their ends, and when all calls are done; not by each result."""

    _change_notifier: Any

    def _get_sentinels(self) -> list[Any]:
        return [self._change_notifier._reader]
