"""Leases: blocks that tensors lie on, and when they are let go.

**Release.** A lease's anchor is the *storage*: a NumPy view of the segment. ``torch.frombuffer`` keeps it until the storage
dies, so until the last view, ``detach()``, ``.numpy()``, DLPack capsule or saved tensor is gone. A weak reference to that array
is the release: when the array dies, its block becomes FREE, by one store. The release runs on any thread, in garbage
collection, at interpreter exit, in a forked child. It takes no lock, and does nothing in a process other than the one that made
the lease: also not in a child that has not been told yet, where a hook of somebody else's collects garbage. A process's leases
keep its arena, and with it the row that says so. They keep what uses the arena here, too, so that the next queue finds it.

A block may also be held from the start, for tensors that are made in it (``hold``, loans.py). Both kinds can be *handed
over* to a queue, if no other tensor lies on them. Then their tensors here become empty (``Handover``).

**Forks: what a child may still read.** A child inherits the tensors, and may read them long after the parent let them go. So a
process that forks while it has leases leaves a *fork marker* (rows.py). A lease that was made before fork f + 1 and let go
after fork l is *kept*: its block stays HELD until none of the fork markers f + 1 to l is left. The process asks that at once,
and then again and again, in a twentieth of the time: when leases are made and let go, with each put and get on any segment,
when one waits, and whenever memory is short. All that a dead process held is kept while any of its fork markers exists, because
no record says which children could read it.

**Forks: what a child writes.** A child's writes must not reach the parent's tensors. So in the child, the pages on which they
lie become private (apart.py). Nothing else lies on these pages, because a block that tensors lie on is at least a page. (A
smaller message is copied into such a block if a lease is wanted.) The block's header may lie on such a page. So the child may
see an old state of the block, and can never change it. It never has to: the block is HELD by the parent's row as long as the
child's fork marker exists, dead or alive. Meanwhile no process owns it, gets it or sweeps it away, the child included, for
which the lock of its fork marker is another's. A block whose message is just being got becomes HELD before the fork: user code
that decodes it (``__setstate__``) may fork with its tensors in hand. Its array is kept until the get is over (``early``). Other
blocks that are not HELD during a fork carry no tensors, and stay shared.

**The bound.** A process has at most ``budget`` bytes of pages under lease. And no tensor lies on a block beyond the arena's
capacity, which a message gets in an empty queue although memory is short: such a message is copied, and its block is free
for the next one. So all leases of all processes together never pin more than the capacity. (Where pages are locked, nothing
can be given back for a copy within it. Then ``copy=False`` has the block itself, while no more than the capacity is in use.)
Nor do they take all addresses (``ulimit -v``): no tensor lies on the upper half of them, unless the user wants nothing but a
lease. So messages always find addresses, and are copied there.

**Signals and threads.** CPython looks for signals, and switches threads, after a call, on entering a function and on jumping
back. It does not between a subscript, a comparison and a store or ``del``. So a look, and the store that depends on it, are
written without a call: ``if word in live and live[word] is anchor``, never ``live.get(word)``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from time import monotonic, thread_time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory.apart import set_apart, set_together
from tensorpipe_ipc.memory.arena import (
    GENERATION_AT,
    HEADER,
    HELD,
    HOLDER,
    NBYTES,
    QUEUED,
    WRITING,
    WRITTEN,
    Arena,
    Taker,
)
from tensorpipe_ipc.memory.segment import PAGE, identity_of

__all__ = ["LEAST", "Handover", "Held", "Leases", "Octets", "keeping", "settle_kept"]

Octets = npt.NDArray[np.uint8]

# x86 never lets a load pass a later store; elsewhere the reads of a block must be kept before the store that frees it.
LEAST = PAGE - HEADER  # bytes to allocate at least for a block that tensors are to lie on
# Between two looks whether those who may read what is kept are gone: seconds at most, and times as long as the last one took.
PAUSE, _SELDOM = 0.1, 20
_STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


class Leases:
    """The blocks that one process holds of an arena.

    Attributes:
        budget: bytes of pages under lease beyond which ``lease`` refuses.
        gives_back: what is let go of is given back at once, as nobody may come by who would find that it lies idle.
        has_forked: there were children that have the segment, and may live.
        user: returns what uses the arena here, which lasts as long as anything is under lease; None: nothing does.
    """

    gives_back = has_forked = False
    user: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, arena: Arena, budget: int | None = None) -> None:
        self.arena, self.rows, self.words = arena, arena.rows, arena.words
        self.budget = arena.capacity // 2 if budget is None else budget
        self.octets = arena.segment.octets
        self._address = self.octets.ctypes.data
        self._memory = arena.segment.memory
        self._inherited: list[_Run] = []  # what a child that is being forked has of it
        self._apart: dict[int, _Run] = {}  # by the word: what this process, a child, has pages of its own of
        self._identity = identity_of(arena.segment.descriptor)
        self.early: dict[int, Octets] = {}  # by the word: HELD before a fork, while the get of it was not over
        self.leaving: dict[int, Handover] = {}  # by the word: being put at this moment
        self._reference = weakref.ref(self, keeping.discard)
        self.rows.after_fork(self._in_child)
        self.rows.before_fork(self._before_fork)
        self._forget()

    def _before_fork(self) -> bool:
        self.has_forked = True
        words, live = self.words, list(self.live.values())
        self._inherited = []
        for anchor in live:
            word, array = anchor.word, anchor()
            if array is None:
                continue
            if words[word] & 15 == QUEUED and words[word] >> GENERATION_AT == anchor.held >> GENERATION_AT:
                self.early[word] = array  # first: whoever ends the get looks there
                words[word] = anchor.held
            if words[word] == anchor.held:
                self._inherited.append((anchor, len(array)))
        return bool(live)

    def _in_child(self) -> None:
        leaving, self.leaving = list(self.leaving.values()), {}
        for handover in leaving:  # a signal's handler has forked in the middle of a put
            handover.empty()
        self._forget()
        rows = self.rows
        by, inherited = -1 if rows.fork_marker is None else rows.fork_marker.fileno(), self._inherited
        if set_apart(self.arena.segment, [(anchor.start, nbytes) for anchor, nbytes in inherited], by):
            self._inherited = []  # first: mapped again by another descriptor, they would be no fork marker
            self._apart.update({anchor.word: (anchor, nbytes) for anchor, nbytes in inherited})
            rows.close_fork_marker()
            for anchor, _ in inherited:
                if anchor() is None:
                    self._let_go_in_child(anchor)

    def _let_go_in_child(self, anchor: _Anchor) -> None:
        """Give up own pages of what the parent holds: the last tensor on them is gone here. They are a fork marker no more."""
        run = self._apart.pop(anchor.word, None)
        if run is not None and run[0] is anchor and not sys.is_finalizing():
            set_together(self.arena.segment, anchor.start, run[1], self._identity)

    def _forget(self) -> None:
        _holding.pop(self, None)
        self.process = os.getpid()
        self.live: dict[int, _Anchor] = {}  # by the word of the block's state
        self.arena.leased = self.live
        self.early.clear()
        self._kept: dict[int, _Kept] = {}  # by the word: let go, but children of forks may still read
        keeping.discard(self._reference)
        self._look_again = 0.0
        self.offered: set[int] = set()  # by the word: what the next put of it may hand over without being told
        self._room = self.budget

    def lease(self, block: int, start: int, nbytes: int, *, must: bool = False) -> Octets | None:
        """Return the bytes of a block as an array whose death frees the block, once its state is HELD by this process.

        The caller stamps the block HELD after it has the array, so that an array lost on the way frees nothing, and while there
        is no fork (``no_fork``). If ``live`` does not know the block, the array is a copy in a block of its own, and the
        caller frees the other one.

        Args:
            must: also where addresses are left to messages, and of a message beyond the capacity: a copy within it; or,
                where pages are locked, the message itself if no more than the capacity is in use.

        Returns:
            None where the budget is used up, the message lies beyond the capacity, addresses are left to messages, or
            there is no room for such a copy; or where a signal's handler asks while this thread is just forking: the child
            would know nothing of the lease. Then memory of one's own is due.
        """
        self.settle(at_once=False)
        before = self.live.get(block >> 3)  # of a get that failed, and that somebody remembers: a traceback, say
        array = None if before is None or before.start != start else before()
        if array is not None and len(array) == nbytes:
            return array  # type: ignore[no-any-return]
        is_small, is_beyond = self._is_small(block, start, nbytes), self.arena.is_beyond(block)
        charge = self._charge(block, start, nbytes)
        if self._room < charge or not (must or (not is_beyond and self.arena.is_for_tensors(block))):
            return None
        if self.rows.is_within_fork():
            return None
        if is_small or is_beyond:
            array = self._lease_of_copy(start, nbytes, charge)
            if array is not None or is_small or not self.arena.is_free_within():
                return array
        return self._anchored(block, start, nbytes, nbytes, charge)

    def lease_and_state(self, block: int, start: int, nbytes: int) -> tuple[Octets, int] | None:
        """Return a lease as ``lease`` does, with the state that its block is to have; None where it is none of this block."""
        array, anchor = self.lease(block, start, nbytes), self.live.get(block >> 3)
        if array is None or anchor is None:
            return None
        is_of_this = anchor() is array
        return (array, anchor.held) if is_of_this else None

    def lease_anyway(self, block: int, start: int, nbytes: int) -> Octets:
        """Return the bytes of a large block as ``lease`` does, beyond the budget: there is no memory for a copy of them."""
        return self._anchored(block, start, nbytes, nbytes, self._charge(block, start, nbytes))

    def needs_block(self, block: int, start: int, nbytes: int) -> bool:
        """Return whether a lease of these bytes takes another block, and the budget allows it."""
        moves = self._is_small(block, start, nbytes) or self.arena.is_beyond(block)
        return moves and self._room >= self._charge(block, start, nbytes)

    def _is_small(self, block: int, start: int, nbytes: int) -> bool:
        return start - block + nbytes <= PAGE >> 1  # as blocks are allocated, others lie on its page

    def _charge(self, block: int, start: int, nbytes: int) -> int:
        """Return how much of the budget a lease takes."""
        return PAGE if self._is_small(block, start, nbytes) else max(PAGE, nbytes, self.words[(block >> 3) + WRITTEN])

    def _lease_of_copy(self, start: int, nbytes: int, charge: int) -> Octets | None:
        with self.taking() as taker:
            try:
                block = self.arena.allocate(max(nbytes, LEAST), taker=taker)
            except SharedMemoryError:
                return None
            if not block:
                return None
            self.arena.shorten(block, max(nbytes, LEAST))
            charge = max(charge, self._charge(block, block + HEADER, nbytes))
            if self._room < charge:
                self.arena.give_up(taker)
                return None
            array = self.hold(taker, block + HEADER, nbytes, charge=charge)
        array[:] = self.octets[start : start + nbytes]
        return array

    def _anchored(self, block: int, start: int, nbytes: int, counted: int, charge: int) -> Octets:
        # Not a slice of octets: NumPy has a view of a view refer to the first array, so what is made on a slice, even
        # through a memoryview, would keep octets, and let the slice die. An array on the mapping itself is kept.
        array: Octets = np.ndarray(nbytes, np.uint8, self._memory, start)
        anchor = _Anchor(array, _release)
        anchor.leases, anchor.word, anchor.start = self, block >> 3, start
        anchor.nbytes, anchor.charge = counted, charge
        anchor.held = (self.words[block >> 3] | HOLDER) ^ HOLDER | self.arena.held
        rows = self.rows
        with rows.no_fork:
            if rows.spare is None:
                rows.reserve_fork_marker()
            anchor.process, anchor.forks = self.process, rows.forks
            self._add(anchor)
        return array

    def _add(self, anchor: _Anchor) -> None:
        former, user = self.live.get(anchor.word), self.user()
        if former is not None:
            self.drop(former)
        self.live[anchor.word] = anchor  # from here on there is no call
        self._room -= anchor.charge
        if self not in _holding:
            _holding[self] = user

    def drop(self, anchor: _Anchor) -> None:
        """Count an anchor as live no more, if it is."""
        live, word = self.live, anchor.word
        if word in live and live[word] is anchor:
            del live[word]
            self._room += anchor.charge
            self.offered.discard(word)

    @contextlib.contextmanager
    def taking(self) -> Iterator[Taker]:
        """Give a taker for a block that is to be held. What it has when an exception comes is free again."""
        taker = Taker()
        try:
            yield taker
        except BaseException:
            block, taker.block = taker.block, 0
            if block:
                anchor = self.live.get(block >> 3)
                if anchor is not None:
                    self.drop(anchor)
                self.arena.discard(block)
            raise

    def hold(self, taker: Taker, start: int, nbytes: int, *, charge: int = 0) -> Octets:
        """The same for a block that this process has just allocated; it is HELD from now on. Never refused.

        Args:
            taker: has the block. It has none any more when the block is HELD, and is freed by the array's death.
            charge: how much of the budget it takes: nothing of what the process made itself.

        Raises:
            RuntimeError: this is a child that a signal's handler has forked since the block was taken, and returned from.
        """
        words, word = self.words, taker.block >> 3
        array = self._anchored(taker.block, start, nbytes, charge, charge)
        with self.rows.no_fork:  # a child either has it as its own, or does not have it
            if words[word] & HOLDER != self.arena.writing or not self.arena.writing:
                raise RuntimeError("a child that was forked in the middle of a call has returned into it")
            words[word + NBYTES] = nbytes
            words[word] = self.live[word].held
            taker.block = 0
        return array

    def offer(self, block: int) -> None:
        """The next put of what lies on a held block is to hand it over, if nobody else has its tensors."""
        self.offered.add(block >> 3)

    def find(self, address: int) -> Held | None:
        """Return what this process holds at an address, if it does."""
        offset = address - self._address
        if not 0 <= offset < len(self.octets):
            return None
        anchor = self.live.get(self.arena.block_around(offset) >> 3)
        array = None if anchor is None else anchor()
        if anchor is None or array is None or not 0 <= offset - anchor.start < len(array):
            return None
        return Held(anchor, self._address + anchor.start, len(array))

    def may_leave(self, anchor: _Anchor) -> bool:
        """Return whether no child of a fork may read the block."""
        rows = self.rows
        return anchor.forks == rows.forks or not rows.is_marked(anchor.forks + 1, rows.forks)

    def settle(self, *, at_once: bool = True) -> None:
        """Free what only a fork's children kept, if they are gone, and what an exception kept: Python drops what a signal's
        handler raises inside a release. Without ``at_once`` it looks in a twentieth of the time, and ten times a second at
        least; for the latter alone no more often.
        """
        now, process = monotonic(), self.process
        if not at_once and now < (self._look_again if self._kept else self._look_again + PAUSE):
            return
        if process != os.getpid():
            return
        self._look_again, spent = now + PAUSE, thread_time()
        for anchor in list(self.live.values()):
            if anchor() is None:
                _release(anchor)
        answers: dict[tuple[int, int], bool] = {}
        for word in list(self._kept):  # not its items: to make their tuples may collect garbage, and with it a lease
            self._free_if_unread(word, answers)
        if not self._kept:
            keeping.discard(self._reference)
            if self._kept:  # another thread has let go of one in between
                keeping.add(self._reference)
        self._look_again = monotonic() + min(PAUSE, _SELDOM * (thread_time() - spent))

    def _free_if_unread(self, word: int, answers: dict[tuple[int, int], bool]) -> None:
        """Free a block that only a fork's children kept, if they are gone.

        Args:
            answers: of forks that were asked about: whether any child of theirs lives.
        """
        process, entry = self.process, self._kept.get(word)
        if entry is None:
            return
        held, first, last = entry
        if (first, last) not in answers:
            answers[first, last] = self.rows.is_marked(first, last)
        # The entry, and not its state: that is the same again when another thread makes a tensor there, and forks.
        if not answers[first, last] and word in self._kept and self._kept[word] is entry:
            del self._kept[word]
            try:  # with no call since: nobody else frees it
                if self.gives_back:
                    self.arena.shrink(word << 3)
            finally:
                if process == self.process:  # not a child that was forked meanwhile
                    self.words[word] = held & ~HOLDER


# Those of this process with anything kept. Each call looks at all: the segment of some may never be used again.
_Reference = weakref.ref[Leases]
keeping: set[_Reference] = set()


_look_again = 0.0  # when all of them are looked at again


def settle_kept() -> None:
    """Free what only forks' children kept, on whatever segment, if they are gone, in a twentieth of the time."""
    global _look_again
    now = monotonic()
    if now < _look_again:
        return
    references, spent = list(keeping), thread_time()
    _look_again = now + PAUSE
    for reference in references:
        leases = reference()
        if leases is not None:
            leases.settle(at_once=False)
    _look_again = monotonic() + min(PAUSE * len(references), _SELDOM * (thread_time() - spent))


