"""One end is killed, stopped or leaves, and the other learns of it: what was lost, who had it, and that life goes on."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from typing import Any

import children
import pytest
import torch
import zoo
from children import PATIENCE, Child, in_thread, wait_until

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints import conversation, rendezvous

pytestmark = [pytest.mark.limit(25), pytest.mark.usefixtures("transport")]
ONLY_SHARED_MEMORY = pytest.mark.parametrize("transport", ["shared memory"], indirect=True)
MARGIN = 1.0  # seconds beyond a timeout and its documented 50 ms, on a machine that does other things too
BETWEEN_PROCESSES = [pytest.param("mortal", id="ipc"), pytest.param("tcp://127.0.0.1:0", id="tcp")]


def _attached(producer: tp.Producer, child: Child) -> None:
    """Have a producer of this process and a consumer of a child know each other, with nothing in flight."""
    child.begin(children.take)
    producer.put("met", PATIENCE)
    assert child.result() == ["met"]
    producer.flush(PATIENCE)


def _alone(producer: tp.Producer) -> None:
    """Wait until a producer knows that its consumer is gone: until then, what it puts may go there."""
    wait_until(lambda: not producer.statistics().peers)


def _open_pair(child: Child, endpoint: str, producer_binds: bool) -> tp.Producer:
    """A producer here and a consumer in a child, that know each other."""
    if producer_binds:
        producer = tp.Producer(endpoint, bind=True, linger=0.0)
        child.call(children.open_consumer, producer.endpoint, bind=False)
    else:
        producer = tp.Producer(child.call(children.open_consumer, endpoint), linger=0.0)
    _attached(producer, child)
    return producer


@pytest.mark.parametrize("producer_binds", [False, True])
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_the_consumer_is_killed(endpoint: str, producer_binds: bool) -> None:
    """Its messages are counted and told once, put says who is gone and since when, and a new consumer gets the next."""
    with Child() as first, Child() as second, _open_pair(first, endpoint, producer_binds) as producer:
        for number in range(5):
            producer.put(number, PATIENCE)
        first.kill()
        with pytest.raises(tp.PeerLost, match=rf"consumer pid {first.pid} on .* vanished .* with 5 messages"):
            producer.flush(PATIENCE)
        assert (producer.statistics().lost, producer.statistics().in_flight) == (5, 0)
        started = time.monotonic()
        with pytest.raises(
            tp.Full, match=rf"no consumer is attached: consumer pid {first.pid} .*vanished \d+.\d s ago"
        ):
            producer.put("to nobody", 0.3)
        assert 0.3 <= time.monotonic() - started < 0.35 + MARGIN
        producer.flush(0)
        second.call(children.open_consumer, producer.endpoint, bind=not producer_binds)
        second.begin(children.take, 2)
        producer.put("next", PATIENCE)
        producer.put("last", PATIENCE)
        assert second.result() == ["next", "last"]
        producer.flush(PATIENCE)


def test_a_blocked_put_learns_of_the_death() -> None:
    """A put that waits for room of a consumer that is killed goes to the consumer that comes instead."""
    with Child() as first, Child() as second, _open_pair(first, "replaced", True) as producer:
        for number in range(64):
            producer.put(number, PATIENCE)
        putting = in_thread(lambda: producer.put("waited", PATIENCE))
        first.kill()
        second.call(children.open_consumer, "replaced", bind=False)
        assert second.call(children.take) == ["waited"]
        putting()
        with pytest.raises(tp.PeerLost, match=f"pid {first.pid} .* with 64 messages"):
            producer.flush(PATIENCE)
        assert producer.statistics().lost == 64


def test_one_of_two_consumers_is_killed() -> None:
    """The other one goes on taking; only what the dead one had is lost."""
    with Child() as dies, Child() as lives, _open_pair(dies, "survivor", True) as producer:
        producer.put("lost with the dead", PATIENCE)
        lives.call(children.open_consumer, "survivor", bind=False)
        lives.begin(children.take, 20)
        while len(producer.statistics().peers) < 2:
            continue
        dies.kill()
        with pytest.raises(tp.PeerLost, match=f"pid {dies.pid} .* with 1 messages"):
            producer.flush(PATIENCE)
        for number in range(20):
            producer.put(number, PATIENCE)
        assert lives.result() == list(range(20))
        producer.flush(PATIENCE)


@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_a_stopped_consumer_is_not_a_dead_one(endpoint: str) -> None:
    """While it is stopped put is Full in time and says that it lives; when it goes on nothing is lost."""
    with Child() as child, _open_pair(child, endpoint, False) as producer:
        child.signal(signal.SIGSTOP)
        for number in range(64):
            producer.put(number, PATIENCE)
        for timeout in (0.0, 0.3):
            started = time.monotonic()
            with pytest.raises(tp.Full, match=rf"pid {child.pid} .*present.* holds 64 untaken of 64"):
                producer.put("no room", timeout)
            assert timeout <= time.monotonic() - started < timeout + 0.05 + MARGIN
        with pytest.raises(tp.Full):
            producer.flush(1.0)
        child.signal(signal.SIGCONT)
        assert child.call(children.take, 64) == list(range(64))
        producer.flush(PATIENCE)
        assert producer.statistics().lost == 0


@pytest.mark.parametrize("consumer_binds", [False, True])
@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
def test_the_producer_is_killed(endpoint: str, consumer_binds: bool) -> None:
    """PeerLost names a killed producer once, after its messages came in order. The consumer then awaits a new stream."""
    with Child() as child:
        if consumer_binds:
            consumer = tp.Consumer(endpoint)
            child.call(children.open_producer, consumer.endpoint)
        else:
            consumer = tp.Consumer(child.call(children.open_producer, endpoint, bind=True), bind=False)
        with consumer:
            child.begin(children.put_numbers, 0, 50)
            assert consumer.get(PATIENCE) == ("", 0)
            child.result()
            with contextlib.suppress(tp.Full):
                child.call(children.flush, 0.2)  # what ZeroMQ's thread had not sent dies with it
            child.kill()
            assert [consumer.get(PATIENCE) for _ in range(49)] == [("", number) for number in range(1, 50)]
            with pytest.raises(tp.PeerLost, match=rf"producer pid {child.pid} on .* vanished"):
                consumer.get(PATIENCE)
            with pytest.raises(tp.Empty, match="no producer is attached: .* vanished"):
                consumer.get(0)
            assert (consumer.statistics().lost, consumer.statistics().vanished) == (0, 1)
            bound = consumer.endpoint
    tp.Consumer(bound).close()  # the next owner takes over what a killed one left, and clears it away


@pytest.mark.parametrize("transport", ["frames"], indirect=True)
def test_what_a_killed_producer_had_sent_waits_for_who_takes_it_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that have come in frames are there to be taken, however long their producer has been dead."""
    monkeypatch.setattr(conversation, "REPEAT", 0.05)  # seconds between two looks who is there, while messages come
    with tp.Consumer("seldom") as consumer, Child() as child:
        child.call(children.open_producer, consumer.endpoint)
        child.begin(children.put_numbers, 0, 50)
        assert consumer.get(PATIENCE) == ("", 0)
        child.result()
        with contextlib.suppress(tp.Full):
            child.call(children.flush, 0.1)  # what ZeroMQ's thread had not sent dies with it
        child.kill()
        got = []
        for seconds in (0.1, 1.1):
            time.sleep(seconds)
            got.append(consumer.get(PATIENCE)[1])
        got += [consumer.get(PATIENCE)[1] for _ in range(47)]
        assert got == list(range(1, 50))
        with pytest.raises(tp.PeerLost, match="vanished"):
            consumer.get(PATIENCE)


