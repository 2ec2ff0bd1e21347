"""Producer and Consumer beside the barest loop that pyzmq allows: one-way time and throughput, over ipc and tcp.

Ours are there twice: as they are by default, which is through shared memory, and with ``shared_memory="off"``, in frames.
And beside our Queue, whose one-way times they are to keep to within 1.3.

The bare loop is PUSH/PULL with two frames a message, a header of 40 bytes and the tensor's memory, ``copy=False`` both
ways, and the tensor made with torch.frombuffer over the frame. It has no metadata, no limit of what is in flight, no
acknowledgement, and lets the caller overwrite what is still being sent.

One way is half of an echo's round trip. Each end is a process of its own, on a core of its own where there are two. The
sender's tensors rotate over four, the receiver keeps the last two, and looks at the first and last item of each.
Rounds alternate between the rivals, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, Protocol

import torch
import zmq
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tensorpipe_ipc as tp
from bench.measure import Ratio, keep, machine, ratio

__all__ = ["add_arguments", "run"]

SIZES = {400: "400 B", 4_000_000: "4 MB", 100_000_000: "100 MB"}
ECHOES = {400: 600, 4_000_000: 60, 100_000_000: 4}  # a round
STREAM = {400: 4000, 4_000_000: 120, 100_000_000: 4}
FEWEST = {400: 10, 4_000_000: 10, 100_000_000: 2}
ROUNDS = 9
_CORES = os.sched_getaffinity(0)
_MACHINE = machine()  # before this process pins itself to one of its cores


class End(Protocol):
    """One process's side of a rival: a tensor out, a tensor in."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send one."""

    def receive(self) -> torch.Tensor:
        """Receive one."""

    def close(self) -> None:
        """Let go of everything."""


class Ours:
    """A Producer and a Consumer."""

    shared_memory: Literal["require", "off"] = "require"  # which is what "auto" finds, or an error

    def __init__(self, there: str, back: str, server: bool) -> None:
        how = self.shared_memory
        self._out = tp.Producer(back if server else there, bind=server, shared_memory=how)
        self._in = tp.Consumer(there if server else back, bind=server, shared_memory=how)
        self.send = self._out.put
        self.receive = self._in.get

    def close(self) -> None:
        """Let go of everything."""
        self._out.close()
        self._in.close()


class InFrames(Ours):
    """The same without shared memory."""

    shared_memory = "off"


