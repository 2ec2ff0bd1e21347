"""A default device that the program sets is for its own tensors: what arrives lies where it lay, or on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from children import in_thread

import tensorpipe_ipc as tp

LIMIT = 20
LARGE = torch.arange(100_000.0)
TREES: dict[str, Any] = {
    "one small": torch.arange(10.0),
    "one large": LARGE,
    "several": [LARGE, torch.arange(10.0), b"", b"bytes"],
    "views": [LARGE, LARGE[3:]],
    "gaps": LARGE[::2],
    "an empty one": torch.empty(0, 3),
    "a conjugate": torch.zeros(5000, dtype=torch.complex64).conj(),
    "a dtype that NumPy lacks": torch.ones(5000, dtype=torch.bfloat16),
    "a parameter": torch.nn.Parameter(LARGE.clone()),
    "a storage": torch.arange(5000.0).untyped_storage(),
    "an array": np.arange(100_000),
}


@pytest.fixture(autouse=True)
def meta() -> Any:
    """Tensors that are made without a device have no bytes."""
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("serializer", ["raw", "torch_save"])
@pytest.mark.parametrize("name", TREES)
def test_it_changes_nothing_of_a_queue(name: str, serializer: str) -> None:
    queue = tp.Queue(serializer=serializer)
    for options in ({}, {"copy": True}, {"copy": False}):
        queue.put(TREES[name])
        zoo.same(TREES[name], queue.get(timeout=LIMIT, **options))
    queue.put_many(TREES[name] for _ in range(2))
    for got in queue.get_many(2):
        zoo.same(TREES[name], got)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_it_changes_nothing_of_a_pair_of_ends(name: str, shared_memory: str) -> None:
    with (
        tp.Consumer("default-device", shared_memory=shared_memory) as consumer,
        tp.Producer("default-device", shared_memory=shared_memory) as producer,
    ):
        putting = in_thread(lambda: producer.put(TREES[name], timeout=LIMIT))
        zoo.same(TREES[name], consumer.get(timeout=LIMIT))
        putting()


def _made(ctx: Any) -> Any:
    return ctx.empty((100_000,))


def _lent(ctx: Any) -> Any:
    with ctx.Queue().loan((100_000,), torch.float32) as lent:
        return lent


@pytest.mark.parametrize("make", [_made, _lent])
def test_memory_where_the_consumer_reads_is_the_cpus(make: Callable[[Any], Any]) -> None:
    ctx = tp.get_context("fork")
    tensor = make(ctx)
    assert tensor.is_cpu


def test_a_put_that_moves_moves() -> None:
    ctx = tp.get_context("fork")
    there, tensor = ctx.Queue(), ctx.empty((100_000,)).fill_(3)
    there.put(tensor, move=True)
    assert not tensor.numel()
    assert there.get(timeout=LIMIT).unique().tolist() == [3.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_floats_are_narrowed_and_restored(dtype: torch.dtype) -> None:
    queue = tp.Queue(wire_dtype=dtype)
    queue.put({"large": LARGE, "small": LARGE[:10].clone()})
    got = queue.get(timeout=LIMIT)
    assert got["large"].is_cpu
    assert torch.equal(got["large"], LARGE.to(dtype).to(torch.float32))
    assert got["small"].tolist() == list(range(10))
