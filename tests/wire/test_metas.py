"""Tensor metas: golden bytes of each layout, and each rule one step inside and one step outside."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch
from children import PATIENCE, in_thread
from exchange import join

import tensorpipe_ipc as tp
from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.wire import metas
from tensorpipe_ipc.wire.dtypes import BY_CODE, BY_TORCH
from tensorpipe_ipc.wire.metas import MAX_NBYTES, OPAQUE, LeafMeta, meta_of, narrowed_meta, unpack_meta

F16, BF16, F32, F64, I16, I32 = (
    BY_TORCH[getattr(torch, name)] for name in ("float16", "bfloat16", "float32", "float64", "int16", "int32")
)
# A change to any of these is a change of the format: it must change header.VERSION in the same commit.
GOLDEN = {
    "PLAIN": (
        meta_of(torch.float32, (2, 3)).packed,
        join(["0b 00 02 00 1800000000000000", "0200000000000000 0300000000000000"]),
        LeafMeta(F32, (2, 3), None, 24),
    ),
    "PLAIN, 0-d": (meta_of(torch.bool, ()).packed, join(["01 00 00 00 0100000000000000"]), None),
    "ORDERED": (
        meta_of(torch.int16, (2, 3, 4), (2, 0, 1)).packed,
        join(["05 01 03 00 3000000000000000", "0200000000000000 0300000000000000 0400000000000000", "02 00 01"]),
        LeafMeta(I16, (2, 3, 4), (2, 0, 1), 48),
    ),
    "VIEW": (
        meta_of(torch.int32, (2, 3)).pack_view(1, 8, (6, 2)),
        join(
            [
                "07 02 02 00 0100000000000000",
                "0200000000000000 0300000000000000",
                "0800000000000000 0600000000000000 0200000000000000",
            ]
        ),
        LeafMeta(I32, (2, 3), None, 0, 1, 8, (6, 2)),
    ),
    "narrowed": (
        narrowed_meta(torch.float64, torch.float16, (2, 3)).packed,
        join(["0a 00 02 0c 0c00000000000000", "0200000000000000 0300000000000000"]),
        LeafMeta(F16, (2, 3), None, 12, own=F64),
    ),
    "narrowed VIEW": (
        narrowed_meta(torch.float32, torch.bfloat16, (2,)).pack_view(1, 8, (6,)),
        join(["0d 02 01 0b 0100000000000000", "0200000000000000", "0800000000000000 0600000000000000"]),
        LeafMeta(BF16, (2,), None, 0, 1, 8, (6,), F32),
    ),
    "OPAQUE": (OPAQUE.pack(9), join(["00 03 00 00 0900000000000000"]), LeafMeta(None, nbytes=9)),
}


@pytest.mark.parametrize("layout", GOLDEN)
def test_metas_are_these_bytes(layout: str) -> None:
    """A meta of each layout has these bytes, and these bytes are that meta."""
    packed, golden, leaf = GOLDEN[layout]
    assert packed == golden
    read, end = unpack_meta(b"??" + golden + b"!", 2)
    assert end == 2 + len(golden)
    assert read == leaf or leaf is None


def test_dtype_codes_never_change() -> None:
    """Each dtype has the code that it was given."""
    names = (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 bfloat16 float8_e4m3fn "
        "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 complex32 complex64 complex128"
    ).split()
    assert {code: str(row.torch) for code, row in BY_CODE.items()} == {
        code: f"torch.{name}" for code, name in enumerate(names, 1) if hasattr(torch, name)
    }


def plain(code: int = 11, layout: int = 0, own: int = 0, nbytes: int = 0, dims: tuple[int, ...] = ()) -> bytes:
    return struct.pack("<BBBBQ", code, layout, len(dims), own, nbytes) + struct.pack(f"<{len(dims)}q", *dims)


def ordered(*order: int) -> bytes:
    return plain(layout=1, dims=(2,) * len(order)) + bytes(order)


def view(code: int = 11, offset: int = 0, stride: int = 1) -> bytes:
    return plain(code, layout=2, dims=(2,)) + struct.pack("<Qq", offset, stride)


@pytest.mark.parametrize(
    ("inside", "outside", "says"),
    [
        (plain(), plain()[:-1], "cut short: 11 bytes left, 12 needed"),
        (plain(dims=(1, 2)), plain(dims=(1, 2))[:-1], "cut short: 15 bytes left, 16 needed"),
        (ordered(0, 1), ordered(0, 1)[:-1], "cut short"),
        (view(), view()[:-1], "cut short"),
        (plain(code=1), plain(code=0), "dtype code 0 is not in the table"),
        (plain(code=22), plain(code=23), "dtype code 23 is not in the table"),
        (plain(0, layout=3), plain(0, layout=4), "layout 4"),
        (plain(code=14, own=10), plain(own=11), "own dtype 11 of a tensor that crosses as 11"),
        (plain(code=10, own=11), plain(code=10, own=13), "own dtype 13 of a tensor that crosses as 10"),
        (plain(code=10, own=11), plain(code=9, own=12), "own dtype 12 of a tensor that crosses as 9"),
        (plain(code=10, own=12), plain(code=10, own=22), "own dtype 22"),
        (plain(code=13, own=11), plain(code=13, own=99), "own dtype 99"),
        (plain(0, layout=3), plain(0, layout=3, own=11), "own 11, all must be 0"),
        (plain(0, layout=3), plain(1, layout=3), "opaque tensor meta with dtype 1"),
        (plain(0, layout=3), plain(0, layout=3, dims=(1,)), "opaque tensor meta with dtype 0, 1 dimensions"),
        (plain(nbytes=MAX_NBYTES), plain(nbytes=MAX_NBYTES + 1), f"payload of {MAX_NBYTES + 1} bytes"),
        (plain(dims=(1,) * 64), plain(dims=(1,) * 65), "65 dimensions, the limit is 64"),
        (plain(dims=(1,) * 64), plain(dims=(1,) * 255), "255 dimensions, the limit is 64"),
        (plain(dims=(0, 3)), plain(dims=(-1, 3)), "negative size"),
        (plain(dims=(1,)), plain(dims=(-(1 << 63),)), "negative size"),
        (plain(dims=(1 << 46,)), plain(dims=((1 << 46) + 1,)), "over the limit of 281474976710656 bytes"),
        (plain(dims=(1 << 23, 1 << 23)), plain(dims=(1 << 23, 1 << 24)), "over the limit"),
        (plain(dims=(4,)), plain(dims=(1 << 62, 4)), "over the limit"),
        (plain(dims=(0, 4)), plain(dims=(0, 1 << 62, 1 << 62)), "over the limit"),
        (plain(dims=(1 << 23, 1 << 23, 0)), plain(dims=(1 << 62, 4, 0)), "over the limit"),
        (ordered(1, 0, 2), ordered(1, 0, 3), "is no permutation"),
        (ordered(1, 0, 2), ordered(1, 1, 2), "is no permutation"),
        (view(stride=0), view(stride=-1), "out of range"),
        (view(stride=MAX_NBYTES), view(stride=MAX_NBYTES + 1), "out of range"),
        (view(offset=8), view(offset=9), "9 bytes into its span, which is no multiple of its 4-byte items"),
        (view(code=2, offset=9), view(code=22, offset=8), "no multiple of its 16-byte items"),
        (view(offset=MAX_NBYTES), view(offset=MAX_NBYTES + 4), "bytes into its span"),
    ],
)
def test_each_rule_has_two_sides(inside: bytes, outside: bytes, says: str) -> None:
    """One step inside a rule the meta is read to its end; one step outside it is refused, and the value is named."""
    assert unpack_meta(inside, 0)[1] == len(inside)
    with pytest.raises(ProtocolError, match=says):
        unpack_meta(outside, 0)


def test_the_end_of_a_view_is_its_last_byte() -> None:
    """A view ends with its last item; an empty one where it begins."""
    assert LeafMeta(F32, (2, 3), None, 0, 0, 8, (10, 2)).view_end() == 8 + 4 * (10 + 4 + 1)
    assert LeafMeta(F32, (2, 0), None, 0, 0, 8, (10, 2)).view_end() == 8


def test_metas_are_made_once() -> None:
    """Tensors alike share one meta, and a stream of ever new shapes does not make the table grow without end."""
    assert meta_of(torch.int8, (3, 4)) is meta_of(torch.int8, torch.Size([3, 4]))
    assert meta_of(torch.int8, (3, 4), (1, 0)) is not meta_of(torch.int8, (3, 4))
    for size in range(3000):
        meta_of(torch.int8, (size,))
    assert len(metas.METAS[torch.int8]) <= 1024


def test_windows_are_bounded_and_right() -> None:
    """However many sizes are sent, each window is of its own size, and ctypes does not keep a type for each."""
    memory, before = torch.arange(5000, dtype=torch.int16).view(torch.uint8), _types_of_arrays()
    for size in range(1, 3000):
        window = memoryview(meta_of(torch.uint8, (size,)).window(memory.data_ptr())).cast("B")
        assert len(window) == size
        assert window[size - 1] == memory[size - 1]
    assert _types_of_arrays() <= before + 1024 + 64


def test_a_received_meta_makes_no_ctypes_type() -> None:
    """Reading a meta of a huge size asks ctypes for nothing: only a sender's tensors do."""
    before = _types_of_arrays()
    for size in range(100):
        leaf, _ = unpack_meta(plain(dims=(1 << 30, size)), 0)
        metas.TensorMeta(leaf.row, leaf.shape)
    assert _types_of_arrays() == before


