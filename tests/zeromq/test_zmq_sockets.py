"""Sockets: whose address it is, who may open it, and that nothing is left of it."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import children
import pytest
import zmq
from children import PATIENCE, Child, in_thread, wait_until

import tensorpipe_ipc as tp
from tensorpipe_ipc.zeromq import zmq_contexts
from tensorpipe_ipc.zeromq.addresses import parse, runtime_folder
from tensorpipe_ipc.zeromq.binder import Binder

pytestmark = pytest.mark.limit(20)
NOBODY = 65534


def _mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The user's umask."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_sockets_are_private_whatever_the_umask(umask: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The socket is 0600 in a runtime folder of 0700, and the user's umask is as it was."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with tp.Consumer("private"), tp.Producer("another", bind=True):
        assert _mode(runtime_folder()) == 0o700
        for name in ("private", "another"):
            assert _mode(f"{runtime_folder()}/{name}.sock") == 0o600
    assert os.umask(umask) == umask
    assert os.listdir(runtime_folder()) == []


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o000], indirect=True)  # it is all that would keep it private meanwhile
def test_a_socket_is_never_open_to_others(umask: int, tmp_path: Path) -> None:
    """Also in the moment between its making and its chmod: whoever looks all the time never sees it wider."""
    path, seen, done = tmp_path / "socket", set(), threading.Event()

    def look() -> None:
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.add(_mode(path))

    watching = in_thread(look)
    for _ in range(50):
        tp.Consumer(f"ipc://{path}").close()
    done.set()
    watching()
    assert {mode & 0o077 for mode in seen} <= {0}


_AS_NOBODY = """
import os, socket, sys
os.setgid(65534); os.setgroups([]); os.setuid(65534)
for path in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
            print("connected")
        except PermissionError:
            print("refused")
"""


def test_another_user_cannot_connect(umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another uid is refused by the kernel, in the runtime folder and in one that others may enter."""
    folder = Path("/tmp") / f"tp-open-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o755)
    try:
        with tp.Consumer("private") as one, tp.Consumer(f"ipc://{folder}/socket") as two:
            paths = [end.endpoint.removeprefix("ipc://") for end in (one, two)]
            said = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(_AS_NOBODY), *paths], capture_output=True, text=True, check=True
            )
            assert said.stdout.split() == ["refused", "refused"]
    finally:
        folder.rmdir()


def test_a_socket_of_another_user_is_not_connected_to(tmp_path: Path) -> None:
    """An end neither connects to a socket of another user, nor takes its place by a bind."""
    path = tmp_path / "theirs"
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        theirs.listen()
        os.chown(path, NOBODY, NOBODY)
        for end, bind in ((tp.Producer, False), (tp.Consumer, False), (tp.Producer, True), (tp.Consumer, True)):
            with pytest.raises(tp.Refused, match=f"is a socket of uid {NOBODY}, not of uid {os.geteuid()}"):
                end(f"ipc://{path}", bind=bind)
    path.unlink()


@pytest.mark.parametrize("theirs", ["of another process", "of this process"])
def test_a_live_owners_endpoint_is_not_stolen(theirs: str) -> None:
    """A second bind is refused and names the owner's pid; the owner works as before, and its socket stays."""
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(Child())
        if theirs == "of this process":
            taken = stack.enter_context(tp.Consumer("owned"))
            says = rf"a consumer of this very process \(pid {os.getpid()}\), made at {__file__}:\d+: close it, or use"
        else:
            child.call(children.open_consumer, "owned")
            says = f"pid {child.pid}, which is alive; close it or use"
        for end in (tp.Consumer, tp.Producer):
            with pytest.raises(tp.Refused, match=f"owned.sock belongs to {says}"):
                end("owned", bind=True)
        with tp.Producer("owned") as producer:
            if theirs == "of this process":
                putting = in_thread(lambda: producer.put("works", PATIENCE))
                assert taken.get(PATIENCE) == "works"
                putting()
            else:
                child.begin(children.take)
                producer.put("works", PATIENCE)
                assert child.result() == ["works"]


