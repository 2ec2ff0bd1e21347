"""The presence of ends. Changes to their files, or to the runtime folder, do not say which ends are open."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import children
import msgspec
import pytest
from children import PATIENCE, Child, in_thread, wait_until
from crash_points import in_child, reap
from inside import conversation_of
from programs import ran
from proxy import Proxy

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints import presence
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.wire.header import Ending
from tensorpipe_ipc.zeromq.addresses import runtime_folder

pytestmark = pytest.mark.limit(25)
MARGIN = 1.0  # seconds beyond what is promised, on a machine that does other things too
LONG = 0.7  # seconds: longer than an end whose connection stands is waited for when it is gone


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own, to be done to as it likes. Children have it by ``set_environment``."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return Path(runtime_folder())


def _child_there(child: Child) -> Child:
    child.call(children.set_environment, "XDG_RUNTIME_DIR", os.environ["XDG_RUNTIME_DIR"])
    return child


def _remove_files(folder: Path) -> None:
    for path in folder.iterdir():
        if not path.is_socket():
            path.unlink()


@contextlib.contextmanager
def _renamed(folder: Path) -> Iterator[None]:
    """As at a logout: the folder is away, and another place is taken."""
    away = folder.parent.with_name("away")
    folder.parent.rename(away)
    yield
    shutil.rmtree(folder.parent, ignore_errors=True)
    away.rename(folder.parent)


def _exchange_for(seconds: float, child: Child, consumer: tp.Consumer) -> None:
    """The child's producer puts, and each message comes, and nobody is given up meanwhile."""
    deadline = time.monotonic() + seconds
    number = 0
    while time.monotonic() < deadline:
        child.begin(children.put, number)
        assert consumer.get(PATIENCE) == number
        child.result()
        number += 1
        with pytest.raises(tp.Empty):
            consumer.get(0.1)
    assert len(consumer.statistics().peers) == 1
    assert (consumer.statistics().vanished, consumer.statistics().lost, consumer.statistics().rejected) == (0, 0, 0)


@pytest.mark.parametrize(
    ("endpoint", "producer_binds", "shared_memory"), [("seen", False, "auto"), ("tcp://127.0.0.1:0", True, "off")]
)
def test_an_end_whose_file_was_removed_is_open_all_the_same(
    endpoint: str, producer_binds: bool, shared_memory: Any, folder: Path
) -> None:
    """A cleaner of old files removes it before its peer comes: the two meet and go on, and its death is seen at once."""
    with Child() as child:
        _child_there(child)
        if producer_binds:
            endpoint = child.call(children.open_producer, endpoint, bind=True, linger=0.0)
            _remove_files(folder)
            consumer = tp.Consumer(endpoint, bind=False, shared_memory=shared_memory)
        else:
            consumer = tp.Consumer(endpoint, shared_memory=shared_memory)
            child.call(children.open_producer, consumer.endpoint, linger=0.0)
            _remove_files(folder)
        with consumer:
            _exchange_for(LONG, child, consumer)
            child.kill()
            started = time.monotonic()
            with pytest.raises(tp.PeerLost, match=f"producer pid {child.pid} .* vanished"):
                consumer.get(PATIENCE)
            assert time.monotonic() - started < 1 + MARGIN


def test_folders_of_two_hosts_of_one_disk_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same numbers. Neither is taken for the other, also where no boot id is to be read (ProcSubset=pid)."""
    marks, own = set(), identity()
    for host in ("one", "other"):
        monkeypatch.setattr(presence, "identity", lambda host=host: msgspec.structs.replace(own, host=host, boot=""))
        marks.add(presence._mark_of(tmp_path.stat()))
    assert len(marks) == 2


def test_a_folder_that_was_made_anew_is_another(folder: Path) -> None:
    """Ends from before are not gone because ends from after do not find them there."""
    with Child() as child:
        _child_there(child)
        endpoint = child.call(children.open_producer, "tcp://127.0.0.1:0", bind=True, linger=0.0)
        shutil.rmtree(folder)
        folder.mkdir(0o700)
        with tp.Consumer(endpoint, bind=False, shared_memory="off") as consumer:
            _exchange_for(LONG, child, consumer)
            child.call(children.close)
            with pytest.raises(tp.EndOfStream):
                consumer.get(PATIENCE)


@pytest.mark.parametrize(
    ("endpoint", "kills", "shared_memory"), [("seen", True, "off"), ("tcp://127.0.0.1:0", False, "auto")]
)
def test_two_ends_whose_folder_was_removed_see_each_other(
    endpoint: str, kills: bool, shared_memory: Any, folder: Path
) -> None:
    """They had met: both go on, and learn of a kill, and of a goodbye."""
    with Child() as child, tp.Consumer(endpoint, shared_memory=shared_memory) as consumer:
        _child_there(child)
        child.call(children.open_producer, consumer.endpoint, linger=0.0)
        _exchange_for(0.1, child, consumer)
        shutil.rmtree(folder)
        _exchange_for(LONG, child, consumer)
        started = time.monotonic()
        if kills:
            child.kill()
        else:
            child.begin(children.close)
        with pytest.raises(tp.PeerLost if kills else tp.EndOfStream):
            consumer.get(PATIENCE)
        assert time.monotonic() - started < 1 + MARGIN


def test_an_end_that_opens_where_there_is_no_folder_any_more(folder: Path) -> None:
    """After a logout: it has another folder, and the ends from before are out of its sight, and not gone."""
    with Child() as child:
        _child_there(child)
        endpoint = child.call(children.open_producer, "tcp://127.0.0.1:0", bind=True, linger=0.0)
        with _renamed(folder), tp.Consumer(endpoint, bind=False) as consumer:
            _exchange_for(LONG, child, consumer)
            assert "out of sight" in consumer.statistics().peers[0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_an_end_that_finds_no_room_for_its_file_is_seen(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer learns of its end at once, though the line is cut, and only not how it ended."""
    opens = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(".end") and flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return opens(path, flags, *arguments, **options)

    with tp.Producer("tcp://127.0.0.1:0", bind=True, shared_memory="off", linger=0) as producer:
        with Proxy(int(producer.endpoint.rpartition(":")[2])) as line:
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", refuse)
                consumer = tp.Consumer(line.endpoint, bind=False)
            with consumer:
                putting = in_thread(lambda: producer.put("met", PATIENCE))
                assert consumer.get(PATIENCE) == "met"
                putting()
                producer.flush(PATIENCE)
                assert len(list(folder.glob("*.end"))) == 1
                assert "present" in producer.statistics().peers[0]
                line.silence()
                line.cut()
            started = time.monotonic()
            wait_until(lambda: not producer.statistics().peers)
            assert time.monotonic() - started < 2 + MARGIN  # heartbeats, and not peer_timeout


