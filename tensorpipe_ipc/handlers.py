"""Handlers: whether an exception is that of a signal's handler, and so says nothing about the code that it came in."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import functools
import signal
from types import TracebackType
from typing import Any

__all__ = ["is_a_signals", "passed_a_handler", "raise_signals", "reraise_from_handler"]


def is_a_signals(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether an exception came from a signal's handler, and so says nothing about what it interrupted.

    What is no ``Exception`` is taken for a handler's: those in C leave no frame.
    """
    return passed_a_handler(trace) or not isinstance(error, Exception)


def passed_a_handler(trace: TracebackType | None) -> bool:
    """Return whether an exception went through the code of a signal's handler. One that was reset meanwhile is not known.

    A peer may cause one by each message, so it is asked for in C: signal.getsignal makes two enums, 0.5 ms for all signals.
    """
    handlers = {_code_of(handler) for handler in map(_signal.getsignal, range(1, signal.NSIG)) if callable(handler)}
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def reraise_from_handler(error: BaseException) -> None:
    """Raise an exception again that went through the code of a signal's handler: for the first line of an ``except``."""
    if passed_a_handler(error.__traceback__):
        raise error


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
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)  # of a method
    return getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
