"""Each system call that a queue makes fails once: that is a typed error or nothing, and the next try does what was asked."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import queue
import time
from collections.abc import Callable
from typing import Any

import failing_calls
import pytest
import torch
from children import PATIENCE

import tensorpipe_ipc as tp

ERRORS: dict[str, tuple[int, ...]] = {
    "epoll_create1": (errno.EMFILE, errno.ENOMEM),
    "epoll_ctl": (errno.ENOMEM, errno.ENOSPC),
    "epoll_wait": (errno.EINTR,),
    "fcntl": (errno.EINTR, errno.ENOLCK, errno.ENOMEM),
    "ftruncate": (errno.EINTR, errno.ENOMEM),
    "getrandom": (errno.EINTR,),
    "ioctl": (errno.EINTR, errno.ENOMEM),
    "madvise": (errno.EAGAIN, errno.ENOMEM),
    "memfd_create": (errno.EMFILE, errno.ENOMEM),
    "mmap": (errno.EAGAIN, errno.ENOMEM),
    "newfstatat": (errno.ENOMEM,),
    "openat": (errno.EINTR, errno.EMFILE, errno.ENOMEM),
    "pipe2": (errno.EMFILE, errno.ENFILE),
    "pwrite64": (errno.EINTR, errno.ENOSPC),
    "read": (errno.EINTR, errno.ENOMEM),
    "readv": (errno.EAGAIN, errno.EINTR, errno.ENOMEM),
    "writev": (errno.EAGAIN, errno.EINTR, errno.ENOMEM),
}
MESSAGES = 3


@functools.cache
def _messages() -> list[dict[str, Any]]:
    """Made, and looked at, before anything fails: torch itself may crash then."""
    found = [
        {"number": number, "small": torch.full((9,), number), "large": torch.full((9_000 * number,), number)}
        for number in range(MESSAGES)
    ]
    assert all(torch.equal(each["large"], each["large"].clone()) for each in found)
    return found


def _again(step: Callable[[], Any]) -> Any:
    """Return the result of a step, perhaps of a second try."""
    try:
        return step()
    except (queue.Empty, queue.Full):
        raise
    except (tp.TensorPipeError, OSError, MemoryError):
        return step()


def through_a_queue(maxsize: int = 2 * MESSAGES) -> int:
    """Put messages, get them, and find nothing more; 0 if each came once, in order, whole, and no descriptor is left."""
    torch.set_num_threads(1)
    before = len(_again(lambda: os.listdir("/proc/self/fd")))
    made = _again(lambda: tp.Queue(maxsize))
    for number in range(MESSAGES):
        _again(lambda number=number: made.put(_messages()[number]))
    for number in range(MESSAGES):
        got = _again(lambda: made.get(True, PATIENCE))
        assert got["number"] == number, f"{got['number']} for {number}"
        for name, expected in _messages()[number].items():
            assert name == "number" or torch.equal(got[name], expected), (number, name)
        del got
    try:
        raise AssertionError(f"{_again(lambda: made.get(True, 0.01))['number']} came twice")
    except queue.Empty:
        pass
    _again(made.close)
    made = None
    gc.collect()
    left = _again(lambda: os.listdir("/proc/self/fd"))
    assert len(left) == before, left
    return 0


def through_two_ends() -> int:
    """The same from a producer to a consumer, which share memory if they can."""
    torch.set_num_threads(1)
    consumer = _again(lambda: tp.Consumer(f"failing-{os.getpid()}"))
    producer = _again(lambda: tp.Producer(consumer.endpoint, linger=0))
    put, got = 0, list[int]()
    deadline = time.monotonic() + PATIENCE
    while len(got) < MESSAGES:
        assert time.monotonic() < deadline, f"{put} put, {got} came"
        with contextlib.suppress(queue.Full):
            if put < MESSAGES:
                _again(lambda put=put: producer.put(_messages()[put], 0.02))
                put += 1
        with contextlib.suppress(queue.Empty):
            got.append(_again(lambda: consumer.get(0.02))["number"])
    assert got == list(range(MESSAGES)), got
    for end in (producer, consumer):
        _again(end.close)
    return 0


def _failed(call: str, error: int, action: Callable[[], int] = through_a_queue) -> list[str]:
    """Run an action once for each call of a kind, and have that call fail. Return all that went wrong."""
    wrong, nth = [], 1
    _messages()
    while True:
        ran = failing_calls.with_failing(call, error, nth, action)
        if ran.status:
            wrong.append(f"{call} {nth} with {errno.errorcode[error]}: status {ran.status}: {ran.said[-1500:]}")
        if nth > ran.calls:
            return wrong
        nth += 1


def test_calls_fail_where_they_are_told_to() -> None:
    """Of three calls the second fails, and no other."""

    def three() -> int:
        status = 0
        for index in range(3):
            try:
                os.close(os.memfd_create("three"))
            except OSError as failed:
                status += (failed.errno == errno.ENOMEM) << index
        return status

    if not failing_calls.is_possible():
        print("the kernel does not let us: the limits of tests/test_resources.py show what they can")
        return
    assert failing_calls.with_failing("memfd_create", errno.ENOMEM, 2, three)[:2] == (2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["memfd_create", "pipe2", "mmap", "writev"])
def test_a_call_that_fails_costs_nothing(call: str) -> None:
    """Some calls: each of them fails once, in a run of its own."""
    if failing_calls.is_possible():
        assert _failed(call, ERRORS[call][0]) == []


@pytest.mark.parametrize("call", ["memfd_create", "writev", pytest.param("pipe2", marks=pytest.mark.kills)])
def test_between_two_ends_a_call_that_fails_costs_nothing(call: str) -> None:
    """Calls that ends make themselves. When one of libzmq's own fails for want of memory, it ends the process."""
    if failing_calls.is_possible():
        assert _failed(call, ERRORS[call][0], through_two_ends) == []


@pytest.mark.kills
@pytest.mark.limit(600)
@pytest.mark.parametrize("maxsize", [2 * MESSAGES, 0])
@pytest.mark.parametrize("call", ERRORS)
def test_every_call_that_fails_costs_nothing(call: str, maxsize: int) -> None:
    """All calls, and each error that they may end with, in a queue with a bound and in one without."""
    if failing_calls.is_possible() and call in failing_calls.CALLS:
        wrong = [_failed(call, error, lambda: through_a_queue(maxsize)) for error in ERRORS[call]]
        assert sum(wrong, []) == []
