"""Forks in the middle of a put or a get: by code of the user's that makes an object, or by a signal's handler."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import Empty
from typing import Any

import pytest
import torch
from arenas import left_in
from crash_points import SIGNAL_CHECKS, in_child, reap, run_traced
from inside import open_queue_of, set_lease_budget, shared_queue_of

import tensorpipe_ipc as tp

SIZE = 20_000  # items
LIMIT = 20


class Making:
    """The action of an object while it is made: none, unless a test sets one."""

    do: Callable[[torch.Tensor], object] = staticmethod(lambda _: None)


class Made:
    """An object that does something when it is made again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        Making.do(self.tensor)


class Through(BaseException):
    """Leaves the call in the child, as ``sys.exit`` does."""


def use_memory(ctx: Any) -> None:
    """Write to blocks that are free."""
    there = ctx.Queue()
    for _ in range(3):
        there.put(torch.full((SIZE,), 100.0))
        there.get()


def write_and_end(tensor: torch.Tensor) -> None:
    """In the child."""
    tensor.fill_(9)
    os._exit(0)


def write_and_return(tensor: torch.Tensor) -> None:
    """In the child, which then has what its parent has."""
    tensor.fill_(9)


def write_and_raise(tensor: torch.Tensor) -> None:
    """In the child, through the get."""
    tensor.fill_(9)
    raise Through


@pytest.mark.parametrize("many", [False, True], ids=["get", "get_many"])
@pytest.mark.parametrize("maxsize", [0, 3])
@pytest.mark.parametrize("then", [write_and_end, write_and_return, write_and_raise])
def test_what_a_child_does_that_was_forked_while_an_object_is_made_does_not_reach_its_parent(
    ctx: Any, monkeypatch: pytest.MonkeyPatch, then: Callable[[torch.Tensor], None], maxsize: int, many: bool
) -> None:
    """It may return from there, or raise: what remains of the get is the parent's."""
    there, parent, pids = ctx.Queue(maxsize), os.getpid(), list[int]()

    def fork(tensor: torch.Tensor) -> None:
        monkeypatch.setattr(Making, "do", lambda _: None)
        pid = os.fork()
        if pid:
            pids.append(pid)
            assert reap(pid) == 0
        else:
            then(tensor)

    there.put(Made(torch.full((SIZE,), 7.0)))
    monkeypatch.setattr(Making, "do", fork)
    try:
        got = there.get_many(1)[0] if many else there.get()
        if os.getpid() != parent:
            there.put(got)
            use_memory(ctx)
            os._exit(got.tensor.unique().tolist() != [9.0])
    except Through:
        in_the_child_again = 0
        with pytest.raises(tp.Empty):
            there.get(timeout=0)
        use_memory(ctx)
        os._exit(in_the_child_again)
    finally:
        if os.getpid() != parent:
            os._exit(99)
    if then is write_and_return:
        assert there.get(timeout=LIMIT).tensor.unique().tolist() == [9.0]  # the child's own
    use_memory(ctx)
    assert got.tensor.unique().tolist() == [7.0]
    assert len(pids) == 1
    for number in range(maxsize):
        there.put(number, timeout=0)  # every place is there
    for number in range(maxsize):
        assert there.get(timeout=0) == number
    del got
    assert left_in(ctx) == {}


@pytest.mark.parametrize("which", [0, 1, 3], ids=["first", "second", "last"])
@pytest.mark.parametrize("maxsize", [0, 8])
@pytest.mark.parametrize("then", ["returns", "raises", "keeps"])
def test_a_child_that_was_forked_while_one_of_many_is_made_has_none_of_those_behind_it(
    ctx: Any, monkeypatch: pytest.MonkeyPatch, then: str, maxsize: int, which: int
) -> None:
    """They are its parent's alone. An exception that ends the call in the child comes from there, whatever was made before."""
    there, parent, (told, tell) = ctx.Queue(maxsize), os.getpid(), os.pipe()

    def fork(_: torch.Tensor) -> None:
        monkeypatch.setattr(Making, "do", lambda _: None)
        if os.fork():
            if then != "keeps":
                assert os.read(told, 1) == b"."
        elif then == "raises":
            raise RuntimeError("of the child")

    tensors = [torch.full((SIZE,), float(n)) for n in range(4)]
    there.put_many([Made(each) if n == which else each for n, each in enumerate(tensors)])
    monkeypatch.setattr(Making, "do", fork)
    try:
        try:
            got = there.get_many(4, LIMIT)
        except RuntimeError:
            os.write(tell, b".")
            os._exit(then != "raises")
        if os.getpid() != parent:
            if then == "keeps":  # its parent lets go meanwhile, and uses the memory for others
                assert os.read(told, 1) == b"."
            mine = [each.tensor if type(each) is Made else each for each in got]
            is_right = [each.unique().tolist() for each in mine] == [[float(n)] for n in range(which + 1)]
            for each in mine:
                each.fill_(-7)
            if then != "keeps":
                os.write(tell, b".")
            os._exit(then == "raises" or not is_right)
    finally:
        if os.getpid() != parent:
            os._exit(99)
    mine = [each.tensor if type(each) is Made else each for each in got]
    assert [each.unique().tolist() for each in mine] == [[float(n)] for n in range(4)]
    if then == "keeps":
        del got, mine
        for _ in range(8):
            use_memory(ctx)
        os.write(tell, b".")
    assert os.WEXITSTATUS(os.wait()[1]) == 0
    os.close(told)
    os.close(tell)


