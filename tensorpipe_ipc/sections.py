"""Sections of a thread in which garbage collection must close no end: the thread opens or closes another, and has locks.

What is dropped meanwhile is closed when the section is over. A thread that another one waits for is in that one's section, and
leaves it what it would have closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Duties", "begin_anew", "postponed", "serve", "undisturbed"]

Duties = list[tuple[Callable[..., Any], tuple[Any, ...]]]


class _Section(threading.local):
    """A section in which this thread must not be disturbed, and its duties afterwards."""

    def __init__(self) -> None:
        self.depth = 0
        self.duties: Duties = []


_section = _Section()


@contextmanager
def undisturbed() -> Iterator[Duties]:
    """Open or close an end: meanwhile garbage collection must close no other end in this thread.

    Yields:
        What is to be done afterwards.
    """
    _section.depth += 1
    try:
        yield _section.duties
    finally:
        _section.depth -= _section.depth > 0  # with no call. It is 0 in a child that a handler has forked within
        while _section.duties and not _section.depth:
            function, arguments = _section.duties.pop()
            function(*arguments)


def serve(duties: Duties) -> None:
    """From now on, leave what this thread should close to the one that waits for it, in whose section it is."""
    _section.depth, _section.duties = 1, duties


def postponed(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a finalizer's call has to wait until this thread may be disturbed. It is made then."""
    if _section.depth:
        _section.duties.append((function, arguments))
    return _section.depth > 0


def begin_anew() -> None:
    """In a forked child: the thread that forked may never come back to what it was at."""
    _section.depth, _section.duties = 0, []
