"""Queue and JoinableQueue: multiprocessing's contract, over shared memory.

``codec`` decides in which form an object crosses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator
from multiprocessing import context, queues
from multiprocessing.synchronize import SEM_VALUE_MAX  # type: ignore[attr-defined]
from numbers import Real
from typing import Any, Literal

import torch

from tensorpipe_ipc.compiled import CompiledPath
from tensorpipe_ipc.cuda import on_device
from tensorpipe_ipc.errors import Closed, OutOfMemory, SharedMemoryError, TensorPipeError
from tensorpipe_ipc.handlers import is_a_signals
from tensorpipe_ipc.limits import check_count, check_maxsize, check_seconds, check_timeout
from tensorpipe_ipc.memory.handover import is_sole_reference
from tensorpipe_ipc.memory.loan import Loan
from tensorpipe_ipc.memory.loans import TensorSpec, make_tensors
from tensorpipe_ipc.memory.row import BATCH
from tensorpipe_ipc.queues.codec import Apart, Codec, Payload
from tensorpipe_ipc.queues.reader import Reader, Writer, end_of
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.serializers.narrowing import narrowing
from tensorpipe_ipc.shared_queue.attachment import default_attachment
from tensorpipe_ipc.shared_queue.queue_statistics import QueueStatistics, statistics_of
from tensorpipe_ipc.shared_queue.shared_memory import LEASE_FROM, Copy, SharedMemoryQueue, lease_from
from tensorpipe_ipc.wire.in_block import PICKLED
from tensorpipe_ipc.wire.layout import Block
from tensorpipe_ipc.wire.room import made_with_room

__all__ = ["JoinableQueue", "Queue"]

MOST_SPIN = 0.001
_AT_ONCE = 1 << 24  # bytes that put_many encodes at a time: some may be gathered, and all wait for room together


class Queue(queues.Queue):  # type: ignore[type-arg]  # for isinstance alone: it uses none of its state
    """multiprocessing.Queue's methods and errors, without its feeder thread: ``put`` has read the object when it returns.

    A child may inherit it by fork, or receive it as an argument when it is spawned. Many threads may use it at once.

    Attributes:
        takes_offers: whether a put without ``move`` hands over a batch that a DataLoader's worker collated. The put of the
            worker's own loop does so, because nothing uses the batch after it. A put from any other place copies the object.
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
        """Make a new, empty queue.

        Args:
            maxsize: how many objects may be in the queue; 0 or less: any number.
            ctx: a context of ``get_context``: the queue uses that context's memory. Anything else (a context of
                multiprocessing's own, or None): the queue uses the process's default memory, which lasts as long as
                something lies in it.
            serializer: the name of the serializer that encodes tensors to bytes.
            wire_dtype: torch.float16, bfloat16, float8_e4m3fn or float8_e5m2. Real floating-point tensors and arrays that
                are wider cross in this dtype, and ``get`` restores their own. ``statistics()`` says what precision
                that cost. Tensors that go by reference (``move``, ``loan``), and all other leaves, cross unchanged.
            spin: seconds, at most 0.001, for which ``get`` polls for an object before it sleeps. Polling saves the wake-up
                when objects arrive that fast, and keeps a core busy meanwhile.
            cuda_ipc: large GPU tensors stay on their GPU if every process that gets from the queue asks for a GPU
                (``device=``), sees the producer's GPU, and has passed a self-test. They arrive as copies in the receiver's
                own memory. If the process that put such an object ends before it is taken, the object is lost, and the
                get raises PeerLost. In all other cases, and always with ``wire_dtype``, the tensors are staged;
                ``statistics()`` says why.

        Raises:
            TypeError: ``maxsize`` is not an integer.
            ValueError: ``spin`` is out of range, ``maxsize`` is above 16,777,215, or ``wire_dtype`` is another dtype.
            UnknownSerializer: no serializer has that name.
            SharedMemoryError: no memory, no pipe or no descriptor is left.
        """
        maxsize = check_maxsize(maxsize)
        if not 0 <= check_seconds(spin, "spin") <= MOST_SPIN:
            raise ValueError(f"spin must be from 0 (sleep at once) to {MOST_SPIN} seconds, not {spin}")
        named = serializer_named(serializer)
        narrows = narrowing(named, wire_dtype)
        self._closed = self._used = False
        attachment = getattr(ctx, "tensorpipe_attachment", default_attachment)()
        self._queue = SharedMemoryQueue.create(attachment, max(0, maxsize), tasks=self._has_tasks)
        self._codec = Codec(self._queue, named, narrows, cuda_ipc=cuda_ipc)
        self._queue.gets.spin = self._spin = spin
        self._undeliverable: list[Exception] = []
        self.takes_offers = False
        self._compiled = CompiledPath(self._queue, self._codec.decode, is_everyday=self._codec.is_everyday)

    def put(self, obj: Any, block: bool = True, timeout: float | None = None, *, move: bool = False) -> None:
        """Put an object. When this returns the object has been read, and it survives this process.

        Memory that the program itself shared (``share_memory_()``) stays shared: each side sees what the other writes. Such
        tensors cross as torch's own handles. A handle needs one descriptor for each storage, and needs this process to
        live until the object is taken. A process that ends in order waits a second at most for that.

        Two references to one object in ``obj`` are references to one object in the result of ``get``, as with pickle.
        Strings and numbers keep no identity: they are only equal.

        Tensors and arrays are read once the whole object has been taken apart. So the code of a class (``__reduce__``,
        ``__getstate__``, a registered ``to``) must not write to what it returned before, or to what is sent: it returns copies.

        If a signal's handler raises an exception during a put, the object has been put once or not at all.

        Args:
            obj: a tree of tensors, arrays, numbers and so on, or any other object that can be pickled.
            block: whether to wait for room.
            timeout: seconds to wait; None: for ever.
            move: give the tensors away, by reference if possible. It is possible if the large tensors lie in one block of
                this queue's memory that this process holds: from ``ctx.empty``, or got from a queue of the same context.
                They fill half of it at least; views that overlap count each for itself. Of a message with tensors under
                16 KiB on average, they go by no reference.
                No view, array, storage or DLPack capsule of the block may be left besides the tensors in ``obj``, and no
                child forked since. Afterwards these tensors are *empty*, of shape (0,). If it is not possible, the object
                is copied, and stays unchanged.

        Raises:
            Full: no room within ``timeout``. The caller keeps the object. The text names the processes that hold memory, if
                the put has waited for a place.
            Closed: the queue is closed in this process (a ValueError, as in multiprocessing).
            UnsupportedLeaf: for example, a tensor has autograd history (a RuntimeError, as in torch's queue, and a TypeError).
            Exception: any error that the object raises when it is pickled.
            SharedMemoryError, OutOfMemory: a tensor is larger than memory, as an expanded one may be. The text names the sizes.
        """
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        self._used = True
        seconds = None if block and timeout is None else _seconds(block, timeout)  # no call, where it is the usual one
        offered = self.takes_offers and not move and bool(self._queue.leases.offered)
        if not move and not offered and self._compiled.put(obj):
            return
        codec, apart = self._codec, None
        offered = offered and is_sole_reference(obj)
        if move or offered:
            # References to storages would count as aliases.
            apart = (*made_with_room(self.trim, codec.take_apart, obj)[:2], None)
            held = codec.handed_over(obj, apart, offered=offered)
            if held is not None:
                began = time.monotonic()
                if self._queue.put_held(*held, seconds):
                    return
                seconds = seconds and max(0, seconds - (time.monotonic() - began))
        payload, metadata = self._encoded(obj, apart)
        try:
            self._queue.put(payload, metadata, seconds)
        except BaseException as error:
            codec.take_back(payload, error)
            raise
        if not self._compiled.is_asked:
            self._compiled.open()

    def put_many(self, objs: Iterable[Any], timeout: float | None = None) -> None:
        """Put objects in their order, with one system call for up to 64 of them.

        Each error of this package has an attribute ``put``: how many objects, counted from the first, are in the queue. An
        exception from a signal's handler lacks it, because the number is unknown then.

        Args:
            objs: objects as for ``put``. Each is a separate object to ``get``. From an iterable that is not a list or tuple,
                each object is read before the next is requested: a generator may fill the same memory again. Small
                objects are put 64 at a time, or when the iterable ends: if it waits for something, use ``put``.
            timeout: seconds to wait for room for the last object; None: for ever.

        Raises:
            Full: no room for all objects within ``timeout``. The caller keeps the others.
            Exception: any error of ``put``. The objects before the faulty one are in the queue, as far as they found room.
        """
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        self._used = True
        deadline = None if timeout is None else time.monotonic() + _timeout(timeout)
        is_made, done = type(objs) not in (list, tuple), 0
        waiting = list[tuple[Payload, bytes]]()
        at_fault: Exception | None = None
        try:
            if not is_made:
                while count := self._compiled.put_many(list(objs[done : done + BATCH])):  # type: ignore[index]
                    done += count
            remaining = itertools.islice(objs, done, None)
            while at_fault is None:
                try:
                    has_more = self._encode_some(remaining, waiting, is_made)
                except Exception as error:
                    if is_a_signals(error, error.__traceback__):  # it must not wait for room
                        raise
                    at_fault = error
                while waiting:
                    left = None if deadline is None else max(0, deadline - time.monotonic())
                    try:
                        count = self._queue.put_many(waiting, left)
                    except SharedMemoryError:  # one is too large, and none was put: put them singly to find it
                        if len(waiting) == 1:
                            raise
                        count = self._queue.put_many(waiting[:1], left)
                    done += count
                    del waiting[:count]
                if at_fault is None and not has_more:
                    if done and not self._compiled.is_asked:
                        self._compiled.open()
                    return
            raise at_fault
        except BaseException as error:
            for payload, _ in waiting:
                self._codec.take_back(payload, error)
            waiting.clear()  # the error's traceback refers to this
            # Any other error comes from a signal's handler: objects may have been put that are not counted yet.
            if error is at_fault or isinstance(error, TensorPipeError):
                with contextlib.suppress(AttributeError):  # an object's own exception may have __slots__
                    error.put = done  # type: ignore[attr-defined]
            raise
        finally:
            del at_fault  # which refers to this frame

    def _encode_some(self, remaining: Iterator[Any], waiting: list[tuple[Payload, bytes]], is_made: bool) -> bool:
        """Encode the next objects that one system call can put. Return whether more may remain.

        Args:
            is_made: the iterable may reuse an object's memory for the next object: copy each before requesting the next.
        """
        nbytes = 0
        for obj in remaining:
            apart = None if type(obj) is torch.Tensor else made_with_room(self.trim, self._codec.take_apart, obj)
            payload, metadata = self._encoded(obj, apart)
            nbytes += payload.nbytes
            is_apart = not (is_made or _may_change(apart, metadata))
            copies = not is_apart and payload.nbytes < LEASE_FROM and type(payload) is Block
            waiting.append((Copy(payload) if copies else payload, metadata))
            if len(waiting) == BATCH or nbytes > _AT_ONCE or not (is_apart or copies):
                return True
        return False

    def _encoded(self, obj: Any, apart: Apart | None) -> tuple[Payload, bytes]:
        """Encode an object. As ``made_with_room`` does, but with no way through another file: each put comes by here."""
        try:
            return self._codec.encode(obj, apart)
        except OutOfMemory:
            if not self.trim():
                raise
        return self._codec.encode(obj)  # taken apart anew: the handles of torch's shared memory were used up

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
            block: whether to wait for an object.
            timeout: seconds to wait; None: for ever.
            copy: True: all tensors lie in one private copy of the message, and a part that is kept keeps the whole copy:
                ``clone()`` the part. False: they lie in shared memory, however small, as a *lease*: the block that they
                arrived in stays until its last alias is gone. "auto": a lease from 32 KiB on, as long as this process
                leases at most half of the queue's memory, or there is no memory for a copy; never of a message beyond
                the capacity, as an empty queue takes one. Tensors without items, and messages without tensors, arrays
                and ``bytes``, have no memory: the three settings agree. A lease smaller than a page costs a page.
                If a child is forked while leased tensors live, the child's writes to them stay private to it. The child
                may see *this* process's later writes, in pages that the child has not written itself. A child that
                needs the old contents clones the tensors.
            device: where tensors are wanted: a ``torch.device`` or its name. None or "cpu": where they arrive. Large tensors
                for a GPU are copied there straight from shared memory, and the block is held until the copy is complete.
                Arrays, bytes and storages stay on the CPU, as do sparse, nested and quantized tensors.
            restore: whether floats that a ``wire_dtype`` narrowed get their own dtype back, in memory of their own. False:
                they keep the narrow dtype, as a lease if large; but leaves for NumPy whose narrow dtype NumPy lacks
                are restored all the same.
            as_numpy: return NumPy arrays in place of dense tensors, on the same memory, without a copy.

        Raises:
            Empty: no object within ``timeout``.
            Closed: the queue is closed in this process.
            ValueError: ``copy`` is another value, ``device`` names no device, or both ``device`` and ``as_numpy`` are given.
            UnsupportedLeaf: ``as_numpy``, and NumPy lacks a tensor's dtype or layout. The next get takes the object.
            MemoryError, OSError, RecursionError, torch.OutOfMemoryError: too little memory, too few descriptors or too little
                depth at present; with large messages it helps to let go of one before the next is got. The next get takes
                the object; after eight tries it is dropped.
            Exception: any error that the object raises when it is rebuilt. The object is dropped, and counted
                (``undecodable``). A BaseException that is not an ``Exception`` (SystemExit, KeyboardInterrupt) may come from
                a signal's handler: then the object is dropped only after eight tries.
            ShutDown: the queue was shut down, and is empty.
            SharedMemoryError: copy=False, and this process leases half of the queue's memory already, or the
                message lies beyond the capacity and there is no room within it; the next get in this process takes the
                message. With ``cuda_ipc`` also: this process cannot read the GPU memory that the object lies in; the object
                is dropped.
            PeerLost: the process that put the object is gone, and with it the object's GPU memory (``cuda_ipc``), or a handle
                of torch's shared memory. The object is dropped.
        """
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        seconds = None if block and timeout is None else _seconds(block, timeout)
        if copy == "auto" and device is None and restore and not as_numpy:
            for found in self._compiled.coming if seconds is None else self._compiled.there:
                return found  # as a loop: after a call CPython would look for signals, whose handlers may raise, first
        if not self._compiled.is_asked and self._queue.opened.operations:
            self._compiled.open()
        decode = self._codec.decode_as(restore, as_numpy, device)
        if self._codec.cuda_sender is None:
            return self._queue.get(seconds, decode, lease_from(copy))
        self._raise_undeliverable()
        found = self._queue.get(seconds, decode, lease_from(copy))
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
        """Take the objects that the queue holds, with one system call. Wait if it is empty.

        Args:
            max_items: the most objects to take. One call never takes more than 64.
            timeout: seconds to wait for the first object; None: for ever.
            copy, device, restore, as_numpy: as for ``get``; they apply to each object.

        Returns:
            At least one object, in the order in which they were put. They belong to the caller.

        Raises:
            TypeError: ``max_items`` is not an integer.
            ValueError: ``max_items`` is not positive.
            Exception: any error of ``get``, for the first object. If a later object is faulty, the objects before it are
                returned, and the next get raises the error. Those behind it come with the next gets of this process,
                and are lost if it ends before.
        """
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        max_items, seconds = check_count(max_items, "max_items"), _seconds(True, timeout)
        if seconds is None and copy == "auto" and device is None and restore and not as_numpy:
            for found in self._compiled.take((max_items,)):
                return found  # as in get
        if not self._compiled.is_asked and self._queue.opened.operations:
            self._compiled.open()
        decode = self._codec.decode_as(restore, as_numpy, device)
        self._raise_undeliverable()
        found = self._queue.get_many(max_items, seconds, decode, lease_from(copy))
        if self._codec.cuda_sender is not None:
            errors = [each.error for each in found if type(each) is on_device.Undeliverable]
            found = [each for each in found if type(each) is not on_device.Undeliverable]
            self._undeliverable += errors if found else errors[1:]
            if not found:
                raise errors[0]
        return found

    def _raise_undeliverable(self) -> None:
        if self._undeliverable:
            error = self._undeliverable[0]
            del self._undeliverable[0]  # No call may come since the test: another thread could run there
            raise error

    def loan(self, tensors: Any, dtype: torch.dtype = torch.float32, *, timeout: float | None = None) -> Loan:
        """Return a loan: tensors in shared memory that the caller fills, and that are sent without a copy::

            with queue.loan((64, 3, 224, 224), torch.uint8) as batch:
                decode_into(batch)

        On leaving the ``with`` block the tensors are put, as by ``put(..., move=True)``, and are empty afterwards. If an alias
        of them is left, or they have under 32 KiB, they are copied instead. After an exception they are not put, and their
        memory is free once the tensors are gone.
        If there is no room, and no object in the queue whose taking could make room, the tensors lie in the process's own
        memory, and are copied when they are put.
        If there is no room within ``timeout``, Full is raised. The caller keeps the tensors and their contents, and may put
        them with ``move=True`` later.

        Args:
            tensors: a shape; or a tree of ``TensorSpec`` and plain values in dicts, lists and tuples. The tree itself is the
                message, with a tensor in the place of each ``TensorSpec``.
            dtype: the dtype for a shape.
            timeout: seconds to wait for memory on entering, and for room on leaving; None: for ever.
        """
        return Loan(self, tensors, dtype, timeout)

    def lend(self, specs: list[TensorSpec], timeout: float | None) -> list[torch.Tensor]:
        """Make a loan's tensors, not initialised, in one block of shared memory. ``Loan`` calls this on entering."""
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        return make_tensors(
            specs, self._queue.leases, functools.partial(self._queue.block_for, _seconds(True, timeout))
        )

    def trim(self) -> int:
        """Give back the idle memory that all processes hold ready for this queue and the queues that share its memory.

        Memory that is idle for some seconds is given back anyway, by the next process that puts, gets or joins.

        Returns:
            The number of bytes given back.
        """
        return self._queue.attachment.trim()

    def put_nowait(self, obj: Any) -> None:
        """Put an object as ``put(obj, block=False)`` does."""
        self.put(obj, False)

    def get_nowait(self) -> Any:
        """Take an object as ``get(block=False)`` does."""
        return self.get(False)

    def qsize(self) -> int:
        """Return how many objects are in the queue. Other processes may put and get meanwhile."""
        return self._queue.qsize()

    def empty(self) -> bool:
        """Return whether the queue is empty at this moment.

        Raises:
            OSError: this process has closed the queue, and had put into it before, as in multiprocessing.
        """
        if self._closed and self._used:
            raise OSError("the handle is closed")
        return self._queue.is_empty()

    def full(self) -> bool:
        """Return whether the queue holds ``maxsize`` objects at this moment."""
        return 0 < self._queue.maxsize <= self.qsize()

    def close(self) -> None:
        """Stop using the queue in this process. Other processes go on, and the messages stay for them.

        If a ``get`` of this process left a message for the next get, because of an exception, the message is lost and counted.
        So are up to 64 that a ``get_many`` left, as another process put beside thousands that wait in just that moment.
        A thread that waits in ``get`` goes on waiting, as with multiprocessing's queue: ``shutdown`` wakes it.
        """
        self._closed = True
        self._queue.gets.give_up()

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse further puts in every process, and gets once the queue is empty. Wake the threads that wait.

        The contract is that of Python 3.13's ``queue.Queue.shutdown``. After the return no put succeeds, with one exception:
        a process that was stopped (SIGSTOP) in the microseconds between its last check and writing its ticket.

        Args:
            immediate: drop the objects in the queue (their tasks count as done), so that gets are refused at once.
        """
        if self._closed:
            raise Closed(f"Queue {self!r} is closed")
        self._queue.shut_down(drop=immediate)

    def join_thread(self) -> None:
        """Do nothing: there is no thread."""

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``get`` would not wait.

        After more objects were put than a pipe holds, it is sometimes readable though ``get`` would wait.
        If other processes also get from the queue, it may not tell of an object that a get of this process took and left for
        the next one. So call ``empty()`` before you wait for the descriptor after an exception or after ``get_many``.
        """
        return self._queue.fileno()

    def statistics(self) -> QueueStatistics:
        """Return a snapshot of this process's use of the queue, and of the queue's arena."""
        found, cuda_sender, narrows = statistics_of(self._queue), self._codec.cuda_sender, self._codec.narrowing
        found = dataclasses.replace(found, shared_by_torch=self._codec.shared_by_torch)
        if cuda_sender is not None:
            on_device, why_not = cuda_sender.on_device, cuda_sender.staged_because
            found = dataclasses.replace(found, on_device=on_device, staged_because=why_not)
        if narrows is not None:
            found = dataclasses.replace(found, overflowed=narrows.overflowed, worst_error=narrows.worst)
        return found

    @property
    def is_shut(self) -> bool:
        """Return whether any process has shut down the queue."""
        return bool(self._queue.words[self._queue.record.shut])

    @property
    def _reader(self) -> Reader:
        """The reader, under the name that users of multiprocessing's queues know: ``connection.wait([queue._reader])``."""
        return end_of(self, Reader)

    @property
    def _writer(self) -> Writer:
        return end_of(self, Writer)

    @property
    def _maxsize(self) -> int:
        return self._queue.maxsize or SEM_VALUE_MAX

    @property
    def closed(self) -> bool:
        """Return whether this process has closed the queue."""
        return self._closed

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        return self._queue, self._codec, self._spin

    def __setstate__(self, state: Any) -> None:
        self._queue, self._codec, self._spin = state
        self._queue.gets.spin = self._spin
        self._undeliverable = []
        self._closed = self._used = self.takes_offers = False
        self._compiled = CompiledPath(self._queue, self._codec.decode, is_everyday=self._codec.is_everyday)


