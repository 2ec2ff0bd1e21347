"""Pages of a segment that a forked child has as its own: nobody else sees what it writes there.

A private mapping (mmap(2), MAP_PRIVATE) over the same addresses: so the tensors that the child inherited lie on it, and
nothing is copied before it is written. Until the child writes a page, it sees there what its parent writes. Once no tensor of
the child lies there any more, the pages are the segment's again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import warnings
from collections.abc import Iterable

from tensorpipe_ipc.libc import libc
from tensorpipe_ipc.memory.segment import Segment, identity_of

__all__ = ["set_apart", "set_together"]

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux's, of every machine but a few (alpha, mips, parisc)
_FAILED = ctypes.c_void_p(-1).value


def set_apart(segment: Segment, runs: Iterable[tuple[int, int]], descriptor: int = -1) -> bool:
    """Make runs of bytes of a segment this process's own. All pages that they touch are, so nothing else may lie there.

    Args:
        runs: where in the segment each begins, and its bytes.
        descriptor: of the segment, to map them by: what is locked through it stays so as long as they are mapped. -1: any.

    Returns:
        Whether any was mapped, and all were.
    """
    pages = _pages(runs)
    base, refused = segment.octets.ctypes.data, 0
    by = descriptor if descriptor >= 0 else segment.descriptor
    own = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    for start, stop in pages:
        made = _mmap()(base + start, stop - start, mmap.PROT_READ | mmap.PROT_WRITE, own, by, start)
        if made == _FAILED:
            refused = ctypes.get_errno()
    if refused:
        warnings.warn(
            "this forked process has no pages of its own for some tensors in shared memory that its parent received or made, "
            f"so what it writes there may reach its parent: {os.strerror(refused)} (raise vm.max_map_count, or fork with fewer "
            "of them alive)",
            RuntimeWarning,
            stacklevel=2,
        )
    return bool(pages) and not refused


def set_together(segment: Segment, start: int, nbytes: int, identity: tuple[int, int]) -> None:
    """Make a run of bytes that was set apart the segment's again. No tensor of this process may lie on its pages.

    Args:
        identity: of the segment's file. A process that has closed its descriptor keeps the pages as they are: their number
            may be another file's by now.
    """
    with contextlib.suppress(OSError):
        if identity_of(segment.descriptor) == identity:
            ((first, stop),) = _pages([(start, nbytes)])
            shared = mmap.MAP_SHARED | _MAP_FIXED | _MAP_NORESERVE
            address, access = segment.octets.ctypes.data + first, mmap.PROT_READ | mmap.PROT_WRITE
            _mmap()(address, stop - first, access, shared, segment.descriptor, first)


def _pages(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The whole pages that runs touch, joined where they follow each other."""
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted(runs):
        first, stop = start & -mmap.PAGESIZE, -(-(start + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return found


@functools.cache
def _mmap() -> ctypes._NamedFuncPointer:
    function = libc().mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return function
