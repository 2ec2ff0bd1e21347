"""A bad line: a tcp port of loopback that leads to another one, and can be delayed, cut, or silent in either direction.

``with Proxy(port) as line: ... line.cut(); line.silence("there"); line.heal()``. It is one thread that forwards bytes between
sockets. Silence is what a partition looks like to both ends: nothing comes, nothing is refused, and what was sent waits in
the kernel. As no handshake of tcp's gets through one, whoever connects meanwhile is led on when it is over.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from types import TracebackType

MOST = 1 << 18  # bytes that are read and not yet written, each way
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class Flow:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        self.source, self.sink, self.way = source, sink, way
        self.waiting: deque[tuple[float, bytes]] = deque()  # when it is due, and what
        self.nbytes = 0
        self.due = 0.0  # when what was read last is
        self.ended = self.closed = False

    def read(self, delay: float, rate: float) -> None:
        """Take in what has come."""
        try:
            data = self.source.recv(1 << 12 if rate else 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.ended = not data
        self.nbytes += len(data)
        self.due = max(self.due, time.monotonic() + delay) + (len(data) / rate if rate else 0.0)
        self.waiting.append((self.due, data))

    def write(self) -> None:
        """Pass on what is due; after it, the end."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            due, data = self.waiting[0]
            try:
                sent = self.sink.send(data) if data else 0
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            self.nbytes -= sent
            self.waiting.popleft()
            if sent < len(data):
                self.waiting.appendleft((due, data[sent:]))
                return
            if not data:
                self.closed = True


class Proxy:
    """The line, and what is done to it.

    Attributes:
        port: where it begins.
        delay: seconds that everything takes, each way.
        rate: bytes a second that a connection carries, each way; 0: as many as come.
        connections: how many were led through.
    """

    def __init__(self, port: int, *, rate: float = 0.0) -> None:
        self._target = ("127.0.0.1", port)
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self.delay = 0.0
        self.rate = rate
        self.connections = 0
        self._silent: frozenset[str] = frozenset()
        self._pairs: list[tuple[Flow, Flow]] = []
        self._lock = threading.Lock()
        self._ear, self._mouth = os.pipe()
        self._done = False
        self._thread = threading.Thread(target=self._run)

    @property
    def endpoint(self) -> str:
        """Return the endpoint to connect to."""
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self, *, reset: bool = False) -> int:
        """End every connection that there is, with RST or with FIN. How many there were."""
        with self._lock:
            count = len(self._pairs)
            for pair in self._pairs:
                self._close(pair, reset)
            self._pairs.clear()
        self._wake()
        return count

    def silence(self, *ways: str) -> None:
        """Let nothing through from the one that connects ("there"), to it ("back"), or either way (no name)."""
        self._silent = frozenset(ways or ("there", "back"))
        self._wake()

    def heal(self) -> None:
        """Let everything through again, and whoever connected meanwhile."""
        self._silent = frozenset()
        self._wake()

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done = True
        self._wake()
        self._thread.join()
        self.cut()
        self._server.close()
        os.close(self._ear)
        os.close(self._mouth)

    def _wake(self) -> None:
        os.write(self._mouth, b"\0")

    def _run(self) -> None:
        while not self._done:
            with selectors.DefaultSelector() as selector:  # few sockets: made anew each time, it is never out of date
                selector.register(self._ear, selectors.EVENT_READ)
                if not self._silent:
                    selector.register(self._server, selectors.EVENT_READ)
                with self._lock:
                    pairs = list(self._pairs)
                    wait = self._watch(selector, pairs)
                    ready = {}
                    if wait == 0:
                        ready = {key.fileobj: events for key, events in selector.select(0)}
                if wait:
                    ready = {key.fileobj: events for key, events in selector.select(wait)}
            if self._ear in ready:
                os.read(self._ear, 1 << 16)
            with self._lock:
                self._forward(ready)
            if self._server in ready and not self._silent:
                self._accept()

    def _watch(self, selector: selectors.BaseSelector, pairs: list[tuple[Flow, Flow]]) -> float:
        """Have the selector tell of what there is to do. How long it may wait for that."""
        wanted: dict[socket.socket, int] = {}
        wait, now = 1.0, time.monotonic()
        for flow in (flow for pair in pairs for flow in pair if flow.way not in self._silent and not flow.closed):
            if not flow.ended and flow.nbytes < MOST:
                wanted[flow.source] = wanted.get(flow.source, 0) | selectors.EVENT_READ
            if flow.waiting and flow.waiting[0][0] <= now:
                wanted[flow.sink] = wanted.get(flow.sink, 0) | selectors.EVENT_WRITE
            elif flow.waiting:
                wait = min(wait, flow.waiting[0][0] - now + 0.0005)
        for end, events in wanted.items():
            selector.register(end, events)
        return wait

    def _forward(self, ready: dict[object, int]) -> None:
        for pair in list(self._pairs):
            for flow in pair:
                if flow.way in self._silent or flow.closed:
                    continue
                if ready.get(flow.source, 0) & selectors.EVENT_READ and not flow.ended:
                    flow.read(self.delay, self.rate)
                flow.write()
            # An end is passed on. What the other way still holds has nobody to go to.
            if any(flow.closed for flow in pair):
                self._close(pair, reset=False)
                self._pairs.remove(pair)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            here = self._server.accept()[0]
            try:
                there = socket.create_connection(self._target, timeout=2)
            except OSError:
                here.close()
                return
            for end in (here, there):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((Flow(here, there, "there"), Flow(there, here, "back")))
                self.connections += 1

    def _close(self, pair: tuple[Flow, Flow], reset: bool) -> None:
        for flow in pair:
            if reset:
                flow.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            flow.source.close()
