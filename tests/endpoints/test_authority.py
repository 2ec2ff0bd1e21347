"""The sources of authority. No end opens, writes to, signals or waits for anything that was named over a socket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import children
import containers
import exchange
import msgspec
import pytest
import zmq
from children import PATIENCE, Child, in_thread, wait_until
from inside import conversation_of, take_in_at_most
from programs import InFork
from raw_ends import RawEnd, RawLine, hello, hello_of, map_with, refusal_of, wait_in_vain
from secured import binders, connectors, make_keys

import tensorpipe_ipc as tp
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.security import PUBLIC, SECRET
from tensorpipe_ipc.wire.header import Kind, SharedMemoryTerms, pack, pack_control
from tensorpipe_ipc.zeromq import address_claim, connector
from tensorpipe_ipc.zeromq.addresses import parse, runtime_folder
from tensorpipe_ipc.zeromq.curve import read_keys

pytestmark = pytest.mark.limit(20)
LOOPBACK = "tcp://127.0.0.1:0"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes two users, and so root")
_seen: list[str] | None = None  # what is opened, while somebody listens


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event in ("open", "os.kill", "signal.pthread_kill", "os.listdir", "os.mkfifo"):
        _seen.append(f"{event} {arguments[0]}")


sys.addaudithook(_hear)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A program of this user's that does what comes through a pipe."""
    with subprocess.Popen(["sh"], stdin=subprocess.PIPE) as process:
        yield process


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """Yield the list of all that this process opens and signals."""
    global _seen
    _seen = []
    yield _seen
    _seen = None


def _named(role: str, victim: subprocess.Popen[bytes], kind: int = Kind.HELLO) -> list[bytes]:
    """HELLOs that name the victim's pipe in every way there is, or once was."""
    assert victim.stdin is not None
    inode = os.fstat(victim.stdin.fileno()).st_ino
    who: Any = msgspec.structs.replace(identity(), pid=victim.pid)
    whole = msgspec.to_builtins(SharedMemoryTerms("auto", 0))
    offer = {
        "token": 5,
        "number": 1,
        "maxsize": 64,
        "segment": (0, inode),
        "tickets": (0, inode),
        "credits": (0, inode),
    }
    plain = hello(role, kind, identity=who, end=5)
    return [
        map_with(plain, credit_pipe=(0, inode, 0x0A736C)),  # "ls" and a line feed
        map_with(plain, shared_memory={**whole, "offer": offer}),
        map_with(plain, shared_memory={**whole, "offer": offer, "attached": 5}),
        hello(role, kind, identity=who, end=5, shared_memory=SharedMemoryTerms("auto", 0, attached=5)),
        hello(role, kind, identity=who, end=6, shared_memory=SharedMemoryTerms("require", 0, attached=5, unknown=5)),
    ]


def _say_all(endpoint: str, role: str, hellos: list[bytes]) -> None:
    for frame in hellos:
        with RawEnd(endpoint) as raw:
            raw.say(frame)
            if role == "producer":
                raw.say(*exchange.sent("word"))


def _of_another_user(action: Callable[[], Any]) -> None:
    assert containers.run_there("another user", action) == 0


def _was_not_touched(victim: subprocess.Popen[bytes], seen: list[str]) -> None:
    """Nothing was looked at of it, no signal was sent to it, and nothing was written into its pipe: it would have ended."""
    assert not [each for each in seen if f"/proc/{victim.pid}" in each or each.startswith(("os.kill", "signal"))]
    assert victim.stdin is not None
    victim.stdin.write(b"exit 7\n")
    victim.stdin.close()
    assert victim.wait(PATIENCE) == 7


def _numbers_that_everybody_reads() -> list[int]:
    """The numbers of the bytes of the runtime folder that are locked: any user's program, in any container, reads them, too."""
    with open("/proc/locks", encoding="ascii") as lines:
        found = [line.split()[5:7] for line in lines if "->" not in line]
    inode = os.stat(runtime_folder()).st_ino
    return [int(number) for place, number in found if int(place.rpartition(":")[2]) == inode]


def _listen(consumer: tp.Consumer) -> None:
    with pytest.raises(tp.Empty):
        consumer.get(0.02)


