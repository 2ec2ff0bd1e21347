"""The way two programs come to share a queue: its conditions, its opening, and the checks of strangers' bytes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import children
import exchange
import msgspec
import pytest
import torch
import zoo
from children import PATIENCE, Child, in_thread, wait_until
from crash_points import in_child, reap, told_by_child
from inside import conversation_of, forget_offered_queues, reach_anew, side_of
from raw_ends import RawEnd, hello, hello_of, refusal_of, wait_in_vain

import tensorpipe_ipc as tp
from tensorpipe_ipc.cli.doctor import attached
from tensorpipe_ipc.endpoints import rendezvous, rendezvous_file
from tensorpipe_ipc.errors import ProtocolError, SharedMemoryError
from tensorpipe_ipc.memory import ofd_locks, segment
from tensorpipe_ipc.memory.arena import FORWARDED, METADATA_AT, PAYLOAD_AT, SMALLEST, UNIT
from tensorpipe_ipc.memory.row import ROWS_END
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.shared_queue.get_end import Message
from tensorpipe_ipc.shared_queue.token_pipe import CAPACITY
from tensorpipe_ipc.wire.header import Hello, Kind, SharedMemoryTerms
from tensorpipe_ipc.wire.in_block import BY_REFERENCE, PICKLED, metadata_of
from tensorpipe_ipc.zeromq.addresses import parse

pytestmark = pytest.mark.limit(20)
TERMS = SharedMemoryTerms("auto", os.geteuid())
HERE = identity()


def _hello(role: str, window: int = 64, who: Any = HERE, terms: SharedMemoryTerms | None = TERMS) -> Hello:
    return Hello(role, who, window, shared_memory=terms)


ELSEWHERE = {
    "off": (_hello("producer", terms=None), "it is off at the producer"),
    "another host": (
        _hello("producer", who=msgspec.structs.replace(HERE, host="far", boot="another")),
        rf"on another host \({HERE.host}, far\)",
    ),
    "no boot id": (
        _hello("producer", who=msgspec.structs.replace(HERE, boot="")),
        "/proc cannot be read at the producer",
    ),
    "another pid namespace": (
        _hello("producer", who=msgspec.structs.replace(HERE, namespace=7)),
        rf"in another pid namespace \({HERE.namespace}, 7\)",
    ),
    "another user": (
        _hello("producer", terms=SharedMemoryTerms("auto", 65534)),
        rf"another user's \(uid {os.geteuid()}, uid 65534\)",
    ),
    "a boot id of nothing": (
        _hello("producer", who=msgspec.structs.replace(HERE, boot=" ")),
        rf"on another host \({HERE.host}, {HERE.host}\)",
    ),
    "another time namespace": (
        _hello("producer", who=msgspec.structs.replace(HERE, boot=f"{HERE.boot.split()[0]} 7")),
        "in another time namespace",
    ),
    "could not attach": (_hello("producer", terms=SharedMemoryTerms("auto", os.geteuid(), why_not="no row")), "no row"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_in_the_way_is_named(name: str) -> None:
    """Each condition that fails is said in words, with both values."""
    theirs, words = ELSEWHERE[name]
    found = rendezvous.objection(_hello("consumer"), theirs)
    assert re.search(words, found), found


def test_nothing_in_the_way() -> None:
    """Two ends of one user on one host; and a maxsize counts that is the smaller of the two."""
    assert rendezvous.objection(_hello("consumer"), _hello("producer")) == ""
    for one, other in ((CAPACITY, 1 << 20), (1 << 20, CAPACITY)):
        assert rendezvous.objection(_hello("consumer", one), _hello("producer", other)) == ""
    for one, other in ((CAPACITY + 1, 1 << 20), (1 << 20, CAPACITY + 1)):
        far = rendezvous.objection(_hello("consumer", one), _hello("producer", other))
        assert far == f"a maxsize of {CAPACITY + 1} is more than {CAPACITY}"


# -- what is opened


@pytest.fixture
def queue() -> Iterator[rendezvous.PairQueue]:
    """One that this process offers."""
    made = rendezvous.make(3)
    yield made
    forget_offered_queues()
    vars(made).clear()


def _try_to_reach(offer: Any, maxsize: int = 3, who: Any = HERE) -> str:
    """As another process would: not what this one has anyway."""
    with pytest.raises(SharedMemoryError) as raised:
        reach_anew(who, offer, maxsize)
    return str(raised.value)


def test_what_was_offered_is_opened_by_another_process(queue: rendezvous.PairQueue) -> None:
    """Another process opens an offered queue and gets the message put here. All credits of the queue are back then."""
    queue.put(Bytes(b"here"), b"m")
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        said = b"it could not"
        try:
            there = rendezvous.reach(HERE, queue.offer, 3)
            said = bytes(there.get(0).payload)
        finally:
            os.write(writer, said)
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == b"here"
    os.waitpid(pid, 0)
    assert queue.credits is not None
    assert queue.credits.unread() == 3


class Bytes:
    """Bytes as a payload."""

    def __init__(self, content: bytes) -> None:
        self.content, self.nbytes = content, len(content)

    def write_into(self, place: memoryview) -> None:
        """Write them."""
        place[:] = self.content


@pytest.mark.parametrize("what", ["segment", "tickets", "credits"])
def test_a_descriptor_that_is_another_by_now_is_not_taken(queue: rendezvous.PairQueue, what: str) -> None:
    """Numbers are used again: the inode must be that of the offer, and the kind of file too."""
    fd, inode = getattr(queue.offer, what)
    before = sorted(os.listdir("/proc/self/fd"))
    with open("/dev/null", "rb") as other:
        for wrong in ((fd, inode + 1), (other.fileno(), os.fstat(other.fileno()).st_ino)):
            said = _try_to_reach(msgspec.structs.replace(queue.offer, **{what: wrong}))
            assert "is not what it offered" in said
    with pytest.raises(OSError):
        reach_anew(HERE, msgspec.structs.replace(queue.offer, **{what: (9999, inode)}), 3)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_process_that_is_another_by_now_is_not_opened(queue: rendezvous.PairQueue) -> None:
    """Process numbers are used again, too: the start time must be that of the binder."""
    assert "its number is another's" in _try_to_reach(queue.offer, who=msgspec.structs.replace(HERE, started=1.0))


def test_an_offer_of_our_own_by_another_process(queue: rendezvous.PairQueue) -> None:
    """A token is no proof: what this process made is only there for those who were offered it by this process."""
    assert rendezvous.reach(HERE, queue.offer, 3) is queue
    with pytest.raises(SharedMemoryError, match="its number is another's"):
        rendezvous.reach(msgspec.structs.replace(HERE, started=1.0), queue.offer, 3)


def test_who_is_about_to_claim_is_alone(queue: rendezvous.PairQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two who try at the same moment the lock decides; who got it too late sees that it was claimed."""
    assert not queue.is_deserted()
    byte, other = queue.record.block + 1, os.open(f"/proc/self/fd/{queue.offer.segment[0]}", os.O_RDWR)
    try:
        assert ofd_locks.lock(other, byte, 1)
        assert not queue.claim(3)
        ofd_locks.unlock(other, byte, 1)
        try_lock = queue.rows.try_lock

        def late(*arguments: int) -> bool:
            queue.words[queue.record.claimed] = 1
            return try_lock(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(queue.rows, "try_lock", late)
            assert not queue.claim(3)
        assert not ofd_locks.is_locked(other, byte)
        queue.words[queue.record.claimed] = 0
        assert queue.claim(3)
        assert ofd_locks.is_locked(other, byte)
    finally:
        os.close(other)


def test_what_an_end_of_a_process_has_no_other_end_of_it_takes(queue: rendezvous.PairQueue) -> None:
    """Two connectors of one process read the same file. The second is refused the queue, and takes nothing from the first."""

    def take_twice() -> str:
        mine = rendezvous.reach(HERE, queue.offer, 3)
        assert mine.claim(3)
        said = ""
        for _ in range(2):
            try:
                rendezvous.reach(HERE, queue.offer, 3)
            except SharedMemoryError as failed:
                said = str(failed)
        assert queue.number in mine.attachment.queues
        mine.put(Bytes(b"mine"), b"m")
        lock = os.open(f"/proc/{os.getppid()}/fd/{queue.offer.segment[0]}", os.O_RDWR)
        return f"{said}, {ofd_locks.is_locked(lock, queue.record.block + 1)}"

    assert told_by_child(take_twice).endswith("another end of this process has it, True")
    assert bytes(queue.get(0).payload) == b"mine"


def test_a_queue_that_only_this_process_has_is_not_destroyed_before_it_lets_go(queue: rendezvous.PairQueue) -> None:
    """It is kept by the lock that says that the process lives; also where that process itself asks whether it is anybody's."""
    attachment, record = queue.attachment, queue.record
    attachment.orphans.destroy_all()
    assert not attachment.orphans.destroy(queue.number)
    assert record.exists()
    queue.close()
    assert not record.exists()
    assert attachment.orphans.destroy(queue.number)


@pytest.mark.parametrize(("said", "maxsize"), [(2, 2), (3, 3), (4, 3), (1 << 40, 3)])
def test_a_binder_believes_no_larger_maxsize(queue: rendezvous.PairQueue, said: int, maxsize: int) -> None:
    """The connector says in the queue's record what it has left of it; that can only be less."""
    rendezvous.QueueRecord(queue.arena, queue.number).narrow(said)
    queue.accept()
    assert queue.maxsize == maxsize


@pytest.mark.parametrize("which", ["tickets", "credits"])
def test_pipes_that_are_too_small(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has used up his share gets pipes of a page: such a queue is not offered, and nothing is left of it."""
    create = rendezvous.PairQueue.create

    def small(*arguments: Any) -> Any:
        made = create(*arguments)
        getattr(made, which).spills = True
        return made

    monkeypatch.setattr(rendezvous.PairQueue, "create", small)
    with pytest.raises(SharedMemoryError, match="fs.pipe-user-pages-soft"):
        rendezvous.make(3)


def test_a_queue_that_is_not_the_one_agreed_on_is_not_taken(queue: rendezvous.PairQueue) -> None:
    """Another maxsize, another number, or one that is gone."""
    assert "maxsize 3 was offered, 4" in told_by_child(lambda: rendezvous.reach(HERE, queue.offer, 4))
    for number in (queue.number + (1 << 32), queue.number + 1, (1 << 56) - 1, 1 << 60, 1):
        wrong = msgspec.structs.replace(queue.offer, number=number)
        said = told_by_child(lambda wrong=wrong: rendezvous.reach(HERE, wrong, 3))
        assert "is gone" in said or "no queue's number" in said


# -- between ends


def _doctor_says(binder: Any) -> list[str]:
    """Return the doctor's findings on each attached end."""
    texts = [str(found.text) for found in [*attached.findings(binder.endpoint)][1:]]
    return [re.sub(r"^pid \d+ on [^ :]+( \(.*\))?: ", "", text) for text in texts]


def _talk(consumer: tp.Consumer, raw: RawEnd, theirs: Hello) -> Hello:
    raw.say(hello("producer", identity=theirs.identity, shared_memory=theirs.shared_memory))
    raw.until_answered(consumer)
    return hello_of(raw.hear_of(Kind.WELCOME))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_who_cannot_share_uses_frames_and_says_why(name: str) -> None:
    """WELCOME says the reason; statistics say it, and frames go through."""
    theirs, words = ELSEWHERE[name]
    with tp.Consumer("frames") as consumer, RawEnd(consumer.endpoint) as raw:
        terms = _talk(consumer, raw, theirs).shared_memory
        assert terms is not None
        assert terms.attached == 0
        raw.say(*exchange.sent("in frames"))
        assert consumer.get(PATIENCE) == "in frames"
        said = consumer.statistics().transport
        assert said == f"frames over ipc: {terms.why_not}"
        assert re.search(words, said)
        assert _doctor_says(consumer) == [said]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_who_requires_it_refuses_those_who_cannot(name: str) -> None:
    """REFUSED names the condition, and the binder counts it."""
    theirs, words = ELSEWHERE[name]
    with tp.Consumer("required", shared_memory="require") as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", identity=theirs.identity, shared_memory=theirs.shared_memory))
        while not consumer.statistics().rejected:
            with pytest.raises(tp.Empty):
                consumer.get(0.1)
        reason = refusal_of(raw.hear_header())
        assert reason.startswith("the consumer requires shared memory, but ")
        assert re.search(words, reason)
        assert consumer.statistics().rejected == 1


def _claimed(endpoint: str) -> SharedMemoryTerms:
    """Claim a queue by the rendezvous file. Return the terms that the connector then says."""
    found = rendezvous_file.read(parse(endpoint))
    assert found is not None
    offer = found.offers[0]
    assert rendezvous.reach(HERE, offer, offer.maxsize).claim(offer.maxsize)
    return SharedMemoryTerms("auto", os.geteuid(), attached=offer.token)


def test_a_queue_is_given_once() -> None:
    """A HELLO that is repeated gets the same answer again, and what was given stays; the descriptors do not become more."""
    with tp.Consumer("offers") as consumer, RawEnd(consumer.endpoint) as raw:
        first = _talk(consumer, raw, _hello("producer")).shared_memory
        assert first is not None
        assert (first.attached, first.why_not) == (0, "")
        claimed = _claimed("offers")
        found = first
        while found == first:  # WELCOME is repeated, too
            found = _talk(consumer, raw, _hello("producer", terms=claimed)).shared_memory or first
        assert found.attached == claimed.attached
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            assert _talk(consumer, raw, _hello("producer", terms=claimed)).shared_memory == found
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_connector_that_cannot_have_one_says_so() -> None:
    """Its reason is repeated, and frames are used."""
    with tp.Consumer("offers") as consumer, RawEnd(consumer.endpoint) as raw:
        refusing = SharedMemoryTerms("auto", os.geteuid(), why_not="no row left")
        said = _talk(consumer, raw, _hello("producer", terms=refusing)).shared_memory
        assert said is not None
        assert (said.attached, said.why_not) == (0, "no row left")
        raw.say(*exchange.sent("in frames"))
        assert consumer.get(PATIENCE) == "in frames"
        assert consumer.statistics().transport == "frames over ipc: no row left"


def test_a_connector_that_has_forgotten_gets_a_new_queue() -> None:
    """Its connection was gone for a while: the old queue is of no use to it. Both sides count from there."""
    with tp.Consumer("offers") as consumer, RawEnd(consumer.endpoint) as raw:
        first = _claimed("offers")
        said = _talk(consumer, raw, _hello("producer", terms=first)).shared_memory
        assert said is not None
        assert said.attached == first.attached
        before = len(os.listdir("/proc/self/fd"))
        second = _claimed("offers")
        while said.attached == first.attached:  # WELCOME is repeated, too
            said = _talk(consumer, raw, _hello("producer", terms=second)).shared_memory
            assert said is not None
        assert said.attached == second.attached != first.attached
        assert len(consumer.statistics().peers) == 1
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("producer_binds", [False, True])
def test_a_binder_that_cannot_make_a_queue(monkeypatch: pytest.MonkeyPatch, producer_binds: bool) -> None:
    """Out of memory, descriptors or pipes, it says so, and frames are used."""

    def fail(*arguments: Any) -> Any:
        raise SharedMemoryError(24, "no descriptor is left")

    monkeypatch.setattr(rendezvous, "make", fail)
    with (
        tp.Producer("making", bind=producer_binds) as producer,
        tp.Consumer("making", bind=not producer_binds) as consumer,
    ):
        putting = in_thread(lambda: producer.put("arrives", PATIENCE))
        assert consumer.get(PATIENCE) == "arrives"
        putting()
        for end in (producer, consumer):
            assert end.statistics().transport == "frames over ipc: no descriptor is left"
        assert _doctor_says(consumer) == ["frames over ipc: no descriptor is left"]


@pytest.mark.parametrize("wish", ["auto", "require"])
def test_a_system_without_memfd(monkeypatch: pytest.MonkeyPatch, wish: Any) -> None:
    """Frames, and both ends say why; whoever requires shared memory is refused with that."""
    monkeypatch.delattr(os, "memfd_create")
    words = "this system has no memfd_create (it is Linux's)"
    with tp.Consumer("without") as consumer, tp.Producer("without", shared_memory=wish, linger=0) as producer:
        putting = in_thread(lambda: producer.put("arrives", PATIENCE))
        if wish == "auto":
            assert consumer.get(PATIENCE) == "arrives"
            putting()
            assert {end.statistics().transport for end in (producer, consumer)} == {f"frames over ipc: {words}"}
        else:
            with pytest.raises(tp.Empty):
                consumer.get(0.5)
            with pytest.raises(
                tp.Refused, match="the producer requires shared memory, but this system has no memfd_create"
            ):
                putting()


@pytest.mark.parametrize("producer_binds", [False, True])
@pytest.mark.parametrize("wish", ["auto", "require"])
def test_a_connector_that_cannot_attach(monkeypatch: pytest.MonkeyPatch, wish: Any, producer_binds: bool) -> None:
    """It says so, and frames are used; or it is refused, where that is required."""

    def fail(*arguments: Any) -> Any:
        raise SharedMemoryError(13, "no permission")

    monkeypatch.setattr(rendezvous, "reach", fail)
    with (
        tp.Producer("attaching", bind=producer_binds, shared_memory=wish, linger=0) as producer,
        tp.Consumer("attaching", bind=not producer_binds) as consumer,
    ):
        putting = in_thread(lambda: producer.put("arrives", PATIENCE if wish == "auto" else 0.5))
        if wish == "auto":
            assert consumer.get(PATIENCE) == "arrives"
            putting()
            for end in (producer, consumer):
                assert end.statistics().transport == "frames over ipc: no permission"
            assert _doctor_says(consumer) == ["frames over ipc: no permission"]
        elif producer_binds:
            with pytest.raises(tp.Refused, match="the producer requires shared memory, but no permission"):
                consumer.get(PATIENCE)
            with pytest.raises(tp.Full):
                putting()
        else:
            with pytest.raises(tp.Empty):
                consumer.get(1)
            with pytest.raises(tp.Refused, match="the producer requires shared memory, but no permission"):
                putting()


def test_a_binder_that_dies_before_it_is_reached_has_refused_nobody() -> None:
    """A binder that dies before the connector reaches it counts as lost, and not as a refusal to share memory.

    Its offer is gone with it; the connector may share memory with the next binder.
    """
    with Child() as child:
        dead = child.call(children.own_identity)
        child.kill()
    with RawEnd("tcp://127.0.0.1:*", bind=True) as raw:
        with tp.Consumer(raw.endpoint, bind=False, shared_memory="require") as consumer:
            getting = in_thread(lambda: consumer.get(PATIENCE))
            raw.hear_of(Kind.HELLO)
            dying = {"identity": dead, "end": 7 | 1 << 63, "folder": conversation_of(consumer).folder}
            raw.say(hello("producer", Kind.WELCOME, shared_memory=TERMS, **dying))
            with pytest.raises(tp.PeerLost, match=f"pid {dead.pid} "):
                getting()


def test_a_file_that_is_not_there_is_believed_to_be_missing_at_the_second_look() -> None:
    """Its binder may just be closing, which is no refusal; one that lives on says WELCOME again, and means it."""
    welcome = hello("producer", Kind.WELCOME, shared_memory=TERMS, end=77)
    with RawEnd("tcp://127.0.0.1:*", bind=True) as raw:
        with tp.Consumer(raw.endpoint, bind=False, shared_memory="require") as consumer:
            getting = in_thread(lambda: consumer.get(PATIENCE))
            raw.hear_of(Kind.HELLO)
            raw.say(welcome)
            again = hello_of(raw.hear_of(Kind.HELLO)).shared_memory
            assert again is not None
            assert (again.attached, again.why_not) == (0, "")
            raw.say(welcome)
            with pytest.raises(
                tp.Refused, match="the consumer requires shared memory, but the binder's rendezvous file"
            ):
                getting()


@pytest.mark.parametrize("producer_binds", [False, True])
@pytest.mark.parametrize("endpoint", ["ipc", "tcp"])
def test_ends_with_two_runtime_folders_use_frames_and_say_why(
    endpoint: str, producer_binds: bool, tmp_path: Path
) -> None:
    """Shared memory is found through a file in the user's runtime folder, and by nothing that the other end says."""
    where = f"ipc://{tmp_path}/apart" if endpoint == "ipc" else "tcp://127.0.0.1:0"
    bound = (tp.Producer if producer_binds else tp.Consumer)(where, bind=True)
    with bound, Child() as child:
        child.call(children.set_environment, "XDG_RUNTIME_DIR", str(tmp_path))
        if producer_binds:
            child.call(children.open_consumer, bound.endpoint, bind=False)
            putting = in_thread(lambda: bound.put("in frames", PATIENCE))
            assert child.call(children.take) == ["in frames"]
            putting()
            theirs = child.call(children.consumer_statistics)
        else:
            child.call(children.open_producer, bound.endpoint)
            child.begin(children.put, "in frames")
            assert bound.get(PATIENCE) == "in frames"
            child.result()
            theirs = child.call(children.producer_statistics)
        words = (
            f"frames over {endpoint}: the binder's rendezvous file is not to be seen in {tmp_path}/tensorpipe_ipc here"
        )
        assert theirs.transport == bound.statistics().transport == words


@pytest.mark.parametrize("which", ["producer", "consumer"])
def test_one_side_is_enough_to_want_none(which: str) -> None:
    """Both then say whose wish it was."""
    wishes: Any = {which: "off"}
    with (
        tp.Consumer("wishes", shared_memory=wishes.get("consumer", "auto")) as consumer,
        tp.Producer("wishes", shared_memory=wishes.get("producer", "auto")) as producer,
    ):
        putting = in_thread(lambda: producer.put(1, PATIENCE))
        assert consumer.get(PATIENCE) == 1
        putting()
        said = {end.statistics().transport for end in (producer, consumer)}
        assert said == {
            "frames over ipc: shared memory is off here",
            f"frames over ipc: it is off at the {which}",
        }
        assert _doctor_says(consumer)[0] in said


def test_it_is_found_over_tcp_and_between_processes() -> None:
    """Required, over loopback: it is there."""
    with (
        Child() as child,
        tp.Consumer("tcp://127.0.0.1:0", shared_memory="require") as consumer,
    ):
        child.call(children.open_producer, consumer.endpoint, shared_memory="require")
        child.begin(children.put_batches, 2)
        for step in range(2):
            zoo.same(children.batch(step), consumer.get(PATIENCE))
        child.result()
        assert consumer.statistics().transport == "shared memory"
        assert child.call(children.producer_statistics).transport == "shared memory"


def test_which_way_it_was_is_told_when_all_have_left() -> None:
    """Also where nobody asked while they were there."""
    with tp.Consumer("left") as consumer:
        with tp.Producer("left") as producer:
            putting = in_thread(lambda: producer.put(1, PATIENCE))
            assert consumer.get(PATIENCE) == 1
            putting()
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        assert consumer.statistics().transport == "shared memory"


def test_options() -> None:
    """An invalid ``shared_memory`` is an error that names the three values.

    An inproc end has frames, and so refuses "require".
    """
    for end in (tp.Producer, tp.Consumer):
        with pytest.raises(ValueError, match="shared_memory='never': give 'auto', 'off' or 'require'"):
            end("options", shared_memory="never")
        with pytest.raises(SharedMemoryError, match="inproc is within one process"):
            end("inproc://options", shared_memory="require")
    with tp.Consumer("inproc://x") as consumer:
        assert consumer.statistics().transport == "frames over inproc"


def test_local_and_remote_producers_mix() -> None:
    """One consumer, three producers, two of them in frames: each one's order holds, and the stream ends after the last."""
    with tp.Consumer("mixed", producers=3) as consumer, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Child()) for _ in range(3)]
        for name, child in enumerate(crowd):
            child.call(children.open_producer, "mixed", shared_memory="auto" if name == 0 else "off")
            child.begin(children.put_numbers_and_close, str(name), 400)
        got: dict[str, list[int]] = {str(name): [] for name in range(3)}
        for name, number in consumer:
            got[name].append(number)
        assert got == {str(name): list(range(400)) for name in range(3)}
        for child in crowd:
            child.result()


