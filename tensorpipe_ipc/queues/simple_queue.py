"""SimpleQueue: multiprocessing's contract over shared memory, with the private parts that Pool and ProcessPoolExecutor use.

They use a SimpleQueue's pipe and lock: ``_reader.recv()``, ``_reader.poll()``, ``_writer.send()``, ``_rlock``, and
``connection.wait([queue._reader])``. Here the reader and the writer are thin objects over the queue, and ``_rlock`` locks
nothing.
"""

from __future__ import annotations

import contextlib
import functools
from multiprocessing import context, queues
from typing import Any

import torch

from tensorpipe_ipc.errors import Empty
from tensorpipe_ipc.queues.parent import end_if_parent_is_dead, get_from_parent
from tensorpipe_ipc.queues.reader import Reader, Writer, end_of
from tensorpipe_ipc.queues.tensor_queue import Queue

__all__ = ["SimpleQueue"]


class SimpleQueue(queues.SimpleQueue):  # type: ignore[type-arg]  # for isinstance alone: it uses none of its state
    """multiprocessing.SimpleQueue's methods: put, get, empty, close; and ``fileno``.

    Attributes:
        is_for_parent: whether only this process's parent takes what it puts: where that is dead, a put ends the process instead
            of waiting for memory.
    """

    def __init__(
        self, *, maxsize: int = 0, ctx: Any = None, serializer: str = "raw", wire_dtype: torch.dtype | None = None
    ) -> None:
        """Make a new, empty queue. See ``Queue`` for the arguments.

        Without a ``maxsize`` it has no bound; multiprocessing's own is bound by its pipe's 64 KiB.
        """
        self._closed = self._writer_closed = self._is_drained = False
        self.is_for_parent = False
        self._queue = Queue(maxsize, ctx=ctx, serializer=serializer, wire_dtype=wire_dtype)

    def put(self, obj: Any) -> None:
        """Put an object. See ``Queue.put``.

        Raises:
            OSError: the queue is closed in this process, as in multiprocessing.
        """
        self._raise_if_closed()
        if self.is_for_parent:
            self._queue._queue.puts.while_waiting = end_if_parent_is_dead
        self._queue.put(obj)

    def get(self) -> Any:
        """Take an object. See ``Queue.get``.

        A process that closed ``_writer``, as Pool's workers do, ends if its parent dies while it waits here.

        Raises:
            OSError: the queue is closed in this process, as in multiprocessing.
        """
        self._raise_if_closed()
        if self._is_drained:
            with contextlib.suppress(Empty):
                return self._queue.get(False)
            return None
        if not self._writer_closed:
            return self._queue.get()
        if not self._queue.empty():
            end_if_parent_is_dead()
            with contextlib.suppress(Empty):  # another worker may take the object first
                return self._queue.get(False)
        return get_from_parent(functools.partial(self._queue.get, True))

    def empty(self) -> bool:
        """Return whether the queue is empty at this moment.

        Raises:
            OSError: the queue is closed in this process.
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
        """Stop using the queue in this process."""
        self._closed = True
        self._queue.close()

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        return self.__dict__

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)

    @property
    def closed(self) -> bool:
        """Return whether this process has closed the queue."""
        return self._closed

    @property
    def is_shut(self) -> bool:
        """Return False: a SimpleQueue cannot be shut down."""
        return False

    @property
    def _reader(self) -> _Reader:
        return end_of(self, _Reader)

    @property
    def _writer(self) -> Writer:
        return end_of(self, _Writer)

    @property
    def _rlock(self) -> _ReadLock:
        return _ReadLock(self)


class _ReadLock:
    """The lock that Pool takes when it ends, so that no worker takes the tasks that Pool is about to drop.

    Here it locks nothing: workers may still take tasks. So from then on this process's ``get`` does not wait.
    """

    def __init__(self, queue: SimpleQueue) -> None:
        self._queue = queue

    def acquire(self) -> bool:
        """Make this process's later gets return None at once when the queue is empty."""
        self._queue._is_drained = True
        return True


class _Reader(Reader):
    """The reader, which Pool's workers close because they only write."""

    _queue: SimpleQueue

    def close(self) -> None:
        """Note that this process only writes, for its parent."""
        self._queue.is_for_parent = True


class _Writer(Writer):
    """The writer, which Pool's workers close because they only read."""

    _queue: SimpleQueue

    def close(self) -> None:
        """Note that this process only reads: its ``get`` must end the process when its parent, the writer, is dead."""
        self._queue._writer_closed = True
