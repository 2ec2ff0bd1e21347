"""Assembly: a large message that comes in pieces is put together in memory that is warm.

``Regions`` hands out memory for a message's large payloads, and has it back when the last tensor on it is gone: a lease, as
of a block of shared memory, but of this process's own. What comes back is handed out again, for fresh memory costs more
than the copy (``unacknowledged``).
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import numpy as np

from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.wire.header import Header, piece_of
from tensorpipe_ipc.wire.layout import ALIGN
from tensorpipe_ipc.wire.schema import schema_of

__all__ = ["Assembly", "Regions"]

_IDLE_AT_MOST = 1 << 28  # bytes that lie ready, nobody's
_UNIT = 1 << 20  # bytes; sizes are rounded up to it, so that messages of about one size use the same memory
_LEARN = (32 << 20) - (1 << 16)  # bytes; glibc's largest threshold is 32 MB


class Regions:
    """Memory for messages that come in pieces."""

    def __init__(self) -> None:
        self._idle: deque[Any] = deque()  # the last that came back is the first; any thread may bring one back
        self._has_begun = False

    def take(self, nbytes: int) -> memoryview:
        """So many bytes, not initialised. They are free again when nothing refers to what is returned.

        Raises:
            ProtocolError: there is no such amount of memory. It is not touched before it is written to.
        """
        if not self._has_begun:
            self._has_begun = True
            _teach_malloc()
        size = -(-nbytes // _UNIT) * _UNIT + ALIGN
        base = self._ready(size)
        if base is None:
            try:
                base = (ctypes.c_char * size).from_buffer(np.empty(size, np.uint8).data)
            except (MemoryError, ValueError, OverflowError) as error:
                raise ProtocolError(f"a message with payloads of {nbytes:,} bytes: {error}") from None
        region = _Region((nbytes,), np.uint8, base, -ctypes.addressof(base) % ALIGN)
        region.whole, region.home = base, self._idle
        return memoryview(region)

    def _ready(self, size: int) -> Any:
        for _ in range(len(self._idle)):
            try:
                base = self._idle.popleft()
            except IndexError:
                return None
            if len(base) == size:
                return base
            self._idle.append(base)
        return None


class _Region(np.ndarray):
    """What was handed out: it goes when the last view of it does.

    NumPy has a view refer to what an array is a view of, and not to the array, if that is an array too. So it is none.
    """

    whole: Any = None
    home: deque[Any] | None = None

    def __del__(self) -> None:
        """See Regions: it comes back."""
        if self.home is not None:
            self.home.appendleft(self.whole)
            while sum(map(len, self.home.copy())) > _IDLE_AT_MOST:
                self.home.pop()


class Assembly:
    """The large payloads of one message, as far as they have come."""

    def __init__(self, sequence: int, region: memoryview) -> None:
        self.sequence = sequence
        self._region = region
        self._array = np.frombuffer(region, np.uint8)
        self._filled = 0

    def add(self, header: Header, piece: memoryview) -> bool:
        """Put a piece in its place, once. False if one before it is missing.

        Raises:
            ProtocolError: it lies beyond what was announced.
        """
        offset, total = piece_of(header)
        end = offset + len(piece)
        if total != len(self._region) or end > total:
            raise ProtocolError(f"a piece of bytes {offset} to {end} of {total}, in {len(self._region)} announced")
        if offset > self._filled:
            return False
        if end > self._filled:
            self._array[offset:end] = np.frombuffer(piece, np.uint8)
            self._filled = end
        return True

    def completed(self, header: Header, frames: list[Any]) -> list[Any]:
        """The frames of the message whose header has come, with those that came in pieces; without, where any is missing."""
        if header.sequence != self.sequence or len(frames) > 1:
            return frames
        try:
            sizes = schema_of(header.schema).frame_sizes()[bool(header.packed) :]
        except ProtocolError:  # whoever decodes the message finds it again
            return frames
        found, end = [], 0
        for size in sizes:
            start = -(-end // ALIGN) * ALIGN
            end = start + size
            found.append(self._region[start:end])
        return frames + found if end == self._filled == len(self._region) else frames


def _teach_malloc() -> None:
    """Have malloc keep the memory of ZeroMQ's frames, which it would give back to the kernel each time.

    glibc learns from what is freed: once a block of 32 MB was, blocks of up to that size are no longer mapped one by one. A
    program with tensors has taught it that anyway, sooner or later. The block is not touched.
    """
    del bytearray(_LEARN)[:]
