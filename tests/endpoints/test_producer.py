"""Producer: what it may have in flight, how long it waits, and what it says."""

from __future__ import annotations

import _thread
import contextlib
import functools
import gc
import os
import signal
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import children
import numpy as np
import pytest
import torch
from children import PATIENCE, Child, in_thread, wait_until
from crash_points import SIGNAL_CHECKS, run_traced
from inside import is_in_use, side_of
from programs import ended, started
from raw_ends import RawEnd

import tensorpipe_ipc as tp
from tensorpipe_ipc import headroom
from tensorpipe_ipc.endpoints import participant
from tensorpipe_ipc.memory import arena
from tensorpipe_ipc.zeromq.fragments import FRAGMENT

pytestmark = pytest.mark.limit(20)
MARGIN = 1.0  # seconds beyond a timeout and its documented 50 ms, on a machine that does other things too
ENDPOINTS = {"ipc": "pipe", "tcp": "tcp://127.0.0.1:0", "inproc": "inproc://pipe"}


@pytest.fixture
def child() -> Iterator[Child]:
    """A child process."""
    with Child() as child:
        yield child


def meet(producer: tp.Producer, consumer: tp.Consumer) -> None:
    """Have two ends of one thread come to know each other: a first message goes through, and is taken."""
    putting = in_thread(lambda: producer.put("met", PATIENCE))
    assert consumer.get(PATIENCE) == "met"
    putting()


def meet_child(producer: tp.Producer, child: Child) -> None:
    """The same with a consumer in a child."""
    child.begin(children.take)
    producer.put("met", PATIENCE)
    assert child.result() == ["met"]
    producer.flush(PATIENCE)


def _fill(producer: tp.Producer) -> int:
    """Put until there is no room. Returns how many fitted."""
    count = 0
    try:
        while True:
            producer.put_nowait(count)
            count += 1
    except tp.Full:
        return count


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
@pytest.mark.parametrize(("ours", "theirs"), [(1, 64), (3, 64), (64, 64), (64, 3), (64, 1)])
def test_maxsize_is_exact(endpoint: str, ours: int, theirs: int) -> None:
    """Exactly the smaller maxsize of the two ends fits; for each message that is taken, exactly one more does."""
    with tp.Consumer(endpoint, maxsize=theirs) as consumer, tp.Producer(consumer.endpoint, maxsize=ours) as producer:
        meet(producer, consumer)
        producer.flush(PATIENCE)
        least = min(ours, theirs)
        assert _fill(producer) == least
        assert producer.statistics().in_flight == least
        for number in range(least):
            assert consumer.get(PATIENCE) == number
            producer.put("one more", PATIENCE)
            with pytest.raises(tp.Full):
                producer.put_nowait("and not two")
        assert [consumer.get(PATIENCE) for _ in range(least)] == ["one more"] * least


def test_maxsize_counts_for_each_consumer() -> None:
    """The smaller one of the two ends is how much may wait with one of them, however many others there are."""
    with Child() as one, Child() as two, tp.Producer("both", bind=True, maxsize=4) as producer:
        for child in (one, two):
            child.call(children.open_consumer, "both", bind=False, maxsize=64)
            child.begin(children.take, 1)
        wait_until(lambda: len(producer.statistics().peers) == 2)
        for number in range(2):
            producer.put(number, PATIENCE)
        assert one.result() + two.result() in ([0, 1], [1, 0])
        producer.flush(PATIENCE)
        assert _fill(producer) == 8
        for child in (one, two):
            child.call(children.take, 4)


@pytest.mark.parametrize("endpoint", [ENDPOINTS["ipc"], ENDPOINTS["tcp"]])
def test_credit_needs_one_get_and_no_more(endpoint: str, child: Child) -> None:
    """One get makes room for one message, though the consumer's process then does not call the library again."""
    address = child.call(children.open_consumer, endpoint, maxsize=2)
    with tp.Producer(address) as producer:
        meet_child(producer, child)
        producer.put(0)
        producer.put(1)
        with pytest.raises(tp.Full):
            producer.put_nowait(2)
        assert child.call(children.take, 1) == [0]
        producer.put(2, PATIENCE)
        with pytest.raises(tp.Full):
            producer.put_nowait(3)
        assert child.call(children.take, 2) == [1, 2]
        producer.flush(PATIENCE)
        assert producer.statistics().in_flight == 0


