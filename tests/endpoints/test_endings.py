"""The end of a stream: goodbye, failure or loss. Each end learns of it once, over each transport, whoever binds."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
import secured
import torch
import zmq
from children import AT_LENGTH, PATIENCE, Child, in_thread, wait_until
from crash_points import in_child, reap
from inside import conversation_of, is_in_use, side_of
from programs import ran, started
from proxy import Proxy
from raw_ends import wait_in_vain

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints import resend_buffer
from tensorpipe_ipc.memory.arena import Arena
from tensorpipe_ipc.memory.segment import CAPACITY
from tensorpipe_ipc.zeromq.addresses import runtime_folder
from tensorpipe_ipc.zeromq.binder import Binder
from tensorpipe_ipc.zeromq.line import Line

pytestmark = pytest.mark.limit(25)
MARGIN = 1.0  # seconds beyond what is promised, on a machine that does other things too
NOTICED = 0.1  # seconds until an end on this host is seen to be gone
ENDPOINTS = {"ipc": "ending", "tcp": "tcp://127.0.0.1:0", "inproc": "inproc://ending"}
BETWEEN_PROCESSES = [pytest.param(ENDPOINTS[scheme], id=scheme) for scheme in ("ipc", "tcp")]
EVERYWHERE = pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key pairs."""
    return secured.make_keys(tmp_path_factory.mktemp("keys"))


def _met(producer: tp.Producer, consumer: tp.Consumer) -> None:
    putting = in_thread(lambda: producer.put("met", PATIENCE))
    assert consumer.get(PATIENCE) == "met"
    putting()


# -- a goodbye that could not be heard


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("producer_binds", [False, True])
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_a_consumer_closes_while_its_producer_is_stopped(endpoint: str, producer_binds: bool, free_port: int) -> None:
    """The producer learns it as soon as it goes on: flush tells what was lost, and the next consumer gets what is put next."""
    if endpoint.endswith(":0"):
        endpoint = endpoint[:-1] + str(free_port)
    with Child() as child, contextlib.ExitStack() as stack:
        if producer_binds:
            child.call(children.open_producer, endpoint, bind=True, linger=0.0)
        consumer = stack.enter_context(tp.Consumer(endpoint, bind=not producer_binds))
        if not producer_binds:
            child.call(children.open_producer, endpoint, linger=0.0)
        child.begin(children.put, "met", 1, 2, 3)
        assert consumer.get(PATIENCE) == "met"
        child.result()
        child.signal(signal.SIGSTOP)
        consumer.close()
        child.signal(signal.SIGCONT)
        started = time.monotonic()
        with pytest.raises(tp.PeerLost, match=rf"consumer pid {os.getpid()} .* said goodbye .* with 3 messages"):
            child.call(children.flush)
        assert time.monotonic() - started < NOTICED + MARGIN
        with pytest.raises(tp.Full, match=r"no consumer is attached: consumer .* said goodbye"):
            child.call(children.put, 4, timeout=0.2)
        assert child.call(children.producer_statistics).lost == 3
        following = stack.enter_context(tp.Consumer(endpoint, bind=not producer_binds))
        child.begin(children.put, 5)
        assert following.get(PATIENCE) == 5
        child.result()
        child.call(children.flush)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("consumer_binds", [False, True])
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_a_producer_closes_while_its_consumer_is_stopped(endpoint: str, consumer_binds: bool) -> None:
    """The consumer's stream ends well: all was taken, and the producer's own file says that it ended."""
    with Child() as child:
        if consumer_binds:
            producer = tp.Producer(child.call(children.open_consumer, endpoint))
        else:
            producer = tp.Producer(endpoint, bind=True)
            child.call(children.open_consumer, producer.endpoint, bind=False)
        with producer:
            child.begin(children.take, 2)
            producer.put(1, PATIENCE)
            producer.put(2, PATIENCE)
            producer.flush(PATIENCE)
            assert child.result() == [1, 2]
            child.signal(signal.SIGSTOP)
        child.signal(signal.SIGCONT)
        started = time.monotonic()
        assert child.call(children.take_all) == []
        assert time.monotonic() - started < NOTICED + MARGIN


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_producers_close_before_their_consumer_has_answered_them(endpoint: str, shared_memory: Any) -> None:
    """They have said that they are there, so they say goodbye, too: the stream of the three ends well."""
    with tp.Consumer(endpoint, producers=3) as consumer:
        for _ in range(3):
            with tp.Producer(consumer.endpoint, shared_memory=shared_memory, linger=0) as producer:
                with pytest.raises(tp.Full):
                    producer.wait_for(2, 0.2)
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)


@pytest.mark.usefixtures("transport")
def test_a_goodbye_that_comes_when_the_next_consumer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer's own file has told how it ended. What its connection still brings says nothing of the next one."""
    with tp.Consumer("ending") as first, tp.Producer("ending") as producer:
        _met(producer, first)
        producer.flush(PATIENCE)
        here: Any = conversation_of(first)
        say, disconnect, held = here.say, here.disconnect, list[tuple[bytes, bytes]]()

        def close_late(linger: float, *others: Any) -> None:
            wait_until(lambda: not producer.statistics().peers)
            for peer, frame in held:
                say(peer, frame)
            disconnect(1.0, *others)

        monkeypatch.setattr(here, "say", lambda peer, frame: held.append((peer, frame)) is None)
        monkeypatch.setattr(here, "disconnect", close_late)
        first.close()
        with tp.Consumer("ending") as following:
            putting = in_thread(lambda: [producer.put(number, PATIENCE) for number in range(4)])
            assert [following.get(PATIENCE) for _ in range(4)] == [0, 1, 2, 3]
            putting()
            producer.flush(PATIENCE)
            assert producer.statistics().lost == 0
            assert len(producer.statistics().peers) == 1


@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_a_producer_closes_while_a_consumer_finds_it_by_its_file(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot say goodbye to one that it has not heard of. Its own file does."""
    producer = tp.Producer(endpoint, bind=True)
    with tp.Consumer(producer.endpoint, bind=False) as consumer:
        greeting: Any = conversation_of(consumer).greeting
        claimed = greeting._claimed

        def claim(found: Any) -> Any:
            queue = claimed(found)
            producer.close()
            return queue

        monkeypatch.setattr(greeting, "_claimed", claim)
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_the_next_binder_is_there_before_the_last_ones_connection_ends(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connector finds it by its file, and goes on with it when it has lost the connection that it still had."""
    binds, connects = (tp.Consumer, tp.Producer) if role == "producer" else (tp.Producer, tp.Consumer)
    first = binds("ending", bind=True)
    with connects("ending", bind=False) as connector, contextlib.ExitStack() as stack:
        wait_until(lambda: side_of(connector).socket.is_connected())
        socket_of_first: Any = side_of(first).socket
        close_sockets, following = socket_of_first._close_sockets, list[Any]()

        def close_late(linger: float) -> None:
            following.append(stack.enter_context(binds("ending", bind=True)))
            wait_until(lambda: "met by its file" in _peers_of(connector))
            if role == "producer":
                for number in range(4):
                    connector.put(number, PATIENCE)
            close_sockets(linger)

        monkeypatch.setattr(socket_of_first, "_close_sockets", close_late)
        first.close()
        wait_until(lambda: bool(_peers_of(connector)) and side_of(connector).socket.connection > 1)
        producer, consumer = (connector, *following) if role == "producer" else (*following, connector)
        getting = in_thread(lambda: [consumer.get(PATIENCE) for _ in range(4)])
        if role == "consumer":
            for number in range(4):
                producer.put(number, PATIENCE)
        assert getting() == [0, 1, 2, 3]
        producer.flush(PATIENCE)
        assert producer.statistics().lost == 0


def _peers_of(end: Any) -> str:
    if isinstance(end, tp.Consumer):
        with contextlib.suppress(tp.EndOfStream, tp.Empty):
            end.get(0)
    return "; ".join(end.statistics().peers)


@pytest.mark.parametrize("producer_binds", [False, True])
@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_the_line_is_cut_and_an_end_closes(shared_memory: Any, producer_binds: bool, tmp_path: Path) -> None:
    """An end without its goodbye tells all in its own file. The other end learns how it ended, and how much is lost.

    The ends have keys: without keys, two ends share memory only by the binder's own port.
    """
    keys = secured.make_keys(tmp_path / "keys")
    binds: dict[str, Any] = {"bind": True, "shared_memory": shared_memory, "security": secured.binders(keys)}
    security = secured.connectors(keys)
    for closes in ("producer", "consumer"):
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            if producer_binds:
                producer = enter(tp.Producer("tcp://127.0.0.1:0", linger=0, **binds))
                line = enter(Proxy(int(producer.endpoint.rpartition(":")[2])))
                consumer = enter(tp.Consumer(line.endpoint, bind=False, security=security))
            else:
                consumer = enter(tp.Consumer("tcp://127.0.0.1:0", **binds))
                line = enter(Proxy(int(consumer.endpoint.rpartition(":")[2])))
                producer = enter(tp.Producer(line.endpoint, linger=0, security=security))
            _met(producer, consumer)
            producer.flush(PATIENCE)
            line.silence()
            line.cut()
            if closes == "producer":
                producer.close()
                with pytest.raises(tp.EndOfStream):
                    consumer.get(PATIENCE)
            else:
                with contextlib.suppress(tp.Full):
                    producer.put("lost", 0)
                consumer.close()
                wait_until(lambda end=producer: not end.statistics().peers)
                assert producer.statistics().lost <= 1
                with contextlib.suppress(tp.PeerLost):
                    producer.flush(PATIENCE)


def test_messages_that_were_on_their_way_when_a_line_was_cut() -> None:
    """Their producer has closed: the consumer is told how many do not come, and not that all is well."""
    with tp.Consumer("tcp://127.0.0.1:0", shared_memory="off") as consumer:
        with Proxy(int(consumer.endpoint.rpartition(":")[2])) as line:
            producer = tp.Producer(line.endpoint, linger=0)
            _met(producer, consumer)
            producer.flush(PATIENCE)
            line.silence("there")
            for number in range(3):
                producer.put(number, PATIENCE)
            with pytest.warns(RuntimeWarning, match="closed with 3 messages that were not taken"):
                producer.close()
        with pytest.raises(tp.PeerLost, match="said goodbye .*, and 3 of its messages did not come"):
            consumer.get(PATIENCE)
        assert consumer.statistics().lost == 3


@pytest.mark.parametrize("has_taken", [False, True])
@pytest.mark.parametrize("producer_binds", [False, True])
def test_messages_of_a_producer_that_gave_its_consumer_up(
    producer_binds: bool, has_taken: bool, tmp_path: Path
) -> None:
    """The consumer waits for longer, and gets what is put when the line is back. What was given up its stream tells of, too."""
    with Child() as child, contextlib.ExitStack() as stack:
        child.call(children.move_out_of_sight, str(tmp_path))
        options = {"peer_timeout": 0.1, "linger": 0.0}
        if producer_binds:
            endpoint = child.call(children.open_producer, "tcp://127.0.0.1:0", bind=True, **options)
            line = stack.enter_context(Proxy(int(endpoint.rpartition(":")[2])))
            consumer = stack.enter_context(tp.Consumer(line.endpoint, bind=False))
        else:
            consumer = stack.enter_context(tp.Consumer("tcp://127.0.0.1:0"))
            line = stack.enter_context(Proxy(int(consumer.endpoint.rpartition(":")[2])))
            child.call(children.open_producer, line.endpoint, **options)
        child.begin(children.await_consumers, 1)
        wait_in_vain(consumer, child.has_result)
        child.result()
        if has_taken:
            child.call(children.put, "taken")
            assert consumer.get(PATIENCE) == "taken"
            child.call(children.flush)
        line.silence()
        child.call(children.put, "lost", "lost")
        line.cut()
        with pytest.raises(tp.PeerLost, match="with 2 messages that it had not taken"):
            child.call(children.flush)
        line.heal()
        child.begin(children.put_numbers_and_close, "after", 1)
        assert consumer.get(PATIENCE) == ("after", 0)
        child.result()
        with pytest.raises(tp.PeerLost, match="said goodbye .*, and 2 of its messages did not come"):
            consumer.get(PATIENCE)
        assert consumer.statistics().lost == 2


@pytest.mark.parametrize("consumer_binds", [False, True])
@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "ipc"])
def test_a_goodbye_to_an_end_out_of_sight(tmp_path: Path, endpoint: str, consumer_binds: bool) -> None:
    """A producer elsewhere, that puts, hears the goodbye of its consumer at once, though there is no file to look at."""
    if endpoint == "ipc":
        endpoint = f"ipc://{tmp_path}/goodbye.sock"
    with Child() as child:
        child.call(children.move_out_of_sight, str(tmp_path))
        if consumer_binds:
            consumer = tp.Consumer(endpoint)
            child.call(children.open_producer, consumer.endpoint, maxsize=4, linger=0.0)
        else:
            endpoint = child.call(children.open_producer, endpoint, bind=True, maxsize=4, linger=0.0)
            consumer = tp.Consumer(endpoint, bind=False)
        child.begin(children.put, 1)
        assert consumer.get(PATIENCE) == 1
        child.result()
        child.begin(children.put_until_nobody_is_there)
        for _ in range(10):
            assert consumer.get(PATIENCE) == 0
        started = time.monotonic()
        consumer.close()
        assert f"consumer pid {os.getpid()} on" in (said := child.result())
        assert "said goodbye" in said
        assert time.monotonic() - started < 1 + MARGIN
        assert child.call(children.producer_statistics).lost <= 4
        with contextlib.suppress(tp.PeerLost):
            child.call(children.flush)


