"""``tensorpipe-ipc doctor``: what it says of the machine and of an endpoint is so, and its exit status tells."""

from __future__ import annotations

import ast
import io
import os
import resource
import signal
import socket
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import containers
import msgspec
import pytest
from children import PATIENCE, Child, in_thread
from programs import ran_in_fork
from raw_ends import RawEnd, hello, wait_in_vain
from secured import binders, connectors, make_keys

import tensorpipe_ipc as tp
from tensorpipe_ipc import cli
from tensorpipe_ipc.cli.doctor import attached, machine
from tensorpipe_ipc.cli.doctor.finding import Finding, State
from tensorpipe_ipc.endpoints.published_status import Attached, PublishedStatus, framed, published_statuses, read_status
from tensorpipe_ipc.process import identity

pytestmark = pytest.mark.limit(30)


def _in_child(action: Callable[[], Any]) -> str:
    """Return, as text, the result of an action in a forked process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, repr(action()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        found = file.read().decode()
    os.waitpid(pid, 0)
    return found


def _of(endpoint: str) -> list[Finding]:
    return list(attached.findings(endpoint))


def test_on_this_machine_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    """Each thing has its line, none is wider than 80 columns, and the status is 0."""
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    named = [finding.what for finding in machine.findings()]
    assert named == [
        *(
            "system",
            "memfd",
            "seals",
            "/proc",
            "pipes",
            "compiled",
            "descriptors",
            "memory",
            "/dev/shm",
            "ZeroMQ",
            "CURVE",
        ),
        *("GPU", "page-locking"),
    ]
    said = [line.split() for line in lines]
    assert [words[0] for words in said if len(words) > 1 and words[1] in ("ok", "--", "NO")] == named


def test_as_a_program_it_says_who_is_attached(tmp_path: Path) -> None:
    """Another process, over the command line: the binder, its peers, the way between them; status 0."""
    with tp.Consumer("looked-at") as consumer, tp.Producer("looked-at") as producer:
        putting = in_thread(lambda: producer.put(1, PATIENCE))
        consumer.get(PATIENCE)
        putting()
        done = ran_in_fork("-m", "tensorpipe_ipc", "doctor", "looked-at", folder=tmp_path)
    assert (done.status, done.err) == (0, "")
    said = " ".join(done.out.rpartition("looked-at")[2].split())
    assert f"bound by ok a consumer, pid {os.getpid()} on " in said
    assert f"producer ok pid {os.getpid()} on " in said
    assert said.endswith(": shared memory")


def test_a_process_that_only_a_stranger_names_is_not_looked_at() -> None:
    """Any program that reaches a port may say any process id. No file of it in /proc is opened, and it is sent no signal."""

    def look() -> tuple[str, list[str]]:
        seen: list[str] = []
        sys.addaudithook(
            lambda event, said: seen.append(f"{event} {said[0]}") if event in ("open", "os.kill") else None
        )
        peer = _of(endpoint)[1]
        return peer.text, [each for each in seen if each in of_victim or each.startswith("os.kill")]

    with Child() as victim, tp.Consumer("tcp://127.0.0.1:0") as consumer, RawEnd(consumer.endpoint) as raw:
        endpoint, of_victim = (
            consumer.endpoint,
            [f"open /proc/{victim.pid}/{name}" for name in ("stat", "cmdline", "status")],
        )
        raw.say(hello("producer", identity=msgspec.structs.replace(identity(), pid=victim.pid)))
        wait_in_vain(consumer, lambda: consumer.statistics().peers)
        text, seen = ast.literal_eval(_in_child(look))
        assert text.startswith(f"pid {victim.pid} on ")
        assert "(" not in text.partition(": ")[0]
        assert seen == []


def test_nobody_has_the_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, and the address in full; a name that is none, and one within a process, are told so."""
    assert cli.main(["doctor", "nowhere"]) == 1
    assert "NO   nobody" in capsys.readouterr().out
    assert cli.main(["doctor", "ipc:///tmp/[/a]"]) == 1
    assert "ipc:///tmp/[/a]" in capsys.readouterr().out
    for wrong, words in (("a b", "write ipc:///path"), ("inproc://x", "within one process")):
        assert cli.main(["doctor", wrong]) == 1
        assert words in capsys.readouterr().err


