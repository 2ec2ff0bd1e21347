"""Blocks that tensors lie on, and when they are let go.

A lease's anchor is the *storage*: a NumPy view over the segment, which ``torch.frombuffer`` keeps until the storage
dies, so until the last view, ``detach()``, ``.numpy()``, DLPack capsule or saved tensor is gone. A weak reference to
that array is the release: when the array dies, its block becomes FREE, by one store.

The release runs on any thread, in garbage collection, at interpreter exit, in a forked child. It takes no lock, and
does nothing in a process other than the one that made the lease. What a process holds keeps its arena, and with it the
row that says so.

A block may also be held from the start, for tensors that are made in it (``hold``, memory/loans.py). Both kinds can be
*handed over* to a queue, where no other tensor lies on them: then their tensors here are emptied (``Handover``).

**Forks.** A child inherits the tensors, and may read them long after the parent let go. So a process that forks while
it has leases leaves a *witness*: a read lock on a byte of its row, through an open file description of its own that
only the child keeps. Leases older than the fork are then kept by the row, dead or alive, until nobody holds that
byte's lock. (A pipe, whose other end the child holds, would tell the parent only. Should the parent die, its
undertaker has to know, too.)"""

from __future__ import annotations

import os
import platform
import weakref
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorpipe_ipc.memory.arena import HELD, HOLDER, NBYTES, WRITING, Arena

__all__ = ["Handover", "Held", "Leases", "Octets"]

Octets = npt.NDArray[np.uint8]

# x86 never lets a load pass a later store; elsewhere the reads of a block must be kept before the store that frees it.
_STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


class Leases:
    """What one process holds of an arena.

    Attributes:
        budget: bytes under lease beyond which ``lease`` refuses.
    """

    def __init__(self, arena: Arena, budget: int | None = None) -> None:
        self.arena, self.words = arena, arena.words
        self.budget = arena.capacity // 2 if budget is None else budget
        self.octets = arena.segment.octets
        self._address = self.octets.ctypes.data
        self._memory = arena.segment.memory
        arena.rows.after_fork(self._forget)
        arena.rows.witness_when(self._any)
        self._forget()

    def _forget(self) -> None:
        _holding.discard(self)
        self.process = os.getpid()
        self.live: dict[int, _Anchor] = {}  # by the word of the block's state
        self._starts: dict[int, _Anchor] = {}  # by where in the segment it begins
        self.kept: list[tuple[int, int]] = []  # released, but a fork's child may still read
        self.offered: set[int] = set()  # by the word: what the next put of it may hand over without being told
        self._room, self._patience = self.budget, 0

    def _any(self) -> bool:
        return bool(self.live)

    def lease(self, block: int, start: int, nbytes: int) -> Octets | None:
        """The bytes of a block as an array whose death frees the block, once its state is HELD by this process.

        The caller stamps the block HELD after it has the array, so that an array lost on the way frees nothing.

        Returns:
            None where the budget is used up. Then a copy is due.
        """
        if self._room < nbytes and not self._recount(nbytes):
            return None
        self._room -= nbytes
        return self._anchored(block, start, nbytes, nbytes)

    def _anchored(self, block: int, start: int, nbytes: int, charge: int) -> Octets:
        # Not a slice of octets: NumPy has a view of a view refer to the first array, so what is made on a slice, even
        # through a memoryview, would keep octets, and let the slice die. An array on the mapping itself is kept.
        array: Octets = np.ndarray(nbytes, np.uint8, self._memory, start)
        anchor = _Anchor(array, _release)
        anchor.leases, anchor.word, anchor.nbytes = self, block >> 3, charge
        anchor.held = (self.words[block >> 3] | HOLDER) ^ HOLDER | self.arena.held
        anchor.process, anchor.forks = self.process, self.arena.rows.forks
        self.live[block >> 3] = self._starts[start] = anchor
        anchor.start = start
        _holding.add(self)
        return array

    def hold(self, block: int, kind: int, start: int, nbytes: int) -> Octets:
        """The same for a block that this process has just allocated; it is HELD from now on. Never refused: what the
        process made itself does not count towards the budget.

        Args:
            kind: of the block.
        """
        word = block >> 3
        try:
            self.arena.in_flight(block, kind)  # whoever frees it, its owner will find it
            array = self._anchored(block, start, nbytes, 0)
            self.words[word + NBYTES] = nbytes
            self.words[word] = self.live[word].held
        except BaseException:
            self.live.pop(word, None)
            if self.words[word] & HOLDER == self.arena.writing:
                self.arena.discard(block, kind)
            raise
        return array

    def offer(self, block: int) -> None:
        """The next put of what lies on a held block is to hand it over, if nobody else has its tensors."""
        self.offered.add(block >> 3)

    def find(self, address: int) -> Held | None:
        """What this process holds at an address, if it does."""
        offset = address - self._address
        if not 0 <= offset < len(self.octets):
            return None
        first = self._starts.get(offset)  # most often it is the begin of a lease; else all are looked at
        if first is None or self.live.get(first.word) is not first:
            first = None
        for anchor in list(self.live.values()) if first is None else [first]:
            array = anchor() if anchor.word << 3 <= address - self._address else None
            if array is not None and 0 <= address - array.ctypes.data < len(array):
                return Held(anchor, array.ctypes.data, len(array))
        return None

    def may_leave(self, held: Held) -> bool:
        """Whether no child of a fork may read the block."""
        rows = self.arena.rows
        return held.anchor.forks == rows.forks or not rows.has_witness(rows.index)

    def _recount(self, nbytes: int) -> bool:
        """Look what is still live; but not each time: the more there is, the rarer."""
        self._patience -= 1
        if self._patience > 0:
            return False
        live = list(self.live.values())
        self._patience = len(live) // 8
        self._room = self.budget - sum(anchor.nbytes for anchor in live)
        return self._room >= nbytes

    def settle(self) -> None:
        """Free what only a fork's children kept, if they are gone, and what an exception kept: Python drops what a signal's
        handler raises inside a release."""
        for anchor in list(self.live.values()):
            if anchor() is None:
                _release(anchor)
        if self.kept and not self.arena.rows.has_witness(self.arena.rows.index):
            kept, self.kept = self.kept, []
            for word, held in kept:
                if self.words[word] == held:
                    self.words[word] = held & ~HOLDER


