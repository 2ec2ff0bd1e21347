"""Schemas and whole messages: golden bytes, and each rule one step inside and one step outside."""

from __future__ import annotations

import gc
import struct
import tracemalloc
from typing import Any

import pytest
import torch
import zoo
from exchange import forget_schemas, join, read, received, sent

from tensorpipe_ipc.errors import ProtocolError, UnknownSerializer
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.wire import header, metas, schema
from tensorpipe_ipc.wire.dtypes import BY_CODE
from tensorpipe_ipc.wire.layout import BULK
from tensorpipe_ipc.wire.metas import MAX_NBYTES
from tensorpipe_ipc.wire.schema import Schema

TRUE_S = {"x": torch.tensor([1, 2], dtype=torch.int16), "n": 5, "t": [torch.tensor(True), "s"]}
SHARED = torch.arange(4, dtype=torch.uint8)
# A change to any of these is a change of the format: it must change header.VERSION in the same commit.
GOLDEN: dict[str, tuple[Any, str, list[bytes]]] = {
    "one tensor": (
        torch.tensor([1.0, -2.0]),
        "raw",
        [
            join(
                [
                    b"TPIC",
                    "06 04 0000 0300000000000000 25000000 00000000",
                    b"\x03raw",
                    "01000000 10",
                    "00000000 01000000",
                    "0b 00 01 00 0800000000000000 0200000000000000",
                ]
            ),
            struct.pack("<2f", 1.0, -2.0),
        ],
    ),
    "a tree": (
        TRUE_S,
        "raw",
        [
            join(
                [
                    b"TPIC",
                    "06 04 0000 0300000000000000 4a000000 04000000",
                    b"\x03raw",
                    "1a000000 22 03000000 0200 a178 0200 a16e 0200 a174 10 01 20 02000000 10 01",
                    "00000000 02000000",
                    "05 00 01 00 0400000000000000 0200000000000000",
                    "01 00 00 00 0100000000000000",
                    "92 05 a173",
                ]
            ),
            join(["01000200", bytes(60), "01"]),
        ],
    ),
    "shared memory": (
        [SHARED, SHARED[2:]],
        "raw",
        [
            join(
                [
                    b"TPIC",
                    "06 04 0000 0300000000000000 6f000000 00000000",
                    b"\x03raw",
                    "07000000 20 02000000 10 10",
                    "01000000 0400000000000000 0400000000000000",
                    "02000000",
                    "02 02 01 00 0000000000000000 0400000000000000 0000000000000000 0100000000000000",
                    "02 02 01 00 0000000000000000 0200000000000000 0200000000000000 0100000000000000",
                ]
            ),
            bytes([0, 1, 2, 3]),
        ],
    ),
    "numpy": (
        torch.tensor([258], dtype=torch.int16),
        "numpy",
        [
            join(
                [
                    b"TPIC",
                    "06 04 0000 0300000000000000 27000000 00000000",
                    b"\x05numpy",
                    "01000000 10",
                    "00000000 01000000",
                    "05 00 01 00 8200000000000000 0100000000000000",
                ]
            ),
            b"\x93NUMPY\x01\x00\x76\x00{'descr': '<i2', 'fortran_order': False, 'shape': (1,), }".ljust(127)
            + b"\n\2\1",
        ],
    ),
    "values": (
        [1, -1, 2.5, True, "é", None],
        "raw",
        [
            join(
                [
                    b"TPIC",
                    "06 04 0000 0300000000000000 1b000000 10000000",
                    b"\x03raw",
                    "0b000000 20 06000000 01 01 01 01 01 00",
                    "00000000 00000000",
                    "95 01 ff cb4004000000000000 c3 a2c3a9",
                ]
            )
        ],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_messages_are_these_bytes(name: str) -> None:
    """Some whole messages have these frames, and these frames are those messages."""
    tree, serializer, golden = GOLDEN[name]
    assert sent(tree, serializer, sequence=3) == [b"".join(golden)]  # small payloads go on where the header ends
    zoo.same(tree, received([b"".join(golden)]), strides=False)


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def meta(nbytes: int, dims: tuple[int, ...] = (4,), code: int = 2, own: int = 0) -> bytes:
    return struct.pack("<BBBBQ", code, 0, len(dims), own, nbytes) + struct.pack(f"<{len(dims)}q", *dims)


def view(span: int, offset: int, size: int, stride: int = 1, code: int = 2, own: int = 0) -> bytes:
    return struct.pack("<BBBBQqQq", code, 2, 1, own, span, size, offset, stride)


def layout(
    spec: bytes = b"\x10", spans: tuple[tuple[int, int], ...] = (), metas: tuple[bytes, ...] = (meta(4),)
) -> bytes:
    packed = b"".join(struct.pack("<QQ", *span) for span in spans)
    return b"\x03raw" + u32(len(spec)) + spec + u32(len(spans)) + packed + u32(len(metas)) + b"".join(metas)


TWO = b"\x20" + u32(2) + b"\x10\x10"


@pytest.mark.parametrize(
    ("inside", "outside", "says"),
    [
        (layout(), b"", "schema cut short at byte 0"),
        (layout(), layout()[:5], "schema cut short"),
        (layout(), layout()[:-1], "tensor meta cut short"),
        (layout(), layout() + b"x", "1 bytes after the end of the schema"),
        (layout(), b"\x03raw" + u32(1 << 31) + b"\x10", "schema cut short at byte 4"),
        (layout(), layout()[: -len(meta(4)) - 4] + u32(2) + meta(4), "a count of 2|cut short"),
        (layout(), layout()[: -len(meta(4)) - 8] + u32(1, 1) + meta(4), "a span of|cut short|a count of|after the end"),
        (layout(), layout(metas=(meta(4), meta(4))), "2 leaf metas for a tree of 1 leaves"),
        (layout(TWO, metas=(meta(4),) * 2), layout(TWO), "1 leaf metas for a tree of 2 leaves"),
        (
            layout(TWO, ((4, 4),), (view(0, 0, 4), view(0, 2, 2))),
            layout(TWO, ((4, 4),), (view(0, 0, 4), view(1, 2, 2))),
            "a view of span 1, of which there are 1",
        ),
        (
            layout(TWO, ((4, 4),), (view(0, 0, 4), view(0, 2, 2))),
            layout(TWO, ((4, 4),), (view(0, 0, 4), view(0, 3, 2))),
            "a view up to byte 5 of a span of 4",
        ),
        (
            layout(spans=((8, 8),), metas=(view(0, 0, 2, 7),)),
            layout(spans=((8, 8),), metas=(view(0, 0, 2, 8),)),
            "a view up to byte 9 of a span of 8",
        ),
        (
            layout(spans=((8, 8),), metas=(view(0, 8, 0),)),
            layout(spans=((8, 8),), metas=(view(0, 9, 0),)),
            "a view up to byte 9 of a span of 8",
        ),
        (
            layout(spans=((8, 8),), metas=(view(0, 4, 1, 1, 11),)),
            layout(spans=((8, 8),), metas=(view(0, 2, 1, 1, 11),)),
            "no multiple of its 4-byte items",
        ),
        (
            layout(spans=((MAX_NBYTES, 8),)),
            layout(spans=((MAX_NBYTES + 1, 8),)),
            f"a span of {MAX_NBYTES + 1} bytes, the limit is {MAX_NBYTES}",
        ),
        (layout(spans=((8, MAX_NBYTES),)), layout(spans=((8, MAX_NBYTES + 1),)), "a span of"),
        (layout(), b"\x03raw" + u32(1) + b"\x10" + bytes(3), "schema cut short at byte 9"),
        (
            layout(spans=((0, 0),), metas=(meta(4),)),
            b"\x03raw" + u32(1) + b"\x10" + u32(1) + bytes(15),
            "a count of 1 at byte 9 of the schema, with 15 bytes left",
        ),
        (
            layout(TWO, ((8, 8),) * 2, (view(0, 0, 2), view(1, 4, 2))),
            layout(TWO, ((8, 8),) * 3, (view(0, 0, 2), view(1, 4, 2))),
            "3 spans for a tree of 2 leaves",
        ),
        *(
            (
                layout(b"\x20" + u32(2) + bytes(spec) + b"\x10", ((8, 8),), (view(0, 0, 8), view(0, 0, 8))),
                layout(b"\x20" + u32(2) + bytes(spec) + b"\x10", ((8, 8),), (view(0, *part), view(0, 0, 8))),
                "a storage that is a part of span 0; it must be all of it",
            )
            for spec in ([0x16], [0x17, 2])
            for part in ((0, 7), (1, 7))
        ),
        (
            layout(TWO, ((8, 8),), (view(0, 0, 2, code=10, own=11), view(0, 4, 2, code=10, own=11))),
            layout(TWO, ((8, 8),), (view(0, 0, 2, code=10, own=11), view(0, 4, 2, code=10))),
            "views of span 0 that were narrowed, and others that were not alike",
        ),
        (
            layout(TWO, ((8, 8),), (view(0, 0, 2, code=10, own=11), view(0, 4, 2, code=10, own=11))),
            layout(TWO, ((8, 8),), (view(0, 0, 2, code=10), view(0, 4, 2, code=10, own=11))),
            "views of span 0 that were narrowed, and others that were not alike",
        ),
        *(
            (
                layout(bytes(spec), metas=(meta(4, code=16),)),
                layout(bytes(spec), metas=(meta(4, code=16, own=12),)),
                "bytes of torch.float8_e5m2 that were torch.float64: only numbers are narrowed",
            )
            for spec in ([0x15], [0x16], [0x17, 12])
        ),
    ],
)
def test_each_rule_has_two_sides(inside: bytes, outside: bytes, says: str) -> None:
    """One step inside a rule the schema is taken; one step outside it is refused, and the value is named."""
    Schema(inside)
    with pytest.raises(ProtocolError, match=says):
        Schema(outside)


def message(schema_bytes: bytes, *frames: bytes, values: bytes = b"") -> list[memoryview]:
    return [memoryview(bytearray(frame)) for frame in (header.pack(4, 1, schema_bytes, values), *frames)]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([], "0 payload frames, the header announces 2"),
        ([bytes(68)], "1 payload frames, the header announces 2"),
        ([bytes(68), bytes(BULK), b""], "3 payload frames"),
        ([bytes(67), bytes(BULK)], "payload frame 0 is of 67 bytes, the header announces 68"),
        ([bytes(69), bytes(BULK)], "payload frame 0 is of 69 bytes"),
        ([bytes(68), bytes(BULK - 1)], f"payload frame 1 is of {BULK - 1} bytes"),
        ([bytes(68), bytes(BULK + 1)], f"payload frame 1 is of {BULK + 1} bytes"),
        ([bytes(BULK), bytes(68)], f"payload frame 0 is of {BULK} bytes"),
    ],
)
def test_frames_must_be_as_announced(frames: list[bytes], says: str, again: bool) -> None:
    """Frames missing, extra, short, long or exchanged are refused, at the first message of a stream and later."""
    forget_schemas()
    data = layout(b"\x20" + u32(3) + b"\x10" * 3, metas=(meta(4), meta(BULK, (BULK,)), meta(4)))
    if again:
        assert len(read(message(data, bytes(68), bytes(BULK)))) == 3
    with pytest.raises(ProtocolError, match=says):
        read(message(data, *frames))


