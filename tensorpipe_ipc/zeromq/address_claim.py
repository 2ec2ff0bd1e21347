"""The ownership of an ipc address: a bind takes over a dead owner's and never a live one's, and gives it back at the end.

Binds at one path exclude each other by a lock (flock, which a killed process lets go of) on a folder that no other user can
open: the path's own, or else the runtime folder. The process's umask is left alone: the mode of the socket file is set before
it is made (``kernel_sockets.listener``).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.owned_fd import OwnedFd, owned
from tensorpipe_ipc.process import is_dead
from tensorpipe_ipc.zeromq.addresses import Address, check_folder, check_socket_file, runtime_folder

__all__ = ["claim", "owner_of", "private_to_us", "unclaim"]

PATIENCE = 5.0  # seconds for the lock, which is held for a bind
_Lock = tuple[int, int, int]  # the thread; the folder's device and inode
_held: dict[_Lock, str] = {}  # and the path that it is held for


def claim(address: Address, bind: Callable[[], None], made: list[os.stat_result]) -> None:
    """Bind, having seen that the folder of an ipc path and the path itself are safe, and that nobody who lives is bound to it.

    Args:
        address: where.
        bind: does it.
        made: gets what the socket file is then, unless there is no path.

    Raises:
        Refused: a live process has it, or it is not safe, or another process keeps the lock.
    """
    if not address.path:
        bind()
        return None
    check_folder(address.path)
    with private_to_us(address.path):
        if check_socket_file(address.path):
            owner = owner_of(address.path)
            if owner is not None:
                raise Refused(
                    f"{address.text} belongs to pid {owner}, which is alive; close it or use another endpoint"
                )
            os.unlink(address.path)
        _sweep(os.path.dirname(address.path))
        try:
            bind()
            os.chmod(address.path, 0o600)
            made.extend(map(os.lstat, (address.path,)))
        except BaseException:
            with suppress(OSError, Refused):  # nobody else may bind here now: it is this end's, or another program's
                if check_socket_file(address.path) and owner_of(address.path) in (None, os.getpid()):
                    os.unlink(address.path)
            raise


def unclaim(path: str, made: os.stat_result) -> None:
    """Clear away the socket file of an end that closes, if it is still the one that it made."""
    with suppress(OSError, Refused), private_to_us(path):
        found = os.lstat(path)
        if os.path.samestat(found, made) and found.st_mtime_ns == made.st_mtime_ns:  # inodes are used again
            os.unlink(path)


def _sweep(folder: str) -> None:
    """Remove the sockets of binders that were killed, where all sockets are binders' of this user."""
    if folder != runtime_folder():
        return
    with suppress(OSError):
        paths = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".sock")]
        with open("/proc/net/unix", "rb") as lines:
            bound_here = {line.rstrip(b"\n").partition(b"/")[2] for line in lines}
        for path in paths:
            if os.fsencode(path)[1:] not in bound_here and check_socket_file(path) and owner_of(path) is None:
                os.unlink(path)


@contextmanager
def private_to_us(path: str) -> Iterator[None]:
    """Exclude this user's other processes, and threads, that do the same for ``path``.

    Raises:
        Refused: one of them does not come to an end.
    """
    folder = _folder_for_lock(path)
    if folder is None:
        yield
        return
    found = os.fstat(folder.fileno())
    lock = threading.get_ident(), found.st_dev, found.st_ino
    if lock in _held:  # by what this signal's handler interrupted, which goes on when the handler has returned
        if _held[lock] == path:
            raise Refused(f"{path} is being bound, or closed, by what this signal's handler interrupted")
        yield
        return
    with folder:
        deadline = time.monotonic() + PATIENCE
        try:
            while not _locked(folder.fileno(), lock, path):
                if time.monotonic() > deadline:
                    held_by = _holder(folder.fileno())
                    raise Refused(f"{path}: {held_by} keeps the lock for {PATIENCE:.0f} s: is it stopped?")
                time.sleep(0.002)
            yield
        finally:
            try:
                fcntl.flock(folder.fileno(), fcntl.LOCK_UN)  # a child that was forked meanwhile would keep it
            finally:
                _held.pop(lock, None)  # last: a handler may come as soon as it is unlocked


def _folder_for_lock(path: str) -> OwnedFd | None:
    """Open a folder that only this user can open, if there is one."""
    for folder in (os.path.dirname(path), runtime_folder()):
        with suppress(OSError):
            opened = owned(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = os.fstat(opened.fileno())
            if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return opened
    return None


def _locked(folder: int, lock: _Lock, path: str) -> bool:
    _held[lock] = path  # first: a handler may come as soon as it is locked
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        del _held[lock]
        return False
    return True


def _holder(folder: int) -> str:
    """Return the process that has the lock, in words."""
    inode = os.fstat(folder).st_ino
    with suppress(OSError), open("/proc/locks", encoding="ascii") as lines:
        for line in lines:
            fields = line.split()
            if fields[1:2] == ["FLOCK"] and fields[5].rpartition(":")[2] == str(inode):
                return f"pid {fields[4]}"
    return "another process of yours"


def owner_of(path: str) -> int | None:
    """Return the process that listens at a unix socket, None if nobody does or it is dead.

    A child that was forked from the owner may hold the listening socket long after the owner died: the kernel says who
    called listen(), and that one must live.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError:
            return -1  # it listens and does not answer: somebody is there
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return None if is_dead(pid) else int(pid)
