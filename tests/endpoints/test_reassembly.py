"""Assembly: what comes in pieces, narrowed or not, is put together in order, and costs no more memory than came warrants."""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc
from typing import Any, NamedTuple

import children
import exchange
import numpy as np
import psutil
import pytest
import torch
import zoo
from children import PATIENCE, Child, in_thread, wait_until
from crash_points import interrupted_at
from raw_ends import RawEnd, hello, hello_of

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints.reassembly import BufferPool, Reassembly
from tensorpipe_ipc.endpoints.resend_buffer import PIECE, ResendBuffer, SentMessage
from tensorpipe_ipc.memory.arena import IDLE
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.serializers.narrowing import narrowing
from tensorpipe_ipc.wire import spec
from tensorpipe_ipc.wire.dtypes import NARROW
from tensorpipe_ipc.wire.header import Kind, Piece, pack_piece, unpack
from tensorpipe_ipc.wire.layout import BULK
from tensorpipe_ipc.wire.message import encode

pytestmark = pytest.mark.limit(20)
LOOPBACK = "tcp://127.0.0.1:0"


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


@pytest.mark.slow
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
    """BULK bytes, narrow, come in pieces; an item less comes with the header. Both in one message."""
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


def test_no_memory_is_asked_for_that_has_not_come() -> None:
    """A message that is announced costs no memory until it is there. It then costs its size once."""
    total, regions = 20 * PIECE, BufferPool()
    piece = memoryview(bytearray(PIECE))
    tracemalloc.start()
    try:
        began = tracemalloc.get_traced_memory()[0]
        building = Reassembly(1, Piece(0, total), regions)
        for offset in range(0, total - PIECE, PIECE):
            assert building.add(Piece(offset, total), piece)
        assert tracemalloc.get_traced_memory()[1] - began < 1 << 16
        assert building.add(Piece(total - PIECE, total), piece)
        assert tracemalloc.get_traced_memory()[1] - began < total + (1 << 16)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("brings", [False, True])
def test_an_announced_size_keeps_no_memory_from_others(brings: bool) -> None:
    """Peers announce a message as large as those of another, whose memory lies ready. It is theirs if they have brought as
    much before."""
    tensor = torch.zeros(20 * PIECE, dtype=torch.uint8)
    head, payload = exchange.sent(tensor)
    with (
        tp.Consumer(LOOPBACK, shared_memory="off", producers=None) as consumer,
        tp.Producer(consumer.endpoint, shared_memory="off") as producer,
        contextlib.ExitStack() as others,
    ):
        for _ in range(3):
            assert len(_through(producer, consumer, tensor)) == len(tensor)
        tracemalloc.start()
        try:
            for _ in range(3):
                raw = others.enter_context(RawEnd(consumer.endpoint))
                raw.say(hello("producer", round=1))
                raw.until_answered(consumer)
                if brings:
                    for at in range(0, len(tensor), PIECE):
                        raw.say(pack_piece(1, Piece(at, len(tensor))), payload[at : at + PIECE])
                    raw.say(head)
                    assert len(consumer.get(PATIENCE)) == len(tensor)
                raw.say(pack_piece(1 + brings, Piece(0, len(tensor))), b"x")
                with pytest.raises(tp.Empty):
                    consumer.get(0.1)
                assert len(_through(producer, consumer, tensor)) == len(tensor)
            kept = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert consumer.statistics().rejected == 0
        assert kept // len(tensor) == (3 if brings else 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 1000])
def test_short_pieces_wait_in_the_memory_that_they_are_of(size: int) -> None:
    """Pieces of two bytes cost what they hold until memory is asked for, and every item is in its place then."""
    narrow = torch.arange(60_000).half()  # so many that CPython's list of 2,000 free tuples does not count
    octets, total = narrow.view(torch.uint8).numpy().tobytes(), 120_000
    frames = [memoryview(octets[at : at + size]) for at in range(0, total, size)]
    heads = [Piece(at, total) for at in range(0, total, size)]
    building = Reassembly(1, heads[0], BufferPool())
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
    assert _completed(building, octets) == octets


