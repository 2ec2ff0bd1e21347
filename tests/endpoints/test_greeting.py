"""Binders that compute, and answer nobody: who comes meanwhile shares a queue with them all the same."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import children
import psutil
import pytest
from children import PATIENCE, Child, in_thread, wait_until
from inside import forget_offered_queues, side_of, take_in_at_most
from proxy import Proxy
from raw_ends import RawEnd, hello, hello_of, wait_in_vain

import tensorpipe_ipc as tp
from tensorpipe_ipc.cli.doctor import attached
from tensorpipe_ipc.cli.doctor.finding import State
from tensorpipe_ipc.endpoints import conversation, rendezvous, rendezvous_file, standby_queues
from tensorpipe_ipc.endpoints.peer import Peer
from tensorpipe_ipc.endpoints.presence import Presence
from tensorpipe_ipc.endpoints.receiver import Receiver
from tensorpipe_ipc.endpoints.standby_queues import StandbyQueues
from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory import ofd_locks
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.shared_queue.token_pipe import CAPACITY
from tensorpipe_ipc.wire.header import Kind, SharedMemoryTerms, unpack
from tensorpipe_ipc.zeromq.addresses import parse

pytestmark = pytest.mark.limit(20)
ENDPOINTS = [pytest.param("busy", id="ipc"), pytest.param("tcp://127.0.0.1:0", id="tcp")]


@contextlib.contextmanager
def _without_file(endpoint: str) -> Iterator[None]:
    """As if it were not there yet."""
    path = Path(rendezvous_file.path_of(parse(endpoint)))
    path.rename(f"{path}.later")
    yield
    Path(f"{path}.later").rename(path)


def _put_silently(ends: children.Ends, *trees: Any) -> None:
    """Put into a queue that was claimed, with no HELLO: as if it were killed before that had left."""
    side_of(ends.producer).socket.send_small = lambda *_: True
    children.put(ends, *trees)


def _put_after_one_word(ends: children.Ends, *trees: Any) -> None:
    """The same with one HELLO, which names no queue, as none was free. It goes out once one was claimed, unanswered so far."""
    side, said = side_of(ends.producer), list[tuple[Any, ...]]()
    real, is_sent = side.socket.send_small, False

    def say_once(*what: Any) -> bool:
        nonlocal is_sent
        said.append(what)
        if is_sent or not side.peers:
            return True
        is_sent = True
        return real(*said[0])

    side.socket.send_small = say_once
    children.put(ends, *trees)
    assert is_sent or not trees


_others: list[tp.Producer] = []


def _say_hello(ends: children.Ends) -> None:
    """Say HELLO while no queue is free, and put nothing."""
    with contextlib.suppress(tp.Full):
        ends.producer.wait_for(1, timeout=0.1)


def _put_silently_from_another_end(_: children.Ends, endpoint: str, *trees: Any) -> None:
    """Do as ``_put_silently``, from a further end of the same process."""
    _others.append(tp.Producer(endpoint))
    side_of(_others[-1]).socket.send_small = lambda *_: True
    for tree in trees:
        _others[-1].put(tree, PATIENCE)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("maxsize", [64, 8, 3])
def test_a_consumer_that_computes_gets_all_that_was_put_meanwhile(endpoint: str, maxsize: int) -> None:
    """As many as the smaller maxsize, at once, and the producer closes; then all come, and the end of the stream."""
    with tp.Consumer(endpoint, maxsize=8) as consumer, Child() as child:
        child.call(children.open_producer, consumer.endpoint, maxsize=maxsize, linger=0.0)
        count = min(maxsize, 8)
        child.call(children.put_numbers, 0, count)
        with pytest.raises(tp.Full, match=f"holds {count} untaken of {count}"):
            child.call(children.put, "one more", timeout=0.05)
        said = child.call(children.producer_statistics)
        assert (said.transport, said.in_flight, len(said.peers)) == ("shared memory", count, 1)
        child.call(children.close)
        assert [*consumer] == [("", number) for number in range(count)]
        found = consumer.statistics()
        assert (found.transport, found.lost, found.rejected) == ("shared memory", 0, 0)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_producer_that_computes_has_its_consumers_by_the_time_it_puts(endpoint: str) -> None:
    """Its first put_nowait goes to one that came meanwhile; and that gets it while the producer computes again."""
    with tp.Producer(endpoint, bind=True, maxsize=8, linger=0) as producer, Child() as child:
        child.call(children.open_consumer, producer.endpoint, bind=False)
        with pytest.raises(tp.Empty, match=f"pid {os.getpid()} on "):
            child.call(children.take, timeout=0.2)
        assert child.call(children.consumer_statistics).transport == "shared memory"
        for number in range(8):
            producer.put_nowait(number)
        with pytest.raises(tp.Full, match="holds 8 untaken of 8"):
            producer.put_nowait(8)
        assert child.call(children.take, 8) == list(range(8))
        producer.flush(PATIENCE)
        assert producer.statistics().transport == "shared memory"
        producer.close()
        with pytest.raises(tp.EndOfStream):
            child.call(children.take)


def test_in_one_thread() -> None:
    """Both ends of an endpoint, one after the other: nobody has to answer."""
    with tp.Consumer("alone") as consumer, tp.Producer("alone") as producer:
        for number in range(64):
            producer.put(number, PATIENCE)
        with pytest.raises(tp.Full):
            producer.put(64, 0.05)
        assert [consumer.get(PATIENCE) for _ in range(64)] == list(range(64))
        producer.close()
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)


def test_each_queue_is_for_one() -> None:
    """Two come at once; whoever finds none waits until the binder answers, and then has one of its own."""
    with tp.Consumer("busy") as consumer, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Child()) for _ in range(3)]
        for child in crowd:
            child.call(children.open_producer, "busy")
        for name in (0, 1):
            crowd[name].call(children.put_numbers, 0, 10, str(name))
        with pytest.raises(tp.Full, match="no consumer has come"):
            crowd[2].call(children.put, "early", timeout=0.1)
        crowd[2].begin(children.put_numbers, 0, 10, "2")
        got = [consumer.get(PATIENCE) for _ in range(30)]
        for name, child in enumerate(crowd):
            assert [number for who, number in got if who == str(name)] == list(range(10))
            if name == 2:
                child.result()
            child.call(children.close)
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        assert consumer.statistics().lost == 0


def test_of_all_who_try_one_has_it() -> None:
    """Threads of the binder's own process, and others; also once he who had it has let it go."""
    queue, other, here = rendezvous.make(4), rendezvous.make(4), identity()
    assert queue.claim(3)
    assert not queue.claim(3)
    assert queue.credits is not None
    assert (queue.claimant, queue.maxsize, queue.credits.unread()) == (os.getpid(), 3, 3)
    assert not queue.is_deserted()
    pid = os.fork()
    if not pid:
        done = False
        try:
            one = rendezvous.reach(here, other.offer, 4)
            done = one.claim(4) and not one.claim(4)
        finally:
            os._exit(not done)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert other.claimant == pid
    assert other.is_deserted()
    assert not other.claim(4)
    forget_offered_queues()
    for each in (queue, other):
        vars(each).clear()


