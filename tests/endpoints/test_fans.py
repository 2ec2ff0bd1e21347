"""Many to one and one to many while ends come, go, die and lose their connection: order, counts, and who gets work."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from children import PATIENCE, Child, in_thread, wait_until
from inside import is_in_use, side_of
from proxy import Proxy
from secured import binders, connectors, make_keys

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints import participant, resend_buffer
from tensorpipe_ipc.endpoints.sender import Sender
from tensorpipe_ipc.memory import arena
from tensorpipe_ipc.memory.segment import CAPACITY, PAGE_LOCKED
from tensorpipe_ipc.shared_queue import put_end
from tensorpipe_ipc.shared_queue.token_pipe import TokenPipe
from tensorpipe_ipc.zeromq.binder import Binder

ONLY_SHARED_MEMORY = pytest.mark.parametrize("transport", ["shared memory"], indirect=True)
pytestmark = [pytest.mark.limit(40), pytest.mark.usefixtures("transport")]


def _take_until(consumer: tp.Consumer, wanted: dict[str, int]) -> dict[str, list[int]]:
    """Take (name, number) until each name's number has come. Ends of streams in between are no matter."""
    got: dict[str, list[int]] = defaultdict(list)
    deadline = time.monotonic() + 3 * PATIENCE
    while not all(last in got[name][-1:] for name, last in wanted.items()):
        assert time.monotonic() < deadline, {name: numbers[-1:] for name, numbers in got.items()}
        with contextlib.suppress(tp.EndOfStream, tp.PeerLost, tp.Empty):
            name, number = consumer.get(0.5)
            got[name].append(number)
    return got


@pytest.mark.slow
def test_the_binding_consumer_is_killed_and_three_producers_stay(transport: str) -> None:
    """The next one gets the rest of each in order; what is missing was in flight, and each producer has counted it."""
    with Child() as binder, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Child()) for _ in range(3)]
        binder.call(children.open_consumer, "fan", maxsize=8)
        for name, child in enumerate(crowd):
            child.call(children.open_producer, "fan", maxsize=8)
            child.begin(children.put_numbers, 0, 400, str(name))
        first = binder.call(children.take, 300)
        binder.kill()
        with tp.Consumer("fan", maxsize=8) as consumer:
            got = _take_until(consumer, {str(name): 399 for name in range(3)})
            for name, child in enumerate(crowd):
                child.result()
                before = [number for who, number in first if who == str(name)]
                lost = child.call(children.producer_statistics).lost
                assert before == list(range(len(before)))
                assert got[str(name)] == list(range(400 - len(got[str(name)]), 400))
                assert 400 - len(before) - len(got[str(name)]) == lost <= 8
            for child in crowd:
                child.call(children.abandon)


def test_the_binding_producer_is_killed_and_three_consumers_stay() -> None:
    """All three get work of the next one, none of it twice."""
    with Child() as binder, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Child()) for _ in range(3)]
        binder.call(children.open_producer, "fan", bind=True)
        for child in crowd:
            child.call(children.open_consumer, "fan", bind=False)
            child.begin(children.take_numbers_until, 999)
        binder.call(children.put_numbers, 0, 200)
        binder.kill()
        with tp.Producer("fan", bind=True, maxsize=6) as producer:
            wait_until(lambda: len(producer.statistics().peers) >= 3)
            for number in range(200, 500):
                producer.put(("", number), PATIENCE)
            producer.flush(PATIENCE)
            for _ in crowd:
                producer.put(("", 999), PATIENCE)  # each takes one, and no more
            shares = [child.result() for child in crowd]
            assert all(any(number >= 200 for number in share) for share in shares)
            together = sorted(number for share in shares for number in share)
            assert [number for number in together if number >= 200] == list(range(200, 500))
            assert len(set(together)) == len(together)
            assert all(share == sorted(share) for share in shares)
            for child in crowd:
                child.call(children.close)


