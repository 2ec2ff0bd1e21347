"""Queue: every kind of object, between processes of every start method; multiprocessing's errors; CPython's own tests."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import multiprocessing
import multiprocessing.queues
import os
import queue
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import echoing_process
import numpy as np
import pytest
import torch
import zoo
from crash_points import in_child, interrupted_at, raise_interrupt, reap
from inside import reading_end_of, shared_queue_of

import tensorpipe_ipc
import tensorpipe_ipc as tp
from tensorpipe_ipc.errors import Closed, UnsupportedLeaf
from tensorpipe_ipc.queues.simple_queue import SimpleQueue
from tensorpipe_ipc.queues.tensor_queue import Queue

LIMIT = 20


@contextlib.contextmanager
def echoing(method: str) -> Iterator[tuple[Queue, Queue]]:
    """A queue to another process, which sends back what comes, and the queue back."""
    there, back = Queue(), Queue()
    process = multiprocessing.get_context(method).Process(target=echoing_process.echo, args=(there, back))
    process.start()
    try:
        yield there, back
        there.put(None)
        process.join(LIMIT)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        process.close()


class Other:
    """No tree, but it can be pickled."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Unpicklable:
    def __reduce__(self) -> Any:
        raise AttributeError("not me")


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.kills), "forkserver"])
def test_every_animal_comes_back_from_another_process(method: str) -> None:
    """Every kind of tree crosses to another process and back, bit for bit."""
    with echoing(method) as (there, back):
        for name in zoo.ZOO.keys() - {"None"}:
            there.put(zoo.make(name))
            zoo.same(zoo.make(name), back.get(timeout=LIMIT), name)


