"""Signals and forks: every wait can be interrupted, a handler may do what it likes, and a fork is told that it is one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from bursts import COUNT
from children import PATIENCE, Child, in_thread, interrupted, ticking
from programs import ran_in_fork
from zmq.utils import garbage

import tensorpipe_ipc as tp

pytestmark = [pytest.mark.limit(25), pytest.mark.usefixtures("transport")]


@pytest.mark.parametrize("attached", [False, True])
def test_ctrl_c_ends_a_waiting_get(attached: bool) -> None:
    """KeyboardInterrupt comes out of get at once, and the next get gets the next message."""
    with Child() as child, tp.Producer("waiting") as producer:
        child.call(children.open_consumer, "waiting")
        if attached:
            child.begin(children.take)
            producer.put("met", PATIENCE)
            assert child.result() == ["met"]
        child.begin(interrupted, children.take, 1, None)
        child.wait_until_blocked()
        child.signal(signal.SIGINT)
        assert child.result() < 1
        child.begin(children.take)
        producer.put("after", PATIENCE)
        assert child.result() == ["after"]


@pytest.mark.parametrize("attached", [False, True])
def test_ctrl_c_ends_a_waiting_put(attached: bool) -> None:
    """KeyboardInterrupt comes out of put at once; the message was not sent, and the end is usable."""
    with Child() as child, contextlib.ExitStack() as stack:
        child.call(children.open_producer, "waiting")
        sent = []
        if attached:
            consumer = stack.enter_context(tp.Consumer("waiting", maxsize=1))
            child.begin(children.put, "met", "fills the room")
            assert consumer.get(PATIENCE) == "met"
            child.result()
            sent = ["fills the room"]
        child.begin(interrupted, children.put_for_ever, "never sent")
        child.wait_until_blocked()
        child.signal(signal.SIGINT)
        assert child.result() < 1
        if not attached:
            consumer = stack.enter_context(tp.Consumer("waiting", maxsize=1))
        child.begin(children.put, "after")
        assert [consumer.get(PATIENCE) for _ in [*sent, 1]] == [*sent, "after"]
        child.result()
        child.call(children.close)


def test_ctrl_c_ends_a_waiting_flush() -> None:
    """KeyboardInterrupt comes out of flush at once; nothing is lost, and flush can be called again."""
    with tp.Consumer("waiting") as consumer, Child() as child:
        child.call(children.open_producer, "waiting")
        child.begin(children.put, "met", "in flight")
        assert consumer.get(PATIENCE) == "met"
        child.result()
        child.begin(interrupted, children.flush, None)
        child.wait_until_blocked()
        child.signal(signal.SIGINT)
        assert child.result() < 1
        assert consumer.get(PATIENCE) == "in flight"
        child.call(children.flush)


def test_ctrl_c_ends_a_waiting_close() -> None:
    """KeyboardInterrupt comes out of close, which has closed the end all the same."""
    with tp.Consumer("waiting") as consumer, Child() as child:
        child.call(children.open_producer, "waiting", linger=PATIENCE)
        child.begin(children.put, "met", "in flight")
        assert consumer.get(PATIENCE) == "met"
        child.result()
        child.begin(interrupted, children.close)
        child.wait_until_blocked()
        child.signal(signal.SIGINT)
        assert child.result() < 1
        with pytest.raises(tp.Closed):
            child.call(children.put, "late")
        assert list(consumer) == ["in flight"]


@pytest.mark.slow
def test_a_handler_that_does_nothing_disturbs_nothing() -> None:
    """20,000 messages while a thousand signals a second interrupt both ends: all arrive, once and in order."""
    ticks: list[int] = []
    with tp.Consumer("ticking", maxsize=1000) as consumer, Child() as child:
        child.call(children.open_producer, "ticking", maxsize=1000)
        child.begin(children.put_numbers_while_ticking, 20_000)
        with ticking(0.001, lambda number, frame: ticks.append(number)):
            for number in range(20_000):
                assert consumer.get(PATIENCE) == ("", number)
        assert child.result()
        assert ticks  # how many, depends on what else the machine does: the kernel counts in its own ticks
        assert consumer.statistics().lost == 0


def burst(what: str, scheme: str, binds: bool, transport: str, folder: Path) -> dict[str, Any]:
    """Return what a program and its other end saw, while an exception hits its puts or gets."""
    endpoint = f"ipc://{folder}/bursts.sock" if scheme == "ipc" else "tcp://127.0.0.1:0"
    shared_memory = "off" if transport == "frames" else "auto"
    done = ran_in_fork(
        "-m", "tests.bursts", what, endpoint, "binds" if binds else "connects", shared_memory, folder=folder
    )
    assert done.status == 0, done.err  # where pyzmq looks for signals as it frees a frame, it says so there
    seen: dict[str, Any] = json.loads(done.out)
    assert seen["raised"] > 20
    assert seen["got"] == sorted(set(seen["got"]))
    assert seen["end"] == "EndOfStream"
    return seen


@pytest.mark.parametrize("binds", [True, False])
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_handler_that_raises_out_of_get(transport: str, scheme: str, binds: bool, tmp_path: Path) -> None:
    """Get returns messages in order and once. Each exception loses at most one message, which is counted."""
    seen = burst("get", scheme, binds, transport, tmp_path)
    assert seen["lost"] <= seen["raised"]
    if sys.version_info >= (3, 11):
        assert len(seen["got"]) + seen["lost"] == COUNT
    else:  # Python 3.10 looks for signals when a function has returned, before anybody has what it returned
        assert len(seen["got"]) >= COUNT - seen["raised"]


@pytest.mark.parametrize("binds", [True, False])
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_handler_that_raises_out_of_put(transport: str, scheme: str, binds: bool, tmp_path: Path) -> None:
    """Messages arrive in order and once, and all whose put returned arrive. The producer goes on working."""
    seen = burst("put", scheme, binds, transport, tmp_path)
    assert len(seen["returned"]) < COUNT
    assert set(seen["returned"]) <= set(seen["got"])


def test_a_handler_that_interrupts_get_is_told_that_the_end_is_busy() -> None:
    """A signal handler that uses the end whose get it interrupted gets Busy, and get goes on."""
    told: list[Exception] = []

    def handler(number: int, frame: Any) -> None:
        try:
            consumer.get_nowait()
        except tp.Busy as busy:
            told.append(busy)

    with tp.Consumer("reentered") as consumer:
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(tp.Empty):
                consumer.get(0.5)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert len(told) == 1


# -- forks


def _in_fork(function: Callable[[], str]) -> str:
    """Return the result of a function in a fork of this process, which then ends as a program does."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        said = "it did not end"
        try:
            said = function()
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        said = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