def _claim_to_be(role: str, who: Any, folder: int, endpoint: str, hear: Callable[[], Any]) -> None:
    """Say HELLO, and goodbye, in the name of an end of which everything is known that is to be learnt outside.

    Args:
        hear: has the binder hear that.
    """
    numbers = _numbers_that_everybody_reads()
    assert len(numbers) == 2
    for number in numbers:
        with RawEnd(endpoint) as raw:
            raw.say(hello(role, identity=who, end=number, folder=folder, round=1000))
            for _ in range(10):  # of which nobody may be told anything
                hear()
                if not raw.is_quiet(0.01):
                    answer = raw.hear_header()
                    raw.say(pack(Kind.GOODBYE, hello_of(answer).sequence if answer.kind == Kind.WELCOME else 0))
                    break


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_a_producers_place_is_not_taken_by_what_everybody_may_read(shared_memory: str) -> None:
    """Process, start time and folder of an end are public, and so are the locks that tell that it is open."""
    with tp.Consumer(LOOPBACK, shared_memory=shared_memory) as consumer, Child() as child:
        child.call(children.open_producer, consumer.endpoint, shared_memory=shared_memory)
        putting = in_thread(lambda: child.call(children.put_numbers, 0, 1))
        assert consumer.get(PATIENCE) == ("", 0)
        putting()
        who, folder = child.call(children.own_identity), conversation_of(consumer).folder
        _claim_to_be("producer", who, folder, consumer.endpoint, lambda: _listen(consumer))
        with pytest.raises(tp.Empty):
            consumer.get(0.2)
        putting = in_thread(lambda: child.call(children.put_numbers, 1, 5))
        assert [consumer.get(PATIENCE) for _ in range(4)] == [("", number) for number in range(1, 5)]
        putting()
        child.call(children.close)
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_a_consumers_place_is_not_taken_by_what_everybody_may_read(shared_memory: str) -> None:
    """As for a producer's: what is put for it comes to it."""
    with tp.Producer(LOOPBACK, bind=True, shared_memory=shared_memory) as producer, Child() as child:
        child.call(children.open_consumer, producer.endpoint, bind=False, shared_memory=shared_memory)
        taking = in_thread(lambda: child.call(children.take, 1))
        producer.put(0, PATIENCE)
        assert taking() == [0]
        who, folder = child.call(children.own_identity), conversation_of(producer).folder
        _claim_to_be("consumer", who, folder, producer.endpoint, producer.statistics)
        wait_until(lambda: len(producer.statistics().peers) == 1)  # its goodbye is heard
        taking = in_thread(lambda: child.call(children.take, 4))
        for number in range(4):
            producer.put(number, PATIENCE)
        assert taking() == [*range(4)]


@needs_root
def test_a_stranger_names_a_consumers_descriptors(victim: subprocess.Popen[bytes], seen: list[str]) -> None:
    """Another user at an open port of loopback: what it names is not opened, and no descriptor is spent on it."""
    with tp.Consumer(LOOPBACK) as consumer:
        hellos = _named("producer", victim)
        before = len(os.listdir("/proc/self/fd"))
        seen.clear()
        _of_another_user(lambda: _say_all(consumer.endpoint, "producer", hellos))
        for _ in range(10):
            try:
                assert consumer.get(0.1) == "word"
            except (tp.Empty, tp.EndOfStream, tp.PeerLost):
                continue
        assert consumer.statistics().rejected >= 3
        assert len(os.listdir("/proc/self/fd")) <= before
        _was_not_touched(victim, seen)


@needs_root
def test_a_stranger_names_a_producers_descriptors(victim: subprocess.Popen[bytes], seen: list[str]) -> None:
    """The same towards a producer, which gives no word of what it puts to whom it shares no queue with."""
    with tp.Producer(LOOPBACK, bind=True, linger=0) as producer, RawEnd(producer.endpoint) as first:
        first.say(
            hello("producer")
        )  # is answered: with the first answer of all, pyzmq's thread begins, and has descriptors
        wait_until(lambda: _is_full(producer) and not first.is_quiet(0))
        hellos = _named("consumer", victim)
        before = len(os.listdir("/proc/self/fd"))
        seen.clear()
        _of_another_user(lambda: _say_all(producer.endpoint, "consumer", hellos))
        for _ in range(10):
            producer.statistics()
            assert _is_full(producer)
        assert producer.statistics().rejected >= 4
        assert len(os.listdir("/proc/self/fd")) <= before
        _was_not_touched(victim, seen)


def _is_full(producer: tp.Producer) -> bool:
    with pytest.raises(tp.Full):
        producer.put("word", 0.02)
    return True


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_binder_names_descriptors(role: str, victim: subprocess.Popen[bytes], seen: list[str]) -> None:
    """A WELCOME opens nothing either: its end has no rendezvous file here, and so the two use frames."""
    with RawEnd("tcp://127.0.0.1:*", bind=True) as raw:
        made = tp.Consumer if role == "producer" else tp.Producer
        with made(raw.endpoint, bind=False) as end:
            waiting = in_thread(lambda: end.get(3) if isinstance(end, tp.Consumer) else end.put("word", 3))
            raw.hear_of(Kind.HELLO)
            seen.clear()
            frames = _named(role, victim, Kind.WELCOME)
            for frame in (frames[4], *frames[:4], frames[3]):
                raw.say(frame)
            said = hello_of(raw.hear_of(Kind.HELLO))
            while not (said.shared_memory and said.shared_memory.why_not):
                said = hello_of(raw.hear_of(Kind.HELLO))
            assert "rendezvous file is not to be seen" in said.shared_memory.why_not
            if role == "producer":
                raw.say(*exchange.sent("word"))
                assert waiting() == "word"
            else:
                waiting()
                raw.hear_of(Kind.DATA)
                raw.say(pack(Kind.CREDIT, 1))
                end.flush(PATIENCE)
            _was_not_touched(victim, seen)
            os.kill(os.getpid(), signal.SIGCONT)  # the listener hears signals
            assert seen[-1].startswith("os.kill")


