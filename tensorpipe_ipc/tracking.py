"""MemoryTracker: what memory a process, and all that descend from it, take up while something runs.

**Each page once.** Resident memory (rss) of several processes counts a shared page in each of them. So beside it stand,
for one process and for the whole family alike:

* ``uss``: pages that one process alone has: summed, nothing is counted twice.
* ``shared``: pages that several have, each counted once. ``uss + shared`` is what living members have touched, together.
* ``pss``: every page divided among those who have it, also those outside of the family.

The kernel counts a page of shared memory with those who have touched it. If no living member has, it is in none of the
three, nor in rss: so it is with messages that still wait when their producer has ended. Only ``arena`` has such pages.

The kernel tells of each process how many of its pages are its own, and its proportional part, but not which pages two
have in common. Where only members share a page, its parts in their pss add up to the page: pss - uss is exact. Where
outsiders share too (libraries, mostly), that falls short; but what one member shares is no less than rss - uss. The larger
of the two is given: a lower bound, and exact where nobody outside shares.

**What each source costs** decided how often it is read (two busy cores, Python 3.11; a process that has imported torch)::

    waking up                              106 us   (a bare sleep of 10 ms; 190 us for an Event's wait)
    /proc/PID/statm                         10 us   rss              at every sample
    lists of children, a thread             15 us   who belongs to it
    smaps_rollup, through psutil         1,100 us   uss, pss, swap   a *full* sample: first, last, and now and then

So that tracking takes no more than 1 % of one core, however slow and busy that is, each has a budget: 0.3 % for full
samples, 0.1 % for lists of children, 0.6 % for all else: where waking up alone costs more than that, samples come
further apart than ``interval``.

What came and went between two looks was not seen, but for the peak of a process that is still there: the kernel keeps that.
Only the samples at the begin and at the end are beyond the budget.

**The thread.** Sampling takes one of its own, as long as the ``with`` block lasts, and it is the only one of this package that
outlasts a call. ``interval=None`` starts none: then samples are taken at the begin, at the end and by ``sample()``, and the
peaks of single processes are the kernel's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import NamedTuple

from tensorpipe_ipc.cuda import staging
from tensorpipe_ipc.errors import Busy, Closed
from tensorpipe_ipc.owned_fd import OwnedFd, pipe
from tensorpipe_ipc.process import Memory, family, memory, peak_rss, reset_peak_rss, resident, started
from tensorpipe_ipc.shared_queue.survey import SegmentView, survey

__all__ = ["MemorySample", "MemoryTracker", "TrackedProcess", "together"]

FULL_SHARE = 0.003  # of one core
FAMILY_SHARE = 0.001
QUICK_SHARE = 0.007  # lists of children among them
MOST = 20_000  # samples that are kept, in 4 MB
MIB = 1 << 20


class MemorySample(NamedTuple):
    """The family's memory at one moment, in bytes. What only a full sample tells is None in others."""

    seconds: float
    """Since tracking began."""
    processes: int
    """How many there were."""
    rss: int
    """Resident, of all; a shared page counts in each process."""
    uss: int | None = None
    """Unique, of all."""
    pss: int | None = None
    """Proportional, of all."""
    shared: int | None = None
    """Pages that several processes have, each once. What no living one has touched is in no figure but ``arena``."""
    swap: int | None = None
    """Swapped out."""
    arena: int | None = None
    """Shared memory of ours that these processes have open. Pages that a living one has touched are part of the others, too."""
    gpu: int | None = None
    """Of all GPUs, what torch in this very process has allocated."""


class TrackedProcess(NamedTuple):
    """One process of the family."""

    pid: int
    ended: bool
    """Or became another user's, whose memory may not be looked at."""
    first: Memory
    """As the first full sample found it. All 0 where it came and went between two."""
    last: Memory
    peak: Memory
    """Each figure's own; rss as the kernel keeps it, where it let itself be reset."""


