"""Endpoints as people write them: which are none, which are too long, which leave this host."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from children import PATIENCE, in_thread

from tensorpipe_ipc import Consumer, Producer, Refused
from tensorpipe_ipc.zeromq import addresses
from tensorpipe_ipc.zeromq.addresses import (
    PATH_LIMIT,
    Address,
    check_folder,
    check_socket_file,
    parse,
    runtime_folder,
)

LOOPBACK = {
    "tcp://127.0.0.1:5555": "tcp://127.0.0.1:5555",
    "tcp://127.0.0.1:0": "tcp://127.0.0.1:*",
    "tcp://127.0.0.1:00000": "tcp://127.0.0.1:*",
    "tcp://127.0.0.1:05555": "tcp://127.0.0.1:5555",
    "tcp://127.0.0.1:*": "tcp://127.0.0.1:*",
    "tcp://127.1.2.3:65535": "tcp://127.1.2.3:65535",
    "tcp://localhost:80": "tcp://127.0.0.1:80",
    "tcp://[::1]:5555": "tcp://[::1]:5555",
    "tcp://::1:5555": "tcp://[::1]:5555",
    "tcp://[::ffff:127.0.0.1]:5555": "tcp://[::ffff:127.0.0.1]:5555",
}
ELSEWHERE = [
    "*",
    "0.0.0.0",
    "0",
    "::",
    "[::]",
    "[::0]",
    "[0:0:0:0:0:0:0:0]",
    "[::ffff:0.0.0.0]",
    "[::ffff:10.0.0.1]",
    "[::ffff:192.168.0.1]",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.0.1",
    "8.8.8.8",
    "224.0.0.1",
    "255.255.255.255",
    "128.0.0.1",
    "126.255.255.255",
    "127.1",
    "127.0.0.256",
    "127.0.0.1.example.org",
    "0x7f.0.0.1",
    "2130706433",
    "[fe80::1]",
    "[fe80::1%eth0]",
    "[2001:db8::1]",
    "[::2]",
    "example.org",
    "localhost.localdomain",
    "LOCALHOST",
    "ip6-localhost",
    "eth0",
    "lo",
    "eth0;127.0.0.1",
    "127.0.0.1;10.0.0.1",
    " 127.0.0.1",
]
NONE = [
    "",
    "/tmp/socket",
    "a/b",
    ".hidden",
    "-dash",
    "two words",
    "name\n",
    "ünicode",
    "ipc://",
    "ipc://@abstract",
    "ipc://*",
    "ipc:///tmp/a\0b",
    "inproc://",
    "inproc://" + "n" * 256,
    "udp://127.0.0.1:1",
    "ws://127.0.0.1:1",
    "TCP://127.0.0.1:1",
    "tcp://",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:",
    "tcp://:5555",
    "tcp://127.0.0.1:65536",
    "tcp://127.0.0.1:-1",
    "tcp://127.0.0.1:+1",
    "tcp://127.0.0.1: 1",
    "tcp://127.0.0.1:http",
    "tcp://127.0.0.1:٣",
    "tcp:127.0.0.1:1",
    "tcp://[::1%lo]:0;[::]:1",
    "tcp://::1%lo;127.0.0.1:1",
    "tcp://[::ffff:127.0.0.1%lo]:0;[::]:1",
    "tcp://[::1%lo ]:1",
]


@pytest.mark.parametrize("endpoint", NONE, ids=ascii)
def test_no_endpoint(endpoint: str) -> None:
    """An invalid endpoint raises ValueError, which quotes it and shows how to write one."""
    with pytest.raises(ValueError, match="write (ipc|tcp)://") as error:
        parse(endpoint)
    assert repr(endpoint) in str(error.value)


@pytest.mark.parametrize("endpoint", [None, 5, b"frames", Path("frames")])
def test_an_endpoint_is_a_str(endpoint: Any) -> None:
    """Anything else is a TypeError with its type."""
    with pytest.raises(TypeError, match=f"is a {type(endpoint).__name__}, not a str"):
        parse(endpoint)


def test_a_bare_name_is_a_socket_of_the_runtime_folder() -> None:
    """``frames`` is frames.sock in this user's runtime folder."""
    path = os.path.join(runtime_folder(), "frames.sock")
    assert parse("frames") == Address("ipc", f"ipc://{path}", path)


