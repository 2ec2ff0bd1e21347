"""The rendezvous file: what must hold for it to be believed, one test for each; and that nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import children
import containers
import msgspec
import pytest
from children import PATIENCE, Child, in_thread
from secured import binders, make_keys

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints import rendezvous_file
from tensorpipe_ipc.endpoints.rendezvous_file import LIMIT, Rendezvous, packed
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.wire.header import VERSION
from tensorpipe_ipc.zeromq.addresses import parse

pytestmark = pytest.mark.limit(20)
replace: Any = msgspec.structs.replace


def _address() -> Any:
    return parse("filed")


def _path() -> Path:
    return Path(rendezvous_file.path_of(_address()))


@pytest.fixture
def consumer() -> Iterator[tp.Consumer]:
    """One that has a file."""
    with tp.Consumer("filed") as consumer:
        yield consumer


def _rewritten(change: Callable[[Rendezvous], Rendezvous]) -> None:
    found = rendezvous_file.read(_address())
    assert found is not None
    _path().write_bytes(packed(change(found)))


def _of(**changes: Any) -> Callable[[Rendezvous], Rendezvous]:
    return lambda said: replace(said, hello=replace(said.hello, identity=replace(said.hello.identity, **changes)))


def _fields(*fields: Any) -> None:
    """Write its first fields anew."""
    data = _path().read_bytes()
    new = [
        old if field is None else field for field, old in zip(fields, struct.unpack("<4sIII", data[:16]), strict=True)
    ]
    _path().write_bytes(struct.pack("<4sIII", *new) + data[16:])


def _linked() -> None:
    os.rename(_path(), f"{_path()}.real")
    os.symlink(f"{_path()}.real", _path())


def _as_a_pipe() -> None:
    _path().unlink()
    os.mkfifo(_path(), 0o600)


DAMAGES: dict[str, Callable[[], Any]] = {
    "none": lambda: _path().unlink(),
    "empty": lambda: _path().write_bytes(b""),
    "too long": lambda: _path().write_bytes(_path().read_bytes() + bytes(LIMIT)),
    "cut short": lambda: _path().write_bytes(_path().read_bytes()[:-1]),
    "another magic": lambda: _fields(b"TPIX", None, None, None),
    "another version": lambda: _fields(None, 999, None, None),
    "another checksum": lambda: _fields(None, None, 5, None),
    "no HELLO": lambda: _path().write_bytes(_made_of({"place": (1, 2), "offers": []})),
    "a field too many": lambda: _path().write_bytes(_made_of({**_plain(), "more": 1})),
    "of another socket": lambda: _rewritten(lambda said: replace(said, place=(said.place[0], said.place[1] + 1))),
    "another address's": lambda: _rewritten(lambda said: replace(said, name=f"{'0' * 24}.rendezvous")),
    "of another device": lambda: _rewritten(lambda said: replace(said, place=(said.place[0] + 1, said.place[1]))),
    "of a process that ended": lambda: _rewritten(_of(pid=(1 << 22) + 5)),
    "of a process whose number is another's": lambda: _rewritten(_of(started=1.0)),
    "of another pid namespace": lambda: _rewritten(_of(namespace=7)),
    "of another boot": lambda: _rewritten(_of(boot="01234567-89ab-cdef-0123-456789abcdef")),
    "without a boot id": lambda: _rewritten(_of(boot="")),
    **{f"with mode {0o600 | 1 << bit:04o}": lambda bit=bit: _path().chmod(0o600 | 1 << bit) for bit in range(6)},
    **({} if os.geteuid() else {"another user's": lambda: os.chown(_path(), containers.NOBODY, containers.NOBODY)}),
    "a symbolic link": _linked,
    "a pipe": _as_a_pipe,
    **{
        f"in a folder with mode {0o700 | 1 << bit:04o}": lambda bit=bit: _path().parent.chmod(0o700 | 1 << bit)
        for bit in range(6)
    },
}


def _plain() -> Any:
    return msgspec.msgpack.decode(_path().read_bytes()[16:])


def _made_of(content: Any) -> bytes:
    text = msgspec.msgpack.encode(content)
    return struct.pack("<4sIII", b"TPIR", VERSION, zlib.crc32(text), len(text)) + text


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_breaks_a_rule_is_not_believed(name: str, consumer: tp.Consumer) -> None:
    """As it was written it is; changed in any of these ways it is as good as none."""
    assert rendezvous_file.read(_address()) is not None
    DAMAGES[name]()
    try:
        assert rendezvous_file.read(_address()) is None
    finally:
        _path().parent.chmod(0o700)
        consumer.close()
        for path in _path().parent.glob("*.rendezvous*"):
            path.unlink()


def test_a_file_copied_from_another_tcp_address_is_not_believed() -> None:
    """Both are of one process and one network namespace; the message goes to the one that it is for."""
    with tp.Consumer("tcp://127.0.0.1:0") as one, tp.Consumer("tcp://127.0.0.1:0") as other:
        paths = [Path(rendezvous_file.path_of(parse(each.endpoint))) for each in (one, other)]
        paths[0].write_bytes(paths[1].read_bytes())
        with Child() as child:
            child.call(children.open_producer, one.endpoint)
            putting = in_thread(lambda: child.call(children.put, "for one"))
            assert one.get(PATIENCE) == "for one"
            putting()
            child.call(children.close)


@pytest.mark.parametrize(("length", "believed"), [(LIMIT, True), (LIMIT + 1, False)])
def test_its_length_has_two_sides(length: int, believed: bool, consumer: tp.Consumer) -> None:
    """A reader accepts a rendezvous file with surplus bytes at its end, up to a limit."""
    found = rendezvous_file.read(_address())
    data = _path().read_bytes()
    _path().write_bytes(data + bytes(length - len(data)))
    assert rendezvous_file.read(_address()) == (found if believed else None)


def test_the_shortest_bytes() -> None:
    """A head is 16 bytes, and may promise nothing."""
    assert rendezvous_file.unpacked(_made_of(None)[:15]) is None
    assert rendezvous_file.unpacked(struct.pack("<4sIII", b"TPIR", VERSION, 0, 0)) is None


def test_a_folder_that_is_a_symbolic_link(consumer: tp.Consumer) -> None:
    """A reader ignores a folder that is a symbolic link, as its maker may lead it elsewhere."""
    folder = _path().parent
    folder.rename(f"{folder}.real")
    folder.symlink_to(f"{folder}.real")
    try:
        assert rendezvous_file.read(_address()) is None
    finally:
        folder.unlink()
        Path(f"{folder}.real").rename(folder)
    assert rendezvous_file.read(_address()) is not None


def test_a_folder_that_others_may_open_is_not_gone_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user who had made it could put any number of names there: 60,000 kept each new end for 5 s."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = _path().parent
    folder.mkdir()
    left = folder / f"left{_path().suffix}"
    left.touch(0o600)
    for mode, is_ours in ((0o755, False), (0o700, True)):
        folder.chmod(mode)
        with tp.Consumer("tcp://127.0.0.1:0"):
            assert left.exists() is not is_ours


def test_another_socket_at_its_address(consumer: tp.Consumer) -> None:
    """Or a symbolic link to the very one. The file is of the one that was there."""
    path = _address().path
    os.rename(path, f"{path}.real")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        assert rendezvous_file.read(_address()) is None
    os.unlink(path)
    os.symlink(f"{path}.real", path)
    assert rendezvous_file.read(_address()) is None
    os.rename(f"{path}.real", path)
    assert rendezvous_file.read(_address()) is not None


def test_who_cannot_see_others_sweeps_nothing(consumer: tp.Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc there is no boot id to compare with. Nor is anything swept that is no rendezvous file."""
    other = _path().parent / "empty.other"
    other.touch()
    monkeypatch.setattr(rendezvous_file, "identity", lambda: replace(identity(), boot=""))
    rendezvous_file.sweep()
    assert _path().exists()
    assert other.exists()
    other.unlink()


