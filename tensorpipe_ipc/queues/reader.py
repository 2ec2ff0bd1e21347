"""Reader and Writer: a queue under the interface of the two connections inside multiprocessing's queues.

multiprocessing's queues read from a ``_reader``, and others use it directly: Pool, ProcessPoolExecutor, and programs that
wait for several queues at once by ``multiprocessing.connection.wait([queue._reader])``.
"""

from __future__ import annotations

import time
import weakref
from multiprocessing import connection
from typing import Any, Protocol, TypeVar

__all__ = ["Reader", "Writer", "end_of"]

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


_End = TypeVar("_End", bound="Reader | Writer")
_living: weakref.WeakValueDictionary[tuple[type, int], Any] = weakref.WeakValueDictionary()


def end_of(queue: Any, kind: type[_End]) -> _End:
    """Return a queue's reader or writer, the same one as long as anybody has it: it may be looked for by ``is``."""
    found = _living.get((kind, id(queue)))
    if found is None or found._queue is not queue:
        found = _living[kind, id(queue)] = kind(queue)
    return found


class Reader:
    """The connection to read from. All readers of one queue are equal: a caller can look for one in the result of ``wait``."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reader) and self._queue is other._queue

    def __hash__(self) -> int:
        return hash(id(self._queue))

    def fileno(self) -> int:
        """Return the queue's descriptor, for ``connection.wait``. It is readable while ``get`` would not wait."""
        return self._queue.fileno()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether ``recv`` would not wait: the queue holds an object, or was shut down.

        Args:
            timeout: seconds to wait for either; None: for ever.

        Raises:
            OSError: the queue is closed in this process, and its ``empty`` raises OSError.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._queue.empty() and not self._queue.is_shut:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            if connection.wait([self], left) and self._queue.empty():  # type: ignore[list-item]
                time.sleep(
                    _PAUSE if left is None else min(_PAUSE, left)
                )  # a doorbell keeps the descriptor readable until a get takes it
        return True

    def recv(self) -> Any:
        """Wait for an object and take it."""
        return self._queue.get()

    @property
    def closed(self) -> bool:
        """Return whether this process has closed the queue."""
        return self._queue.closed

    def close(self) -> None:
        """Do nothing: a queue that this process does not use costs it nothing."""


class Writer:
    """The connection to write to."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    @property
    def closed(self) -> bool:
        """Return whether this process has closed the queue."""
        return self._queue.closed

    def send(self, obj: Any) -> None:
        """Put an object."""
        self._queue.put(obj)

    def close(self) -> None:
        """Do nothing, as ``Reader.close``."""
