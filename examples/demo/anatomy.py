"""The meaning of each byte of a message: its frames, taken apart. Layouts stand in ``wire``, next to their code."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tensorpipe_ipc.wire import header, metas, schema
from tensorpipe_ipc.wire.spec import Op

__all__ = ["Part", "parts"]

_OPS = {code: name for name, code in vars(Op).items() if isinstance(code, int)}
_PREFIX = ("magic", "wire version", "kind", "reserved", "sequence", "bytes of schema", "bytes of values")


class Part(NamedTuple):
    """Some bytes of a frame, and what they say."""

    frame: int
    start: int
    data: bytes
    meaning: str


class _Cursor:
    """Walks along one frame: what is taken is noted as a part.

    Attributes:
        data: the frame.
        at: where the next part begins.
        parts: those that were taken.
    """

    def __init__(self, frame: int, data: bytes) -> None:
        self.parts: list[Part] = []
        self._frame = frame
        self.data = data
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes that have not been taken."""
        return len(self.data) - self.at

    def peek(self) -> int:
        """The next byte, which is not taken."""
        return self.data[self.at]

    def bytes(self, size: int, meaning: str) -> bytes:
        """Take some bytes. ``{}`` in ``meaning`` is what they are as text."""
        data = self.data[self.at : self.at + size]
        if size:
            text = data.decode("utf-8", "replace")
            self.parts.append(Part(self._frame, self.at, data, meaning.replace("{}", text)))
        self.at += size
        return data

    def number(self, width: int, meaning: str) -> int:
        """Take a whole number, little-endian. ``{}`` in ``meaning`` is it."""
        value = int.from_bytes(self.data[self.at : self.at + width], "little")
        self.bytes(width, meaning.replace("{}", f"{value:,}"))
        return value


def parts(frames: Sequence[Any]) -> list[Part]:
    """A DATA message's frames, taken apart without a gap.

    Args:
        frames: as ``EncodedMessage.frames`` gives them.

    Raises:
        ProtocolError: they are no such message; the real parsers look at them first.
    """
    data = [bytes(frame) for frame in frames]
    head = header.unpack(memoryview(data[0]))
    layout = schema.schema_of(head.schema)
    layout.check(head.payloads([memoryview(frame) for frame in data]))
    cursor = _Cursor(0, data[0])
    _prefix(cursor)
    _schema(cursor)
    _values(cursor, bytes(head.values))
    cursor.bytes(cursor.left, "payloads under 64 KiB, 64 bytes aligned")
    found = cursor.parts
    for index, frame in enumerate(data[1:], 1):
        found.append(Part(index, 0, frame, f"payload: {len(frame):,} bytes, by {layout.serializer}"))
    return found


def _prefix(cursor: _Cursor) -> None:
    sizes = [struct.calcsize(f"<{code}") for code in header.PREFIX.format.lstrip("<").replace("4s", "I")]
    for size, name in zip(sizes, _PREFIX, strict=True):
        if name == "magic":
            cursor.bytes(size, "magic {}")
        elif name == "kind":
            cursor.number(size, f"kind {{}}: {header.Kind.NAMES[cursor.peek()]}")
        else:
            cursor.number(size, f"{name} {{}}")


def _schema(cursor: _Cursor) -> None:
    cursor.bytes(cursor.number(1, "schema: {} bytes of name"), "serializer {}")
    cursor.number(4, "spec of the tree: {} bytes")
    _node(cursor, 1)
    for index in range(cursor.number(4, "{} spans (memory that leaves share)")):
        cursor.number(8, f"span {index}: {{}} bytes of memory")
        cursor.number(8, f"span {index}: {{}} bytes of payload")
    for index in range(cursor.number(4, "{} leaf metas")):
        _meta(cursor, f"leaf {index}")


def _node(cursor: _Cursor, depth: int) -> None:
    """One node of the spec, and those in it."""
    indent = "· " * depth
    op = cursor.number(1, f"{indent}{_OPS[cursor.peek()]}")
    if op in (Op.NAMEDTUPLE, Op.DATACLASS):
        _text(cursor, "name")
    if op in (Op.LIST, Op.TUPLE, Op.DICT, Op.NAMEDTUPLE, Op.DATACLASS):
        count = cursor.number(4, f"{indent}of {{}}")
        if op not in (Op.LIST, Op.TUPLE):
            for _ in range(count):
                _key(cursor, indent) if op == Op.DICT else _text(cursor, "field")
        for _ in range(count):
            _node(cursor, depth + 1)
    elif op in (Op.DTYPE, Op.TYPED):
        cursor.number(1, "of dtype {}")
    elif op == Op.SIZE:
        cursor.bytes(8 * cursor.number(4, "of {} dimensions"), "its sizes")
    elif op == Op.DEVICE:
        _text(cursor, "device")


def _key(cursor: _Cursor, indent: str) -> None:
    size = cursor.number(2, f"{indent}a key of {{}} bytes")
    key = msgspec.msgpack.decode(cursor.data[cursor.at : cursor.at + size])
    cursor.bytes(size, f"{indent}key {key!r}")


def _text(cursor: _Cursor, what: str) -> None:
    cursor.bytes(cursor.number(2, f"a {what} of {{}} bytes"), f"{what} {{}}")


def _meta(cursor: _Cursor, name: str) -> None:
    leaf, _ = metas.unpack_meta(cursor.data, cursor.at)
    dtype = f"dtype {{}}: {leaf.row.torch}" if leaf.row else "no dtype: only the serializer knows"
    cursor.number(1, f"{name}: {dtype}")
    cursor.number(1, f"{name}: layout {{}}, {_layout(leaf)}")
    ndim = cursor.number(1, f"{name}: {{}} dimensions")
    cursor.number(1, "reserved")
    is_view = leaf.span is not None
    cursor.number(8, f"{name}: of span {{}}" if is_view else f"{name}: {{}} bytes of payload")
    for _ in range(ndim):
        cursor.number(8, f"{name}: size {{}}")
    if leaf.order is not None:
        cursor.bytes(ndim, f"{name}: order of the dimensions in memory")
    if is_view:
        cursor.number(8, f"{name}: begins at byte {{}}")
        for _ in range(ndim):
            cursor.number(8, f"{name}: stride {{}}")


def _layout(leaf: metas.LeafMeta) -> str:
    if leaf.row is None:
        return "opaque"
    if leaf.span is not None:
        return "a view of a span"
    return "last dimension fastest" if leaf.order is None else "dense in another order"


def _values(cursor: _Cursor, packed: bytes) -> None:
    values = msgspec.msgpack.decode(packed) if packed else []
    sizes = [len(msgspec.msgpack.encode(value)) for value in values]
    cursor.bytes(len(packed) - sum(sizes), f"values: an array of {len(values)}")
    for value, size in zip(values, sizes, strict=True):
        cursor.bytes(size, f"value {value!r}")
