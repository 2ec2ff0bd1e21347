"""Large tensors over tcp, in frames: Producer and Consumer beside pyzmq's two recipes and a bare loop over a socket.

A stream through loopback, ``shared_memory="off"``, from one process to another, on a core each where there are two. pyzmq's
are PUSH and PULL with two frames a message, ``copy=True`` and ``copy=False`` on both sides. The bare loop is ``sendall`` on
one side and ``recv_into`` three buffers in turn on the other, which are used again and never fresh. None of these limits
what is in flight, keeps what may have to be sent again, or says whose memory it is. Ours with keys on both sides
(``security=tp.Curve``) shows what encryption costs.

The sender's tensors rotate over four; the receiver keeps the last two and looks at the first and last item of each. Rounds
alternate between the rivals, and a ratio is the median of the rounds' ratios. Page faults are the receiver's, a message.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import resource
import socket
import statistics
import tempfile
import time
import warnings
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import zmq
from rich import box
from rich.console import Console
from rich.table import Table

import tensorpipe_ipc as tp
from bench.measure import Ratio, keep, machine, ratio
from tensorpipe_ipc.security import write_key_pair
from tensorpipe_ipc.zeromq.curve import key_pair

__all__ = ["add_arguments", "run"]

SIZES = {4_000_000: "4 MB", 100_000_000: "100 MB"}
STREAM = {4_000_000: 120, 100_000_000: 6}  # messages a round
ROUNDS = 9
ENOUGH = 1.2  # times the better of pyzmq's two
_CORES = sorted(os.sched_getaffinity(0))
_MACHINE = machine()  # before this process pins itself to one of its cores


class Ours:
    """A Producer and a Consumer, in frames."""

    def __init__(self, port: int, receives: bool, security: tp.Curve | None = None) -> None:
        endpoint = f"tcp://127.0.0.1:{port}"
        self._end: Any
        if receives:
            self._end = tp.Consumer(endpoint, shared_memory="off", security=security)
            self.receive = self._end.get
        else:
            self._end = tp.Producer(endpoint, security=security)
            self.send = self._end.put

    def close(self) -> None:
        """Let go of everything."""
        self._end.close()


class Encrypted(Ours):
    """The same, with keys on both sides. They lie in a folder."""

    def __init__(self, folder: str, port: int, receives: bool) -> None:
        end, other = (
            f"{folder}/{name}" for name in (("consumer", "producer") if receives else ("producer", "consumer"))
        )
        trust: dict[str, Any] = {"clients" if receives else "server": f"{other}.key"}
        super().__init__(port, receives, tp.Curve(f"{end}.key_secret", **trust))


class Copying:
    """PUSH and PULL, each frame copied on both sides."""

    copy = True

    def __init__(self, port: int, receives: bool) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL if receives else zmq.PUSH)
        self._socket.linger = 0
        (self._socket.bind if receives else self._socket.connect)(f"tcp://127.0.0.1:{port}")

    def send(self, tensor: torch.Tensor) -> None:
        """Send one."""
        self._socket.send_multipart([b"h" * 40, tensor.numpy().data], copy=self.copy)

    def receive(self) -> torch.Tensor:
        """Receive one. It may not be written to."""
        frame: Any = self._socket.recv_multipart(0, self.copy)[1]
        return torch.frombuffer(frame if self.copy else frame.buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Let go of everything."""
        self._socket.close()
        self._context.term()


class Lending(Copying):
    """PUSH and PULL, nothing copied."""

    copy = False


class Bare:
    """``sendall`` and ``recv_into`` on one connection. Both ends know the size."""

    size = 0

    def __init__(self, port: int, receives: bool) -> None:
        self._server = socket.create_server(("127.0.0.1", port)) if receives else None
        self._socket = None if receives else socket.create_connection(("127.0.0.1", port))
        self._buffers: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor) -> None:
        """Send one."""
        assert self._socket is not None
        self._socket.sendall(tensor.numpy().data)

    def receive(self) -> torch.Tensor:
        """Receive one, where the last but two was."""
        if self._socket is None:
            assert self._server is not None
            self._socket = self._server.accept()[0]
        if not self._buffers or len(self._buffers[0]) != self.size:
            self._buffers = [torch.zeros(self.size, dtype=torch.uint8) for _ in range(3)]
        self._buffers.append(self._buffers.pop(0))
        view, filled = self._buffers[0].numpy().data, 0
        while filled < self.size:
            filled += self._socket.recv_into(view[filled:])
        return self._buffers[0]

    def close(self) -> None:
        """Let go of everything."""
        for end in (self._socket, self._server):
            if end is not None:
                end.close()


