"""Floods of strangers: whoever may come in goes on as before, and the binder does not grow.

``make kills TESTS=tests/endpoints/test_floods.py`` runs the long one, or, with figures::

    python -m pytest -s -m kills tests/endpoints/test_floods.py
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import children
import exchange
import msgspec
import psutil
import pytest
import torch
from children import AT_LENGTH, PATIENCE, Child, descriptors_left, in_thread, wait_until
from crash_points import in_child, reap
from inside import conversation_of, have_no_time_for_strangers, side_of, take_long_to_hear
from programs import InFork, ran
from raw_ends import RawEnd, RawLine, hello, wait_in_vain
from secured import GREETING, knock_often, make_keys, open_binder, open_connector, put_at_a_pace, take_until

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints import strangers
from tensorpipe_ipc.endpoints.peer import Peer
from tensorpipe_ipc.endpoints.peers import MOST_PEERS
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.wire import header as wire_header
from tensorpipe_ipc.wire import spec
from tensorpipe_ipc.wire.header import Hello, Kind, Piece, pack, pack_piece
from tensorpipe_ipc.wire.layout import BULK
from tensorpipe_ipc.zeromq.binder import Binder

MIB = 1 << 20
LOOPBACK = "tcp://127.0.0.1:0"


def flooded(folder: Path, count: int, strangers: int) -> tuple[float, float, float, float]:
    """A binder in a process of its own, to which a friend puts a message 200 times a second, while others knock.

    Returns:
        Messages a second before the flood and during it, by how many bytes the binder grew, and connections a second.
    """
    keys = make_keys(folder / "keys")
    with Child() as binder, Child() as friend, Child() as flood:
        endpoint = binder.call(open_binder, "tcp://127.0.0.1:*", str(keys), shared_memory="off")
        port = int(endpoint.rpartition(":")[2])
        binder.begin(take_until, "enough")
        friend.call(open_connector, endpoint, str(keys), shared_memory="off")
        flood.call(knock_often, port, 100, str(keys), 50)  # what a first connection of each kind makes stays
        calm = friend.call(put_at_a_pace, bytes(10_000), 200.0, 1.0)
        before = psutil.Process(binder.pid).memory_info().rss
        flood.begin(knock_often, port, count, str(keys), strangers)
        busy = []
        while not (busy and flood.has_result()):
            busy.append(friend.call(put_at_a_pace, bytes(10_000), 200.0, 0.5))
        took = flood.result()
        grown = psutil.Process(binder.pid).memory_info().rss - before
        friend.call(children.put, "enough")
        binder.result()
        assert binder.call(children.consumer_statistics).rejected >= strangers
    return calm, sum(busy) / len(busy), grown, count / took


@pytest.mark.slow
def test_a_small_flood(tmp_path: Path) -> None:
    """300 connections: all messages of the friend come, and the binder's memory stays."""
    _, busy, grown, _ = flooded(tmp_path, 300, 100)
    assert busy > 0
    assert grown < 10 * MIB


@pytest.mark.kills
@pytest.mark.parametrize("silence", [2.0, 4.0])
def test_who_says_nothing_is_let_go_after_three_seconds(silence: float, tmp_path: Path) -> None:
    """A connection that does not begin a handshake, and one that stops within it, are closed then, and not before."""
    with Child() as binder:
        endpoint = binder.call(open_binder, "tcp://127.0.0.1:*", str(make_keys(tmp_path / "keys")))
        address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        with socket.create_connection(address) as mute, socket.create_connection(address) as halting:
            halting.sendall(GREETING + b"CURVE".ljust(20, b"\0") + bytes(32))
            for caller in (mute, halting):
                caller.settimeout(5)
                assert caller.recv(64, socket.MSG_WAITALL)  # the binder's greeting
            time.sleep(silence)
            for caller in (mute, halting):
                caller.setblocking(False)
                if silence < 3:
                    with pytest.raises(BlockingIOError):
                        caller.recv(1)
                else:
                    assert caller.recv(1) == b""


@pytest.mark.kills
@pytest.mark.limit(400)
def test_a_flood(tmp_path: Path) -> None:
    """10,000 connections, half of them of clients with a key that is not listed: the friend keeps its pace."""
    calm, busy, grown, rate = flooded(tmp_path, 10_000, 5_000)
    print(f"{calm:.0f} messages/s before, {busy:.0f} during {rate:.0f} connections/s; {grown / MIB:.1f} MiB more")
    assert busy >= 0.8 * calm
    assert grown <= 10 * MIB


def test_who_is_no_peer_and_says_two_things_at_a_time_is_hung_up_on() -> None:
    """All that came by its connection is dropped and counted. One that is refused may ask again from time to time."""
    with tp.Consumer(LOOPBACK) as consumer, RawLine(consumer.endpoint) as bad, RawLine(consumer.endpoint) as refused:
        bad.say(*[b"garbage"] * 1000)
        wait_in_vain(consumer, lambda: consumer.statistics().rejected > 100)
        assert bad.is_hung_up_on()
        for _ in range(3):
            time.sleep(strangers.ANSWER_AGAIN)
            refused.say(hello("consumer"))
            before = consumer.statistics().rejected
            wait_in_vain(consumer, lambda before=before: consumer.statistics().rejected > before)  # type: ignore[misc]
            assert refused.heard(0.1) > 0, "it was not answered"