def test_the_death_of_one_producer_is_no_matter_of_the_others() -> None:
    """The others' messages go on in order; PeerLost comes at the end, when all are gone."""
    with tp.Consumer("crowd") as consumer, Child() as dies, Child() as lives:
        for child in (dies, lives):
            child.call(children.open_producer, "crowd")
        dies.begin(children.put, "from the dead")
        assert consumer.get(PATIENCE) == "from the dead"
        dies.result()
        lives.begin(children.put_numbers_and_close, "alive", 300)
        got = [consumer.get(PATIENCE) for _ in range(100)]
        dies.kill()
        got += [consumer.get(PATIENCE) for _ in range(200)]
        assert got == [("alive", number) for number in range(300)]
        with pytest.raises(tp.PeerLost, match=rf"pid {dies.pid} "):
            consumer.get(PATIENCE)
        lives.result()


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_consumer_that_binds_is_killed_and_replaced(scheme: str, free_port: int) -> None:
    """On the same address another one comes, the producer finds it by itself, and what was lost is told."""
    endpoint = "again" if scheme == "ipc" else f"tcp://127.0.0.1:{free_port}"
    with Child() as first, Child() as second, tp.Producer(endpoint, linger=0.0) as producer:
        first.call(children.open_consumer, endpoint)
        _attached(producer, first)
        for number in range(3):
            producer.put(number, PATIENCE)
        first.kill()
        second.call(children.open_consumer, endpoint)
        second.begin(children.take, 3)
        for number in range(3):
            _put_whatever_happens(producer, number)
        assert second.result() == [0, 1, 2]
        with pytest.raises(tp.PeerLost, match=rf"consumer pid {first.pid} .* with 3 messages"):
            producer.flush(PATIENCE)
        assert second.call(children.consumer_statistics).messages == 3


