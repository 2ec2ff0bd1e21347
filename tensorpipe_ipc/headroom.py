"""The memory that may still be used before the machine, a cgroup that this process is in, or its own limit runs out.

A full memory cgroup kills, it does not refuse: touching a page, ``posix_fallocate`` and MADV_POPULATE_WRITE alike end
in the OOM killer. So what is left is looked up before shared memory grows. Others may take it in the meantime: this is
a check, not a guarantee. The less is left, the more often it is looked up (``until_the_next_look``).

A cgroup's usage counts the files that its processes read, too. A program that reads more than its limit, as training does,
is at that limit for ever. The kernel takes this cache back before it kills, so it counts as left, as in ``MemAvailable``.

Beyond ``memory.high`` nobody is killed, but each call that gets memory may take seconds. So it counts as a limit. Where the
kernel commits no more memory than there is (``vm.overcommit_memory=2``), a page that it refuses is a SIGBUS.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from collections.abc import Iterator

__all__ = ["OUTDATED", "addresses_left", "headroom", "until_the_next_look"]

OUTDATED = 0.1  # seconds from which on others may have taken what a look found

ROOT = "/sys/fs/cgroup"  # where the limits of cgroups are read
PROC = "/proc"  # where the memory of the machine is read, and the cgroup of this process
# Bytes of a cgroup that are left to what nobody counts: the refusal itself, small objects, the kernel's own batches of
# pages. Without it, a process that was about to be told was killed.
_SPARE = 1 << 21
# cgroup version 1 writes "no limit" as a number near 2 ** 63
_UNLIMITED = 1 << 60
# Fields of memory.stat. In version 1 only the fields with the prefix "total_" include the subtree.
_CACHE = ("inactive_file", "active_file", "slab_reclaimable")


def headroom() -> int:
    """Return how many bytes may still be used: the least that the machine, or any cgroup of this process, has left."""
    room, files = min(_available(), _committable()), tuple[tuple[str, str], ...]()
    with contextlib.suppress(OSError):  # no descriptor is left: it is looked again the next time
        files = _files(os.getpid())
    for limit, usage in files:
        with contextlib.suppress(OSError, ValueError):  # the value "max", or a file that this kernel lacks
            most = _number(limit)
            if most < _UNLIMITED and (left := most - _number(usage) - _SPARE) < room:
                room = min(room, left + _cache(os.path.dirname(usage)))
    return max(0, room)


def until_the_next_look(left: int, most: int) -> int:
    """Return how many of the bytes that are left may be used without another look: few enough that several processes may."""
    return min(most, left // 16)


def addresses_left() -> int | None:
    """Return how many bytes of addresses this process may still map (``ulimit -v``, RLIMIT_AS); None: no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm", encoding="utf-8") as line:
        return max(0, limit - int(line.read().split()[0]) * resource.getpagesize())
    return None


def _available() -> int:
    with contextlib.suppress(OSError, ValueError):
        return _of_machine("MemAvailable")
    return _UNLIMITED


def _committable() -> int:
    with contextlib.suppress(OSError, ValueError):
        if _number(f"{PROC}/sys/vm/overcommit_memory") == 2:
            kept = sum(_number(f"{PROC}/sys/vm/{who}_reserve_kbytes") for who in ("admin", "user"))
            return _of_machine("CommitLimit") - _of_machine("Committed_AS") - kept * 1024
    return _UNLIMITED


def _of_machine(name: str) -> int:
    with open(f"{PROC}/meminfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise ValueError(f"no {name} in /proc/meminfo")


@functools.lru_cache(maxsize=1)  # a process rarely changes its cgroup; a child has another id
def _files(_process: int) -> tuple[tuple[str, str], ...]:
    return tuple(_limits())


def _limits() -> Iterator[tuple[str, str]]:
    """Yield the names of the files with limit and usage, for this process's cgroup and each one above it."""
    with (
        contextlib.suppress(FileNotFoundError, PermissionError),
        open(f"{PROC}/self/cgroup", encoding="utf-8") as lines,
    ):
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers == "":
                for limit in ("memory.max", "memory.high"):
                    yield from _ancestors(ROOT, path, limit, "memory.current")
            elif "memory" in controllers.split(","):
                yield from _ancestors(f"{ROOT}/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _ancestors(root: str, path: str, limit: str, usage: str) -> Iterator[tuple[str, str]]:
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        folder = "/".join([root, *parts[:depth]])
        if os.path.exists(f"{folder}/{limit}"):
            yield f"{folder}/{limit}", f"{folder}/{usage}"


def _cache(folder: str) -> int:
    """Return how many bytes of a cgroup's usage the kernel can take back."""
    with contextlib.suppress(OSError, ValueError), open(f"{folder}/memory.stat", encoding="utf-8") as lines:
        found = dict(line.split() for line in lines)
        return sum(int(found.get(f"total_{name}", found.get(name, 0))) for name in _CACHE)
    return 0


def _number(name: str) -> int:
    with open(name, encoding="utf-8") as file:
        return int(file.read())
