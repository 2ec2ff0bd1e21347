"""Memory for the batches that torch's own collate functions make in a DataLoader's worker.

torch's ``default_collate``, and the collate functions of libraries that follow it, call ``torch.UntypedStorage._new_shared``
for memory to stack a batch in. torch allocates it in /dev/shm, and sends it by a handle that needs the worker alive. In a
worker of a loader with a context of this package, that memory lies in the context's arena, and the batch goes by reference.

A message goes by reference if its large tensors lie in one block (``handover.py``), but torch requests each tensor's memory
separately. So a batch gets one block, as large as the largest of the last 16. A storage that does not fit gets its own block.
A batch that fills less than half of its block is copied: one long batch does not make the next 16 as large. A block lasts as
long as any part of it. So if the worker keeps a part of an earlier batch, the next batches get private memory, and are copied.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import get_worker_info

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory.leases import Held
from tensorpipe_ipc.memory.loans import TensorSpec, make_tensors
from tensorpipe_ipc.memory.row import PUT
from tensorpipe_ipc.queues.parent import end_if_parent_is_dead
from tensorpipe_ipc.queues.tensor_queue import Queue
from tensorpipe_ipc.shared_queue.shared_memory import LEASE_FROM
from tensorpipe_ipc.wire.direct import mark
from tensorpipe_ipc.wire.layout import ALIGN

__all__ = ["is_loaders_worker", "work"]

_RECENT = 16  # batches, as large as the largest of which the next one's block is


def is_loaders_worker(target: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether a process with this target is to be a worker of a DataLoader, torch's or torchdata's."""
    is_loop = getattr(target, "__name__", None) == "_worker_loop"
    is_theirs = str(getattr(target, "__module__", None)).partition(".")[0] in ("torch", "torchdata")
    return is_loop and is_theirs and any(isinstance(each, Queue) for each in arguments)


def work(target: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a loader's worker, with its batches in the memory that its queues share."""
    queues = [each for each in arguments if isinstance(each, Queue)]
    for each in queues:
        each.takes_offers = True
        each._queue.puts.while_waiting = end_if_parent_is_dead
    memory, stock = _BatchMemory(queues), getattr(torch.UntypedStorage, "_new_shared", None)
    if stock is None:
        warnings.warn(
            f"torch {torch.__version__} has no UntypedStorage._new_shared: batches are copied once more",
            stacklevel=1,
        )
        return target(*arguments, **named)

    def new_shared(cls: Any, size: Any, /, *args: Any, device: Any = "cpu", **more: Any) -> Any:
        is_ours = cls is torch.UntypedStorage and not args and not more and get_worker_info() is not None
        if not is_ours or type(size) is not int or torch.device(device).type != "cpu":
            return stock.__func__(cls, size, *args, device=device, **more)
        return memory.storage(size)

    storage: Any = torch.UntypedStorage
    storage._new_shared = classmethod(new_shared)
    return target(*arguments, **named)


class _BatchMemory:
    """The memory of one worker's batches."""

    def __init__(self, queues: list[Queue]) -> None:
        """
        Args:
            queues: the worker's queues. A put to any of them ends a batch.
        """
        self._queues = [each._queue for each in queues]
        self._thread = threading.get_ident()  # the only user of the block: two threads could take the same place
        self._put = (-1, 0)  # messages and bytes put before this batch
        self._sizes: deque[int] = deque(maxlen=_RECENT)
        self._asked = self._largest = 0
        self._keeps = False  # whether the worker keeps a part of an earlier batch, or there was no room for this one
        self._block: _Block | None = None

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of ``nbytes``: in shared memory, if there is room and the batch is large enough for a lease."""
        if threading.get_ident() != self._thread:
            return _private(nbytes)
        done = [queue.done(PUT) for queue in self._queues]
        put = sum(count for count, _ in done), sum(nbytes for _, nbytes in done)
        if put[0] != self._put[0]:  # a new batch begins
            # Memory requested and not put, as by loops within a sample, does not count for a batch's size.
            self._sizes.append(min(self._asked, put[1] - self._put[1]))
            self._largest, self._asked = max(self._sizes), 0
            self._put, self._block, self._keeps = put, None, bool(self._queues[0].leases.offered)
        self._asked += -(-nbytes // ALIGN) * ALIGN
        if not nbytes or self._keeps:
            return _private(nbytes)
        found = None if self._block is None else self._block.take(nbytes)
        if found is None and max(nbytes, self._largest if self._block is None else 0) >= LEASE_FROM:
            found = self._in_a_new_block(nbytes)
        return _private(nbytes) if found is None else found

    def _in_a_new_block(self, nbytes: int) -> torch.UntypedStorage | None:
        leases, attachment = self._queues[0].leases, self._queues[0].attachment
        spec = TensorSpec((max(nbytes, self._largest if self._block is None else 0),), torch.uint8)
        try:
            (whole,) = make_tensors([spec], leases, attachment.allocate_if_likely, offered=True)
        except SharedMemoryError:
            self._keeps = True  # the batch's others do not ask again
            return None  # the put waits for room, and its error names the processes that hold memory
        held = leases.find(whole.data_ptr())
        if held is None:
            return None  # it was copied into memory of its own, as few addresses are left
        self._block = _Block(held)
        return self._block.take(nbytes)


def _private(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()


class _Block:
    """A block that holds a batch's storages, one after another. They own it: it is released with the last of them."""

    def __init__(self, held: Held) -> None:
        self._held = held  # it does not reference the array, so it does not keep the block
        self._end, self._nbytes = 0, held.nbytes

    def take(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return the block's next ``nbytes``; None if they do not fit, or if the block has been released or reused."""
        start, anchor = self._end, self._held.anchor
        array = anchor()
        if array is None or start + nbytes > self._nbytes or anchor.leases.live.get(anchor.word) is not anchor:
            return None
        self._end = -(-(start + nbytes) // ALIGN) * ALIGN
        # Each storage has a buffer of its own: the buffer's references show whether the storage has aliases.
        part: Any = memoryview(array)[start : start + nbytes]
        with torch.inference_mode(False):
            tensor = torch.frombuffer(part, dtype=torch.uint8)
        mark(tensor)
        return tensor.untyped_storage()