@pytest.mark.parametrize("method", ["fork"])
def test_any_picklable_object_travels_with_its_tensors(method: str) -> None:
    """An object of a class, a set and a dtype arrive with tensors in them; shared memory stays shared."""
    base = torch.arange(6.0)
    with echoing(method) as (there, back):
        there.put(Other(base, base[2:], {1, 2}, torch.float8_e5m2))
        base.zero_()
        got = back.get(timeout=LIMIT)
    assert type(got) is Other
    first, view, numbers, dtype = got.parts
    assert (numbers, dtype, first.tolist()) == ({1, 2}, torch.float8_e5m2, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    first[3] = 9
    assert view[1] == 9


@pytest.mark.parametrize("text", ["short", "a long text " * 1000])
def test_pickles_of_every_length_have_their_tensors_in_their_places(text: str) -> None:
    """Tensors, arrays and storages stand where they stood, one that stands twice is one; an object's own buffers arrive."""
    there = Queue()
    dates = np.array(["2001-02-03", "2004-05-06"], "datetime64[D]")  # no leaf: its pickle is out of band, if asked
    one, other = torch.arange(3.0), np.arange(4)
    sent = Other(one, {"text": text, "array": other}, one, dates, torch.ones(5).untyped_storage(), torch.empty(0))
    for _ in range(2):
        there.put(sent)
        first, middle, again, days, storage, none = there.get().parts
        assert first is again
        assert first.tolist() == [0.0, 1.0, 2.0]
        assert middle["text"] == text
        assert middle["array"].tolist() == [0, 1, 2, 3]
        assert days.tolist() == dates.tolist()
        assert storage.nbytes() == 20
        assert none.shape == (0,)


def test_trees_and_pickles_of_one_queue_may_alternate() -> None:
    """Objects arrive whole whichever kind came before: the kind of the last object is but a guess at the next."""
    there = Queue()
    sent = [
        3,
        torch.ones(2),
        Other(1),
        Other(torch.ones(2)),
        {"a": Other(2)},
        {"a": torch.ones(2)},
        print,
        [torch.ones(2)],
    ]
    for first, second in itertools.product(sent, sent):
        for obj in (first, second):
            there.put(obj)
            got = there.get()
            assert type(got) is type(obj)
            if isinstance(obj, Other):
                assert list(map(type, got.parts)) == list(map(type, obj.parts))
            elif not isinstance(obj, dict):
                zoo.same(obj, got) if obj is not print else None


@pytest.mark.slow
@pytest.mark.parametrize("serializer", ["raw", "numpy", "torch_save"])
def test_tensors_of_ever_new_shapes_and_dtypes_come_as_they_were_sent(serializer: str) -> None:
    """More shapes than are remembered, twice over, by several queues in turn; and tensors that are not plain between them."""
    plain, other = tp.Queue(serializer=serializer), tp.Queue()
    for _ in range(2):
        for rows in range(1, 1200 if serializer == "raw" else 40):
            dtype = (torch.float32, torch.int16, torch.uint8, torch.complex64)[rows % 4]
            sent = torch.arange(2 * rows).reshape(rows, 2).to(dtype)
            for tensor in (sent, sent.T, sent.clone().requires_grad_(dtype.is_floating_point), sent[:0]):
                for each in (plain, other):
                    each.put(tensor)
                    got = each.get()
                    assert (got.dtype, got.shape, got.requires_grad) == (dtype, tensor.shape, tensor.requires_grad)
                    assert torch.equal(got, tensor)


def test_small_and_large_tensors_are_writable_and_the_receivers_own() -> None:
    """A received tensor is writable. Neither the sender's tensor nor the next message sees what is written."""
    there = Queue()
    for size in (10, 1 << 20):
        sent = torch.ones(size)
        there.put(sent)
        there.put(sent)
        one, other = there.get(), there.get()
        one.zero_()
        assert sent.sum() == size == other.sum()


def test_payloads_of_all_lengths_lie_in_one_block() -> None:
    """Short payloads, which are joined, longer ones, large ones and empty ones come back in their places."""
    there = Queue()
    lengths = [3, 0, 64, 4095, 4096, 1, 70_000, 65_536, 0, 65_535, 200]
    tensors = {
        f"{place} {length}": torch.randint(255, (length,), dtype=torch.uint8) for place, length in enumerate(lengths)
    }
    many = [torch.full((4000,), index % 251, dtype=torch.uint8) for index in range(600)]  # joined in more than one go
    arrays = [torch.ones(2, 3, dtype=torch.bfloat16), tensors["7 65536"][::2], tensors["10 200"].view(2, 100).t()]
    for tree in (tensors, many, {**tensors, "nested": [many, arrays, "text", 5]}):
        there.put(tree)
        zoo.same(tree, there.get())
    there.close()


def test_leases_outlive_the_queue() -> None:
    """A large tensor keeps its bytes when the queue that it came through is gone."""
    there = Queue()
    there.put(torch.arange(1 << 18))
    tensor = there.get()
    there.close()
    del there
    assert tensor.sum().item() == sum(range(1 << 18))


ON_A_LEASE = {
    "tensor": lambda sent: sent,
    "tensor in a tree": lambda sent: {"x": [sent, 1]},
    "bfloat16": lambda sent: sent.to(torch.bfloat16),
    "transposed": lambda sent: sent.view(4, -1).T,
    "views": lambda sent: (sent, sent[5:]),
    "array": lambda sent: sent.numpy(),
    "storage": lambda sent: sent.untyped_storage(),
}
LET_GO = {  # what is kept of a tensor that came
    "all": lambda came: came,
    "view": lambda came: came[1:],
    "detached": lambda came: came.detach(),
    "array": lambda came: came.numpy(),
    "view of array": lambda came: came.numpy()[1:].reshape(-1)[1:],
    "buffer": lambda came: memoryview(came.numpy())[1:],
    "storage": lambda came: came.untyped_storage(),
    "capsule": lambda came: torch.utils.dlpack.to_dlpack(came),
}


@pytest.mark.parametrize("kind", ON_A_LEASE)
def test_no_block_is_used_again_while_something_lies_on_it(kind: str) -> None:
    """Whatever a large message is made of, its block stays until that dies, and not longer."""
    there = Queue()
    there.put(ON_A_LEASE[kind](torch.ones(1 << 16)))
    came = there.get()
    live = shared_queue_of(there).leases.live
    assert len(live) == 1
    for _ in range(5):
        there.put(torch.zeros(1 << 16))
        there.get()
    zoo.same(came, ON_A_LEASE[kind](torch.ones(1 << 16)), kind)
    assert len(live) == 1
    del came
    assert not live


@pytest.mark.parametrize("part", LET_GO)
def test_the_last_alias_keeps_the_block(part: str) -> None:
    """A view, an array, a storage or a capsule of a tensor that came keeps its block when the tensor is gone."""
    there = Queue()
    there.put(torch.ones(1 << 16))
    kept = LET_GO[part](there.get())
    live = shared_queue_of(there).leases.live
    assert len(live) == 1
    del kept
    assert not live


def test_a_forked_child_that_lets_go_frees_nothing() -> None:
    """A child's copy of a tensor dies; the block is still the parent's."""
    there = Queue()
    there.put(torch.ones(1 << 16))
    kept = [there.get()]
    (word,) = shared_queue_of(there).leases.live
    before = shared_queue_of(there).words[word]
    assert reap(in_child(kept.clear)) == 0
    assert shared_queue_of(there).words[word] == before
    assert kept[0].sum() == 1 << 16
    kept.clear()


def test_a_producer_killed_after_put_has_delivered() -> None:
    """A message survives the SIGKILL of the process that put it."""
    there = Queue()
    made = torch.arange(1 << 17)  # here: a forked child that computes waits for ever for the threads of torch's pool

    def put_and_die() -> None:
        there.put([1, made])
        os.kill(os.getpid(), signal.SIGKILL)

    assert reap(in_child(put_and_die)) == -signal.SIGKILL
    number, tensor = there.get(timeout=LIMIT)
    assert (number, tensor.numel()) == (1, 1 << 17)
    del tensor


def test_bounds_and_errors_are_multiprocessings() -> None:
    """Full, Empty and ValueError come where multiprocessing.Queue has them, and the queue works on."""
    there = Queue(2)
    with pytest.raises(queue.Empty):
        there.get_nowait()
    with pytest.raises(queue.Empty):
        there.get(timeout=0.01)
    there.put(1)
    there.put(2)
    assert there.full()
    assert there.qsize() == 2
    for arguments in ((3, False), (3, True, 0.01)):
        with pytest.raises(queue.Full):
            there.put(*arguments)
    assert [there.get(), there.get()] == [1, 2]
    assert there.empty()
    there.close()
    with pytest.raises(Closed, match="is closed"):
        there.put(1)
    with pytest.raises(ValueError, match="is closed"):
        there.get()


def test_what_cannot_be_sent_raises_in_put_and_costs_nothing() -> None:
    """An object that cannot be pickled raises its own error, a tensor with history ours; a bounded queue keeps its room."""
    there = Queue(1)
    for _ in range(3):
        with pytest.raises(AttributeError, match="not me"):
            there.put([Unpicklable()])
        with pytest.raises(UnsupportedLeaf, match=r"tree\[0\]: .*requires_grad"):
            there.put([torch.ones(3, requires_grad=True) * 2])
        with pytest.raises(UnsupportedLeaf, match="tree: in Other: .*requires_grad"):
            there.put(Other(torch.ones(3), torch.ones(3, requires_grad=True) * 2))
    there.put("fits")
    assert there.get() == "fits"


def test_it_pickles_only_to_a_process_that_is_being_spawned() -> None:
    """As multiprocessing's queues do, it refuses to be pickled otherwise."""
    with pytest.raises(RuntimeError, match="spawning|inheritance"):
        multiprocessing.reduction.ForkingPickler.dumps(Queue())


@pytest.mark.parametrize("name", ["Queue", "JoinableQueue", "SimpleQueue"])
def test_it_is_one_of_multiprocessings_to_those_who_ask(name: str) -> None:
    """isinstance says so, and what programs reach for inside is there."""
    stock, there = getattr(multiprocessing.queues, name), getattr(tensorpipe_ipc, name)()
    assert isinstance(there, stock)
    there._writer.send(torch.ones(3))
    assert reading_end_of(there).recv().sum() == 3
    ends = (there, reading_end_of(there), there._writer)
    assert not any(each.closed for each in ends)
    there.close()
    assert all(each.closed for each in ends)


def test_the_bound_is_where_programs_look_for_it() -> None:
    """``_maxsize`` is multiprocessing's, also of a queue without a bound."""
    ctx = multiprocessing.get_context("fork")
    for maxsize in (0, 3):
        assert Queue(maxsize)._maxsize == ctx.Queue(maxsize)._maxsize  # type: ignore[attr-defined]


def test_a_python_without_the_gil_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """At import, and not by what goes wrong later."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(ImportError, match="tensorpipe_ipc does not work without the GIL"):
        runpy.run_path(str(tp.__file__))


def test_simple_queue() -> None:
    """SimpleQueue puts, gets, and tells whether it is empty."""
    there = SimpleQueue()
    assert there.empty()
    there.put(torch.ones(3))
    assert not there.empty()
    assert there.get().sum() == 3
    there.close()
    for call in (there.empty, there.get, functools.partial(there.put, 1)):
        with pytest.raises(OSError, match="handle is closed"):
            call()


@pytest.mark.skipif(
    importlib.util.find_spec("test._test_multiprocessing") is None, reason="this Python came without its own tests"
)
@pytest.mark.limit(110)
@pytest.mark.kills
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_cpythons_own_tests_pass(method: str) -> None:
    """Every case that has to do with a queue passes for every start method, but for those about a feeder thread."""
    only = ["WithProcessesTestQueue"] if method == "spawn" else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("conformance_queue.py")), method, *only],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TENSORPIPE_IPC_START_METHOD": method},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ran, made = (int(number) for number in re.findall(r"^(\d+) ran, .*, (\d+) Queue", done.stdout)[0])
    assert ran >= (7 if only else 16)
    assert made >= (6 if only else 12)


def test_an_unused_queue_that_is_closed_is_empty() -> None:
    """As multiprocessing has it: closing means nothing before the first put, and empty() raises after it."""
    there = Queue()
    there.close()
    assert there.empty()
    for kind in (Queue, SimpleQueue):
        there = kind()
        there.put(1)
        there.close()
        with pytest.raises(OSError, match="is closed"):
            there.empty()


class _Alarm(Exception):
    pass


class _Rung(NamedTuple):
    """It rings an alarm when it is pickled."""

    x: Any

    def __reduce__(self) -> tuple[Any, ...]:
        signal.raise_signal(signal.SIGUSR1)
        return _Rung, (self.x,)


def _ring(*_: Any) -> None:
    raise _Alarm


def test_an_exception_of_a_handler_while_an_object_is_pickled_ends_put() -> None:
    """It does not count as the object's own, which might cross as a tree all the same."""
    tp.register_type(_Rung)
    there = Queue()
    there.put(1)
    assert there.get(timeout=LIMIT) == 1
    before = signal.signal(signal.SIGUSR1, _ring)
    try:
        with pytest.raises(_Alarm):
            there.put(_Rung(2))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert there.empty()


def test_what_lies_between_two_views_of_one_tensor_is_not_sent() -> None:
    """As a program sends some rows of a table, or the two ends of a ring: the rest may be much, and nobody has put it."""
    there, memory = Queue(), torch.randint(0, 255, (10 << 20,), dtype=torch.uint8)
    rows = [memory[-1000:], memory[:1000], memory[5000:7000]]
    there.put(rows)
    assert 4000 <= there.statistics().bytes_put < 5000
    got = there.get(timeout=LIMIT)
    assert all(map(torch.equal, got, rows))
    assert sum({row.untyped_storage().data_ptr(): row.untyped_storage().nbytes() for row in got}.values()) < 5000


def test_views_that_overlap_or_lie_side_by_side_share_memory_on_arrival() -> None:
    there, memory = Queue(), torch.zeros(5000, dtype=torch.uint8)
    there.put([memory[500:900], memory[:600], memory[900:1000], memory[3000:4000], memory[3000:]])
    got = there.get(timeout=LIMIT)
    got[0].fill_(7)
    got[4].fill_(8)
    assert [each.sum().item() for each in got] == [400 * 7, 100 * 7, 0, 8000, 16000]
    assert len({each.untyped_storage().data_ptr() for each in got[:3]}) == 1


def test_what_interrupts_the_first_get_of_arrays_spoils_none_of_the_next_ones() -> None:
    """A process keeps what it finds out of a tree for the next messages: whole, or not at all."""
    there, before = Queue(), signal.signal(signal.SIGUSR2, raise_interrupt)
    for point in itertools.count(1, 5):
        tree = {f"{point} {number}": torch.ones(2) for number in range(3)}
        there.put_many([tree] * 3)
        there.get(timeout=LIMIT)
        was_interrupted = interrupted_at(point, lambda: there.get(timeout=0, as_numpy=True))
        while there.qsize():
            assert there.get(timeout=LIMIT, as_numpy=True).keys() == tree.keys(), point
        if not was_interrupted:
            break
    signal.signal(signal.SIGUSR2, before)
    assert point > 100
