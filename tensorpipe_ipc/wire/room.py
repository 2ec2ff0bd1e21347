"""Room: whether there is memory for the copies that messages take. A full cgroup kills, it does not refuse.

So what put gathers and get copies is counted. The memory that is left is looked up before the first copy, then once for each
16 MiB of them, or a sixteenth of what is left, and where the last look is over 100 ms ago. Idle memory must not be why there
is too little.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from tensorpipe_ipc.errors import OutOfMemory
from tensorpipe_ipc.headroom import OUTDATED, addresses_left, headroom, until_the_next_look

__all__ = ["LOOKED", "lacks_memory", "lacks_room", "made_with_room", "see_room_to_take"]

LOOKED = 1 << 24  # bytes that are copied between two looks, at most. A look takes 60 us
_SPARE = 1 << 25  # bytes of addresses (``ulimit -v``) that are left to the rest of the process
# Bytes copied since the last look. Another thread's addition may be lost: the next look comes a little later.
_unlooked, _looked = LOOKED, 0.0
_Made = TypeVar("_Made")


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that there is no memory. Torch's own are RuntimeErrors, of a GPU and of the CPU."""
    is_cpus = type(error) is RuntimeError and any(each in str(error) for each in ("can't allocate memory", "bad_alloc"))
    return is_cpus or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def lacks_room(nbytes: int, *, of_addresses: bool = False) -> int | None:
    """Count a copy that is about to be made. Where a look is due, and there is no room for it, return how many bytes are left.

    Args:
        of_addresses: whether addresses (``ulimit -v``) count, too: where the copy itself says nothing of a lack of them.

    Returns:
        None: there is room, as far as is known.
    """
    global _unlooked, _looked
    _unlooked += nbytes
    if _unlooked < LOOKED and monotonic() < _looked + OUTDATED:
        return None
    addresses = addresses_left() if of_addresses else None
    left = headroom()
    if addresses is not None:
        left = min(left, max(0, addresses - (_SPARE if nbytes >= LOOKED else 0)))
    if nbytes + (nbytes >> 9) > left:  # the page tables of the copy count, too
        return left
    _unlooked, _looked = LOOKED - until_the_next_look(left - nbytes, LOOKED), monotonic()
    return None


def see_room_to_take(nbytes: int, give_back: Callable[[], object] = lambda: None) -> None:
    """See that there is memory for a copy of what is taken.

    Args:
        give_back: gives back idle memory.

    Raises:
        OutOfMemory: there is not.
    """
    if lacks_room(nbytes, of_addresses=True) is None:
        return
    give_back()
    left = lacks_room(nbytes, of_addresses=True)
    if left is not None:
        raise OutOfMemory(
            f"a message is copied to be taken, in {nbytes:,} bytes: {left:,} bytes of memory are left; let go of memory. "
            "Floats as they crossed (restore=False) take none; nor does, from shared memory, a lease (copy=False), unless more "
            "memory is in use than the capacity"
        )


def made_with_room(give_back: Callable[[], int], make: Callable[..., _Made], *arguments: object) -> _Made:
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
