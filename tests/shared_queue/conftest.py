"""Fixtures of the shared-memory tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from crash_points import raise_interrupt

from tensorpipe_ipc.memory.arena import Arena
from tensorpipe_ipc.memory.segment import Segment
from tensorpipe_ipc.shared_queue.attachment import Attachment

SMALL = 1 << 32


class Bytes:
    """A payload of given bytes."""

    def __init__(self, content: Any) -> None:
        self.content, self.nbytes = content, len(content)

    def write_into(self, place: Any) -> None:
        place[:] = self.content


@pytest.fixture
def attachment() -> Iterator[Any]:
    made = Attachment(Arena(Segment.create(SMALL), capacity=64 << 20))
    made.attach()
    yield made
    vars(made).clear()  # pytest still refers to it when nothing_left_behind looks


@pytest.fixture
def handler() -> Iterator[Any]:
    """It is one, so what it raises says nothing of the message that it interrupts. It is called where a signal might come."""
    before = signal.signal(signal.SIGUSR2, raise_interrupt)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def payload() -> Any:
    return Bytes
