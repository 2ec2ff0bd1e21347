"""Processes: their identity, whether they live, and the memory they hold. The package's one door to psutil.

A process id alone says little: ids are reused, and mean nothing in another container or on another host. So an
identity is (boot id, pid namespace, pid, start time). It serves to *name* a process in messages and to notice, between
processes of one namespace, that it is gone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import psutil

__all__ = [
    "Identity",
    "Memory",
    "ProcessKey",
    "family",
    "identity",
    "is_alive",
    "is_dead",
    "memfds",
    "memory",
    "open_files",
    "open_ports",
    "own_hosts",
    "peak_rss",
    "process_key",
    "reset_peak_rss",
    "resident",
    "started",
]

_FIRST_TIME_NAMESPACE = 0xEFFFFFFA  # the kernel's PROC_TIME_INIT_INO
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)  # a process, or it is hidden
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process, told apart from all others that ever ran.

    Attributes:
        host: the host's name, for people.
        boot: the kernel's boot id; two processes share a kernel exactly when it is equal. Empty where there is none, and
            where /proc cannot be read. In a time namespace of its own, where start times count from another moment, that
            namespace's inode follows.
        namespace: inode of the pid namespace, 0 where there is none.
        pid: process id within that namespace.
        started: when it started, in clock ticks since boot; 0 where it is not to be found out, which is without /proc.
    """

    host: str
    boot: str
    namespace: int
    pid: int
    started: float

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def same_namespace(self, other: Identity) -> bool:
        """Return whether the two can see each other's process ids."""
        return (self.boot or self.host, self.namespace) == (other.boot or other.host, other.namespace)


class Memory(NamedTuple):
    """A process's memory in bytes. ``rss`` is ``uss`` and ``shared``."""

    rss: int
    """Resident. It counts shared pages in every process that has touched them."""
    uss: int
    """Unique: what would be given back if the process ended now."""
    pss: int
    """Proportional: its unique pages, and of those it shares with n others one n-th. 0 where the kernel does not tell."""
    shared: int
    """Pages that other processes have touched, too."""
    swap: int
    """Swapped out."""


ProcessKey = tuple[int, int]
_forks = 0  # that lie between this process and the first of its line
_is_watched = False


def process_key() -> ProcessKey:
    """Return what this process has, and no ancestor of its: a dead one may have had its process id."""
    global _is_watched
    if not _is_watched:
        os.register_at_fork(after_in_child=_count_fork)
        _is_watched = True
    return os.getpid(), _forks


def _count_fork() -> None:
    global _forks
    _forks += 1


def identity() -> Identity:
    """This process's own identity."""
    return _identity(process_key())


@functools.lru_cache(maxsize=1)  # one entry: a forked child asks with another key, and gets its own
def _identity(process: ProcessKey) -> Identity:
    pid = process[0]
    return Identity(socket.gethostname(), _boot_id(), _pid_namespace(), pid, started(pid))


def own_hosts() -> set[str]:
    """Return the names and addresses of this host, as far as it knows them by itself."""
    addresses = (each.address for interface in psutil.net_if_addrs().values() for each in interface)
    return {"localhost", socket.gethostname(), *(address.partition("%")[0] for address in addresses)}


def open_ports() -> Iterator[tuple[str, int]]:
    """Yield the addresses and tcp ports that processes of this host, of whatever user, have open for others to connect to."""
    with contextlib.suppress(OSError, psutil.Error):  # no /proc
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr:
                yield each.laddr.ip, each.laddr.port


