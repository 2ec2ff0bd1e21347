"""The other process of the queue tests: it sends back whatever comes. In a file of its own, for children to import."""

from __future__ import annotations

import subprocess
from typing import Any

import torch
import zoo  # noqa: F401 - registers the types that travel

LIMIT = 20  # seconds


def echo(there: Any, back: Any) -> None:
    """Send back whatever comes, until None comes."""
    torch.set_num_threads(1)
    while (obj := there.get(timeout=LIMIT)) is not None:
        back.put(obj)


def tell_what_a_program_has(_: Any, back: Any) -> None:
    """Send what the descriptors of a program lead to that this process runs."""
    listing = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], close_fds=False, check=True, text=True, stdout=subprocess.PIPE
    )
    back.put([line.rpartition(" -> ")[2] for line in listing.stdout.splitlines()])
