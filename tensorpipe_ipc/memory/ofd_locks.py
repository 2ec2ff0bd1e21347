"""Locks on bytes of a file that belong to an open file description: Linux's OFD locks (fcntl(2)).

The kernel drops such a lock when the last descriptor of its description is closed: at once after SIGKILL, exit or exec.
Opening and closing other descriptors of the same file leaves it alone, while a POSIX lock would be lost.
No function here waits for a lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

__all__ = ["is_locked", "lock", "read_lock", "unlock"]

_FLOCK = struct.Struct("hhqqi4x")  # struct flock where off_t has 64 bits, with native padding


def lock(descriptor: int, start: int, length: int) -> bool:
    """Lock bytes exclusively, without waiting. Return whether that succeeded: no other description has a lock on them."""
    return _lock(descriptor, fcntl.F_WRLCK, start, length)


def read_lock(descriptor: int, byte: int) -> bool:
    """Lock a byte shared, without waiting. Return whether that succeeded: no other description has it exclusively."""
    return _lock(descriptor, fcntl.F_RDLCK, byte, 1)


def unlock(descriptor: int, start: int, length: int) -> None:
    """Unlock bytes."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))


def is_locked(descriptor: int, start: int, length: int = 1) -> bool:
    """Return whether another open file description has a lock on any of the bytes. This one may be read-only."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _lock(descriptor: int, kind: int, start: int, length: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as failed:
        if failed.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
