"""The conversation, spoken by hand on one side: greetings, refusals, credit as messages, and whatever else may come."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import children
import exchange
import msgspec
import pytest
import torch
from children import PATIENCE, Child, in_thread, wait_until
from inside import (
    conversation_of,
    reader_of,
    registered_serializers,
    side_of,
    size_of_file,
    strangers_of,
    take_in_at_most,
)
from raw_ends import RawEnd, RawLine, hello, hello_of, map_with, of_version, refusal_of, wait_in_vain

import tensorpipe_ipc as tp
from tensorpipe_ipc import libc, process, serializers
from tensorpipe_ipc.endpoints import admission, conversation, greeting, strangers
from tensorpipe_ipc.endpoints.presence import LastWords, Presence
from tensorpipe_ipc.process import memory
from tensorpipe_ipc.serializers.raw import Raw
from tensorpipe_ipc.wire.header import (
    MAX_CONTROL,
    MAX_HEADER,
    MAX_NAMES,
    VERSION,
    Ending,
    Kind,
    Piece,
    SharedMemoryTerms,
    names_size,
    pack,
    pack_piece,
)
from tensorpipe_ipc.wire.layout import BULK

pytestmark = pytest.mark.limit(20)


@pytest.fixture(params=["ipc", "tcp"])
def consumer(request: pytest.FixtureRequest) -> Iterator[tp.Consumer]:
    """A consumer that binds."""
    with tp.Consumer("spoken" if request.param == "ipc" else "tcp://127.0.0.1:0") as consumer:
        yield consumer


def _listen(consumer: tp.Consumer, until: Any) -> None:
    """Let the consumer deal with what comes, which is no message for its user, until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline, consumer.statistics()
        with pytest.raises(tp.Empty):
            consumer.get(0.02)


def _attach(consumer: tp.Consumer, raw: RawEnd, **changes: Any) -> None:
    """Have a raw producer say HELLO and hear WELCOME."""
    before = len(consumer.statistics().peers)
    raw.say(hello("producer", **changes))
    _listen(consumer, lambda: len(consumer.statistics().peers) > before)
    assert raw.hear_header().kind == Kind.WELCOME


@contextlib.contextmanager
def _present() -> Iterator[dict[str, int]]:
    """Yield the names of an end that is visible in the runtime folder."""
    with contextlib.closing(Presence()) as presence:
        presence.open()
        yield {"end": presence.token, "folder": presence.folder}


# -- a conversation as it should be


def test_what_a_consumer_says(consumer: tp.Consumer) -> None:
    """WELCOME names its role, window and serializers; each message that is taken is credited; at the end GOODBYE."""
    with RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer"))
        raw.until_answered(consumer)
        welcome = hello_of(raw.hear_of(Kind.WELCOME))
        assert (welcome.role, welcome.window, welcome.sequence) == ("consumer", 64, 0)
        assert welcome.accepts == ("numpy", "raw")
        for sequence in (1, 2, 3):
            raw.say(*exchange.sent(sequence, sequence=sequence))
            assert consumer.get(PATIENCE) == sequence
            credit = raw.hear_of(Kind.CREDIT)
            assert credit.sequence == sequence
        raw.say(pack(Kind.GOODBYE, 3))
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)


def test_a_consumer_says_goodbye() -> None:
    """A consumer that closes says goodbye to an attached producer."""
    with tp.Consumer("leaving") as consumer, RawEnd(consumer.endpoint) as raw:
        _attach(consumer, raw)
        consumer.close()
        raw.hear_of(Kind.GOODBYE)


def test_maxsize_with_credit_as_messages() -> None:
    """Each CREDIT makes room for what it says was taken, and for no more."""
    with tp.Producer("credits", bind=True, maxsize=3, linger=0) as producer, RawEnd(producer.endpoint) as raw:
        raw.say(hello("consumer"))
        for number in range(3):
            producer.put(number, PATIENCE)
        with pytest.raises(tp.Full, match="holds 3 untaken of 3"):
            producer.put(3, 0.05)
        first = raw.hear_first()
        raw.say(pack(Kind.CREDIT, first + 1))
        producer.put(3, PATIENCE)
        with pytest.raises(tp.Full):
            producer.put(4, 0.05)
        raw.say(pack(Kind.CREDIT, first + 4))
        producer.flush(PATIENCE)
        assert producer.statistics().in_flight == 0
        sequences = [raw.hear_of(Kind.DATA).sequence for _ in range(4)]
        assert sequences == [first + number for number in (1, 2, 3, 4)]


def test_credit_that_is_none_is_no_credit() -> None:
    """CREDIT for what was not sent, or was credited before, changes nothing."""
    with tp.Producer("miscounted", bind=True, maxsize=2, linger=0) as producer, RawEnd(producer.endpoint) as raw:
        raw.say(hello("consumer"))
        producer.put(1, PATIENCE)
        producer.put(2, PATIENCE)
        first = raw.hear_first()
        for sequence in (0, 1, first, first + 3, (1 << 64) - 1):
            raw.say(pack(Kind.CREDIT, sequence))
            with pytest.raises(tp.Full):
                producer.put(3, 0.05)
        assert producer.statistics().in_flight == 2
        raw.say(pack(Kind.CREDIT, first + 2))
        raw.say(pack(Kind.CREDIT, first + 2))
        producer.flush(PATIENCE)
        assert producer.statistics().in_flight == 0


