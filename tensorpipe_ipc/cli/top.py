"""``tensorpipe-ipc top``: shows your queues, live: each process's puts and gets, waiting messages, holders of memory.

It reads shared memory from outside (``shared_queue.survey``): the processes need not answer, so they may be busy or stopped.
It shows endpoints only if they share memory; endpoints that use frames have no memory to read.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from tensorpipe_ipc.cli.failure import Failure
from tensorpipe_ipc.limits import check_seconds
from tensorpipe_ipc.process import memory
from tensorpipe_ipc.shared_queue.survey import Part, QueueView, SegmentView, Use, survey

__all__ = ["Rate", "add_arguments", "figures", "rates", "run"]

MIB = 1 << 20


class Rate(NamedTuple):
    """The messages and bytes of one process and one queue in a second."""

    put: float
    bytes_put: float
    got: float
    bytes_got: float


Key = tuple[int, int, int, int]  # segment, queue, row, incarnation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (1)")
    parser.add_argument("--once", action="store_true", help="show one look, with the rates of one interval, and end")
    parser.add_argument("--json", action="store_true", help="with --once: as JSON, for scripts")


def run(arguments: argparse.Namespace) -> int:
    """Show the queues repeatedly, until Ctrl-C or until the terminal is gone. Under ``nohup`` no SIGHUP tells of its end."""
    if arguments.json and not arguments.once:
        raise Failure("--json goes with --once")
    try:
        interval = max(0.05, check_seconds(arguments.interval, "--interval"))
    except ValueError as error:
        raise Failure(str(error)) from None
    before, at = survey(), time.monotonic()
    if arguments.once:
        time.sleep(interval)
        found = survey()
        per_second = rates(before, found, time.monotonic() - at)
        if arguments.json:
            print(json.dumps(figures(found, per_second)))
        else:
            _print(found, per_second)
        return 0
    from rich.console import Console
    from rich.live import Live

    on_terminal = sys.stdout.isatty()
    try:
        with Live(console=Console(), screen=False, auto_refresh=False) as live:
            while not on_terminal or sys.stdout.isatty():
                time.sleep(interval)
                found, now = survey(), time.monotonic()
                live.update(_view(found, rates(before, found, now - at)), refresh=True)
                before, at = found, now
    except OSError:  # the terminal is gone, and its cursor with it
        if not on_terminal or sys.stdout.isatty():
            raise
    return 128 + signal.SIGHUP


def rates(before: list[SegmentView], now: list[SegmentView], seconds: float) -> dict[Key, Rate]:
    """Return the rate of each process and queue. New ones count from zero."""
    then = dict(_uses(before))
    found = {}
    for key, use in _uses(now):
        old = then.get(key)
        known = (old.put, old.bytes_put, old.got, old.bytes_got) if old is not None else (0, 0, 0, 0)
        counts = (use.put, use.bytes_put, use.got, use.bytes_got)
        found[key] = Rate(*(max(0, new - past) / seconds for new, past in zip(counts, known, strict=True)))
    return found


def figures(found: list[SegmentView], per_second: dict[Key, Rate]) -> dict[str, Any]:
    """Return all findings as plain data, in bytes and seconds."""
    return {
        "segments": [
            {
                "inode": segment.inode,
                "pids": segment.pids,
                "capacity": segment.capacity,
                "resident": segment.resident,
                "in_use": segment.in_use,
                "leased": segment.leased,
                "dead_swept": segment.swept,
                "dead_not_swept": segment.unswept,
                "messages_lost": segment.lost,
                "processes": [{**part._asdict(), "memory": _memory(part)} for part in segment.parts],
                "queues": [
                    {
                        **queue._asdict(),
                        "uses": [
                            {**use._asdict(), "per_second": per_second[_key(segment, queue, use)]._asdict()}
                            for use in queue.uses
                        ],
                    }
                    for queue in segment.queues
                ],
            }
            for segment in found
        ]
    }


def _uses(found: list[SegmentView]) -> Iterator[tuple[Key, Use]]:
    for segment in found:
        for queue in segment.queues:
            for use in queue.uses:
                yield _key(segment, queue, use), use


def _key(segment: SegmentView, queue: QueueView, use: Use) -> Key:
    return segment.inode, queue.number, use.row, use.incarnation


def _memory(part: Part) -> dict[str, int] | None:
    if not (part.here and part.alive):
        return None
    try:
        return memory(part.pid)._asdict()
    except (ProcessLookupError, PermissionError):
        return None


def _print(found: list[SegmentView], per_second: dict[Key, Rate]) -> None:
    from rich.console import Console

    console = Console()
    console.print(_view(found, per_second))


def _view(found: list[SegmentView], per_second: dict[Key, Rate]) -> Any:
    from rich.console import Group

    if not found:
        return "no queue of yours, and no endpoints that share memory"
    return Group(*(part for segment in found for part in (_queues(segment, per_second), _holders(segment))))


def _queues(segment: SegmentView, per_second: dict[Key, Rate]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=_title(segment), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("queue, process", no_wrap=True)
    for name in ("waiting", "MiB", "put/s", "MiB/s", "got/s", "MiB/s", "waits", "s waited"):
        table.add_column(name, justify="right")
    for queue in segment.queues:
        bound = f" of {queue.maxsize}" if queue.maxsize else ""
        shut = ", shut down" if queue.shut else ""
        of = [per_second[_key(segment, queue, use)] for use in queue.uses]
        sums = [sum(values) for values in zip(*of, strict=True)] if of else [0.0] * 4
        table.add_row(
            f"{queue.kind} {queue.number & 0xFFFFFFFF}{shut}",
            f"{queue.waiting}{bound}",
            _mib(queue.nbytes),
            *_rate(sums),
        )
        for use, rate in zip(queue.uses, of, strict=True):
            if use.alive:
                waited = (str(use.waits), f"{use.seconds_waited:,.1f}")
                table.add_row(f"  pid {use.pid}", "", "", *_rate(rate), *waited, style="dim")
    return table


def _holders(segment: SegmentView) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("process", no_wrap=True)
    for name in ("filling", "put", "held", "MiB held", "resident MiB", "unique MiB", "proport. MiB"):
        table.add_column(name, justify="right")
    for part in segment.parts:
        if part.alive or part.nbytes:
            of = _memory(part)
            held = (str(part.written), str(part.queued), str(part.held), _mib(part.nbytes_held))
            cells = [_mib(of[name]) for name in ("rss", "uss", "pss")] if of is not None else ["", "", ""]
            table.add_row(str(part).removesuffix(" (alive)"), *held, *cells)
    return table


def _title(segment: SegmentView) -> str:
    of = f" of at most {_mib(segment.capacity)}" if segment.capacity else ""
    dead = f"; dead: {segment.swept} swept, {segment.unswept} not yet" if segment.swept or segment.unswept else ""
    lost = f"; {segment.lost} messages lost with them" if segment.lost else ""
    return (
        f"\nshared memory {segment.inode}: {_mib(segment.resident)}{of} MiB, {_mib(segment.in_use)} in use{dead}{lost}"
    )


def _rate(rate: Any) -> tuple[str, ...]:
    put, bytes_put, got, bytes_got = rate
    return f"{put:,.0f}", _mib(bytes_put), f"{got:,.0f}", _mib(bytes_got)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.1f}"