def _error_of(use: Callable[[], Any]) -> str:
    try:
        use()
    except tp.Closed as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("endpoint", ["forked", "inproc://forked"])
def test_an_end_used_in_a_fork_says_so(endpoint: str) -> None:
    """Every use in a forked child is Closed, with a sentence that names the fork; the parent's ends do not notice."""
    with tp.Consumer(endpoint) as consumer, tp.Producer(endpoint) as producer:
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()

        def child() -> str:
            uses: list[Callable[[], Any]] = [
                lambda: producer.put(1),
                producer.flush,
                producer.statistics,
                lambda: consumer.get(1),
                consumer.fileno,
                consumer.statistics,
                lambda: list(consumer),
            ]
            said = {_error_of(use) for use in uses}
            producer.close()  # as the child's own clean-up may
            consumer.close()
            return "\n".join(sorted(said))

        said = _in_fork(child).splitlines()
        assert [line.split()[0] for line in said] == ["Consumer", "Producer"]
        for line in said:
            assert f"belongs to pid {os.getpid()}, of which this is a fork" in line
        producer.put("still here", PATIENCE)
        assert consumer.get(PATIENCE) == "still here"


def test_a_fork_that_drops_the_ends_disturbs_nothing() -> None:
    """A child that lets go of its copies of the ends, and ends as programs do, leaves the parent's socket in place."""
    ends = {"consumer": tp.Consumer("kept")}

    def child() -> str:
        ends.clear()
        return "dropped"

    with ends["consumer"] as consumer, tp.Producer("kept") as producer:
        assert _in_fork(child) == "dropped"
        putting = in_thread(lambda: producer.put("arrives", PATIENCE))
        assert consumer.get(PATIENCE) == "arrives"
        putting()


def test_a_fork_makes_ends_of_its_own() -> None:
    """A forked child opens an end of its own, though its parent has some open, and talks to the parent with it."""
    with tp.Consumer("parent") as consumer:

        def child() -> str:
            with tp.Producer("parent") as producer:
                producer.put("from the fork", PATIENCE)
                producer.flush(PATIENCE)
            return "flushed"

        got = in_thread(lambda: consumer.get(PATIENCE))
        assert _in_fork(child) == "flushed"
        assert got() == "from the fork"


def test_no_handler_can_have_pyzmqs_thread_taken_for_dead() -> None:
    """No end asks pyzmq's thread by Thread.is_alive: an exception in there would leave the thread marked as stopped."""
    asked = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and isinstance(frame.f_locals.get("self"), garbage.GarbageCollectorThread):
            asked.append(frame.f_code.co_name)

    with (
        tp.Consumer("tcp://127.0.0.1:0", shared_memory="off") as consumer,
        tp.Producer(consumer.endpoint, shared_memory="off") as producer,
    ):
        taken = in_thread(lambda: consumer.get(PATIENCE))
        sys.settrace(note)
        try:
            producer.put(torch.ones(600_000), PATIENCE)
        finally:
            sys.settrace(None)
        assert taken().all()
        assert garbage.gc.is_alive(), "it was lent"
        assert not asked
