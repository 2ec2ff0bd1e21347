"""Reader and Writer: a queue, seen as the connections that others expect inside it.

multiprocessing's queues read from a ``_reader``, and programs reach for it: Pool and ProcessPoolExecutor do, and whoever waits
for several queues at once, by ``multiprocessing.connection.wait([queue._reader])``.
"""

from __future__ import annotations

import time
from multiprocessing import connection
from typing import Any, Protocol

__all__ = ["Reader", "Writer"]

_PAUSE = 0.05  # seconds


class _Queue(Protocol):
    @property
    def closed(self) -> bool: ...
    @property
    def is_shut(self) -> bool: ...
    def fileno(self) -> int: ...
    def empty(self) -> bool: ...
    def get(self) -> Any: ...
    def put(self, obj: Any) -> None: ...


class Reader:
    """A queue's end to read from. Those of one queue are equal, so that one is found in what ``connection.wait`` returns."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reader) and self._queue is other._queue

    def __hash__(self) -> int:
        return hash(id(self._queue))

    def fileno(self) -> int:
        """For ``connection.wait``, which says that it is ready while ``get`` would not wait."""
        return self._queue.fileno()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether ``recv`` would not wait: there is an object, or the queue was shut down.

        Args:
            timeout: seconds to wait for that; None: for ever.

        Raises:
            OSError: the queue is closed here, and its ``empty`` raises that, too.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._queue.empty() and not self._queue.is_shut:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            if connection.wait([self], left) and self._queue.empty():  # type: ignore[list-item]
                time.sleep(
                    _PAUSE if left is None else min(_PAUSE, left)
                )  # what only wakes others, until a get takes it
        return True

    def recv(self) -> Any:
        """Wait for an object, and take it."""
        return self._queue.get()

    @property
    def closed(self) -> bool:
        """Return whether the queue was closed in this process."""
        return self._queue.closed

    def close(self) -> None:
        """Nothing: what this process does not use costs it nothing."""


class Writer:
    """A queue's end to write to, as programs use a connection's."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    @property
    def closed(self) -> bool:
        """Return whether the queue was closed in this process."""
        return self._queue.closed

    def send(self, obj: Any) -> None:
        """Put an object."""
        self._queue.put(obj)

    def close(self) -> None:
        """Nothing."""
