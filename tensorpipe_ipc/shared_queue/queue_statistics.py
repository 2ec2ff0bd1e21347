"""The figures of ``Queue.statistics()``, and the source of each."""

from __future__ import annotations

from dataclasses import dataclass

from tensorpipe_ipc.memory.row import GET, PUT
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue

__all__ = ["Holder", "QueueStatistics", "statistics_of"]


@dataclass(frozen=True)
class Holder:
    """One process that fills or holds blocks of an arena; or all those that have put something there and ended."""

    process: str
    """Its id, whether it lives, and its namespace if that is another; or "a process that has ended".

    That is what one or several have put, and others have their places: nothing tells the pids any more.
    """
    blocks: int
    """How many: being filled, on loan, waiting in a queue to be taken, or leased."""
    nbytes: int
    """Of payload in them."""


@dataclass(frozen=True)
class QueueStatistics:
    """A snapshot of one queue, as one process sees it, and of the arena that it lies in."""

    messages_put: int
    """By this process."""
    bytes_put: int
    """Payloads of these: tensors and arrays, not the numbers and strings beside them; of an object without any, its pickle."""
    messages_got: int
    """By this process."""
    bytes_got: int
    """Payloads of these."""
    waits: int
    """Puts of this process that had to wait for room, in the queue or in the arena."""
    seconds_waited: float
    """How long, all together."""
    in_flight: int
    """Messages in the queue now, of all processes."""
    leases: int
    """Blocks that tensors of this process lie on now, from all queues of the arena."""
    bytes_leased: int
    """Payloads of these; of a small one, the page that it takes; of a loan that was not put, 0."""
    holders: tuple[Holder, ...]
    """Who has blocks of the arena now. Messages that wait count for the process that put them."""
    resident: int
    """Bytes of shared memory that the arena costs the machine now, all processes together."""
    capacity: int
    """Bytes that it may cost."""
    lost: int
    """Messages lost, from all queues of the arena since it exists: with consumers that died inside the get that had taken
    them, by exceptions of a signal's handler that came when a get had taken one, or with a process that closed the queue and
    had left some for its next get. What a get had returned for is the consumer's own: what becomes of it nobody else knows, and
    it does not count. (``JoinableQueue``: nor does ``join`` wait for it.)"""
    undecodable: int = 0
    """Messages that this process took from the queue and could not make objects of again: the error was raised by get, and
    the message dropped."""
    overflowed: int = 0
    """Items that this process put and ``wire_dtype`` made infinite (in float8_e4m3fn, which has no inf: 448 or nan).
    Those of tensors under 64 KiB count at each try: also where the put ended in ``Full``."""
    worst_error: float = 0.0
    """The largest relative error that ``wire_dtype`` made, of up to 4,096 items of each tensor that this process put."""
    on_device: int = 0
    """Messages that this process put whose large GPU tensors stayed on their GPU (``cuda_ipc``). Their bytes do not count."""
    staged_because: str = ""
    """Why the last one with such tensors did not, but went through the CPU's memory; "" where it did."""
    shared_by_torch: int = 0
    """Storages in torch's shared memory that this process put: torch's own handle is sent. Their bytes do not count."""


def statistics_of(queue: SharedMemoryQueue) -> QueueStatistics:
    """Return a snapshot of one queue."""
    arena, rows, live = queue.arena, queue.rows, list(queue.leases.live.values())
    queue.attachment.attach()
    queue.attachment.recover_dead()  # what the dead held is nobody's
    put, got = queue.done(PUT), queue.done(GET)
    return QueueStatistics(
        messages_put=put[0],
        bytes_put=put[1],
        messages_got=got[0],
        bytes_got=got[1],
        waits=queue.puts.waits,
        seconds_waited=queue.puts.seconds_waited,
        in_flight=queue.qsize(),
        leases=len(live),
        bytes_leased=sum(anchor.nbytes for anchor in live),
        holders=tuple(
            Holder(rows.describe(row), blocks, nbytes) for row, (blocks, nbytes) in sorted(arena.holders().items())
        ),
        resident=arena.segment.resident(),
        capacity=arena.capacity,
        lost=queue.attachment.recovery.lost(),
        undecodable=queue.gets.undecodable,
    )
