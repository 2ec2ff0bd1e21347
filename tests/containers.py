"""Ends where shared memory cannot be had: in another pid namespace, without /proc, of another user; by unshare and setuid.

``WAYS`` are those that this machine lets us try, which takes root, or a kernel that lets users have namespaces of their own.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_NEW_NAMESPACE, _NEW_PIDS, _NEW_USER = 0x00020000, 0x20000000, 0x10000000
_NEW_NETWORK, _NEW_TIME = 0x40000000, 0x00000080
_PRIVATE, _READ_ONLY, _DETACH, _BIND = 1 << 14 | 1 << 18, 1, 2, 1 << 12
_SET_DUMPABLE = 4
_SET_FLAGS, _UP = 0x8914, 1  # of a network interface
NOBODY = 65534
_libc = ctypes.CDLL(None, use_errno=True)


def _done(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _unshare(flags: int) -> None:
    _done(_libc.unshare(flags | (_NEW_USER if os.geteuid() else 0)))


def _own_mounts(flags: int = 0) -> None:
    _unshare(_NEW_NAMESPACE | flags)
    _done(_libc.mount(b"none", b"/", None, _PRIVATE, None))


def _without_proc() -> None:
    _own_mounts()
    _done(_libc.umount2(b"/proc", _DETACH))


def _with_read_only_dev_shm() -> None:
    _own_mounts()
    _done(_libc.mount(b"none", b"/dev/shm", b"tmpfs", _READ_ONLY, None))


def _with_small_dev_shm() -> None:
    _own_mounts()
    _done(_libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=64k"))


def see_folder_elsewhere(folder: str, place: str) -> None:
    """In mounts of one's own: have a folder at another place, too, and nothing of it where it was."""
    _own_mounts()
    _done(_libc.mount(os.fsencode(folder), os.fsencode(place), None, _BIND, None))
    _done(_libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, None))


def _in_other_pids() -> None:
    """As a container: pid 1 of its own numbers, and a /proc that shows those."""
    _own_mounts(_NEW_PIDS)
    _go_on_in_a_child()
    _done(_libc.mount(b"proc", b"/proc", b"proc", 0, None))


def _with_another_clock() -> None:
    """Go on in a child process. Its clocks, and those of its own children, are some days ahead."""
    _unshare(_NEW_TIME)
    with open("/proc/self/timens_offsets", "w", encoding="utf-8") as file:
        file.write("monotonic 300000 0\nboottime 400000 0\n")
    _go_on_in_a_child()


def _where_processes_are_hidden() -> None:
    """As another user, who sees no others' processes."""
    _own_mounts()
    _done(_libc.mount(b"proc", b"/proc", b"proc", 0, b"hidepid=2"))
    _of_another_user()


def _go_on_in_a_child() -> None:
    pid = os.fork()
    if pid:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _of_another_user(uid: int = NOBODY) -> None:
    codecs.lookup("ascii")  # the interpreter itself may lie where that user cannot read
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def _of_one_user() -> None:
    """As another user, who has a runtime folder (``folder_of_one_user``)."""
    os.environ["XDG_RUNTIME_DIR"] = _one_users()
    _of_another_user()


def _one_users() -> str:
    return f"{os.environ['XDG_RUNTIME_DIR']}-{NOBODY}"


@contextlib.contextmanager
def folder_of_one_user() -> Iterator[None]:
    """Have a runtime folder for who is ``OF_ONE_USER``, if that is not this user."""
    if os.geteuid():
        yield
        return
    folder = _one_users()
    os.mkdir(folder, 0o700)
    try:
        os.chown(folder, NOBODY, NOBODY)
        yield
    finally:
        shutil.rmtree(folder)


def _in_another_network() -> None:
    _unshare(_NEW_NETWORK)


def pick_ports_from(first: int, last: int) -> None:
    """In a network of one's own: have loopback there, and the kernel pick ports from these only."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH", b"lo", _UP))
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{first} {last}", encoding="ascii")


def _closed_to_others() -> None:
    """Of the same user, who may not look at its descriptors: what setuid programs are, and those that hide their memory."""
    if not os.geteuid():
        _of_one_user()
    _done(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0))


_held: list[int] = []


def _without_pipes() -> None:
    """Of a user who has as many pages of pipes as he may: the next ones are of one or two."""
    if not os.geteuid():
        _of_one_user()
    _use_up_pipes()


def _alone_without_pipes() -> None:
    """The same, of a user whom nothing else is done as: a budget is all processes'."""
    if not os.geteuid():
        _of_another_user(100_000 + os.getpid())
    _use_up_pipes()


def _alone_in_a_user_namespace() -> None:
    """Of another user, for whom root, and all others, stand for one uid that has no name."""
    uid = 100_000 + os.getpid()
    _of_another_user(uid)
    _done(_libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0))  # so that its own /proc is its own
    _done(_libc.unshare(_NEW_USER))
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1\n", encoding="ascii")


def _use_up_pipes() -> None:
    with open("/proc/sys/fs/pipe-user-pages-soft", encoding="ascii") as file:
        limit = int(file.read())
    for _ in range(0, limit, 256):
        _held.extend(os.pipe())
        fcntl.fcntl(_held[-1], fcntl.F_SETPIPE_SZ, 256 * 4096)


CLOSED, OPEN, WITHOUT_PIPES = OF_ONE_USER = "closed to others", "of that user", "without pipes"
APART = "another network"  # no way to an end on loopback from there
SMALL = "/dev/shm of 64 KiB"
HIDDEN = "hidden processes"
ALONE_WITHOUT_PIPES = "alone without pipes"
ALONE_IN_A_USER_NAMESPACE = "alone in a user namespace"
_NOT_FOR_ALL = (APART, SMALL, ALONE_WITHOUT_PIPES, ALONE_IN_A_USER_NAMESPACE)
_ALL: dict[str, Callable[[], None]] = {
    APART: _in_another_network,
    SMALL: _with_small_dev_shm,
    CLOSED: _closed_to_others,
    WITHOUT_PIPES: _without_pipes,
    OPEN: lambda: None if os.geteuid() else _of_one_user(),
    "no /proc": _without_proc,
    "read-only /dev/shm": _with_read_only_dev_shm,
    "other pids": _in_other_pids,
    "another user": _of_another_user,
    "another clock": _with_another_clock,
    HIDDEN: _where_processes_are_hidden,
    ALONE_WITHOUT_PIPES: _alone_without_pipes,
    ALONE_IN_A_USER_NAMESPACE: _alone_in_a_user_namespace,
}


def enter(way: str) -> None:
    """Go there. There is no way back."""
    _ALL[way]()


def run_there(way: str | Callable[[], None], action: Callable[[], Any]) -> int:
    """Fork, go there, and do something. Returns the exit status: 0, if it was done."""
    go = _ALL[way] if isinstance(way, str) else way
    pid = os.fork()
    if not pid:
        status = 1
        try:
            go()
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _is_allowed(way: str) -> bool:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            _ALL[way]()
            status = 0
        except OSError:
            pass
        finally:
            os._exit(status)
    return not os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


WAYS = [way for way in _ALL if way not in (*_NOT_FOR_ALL, *OF_ONE_USER) and _is_allowed(way)]
HAS_NETWORKS = _is_allowed(APART)
HAS_SMALL = _is_allowed(SMALL)
HAS_USER_NAMESPACES = not os.geteuid() and _is_allowed(ALONE_IN_A_USER_NAMESPACE)
