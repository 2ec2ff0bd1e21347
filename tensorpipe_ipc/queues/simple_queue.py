"""SimpleQueue: multiprocessing's contract over shared memory, and what Pool and ProcessPoolExecutor reach for inside it.

They use a SimpleQueue's pipe and lock: ``_reader.recv()``, ``_reader.poll()``, ``_writer.send()``, ``_rlock``, and
``connection.wait([queue._reader])``. Here the two ends are thin objects over the queue, and there is no lock to take.
"""

from __future__ import annotations

import contextlib
import functools
from multiprocessing import context, queues
from typing import Any

import torch

from tensorpipe_ipc.errors import Empty
from tensorpipe_ipc.queues.parent import get_from_parent
from tensorpipe_ipc.queues.reader import Reader, Writer
from tensorpipe_ipc.queues.tensor_queue import Queue

__all__ = ["SimpleQueue"]


class SimpleQueue(queues.SimpleQueue):  # type: ignore[type-arg]  # of its state it has nothing
    """multiprocessing.SimpleQueue's methods: put, get, empty, close; and ``fileno``."""

    def __init__(
        self, *, maxsize: int = 0, ctx: Any = None, serializer: str = "raw", wire_dtype: torch.dtype | None = None
    ) -> None:
        """A new, empty queue. See ``Queue``. Without a ``maxsize`` it has no bound; multiprocessing's is a pipe's 64 KiB."""
        self._closed = self._writer_closed = self._is_drained = False
        self._queue = Queue(maxsize, ctx=ctx, serializer=serializer, wire_dtype=wire_dtype)

    def put(self, obj: Any) -> None:
        """See ``Queue.put``. On a closed one it raises OSError, as multiprocessing has it; so does ``get``."""
        self._raise_if_closed()
        self._queue.put(obj)

    def get(self) -> Any:
        """See ``Queue.get``.

        A process that closed ``_writer``, as Pool's workers do, ends if its parent dies while it waits.
        """
        self._raise_if_closed()
        if self._is_drained:
            with contextlib.suppress(Empty):
                return self._queue.get(False)
            return None
        if not self._writer_closed:
            return self._queue.get()
        if not self._queue.empty():
            with contextlib.suppress(Empty):  # another worker may be faster
                return self._queue.get(False)
        return get_from_parent(functools.partial(self._queue.get, True))

    def empty(self) -> bool:
        """Return whether nothing is in it, at this moment.

        Raises:
            OSError: the queue is closed here.
        """
        self._raise_if_closed()
        return self._queue.empty()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise OSError("the handle is closed")

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``get`` would not wait."""
        return self._queue.fileno()

    def close(self) -> None:
        """Use it no more in this process."""
        self._closed = True
        self._queue.close()

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        return self.__dict__

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)

    @property
    def closed(self) -> bool:
        """Return whether it was closed here."""
        return self._closed

    @property
    def is_shut(self) -> bool:
        """Return whether it was shut down. It cannot be."""
        return False

    @property
    def _reader(self) -> Reader:
        return Reader(self)

    @property
    def _writer(self) -> Writer:
        return _Writer(self)

    @property
    def _rlock(self) -> _ReadLock:
        return _ReadLock(self)


class _ReadLock:
    """Pool takes it when it ends, so that what it sees is still there when it drops it. Here workers may be faster."""

    def __init__(self, queue: SimpleQueue) -> None:
        self._queue = queue

    def acquire(self) -> bool:
        """From now on, this process does not wait for what it gets: None stands for nothing."""
        self._queue._is_drained = True
        return True


class _Writer(Writer):
    """The end that Pool's workers close, as they only read."""

    _queue: SimpleQueue

    def close(self) -> None:
        """This process only reads: it wants to be told when nobody is left to write."""
        self._queue._writer_closed = True