def test_a_squatter_leads_nobody_to_another_binder(seen: list[str]) -> None:
    """Somebody has the port that a producer connects to, and says WELCOME as another consumer of its user, whom it has met: the
    producer takes none of that one's memory, and that one gets nothing."""
    with tp.Consumer(LOOPBACK, producers=None) as other, RawEnd("tcp://127.0.0.1:*", bind=True) as squatter:
        with RawEnd(other.endpoint) as raw:
            raw.say(hello("producer", shared_memory=SharedMemoryTerms("auto", os.geteuid())))
            with pytest.raises(tp.Empty):
                other.get(0.1)
            welcome = raw.hear_of(Kind.WELCOME)
        with tp.Producer(squatter.endpoint, linger=0) as producer:
            putting = in_thread(lambda: producer.put("word", PATIENCE))
            squatter.hear_of(Kind.HELLO)
            seen.clear()
            said = ""
            while "not to be seen" not in said:
                squatter.say(pack_control(Kind.WELCOME, hello_of(welcome)))
                terms = hello_of(squatter.hear_of(Kind.HELLO)).shared_memory
                assert terms is not None
                assert not terms.attached
                said = terms.why_not
            putting()
            squatter.hear_of(Kind.DATA)
            squatter.say(pack(Kind.CREDIT, 1))
            producer.flush(PATIENCE)
            assert producer.statistics().transport.startswith("frames")
        assert not [each for each in seen if re.search("/proc/.*/fd", each)]
        with pytest.raises(tp.Empty):
            other.get(0.05)


@pytest.mark.parametrize("has_its_key", [False, True])
def test_a_binder_leads_only_to_ends_that_have_its_key(has_its_key: bool, tmp_path: Path) -> None:
    """A binder whose key a producer named says that it is another consumer. Only where that one has the same key, as one end
    at another address of its own would have, does the producer share its memory."""
    keys = make_keys(tmp_path / "keys")
    squatters = "binder" if has_its_key else "other"
    pair = read_keys(tp.Curve(keys / f"{squatters}{SECRET}", clients=[keys / f"friend{PUBLIC}"]), bind=True)
    other = tp.Consumer(LOOPBACK, security=binders(keys))
    with other, RawEnd("tcp://127.0.0.1:*", bind=True, keys=pair) as squatter:
        untaken = pytest.raises(tp.PeerLost, match="1 messages that were not taken") if has_its_key else nullcontext()
        with untaken, tp.Producer(squatter.endpoint, linger=0, security=connectors(keys, server=squatters)) as producer:
            putting = in_thread(lambda: producer.put("word", PATIENCE))
            squatter.hear_of(Kind.HELLO)
            terms = SharedMemoryTerms("auto", os.geteuid())
            welcome = hello("consumer", Kind.WELCOME, shared_memory=terms, end=conversation_of(other).end)
            said = None
            while said is None or not (said.attached or said.why_not):
                squatter.say(welcome)
                said = hello_of(squatter.hear_of(Kind.HELLO)).shared_memory
            assert bool(said.attached) == has_its_key
            if has_its_key:
                terms = SharedMemoryTerms("auto", os.geteuid(), attached=said.attached)
                squatter.say(hello("consumer", Kind.WELCOME, shared_memory=terms, end=conversation_of(other).end))
            else:
                assert "rendezvous file is not to be seen" in said.why_not
                squatter.hear_of(Kind.DATA)
                squatter.say(pack(Kind.CREDIT, 1))
            putting()


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_stranger_names_the_file_of_another_binder(role: str) -> None:
    """An end opens nothing for a stranger that repeats at one port what another port told it.

    The stranger does not seem present once it has gone.
    """
    made = tp.Consumer if role == "producer" else tp.Producer
    options: dict[str, Any] = {"bind": True, "peer_timeout": 0.2, **({"linger": 0} if role == "consumer" else {})}
    with tp.Consumer(LOOPBACK) as other, made(LOOPBACK, **options) as end:
        told = {"end": conversation_of(other).end, "folder": conversation_of(other).folder}

        def peers() -> str:
            with contextlib.suppress(tp.Empty, tp.Full, tp.PeerLost):
                end.get(0.02) if isinstance(end, tp.Consumer) else end.wait_for(9, 0.02)
            return str(end.statistics().peers)

        before = len([*_links_to("end")])
        with RawEnd(end.endpoint) as raw:
            raw.say(hello(role, **told))
            wait_until(lambda: "out of sight: it names an end that binds" in peers())
            assert len([*_links_to("end")]) == before
        wait_until(lambda: peers() == "()")