def test_local_and_remote_consumers_mix() -> None:
    """One producer, a consumer of each kind: both get some, and what is in flight is counted over both."""
    with Child() as near, Child() as far, tp.Producer("mixed", bind=True, maxsize=4) as producer:
        near.call(children.open_consumer, "mixed", bind=False)
        far.call(children.open_consumer, "mixed", bind=False, shared_memory="off")
        for child in (near, far):
            child.begin(children.take_all)
        wait_until(lambda: len(producer.statistics().peers) >= 2)
        for number in range(300):
            producer.put(number, PATIENCE)
            assert producer.statistics().in_flight <= 8
        assert producer.statistics().transport == "shared memory; frames over ipc: it is off at the consumer"
        producer.flush(PATIENCE)
        producer.close()
        shares = [child.result() for child in (near, far)]
        assert all(share and share == sorted(share) for share in shares)
        assert sorted(shares[0] + shares[1]) == list(range(300))


@pytest.mark.slow
@pytest.mark.parametrize("second", ["auto", "off"])
def test_no_producer_is_passed_over(second: Any) -> None:
    """While one puts without pause, the other's messages come, too, whichever way they take."""
    with tp.Consumer("fair") as consumer, Child() as one, Child() as two:
        for name, child in enumerate((one, two)):
            child.call(children.open_producer, "fair", shared_memory=second if name else "auto")
            child.begin(children.put_numbers, 0, 1, str(name))
            assert consumer.get(PATIENCE)[0] == str(name)
            child.result()
        for name, child in enumerate((one, two)):
            child.call(children.put_numbers, 1, 65, str(name))  # all that it may
            child.begin(children.put_numbers, 65, 2000, str(name))
        both = [consumer.get(PATIENCE)[0] for _ in range(1000)]
        assert min(both.count("0"), both.count("1")) > 64
        for _ in range(4000 - 2 - 1000):
            consumer.get(PATIENCE)
        for child in (one, two):
            child.result()
        assert consumer.statistics().lost == 0


