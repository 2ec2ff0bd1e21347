"""Queue and JoinableQueue: multiprocessing's contract, over shared memory. What objects cross as, ``codec`` says."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator
from multiprocessing import context, queues
from multiprocessing.synchronize import SEM_VALUE_MAX  # type: ignore[attr-defined]
from typing import Any, Literal

import torch

from tensorpipe_ipc.cuda import on_device
from tensorpipe_ipc.errors import Closed, SharedMemoryError, TensorPipeError
from tensorpipe_ipc.limits import check_count, check_maxsize, check_timeout
from tensorpipe_ipc.memory.handover import is_sole_reference
from tensorpipe_ipc.memory.loan import Loan
from tensorpipe_ipc.memory.loans import TensorSpec, made
from tensorpipe_ipc.memory.row import BATCH
from tensorpipe_ipc.queues.codec import Apart, Codec, Payload
from tensorpipe_ipc.queues.reader import Reader, Writer
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.serializers.narrowing import narrowing
from tensorpipe_ipc.shared_queue.attachment import default_attachment
from tensorpipe_ipc.shared_queue.queue_statistics import QueueStatistics, statistics_of
from tensorpipe_ipc.shared_queue.shared_memory import LEASE_FROM, Copy, SharedMemoryQueue, lease_from
from tensorpipe_ipc.wire.in_block import PICKLED
from tensorpipe_ipc.wire.layout import Block

__all__ = ["JoinableQueue", "Queue"]

MOST_SPIN = 0.001


class Queue(queues.Queue):  # type: ignore[type-arg]  # to those who ask; it has none of its state
    """multiprocessing.Queue's methods and errors, without its feeder thread: ``put`` has read the object when it returns.

    It may be inherited by fork, or passed to a process that is being spawned, and used from many threads.

    Attributes:
        takes_offers: whether a put hands over what a DataLoader's worker made for it, though it does not say ``move``: that of
            the worker's own loop does, as nobody sees the batch after it. Whoever else puts has the object copied.
    """

    _has_tasks = False

    def __init__(
        self,
        maxsize: int = 0,
        *,
        ctx: Any = None,
        serializer: str = "raw",
        wire_dtype: torch.dtype | None = None,
        spin: float = 0.0,
        cuda_ipc: bool = False,
    ) -> None:
        """A new, empty queue.

        Args:
            maxsize: how many objects may be in it; 0 or less: any number.
            ctx: what ``get_context`` returned: the queue shares its memory. Any other (multiprocessing's own, or None): it
                shares the process's default memory, which is there as long as something lies in it.
            serializer: what the bytes of tensors are.
            wire_dtype: torch.float16, bfloat16, float8_e4m3fn or float8_e5m2: real floating-point tensors and arrays that
                are wider than it cross as it, and get their own dtype back when they are taken. ``statistics()`` says what
                that cost. What goes by reference (``move``, ``loan``) goes as it is, and so does all else.
            spin: seconds, at most 0.001, for which ``get`` looks for an object before it sleeps: it saves the wake-up
                where objects come that fast, for a core that is busy meanwhile.
            cuda_ipc: large GPU tensors stay on their GPU, where everyone who gets from the queue wants them on a GPU
                (``device=``), sees theirs, and has passed a self-test. They arrive as copies in memory of the receiver's
                own. Such an object is lost if the process that put it ends before it was taken: the get raises PeerLost.
                Else they are staged, and ``statistics()`` says why. With ``wire_dtype`` they always are.

        Raises:
            TypeError: ``maxsize`` is no whole number.
            ValueError: ``spin`` is out of range, ``maxsize`` above 16,777,215, or ``wire_dtype`` none of these.
            UnknownSerializer: no serializer of that name.
            SharedMemoryError: no memory, no pipe or no descriptor is left.
        """
        maxsize = check_maxsize(maxsize)
        if not 0 <= spin <= MOST_SPIN:
            raise ValueError(f"spin must be from 0 (sleep at once) to {MOST_SPIN} seconds, not {spin}")
        named = serializer_named(serializer)
        narrows = narrowing(named, wire_dtype)
        self._closed = self._used = False
        attachment = getattr(ctx, "tensorpipe_attachment", default_attachment)()
        self._queue = SharedMemoryQueue.create(attachment, max(0, maxsize), tasks=self._has_tasks)
        self._codec = Codec(self._queue, named, narrows, cuda_ipc=cuda_ipc)
        self._queue.spin = self._spin = spin
        self._undeliverable: list[Exception] = []
        self.takes_offers = False

    def put(self, obj: Any, block: bool = True, timeout: float | None = None, *, move: bool = False) -> None:
        """Put an object. Once this returns it has been read, and survives this process.

        What the program itself put into torch's shared memory (``share_memory_()``) stays shared: what either side writes, the
        other sees. torch's own handle is sent, which needs a descriptor for each storage, and this process until the
        object was taken: when it ends in order it waits a second at most for that. What is one object in ``obj`` is one
        object in what ``get`` returns, as pickle keeps it. Strings and numbers have no identity: they are only equal.

        An exception that a signal's handler raises meanwhile leaves the object put, once, or not put.

        Args:
            obj: a tree of tensors, arrays, numbers and so on, or anything else that can be pickled.
            block: whether to wait for room.
            timeout: seconds to wait; None: for ever.
            move: give the tensors away, by reference where that is possible: where the large ones lie in one block of this
                queue's memory that this process holds (from ``ctx.empty``, or got from a queue of the same context), and no
                view, array, storage or DLPack capsule of it, nor a child forked since, is left besides the tensors
                in ``obj``. These are then *empty*, of shape (0,). Otherwise the object is copied, and stays as it was.

        Raises:
            Full: there was no room in time. Who holds what is named; the object stays with the caller.
            Closed: the queue is closed here (a ValueError, as multiprocessing says it).
            UnsupportedLeaf: a tensor with autograd history, say (a RuntimeError, as torch's queue raises it, and a TypeError).
            Exception: whatever the object raises on pickling.
            SharedMemoryError, OutOfMemory: a tensor is larger than memory, as one that is expanded may be. The sizes are named.
        """
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        self._used = True
        seconds, codec, apart = _seconds(block, timeout), self._codec, None
        offered = self.takes_offers and not move and bool(self._queue.leases.offered) and is_sole_reference(obj)
        if move or offered:
            apart = codec.take_apart(obj)
            held = codec.handed_over(obj, apart, offered=offered)
            if held is not None:
                began = time.monotonic()
                if self._queue.put_held(*held, seconds):
                    return
                seconds = seconds and max(0, seconds - (time.monotonic() - began))
        payload, metadata = codec.encode(obj, apart)
        try:
            self._queue.put(payload, metadata, seconds)
        except BaseException as error:
            codec.take_back(payload, error)
            raise

    def put_many(self, objs: Iterable[Any], timeout: float | None = None) -> None:
        """Put objects in their order, with one system call for up to 64 of them.

        Every error of ours has an attribute ``put``: how many objects, from the first on, are in the queue. An exception that a
        signal's handler raises meanwhile has none, as that is not known.

        Args:
            objs: what ``put`` takes, each an object of its own to ``get``. Of an iterable that is no list or tuple, each is
                read before the next is asked for: a generator may fill the same memory again.
            timeout: seconds to wait for room for the last of them; None: for ever.

        Raises:
            Full: there was not room for all in time. The others stay with the caller.
            Exception: as ``put`` does. Then those before the error's object are in the queue, where they found room.
        """
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        self._used = True
        deadline = None if timeout is None else time.monotonic() + _timeout(timeout)
        remaining, is_made = iter(objs), type(objs) not in (list, tuple)
        waiting, done = list[tuple[Payload, bytes]](), 0
        at_fault: Exception | None = None
        try:
            while at_fault is None:
                try:
                    has_more = self._encode_some(remaining, waiting, is_made)
                except Exception as error:
                    at_fault = error
                while waiting:
                    left = None if deadline is None else max(0, deadline - time.monotonic())
                    try:
                        count = self._queue.put_many(waiting, left)
                    except SharedMemoryError:  # one of them is too large, and none was put: which is it?
                        if len(waiting) == 1:
                            raise
                        count = self._queue.put_many(waiting[:1], left)
                    done += count
                    del waiting[:count]
                if at_fault is None and not has_more:
                    return
            raise at_fault
        except BaseException as error:
            for payload, _ in waiting:
                self._codec.take_back(payload, error)
            # Any other is a signal handler's: it may have come when some were put that are not counted yet.
            if error is at_fault or isinstance(error, TensorPipeError):
                with contextlib.suppress(AttributeError):  # an object's own exception may have no room for it
                    error.put = done  # type: ignore[attr-defined]
            raise

    def _encode_some(self, remaining: Iterator[Any], waiting: list[tuple[Payload, bytes]], is_made: bool) -> bool:
        """Objects to be put together. Whether there are more.

        Args:
            is_made: their memory may be used again for the next: each must be copied before that is asked for.
        """
        for obj in remaining:
            apart = None if type(obj) is torch.Tensor else self._codec.take_apart(obj)
            payload, metadata = self._codec.encode(obj, apart)
            is_apart = not (is_made or _may_change(apart, metadata))
            copies = not is_apart and payload.nbytes < LEASE_FROM and type(payload) is Block
            waiting.append((Copy(payload) if copies else payload, metadata))
            if len(waiting) == BATCH or not (is_apart or copies):
                return True
        return False

    def get(
        self,
        block: bool = True,
        timeout: float | None = None,
        *,
        copy: bool | Literal["auto"] = "auto",
        device: Any = None,
        restore: bool = True,
        as_numpy: bool = False,
    ) -> Any:
        """Take an object. It belongs to the caller.

        Args:
            block: whether to wait for one.
            timeout: seconds to wait; None: for ever.
            copy: True: all tensors lie in memory of their own. False: they lie in shared memory, however small, as a
                *lease*: they keep the memory that they came in, until the last alias of them is gone. "auto": a lease
                from 32 KiB on, as long as this process has at most half of the queue's memory under lease, and no more is
                in use than its capacity. Tensors without items, and messages without tensors, have no memory and are the
                same in any case. A lease below a page costs a page.
                What a child, forked while they are alive, writes to them stays its own. What *this* process writes later the
                child may see, in pages that it has not written itself: what it is to keep as it is, it clones.
            device: where tensors are wanted: a ``torch.device`` or its name. None or "cpu": as they come. To a GPU large ones
                are copied straight from shared memory, which is held until that is done. Arrays, bytes and storages stay
                on the CPU.
            restore: whether floats that a ``wire_dtype`` narrowed get their own dtype back, in memory of their own. False:
                they come as they crossed, as a lease if large (but for what goes to NumPy, of a dtype that NumPy lacks).
            as_numpy: NumPy arrays in the place of tensors, on the same memory: nothing is copied for it.

        Raises:
            Empty: none came in time.
            Closed: the queue is closed here.
            ValueError: ``copy`` is none of these, ``device`` names none, or goes with ``as_numpy``.
            UnsupportedLeaf: ``as_numpy``, and a tensor is of a dtype or a layout that NumPy lacks. The object is what the next
                get takes.
            MemoryError, OSError, torch.OutOfMemoryError: there is not enough for it now. The object is what the next get
                takes; after eight tries it is dropped.
            Exception: whatever the object raises when it is made again. It is dropped, and counted (``undecodable``). What is
                no ``Exception`` (SystemExit, KeyboardInterrupt) may be a signal handler's: it is dropped after eight tries.
            ShutDown: the queue was shut down, and is empty.
            SharedMemoryError: copy=False, and this process has as much under lease as it may (half of the queue's memory),
                or more memory is in use than the queue's capacity. The message is the next that a get in this process takes.
                Or, ``cuda_ipc``: this process cannot read the GPU memory that the object lay in. It is dropped.
            PeerLost: the process that put the object is gone, and with it GPU memory (``cuda_ipc``), or a handle of torch's
                shared memory. The object is dropped.
        """
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        decode = self._codec.decode_as(restore, as_numpy, device)
        if self._codec.lender is None:
            return self._queue.get(_seconds(block, timeout), decode, lease_from(copy))
        self._raise_undeliverable()
        found = self._queue.get(_seconds(block, timeout), decode, lease_from(copy))
        if type(found) is on_device.Undeliverable:
            raise found.error
        return found

    def get_many(
        self,
        max_items: int,
        timeout: float | None = None,
        *,
        copy: bool | Literal["auto"] = "auto",
        device: Any = None,
        restore: bool = True,
        as_numpy: bool = False,
    ) -> list[Any]:
        """Take the objects that are there, with one system call; wait where there is none.

        Args:
            max_items: at most so many. 64 at once are never exceeded.
            timeout: seconds to wait for the first; None: for ever.
            copy, device, restore, as_numpy: what ``get`` takes, for each of them.

        Returns:
            At least one, in the order in which they were put. They belong to the caller.

        Raises:
            TypeError: ``max_items`` is no whole number.
            ValueError: ``max_items`` is not positive.
            Exception: as ``get`` does, for the first of them. Where another one is at fault those before it are returned, and
                the error is the next get's.
        """
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        max_items = check_count(max_items, "max_items")
        decode = self._codec.decode_as(restore, as_numpy, device)
        self._raise_undeliverable()
        found = self._queue.get_many(max_items, _seconds(True, timeout), decode, lease_from(copy))
        if self._codec.lender is not None:
            errors = [each.error for each in found if type(each) is on_device.Undeliverable]
            found = [each for each in found if type(each) is not on_device.Undeliverable]
            self._undeliverable += errors if found else errors[1:]
            if not found:
                raise errors[0]
        return found

    def _raise_undeliverable(self) -> None:
        if self._undeliverable:
            error = self._undeliverable[0]
            del self._undeliverable[0]  # with no call since the look: no other thread comes in between
            raise error

    def loan(self, tensors: Any, dtype: torch.dtype = torch.float32, *, timeout: float | None = None) -> Loan:
        """Tensors in shared memory, to be filled, and sent without a copy::

            with queue.loan((64, 3, 224, 224), torch.uint8) as batch:
                decode_into(batch)

        On leaving the block they are put as ``put(..., move=True)`` does: no alias of them should be left (else they are
        copied), and they are empty then. On an exception they are not put; their memory is free when they are gone.
        Where there is no room, and nothing in the queue whose taking may make some, they lie in memory of the process's
        own, and are copied when they are put.
        Where there is no room in time, Full is raised, and they stay the caller's, with all that was written to
        them: they may be put with ``move=True`` later.

        Args:
            tensors: a shape; or a tree of ``TensorSpec`` and plain values in dicts, lists and tuples, to be sent as it is
                when the block is left.
            dtype: with a shape.
            timeout: seconds to wait for memory on entering, and for room on leaving; None: for ever.
        """
        return Loan(self, tensors, dtype, timeout)

    def lend(self, specs: list[TensorSpec], timeout: float | None) -> list[torch.Tensor]:
        """Make a loan's tensors on entering it: in one block of shared memory, not initialised."""
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        return made(specs, self._queue.leases, functools.partial(self._queue.block_for, _seconds(True, timeout)))

    def trim(self) -> int:
        """Give back all memory that this queue and those that share it with it hold ready, but nobody needs, whichever process
        has it. What lies idle for some seconds is given back anyway, by whoever then puts, waits or polls.

        Returns:
            How many bytes that were.
        """
        return self._queue.attachment.trim()

    def put_nowait(self, obj: Any) -> None:
        """``put(obj, block=False)``."""
        self.put(obj, False)

    def get_nowait(self) -> Any:
        """``get(block=False)``."""
        return self.get(False)

    def qsize(self) -> int:
        """Return how many objects are in it. Others may put and get meanwhile."""
        return self._queue.qsize()

    def empty(self) -> bool:
        """Return whether nothing is in it, at this moment.

        Raises:
            OSError: the queue is closed here, and was put into here, as multiprocessing has it.
        """
        if self._closed and self._used:
            raise OSError("the handle is closed")
        return not self.qsize()

    def full(self) -> bool:
        """Return whether it has no room, at this moment."""
        return 0 < self._queue.maxsize <= self.qsize()

    def close(self) -> None:
        """Stop using the queue in this process. Other processes go on, and messages that were put stay for them.

        A message that a ``get`` here had taken and left for the next one, because of an exception, is lost and counted. A
        thread that waits in ``get`` meanwhile goes on waiting, as with multiprocessing's queue: ``shutdown`` wakes it.
        """
        self._closed = True
        self._queue.give_up()

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse further puts, in every process, and gets once the queue is empty. Who waits is woken.

        As ``queue.Queue.shutdown`` of Python 3.13. Once this returns no put succeeds, but for that of a process which was
        stopped (SIGSTOP) in the microseconds between its last look and its ticket.

        Args:
            immediate: drop what is in the queue (its tasks count as done), so that gets are refused at once.
        """
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        self._queue.shut_down(drop=immediate)

    def join_thread(self) -> None:
        """Nothing: there is no thread."""

    def cancel_join_thread(self) -> None:
        """Nothing: there is no thread."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``get`` would not wait; now and then, when more was put than a pipe
        holds, also when it would.

        Where other processes get from the queue, too, it may be silent about what a get here took and left for the next one:
        after an exception, and after ``get_many``, ask ``empty()`` before you wait for it.
        """
        return self._queue.fileno()

    def statistics(self) -> QueueStatistics:
        """Return a snapshot of what this process did with the queue, and of the arena that it lies in."""
        found, lender, narrows = statistics_of(self._queue), self._codec.lender, self._codec.narrowing
        found = dataclasses.replace(found, shared_by_torch=self._codec.shared_by_torch)
        if lender is not None:
            found = dataclasses.replace(found, on_device=lender.on_device, staged_because=lender.staged_because)
        if narrows is not None:
            found = dataclasses.replace(found, overflowed=narrows.overflowed, worst_error=narrows.worst)
        return found

    @property
    def is_shut(self) -> bool:
        """Return whether it was shut down, by any process."""
        return bool(self._queue.words[self._queue.record.shut])

    @property
    def _reader(self) -> Reader:
        """The reader, as users of multiprocessing's queues reach for it: ``connection.wait([queue._reader])``."""
        return Reader(self)

    @property
    def _writer(self) -> Writer:
        return Writer(self)

    @property
    def _maxsize(self) -> int:
        return self._queue.maxsize or SEM_VALUE_MAX

    @property
    def closed(self) -> bool:
        """Return whether it was closed in this process."""
        return self._closed

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        return self._queue, self._codec, self._spin

    def __setstate__(self, state: Any) -> None:
        self._queue, self._codec, self._spin = state
        self._queue.spin = self._spin
        self._undeliverable = []
        self._closed = self._used = self.takes_offers = False


class JoinableQueue(Queue, queues.JoinableQueue):  # type: ignore[type-arg]
    """multiprocessing.JoinableQueue: a Queue that knows which of its objects are not dealt with yet.

    What a process had taken and not done when it ended counts as done: nobody will do it, and ``join`` must not wait for the
    dead. But not once some process has called ``task_done`` more often than it took objects: then it does so for others, who
    may have ended, and ``join`` waits for all that was put, as multiprocessing's does.
    """

    _has_tasks = True

    def task_done(self) -> None:
        """An object that was taken has been dealt with. For consumers, once for each ``get``, also after ``close``.

        Raises:
            ValueError: called more often than objects were put.
        """
        self._queue.attachment.attach()
        self._queue.tasks.done()

    def join(self) -> None:
        """Wait until every object that was put has been dealt with, was dropped by a shutdown, or is lost: with a consumer that
        died, or by an exception of a signal's handler inside ``get``. An object of which ``get`` raised an error, and that was
        dropped, counts as taken: it waits for ``task_done``, as multiprocessing has it. It may be called after ``close``."""
        self._queue.attachment.attach()
        self._queue.tasks.wait(self._queue.tidy)


def _may_change(apart: Apart | None, metadata: bytes) -> bool:
    """Return whether taking the next object apart may change what this one's message is made of: both have leaves that code
    of the user's gave, which may have one buffer for all (``__reduce__``, or ``to`` of a registered type)."""
    flat = None if apart is None else apart[0]
    return bool(metadata[0] & PICKLED) or (flat is not None and None in flat.nodes)


def _seconds(block: bool, timeout: float | None) -> float | None:
    if not block:
        return 0
    return None if timeout is None else _timeout(timeout)


def _timeout(timeout: float) -> float:
    """Seconds; what is negative is 0, as multiprocessing has it."""
    try:
        return check_timeout(max(timeout, 0))
    except TypeError:  # of max: it says nothing of timeouts
        return check_timeout(timeout)
