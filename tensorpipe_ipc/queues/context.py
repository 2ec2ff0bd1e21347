"""get_context(): multiprocessing's contexts, with this package's queues. All queues of one context share one arena.

Everything else of a context is multiprocessing's own: events, locks, managers, and pools, which send through this package's
SimpleQueue. Processes are multiprocessing's own with two additions. Where an executor makes its workers, its queue of calls
is adopted (``call_queue``). A DataLoader's workers stack batches in the context's arena (``worker_memory``).
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.process
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import context
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import default_collate

from tensorpipe_ipc.forks import watch
from tensorpipe_ipc.memory.arena import Arena
from tensorpipe_ipc.memory.loans import TensorSpec, make_tensors, shape_of
from tensorpipe_ipc.memory.segment import Segment
from tensorpipe_ipc.queues.simple_queue import SimpleQueue
from tensorpipe_ipc.queues.tensor_queue import JoinableQueue, Queue
from tensorpipe_ipc.queues.worker_memory import is_loaders_worker, work
from tensorpipe_ipc.shared_queue.attachment import Attachment, default_attachment

__all__ = [
    "ForkContext",
    "ForkProcess",
    "ForkServerContext",
    "ForkServerProcess",
    "SpawnContext",
    "SpawnProcess",
    "get_context",
]


class _WithOurQueues(context.BaseContext):
    """The common part of the contexts. A context makes its arena at the first use, and keeps it as long as it lives.

    The arena may last longer. The next context that ``get_context`` makes for the same method has it then.
    """

    def tensorpipe_attachment(self) -> Attachment:
        """Return this process's attachment to the memory that all queues of this context share.

        Raises:
            SharedMemoryError: the memory could not be made.
        """
        found = self.__dict__.get("_attachment")
        if found is None:  # two threads may make one each, but both return the one that setdefault kept
            method = self.get_start_method()
            is_shared = _contexts.get(method) is self
            made = default_attachment(method) if is_shared else Attachment(Arena(Segment.create()))
            found = self.__dict__.setdefault("_attachment", made)
            found.enter_context()
        return found  # type: ignore[no-any-return]

    def __del__(self) -> None:
        found = self.__dict__.get("_attachment")
        if found is not None and not sys.is_finalizing():
            found.leave_context()

    def Queue(
        self,
        maxsize: int = 0,
        *,
        serializer: str = "raw",
        wire_dtype: torch.dtype | None = None,
        spin: float = 0.0,
        cuda_ipc: bool = False,
    ) -> Queue:
        """Make a queue in the context's memory. See ``tensorpipe_ipc.Queue``."""
        return Queue(maxsize, ctx=self, serializer=serializer, wire_dtype=wire_dtype, spin=spin, cuda_ipc=cuda_ipc)

    def JoinableQueue(
        self,
        maxsize: int = 0,
        *,
        serializer: str = "raw",
        wire_dtype: torch.dtype | None = None,
        spin: float = 0.0,
        cuda_ipc: bool = False,
    ) -> JoinableQueue:
        """Make a joinable queue in the context's memory. See ``tensorpipe_ipc.JoinableQueue``."""
        return JoinableQueue(
            maxsize, ctx=self, serializer=serializer, wire_dtype=wire_dtype, spin=spin, cuda_ipc=cuda_ipc
        )

    def SimpleQueue(self, *, serializer: str = "raw", wire_dtype: torch.dtype | None = None) -> SimpleQueue:
        """Make a simple queue in the context's memory. See ``tensorpipe_ipc.SimpleQueue``."""
        return SimpleQueue(ctx=self, serializer=serializer, wire_dtype=wire_dtype)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor in the context's memory, not initialised.

        Any queue of the context sends it without a copy (``put(x, move=True)``). Its memory is free again when the last
        alias of it is gone.

        Raises:
            SharedMemoryError: no room. The text names the processes that hold memory.
        """
        spec = TensorSpec(shape_of(shape), dtype)
        attachment = self.tensorpipe_attachment()
        (tensor,) = make_tensors([spec], attachment.leases, attachment.allocate)
        return tensor

    def trim(self) -> int:
        """Give back the context's idle memory, in all processes. Return the number of bytes given back."""
        return self.tensorpipe_attachment().trim()

    def collate(self, batch: Any, *, collate_fn_map: Mapping[Any, Callable[..., Any]] | None = None) -> Any:
        """Return a batch of samples: ``DataLoader(..., multiprocessing_context=ctx, collate_fn=ctx.collate)``.

        This is torch's own collate function. In a worker of a loader with this context, what torch stacks lies in the context's
        memory (``worker_memory``), whichever function calls torch's. So the batch goes by reference, and is written once.

        The worker's next put gives the batch away. If other code still keeps the batch or a part of it, the put copies it.

        Args:
            batch: the samples.
            collate_fn_map: as for torch's ``collate``; None: torch's own map.

        Raises:
            TypeError, RuntimeError: torch cannot stack the samples.
        """
        if collate_fn_map is None:
            return default_collate(batch)
        from torch.utils.data._utils.collate import collate  # where torch's documentation has it

        return collate(batch, collate_fn_map=dict(collate_fn_map))

    def Pool(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
    ) -> Any:
        """Make a multiprocessing.pool.Pool that sends tensors through the context's memory, to its workers and back."""
        from tensorpipe_ipc.queues.pool import Pool  # imported at the first use only, as in multiprocessing

        return Pool(processes, initializer, initargs, maxtasksperchild, context=self)

    def get_context(self, method: str | None = None) -> Any:
        """Return this context, or ``tensorpipe_ipc.get_context(method)`` if ``method`` is another start method."""
        return self if method in (None, self.get_start_method()) else get_context(method)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # multiprocessing's contexts can be copied, and with them a DataLoader that has one

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.get_start_method(), self.tensorpipe_attachment())