# -- what lies in a block


def _pair() -> tuple[tp.Consumer, tp.Producer, rendezvous.PairQueue]:
    consumer, producer = tp.Consumer("blocks"), tp.Producer("blocks", linger=0)
    putting = in_thread(lambda: producer.put("met", PATIENCE))
    assert consumer.get(PATIENCE) == "met"
    putting()
    (peer,) = side_of(producer).peers.values()
    assert peer.queue is not None
    return consumer, producer, peer.queue


def _bad_blocks() -> dict[str, tuple[bytes, bytes, str]]:
    message = exchange.encoded(torch.ones(3))
    schema, payload = message.schema, bytes(message.payloads[0])
    pickle = exchange.encoded([b"cos\nsystem\n.", []])
    return {
        "a pickle": (metadata_of(PICKLED, pickle.schema, pickle.values), b"", "flags 0x1"),
        "by reference to nowhere": (metadata_of(BY_REFERENCE, schema, b""), payload, "0 bytes that say where"),
        "by reference beyond": (
            metadata_of(BY_REFERENCE, schema, b"\0\0\0\0\4" + bytes(7)),
            payload,
            "a frame of 12 bytes at 4",
        ),
        "nothing": (b"", b"", "metadata of 0 bytes"),
        "a schema cut short": (metadata_of(0, schema, b"")[:-5], payload, "left for it"),
        "no schema": (metadata_of(0, b"x" * 20, b""), payload, "schema"),
        "an unknown serializer": (metadata_of(0, schema.replace(b"\3raw", b"\3war"), b""), payload, "war"),
        "torch_save, by default": (
            metadata_of(0, schema.replace(b"\3raw", b"\x0atorch_save"), b""),
            payload,
            "torch_save' is not accepted here",
        ),
        "a payload too short": (metadata_of(0, schema, b""), payload[:-1], "payloads of 11 bytes"),
        "a payload too long": (metadata_of(0, schema, b""), payload + b"x", "payloads of 13 bytes"),
        "values that are none": (metadata_of(0, exchange.encoded([1, "x"]).schema, b"\xc1"), b"", "values"),
    }


