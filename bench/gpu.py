"""GPU tensors from one process to another: one way, and a stream, beside other ways and the ceilings. Needs a GPU.

A tensor lies on the GPU of the one process, and is wanted on that of the other, on its current stream: the clock stops when
a sum over it is there. Ours go by CUDA IPC (where the self-test passes: the table says if not) and staged; the others are
``.cpu()``, our Queue and ``.cuda()``, torch's own queue, which shares the memory itself, and the same through
multiprocessing's. The ceilings are a copy to page-locked memory and back, and a copy on the GPU.

Rounds alternate between the rivals, and figures are medians. The content is checked at the end of each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from rich import box
from rich.console import Console
from rich.table import Table

import tensorpipe_ipc as tp
from bench.measure import machine

__all__ = ["Found", "add_arguments", "measure", "pattern", "round_trip", "run", "show", "why_not"]

SIZES = {"400 B": 400, "4 MB": 4_000_000, "100 MB": 100_000_000}
MESSAGES = {"400 B": 200, "4 MB": 100, "100 MB": 20}  # a round
ROUNDS = 9
PATIENCE = 60.0


class Ours:
    """Our Queue. Staged."""

    cuda_ipc, by_hand = False, False

    def __init__(self, device: str) -> None:
        context = tp.get_context("spawn")
        self._device = device
        self.there, self.back = (context.Queue(4, cuda_ipc=self.cuda_ipc) for _ in range(2))

    def put(self, queue: Any, tensor: torch.Tensor) -> None:
        """Send one."""
        queue.put(tensor.cpu() if self.by_hand else tensor)

    def get(self, queue: Any) -> Any:
        """Receive one, on the GPU."""
        if not self.by_hand:
            return queue.get(timeout=PATIENCE, device=self._device)
        got = queue.get(timeout=PATIENCE)
        return got.to(self._device) if isinstance(got, torch.Tensor) else got

    def remark(self) -> str:
        """Return the table's remark on it."""
        return str(self.there.statistics().staged_because)


class ByIpc(Ours):
    """The same by CUDA IPC."""

    cuda_ipc = True


class ByHand(Ours):
    """``.cpu()`` and ``.cuda()`` around it."""

    by_hand = True


class Torch:
    """torch.multiprocessing's Queue: by CUDA IPC for GPU tensors."""

    def __init__(self, device: str) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._device = device
        self.there, self.back = context.Queue(4), context.Queue(4)

    def put(self, queue: Any, tensor: torch.Tensor) -> None:
        """Send one."""
        queue.put(tensor)

    def get(self, queue: Any) -> Any:
        """Receive one: the sender's own memory."""
        return queue.get(timeout=PATIENCE)

    def remark(self) -> str:
        """Nothing."""
        return ""


RIVALS: dict[str, Any] = {
    "ours, cuda_ipc=True": ByIpc,
    "ours, staged": Ours,
    ".cpu(), ours, .cuda()": ByHand,
    "torch.multiprocessing": Torch,
}
CEILINGS = ("page-locked, there and back", "a copy on the GPU")


class Found(NamedTuple):
    """The result of one way at one size."""

    way: str
    size: str
    microseconds: float  # one way: half a round trip; of a ceiling, the copy
    gigabytes_a_second: float  # of a stream; of a ceiling, the copy
    remark: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--scale", type=float, default=1.0, help="a fraction of the rounds and messages")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write what was asked for. Without a GPU: one line, and exit status 1."""
    reason = why_not()
    if reason:
        sys.exit(f"python -m bench gpu: {reason}")
    rows = [row for size in SIZES for row in measure(size, arguments.scale, "cuda")]
    host = {**machine(), "gpu": torch.cuda.get_device_name()}
    show(rows, host)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"machine": host, "scale": arguments.scale, "rows": [row._asdict() for row in rows]}, file)


def why_not() -> str:
    """Return why it cannot be measured here; "" if it can."""
    if not torch.version.cuda:
        return f"this torch ({torch.__version__}) is built without CUDA; install one that is, and run it where a GPU is"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device here"


