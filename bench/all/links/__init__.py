"""The peers that ``bench.queue.rivals`` does not have, one file per foreign thing, behind the same few methods."""

from __future__ import annotations

import os
import tempfile
from itertools import count
from typing import NamedTuple

__all__ = ["Shape", "address"]

_numbers = count()


class Shape(NamedTuple):
    """The task that a peer is made for: how many messages may be on their way, of how many bytes at most, and between whom."""

    bound: int
    nbytes: int
    senders: int = 1
    receivers: int = 1


def address() -> str:
    """The path of a socket or a file of its own, in a folder that goes with the peer's processes."""
    return f"{tempfile.gettempdir()}/link-{os.getpid()}-{next(_numbers)}"