BAD_BLOCKS = _bad_blocks()


@pytest.mark.parametrize("name", BAD_BLOCKS)
def test_a_block_that_holds_no_message(name: str) -> None:
    """It is taken, counted with its reason, and the next message comes."""
    metadata, payload, words = BAD_BLOCKS[name]
    consumer, producer, queue = _pair()
    with consumer, producer:
        queue.put(Bytes(payload), metadata)
        producer.put("next", PATIENCE)
        assert consumer.get(PATIENCE) == "next"
        assert consumer.statistics().rejected == 1
        assert words in consumer.statistics().last_rejection
        assert producer.statistics().in_flight == 0
        del queue


@pytest.mark.parametrize("ticket", [1 << 63, 5 << 32 | 1, (1 << 64) - 1, 3 << 43 | 1 << 32])
def test_a_ticket_that_names_no_block(ticket: int) -> None:
    """Its producer is let go: nothing of its queue can be believed. The consumer goes on with others."""
    consumer, producer, queue = _pair()
    with consumer, producer:
        os.write(queue.tickets.fd, ticket.to_bytes(8, "little"))
        with pytest.raises(tp.PeerLost, match="it broke the rules of the queue"):
            consumer.get(PATIENCE)
        assert consumer.statistics().rejected >= 1
        assert "(from producer " in consumer.statistics().last_rejection
        with Child() as child:
            child.call(children.open_producer, "blocks")
            child.begin(children.put, "from another")
            assert consumer.get(PATIENCE) == "from another"
            child.result()
        del queue


