"""Consumer: what get hands over, when it waits, how it ends, and its descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import select
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import children
import pytest
import torch
import zoo
from children import PATIENCE, Child, in_thread, wait_until
from inside import conversation_of, is_in_use, is_in_use_here, leases_here, side_of

import tensorpipe_ipc as tp

pytestmark = [pytest.mark.limit(20), pytest.mark.usefixtures("transport")]
MARGIN = 1.0  # seconds beyond a timeout and its documented 50 ms, on a machine that does other things too
SMALL, LARGE = (10, 10), (1000, 1000)


@pytest.fixture
def consumer() -> Iterator[tp.Consumer]:
    """A consumer that binds."""
    with tp.Consumer("consumer") as consumer:
        yield consumer


def _through(consumer: tp.Consumer, *trees: Any) -> list[Any]:
    """Put trees by a producer of this process, which then leaves. Return the trees that arrive."""

    def put() -> None:
        with tp.Producer(consumer.endpoint) as producer:
            for tree in trees:
                producer.put(tree, PATIENCE)
            producer.flush(PATIENCE)

    putting = in_thread(put)
    got = [consumer.get(PATIENCE) for _ in trees]
    putting()
    return got


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("copy", ["auto", True, False])
def test_what_arrives_belongs_to_the_receiver(copy: bool | str, shape: tuple[int, ...]) -> None:
    """A received tensor may be written to, and stays what it is when both ends are closed and gone."""
    with tp.Consumer("lasting", copy=copy) as consumer:
        (got,) = _through(consumer, zoo.bits(torch.int32, *shape))
    del consumer
    gc.collect()
    assert torch.equal(got, zoo.bits(torch.int32, *shape))
    got += 1
    assert torch.equal(got, zoo.bits(torch.int32, *shape) + 1)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_what_arrived_outlives_the_producers_process(scheme: str) -> None:
    """Tensors that are held stay unchanged when the process that made them is killed and the consumer is closed."""
    with Child() as child:
        with tp.Consumer("outlived" if scheme == "ipc" else "tcp://127.0.0.1:0") as consumer:
            child.call(children.open_producer, consumer.endpoint)
            child.begin(children.put_and_overwrite, LARGE, 4, None)
            held = [consumer.get(PATIENCE) for _ in range(4)]
            child.result()
            child.kill()
        for number, tensor in enumerate(held):
            assert torch.equal(tensor, torch.full(LARGE, float(number)))


@pytest.mark.parametrize("copy", ["auto", True, False])
@pytest.mark.parametrize("endpoint", ["ipc", "inproc://aliases"])
def test_messages_do_not_alias_each_other(endpoint: str, copy: bool | str) -> None:
    """Each message that is held has memory of its own: writing to one changes no other, nor what the producer holds."""
    with tp.Consumer("aliases" if endpoint == "ipc" else endpoint, copy=copy) as consumer:
        sent = torch.arange(1_000_000)
        got = _through(consumer, sent, sent, sent)
    got[0].fill_(-1)
    assert torch.equal(got[1], sent)
    assert torch.equal(got[2], torch.arange(1_000_000))
    assert len({tensor.untyped_storage().data_ptr() for tensor in [sent, *got]}) == 4


def test_shared_storage_stays_shared(consumer: tp.Consumer) -> None:
    """Two views of one storage in one message arrive as two views of one storage."""
    base = torch.arange(10.0)
    (got,) = _through(consumer, {"head": base[:5], "all": base})
    got["head"][0] = 7
    assert got["all"][0] == 7


def test_get_waits_and_no_longer(consumer: tp.Consumer) -> None:
    """get raises Empty when its time is over, and says who is expected; a timeout of 0 does not wait."""
    for timeout in (0.0, 0.2):
        started = time.monotonic()
        with pytest.raises(tp.Empty, match="no message in time: no producer has come"):
            consumer.get(timeout)
        assert timeout <= time.monotonic() - started < timeout + 0.05 + MARGIN
    with Child() as child:
        child.call(children.open_producer, consumer.endpoint)
        child.begin(children.put, 1)
        assert consumer.get(PATIENCE) == 1
        child.result()
        with pytest.raises(tp.Empty, match=f"producer pid {child.pid} on .*present"):
            consumer.get(0.05)
        child.begin(children.close)
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        child.result()


def test_messages_wait_while_nobody_takes_them(consumer: tp.Consumer) -> None:
    """A consumer gets messages that were put before the producer left, in order. Then the stream ends."""
    with Child() as child:
        child.call(children.open_producer, consumer.endpoint, linger=0.0)
        child.begin(children.put_numbers, 0, 30)
        assert consumer.get(PATIENCE) == ("", 0)
        child.result()
        child.call(children.abandon)
        assert list(consumer) == [("", number) for number in range(1, 30)]


@pytest.mark.parametrize(("timeout", "error"), children.BAD_TIMEOUTS)
def test_timeouts_out_of_range(consumer: tp.Consumer, timeout: Any, error: type[Exception]) -> None:
    """A timeout is None or a number of seconds from 0 up; the text says so."""
    with pytest.raises(error, match="timeout=.*seconds"):
        consumer.get(timeout)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"maxsize": 0}, ValueError, "maxsize=0"),
        ({"maxsize": -1}, ValueError, "maxsize=-1"),
        ({"maxsize": 1.5}, TypeError, "maxsize=1.5 is a float"),
        ({"maxsize": True}, TypeError, "maxsize=True is a bool"),
        ({"maxsize": 1 << 64}, ValueError, "give a whole number of 1 to 2,147,483,647"),
        ({"bind": "no"}, TypeError, "bind='no' is a str; give True or False"),
        ({"bind": None}, TypeError, "bind=None is a NoneType"),
        ({"accept": "raw"}, TypeError, r"accept='raw' is a str; give a list of names: \['raw'\]"),
        ({"security": "key"}, TypeError, "security='key' is a str; give a tensorpipe_ipc.Curve"),
        ({"copy": "sometimes"}, ValueError, "copy='sometimes': give 'auto', True or False"),
        ({"copy": 1}, ValueError, "copy=1"),
        ({"copy": None}, ValueError, "copy=None"),
        ({"accept": ["raw", "pickle"]}, tp.UnknownSerializer, r"unknown serializer 'pickle' \(known: numpy, raw"),
        ({"accept": [3]}, tp.UnknownSerializer, "unknown serializer 3"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """A wrong option is named with its value, and nothing is left open."""
    with pytest.raises(error, match=text):
        tp.Consumer("options", **options)


def test_after_close_everything_is_an_error() -> None:
    """get, fileno and iterating say that the end is closed; closing again and leaving a with do nothing."""
    with tp.Consumer("over") as consumer:
        consumer.close()
        consumer.close()
        for use in (consumer.get, consumer.get_nowait, consumer.fileno, lambda: list(consumer)):
            with pytest.raises(tp.Closed, match=r"Consumer on ipc://.*over.sock is closed"):
                use()
        assert "closed" in repr(consumer)
        assert consumer.statistics().messages == 0


def test_two_threads_are_one_too_many(consumer: tp.Consumer) -> None:
    """While one thread waits in get, another one's get is Busy at once, and disturbs nothing."""
    getting = in_thread(lambda: consumer.get(PATIENCE))
    wait_until(lambda: is_in_use(consumer))
    with pytest.raises(tp.Busy, match="in use by another thread"):
        consumer.get_nowait()
    with tp.Producer(consumer.endpoint) as producer:
        producer.put("for the first", PATIENCE)
        assert getting() == "for the first"


