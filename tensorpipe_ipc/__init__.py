"""tensorpipe_ipc: PyTorch tensors between processes.

The map of the house, bottom up; imports point down only:

* ``errors``, ``process``, ``parent``, ``reader``: what went wrong; who a process is, whether it lives, what memory it holds;
  a worker's wait that ends with its parent; a queue as a connection to read from.
* ``wire``: what goes over the wire, as pure functions of bytes.
* ``serializers``: what the bytes of a tensor are.
* ``security``: which keys an end has, and whose it lets in.
* ``memory``: where the bytes lie in shared memory, who has them, who of these is dead.
* ``transport``: how word travels: ZeroMQ's sockets, the conversation between two ends and how they come to share a queue;
  pipes of tickets, and what finishes what the dead began.
* ``moving``, ``loan``: trees that are handed on by reference, and tensors that are made where they will be read.
* ``producer``, ``consumer``: the two ends of one path, put and get.
* ``tensor_queue``, ``collate``: multiprocessing's queues over shared memory; batches of PyTorch's DataLoader, made there.
* ``simple_queue``, ``call_queue``, ``pool``, ``context``: what Pool and ProcessPoolExecutor send through; multiprocessing's
  contexts.
* ``multiprocessing``: the module of that name, with these queues.
* ``tracking``: what memory a family of processes takes up, each page once.
* ``benchmark``: how long a message takes, and how many go in a second; imported when it is asked for.
* ``cli``: the command line, one file per command.

Importing it starts nothing, opens nothing and changes nothing.
"""

import sys

from tensorpipe_ipc import errors
from tensorpipe_ipc.consumer import Consumer, ConsumerStatistics
from tensorpipe_ipc.context import get_context
from tensorpipe_ipc.errors import (
    Busy,
    Closed,
    Empty,
    EndOfStream,
    Full,
    MeasurementFailed,
    OutOfMemory,
    PeerLost,
    ProtocolError,
    Refused,
    SharedMemoryError,
    ShutDown,
    StreamFailed,
    TensorPipeError,
    UnknownSerializer,
    UnsupportedLeaf,
    VersionMismatch,
)
from tensorpipe_ipc.memory.loans import TensorSpec
from tensorpipe_ipc.producer import Producer, ProducerStatistics
from tensorpipe_ipc.security import Curve
from tensorpipe_ipc.serializers import Serializer, register_serializer, serializer_names
from tensorpipe_ipc.serializers.base import describe, plain
from tensorpipe_ipc.serializers.conformance import check_serializer
from tensorpipe_ipc.simple_queue import SimpleQueue
from tensorpipe_ipc.tensor_queue import JoinableQueue, Queue
from tensorpipe_ipc.tracking import MemorySample, MemoryTracker, TrackedProcess
from tensorpipe_ipc.transport.queue_statistics import QueueStatistics
from tensorpipe_ipc.wire.metas import OPAQUE, TensorMeta
from tensorpipe_ipc.wire.spec import register_type

if "t" in sys.abiflags or not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "tensorpipe_ipc does not work without the GIL (free-threaded Python): what its queues do in one step, threads "
        "could see half done. Use the usual build of this Python version"
    )

__version__ = "0.1.0"

__all__ = [
    "OPAQUE",
    "Busy",
    "Closed",
    "Consumer",
    "ConsumerStatistics",
    "Curve",
    "Empty",
    "EndOfStream",
    "Full",
    "JoinableQueue",
    "MeasurementFailed",
    "OutOfMemory",
    "MemorySample",
    "MemoryTracker",
    "PeerLost",
    "Producer",
    "ProducerStatistics",
    "ProtocolError",
    "Queue",
    "QueueStatistics",
    "Refused",
    "Serializer",
    "SharedMemoryError",
    "ShutDown",
    "StreamFailed",
    "SimpleQueue",
    "TensorMeta",
    "TensorPipeError",
    "TensorSpec",
    "TrackedProcess",
    "UnknownSerializer",
    "UnsupportedLeaf",
    "VersionMismatch",
    "check_serializer",
    "describe",
    "errors",
    "get_context",
    "plain",
    "register_serializer",
    "register_type",
    "serializer_names",
]