@pytest.mark.parametrize(
    "said",
    [
        lambda _: pack(Kind.CREDIT, 0),
        lambda _: hello("producer"),
        lambda number: hello("producer", sequence=number),
        lambda number: pack(Kind.DATA, number, b"rubbish"),
        lambda number: exchange.sent(None, sequence=number // 4)[0] if number % 4 == 0 else hello("producer"),
    ],
    ids=["rubbish", "greetings", "greetings that tell of losses", "rejected messages", "greetings and messages"],
)
def test_a_peer_that_says_too_much_that_brings_nothing_is_hung_up_on(said: Callable[[int], bytes]) -> None:
    """Rubbish and greetings: each costs time, also what is dropped. A message now and then makes up for none of it."""
    with tp.Consumer(LOOPBACK) as consumer, RawLine(consumer.endpoint) as raw:
        raw.say(hello("producer"), exchange.sent("first", sequence=1)[0])
        assert consumer.get(PATIENCE) == "first"
        raw.say(*map(said, range(2, 502)))

        def is_over() -> bool:
            found = consumer.statistics()  # of a rejected message the reason is told last
            return "and was hung up on" in found.last_rejection or found.rejected > 16 + 4 * 64

        deadline = time.monotonic() + PATIENCE
        while not is_over():
            assert time.monotonic() < deadline
            with contextlib.suppress(tp.Empty):
                consumer.get(0.02)
        assert raw.is_hung_up_on()


def test_each_of_all_peers_that_there_may_be_says_too_much_though_they_take_turns() -> None:
    """The count of one is not forgotten over those of others."""
    accounts = strangers.Strangers(window=0)
    peers = [Peer(number.to_bytes(5, "little"), Hello("producer", identity(), 0)) for number in range(MOST_PEERS)]
    for _ in range(strangers.IDLE):
        assert not any(accounts.is_idle_too_long(peer) for peer in peers)
    assert all(accounts.is_idle_too_long(peer) for peer in peers)


@pytest.mark.parametrize("binds", ["consumer", "producer"])
@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.CREDIT], ids=["greetings", "credits"])
def test_a_large_second_frame_makes_no_talk_a_message(binds: str, kind: int) -> None:
    """Only what is taken, and a piece in its place, has brought something: one that says anything else is hung up on."""
    other = "producer" if binds == "consumer" else "consumer"
    said = hello(other) if kind == Kind.HELLO else pack(kind, 0)
    ends = {"consumer": tp.Consumer, "producer": tp.Producer}
    with contextlib.suppress(tp.PeerLost), ends[binds](LOOPBACK, bind=True) as end, RawEnd(end.endpoint) as raw:
        raw.say(hello(other))
        for _ in range(300):
            raw.say(said, bytes(BULK))
        if isinstance(end, tp.Consumer):
            wait_in_vain(end, lambda: "and was hung up on" in end.statistics().last_rejection)
        else:
            deadline = time.monotonic() + PATIENCE
            while "and was hung up on" not in end.statistics().last_rejection:
                assert time.monotonic() < deadline
                with contextlib.suppress(tp.Full):
                    end.put(0, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        lambda number: (pack(Kind.DATA, number), b""),
        lambda number: (pack(Kind.DATA, number), *[b""] * 2000),
        lambda _: (pack(Kind.DATA, 1), *[b""] * 2000),
        lambda _: (pack(Kind.DATA, 1000), b""),
        lambda _: (pack(Kind.DATA, 1000), *[b""] * 300),
        lambda _: (pack(Kind.GOODBYE, 0, b"rubbish"),),
        lambda _: (pack(Kind.GOODBYE, 0), b"more"),
        lambda _: (pack(Kind.GOODBYE, 0), b""),
    ],
    ids=[
        "given up",
        "of many frames",
        "of many frames, again",
        "given up too early",
        "of many frames, too early",
        "a goodbye that is none",
        "a goodbye of two frames",
        "a goodbye that was given up",
    ],
)
def test_one_that_sends_no_message_is_hung_up_on(said: Callable[[int], tuple[bytes, ...]]) -> None:
    """A message that was given up half-way brings nothing. More frames than a message has no end sends: one is enough."""
    with tp.Consumer(LOOPBACK) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", round=1))
        raw.until_answered(consumer)
        for number in range(1, 302):
            raw.say(*said(number))
        wait_in_vain(consumer, lambda: "and was hung up on" in consumer.statistics().last_rejection)


def test_one_whose_large_messages_never_end_is_hung_up_on() -> None:
    """Each piece throws away those of the message before it: it brings nothing."""
    with tp.Consumer(LOOPBACK) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer"))
        for number in range(1, 200):
            raw.say(pack_piece(number, Piece(0, MIB)), bytes(BULK))
        wait_in_vain(consumer, lambda: "and was hung up on" in consumer.statistics().last_rejection)


@pytest.mark.parametrize(
    "said",
    [
        [hello("producer", end=number) for number in range(1, 200)],
        [hello("producer", end=1), pack(Kind.GOODBYE, 0), *[pack(Kind.CREDIT, 0)] * 500],
        [hello("producer", end=1), pack(Kind.GOODBYE, 0), *[hello("producer", end=2), pack(Kind.GOODBYE, 0)] * 300],
    ],
    ids=["another each time", "goodbye and more", "goodbye, and another"],
)
def test_who_is_another_by_each_greeting_or_has_said_goodbye_is_hung_up_on(said: list[bytes]) -> None:
    """Each message costs time, whoever says that it is from: so a connection is counted, and not only a peer."""
    with tp.Consumer(LOOPBACK, producers=None) as consumer, RawLine(consumer.endpoint) as raw:
        raw.say(*said)
        wait_in_vain(consumer, lambda: "and was hung up on" in consumer.statistics().last_rejection)
        assert raw.is_hung_up_on()


def test_a_connection_of_the_programs_own_that_has_the_strangers_number_by_now_goes_on() -> None:
    """Also one to the same port of another host: a stranger who leaves in time had it hung up on."""
    with tp.Consumer(LOOPBACK, producers=None) as consumer, contextlib.ExitStack() as stack:
        port = int(consumer.endpoint.rpartition(":")[2])
        elsewhere = stack.enter_context(socket.create_server(("127.0.0.2", port)))
        before = set(os.listdir("/proc/self/fd"))
        with RawLine(consumer.endpoint) as stranger:
            stranger.say(b"garbage", b"more")
            wait_until(side_of(consumer).socket.has_incoming)
            taken = {int(fd) for fd in set(os.listdir("/proc/self/fd")) - before}
        wait_until(lambda: set(os.listdir("/proc/self/fd")) <= before)
        own: list[socket.socket] = []
        while not taken <= {each.fileno() for each in own}:
            assert len(own) < 30
            own.append(stack.enter_context(socket.create_connection(elsewhere.getsockname())))
        wait_in_vain(consumer, lambda: consumer.statistics().rejected > 1)
        for each in own:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):  # it has not ended
                each.recv(1)


def test_one_that_says_garbage_is_hung_up_on_though_others_have_taken_all_descriptors() -> None:
    """It would be heard without end, and what it says kept, beside a friend: the one that binds keeps one in reserve."""
    with tp.Consumer(LOOPBACK, producers=None) as consumer, RawLine(consumer.endpoint) as raw, descriptors_left(0):
        raw.say(*[b"garbage"] * 300)
        wait_in_vain(consumer, lambda: consumer.statistics().rejected)
        assert raw.is_hung_up_on(0)  # and not by a heartbeat that it did not answer