def test_a_consumer_that_leaves_says_so() -> None:
    """A consumer that closes with messages that it has not taken: the producer counts them as lost, and flush tells."""
    with tp.Producer("left", bind=True) as producer:
        consumer = tp.Consumer("left", bind=False)
        putting = in_thread(lambda: producer.put(0, PATIENCE))
        assert consumer.get(PATIENCE) == 0
        putting()
        for number in range(5):
            producer.put(number, PATIENCE)
        assert consumer.get(PATIENCE) == 0
        consumer.close()
        with pytest.raises(tp.PeerLost, match=r"consumer pid .* said goodbye .* with 4 messages that it had not taken"):
            producer.flush(PATIENCE)
        assert (producer.statistics().lost, producer.statistics().in_flight) == (4, 0)
        producer.flush(PATIENCE)


@pytest.mark.parametrize("endpoint", ["sleeps", "tcp://127.0.0.1:0"])
def test_a_get_that_waits_takes_no_processor_time(endpoint: str) -> None:
    """A waiting get sleeps until something comes, whichever end is attached and by whichever transport."""
    with tp.Consumer(endpoint) as consumer, tp.Producer(consumer.endpoint) as producer:
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        began = time.thread_time()
        with pytest.raises(tp.Empty):
            consumer.get(0.5)
        assert time.thread_time() - began < 0.1