def test_work_goes_to_who_is_free() -> None:
    """A consumer that takes nothing gets what may wait with it, and the other one all the rest."""
    with Child() as idle, Child() as busy, tp.Producer("work", bind=True, maxsize=4, linger=0) as producer:
        idle.call(children.open_consumer, "work", bind=False)
        busy.call(children.open_consumer, "work", bind=False)
        busy.begin(children.take_numbers_until, 200)
        deadline = time.monotonic() + PATIENCE
        while len(producer.statistics().peers) < 2:
            assert time.monotonic() < deadline
            with contextlib.suppress(tp.Empty):
                idle.call(children.take, timeout=0)
        for number in range(200):
            producer.put(("", number), PATIENCE)
        while producer.statistics().in_flight > 4:
            assert time.monotonic() < deadline
        producer.put(("", 200), PATIENCE)
        taken = busy.result()
        assert len(taken) >= 196
        assert len(idle.call(children.take, 200 - len(taken))) == 200 - len(taken)


def test_a_consumer_that_takes_nothing_holds_up_no_later_one() -> None:
    """It was alone, and has all that may wait with it, when the next one comes."""
    with Child() as idle, Child() as later, tp.Producer("work", bind=True, maxsize=4, linger=0) as producer:
        idle.call(children.open_consumer, "work", bind=False)
        idle.begin(children.take)
        producer.put("met", PATIENCE)
        assert idle.result() == ["met"]
        for number in range(4):
            producer.put(number, PATIENCE)
        with pytest.raises(tp.Full):
            producer.put_nowait("one more")
        later.call(children.open_consumer, "work", bind=False)
        later.begin(children.take, 20)
        for number in range(20):
            producer.put(number, PATIENCE)
        assert later.result() == [*range(20)]
        assert idle.call(children.take, 4) == [*range(4)]