def test_the_runtime_folder_without_a_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is XDG_RUNTIME_DIR's if that is a folder, otherwise this user's own in the temporary folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder() == f"{tmp_path}/tensorpipe_ipc"
    other = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")  # no UTF-8
    os.mkdir(other)
    for useless in ("", "relative", str(tmp_path / "missing"), other):
        monkeypatch.setenv("XDG_RUNTIME_DIR", useless)
        assert runtime_folder().endswith(f"/tensorpipe_ipc-{os.geteuid()}")


def test_a_path_that_is_no_utf8() -> None:
    """It is refused in words, as pyzmq takes none."""
    with pytest.raises(ValueError, match="is no UTF-8"):
        parse(os.fsdecode(b"ipc:///tmp/\xff"))


def test_where_no_temporary_folder_can_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bare name is refused, with what to do; over tcp frames come. The first that can be is taken."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, "relative")
    monkeypatch.setattr(addresses, "_TEMPORARY", ("/missing",))
    with pytest.raises(Refused, match="none of /missing may be written to; set XDG_RUNTIME_DIR, or TMPDIR"):
        Consumer("frames")
    with Consumer("tcp://127.0.0.1:0") as consumer, Producer(consumer.endpoint) as producer:
        putting = in_thread(lambda: producer.put(1, PATIENCE))
        assert consumer.get(PATIENCE) == 1
        putting()
        assert "none of /missing may be written to" in consumer.statistics().transport
    monkeypatch.setattr(addresses, "_TEMPORARY", ("/missing", str(tmp_path)))
    assert runtime_folder() == f"{tmp_path}/tensorpipe_ipc-{os.geteuid()}"


def test_ipc_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative path means what it means where the end is opened."""
    monkeypatch.chdir(tmp_path)
    assert parse("ipc://here/../socket").path == str(tmp_path / "socket")
    assert parse("ipc:///a//b/./c").path == "/a/b/c"


def test_the_length_of_an_ipc_path() -> None:
    """107 bytes are taken; one more is refused with the path, its length, the limit and what to do. Bytes, not letters."""
    assert parse("ipc:///" + "p" * (PATH_LIMIT - 1)).path
    for path in ("/" + "p" * PATH_LIMIT, "/" + "ü" * (PATH_LIMIT // 2 + 1)):
        with pytest.raises(ValueError, match=r"has \d+ bytes, the kernel's limit is 107: use a shorter one") as error:
            parse(f"ipc://{path}")
        assert path in str(error.value)
        assert f"has {len(path.encode())} bytes" in str(error.value)
    with pytest.raises(ValueError, match="the kernel's limit is 107"):
        parse("n" * PATH_LIMIT)


@pytest.mark.parametrize("endpoint", LOOPBACK)
def test_loopback_addresses(endpoint: str) -> None:
    """Every way to write this host's loopback is taken, and becomes a number: a name may mean something else tomorrow."""
    assert parse(endpoint) == Address("tcp", LOOPBACK[endpoint])


@pytest.mark.parametrize("host", ELSEWHERE)
def test_addresses_that_are_not_loopback(host: str) -> None:
    """Anything else is refused to whoever binds or connects, with a sentence that says why and what to do instead."""
    endpoint = f"tcp://{host}:5555"
    for end, bind in ((Producer, True), (Producer, False), (Consumer, True), (Consumer, False)):
        with pytest.raises(
            Refused,
            match=r"only with keys on both sides: make them with `tensorpipe-ipc keygen NAME` and give security=",
        ) as error:
            end(endpoint, bind=bind)
        assert str(error.value).startswith(endpoint)