def is_alive(process: Identity) -> bool:
    """Return whether ``process`` still runs. True for one that cannot be seen from here, or now: nothing is guessed.

    A zombie is dead: its memory and descriptors are gone, only its parent has not looked yet.
    """
    if not process.same_namespace(identity()):
        return True
    try:
        return started(process.pid) == process.started and not _is_zombie(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # another user's, where /proc hides those (hidepid); or no descriptor is left to look with
        return True


def is_dead(pid: int) -> bool:
    """Return whether a process is seen to be dead, by its number alone; a zombie is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return _is_zombie(pid)


def memfds(name: str, pids: Iterable[int] | None = None) -> Iterator[tuple[int, str]]:
    """All memfds of a name, wherever they are open: the process, and the link by which another can open it again.

    Args:
        name: what they were created by.
        pids: the processes to look at; None: all that this one may look at.
    """
    target = f"/memfd:{name} (deleted)"
    return ((pid, link) for pid, link, path in open_files(pids) if path == target)


def open_files(pids: Iterable[int] | None = None) -> Iterator[tuple[int, str, str]]:
    """All that processes have open: the process, the link by which another can open it again, and its path as /proc shows it.

    Args:
        pids: the processes to look at; None: all that this one may look at.
    """
    for pid in psutil.pids() if pids is None else pids:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                link = f"/proc/{pid}/fd/{descriptor}"
                with contextlib.suppress(OSError):
                    yield pid, link, os.readlink(link)


def memory(pid: int | None = None) -> Memory:
    """Return the memory that a process holds. The kernel walks all of its pages for that: 1 ms for one that has imported torch.

    Args:
        pid: the process; None for this one.

    Raises:
        ProcessLookupError: there is no such process (any more).
        PermissionError: it is another user's.
    """
    try:
        full = psutil.Process(pid).memory_full_info()
    except (psutil.NoSuchProcess, psutil.ZombieProcess) as gone:
        raise ProcessLookupError(f"no process {pid}") from gone
    except psutil.AccessDenied as denied:
        raise PermissionError(f"process {pid} is another user's; its memory may not be looked at") from denied
    # rss is counted apart from the others, a moment before or (in old kernels) with some pages' delay
    return Memory(full.rss, full.uss, getattr(full, "pss", 0), max(0, full.rss - full.uss), getattr(full, "swap", 0))


def reset_peak_rss(pid: int) -> bool:
    """Have the kernel forget the peak of a process's resident memory up to now. Whether it did.

    Whoever else reads it (``ru_maxrss``, ``VmHWM``) finds it forgotten, too.
    """
    try:
        with open(f"/proc/{pid}/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")
    except OSError:
        return False
    return True


def peak_rss(pid: int) -> int:
    """The peak of a process's resident memory, since it began or was told to forget; 0 where that is not known."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def resident(pid: int) -> int:
    """Resident memory of a process, in bytes; 0 when it has ended, or is another user's and hidden."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read(128).split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def started(pid: int) -> float:
    """Return when a process started, in clock ticks since boot, as the kernel keeps it; 0 where that is hidden.

    Not psutil's create_time(): that adds the boot time, which moves when the wall clock is set.

    Raises:
        ProcessLookupError: there is no such process (any more).
        PermissionError: it is another user's, and hidden.
        OSError: no descriptor is left to look with.
    """
    try:
        return float(_stat_fields(pid)[19])
    except FileNotFoundError:
        try:
            os.kill(pid, 0)  # PermissionError: it is only hidden
        except OverflowError:  # a stranger may have named any number
            raise ProcessLookupError(f"no process {pid}") from None
        if os.path.exists("/proc/self/stat"):
            raise ProcessLookupError(f"no process {pid}") from None
        return 0.0


def family(pid: int) -> list[int]:
    """Return the ids of a process and all that descend from it. One whose parent has ended is no member any more.

    The kernel's own lists of children are read, for each thread of each process: some 15 us a thread. A child may be missing
    from them while a thread of its parent ends.

    Raises:
        OSError: no descriptor is left to look with.
    """
    if not os.path.exists("/proc/thread-self/children"):  # as the kernel was built
        with contextlib.suppress(psutil.NoSuchProcess):
            return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        return []
    found = [pid]
    for parent in found:  # which grows meanwhile
        with contextlib.suppress(*_GONE):
            for task in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(*_GONE), open(f"/proc/{parent}/task/{task}/children", "rb") as file:
                    found += map(int, file.read().split())
    return found


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip() + _time_namespace()
    except OSError:
        return ""


def _time_namespace() -> str:
    """Of a process in another time namespace than the machine's first."""
    with contextlib.suppress(OSError):
        inode = os.stat("/proc/self/ns/time").st_ino
        return "" if inode == _FIRST_TIME_NAMESPACE else f" {inode}"
    return ""


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _is_zombie(pid: int) -> bool:
    """Return whether all threads have ended. The first is a zombie before the others have let go of memory and descriptors."""
    try:
        fields = _stat_fields(pid)
        return fields[0] in "ZX" and int(fields[17]) <= 1
    except OSError:
        return False


def _stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat from its third field on: the second is the name, which may hold spaces and brackets."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