def test_who_said_hello_before_there_was_a_file() -> None:
    """Two HELLOs wait for the binder, the second with the queue: that one it is, and nothing is lost of it."""
    with tp.Consumer("busy") as consumer, Child() as child:
        child.call(children.open_producer, "busy")
        with _without_file("busy"), pytest.raises(tp.Full, match="no consumer has come"):
            child.call(children.put, "early", timeout=0.1)
        child.call(children.put_numbers, 0, 10)
        assert [consumer.get(PATIENCE)[1] for _ in range(10)] == list(range(10))
        child.begin(children.put_numbers, 10, 80)
        assert [consumer.get(PATIENCE)[1] for _ in range(70)] == list(range(10, 80))
        child.result()
        assert len(consumer.statistics().peers) == 1
        assert child.call(children.producer_statistics).lost == consumer.statistics().lost == 0
        child.call(children.close)
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)


@pytest.mark.slow
def test_who_was_killed_before_its_hello_had_left() -> None:
    """A consumer gets the messages of a producer that was killed before its HELLO had left.

    The stream does not end before. Then PeerLost names the producer.
    """
    with tp.Consumer("busy") as consumer, tp.Producer("busy") as other, Child() as child:
        other.put("from another", PATIENCE)
        assert consumer.get(PATIENCE) == "from another"
        child.call(children.open_producer, "busy")
        wait_until(lambda: rendezvous_file.read(parse("busy")).offers)  # type: ignore[union-attr]
        child.call(_put_silently, *range(5))
        other.close()
        with pytest.raises(tp.Empty, match=f"pid {child.pid} has come by the rendezvous file"):
            consumer.get(0.7)
        child.kill()
        assert [consumer.get(PATIENCE) for _ in range(5)] == list(range(5))
        with pytest.raises(tp.PeerLost, match=f"pid {child.pid} "):
            consumer.get(PATIENCE)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_descriptor_tells_of_who_was_killed_before_its_hello_had_left(endpoint: str) -> None:
    """A consumer that waits on its descriptor alone gets such a producer's message, and is told its end."""
    with tp.Consumer(endpoint) as consumer, Child() as child:
        got = _got_by_descriptor(consumer)
        child.call(children.open_producer, consumer.endpoint)
        child.call(_put_silently, "left behind")
        child.kill()
        assert next(got) == "left behind"
        with pytest.raises(tp.PeerLost, match=f"pid {child.pid} "):
            next(got)


