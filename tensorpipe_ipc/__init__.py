"""tensorpipe_ipc: PyTorch tensors between processes.

The map of the house, bottom up; imports point down only:

* ``errors``, ``process``, ``forks``, ``handlers``, ``libc``, ``limits``, ``owned_fd``: errors; processes and their lives; what
  a signal's handler raised; checks of arguments; descriptors that have an owner.
* ``security``: which keys an end has, and whose it lets in.
* ``wire``: what goes over the wire, as pure functions of bytes.
* ``serializers``: what the bytes of a tensor are.
* ``memory``: where the bytes lie in shared memory, who has them, who of these is dead.
* ``zeromq``: sockets and addresses; the only place that imports zmq.
* ``shared_queue``: a queue in shared memory: pipes of tickets, and the recovery of what the dead began.
* ``cuda``: tensors on GPUs; the only place that calls torch.cuda.
* ``endpoints``: ``Producer`` and ``Consumer``, the two ends of one path, and their conversation.
* ``queues``: multiprocessing's queues, contexts, pools and executors; batches of PyTorch's DataLoader, made in shared memory.
* ``multiprocessing``: the module of that name, with these queues.
* ``tracking``: what memory a family of processes takes up, each page once.
* ``benchmark``: how long a message takes, and how many go in a second; imported when it is asked for.
* ``cli``: the command line, one file per command.

Importing it starts nothing, opens nothing and changes nothing.
"""

import sys

from tensorpipe_ipc import errors
from tensorpipe_ipc.endpoints.consumer import Consumer, ConsumerStatistics
from tensorpipe_ipc.endpoints.producer import Producer, ProducerStatistics
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
from tensorpipe_ipc.queues.context import get_context
from tensorpipe_ipc.queues.simple_queue import SimpleQueue
from tensorpipe_ipc.queues.tensor_queue import JoinableQueue, Queue
from tensorpipe_ipc.security import Curve
from tensorpipe_ipc.serializers import Serializer, register_serializer, serializer_names
from tensorpipe_ipc.serializers.base import describe, plain
from tensorpipe_ipc.serializers.conformance import check_serializer
from tensorpipe_ipc.shared_queue.queue_statistics import QueueStatistics
from tensorpipe_ipc.tracking import MemorySample, MemoryTracker, TrackedProcess
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
