"""get_context(): multiprocessing's contexts, with our queues, which share one piece of memory.

Everything else of a context is multiprocessing's own: events, locks, managers, and pools, which send through our
SimpleQueue. Processes are, too, but that an executor's queue of calls is adopted where its workers are made, and that a
DataLoader's workers stack batches in our memory.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import context
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from tensorpipe_ipc.memory.arena import Arena
from tensorpipe_ipc.memory.loans import TensorSpec, made, shape_of
from tensorpipe_ipc.memory.segment import Segment
from tensorpipe_ipc.queues.collate import CollateMap, collate
from tensorpipe_ipc.queues.simple_queue import SimpleQueue
from tensorpipe_ipc.queues.tensor_queue import JoinableQueue, Queue
from tensorpipe_ipc.queues.worker_memory import is_loaders_worker, work
from tensorpipe_ipc.shared_queue.attachment import Attachment

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
    """The common part of our contexts. Their memory is made at the first use, and lasts as long as they do, or longer."""

    def tensorpipe_attachment(self) -> Attachment:
        """Return this process's attachment to the memory that all queues of this context share.

        Raises:
            SharedMemoryError: it could not be made.
        """
        found = self.__dict__.get("_attachment")
        if found is None:  # two threads may make one each, but both take the same
            found = self.__dict__.setdefault("_attachment", Attachment(Arena(Segment.create())))
            found.lasts = True
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
        """See ``tensorpipe_ipc.Queue``."""
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
        """See ``tensorpipe_ipc.JoinableQueue``."""
        return JoinableQueue(
            maxsize, ctx=self, serializer=serializer, wire_dtype=wire_dtype, spin=spin, cuda_ipc=cuda_ipc
        )

    def SimpleQueue(self, *, serializer: str = "raw", wire_dtype: torch.dtype | None = None) -> SimpleQueue:
        """See ``tensorpipe_ipc.SimpleQueue``."""
        return SimpleQueue(ctx=self, serializer=serializer, wire_dtype=wire_dtype)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor in the context's memory, not initialised: any queue of the context sends it without a copy
        (``put(x, move=True)``). Its memory is free again when the last alias of it is gone.

        Raises:
            SharedMemoryError: there is no room. The text says who holds what.
        """
        spec = TensorSpec(shape_of(shape), dtype)
        attachment = self.tensorpipe_attachment()
        (tensor,) = made([spec], attachment.leases, attachment.allocate)
        return tensor

    def trim(self) -> int:
        """Give back all memory of the context that nobody needs now, whichever process has it. How many bytes that were."""
        return self.tensorpipe_attachment().trim()

    def collate(self, batch: Any, *, collate_fn_map: CollateMap | None = None) -> Any:
        """For a DataLoader: ``DataLoader(..., multiprocessing_context=ctx, collate_fn=ctx.collate)``.

        It makes what ``torch.utils.data.default_collate`` makes. In a worker, the tensors of a batch are stacked straight
        into one block of the context's memory, which the result queue sends by reference: so they are written once, by the
        worker, and read there. Outside a worker (``num_workers=0``) it *is* default_collate. May be called by a collate
        function of one's own, for the part of a sample that can be stacked.

        The batch belongs to the worker's next put of it. Whoever else keeps it, or a part, has it copied instead.

        Args:
            batch: the samples.
            collate_fn_map: what torch's ``collate`` takes, instead of torch's own. What such a function makes is copied.

        Raises:
            TypeError, RuntimeError: what torch raises for samples that cannot be stacked.
        """
        return collate(batch, self.tensorpipe_attachment, collate_fn_map)

    def Pool(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
    ) -> Any:
        """multiprocessing.pool.Pool, which sends tensors through the context's memory, to its workers and back."""
        from tensorpipe_ipc.queues.pool import Pool  # when it is asked for, as multiprocessing does

        return Pool(processes, initializer, initargs, maxtasksperchild, context=self)

    def get_context(self, method: str | None = None) -> Any:
        """This one, or ``tensorpipe_ipc.get_context(method)``."""
        return self if method in (None, self.get_start_method()) else get_context(method)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # as multiprocessing's can be copied, and with them a DataLoader that has one

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.get_start_method(), self.tensorpipe_attachment())


class _Adopting(BaseProcess):
    """A process of multiprocessing's, which looks whose worker it is to be. It arrives in the child as what it is a kind of,
    so that a child that uses none of this package does not import it."""

    _target: Any
    _args: tuple[Any, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "concurrent.futures.process" in sys.modules:  # imported with the first executor, and not by us
            from tensorpipe_ipc.queues.call_queue import adopt

            adopt(self._target, self._args)
        if is_loaders_worker(self._target, self._args):
            self._target = functools.partial(work, self._target)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) not in _PROCESSES:
            return super().__reduce_ex__(protocol)
        return object.__new__, (type(self).__bases__[-1],), vars(self)


class ForkProcess(_Adopting, context.ForkProcess):
    """A forked one."""


class SpawnProcess(_Adopting, context.SpawnProcess):
    """One started anew."""


class ForkServerProcess(_Adopting, context.ForkServerProcess):
    """One forked by a server that was started anew."""


_PROCESSES = (ForkProcess, SpawnProcess, ForkServerProcess)


class ForkContext(_WithOurQueues, context.ForkContext):
    """Its children are forked."""

    Process = ForkProcess


class SpawnContext(_WithOurQueues, context.SpawnContext):
    """Its children are started anew."""

    Process = SpawnProcess


class ForkServerContext(_WithOurQueues, context.ForkServerContext):
    """Its children are forked by a server that was started anew."""

    Process = ForkServerProcess


_CLASSES: dict[str, type[_WithOurQueues]] = {
    "fork": ForkContext,
    "spawn": SpawnContext,
    "forkserver": ForkServerContext,
}
_contexts: weakref.WeakValueDictionary[str, _WithOurQueues] = weakref.WeakValueDictionary()


def get_context(method: str | None = None) -> Any:
    """multiprocessing's context of a start method, with our queues. The same one each time, while somebody has it.

    Args:
        method: fork, spawn or forkserver; None: the one that was set with ``multiprocessing.set_start_method``, or is the
            default.

    Raises:
        ValueError: there is no such method.
    """
    if method is None:
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method not in _CLASSES:
        raise ValueError(f"cannot find context for {method!r} (known: {', '.join(_CLASSES)})")
    return _contexts.get(method) or _contexts.setdefault(method, _CLASSES[method]())


def _rebuild(method: str, attachment: Attachment) -> _WithOurQueues:
    made_here = _CLASSES[method]()
    made_here.__dict__["_attachment"] = attachment
    attachment.lasts = True
    return made_here
