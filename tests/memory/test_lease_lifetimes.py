"""A received object lasts as long as anything lies on it, and its block comes back then: one test for each promise."""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
import time
from typing import Any, ClassVar

import pytest
import torch
from arenas import CAPACITY, blocks_in_use, small_context
from crash_points import in_child, reap
from inside import leave_addresses, set_lease_budget, shared_queue_of

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.shared_queue import get_end

SIZE = 100_000
MIB, PAGE = 1 << 20, 1 << 12
LIMIT = 20

KEEPERS = {
    "the tensor": lambda t: t,
    "a view": lambda t: t.view(100, -1)[3],
    "a slice": lambda t: t[5:7],
    "detach": lambda t: t.detach(),
    "numpy": lambda t: t.numpy(),
    "a view of an array": lambda t: t.numpy()[3:][1:],
    "the storage": lambda t: t.untyped_storage(),
    "dlpack": lambda t: t.__dlpack__(),
    "saved for backward": lambda t: (t.requires_grad_() * t).sum(),
    "a cycle": lambda t: (lambda box: box.append(box) or box)([t]),
}


def leased(there: Any, dtype: Any = torch.float32, **how: Any) -> Any:
    there.put(torch.full((SIZE,), 3, dtype=dtype))
    return there.get(**how)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in KEEPERS]
    + [(name, torch.bfloat16) for name in KEEPERS if name not in ("numpy", "a view of an array")],  # NumPy has none
)
def test_a_lease_is_kept_by(ctx: Any, name: str, dtype: torch.dtype) -> None:
    there = ctx.Queue()
    kept = KEEPERS[name](leased(there, dtype))
    assert blocks_in_use(ctx) == {"held": 1}
    for _ in range(3):
        there.put(torch.zeros(SIZE, dtype=dtype))
        there.get()
    if isinstance(kept, torch.Tensor) and kept.numel() > 1:
        assert kept.detach().float().unique().tolist() == [3.0]
    del kept
    assert blocks_in_use(ctx) == {}


@pytest.mark.parametrize("name", ["x", "small", "array"])
def test_each_leaf_of_a_message_keeps_its_block(ctx: Any, name: str) -> None:
    there = ctx.Queue()
    there.put({"x": torch.ones(SIZE), "small": torch.ones(4), "array": torch.ones(SIZE).numpy()})
    kept = there.get()[name]
    assert blocks_in_use(ctx) == {"held": 1}
    there.put(torch.zeros(3 * SIZE))
    there.get()
    assert kept.sum() == len(kept)
    del kept
    assert blocks_in_use(ctx) == {}


def test_it_is_released_by_another_thread(ctx: Any) -> None:
    box = [leased(ctx.Queue())]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join(LIMIT)
    assert blocks_in_use(ctx) == {}


def hold_until_exit(there: Any, told: Any) -> None:
    global _held
    _held = there.get(timeout=LIMIT)
    told.put(1)


_held = None


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.kills)])
def test_it_is_released_by_the_interpreters_exit(method: str) -> None:
    ctx = small_context(method)
    there, told = ctx.Queue(), ctx.Queue()
    there.put(torch.ones(SIZE))
    process = ctx.Process(target=hold_until_exit, args=(there, told))
    process.start()
    assert told.get(timeout=LIMIT) == 1
    process.join(LIMIT)
    assert process.exitcode == 0
    process.close()
    ctx.tensorpipe_attachment().recover_dead()
    assert blocks_in_use(ctx) == {}
    vars(ctx).clear()


def test_it_outlives_its_queue_and_its_context_while_others_use_the_arena(ctx: Any) -> None:
    there = ctx.Queue()
    there.put(torch.full((SIZE,), 3.0))
    told, tell = os.pipe()
    wait, go = os.pipe()

    def child() -> None:
        lease = there.get(timeout=LIMIT)
        shared_queue_of(there).close()
        vars(there).clear()
        vars(ctx).clear()
        gc.collect()
        os.write(tell, b"x")
        os.read(wait, 1)
        assert lease.unique().tolist() == [3.0]

    pid = in_child(child)
    os.read(told, 1)
    for _ in range(20):
        ctx.tensorpipe_attachment().recover_dead(adopt_extents=True)
        there.put(torch.zeros(SIZE))
        there.get()
    os.write(go, b"x")
    assert reap(pid) == 0
    for end in (told, tell, wait, go):
        os.close(end)