def test_one_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none then, not even an empty one, and the end works."""
    write, refused = os.pwrite, []

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        if data[:4] == b"TPIR":
            refused.append(data)
            raise OSError(28, "no space left")
        return write(descriptor, data, offset)

    with tp.Consumer("filed"):
        found = rendezvous_file.read(_address())
        assert found is not None
        monkeypatch.setattr(os, "pwrite", fail)
        with contextlib.closing(rendezvous_file.RendezvousFile(_address(), "")) as file:
            with pytest.raises(OSError, match="no space left"):
                file.open(found.hello)
    with tp.Consumer("filed") as consumer, tp.Producer("filed") as producer:
        assert len(refused) == 2
        assert not os.path.lexists(_path())
        putting = in_thread(lambda: producer.put("greeted", PATIENCE))
        assert consumer.get(PATIENCE) == "greeted"
        putting()


def test_without_a_file_the_two_greet_each_other(consumer: tp.Consumer) -> None:
    """A binder that answers lets in whoever found no file that is any good, and writes it anew."""
    DAMAGES["another checksum"]()
    with tp.Producer("filed") as producer:
        with pytest.raises(tp.Full, match="no consumer has come"):
            producer.put("early", 0.2)
        putting = in_thread(lambda: producer.put("greeted", PATIENCE))
        assert consumer.get(PATIENCE) == "greeted"
        putting()
        assert producer.statistics().transport == "shared memory"


def test_what_is_planted_is_not_written_to(tmp_path: Path) -> None:
    """A symbolic link at its place is replaced, and what it leads to stays as it was."""
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    _path().parent.mkdir(mode=0o700, exist_ok=True)
    _path().symlink_to(precious)
    with tp.Consumer("filed"):
        assert stat.S_ISREG(_path().lstat().st_mode)
        assert rendezvous_file.read(_address()) is not None
    assert precious.read_text() == "as it was"
    assert not os.path.lexists(_path())


def test_what_cannot_be_replaced_is_left_alone() -> None:
    """A folder, say. The end has no file then, and works."""
    _path().mkdir()
    try:
        with tp.Consumer("filed") as consumer, tp.Producer("filed") as producer:
            assert rendezvous_file.read(_address()) is None
            putting = in_thread(lambda: producer.put("greeted", PATIENCE))
            assert consumer.get(PATIENCE) == "greeted"
            putting()
    finally:
        _path().rmdir()


def test_another_file_at_its_place_is_not_taken_away() -> None:
    """An end that closes removes its own, and no other."""
    with tp.Consumer("filed"):
        _path().unlink()
        _path().write_text("another's")
    assert _path().read_text() == "another's"
    _path().unlink()


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_it_is_private_whatever_the_umask(umask: int) -> None:
    """0600 in a folder of 0700; and sticky, so that a cleaner of old files leaves it."""
    before = os.umask(umask)
    try:
        with tp.Producer("filed", bind=True):
            modes = [stat.S_IMODE(path.stat().st_mode) for path in (_path(), _path().parent)]
            assert modes == [0o1600, 0o700]
            assert rendezvous_file.read(_address()) is not None
    finally:
        os.umask(before)
    assert not os.path.lexists(_path())


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "filed"])
def test_that_of_a_killed_binder_is_swept_by_the_next_one(endpoint: str) -> None:
    """By whichever end binds next: another name will do. A live owner's stays, and so does what cannot be read."""
    strange, empty = _path().parent / "strange.rendezvous", _path().parent / "empty.rendezvous"
    with Child() as child, tp.Consumer("another") as consumer:
        address = parse(child.call(children.open_consumer, endpoint))
        left = Path(rendezvous_file.path_of(address))
        assert rendezvous_file.read(address) is not None
        strange.write_bytes(b"TPIR of a version to come")
        empty.touch()  # who makes one writes into it before others look
        with tp.Consumer("third"):
            assert not empty.exists()
            assert left.exists()
        child.kill()
        assert rendezvous_file.read(address) is None
        assert left.exists()
        with tp.Consumer("third"):
            assert not left.exists()
            assert strange.exists()
            assert rendezvous_file.read(parse(consumer.endpoint)) is not None
    strange.unlink()
    Path(address.path or "/nowhere").unlink(missing_ok=True)


