"""Floods of those who may not come in: whoever may goes on as before, and the binder does not grow.

``make kills TESTS=tests/test_floods.py`` runs the long one, or, with figures::

    python -m pytest -s -m kills tests/test_floods.py
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import children
import psutil
import pytest
from children import Child
from secured import GREETING, knock_often, make_keys, open_binder, open_connector, put_at_a_pace, take_until

MIB = 1 << 20


def flooded(folder: Path, count: int, strangers: int) -> tuple[float, float, float, float]:
    """A binder in a process of its own, to which a friend puts a message 200 times a second, while others knock.

    Returns:
        Messages a second before the flood and during it, by how many bytes the binder grew, and connections a second.
    """
    keys = make_keys(folder / "keys")
    with Child() as binder, Child() as friend, Child() as flood:
        endpoint = binder.call(open_binder, "tcp://127.0.0.1:*", str(keys), shared_memory="off")
        port = int(endpoint.rpartition(":")[2])
        binder.begin(take_until, "enough")
        friend.call(open_connector, endpoint, str(keys), shared_memory="off")
        flood.call(knock_often, port, 100, str(keys), 50)  # what a first connection of each kind makes stays
        calm = friend.call(put_at_a_pace, bytes(10_000), 200.0, 1.0)
        before = psutil.Process(binder.pid).memory_info().rss
        flood.begin(knock_often, port, count, str(keys), strangers)
        busy = []
        while not (busy and flood.has_result()):
            busy.append(friend.call(put_at_a_pace, bytes(10_000), 200.0, 0.5))
        took = flood.result()
        grown = psutil.Process(binder.pid).memory_info().rss - before
        friend.call(children.put, "enough")
        binder.result()
        assert binder.call(children.consumer_statistics).rejected >= strangers
    return calm, sum(busy) / len(busy), grown, count / took


def test_a_small_flood(tmp_path: Path) -> None:
    """300 connections: all messages of the friend come, and the binder's memory stays."""
    _, busy, grown, _ = flooded(tmp_path, 300, 100)
    assert busy > 0
    assert grown < 10 * MIB


@pytest.mark.kills
@pytest.mark.parametrize("silence", [2.0, 4.0])
def test_who_says_nothing_is_let_go_after_three_seconds(silence: float, tmp_path: Path) -> None:
    """A connection that does not begin a handshake, and one that stops within it, are closed then, and not before."""
    with Child() as binder:
        endpoint = binder.call(open_binder, "tcp://127.0.0.1:*", str(make_keys(tmp_path / "keys")))
        address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        with socket.create_connection(address) as mute, socket.create_connection(address) as halting:
            halting.sendall(GREETING + b"CURVE".ljust(20, b"\0") + bytes(32))
            for caller in (mute, halting):
                caller.settimeout(5)
                assert caller.recv(64, socket.MSG_WAITALL)  # the binder's greeting
            time.sleep(silence)
            for caller in (mute, halting):
                caller.setblocking(False)
                if silence < 3:
                    with pytest.raises(BlockingIOError):
                        caller.recv(1)
                else:
                    assert caller.recv(1) == b""


@pytest.mark.kills
@pytest.mark.limit(400)
def test_a_flood(tmp_path: Path) -> None:
    """10,000 connections, half of them of clients with a key that is not listed: the friend keeps its pace."""
    calm, busy, grown, rate = flooded(tmp_path, 10_000, 5_000)
    print(f"{calm:.0f} messages/s before, {busy:.0f} during {rate:.0f} connections/s; {grown / MIB:.1f} MiB more")
    assert busy >= 0.8 * calm
    assert grown <= 10 * MIB
