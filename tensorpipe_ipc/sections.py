"""Sections of a thread in which garbage collection must close no end: the thread opens or closes another, and has locks.

What is dropped meanwhile is closed when the section is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["begin_anew", "postponed", "undisturbed"]


class _Section(threading.local):
    """A section in which this thread must not be disturbed, and its duties afterwards."""

    def __init__(self) -> None:
        self.depth = 0
        self.duties: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []


_section = _Section()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Open or close an end: meanwhile garbage collection must close no other end in this thread."""
    _section.depth += 1
    try:
        yield
    finally:
        try:
            while _section.duties and _section.depth == 1:  # they have sections of their own, within this one
                function, arguments = _section.duties.pop()
                function(*arguments)
        finally:
            _section.depth -= _section.depth > 0  # with no call. It is 0 in a child that a handler has forked within


def postponed(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a finalizer's call has to wait until this thread may be disturbed.

    Args:
        function: what is called then; it must not ask again.
        arguments: its arguments.
    """
    if _section.depth:
        _section.duties.append((function, arguments))
    return _section.depth > 0


def begin_anew() -> None:
    """In a forked child: the thread that forked may never come back to what it was at."""
    _section.depth, _section.duties = 0, []