def test_it_outlives_its_killed_producer(ctx: Any) -> None:
    there = ctx.Queue()

    def child() -> None:
        there.put(torch.full((SIZE,), 3.0))
        os.kill(os.getpid(), signal.SIGKILL)

    reap(in_child(child))
    lease = there.get(timeout=LIMIT)
    ctx.tensorpipe_attachment().recover_dead(adopt_extents=True)
    for _ in range(20):
        there.put(torch.zeros(SIZE))
        there.get()
    assert lease.unique().tolist() == [3.0]


def test_a_forked_child_reads_what_its_parent_lets_go(ctx: Any) -> None:
    there = ctx.Queue()
    box = [leased(there)]
    read, write = os.pipe()

    def child() -> None:
        os.read(read, 1)
        assert box[0].unique().tolist() == [3.0]

    pid = in_child(child)
    box.clear()
    assert blocks_in_use(ctx) == {"held": 1}
    for _ in range(5):
        there.put(torch.zeros(SIZE))
        there.get()
    os.write(write, b"x")
    assert reap(pid) == 0
    assert blocks_in_use(ctx) == {}
    os.close(read)
    os.close(write)


def test_the_leases_of_a_killed_consumer_are_back_within_100_ms(ctx: Any) -> None:
    there, told = ctx.Queue(), ctx.Queue()
    count = CAPACITY // (4 << 20) - 1
    payload = torch.ones(1 << 20)

    def hold() -> None:
        leases = ctx.tensorpipe_attachment().leases
        ctx.tensorpipe_attachment().attach()
        set_lease_budget(leases, CAPACITY)
        held = [there.get(copy=False) for _ in range(count)]
        told.put(len(held))
        signal.pause()

    for _ in range(count):
        there.put(payload, timeout=0)
    pid = in_child(hold)
    assert told.get(timeout=LIMIT) == count
    there.put(1)
    with pytest.raises(queue.Full, match=rf"pid {pid} \(alive\) has {count} blocks"):
        there.put(payload, timeout=0.01)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    there.put(payload, timeout=5)
    took = time.monotonic() - began
    reap(pid)
    assert took < 0.1 + 0.4  # the promise, and what a busy machine adds


@pytest.mark.parametrize("size", [1, 10, SIZE])
def test_copy_true_gives_own_memory_and_copy_false_a_lease(ctx: Any, size: int) -> None:
    there = ctx.Queue()
    for copy, held in ((True, {}), (False, {"held": 1}), ("auto", {"held": 1} if size == SIZE else {})):
        there.put({"x": torch.full((size,), 3.0), "n": 1})
        got = there.get(copy=copy)
        assert blocks_in_use(ctx) == held
        assert (got["x"].sum(), got["n"]) == (3 * size, 1)
        got["x"].zero_()
        got.clear()
    assert blocks_in_use(ctx) == {}


def test_copy_true_copies_what_was_moved(ctx: Any) -> None:
    there = ctx.Queue()
    there.put([ctx.empty(SIZE).fill_(3), "text"], move=True)
    got = there.get(copy=True)
    assert blocks_in_use(ctx) == {}
    assert (got[0].sum(), got[1]) == (3 * SIZE, "text")


@pytest.mark.parametrize("obj", [5, "text", torch.empty(0, 4), [torch.empty(0)]], ids=str)
def test_copy_false_of_what_has_no_memory_holds_none(ctx: Any, obj: Any) -> None:
    there = ctx.Queue()
    there.put(obj)
    got = there.get(copy=False)
    assert blocks_in_use(ctx) == {}
    assert type(got) is type(obj)


