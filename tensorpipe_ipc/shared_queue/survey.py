"""Shared memory as an onlooker sees it: every queue, its users, and the holders of its blocks. Nobody has to help.

The segments are found by their name among the descriptors of processes that may be looked at, opened again through /proc for
reading, and read with ``pread``. Nothing is mapped (what is read may be nonsense, but reading it is harmless), nothing is
written, no row is taken. Holes are asked for first, as reading one through a mapping would cost memory. Figures of one
survey are a few milliseconds apart: what moved meanwhile may be seen twice, or not at all. An extent that became another's
while it was read is left out.

What is seen: queues, and endpoints that share memory. Endpoints that use frames have no memory to look at.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensorpipe_ipc.memory.arena import (
    GENERATION_AT,
    HELD,
    HOLDER,
    KEPT,
    METADATA,
    NBYTES,
    QUEUED,
    ROW_BITS,
    SMALLEST,
    STEP_BITS,
    UNIT,
    WRITING,
)
from tensorpipe_ipc.memory.ofd_locks import is_locked
from tensorpipe_ipc.memory.row import (
    BATCHES,
    BYTES,
    GET,
    LOST,
    MAX_ROWS,
    MESSAGES,
    MICROSECONDS,
    NAMESPACE,
    PID,
    PURPOSES,
    PUT,
    ROWS_END,
    SINGLES,
    WAITS,
    counters_word,
    row_byte,
    row_word,
)
from tensorpipe_ipc.memory.rows import ENDED, FINISHED, INCARNATIONS
from tensorpipe_ipc.memory.segment import NAME, read_head
from tensorpipe_ipc.owned_fd import opened_file, owned
from tensorpipe_ipc.process import identity, memfds
from tensorpipe_ipc.shared_queue.queue_record import FACTS, facts_of

__all__ = ["Part", "QueueView", "SegmentView", "Use", "survey"]

_OFTEN = 1 << 12  # bytes: smaller blocks are read together, larger ones by their headers
_Words = npt.NDArray[np.uint64]


class Part(NamedTuple):
    """One process's part in an arena."""

    pid: int
    """Its id, in its own namespace; 0: those that have ended, and whose rows others have, in one."""
    here: bool
    """Whether that is ours, so that the id means something here."""
    alive: bool
    """Whether its row's lock is held. What a dead one left undone is undone at the next look of any living one."""
    row: int
    """``ENDED`` for those that have ended, and whose rows others have."""
    incarnation: int
    """How often the row has been attached to."""
    written: int
    """Blocks that it fills now."""
    queued: int
    """Blocks that it put and nobody has taken."""
    held: int
    """Blocks that tensors of it lie on: leases, and what it made in place."""
    nbytes: int
    """Payload of all these blocks."""
    nbytes_held: int
    """Payload of the held ones."""

    def __str__(self) -> str:
        state = "alive" if self.alive else "dead" if self.here else "elsewhere"
        return f"pid {self.pid} ({state})" if self.pid else "a process that has ended"


class Use(NamedTuple):
    """The use that one process made of one queue."""

    pid: int
    alive: bool
    row: int
    incarnation: int
    put: int
    bytes_put: int
    got: int
    bytes_got: int
    waits: int
    """Puts that had to wait for room."""
    seconds_waited: float


class QueueView(NamedTuple):
    """One queue."""

    number: int
    kind: str
    """"queue", "joinable queue", or "endpoints" for one between a producer and a consumer."""
    maxsize: int
    """0: no bound."""
    waiting: int
    """Messages in it."""
    nbytes: int
    """Payload of these."""
    shut: bool
    uses: tuple[Use, ...]


class SegmentView(NamedTuple):
    """One segment, with the arena that it is divided into."""

    inode: int
    pids: tuple[int, ...]
    """Those of these processes that have it open."""
    capacity: int
    """Bytes that it may cost; 0: its maker did not say."""
    resident: int
    """Bytes of memory that it costs now, all processes together."""
    parts: tuple[Part, ...]
    queues: tuple[QueueView, ...]
    swept: int
    """Processes that died and whose work was finished or undone."""
    unswept: int
    """Processes that died, and nobody has looked since, or nobody can."""
    lost: int
    """Messages lost with consumers that died having taken them."""

    @property
    def in_use(self) -> int:
        """Bytes of payload in blocks that are filled, wait, or are held."""
        return sum(part.nbytes for part in self.parts)

    @property
    def leased(self) -> int:
        """Bytes of payload in blocks that tensors lie on."""
        return sum(part.nbytes_held for part in self.parts)