def test_a_peer_may_send_again_what_is_in_flight() -> None:
    """After a line was cut all of it comes a second time, and more often if the line is cut again."""
    with tp.Consumer(LOOPBACK, maxsize=200) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", window=200, round=1))
        for number in range(1, 201):
            raw.say(*exchange.sent(number, sequence=number))
        assert [consumer.get(PATIENCE) for _ in range(200)] == list(range(1, 201))
        for number in [*range(1, 201)] * 3 + [201]:
            raw.say(*exchange.sent(number, sequence=number))
        assert consumer.get(PATIENCE) == 201
        assert (consumer.statistics().duplicates, consumer.statistics().rejected) == (600, 0)


def test_who_sends_what_get_raises_is_not_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an honest producer, whose type is not registered here. Its goodbye comes."""
    count = 300
    tp.register_type(Unknown, name="unknown-in-floods")
    messages = [exchange.sent(Unknown(None), sequence=1 + number) for number in range(count)]
    monkeypatch.delitem(spec.BY_NAME, "unknown-in-floods")
    with tp.Consumer(LOOPBACK, producers=None) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", end=5, round=1))
        for frames in messages:
            raw.say(*frames)
        raw.say(pack(Kind.GOODBYE, count))
        for _ in range(count):
            with pytest.raises(tp.UnsupportedLeaf, match="not registered here"):
                consumer.get(PATIENCE)
        wait_in_vain(consumer, lambda: consumer.statistics().ended)
        assert (consumer.statistics().vanished, consumer.statistics().lost) == (0, 0)


class Unknown(NamedTuple):
    value: Any


@pytest.mark.parametrize("count", [15, 16, 17, 300])
def test_the_goodbye_of_one_that_says_too_much_is_heard(count: int) -> None:
    """Its last messages were rejected, as its type cannot be made here: it is told that they were taken, and closes well."""
    most = 16  # with its greeting one too many: so it is hung up on with whatever comes next
    with tp.Consumer(LOOPBACK, producers=None) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", end=5, round=1, window=1))
        raw.until_answered(consumer)
        for number in range(1, 1 + count):
            raw.say(pack(Kind.DATA, number, b"rubbish"))
        wait_in_vain(consumer, lambda: consumer.statistics().rejected >= min(count, most))
        if count <= most:
            raw.say(pack(Kind.GOODBYE, count))
            wait_in_vain(consumer, lambda: consumer.statistics().ended)
            assert (consumer.statistics().vanished, consumer.statistics().lost) == (0, 0)
        else:  # what it had sent by then, and was not told to be taken, comes again
            wait_in_vain(consumer, lambda: "and was hung up on" in consumer.statistics().last_rejection)


def test_who_sends_large_messages_whose_last_pieces_are_short_is_not_hung_up_on() -> None:
    """Each piece brings something, however short."""
    count = 300
    with tp.Consumer(LOOPBACK, producers=None, maxsize=count) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", end=5, round=1, window=1))
        for number in range(1, 1 + count):
            frames = exchange.sent(torch.zeros(BULK + 100, dtype=torch.uint8), sequence=number)
            payload = bytes(frames[1])
            raw.say(pack_piece(number, Piece(0, len(payload))), payload[:BULK])
            raw.say(pack_piece(number, Piece(BULK, len(payload))), payload[BULK:])
            raw.say(frames[0])
        for _ in range(count):
            assert len(consumer.get(PATIENCE)) == BULK + 100
        assert (consumer.statistics().rejected, consumer.statistics().duplicates) == (0, 0)


def test_an_end_of_this_user_comes_in_while_strangers_have_had_their_time() -> None:
    """A stranger is hung up on unheard then, and comes in when there is time for it."""
    with tp.Consumer(LOOPBACK, shared_memory="off") as consumer, RawEnd(consumer.endpoint) as stranger:
        have_no_time_for_strangers(consumer, 60)
        stranger.say(hello("producer"))
        wait_in_vain(consumer, lambda: "more strangers" in consumer.statistics().last_rejection)
        assert consumer.statistics().peers == ()
        putting = in_thread(lambda: children.put_and_leave(consumer.endpoint, "friend"))
        assert consumer.get(PATIENCE) == "friend"
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        putting()
        have_no_time_for_strangers(consumer, 0)
        stranger.say(hello("producer"))
        wait_in_vain(consumer, lambda: consumer.statistics().peers)


def test_a_peer_out_of_sight_greets_again_in_vain_while_strangers_have_had_their_time() -> None:
    """Its messages are heard all the same. And it is hung up on if it greets too often, as at any time."""
    with tp.Consumer(LOOPBACK, shared_memory="off") as consumer, RawEnd(consumer.endpoint) as raw:

        def is_welcome() -> bool:
            return not raw.is_quiet(0) and raw.hear_header().kind == Kind.WELCOME

        raw.say(hello("producer"))
        wait_in_vain(consumer, is_welcome)
        for number in (1, 2):
            have_no_time_for_strangers(consumer, 60)
            raw.say(hello("producer"))
            raw.say(exchange.sent(number, sequence=number)[0])
            assert consumer.get(PATIENCE) == number
            have_no_time_for_strangers(consumer, 0)
            raw.say(hello("producer", sequence=number))
            wait_in_vain(consumer, is_welcome)
            while not raw.is_quiet(0.1):
                assert raw.hear_header().kind != Kind.WELCOME, "the first greeting was answered, too"
        have_no_time_for_strangers(consumer, 60)
        for _ in range(500):
            raw.say(hello("producer"))
        wait_in_vain(consumer, lambda: "and was hung up on" in consumer.statistics().last_rejection)


@pytest.mark.parametrize("count", [0, 1])
def test_an_end_of_this_user_that_has_closed_is_heard_while_strangers_have_had_their_time(count: int) -> None:
    """It claimed a queue, put into it, and is gone: its goodbye ends the stream all the same, and nobody vanished."""
    with tp.Consumer(LOOPBACK, producers=1) as consumer:
        with contextlib.suppress(tp.Empty):
            consumer.get(0)
        producer = tp.Producer(consumer.endpoint, linger=0)
        producer.wait_for(1, PATIENCE)
        for number in range(count):
            producer.put(number, PATIENCE)
        with pytest.warns(RuntimeWarning, match="1 messages") if count else contextlib.nullcontext():
            producer.close()
        have_no_time_for_strangers(consumer, 60)
        assert [consumer.get(PATIENCE) for _ in range(count)] == [*range(count)]
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)


def test_a_peer_that_has_closed_tells_of_its_queue_while_strangers_have_had_their_time() -> None:
    """It had greeted when no queue was free. What it put into one that it claimed later comes before the end of the stream."""
    with tp.Consumer(LOOPBACK, producers=3) as consumer, contextlib.ExitStack() as stack:
        with contextlib.suppress(tp.Empty):
            consumer.get(0)
        first, second = (stack.enter_context(tp.Producer(consumer.endpoint)) for _ in range(2))
        for producer in (first, second):
            producer.wait_for(1, PATIENCE)
        third = stack.enter_context(tp.Producer(consumer.endpoint, linger=0))
        with pytest.raises(tp.Full):
            third.put("too early", 0.1)
        wait_in_vain(consumer, lambda: len(consumer.statistics().peers) == 3)
        third.put("last", PATIENCE)
        with pytest.warns(RuntimeWarning, match="1 messages"):
            third.close()
        first.close()
        second.close()
        have_no_time_for_strangers(consumer, 60)
        assert consumer.get(PATIENCE) == "last"
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)


@pytest.mark.parametrize("is_peer", [True, False], ids=["a peer", "a stranger"])
def test_of_a_greeting_for_which_there_is_no_time_no_name_is_read(
    monkeypatch: pytest.MonkeyPatch, is_peer: bool
) -> None:
    """It may have 1,800 of them, and that takes milliseconds. No account tells of the time, as it is looked at all the same."""
    with tp.Consumer(LOOPBACK, shared_memory="off") as consumer, RawEnd(consumer.endpoint) as raw:
        if is_peer:
            raw.say(hello("producer"))
            wait_in_vain(consumer, lambda: len(consumer.statistics().peers) == 1)
        have_no_time_for_strangers(consumer, 60)
        read, came, shown = list[str](), conversation_of(consumer).peers.came, wire_header.shown
        monkeypatch.setattr(wire_header, "shown", lambda text: (read.append(text), shown(text))[1])
        raw.say(hello("producer", accepts=("\0",) * 1800))
        wait_in_vain(consumer, lambda: conversation_of(consumer).peers.came > came)
        assert not read


@pytest.mark.parametrize("is_peer", [True, False], ids=["a peer", "a stranger"])
@pytest.mark.parametrize("role", ["consumer", "producer"])
def test_a_greeting_for_which_there_is_no_time_and_that_cannot_be_read_ends_no_call(role: str, is_peer: bool) -> None:
    """To pass over what nests 1,000 deep takes more of the stack than there is."""
    deep = b"\x81\xa1x" + b"\x91" * 3000 + b"\xc0"
    end: Any = tp.Consumer(LOOPBACK) if role == "consumer" else tp.Producer(LOOPBACK, bind=True, linger=0)

    def came() -> int:
        with contextlib.suppress(tp.Empty, tp.Full):
            end.get(0.02) if role == "consumer" else end.wait_for(9, 0.02)
        return int(conversation_of(end).peers.came)

    with end, RawEnd(end.endpoint) as raw:
        if is_peer:
            raw.say(hello("producer" if role == "consumer" else "consumer"))
            wait_until(lambda: came() and end.statistics().peers)
        before = came()
        have_no_time_for_strangers(end, 60)
        raw.say(pack(Kind.HELLO, 0, deep))
        wait_until(lambda: came() > before)


@pytest.mark.parametrize("before", ["strangers", "friends"])
def test_who_may_come_in_is_not_kept_out_for_long_by_those_who_came_before(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One out of sight waits for no friend's sake, and a second at most for that of strangers who are peers by now."""
    monkeypatch.setattr(strangers, "SHARE", 1_000_000)  # as if each thing that was said took seconds
    with tp.Consumer(LOOPBACK, shared_memory="off", producers=None) as consumer, RawEnd(consumer.endpoint) as one:
        if before == "strangers":
            one.say(hello("producer"))
            wait_in_vain(consumer, lambda: len(consumer.statistics().peers) == 1)
        else:
            putting = in_thread(lambda: children.put_and_leave(consumer.endpoint, "friend"))
            assert consumer.get(PATIENCE) == "friend"
            wait_in_vain(consumer, lambda: consumer.statistics().ended == 1)
            putting()
        began, there = time.monotonic(), len(consumer.statistics().peers)
        with RawEnd(consumer.endpoint) as next_one:
            while len(consumer.statistics().peers) == there:
                assert time.monotonic() - began < 3
                next_one.say(hello("producer"))
                with contextlib.suppress(tp.Empty):
                    consumer.get(0.15)
        assert before == "strangers" or time.monotonic() - began < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("said", ["garbage", "pieces"])
