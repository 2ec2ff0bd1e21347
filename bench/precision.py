"""The savings and costs of a wire dtype: bytes, time, memory and error of float32 tensors, through shared memory and tcp."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import tensorpipe_ipc as tp
from bench.measure import Ratio, keep, machine, ratio

__all__ = ["Precise", "add_arguments", "run"]

SIZES = {"4 MB": 1_000_000, "100 MB": 25_000_000}  # items of float32
WIRE = (None, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
ROUNDS = {"4 MB": 40, "100 MB": 6}


class Precise(NamedTuple):
    """The result of one wire dtype at one size, over one transport."""

    transport: str
    size: str
    wire_dtype: str
    nbytes: int  # that crossed, of one message
    milliseconds: float  # from the begin of put to the tensor, restored; median
    unique: int  # bytes of unique memory that the receiver gained by holding one message
    shared: int  # the same of shared memory
    largest_relative_error: float  # of all items, found afterwards; 1: an item so small that it became 0
    median_relative_error: float
    to_float32: Ratio  # its time as a multiple of plain float32's in the same rounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--scale", type=float, default=1.0, help="a fraction of the rounds")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", metavar="PNG", help="draw the times there")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write what was asked for."""
    torch.set_num_threads(1)
    rows = [
        row
        for transport in ("shared memory", "tcp")
        for size in SIZES
        for row in measure(transport, size, arguments.scale)
    ]
    host = machine()
    Console(width=100).print(_table(rows))
    print(
        f"one way: from the begin of put to the restored tensor, of ends that have passed {WARM} such before\n"
        "memory: what the receiver gains by holding one message\n"
        "error: relative, the median and the worst item's; 1: an item so small that it became 0"
    )
    print(" · ".join(f"{name} {value}" for name, value in host.items()))
    keep(arguments.json, host, scale=arguments.scale, rows=[row._asdict() for row in rows])
    if arguments.plot:
        draw(rows, arguments.plot)


WARM, TIMED = 3, 4  # messages of a pair of ends: the first have memory to make that the others use again


def measure(transport: str, size: str, scale: float) -> Iterator[Precise]:
    """Every wire dtype in turn, in each round."""
    tensor = torch.randn(SIZES[size], generator=torch.Generator().manual_seed(0))
    context = multiprocessing.get_context("spawn")
    there, here = context.Pipe()
    child = context.Process(target=_receive, args=(here, transport), daemon=True)
    child.start()
    try:
        times: dict[Any, list[float]] = {dtype: [] for dtype in WIRE}
        found: dict[Any, tuple[int, int, int, float, float]] = {}
        for number in range(1 + max(1, round(ROUNDS[size] * scale))):
            for dtype in WIRE:
                there.send("time" if number else "hold")
                with tp.Producer(there.recv(), wire_dtype=dtype) as producer:
                    if number == 0:
                        producer.put(tensor, 60)
                        unique, shared, got = there.recv()
                        error = ((torch.from_numpy(got) - tensor) / tensor).abs()
                        worst, usual = float(error.max()), float(error.median())
                        found[dtype] = producer.statistics().bytes, unique, shared, worst, usual
                    else:
                        producer.put(torch.zeros(1), 60)  # they have met
                        there.recv()
                        for turn in range(WARM + TIMED):
                            began = time.perf_counter()
                            producer.put(tensor, 60)
                            taken = there.recv() - began
                            if turn >= WARM:
                                times[dtype].append(taken)
        there.send(None)
        child.join(20)
    finally:
        child.kill()
    for dtype in WIRE:
        name = str(dtype or torch.float32).removeprefix("torch.")
        nbytes, unique, shared, worst, usual = found[dtype]
        yield Precise(
            transport,
            size,
            name,
            nbytes,
            1e3 * statistics.median(times[dtype]),
            unique,
            shared,
            worst,
            usual,
            ratio(times[dtype], times[None]),
        )


def _receive(line: Any, transport: str) -> None:
    torch.set_num_threads(1)
    way: Any = "require" if transport == "shared memory" else "off"
    for task in iter(line.recv, None):
        with tp.Consumer("tcp://127.0.0.1:0", shared_memory=way) as consumer:
            line.send(consumer.endpoint)
            if task == "time":
                consumer.get(60)
                line.send(None)
                for _ in range(WARM + TIMED):
                    got = None
                    got = consumer.get(60)
                    line.send(time.perf_counter())  # CLOCK_MONOTONIC, which all processes share
            else:
                with tp.MemoryTracker(None, children=False) as memory:
                    got = consumer.get(60)
                    got.sum()  # a page counts once it was touched
                line.send((memory.growth.uss, memory.growth.shared, got.numpy()))
            del got


def _table(rows: list[Precise]) -> Table:
    table = Table(title="float32 noise over each wire dtype", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("wire dtype", no_wrap=True)
    for name in ("MB", "one way ms", "x float32", "unique MiB", "shared MiB", "error", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ("", "")
    for row in rows:
        if (row.transport, row.size) != before:
            table.add_row(f"{row.size}, {row.transport}", style="underline")
        table.add_row(
            f" {row.wire_dtype}",
            f"{row.nbytes / 1e6:,.1f}",
            f"{row.milliseconds:,.2f}",
            f"{row.to_float32[0]:.2f}",
            f"{row.unique / 2**20:,.1f}",
            f"{row.shared / 2**20:,.1f}",
            *(f"{error:.0e}" if error else "0" for error in (row.median_relative_error, row.largest_relative_error)),
        )
        before = row.transport, row.size
    return table


def draw(rows: list[Precise], path: str) -> None:
    """Write the picture: for each transport and size, each dtype's time as a multiple of float32's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys((row.transport, row.size) for row in rows))
    names = list(dict.fromkeys(row.wire_dtype for row in rows))
    colours = dict(zip(names, ("#666666", "#D55E00", "#0072B2", "#009E73", "#E69F00"), strict=True))
    figure, axis = pyplot.subplots(figsize=(11, 5.5), layout="constrained")
    width = 0.16
    for place, group in enumerate(groups):
        of = {row.wire_dtype: row for row in rows if (row.transport, row.size) == group}
        for index, name in enumerate(names):
            taller = of[name].to_float32[0]
            at = place + (index - (len(names) - 1) / 2) * width
            label = f"{name}: {of[name].nbytes / of['float32'].nbytes:.0%} of the bytes" if place == 0 else None
            axis.bar(at, taller, width * 0.92, color=colours[name], label=label)
            axis.annotate(f"{taller:.2f}", (at, taller), ha="center", va="bottom", fontsize=8)
    axis.axhline(1, color="#666666", linewidth=0.8)
    plain = {(row.transport, row.size): row.milliseconds for row in rows if row.wire_dtype == "float32"}
    named = [f"{size}, {transport}\nfloat32: {plain[transport, size]:,.1f} ms" for transport, size in groups]
    axis.set_xticks(range(len(groups)), named)
    axis.set_ylabel("time one way, in multiples of float32's")
    figure.legend(loc="outside right upper", frameon=False, title="crosses as")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.suptitle(
        "float32 tensors that cross in a narrower dtype: bars under the line are faster", x=0.01, ha="left", fontsize=14
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
