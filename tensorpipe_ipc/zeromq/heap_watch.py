"""HeapWatch: has malloc give back what connections over tcp have left that ended without a word.

libzmq keeps what a handshake says as long as the connection is open: 29 bytes for each that a stranger sends, of up to 1 MiB.
It tells nobody of a connection that says no more, nor of its end. Then malloc keeps what is free. So all that can be seen is
that the process has grown.
"""

from __future__ import annotations

import time

from tensorpipe_ipc.libc import trim_malloc
from tensorpipe_ipc.process import private

__all__ = ["HEAP", "HeapWatch"]

_MUCH = 8 << 20  # bytes that a process may grow by
_PAUSE, _LONGEST = 1.0, 640.0  # seconds between two looks; and at most between two tries
_RARELY = 20  # times as long as malloc took: it goes through all that lies free in the process


class HeapWatch:
    """One process's."""

    def __init__(self) -> None:
        self._least = 0  # of the process's memory, at any look
        self._next, self._trims_from, self._pause = 0.0, 0.0, _PAUSE

    def look(self) -> None:
        """Have malloc give back what is free, if the process has grown. It may need it all: so tries become ever rarer."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PAUSE
        nbytes = private()
        self._least = min(self._least or nbytes, nbytes)
        if nbytes - self._least < _MUCH:
            self._pause = _PAUSE
        elif now >= self._trims_from:
            trim_malloc()
            self._trims_from = now + max(self._pause, _RARELY * (time.monotonic() - now))
            self._pause = min(2 * self._pause, _LONGEST)


HEAP = HeapWatch()
