"""Over a bad line: connections that break in mid-stream, and partitions each way. Nothing is lost, doubled or out of order."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import children
import pytest
import torch
import zmq
from children import PATIENCE, Child, in_thread
from proxy import Proxy
from secured import binders, connectors, make_keys

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints import peers
from tensorpipe_ipc.endpoints.greeting import Greeting
from tensorpipe_ipc.endpoints.presence import Sight
from tensorpipe_ipc.zeromq import zmq_sockets
from tensorpipe_ipc.zeromq.addresses import runtime_folder
from tests.partitions import campaign

pytestmark = pytest.mark.limit(30)
NOTICED = 3.0  # seconds until a partition is noticed
RESUMED = 1.0  # seconds after its end until messages go on
MARGIN = 1.0  # seconds, on a machine that does other things too
LARGE = 3 << 20  # bytes: a message that goes in pieces


class Line(NamedTuple):
    """Two ends that have met, and the line between them."""

    producer: tp.Producer
    consumer: tp.Consumer
    proxy: Proxy


@pytest.fixture(params=[False, True], ids=["consumer binds", "producer binds"])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    """A producer and a consumer that know each other."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        if request.param:
            producer = enter(tp.Producer("tcp://127.0.0.1:0", bind=True, linger=0, shared_memory="off"))
            proxy = enter(Proxy(int(producer.endpoint.rpartition(":")[2])))
            consumer = enter(tp.Consumer(proxy.endpoint, bind=False))
        else:
            consumer = enter(tp.Consumer("tcp://127.0.0.1:0", shared_memory="off"))
            proxy = enter(Proxy(int(consumer.endpoint.rpartition(":")[2])))
            producer = enter(tp.Producer(proxy.endpoint, linger=0))
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        yield Line(producer, consumer, proxy)
        for end in (consumer, producer):  # while there is a line to say goodbye by
            end.close()


def _message(number: int) -> Any:
    """Small ones; every fifth has a frame of its own; every tenth goes in pieces, one of two with a hundred small leaves."""
    size = LARGE + number if number % 10 == 0 else 100_000 if number % 5 == 0 else 10
    sizes = [size, 70_001, *([2_000] * 100)] if number % 20 == 0 else [size]
    return number, *(torch.full((size,), number % 251, dtype=torch.uint8) for size in sizes)


def _same(message: Any, number: int) -> None:
    assert message[0] == number
    for one, other in zip(message[1:], _message(number)[1:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_connections_break_in_mid_stream(line: Line) -> None:
    """Each message comes once, in order and whole, though the connection breaks twenty times, with FIN and with RST."""
    count = 160

    def put() -> None:
        for number in range(count):
            line.producer.put(_message(number), PATIENCE)
        line.producer.flush(PATIENCE)
        flushed.set()

    flushed = threading.Event()
    putting = in_thread(put)
    for number in range(count):
        _same(line.consumer.get(PATIENCE), number)
        if number % 8 == 4:
            line.proxy.cut(reset=number % 16 == 4)
    while not flushed.is_set():  # what it said of the last ones may have been cut off too: a get says it again
        with pytest.raises(tp.Empty):
            line.consumer.get(0.05)
    putting()
    sent, got = line.producer.statistics(), line.consumer.statistics()
    assert (sent.lost, sent.in_flight, got.lost, got.messages) == (0, 0, 0, count + 1)
    assert sent.resent > 0
    assert got.duplicates <= sent.resent


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("there",), ("back",)], ids=["from the connector", "to the connector"])
def test_a_partition_is_noticed_and_heals(line: Line, ways: tuple[str, ...]) -> None:
    """Each end names the other within 3 s, also where one direction still works; when it heals messages go on."""
    line.proxy.silence(*ways)
    began, taken = time.monotonic(), []
    line.producer.put(1, PATIENCE)

    def empty() -> str:
        try:
            taken.append(line.consumer.get(0.05))
        except tp.Empty as raised:
            return str(raised)
        return ""

    noticing = in_thread(lambda: _noticed(empty, began))
    # In the thread that put: in another one these figures are what that one has seen.
    for seconds in (_noticed(lambda: str(line.producer.statistics().peers), began), noticing()):
        assert seconds < NOTICED + MARGIN
    with pytest.raises(tp.Full, match=r"no room in time: consumer pid .* \(present, not heard of for \d\.\d s\)"):
        line.producer.put(2, 0)
    line.proxy.heal()
    healed = time.monotonic()
    putting = in_thread(lambda: (line.producer.put(2, PATIENCE), line.producer.flush(PATIENCE)))
    while len(taken) < 2:
        taken.append(line.consumer.get(PATIENCE))
    assert time.monotonic() - healed < RESUMED + MARGIN
    putting()
    assert taken == [1, 2]
    assert line.producer.statistics().lost == line.consumer.statistics().lost == 0


