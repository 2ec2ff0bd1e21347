"""Shortages and errors of a process: descriptors, memory, and the time of day."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import pytest
import torch
import zmq
from children import PATIENCE, Child, descriptors_left, in_thread
from secured import binders, connectors, make_keys

import tensorpipe_ipc as tp

ENDS: dict[str, Callable[[Path], Any]] = {
    "a consumer that binds": lambda keys: tp.Consumer("few"),
    "a producer that binds": lambda keys: tp.Producer("few", bind=True),
    "a producer that connects": lambda keys: tp.Producer("few"),
    "a binder with keys": lambda keys: tp.Consumer("tcp://127.0.0.1:*", security=binders(keys)),
    "a connector with keys": lambda keys: tp.Consumer("tcp://127.0.0.1:9", bind=False, security=connectors(keys)),
}
OPENED, REFUSED, LEFT_SOMETHING, SOMETHING_ELSE = range(4)


def _open_with(left: int, make: Callable[[], Any]) -> int:
    """Make an end in a process that has ``left`` free descriptors. Return the outcome, or minus a signal's number."""
    child = os.fork()
    if not child:
        ending = SOMETHING_ELSE
        try:
            highest = max(map(int, os.listdir("/proc/self/fd")))
            while os.dup(0) < highest:  # numbers are what is limited, so there must be no gap
                pass
            before = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + left, 4096))
            try:
                make()
                ending = OPENED
            except tp.Refused as refused:
                ending = REFUSED if "ulimit -n" in str(refused) else SOMETHING_ELSE
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            if ending == REFUSED and len(os.listdir("/proc/self/fd")) != before:
                ending = LEFT_SOMETHING
        finally:
            sys.stderr.close()
            os._exit(ending)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("end", ENDS)
def test_an_end_for_which_no_descriptor_is_left_says_so_and_leaves_nothing(end: str, tmp_path: Path) -> None:
    """However many are left, it opens, or is refused with the limit; libzmq would end the process."""
    keys = make_keys(tmp_path)
    endings = [_open_with(left, lambda: ENDS[end](keys)) for left in range(0, 26, 2)]
    assert set(endings) == {OPENED, REFUSED}
    assert endings == sorted(endings, reverse=True)


_until_the_end = contextlib.ExitStack()


def leave_descriptors(ends: children.Ends, count: int) -> None:
    """Take all descriptors that the child may have, for good, but for some."""
    _until_the_end.enter_context(descriptors_left(count))


def ask_for_fileno(ends: children.Ends) -> bool:
    """Have the consumer's descriptor kept up to date from now on."""
    return ends.consumer.fileno() >= 0


def take_stream(ends: children.Ends) -> tuple[list[int], str]:
    """Return the first item of each tensor that a consumer gets until its stream ends, and how that ends."""
    got = []
    try:
        while True:
            got.append(int(ends.consumer.get(PATIENCE)[0]))
    except (tp.EndOfStream, tp.PeerLost) as end:
        return got, type(end).__name__


@pytest.mark.parametrize("asks", [False, True], ids=["", "asked for fileno"])
@pytest.mark.parametrize("endpoint", ["few", "tcp://127.0.0.1:*"])
def test_a_producer_that_comes_where_one_descriptor_is_left_loses_nothing(endpoint: str, asks: bool) -> None:
    """Strangers may have taken the others. What waiting takes is there from the start."""
    with Child() as child:
        address = child.call(children.open_consumer, endpoint, producers=1)
        assert not asks or child.call(ask_for_fileno)
        child.call(leave_descriptors, 1)
        child.begin(take_stream)
        with tp.Producer(address, linger=PATIENCE) as producer:
            for number in range(5):
                producer.put(torch.full((1000,), number), PATIENCE)
        assert child.result() == ([0, 1, 2, 3, 4], "EndOfStream")


@pytest.mark.parametrize("left", [1, 2, 4, 6])
def test_a_consumer_that_comes_to_a_producer_over_tcp_where_few_descriptors_are_left_gets_all(left: int) -> None:
    """It is answered by marks, for which pyzmq has a thread: libzmq would end the process that has no descriptors for that."""
    with Child() as child:
        address = child.call(children.open_producer, "tcp://127.0.0.1:*", bind=True)
        child.call(leave_descriptors, left)
        child.begin(children.put, *range(5))
        with tp.Consumer(address, bind=False, shared_memory="off") as consumer:
            assert [consumer.get(PATIENCE) for _ in range(5)] == [0, 1, 2, 3, 4]
            child.result()


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("bind", [True, False])
def test_a_descriptor_that_could_not_be_had_once_tells_of_a_producer_that_comes_later(bind: bool, left: int) -> None:
    """One who has waited for it alone since would wait for ever. It takes two: the other tells that it is time for a look."""
    with tp.Consumer("later", bind=bind) as consumer:
        with descriptors_left(left), pytest.raises(OSError, match="Too many open files"):
            consumer.fileno()
        waiting = select.poll()
        waiting.register(consumer.fileno(), select.POLLIN)
        with tp.Producer("later", bind=not bind) as producer:
            putting = in_thread(lambda: producer.put("word", PATIENCE))
            deadline = time.monotonic() + PATIENCE
            while True:
                assert waiting.poll(1000 * (deadline - time.monotonic())), "nobody is told"
                with contextlib.suppress(tp.Empty):
                    assert consumer.get_nowait() == "word"
                    break
            putting()


MORE = 48 << 20  # bytes of addresses that a consumer may still take


