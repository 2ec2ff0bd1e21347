"""libc: C's own library, for the system calls that Python has no function for."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

__all__ = [
    "MAP_NORESERVE",
    "count_frames",
    "libc",
    "map_over",
    "private_memory",
    "punch_hole",
    "quick_libc",
    "trim_malloc",
]

_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # Linux's, of every machine but a few (alpha, mips, parisc)
_FAILED = ctypes.c_void_p(-1).value
_LEARN = (32 << 20) - (1 << 16)  # bytes; glibc's largest threshold is 32 MB
_came = 0  # bytes that were counted


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the library. Whoever sets the types of a function's arguments there sets them for all."""
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def quick_libc() -> ctypes.CDLL:
    """Return the library for calls that never wait. They keep the GIL: else each waits for whoever computes in Python."""
    return ctypes.PyDLL(None, use_errno=True)


def punch_hole(descriptor: int, start: int, stop: int) -> bool:
    """Give back the memory of a file's bytes in [start, stop), which then read as zeros. Return whether that was done."""
    return int(libc().fallocate(descriptor, _PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(stop - start))) == 0


def count_frames(nbytes: int) -> None:
    """Count what came in large frames. From 32 MB on, have malloc keep their memory, which it would give back each time.

    glibc learns from what is freed: once a block of 32 MB was, blocks of up to that size are no longer mapped one by one. A
    program with tensors has taught it that anyway, sooner or later. The block is not touched.
    """
    global _came
    before, _came = _came, _came + nbytes  # first: where there is no memory for the block, that is tried once
    if before < _LEARN <= _came:
        malloc, free = libc().malloc, libc().free
        malloc.argtypes, malloc.restype, free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
        free(malloc(_LEARN))  # also of none: there may be no memory for it


def trim_malloc() -> None:
    """Have malloc give back what it keeps of what was let go, in all of this process. Some C libraries keep it."""
    trim = getattr(libc(), "malloc_trim", None)  # glibc's only
    if trim is not None:
        trim(0)


def private_memory(nbytes: int) -> mmap.mmap:
    """Return zeroed memory with a mapping of its own. malloc would keep the addresses of what is let go.

    Raises:
        MemoryError: there is none.
    """
    try:
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(error.strerror) from None


def map_over(address: int, nbytes: int, descriptor: int, offset: int, flags: int) -> None:
    """Map a file's bytes from ``offset`` on, to read and to write, in the place of the whole pages at an address.

    Args:
        flags: ``mmap.MAP_SHARED`` or ``mmap.MAP_PRIVATE``.

    Raises:
        OSError: the kernel refused, and all is as it was.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap()(address, nbytes, access, flags | _MAP_FIXED | MAP_NORESERVE, descriptor, offset) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@functools.cache
def _mmap() -> ctypes._NamedFuncPointer:
    function = libc().mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return function
