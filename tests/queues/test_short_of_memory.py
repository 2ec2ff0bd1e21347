"""A Queue where memory is short: what would be killed is refused, nothing is lost, and what is idle is never why."""

from __future__ import annotations

import contextlib
import gc
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from typing import Any

import numpy as np
import pytest
import torch
from crash_points import in_child, reap
from inside import set_lease_budget, shared_queue_of

import tensorpipe_ipc as tp
from tensorpipe_ipc import headroom
from tensorpipe_ipc.memory.segment import CAPACITY
from tensorpipe_ipc.queues.tensor_queue import Queue

MIB = 1 << 20
LIMIT = 10  # seconds


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | Callable[[], int]], None]:
    """Say how many bytes of memory the machine leaves from now on."""

    def leave(left: int | Callable[[], int]) -> None:
        monkeypatch.setattr(headroom, "_available", left if callable(left) else lambda: left)

    return leave


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Python's collector of cycles is off."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """torch's handles need multiprocessing's thread that hands out descriptors; it ends with the test."""
    yield
    resource_sharer.stop(timeout=5)
    gc.collect()


def _refused(there: Queue) -> dict[str, Callable[[Any], None]]:
    return {
        "put": lambda obj: there.put(obj, timeout=LIMIT),
        "put_many": lambda obj: there.put_many([obj], timeout=LIMIT),
        "move": lambda obj: there.put(obj, timeout=LIMIT, move=True),
    }


@pytest.mark.parametrize("many", [False, True])
def test_a_message_that_there_is_no_memory_to_copy_stays_for_the_next_get(many: bool, leave: Any) -> None:
    """A copy in a full cgroup would end the process. What needs no copy is got all the same."""
    there = Queue()
    there.put(torch.ones(24 * MIB, dtype=torch.uint8))
    get = (
        (lambda copy: there.get_many(1, LIMIT, copy=copy)[0])
        if many
        else (lambda copy: there.get(True, LIMIT, copy=copy))
    )
    leave(MIB)
    with pytest.raises(tp.OutOfMemory, match=r"taken, in 25,165,824 bytes: 1,048,576 bytes of memory are left"):
        get(True)
    assert there.qsize() == 1
    got = get(False)
    assert (int(got.sum()), there.statistics().lost, there.statistics().undecodable) == (24 * MIB, 0, 0)