def test_a_peer_that_brings_nothing_keeps_no_newcomer_out(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that it says takes long, and it says few. There is time for who may come in, or it is hung up on."""
    monkeypatch.setattr(strangers, "SHARE", 1_000_000)  # as if each thing that was said took seconds
    with tp.Consumer(LOOPBACK, shared_memory="off", producers=None) as consumer, RawEnd(consumer.endpoint) as one:

        def peers() -> int:
            return len(consumer.statistics().peers)

        one.say(hello("producer"))
        wait_in_vain(consumer, peers)
        has_to_go, place = False, 0
        with contextlib.ExitStack() as newcomers:
            while peers() == 1:
                has_to_go = has_to_go or "hung up on" in consumer.statistics().last_rejection
                if not has_to_go:  # else it is one more who may come in
                    place += 1
                    assert place < 50
                    one.say(*([pack(Kind.DATA, place, b"none")] if said == "garbage" else [_piece_at(place), b"12"]))
                # Another each time: one that is slow to be heard, on a busy machine, may be hung up on, too.
                newcomers.enter_context(RawEnd(consumer.endpoint)).say(hello("producer"))
                with contextlib.suppress(tp.Empty):
                    consumer.get(0.15)


@pytest.mark.slow
def test_a_peer_that_takes_over_a_second_with_each_thing_it_says_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No pause after it is as long as that: else it would keep newcomers out."""
    with tp.Consumer(LOOPBACK, shared_memory="off", producers=None) as consumer, RawEnd(consumer.endpoint) as one:

        def peers() -> int:
            return len(consumer.statistics().peers)

        one.say(hello("producer"))
        wait_in_vain(consumer, peers)
        take_long_to_hear(monkeypatch, consumer, 1.1)
        for number in range(1, 10):
            if "hung up on" in consumer.statistics().last_rejection:
                return
            one.say(pack(Kind.DATA, number, b"none"))
            with contextlib.suppress(tp.Empty):
                consumer.get(0.15)
    raise AssertionError("it is not hung up on")


def _piece_at(place: int) -> bytes:
    return pack_piece(1, Piece(2 * place, MIB))


def test_what_was_said_while_no_queue_had_a_message_does_not_keep_the_next_one_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took no time from a queue. So who comes when there are messages all the time has a fifth of the time at once."""
    with (
        tp.Consumer("noisy", maxsize=500, producers=None) as consumer,
        RawEnd(consumer.endpoint) as raw,
        Child() as child,
    ):
        child.call(children.open_producer, "noisy", maxsize=500, linger=0)
        child.call(children.put, "met")
        assert consumer.get(PATIENCE) == "met"
        with monkeypatch.context() as slow:
            take_long_to_hear(slow, consumer, 0.01)
            for _ in range(20):
                raw.say(b"garbage")
            wait_in_vain(consumer, lambda: consumer.statistics().rejected == 20)
        child.call(children.put_numbers, 0, 500)
        putting = in_thread(lambda: children.put_and_leave(consumer.endpoint, "newcomer"))
        count = 1
        while consumer.get(PATIENCE) != "newcomer":
            count += 1
            time.sleep(0.002)
        assert count < 250
        putting()
        child.call(children.abandon)


@pytest.mark.slow
def test_a_large_message_in_frames_has_its_turns_while_a_queue_has_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in pieces, which are parts of a message: each has a turn, as a message of the queue has."""
    large = bytes(20 * MIB)
    with tp.Consumer(LOOPBACK, maxsize=500) as consumer, Child() as quick, Child() as slow:
        quick.call(children.open_producer, consumer.endpoint, maxsize=500)
        slow.call(children.open_producer, consumer.endpoint, shared_memory="off")
        putting = in_thread(lambda: slow.call(children.put, large, large))
        assert consumer.get(PATIENCE) == large  # so the next one's memory is ready
        quick.call(children.put_numbers, 0, 500)
        take_long_to_hear(monkeypatch, consumer, 0.002)
        count, waits = 0, side_of(consumer).socket.has_incoming
        while True:
            count += waits()  # while no piece is there, the queue's go on
            if consumer.get(PATIENCE) == large:
                break
        assert count < 60, "several of the queue's for each piece"
        putting()
        quick.call(children.abandon)


@pytest.mark.slow
def test_a_piece_that_comes_again_has_no_messages_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It brings nothing: so all of its kind together have a fifth of the time, as what is no message has."""
    piece = (pack_piece(1, Piece(0, MIB)), bytes(MIB // 2))
    with tp.Consumer(LOOPBACK, maxsize=500) as consumer, Child() as quick, RawEnd(consumer.endpoint) as raw:
        quick.call(children.open_producer, consumer.endpoint, maxsize=500)
        raw.say(hello("producer", round=1))
        raw.until_answered(consumer)
        quick.call(children.put_numbers, 0, 500)
        consumer.get(PATIENCE)
        take_long_to_hear(monkeypatch, consumer, 0.002)
        for _ in range(150):
            raw.say(*piece)
        raw.say(b"garbage")
        wait_until(side_of(consumer).socket.has_incoming)
        for _ in range(400):
            consumer.get(PATIENCE)
        assert consumer.statistics().rejected == 0, "each had a turn, as a message of the queue has"
        quick.call(children.abandon)


@pytest.mark.slow
def test_a_put_that_does_not_wait_tries_few_of_those_who_came_and_went_meanwhile() -> None:
    """Each said what a good consumer says, and closed, while the producer computed."""
    with tp.Producer(LOOPBACK, bind=True, shared_memory="off", linger=0) as producer:
        with pytest.raises(tp.Full):
            producer.put(0, 0.05)
        before_all = len(os.listdir("/proc/self/fd"))
        for number in range(500):
            line = RawLine(producer.endpoint)
            line.say(hello("consumer", round=1, end=number + 1))
            for _ in range(15):
                line.say(pack(Kind.DATA, 1, bytes(60)), *[b""] * 40)
            line.leave()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before_all)  # libzmq has read all of them to their ends
        while side_of(producer).socket.has_incoming():
            before = time.thread_time()
            with contextlib.suppress(tp.Full):
                producer.put(bytes(100), 0)
            assert time.thread_time() - before < 0.1


def _close_while_a_reader_of_nothing_resets(turn: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        producer = tp.Producer(f"tcp://127.0.0.1:{listener.getsockname()[1]}", shared_memory="off", linger=0)
        putting = in_thread(lambda: producer.put(bytes(30 << 20), PATIENCE))
        raw = RawLine.of_binder(listener)
        raw.say(hello("consumer", Kind.WELCOME))
        putting()
        closing = in_thread(producer.close)
        with contextlib.suppress(OSError):  # once the producer has hung up
            for _ in range(8 * turn + 40):
                raw.say(b"")
                time.sleep(0.002)
        raw.reset()
        with pytest.warns(RuntimeWarning, match="not taken"):
            closing()


@pytest.mark.slow
def test_a_consumer_that_reads_nothing_and_is_reset_while_its_producer_closes_ends_nobody() -> None:
    """libzmq ends the process at the next heartbeat, should its socket linger then: within 0.4 s."""
    child = in_child(lambda: [_close_while_a_reader_of_nothing_resets(turn) for turn in range(8)])
    assert reap(child) == 0


def _close_late_while_a_stranger_resets() -> None:
    consumer = tp.Consumer(LOOPBACK)
    raw, close_sockets = RawLine(consumer.endpoint), Binder._close_sockets

    def close_late(self: Binder, linger: float) -> None:
        raw.say(b"")
        time.sleep(0.05)
        raw.reset()
        time.sleep(0.6)  # longer than from one heartbeat to the next
        close_sockets(self, linger)

    Binder._close_sockets = close_late  # type: ignore[method-assign]  # of this process only
    consumer.close()


def test_a_stranger_that_is_reset_while_a_busy_program_closes_its_binder_ends_nobody() -> None:
    """The same. Each step of closing may take long in a program whose threads compute."""
    assert reap(in_child(_close_late_while_a_stranger_resets)) == 0


_SHORT_MESSAGES = """
import sys, zmq
from tensorpipe_ipc.wire.header import Kind, pack
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.setsockopt(zmq.SNDHWM, 0)
socket.connect(sys.argv[1])
print("connects", flush=True)
for _ in range(150_000):
    socket.send_multipart([pack(Kind.DATA, 1), bytes(40)])
context.destroy(linger=20_000)
print("said")
"""


@pytest.mark.slow
def test_memory_of_a_strangers_messages_comes_back_once_they_were_read() -> None:
    """They came while the consumer computed. libzmq holds 10 MB of short messages in 45 to 150 MB, by how they come."""
    with Child() as child:  # where nothing large was freed yet: as much as that malloc keeps from then on
        endpoint = child.call(children.open_consumer, LOOPBACK, shared_memory="off")
        resident = psutil.Process(child.pid).memory_info
        before = resident().rss
        assert ran("-c", _SHORT_MESSAGES, endpoint).out == "connects\nsaid\n"
        wait_until(lambda: resident().rss - before > 30 * MIB)  # the last ones are still on their way
        child.begin(children.take_and_drop, math.inf)
        wait_until(lambda: resident().rss - before < 20 * MIB, AT_LENGTH)
        child.kill()
    tp.Consumer("next").close()  # which removes the killed one's files


_HANDSHAKES = """
import itertools, sys, time, zmq, zmq.auth
context, sockets = zmq.Context(), []
for _ in range(12):
    socket = context.socket(zmq.DEALER)
    sockets.append(socket)
    socket.curve_publickey, socket.curve_secretkey = zmq.auth.load_certificate(sys.argv[2] + "/other.key_secret")
    socket.curve_serverkey, _ = zmq.auth.load_certificate(sys.argv[2] + "/binder.key")
    for name in itertools.islice(itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=4), 50_000):
        socket.setsockopt_string(zmq.METADATA, f"X-{''.join(name)}:1")
    socket.connect(sys.argv[1])
