"""Rows: the processes that are attached to a segment, and which of them are dead.

Each attached process has one row of a table at the segment's head. Only that process writes there, until it is dead. What it
writes is drawn in row.py.

::

    byte 0        4096                8192              12288                 256 KiB                 128.25 MiB
    ├─ segment ───┼─ incarnation[512] ┼─ finished[512] ─┼─ 0 ───────────────┬─┼─ row 0 ─┼─ row 1 ─┼─ … ┤ memory/arena.py

**A process is dead when its row's lock can be taken.** The lock is an OFD lock on the row's first byte. It is taken through an
open file description that is the process's own: the memfd opened again through /proc/self/fd, close-on-exec. So the kernel
drops the lock when the process ends, and nothing else does (ofd_locks.py). A forked child closes its copy in the hooks that
Python calls first; ``flock`` on an inherited description cannot offer that. A stopped process keeps its lock, and so is alive.
Process id and start time are for people only: they mean nothing in another container, and survive exec.

**Attaching.** A process adopts a dead row before it begins a fresh one, so that the dead row's blocks find a new owner. First
the row must be *finished*: the process that holds its lock completes or undoes what the dead process had begun (``finish``,
shared_queue/recovery.py). ``finished[row] == incarnation[row]`` says that this is done. Adopting raises the incarnation, by one
store. A kill may cut this short at any point: then the lock is free again, and the row still says that it is not finished.

After a fork the child has no row. It attaches anew when it first uses the segment.

**Fork markers.** A child inherits the tensors on its parent's leases, and may read them long after the parent let them go, or
died. So a process that forks while it has leases leaves a *fork marker*: fork number k read-locks byte ``1 + k %
FORK_MARKERS`` of the row, through an open file description of its own. The parent closes that descriptor after the fork. The
child maps its pages of the leases by it (apart.py). So the kernel keeps the description, and its lock, as long as the child
has these pages: until their last tensor is gone or the child ends, even if it closes all descriptors, as daemons do. The
child's own children inherit the pages, and the lock with them. So *byte k is locked as long as any process lives that descends
from fork k*. Every process can ask the kernel that, for a range of forks at once, whether or not the row's process lives
(``has_fork_marker``).

The descriptor is opened ahead, when the first lease is made, so that a process without free descriptors can still fork. If
there is none even then, no process can tell when that child ends. Then the memory that the child may read is never used again:
the process keeps it, ``untracked`` in the row tells later processes, and a warning tells the user.

**A fork waits** (``no_fork``, held for microseconds) while another thread attaches, makes a lease, or hands one over to a
queue. A child forked while a thread attaches would inherit a descriptor that it does not know, and with it the parent's row.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.forks import call_all, no_fork, watch
from tensorpipe_ipc.handlers import passed_a_handler
from tensorpipe_ipc.memory import ofd_locks
from tensorpipe_ipc.memory.row import (
    BATCH,
    BATCHES,
    FORK_MARKERS,
    INCARNATION,
    MAX_ROWS,
    NAMESPACE,
    PID,
    PURPOSES,
    ROW_WORDS,
    SINGLES,
    STARTED,
    SWEPT,
    UNJUDGED,
    UNSWEPT,
    UNTRACKED,
    Operation,
    Record,
    clear_counters,
    record_of,
    row_byte,
    row_word,
)
from tensorpipe_ipc.memory.segment import Segment, identity_of
from tensorpipe_ipc.owned_fd import OwnedFd, reopened
from tensorpipe_ipc.process import identity

__all__ = ["ENDED", "FINISHED", "INCARNATIONS", "Prepared", "Rows"]

INCARNATIONS = 4096 // 8  # word index
FINISHED = 8192 // 8
ENDED = MAX_ROWS  # no row: what stands for all processes that have ended, and whose rows are others' by now
_INCARNATION_LIMIT = 1 << 16  # as many bits as a block's state has for it; it goes round


_NO_COUNTS = memoryview(bytes(32)).cast("Q")


Prepared = tuple[dict[str, Any], dict[str, Any]]  # the attributes of an object, and what is to be changed in them


def _nothing(_row: int, _incarnation: int) -> Prepared:
    """Return what is to be changed where nothing else is known of the row."""
    return {}, {}


class Rows:
    """The table of one segment, seen by one process, and that process's own row.

    Attributes:
        index: of the own row; -1 while not attached.
        incarnation: how often that row has been attached to, this process included.
        forks: how many times this process has forked while it had leases.
        forked: how many times this process has forked, or more, and those that it descends from.
        process: this one. It differs in a fork that has not been told yet: all that is here is its parent's.
        is_recovering: a thread of this process is finishing a dead row. It may fail.
        is_forking: this process is just forking; or it is the child, and has not been told yet.
        spare: the descriptor of the next fork's fork marker; None: not open.
        fork_marker: in a child that has just been forked, the descriptor of the fork marker for it; None: none.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.words, self._numbers = segment.words, segment.octets.view(np.uint64)
        self.is_forking, self._forker = False, 0
        self.forked = 0
        self._forget()
        # By the object whose methods they are: they go when it goes.
        self._before_fork: weakref.WeakKeyDictionary[Any, Callable[[Any], bool]] = weakref.WeakKeyDictionary()
        self._after_fork: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
        # Also one without a row: a child forked by a process that has not used it is to know that it is not that process.
        with self.no_fork:
            _known.add(self)
            watch(_after_fork_in_child, before=_before_fork, in_parent=_after_fork_in_parent)

    @property
    def no_fork(self) -> threading.RLock:
        """The lock while which no thread of this process forks. For a few microseconds, and nothing that waits."""
        return no_fork()

    def _forget(self) -> None:
        self.process = os.getpid()
        self.spare: OwnedFd | None = None
        self.fork_marker: OwnedFd | None = None
        self._untracked = 0  # the last fork without a fork marker
        self._leaves_fork_marker = False
        self.index = -1
        self.incarnation = 0
        self.forks = 0
        self._owned: OwnedFd | None = None
        self._descriptor = -1  # the same
        self._other: OwnedFd | None = None
        self._mutex = threading.RLock()
        self.is_recovering = False
        self._unused = {1: 0, BATCH: SINGLES}  # by size: the number of the first that was never used
        self._spare: dict[int, list[Operation]] = {1: [], BATCH: []}
        self._inherited: dict[int, list[Operation]] = {}  # by purpose: their tallies go on

    # ---- attaching ----

    def attach(self, finish: Callable[[int], bool], prepare: Callable[[int, int], Prepared] = _nothing) -> None:
        """Take a row, unless this process has one.

        A signal's handler, or a finalizer, may come in here at any call, and need a row itself. Then it takes one, and what was
        begun here is given up: until the end all of it is in local variables, and its locks go with its description. If it
        forks, the child has that description, too. So neither takes a row by it: both begin anew.

        Args:
            finish: called with a dead row whose lock is held; says whether nothing is left to do in it.
            prepare: called with the row and its incarnation, before the row is this process's. Returns an object's ``vars``,
                and what is to be changed there when it is. It may be called again, with another row, and changes nothing else.

        Raises:
            SharedMemoryError: all rows are taken, or no descriptor is left.
        """
        with self.no_fork, self._mutex:
            while self.index < 0:
                process, forked = os.getpid(), self.forked
                try:
                    owned = reopened(self.segment.descriptor, os.O_RDWR)
                except OSError as failed:
                    if self.index >= 0 and not passed_a_handler(failed.__traceback__):
                        return
                    raise SharedMemoryError(
                        failed.errno, f"the segment could not be opened again: {failed.strerror}"
                    ) from failed
                # Its locks would say that everybody else is dead.
                if identity_of(owned.fileno()) != self.segment.identity:
                    raise SharedMemoryError(
                        errno.EBADF,
                        "this process closed the segment's descriptor, and has another file open by that number",
                    )
                self._attach_by(owned, (process, forked), finish, prepare)

    def _attach_by(
        self,
        owned: OwnedFd,
        since: tuple[int, int],
        finish: Callable[[int], bool],
        prepare: Callable[[int, int], Prepared],
    ) -> None:
        """Take a row by a description, unless this process has one by the end of it.

        Args:
            since: the process, and how often it had forked, when the description was not open yet.
        """
        descriptor, before, (process, forked) = owned.fileno(), self._owned, since
        try:
            if self.index >= 0 or self.forked != forked:
                return
            self._owned, self._descriptor = owned, descriptor  # for ``finish``; no call since the look
            row = self._find(descriptor, finish)
            if self.index >= 0 or self.forked != forked:
                return
            incarnation, inherited = self._adopt(row)
            into, prepared = prepare(row, incarnation)
            update = into.update
            if self.index < 0 and self.forked == forked:
                update(prepared)  # no call since the look
            if self.index < 0 and self.forked == forked:  # the same
                self.incarnation, self._inherited = incarnation, inherited
                self._owned, self._descriptor = owned, descriptor
                self.index = row  # last: other threads look at it without waiting, and go on if it is there
        except (OSError, ValueError) as error:
            # One that has a row by now needs no other. A child has nothing of what its parent had begun.
            is_over = self.index >= 0 or process != os.getpid()
            if not is_over or passed_a_handler(error.__traceback__):
                raise
        finally:
            self._give_up(owned, before, process)

    def _give_up(self, owned: OwnedFd, before: OwnedFd | None, process: int) -> None:
        """Have a description no more, unless this process's row was taken by it.

        Args:
            before: the one that an interrupted attempt of this process works by.
            process: the one that has opened it.
        """
        number = -1 if before is None else before.fileno()
        if self.index < 0:  # else it would be open for ever, and a row locked
            self._owned, self._descriptor = before, number
        if self._owned is not owned:
            if process == os.getpid():  # a child that was forked meanwhile has it open, too
                ofd_locks.unlock(owned.fileno(), 0, 0)  # all that was locked by it
            owned.close()  # who keeps an exception keeps the frames

    def _find(self, descriptor: int, finish: Callable[[int], bool]) -> int:
        """Return a row that is locked by a description, and in which nothing is left to do."""
        used = self.used()
        for row in used:
            if ofd_locks.lock(descriptor, row_byte(row), 1):
                if self.is_finished(row) or finish(row):
                    return row
                ofd_locks.unlock(descriptor, row_byte(row), 1)
        for row in sorted(set(range(MAX_ROWS)) - set(used)):
            if ofd_locks.lock(descriptor, row_byte(row), 1):
                if not self.words[INCARNATIONS + row]:
                    return row
                ofd_locks.unlock(descriptor, row_byte(row), 1)
        raise SharedMemoryError(
            errno.EUSERS,
            f"all {MAX_ROWS} rows of the segment are taken: by living processes, or by dead ones of which forked children "
            "still have tensors",
        )

    def _adopt(self, row: int) -> tuple[int, dict[int, list[Operation]]]:
        """Have a row say that it is this process's. Return its incarnation, and the operations whose tallies go on."""
        words, base, inherited = self.words, row_word(row), dict[int, list[Operation]]()
        me = identity()
        incarnation = (words[INCARNATIONS + row] + 1) % _INCARNATION_LIMIT or 1
        words[INCARNATIONS + row] = incarnation  # from here on the row is not finished
        words[base + INCARNATION], words[base + PID] = incarnation, me.pid
        words[base + STARTED], words[base + NAMESPACE] = int(me.started), me.namespace
        words[base + UNJUDGED] = 0
        for record in self.records(row):
            clear_counters(words, record.counters)  # the dead one's
            if record.size == 1 and words[record.tally]:
                inherited.setdefault(words[record.purpose_word], []).append(Operation(self.segment, record))
        return incarnation, inherited

    # ---- forks ----

    def after_fork(self, method: Callable[[], None]) -> None:
        """Have a bound method called in a forked child, once the row is dropped. One for an object, which is not kept alive."""
        self._after_fork[method.__self__] = method.__func__  # type: ignore[attr-defined]

    def before_fork(self, method: Callable[[], bool]) -> None:
        """Have a bound method called before a fork, which says whether a fork marker is due. One for an object, not kept
        alive."""
        self._before_fork[method.__self__] = method.__func__  # type: ignore[attr-defined]

    def reserve_fork_marker(self) -> None:
        """Open the descriptor of the next fork's fork marker, if one is left."""
        if self.spare is None and self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self.spare = reopened(self.segment.descriptor, os.O_RDWR)

    def is_within_fork(self) -> bool:
        """Return whether this very thread is just forking: a signal's handler asks, or a hook. Others wait for ``no_fork``."""
        return self.is_forking and self._forker == threading.get_ident()

    def has_fork_marker(self, row: int) -> bool:
        """Return whether any child lives that a row's process forked while it had leases; or may live."""
        return bool(self.words[row_word(row) + UNTRACKED]) or self.is_locked(row_byte(row) + 1, FORK_MARKERS)

    def is_marked(self, first: int, last: int) -> bool:
        """Return whether any child of this process's own forks ``first`` to ``last`` lives, or may live."""
        if first > last:
            return False
        if self._untracked >= first:
            return True
        begin, length = first % FORK_MARKERS, last - first + 1
        if begin + length > FORK_MARKERS:  # they go round: it may be one of others, too
            begin, length = 0, FORK_MARKERS
        return self.is_locked(row_byte(self.index) + 1 + begin, length)

    def _leave_fork_marker(self) -> None:
        """Before a fork."""
        self._forker = threading.get_ident()  # first: others look at both
        self.is_forking = True
        self.forked += 1
        if self._leaves_fork_marker:
            return
        due = [method(owner) for owner, method in list(self._before_fork.items())]
        if self._descriptor < 0 or not any(due):
            return
        self.reserve_fork_marker()
        self.forks += 1  # the child's, too: forks of others wait
        if self.spare is not None:
            ofd_locks.read_lock(self.spare.fileno(), row_byte(self.index) + 1 + self.forks % FORK_MARKERS)
        else:
            self._untracked = self.forks
            self.words[row_word(self.index) + UNTRACKED] = 1
        # Again: what another thread let go by now is not the child's, and what it lets go from here on is kept.
        for owner, method in list(self._before_fork.items()):
            method(owner)
        self._leaves_fork_marker = True

    def _let_go_in_parent(self) -> None:
        """After a fork, in the parent."""
        self.is_forking = False
        if not self._leaves_fork_marker:
            return
        if self.spare is None:
            self._leaves_fork_marker = False
            warnings.warn(
                "a process was forked, and no descriptor was left by which to see when it ends (ulimit -n): shared memory "
                "that tensors of this process lie on now is not used again",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self.spare, self._leaves_fork_marker = None, False
        self.reserve_fork_marker()

    def _drop_in_child(self) -> None:
        if self._leaves_fork_marker and self.spare is not None:
            self.fork_marker, self.spare = self.spare, None
        self._close()
        fork_marker = self.fork_marker
        self._forget()
        self.fork_marker = fork_marker

    def close_fork_marker(self) -> None:
        """In a forked child: pages that are mapped by it are the fork marker from now on."""
        self.fork_marker = None

    def _end_in_child(self) -> None:
        self.is_forking = False  # all else has been told
        if self.fork_marker is not None:  # nothing is mapped by it, and it may be that something should
            weakref.finalize(self.segment.memory, self.fork_marker.close).atexit = False
            self.fork_marker = None

    def detach(self) -> None:
        """Let go of the row as death would: whatever was under way is left to others."""
        with self.no_fork, self._mutex:
            self._close()
            self._forget()

    def _close(self) -> None:
        self._descriptor, self._owned, self.spare, self._other = -1, None, None, None

    # ---- who is dead ----

    def used(self) -> list[int]:
        """Rows that were ever attached to."""
        incarnations = self.words[INCARNATIONS : INCARNATIONS + MAX_ROWS].tolist()
        return [row for row, incarnation in enumerate(incarnations) if incarnation]

    def is_finished(self, row: int) -> bool:
        """Return whether all that a dead row left undone is done."""
        return self.words[FINISHED + row] == self.words[INCARNATIONS + row]

    def finished(self, row: int) -> None:
        """Nothing is left to do in this dead row, whose lock is held."""
        self.words[FINISHED + row] = self.words[INCARNATIONS + row]

    def leave_unjudged(self, row: int, *, is_so: bool, is_swept: bool) -> None:
        """Mark this dead row, whose lock is held, if something was begun there that this process cannot judge.

        Args:
            is_so: whether there is; else the mark goes.
            is_swept: whether all else that its process had is free.
        """
        self.words[row_word(row) + UNJUDGED] = (SWEPT if is_swept else UNSWEPT) if is_so else 0

    def is_swept(self, row: int) -> bool:
        """Return whether a dead row is marked, and nothing else is left to do there."""
        return self.words[row_word(row) + UNJUDGED] == SWEPT

    def unjudged(self) -> list[int]:
        """Return the dead rows that are marked, and that nobody has judged since."""
        return [row for row in self.used() if self.words[row_word(row) + UNJUDGED]]

    @contextlib.contextmanager
    def locked(self, rows: Iterable[int]) -> Iterator[list[int]]:
        """Hold the locks of those other rows whose processes are dead: nobody else may write there meanwhile.

        Other threads of this process, and signal handlers, are kept out too: to the kernel they are the same holder.
        Never waits.
        """
        held = list[int]()
        if self.is_recovering:
            yield []
            return
        self.is_recovering = True  # with no call since the look, nor until the try: nobody comes in between
        try:
            for row in rows:
                if row != self.index:
                    held.append(row)  # first: an exception may come when it was just locked
                    if not self.try_lock(row_byte(row), 1):
                        held.pop()
            yield list(held)
        finally:
            try:
                self._let_go_of(held)
            except BaseException:  # a handler's, which may have come before the last was unlocked
                self._let_go_of(held)
                raise
            finally:
                self.is_recovering = False

    def _let_go_of(self, rows: list[int]) -> None:
        for row in rows:
            self.unlock(row_byte(row), 1)

    def is_alive(self, row: int) -> bool:
        """Return whether somebody holds the row's lock. A recovering process at work in it counts."""
        return row == self.index or self.is_locked(row_byte(row))

    def is_locked(self, start: int, length: int = 1) -> bool:
        """Return whether any of some bytes is locked through another description than this process's own."""
        return ofd_locks.is_locked(self._descriptor, start, length)

    def holder(self, row: int) -> int:
        """Row and incarnation as they stand in the state of a block that the row's process writes or holds."""
        return self.words[INCARNATIONS + row] << 16 | row << 4

    def try_lock(self, start: int, length: int) -> bool:
        """Lock bytes of the segment through the own description, without waiting."""
        return ofd_locks.lock(self._descriptor, start, length)

    def unlock(self, start: int, length: int) -> None:
        """Let go of bytes that ``try_lock`` or ``share_lock`` got. Without a row: nothing, as they went with it. In a fork that
        has not been told yet: nothing, as the lock is its parent's, too."""
        if self._descriptor >= 0 and self.process == os.getpid():
            ofd_locks.unlock(self._descriptor, start, length)

    def share_lock(self, byte: int) -> bool:
        """Share the lock of a byte of the segment through the own description, without waiting."""
        return ofd_locks.read_lock(self._descriptor, byte)

    @contextlib.contextmanager
    def alone(self, byte: int) -> Iterator[bool]:
        """Hold the lock of a byte that nobody has: no other process, and not this one through its own description.

        To be held once at a time. Never waits, not even for another thread's fork. A collection may have led here while this
        thread holds a lock of ``logging``, say, for which that fork waits. False also where no descriptor is left.
        """
        if self.is_locked(byte):
            yield False
            return
        try:
            with contextlib.suppress(OSError):
                self._other = reopened(self.segment.descriptor, os.O_RDWR)
            yield self._other is not None and ofd_locks.lock(self._other.fileno(), byte, 1)
        finally:
            other, self._other = self._other, None
            if other is not None:  # a child that was forked while it was being opened has it, too, and does not know it
                with contextlib.suppress(OSError):
                    ofd_locks.unlock(other.fileno(), byte, 1)

    def incarnations(self) -> npt.NDArray[np.int64]:
        """Return how often each row has been attached to, modulo what a block's state has room for."""
        return np.array(self.words[INCARNATIONS : INCARNATIONS + MAX_ROWS].tolist(), np.int64)

    def describe(self, row: int) -> str:
        """Return the process of a row, for people; or ``ENDED``."""
        if row == ENDED:
            return "a process that has ended"
        base = row_word(row)
        namespace = self.words[base + NAMESPACE]
        where = "" if namespace == identity().namespace else f" of pid namespace {namespace}"
        return f"pid {self.words[base + PID]}{where} ({'alive' if self.is_alive(row) else 'dead'})"

    # ---- operations ----

    def operation(self, queue: int, direction: int, size: int = 1) -> Operation:
        """Return an operation of the own row for one end of a queue, none of its words set. Give it back by ``retire``.

        Raises:
            SharedMemoryError: so many are under way that the row has no room for another.
        """
        purpose = queue << 8 | direction
        spare = self._inherited.get(purpose) if size == 1 else None
        spare = spare or self._spare[size]
        if not spare:
            self._add_spare(spare, size)
        try:
            operation = spare[-1]
            del spare[-1]  # from here on no call, and so no other thread and no exception, is in between
        except IndexError:  # another thread had it
            return self.operation(queue, direction, size)
        words, first = self.words, operation.counters
        words[operation.purpose] = purpose
        words[first : first + 4] = _NO_COUNTS
        operation.tally_before = words[operation.tally] if size == 1 else 0
        return operation

    def _add_spare(self, spare: list[Operation], size: int) -> None:
        while (number := self._unused[size]) < (SINGLES if size == 1 else SINGLES + BATCHES):
            record = record_of(self.index, number)
            made = None if size == 1 and self.words[record.tally] else Operation(self.segment, record)
            if self._unused[size] == number:  # no call is in between here, either
                self._unused[size] = number + 1
                if made is not None:
                    spare += (made,)
                    return
        raise SharedMemoryError(
            errno.ENOSPC, f"more than {SINGLES if size == 1 else BATCHES} operations on queues of one context are open"
        )

    def retire(self, operation: Operation) -> None:
        """Give back an operation whose words and tally are all zero, for any queue's use."""
        self._spare[operation.size].append(operation)

    def unused_record(self, row: int) -> Record:
        """Return a single operation of a dead row, whose lock the caller has, that nobody's words or tally stand in."""
        base = row_word(row)
        for number in reversed(range(SINGLES)):
            record = record_of(row, number)
            if not self.words[base + PURPOSES + number] or not any(self.words[record.credit : record.tally + 1]):
                return record
        raise SharedMemoryError(errno.ENOSPC, f"all {SINGLES} operations of row {row} are in use")

    def records(self, row: int, queue: int | None = None, direction: int | None = None) -> Iterator[Record]:
        """The operations on record in any row, of all queues or of one end of one."""
        base = row_word(row) + PURPOSES
        purposes = self._numbers[base : base + SINGLES + BATCHES]
        if queue is None:
            found = purposes != 0
        elif direction is None:
            found = purposes >> np.uint64(8) == np.uint64(queue)
        else:
            found = purposes == np.uint64(queue << 8 | direction)
        for number in np.flatnonzero(found).tolist():
            yield record_of(row, number)

    def singles(self, queue: int, direction: int) -> Iterator[Record]:
        """The single operations of one end of a queue that are on record in any row, by one look at all rows."""
        rows = self.used()
        first, behind = row_word(0), row_word(rows[-1] + 1 if rows else 0)
        purposes = self._numbers[first:behind].reshape(-1, ROW_WORDS)[:, PURPOSES : PURPOSES + SINGLES]
        for row, number in np.argwhere(purposes == np.uint64(queue << 8 | direction)).tolist():
            yield record_of(row, number)


_known: weakref.WeakSet[Rows] = weakref.WeakSet()
_told = 0  # the process that was told that it is a fork


def _before_fork() -> None:
    call_all([rows._leave_fork_marker for rows in list(_known)])


def _after_fork_in_parent() -> None:
    call_all([rows._let_go_in_parent for rows in list(_known)])


def _after_fork_in_child() -> None:
    global _told
    if _told == os.getpid():
        return
    known = list(_known)
    hooks: list[Callable[[], None]] = [rows._drop_in_child for rows in known]
    for rows in known:
        hooks += [functools.partial(method, owner) for owner, method in list(rows._after_fork.items())]
    hooks += [rows._end_in_child for rows in known]
    call_all(hooks)
    _told = os.getpid()
