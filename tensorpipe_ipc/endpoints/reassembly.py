"""Reassembly: put a large message that comes in pieces together, in warm memory.

``BufferPool`` hands out memory for a message's large payloads, and gets it back when the last tensor on it is gone. That is a
lease, as of a block of shared memory, but of this process's own memory. Returned memory is handed out again, because fresh
memory costs more than the copy (``resend_buffer``).

The first piece announces the size. If the peer has brought as much before, memory that is ready is used at once. Else memory
is requested only when nearly all pieces have come; until then they wait in their frames. So no peer makes this process request
memory for what it does not send, nor keeps memory from others by a word.

A process with a limit on its addresses could not go on once ZeroMQ finds none for a frame: the connection would end, and the
producer would send again, for ever. The pieces need twice the message's size for a moment. So a message that exceeds the limit
in this way is *refused* at its first piece. The others are dropped as they come, and get reports it when the message is
complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tensorpipe_ipc.errors import OutOfMemory, ProtocolError, UnsupportedLeaf
from tensorpipe_ipc.headroom import addresses_left, headroom
from tensorpipe_ipc.libc import count_frames, trim_malloc
from tensorpipe_ipc.wire.header import Header, Piece
from tensorpipe_ipc.wire.layout import ALIGN, BULK
from tensorpipe_ipc.wire.room import LOOKED, made_with_room
from tensorpipe_ipc.wire.schema import schema_of

__all__ = ["Reassembly", "BufferPool"]

IDLE_AT_MOST = 1 << 28  # bytes that lie ready, nobody's; beyond them regions go back to the kernel
_UNIT = 1 << 15  # bytes; sizes are rounded up to it, so that messages of about one size use the same memory
_AHEAD = 1 << 13  # bytes that may be missing when memory for all is asked for
_TOGETHER = 1 << 20  # bytes of short pieces that wait as one
_SPARE = 1 << 25  # bytes of addresses that are left to the rest of the process
_AGAIN = 0.01  # seconds at least between two looks for idle memory that are due to no more than an announced size


class BufferPool:
    """Memory for messages that come in pieces."""

    def __init__(self, trim: Callable[[], int] = lambda: 0) -> None:
        """
        Args:
            trim: gives back idle memory that others have, and returns the number of bytes.
        """
        self._trim = trim
        self._idle: deque[Any] = deque()  # the last that came back is the first; any thread may bring one back
        self._is_closed = False
        self._gives_back_at = 0.0

    def see_room_for(self, nbytes: int) -> None:
        """See that a message may come that waits in its frames until memory for it is asked for: it takes twice as much then.

        Raises:
            ProtocolError: this machine does not have so much.
            OutOfMemory: this process may not have so much.
        """
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if nbytes > most:
            raise ProtocolError(f"a message with payloads of {nbytes:,} bytes, and this machine has {most:,}")
        made_with_room(self.give_back_at_times, _see_room_for, nbytes, 2)

    def ready(self, nbytes: int) -> memoryview | None:
        """So many bytes that were used before, if there are any. They are free again when nothing refers to them."""
        base = self._ready(_size(nbytes))
        if base is None:
            return None
        count_frames(nbytes)
        return _region_on(base, nbytes, self)

    def memory(self, nbytes: int) -> memoryview:
        """So many bytes, not initialised: such as are ready, else fresh ones.

        Raises:
            OutOfMemory: there is no such amount of memory.
        """
        ready = self.ready(nbytes)
        if ready is not None:
            return ready
        count_frames(nbytes)
        return _region_on(made_with_room(self.give_back_idle, _fresh, nbytes), nbytes, self)

    def give_back_at_times(self) -> int:
        """Give back what lies idle, in a fifth of the time at most: an announced size costs its sender nothing."""
        began = time.monotonic()
        if began < self._gives_back_at:
            return 0
        nbytes = self.give_back_idle()
        now = time.monotonic()
        self._gives_back_at = now + max(_AGAIN, 4 * (now - began))
        return nbytes

    def give_back_idle(self) -> int:
        """Give back what lies idle, here and with others, where memory is short. Return the number of bytes."""
        nbytes = self.drop_idle()
        if nbytes:
            trim_malloc()  # which may keep it else
        return nbytes + self._trim()

    def drop_idle(self) -> int:
        """Give back what lies idle here. Return the number of bytes."""
        nbytes = sum(map(len, self._idle.copy()))
        self._idle.clear()
        return nbytes

    def take_back(self, base: Any) -> None:
        """Keep memory that nothing refers to any more, for the next message."""
        self._idle.appendleft(base)
        with contextlib.suppress(IndexError):  # another thread has emptied it
            while sum(map(len, self._idle.copy())) > IDLE_AT_MOST:
                self._idle.pop()
        if self._is_closed:
            self._idle.clear()

    def close(self) -> None:
        """Give back what lies idle, and what comes back from now on."""
        self._is_closed = True
        self._idle.clear()

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
    """Memory that was handed out: it goes when the last view of it does.

    NumPy has a view refer to what an array is a view of, and not to the array, if that is an array too. So it is none.
    """

    whole: Any = None
    home: weakref.ref[BufferPool] | None = None

    def __del__(self) -> None:
        """Bring it back, as long as there is anybody who may use it again."""
        pool = None if self.home is None else self.home()
        if pool is not None:
            pool.take_back(self.whole)


class Reassembly:
    """The large payloads of one message, as far as they have come.

    Attributes:
        refused: why there is no memory for them, "" as long as there is.
        total: how many bytes they are.
        filled: how many have come, from the first on.
    """

    def __init__(self, sequence: int, first: Piece, buffers: BufferPool, largest: int = 0) -> None:
        """
        Args:
            sequence: the message's number.
            first: what one of its pieces says.
            buffers: where memory comes from.
            largest: bytes of the largest payloads that the peer has brought, of one message.

        Raises:
            ProtocolError: this machine does not have so much memory.
        """
        self.sequence, self.total = sequence, first.total
        self.refused = ""
        self._buffers = buffers
        self._region = buffers.ready(self.total) if self.total <= largest else None
        try:
            if self._region is None:
                buffers.see_room_for(self.total)
        except OutOfMemory as refused:
            self.refused = str(refused)
        self._waiting: list[memoryview | bytearray] = []  # what came, one after the other, before there was a region
        self.filled = 0
        self._is_torn = False  # whether an exception has left it unknown what of a piece is in its place

    @property
    def is_complete(self) -> bool:
        """Return whether all pieces have come: they lie in their memory, or are dropped as there is none for them."""
        return self.filled == self.total

    def add(self, said: Piece, piece: memoryview) -> bool:
        """Put a piece, or a part of one, in its place, once. False if one before it is missing.

        An exception of a signal's handler may come anywhere within: then the message is put together from its beginning.

        Raises:
            ProtocolError: it lies beyond what was announced.
        """
        offset, end = said.offset, said.offset + len(piece)
        if said.total != self.total or end > self.total:
            raise ProtocolError(f"a piece of bytes {offset} to {end} of {said.total}, in {self.total} announced")
        if self._is_torn:
            self.filled, self._waiting = 0, []
        if offset > self.filled:
            return False
        if end > self.filled:
            self._is_torn = True
            try:
                new = piece[self.filled - offset :]  # a view keeps all of the piece: each may repeat all before it
                self._put(new if offset == self.filled else memoryview(bytes(new)), end)
            except OutOfMemory as refused:
                self.refused, self._waiting = str(refused), []
            self.filled = end
            self._is_torn = False
        return True

    def _put(self, piece: memoryview, end: int) -> None:
        if self.refused:
            return
        if self._region is None and end + _AHEAD >= self.total:
            self._region = self._buffers.memory(self.total)
            at = 0
            for waiting in self._waiting:
                at = _place(waiting, self._region, at)
            self._waiting = []
        if self._region is None:
            self._wait(piece)
        else:
            _place(piece, self._region, self.filled)

    def _wait(self, piece: memoryview) -> None:
        """Keep a piece for later. Short ones are put together: each costs some hundred bytes beside its own."""
        last = self._waiting[-1] if self._waiting else None
        if len(piece) >= BULK:
            self._waiting.append(piece)
        elif isinstance(last, bytearray) and len(last) < _TOGETHER:
            last.extend(piece)
        else:
            self._waiting.append(bytearray(piece))

    def completed(self, header: Header, frames: list[Any]) -> tuple[Header, list[Any]]:
        """Return the message whose header has come, with the frames that came in pieces; without, where any is missing."""
        if header.sequence != self.sequence or len(frames) > 1 or self._region is None or not self.is_complete:
            return header, frames
        try:
            schema = schema_of(header.schema)
            sizes = schema.frame_sizes()[bool(header.packed) :]
        except (ProtocolError, UnsupportedLeaf):  # whoever decodes the message finds it again
            return header, frames
        places, end = [], 0
        for size in sizes:
            start = -(-end // ALIGN) * ALIGN
            end = start + size
            places.append((start, end))
        if end != self.total:
            return header, frames
        return header, frames + [self._region[start:end] for start, end in places]


def _region_on(base: Any, nbytes: int, home: BufferPool) -> memoryview:
    region = _Region((nbytes,), np.uint8, base, -ctypes.addressof(base) % ALIGN)
    region.whole, region.home = base, weakref.ref(home)
    return memoryview(region)


def _refused(nbytes: int, why: str) -> str:
    return (
        f"a message with payloads of {nbytes:,} bytes, which takes twice as much while it comes: {why}; "
        "raise the limit, or send less at once. It was dropped"
    )


def _see_room_for(nbytes: int, times: int) -> None:
    """See that there is room for so many bytes, so many times."""
    room, addresses = times * nbytes, addresses_left()
    if addresses is not None and room + _SPARE > addresses:
        raise OutOfMemory(_refused(nbytes, f"{addresses:,} bytes are left of this process's limit (ulimit -v)"))
    if room >= LOOKED and room > (left := headroom()):
        raise OutOfMemory(_refused(nbytes, f"{left:,} bytes of memory are left"))


def _fresh(nbytes: int) -> Any:
    _see_room_for(nbytes, 1)
    try:
        return (ctypes.c_char * _size(nbytes)).from_buffer(np.empty(_size(nbytes), np.uint8).data)
    except (MemoryError, ValueError, OverflowError) as error:
        raise OutOfMemory(_refused(nbytes, f"there is no memory: {error}")) from None


def _size(nbytes: int) -> int:
    return -(-nbytes // _UNIT) * _UNIT + ALIGN


def _place(piece: memoryview | bytearray, region: memoryview, start: int) -> int:
    """Copy a piece to its place. Return where it ends. By NumPy: a memoryview's own copy is slow where formats differ."""
    end = start + len(piece)
    np.frombuffer(region, np.uint8)[start:end] = np.frombuffer(piece, np.uint8)
    return end
