"""The numbers that users hand in: checked, and timeouts made deadlines."""

from __future__ import annotations

import numbers
import operator
import sys
import time
from typing import Any

__all__ = ["check_bool", "check_count", "check_maxsize", "check_seconds", "check_timeout", "deadline_of", "remaining"]

MOST = (1 << 31) - 1  # of messages, as of a semaphore; and of milliseconds, for ZeroMQ
_FOREVER = 3600.0


def check_bool(value: Any, name: str) -> bool:
    """``value``, True or False, which nothing else stands for: bind="no" would bind.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give True or False")
    return value


def check_maxsize(value: Any) -> int:
    """Return a queue's ``maxsize`` as an int: of any kind of whole number, as multiprocessing takes it.

    Raises:
        TypeError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"maxsize={value!r} is a {type(value).__name__}; give a whole number, or 0 for a queue without a bound"
        ) from None


def check_count(value: int, name: str) -> int:
    """``value``, a whole number of at least 1, of any kind but bool.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than 1, or more than 2,147,483,647.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give a whole number of at least 1")
    count = operator.index(value)
    if not 1 <= count <= MOST:
        raise ValueError(f"{name}={count}: give a whole number of 1 to {MOST:,}")
    return count


def check_timeout(value: float, name: str = "timeout", forever: str = "None to wait for ever") -> float:
    """``value``, a number of seconds of at least 0, of any real kind.

    Args:
        forever: what stands for no end of it, for the error's text; "" where nothing does.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, not a number, or an int beyond all floats.
    """
    if value.__class__ in (int, float) and 0 <= value <= sys.float_info.max:
        return float(value)
    also = f", or {forever}" if forever else ""
    if not isinstance(value, (int, float, numbers.Real)):  # NumPy's are Real
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give seconds{also}")
    if not value >= 0:
        raise ValueError(f"{name}={value}: give at least 0 seconds{also}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is an int beyond all floats; give seconds{also}") from None


def check_seconds(value: float, name: str) -> float:
    """``value``, a number of seconds of any real kind that ZeroMQ can count in milliseconds: 0 to 2,147,483. No bool.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give seconds")
    if not 0 <= value <= MOST // 1000:
        raise ValueError(f"{name}={value}: give 0 to {MOST // 1000:,} seconds")
    return float(value)


def deadline_of(timeout: float | None) -> float | None:
    """Return when a wait of ``timeout`` seconds that begins now ends, by time.monotonic(). None: never.

    Raises:
        TypeError, ValueError: as ``check_timeout``; and a bool, which is a queue's ``block`` and no number of seconds here.
    """
    if isinstance(timeout, bool):
        raise TypeError(f"timeout={timeout} is a bool; give seconds, 0 not to wait, or None to wait for ever")
    return None if timeout is None else time.monotonic() + check_timeout(timeout)


def remaining(deadline: float | None) -> float:
    """Seconds left until ``deadline``, at least 0."""
    return _FOREVER if deadline is None else max(0.0, deadline - time.monotonic())
