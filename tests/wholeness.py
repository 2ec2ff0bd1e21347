"""After a death: is anything missing, or there twice?

The tests of deaths at every step take every n-th of them where that is many, so that they end within minutes. With
TENSORPIPE_IPC_STRIDE=1 in the environment they take all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tensorpipe_ipc.errors import Empty, Full
from tensorpipe_ipc.memory.arena import HOLDER, KEPT
from tensorpipe_ipc.shared_queue.attachment import Attachment


def drain(queue: Any) -> Any:
    got = []
    while True:
        try:
            got.append(bytes(queue.get(0).payload))
        except Empty:
            return got


def check_whole(attachment: Attachment, queue: Any, payload: Any) -> None:
    """Nothing is missing and nothing is there twice: places, credits, blocks."""
    queue.leases.settle()
    for i in range(queue.maxsize):
        queue.put(payload(bytes([i & 255])), timeout=0)
    if queue.maxsize:
        with pytest.raises(Full):
            queue.put(payload(b"one too many"), timeout=0)
    assert drain(queue) == [bytes([i & 255]) for i in range(queue.maxsize)]
    if queue.maxsize:
        assert sorted(credit & 0xFFFFFF for credit in queue.credits.snapshot()) == list(range(queue.maxsize))
    arena = attachment.arena
    steps = {
        arena.words[block >> 3] & HOLDER
        for start, size_class, units, _ in arena.all_extents()
        for block in arena.states(start, size_class, units)[0].tolist()
    }
    assert steps <= {0, KEPT}, f"blocks that nobody holds are not free: {sorted(map(hex, steps))}"


def stride(usual: Any) -> Any:
    """Return how many steps to go on by."""
    return int(os.environ.get("TENSORPIPE_IPC_STRIDE", usual))


def strides(fine: Any, coarse: Any) -> Any:
    """Parametrize a test by its ``step``: a coarse one in ``make test``, and the fine one with ``make kills``."""
    return pytest.mark.parametrize("step", [coarse, pytest.param(stride(fine), marks=pytest.mark.kills)])


def points(action_dies: Any, first: int = 1, stride: int = 1, limit: int = 20_000) -> Iterator[Any]:
    """Numbers of steps, up to the one at which the action was complete."""
    for point in range(first, limit, stride):
        if not action_dies(point):
            assert point > 20, "nothing was traced"
            return
        yield point
    raise AssertionError("the action never completes")