def test_two_connections_of_one_name_do_not_end_a_process() -> None:
    """Somebody connects twice by one name, says something by the first, and breaks it off: libzmq ended the process."""
    with Child() as child:
        endpoint = child.call(children.open_consumer, LOOPBACK, shared_memory="off")
        child.begin(children.take, 1)
        with RawLine(endpoint, b"same") as first:
            first.say(hello("producer"))
            with RawLine(endpoint, b"same") as second:
                second.say(hello("producer"))
                time.sleep(0.1)  # until the one name is the other's
                first.say(hello("producer"))
                time.sleep(0.1)
                first.reset()
                time.sleep(0.5)  # a heartbeat's
        with tp.Producer(endpoint, shared_memory="off") as producer:
            producer.put("lives", PATIENCE)
            assert child.result() == ["lives"]


def test_a_stranger_cannot_take_the_next_connections_number() -> None:
    """libzmq ends a process in which the next connection's number is another's name, and takes the first from C's rand."""
    with Child() as child, contextlib.ExitStack() as stack:
        first = child.call(children.seed_c, 1)
        endpoint = child.call(children.open_consumer, LOOPBACK, shared_memory="off")
        child.begin(children.take, 1)
        for number in range(first, first + 4):
            stack.enter_context(RawLine(endpoint, b"\0" + struct.pack(">I", number)))
        time.sleep(0.1)  # until the names are theirs
        with tp.Producer(endpoint, shared_memory="off") as producer:
            producer.put("lives", PATIENCE)
            assert child.result() == ["lives"]


def test_who_chooses_a_name_is_hung_up_on() -> None:
    """It may be of a megabyte, and is copied for each message of a few bytes. Who comes as all do is heard beside it."""
    with tp.Consumer(LOOPBACK, shared_memory="off") as consumer:
        with RawLine(consumer.endpoint, bytes(1 << 19)) as named, RawEnd(consumer.endpoint) as good:
            named.say(hello("producer"), *[b"anything"] * 100)
            good.say(hello("producer"))
            good.say(*exchange.sent("word"))
            assert consumer.get(PATIENCE) == "word"
            with pytest.raises(tp.Empty):
                consumer.get(0.1)
            assert named.is_hung_up_on()
        said = consumer.statistics()
        assert "chosen a name" in said.last_rejection
        assert len(said.peers) == 1


def test_names_that_strangers_choose_are_not_kept() -> None:
    """They may be as long as a message. Those who chose them were hung up on, and have gone."""
    with tp.Consumer(LOOPBACK, shared_memory="off") as consumer:
        tracemalloc.start()
        try:
            for number in range(20):
                with RawLine(consumer.endpoint, bytes([1 + number]) * (1 << 19)) as named:
                    named.say(b"anything")
                    wait_in_vain(consumer, lambda count=number: consumer.statistics().rejected > count)
                    assert named.is_hung_up_on()
            assert tracemalloc.get_traced_memory()[0] < 2 << 20
        finally:
            tracemalloc.stop()


# -- ipc: whose socket it is


