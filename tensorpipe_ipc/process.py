"""Who a process is, whether it still lives, and what memory it holds. The package's one door to psutil.

A process id alone says little: ids are reused, and mean nothing in another container or on another host. So an
identity is (boot id, pid namespace, pid, start time). It serves to *name* a process in messages and to notice, between
processes of one namespace, that it is gone.
"""

from __future__ import annotations

import functools
import os
import socket
from typing import NamedTuple

import msgspec
import psutil

__all__ = ["Identity", "Memory", "identity", "is_alive", "memory"]


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process, told apart from all others that ever ran.

    Attributes:
        host: the host's name, for people.
        boot: the kernel's boot id; two processes share a kernel exactly when it is equal. Empty where there is none, and
            where /proc cannot be read.
        namespace: inode of the pid namespace, 0 where there is none.
        pid: process id within that namespace.
        started: when it started, in clock ticks since boot on Linux, else in seconds since the epoch; 0 where it is not
            to be found out, which is on Linux without /proc.
    """

    host: str
    boot: str
    namespace: int
    pid: int
    started: float

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def same_namespace(self, other: Identity) -> bool:
        """Whether the two can see each other's process ids."""
        return (self.boot or self.host, self.namespace) == (other.boot or other.host, other.namespace)


class Memory(NamedTuple):
    """A process's memory in bytes. ``rss`` counts shared pages in every process that has touched them."""

    rss: int  # resident
    uss: int  # unique: what would be given back if the process ended now
    pss: int  # proportional: shared pages divided among those who share them; 0 where the kernel does not tell


def identity() -> Identity:
    """This process's own identity."""
    return _identity(os.getpid())


@functools.lru_cache(maxsize=1)  # one entry: a forked child asks with another pid, and gets its own
def _identity(pid: int) -> Identity:
    return Identity(socket.gethostname(), _boot_id(), _pid_namespace(), pid, _started(pid))


def is_alive(process: Identity) -> bool:
    """Whether ``process`` still runs. True for one that cannot be seen from here: nothing is guessed about it.

    A zombie is dead: its memory and descriptors are gone, only its parent has not looked yet.
    """
    if not process.same_namespace(identity()):
        return True
    try:
        return _started(process.pid) == process.started and not _is_zombie(process.pid)
    except psutil.NoSuchProcess:
        return False


def memory(pid: int | None = None) -> Memory:
    """What memory a process holds.

    Args:
        pid: the process; None for this one.

    Raises:
        ProcessLookupError: there is no such process (any more).
    """
    try:
        full = psutil.Process(pid).memory_full_info()
    except psutil.NoSuchProcess as gone:
        raise ProcessLookupError(f"no process {pid}") from gone
    return Memory(full.rss, full.uss, getattr(full, "pss", 0))


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _started(pid: int) -> float:
    """Start time as the kernel keeps it.

    Not psutil's create_time(): that adds the boot time, which moves when the wall clock is set.
    """
    try:
        return float(_stat_fields(pid)[19])
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            raise psutil.NoSuchProcess(pid) from None
        return _exists(pid) if psutil.LINUX else float(psutil.Process(pid).create_time())
    except ProcessLookupError:  # it went while we read
        raise psutil.NoSuchProcess(pid) from None


def _is_zombie(pid: int) -> bool:
    try:
        return _stat_fields(pid)[0] in "ZX"
    except OSError:
        return not psutil.LINUX and bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def _exists(pid: int) -> float:
    """0, where the kernel knows the process: without /proc it tells no more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        raise psutil.NoSuchProcess(pid) from None
    except PermissionError:
        pass
    return 0.0


def _stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat from its third field on: the second is the name, which may hold spaces and brackets."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
