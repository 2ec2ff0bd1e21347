"""Pages of a segment that a forked child has as its own: nobody else sees what it writes there.

A private mapping (mmap(2), MAP_PRIVATE) over the same addresses: so the tensors that the child inherited lie on it, and
nothing is copied before it is written. Until the child writes a page, it sees there what its parent writes. Once no tensor of
the child lies there any more, the pages are the segment's again.
"""

from __future__ import annotations

import contextlib
import mmap
import warnings
from collections.abc import Iterable

from tensorpipe_ipc.libc import map_over
from tensorpipe_ipc.memory.segment import Segment, identity_of

__all__ = ["set_apart", "set_together"]


def set_apart(segment: Segment, runs: Iterable[tuple[int, int]], descriptor: int = -1) -> bool:
    """Make runs of a segment's bytes private to this process. Whole pages become private: nothing else may lie on them.

    Args:
        runs: the offset and the number of bytes of each run.
        descriptor: the segment's descriptor to map by; -1: any. A lock taken through it lasts as long as the mapping.

    Returns:
        Whether there were any pages, and all of them were mapped.
    """
    pages = _pages(runs)
    base, refused = segment.octets.ctypes.data, ""
    by = descriptor if descriptor >= 0 else segment.descriptor
    for start, stop in pages:
        try:
            map_over(base + start, stop - start, by, start, mmap.MAP_PRIVATE)
        except OSError as failed:
            refused = str(failed.strerror)
    if refused:
        warnings.warn(
            "this forked process has no pages of its own for some tensors in shared memory that its parent received or made, "
            f"so what it writes there may reach its parent: {refused} (raise vm.max_map_count, or fork with fewer "
            "of them alive)",
            RuntimeWarning,
            stacklevel=2,
        )
    return bool(pages) and not refused


def set_together(segment: Segment, start: int, nbytes: int, identity: tuple[int, int]) -> None:
    """Map a run of bytes that was set apart shared again. No tensor of this process may lie on its pages.

    Args:
        identity: the identity of the segment's file. If this process has closed its descriptor, the number may belong to
            another file: then the pages stay private.
    """
    with contextlib.suppress(OSError):
        if identity_of(segment.descriptor) == identity:
            ((first, stop),) = _pages([(start, nbytes)])
            map_over(segment.octets.ctypes.data + first, stop - first, segment.descriptor, first, mmap.MAP_SHARED)


def _pages(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the whole pages that runs touch, with adjacent pages joined."""
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted(runs):
        first, stop = start & -mmap.PAGESIZE, -(-(start + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return found