@pytest.mark.usefixtures("folder")
def test_what_an_end_posts_late_does_not_take_the_place_of_its_last_words() -> None:
    """It may hear others leave while it closes."""
    with contextlib.closing(presence.Presence()) as one, contextlib.closing(presence.Presence()) as other:
        one.open()
        other.open()
        sight = other.sight_of(one.token, one.folder)
        one.publish(b"attached: nobody")
        assert not sight.is_gone()
        one.end(presence.LastWords(Ending("ValueError: 3")))
        one.publish(b"attached: fewer")
        assert sight.is_gone()
        words = sight.last_words()
        assert words is not None
        assert words.ending.failure == "ValueError: 3"
        sight.close()


@pytest.mark.parametrize("endpoint", ["seen", "tcp://127.0.0.1:0"], ids=["ipc", "tcp"])
def test_who_is_stopped_while_it_sweeps_keeps_nobody_present(endpoint: str, folder: Path) -> None:
    """A killed end is seen to be gone, though another process has just begun to remove its file."""

    def sweep_and_stop() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        presence.os = _StopsInUnlink()  # type: ignore[attr-defined, assignment]
        presence.sweep()

    with tp.Consumer(endpoint, shared_memory="off") as consumer, Child() as child:
        _child_there(child)
        child.call(children.open_producer, consumer.endpoint)
        child.begin(children.put, 1)
        assert consumer.get(PATIENCE) == 1
        child.result()
        child.kill()
        sweeper = in_child(sweep_and_stop)
        try:
            os.waitpid(sweeper, os.WUNTRACED)
            started = time.monotonic()
            with pytest.raises(tp.PeerLost, match=f"producer pid {child.pid} .* vanished"):
                consumer.get(3 + MARGIN)
            assert time.monotonic() - started < 1 + MARGIN
        finally:
            os.kill(sweeper, signal.SIGKILL)
            os.waitpid(sweeper, 0)


class _StopsInUnlink:
    """The module ``os``, whose unlink stops the process first."""

    def __getattr__(self, name: str) -> Any:
        return self._unlink if name == "unlink" else getattr(os, name)

    @staticmethod
    def _unlink(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        os.unlink(*arguments, **options)


def test_a_child_forked_while_another_thread_looks_for_a_peer_keeps_no_lock(folder: Path) -> None:
    """A child that had a duplicate of the folder's own descriptor would keep its killed parent present."""
    with tp.Consumer("looks") as consumer:
        for number in range(500):
            (folder / f"other{number}").touch()
        own, done = conversation_of(consumer).presence, threading.Event()
        assert own is not None

        def look() -> None:
            while not done.is_set():
                own.file_of(1)

        def see() -> None:
            for descriptor in filter(_is_open, range(3, 200)):
                if os.fstat(descriptor).st_ino == folder.stat().st_ino:
                    assert "OFDLCK" not in Path(f"/proc/self/fdinfo/{descriptor}").read_text()

        looking = in_thread(look)
        try:
            assert [reap(in_child(see)) for _ in range(5)] == [0] * 5
        finally:
            done.set()
            looking()


def _is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


COLLECTED = """
import os, threading, time

lock = threading.Lock()  # as logging's, or an executor's: registered first, its hook is called last before a fork
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

import torch
import tensorpipe_ipc as tp

with tp.Consumer("collected") as consumer:
    own = consumer._receiver.conversation.presence
    begun = threading.Event()

    def fork():
        begun.set()
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)

    forking = threading.Thread(target=fork)
    with lock:
        forking.start()
        begun.wait()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            own.file_of(1)  # as its closing does where it hears of a peer
    forking.join()
"""


@pytest.mark.slow
def test_an_end_that_is_collected_waits_for_no_fork_of_another_thread() -> None:
    """Its thread may have a lock that the fork waits for."""
    done = ran("-c", COLLECTED)
    assert (done.status, done.err) == (0, "")
