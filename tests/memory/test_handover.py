"""put(x, move=True): by reference where nothing else lies on the block, a copy where it does; no loss either way."""

import functools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from arenas import blocks_in_use, drained, small_context
from crash_points import SIGNAL_CHECKS, in_child, reap, run_traced
from inside import look_at_counts
from programs import ran
from wholeness import stride

import tensorpipe_ipc as tp
from tensorpipe_ipc.memory.leases import Leases

SIZE = 100_000  # items
LIMIT = 20


def filled(ctx: Any, dtype: Any = torch.float32) -> Any:
    return ctx.empty((100, SIZE // 100), dtype=dtype).fill_(3)


def received(there: Any) -> Any:
    there.put(torch.full((100, SIZE // 100), 3.0))
    return there.get()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_tensor_made_in_the_arena_goes_without_a_copy(ctx: Any, dtype: torch.dtype) -> None:
    there = ctx.Queue()
    sent = filled(ctx, dtype)
    address = sent.data_ptr()
    there.put(sent, move=True)
    assert sent.shape == (0,)
    got = there.get()
    assert got.data_ptr() == address
    assert torch.equal(got, torch.full((100, SIZE // 100), 3, dtype=dtype))


@pytest.mark.parametrize("maxsize", [0, 2, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lease_is_forwarded_again_and_again_without_a_copy(ctx: Any, maxsize: int, dtype: torch.dtype) -> None:
    one, other = ctx.Queue(), ctx.Queue(maxsize)
    one.put({"step": 0, "x": torch.full((100, SIZE // 100), 3, dtype=dtype), "label": torch.ones(3)})
    tree = one.get()
    address = tree["x"].data_ptr(), tree["label"].data_ptr()
    for step in range(5):
        tree["step"] = step
        other.put(tree, move=True)
        assert tree["x"].shape == tree["label"].shape == (0,)
        tree = other.get()
        assert (tree["step"], tree["x"].sum()) == (step, torch.full((100, SIZE // 100), 3, dtype=dtype).sum())
        assert (tree["x"].data_ptr(), tree["label"].data_ptr()) == address
    del tree
    assert blocks_in_use(ctx) == {}


def test_small_leaves_from_elsewhere_and_any_picklable_object_travel_with_it(ctx: Any) -> None:
    there = ctx.Queue()
    sent = filled(ctx)
    address = sent.data_ptr()
    there.put([sent, {1, 2}, "text", torch.arange(5), np.arange(3), 10**30], move=True)
    first, numbers, text, small, array, integer = there.get()
    assert (first.data_ptr(), numbers, text, integer) == (address, {1, 2}, "text", 10**30)
    assert (small.tolist(), array.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2])
    assert sent.shape == (0,)


def test_views_of_one_tensor_go_together_and_still_share(ctx: Any) -> None:
    there = ctx.Queue()
    sent = filled(ctx)
    tree, address = {"all": sent, "row": sent[3], "turned": sent.t()}, sent.data_ptr()
    there.put(tree, move=True)
    assert sent.shape == tree["row"].shape == tree["turned"].shape == (0,)
    got = there.get()
    assert got["all"].data_ptr() == address
    got["row"].fill_(7)
    assert got["turned"][:, 3].tolist() == [7.0] * (SIZE // 100)


def test_a_view_goes_alone_when_what_it_is_a_view_of_is_gone(ctx: Any) -> None:
    there = ctx.Queue()
    sent = filled(ctx)[20:]
    address = sent.data_ptr()
    there.put(sent, move=True)
    got = there.get()
    assert (got.data_ptr(), got.shape) == (address, (80, SIZE // 100))


class _Unwalked(dict[int, Any]):
    """Fails where anybody looks at one entry after the other."""

    def values(self) -> Any:
        pytest.fail("each lease is looked at")

    items = values  # type: ignore[assignment]


def test_a_move_does_not_look_at_each_lease_of_the_process(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small tensor beside a large one, too: whichever of them lies first."""
    there, find = ctx.Queue(), Leases.find
    kept = []
    for number in range(5):
        there.put({"label": torch.tensor(number), "image": torch.full((SIZE,), float(number))})
        kept.append(there.get(copy=False))

    def found(leases: Leases, address: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(leases, "live", _Unwalked(leases.live))
            return find(leases, address)

    monkeypatch.setattr(Leases, "find", found)
    there.put(kept[2], move=True)
    assert kept[2]["image"].numel() == 0
    assert there.get()["image"][0] == 2
    assert [int(each["label"]) for each in kept[:2] + kept[3:]] == [0, 1, 3, 4]


@pytest.mark.parametrize("alias", [lambda t: t.view(-1), lambda t: t.numpy(), lambda t: t.detach()])
def test_an_alias_that_is_made_while_a_move_waits_for_room_is_seen(ctx: Any, alias: Any) -> None:
    """The object is copied then: what is written through the alias, the receiver does not see."""
    there, sent = ctx.Queue(1), filled(ctx)
    there.put("full")
    kept, thread = [], threading.Thread(target=there.put, args=(sent,), kwargs={"move": True, "timeout": LIMIT})
    thread.start()
    wait_until_asleep(thread)
    kept.append(alias(sent))
    assert there.get() == "full"
    thread.join(LIMIT)
    got = there.get(timeout=LIMIT)
    kept[0][:] = 9
    assert got.unique().tolist() == [3.0]
    assert sent.unique().tolist() == [9.0]


def test_a_moved_slice_lies_where_torch_computes_on_pairs_of_it(ctx: Any) -> None:
    """Torch's kernels crash on complex numbers at no multiple of 16, so such a slice is copied."""
    there, base = ctx.Queue(), ctx.empty((SIZE + 1,), dtype=torch.float64).fill_(3)
    sent = base[1:]
    del base
    there.put(sent, move=True)
    got = torch.view_as_complex(there.get(timeout=LIMIT).view(-1, 2))
    assert got.data_ptr() % 16 == 0
    assert got[torch.arange(5)].tolist() == [3 + 3j] * 5


def _by_assignment(tensor: torch.Tensor, _: Any) -> None:
    tensor.data = torch.zeros(10)


def _by_a_move(tensor: torch.Tensor, other: Any) -> None:
    other.put(tensor, move=True)
    other.get().fill_(9)


@pytest.mark.parametrize("give_away", [_by_assignment, _by_a_move])
@pytest.mark.parametrize(
    "tree", [lambda t: t, lambda t: {"x": t, "step": 3}, lambda t: [t, t[1:]], lambda t: t.numpy()]
)
def test_a_put_that_waits_for_room_keeps_the_memory_that_it_sends(ctx: Any, tree: Any, give_away: Any) -> None:
    """Meanwhile another thread gives the tensor other memory, or gives it away. What was put arrives."""
    there, other, sent = ctx.Queue(1), ctx.Queue(), filled(ctx)
    there.put("full")
    thread = threading.Thread(target=there.put, args=(tree(sent),), kwargs={"timeout": LIMIT})
    thread.start()
    wait_until_asleep(thread)
    give_away(sent, other)
    other.put(torch.full((SIZE,), 42.0))  # where the memory is free, it is used again
    assert there.get() == "full"
    thread.join(LIMIT)
    got = there.get(timeout=LIMIT)
    if isinstance(got, (dict, list)):
        got = got["x"] if isinstance(got, dict) else got[0]
    assert torch.as_tensor(got).unique().tolist() == [3.0]
    assert other.get(timeout=LIMIT).unique().tolist() == [42.0]


def _show_half(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data[: len(tensor) // 2]


@pytest.mark.parametrize("change", [torch.Tensor.t_, lambda tensor: tensor.unsqueeze_(0), _show_half])
def test_a_move_that_waits_sends_what_the_tensor_shows_in_the_end(ctx: Any, change: Any) -> None:
    """Another thread changes its shape or strides, on the same memory."""
    there = ctx.Queue(1)
    sent = ctx.empty((100, SIZE // 100))
    sent.copy_(torch.arange(sent.numel()).view(sent.shape))
    there.put("full")
    thread = threading.Thread(target=there.put, args=(sent,), kwargs={"timeout": LIMIT, "move": True})
    thread.start()
    wait_until_asleep(thread)
    change(sent)
    shown = sent.clone()
    assert there.get() == "full"
    thread.join(LIMIT)
    assert torch.equal(there.get(timeout=LIMIT), shown)


def _swap_data(one: torch.Tensor, other: torch.Tensor) -> None:
    one.data, other.data = other.data, one.data


def _swap_by_set(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.detach()
    one.set_(other)
    other.set_(kept)


@pytest.mark.parametrize("swap", [_swap_data, torch.utils.swap_tensors, _swap_by_set])
def test_a_move_that_waits_takes_no_memory_that_another_tensor_has_by_then(ctx: Any, swap: Any) -> None:
    """Another thread exchanges the memory of two, as double buffering does: both keep what is theirs."""
    there, sent, other = ctx.Queue(1), filled(ctx), ctx.empty((100, SIZE // 100)).fill_(4)
    there.put("full")
    thread = threading.Thread(target=there.put, args=(sent,), kwargs={"timeout": LIMIT, "move": True})
    thread.start()
    wait_until_asleep(thread)
    swap(sent, other)
    assert there.get() == "full"
    thread.join(LIMIT)
    got = there.get(timeout=LIMIT)
    before = got.unique().tolist()
    other.fill_(9)
    assert got.unique().tolist() == before
    assert other.unique().tolist() == [9.0]


def wait_until_asleep(thread: Any) -> None:
    """Until a thread waits in the kernel."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
            if stat.read().rsplit(")", 1)[1].split()[0] == "S":
                return
        time.sleep(0.001)


def test_one_tensor_that_two_threads_move_at_once_reaches_two_receivers_of_its_own(ctx: Any) -> None:
    queues, sent = [ctx.Queue(1), ctx.Queue(1)], filled(ctx)
    threads = [
        threading.Thread(target=each.put, args=(sent,), kwargs={"move": True, "timeout": LIMIT}) for each in queues
    ]
    for each, thread in zip(queues, threads, strict=True):
        each.put("full")
        thread.start()
        wait_until_asleep(thread)
    assert [each.get() for each in queues] == ["full", "full"]
    one, other = (each.get(timeout=LIMIT) for each in queues)
    for thread in threads:
        thread.join(LIMIT)
    one.fill_(5)
    assert other.sum() == 3 * SIZE


def saved_for_backward(tensor: torch.Tensor) -> Any:
    return (tensor * torch.ones(1, requires_grad=True)).sum()


ALIASES = {
    "a view": lambda t: t.view(-1),
    "a slice": lambda t: t[3],
    "detach": lambda t: t.detach(),
    "numpy": lambda t: t.numpy(),
    "a view of an array": lambda t: t.numpy()[3:][:2],
    "dlpack": lambda t: t.__dlpack__(),
    "another library's array": lambda t: np.from_dlpack(t),
    "the storage": lambda t: t.untyped_storage(),
    "saved for backward": saved_for_backward,
    "cycle": lambda t: (lambda box: box.append(box) or box)([t[3]]),
}


@pytest.mark.parametrize("make", [filled, lambda ctx: received(ctx.Queue())], ids=["made", "got"])
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES.keys())
def test_what_has_an_alias_is_copied_and_stays_as_it_was(ctx: Any, make: Any, alias: Any) -> None:
    there = ctx.Queue()
    sent = make(ctx)
    kept = alias(sent)
    there.put(sent, move=True)
    got = there.get()
    got.zero_()
    assert sent.sum() == 3 * SIZE
    if isinstance(kept, list):
        kept.clear()  # a cycle goes when it is collected, not when it is let go
    del kept
    address = sent.data_ptr()
    there.put(sent, move=True)
    assert there.get().data_ptr() == address


MADE_OF_IT = {
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "a part of an array": lambda t: torch.as_tensor(t.numpy()[1:]),
    "dlpack": lambda t: torch.from_dlpack(t),
    "another library's array": lambda t: torch.from_numpy(np.from_dlpack(t)),
    "a buffer": lambda t: torch.frombuffer(t.numpy(), dtype=t.dtype),
    "a part of its storage": lambda t: torch.empty(0).set_(t.untyped_storage()[0 : t.nbytes]),
}


@pytest.mark.parametrize("make", [filled, lambda ctx: received(ctx.Queue())], ids=["made", "got"])
@pytest.mark.parametrize("made_of", MADE_OF_IT.values(), ids=MADE_OF_IT.keys())
def test_what_was_made_of_a_tensor_that_is_kept_is_copied(ctx: Any, make: Any, made_of: Any) -> None:
    """NumPy and DLPack keep the tensor that they lie on: nothing that is put takes its memory from it."""
    there = ctx.Queue()
    kept = make(ctx)
    there.put(made_of(kept), move=True)
    got = there.get()
    kept.zero_()
    assert got.ravel()[-1] == 3
    del got
    received(there)
    assert kept.sum() == 0


def test_a_small_part_of_a_block_is_copied_and_gives_it_back(ctx: Any) -> None:
    """Of a large message that is passed on in part only the part is kept."""
    one, other = ctx.Queue(), ctx.Queue()
    one.put({"large": torch.ones(SIZE), "part": torch.ones(SIZE // 8)})
    part = one.get()["part"]
    other.put(part, move=True)
    assert part.sum() == SIZE // 8
    del part
    got = other.get()
    assert got.sum() == SIZE // 8
    assert sum(nbytes for _, nbytes in ctx.tensorpipe_attachment().arena.holders().values()) < SIZE


def test_what_shares_its_block_with_another_leaf_that_is_kept_is_copied(ctx: Any) -> None:
    there = ctx.Queue()
    there.put({"x": torch.ones(SIZE), "y": torch.ones(SIZE)})
    got = there.get()
    address = got["x"].data_ptr()
    there.put(got["x"], move=True)
    there.get().zero_()
    assert got["x"].sum() == got["y"].sum() == SIZE
    kept = got.pop("y")
    del kept
    there.put(got["x"], move=True)
    assert there.get().data_ptr() == address


def test_arrays_parameters_and_storages_of_a_block_are_copied(ctx: Any) -> None:
    there = ctx.Queue()
    for sent in (
        filled(ctx).numpy(),
        torch.nn.Parameter(filled(ctx)),
        filled(ctx).requires_grad_(),
        filled(ctx).untyped_storage(),
    ):
        there.put(sent, move=True)
        got = there.get()
        assert type(got) is type(sent)
        assert len(sent) == len(got)


def test_what_does_not_lie_in_one_block_of_this_arena_is_copied(ctx: Any) -> None:
    there, elsewhere = ctx.Queue(), small_context()
    for sent in (torch.full((100, SIZE // 100), 3.0), filled(elsewhere), [filled(ctx), filled(ctx)]):
        there.put(sent, move=True)
        got = there.get()
        for one, other in zip(sent, got, strict=True):
            assert torch.equal(one, other)
            assert one.data_ptr() != other.data_ptr()
    vars(elsewhere).clear()


def test_a_plain_put_of_a_lease_copies_it(ctx: Any) -> None:
    there = ctx.Queue()
    lease = received(there)
    there.put(lease)
    got = there.get()
    got.zero_()
    assert lease.sum() == 3 * SIZE


def test_under_inference_mode_it_goes_by_reference_too(ctx: Any) -> None:
    there = ctx.Queue()
    with torch.inference_mode():
        for sent in (filled(ctx), received(there)):
            address = sent.data_ptr()
            there.put(sent, move=True)
            assert there.get().data_ptr() == address


def test_a_small_tensor_is_copied(ctx: Any) -> None:
    there = ctx.Queue()
    sent = ctx.empty(10).fill_(3)
    there.put(sent, move=True)
    assert there.get().tolist() == sent.tolist() == [3.0] * 10


def test_without_counts_that_can_be_believed_everything_is_copied(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that does not tell who else has a tensor has every moving put copy it."""
    there = ctx.Queue()
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    look_at_counts().cache_clear()
    try:
        sent = filled(ctx)
        there.put(sent, move=True)
        assert there.get().data_ptr() != sent.data_ptr()
        assert sent.sum() == 3 * SIZE
    finally:
        look_at_counts().cache_clear()


def test_a_lease_inherited_over_a_fork_is_copied_by_the_child_and_by_the_parent_while_it_lives(ctx: Any) -> None:
    there = ctx.Queue()
    lease = received(there)
    address = lease.data_ptr()
    read, write = os.pipe()

    def child() -> None:
        there.put(lease, move=True)
        assert lease.sum() == 3 * SIZE
        os.read(read, 1)
        assert lease.sum() == 3 * SIZE

    pid = in_child(child)
    got = there.get(timeout=LIMIT)
    assert got.data_ptr() != address
    there.put(lease, move=True)
    there.get().zero_()
    assert lease.sum() == 3 * SIZE
    os.write(write, b"x")
    assert reap(pid) == 0
    there.put(lease, move=True)
    assert there.get().data_ptr() == address
    os.close(read)
    os.close(write)


def test_its_owner_finds_the_block_again(ctx: Any) -> None:
    there, back = ctx.Queue(), ctx.Queue()
    resident = []
    for _ in range(50):
        there.put(filled(ctx), move=True)
        back.put(there.get(), move=True)
        back.get()
        resident.append(ctx.tensorpipe_attachment().arena.segment.resident())
    assert len(set(resident[5:])) == 1


def test_it_survives_the_sigkill_of_its_producer_bytes_unchanged(ctx: Any) -> None:
    there = ctx.Queue()

    def child() -> None:
        there.put(filled(ctx), move=True)
        os.kill(os.getpid(), signal.SIGKILL)

    reap(in_child(child))
    got = there.get(timeout=LIMIT)
    ctx.tensorpipe_attachment().recover_dead(adopt_extents=True)
    for _ in range(5):
        there.put(torch.zeros(SIZE))
        there.get()
    assert got.sum() == 3 * SIZE


def test_full_leaves_the_tensor_with_the_caller(ctx: Any) -> None:
    there = ctx.Queue(1)
    there.put(1)
    sent = filled(ctx)
    address = sent.data_ptr()
    for timeout in (0, 0.01):
        with pytest.raises(queue.Full):
            there.put(sent, timeout=timeout, move=True)
    assert sent.sum() == 3 * SIZE
    assert there.get() == 1
    there.put(sent, timeout=0, move=True)
    assert there.get().data_ptr() == address
    assert blocks_in_use(ctx) == {}


class Interrupt(Exception):
    """The exception that a signal handler raises."""


def interrupt() -> None:
    raise Interrupt


@pytest.mark.kills
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised inside a release
@pytest.mark.limit(200)
@pytest.mark.parametrize("maxsize", [0, 2])
def test_an_exception_at_any_moment_leaves_the_tensor_here_or_there_and_whole(ctx: Any, maxsize: int) -> None:
    there = ctx.Queue(maxsize)
    first = filled(ctx)
    there.put(first, move=True)  # the counts are believed from now on
    there.get()
    outcomes, point = set(), 1
    while True:
        point += stride(9)
        sent = ctx.empty(SIZE).fill_(point)
        try:
            left = run_traced(
                functools.partial(there.put, sent, timeout=0, move=True), point, interrupt, SIGNAL_CHECKS, before=False
            )
        except Interrupt:
            left = 0
        got = drained(there)
        outcomes.add(len(got))
        (tensor,) = got or [sent]
        assert not got or sent.shape == (0,) or sent.data_ptr() != tensor.data_ptr()
        assert (tensor == point).all()
        del tensor, sent
        got.clear()
        ctx.tensorpipe_attachment().leases.settle()
        assert blocks_in_use(ctx) == {}
        if left > 0:
            break
    assert outcomes == {0, 1}
    assert point > 50
    for _ in range(maxsize):
        there.put(1, timeout=0)


AT_AN_ODD_PLACE = """
import sys, torch
import tensorpipe_ipc as tp
first, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
ctx = tp.get_context("fork")
queue = ctx.Queue()
made = ctx.empty((100_000,), dtype).fill_(1)
part = made[first : first + 99_984]
del made
queue.put(part, move=True)
got = queue.get()
seen = got.view(torch.complex128) * 2
print(got.data_ptr() % 16, got.sum().item(), len(seen))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "dtype", "size"), [(1, "uint8", 1), (3, "int16", 2), (1, "float32", 4), (2, "float32", 4)]
)
def test_what_is_moved_may_be_looked_at_as_any_dtype(first: int, dtype: str, size: int) -> None:
    """Wherever in its block it begins: torch computes on complex128 at multiples of 16, and ends the process elsewhere."""
    done = ran("-c", AT_AN_ODD_PLACE, str(first), dtype)
    assert done.status == 0, done.err
    at, total, count = done.out.split()
    assert (at, float(total), int(count)) == ("0", 99_984, 99_984 * size // 16)


BESIDE: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8),
    "meta": lambda: torch.ones(3, device="meta"),
    "much text": lambda: "text " * 1_000_000,
}


@pytest.mark.filterwarnings("ignore")  # of what is only a prototype in torch, or deprecated
@pytest.mark.parametrize("way", ["move", "loan"])
@pytest.mark.parametrize("kind", BESIDE)
def test_what_cannot_go_by_reference_is_copied_with_all_beside_it(kind: str, way: str) -> None:
    """It is sent as a put sends it that does not say ``move``."""
    ctx = small_context()
    there, beside = ctx.Queue(), BESIDE[kind]()
    if way == "move":
        there.put({"x": ctx.empty((50_000,), torch.float32).fill_(7), "beside": beside}, move=True)
    else:
        with there.loan({"x": tp.TensorSpec((50_000,), torch.float32), "beside": beside}) as lent:
            lent["x"].fill_(7)
    got = there.get(timeout=20)
    assert got["x"].eq(7).all()
    assert type(got["beside"]) is type(beside)
    if isinstance(beside, torch.Tensor):
        assert (got["beside"].layout, got["beside"].is_quantized) == (beside.layout, beside.is_quantized)