_holding: dict[Leases, object] = {}  # those with anything live, and their users: so they, rows and locks last as long


_Kept = tuple[int, int, int]  # the block's state; the first and the last fork whose children may read it


class Held(NamedTuple):
    """A block that this process holds, where its tensors lie. It does not refer to the array, so that those can be counted."""

    anchor: _Anchor
    address: int
    nbytes: int

    def has(self, address: int) -> bool:
        """Return whether an address is within."""
        return 0 <= address - self.address < self.nbytes


class Handover:
    """A held block on its way into a queue.

    Attributes:
        word: index of the block's state.
        start, nbytes: where in the segment what the receiver is to hold begins, and how long it is.
        address: of the same in this process.
        held: the block's state while this process holds it.
        empty: takes the memory from all tensors that lie on it.
    """

    __slots__ = ("_anchor", "_array", "_is_sole", "address", "empty", "held", "nbytes", "start", "word")

    def __init__(
        self, held: Held, empty: Callable[[], None], is_sole: Callable[[weakref.ref[Any]], bool] = lambda _: True
    ) -> None:
        """
        Args:
            empty: takes the memory from all tensors that lie on it; may be called more than once.
            is_sole: whether there are no others, given a reference to the array, of which this has one.
        """
        self._anchor, self._array, self.empty, self._is_sole = held.anchor, held.anchor(), empty, is_sole
        self.address, self.nbytes = held.address, held.nbytes
        self.word, self.held = held.anchor.word, held.anchor.held
        self.start = held.address - held.anchor.leases._address

    @property
    def leases(self) -> Leases:
        """Return the owner: a queue takes the block if its own leases are these."""
        return self._anchor.leases

    def may_leave(self) -> bool:
        """Return whether nobody else may read the block at this moment, neither a child of a fork nor another tensor.

        Ask once it has begun, while there is no fork (``no_fork``).
        """
        return self.leases.may_leave(self._anchor) and self._is_sole(self._anchor)

    def begin(self) -> None:
        """From now on the block may be the receiver's, which may be this process, too."""
        self.leases.leaving[self.word] = self
        self.leases.drop(self._anchor)

    def settle(self) -> None:
        """The end of a put, when its ticket is known to have been given, or not to have been and never to be.

        The state tells, as the generation goes up with every queueing: where it has not, the lease goes on. May be cut
        short anywhere, and called again.
        """
        leases = self._anchor.leases
        if leases.words[self.word] in (self.held, self.held ^ HELD ^ WRITING):
            if leases.live.get(self.word) is not self._anchor:
                leases._add(self._anchor)
            leases.words[self.word] = self.held
        else:
            self.empty()
            _let_go(leases)
        if leases.leaving.get(self.word) is self:
            del leases.leaving[self.word]