def test_the_smaller_window_counts() -> None:
    """A consumer's own maxsize holds for what one producer may have in flight towards it."""
    with tp.Producer("narrow", bind=True, linger=0) as producer, RawEnd(producer.endpoint) as raw:
        raw.say(hello("consumer", window=1))
        producer.put(1, PATIENCE)
        with pytest.raises(tp.Full, match="holds 1 untaken of 1"):
            producer.put(2, 0.05)
        raw.say(pack(Kind.CREDIT, raw.hear_first() + 1))
        producer.flush(PATIENCE)


def test_a_gap_is_counted_and_a_repetition_dropped(consumer: tp.Consumer) -> None:
    """A consumer counts messages that the connection swallowed as lost. It drops those that it had taken before."""
    with RawEnd(consumer.endpoint) as raw:
        _attach(consumer, raw)
        for sequence in (1, 1, 4, 2, 5):
            raw.say(*exchange.sent(sequence, sequence=sequence))
        assert [consumer.get(PATIENCE) for _ in range(3)] == [1, 4, 5]
        with pytest.raises(tp.Empty):
            consumer.get(0.05)
        assert consumer.statistics().lost == 2


def test_a_repeated_hello_is_answered_and_changes_nothing(consumer: tp.Consumer) -> None:
    """A waiting connector repeats its HELLO: it stays one peer, and the order goes on."""
    with RawEnd(consumer.endpoint) as raw:
        _attach(consumer, raw)
        raw.say(*exchange.sent("one", sequence=1))
        assert consumer.get(PATIENCE) == "one"
        raw.say(hello("producer", sequence=1))
        raw.say(*exchange.sent("two", sequence=2))
        assert consumer.get(PATIENCE) == "two"
        while hello_of(raw.hear_of(Kind.WELCOME)).sequence != 1:
            continue  # the first WELCOME may have been repeated
        assert len(consumer.statistics().peers) == 1
        assert consumer.statistics().lost == 0


# -- who is not taken in


def test_torch_save_is_taken_only_from_whom_it_was_agreed_with(transport: str) -> None:
    """A consumer that names no serializers takes raw and numpy; a producer that wants torch_save is told what to do."""
    with tp.Consumer("default") as consumer, tp.Producer("default", serializer="torch_save") as producer:
        putting = in_thread(lambda: producer.put(torch.ones(3).to_sparse(), PATIENCE))
        _listen(consumer, lambda: consumer.statistics().rejected)
        with pytest.raises(tp.Refused, match=r"to take it, open the consumer with accept=\['raw', 'torch_save'\]"):
            putting()
    with (
        tp.Consumer("default", accept=["raw", "torch_save"]) as consumer,
        tp.Producer("default", serializer="torch_save") as producer,
    ):
        putting = in_thread(lambda: producer.put(torch.ones(3).to_sparse(), PATIENCE))
        assert consumer.get(PATIENCE).to_dense().sum() == 3
        putting()


@pytest.mark.parametrize("producer_binds", [False, True])
def test_a_serializer_that_is_not_accepted(producer_binds: bool) -> None:
    """Whichever side binds, the connector gets Refused, again and again, with both names; the binder counts it."""
    words = r"serializer 'numpy', which the consumer \(pid .*\) does not accept \(it accepts: raw, torch_save\); .*'numpy'\]"
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(tp.Producer("choosy", bind=producer_binds, serializer="numpy"))
        consumer = stack.enter_context(tp.Consumer("choosy", bind=not producer_binds, accept=["raw", "torch_save"]))
        if producer_binds:
            connector = in_thread(lambda: consumer.get(PATIENCE))
            _refuse(producer)
            binder, again = producer, lambda: consumer.get(0)
        else:
            connector = in_thread(lambda: producer.put(1, PATIENCE))
            _refuse(consumer)
            binder, again = consumer, lambda: producer.put(1, 0)
        for refused in (connector, again):
            with pytest.raises(tp.Refused, match=words):
                refused()
        assert binder.statistics().rejected == 1
        assert "numpy" in binder.statistics().last_rejection


@pytest.mark.parametrize("accept", [["raw"], None])
def test_data_of_a_serializer_that_is_not_accepted(accept: list[str] | None) -> None:
    """A peer that sends with another serializer than its HELLO said is not believed. By default torch_save is not accepted."""
    with tp.Consumer("believed", accept=accept) as consumer, RawEnd(consumer.endpoint) as raw:
        _attach(consumer, raw)
        raw.say(*exchange.sent(torch.ones(3), "torch_save"))
        _listen(consumer, lambda: consumer.statistics().rejected)
        assert "serializer 'torch_save' is not accepted here" in consumer.statistics().last_rejection