@pytest.mark.parametrize("nbytes", [3, 5])
def test_a_block_must_be_as_announced(nbytes: int) -> None:
    """Payloads in a block that are a byte short or long are refused."""
    raw = serializer_named("raw")
    assert Schema(layout()).tree_in(b"", memoryview(bytearray(4)), raw).tolist() == [0] * 4
    with pytest.raises(ProtocolError, match=f"payloads of {nbytes} bytes, the schema announces 4"):
        Schema(layout()).tree_in(b"", memoryview(bytearray(nbytes)), raw)


@pytest.mark.parametrize(("nbytes", "dims"), [(3, (4,)), (5, (4,)), (4, (5,)), (0, (1,)), (4, (0,)), (1, (0,))])
@pytest.mark.parametrize("serializer", ["raw", "numpy", "torch_save"])
def test_nbytes_must_agree_with_the_shape(serializer: str, nbytes: int, dims: tuple[int, ...]) -> None:
    """A payload of another size than its shape has is refused by each serializer."""
    data = layout(metas=(meta(nbytes, dims),)).replace(b"\x03raw", bytes([len(serializer)]) + serializer.encode())
    with pytest.raises(ProtocolError):
        read(message(data, *([bytes(nbytes)] if nbytes else [])))


VALUES = layout(b"\x20" + u32(2) + b"\x01\x01", metas=())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (b"", "-1 values for a tree of 2"),
        (b"\x91\x01", "1 values for a tree of 2"),
        (b"\x93\x01\x01\x01", "3 values for a tree of 2"),
        (b"\x92\x01", "values that cannot be read: .*truncated"),
        (b"\x92\x01\x01\x01", "values that cannot be read: .*trailing"),
        (b"\x92\x01\xc0", "values that cannot be read: Expected .*None"),
        (b"\x92\x01\x90", "values that cannot be read: Expected .*array"),
        (b"\x92\x01\x80", "values that cannot be read: Expected .*object"),
        (b"\x92\x01\xc4\x01x", "values that cannot be read: Expected .*bytes"),
        (b"\x92\x01\xd4\x01\x00", "values that cannot be read: Expected .*ext"),
        (b"\x92\x01\xa1\xff", "values that cannot be read"),
        (b"\x92\x01\xc1", "values that cannot be read"),
        (b"\xdd\xff\xff\xff\xff", "4294967295 values for a tree of 2"),
        (b"\xdc\x00", "0 values for a tree of 2"),
        (b"\x82\x01\x01\x02\x02", "-1 values for a tree of 2"),
    ],
)
def test_values_must_be_as_many_and_of_their_types(values: bytes, says: str) -> None:
    """Values of a wrong count, type or encoding are refused; as many as the tree has are taken, in every spelling."""
    assert read(message(VALUES, values=b"\x92\x01\xa1x")) == [1, "x"]
    assert read(message(VALUES, values=b"\xdd\x00\x00\x00\x02\xcd\x00\x01\xd9\x01x")) == [1, "x"]
    with pytest.raises(ProtocolError, match=says):
        read(message(VALUES, values=values))


