"""The layout of payloads: in frames, small ones together and large ones each in its own, or all in one block.

Small is what has fewer than ``BULK`` bytes. In what they share, payloads begin at multiples of ``ALIGN``; empty ones lie
nowhere. A block is the frames one after another, each at a multiple of ``ALIGN``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = [
    "ALIGN",
    "BULK",
    "LEASE_FROM",
    "Block",
    "KeptBytes",
    "LazyPayload",
    "kept",
    "layout",
    "overlaps",
    "places_of",
]

BULK = 1 << 16  # as pyzmq's COPY_THRESHOLD: below it a copy costs less than the bookkeeping for none
LEASE_FROM = 32 << 10  # bytes; a copy of 16 KiB costs what a lease does, and a lease pins a block
ALIGN = 64  # a cache line, and what torch aligns its own memory to

SHORT = 4096  # bytes of a payload from which on a copy costs more than the call that makes it
LONGEST_RUN = 1 << 20  # bytes that are joined: they are copied twice, and the interpreter waits
_PADDING = [bytes(count) for count in range(ALIGN)]


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether two items may lie at one place. Strides are not negative; what nests without gaps does not overlap."""
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return 0 not in shape
            reach += (size - 1) * stride
    return False


class KeptBytes(np.ndarray[Any, Any]):
    """Bytes that keep what they are a view of, which a view through ctypes does not.

    Attributes:
        tensor: whose memory they show.
        keep: what else is to be kept.
    """

    tensor: Any = None
    keep: Any = None


def kept(payload: memoryview, tensor: Any) -> memoryview:
    """Return a view of a payload's bytes that keeps a tensor."""
    if not payload.nbytes:
        return payload
    octets = np.frombuffer(payload, np.uint8).view(KeptBytes)
    octets.tensor = tensor
    return memoryview(octets)  # type: ignore[arg-type]


class LazyPayload:
    """A payload that has no bytes until it is written to the place that it travels in: it is made there. At least ``BULK``."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def write_into(self, place: memoryview) -> None:
        """Make it in ``place``, which is aligned and of its length. May be called again, elsewhere."""
        raise NotImplementedError

    def write_part(self, place: memoryview, start: int) -> None:
        """Make a part of it: as much as ``place`` takes, which is aligned, from its byte ``start`` on, a multiple of ``ALIGN``.

        Each part is asked for in its turn, and may be asked for again, elsewhere.
        """
        raise NotImplementedError

    def sent(self, place: memoryview, start: int) -> None:
        """A part that was made so is on its way: what is to be found out about it may take its time now."""

    def frame(self) -> memoryview:
        """It, made in memory of its own, which lives as long as what is returned."""
        raise NotImplementedError


def layout(sizes: Iterator[int]) -> tuple[int, int, int]:
    """Of payloads: bytes of the frame that the small ones share, how many have a frame of their own, bytes of all."""
    end = bulk = total = 0
    for size in sizes:
        total += size
        if size >= BULK:
            bulk += 1
        elif size:
            end = -(-end // ALIGN) * ALIGN + size
    return end, bulk, total


def places_of(
    sizes: list[int],
) -> tuple[list[tuple[int, int, int]], list[int], list[tuple[int, int]], int]:
    """Return where payloads lie, in frames and in one block.

    Returns:
        The place of each payload in frames (frame, start, end; frame -1: nowhere, it is empty), the length of each frame, the
        place of each in a block (start, end), and where all end there.
    """
    packed, _, _ = layout(iter(sizes))
    frame_sizes = [packed] if packed else []
    end, block_end = 0, packed
    places, in_block = [], []
    for size in sizes:
        if not size:
            places.append((-1, 0, 0))
            in_block.append((0, 0))
        elif size < BULK:
            start = -(-end // ALIGN) * ALIGN
            end = start + size
            places.append((0, start, end))
            in_block.append((start, end))
        else:
            start = -(-block_end // ALIGN) * ALIGN
            block_end = start + size
            places.append((len(frame_sizes), 0, size))
            in_block.append((start, block_end))
            frame_sizes.append(size)
    return places, frame_sizes, in_block, block_end


class Block:
    """A message's payloads, laid out in a block.

    Short ones are joined with their padding and written at once: 0.2 us for each, where ctypes.memmove takes 0.7.
    """

    __slots__ = ("_keep", "_parts", "nbytes")

    def __init__(self, payloads: list[Any], nbytes: int, keep: Any) -> None:
        """``keep``: what the payloads are views of, which views through ctypes do not keep alive by themselves."""
        self._keep = keep
        self._parts: list[tuple[int, Any]]  # where each begins; a list is of short payloads and padding
        self.nbytes = nbytes
        if len(payloads) == 1:
            self._parts = [(0, payloads if nbytes < SHORT else payloads[0])]
        else:
            self._lay_out(payloads)

    def _lay_out(self, payloads: list[Any]) -> None:
        self._parts = []
        run: list[Any] = []
        begin = end = 0
        large = []
        for payload in payloads:
            size = len(payload)
            if size >= BULK:
                large.append(payload)
                continue
            padding = -end % ALIGN if size else 0
            if size >= SHORT or end - begin > LONGEST_RUN:
                self._parts.append((begin, run))
                run, begin = [], end + padding
            elif padding:
                run.append(_PADDING[padding])
            run.append(payload)
            end += padding + size
        self._parts.append((begin, run))
        for payload in large:
            begin = -(-end // ALIGN) * ALIGN
            self._parts.append((begin, payload))
            end = begin + len(payload)
        self.nbytes = end

    def write_into(self, place: memoryview) -> None:
        """Write all of them."""
        for start, part in self._parts:
            if type(part) is list:
                joined = b"".join(part)
                place[start : start + len(joined)] = joined
            elif isinstance(part, LazyPayload):
                part.write_into(place[start : start + len(part)])
            elif isinstance(part, ctypes.Array):
                ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(place)) + start, part, len(part))
            else:
                place[start : start + len(part)] = memoryview(part).cast("B")
