"""loan() and put(move=True) at endpoints: filled where it is read, or, in frames, in memory of torch's own."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from children import PATIENCE, Child, in_thread, wait_until
from inside import registered_serializers

import tensorpipe_ipc as tp
from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.memory.handover import INLINE, values_and_frames
from tensorpipe_ipc.serializers import serializer_names

pytestmark = pytest.mark.limit(20)
SHAPE = (64, 32, 32)  # of float32: 256 KiB, far above what is copied


@contextlib.contextmanager
def met(producer_binds: bool, **options: Any) -> Iterator[tuple[tp.Producer, tp.Consumer]]:
    """Both ends in this process, which know each other."""
    copy = options.pop("copy", "auto")
    with (
        tp.Producer("loans", bind=producer_binds, linger=0, **options) as producer,
        tp.Consumer("loans", bind=not producer_binds, copy=copy, accept=serializer_names()) as consumer,
    ):
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        yield producer, consumer


@pytest.mark.parametrize("producer_binds", [False, True])
def test_what_is_lent_is_read_where_it_was_filled(transport: str, producer_binds: bool) -> None:
    """Through shared memory the address is the same and the sender's tensor empty; in frames it arrives all the same."""
    with met(producer_binds) as (producer, consumer):
        with producer.loan(SHAPE, timeout=PATIENCE) as batch:
            address = batch.data_ptr()
            batch.fill_(3)
        got = consumer.get(PATIENCE)
        assert (got.shape, got.unique().tolist()) == (SHAPE, [3])
        if transport == "shared memory":
            assert (got.data_ptr(), batch.shape) == (address, (0,))
        else:
            assert (batch.shape, batch.unique().tolist()) == (SHAPE, [3])
        assert producer.statistics().bytes == 4 * 64 * 32 * 32


EVERY_WAY = [(serializer, copy) for serializer in serializer_names() for copy in ("auto", True, False)]


@pytest.mark.parametrize(
    ("serializer", "copy"),
    [("raw", "auto"), *(pytest.param(*way, marks=pytest.mark.kills) for way in EVERY_WAY if way != ("raw", "auto"))],
)
def test_a_tree_is_lent_whatever_the_serializer(transport: str, serializer: str, copy: Any) -> None:
    """Specs in a tree with plain values, as leases or copies: every item arrives as it was written."""
    with met(False, serializer=serializer, copy=copy) as (producer, consumer):
        specs = {"x": tp.TensorSpec(SHAPE), "y": [tp.TensorSpec((5,), torch.int64), tp.TensorSpec((0, 2))], "step": 7}
        for _ in range(2):  # the second finds the schema known
            with producer.loan(specs, timeout=PATIENCE) as tree:
                tree["x"].fill_(1.5)
                tree["y"][0].copy_(torch.arange(5))
            got: Any = consumer.get(PATIENCE)
            assert (got["x"].shape, got["x"].unique().tolist()) == (SHAPE, [1.5])
            assert (got["y"][0].tolist(), got["y"][1].shape, got["step"]) == ([0, 1, 2, 3, 4], (0, 2), 7)
            got["x"].add_(1)  # it is the receiver's


def test_an_alias_that_is_left_has_it_copied(transport: str) -> None:
    """A program that keeps an alias of a loaned tensor may write to it afterwards. The receiver does not see that."""
    with met(True) as (producer, consumer):
        with producer.loan(SHAPE) as batch:
            array = batch.numpy()
            array[:] = 3
        array[:] = 4
        assert consumer.get(PATIENCE).unique().tolist() == [3]
        assert batch.unique().tolist() == [4]


def test_an_exception_puts_nothing(transport: str) -> None:
    """It goes on, and the end is as it was."""
    with met(False) as (producer, consumer):
        with pytest.raises(ZeroDivisionError), producer.loan(SHAPE) as batch:
            batch[0] = 1 / 0
        with pytest.raises(tp.Empty):
            consumer.get(0)
        producer.flush(PATIENCE)  # word of what was taken may be on its way
        assert producer.statistics().in_flight == 0


def test_what_may_not_be_moved_is_copied(transport: str) -> None:
    """A tensor of the caller's own stays as it was, with ``move=True`` too."""
    with met(True) as (producer, consumer):
        tensor = torch.ones(SHAPE)
        producer.put([tensor, 1], PATIENCE, move=True)
        got: Any = consumer.get(PATIENCE)
        assert (got[0].sum(), got[1], tensor.sum()) == (65536, 1, 65536)


