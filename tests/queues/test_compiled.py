"""The compiled path: what it does is what the Python source does, and no death, signal or fork makes a difference.

The other tests of queues run with it, too, where it was built; with TENSORPIPE_IPC_COMPILED=0 they run without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from arenas import blocks_in_use, ctx, small_context  # noqa: F401 - a fixture
from children import in_thread
from crash_points import LIMIT, in_child, reap
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import keep_pure, load_compiled_path_again, shared_queue_of
from killed_calls import CALLS, DeadlyQueue, warm

import tensorpipe_ipc as tp
from tensorpipe_ipc import compiled
from tensorpipe_ipc.memory.leases import Leases

pytestmark = pytest.mark.skipif(bool(compiled.why_off()), reason=f"there is none: {compiled.why_off()}")

LARGE = 50_000  # bytes, which come as a lease


@pytest.fixture
def only_compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Have the Python source refuse to put and to get in a queue."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the Python source was asked")

    def use(queue: Any) -> None:
        inner = shared_queue_of(queue)
        for name in ("put", "put_many", "get", "get_many"):
            monkeypatch.setattr(inner, name, refuse)

    return use


# ---- what it does ----

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.builds(
        lambda dtype, shape: torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(dtype),
        st.sampled_from(
            [
                torch.float32,
                torch.float64,
                torch.float16,
                torch.bfloat16,
                torch.int64,
                torch.uint8,
                torch.bool,
                torch.int16,
            ]
        ),
        st.lists(st.integers(0, 5), max_size=4),
    ),
    st.builds(
        lambda n: torch.full((n,), 7, dtype=torch.uint8), st.sampled_from([1, 63, 64, 65, 32768, 65535, 65536, 70000])
    ),
    st.builds(lambda n: torch.arange(n * 2.0)[::2], st.integers(1, 5)),
)
_TREES = st.recursive(
    _LEAVES,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(0, 3)), children, max_size=4),
    ),
    max_leaves=12,
)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            type(one) is type(other)
            and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return type(other) is dict and list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and bool(one == other)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_TREES)
def test_messages_are_the_same_and_the_objects_too(tree: Any) -> None:
    """A queue that is read by hand tells the metadata. Either source makes the same object of either's message."""
    written, made = [], []
    for is_pure in (False, True):
        queue = QUEUES[is_pure]
        if is_pure:
            keep_pure(queue)
        queue.put([torch.zeros(1), {1}])  # the form of an object without tensors depends on the one before it
        queue.get()
        queue.put(tree)
        message = shared_queue_of(queue).get(0)
        written.append((message.metadata, len(message.payload)))  # what lies between leaves is nobody's
        queue.put(tree)
        queue.put_many([tree, tree])
        made += [queue.get(timeout=LIMIT), *queue.get_many(1), *queue.get_many(1)]
    assert written[0] == written[1]
    assert all(alike(each, made[0]) for each in made)
    made.clear()


QUEUES: list[Any] = []


@pytest.fixture(autouse=True)
def _two_queues() -> Iterator[None]:
    QUEUES[:] = [tp.Queue(), tp.Queue()]
    for queue in QUEUES:
        for obj in ({"a": torch.zeros(3), "b": 1}, torch.zeros(20_000)):
            warm(queue, obj)
    yield
    QUEUES.clear()


