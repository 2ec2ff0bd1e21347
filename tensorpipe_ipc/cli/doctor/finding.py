"""Finding: one line of what the doctor says."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Finding", "State"]


class State(enum.Enum):
    """The mark of a finding."""

    OK = "ok"
    NOTE = "--"  # neither good nor bad
    NO = "NO"  # it prevents shared memory


class Finding(NamedTuple):
    """One thing that was checked, and the result."""

    what: str
    state: State
    text: str