def test_values_without_a_place_are_refused() -> None:
    """A tree that has no values takes none."""
    with pytest.raises(ProtocolError, match="1 values for a tree of 0"):
        read(message(layout(b"\x00", metas=()), values=b"\x91\x01"))


def test_an_unknown_serializer_lists_the_known_ones() -> None:
    """A message of a serializer that is not registered here names it, and those that are."""
    data = layout().replace(b"\x03raw", b"\x03rar")
    with pytest.raises(UnknownSerializer, match=r"unknown serializer 'rar' \(known: numpy, raw, torch_save\)"):
        read(message(data, b"abcd"))


def test_a_steady_stream_reads_its_schema_once() -> None:
    """Equal schemas are one object. Those that are kept count for 16 MiB at most: the oldest go, and are read anew."""

    def data(number: int) -> bytes:
        text = b"%04d" % number * 15_000
        return layout(b"\x22" + u32(1) + struct.pack("<H", 60_003) + b"\xda\xea\x60" + text + b"\x10")

    def kept(number: int) -> schema.Schema:
        found = schema.schema_of(data(number))
        schema.keep(found)
        return found

    forget_schemas()
    first = last = kept(0)
    cost, number = first.cost, 0
    while schema.schema_of(bytes(bytearray(data(0)))) is first:
        number += 1
        last = kept(number)
        cost += last.cost
        assert cost <= (1 << 24) + last.cost
    assert cost > 1 << 24
    assert schema.schema_of(data(number)) is last
    assert number > 1
    assert schema.schema_of(data(1)) is not first
    assert schema.schema_of(data(1)) is schema.schema_of(data(1))
    forget_schemas()


