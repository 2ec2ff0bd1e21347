"""A segment divided: extents that belong to rows, blocks that messages lie in, and who may do what to a block when.

::

    memory/rows.py ┬ table: a word per unit ┬ unit ┬ unit ┬ unit ┬ …        a unit is 1 MiB, numbered from the
                   │ (its page is a hole    │                               segment's start: unit u is at u << 20
                   │ until it is needed)    │

    a unit's word    63 ──────── 32 31 ───── 16 15 ────── 0
                     │ units       │ kind      │ row + 1  │    of the first unit of an extent; 0 elsewhere
                     └─────────────┴───────────┴──────────┘

    a block     0         8        16        24                   64                      …  2 ** kind
                ├─ state ─┼─ credit ┼─ nbytes ┼─ metadata's length ─┼─ metadata ─ (64) ─ payload ─┤
                                                << 32 | queue

    its state        63 ─────────── 32 31 ──────── 16 15 ── 4 3 ─ 0
                     │ generation     │ incarnation  │ row    │ step │
                     └────────────────┴──────────────┴────────┴──────┘

**An extent** belongs to one row and is cut into blocks of 2 ** kind bytes; a large message is one block of several
units. Powers of two waste only addresses: pages nobody wrote cost nothing. Extents are claimed without a lock of our
own: an OFD lock on the units' bytes, tried without waiting, keeps others away while the units are seen to be free and
one store makes them an extent. A process stopped there keeps others from these units only. As the word is stored
before the extent is used, the layout can be walked after a kill at any store.

**A block's steps.** There is one writer at every step, so plain stores suffice:

========  ====================================  ==============================  ============================
step      means                                 who may write the state         to
========  ====================================  ==============================  ============================
FREE      nobody needs the content              the row that owns the extent    WRITING
WRITING   being filled (a loan, too)            the row named in it             QUEUED (generation + 1), FREE
QUEUED    a ticket with this generation is or   who has this ticket in a word   HELD, FREE (content copied)
          will be in a queue                    of its row; before it is given,
                                                the row named in it             WRITING (undertaker: "not given")
HELD      a lease: tensors lie on it            the row named in it             FREE, QUEUED (forwarded)
KEPT      a queue's own record; names no row    who finds the queue gone        FREE
========  ====================================  ==============================  ============================

"The row" is its process while that lives, and after that whoever has the row's lock. Only the block's owner takes it
from FREE to WRITING, so a block has one owner and one writer, and nobody needs to compare-and-swap, which Python
cannot. The generation goes up at each queueing. A ticket is (block, generation), so a ticket is found out as given,
late or foreign by one look at the state. It takes 2 ** 32 messages in one block for one to come round.

**Allocation** is private to the owner and in plain Python data: lists of free blocks by kind, most recently freed
first, as warm memory takes a copy five times faster than fresh. ``list.pop``, ``list.append`` and their deque cousins
are single steps for threads and signal handlers, and each entry belongs to who has popped it. Blocks that others free
are found by looking at their state: see ``_harvest`` for what that costs.

**Memory** is what ``Segment.resident`` says. Before fresh pages are touched, it is held against ``capacity`` and
against what the machine's cgroups leave (memory/headroom.py). That is a check, not a guarantee: two processes may
pass it together."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator
from multiprocessing import context
from typing import Any

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory.headroom import headroom
from tensorpipe_ipc.memory.row import MAX_ROWS, ROWS_END
from tensorpipe_ipc.memory.rows import Rows
from tensorpipe_ipc.memory.segment import CAPACITY, PAGE, Segment

__all__ = ["FREE", "HEADER", "HELD", "KEPT", "QUEUED", "STEPS", "WRITING", "Arena", "kind_of", "payload_at"]

UNIT = 1 << 20
SMALLEST = 9
SMALL = 448  # bytes of metadata and payload in the smallest block
HEADER = 64  # a cache line, and the alignment of every payload
CREDIT, NBYTES, METADATA = 1, 2, 3  # words of a block's header, after its state

FREE, WRITING, QUEUED, HELD, KEPT = range(5)
STEPS = ("free", "being written", "queued", "held", "kept")
STEP_BITS, ROW_BITS, INCARNATION_BITS = 4, 12, 16
GENERATION_AT = STEP_BITS + ROW_BITS + INCARNATION_BITS
GENERATIONS = 1 << 32
HOLDER = (1 << GENERATION_AT) - 1  # a state without its generation: step, row, incarnation

ALLOWANCE = 1 << 22  # bytes of growth between two looks at the machine's headroom (about 60 us each)
STOCK = 32  # small blocks that are made free ahead of need
YOUNG = 32  # blocks in flight that are looked at first
IDLE = 10.0  # seconds after which free blocks that were not used are punched out, at the next allocation


class Arena:
    """One process's use of a segment: its row, its extents, its free blocks.

    Attributes:
        capacity: bytes that the whole segment may cost, all processes together.
        writing, held: the low half of a block's state while this process writes or holds it.
    """

    def __init__(self, segment: Segment, capacity: int | None = None) -> None:
        self.segment, self.words = segment, segment.words
        self.rows = Rows(segment)
        self.capacity = capacity if capacity is not None else headroom() // 2
        self.words[CAPACITY] = self.words[CAPACITY] or self.capacity
        self._table = ROWS_END // 8
        self._first_unit = -(-(ROWS_END + (segment.size // UNIT) * 8) // UNIT)
        self.rows.after_fork(self._forget)
        self._forget()

    def _forget(self) -> None:
        self.writing = self.held = self.queued = 0
        self.free: defaultdict[int, list[int]] = defaultdict(list)
        self._fresh: defaultdict[int, list[int]] = defaultdict(list)
        self._young: defaultdict[int, deque[int]] = defaultdict(deque)
        self._old: defaultdict[int, deque[int]] = defaultdict(deque)
        self._allowance = 0
        self._claiming: dict[int, list[int]] = {}  # by unit: the thread, or interrupted code, that is at it
        self._idle_since, self._idle_before = time.monotonic(), dict[int, list[int]]()

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return Arena, (self.segment, self.capacity)

    def attach(self, finish: Callable[[int], bool] | None = None) -> None:
        """Take a row, and with it the extents of the dead process that had it before. Nothing to do where there is one.

        Args:
            finish: what is to be done in a dead row before it is adopted; its blocks at least (``sweep``).
        """
        if self.rows.index >= 0:
            return
        self.rows.attach(finish or self.finish, self._begin)  # not kept: it is a method of what keeps this

    def _begin(self, row: int) -> None:
        """This process has a row, and what belongs to that. No other thread of it allocates yet."""
        self._forget()
        holder = self.rows.incarnation << (STEP_BITS + ROW_BITS) | row << STEP_BITS
        self.writing, self.queued, self.held = (holder | step for step in (WRITING, QUEUED, HELD))
        for start, kind, units in self._extents(row):
            self._take_over(start, kind, units)

    # ---- allocation ----

    def allocate(self, nbytes: int, *, force: bool = False) -> int:
        """A block for ``nbytes`` of metadata and payload. Its state is WRITING.

        Args:
            force: even beyond the capacity, though not beyond what the machine has.

        Returns:
            Its offset in the segment; 0 when there is no room now.

        Raises:
            SharedMemoryError: there can never be room for so much.
        """
        kind, growth = kind_of(nbytes), nbytes + HEADER
        if time.monotonic() - self._idle_since > IDLE:
            self.trim_idle()
        block = self._take(kind, growth, force)
        if not block:
            self._trim(growth)
            block = self._take(kind, growth, force)
        if block:
            word = block >> 3
            self.words[word] = self.words[word] & ~HOLDER | self.writing
        return block

    def _take(self, kind: int, growth: int, force: bool) -> int:
        while True:
            for blocks in (self.free[kind], self._harvest(kind)):
                try:
                    return blocks.pop()
                except IndexError:
                    continue
            if not (self._may_grow(growth) if not force else growth <= headroom()):
                return 0
            try:
                block = self._fresh[kind].pop()
            except IndexError:
                self._claim(kind)
                continue
            if 1 << kind <= PAGE:
                self._stock(kind)
            return block

    def _stock(self, kind: int) -> None:
        """A few more small blocks than are needed: so that not each put of a message that is taken at once has to harvest.

        400 bytes to and fro: 12 us a put instead of 17.
        """
        free, fresh = self.free[kind], self._fresh[kind]
        while len(free) < STOCK and self._allowance >= 1 << kind:
            try:
                free.append(fresh.pop())
            except IndexError:
                return
            self._allowance -= 1 << kind

    def discard(self, block: int, kind: int) -> None:
        """A block that this process owns and was writing, or had queued without giving its ticket, is free again."""
        word = block >> 3
        self.words[word] = self.words[word] & ~HOLDER
        if block not in self._young[kind] and block not in self._old[kind]:
            self.free[kind].append(block)

    def in_flight(self, block: int, kind: int) -> None:
        """A block of this process has been queued: others will free it."""
        self._young[kind].append(block)

    def _harvest(self, kind: int) -> list[int]:
        """Look for blocks that others have freed. The list of free ones of that kind.

        Blocks in flight are young, the last 32 that were queued, or old. All the young are looked at. Of the old, which
        may be thousands under leases, four each time, in turn: so their number costs nothing, and a free one among them
        is found within a quarter as many allocations.
        """
        free, young, old = self.free[kind], self._young[kind], self._old[kind]
        try:
            while len(young) > YOUNG:
                old.append(young.popleft())
            self._sort_out(young, free, len(young))
            if old:
                self._sort_out(old, free, min(len(old), 4))
        except IndexError:  # another thread is at it, too
            pass
        return free

    def _sort_out(self, blocks: deque[int], free: list[int], looks: int) -> None:
        words = self.words
        for _ in range(looks):
            block = blocks.popleft()
            if words[block >> 3] & HOLDER:
                blocks.append(block)
            else:
                free.append(block)

    def reclaim(self) -> None:
        """Look at every block in flight: for when there is no room."""
        for kind in list(self._young):
            for blocks in (self._young[kind], self._old[kind]):
                with contextlib.suppress(IndexError):
                    self._sort_out(blocks, self.free[kind], len(blocks))

    # ---- memory ----

    def _may_grow(self, nbytes: int) -> bool:
        if self._allowance < nbytes:
            if nbytes > self.capacity:
                raise SharedMemoryError(
                    errno.ENOSPC,
                    f"a message of {nbytes} bytes can never fit: the arena's capacity is {self.capacity} bytes; "
                    "send it in parts",
                )
            allowance = min(max(ALLOWANCE, nbytes), self.capacity - self.segment.resident(), headroom())
            if allowance < nbytes:
                return False
            self._allowance = allowance
        self._allowance -= nbytes
        return True

    def _trim(self, nbytes: int) -> None:
        """Give back memory of own free blocks, largest and coldest first, until there is room."""
        self.reclaim()
        self._allowance = 0
        for kind in sorted((kind for kind in self.free if 1 << kind > PAGE), reverse=True):
            blocks = self.free[kind]
            with contextlib.suppress(IndexError):
                while min(self.capacity - self.segment.resident(), headroom()) < nbytes:
                    self._punch_out(blocks.pop(0), kind)

    def trim_idle(self) -> None:
        """Give back memory of free blocks that were not used since the last call.

        The list of free blocks is a stack, so what was not used is the part at its bottom that did not change.
        """
        before, self._idle_since = self._idle_before, time.monotonic()
        for kind, blocks in self.free.items():
            for block in before.get(kind, []):
                if 1 << kind <= PAGE or blocks[:1] != [block]:
                    break
                with contextlib.suppress(IndexError):  # another thread took it in between
                    self._punch_out(blocks.pop(0), kind)
        self._idle_before = {kind: list(blocks) for kind, blocks in self.free.items()}

    def _punch_out(self, block: int, kind: int) -> None:
        """Give back all of a free block but the page with its state."""
        self.segment.punch(block + HEADER, block + (1 << kind))
        self._fresh[kind].append(block)

    # ---- extents ----

    def _claim(self, kind: int) -> None:
        """Make free units an extent of this row's, and its blocks fresh ones."""
        units = max(1, (1 << kind) >> 20)
        unit, limit = self._first_unit, self.segment.size >> 20
        while True:
            unit = self._gap(unit, units)
            if unit + units > limit:
                raise SharedMemoryError(
                    errno.ENOSPC,
                    f"no {units} MiB of addresses in a row left in a segment of {self.segment.size >> 20} MiB",
                )
            if self._claim_at(unit, units, kind):
                break
            unit += 1
        self._fresh[kind].extend(range((unit + units) * UNIT - (1 << kind), unit * UNIT - 1, -(1 << kind)))

    def _claim_at(self, unit: int, units: int, kind: int) -> bool:
        """Make these units an extent, unless they are none that are free, or somebody else is at them. Whether they are."""
        mine: list[int] = []  # to the kernel all threads of this process are one holder, so they are told apart here
        try:
            for each in range(unit, unit + units):
                if self._claiming.setdefault(each, mine) is not mine:
                    return False
                mine.append(each)
            if not self.rows.try_lock(unit << 20, units << 20):
                return False
            try:
                if self._gap(unit, units) != unit:
                    return False
                self.words[self._table + unit] = units << 32 | kind << 16 | (self.rows.index + 1)
                return True
            finally:
                self.rows.unlock(unit << 20, units << 20)
        finally:
            for each in mine:
                del self._claiming[each]

    def _gap(self, unit: int, units: int) -> int:
        """The first unit from ``unit`` on that so many free ones begin with."""
        for start, _, length, _ in self._all_extents():
            first = start >> 20
            if first >= unit + units:
                break
            unit = max(unit, first + length)
        return unit

    def _all_extents(self) -> Iterator[tuple[int, int, int, int]]:
        """(offset, kind, units, row) of each extent, in order of offset.

        Reading a page of shared memory that nobody wrote makes it cost memory; so the holes are asked for first.
        """
        table, end = self._table * 8, self._table * 8 + (self.segment.size >> 20) * 8
        for start, stop in self.written(table, end):
            first = start // 8
            for index, word in enumerate(self.words[first : stop // 8].tolist(), first - self._table):
                if word:
                    yield index * UNIT, word >> 16 & 0xFFFF, word >> 32, (word & 0xFFFF) - 1

    def _extents(self, row: int) -> Iterator[tuple[int, int, int]]:
        for start, kind, units, owner in self._all_extents():
            if owner == row:
                yield start, kind, units

    def written(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Page-aligned ranges from ``start`` up to ``stop`` that somebody has written."""
        descriptor = self.segment.descriptor
        while start < stop:
            try:
                start = os.lseek(descriptor, start, os.SEEK_DATA)
            except OSError as none:
                if none.errno == errno.ENXIO:
                    return
                raise
            if start >= stop:
                return
            hole = os.lseek(descriptor, start, os.SEEK_HOLE)
            yield start, min(hole, stop)
            start = hole

    def _blocks(self, start: int, kind: int, units: int) -> Iterator[int]:
        """The blocks of an extent whose state was ever written."""
        size = 1 << kind
        for first, stop in self.written(start, start + units * UNIT):
            begin = (
                start + -(-(first - start) // size) * size
            )  # a block that begins before has its state's page in a hole
            yield from range(begin, stop, size)

    def _take_over(self, start: int, kind: int, units: int) -> None:
        """Sort the blocks of an extent that has become ours."""
        written = set()
        for block in self._blocks(start, kind, units):
            written.add(block)
            (self._old[kind] if self.words[block >> 3] & HOLDER else self.free[kind]).append(block)
        size = 1 << kind
        self._fresh[kind].extend(b for b in range(start + units * UNIT - size, start - 1, -size) if b not in written)

    # ---- the dead ----

    def finish(self, row: int) -> bool:
        """All that is to be done in a dead row where there are no queues."""
        done = self.sweep(row)
        if done:
            self.rows.finished(row)
        return done

    def sweep(self, row: int, spared: Container[int] = ()) -> bool:
        """Free what a dead row was writing or held, wherever it lies. The caller has the row's lock.

        May be cut short anywhere: whoever comes next finds the rest.

        Args:
            spared: blocks to leave alone, as a token in the row names them that only others can judge.

        Returns:
            Whether that was all: what is held stays so while a child of the dead process may read it.
        """
        words, holder = self.words, self.rows.holder(row)
        mine = {holder | WRITING} if self.rows.has_witness(row) else {holder | WRITING, holder | HELD}
        for start, kind, units, _ in self._all_extents():
            for block in self._blocks(start, kind, units):
                state = words[block >> 3]
                if state & HOLDER in mine and block not in spared:
                    words[block >> 3] = state & ~HOLDER
        return len(mine) == 2

    def inherit(self, row: int) -> None:
        """Take over the extents of a dead and finished row, whose lock the caller has."""
        for start, kind, units in self._extents(row):
            self.words[self._table + (start >> 20)] = units << 32 | kind << 16 | (self.rows.index + 1)
            self._take_over(start, kind, units)

    def holders(self) -> dict[int, tuple[int, int]]:
        """By row: how many blocks its process has in the works or holds, with how many bytes of payload."""
        found: dict[int, tuple[int, int]] = {}
        for start, kind, units, _ in self._all_extents():
            for block in self._blocks(start, kind, units):
                state = self.words[block >> 3] & HOLDER
                if state and state != KEPT:
                    row = state >> STEP_BITS & MAX_ROWS - 1
                    count, nbytes = found.get(row, (0, 0))
                    found[row] = count + 1, nbytes + self.words[(block >> 3) + NBYTES]
        return found


def kind_of(nbytes: int) -> int:
    """The kind of a block with room for so much metadata and payload: the exponent of its size."""
    return (nbytes + HEADER - 1).bit_length() if nbytes > SMALL else SMALLEST


def payload_at(block: int, metadata: int) -> int:
    """Where the payload begins behind so many bytes of metadata."""
    return block + HEADER + (metadata + 63 & -64)
