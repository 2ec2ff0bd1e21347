"""Questions to the kernel about a connection, and settings, for which libzmq has no option.

A unix socket's send buffer holds 208 KB, so that 4 MB go over in 19 pieces, and the sender's thread sleeps between them. With
512 KB they take half the time, one way.

A tcp socket finds its buffer by itself. But where the host's congestion control is bbr, it paces a connection of loopback by
what it found its bandwidth to be, of which a sender that waits now and then gives it no idea. There is nobody on loopback to
give way to. With reno 4 MB take a tenth less, and messages follow each other 1.4 times as fast.

A connector of tcp tries again and again while nobody listens. Each try goes out from a port that the kernel picks, and where
the binder's own lies in the range that it picks from (32768 to 60999), that is the very one in one try of some 14,000: after
an hour at five a second. For TCP these are two who called each other at the same moment, and so the connector has itself on the
line, and its binder finds the address in use.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import stat
import struct
import sys
import termios
from contextlib import closing, suppress
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

from tensorpipe_ipc.libc import libc, quick_libc
from tensorpipe_ipc.owned_fd import owned
from tensorpipe_ipc.zeromq.addresses import Address

__all__ = [
    "Progress",
    "connections_to",
    "hang_up",
    "is_to_itself",
    "listener",
    "prepare_for_bulk",
    "process_behind",
    "progress",
]

_SEND_BUFFER = 1 << 19  # bytes; the kernel cuts it to net.core.wmem_max (208 KB and up), and doubles it
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_NAME = 128  # bytes of a socket's address, at most
_SIOCOUTQ = termios.TIOCOUTQ  # the same number, in Linux
_ACKNOWLEDGED = struct.Struct("=120xQ")  # tcpi_bytes_acked, in the kernel's struct tcp_info
_RESET = struct.pack("ii", 1, 0)  # on closing, so that the kernel does not keep the address for another minute


def is_to_itself(fd: int) -> bool:
    """Return whether both ends of a tcp connection are the same one. Then closing it frees its address at once.

    Args:
        fd: its descriptor. It is libzmq's, whose thread may have closed it by now.
    """
    with suppress(OSError):
        with closing(_duplicate(fd)) as connection:  # by which Python sees whether it is IPv6
            name = connection.getsockname()
            if isinstance(name, tuple) and name == connection.getpeername():
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return True
    return False


def listener(path: str, backlog: int) -> socket.socket:
    """Return a unix socket that listens at a path, whose file nobody else may connect to from its first moment on.

    The kernel gives the file the socket's own mode, less the umask.

    Raises:
        OSError: it cannot be had.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(made.fileno(), 0o600)
        made.bind(path)
        made.listen(backlog)
    except BaseException:
        made.close()
        raise
    return made


def process_behind(fd: int, address: Address) -> tuple[int, int] | None:
    """Return the process, and user, at the other end of a connection to a unix socket; None if it is none any more.

    The process is 0 where that socket has a name which is not seen to be the address, as where it was bound in another mount
    namespace, or its file has another name by now. Or this is another connection of this user's by now: then the one that was
    asked for has ended, as libzmq will tell. One that has no name is another in any case.

    Args:
        fd: its descriptor. It is libzmq's, whose thread may have closed it by now.
        address: of one of its two ends.
    """
    with suppress(OSError):
        with closing(_duplicate(fd)) as connection:
            if connection.family == socket.AF_UNIX:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                pid, uid, _ = _CREDENTIALS.unpack(credentials)
                # A name that another user gave its socket is compared, and leads nowhere.
                if _is_at(connection, address) or (uid == os.geteuid() and _is_there(connection, address)):
                    return pid, uid
                if uid != os.geteuid() or connection.getpeername():
                    return 0, uid
    return None


def _duplicate(fd: int) -> socket.SocketType:
    """Return the socket of a descriptor, which may be another's by now: so it is duplicated first, and then looked at.

    And before: closing the duplicate of a file takes the record locks from that which the process has there.

    Raises:
        OSError: it is no socket.
    """
    _check_is_socket(fd)
    with owned(os.dup, fd) as duplicate:
        _check_is_socket(duplicate.fileno())
        # The type in C, as in ``owned``: ``socket.socket`` begins in Python, when the descriptor is open.
        opened, blocks = starmap(os.dup, [(duplicate.fileno(),)]), os.get_blocking(duplicate.fileno())
        made = next(map(partial(socket.SocketType, -1, -1, -1), opened))
        if blocks:  # Python ends that where the program has a default timeout, also for whoever has the same socket
            os.set_blocking(duplicate.fileno(), True)
        return made


def _check_is_socket(fd: int) -> None:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))


def prepare_for_bulk(fd: int, address: Address) -> None:
    """Set up a connection for large frames.

    Args:
        fd: its descriptor. It is libzmq's, whose thread may have closed it by now: then nothing happens.
        address: of one of its two ends. A number is used again: so is seen that it is that connection's still.
    """
    with suppress(OSError):
        with closing(_duplicate(fd)) as connection:
            if not _is_at(connection, address):
                return
            if address.path:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def hang_up(fd: int, address: Address) -> None:
    """End a connection to a binder. Whoever is at its other end may connect anew.

    Args:
        fd: its descriptor, as above. It may be a connection of the user's own program by now, to another host's same port.
        address: the binder's.
    """
    try:
        with closing(_duplicate(fd)) as connection:
            connection.getpeername()  # raises, of one that listens
            if _is_among(address, connection.getsockname()):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno == errno.EMFILE:  # strangers may have taken all, to flood by them
            _hang_up_in_place(fd, address)