def test_pieces_that_repeat_what_came_keep_no_more_than_is_new() -> None:
    total, new, pieces = 1 << 28, BULK, 48
    building = Reassembly(1, Piece(0, total), BufferPool())
    tracemalloc.start()
    try:
        for end in range(new, (pieces + 1) * new, new):
            start = max(0, end - PIECE)
            assert building.add(Piece(start, total), memoryview(bytearray(end - start)))
        assert tracemalloc.get_traced_memory()[0] < pieces * new + 2 * PIECE
    finally:
        tracemalloc.stop()


def test_a_piece_may_lie_anywhere_and_come_twice() -> None:
    """Crooked in its frame, and read-only, and partly known already: every item is put in its place once."""
    narrow = torch.randn(60_000).half()
    octets = narrow.view(torch.uint8).numpy().tobytes()
    building = Reassembly(1, Piece(0, 120_000), BufferPool())
    for start, end in ((0, 40_000), (0, 40_000), (20_000, 80_000), (80_000, 120_000)):
        frame = b"crooked"[: 1 + start % 7] + octets[start:end]
        assert building.add(Piece(start, 120_000), memoryview(frame)[1 + start % 7 :])
    assert _completed(building, octets) == octets


@pytest.mark.parametrize("size", [14_000, BULK + 100], ids=["short pieces", "long pieces"])
def test_an_exception_anywhere_leaves_no_piece_out_of_place(size: int) -> None:
    """Wherever a signal's handler raises, the piece in hand comes again; where one before it is asked for, all do."""
    octets = np.random.default_rng(7).bytes(5 * size)
    total = len(octets)
    pieces = [(Piece(at, total), memoryview(octets)[at : at + size]) for at in range(0, total, size)]
    for point in itertools.count(1):
        building, at = Reassembly(1, Piece(0, total), BufferPool()), 0

        def put_together(building: Reassembly = building) -> None:
            nonlocal at
            while at < len(pieces):
                at = at + 1 if building.add(*pieces[at]) else 0

        was_interrupted = interrupted_at(point, put_together)
        put_together()
        assert building.is_complete
        assert _completed(building, octets) == octets
        if not was_interrupted:
            break
    assert point > 10


def _completed(building: Reassembly, octets: bytes) -> bytes:
    """Return the payload of a message of so many bytes, as get would have it, once its header has come."""
    head = exchange.sent(torch.zeros(len(octets), dtype=torch.uint8), sequence=1)[0]
    header, (_, *payloads) = building.completed(unpack(memoryview(head)), [head])
    assert header.sequence == 1
    return b"".join(map(bytes, payloads))


def test_a_header_that_denies_its_pieces() -> None:
    """Pieces that are not as long as their header has it: the message is dropped, and the next one comes."""
    tree = [torch.ones(300_000), torch.ones(200_000, dtype=torch.float64)]
    *pieces, _ = ResendBuffer().keep(SentMessage(1), encode(tree, serializer_named("raw")))
    last = exchange.sent(tree[1:], sequence=1)[0]
    with tp.Consumer(LOOPBACK) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", round=1))
        for head, part in pieces:
            raw.say(head, bytes(part))
        raw.say(last)
        raw.say(*exchange.sent("good", sequence=2))
        assert consumer.get(PATIENCE) == "good"
        assert consumer.statistics().rejected == 1
        assert "payload frames" in consumer.statistics().last_rejection