def test_a_stopped_owner_is_alive() -> None:
    """An owner that is stopped keeps its endpoint."""
    with Child() as child:
        child.call(children.open_consumer, "stopped")
        child.signal(signal.SIGSTOP)
        with pytest.raises(tp.Refused, match=f"belongs to pid {child.pid}"):
            tp.Consumer("stopped")
        child.signal(signal.SIGCONT)


def test_a_killed_owners_endpoint_is_taken_over() -> None:
    """A new end takes over the socket file of a killed owner."""
    with Child() as child:
        child.call(children.open_consumer, "left")
        child.kill()
    path = parse("left").path
    assert os.path.exists(path)
    with tp.Consumer("left"):
        assert os.path.exists(path)
    assert not os.path.exists(path)


def test_a_killed_owners_endpoint_is_taken_over_from_its_fork() -> None:
    """A child forked from the owner holds the listening socket after the owner's death; it is not the owner."""
    with Child() as child:
        child.call(children.open_consumer, "orphaned")
        orphan = child.call(children.fork_that_waits)
        child.kill()
        try:
            with tp.Consumer("orphaned") as consumer, tp.Producer("orphaned") as producer:
                putting = in_thread(lambda: producer.put("to the new owner", PATIENCE))
                assert consumer.get(PATIENCE) == "to the new owner"
                putting()
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_port_in_use(free_port: int) -> None:
    """It is refused with its address and what to do, whoever has it; the owner works as before."""
    endpoint = f"tcp://127.0.0.1:{free_port}"
    with tp.Consumer(endpoint) as owner:
        for end in (tp.Consumer, tp.Producer):
            with pytest.raises(
                tp.Refused,
                match=f"127.0.0.1.*:{free_port} belongs to a consumer of this very process .*: close it, or use",
            ):
                end(endpoint, bind=True)
        with tp.Producer(endpoint) as producer:
            putting = in_thread(lambda: producer.put("works", PATIENCE))
            assert owner.get(PATIENCE) == "works"
            putting()
    with socket.socket() as theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection may linger there
        theirs.bind(("127.0.0.1", free_port))
        theirs.listen()
        with pytest.raises(tp.Refused, match=f"{free_port} is in use: .*; close its owner or use another"):
            tp.Consumer(endpoint)


def test_a_port_is_free_when_its_end_is_closed() -> None:
    """Any other program may have it at once, also while another end keeps the context alive."""
    with tp.Consumer("another"):
        for _ in range(50):
            with tp.Consumer("tcp://127.0.0.1:0") as consumer:
                port = int(consumer.endpoint.rpartition(":")[2])
            with socket.socket() as theirs:
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                theirs.bind(("127.0.0.1", port))


def test_an_inproc_name_in_use() -> None:
    """It is refused too."""
    with (
        tp.Consumer("inproc://taken"),
        pytest.raises(tp.Refused, match="inproc://taken belongs to a consumer of this very"),
    ):
        tp.Producer("inproc://taken", bind=True)


def test_a_folder_that_cannot_be_written_to() -> None:
    """A path where no socket can be made is refused, with the kernel's words."""
    with pytest.raises((tp.Refused, OSError), match="/proc"):
        tp.Consumer("ipc:///proc/self/socket")


@pytest.mark.parametrize("endpoint", ["ipc", "tcp://127.0.0.1:0", "inproc://again"])
def test_an_endpoint_can_be_had_again_at_once(endpoint: str, tmp_path: Path) -> None:
    """Closed and opened again on the same address, many times over, also while another end keeps the context alive."""
    endpoint = f"ipc://{tmp_path}/again" if endpoint == "ipc" else endpoint
    with tp.Consumer("another"):
        for _ in range(20):
            with tp.Consumer(endpoint) as consumer:
                endpoint = consumer.endpoint
    assert list(tmp_path.iterdir()) == []


