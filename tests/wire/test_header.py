"""Frame 0: golden bytes both ways, and each rule one step inside and one step outside."""

from __future__ import annotations

import struct

import pytest
from exchange import join

from tensorpipe_ipc.errors import ProtocolError, VersionMismatch
from tensorpipe_ipc.process import Identity
from tensorpipe_ipc.wire import header
from tensorpipe_ipc.wire.header import Header, Hello, Kind, Piece, Refusal

ME = Identity("h", "b", 1, 2, 3.0)
HELLO = Hello("producer", ME, 8, "raw", sequence=5, credit_pipe=(4, 70000, 1), end=7, round=2)
# A change to any of these is a change of the format: it must change header.VERSION in the same commit.
GOLDEN_CONTROL = [
    (
        Kind.HELLO,
        HELLO,
        join(
            [
                b"TPIC",
                "05 01 0000 0000000000000000 a1000000 00000000",
                b"\x8a\xa4role\xa8producer\xa8identity\x85\xa4host\xa1h\xa4boot\xa1b\xa9namespace\x01\xa3pid\x02",
                b"\xa7started\xcb\x40\x08\0\0\0\0\0\0\xa6window\x08\xaaserializer\xa3raw\xa7accepts\x90",
                b"\xa8sequence\x05\xabcredit_pipe\x93\x04\xce\x00\x01\x11\x70\x01",
                b"\xadshared_memory\xc0\xa3end\x07\xa5round\x02",
            ]
        ),
    ),
    (
        Kind.WELCOME,
        Hello("consumer", ME, 64, accepts=("raw", "numpy")),
        join(
            [
                b"TPIC",
                "05 02 0000 0000000000000000 a1000000 00000000",
                b"\x8a\xa4role\xa8consumer\xa8identity\x85\xa4host\xa1h\xa4boot\xa1b\xa9namespace\x01\xa3pid\x02",
                b"\xa7started\xcb\x40\x08\0\0\0\0\0\0\xa6window\x40\xaaserializer\xa0\xa7accepts\x92\xa3raw\xa5numpy",
                b"\xa8sequence\0\xabcredit_pipe\xc0",
                b"\xadshared_memory\xc0\xa3end\0\xa5round\0",
            ]
        ),
    ),
    (
        Kind.REFUSED,
        Refusal("no"),
        join([b"TPIC", "05 03 0000 0000000000000000 0b000000 00000000", b"\x81\xa6reason\xa2no"]),
    ),
]
GOLDEN_PLAIN = [
    (Kind.CREDIT, 258, b"", b"", join([b"TPIC", "05 05 0000 0201000000000000 00000000 00000000"])),
    (Kind.GOODBYE, 259, b"", b"", join([b"TPIC", "05 06 0000 0301000000000000 00000000 00000000"])),
    (Kind.DATA, 1, b"ab", b"c", join([b"TPIC", "05 04 0000 0100000000000000 02000000 01000000", b"abc"])),
]


def prefix(
    magic: bytes = b"TPIC", version: int = 5, kind: int = 4, zero: int = 0, lengths: tuple[int, int] = (0, 0)
) -> memoryview:
    return memoryview(struct.pack("<4sBBHQII", magic, version, kind, zero, 1, *lengths) + bytes(sum(lengths)))


@pytest.mark.parametrize(("kind", "body", "golden"), GOLDEN_CONTROL)
def test_control_messages_are_these_bytes(kind: int, body: Hello | Refusal, golden: bytes) -> None:
    """Each control message with a body has these bytes, and these bytes are that message."""
    assert header.VERSION == 5
    assert header.pack_control(kind, body) == golden
    head = header.unpack(memoryview(golden))
    assert head.kind == kind
    assert header.unpack_control(head, type(body)) == body


@pytest.mark.parametrize(("kind", "sequence", "schema", "values", "golden"), GOLDEN_PLAIN)
def test_other_headers_are_these_bytes(kind: int, sequence: int, schema: bytes, values: bytes, golden: bytes) -> None:
    """DATA, CREDIT and GOODBYE have these bytes, and these bytes are those headers."""
    assert header.pack(kind, sequence, schema, values) == golden
    assert header.unpack(memoryview(golden)) == Header(kind, sequence, schema, memoryview(values), memoryview(b""))


def test_a_piece_is_these_bytes() -> None:
    """A PIECE says where it begins, how long all are together, as they came and restored, and its dtypes."""
    golden = join(
        [
            b"TPIC",
            "05 07 0000 0200000000000000 1a000000 00000000",
            "0001000000000000 0000020000000000 0000040000000000 0a 0b",
        ]
    )
    piece = Piece(256, 1 << 17, 1 << 18, 10, 11)
    assert header.pack_piece(2, piece) == golden
    assert header.piece_of(header.unpack(memoryview(golden))) == piece


