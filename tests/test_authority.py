"""Where authority comes from: nothing that was said over a socket is opened, written to, signalled or waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import containers
import exchange
import msgspec
import pytest
from children import PATIENCE, in_thread
from raw_ends import RawEnd, hello, hello_of, map_with

import tensorpipe_ipc as tp
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.wire.header import Kind, SharedMemoryTerms, pack

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
    """What this process opens and signals."""
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
    """Nothing was opened of it, no signal was sent to it, and nothing was written into its pipe: it would have ended."""
    assert not [each for each in seen if f"/proc/{victim.pid}/fd" in each or each.startswith(("os.kill", "signal"))]
    assert victim.stdin is not None
    victim.stdin.write(b"exit 7\n")
    victim.stdin.close()
    assert victim.wait(PATIENCE) == 7


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
    with tp.Producer(LOOPBACK, bind=True, linger=0) as producer:
        hellos = _named("consumer", victim)
        before = len(os.listdir("/proc/self/fd"))
        seen.clear()
        _of_another_user(lambda: _say_all(producer.endpoint, "consumer", hellos))
        for _ in range(10):
            producer.statistics()
            with pytest.raises(tp.Full):
                producer.put("word", 0.02)
        assert producer.statistics().rejected >= 3
        assert len(os.listdir("/proc/self/fd")) <= before
        _was_not_touched(victim, seen)


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