print("connects", flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_memory_of_handshakes_of_those_who_are_not_listed_comes_back(tmp_path: Path) -> None:
    """libzmq makes much of each of a handshake's properties, and lets go of it some time after the refusal."""
    folder = make_keys(tmp_path)
    with Child() as child:
        endpoint = child.call(open_binder, "tcp://127.0.0.1:*", str(folder))
        child.call(children.wait_in_vain, 0.3)
        resident = psutil.Process(child.pid).memory_info
        before = resident().rss
        with InFork("-c", _HANDSHAKES, endpoint, str(folder), folder=tmp_path) as stranger:
            assert stranger.line() == "connects\n"
            wait_until(lambda: resident().rss - before > 40 * MIB, AT_LENGTH)
            child.begin(children.take_and_drop, math.inf)
            with Child() as other:  # knocks again and again meanwhile
                other.call(open_connector, endpoint, str(folder), "other")
                other.begin(children.put_without_end, 100)
                wait_until(lambda: resident().rss - before < 20 * MIB, AT_LENGTH)
                other.kill()
        child.kill()
    tp.Consumer("next").close()  # which removes the killed one's files


@pytest.mark.slow
@pytest.mark.parametrize("what", ["good", "pieces", "repeated"])
def test_memory_of_short_messages_of_a_peer_comes_back_though_another_came_later(what: str) -> None:
    """Good ones are far more than its credit; or each piece brings a byte; or each message had come before.

    What libzmq held of them lies below what the other has.
    """
    with Child() as child:
        endpoint = child.call(children.open_consumer, LOOPBACK, producers=None, shared_memory="off")
        resident = psutil.Process(child.pid).memory_info
        line = RawLine(endpoint)
        line.say_by_itself(hello("producer", round=1, end=7))
        child.call(children.wait_in_vain, 0.3)
        before = resident().rss
        places, good = iter(range(1_000_000)), exchange.sent("x" * 30)[0]
        while resident().rss - before < 40 * MIB:
            for place in itertools.islice(places, 5_000):
                if what == "pieces":
                    line.say_by_itself(pack_piece(1, Piece(place, 1 << 30)), b"a")
                elif what == "good":
                    line.say_by_itself(good[:8] + (place + 1).to_bytes(8, "little") + good[16:])
                else:
                    line.say_by_itself(pack(Kind.DATA, 0), bytes(40))
        with RawEnd(endpoint) as later:
            later.say(hello("producer", end=9))
            child.begin(children.take_and_drop, math.inf)
            wait_until(lambda: resident().rss - before < 20 * MIB, AT_LENGTH)
        line.reset()
        child.kill()
    tp.Consumer("next").close()  # which removes the killed one's files


def _open_one_more(ends: children.Ends) -> None:
    consumer = tp.Consumer(LOOPBACK)
    with RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer"))
        wait_in_vain(consumer, lambda: side_of(consumer).peers)
    ends.held.append(consumer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.WELCOME, Kind.HELLO, Kind.CREDIT])
