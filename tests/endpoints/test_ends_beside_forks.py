"""Ends in children that were forked while another thread of their parent began to use ends."""

from __future__ import annotations

import gc
import logging
import os
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
from tensorpipe_ipc.sections import undisturbed

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
