"""Reach into ends and queues, for tests that hold, cut or damage what no user could."""

from __future__ import annotations

from typing import Any, overload

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints.events import Event
from tensorpipe_ipc.endpoints.receiver import Receiver
from tensorpipe_ipc.endpoints.sender import Sender

__all__ = ["conversation_of", "side_of", "shared_queue_of", "tell"]


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
