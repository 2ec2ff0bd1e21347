"""Handlers: whether an exception is that of a signal's handler, and so says nothing about the code that it came in."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import gc
import signal
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
    """Return whether code has the frame that called it, as handlers are given that, whatever wraps them.

    A handler may be no handler any more when it raises, or a partial, whose function need not be any signal's.

    The garbage collector is asked what the frame refers to: once as its caller, and again as an argument. ``f_locals`` would
    copy its locals before Python 3.13, into a dict that keeps them, and with them the memory of messages, as long as the frame.
    """
    known = gc.get_referents(frame)
    given = [each for each in known if type(each) is tuple]  # what *args took
    return sum(each is interrupted for each in known) > 1 or any(one is interrupted for each in given for one in each)


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
