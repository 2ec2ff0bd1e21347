"""libc: C's own library, for the system calls that Python has no function for."""

from __future__ import annotations

import ctypes
import functools

__all__ = ["libc", "punch_hole"]

_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the library. Whoever sets the types of a function's arguments there sets them for all."""
    return ctypes.CDLL(None, use_errno=True)


def punch_hole(descriptor: int, start: int, stop: int) -> bool:
    """Give back the memory of a file's bytes in [start, stop), which then read as zeros. Return whether that was done."""
    return int(libc().fallocate(descriptor, _PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(stop - start))) == 0
