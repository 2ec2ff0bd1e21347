"""Ends with keys: only the right ones exchange data, whoever binds, and one that cannot get in says why."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import children
import pytest
import torch
import zmq
import zmq.auth
from children import PATIENCE, Child, in_thread
from inside import side_of
from secured import PUBLIC, SECRET, binders, connectors, make_keys, open_binder, open_connector
from zmq.utils import z85

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints.greeting import Greeting
from tensorpipe_ipc.zeromq.curve import Gate
from tensorpipe_ipc.zeromq.zmq_sockets import FrameSocket

LOOPBACK = "tcp://127.0.0.1:*"
NOT_LISTED = "the binder's clients= do not list this end's public key"
NOT_THE_BINDER = "server= may not be its public key"


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the key pairs binder, friend and other, and one that goes with neither of its halves."""
    folder = make_keys(tmp_path_factory.mktemp("keys"))
    halves = [(folder / f"{name}{SECRET}").read_text().splitlines() for name in ("friend", "other")]
    forged = folder / f"forged{SECRET}"
    forged.touch(0o600)
    forged.write_text("\n".join([*halves[0][:-1], halves[1][-1]]))
    return folder


@contextlib.contextmanager
def two_ends(
    binder: str, bound: tp.Curve | None, connected: tp.Curve | None, endpoint: str = LOOPBACK
) -> Iterator[tuple[Any, Any]]:
    """A producer and a consumer, of which one binds."""
    with contextlib.ExitStack() as stack:
        ends: dict[str, Any] = {}
        order = sorted(("producer", "consumer"), key=lambda role: role != binder)
        for role, security in zip(order, (bound, connected), strict=True):
            options: dict[str, Any] = {"linger": 0.0} if role == "producer" else {}
            made = (tp.Producer if role == "producer" else tp.Consumer)(
                endpoint, bind=role == binder, security=security, shared_memory="off", **options
            )
            ends[role] = stack.enter_context(made)
            endpoint = made.endpoint.replace("*", "127.0.0.1")  # as another host would, by a number of this one's
        yield ends["producer"], ends["consumer"]


def exchanged(producer: tp.Producer, consumer: tp.Consumer) -> Iterator[tuple[str, str]]:
    """Try to put and get in turns; what the two say is in the way, until a message has come."""
    put = False
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        said = ["", ""]
        try:
            if not put:
                producer.put("word", 0.01)
                put = True
        except tp.Full as full:
            said[0] = str(full)
        try:
            assert consumer.get(0.01) == "word"
            return
        except tp.Empty as empty:
            said[1] = str(empty)
        yield said[0], said[1]
    raise AssertionError(f"nothing more happens: {said}")


def _wrong(keys: Path) -> dict[str, tuple[tp.Curve | None, tp.Curve | None, str]]:
    """Return the keys that do not match, as (binder, connector, error). The connector must raise that error."""
    right = binders(keys)
    return {
        "no keys to a binder with keys": (right, None, "the binder wants keys: give security=Curve(...)"),
        "keys to a binder without": (None, connectors(keys), "the binder has no keys"),
        "a client that is not listed": (right, connectors(keys, "other"), NOT_LISTED),
        "another server's key": (right, connectors(keys, server="other"), NOT_THE_BINDER),
        "not listed, and another server's key": (right, connectors(keys, "other", "other"), NOT_THE_BINDER),
        "a listed public key without its secret": (right, connectors(keys, "forged"), NOT_THE_BINDER),
        "another is listed": (binders(keys, "other"), connectors(keys), NOT_LISTED),
        "the binder's own": (right, connectors(keys, "binder"), NOT_LISTED),
        "swapped": (right, connectors(keys, "binder", "friend"), NOT_THE_BINDER),
        "another binder": (
            tp.Curve(keys / f"other{SECRET}", clients=keys / f"friend{PUBLIC}"),
            connectors(keys),
            NOT_THE_BINDER,
        ),
    }


