"""One piece of anonymous shared memory: made, sealed, mapped, handed to children. What lies in it is not known here.

The segment is a memfd: nothing in /dev/shm, not bounded by a container's 64 MB there, gone with the last process that
has it. It is sparse: its size is address space, and only pages that were written cost memory. So it is made very large
once, and nobody ever has to grow or remap it.

Three seals (no shrinking, no growing, no further seals) make it impossible for any process, by accident or malice, to
pull the memory from under another one: reading a page past the end of a file is a SIGBUS, and there is no such page.

::

    byte 0       8          16       24           32             40       48       56      64     72                    size
    ├─ magic ────┼─ version ┼─ size ─┼─ capacity ─┼─ page-locked ┼─ grown ┼─ apart ┼─ looks ┼─ seen ┼─ rows.py, … arena.py ─┤

``capacity`` is what the arena's maker allows it to cost, all processes together.
``page-locked`` is 1 once any process has locked any page for a GPU: then none is ever punched out again.
``grown`` is 1 when the arena got more memory since somebody last looked for some that lies idle.
``apart`` is 1 once any process has attached that quick barriers do not reach (memory/barrier.py).
``looks`` counts the looks of waiting puts at all rows: one is enough for all who wait.
``seen`` is the time (ns, monotonic) up to which somebody's look for idle memory is enough for all who wait in get.

All words are native 64-bit unsigned integers: a segment never leaves its kernel.

Two kinds of open file description matter, and are kept apart. The *shared* one (``Segment.descriptor``) is inherited by
children and never carries a lock. An attached process's *own* one, which carries its row's lock, belongs to memory/rows.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import sys
import weakref
from multiprocessing import context, reduction
from typing import Any

import numpy as np

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.headroom import addresses_left
from tensorpipe_ipc.libc import MAP_NORESERVE, map_over, punch_hole
from tensorpipe_ipc.owned_fd import OwnedFd, handed, owned

__all__ = [
    "APART",
    "CAPACITY",
    "DEFAULT_SIZE",
    "GROWN",
    "HEAD",
    "LOOKS",
    "MINIMUM_SIZE",
    "NAME",
    "PAGE",
    "PAGE_LOCKED",
    "SEEN",
    "Segment",
    "identity_of",
    "read_head",
    "segment_at",
]

PAGE = mmap.PAGESIZE
DEFAULT_SIZE = 1 << 40  # 1 TiB of addresses; x86-64 and arm64 give a process 128 TiB
MINIMUM_SIZE = 1 << 28  # below this the tables at the head would be most of it

NAME = "tensorpipe_ipc"  # of the memfd, as /proc shows it
CAPACITY, PAGE_LOCKED, GROWN, APART, LOOKS, SEEN = range(3, 9)  # indexes of the words

MAGIC = int.from_bytes(b"TPIPESEG", "little")
VERSION = 3
HEAD = struct.Struct("=3Q")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """A sealed, sparse memfd and its mapping in this process.

    It may be inherited by fork, and pickled to a child while that is being spawned, never otherwise. It has no
    ``close()``: a mapping must outlive every array on it (torch and NumPy do not lock the buffers they borrow), so it
    ends with the last reference to it.

    Attributes:
        descriptor: the shared open file description; no lock is ever taken on it.
        identity: of its file: whose descriptor was closed may find another one by that number.
        size: of the address range, in bytes.
        memory: the mapping, for slices of small data.
        words: the same as native 64-bit words, for the stores that other processes watch.
        octets: the same as a NumPy array of bytes, for views and large copies.
        page: bytes of the system's pages: what memory is given back by. (A test may have it larger.)
    """

    page = PAGE

    __slots__ = ("__weakref__", "_owned", "descriptor", "identity", "memory", "octets", "size", "words")

    def __init__(self, owned: OwnedFd, size: int) -> None:
        """
        Args:
            owned: a segment of ``size`` bytes, which becomes this one's.

        Raises:
            SharedMemoryError: it is something else, or does not fit into this process's address space.
        """
        self._owned, self.descriptor, self.size = owned, owned.fileno(), size
        self.memory = _map(self.descriptor, size)
        self.words = memoryview(self.memory).cast("B").cast("Q")
        self.octets = np.frombuffer(self.memory, np.uint8)
        self.identity = identity_of(self.descriptor)
        _mapped.setdefault(self.identity, self)

    @classmethod
    def create(cls, size: int = DEFAULT_SIZE) -> Segment:
        """Return a new one.

        Args:
            size: bytes of address space. Of a limit (``ulimit -v``) it takes half of what is left at most: the program needs
                the other, and children that map it may have less. Where other limits do not allow it, it is halved until
                they do.

        Raises:
            SharedMemoryError: there is no memfd here, no descriptor left, or not even ``MINIMUM_SIZE`` can be mapped.
        """
        left = addresses_left()
        if left is not None:
            size = min(size, max(MINIMUM_SIZE, left >> 21 << 20))
        while True:
            try:
                return cls._create(size)
            except SharedMemoryError as failed:
                if failed.errno not in (errno.ENOMEM, errno.EFBIG) or size // 2 < MINIMUM_SIZE:
                    raise
                size //= 2

    @classmethod
    def _create(cls, size: int) -> Segment:
        owned = _sealed_memfd(size)
        try:
            os.pwrite(owned.fileno(), HEAD.pack(MAGIC, VERSION, size), 0)
        except OSError as failed:
            raise _refused("could not be written to", size, failed) from failed
        return cls(owned, size)

    @classmethod
    def attach(cls, descriptor: int) -> Segment:
        """Return the segment that an open descriptor leads to. The descriptor is duplicated and stays with the caller.

        Raises:
            SharedMemoryError: it is no segment, is of another version, lacks a seal, or cannot be mapped.
        """
        size = os.fstat(descriptor).st_size
        return cls(owned(fcntl.fcntl, descriptor, fcntl.F_DUPFD_CLOEXEC, 0), size)

    @classmethod
    def known(cls, descriptor: int) -> Segment:
        """The same; where this process has it mapped already, that one.

        Raises:
            SharedMemoryError: as ``attach``.
        """
        return _mapped.get(identity_of(descriptor)) or cls.attach(descriptor)

    def resident(self) -> int:
        """Return bytes of memory that the segment costs the machine now, all processes together."""
        return os.fstat(self.descriptor).st_blocks * 512

    def punch(self, start: int, stop: int) -> bool:
        """Give back the memory of the whole pages within [start, stop). What is in them nobody may need.

        Returns:
            Whether they read as zeros now. False: somebody has locked pages of the segment, and all is as it was.
        """
        if self.words[PAGE_LOCKED]:  # a GPU would go on with the old pages
            return False
        start = -(-start // self.page) * self.page
        stop = stop // self.page * self.page
        if start < stop:
            try:
                self.memory.madvise(mmap.MADV_REMOVE, start, stop - start)
            except OSError:  # the process locks all its memory (mlockall)
                return self._punch_file(start, stop)
        return True

    def _punch_file(self, start: int, stop: int) -> bool:
        """Give back whole pages by the file, of which it does not matter how it is mapped. Whether that was done."""
        with contextlib.suppress(OSError):
            if identity_of(self.descriptor) == self.identity:
                return punch_hole(self.descriptor, start, stop)
        return False

    def reserve(self, start: int, stop: int) -> bool:
        """Have pages for [start, stop) before they are written. False: the machine has none."""
        try:
            os.posix_fallocate(self.descriptor, start, stop - start)
        except OSError as failed:
            return failed.errno not in (errno.ENOSPC, errno.ENOMEM)  # else it cannot be asked here: writing will do it
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return _rebuild, (reduction.DupFd(self.descriptor), self.size)

    def __repr__(self) -> str:
        return f"<Segment {self.size >> 20} MiB of addresses, {self.resident() >> 10} KiB resident>"


def read_head(descriptor: int) -> tuple[int, int]:
    """Size and capacity of the segment that a descriptor leads to; (0, 0) for what is none of this version. Maps nothing."""
    data = os.pread(descriptor, HEAD.size + 8, 0)
    if len(data) < HEAD.size + 8 or HEAD.unpack_from(data) != (MAGIC, VERSION, os.fstat(descriptor).st_size):
        return 0, 0
    return int(HEAD.unpack_from(data)[2]), int.from_bytes(data[HEAD.size :], sys.byteorder)


_mapped: weakref.WeakValueDictionary[tuple[int, int], Segment] = weakref.WeakValueDictionary()


def segment_at(address: int) -> Segment | None:
    """Return the segment of this process that an address of memory lies in."""
    for segment in list(_mapped.values()):
        if 0 <= address - segment.octets.ctypes.data < segment.size:
            return segment
    return None


def identity_of(descriptor: int) -> tuple[int, int]:
    """Return the identity of the file that a descriptor leads to.

    Raises:
        OSError: it leads to none.
    """
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _rebuild(duplicate: Any, size: int) -> Segment:
    """Return the segment as this process has it already, if it does: pickled twice, it is mapped once."""
    received = handed(duplicate)
    return _mapped.get(identity_of(received.fileno())) or Segment(received, size)


def _sealed_memfd(size: int) -> OwnedFd:
    try:
        made = owned(os.memfd_create, NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(made.fileno(), size)
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, _SEALS)
    except AttributeError as missing:
        raise SharedMemoryError(errno.ENOSYS, "this system has no memfd_create (it is Linux's)") from missing
    except OSError as failed:
        raise _refused("could not be created", size, failed) from failed
    return made


def _map(descriptor: int, size: int) -> mmap.mmap:
    _verify(descriptor, size)
    try:
        _refuse_if_filled()
        memory = _mapping(descriptor, size)
    except OSError as failed:
        raise _refused("could not be mapped", size, failed) from failed
    memory.madvise(mmap.MADV_DONTDUMP)  # a core file of a terabyte helps nobody
    found = HEAD.unpack_from(memory)
    if found != (MAGIC, VERSION, size):
        raise SharedMemoryError(
            errno.EINVAL, f"no segment of version {VERSION} and {size} bytes: magic, version, size are {found}"
        )
    return memory


def _mapping(descriptor: int, size: int) -> mmap.mmap:
    """Map the file, so that the mapping needs no descriptor: before 3.13 Python's ``mmap`` keeps one of the file it maps.

    Raises:
        OSError: the kernel refused.
    """
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | MAP_NORESERVE)
    except OSError:  # it counts all addresses as memory (vm.overcommit_memory=2), but not those of a file
        return mmap.mmap(descriptor, size)
    map_over(np.frombuffer(memory, np.uint8).ctypes.data, size, descriptor, 0, mmap.MAP_SHARED)
    return memory


def _refuse_if_filled() -> None:
    """See that what this process maps does not get all its pages at once: a segment would take all memory that there is.

    Raises:
        OSError: it does, by mlockall.
    """
    with owned(os.memfd_create, NAME, os.MFD_CLOEXEC) as probe:
        os.ftruncate(probe.fileno(), PAGE)
        mmap.mmap(probe.fileno(), PAGE).close()
        if os.fstat(probe.fileno()).st_blocks:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _verify(descriptor: int, size: int) -> None:
    """Check the rules that must hold before a byte is read: reading an unsealed file may end in SIGBUS at any time."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as failed:
        raise SharedMemoryError(errno.EINVAL, f"descriptor {descriptor} is not a memfd") from failed
    if seals & _SEALS != _SEALS:
        raise SharedMemoryError(errno.EINVAL, f"the memfd is not sealed against resizing (its seals: {seals:#x})")
    actual = os.fstat(descriptor).st_size
    if actual != size or size < MINIMUM_SIZE:
        raise SharedMemoryError(errno.EINVAL, f"the memfd has {actual} bytes, {max(size, MINIMUM_SIZE)} were expected")


_REMEDIES = {
    errno.EAGAIN: "have mlockall lock what is used (MCL_ONFAULT), and set no limit on that (ulimit -l)",
    errno.ENOMEM: "raise the limit on address space (ulimit -v) or vm.max_map_count",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the machine has no open file left (fs.file-max)",
}


def _refused(what: str, size: int, failed: OSError) -> SharedMemoryError:
    number = failed.errno or errno.EINVAL
    remedy = _REMEDIES.get(number, "see the cause")
    return SharedMemoryError(number, f"{size} bytes of shared memory {what}: {os.strerror(number)}; {remedy}")
