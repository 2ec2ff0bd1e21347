"""Refusals of queues and ends: arguments that are not numbers, and tensors that are larger than memory."""

from __future__ import annotations

import re
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from children import in_thread

import tensorpipe_ipc as tp


@pytest.mark.parametrize("maxsize", [1.5, "x", None])
def test_a_maxsize_that_is_no_whole_number(maxsize: Any) -> None:
    """It is named; other kinds of whole numbers are taken, as multiprocessing does."""
    with pytest.raises(TypeError, match=re.escape(f"maxsize={maxsize!r} is a {type(maxsize).__name__}; give a whole")):
        tp.Queue(maxsize)
    queue = tp.Queue(np.int64(1))
    queue.put(1)
    assert queue.full()


def test_sizes_and_counts_are_whole_numbers_of_any_kind() -> None:
    """NumPy's ints are taken as torch takes them; what is no whole number is named."""
    queue, context = tp.Queue(), tp.get_context("spawn")
    queue.put_many([1, 2, 3])
    assert queue.get_many(np.int64(2)) == [1, 2]
    assert context.empty((np.int64(2), 3)).shape == (2, 3)
    assert context.empty(np.int32(5)).shape == (5,)
    with queue.loan((np.int64(2), 3)) as lent:
        assert lent.shape == (2, 3)
    with pytest.raises(TypeError, match=r"max_items=2\.5 is a float; give a whole number"):
        queue.get_many(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_items=0: give a whole number of 1 to"):
        queue.get_many(0)
    with pytest.raises(TypeError, match=r"a shape of \(2\.5, 3\): give a tuple of whole numbers"):
        context.empty((2.5, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sizes are not negative"):
        context.empty((-1, 3))


def test_a_peer_timeout_without_an_end_is_inf() -> None:
    """Its errors offer what it takes, and not the None of other timeouts."""
    for wrong in (-1, None, float("nan")):
        with pytest.raises((TypeError, ValueError), match=rf"peer_timeout={wrong}.*seconds, or math\.inf for ever"):
            tp.Consumer("unused", peer_timeout=wrong)  # type: ignore[arg-type]
    tp.Consumer("unused", peer_timeout=float("inf")).close()


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [np.int64(1), np.float32(0.5), Fraction(1, 2)])
def test_a_timeout_is_a_number_of_any_real_kind(timeout: Any) -> None:
    """Seconds that a program computed by NumPy are taken, as multiprocessing takes them, by queues and by ends."""
    queue = tp.Queue(3)
    queue.put(1, timeout=timeout)
    queue.put_many([2], timeout=timeout)
    with queue.loan(3, torch.float32, timeout=timeout) as lent:
        lent.fill_(3)
    assert queue.get(timeout=timeout) == 1
    assert queue.get_many(1, timeout) == [2]
    assert queue.get(timeout=timeout).tolist() == [3, 3, 3]
    began = time.monotonic()
    with pytest.raises(tp.Empty):
        queue.get(timeout=timeout)
    assert time.monotonic() - began >= float(timeout)
    with tp.Consumer("unused", peer_timeout=timeout) as consumer, pytest.raises(tp.Empty):
        consumer.get(timeout=timeout)
    tp.Producer("unused", linger=timeout).close()


@pytest.mark.parametrize("timeout", ["x", [], 1j])
def test_a_timeout_that_is_no_number(timeout: Any) -> None:
    """It is named, by every call that has one; nothing is put or taken."""
    queue = tp.Queue(2)
    queue.put("first")
    calls = (
        lambda: queue.put(1, timeout=timeout),
        lambda: queue.put_many([1], timeout=timeout),
        lambda: queue.get(timeout=timeout),
        lambda: queue.get_many(1, timeout),
    )
    for call in calls:
        with pytest.raises(
            TypeError, match=re.escape(f"timeout={timeout!r} is a {type(timeout).__name__}; give seconds")
        ):
            call()
    assert queue.get_many(2) == ["first"]


@pytest.mark.parametrize("how", ["queue", "queue narrowed", "tcp", "tcp narrowed", "ipc", "ipc narrowed", "shared"])
def test_an_expanded_tensor_larger_than_memory(how: str) -> None:
    """It is refused with its size, in whatever way it was to go; the next message goes."""
    way, _, narrowed = how.partition(" ")
    size, wire = 1 << 42, torch.float16 if narrowed else None
    expanded = torch.ones(1).expand(size)
    refused = pytest.raises((tp.OutOfMemory, tp.SharedMemoryError), match=r"[\d,]{13,} bytes.*send it .*in parts")
    if way == "queue":
        queue = tp.Queue(1, wire_dtype=wire)
        with refused:
            queue.put(expanded)
        queue.put("next")
        assert queue.get() == "next"
        return
    place = "tcp://127.0.0.1:0" if way == "tcp" else "expanded"
    sharing: Any = "auto" if way == "shared" else "off"
    with (
        tp.Consumer(place, shared_memory=sharing) as consumer,
        tp.Producer(consumer.endpoint, shared_memory=sharing, wire_dtype=wire, maxsize=1) as producer,
    ):
        taken = in_thread(lambda: consumer.get(10))
        producer.put("first", 10)
        assert taken() == "first"
        for timeout in (None, 1):
            with refused:
                producer.put(expanded, timeout)
        producer.put("next", 10)
        assert consumer.get(10) == "next"
        assert consumer.statistics().lost == 0
