"""Extents: the division of a segment, which process has which part, and how a part changes hands while its owner lives.

::

    memory/rows.py ┬ table: a word per unit ┬ floors: a word per unit ┬ unit ┬ unit ┬ …   a unit is 1 MiB, numbered from
                   │ (its page is a hole    │ (as the table)          │                   the segment's start: unit u is
                   │ until it is needed)    │                         │                   at u << 20

    a unit's word    63 ──────── 32 31 ─────── 30 ─ 16 15 ────── 0
                     │ units       │ in doubt  │ kind │ row + 1  │    of the first unit of an extent; 0 elsewhere
                     └─────────────┴───────────┴──────┴──────────┘

**An extent** belongs to one row and is cut into blocks of 2 ** size class bytes. A large message is one block of several
units. Its *kind* is this size class, and whether its blocks lie beyond the capacity (arena.py). The extent's word changes only
under an OFD lock on bytes that stand for its units. These bytes lie beyond the segment's end, where no other lock of this
package lies. Processes try the lock without waiting, so a process that is stopped there keeps others from these units only. The
word is stored before the extent is used, so the layout can be walked after a kill at any store.

**Changing hands.** The owner takes free blocks of an extent without asking any process (arena.py). Yet another process can
get the extent. Before the owner writes the state of a free block, it takes these steps, without a lock or a barrier::

    owner                                        taker, which has the units' lock
    1  hazard = the block                        1  the extent's word = taker's row, in doubt
    2  read extent's word and state; not mine,   2  barrier: all that was stored before is seen now
       or not FREE? hazard = 0, drop the entry   3  read the hazards of all rows whose process lives
    3  block WRITING                                one in this extent? then leave the word as it is, for the next look
    4  hazard = 0                                4  the word, no longer in doubt: or 0, see below

Either the owner's step 2 sees the taker's step 1, or the taker's step 3 sees the owner's step 1. So after a step 3 that found
no hazard, only the taker can move a block of the extent from FREE to WRITING. A dead row's hazard does not count, because that
process stores nothing more. A process that adopted the row meanwhile does not matter either: it reads the word after that. A
process that is stopped between its steps keeps some memory from being given back: one extent for each of its threads, or a
sixteenth of what it is taking itself. No process waits for it; others are taken from instead. A taker that is killed anywhere
leaves a word that is right, or in doubt. No process allocates from an extent in doubt, and the next one that needs memory
begins at step 1.

The barrier is the quick one (barrier.py). So each process registers for it before it has a row, and with the row extents. A
process that the kernel does not let register stores ``apart`` in the segment's head, once and for all, and takes a slow barrier
before it goes on. A taker reads ``apart`` after its quick barrier, and takes a slow one if it is set. If the taker reads 0,
every process saw its step 1 before the other's slow barrier was over. So that process's step 2 sees it, whatever it does later.

An owner discovers its losses gradually, block by block: steps 1 to 4 tell what an entry of its lists is worth.

**Giving up.** An extent whose blocks are all FREE after step 3 stays so. Its *floor* rises above the generations of all its
blocks, its pages are punched out, and last its word becomes 0. Then its addresses belong to any process, for any kind of
block. A block whose state is 0 begins with its unit's floor as generation. So generations never go down, and an outdated
ticket, queue number or lease is recognised. A kill before the last store leaves the extent to its owner, or in doubt, with
blocks that read 0. If only a part of an extent is free, the taker can punch out its free blocks in the same way, as far as
they are whole pages, once the floor is higher; their states go, too. So a few small messages do not keep the memory of
thousands. Or the taker keeps the extent as it is, with its pages.

**Walking.** A process that looks for blocks of a dead row, or of a queue that is gone, writes to blocks in the extents of
others. The blocks that it looks for are not FREE, so their extents are not given up. But it must not mistake a place for a
block. So it first stores a hazard of its own, and then reads the extent's word. In an extent in doubt that hazard may come too
late. There it takes the units' lock as well: then the process that left the doubt is dead, or no longer at work on it. If it
does not get the lock, it writes nothing, and comes again (``staying``). It must not wait for a process that needs memory: the
blocks that it frees may be all that the other process would take the extent for.

No state is read from a page that was never written, as reading would make the page, and cost memory. The kernel tells where
the next page is (``SEEK_DATA``), which is enough for blocks larger than a page, and where the next hole is. The search for a
hole goes on until it finds one. So *the last page of each extent of smaller blocks stays a hole*: otherwise a look at n MiB of
them would cost n searches through up to n MiB. Only addresses are lost by that.

A read may come too late after that question: the extent is given up in between, and reading makes its pages anew, though they
lie in no extent. So a process that gives memory back looks for such pages, too (``_punch_gaps``).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory import barrier
from tensorpipe_ipc.memory.row import HAZARDS, ROWS_END, hazard_word
from tensorpipe_ipc.memory.rows import Rows
from tensorpipe_ipc.memory.segment import APART, PAGE, Segment

__all__ = ["BEYOND", "IN_DOUBT", "KIND", "UNIT", "Extents", "block_around", "size_of", "units_of"]

UNIT = 1 << 20
IN_DOUBT = 1 << 31
KIND = 0x7F  # of an extent's word, 16 bits further up: the size class of its blocks,
SIZE_CLASS = 0x3F
BEYOND = 0x40  # and whether they are for messages beyond the capacity alone
_SHAPE = ~(IN_DOUBT | 0xFFFF)  # of a word: how many units, and which kind
_NO_HAZARDS = bytes(8 * HAZARDS)
_FEW = 8  # states to be compared with one by one
_PARTS = 16  # into which it is cut what is taken at once
_LOCKS = 1 << 62  # where the bytes begin that stand for units, when they are locked
_HOLDER = (1 << 32) - 1  # of a block's state: step, row, incarnation

_FREE_BITS = np.uint64(_HOLDER)
_GENERATION_AT = _UNITS_AT = np.uint64(32)

Extent = tuple[int, int, int]  # offset, kind, units
Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


def block_around(segment: Segment, place: int) -> int:
    """Return where the block begins that a place lies in, of a block that is not FREE. The process may be attached or not."""
    unit, table = place // UNIT, ROWS_END // 8
    while unit and not segment.words[table + unit]:
        unit -= 1
    start, size_class = unit * UNIT, segment.words[table + unit] >> 16 & SIZE_CLASS
    return start + (place - start >> size_class << size_class)


class Extents:
    """One process's view of a segment's extents."""

    def __init__(self, segment: Segment, rows: Rows) -> None:
        self.segment, self.words, self.rows = segment, segment.words, rows
        self.numbers: Words = segment.octets[: segment.size & -8].view(np.uint64)  # the words, for many at once
        self._units = segment.size // UNIT
        self.table = ROWS_END // 8
        self.floors = self.table + self._units
        self._first_unit = -(-(ROWS_END + 16 * self._units) // UNIT)
        self._claiming: dict[int, list[int]] = {}  # by unit: the thread, or interrupted code, that is at it
        self._sweeping: set[int] = set()  # dead rows that this process is at
        self.leased: Mapping[int, object] = {}  # by the word: blocks of tensors here

    # ---- what the arena knows ----

    def _has(self, start: int, kind: int, units: int) -> None:
        """An extent has become this process's; its word says so."""
        raise NotImplementedError

    def reclaim(self, kinds: Collection[int]) -> None:
        """Extents of these kinds have become this process's."""
        raise NotImplementedError

    def unleased(self) -> list[Extent]:
        """Return the extents but those whose blocks all are under lease here: nothing is free there, and nothing waits."""
        raise NotImplementedError

    # ---- claiming ----

    def _claim(self, kind: int) -> bool:
        """Make free units an extent of this row's. Whether there are so many in a row.

        Raises:
            SharedMemoryError: nor will there ever be.
        """
        units, unit = units_of(kind), self._first_unit
        if unit + units > self._units:
            raise SharedMemoryError(
                errno.ENOSPC,
                f"no {units} MiB of addresses in a row in a segment of {self._units} MiB; "
                "raise the limit on address space (ulimit -v)",
            )
        while True:
            unit = self._gap(unit, units)
            if unit + units > self._units:
                return False
            if self._claim_at(unit, units, kind):
                return True
            unit += 1

    def _claim_at(self, unit: int, units: int, kind: int) -> bool:
        """Make these units an extent, unless they are none that are free, or somebody else is at them. Whether they are."""
        with self._alone(unit, units) as alone:
            if not alone or self._gap(unit, units) != unit:
                return False
            self.words[self.table + unit] = self._own(kind, units)
            self._has(unit * UNIT, kind, units)
            return True

    def _own(self, kind: int, units: int) -> int:
        return units << 32 | kind << 16 | (self.rows.index + 1)

    @contextlib.contextmanager
    def _alone(self, unit: int, units: int) -> Iterator[bool]:
        """True while nobody else changes the words of these units; False where somebody may be at it. Never waits."""
        mine: list[int] = []  # to the kernel all threads of this process are one holder, so they are told apart here
        locked = tried = False
        try:
            for each in range(unit, unit + units):
                mine.append(each)  # first: an exception may come as soon as it is claimed
                if self._claiming.setdefault(each, mine) is not mine:
                    break
            else:
                tried = True
                locked = self.rows.try_lock(_LOCKS + unit, units)
            yield locked
        finally:
            # What an exception of a signal's handler ends here is done again, for nobody else would.
            try:
                if tried:
                    self.rows.unlock(_LOCKS + unit, units)
            except BaseException:
                self.rows.unlock(_LOCKS + unit, units)  # as ``mine`` stands there, no other thread has them
                raise
            finally:
                try:
                    self._unclaim(mine)
                except BaseException:
                    self._unclaim(mine)
                    raise

    def _unclaim(self, mine: list[int]) -> None:
        while mine:
            each = mine[-1]
            if each in self._claiming and self._claiming[each] is mine:  # not in a child that was forked meanwhile
                del self._claiming[each]
            del mine[-1]

    def _gap(self, unit: int, units: int) -> int:
        """Return the first unit from ``unit`` on that so many free ones begin with.

        All words at once: a backlog has one more extent each time, and one by one their time would grow with its square.
        """
        starts, ends = list[Places](), [np.array([unit])]
        for first, words in self._table():
            used = np.flatnonzero(words)
            starts.append(first + used)
            ends.append(first + used + (words[used] >> _UNITS_AT).astype(np.int64))
        starts.append(np.array([1 << 62]))
        before = np.maximum.accumulate(np.concatenate(ends))  # of each extent: where those in front of it end
        return int(before[np.argmax(np.concatenate(starts) >= before + units)])

    # ---- changing hands ----

    def _join(self) -> None:
        """Have the barriers of takers reach this process. To be called before it has a row."""
        if not barrier.join():
            self.words[APART] = 1
            barrier.slow()

    def _take(self, wanted: Sequence[Extent], *, is_kept: bool = False, changed: set[int] | None = None) -> set[int]:
        """Have extents, whoever has them now, and give up those that are wholly free. What somebody is at stays in doubt.

        Who is stopped here keeps what it has marked from all others: so that is a sixteenth of the extents, unless each time
        costs a slow barrier.

        Args:
            is_kept: give nothing up, and no page.
            changed: gets the kinds whose lists are to be made anew, which is the caller's then: it takes the longer the more
                there is.

        Returns:
            The units of those that somebody else is at.
        """
        step = -(-len(wanted) // (1 if self.words[APART] else _PARTS)) or 1
        missed, kept = set[int](), set[int]() if changed is None else changed
        for i in range(0, len(wanted), step):
            missed |= self._take_some(wanted[i : i + step], kept, is_kept)
        if kept and changed is None:
            self.reclaim(kept)
        return missed

    def _take_some(self, wanted: Sequence[Extent], kept: set[int], is_kept: bool) -> set[int]:
        """
        Args:
            kept: gets the kinds of those that are not given up.
        """
        missed = {start >> 20 for start, *_ in wanted}
        with contextlib.ExitStack() as held:
            marked = [extent for extent in wanted if self._mark(held, *extent)]
            if not marked:
                return missed
            if not barrier.quick() or self.words[APART]:
                barrier.slow()
            hazards = self._hazards()
            for start, kind, units in marked:
                if start >> 20 in hazards:
                    continue
                missed.discard(start >> 20)
                if not is_kept and self._is_free(start, kind, units) and self._give_up(start, kind, units):
                    continue
                kept.add(kind)
                if not is_kept:
                    self._punch_free(start, kind, units)
                self.words[self.table + (start >> 20)] = self._own(kind, units)
        return missed

    def _mark(self, held: contextlib.ExitStack, start: int, kind: int, units: int) -> bool:
        """Have the word of an extent say that it is this row's, in doubt, and keep others from it."""
        unit = start >> 20
        if not held.enter_context(self._alone(unit, units)):
            return False
        if self.words[self.table + unit] & _SHAPE != units << 32 | kind << 16:
            return False  # it has been given up meanwhile
        self.words[self.table + unit] = self._own(kind, units) | IN_DOUBT
        return True

    def _hazards(self) -> set[int]:
        """Return the units that anybody who lives is at."""
        found: set[int] = set()
        for row in self.rows.used():
            data = os.pread(self.segment.descriptor, 8 * HAZARDS, 8 * hazard_word(row, 0))
            if data != _NO_HAZARDS:  # read first, and only then asked whether it lives
                named = {word >> 20 for word in memoryview(data).cast("Q") if word}
                if row in self._sweeping or self.rows.is_alive(row):
                    found |= named
        return found

    def _is_free(self, start: int, kind: int, units: int) -> bool:
        return not (self.states(start, kind, units)[1] & _FREE_BITS).any()

    def _give_up(self, start: int, kind: int, units: int) -> bool:
        """Make a free extent free units. False: its pages cannot be punched out."""
        self._raise_floor(start, self.states(start, kind, units)[1])
        if not self.segment.punch(start, start + units * UNIT):
            return False
        self.words[self.table + (start >> 20)] = 0
        return True

    def _raise_floor(self, start: int, states: Words) -> None:
        """Have the blocks of an extent whose states are about to be punched out begin later than they ended."""
        floor = self.floors + (start >> 20)
        self.words[floor] = max(self.words[floor], int((states >> _GENERATION_AT).max(initial=0)) + 1 & _HOLDER)

    def _punch_free(self, start: int, kind: int, units: int) -> None:
        """Punch the free pages of an extent out that is not free as a whole."""
        blocks, states = self.states(start, kind, units)
        runs = self.free_runs(start, kind, blocks, states)
        if runs:
            self._raise_floor(start, states)
        for begin, stop in runs:
            self.segment.punch(begin, stop)

    def free_runs(self, start: int, kind: int, blocks: Places, states: Words) -> list[tuple[int, int]]:
        """Return where the pages of an extent begin and end that were written, and whose blocks are all free."""
        if not len(blocks):
            return []
        step = max(self.segment.page, size_of(kind))
        numbers = (blocks - start) // step
        free = np.zeros(numbers[-1] + 3, np.bool_)  # one more before the first and behind the last
        free[numbers + 1] = True
        free[numbers[(states & _FREE_BITS) != 0] + 1] = False
        edges: list[int] = (start + np.flatnonzero(free[1:] != free[:-1]) * step).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _punch_gaps(self) -> None:
        """Punch pages out that lie in no extent: somebody has read a state there when its extent had just been given up."""
        end = self._first_unit
        for start, units in [(start, units) for start, _, units, _ in self.all_extents()] + [(self._units << 20, 0)]:
            for first, stop in list(self.written(end << 20, start)):
                unit, count = first >> 20, -(-stop // UNIT) - (first >> 20)
                with self._alone(unit, count) as alone:
                    if alone and self._gap(unit, count) == unit:  # nobody has claimed any of them meanwhile
                        self.segment.punch(unit << 20, unit + count << 20)
            end = (start >> 20) + units

    def floor(self, block: int) -> int:
        """Return the generation at which a block begins that was never used, or whose page was punched out."""
        return self.words[self.floors + (block >> 20)]

    # ---- walking ----

    def all_extents(self) -> Iterator[tuple[int, int, int, int]]:
        """(offset, kind, units, row) of each extent, in order of offset.

        Reading a page of shared memory that nobody wrote makes it cost memory; so the holes are asked for first.
        """
        for start, kind, units, row, _ in self._words_of_extents():
            yield start, kind, units, row

    def _words_of_extents(self) -> Iterator[tuple[int, int, int, int, bool]]:
        """The same, and whether each is in doubt."""
        for first, words in self._table():
            for unit, word in enumerate(words.tolist(), first):
                if word:
                    yield unit * UNIT, word >> 16 & KIND, word >> 32, (word & 0xFFFF) - 1, bool(word & IN_DOUBT)

    def _table(self) -> Iterator[tuple[int, Words]]:
        """Units, and a copy of their words from that one on, wherever any was ever written."""
        table = self.table * 8
        for start, stop in self.written(table, table + self._units * 8):
            yield start // 8 - self.table, self.numbers[start // 8 : stop // 8].copy()

    def _extents(self, row: int) -> Iterator[Extent]:
        """Return those of one row that are not in doubt."""
        for start, kind, units, owner, in_doubt in self._words_of_extents():
            if owner == row and not in_doubt:
                yield start, kind, units

    def walk(self, hazard: int) -> Iterator[tuple[int, int, int, bool]]:
        """Each extent that is not all under lease here, and whether somebody is taking it. Then nothing may be written there
        now. Else it stays meanwhile.

        Args:
            hazard: index of a word that only the caller uses.
        """
        for start, kind, units in self.unleased():
            with self.staying(start, hazard) as word:
                if word & _SHAPE == units << 32 | kind << 16:
                    yield start, kind, units, bool(word & IN_DOUBT)

    @contextlib.contextmanager
    def staying(self, block: int, hazard: int) -> Iterator[int]:
        """Keep the extent that a block lies in. Its word, which says that it is in doubt if somebody is just taking it, so that
        it may not stay. Never waits.

        Args:
            hazard: index of a word that only the caller uses.
        """
        words, at, row = self.words, self.table + (block >> 20), self.rows.index
        words[hazard] = block
        try:
            word = words[at]
            if word & IN_DOUBT:
                with self._alone(block >> 20, 1) as alone:
                    yield words[at] & ~IN_DOUBT if alone else word
            else:
                yield word
        finally:
            if row == self.rows.index:  # and not in a child that was forked meanwhile
                words[hazard] = 0

    def begins(self, block: int) -> bool:
        """Return whether a block begins at an offset. Not for long, unless it is not FREE, or a hazard names it."""
        unit = block >> 20
        word = self.words[self.table + unit] if self._first_unit <= unit < self._units else 0
        return bool(word) and not block & min(size_of(word >> 16), UNIT) - 1

    def written(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Page-aligned ranges from ``start`` up to ``stop`` that somebody has written."""
        while True:
            start = self._data(start, stop)
            if start >= stop:
                return
            hole = os.lseek(self.segment.descriptor, start, os.SEEK_HOLE)
            yield start, min(hole, stop)
            start = hole

    def _data(self, start: int, stop: int) -> int:
        """Return where the first written page from ``start`` on begins, or already has begun; else ``stop``."""
        try:
            return os.lseek(self.segment.descriptor, start, os.SEEK_DATA) if start < stop else stop
        except OSError as none:
            if none.errno == errno.ENXIO:
                return stop
            raise

    def _blocks(self, start: int, kind: int, units: int) -> Iterator[int]:
        """The blocks of an extent whose state was ever written."""
        yield from self.states(start, kind, units)[0].tolist()

    def states(self, start: int, kind: int, units: int) -> tuple[Places, Words]:
        """Return the blocks of an extent whose state was ever written, in order, and a copy of their states."""
        size, stop = size_of(kind), start + units * UNIT
        if size > PAGE:
            blocks = np.fromiter(self._begun(start, stop, size), np.int64)
        else:
            runs = [np.arange(first, last, size) for first, last in self.written(start, stop)]
            blocks = np.concatenate(runs) if runs else np.arange(0)
        return blocks, self.numbers[blocks >> 3]

    def _begun(self, start: int, stop: int, size: int) -> Iterator[int]:
        """The blocks, each larger than a page, whose first page somebody has written.

        Of those under lease here that is known: to ask the system takes ten times as long.
        """
        leased = self.leased
        while start < stop:
            data = start if start >> 3 in leased else self._data(start, stop)
            if data == start:
                yield start
                start += size
            else:
                start += -(-(data - start) // size) * size

    def blocks_that(self, start: int, kind: int, units: int, mask: int, wanted: Collection[int]) -> list[int]:
        """Return the blocks of an extent of whose states some bits are as wanted."""
        blocks, states = self.states(start, kind, units)
        states &= np.uint64(mask)
        if len(wanted) > _FEW:  # numpy.isin takes five times as long where there is but one
            return blocks[np.isin(states, np.array(list(wanted), np.uint64))].tolist()  # type: ignore[no-any-return]
        is_wanted = np.zeros(len(states), np.bool_)
        for each in wanted:
            is_wanted |= states == np.uint64(each)
        return blocks[is_wanted].tolist()  # type: ignore[no-any-return]


def size_of(kind: int) -> int:
    """Return the bytes of each block of an extent of a kind."""
    return 1 << (kind & SIZE_CLASS)


def units_of(kind: int) -> int:
    """Return how many units an extent of a kind has."""
    return max(1, size_of(kind) >> 20)