@ONLY_SHARED_MEMORY
@pytest.mark.parametrize("short", ["frames", "shared memory"])
def test_a_message_goes_to_a_consumer_for_whom_there_is_memory(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes nothing, and what waits with it fills the memory of frames, or the shared one. Others need the other."""
    monkeypatch.setattr(resend_buffer, "KEPT_AT_MOST", 1 << 20 if short == "frames" else 1 << 28)
    full, free = ("off", "require") if short == "frames" else ("require", "off")
    message = torch.ones(1 << 19, dtype=torch.uint8)
    with (
        Child() as holds,
        Child() as idle,
        Child() as friend,
        tp.Producer("tcp://127.0.0.1:0", bind=True, maxsize=8, linger=0) as producer,
    ):
        for count, (child, way) in enumerate(((holds, full), (friend, free), (idle, full)), 1):
            child.call(children.open_consumer, producer.endpoint, bind=False, shared_memory=way)
            child.begin(children.take)
            producer.wait_for(count, PATIENCE)
            for _ in range(2):  # one of them is its own, as it has least to do
                producer.put("met", PATIENCE)
            assert child.result() == ["met"]
            if child is holds:
                queue = side_of(producer).any_queue()
                if queue is not None:
                    queue.arena.words[CAPACITY] = 1 << 20
                with contextlib.suppress(tp.Full):
                    for _ in range(8):
                        producer.put(message, 0.1)
        for _ in range(2):
            producer.put_nowait(message)
            in_thread(lambda: producer.put(message))(PATIENCE)
        with pytest.warns(RuntimeWarning, match="not taken"):
            producer.close()


@contextlib.contextmanager
def _fan(count: int, capacity: int, function: Callable[..., Any], *arguments: Any) -> Iterator[tuple[Any, list[Child]]]:
    """A producer whose consumers, in children, have begun a call, and whose arena has a capacity. Messages are left."""
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Child()) for _ in range(count)]
        producer = stack.enter_context(tp.Producer("fan", bind=True, linger=0))
        for number, child in enumerate(crowd, 1):
            child.call(children.open_consumer, "fan", bind=False)
            child.begin(function, *arguments)
            producer.wait_for(number, PATIENCE)
        queue = side_of(producer).any_queue()
        assert queue is not None
        queue.arena.words[CAPACITY] = capacity
        del queue  # it would keep what waits in it
        yield producer, crowd
        with pytest.warns(RuntimeWarning, match="not taken"):
            producer.close()


@ONLY_SHARED_MEMORY
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_put_that_waits_for_memory_gets_that_of_a_killed_consumer(count: int) -> None:
    """Nobody takes what waits in its queue, and that is freed. With one consumer, the put waits for the next one."""
    message = torch.ones(1 << 18, dtype=torch.uint8)
    with _fan(count, 8 << 20, children.take) as (producer, crowd):
        for _ in crowd:
            producer.put("met", PATIENCE)
        assert [child.result() for child in crowd] == [["met"]] * count
        with contextlib.suppress(tp.Full):
            while True:
                producer.put(message, 0.1)
        putting = in_thread(lambda: producer.put(message))
        wait_until(lambda: is_in_use(producer))
        crowd[0].kill()
        if count == 1:
            with Child() as later:
                later.call(children.open_consumer, "fan", bind=False)
                later.begin(children.take)
                putting()
                assert len(later.result()) == 1
        else:
            putting()


@ONLY_SHARED_MEMORY
@pytest.mark.parametrize("locks_pages", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_put_for_which_there_can_be_no_memory_says_so_at_once(
    count: int, locks_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each look for memory takes long, and where pages are locked: then it takes two."""
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(tp.Producer("none", bind=True, linger=0))
        crowd = [stack.enter_context(Child()) for _ in range(count)]
        for number, child in enumerate(crowd, 1):
            child.call(children.open_consumer, "none", bind=False)
            child.begin(children.hold, 1)
            producer.wait_for(number, PATIENCE)
        queue = side_of(producer).any_queue()
        assert queue is not None
        queue.words[PAGE_LOCKED] = int(locks_pages)
        make_room = queue.attachment.make_room

        def put(timeout: float | None) -> None:
            with pytest.raises(tp.SharedMemoryError, match="bytes free"):
                producer.put(torch.ones(1 << 20, dtype=torch.uint8), timeout)

        with monkeypatch.context() as short:
            short.setattr(queue.attachment, "make_room", lambda nbytes: make_room(nbytes) or time.sleep(0.003))
            for module in (arena, put_end):
                short.setattr(module, "headroom", lambda: 0)
            for timeout in (None, 0.5, 0):
                in_thread(lambda timeout=timeout: put(timeout))(PATIENCE)
        for _ in crowd:
            producer.put(torch.ones(1), PATIENCE)
        for child in crowd:
            child.result()


@ONLY_SHARED_MEMORY
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_full_names_who_holds_the_memory(count: int, is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text says how much waits with each consumer, and how much each keeps, which waits nowhere.

    Also where the machine does other things until the time is over.
    """
    message = torch.ones(1 << 18, dtype=torch.uint8)
    with _fan(count, 1 << 20, children.hold, 2) as (producer, crowd):
        told = ""
        if is_late:
            monkeypatch.setattr(Sender, "is_late", lambda *_: True)
            monkeypatch.setattr(Sender, "look_around", lambda *_, **__: time.sleep(0.3))
        while not told:
            try:
                producer.put(message, 0.3)
            except tp.Full as full:
                told = str(full)
        monkeypatch.undo()
        for child in crowd:
            child.result()
            assert f"consumer pid {child.pid}" in told
            assert re.search(rf"pid {child.pid} \(alive\) has \d blocks with", told), told


@pytest.mark.parametrize("producers_connect", [True, False])
@pytest.mark.parametrize("each", [8, pytest.param(32, marks=pytest.mark.kills)])
def test_32_peers(producers_connect: bool, each: int) -> None:
    """32 ends in four processes (or 128) at one binder: every message once, each producer's in order."""
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Child()) for _ in range(4)]
        if producers_connect:
            consumer = stack.enter_context(tp.Consumer("crowd"))
            for name, child in enumerate(crowd):
                child.begin(children.put_from_many, "crowd", each, 20, str(name))
            got = _take_until(consumer, {f"{name}-{end}": 19 for name in range(4) for end in range(each)})
            assert all(numbers == list(range(20)) for numbers in got.values())
            for child in crowd:
                child.result()
        else:
            producer = stack.enter_context(tp.Producer("crowd", bind=True, maxsize=4 * each))
            for child in crowd:
                child.begin(children.take_by_many, "crowd", each)
            deadline = time.monotonic() + 2 * PATIENCE
            while len(producer.statistics().peers) < 4 * each:
                assert time.monotonic() < deadline
            for number in range(20 * each):
                producer.put(number, PATIENCE)
            producer.flush(PATIENCE)
            producer.close()
            shares = [share for child in crowd for share in child.result()]
            assert sorted(number for share in shares for number in share) == list(range(20 * each))
            assert all(share and share == sorted(share) for share in shares)


