"""Finding: one line of what the doctor says."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Finding", "State"]


class State(enum.Enum):
    """How it is marked."""

    OK = "ok"
    NOTE = "--"  # neither good nor bad
    NO = "NO"  # in the way of shared memory


class Finding(NamedTuple):
    """What was looked at, and what was seen."""

    what: str
    state: State
    text: str