class JoinableQueue(Queue, queues.JoinableQueue):  # type: ignore[type-arg]
    """multiprocessing.JoinableQueue: a Queue that counts the objects whose tasks are not done yet.

    When a process ends, the tasks that it took and did not finish count as done: no other process will finish them, and
    ``join`` must not wait for the dead. This rule ends once any process has called ``task_done`` more often than it took
    objects. Such a process finishes tasks for others, which may have ended. From then on ``join`` waits for all objects
    that were put, as multiprocessing's does.
    """

    _has_tasks = True

    def task_done(self) -> None:
        """Report that the task of one taken object is done. Consumers call it once for each ``get``, even after ``close``.

        Raises:
            ValueError: more calls than objects were put. A process that took more objects than it reported is believed: if
                another has reported one of these, too, join returns one object early.
        """
        self._queue.attachment.attach()
        self._queue.tasks.done()

    def join(self) -> None:
        """Wait until the task of every object that was put is done. It may be called after ``close``.

        A task counts as done if a shutdown dropped the object, or if the object is lost: with a consumer that died, or by an
        exception of a signal's handler inside ``get``. What another process took, and could not make, is dropped by that
        process's next call on the queue. An object that ``get`` dropped with an error counts as taken:
        ``join`` waits for its ``task_done``, as multiprocessing's does.
        """
        self._queue.attachment.attach()
        self._queue.wait_for_tasks()


def _may_change(apart: Apart | None, metadata: bytes) -> bool:
    """Return whether taking the next object apart may change the memory of this object's message.

    It may if user code supplied the leaves (``__reduce__``, or ``to`` of a registered type): such code may reuse one buffer.
    """
    flat = None if apart is None else apart[0]
    return bool(metadata[0] & PICKLED) or (flat is not None and (bool(flat.made) or None in flat.nodes))


def _seconds(block: bool, timeout: float | None) -> float | None:
    if not block:
        return 0
    return None if timeout is None else _timeout(timeout)


def _timeout(timeout: Any) -> float:
    """Return the seconds to wait. Negative ones count as 0, as in multiprocessing."""
    if isinstance(timeout, (int, float, Real)):  # the first two are found at once
        timeout = max(timeout, 0)
    return check_timeout(timeout)