WRONG = sorted(_wrong(Path()))


@pytest.mark.parametrize("binder", ["producer", "consumer"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_keys_exchange_nothing_and_say_why(case: str, binder: str, keys: Path) -> None:
    """With any but the right keys nothing crosses, nobody is met, and the end that connects names what is wrong."""
    bound, connected, why = _wrong(keys)[case]
    with two_ends(binder, bound, connected) as (producer, consumer):
        connects = int(binder == "producer")  # which of the two texts is the connector's
        for said in exchanged(producer, consumer):
            if why in said[connects]:
                break
        else:
            raise AssertionError("a message crossed")
        assert f"handshake with {producer.endpoint} failed" in said[connects]
        assert "handshake" not in said[1 - connects]
        assert (producer.statistics().peers, consumer.statistics().peers) == ((), ())
        rejected = (consumer if connects == 0 else producer).statistics()
        assert (rejected.rejected > 0) == (why == NOT_LISTED)
        assert rejected.last_rejection.endswith("a key that is not on the list") == (why == NOT_LISTED)


@pytest.mark.parametrize("endpoint", [LOOPBACK, "tcp://*:*", "tcp://[::1]:*", "secured"])
@pytest.mark.parametrize("binder", ["producer", "consumer"])
def test_right_keys(binder: str, endpoint: str, keys: Path) -> None:
    """With the right keys a message crosses, over tcp from anywhere and over ipc, and nothing is said to be in the way."""
    bound = binders(keys, "other", "friend")
    with two_ends(binder, bound, connectors(keys), endpoint) as (producer, consumer):
        assert len(list(exchanged(producer, consumer))) < 500
        producer.flush(PATIENCE)
        assert "handshake" not in producer.statistics().transport
        assert producer.statistics().rejected == consumer.statistics().rejected == 0


def test_keys_and_shared_memory(keys: Path) -> None:
    """Two ends of one host find shared memory with keys, too: the keys say who talks, not where the bytes lie."""
    with tp.Consumer(LOOPBACK, security=binders(keys)) as consumer, Child() as child:
        child.call(open_connector, consumer.endpoint, str(keys))
        child.begin(children.put, "word")
        assert consumer.get(PATIENCE) == "word"
        child.result()
        assert consumer.statistics().transport == "shared memory"


def test_who_waits_on_the_descriptor_alone_lets_others_in(keys: Path) -> None:
    """A binder that only looks when its descriptor is readable answers who knocks: the gate's is part of it."""
    with tp.Consumer(LOOPBACK, security=binders(keys), shared_memory="off") as consumer, Child() as child:
        descriptor = consumer.fileno()
        child.call(open_connector, consumer.endpoint, str(keys))
        child.begin(children.put, "word")
        for _ in range(100):
            assert select.select([descriptor], [], [], PATIENCE)[0], "it stays silent"
            with contextlib.suppress(tp.Empty):
                assert consumer.get_nowait() == "word"
                break
        child.result()


@pytest.mark.parametrize("waits", ["flush", "statistics", "loan"])
def test_a_producer_that_binds_lets_others_in(waits: str, keys: Path) -> None:
    """Every call that waits, or looks, answers who knocks."""
    with tp.Producer(LOOPBACK, bind=True, security=binders(keys), linger=0) as producer, Child() as child:
        child.begin(take_with_keys, producer.endpoint, str(keys))
        if waits == "loan":
            with producer.loan((4,), timeout=PATIENCE) as tensor:
                tensor.fill_(1)
        else:
            deadline = time.monotonic() + PATIENCE
            while not producer.statistics().peers and time.monotonic() < deadline:
                if waits == "flush":
                    producer.flush(0)
            producer.put(torch.ones(4), PATIENCE)
        assert child.result() == [torch.ones(4).tolist()]


def take_with_keys(ends: children.Ends, endpoint: str, folder: str) -> list[Any]:
    """Open a consumer that connects with keys, and take a tensor."""
    children.open_consumer(ends, endpoint, bind=False, security=connectors(Path(folder)))
    return [tree.tolist() for tree in children.take(ends)]


def test_a_binder_that_lists_the_client_later_is_found(keys: Path, free_port: int) -> None:
    """Turned away, a connector goes on trying: the next binder of the address, with a longer list, lets it in."""
    endpoint = f"tcp://127.0.0.1:{free_port}"
    with tp.Producer(endpoint, security=connectors(keys), shared_memory="off", linger=0) as producer:
        with tp.Consumer(endpoint, security=binders(keys, "other")) as consumer:
            assert any(NOT_LISTED in full for full, _ in exchanged(producer, consumer))
        with tp.Consumer(endpoint, security=binders(keys), shared_memory="off") as consumer:
            assert not any(NOT_LISTED in full for full, _ in list(exchanged(producer, consumer))[100:])
            producer.flush(PATIENCE)


@pytest.mark.slow
def test_who_waits_on_the_descriptor_alone_tries_again(keys: Path, free_port: int) -> None:
    """Turned away again and again, a consumer that only looks when its descriptor is readable still finds the binder that
    lets it in; and is not woken all the time until then."""
    endpoint = f"tcp://127.0.0.1:{free_port}"
    with tp.Consumer(endpoint, bind=False, security=connectors(keys), shared_memory="off") as consumer:
        descriptor, woken = consumer.fileno(), 0
        with tp.Producer(endpoint, bind=True, security=binders(keys, "other"), linger=0) as producer:
            began = time.monotonic()
            while time.monotonic() - began < 1:
                producer.statistics()
                if select.select([descriptor], [], [], 0.01)[0]:
                    woken += 1
                    with pytest.raises(tp.Empty):
                        consumer.get_nowait()
            assert producer.statistics().rejected > 1
        assert woken < 40
        with tp.Producer(endpoint, bind=True, security=binders(keys), shared_memory="off", linger=0) as producer:
            deadline = time.monotonic() + PATIENCE
            put = False
            while True:
                assert time.monotonic() < deadline, "it does not come back"
                with contextlib.suppress(tp.Full):
                    if not put:
                        producer.put("word", 0.01)
                        put = True
                if select.select([descriptor], [], [], 0.01)[0]:
                    with contextlib.suppress(tp.Empty):
                        assert consumer.get_nowait() == "word"
                        break


def test_two_binders_of_one_process_have_lists_of_their_own(keys: Path) -> None:
    """A client on the list of one binder is not on the list of the other."""
    with (
        tp.Consumer(LOOPBACK, security=binders(keys), shared_memory="off") as one,
        tp.Consumer(LOOPBACK, security=binders(keys, "other"), shared_memory="off") as two,
        tp.Producer(one.endpoint, security=connectors(keys), shared_memory="off", linger=0) as friend,
        tp.Producer(two.endpoint, security=connectors(keys), shared_memory="off", linger=0) as stranger,
    ):
        assert any(NOT_LISTED in full for full, _ in exchanged(stranger, two))
        list(exchanged(friend, one))
        friend.flush(PATIENCE)  # credit comes in a frame


GOOD = [b"1.0", b"7", b"tensorpipe_ipc", b"somewhere", b"", b"CURVE", b"key"]


@pytest.mark.parametrize(
    ("at", "wrong"),
    [(2, b"global"), (5, b"NULL"), (5, b"PLAIN"), (6, b"other"), (6, b"")],
    ids=["another domain", "no mechanism", "another mechanism", "another key", "no key"],
)
def test_what_the_gate_is_asked(at: int, wrong: bytes, keys: Path) -> None:
    """One request in which all is right is let in; with any one thing wrong it is not, and counted."""
    told: list[Exception] = []
    key = z85.decode(zmq.auth.load_certificate(keys / f"friend{PUBLIC}")[0])
    context: zmq.Context[Any] = zmq.Context()
    gate, asks = Gate(context, binders(keys), told.append), context.socket(zmq.REQ)
    try:
        asks.connect("inproc://zeromq.zap.01")
        good = [*GOOD[:6], key]
        for request, answer in ((good, b"200"), ([*good[:at], wrong, *good[at + 1 :]], b"400"), (good, b"200")):
            asks.send_multipart(request)
            gate.attend(asks, PATIENCE)
            assert asks.recv_multipart(zmq.NOBLOCK)[:3] == [b"1.0", b"7", answer]
        (refused,) = told
        assert "somewhere came with a key that is not on the list" in str(refused)
        asks.send_multipart(good[:6])  # no request: it gets no answer
        gate.attend(asks, 0.05)
        assert not asks.poll(0)
    finally:
        gate.close()
        asks.close(linger=0)
        context.term()


def test_a_request_that_an_exception_tore_is_dropped_and_the_next_one_answered(keys: Path) -> None:
    """The rest of it looks as if somebody asked."""
    key = z85.decode(zmq.auth.load_certificate(keys / f"friend{PUBLIC}")[0])
    context: zmq.Context[Any] = zmq.Context()
    gate, asks = Gate(context, binders(keys), lambda _: None), context.socket(zmq.DEALER)
    try:
        asks.connect("inproc://zeromq.zap.01")
        for _ in range(2):
            asks.send_multipart([b"", *GOOD[:6], key])
            assert gate.socket.poll(PATIENCE * 1000)
            for _ in range(3):
                gate.socket.recv()
            gate.answer()
            assert not asks.poll(0)
        asks.send_multipart([b"", *GOOD[:6], key])
        gate.attend(asks, PATIENCE)
        assert asks.recv_multipart(zmq.NOBLOCK)[:4] == [b"", b"1.0", b"7", b"200"]
    finally:
        gate.close()
        asks.close(linger=0)
        context.term()


def test_several_clients(keys: Path) -> None:
    """A folder lists whose key lies in it; each comes in."""
    with tp.Consumer(LOOPBACK, security=tp.Curve(keys / f"binder{SECRET}", clients=keys)) as consumer:
        with Child() as one, Child() as two:
            for child, name in ((one, "friend"), (two, "other")):
                child.call(open_connector, consumer.endpoint, str(keys), name)
                child.begin(children.put, name)
            assert {consumer.get(PATIENCE) for _ in range(2)} == {"friend", "other"}
            one.result(), two.result()


@pytest.mark.parametrize(
    ("end", "bind", "make", "why"),
    [
        (tp.Consumer, True, connectors, "security without clients="),
        (tp.Producer, True, connectors, "security without clients="),
        (tp.Consumer, False, binders, "security without server="),
        (tp.Producer, False, binders, "security without server="),
    ],
)
def test_the_other_sides_keys_must_be_named(
    end: Any, bind: bool, make: Callable[[Path], tp.Curve], why: str, keys: Path
) -> None:
    """A binder needs a list, as without one ZeroMQ lets in anybody; a connector needs to know who its binder is."""
    with pytest.raises(ValueError, match=why):
        end(LOOPBACK if bind else "tcp://127.0.0.1:9", bind=bind, security=make(keys))


def test_what_cannot_be_connected_to(keys: Path) -> None:
    """All addresses of a host are nobody's to connect to."""
    with pytest.raises(tp.Refused, match=r"tcp://\*:5555 cannot be connected to"):
        tp.Producer("tcp://*:5555", security=connectors(keys))


def test_no_secret_is_told(keys: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither key nor half of one is in a repr, a text, the environment, or the command line, wherever they are used."""
    words = [
        line.split('"')[1]
        for path in sorted(keys.iterdir())
        for line in path.read_text().splitlines()
        if "-key" in line and '"' in line
    ]
    assert len(words) >= 9
    curve = binders(keys)
    with two_ends("consumer", curve, connectors(keys, "other")) as (producer, consumer):
        for said in exchanged(producer, consumer):
            if NOT_LISTED in said[0]:
                break
        told = [*said, repr(curve), repr(vars(curve)), repr(producer), repr(consumer), str(consumer.statistics())]
        told += [Path("/proc/self/environ").read_text(), Path("/proc/self/cmdline").read_text()]
    told += capfd.readouterr()
    assert not [word for word in words for text in told if word[:10] in text or word[-10:] in text]


def test_a_fork_leaves_an_end_with_keys_alone(keys: Path) -> None:
    """A forked child cannot use it, ends without touching it, and the parent's goes on."""
    with two_ends("consumer", binders(keys), connectors(keys)) as (producer, consumer):
        list(exchanged(producer, consumer))
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                with contextlib.suppress(tp.Closed):
                    consumer.get_nowait()
                    status = 2
                consumer.close()
                status = 0 if status == 1 else 3
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        list(exchanged(producer, consumer))


def test_close_does_not_wait_for_those_who_knock(keys: Path) -> None:
    """A binder that closes while somebody waits at its gate, whom it never answered, is gone at once."""
    with Child() as child:
        consumer = tp.Consumer(LOOPBACK, security=binders(keys))
        child.call(open_connector, consumer.endpoint, str(keys), linger=0.0)
        gate = side_of(consumer).socket._gate
        assert gate is not None
        assert gate.socket.poll(PATIENCE * 1000), "nobody knocked"
        began = time.monotonic()
        consumer.close()
        assert time.monotonic() - began < PATIENCE / 2


def test_a_binder_in_another_process(keys: Path) -> None:
    """And the other way round: the binder is the child."""
    with Child() as child:
        endpoint = child.call(open_binder, LOOPBACK, str(keys))
        with tp.Producer(endpoint, security=connectors(keys)) as producer:
            child.begin(children.take)
            producer.put({"x": torch.ones(3)}, PATIENCE)
            (tree,) = child.result()
            assert torch.equal(tree["x"], torch.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["hushed", LOOPBACK])
def test_nothing_is_put_where_the_binder_does_not_know_whose_it_is(
    keys: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may end as soon as put has returned, before another word of its has left. What it put is known by then."""
    claim_of = Greeting.claim_of
    with (
        tp.Consumer(endpoint, security=binders(keys)) as consumer,
        tp.Producer(consumer.endpoint.replace("*", "127.0.0.1"), security=connectors(keys)) as producer,
    ):
        with monkeypatch.context() as hush:

            def claim_and_fall_silent(self: Greeting, peer: Any) -> None:
                hush.setattr(FrameSocket, "send_small", lambda *_: True)
                claim_of(self, peer)

            hush.setattr(Greeting, "claim_of", claim_and_fall_silent)
            getting = in_thread(lambda: pytest.raises(tp.Empty, consumer.get, 1.0))
            with pytest.raises(tp.Full):
                producer.put("too early", 0.8)
            getting()
        getting = in_thread(lambda: consumer.get(PATIENCE))
        producer.put("in time", PATIENCE)
        assert getting() == "in time"
        assert producer.statistics().transport == "shared memory"


def test_closing_leaves_the_program_s_own_sockets_as_they_are(keys: Path) -> None:
    """With a default timeout, Python has each socket wait for nothing that it makes anew from a descriptor."""
    before = socket.getdefaulttimeout()
    here, there = socket.socketpair()
    try:
        socket.setdefaulttimeout(5.0)
        with tp.Consumer("tcp://*:*", security=binders(keys)):
            pass
        assert [os.get_blocking(each.fileno()) for each in (here, there)] == [True, True]
    finally:
        socket.setdefaulttimeout(before)
        here.close()
        there.close()
