"""Unacknowledged: what a producer sent over tcp, kept until its consumer is known to have taken it.

A connection that breaks swallows what was on its way, and tells nobody how much that was. So a message is copied once, into
memory of this end's own, sent from there without another copy, and kept until the consumer's credit for it is here. By the
next connection what is kept goes out again, and the consumer drops what it has.

Large payloads are laid one after the other and cut into pieces. Each is a message of its own: on the sender's side it
leaves while the next is still being copied, on the receiver's it is put in its place while the next still comes, and
neither side has more than a few pieces of fresh memory to touch. Fresh memory is what costs: the kernel's zeroes for 100 MB
take twice as long as the copy. So the pieces' own memory is used again, the last first.

What is narrowed (``wire_dtype``) is cast into this memory piece by piece, while those before it are on their way already.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tensorpipe_ipc.headroom import addresses_left, headroom
from tensorpipe_ipc.libc import private_memory
from tensorpipe_ipc.wire.header import Kind, Piece, pack, pack_piece
from tensorpipe_ipc.wire.layout import ALIGN, BULK, LazyPayload
from tensorpipe_ipc.wire.message import EncodedMessage
from tensorpipe_ipc.wire.room import lacks_room

__all__ = ["KEPT_AT_MOST", "PIECE", "SentMessage", "ResendBuffer"]

PIECE = 1 << 20  # bytes, a multiple of ALIGN; and of a block of memory
KEPT_AT_MOST = 1 << 28  # bytes of messages towards all consumers together; one message may always be kept
_SPARE = 1 << 23  # bytes of addresses that are left to the rest of the process: libzmq ends it when it gets none


class SentMessage:
    """One message that was sent, or whose sending was cut short: then it is sent as one that was given up.

    Attributes:
        sequence: its number.
        sent_at: when its sending began, by time.monotonic().
        parts: what it is sent as, one after the other; each a list of frames.
        nbytes: that are kept of it.
        blocks: the memory that the parts are views of.
        lent: pyzmq's trackers of what ZeroMQ was lent of it.
        is_whole: whether all its parts are there, or it was given up. Else an exception has cut that short.
        weight: bytes that ZeroMQ may hold as long as it has all that it was lent: of this message, and of those before it.
    """

    __slots__ = ("blocks", "is_whole", "lent", "nbytes", "parts", "sent_at", "sequence", "weight")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.sent_at = time.monotonic()
        self.parts: list[list[Any]] = []
        self.nbytes = 0
        self.blocks: list[Any] = []
        self.lent: list[Any] = []
        self.weight = 0
        self.is_whole = False

    def has_left(self) -> bool:
        """Return whether ZeroMQ has let go of it, and so the kernel has it, or the connection has ended."""
        return all(tracker.done for tracker in self.lent)

    def left_behind(self) -> float:
        """Return how many bytes ZeroMQ may still hold."""
        return self.weight * sum(not tracker.done for tracker in self.lent) / max(1, len(self.lent))

    def given_up(self) -> list[Any]:
        """Return what says that there is no message of its number: the last frame is empty, as no payload frame is."""
        return [pack(Kind.DATA, self.sequence), b""]


class ResendBuffer:
    """The memory that one producer's messages are kept in.

    Attributes:
        nbytes: that are kept; or more, where an exception of a signal's handler hit.
        carried: bytes that were kept, ever.
    """

    def __init__(self) -> None:
        self.nbytes = self.carried = 0
        self._free = defaultdict[int, list[Any]](list)  # blocks to use again, by their bytes
        self._resting: deque[SentMessage] = deque()  # taken; ZeroMQ's thread may not have let go of them yet
        self._idle = 0  # bytes of blocks that are free, or rest

    def has_room(self, nbytes: int) -> bool:
        """Return whether a message of ``nbytes`` may be kept besides those that are."""
        return not self.nbytes or self.nbytes + nbytes <= KEPT_AT_MOST

    def check(self, message: EncodedMessage) -> None:
        """See that a single message may be copied. What is expanded and narrowed on its way may be of any size.

        Raises:
            OutOfMemory: there is no memory for it.
        """
        nbytes = message.size
        if lacks_room(nbytes) is None:
            return
        self.drop_idle()  # it must not be why
        left = headroom() + self.nbytes * (nbytes > KEPT_AT_MOST)  # then it waits for all that is kept
        if nbytes > left:
            raise message.no_memory(f"{left:,} bytes of memory are left")

    def drop_idle(self) -> int:
        """Give back what is kept ready for further messages. Return the number of bytes."""
        nbytes = self._idle
        self._free.clear()
        while self._resting:
            self._resting.popleft().blocks = []  # a peer that may not have read it has it on its list
        self._idle = 0
        return nbytes

    def why_full(self) -> str:
        """Return why there is no room."""
        return f"{self.nbytes:,} bytes are kept until they are taken, and the limit is {KEPT_AT_MOST:,}"

    def keep(self, kept: SentMessage, message: EncodedMessage) -> Iterator[list[Any]]:
        """Have memory for a message, and return its parts. Each is copied when it is asked for, and to be sent before the next
        is. The last one completes it.

        Raises:
            OutOfMemory: there is none.
        """
        first, large = message.parts(kept.sequence)
        sources = [_Source(payload) for payload in large]
        total = _total(sources)
        if large:
            try:
                kept.blocks = self._blocks(total)
            except MemoryError as error:
                raise message.no_memory(f"there is no memory for it: {error}") from None
        kept.nbytes = message.size
        self.nbytes += kept.nbytes
        self.carried += kept.nbytes
        if not large:
            kept.parts.append([first])
            return iter(kept.parts)
        return _pieces(kept, first, sources, total) if total > PIECE else _whole(kept, first, sources)

    def give_up(self, kept: SentMessage) -> None:
        """Keep nothing of a message but its number."""
        kept.parts = [kept.given_up()]  # first: from here on there is no call
        self.nbytes -= kept.nbytes
        kept.nbytes, kept.blocks, kept.lent = 0, [], []  # ZeroMQ may still read them, and keeps them as long

    def let_go(self, kept: SentMessage) -> None:
        """A message was taken, or nobody is left to take it."""
        self.nbytes -= kept.nbytes
        kept.nbytes, kept.parts = 0, []
        if kept.blocks:
            self._resting.append(kept)
            self._idle += len(kept.blocks) * len(kept.blocks[0])
            if self._idle > KEPT_AT_MOST:  # of other sizes, or nothing is put that needs it
                self.drop_idle()

    def _blocks(self, total: int) -> list[Any]:
        """Return memory for so many bytes."""
        size = min(PIECE, -(-total // BULK) * BULK)
        return [self._block(size) for _ in range(-(-total // PIECE))]

    def _block(self, size: int) -> Any:
        self._free_rested(size)
        if self._free[size]:
            self._idle -= size
            return self._free[size].pop()
        try:
            return _fresh(size)
        except MemoryError:
            self.drop_idle()
            return _fresh(size)

    def _free_rested(self, size: int) -> None:
        """Free what ZeroMQ has let go of, until there is a block of that size."""
        for _ in range(len(self._resting)):  # one that a peer does not read must not keep what others have read
            if self._free[size]:
                break
            taken = self._resting.popleft()
            if taken.has_left():
                self._free[len(taken.blocks[0])] += reversed(taken.blocks)
                taken.blocks = []  # a peer that has left may keep it
            else:
                self._resting.append(taken)


class _Source:
    """A large payload, wherever it is read or made.

    Attributes:
        nbytes: of it.
    """

    __slots__ = ("_octets", "_written", "nbytes")

    def __init__(self, payload: Any) -> None:
        self._written = payload if isinstance(payload, LazyPayload) else None
        self._octets = np.frombuffer(payload, np.uint8) if self._written is None else None
        self.nbytes = len(payload)

    def write(self, place: memoryview, start: int) -> None:
        """Write as much of it as the place takes, from byte ``start`` on."""
        if self._octets is None:
            assert self._written is not None
            self._written.write_part(place, start)
        else:
            np.frombuffer(place, np.uint8)[:] = self._octets[start : start + len(place)]

    def sent(self, place: memoryview, start: int) -> None:
        """See ``LazyPayload.sent``."""
        if self._written is not None:
            self._written.sent(place, start)


def _fresh(size: int) -> Any:
    left = addresses_left()
    if left is not None and left < size + _SPARE:
        raise MemoryError(f"{left:,} bytes are left of this process's limit (ulimit -v)")
    return np.frombuffer(private_memory(size), np.uint8)


def _total(large: list[_Source]) -> int:
    """Return the bytes that they take, one after the other."""
    total = 0
    for source in large:
        total = -(-total // ALIGN) * ALIGN + source.nbytes
    return total


def _whole(kept: SentMessage, first: bytes, large: list[_Source]) -> Iterator[list[Any]]:
    frames, filled = list[memoryview](), 0
    for source in large:
        frames.append(memoryview(kept.blocks[0])[filled : filled + source.nbytes])
        source.write(frames[-1], 0)
        filled += -(-source.nbytes // ALIGN) * ALIGN
    kept.parts.append([first, *frames])
    yield kept.parts[-1]
    for source, frame in zip(large, frames, strict=True):
        source.sent(frame, 0)


def _pieces(kept: SentMessage, first: bytes, large: list[_Source], total: int) -> Iterator[list[Any]]:
    sent = 0
    for fills, nbytes in _fills(large):
        start = sent % PIECE
        frame = memoryview(kept.blocks[sent // PIECE])[start : start + nbytes]
        end = 0
        for at, source, begin, size in fills:
            frame[end:at] = bytes(at - end)  # what lay there was another consumer's
            source.write(frame[at : at + size], begin)
            end = at + size
        frame[end:] = bytes(nbytes - end)
        kept.parts.append([pack_piece(kept.sequence, Piece(sent, total)), frame])
        yield kept.parts[-1]
        for at, source, begin, size in fills:
            source.sent(frame[at : at + size], begin)
        sent += nbytes
    kept.parts.append([first])
    yield kept.parts[-1]


class _Fill(NamedTuple):
    """The source that a part of a piece is filled from."""

    at: int  # where in the piece
    source: _Source
    start: int  # where in the source
    nbytes: int


def _fills(large: list[_Source]) -> Iterator[tuple[list[_Fill], int]]:
    """Return what each piece is filled with, and its bytes, ``PIECE`` at most."""
    fills, filled = list[_Fill](), 0
    for source in large:
        filled += -filled % ALIGN
        start = 0
        while start < source.nbytes:
            if filled == PIECE:
                yield fills, filled
                fills, filled = [], 0
            count = min(PIECE - filled, source.nbytes - start)
            fills.append(_Fill(filled, source, start, count))
            filled, start = filled + count, start + count
    yield fills, filled
