"""A put that waits, and another thread that meanwhile gives the tensors other memory, or gives them away."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from children import PATIENCE, in_thread, wait_until

import tensorpipe_ipc as tp
from tensorpipe_ipc.serializers.raw import Raw
from tensorpipe_ipc.wire.in_block import one_tensor_in_block
from tensorpipe_ipc.wire.message import encode

SIZE = 100_000  # items

TREES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor": lambda tensor: tensor,
    "a dict": lambda tensor: {"x": tensor},
    "several leaves": lambda tensor: [tensor, torch.ones(3)],
    "views of it": lambda tensor: [tensor, tensor[1:]],
    "in a pickle": lambda tensor: [tensor, {1, 2}],
}


def assign(tensor: torch.Tensor, there: Any) -> None:
    """Give the tensor other memory; its own is used again by whatever is put."""
    tensor.data = torch.zeros(10)
    there.put(torch.full((SIZE,), 42.0))


def move(tensor: torch.Tensor, there: Any) -> None:
    """Give the tensor away. Who gets it writes to it."""
    there.put(tensor, move=True)
    there.get(timeout=PATIENCE).fill_(42)


def first_of(got: Any) -> Any:
    """Return the tensor that is, or that comes first in, what has come."""
    return got["x"] if isinstance(got, dict) else got[0] if isinstance(got, list) else got


def wait_until_asleep(thread: threading.Thread) -> None:
    """Wait until a thread sleeps in the kernel."""

    def sleeps() -> bool:
        with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "S"

    wait_until(sleeps)


@pytest.mark.parametrize("change", [assign, move])
@pytest.mark.parametrize("tree", TREES)
def test_what_was_put_into_a_queue_arrives(ctx: Any, tree: str, change: Any) -> None:
    there, other, tensor = ctx.Queue(1), ctx.Queue(), ctx.empty(SIZE).fill_(3)
    there.put("full")
    thread = threading.Thread(target=there.put, args=(TREES[tree](tensor),), kwargs={"timeout": PATIENCE})
    thread.start()
    wait_until_asleep(thread)
    change(tensor, other)
    assert there.get() == "full"
    thread.join(PATIENCE)
    assert first_of(there.get(timeout=PATIENCE)).unique().tolist() == [3.0]


@pytest.mark.parametrize("change", [assign, move])
@pytest.mark.parametrize("tree", [name for name in TREES if name != "in a pickle"])
def test_what_was_put_into_a_producer_arrives(ctx: Any, transport: str, tree: str, change: Any) -> None:
    other, tensor = ctx.Queue(), ctx.empty(SIZE).fill_(3)
    with tp.Consumer("inproc://waits" if transport == "frames" else "waits") as consumer:
        with tp.Producer(consumer.endpoint, maxsize=1) as producer:
            taken = in_thread(lambda: consumer.get(PATIENCE))
            producer.put("met", PATIENCE)
            taken()
            producer.flush(PATIENCE)
            producer.put("full", PATIENCE)
            tensors = TREES[tree](tensor)
            thread = threading.Thread(target=producer.put, args=(tensors, PATIENCE))
            thread.start()
            wait_until_asleep(thread)
            change(tensor, other)
            assert consumer.get(PATIENCE) == "full"
            got = in_thread(lambda: consumer.get(PATIENCE))
            thread.join(PATIENCE)
            assert first_of(got()).unique().tolist() == [3.0]


class Meddling(Raw):
    """A serializer to which something happens just before it reads a tensor for the first time."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        super().__init__()
        self.meddle = [meddle]

    def encode(self, tensor: torch.Tensor) -> Any:
        if self.meddle:
            self.meddle.pop()()
        return super().encode(tensor)


ENCODED: dict[str, Callable[[torch.Tensor, Raw], Any]] = {
    "alone in a block": lambda tensor, raw: one_tensor_in_block(tensor, tensor.untyped_storage(), raw),
    **{
        name: lambda tensor, raw, make=make: encode(make(tensor), raw)  # type: ignore[misc]
        for name, make in TREES.items()
        if name != "in a pickle"
    },
}


@pytest.mark.parametrize("name", ENCODED)
def test_memory_that_a_tensor_is_given_while_it_is_read_is_kept_too(name: str) -> None:
    """The memory whose address was read is the new one: it stays as long as the message."""
    array, tensor = np.full(SIZE, 3.0), torch.zeros(SIZE, dtype=torch.float64)
    alive, is_given = weakref.ref(array), functools.partial(setattr, tensor, "data", torch.from_numpy(array))
    del array
    message = ENCODED[name](tensor, Meddling(is_given))
    del is_given
    tensor.data = torch.zeros(10)
    gc.collect()
    assert alive() is not None
    del message
    gc.collect()
    assert alive() is None