RIVALS: dict[str, Any] = {
    "ours": Ours,
    "pyzmq copy=True": Copying,
    "pyzmq copy=False": Lending,
    "sendall, recv_into": Bare,
}
OURS, KEYS, PYZMQ, BARE = "ours", "ours, with keys", ("pyzmq copy=True", "pyzmq copy=False"), "sendall, recv_into"


class Row(NamedTuple):
    """The result for one size: GB/s and page faults a message by rival, and ratios of ours (median, lowest, highest)."""

    size: int
    rate: dict[str, float]
    faults: dict[str, int]
    to_pyzmq: Ratio  # to the better one in each round
    to_bare: Ratio
    keys_to_none: Ratio


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--scale", type=float, default=1.0, help="a fraction of the rounds and messages")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write what was asked for."""
    os.sched_setaffinity(0, {_CORES[0]})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in ("consumer", "producer"):
            write_key_pair(f"{folder}/{name}", *key_pair())
        rivals = {**RIVALS, KEYS: functools.partial(Encrypted, folder)}
        rows = [_row(size, arguments.scale, rivals) for size in SIZES]
    _show(rows)
    keep(arguments.json, {**_MACHINE, "pyzmq": zmq.__version__}, rows=[row._asdict() for row in rows])


def _row(size: int, scale: float, rivals: dict[str, Any]) -> Row:
    tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8) for _ in range(4)]
    for tensor in tensors:
        tensor[0], tensor[-1] = 7, 9
    count = max(3, round(STREAM[size] * scale))
    rates: dict[str, list[float]] = {name: [] for name in rivals}
    faults: dict[str, list[int]] = {name: [] for name in rivals}
    pairs = {name: _start(make, size) for name, make in rivals.items()}
    for number in range(max(2, round(ROUNDS * scale)) + 1):
        for name, (end, tell, _) in pairs.items():
            tell.send(count)
            start = time.perf_counter()
            for index in range(count):
                end.send(tensors[index % 4])
            found = tell.recv()
            if number:  # the first round warms up
                rates[name].append(count * size / (time.perf_counter() - start) / 1e9)
                faults[name].append(found // count)
    for end, tell, process in pairs.values():
        tell.send(None)
        process.join(20)
        end.close()
        tell.close()
    pyzmq = [max(both) for both in zip(*(rates[name] for name in PYZMQ), strict=True)]
    return Row(
        size,
        {name: statistics.median(found) for name, found in rates.items()},
        {name: round(statistics.median(found)) for name, found in faults.items()},
        ratio(rates[OURS], pyzmq),
        ratio(rates[OURS], rates[BARE]),
        ratio(rates[KEYS], rates[OURS]),
    )


def _start(make: Any, size: int) -> tuple[Any, Connection, Any]:
    """Both ends of one rival: the one that sends here, the other in a process of its own."""
    tell, told = multiprocessing.Pipe()
    port = _free_port()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(make, port, size, told, _CORES[-1]), daemon=True
    )
    process.start()
    told.close()
    tell.recv()  # it is there
    return make(port, False), tell, process


def _serve(make: Any, port: int, size: int, told: Connection, core: int) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    Bare.size = size
    end = make(port, True)
    told.send("here")
    kept: deque[torch.Tensor] = deque(maxlen=2)
    while (count := told.recv()) is not None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(count):
            tensor = end.receive()
            if (tensor[0].item(), tensor[-1].item()) != (7, 9):
                raise RuntimeError(f"a tensor of {len(tensor)} bytes came damaged")
            kept.append(tensor)
            del tensor
        told.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    kept.clear()
    end.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _show(rows: list[Row]) -> None:
    console = Console(width=80)
    table = Table(title='A stream over tcp through loopback, shared_memory="off"', box=box.SIMPLE_HEAD)
    for heading in ("", "", "GB/s", "faults a message"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        label = SIZES[row.size]
        for name in row.rate:
            table.add_row(label, name, f"{row.rate[name]:.2f}", f"{row.faults[name]:,}")
            label = ""
        enough = "" if row.to_pyzmq[0] >= ENOUGH else f"under {ENOUGH}"
        table.add_row("", "ours / better pyzmq", _spread(row.to_pyzmq), enough, style="bold")
        table.add_row("", "ours / bare sockets", _spread(row.to_bare), "", style="bold")
        table.add_row("", "with keys / without", _spread(row.keys_to_none), "", style="bold", end_section=True)
    console.print(table)
    console.print("ratios: the median of alternating rounds (lowest..highest)", style="dim", highlight=False)
    console.print(" · ".join(f"{name} {value}" for name, value in _MACHINE.items()), style="dim", highlight=False)


def _spread(ratio: Ratio) -> str:
    return f"{ratio[0]:.2f} ({ratio[1]:.2f}..{ratio[2]:.2f})"