def test_memory_of_short_messages_of_a_binder_comes_back_though_another_end_was_opened_later(kind: int) -> None:
    """A connector reads them all, and each is one that has come before, or breaks the rules."""
    with RawEnd(LOOPBACK, bind=True) as raw, Child() as child:
        child.call(children.open_consumer, raw.endpoint, bind=False, producers=None, shared_memory="off")
        child.begin(children.wait_in_vain, 1)
        raw.hear()
        raw.say(hello("producer", Kind.WELCOME, end=7))
        child.result()
        resident = psutil.Process(child.pid).memory_info
        before = resident().rss
        said = pack(kind, 0, bytes(16)) if kind == Kind.CREDIT else hello("producer", kind, end=7)
        while resident().rss - before < 40 * MIB:
            for _ in range(5_000):
                raw.say(said)
                time.sleep(0)  # libzmq's thread reads this one alone
        child.call(_open_one_more)
        child.begin(children.take_and_drop, math.inf)
        wait_until(lambda: resident().rss - before < 20 * MIB, AT_LENGTH)
        child.kill()
    tp.Consumer("next").close()  # which removes the killed one's files


_LONG_MESSAGES = """
import sys, time, zmq
from tensorpipe_ipc.wire.header import Kind, pack
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.SNDHWM, 0)
socket.connect(sys.argv[1])
print("connects", flush=True)
for _ in range(2000):
    socket.send_multipart([pack(Kind.DATA, 1), bytes(1 << 16)])
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize("said", [_SHORT_MESSAGES, _LONG_MESSAGES], ids=["short", "long"])
@pytest.mark.parametrize("way", ["auto", "off"])
def test_memory_of_a_strangers_messages_comes_back_beside_a_friend_that_always_has_some(
    tmp_path: Path, way: str, said: str
) -> None:
    """Nothing is read from the socket then but what its descriptor tells of; or it is never empty. The stranger stays."""
    with Child() as child, Child() as friend:
        endpoint = child.call(children.open_consumer, LOOPBACK)
        friend.call(children.open_producer, endpoint, shared_memory=way)
        friend.begin(children.put_without_end, 100)
        child.call(children.take_and_drop, 1000)
        resident = psutil.Process(child.pid).memory_info
        before = resident().rss
        with InFork("-c", said, endpoint, folder=tmp_path) as stranger:
            assert stranger.line() == "connects\n"
            wait_until(lambda: resident().rss - before > 30 * MIB, AT_LENGTH)
            child.begin(children.take_and_drop, math.inf)
            wait_until(lambda: resident().rss - before < 20 * MIB, AT_LENGTH)
        friend.kill()
        child.kill()
    tp.Consumer("next").close()  # which removes the files of the killed


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_what_had_come_by_who_was_hung_up_on_is_dropped_at_once_beside_a_queue(frames: int) -> None:
    """However many frames each message has, it has no turn of its own: friends in frames would wait for all of them."""
    got = heard = last = 0
    with tp.Consumer(LOOPBACK) as consumer, Child() as friend, RawEnd(consumer.endpoint) as stranger:
        friend.call(children.open_producer, consumer.endpoint)
        friend.begin(children.put_without_end, 100)
        consumer.get(PATIENCE)
        for _ in range(2000):
            stranger.say(pack(Kind.DATA, 1), *[bytes(40)] * (frames - 1))
        while not consumer.statistics().rejected:
            consumer.get(PATIENCE)
        while got - last < 2000:  # it may be hung up on before it has said all
            consumer.get(PATIENCE)
            got += 1
            if consumer.statistics().rejected > heard:
                heard, last = consumer.statistics().rejected, got
        assert last < 50 * heard, "some 4 of a friend's for each is usual, and 160 if each has a turn"
        friend.kill()


@pytest.mark.slow
def test_strangers_of_many_connections_have_few_turns_each_beside_a_queue() -> None:
    """A connection is read so seldom that what it says seems to come at its own time. Friends in frames wait for all of it."""
    connections, each, got = 100, 40, 0
    with tp.Consumer(LOOPBACK) as consumer, Child() as friend, contextlib.ExitStack() as stack:
        friend.call(children.open_producer, consumer.endpoint)
        friend.begin(children.put_without_end, 100)
        consumer.get(PATIENCE)
        for _ in range(connections):
            line = stack.enter_context(RawLine(consumer.endpoint))
            line.say(*[pack(Kind.DATA, 1)] * each)
        while consumer.statistics().rejected < connections * each:
            consumer.get(PATIENCE)
            got += 1
            assert got < 50 * connections * each, (
                "some 3 of a friend's for each are usual, and many more if each has a turn"
            )
        friend.kill()


def test_errors_name_some_of_many_peers() -> None:
    """However many strangers are peers, the text of an error is short."""
    with tp.Consumer(LOOPBACK) as consumer, contextlib.ExitStack() as stack:
        for _ in range(18):
            stack.enter_context(RawLine(consumer.endpoint)).say(hello("producer"))
        wait_in_vain(consumer, lambda: len(consumer.statistics().peers) == 18)
        with pytest.raises(tp.Empty, match="; and 2 more$"):
            consumer.get(0)


def test_what_is_no_message_has_a_fifth_of_the_time_while_a_queue_has_messages() -> None:
    """However much comes by the socket, what lies in shared memory is taken."""
    count = 500
    with tp.Consumer("noisy", maxsize=count, shared_memory="require") as consumer, Child() as one, Child() as two:
        for child in (one, two):
            child.call(children.open_producer, "noisy", maxsize=count)
            child.call(children.put_numbers, 0, count)
        came = [consumer.get(PATIENCE)[1] for _ in range(20)]  # until both are known
        with RawEnd(consumer.endpoint) as raw:
            for _ in range(5 * count):
                raw.say(b"garbage")
            wait_until(side_of(consumer).socket.has_incoming)
            before = consumer.statistics().rejected
            came += [consumer.get(PATIENCE)[1] for _ in range(2 * count - 20)]
            assert consumer.statistics().rejected - before < count / 2, "as one for each of both producers"
        assert sorted(came) == sorted([*range(count)] * 2)
        for child in (one, two):
            child.call(children.abandon)


def test_what_is_rejected_has_a_fifth_of_the_time_while_a_queue_has_messages() -> None:
    """A producer may come in over an open port, and all that it says be damaged: each takes milliseconds to read."""
    count, few = 500, 200
    with tp.Consumer(LOOPBACK, maxsize=count) as consumer, Child() as one, Child() as two:
        for child in (one, two):
            child.call(children.open_producer, consumer.endpoint, maxsize=count)
            child.call(children.put_numbers, 0, count)
        came = [consumer.get(PATIENCE)[1] for _ in range(20)]  # until both are known
        with RawEnd(consumer.endpoint) as raw:
            raw.say(hello("producer", window=few))
            for number in range(few):
                raw.say(pack(Kind.DATA, 1 + number, _dict_with_one_key_twice(2000)))
            wait_until(side_of(consumer).socket.has_incoming)
            before = consumer.statistics().rejected
            came += [consumer.get(PATIENCE)[1] for _ in range(2 * count - 20)]
            assert consumer.statistics().rejected - before < few / 4
        assert sorted(came) == sorted([*range(count)] * 2)
        for child in (one, two):
            child.call(children.abandon)


def test_what_is_rejected_has_a_fifth_of_the_time_of_a_consumer_that_finds_its_queue_empty() -> None:
    """It takes each message as soon as it is there. So in between there is none, and what is damaged takes milliseconds.

    Where the producer stands still for a tenth of a second, as on a busy machine, it may have all the time: then once more.
    """
    count, few, tries = 1000, 100, 5
    with tp.Consumer(LOOPBACK, maxsize=4) as consumer, Child() as child:
        child.call(children.open_producer, consumer.endpoint, maxsize=4)
        for attempt in range(tries):
            rejected = consumer.statistics().rejected
            with RawEnd(consumer.endpoint) as raw:
                begin = attempt * count
                putting = in_thread(functools.partial(child.call, children.put_numbers, begin, begin + count))
                came = [consumer.get(PATIENCE)[1] for _ in range(20)]  # until it is known
                raw.say(hello("producer", end=1 + attempt, window=few))
                for number in range(few):
                    raw.say(pack(Kind.DATA, 1 + number, _dict_with_one_key_twice(2000)))
                began = time.monotonic()
                came += [consumer.get(PATIENCE)[1] for _ in range(count - 20)]
                took, heard = time.monotonic() - began, consumer.statistics().rejected - rejected
                assert came == [*range(begin, begin + count)]
                putting()
                began = time.thread_time()
                while consumer.statistics().rejected < rejected + few:
                    with contextlib.suppress(tp.Empty):
                        consumer.get(0)
                if heard < few and heard * (time.thread_time() - began) / (few - heard) < took / 2:
                    break
        else:
            raise AssertionError("it all comes at once, and has nearly all the time each time")
        child.call(children.abandon)


def test_greetings_have_a_fifth_of_the_time_of_a_producer_that_puts() -> None:
    """A stranger that greets well is a consumer. It may greet again and again, and take nothing: so credits are looked for."""
    connections, each = 20, 10
    with (
        Child() as friend,
        contextlib.suppress(tp.PeerLost),
        tp.Producer(LOOPBACK, bind=True, maxsize=1000, linger=0) as producer,
        contextlib.ExitStack() as stack,
    ):
        friend.call(children.open_consumer, producer.endpoint, bind=False, maxsize=1000)
        friend.begin(children.take)
        producer.put("for the friend", PATIENCE)
        friend.result()  # it takes no more: there is room enough
        strangers = [stack.enter_context(RawEnd(producer.endpoint)) for _ in range(connections)]
        for number, raw in enumerate(strangers):
            raw.say(hello("consumer", end=7 + number, round=1, window=2))
        producer.wait_for(1 + connections, PATIENCE)
        for number in range(4 * connections):
            producer.put(number, PATIENCE)  # some for each of them
        for raw in strangers:
            for number in range(each):
                raw.say(hello("consumer", end=7 + strangers.index(raw), round=2 + number, window=2))
        wait_until(side_of(producer).socket.has_incoming)
        heard = side_of(producer).peers.came
        for number in range(2 * connections * each):
            producer.put(number, PATIENCE)
        assert side_of(producer).peers.came - heard < connections * each / 2, "else one with each put"
        friend.kill()


def _dict_with_one_key_twice(size: int) -> bytes:
    """Return the schema of a dict that no Python has. That is known when all of it is read."""
    keys = [msgspec.msgpack.encode(number) for number in [*range(1 << 40, (1 << 40) + size - 1), 1 << 40]]
    spec = b"\x22" + struct.pack("<I", size) + b"".join(struct.pack("<H", len(key)) + key for key in keys) + bytes(size)
    return b"\x03raw" + struct.pack("<I", len(spec)) + spec + bytes(8)


def _rates(consumer: tp.Consumer, seconds: float) -> tuple[float, float]:
    """Return how many messages come in a second, and in a second of this thread's own time."""
    count, began, worked = 0, time.monotonic(), time.thread_time()
    while time.monotonic() - began < seconds:
        consumer.get(PATIENCE)
        count += 1
    return count / (time.monotonic() - began), count / (time.thread_time() - worked)