def measure(size: str, scale: float, device: str) -> Iterator[Found]:
    """Every rival in turn, in each round; and the ceilings.

    Args:
        device: "cuda"; or "cpu", where nothing but the program itself is to be tried.
    """
    tensor = pattern(SIZES[size], device)
    count, rounds = max(2, round(MESSAGES[size] * scale)), max(1, round(ROUNDS * scale))
    one_way: dict[str, list[float]] = {name: [] for name in RIVALS}
    stream: dict[str, list[float]] = {name: [] for name in RIVALS}
    context = torch.multiprocessing.get_context("spawn")
    pairs = {}
    try:
        for name, rival in RIVALS.items():
            way = rival(device)
            process = context.Process(target=_serve, args=(name, device, way.there, way.back), daemon=True)
            process.start()
            pairs[name] = way, process
        for number in range(rounds + 1):  # the first round warms up, and has the self-tests
            for name, (way, _) in pairs.items():
                trip, flow = round_trip(way, tensor, count), _flow(way, tensor, count)
                if number:
                    one_way[name].append(trip)
                    stream[name].append(flow)
        for name, (way, process) in pairs.items():
            way.there.put(None)
            process.join(20)
            rate = SIZES[size] / statistics.median(stream[name]) / 1e9
            yield Found(name, size, 1e6 * statistics.median(one_way[name]), rate, way.remark())
    finally:
        for _, process in pairs.values():
            process.kill()
            process.join()
    for name, seconds in zip(CEILINGS, _ceilings(tensor, count), strict=True):
        yield Found(name, size, 1e6 * seconds, SIZES[size] / seconds / 1e9)


def pattern(nbytes: int, device: str) -> torch.Tensor:
    tensor = torch.ones(nbytes, dtype=torch.uint8, device=device)
    tensor[0], tensor[-1] = 7, 9
    return tensor


def round_trip(way: Any, tensor: torch.Tensor, count: int) -> float:
    """Seconds one way: to the other process and back, halved."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        way.put(way.there, tensor)
        got = way.get(way.back)
        total = int(got[:1].sum()) + int(got[-1:].sum())  # which waits for it
        found.append((time.perf_counter() - began) / 2)
        if total != 16 or len(got) != len(tensor):
            raise RuntimeError(f"a tensor of {len(got)} bytes came damaged")
    return statistics.median(found)


def _flow(way: Any, tensor: torch.Tensor, count: int) -> float:
    """Seconds for each message of a stream that the other process takes."""
    way.there.put(count)
    began = time.perf_counter()
    for _ in range(count):
        way.put(way.there, tensor)
    if way.back.get(timeout=PATIENCE) != "taken":
        raise RuntimeError("a tensor of a stream came damaged")
    return (time.perf_counter() - began) / count


def _serve(name: str, device: str, there: Any, back: Any) -> None:
    torch.set_num_threads(1)
    way = RIVALS[name].__new__(RIVALS[name])
    way._device = device
    while (got := way.get(there)) is not None:
        if isinstance(got, torch.Tensor):
            way.put(back, got)
            continue
        total = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(got):
            tensor = way.get(there)
            total += tensor[:1].sum() + tensor[-1:].sum()
        back.put("taken" if int(total) == 16 * got else "damaged")


def _ceilings(tensor: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds for a copy to page-locked memory and back, and for one on the GPU."""
    is_gpu = tensor.is_cuda
    locked, other = torch.empty(len(tensor), dtype=torch.uint8, pin_memory=is_gpu), torch.empty_like(tensor)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(count + 1):
        for times, steps in ((found[0], ((locked, tensor), (other, locked))), (found[1], ((other, tensor),))):
            began = time.perf_counter()
            for to, origin in steps:
                to.copy_(origin, non_blocking=True)
            if is_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return statistics.median(found[0][1:]), statistics.median(found[1][1:])


def show(rows: list[Found], host: dict[str, str]) -> None:
    """Print the table: at most 100 columns wide."""
    console = Console(width=100)
    table = Table(title="GPU tensors from one process to another", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("", "", "one way us", "GB/s", ""):
        table.add_column(heading, justify="right" if len(heading) > 1 else "left")
    before = ""
    for row in rows:
        if row.size != before:
            table.add_section()
        style = "dim" if row.way in CEILINGS else "bold" if row.way.startswith("ours") else ""
        remark = f"staged: {row.remark}" if row.remark else ""
        size = row.size if row.size != before else ""
        table.add_row(size, row.way, f"{row.microseconds:,.1f}", f"{row.gigabytes_a_second:,.2f}", remark, style=style)
        before = row.size
    console.print(table)
    console.print("one way: half a round trip; ceilings: the copy alone", style="dim", highlight=False)
    console.print(" · ".join(f"{name} {value}" for name, value in host.items()), style="dim", highlight=False)