class _Watched:
    """A process, its first, last and highest figures."""

    def __init__(self, pid: int, since: float) -> None:
        self.pid, self.started = pid, since
        self.is_member, self._is_gone = True, False
        self.is_peak_known = reset_peak_rss(pid)
        self.first: Memory | None = None
        self.last = self.peak = Memory(0, 0, 0, 0, 0)

    @property
    def ended(self) -> bool:
        return self._is_gone or not self.is_member

    def look(self) -> Memory | None:
        try:
            found = memory(self.pid)
            self._is_gone = not found.rss  # a zombie
        except (ProcessLookupError, PermissionError):  # it ended, or became another user's, as sudo does
            self._is_gone = True
        if self._is_gone:
            return None
        self.last = found
        if self.first is None:
            self.first = self.last
        self.peak = Memory(*map(max, self.peak, self.last))
        if self.is_peak_known:
            self.peak = self.peak._replace(rss=max(self.peak.rss, peak_rss(self.pid)))
        return self.last

    def read(self) -> int:
        rss = resident(self.pid)
        self._is_gone = not rss
        if rss > self.peak.rss:
            self.peak = self.peak._replace(rss=rss)
        return rss


class MemoryTracker:
    """Tracks memory as long as its ``with`` block lasts::

        with tp.MemoryTracker() as memory:
            train()
        print(memory.report())
        assert memory.peak.uss < 2 << 30

    Attributes:
        samples: what was seen, in order. Of 20,000 every second is dropped, so the older are further apart. ``peak`` is of all.
        arenas: the shared memory of ours that these processes had open at the last full sample: what it may cost, costs,
            how much is in use, who holds it.
        share: of one core, what tracking took.
    """

    def __init__(self, interval: float | None = 0.01, *, children: bool = True, pid: int | None = None) -> None:
        """It does not begin yet.

        Args:
            interval: seconds between samples, at least 0.001. None: no thread is started, and samples are taken at the
                begin, at the end, and by ``sample()``.
            children: whether all that descend from the process count, too, those that it starts meanwhile among them.
            pid: the process; None: this one.

        Raises:
            ValueError: ``interval`` is below 0.001.
            ProcessLookupError: there is no such process (on entering).
            PermissionError: it is another user's (on entering).
        """
        if interval is not None and not interval >= 0.001:
            raise ValueError(f"interval={interval}: give at least 0.001 seconds, or None for no thread")
        self._interval, self._children, self._pid = interval, children, os.getpid() if pid is None else pid
        self._owner = 0
        self.samples: list[MemorySample] = []
        self._dropped: list[MemorySample] = []  # their peak
        self.arenas: list[SegmentView] = []
        self.share = 0.0
        self._seen: list[_Watched] = []  # in the order in which they came
        self._mutex = threading.RLock()  # for those that sample; nothing else waits for it
        self._is_sampling = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> MemoryTracker:
        """Begin, with a full sample.

        Raises:
            Closed: it was used before.
        """
        if self._owner:
            raise Closed("a MemoryTracker tracks once; make another")
        memory(self._pid)  # raises before anything is begun
        self._started = started(self._pid)
        self._owner = os.getpid()
        self._began = time.monotonic()
        self._spent = 0.0
        self._next_full = self._next_family = 0.0
        self.sample()
        if self._interval is not None:
            stop, self._stop = pipe()
            self._thread = threading.Thread(
                target=self._run, args=(self._interval, stop), name="MemoryTracker", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, with a full sample. In a child that was forked meanwhile: nothing."""
        if self._owner != os.getpid():
            return
        try:
            if self._thread is not None:
                os.write(self._stop.fileno(), b"x")  # to close it is not enough: children that were forked have it, too
                self._thread.join()
                self._stop.close()
            with _but_for_a_lack_of_descriptors():
                self.sample()
        finally:
            self.share = self._spent / max(1e-9, time.monotonic() - self._began)
            self._owner = -1

    def sample(self) -> MemorySample:
        """Take a full sample, now.

        Raises:
            Closed: outside of the ``with`` block, or in a forked child.
            Busy: a signal's handler asks for it in the middle of a sample of this thread's.
            OSError: no descriptor is left to read figures by. The tracker's own thread goes on when there are some again.
        """
        if self._owner != os.getpid():
            raise Closed("this MemoryTracker is not at work in this process: use it inside its with block")
        with self._exclusive():
            began = time.thread_time()
            self._look_for_members()
            sample = self._full()
            self._spent += time.thread_time() - began
        return sample

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._mutex:
            if self._is_sampling:
                raise Busy("this thread is taking a sample already; read `peak`, or sample after the handler")
            self._is_sampling = True
            try:
                yield
            finally:
                self._is_sampling = False

    @property
    def peak(self) -> MemorySample:
        """The highest of each figure, each at its own moment. Of unique, proportional and shared memory the full samples
        tell. Resident memory is at least what the kernel kept as any one process's peak, which each tracker that begins
        on that process sets back: another one's, too."""
        found = _highest([*self.samples, *self._dropped])  # in this order: what is dropped meanwhile is in both
        return found._replace(rss=max([found.rss or 0, *(watched.peak.rss for watched in list(self._seen))]))

    @property
    def growth(self) -> MemorySample:
        """The last full sample less the first."""
        full = [sample for sample in self.samples if sample.uss is not None]
        if not full:
            return MemorySample(0.0, 0, 0)
        first, last = full[0], full[-1]
        return MemorySample(*(None if b is None or a is None else b - a for a, b in zip(first, last, strict=True)))  # type: ignore[arg-type]

    @property
    def processes(self) -> list[TrackedProcess]:
        """Each process that was seen, in the order in which they came."""
        return [
            TrackedProcess(each.pid, each.ended, each.first or Memory(0, 0, 0, 0, 0), each.last, each.peak)
            for each in list(self._seen)
        ]

    def report(self) -> str:
        """A table of what was seen, for people, in MiB. Plain text: it needs nothing that is not installed."""
        full = sum(sample.uss is not None for sample in self.samples)
        seconds = self.samples[-1].seconds if self.samples else 0.0
        lines = [
            f"memory in MiB over {seconds:.1f} s: {len(self.samples)} samples, {full} of them full, "
            f"{100 * self.share:.2f} % of one core",
            _row("", "resident", "unique", "proport.", "shared", "swapped"),
        ]
        for each in self.processes:
            name = f"pid {each.pid}, peak{' (ended)' if each.ended else ''}"
            lines.append(_row(name, *map(_mib, each.peak)))
        for name, of in (("all, each page once", self.peak), ("growth of all", self.growth)):
            lines.append(_row(name, *map(_mib, (of.rss, of.uss, of.pss, of.shared, of.swap))))
        if self.peak.gpu:
            lines.append(f"GPU, allocated by torch in this process, peak: {_mib(self.peak.gpu)}")
        for arena in self.arenas:
            lines.append(
                f"shared memory {arena.inode}: {_mib(arena.resident)} of at most {_mib(arena.capacity)}, "
                f"{_mib(arena.in_use)} in use, {_mib(arena.leased)} under lease"
            )
            for part in arena.parts:
                if part.nbytes or part.written:
                    lines.append(
                        f"  {part}: {part.held} held with {_mib(part.nbytes_held)}, "
                        f"{part.queued} waiting, {part.written} being filled"
                    )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Everything, as a JSON object, in bytes."""
        return json.dumps(
            {
                "share_of_a_core": self.share,
                "peak": self.peak._asdict(),
                "growth": self.growth._asdict(),
                "processes": [
                    {
                        key: value._asdict() if isinstance(value, Memory) else value
                        for key, value in each._asdict().items()
                    }
                    for each in self.processes
                ],
                "arenas": [
                    {
                        "inode": each.inode,
                        "capacity": each.capacity,
                        "resident": each.resident,
                        "in_use": each.in_use,
                        "leased": each.leased,
                        "parts": [part._asdict() for part in each.parts],
                    }
                    for each in self.arenas
                ],
                "samples": [sample._asdict() for sample in self.samples],
            }
        )

    def plot(self, path: str) -> None:
        """Draw memory against time into a file (.png, .pdf, .svg).

        Raises:
            ModuleNotFoundError: matplotlib is not installed; the text says what to type.
        """
        try:
            import matplotlib.figure
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                "this needs matplotlib: pip install 'tensorpipe-ipc[plot]'", name=missing.name
            ) from None
        figure = matplotlib.figure.Figure(figsize=(10, 5), layout="constrained")
        axis = figure.subplots()
        for field, name, colour in _LINES:
            points = [(each.seconds, getattr(each, field)) for each in self.samples if getattr(each, field) is not None]
            if field == "gpu" and not any(value for _, value in points):
                continue
            axis.plot(
                [at for at, _ in points],
                [value / MIB for _, value in points],
                color=colour,
                label=name,
                marker="." if field != "rss" else None,
            )
        axis.set(xlabel="seconds", ylabel="MiB", ylim=(0, None))
        axis.set_title("Memory of all processes", loc="left", fontweight="bold")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        figure.savefig(path, dpi=110)

    # -- sampling

    def _run(self, interval: float, stop: OwnedFd) -> None:
        """Until there is something in ``stop``. (A poll, as it wakes for half of what an Event does.)"""
        poll = select.poll()
        poll.register(stop, select.POLLIN)
        due = began = time.monotonic()
        due += interval
        counted = on_full = 0.0
        while not poll.poll(max(0.0, due - time.monotonic()) * 1000):
            with self._exclusive():
                with _but_for_a_lack_of_descriptors():
                    on_full += self._tick()
                spent = time.thread_time()  # of this thread, waking up included
                self._spent += spent - counted  # beside what samples that were asked for took
                counted = spent
            # what came late is not made up for, and what costs too much comes later
            due = max(due + interval, time.monotonic(), began + (spent - on_full) / QUICK_SHARE)

    def _tick(self) -> float:
        """One sample, full if it is time for that. Seconds that a full one took."""
        now, began = time.monotonic(), time.thread_time()
        if self._children and now >= self._next_family:
            self._look_for_members()
            self._next_family = now + (time.thread_time() - began) / FAMILY_SHARE
        if now >= self._next_full:
            began = time.thread_time()
            self._full()
            return time.thread_time() - began
        rss = sum(watched.read() for watched in self._living())
        self._keep(MemorySample(now - self._began, len(self._living()), rss))
        return 0.0

    def _look_for_members(self) -> None:
        members = self._members()
        for watched in self._living():
            watched.is_member = watched.pid in members
        known = {watched.pid for watched in self._living()}
        ended = {(watched.pid, watched.started): watched for watched in self._seen if watched.ended}
        for pid in members:
            if pid not in known:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # or another user's, and hidden
                    since = started(pid)
                    if (pid, since) in ended:  # a zombie is a member until it is waited for; or the last look missed it
                        ended[pid, since].is_member = True
                    else:
                        self._seen.append(_Watched(pid, since))

    def _members(self) -> list[int]:
        """Return the ids of those that are tracked; none once the process has ended: its id may be another's."""
        try:
            if started(self._pid) != self._started:
                return []
        except ProcessLookupError:
            return []
        return family(self._pid) if self._children else [self._pid]

    def _living(self) -> list[_Watched]:
        return [watched for watched in self._seen if not watched.ended]

    def _full(self) -> MemorySample:
        began, now = time.thread_time(), time.monotonic()
        found = [each for each in [watched.look() for watched in self._living()] if each is not None]
        self.arenas = survey([watched.pid for watched in self._living()])
        total = together(found)
        sample = MemorySample(
            now - self._began,
            len(found),
            *total,
            sum(arena.resident for arena in self.arenas),
            sum(staging.allocated().values()),
        )
        self._keep(sample)
        self._next_full = now + (time.thread_time() - began) / FULL_SHARE
        return sample

    def _keep(self, sample: MemorySample) -> None:
        self.samples.append(sample)
        if len(self.samples) >= MOST:
            self._dropped = [_highest([*self._dropped, *self.samples[1:-1:2]])]
            self.samples = [*self.samples[:-1:2], self.samples[-1]]


@contextlib.contextmanager
def _but_for_a_lack_of_descriptors() -> Iterator[None]:
    """Leave a sample out where no descriptor is left to read figures by: others may be closed by the next one."""
    try:
        yield
    except OSError as failed:
        if failed.errno not in (errno.EMFILE, errno.ENFILE):
            raise


def _highest(samples: list[MemorySample]) -> MemorySample:
    """Return the highest of each figure; None of one that none of them has."""
    found = ([getattr(sample, field) for sample in samples] for field in MemorySample._fields)
    return MemorySample(*(max((value for value in each if value is not None), default=None) for each in found))  # type: ignore[arg-type]


def together(of: Iterable[Memory]) -> Memory:
    """Return the memory of several processes, in which no page counts twice but in ``rss``. See the module's text."""
    found = list(of)
    rss, uss, pss, _, swap = (sum(each) for each in zip(*found, strict=True)) if found else (0,) * 5
    return Memory(rss, uss, pss, max([pss - uss, *(each.shared for each in found)], default=0), swap)


_LINES = (
    ("rss", "resident (shared pages in each process)", "#56B4E9"),
    ("pss", "proportional", "#D55E00"),
    ("uss", "unique", "#009E73"),
    ("arena", "shared memory of ours", "#0072B2"),
    ("gpu", "GPU", "#CC79A7"),
)


def _row(name: str, *cells: str) -> str:
    return f"{name:26}" + "".join(f"{cell:>11}" for cell in cells)


def _mib(value: int | None) -> str:
    return "?" if value is None else f"{value / MIB:,.1f}"