def test_that_of_an_earlier_boot_is_swept(consumer: tp.Consumer) -> None:
    """Its process is none of this kernel's, and of this host's."""
    _rewritten(_of(boot="01234567-89ab-cdef-0123-456789abcdef"))
    with tp.Consumer("another"):
        assert not _path().exists()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"host": "far", "boot": "01234567-89ab-cdef-0123-456789abcdef"}, id="another host"),
        pytest.param(
            {"host": "far", "boot": "01234567-89ab-cdef-0123-456789abcdef", "pid": (1 << 22) + 5}, id="and pid"
        ),
        pytest.param({"namespace": 7, "pid": (1 << 22) + 5}, id="another pid namespace"),
    ],
)
def test_that_of_a_process_that_cannot_be_seen_is_not_swept(changes: Any, consumer: tp.Consumer) -> None:
    """A folder may be shared between hosts or containers, and who cannot be seen may live."""
    _rewritten(_of(**changes))
    with tp.Consumer("another"):
        assert _path().exists()


@pytest.mark.parametrize("role", [tp.Consumer, tp.Producer])
def test_who_has_one(role: Any, tmp_path: Path) -> None:
    """Ends that bind and may share memory, by whatever address others know; no connector."""
    folder = make_keys(tmp_path / "keys")

    def files() -> int:
        return len([*_path().parent.glob("*.rendezvous")])

    for options in (
        {"shared_memory": "off"},
        {"endpoint": "inproc://x"},
        {"bind": False},
    ):
        with role(**{"endpoint": "filed", "bind": True, **options}):
            assert files() == 0
    for endpoint in ("filed", f"ipc://{tmp_path}/x", "tcp://127.0.0.1:*", "tcp://[::1]:*", "keys"):
        with role(endpoint, bind=True, security=binders(folder) if endpoint == "keys" else None) as end:
            assert files() == 1
            assert rendezvous_file.read(parse(end.endpoint)) is not None
        assert files() == 0


def test_it_is_of_one_network_namespace() -> None:
    """A port of another one is another port."""
    with tp.Consumer("tcp://127.0.0.1:*") as consumer:
        address = parse(consumer.endpoint)
        assert rendezvous_file.read(address) is not None
        if containers.HAS_NETWORKS:
            assert containers.run_there(containers.APART, lambda: _nothing(address)) == 0


def _nothing(address: Any) -> None:
    assert rendezvous_file.read(address) is None
