"""wire_dtype: wide floats cross narrow and come back as what they were, everywhere; and what that lost is told."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from children import in_thread
from exchange import parts, received, sent
from inside import registered_serializers, zeros_without_memory

import tensorpipe_ipc as tp
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.serializers.conformance import Checked
from tensorpipe_ipc.serializers.narrowing import Narrowing, narrowing
from tensorpipe_ipc.serializers.raw import Raw
from tensorpipe_ipc.wire.dtypes import NARROW, is_narrowed
from tensorpipe_ipc.wire.message import encode
from tensorpipe_ipc.wire.metas import OPAQUE, TensorMeta

LIMIT = 20  # seconds
LARGE = 100_000  # items: in float16, too, a payload of its own frame
EPS = {"float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}


def _sent(tree: Any, dtype: torch.dtype, serializer: str = "raw") -> list[bytes]:
    return sent(tree, serializer, wire_dtype=dtype)


def _as_crossed(tree: Any, dtype: torch.dtype) -> Any:
    """A tree whose wide floats were narrowed and made wide again, by torch."""
    if isinstance(tree, np.ndarray):
        return _as_crossed(torch.from_numpy(np.array(tree)), dtype).numpy()
    if isinstance(tree, torch.Tensor):
        if not is_narrowed(tree.dtype, dtype) or tree._is_zerotensor():
            return tree
        crossed = tree.detach().to(dtype).to(tree.dtype)
        if isinstance(tree, torch.nn.Parameter):
            return torch.nn.Parameter(crossed, requires_grad=tree.requires_grad)
        return crossed.requires_grad_(tree.requires_grad)
    if isinstance(tree, dict):
        found = type(tree)((key, _as_crossed(child, dtype)) for key, child in tree.items())
        if hasattr(tree, "__dict__"):  # an ordered dict may have attributes
            vars(found).update(vars(tree))
        return found
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_as_crossed(child, dtype) for child in tree))
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(_as_crossed(child, dtype) for child in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return dataclasses.replace(tree, samples=_as_crossed(tree.samples, dtype))
    return tree


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2], ids=str)
def test_the_zoo_crosses_and_keeps_its_dtypes(dtype: torch.dtype) -> None:
    """Whatever may travel does, with a wire dtype too: what is no wide float bit for bit, wide floats as torch casts them."""
    for name in zoo.ZOO:
        sent = zoo.make(name)
        got = received(_sent(sent, dtype))
        crossed = sent if name == "shared storage" else _as_crossed(sent, dtype)  # whose views are of several dtypes
        zoo.same(_nan_alike(crossed), _nan_alike(got), name, strides="shared" not in name)


def _nan_alike(tree: Any) -> Any:
    """nan has many bit patterns, and casts do not keep them."""
    if isinstance(tree, np.ndarray) and tree.dtype.kind == "f":
        return np.where(np.isnan(tree), np.array(np.nan, tree.dtype), tree)
    if isinstance(tree, torch.Tensor) and not tree.requires_grad and tree.dtype.is_floating_point and tree.itemsize > 1:
        return torch.where(torch.isnan(tree), torch.tensor(float("nan"), dtype=tree.dtype), tree)
    return tree


@pytest.mark.parametrize("items", [5, LARGE])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_bytes_are_those_of_the_wire_dtype(dtype: torch.dtype, items: int) -> None:
    """The payload is as long as the narrow tensor, in a frame and in a block alike, and integers beside it are untouched."""
    tree = {"x": torch.randn(items), "n": torch.arange(items)}
    frames = parts(_sent(tree, dtype))
    assert sum(map(len, frames[1:])) in range(items * (dtype.itemsize + 8), items * (dtype.itemsize + 8) + 64)
    queue = tp.Queue(wire_dtype=dtype)
    queue.put(tree)
    assert queue.statistics().bytes_put < items * (dtype.itemsize + 8) + 128
    narrow = queue.get(restore=False)
    assert narrow["x"].dtype is dtype
    assert torch.equal(narrow["x"].float(), tree["x"].to(dtype).float())
    assert torch.equal(narrow["n"], tree["n"])
    if items == LARGE:
        assert queue.statistics().leases == 1, "narrow, it lies where it came in"
    del narrow
    queue.put(tree)
    assert torch.equal(queue.get()["x"], tree["x"].to(dtype).float())
    assert queue.statistics().leases == 0, "what is restored has memory of its own"


def test_restored_bare_and_shared() -> None:
    """A bare tensor; two views of one storage, which are so again; views of several dtypes, which go as they are."""
    queue = tp.Queue(wire_dtype=torch.float16)
    base = torch.randn(LARGE)
    for tensor in (base, base.double(), base.view(100, -1).t(), base[::2]):
        queue.put(tensor)
        got = queue.get()
        assert got.dtype is tensor.dtype
        assert torch.equal(got, tensor.half().to(tensor.dtype))
    for restore in (True, False):
        for many in (base, base[:50]):
            queue.put([many, many[8:20], many[:16].view(4, 4).t()])
            whole, part, square = queue.get(restore=restore)
            assert whole.dtype is (torch.float32 if restore else torch.float16)
            assert torch.equal(whole.float(), many.half().float())
            whole[9] = 7
            assert part[1] == 7, "one storage"
            assert torch.equal(square.float()[:2], many.half().float()[:16].view(4, 4).t()[:2]) or square[1, 2] == 7
    mixed = [base[:8], base.view(torch.int32)[:8]]
    queue.put(mixed)
    zoo.same(mixed, queue.get())


def test_storages_travel_as_themselves() -> None:
    """Typed and untyped storages keep class, dtype and bytes, with a wire dtype and without."""
    made = {
        "half": torch.HalfStorage([1.5, -2.0]),
        "float": torch.FloatStorage([0.1, 0.2]),
        "double": torch.DoubleStorage([0.1]),
        "byte": torch.ByteStorage([1, 255]),
        "bool": torch.BoolStorage([True, False]),
        "bfloat16": torch.BFloat16Storage([0.1]),
        "untyped": torch.UntypedStorage(b"abc"),
    }
    for options in ({}, {"wire_dtype": torch.float16}):
        queue = tp.Queue(**options)
        queue.put(made)
        zoo.same(made, queue.get())
        queue.put(torch.full((LARGE,), 0.1).storage())
        assert torch.equal(torch.empty(0).set_(queue.get()), torch.full((LARGE,), 0.1))  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_what_it_lost_is_counted(dtype: torch.dtype) -> None:
    """Items that became infinite are counted, each; the largest relative error is the dtype's; nan and inf are no loss."""
    queue = tp.Queue(wire_dtype=dtype)
    for items in (10, LARGE):
        sent = torch.linspace(1, 2, items)
        sent[3], sent[4], sent[5], sent[6] = float("nan"), float("inf"), 0.0, 3e38
        sent = sent.double()
        sent[7] = -1e300
        queue.put(sent)
        got = queue.get()
        assert torch.isnan(got[3])
        assert got[4] == torch.tensor(float("inf")).to(dtype).double() or torch.isnan(got[4])
        assert got[5] == 0
        assert torch.equal(got[8:], sent[8:].to(dtype).double())
    found = queue.statistics()
    saturates = bool(torch.isfinite(torch.tensor(float("inf")).to(dtype).float()))  # float8_e4m3fn, in newer torch
    overflows = 1 if dtype is torch.bfloat16 else 2 + saturates
    assert found.overflowed == 2 * overflows
    exact = ((sent.to(dtype).double() - sent) / sent).abs()
    largest = exact[torch.isfinite(exact) & (sent.abs() < 1e30)].max()
    assert largest / 2 < found.worst_error <= EPS[str(dtype).removeprefix("torch.")]
    queue.put(torch.arange(3))
    assert queue.statistics().overflowed == found.overflowed, "integers are not cast"