@pytest.mark.kills
@pytest.mark.parametrize("shared_memory", ["require", "off"])
def test_a_friend_keeps_its_rate_while_strangers_talk(shared_memory: str) -> None:
    """Garbage and greetings that are refused, as fast as a process can say them, cost little of the consumer's time.

    That process, and libzmq's thread, take processors from others, as any that computes: so it is compared with that.
    """
    found: dict[str, list[tuple[float, float]]] = {"computes": [], "floods": []}
    with tp.Consumer(LOOPBACK, shared_memory=shared_memory) as consumer, Child() as friend:
        friend.call(children.open_producer, consumer.endpoint, shared_memory=shared_memory)
        friend.begin(children.put_without_end, 100)
        for kind in [*found] * 3:
            with Child() as other:
                if kind == "floods":
                    other.begin(children.flood, consumer.endpoint, "consumer")
                else:
                    other.begin(children.spin)
                _rates(consumer, 0.5)
                found[kind].append(_rates(consumer, 1.0))
                other.kill()
        for kind, rates in found.items():
            told = ", ".join(f"{rate:.0f}/s ({own:.0f})" for rate, own in rates)
            print(f"{shared_memory}: beside a process that {kind}: {told}")
        assert consumer.statistics().rejected > 1000
        assert consumer.statistics().lost == 0
        floor, flooded = (max(own for _, own in found[kind]) for kind in found)
        assert flooded > 0.6 * floor
        friend.kill()


@pytest.mark.kills
@pytest.mark.parametrize("shared_memory", ["require", "off"])
def test_a_newcomer_is_answered_while_strangers_talk(shared_memory: str) -> None:
    """Its first message comes within seconds; and a get that waits for it ends in time."""
    with tp.Consumer(LOOPBACK, shared_memory=shared_memory, producers=None) as consumer, Child() as other:
        other.begin(children.flood, consumer.endpoint, "consumer")
        wait_in_vain(consumer, lambda: consumer.statistics().rejected > 100)
        for number in range(5):
            putting = in_thread(lambda number=number: children.put_and_leave(consumer.endpoint, number))
            began = time.monotonic()
            assert consumer.get(PATIENCE) == number
            assert time.monotonic() - began < 2
            putting()
            began = time.monotonic()
            with pytest.raises(tp.Empty):
                consumer.get(0.2)
            assert time.monotonic() - began < 0.4
        other.kill()
