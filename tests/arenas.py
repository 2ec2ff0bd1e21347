"""Contexts with a small arena of their own, and what lies in it: for the tests of moving, loans and leases."""

from __future__ import annotations

import contextlib
import gc
import queue
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorpipe_ipc.memory.arena import HOLDER, KEPT, STEPS, Arena
from tensorpipe_ipc.memory.segment import Segment
from tensorpipe_ipc.queues.context import get_context
from tensorpipe_ipc.shared_queue.attachment import Attachment

CAPACITY = 64 << 20


@pytest.fixture
def ctx() -> Iterator[Any]:
    """One whose children are forked. They compute in one thread: those of OpenMP do not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = small_context()
    yield made
    vars(made).clear()
    torch.set_num_threads(threads)


def small_context(method: str = "fork", capacity: Any = CAPACITY) -> Any:
    ctx = get_context(method).__class__()
    ctx.__dict__["_attachment"] = Attachment(Arena(Segment.create(1 << 32), capacity))
    ctx.tensorpipe_attachment().attach()
    return ctx


def blocks_in_use(ctx: Any) -> Any:
    """Return how many blocks are not free, by step. Blocks of the queues' own records do not count."""
    gc.collect()
    return _blocks(ctx)


def _blocks(ctx: Any) -> Any:
    attachment, found = ctx.tensorpipe_attachment(), {}
    attachment.leases.settle()
    arena = attachment.arena
    for start, size_class, units, _ in arena.all_extents():
        for block in arena.states(start, size_class, units)[0].tolist():
            state = arena.words[block >> 3] & HOLDER
            if state and state & 15 != KEPT:
                found[STEPS[state & 15]] = found.get(STEPS[state & 15], 0) + 1
    return found


def left_in(ctx: Any) -> Any:
    """``blocks_in_use``, once what dead children had is taken from them."""
    found = {}
    for collect in (lambda: 0, gc.collect):  # which takes 50 ms and more, so only where something is left
        collect()
        ctx.tensorpipe_attachment().recover_dead()
        ctx.tensorpipe_attachment().orphans.destroy_all()
        found = _blocks(ctx)
        if not found:
            break
    return found


def drained(there: Any) -> Any:
    got = []
    with contextlib.suppress(queue.Empty):
        while True:
            got.append(there.get_nowait())
    return got