def survey(pids: Iterable[int] | None = None) -> list[SegmentView]:
    """Look at all segments that can be found.

    Args:
        pids: those that these processes have open; None: those of all processes that this one may look at.
    """
    found: dict[int, list[tuple[int, str]]] = defaultdict(list)
    device = _device_of_memfds()
    for pid, link in memfds(NAME, pids):
        with contextlib.suppress(OSError):
            status = os.stat(link)
            if status.st_dev == device:  # else anybody's file that shows such a name, in a mount namespace of its own
                found[status.st_ino].append((pid, link))
    views = []
    for inode, links in sorted(found.items()):
        view = _look(inode, tuple(sorted({pid for pid, _ in links})), [link for _, link in links])
        if view is not None:
            views.append(view)
    return views


@functools.cache
def _device_of_memfds() -> int:
    with owned(os.memfd_create, "tensorpipe_ipc survey", os.MFD_CLOEXEC) as one:
        return os.fstat(one.fileno()).st_dev


def _look(inode: int, pids: tuple[int, ...], links: list[str]) -> SegmentView | None:
    for link in links:
        with contextlib.suppress(OSError):  # its process is gone; another may have it
            with opened_file(link) as segment:
                size, capacity = read_head(segment.fileno())
                if size and os.fstat(segment.fileno()).st_ino == inode:
                    return _Reader(segment.fileno(), size).view(inode, pids, capacity)
    return None


