"""Handlers: whether an exception is that of a signal's handler, and so says nothing about the code that it came in."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import gc
import signal
from inspect import CO_VARARGS
from types import FrameType, TracebackType
from typing import Any

__all__ = ["is_a_signals", "passed_a_handler", "raise_signals"]


def is_a_signals(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether an exception came from a signal's handler, and so says nothing about what it interrupted.

    What is no ``Exception`` is taken for a handler's: those in C leave no frame.
    """
    return passed_a_handler(trace) or not isinstance(error, Exception)


def passed_a_handler(trace: TracebackType | None) -> bool:
    """Return whether an exception went through the code of a signal's handler.

    A peer may cause one by each message, so it is asked for in C: signal.getsignal makes two enums, 0.5 ms for all signals.
    """
    handlers = {_code_of(handler) for handler in map(_signal.getsignal, range(1, signal.NSIG)) if callable(handler)}
    before: FrameType | None = None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in handlers or before is not None and _is_given(frame, before):
            return True
        before, trace = frame, trace.tb_next
    return False


def _is_given(frame: FrameType, interrupted: FrameType) -> bool:
    """Return whether code was called with the frame that called it, as handlers are, whatever wraps them.

    A handler may be no handler any more when it raises, or a partial, whose function need not be any signal's.

    The garbage collector is asked first whether the frame refers to its caller more than once. Only then its locals are read:
    before Python 3.13 that copies them into a dict, which keeps the memory of messages as long as the frame exists.
    """
    known = gc.get_referents(frame)
    if sum(each is interrupted for each in known) < 2 and not any(
        one is interrupted for each in known if type(each) is tuple for one in each
    ):
        return False
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    return any(each is interrupted or type(each) is tuple and any(one is interrupted for one in each) for each in given)


def raise_signals(error: BaseException, before: BaseException | None) -> None:
    """Raise the exception of a signal's handler that an error came of, if it did: other libraries put theirs in its place.

    Args:
        error: the error.
        before: what was being handled already, and is no reason of it.
    """
    each: BaseException | None = error
    while each is not None and each is not before:
        if passed_a_handler(each.__traceback__):
            raise each
        each = each.__context__


def _code_of(handler: Any) -> Any:
    function = getattr(handler, "__func__", handler)  # of a method
    return getattr(function, "__code__", None) or getattr(vars(type(handler)).get("__call__"), "__code__", None)