def connections_to(address: Address) -> list[int]:
    """Return the descriptors of the connections of a binder of this process; none where that cannot be known.

    Args:
        address: the binder's, over tcp.
    """
    with suppress(OSError, ValueError):  # no /proc, no descriptor is left, or the port is not chosen yet
        port = _port(address)
        return [fd for fd in map(int, os.listdir("/proc/self/fd")) if _came_to(fd, port)]
    return []


def _came_to(fd: int, port: int) -> bool:
    return _tcp_port("getsockname", fd) == port and _tcp_port("getpeername", fd) > 0  # which one that listens has not


def _tcp_port(question: str, fd: int) -> int:
    """Return the port of one end of a connection; 0 if there is none."""
    family, found = _name(question, fd) or (0, b"")
    return int.from_bytes(found[:2], "big") if family in (socket.AF_INET, socket.AF_INET6) else 0


def _name(question: str, fd: int) -> tuple[int, bytes] | None:
    """Return the family and the name of one end of a socket; None if there is none.

    Args:
        question: ``getsockname`` or ``getpeername``.
        fd: any descriptor: it is only asked.
    """
    name, size = ctypes.create_string_buffer(_NAME), ctypes.c_uint(_NAME)
    if getattr(quick_libc(), question)(fd, name, ctypes.byref(size)):
        return None
    return int.from_bytes(name.raw[:2], sys.byteorder), name.raw[2 : size.value]


class Progress(NamedTuple):
    """The way that bytes have come which were written into a tcp connection.

    Attributes:
        written: the bytes that were written, ever.
        acknowledged: those of them that the other host has.
        has_room: whether the kernel would take more now.
    """

    written: int
    acknowledged: int
    has_room: bool


def progress(fd: int, address: Address) -> Progress | None:
    """Return how far what was written into a tcp connection has come.

    Args:
        fd: its descriptor, as above. It is only asked, and not duplicated: a child that is forked meanwhile would keep it open.
        address: of one of its two ends.

    Returns:
        None of one that is closed, or no connection of that address any more; nor does every kernel tell.
    """
    with suppress(OSError):
        if _port(address) in (_tcp_port("getsockname", fd), _tcp_port("getpeername", fd)):
            before, arrived, under_way = -1, _arrived(fd), ctypes.c_int()
            while before != arrived:  # else what arrives in between counts twice
                quick_libc().ioctl(fd, ctypes.c_ulong(_SIOCOUTQ), ctypes.byref(under_way))
                before, arrived = arrived, _arrived(fd)
            looks = ctypes.create_string_buffer(struct.pack("ihh", fd, select.POLLOUT, 0))
            return Progress(arrived + under_way.value, arrived, quick_libc().poll(looks, ctypes.c_ulong(1), 0) > 0)
    return None


def _arrived(fd: int) -> int:
    """Return how many bytes the other host has acknowledged, ever.

    Raises:
        OSError: the kernel does not tell.
    """
    told, size = ctypes.create_string_buffer(_ACKNOWLEDGED.size), ctypes.c_uint(_ACKNOWLEDGED.size)
    failed = quick_libc().getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, told, ctypes.byref(size))
    if failed or size.value < _ACKNOWLEDGED.size:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    return int(_ACKNOWLEDGED.unpack(told.raw)[0])


def _hang_up_in_place(fd: int, address: Address) -> None:
    """As ``hang_up``, without a duplicate: the descriptor may become another's between the look and the end.

    It is then hardly ever one of the user's own: libzmq takes each that is free at once, for those who wait to connect.
    """
    if address.path:
        family, found = (_name("getpeername", fd) and _name("getsockname", fd)) or (
            0,
            b"",
        )  # one that listens has no peer
        is_its = (family, found.rstrip(b"\0")) == (socket.AF_UNIX, os.fsencode(address.path))
    else:
        is_its = _came_to(fd, _port(address))
    if is_its:
        libc().shutdown(fd, socket.SHUT_RDWR)


def _is_at(connection: socket.SocketType, address: Address) -> bool:
    """Return whether an address is that of one of a connection's two ends."""
    return _is_among(address, connection.getsockname(), connection.getpeername())


def _is_among(address: Address, *ends: Any) -> bool:
    if address.path:
        return address.path in ends
    return _port(address) in (end[1] for end in ends if isinstance(end, tuple))


def _port(address: Address) -> int:
    return int(address.text.rpartition(":")[2])


def _is_there(connection: socket.SocketType, address: Address) -> bool:
    """Return whether the other end's name is another spelling of an address: by a symbolic link above, or another mount.

    A link at the address itself is not compared with what it leads to: others may have put it there.
    """
    name = connection.getpeername()
    if isinstance(name, str) and name.startswith("/"):
        with suppress(OSError, ValueError):
            return os.path.samestat(os.lstat(address.path), os.lstat(name))
    return False
