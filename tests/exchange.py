"""A message's whole way, without a socket: what one end encodes, the other end reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.serializers.narrowing import narrowing
from tensorpipe_ipc.wire import header, message, schema

OWN = 1 << 16  # payloads of up to so many bytes become memory of their own


def sent(tree: Any, serializer: str = "raw", sequence: int = 1, wire_dtype: Any = None) -> list[bytes]:
    """A tree's frames."""
    encoder = narrowing(serializer_named(serializer), wire_dtype) or serializer_named(serializer)
    return [bytes(frame) for frame in message.encode(tree, encoder).frames(sequence)]


def encoded(tree: Any, serializer: str = "raw") -> message.EncodedMessage:
    """A tree ready to be sent."""
    return message.encode(tree, serializer_named(serializer))


def received(frames: Sequence[Any], own: int = OWN) -> Any:
    """The tree of frames, read from memory of their own as it comes from a socket."""
    return read([memoryview(bytearray(frame)) for frame in frames], own)


def read(frames: Sequence[memoryview], own: int = OWN) -> Any:
    """The tree of frames, where they are."""
    return read_parts(frames[0], frames[1:], own)


def read_parts(first: memoryview, payloads: Sequence[memoryview], own: int = OWN) -> Any:
    """The tree of a header frame and payload frames."""
    head = header.unpack(first)
    layout = schema.schema_of(head.schema)
    payloads = [head.packed, *payloads] if len(head.packed) else payloads
    layout.check(payloads)
    tree = layout.tree(head.values, payloads, serializer_named(layout.serializer), own)
    schema.keep(layout)
    return tree


def round_trip(tree: Any, serializer: str = "raw", own: int = OWN) -> Any:
    """Return a tree as it arrives."""
    return received(sent(tree, serializer), own)


def parts(frames: Sequence[bytes]) -> list[bytes]:
    """The header proper, without what is packed behind it, and the payload frames, of which that is the first."""
    head = header.unpack(memoryview(frames[0]))
    return [frames[0][: len(frames[0]) - len(head.packed)], *map(bytes, head.payloads(list(frames)))]


def forget_schemas() -> None:
    """Let the process read every schema as if for the first time."""
    known = schema._SCHEMAS
    known.clear()
    known.size = 0


def join(parts: Iterable[bytes | str]) -> bytes:
    """Bytes from bytes and hexadecimal text."""
    return b"".join(bytes.fromhex(part) if isinstance(part, str) else part for part in parts)
