"""Descriptors have owners: whatever is opened is closed, at whatever moment a signal's handler raises."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
from crash_points import SIGNAL_CHECKS, run_traced
from wholeness import stride

from tensorpipe_ipc import owned_fd
from tensorpipe_ipc.endpoints import presence
from tensorpipe_ipc.memory.arena import Arena
from tensorpipe_ipc.memory.segment import Segment
from tensorpipe_ipc.owned_fd import owned
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue
from tensorpipe_ipc.shared_queue.token_pipe import TokenPipe
from tensorpipe_ipc.zeromq import kernel_sockets
from tensorpipe_ipc.zeromq.poll_fd import PollFd
from tensorpipe_ipc.zeromq.timer_fd import TimerFd


class Interrupt(Exception):
    """The exception that a signal's handler raises."""


def _interrupt() -> None:
    raise Interrupt


def _open() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_it_is_closed_once() -> None:
    """By close, by a with block, or by the last reference; its number may be another's by then."""
    before = _open()
    one, two = owned_fd.pipe()
    three = owned(os.dup, one.fileno())
    with two:
        assert _open() != before
    one.close()
    one.close()
    del three
    assert _open() == before


def test_what_is_not_opened_is_an_error() -> None:
    """Also where a function of C says so by -1, which select.epoll would take for the wish to have an epoll."""
    before = _open()
    with pytest.raises(FileNotFoundError):
        owned(os.open, "/nowhere", os.O_RDONLY)
    with pytest.raises(OSError, match="no descriptor") as raised:
        owned(int, -1)
    assert raised.value.errno == errno.EBADF
    assert _open() == before


def _a_queue() -> SharedMemoryQueue:
    return SharedMemoryQueue.create(Attachment(Arena(Segment.create(1 << 28), capacity=1 << 20)), 3)


def _a_connection() -> None:
    with socket.socketpair()[0] as one:
        kernel_sockets.is_to_itself(one.fileno())


def _a_shown_poll() -> None:
    poll = PollFd([])
    poll.prepare_to_show()
    poll.show(True)
    poll.close()


def _a_presence() -> None:
    with contextlib.closing(presence.Presence()) as shown:
        shown.open()


OPENING: dict[str, Callable[[], Any]] = {
    "an owner": lambda: owned(os.open, "/dev/null", os.O_RDONLY),
    "a pipe": lambda: TokenPipe.create(None),
    "what a pipe holds": lambda: PIPES[0].snapshot(),
    "a queue": _a_queue,
    "a connection": _a_connection,
    "an end's file": _a_presence,
    "an alarm": lambda: TimerFd().close(),
    "a poll": _a_shown_poll,
}
PIPES: list[TokenPipe] = []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # raised between open() and the with statement's own
@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("what", OPENING)
def test_an_exception_at_any_moment_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, what: str, returns: bool
) -> None:
    """Every descriptor that a put or a get may open, also where it comes in the ``__del__`` of what has it."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's own keeps what it tells of
    PIPES.append(TokenPipe.create(None))
    OPENING[what]()
    before, raised, most = _open(), 0, 1 << 30
    steps = most - run_traced(OPENING[what], most, _interrupt, SIGNAL_CHECKS, before=False, returns=returns)
    for point in range(1, steps + 1, stride(max(1, steps // 15))):
        try:
            run_traced(OPENING[what], point, _interrupt, SIGNAL_CHECKS, before=False, returns=returns)
        except Interrupt:
            raised += 1
        if sys.version_info < (3, 11):
            gc.collect()  # an exception in a context manager's generator is part of a cycle there
        assert _open() == before, f"at step {point}"
    assert raised >= 1
    PIPES.clear()
    presence.sweep()  # one that could not be taken away is a killed end's


@pytest.mark.parametrize("ready", [False, True])
def test_an_exception_at_any_moment_of_show_leaves_a_poll_that_tells_what_it_is_shown_next(ready: bool) -> None:
    """A wait on the descriptor does not sleep through what is there, and nothing wakes it for ever."""
    with contextlib.closing(PollFd([])) as poll:
        poll.prepare_to_show()
        poll.show(True)

        def show() -> None:
            poll.show(ready)

        for point in range(1, 20):
            poll.show(not ready)
            with contextlib.suppress(Interrupt):
                run_traced(show, point, _interrupt, SIGNAL_CHECKS, before=False, returns=True)
            for shown in (True, False):
                poll.show(shown)
                assert bool(select.select([poll.fd], [], [], 0)[0]) is shown, f"at step {point}"