def limit_addresses(ends: children.Ends, more: int) -> None:
    """Let this process take so many bytes of addresses more than it has."""
    with open("/proc/self/statm", encoding="ascii") as line:
        limit = int(line.read().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@pytest.mark.parametrize("bind", [True, False])
def test_a_message_larger_than_a_process_may_have_is_refused_and_the_next_one_comes(bind: bool) -> None:
    """Over tcp: get names its size, what is left, and the limit; nothing is sent again for ever, and the stream goes on."""
    with Child() as child, contextlib.ExitStack() as stack:
        if bind:
            endpoint = child.call(children.open_consumer, "tcp://127.0.0.1:*")
            producer = stack.enter_context(tp.Producer(endpoint, shared_memory="off", linger=0))
        else:
            producer = stack.enter_context(tp.Producer("tcp://127.0.0.1:*", bind=True, shared_memory="off", linger=0))
            child.call(children.open_consumer, producer.endpoint, bind=False)
        child.begin(children.take)
        producer.put("met", PATIENCE)
        assert child.result() == ["met"]
        child.call(limit_addresses, MORE)
        child.begin(children.take)
        producer.put(torch.ones(64 << 20, dtype=torch.uint8), PATIENCE)
        with pytest.raises(
            tp.OutOfMemory, match=rf"producer pid {os.getpid()} .* sent .* of 67,108,864 bytes.*limit \(ulimit -v\)"
        ):
            child.result()
        child.begin(children.take, 2)
        producer.put(torch.ones(1 << 20, dtype=torch.uint8).sum(), PATIENCE)
        producer.put("next", PATIENCE)
        assert child.result()[1] == "next"
        producer.flush(PATIENCE)
        got = child.call(children.consumer_statistics)
        assert (got.rejected, got.lost, got.messages) == (1, 0, 3)
        assert producer.statistics().resent == 0


def put_until_refused(ends: children.Ends, nbytes: int) -> tuple[int, str]:
    """Return how many messages of so many bytes could be put, and the error that the next one ended in."""
    tensor, put = torch.ones(nbytes, dtype=torch.uint8), 0
    limit_addresses(ends, MORE)
    try:
        while True:
            ends.producer.put(tensor, PATIENCE)
            put += 1
    except (MemoryError, zmq.ZMQError) as error:
        return put, type(error).__name__


@pytest.mark.parametrize(
    ("endpoint", "nbytes", "least"),
    [("tcp://127.0.0.1:*", 70_000, 200), ("tcp://127.0.0.1:*", 64 << 20, 0), ("short", 64 << 20, 0)],
)
def test_a_message_that_there_is_no_memory_to_send_is_refused_and_the_next_one_comes(
    endpoint: str, nbytes: int, least: int
) -> None:
    """In frames, of which the producer keeps a copy, or ZeroMQ: nothing counts as put or lost. A copy takes about its size."""
    with tp.Consumer(endpoint, shared_memory="off", maxsize=4000) as consumer, Child() as child:
        child.call(children.open_producer, consumer.endpoint, maxsize=4000, linger=0)
        child.begin(children.put, "met")
        assert consumer.get(PATIENCE) == "met"
        child.result()
        child.call(children.flush)
        put, error = child.call(put_until_refused, nbytes)
        assert error == "OutOfMemory"
        assert put >= least
        found = child.call(children.producer_statistics)
        assert found.messages == 1 + put
        if endpoint != "short":  # there the consumer is told that one was given up
            assert found.in_flight == put
        for _ in range(put):
            consumer.get(PATIENCE)
        child.begin(children.put, "next")
        assert consumer.get(PATIENCE) == "next"
        child.result()
        child.call(children.flush)
        assert (consumer.statistics().lost, child.call(children.producer_statistics).lost) == (0, 0)


def jumping_clock(ends: children.Ends) -> None:
    """Have this process's time of day be another at every look."""
    time.time = lambda: random.uniform(-1e10, 1e10)  # type: ignore[assignment]
    time.time_ns = lambda: random.randrange(1 << 62)


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_a_clock_that_jumps_changes_nothing(shared_memory: str) -> None:
    """Nobody looks at the time of day: timeouts are kept, nobody is taken for dead, and every message comes."""
    with Child() as one, Child() as other:
        for child in (one, other):
            child.call(jumping_clock)
        endpoint = one.call(children.open_consumer, "clock", shared_memory=shared_memory)
        other.call(children.open_producer, endpoint, shared_memory=shared_memory)
        other.begin(children.put_numbers, 0, 200, "n")
        assert one.call(children.take, 200) == [("n", number) for number in range(200)]
        other.result()
        began = time.monotonic()
        with pytest.raises(tp.Empty):
            one.call(children.take, 1, 0.2)
        assert 0.2 <= time.monotonic() - began < PATIENCE
        assert len(one.call(children.consumer_statistics).peers) == 1


def count_descriptors(ends: children.Ends) -> int:
    """Return how many descriptors the child has open."""
    return len(os.listdir("/proc/self/fd"))


def test_a_pair_of_ends_holds_few_descriptors() -> None:
    """Two ends that share memory over ipc, all that is open in both processes because of them: 36, 17 of them ZeroMQ's."""
    with Child() as one, Child() as other:
        before = sum(child.call(count_descriptors) for child in (one, other))
        one.call(children.open_consumer, "few")
        other.call(children.open_producer, "few", shared_memory="require")
        other.call(children.put, "word")
        assert one.call(children.take) == ["word"]
        other.call(children.flush)
        assert sum(child.call(count_descriptors) for child in (one, other)) - before <= 36