_holding: set[Leases] = set()  # those with anything live, so that they, their rows and locks last as long


class Held(NamedTuple):
    """What this process holds: where its tensors lie. Has no reference to the array, so that those can be counted."""

    anchor: _Anchor
    address: int
    nbytes: int

    def has(self, address: int) -> bool:
        """Whether an address is within."""
        return 0 <= address - self.address < self.nbytes


class Handover:
    """A held block on its way into a queue.

    Attributes:
        word: index of the block's state.
        start, nbytes: where in the segment what the receiver is to hold begins, and how long it is.
        address: of the same in this process.
        held: the block's state while this process holds it.
    """

    __slots__ = ("_anchor", "_array", "_empty", "address", "held", "nbytes", "start", "word")

    def __init__(self, held: Held, empty: Callable[[], None]) -> None:
        """
        Args:
            empty: takes the memory from all tensors that lie on it; may be called more than once.
        """
        self._anchor, self._array, self._empty = held.anchor, held.anchor(), empty
        self.address, self.nbytes = held.address, held.nbytes
        self.word, self.held = held.anchor.word, held.anchor.held
        self.start = held.address - held.anchor.leases._address

    @property
    def leases(self) -> Leases:
        """Whose it is: a queue takes it if its own are these."""
        return self._anchor.leases

    def begin(self) -> None:
        """From now on the block may be the receiver's, which may be this process, too."""
        self._anchor.leases.live.pop(self.word, None)
        self._anchor.leases.offered.discard(self.word)

    def settle(self) -> None:
        """The end of a put, when its ticket is known to have been given, or not to have been and never to be.

        The state tells, as the generation goes up with every queueing: where it has not, the lease goes on. May be cut
        short anywhere, and called again.
        """
        leases = self._anchor.leases
        if leases.words[self.word] in (self.held, self.held ^ HELD ^ WRITING):
            leases.live[self.word] = self._anchor
            _holding.add(leases)
            leases.words[self.word] = self.held
        else:
            self._empty()
            _let_go(leases)


def _let_go(leases: Leases) -> None:
    if not leases.live:
        _holding.discard(leases)
        if leases.live:  # another thread has made one in between
            _holding.add(leases)


class _Anchor(weakref.ref[Any]):
    __slots__ = ("forks", "held", "leases", "nbytes", "process", "start", "word")
    leases: Leases
    word: int
    start: int
    nbytes: int
    held: int
    process: int
    forks: int


def _release(anchor: _Anchor) -> None:
    leases = anchor.leases
    if anchor.process != leases.process:
        return  # a forked child's copy: the block is the parent's
    if leases._starts.get(anchor.start) is anchor:
        del leases._starts[anchor.start]
    if leases.live.get(anchor.word) is anchor:
        del leases.live[anchor.word]
        leases.offered.discard(anchor.word)
        _let_go(leases)
    if anchor.forks != leases.arena.rows.forks:
        leases.kept.append((anchor.word, anchor.held))
        return
    if not _STORES_ARE_ORDERED:
        fence = allocate_lock()  # a lock of its own: nothing to wait for, even inside another release
        for _ in range(2):  # one cycle of acquire and release is not a full fence on arm64
            fence.acquire()
            fence.release()
    if leases.words[anchor.word] == anchor.held:
        leases.words[anchor.word] = anchor.held & ~HOLDER