def test_what_several_threads_read_at_a_time_is_kept_and_counted_once() -> None:
    def data(text: bytes) -> bytes:
        return layout(b"\x22" + u32(1) + struct.pack("<H", 60_003) + b"\xda\xea\x60" + text * 60_000 + b"\x10")

    forget_schemas()
    first = schema.schema_of(data(b"a"))
    schema.keep(first)
    read_by_threads = [schema.schema_of(data(b"b")) for _ in range(10)]
    for each in read_by_threads:
        schema.keep(each)
    schema.keep(schema.schema_of(data(b"c")))
    assert schema.schema_of(data(b"a")) is first
    assert schema.schema_of(data(b"b")) is read_by_threads[0]
    forget_schemas()


class Offset:
    """A serializer that decodes to a slice of a larger memory."""

    name = "offset"
    zero_copy = True

    def encode(self, tensor: torch.Tensor) -> Any:
        return serializer_named("raw").encode(tensor)

    def decode(self, _: Any, payload: memoryview) -> torch.Tensor:
        return torch.frombuffer(bytearray(b"12345678" + payload), dtype=torch.uint8)[8:]


def test_views_count_from_where_the_span_begins() -> None:
    """A span that a serializer decodes into the midst of a larger memory still gives its views the right items."""
    frames = [memoryview(bytearray(frame)) for frame in sent([SHARED, SHARED[2:]])]
    head = header.unpack(frames[0])
    tree = schema.schema_of(head.schema).tree(head.values, head.payloads(frames), Offset(), 0)
    assert [leaf.tolist() for leaf in tree] == [[0, 1, 2, 3], [2, 3]]


