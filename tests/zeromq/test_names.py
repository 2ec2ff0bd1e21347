"""Hosts by their names: nobody waits for a name server, and every address of a host is tried."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import children
import programs
import pytest
from children import PATIENCE, Child, in_thread, wait_until
from secured import binders, connectors, make_keys, open_connector

import tensorpipe_ipc as tp
from tensorpipe_ipc.zeromq import names
from tensorpipe_ipc.zeromq.addresses import parse
from tensorpipe_ipc.zeromq.names import Host, numbers

pytestmark = pytest.mark.limit(30)
NAME = "gpu.lab"
SHORT = 0.2  # seconds
LATE = 0.5  # seconds that a busy machine may take longer
NO_SUCH_HOST = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
_real = socket.getaddrinfo


class NameServer:
    """Answers for one name, as ``socket.getaddrinfo`` does.

    Attributes:
        answer: the host's numbers; or an error.
        asked: how often it was.
        answers: set while it does; else whoever asks waits.
        waiting: how many do.
        most: how many did at once.
    """

    def __init__(self) -> None:
        self.answer: list[str] | OSError = ["127.0.0.1"]
        self.asked = self.waiting = self.most = 0
        self.answers = threading.Event()
        self.answers.set()

    def __call__(self, host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        """Look up."""
        if host not in (NAME, NAME.encode()):
            return _real(host, port, *arguments, **options)
        self.asked += 1
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        self.answers.wait()
        self.waiting -= 1
        if isinstance(self.answer, OSError):
            raise self.answer
        return [_found(number) for number in self.answer]


def _found(number: str, scope: int = 0) -> Any:
    """One of the results of ``socket.getaddrinfo``."""
    family, end = (socket.AF_INET6, (number, 0, 0, scope)) if ":" in number else (socket.AF_INET, (number, 0))
    return family, socket.SOCK_STREAM, 6, "", end


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    """The name server, whom all have left in the end."""
    made = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.answers.set()
    wait_until(lambda: not made.waiting)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Key pairs."""
    return make_keys(tmp_path / "keys")


def _port(end: tp.Consumer | tp.Producer) -> str:
    return end.endpoint.rpartition(":")[2]


def _crosses(producer: tp.Producer, consumer: tp.Consumer, said: Any) -> None:
    """Have a message cross."""
    putting = in_thread(lambda: producer.put(said, PATIENCE))
    assert consumer.get(PATIENCE) == said
    putting()


def _took(began: float) -> float:
    return time.monotonic() - began


def test_while_a_name_is_looked_up_all_others_go_on(server: NameServer, keys: Path, free_port: int) -> None:
    """Neither another end of the program waits, nor a put beyond its time, nor close; and there is one look-up, not more."""
    server.answers.clear()
    with tp.Consumer("tcp://127.0.0.1:0", shared_memory="off") as consumer, tp.Producer(consumer.endpoint) as producer:
        waiting = tp.Producer(f"tcp://{NAME}:{free_port}", security=connectors(keys), linger=0)
        for timeout in (0, SHORT):
            began = time.monotonic()
            with pytest.raises(tp.Full, match="no consumer has come to .*; its host's name is being looked up$"):
                waiting.put(1, timeout)
            assert timeout <= _took(began) < timeout + LATE
            _crosses(producer, consumer, timeout)
        began = time.monotonic()
        with pytest.raises(tp.Full):
            waiting.wait_for(1, SHORT)
        assert _took(began) < SHORT + LATE
        began = time.monotonic()
        waiting.close()
        assert _took(began) < LATE
        _crosses(producer, consumer, "after it")
    assert (server.asked, server.most, server.waiting) == (1, 1, 1)


@pytest.mark.parametrize("elsewhere", ["127.0.0.2", "::1"])
def test_every_address_is_tried(elsewhere: str, server: NameServer, keys: Path) -> None:
    """Nobody listens at the first one of a host."""
    server.answer = [elsewhere, "127.0.0.1"]
    with tp.Consumer("tcp://127.0.0.1:0", security=binders(keys)) as consumer:
        with tp.Producer(f"tcp://{NAME}:{_port(consumer)}", security=connectors(keys)) as producer:
            assert producer.endpoint == f"tcp://{NAME}:{_port(consumer)}"
            _crosses(producer, consumer, "found")