@pytest.mark.slow
def test_leases_of_many_processes_pin_no_more_than_the_capacity(ctx: Any) -> None:
    there, told, large = ctx.Queue(), ctx.Queue(), torch.ones(CAPACITY // 2 - (2 << 20), dtype=torch.uint8)
    resident = ctx.tensorpipe_attachment().arena.segment.resident

    def hold() -> None:
        held = there.get(timeout=LIMIT)
        told.put(held[0].item())
        signal.pause()

    pids = [in_child(hold) for _ in range(4)]
    try:  # two of them hold leases, and two hold copies
        for _ in pids:
            there.put(large, timeout=LIMIT)
            assert told.get(timeout=LIMIT) == 1
        assert resident() <= CAPACITY
        there.put(large, timeout=LIMIT)  # one more than there is room for
        with pytest.raises(SharedMemoryError, match=f"all memory in use is to be {CAPACITY} bytes at most"):
            there.get(copy=False)
        assert there.get().sum() == len(large)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            reap(pid)
    there.put(large)
    assert there.get(copy=False).sum() == len(large)


def test_loans_pin_no_more_than_the_capacity(ctx: Any) -> None:
    there, large = ctx.Queue(), (CAPACITY // 2 - (2 << 20),)
    loans = [there.loan(large, torch.uint8) for _ in range(4)]
    for number, each in enumerate([loan.__enter__() for loan in loans]):
        each.fill_(number)
        del each
    assert ctx.tensorpipe_attachment().arena.segment.resident() <= CAPACITY
    for number, loan in enumerate(loans):
        loan.__exit__(None, None, None)
        got = there.get(copy=True)
        assert got.min() == got.max() == number
    assert blocks_in_use(ctx) == {}


def test_memory_that_comes_free_just_after_a_loan_looked_for_it_is_no_error(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, arena, large = ctx.Queue(), ctx.tensorpipe_attachment().arena, (CAPACITY // 4 * 3,)
    held, allocate = [ctx.empty(large, torch.uint8)], arena.allocate

    def allocate_and_let_go(*args: Any, **kwargs: Any) -> Any:
        block = allocate(*args, **kwargs)
        if kwargs.get("collected"):  # the look in vain
            held.clear()
        return block

    monkeypatch.setattr(arena, "allocate", allocate_and_let_go)
    with there.loan(large, torch.uint8, timeout=LIMIT) as loan:
        loan.fill_(3)
    assert not held
    assert (there.get() == 3).all()


@pytest.mark.parametrize("nbytes", [40, 1900, 2000, 3000, 3900])
def test_leases_of_small_messages_take_of_the_budget_what_they_take_of_memory(ctx: Any, nbytes: int) -> None:
    """A page each, however much of it they need."""
    there, held = ctx.Queue(), []
    leases = ctx.tensorpipe_attachment().leases
    set_lease_budget(leases, MIB)
    before = there.statistics().resident
    for _ in range(256):
        there.put(torch.zeros(nbytes, dtype=torch.uint8))
        held.append(there.get(copy=False))
    there.put(torch.zeros(nbytes, dtype=torch.uint8))
    with pytest.raises(SharedMemoryError, match=f"may have {MIB} bytes under lease"):
        there.get(copy=False)
    assert there.statistics().resident - before < 1.2 * MIB
    assert there.statistics().bytes_leased == (MIB if nbytes < 2000 else 256 * nbytes)


@pytest.mark.parametrize("nbytes", [33 << 10, 70_000])
def test_leases_pin_no_more_pages_than_the_budget(ctx: Any, nbytes: int) -> None:
    """Their blocks have pages of larger messages that lay there before."""
    there, leases = ctx.Queue(), ctx.tensorpipe_attachment().leases
    set_lease_budget(leases, 8 * MIB)
    for _ in range(2):
        for _ in range(300):
            there.put(torch.zeros(2 * nbytes - PAGE, dtype=torch.uint8))
        for _ in range(300):
            there.get(copy=True)
    before = there.statistics().resident
    for _ in range(300):
        there.put(torch.zeros(nbytes, dtype=torch.uint8))
    held = [there.get() for _ in range(300)]
    assert there.statistics().resident >= before
    there.trim()
    assert 7 * MIB < there.statistics().resident < 9 * MIB
    assert len(held) == 300


def test_leases_leave_addresses_to_messages(ctx: Any) -> None:
    """A process with few addresses (``ulimit -v``) that keeps all that it gets has copies in the end, and puts go on."""
    there, arena = ctx.Queue(), ctx.tensorpipe_attachment().arena
    leave_addresses(arena, 16)
    held = []
    for i in range(40):
        there.put(torch.full((900_000,), i, dtype=torch.uint8), timeout=LIMIT)
        held.append(there.get())
        with there.loan(900_000, torch.uint8, timeout=LIMIT) as loan:
            loan.fill_(i)
        held.append(there.get())
    assert all((tensor == i // 2).all() for i, tensor in enumerate(held))
    assert 4 * 900_000 < there.statistics().bytes_leased < 9 * MIB
    there.put(torch.zeros(6 * MIB, dtype=torch.uint8), timeout=LIMIT)


def test_beyond_the_budget_copy_false_raises_and_the_message_is_the_next(ctx: Any) -> None:
    there = ctx.Queue(3)
    leases = ctx.tensorpipe_attachment().leases
    budget = 2 * (4 * SIZE + PAGE)
    set_lease_budget(leases, budget)
    held = [leased(there, copy=False), leased(there, copy=False)]
    for i in range(2):
        there.put(torch.full((SIZE,), float(i)))
    for _ in range(5):
        with pytest.raises(SharedMemoryError, match=f"may have {budget} bytes under lease"):
            there.get(copy=False)
    assert there.get(copy="auto").sum() == 0  # a copy
    with pytest.raises(SharedMemoryError):
        there.get(copy=False)
    held.pop()
    got = there.get(copy=False)
    assert got.sum() == SIZE
    assert blocks_in_use(ctx) == {"held": 2}


@pytest.mark.parametrize(
    "sent",
    [None, ("stop",), "x" * 5_000, ["y"] * 100_000, [], Exception("no"), {"of a tree": 1}],
    ids=lambda sent: repr(sent)[:12],
)
def test_beyond_the_budget_copy_false_takes_what_has_no_tensors(ctx: Any, sent: Any) -> None:
    """It has no memory that a lease would keep: what has a consumer let go of its tensors comes by it, too."""
    there = ctx.Queue()
    set_lease_budget(ctx.tensorpipe_attachment().leases, 4 * SIZE + PAGE)
    held = leased(there, copy=False)
    for _ in range(2):
        there.put(sent)
    for got in there.get(copy=False), *there.get_many(1, copy=False):
        assert repr(got) == repr(sent)
    there.put(torch.zeros(SIZE))
    with pytest.raises(SharedMemoryError, match="under lease"):
        there.get(copy=False)
    assert held.numel() == SIZE


@pytest.mark.parametrize("copy", [False, "auto"])
def test_a_long_pickle_comes_where_there_is_no_memory_for_a_copy_of_its_message(
    ctx: Any, monkeypatch: pytest.MonkeyPatch, copy: Any
) -> None:
    there, words = ctx.Queue(), {"y" * 1_000_000}

    def refuse(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(get_end, "see_room_to_take", refuse)
    there.put(words)
    assert there.get(copy=copy) == words


# Of 100 kB, eight blocks are an extent; of 5 kB, 128; of the others, one.
@pytest.mark.parametrize("nbytes", [5_000, 100_000, 600_000, 3_000_000])
def test_what_waits_in_a_queue_that_is_gone_is_freed_among_tensors_that_are_kept(ctx: Any, nbytes: int) -> None:
    there, gone, kept = ctx.Queue(), ctx.Queue(), list[tuple[int, torch.Tensor]]()
    for number in range(4 * MIB // nbytes + 2):
        waits = number % 16 == 1
        (gone if waits else there).put(torch.full((nbytes,), number % 100, dtype=torch.uint8))
        if not waits:
            kept.append((number % 100, there.get(copy=False)))
    del gone
    assert blocks_in_use(ctx) == {"held": len(kept)}
    ctx.trim()
    assert all((tensor == number).all() for number, tensor in kept)


class Fails:
    """An object that keeps its tensor, and then has no memory for the rest."""

    kept: ClassVar[list[torch.Tensor]] = []

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self.kept.append(state["tensor"])
        raise MemoryError("it cannot be made now")


def test_a_message_that_could_not_be_made_yet_is_freed_with_its_queue_though_its_tensor_was(ctx: Any) -> None:
    there = ctx.Queue()
    there.put(Fails(torch.ones(600_000, dtype=torch.uint8)))  # which takes an extent of its own
    with pytest.raises(MemoryError):  # the message comes again
        there.get(copy=False)
    assert len(Fails.kept) == 1
    del there
    gc.collect()  # the exception had cycles
    Fails.kept.clear()
    assert blocks_in_use(ctx) == {}
