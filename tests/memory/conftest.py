"""Fixtures of the shared-memory tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tensorpipe_ipc.memory.arena import Arena
from tensorpipe_ipc.memory.segment import Segment

LIMIT = 20  # seconds that any child may take


@pytest.fixture
def arena() -> Iterator[Any]:
    made = Arena(Segment.create(1 << 32), capacity=64 << 20)
    yield made
    vars(made).clear()  # pytest still refers to it when nothing_left_behind looks


@pytest.fixture
def child() -> Iterator[Any]:
    """Run something in a forked child, which then waits to be killed, with what it returned in hand."""
    pids = []

    def start(action: Callable[[], Any]) -> Any:
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT)
            try:
                kept = action()
                os.write(tell, b"ok")
                signal.pause()
            finally:
                os._exit(99)
            del kept
        pids.append(pid)
        os.close(tell)
        answer = os.read(told, 2)
        os.close(told)
        assert answer == b"ok", "the child failed"
        return pid

    yield start
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        os.waitpid(pid, 0)


@pytest.fixture
def kill() -> Any:
    def kill_and_reap(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, and left for the fixture to reap

    return kill_and_reap
