"""The other process of the queue tests: it sends back whatever comes. In a file of its own, for children to import."""

from __future__ import annotations

from typing import Any

import torch
import zoo  # noqa: F401 - registers the types that travel

LIMIT = 20  # seconds


def echo(there: Any, back: Any) -> None:
    """Send back whatever comes, until None comes."""
    torch.set_num_threads(1)
    while (obj := there.get(timeout=LIMIT)) is not None:
        back.put(obj)
