"""A tensor that the program put into torch's shared memory stays shared in a Queue. All else is copied, as before."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import reduction, resource_sharer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import wait_until
from crash_points import in_child, reap
from programs import ran_in_fork

import tensorpipe_ipc as tp

LIMIT = 20
METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.kills)]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """torch's handles need multiprocessing's thread that hands out descriptors; it ends with the test."""
    yield
    resource_sharer.stop(timeout=5)
    gc.collect()


class Holder:
    """No tree, but it can be pickled."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def _shared(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).share_memory_()


def _module() -> torch.nn.Module:
    return torch.nn.Linear(3, 2).share_memory()


# What is sent, and the tensor of it that both sides write to.
SENT: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "small": (lambda: _shared(3), lambda it: it),
    "large": (lambda: _shared(1 << 17), lambda it: it[-9:]),
    "no dimension": (lambda: _shared(), lambda it: it.view(1)),
    "view with strides": (lambda: _shared(8, 6)[1::2, 3:].t(), lambda it: it[0]),
    "expanded": (lambda: _shared(4, 1).expand(4, 3), lambda it: it[:, 0]),
    "tree": (lambda: {"x": [_shared(4), torch.ones(3), 1], "y": (torch.ones(1 << 15),)}, lambda it: it["x"][0]),
    "object": (lambda: Holder(x=_shared(4), y=torch.ones(3), z={1, 2}), lambda it: it.x),
    "parameter": (lambda: torch.nn.Parameter(_shared(4)), lambda it: it.data),
    "with gradient": (lambda: _shared(4).requires_grad_(), lambda it: it.detach()),
    "module": (_module, lambda it: it.weight.data[0]),
    "storage": (lambda: _shared(4).untyped_storage(), lambda it: torch.empty(0).set_(it)),
}


def _write_to_what_comes(there: Any, back: Any, name: str) -> None:
    part = SENT[name][1]
    it = there.get(timeout=LIMIT)
    part(it).fill_(1)
    back.put(type(it).__name__)
    there.get(timeout=LIMIT)
    back.put(part(it).tolist())


@pytest.mark.parametrize("name", SENT)
def test_what_one_side_writes_the_other_sees(name: str) -> None:
    """A tensor in torch's shared memory is the same memory on both sides, whatever it is sent in, and of any size."""
    there, back = tp.Queue(), tp.Queue()
    make, part = SENT[name]
    sent = make()
    child = in_child(lambda: _write_to_what_comes(there, back, name))
    there.put(sent)
    assert back.get(timeout=LIMIT) == type(sent).__name__
    assert part(sent).eq(1).all()
    part(sent).fill_(2)
    there.put("go on")
    assert set(back.get(timeout=LIMIT)) == {2.0}
    assert reap(child) == 0
    assert there.statistics().shared_by_torch >= 1


class Mapped(torch.Tensor):
    """Mapped from a file, whose name is all that is sent of it: as of TensorDict's."""

    file = ""


def _mapped(file: str) -> Mapped:
    tensor = torch.from_file(file, shared=True, size=1 << 14).as_subclass(Mapped)
    tensor.file = file
    return tensor


def test_a_type_that_has_a_reducer_of_its_own_in_multiprocessing_is_sent_by_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so its memory stays shared."""
    file = tmp_path / "mapped"
    file.write_bytes(bytes(4 << 14))
    reducers: dict[Any, Any] = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    monkeypatch.setitem(reducers, Mapped, lambda tensor: (_mapped, (tensor.file,)))
    there = tp.Queue()
    sent = _mapped(str(file))
    there.put({"x": sent})
    got = there.get(timeout=LIMIT)["x"]
    sent[5] = 7
    assert (type(got), got[5].item()) == (Mapped, 7)


def _collect(there: Any, ready: Any) -> None:
    data = {"frames": torch.zeros(4, 3).share_memory_(), "reward": torch.zeros(4).share_memory_()}
    there.put(data)
    for step in range(1, 4):
        ready[1].get(timeout=LIMIT)
        data["frames"].fill_(step)
        data["reward"].fill_(10 * step)
        ready[0].put("ready")
    ready[1].get(timeout=LIMIT)


@pytest.mark.parametrize("method", METHODS)
def test_a_collector_sends_its_buffers_once_and_then_only_says_ready(method: str) -> None:
    """A worker's shared dict of tensors is sent once; each later batch is seen in it."""
    ctx = tp.get_context(method)
    there, done, go = ctx.Queue(), ctx.Queue(), ctx.Queue()
    worker = ctx.Process(target=_collect, args=(there, (done, go)))
    worker.start()
    data = there.get(timeout=LIMIT)
    seen = []
    for _ in range(3):
        go.put("go")
        assert done.get(timeout=LIMIT) == "ready"
        seen.append((data["frames"].mean().item(), data["reward"].mean().item()))
    go.put("end")
    worker.join(LIMIT)
    assert worker.exitcode == 0
    worker.close()
    assert seen == [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]


