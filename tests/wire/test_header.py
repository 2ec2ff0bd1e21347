"""Frame 0: golden bytes both ways, and each rule one step inside and one step outside."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from exchange import join

from tensorpipe_ipc.errors import ProtocolError, VersionMismatch
from tensorpipe_ipc.process import Identity
from tensorpipe_ipc.wire import header
from tensorpipe_ipc.wire.header import (
    MAX_CONTROL,
    MAX_NAMES,
    Ending,
    Header,
    Hello,
    Kind,
    Piece,
    Refusal,
    SharedMemoryTerms,
    ending_of,
)

ME = Identity("h", "b", 1, 2, 3.0)
HELLO = Hello("producer", ME, 8, "raw", sequence=5, end=7, round=2)
# A change to any of these is a change of the format: it must change header.VERSION in the same commit.
GOLDEN_CONTROL = [
    (
        Kind.HELLO,
        HELLO,
        join(
            [
                b"TPIC",
                "06 01 0000 0000000000000000 95000000 00000000",
                b"\x8a\xa4role\xa8producer\xa8identity\x85\xa4host\xa1h\xa4boot\xa1b\xa9namespace\x01\xa3pid\x02",
                b"\xa7started\xcb\x40\x08\0\0\0\0\0\0\xa6window\x08\xaaserializer\xa3raw\xa7accepts\x90",
                b"\xa8sequence\x05",
                b"\xadshared_memory\xc0\xa3end\x07\xa6folder\0\xa5round\x02",
            ]
        ),
    ),
    (
        Kind.WELCOME,
        Hello("consumer", ME, 64, accepts=("raw", "numpy")),
        join(
            [
                b"TPIC",
                "06 02 0000 0000000000000000 9c000000 00000000",
                b"\x8a\xa4role\xa8consumer\xa8identity\x85\xa4host\xa1h\xa4boot\xa1b\xa9namespace\x01\xa3pid\x02",
                b"\xa7started\xcb\x40\x08\0\0\0\0\0\0\xa6window\x40\xaaserializer\xa0\xa7accepts\x92\xa3raw\xa5numpy",
                b"\xa8sequence\0",
                b"\xadshared_memory\xc0\xa3end\0\xa6folder\0\xa5round\0",
            ]
        ),
    ),
    (
        Kind.REFUSED,
        Refusal("no"),
        join([b"TPIC", "06 03 0000 0000000000000000 0b000000 00000000", b"\x81\xa6reason\xa2no"]),
    ),
    (
        Kind.GOODBYE,
        Ending("ValueError: no", "pid 2"),
        join(
            [
                b"TPIC",
                "06 06 0000 0000000000000000 25000000 00000000",
                b"\x82\xa7failure\xaeValueError: no\xa6origin\xa5pid 2",
            ]
        ),
    ),
    (
        Kind.GOODBYE,
        Ending(to=7),
        join([b"TPIC", "06 06 0000 0000000000000000 05000000 00000000", b"\x81\xa2to\x07"]),
    ),
]
GOLDEN_PLAIN = [
    (Kind.CREDIT, 258, b"", b"", join([b"TPIC", "06 05 0000 0201000000000000 00000000 00000000"])),
    (Kind.GOODBYE, 259, b"", b"", join([b"TPIC", "06 06 0000 0301000000000000 00000000 00000000"])),
    (Kind.DATA, 1, b"ab", b"c", join([b"TPIC", "06 04 0000 0100000000000000 02000000 01000000", b"abc"])),
]


def prefix(
    magic: bytes = b"TPIC", version: int = 6, kind: int = 4, zero: int = 0, lengths: tuple[int, int] = (0, 0)
) -> memoryview:
    return memoryview(struct.pack("<4sBBHQII", magic, version, kind, zero, 1, *lengths) + bytes(sum(lengths)))


@pytest.mark.parametrize(("kind", "body", "golden"), GOLDEN_CONTROL)
def test_control_messages_are_these_bytes(kind: int, body: Hello | Refusal | Ending, golden: bytes) -> None:
    """Each control message with a body has these bytes, and these bytes are that message."""
    assert header.VERSION == 6
    assert header.pack_control(kind, body) == golden
    head = header.unpack(memoryview(golden))
    assert head.kind == kind
    assert header.unpack_control(head, type(body)) == body


@pytest.mark.parametrize(("kind", "sequence", "schema", "values", "golden"), GOLDEN_PLAIN)
def test_other_headers_are_these_bytes(kind: int, sequence: int, schema: bytes, values: bytes, golden: bytes) -> None:
    """DATA, CREDIT and GOODBYE have these bytes, and these bytes are those headers."""
    assert header.pack(kind, sequence, schema, values) == golden
    assert header.unpack(memoryview(golden)) == Header(kind, sequence, schema, memoryview(values), memoryview(b""))


def test_how_an_end_ended_is_cut_and_shown() -> None:
    """A failure comes with at most 1,024 bytes of text, and nothing in it moves a terminal; a goodbye has no body."""
    assert header.pack_goodbye(3, Ending()) == header.pack(Kind.GOODBYE, 3)
    assert header.ending_of(header.unpack(memoryview(header.pack_goodbye(3, Ending())))) == Ending()
    long = Ending("\x1b" + "x" * 1500, "\n" + "y" * 400)
    for frame in (header.pack_goodbye(3, long), header.pack_goodbye(3, header.failed(long.failure, long.origin))):
        read = header.ending_of(header.unpack(memoryview(frame)))
        assert (len(read.failure.encode()), read.failure[:2], len(read.origin.encode())) == (1024, "?x", 300)
    with pytest.raises(ProtocolError, match="a GOODBYE that cannot be read"):
        header.ending_of(header.unpack(memoryview(header.pack(Kind.GOODBYE, 3, b"x"))))


def test_a_piece_is_these_bytes() -> None:
    """A PIECE says where it begins, and how long all are together."""
    golden = join(
        [
            b"TPIC",
            "06 07 0000 0200000000000000 10000000 00000000",
            "0001000000000000 0000020000000000",
        ]
    )
    piece = Piece(256, 1 << 17)
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
        (prefix(kind=7, lengths=(16, 0)), prefix(kind=8), "message kind 8"),
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
        (prefix(kind=6, lengths=(4, 0)), prefix(kind=6, lengths=(4, 1)), "GOODBYE with 4, 1 and 0 bytes"),
        (prefix(kind=7, lengths=(16, 0)), prefix(kind=7, lengths=(15, 0)), "PIECE with 15, 0 and 0 bytes"),
        (prefix(kind=7, lengths=(16, 0)), prefix(kind=7, lengths=(17, 0)), "PIECE with 17, 0 and 0 bytes"),
        (prefix(kind=7, lengths=(16, 0)), prefix(kind=7, lengths=(16, 1)), "PIECE with 16, 1 and 0 bytes"),
    ],
)
def test_each_rule_has_two_sides(inside: memoryview, outside: memoryview, says: str) -> None:
    """One step inside a rule the header is read; one step outside it is refused, and the value is named."""
    header.unpack(inside)
    with pytest.raises(ProtocolError, match=says) as raised:
        header.unpack(outside)
    assert type(raised.value) is ProtocolError


@pytest.mark.parametrize("version", [0, 5, 7, 255])
def test_another_version_is_named_with_ours(version: int) -> None:
    """A header of another version says both, whatever else it holds."""
    with pytest.raises(VersionMismatch, match=rf"version {version}, this process speaks version 6"):
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


@pytest.mark.parametrize(("length", "is_cut"), [(10, False), (11, True), (5000, True)])
@pytest.mark.parametrize("letter", ["a", "é", "\N{SNOWMAN}", "\U0001f600", "\0"])
def test_where_a_text_is_cut(letter: str, length: int, is_cut: bool) -> None:
    """Beyond so many bytes, not letters, and never within one; the end says so."""
    text, limit = letter * length, 10 * len(letter.encode())
    found = header.cut(text, limit)
    assert (found != text) == is_cut
    assert limit - 3 - 4 < len(found.encode()) <= limit
    assert found.rstrip("…") == letter * len(found.rstrip("…"))
    assert found.endswith("…") == is_cut


def _hello_taken_in(host: str, why_not: str) -> tuple[str, str]:
    terms = SharedMemoryTerms("auto", 1, why_not=why_not)
    said = header.pack_control(Kind.HELLO, Hello("producer", Identity(host, "b", 1, 2, 3.0), 8, shared_memory=terms))
    found = header.unpack_control(header.unpack(memoryview(said)), Hello)
    assert found.shared_memory is not None
    return found.identity.host, found.shared_memory.why_not


def test_what_a_stranger_says_is_cut() -> None:
    """An end repeats at most 255 bytes of a stranger's host name, and 512 of its reason against shared memory."""
    assert _hello_taken_in("h" * 255, "w" * 512) == ("h" * 255, "w" * 512)
    assert _hello_taken_in("h" * 256, "w" * 513) == ("h" * 252 + "…", "w" * 509 + "…")
    assert _hello_taken_in("h" * 1500, "w") == ("h" * 252 + "…", "w")
    assert _hello_taken_in("h", "w" * 1500) == ("h", "w" * 509 + "…")


