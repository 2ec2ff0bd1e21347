"""Descriptors that have an owner from the moment on at which they are open.

A number owns nothing. What a signal's handler raises between ``os.open`` and the store of its result leaves the descriptor
open for ever; so does what it raises at the begin of a ``__del__`` that would close it.

CPython looks for signals after a call, on entering a Python function and on jumping back; Python 3.10 also when a Python
function has returned. It does not look within a chain of functions in C. So ``owned`` opens a descriptor and makes its owner in
one such chain. The owner is an object of C, which closes its descriptor with its last reference, and runs no Python for that.
So an exception closes what it takes from the stack, at whatever moment it comes.

``select.epoll.fromfd`` makes such an owner of any descriptor, whatever that is. The standard library has no other that takes
all kinds, and closes them without a warning.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import stat
from collections.abc import Callable
from typing import Any

__all__ = ["OwnedFd", "handed", "opened_file", "owned", "pipe", "reopened"]

OwnedFd = select.epoll
"""``fileno()`` is the descriptor, and ``close()`` closes it, once; so does the end of a ``with`` block."""


def owned(opens: Callable[..., int], *arguments: object) -> OwnedFd:
    """Own what a function opens, as soon as it is open.

    Args:
        opens: a function in C that returns a descriptor.
        arguments: of it.

    Raises:
        OSError: as ``opens`` does; or it returned -1, as C has it.
    """
    opened = filter((-1).__lt__, itertools.starmap(opens, [arguments]))
    found = next(map(OwnedFd.fromfd, opened), None)
    if found is None:
        raise OSError(errno.EBADF, f"{opens} returned no descriptor")
    return found


def handed(duplicate: Any) -> OwnedFd:
    """Own what multiprocessing hands to a process that it starts.

    For that it was made inheritable. Programs that this process runs are not to have it: a queue lives as long as somebody has.

    Args:
        duplicate: ``multiprocessing.reduction.DupFd`` of a descriptor, as it arrived.
    """
    found = owned(duplicate.detach)
    os.set_inheritable(found.fileno(), False)
    return found


def pipe(flags: int = 0) -> tuple[OwnedFd, OwnedFd]:
    """Return the two ends of a new pipe: the one to read from, and the one to write to.

    Raises:
        OSError: no descriptor is left.
    """
    ends = itertools.starmap(os.pipe2, [(flags | os.O_CLOEXEC,)])
    reader, writer = map(OwnedFd.fromfd, itertools.chain.from_iterable(ends))
    return reader, writer


def opened_file(path: str) -> OwnedFd:
    """Open a file to read it, if it is a regular one. Others are not opened, as that may have effects: a terminal would become
    the process's own, and a writer that waits for a reader of a fifo would go on.

    Raises:
        OSError: it is none, or cannot be opened.
    """
    with owned(os.open, path, os.O_PATH | os.O_CLOEXEC) as place:
        if not stat.S_ISREG(os.fstat(place.fileno()).st_mode):
            raise OSError(errno.EINVAL, f"{path} is no regular file")
        return reopened(place.fileno(), os.O_RDONLY | os.O_NONBLOCK)


def reopened(descriptor: int, flags: int) -> OwnedFd:
    """Open what a descriptor leads to once more: an open file description of its own.

    Raises:
        OSError: no descriptor is left, or there is no /proc.
    """
    return owned(os.open, f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
