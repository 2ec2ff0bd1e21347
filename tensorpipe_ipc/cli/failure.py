"""Failure: what ends a command with a sentence instead of a traceback."""

from __future__ import annotations

__all__ = ["Failure"]


class Failure(Exception):
    """A command cannot do what it was asked to. Its text is all that the user needs to see."""