def test_addresses_with_keys() -> None:
    """With keys, other hosts' addresses are taken, as they are; but not what libzmq would read as two."""
    for host in ("*", "0.0.0.0", "[::]", "10.0.0.1", "gpu-7.example.org", "eth0", "[fe80::1%eth0]", "[2001:db8::1]"):
        assert parse(f"tcp://{host}:5555", has_keys=True) == Address("tcp", f"tcp://{host}:5555", is_remote=True)
    assert not parse("tcp://localhost:5555", has_keys=True).is_remote
    for host in ("eth0;10.0.0.1", " 10.0.0.1", "a b", "a/b", "fe80::1%e/0"):
        with pytest.raises(ValueError, match="a host's name or number"):
            parse(f"tcp://{host}:5555", has_keys=True)
    with pytest.raises(ValueError, match="leave security out"):
        parse("inproc://name", has_keys=True)


@pytest.mark.parametrize("name", ["zeromq.zap.01", "tensorpipe_ipc.line-0"])
def test_names_of_the_libraries_are_refused(name: str) -> None:
    """An end by that of ZeroMQ's handler for keys would say who may come in; others met the library's own sockets."""
    for end in (Producer, Consumer):
        with pytest.raises(ValueError, match="the libraries' own"):
            end(f"inproc://{name}")


def test_an_end_by_any_other_name_is_in_nobodys_way() -> None:
    """Also one that sounds like the library's own: each connector over tcp has a socket within the process."""
    with contextlib.ExitStack() as stack:
        for name in ("line", "listening"):
            for number in range(3):
                stack.enter_context(Consumer(f"inproc://{name}-{number}"))
        consumer = stack.enter_context(Consumer("tcp://127.0.0.1:0"))
        producer = stack.enter_context(Producer(consumer.endpoint))
        putting = in_thread(lambda: producer.put(1, PATIENCE))
        assert consumer.get(PATIENCE) == 1
        putting()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:*"])
def test_nothing_listens_beyond_loopback(endpoint: str) -> None:
    """The kernel's own tables say that what is bound listens on loopback and nowhere else."""
    with Consumer(endpoint) as consumer:
        port = int(consumer.endpoint.rpartition(":")[2])
        listening = _listening(port)
        assert listening
        assert listening <= {_V4, _V4_MAPPED, _V6}
        with Producer(consumer.endpoint):
            assert _listening(port) == listening


_V4 = "0100007F"  # as /proc writes addresses: 32 bits at a time, backwards
_V4_MAPPED = "0000000000000000FFFF0000" + _V4
_V6 = "00000000000000000000000001000000"


def _listening(port: int) -> set[str]:
    """The local addresses at which this host listens on a port, in the kernel's hexadecimal."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            host, _, number = local.partition(":")
            if int(number, 16) == port and state == "0A":
                found.add(host)
    return found


# -- what lies where a socket is to be


def test_the_runtime_folder_is_made_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is made with mode 0700 where it is missing."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    check_folder(parse("frames").path)
    assert (tmp_path / "tensorpipe_ipc").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("bind", [True, False])
@pytest.mark.parametrize("end", [Consumer, Producer])
def test_a_folder_that_is_missing(tmp_path: Path, end: Any, bind: bool) -> None:
    """It is named, by either side, and not made: the path may be mistyped."""
    with pytest.raises(Refused, match=f"there is no folder {tmp_path}/a/b: make it"):
        end(f"ipc://{tmp_path}/a/b/socket", bind=bind)
    (tmp_path / "a").touch()
    with pytest.raises(Refused, match=f"there is no folder {tmp_path}/a/b: make it"):
        end(f"ipc://{tmp_path}/a/b/socket", bind=bind)
    (tmp_path / "a").unlink()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720, 0o702])
def test_a_folder_that_others_may_write_to(tmp_path: Path, mode: int) -> None:
    """It is refused with its mode, unless it is sticky, as /tmp is."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(Refused, match=f"mode {mode:04o}.* lets others put a socket there; use a folder of your own"):
        check_folder(str(folder / "socket"))
    folder.chmod(mode | 0o1000)
    check_folder(str(folder / "socket"))


