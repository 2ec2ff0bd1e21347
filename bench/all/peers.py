"""The peers of the comparison: how each is used and why that is fair, and what it needs.

A peer is described here without importing it. What it needs is imported in its own process tree (``tree``), which says
why where that fails.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.all.links import Shape
from bench.queue.rivals import FasterFifo, Floor, Iceoryx, Memcpy, NumpyQueue, Ours

__all__ = ["FLOORS", "MEMCPY", "OURS", "PEERS", "PIPE", "Peer"]

OURS, PIPE, MEMCPY = "ours", "pipe, 8 bytes", "one memcpy"


class Peer(NamedTuple):
    """One peer.

    Attributes:
        family: what draws as one line: of each family, the fastest is drawn.
        note: how it is used here, and why that is fair.
        make: a callable, or "module:name" of one, that takes a Shape and gives a ``Rival`` (or, if ``crew``, a crew).
        package: what is installed for it, beyond this package's own needs.
        part_of: else what it comes with: the distribution whose version is told.
        trees: it takes dicts of tensors.
        many: several processes may share either end.
        crew: it has processes of its own.
    """

    family: str
    note: str
    make: str | Callable[[Shape], Any]
    arguments: tuple[Any, ...] = ()
    package: str = ""
    part_of: str = "python"
    trees: bool = True
    many: bool = False
    crew: bool = False

    def maker(self) -> Callable[[Shape], Any]:
        """Import what makes it.

        Raises:
            ImportError: what it needs is not here.
        """
        make = self.make
        if isinstance(make, str):
            module, _, name = make.partition(":")
            make = getattr(importlib.import_module(f"bench.all.links.{module}"), name)
        if self.package:
            importlib.import_module(IMPORTED_AS.get(self.package, self.package))
        found: Callable[..., Any] = make
        return lambda shape: found(shape, *self.arguments)


IMPORTED_AS = {"faster-fifo": "faster_fifo", "eclipse-zenoh": "zenoh"}
_BY_HAND = "the bytes through a multiprocessing.Pipe; float32 only, and its shape must be known beforehand"

FLOORS: dict[str, Peer] = {
    PIPE: Peer("floor", "a wake-up: the least that a blocked reader costs", lambda shape: Floor(), trees=False),
    MEMCPY: Peer(
        "floor",
        "one copy into warm shared memory: the least that a copy costs",
        lambda shape: Memcpy(shape.bound, shape.nbytes),
        trees=False,
    ),
}

PEERS: dict[str, Peer] = {
    **FLOORS,
    OURS: Peer(
        "ours",
        "tensorpipe_ipc.Queue, as it is by default; the receiver blocks",
        lambda shape: Ours(shape.bound),
        many=True,
        part_of="tensorpipe-ipc",
    ),
    "ours, endpoints": Peer(
        "ours, endpoints",
        "tensorpipe_ipc.Producer and Consumer over ipc://, as they are by default",
        "endpoints:Endpoints",
        many=True,
        part_of="tensorpipe-ipc",
    ),
    "torch Queue, fd": Peer(
        "torch",
        "torch.multiprocessing.Queue, strategy file_descriptor (its default); every tensor is new, as a loader's are",
        "torch_queues:queue",
        ("file_descriptor",),
        many=True,
        part_of="torch",
    ),
    "torch Queue, file": Peer(
        "torch",
        "the same with the strategy file_system, which its documentation advises where descriptors run out",
        "torch_queues:queue",
        ("file_system",),
        many=True,
        part_of="torch",
    ),
    "torch SimpleQueue, fd": Peer(
        "torch",
        "torch.multiprocessing.SimpleQueue, file_descriptor: no feeder thread",
        "torch_queues:simple_queue",
        ("file_descriptor",),
        many=True,
        part_of="torch",
    ),
    "torch SimpleQueue, file": Peer(
        "torch",
        "torch.multiprocessing.SimpleQueue, file_system",
        "torch_queues:simple_queue",
        ("file_system",),
        many=True,
        part_of="torch",
    ),
    "mp.Queue, NumPy": Peer(
        "multiprocessing",
        "arrays, made before the clock starts: nothing is charged for tensors",
        lambda shape: NumpyQueue(shape.bound),
        many=True,
        part_of="numpy",
    ),
    "mp.Pipe, NumPy": Peer(
        "multiprocessing",
        "arrays; no thread, no lock, one process at each end",
        "pipes:Arrays",
        part_of="numpy",
    ),
    "SharedMemory slot": Peer(
        "slot by hand",
        "multiprocessing.shared_memory and two semaphores by hand: arrays of one known dtype, one at a time",
        "slot:Slot",
        trees=False,
    ),
    "faster-fifo": Peer(
        "faster-fifo",
        "arrays; room for four of the largest messages, as its README advises to size it",
        lambda shape: FasterFifo(shape.bound, shape.nbytes),
        package="faster-fifo",
        many=True,
    ),
    "pyzmq, copy=True": Peer(
        "ZeroMQ, NNG",
        "pyzmq's documented recipe for arrays (JSON header, memory), PUSH and PULL over ipc",
        "zmq_recipe:PushPull",
        (True,),
        many=True,
        part_of="pyzmq",
    ),
    "pyzmq, copy=False": Peer(
        "ZeroMQ, NNG",
        "the same without copies: the sender may not write before it is sent, and is not told when that is",
        "zmq_recipe:PushPull",
        (False,),
        many=True,
        part_of="pyzmq",
    ),
    "gloo": Peer(
        "gloo",
        "torch.distributed send and recv on loopback; the receiver must know dtype and shape beforehand",
        "gloo:Gloo",
        trees=False,
        part_of="torch",
    ),
    "pynng": Peer(
        "ZeroMQ, NNG",
        "Push0 and Pull0 over ipc; the binding takes bytes only, so arrays are copied into them; read-only arrays arrive",
        "nng:PushPull",
        package="pynng",
        trees=False,
        many=True,
    ),
    "zenoh": Peer(
        "zenoh",
        "publisher in zenoh's shared memory; its Python binding fills it from bytes and reads it into bytes",
        "zenoh_memory:Zenoh",
        package="eclipse-zenoh",
        trees=False,
    ),
    "iceoryx2": Peer(
        "iceoryx2",
        "copied into a loan and out; the receiver polls without pause, for which it keeps a core busy",
        lambda shape: Iceoryx(shape.bound, shape.nbytes),
        package="iceoryx2",
        trees=False,
    ),
    "Ray actor call": Peer(
        "Ray",
        "an actor's method called with arrays, which its documentation advises: read-only, without a copy",
        "ray_actor:Calls",
        package="ray",
        crew=True,
    ),
    "Ray compiled graph": Peer(
        "Ray",
        "the method as a compiled graph, with tensors; the clock stops in the method",
        "ray_actor:Graph",
        package="ray",
        crew=True,
    ),
    "numpy by hand": Peer(
        "bytes by hand",
        f"tobytes and frombuffer; {_BY_HAND}",
        "pipes:ByHand",
        ("numpy by hand",),
        trees=False,
        part_of="numpy",
    ),
    "data_ptr by hand": Peer(
        "bytes by hand",
        f"ctypes.string_at and torch.frombuffer; {_BY_HAND}",
        "pipes:ByHand",
        ("data_ptr by hand",),
        trees=False,
        part_of="torch",
    ),
    "torch.save by hand": Peer(
        "bytes by hand",
        f"torch.save and torch.load in memory; {_BY_HAND}",
        "pipes:ByHand",
        ("torch.save by hand",),
        trees=False,
        part_of="torch",
    ),
}
