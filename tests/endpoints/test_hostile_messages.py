"""Messages that a peer makes up: whatever reading one does, it costs what it sent, and the next message comes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import children
import exchange
import msgspec
import numpy as np
import pytest
import torch
from children import PATIENCE, in_thread
from inside import conversation_of, registered_serializers, side_of, tear_what_comes
from raw_ends import RawEnd, hello, wait_in_vain

import tensorpipe_ipc as tp
from tensorpipe_ipc import serializers
from tensorpipe_ipc.endpoints import conversation, peers
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.serializers import torch_save
from tensorpipe_ipc.wire import schema
from tensorpipe_ipc.wire.header import Kind, Piece, SharedMemoryTerms, pack, pack_piece, unpack
from tensorpipe_ipc.wire.spec import BY_NAME, BY_TYPE, Op, Registered

pytestmark = pytest.mark.limit(30)


class Broken(serializers.Serializer):
    """A serializer that fails as it is told to, like a library below this one."""

    name, zero_copy = "broken", False
    raises: type[Exception] = RuntimeError

    def encode(self, tensor: torch.Tensor) -> Any:
        """As raw does."""
        return serializers.serializer_named("raw").encode(tensor)

    def decode(self, meta: Any, payload: memoryview) -> torch.Tensor:
        """Fail."""
        raise self.raises("below")


@contextlib.contextmanager
def _unreadable(raises: type[Exception], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[tp.Consumer, tp.Producer]]:
    """Two ends whose serializer raises something where a tensor is read."""
    broken = Broken()
    broken.raises = raises
    monkeypatch.setitem(registered_serializers(), "broken", broken)
    with (
        tp.Consumer("unreadable", maxsize=1) as consumer,
        tp.Producer("unreadable", maxsize=1, serializer="broken") as producer,
    ):
        yield consumer, producer


@pytest.mark.parametrize(
    "raises",
    [RecursionError, RuntimeError, OverflowError, KeyError, AssertionError, StopIteration],
)
def test_whatever_reading_a_message_raises_the_next_one_comes(
    transport: str, raises: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is taken, counted, and its producer named; its credit comes back: ``maxsize`` is 1 here."""
    with _unreadable(raises, monkeypatch) as (consumer, producer):

        def put() -> None:
            producer.put(torch.ones(3), PATIENCE)
            producer.put("next", PATIENCE)
            producer.flush(PATIENCE)

        putting = in_thread(put)
        assert consumer.get(PATIENCE) == "next"
        with pytest.raises(tp.Empty):
            consumer.get(0.02)
        putting()
        said = consumer.statistics()
        assert said.rejected == 1
        assert raises.__name__ in said.last_rejection
        assert "(from producer pid" in said.last_rejection


