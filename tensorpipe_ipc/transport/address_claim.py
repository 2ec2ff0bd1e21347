"""Whose an ipc address is: a bind never takes over a live owner's, takes over a dead one's, and gives it back at the end."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.transport.addresses import Address, check_folder, check_socket_file

__all__ = ["claimed", "owner_of", "private_to_us", "unclaim"]


@contextmanager
def claimed(address: Address) -> Iterator[None]:
    """Hold an ipc path for a bind: its folder and itself are safe, and nobody who lives is bound to it.

    Raises:
        Refused: a live process has it, or it is not safe.
    """
    if not address.path:
        yield
        return
    check_folder(address.path)
    with private_to_us(address.path):
        if check_socket_file(address.path):
            owner = owner_of(address.path)
            if owner is not None:
                raise Refused(
                    f"{address.text} belongs to pid {owner}, which is alive; close it or use another endpoint"
                )
            os.unlink(address.path)
        yield
        os.chmod(address.path, 0o600)


def unclaim(path: str) -> None:
    """Clear away the socket file of an end that closes."""
    with private_to_us(path), suppress(FileNotFoundError):
        os.unlink(path)


@contextmanager
def private_to_us(path: str) -> Iterator[None]:
    """A lock on the folder (flock, which a killed process lets go of), and 0077 as umask for what is made meanwhile.

    The umask is the process's: a file that another thread makes in this millisecond is private too.
    """
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = os.umask(0o077)
        try:
            yield
        finally:
            os.umask(before)
    finally:
        os.close(folder)


def owner_of(path: str) -> int | None:
    """The process that listens at a unix socket, None if nobody does or it is dead.

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
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return int(pid)
