"""Assembly of what was narrowed: restored as it comes, into memory that is used again, and never more than came warrants."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any, NamedTuple

import exchange
import numpy as np
import pytest
import torch
import zoo
from children import PATIENCE, in_thread
from raw_ends import RawEnd, hello

import tensorpipe_ipc as tp
from tensorpipe_ipc.errors import OutOfMemory, ProtocolError
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.serializers.narrowing import narrowing
from tensorpipe_ipc.transport import assembly
from tensorpipe_ipc.transport.assembly import Assembly, Regions
from tensorpipe_ipc.transport.unacknowledged import PIECE, Kept, Unacknowledged
from tensorpipe_ipc.wire import spec
from tensorpipe_ipc.wire.dtypes import BY_TORCH, NARROW
from tensorpipe_ipc.wire.header import Piece, pack_piece, piece_of, unpack
from tensorpipe_ipc.wire.layout import BULK
from tensorpipe_ipc.wire.message import encode

pytestmark = pytest.mark.limit(20)
LOOPBACK = "tcp://127.0.0.1:0"
F16, BF16, F32, F64 = (BY_TORCH[dtype].code for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64))


def _piece(offset: int, total: int, restored: int, crossed: int = F16, own: int = F32) -> Any:
    return unpack(memoryview(pack_piece(1, Piece(offset, total, restored, crossed, own))))


def _through(producer: tp.Producer, consumer: tp.Consumer, tree: Any) -> Any:
    putting = in_thread(lambda: producer.put(tree, PATIENCE))
    got = consumer.get(PATIENCE)
    putting()
    return got


def _tree() -> dict[str, Any]:
    """Large and small, narrowed and not, several dtypes, orders and sharers, of which each has more than a piece or less."""
    base = torch.randn(300_001)
    return {
        "floats": torch.randn(700, 1000),
        "integers": torch.arange(200_000),
        "doubles": torch.randn(150_001, dtype=torch.float64),
        "views": [base, base[8:200_000:3], base[:300_000].view(1000, 300).t()],
        "small": torch.randn(5),
        "none": torch.empty(0, 3),
        "gaps": torch.randn(1000, 300)[:, ::2],
        "gaps in three dimensions": torch.randn(40, 50, 70)[1:, :, 3:].transpose(0, 2),
        "expanded": torch.randn(1, 90_000).expand(3, -1),
        "channels last": torch.randn(2, 3, 200, 100).contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(400, 300).t(),
        "array": np.linspace(0, 1, 100_000),
        "half": torch.randn(80_000).half(),
        "parameter": torch.nn.Parameter(torch.randn(100_000)),
    }


def _expected(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, dict):
        return {key: _expected(child, dtype) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_expected(child, dtype) for child in tree]
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree).to(dtype).double().numpy()
    if isinstance(tree, torch.nn.Parameter):
        return torch.nn.Parameter(tree.detach().to(dtype).to(tree.dtype))
    return tree.to(dtype).to(tree.dtype) if tree.itemsize > dtype.itemsize and tree.is_floating_point() else tree


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_tree_of_all_kinds_is_restored(dtype: torch.dtype) -> None:
    """Over tcp every leaf is what torch makes of it, with the strides it has without a wire dtype; views share still."""
    tree = _tree()
    tree["gaps"][::100] = 1e30  # beyond float16 and both of eight bits
    with (
        tp.Consumer(LOOPBACK) as consumer,
        tp.Producer(consumer.endpoint, wire_dtype=dtype, shared_memory="off") as producer,
    ):
        for _ in range(2):  # in fresh memory, and in memory that is used again
            got = _through(producer, consumer, tree)
            zoo.same(_expected(tree, dtype), got, strides=False)
            assert got["channels last"].is_contiguous(memory_format=torch.channels_last)
            whole, part, square = got["views"]
            whole.fill_(7)
            assert (part[5], square[3, 4]) == (7, 7)
            del got, whole, part, square
        assert consumer.statistics().bytes == producer.statistics().bytes
        assert consumer.statistics().rejected == 0
        whole = narrowing(serializer_named("raw"), dtype)
        assert whole is not None
        encode(tree, whole).frames(1)
        told = producer.statistics()
        assert (told.overflowed, told.worst_error) == (2 * whole.overflowed, whole.worst)


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_smallest_that_comes_in_pieces(is_shared: bool) -> None:
    """BULK bytes, narrow, are restored as they come; an item less comes with the header. Both in one message."""
    edge, less = torch.randn(BULK // 2), torch.randn(BULK // 2 - 1)
    tree = {"edge": edge, "large": torch.randn(PIECE), "less": less}
    if is_shared:
        tree |= {"of edge": edge[1:], "of less": less[1:]}
    with (
        tp.Consumer(LOOPBACK) as consumer,
        tp.Producer(consumer.endpoint, wire_dtype=torch.float16, shared_memory="off") as producer,
    ):
        zoo.same(_expected(tree, torch.float16), _through(producer, consumer, tree))


@pytest.mark.parametrize("options", [{"restore": False}, {"copy": True}, {"as_numpy": True}, {"copy": False}], ids=str)
def test_as_the_consumer_wants_it(options: dict[str, Any]) -> None:
    """Narrow as it came, in memory of its own, as arrays, and never a copy of the smallest: all have the same items."""
    tensor = torch.randn(2 * PIECE // 4 + 17)
    expected = tensor.half() if "restore" in options else tensor.half().float()
    with (
        tp.Consumer(LOOPBACK, **options) as consumer,
        tp.Producer(consumer.endpoint, wire_dtype=torch.float16, shared_memory="off") as producer,
    ):
        got = _through(producer, consumer, {"x": tensor, "n": torch.arange(20_000)})
        if "as_numpy" in options:
            got = {key: torch.from_numpy(array) for key, array in got.items()}
        assert got["x"].dtype is expected.dtype
        assert torch.equal(got["x"], expected)
        assert torch.equal(got["n"], torch.arange(20_000))


def _items(of: Any) -> torch.Tensor:
    if isinstance(of, torch.UntypedStorage):
        return torch.empty(0).set_(of)  # type: ignore[call-overload, no-any-return]
    return torch.as_tensor(of)


def test_what_is_restored_keeps_its_bytes_until_the_last_view_is_gone() -> None:
    """A view, an array or a storage is enough; then the next message lies there. All is the receiver's, to be written to."""
    with (
        tp.Consumer(LOOPBACK) as consumer,
        tp.Producer(consumer.endpoint, wire_dtype=torch.float16, shared_memory="off") as producer,
    ):

        def through(value: float) -> torch.Tensor:
            got: torch.Tensor = _through(producer, consumer, torch.full((PIECE,), value))
            assert got.dtype is torch.float32
            assert (got == value).all()
            return got

        for keep in (lambda t: t[10:20], lambda t: t.numpy()[10:], lambda t: t.untyped_storage()):
            first = through(1.5)
            first[12] = 3
            address, kept = first.data_ptr(), keep(first)
            before = _items(kept).clone()
            del first
            second = through(2.5)
            assert second.data_ptr() != address
            assert torch.equal(_items(kept), before)
            del kept, second
            gc.collect()
            addresses = {(third := through(-1.0)).data_ptr() for _ in range(2)}
            del third
            addresses.add(through(4.0).data_ptr())
            assert address in addresses