def _noticed(says: Callable[[], str], began: float) -> float:
    """Ask until what is said says that the other end is away. How long that took."""
    while not re.search(r"not heard of for \d+\.\d s", says()):
        assert time.monotonic() - began < PATIENCE
        time.sleep(0.005)
    return time.monotonic() - began


@pytest.mark.kills
@pytest.mark.limit(1200)
def test_a_thousand_disconnects_and_a_hundred_partitions() -> None:
    """``python -m tests.partitions``: all that it promises holds."""
    done = campaign(disconnects=1000, partitions=100, seed=7)
    assert (done.disconnects, done.partitions) == (1000, 100)


@pytest.mark.slow
@pytest.mark.parametrize("takes_first", [True, False], ids=["one was taken before", "none was taken before"])
def test_a_line_that_breaks_while_two_ends_with_keys_agree_on_a_queue_ends_nothing(
    takes_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer claimed a queue, its producer put into it, and the line broke before the producer's next WELCOME came."""
    keys = make_keys(tmp_path / "keys")
    with tp.Producer("tcp://127.0.0.1:0", bind=True, security=binders(keys)) as producer:
        with Proxy(int(producer.endpoint.rpartition(":")[2])) as line:
            _silence_at_a_claim(line, monkeypatch)
            with tp.Consumer(line.endpoint, bind=False, security=connectors(keys)) as consumer:
                putting = in_thread(lambda: [producer.put(number, PATIENCE) for number in range(2)])
                got = []
                if takes_first:
                    got.append(consumer.get(PATIENCE))
                else:
                    _meet(consumer, lambda: producer.statistics().messages == 2)
                putting()
                line.cut(reset=True)
                got += [consumer.get(PATIENCE) for _ in range(2 - len(got))]
                assert got == [0, 1]
                with pytest.raises(tp.Empty):
                    consumer.get(1.5)
                line.heal()
                producer.put(2, PATIENCE)
                assert consumer.get(PATIENCE) == 2
                producer.flush(PATIENCE)
                assert producer.statistics().lost == consumer.statistics().lost == 0
                producer.close()
                with pytest.raises(tp.EndOfStream):
                    consumer.get(PATIENCE)


@contextlib.contextmanager
def _out_of_sight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Child, Proxy, tp.Consumer]]:
    """Have a consumer claim a queue of a producer's in a child, and hear nothing more of it by the line.

    The runtime folder was made anew between their openings, so that nothing but the line tells of the producer.
    """
    keys = make_keys(folder / "keys")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        Child() as child,
        Proxy(port) as line,
        tp.Consumer(line.endpoint, bind=False, security=connectors(keys), peer_timeout=1.0) as consumer,
    ):
        _silence_at_a_claim(line, monkeypatch)
        shutil.rmtree(runtime_folder())
        os.mkdir(runtime_folder(), 0o700)
        child.call(_open_binder, f"tcp://127.0.0.1:{port}", str(keys))
        yield child, line, consumer
    for name in os.listdir(runtime_folder()):  # the next end that binds there would, of one that was killed
        os.unlink(os.path.join(runtime_folder(), name))