class Views:
    """A user's serializer, whose payload is the tensor's memory, and whose tensors lie on the payload."""

    name = "views"
    zero_copy = True

    def encode(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        tensor = tp.plain(tensor).contiguous()
        return tp.describe(tensor), tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""

    def decode(self, meta: Any, payload: memoryview) -> torch.Tensor:
        if not meta.nbytes:
            return torch.empty(meta.shape, dtype=meta.dtype)
        return torch.frombuffer(bytearray(payload) if payload.readonly else payload, dtype=meta.dtype).view(meta.shape)


@pytest.mark.parametrize("way", ["put", "lent"])
@pytest.mark.parametrize("serializer", ["raw", "views"])
def test_of_what_was_got_together_none_is_moved_alone(
    serializer: str, way: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is kept of a message stays as it is: its memory is nobody else's, whichever serializer made it.

    What was lent comes by reference, and such small tensors in one frame.
    """
    monkeypatch.setitem(registered_serializers(), Views.name, Views())
    shapes = {"larger": (10_000,), "smaller": (5_000,)}
    with met(True, serializer=serializer) as (producer, consumer):
        if way == "put":
            producer.put({name: torch.ones(shape) for name, shape in shapes.items()}, PATIENCE)
        else:
            with producer.loan(
                {name: tp.TensorSpec(shape) for name, shape in shapes.items()}, timeout=PATIENCE
            ) as lent:
                for tensor in lent.values():
                    tensor.fill_(1)
        got: Any = consumer.get(PATIENCE)
        kept = got["smaller"]
        producer.put(got["larger"], PATIENCE, move=True)
        del got
        assert consumer.get(PATIENCE).sum() == 10_000
        for _ in range(3):
            producer.put({name: torch.full(shape, 7.0) for name, shape in shapes.items()}, PATIENCE)
            assert consumer.get(PATIENCE)["smaller"].sum() == 35_000
            assert kept.sum() == 5_000


class Sparse(Views):
    """The same of sparse tensors: their indices, and then their values."""

    name = "sparse"
    shape = (1_000_000, 1_000_000)

    def encode(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        parts = tensor.coalesce().indices(), tensor.coalesce().values()
        return tp.OPAQUE, b"".join(part.numpy().tobytes() for part in parts)

    def decode(self, meta: Any, payload: memoryview) -> torch.Tensor:
        count = len(payload) // 20
        numbers = torch.frombuffer(bytearray(payload) if payload.readonly else payload, dtype=torch.uint8)
        indices = numbers[: 16 * count].view(torch.int64).view(2, count)
        values = numbers[16 * count :].view(torch.float32)
        return torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=False)


@pytest.mark.parametrize("copy", ["auto", True])
def test_a_users_serializer_makes_sparse_tensors_on_what_came(
    copy: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied where that is asked for. Their own bytes are not those of all that they stand for."""
    monkeypatch.setitem(registered_serializers(), Sparse.name, Sparse())
    places, values = torch.arange(20_000).repeat(2, 1), torch.ones(20_000)
    sent = torch.sparse_coo_tensor(places, values, Sparse.shape, check_invariants=False).coalesce()
    with met(True, serializer="sparse", copy=copy) as (producer, consumer):
        producer.put(sent, PATIENCE)
        got = consumer.get(PATIENCE).coalesce()
    assert torch.equal(got.indices(), sent.indices())
    assert torch.equal(got.values(), sent.values())


def test_without_a_consumer_nothing_is_lent(transport: str) -> None:
    """A loan waits for a consumer, which decides where the tensors lie, and raises Full if none comes.

    Frames do the same, though their place is known at once.
    """
    with tp.Producer("alone", linger=0) as producer:
        started = time.monotonic()
        with pytest.raises(tp.Full, match="no consumer"), producer.loan(SHAPE, timeout=0.2):
            pass
        assert time.monotonic() - started >= 0.2


def test_full_on_leaving_keeps_what_was_written(transport: str) -> None:
    """It can be put later, and goes as it lies."""
    with met(False, maxsize=1) as (producer, consumer):
        producer.put("in the way", PATIENCE)
        with pytest.raises(tp.Full), producer.loan(SHAPE, timeout=0.1) as batch:
            batch.fill_(3)
        assert batch.unique().tolist() == [3]
        address = batch.data_ptr()
        assert consumer.get(PATIENCE) == "in the way"
        producer.put(batch, PATIENCE, move=True)
        got = consumer.get(PATIENCE)
        assert got.unique().tolist() == [3]
        assert (got.data_ptr() == address) is (transport == "shared memory")


def test_a_loan_that_can_never_fit() -> None:
    """It is refused with both sizes."""
    with met(True) as (producer, _), pytest.raises(tp.SharedMemoryError, match="never fit.*; send it in parts"):
        with producer.loan((1 << 37,), torch.uint8, timeout=PATIENCE):
            pass


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 62, 1 << 62), (1 << 70,)])
def test_a_loan_in_frames_that_there_is_no_memory_for(shape: tuple[int, ...]) -> None:
    """The error is the one that a put in frames raises, and the end can be used on."""
    with met(True, shared_memory="off") as (producer, consumer):
        with pytest.raises(tp.OutOfMemory, match=r"takes [\d,]{16,} bytes.*; send it in parts"):
            with producer.loan(shape, torch.uint8, timeout=PATIENCE):
                pass
        producer.put(1, PATIENCE)
        assert consumer.get(PATIENCE) == 1