class Bare:
    """PUSH and PULL, two frames a message, nothing copied."""

    def __init__(self, there: str, back: str, server: bool) -> None:
        self._context = zmq.Context()
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, endpoint in ((self._out, back if server else there), (self._in, there if server else back)):
            socket.linger = 0
            (socket.bind if server else socket.connect)(endpoint)

    def send(self, tensor: torch.Tensor) -> None:
        """Send one."""
        self._out.send_multipart([b"h" * 40, tensor.numpy().data], copy=False)

    def receive(self) -> torch.Tensor:
        """Receive one."""
        _, frame = self._in.recv_multipart(copy=False)
        return torch.frombuffer(frame.buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Let go of everything."""
        self._out.close()
        self._in.close()
        self._context.term()


class Queues:
    """Two of our queues, one each way."""

    def __init__(self, there: Any, back: Any, server: bool) -> None:
        out, into = (back, there) if server else (there, back)
        self.send, self.receive = out.put, into.get

    def close(self) -> None:
        """Let go of everything."""


RIVALS: dict[str, Callable[[Any, Any, bool], End]] = {
    "ours": Ours,
    "in frames": InFrames,
    "Queue": Queues,
    "bare pyzmq": Bare,
}
OURS, QUEUE, BARE = ("ours", "in frames"), "Queue", "bare pyzmq"
MOST = 1.3  # of the Queue's one-way time


class Client(NamedTuple):
    """The measuring side of one rival, and how to tell its other process what comes."""

    end: End
    tell: Connection
    process: Any


class Row(NamedTuple):
    """The result for one transport and size. Times in microseconds, rates in messages a second."""

    transport: str
    size: int
    one_way: dict[str, float]  # p50, by rival
    one_way_p99: dict[str, float]
    rate: dict[str, float]
    one_way_ratio: dict[str, Ratio]  # to bare: under 1 is faster; and the lowest and highest round's
    rate_ratio: dict[str, Ratio]  # to bare: over 1 is faster; and the lowest and highest round's
    queue_ratio: Ratio  # ours to the Queue, one way; and the lowest and highest round's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--scale", type=float, default=1.0, help="a fraction of the rounds and messages")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write what was asked for."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=2 * len(SIZES))
        for transport in ("ipc", "tcp"):
            clients = {name: _start(name, transport, folder) for name in RIVALS}
            for size in SIZES:
                bar.update(task, description=f"measuring {SIZES[size]} over {transport}")
                rows.append(_row(clients, transport, size, arguments.scale))
                bar.advance(task)
            for client in clients.values():
                _stop(client)
    _show(rows)
    keep(arguments.json, {**_MACHINE, "pyzmq": zmq.__version__}, rows=[row._asdict() for row in rows])


def _start(name: str, transport: str, folder: str) -> Client:
    there, back = _endpoints(name, transport, folder)
    tell, told = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(name, there, back, told, max(_CORES)), daemon=True
    )
    process.start()
    told.close()
    tell.recv()  # it is there
    _pin(0)
    torch.set_num_threads(1)
    return Client(RIVALS[name](there, back, False), tell, process)


def _endpoints(name: str, transport: str, folder: str) -> tuple[Any, Any]:
    if name == QUEUE:
        context = multiprocessing.get_context("spawn")
        return tp.Queue(64, ctx=context), tp.Queue(64, ctx=context)
    if transport == "ipc":
        return f"ipc://{folder}/{name[:4].strip()}-there", f"ipc://{folder}/{name[:4].strip()}-back"
    return f"tcp://127.0.0.1:{_free_port()}", f"tcp://127.0.0.1:{_free_port()}"


def _free_port() -> int:
    context = zmq.Context()
    with context.socket(zmq.PULL) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    context.term()
    return port


def _stop(client: Client) -> None:
    client.tell.send(None)
    client.end.close()
    client.process.join(20)


def _pin(index: int) -> None:
    """Stay on one core: the first for the measuring process, the last for the other."""
    os.sched_setaffinity(0, {sorted(_CORES)[index]})


def _serve(name: str, there: Any, back: Any, told: Connection, core: int) -> None:
    """The other process: echo, or take a stream and answer its last message."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    end = RIVALS[name](there, back, True)
    told.send("here")
    kept: deque[torch.Tensor] = deque(maxlen=2)
    while (task := told.recv()) is not None:
        count, each = task
        for index in range(count):
            kept.append(_looked_at(end.receive()))
            if each or index == count - 1:
                end.send(kept[-1] if each else torch.ones(1, dtype=torch.uint8))
    kept.clear()
    end.close()


def _looked_at(tensor: torch.Tensor) -> torch.Tensor:
    if (tensor[0].item(), tensor[-1].item()) != (7, 9):
        raise RuntimeError(f"a tensor of {len(tensor)} bytes came damaged")
    return tensor


def _row(clients: dict[str, Client], transport: str, size: int, scale: float) -> Row:
    tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8) for _ in range(4)]
    for tensor in tensors:
        tensor[0], tensor[-1] = 7, 9
    rounds = max(2, round(ROUNDS * scale))
    times: dict[str, list[list[float]]] = {name: [] for name in clients}
    rates: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(rounds):
        for name, client in clients.items():
            times[name].append(_echoes(client, tensors, max(FEWEST[size], round(ECHOES[size] * scale))))
            rates[name].append(_stream(client, tensors, max(FEWEST[size], round(STREAM[size] * scale))))
    p50 = {name: [statistics.median(found) for found in all_] for name, all_ in times.items()}
    return Row(
        transport,
        size,
        {name: statistics.median(found) * 1e6 for name, found in p50.items()},
        {name: statistics.median(_p99(found) for found in all_) * 1e6 for name, all_ in times.items()},
        {name: statistics.median(found) for name, found in rates.items()},
        {name: ratio(p50[name], p50[BARE]) for name in OURS},
        {name: ratio(rates[name], rates[BARE]) for name in OURS},
        ratio(p50["ours"], p50[QUEUE]),
    )


def _echoes(client: Client, tensors: list[torch.Tensor], count: int) -> list[float]:
    end = client.end
    client.tell.send((count, True))
    found = []
    for index in range(count):
        start = time.perf_counter()
        end.send(tensors[index % 4])
        back = end.receive()
        found.append((time.perf_counter() - start) / 2)
        _looked_at(back)
    return found[count // 5 :]  # the first fifth warms up


def _stream(client: Client, tensors: list[torch.Tensor], count: int) -> float:
    end = client.end
    client.tell.send((count, False))
    start = time.perf_counter()
    for index in range(count):
        end.send(tensors[index % 4])
    end.receive()
    return count / (time.perf_counter() - start)


def _p99(found: list[float]) -> float:
    return sorted(found)[int(len(found) * 0.99)]


def _show(rows: list[Row]) -> None:
    console = Console(width=80)
    table = Table(title="Producer and Consumer beside bare two-frame pyzmq (copy=False)", box=box.SIMPLE_HEAD)
    for heading in ("", "", "one way p50 us", "p99 us", "messages/s"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        label = f"{SIZES[row.size]} {row.transport}"
        for name in RIVALS:
            figures = (row.one_way[name], row.one_way_p99[name], row.rate[name])
            table.add_row(label, name, *(f"{figure:,.0f}" for figure in figures))
            label = ""
        for name in OURS:
            one_way, rate = _spread(*row.one_way_ratio[name]), _spread(*row.rate_ratio[name])
            table.add_row("", f"{name} / bare", one_way, "", rate, style="bold")
        found = _spread(*row.queue_ratio)
        kept = "" if row.queue_ratio[0] <= MOST else f"over {MOST}"
        table.add_row("", "ours / Queue", found, kept, "", style="bold", end_section=True)
    console.print(table)
    console.print(
        "one way: half an echo's round trip, a process on each of two cores; ratios: the\n"
        "median of alternating rounds (lowest..highest); one way under 1 and messages/s\n"
        "over 1: ours is ahead; ours: by shared memory, as by default; in frames: without",
        style="dim",
        highlight=False,
    )
    console.print(" · ".join(f"{name} {value}" for name, value in _MACHINE.items()), style="dim", highlight=False)


def _spread(ratio: float, lowest: float, highest: float) -> str:
    return f"{ratio:.2f} ({lowest:.2f}..{highest:.2f})"
