"""Alarm: a descriptor that is readable from a certain moment on. For who waits on descriptors alone, and has no thread."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from tensorpipe_ipc.libc import libc
from tensorpipe_ipc.owned_fd import owned

__all__ = ["TimerFd"]

_MONOTONIC = 1
_SETTING = struct.Struct("@4l")  # interval and time left, in seconds and nanoseconds


class TimerFd:
    """A timer of the kernel's (timerfd).

    Attributes:
        fd: readable once the time is over, until it is set again; -1 where there are no such timers.
    """

    def __init__(self) -> None:
        self.fd, self._error = -1, 0
        try:
            self._owned = owned(libc().timerfd_create, _MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            self.fd = self._owned.fileno()
        except AttributeError:
            pass
        except OSError:
            self._error = ctypes.get_errno()

    def check(self) -> None:
        """See that no timer is wanting.

        Raises:
            OSError: no descriptor was left for it.
        """
        if self.fd < 0 and self._error in (errno.EMFILE, errno.ENFILE):
            raise OSError(self._error, os.strerror(self._error))

    def set(self, seconds: float) -> None:
        """Be silent now, and readable after so many seconds; 0: never."""
        if self.fd >= 0:
            whole, part = divmod(seconds, 1)
            setting = _SETTING.pack(0, 0, int(whole), int(part * 1e9))
            libc().timerfd_settime(self.fd, 0, setting, None)

    def close(self) -> None:
        """Close it."""
        if self.fd >= 0:
            self._owned.close()
            self.fd = -1