def test_who_waits_on_a_descriptor_alone_is_told(server: NameServer, keys: Path) -> None:
    """It tells of a name that is found, and of each address that is to be tried."""
    server.answers.clear()
    server.answer = ["127.0.0.2", "127.0.0.1"]
    with tp.Producer("tcp://127.0.0.1:0", bind=True, security=binders(keys)) as producer:
        endpoint = f"tcp://{NAME}:{_port(producer)}"
        with tp.Consumer(endpoint, bind=False, security=connectors(keys)) as consumer:
            putting, descriptor = in_thread(lambda: producer.put("told", PATIENCE)), consumer.fileno()
            server.answers.set()
            began, got = time.monotonic(), None
            while got is None:
                assert select.select([descriptor], [], [], PATIENCE)[0]
                with contextlib.suppress(tp.Empty):
                    got = consumer.get_nowait()
            assert got == "told"
            assert _took(began) < 3
            putting()


def test_an_answer_that_comes_late_is_taken_soon(server: NameServer, keys: Path) -> None:
    """A put that waits finds out by itself."""
    server.answers.clear()
    with tp.Consumer("tcp://127.0.0.1:0", security=binders(keys)) as consumer:
        with tp.Producer(f"tcp://{NAME}:{_port(consumer)}", security=connectors(keys)) as producer:
            putting = in_thread(lambda: producer.put("late", PATIENCE))
            wait_until(lambda: server.waiting)
            server.answers.set()
            began = time.monotonic()
            assert consumer.get(PATIENCE) == "late"
            assert _took(began) < 1 + LATE
            putting()


