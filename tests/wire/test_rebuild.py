"""Specs that arrive: each rule one step inside and one step outside, and trees that do not fit their leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exchange import join

from tensorpipe_ipc.errors import ProtocolError, UnsupportedLeaf
from tensorpipe_ipc.wire.rebuild import Plan
from tensorpipe_ipc.wire.spec import MAX_NODES


def nested(depth: int) -> bytes:
    return join(["20 01000000"]) * depth + b"\x00"


def keys(*packed: bytes) -> bytes:
    names = b"".join(len(key).to_bytes(2, "little") + key for key in packed)
    return b"\x22" + len(packed).to_bytes(4, "little") + names + b"\x00" * len(packed)


@pytest.mark.parametrize(
    ("inside", "outside", "says"),
    [
        (b"\x00", b"", "spec cut short at byte 0"),
        (b"\x00", b"\x00\x00", "1 bytes after the end of the spec"),
        (b"\x04", b"\x09" + b"\x00", "unknown node 0x09"),
        (b"\x10", b"\x0f", "unknown node 0x0f"),
        (b"\x16", b"\x18", "unknown node 0x18"),
        (join(["20 00000000"]), b"\x1f", "unknown node 0x1f"),
        (join(["22 00000000"]), b"\x27", "unknown node 0x27"),
        (b"\x05\x01", b"\x05", "spec cut short at byte 1"),
        (b"\x05\x16", b"\x05\x17", "dtype code 23 is not in the table"),
        (b"\x17\x01", b"\x17\x00", "dtype code 0 is not in the table"),
        (join(["06 00000000"]), join(["06 000000"]), "cut short at byte 1"),
        (
            join(["06 01000000", bytes(8)]),
            join(["06 01000000", bytes(7)]),
            "a count of 1 at byte 1 of the spec, with 7",
        ),
        (join(["07 0300", b"cpu"]), join(["07 0400", b"cpu"]), "cut short at byte 1"),
        (join(["07 0300", b"cpu"]), join(["07 0300", b"cqu"]), "a device named b'cqu'"),
        (join(["07 0300", b"cpu"]), join(["07 0300", b"cp\xff"]), "no UTF-8"),
        (join(["20 01000000 00"]), join(["20 01000000"]), "a count of 1 at byte 1"),
        (join(["20 01000000 00"]), join(["20 02000000 00"]), "a count of 2 at byte 1 of the spec, with 1 bytes left"),
        (join(["21 01000000 00"]), join(["21 ffffffff 00"]), "a count of 4294967295"),
        (keys(b"\x01"), join(["22 01000000 0100 01"]), "spec cut short"),
        (keys(b"\x01"), join(["22 01000000 0200 01"]), "cut short at byte 5"),
        (keys(b"\x01", b"\x02"), keys(b"\x01", b"\xc1"), "a dict key that is no msgpack"),
        (keys(b"\xa1a"), keys(b"\xa1\xff"), "a dict key that is no msgpack"),
        (keys(b"\x91\x01"), keys(b"\x80"), "a dict key of type dict"),
        (keys(b"\x91\x91\x01"), keys(b"\x91\x81\x01\x01"), "a dict key of type dict"),
        (keys(b"\xc4\x01x"), keys(b"\xd4\x01\x00"), "a dict key of type Ext"),
        (keys(b"\x01"), keys(b""), "a dict key that is no msgpack"),
        pytest.param(
            keys(b"\x91\xc5\x01\xf3" + b"\x90" * 499),
            keys(b"\x91\xc5\x01\xf4" + b"\x90" * 500),
            "a dict key of 504 bytes that is nested too deeply, or too long for a tuple",
            id="501 bytes of a tuple that may nest",
        ),
        pytest.param(
            keys(b"\xc5\x01\xf5" + b"\x90" * 501),
            keys(b"\xdc\x00\x01\xc5\x01\xf5" + b"\x90" * 501),
            "nested too deeply",
            id="501 such bytes of no tuple",
        ),
        (nested(64), nested(65), "nested deeper than 64 containers"),
        (
            b"\x20" + (MAX_NODES - 1).to_bytes(4, "little") + bytes(MAX_NODES - 1),
            b"\x20" + MAX_NODES.to_bytes(4, "little") + bytes(MAX_NODES),
            "over 131,072 nodes",
        ),
        pytest.param(
            keys(*[b"\x92\xce" + index.to_bytes(4, "big") + b"\x91\x01" for index in range((MAX_NODES - 1) // 6)]),
            keys(*[b"\x92\xce" + index.to_bytes(4, "big") + b"\x91\x01" for index in range(MAX_NODES // 6 + 1)]),
            "over 131,072 nodes",
            id="tuples in keys, and their items",
        ),
    ],
)
def test_each_rule_has_two_sides(inside: bytes, outside: bytes, says: str) -> None:
    """One step inside a rule the spec is taken; one step outside it is refused before anything is made of it."""
    Plan(inside)
    with pytest.raises(ProtocolError, match=says):
        Plan(outside)


@pytest.mark.parametrize(
    ("distinct", "same"),
    [
        ((b"\x01", b"\x02"), (b"\x01", b"\x01")),
        ((b"\x01", b"\xc2"), (b"\x01", b"\xc3")),  # True == 1
        ((b"\xa1a", b"\xc4\x01a"), (b"\xa1a", b"\xd9\x01a")),  # str and bytes differ, two spellings of a str do not
        ((b"\x91\x01", b"\x01"), (b"\x91\x01", b"\xdc\x00\x01\x01")),
    ],
)
def test_a_key_stands_once(distinct: tuple[bytes, ...], same: tuple[bytes, ...]) -> None:
    """A dict with two keys that Python holds equal is refused, however they are spelt."""
    assert len(Plan(keys(*distinct)).build([], [])) == 2
    with pytest.raises(ProtocolError, match="same key twice"):
        Plan(keys(*same)).build([], [])


F, WHOLE = torch.ones(2), torch.ones(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("spec", "fits", "does_not"),
    [
        (b"\x11", ([F], []), ([WHOLE], [])),
        (b"\x12", ([F], []), ([WHOLE], [])),
        (b"\x14", ([F], []), ([F.bfloat16()], [])),
        (b"\x14", ([F], []), ([torch.eye(2).to_sparse()], [])),
        (b"\x16", ([F], []), ([torch.eye(2).to_sparse()], [])),
        (b"\x02", ([], ["0x1"]), ([], ["x"])),
        (b"\x02", ([], ["0x1"]), ([], [1])),
        (b"\x02", ([], ["-0xff"]), ([], [None])),
        (b"\x03", ([], [1.0, 2]), ([], [1.0, "2x"])),
        (b"\x03", ([], [1.0, 2]), ([], ["nan", "x"])),
        (b"\x04", ([], ["\xed\xa0\x80"]), ([], ["\u20ac"])),
        (b"\x04", ([], ["a"]), ([], ["\xff"])),
        (b"\x04", ([], ["a"]), ([], [1])),
    ],
)
def test_leaves_and_values_must_fit_their_place(spec: bytes, fits: Any, does_not: Any) -> None:
    """A gradient on integers, an array of bfloat16, a number in words: a ProtocolError; its neighbour is not."""
    copy = [leaf.clone() for leaf in fits[0]]
    Plan(spec).build(copy, fits[1])
    with pytest.raises(ProtocolError, match="does not fit its place in the tree"):
        Plan(spec).build(*does_not)


@pytest.mark.parametrize(("leaves", "values"), [(0, 1), (2, 1), (1, 0), (1, 2)])
def test_their_numbers_must_be_right(leaves: int, values: int) -> None:
    """A leaf or value too many or too few is refused."""
    with pytest.raises(ProtocolError, match=f"{leaves} leaves and {values} values for a tree of 1 and 1"):
        Plan(join(["20 02000000 10 01"])).build([F] * leaves, [1] * values)


def test_what_numpy_lacks_is_no_fault_of_the_message() -> None:
    """As an array it is an UnsupportedLeaf, which says what to do; its neighbour is not."""
    assert Plan(b"\x10").build([F], [], as_numpy=True).tolist() == [1, 1]
    with pytest.raises(UnsupportedLeaf, match="NumPy has no torch.bfloat16"):
        Plan(b"\x10").build([F.bfloat16()], [], as_numpy=True)
    with pytest.raises(UnsupportedLeaf, match=r"NumPy has no tensors of layout torch.sparse_coo: get it without"):
        Plan(b"\x10").build([F.to_sparse()], [], as_numpy=True)
    with pytest.raises(UnsupportedLeaf, match="NumPy has no nested tensors"):
        Plan(b"\x10").build([torch.nested.nested_tensor([F, F])], [], as_numpy=True)
    with pytest.raises(UnsupportedLeaf, match="NumPy has no torch.quint8"):
        Plan(b"\x10").build([torch.quantize_per_tensor(F, 1, 0, torch.quint8)], [], as_numpy=True)
