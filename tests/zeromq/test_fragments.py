"""Over tcp and with keys, long frames go in fragments: they come whole, and no stranger makes the binder hold more than one."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import secured
import torch
import zmq
from children import PATIENCE, in_thread
from inside import side_of
from raw_ends import wait_in_vain
from secured import binders, connectors, make_keys

import tensorpipe_ipc as tp
from tensorpipe_ipc.process import memory
from tensorpipe_ipc.zeromq import zmq_sockets
from tensorpipe_ipc.zeromq.fragments import FRAGMENT, LARGEST_FRAGMENT, SHORT_FRAGMENT, in_fragments, joined

SIZES = (0, 1, FRAGMENT - 1, FRAGMENT, FRAGMENT + 1, 2 * FRAGMENT, 3 * FRAGMENT - 1)
SHORT_SIZES = (SHORT_FRAGMENT - 1, SHORT_FRAGMENT, SHORT_FRAGMENT + 1, 2 * SHORT_FRAGMENT, FRAGMENT + SHORT_FRAGMENT)


def _joined(fragments: list[bytes]) -> list[bytes]:
    frames, refused = joined([memoryview(fragment) for fragment in fragments])
    assert not refused
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("size", [FRAGMENT, SHORT_FRAGMENT])
@pytest.mark.parametrize("first", SIZES + SHORT_SIZES)
@pytest.mark.parametrize("second", SIZES + SHORT_SIZES)
def test_frames_come_whole(first: int, second: int, size: int) -> None:
    """Whatever their lengths; no fragment is longer than it may be."""
    frames = [b"header", b"x" * first, b"y" * second, b"end"]
    fragments = [bytes(fragment) for fragment in in_fragments(frames, size)]
    assert max(map(len, fragments)) <= size
    assert _joined(fragments) == frames


def test_a_message_that_was_cut_off_is_no_other_one() -> None:
    """Its frame is shorter, or there is an empty one behind it."""
    assert _joined([b"h", b"x" * FRAGMENT, b""]) == [b"h", b"x" * FRAGMENT]
    assert _joined([b"h", b"x" * FRAGMENT]) == [b"h", b"x" * FRAGMENT]
    assert _joined([b"h", b"x", b""]) == [b"h", b"x", b""]


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_long_messages_with_keys(timeout: float | None, tmp_path: Path) -> None:
    """Tensors of many lengths around a fragment's, lent to ZeroMQ or copied, and a header of several fragments."""
    keys = make_keys(tmp_path)
    trees = [torch.arange(size // 4 + more) for size in (FRAGMENT // 2, FRAGMENT, 3 * FRAGMENT) for more in (-1, 0, 1)]
    trees += [{"x": trees[-1], "y": trees[0], "text": "t" * (3 * FRAGMENT)}]
    with (
        tp.Consumer("tcp://127.0.0.1:*", security=binders(keys), shared_memory="off") as consumer,
        tp.Producer(consumer.endpoint, security=connectors(keys), shared_memory="off") as producer,
    ):
        putting = in_thread(lambda: [producer.put(tree, timeout) for tree in trees])
        for tree in trees:
            got = consumer.get(PATIENCE)
            if isinstance(tree, dict):
                assert got["text"] == tree["text"]
                got, tree = got["x"], tree["x"]
            assert torch.equal(got, tree)
        putting()
        assert consumer.statistics().rejected == 0


READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
GREETING = secured.GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize("size", [LARGEST_FRAGMENT, LARGEST_FRAGMENT + 1])
def test_who_has_no_key_yet_sends_no_more_than_a_piece(size: int, tmp_path: Path) -> None:
    """A command before the handshake of a fragment's length is read, and then refused; a longer one is not even read."""
    keys = make_keys(tmp_path)
    with tp.Consumer("tcp://127.0.0.1:*", security=binders(keys)) as consumer:
        port = int(consumer.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as caller:
            caller.sendall(GREETING + b"\x06" + size.to_bytes(8, "big"))
            sent = 0
            with pytest.raises(OSError) as gone:  # noqa: PT012
                while sent < size:
                    sent += caller.send(bytes(min(1 << 16, size - sent)))
                    time.sleep(0.001)
                while caller.recv(1 << 16):
                    pass
                raise ConnectionError("closed")
            assert not isinstance(gone.value, TimeoutError)
            assert (sent == size) == (size == LARGEST_FRAGMENT)


def test_strangers_make_a_binder_hold_little(tmp_path: Path) -> None:
    """Twenty connections that announce 100 MiB each, and send as much of it as they can."""
    keys = make_keys(tmp_path)
    with tp.Consumer("tcp://127.0.0.1:*", security=binders(keys)) as consumer:
        port = int(consumer.endpoint.rpartition(":")[2])
        before = memory().uss
        callers = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) for _ in range(20)]
        for caller in callers:
            caller.sendall(GREETING + b"\x06" + (100 << 20).to_bytes(8, "big"))
        for caller in callers:
            try:
                for _ in range(100):
                    caller.sendall(bytes(1 << 16))
            except OSError:
                continue
        with pytest.raises(tp.Empty):
            consumer.get(0.1)
        assert memory().uss - before < 20 << 20
        for caller in callers:
            caller.close()


def test_the_limit_over_tcp_is_the_same_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer frame ends the connection before any of it is read: nothing is asked for because somebody says a length."""
    stock = zmq_sockets.heartbeats  # which end it soon, too, as it answers none
    monkeypatch.setattr(zmq_sockets, "heartbeats", lambda **more: {**stock(**more), zmq.HEARTBEAT_IVL: 0})
    with tp.Consumer("tcp://127.0.0.1:*") as consumer:
        port = int(consumer.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as caller:
            caller.sendall(secured.GREETING + b"NULL".ljust(20, b"\0") + bytes(32))
            caller.sendall(b"\x04" + bytes([len(READY)]) + READY)
            assert caller.recv(64, socket.MSG_WAITALL)
            caller.recv(caller.recv(2, socket.MSG_WAITALL)[1], socket.MSG_WAITALL)  # its READY: now it reads messages
            caller.sendall(b"\x00\x05short")
            wait_in_vain(consumer, lambda: consumer.statistics().last_rejection)
            caller.sendall(b"\x02" + (LARGEST_FRAGMENT + 1).to_bytes(8, "big"))
            while caller.recv(1 << 12):
                pass
        assert "a header of 5 bytes" in consumer.statistics().last_rejection


def test_those_who_wait_to_be_accepted() -> None:
    """As many as a burst of strangers may be, so that a friend is not crowded out."""
    with tp.Consumer("crowded") as consumer:
        assert side_of(consumer).socket._socket.getsockopt(zmq.BACKLOG) == 1024