@pytest.mark.parametrize(
    ("places", "fits"),
    [
        pytest.param((64, 8, 128, 384), True, id="payload up to the end"),
        pytest.param((64, 8, 128, 385), False, id="payload beyond the end"),
        pytest.param((504, 8, 64, 8), True, id="metadata up to the end"),
        pytest.param((504, 9, 64, 8), False, id="metadata beyond the end"),
        pytest.param((63, 8, 128, 8), False, id="metadata in the header"),
        pytest.param((64, 8, 63, 8), False, id="payload in the header"),
        pytest.param((64, 8, 1 << 63, 8), False, id="payload far away"),
        pytest.param((1 << 63, 8, 64, 8), False, id="metadata far away"),
    ],
)
def test_places_in_a_block_have_two_sides(
    queue: rendezvous.PairQueue, places: tuple[int, int, int, int], fits: bool
) -> None:
    """The other end says where metadata and payload lie, and may say anything."""
    queue.put(Bytes(bytes(100)), b"m")
    (ticket,) = queue.tickets.snapshot() or ()
    word = queue.gets.word_of(ticket)
    at, length, payload_at, nbytes = places
    queue.words[word + 2], queue.words[word + 3] = nbytes, (FORWARDED | length) << 32
    queue.words[word + METADATA_AT], queue.words[word + PAYLOAD_AT] = at, payload_at
    if fits:
        message = queue.gets.open(word, Message)
        assert (len(message.metadata), len(message.payload)) == (length, nbytes)
    else:
        with pytest.raises(ProtocolError, match="in a block of 512"):
            queue.gets.open(word, Message)