def test_full_says_who_holds_what(child: Child) -> None:
    """put without room raises Full in time, and names the consumer's pid, that it lives, and what it holds."""
    child.call(children.open_consumer, "slow", maxsize=3)
    with tp.Producer("slow") as producer:
        meet_child(producer, child)
        for number in range(3):
            producer.put(number, PATIENCE)
        for timeout in (0.0, 0.2):
            started = time.monotonic()
            with pytest.raises(
                tp.Full, match=rf"no room in time: consumer pid {child.pid} .*present.* holds 3 untaken of 3"
            ):
                producer.put("no room", timeout)
            assert timeout <= time.monotonic() - started < timeout + 0.05 + MARGIN
        started = time.monotonic()
        with pytest.raises(tp.Full, match=rf"messages not taken in time: consumer pid {child.pid} .* holds 3"):
            producer.flush(0.2)
        assert 0.2 <= time.monotonic() - started < 0.25 + MARGIN
        assert child.call(children.take, 3) == [0, 1, 2]


def test_flush_returns_when_all_was_taken(child: Child) -> None:
    """flush waits for what is in flight, and needs nothing more from the consumer than its gets."""
    child.call(children.open_consumer, "flushed")
    with tp.Producer("flushed") as producer:
        meet_child(producer, child)
        for number in range(10):
            producer.put(number, PATIENCE)
        child.begin(children.take, 10)
        producer.flush(PATIENCE)
        assert producer.statistics().in_flight == 0
        assert child.result() == list(range(10))
        producer.flush(0)


def test_statistics_count_what_happened(child: Child) -> None:
    """Each field says what it is documented to say, on both ends."""
    with tp.Producer("counted") as producer:
        assert (producer.statistics().messages, producer.statistics().peers) == (0, ())
        child.call(children.open_consumer, "counted", maxsize=2)
        meet_child(producer, child)
        producer.put(torch.ones(100), PATIENCE)
        producer.put([torch.ones(1 << 16), 5], PATIENCE)
        with pytest.raises(tp.Full):
            producer.put(0, 0.05)
        before = producer.statistics()
        assert (before.messages, before.bytes, before.in_flight) == (3, 400 + (4 << 16), 2)
        assert (before.lost, before.rejected, before.last_rejection) == (0, 0, "")
        assert before.waits >= 1
        assert 0 < before.seconds_waited < 2 * PATIENCE  # on a busy machine part of the timeout has passed before
        assert [f"pid {child.pid} " in peer for peer in before.peers] == [True]
        assert before.transport == "shared memory"
        child.call(children.take_and_check, (), 1)
        child.call(children.hold, 1)
        producer.flush(PATIENCE)
        assert producer.statistics().in_flight == 0
        got = child.call(children.consumer_statistics)
        assert (got.messages, got.bytes, got.lost, got.rejected) == (3, before.bytes, 0, 0)
        assert [f"pid {os.getpid()} " in peer for peer in got.peers] == [True]
        assert got.transport == "shared memory"


@pytest.mark.parametrize("timeout", [None, PATIENCE])
@pytest.mark.parametrize("shape", [(100,), (1000, 1000)], ids=["400 B", "4 MB"])
@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_what_was_put_may_be_overwritten_at_once(endpoint: str, shape: tuple[int, ...], timeout: float | None) -> None:
    """put has read the tensor when it returns: what is written afterwards does not reach the consumer."""
    count = 8
    with tp.Consumer(endpoint) as consumer:
        ends = children.Ends()
        with tp.Producer(consumer.endpoint) as ends.producer:
            putting = in_thread(lambda: children.put_and_overwrite(ends, shape, count, timeout))
            trees = [consumer.get(PATIENCE) for _ in range(count)]
            putting()
        for number, tree in enumerate(trees):
            assert torch.equal(tree, torch.full(shape, float(number)))


@pytest.mark.parametrize("endpoint", [ENDPOINTS["ipc"], ENDPOINTS["tcp"]])
def test_what_was_put_may_be_overwritten_between_processes(endpoint: str, child: Child) -> None:
    """The same with a consumer in another process, and large tensors."""
    address = child.call(children.open_consumer, endpoint)
    child.begin(children.take_and_check, (1000, 1000), 8)
    ends = children.Ends()
    with tp.Producer(address) as ends.producer:
        children.put_and_overwrite(ends, (1000, 1000), 8, None)
        assert child.result() == [float(number) for number in range(8)]