def test_a_stopped_owner_is_told_of_all_the_same() -> None:
    """Nobody asks it: what there is to tell it has written down before."""
    with Child() as child, tp.Producer("stopped", linger=0) as producer:
        child.call(children.open_consumer, "stopped")
        child.begin(children.take)
        producer.put("met", PATIENCE)
        child.result()
        child.signal(signal.SIGSTOP)
        try:
            binder, peer = _of("stopped")
        finally:
            child.signal(signal.SIGCONT)
        assert binder.text.startswith(f"a consumer, pid {child.pid} on ")
        assert peer.text.startswith(f"pid {os.getpid()} on ")
        assert (binder.state, peer.state) == (State.OK, State.OK)


def test_who_waits_to_be_let_in() -> None:
    """A binder that is busy elsewhere lets nobody in; one that refuses says why."""
    with tp.Consumer("busy", accept=["numpy"]) as consumer, tp.Producer("busy", linger=0) as producer:
        with pytest.raises(tp.Full):
            producer.put(1, 0.1)
        waiting = _of("busy")[-1]
        assert (waiting.what, waiting.state) == ("  producer", State.NOTE)
        assert "has not let it in yet" in waiting.text
        with pytest.raises(tp.Empty):
            consumer.get(0.2)
        with pytest.raises(tp.Refused):
            producer.put(1, PATIENCE)
        refused = _of("busy")[-1]
        assert refused.state is State.NO
        assert "does not accept" in refused.text
    assert _of("busy")[0].state is State.NO


def test_a_binder_of_all_addresses_has_the_one_that_its_peer_names(tmp_path: Path) -> None:
    """Over tcp the two ends name the endpoint in different words; the peer's do as well."""
    keys = make_keys(tmp_path / "keys")
    with tp.Consumer("tcp://*:0", security=binders(keys)) as consumer:
        named = f"tcp://127.0.0.1:{consumer.endpoint.rpartition(':')[2]}"
        with tp.Producer(named, security=connectors(keys)) as producer:
            putting = in_thread(lambda: producer.put(1, PATIENCE))
            consumer.get(PATIENCE)
            putting()
            for each in (named, consumer.endpoint):
                assert [finding.what for finding in _of(each)] == ["bound by", "  producer"]
                assert _of(each)[1].text.endswith(": shared memory")


def test_a_connector_to_another_hosts_binder_of_the_same_port_is_none_of_this_ones(tmp_path: Path) -> None:
    """Each host of a chain may have the same port open to the one before, and a connector to the next one's."""
    keys = make_keys(tmp_path / "keys")
    with tp.Consumer("tcp://*:0", security=binders(keys)) as consumer:
        other = f"tcp://203.0.113.7:{consumer.endpoint.rpartition(':')[2]}"  # of an address that stands for examples
        with tp.Producer(other, security=connectors(keys), linger=0):
            assert [finding.what for finding in _of(consumer.endpoint)] == ["bound by", "attached"]
            assert [(each.what, each.state) for each in _of(other)] == [
                ("bound by", State.NO),
                ("  producer", State.NOTE),
            ]