class Subclass(torch.Tensor):
    """A user's own."""


class Seen:
    """A serializer that notes what it was given, and takes none of it."""

    name = "seen"
    is_memory = True

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def encode(self, tensor: torch.Tensor) -> Any:
        self.given.append(tensor)
        raise tp.UnsupportedLeaf("seen")


NOT_PLAIN = {
    "a subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "of mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(3, device="meta"),
    "meta without items": lambda: torch.ones(0, device="meta"),
    "zeros without memory": lambda: zeros_without_memory(3),
    "no zeros without memory": lambda: zeros_without_memory(0),
    "as wide": lambda: torch.ones(3).half(),
    "integers": lambda: torch.ones(3).int(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore")  # of what is only a prototype in torch
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_narrowed(name: str) -> None:
    """The serializer gets a tensor as it is, and not cast, if it is not wide, or is more or less than its items."""
    seen, made = Seen(), NOT_PLAIN[name]()
    with pytest.raises(tp.UnsupportedLeaf, match="seen"):
        Narrowing(seen, torch.float16).encode(made)  # type: ignore[arg-type]
    assert seen.given[0] is made


@pytest.mark.parametrize(
    "make", [torch.empty, lambda n: torch.nn.Parameter(torch.empty(n))], ids=["tensor", "parameter"]
)
@pytest.mark.parametrize("items", [0, 1])
def test_what_is_narrowed(make: Any, items: int) -> None:
    """Plain tensors and parameters, and those without items too."""
    seen = Seen()
    with pytest.raises(tp.UnsupportedLeaf, match="as the wire_dtype torch.float16: seen"):
        Narrowing(seen, torch.float16).encode(make(items))  # type: ignore[arg-type]
    assert seen.given[0].dtype is torch.float16


class Opaque(Raw):
    """raw's bytes, without a word of what they are."""

    name = "opaque"
    is_memory = False

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        return OPAQUE, super().encode(tensor)[1]


def _before(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


LAST_AND_FIRST = {  # of float32: what still becomes each one's largest, and what is beyond
    "float16": (_before(65520.0), 65520.0),
    "bfloat16": (_before((2 - 2**-8) * 2.0**127), (2 - 2**-8) * 2.0**127),
    "float8_e4m3fn": (464.0, float(np.nextafter(np.float32(464), np.float32(500)))),
    "float8_e5m2": (_before(61440.0), 61440.0),
}


@pytest.mark.parametrize("items", [10, LARGE])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_where_an_overflow_begins(dtype: torch.dtype, items: int) -> None:
    """The last item that the wire dtype's largest is nearest to is none, the next one is; of either sign."""
    last, first = LAST_AND_FIRST[str(dtype).removeprefix("torch.")]
    made = narrowing(serializer_named("raw"), dtype)
    assert made is not None
    overflows = 0
    for value, counts in ((last, 0), (-last, 0), (first, 1), (-first, 1)):
        tensor = torch.ones(items)
        tensor[7] = value
        encode([tensor], made).frames(1)
        overflows += counts
        assert made.overflowed == overflows, value


def test_numpy_and_torch_save_narrow_too() -> None:
    """Every serializer takes a wire dtype; numpy refuses those that NumPy lacks, and says so."""
    tree = {"x": torch.randn(2, 3), "big": torch.randn(LARGE), "views": [torch.randn(8)] * 2, "i": torch.arange(3)}
    base = torch.randn(LARGE)
    tree["large views"] = [base, base[1:]]
    for serializer in ("numpy", "torch_save"):
        zoo.same(_as_crossed(tree, torch.float16), received(_sent(tree, torch.float16, serializer)))
    with pytest.raises(tp.UnsupportedLeaf, match=r"tree\['x'\]: as the wire_dtype torch.bfloat16: NumPy has no"):
        _sent(tree, torch.bfloat16, "numpy")
    with pytest.raises(
        tp.UnsupportedLeaf, match=r"serializer 'opaque' says nothing of dtypes, so none can be restored"
    ):
        encode([torch.ones(3)], narrowing(Opaque(), torch.float16))  # type: ignore[arg-type]
    sparse = torch.eye(3).to_sparse()
    got = received(_sent([sparse], torch.float16, "torch_save"))
    assert torch.equal(got[0].to_dense(), torch.eye(3)), "sparse ones go as they are"


@pytest.mark.parametrize(
    ("value", "error"), [("float16", TypeError), (torch.int8, ValueError), (torch.float32, ValueError)]
)
def test_no_wire_dtype_is_named(value: Any, error: type[Exception]) -> None:
    """Something that floats cannot be narrowed to is refused with the value, by queues and producers."""
    with pytest.raises(error, match="wire_dtype="):
        tp.Queue(wire_dtype=value)
    with pytest.raises(error, match="wire_dtype="):
        tp.Producer("inproc://x", wire_dtype=value)


@pytest.mark.parametrize("endpoint", ["ipc://{tmp}/x", "tcp://127.0.0.1:0"])
def test_endpoints(endpoint: str, transport: str, tmp_path: Any) -> None:
    """Through shared memory and in frames: restored or narrow as the consumer wants; an object of a queue too."""
    where = endpoint.format(tmp=tmp_path)
    sent = {"large": torch.randn(LARGE), "small": torch.randn(3), "array": np.ones(4), "bf": torch.ones(2).bfloat16()}
    for restore in (True, False):
        with (
            tp.Consumer(where, restore=restore) as consumer,
            tp.Producer(consumer.endpoint, wire_dtype=torch.bfloat16) as producer,
        ):
            taken = in_thread(lambda consumer=consumer: consumer.get(10))
            producer.put(sent, timeout=10)
            got = taken()
            assert producer.statistics().worst_error > 0
        assert got["array"].dtype == np.float64, "NumPy has no bfloat16: restored in any case"
        assert got["large"].dtype is (torch.float32 if restore else torch.bfloat16)
        assert torch.equal(got["large"].bfloat16(), sent["large"].bfloat16())
        assert torch.equal(got["small"].bfloat16(), sent["small"].bfloat16())


class Anything:
    """Neither tensor nor container."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_objects_and_moves() -> None:
    """Tensors in a pickled object are narrowed as others are; what moves by reference goes as it is."""
    queue = tp.Queue(wire_dtype=torch.float16)
    third = torch.full((LARGE,), 1 / 3)
    queue.put(Anything(third))
    assert torch.equal(queue.get().x, third.half().float())
    with queue.loan((LARGE,)) as lent:
        lent.copy_(third)
    assert torch.equal(queue.get(), third)


def test_as_numpy() -> None:
    """Arrays in the place of tensors, on the same memory; dtypes that NumPy lacks are named, and the object is not lost."""
    queue = tp.Queue()
    tree = {"x": torch.randn(LARGE), "p": torch.nn.Parameter(torch.ones(2)), "n": 3, "a": np.arange(3), "b": b"bytes"}
    queue.put(tree)
    got = queue.get(as_numpy=True)
    assert [type(each) for each in got.values()] == [np.ndarray, np.ndarray, int, np.ndarray, bytes]
    assert np.array_equal(got["x"], tree["x"].numpy())
    assert got["x"].flags.writeable
    assert queue.statistics().leases == 1, "it lies where it came in"
    del got
    assert queue.statistics().leases == 0
    queue.put(torch.ones(3))
    assert np.array_equal(queue.get(as_numpy=True), np.ones(3, np.float32))
    queue.put([torch.ones(2).bfloat16()])
    with pytest.raises(tp.UnsupportedLeaf, match=r"NumPy has no torch.bfloat16: get it without as_numpy"):
        queue.get(as_numpy=True)
    assert queue.get()[0].dtype is torch.bfloat16
    narrow = tp.Queue(wire_dtype=torch.bfloat16)
    narrow.put(torch.ones(3))
    assert narrow.get(as_numpy=True, restore=False).dtype == np.float32
    half = tp.Queue(wire_dtype=torch.float16)
    half.put(torch.ones(3))
    assert half.get(as_numpy=True, restore=False).dtype == np.float16


def test_layouts_that_numpy_lacks() -> None:
    """Sparse and quantized tensors are named, and come with a get without as_numpy, or a consumer is told of them."""
    sparse, quantized = torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.quint8)
    queue = tp.Queue(serializer="torch_save")
    for tensor, lacking in [(sparse, "tensors of layout torch.sparse_coo"), (quantized, "torch.quint8")]:
        queue.put([tensor])
        with pytest.raises(tp.UnsupportedLeaf, match=f"NumPy has no {lacking}: get it without as_numpy"):
            queue.get(timeout=10, as_numpy=True)
        assert str(queue.get(timeout=10)[0]) == str(tensor)
    with (
        tp.Consumer("inproc://layouts", accept=["torch_save"], as_numpy=True) as consumer,
        tp.Producer("inproc://layouts", serializer="torch_save") as producer,
    ):
        taken = in_thread(lambda: pytest.raises(tp.UnsupportedLeaf, consumer.get, 10))
        producer.put(sparse, timeout=10)
        assert "NumPy has no tensors of layout torch.sparse_coo" in str(taken().value)
        assert consumer.statistics().last_rejection == ""


def test_as_numpy_at_endpoints(transport: str) -> None:
    """A consumer's arrays lie on what they came in."""
    with tp.Consumer("tcp://127.0.0.1:0", as_numpy=True) as consumer, tp.Producer(consumer.endpoint) as producer:
        taken = in_thread(lambda: consumer.get(10))
        producer.put({"x": torch.arange(3), "y": torch.ones(LARGE)}, timeout=10)
        got = taken()
    assert type(got["x"]) is type(got["y"]) is np.ndarray
    assert got["y"].sum() == LARGE


def test_the_worst_error_stays_and_is_of_no_zero_nan_or_overflow() -> None:
    """Items whose relative error is none do not hide the others', and a later exact message does not make up for it."""
    queue = tp.Queue(wire_dtype=torch.float16)
    try:
        queue.put(torch.tensor([0.0, math.nan, math.inf, 1e6, 1 + 2**-11]))
        worst = queue.statistics().worst_error
        assert worst == pytest.approx(2**-11 / (1 + 2**-11))
        queue.put(torch.ones(3))
        assert queue.statistics().worst_error == worst
    finally:
        queue.close()


@pytest.mark.parametrize("shape", [(3, 1_400_001), (700_001, 6), (4, 2, 200_000)])
def test_overflows_of_a_large_tensor_with_gaps_are_counted_once(shape: tuple[int, ...]) -> None:
    """They are looked for in parts."""
    queue, sent = tp.Queue(wire_dtype=torch.float16), torch.ones(shape)[..., ::2]
    for place in (0, sent.numel() // 2, sent.numel() - 1):
        sent[tuple(np.unravel_index(place, sent.shape))] = 1e6
    queue.put(sent)
    assert int(torch.isinf(queue.get(timeout=20)).sum()) == 3
    assert queue.statistics().overflowed == 3


class Passing:
    """A user's serializer, whose payload is what raw makes: a view of the tensor's memory."""

    name, zero_copy = "passing", True

    def __init__(self) -> None:
        self.raw = Raw()

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        return self.raw.encode(tensor)

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        return self.raw.decode(meta, payload)


@pytest.mark.parametrize("items", [20, LARGE])
@pytest.mark.parametrize("kind", ["one", "dict", "views"])
def test_what_a_users_serializer_shows_of_a_narrow_tensor_is_kept_until_it_was_read(
    kind: str, items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrow one is the library's own, and nobody else has it."""
    monkeypatch.setitem(registered_serializers(), Passing.name, Checked(Passing()))
    there = tp.Queue(serializer="passing", wire_dtype=torch.float16)
    for first in range(10):
        tensors = [torch.arange(first, first + items) % 100 / 4 for _ in range(8)]
        if kind == "views":
            tensors = [view for each in tensors for view in each.split(items // 2)]
        there.put({"one": tensors[0], "dict": dict(enumerate(tensors)), "views": tensors}[kind])
        got = there.get(timeout=LIMIT)
        leaves = [got] if kind == "one" else got.values() if kind == "dict" else got
        assert all(map(torch.equal, leaves, tensors))