class _Adopting(BaseProcess):
    """A process of multiprocessing's that prepares itself if it is to be an executor's or a DataLoader's worker.

    It is pickled as its base class, so that a child which uses nothing of this package does not import it.
    """

    _target: Any
    _args: tuple[Any, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        watch(_close_pipes_of_siblings)
        if "concurrent.futures.process" in sys.modules:  # the first executor imports it; this package does not
            from tensorpipe_ipc.queues.call_queue import adopt

            adopt(self._target, self._args)
        if is_loaders_worker(self._target, self._args):
            self._target = functools.partial(work, self._target)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) not in _PROCESSES:
            return super().__reduce_ex__(protocol)
        return object.__new__, (type(self).__bases__[-1],), vars(self)


def _close_pipes_of_siblings() -> None:
    """In a forked child: leave it to its parent alone to hold the pipes by which that one's workers see that it has ended."""
    for process in list(multiprocessing.process._children):  # type: ignore[attr-defined]
        popen: Any = getattr(process, "_popen", None)
        finalizer: Any = getattr(popen, "finalizer", None)
        if isinstance(process, _Adopting) and isinstance(finalizer, Finalize) and finalizer.still_active():
            # Called, the finalizer would do nothing here: it is its parent's. By the sentinel a child sees its sibling's end.
            for fd in set(finalizer._args) - {popen.sentinel}:  # type: ignore[attr-defined]
                with contextlib.suppress(OSError):  # the program has closed it
                    os.close(fd)
            finalizer.cancel()


class ForkProcess(_Adopting, context.ForkProcess):
    """A forked process."""


class SpawnProcess(_Adopting, context.SpawnProcess):
    """A process that starts a new interpreter."""


class ForkServerProcess(_Adopting, context.ForkServerProcess):
    """A process that a fork server forks."""


_PROCESSES = (ForkProcess, SpawnProcess, ForkServerProcess)


class ForkContext(_WithOurQueues, context.ForkContext):
    """A context that forks its children."""

    Process = ForkProcess


class SpawnContext(_WithOurQueues, context.SpawnContext):
    """A context that starts its children as new interpreters."""

    Process = SpawnProcess


class ForkServerContext(_WithOurQueues, context.ForkServerContext):
    """A context whose fork server forks its children."""

    Process = ForkServerProcess


_CLASSES: dict[str, type[_WithOurQueues]] = {
    "fork": ForkContext,
    "spawn": SpawnContext,
    "forkserver": ForkServerContext,
}
_contexts: weakref.WeakValueDictionary[str, _WithOurQueues] = weakref.WeakValueDictionary()


def get_context(method: str | None = None) -> Any:
    """Return multiprocessing's context of a start method, with this package's queues.

    Each call returns the same context, as long as the program keeps a reference to it.

    Args:
        method: fork, spawn or forkserver; None: the method of ``multiprocessing.set_start_method``, or else the default.

    Raises:
        ValueError: an unknown method.
    """
    if method is None:
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method not in _CLASSES:
        raise ValueError(f"cannot find context for {method!r} (known: {', '.join(_CLASSES)})")
    return _contexts.get(method) or _contexts.setdefault(method, _CLASSES[method]())


def _rebuild(method: str, attachment: Attachment) -> _WithOurQueues:
    made_here = _CLASSES[method]()
    made_here.__dict__["_attachment"] = attachment
    attachment.enter_context()
    return made_here