def test_a_forked_child_does_not_keep_its_parents_ends_present() -> None:
    """A process is killed whose child has copies of all its descriptors: its peers learn it all the same."""
    with tp.Consumer("forked") as consumer, Child() as child:
        child.call(children.open_producer, "forked")
        child.begin(children.put, "met")
        assert consumer.get(PATIENCE) == "met"
        child.result()
        orphan = child.call(children.fork_that_waits)
        child.kill()
        try:
            started = time.monotonic()
            with pytest.raises(tp.PeerLost, match=f"producer pid {child.pid} .* vanished"):
                consumer.get(PATIENCE)
            assert time.monotonic() - started < 1 + MARGIN
        finally:
            os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("shared_memory", ["off", "auto"])
@pytest.mark.parametrize("ends_by", ["kill", "close"])
def test_a_forked_child_of_a_binder_that_has_not_answered(ends_by: str, shared_memory: Any) -> None:
    """It ended before it had: the connection that the child has open leads nowhere, and the next binder is found."""
    with contextlib.ExitStack() as stack:
        first, second = stack.enter_context(Child()), stack.enter_context(Child())
        first.call(children.open_consumer, "silent")
        producer, *others = [
            stack.enter_context(tp.Producer("silent", linger=0, shared_memory=shared_memory))
            for _ in range(1 if shared_memory == "off" else 3)
        ]
        for other in others:
            other.put("by a queue that lay ready", PATIENCE)  # there are two of them
        with pytest.raises(tp.Full, match="is there and has not answered"):
            producer.put("nobody hears", 0.3)
        orphan = first.call(children.fork_that_waits)
        if ends_by == "kill":
            first.kill()
        else:
            first.call(children.abandon)
        try:
            second.call(children.open_consumer, "silent")
            started = time.monotonic()
            _crosses(producer, second)
            assert time.monotonic() - started < 1 + MARGIN
            for other in others:
                with pytest.raises(tp.PeerLost, match="1 messages that it had not taken"):
                    other.flush(PATIENCE)
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_what_came_of_a_binder_before_another_took_its_place_is_read_first() -> None:
    """It was sent after the consumer's last call, and the consumer has not heard that it is met."""
    with Child() as first, Child() as second:
        first.call(children.open_producer, "read", bind=True, shared_memory="off", linger=0.1)
        with tp.Consumer("read", bind=False, shared_memory="off") as consumer:
            wait_until(lambda: _is_met(consumer, first))
            first.call(children.put, "first", "second")
            with contextlib.suppress(tp.PeerLost):
                first.call(children.close)
            second.call(children.open_producer, "read", bind=True, shared_memory="off", linger=0.1)
            assert [consumer.get(PATIENCE), consumer.get(PATIENCE)] == ["first", "second"]
            with contextlib.suppress(tp.EndOfStream, tp.PeerLost):
                consumer.get(0)
            _crosses(consumer, second)


def _is_met(consumer: tp.Consumer, first: Child) -> bool:
    """Have a consumer that connects say HELLO, and its producer hear it, and not the consumer hear the answer."""
    with contextlib.suppress(tp.Empty):
        consumer.get(0)
    return bool(first.call(children.producer_statistics).peers)


def test_an_end_that_an_attribute_of_its_thread_is_closes_with_that() -> None:
    """As any that is dropped."""

    class Putter(threading.Thread):
        def run(self) -> None:
            self.producer = tp.Producer("owned")
            self.producer.put(1, PATIENCE)

    with tp.Consumer("owned") as consumer:
        putter = Putter()
        putter.start()
        assert consumer.get(PATIENCE) == 1
        putter.join()
        del putter
        gc.collect()
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)


def test_a_forked_child_of_a_binder_that_refused() -> None:
    """It closes, and the next one takes what the producer sends."""
    with Child() as first, Child() as second, tp.Producer("choosy", serializer="numpy", linger=0) as producer:
        first.call(children.open_consumer, "choosy", accept=["raw"])

        def is_refused() -> bool:
            first.call(children.wait_in_vain, 0)
            try:
                producer.put("in vain", 0.05)
            except tp.Full:
                return False
            except tp.Refused:
                return True
            raise AssertionError("it was taken")

        wait_until(is_refused)
        orphan = first.call(children.fork_that_waits)
        first.call(children.abandon)
        try:
            second.call(children.open_consumer, "choosy")
            started = time.monotonic()
            _crosses(producer, second)
            assert time.monotonic() - started < 1 + MARGIN
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_forked_child_does_not_keep_the_port(free_port: int) -> None:
    """It has copies of all descriptors of the process that it was forked from, and listens nowhere."""
    endpoint = f"tcp://127.0.0.1:{free_port}"
    with Child() as child:
        child.call(children.open_consumer, endpoint)
        orphans = [child.call(children.fork_that_waits)]
        try:
            child.call(children.close)
            child.call(children.open_consumer, endpoint)
            orphans.append(child.call(children.fork_that_waits))
            child.kill()
            tp.Consumer(endpoint).close()
        finally:
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("consumer_binds", [False, True])
def test_a_forked_child_keeps_nobody_present_who_is_out_of_sight(consumer_binds: bool, tmp_path: Path) -> None:
    """Over ipc the kernel says who made the connection, or listens: a child that holds it open is not that process."""
    endpoint = f"ipc://{tmp_path}/sight.sock"
    with Child() as child, contextlib.ExitStack() as stack:
        child.call(children.move_out_of_sight, str(tmp_path))
        if consumer_binds:
            consumer = stack.enter_context(tp.Consumer(endpoint))
            child.call(children.open_producer, endpoint)
        else:
            child.call(children.open_producer, endpoint, bind=True)
            stack.callback(os.unlink, f"{tmp_path}/sight.sock")  # as it has no next binder
            consumer = stack.enter_context(tp.Consumer(endpoint, bind=False))
        child.begin(children.put, "word")
        assert consumer.get(PATIENCE) == "word"
        child.result()
        orphan = child.call(children.fork_that_waits)
        try:
            child.kill()
            with pytest.raises(tp.PeerLost, match=f"producer pid {child.pid} .* vanished"):
                consumer.get(PATIENCE)
        finally:
            os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("consumer_binds", [False, True])
def test_the_next_binder_within_one_process(consumer_binds: bool) -> None:
    """Over inproc a connector finds the next binder, too."""

    def binder() -> Any:
        return tp.Consumer("inproc://next") if consumer_binds else tp.Producer("inproc://next", bind=True)

    bound = binder()
    connector: Any = tp.Producer("inproc://next") if consumer_binds else tp.Consumer("inproc://next", bind=False)
    with connector:
        for number in range(3):
            producer, consumer = (connector, bound) if consumer_binds else (bound, connector)
            putting = in_thread(lambda producer=producer, number=number: producer.put(number, PATIENCE))
            if number and not consumer_binds:
                with pytest.raises(tp.EndOfStream):
                    consumer.get(PATIENCE)
            assert consumer.get(PATIENCE) == number
            putting()
            producer.flush(0.2)
            bound.close()
            assert bound.statistics().rejected == 0
            if number < 2:
                bound = binder()


def _leave_four(consumer: tp.Consumer) -> None:
    """Bind a producer within this process, put four numbers, and close it before the consumer takes any."""
    first = tp.Producer("inproc://next", bind=True, linger=0)
    _met(first, consumer)
    for number in range(4):
        first.put(number, PATIENCE)
    with pytest.warns(RuntimeWarning, match="4 messages that were not taken"):
        first.close()


@pytest.mark.parametrize("endpoint", ["early", "inproc://early"])
def test_one_that_closes_before_its_binder_comes_was_never_there(endpoint: str) -> None:
    """Another end is open meanwhile, so that ZeroMQ goes on in this process."""
    with tp.Consumer("inproc://meanwhile"):
        for _ in range(2):
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(tp.Full), tp.Producer(endpoint) as producer:
                producer.put("nobody gets it", timeout=0.02)
            wait_until(lambda most=before: len(os.listdir("/proc/self/fd")) <= most)
        with tp.Consumer(endpoint, producers=1) as consumer:
            with pytest.raises(tp.Empty):
                consumer.get(timeout=0.02)
            producing = in_thread(lambda: _produce(endpoint, 2))
            assert list(consumer) == [0, 1]
            producing()
            assert consumer.statistics().failed == 0
        with tp.Consumer(endpoint, bind=False) as consumer, pytest.raises(tp.Empty):
            consumer.get(timeout=0.02)
        with tp.Producer(endpoint, bind=True) as producer, pytest.raises(tp.Full, match="no consumer has come"):
            producer.put("nobody gets it", timeout=0.2)


@pytest.mark.filterwarnings("ignore:inproc")
def test_one_that_finds_its_binder_closing_within_one_process_was_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears the goodbye, and at once looks for the next binder, while the address is given back by another thread."""
    connect, give_back = Line.open, Binder._give_address_back

    def give_back_late(binder: Binder) -> None:
        time.sleep(0.02)
        give_back(binder)

    def connect_late(line: Line, context: Any) -> None:
        time.sleep(0.05)
        connect(line, context)

    def produce() -> None:
        with contextlib.suppress(tp.Full, tp.PeerLost), tp.Producer("inproc://job", maxsize=4, linger=0.1) as producer:
            for number in range(1000):
                producer.put(number, 0.3)

    monkeypatch.setattr(Line, "open", connect_late)
    monkeypatch.setattr(Binder, "_give_address_back", give_back_late)
    with tp.Consumer("inproc://meanwhile"):
        for _ in range(5):
            with tp.Consumer("inproc://job") as consumer:
                putting = in_thread(produce)
                for number in range(6):
                    assert consumer.get(PATIENCE) == number
            putting()
            with tp.Consumer("inproc://job") as consumer, pytest.raises(tp.Empty):
                consumer.get(0.01)


def _produce(endpoint: str, count: int) -> None:
    with tp.Producer(endpoint) as producer:
        for number in range(count):
            producer.put(number, PATIENCE)


def test_what_a_producer_left_within_one_process_comes_before_what_the_next_one_puts() -> None:
    """Over inproc, too, the consumer gets all of the first, is told how that ended, and then gets all of the next."""
    with tp.Consumer("inproc://next", bind=False) as consumer:
        _leave_four(consumer)
        with tp.Producer("inproc://next", bind=True) as following:
            for number in range(4):
                side_of(consumer).look_around(at_once=True)  # as a get does that comes late
                assert consumer.get(PATIENCE) == number
                with contextlib.suppress(tp.Full):
                    following.wait_for(1, 0.02)
            with pytest.raises(tp.EndOfStream):
                consumer.get(PATIENCE)
            putting = in_thread(lambda: [following.put(number, PATIENCE) for number in range(4, 8)])
            assert [consumer.get(PATIENCE) for _ in range(4)] == [4, 5, 6, 7]
            putting()
            following.flush(PATIENCE)
        assert (consumer.statistics().lost, consumer.statistics().duplicates) == (0, 0)


def test_a_producer_that_came_and_left_before_what_the_first_one_left_is_taken() -> None:
    """Two binders have ended one after the other: the consumer gets all of the first, and then all of the next."""
    with tp.Consumer("inproc://next", bind=False) as consumer:
        _leave_four(consumer)
        with tp.Producer("inproc://next", bind=True, linger=0) as following:
            assert consumer.get(PATIENCE) == 0
            wait_until(lambda: side_of(consumer).socket.is_connected(0.01))
            assert consumer.get(PATIENCE) == 1  # and says HELLO to the next
            following.put(4, PATIENCE)
            with pytest.warns(RuntimeWarning, match="1 messages that were not taken"):
                following.close()
        wait_until(lambda: not side_of(consumer).socket.is_connected(0.01))
        for left in ([2, 3], [4]):
            assert [consumer.get(PATIENCE) for _ in left] == left
            with pytest.raises(tp.EndOfStream):
                consumer.get(PATIENCE)
        assert (consumer.statistics().lost, consumer.statistics().rejected) == (0, 0)


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_a_stream_that_has_ended_is_told_though_the_next_binder_is_there(
    shared_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the first is taken when the next one comes: that the first stream has ended is told before anything else."""
    monkeypatch.setattr("tensorpipe_ipc.endpoints.greeting.AGAIN", 0.0)
    first = tp.Producer("told", bind=True, shared_memory=shared_memory, linger=0)
    with tp.Consumer("told", bind=False) as consumer:
        _met(first, consumer)
        first.put(0, PATIENCE)
        with pytest.warns(RuntimeWarning, match="1 messages that were not taken"):
            first.close()
        side_of(consumer).look_around(at_once=True)
        assert consumer.get(PATIENCE) == 0
        wait_until(
            lambda: side_of(consumer).drain() or side_of(consumer).has_ended()
        )  # as a get does that is cut short
        with tp.Producer("told", bind=True, shared_memory=shared_memory):
            wait_until(lambda: side_of(consumer).socket.is_connected(0.01))
            with pytest.raises(tp.EndOfStream):
                consumer.get(PATIENCE)


