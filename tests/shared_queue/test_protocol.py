"""One protocol, many ways: each put takes the steps P1 to P8, and each get G1 to G7, in the order that recovery relies on.

A copy is put, a batch is put, a block that lies there already is put; one message, a batch, and a message whose last get
failed is got. What another process could see of each is recorded after every store and call of the package, and compared
with the table in recovery.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from crash_points import PACKAGE
from inside import shared_queue_of

from tensorpipe_ipc.memory.arena import HEADER, KEPT, STEPS
from tensorpipe_ipc.memory.leases import Handover
from tensorpipe_ipc.memory.row import GET, PUT
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.shared_memory import COPY, LEASE, SharedMemoryQueue

SIZE = 100_000  # bytes: large enough for a lease

# A step of put or get, by what others see of it.
P1, P2, P3, P4, P5 = (
    "takes a credit",
    "stamps its lap",
    "a block is being written",
    "names the ticket",
    "a block is queued",
)
P6, P7, P8 = "gives the ticket", "forgets the credit", "forgets the ticket that it gave"
G1, G2, G3, HELD, FREED = "takes a ticket", "names the credit", "gives the credit", "a block is held", "a block is free"
G6, G7 = "forgets the ticket that it took", "forgets the credit that it gave"


class Onlooker:
    """Note what changes in a queue of one process, as others see it."""

    def __init__(self, queue: SharedMemoryQueue) -> None:
        self.changes: list[str] = []
        self._queue = queue
        self._before = self._look()

    def _look(self) -> dict[str, int]:
        queue, words = shared_queue_of(self), shared_queue_of(self).words
        seen = {"tickets": queue.tickets.unread(), "credits": queue.credits.unread() if queue.credits else 0}
        seen["laps"] = sum(words[queue.record.laps : queue.record.laps + queue.maxsize])
        for direction in (PUT, GET):
            for record in queue.rows.records(queue.rows.index, queue.number, direction):
                for name in ("credit", "ticket", "given"):
                    first = getattr(record, name)
                    count = sum(map(bool, words[first : first + record.size]))
                    seen[f"{name} {direction}"] = seen.get(f"{name} {direction}", 0) + count
        for start, size_class, units, _ in queue.arena.all_extents():
            _, states = queue.arena.states(start, size_class, units)
            for step, count in zip(*np.unique(states & np.uint64(15), return_counts=True), strict=True):
                if step not in (0, KEPT):
                    seen[STEPS[step]] = seen.get(STEPS[step], 0) + int(count)
        return seen

    def look(self) -> None:
        """Note the changes since the last look. The order of what came together is that of the protocol."""
        now, before = self._look(), self._before
        self._before = now

        def rose(name: str, by: int = 1) -> bool:
            return (now.get(name, 0) - before.get(name, 0)) * by > 0

        told = {
            P1: rose(f"credit {PUT}"),
            P2: rose("laps"),
            P3: rose("being written"),
            P4: rose(f"ticket {PUT}"),
            P5: rose("queued"),
            P6: rose("tickets"),
            P7: rose(f"credit {PUT}", -1),
            P8: rose(f"ticket {PUT}", -1),
            G1: rose(f"ticket {GET}"),
            G2: rose(f"given {GET}"),
            G3: rose("credits"),
            HELD: rose("held"),
            FREED: rose("queued", -1) and not rose("held"),
            G6: rose(f"ticket {GET}", -1),
            G7: rose(f"given {GET}", -1),
        }
        self.changes += [change for change, is_new in told.items() if is_new]

    def runs(self) -> list[str]:
        """Return the changes, each run of equal ones as one: a batch takes each step for all of its messages."""
        return [change for index, change in enumerate(self.changes) if self.changes[index - 1 : index] != [change]]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look after every instruction of the package that is run in the block."""

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            frame.f_trace_opcodes = True
            if event in ("opcode", "return"):
                sys.settrace(None)
                self.look()
                sys.settrace(trace)
            return trace

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)