def _types_of_arrays() -> int:
    """Return how many types of arrays ctypes has."""
    return len(ctypes.Array.__subclasses__())


def test_repr_says_what_it_is() -> None:
    """A meta's repr has its dtype, shape and order."""
    assert repr(meta_of(torch.int8, (3, 4), (1, 0))) == "<TensorMeta torch.int8 [3, 4] order [1, 0]>"
    assert repr(meta_of(torch.int8, (3,))) == "<TensorMeta torch.int8 [3]>"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(0, 1 << 25, 1 << 25),
        lambda: [shared := torch.zeros(1), shared.expand(1 << 24, 1 << 24)],
        lambda: [base := torch.zeros(8), base.as_strided((1, 8), (1 << 50, 1))],
    ],
    ids=["sizes beside 0", "expanded", "a stride that is never taken"],
)
@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_put_refuses_what_get_would_refuse(make: Any, shared_memory: Any) -> None:
    """Else nobody but the receiver would know."""
    with tp.Consumer("odd", shared_memory=shared_memory) as consumer, tp.Producer("odd") as producer:
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        with pytest.raises(tp.UnsupportedLeaf, match="the limit"):
            producer.put(make(), PATIENCE)
        producer.put("next", PATIENCE)
        assert consumer.get(PATIENCE) == "next"
