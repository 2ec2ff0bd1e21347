"""Room: whether there is memory for the copies that a message takes. A full cgroup kills, it does not refuse.

So the memory that is left is looked up before a large copy is made. What is idle must not be why there is too little of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tensorpipe_ipc.errors import OutOfMemory
from tensorpipe_ipc.headroom import addresses_left, headroom

__all__ = ["COPIED", "GATHERED", "made_with_room", "see_room_to_take"]

# Bytes of a copy for which it is looked whether there is memory. A look takes 60 us.
COPIED = 1 << 24
GATHERED = 1 << 22  # of tensors that put gathers, taken together
_unlooked = (
    0  # bytes that get copied since the last look; another thread's addition may be lost: then it is a little later
)
_SPARE = 1 << 25  # bytes of addresses (``ulimit -v``) that are left to the rest of the process
_Made = TypeVar("_Made")


def see_room_to_take(nbytes: int, give_back: Callable[[], object] = lambda: None) -> None:
    """See that there is memory for a copy of what is taken.

    Args:
        give_back: gives back idle memory.

    Raises:
        OutOfMemory: there is not.
    """
    global _unlooked
    _unlooked += nbytes
    if _unlooked < COPIED:
        return
    needed = nbytes + (COPIED if nbytes < COPIED else 0)  # until the next look
    if needed > _left():
        give_back()
        if needed > (left := _left()):
            raise _no_room(nbytes, left)
    _unlooked = 0


def _no_room(nbytes: int, left: int) -> OutOfMemory:
    return OutOfMemory(
        f"a message is copied to be taken, in {nbytes:,} bytes: {left:,} bytes of memory are left; let go of memory. "
        "A lease (copy=False), or floats as they crossed (restore=False), take none"
    )


def _left() -> int:
    addresses = addresses_left()
    return headroom() if addresses is None else max(0, min(headroom(), addresses - _SPARE))


def made_with_room(give_back: Callable[[], int], make: Callable[..., _Made], *arguments: Any) -> _Made:
    """Return ``make(*arguments)``. Where there is no memory for it, try once more when idle memory was given back.

    Args:
        give_back: gives back idle memory, and returns the number of bytes.

    Raises:
        OutOfMemory: none was idle, or it is not enough. No frame refers to the error, so it keeps the arguments no longer than
            its owner does.
    """
    try:
        return make(*arguments)
    except OutOfMemory:
        if not give_back():
            raise
    return make(*arguments)