def _of_connector(status: PublishedStatus, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Return what is found where nobody but a connector is seen."""
    with monkeypatch.context() as alone:
        alone.setattr(attached, "published_statuses", lambda: iter([status]))
        return _of(status.endpoint)


def test_a_binder_that_is_not_seen_from_here_is_told_of_by_its_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another user's; or on another host, where messages go in frames, as is well. Of none that is gone."""
    with tp.Consumer("tcp://127.0.0.1:0", shared_memory="off") as consumer:
        with tp.Producer(consumer.endpoint, linger=0) as producer:
            putting = in_thread(lambda: producer.put(1, PATIENCE))
            consumer.get(PATIENCE)
            putting()
            statuses = [each for each in published_statuses() if each.endpoint == consumer.endpoint]
            (status,) = [each for each in statuses if not each.binds]
            assert _of_connector(status, monkeypatch)[0].state is State.OK
            consumer.close()
            assert _of_connector(status, monkeypatch)[0].state is State.NO
            for host, dead, found in (
                ("127.0.0.1", True, State.NO),
                ("127.0.0.2", False, State.NO),
                ("127.0.0.1", False, State.OK),
            ):
                with socket.create_server((host, int(consumer.endpoint.rpartition(":")[2]))):
                    known = status.peers[0].identity
                    known = msgspec.structs.replace(known, started=known.started - dead)
                    there = msgspec.structs.replace(
                        status, peers=(msgspec.structs.replace(status.peers[0], identity=known),)
                    )
                    assert _of_connector(there, monkeypatch)[0].state is found
            away = msgspec.structs.replace(status.peers[0].identity, boot="another host's")
            status = msgspec.structs.replace(status, peers=(msgspec.structs.replace(status.peers[0], identity=away),))
            binder, connector = _of_connector(status, monkeypatch)
            assert (binder.what, binder.state, connector.state) == ("bound by", State.OK, State.NOTE)
            assert binder.text.startswith(f"a consumer, pid {os.getpid()} on ")
            assert "waits" not in connector.text
            assert "frames" in connector.text


def test_another_program_that_listens_at_a_name_of_this_host_is_not_called_nobody() -> None:
    """The kernel says its number, and the endpoint the name."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        (found,) = _of(f"tcp://{socket.gethostname()}:{other.getsockname()[1]}")
        assert found.state is State.NO
        assert "which is no end of ours" in found.text


def test_who_left_is_not_told_of_any_more() -> None:
    """Nor are the copies of a status that forked children have."""
    with tp.Consumer("left") as consumer:
        with tp.Producer("left") as producer:
            putting = in_thread(lambda: producer.put(1, PATIENCE))
            consumer.get(PATIENCE)
            putting()
            assert "2 ends" in _in_child(
                lambda: f"{len([each for each in published_statuses() if 'left' in each.endpoint])} ends"
            )
        with pytest.raises(tp.EndOfStream):
            consumer.get(PATIENCE)
        assert [finding.text for finding in _of("left")][1:] == ["nobody"]


def test_an_owner_that_is_none_of_ours(tmp_path: Path) -> None:
    """A socket somebody else listens at is not called nobody's."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        (found,) = _of(f"ipc://{tmp_path}/s")
        assert found.text.startswith(f"pid {os.getpid()}, which is no end of ours")
        assert found.state is State.NO
    os.unlink(tmp_path / "s")


@pytest.mark.parametrize(
    ("more", "found"),
    [
        pytest.param(lambda text, rest: text + b" " * rest, True, id="8 MiB"),
        pytest.param(lambda text, rest: text + b" " * (rest + 1), False, id="more than 8 MiB"),
        pytest.param(lambda text, rest: text[:-1], False, id="cut short"),
        pytest.param(lambda text, rest: text.replace(b"consumer", b"consumes"), True, id="other words"),
        pytest.param(lambda text, rest: text.replace(b'"role"', b'"roles"'), False, id="another field"),
        pytest.param(lambda text, rest: text.replace(b"consumer", b"c\xff"), False, id="no text"),
        pytest.param(lambda text, rest: b"", False, id="nothing"),
    ],
)
def test_what_a_published_status_may_be(more: Any, found: bool) -> None:
    """A reader passes over anything that is not a published status, as anybody may have written it. It reads at most 8 MiB."""
    said = framed(PublishedStatus("ipc:///x", "consumer", True, identity()))[8:]
    text = more(said, (8 << 20) - len(said))
    data = struct.pack("<II", zlib.crc32(text), len(text)) + text
    assert (read_status(io.BytesIO(data)) is not None) == found
    assert read_status(io.BytesIO(struct.pack("<II", zlib.crc32(text) ^ 1, len(text)) + text)) is None
    assert read_status(io.BytesIO(data[:7])) is None


def test_a_published_status_of_a_thousand_strangers_is_read() -> None:
    """Each may say as much of itself as HELLO takes, in letters that take twice their room in the file."""
    said = Attached("producer", msgspec.structs.replace(identity(), host='"' * 255), '"' * 600, wanted=False)
    status = PublishedStatus("tcp://127.0.0.1:1", "consumer", True, identity(), (said,) * 1024)
    assert read_status(io.BytesIO(framed(status))) == status


def test_what_a_published_status_says_moves_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Root is told of other users' ends, too, and they write what they like: escapes come out as question marks."""
    escape = "\x1b]0;owned\x07\x1b[2J\u202e"
    who = msgspec.structs.replace(identity(), host=f"host{escape}")
    other = msgspec.structs.replace(who, started=0.0)
    peer = Attached(f"producer{escape}", other, f"frames: {escape}", wanted=True)
    address = "tcp://127.0.0.1:9"
    for number, more in enumerate([{"peers": (peer,)}, {"binds": False, "refusal": escape}]):
        status = PublishedStatus(
            **{"endpoint": address, "role": f"consumer{escape}", "binds": True, "identity": who, **more}
        )
        (tmp_path / f"{number}.end").write_bytes(framed(status))
    with open(tmp_path / "0.end", "rb"), open(tmp_path / "1.end", "rb"):
        assert cli.main(["doctor", address]) == 1
    said = capsys.readouterr().out
    assert "".join(said.split()).count("onhost?]0;owned??[2J?") == 3
    assert said.replace("\n", "").isprintable()


def test_ends_without_a_safe_runtime_folder_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor finds two ends although the runtime folder is unsafe. Neither end publishes its status there."""
    folder = tmp_path / "tensorpipe_ipc"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with tp.Consumer("tcp://127.0.0.1:0") as consumer, tp.Producer(consumer.endpoint) as producer:
        putting = in_thread(lambda: producer.put(1, PATIENCE))
        assert consumer.get(PATIENCE) == 1
        putting()
        assert [finding.what for finding in _of(consumer.endpoint)] == ["bound by", "  producer"]
        assert os.listdir(folder) == []


def test_what_lies_under_the_name_of_a_published_status_is_not_waited_for(tmp_path: Path) -> None:
    """A fifo that a program has open by such a name keeps nobody; what ends tell lies in files."""
    os.mkfifo(tmp_path / "x.end")
    fifo = os.open(tmp_path / "x.end", os.O_RDWR)
    try:
        with tp.Consumer("one") as consumer:
            assert [status.role for status in published_statuses() if status.endpoint == consumer.endpoint] == [
                "consumer"
            ]
    finally:
        os.close(fifo)


def test_without_memfd_the_machine_has_no_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are marked."""
    monkeypatch.delattr(os, "memfd_create")
    assert [each.what for each in machine.findings() if each.state is State.NO][:2] == ["memfd", "seals"]


@pytest.mark.parametrize("way", [way for way in containers.WAYS if way == "no /proc"])
def test_without_proc(way: str) -> None:
    """Only what does not work is marked."""

    def look() -> None:
        found = {each.what for each in machine.findings() if each.state is State.NO}
        assert found == {"/proc", "pipes"}, found

    assert containers.run_there(way, look) == 0


def test_few_descriptors() -> None:
    """A low limit is pointed out, and none at all is in the way."""

    def look(more: int) -> list[str]:
        soft = len(os.listdir("/proc/self/fd")) + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return [f"{each.what} {each.state.value}" for each in machine.findings() if each.what != "system"]

    assert "'descriptors --'" in _in_child(lambda: look(20))
    assert "'memfd NO'" in _in_child(lambda: look(-1))