@pytest.fixture
def sticky() -> Iterator[Path]:
    """A folder like /tmp: everybody may put something there, and remove what is theirs."""
    with tempfile.TemporaryDirectory(prefix="tp-sticky-", dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def _listen_as_another(path: str, ready: str, done: str) -> None:
    """Bind there, answer HELLO with WELCOMEs of both roles, and say what came."""
    with RawEnd(f"ipc://{path}", bind=True) as raw:
        Path(path).chmod(0o666)
        Path(ready).touch()
        came = not raw.is_quiet(3)
        Path(done).write_text("something came" if came else "nothing came", encoding="ascii")


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_socket_that_another_user_put_there_gets_nothing(role: str, sticky: Path) -> None:
    """An end that waits for its binder says whose socket is at its address, and sends nothing by it; then it meets its own."""
    path, ready, done = (str(sticky / name) for name in ("socket", "ready", "done"))
    made = tp.Producer if role == "producer" else tp.Consumer
    with made(f"ipc://{path}", bind=False, **({"linger": 0} if role == "producer" else {})) as end:
        listening = in_thread(lambda: _of_another_user(lambda: _listen_as_another(path, ready, done)))
        wait_until(lambda: os.path.exists(ready))

        def said() -> str:
            with pytest.raises((tp.Full, tp.Empty)) as raised:
                end.put("secret", 0.1) if isinstance(end, tp.Producer) else end.get(0.1)
            return str(raised.value)

        wait_until(
            lambda: f"nothing was sent there: {path} is a socket of uid {containers.NOBODY}, not of uid 0" in said()
        )
        listening()
        assert Path(done).read_text(encoding="ascii") == "nothing came"
        with pytest.raises(tp.Refused, match=f"uid {containers.NOBODY}"):
            made(f"ipc://{path}", bind=False)
        os.unlink(path)
        other = (tp.Consumer if role == "producer" else tp.Producer)(f"ipc://{path}", bind=True)
        with other:
            producer, consumer = (end, other) if isinstance(end, tp.Producer) else (other, end)
            putting = in_thread(lambda: producer.put("word", PATIENCE))
            assert consumer.get(PATIENCE) == "word"
            putting()


def _take_the_place(folder: str, ready: str, done: str) -> None:
    """Make a folder anew that was removed, bind elsewhere, and give the socket the name that is looked for."""
    own = f"{folder}.own"
    os.mkdir(folder, 0o755)
    with RawEnd(f"ipc://{own}", bind=True) as raw:
        Path(own).chmod(0o666)
        os.rename(own, f"{folder}/socket")
        Path(ready).touch()
        came = not raw.is_quiet(2)
        Path(done).write_text("something came" if came else "nothing came", encoding="ascii")


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("looks", ["at the file", "at the connection"])
@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_folder_that_another_user_made_anew_leads_to_no_socket_of_his(
    role: str, looks: str, sticky: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was this user's alone when the end was opened, and then removed. He may put his socket there after a look."""
    said = f"{sticky}/folder .uid {containers.NOBODY}.* lets others put a socket"
    if looks == "at the connection":
        said = f"a socket of uid {containers.NOBODY}"
        monkeypatch.setattr(connector, "check_socket_file", os.path.exists)
        monkeypatch.setattr(connector, "check_chain", lambda folder: None)
    folder, ready, done = (str(sticky / name) for name in ("folder", "ready", "done"))
    os.mkdir(folder, 0o700)
    made = tp.Producer if role == "producer" else tp.Consumer
    with made(f"ipc://{folder}/socket", bind=False, **({"linger": 0} if role == "producer" else {})) as end:
        os.rmdir(folder)
        listening = in_thread(lambda: _of_another_user(lambda: _take_the_place(folder, ready, done)))
        wait_until(lambda: os.path.exists(ready))
        with pytest.raises((tp.Full, tp.Empty), match=f"nothing was sent there: .*{said}"):
            end.put("secret", 1) if isinstance(end, tp.Producer) else end.get(1)
        listening()
        assert Path(done).read_text(encoding="ascii") == "nothing came"


@needs_root
@pytest.mark.parametrize("depth", [1, 2])
def test_a_folder_that_another_user_made_anew_leads_to_no_other_end_of_ours(
    depth: int, sticky: Path, tmp_path: Path
) -> None:
    """He puts a link in its place, or within it, to a folder of this user's in which a socket has the same name."""
    tmp_path.chmod(0o700)
    folder = sticky.joinpath("folder", *["within"] * (depth - 1))
    folder.mkdir(0o700, parents=True)

    def put_link() -> None:
        folder.parent.mkdir(exist_ok=True)
        folder.symlink_to(tmp_path)

    with (
        tp.Consumer(f"ipc://{tmp_path}/socket") as consumer,
        tp.Producer(f"ipc://{folder}/socket", linger=0) as producer,
    ):
        shutil.rmtree(sticky / "folder")
        _of_another_user(put_link)
        putting = in_thread(lambda: _refused(producer))
        with pytest.raises(tp.Empty):
            consumer.get(1)
        putting()
        assert "lets others put a socket" in str(_full(producer))


def _full(producer: tp.Producer) -> tp.Full:
    with pytest.raises(tp.Full) as raised:
        producer.put("secret", 0)
    return raised.value


def test_a_link_at_an_address_is_not_followed(sticky: Path, tmp_path: Path) -> None:
    """Another user may put it there, and it may lead to where nobody answers, for which libzmq would wait."""
    with socket.socket(socket.AF_UNIX) as listener, tp.Producer(f"ipc://{sticky}/socket", linger=0) as producer:
        listener.bind(str(tmp_path / "elsewhere"))
        listener.listen()
        (sticky / "socket").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(tp.Full, match="nothing was sent there: .*socket exists and is no socket"):
            producer.put("secret", 0.5)
        assert not select.select([listener], [], [], 0)[0]
        os.unlink(tmp_path / "elsewhere")


def _feed_as_another(path: str, fed: str, done: str, *, stays: bool) -> None:
    """Bind there, and say all that a producer says to whoever comes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.IMMEDIATE, 1)
        raw.bind(f"ipc://{path}")
        Path(path).chmod(0o666)
        for frames in ([hello("producer", Kind.WELCOME)], exchange.sent("evil", sequence=2)):
            raw.send_multipart(frames)
        raw.poll(300)  # until it is with the other end
        if stays:
            Path(fed).touch()
            wait_until(lambda: os.path.exists(done))
        os.unlink(path)
        raw.close(linger=0)
    Path(fed).touch()


@needs_root
@pytest.mark.parametrize("stays", [True, False])
def test_what_another_user_says_in_the_place_of_a_binder_is_not_believed(
    stays: bool, sticky: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer computes, and its producer dies. Another user's socket is at the address when it comes round, or was there.

    It came there after the look at the file.
    """
    monkeypatch.setattr(connector, "check_socket_file", os.path.exists)
    path, fed, done = (str(sticky / name) for name in ("socket", "fed", "done"))
    with tp.Consumer(f"ipc://{path}", bind=False, producers=None) as consumer:
        for word in ("good", "better"):
            with RawEnd(f"ipc://{path}", bind=True) as raw:
                getting = in_thread(lambda: consumer.get(PATIENCE))
                raw.hear_of(Kind.HELLO)
                raw.say(hello("producer", Kind.WELCOME))
                raw.say(*exchange.sent(word))
                assert getting() == word
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if word == "good":
                feeding = in_thread(lambda: _of_another_user(partial(_feed_as_another, path, fed, done, stays=stays)))
                wait_in_vain(consumer, lambda: os.path.exists(fed))
                with pytest.raises(tp.Empty):
                    consumer.get(0.2)
                Path(done).touch()
                feeding()


@needs_root
def test_another_user_cannot_connect_even_where_the_file_lets_him(sticky: Path) -> None:
    """The binder asks the kernel who connects."""
    path = str(sticky / "socket")
    with tp.Consumer(f"ipc://{path}") as consumer:
        Path(path).chmod(0o666)
        _of_another_user(lambda: _say_all(f"ipc://{path}", "producer", [hello("producer")]))
        with pytest.raises(tp.Empty, match="no producer has come"):
            consumer.get(0.3)
        assert consumer.statistics().rejected == 0


@needs_root
@pytest.mark.parametrize("binds", ["as it is", "by a link"])
def test_ends_meet_in_a_shared_folder_though_they_spell_its_path_in_two_ways(binds: str, sticky: Path) -> None:
    """By a link above, which is this user's: both paths lead to one file."""
    (sticky / "outer").mkdir()
    (sticky / "outer" / "inner").mkdir()
    (sticky / "outer" / "inner").chmod(0o1777)
    (sticky / "link").symlink_to(sticky / "outer")
    paths = [f"ipc://{sticky}/outer/inner/socket", f"ipc://{sticky}/link/inner/socket"]
    if binds == "by a link":
        paths.reverse()
    with tp.Consumer(paths[0]) as consumer, tp.Producer(paths[1]) as producer:
        putting = in_thread(lambda: producer.put("crosses", PATIENCE))
        assert consumer.get(PATIENCE) == "crosses"
        putting()


@pytest.mark.parametrize("comes", ["before", "after the look at the file"])
def test_a_link_at_an_address_in_a_shared_folder_leads_to_no_other_end(
    comes: str, sticky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may put it there, while no binder is. It leads to a socket of this user's."""
    tmp_path.chmod(0o700)
    if comes != "before":
        monkeypatch.setattr(connector, "check_socket_file", os.path.exists)
    with (
        tp.Consumer(f"ipc://{tmp_path}/private") as consumer,
        tp.Producer(f"ipc://{sticky}/socket", linger=0) as producer,
    ):
        with pytest.raises(tp.Full):
            producer.put("secret", 0.2)
        (sticky / "socket").symlink_to(tmp_path / "private")
        putting = in_thread(lambda: _refused(producer))
        with pytest.raises(tp.Empty):
            consumer.get(1)
        putting()


def _refused(producer: tp.Producer) -> None:
    with pytest.raises((tp.Full, tp.Refused)):
        producer.put("secret", 1)


def test_another_users_lock_on_the_folder_is_no_matter(sticky: Path) -> None:
    """He may open the folder, and lock it for as long as he likes."""

    def keep() -> None:
        descriptor = os.open(sticky, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (sticky / "kept").touch()
        deadline = time.monotonic() + PATIENCE
        while not (sticky / "enough").exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    keeping = in_thread(lambda: _of_another_user(keep))
    wait_until((sticky / "kept").exists)
    began = time.monotonic()
    with tp.Consumer(f"ipc://{sticky}/socket"):
        pass
    assert time.monotonic() - began < 4
    (sticky / "enough").touch()
    keeping()


def test_a_stopped_process_of_ones_own_keeps_nobody_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bind is refused when it cannot have the lock, and says who has it."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(address_claim, "PATIENCE", 0.2)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(tp.Refused, match=f"pid {os.getpid()} keeps the lock"):
            tp.Consumer(f"ipc://{tmp_path}/socket")
    finally:
        os.close(descriptor)
    with tp.Consumer(f"ipc://{tmp_path}/socket"):
        pass


def test_threads_that_bind_leave_the_umask_as_it_was(tmp_path: Path) -> None:
    """Two folders, one process: what other threads make meanwhile has the mode that it should have."""
    before = os.umask(0o022)
    try:

        def bind_often(name: str) -> None:
            folder = tmp_path / name
            folder.mkdir(mode=0o700)
            for _ in range(20):
                with tp.Consumer(f"ipc://{folder}/socket", shared_memory="off"):
                    assert stat.S_IMODE((folder / "socket").stat().st_mode) == 0o600

        binding = [in_thread(partial(bind_often, name)) for name in ("one", "two")]
        for number in range(200):
            descriptor = os.open(tmp_path / f"file{number}", os.O_CREAT | os.O_WRONLY, 0o666)
            os.close(descriptor)
        for wait in binding:
            wait()
        assert {stat.S_IMODE((tmp_path / f"file{number}").stat().st_mode) for number in range(200)} == {0o644}
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


@pytest.mark.parametrize("endpoint", ["bare", "ipc", "tcp"])
def test_an_end_never_touches_the_umask(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the process's: what another thread makes at that moment would get another mode."""

    def touched(mask: int) -> int:
        raise AssertionError(f"the umask was {mask:o} for a moment")

    tmp_path.chmod(0o700)
    address = {"bare": "masked", "ipc": f"ipc://{tmp_path}/socket", "tcp": LOOPBACK}[endpoint]
    monkeypatch.setattr(os, "umask", touched)
    with tp.Consumer(address) as consumer, tp.Producer(consumer.endpoint) as producer:
        putting = in_thread(lambda: producer.put("word", PATIENCE))
        assert consumer.get(PATIENCE) == "word"
        putting()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("how", ["writable by others", "writable by its group", "another user's", "behind his link"])
def test_a_folder_above_that_others_can_replace(how: str, depth: int, tmp_path: Path) -> None:
    """The whole chain up to / counts: who can rename a folder on the way can put his own in its place."""
    if os.geteuid() and "another" in how or os.geteuid() and "his" in how:
        pytest.skip("takes two users, and so root")
    above, folder = tmp_path / "above", tmp_path.joinpath("above", *["between"] * depth, "mine")
    folder.mkdir(parents=True, mode=0o700)
    above.chmod({"writable by others": 0o707, "writable by its group": 0o770}.get(how, 0o700))
    if how == "another user's":
        os.chown(above, containers.NOBODY, containers.NOBODY)
    if how == "behind his link":
        (tmp_path / "link").symlink_to(above)
        os.chown(tmp_path / "link", containers.NOBODY, containers.NOBODY, follow_symlinks=False)
        folder = tmp_path.joinpath("link", *["between"] * depth, "mine")
    for bind in (True, False):
        with pytest.raises(tp.Refused, match="lets others put a socket into"):
            tp.Consumer(f"ipc://{folder}/socket", bind=bind)
    if os.path.isdir(above):
        above.chmod(0o1777 if how == "writable by others" else 0o755)
    if how.startswith("writable"):
        with tp.Consumer(f"ipc://{folder}/socket"):
            pass


def test_a_binder_whose_folder_is_gone_closes(tmp_path: Path) -> None:
    """Without an error, and with nothing left open."""
    folder = tmp_path / "gone"
    folder.mkdir(mode=0o700)
    consumer = tp.Consumer(f"ipc://{folder}/socket")
    shutil.rmtree(folder)
    consumer.close()


def test_a_binder_removes_no_socket_but_its_own(tmp_path: Path) -> None:
    """Another one may have its path by now."""
    path = tmp_path / "socket"
    tmp_path.chmod(0o700)
    with tp.Consumer(f"ipc://{path}"):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            inode = path.stat().st_ino
    assert path.stat().st_ino == inode
    path.unlink()


def test_sockets_of_killed_binders_are_swept_by_the_next_one() -> None:
    """By whoever binds next in the runtime folder, by any name; those of the living stay."""
    with Child() as child, Child() as living:
        paths = [
            parse(one.call(children.open_consumer, name)).path for one, name in ((child, "killed"), (living, "lives"))
        ]
        child.kill()
        assert all(map(os.path.exists, paths))
        with tp.Consumer("next"):
            assert list(map(os.path.exists, paths)) == [False, True]
        living.call(children.close)


# -- strangers who use up what there is


def test_connections_that_last_for_a_moment_do_not_shut_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the most peers, one makes room whose connection has ended, who is out of sight, and for whom nothing is kept."""
    take_in_at_most(3, monkeypatch)
    with tp.Consumer(LOOPBACK, shared_memory="off") as consumer:

        def listen(seconds: float) -> None:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                with contextlib.suppress(tp.Empty, tp.EndOfStream, tp.PeerLost):
                    consumer.get(0.05)

        for number in range(1, 13):
            with RawEnd(consumer.endpoint) as raw:
                raw.say(hello("producer", end=number, round=1, identity=identity()))
                listen(0.1)
        with Child() as child:
            child.call(children.open_producer, consumer.endpoint, shared_memory="off")
            child.begin(children.put, "let in")
            got: list[Any] = []
            while not got:
                with contextlib.suppress(tp.EndOfStream, tp.PeerLost):
                    got.append(consumer.get(PATIENCE))
            assert got == ["let in"]
            child.result()
            child.call(children.close)
        assert len(consumer.statistics().peers) <= 3


def test_who_says_that_it_is_the_binder_itself_costs_no_descriptor() -> None:
    """Its token is told to anybody who says HELLO. Whoever names it is refused."""
    with tp.Consumer(LOOPBACK, shared_memory="off") as consumer, contextlib.ExitStack() as stack:
        first = stack.enter_context(RawEnd(consumer.endpoint))
        first.say(hello("producer"))
        first.until_answered(consumer)
        welcome = hello_of(first.hear_of(Kind.WELCOME))
        assert welcome.end
        count = 10
        before = len([*_links_to("end")])
        for _ in range(count):
            raw = stack.enter_context(RawEnd(consumer.endpoint))
            raw.say(hello("producer", end=welcome.end, folder=welcome.folder))
        raw.until_answered(consumer)
        assert "it says that it is an end which is attached already, or this one" in refusal_of(raw.hear_header())
        assert len(consumer.statistics().peers) == 1
        assert len([*_links_to("end")]) == before


def _links_to(suffix: str) -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").endswith("." + suffix):
                yield name


_KEYED = """
import resource, socket, sys, time
import tensorpipe_ipc as tp
keys = sys.argv[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
security = tp.Curve(keys + "/binder.key_secret", clients=[keys + "/friend.key"])
with tp.Consumer("tcp://127.0.0.1:0", security=security) as consumer:
    print(consumer.endpoint, flush=True)
    for _ in range(5):
        try:
            consumer.get(0.1)
        except tp.Empty:
            pass
    print("still there", flush=True)
    print(consumer.get(15), flush=True)
"""


@pytest.mark.slow
def test_silent_connections_take_all_descriptors_and_get_says_empty(tmp_path: Path) -> None:
    """A binder with keys has none left for whoever comes: get waits, and raises nothing else. Later a friend gets in."""
    folder = make_keys(tmp_path)
    with (
        InFork("-c", _KEYED, str(folder), folder=tmp_path) as program,
        contextlib.ExitStack() as stack,
    ):
        endpoint = program.line().strip()
        address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        for _ in range(120):
            stranger = stack.enter_context(contextlib.closing(socket.socket()))
            stranger.connect(address)
        assert program.line() == "still there\n"
        with tp.Producer(endpoint, security=connectors(folder)) as producer:
            producer.put("word", PATIENCE)
            assert program.line() == "word\n"
            producer.flush(PATIENCE)
        assert program.end().status == 0


@pytest.mark.skipif(not containers.HAS_USER_NAMESPACES, reason="takes two users, and user namespaces")
@pytest.mark.parametrize("above", ["/tmp", "/var", "/"])
@pytest.mark.parametrize("way", ["itself", "one's own in it", "by a link of one's own"])
def test_in_a_user_namespace_a_folder_of_another_users_is_not_taken_for_roots(way: str, above: str) -> None:
    """Root's folders and others' look alike, as neither has a name. Its owner can rename what lies there."""
    with tempfile.TemporaryDirectory(dir=above) as others:
        os.chown(others, containers.NOBODY, containers.NOBODY)
        os.chmod(others, 0o1777)

        def act() -> None:
            with tempfile.TemporaryDirectory(dir="/tmp") as home:
                os.mkdir(f"{others}/mine")
                os.symlink(others, f"{home}/link")
                folder = {"itself": others, "one's own in it": f"{others}/mine"}.get(way, f"{home}/link/mine")
                with pytest.raises(tp.Refused, match="lets others put a socket"):
                    tp.Producer(f"ipc://{folder}/frames.sock", bind=False)
                os.symlink("../..", f"{home}/up")
                for way_home in (home, f"{home}/up{home}"):
                    with tp.Consumer(f"ipc://{way_home}/frames.sock"):
                        pass

        assert containers.run_there(containers.ALONE_IN_A_USER_NAMESPACE, act) == 0