def _put_whatever_happens(producer: tp.Producer, tree: Any) -> None:
    """Put, once the old consumer was seen to be gone: until then a put goes to it, and is lost with it."""
    wait_until(lambda: producer.statistics().lost)
    producer.put(tree, PATIENCE)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_producer_that_binds_is_killed_and_replaced(scheme: str, free_port: int) -> None:
    """A consumer that stays connected gets the messages of the next producer on that address."""
    endpoint = "again" if scheme == "ipc" else f"tcp://127.0.0.1:{free_port}"
    with Child() as first, Child() as second, tp.Consumer(endpoint, bind=False) as consumer:
        first.call(children.open_producer, endpoint, bind=True)
        first.begin(children.put, "first")
        assert consumer.get(PATIENCE) == "first"
        first.result()
        first.kill()
        with pytest.raises(tp.PeerLost, match=f"pid {first.pid}"):
            consumer.get(PATIENCE)
        second.call(children.open_producer, endpoint, bind=True)
        second.begin(children.put, "second")
        assert consumer.get(PATIENCE) == "second"
        second.result()
        second.call(children.flush)  # it knows by now, and has nothing to wait for when it closes


@ONLY_SHARED_MEMORY  # of frames, what ZeroMQ's thread had not sent dies with it: there it takes flush
@pytest.mark.parametrize("producer_binds", [False, True])
def test_what_was_put_into_shared_memory_survives_its_producer(transport: str, producer_binds: bool) -> None:
    """Once put returned, a SIGKILL takes nothing back: all arrive, in order, and then the loss is told."""
    with Child() as child:
        if producer_binds:
            consumer = tp.Consumer(child.call(children.open_producer, "lasting", bind=True), bind=False)
        else:
            consumer = tp.Consumer("lasting")
            child.call(children.open_producer, "lasting")
        with consumer:
            child.begin(children.put, "met")
            assert consumer.get(PATIENCE) == "met"
            child.result()
            child.call(children.put_batches, 20)
            child.kill()
            for step in range(20):
                zoo.same(children.batch(step), consumer.get(PATIENCE))
            with pytest.raises(tp.PeerLost, match=f"pid {child.pid} "):
                consumer.get(PATIENCE)
    tp.Consumer("lasting").close()


@pytest.mark.slow
@ONLY_SHARED_MEMORY  # frames are nobody's but the receiver's
def test_what_a_dead_consumer_held_comes_back(transport: str) -> None:
    """Consumers that are killed with leases and with messages in their queues do not use up the memory."""
    with tp.Producer("generations", bind=True, linger=0.0) as producer:
        for _ in range(4):
            with Child() as child:
                child.call(children.open_consumer, producer.endpoint, bind=False)
                child.begin(children.hold, 5)
                for step in range(10):
                    producer.put(torch.full((1 << 20,), step, dtype=torch.uint8), PATIENCE)
                child.result()
                (attachment,) = rendezvous._own.values()  # from here on it stays
                child.kill()
                with pytest.raises(tp.PeerLost, match="with 5 messages"):
                    producer.flush(PATIENCE)
        assert attachment.arena.segment.resident() < 16 << 20


@pytest.mark.parametrize("consumer_binds", [False, True])
def test_a_producer_is_killed_in_full_swing(transport: str, consumer_binds: bool) -> None:
    """Wherever the kill falls, what arrives is 0, 1, 2, ... without a gap or a repetition, and then PeerLost."""
    generator = random.Random(consumer_binds)
    for _ in range(4):
        with Child() as child:
            if consumer_binds:
                consumer = tp.Consumer("swinging")
                child.call(children.open_producer, "swinging")
            else:
                consumer = tp.Consumer(child.call(children.open_producer, "swinging", bind=True), bind=False)
            with consumer:
                child.begin(children.put_numbers, 0, 1_000_000)
                assert consumer.get(PATIENCE) == ("", 0)
                fatal, got = generator.randrange(2, 500), 1
                while got < fatal:
                    assert consumer.get(PATIENCE) == ("", got)
                    got += 1
                child.kill()
                with pytest.raises(tp.PeerLost):
                    assert all(message == ("", got + more) for more, message in enumerate(iter(consumer.get, None)))
    tp.Consumer("swinging").close()


def test_a_consumer_is_killed_in_full_swing(transport: str) -> None:
    """Wherever the kill falls, the next consumer gets what is put from then on, and maxsize is as exact as before."""
    generator = random.Random(1)
    with tp.Producer("swung", bind=True, maxsize=8, linger=0.0) as producer:
        for _ in range(4):
            with Child() as child:
                child.call(children.open_consumer, "swung", bind=False)
                child.begin(children.take_all)
                for number in range(generator.randrange(1, 500)):
                    producer.put(number, PATIENCE)
                child.kill()
                with contextlib.suppress(tp.PeerLost):
                    producer.flush(PATIENCE)
                assert producer.statistics().in_flight == 0
                _alone(producer)
        with Child() as child:
            child.call(children.open_consumer, "swung", bind=False)
            _attached(producer, child)
            for number in range(8):
                producer.put(number, PATIENCE)
            with pytest.raises(tp.Full):
                producer.put_nowait(8)
            assert child.call(children.take, 8) == list(range(8))
