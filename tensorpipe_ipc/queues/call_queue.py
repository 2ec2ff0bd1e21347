"""CallQueue: it carries calls from a ProcessPoolExecutor to its workers, if its ``mp_context`` is one of this package's.

Results cross ``ctx.SimpleQueue()``. For calls, the executor makes a queue of its own class, over a pipe with a feeder thread,
without asking its context. But it asks its context for each worker before it sends a call: ``ctx.Process(target=...,
args=(calls, results, ...))``. There ``adopt`` changes the executor's queue into one that puts and gets through shared memory.
Nothing else of the executor changes, other contexts' executors are untouched, and nothing is registered globally. If Python's
executor lacks a part that is used here, it keeps its own queue of calls, and a warning says so.

One thread of the executor sends calls and reads results. Python's own queue leaves the copying of calls to its feeder thread;
here the executor's thread copies them itself. Results must be read meanwhile, and must not fill the memory that calls need.
So ``full`` stops the thread from sending while results are to be read first.
"""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import process
from time import monotonic
from types import SimpleNamespace
from typing import Any

from tensorpipe_ipc.errors import Full
from tensorpipe_ipc.memory.row import GET
from tensorpipe_ipc.queues.parent import get_from_parent
from tensorpipe_ipc.queues.tensor_queue import Queue

__all__ = ["CallQueue", "adopt"]

PATIENCE = 10.0  # seconds that a call waits for memory, when no results of this executor remain that could free it
REST = 10  # times as long as a put looked for memory in vain: until then, calls that wait keep the workers busy
UNREAD = 32  # results: from here on they are read first. Read one by one, calls without tensors are a fifth slower

_PARTS = ("_SafeQueue", "_process_worker", "EXTRA_QUEUED_CALLS")  # private parts of concurrent.futures
_MISSING = [name for name in _PARTS if not hasattr(process, name)]


class CallQueue(getattr(process, "_SafeQueue", object)):  # type: ignore[misc]
    """An executor's queue of calls. Its pipe is not used."""

    _calls: Queue
    _results: Queue
    _maxsize: int
    _sent = 0
    _has_no_memory: Any = None  # the call that found no memory: it is sent again after a result is read
    _rests_until = 0.0
    _reads_results = False

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put a call. If it cannot be sent, or finds no memory, its future gets the error."""
        if obj is None:
            self._calls.put(None, block, timeout)
        else:
            self._send(obj)

    def _send(self, item: Any, patience: float = 0, beyond: int = 1) -> None:
        began, puts = monotonic(), self._calls._queue.puts
        puts.beyond = beyond
        try:
            self._calls.put(item, patience > 0, patience)
        except Full as full:
            in_flight = self._in_flight()
            if not in_flight and patience:
                self._on_queue_feeder_error(full, item)
            elif not in_flight:
                self._send(item, PATIENCE)
            elif in_flight < self._workers and beyond == 1:  # a worker may be idle, and calls may wait for each other
                self._send(item, beyond=self._workers)
            else:  # do not wait: only this thread reads the results that may hold the memory
                ended = monotonic()
                self._rests_until = ended + REST * (ended - began)
                self._has_no_memory = item
        except Exception as error:
            self._on_queue_feeder_error(error, item)
        else:
            self._sent += 1

    def _in_flight(self) -> int:
        return self._sent - self._results._queue.done(GET)[0]

    @property
    def _workers(self) -> int:
        return self._maxsize - process.EXTRA_QUEUED_CALLS

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take a call. A worker ends if the executor's process dies while it waits."""
        if not block:
            return self._calls.get(False)
        return get_from_parent(functools.partial(self._calls.get, True), timeout)

    def qsize(self) -> int:
        """Return the number of calls that wait."""
        return self._calls.qsize()

    def empty(self) -> bool:
        """Return whether no call waits."""
        return self._calls.empty()

    def full(self) -> bool:
        """Return whether no call may be put now: the queue is full, a call waits for memory, or results are to be read first.

        The executor asks before it puts a call, and again after it has read a result.
        """
        if monotonic() < self._rests_until and self._calls._queue.waiting() and self._in_flight() >= self._workers:
            return True  # no worker is idle, and the next result makes the executor ask again
        item, self._has_no_memory = self._has_no_memory, None
        if item is not None:
            self._send(item)
        unread = self._results._queue.waiting()
        self._reads_results = unread >= UNREAD or (self._reads_results and unread > 0)
        return self._reads_results or self._has_no_memory is not None or self._calls._queue.waiting() >= self._maxsize

    def close(self) -> None:
        """Stop using the queue in this process."""
        self._has_no_memory = None
        self._calls.close()
        super().close()

    def __getstate__(self) -> Any:
        return super().__getstate__(), self._calls

    def __setstate__(self, state: Any) -> None:
        stock, self._calls = state
        super().__setstate__(stock)


def adopt(target: Any, arguments: tuple[Any, ...]) -> None:
    """Change the queue of calls, if a process with this target and these arguments is to be an executor's worker."""
    if _MISSING:
        if getattr(target, "__module__", "") == process.__name__:
            warnings.warn(
                f"this Python's ProcessPoolExecutor has no {', '.join(_MISSING)}: tensors in calls go through its own pipe, "
                "and not through shared memory; results do",
                RuntimeWarning,
                stacklevel=2,
            )
        return
    if target is process._process_worker and len(arguments) > 1 and type(arguments[0]) is process._SafeQueue:
        calls, results = arguments[:2]
        inside = getattr(results, "_queue", None)
        if isinstance(inside, Queue):
            same_memory = SimpleNamespace(tensorpipe_attachment=lambda: inside._queue.attachment)
            calls._calls = Queue(ctx=same_memory)  # without a bound: the executor calls full() before it puts
            calls._results = inside
            results.is_for_parent = True  # to the workers, who alone put
            calls.__class__ = CallQueue