@contextlib.contextmanager
def _line_to(port: int) -> Iterator[tuple[int, threading.Event]]:
    """A tcp port that leads to another one. Setting the event cuts every connection that there is, once."""
    cut, done = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.02)
        threads: list[threading.Thread] = []
        pairs: list[tuple[socket.socket, socket.socket]] = []

        def carry(one: socket.socket, other: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := one.recv(65536):
                    other.sendall(data)
            for end in (one, other):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError):
                    pair = server.accept()[0], socket.create_connection(("127.0.0.1", port))
                    pairs.append(pair)
                    for one, other in (pair, pair[::-1]):
                        threads.append(threading.Thread(target=carry, args=(one, other)))
                        threads[-1].start()
                if cut.is_set():
                    cut.clear()
                    hang_up()

        def hang_up() -> None:
            for pair in pairs:
                for end in pair:
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield server.getsockname()[1], cut
        finally:
            done.set()
            serving.join()
            hang_up()
            for thread in threads:
                thread.join()
            for pair in pairs:
                for end in pair:
                    end.close()


@pytest.mark.parametrize("producer_binds", [False, True])
def test_the_connection_is_cut_and_both_live(producer_binds: bool) -> None:
    """They find each other again by themselves: all messages come, in order and once."""
    with contextlib.ExitStack() as stack:
        if producer_binds:
            producer = stack.enter_context(tp.Producer("tcp://127.0.0.1:0", bind=True, linger=2))
            bound = producer.endpoint
        else:
            consumer = stack.enter_context(tp.Consumer("tcp://127.0.0.1:0"))
            bound = consumer.endpoint
        port, cut = stack.enter_context(_line_to(int(bound.rpartition(":")[2])))
        line = f"tcp://127.0.0.1:{port}"
        if producer_binds:
            consumer = stack.enter_context(tp.Consumer(line, bind=False))
        else:
            producer = stack.enter_context(tp.Producer(line, linger=2))

        def put() -> None:
            for number in range(300):
                producer.put(("", number), PATIENCE)
                if number % 100 == 50:
                    cut.set()
            producer.flush(PATIENCE)
            flushed.set()

        flushed = threading.Event()
        putting = in_thread(put)
        got = _take_until(consumer, {"": 299})[""]
        while not flushed.is_set():  # the last credits may be cut off too: a get repeats them
            with contextlib.suppress(tp.Empty):
                got.append(consumer.get(0.05)[1])
        putting()
        assert got == list(range(300))
        assert producer.statistics().lost == consumer.statistics().lost == 0
        stack.pop_all().close()