def test_sockets_let_go_of_everything() -> None:
    """A hundred ends opened and closed leave no descriptor and no thread (the guard around this test looks again)."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with tp.Consumer("many") as consumer, tp.Producer("many"):
            consumer.fileno()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_descriptors_are_few_and_do_not_grow_with_messages() -> None:
    """Descriptors are as many as ends and peers, and no more with a hundred tensors held."""
    with tp.Consumer("few", copy=False) as consumer, Child() as child:
        child.call(children.open_producer, "few")
        child.begin(children.put_batches, 100)
        held = [consumer.get(PATIENCE)]
        before = len(os.listdir("/proc/self/fd"))
        held += [consumer.get(PATIENCE) for _ in range(99)]
        assert len(os.listdir("/proc/self/fd")) == before
        child.result()


def test_a_socket_that_cannot_be_had_leaves_nothing(free_port: int) -> None:
    """A refused bind leaves no context, descriptor or thread behind (the guard around this test looks)."""
    with socket.socket() as theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection may linger there
        theirs.bind(("127.0.0.1", free_port))
        theirs.listen()
        for end in (tp.Consumer, tp.Producer):
            with pytest.raises(tp.Refused):
                end(f"tcp://127.0.0.1:{free_port}", bind=True)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_closing_does_not_wait_for_those_who_leave_meanwhile(scheme: str, tmp_path: Path) -> None:
    """A message to receivers that are leaving, which then belongs to nobody, keeps no context from ending."""
    endpoint = f"ipc://{tmp_path}/socket" if scheme == "ipc" else "tcp://127.0.0.1:0"
    for _ in range(50):  # without LINGER 0 from the start, one in ten hung
        with zmq.Context() as context:
            binder = Binder(parse(endpoint), receives=True)
            binder.open(print)
            leaving = [context.socket(zmq.DEALER) for _ in range(32)]
            for socket_ in leaving:
                socket_.linger = 0
                socket_.connect(binder.address.text)
                socket_.send(b"here")
            peers = [_heard(binder) for _ in leaving]
            gone = in_thread(lambda leaving=leaving: [socket_.close() for socket_ in leaving])
            for peer in peers:
                binder.send_small(peer, b"goodbye")
            gone()
            binder.close(0)


def _heard(binder: Binder) -> bytes:
    """The next peer that says something."""
    while (incoming := binder.receive(0.1)) is None:
        pass
    return incoming[0]


def test_no_thread_sets_the_generator_of_connections_numbers_back_while_another_opens_a_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody may know the number that it is set back to."""
    seeds, open_socket, inside = list[int](), zmq_contexts.open_socket, list[int]()

    class Library:
        def rand(self) -> int:
            return 1

        def srand(self, seed: Any) -> None:
            seeds.append(seed.value)

    def slow_open(*arguments: Any) -> Any:
        inside.append(len(seeds))
        if len(inside) == 1:
            other = in_thread(lambda: zmq_contexts.router(context))
            with contextlib.suppress(AssertionError):  # it waits for this one
                other(0.3)
            waiting.append(other)
        assert len(seeds) == inside[-1], "it was set meanwhile"
        return open_socket(*arguments)

    waiting, end = list[Any](), object()
    context = zmq_contexts.acquire(end, own=True)
    monkeypatch.setattr(zmq_contexts, "libc", Library)
    monkeypatch.setattr(zmq_contexts, "open_socket", slow_open)
    sockets = [zmq_contexts.router(context), waiting[0]()]
    assert len(seeds) == 4
    for each in sockets:
        each.close()
    zmq_contexts.release(end)


def test_an_end_that_no_thread_is_left_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq would end the process. Once there are some again, it opens."""
    start, left = _thread.start_new_thread, [1]

    def start_some(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        return start(*arguments)

    monkeypatch.setattr(_thread, "start_new_thread", start_some)
    with pytest.raises(tp.Refused, match=r"can't start new thread.*raise the limit \(ulimit -u"):
        tp.Consumer("tcp://127.0.0.1:0")
    left[0] = 1_000
    tp.Consumer("tcp://127.0.0.1:0").close()


def test_exceptions_of_a_handler_as_an_end_opens_leave_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts some, to see that there can be. What an exception cuts short ends all the same."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # it may come in a callback of the garbage collector

    class Alarm(Exception):
        pass

    def alarm(*_: Any) -> None:
        raise Alarm

    raised, before = 0, signal.signal(signal.SIGALRM, alarm)
    try:
        for number in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + number % 30 / 20_000)
                zmq_contexts._check_threads(5)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised
    wait_until(lambda: len(os.listdir("/proc/self/task")) < 20)