def test_a_message_that_there_is_no_memory_to_read_is_told(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in shared memory until the next get, eight times; from frames it is dropped at once. The next one comes."""
    with _unreadable(MemoryError, monkeypatch) as (consumer, producer):
        putting = in_thread(lambda: [producer.put(each, PATIENCE) for each in (torch.ones(3), "next")])
        told, got = 0, None
        while got is None:
            try:
                got = consumer.get(PATIENCE)
            except tp.OutOfMemory as error:
                assert "from producer pid" in str(error)
                told += 1
        putting()
        assert got == "next"
        assert told == 1 if transport == "frames" else 1 < told <= 8
        assert consumer.statistics().rejected == 1
        assert "MemoryError" in consumer.statistics().last_rejection


def test_frames_of_a_producer_that_lies_are_refused_where_shared_memory_is_required() -> None:
    """Anybody can say this user's uid. A friend's next message comes."""
    terms = SharedMemoryTerms("auto", os.geteuid())
    with tp.Consumer("tcp://127.0.0.1:0", shared_memory="require") as consumer, RawEnd(consumer.endpoint) as stranger:
        stranger.say(hello("producer", end=12345, round=1, shared_memory=terms))
        stranger.until_answered(consumer)
        stranger.say(*exchange.sent(torch.arange(2)))
        stranger.say(pack_piece(1, Piece(0, 1 << 24)), bytes(1 << 20))
        wait_in_vain(consumer, lambda: consumer.statistics().rejected == 2)
        assert "has claimed no queue" in consumer.statistics().last_rejection
        with tp.Producer(consumer.endpoint) as friend:
            putting = in_thread(lambda: friend.put("friend", PATIENCE))
            assert consumer.get(PATIENCE) == "friend"
            putting()


def test_a_producer_that_lied_and_vanished_within_a_message_is_told_of() -> None:
    """It said that it shares memory, and sent pieces. They are let go of as any other's are."""
    terms = SharedMemoryTerms("auto", os.geteuid())
    with tp.Consumer("tcp://127.0.0.1:0", peer_timeout=0.5) as consumer:
        with RawEnd(consumer.endpoint) as stranger:
            stranger.say(hello("producer", end=12345, round=1, shared_memory=terms))
            stranger.until_answered(consumer)
            stranger.say(pack_piece(1, Piece(0, 1 << 25)), bytes(1 << 20))
            stranger.say(pack_piece(1, Piece(1 << 20, 1 << 25)), bytes(1 << 20))
            wait_in_vain(consumer, lambda: sum(each.brought for each in conversation_of(consumer).peers.values()) == 2)
        with pytest.raises(tp.PeerLost):
            consumer.get(PATIENCE)
        assert consumer.statistics().vanished == 1


def test_what_a_producer_puts_in_frames_comes_though_a_handler_tore_why_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tp.Consumer("torn") as consumer, RawEnd(consumer.endpoint) as friend:
        terms = SharedMemoryTerms("auto", os.geteuid())
        friend.say(hello("producer", end=12345, round=1, shared_memory=terms))
        friend.until_answered(consumer)
        friend.say(
            hello("producer", end=12345, round=1, shared_memory=msgspec.structs.replace(terms, why_not="no file"))
        )
        with monkeypatch.context() as patch:
            tear_what_comes(patch, consumer, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                consumer.get(PATIENCE)
        friend.until_answered(consumer)  # it asks again
        friend.say(*exchange.sent("word"))
        assert consumer.get(PATIENCE) == "word"


# -- what is shown of a peer


def test_what_a_peer_says_of_itself_moves_no_terminal() -> None:
    """Escapes in a host's name, a serializer's or a reason come out as question marks in every text that repeats them."""
    escape = "\x1b]0;owned\x07\u202e\n"
    with tp.Consumer("shown", shared_memory="off") as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", identity=msgspec.structs.replace(identity(), host=f"host{escape}")))
        children.wait_until(lambda: _served(consumer))
        with pytest.raises(tp.Empty) as empty:
            consumer.get(0)
        texts = [str(empty.value), *consumer.statistics().peers]
    with tp.Producer("shown", bind=True, shared_memory="off", linger=0) as producer, RawEnd(producer.endpoint) as raw:
        raw.say(hello("consumer", window=1, identity=msgspec.structs.replace(identity(), host=f"host{escape}")))
        producer.put("taken by nobody", PATIENCE)
        with pytest.raises(tp.Full) as full:
            producer.put("no room", 0)
        texts += [str(full.value), *producer.statistics().peers]
        with pytest.warns(RuntimeWarning, match="1 messages that were not taken") as warned:
            producer.close()
        texts.append(str(warned[0].message))
    with tp.Consumer("shown", shared_memory="off") as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", serializer=f"raw{escape}"))
        texts.append(_rejected(consumer))
    assert all("host?" in text for text in texts[:-1])
    assert all(text.isprintable() for text in texts), texts


@pytest.mark.parametrize("started", [float("nan"), float("inf"), -float("inf")])
def test_who_started_at_no_time_is_not_let_in(started: float) -> None:
    """A start time that equals nothing, not even itself, would hide its process."""
    with tp.Consumer("shown", shared_memory="off") as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", identity=msgspec.structs.replace(identity(), started=started)))
        assert "no time" in _rejected(consumer)
        assert consumer.statistics().peers == ()


# -- made up by hand


def _u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def _meta(nbytes: int, dims: tuple[int, ...] = (), code: int = 2) -> bytes:
    return struct.pack("<BBBBQ", code, 0, len(dims), 0, nbytes) + struct.pack(f"<{len(dims)}q", *dims)


def _view(span: int, dims: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, code: int = 2) -> bytes:
    numbers = struct.pack(f"<{len(dims)}q", *dims) + struct.pack("<Q", offset) + struct.pack(f"<{len(dims)}q", *strides)
    return struct.pack("<BBBBQ", code, 2, len(dims), 0, span) + numbers


def _schema(spec: bytes, spans: tuple[int, ...], *metas: bytes) -> bytes:
    packed = b"".join(struct.pack("<QQ", nbytes, nbytes) for nbytes in spans)
    return b"\x03raw" + _u32(len(spec)) + spec + _u32(len(spans)) + packed + _u32(len(metas)) + b"".join(metas)


def _expanded(op: int, size: int) -> bytes:
    """One byte, and a leaf of a kind that says it is ``size`` of them."""
    spec = bytes([op, 2]) if op == Op.TYPED else bytes([op])
    return pack(Kind.DATA, 1, _schema(spec, (1,), _view(0, (size,), (0,)))) + b"x"


@contextlib.contextmanager
def _talk(**options: Any) -> Iterator[tuple[tp.Consumer, RawEnd]]:
    """A consumer, and somebody who has said HELLO to it."""
    with tp.Consumer("made-up", shared_memory="off", **options) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer"))
        children.wait_until(lambda: _served(consumer))
        yield consumer, raw


def _served(consumer: tp.Consumer) -> bool:
    with contextlib.suppress(tp.Empty):
        consumer.get(0.01)
    return bool(consumer.statistics().peers)


def _rejected(consumer: tp.Consumer) -> str:
    """Let the consumer take one message that is none. Which rule it broke."""
    before = consumer.statistics().rejected
    deadline = time.monotonic() + PATIENCE
    while consumer.statistics().rejected == before:
        assert time.monotonic() < deadline
        with contextlib.suppress(tp.Empty):
            consumer.get(0.02)
    return consumer.statistics().last_rejection


def test_memory_for_what_never_came_is_not_missed() -> None:
    """Somebody announces all memory of this machine, sends a byte, and says that this was the message: ``get`` goes on."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with _talk(producers=None) as (consumer, raw):
        raw.say(pack_piece(1, Piece(0, most)), b"x")
        raw.say(pack(Kind.DATA, 1))
        assert _rejected(consumer)
        raw.say(*exchange.sent("the next", sequence=2))
        assert consumer.get(PATIENCE) == "the next"


@pytest.mark.parametrize("op", [Op.BYTES, Op.NDARRAY, Op.UNTYPED, Op.TYPED])
@pytest.mark.parametrize("size", [1 << 20, 1 << 46])
def test_a_byte_that_says_it_is_many_is_refused(op: int, size: int) -> None:
    """Bytes, arrays and storages do not overlap themselves: 94 bytes would be gigabytes. The next message comes."""
    with _talk() as (consumer, raw):
        raw.say(_expanded(op, size))
        said = _rejected(consumer)
        assert "overlap" in said or "bytes that are a view" in said
        raw.say(*exchange.sent("next", sequence=2))
        assert consumer.get(PATIENCE) == "next"


def test_bytes_are_not_many_views_of_one_span() -> None:
    """10,000 byte strings that are all of one megabyte would be 10 GB of 1.4 MB."""
    count, nbytes = 10_000, 1 << 20
    spec = b"\x20" + _u32(count) + bytes([Op.BYTES]) * count
    schema = _schema(spec, (nbytes,), *[_view(0, (nbytes - index,), (1,), index) for index in range(count)])
    with _talk() as (consumer, raw):
        raw.say(pack(Kind.DATA, 1, schema), bytes(nbytes))
        assert "bytes that are a view" in _rejected(consumer)


def _packed_keys(keys: list[Any]) -> list[bytes]:
    """The frame of a dict with these keys."""
    packed = [msgspec.msgpack.encode(key) for key in keys]
    spec = b"\x22" + _u32(len(keys)) + b"".join(struct.pack("<H", len(key)) + key for key in packed) + bytes(len(keys))
    return [pack(Kind.DATA, 1, _schema(spec, ()))]


def _of_one_hash(count: int) -> list[Any]:
    """Tuples of 0 and 2**61 - 1, which both hash to 0."""
    return [tuple((number >> bit & 1) * ((1 << 61) - 1) for bit in range(13)) for number in range(count)]


def _of_one_chain(count: int) -> list[Any]:
    """Ints that differ in their hashes, and for each of which a dict goes by all of the others."""
    mask, at, chain = (1 << (3 * count // 2).bit_length()) - 1, 0, []
    for _ in range(count // 2):
        chain.append(at)
        at = at * 5 + 1 & mask
    filled, found, number = set(chain), list[int](), mask
    while len(found) < count - len(chain):
        number += 1
        at, perturb, looks = number & mask, number, 0
        while at in filled and looks < 100:
            perturb >>= 5
            at, looks = at * 5 + perturb + 1 & mask, looks + 1
        if looks == 100:
            found.append(number)
    return chain + found


KEYS: dict[str, tuple[Any, bool]] = {
    "8,192 tuples of one hash": (lambda: _of_one_hash(8192), False),
    "50 tuples of one hash": (lambda: [*_of_one_hash(50), *range(1, 9)], True),
    "2,000 ints of one chain": (lambda: _of_one_chain(2000), False),
    "131,000 ints": (lambda: list(range(131_000)), True),
    "50,000 multiples of 2**44": (lambda: [number << 44 for number in range(50_000)], True),
    "floats, negative ints and tuples": (
        lambda: [key for n in range(1, 10_000) for key in (n + 0.5, -n, (n, "x"), str(n))],
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_keys_that_a_dict_would_look_for_in_vain_are_refused(name: str) -> None:
    """Keys made up to collide are refused, within the time that so many bytes may take; others arrive."""
    make, comes = KEYS[name]
    keys = make()
    with _talk() as (consumer, raw):
        raw.say(*_packed_keys(keys))
        if comes:
            assert list(consumer.get(PATIENCE)) == keys
        else:
            began = time.process_time()
            assert "keys of a dict that take over 48 looks" in _rejected(consumer)
            assert time.process_time() - began < 5, "it takes minutes to find them"


# -- frames


@pytest.mark.parametrize("frame", [b"", b"x"])
@pytest.mark.parametrize("is_known", [False, True])
def test_frames_that_belong_to_no_message_are_let_go(is_known: bool, frame: bytes) -> None:
    """20,000 frames in one message, from a stranger or a peer: they are dropped as they are read, and the next one comes."""
    with tp.Consumer("many", shared_memory="off") as consumer, RawEnd(consumer.endpoint) as raw:
        if is_known:
            raw.say(hello("producer"))
            children.wait_until(lambda: _served(consumer))
        before = consumer.statistics().rejected
        raw.say(*exchange.sent("of too many", sequence=1), *[frame] * 20_000)
        tracemalloc.start()
        while consumer.statistics().rejected == before and tracemalloc.get_traced_memory()[1] < 1 << 20:
            with contextlib.suppress(tp.Empty):
                consumer.get(0.02)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 1 << 20, "Python holds more than came"
        if not is_known:
            raw.say(hello("producer"))
        raw.say(*exchange.sent("next", sequence=2))
        assert consumer.get(PATIENCE) == "next"


@pytest.mark.parametrize("name", ["131,000 ints", "8,192 tuples of one hash"])
def test_a_signal_is_heard_while_a_message_is_read(name: str) -> None:
    """However much a message has to be looked at, a handler runs meanwhile, every tenth of a second of it."""
    make, _ = KEYS[name]
    heard: list[float] = []
    with _talk() as (consumer, raw):
        raw.say(*_packed_keys(make()))
        children.wait_until(side_of(consumer).socket.has_incoming)
        with children.ticking(0.01, lambda number, frame: heard.append(time.process_time())):
            began = time.process_time()
            with contextlib.suppress(tp.Empty):
                consumer.get(0)
            ended = time.process_time()
    moments = [began, *(moment for moment in heard if began < moment < ended), ended]
    assert max(after - before for before, after in itertools.pairwise(moments)) < max(0.25, (ended - began) / 4)


@pytest.mark.parametrize("of", ["a tree", "torch.load", "zipfile"])
def test_what_a_signals_handler_raises_while_a_message_is_read_is_no_fault_of_the_message(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alarm raised TimeoutError, and get took it for a damaged message, and waited on."""

    class TimerFd(ValueError, OSError):
        """One that what reads a message expects of a damaged one."""

    def alarm(*_: Any) -> None:
        raise TimerFd

    def interrupted(*_: Any, **__: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    entry = Registered(TimerFd, Op.CUSTOM, "interrupted", (), lambda _: torch.ones(3), interrupted)
    monkeypatch.setitem(BY_NAME, entry.name, entry)
    monkeypatch.setitem(BY_TYPE, TimerFd, entry)
    serializer = "raw" if of == "a tree" else "torch_save"
    frames = exchange.sent(TimerFd() if of == "a tree" else torch.ones(3), serializer, sequence=1)
    if of == "torch.load":
        monkeypatch.setattr(torch, "load", interrupted)
    elif of == "zipfile":
        monkeypatch.setattr(torch_save._Memory, "readinto", interrupted)
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        with _talk(accept=["raw", serializer]) as (consumer, raw):
            raw.say(*frames)
            with pytest.raises(TimerFd):
                consumer.get(PATIENCE)
            assert consumer.statistics().rejected == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


class _Late(ValueError):
    """An alarm raises it."""


class _Handler:
    def __call__(self, *_: Any) -> None:
        raise _Late


class _OfAnothersKind(_Handler):
    """It has inherited what makes it a handler."""


@pytest.mark.parametrize("handler", [functools.partial(_Handler()), _OfAnothersKind()], ids=["partial", "heir"])
def test_what_any_handler_raises_comes_out_of_get(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a partial, and of one that inherits __call__, an alarm was lost."""

    def interrupted(*_: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    entry = Registered(_Late, Op.CUSTOM, "interrupted", (), lambda _: torch.ones(3), interrupted)
    monkeypatch.setitem(BY_NAME, entry.name, entry)
    monkeypatch.setitem(BY_TYPE, _Late, entry)
    frames = exchange.sent(_Late(), "raw", sequence=1)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with _talk() as (consumer, raw):
            raw.say(*frames)
            with pytest.raises(_Late):
                consumer.get(PATIENCE)
            assert consumer.statistics().rejected == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_rejection_repeats_nothing_that_a_terminal_obeys() -> None:
    """It stands in the text of Full and Empty, too, and whoever reaches the port can bring one about."""
    body = msgspec.msgpack.decode(unpack(memoryview(hello("producer"))).schema) | {"\x1b[2J\nnext line": 1}
    with tp.Consumer("tcp://127.0.0.1:0") as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(pack(Kind.HELLO, 0, msgspec.msgpack.encode(body)))
        said = _rejected(consumer)
        assert "?[2J?next line" in said
        assert said.isprintable()
        with pytest.raises(tp.Empty) as empty:
            consumer.get(0)
        assert str(empty.value).isprintable()


def test_a_wait_ends_in_time_while_messages_come_that_are_none() -> None:
    """A peer says without end what cannot be read: a get of 50 ms does not deal with all of it."""
    with _talk() as (consumer, raw):
        for sequence in range(1, 30_000):
            raw.say(pack(Kind.DATA, sequence))
        children.wait_until(side_of(consumer).socket.has_incoming)
        for _ in range(3):
            before, began = consumer.statistics().rejected, time.process_time()
            with pytest.raises(tp.Empty):
                consumer.get(0.05)
            assert time.process_time() - began < 0.5
            assert consumer.statistics().rejected > before
        assert side_of(consumer).socket.has_incoming()


def test_a_producer_that_vanishes_is_noticed_while_others_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer learns that a producer has vanished, though another peer talks to it without end."""
    monkeypatch.setattr(conversation, "REPEAT", 0.05)
    monkeypatch.setattr(peers, "IN_TURN", 50)
    with tp.Consumer("flooded", shared_memory="off", producers=1) as consumer, RawEnd(consumer.endpoint) as raw:
        with children.Child() as child:
            child.call(children.open_producer, consumer.endpoint, shared_memory="off")
            child.begin(children.put, "word")
            assert consumer.get(PATIENCE) == "word"
            child.result()
            child.kill()
            for _ in range(100_000):
                raw.say(pack(Kind.CREDIT, 1))
        with pytest.raises(tp.PeerLost, match="vanished"):
            consumer.get(PATIENCE)
        assert side_of(consumer).socket.has_incoming(), "the flood is not over"


def test_a_put_does_not_wait_while_messages_come_that_are_none() -> None:
    """A consumer says without end what is nothing: each put beside it deals with a little of that, and not for 20 ms."""
    with contextlib.suppress(tp.PeerLost), tp.Producer("flooded", bind=True, shared_memory="off", linger=0) as producer:
        with RawEnd(producer.endpoint) as noisy, RawEnd(producer.endpoint) as quiet:
            for raw in (noisy, quiet):
                raw.say(hello("consumer"))
            producer.wait_for(2, PATIENCE)
            for _ in range(30_000):
                noisy.say(pack(Kind.CREDIT, 0))
            children.wait_until(side_of(producer).socket.has_incoming)
            began = time.thread_time()
            for number in range(40):
                producer.put(number, PATIENCE)
            assert time.thread_time() - began < 0.2
            assert side_of(producer).socket.has_incoming(), "the flood is over"


def test_a_wait_ends_in_time_while_frames_are_let_go() -> None:
    """A get that does not wait does not wait for 100,000 frames of nothing either."""
    with _talk() as (consumer, raw):
        raw.say(*exchange.sent("of too many", sequence=1), *[b""] * 100_000)
        longest, deadline = 0.0, time.monotonic() + PATIENCE
        while not consumer.statistics().rejected:
            assert time.monotonic() < deadline
            began = time.process_time()
            with contextlib.suppress(tp.Empty):
                consumer.get(0)
            longest = max(longest, time.process_time() - began)
        assert longest < 0.5


@pytest.mark.parametrize(
    ("greeting", "message"),
    [(b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\0\0", b"\0\x01x"), (b"\x01\0", b"\x02\0x")],
    ids=["ZMTP 2", "ZMTP 1"],
)
@pytest.mark.parametrize("has_the_port", [True, False])
def test_who_shakes_no_hands_is_hung_up_on(greeting: bytes, message: bytes, has_the_port: bool) -> None:
    """Old versions of ZeroMQ have no handshake. A connector would keep what they say; a binder could never hang up on them."""
    with contextlib.ExitStack() as stack:
        if has_the_port:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stack.enter_context(tp.Consumer(f"tcp://127.0.0.1:{listener.getsockname()[1]}", bind=False))
            stranger = stack.enter_context(listener.accept()[0])
        else:
            consumer = stack.enter_context(tp.Consumer("tcp://127.0.0.1:*"))
            port = int(consumer.endpoint.rpartition(":")[2])
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        stranger.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            stranger.sendall(greeting + message)
            while stranger.recv(1000):
                pass


def test_an_expanded_tensor_is_moved_to_its_device_as_what_came() -> None:
    """On the way to a device a tensor that was expanded takes the bytes of its span, also beside an array of that span."""
    size = 1 << 34
    spec = b"\x20" + _u32(2) + bytes([Op.TENSOR, Op.NDARRAY])
    schema = _schema(spec, (64,), _view(0, (size,), (0,)), _view(0, (64,), (1,)))
    with _talk(device="meta") as (consumer, raw):
        raw.say(pack(Kind.DATA, 1, schema) + bytes(64))
        tensor, array = consumer.get(PATIENCE)
        assert (tensor.shape, tensor.stride(), len(array)) == ((size,), (0,), 64)
        assert tensor.untyped_storage().nbytes() == 64


def test_what_shares_memory_here_and_may_not_there_crosses_by_itself() -> None:
    """Byte strings, and arrays that overlap themselves, arrive whole beside tensors of the same memory."""
    data = bytes(range(200))
    base = np.arange(6, dtype=np.float32)
    tree = [data, data, np.frombuffer(data, np.uint8), base, np.broadcast_to(base, (4, 6)), torch.from_numpy(base)]
    with tp.Consumer("apart") as consumer, tp.Producer("apart") as producer:
        putting = in_thread(lambda: producer.put(tree, PATIENCE))
        got = consumer.get(PATIENCE)
        putting()
    assert got[:2] == [data, data]
    assert bytes(got[2]) == data
    assert (got[4] == base).all()
    assert got[4].shape == (4, 6)
    got[3][0] = 7
    assert got[5][0] == 7, "an array and a tensor still share memory"


@pytest.mark.parametrize("way", ["off", "auto"])
def test_what_is_rejected_does_not_have_friends_messages_read_anew(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header of 300 kB takes as much as is kept of all streams together. A queue's trees stay known, too."""
    tree, there, made = {"a": [torch.zeros(1), 1], "b": "text"}, tp.Queue(), list[bytes]()
    there.put(tree)
    assert there.get()["b"] == "text"
    with tp.Consumer("tcp://127.0.0.1:0", producers=None) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer"))
        putting = in_thread(lambda: children.put_and_leave(consumer.endpoint, tree, shared_memory=way))
        assert consumer.get(PATIENCE)["b"] == "text"
        putting()
        large = exchange.sent({letter * 60_000: None for letter in "vwxyz"} | {"tensor": torch.zeros(1)})
        raw.say(large[0][:-1])
        wait_in_vain(consumer, lambda: consumer.statistics().rejected)
        read = schema.Schema.__init__
        monkeypatch.setattr(schema.Schema, "__init__", lambda one, data: (made.append(data), read(one, data))[1])
        putting = in_thread(lambda: children.put_and_leave(consumer.endpoint, tree, shared_memory=way))
        assert consumer.get(PATIENCE)["b"] == "text"
        putting()
    there.put(tree)
    assert there.get()["b"] == "text"
    assert not made