@pytest.mark.parametrize("transport", ["shared memory"], indirect=True)
@pytest.mark.parametrize("producer_binds", [False, True])
def test_a_line_that_is_cut_does_not_end_a_queue_in_shared_memory(
    producer_binds: bool, transport: str, tmp_path: Path
) -> None:
    """Both ends live: what was put is still there, nobody counts as lost, and the consumer takes all of it.

    With keys, as the port is not the binder's own.
    """
    keys = make_keys(tmp_path / "keys")
    with contextlib.ExitStack() as stack:
        binds = {"bind": True, "endpoint": "tcp://127.0.0.1:0", "security": binders(keys)}
        if producer_binds:
            producer = stack.enter_context(tp.Producer(**binds))
        else:
            consumer = stack.enter_context(tp.Consumer(**binds))
        bound = producer.endpoint if producer_binds else consumer.endpoint
        line = stack.enter_context(Proxy(int(bound.rpartition(":")[2])))
        if producer_binds:
            consumer = stack.enter_context(tp.Consumer(line.endpoint, bind=False, security=connectors(keys)))
        else:
            producer = stack.enter_context(tp.Producer(line.endpoint, security=connectors(keys)))
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        producer.flush(PATIENCE)
        for number in range(10):
            producer.put(number, PATIENCE)
        line.silence()  # whoever connects anew does not get through
        assert line.cut() == 1
        with pytest.raises(tp.Full, match="holds 10 untaken"):
            producer.flush(0.7)
        assert producer.statistics().transport.startswith(transport)
        assert [consumer.get(PATIENCE) for _ in range(10)] == list(range(10))
        line.heal()
        producer.flush(PATIENCE)
        assert producer.statistics().lost == consumer.statistics().lost == 0
        producer.close()
        consumer.close()


def _crowd(stack: contextlib.ExitStack, producer: tp.Producer, count: int) -> list[tp.Consumer]:
    """Consumers of this process that share memory with a producer of it."""
    crowd = [stack.enter_context(tp.Consumer(producer.endpoint, bind=False)) for _ in range(count)]

    def have_met() -> bool:
        for consumer in crowd:
            with contextlib.suppress(tp.Empty):
                consumer.get_nowait()
        return len(producer.statistics().peers) == count

    wait_until(have_met)
    return crowd


