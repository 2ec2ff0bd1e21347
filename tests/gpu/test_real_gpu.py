"""Staging and CUDA IPC on a real GPU (on_gpu.py). Skips itself with the reason where there is none."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
NAMES = ("round_trip", "streams", "failed_lock", "two_devices", "by_ipc", "kills", "fork", "no_growth")


def _ran(name: str, device: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(HERE / "on_gpu.py"), name, device],
        env=environment,
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
    return done.stdout


@functools.cache
def _why_not() -> str:
    if not torch.version.cuda:
        return "this torch is built without CUDA"
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout == "True\n"
    return "" if found else "torch finds no CUDA device here"


@pytest.mark.gpu
@pytest.mark.limit(600)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str) -> None:
    """Each program of on_gpu.py passes on a GPU."""
    if _why_not():
        pytest.skip(_why_not())
    _ran(name, "cuda")


@pytest.mark.kills
@pytest.mark.parametrize("name", ["round_trip", "by_ipc", "kills", "no_growth"])
def test_the_programs_themselves(name: str) -> None:
    """Each program that does anything without a GPU passes on the CPU, so that a GPU finds no slip of the pen."""
    _ran(name, "cpu")


def test_all_programs_are_run() -> None:
    """None of on_gpu.py's is forgotten here."""
    spec = importlib.util.spec_from_file_location("on_gpu", HERE / "on_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    programs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(programs)
    assert tuple(program.__name__ for program in programs.PROGRAMS) == NAMES