@pytest.mark.parametrize("is_closed", [False, True])
def test_an_exception_while_a_connection_is_hung_up_stops_nobody(
    is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting on the descriptor tells of the next binder, and other ends of the process go on."""
    close = Line.close

    def interrupted(line: Line, linger: float) -> None:
        monkeypatch.setattr(Line, "close", close)
        if is_closed:
            close(line, linger)
        raise KeyboardInterrupt

    with tp.Consumer("hung", bind=False) as consumer, tp.Consumer("beside") as other:
        with tp.Producer("hung", bind=True, shared_memory="off") as first:
            _met(first, consumer)
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        readable = consumer.fileno()
        with socket.socket(socket.AF_UNIX) as left:  # as a killed binder's, which is tried
            left.bind(f"{runtime_folder()}/hung.sock")
        monkeypatch.setattr(Line, "close", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            consumer.get(0.1)
        assert Line.close is close
        with tp.Producer("hung", bind=True, shared_memory="off") as following:
            putting = in_thread(lambda: following.put("told", PATIENCE))
            while True:
                assert select.select([readable], [], [], PATIENCE)[0]
                with contextlib.suppress(tp.Empty):
                    assert consumer.get_nowait() == "told"
                    break
            putting()
        with tp.Producer("beside", shared_memory="off") as beside:
            _met(beside, other)


@pytest.mark.parametrize(
    ("scheme", "where", "is_before"),
    [("ipc", "_bind_to_address", False), ("tcp", "_bind_to_address", False), ("tcp", "_close_sockets", True)],
)
def test_a_child_forked_while_an_end_opens_or_closes_keeps_nobody_from_its_address(
    scheme: str, where: str, is_before: bool, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread forks in the middle of it: the child has copies of what the parent has open at that moment."""
    endpoint = f"tcp://127.0.0.1:{free_port}" if scheme == "tcp" else "forked"
    done, orphans = getattr(Binder, where), list[int]()
    forking = threading.Thread(target=lambda: orphans.append(in_child(signal.pause)))

    def doing(self: Binder, *arguments: Any) -> None:
        monkeypatch.setattr(Binder, where, done)
        if not is_before:
            done(self, *arguments)
        forking.start()
        forking.join(0.2)  # or it waits until this thread has done it
        if is_before:
            done(self, *arguments)

    monkeypatch.setattr(Binder, where, doing)
    try:
        tp.Consumer(endpoint).close()
        forking.join()
        with tp.Consumer(endpoint) as consumer, tp.Producer(endpoint) as producer:
            _met(producer, consumer)
    finally:
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
            reap(orphan)


@pytest.mark.parametrize("endpoint", ["ending", "tcp://127.0.0.1:*"])
def test_what_a_consumer_took_before_it_was_killed_is_not_lost(endpoint: str) -> None:
    """In frames, a producer that looks late still reads what the killed one had said."""
    with Child() as child:
        endpoint = child.call(children.open_consumer, endpoint, shared_memory="off")
        with tp.Producer(endpoint, linger=0) as producer:
            child.begin(children.take)
            producer.put("met", PATIENCE)
            assert child.result() == ["met"]
            producer.flush(PATIENCE)
            producer.put(0)
            producer.put(1)
            assert child.call(children.take) == [0]
            wait_until(side_of(producer).socket.has_incoming)
            child.kill()
            wait_until(lambda: not side_of(producer).socket.is_connected(0.01))
            with pytest.raises(tp.PeerLost, match="with 1 message"):
                producer.flush(PATIENCE)
            assert producer.statistics().lost == 1
    tp.Consumer(endpoint).close()  # clears away what a killed binder left


def test_what_a_consumer_took_within_one_process_is_known_when_the_next_one_is_there() -> None:
    """Over inproc, too, a producer that looks late counts no message as lost that was taken."""
    with tp.Producer("inproc://next", linger=0) as producer:
        with tp.Consumer("inproc://next") as first:
            _met(producer, first)
            for number in range(4):
                producer.put(number, PATIENCE)
            assert [first.get(PATIENCE) for _ in range(4)] == [0, 1, 2, 3]
        with tp.Consumer("inproc://next") as following:
            getting = in_thread(lambda: [following.get(PATIENCE) for _ in range(4)])
            for number in range(4):
                side_of(producer).look_around(at_once=True)  # as a put does that comes late
                producer.put(number, PATIENCE)
            assert getting() == [0, 1, 2, 3]
            producer.flush(PATIENCE)
            assert (producer.statistics().lost, producer.statistics().rejected) == (0, 0)


def test_a_goodbye_of_a_binder_elsewhere_that_is_read_when_the_next_one_is_there(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer hears it, and then goes on with the next."""
    endpoint = f"tcp://127.0.0.1:{free_port}"
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        consumer = tp.Consumer(endpoint, bind=False)
    with consumer:
        with tp.Producer(endpoint, bind=True) as first:
            _met(first, consumer)
        with tp.Producer(endpoint, bind=True, linger=0) as following:
            link = side_of(consumer)
            wait_until(lambda: link.socket.is_connected(0.01) and link.conversation.greeting.is_owed())
            link.look_around(at_once=True)  # as a get does that comes late
            with pytest.raises(tp.EndOfStream):
                consumer.get(PATIENCE)
            _met(following, consumer)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("ends_by", ["close", "kill"])
@pytest.mark.parametrize("late", [0.2, 0.6])
@pytest.mark.parametrize("consumer_binds", [False, True])
def test_a_forked_child_keeps_nobody_from_the_next_binder(consumer_binds: bool, late: float, ends_by: str) -> None:
    """A binder ends, and a child of its process has the connection open: who was connected finds the next binder."""
    with Child() as first, Child() as second:
        first.call(children.open_consumer if consumer_binds else children.open_producer, "kept", bind=True)
        connector: Any = tp.Producer("kept", linger=0) if consumer_binds else tp.Consumer("kept", bind=False)
        with connector:
            _crosses(connector, first)
            orphan = first.call(children.fork_that_waits)
            try:
                if ends_by == "kill":
                    first.kill()
                else:
                    first.call(children.close)
                deadline = time.monotonic() + late
                while time.monotonic() < deadline:  # the next binder is late
                    with contextlib.suppress(tp.Empty, tp.EndOfStream, tp.PeerLost):
                        connector.statistics() if consumer_binds else connector.get(0.05)
                second.call(children.open_consumer if consumer_binds else children.open_producer, "kept", bind=True)
                started = time.monotonic()
                _crosses(connector, second)
                assert time.monotonic() - started < 1 + MARGIN
            finally:
                os.kill(orphan, signal.SIGKILL)


def _crosses(connector: Any, child: Child) -> None:
    """Have a message cross between an end of this process and a child's binder, once they have met."""
    if isinstance(connector, tp.Producer):
        child.begin(children.take)
        connector.put("crosses", PATIENCE)
        assert child.result() == ["crosses"]
        with contextlib.suppress(tp.PeerLost):
            connector.flush(PATIENCE)
        return
    child.begin(children.put, "crosses")
    while True:
        with contextlib.suppress(tp.EndOfStream, tp.PeerLost):
            assert connector.get(PATIENCE) == "crosses"
            break
    child.result()
    child.call(children.flush)


def test_the_files_of_killed_ends_go_with_the_next_one() -> None:
    """As long as an end is open it has a file of its own, 0600; that of a killed one is removed when another end opens."""

    def files() -> set[str]:
        return {name for name in os.listdir(runtime_folder()) if name.endswith(".end")}

    with tp.Producer("first"), Child() as child:
        (own,) = files()
        assert os.stat(os.path.join(runtime_folder(), own)).st_mode & 0o777 == 0o600
        child.call(children.open_consumer, "second", bind=False)
        assert len(files()) == 2
        child.kill()
        with tp.Consumer("third"):
            assert len(files()) == 2
            assert own in files()
    assert files() == set()


# -- failure


class _Unspeakable(Exception):
    def __str__(self) -> str:
        return str(self)


_FAILURES = [
    pytest.param(lambda: ValueError("boom"), "ValueError: boom", id="exception"),
    pytest.param(lambda: KeyError(), "KeyError", id="no text"),
    pytest.param(KeyboardInterrupt, "KeyboardInterrupt", id="Ctrl-C"),
    pytest.param(lambda: SystemExit(3), "SystemExit: 3", id="exit 3"),
    pytest.param(lambda: SystemExit("no disk"), "SystemExit: no disk", id="exit with a text"),
    pytest.param(lambda: _Unspeakable(), "_Unspeakable", id="an exception without a text"),
    pytest.param(lambda: SystemExit(np.zeros(2)), "SystemExit", id="exit with no truth value"),
    pytest.param(lambda: ValueError("\x1b[2J\n" + "x" * 5000), "ValueError: ?[2J?xxx", id="long"),
]


@pytest.mark.parametrize(("make", "text"), _FAILURES)
@EVERYWHERE
@pytest.mark.usefixtures("transport")
def test_a_producer_that_fails_says_so(endpoint: str, make: Callable[[], BaseException], text: str) -> None:
    """Its consumer gets all that was put, then StreamFailed with the type and text, once; and waits for the next stream."""
    with tp.Consumer(endpoint) as consumer:

        def fail() -> None:
            with contextlib.suppress(BaseException), tp.Producer(consumer.endpoint) as producer:
                for number in range(3):
                    producer.put(number, PATIENCE)
                raise make()

        failing = in_thread(fail)
        assert [consumer.get(PATIENCE) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(tp.StreamFailed, match=f"producer pid {os.getpid()} .* failed") as raised:
            consumer.get(PATIENCE)
        failing()
        assert raised.value.failure.startswith(text)
        assert len(raised.value.failure) <= 1024
        assert raised.value.failure.isprintable()
        assert raised.value.failure in str(raised.value)
        with pytest.raises(tp.Empty):
            consumer.get(0)
        assert (consumer.statistics().failed, consumer.statistics().ended) == (1, 0)


@pytest.mark.parametrize("make", [lambda: SystemExit(0), SystemExit, lambda: tp.EndOfStream("over")])
def test_what_is_no_failure(make: Callable[[], BaseException]) -> None:
    """To end with the stream before, or by sys.exit(0), is to end well."""
    with tp.Consumer("well") as consumer:

        def leave() -> None:
            with contextlib.suppress(BaseException), tp.Producer("well") as producer:
                producer.put(1, PATIENCE)
                raise make()

        leaving = in_thread(leave)
        assert list(consumer) == [1]
        leaving()


def test_a_failure_whose_text_is_interrupted_is_one() -> None:
    """Its text may be a program's own code, in which Ctrl-C may come."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with tp.Consumer("unspeakable") as consumer:

        def leave() -> None:
            with contextlib.suppress(KeyboardInterrupt), tp.Producer("unspeakable") as producer:
                producer.put(1, PATIENCE)
                raise Unspeakable

        leaving = in_thread(leave)
        assert consumer.get(PATIENCE) == 1
        with pytest.raises(tp.StreamFailed, match="Unspeakable"):
            consumer.get(PATIENCE)
        leaving()


def test_a_producer_with_keys_that_fails_says_so(keys: Path) -> None:
    """The same with keys."""
    with tp.Consumer("tcp://127.0.0.1:0", security=secured.binders(keys)) as consumer, Child() as child:
        child.call(secured.open_connector, consumer.endpoint, str(keys))
        child.begin(children.put, "met")
        assert consumer.get(PATIENCE) == "met"
        child.result()
        child.begin(children.leave_by, "boom")
        with pytest.raises(tp.StreamFailed, match="ValueError: boom"):
            consumer.get(PATIENCE)
        child.result()


def test_a_failure_travels_to_the_end_of_a_pipeline() -> None:
    """Four processes: each stage is left by what the one before it raised, and the last one is told who began."""
    with Child() as source, Child() as one, Child() as two, tp.Consumer("c") as sink:
        one.call(children.open_consumer, "a")
        two.call(children.open_consumer, "b")
        two.begin(children.be_stage, "b", "c")
        one.begin(children.be_stage, "a", "b")
        source.begin(children.fail_after, "a", 5, "the disk is full")
        assert [sink.get(PATIENCE) for _ in range(5)] == [2, 3, 4, 5, 6]
        with pytest.raises(tp.StreamFailed) as raised:
            sink.get(PATIENCE)
        assert raised.value.failure == "ValueError: the disk is full"
        assert f"producer pid {source.pid} " in raised.value.origin
        assert f"producer pid {two.pid} " in str(raised.value)
        source.result()
        assert "StreamFailed" in one.result()
        assert "the disk is full" in two.result()


def test_a_loss_travels_as_the_failure_of_the_next_stage() -> None:
    """A source is killed: the stage after it fails by PeerLost, and the sink is told so."""
    with Child() as source, Child() as stage, tp.Consumer("b") as sink:
        stage.call(children.open_consumer, "a")
        stage.begin(children.be_stage, "a", "b")
        source.call(children.open_producer, "a")
        source.begin(children.put, 1)
        assert sink.get(PATIENCE) == 2
        source.result()
        source.kill()
        with pytest.raises(
            tp.StreamFailed, match=rf"producer pid {stage.pid} .* PeerLost: .*pid {source.pid} .* vanished"
        ):
            sink.get(PATIENCE)
        assert "PeerLost" in stage.result()


@pytest.mark.usefixtures("transport")
def test_a_consumer_that_fails_says_so() -> None:
    """Its producer is told by flush, if messages were lost with it, and by put's Full."""
    with tp.Producer("victim", bind=True, linger=0) as producer:
        all_put = threading.Event()

        def fail() -> None:
            with contextlib.suppress(ValueError), tp.Consumer("victim", bind=False) as consumer:
                assert consumer.get(PATIENCE) == 0
                assert all_put.wait(PATIENCE)
                raise ValueError("no memory left")

        failing = in_thread(fail)
        for number in range(3):
            producer.put(number, PATIENCE)
        all_put.set()
        failing()
        with pytest.raises(tp.StreamFailed, match="failed .*: ValueError: no memory left with 2 messages") as raised:
            producer.flush(PATIENCE)
        assert raised.value.failure == "ValueError: no memory left"
        with pytest.raises(tp.Full, match="no consumer is attached: .*no memory left"):
            producer.put("to nobody", 0)


class Strike:
    """It ends the get that makes it."""

    def __init__(self, how: str) -> None:
        self.how = how


def _strike(how: str) -> Any:
    if how == "no memory":
        raise MemoryError
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGINT)
    time.sleep(PATIENCE)


tp.register_type(Strike, to=lambda strike: strike.how, from_=_strike)


@pytest.mark.parametrize(
    ("how", "shared_memory"),
    [("interrupted", "auto"), ("interrupted", "off"), ("killed", "auto"), ("killed", "off"), ("no memory", "auto")],
)
def test_a_message_that_a_consumer_leaves_in_the_middle_of_its_get_is_lost_and_told_on_both_sides(
    how: str, shared_memory: Any
) -> None:
    """It had taken it, and had not returned it. Leaving tells; nothing waits."""

    def take() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        consumer = tp.Consumer("struck", bind=False)
        with contextlib.suppress(KeyboardInterrupt, tp.OutOfMemory), consumer:
            assert consumer.get(PATIENCE) == "first"
            consumer.get(PATIENCE)
        os._exit(consumer.statistics().lost if shared_memory == "auto" else 1)

    with tp.Producer("struck", bind=True, shared_memory=shared_memory) as producer:
        taker = in_child(take)
        producer.put("first", PATIENCE)
        producer.flush(PATIENCE)
        producer.put(Strike(how), PATIENCE)
        with pytest.raises(tp.PeerLost, match="with 1 messages that it had not taken"):
            producer.flush(PATIENCE)
        assert producer.statistics().lost == 1
        assert reap(taker) == (-signal.SIGKILL if how == "killed" else 1)


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
@pytest.mark.parametrize("again", [False, True])
def test_a_message_that_an_exception_takes_behind_its_credit_is_counted_or_comes_again(
    endpoint: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its producer was told that it was taken, and get has not returned it."""
    with tp.Consumer(endpoint, shared_memory="off") as consumer, tp.Producer(consumer.endpoint, linger=0) as producer:
        _met(producer, consumer)
        putting = in_thread(lambda: (producer.put("in hand", PATIENCE), producer.flush(PATIENCE)))
        say = conversation_of(consumer).say

        def say_and_raise(*arguments: Any) -> None:
            monkeypatch.undo()
            say(*arguments)
            raise KeyboardInterrupt

        wait_until(lambda: side_of(consumer).socket.has_incoming())
        monkeypatch.setattr(conversation_of(consumer), "say", say_and_raise)
        with pytest.raises(KeyboardInterrupt):
            consumer.get(PATIENCE)
        if again:
            assert consumer.get(PATIENCE) == "in hand"
        else:
            putting()
            consumer.close()
        assert consumer.statistics().lost == (not again)
        if again:
            putting()


# -- leaving a producer's with block


@pytest.mark.usefixtures("transport")
def test_leaving_waits_until_all_is_taken() -> None:
    """As flush does."""
    with tp.Consumer("leaving") as consumer:
        leaving = in_thread(lambda: children.put_and_leave("leaving", 1, 2, 3))
        assert list(consumer) == [1, 2, 3]
        leaving()


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_leaving_tells_what_was_lost(endpoint: str) -> None:
    """A consumer left with messages that it had not taken: PeerLost; a warning, where an exception is on its way."""
    for error in (None, ValueError("mine")):
        consumer = tp.Consumer(endpoint)
        producer = tp.Producer(consumer.endpoint)
        _met(producer, consumer)
        for number in range(3):
            producer.put(number, PATIENCE)
        consumer.close()
        told = "consumer pid .* said goodbye .* with 3 messages that it had not taken"
        if error is None:
            with pytest.raises(tp.PeerLost, match=told), producer:
                pass
        else:
            with pytest.raises(ValueError, match="mine"), pytest.warns(RuntimeWarning, match=told), producer:
                raise error


@pytest.mark.usefixtures("transport")
def test_leaving_tells_what_was_not_taken_in_time() -> None:
    """The consumer is there and takes nothing: after linger seconds that is told, too."""
    with tp.Consumer("slow") as consumer:
        producer = tp.Producer("slow", linger=0.2)
        _met(producer, consumer)
        producer.put("never taken", PATIENCE)
        started = time.monotonic()
        with pytest.raises(tp.PeerLost, match=r"closed with 1 messages that were not taken within 0.2 s: .*present"):
            producer.__exit__(None, None, None)
        assert 0.2 <= time.monotonic() - started < 1 + MARGIN


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
def test_close_tells_what_was_lost(dies: str) -> None:
    """A consumer is killed with messages that it had not taken: closing warns of them, whenever that was."""
    with Child() as child:
        producer = tp.Producer(child.call(children.open_consumer, "lost"))
        for number in range(3):
            producer.put(number, PATIENCE)
        if dies == "before":
            child.kill()
        killing = in_thread(child.kill) if dies == "meanwhile" else None
        with pytest.warns(RuntimeWarning, match=rf"consumer pid {child.pid} .* vanished .* with 3 messages") as warned:
            producer.close()
        producer.close()
        assert len(warned) == 1
        assert producer.statistics().lost == 3
        if killing is not None:
            killing()
    tp.Consumer("lost").close()  # takes away the file of the one that was killed


def test_what_flush_has_told_is_not_told_again() -> None:
    """Leaving after a PeerLost that was caught is silent."""
    with tp.Consumer("told") as consumer, tp.Producer("told") as producer:
        _met(producer, consumer)
        producer.put(1, PATIENCE)
        consumer.close()
        with pytest.raises(tp.PeerLost):
            producer.flush(PATIENCE)


# -- streams


def test_a_stream_of_so_many_producers() -> None:
    """It ends when so many have left, however late they come; then the next stream begins."""
    with tp.Consumer("counted", producers=2) as consumer:
        for _ in range(2):
            in_thread(lambda: children.put_and_leave("counted", "first"))
            assert consumer.get(PATIENCE) == "first"
            wait_until(lambda: not _peers_after_a_look(consumer))
            with pytest.raises(tp.Empty, match="1 of 2 producers have left"):
                consumer.get(0.05)
            in_thread(lambda: children.put_and_leave("counted", "second"))
            assert list(consumer) == ["second"]


def _peers_after_a_look(consumer: tp.Consumer) -> tuple[str, ...]:
    with contextlib.suppress(tp.Empty):
        consumer.get(0.01)
    return consumer.statistics().peers


def test_a_loss_counts_as_an_end() -> None:
    """Of two producers one is killed and one says goodbye: the stream has ended, and not well."""
    with tp.Consumer("pair", producers=2) as consumer, Child() as child:
        child.call(children.open_producer, "pair")
        child.begin(children.put, 1)
        assert consumer.get(PATIENCE) == 1
        child.result()
        child.kill()
        with pytest.raises(tp.Empty):
            consumer.get(0.3)
        in_thread(lambda: children.put_and_leave("pair", 2))
        assert consumer.get(PATIENCE) == 2
        with pytest.raises(tp.PeerLost, match=f"pid {child.pid} .* vanished"):
            consumer.get(PATIENCE)


@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_a_loss_after_an_exception_of_a_signals_handler_is_told_as_such(endpoint: str) -> None:
    """An exception left a get that waited. The producer says nothing more, and is killed: that is no goodbye."""
    with tp.Consumer(endpoint, shared_memory="off") as consumer, Child() as child:
        child.call(children.open_producer, consumer.endpoint)
        child.begin(children.put, "met")
        assert consumer.get(PATIENCE) == "met"
        child.result()
        interrupt = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            consumer.get(PATIENCE)
        interrupt.join()
        child.kill()
        with pytest.raises(tp.PeerLost, match=f"pid {child.pid} .* vanished"):
            consumer.get(PATIENCE)


def _met_out_of_sight(consumer: tp.Consumer, child: Child, endpoint: str, folder: Path) -> None:
    """Have a child open a producer with a runtime folder of its own, and one message of it be taken."""
    child.call(children.move_out_of_sight, str(folder))
    child.call(children.open_producer, endpoint)
    child.begin(children.put, "before")
    assert consumer.get(PATIENCE) == "before"
    child.result()


def test_one_that_comes_back_counts_in_the_stream_that_it_ends_in(tmp_path: Path) -> None:
    """A producer out of sight was given up, and a stream ended with that. When it is back, it counts in the next one."""
    with tp.Consumer("tcp://127.0.0.1:0", producers=2, peer_timeout=0.1) as consumer, Child() as child:
        with Proxy(int(consumer.endpoint.rpartition(":")[2])) as line:
            _met_out_of_sight(consumer, child, line.endpoint, tmp_path)
            flushing = in_thread(lambda: child.call(children.flush))
            with contextlib.suppress(tp.Empty):
                consumer.get(0.1)
            flushing()
            line.silence()
            line.cut()
            for number in range(2):
                leaving = in_thread(lambda number=number: children.put_and_leave(consumer.endpoint, number))
                assert consumer.get(PATIENCE) == number
                leaving()
                with pytest.raises(tp.Empty if number else tp.PeerLost, match=None if number else f"pid {child.pid} "):
                    consumer.get(0.1 if number else PATIENCE)
            line.heal()
            child.begin(children.put_numbers_and_close, "back", 1)
            assert consumer.get(PATIENCE) == ("back", 0)
            with pytest.raises(tp.EndOfStream):
                consumer.get(PATIENCE)
            child.result()


def test_one_that_comes_back_and_of_which_nothing_is_missing_ends_well(tmp_path: Path) -> None:
    """A producer out of sight was given up, and is back before its stream has ended: that it said goodbye is what is told."""
    with tp.Consumer("tcp://127.0.0.1:0", producers=2, peer_timeout=0.1) as consumer, Child() as child:
        with Proxy(int(consumer.endpoint.rpartition(":")[2])) as line:
            _met_out_of_sight(consumer, child, line.endpoint, tmp_path)
            line.silence()
            line.cut()
            wait_until(lambda: _vanished_after_a_look(consumer))
            line.heal()
            child.begin(children.put_numbers_and_close, "back", 1)
            assert consumer.get(PATIENCE) == ("back", 0)
            leaving = in_thread(lambda: children.put_and_leave(consumer.endpoint, "other"))
            assert consumer.get(PATIENCE) == "other"
            with pytest.raises(tp.EndOfStream):
                consumer.get(PATIENCE)
            leaving()
            child.result()


@pytest.mark.slow
def test_one_that_comes_back_and_gave_messages_up_before_does_not_end_well(tmp_path: Path) -> None:
    """It gave its consumer up, and later was given up itself. Its stream tells of what it gave up, though it said goodbye."""
    with tp.Consumer("tcp://127.0.0.1:0", producers=2, peer_timeout=3.0) as consumer, Child() as child:
        with Proxy(int(consumer.endpoint.rpartition(":")[2])) as line:
            child.call(children.move_out_of_sight, str(tmp_path))
            child.call(children.open_producer, line.endpoint, peer_timeout=0.1)
            child.begin(children.await_consumers, 1)
            wait_in_vain(consumer, child.has_result)
            child.result()
            line.silence()
            child.call(children.put, "lost", "lost")
            line.cut()
            with pytest.raises(tp.PeerLost, match="with 2 messages that it had not taken"):
                child.call(children.flush)
            line.heal()
            child.begin(children.put, "between")
            assert consumer.get(PATIENCE) == "between"
            child.result()
            child.call(children.flush)
            line.silence()
            line.cut()
            wait_until(lambda: _vanished_after_a_look(consumer))
            line.heal()
            child.begin(children.put_numbers_and_close, "back", 1)
            assert consumer.get(PATIENCE) == ("back", 0)
            leaving = in_thread(lambda: children.put_and_leave(consumer.endpoint, "other"))
            assert consumer.get(PATIENCE) == "other"
            with pytest.raises(tp.PeerLost, match="said goodbye .*, and 2 of its messages did not come"):
                consumer.get(PATIENCE)
            leaving()
            child.result()
            assert consumer.statistics().lost == 2


def _vanished_after_a_look(consumer: tp.Consumer) -> int:
    with contextlib.suppress(tp.Empty):
        consumer.get(0.02)
    return consumer.statistics().vanished


def test_a_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """producers=None: the stream never ends. Who fails or vanishes is counted and logged, and get is Empty in time."""
    with tp.Consumer("server", producers=None) as consumer, Child() as well, Child() as fails, Child() as dies:
        for child in (well, fails, dies):
            child.call(children.open_producer, "server")
            child.begin(children.put, child.pid)
            assert consumer.get(PATIENCE) == child.pid
            child.result()
        well.begin(children.close)
        fails.begin(children.leave_by, "boom")
        dies.kill()
        wait_until(lambda: not _peers_after_a_look(consumer))
        well.result()
        fails.result()
        started = time.monotonic()
        with pytest.raises(tp.Empty):
            consumer.get(0.1)
        assert time.monotonic() - started < 0.15 + MARGIN
        found = consumer.statistics()
        assert (found.ended, found.failed, found.vanished) == (1, 1, 1)
        assert not select.select([consumer], [], [], 0)[0] or _is_silent_after_a_look(consumer)
        logged = [record.getMessage() for record in caplog.records if record.name == "tensorpipe_ipc"]
        assert any(f"pid {fails.pid} " in text and "ValueError: boom" in text for text in logged)
        assert any(f"pid {dies.pid} " in text and "vanished" in text for text in logged)


def _is_silent_after_a_look(consumer: tp.Consumer) -> bool:
    with pytest.raises(tp.Empty):
        consumer.get_nowait()
    return not select.select([consumer], [], [], 0)[0]


@pytest.mark.parametrize("wrong", [0, -1, True, "all", 1.5])
def test_how_many_producers(wrong: Any) -> None:
    """A number from 1 up, "auto" or None."""
    with pytest.raises((ValueError, TypeError), match="producers="):
        tp.Consumer("wrong", producers=wrong)


@pytest.mark.parametrize("has_left", [False, True])
@pytest.mark.parametrize("producer_binds", [False, True])
@pytest.mark.parametrize("endpoint", ["cut-short", "inproc://cut-short"])
def test_a_put_in_frames_that_an_exception_cut_short_is_no_loss(
    endpoint: str, producer_binds: bool, has_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program goes on, and the stream ends well: with that message where it had left, or without it."""

    def take() -> tuple[list[Any], int]:
        with tp.Consumer(endpoint, bind=not producer_binds) as consumer:
            return list(consumer), consumer.statistics().lost + consumer.statistics().duplicates

    taking = in_thread(take)
    with tp.Producer(endpoint, bind=producer_binds, shared_memory="off") as producer:
        producer.put("before", PATIENCE)
        socket_of, send = side_of(producer).socket, side_of(producer).socket.send

        def interrupted(*arguments: Any) -> None:
            monkeypatch.setattr(socket_of, "send", send)
            if has_left:
                send(*arguments)
            raise InterruptedError("by a handler")

        monkeypatch.setattr(socket_of, "send", interrupted)
        with pytest.raises(InterruptedError):
            producer.put("cut short", PATIENCE)
        producer.flush(PATIENCE)
    assert taking() == (["before", *["cut short"] * has_left], 0)


def test_waiting_for_consumers() -> None:
    """wait_for returns when so many are attached, and says how many are not."""
    with tp.Producer("audience", bind=True) as producer, contextlib.ExitStack() as stack:
        with pytest.raises(tp.Full, match="0 of 1 consumers attached in time"):
            producer.wait_for(1, 0.05)
        consumers = [stack.enter_context(tp.Consumer("audience", bind=False)) for _ in range(2)]
        waiting = in_thread(lambda: producer.wait_for(consumers=2, timeout=PATIENCE))
        for consumer in consumers:
            with contextlib.suppress(tp.Empty):
                consumer.get(0.3)
        waiting()
        with pytest.raises(ValueError, match="consumers=0"):
            producer.wait_for(0)


def test_waiting_for_consumers_of_whom_one_was_killed() -> None:
    """It is not counted, though nothing was put since it died."""
    with tp.Producer("audience", bind=True) as producer, Child() as child:
        child.call(children.open_consumer, "audience", bind=False)
        child.begin(children.take)
        producer.put("met", PATIENCE)
        child.result()
        producer.flush(PATIENCE)
        child.kill()
        with pytest.raises(tp.Full, match="0 of 1 consumers attached in time"):
            producer.wait_for(1, 0)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("bind", [True, False])
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_the_descriptor_tells_that_a_producer_was_killed(endpoint: str, bind: bool) -> None:
    """Waiting on the descriptor alone is enough, whoever binds; and it is not readable for ever after."""
    with Child() as child, children.consumer_of(child, endpoint, bind=bind) as consumer:
        child.begin(children.put, "met")
        assert consumer.get(PATIENCE) == "met"
        child.result()
        consumer.fileno()
        child.kill()
        started = time.monotonic()
        with pytest.raises(tp.PeerLost):
            _get_when_readable(consumer)
        assert time.monotonic() - started < 1 + MARGIN
        while select.select([consumer], [], [], 0.3)[0]:
            with pytest.raises(tp.Empty):
                consumer.get_nowait()
        bound = consumer.endpoint
    tp.Consumer(bound).close()  # clears away what a killed binder left


def _get_when_readable(consumer: tp.Consumer) -> None:
    looks = 0
    while select.select([consumer], [], [], PATIENCE)[0]:
        looks += 1
        assert looks < 1000, "the descriptor is readable again and again"
        with contextlib.suppress(tp.Empty):
            consumer.get_nowait()
    raise AssertionError("the descriptor stays silent")


# -- closing


@EVERYWHERE
@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("waits", ["get", "put", "flush"])
def test_another_thread_closes_an_end(endpoint: str, waits: str) -> None:
    """A waiting call raises Closed at once when another thread closes its end. Messages left are counted as lost."""
    with tp.Consumer(endpoint) as consumer, tp.Producer(consumer.endpoint, maxsize=1, linger=0) as producer:
        end: Any = consumer if waits == "get" else producer
        if waits == "get":
            waiting = in_thread(consumer.get)
        else:
            _met(producer, consumer)
            producer.put("not taken", PATIENCE)
            waiting = in_thread(producer.flush if waits == "flush" else lambda: producer.put("no room"))
        wait_until(lambda: is_in_use(end))
        started = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            end.close()
        with pytest.raises(tp.Closed, match="is closed"):
            waiting()
        assert time.monotonic() - started < 2 * NOTICED + MARGIN
        assert end.statistics().messages == (0 if waits == "get" else 2)


@pytest.mark.parametrize("waits", ["put", "loan", "put over tcp"])
def test_another_thread_closes_a_producer_that_waits_for_memory(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a consumer with room, and waits for that one to take what fills the memory."""
    monkeypatch.setattr(resend_buffer, "KEPT_AT_MOST", 1 << 20)
    endpoint, way = ("tcp://127.0.0.1:0", "off") if waits == "put over tcp" else ("memory", "require")
    with (
        tp.Producer(endpoint, bind=True, linger=0, shared_memory=way) as producer,
        tp.Consumer(producer.endpoint, bind=False) as consumer,
    ):
        _met(producer, consumer)
        queue = side_of(producer).any_queue()
        if queue is not None:
            queue.arena.words[CAPACITY] = 1 << 20
        message = torch.ones(1 << 19, dtype=torch.uint8)
        with contextlib.suppress(tp.Full):
            for _ in range(16):
                producer.put(message, 0.1)
        waiting = in_thread(
            producer.loan((1 << 19,), torch.uint8).__enter__ if waits == "loan" else lambda: producer.put(message)
        )
        wait_until(lambda: is_in_use(producer))
        started = time.monotonic()
        with pytest.warns(RuntimeWarning, match="not taken"):
            producer.close()
        with pytest.raises(tp.Closed, match="is closed"):
            waiting()
        assert time.monotonic() - started < 2 * NOTICED + MARGIN


def test_another_thread_closes_what_a_with_block_waits_in() -> None:
    """That is a goodbye and no failure; and when the block is left the end is closed: its address is free."""
    with tp.Consumer("left", bind=False, producers=1) as consumer:
        for _ in range(5):
            opened: list[tp.Producer] = []
            put: list[int] = []

            def put_until_closed(opened: list[tp.Producer] = opened, put: list[int] = put) -> None:
                with (
                    contextlib.suppress(tp.Closed),
                    tp.Producer("left", bind=True, maxsize=1, linger=PATIENCE) as producer,
                ):
                    opened.append(producer)
                    for number in range(1000):
                        producer.put(number)
                        put.append(number)
                tp.Producer("left", bind=True).close()

            putting = in_thread(put_until_closed)
            assert consumer.get(PATIENCE) == 0
            wait_until(lambda opened=opened, put=put: len(put) > 1 and is_in_use(opened[0]))  # type: ignore[misc]
            closing = in_thread(opened[0].close)
            assert len(list(consumer)) > 0
            closing()
            putting()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["a thread closes it", "a handler raises"])
def test_nobody_reads_what_a_put_in_frames_was_given(way: str) -> None:
    """A put into a stopped consumer's room returns, or raises, and what the program then writes does not reach the consumer."""
    with Child() as child, tp.Producer("mine", shared_memory="off", linger=0) as producer:
        child.call(children.open_consumer, "mine", shared_memory="off")
        child.begin(children.take, 1)
        producer.put("met", PATIENCE)
        assert child.result() == ["met"]
        child.signal(signal.SIGSTOP)
        frame = torch.ones(1 << 24, dtype=torch.uint8)
        if way == "a handler raises":
            with _timer(0.3), contextlib.suppress(TimeoutError):
                producer.put(frame)
                frame.fill_(7)
                while True:
                    pass
            frame.fill_(7)
            child.signal(signal.SIGCONT)
            child.begin(children.take, 1)
            assert child.result()[0].unique().tolist() == [1]
        else:
            putting = in_thread(lambda: producer.put(frame))
            putting()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                producer.close()
        child.signal(signal.SIGCONT)


@contextlib.contextmanager
def _timer(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    rest = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *rest)
        signal.signal(signal.SIGALRM, before)


_DAEMONS = """
import contextlib, sys, threading, time
import tensorpipe_ipc as tp

threading.excepthook = lambda _: None
for number in range(6):
    endpoint = f"inproc://daemons-{number}" if number % 3 == 2 else f"daemons-{number}"
    consumer = tp.Consumer(endpoint, shared_memory="off" if number % 2 else "auto")
    threading.Thread(target=consumer.get, daemon=True).start()
time.sleep(0.2)
sys.exit(5)
"""


@pytest.mark.slow
def test_daemon_threads_wait_in_ends_when_the_program_ends() -> None:
    """It ends with its own status, soon."""
    done = subprocess.run([sys.executable, "-c", _DAEMONS], capture_output=True, text=True, timeout=25, check=False)
    assert (done.returncode, done.stderr) == (5, "")


_OPENERS = """
import itertools, sys, threading, time
import tensorpipe_ipc as tp

met = threading.Semaphore(0)

def open_again(number):
    for count in itertools.count():
        try:
            end = tp.Consumer(f"opened-{number}", shared_memory="off" if number % 2 else "auto")
            met.release()
            if count % 2:
                end.close()
            else:
                end.get(60)
        except tp.Closed as closed:
            if "the program is ending" in str(closed):
                refused.append(closed)

refused = []
for number in range(4):
    threading.Thread(target=open_again, args=(number,), daemon=True).start()
for _ in range(4):
    met.acquire()
sys.exit(5)
"""


@pytest.mark.slow
def test_daemon_threads_open_ends_again_and_again_while_the_program_ends() -> None:
    """It ends with its own status, soon. Nothing is left of an end whose constructor was still at work."""
    done = subprocess.run([sys.executable, "-c", _OPENERS], capture_output=True, text=True, timeout=25, check=False)
    assert (done.returncode, done.stderr) == (5, "")
    assert os.listdir(runtime_folder()) == []


def test_of_many_consumers_that_wait_one_looks_for_what_lies_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look walks all memory, and what is in use keeps them at it."""
    monkeypatch.setattr("tensorpipe_ipc.memory.arena.IDLE", 0.1)
    asked, look, (told, tell) = Arena.mind_idle, Arena._give_back_idle, os.pipe()
    sent = torch.zeros(600_000)

    def wait() -> None:
        with tp.Consumer("looking", bind=False) as consumer:
            kept = consumer.get(PATIENCE)
            monkeypatch.setattr(Arena, "mind_idle", lambda *_, **wish: (os.write(tell, b"?"), asked(*_, **wish))[1])
            monkeypatch.setattr(Arena, "_give_back_idle", lambda arena: (os.write(tell, b"!"), look(arena))[1])
            with pytest.raises(tp.EndOfStream):
                consumer.get(AT_LENGTH)
            assert not kept[0]

    waiting = [in_child(wait) for _ in range(8)]
    with tp.Producer("looking", bind=True) as producer:
        producer.wait_for(consumers=8, timeout=AT_LENGTH)
        for _ in waiting:
            producer.put(sent, PATIENCE)
        said = b""
        while said.count(b"?") < 300:
            said += os.read(told, 100)
    assert [reap(each) for each in waiting] == [0] * 8
    assert 2 < said.count(b"!") < 100
    os.close(told)
    os.close(tell)


_CLOSES_IN_A_DAEMON = """
import gc, sys, threading
import torch
import tensorpipe_ipc as tp

begun = threading.Event()

def put():
    with tp.Producer("daemon", linger=20, shared_memory="off") as producer:
        for number in range(3):
            producer.put(torch.full((5_000_000,), number), 20)
        begun.set()

def drop():
    producer = tp.Producer("daemon", linger=20, shared_memory="off")
    for number in range(3):
        producer.put(torch.full((5_000_000,), number), 20)
    producer.itself = producer
    del producer
    begun.set()
    gc.collect()

gc.disable()
threading.Thread(target=put if sys.argv[1] == "leaves its block" else drop, daemon=True).start()
begun.wait()
threading.Event().wait(0.5)  # it is at it by then
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leaves its block", "collects it"])
def test_an_end_that_a_daemon_thread_is_closing_when_the_program_ends_has_its_linger(how: str) -> None:
    """The consumer is busy for seconds, and then takes what is there: all of it, and a goodbye."""
    with tp.Consumer("daemon", shared_memory="off") as consumer:
        with started("-c", _CLOSES_IN_A_DAEMON, how) as program:
            assert consumer.get(AT_LENGTH)[0] == 0
            threading.Event().wait(5.0)  # longer than the two seconds that any use of an end has
            assert [int(each[0]) for each in consumer] == [1, 2]
            assert consumer.statistics().ended == 1
            assert (program.wait(PATIENCE), program.communicate()) == (0, ("", ""))


_LEAVES_AN_END = """
import multiprocessing, sys, threading
from concurrent.futures import ThreadPoolExecutor
import tensorpipe_ipc as tp

def put():
    global producer, pool
    producer, by = tp.Producer("left-open", shared_memory=sys.argv[2]), sys.argv[3]
    if by == "itself":
        producer.put(7, 30)
    elif by == "a pool that is idle by then":
        pool = ThreadPoolExecutor(1)
        pool.submit(producer.put, 7, 30).result()
    else:  # the main thread counts as ended once it waits for the others
        threading.Thread(target=lambda: (threading.main_thread().join(), producer.put(7, 30))).start()

if __name__ == "__main__":
    with tp.Consumer("left-open", shared_memory=sys.argv[2]) as consumer:
        child = multiprocessing.get_context(sys.argv[1]).Process(target=put)
        child.start()
        print(list(consumer), consumer.statistics().ended)
        child.join()
"""


@pytest.mark.filterwarnings("ignore:.*closed with 1 messages that were not taken")
def test_each_stream_ends_as_its_own_producers_did() -> None:
    """Two have left before the end of the first stream is told: each end is told in its turn."""
    with tp.Consumer("in-turn", producers=1) as consumer:
        for number, failure in enumerate([None, ValueError("the second"), None]):
            with contextlib.suppress(ValueError, tp.PeerLost), tp.Producer("in-turn", linger=0) as producer:
                producer.put(number, PATIENCE)  # which nobody has taken when it leaves
                if failure is not None:
                    raise failure
            wait_until(lambda: (side_of(consumer).drain(), side_of(consumer).ended > number)[1])  # noqa: B023
        assert sorted(consumer.get(PATIENCE) for _ in range(3)) == [0, 1, 2]
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        with pytest.raises(tp.StreamFailed, match="the second"):
            consumer.get(PATIENCE)
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        with pytest.raises(tp.Empty):
            consumer.get(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["itself", "a pool that is idle by then", "a thread that goes on"])
@pytest.mark.parametrize(("method", "shared_memory"), [("fork", "auto"), ("forkserver", "off")])
def test_a_process_of_multiprocessings_returns_with_an_end_open(
    method: str, shared_memory: str, by: str, tmp_path: Path
) -> None:
    """It says goodbye, as a program does that ends: when the threads are done for which it waits."""
    program = tmp_path / "leaves.py"
    program.write_text(_LEAVES_AN_END)
    done = ran(str(program), method, shared_memory, by)
    assert (done.status, done.out) == (0, "[7] 1\n"), done.err


_FINALIZER_FIRST = """
import weakref

class Thing: pass
thing = Thing()
weakref.finalize(thing, int)

import multiprocessing
import tensorpipe_ipc as tp

def take():
    with tp.Consumer("awaited", bind=False) as consumer:
        print(list(consumer), flush=True)

producer = tp.Producer("awaited", bind=True)
multiprocessing.get_context("fork").Process(target=take).start()
producer.put(7, 30)
"""


@pytest.mark.slow
def test_a_child_waits_for_the_goodbye_of_the_program_that_waits_for_it() -> None:
    """Multiprocessing does so when the program ends: then the ends are closed already, whatever was imported first."""
    done = ran("-c", _FINALIZER_FIRST)
    assert (done.status, done.out) == (0, "[7]\n"), done.err


@pytest.mark.slow
def test_close_keeps_to_its_linger() -> None:
    """Though there is more than leaves in that time."""
    with Child() as child, tp.Producer("linger", shared_memory="off", linger=1.5) as producer:
        child.call(children.open_consumer, "linger", shared_memory="off")
        child.begin(children.take, 1)
        producer.put("met", PATIENCE)
        assert child.result() == ["met"]
        producer.flush(PATIENCE)
        child.signal(signal.SIGSTOP)
        producer.put(torch.zeros(1 << 24, dtype=torch.uint8), PATIENCE)
        started = time.monotonic()
        with pytest.warns(RuntimeWarning, match="1 messages that were not taken"):
            producer.close()
        assert time.monotonic() - started < 1.5 + MARGIN
        child.signal(signal.SIGCONT)


@pytest.mark.parametrize("cut_at", ["say_goodbye", "transport", "disconnect"])
@EVERYWHERE
def test_an_exception_cuts_a_close_short(endpoint: str, cut_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does: the end is closed all the same, its peer is told, and its address is free."""
    for closes in ("producer", "consumer"):
        with contextlib.ExitStack() as stack:
            consumer = stack.enter_context(tp.Consumer(endpoint))
            producer = stack.enter_context(tp.Producer(consumer.endpoint, linger=0))
            _met(producer, consumer)
            producer.flush(PATIENCE)
            end: Any = producer if closes == "producer" else consumer
            with monkeypatch.context() as patch:
                _raise_after(patch, type(conversation_of(end)), cut_at)
                with pytest.raises(KeyboardInterrupt):
                    end.close()
            end.close()
            assert "closed" in repr(end)
            if closes == "producer":
                with pytest.raises((tp.EndOfStream, tp.PeerLost)):
                    consumer.get(PATIENCE)
            else:
                wait_until(lambda producer=producer: not producer.statistics().peers)  # type: ignore[misc]
                tp.Consumer(consumer.endpoint).close()


def _raise_after(patch: pytest.MonkeyPatch, link: type, name: str) -> None:
    done = getattr(link, name)

    def interrupted(self: Any, *arguments: Any) -> None:
        patch.setattr(link, name, done)
        done(self, *arguments)
        raise KeyboardInterrupt

    patch.setattr(link, name, interrupted)


def test_what_a_closed_end_says() -> None:
    """statistics is the last snapshot; repr says that it is closed, also in a forked child, where it is another's."""
    with tp.Consumer("said") as consumer, tp.Producer("said") as producer:
        _met(producer, consumer)
        producer.flush(PATIENCE)
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(writer, f"{producer!r} {consumer!r}".encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as file:
            said = file.read().decode()
        os.waitpid(pid, 0)
        assert said.count(f"of pid {os.getpid()}, forked") == 2
        producer.close()
        consumer.close()
        assert (producer.statistics().messages, producer.statistics().transport) == (1, "shared memory")
        assert (consumer.statistics().messages, consumer.statistics().peers) == (1, ())


@EVERYWHERE
def test_the_end_of_a_stream_is_told_while_a_further_producer_puts(endpoint: str) -> None:
    """Two have left, as ``producers`` says. What a third one puts without a pause belongs to the next stream."""
    stop = threading.Event()

    def stream(where: str) -> None:
        with contextlib.suppress(tp.PeerLost), tp.Producer(where, shared_memory="off", linger=0) as third:
            while not stop.is_set():
                with contextlib.suppress(tp.Full):
                    third.put("third", 0.2)

    with tp.Consumer(endpoint, producers=2, shared_memory="off") as consumer:
        streaming = in_thread(functools.partial(stream, consumer.endpoint))
        try:
            assert consumer.get(PATIENCE) == "third"
            leaving = in_thread(lambda: [_put_and_leave(consumer.endpoint, name) for name in "ab"])
            got, told = list[str](), False
            while not told and len(got) < 2000:
                try:
                    got.append(consumer.get(PATIENCE))
                    time.sleep(0.001)  # it is the slower one
                except tp.EndOfStream:
                    told = True
            assert told
            assert [each for each in got if each != "third"] == ["a", "b"]
            leaving()
        finally:
            stop.set()
        with contextlib.suppress(tp.Empty):
            while True:
                consumer.get(0.3)
        streaming()


def _put_and_leave(endpoint: str, name: str) -> None:
    with tp.Producer(endpoint, shared_memory="off") as producer:
        producer.put(name, PATIENCE)


def test_closing_the_last_end_leaves_alone_what_others_lend_to_zeromq() -> None:
    """pyzmq has one thread for the memory that the whole process lends, a user's own sockets and other threads' ends too."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        pull.bind("inproc://mine")
        push.connect("inproc://mine")
        lent = np.ones(1 << 20, np.uint8)
        kept = weakref.ref(lent)
        tracker = push.send(lent, copy=False, track=True)
        del lent
        with tp.Consumer("tcp://127.0.0.1:0", shared_memory="off") as consumer:
            sending = in_thread(lambda: _put_and_leave(consumer.endpoint, "x" * (1 << 20)))
            consumer.get(PATIENCE)
            sending()
        push.send(np.ones(1 << 20, np.uint8), copy=False)
        assert kept() is not None
        assert not tracker.done
        for _ in range(2):
            assert len(pull.recv(copy=False).buffer) == 1 << 20
        wait_until(lambda: tracker.done and kept() is None)


@pytest.mark.slow
def test_threads_open_and_close_ends_of_their_own_at_any_time() -> None:
    """The last end of one closes as that of another is opened, and lends memory."""

    def come_and_go() -> None:
        for _ in range(300):
            with tp.Consumer("tcp://127.0.0.1:0", shared_memory="off") as consumer:
                sending = in_thread(lambda where=consumer.endpoint: _put_and_leave(where, "x" * (1 << 20)))  # type: ignore[misc]
                assert len(consumer.get(PATIENCE)) == 1 << 20
                sending()

    for each in [in_thread(come_and_go) for _ in range(2)]:
        each(AT_LENGTH)


# -- words


@pytest.mark.slow
def test_one_warning_of_an_end_that_nobody_comes_to(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put or a get at a name that nobody has is logged, once, after some seconds."""
    monkeypatch.setattr("tensorpipe_ipc.endpoints.absence.COMPLAINT", 0.2)
    with tp.Producer("mistyped") as producer, tp.Consumer("misspelt", bind=False) as consumer:
        for _ in range(3):
            with pytest.raises(tp.Full):
                producer.put(1, 0.3)
            with pytest.raises(tp.Empty):
                consumer.get(0.3)
    logged = [record for record in caplog.records if record.name == "tensorpipe_ipc"]
    assert [record.levelno for record in logged] == [logging.WARNING] * 2
    assert sum("mistyped" in record.getMessage() for record in logged) == 1


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_one_warning_of_a_producer_whose_consumer_failed(
    shared_memory: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its put waits for the next consumer, for ever where it has no timeout. So it says why, and again after the next one."""
    monkeypatch.setattr("tensorpipe_ipc.endpoints.absence.COMPLAINT", 0.2)
    with contextlib.suppress(tp.StreamFailed), tp.Producer("stage", shared_memory=shared_memory, linger=0) as producer:
        for _ in range(2):
            with contextlib.suppress(ValueError), tp.Consumer("stage") as consumer:
                putting = in_thread(lambda: producer.put(1, PATIENCE))
                assert consumer.get(PATIENCE) == 1
                putting()
                raise ValueError("bad image")
            with contextlib.suppress(tp.Full):
                while True:
                    producer.put(1, 0.5)
    logged = [record.getMessage() for record in caplog.records if record.name == "tensorpipe_ipc"]
    assert ["failed" in text and "bad image" in text for text in logged] == [True, True]


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_end_cannot_be_copied_or_pickled(copy_of: Callable[[Any], Any]) -> None:
    """It says what to pass to another process instead."""
    with tp.Producer("mine") as producer, tp.Consumer("mine") as consumer:
        for end, name in ((producer, "Producer"), (consumer, "Consumer")):
            with pytest.raises(TypeError, match=f"{name} on ipc://.*mine.* pass the address, and make an end there"):
                copy_of(end)


@pytest.mark.slow
@EVERYWHERE
def test_why_nobody_comes(endpoint: str, free_port: int) -> None:
    """A connector says that nobody listens, or no end; a binder that was made in this very process, and where, is named."""
    if endpoint.startswith("tcp"):
        endpoint = f"tcp://127.0.0.1:{free_port}"
    with tp.Producer(endpoint, shared_memory="off") as producer:
        with pytest.raises(
            tp.Full, match="no consumer has come to .*: (nobody listens there; .* bind=True|no end of this)"
        ):
            producer.put(1, 0.8)
        with tp.Consumer(endpoint, bind=False) as other:
            with pytest.raises(tp.Empty, match="(nobody listens there; .* bind=True|no end of this)"):
                other.get(0.8)
        with tp.Consumer(endpoint):
            with pytest.raises(
                tp.Full, match=rf"the consumer of this very process, made at {__file__}:\d+, has to be in use"
            ):
                producer.put(1, 0.4)
            with pytest.raises(
                tp.Refused, match=rf"of this very process \(pid {os.getpid()}\), made at {__file__}:\d+: close"
            ):
                tp.Consumer(endpoint)


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", None], ids=["another protocol", "nothing"])
def test_another_program_that_listens_at_the_address_is_told(says: bytes | None) -> None:
    """It is not said that nobody does."""
    done = threading.Event()

    def serve(server: socket.socket) -> None:
        taken = []
        with contextlib.suppress(OSError):
            while not done.is_set():
                taken.append(server.accept()[0])
                if says is not None:
                    taken[-1].sendall(says)
                    taken.pop().close()
        for each in taken:
            each.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = in_thread(lambda: serve(server))
        with tp.Producer(f"tcp://127.0.0.1:{server.getsockname()[1]}", linger=0) as producer:
            with pytest.raises(
                tp.Full, match="no consumer has come to .*; somebody listens there, and does not answer"
            ):
                producer.put(1, 1)
            done.set()
            with contextlib.suppress(OSError):
                socket.create_connection(server.getsockname()).close()
            serving()


@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_a_refusal_ends_with_the_binder_that_said_it(endpoint: str, free_port: int) -> None:
    """Nobody refuses once it is gone; and the next one is asked."""
    endpoint = endpoint.removesuffix(":0") + f":{free_port}" * endpoint.endswith(":0")
    with Child() as child:
        with tp.Consumer(endpoint, shared_memory="off") as consumer:
            child.call(children.open_producer, endpoint, shared_memory="require")
            child.begin(children.put, "refused")
            wait_in_vain(consumer, lambda: consumer.statistics().rejected)
            with pytest.raises(tp.Refused, match="it is off at the consumer"):
                child.result()

        def is_told_that_nobody_is_there() -> bool:
            try:
                child.call(children.put, "nobody is there", timeout=0.1)
            except tp.Refused:  # ZeroMQ is still to see that the connection has ended
                return False
            except tp.Full as full:
                return "no consumer has come" in str(full)
            raise AssertionError("it was put to nobody")

        children.wait_until(is_told_that_nobody_is_there)
        with tp.Consumer(endpoint) as consumer:
            child.begin(children.put, "taken")
            assert consumer.get(PATIENCE) == "taken"
            child.result()
            child.call(children.close)


def test_those_who_were_turned_away(keys: Path) -> None:
    """A binder that nobody came to says how often somebody was turned away, and why."""
    with tp.Consumer("tcp://127.0.0.1:0", security=secured.binders(keys, "other")) as consumer:
        with tp.Producer(consumer.endpoint, security=secured.connectors(keys), linger=0) as producer:
            with pytest.raises(tp.Full):
                in_thread(lambda: producer.put(1, 0.5))()
            with pytest.raises(tp.Empty, match="no producer .* times somebody was turned away: .* not on the list"):
                consumer.get(0.5)


@pytest.mark.parametrize(
    "name", ["tensorpipe_ipc.zeromq.address_claim.check_socket_file", "zmq.Context", "signal.pthread_sigmask"]
)
def test_ends_that_garbage_collection_closes_while_another_is_made(
    name: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for nothing that this thread holds at that moment, and are closed when it is done."""
    producer: Any = tp.Producer("cycle", bind=True)
    consumer: Any = tp.Consumer("inproc://cycle")
    producer.itself, consumer.itself = producer, consumer
    del producer, consumer
    own_context: dict[str, Any] = {"security": secured.binders(keys)} if not name.startswith("tensorpipe_ipc") else {}
    with monkeypatch.context() as patch:
        _collect_in(patch, name)
        started = time.monotonic()
        with tp.Consumer("made", **own_context):
            assert time.monotonic() - started < 2 * MARGIN
    children.wait_until(lambda: "cycle.sock" not in os.listdir(runtime_folder()))


class _Keeps(bytearray):
    """Bytes that keep something else."""

    kept: Any = None


@pytest.mark.filterwarnings("ignore:.*not taken")
@pytest.mark.parametrize("is_closed", [False, True], ids=["dropped", "closed"])
def test_an_end_that_is_collected_in_pyzmq_s_thread_holds_up_no_other(is_closed: bool) -> None:
    """That thread tells what has left, also of other ends. There, cycles are collected, and what was lent is let go of.

    So are objects that close what they have, as a generator leaves its ``with`` block.
    """
    with Child() as reads, Child() as stands, contextlib.ExitStack() as stack:
        ready, slow = (
            each.call(children.open_consumer, "tcp://127.0.0.1:*", shared_memory="off") for each in (reads, stands)
        )
        lent = _Keeps(b"whatever")
        lent.kept = tp.Producer(slow, shared_memory="off", linger=PATIENCE)
        stands.begin(children.take)
        lent.kept.put(1, PATIENCE)
        assert stands.result() == [1]
        stands.signal(signal.SIGSTOP)
        lent.kept.put(2, PATIENCE)
        if is_closed:
            weakref.finalize(lent, lent.kept.close)
        with tp.Producer(ready, shared_memory="off") as producer:
            context = stack.enter_context(zmq.Context())
            here, there = (stack.enter_context(context.socket(zmq.PAIR)) for _ in range(2))
            here.copy_threshold = 0
            here.bind("inproc://lent")
            there.connect("inproc://lent")
            here.send(lent, copy=False)
            del lent
            assert there.recv() == b"whatever"
            reads.begin(children.take_and_drop, 300)
            for _ in range(300):
                producer.put(torch.zeros(40_000), PATIENCE / 2)
            reads.result()
        stands.kill()


def _collect_in(patch: pytest.MonkeyPatch, name: str) -> None:
    """Have garbage collected wherever a function is called."""
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)

    def collecting(*arguments: Any, **options: Any) -> Any:
        gc.collect()
        return function(*arguments, **options)

    patch.setattr(name, collecting)


@pytest.fixture
def flood() -> Iterator[Callable[[str, str], None]]:
    """Have a process say garbage and greetings to an endpoint, as fast as it can, until the test is over."""
    with Child() as child:

        def begin(endpoint: str, role: str) -> None:
            child.begin(children.flood, endpoint, role)

        yield begin
        child.kill()


@pytest.mark.parametrize("call", ["put", "get", "flush", "statistics"])
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_timeouts_hold_under_a_flood(endpoint: str, call: str, flood: Callable[[str, str], None]) -> None:
    """However much comes, each call ends when it should."""
    end: Any = tp.Consumer(endpoint) if call == "get" else tp.Producer(endpoint, bind=True, linger=0)
    with end:
        flood(end.endpoint, "consumer" if call == "get" else "producer")
        wait_until(lambda: _rejected(end) > 100)
        calls: dict[str, Callable[[], object]] = {
            "put": lambda: end.put(1, 0),
            "get": lambda: end.get(0.2),
            "flush": lambda: end.flush(0.2),
            "statistics": end.statistics,
        }
        for _ in range(3):
            started = time.monotonic()
            with contextlib.suppress(tp.Full, tp.Empty):
                calls[call]()
            assert time.monotonic() - started < 0.3 + MARGIN


@pytest.mark.kills
def test_timeouts_hold_under_a_flood_however_much_is_in_flight(flood: Callable[[str, str], None]) -> None:
    """A put that waits for its one consumer's credits does not read for as long as all of them would take."""
    wide = 80_000
    options: dict[str, Any] = {"shared_memory": "off", "maxsize": wide}
    producer = tp.Producer("tcp://127.0.0.1:0", bind=True, linger=0, **options)
    with Child() as child, contextlib.closing(producer):
        child.call(children.open_consumer, producer.endpoint, bind=False, **options)
        child.begin(children.take)
        for number in range(wide + 1):
            producer.put(number, PATIENCE)
        assert child.result() == [0]
        flood(producer.endpoint, "producer")
        wait_until(lambda: _rejected(producer) > 100)
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(tp.Full):
                producer.put(-1, 0.05)
            assert time.monotonic() - started < 0.15 + MARGIN
        with pytest.warns(RuntimeWarning, match=f"{wide} messages that were not taken"):
            producer.close()


@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_the_end_of_a_stream_is_told_under_a_flood(endpoint: str, flood: Callable[[str, str], None]) -> None:
    """A get without a timeout raises EndOfStream, even if there is always something more to read."""
    with tp.Consumer(endpoint) as consumer:
        flood(consumer.endpoint, "consumer")
        wait_until(lambda: _rejected(consumer) > 100)
        leaving = in_thread(lambda: children.put_and_leave(consumer.endpoint, 1))
        assert consumer.get() == 1
        with pytest.raises(tp.EndOfStream):
            consumer.get()
        leaving()


def _rejected(end: Any) -> int:
    """Return how many messages the end has rejected by now. A consumer looks for new ones first."""
    if isinstance(end, tp.Consumer):
        with contextlib.suppress(tp.Empty):
            end.get(0.05)
    return int(end.statistics().rejected)


def test_a_loan_that_cannot_be_handed_over_is_narrowed() -> None:
    """put(move=True) of tensors that are referred to elsewhere goes as wire_dtype says, as any other copy."""
    with tp.Consumer("narrow", restore=False) as consumer, tp.Producer("narrow", wire_dtype=torch.float16) as producer:
        _met(producer, consumer)
        with producer.loan((1 << 16,), torch.float32, timeout=PATIENCE) as tensor:
            tensor.fill_(1.5)
            alias = tensor.view(2, -1)
        assert consumer.get(PATIENCE).dtype == torch.float16
        assert alias.numel() == 1 << 16


def test_a_loan_is_narrowed_where_a_fork_keeps_it_from_being_handed_over() -> None:
    """It waits for room, and a child that is forked meanwhile has its tensors, too: so it is copied, as wire_dtype says."""
    filled, read, write = threading.Event(), *os.pipe()
    with (
        tp.Consumer("narrow", restore=False, maxsize=1) as consumer,
        tp.Producer("narrow", wire_dtype=torch.float16) as producer,
    ):

        def lend() -> None:
            with producer.loan((1 << 16,), torch.float32, timeout=PATIENCE) as tensor:
                tensor.fill_(1.5)
                producer.put("waits", PATIENCE)
                filled.set()

        _met(producer, consumer)
        lending = in_thread(lend)
        assert filled.wait(PATIENCE)
        wait_until(lambda: is_in_use(producer))
        pid = in_child(lambda: os.read(read, 1))
        try:
            assert consumer.get(PATIENCE) == "waits"
            assert consumer.get(PATIENCE).dtype == torch.float16
            lending()
        finally:
            os.write(write, b"x")
            assert reap(pid) == 0
            os.close(read)
            os.close(write)


def test_a_loan_is_narrowed_for_a_consumer_that_does_not_share_its_memory() -> None:
    """Another one does, and gets it as it lies."""
    with tp.Producer("narrow", bind=True, wire_dtype=torch.float16) as producer, contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"bind": False, "restore": False, "maxsize": 1}
        consumers = [
            stack.enter_context(tp.Consumer("narrow", shared_memory=how, **options)) for how in ("auto", "off")
        ]
        waiting = in_thread(lambda: producer.wait_for(2, PATIENCE))
        for consumer in consumers:
            with contextlib.suppress(tp.Empty):
                consumer.get(0.3)
        waiting()
        for _ in consumers:
            with producer.loan((1 << 16,), torch.float32, timeout=PATIENCE) as tensor:
                tensor.fill_(1.5)
        flushing = in_thread(lambda: producer.flush(PATIENCE))
        got = [consumer.get(PATIENCE) for consumer in consumers]
        assert [each.dtype for each in got] == [torch.float32, torch.float16]
        assert all(each.sum() == 1.5 * (1 << 16) for each in got)
        flushing()


@pytest.mark.slow
@pytest.mark.parametrize("producer_binds", [True, False])
def test_a_put_behind_a_consumer_that_took_all_and_closed_finds_nothing_lost(producer_binds: bool) -> None:
    """However many words of it are still unread: they are heard, its goodbye is the last of them."""
    count, taken = 12_000, threading.Event()
    options = {"maxsize": 30_000, "shared_memory": "off"}

    def take_all(consumer: tp.Consumer) -> None:
        with consumer:
            assert consumer.get(PATIENCE) == 0
            taken.wait(PATIENCE)
            for number in range(1, count):
                assert consumer.get(PATIENCE) == number

    def consumer() -> tp.Consumer:
        return tp.Consumer("inproc://taken", bind=not producer_binds, **options)

    made = None if producer_binds else consumer()
    with tp.Producer("inproc://taken", bind=producer_binds, linger=0, **options) as producer:
        taking = in_thread(functools.partial(take_all, made or consumer()))
        for number in range(count):
            producer.put(number, PATIENCE)
        taken.set()
        taking()
        with pytest.raises(tp.Full, match="said goodbye"):
            producer.put("one more", 3.0)
        producer.flush(PATIENCE)
        assert producer.statistics().lost == 0


# -- an end that leaves before its first call


@pytest.mark.usefixtures("transport")
@EVERYWHERE
def test_a_producer_that_leaves_before_its_first_put_is_told_of(endpoint: str) -> None:
    """A pipeline's stage may fail while it starts, or have nothing to say: who waits for it learns how it ended."""
    with tp.Consumer(endpoint, producers=2) as consumer:
        with contextlib.suppress(ValueError), tp.Producer(consumer.endpoint):
            raise ValueError("no such file")
        with tp.Producer(consumer.endpoint):
            pass
        with pytest.raises(tp.StreamFailed, match="no such file"):
            consumer.get(PATIENCE)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_the_next_consumer_is_told_of_a_producer_that_left_without_a_call(
    endpoint: str, is_killed: bool, free_port: int
) -> None:
    """The producer computes while its consumer closes, or is killed, and another one binds the address."""
    if endpoint.endswith(":0"):
        endpoint = endpoint[:-1] + str(free_port)
    with Child() as first, Child() as child:
        first.call(children.open_consumer, endpoint)
        child.call(children.open_producer, endpoint)
        child.begin(children.put, 0)
        assert first.call(children.take) == [0]
        child.result()
        child.call(children.flush)
        if is_killed:
            first.kill()
        else:
            first.call(children.close)
        with tp.Consumer(endpoint) as consumer:
            child.call(children.leave_by, "no such file")
            with pytest.raises(tp.StreamFailed, match="no such file"):
                consumer.get(PATIENCE)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_a_producer_that_ended_well_by_one_consumer_is_none_of_the_next(endpoint: str, free_port: int) -> None:
    """All that it put was taken: the next stream waits for producers of its own."""
    if endpoint.endswith(":0"):
        endpoint = endpoint[:-1] + str(free_port)
    with Child() as child, Child() as own:
        with tp.Consumer(endpoint) as first:
            child.call(children.open_producer, endpoint)
            child.begin(children.put, 0)
            assert first.get(PATIENCE) == 0
            child.result()
            child.call(children.flush)
        with tp.Consumer(endpoint, producers=1) as consumer:
            child.call(children.close)
            own.call(children.open_producer, endpoint)
            own.begin(children.put, 1)
            assert consumer.get(PATIENCE) == 1
            own.result()


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_the_next_consumer_is_told_of_a_producer_that_the_last_one_refused(endpoint: str, free_port: int) -> None:
    """The one that refused it is gone, and it fails without another call."""
    if endpoint.endswith(":0"):
        endpoint = endpoint[:-1] + str(free_port)
    with Child() as child:
        with tp.Consumer(endpoint) as first:
            child.call(children.open_producer, endpoint, serializer="torch_save")
            child.begin(children.put, 0)
            while not child.has_result():
                with contextlib.suppress(tp.Empty):
                    first.get(0.01)
            with pytest.raises(tp.Refused):
                child.result()
        with tp.Consumer(endpoint, accept=("raw", "torch_save")) as consumer:
            child.call(children.leave_by, "no such file")
            with pytest.raises(tp.StreamFailed, match="no such file"):
                consumer.get(PATIENCE)


@pytest.mark.usefixtures("transport")
@EVERYWHERE
def test_a_consumer_that_leaves_without_a_call_takes_nothing_with_it(endpoint: str) -> None:
    """The producer waits for a consumer, and the first to come does not stay."""
    with tp.Producer(endpoint, bind=True) as producer:
        putting = in_thread(lambda: [producer.put(number, PATIENCE) for number in range(20)])
        for _ in range(5):
            with contextlib.suppress(ValueError), tp.Consumer(producer.endpoint, bind=False):
                raise ValueError("no model")
        with tp.Consumer(producer.endpoint, bind=False) as consumer:
            assert [consumer.get(PATIENCE) for _ in range(20)] == [*range(20)]
            putting()


def test_closes_where_nobody_listens_cost_no_wait(free_port: int) -> None:
    """One try tells that there is no binder: the closes of many ends add up to less than a try may take."""
    producers = [tp.Producer(f"tcp://127.0.0.1:{free_port}", linger=0) for _ in range(20)]
    began = time.monotonic()
    for producer in producers:
        producer.close()
    assert time.monotonic() - began < 2


@EVERYWHERE
def test_a_consumer_that_waits_for_a_busy_producer_is_told_how_it_ended(endpoint: str) -> None:
    """The producer binds, computes, and leaves its block without a call, while the consumer's HELLO lies unread."""
    with contextlib.suppress(ValueError), tp.Producer(endpoint, bind=True, shared_memory="off") as producer:
        consumer = tp.Consumer(producer.endpoint, bind=False, shared_memory="off")
        getting = in_thread(lambda: consumer.get(PATIENCE))
        while not side_of(producer).socket.has_incoming():
            time.sleep(0.001)
        raise ValueError("no such file")
    with pytest.raises(tp.StreamFailed, match="no such file"):
        getting()
    consumer.close()


@pytest.mark.slow
@pytest.mark.parametrize(("endpoint", "busy"), [("busy", 0.3), ("tcp://127.0.0.1:*", 0.3), ("tcp://127.0.0.1:*", 3.05)])
def test_a_consumer_with_keys_that_waits_for_a_busy_producer_is_told_how_it_ended(
    endpoint: str, busy: float, keys: Path
) -> None:
    """It has knocked, and is let in when the producer closes, which has made no call before. After 3 s it knocks again."""
    with contextlib.ExitStack() as stack:
        with (
            contextlib.suppress(ValueError),
            tp.Producer(endpoint, bind=True, security=secured.binders(keys)) as producer,
        ):
            consumer = tp.Consumer(producer.endpoint, bind=False, security=secured.connectors(keys))
            stack.enter_context(consumer)
            getting = in_thread(lambda: consumer.get(PATIENCE))
            assert select.select([side_of(producer).socket._gate], [], [], PATIENCE)[0]  # it knocks
            time.sleep(max(0.0, side_of(producer).conversation.opened_at + busy - time.monotonic()))  # its own work
            raise ValueError("no such file")
        with pytest.raises(tp.StreamFailed, match="no such file"):
            getting()


@EVERYWHERE
def test_consumers_that_wait_are_told_of_a_producer_that_fails_as_soon_as_it_has_bound(
    endpoint: str, free_port: int
) -> None:
    """They try again some times a second."""
    endpoint = endpoint.replace(":0", f":{free_port}")
    with contextlib.ExitStack() as stack:
        consumers = [stack.enter_context(tp.Consumer(endpoint, bind=False)) for _ in range(2)]
        getting = [in_thread(functools.partial(consumer.get, PATIENCE)) for consumer in consumers]
        wait_until(lambda: all(is_in_use(consumer) for consumer in consumers))
        with contextlib.suppress(ValueError), tp.Producer(endpoint, bind=True, linger=0):
            raise ValueError("no such file")
        for get in getting:
            with pytest.raises(tp.StreamFailed, match="no such file"):
                get()


def test_a_handlers_exception_while_a_closing_producer_hears_costs_no_goodbye() -> None:
    """A consumer that it knows is told how it ended, also where no file tells of it."""

    class Alarm(Exception):
        pass

    def ring(*_: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    producer = tp.Producer("inproc://hears", bind=True, linger=0)
    try:
        with tp.Consumer("inproc://hears", bind=False) as consumer:
            _met(producer, consumer)
            side_of(producer).conversation.opened_at = time.monotonic()  # it hears for a quarter second from here
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Alarm), producer:
                raise ValueError("no such file")
            with pytest.raises(tp.StreamFailed, match="no such file"):
                consumer.get(PATIENCE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        producer.close()


def test_a_producer_that_is_killed_while_it_waits_for_an_answer_counts_as_lost(transport: str) -> None:
    """The consumer computes meanwhile, and has queues ready for two. The third has said HELLO, and waits for one."""
    with tp.Consumer("busy", producers=3) as consumer, Child() as one, Child() as other, Child() as third:
        for child in (one, other):
            child.call(children.open_producer, "busy")
            child.begin(children.put, 1)
            if transport == "shared memory":
                child.result()
            else:
                child.wait_until_blocked()
        third.call(children.open_producer, "busy")
        with pytest.raises(tp.Full):
            third.call(children.put, 1, timeout=0.5)
        third.kill()
        assert [consumer.get(PATIENCE) for _ in range(2)] == [1, 1]
        for child in (one, other):
            if transport != "shared memory":
                child.result()
            child.call(children.close)
        with pytest.raises(tp.PeerLost, match=f"pid {third.pid} on .* vanished"):
            consumer.get(PATIENCE)
        assert consumer.statistics().vanished == 1


def test_all_of_many_consumers_that_wait_for_a_busy_producer_are_told_how_it_ended() -> None:
    """It takes the producer a millisecond to hear of each."""
    with (
        contextlib.suppress(ValueError),
        contextlib.ExitStack() as stack,
        tp.Producer("busy", bind=True) as producer,
    ):
        consumers = [stack.enter_context(tp.Consumer("busy", bind=False)) for _ in range(40)]
        getting = [in_thread(functools.partial(consumer.get, PATIENCE)) for consumer in consumers]
        wait_until(lambda: all(side_of(consumer).conversation.greeting.said_at for consumer in consumers))
        with contextlib.suppress(ValueError), producer:
            raise ValueError("no such file")
        for get in getting:
            with pytest.raises(tp.StreamFailed, match="no such file"):
                get()


def test_each_of_many_streams_that_failed_is_told_so() -> None:
    """More of them ended while the consumer computed than one error names producers."""
    count = 20
    with tp.Consumer("many", producers=1) as consumer, contextlib.ExitStack() as stack:
        producers = [stack.enter_context(tp.Producer("many")) for _ in range(count)]
        for producer in producers:
            _met(producer, consumer)
        for number, producer in enumerate(producers):
            with contextlib.suppress(ValueError), producer:
                raise ValueError(f"number {number}")
        for number in range(count):
            with pytest.raises(tp.StreamFailed, match=f"number {number}$"):
                consumer.get(PATIENCE)
        assert consumer.statistics().failed == count