@pytest.mark.parametrize(("codes", "times"), [((0, 0), 1), ((F16, F32), 2)], ids=["as it came", "restored"])
def test_no_memory_is_asked_for_that_has_not_come(codes: tuple[int, int], times: int) -> None:
    """What is announced costs nothing until it is there; then once, for what it is restored to."""
    total, regions = 20 * PIECE, Regions()
    piece = memoryview(bytearray(PIECE))
    tracemalloc.start()
    try:
        began = tracemalloc.get_traced_memory()[0]
        building = Assembly(1, piece_of(_piece(0, total, times * total, *codes)), regions)
        for offset in range(0, total - PIECE, PIECE):
            assert building.add(_piece(offset, total, times * total, *codes), piece)
        assert tracemalloc.get_traced_memory()[1] - began < 1 << 16
        assert building.add(_piece(total - PIECE, total, times * total, *codes), piece)
        assert tracemalloc.get_traced_memory()[1] - began < times * total + (1 << 16)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [2, 1000])
@pytest.mark.parametrize("restores", [True, False])
def test_short_pieces_wait_in_the_memory_that_they_are_of(size: int, restores: bool) -> None:
    """Pieces of two bytes cost what they hold until memory is asked for, and every item is in its place then."""
    narrow = torch.arange(60_000).half()  # so many that CPython's list of 2,000 free tuples does not count
    octets, total = narrow.view(torch.uint8).numpy().tobytes(), 120_000
    frames = [memoryview(octets[at : at + size]) for at in range(0, total, size)]
    heads = [_piece(at, total, 2 * total) for at in range(0, total, size)]
    building = Assembly(1, piece_of(heads[0]), Regions(), restores=restores)
    kept = (total - (1 << 14)) // size
    tracemalloc.start()
    try:
        began = tracemalloc.get_traced_memory()[0]
        for head, frame in zip(heads[:kept], frames[:kept], strict=True):
            assert building.add(head, frame)
        assert tracemalloc.get_traced_memory()[0] - began < 2 * kept * size + (1 << 16)
    finally:
        tracemalloc.stop()
    for head, frame in zip(heads[kept:], frames[kept:], strict=True):
        assert building.add(head, frame)
    assert building._region is not None
    found = torch.from_numpy(np.frombuffer(building._region, np.float32 if restores else np.float16).copy())
    assert torch.equal(found, narrow.float() if restores else narrow)