@pytest.mark.parametrize("copied", ["get", "put"])
@pytest.mark.parametrize("size", [40_000, 4 * MIB])
def test_the_first_copy_after_a_while_is_refused_however_small_it_is(
    copied: str, size: int, leave: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has copied nothing for as long as others need to take what is left."""
    there, flipped = Queue(), np.ones(size, np.uint8)[::-1]
    there.put(torch.ones(size, dtype=torch.uint8))
    leave(size - 1)
    for _ in range(2):
        monkeypatch.setattr("tensorpipe_ipc.wire.room._looked", 0.0)  # long ago
        with pytest.raises(tp.OutOfMemory, match=f"{size - 1:,} bytes of memory are left"):
            _ = there.get(True, LIMIT, copy=True) if copied == "get" else there.put(flipped, timeout=LIMIT)
    leave(64 * MIB)
    there.put(flipped, timeout=LIMIT)
    assert [int(there.get(True, LIMIT, copy=True).sum()) for _ in range(2)] == [size, size]


@pytest.mark.parametrize("kind", ["gaps", "an array", "flipped"])
def test_a_put_needs_no_more_addresses_than_its_copy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``ulimit -v`` malloc itself refuses what there is no address for. So put asks for memory alone."""
    there = Queue()
    sent: Any = torch.ones(20 * MIB, 2, dtype=torch.uint8)[:, :1]
    sent = {"gaps": sent, "an array": sent.numpy(), "flipped": np.ones(20 * MIB, np.uint8)[::-1]}[kind]
    monkeypatch.setattr("tensorpipe_ipc.wire.room.addresses_left", lambda: 25 * MIB)
    for _ in range(2):
        there.put(sent, timeout=LIMIT)
        assert there.get(True, LIMIT, copy=False).nbytes == 20 * MIB


@pytest.mark.parametrize("waits", ["a message", "a lease"])
def test_idle_memory_that_is_just_enough_is_taken(waits: str, leave: Any) -> None:
    """Another process has it, and the machine leaves next to nothing. Nothing is asked for beyond what the message needs."""
    there, other = Queue(), Queue()
    child = in_child(lambda: _leave_idle(there))
    assert there.get(timeout=LIMIT).nbytes == 32 * MIB - 4096
    held = None
    if waits == "a message":
        other.put(1)
    else:
        other.put(torch.ones(MIB, dtype=torch.uint8))
        held = other.get(timeout=LIMIT)
    before = there.statistics().resident
    leave(lambda: MIB + before - there.statistics().resident)
    other.put(torch.ones(32 * MIB - 4096, dtype=torch.uint8), timeout=1)
    there.put("end", timeout=LIMIT)
    assert reap(child) == 0
    del held


def _leave_idle(there: Queue) -> None:
    there.put(np.ones(32 * MIB - 4096, np.uint8))  # torch would wait for its parent's threads
    while there.qsize():
        time.sleep(0.001)
    assert there.get(timeout=LIMIT) == "end"


def test_a_put_leaves_room_for_page_tables(leave: Any) -> None:
    """A cgroup counts them, too: the process was killed while it filled the block."""
    there = Queue()
    there.put(1)
    assert there.get(timeout=LIMIT) == 1
    leave(64 * MIB + (160 << 10))
    with pytest.raises(tp.SharedMemoryError, match="no 67104832 bytes free"):
        there.put(torch.ones(64 * MIB - 4096, dtype=torch.uint8), timeout=LIMIT)
    leave(66 * MIB)
    there.put(torch.ones(64 * MIB - 4096, dtype=torch.uint8), timeout=LIMIT)


def test_what_there_is_no_memory_to_copy_is_leased_unless_a_copy_was_asked_for(leave: Any) -> None:
    """A process leases half of the queue's memory at most, but where nothing else is possible."""
    there = Queue()
    there.put(1)
    assert there.get(timeout=LIMIT) == 1
    set_lease_budget(shared_queue_of(there).leases, MIB)
    there.put(torch.ones(24 * MIB, dtype=torch.uint8))
    leave(MIB)
    got = there.get(timeout=LIMIT)
    assert (int(got.sum()), there.statistics().bytes_leased) == (24 * MIB, 24 * MIB)
    del got
    assert there.statistics().bytes_leased == 0


def test_many_messages_that_are_copied_are_looked_at_together(leave: Any) -> None:
    """Each is small, and they are kept: once in 16 MiB the memory that is left is looked at."""
    there, copied = Queue(), [0]
    there.put(1)
    assert there.get(timeout=LIMIT) == 1
    leave(lambda: 100 * MIB - copied[0])
    for _ in range(14):
        there.put(torch.ones(8 * MIB, dtype=torch.uint8))
    with contextlib.suppress(tp.OutOfMemory):
        while not there.empty():
            copied[0] += there.get(True, LIMIT, copy=True).nbytes
    assert 80 * MIB <= copied[0] <= 100 * MIB


def test_leases_for_want_of_memory_keep_an_arena_within_its_capacity(leave: Any) -> None:
    """One message may be placed beyond it in an empty queue, and no further one while what was got is kept."""
    there = Queue()
    there.put(1)
    shared_queue_of(there).arena.words[CAPACITY] = 64 * MIB
    set_lease_budget(shared_queue_of(there).leases, MIB)
    kept = [there.get(timeout=LIMIT)]

    def put_and_keep() -> None:
        leave(1 << 40)
        there.put(torch.ones(24 * MIB, dtype=torch.uint8), timeout=0)
        leave(MIB)
        kept.append(there.get(timeout=0))

    put_and_keep()
    put_and_keep()
    with contextlib.suppress(tp.OutOfMemory):
        put_and_keep()
    with pytest.raises((tp.OutOfMemory, tp.Full)):
        put_and_keep()
    assert there.statistics().resident <= (64 + 24 + 1) * MIB
    del kept[1:]
    assert there.get(timeout=LIMIT).nbytes == 24 * MIB


def test_a_message_that_there_are_no_addresses_to_copy_to_is_leased_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``ulimit -v`` NumPy's own error would come."""
    there = Queue()
    there.put(torch.ones(24 * MIB, dtype=torch.uint8))
    monkeypatch.setattr("tensorpipe_ipc.wire.room.addresses_left", lambda: 40 * MIB)
    with pytest.raises(tp.OutOfMemory, match=r"25,165,824 bytes: 8,388,608 bytes of memory are left"):
        there.get(True, LIMIT, copy=True)
    set_lease_budget(shared_queue_of(there).leases, MIB)
    assert there.get(True, LIMIT).nbytes == 24 * MIB


def test_floats_that_there_is_no_memory_to_restore_stay_for_the_next_get(leave: Any) -> None:
    """They crossed narrow, and take twice as much in their own dtype."""
    there = Queue(wire_dtype=torch.float16)
    there.put(torch.ones(8 * MIB))
    leave(MIB)
    with pytest.raises(tp.OutOfMemory, match=r"33,554,432 bytes"):
        there.get(True, LIMIT)
    assert there.get(True, LIMIT, restore=False).dtype == torch.float16


@pytest.mark.parametrize("how", ["put", "put_many", "move"])
@pytest.mark.parametrize("kind", ["expanded", "flipped", "in a dict"])
@pytest.mark.usefixtures("no_collector")
def test_what_is_refused_is_kept_by_nobody(how: str, kind: str, leave: Any) -> None:
    """The error refers to the call's frames: that is no cycle, which only the collector would free."""
    obj: Any = np.ones(24 * MIB, np.uint8)[::-1] if kind == "flipped" else torch.ones(1).expand(6 * MIB)
    kept = weakref.ref(obj)
    obj = {"x": obj} if kind == "in a dict" else obj
    there = Queue()
    there.put(1)  # its capacity is of what the machine leaves now
    leave(MIB)
    with pytest.raises(tp.OutOfMemory):
        _refused(there)[how](obj)
    del obj
    assert kept() is None


@pytest.mark.parametrize("how", ["put", "put_many", "move"])
@pytest.mark.usefixtures("no_thread_stays")
def test_torchs_shared_memory_in_a_message_that_is_tried_again_arrives(how: str, leave: Any) -> None:
    """The first try had taken its handle back, as it found no memory for the rest of the message."""
    there = Queue()
    there.put(torch.ones(48 * MIB, dtype=torch.uint8))
    del (got := [there.get(True, LIMIT)])[:]
    assert not got
    leave(lambda: MIB if there.statistics().resident > 40 * MIB else 200 * MIB)
    shared = torch.zeros(4).share_memory_()
    _refused(there)[how]([shared, torch.ones(1).expand(6 * MIB)])
    there.get(True, LIMIT)[0].fill_(1)
    assert shared.sum() == 4


def test_many_arrays_that_put_gathers_are_looked_at_together(leave: Any) -> None:
    """Each of a message's is small."""
    there = Queue()
    there.put(1)
    objs = {number: np.ones(3 * MIB, np.uint8)[::-1] for number in range(30)}
    tracemalloc.start()  # resident memory may not grow: malloc has pages of earlier tests ready
    try:
        leave(lambda: 60 * MIB - tracemalloc.get_traced_memory()[0])
        with pytest.raises(tp.OutOfMemory, match="strides"):
            there.put(objs, timeout=LIMIT)
    finally:
        tracemalloc.stop()
    assert there.statistics().resident < MIB


@pytest.mark.parametrize("how", ["put", "put_many", "move"])
@pytest.mark.parametrize("kind", ["expanded", "flipped", "in a list"])
def test_idle_memory_is_given_back_before_a_refusal(how: str, kind: str, leave: Any) -> None:
    """There is no memory to gather in as long as the queue holds so much ready."""
    there = Queue()
    there.put(torch.ones(48 * MIB, dtype=torch.uint8))
    del (got := [there.get(True, LIMIT)])[:]
    assert not got
    leave(lambda: MIB if there.statistics().resident > 40 * MIB else 200 * MIB)
    obj: Any = torch.ones(1).expand(6 * MIB) if kind == "expanded" else np.ones(24 * MIB, np.uint8)[::-1]
    _refused(there)[how]([obj] if kind == "in a list" else obj)
    assert there.statistics().resident < 40 * MIB
    there.get(True, LIMIT)


class Box:
    """It has anything."""

    def __init__(self, content: Any) -> None:
        self.content = content


@pytest.mark.parametrize("how", ["put", "put_many", "move"])
@pytest.mark.parametrize("kind", [list, Box, set])
@pytest.mark.usefixtures("no_collector")
def test_a_tensor_with_history_that_is_refused_is_kept_by_nobody(how: str, kind: Any) -> None:
    """Nor is what lies beside it."""
    beside = torch.ones(3)
    kept, there = weakref.ref(beside), Queue()
    obj: Any = kind([torch.ones(2, requires_grad=True) * 2, beside])
    with pytest.raises(tp.UnsupportedLeaf, match="history"):
        _refused(there)[how](obj)
    del obj, beside
    assert kept() is None
