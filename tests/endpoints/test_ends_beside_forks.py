"""Ends in children that were forked while another thread of their parent began to use ends."""

from __future__ import annotations

import _thread
import contextlib
import gc
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import PATIENCE, in_thread
from crash_points import in_child, reap
from zmq.utils.garbage import GarbageCollector

import tensorpipe_ipc as tp
from tensorpipe_ipc.sections import postponed, undisturbed
from tensorpipe_ipc.zeromq import zmq_contexts

_SENT = torch.full((300_000,), 2.0)  # here: torch's threads are not in a child
_FORKS = 0.5  # seconds that a fork may take, where it does not wait


def _exchange() -> None:
    """Put and get between two ends, in frames."""
    with tp.Consumer("tcp://127.0.0.1:0", shared_memory="off") as consumer:
        with tp.Producer(consumer.endpoint, shared_memory="off") as producer:
            putting = in_thread(lambda: producer.put(_SENT, PATIENCE))
            assert (consumer.get(PATIENCE).numpy() == 2.0).all()
            putting()


def _slowed(function: Callable[..., Any]) -> tuple[Callable[..., Any], threading.Event]:
    """Return a function that takes so long that another thread forks meanwhile, and what tells that it was called."""
    called = threading.Event()

    def slowly(*arguments: Any) -> Any:
        called.set()
        threading.Event().wait(_FORKS)
        return function(*arguments)

    return slowly, called


def test_a_child_that_is_forked_while_a_thread_looks_for_the_folder_of_temporary_files_has_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The runtime folder lies there, where there is no XDG_RUNTIME_DIR. The thread is the program's own."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    slowly, looks = _slowed(tempfile._get_default_tempdir)  # type: ignore[attr-defined]
    monkeypatch.setattr(tempfile, "_get_default_tempdir", slowly)
    looking = in_thread(tempfile.gettempdir)
    assert looks.wait(PATIENCE)
    child = in_child(_exchange)
    looking()
    assert reap(child) == 0
    assert (tmp_path / f"tensorpipe_ipc-{os.geteuid()}").is_dir()


def test_an_end_that_is_collected_where_its_thread_has_a_lock_waits_for_no_fork(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fork waits for that lock, which is logging's."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def act() -> None:
        has_lock, consumers = threading.Event(), [tp.Consumer("tcp://127.0.0.1:0")]

        def drop() -> None:
            with logging._lock:  # type: ignore[attr-defined]
                has_lock.set()
                threading.Event().wait(_FORKS)  # until the fork waits for it
                consumers.clear()

        dropping = in_thread(drop)
        assert has_lock.wait(PATIENCE)
        assert reap(in_child(lambda: None)) == 0
        dropping()

    assert reap(in_child(act)) == 0


def test_a_child_that_is_forked_while_a_thread_puts_its_first_frames_has_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyzmq starts a thread for them."""

    def act() -> None:
        slowly, starts = _slowed(GarbageCollector.start)
        monkeypatch.setattr(GarbageCollector, "start", slowly)
        exchanging = in_thread(_exchange)
        assert starts.wait(PATIENCE)
        child = in_child(_exchange)
        exchanging()
        assert reap(child) == 0

    assert reap(in_child(act)) == 0


def test_an_end_says_goodbye_that_is_dropped_in_a_child_forked_while_another_opened() -> None:
    """A signal's handler forks so, and never returns to where the thread would go on."""
    with tp.Consumer("dropped") as consumer:

        def put_and_drop() -> None:
            producer = tp.Producer("dropped")
            producer.put(1, PATIENCE)
            del producer
            gc.collect()

        with undisturbed():
            child = in_child(put_and_drop)
        assert consumer.get(PATIENCE) == 1
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        assert reap(child) == 0


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("started", [1, 3])
def test_a_child_that_a_handler_forks_as_an_end_opens_waits_for_no_thread_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, started: int, leaves: bool
) -> None:
    """The child leaves by sys.exit, or goes on, where its parent has just seen whether threads can be started."""
    start, grandchildren = _thread.start_new_thread, list[int]()

    def fork(*_: Any) -> None:
        pid = os.fork()
        grandchildren.append(pid)
        if not pid:
            signal.alarm(int(PATIENCE))
            if leaves:
                raise SystemExit

    def start_and_ring(*arguments: Any) -> int:
        nonlocal started
        number = start(*arguments)
        started -= 1
        if not started:
            signal.raise_signal(signal.SIGUSR1)
        return number

    def act() -> None:
        signal.signal(signal.SIGUSR1, fork)
        monkeypatch.setattr(_thread, "start_new_thread", start_and_ring)
        with contextlib.suppress(SystemExit, Exception):  # a child that goes on is told that the end is its parent's
            tp.Consumer("tcp://127.0.0.1:0").close()
        if grandchildren[0]:
            assert reap(grandchildren[0]) == 0

    assert reap(in_child(act)) == 0


def test_an_end_that_is_collected_while_an_exception_cuts_a_close_short_says_goodbye() -> None:
    """The thread in which its context ends goes on, and garbage is collected there."""

    class Alarm(Exception):
        pass

    def ring(*_: Any) -> None:
        raise Alarm

    seen, tell = os.pipe()
    with tp.Consumer("tcp://127.0.0.1:0", shared_memory="off") as consumer:

        def act() -> None:
            gc.disable()
            producer: Any = tp.Producer(consumer.endpoint, shared_memory="off")
            producer.put(1, PATIENCE)
            producer.itself = producer

            def work() -> None:
                os.kill(os.getpid(), signal.SIGUSR1)  # to the other thread: this one gets none
                threading.Event().wait(_FORKS)  # until the other thread has gone
                gc.collect()

            signal.signal(signal.SIGUSR1, ring)
            del producer
            with contextlib.suppress(Alarm):
                zmq_contexts._run_undisturbed(work)
            os.read(seen, 1)

        child = in_child(act)
        assert consumer.get(PATIENCE) == 1
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        os.write(tell, b"x")
        assert reap(child) == 0
    os.close(seen)
    os.close(tell)


def test_any_number_of_ends_that_are_collected_while_another_opens_are_closed() -> None:
    """One after the other: their closings are sections of their own."""
    closed = list[int]()

    def close(number: int) -> None:
        with undisturbed():
            closed.append(number)

    with undisturbed():
        assert all(postponed(close, number) for number in range(2000))
    assert sorted(closed) == list(range(2000))