@pytest.mark.parametrize("producer_binds", [False, pytest.param(True, marks=pytest.mark.kills)])
def test_loans_between_processes(transport: str, producer_binds: bool) -> None:
    """Thirty loans, kept for a while as leases: every one is as it was filled."""
    with Child() as child, contextlib.ExitStack() as stack:
        if producer_binds:
            consumer = stack.enter_context(
                tp.Consumer(child.call(children.open_producer, "far", bind=True), bind=False, copy=False)
            )
        else:
            consumer = stack.enter_context(tp.Consumer("far", copy=False))
            child.call(children.open_producer, "far")
        child.begin(children.fill_loans, SHAPE, 30)
        kept: list[torch.Tensor] = []
        for step in range(30):
            kept.append(consumer.get(PATIENCE))
            if len(kept) > 8:
                assert kept.pop(0).unique().tolist() == [step - 8]
        assert child.result() == (0 if transport == "shared memory" else 30)


def test_what_was_lent_for_one_consumer_may_go_to_another(transport: str) -> None:
    """A consumer in frames gets it, too, while one with a queue is there."""
    with Child() as near, Child() as far, tp.Producer("two", bind=True) as producer:
        near.call(children.open_consumer, "two", bind=False)
        far.call(children.open_consumer, "two", bind=False, shared_memory="off")
        for child in (near, far):
            child.begin(children.check_all)
        wait_until(lambda: len(producer.statistics().peers) >= 2)
        for number in range(20):
            with producer.loan(SHAPE, timeout=PATIENCE) as batch:
                batch.fill_(number)
        producer.close()
        got = [value for child in (near, far) for value in child.result()]
        assert sorted(got) == list(range(20))


_PLACED = struct.pack("<I2Q", 0, 0, 64)


@pytest.mark.parametrize(
    ("said", "sizes", "words"),
    [
        (b"", [4], "0 bytes that say where 1 frames lie"),
        (struct.pack("<I", 1 << 31), [4], "are announced"),
        (_PLACED[:-1], [64, 64], "19 bytes that say where"),
        (_PLACED, [], "where 0 frames lie"),
        (_PLACED, [64, 65], "a frame of 65 bytes at 64 in a payload of 128"),
        (struct.pack("<I2Q", 0, 0, 1 << 63), [64, 64], "a frame of 64 bytes at"),
        (_PLACED + b"x", [64, 64], "1 bytes behind"),
        (struct.pack("<I2Q", 0, INLINE, 64) + b"xyz", [4, 64], "3 bytes behind"),
        (struct.pack("<I2Q", 0, 0, INLINE), [4, 64], "0 bytes behind"),
    ],
)
def test_places_that_a_stranger_made_up(said: bytes, sizes: list[int], words: str) -> None:
    """A consumer checks the places that a message by reference names before it reads anything."""
    with pytest.raises(ProtocolError, match=words):
        values_and_frames(memoryview(said), sizes, bytearray(128))


@pytest.mark.parametrize("first", ["a loan", "a flush"])
def test_what_follows_a_consumers_death_is_for_the_next_one(tmp_path: Path, first: str) -> None:
    """However soon after it: both hear what has come, and nothing that comes tells of a death."""
    address = f"ipc://{tmp_path}/address"
    with Child() as killed, Child() as following, tp.Producer(address, linger=0) as producer:
        killed.call(children.open_consumer, address)
        producer.put(torch.ones(3), timeout=PATIENCE)
        killed.call(children.take_and_drop, 1)
        producer.flush(PATIENCE)
        killed.kill()
        following.call(children.open_consumer, address)
        time.sleep(0.2)  # ends look for deaths ten times a second
        if first == "a flush":
            producer.flush(PATIENCE)
            producer.put(torch.full((3,), 7.0), timeout=PATIENCE)
        else:
            with producer.loan((3,), timeout=PATIENCE) as lent:
                lent.fill_(7.0)
        following.call(children.take_and_drop, 1)
        assert producer.statistics().lost == 0