def test_a_host_that_moves_is_found_again(server: NameServer, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name leads elsewhere now."""
    monkeypatch.setattr(names, "_APART", 0.05)
    with contextlib.ExitStack() as stack:
        consumer = tp.Consumer("tcp://127.0.0.1:0", security=binders(keys))
        port = _port(consumer)
        producer = stack.enter_context(tp.Producer(f"tcp://{NAME}:{port}", security=connectors(keys)))
        _crosses(producer, consumer, "here")
        producer.flush(PATIENCE)
        server.answer = ["127.0.0.2"]
        consumer.close()
        wait_until(lambda: not producer.statistics().peers)
        _crosses(producer, stack.enter_context(tp.Consumer(f"tcp://127.0.0.2:{port}", security=binders(keys))), "there")


def test_what_was_found_counts_while_no_name_server_answers(
    server: NameServer, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is lost is made anew at once."""
    monkeypatch.setattr(names, "_APART", 0.05)
    with contextlib.ExitStack() as stack:
        consumer = tp.Consumer("tcp://127.0.0.1:0", security=binders(keys))
        port = _port(consumer)
        producer = stack.enter_context(tp.Producer(f"tcp://{NAME}:{port}", security=connectors(keys)))
        _crosses(producer, consumer, "before")
        producer.flush(PATIENCE)
        server.answers.clear()
        consumer.close()
        wait_until(lambda: not producer.statistics().peers and server.waiting)
        _crosses(producer, stack.enter_context(tp.Consumer(f"tcp://127.0.0.1:{port}", security=binders(keys))), "after")
        assert server.waiting == server.most == 1


def test_without_a_thread_it_is_looked_up_later(
    server: NameServer, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the user may have can be taken for a while."""
    real, is_short = names._thread.start_new_thread, [True]

    def start(*arguments: Any) -> int:
        if is_short:
            raise RuntimeError("can't start new thread")
        return real(*arguments)

    monkeypatch.setattr(names, "_APART", 0.05)
    monkeypatch.setattr(names, "_thread", SimpleNamespace(start_new_thread=start))
    with tp.Consumer("tcp://127.0.0.1:0", security=binders(keys)) as consumer:
        with tp.Producer(f"tcp://{NAME}:{_port(consumer)}", security=connectors(keys)) as producer:
            with pytest.raises(tp.Full, match="no thread can be started to look up"):
                producer.put(1, SHORT)
            is_short.clear()
            _crosses(producer, consumer, "later")


def test_why_a_name_is_not_found(server: NameServer, keys: Path, free_port: int) -> None:
    """It is told whether there is no such host, or nobody who knows has answered."""
    silent = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    for server.answer, why in (
        (NO_SUCH_HOST, "nobody listens there, or no host has that name, or its answer takes over 0.7 s; one of"),
        (silent, "yet; its host's name cannot be looked up: Temporary failure in name resolution$"),
    ):
        with tp.Producer(f"tcp://{NAME}:{free_port}", security=connectors(keys), linger=0) as producer:
            with pytest.raises(tp.Full, match=why):
                producer.put(1, 2 * SHORT)


def test_a_port_that_is_none_is_refused_at_once(server: NameServer, keys: Path) -> None:
    """As with a number, before anything is looked up."""
    for host in (NAME, "10.0.0.1"):
        with pytest.raises(tp.Refused, match=r":\* cannot be connected to: Invalid argument"):
            tp.Producer(f"tcp://{host}:*", security=connectors(keys))
    assert not server.asked


def test_ctrl_c_is_heard_while_a_name_is_looked_up(keys: Path, free_port: int) -> None:
    """It ends a put that waits for a name."""
    with Child() as child:
        child.call(_open_by_a_name_that_nobody_finds, f"tcp://{NAME}:{free_port}", str(keys))
        child.begin(children.interrupted, children.put, 1)
        child.wait_until_blocked()
        child.signal(signal.SIGINT)
        assert child.result() < LATE
        began = time.monotonic()
        child.call(children.close)
        assert _took(began) < LATE


def _open_by_a_name_that_nobody_finds(ends: children.Ends, endpoint: str, folder: str) -> None:
    socket.getaddrinfo = lambda *_, **__: threading.Event().wait()  # type: ignore[assignment]
    open_connector(ends, endpoint, folder, linger=0)


def test_a_fork_while_a_name_is_looked_up(server: NameServer, keys: Path, free_port: int) -> None:
    """The child has no such thread, and misses none: it ends, and so does what it opens itself."""
    server.answers.clear()
    with tp.Producer(f"tcp://{NAME}:{free_port}", security=connectors(keys), linger=0) as producer:
        wait_until(lambda: server.waiting)
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                other = tp.Producer(f"tcp://{NAME}:{free_port}", security=connectors(keys), linger=0)
                with contextlib.suppress(tp.Full):
                    other.put(1, SHORT)
                other.close()
                producer.close()
                os._exit(7)
            os._exit(1)
        began = time.monotonic()
        try:
            wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        except AssertionError:
            os.kill(child, signal.SIGKILL)
            raise
        finally:
            status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) == 7
        assert _took(began) < PATIENCE


_ENDS = """
import socket, sys, threading
socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
import tensorpipe_ipc as tp
end = tp.Producer("tcp://gpu.lab:5555", security=tp.Curve(sys.argv[1], server=sys.argv[2]), linger=0)
try:
    end.put(1, 0.1)
except tp.Full as why:
    print(str(why).rpartition("; ")[2])
"""


@pytest.mark.slow
@pytest.mark.limit(100)
def test_a_program_ends_while_a_name_is_looked_up(keys: Path, tmp_path: Path) -> None:
    """It waits for no answer, though it leaves its end open."""
    program = tmp_path / "program.py"
    program.write_text(_ENDS)
    done = programs.ran(str(program), str(keys / "friend.key_secret"), str(keys / "binder.key"))
    assert (done.status, done.out) == (0, "its host's name is being looked up\n"), done.err


def test_a_binder_by_a_name(server: NameServer, keys: Path) -> None:
    """The first of its addresses that is this host's is bound, and the endpoint has the name."""
    server.answer = ["203.0.113.1", "127.0.0.1", "127.0.0.2"]
    with tp.Consumer(f"tcp://{NAME}:0", security=binders(keys), producers=None) as consumer:
        assert consumer.endpoint == f"tcp://{NAME}:{_port(consumer)}"
        with pytest.raises(tp.Refused, match=f"{consumer.endpoint} belongs to a consumer of this very process"):
            tp.Consumer(consumer.endpoint, security=binders(keys))
        for endpoint in (f"tcp://127.0.0.1:{_port(consumer)}", consumer.endpoint):
            with tp.Producer(endpoint, security=connectors(keys)) as producer:
                _crosses(producer, consumer, endpoint)


def test_a_binder_by_a_name_that_is_not_this_hosts(server: NameServer, keys: Path) -> None:
    """Nothing is bound where a host's numbers are another's, or it has none; and no other thread waits for the answer."""
    for server.answer, why in (
        (["203.0.113.1", "203.0.113.2"], "Cannot assign requested address"),
        (NO_SUCH_HOST, "Name or service not known"),
    ):
        with pytest.raises(tp.Refused, match=rf"tcp://{NAME}:\* cannot be bound: {why}"):
            tp.Consumer(f"tcp://{NAME}:0", security=binders(keys))
    server.answers.clear()
    opening = in_thread(lambda: tp.Consumer(f"tcp://{NAME}:0", security=binders(keys)))
    wait_until(lambda: server.waiting)
    with tp.Consumer("tcp://127.0.0.1:0") as consumer, tp.Producer(consumer.endpoint) as producer:
        _crosses(producer, consumer, "meanwhile")
    server.answers.set()
    with pytest.raises(tp.Refused):
        opening()


def test_an_interface_is_bound_by_its_own_name(monkeypatch: pytest.MonkeyPatch, keys: Path) -> None:
    """No name server is asked for it."""

    def ask(*_: Any, **__: Any) -> Any:
        raise NO_SUCH_HOST

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    with tp.Consumer("tcp://lo:0", security=binders(keys)) as consumer:
        assert consumer.endpoint.startswith("tcp://lo:")


def test_the_numbers_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, as ZeroMQ takes them; those of one link with its number."""
    found = [_found("fe80::1", 3), _found("::1"), _found("10.0.0.1"), _found("::1"), _found("fe80::2%eth0", 3)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*found, (socket.AF_UNIX, 1, 0, "", "/x")])
    said = [each.text for each in numbers(parse(f"tcp://{NAME}:5", has_keys=True))]
    hosts = ("[fe80::1%3]", "[::1]", "10.0.0.1", "[fe80::2%eth0]")
    assert said == [f"tcp://{host}:5" for host in hosts]
    assert not any(parse(text, has_keys=True).has_name for text in said)


@pytest.mark.parametrize("host", ["gpu", "gpu.lab", "10.0.0.1.example", "fe80", "300.1.1.1", "10.1", "12345", "[1:2]"])
def test_what_is_no_number_is_a_name(host: str) -> None:
    """Whatever libzmq might ask a name server for is looked up by this library."""
    assert parse(f"tcp://{host}:5", has_keys=True).has_name


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "127.0.0.1", "localhost", "[::]", "[::1]", "[fe80::1%eth0]", "::1%2"])
def test_a_number_is_no_name(host: str) -> None:
    """Nor is "all of this host's"."""
    assert not parse(f"tcp://{host}:5", has_keys=True).has_name


def test_in_which_order_addresses_are_tried(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn, whatever order name servers give them; what is new first; and each second time the one that stood."""
    monkeypatch.setattr(names, "_APART", 0.0)
    host = Host(parse(f"tcp://{NAME}:5", has_keys=True))

    def tried(*answer: str) -> str:
        server.answer = list(answer)
        asked = server.asked
        host.is_found()
        wait_until(lambda: server.asked > asked and host._look_up is not None and host._look_up.is_over)
        host.is_found()
        wait_until(lambda: host._look_up is not None and host._look_up.is_over)
        return host.next().text.removeprefix("tcp://").removesuffix(":5")

    assert tried("10.0.0.1", "10.0.0.2", "10.0.0.3") == "10.0.0.1"
    assert tried("10.0.0.3", "10.0.0.1", "10.0.0.2") == "10.0.0.2"
    host.stood()
    three = "10.0.0.1", "10.0.0.2", "10.0.0.3"
    assert [tried(*three) for _ in range(5)] == ["10.0.0.2", "10.0.0.3", "10.0.0.2", "10.0.0.1", "10.0.0.2"]
    assert tried(*three) == "10.0.0.3"
    assert tried(*three, "10.0.0.4") == "10.0.0.4"
    assert tried(*three, "10.0.0.4") == "10.0.0.2"
    assert tried("10.0.0.1", "10.0.0.4") == "10.0.0.1"
    assert tried("10.0.0.1", "10.0.0.4") == "10.0.0.4"
    server.answer = NO_SUCH_HOST
    assert host.is_found()
    assert host.next().text == "tcp://10.0.0.1:5"