@ONLY_SHARED_MEMORY
def test_what_a_message_costs_does_not_grow_with_the_number_of_consumers(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each message one pipe of credits is looked at, that of the consumer who took one; and the work goes round."""
    looks: list[TokenPipe] = []
    with tp.Producer("fan", bind=True) as producer, contextlib.ExitStack() as stack:
        crowd = _crowd(stack, producer, 6)
        for number in range(12):  # each has two, and never less than one: who has nothing to do is not looked at at all
            producer.put(number)
        monkeypatch.setattr(participant, "STALE", 1e9)  # what is done from time to time is another matter
        unread = TokenPipe.unread
        monkeypatch.setattr(TokenPipe, "unread", lambda pipe: looks.append(pipe) or unread(pipe))
        taken = []
        for number in range(60):
            taken.append(crowd[number % 6].get(PATIENCE))
            looks.clear()
            producer.put(12 + number)
            assert len(looks) <= (1 if number else 6)
        assert sorted(taken) == list(range(60))
        monkeypatch.undo()
        for consumer in crowd:
            children.take_all_that_is_there(consumer)


@ONLY_SHARED_MEMORY
def test_an_exception_that_takes_the_news_of_room_with_it_loses_no_room(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor does not tell it again, so all are looked at the next time."""
    with tp.Producer("fan", bind=True, maxsize=1, linger=0.0) as producer, contextlib.ExitStack() as stack:
        crowd = _crowd(stack, producer, 2)
        monkeypatch.setattr(participant, "STALE", 1e9)
        for number in range(2):
            producer.put(number)
        with pytest.raises(tp.Full):
            producer.put_nowait(2)
        assert sorted(consumer.get(PATIENCE) for consumer in crowd) == [0, 1]
        wait_any = Binder.wait_any

        def interrupted(socket: Binder, timeout: float) -> list[int]:
            monkeypatch.setattr(Binder, "wait_any", wait_any)
            wait_any(socket, timeout)
            raise KeyboardInterrupt

        monkeypatch.setattr(Binder, "wait_any", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.put_nowait(2)
        for number in range(2, 4):
            producer.put_nowait(number)
        assert sorted(consumer.get(PATIENCE) for consumer in crowd) == [2, 3]


@pytest.mark.parametrize("endpoint", ["fan", "tcp://127.0.0.1:0"])
def test_nothing_is_put_to_a_consumer_that_died_before_it_was_heard_of(endpoint: str) -> None:
    """Two consumers wait, and one is killed, before the producer's first put. The other gets all."""
    with tp.Producer(endpoint, bind=True) as producer, Child() as dies, Child() as lives:
        for child in (dies, lives):
            child.call(children.open_consumer, producer.endpoint, bind=False)
            child.begin(children.take, 20)
            child.wait_until_blocked()
        dies.kill()
        for number in range(20):
            producer.put(number, PATIENCE)
        assert lives.result() == list(range(20))
        producer.flush(PATIENCE)


MANY = 18  # more than are named


@pytest.mark.usefixtures("transport")
def test_of_many_producers_that_failed_the_first_is_told() -> None:
    """The others may have been ended because of it."""

    def fail(number: int) -> None:
        with contextlib.suppress(ValueError), tp.Producer("many") as producer:
            producer.put(number, PATIENCE)
            raise ValueError(f"the {number}th")

    with tp.Consumer("many", producers=MANY) as consumer:
        for number in range(MANY):
            failing = in_thread(functools.partial(fail, number))
            assert consumer.get(PATIENCE) == number
            failing()
        with pytest.raises(tp.StreamFailed) as raised:
            consumer.get(PATIENCE)
        assert raised.value.failure == "ValueError: the 0th"
        assert f"the {MANY - 1}th" in str(raised.value)


@pytest.mark.usefixtures("transport")
def test_of_many_consumers_that_failed_the_first_is_told() -> None:
    with tp.Producer("many", bind=True, linger=0) as producer:

        def fail(number: int, all_put: threading.Event) -> None:
            with contextlib.suppress(ValueError), tp.Consumer("many", bind=False) as consumer:
                consumer.get(PATIENCE)
                assert all_put.wait(PATIENCE)
                raise ValueError(f"the {number}th")

        for number in range(MANY):
            all_put = threading.Event()
            failing = in_thread(functools.partial(fail, number, all_put))
            producer.put("taken", PATIENCE)
            wait_until(lambda: producer.statistics().in_flight == 0)
            producer.put("left behind", PATIENCE)
            all_put.set()
            failing()
            wait_until(lambda number=number: producer.statistics().lost > number)
        with pytest.raises(tp.StreamFailed) as raised:
            producer.flush(PATIENCE)
        assert raised.value.failure == "ValueError: the 0th"
        assert f"the {MANY - 1}th" in str(raised.value)


@pytest.mark.usefixtures("transport")
def test_of_many_consumers_those_are_named_that_hold_messages() -> None:
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(tp.Producer("many", bind=True, maxsize=1, linger=0))
        crowd = list[tp.Consumer]()
        for number in range(MANY):
            crowd.append(stack.enter_context(tp.Consumer("many", bind=False)))

            def has_come(number: int = number) -> bool:
                with contextlib.suppress(tp.Empty):
                    crowd[-1].get(0)
                return len(producer.statistics().peers) > number

            wait_until(has_come)
        for number in range(MANY):
            producer.put(number, PATIENCE)
        for consumer in crowd[:-1]:
            consumer.get(PATIENCE)
        with pytest.raises(tp.Full, match=r"holds 1 untaken of 1.* and 2 more"):
            producer.flush(0.3)
        crowd[-1].get(PATIENCE)
        producer.flush(PATIENCE)