@pytest.mark.slow
@pytest.mark.parametrize("takes", [2, 0], ids=["both were taken", "none was taken"])
def test_a_producer_out_of_sight_that_dies_while_two_ends_with_keys_agree_on_a_queue_is_told(
    takes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages come, those too that were not taken when it died."""
    with _out_of_sight(tmp_path, monkeypatch) as (child, line, consumer):
        child.begin(children.put, 0, 1)
        got = [consumer.get(PATIENCE) for _ in range(takes)]
        if not takes:
            _meet(consumer, lambda: consumer.statistics().peers and _has_put(consumer))
        child.kill()
        line.cut(reset=True)
        got += [consumer.get(PATIENCE) for _ in range(2 - takes)]
        assert got == [0, 1]
        with pytest.raises(tp.PeerLost, match="vanished"):
            consumer.get(PATIENCE)
        assert consumer.statistics().vanished == 1


@pytest.mark.slow
def test_a_producer_out_of_sight_of_whose_message_nothing_could_be_made_is_told_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was dropped, as there was no memory for it, and the line broke before a further word came."""

    def make(*_: Any) -> Any:
        raise MemoryError

    with _out_of_sight(tmp_path, monkeypatch) as (child, line, consumer):
        child.begin(children.put, 0)
        with monkeypatch.context() as short:
            short.setattr(tp.Consumer, "_decode_block", make)
            while not consumer.statistics().rejected:
                with pytest.raises(MemoryError):
                    consumer.get(PATIENCE)
        child.kill()
        line.cut(reset=True)
        with pytest.raises(tp.PeerLost, match="vanished"):
            consumer.get(PATIENCE)
        assert consumer.statistics().vanished == 1


def _open_binder(ends: children.Ends, endpoint: str, keys: str) -> None:
    children.open_producer(ends, endpoint, bind=True, security=binders(Path(keys)))


def _has_put(consumer: tp.Consumer) -> bool:
    queues = [peer.queue for peer in consumer._receiver.peers.values() if peer.queue is not None]
    return any(queue.tickets.unread() == 2 for queue in queues)


@pytest.mark.slow
def test_a_line_that_breaks_while_a_producer_with_keys_claims_a_queue_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that binds knows whose the queue is, and the line breaks before its WELCOME says so."""
    keys = make_keys(tmp_path / "keys")
    with tp.Consumer("tcp://127.0.0.1:0", security=binders(keys)) as consumer:
        with Proxy(int(consumer.endpoint.rpartition(":")[2])) as line:
            _silence_at_a_claim(line, monkeypatch)
            with tp.Producer(line.endpoint, security=connectors(keys)) as producer:
                putting = in_thread(lambda: producer.put("first", PATIENCE))
                deadline = time.monotonic() + PATIENCE
                while consumer.statistics().transport != "shared memory":
                    assert time.monotonic() < deadline
                    with pytest.raises(tp.Empty):
                        consumer.get(0.01)
                line.cut(reset=True)
                with pytest.raises(tp.Empty):
                    consumer.get(1.5)
                line.heal()
                assert consumer.get(PATIENCE) == "first"
                putting()
                producer.flush(PATIENCE)
                assert producer.statistics().lost == consumer.statistics().lost == 0
            with pytest.raises(tp.EndOfStream):
                consumer.get(PATIENCE)


def _silence_at_a_claim(line: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a line bring nothing to its connector from the moment on at which that claims a queue."""
    claim_of = Greeting.claim_of

    def claim_behind_a_partition(greeting: Greeting, peer: Any) -> None:
        if not peer.missed:
            line.silence("back")
        claim_of(greeting, peer)

    monkeypatch.setattr(Greeting, "claim_of", claim_behind_a_partition)


def _meet(consumer: tp.Consumer, until: Callable[[], object]) -> None:
    """Have a consumer hear its producer, and take nothing, until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline
        assert not consumer._receiver.pump(0.01)


@pytest.mark.slow
def test_the_silence_that_is_told_is_all_that_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that before the connection was given up, and of one who says nothing."""
    stock = zmq_sockets.heartbeats
    longer = {zmq.HEARTBEAT_TIMEOUT: 4000, zmq.HEARTBEAT_TTL: 4000, zmq.TCP_MAXRT: 9000}
    monkeypatch.setattr(zmq_sockets, "heartbeats", lambda **more: {**stock(**more), **longer})
    monkeypatch.setattr(peers.Peers, "sight_of", lambda *_: Sight(why_not="as if it were another host"))
    with (
        tp.Consumer("tcp://127.0.0.1:0", shared_memory="off", peer_timeout=6) as consumer,
        Proxy(int(consumer.endpoint.rpartition(":")[2])) as proxy,
        tp.Producer(proxy.endpoint, linger=0) as producer,
    ):
        putting = in_thread(lambda: (producer.put("met", PATIENCE), producer.flush(PATIENCE)))
        assert consumer.get(PATIENCE) == "met"
        putting()
        proxy.silence()
        began = time.monotonic()
        with pytest.raises(tp.PeerLost):
            consumer.get(2 * PATIENCE)
        assert 5 < time.monotonic() - began < 8


@pytest.mark.slow
@pytest.mark.parametrize("peer_timeout", [60.0, 6.0])
def test_some_seconds_of_silence_between_hosts_tear_no_line(
    peer_timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers may hold seconds of a slow line, and what was lost there comes behind that. An end may want to know sooner."""
    stock = zmq_sockets.heartbeats
    monkeypatch.setattr(zmq_sockets, "heartbeats", lambda is_remote, **more: stock(is_remote=True, **more))
    options: dict[str, Any] = {"shared_memory": "off", "peer_timeout": peer_timeout}
    with (
        tp.Consumer("tcp://127.0.0.1:0", **options) as consumer,
        Proxy(int(consumer.endpoint.rpartition(":")[2])) as proxy,
        tp.Producer(proxy.endpoint, **options) as producer,
    ):
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        proxy.silence()
        putting = in_thread(lambda: (producer.put(torch.ones(1 << 20), PATIENCE), producer.flush(2 * PATIENCE)))
        with pytest.raises(tp.Empty):
            consumer.get(4)
        proxy.heal()
        assert consumer.get(PATIENCE).sum() == 1 << 20
        putting()
        assert (proxy.connections == 1) == (producer.statistics().resent == 0) == (peer_timeout == 60)