def test_two_views_of_shared_memory_arrive_as_two_views_of_it() -> None:
    """Aliases stay aliases, one tensor twice arrives as one object, and what is beside them is copied."""
    there = tp.Queue()
    base, other = _shared(6), torch.zeros(6)
    there.put([base, base[2:], base, other, other[1:]])
    first, view, again, copied, of_copied = there.get(timeout=LIMIT)
    assert first is again
    base[2] = 5
    assert (first[2].item(), view[0].item()) == (5.0, 5.0)
    other[1] = 5
    copied[1] = 7
    assert of_copied[0] == 7, "what was copied is shared as it was, but not with the sender"
    assert there.statistics().shared_by_torch == 1, "one storage, one handle"


def test_what_is_not_in_torchs_shared_memory_is_copied_as_before(tmp_path: Path) -> None:
    """Private memory, a lease, a tensor of the context's, an array on shared memory, and a mapped file are copied."""
    ctx = tp.get_context("fork")
    there = ctx.Queue()
    there.put(torch.zeros(1 << 16))
    (tmp_path / "data").write_bytes(bytes(4096))
    mapped = torch.from_file(str(tmp_path / "data"), shared=True, size=16, dtype=torch.float32)
    private = torch.from_file(str(tmp_path / "data"), shared=False, size=16, dtype=torch.float32)
    lease = there.get()
    for sent in (torch.zeros(3), lease, ctx.empty(1 << 16).zero_(), _shared(3).numpy(), mapped, private):
        there.put([sent])
        (got,) = there.get(timeout=LIMIT)
        got[0] = 1
        assert sent[0] == 0
        del got
    assert there.statistics().shared_by_torch == 0
    del lease, sent


def test_what_a_forked_child_shares_is_its_own() -> None:
    """Torch's handles name it by a number, which is another thing's in the parent."""
    there, other = tp.Queue(), tp.Queue()
    other.put(_shared(4))
    other.get()
    mine = [_shared(4) for _ in range(3)]
    reader, writer = os.pipe()

    def share() -> None:
        os.close(writer)
        there.put(torch.full((4,), 7.0).share_memory_())
        os.read(reader, 1)  # until the parent has it

    child = in_child(share)
    os.close(reader)
    for each in mine:
        other.put(each)
    got = there.get(timeout=LIMIT)
    assert got.tolist() == [7] * 4
    os.close(writer)
    assert reap(child) == 0
    for each in mine:
        other.get(timeout=LIMIT).fill_(1)
        assert each.eq(1).all()


def test_a_wish_for_arrays_is_kept() -> None:
    """as_numpy gives arrays on the shared memory, in a tree and in an object, and refuses what NumPy lacks."""
    there = tp.Queue()
    sent = _shared(3)
    for obj in ({"x": sent}, Holder(x=sent)):
        there.put(obj)
        got = there.get(as_numpy=True)
        array = got["x"] if isinstance(got, dict) else got.x
        assert type(array) is np.ndarray
        array[0] += 1
    assert sent[0] == 2
    there.put(torch.zeros(2, dtype=torch.bfloat16).share_memory_())
    with pytest.raises(tp.UnsupportedLeaf, match="bfloat16"):
        there.get(as_numpy=True)