# -- the descriptor


def _drain(consumer: tp.Consumer, into: list[Any]) -> None:
    with contextlib.suppress(tp.Empty):
        while True:
            into.append(consumer.get_nowait())


def _with_select(consumer: tp.Consumer, got: list[Any]) -> None:
    while True:
        ready, _, _ = select.select([consumer], [], [], PATIENCE)
        assert ready, "the descriptor stays silent"
        _drain(consumer, got)


def _one_at_a_time(consumer: tp.Consumer, got: list[Any]) -> None:
    poll = select.poll()
    poll.register(consumer, select.POLLIN)
    while True:
        assert poll.poll(PATIENCE * 1000), "the descriptor stays silent"
        with contextlib.suppress(tp.Empty):
            got.append(consumer.get_nowait())


def _with_asyncio(consumer: tp.Consumer, got: list[Any]) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def readable() -> None:
            try:
                _drain(consumer, got)
            except tp.EndOfStream as end:
                loop.remove_reader(consumer)
                ended.set_exception(end)

        loop.add_reader(consumer, readable)
        await asyncio.wait_for(ended, PATIENCE)

    asyncio.run(run())


@pytest.mark.parametrize("bind", [True, False])
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
@pytest.mark.parametrize("watch", [_with_select, _one_at_a_time, _with_asyncio])
def test_the_descriptor_tells_of_every_message(
    watch: Callable[[tp.Consumer, list[Any]], None], scheme: str, bind: bool
) -> None:
    """A program that waits on the descriptor alone sees every message and the end of the stream."""
    endpoint = "watched" if scheme == "ipc" else "tcp://127.0.0.1:0"
    with Child() as child, children.consumer_of(child, endpoint, bind=bind) as consumer:
        child.begin(children.put_numbers_and_close, "", 200)
        got: list[Any] = []
        with pytest.raises(tp.EndOfStream):
            watch(consumer, got)
        child.result()
        assert got == [("", number) for number in range(200)]


def test_the_descriptor_stays_readable_as_long_as_there_is_something(consumer: tp.Consumer) -> None:
    """It is level-triggered: asked again without a get, it says the same; and after the end of the stream it is silent."""
    with Child() as child:
        child.call(children.open_producer, consumer.endpoint)
        child.begin(children.put_numbers, 0, 10)
        assert consumer.get(PATIENCE) == ("", 0)
        child.result()
        for number in range(1, 10):
            for _ in range(3):
                assert select.select([consumer.fileno()], [], [], PATIENCE)[0]
            assert consumer.get_nowait() == ("", number)
        while select.select([consumer], [], [], 0)[0]:  # it may be readable once more for nothing
            with pytest.raises(tp.Empty):
                consumer.get_nowait()
        child.begin(children.close)
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        child.result()
        while select.select([consumer], [], [], 0.05)[0]:
            with pytest.raises(tp.Empty):
                consumer.get_nowait()