def test_a_piece_that_an_exception_took_is_asked_for() -> None:
    """Its message is not dropped, though the header of the whole came: it is taken when the pieces have come again."""
    tree = torch.arange(PIECE // 2)
    kept = list(ResendBuffer().keep(SentMessage(1), encode(tree, serializer_named("raw"))))
    parts = [[bytes(frame) for frame in part] for part in kept]
    assert len(parts) > 3
    with tp.Consumer(LOOPBACK) as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", round=1))
        getting = in_thread(lambda: consumer.get(PATIENCE))
        first = hello_of(raw.hear_of(Kind.WELCOME)).round
        for part in (parts[0], *parts[2:]):
            raw.say(*part)
        assert hello_of(raw.hear_of(Kind.WELCOME)).round > first
        for part in parts:
            raw.say(*part)
        assert torch.equal(getting(), tree)
        assert (consumer.statistics().rejected, consumer.statistics().lost) == (0, 0)


class OnlyThere(NamedTuple):
    """A type that its consumer does not know."""

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
    """A message that is begun again has lost no more than it had."""
    tensor = torch.ones(2 * PIECE)
    tensor[::1000] = 1e6
    made = narrowing(serializer_named("raw"), torch.float16)
    assert made is not None
    message, keeper = encode(tensor, made), ResendBuffer()
    begun = keeper.keep(SentMessage(1), message)
    next(begun), next(begun)
    assert 0 < made.overflowed < len(tensor[::1000])
    for _ in range(2):
        assert len(list(keeper.keep(SentMessage(1), message))) > 2
        assert made.overflowed == len(tensor[::1000])
    message.frames(1)
    assert made.overflowed == len(tensor[::1000])


@pytest.mark.slow
def test_a_closed_consumer_keeps_no_memory_for_messages_to_come() -> None:
    """However long a tensor lives that it got."""

    def kept_of_one() -> torch.Tensor:
        with tp.Consumer("tcp://127.0.0.1:0", shared_memory="off") as consumer:

            def put_all() -> None:
                with tp.Producer(consumer.endpoint, shared_memory="off") as producer:
                    for items in (1 << 19, *([5 << 20] * 6)):
                        producer.put(torch.ones(items), PATIENCE)

            putting = in_thread(put_all)
            got = [consumer.get(PATIENCE) for _ in range(7)]
            putting()
        first: torch.Tensor = got[0]
        return first

    kept = [kept_of_one()]
    before = psutil.Process().memory_full_info().uss
    kept += [kept_of_one() for _ in range(6)]
    assert psutil.Process().memory_full_info().uss - before < 500 << 20
    assert all(bool((tensor == 1).all()) for tensor in kept)


def test_trim_gives_back_the_memory_of_a_burst_over_tcp_at_both_ends() -> None:
    """It waited in the consumer, so that ZeroMQ held all of it, and the producer kept it. No end is closed.

    glibc gives back the last 64 MiB only of the memory that belongs to the main thread.
    """
    count, nbytes = 96, 2 << 20
    with Child() as consumer, Child() as producer:
        endpoint = consumer.call(children.open_consumer, "tcp://127.0.0.1:0", maxsize=count, shared_memory="off")
        producer.call(children.open_producer, endpoint, maxsize=count, shared_memory="off")
        resident = [psutil.Process(child.pid).memory_info for child in (consumer, producer)]
        consumer.begin(children.take_and_drop, 1)
        producer.call(children.put_many_large, nbytes, 1)  # what a first one costs stays
        consumer.result()
        before = [each().rss for each in resident]
        producer.call(children.put_many_large, nbytes, count)
        wait_until(lambda: all(each().rss - low > 120 << 20 for each, low in zip(resident, before, strict=True)))
        consumer.call(children.take_and_drop, count)
        consumer.call(children.trim)
        producer.call(children.flush)  # which hears what was taken
        producer.call(children.trim)
        wait_until(lambda: all(each().rss - low < 80 << 20 for each, low in zip(resident, before, strict=True)))
        consumer.kill()
        producer.kill()
    tp.Consumer("next").close()  # which removes the files of the killed


@pytest.mark.slow
def test_what_lies_ready_over_tcp_is_given_back_however_late_it_is_let_go_of() -> None:
    """An end that waits looks for it again and again, and not only once after a burst. What ``trim`` finds then is little."""
    count, nbytes = 24, 2 << 20
    with Child() as consumer, Child() as producer:
        endpoint = consumer.call(children.open_consumer, "tcp://127.0.0.1:0", maxsize=count, shared_memory="off")
        producer.call(children.open_producer, endpoint, maxsize=count, shared_memory="off")
        consumer.begin(children.hold, count)
        producer.call(children.put_many_large, nbytes, count)
        consumer.result()
        consumer.call(children.wait_in_vain, IDLE + 1)
        consumer.call(children.release)
        consumer.call(children.wait_in_vain, 1)
        assert consumer.call(children.trim) < 2 * nbytes
        producer.call(children.put_until_full, IDLE + 1)  # which waits, as nobody takes anything
        assert producer.call(children.trim) < 2 * nbytes
        consumer.kill()
        producer.kill()
    tp.Consumer("next").close()  # which removes the files of the killed