def _got_by_descriptor(consumer: tp.Consumer) -> Iterator[Any]:
    """Take what comes, with a look only where the descriptor tells of something."""
    descriptor = consumer.fileno()
    while True:
        try:
            yield consumer.get_nowait()
        except tp.Empty:
            assert select.select([descriptor], [], [], PATIENCE)[0], "it tells of nothing"


def test_a_producer_of_this_process_that_closed_before_its_hello_had_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer gets the messages of a producer that closed before its HELLO had left, and the stream ends.

    The producer's process lives on, but the consumer does not wait for the HELLO.
    """
    monkeypatch.setattr(standby_queues, "PATIENCE", 0.05)
    with tp.Consumer("busy") as consumer:
        producer = tp.Producer("busy", linger=0)
        monkeypatch.setattr(side_of(producer).socket, "send_small", lambda *_: True)  # it went to the last binder
        producer.put("early", PATIENCE)
        with pytest.warns(RuntimeWarning, match="closed with 1 messages"):
            producer.close()
        assert consumer.get(PATIENCE) == "early"
        with pytest.raises(tp.PeerLost):
            consumer.get(PATIENCE)


def test_a_hello_that_waits_behind_what_others_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that said it, put and closed meanwhile is no producer that vanished, and ends the stream once."""
    monkeypatch.setattr(standby_queues, "PATIENCE", 0)
    with tp.Consumer("busy", producers=2) as consumer:
        with tp.Producer("busy", shared_memory="off") as other:
            putting = in_thread(lambda: [other.put(number, PATIENCE) for number in range(3)])
            assert consumer.get(PATIENCE) == 0
            putting()
            with tp.Producer("busy", linger=0) as producer:
                producer.put("early", PATIENCE)
                with pytest.warns(RuntimeWarning, match="closed with 1 messages"):
                    producer.close()
            for _ in range(3):  # as gets do that are far apart
                side_of(consumer).look_around(at_once=True)
            assert {consumer.get(PATIENCE) for _ in range(3)} == {1, 2, "early"}
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        assert (consumer.statistics().ended, consumer.statistics().vanished) == (2, 0)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_hello_to_the_binder_before_this_one_is_no_producer(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come by a connection that was made anew, when who said it has closed: it put nothing here, and ends no stream."""
    monkeypatch.setattr(conversation, "REPEAT", 0.05)
    with tp.Consumer(endpoint) as consumer:
        gone = Presence()
        gone.open()
        gone.close()
        terms = SharedMemoryTerms("auto", os.geteuid(), attached=12345)
        with RawEnd(consumer.endpoint) as raw:
            raw.say(hello("producer", shared_memory=terms, end=gone.token, folder=gone.folder))
            wait_in_vain(consumer, lambda: consumer.statistics().peers)
        wait_in_vain(consumer, lambda: not consumer.statistics().peers)
        assert consumer.statistics().vanished == 0


def test_a_connection_that_is_made_anew_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer may learn that its last binder's connection has ended when the next one has answered it; then it computes."""
    monkeypatch.setattr(conversation, "REPEAT", 0.05)
    with tp.Consumer("busy") as consumer, tp.Producer("busy") as producer:
        producer.put(0, PATIENCE)
        assert consumer.get(PATIENCE) == 0
        wait_until(lambda: "met by its file" not in producer.statistics().peers[0])
        producer.put(1)
        side_of(producer).socket.drop(side_of(producer).socket.routing)
        side_of(producer).look_around(at_once=True)  # as a put does that waits
        assert producer.statistics().lost == 0
        assert consumer.get(PATIENCE) == 1
        until = time.monotonic() + 0.3
        wait_in_vain(consumer, lambda: time.monotonic() > until)
        producer.put(2, PATIENCE)
        assert consumer.get(PATIENCE) == 2
        assert consumer.statistics().vanished == 0


@pytest.mark.parametrize("is_answered_first", [False, True])
def test_what_a_connection_swallowed_is_counted_when_the_next_one_is_there(
    is_answered_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In frames over ipc, by both ends, whether or not the consumer answers before anybody has looked."""
    with tp.Consumer("busy", shared_memory="off") as consumer, tp.Producer("busy") as producer:
        putting = in_thread(lambda: producer.put(0, PATIENCE))
        assert consumer.get(PATIENCE) == 0
        putting()
        producer.flush(PATIENCE)
        with monkeypatch.context() as swallowed:
            swallowed.setattr(side_of(producer).socket, "lend", lambda *_, **__: [])
            producer.put(1)
            producer.put(2)
        socket = side_of(producer).socket
        socket.drop(socket.routing)
        wait_until(lambda: socket.is_connected(0.01))
        if is_answered_first:
            side_of(producer).ensure_greeted()
            with pytest.raises(tp.Empty):
                consumer.get(0.2)
        putting = in_thread(lambda: producer.put(3, PATIENCE))
        assert consumer.get(PATIENCE) == 3
        putting()
        assert (producer.statistics().lost, consumer.statistics().lost) == (2, 2)
        with pytest.raises(tp.PeerLost, match="with 2 messages that it had not taken"):
            producer.flush(PATIENCE)


def test_an_exception_as_a_new_connection_is_heard_leaves_nothing_of_the_old_one_unsent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal's handler raises, in the moment in which a consumer learns that a line over tcp was cut."""
    next_round, raised = Receiver._next_round, list[int]()

    def interrupted(self: Receiver, peer: Any) -> None:
        raised.append(1)
        if len(raised) == 1:
            raise KeyboardInterrupt
        next_round(self, peer)

    with contextlib.ExitStack() as stack:
        consumer = stack.enter_context(tp.Consumer("tcp://127.0.0.1:0", shared_memory="off", maxsize=1))
        line = stack.enter_context(Proxy(int(consumer.endpoint.rpartition(":")[2])))
        producer = stack.enter_context(tp.Producer(line.endpoint, maxsize=1, linger=0))
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        producer.flush(PATIENCE)
        line.silence("there")
        producer.put("swallowed", PATIENCE)
        monkeypatch.setattr(Receiver, "_next_round", interrupted)
        line.cut()
        line.heal()
        flushing = in_thread(lambda: producer.flush(PATIENCE))
        with pytest.raises(KeyboardInterrupt):
            consumer.get(PATIENCE)
        assert consumer.get(PATIENCE) == "swallowed"
        flushing()


@pytest.mark.parametrize("has_met", [False, True])
def test_what_a_binders_consumer_dropped_with_a_connection_is_counted(has_met: bool) -> None:
    """In frames over ipc: the producer tells of it, its window has room again, and what is put next comes."""
    with tp.Producer("busy", bind=True, maxsize=2) as producer:
        with tp.Consumer("busy", bind=False, shared_memory="off") as consumer:
            if has_met:
                putting = in_thread(lambda: producer.put(0, PATIENCE))
                assert consumer.get(PATIENCE) == 0
                putting()
                producer.flush(PATIENCE)
            else:
                wait_until(lambda: side_of(consumer).socket.is_connected(0.01))
                with pytest.raises(tp.Empty):
                    consumer.get(0)
            producer.put(1, PATIENCE)
            producer.put(2, PATIENCE)
            wait_until(side_of(consumer).socket.has_incoming)
            side_of(consumer).socket.drop(side_of(consumer).socket.routing)
            putting = in_thread(lambda: producer.put(3, PATIENCE))
            if has_met:
                with pytest.raises(tp.PeerLost, match="vanished"):
                    consumer.get(PATIENCE)
            assert consumer.get(PATIENCE) == 3
            putting()
            with pytest.raises(tp.PeerLost, match="with 2 messages that it had not taken"):
                producer.flush(PATIENCE)
            assert producer.statistics().lost == 2


def test_who_claimed_a_queue_put_nothing_and_was_killed() -> None:
    """Nobody is told, and the stream of others ends; there is a queue for the next."""
    with tp.Consumer("busy") as consumer, tp.Producer("busy") as other, Child() as child, Child() as last:
        other.put("from another", PATIENCE)
        assert consumer.get(PATIENCE) == "from another"
        child.call(children.open_producer, "busy")
        child.call(_put_silently)
        child.call(children.producer_statistics)
        child.kill()
        other.close()
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        last.call(children.open_producer, "busy")
        last.call(children.put, "from the next")
        assert consumer.get(PATIENCE) == "from the next"


@pytest.mark.slow
@pytest.mark.parametrize("put_any", [False, True], ids=["nothing", "a message"])
def test_who_was_heard_of_and_claimed_a_queue_and_was_killed_counts_once(put_any: bool) -> None:
    """Its HELLO named no queue, as none was free. A stream of three goes on until the third has left."""
    with tp.Consumer("busy", producers=3) as consumer, Child() as first, Child() as second, Child() as third:
        for child in (first, second):
            child.call(children.open_producer, "busy")
            child.call(children.put, "from one")
        third.call(children.open_producer, "busy")
        third.begin(_put_after_one_word, *["from the killed one"] * put_any)
        if put_any:
            third.wait_until_blocked()  # it has made its HELLO
        assert [consumer.get(PATIENCE) for _ in range(2)] == ["from one"] * 2
        third.result()
        third.kill()
        second.call(children.close)
        if put_any:
            assert consumer.get(PATIENCE) == "from the killed one"
        with pytest.raises(tp.Empty):
            consumer.get(1)
        assert (consumer.statistics().ended, consumer.statistics().vanished) == (1, put_any)
        first.call(children.close)
        if put_any:
            with pytest.raises(tp.PeerLost, match=f"pid {third.pid} "):
                consumer.get(PATIENCE)


def test_two_ends_of_one_process_that_was_killed_count_as_two() -> None:
    """One said HELLO and claimed nothing. The other claimed a queue, and was not heard of."""
    with tp.Consumer("busy", producers=4) as consumer, Child() as first, Child() as second, Child() as killed:
        for child in (first, second):
            child.call(children.open_producer, "busy")
            child.call(children.put, "from one")
        killed.call(children.open_producer, "busy")
        killed.call(_say_hello)
        assert [consumer.get(PATIENCE) for _ in range(2)] == ["from one"] * 2
        wait_in_vain(consumer, lambda: len(consumer.statistics().peers) == 3)
        killed.call(_put_silently_from_another_end, "busy", "from the other end")
        killed.kill()
        for child in (first, second):
            child.call(children.close)
        assert consumer.get(PATIENCE) == "from the other end"
        with pytest.raises(tp.PeerLost, match=f"pid {killed.pid} .*pid {killed.pid} "):
            consumer.get(PATIENCE)
        assert (consumer.statistics().ended, consumer.statistics().vanished) == (2, 2)


def _stop_while_claiming(ends: children.Ends, endpoint: str) -> None:
    """Open a producer that is stopped where it has the lock of a queue, and has not written whose it is."""

    def stop(queue: rendezvous.PairQueue, maxsize: int, end: int = 0) -> bool:
        assert queue.rows.try_lock(queue.record.block + 1, 1)
        os.kill(os.getpid(), signal.SIGSTOP)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous.PairQueue, "claim", stop)
        children.open_producer(ends, endpoint)
        children.put(ends, "from the stopped one")


def _claim_silently(ends: children.Ends, endpoint: str) -> None:
    """Open a consumer that claims a queue, and whose HELLO does not come."""
    children.open_consumer(ends, endpoint, bind=False)
    side_of(ends.consumer).socket.send_small = lambda *_: True
    ends.consumer.get(PATIENCE)


def test_one_that_is_stopped_while_it_claims_a_queue_keeps_nobody_out() -> None:
    """The binder makes another queue in its place."""
    with tp.Consumer("busy", producers=None) as consumer, Child() as stopped, contextlib.ExitStack() as stack:
        others = [stack.enter_context(Child()) for _ in range(3)]
        stopped.begin(_stop_while_claiming, "busy")
        wait_until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
        for child in others:
            child.call(children.open_producer, "busy", shared_memory="require")
            child.begin(children.put, "from another")
        assert [consumer.get(PATIENCE) for _ in others] == ["from another"] * 3
        for child in others:
            child.result()
        stopped.kill()


@pytest.mark.slow
def test_one_that_was_stopped_when_it_had_claimed_a_queue_is_named_though_others_are_there() -> None:
    """An end that waits for it reads its pid, whichever end binds."""
    with tp.Producer("here", bind=True) as producer, Child() as other, Child() as silent:
        other.call(children.open_consumer, "here", bind=False)
        other.begin(children.take)
        producer.put("for the other one", PATIENCE)
        other.result()
        silent.begin(_claim_silently, "here")
        with pytest.raises(tp.Full, match=f"1 of 2 consumers .*pid {silent.pid} has come by the rendezvous file"):
            producer.wait_for(2, 2)
        silent.kill()
        with pytest.raises(tp.Full, match=f"pid {silent.pid} has ended before its HELLO came"):
            producer.wait_for(2, 0.1)
        other.kill()


def test_what_was_put_survives_its_producer() -> None:
    """Killed after put returned, while its binder computes."""
    with tp.Consumer("busy") as consumer, Child() as child:
        child.call(children.open_producer, "busy")
        child.call(children.put_numbers, 0, 10)
        child.kill()
        assert [consumer.get(PATIENCE)[1] for _ in range(10)] == list(range(10))
        with pytest.raises(tp.PeerLost, match=f"pid {child.pid} "):
            consumer.get(PATIENCE)


def test_a_binder_that_is_killed_and_the_next_one() -> None:
    """PeerLost counts the messages that a killed binder had not taken.

    The producer finds the next binder by that binder's file, although it computes as well.
    """
    with Child() as child, tp.Producer("busy", linger=0) as producer:
        child.call(children.open_consumer, "busy")
        for number in range(3):
            producer.put(number, PATIENCE)
        child.kill()
        with pytest.raises(tp.PeerLost, match=f"pid {child.pid} .*with 3 messages that it had not taken"):
            producer.flush(PATIENCE)
        with tp.Consumer("busy") as consumer:
            producer.put("for the next", PATIENCE)
            assert consumer.get(PATIENCE) == "for the next"


def test_a_binder_that_closes_without_having_heard_of_us() -> None:
    """It says goodbye to those who have claimed a queue, too: a stream ends, and what was not taken is lost, and told."""
    with Child() as child:
        with tp.Producer("busy", bind=True) as producer:
            child.call(children.open_consumer, "busy", bind=False)
            with pytest.raises(tp.Empty):
                child.call(children.take, timeout=0.2)
            producer.close()
            with pytest.raises(tp.EndOfStream):
                child.call(children.take)
        with tp.Consumer("busy") as consumer:
            child.call(children.open_producer, "busy", linger=0.0)
            child.call(children.put_numbers, 0, 3)
            consumer.close()
            with pytest.raises(tp.PeerLost, match="with 3 messages that it had not taken"):
                child.call(children.flush)


def test_a_refusal_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is raised all the same, what was put is dropped, and the producer is told that it is lost."""
    with tp.Consumer("busy") as consumer, Child() as child:
        take_in_at_most(0, monkeypatch)
        child.call(children.open_producer, "busy", linger=0.0)
        child.call(children.put_numbers, 0, 3)
        wait_in_vain(consumer, lambda: consumer.statistics().rejected)  # or twice
        wait_until(lambda: not child.call(children.producer_statistics).peers)  # the refusal is there
        with pytest.raises(tp.Refused, match="0 peers are attached"):
            child.call(children.put, "more")
        assert child.call(children.producer_statistics).lost == 3
        with pytest.raises(tp.Empty):
            consumer.get(0.8)


def test_a_consumer_that_is_refused_later_is_told_of_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has met its producer by the file. The refusal is raised each time, and no stream has ended."""
    with tp.Producer("busy", bind=True) as producer, Child() as child:
        take_in_at_most(0, monkeypatch)
        child.call(children.open_consumer, "busy", bind=False)
        with pytest.raises(tp.Empty, match="met by its file"):
            child.call(children.take, timeout=0.5)
        wait_until(lambda: producer.statistics().rejected)
        for _ in range(3):
            with pytest.raises(tp.Refused, match="0 peers are attached"):
                child.call(children.take)


def test_who_says_that_he_claimed_what_nobody_has() -> None:
    """A token that is none, or of a queue that is still to be had, leads to no queue, and he is told so."""
    with tp.Consumer("busy") as consumer, RawEnd(consumer.endpoint) as raw:
        found = rendezvous_file.read(parse("busy"))
        assert found is not None
        for token in (12345, found.offers[0].token):
            raw.say(hello("producer", shared_memory=SharedMemoryTerms("auto", os.geteuid(), attached=token)))
            raw.until_answered(consumer)
            terms = hello_of(raw.hear_of(Kind.WELCOME)).shared_memory
            while terms is not None and terms.unknown not in (0, token):  # of the HELLO before, said again
                raw.until_answered(consumer)
                terms = hello_of(raw.hear_of(Kind.WELCOME)).shared_memory
            assert terms is not None
            assert (terms.attached, terms.unknown, terms.why_not) == (0, token, "")
        again = rendezvous_file.read(parse("busy"))
        assert again is not None
        assert again.offers == found.offers[:1]  # one for the next, now that somebody is attached


def test_who_names_another_queue_than_was_claimed() -> None:
    """He gets none that another has claimed, whose messages come."""
    with tp.Consumer("busy") as consumer, RawEnd(consumer.endpoint) as raw, tp.Producer("busy", linger=0) as producer:
        found = rendezvous_file.read(parse("busy"))
        assert found is not None
        raw.say(hello("producer", shared_memory=SharedMemoryTerms("auto", os.geteuid(), attached=12345)))
        for number in range(5):
            producer.put(number, PATIENCE)
        assert [consumer.get(PATIENCE) for _ in range(5)] == list(range(5))
        wait_in_vain(consumer, lambda: len(consumer.statistics().peers) == 2)
        terms = hello_of(raw.hear_of(Kind.WELCOME)).shared_memory
        assert terms is not None
        assert (terms.attached, terms.unknown) == (0, 12345)


def test_a_queue_that_is_being_claimed_is_not_dropped() -> None:
    """A binder that closes at that moment knows that there is somebody."""
    standby, address, own = StandbyQueues(), parse("claiming"), hello_of(unpack(memoryview(hello("consumer"))))
    with tp.Consumer("claiming", shared_memory="off"):
        standby.open(address, "", own)
        standby.stock(own, 2)
        found = rendezvous_file.read(address)
        assert found is not None
        queue = rendezvous.reach(identity(), found.offers[0], own.window)
        other = os.open(f"/proc/self/fd/{found.offers[0].segment[0]}", os.O_RDWR)
        assert ofd_locks.lock(other, queue.record.block + 1, 1)
        standby.withdraw()
        os.close(other)
        assert not standby.any_claimed
        assert queue.claim(own.window)
        assert standby.any_claimed
        assert standby.take(found.offers[1].token) is None
        taken = standby.take(found.offers[0].token)
        assert taken is not None
        assert taken.offer == found.offers[0]
        standby.close()
        forget_offered_queues()


@pytest.mark.parametrize("maxsize", [CAPACITY, CAPACITY + 1])
def test_the_size_of_what_is_offered(maxsize: int) -> None:
    """As many messages as a pipe has room for, at most: a connector may want no more."""
    with tp.Consumer("busy", maxsize=maxsize):
        found = rendezvous_file.read(parse("busy"))
        assert found is not None
        assert [offer.maxsize for offer in found.offers] == [CAPACITY, CAPACITY]


def test_a_stopped_binder_is_waited_for() -> None:
    """Nobody can connect to one; who comes waits, and nothing is lost."""
    with Child() as child, contextlib.ExitStack() as stack:
        child.call(children.open_consumer, "busy")
        child.signal(signal.SIGSTOP)
        try:
            producer = stack.enter_context(tp.Producer("busy"))
            with pytest.raises(tp.Full):
                producer.put(1, 0.2)
        finally:
            child.signal(signal.SIGCONT)
        child.begin(children.take)
        producer.put(1, PATIENCE)
        assert child.result() == [1]


def test_the_doctor_says_who_has_met_a_binder_that_computes() -> None:
    """That there is a file, and that the one who waits to be heard of puts through shared memory already."""
    with tp.Consumer("busy"), Child() as child:
        says = "; its rendezvous file lets others in while it computes"
        assert next(iter(attached.findings("busy"))).text.endswith(says)
        child.call(children.open_producer, "busy", linger=0.0)
        child.call(children.put_numbers, 0, 3)
        (producer,) = [each for each in attached.findings("busy") if each.what == "  producer"]
        assert producer.state is State.OK
        assert producer.text.startswith(f"pid {child.pid} on ")
        assert producer.text.endswith("shared memory, which the binder has not looked at yet")
        assert "not heard from yet" in child.call(children.producer_statistics).peers[0]
        with _without_file("busy"):
            assert not next(iter(attached.findings("busy"))).text.endswith(says)


def test_many_who_come_and_go_while_it_computes_now_and_then() -> None:
    """Each one's messages come, once and in order, whether it found a queue or had to wait for the answer."""
    with tp.Consumer("busy") as consumer, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Child()) for _ in range(4)]
        got = []
        for turn in range(5):
            for name, child in enumerate(crowd):
                child.call(children.open_producer, "busy")
                child.begin(children.put_numbers_and_close, f"{name} {turn}", 10)
            time.sleep(0.02 * turn)  # it computes
            while len(got) < 40 * (turn + 1):
                with contextlib.suppress(tp.EndOfStream):
                    got.append(consumer.get(PATIENCE))
            for child in crowd:
                child.result()
        for name in range(4):
            for turn in range(5):
                assert [number for who, number in got if who == f"{name} {turn}"] == list(range(10))
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        assert consumer.statistics().lost == 0
        assert consumer.statistics().rejected == 0