def test_close_delivers(child: Child) -> None:
    """close waits until the consumer has taken all, and then there is no warning."""
    child.call(children.open_consumer, "closed")
    producer = tp.Producer("closed")
    meet_child(producer, child)
    for number in range(20):
        producer.put(number, PATIENCE)
    child.begin(children.take_all)
    producer.close()
    assert child.result() == list(range(20))


def test_close_gives_up_after_linger(child: Child) -> None:
    """If nobody takes the messages, close warns after linger seconds with their number and who has them."""
    child.call(children.open_consumer, "never")
    producer = tp.Producer("never", linger=0.3)
    meet_child(producer, child)
    for number in range(5):
        producer.put(number, PATIENCE)
    started = time.monotonic()
    with pytest.warns(RuntimeWarning, match=rf"closed with 5 messages that were not taken within 0.3 s: .*{child.pid}"):
        producer.close()
    assert 0.3 <= time.monotonic() - started < 1 + MARGIN


def test_close_without_linger_looks_once(child: Child) -> None:
    """With linger=0 close does not wait, but what was taken by then counts as taken: there is no warning."""
    child.call(children.open_consumer, "hasty")
    producer = tp.Producer("hasty", linger=0)
    meet_child(producer, child)
    producer.put("taken", PATIENCE)
    assert child.call(children.take) == ["taken"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        producer.close()


def test_close_waits_for_nobody_if_nothing_is_in_flight() -> None:
    """A producer that no consumer ever met closes at once and without a word."""
    started = time.monotonic()
    tp.Producer("nobody").close()
    tp.Producer("nobody", bind=True).close()
    assert time.monotonic() - started < MARGIN


def test_a_dropped_producer_delivers(child: Child) -> None:
    """A producer that is let go without close still delivers, and says goodbye."""
    with tp.Consumer("dropped") as consumer:
        child.call(children.open_producer, "dropped")
        child.begin(children.put_numbers, 0, 20)
        assert consumer.get(PATIENCE) == ("", 0)
        child.result()
        child.begin(children.drop_producer)
        assert [number for _, number in consumer] == list(range(1, 20))
        child.result()


_FORGETFUL = """
import sys, torch, tensorpipe_ipc as tp
producer = tp.Producer(sys.argv[1])
for number in range(20):
    producer.put(torch.full((300, 300), float(number)))
"""


@pytest.mark.slow
@pytest.mark.limit(110)  # it imports torch, which may take a busy machine long
def test_a_program_that_ends_delivers() -> None:
    """A program that ends without close, its producer still referred to, delivers all and says goodbye."""
    with tp.Consumer("ended") as consumer, started("-W", "error", "-c", _FORGETFUL, consumer.endpoint) as program:
        assert [int(tree[0, 0]) for tree in consumer] == list(range(20))
        done = ended(program)
    assert (done.status, done.err) == (0, "")


def test_what_cannot_be_sent_leaves_the_producer_as_it_was() -> None:
    """UnsupportedLeaf names the path; nothing was sent, nothing is in flight, and the next message is the first."""
    with tp.Consumer("objects") as consumer, tp.Producer("objects") as producer:
        with pytest.raises(tp.UnsupportedLeaf, match=r"tree\['mask'\]\[3\]: .*object"):
            producer.put({"mask": [0, 1, 2, object()]}, PATIENCE)
        assert producer.statistics().messages == 0
        meet(producer, consumer)
        assert producer.statistics().messages == 1


@pytest.mark.parametrize("method", ["put", "flush"])
@pytest.mark.parametrize(("timeout", "error"), children.BAD_TIMEOUTS)
def test_timeouts_out_of_range(method: str, timeout: Any, error: type[Exception]) -> None:
    """A timeout is None or a number of seconds from 0 up; the text says so."""
    with tp.Producer("timed") as producer, pytest.raises(error, match="timeout=.*seconds"):
        producer.put(1, timeout) if method == "put" else producer.flush(timeout)


@pytest.mark.parametrize("timeout", [0, 0.0])
def test_a_timeout_of_zero_does_not_wait(timeout: float) -> None:
    """timeout=0 looks once."""
    with tp.Producer("timed") as producer:
        started = time.monotonic()
        with pytest.raises(tp.Full):
            producer.put(1, timeout)
        producer.flush(timeout)
        assert time.monotonic() - started < 0.05 + MARGIN


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"maxsize": 0}, ValueError, "maxsize=0"),
        ({"maxsize": -1}, ValueError, "maxsize=-1"),
        ({"maxsize": 1.5}, TypeError, "maxsize=1.5 is a float"),
        ({"maxsize": True}, TypeError, "maxsize=True is a bool"),
        ({"bind": "no"}, TypeError, "bind='no' is a str; give True or False"),
        ({"bind": None}, TypeError, "bind=None is a NoneType"),
        ({"linger": -1}, ValueError, "linger=-1"),
        ({"linger": "5"}, TypeError, "linger='5' is a str"),
        ({"linger": True}, TypeError, "linger=True is a bool"),
        ({"linger": float("inf")}, ValueError, "linger=inf: give 0 to 2,147,483 seconds"),
        ({"linger": 2_147_484}, ValueError, "linger=2147484"),
        ({"maxsize": 1 << 64}, ValueError, "give a whole number of 1 to 2,147,483,647"),
        (
            {"serializer": "pickle"},
            tp.UnknownSerializer,
            r"unknown serializer 'pickle' \(known: numpy, raw, torch_save",
        ),
        ({"serializer": None}, tp.UnknownSerializer, "unknown serializer None"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """A wrong option is named with its value, and nothing is left open."""
    with pytest.raises(error, match=text):
        tp.Producer("options", **{"bind": True, **options})


def test_after_close_everything_is_an_error() -> None:
    """put and flush say that the end is closed; closing again and leaving a with do nothing; statistics stay."""
    with tp.Producer("over", bind=True) as producer:
        producer.close()
        producer.close()
        for use in (lambda: producer.put(1), lambda: producer.put_nowait(1), producer.flush):
            with pytest.raises(tp.Closed, match=r"Producer on ipc://.*over.sock is closed"):
                use()
        assert "closed" in repr(producer)
        assert producer.statistics().messages == 0
    assert producer.endpoint.startswith("ipc://")


def test_two_threads_are_one_too_many() -> None:
    """While one thread waits in put, another one's put is Busy at once, and disturbs nothing."""
    with tp.Producer("threads") as producer:
        putting = in_thread(lambda: producer.put("first", PATIENCE))
        wait_until(lambda: is_in_use(producer))
        with pytest.raises(tp.Busy, match="in use by another thread"):
            producer.put("second")
        with tp.Consumer("threads") as consumer:
            assert consumer.get(PATIENCE) == "first"
            putting()


def test_statistics_are_new_once_the_thread_that_used_the_end_has_ended(child: Child) -> None:
    """Though a thread that never saw the end has got its number."""
    numbers, over = list[int](), threading.Event()
    with tp.Producer("numbered", linger=0) as producer:
        child.call(children.open_consumer, "numbered")

        def put() -> None:
            numbers.append(threading.get_ident())
            producer.put(1, PATIENCE)

        def wait() -> None:
            numbers.append(threading.get_ident())
            assert over.wait(PATIENCE)

        child.begin(children.take)
        threads = [threading.Thread(target=put)]
        threads[0].start()
        threads[0].join()
        child.result()
        while len(threads) < 20 and numbers[0] not in numbers[1:]:  # the C library gives it to one of the next
            threads.append(threading.Thread(target=wait))
            threads[-1].start()
            wait_until(lambda: len(numbers) == len(threads))
        assert numbers[0] in numbers[1:]
        try:
            wait_until(lambda: producer.statistics().in_flight == 0, 5)
        finally:
            over.set()
            for thread in threads:
                thread.join()


def test_statistics_are_new_after_a_thread_that_python_did_not_start(child: Child) -> None:
    """As a C library's: whether it has ended, nobody can tell."""
    over = threading.Event()
    with tp.Producer("foreign", linger=0) as producer:
        child.call(children.open_consumer, "foreign")
        child.begin(children.take)

        def put() -> None:
            producer.put(threading.current_thread().name, PATIENCE)
            over.set()

        _thread.start_new_thread(put, ())
        assert over.wait(PATIENCE)
        child.result()
        wait_until(lambda: producer.statistics().in_flight == 0, 5)


def test_statistics_do_not_make_an_end_busy_for_the_thread_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that made it watches it from before its first put on, which waits for the end of a look."""
    looks = threading.Event()

    def long_look(**_: Any) -> None:
        looks.set()
        time.sleep(0.1)  # as long as a look may take on a busy machine

    with tp.Producer("watched", linger=0) as producer, tp.Consumer("watched") as consumer:
        monkeypatch.setattr(side_of(producer), "look_around", long_look)
        putting = in_thread(lambda: (looks.wait(PATIENCE), producer.put("first", PATIENCE)))
        producer.statistics()
        monkeypatch.undo()
        assert consumer.get(PATIENCE) == "first"
        putting()


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_another_thread_looks_at_ends_that_are_busy(shared_memory: Any) -> None:
    """Whatever it asks raises nothing, and none of their own calls: peers come, go, and share memory meanwhile."""
    ends: list[Any] = []
    is_over = False

    def look() -> int:
        looks = 0
        while not is_over:
            for end in [*ends]:
                looks += len(f"{end!r} {end.statistics()}") > 0
                time.sleep(0.0001)  # else each of the others' calls waits 5 ms for the interpreter's lock
        return looks

    looking = in_thread(look)
    try:
        with tp.Consumer("looked-at", shared_memory=shared_memory, producers=None) as consumer:
            ends.append(consumer)
            for _ in range(12):
                with tp.Producer("looked-at", shared_memory=shared_memory) as producer:
                    ends.append(producer)
                    putting = in_thread(lambda: [producer.put(each, PATIENCE) for each in range(50)])
                    assert [consumer.get(PATIENCE) for _ in range(50)] == list(range(50))
                    putting()
                assert producer.statistics().messages == 50
    finally:
        is_over = True
    assert looking() > 10


def test_a_closed_producer_leaves_no_cycle() -> None:
    """An end that was closed and dropped is gone at once: its memory does not wait for the garbage collector."""
    gc.disable()
    try:
        producer = tp.Producer("freed")
        producer.close()
        gone: list[bool] = []
        weakref.finalize(producer, gone.append, True)
        del producer
        assert gone == [True]
    finally:
        gc.enable()


def test_no_warning_without_need() -> None:
    """Opening and closing ends in any order is silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        consumer, producer = tp.Consumer("silent"), tp.Producer("silent")
        consumer.close()
        producer.close()


@pytest.mark.parametrize("producer_binds", [False, True])
def test_a_consumer_that_closes_after_the_last_message_has_taken_it(producer_binds: bool) -> None:
    """In frames over ipc, its last credit and its goodbye come, though its connection has ended before anybody looks."""
    producer = tp.Producer("taken", bind=producer_binds, shared_memory="off", linger=0)
    with producer, tp.Consumer("taken", bind=not producer_binds, shared_memory="off") as consumer:
        putting = in_thread(lambda: producer.put(1, PATIENCE))
        assert consumer.get(PATIENCE) == 1
        putting()
        consumer.close()
        producer.flush(PATIENCE)
        assert producer.statistics().lost == 0


@pytest.mark.parametrize("endpoint", ["gathering", "tcp://127.0.0.1:*"])
@pytest.mark.parametrize("serializer", ["raw", "numpy", "torch_save"])
@pytest.mark.parametrize("wire_dtype", [None, torch.float16])
def test_what_there_is_no_memory_to_gather_is_refused_before_it_is(
    endpoint: str, serializer: str, wire_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would kill. Of a list no more is gathered than there is memory for; what needs no copy is not refused."""
    resident = _resident()
    monkeypatch.setattr(headroom, "_available", lambda: (64 << 20) - (_resident() - resident))
    with tp.Producer(
        endpoint, bind=True, shared_memory="off", linger=0, serializer=serializer, wire_dtype=wire_dtype
    ) as producer:
        large, number = torch.ones(1).expand(1 << 26), torch.ones(1, dtype=torch.complex64)
        for tree in (
            large,
            {"x": large},
            np.ones(1 << 27, np.uint8)[::-1],
            np.broadcast_to(np.ones(3, np.uint8)[::-1], (1 << 40, 3)),
            [torch.ones(1).expand(1 << 23) for _ in range(20)],
            number.conj().expand(1 << 25),
        ):
            with pytest.raises(
                tp.OutOfMemory, match=r"[\d,]{10,} bytes\b.* bytes of memory are left.* It was not sent"
            ):
                producer.put(tree, 0)
        resident = _resident()
        with pytest.raises(tp.Full):
            producer.put(torch.ones(1 << 12, 100)[:, ::2], 0)
        if (serializer, wire_dtype) == ("raw", None):
            with pytest.raises(tp.Full):
                producer.put(torch.zeros(1 << 26), 0)


@pytest.mark.parametrize("endpoint", ["copying", "tcp://127.0.0.1:*"])
def test_what_there_is_no_memory_to_copy_is_refused_before_it_is(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are a copy. The next message comes, and nothing is lost."""
    with (
        tp.Consumer(endpoint, shared_memory="off") as consumer,
        tp.Producer(consumer.endpoint, shared_memory="off", linger=0) as producer,
    ):
        meet(producer, consumer)
        with monkeypatch.context() as short:
            short.setattr(headroom, "_available", lambda: 64 << 20)
            with pytest.raises(tp.OutOfMemory, match=r"134,\d{3},\d{3} bytes .* 67,108,864 bytes .*It was not sent"):
                producer.put(torch.zeros(1 << 25), PATIENCE)
        meet(producer, consumer)
        producer.flush(PATIENCE)
        assert (producer.statistics().messages, consumer.statistics().lost) == (2, 0)


def _leave_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have idle memory lie there for as long as a busy machine may take: it would be given back before it is needed."""
    for module in (participant, arena):
        monkeypatch.setattr(module, "IDLE", 60.0)


@pytest.mark.parametrize("kind", ["expanded", "flipped"])
def test_idle_memory_over_tcp_is_given_back_before_a_refusal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory to gather in as long as the producer holds that of messages which were taken."""
    with (
        tp.Consumer("tcp://127.0.0.1:*", shared_memory="off") as consumer,
        tp.Producer(consumer.endpoint, shared_memory="off", linger=0) as producer,
    ):
        meet(producer, consumer)
        for _ in range(2):  # before any is taken: they are kept side by side
            producer.put(np.ones(48 << 20, np.uint8), PATIENCE)
        taking = in_thread(lambda: [consumer.get(PATIENCE).nbytes for _ in range(2)])
        producer.flush(PATIENCE)
        assert taking() == [48 << 20] * 2
        limit = _resident() + (16 << 20)
        monkeypatch.setattr(headroom, "_available", lambda: limit - _resident())
        tree = torch.ones(1).expand(6 << 20) if kind == "expanded" else np.ones(24 << 20, np.uint8)[::-1]
        taking = in_thread(lambda: consumer.get(PATIENCE).nbytes)
        producer.put(tree, PATIENCE)
        assert taking() == 24 << 20


@pytest.mark.parametrize(("copy", "wire_dtype"), [(True, None), ("auto", torch.float16)], ids=["copied", "restored"])
def test_what_there_is_no_memory_to_take_stays_for_the_next_get(
    copy: Any, wire_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a full cgroup it would end the consumer. The message lies in shared memory, and is taken once there is room."""
    with (
        tp.Consumer("taking", copy=copy) as consumer,
        tp.Producer("taking", wire_dtype=wire_dtype, linger=0) as producer,
    ):
        meet(producer, consumer)
        producer.put(torch.ones(6 << 20), PATIENCE)
        with monkeypatch.context() as short:
            short.setattr(headroom, "_available", lambda: 1 << 20)
            with pytest.raises(tp.OutOfMemory, match="taken, in 25,165,824 bytes: 1,048,576 bytes of memory are left"):
                consumer.get(PATIENCE)
        assert consumer.get(PATIENCE).sum() == 6 << 20
        assert (consumer.statistics().lost, consumer.statistics().rejected) == (0, 0)


def test_idle_memory_over_tcp_is_given_back_before_a_message_in_shared_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A producer may have had a consumer of the other kind before."""
    limit = 1 << 60

    def put(nbytes: int) -> None:
        producer.put(np.ones(nbytes, np.uint8), PATIENCE)
        producer.flush(PATIENCE)

    monkeypatch.setattr(headroom, "_available", lambda: limit - _resident())
    with tp.Producer("tcp://127.0.0.1:*", bind=True, linger=0) as producer:
        for way, nbytes in (("off", 96 << 20), ("auto", 24 << 20)):
            with tp.Consumer(producer.endpoint, bind=False, shared_memory=way) as consumer:
                for size in (1, nbytes):
                    putting = in_thread(functools.partial(put, size))
                    got = consumer.get(PATIENCE).nbytes  # an assertion would keep the array
                    assert got == size
                    putting()
            wait_until(lambda: not producer.statistics().peers)
            limit = _resident() + (32 << 20)


@pytest.mark.parametrize("idle", ["frames", "shared memory"])
def test_idle_memory_of_one_way_is_given_back_before_a_message_by_the_other_is_refused(
    idle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One consumer may have producers of both kinds."""
    _leave_idle(monkeypatch)
    with (
        tp.Consumer("tcp://127.0.0.1:*", copy=True) as consumer,
        tp.Producer(consumer.endpoint, shared_memory="off", linger=0) as far,
        tp.Producer(consumer.endpoint, linger=0) as near,
    ):
        meet(near, consumer)
        meet(far, consumer)
        before, after = (far, near) if idle == "frames" else (near, far)
        putting = in_thread(lambda: before.put(np.ones(96 << 20, np.uint8), PATIENCE))
        nbytes = consumer.get(PATIENCE).nbytes  # an assertion would keep the array
        assert nbytes == 96 << 20
        putting()
        after.put(np.ones(24 << 20, np.uint8), PATIENCE)
        limit = _resident() + (16 << 20)
        monkeypatch.setattr(headroom, "_available", lambda: limit - _resident())
        assert consumer.get(PATIENCE).nbytes == 24 << 20


def test_a_memory_error_of_a_handler_comes_out_of_get_as_itself() -> None:
    """It says nothing of the message, which comes with the next get, or is counted."""

    class Watchdog(MemoryError):
        pass

    def bark(*_: Any) -> None:
        raise Watchdog

    before = signal.signal(signal.SIGUSR1, bark)
    point, left, swallowed = 0, 0, list[int]()
    with tp.Consumer("barked-at") as consumer, tp.Producer("barked-at", linger=0) as producer:
        meet(producer, consumer)
        while left <= 0:
            point += 1
            producer.put(point, PATIENCE)
            try:
                left = run_traced(
                    lambda: consumer.get(PATIENCE),
                    point,
                    lambda: signal.raise_signal(signal.SIGUSR1),
                    SIGNAL_CHECKS,
                    before=False,
                )
                swallowed += [point] * (left <= 0)
            except Watchdog:
                with contextlib.suppress(tp.Empty):
                    consumer.get(0)
        signal.signal(signal.SIGUSR1, before)
        assert point > 5
        assert swallowed == []
        assert consumer.statistics().rejected == 0


@pytest.mark.parametrize("text", [0, 2_000_000])
def test_a_message_over_tcp_of_many_small_tensors_that_there_is_no_memory_for_is_told(
    text: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in one frame, which came in fragments, and may begin with a long text. The next message comes."""
    with (
        tp.Consumer("tcp://127.0.0.1:*", shared_memory="off") as consumer,
        tp.Producer(consumer.endpoint, shared_memory="off", linger=0) as producer,
    ):
        meet(producer, consumer)
        producer.put(["t" * text, *(torch.ones(15_000) for _ in range(300))], PATIENCE)
        with monkeypatch.context() as short:
            short.setattr(headroom, "_available", lambda: 8 << 20)
            with pytest.raises(tp.OutOfMemory, match="from producer pid .* was dropped: .* 8,388,608 bytes of memory"):
                consumer.get(PATIENCE)
        producer.put("next", PATIENCE)
        assert consumer.get(PATIENCE) == "next"
        assert consumer.statistics().rejected == 1


def test_idle_memory_is_given_back_before_fragments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that a large message had come in lies idle with the consumer, and is more than the next one needs."""
    _leave_idle(monkeypatch)
    with (
        tp.Consumer("tcp://127.0.0.1:*", shared_memory="off", copy=True) as consumer,
        tp.Producer(consumer.endpoint, shared_memory="off", linger=0) as producer,
    ):
        meet(producer, consumer)
        putting = in_thread(lambda: producer.put(np.ones(96 << 20, np.uint8), PATIENCE))
        nbytes = consumer.get(PATIENCE).nbytes  # an assertion would keep the array
        assert nbytes == 96 << 20
        putting()
        producer.put([torch.ones(15_000) for _ in range(300)], PATIENCE)
        limit = _resident() + (8 << 20)
        monkeypatch.setattr(headroom, "_available", lambda: limit - _resident())
        assert len(consumer.get(PATIENCE)) == 300


def test_a_strangers_long_frame_takes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """There would be no memory for it. Each later call came upon it again."""
    with (
        tp.Consumer("tcp://127.0.0.1:*", shared_memory="off") as consumer,
        tp.Producer(consumer.endpoint, shared_memory="off", linger=0) as producer,
        RawEnd(consumer.endpoint) as stranger,
    ):
        meet(producer, consumer)
        stranger.say(*[bytes(FRAGMENT)] * 40, b"end")
        wait_until(side_of(consumer).socket.has_incoming)
        producer.put("friend", PATIENCE)  # which looks, where the last look is long ago
        looks = list[int]()
        monkeypatch.setattr(headroom, "_available", lambda: looks.append(1) or 8 << 20)  # type: ignore[func-returns-value]
        assert consumer.get(PATIENCE) == "friend"
        with pytest.raises(tp.Empty):
            consumer.get(0.1)
        assert consumer.statistics().rejected == 1
        assert looks == []


def test_a_message_over_tcp_that_there_is_no_memory_for_is_dropped_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes twice its size while it comes. The next one comes."""
    with (
        tp.Consumer("tcp://127.0.0.1:*", shared_memory="off") as consumer,
        tp.Producer(consumer.endpoint, shared_memory="off", linger=0) as producer,
    ):
        meet(producer, consumer)
        producer.put(torch.ones(6 << 20), PATIENCE)
        with monkeypatch.context() as short:
            short.setattr(headroom, "_available", lambda: 40 << 20)
            with pytest.raises(
                tp.OutOfMemory, match="25,165,824 bytes, which takes twice .* 41,943,040 bytes of memory"
            ):
                consumer.get(PATIENCE)
        producer.put("next", PATIENCE)
        assert consumer.get(PATIENCE) == "next"


def test_a_message_in_shared_memory_that_no_get_finds_memory_for_is_counted_when_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes again, up to eight times. A stream that ends without it does not end as if all had been taken unseen."""
    with (
        tp.Consumer("never-fits", copy=True) as consumer,
        tp.Producer(consumer.endpoint, linger=0) as producer,
    ):
        meet(producer, consumer)
        producer.put(torch.ones(6 << 20), PATIENCE)
        producer.put("next", PATIENCE)
        with monkeypatch.context() as short:
            short.setattr(headroom, "_available", lambda: 1 << 20)
            with pytest.raises(tp.OutOfMemory, match="25,165,824 bytes"):
                consumer.get(PATIENCE)
            assert consumer.statistics().rejected == 0
            for _ in range(8):
                if not consumer.statistics().rejected:
                    with pytest.raises(tp.OutOfMemory):
                        consumer.get(0)
        assert consumer.get(PATIENCE) == "next"
        assert consumer.statistics().rejected == 1
        assert "25,165,824 bytes" in consumer.statistics().last_rejection


def test_many_messages_that_are_kept_until_they_are_taken_are_looked_at_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over tcp a producer keeps a copy of each. None of them is large."""
    with (
        tp.Consumer("tcp://127.0.0.1:*", shared_memory="off") as consumer,
        tp.Producer(consumer.endpoint, shared_memory="off", linger=0) as producer,
    ):
        meet(producer, consumer)
        message, limit = np.ones(12 << 20, np.uint8), _resident() + (64 << 20)
        with monkeypatch.context() as short:
            short.setattr(headroom, "_available", lambda: limit - _resident())
            put = functools.partial(producer.put, message, PATIENCE)
            with pytest.raises(tp.OutOfMemory, match="12,583,"):
                deque(iter(put, "never"), maxlen=0)
        assert _resident() < limit + (32 << 20)
        while consumer.statistics().messages < producer.statistics().messages:
            consumer.get(PATIENCE)


def _resident() -> int:
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as line:
        return int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
