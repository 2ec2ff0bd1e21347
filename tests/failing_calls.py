"""System calls that fail: the nth call of a kind in a forked process ends with an error, and all others go on.

The kernel's own filter (seccomp) has every such call wait, and asks this process, which tells it to let the call go on or to
end it with an errno, as ``strace --inject`` does. It takes neither rights nor a compiler, and a run takes some milliseconds.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import platform
import select
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

PATIENCE = 20.0  # seconds for one run
_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(platform.machine())
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.get(platform.machine(), 0)
# By name: the number on x86_64 and on aarch64, which lacks some.
_NUMBERS: dict[str, tuple[int, int]] = {
    "read": (0, 63),
    "mmap": (9, 222),
    "ioctl": (16, 29),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "madvise": (28, 233),
    "fcntl": (72, 25),
    "ftruncate": (77, 46),
    "epoll_wait": (232, -1),
    "epoll_ctl": (233, 21),
    "openat": (257, 56),
    "newfstatat": (262, 79),
    "epoll_create1": (291, 20),
    "pipe2": (293, 59),
    "getrandom": (318, 278),
    "memfd_create": (319, 279),
}
CALLS = {
    name: numbers[platform.machine() == "aarch64"]
    for name, numbers in _NUMBERS.items()
    if numbers[platform.machine() == "aarch64"] >= 0
}
_NO_NEW_PRIVILEGES, _SET_FILTER, _NEW_LISTENER = 38, 1, 8
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_LOAD, _IS, _RETURN = 0x20, 0x15, 0x06  # of BPF
_INSTRUCTION = struct.Struct("=HBBI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_ASKED, _ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_GO_ON = 1


class Ran(NamedTuple):
    """The outcome of a run."""

    status: int  # what the process exited with; minus a signal's number
    calls: int  # how many calls of the kind there were
    said: str  # on its stderr


def is_possible() -> bool:
    """Return whether this kernel has such filters and permits them."""
    return _SECCOMP is not None and with_failing("getrandom", 0, 0, lambda: 0).status == 0


def with_failing(call: str, error: int, nth: int, action: Callable[[], int]) -> Ran:
    """Run an action in a fork, in which the nth call (from 1; 0: none) of a kind by its first thread fails.

    Args:
        call: one of ``CALLS``.
        error: the errno that it ends with.
        nth: which.
        action: returns what the process exits with.
    """
    ours, theirs = socket.socketpair()
    said, says = os.pipe()
    child = os.fork()
    if not child:
        status = 70
        try:
            os.dup2(says, 2)
            gc.disable()
            _filtered(CALLS[call], theirs)
            gc.enable()
            status = action()
        except BaseException:
            with contextlib.suppress(BaseException):
                os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    theirs.close()
    os.close(says)
    calls = 0
    try:
        ours.settimeout(PATIENCE)
        listeners = array.array("i")
        with contextlib.suppress(OSError):
            _, found, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
            for _, _, passed in found:
                listeners.frombytes(passed[:4])
        for listener in listeners:
            calls = _answered(listener, child, error, nth)
            os.close(listener)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        ours.close()
        with open(said, "rb") as file:
            text = file.read().decode(errors="replace")
    return Ran(status, calls, text)


def _filtered(number: int, line: socket.socket) -> None:
    """Have every call of that number ask, and send on whom. Between the two there is no call but the sending."""
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = b"".join(
        _INSTRUCTION.pack(*each)
        for each in ((_LOAD, 0, 0, 0), (_IS, 0, 1, number), (_RETURN, 0, 0, _ASK), (_RETURN, 0, 0, _ALLOW))
    )
    held = ctypes.create_string_buffer(instructions)
    program = ctypes.create_string_buffer(struct.pack("@HP", len(instructions) // 8, ctypes.addressof(held)))
    listener = os.dup(2)  # the number that the next descriptor gets
    os.close(listener)
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))]
    send, said, install = line.sendmsg, [b"x"], libc.syscall
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    found = install(_SECCOMP, _SET_FILTER, _NEW_LISTENER, program)
    if found != listener:
        raise OSError(ctypes.get_errno(), "seccomp")
    send(said, passed)
    os.close(listener)


def _answered(listener: int, child: int, error: int, nth: int) -> int:
    """Answer until the process has ended. How many calls there were."""
    calls, deadline = 0, time.monotonic() + PATIENCE
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        events = poll.poll(1000)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return calls
        if events and events[0][1] & select.POLLIN:
            asked = bytearray(_ASKED.size)
            try:
                fcntl.ioctl(listener, _RECEIVE, asked)
            except OSError as gone:
                if gone.errno == errno.ENOENT:  # it was killed in between
                    continue
                raise
            which, thread, *_ = _ASKED.unpack(asked)
            calls += thread == child
            fails = thread == child and calls == nth
            answer = _ANSWER.pack(which, 0, -error if fails else 0, 0 if fails else _GO_ON)
            with contextlib.suppress(FileNotFoundError):
                fcntl.ioctl(listener, _SEND, bytearray(answer))
        elif events:
            return calls