@pytest.mark.parametrize("what", ["host", "why_not"])
def test_a_stranger_who_says_much_is_answered(what: str) -> None:
    """An end cuts the words of a stranger that it repeats, so that the stranger can read its WELCOME."""
    long = "x" * 3500
    terms = SharedMemoryTerms("auto", os.geteuid(), why_not=long if what == "why_not" else "")
    who = process.identity()
    if what == "host":
        who = msgspec.structs.replace(who, host=long, boot="another")
    with tp.Consumer("patient") as consumer, RawEnd(consumer.endpoint) as raw:
        _attach(consumer, raw, identity=who, shared_memory=terms)
        raw.say(hello("producer", identity=who, shared_memory=terms))
        _listen(consumer, lambda: not raw.is_quiet(0))
        said = hello_of(raw.hear_header()).shared_memory
        assert said is not None
        assert "xxx…" in said.why_not
        assert len(consumer.statistics().transport) < 600


@pytest.mark.parametrize("letter", ["x", "\0"])
def test_a_serializer_of_any_name_is_refused(letter: str) -> None:
    """However long the name is, and whatever it is made of, its producer can read why."""
    with tp.Consumer("strict") as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", serializer=letter * 3500))
        _listen(consumer, lambda: consumer.statistics().rejected)
        assert refusal_of(raw.hear_header()).startswith("the producer (")


class _Named(Raw):
    """raw by another name."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize("are_named", [True, False])
def test_so_many_names_may_be_accepted(are_named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,640 bytes of names, with 2 for each, can be said; with one more the consumer is not made, and told the limit.

    A name that is given twice is said once.
    """

    def register(*names: str) -> list[str]:
        for name in names:
            monkeypatch.setitem(registered_serializers(), name, _Named(name))
        return list(serializers.serializer_names() if are_named else serializers.accepted_by_default())

    names = register(*(f"{number:064}" for number in range(39)))
    left = MAX_NAMES - names_size(names) - 2 * 2
    names = register("r" * 10, "s" * (left - 10))
    accept = names * 2 if are_named else None
    with tp.Consumer("manifold", accept=accept) as consumer, RawEnd(consumer.endpoint) as raw:
        _attach(consumer, raw, serializer=names[0])
    monkeypatch.delitem(registered_serializers(), "r" * 10)
    names = register("r" * 11)
    with pytest.raises(
        ValueError, match=r"4[34] serializers take 2641 bytes .* the limit is 2640: name fewer in accept="
    ):
        tp.Consumer("manifold", accept=names if are_named else None)


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_two_ends_of_one_kind(role: str) -> None:
    """Two producers, or two consumers, do not talk: the connector is Refused with what should be."""
    make = tp.Producer if role == "producer" else tp.Consumer
    with make("alike", bind=True) as binder, make("alike", bind=False) as connector:
        used = in_thread(lambda: _use(connector, PATIENCE))
        _refuse(binder)
        with pytest.raises(tp.Refused, match=f"both ends are a {role}: one side must be a producer and the other a"):
            used()


def _refuse(binder: tp.Producer | tp.Consumer) -> None:
    """Wait until a binder has refused somebody, or something."""
    deadline = time.monotonic() + PATIENCE
    while not binder.statistics().rejected:
        assert time.monotonic() < deadline
        with pytest.raises((tp.Full, tp.Empty)):
            _use(binder, 0.02)


def _use(end: tp.Producer | tp.Consumer, timeout: float) -> None:
    end.put(1, timeout) if isinstance(end, tp.Producer) else end.get(timeout)


def test_a_connector_of_another_version(consumer: tp.Consumer) -> None:
    """It is answered REFUSED, with both versions named."""
    with RawEnd(consumer.endpoint) as raw:
        raw.say(of_version(hello("producer"), VERSION + 1))
        _listen(consumer, lambda: consumer.statistics().rejected)
        reason = refusal_of(raw.hear_header())
        assert f"wire version {VERSION + 1}, this process speaks version {VERSION}" in reason
        assert consumer.statistics().last_rejection in reason


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_binder_of_another_version(role: str, free_port: int) -> None:
    """The connector raises VersionMismatch, with both versions, at every use."""
    with RawEnd(f"tcp://127.0.0.1:{free_port}", bind=True) as raw:
        end = tp.Producer(raw.endpoint) if role == "producer" else tp.Consumer(raw.endpoint, bind=False)
        with end:
            used = in_thread(lambda: _use(end, PATIENCE))
            raw.hear_of(Kind.HELLO)
            raw.say(of_version(hello("consumer", Kind.WELCOME), VERSION + 1))
            for refused in (used, lambda: _use(end, 0)):
                with pytest.raises(tp.VersionMismatch, match=f"version {VERSION + 1}, .* speaks version {VERSION}"):
                    refused()


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_binder_that_talks_garbage(role: str, free_port: int) -> None:
    """The connector counts it and goes on: once the binder says WELCOME all is well."""
    other = "consumer" if role == "producer" else "producer"
    with RawEnd(f"tcp://127.0.0.1:{free_port}", bind=True) as raw:
        end = tp.Producer(raw.endpoint, linger=0) if role == "producer" else tp.Consumer(raw.endpoint, bind=False)
        with end:
            used = in_thread(lambda: _use(end, PATIENCE))
            raw.hear_of(Kind.HELLO)
            garbage = [b"x", b"", bytes(24), b"TPIC", hello(role, Kind.WELCOME), pack(Kind.WELCOME, 0, b"\xc1")]
            for frame in garbage:
                raw.say(frame)
            raw.say(hello(other, Kind.WELCOME))
            if role == "producer":
                assert raw.hear_of(Kind.DATA).sequence == 1
                raw.say(pack(Kind.CREDIT, 1))
            else:
                raw.say(*exchange.sent(1))
            used()
            if isinstance(end, tp.Producer):
                end.flush(PATIENCE)
            assert end.statistics().rejected >= len(garbage) - 1