def test_a_binder_that_is_full_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is let in by the file who would be refused; when there is room again, it says so."""
    take_in_at_most(2, monkeypatch)

    def offered() -> int:
        found = rendezvous_file.read(parse("full"))
        assert found is not None
        return len(found.offers)

    with tp.Consumer("full") as consumer, contextlib.ExitStack() as stack:
        assert offered() == 2
        for left in (1, 0):
            producer = stack.enter_context(tp.Producer("full"))
            producer.put("in", PATIENCE)
            assert consumer.get(PATIENCE) == "in"
            assert offered() == left
        producer.close()
        with pytest.raises(tp.Empty):
            consumer.get(0.1)
        assert offered() == 1


def _others_take(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have others take what is offered, so many times, before this process reaches it."""
    reach, busy = rendezvous.reach, iter(range(count))

    def reach_later(*arguments: Any) -> Any:
        for _ in busy:
            raise SharedMemoryError(errno.EBUSY, "another end has just taken it")
        return reach(*arguments)

    monkeypatch.setattr(rendezvous, "reach", reach_later)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_another_end_of_the_process_has_just_taken_what_is_offered(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for another, as if any other process had taken it; also one that takes nothing but shared memory."""
    with Child() as child:
        at = child.call(children.open_consumer, endpoint)
        _others_take(8, monkeypatch)
        with tp.Producer(at, shared_memory="require") as producer:
            child.begin(children.take, 1)
            producer.put("in shared memory", PATIENCE)
            assert child.result() == ["in shared memory"]
            assert producer.statistics().transport == "shared memory"


@pytest.mark.parametrize("is_seen", [True, False])
def test_who_asks_for_a_queue_again_and_again(is_seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As others of a crowd take what is offered before it. It is no flood; and who is hung up on all the same lost nothing."""
    with Child() as child:
        at = child.call(children.open_producer, "tcp://127.0.0.1:0", bind=True)
        if not is_seen:
            child.call(_see_strangers)
        child.begin(children.put, "in shared memory")
        _others_take(100, monkeypatch)
        with tp.Consumer(at, bind=False, maxsize=1, shared_memory="require") as consumer:
            assert consumer.get(PATIENCE) == "in shared memory"
            child.result()
            assert (child.call(children.producer_statistics).rejected > 0) is not is_seen


def _see_strangers(ends: children.Ends) -> None:
    Peer.is_seen = lambda _: False  # type: ignore[method-assign]


def _claim_smaller(ends: children.Ends, endpoint: str) -> None:
    """Take all that is offered, for one message at a time, as ends of another process do that said no HELLO yet."""
    found = rendezvous_file.read(parse(endpoint))
    assert found is not None
    queues = [rendezvous.reach(found.hello.identity, offer, offer.maxsize) for offer in found.offers]
    ends.held = [*ends.held, *queues]
    assert all(queue.claim(1) for queue in queues)


def _come_and_leave(ends: children.Ends, endpoint: str) -> None:
    """Take what is offered, and have the binder let go of it."""
    with tp.Producer(endpoint, shared_memory="require") as producer:
        producer.wait_for(1, PATIENCE)


def _take_from_the_next(ends: children.Ends) -> Any:
    with pytest.raises(tp.EndOfStream):
        ends.consumer.get(PATIENCE)
    return ends.consumer.get(PATIENCE)


def test_a_binder_that_closes_while_others_ask_for_a_queue() -> None:
    """It refuses nobody: who asks is told that it has ended, and meets the next binder."""
    with Child() as other, Child() as child:
        with tp.Producer("busy", bind=True) as producer:
            other.call(_claim_smaller, "busy")
            child.call(children.open_consumer, "busy", bind=False, shared_memory="require")
            child.begin(_take_from_the_next)
            wait_until(side_of(producer).socket.has_incoming)
        with tp.Producer("busy", bind=True) as producer:
            producer.put("next", PATIENCE)
            assert child.result() == "next"
        other.call(_let_go)


@pytest.mark.parametrize("taken_by", [_claim_smaller, _come_and_leave])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_is_offered_has_another_end_by_now(endpoint: str, taken_by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes in a crowd waits for the next, also one that takes nothing but shared memory."""
    reach, busy = rendezvous.reach, iter(range(6))

    def reach_later(binder: Any, offer: Any, maxsize: int) -> Any:
        tickets = Path(f"/proc/{binder.pid}/fd/{offer.tickets[0]}")
        for _ in busy:
            other.call(taken_by, at)
            wait_until(lambda: taken_by is _claim_smaller or not _is_there(tickets, offer.tickets[1]))
            break
        return reach(binder, offer, maxsize)

    with Child() as child, Child() as other:
        at = child.call(children.open_consumer, endpoint, producers=None)
        child.begin(children.take, 1)
        monkeypatch.setattr(rendezvous, "reach", reach_later)
        with tp.Producer(at, shared_memory="require") as producer:
            producer.put("in shared memory", PATIENCE)
            assert child.result() == ["in shared memory"]
        other.call(_let_go)


def _is_there(path: Path, inode: int) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_ino == inode
    return False


def _let_go(ends: children.Ends) -> None:
    ends.held = []