@pytest.mark.parametrize("maxsize", [0, 4])
@pytest.mark.parametrize(
    "obj",
    [
        torch.arange(100.0),
        {"a": torch.ones(3), "step": 7, "name": "x"},
        (torch.arange(LARGE // 4), [torch.ones(2), None]),
    ],
    ids=["tensor", "tree", "lease"],
)
def test_it_is_done_with_no_help_of_the_python_source(
    ctx: Any,  # noqa: F811
    only_compiled: Callable[[Any], None],
    obj: Any,
    maxsize: int,
) -> None:
    queue = ctx.Queue(maxsize)
    warm(queue, obj)
    only_compiled(queue)
    for _ in range(20):
        queue.put(obj)
        assert alike(queue.get(), obj)
        queue.put(obj, timeout=1)
        assert alike(queue.get(timeout=1), obj)
        queue.put(obj)
        assert alike(queue.get_nowait(), obj)
    queue.put_many([obj] * 3)
    assert all(map(alike, queue.get_many(64), [obj] * 3))


@pytest.mark.parametrize("maxsize", [0, 4])
def test_what_it_leaves_to_the_python_source_keeps_its_place(ctx: Any, maxsize: int) -> None:  # noqa: F811
    """Everyday messages and others by turns, put and got one by one and several at once, come in order."""
    queue, plain = ctx.Queue(maxsize), torch.arange(10)
    warm(queue, plain)
    for sent in itertools.product([plain, {1, 2}, torch.ones(2, 3).t(), torch.zeros(0)], repeat=3):
        for at_once in (1, 2, 3):
            for start in range(0, 3, at_once):
                queue.put_many(list(sent[start : start + at_once])) if at_once > 1 else queue.put(sent[start])
            found: list[Any] = []
            while len(found) < 3:
                found += queue.get_many(at_once)
            assert all(map(alike, found, sent))
    with pytest.raises(tp.Empty):
        queue.get_nowait()


def test_statistics_count_what_either_source_does(ctx: Any) -> None:  # noqa: F811
    queue, obj = ctx.Queue(), torch.arange(10)
    warm(queue, obj)
    before = queue.statistics()
    for number in range(6):
        queue.put(obj if number % 2 else {number})
        queue.get()
    queue.put_many([obj] * 4)
    queue.get_many(64)
    after = queue.statistics()
    assert (after.messages_put - before.messages_put, after.messages_got - before.messages_got) == (10, 10)


def test_no_reference_is_lost_or_kept(ctx: Any) -> None:  # noqa: F811
    """Of what is put, of what is got, and of what both hold in between."""
    queue = ctx.Queue()
    tree = {"a": torch.arange(10), "b": [torch.ones(2), "text", 5, None], "large": torch.zeros(LARGE)}
    strange = [torch.arange(3), {1, 2}]
    warm(queue, tree)
    counted = [tree, tree["a"], tree["b"], tree["b"][0], "text", strange, strange[0], None, queue]

    def turn() -> None:
        queue.put(tree)
        queue.get()
        queue.put(strange)
        queue.get()
        queue.put_many([tree, strange, tree])
        while not queue.empty():
            queue.get_many(64)

    turn()
    gc.collect()
    before = [sys.getrefcount(each) for each in counted]
    objects = len(gc.get_objects())
    for _ in range(200):
        turn()
    gc.collect()
    after = [sys.getrefcount(each) for each in counted]
    assert [other - one for one, other in zip(before, after, strict=True) if abs(one - other) >= 20] == []
    assert len(gc.get_objects()) - objects < 100


# ---- deaths ----


def killed_at(point: int, calls: DeadlyQueue) -> bool:
    """Have a child die at the n-th step of the compiled path. Return whether it came so far."""
    from tensorpipe_ipc import _compiled  # type: ignore[attr-defined]

    def child() -> None:
        calls.prepare()
        _compiled.die_at(point)
        calls.call()
        assert _compiled.die_at(0) > 0, "it was done by the Python source"
        os._exit(7)

    status = reap(in_child(child))
    assert status in (7, -signal.SIGKILL)
    return status != 7


@pytest.mark.parametrize("maxsize", [0, 4])
@pytest.mark.parametrize("size", [400, LARGE])
@pytest.mark.parametrize("name", CALLS)
def test_a_process_killed_at_any_step_of_it_leaves_all_whole(name: str, size: int, maxsize: int) -> None:
    """Each store to shared memory and each system call is a step; it dies right before it or right after it."""
    calls, point = DeadlyQueue(name, size, maxsize), 1
    while killed_at(point, calls):
        calls.check()
        point += 1
    calls.check()
    assert point > 6
    assert len(calls.seen) > 1
    calls.close()


# ---- signals and forks ----

TICKING = """
import signal, sys, torch
import tensorpipe_ipc as tp

class Tick(Exception):
    pass

def tick(*_):
    global ticks
    if armed:
        ticks += 1
        raise Tick

armed, ticks, queue = False, 0, tp.Queue(int(sys.argv[1]))
for _ in range(5):
    queue.put({"a": torch.arange(50), "n": 0})
    queue.get()
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
got, found = [], None
for number in range(30_000):
    obj = {"a": torch.arange(50), "n": number}
    try:
        armed = True
        queue.put(obj)  # once, or not at all
    except Tick:
        pass
    armed = False
    while queue.qsize():
        try:
            armed = True
            found = queue.get_nowait()
            armed = False
            got.append(found["n"])
        except (Tick, tp.Empty):
            pass
        armed = False
signal.setitimer(signal.ITIMER_REAL, 0)
assert got == sorted(set(got)), "twice, or out of order"
print(30_000 - len(got), queue.statistics().lost, ticks)
"""


@pytest.mark.parametrize("maxsize", [0, 2])
def test_a_handler_that_raises_a_thousand_times_a_second_doubles_nothing(maxsize: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TICKING, str(maxsize)], capture_output=True, text=True, timeout=LIMIT * 3, check=False
    )
    assert done.returncode == 0, done.stderr
    missing, lost, ticks = map(int, done.stdout.split())
    assert ticks > 30
    assert missing <= ticks  # each exception ends one put, or takes what one get was about to return
    assert lost == 0


def test_a_forked_child_begins_anew(ctx: Any) -> None:  # noqa: F811
    """The parent's path has its rows, operations and blocks in hand: they stay the parent's."""
    queue, obj = ctx.Queue(), torch.arange(100)
    warm(queue, obj)

    def child() -> None:
        for number in range(100):
            queue.put(torch.full((100,), number))

    pid = in_child(child)
    for number in range(100, 200):
        queue.put(torch.full((100,), number))
    assert reap(pid) == 0
    got = [int(queue.get(timeout=LIMIT)[0]) for _ in range(200)]
    assert [each for each in got if each < 100] == list(range(100))
    assert [each for each in got if each >= 100] == list(range(100, 200))


# ---- where there is none ----


def test_it_is_switched_off_by_the_environment() -> None:
    program = (
        "import torch, tensorpipe_ipc as tp; from tensorpipe_ipc import compiled\n"
        "queue = tp.Queue(); queue.put(torch.ones(3)); print(int(queue.get().sum()), compiled.why_off())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT * 3,
        check=True,
        env={**os.environ, "TENSORPIPE_IPC_COMPILED": "0"},
    )
    assert done.stdout.split() == ["3", "TENSORPIPE_IPC_COMPILED=0"]


def test_one_that_another_version_was_built_with_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pull in a checkout. Queues work, and the reason is told."""
    said = in_child(lambda: _with_a_stale_one(monkeypatch))
    assert reap(said) == 0


def _with_a_stale_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = types.ModuleType("tensorpipe_ipc._compiled")
    stale.sizes = (464, 22, 152)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stale.__name__, stale)
    load_compiled_path_again("1")
    queue = tp.Queue()
    queue.put(torch.ones(3))
    assert int(queue.get(timeout=LIMIT).sum()) == 3
    assert "another version of this package" in compiled.why_off()


# ---- what differed ----


def warm_up(queue: Any) -> None:
    warm(queue, {"tensor": torch.ones(3), "number": 1})


@pytest.mark.parametrize("size", [131_000, 140_000])
def test_a_tree_of_more_nodes_than_are_read_is_pickled(ctx: Any, size: int) -> None:  # noqa: F811
    there = ctx.Queue()
    warm_up(there)
    tree = {"tensor": torch.ones(3), "tokens": [list(range(each, each + 20_000)) for each in range(0, size, 20_000)]}
    for _ in range(3):
        there.put(tree)
        got = there.get(timeout=LIMIT)
        assert got["tokens"] == tree["tokens"]
    assert not there.statistics().undecodable


def test_two_storages_at_one_address_arrive_on_one_memory(ctx: Any) -> None:  # noqa: F811
    there = ctx.Queue()
    warm_up(there)
    array = np.zeros(8, np.float32)
    for _ in range(3):
        there.put([torch.from_numpy(array), torch.from_numpy(array)])
        one, other = there.get(timeout=LIMIT)
        one[0] = 5
        assert other[0] == 5


class _Ended(Exception):
    """No OSError: that might be a system call's."""


@pytest.mark.parametrize("size", [3, LARGE])
def test_a_handlers_exception_ends_a_call_where_torch_has_a_default_device(
    ctx: Any,  # noqa: F811
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own methods are Python's there, and so handlers run within them."""
    there, raised, ended = ctx.Queue(), 0, 0
    tree = [torch.zeros(size, dtype=torch.uint8) for _ in range(20)]
    warm(there, tree)

    def tick(*_: Any) -> None:
        nonlocal raised
        raised += 1
        raise _Ended

    def drop(told: Any) -> None:  # what comes in a finalizer
        nonlocal ended
        ended += isinstance(told.exc_value, _Ended)

    monkeypatch.setattr("sys.unraisablehook", drop)
    before = signal.signal(signal.SIGALRM, tick)
    try:
        with torch.device("cpu"):
            for number in range(300):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-4 + number * 1e-6)
                    there.put(tree)
                    while there.qsize():
                        there.get_nowait()
                    while not raised > number:
                        pass
                except _Ended:
                    ended += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert raised == ended == 300
    while there.qsize():
        there.get_nowait()


class Stops:
    """It ends by StopIteration where it is rebuilt."""

    def __reduce__(self) -> Any:
        return next, (iter(()),)


@pytest.mark.parametrize("many", [False, True])
def test_what_an_object_raises_is_raised_whatever_it_is(ctx: Any, many: bool) -> None:  # noqa: F811
    there = ctx.Queue()
    warm_up(there)
    for _ in range(2):
        there.put(Stops())
        with pytest.raises(StopIteration):
            there.get_many(3) if many else there.get()
        there.put("next")
        assert (there.get_many(3) if many else [there.get()]) == ["next"]


def test_what_an_exception_ends_on_its_way_to_python_is_sent_whole_or_not_at_all(ctx: Any) -> None:  # noqa: F811
    """A signal's handler may raise as soon as a function of Python's is called."""
    there, count, raised = ctx.Queue(), 0, list[int]()
    puts = shared_queue_of(there).puts
    send_taken = puts.send_taken

    def interrupted(*arguments: Any) -> None:
        raised.append(1)
        if len(raised) == 1:
            raise KeyboardInterrupt
        send_taken(*arguments)

    puts.send_taken = interrupted
    warm_up(there)
    with contextlib.suppress(KeyboardInterrupt):
        for count in itertools.count():  # until the pipe is full
            there.put([torch.full((3,), count)])
    assert raised
    there.put(None)
    got = [int(each[0][0]) for each in iter(there.get, None)]
    assert got in (list(range(count)), list(range(count + 1)))
    assert not blocks_in_use(ctx)


def _put_and_get_many(there: Any, tensors: list[Any]) -> None:
    while True:
        there.put_many(tensors)
        with contextlib.suppress(tp.ShutDown):  # then the next put raises it
            while there.qsize():
                there.get_many(64)


def test_a_shutdown_within_a_put_of_many_says_how_many_were_put(ctx: Any) -> None:  # noqa: F811
    there, tensors = ctx.Queue(), [torch.ones(3)] * 64
    warm_up(there)
    child = in_child(functools.partial(there.shutdown, immediate=True))
    with pytest.raises(tp.ShutDown) as raised:
        _put_and_get_many(there, tensors * 8)
    assert 0 <= raised.value.put <= 512
    assert reap(child) == 0


def test_programs_that_put_and_get_many_alone_take_it(
    ctx: Any,  # noqa: F811
    only_compiled: Callable[[Any], None],
) -> None:
    there = ctx.Queue()
    for _ in range(4):
        there.put_many([torch.ones(3)] * 3)
        assert len(there.get_many(3)) == 3
    only_compiled(there)
    there.put_many([torch.ones(3)] * 3)
    assert len(there.get_many(3)) == 3


def test_tensors_of_a_few_bits_are_refused_as_ever(ctx: Any) -> None:  # noqa: F811
    there = ctx.Queue()
    warm_up(there)
    for dtype in (torch.uint1, torch.int4):
        with pytest.raises(tp.UnsupportedLeaf):
            there.put([torch.empty(8, dtype=dtype)])
    there.put([torch.ones(3, dtype=torch.int8), torch.ones(3, dtype=torch.uint8)])
    assert [each.dtype for each in there.get()] == [torch.int8, torch.uint8]


def test_a_child_that_is_forked_while_another_thread_puts_takes_it(
    ctx: Any,  # noqa: F811
    only_compiled: Callable[[Any], None],
) -> None:
    """The message that the thread was putting stays the parent's."""
    there, other, large = ctx.Queue(), ctx.Queue(), {"x": torch.zeros(24 << 20, dtype=torch.uint8), "n": 1}
    warm_up(there)
    there.put(large)
    there.get(copy=True)

    def put_there() -> None:
        warm_up(other)
        only_compiled(other)
        other.put(torch.ones(3))

    for _ in range(4):
        putting = in_thread(lambda: there.put(large))
        child = in_child(put_there)
        putting()
        assert reap(child) == 0
        assert other.get(timeout=LIMIT).tolist() == [1, 1, 1]
        assert there.get(timeout=LIMIT, copy=True)["n"] == 1


def test_a_tensor_whose_memory_is_gone_is_refused_as_ever(ctx: Any) -> None:  # noqa: F811
    """Wherever in its storage it begins: torch adds that to where there is nothing."""
    there, gone = ctx.Queue(), torch.ones(2000)
    warm(there, torch.ones(3))
    parts = gone[4:], gone
    gone.untyped_storage().resize_(0)
    for part in parts:
        with pytest.raises(tp.UnsupportedLeaf, match="memory was let go"):
            there.put(part)
    there.put("next")
    assert there.get(timeout=LIMIT) == "next"


@pytest.mark.parametrize("kind", ["a lease", "a pickle"])
def test_a_get_near_the_recursion_limit_loses_nothing(ctx: Any, kind: str) -> None:  # noqa: F811
    """Wherever there is no depth left for one call more, the message comes again."""
    there, limit, errors = ctx.Queue(3), sys.getrecursionlimit(), 0
    make = (lambda n: torch.full((LARGE,), n)) if kind == "a lease" else (lambda n: [n, {1, 2}])
    warm(there, make(0))

    def get_at(depth: int) -> Any:
        return get_at(depth - 1) if depth else there.get()

    here = len(inspect.stack(0))
    for depth in range(60):
        there.put(make(depth), timeout=LIMIT)
        try:
            sys.setrecursionlimit(here + 60)
            try:
                got = get_at(depth)
            finally:
                sys.setrecursionlimit(limit)
        except RecursionError:
            errors += 1
            got = there.get(timeout=LIMIT)
        assert int(got[0]) == depth
    assert errors
    assert there.statistics().lost == 0


class _One(Exception):
    """The exception of one handler."""


class _Other(Exception):
    """The exception of another one."""


def test_two_handlers_that_raise_within_a_get_lose_no_message_and_no_place(
    ctx: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one raises as soon as Python has been told of the first."""
    there, lease, pending = ctx.Queue(2), Leases.lease, list[int]()

    def leasing(self: Leases, *arguments: Any, **named: Any) -> Any:
        if pending:
            del pending[:]
            libc, both = ctypes.CDLL(None), (ctypes.c_ulong * 16)(1 << signal.SIGUSR1 - 1 | 1 << signal.SIGUSR2 - 1)
            libc.pthread_sigmask(signal.SIG_BLOCK, both, None)
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # another thread would hear it at once
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
            libc.pthread_sigmask(signal.SIG_UNBLOCK, both, None)  # both come at once, with no Python code between them
        return lease(self, *arguments, **named)

    def raise_one(*_: Any) -> None:
        raise _One

    def raise_other(*_: Any) -> None:
        raise _Other

    monkeypatch.setattr(Leases, "lease", leasing)
    before = signal.signal(signal.SIGUSR1, raise_one), signal.signal(signal.SIGUSR2, raise_other)
    try:
        warm(there, torch.zeros(LARGE))
        for number in range(4):
            there.put(torch.full((LARGE,), number), timeout=LIMIT)
            raised = list[type[Exception]]()
            try:
                try:
                    pending.append(1)
                    there.get()
                except (_One, _Other) as error:
                    raised.append(type(error))
                for _ in range(100):
                    pass
            except (_One, _Other) as error:
                raised.append(type(error))
            assert raised
            assert int(there.get(timeout=LIMIT)[0]) == number
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGUSR2, before[1])


@pytest.mark.parametrize("many", [False, True])
def test_a_child_that_leaves_a_get_as_python_takes_it_over_disturbs_nothing(ctx: Any, many: bool) -> None:  # noqa: F811
    """A signal's handler may fork there. The message is the parent's, and its queue goes on."""
    there, children = ctx.Queue(4), list[int]()
    gets = shared_queue_of(there).gets
    get_taken = gets.get_taken
    process = os.getpid()

    def begin(*arguments: Any) -> Any:
        if not children:
            children.append(os.fork())
            if not children[0]:
                raise _One
        return get_taken(*arguments)

    gets.get_taken = begin
    sent = [7, b"x" * 30_000, {1}]
    try:
        children.append(0)
        for _ in range(3):
            there.put([0, b"", {1}])
            _ = there.get_many(2) if many else there.get()
        there.put(sent)
        del children[:]
        got = there.get_many(2)[0] if many else there.get()
    except BaseException as error:
        if os.getpid() == process:
            raise
        shared_queue_of(there).close()
        os._exit(type(error) is not _One)
    assert reap(children[0]) == 0
    assert got == sent
    for number in range(4):
        there.put(number, timeout=LIMIT)
    assert [there.get(timeout=LIMIT) for _ in range(4)] == [0, 1, 2, 3]


def test_a_signal_that_comes_while_a_get_spins_is_heard_though_nothing_comes(ctx: Any) -> None:  # noqa: F811
    """The get spins first, and then sleeps."""

    def raise_one(*_: Any) -> None:
        raise _One

    there = ctx.Queue(spin=0.001)
    warm(there, torch.ones(3))
    before = signal.signal(signal.SIGALRM, raise_one)

    def get() -> None:
        for _ in range(20):
            with contextlib.suppress(_One):
                signal.setitimer(signal.ITIMER_REAL, 0.0006)
                there.get()

    try:
        get()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
