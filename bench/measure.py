"""The way of measuring: rounds that alternate between rivals, peak memory in a fresh child, on what machine; and kept."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorpipe_ipc.benchmark.machine import machine, versions

__all__ = ["Ratio", "child", "interleaved", "keep", "machine", "peak_beyond", "ratio", "versions"]

ROUNDS = 10
Ratio = tuple[float, float, float]  # the median of rounds, the lowest and the highest


def interleaved(actions: Mapping[str, Callable[[], object]], iterations: int) -> dict[str, list[float]]:
    """Seconds for one call of each action, of each round. Every action has its turn in each.

    So whatever disturbs the machine for a while disturbs all alike. The first round warms up and does not count, nor
    does the first call of each turn: it finds the caches as the rival before has left them.

    Args:
        actions: what to call, by name.
        iterations: how often to call each, in all rounds together.
    """
    rounds = min(ROUNDS, iterations)
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            seconds = _timed(action, max(1, iterations // rounds))
            if number:
                times[name].append(seconds)
    return times


def _timed(action: Callable[[], object], iterations: int) -> float:
    action()
    start = time.perf_counter()
    for _ in range(iterations):
        action()
    return (time.perf_counter() - start) / iterations


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of the rounds' own ratios the median, the lowest and the highest."""
    found = [one / other for one, other in zip(ours, theirs, strict=True)]
    return statistics.median(found), min(found), max(found)


def peak_beyond(action: Callable[[], object]) -> int:
    """Bytes of resident memory that an action needs at its peak beyond what this process holds before it.

    The kernel keeps the peak (VmHWM) and forgets it when asked to, so a peak between two looks is not missed. -1 where
    there is no such kernel. Call it in a fresh process: memory that was let go before would be used again, unseen.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmHWM")
        kept = action()
        peak = _status("VmHWM")
    except OSError:
        return -1
    del kept
    return max(0, peak - before)


def _status(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def keep(file: str | None, host: Mapping[str, str], **found: Any) -> None:
    """Write what was found on a machine as JSON, if a file was asked for."""
    if file is not None:
        Path(file).write_text(json.dumps({"machine": host, **found}, indent=1), encoding="utf-8")


def child(code: str) -> str:
    """Run ``code`` in a fresh Python from the project's root. Return what it prints."""
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"a measuring process failed:\n{done.stderr}")
    return done.stdout