def _of_64_views(index: int) -> bytes:
    strides = struct.pack("<64q", *range(300 + index, 300 + 64 * 1000, 1000))
    return struct.pack("<BBBBQ", 2, 2, 64, 0, 0) + struct.pack("<64qQ", *(1,) * 64, 0) + strides


def _of_64_orders(index: int) -> bytes:
    order = bytes(range(index % 64, 64)) + bytes(range(index % 64))
    return struct.pack("<BBBBQ", 2, 1, 64, 0, 1) + struct.pack("<64q", *(1,) * 64) + order


def _of_keys(begin: bytes) -> bytes:
    """A dict of tuples, each of which ends in two numbers of its own."""
    keys = [begin + bytes(divmod(index, 100)) for index in range(MANY)]
    packed = b"".join(struct.pack("<H", len(key)) + key for key in keys)
    return layout(b"\x22" + u32(MANY) + packed + bytes(MANY), metas=())


MANY = 40
WIDE: dict[str, tuple[bytes, int]] = {  # a schema, and the bytes of its payloads
    "views of 64 dimensions": (
        layout(b"\x20" + u32(MANY) + b"\x10" * MANY, ((8, 8),), tuple(map(_of_64_views, range(MANY)))),
        8,
    ),
    "orders of 64 dimensions": (
        layout(b"\x20" + u32(MANY) + b"\x10" * MANY, (), tuple(map(_of_64_orders, range(MANY)))),
        64 * MANY - 63,
    ),
    "keys of small numbers": (_of_keys(b"\xdc\x01\x90" + bytes(398)), 0),
    "keys that nest": (_of_keys(b"\x96" + (b"\x91" * 99 + b"\x01") * 4), 0),
    "keys of tuples": (_of_keys(b"\xdc\x00\xf0" + b"\x91\x01" * 238), 0),
    "spans": (
        layout(b"\x20" + u32(MANY) + b"\x10" * MANY, ((8, 8),) * MANY, tuple(view(span, 0, 8) for span in range(MANY))),
        64 * MANY - 56,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_a_schema_costs_no_more_memory_than_it_counts_for(name: str) -> None:
    """Of what a peer has this process keep, the table of schemas knows the size: whatever the schema is made of."""
    data, nbytes = WIDE[name]
    frames = message(data, *([bytes(nbytes)] if nbytes else []))
    forget_schemas()
    gc.collect()
    tracemalloc.start()
    try:
        read(frames)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(data) < kept <= schema.schema_of(data).cost
    forget_schemas()


def test_what_is_received_stays_in_no_senders_table() -> None:
    """Shapes that a peer makes up, of every dtype, are kept with their schema, which is bounded, and nowhere else."""
    before = {dtype: dict(known) for dtype, known in metas.METAS.items()}
    for code, row in BY_CODE.items():
        shapes = tuple(meta(0, (0, 1 + code, size), code) for size in range(20))
        got = read(message(layout(b"\x20" + u32(20) + b"\x10" * 20, metas=shapes)))
        assert {tensor.dtype for tensor in got} == {row.torch}
    assert {dtype: dict(known) for dtype, known in metas.METAS.items()} == before
    forget_schemas()