def test_a_sender_that_was_killed_first_is_named_and_the_next_message_comes() -> None:
    """If a handle's sender is gone, get raises PeerLost with its number. That message is taken; others are whole."""
    there = tp.Queue()

    def put_and_die() -> None:
        there.put({"x": torch.zeros(3).share_memory_()})
        there.put("next")
        os.kill(os.getpid(), signal.SIGKILL)

    child = in_child(put_and_die)
    assert reap(child) == -signal.SIGKILL
    with pytest.raises(tp.PeerLost, match=r"process \d+ sent a tensor .*Keep the sender alive"):
        there.get(timeout=LIMIT)
    assert there.get(timeout=LIMIT) == "next"
    assert there.qsize() == 0


def test_puts_that_end_in_full_or_an_error_keep_no_descriptor() -> None:
    """A handle that was not sent is taken back: descriptors do not grow with tries, and the statistics do not count them."""
    there = tp.Queue(1)
    shared = _shared(3)
    there.put(shared)  # the thread that hands out descriptors has its own now
    before = len(os.listdir("/proc/self/fd"))
    history = torch.ones(2, requires_grad=True) * 2
    for _ in range(20):
        with pytest.raises(tp.Full):
            there.put([shared, 1], timeout=0)
        with pytest.raises(tp.Full):
            there.put_many([[shared]], timeout=0)
        with pytest.raises(RuntimeError, match="history"):
            there.put(Holder(x=shared, y=history))
        with pytest.raises((AttributeError, TypeError)):
            there.put([shared, lambda: 0])
        with pytest.raises(tp.SharedMemoryError):
            there.put([shared, torch.zeros(1).expand(1 << 40)])
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # the thread that shares them closes them
    assert there.statistics().shared_by_torch == 1
    got = there.get()
    got[0] = 1
    assert shared[0] == 1


def _put_many_where_descriptors_are_few() -> None:
    many = [torch.ones(10).share_memory_() for _ in range(50)]
    there = tp.Queue()
    there.put(many[0])
    there.get(timeout=LIMIT)
    there.put(many[0])  # the thread that hands out descriptors has its own now
    there.get(timeout=LIMIT)
    before = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(5):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, hard))
        with pytest.raises(OSError, match="Too many open files"):
            there.put(many)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    there.put(many)
    assert len(there.get(timeout=LIMIT)) == 50


def test_a_put_that_fails_for_want_of_descriptors_keeps_none() -> None:
    """Else each such put would take those that the program has given back, and never let go of them."""
    assert reap(in_child(_put_many_where_descriptors_are_few)) == 0