def test_no_payload_is_larger_than_the_arena_may_be(queue: rendezvous.PairQueue) -> None:
    """A forged block size makes no consumer ask for that much memory. A payload above the capacity is an error."""
    queue.put(Bytes(bytes(600_000)), b"m")
    (ticket,) = queue.tickets.snapshot() or ()
    word = queue.gets.word_of(ticket)
    unit = ROWS_END // 8 + (word << 3) // UNIT
    queue.words[unit] |= 62 << 16
    queue.arena.words[segment.CAPACITY] = 4096
    queue.words[word + 2] = 4096
    assert len(queue.gets.open(word, Message).payload) == 4096
    queue.words[word + 2] = 4097
    with pytest.raises(ProtocolError, match="4097 of payload in a block of"):
        queue.gets.open(word, Message)


def test_tickets_have_two_sides(queue: rendezvous.PairQueue) -> None:
    """One names the first byte of a block, of a large one too, wherever that begins; and none behind the segment."""
    for nbytes in (100, 1 << 20, 3 << 20):
        queue.put(Bytes(bytes(nbytes)), b"m")
    small, large, another = queue.tickets.snapshot() or ()
    for ticket in (small, large, another):
        assert queue.gets.word_of(ticket) << 3 == ticket >> 32 << SMALLEST
    assert any((ticket >> 32 << SMALLEST) // UNIT % 4 for ticket in (large, another))
    table, last = ROWS_END // 8, queue.arena.segment.size // UNIT
    queue.words[table + last] = queue.words[table + (small >> 32 << SMALLEST) // UNIT]
    for wrong in (large + (1 << 32), large + (UNIT >> SMALLEST << 32), last * UNIT >> SMALLEST << 32):
        with pytest.raises(ProtocolError, match="where there is no block"):
            queue.gets.word_of(wrong)


def test_lengths_beyond_the_block() -> None:
    """They are seen before anything is read."""
    consumer, producer, queue = _pair()
    with consumer, producer:
        producer.put("will be spoilt", PATIENCE)
        ticket = next(iter(queue.tickets.snapshot() or ()))
        word = ticket >> 32 << 6
        forwarded = (FORWARDED | 8) << 32
        for index, value in ((2, 1 << 40), (3, 1 << 62), (3, forwarded), (3, forwarded | 1)):
            queue.words[word + 4], queue.words[word + 5] = (1 << 30, 64) if value == forwarded else (64, 1 << 30)
            before, queue.words[word + index] = queue.words[word + index], value
            with pytest.raises(ProtocolError, match="in a block of"):
                queue.gets.open(queue.gets.word_of(ticket), Message)
            queue.words[word + index] = before
        assert consumer.get(PATIENCE) == "will be spoilt"
        del queue


def _shared_memory() -> int:
    """Return the bytes of memory that this process's shared memory costs."""
    found = set[tuple[int, int]]()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:tensorpipe_ipc" in os.readlink(f"/proc/self/fd/{each}"):
                status = os.stat(f"/proc/self/fd/{each}")
                found.add((status.st_ino, status.st_blocks * 512))
    return sum(nbytes for _, nbytes in found)


@pytest.mark.slow
@pytest.mark.parametrize("has_left", [False, True], ids=["attached", "left"])
def test_memory_that_only_a_child_kept_comes_back_while_a_consumer_waits(has_left: bool) -> None:
    """Though no message comes any more, and whether its producer is still there or not."""
    go, gone = os.pipe()
    with tp.Consumer("kept", producers=None) as consumer, Child() as child:
        child.call(children.open_producer, "kept")
        child.begin(children.put_and_overwrite, (4 << 20,), 1, PATIENCE)
        got = consumer.get(PATIENCE)
        child.result()
        helper = in_child(lambda: os.read(go, 1))
        del got
        if has_left:
            child.call(children.close)
            wait_in_vain(consumer, lambda: not consumer.statistics().peers)
        assert _shared_memory() > 16 << 20
        os.write(gone, b"x")
        assert reap(helper) == 0
        wait_in_vain(consumer, lambda: _shared_memory() < 1 << 20)
    for each in (go, gone):
        os.close(each)
