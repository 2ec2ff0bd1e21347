"""Die, or raise, at the n-th step of a piece of the package's own code, with no hook in the package.

A step is the moment before or after a store to a subscript (every store to shared memory is one) or a call (every
system call is one). They are counted by Python's own tracing, in a forked child.
"""

from __future__ import annotations

import dis
import faulthandler
import functools
import os
import signal
import sys
from _thread import interrupt_main
from collections.abc import Callable
from typing import Any

import tensorpipe_ipc.errors

PACKAGE = os.path.dirname(tensorpipe_ipc.errors.__file__)
LIMIT = 40  # seconds that any child may take, on a machine with much else to do


def _steps_of(prefixes: Any) -> Any:
    return frozenset(code for name, code in dis.opmap.items() if name.startswith(prefixes))


STORES_AND_CALLS = _steps_of(("STORE_SUBSCR", "CALL", "BINARY_SUBSCR"))
SIGNAL_CHECKS = _steps_of(
    ("CALL", "JUMP_BACKWARD", "RESUME", "JUMP_ABSOLUTE")
)  # after these CPython runs signal handlers
JUMPS_BACK = _steps_of(("JUMP_BACKWARD", "JUMP_ABSOLUTE"))


@functools.cache
def _instructions(code: Any) -> Any:
    return code.co_code


class Tracer:
    """Calls ``at_point`` at the n-th step.

    Args:
        before: count the moments before these instructions, too, and not only those after them.
        returns: count the moments after a function in Python has returned, where only Python 3.10 looks for signals.
    """

    def __init__(self, point: int, at_point: Any, opcodes: Any, before: Any, returns: bool = False) -> None:
        self.left, self.at_point, self.opcodes, self.before = point, at_point, opcodes, before
        self.returns = returns
        self.after = {}  # frames whose last instruction was a step

    def __call__(self, frame: Any, event: Any, _: Any) -> Any:
        if event == "call" and not self.before and not self.returns:
            self.after[id(frame.f_back)] = False  # CPython does not look for signals when a Python function returns
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "call" and not self.before:
            self.after[id(frame)] = True  # on entering a function it does
        if event == "opcode":
            self.opcode(frame)
        elif event == "exception":
            self.after[id(frame)] = False  # nor does it when a call has raised
        return self

    def opcode(self, frame: Any) -> None:
        is_step = _instructions(frame.f_code)[frame.f_lasti] in self.opcodes
        was_step = self.after.get(id(frame), False)
        self.after[id(frame)] = is_step
        if was_step or (is_step and self.before):
            self.step()

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            self.at_point()


def run_traced(
    action: Callable[[], Any],
    point: int,
    at_point: Any,
    opcodes: Any = STORES_AND_CALLS,
    before: bool = True,
    returns: bool = False,
) -> Any:
    tracer = Tracer(point, at_point, opcodes, before, returns)
    sys.settrace(tracer)
    try:
        action()
    finally:
        sys.settrace(None)
    return tracer.left


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Interrupt(Exception):
    """The exception that a signal's handler raises."""


def raise_interrupt(*_: Any) -> None:
    """Be the handler of a signal, that raises."""
    raise Interrupt


def interrupted_at(point: int, action: Callable[[], Any]) -> Any:
    """Return whether an action had an n-th moment at which a signal's handler may run. The handler raised there."""
    try:
        run_traced(action, point, raise_interrupt, SIGNAL_CHECKS, before=False)
    except Interrupt:
        return True
    return False


def interrupted_in_jump(function: Callable[..., Any], action: Callable[[], Any]) -> bool:
    """Return whether a function jumped back within an action. CPython called the handler of SIGUSR2 in the jump, which raised.

    CPython 3.11 looks for the ``except`` that is meant where the instruction before the jump's target stands.
    """
    send = functools.partial(interrupt_main, signal.SIGUSR2)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not function.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and _instructions(frame.f_code)[frame.f_lasti] in JUMPS_BACK:
            sys.settrace(None)
            for _ in iter(send, None):  # a call after which CPython does not look for signals: the jump does
                pass
        return trace

    sys.settrace(trace)
    try:
        action()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def in_child(action: Callable[[], Any], code: int = 0, alarm: Any = LIMIT) -> Any:
    """Fork a child that runs ``action`` and exits with ``code``; 99 if it raised.

    One that hangs dies of SIGALRM, and says on stderr, which pytest shows with the failure, where each of its threads was.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler in Python would wait for a child that hangs in C
        faulthandler.register(signal.SIGALRM, file=2, chain=True)  # in C, too, and without a thread that waits for it
        signal.alarm(alarm)
        try:
            action()
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            code = 99
        finally:
            os._exit(code)
    return pid


def reap(pid: int) -> Any:
    """Its exit status as os.waitstatus_to_exitcode gives it. Bounded by the child's own alarm."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def told_by_child(action: Callable[[], Any]) -> Any:
    """Return the result of ``action`` in a forked child, or the exception that it raises, as text."""
    reader, writer = os.pipe()

    def tell() -> None:
        try:
            told = str(action())
        except Exception as error:
            told = f"{type(error).__name__} {error}"
        os.write(writer, told.encode())

    pid = in_child(tell)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        told = file.read()
    assert reap(pid) == 0
    return told


def dies_at(point: int, action: Callable[[], Any], first: Any = None) -> Any:
    """Run ``action`` in a child that is killed at its n-th step. False when it has fewer steps, and so has done it all.

    ``first`` is run before that, and not counted.
    """

    def child() -> None:
        if first is not None:
            first()
        run_traced(action, point, die)

    status = reap(in_child(child))
    assert status in (0, -signal.SIGKILL), f"the child ended with {status} at step {point}"
    return status != 0