def _put(queue: SharedMemoryQueue, payload: Any) -> None:
    queue.put(payload(bytes(SIZE)), b"metadata", 0)


def _put_many(queue: SharedMemoryQueue, payload: Any) -> None:
    assert queue.put_many([(payload(bytes(SIZE)), b"metadata")] * 3, 0) == 3


def _put_held(queue: SharedMemoryQueue, payload: Any) -> Callable[[], None]:
    """Prepare a block that lies where its reader will read it, and return what queues it."""
    leases = queue.leases
    with leases.taking() as taker:
        block = queue.block_for(0, SIZE, taker)
        array = leases.hold(taker, block + HEADER, SIZE - HEADER)
    held = leases.find(array.ctypes.data)
    assert held is not None
    handover = Handover(held, lambda: None, lambda _: True)

    def put() -> None:
        assert queue.put_held(handover, b"", 0)

    put.keeps = array  # type: ignore[attr-defined]
    return put


PUTS = {
    "put": ([P1, P2, P3, P4, P5, P6, P7, P8], lambda queue, payload: lambda: _put(queue, payload)),
    "put_many": ([P1, P2, P3, P4, P5, P6], lambda queue, payload: lambda: _put_many(queue, payload)),
    "put_held": ([P1, P2, P4, P5, P6, P7, P8], _put_held),
}


@pytest.mark.slow
@pytest.mark.parametrize("maxsize", [0, 4], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("way", PUTS)
def test_every_put_takes_the_steps_of_the_protocol(
    attachment: Attachment, payload: Any, way: str, maxsize: int
) -> None:
    """Credit, lap, content, ticket named, block queued, ticket given; then the words are cleared, the credit's first."""
    queue = SharedMemoryQueue.create(attachment, maxsize)
    expected, prepare = PUTS[way]
    put = prepare(queue, payload)
    onlooker = Onlooker(queue)
    with onlooker.watching():
        put()
    done = onlooker.runs()
    if way == "put_many":  # it clears the words of one message after another
        done, cleared = done[: len(expected) - 2 * (not maxsize)], done[len(expected) - 2 * (not maxsize) :]
        assert cleared == ([P7, P8] * 3 if maxsize else [P8])
    assert done == [step for step in expected if maxsize or step not in (P1, P2, P7)]


def _get(queue: SharedMemoryQueue, lease_from: int) -> Callable[[], Any]:
    return lambda: [queue.get(0, lease_from=lease_from)]


def _get_many(queue: SharedMemoryQueue, lease_from: int) -> Callable[[], Any]:
    return lambda: queue.get_many(3, 0, lease_from=lease_from)


def _get_again(queue: SharedMemoryQueue, lease_from: int) -> Callable[[], Any]:
    def fail(*_: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):  # its ticket is taken, and its credit given
        queue.get(0, fail, COPY)
    return _get(queue, lease_from)


GETS = {"get": (_get, [G1, G2, G3]), "get_many": (_get_many, [G1, G2, G3]), "get again": (_get_again, [])}


@pytest.mark.parametrize("lease_from", [COPY, LEASE], ids=["copied", "leased"])
@pytest.mark.parametrize("maxsize", [0, 4], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("way", GETS)
def test_every_get_takes_the_steps_of_the_protocol(
    attachment: Attachment, payload: Any, way: str, maxsize: int, lease_from: int
) -> None:
    """Ticket, credit named and given; then the block is let go; then the words are cleared, the ticket's first."""
    queue = SharedMemoryQueue.create(attachment, maxsize)
    for _ in range(3):
        _put(queue, payload)
    prepare, begin = GETS[way]
    get = prepare(queue, lease_from)
    onlooker = Onlooker(queue)
    with onlooker.watching():
        messages = get()
    expected = [*begin, HELD if lease_from == LEASE else FREED, G6, G7]
    assert onlooker.runs() == [step for step in expected if maxsize or step not in (G2, G3, G7)]
    del messages
