"""The kernel's settings for connections that tensors leave by. Other connections stay as they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import in_thread

import tensorpipe_ipc as tp
from tensorpipe_ipc.zeromq.addresses import parse
from tensorpipe_ipc.zeromq.kernel_sockets import is_to_itself, prepare_for_bulk

pytestmark = pytest.mark.limit(20)
ADDRESS = parse("ipc:///path")


@contextlib.contextmanager
def _met(endpoint: str, producer_binds: bool) -> Iterator[str]:
    """A producer and a consumer that have met. Gives the endpoint."""
    with contextlib.ExitStack() as stack:
        if producer_binds:
            producer = stack.enter_context(tp.Producer(endpoint, bind=True, shared_memory="off"))
            consumer = stack.enter_context(tp.Consumer(producer.endpoint, bind=False))
        else:
            consumer = stack.enter_context(tp.Consumer(endpoint, shared_memory="off"))
            producer = stack.enter_context(tp.Producer(consumer.endpoint))
        putting = in_thread(lambda: producer.put(1))
        assert consumer.get() == 1
        putting()
        yield producer.endpoint


def _of_both_ends(end: Any, ask: Callable[[socket.socket], Any]) -> set[Any]:
    """Ask each socket of this process that has an address at either end. Return the answers."""
    answers = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(number)).st_mode):
                with socket.fromfd(int(number), socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    names = connection.getsockname(), connection.getpeername()
                    if end in names or end in [name[1] for name in names if isinstance(name, tuple)]:
                        answers.add(ask(connection))
    return answers


def _send_buffer(connection: socket.socket) -> int:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _congestion_control(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize("producer_binds", [True, False])
def test_over_ipc_the_sending_end_has_a_larger_buffer(producer_binds: bool, tmp_path: Path) -> None:
    """The other one has what the kernel gave it."""
    with _met(f"ipc://{tmp_path}/socket", producer_binds):
        small, large = sorted(_of_both_ends(f"{tmp_path}/socket", _send_buffer))
        assert large > small


@pytest.mark.parametrize("producer_binds", [True, False])
def test_over_tcp_the_sending_end_is_not_paced(producer_binds: bool) -> None:
    """It has reno, whatever the host's congestion control is."""
    with _met("tcp://127.0.0.1:0", producer_binds) as endpoint:
        host = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip().encode()
        assert _of_both_ends(int(endpoint.rpartition(":")[2]), _congestion_control) == {b"reno", host}


def test_a_number_that_is_something_else_by_now_is_left_alone(tmp_path: Path) -> None:
    """A closed descriptor, a file, a tcp socket, another unix socket: nothing is changed, and nothing raised."""
    closed = os.open(tmp_path, os.O_RDONLY)
    os.close(closed)
    prepare_for_bulk(closed, ADDRESS)
    with open(os.devnull) as file:
        prepare_for_bulk(file.fileno(), ADDRESS)
    one, other = socket.socketpair()
    with one, other, socket.socket() as tcp:
        before = [_send_buffer(each) for each in (one, tcp)]
        for each in (one, tcp):
            prepare_for_bulk(each.fileno(), ADDRESS)
        assert [_send_buffer(each) for each in (one, tcp)] == before


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_to_itself_is_told_and_leaves_its_address_free(family: int) -> None:
    """As two who call each other at the same moment; others are not taken for it, nor is what is no socket."""
    host = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
    with socket.socket(family) as alone, socket.create_server(("127.0.0.1", 0)) as server:
        alone.bind((host, 0))
        address = alone.getsockname()
        alone.connect(address)
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            assert [is_to_itself(each.fileno()) for each in (alone, one, other, server)] == [True, False, False, False]
    assert not is_to_itself(alone.fileno())
    with open("/dev/null", "rb") as file:
        assert not is_to_itself(file.fileno())
    with socket.socket(family) as again:
        again.bind(address)  # the kernel would keep it for a minute


def test_what_has_no_address_is_not_to_itself() -> None:
    """Both ends of a socketpair have the same name, none."""
    for each in socket.socketpair():
        with each:
            assert not is_to_itself(each.fileno())


def test_a_file_that_has_the_number_by_now_keeps_its_locks(tmp_path: Path) -> None:
    """The kernel takes a process's record locks when it closes any descriptor of the file, a duplicate too."""
    with (tmp_path / "locked").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert not is_to_itself(file.fileno())
        prepare_for_bulk(file.fileno(), ADDRESS)
        assert f":{os.fstat(file.fileno()).st_ino} " in Path("/proc/locks").read_text()
