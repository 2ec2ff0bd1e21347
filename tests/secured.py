"""Key pairs for tests, and what a child does with them: a ``Curve`` is made where it is used, from paths."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import children
import zmq

import tensorpipe_ipc as tp
from tensorpipe_ipc.security import PUBLIC, SECRET, write_key_pair
from tensorpipe_ipc.zeromq.curve import key_pair

NAMES = ("binder", "friend", "other")


def make_keys(folder: Path) -> Path:
    """Three key pairs in a folder."""
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        write_key_pair(str(folder / name), *key_pair())
    return folder


def binders(folder: Path, *clients: str) -> tp.Curve:
    """The keys of the end that binds, and who may come in; nobody named: the friend."""
    listed = [folder / f"{name}{PUBLIC}" for name in clients or ("friend",)]
    return tp.Curve(folder / f"binder{SECRET}", clients=listed)


def connectors(folder: Path, own: str = "friend", server: str = "binder") -> tp.Curve:
    """The keys of an end that connects."""
    return tp.Curve(folder / f"{own}{SECRET}", server=folder / f"{server}{PUBLIC}")


def open_connector(ends: children.Ends, endpoint: str, folder: str, own: str = "friend", **options: Any) -> None:
    """Open the child's producer, which connects with keys."""
    children.open_producer(ends, endpoint, security=connectors(Path(folder), own), **options)


def open_binder(ends: children.Ends, endpoint: str, folder: str, **options: Any) -> str:
    """Open the child's consumer, which binds with keys. Returns its endpoint."""
    return children.open_consumer(ends, endpoint, security=binders(Path(folder)), **options)


def lose_there(ends: children.Ends, way: str, folder: str) -> str:
    """Bind for other hosts, in other circumstances, and close a producer with two messages not taken. Returns the error."""

    def lose() -> str:
        with tp.Producer("tcp://*:*", bind=True, security=binders(Path(folder)), linger=0.1) as producer:
            endpoint = f"tcp://127.0.0.1:{producer.endpoint.rpartition(':')[2]}"
            with tp.Consumer(endpoint, bind=False, security=connectors(Path(folder))) as consumer:
                putting = children.in_thread(lambda: [producer.put(number, children.PATIENCE) for number in range(3)])
                assert consumer.get(children.PATIENCE) == 0
                putting()
        return "nothing was told"

    return children.said_there(way, lose)


def put_at_a_pace(ends: children.Ends, tree: Any, pace: float, seconds: float) -> float:
    """Put a tree so many times a second, as far as it will go. Returns how many times a second it went."""
    began = time.monotonic()
    count = 0
    while (now := time.monotonic()) - began < seconds:
        ends.producer.put(tree, children.PATIENCE)
        count += 1
        time.sleep(max(0.0, began + count / pace - now))
    ends.producer.flush(children.PATIENCE)
    return count / (time.monotonic() - began)


def take_until(ends: children.Ends, last: Any) -> int:
    """Take messages until a certain one comes. Returns how many there were before it."""
    count = 0
    while ends.consumer.get() != last:
        count += 1
    return count


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # of ZMTP 3, up to the mechanism


def knock(port: int, how: int) -> None:
    """Connect without a key, in one of several ways, and go."""
    said = (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xff\x00\x00\x00\x00\x00\x00\xff\xff" + bytes(100),
        GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
    )[how % 5]
    with socket.create_connection(("127.0.0.1", port), timeout=children.PATIENCE) as caller:
        try:
            caller.sendall(said)
        except OSError:  # it was faster in closing
            pass


def knock_often(ends: children.Ends, port: int, count: int, folder: str, strangers: int) -> float:
    """Flood a binder: connections that say nothing or nonsense, and clients with a key that it does not list.

    Args:
        ends: the child's, which are not used.
        port: the binder's.
        count: connections, in all.
        folder: of the keys.
        strangers: how many of them have a key.

    Returns:
        How many seconds it took.
    """
    del ends
    began = time.monotonic()
    curve = connectors(Path(folder), "other")
    public, secret = curve.own_keys()
    with zmq.Context() as context:
        for number in range(count - strangers):
            knock(port, number)
        at_once = min(strangers, 50)
        for _ in range(strangers // at_once if at_once else 0):
            callers = []
            for _ in range(at_once):
                caller = context.socket(zmq.DEALER)
                caller.setsockopt(zmq.LINGER, 0)
                caller.curve_publickey, caller.curve_secretkey = public, secret
                caller.curve_serverkey = curve.server_key()
                told = caller.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
                caller.connect(f"tcp://127.0.0.1:{port}")
                callers.append((caller, told))
            for caller, told in callers:
                assert told.poll(children.PATIENCE * 1000), "a stranger was not turned away"
                caller.disable_monitor()
                caller.close()
    return time.monotonic() - began
