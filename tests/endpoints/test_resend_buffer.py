"""The messages that a producer keeps over tcp, and a consumer's answers.

One side is spoken by hand, so that nothing is chance.
"""

from __future__ import annotations

import contextlib
import os
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import exchange
import msgspec
import numpy as np
import pytest
import torch
import zmq
from children import PATIENCE, in_thread, wait_until
from inside import conversation_of, side_of, tear_what_comes, tell
from proxy import Proxy
from raw_ends import RawEnd, RawLine, hello, hello_of, wait_in_vain

import tensorpipe_ipc as tp
from tensorpipe_ipc import process
from tensorpipe_ipc.endpoints import (
    conversation,
    events,
    greeting,
    peers,
    reassembly,
    receiver,
    resend_buffer,
    sender,
    strangers,
)
from tensorpipe_ipc.endpoints.peer import How
from tensorpipe_ipc.endpoints.presence import Sight
from tensorpipe_ipc.endpoints.producer_peer import ProducerPeer
from tensorpipe_ipc.endpoints.reassembly import BufferPool, Reassembly
from tensorpipe_ipc.endpoints.resend_buffer import PIECE, ResendBuffer, SentMessage
from tensorpipe_ipc.errors import OutOfMemory, ProtocolError
from tensorpipe_ipc.process import Identity
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.serializers.narrowing import narrowing
from tensorpipe_ipc.wire import room
from tensorpipe_ipc.wire.header import (
    Ending,
    Hello,
    Kind,
    Piece,
    ending_of,
    pack,
    pack_goodbye,
    pack_piece,
    piece_of,
    unpack,
)
from tensorpipe_ipc.wire.layout import ALIGN
from tensorpipe_ipc.wire.message import encode
from tensorpipe_ipc.zeromq.fragments import SHORT_FRAGMENT

pytestmark = pytest.mark.limit(20)
LOOPBACK = "tcp://127.0.0.1:0"
ELSEWHERE = Identity("far-away", "another boot", 1, 2, 3.0)


def _piece(offset: int, total: int) -> bytes:
    """The first frame of a piece of message 1, of which nothing was narrowed."""
    return pack_piece(1, Piece(offset, total))


def _listen(consumer: tp.Consumer, seconds: float = 0.05) -> str:
    """Let the consumer deal with what comes, which is no message for its user. What it says of whom it waits for."""
    with pytest.raises(tp.Empty) as raised:
        consumer.get(seconds)
    return str(raised.value)


def _until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline


def _sequences(raw: RawEnd, count: int) -> list[int]:
    return [raw.hear_of(Kind.DATA).sequence for _ in range(count)]


def test_a_consumer_asks_for_what_is_missing() -> None:
    """After a gap nothing is taken until it is filled; then each comes once and in order, and nothing counts as lost."""
    with tp.Consumer(LOOPBACK) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", round=1, end=5))
        raw.say(*exchange.sent(1, sequence=1))
        assert consumer.get(PATIENCE) == 1
        assert hello_of(raw.hear_of(Kind.WELCOME)).round == 1
        for sequence in (3, 4):
            raw.say(*exchange.sent(sequence, sequence=sequence))
        _listen(consumer, 0.2)
        while (asked := hello_of(raw.hear_of(Kind.WELCOME))).round == 1:
            continue  # repeated while it waits
        assert (asked.round, asked.sequence) == (2, 1)
        for sequence in (1, 2, 3, 4):
            raw.say(*exchange.sent(sequence, sequence=sequence))
        assert [consumer.get(PATIENCE) for _ in range(3)] == [2, 3, 4]
        found = consumer.statistics()
        assert (found.messages, found.lost, found.duplicates) == (4, 0, 1)


def test_the_line_is_cut_before_a_consumer_hears_its_binder() -> None:
    """The producer has met it, and sent: by the next connection all comes, though the consumer has missed nothing yet."""
    options: dict[str, Any] = {"maxsize": 4, "shared_memory": "off"}
    with (
        tp.Producer(LOOPBACK, bind=True, linger=0, **options) as producer,
        Proxy(int(producer.endpoint.rpartition(":")[2])) as line,
        tp.Consumer(line.endpoint, bind=False, **options) as consumer,
    ):
        wait_until(lambda: side_of(consumer).socket.is_connected(0.05))
        line.silence("back")
        _listen(consumer)
        for number in range(4):
            producer.put(number, PATIENCE)
        line.cut()
        line.heal()
        flushing = in_thread(lambda: producer.flush(PATIENCE))
        assert [consumer.get(PATIENCE) for _ in range(4)] == [0, 1, 2, 3]
        flushing()


def test_an_end_closes_whose_connection_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was cut and is back, and nothing was said by it since. The goodbye is known for one by whom only the line tells of."""
    monkeypatch.setattr(peers.Peers, "sight_of", lambda *_: Sight(why_not="as if it were another host"))
    with tp.Consumer(LOOPBACK) as consumer, Proxy(int(consumer.endpoint.rpartition(":")[2])) as line:
        producer = tp.Producer(line.endpoint, shared_memory="off")
        putting = in_thread(lambda: producer.put("word", PATIENCE))
        assert consumer.get(PATIENCE) == "word"
        putting()
        producer.flush(PATIENCE)
        socket = side_of(producer).socket
        before = socket.connection
        line.cut()
        line.heal()
        wait_until(lambda: socket.is_connected(0.05) and socket.connection != before)
        producer.close()
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        assert consumer.statistics().rejected == 0


@pytest.mark.parametrize("producer_binds", [False, True])
@pytest.mark.parametrize("address", ["torn", LOOPBACK])
def test_a_credit_that_an_exception_tore_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, address: str, producer_binds: bool
) -> None:
    """A signal's handler raised within pyzmq's recv, which had the frame. Nobody waits for what is repeated now and then."""
    frames: dict[str, Any] = {"shared_memory": "off"}
    for module in (conversation, greeting):
        monkeypatch.setattr(module, "REPEAT", 4 * PATIENCE)
    with contextlib.ExitStack() as stack:
        if producer_binds:
            producer = stack.enter_context(tp.Producer(address, bind=True, maxsize=1, linger=0, **frames))
            consumer = stack.enter_context(tp.Consumer(producer.endpoint, bind=False, **frames))
        else:
            consumer = stack.enter_context(tp.Consumer(address, **frames))
            producer = stack.enter_context(tp.Producer(consumer.endpoint, maxsize=1, linger=0, **frames))
        putting = in_thread(lambda: producer.put(1, PATIENCE))
        assert consumer.get(PATIENCE) == 1
        putting()
        producer.flush(PATIENCE)
        producer.put(2, PATIENCE)
        assert consumer.get(PATIENCE) == 2
        with monkeypatch.context() as tearing:
            tear_what_comes(tearing, producer, _RaisedError)
            with pytest.raises(_RaisedError):
                producer.put(3, PATIENCE)
        getting = in_thread(lambda: consumer.get(PATIENCE))
        producer.put(3, PATIENCE)
        assert getting() == 3


@pytest.mark.slow
@pytest.mark.parametrize("producer_binds", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_message_that_an_exception_tore_is_counted_and_its_stream_ends_well(
    monkeypatch: pytest.MonkeyPatch, is_last: bool, producer_binds: bool
) -> None:
    """Nothing is sent again over ipc. The caller of ``get`` knows of its own exception."""
    frames: dict[str, Any] = {"shared_memory": "off"}
    with contextlib.ExitStack() as stack:
        if producer_binds:
            producer = stack.enter_context(tp.Producer("torn", bind=True, **frames))
            consumer = stack.enter_context(tp.Consumer("torn", bind=False, **frames))
        else:
            consumer = stack.enter_context(tp.Consumer("torn", **frames))
            producer = stack.enter_context(tp.Producer("torn", **frames))
        putting = in_thread(lambda: producer.put(1, PATIENCE))
        assert consumer.get(PATIENCE) == 1
        putting()
        producer.put(2, PATIENCE)
        _tear_one_out_of(consumer, monkeypatch)
        if not is_last:
            producer.put(3, PATIENCE)
            assert consumer.get(PATIENCE) == 3
        closing = in_thread(producer.close)
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        closing()
        assert consumer.statistics().lost == 1


def test_an_exception_of_ones_own_hides_no_other_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message of those that never came was torn by it; of the others the stream's end tells."""
    with tp.Consumer("torn", shared_memory="off") as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer"))
        raw.say(*exchange.sent(1, sequence=1))
        assert consumer.get(PATIENCE) == 1
        raw.say(*exchange.sent(2, sequence=2))
        _tear_one_out_of(consumer, monkeypatch)
        raw.say(*exchange.sent(6, sequence=6))
        assert consumer.get(PATIENCE) == 6
        raw.say(pack_goodbye(6, Ending()))
        with pytest.raises(tp.PeerLost, match="3 of its messages did not come"):
            consumer.get(PATIENCE)
        assert consumer.statistics().lost == 4


