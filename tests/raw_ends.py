"""An end spoken by hand: ZeroMQ frames, byte for byte as a test wants them, good or bad."""

from __future__ import annotations

import time
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

    def __init__(self, endpoint: str, *, bind: bool = False) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if bind else zmq.DEALER)
        self._socket.setsockopt(zmq.IPV6, 1)
        if bind:
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)
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
        assert self._socket.poll(int(PATIENCE * 1000)), "nothing came"
        frames = self._socket.recv_multipart()
        if self.binds:
            self.peer = frames.pop(0)
        return frames

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
        """Whether nothing comes for so long."""
        return not self._socket.poll(int(seconds * 1000))

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
