"""Whole exchanges: between processes and threads, whoever binds, whoever comes first, one or many on each side."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import children
import pytest
import torch
import zoo
from children import PATIENCE, Child, in_thread

import tensorpipe_ipc as tp
from tensorpipe_ipc.serializers import serializer_names

SERIALIZERS = ("numpy", "raw", "torch_save")
ENDPOINTS = {"ipc": "pipe", "tcp": "tcp://127.0.0.1:0", "inproc": "inproc://pipe"}
pytestmark = [pytest.mark.limit(15), pytest.mark.usefixtures("transport")]
BETWEEN_PROCESSES = [pytest.param(ENDPOINTS[scheme], id=scheme) for scheme in ("ipc", "tcp")]


def _see_the_zoo_arrive(consumer: tp.Consumer, serializer: str) -> list[str]:
    """Take every animal that the serializer does not refuse. Returns the names of those it does."""
    refused = [name for name in zoo.ZOO if zoo.refused_by(serializer, name)]
    for name in zoo.ZOO:
        if name not in refused:
            zoo.same(zoo.make(name), consumer.get(PATIENCE), name, strides=serializer != "numpy")
    return refused


def test_the_zoo_is_tried_with_every_serializer() -> None:
    """No built-in serializer is missing from the tables here."""
    assert set(SERIALIZERS) <= set(serializer_names())


@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_the_zoo_between_two_processes(endpoint: str, serializer: str) -> None:
    """Every kind of tree comes out of a socket bit for bit, or the serializer refuses it by name."""
    with tp.Consumer(endpoint, accept=[serializer]) as consumer, Child() as child:
        child.call(children.open_producer, consumer.endpoint, serializer=serializer)
        child.begin(children.put_zoo, serializer)
        refused = _see_the_zoo_arrive(consumer, serializer)
        assert child.result() == refused


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_the_zoo_between_two_threads(serializer: str) -> None:
    """Within a process, through inproc, the same."""
    ends = children.Ends()
    with (
        tp.Consumer("inproc://zoo", accept=[serializer]) as consumer,
        tp.Producer("inproc://zoo", serializer=serializer) as ends.producer,
    ):
        putting = in_thread(lambda: children.put_zoo(ends, serializer))
        refused = _see_the_zoo_arrive(consumer, serializer)
        assert putting() == refused


@pytest.mark.parametrize("endpoint", BETWEEN_PROCESSES)
@pytest.mark.parametrize("producer_binds", [False, True])
def test_either_side_binds(endpoint: str, producer_binds: bool) -> None:
    """A producer may have the address as well as a consumer, and tells the port that was chosen for it."""
    with Child() as child:
        if producer_binds:
            bound = child.call(children.open_producer, endpoint, bind=True)
            consumer = tp.Consumer(bound, bind=False)
        else:
            consumer = tp.Consumer(endpoint)
            child.call(children.open_producer, consumer.endpoint)
        with consumer:
            assert not consumer.endpoint.endswith(":0")
            child.begin(children.put_numbers, 0, 100)
            assert [consumer.get(PATIENCE) for _ in range(100)] == [("", number) for number in range(100)]
            child.result()
            child.call(children.close)
            with pytest.raises(tp.EndOfStream):
                consumer.get(PATIENCE)


@pytest.mark.parametrize("producer_binds", [False, True])
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_connector_may_come_first(scheme: str, producer_binds: bool, free_port: int) -> None:
    """A connector that finds nobody waits, says so, and goes on when its binder comes."""
    endpoint = "late" if scheme == "ipc" else f"tcp://127.0.0.1:{free_port}"
    with Child() as child, contextlib.ExitStack() as stack:
        if producer_binds:
            consumer = stack.enter_context(tp.Consumer(endpoint, bind=False))
            with pytest.raises(tp.Empty, match="no producer has come"):
                consumer.get(0.5)
            child.call(children.open_producer, endpoint, bind=True)
            child.begin(children.put, "first")
        else:
            child.call(children.open_producer, endpoint)
            with pytest.raises(tp.Full, match="no consumer has come"):
                child.call(children.put, "too early", timeout=0.5)
            child.begin(children.put, "first")
            consumer = stack.enter_context(tp.Consumer(endpoint))
        assert consumer.get(PATIENCE) == "first"
        child.result()


def test_a_connector_may_come_first_inproc() -> None:
    """Within a process too."""
    with tp.Producer("inproc://late") as producer:
        putting = in_thread(lambda: producer.put("first", PATIENCE))
        with tp.Consumer("inproc://late") as consumer:
            assert consumer.get(PATIENCE) == "first"
            putting()


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
@pytest.mark.parametrize("producer_binds", [False, True])
def test_a_connector_that_never_waits_comes_in_too(endpoint: str, producer_binds: bool) -> None:
    """put_nowait and get_nowait, tried again and again, are enough for two ends to meet."""
    with contextlib.ExitStack() as stack:
        if producer_binds:
            producer = stack.enter_context(tp.Producer(endpoint, bind=True))
            consumer = stack.enter_context(tp.Consumer(producer.endpoint, bind=False))
        else:
            consumer = stack.enter_context(tp.Consumer(endpoint))
            producer = stack.enter_context(tp.Producer(consumer.endpoint))
        put = False
        while True:
            with contextlib.suppress(tp.Full):
                if not put:
                    producer.put_nowait("met")
                    put = True
            with contextlib.suppress(tp.Empty):
                assert consumer.get_nowait() == "met"
                break


def test_many_producers_to_one_consumer() -> None:
    """Each producer's messages come in its order, all of them once, and the stream ends after the last goodbye."""
    with tp.Consumer("many", producers=4) as consumer, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Child()) for _ in range(4)]
        for name, child in enumerate(crowd):
            child.call(children.open_producer, consumer.endpoint)
            child.begin(children.put_numbers_and_close, str(name), 500)
        got: dict[str, list[int]] = {str(name): [] for name in range(4)}
        for name, number in consumer:
            got[name].append(number)
        assert got == {str(name): list(range(500)) for name in range(4)}
        for child in crowd:
            child.result()


