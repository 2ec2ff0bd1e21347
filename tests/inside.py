"""Reach into ends and queues, for tests that hold, cut or damage what no user could."""

from __future__ import annotations

from typing import Any, overload

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints.receiver import ReceiveLink
from tensorpipe_ipc.endpoints.sender import SendLink

__all__ = ["link_of", "shared_queue_of"]


@overload
def link_of(end: tp.Producer) -> SendLink: ...
@overload
def link_of(end: tp.Consumer) -> ReceiveLink: ...
def link_of(end: Any) -> Any:
    """Return an end's side of the conversation."""
    return end._link


def shared_queue_of(queue: Any) -> Any:
    """Return the queue in shared memory that a queue of multiprocessing's kind has."""
    return queue._queue