def test_a_binder_that_comes_while_get_is_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A binder may come after get has looked for it, and before get brings the descriptor up to date: that tells."""
    with tp.Consumer("late", bind=False) as consumer, Child() as child:
        greeting = conversation_of(consumer).greeting
        ensure = greeting.ensure

        def then_it_comes(timeout: float) -> bool:
            came = ensure(timeout)
            child.call(children.open_producer, consumer.endpoint, bind=True)
            return came

        consumer.fileno()
        with monkeypatch.context() as patch:
            patch.setattr(greeting, "ensure", then_it_comes)
            with pytest.raises(tp.Empty):
                consumer.get_nowait()
        child.begin(children.put_numbers_and_close, "", 2)
        got: list[Any] = []
        with pytest.raises(tp.EndOfStream):
            _one_at_a_time(consumer, got)
        child.result()
    assert got == [("", 0), ("", 1)]


@pytest.mark.parametrize("watch", [_with_select, _one_at_a_time])
def test_the_descriptor_tells_of_a_binder_that_died_and_of_the_next(
    watch: Callable[[tp.Consumer, list[Any]], None],
) -> None:
    """A connector that waits on its descriptor alone learns that its producer was killed, and meets the one after it."""
    with tp.Consumer("again", bind=False) as consumer:
        for _ in range(3):
            got: list[Any] = []
            with Child() as child:
                child.call(children.open_producer, consumer.endpoint, bind=True)
                child.begin(children.put, "before")
                while not got:
                    assert select.select([consumer], [], [], PATIENCE)[0]
                    with contextlib.suppress(tp.Empty, tp.EndOfStream):  # the one before has ended
                        got.append(consumer.get_nowait())
                child.result()
                child.kill()
                with pytest.raises(tp.PeerLost):
                    watch(consumer, got)
            assert got == ["before"]
    tp.Producer("again", bind=True).close()  # takes away the file of the one that was killed


def test_the_descriptor_is_the_same_and_closes_with_the_end(consumer: tp.Consumer) -> None:
    """Asked twice, it is one descriptor."""
    assert consumer.fileno() == consumer.fileno() >= 0


def test_a_message_that_an_exception_takes_away_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception at the end of get loses one message, which is counted, and get returns the next.

    No thread touches the socket beside another.
    """
    with tp.Consumer("kept") as consumer, tp.Producer("kept") as producer:
        held: list[bool] = []
        refresh = side_of(consumer).refresh

        def torn() -> None:
            held.append(is_in_use_here(consumer))
            if len(held) == 1:
                raise KeyboardInterrupt
            refresh()

        putting = in_thread(lambda: producer.put("lost", PATIENCE))
        monkeypatch.setattr(side_of(consumer), "refresh", torn)
        with pytest.raises(KeyboardInterrupt):
            consumer.get(PATIENCE)
        putting()
        putting = in_thread(lambda: producer.put("next", PATIENCE))
        assert consumer.get(PATIENCE) == "next"
        putting()
        assert consumer.statistics().lost == 1
        assert held
    assert all(held)


def test_a_message_that_is_refused_is_held_by_nobody() -> None:
    """Nor do the frames of its error's traceback hold it until the garbage collector comes."""

    def refused(consumer: tp.Consumer) -> weakref.ref[Exception]:
        try:
            consumer.get(PATIENCE)
        except tp.UnsupportedLeaf as error:
            return weakref.ref(error)
        raise AssertionError("it was taken")

    with tp.Consumer("refusing", as_numpy=True) as consumer, tp.Producer("refusing", linger=0) as producer:
        gc.disable()
        try:
            for _ in range(3):
                putting = in_thread(lambda: producer.put(torch.ones(LARGE, dtype=torch.bfloat16), PATIENCE))
                assert refused(consumer)() is None
                putting()
            assert not leases_here()
        finally:
            gc.enable()