def test_a_folder_of_another_user(tmp_path: Path) -> None:
    """It is refused: its owner could put anything there."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    os.chown(folder, 65534, 65534)
    with pytest.raises(Refused, match="uid 65534"):
        check_folder(str(folder / "socket"))


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    """A symbolic link, even to a good folder, and a file are refused."""
    (tmp_path / "good").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "good")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    (tmp_path / "file").touch()
    for name in ("link", "dangling", "file"):
        with pytest.raises(Refused, match=f"{name} is no folder of its own"):
            check_folder(str(tmp_path / name / "socket"))


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777, 0o1777])
def test_an_open_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int) -> None:
    """The runtime folder is this user's alone: any other mode than 0700 is refused, with what to do."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "tensorpipe_ipc").mkdir()
    (tmp_path / "tensorpipe_ipc").chmod(mode)
    with pytest.raises(
        Refused,
        match=f"with mode {mode:04o}; it must be yours .* with mode 0700: remove it, chmod 700, or set XDG_RUNTIME_DIR",
    ):
        Consumer("frames")
    with pytest.raises(Refused, match="must be yours"):
        Producer("frames", bind=True)


def test_a_runtime_folder_of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both ends refuse a runtime folder of another user, with both user ids. That user could listen there."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "tensorpipe_ipc").mkdir(mode=0o700)
    os.chown(tmp_path / "tensorpipe_ipc", 65534, 65534)
    with pytest.raises(Refused, match=r"belongs to uid 65534 with mode 0700; it must be yours \(uid"):
        Consumer("frames")
    with pytest.raises(Refused, match="belongs to uid 65534"):
        Producer("frames")  # nor is anything sent to what will be put there


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_no_runtime_folder_is_made_in_a_folder_of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That user could put a link in its place, and would have no folder of his own there."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(Refused, match="uid 65534"):
        Consumer("frames")
    assert not list(tmp_path.iterdir())


def test_what_is_no_socket_of_ours(tmp_path: Path) -> None:
    """A symbolic link and a file are refused as what they are; where there is nothing, there is no socket."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    for name in ("file", "link", "dangling"):
        with pytest.raises(Refused, match=f"{name} exists and is no socket"):
            check_socket_file(str(tmp_path / name))
        for end, bind in ((Consumer, True), (Consumer, False), (Producer, False)):
            with pytest.raises(Refused, match=f"{name} exists and is no socket"):
                end(f"ipc://{tmp_path / name}", bind=bind)
    assert not check_socket_file(str(tmp_path / "nothing"))


def test_a_runtime_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where it is on a disk that is mounted to be read only. It is refused, with what to do."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def mkdir(path: str, *_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(Refused, match="cannot be made: Read-only file system; set XDG_RUNTIME_DIR, or TMPDIR"):
        Consumer("frames")
    with Consumer("tcp://127.0.0.1:0"):
        pass


@pytest.mark.parametrize("binder", ["consumer", "producer"])
def test_a_connector_that_has_no_temporary_folder(binder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its binder has one, as where a service may write nowhere, and a program in a login session may: frames come."""
    with contextlib.ExitStack() as stack:
        opened: Any = stack.enter_context(
            Consumer("tcp://127.0.0.1:0") if binder == "consumer" else Producer("tcp://127.0.0.1:0", bind=True)
        )
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        for name in ("TMPDIR", "TEMP", "TMP"):
            monkeypatch.setenv(name, "relative")
        monkeypatch.setattr(addresses, "_TEMPORARY", ("/missing",))
        other: Any = stack.enter_context(
            Producer(opened.endpoint) if binder == "consumer" else Consumer(opened.endpoint, bind=False)
        )
        producer, consumer = (other, opened) if binder == "consumer" else (opened, other)
        putting = in_thread(lambda: producer.put(1, PATIENCE))
        assert consumer.get(PATIENCE) == 1
        putting()
        assert "this user's runtime folder, of which there is none here" in other.statistics().transport
        monkeypatch.undo()