class _Reader:
    """One look at one segment."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size // UNIT * UNIT
        self._waiting: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # by queue's block: messages, bytes
        # by row, and the process's number in it: count of each step, bytes, bytes held
        self._blocks: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0] * 7)
        self._kept: list[tuple[int, int]] = []  # block and generation of each queue's record

    def view(self, inode: int, pids: tuple[int, ...], capacity: int) -> SegmentView:
        """Return all of it."""
        for start, size_class, units in self._extents():
            found = list(self._headers(start, size_class, units))
            word = self._word((ROWS_END + start // UNIT * 8) // 8)
            if (word >> 16 & 0x3F, word >> 32) == (size_class, units):  # else a message's content was read as headers
                for first, words in found:
                    self._sort(first, 1 << size_class, words)
        incarnations = self._words(INCARNATIONS, MAX_ROWS).tolist()
        finished = self._words(FINISHED, MAX_ROWS).tolist()
        rows = [row for row in range(MAX_ROWS) if incarnations[row]]
        alive = {row: is_locked(self._descriptor, row_byte(row)) for row in rows}
        parts = self._parts(incarnations, alive)
        unswept = sum(not alive[row] and incarnations[row] != finished[row] for row in rows)
        dead = sum(incarnations[row] - alive[row] for row in rows)
        return SegmentView(
            inode,
            pids,
            capacity,
            os.fstat(self._descriptor).st_blocks * 512,
            parts,
            self._queues(parts),
            dead - unswept,
            unswept,
            sum(self._word(row_word(row) + LOST) >> 40 for row in rows),
        )

    def _words(self, first: int, count: int) -> _Words:
        data = os.pread(self._descriptor, 8 * count, 8 * first)
        return np.frombuffer(data.ljust(8 * count, b"\0"), np.uint64)

    def _word(self, index: int) -> int:
        return int.from_bytes(os.pread(self._descriptor, 8, 8 * index), sys.byteorder)

    def _written(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        stop = min(stop, self._size)
        while start < stop:
            try:
                start = os.lseek(self._descriptor, start, os.SEEK_DATA)
            except OSError:  # nothing but holes
                return
            if start >= stop:
                return
            hole = min(os.lseek(self._descriptor, start, os.SEEK_HOLE), stop)
            yield start, hole
            start = hole

    def _extents(self) -> Iterator[tuple[int, int, int]]:
        """Return where each begins, its size class and units. In nonsense, one that begins within another is left out."""
        end, clear = ROWS_END + self._size // UNIT * 8, 0
        for start, stop in self._written(ROWS_END, end):
            words = self._words(start // 8, (stop - start) // 8)
            for index in np.flatnonzero(words).tolist():
                word = int(words[index])
                size_class, units = word >> 16 & 0x3F, word >> 32
                unit = (start - ROWS_END) // 8 + index
                if SMALLEST <= size_class < 48 and unit >= clear and units <= self._size // UNIT:
                    clear = unit + units
                    yield unit * UNIT, size_class, units

    def _headers(self, start: int, size_class: int, units: int) -> Iterator[tuple[int, _Words]]:
        """The first words of blocks that were ever written: where the first of them begins, and a row for each."""
        size, end = 1 << size_class, start + units * UNIT
        if size > _OFTEN:
            for begin, stop in self._written(start, end):
                for block in range(begin + (start - begin) % size, stop, size):
                    yield block, self._words(block // 8, METADATA + 1).reshape(1, -1)
            return
        for begin, stop in self._written(start, end):
            yield begin, self._words(begin // 8, (stop - begin) // 8).reshape(-1, size // 8)[:, : METADATA + 1]

    def _sort(self, first: int, size: int, words: _Words) -> None:
        steps = words[:, 0] & np.uint64((1 << STEP_BITS) - 1)
        for index in np.flatnonzero(steps).tolist():
            state, step, nbytes = int(words[index, 0]), int(steps[index]), int(words[index, NBYTES])
            if step == KEPT:
                self._kept.append((first + index * size, state >> GENERATION_AT & 0xFFFFFF))
                continue
            if step not in (WRITING, QUEUED, HELD):
                continue
            nbytes = 0 if step == WRITING else nbytes  # it is said when the block is filled
            holder = (state & HOLDER) >> STEP_BITS
            of = self._blocks[holder & (1 << ROW_BITS) - 1, holder >> ROW_BITS]
            of[step] += 1
            of[5] += nbytes
            if step == HELD:
                of[6] += nbytes
            if step == QUEUED:
                waiting = self._waiting[int(words[index, METADATA]) & 0xFFFFFFFF]
                waiting[0] += 1
                waiting[1] += nbytes

    def _parts(self, incarnations: list[int], alive: dict[int, bool]) -> tuple[Part, ...]:
        parts = []
        for row, lives in alive.items():
            base, of = row_word(row), self._blocks.pop((row, incarnations[row]), [0] * 7)
            here = self._word(base + NAMESPACE) == identity().namespace
            parts.append(_part(self._word(base + PID), here, lives, row, incarnations[row], of))
        if self._blocks:
            parts.append(
                _part(0, False, False, ENDED, 0, [sum(counts) for counts in zip(*self._blocks.values(), strict=True)])
            )
        return tuple(parts)

    def _queues(self, parts: tuple[Part, ...]) -> tuple[QueueView, ...]:
        uses = self._uses(parts)
        queues = []
        for block, generation in self._kept:
            number = generation << 32 | block >> SMALLEST
            data = os.pread(self._descriptor, FACTS, block)
            if len(data) < FACTS:
                continue
            maxsize, shut, joinable, pair = facts_of(data)
            count, nbytes = self._waiting[number & 0xFFFFFFFF]
            if pair and not count and number not in uses:
                continue  # it is there for whoever comes next
            kind = "endpoints" if pair else "joinable queue" if joinable else "queue"
            queues.append(QueueView(number, kind, maxsize, count, nbytes, shut, tuple(uses.get(number, ()))))
        return tuple(queues)

    def _uses(self, parts: tuple[Part, ...]) -> dict[int, list[Use]]:
        found: dict[int, list[Use]] = defaultdict(list)
        for part in (each for each in parts if each.row != ENDED):
            sums: dict[int, list[int]] = defaultdict(lambda: [0] * 6)
            purposes = self._words(row_word(part.row) + PURPOSES, SINGLES + BATCHES)
            for index in np.flatnonzero(purposes).tolist():
                queue, direction = int(purposes[index]) >> 8, int(purposes[index]) & 0xFF
                counters = self._words(counters_word(part.row, index), 4).tolist()
                if direction in (PUT, GET):
                    at = 0 if direction == PUT else 2
                    sums[queue][at] += counters[MESSAGES]
                    sums[queue][at + 1] += counters[BYTES]
                    sums[queue][4] += counters[WAITS]
                    sums[queue][5] += counters[MICROSECONDS]
            for queue, (put, bytes_put, got, bytes_got, waits, microseconds) in sums.items():
                found[queue].append(
                    Use(
                        part.pid,
                        part.alive,
                        part.row,
                        part.incarnation,
                        put,
                        bytes_put,
                        got,
                        bytes_got,
                        waits,
                        microseconds / 1e6,
                    )
                )
        return found


def _part(pid: int, here: bool, alive: bool, row: int, incarnation: int, of: list[int]) -> Part:
    return Part(pid, here, alive, row, incarnation, of[WRITING], of[QUEUED], of[HELD], of[5], of[6])
