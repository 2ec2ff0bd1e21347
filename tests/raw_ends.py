"""An end spoken by hand: ZeroMQ frames, byte for byte as a test wants them, good or bad."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import zmq

from tensorpipe_ipc.errors import Empty
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.wire import header
from tensorpipe_ipc.wire.header import Header, Hello, Kind, Refusal

PATIENCE = 10.0


def wait_in_vain(consumer: Any, until: Callable[[], Any]) -> None:
    """Have a consumer wait, and get nothing, until something holds: it deals with what comes inside its own calls."""
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline
        try:
            got = consumer.get(0.02)
        except Empty:
            continue
        raise AssertionError(f"{got!r} came")


class RawEnd:
    """A DEALER, or a ROUTER if it binds, that says what it is told to."""

    def __init__(self, endpoint: str, *, bind: bool = False, keys: dict[int, bytes] | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if bind else zmq.DEALER)
        for option, key in (keys or {}).items():
            self._socket.setsockopt(option, key)
        if keys and bind:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)  # it lets in any key
        self._socket.setsockopt(zmq.IPV6, 1)
        if bind:
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)
        self._heard: deque[list[bytes]] = deque()
        self.binds = bind
        self.peer = b""
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def say(self, *frames: Any) -> None:
        """Send one message; a ROUTER to the one that it last heard from."""
        self._socket.send_multipart([*([self.peer] if self.binds else []), *frames])

    def say_at_once(self, frame: bytes) -> None:
        """Send a message of one frame, or raise zmq.Again."""
        self._socket.send(frame, zmq.NOBLOCK)

    def hear(self) -> list[bytes]:
        """The frames of the next message."""
        assert not self.is_quiet(PATIENCE), "nothing came"
        return self._heard.popleft()

    def hear_header(self) -> Header:
        """The first frame of the next message, taken apart."""
        return header.unpack(memoryview(self.hear()[0]))

    def hear_of(self, kind: int) -> Header:
        """The next message of that kind; others are dropped."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = self.hear_header()
            if found.kind == kind:
                return found
        raise AssertionError(f"no {Kind.NAMES[kind]} came")

    def until_answered(self, consumer: Any) -> None:
        """Have a consumer wait in vain until it has said something to this end."""
        wait_in_vain(consumer, lambda: self._socket.poll(0))

    def hear_first(self) -> int:
        """From where on a producer that binds counts its messages, as its WELCOME says."""
        return hello_of(self.hear_of(Kind.WELCOME)).sequence

    def is_quiet(self, seconds: float) -> bool:
        """Return whether nothing comes for so many seconds.

        Empty messages do not count: ends send them to see whether a peer is there.
        """
        deadline = time.monotonic() + seconds
        while not self._heard:
            if not self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                return True
            frames = self._socket.recv_multipart()
            if self.binds:
                self.peer = frames.pop(0)
            if frames != [b""]:
                self._heard.append(frames)
        return False

    def close(self) -> None:
        """Close the socket; what was sent goes on leaving for a second."""
        self._socket.close(linger=1000)
        self._context.term()

    def __enter__(self) -> RawEnd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RawLine:
    """A connection to a tcp port on which ZeroMQ's own protocol is spoken by hand: it reads only when it is told to."""

    def __init__(self, endpoint: str, name: bytes = b"") -> None:
        """Connect as a DEALER.

        Args:
            endpoint: of a binder without keys.
            name: the routing id that it asks for.
        """
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(("127.0.0.1", int(endpoint.rpartition(":")[2])))
        self._shake_hands(b"DEALER", name)

    @classmethod
    def of_binder(cls, listener: socket.socket) -> RawLine:
        """The next connection to a port, as a ROUTER that has the port would have it."""
        line = cls.__new__(cls)
        line._socket, _ = listener.accept()
        line._socket.settimeout(PATIENCE)
        line._shake_hands(b"ROUTER")
        return line

    def _shake_hands(self, kind: bytes, name: bytes = b"") -> None:
        self._socket.sendall(_GREETING)
        self._read(len(_GREETING))
        properties = ((b"Socket-Type", kind), (b"Identity", name))
        body = b"".join(bytes([len(key)]) + key + struct.pack(">I", len(value)) + value for key, value in properties)
        self._socket.sendall(b"\x06" + struct.pack(">Q", 6 + len(body)) + b"\x05READY" + body)
        self._read(self._read(2)[1])

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:  # with a timeout Python never waits for all
            part = self._socket.recv(count - len(found))
            assert part, "it was hung up on"
            found += part
        return found

    def say(self, *frames: bytes) -> None:
        """Send messages of one frame each."""
        self._socket.sendall(b"".join(b"\x02" + struct.pack(">Q", len(frame)) + frame for frame in frames))

    def say_by_itself(self, *frames: bytes) -> None:
        """Send a message of several frames, which libzmq reads alone."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        heads = [b"\x03"] * (len(frames) - 1) + [b"\x02"]
        self._socket.sendall(
            b"".join(head + struct.pack(">Q", len(frame)) + frame for head, frame in zip(heads, frames, strict=True))
        )

    def leave_no_room_for_answers(self) -> None:
        """Have the kernel hold but a few KB of what the other side sends, which is in this very process."""
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue
                with socket.socket(fileno=os.dup(number)) as other:
                    if other.getpeername()[1:2] == self._socket.getsockname()[1:]:
                        other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                        return
        raise AssertionError("nobody here is connected to it")

    def heard(self, seconds: float) -> int:
        """Read until nothing comes for so long. Return how many bytes came."""
        self._socket.settimeout(seconds)
        count = 0
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while found := len(self._socket.recv(1 << 16)):
                count += found
        return count

    def is_hung_up_on(self, timeout: float = PATIENCE) -> bool:
        """Read all that comes. Return whether the other side ends the connection; with a timeout of 0, has ended it."""
        self._socket.settimeout(timeout)
        try:
            while self._socket.recv(1 << 16):
                pass
        except (TimeoutError, BlockingIOError):
            return False
        except ConnectionResetError:  # there was more that it had not read
            pass
        return True

    def reset(self) -> None:
        """Hang up, so that the other side is told of a broken connection. Again: nothing."""
        if self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._socket.close()

    def leave(self) -> None:
        """Close, so that all that was said is read."""
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()

    def __enter__(self) -> RawLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reset()


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def hello(role: str, kind: int = Kind.HELLO, **changes: Any) -> bytes:
    """A HELLO or WELCOME of this process that is right in all that ``changes`` does not change."""
    serializers = {"producer": {"serializer": "raw"}, "consumer": {"accepts": ("numpy", "raw", "torch_save")}}
    fields: dict[str, Any] = {"identity": identity(), "window": 64, **serializers.get(role, {}), **changes}
    return header.pack_control(kind, Hello(role, **fields))


def hello_of(found: Header) -> Hello:
    """The body of a HELLO or WELCOME."""
    return header.unpack_control(found, Hello)


def refusal_of(found: Header) -> str:
    """The reason of a REFUSED."""
    assert found.kind == Kind.REFUSED
    return header.unpack_control(found, Refusal).reason


def of_version(frame: bytes, version: int) -> bytes:
    """The same frame in another version of the format."""
    return frame[:4] + bytes([version]) + frame[5:]


def map_with(frame: bytes, **changes: Any) -> bytes:
    """A control frame whose body has some fields changed, to what the types do not allow; None takes one out."""
    found = header.unpack(memoryview(frame))
    body = {**msgspec.msgpack.decode(found.schema), **changes}
    return header.pack(
        found.kind, 0, msgspec.msgpack.encode({key: value for key, value in body.items() if value is not None})
    )