def test_an_exception_while_a_torn_message_is_counted_leaves_it_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message after it shows that it is missing, and comes again where that is not counted yet."""
    with tp.Consumer("torn", shared_memory="off") as consumer, tp.Producer("torn", shared_memory="off") as producer:
        putting = in_thread(lambda: producer.put(1, PATIENCE))
        assert consumer.get(PATIENCE) == 1
        putting()
        producer.put(2, PATIENCE)
        _tear_one_out_of(consumer, monkeypatch)
        producer.put(3, PATIENCE)
        with monkeypatch.context() as raising:
            raising.setattr(side_of(consumer), "_never_come", _raise_at_once)
            with pytest.raises(_RaisedError):
                consumer.get(PATIENCE)
        assert consumer.get(PATIENCE) == 3
        assert consumer.statistics().lost == 1


def test_a_put_that_two_exceptions_cut_short_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler raises while the message is copied, and again while the put sees to that: what is put later comes."""
    large = torch.zeros(300_000)
    with tp.Consumer(LOOPBACK, shared_memory="off") as consumer, tp.Producer(consumer.endpoint, linger=0) as producer:
        taking = in_thread(lambda: [consumer.get(PATIENCE) for _ in range(4)])
        producer.put(1, PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr(resend_buffer._Source, "write", _raise_at_once)
            patch.setattr(resend_buffer.ResendBuffer, "give_up", _raise_at_once)
            with pytest.raises(_RaisedError):
                producer.put(large, PATIENCE)
        _flushed(producer)
        for number in range(2, 5):
            producer.put(number, PATIENCE)
        assert taking() == [1, 2, 3, 4]
        _flushed(producer)


@pytest.mark.parametrize("endpoint", ["welcomed", LOOPBACK, "inproc://welcomed"])
def test_an_exception_takes_the_welcome_out_of_a_connecting_consumers_hand(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The binder has met it, and goes on with messages. None is lost, and the stream does not stand still."""
    with tp.Producer(endpoint, bind=True, shared_memory="off", maxsize=4) as producer:
        with tp.Consumer(producer.endpoint, bind=False) as consumer:
            putting = in_thread(lambda: [producer.put(number, PATIENCE) for number in range(12)])
            wait_until(lambda: side_of(consumer).socket.is_connected(0.05))
            _tear_one_out_of(consumer, monkeypatch)
            assert [consumer.get(PATIENCE) for _ in range(12)] == [*range(12)]
            putting()
            producer.flush(PATIENCE)
            assert (consumer.statistics().lost, producer.statistics().lost) == (0, 0)


@pytest.mark.parametrize("endpoint", ["welcomed", "inproc://welcomed"])
def test_messages_that_follow_a_torn_welcome_are_counted_where_their_binder_goes(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes before the consumer has asked who it is: the consumer counts what it had, and meets the next binder."""
    with tp.Consumer(endpoint, bind=False) as consumer:
        with tp.Producer(endpoint, bind=True, shared_memory="off", maxsize=4, linger=0) as producer:
            putting = in_thread(lambda: [producer.put(number, PATIENCE) for number in range(3)])
            wait_until(lambda: side_of(consumer).socket.is_connected(0.05))
            _tear_one_out_of(consumer, monkeypatch)
            with monkeypatch.context() as mute:
                mute.setattr(side_of(consumer).socket, "send_small", lambda *_: True)
                putting()
                wait_in_vain(consumer, lambda: len(conversation_of(consumer)._early) == 3)
            with pytest.warns(RuntimeWarning, match="3 messages"):
                producer.close()
        with tp.Producer(endpoint, bind=True, shared_memory="off") as following:
            putting = in_thread(lambda: following.put("next", PATIENCE))
            assert consumer.get(PATIENCE) == "next"
            putting()
            assert consumer.statistics().lost == 3


def _raise_at_once(*_: object) -> None:
    raise _RaisedError


def _tear_one_out_of(consumer: tp.Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an exception take the next message out of a consumer's hand."""
    with monkeypatch.context() as tearing:
        tear_what_comes(tearing, consumer, _RaisedError)
        with pytest.raises(_RaisedError):
            consumer.get(PATIENCE)


class _RaisedError(Exception):
    """By a signal's handler."""


def test_a_producer_that_is_back_is_asked_for_what_it_keeps() -> None:
    """It was given up, and has not noticed: it is told a higher round, so that it sends again; its window may be full."""
    with tp.Consumer(LOOPBACK, peer_timeout=0.1, producers=None) as consumer:
        with RawEnd(consumer.endpoint) as raw:
            raw.say(hello("producer", identity=ELSEWHERE, round=1, end=5))
            _listen(consumer)
            first = hello_of(raw.hear_of(Kind.WELCOME)).round
        while consumer.statistics().peers:
            _listen(consumer)
        with RawEnd(consumer.endpoint) as raw:
            raw.say(hello("producer", identity=ELSEWHERE, round=2, end=5))
            _listen(consumer)
            assert hello_of(raw.hear_of(Kind.WELCOME)).round > first


@pytest.mark.slow
@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_what_is_said_to_one_that_reads_nothing_is_bounded(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says HELLO 3,000 times, each of which is answered by 300 bytes, if somebody reads them. The kernel has little room."""
    monkeypatch.setattr(strangers, "IDLE", 3000)  # else it is hung up on before
    made: Any = tp.Consumer if role == "producer" else tp.Producer
    with made(LOOPBACK, bind=True, shared_memory="off") as end, RawLine(end.endpoint) as deaf:
        deaf.leave_no_room_for_answers()
        deaf.say(*[hello(role)] * 3000)

        def all_was_heard() -> bool:
            with contextlib.suppress(tp.Empty, tp.Full):
                end.get(0.05) if role == "producer" else end.wait_for(2, 0.05)
            return not side_of(end).socket.has_incoming()

        wait_until(all_was_heard)
        answered = deaf.heard(0.2) / 300
        assert 1 < answered < 1000, "libzmq had kept what the kernel had no room for"


def test_an_idle_peer_is_sent_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that waits for a peer that computes repeats itself ever more seldom, as the peer keeps unread messages."""
    for module in (conversation, greeting):
        monkeypatch.setattr(module, "REPEAT", 0.05)
    with tp.Consumer(LOOPBACK) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer"))
        _listen(consumer, 0.3)
        assert raw.hear_header().kind == Kind.WELCOME
        assert raw.is_quiet(0), "but for empty messages"
    with RawEnd("tcp://127.0.0.1:*", bind=True) as raw, tp.Consumer(raw.endpoint, bind=False) as consumer:
        _listen(consumer, 0.6)
        hellos = 0
        while not raw.is_quiet(0):
            hellos += raw.hear_header().kind == Kind.HELLO
        assert 1 <= hellos <= 5


def _met_and_sent_three(producer: tp.Producer, raw: RawEnd) -> int:
    """Have a raw consumer meet a producer, which puts 0, 1, 2. Return the number before that of the first one."""
    raw.say(hello("consumer", round=1))
    for number in range(3):
        producer.put(number, PATIENCE)
    first = raw.hear_first()
    assert _sequences(raw, 3) == [first + 1, first + 2, first + 3]
    return first


def test_a_producer_sends_again_once_for_each_time_it_is_asked() -> None:
    """All that was not taken, and no more; a HELLO that is only repeated changes nothing."""
    with tp.Producer(LOOPBACK, bind=True, linger=0) as producer, RawEnd(producer.endpoint) as raw:
        first = _met_and_sent_three(producer, raw)
        for _ in range(2):
            raw.say(hello("consumer", round=2, sequence=first + 1))
        _until(lambda: producer.statistics().resent == 2)
        producer.put(3, PATIENCE)
        assert _sequences(raw, 3) == [first + 2, first + 3, first + 4]
        raw.say(pack(Kind.CREDIT, first + 4))
        producer.flush(PATIENCE)
        assert producer.statistics().resent == 2
        assert side_of(producer)._resend_buffer.nbytes == 0


def test_a_consumer_that_heard_no_welcome_asks_anew_by_its_next_connection(free_port: int) -> None:
    """Its binder may have sent as much as may be in flight, and all of that was swallowed with the WELCOME."""
    endpoint, rounds = f"tcp://127.0.0.1:{free_port}", []
    with tp.Consumer(endpoint, bind=False) as consumer:
        getting = in_thread(lambda: consumer.get(PATIENCE))
        for _ in range(2):
            with RawEnd(endpoint, bind=True) as raw:
                rounds.append(hello_of(raw.hear_of(Kind.HELLO)).round)
                if len(rounds) == 2:
                    raw.say(hello("producer", Kind.WELCOME, round=1))
                    raw.say(*exchange.sent("after all"))
        assert getting() == "after all"
        assert rounds[0] < rounds[1]


@pytest.mark.slow
def test_a_producer_that_waits_sends_again_once_what_it_sent_before_has_left() -> None:
    """It was asked for that while nothing of it was read yet. It needs no further word from its consumer."""
    message = torch.zeros(300_000, dtype=torch.uint8)
    with (
        tp.Producer(LOOPBACK, bind=True, shared_memory="off", linger=0) as producer,
        RawLine(producer.endpoint) as line,
    ):
        line.say(hello("consumer", round=1))
        producer.wait_for(1, PATIENCE)
        line.leave_no_room_for_answers()
        for _ in range(3):
            producer.put(message)
        line.say(hello("consumer", round=2))
        flushing = in_thread(lambda: _flushed(producer))
        assert line.heard(0.7) > 2 * 3 * len(message)
        line.reset()
        flushing()
        assert producer.statistics().resent == 3
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            producer.close()


def _flushed(producer: tp.Producer) -> None:
    with contextlib.suppress(tp.Full):
        producer.flush(1.5)


def test_the_next_binder_is_told_of_no_losses_of_the_one_before(free_port: int) -> None:
    """A producer out of sight had messages with a binder that died, and closes before the next binder has answered it.

    Its goodbye says which binder its last message is about: the same one may be back by another connection.
    """
    endpoint = f"tcp://127.0.0.1:{free_port}"
    with tp.Producer(endpoint, linger=0) as producer:
        with RawEnd(endpoint, bind=True) as raw:
            putting = in_thread(lambda: [producer.put(number, PATIENCE) for number in range(3)])
            raw.hear_of(Kind.HELLO)
            raw.say(hello("consumer", Kind.WELCOME, end=5, round=1))
            putting()
        with RawEnd(endpoint, bind=True) as raw:
            wait_until(lambda: bool(producer.statistics()) and not raw.is_quiet(0.05))
            assert hello_of(raw.hear_of(Kind.HELLO)).sequence == 0
            with pytest.warns(RuntimeWarning, match="3 messages"):
                producer.close()
            goodbye = raw.hear_of(Kind.GOODBYE)
            assert (goodbye.sequence, ending_of(goodbye).to) == (3, 5)


def test_a_producer_tells_its_next_binder_from_where_it_counts_before_it_says_goodbye(free_port: int) -> None:
    """Else that binder takes what the one before it had for messages that did not come."""
    endpoint = f"tcp://127.0.0.1:{free_port}"
    with tp.Producer(endpoint, linger=0, peer_timeout=0.1) as producer:
        with RawEnd(endpoint, bind=True) as raw:
            putting = in_thread(lambda: [producer.put(number, PATIENCE) for number in range(3)])
            raw.hear_of(Kind.HELLO)
            raw.say(hello("consumer", Kind.WELCOME, end=5, round=1))
            putting()
        with RawEnd(endpoint, bind=True) as raw:
            wait_until(lambda: bool(producer.statistics()) and not raw.is_quiet(0.05))
            raw.hear_of(Kind.HELLO)
            raw.say(hello("consumer", Kind.WELCOME, end=6, round=1))
            # On a busy machine the first binder is given up before the second one says WELCOME.
            wait_until(lambda: producer.statistics().lost == 3 and producer.statistics().peers)
            with pytest.warns(RuntimeWarning, match="3 messages"):
                producer.close()
            said = raw.hear_of(Kind.HELLO)
            while hello_of(said).sequence != 3:
                said = raw.hear_of(Kind.HELLO)
            assert raw.hear_of(Kind.GOODBYE).sequence == 3


@pytest.mark.parametrize(("to", "lost"), [(0, 3), ("us", 3), (5, 0)])
def test_a_goodbye_that_is_about_another_binder_tells_of_no_losses(to: int | str, lost: int) -> None:
    """One that is about this one does: what has not come by then never will."""
    with tp.Consumer(LOOPBACK, peer_timeout=0.1) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", end=7, round=1))
        wait_in_vain(consumer, lambda: consumer.statistics().peers)
        raw.say(pack_goodbye(3, Ending(), conversation_of(consumer).end if to == "us" else int(to)))
        with pytest.raises(tp.PeerLost if lost else tp.EndOfStream):
            consumer.get(PATIENCE)
        assert consumer.statistics().lost == lost


@pytest.mark.parametrize("endpoint", ["tcp", "ipc"])
def test_a_producer_that_met_who_computes_and_is_gone_was_there(endpoint: str, free_port: int, tmp_path: Path) -> None:
    """Its WELCOME, its message and its goodbye have come, though their connection has ended before anybody looked."""
    endpoint = f"ipc://{tmp_path}/gone.sock" if endpoint == "ipc" else f"tcp://127.0.0.1:{free_port}"
    with tp.Consumer(endpoint, bind=False) as consumer:
        with RawEnd(endpoint, bind=True) as raw:
            raw.until_answered(consumer)
            raw.hear_of(Kind.HELLO)
            raw.say(hello("producer", Kind.WELCOME, round=int(endpoint.startswith("tcp"))))
            raw.say(*exchange.sent("before it went"))
            raw.say(pack_goodbye(1, Ending()))
        (tmp_path / "gone.sock").unlink(missing_ok=True)
        wait_until(lambda: not side_of(consumer).socket.is_connected())
        assert consumer.get(PATIENCE) == "before it went"
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)


def test_a_producer_says_welcome_before_it_sends_again() -> None:
    """To a consumer that did not hear the first one all that came before would be a stranger's."""
    with tp.Producer(LOOPBACK, bind=True, linger=0) as producer, RawEnd(producer.endpoint) as raw:
        first = _met_and_sent_three(producer, raw)
        raw.say(hello("consumer", round=2))
        _until(lambda: producer.statistics().resent == 3)
        assert raw.hear_header().kind == Kind.WELCOME
        assert _sequences(raw, 3) == [first + 1, first + 2, first + 3]
        raw.say(pack(Kind.CREDIT, first + 3))
        producer.flush(PATIENCE)


@pytest.mark.slow
def test_a_consumer_elsewhere_is_waited_for_and_then_given_up() -> None:
    """It is out of sight: as long as it may come back its messages are kept, and then they are lost, told once."""
    with tp.Producer(LOOPBACK, bind=True, linger=0, peer_timeout=2.5) as producer:
        with RawEnd(producer.endpoint) as raw:
            raw.say(hello("consumer", identity=ELSEWHERE))
            producer.put(1, PATIENCE)
            first = raw.hear_first()
            assert _sequences(raw, 1) == [first + 1]
        away = r"consumer pid 2 on far-away \(out of sight: .*, not heard of for \d\.\d s\)"
        with pytest.raises(tp.Full, match=rf"not taken in time: {away} holds 1 untaken"):
            _flush_until_away(producer)
        with pytest.raises(tp.Full, match=rf"no room in time: {away}"):
            producer.put(2, 0)
        assert producer.statistics().lost == 0
        with pytest.raises(tp.PeerLost, match=r"pid 2 on far-away vanished .* with 1 messages"):
            producer.flush(PATIENCE)
        producer.flush(0)
        assert producer.statistics().lost == 1


def _flush_until_away(producer: tp.Producer) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            producer.flush(0.02)
        except tp.Full as full:
            if "not heard of" in str(full):
                raise


def test_another_end_of_the_same_process_is_another_peer(free_port: int) -> None:
    """A producer reports messages that the last consumer had not taken as lost. The next one gets all later ones."""
    endpoint = f"tcp://127.0.0.1:{free_port}"
    with tp.Producer(endpoint, linger=0) as producer:
        for end in (1, 2):
            with RawEnd(endpoint, bind=True) as raw:
                putting = in_thread(lambda end=end: _put_to(producer, end))
                raw.hear_of(Kind.HELLO)
                raw.say(hello("consumer", Kind.WELCOME, end=end))
                assert raw.hear_of(Kind.DATA).sequence == end
                putting()
                if end == 2:
                    raw.say(pack(Kind.CREDIT, end))
                    with pytest.raises(tp.PeerLost, match="with 1 messages"):
                        producer.flush(PATIENCE)
        assert producer.statistics().lost == 1


def _put_to(producer: tp.Producer, end: int) -> None:
    """Put, to the end that has just come."""
    while end > 1 and producer.statistics().lost == 0:
        continue
    producer.put(end, PATIENCE)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many bytes put waits, though there is credit; a single message may always go."""
    monkeypatch.setattr(resend_buffer, "KEPT_AT_MOST", PIECE)
    large = torch.ones(PIECE + 1, dtype=torch.uint8)
    with tp.Consumer(LOOPBACK) as consumer, tp.Producer(consumer.endpoint, linger=0, shared_memory="off") as producer:
        putting = in_thread(lambda: producer.put(large, PATIENCE))
        assert torch.equal(consumer.get(PATIENCE), large)
        putting()
        producer.flush(PATIENCE)
        producer.put(large, PATIENCE)
        with pytest.raises(
            tp.Full, match=r"1,048,\d{3} bytes are kept until they are taken, and the limit is 1,048,576: "
        ):
            producer.put(large, 0.2)
        assert torch.equal(consumer.get(PATIENCE), large)
        producer.put(large, PATIENCE)
        assert torch.equal(consumer.get(PATIENCE), large)


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param("a" * (PIECE // 2), id="text"),
        pytest.param([*range(1 << 20, (1 << 20) + 100_000)], id="numbers"),
        pytest.param({f"key {number}": torch.ones(1) for number in range(5000)}, id="keys, shapes and small tensors"),
    ],
)
def test_what_is_no_payload_is_kept_and_counts(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text beyond the limit was kept without end."""
    monkeypatch.setattr(resend_buffer, "KEPT_AT_MOST", PIECE)
    with tp.Consumer(LOOPBACK) as consumer, tp.Producer(consumer.endpoint, linger=0, shared_memory="off") as producer:
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        put = 0
        with contextlib.suppress(tp.Full):
            while put < 5:
                producer.put(tree, 0.2)
                put += 1
        assert put < 3
        for _ in range(put):
            consumer.get(PATIENCE)


def test_the_room_of_what_is_kept() -> None:
    """Up to the limit, to the byte; and whatever comes when nothing is kept."""
    kept = resend_buffer.ResendBuffer()
    assert kept.has_room(1 << 40)
    kept.nbytes = 1
    assert kept.has_room(resend_buffer.KEPT_AT_MOST - 1)
    assert not kept.has_room(resend_buffer.KEPT_AT_MOST)


def _keep(keeper: ResendBuffer, *sizes: int) -> list[SentMessage]:
    """Keep messages, each of which is a tensor of so many bytes."""
    found = []
    for nbytes in sizes:
        found.append(SentMessage(len(found)))
        message = encode(torch.ones(nbytes, dtype=torch.uint8), serializer_named("raw"))
        assert list(keeper.keep(found[-1], message))
    return found


def _alive(made: list[weakref.ref[Any]]) -> int:
    return sum(len(block) for each in made if (block := each()) is not None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """The memory that messages were kept in."""
    blocks, fresh = list[weakref.ref[Any]](), resend_buffer._fresh

    def noted(size: int) -> Any:
        block = fresh(size)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(resend_buffer, "_fresh", noted)
    return blocks


def test_what_is_kept_has_memory_of_about_its_size(made: list[weakref.ref[Any]]) -> None:
    """Less than 64 KiB more, or than a megabyte where it is larger. What was taken is used again."""
    for nbytes, most in ((70_000, 1 << 16), (300_000, 1 << 16), (PIECE, 0), (PIECE + 1, PIECE)):
        keeper = ResendBuffer()
        for _ in range(3):
            for kept in _keep(keeper, *[nbytes] * 4):
                keeper.let_go(kept)
        assert 4 * nbytes <= _alive(made) <= 4 * (nbytes + most)


def test_what_is_idle_is_bounded_whatever_its_sizes(
    made: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it goes before a message is refused for want of memory."""
    monkeypatch.setattr(resend_buffer, "KEPT_AT_MOST", 4 * PIECE)
    keeper = ResendBuffer()
    for nbytes in range(1 << 16, PIECE + 1, 1 << 16):
        for kept in _keep(keeper, *[nbytes] * (4 * PIECE // nbytes)):
            keeper.let_go(kept)
        del kept
        assert _alive(made) <= 4 * PIECE
    with monkeypatch.context() as limited:
        limited.setattr(resend_buffer, "addresses_left", lambda: 0 if _alive(made) else 1 << 40)
        (kept,) = _keep(keeper, 70_000)
    monkeypatch.setattr(resend_buffer, "addresses_left", lambda: 0)
    before = keeper.nbytes
    with pytest.raises(OutOfMemory, match=r"of 70,\d{3} bytes .* 0 bytes are left .*ulimit -v.* It was not sent"):
        _keep(keeper, 70_000)
    assert keeper.nbytes == before
    keeper.let_go(kept)
    assert _keep(keeper, 70_000)


def test_what_was_kept_for_a_consumer_that_left_is_given_back(made: list[weakref.ref[Any]]) -> None:
    """The next one comes at once, and its messages lie in that memory."""
    tensor = torch.zeros(PIECE, dtype=torch.uint8)
    with tp.Producer(LOOPBACK, bind=True, shared_memory="off") as producer:

        def put() -> None:
            for _ in range(8):
                producer.put(tensor, PATIENCE)
            producer.flush(PATIENCE)

        for is_last in (False, True):
            with tp.Consumer(producer.endpoint, bind=False, shared_memory="off") as consumer:
                putting = in_thread(put)
                for _ in range(8):
                    consumer.get(PATIENCE)
                putting()
                assert _alive(made)
                if is_last:
                    wait_until(lambda: producer.trim() >= 0 and not _alive(made))
            wait_until(lambda: not producer.statistics().peers)  # else it is sent some of the next one's


def test_nothing_of_one_consumers_message_is_sent_to_another() -> None:
    """The memory is used again. Payloads begin at round places, so some bytes lie between those of a message in pieces."""
    with tp.Producer(LOOPBACK, bind=True, shared_memory="off") as producer:
        for value, parts in ((0xFF, 1), (1, 20)):
            with RawEnd(producer.endpoint) as raw:
                raw.say(hello("consumer", identity=ELSEWHERE))
                size = 2_000_660 // parts
                producer.put([torch.full((size,), value, dtype=torch.uint8) for _ in range(parts)], PATIENCE)
                pieces = []
                while (header := unpack(memoryview((frames := raw.hear())[0]))).kind != Kind.DATA:
                    pieces += frames[1:] if header.kind == Kind.PIECE else []
                assert sum(map(len, pieces)) >= 2_000_660
                assert (0xFF in b"".join(pieces)) == (value == 0xFF)
                raw.say(pack(Kind.CREDIT, header.sequence))
                raw.say(pack(Kind.GOODBYE, header.sequence))
                wait_until(lambda: not producer.statistics().peers)


def test_memory_of_messages_is_used_again_when_nothing_refers_to_it() -> None:
    """A tensor that came in pieces keeps its bytes as long as any view of it lives; then the next one lies there."""
    with tp.Consumer(LOOPBACK, copy=False) as consumer, tp.Producer(consumer.endpoint, shared_memory="off") as producer:

        def through(value: int) -> torch.Tensor:
            putting = in_thread(lambda: producer.put(torch.full((3 * PIECE,), value, dtype=torch.uint8), PATIENCE))
            got = consumer.get(PATIENCE)
            putting()
            return got

        first = through(1)
        address, view = first.data_ptr(), first[10:20]
        del first
        second = through(2)
        assert second.data_ptr() != address
        assert view.tolist() == [1] * 10
        del view
        third = through(3)
        assert third.data_ptr() == address
        assert (second[-1], third[0]) == (2, 3)
        third[0] = 4  # it is the caller's


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2], ids=str)
def test_what_is_narrowed_is_made_where_it_is_kept(dtype: torch.dtype) -> None:
    """Piece by piece."""
    wide, mixed, strided = torch.randn(100_000, 3), torch.arange(30_000), torch.randn(2, 600_000)[:, ::2]
    kept, keeper, made = SentMessage(7), ResendBuffer(), narrowing(serializer_named("raw"), dtype)
    assert made is not None
    message = encode(["small", torch.ones(3), wide, mixed, wide.double().t(), strided], made)
    parts = list(keeper.keep(kept, message))
    assert parts == kept.parts
    *pieces, last = parts
    assert unpack(memoryview(last[0])).kind == Kind.DATA
    laid = b""
    for head, part in pieces:
        said = piece_of(unpack(memoryview(head)))
        assert said.offset == len(laid)
        assert len(part) <= PIECE
        assert any(np.shares_memory(part, block) for block in kept.blocks)
        laid += bytes(part)
    assert {piece_of(unpack(memoryview(head))).total for head, _ in pieces} == {len(laid)}
    at = 0
    for tensor in (wide.to(dtype), mixed, wide.to(dtype), strided.to(dtype)):
        at = -(-at // ALIGN) * ALIGN
        expected = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert laid[at : at + len(expected)] == expected
        at += len(expected)
    assert at == len(laid)


@pytest.mark.parametrize(("missing", "is_asked_for"), [((1 << 13) + 1, False), (1 << 13, True)])
def test_when_memory_is_asked_for(missing: int, is_asked_for: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer asks for a message's memory when 8 KiB of it are missing, and not a byte earlier."""
    total = 3 * PIECE
    pool = BufferPool()
    building, asked, memory = Reassembly(1, Piece(0, total), pool), list[int](), pool.memory
    monkeypatch.setattr(pool, "memory", lambda nbytes: (asked.append(nbytes), memory(nbytes))[1])
    frame = np.zeros(total - missing, np.uint8)
    kept = weakref.ref(frame)
    assert building.add(Piece(0, total), frame.data)
    del frame
    assert asked == ([total] if is_asked_for else [])
    assert (kept() is None) == is_asked_for  # else it waits in its frame


def test_what_this_machine_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message may announce at most all memory of this machine, and half of what is left of it."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(reassembly, "headroom", lambda: 2 * most - 1)
    with pytest.raises(OutOfMemory, match=rf"{most:,} bytes, .*: {2 * most - 1:,} bytes of memory are left"):
        BufferPool().see_room_for(most)
    monkeypatch.setattr(reassembly, "headroom", lambda: 2 * most)
    BufferPool().see_room_for(most)
    with pytest.raises(ProtocolError, match=rf"{most + 1:,} bytes, and this machine has {most:,}"):
        BufferPool().see_room_for(most + 1)


def test_what_this_process_may_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the message, while it comes, and some for the rest of the process; what lies ready needs none of it."""
    regions, least = BufferPool(), 2 * PIECE + (1 << 25)
    monkeypatch.setattr(reassembly, "addresses_left", lambda: least)
    regions.see_room_for(PIECE)
    monkeypatch.setattr(reassembly, "addresses_left", lambda: least - 1)
    with pytest.raises(OutOfMemory, match=rf"{PIECE:,} bytes, which .*: {least - 1:,} bytes are left .*ulimit -v"):
        regions.see_room_for(PIECE)
    refused = Reassembly(1, Piece(0, PIECE), regions)
    frame = np.zeros(PIECE >> 1, np.uint8)
    kept = weakref.ref(frame)
    assert refused.add(Piece(0, PIECE), frame.data)
    del frame
    assert refused.refused
    assert kept() is None  # nor for later
    region = regions.memory(PIECE)
    del region
    assert regions.ready(PIECE) is not None


def test_announced_sizes_have_idle_memory_given_back_in_a_fifth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """To announce takes seventy bytes, and to give back milliseconds. What has come may ask for it each time."""
    given = list[float]()

    def give_back() -> int:
        given.append(time.monotonic())
        while time.monotonic() < given[-1] + 0.02:
            pass
        return 1

    regions = BufferPool(give_back)
    monkeypatch.setattr(reassembly, "headroom", lambda: 0)
    began = time.monotonic()
    while time.monotonic() < began + 0.5:
        with pytest.raises(OutOfMemory):
            regions.see_room_for(64 * PIECE)
    assert 1 < len(given) <= 6
    before = len(given)
    with pytest.raises(OutOfMemory):
        regions.memory(64 * PIECE)
    assert len(given) == before + 1


def test_which_message_is_completed() -> None:
    """The one whose number the pieces had, and that comes with no payload of its own."""
    tensor = torch.full((PIECE,), 7, dtype=torch.uint8)
    building = Reassembly(1, Piece(0, PIECE), BufferPool())
    assert building.add(Piece(0, PIECE), memoryview(tensor.numpy()))
    (head, payload), (another, _) = exchange.sent(tensor), exchange.sent(tensor, sequence=2)
    assert building.completed(unpack(memoryview(another)), [another])[1] == [another]
    assert building.completed(unpack(memoryview(head)), [head, b"its own"])[1] == [head, b"its own"]
    _, (_, put_together) = building.completed(unpack(memoryview(head)), [head])
    assert bytes(put_together) == bytes(payload)


@pytest.mark.parametrize("missing", ["a byte", "memory"])
def test_what_is_not_completed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of which the last byte has not come, though it has its place; or of which all came, and had none."""
    payload, (head, _) = memoryview(bytes(PIECE)), exchange.sent(torch.zeros(PIECE, dtype=torch.uint8))
    if missing == "memory":
        monkeypatch.setattr(reassembly, "addresses_left", lambda: 0)
    building = Reassembly(1, Piece(0, PIECE), BufferPool())
    assert building.add(Piece(0, PIECE), payload[: PIECE - 1] if missing == "a byte" else payload)
    assert bool(building.refused) == (missing == "memory")
    assert building.completed(unpack(memoryview(head)), [head])[1] == [head]
    if missing == "a byte":
        assert building.add(Piece(PIECE - 1, PIECE), payload[:1])
        assert len(building.completed(unpack(memoryview(head)), [head])[1]) == 2


@pytest.mark.parametrize("offset", [0, 3])
def test_a_piece_beyond_what_was_announced(offset: int) -> None:
    """To the last byte, and not one further; whether or not what comes before it is there."""
    building = Reassembly(1, Piece(0, 8), BufferPool())
    assert building.add(Piece(offset, 8), memoryview(bytes(8 - offset))) == (offset == 0)
    with pytest.raises(ProtocolError, match=f"a piece of bytes {offset} to 9 of 8, in 8 announced"):
        building.add(Piece(offset, 8), memoryview(bytes(9 - offset)))


def test_how_much_lies_ready_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer keeps returned memory up to the limit, to the byte. Beyond the limit the oldest goes."""
    limit = 2 * len(BufferPool().memory(PIECE).obj.whole)  # type: ignore[attr-defined]
    for most, left in ((limit, 2), (limit - 1, 1)):
        monkeypatch.setattr(reassembly, "IDLE_AT_MOST", most)
        regions = BufferPool()
        handed_out = [regions.memory(PIECE) for _ in range(2)]
        last = handed_out[-1].obj.whole  # type: ignore[attr-defined]
        while handed_out:
            del handed_out[0]
        ready: list[Any] = list(iter(lambda regions=regions: regions.ready(PIECE), None))  # type: ignore[misc]
        assert len(ready) == left
        assert ready[0].obj.whole is last
        monkeypatch.setattr(reassembly, "IDLE_AT_MOST", 0)


def test_no_memory_at_the_very_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """There seemed to be enough when it began: the pieces are let go, and asked for once and not again."""
    regions, asked, kept = BufferPool(), [], list[weakref.ref[Any]]()
    building = Reassembly(1, Piece(0, 2 * PIECE), regions)

    def fail(*arguments: Any) -> Any:
        asked.append(arguments)
        raise MemoryError("none left")

    monkeypatch.setattr(reassembly.np, "empty", fail)
    for offset, size in ((0, PIECE), (PIECE, PIECE - 100), (PIECE, PIECE - 100), (2 * PIECE - 100, 100)):
        frame = np.zeros(size, np.uint8)
        kept.append(weakref.ref(frame))
        assert building.add(Piece(offset, 2 * PIECE), frame.data)
        del frame
    assert len(asked) == 1
    assert [each() for each in kept] == [None] * 4
    assert "there is no memory: none left" in building.refused
    assert building.completed(unpack(memoryview(pack(Kind.DATA, 1))), ["header"])[1] == ["header"]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([(_piece(0, 1 << 62), b"x")], id="more than there is"),
        pytest.param([(_piece(0, (1 << 64) - 1), b"x")], id="more than there can be"),
        pytest.param([(_piece(0, 4), b"fives")], id="beyond what was announced"),
        pytest.param([(_piece(0, 8), b"four"), (_piece(4, 9), b"four")], id="of another length"),
        pytest.param([(_piece(0, 4), b"four", b"more")], id="of two frames"),
        pytest.param([(_piece(0, 4),)], id="of none"),
    ],
)
def test_pieces_that_are_none(pieces: list[tuple[bytes, ...]]) -> None:
    """They are counted, with the rule that they broke; the message they were for is dropped, and the next one comes."""
    with tp.Consumer(LOOPBACK) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", round=1))
        for piece in pieces:
            raw.say(*piece)
        raw.say(exchange.sent(torch.ones(PIECE))[0])
        raw.say(*exchange.sent("good", sequence=2))
        assert consumer.get(PATIENCE) == "good"
        assert consumer.statistics().rejected == 2
        assert "payload frames" in consumer.statistics().last_rejection


@pytest.mark.parametrize("identity", [ELSEWHERE, process.identity()], ids=["another host", "this host"])
def test_the_size_of_pieces(identity: Identity) -> None:
    """No frame is longer than what a slow line gets over before it is taken for dead."""
    tree = [torch.full((size,), size % 251, dtype=torch.uint8) for size in (PIECE + 1, 70_001, 3 * PIECE)]
    total = PIECE + 64 + 70_016 + 3 * PIECE
    with tp.Producer(LOOPBACK, bind=True, linger=0) as producer, RawEnd(producer.endpoint) as raw:
        raw.say(hello("consumer", identity=identity, window=1))
        producer.put(tree, PATIENCE)
        laid = bytearray()
        while (head := unpack(memoryview((frames := raw.hear())[0]))).kind != Kind.DATA:
            if head.kind == Kind.PIECE:
                assert piece_of(head) == (len(laid), total)
                assert sum(map(len, frames[1:])) == min(PIECE, total - len(laid))
                assert max(map(len, frames)) <= SHORT_FRAGMENT
                laid += b"".join(frames[1:])
        at = 0
        for tensor in tree:
            assert laid[at : at + len(tensor)] == bytes(tensor.numpy())
            at += -(-len(tensor) // 64) * 64
        raw.say(pack(Kind.CREDIT, head.sequence))
        producer.flush(PATIENCE)


def test_frames_are_short_until_a_line_is_found_to_be_quick() -> None:
    """A message that got over in no time tells that."""
    tree = {"small": [torch.zeros(20_000)] * 30, "large": torch.zeros(1 << 18)}

    def longest(raw: RawEnd) -> int:
        producer.put(tree, PATIENCE)
        found = 0
        while (head := unpack(memoryview((frames := raw.hear())[0]))).kind != Kind.DATA:
            found = max(found, *map(len, frames))
        raw.say(pack(Kind.CREDIT, head.sequence))
        producer.flush(PATIENCE)
        return max(found, *map(len, frames))

    with tp.Producer(LOOPBACK, bind=True, linger=0) as producer, RawEnd(producer.endpoint) as raw:
        raw.say(hello("consumer", window=1))
        assert longest(raw) <= SHORT_FRAGMENT
        assert longest(raw) > SHORT_FRAGMENT


@pytest.mark.slow
def test_a_slow_line_that_lets_short_messages_by_is_torn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a router counts tokens. It was found to be quick by a short one, and is not again."""
    monkeypatch.setattr(peers.Peers, "sight_of", lambda *_: Sight(why_not="as if it were another host"))
    with (
        tp.Consumer(LOOPBACK, shared_memory="off") as consumer,
        Proxy(int(consumer.endpoint.rpartition(":")[2])) as line,
        tp.Producer(line.endpoint) as producer,
    ):
        for _ in range(3):
            for rate, size in ((0, 5_000), (200_000, 125_000)):
                line.rate = rate
                putting = in_thread(
                    lambda size=size: (producer.put(torch.ones(size), PATIENCE), producer.flush(PATIENCE))
                )  # type: ignore[misc]
                assert consumer.get(PATIENCE).sum() == size
                putting()
        assert producer.statistics().resent == 1


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[10_000] * 8, [80_000]], ids=["small", "large"])
def test_messages_get_over_a_slow_line(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """One of half a megabit a second: no silence is taken for a death, and nothing is sent again."""
    monkeypatch.setattr(peers.Peers, "sight_of", lambda *_: Sight(why_not="as if it were another host"))
    tree = {str(number): torch.rand(size) for number, size in enumerate(sizes)}
    with (
        tp.Consumer(LOOPBACK, shared_memory="off") as consumer,
        Proxy(int(consumer.endpoint.rpartition(":")[2]), rate=65_536) as line,
        tp.Producer(line.endpoint) as producer,
    ):
        putting = in_thread(lambda: producer.put(tree, PATIENCE))
        got = consumer.get(PATIENCE)
        assert all(torch.equal(got[name], tensor) for name, tensor in tree.items())
        putting()
        producer.flush(PATIENCE)
        assert producer.statistics().resent == 0


@pytest.mark.parametrize("size", [3 * PIECE, 40 * PIECE, 300_000])
def test_a_message_in_fragments_for_which_there_is_no_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes, or is told and dropped, and the next one comes: no line is torn, and nothing asked for again."""
    with (
        tp.Consumer(LOOPBACK, shared_memory="off") as consumer,
        tp.Producer(consumer.endpoint) as producer,
    ):
        putting = in_thread(
            lambda: [producer.put(each, PATIENCE) for each in ("met", torch.ones(size, dtype=torch.uint8), 7)]
        )
        assert consumer.get(PATIENCE) == "met"
        putting()
        for module in (room, reassembly):
            monkeypatch.setattr(module, "headroom", lambda: 0)
        monkeypatch.setattr(room, "_unlooked", room.LOOKED)
        told = 0
        try:
            assert consumer.get(PATIENCE).sum() == size
        except tp.OutOfMemory:
            told = 1
        assert told == (size != 3 * PIECE)  # what lies ready does for it
        assert consumer.get(PATIENCE) == 7
        producer.flush(PATIENCE)
        found = consumer.statistics()
        assert (found.rejected, found.lost, producer.statistics().resent) == (told, 0, 0)


def test_a_message_with_a_piece_missing_is_dropped() -> None:
    """A producer that does not send its pieces again gets no more than that."""
    head, payload = exchange.sent(torch.ones(PIECE, dtype=torch.uint8))
    with tp.Consumer(LOOPBACK) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", round=1))
        raw.say(_piece(0, PIECE), payload[: PIECE // 2])
        raw.say(head)
        raw.say(*exchange.sent("good", sequence=2))
        assert consumer.get(PATIENCE) == "good"
        assert consumer.statistics().rejected == 1
        assert raw.hear_of(Kind.CREDIT).sequence == 1


def test_a_put_that_is_cut_short_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the middle of a message's pieces: it never comes, and the next one does."""
    with tp.Consumer(LOOPBACK) as consumer, tp.Producer(consumer.endpoint, shared_memory="off") as producer:
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        lend, sent = side_of(producer).socket.lend, []

        def cut(*arguments: Any, **options: Any) -> Any:
            sent.append(arguments)
            if len(sent) == 2:
                raise KeyboardInterrupt
            return lend(*arguments, **options)

        monkeypatch.setattr(side_of(producer).socket, "lend", cut)
        with contextlib.suppress(KeyboardInterrupt):
            producer.put(torch.ones(4 * PIECE, dtype=torch.uint8), PATIENCE)
        putting = in_thread(lambda: producer.put("next", PATIENCE))
        assert consumer.get(PATIENCE) == "next"
        putting()
        producer.flush(PATIENCE)
        assert (producer.statistics().in_flight, consumer.statistics().lost) == (0, 0)


def test_so_many_that_vanished_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer remembers its last message from each producer that vanished, should it come back.

    Beyond the limit it forgets the oldest. One that said how it ended, that sends nothing again, that does not say which end it
    is, or that sent nothing, pushes out none.
    """
    monkeypatch.setattr(receiver, "REMEMBERED", 2)
    with tp.Consumer(LOOPBACK) as consumer:

        def remembered() -> list[int]:
            link = side_of(consumer)
            return [end for end in range(7) if link.new_peer(b"", _hello(end=end), Sight()).taken]

        for end, resends, how in ((1, 1, How.LOST), (2, 1, How.LOST), (3, 1, How.GOODBYE), (4, 0, How.LOST)):
            _part(consumer, end, resends, how)
        assert remembered() == [1, 2]
        _part(consumer, 0, 1, How.LOST)
        assert remembered() == [1, 2]
        _part(consumer, 5, 1, How.LOST)
        assert remembered() == [2, 5]
        _part(consumer, 6, 1, How.LOST, taken=0)
        assert remembered() == [2, 5]


def test_one_that_was_given_up_and_is_lost_again_before_it_is_settled_is_told() -> None:
    """It had sent messages: what it says when it is back takes none of that away."""
    with tp.Consumer(LOOPBACK, producers=1) as consumer:
        _part(consumer, 7, 1, How.LOST)
        assert consumer.statistics().vanished == 1
        back = side_of(consumer).new_peer(b"again", _hello(7, 1, sequence=70), Sight())
        tell(consumer, events.Joined(back))
        assert consumer.statistics().vanished == 0
        back.leave(How.LOST)
        tell(consumer, events.Left(back))
        assert consumer.statistics().vanished == 1
        with pytest.raises(tp.PeerLost, match="vanished"):
            consumer.get(PATIENCE)


def test_a_consumer_is_remembered_however_many_come_that_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages go on where they were when it comes back. Else it takes the next for some that it has, and drops them."""
    monkeypatch.setattr(sender, "REMEMBERED", 2)
    monkeypatch.setattr(conversation, "REPEAT", 0.05)
    with tp.Producer(LOOPBACK, bind=True, shared_memory="off", linger=0, peer_timeout=0.05) as producer:

        def come(end: int, sequence: int = 0) -> int:
            with RawEnd(producer.endpoint) as raw:
                raw.say(hello("consumer", end=end, sequence=sequence))
                producer.wait_for(1, PATIENCE)
                first = raw.hear_first()
                if end >= 7:
                    producer.put("word", PATIENCE)
                    assert raw.hear_of(Kind.DATA).sequence == first + 1
                    raw.say(pack(Kind.CREDIT, first + 1))
                    producer.flush(PATIENCE)
            wait_until(lambda: not producer.statistics().peers)
            return first

        first = come(7)
        for stranger in (1, 2, 3):
            assert come(stranger) == first
        assert come(7, first + 1) == first + 1
        for other in (8, 9):
            come(other)
        assert come(7) == first, "of more than that the oldest is forgotten"


def _hello(end: int = 7, resends: int = 1, sequence: int = 0) -> Hello:
    return Hello("producer", ELSEWHERE, 8, sequence=sequence, end=end, round=resends)


def _part(consumer: tp.Consumer, end: int, resends: int, how: How, taken: int | None = None) -> None:
    left = ProducerPeer(b"", _hello(end, resends))
    left.taken, left.settled = 10 * end if taken is None else taken, True
    left.leave(how)
    tell(consumer, events.Left(left))


def _peer(taken: int, *, resends: bool = True, sequence: int = 0, end: int = 7) -> ProducerPeer:
    found = ProducerPeer(b"", _hello(end, int(resends), sequence))
    found.taken = found.began = taken
    found.settled = True
    return found


def _arrived(peer: ProducerPeer, sequence: int) -> events.Arrived:
    header = memoryview(pack(Kind.DATA, sequence))
    return events.Arrived(peer, unpack(header), [header])


def test_which_message_is_the_next() -> None:
    """A consumer drops a message that it took before.

    If the producer can fill a gap, the consumer asks for that and drops messages behind the gap, too.
    """
    with tp.Consumer(LOOPBACK) as consumer:
        one, old = _peer(5), _peer(5, resends=False)

        def is_next(peer: ProducerPeer, sequence: int) -> bool:
            found = tell(consumer, _arrived(peer, sequence))
            conversation_of(consumer).events.clear()
            return found is not None

        assert [is_next(one, sequence) for sequence in (4, 5, 6, 7)] == [False, False, True, False]
        assert (consumer.statistics().duplicates, one.round) == (2, 2)
        assert [is_next(old, sequence) for sequence in (5, 6, 7)] == [False, True, True]
        assert (consumer.statistics().duplicates, old.round) == (3, 1)


def test_frames_of_a_producer_that_shares_memory() -> None:
    """Its messages come by the queue, and nothing else does."""
    with tp.Consumer(LOOPBACK) as consumer:
        sharing, other = _peer(0), _peer(0)
        sharing.queue = object()  # type: ignore[assignment]
        piece = unpack(memoryview(_piece(0, 8)))
        tell(consumer, events.PieceArrived(other, piece, [b"", memoryview(bytes(4))]))
        assert other.reassembly is not None
        tell(consumer, _arrived(sharing, 1))
        assert "a message in frames from a producer that shares memory" in consumer.statistics().last_rejection
        tell(consumer, events.PieceArrived(sharing, piece, [b"", memoryview(bytes(4))]))
        assert (sharing.reassembly, consumer.statistics().rejected) == (None, 2)


def test_how_long_what_was_asked_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second; then it is asked for again."""
    with tp.Consumer(LOOPBACK) as consumer:
        asked = _peer(0)
        for now, rounds in ((100.0, 2), (100.5, 2), (100.5625, 3), (101.0, 3), (101.125, 4)):
            with monkeypatch.context() as patch:
                patch.setattr(receiver, "time", types.SimpleNamespace(monotonic=lambda now=now: now))
                tell(consumer, _arrived(asked, 2))
            assert asked.round == rounds, now


@pytest.mark.parametrize(
    ("taken", "resends", "said", "lost"),
    [
        (2, True, 2, 0),
        (2, True, 3, 0),
        (3, True, 5, 2),
        (3, True, 3, 0),
        (2, False, 4, 2),
        (2, False, 2, 0),
        (3, True, 1, 0),
    ],
)
def test_where_a_producer_stands(taken: int, resends: bool, said: int, lost: int) -> None:
    """A message that a producer will not send is lost, unless another end had it. An old position changes nothing."""
    with tp.Consumer(LOOPBACK) as consumer:
        one = _peer(2, resends=resends)
        one.taken = taken
        one.reassembly = begun = Reassembly(taken + 1, Piece(0, 8), BufferPool())
        tell(consumer, events.Greeted(one, said))
        assert (consumer.statistics().lost, one.taken) == (lost, max(said, taken))
        assert one.reassembly is (begun if said <= taken else None)


def test_a_new_connection_of_the_other_end() -> None:
    """It says so by a higher number, once; then the binder asks for what it may have swallowed."""
    with tp.Consumer(LOOPBACK) as consumer:
        one = _peer(0)
        for said, rounds in ((1, 1), (2, 2), (2, 2), (1, 2), (4, 3)):
            one.hello = msgspec.structs.replace(one.hello, round=said)
            tell(consumer, events.Greeted(one, 0))
            assert one.round == rounds


@pytest.mark.parametrize(("said", "known", "taken", "lost"), [(4, 10, 10, 0), (14, 10, 14, 4), (4, 0, 4, 0)])
def test_one_that_comes_back(said: int, known: int, taken: int, lost: int) -> None:
    """It is where more was taken, or where it says that it will not send again: whichever is more. The gap is lost."""
    with tp.Consumer(LOOPBACK) as consumer:
        if known:
            _part(consumer, 7, 1, How.LOST, taken=known)
        _part(consumer, 8, 1, How.LOST, taken=99)
        one = side_of(consumer).new_peer(b"", _hello(sequence=said), Sight())
        tell(consumer, events.Joined(one))
        assert (one.taken, one.began, consumer.statistics().lost) == (taken, taken, lost)
        assert side_of(consumer).new_peer(b"", _hello(), Sight()).taken == 0  # it is not remembered any more
        assert side_of(consumer).new_peer(b"", _hello(8), Sight()).taken == 99


def test_whose_memory_was_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message whose pieces there was none for, once they have come; not one that is complete, nor another one."""
    with tp.Consumer(LOOPBACK) as consumer:
        link, one = side_of(consumer), _peer(0)
        link.check_memory(_arrived(one, 1))
        one.reassembly = Reassembly(1, Piece(0, 8), BufferPool())
        link.check_memory(_arrived(one, 1))
        monkeypatch.setattr(reassembly, "addresses_left", lambda: 0)
        one.reassembly = Reassembly(1, Piece(0, 8), BufferPool())
        link.check_memory(_arrived(one, 2))
        link.check_memory(_arrived(one, 1))
        assert one.reassembly.add(Piece(0, 8), memoryview(bytes(8)))
        with pytest.raises(OutOfMemory, match=r"pid 2 .* sent a message with payloads of 8 bytes"):
            link.check_memory(_arrived(one, 1))


def test_pieces_of_a_message_that_was_taken() -> None:
    """They are dropped; those of the next are put together."""
    with tp.Consumer(LOOPBACK) as consumer:
        one = _peer(1, resends=False)
        for sequence, begins in ((1, False), (2, True)):
            said = unpack(memoryview(pack_piece(sequence, Piece(0, 8))))
            tell(consumer, events.PieceArrived(one, said, [b"", memoryview(bytes(4))]))
            assert (one.reassembly is not None) == begins


@pytest.fixture
def producer() -> Iterator[tp.Producer]:
    """One that binds, and is closed whatever became of its messages."""
    made = tp.Producer(LOOPBACK, bind=True, shared_memory="off", linger=0)
    yield made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        made.close()


@pytest.fixture
def deaf(producer: tp.Producer) -> Iterator[zmq.Socket[bytes]]:
    """A consumer of its that says what it likes, and reads next to nothing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        for option, value in {zmq.RCVHWM: 1, zmq.RCVBUF: 4096, zmq.SNDHWM: 0, zmq.LINGER: 0}.items():
            raw.setsockopt(option, value)
        raw.connect(producer.endpoint)
        raw.send(hello("consumer", round=1))
        yield raw


def test_who_asks_again_and_again_and_reads_nothing_is_sent_nothing_more(
    producer: tp.Producer, deaf: zmq.Socket[bytes]
) -> None:
    """A HELLO of 250 bytes had megabytes sent again, and kept in this process."""
    with contextlib.suppress(tp.Full):  # the kernel's buffers may take less than the window
        for number in range(64):
            producer.put(torch.zeros(60_000, dtype=torch.uint8), 0.3 if number else PATIENCE)
    for times in range(200):
        deaf.send(hello("consumer", round=2 + times))

    def all_was_heard() -> bool:
        with pytest.raises(tp.Full):
            producer.put(torch.zeros(60_000, dtype=torch.uint8), 0.1)
        return not side_of(producer).socket.has_incoming()

    wait_until(all_was_heard)
    assert producer.statistics().resent <= 64


@pytest.mark.parametrize("nbytes", [60_000, PIECE])
def test_who_says_it_took_what_it_did_not_read_gets_no_more(
    nbytes: int, producer: tp.Producer, deaf: zmq.Socket[bytes]
) -> None:
    """A CREDIT of 24 bytes made room for a megabyte, which stayed in this process."""
    tensor, put, first = torch.zeros(nbytes, dtype=torch.uint8), 0, 0
    with contextlib.suppress(tp.Full):
        while put * nbytes < 1 << 28:
            producer.put(tensor, PATIENCE if not put else 0.3)
            first = first if put else hello_of(unpack(memoryview(deaf.recv()))).sequence
            put += 1
            deaf.send(pack(Kind.CREDIT, first + put))
    assert put * nbytes < 1 << 27


def test_what_is_kept_is_sent_again_in_a_fifth_of_the_time_at_most() -> None:
    """A few bytes ask for all of it, and whoever reads what comes may ask again at once."""
    count = 3000
    with tp.Producer("tcp://127.0.0.1:0", bind=True, maxsize=count, linger=0) as producer:
        with RawEnd(producer.endpoint) as raw:

            def sends_again(times: int) -> tuple[float, float]:
                """Have the producer look for news until it has sent all again. What the look cost, and when it began."""
                deadline = time.monotonic() + PATIENCE
                while (began := time.monotonic()) < deadline:
                    cost = time.thread_time()
                    if producer.statistics().resent == times * count:
                        return time.thread_time() - cost, began
                raise AssertionError("nothing was sent again")

            raw.say(hello("consumer", end=7, round=1, window=count))
            producer.wait_for(1, PATIENCE)
            for number in range(count):
                producer.put(number, PATIENCE)
            assert raw.hear_of(Kind.WELCOME)
            for round in (2, 3):
                for _ in range(count):
                    raw.hear_of(Kind.DATA)
                raw.say(hello("consumer", end=7, round=round, window=count))
                if round == 2:
                    took, began = sends_again(1)
            _, again = sends_again(2)
            assert again - began > 3 * took, "four times what resending took of it"
        with pytest.warns(RuntimeWarning, match="3000 messages that were not taken"):
            producer.close()


def test_whoever_asks_again_and_again_is_sent_what_is_kept_after_the_others() -> None:
    """Of those who ask while there is no time for it, the one comes first to whom it was done longest ago."""
    with (
        tp.Producer("tcp://127.0.0.1:0", bind=True, maxsize=10, linger=0) as producer,
        RawEnd(producer.endpoint) as greedy,
        RawEnd(producer.endpoint) as modest,
    ):
        for raw in (greedy, modest):
            raw.say(hello("consumer", end=7 + (raw is modest), round=1, window=10))
        producer.wait_for(2, PATIENCE)
        for number in range(10):
            producer.put(number, PATIENCE)
        for raw in (greedy, modest):
            for _ in range(5):
                raw.hear_of(Kind.DATA)
        greedy.say(hello("consumer", end=7, round=2, window=10))
        wait_in_vain_to_flush(producer, lambda: producer.statistics().resent == 5)
        for _ in range(5):
            greedy.hear_of(Kind.DATA)
        wait_until(lambda: all(kept.has_left() for peer in side_of(producer).peers.values() for kept in peer.kept))
        side_of(producer)._resends_from = time.monotonic() + 0.5  # so that both are heard before there is time
        greedy.say(hello("consumer", end=7, round=3, window=10))
        heard = side_of(producer).peers.came
        wait_in_vain_to_flush(producer, lambda: side_of(producer).peers.came > heard)
        modest.say(hello("consumer", end=8, round=2, window=10))
        wait_in_vain_to_flush(producer, lambda: producer.statistics().resent >= 10)
        assert modest.hear_of(Kind.DATA)
        with pytest.warns(RuntimeWarning, match="10 messages that were not taken"):
            producer.close()


def wait_in_vain_to_flush(producer: tp.Producer, until: Callable[[], bool]) -> None:
    """Have a producer look for news until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline
        with contextlib.suppress(tp.Full):
            producer.flush(0)