def test_the_number_of_peers_has_two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many come in; the next one is refused with the number, counted, and comes in when another has left."""
    take_in_at_most(2, monkeypatch)
    with (
        tp.Consumer("crowded") as consumer,
        RawEnd(consumer.endpoint) as one,
        RawEnd(consumer.endpoint) as two,
        _present() as here,
        _present() as there,
    ):
        _attach(consumer, one, **here)
        _attach(consumer, two, **there)
        one.say(hello("producer", **here))  # who is in may say so again
        _listen(consumer, lambda: not one.is_quiet(0))
        assert one.hear_header().kind == Kind.WELCOME
        with tp.Producer("crowded", linger=0) as third:
            used = in_thread(lambda: _use(third, PATIENCE))
            _listen(consumer, lambda: consumer.statistics().rejected)
            with pytest.raises(tp.Refused, match="2 peers are attached to .* already, and it takes no more"):
                used()
            assert len(consumer.statistics().peers) == 2
            one.say(pack(Kind.GOODBYE, 0))
            _listen(consumer, lambda: len(consumer.statistics().peers) == 1)
            putting = in_thread(lambda: _put_when_let_in(third))
            assert consumer.get(PATIENCE) == 1
            putting()


def test_who_names_this_folder_and_no_open_end_gives_way_to_an_end_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any stranger learns the folder's mark by a WELCOME, and may say it with a token that nobody has."""
    take_in_at_most(1, monkeypatch)
    monkeypatch.setattr(conversation, "REPEAT", 60.0)  # so long one that is gone keeps its place
    with tp.Consumer("tcp://127.0.0.1:0") as consumer, RawEnd(consumer.endpoint) as stranger:
        stranger.say(hello("producer", end=5, folder=conversation_of(consumer).folder))
        _listen(consumer, lambda: consumer.statistics().peers)
        with tp.Producer(consumer.endpoint) as producer:
            putting = in_thread(lambda: producer.put(1, PATIENCE))
            assert consumer.get(PATIENCE) == 1
            putting()
            producer.flush(0)
            _listen(consumer, lambda: consumer.statistics().rejected)
            assert "gave way to one in sight" in consumer.statistics().last_rejection


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "crowded"])
def test_whoever_is_out_of_sight_gives_way_to_an_end_in_sight(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers hold all places and stay: an end of this user gets in, and the stranger whose place it has is told."""
    take_in_at_most(2, monkeypatch)
    with (
        tp.Consumer(address) as consumer,
        RawEnd(consumer.endpoint) as one,
        RawEnd(consumer.endpoint) as two,
        RawEnd(consumer.endpoint) as three,
    ):
        for raw in (one, two):
            _attach(consumer, raw)
        three.say(
            hello("producer", end=5, folder=conversation_of(consumer).folder)
        )  # says that it is in sight, and is not
        _listen(consumer, lambda: consumer.statistics().rejected)
        assert "takes no more" in refusal_of(three.hear_of(Kind.REFUSED))
        with tp.Producer(consumer.endpoint) as producer:
            putting = in_thread(lambda: producer.put(1, PATIENCE))
            assert consumer.get(PATIENCE) == 1
            putting()
            assert "gave way to one in sight" in refusal_of(one.hear_of(Kind.REFUSED))
            while not two.is_quiet(0):
                assert two.hear_header().kind == Kind.WELCOME
            assert len(consumer.statistics().peers) == 2
            assert "gave way" in consumer.statistics().last_rejection


def test_who_is_away_and_out_of_sight_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers who come, and go without a word, keep nobody out: the one that went first gives its place to a newcomer."""
    take_in_at_most(2, monkeypatch)
    with tp.Consumer("tcp://127.0.0.1:0") as consumer:
        for _ in range(2):
            with RawEnd(consumer.endpoint) as raw:
                _attach(consumer, raw)
        _listen(consumer, lambda: str(consumer.statistics().peers).count("not heard of") == 2)
        with tp.Producer(consumer.endpoint) as producer:
            putting = in_thread(lambda: producer.put(1, PATIENCE))
            assert consumer.get(PATIENCE) == 1
            putting()
            assert len(consumer.statistics().peers) == 2


def test_a_hello_that_an_exception_cuts_short_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer has put a message through shared memory, and makes no call any more."""
    arrange = admission.Admission._arrange

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(admission.Admission, "_arrange", arrange)
        raise KeyboardInterrupt

    with tp.Consumer("cut-short") as consumer, Child() as child:
        child.call(children.open_producer, consumer.endpoint)
        child.call(children.put, "told")
        monkeypatch.setattr(admission.Admission, "_arrange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consumer.get(PATIENCE)
        assert consumer.get(PATIENCE) == "told"


def test_who_says_that_it_is_another_end() -> None:
    """One that names the end of another process, or the binder itself, is not believed: it would seem present."""
    with tp.Consumer("tcp://127.0.0.1:0") as consumer, RawEnd(consumer.endpoint) as one:
        _attach(consumer, one, end=5)
        for token in (5, conversation_of(consumer).end):
            before = consumer.statistics().rejected
            other = msgspec.structs.replace(process.identity(), pid=os.getpid() + 1)
            with RawEnd(consumer.endpoint) as two:
                two.say(hello("producer", identity=other, end=token, folder=conversation_of(consumer).folder))
                _listen(consumer, lambda before=before: consumer.statistics().rejected > before)  # type: ignore[misc]
            assert "attached already" in consumer.statistics().last_rejection
        assert len(consumer.statistics().peers) == 1


def test_an_ends_file_does_not_grow_by_what_a_stranger_says_of_itself() -> None:
    """Of its texts only so much is repeated as there is of a true one."""
    with tp.Consumer("tcp://127.0.0.1:0") as consumer, RawEnd(consumer.endpoint) as raw:
        presence = conversation_of(consumer).presence
        assert presence is not None
        before = size_of_file(presence)
        _attach(consumer, raw, identity=msgspec.structs.replace(process.identity(), host="h" * 1000, boot="b" * 2000))
        assert size_of_file(presence) < before + 1000


@pytest.mark.parametrize("address", ["moves", "tcp://127.0.0.1:0"])
def test_an_end_that_comes_by_another_connection(address: str) -> None:
    """It is known again by its token, and was never gone."""
    with tp.Consumer(address) as consumer, _present() as present:
        with RawEnd(consumer.endpoint) as one:
            _attach(consumer, one, **present)
        with RawEnd(consumer.endpoint) as two:
            two.say(hello("producer", **present))
            two.until_answered(consumer)
            assert two.hear_header().kind == Kind.WELCOME
            assert len(consumer.statistics().peers) == 1
            assert consumer.statistics().vanished == 0


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_what_an_end_said_by_its_last_connection_is_read_after_what_it_says_by_this_one(role: str) -> None:
    """An end finds after a cut a HELLO of each connection, in any order: the last is the one that stands."""
    binder = tp.Consumer("tcp://127.0.0.1:0") if role == "producer" else tp.Producer("tcp://127.0.0.1:0", bind=True)
    with binder, _present() as present, RawEnd(binder.endpoint) as last, RawEnd(binder.endpoint) as this:
        for raw, number in ((this, 2), (last, 1)):
            raw.say(hello(role, round=number, **present))
            wait_until(side_of(binder).socket.has_incoming)
            with contextlib.suppress(tp.Empty):
                binder.get(0) if isinstance(binder, tp.Consumer) else binder.statistics()
        if isinstance(binder, tp.Consumer):
            this.say(*exchange.sent("next", sequence=1))
            assert binder.get(PATIENCE) == "next"
        else:
            binder.put("next", PATIENCE)
            this.say(pack(Kind.CREDIT, this.hear_of(Kind.DATA).sequence))
            binder.flush(PATIENCE)


def test_pieces_that_came_by_the_line_before_are_no_flood() -> None:
    """Many may wait unread. The line was hung up on for them, or the next one, which had its descriptor's number."""
    count = 100
    address = "tcp://127.0.0.1:0"
    with tp.Consumer(address, maxsize=1) as consumer, _present() as present, RawLine(consumer.endpoint) as this:
        with RawEnd(consumer.endpoint) as last:
            last.say(hello("producer", round=1, **present))
            wait_in_vain(consumer, lambda: consumer.statistics().peers)
            this.say(hello("producer", round=2, **present))
            wait_in_vain(consumer, lambda: strangers_of(consumer)._over)
            for number in range(count):
                last.say(pack_piece(1, Piece(number * BULK, count * BULK)), bytes(BULK))
        wait_in_vain(consumer, lambda: conversation_of(consumer).peers.came > count or consumer.statistics().rejected)
        this.say(exchange.sent("next", sequence=1)[0])
        assert consumer.get(PATIENCE) == "next"
        assert consumer.statistics().rejected == 0


def test_what_an_end_still_says_whose_file_has_told_that_it_ended() -> None:
    """Its GOODBYE, or a HELLO before it, may come later than that is seen: nobody has broken a rule."""
    with tp.Consumer("late") as consumer, RawEnd(consumer.endpoint) as one, RawEnd(consumer.endpoint) as two:
        presence = Presence()
        presence.open()
        _attach(consumer, one, end=presence.token, folder=presence.folder)
        presence.end(LastWords(Ending()))
        presence.close()
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        two.say(hello("producer", end=presence.token, folder=presence.folder))
        for number, raw in enumerate([one, two]):
            raw.say(pack(Kind.GOODBYE, 0))
            raw.say(b"x")
            _listen(consumer, lambda number=number: consumer.statistics().rejected > number)  # type: ignore[misc]
            assert "GOODBYE" not in consumer.statistics().last_rejection
            assert consumer.statistics().rejected == number + 1, "x is no message"


def test_strangers_do_not_have_it_forgotten_who_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come and say goodbye meanwhile, a HELLO of an end whose file told of its ending is no news."""
    monkeypatch.setattr(strangers, "REMEMBERED", 2)
    with tp.Consumer("flooded", producers=5) as consumer, RawEnd(consumer.endpoint) as late:
        presence = Presence()
        presence.open()
        with RawEnd(consumer.endpoint) as one:
            _attach(consumer, one, end=presence.token, folder=presence.folder)
            presence.end(LastWords(Ending()))
            presence.close()
            _listen(consumer, lambda: consumer.statistics().ended == 1)
        for number in range(3):
            with RawEnd(consumer.endpoint) as stranger:
                _attach(consumer, stranger, end=number + 1)
                stranger.say(pack(Kind.GOODBYE, 0))
                _listen(consumer, lambda number=number: consumer.statistics().ended == number + 2)  # type: ignore[misc]
        late.say(hello("producer", end=presence.token, folder=presence.folder))
        late.say(b"x")
        _listen(consumer, lambda: consumer.statistics().rejected)
        assert not consumer.statistics().peers
        assert consumer.statistics().vanished == 0


def test_one_that_is_refused_asks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as at first: whoever makes room for it does not find it asking ever more seldom."""
    take_in_at_most(1, monkeypatch)
    for module in (conversation, greeting):
        monkeypatch.setattr(module, "REPEAT", 0.05)
    with tp.Consumer("full", producers=None, shared_memory="off") as consumer:
        with tp.Producer("full") as first, tp.Producer("full", linger=0) as second:
            putting = in_thread(lambda: first.put(1, PATIENCE))
            assert consumer.get(PATIENCE) == 1
            putting()

            def is_refused_often() -> bool:
                with pytest.raises((tp.Refused, tp.Full)):
                    second.put(2, 0.01)
                with pytest.raises(tp.Empty):
                    consumer.get(0.01)
                return consumer.statistics().rejected >= 9

            children.wait_until(is_refused_often)


def test_what_a_binder_still_says_whose_file_has_told_that_it_ended() -> None:
    """The same of the end that the address belongs to."""
    with RawEnd("tcp://127.0.0.1:*", bind=True) as raw, tp.Consumer(raw.endpoint, bind=False) as consumer:
        presence = Presence(binds=True)
        presence.open()
        _listen(consumer, lambda: not raw.is_quiet(0))
        raw.say(hello("producer", Kind.WELCOME, end=presence.token, folder=presence.folder))
        _listen(consumer, lambda: consumer.statistics().peers)
        presence.end(LastWords(Ending()))
        presence.close()
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        before = raw.peer
        raw.say(pack(Kind.GOODBYE, 0))
        raw.hear()
        _listen(consumer, lambda: not raw.is_quiet(0))
        assert raw.peer != before, "it has hung up on what has ended, and says HELLO to whoever comes next"
        raw.say(b"x")
        _listen(consumer, lambda: consumer.statistics().rejected)
        assert "GOODBYE" not in consumer.statistics().last_rejection
        assert consumer.statistics().rejected == 1, "x is no message"


def test_that_a_binder_is_gone_is_told_before_the_messages_of_the_next(free_port: int) -> None:
    """A consumer waits for a binder elsewhere, which may come back. Another answers in its place: the stream has ended."""
    endpoint = f"tcp://127.0.0.1:{free_port}"
    with tp.Consumer(endpoint, bind=False, shared_memory="off") as consumer:
        for word in ("first", "next"):
            with RawEnd(endpoint, bind=True) as raw:
                getting = in_thread(lambda: consumer.get(PATIENCE))
                raw.hear_of(Kind.HELLO)
                raw.say(hello("producer", Kind.WELCOME, end=len(word), round=1))
                raw.say(*exchange.sent(word))
                if word == "next":
                    with pytest.raises(tp.PeerLost, match="vanished"):
                        getting()
                    getting = in_thread(lambda: consumer.get(PATIENCE))
                assert getting() == word


def _put_when_let_in(producer: tp.Producer) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            producer.put(1, 0.2)
            return
        except (tp.Refused, tp.Full):
            assert time.monotonic() < deadline


# -- what may come to a socket


def _bad_messages() -> dict[str, list[bytes]]:
    good, schema = exchange.sent(torch.ones(3)), pack(Kind.DATA, 1)
    one = hello("producer")
    return {
        "one byte": [b"x"],
        "one empty frame": [b""],
        "three empty frames": [b"", b"", b""],
        "zeros": [bytes(24)],
        "random": [bytes(range(256)) * 16],
        "wrong magic": [b"CPIT" + one[4:]],
        "HELLO cut short": [one[:-1]],
        "HELLO of 23 bytes": [one[:23]],
        "HELLO too long": [pack(Kind.HELLO, 0, bytes(MAX_CONTROL))],
        "HELLO that is no map": [pack(Kind.HELLO, 0, b"\xc0")],
        "HELLO with a field more": [map_with(one, more=1)],
        "HELLO without a role": [map_with(one, role=None)],
        "HELLO with a window of text": [map_with(one, window="64")],
        "HELLO with a negative sequence": [map_with(one, sequence=-1)],
        "HELLO with a window of nothing": [map_with(one, window=0)],
        "HELLO that names a descriptor": [map_with(one, credit_pipe=(1, 1, 1))],
        "HELLO of a stranger kind": [hello("spy")],
        "HELLO of a consumer": [hello("consumer")],
        "kind 0": [schema[:5] + b"\0" + schema[6:]],
        "kind 8": [schema[:5] + b"\x08" + schema[6:]],
        "reserved bytes": [schema[:6] + b"\1\0" + schema[8:]],
        "WELCOME from a connector": [hello("producer", Kind.WELCOME)],
        "REFUSED from a connector": [pack(Kind.REFUSED, 0, b"\x81\xa6reason\xa1x")],
        "DATA before HELLO": good,
        "PIECE before HELLO": [pack_piece(1, Piece(0, 4)), b"four"],
        "PIECE that says nothing": [schema[:5] + b"\7" + schema[6:], b"four"],
        "CREDIT before HELLO": [pack(Kind.CREDIT, 1)],
        "GOODBYE before HELLO": [pack(Kind.GOODBYE, 0)],
        "GOODBYE with a body": [pack(Kind.GOODBYE, 0, b"x")],
        "lengths that promise more": [pack(Kind.DATA, 1, bytes(MAX_HEADER))[:100]],
        "lengths of four billion": [schema[:16] + b"\xff" * 8],
    }


BAD_MESSAGES = _bad_messages()


def _bad_data() -> dict[str, list[bytes]]:
    """DATA of a peer that is attached."""
    good = exchange.sent(torch.ones(100_000))
    head, payload = good
    return {
        "no payload": [head],
        "one payload more": [head, payload, b"more"],
        "a payload too short": [head, payload[:-1]],
        "a payload too long": [head, payload + b"x"],
        "a schema cut short": [pack(Kind.DATA, 1, head[24:-1]), payload],
        "a schema of zeros": [pack(Kind.DATA, 1, bytes(40)), payload],
        "no schema": [pack(Kind.DATA, 1), payload],
        "an unknown serializer": [head.replace(b"\3raw", b"\3war"), payload],
        "values that are none": [pack(Kind.DATA, 1, head[24:], b"\xc1"), payload],
        "hundreds of frames": [head, *[b"x"] * 500],
    }


BAD_DATA = _bad_data()


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_input_while_a_good_producer_streams(name: str) -> None:
    """The good one's messages all arrive in order; the bad ones are counted, and the statistics say which rule broke."""
    with tp.Consumer("fuzzed") as consumer, RawEnd(consumer.endpoint) as raw, tp.Producer("fuzzed") as producer:
        putting = in_thread(lambda: [producer.put(number, PATIENCE) for number in range(30)])
        for _ in range(3):
            raw.say(*BAD_MESSAGES[name])
        assert [consumer.get(PATIENCE) for _ in range(30)] == list(range(30))
        putting()
        if "empty frame" not in name:
            _listen(consumer, lambda: consumer.statistics().rejected == 3)
            assert consumer.statistics().last_rejection
        assert len(consumer.statistics().peers) == 1
        assert (consumer.statistics().messages, consumer.statistics().lost) == (30, 0)


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_of_a_peer(name: str) -> None:
    """A peer that is attached and sends what is no message is told it was taken, counted, and may go on."""
    with tp.Consumer("fuzzed") as consumer, RawEnd(consumer.endpoint) as raw:
        _attach(consumer, raw)
        raw.say(*BAD_DATA[name])
        _listen(consumer, lambda: consumer.statistics().rejected == 1)
        assert consumer.statistics().last_rejection
        assert raw.hear_of(Kind.CREDIT).sequence == 1
        raw.say(*exchange.sent("good", sequence=2))
        assert consumer.get(PATIENCE) == "good"
        assert consumer.statistics().messages == 1


@pytest.mark.parametrize("name", sorted(set(BAD_MESSAGES) - {"HELLO of a consumer", "one empty frame"}))
def test_bad_input_to_a_producer(name: str) -> None:
    """A producer that binds does not mind either, and its consumer gets everything."""
    with tp.Producer("fuzzed", bind=True) as producer, RawEnd(producer.endpoint) as raw:
        raw.say(*BAD_MESSAGES[name])
        if "empty frame" not in name:
            _refuse(producer)
        with tp.Consumer("fuzzed", bind=False) as consumer:
            getting = in_thread(lambda: [consumer.get(PATIENCE) for _ in range(10)])
            for number in range(10):
                producer.put(number, PATIENCE)
            assert getting() == list(range(10))
            assert len(producer.statistics().peers) == 1


@pytest.mark.parametrize(
    "identity",
    [{"boot": " "}, *({"pid": pid} for pid in (-1, 0, 1 << 31, 1 << 40, -(1 << 63), (1 << 64) - 1))],
    ids=str,
)
def test_an_identity_that_nobody_has(identity: Any) -> None:
    """A consumer admits a connector with any identity, and soon sees that it is dead. The others' messages come."""
    with (
        tp.Consumer("fuzzed") as consumer,
        RawEnd(consumer.endpoint) as raw,
        tp.Producer("fuzzed", linger=0) as producer,
    ):
        terms = SharedMemoryTerms("auto", os.geteuid())
        who = msgspec.structs.replace(process.identity(), **identity)
        for number in range(3):
            producer.put(number, PATIENCE)
            assert consumer.get(PATIENCE) == number
            if not number:
                raw.say(hello("producer", identity=who, shared_memory=terms))
                _listen(consumer, lambda: not raw.is_quiet(0))
                assert raw.hear_header().kind == Kind.WELCOME
        assert (consumer.statistics().rejected, consumer.statistics().lost) == (0, 0)


def test_a_message_that_its_sender_gave_up() -> None:
    """An empty last frame uses up its number; from a stranger, or of another kind, it is nothing."""
    cut = [exchange.sent(torch.ones(3))[0], b""]
    with tp.Consumer("cut") as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(*cut)
        _attach(consumer, raw)
        for nothing in ([b""], [pack(Kind.GOODBYE, 0), b""], [pack(Kind.CREDIT, 2), b""]):
            raw.say(*nothing)
        raw.say(*cut)
        raw.say(*exchange.sent("good", sequence=2))
        assert consumer.get(PATIENCE) == "good"
        assert [raw.hear_of(Kind.CREDIT).sequence for _ in range(2)] == [1, 2]
        assert (consumer.statistics().rejected, consumer.statistics().lost, consumer.statistics().messages) == (0, 0, 1)
        assert len(consumer.statistics().peers) == 1


def test_memory_does_not_grow_with_bad_input() -> None:
    """Thousands of bad messages, with megabytes in them, leave the process as large as it was."""
    with tp.Consumer("flooded") as consumer, RawEnd(consumer.endpoint) as raw:
        bad = [*BAD_MESSAGES.values(), [bytes(1 << 20)], [b"x"] * 300]

        def flood() -> None:
            before = consumer.statistics().rejected
            for frames in bad:
                raw.say(*frames)
            _listen(consumer, lambda: consumer.statistics().rejected >= before + len(bad) - 2)

        for _ in range(10):
            flood()
        gc.collect()
        before = memory().uss
        for _ in range(30):
            flood()
        gc.collect()
        assert memory().uss - before < 8 << 20
        assert consumer.statistics().peers == ()


def _listen_to_flood(ends: children.Ends, least: int) -> int:
    """Have the consumer hear messages until so many were rejected, and no more come.

    Return the bytes that are this process's alone then.
    """
    rejected, since = -1, 0.0

    def is_over() -> bool:
        nonlocal rejected, since
        found = ends.consumer.statistics().rejected
        if found != rejected:
            rejected, since = found, time.monotonic()
        return rejected >= least and time.monotonic() - since > 0.5

    _listen(ends.consumer, is_over)
    with pytest.raises(tp.Empty):
        ends.consumer.get(0)
    return memory().uss


@pytest.mark.slow
def test_memory_of_a_flood_is_given_back_when_it_is_over() -> None:
    """A short message that comes alone takes some KB until it is read. They are given back, though friends came meanwhile.

    The consumer is in a process of its own: others' heaps have holes.
    """
    with Child() as child, contextlib.ExitStack() as friends:
        endpoint = child.call(children.open_consumer, "tcp://127.0.0.1:*")
        before = child.call(_listen_to_flood, 0)
        with RawLine(endpoint) as raw:
            raw.say(hello("producer"))
            for number in range(5000):
                if number % 500 == 0:
                    friends.enter_context(RawLine(endpoint)).say(hello("producer"))
                raw.say(bytes(60))
                time.sleep(0)  # libzmq's thread reads this one alone
            after = child.call(
                _listen_to_flood, 3000
            )  # on a busy machine the last are in the kernel when it is hung up on
        assert after - before < 12 << 20, "the last 999 may stay, at 8 KB each, and 5,000 took 40 MB"


def test_giving_memory_back_has_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 0.2 s in a program whose heap is large: twenty messages of many frames a second took all its time."""
    given_back = []

    def trim(_: int) -> None:
        given_back.append(time.monotonic())
        time.sleep(0.1)

    monkeypatch.setattr(libc, "libc", lambda: SimpleNamespace(malloc_trim=trim))
    with tp.Consumer("tcp://127.0.0.1:0", producers=None) as consumer:
        for number in range(5):
            with RawEnd(consumer.endpoint) as raw:
                raw.say(*[b""] * 2000, b"x")
                _listen(consumer, lambda number=number: consumer.statistics().rejected > number)  # type: ignore[misc]
        assert len(given_back) == 1
        monkeypatch.setattr(reader_of(consumer), "_gives_back_from", 0.0)
        _listen(consumer, lambda: len(given_back) == 2)


def test_a_type_that_is_not_registered_here() -> None:
    """get says which type; the message is dropped and credited, and the next one comes."""
    with tp.Consumer("typed") as consumer, Child() as child:
        child.call(children.open_producer, "typed")
        child.begin(children.put_unknown_type)
        with pytest.raises(
            tp.UnsupportedLeaf, match="'OnlyThere', which is not registered here.*a message from producer pid"
        ):
            consumer.get(PATIENCE)
        assert consumer.get(PATIENCE) == "next"
        child.result()
        child.call(children.flush)


@pytest.mark.parametrize("role", ["consumer", "x" * 3000])
def test_a_connector_does_not_take_who_is_no_producer_for_one(role: str) -> None:
    """The texts of errors would repeat what it says of itself."""
    with RawEnd("tcp://127.0.0.1:*", bind=True) as raw, tp.Consumer(raw.endpoint, bind=False) as consumer:
        wait_in_vain(consumer, lambda: not raw.is_quiet(0))
        raw.hear()
        raw.say(hello(role, Kind.WELCOME))
        wait_in_vain(consumer, lambda: consumer.statistics().rejected)
        said = consumer.statistics()
        assert said.peers == ()
        assert len(said.last_rejection) < 100