def test_dtypes_of_pieces_change_as_those_of_large_payloads_do() -> None:
    """A part of another dtype begins where a payload does, and such a payload has 64 KiB: more of them is refused."""
    building = Assembly(1, Piece(0, 300_000, 450_000), Regions())
    assert building.add(_piece(0, 300_000, 450_000), memoryview(bytes(1 << 16)))
    assert building.add(_piece(1 << 16, 300_000, 450_000, 0, 0), memoryview(bytes(64)))
    with pytest.raises(ProtocolError, match="change twice within 64 bytes"):
        building.add(_piece((1 << 16) + 64, 300_000, 450_000), memoryview(bytes(64)))


HEADS = {
    "less than came": (0, 64, 63, F16, F32),
    "more than there are floats of": (0, 64, 8 * 64 + 1, F16, F32),
    "wider than it can be": (0, 1 << 20, 8 << 20, F16, F32),
    "narrower than it can be": (0, 1 << 20, 1 << 20, F16, F32),
    "no dtype": (0, 1 << 20, 2 << 20, 99, F32),
    "no own dtype": (0, 1 << 20, 2 << 20, F16, 0),
    "integers": (0, 1 << 20, 2 << 20, BY_TORCH[torch.int16].code, BY_TORCH[torch.int32].code),
    "as wide as before": (0, 1 << 20, 2 << 20, F16, BF16),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_nothing_narrow_becomes_is_refused(name: str) -> None:
    """What a piece says of its dtypes and sizes must fit, before any memory is asked for."""
    said = HEADS[name]
    with pytest.raises(ProtocolError, match=r"restored|no such floats"):
        Assembly(1, Piece(*said), Regions()).add(_piece(*said), memoryview(bytes(1 << 16)))


@pytest.mark.parametrize("restores", [True, False])
def test_the_widest_that_narrow_bytes_become(restores: bool) -> None:
    """Eight bytes of one, and no more; nor fewer than came."""
    said = Piece(0, 64, 512, BY_TORCH[torch.float8_e5m2].code, F64)
    assert Assembly(1, said, Regions(), restores=restores).add(_piece(*said), memoryview(bytes(64)))
    for restored in (513, 63):
        with pytest.raises(ProtocolError, match=f"64 bytes that are {restored} when they are restored"):
            Assembly(1, said._replace(restored=restored), Regions(), restores=restores)


@pytest.mark.parametrize("restores", [True, False])
def test_pieces_that_are_no_items(restores: bool) -> None:
    """Half an item, and items that would lie crooked, are refused; nothing of them counts as having come."""
    building = Assembly(1, Piece(0, 1000, 1998), Regions(), restores=restores)
    with pytest.raises(ProtocolError, match="no items"):
        building.add(_piece(0, 1000, 1998), memoryview(bytes(501)))
    assert building.add(_piece(0, 1000, 1998, 0, 0), memoryview(bytes(2)))
    with pytest.raises(ProtocolError, match="no items"):
        building.add(_piece(2, 1000, 1998), memoryview(bytes(998)))
    assert not building.add(_piece(4, 1000, 1998), memoryview(bytes(996)))


def test_a_piece_may_lie_anywhere_and_come_twice() -> None:
    """Crooked in its frame, and read-only, and partly known already: every item is put in its place once."""
    narrow = torch.randn(3000).half()
    octets = narrow.view(torch.uint8).numpy().tobytes()
    building = Assembly(1, Piece(0, 6000, 12000), Regions())
    for start, end in ((0, 2000), (0, 2000), (1000, 4000), (4000, 6000)):
        frame = b"crooked"[: 1 + start % 7] + octets[start:end]
        assert building.add(_piece(start, 6000, 12000), memoryview(frame)[1 + start % 7 :])
    assert building._region is not None
    assert torch.equal(torch.from_numpy(np.frombuffer(building._region, np.float32).copy()), narrow.float())


def test_there_must_be_addresses_for_what_came_and_what_it_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are there for a moment; without room for both the message is refused, with the size that it would have."""
    said = Piece(0, PIECE, 2 * PIECE, F16, F32)
    monkeypatch.setattr(assembly, "addresses_left", lambda: 3 * PIECE + (1 << 25))
    assert not Assembly(1, said, Regions()).refused
    monkeypatch.setattr(assembly, "addresses_left", lambda: 3 * PIECE + (1 << 25) - 1)
    assert f"{2 * PIECE:,} bytes" in Assembly(1, said, Regions()).refused
    assert not Assembly(1, said, Regions(), restores=False).refused
    with pytest.raises(OutOfMemory):
        Regions().ready(2 * PIECE, PIECE)


@pytest.mark.parametrize("lie", ["dtype", "own", "none", "where it ends"])
def test_a_header_that_denies_its_pieces(lie: str) -> None:
    """Pieces that were restored as other dtypes than the header has it: the message is dropped, and the next one comes."""
    made = narrowing(serializer_named("raw"), torch.float16)
    tree = [torch.ones(300_000), torch.ones(200_000, dtype=torch.float64)]
    parts = list(Unacknowledged().keep(Kept(1), encode(tree, made), PIECE))  # type: ignore[arg-type]
    *pieces, (last,) = parts
    total = sum(len(part) for _, part in pieces)
    said = [piece_of(unpack(memoryview(head))) for head, _ in pieces]
    if lie == "dtype":
        said = [each._replace(crossed=BF16) for each in said]
    elif lie == "own":
        said = [each._replace(own=F64, restored=4 * total) for each in said]
    elif lie == "none":
        said = [each._replace(crossed=0, own=0, restored=total) if each.own == F64 else each for each in said]
        restored = sum((2 if each.own else 1) * len(part) for each, (_, part) in zip(said, pieces, strict=True))
        said = [each._replace(restored=restored) for each in said]
    else:
        said[0] = said[0]._replace(own=F64)
        restored = 4 * total
        said = [each._replace(own=F64, restored=restored) for each in said]
    with tp.Consumer(LOOPBACK) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", round=1))
        for each, (_, part) in zip(said, pieces, strict=True):
            raw.say(pack_piece(1, each), bytes(part))
        raw.say(last)
        raw.say(*exchange.sent("good", sequence=2))
        assert consumer.get(PATIENCE) == "good"
        assert consumer.statistics().rejected == 1
        assert "payload frames" in consumer.statistics().last_rejection


class OnlyThere(NamedTuple):
    """What its consumer will not know."""

    x: torch.Tensor


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_a_type_that_is_not_registered_comes_once(dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces too: it is told, the message is dropped, and the next one comes."""
    tp.register_type(OnlyThere, name="only-there-in-pieces")
    with (
        tp.Consumer(LOOPBACK) as consumer,
        tp.Producer(consumer.endpoint, wire_dtype=dtype, shared_memory="off") as producer,
    ):
        assert _through(producer, consumer, "met") == "met"
        producer.put(OnlyThere(torch.ones(PIECE)), PATIENCE)
        monkeypatch.delitem(spec.BY_NAME, "only-there-in-pieces")
        with pytest.raises(tp.UnsupportedLeaf, match="which is not registered here"):
            consumer.get(PATIENCE)
        assert _through(producer, consumer, "next") == "next"


def test_overflows_are_counted_once_however_often_it_is_written() -> None:
    """A message that is begun again, in pieces of another size, has lost no more than it had."""
    tensor = torch.ones(5 * PIECE // 8)
    tensor[::1000] = 1e6
    made = narrowing(serializer_named("raw"), torch.float16)
    assert made is not None
    message, keeper = encode(tensor, made), Unacknowledged()
    begun = keeper.keep(Kept(1), message, PIECE // 4)
    next(begun), next(begun)
    assert 0 < made.overflowed < len(tensor[::1000])
    for piece in (PIECE, PIECE // 8):
        assert len(list(keeper.keep(Kept(1), message, piece))) > 2
        assert made.overflowed == len(tensor[::1000])
    message.frames(1)
    assert made.overflowed == len(tensor[::1000])