def test_what_follows_the_values_is_the_packed_payloads() -> None:
    """A DATA header's frame goes on with the small payloads, which are the first payload frame; other kinds end there."""
    head = header.unpack(memoryview(header.pack(Kind.DATA, 1, b"ab", b"c") + b"payload"))
    assert (head.schema, bytes(head.values), bytes(head.packed)) == (b"ab", b"c", b"payload")
    assert head.payloads([b"frame 0", b"bulk"]) == [b"payload", b"bulk"]
    bare = header.unpack(memoryview(header.pack(Kind.DATA, 1)))
    assert bare.payloads([b"frame 0", b"bulk"]) == [b"bulk"]


def test_the_sequence_is_64_bits_wide() -> None:
    """The highest sequence number fits."""
    assert header.unpack(memoryview(header.pack(Kind.CREDIT, (1 << 64) - 1))).sequence == (1 << 64) - 1


@pytest.mark.parametrize(
    ("inside", "outside", "says"),
    [
        (prefix(), prefix()[:-1], "a header of 23 bytes, the least is 24"),
        (prefix(), prefix(magic=b"TPID"), "magic b'TPID', expected b'TPIC'"),
        (prefix(kind=1), prefix(kind=0), "message kind 0"),
        (prefix(kind=7, lengths=(26, 0)), prefix(kind=8), "message kind 8"),
        (prefix(zero=0), prefix(zero=1), "reserved bytes 1"),
        (prefix(zero=0), prefix(zero=1 << 8), "reserved bytes 256"),
        (prefix(lengths=(3, 4)), prefix(lengths=(3, 4))[:-1], "with 6 left"),
        (prefix(lengths=(0, 0)), prefix(lengths=(0, 3))[:-1], "values of 3 bytes in a header with 2 left"),
        (prefix(kind=5), memoryview(bytes(prefix(kind=5)) + b"x"), "CREDIT with 0, 0 and 1 bytes where it has none"),
        (prefix(kind=1, lengths=(4072, 0)), prefix(kind=1, lengths=(4073, 0)), "HELLO header of 4097 bytes.* 4096"),
        (prefix(lengths=(4073, 0)), prefix(kind=2, lengths=(4073, 0)), "WELCOME header of 4097 bytes.* 4096"),
        (prefix(lengths=(8388584, 0)), prefix(lengths=(8388585, 0)), "DATA header of 8388609 bytes.* 8388608"),
        (
            prefix(kind=1, lengths=(4, 0)),
            prefix(kind=1, lengths=(4, 1)),
            "HELLO with 4, 1 and 0 bytes where it has none",
        ),
        (prefix(kind=3, lengths=(4, 0)), prefix(kind=3, lengths=(0, 4)), "REFUSED with 0, 4 and 0 bytes"),
        (prefix(kind=5), prefix(kind=5, lengths=(1, 0)), "CREDIT with 1, 0 and 0 bytes"),
        (prefix(kind=6), prefix(kind=6, lengths=(1, 0)), "GOODBYE with 1, 0 and 0 bytes"),
        (prefix(kind=7, lengths=(26, 0)), prefix(kind=7, lengths=(25, 0)), "PIECE with 25, 0 and 0 bytes"),
        (prefix(kind=7, lengths=(26, 0)), prefix(kind=7, lengths=(27, 0)), "PIECE with 27, 0 and 0 bytes"),
        (prefix(kind=7, lengths=(26, 0)), prefix(kind=7, lengths=(26, 1)), "PIECE with 26, 1 and 0 bytes"),
    ],
)
def test_each_rule_has_two_sides(inside: memoryview, outside: memoryview, says: str) -> None:
    """One step inside a rule the header is read; one step outside it is refused, and the value is named."""
    header.unpack(inside)
    with pytest.raises(ProtocolError, match=says) as raised:
        header.unpack(outside)
    assert type(raised.value) is ProtocolError


@pytest.mark.parametrize("version", [0, 4, 6, 255])
def test_another_version_is_named_with_ours(version: int) -> None:
    """A header of another version says both, whatever else it holds."""
    with pytest.raises(VersionMismatch, match=rf"version {version}, this process speaks version 5"):
        header.unpack(prefix(version=version, kind=99, zero=3))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "truncated"),
        (b"\xc0", "Expected `object`"),
        (b"\x80", "missing required field `reason`"),
        (b"\x81\xa6reason\x01", "Expected `str`, got `int`"),
        (b"\x82\xa6reason\xa2no\xa1x\x01", "unknown field `x`"),
        (b"\x81\xa6reason\xa2no\x00", "trailing"),
        (b"\x81\xa6reason\xa1\xff", ".*(utf|UTF).?8"),
        (b"\xdf\xff\xff\xff\xff", "truncated"),
    ],
)
def test_a_body_that_is_none_is_refused(body: bytes, says: str) -> None:
    """A control body with a field missing, unknown or of the wrong type is a ProtocolError that says so."""
    head = header.unpack(memoryview(header.pack(Kind.REFUSED, 0, body)))
    with pytest.raises(ProtocolError, match=f"a REFUSED that cannot be read: .*{says}"):
        header.unpack_control(head, Refusal)