def _signal_once_it_waits(thread: threading.Thread) -> None:
    """Send SIGALRM to a thread that waits in epoll: an exception in torch's own code before that costs a descriptor."""
    deadline = time.monotonic() + LIMIT
    while not re.search("epoll|ep_poll", Path(f"/proc/self/task/{thread.native_id}/wchan").read_text()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    signal.pthread_kill(thread.ident or 0, signal.SIGALRM)


@pytest.mark.parametrize("put", [lambda there, it: there.put(it), lambda there, it: there.put_many([it, it])])
def test_puts_that_a_signals_handler_ends_keep_no_descriptor(put: Callable[[tp.Queue, Any], None]) -> None:
    """They wait for room when it raises, so nothing was put."""
    there = tp.Queue(1)
    shared = _shared(3)
    there.put(shared)
    with pytest.raises(tp.Full):
        there.put(shared, timeout=0.01)  # a thread that waits has a descriptor for it, once
    before = len(os.listdir("/proc/self/fd"))

    def raise_(*_: Any) -> None:
        raise KeyError

    was = signal.signal(signal.SIGALRM, raise_)
    try:
        for _ in range(5):
            helper = threading.Thread(target=_signal_once_it_waits, args=(threading.main_thread(),))
            helper.start()
            with pytest.raises(KeyError):
                put(there, [shared, 1])
            helper.join(LIMIT)
    finally:
        signal.signal(signal.SIGALRM, was)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # the thread that shares them closes them
    assert there.get() is not None
    there.put(shared)
    assert torch.equal(there.get(), shared)


def test_endpoints_copy_what_is_shared() -> None:
    """A stranger has no share in the program's memory: a Consumer gets a copy."""
    sent = _shared(3)

    def produce() -> None:
        with tp.Producer("inproc://copies") as producer:
            producer.put({"x": sent}, timeout=LIMIT)

    thread = threading.Thread(target=produce)
    with tp.Consumer("inproc://copies") as consumer:
        thread.start()
        consumer.get(timeout=LIMIT)["x"][0] = 1
        thread.join(LIMIT)
    assert sent[0] == 0


BY_NAME = """
import os, torch, torch.multiprocessing, tensorpipe_ipc as tp
torch.multiprocessing.set_sharing_strategy("file_system")
there, back = tp.Queue(), tp.Queue()
sent = torch.zeros(5).share_memory_()
there.put([sent[1:], 3])
if not (child := os.fork()):
    there.get(timeout=20)[0][0] = 7
    back.put("written")
    os._exit(0)
assert back.get(timeout=20) == "written"
os.waitpid(child, 0)
assert sent.tolist() == [0, 7, 0, 0, 0], sent
"""


@pytest.mark.slow
def test_shared_by_name_it_needs_no_descriptor(tmp_path: Path) -> None:
    """With torch's strategy "file_system", writes are seen, too."""
    done = ran_in_fork("-c", BY_NAME, folder=tmp_path)
    assert done.status == 0, done.err


def test_a_quantized_tensor_crosses() -> None:
    """torch's own queue sends one that cannot be read; ours arrives, alone and within anything."""
    there = tp.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        sent = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
        for obj, part in (
            (sent, lambda it: it),
            ({"x": [sent]}, lambda it: it["x"][0]),
            (Holder(x=sent), lambda it: it.x),
        ):
            there.put(obj)
            got = part(there.get(timeout=LIMIT))
            assert (got.q_scale(), got.q_zero_point(), got.dtype) == (0.5, 1, torch.qint8)
            assert torch.equal(got.int_repr(), sent.int_repr())


def test_history_is_refused_as_torch_refuses_it() -> None:
    """torch's queue raises RuntimeError for a tensor with history, and code that expects it finds it; so do TypeErrors."""
    there = tp.Queue()
    history = torch.ones(2, requires_grad=True) * 2
    for obj in (history, [history], Holder(x=history), _shared(2).requires_grad_() * 1):
        for kind in (RuntimeError, TypeError, tp.UnsupportedLeaf):
            with pytest.raises(kind, match="history"):
                there.put(obj)
    with contextlib.suppress(tp.Empty):
        raise AssertionError(there.get_nowait())


def _add_one(tensor: torch.Tensor) -> torch.Tensor:
    tensor += 1
    return tensor


def test_a_pool_shares_what_the_program_shared() -> None:
    """A worker writes to a shared argument, and gives it back as the same memory."""
    shared = _shared(3)
    with tp.get_context("fork").Pool(1) as pool:
        got = pool.apply_async(_add_one, (shared,)).get(LIMIT)
        assert shared.tolist() == [1, 1, 1]
        got += 1
        assert shared.tolist() == [2, 2, 2]
        private = torch.zeros(3)
        assert pool.apply_async(_add_one, (private,)).get(LIMIT).tolist() == [1, 1, 1]
        assert private.tolist() == [0, 0, 0]
        pool.close()
        pool.join()
    del got


def test_shared_memory_that_was_received_may_be_sent_on() -> None:
    """A process between sends on what it received, and is not needed for it afterwards; descriptors stay as many as tensors."""
    there, on, back = tp.Queue(), tp.Queue(), tp.Queue()

    def pass_on() -> None:
        for _ in range(50):
            on.put([there.get(timeout=LIMIT)])
            back.get(timeout=LIMIT)

    child = in_child(pass_on)
    shared, counts = _shared(3), []
    for number in range(50):
        there.put(shared)
        (got,) = on.get(timeout=LIMIT)
        back.put("have it")
        got[0] = number
        assert shared[0] == number
        counts.append(len(os.listdir("/proc/self/fd")))
    assert reap(child) == 0
    # Threads of torch's own close their connections when they come round.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= min(counts[1:5]))


def test_of_many_messages_those_of_a_dead_sender_are_lost_and_others_come() -> None:
    """get_many and get give all but what a dead process shared, each of which is one PeerLost."""
    there = tp.Queue()

    def put_and_die() -> None:
        for number in range(3):
            there.put(number)
            there.put(torch.full((2,), float(number)).share_memory_())
        os.kill(os.getpid(), signal.SIGKILL)

    assert reap(in_child(put_and_die)) == -signal.SIGKILL
    there.put("last")
    got: list[Any] = []
    lost = 0
    while "last" not in got:
        try:
            got += there.get_many(3, timeout=LIMIT)
        except tp.PeerLost:
            lost += 1
    assert (got, lost) == ([0, 1, 2, "last"], 3)


def _share_and_end(there: Any) -> None:
    there.put({"x": torch.full((3,), 7.0).share_memory_()})


def _share_slowly_and_end(there: Any) -> None:
    send = reduction.send_handle

    def slow_send(*arguments: Any) -> None:
        time.sleep(0.2)
        send(*arguments)

    reduction.send_handle = slow_send  # type: ignore[assignment]
    _share_and_end(there)


def _new_shared(number: int) -> torch.Tensor:
    return torch.full((3,), float(number)).share_memory_()


def test_a_process_that_ends_in_order_sends_what_was_asked_for_first() -> None:
    """A handle that is on its way while its sender's program returns arrives."""
    ctx = tp.get_context("fork")
    there = ctx.Queue()
    process = ctx.Process(target=_share_slowly_and_end, args=(there,))
    process.start()
    assert there.get(timeout=LIMIT)["x"].tolist() == [7, 7, 7]
    process.join(LIMIT)
    assert process.exitcode == 0
    process.close()


def test_a_process_that_ends_in_order_lets_what_it_shared_be_taken_first() -> None:
    """A producer that returns after its put, and a pool's workers that end with their task: nothing of theirs is lost."""
    ctx = tp.get_context("fork")
    there = ctx.Queue()
    process = ctx.Process(target=_share_and_end, args=(there,))
    process.start()
    assert there.get(timeout=LIMIT)["x"].tolist() == [7, 7, 7]
    process.join(LIMIT)
    assert process.exitcode == 0
    process.close()
    with ctx.Pool(2, maxtasksperchild=1) as pool:
        got = [pool.apply_async(_new_shared, (number,)) for number in range(6)]
        assert [each.get(LIMIT).tolist() for each in got] == [[number] * 3 for number in range(6)]
        pool.close()
        pool.join()


def test_it_does_not_wait_for_ever_for_what_nobody_takes() -> None:
    """A process ends soon with a shared tensor in a queue that nobody gets from."""
    ctx = tp.get_context("fork")
    there = ctx.Queue()
    process = ctx.Process(target=_share_and_end, args=(there,))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == 0
    process.close()
    with pytest.raises(tp.PeerLost):
        there.get(timeout=LIMIT)


class Getting:
    """An object that gets another while it is made."""

    there: tp.Queue
    got: Any = None

    def __reduce__(self) -> Any:
        return Getting.made, ()

    @classmethod
    def made(cls) -> int:
        cls.got = cls.there.get(timeout=LIMIT)
        return 1


def test_what_is_got_while_an_object_is_made_comes_in_its_own_form() -> None:
    """The outer get wants arrays, and has them, also of what is made after the inner one, which wants none."""
    outer, Getting.there = tp.Queue(), tp.Queue()
    Getting.there.put(_shared(3))
    outer.put([Getting(), _shared(3)])
    made, array = outer.get(timeout=LIMIT, as_numpy=True)
    assert (made, type(array), type(Getting.got)) == (1, np.ndarray, torch.Tensor)
    del Getting.there, Getting.got
