"""multiprocessing's names, with our queues: ``import tensorpipe_ipc.multiprocessing as mp`` in the place of its own.

Queue, JoinableQueue, SimpleQueue, Pool and get_context are ours, and send tensors through shared memory. All else is
multiprocessing's own (the start method, too, is set there, and is the whole program's), or, as in torch.multiprocessing,
torch's: ``spawn``, ``start_processes``, and the sharing strategies, which say how a tensor travels that goes not through a
queue, but through a pipe or a manager. What goes through our queues needs none.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
from collections.abc import Callable, Iterable
from multiprocessing import (
    Array,
    AuthenticationError,
    Barrier,
    BoundedSemaphore,
    BufferTooShort,
    Condition,
    Event,
    Lock,
    Manager,
    Pipe,
    Process,
    ProcessError,
    RawArray,
    RawValue,
    RLock,
    Semaphore,
    TimeoutError,
    Value,
    active_children,
    allow_connection_pickling,
    cpu_count,
    current_process,
    freeze_support,
    get_all_start_methods,
    get_logger,
    get_start_method,
    log_to_stderr,
    parent_process,
    reducer,
    set_executable,
    set_forkserver_preload,
    set_start_method,
)
from typing import Any

import torch.multiprocessing
from torch.multiprocessing import (
    get_all_sharing_strategies,
    get_sharing_strategy,
    set_sharing_strategy,
)
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
    start_processes,
)

from tensorpipe_ipc.queues.context import SpawnContext, get_context
from tensorpipe_ipc.queues.simple_queue import SimpleQueue
from tensorpipe_ipc.queues.tensor_queue import JoinableQueue, Queue

__all__ = [
    "Array",
    "AuthenticationError",
    "Barrier",
    "BoundedSemaphore",
    "BufferTooShort",
    "Condition",
    "Event",
    "JoinableQueue",
    "Lock",
    "Manager",
    "Pipe",
    "Pool",
    "Process",
    "ProcessContext",
    "ProcessError",
    "ProcessExitedException",
    "ProcessRaisedException",
    "Queue",
    "RLock",
    "RawArray",
    "RawValue",
    "Semaphore",
    "SimpleQueue",
    "SpawnContext",
    "TimeoutError",
    "Value",
    "active_children",
    "allow_connection_pickling",
    "cpu_count",
    "current_process",
    "freeze_support",
    "get_all_sharing_strategies",
    "get_all_start_methods",
    "get_context",
    "get_logger",
    "get_sharing_strategy",
    "get_start_method",
    "log_to_stderr",
    "parent_process",
    "reducer",
    "set_executable",
    "set_forkserver_preload",
    "set_sharing_strategy",
    "set_start_method",
    "spawn",
    "start_processes",
]


def Pool(
    processes: int | None = None,
    initializer: Callable[..., object] | None = None,
    initargs: Iterable[Any] = (),
    maxtasksperchild: int | None = None,
) -> Any:
    """multiprocessing.Pool, which sends tensors through shared memory, to its workers and back."""
    return get_context().Pool(processes, initializer, initargs, maxtasksperchild)


def __getattr__(name: str) -> Any:
    """Return the other names of the two modules that people use: ``mp.connection``, ``mp.pool``, ``mp.reductions``.

    A module of multiprocessing's is imported by its own name, so that there is one of it.

    Raises:
        AttributeError: neither has it.
    """
    if not name.startswith("__"):  # ``__path__`` would have Python run multiprocessing's files again, under this name
        for module in (multiprocessing, torch.multiprocessing):
            if hasattr(module, name):
                return getattr(module, name)
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"multiprocessing.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
