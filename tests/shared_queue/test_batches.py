"""Many messages with one system call: in order, whole, and none lost wherever a process dies or an exception comes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

import pytest
from children import in_thread
from crash_points import LIMIT, SIGNAL_CHECKS, Interrupt, die, dies_at, in_child, raise_interrupt, reap, run_traced
from inside import keep_spare
from wholeness import check_whole, drain, points, stride

from tensorpipe_ipc.errors import Empty, Full, SharedMemoryError
from tensorpipe_ipc.memory.row import BATCH, GET, PUT
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue
from tensorpipe_ipc.shared_queue.token_pipe import TokenPipe

STRIDE = stride(3)
LARGE = 100_000


def contents(count: int, size: int = 400) -> Any:
    return [i.to_bytes(2, "little") * (size // 2) for i in range(count)]


def put_all(queue: Any, payload: Any, messages: Any) -> None:
    messages = [(payload(content), b"m") for content in messages]
    while messages:
        del messages[: queue.put_many(messages[:64], 0)]


@pytest.mark.parametrize("maxsize", [0, 100, 7000])
@pytest.mark.parametrize("size", [2, 400, LARGE])
def test_they_arrive_in_order_however_they_are_cut(
    attachment: Attachment, payload: Any, maxsize: int, size: int
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    sent = contents(100, size)
    put_all(queue, payload, sent)
    got = []
    for most in (1, 64, 5, 64):
        got += [bytes(message.payload) for message in queue.get_many(most, 0)]
    assert got == sent
    check_whole(attachment, queue, payload)


def test_as_many_are_put_as_have_room(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment, 5)
    messages = [(payload(content), b"m") for content in contents(8)]
    assert queue.put_many(messages, 0) == 5
    with pytest.raises(Full, match="maxsize 5"):
        queue.put_many(messages[5:], 0)
    assert len(queue.get_many(2, 0)) == 2
    assert queue.put_many(messages[5:], 0) == 2
    assert drain(queue) == contents(7)[2:]
    check_whole(attachment, queue, payload)


def test_as_many_are_put_as_the_arena_has_room_for_and_the_other_places_come_back(
    attachment: Attachment, payload: Any
) -> None:
    queue = SharedMemoryQueue.create(attachment, 60)
    big = [(payload(bytes(20 << 20)), b"m")] * 5  # the arena has 64 MiB
    put = queue.put_many(big, 0)
    assert 1 <= put <= 3
    assert len(drain(queue)) == put
    check_whole(attachment, queue, payload)


def test_a_message_that_can_never_fit_costs_nothing(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment, 60)
    with pytest.raises(SharedMemoryError, match="can never fit"):
        queue.put_many([(payload(b"fits"), b""), (payload(bytes(100 << 20)), b"")], 0)
    assert drain(queue) == []
    check_whole(attachment, queue, payload)


def test_more_than_the_pipe_holds_spill_and_stay_in_order(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment, 0)
    sent = contents(20_000, 2)
    put_all(queue, payload, sent)
    got = []
    while len(got) < len(sent):
        got += [bytes(message.payload) for message in queue.get_many(50, 0)]
    assert got == sent


def put_and_die(queue: Any, messages: list[Any]) -> None:
    """Be killed when all messages of a put are there, and named, and none was sent."""
    os.writev = lambda *_: die()
    queue.put_many(messages, 0)


@pytest.mark.kills
@pytest.mark.parametrize("maxsize", [0, 4])
@pytest.mark.parametrize("size", [400, LARGE], ids=["copied", "leased"])
def test_a_producer_killed_at_any_step_leaves_all_or_the_first_of_them(
    attachment: Attachment, payload: Any, maxsize: int, size: int
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    sent, seen = contents(3, size), set()

    def first() -> None:
        """So that the steps are the same each time: a row, an operation and free blocks."""
        attachment.attach()
        keep_spare(queue, PUT, BATCH)
        arena = attachment.arena
        for block in [arena.allocate(size + 64) for _ in sent]:
            arena.discard(block)

    def put() -> None:
        assert queue.put_many([(payload(content), b"m") for content in sent], 0) == 3

    for _ in points(lambda point: dies_at(point, put, first), stride=STRIDE):
        attachment.recover_dead()
        got = drain(queue)
        assert got == sent[: len(got)]
        seen.add(len(got))
        check_whole(attachment, queue, payload)
    assert seen == {0, 3}  # one system call gives them all
    drain(queue)


@pytest.mark.kills
@pytest.mark.parametrize("maxsize", [0, 4])
@pytest.mark.parametrize("size", [400, LARGE], ids=["copied", "leased"])
def test_a_consumer_killed_at_any_step_loses_at_most_what_it_took(
    attachment: Attachment, payload: Any, maxsize: int, size: int
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    sent, seen = contents(3, size), set()

    def first() -> None:
        attachment.attach()
        keep_spare(queue, GET, BATCH)

    def dies(point: int) -> Any:
        put_all(queue, payload, sent)
        return dies_at(point, lambda: queue.get_many(2, 0), first)

    for _ in points(dies, stride=STRIDE):
        before = attachment.recovery.lost()
        attachment.recover_dead()
        got = drain(queue)
        assert got in (sent, sent[2:])
        lost = attachment.recovery.lost() - before
        assert lost <= 3 - len(got)  # less: it had let go of some, and was about to return
        seen.add((len(got), lost))
        check_whole(attachment, queue, payload)
    assert {(3, 0), (1, 2)} <= seen
    drain(queue)


def _looks_of_recovery(attachment: Attachment, monkeypatch: pytest.MonkeyPatch) -> int:
    """Finish what the dead had begun. Return how often all that waits in a pipe was looked at."""
    looks, look = list[int](), TokenPipe.snapshot
    with monkeypatch.context() as patched:
        patched.setattr(TokenPipe, "snapshot", lambda self: looks.append(1) or look(self))
        attachment.recover_dead()
    return len(looks)


@pytest.mark.slow
@pytest.mark.parametrize("maxsize", [0, 100])
@pytest.mark.parametrize("dies_in", ["get_many", "put_many"])
def test_a_death_amid_many_takes_no_look_at_all_that_waits_for_each_of_them(
    attachment: Attachment, payload: Any, maxsize: int, dies_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    messages = contents(BATCH)
    if dies_in == "get_many":
        put_all(queue, payload, messages)
        child = in_child(lambda: queue.get_many(BATCH, 0, lambda *_: die()))
    else:
        child = in_child(lambda: put_and_die(queue, [(payload(message), b"") for message in messages]))
    assert reap(child) == -signal.SIGKILL
    assert _looks_of_recovery(attachment, monkeypatch) <= 2
    check_whole(attachment, queue, payload)


def test_the_death_of_a_process_with_threads_takes_no_look_at_all_that_waits_for_each_of_them(
    attachment: Attachment, payload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, threads = SharedMemoryQueue.create(attachment, 100), threading.Barrier(8, timeout=LIMIT)
    put_all(queue, payload, contents(8))

    def wait_and_die(*_: Any) -> None:
        threads.wait()
        die()

    def get_in_threads() -> None:
        for _ in range(8):
            in_thread(lambda: queue.get(LIMIT, wait_and_die))
        signal.pause()

    assert reap(in_child(get_in_threads)) == -signal.SIGKILL
    assert _looks_of_recovery(attachment, monkeypatch) <= 2
    check_whole(attachment, queue, payload)


@pytest.mark.slow
@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("maxsize", [0, 4])
@pytest.mark.parametrize("size", [400, LARGE], ids=["copied", "leased"])
def test_an_exception_at_any_moment_of_get_many_loses_and_counts_what_it_had_in_hand(
    attachment: Attachment, payload: Any, maxsize: int, size: int
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    sent, raised = contents(3, size), 0
    for point in range(1, 220):
        put_all(queue, payload, sent)
        got, lost = [], attachment.recovery.lost()
        try:
            run_traced(lambda: got.extend(queue.get_many(3, 0)), point, raise_interrupt, SIGNAL_CHECKS, before=False)  # noqa: B023
        except Interrupt:
            raised += 1
        with contextlib.suppress(Empty):
            while True:
                got += queue.get_many(3, 0)
        assert [bytes(message.payload) for message in got] == sent[attachment.recovery.lost() - lost :]
        got.clear()
        check_whole(attachment, queue, payload)
    assert 20 < raised < 210


# raised between open() and the with statement's own, which no code can be written to survive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("maxsize", [0, 4])
def test_an_exception_at_any_moment_of_put_many_leaves_all_or_none(
    attachment: Attachment, payload: Any, maxsize: int
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    sent, raised, outcomes = contents(3), 0, set()
    messages = [(payload(content), b"m") for content in sent]
    for point in range(1, 250):
        queue.put_many(messages, 0)  # so that there are free blocks
        drain(queue)
        try:
            run_traced(lambda: queue.put_many(messages, 0), point, raise_interrupt, SIGNAL_CHECKS, before=False)
        except Interrupt:
            raised += 1
        got = drain(queue)
        assert got in ([], sent)
        outcomes.add(len(got))
        for i in range(maxsize):
            queue.put(payload(bytes([i])), timeout=0)
        drain(queue)
    assert outcomes == {0, 3}
    assert 20 < raised < 240
