"""The end of commands that start processes: SIGTERM ends them as Ctrl-C does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["ended_by_sigterm"]


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command in order, as Ctrl-C does: children end and sockets close first."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
