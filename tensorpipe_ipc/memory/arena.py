"""Arena: blocks for messages, and which process may change a block's state, and when.

::

    a block     0         8        16        24                   64                      …  2 ** size class
                ├─ state ─┼─ credit ┼─ nbytes ┼─ metadata's length ─┼─ metadata ─ (64) ─ payload ─┤
                                                << 32 | queue; two places; word 6: bytes that have pages

    its state        63 ─────────── 32 31 ──────── 16 15 ── 4 3 ─ 0
                     │ generation     │ incarnation  │ row    │ step │
                     └────────────────┴──────────────┴────────┴──────┘

**An extent** belongs to one row and is cut into blocks of 2 ** size class bytes. A large message is one block of several
units. Powers of two waste only addresses: a page that was never written costs nothing. extents.py tells how extents are
claimed, change hands and are given up.

**A block's steps.** There is one writer at every step, so plain stores suffice:

========  ====================================  ==============================  ============================
step      means                                 may write the state             to
========  ====================================  ==============================  ============================
FREE      no process needs the content          the row that owns the extent    WRITING
WRITING   being filled (a loan, too)            the row named in it             QUEUED (generation + 1), FREE
QUEUED    a ticket with this generation is or   the process with this ticket    HELD, FREE (content copied)
          will be in a queue                    in a word of its row; before
                                                it is given, the row named      WRITING (recovery: "not given")
HELD      a lease: tensors lie on it            the row named in it             FREE, QUEUED (forwarded)
KEPT      a queue's own record; names no row    the process that finds the      FREE
                                                queue gone
========  ====================================  ==============================  ============================

"The row" is its process while that lives, and then the process that has the row's lock. Only a block's owner takes it from
FREE to WRITING. So a block has one owner and one writer, and no process needs compare-and-swap, which Python lacks. The
generation goes up each time the block is queued. A ticket is (block, generation), so one look at the state tells whether a
ticket was given, is late or is foreign. A generation comes round after 2 ** 32 messages in one block.

**Allocation** is private to the owner, in plain Python data: lists of blocks by kind, the last freed first. A copy
into warm memory is five times as fast as into fresh memory. ``free`` has blocks that are thought to be free, ``_fresh`` those
that cost nothing or little yet. ``recent`` and ``_older`` have blocks that were taken, and will be freed by the processes that
have them. *The lists are hints.* A block's extent and state say whether it may be taken, and they are looked at when it is
(``_start``), with no call before it is WRITING: so a thread or a signal handler sees it before or after that. An entry may be
too many, as another process has taken the extent, or missing, as an exception came. ``reclaim`` makes the lists anew by the
states of all own blocks, when there is no room, and when extents have changed hands.

**Memory** is what ``Segment.resident`` says: pages. A block may need pages that it has not had since they were last punched
out. Before it gets them, they are held against ``capacity``, against what the machine's cgroups leave (headroom.py), and
against what other processes are just getting (``RESERVED`` in their rows, stored first). Then the pages are made, all at once,
and from then on every process counts them; also those of a loan that is not filled yet. Small blocks are charged whole, 64 KiB
at a time. This is a check, not a guarantee: other programs may take what is left in the meantime.

**Beyond the capacity** a block is had by force: for a message in a queue that has none, or a few small ones, as queues that
share an arena must not starve each other in a circle; and for a queue's own record. The machine must have the memory. It lies
in an extent of a kind of its own (``BEYOND``). What comes free there is used by force again, by any process, or given back. It
is no lease's but where pages are locked (leases.py), nor another message's: so what is left there is what was had by force, and
one message after the other does not add to what others have.

**If there is no room**, own free blocks are punched out first, all but the page with their state. Then ``collect`` takes
whatever is free, of any process. So no put waits for memory that lies free with another process, in whatever sizes. What lies
free and unused for some seconds is given back by the next process that allocates or waits (``mind_idle``), and at once by
``trim``.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from multiprocessing import context
from time import monotonic, sleep, thread_time
from typing import Any

import numpy as np

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.headroom import OUTDATED, headroom, until_the_next_look
from tensorpipe_ipc.memory.extents import (
    BEYOND,
    KIND,
    SIZE_CLASS,
    UNIT,
    Extent,
    Extents,
    Places,
    Words,
    size_of,
    units_of,
)
from tensorpipe_ipc.memory.row import (
    ALLOCATING,
    HAZARDS,
    MAX_ROWS,
    RESERVED,
    WALKING,
    Operation,
    hazard_word,
    row_word,
)
from tensorpipe_ipc.memory.rows import ENDED, Prepared, Rows
from tensorpipe_ipc.memory.segment import APART, CAPACITY, GROWN, PAGE_LOCKED, SEEN, Segment

__all__ = [
    "FREE",
    "HEADER",
    "HELD",
    "KEPT",
    "QUEUED",
    "QUICK",
    "STEPS",
    "UNIT",
    "WRITING",
    "Arena",
    "Taker",
    "size_class_of",
    "payload_at",
]

SMALLEST = 9
SMALL = 448  # bytes of metadata and payload in the smallest block
HEADER = 64  # a cache line, and the alignment of every payload
CREDIT, NBYTES, METADATA = 1, 2, 3  # words of a block's header, after its state
METADATA_AT, PAYLOAD_AT = 4, 5  # where the two lie, counted from the block's begin, if the length says FORWARDED
FORWARDED = 1 << 31  # in the metadata's length: it lies not behind the header
WRITTEN = 6  # the one that says how many bytes of the block have pages; of blocks that are larger than a page

FREE, WRITING, QUEUED, HELD, KEPT = range(5)
STEPS = ("free", "being written", "queued", "held", "kept")
STEP_BITS, ROW_BITS, INCARNATION_BITS = 4, 12, 16
GENERATION_AT = STEP_BITS + ROW_BITS + INCARNATION_BITS
GENERATIONS = 1 << 32
HOLDER = (1 << GENERATION_AT) - 1  # a state without its generation: step, row, incarnation
_ROW = HOLDER - ((1 << STEP_BITS) - 1)

ALLOWANCE = 1 << 22  # bytes of growth between two looks at the machine's headroom, at most (about 60 us each)
PURSE = 1 << 16  # bytes of growth for small blocks that are had at once
STEP = 1 << 22  # bytes of pages that are made at once: a signal has the kernel begin anew
PAUSES = (0.001, 0.002, 0.004, 0.0)  # seconds; others that are getting memory have it soon
STOCK = 32  # small blocks that are made free ahead of need
_OLD = 16  # times that four old blocks are looked at, if all were free
RECENT = 32  # blocks in flight that are looked at first
QUICK = 16  # size class up to which a free block is taken without a look at those that others have just freed
TRIES = 4  # to have another process's block: others may be at it
SPARE_BEYOND = 16  # the part of the capacity that may lie free beyond it, for the next messages
SELDOM, LONGEST = 20, 10.0  # times as long as a look at all memory took it is put off; seconds at most
_OVERLAP, _AT_MOST = 1.5, 60.0  # times as long as until its own next look one process's is enough for others; seconds
IDLE = 3.0  # seconds for which nobody must have used an extent, so that what is free in it is given back
AT_ONCE, PARTS = 0.02, 16  # seconds for which one call gives idle memory back, and units of it at a time
WORTH = 1 << 20  # bytes of growth from which on it is worth looking for memory that lies idle


class Taker:
    """The holder of a block's number from when the block is WRITING until another word or state says what is to be done.

    Attributes:
        block: its offset; 0: none.
    """

    __slots__ = ("block",)

    def __init__(self) -> None:
        self.block = 0


class Arena(Extents):
    """One process's use of a segment: its row, its extents, its free blocks.

    Attributes:
        writing, held: the low half of a block's state while this process writes or holds it.
        free: by kind, blocks that are thought to be free.
        recent: by kind, blocks that this process took last.
        own: by kind, what an extent's word is while it is this process's.
        whole: the largest size class that is no larger than a page.
        maker: the process whose arena was the segment's first, where this is that one; else 0.
    """

    # As long as this process has no row: ``_unattached``.
    writing: int
    held: int
    queued: int
    own: list[int]
    free: defaultdict[int, list[int]]
    recent: defaultdict[int, deque[int]]
    _fresh: defaultdict[int, list[int]]
    _older: defaultdict[int, deque[int]]
    _purse: int
    _machine: int
    _looked: float
    _hazard: int

    def __init__(self, segment: Segment, capacity: int | None = None) -> None:
        """
        Args:
            capacity: bytes that the segment may cost, all processes together; None: half of what the machine has. What its
                first arena says counts for all.
        """
        super().__init__(segment, Rows(segment))
        self.maker = 0 if self.words[CAPACITY] else os.getpid()
        if self.maker:
            self.words[CAPACITY] = headroom() // 2 if capacity is None else capacity
        self.whole = segment.page.bit_length() - 1
        self.rows.after_fork(self._forget)
        self._forget()

    def _forget(self) -> None:
        vars(self).update(_unattached())
        self._claiming, self._sweeping = {}, set()
        self._window = threading.RLock()
        self._look_at, self._seen = monotonic() + IDLE, dict[int, tuple[int, int]]()
        self._own_sight = 0
        # What was found idle, and is yet to be given back, in parts. An iterator: threads take each part but once.
        self._idle: Iterator[list[Extent]] | None = None
        # Kinds of extents that were given back in part, whose lists are to be made anew at the end.
        self._changed = frozenset[int]()
        self._look_due_from = 0.0

    @property
    def capacity(self) -> int:
        """Bytes that the whole segment may cost, all processes together."""
        return self.words[CAPACITY]

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return Arena, (self.segment,)

    def attach(self, finish: Callable[[int], bool] | None = None) -> None:
        """Take a row, and with it the extents of the dead process that had it before. Nothing to do where there is one.

        Args:
            finish: what is to be done in a dead row before it is adopted; its blocks at least (``sweep``).
        """
        if self.rows.index >= 0:
            return
        self._join()
        self.rows.attach(finish or self.finish, self._begin)  # not kept: it is a method of what keeps this

    def _begin(self, row: int, incarnation: int) -> Prepared:
        """Return what is to be changed in this arena once it has a row."""
        first = hazard_word(row, 0)
        for start, stop in self.written(8 * first, 8 * (first + HAZARDS)):
            for word in range(max(first, start >> 3), stop >> 3):
                self.words[word] = 0  # the dead one's
        self.words[row_word(row) + RESERVED] = 0
        holder = incarnation << (STEP_BITS + ROW_BITS) | row << STEP_BITS
        prepared = _unattached()
        prepared |= {
            "writing": holder | WRITING,
            "queued": holder | QUEUED,
            "held": holder | HELD,
            "own": [units_of(kind) << 32 | kind << 16 | row + 1 for kind in range(KIND + 1)],
            "_hazard": hazard_word(row, ALLOCATING),
        }
        for start, kind, units in self._extents(row):
            lists = (prepared[name][kind] for name in ("free", "_fresh", "_older"))
            for blocks, some in zip(lists, self._sorted(start, kind, units), strict=True):
                blocks += some
        return vars(self), prepared

    # ---- allocation ----

    def allocate(
        self, nbytes: int, *, force: bool = False, taker: Operation | Taker | None = None, collected: bool = False
    ) -> int:
        """Return a block for ``nbytes`` of metadata and payload. Its state is WRITING.

        Args:
            force: even beyond the capacity, though not beyond what the machine has.
            taker: it knows the block from the moment on at which that is WRITING, whatever an exception then ends.
            collected: ``collect`` has just had what there was; nothing more is given back for it.

        Returns:
            Its offset in the segment; 0 when there is no room now.

        Raises:
            SharedMemoryError: there can never be room for so much.
        """
        kind, growth = size_class_of(nbytes), self._growth(nbytes)
        if not force:
            self.check(nbytes)
        self.mind_idle()
        block = self._allocate(kind, growth, taker)
        if not block and not collected:
            self.reclaim(self._useful(kind))
            if not self._lies_free(kind, growth):
                self._trim(growth)
            block = self._allocate(kind, growth, taker)
        return block or (self._allocate_beyond(kind | BEYOND, growth, taker) if force else 0)

    def check(self, nbytes: int) -> None:
        """
        Raises:
            SharedMemoryError: so many bytes of metadata and payload are more than the capacity.
        """
        if nbytes + HEADER > self.words[CAPACITY]:
            raise SharedMemoryError(
                errno.ENOSPC,
                f"a message of {nbytes} bytes can never fit: the arena's capacity is {self.capacity} bytes; "
                "send it in parts",
            )

    def _allocate(self, kind: int, growth: int, taker: Operation | Taker | None) -> int:
        taker = Taker() if taker is None else taker
        if kind > QUICK:
            self.reclaim_freed(kind)  # what was freed last is warm; it costs less than a copy of so much
        is_small, size, force, stale = self._is_small(kind), size_of(kind), bool(kind & BEYOND), 0
        while True:
            source = self._next(kind)
            if not source:
                if not self._has_room(size if is_small else growth, force) or not self._claim(kind):
                    return 0
                continue
            is_fresh = source is self._fresh[kind]
            if is_small and is_fresh and not self._has_purse(size, force):  # first: its state makes a page
                return 0
            block = self._start(source, kind, taker)
            if block and (is_small or self._has_pages(block, growth, force, taker)):
                self.recent[kind].append(block)
                if is_small and is_fresh:
                    self._purse -= size
                    self._stock(kind)
                return block
            if block:
                source.append(block)
                return 0
            stale += 1
            if stale == RECENT:  # others may have taken millions of blocks, and one by one takes longer
                self.reclaim({kind})

    def _allocate_beyond(self, kind: int, growth: int, taker: Operation | Taker | None) -> int:
        """Allocate by force. Where much lies free beyond the capacity, with any process, take a block from another one; where
        none of the kind can be had, all is given back, unless pages are locked: then it would only change hands."""
        free, same, total = list[Extent](), list[Extent](), 0
        for start, kind_, units, row, _ in self._words_of_extents():
            if kind_ & BEYOND:
                nbytes, whole = self._free_memory(start, kind_, *self.states(start, kind_, units))
                total += nbytes
                if nbytes or whole:
                    free.append((start, kind_, units))
                if whole and nbytes >= growth and kind_ == kind and row != self.rows.index:
                    same.append((start, kind_, units))
        if total > self.capacity // SPARE_BEYOND:
            first = self.rows.index % (len(same) or 1)  # not the same one for all who look at a time
            tried = (same[first:] + same[:first])[: 1 if self.words[APART] else TRIES]
            is_had = any(not self._take([extent], is_kept=True) for extent in tried)
            if not is_had and not self.words[PAGE_LOCKED]:
                self._take(free)
        return self._allocate(kind, growth, taker)

    def allocate_without_look(self, nbytes: int, taker: Operation | Taker | None) -> int:
        """Return a block beyond the capacity, without a look at all memory, as none is due; 0: the machine has none.

        Raises:
            SharedMemoryError: there can never be room for so much.
        """
        self.check(nbytes)
        kind, growth = size_class_of(nbytes) | BEYOND, self._growth(nbytes)
        self.reclaim_freed(kind)
        if self._lies_free(kind, growth):
            return self._allocate(kind, growth, taker)
        return self._allocate_beyond(kind, growth, taker)

    def is_look_due(self, nbytes: int) -> bool:
        """Return whether a look at all memory may find room for so much: some seconds after ``note_look``, if not before."""
        return monotonic() > self._look_due_from or self.capacity - self.segment.resident() >= self._growth(nbytes)

    def note_look(self, seconds: float) -> None:
        """Note that all that lies free was looked at, for so long, and was not enough: the next look is due later."""
        self._look_due_from = monotonic() + min(max(IDLE, SELDOM * seconds), LONGEST)

    def note_room(self) -> None:
        """Note that a look at all memory has found room. There may be more, and so the next is due at once."""
        self._look_due_from = 0.0

    def has_been_beyond(self, size_class: int) -> bool:
        """Return whether this process has ever had a block of that size beyond the capacity."""
        return size_class | BEYOND in self.free

    def _next(self, kind: int) -> list[int]:
        """Return a list whose last block is thought to be free; an empty one: there is none."""
        return self.reclaim_freed(kind) or self._fresh[kind]

    def _start(self, blocks: list[int], kind: int, taker: Operation | Taker, at: int = -1) -> int:
        """Have a block of a list WRITING, if it is free and its extent this process's. (extents.py, "Changing hands").

        Returns:
            The block, which the taker has; 0: it is not, and out of the list. Or the list is empty.
        """
        words, started = self.words, 0
        with self._window:  # threads share this hazard; signal handlers do not come in here, where nothing is called
            try:
                block = blocks[at]
                del blocks[at]
            except IndexError:
                return 0
            words[self._hazard] = block
            if words[self.table + (block >> 20)] == self.own[kind]:
                state = words[block >> 3] or words[self.floors + (block >> 20)] << GENERATION_AT
                if not state & HOLDER:
                    words[block >> 3] = state | self.writing
                    taker.block = started = block
            words[self._hazard] = 0
        return started

    def _stock(self, kind: int) -> None:
        """A few more small blocks than are needed: so that not each put of a message that is taken at once has to reclaim.

        400 bytes to and fro: 12 us a put instead of 17.
        """
        free, fresh = self.free[kind], self._fresh[kind]
        with contextlib.suppress(IndexError):  # another thread has them
            while len(free) < STOCK and self._purse >= size_of(kind):
                free.append(fresh.pop())
                self._purse -= size_of(kind)

    def discard(self, block: int) -> None:
        """A block that this process was writing, or had queued without giving its ticket, is free again.

        It still is among those that were taken last, where the next reclaim finds it. A child that was forked while its parent
        was at a block, and leaves that call by an exception, leaves the block alone.
        """
        words, word = self.words, block >> 3
        if words[word] & _ROW == self.writing & _ROW != 0:
            words[word] &= ~HOLDER

    def give_up(self, taker: Operation | Taker) -> None:
        """Free the block that a taker has. It has none any more. There is no call in here, and so no exception."""
        words, word = self.words, taker.block >> 3
        taker.block = 0
        if words[word] & _ROW == self.writing & _ROW != 0:
            words[word] &= ~HOLDER

    def reclaim_freed(self, kind: int) -> list[int]:
        """Look for blocks that others have freed. The list of free ones of that kind.

        Blocks in flight are young, the last 32 that were taken, or old. All the young are looked at. The old, which may be
        thousands under leases, are looked at in turn, each time until four of them are busy, or 64 were free: so their number
        costs nothing, and a free one among them is found within a quarter as many allocations.
        """
        free, recent, old = self.free[kind], self.recent[kind], self._older[kind]
        try:
            while len(recent) > RECENT:
                old.append(recent.popleft())
            self._partition(kind, recent, len(recent))
            for _ in range(_OLD):
                before = len(old)
                if not before or self._partition(kind, old, min(before, 4)):
                    break
        except IndexError as error:  # another thread is at it, too
            reraise_from_handler(error)
        return free

    def _partition(self, kind: int, blocks: deque[int], looks: int) -> bool:
        """Sort some blocks that were busy: those that are free go to the free ones. Return whether any still is busy.

        Of an extent that another process has taken the states are not read, and its blocks dropped. Where it was given up,
        reading would make a page that is nobody's.
        """
        words, table, own, free = self.words, self.table, self.own[kind], self.free[kind]
        is_any_busy = False
        for _ in range(looks):
            block = blocks.popleft()
            if words[table + (block >> 20)] == own:
                is_busy = words[block >> 3] & HOLDER
                (blocks if is_busy else free).append(block)
                is_any_busy = is_any_busy or bool(is_busy)
        return is_any_busy

    def reclaim(self, kinds: Collection[int] | None = None) -> None:
        """Make the lists anew by the states of all own blocks: when there is no room, or extents have changed hands.

        Args:
            kinds: those whose lists; None: all.
        """
        found: defaultdict[int, tuple[list[int], list[int], list[int]]] = defaultdict(lambda: ([], [], []))
        for start, kind, units in reversed(list(self._extents(self.rows.index))):  # the first is used first
            if kinds is None or kind in kinds:
                for blocks, some in zip(found[kind], self._sorted(start, kind, units), strict=True):
                    blocks += some
        for kind in {*found, *self.free} if kinds is None else kinds:
            free, fresh, busy = found[kind]
            self.recent[kind].clear()
            self.free[kind][:], self._fresh[kind][:], self._older[kind] = free, fresh, deque(busy)

    def _is_small(self, kind: int) -> bool:
        return kind & SIZE_CLASS <= self.whole

    def _useful(self, kind: int) -> set[int]:
        """Return which kinds' free blocks help where one of this kind is wanted: also those that can be punched out."""
        return {kind, *self._to_trim()}

    def _to_trim(self) -> list[int]:
        """Return the kinds of which free blocks can be punched out, the largest first."""
        kinds = list(self.free)
        return sorted((kind for kind in kinds if not (self._is_small(kind) or kind & BEYOND)), reverse=True)

    def _lies_free(self, kind: int, growth: int) -> bool:
        """Return whether the next free block of a kind has all the pages that are wanted of it."""
        last = self.free[kind][-1:]
        if not last or self.words[self.table + (last[0] >> 20)] != self.own[kind]:
            return False
        return self._is_small(kind) or self.words[(last[0] >> 3) + WRITTEN] >= growth

    def _has(self, start: int, kind: int, units: int) -> None:
        free, fresh, busy = self._sorted(start, kind, units)
        self.free[kind] += free
        self._fresh[kind] += fresh
        self._older[kind] += busy

    def _sorted(self, start: int, kind: int, units: int) -> tuple[list[int], list[int], list[int]]:
        """Return the blocks of an extent that are free, those that cost nothing or little yet, and those that are busy."""
        is_small, bits = self._is_small(kind), kind & SIZE_CLASS
        count = units * UNIT - (self.segment.page if is_small else 0) >> bits  # a hole: extents.py, "Walking"
        blocks, states = self.states(start, kind, units)
        held = (states & np.uint64(HOLDER)) != FREE
        warm = (self.numbers[(blocks >> 3) + WRITTEN] > self.segment.page) | is_small
        fresh = np.ones(units * UNIT >> bits, np.bool_)
        fresh[(blocks[held | warm] - start) >> bits] = False
        cold = start + (np.flatnonzero(fresh[:count])[::-1] << bits)
        return blocks[~held & warm].tolist(), cold.tolist(), blocks[held].tolist()

    # ---- memory ----

    def _growth(self, nbytes: int) -> int:
        """Return bytes of pages that so many bytes of metadata and payload lie on."""
        return -(-(nbytes + HEADER) // self.segment.page) * self.segment.page

    def _has_purse(self, size: int, force: bool) -> bool:
        """Have memory for a small block that costs some."""
        if self._purse < size:
            for nbytes in (size if force else max(PURSE, self.segment.page), size):
                if self._has_room(nbytes, force):
                    self._purse += nbytes
                    self._count_growth(nbytes)
                    break
        return self._purse >= size

    def _has_pages(self, block: int, growth: int, force: bool, taker: Operation | Taker) -> bool:
        """Have memory for what is to be written into a large block that is WRITING. False: there is no room, and it is FREE."""
        have, done = self.words[(block >> 3) + WRITTEN], False
        try:
            done = growth <= have or self._grow(block, have, growth, force)
            return done
        finally:
            if not done:
                self.give_up(taker)

    def reach(self, block: int, end: int) -> bool:
        """Have memory for a block that this process holds, up to an end in it. False: there is no room."""
        have, wanted = self.words[(block >> 3) + WRITTEN], -(-(end - block) // self.segment.page) * self.segment.page
        if wanted <= have or self._is_small(self.words[self.table + (block >> 20)] >> 16):
            return True
        return self._grow(block, have, wanted, False)

    def _grow(self, block: int, have: int, wanted: int, force: bool) -> bool:
        """Make pages of a block, once there is room for them, also beside what others are about to make.

        What is made is told step by step: an exception, or a kill, may end it, and then others look for what lies there.
        Threads do so at the same time. Each changes its part of the row's word without a call.
        """
        words, row, written = self.words, self.rows.index, (block >> 3) + WRITTEN
        reserved, left = row_word(row) + RESERVED, wanted - have
        words[reserved] += left
        try:
            if not self._has_room(left, force, counted=left):
                return False
            for first in range(have, wanted, STEP):
                step = min(STEP, wanted - first)
                self._count_growth(step)
                if not self.segment.reserve(block + first, block + first + step):
                    words[written] = have
                    return False
                words[written] = first + step
                words[reserved] -= step
                left -= step
            return True
        finally:
            if row == self.rows.index:  # and not in a child that was forked meanwhile
                words[reserved] -= left
                self._punch_untold(block, wanted)

    def _punch_untold(self, block: int, nbytes: int) -> None:
        """Give back what an exception, or a kill, came between the making and the telling of."""
        self.segment.punch(block + max(self.words[(block >> 3) + WRITTEN], self.segment.page), block + nbytes)

    def _count_growth(self, nbytes: int) -> None:
        self._machine -= nbytes
        # Of all processes: many may have grown by little each, and be gone.
        if not self.words[GROWN] and self.segment.resident() + nbytes >= WORTH:
            self.words[GROWN] = 1

    def _has_room(self, nbytes: int, force: bool, *, counted: int = 0) -> bool:
        """
        Args:
            counted: bytes of them that the own row says already that it is about to get.
        """
        for pause in PAUSES:
            others = max(0, self._reserved() - counted)  # first: what becomes pages in between counts twice, not never
            room = self.capacity - self.segment.resident()
            if room < nbytes and not force:
                return False
            if self._machine < nbytes or nbytes >= WORTH or monotonic() > self._looked + OUTDATED:
                self._looked = monotonic()
                left = headroom() - others - _tables(nbytes) - PURSE
                self._machine = min(left, max(until_the_next_look(left, ALLOWANCE), nbytes))
            if self._machine >= nbytes and (force or room - others >= nbytes):
                return True
            if not others:
                return False
            sleep(pause)
        return False

    def _reserved(self) -> int:
        """Return bytes that processes are about to get, this one's threads included."""
        total = 0
        for row in self.rows.used():
            nbytes = self.words[row_word(row) + RESERVED]
            if nbytes and self.rows.is_alive(row):
                total += nbytes
        return total

    def _short_of(self, nbytes: int, spare: int = ALLOWANCE) -> int:
        """Return bytes that have to be given back before there is room for so many, and the machine has some to spare."""
        left = headroom() - _tables(nbytes) - spare
        return nbytes + self._reserved() - min(self.capacity - self.segment.resident(), left)

    def _trim(self, nbytes: int) -> None:
        """Give back memory of own free blocks, largest and coldest first, until there is room."""
        self._purse = self._machine = 0
        short = 0
        for kind in self._to_trim():
            blocks = self.free[kind]
            for _ in range(len(blocks)):
                # Not for each block: a look costs several times what it does to give one back.
                if short <= 0 and (short := self._short_of(nbytes)) <= 0:
                    return
                short -= self._punch_out(blocks, kind)

    def _punch_out(self, blocks: list[int], kind: int) -> int:
        """Give back all of the first of some free blocks but the page with its state. Bytes."""
        taker = Taker()
        try:
            block = self._start(blocks, kind, taker, at=0)
            return self.shrink(block) if block else 0
        finally:
            if taker.block:
                self.words[taker.block >> 3] &= ~HOLDER  # with no call: nobody else knows that it is being written
                self._fresh[kind].append(taker.block)

    def shrink(self, block: int) -> int:
        """Give back all of a block that this process has but the page with its state. Bytes. Its content nobody may need."""
        page, written = self.segment.page, (block >> 3) + WRITTEN
        size, before = size_of(self.words[self.table + (block >> 20)] >> 16), self.words[written]
        if size > page:
            self.words[written] = min(before, page)  # first: killed after it, pages are counted twice
            if self.segment.punch(block + page, block + size):
                return max(0, before - page)
            self.words[written] = before  # else what is there would have to find room once more
        return 0

    def shorten(self, block: int, nbytes: int) -> None:
        """Give back what a block that this process has just taken has behind so many bytes: pages of a larger message."""
        written, pages = (block >> 3) + WRITTEN, self._growth(nbytes)
        before = self.words[written]
        if before > pages and not self._is_small(self.words[self.table + (block >> 20)] >> 16):
            self.words[written] = pages  # first, as in shrink
            if not self.segment.punch(block + pages, block + before):
                self.words[written] = before

    def collect(self, nbytes: int) -> None:
        """Have room for so many bytes, if there is free memory, whoever's, that makes it.

        Own extents that are free are given up, then those of others, the dead first; of extents that are free in part, the
        free blocks are punched out. Where all that is free is not enough, others keep theirs.
        """
        missed, kind = set[int](), size_class_of(nbytes)
        self.reclaim(self._useful(kind))
        if self._lies_free(kind, self._growth(nbytes)):
            return
        while (refused := self._collect(nbytes, missed)) - missed:
            missed |= refused

    def _collect(self, nbytes: int, missed: Container[int]) -> set[int]:
        """Collect once. What somebody is at is left alone.

        Args:
            missed: units of extents that somebody is at, and may be stopped: others are taken instead.

        Returns:
            The units of further ones.
        """
        # A fresh block's state, and the two words of its extent, may each make a page before there is a look at the room.
        kind, beside = size_class_of(nbytes), 3 * self.segment.page
        growth = self._growth(nbytes) + beside
        short, no_addresses = self._short_of(growth), not self._next(kind) and self._lacks_addresses(kind)
        if short <= 0 and not no_addresses:
            return set()
        self._punch_gaps()
        short = self._short_of(growth)
        found, same, chosen = list[tuple[bool, int, bool, Extent]](), list[tuple[int, int, Extent]](), list[Extent]()
        for start, kind_, units_, row, _ in self._words_of_extents():
            if start >> 20 not in missed:
                extent, (blocks, states) = (start, kind_, units_), self.states(start, kind_, units_)
                is_anothers = row != self.rows.index and self.rows.is_alive(row)
                free, whole = self._free_memory(start, kind_, blocks, states)
                found.append((is_anothers, free, whole, extent))
                # Not those beyond the capacity: the next such message uses them.
                if whole and row == self.rows.index and not kind_ & BEYOND:
                    chosen.append(extent)
                if kind_ == kind:
                    busy = int(np.count_nonzero(states & np.uint64(HOLDER)))
                    same.append((busy, len(states) - busy if row != self.rows.index else 0, extent))
        mine, more = set(chosen), list[Extent]()
        if no_addresses:
            more += [extent for _, _, whole, extent in found if whole and extent not in mine]
            # And one whose free blocks are of the right size: what is free as a whole may not lie in a row, or there is none.
            more += [extent for busy, _, extent in sorted(same)[:1] if 0 < busy < extent[2] * UNIT >> kind]
        mine |= set(more)
        freed = sum(free for _, free, _, extent in found if extent in mine)
        short -= freed
        others = [each for each in found if each[1] and each[3] not in mine]
        least = self._short_of(growth, PURSE) - freed if short > 0 else 0
        if 0 < short and least <= sum(free for _, free, _, _ in others) + beside:
            for _, free, _, extent in sorted(others, key=lambda each: (each[0], not each[2], -each[1])):
                if short > 0:
                    more.append(extent)
                    short -= free
        elif short > 0 and self._is_small(kind):
            # No memory is free, but perhaps blocks of this kind are, with others, each beside a message on its page.
            more += [extent for _, free, extent in sorted(same, key=lambda each: -each[1])[:1] if free]
        refused = self._take(chosen + more)
        self._trim(growth)
        return refused

    def lacks(self, nbytes: int) -> bool:
        """Return whether there is no room for so much, what lies free included; or there are no addresses."""
        free = 0 if self.words[PAGE_LOCKED] else self._free_bytes()
        least = self._growth(nbytes) + 3 * self.segment.page + _tables(nbytes) + PURSE  # as in _collect
        return headroom() + free < least or self._lacks_addresses(size_class_of(nbytes))

    def _lacks_addresses(self, kind: int) -> bool:
        units = units_of(kind)
        return self._gap(self._first_unit, units) + units > self._units

    def is_beyond(self, block: int) -> bool:
        """Return whether a block lies beyond the capacity. Its extent stays: the caller has the block."""
        return bool(self.words[self.table + (block >> 20)] >> 16 & BEYOND)

    def block_around(self, offset: int) -> int:
        """Return the begin of the block that a byte of the segment lies in. Its extent stays: the caller has the block."""
        unit, words, table = offset >> 20, self.words, self.table
        while unit and not words[table + unit]:  # it is not the first one of its extent
            unit -= 1
        size = size_of(words[table + unit] >> 16)
        return offset & -size if size < UNIT else unit << 20

    def is_free_within(self) -> bool:
        """Return whether what is in use is within the capacity, though nothing of what is free can be given back for more."""
        return bool(self.words[PAGE_LOCKED]) and self.segment.resident() - self._free_bytes() <= self.capacity

    def is_for_tensors(self, block: int) -> bool:
        """Return whether tensors may lie on a block. The upper half of the addresses is left to messages on their way."""
        return block >> 20 < self._first_unit + self._units >> 1

    def why_no_room(self, nbytes: int) -> str:
        """Return what there is no room for, for people."""
        kind, text = size_class_of(nbytes), f"no {nbytes} bytes free"
        if not self._lacks_addresses(kind):
            return text
        addresses, row = self._units - self._first_unit, 1 << max(0, kind - 20)
        return f"{text}, and of {addresses} MiB of addresses no {row} MiB in a row (raise the limit: ulimit -v)"

    def _free_memory(self, start: int, kind: int, blocks: Places, states: Words) -> tuple[int, bool]:
        """Return bytes of memory in the free blocks of an extent that could be given back, and whether all are free."""
        free = (states & np.uint64(HOLDER)) == FREE
        if self._is_small(kind):
            nbytes = sum(stop - begin for begin, stop in self.free_runs(start, kind, blocks, states))
        else:
            nbytes = self._memory_of(blocks[free])
        return nbytes, bool(free.all())

    def _memory_of(self, blocks: Places) -> int:
        """Return bytes of memory of blocks that are larger than a page. What nobody filled has pages, too, of which no hole
        tells."""
        return int(np.maximum(self.numbers[(blocks >> 3) + WRITTEN], np.uint64(self.segment.page)).sum())

    def _free_bytes(self) -> int:
        """Return bytes of memory in all free blocks, whoever has them."""
        return sum(
            self._free_memory(start, kind, *self.states(start, kind, units))[0]
            for start, kind, units, _ in self.all_extents()
        )

    def unleased(self) -> list[Extent]:
        """Return the extents but those whose blocks all are under lease here: nothing is free there, and nothing waits.

        A process may keep thousands of tensors, and a walk is not to look at each of them.
        """
        words = np.array(list(self.leased), np.int64)
        words = words[self.numbers[words] & np.uint64(HOLDER) == np.uint64(self.held)]
        numbers, counts = np.unique(words * 8 // UNIT, return_counts=True)
        sizes = (self.numbers[self.table + numbers] >> np.uint64(16) & np.uint64(SIZE_CLASS)).astype(np.int64)
        full = set(numbers[counts >= np.maximum(1, UNIT >> sizes)].tolist())
        return [(start, kind, units) for start, kind, units, _ in self.all_extents() if start // UNIT not in full]

    def trim(self) -> int:
        """Give back all free memory, whoever has it. Bytes."""
        before = self.segment.resident()
        self._purse = 0
        wanted = [
            (start, kind, units)
            for start, kind, units in self.unleased()
            if any(self._free_memory(start, kind, *self.states(start, kind, units)))
        ]
        self._take(wanted)
        self._trim(1 << 62)
        self._punch_gaps()
        return max(0, before - self.segment.resident())

    def mind_idle(self, look: Callable[[], object] = lambda: None, *, waits: bool = False) -> None:
        """Give back what lies free in extents that were not used for some seconds, whoever's. Cheap where nothing is due, and a
        twentieth of the time where much waits.

        Args:
            look: called first, where something is due: it frees what the dead had.
            waits: do nothing if another process has just looked, and has given back all that it found. One is enough for many
                that wait, and goes on as it began: it finds what was not used since its last look.
        """
        now = monotonic()
        is_due = now >= self._look_at
        if not (is_due or self._idle) or self.rows.index < 0:
            return
        if not is_due:
            self._give_back_some()
            return
        self._look_at = now + IDLE
        if self.words[GROWN] and not (waits and self._is_seen(now)):
            began = thread_time()  # a time for which the process was stopped does not count
            is_first = not self._seen  # it may end before it has found anything
            look()
            self._give_back_idle()
            pause = max(IDLE, SELDOM * (thread_time() - began))
            self._look_at = now + pause
            if not (is_first or self.is_giving_back):
                self._see_for(now, pause)

    @property
    def rest(self) -> float:
        """Return for how many seconds ``mind_idle`` need not be called."""
        return IDLE if self.rows.index < 0 else min(max(0.01, self._look_at - monotonic()), LONGEST)

    def _is_seen(self, now: float) -> bool:
        """Return whether another process's look is enough for now. Its clock may be another one, in a namespace of its own."""
        seen = self.words[SEEN]
        return seen != self._own_sight and 0 < seen * 1e-9 - now < _AT_MOST

    def _see_for(self, now: float, seconds: float) -> None:
        """Have this process's look be enough until its next one, and a while longer."""
        self._own_sight = self.words[SEEN] = int((now + min(seconds * _OVERLAP, _AT_MOST)) * 1e9)

    def _give_back_idle(self) -> None:
        """Give back what is free in extents whose states are those of the last look: nobody has used them in between.

        What takes long is left to the next calls.
        """
        if self.words[PAGE_LOCKED]:  # nothing can be given back any more
            self.words[GROWN] = 0
            return
        before, seen, idle, left = self._seen, dict[int, tuple[int, int]](), set[Extent](), 0
        resident = self.segment.resident()
        for start, kind, units, _ in self.all_extents():
            blocks, states = self.states(start, kind, units)
            seen[start] = kind, int(states.sum())
            if before.get(start) == seen[start] and any(self._free_memory(start, kind, blocks, states)):
                idle.add((start, kind, units))
                continue
            left += len(blocks) * size_of(kind) if self._is_small(kind) else self._memory_of(blocks)
        self._seen = seen
        if not idle and left < WORTH:  # else who is killed at it, or kept from some, leaves that to the next look
            self.words[GROWN] = 0
            if self.segment.resident() > resident:  # somebody has grown meanwhile
                self.words[GROWN] = 1
        self._punch_gaps()
        self._idle = iter(self._in_parts(idle))
        self._give_back_some()

    def _in_parts(self, extents: Iterable[Extent]) -> list[list[Extent]]:
        parts, units = list[list[Extent]](), PARTS
        for extent in extents:
            if units >= PARTS and not (parts and self.words[APART]):
                parts.append([])
                units = 0
            parts[-1].append(extent)
            units += extent[2]
        return parts

    def _give_back_some(self) -> None:
        idle, until = self._idle, monotonic() + AT_ONCE
        for part in idle or ():
            changed = set[int]()
            try:
                self._take(part, changed=changed)
            finally:
                self._changed |= changed
            if monotonic() >= until:
                for kind in filter(self._is_small, self._changed):
                    self.free[kind].clear()  # or the pages that were given back would be taken anew, and nobody asked
                return
        if self._idle is idle:  # else another thread has found more
            self._idle = None
        changed, self._changed = set(self._changed), frozenset()
        if changed:
            self.reclaim(changed)

    @property
    def is_giving_back(self) -> bool:
        """Return whether idle memory was found that is yet to be given back: the next call of ``mind_idle`` goes on."""
        return self._idle is not None

    # ---- the dead ----

    def finish(self, row: int) -> bool:
        """All that is to be done in a dead row where there are no queues."""
        done = row in self.sweep([row])
        if done:
            self.rows.finished(row)
        return done

    def sweep(self, rows: Sequence[int], spared: Mapping[int, Container[int]] | None = None) -> set[int]:
        """Free what dead rows were writing or held, wherever it lies, in one look. The caller has the rows' locks.

        May be cut short anywhere: whoever comes next finds the rest.

        Args:
            rows: at least one.
            spared: by row, blocks of it to leave alone, as a token there names them that only others can judge.

        Returns:
            Those of which that was all: what is held stays so while a child of the dead process may read it.
        """
        words, of_row, done, spared = self.words, dict[int, int](), set(rows), spared or {}
        for row in rows:
            of_row[self.rows.holder(row) | WRITING] = row
            if self.rows.has_fork_marker(row):
                done.discard(row)
            else:
                of_row[self.rows.holder(row) | HELD] = row
        self._sweeping.add(rows[0])
        try:
            for start, kind, units, in_doubt in self.walk(hazard_word(rows[0], WALKING)):
                for block in self.blocks_that(start, kind, units, HOLDER, of_row):
                    state = words[block >> 3] & HOLDER
                    dead = of_row.get(state)  # None: it has changed, in an extent that changes hands
                    if dead is not None and block not in spared.get(dead, ()):
                        if in_doubt:
                            done.discard(dead)
                        else:
                            if not self._is_small(kind) and state & 15 == WRITING:
                                self._punch_untold(block, size_of(kind))
                            words[block >> 3] &= ~HOLDER
        finally:
            self._sweeping.discard(rows[0])
        return done

    def inherit(self, row: int) -> None:
        """Take over the extents of a dead and finished row, whose lock the caller has: nobody allocates from them."""
        for start, kind, units in list(self._extents(row)):
            unit = start >> 20
            with self._alone(unit, units) as alone:
                if alone and self.words[self.table + unit] & 0xFFFF == row + 1:
                    self.words[self.table + unit] = self._own(kind, units)
                    self._has(start, kind, units)

    def is_in_use(self) -> bool:
        """Return whether anybody has any block in the works or holds one."""
        return any(len(rows) for rows, *_ in self._in_use())

    def holders(self) -> dict[int, tuple[int, int]]:
        """By row: how many blocks its process has in the works or holds, with how many bytes of payload.

        What those have put that have ended, and whose rows are others' by now, is counted under ``ENDED``.
        """
        return self.some_holders(math.inf)[0]

    def some_holders(self, seconds: float) -> tuple[dict[int, tuple[int, int]], bool]:
        """Return the same, as far as is seen in so many seconds of this thread's own, and whether that is all."""
        counts, sums = np.zeros(ENDED + 1, np.int64), np.zeros(ENDED + 1, np.uint64)
        until, incarnations = thread_time() + seconds, self.rows.incarnations()
        is_all = True
        for rows, of, payloads in self._in_use():
            if (incarnations[rows] != of).any():
                incarnations = self.rows.incarnations()  # anew: one may just have come
                rows[incarnations[rows] != of] = ENDED
            np.add.at(counts, rows, 1)
            np.add.at(sums, rows, payloads)
            if thread_time() > until:
                is_all = False
                break
        return {row: (int(counts[row]), int(sums[row])) for row in np.flatnonzero(counts).tolist()}, is_all

    def _in_use(self) -> Iterator[tuple[Places, Places, Words]]:
        """Of each extent's blocks that are in the works or held: rows and incarnations of those who have them, and payloads."""
        for start, kind, units, _ in self.all_extents():
            seen = (-1, 0)  # where it is given to others meanwhile, a message's content may have been read as states
            while seen != (kind, units):
                seen = kind, units
                blocks, states = self.states(start, kind, units)
                states &= np.uint64(HOLDER)
                busy = (states != FREE) & (states != KEPT)
                holders = (states[busy] >> np.uint64(STEP_BITS)).astype(np.int64)
                payloads, word = self.numbers[(blocks[busy] >> 3) + NBYTES], self.words[self.table + (start >> 20)]
                kind, units = word >> 16 & KIND, word >> 32
            yield holders & MAX_ROWS - 1, holders >> ROW_BITS, payloads


def _unattached() -> dict[str, Any]:
    """Return the attributes of an arena that depend on its row, where it has none."""
    return {
        "writing": 0,
        "held": 0,
        "queued": 0,
        "own": [0] * (KIND + 1),
        "free": defaultdict(list),
        "_fresh": defaultdict(list),
        "recent": defaultdict(deque),
        "_older": defaultdict(deque),
        "_purse": 0,
        "_machine": 0,
        "_looked": 0.0,
        "_hazard": 0,
    }


def size_class_of(nbytes: int) -> int:
    """Return the size class of a block with room for so much metadata and payload: the exponent of its size."""
    return (nbytes + HEADER - 1).bit_length() if nbytes > SMALL else SMALLEST


def payload_at(block: int, metadata: int) -> int:
    """Return where the payload begins behind so many bytes of metadata."""
    return block + HEADER + (metadata + 63 & -64)


def _tables(nbytes: int) -> int:
    """Return the bytes of page tables for so many bytes, which a cgroup counts, too."""
    return nbytes >> 9