def _let_go(leases: Leases) -> None:
    if not leases.live:
        leases._inherited = []  # it refers to the leases: what is dropped would stay until Python collects garbage
    if not leases.live and leases in _holding:  # no call since the look: no other thread makes one in between
        del _holding[leases]


_Run = tuple["_Anchor", int]  # and its array's bytes


class _Anchor(weakref.ref[Any]):
    __slots__ = ("charge", "forks", "held", "leases", "nbytes", "process", "start", "word")
    leases: Leases
    word: int
    start: int
    nbytes: int  # as statistics have it
    charge: int  # of the budget
    held: int
    process: int
    forks: int


def _release(
    anchor: _Anchor, is_finalizing: Callable[[], bool] = sys.is_finalizing, keeping: set[_Reference] = keeping
) -> None:
    """Let go of a block whose last alias is gone.

    Python drops an exception that a signal's handler raises in here. So nothing is called where it need not be: without
    a call, CPython looks for signals on entering only.
    """
    try:
        leases, word, held, forked = anchor.leases, anchor.word, anchor.held, anchor.forks
    except AttributeError:  # an exception of a signal's handler came while it was made: nobody knows it yet
        return
    rows = leases.rows
    if anchor.process != leases.process or (rows.is_forking and anchor.process != os.getpid()):
        # A forked child's copy: the block is the parent's.
        leases._let_go_in_child(anchor)
        return
    live, words = leases.live, leases.words
    if not _STORES_ARE_ORDERED:
        fence = allocate_lock()  # a lock of its own: nothing to wait for, even inside another release
        for _ in range(2):  # one cycle of acquire and release is not a full fence on arm64
            fence.acquire()
            fence.release()
    if word in live and live[word] is anchor:
        del live[word]  # no call since the look: nobody else releases it
        leases._room += anchor.charge
        forks = rows.forks
        if words[word] == held:
            if forked != forks:
                leases._kept[word] = held, forked + 1, forks
                keeping.add(leases._reference)
                if leases.gives_back and not is_finalizing():  # there may be no next put or get to look again
                    leases._free_if_unread(word, {})
            elif not leases.gives_back:
                words[word] = held & ~HOLDER
            else:
                try:
                    leases.arena.shrink(word << 3)
                finally:
                    if anchor.process == leases.process:  # not a child that was forked meanwhile
                        words[word] = held & ~HOLDER
    if word in leases.offered:
        leases.offered.discard(word)
    if leases._kept and not is_finalizing():  # else modules are half gone, and the children outlast this process
        leases.settle(at_once=False)
    if not live:
        _let_go(leases)