@pytest.mark.parametrize("producer_binds", [False, True])
def test_one_producer_to_many_consumers(producer_binds: bool) -> None:
    """Each message goes to one consumer, all get some while all are free, and each one's come in order."""
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Child()) for _ in range(3 if producer_binds else 1)]
        if producer_binds:
            producer = stack.enter_context(tp.Producer("share", bind=True, maxsize=6))
            for child in crowd:
                child.call(children.open_consumer, "share", bind=False)
        else:
            crowd[0].call(children.open_consumer, "share")
            producer = stack.enter_context(tp.Producer("share", maxsize=6))
        for child in crowd:
            child.begin(children.take_all)
        while len(producer.statistics().peers) < len(crowd):
            with contextlib.suppress(tp.Full):
                producer.put(-1, 0)
        for number in range(300):
            producer.put(number, PATIENCE)
        producer.flush(PATIENCE)
        producer.close()
        shares = [[number for number in child.result() if number >= 0] for child in crowd]
        assert Counter(number for share in shares for number in share) == Counter(range(300))
        assert all(share and share == sorted(share) for share in shares), shares


def test_producers_that_come_and_go() -> None:
    """One consumer outlives its producers: each stream ends, and the next begins."""
    with tp.Consumer("station") as consumer:
        for name in ("one", "two", "three"):
            with Child() as child:
                child.call(children.open_producer, "station")
                child.begin(children.put_numbers_and_close, name, 10)
                assert list(consumer) == [(name, number) for number in range(10)]
                child.result()
        assert consumer.statistics().messages == 30
        assert consumer.statistics().peers == ()


def test_the_stream_goes_on_while_one_producer_is_left() -> None:
    """The goodbye of one of two producers does not end the stream."""
    with tp.Consumer("two") as consumer, tp.Producer("two") as stays:
        staying = in_thread(lambda: stays.put("early", PATIENCE))
        assert consumer.get(PATIENCE) == "early"
        staying()
        with Child() as child:
            child.call(children.open_producer, "two")
            child.begin(children.put_numbers_and_close, "goes", 1)
            assert consumer.get(PATIENCE) == ("goes", 0)
            child.result()
        with pytest.raises(tp.Empty):
            consumer.get(0.3)
        stays.put("late", PATIENCE)
        assert consumer.get(PATIENCE) == "late"


def test_the_end_of_a_stream_is_said_once() -> None:
    """After the last goodbye one get says so; the next one waits for the next stream, and takes what comes in that."""
    with tp.Consumer("ended") as consumer:
        with tp.Producer("ended") as producer:
            putting = in_thread(lambda: producer.put(1, PATIENCE))
            assert consumer.get(PATIENCE) == 1
            putting()
        with pytest.raises(tp.EndOfStream, match="every producer has said goodbye"):
            consumer.get(PATIENCE)
        with pytest.raises(tp.Empty, match="no producer is attached: .* said goodbye"):
            consumer.get(0.05)
        putting = in_thread(lambda: children.put_and_leave("ended", 2))
        assert list(consumer) == [2]
        putting()


def test_a_batch_of_a_training_step() -> None:
    """A training batch from another process arrives equal and writable: a dict of many images, labels and a step."""
    with tp.Consumer("training") as consumer, Child() as child:
        child.call(children.open_producer, "training")
        child.begin(children.put_batches, 5)
        for step in range(5):
            batch: Any = consumer.get(PATIENCE)
            zoo.same(children.batch(step), batch)
            batch["image"].add_(1)
        child.result()
    assert int(torch.count_nonzero(batch["image"] != children.batch(4)["image"] + 1)) == 0


@pytest.mark.parametrize("end", [tp.Consumer, tp.Producer])
def test_an_end_that_was_closed_is_not_entered(end: Any) -> None:
    """``with`` says so at once, and not the first put or get in it."""
    once = end("closed")
    with once:
        pass
    with pytest.raises(tp.Closed, match="is closed"):
        once.__enter__()
