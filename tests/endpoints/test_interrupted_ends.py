"""An exception at any moment of an end's constructor, or of close, as of Ctrl-C: nothing is left of the end."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import zmq
from crash_points import SIGNAL_CHECKS, run_traced
from guard import runtime_folder
from programs import ran_in_fork
from wholeness import stride

import tensorpipe_ipc as tp

# pyzmq warns of a socket that nobody had closed, and then closes it: as an error the warning would keep it open for ever.
pytestmark = [
    pytest.mark.limit(300),
    pytest.mark.usefixtures("silence"),
    pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning"),
]
ENDS: dict[str, Callable[[], Any]] = {
    "ipc, connects": functools.partial(tp.Producer, "interrupted"),
    "ipc, binds": functools.partial(tp.Consumer, "interrupted", shared_memory="off"),
    "tcp, connects": functools.partial(tp.Consumer, "tcp://127.0.0.1:9", bind=False),
    "tcp, binds": functools.partial(tp.Producer, "tcp://127.0.0.1:0", bind=True, shared_memory="off"),
    "inproc": functools.partial(tp.Consumer, "inproc://interrupted"),
    "ipc, binds, shares memory": functools.partial(tp.Consumer, "interrupted"),
}
STEPS = dict.fromkeys(ENDS, (13, 13)) | {"ipc, binds, shares memory": (499, 61)}  # one in so many, of each
EACH = pytest.mark.parametrize("kind", ENDS)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the reports of exceptions that nothing can catch. pyzmq reports so each socket that nobody had closed."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def _interrupt() -> None:
    """Raise, but not within a destructor: what is raised there goes nowhere, and no code can be written to survive it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt


def _is_done(action: Callable[[], Any], point: int) -> bool:
    """Have an exception at the n-th step. Return whether there are fewer."""
    try:
        return bool(run_traced(action, point, _interrupt, SIGNAL_CHECKS, before=False) > 0)
    except KeyboardInterrupt:
        return False


def _interrupted_constructors(kind: str, step: int) -> int:
    for point in itertools.count(1, step):
        made: list[Any] = []
        done = _is_done(lambda made=made: made.append(ENDS[kind]()), point)  # type: ignore[misc]
        for end in made:
            end.close()
        assert list(runtime_folder().glob("*")) == [], f"left at step {point}"
        if done:
            return point
    raise AssertionError


def _interrupted_closes(kind: str, step: int) -> int:
    for point in itertools.count(1, step):
        end = ENDS[kind]()
        done = _is_done(end.close, point)
        end.close()
        assert list(runtime_folder().glob("*")) == [], f"left at step {point}"
        if done:
            return point
    raise AssertionError


@EACH
def test_a_constructor(kind: str) -> None:
    """At some of its steps. The guard around this test sees descriptors, threads and mappings, too."""
    assert _interrupted_constructors(kind, stride(STEPS[kind][0])) > 100


@pytest.mark.slow
@EACH
def test_a_close(kind: str) -> None:
    """It is closed then, or when close is called again."""
    assert _interrupted_closes(kind, stride(STEPS[kind][1])) > 50


@pytest.mark.kills
@EACH
def test_a_constructor_and_a_close_at_every_step(kind: str) -> None:
    """The same at each of them."""
    _interrupted_constructors(kind, stride(1))
    _interrupted_closes(kind, stride(1))


@EACH
def test_a_handler_that_opens_and_closes_another_end_meanwhile(kind: str) -> None:
    """At some steps of a constructor, and of a close. Neither end waits for the other."""
    names = (f"another{number}" for number in itertools.count())
    for action in ("open", "close"):
        for point in itertools.count(1, stride(4 * STEPS[kind][0])):
            end = ENDS[kind]() if action == "close" else None
            made = [] if end is None else [end]

            def act(made: list[Any] = made, is_open: bool = end is not None) -> None:
                if is_open:
                    made[0].close()
                else:
                    made.append(ENDS[kind]())

            left = run_traced(act, point, lambda: tp.Consumer(next(names)).close(), SIGNAL_CHECKS, before=False)
            made[0].close()
            assert list(runtime_folder().glob("*")) == [], f"left at step {point}"
            if left > 0:
                break


def test_a_handler_raises_as_soon_as_an_address_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor by which the end listens is libzmq's then, which ends the process where another has closed it."""
    bind = zmq.Socket.bind

    def bind_and_raise(self: Any, address: str) -> None:
        bind(self, address)
        raise KeyboardInterrupt

    with monkeypatch.context() as storm:
        storm.setattr(zmq.Socket, "bind", bind_and_raise)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                tp.Consumer("bound")
    with tp.Consumer("bound") as consumer, tp.Producer("bound") as producer:
        producer.put(7)
        assert consumer.get(10) == 7


SIGNALS = """
import os, signal, time, tensorpipe_ipc as tp

def held():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

def both(endpoint):
    with tp.Consumer(endpoint) as consumer, tp.Producer(consumer.endpoint) as producer:
        producer.put(7, 10)
        assert consumer.get(10) == 7

both("first")
both("tcp://127.0.0.1:0")  # pyzmq's thread stays
before = min((both("first"), held())[1] for _ in range(10))  # a thread of ZeroMQ's may just be about to end
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
for number in range(100):
    both("other" if number % 2 else "tcp://127.0.0.1:0")
signal.setitimer(signal.ITIMER_REAL, 0)
deadline = time.monotonic() + 10
while held() != before and time.monotonic() < deadline:
    time.sleep(0.001)  # a thread of ZeroMQ's may just be about to end
print(held() == before)
"""


@pytest.mark.slow
def test_signals_whose_handler_does_nothing_leave_no_trace_of_ends_that_come_and_go(tmp_path: Path) -> None:
    """Five thousand a second: system calls are cut short, and done again. Contexts end with all that they had."""
    done = ran_in_fork("-c", SIGNALS, folder=tmp_path)
    assert done.status == 0, done.err
    # Pyzmq itself does not repeat one system call, says so, and keeps the frame and its thread for good.
    assert done.out == "True\n" or "pyzmq-gc send failed: Interrupted system call" in done.err, done.err