def test_a_long_reason_is_cut() -> None:
    """4,000 bytes of a refusal's reason are said; it can always be read."""
    for reason, said in (("r" * 4000, "r" * 4000), ("r" * 4001, "r" * 3997 + "…"), ("é" * 9000, "é" * 1998 + "…")):
        head = header.unpack(memoryview(header.pack_refusal(reason)))
        assert header.unpack_control(head, Refusal).reason == said


def test_what_is_too_long_to_be_read_is_not_said() -> None:
    """Up to the limit of a control message, to the byte; beyond it the error names both sizes."""
    room = MAX_CONTROL - len(header.pack_control(Kind.REFUSED, Refusal("r" * 256))) + 256
    assert len(header.pack_control(Kind.REFUSED, Refusal("r" * room))) == MAX_CONTROL
    with pytest.raises(ValueError, match="a REFUSED of 4097 bytes, the limit is 4096: name fewer"):
        header.pack_control(Kind.REFUSED, Refusal("r" * (room + 1)))


@pytest.mark.parametrize("name", ["n" * 64, "n" * 32, "n" * 31, "n"])
def test_the_longest_hello_can_be_read(name: str) -> None:
    """With as many names of serializers as there may be, and the largest numbers, on the host with the longest name."""
    most: Any = (1 << 64) - 1
    names = (name,) * (MAX_NAMES // (len(name) + 2))
    assert MAX_NAMES - len(name) - 2 < header.names_size(names) <= MAX_NAMES
    who = Identity("h" * 255, "b" * 36 + f" {1 << 32}", most, most, 0.5)
    terms = SharedMemoryTerms("require", most, most, most, "w" * 512)
    hello = Hello("consumer", who, most, "", names, most, terms, most, most)
    said = header.pack_control(Kind.HELLO, hello)
    assert header.unpack_control(header.unpack(memoryview(said)), Hello) == hello


def _with_texts(body: Any, text: str) -> Any:
    """Return plain data with ``text`` in the place of every text."""
    if isinstance(body, dict):
        return {name: _with_texts(value, text) for name, value in body.items()}
    if isinstance(body, (list, tuple)):
        return [text, *(_with_texts(each, text) for each in body)]
    return text if isinstance(body, str) else body


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (Kind.HELLO, msgspec.structs.replace(HELLO, shared_memory=SharedMemoryTerms("auto", 0))),
        (Kind.WELCOME, HELLO),
        (Kind.REFUSED, Refusal("no")),
        (Kind.GOODBYE, Ending("ValueError: x", "a stage")),
    ],
)
def test_no_text_of_a_peer_moves_a_terminal(number: int, body: Any) -> None:
    """Whatever a peer says of itself, in whichever field, is printable when it is read."""
    said = _with_texts(msgspec.to_builtins(body), "\x1b[2J")
    head = header.unpack(memoryview(header.pack(number, 0, msgspec.msgpack.encode(said))))
    read = ending_of(head) if number == Kind.GOODBYE else header.unpack_control(head, type(body))
    assert "[2J" in str(read)
    assert b"\x1b" not in msgspec.msgpack.encode(read)