@pytest.mark.parametrize("remembered", [False, True])
def test_a_get_that_fails_after_a_fork_within_is_made_again(
    ctx: Any, monkeypatch: pytest.MonkeyPatch, remembered: bool
) -> None:
    """The message does not go with what the failed one had in hand, and the child's writes do not reach it."""
    there, failures = ctx.Queue(), list[Exception]()

    def fork_and_fail(tensor: torch.Tensor) -> None:
        assert reap(in_child(lambda: write_and_end(tensor))) == 0
        raise MemoryError

    there.put(Made(torch.full((SIZE,), 7.0)))
    monkeypatch.setattr(Making, "do", fork_and_fail)
    with pytest.raises(MemoryError) as caught:
        there.get()
    if remembered:
        failures.append(caught.value)
    del caught
    use_memory(ctx)
    assert reap(in_child(lambda: use_memory(ctx))) == 0
    monkeypatch.setattr(Making, "do", lambda _: None)
    got = there.get(timeout=LIMIT)
    use_memory(ctx)
    assert got.tensor.unique().tolist() == [7.0]
    del got
    failures.clear()
    assert left_in(ctx) == {}


def test_a_get_that_failed_after_a_fork_within_leaves_nothing_when_its_queue_is_gone(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have been made again."""
    there = ctx.Queue()

    def fork_and_fail(_: torch.Tensor) -> None:
        assert reap(in_child(lambda: None)) == 0
        raise MemoryError

    there.put(Made(torch.full((SIZE,), 7.0)))
    monkeypatch.setattr(Making, "do", fork_and_fail)
    with pytest.raises(MemoryError):
        there.get()
    del there
    gc.collect()
    ctx.tensorpipe_attachment().destroy_left_queues()
    assert left_in(ctx) == {}


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "get": lambda ctx, there: (there.put(torch.full((SIZE,), 7.0)), there.get),
    "get_many": lambda ctx, there: (there.put(torch.full((SIZE,), 7.0)), lambda: there.get_many(1)[0]),
    "put": lambda ctx, there: (None, lambda: there.put(torch.full((SIZE,), 7.0))),
    "put_many": lambda ctx, there: (None, lambda: there.put_many([torch.full((SIZE,), 7.0)])),
    "move": lambda ctx, there: (None, _moving(there, ctx.empty(SIZE).fill_(7))),
    "empty": lambda ctx, there: (None, lambda: ctx.empty(SIZE).fill_(7)),
    "loan": lambda ctx, there: (None, lambda: _loan(there)),
}


def _loan(there: Any) -> None:
    with there.loan(SIZE) as tensor:
        tensor.fill_(7)


def _moving(there: Any, tensor: torch.Tensor) -> Callable[[], None]:
    return lambda: there.put(tensor, move=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_child_that_leaves_a_call_by_an_exception_disturbs_nothing(
    ctx: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A signal's handler forks at any moment of the call, and what it raises in the child ends the call there."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # nobody could catch it
    there = ctx.Queue(2)
    point, left = 1, 0
    CALLS[name](ctx, there)[1]()  # what is made once
    while there.qsize():
        there.get()
    while left <= 0:
        left = left_by_a_child(ctx, there, CALLS[name](ctx, there)[1], point)
        assert left_in(ctx) == {}
        for number in range(2):
            there.put(number, timeout=0)
        assert [there.get(timeout=0), there.get(timeout=0)] == [0, 1]
        point += 11
    assert point > 20


def left_by_a_child(ctx: Any, there: Any, call: Callable[[], Any], point: int) -> int:
    """Fork at a step of a call. Return how many steps were left to go to the fork."""
    pids, parent, result = list[int](), os.getpid(), list[Any]()

    def fork() -> None:
        pid = os.fork()
        if pid:
            pids.append(pid)
        else:
            raise Through

    try:
        left = run_traced(lambda: result.append(call()), point, fork, SIGNAL_CHECKS, before=False)
        assert os.getpid() == parent  # else it came where Python drops it
    except BaseException as error:
        if os.getpid() == parent:
            raise
        open_queue_of(shared_queue_of(there)).take_up()
        use_memory(ctx)
        os._exit(not isinstance(error, (Through, AssertionError)) or shared_queue_of(there).gets.holds_back)
    assert [reap(pid) for pid in pids] in ([], [0])
    (got,) = result
    if got is None:
        got = there.get(timeout=LIMIT)
    assert there.qsize() == 0
    use_memory(ctx)
    assert got.unique().tolist() == [7.0]
    return left


class Cyclic:
    """An object that leaves its tensor to the garbage collector."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: Any = tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        box = [state["tensor"]]
        box.append(box)


def test_a_tensor_that_is_collected_while_its_get_ends_leaves_no_block(ctx: Any) -> None:
    """At any moment of the get."""
    there, point, left = ctx.Queue(), 1, 0
    gc.collect()
    gc.disable()
    try:
        while left <= 0:
            there.put(Cyclic(torch.full((SIZE,), 7.0)))
            left = run_traced(there.get, point, lambda: gc.collect(0), SIGNAL_CHECKS, before=False)
            gc.collect(0)
            assert ctx.tensorpipe_attachment().arena.holders() == {}
            point += 1
    finally:
        gc.enable()
    assert point > 30


def test_what_other_threads_do_while_a_tensor_dies_harms_nobodys_tensor(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They free what is free, and get another message into the same block, at any moment of the release."""
    lost = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    there, point, left, kept = ctx.Queue(), 1, 0, list[torch.Tensor]()
    for forks in (False, True):
        point, left = 1, 0
        while left <= 0:
            there.put(torch.full((SIZE,), 7.0))
            box = [there.get()]
            if forks:
                assert reap(in_child(lambda: None)) == 0

            def others() -> None:
                ctx.tensorpipe_attachment().leases.settle()
                there.put(torch.full((SIZE,), 5.0))
                kept.append(there.get())

            def meanwhile(work: Callable[[], None] = others) -> None:
                thread = threading.Thread(target=work)
                thread.start()
                thread.join(LIMIT)

            left = run_traced(box.clear, point, meanwhile, SIGNAL_CHECKS, before=False)
            use_memory(ctx)
            assert all(each.unique().tolist() == [5.0] for each in kept)
            kept.clear()
            ctx.tensorpipe_attachment().leases.settle()
            assert ctx.tensorpipe_attachment().arena.holders() == {}
            point += 1
        assert point > 3  # three moments at least
    assert [each.exc_value for each in lost] == []


@pytest.mark.slow
def test_what_a_child_reads_is_not_freed_by_a_thread_that_saw_another_child_end(ctx: Any) -> None:
    """Another thread makes a tensor in the same block, forks, and lets go of it, at any moment of the look."""
    leases, point, left = ctx.tensorpipe_attachment().leases, 1, 0

    def let_go_while_a_child_lives() -> Callable[[], int]:
        box, (reader, writer) = [ctx.empty(SIZE).fill_(7) for _ in range(2)], os.pipe()

        def child() -> None:
            os.close(writer)
            os.read(reader, 1)
            os._exit(any(each.unique().tolist() != [7.0] for each in box))

        pid = in_child(child)
        os.close(reader)
        box.clear()
        return lambda: (os.close(writer), reap(pid))[1]

    while left <= 0:
        assert let_go_while_a_child_lives()() == 0
        ends: list[Callable[[], int]] = []

        def others(ends: list[Callable[[], int]] = ends) -> None:
            leases.settle()
            ends.append(let_go_while_a_child_lives())

        def meanwhile(work: Callable[[], None] = others) -> None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(LIMIT)

        left = run_traced(lambda: leases.settle(), point, meanwhile, SIGNAL_CHECKS, before=False)
        use_memory(ctx)
        assert [end() for end in ends] in ([], [0]), point
        leases.settle()
        point += 1
    assert point > 10
    assert left_in(ctx) == {}


def test_what_is_collected_while_kept_blocks_are_looked_at_costs_no_message(ctx: Any) -> None:
    """Python may collect garbage wherever an object is made, and with it tensors that a child can read."""
    there, dying = ctx.Queue(), [ctx.empty(SIZE) for _ in range(40)]
    pid = in_child(signal.pause)
    del dying[20:]  # the child keeps them
    there.put(torch.full((SIZE,), 5.0))

    def collect(phase: str, _: Any) -> None:
        if dying and sys._getframe(1).f_code is type(shared_queue_of(there).leases).settle.__code__:
            dying.pop()

    thresholds = gc.get_threshold()
    gc.callbacks.append(collect)
    try:
        gc.set_threshold(5)
        for _ in range(3):
            there.trim()
        assert there.get(timeout=LIMIT).unique().tolist() == [5.0]
    finally:
        gc.callbacks.remove(collect)
        gc.set_threshold(*thresholds)
        os.kill(pid, signal.SIGKILL)
        reap(pid)


def test_a_tensor_at_whose_death_a_handler_raises_is_free_at_a_later_get(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what is raised there. Nobody needs to be short of memory; a process that only gets never is."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr("tensorpipe_ipc.memory.leases.PAUSE", 0.0)  # seconds in which it does not look again
    there, point, left = ctx.Queue(), 1, 0
    set_lease_budget(ctx.tensorpipe_attachment().leases, 4 * SIZE + 4096)  # for one of them, by pages

    def interrupt() -> None:
        raise Through

    while left <= 0:
        there.put(torch.full((SIZE,), 7.0))
        box = [there.get()]
        left = run_traced(box.clear, point, interrupt, SIGNAL_CHECKS, before=False)
        there.put(torch.full((SIZE,), 7.0))
        there.get(copy=False)
        assert ctx.tensorpipe_attachment().arena.holders() == {}, point
        point += 1
    assert point > 3


def test_an_exception_while_a_tensor_is_made_in_the_arena_leaves_no_block(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler raises at any moment from which on the block is taken."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # nobody could catch it
    there = ctx.Queue()

    def interrupt() -> None:
        raise Through

    for make in (lambda: ctx.empty(SIZE), lambda: there.loan((SIZE,)).__enter__()):
        point, left = 1, 0
        while left <= 0:
            make()
            try:
                left = run_traced(make, point, interrupt, SIGNAL_CHECKS, before=False)
            except Through:
                left = 0
            ctx.tensorpipe_attachment().leases.settle()
            assert ctx.tensorpipe_attachment().arena.holders() == {}, point
            point += 1
        assert point > 30


def test_a_child_that_leaves_a_get_that_failed_does_not_end_what_its_parent_gets_next(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler forks while a get tidies up that found nothing. The child gets while its parent makes the next object."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    there, parent = ctx.Queue(2), os.getpid()
    there.put(0)
    there.get()
    point, pids = 1, [0]
    while pids:
        pids = []
        (told, tell), (done, say_done) = os.pipe(), os.pipe()

        def fork(pids: list[int] = pids) -> None:
            pid = os.fork()
            if not pid:
                raise Through
            pids.append(pid)

        def make(_: torch.Tensor, tell: int = tell, done: int = done) -> None:
            os.write(tell, b".")
            os.read(done, 1)
            there.put(torch.full((SIZE,), 9.0), timeout=LIMIT)

        try:
            run_traced(lambda: pytest.raises(Empty, there.get, timeout=0), point, fork, SIGNAL_CHECKS, before=False)
        except BaseException:
            if os.getpid() == parent:
                raise
        if os.getpid() != parent:
            os.read(told, 1)
            with contextlib.suppress(Empty):
                there.get(timeout=0)
            use_memory(ctx)
            os.write(say_done, b".")
            os._exit(0)
        if pids:
            there.put(Made(torch.ones(SIZE)))
            monkeypatch.setattr(Making, "do", staticmethod(make))
            got = there.get(timeout=LIMIT).tensor
            monkeypatch.undo()
            assert got.unique().tolist() == [1.0]
            assert there.get(timeout=LIMIT).unique().tolist() == [9.0]
            for number in range(2):
                there.put(number, timeout=0)
            assert [there.get(timeout=0), there.get(timeout=0)] == [0, 1]
            assert reap(pids[0]) == 0
        for end in (told, tell, done, say_done):
            os.close(end)
        point += 7
    assert point > 50
