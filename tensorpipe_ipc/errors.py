"""Every exception that this package raises of its own, and nothing else.

::

    TensorPipeError
    ├── Closed(ValueError)            an end used after close, or in a fork of the process that owns it
    ├── ShutDown                      the queue was shut down (queue.ShutDown too, where Python has it)
    ├── EndOfStream                   every producer said goodbye; nothing more comes
    ├── PeerLost(ConnectionError)     the other end is gone and had not said goodbye, or had not taken all
    │   └── StreamFailed              the other end was left by an exception: its type and text
    ├── Busy(RuntimeError)            two threads used one end at once
    ├── Full(queue.Full)              no room within the time allowed
    ├── Empty(queue.Empty)            no message within the time allowed
    ├── ProtocolError(ValueError)     bytes that are not a message: which rule, which value, which limit
    │   └── VersionMismatch           both versions named
    ├── UnknownSerializer(LookupError)
    ├── UnsupportedLeaf(TypeError, RuntimeError)    the leaf's path in the tree, its type, and what to do
    ├── Refused(PermissionError)      serializer not accepted, address, key or uid not allowed
    ├── SharedMemoryError(OSError)    could not be created, attached or grown: sizes, what is free, the remedy
    ├── OutOfMemory(MemoryError)      a message is larger than this process may have: sizes, and the remedy
    └── MeasurementFailed(RuntimeError)  a benchmark's message came damaged, or not at all, or one of its processes failed

Each also is the exception that a user of ``queue``, ``multiprocessing`` or sockets already catches.
"""

from __future__ import annotations

import queue

__all__ = [
    "Busy",
    "Closed",
    "Empty",
    "EndOfStream",
    "Full",
    "MeasurementFailed",
    "OutOfMemory",
    "PeerLost",
    "ProtocolError",
    "Refused",
    "SharedMemoryError",
    "ShutDown",
    "StreamFailed",
    "TensorPipeError",
    "UnknownSerializer",
    "UnsupportedLeaf",
    "VersionMismatch",
]


class TensorPipeError(Exception):
    """The root of the tree: ``except TensorPipeError`` catches all of this package's own."""


class Closed(TensorPipeError, ValueError):
    """An end was used after ``close()``, or in a child that was forked from the process that made it."""


_QueueShutDown: type[Exception] = getattr(queue, "ShutDown", Exception)  # Python 3.13 has it


class ShutDown(TensorPipeError, _QueueShutDown):  # type: ignore[valid-type, misc, unused-ignore]
    """The queue was shut down: nothing more can be put, and nothing is left to get."""


class EndOfStream(TensorPipeError):
    """The stream has ended: the producers said goodbye, and every message was taken. It is raised once for each stream."""


class PeerLost(TensorPipeError, ConnectionError):
    """The other end is gone without a goodbye, or with messages that it had not taken."""


class StreamFailed(PeerLost):
    """The other end failed: an exception left its ``with`` block.

    Attributes:
        failure: the type and text of that exception, at most 1 KiB of them.
        origin: in words, the end that raised it; the end at the other side, or one before that which it passed on.
    """

    failure = ""
    origin = ""


class Busy(TensorPipeError, RuntimeError):
    """Two threads (or a signal handler and what it interrupted) used one end at once. Give each its own."""


class Full(TensorPipeError, queue.Full):
    """No room within the time allowed. The message stays with the caller.

    Attributes:
        put: of several messages, how many were put, from the first on.
    """

    put = 0


class Empty(TensorPipeError, queue.Empty):
    """No message within the time allowed."""


class ProtocolError(TensorPipeError, ValueError):
    """Bytes that are not a message. The text says which rule they broke, with which value, against which limit."""


class VersionMismatch(ProtocolError):
    """The other end speaks another version of the wire format. Both versions are named."""


class UnknownSerializer(TensorPipeError, LookupError):
    """No serializer of that name is registered in this process. The known ones are named."""


class UnsupportedLeaf(TensorPipeError, TypeError, RuntimeError):
    """Something in the tree cannot be sent. A RuntimeError, too: torch's queue raises that for a tensor with history.

    Attributes:
        path: where it stands, as one would write it in Python: ``batch['mask'][3]``.
        reason: what it is, and what to do instead.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def within(self, step: str) -> UnsupportedLeaf:
        """Return the same error, seen from one container further out; ``step`` is ``['mask']`` or ``[3]``."""
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        return f"tree{self.path}: {self.reason}"


class Refused(TensorPipeError, PermissionError):
    """Not allowed: a serializer the consumer does not accept, an address that needs keys, another user's process."""


class SharedMemoryError(TensorPipeError, OSError):
    """Shared memory could not be created, attached or grown. The text has the sizes, what is free and the remedy."""


class OutOfMemory(TensorPipeError, MemoryError):
    """A message is larger than this process may have memory for. One that came in frames is dropped, and the next one can be
    taken; one in shared memory stays for the next get, for eight tries. One that was to be sent is not."""


class MeasurementFailed(TensorPipeError, RuntimeError):
    """A benchmark's figures would be worth nothing: a message came damaged, twice or not at all, or a process failed."""
