"""Reach into ends and queues, for tests that hold, cut or damage what no user could."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints.events import Event
from tensorpipe_ipc.endpoints.receiver import Receiver
from tensorpipe_ipc.endpoints.sender import Sender
from tensorpipe_ipc.memory.row import PUT, Operation
from tensorpipe_ipc.shared_queue.get_end import COPY, _drop
from tensorpipe_ipc.shared_queue.open_queue import OpenQueue
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue

__all__ = [
    "backlog_of",
    "conversation_of",
    "drop_one",
    "finish_get",
    "instead_of_hearing",
    "instead_of_refusing",
    "keep_spare",
    "open_queue_of",
    "shared_queue_of",
    "side_of",
    "tell",
]


@overload
def side_of(end: tp.Producer) -> Sender: ...
@overload
def side_of(end: tp.Consumer) -> Receiver: ...
def side_of(end: Any) -> Any:
    """Return what an end has besides its public face: a sender, or a receiver."""
    return end._sender if isinstance(end, tp.Producer) else end._receiver


def conversation_of(end: Any) -> Any:
    """Return an end's side of the conversation with others."""
    return side_of(end).conversation


def tell(end: Any, event: Event) -> Any:
    """Have an end deal with an event, as if its conversation had told it. Return the message that it is, if it is the next."""
    conversation_of(end).events.append(event)
    return side_of(end)._handle_events()


def shared_queue_of(queue: Any) -> Any:
    """Return the queue in shared memory that a queue of multiprocessing's kind has."""
    return queue._queue


def open_queue_of(queue: SharedMemoryQueue) -> OpenQueue:
    """Return what both ends of a queue work with."""
    return queue._queue


def keep_spare(queue: SharedMemoryQueue, direction: int, size: int = 1) -> None:
    """Have an end keep a spare operation, so that its next put or get takes the same steps as later ones."""
    end = queue.puts if direction == PUT else queue.gets
    end._spare[size].append(open_queue_of(queue).operation(direction, size))


def finish_get(queue: SharedMemoryQueue, operation: Operation) -> None:
    """Finish a get as after an exception."""
    queue.gets._finish(operation)


def drop_one(queue: SharedMemoryQueue) -> None:
    """Drop the next message, as a shutdown does."""
    queue.gets._get(0, _drop, COPY)


def backlog_of(queue: SharedMemoryQueue) -> int:
    """Return how many of its spilled tickets this process may still look at."""
    return len(queue.puts._backlog)


def instead_of_hearing(queue: SharedMemoryQueue, function: Callable[[int], object]) -> None:
    """Have a get that took a doorbell call a function, and not do what the doorbell says."""
    queue.gets._hear = function  # type: ignore[method-assign,assignment]


def instead_of_refusing(queue: SharedMemoryQueue, function: Callable[[Callable[[], None]], object]) -> None:
    """Have a put that looks whether the queue is shut call a function, and give it the look."""
    look = queue.puts._refuse_if_shut
    queue.puts._refuse_if_shut = lambda: function(look)  # type: ignore[method-assign,assignment]
