"""The registry, and the conformance checks that a user's own serializer must pass."""

from __future__ import annotations

import io
import math
import signal
import struct
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from children import in_thread
from exchange import OWN, parts, round_trip, sent
from inside import registered_serializers
from programs import ran

import tensorpipe_ipc as tp
from tensorpipe_ipc.errors import ProtocolError, UnknownSerializer, UnsupportedLeaf
from tensorpipe_ipc.serializers import Serializer, register_serializer, serializer_named, serializer_names
from tensorpipe_ipc.serializers.base import describe, plain
from tensorpipe_ipc.serializers.conformance import Checked, check_serializer
from tensorpipe_ipc.wire.dtypes import BY_TORCH
from tensorpipe_ipc.wire.metas import TensorMeta, meta_of

RAW = serializer_named("raw")


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Serializers that a test registers are forgotten after it."""
    known = registered_serializers()
    before = dict(known)
    yield
    known.clear()
    known.update(before)


class Zlib:
    """raw's bytes, compressed."""

    name = "zlib"
    zero_copy = False

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        meta, payload = RAW.encode(tensor)
        return meta, zlib.compress(bytes(payload), 1)

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        return RAW.decode(meta, memoryview(bytearray(zlib.decompress(payload))))


def test_lists_its_names() -> None:
    """The three are there from the start, sorted, and a user's own comes among them."""
    assert serializer_names() == ("numpy", "raw", "torch_save")
    tp.register_serializer(Zlib())
    assert tp.serializer_names() == ("numpy", "raw", "torch_save", "zlib")


@pytest.mark.parametrize("name", ["rwa", "", None, 3, ["raw"]])
def test_an_unknown_name_lists_the_known(name: Any) -> None:
    """A name that nobody registered is a LookupError of ours that says which there are, and how to add one."""
    with pytest.raises(
        UnknownSerializer, match=r"\(known: numpy, raw, torch_save\); register_serializer\(\)"
    ) as raised:
        serializer_named(name)
    assert isinstance(raised.value, LookupError)


def test_the_built_in_ones_pass_their_own_checks() -> None:
    """raw, numpy and torch_save conform."""
    for name in serializer_names():
        check_serializer(serializer_named(name))


def test_a_good_one_takes_the_whole_zoo() -> None:
    """Once registered, a user's serializer carries every tree, whatever memory its tensors are to have."""
    register_serializer(Zlib())
    for name in zoo.ZOO:
        for own in (0, OWN):
            zoo.same(zoo.make(name), round_trip(zoo.make(name), "zlib", own))


class ForgetsStrides(Zlib):
    """Reads the memory behind a tensor in its order, whatever its strides are."""

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
        return describe(plain(tensor)), bytes(storage.tolist())


class ForgetsStridesAndStillFits(Zlib):
    """Sends the right number of bytes, in the order of memory instead of that of the indices."""

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        meta = describe(plain(tensor).contiguous())
        return meta, zlib.compress(bytes(RAW.encode(tensor)[1]))


class Mutates(Zlib):
    """Sends a tensor's items, and leaves it with others."""

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        meta, payload = super().encode(tensor)
        if tensor.is_contiguous() and not tensor.requires_grad and tensor.numel():
            tensor.view(-1)[0] = 1 if tensor.dtype is torch.bool else tensor.view(-1)[-1]
            tensor.view(-1).view(torch.uint8)[0] ^= 1
        return meta, payload


class LosesDtype(Zlib):
    """Gives everything back as float32: the fault of the method that this package takes its numpy from."""

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        return super().decode(meta, payload).to(torch.float32)


class LosesShape(Zlib):
    """Gives everything back in one dimension."""

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        return super().decode(meta, payload).reshape(-1)


class OpaqueLosesDtype(Zlib):
    """Sends bytes that are to say everything, but say nothing of the dtype."""

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        tensor = plain(tensor).contiguous()
        return tp.OPAQUE, struct.pack("<q", tensor.dim()) + struct.pack(f"<{tensor.dim()}q", *tensor.shape) + _octets(
            tensor
        )

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        (ndim,) = struct.unpack_from("<q", payload)
        shape = struct.unpack_from(f"<{ndim}q", payload, 8)
        octets = torch.frombuffer(bytearray(payload), dtype=torch.uint8)[8 + 8 * ndim :]
        return octets.view(*shape, -1) if len(octets) else torch.empty(shape, dtype=torch.uint8)


def _octets(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


class RaisesWhenEncoding(Zlib):
    """Lets its own exceptions out."""

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        if tensor.dtype is torch.bfloat16:
            raise KeyError("bfloat16")
        return super().encode(tensor)


class RaisesWhenDecoding(Zlib):
    """Cannot read what it wrote."""

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        raise KeyError(meta.dtype)


class GivesNoMeta(Zlib):
    """Gives a dtype for a meta."""

    def encode(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        return tensor.dtype, b""


class GivesNoBytes(Zlib):
    """Gives a list for a payload."""

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        return describe(plain(tensor)), [1, 2, 3]


class GivesNoTensor(Zlib):
    """Gives an array for a tensor."""

    def decode(self, meta: TensorMeta, payload: memoryview) -> Any:
        return super().decode(meta, payload).tolist()


class HidesAliasing(Zlib):
    """Says that it copies, and returns a tensor on the payload."""

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        return RAW.encode(tensor)

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        return RAW.decode(meta, payload)


class AliasesReadOnly(HidesAliasing):
    """Returns a tensor on the payload even where that may not be written to."""

    zero_copy = True

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        if not meta.nbytes:
            return torch.empty(meta.shape, dtype=meta.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of just that
            return RAW.decode(meta, _writable(torch.frombuffer(payload, dtype=torch.uint8)))


def _writable(memory: torch.Tensor) -> memoryview:
    return memory.numpy().data


class RefusesReadOnly(AliasesReadOnly):
    """Takes no payload that may not be written to."""

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        if payload.readonly:
            raise ValueError("a read-only payload")
        return RAW.decode(meta, payload)


class RefusesAll(Zlib):
    """Takes nothing."""

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        raise UnsupportedLeaf("no")


BAD = [
    (ForgetsStrides, "cannot read what it wrote .*transposed|cannot read what it wrote"),
    (ForgetsStridesAndStillFits, "gave transposed back with other items"),
    (Mutates, "changed the tensor that it encoded"),
    (LosesDtype, "the payload holds torch.float32"),
    (LosesShape, r"the payload holds torch.bool \[6\], the header says torch.bool \[2, 3\]"),
    (OpaqueLosesDtype, r"gave torch.\w+ of shape \(2, 3\) back as torch.uint8 of shape"),
    (RaisesWhenEncoding, r"failed on torch.bfloat16 \[2, 3\]: KeyError"),
    (RaisesWhenDecoding, "could not decode .* KeyError"),
    (GivesNoMeta, r"encode\(\) gave a dtype for a meta; return describe\(tensor\)"),
    (GivesNoBytes, "memoryview: a bytes-like object is required"),
    (GivesNoTensor, "the payload holds a list, not a tensor"),
    (AliasesReadOnly, "onto its payload, which is read-only"),
    (HidesAliasing, "onto its payload, which it may with zero_copy = True only"),
    (RefusesReadOnly, "cannot read what it wrote .*a read-only payload"),
    (RefusesAll, "refuses every kind of tensor"),
]


@pytest.mark.parametrize(("bad", "says"), BAD)
def test_a_bad_one_is_caught(bad: type, says: str) -> None:
    """Each fault is a TypeError that says what went wrong, on which tensor, and nothing is registered."""
    with pytest.raises(TypeError, match=says):
        register_serializer(bad())
    assert serializer_names() == ("numpy", "raw", "torch_save")


class Half(Zlib):
    """Says of itself that it is lossy."""

    name = "half"
    lossy = True

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        if tensor.dtype is not torch.float32:
            raise UnsupportedLeaf("only float32")
        tensor = plain(tensor).contiguous()
        return describe(tensor), zlib.compress(tensor.half().numpy().tobytes())

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        half = torch.frombuffer(bytearray(zlib.decompress(payload)) or bytearray(2), dtype=torch.float16)
        return half[: meta.nbytes // 4].float().view(meta.shape)


def test_a_lossy_one_may_say_so() -> None:
    """A serializer that says ``lossy = True`` need not give equal items; all else is held against it."""
    register_serializer(Half())
    assert round_trip(torch.tensor([1.0, 1 / 3]), "half").tolist() == pytest.approx([1.0, 1 / 3], abs=1e-3)
    Half.lossy = False
    try:
        with pytest.raises(TypeError, match="other items"):
            check_serializer(Half())
    finally:
        Half.lossy = True


class Coarse(Zlib):
    """Keeps the upper half of each pixel."""

    name = "coarse"
    lossy = True

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        return super().encode(tensor & 0xF0 if tensor.dtype is torch.uint8 and tensor.numel() > 1000 else tensor)


def test_a_lossy_one_must_be_exact_with_uint8() -> None:
    """As which memory that tensors share, bytes and pickles go through it."""
    with pytest.raises(TypeError, match="uint8.* must be exact, also with lossy"):
        register_serializer(Coarse())


class Summed(Zlib):
    """Has a checksum before, or behind, what it sends, and decodes to a part of what it has read."""

    name = "summed"

    def __init__(self, before: int, behind: int) -> None:
        self.before, self.behind = before, behind

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        tensor = plain(tensor).contiguous()
        return describe(tensor), b"\1" * self.before + _octets(tensor) + b"\2" * self.behind

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        octets = torch.frombuffer(bytearray(payload), dtype=torch.uint8)[self.before : len(payload) - self.behind]
        return octets.view(meta.dtype or torch.uint8).view(meta.shape)


@pytest.mark.parametrize(("before", "behind"), [(16, 0), (0, 16), (16, 16)])
def test_a_storage_arrives_without_what_a_serializer_has_beside_it(before: int, behind: int) -> None:
    """Alone, and beside views of it."""
    register_serializer(Summed(before, behind))
    there, tensor = tp.Queue(serializer="summed"), torch.arange(4, dtype=torch.int32)
    there.put([tensor.untyped_storage(), torch.arange(3).storage(), tensor[1:]])
    untyped, typed, view = there.get(timeout=10)
    assert (bytes(untyped), typed.tolist(), view.tolist()) == (bytes(tensor.untyped_storage()), [0, 1, 2], [1, 2, 3])
    view[0] = 7
    assert untyped[4] == 7


_REGISTERS_AND_FORKS = """
import os, signal, sys, zlib, torch
import tensorpipe_ipc as tp

class Zlib:
    name, zero_copy = "zlib", False
    def encode(self, tensor):
        tensor = tp.plain(tensor).contiguous()
        octets = bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
        return tp.describe(tensor), zlib.compress(octets)
    def decode(self, meta, payload):
        octets = bytearray(zlib.decompress(payload))
        if not octets:
            return torch.empty(meta.shape, dtype=meta.dtype)
        return torch.frombuffer(octets, dtype=meta.dtype).view(meta.shape)

def compute():
    return (torch.ones(1000, 1000) * 2).sum().item()

torch.set_num_threads(4)
first, then = (tp.register_serializer, compute) if sys.argv[1] == "before" else (compute, tp.register_serializer)
first(*[Zlib()] * (first is not compute))
child = os.fork()
if not child:
    signal.alarm(20)
    then(*[Zlib()] * (then is not compute))
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_who_registers_may_fork_before_it_or_after(when: str) -> None:
    """The checks start none of torch's threads, which a forked child would wait for, and need none."""
    done = ran("-c", _REGISTERS_AND_FORKS, when)
    assert (done.out, done.err) == ("0\n", "")


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 65, "a/b", "a\n", None, 3])
def test_bad_names_are_refused(name: Any) -> None:
    """A name that is none is a ValueError that says what a name is."""
    serializer = Zlib()
    serializer.name = name
    with pytest.raises(ValueError, match="1 to 64 letters, digits"):
        register_serializer(serializer)


@pytest.mark.parametrize("name", ["raw", "numpy", "torch_save", "zlib"])
def test_a_taken_name_is_refused(name: str) -> None:
    """Another serializer of a name is refused; the same class again (a notebook cell run again) is not."""
    register_serializer(Zlib())
    register_serializer(Zlib())
    other = LosesShape()
    other.name = name
    with pytest.raises(ValueError, match=f"a serializer named '{name}' is registered already"):
        register_serializer(other)


def test_what_is_no_serializer_is_refused() -> None:
    """An object without one of the four attributes is a TypeError that names them."""
    with pytest.raises(TypeError, match=r"lacks one of name, zero_copy, encode\(\) and decode\(\)"):
        register_serializer(object())  # type: ignore[arg-type]
    assert isinstance(Zlib(), Serializer)


class BreaksLater(Zlib):
    """Passes the checks, then breaks."""

    name = "later"
    broken = False

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        if self.broken:
            raise OSError("out of luck")
        return super().encode(tensor)


def test_errors_become_ours_afterwards_too() -> None:
    """An exception of a registered serializer becomes UnsupportedLeaf with a path, or ProtocolError."""
    register_serializer(BreaksLater())
    frames = parts(sent(torch.ones(2), "later"))
    with pytest.raises(ProtocolError, match="serializer 'later' could not decode .*incorrect header"):
        serializer_named("later").decode(describe(torch.ones(2)), memoryview(b"x" + frames[1]))
    BreaksLater.broken = True
    try:
        with pytest.raises(UnsupportedLeaf, match=r"^tree\['a'\]: serializer 'later' failed .*out of luck") as raised:
            sent({"a": torch.ones(2)}, "later")
        assert isinstance(raised.value.__cause__, OSError)
    finally:
        BreaksLater.broken = False


class _Alarm(Exception):
    pass


def _ring(*_: Any) -> None:
    raise _Alarm


class _Rings(Zlib):
    name = "rings"

    def __init__(self, when: str) -> None:
        self.when = when

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        if self.when == "encode":
            signal.raise_signal(signal.SIGUSR1)
        return super().encode(tensor)

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        signal.raise_signal(signal.SIGUSR1)
        return super().decode(meta, payload)


def test_an_exception_of_a_signals_handler_is_not_the_serializers() -> None:
    """Whatever it interrupts, the caller gets it as it was raised."""
    before = signal.signal(signal.SIGUSR1, _ring)
    try:
        with pytest.raises(_Alarm):
            Checked(_Rings("encode")).encode(torch.ones(3))
        serializer = Checked(_Rings("decode"))
        meta, payload = serializer.encode(torch.ones(3))
        with pytest.raises(_Alarm):
            serializer.decode(meta, memoryview(payload))
    finally:
        signal.signal(signal.SIGUSR1, before)


class Headed(Summed):
    """The same, on the payload itself: its items lie behind a head."""

    name = "headed"
    zero_copy = True

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        if not meta.nbytes:
            return torch.empty(meta.shape, dtype=meta.dtype)
        return RAW.decode(meta, payload[self.before :])


@pytest.mark.parametrize("head", [4, 8])
@pytest.mark.parametrize("way", ["alone", "views", "storage"])
def test_wide_items_behind_a_serializers_head_are_copied_where_torch_can_compute_with_them(head: int, way: str) -> None:
    """Its kernels end the process where complex128 lies at no multiple of 16 bytes."""
    register_serializer(Headed(head, 0))
    there, tensor = tp.Queue(serializer="headed"), torch.ones(6_000, dtype=torch.complex128)
    there.put({"alone": tensor, "views": [tensor[:3_000], tensor[3_000:]], "storage": tensor.untyped_storage()}[way])
    got = there.get(timeout=10)
    for each in got if way == "views" else [got]:
        assert each.data_ptr() % 16 == 0


class Spread(Zlib):
    """On the payload behind a head, in a form."""

    name = "spread"
    zero_copy = True

    def __init__(self, form: str) -> None:
        self.form = form

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        data = plain(tensor).contiguous()
        if self.form == "conjugated":
            data = data.conj().resolve_conj()
        rows = data.reshape(-1, data.shape[-1] if data.dim() == 2 else 1).view(torch.uint8)
        if self.form == "gaps" and data.dim() == 2:
            rows = torch.nn.functional.pad(rows, (0, data.itemsize))
        if self.form == "expanded" and data.numel() and (rows == rows[0]).all() and data.dim() < 2:
            rows = rows[:1]
        return describe(tensor.contiguous()), bytes(8) + rows.contiguous().numpy().tobytes()

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        if not meta.nbytes:
            return torch.empty(meta.shape, dtype=meta.dtype)
        if payload.readonly:
            payload = memoryview(bytearray(payload))
        items = torch.frombuffer(payload, dtype=meta.dtype, offset=8)
        if self.form == "gaps" and len(meta.shape) == 2:
            return items.view(meta.shape[0], -1)[:, :-1]
        if self.form == "expanded" and items.numel() == 1:
            return items.view(()).expand(meta.shape)
        items = items.view(meta.shape)
        return items.conj() if self.form == "conjugated" and meta.dtype.is_complex else items


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 5), (6_001,), (2, 3_001)])
@pytest.mark.parametrize("form", ["dense", "conjugated"])
def test_wide_items_are_copied_by_what_does_not_crash_on_them(form: str, shape: tuple[int, ...]) -> None:
    """Torch's own copy does, of an odd number of them."""
    tensor = torch.full(shape, 1 + 2j, dtype=torch.complex128) * torch.arange(1, math.prod(shape) + 1).view(shape)
    serializer = Checked(Spread(form))
    meta, payload = serializer.encode(tensor)
    received = torch.empty(len(payload) + 16, dtype=torch.uint8)  # torch's memory begins at a multiple of 16
    place = memoryview(received.numpy())[: len(payload)]
    place[:] = payload
    got = serializer.decode(meta, place)
    assert got.data_ptr() % 16 == 0
    assert (got.numpy() if form != "conjugated" else got.resolve_conj().numpy()).tolist() == tensor.numpy().tolist()
    assert got.untyped_storage().nbytes() <= len(payload)


@pytest.mark.parametrize("form", ["gaps", "expanded"])
def test_a_serializer_whose_tensors_have_gaps_or_overlaps_is_refused(form: str) -> None:
    """Of such a one, equal items would be shown once for all, and an array of them could not be made of what came."""
    with pytest.raises(TypeError, match="gaps or overlaps"):
        register_serializer(Spread(form))


@pytest.mark.parametrize("shared_memory", ["off", "require"])
def test_what_arrives_with_overlaps_all_the_same_is_dropped(
    shared_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of it would take as much memory as a peer says."""
    register_serializer(Spread("dense"))
    monkeypatch.setattr(serializer_named("spread").serializer, "form", "expanded")  # type: ignore[attr-defined]
    address = "tcp://127.0.0.1:0" if shared_memory == "off" else "spread"
    with tp.Consumer(address, shared_memory=shared_memory) as consumer:
        with tp.Producer(consumer.endpoint, shared_memory=shared_memory, serializer="spread", linger=0) as producer:
            putting = in_thread(lambda: (producer.put(torch.ones(7), 10), producer.put(torch.arange(8), 10)))
            assert consumer.get(timeout=10).tolist() == list(range(8))
            assert "gaps or overlaps" in consumer.statistics().last_rejection
            putting()


class Panic(BaseException):
    """As PyO3 raises for a panic."""


class Panicking(Zlib):
    name = "panicking"

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        if meta.shape == (7,):
            raise Panic("index out of bounds")
        return super().decode(meta, payload)


@pytest.mark.parametrize("shared_memory", ["off", "require"])
def test_a_serializer_that_ends_in_what_is_no_exception_costs_its_message_alone(shared_memory: Any) -> None:
    register_serializer(Panicking())
    address = "tcp://127.0.0.1:0" if shared_memory == "off" else "panicking"
    with tp.Consumer(address, shared_memory=shared_memory) as consumer:
        with tp.Producer(consumer.endpoint, shared_memory=shared_memory, serializer="panicking", linger=0) as producer:
            putting = in_thread(lambda: (producer.put(torch.ones(7), 10), producer.put(torch.ones(8), 10)))
            assert consumer.get(timeout=10).numel() == 8
            assert "index out of bounds" in consumer.statistics().last_rejection
            putting()


class Reticent(Zlib):
    """Says OPAQUE of large tensors, whose meta stands in the bytes."""

    name = "reticent"

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        if tensor.nbytes < 10_000:
            return super().encode(tensor)
        file = io.BytesIO()
        torch.save(tensor.detach().clone(), file)
        return tp.OPAQUE, file.getvalue()

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        if meta.dtype is not None:
            return super().decode(meta, payload)
        return torch.load(io.BytesIO(bytes(payload)), weights_only=True)


def test_views_of_one_memory_of_which_a_serializer_says_nothing_are_refused_and_not_lost() -> None:
    register_serializer(Reticent())
    there = tp.Queue(serializer="reticent")
    with pytest.raises(tp.UnsupportedLeaf, match="memory that several tensors share"):
        there.put(list(torch.zeros(2, 8_000)))
    there.put([torch.zeros(8_000), torch.ones(2)])
    assert [each.numel() for each in there.get(timeout=10)] == [8_000, 2]


@pytest.mark.parametrize("dtype", BY_TORCH, ids=str)
def test_items_of_any_dtype_beside_a_storage_are_copied_to_where_torch_can_compute_with_them(
    dtype: torch.dtype,
) -> None:
    """Of a storage, tensors of any dtype may be made."""
    register_serializer(Headed(8, 0))
    there = tp.Queue(serializer="headed")
    tensor, beside = torch.arange(96, dtype=torch.uint8).remainder(2).view(dtype), torch.ones(5).untyped_storage()
    there.put({"tensor": tensor, "storage": beside})
    got = there.get(timeout=10)["tensor"]
    assert got.dtype is dtype
    assert got.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


class Trusting(Zlib):
    """Makes room for what the meta says."""

    name = "trusting"

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        meta, payload = super().encode(tensor)
        return (meta_of(torch.uint8, (1 << 46,), None) if tensor.numel() == 7 else meta), payload

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        bytearray(meta.nbytes)
        return super().decode(meta, payload)


@pytest.mark.parametrize("shared_memory", ["off", "require"])
def test_what_is_only_said_to_be_large_is_told_once(shared_memory: Any) -> None:
    """It is dropped, and does not come again. The next message comes."""
    register_serializer(Trusting())
    address = "tcp://127.0.0.1:0" if shared_memory == "off" else "trusting"
    with tp.Consumer(address, shared_memory=shared_memory) as consumer:
        with tp.Producer(consumer.endpoint, shared_memory=shared_memory, serializer="trusting", linger=0) as producer:
            putting = in_thread(lambda: (producer.put(torch.ones(7), 10), producer.put(torch.ones(8), 10)))
            with pytest.raises(tp.OutOfMemory, match="serializer 'trusting' found no memory to decode"):
                consumer.get(timeout=10)
            assert consumer.get(timeout=10).numel() == 8
            assert "found no memory" in consumer.statistics().last_rejection
            putting()


class Unmasking(Zlib):
    """Decodes where the payload lies."""

    name = "unmasking"
    zero_copy = True

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        data = np.frombuffer(plain(tensor).contiguous().numpy().tobytes(), np.uint8)
        return describe(tensor.contiguous()), (data ^ 0xFF).tobytes()

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        data = np.frombuffer(payload, np.uint8)
        data = data.copy() if payload.readonly else data
        data ^= 0xFF
        if not meta.nbytes:
            return torch.empty(meta.shape, dtype=meta.dtype)
        return torch.from_numpy(data).view(meta.dtype).view(meta.shape)


def test_a_serializer_that_changes_what_came_is_refused() -> None:
    """A message may be read again, after an exception or for as_numpy."""
    with pytest.raises(TypeError, match="changed its payload"):
        register_serializer(Unmasking())


class Doubling(Zlib):
    """Doubles floats where the payload lies."""

    name = "doubling"
    zero_copy = lossy = True

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        return describe(tensor.contiguous()), bytes(RAW.encode(tensor.contiguous())[1])

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        tensor = RAW.decode(meta, payload)
        return tensor if payload.readonly or meta.dtype is not torch.float32 else tensor.mul_(2)


def test_a_lossy_one_that_changes_what_came_is_refused_too() -> None:
    with pytest.raises(TypeError, match="changed its payload"):
        register_serializer(Doubling())


class Forgetful(Zlib):
    """Finds no memory at first."""

    name = "forgetful"
    tries = 2
    error: type[Exception] = MemoryError
    is_opaque = False

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        if not self.is_opaque:
            return super().encode(tensor)
        file = io.BytesIO()
        torch.save(tensor.detach().clone(), file)
        return tp.OPAQUE, file.getvalue()

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        if self.tries and max(meta.nbytes, len(payload)) > 1_000_000:
            self.tries -= 1
            raise self.error("can't allocate memory")
        if self.is_opaque:
            return torch.load(io.BytesIO(bytes(payload)), weights_only=True)
        return super().decode(meta, payload)


@pytest.mark.parametrize("is_opaque", [False, True])
@pytest.mark.parametrize("error", [MemoryError, RuntimeError, torch.OutOfMemoryError])
def test_what_a_serializer_finds_no_memory_for_comes_again(
    error: type[Exception], is_opaque: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the library's own. torch has no type for that error."""
    monkeypatch.setattr(Forgetful, "error", error)
    monkeypatch.setattr(Forgetful, "is_opaque", is_opaque)
    register_serializer(Forgetful())
    there = tp.Queue(serializer="forgetful")
    there.put(torch.zeros(300_000))
    for _ in range(2):
        with pytest.raises(tp.OutOfMemory, match="serializer 'forgetful' found no memory to decode"):
            there.get(timeout=10)
    assert there.get(timeout=10).shape == (300_000,)


def test_what_a_serializer_finds_no_memory_for_a_consumer_drops_and_tells() -> None:
    """A peer may have made up how large it is. Else it would hold up the others' messages, time and again."""
    register_serializer(Forgetful())
    with tp.Consumer("again", shared_memory="require") as consumer:
        with tp.Producer("again", shared_memory="require", serializer="forgetful") as producer:
            putting = in_thread(lambda: (producer.put(torch.zeros(300_000), 10), producer.put(torch.zeros(3), 10)))
            with pytest.raises(tp.OutOfMemory, match="can't allocate memory"):
                consumer.get(10)
            assert consumer.get(10).shape == (3,)
            assert "can't allocate memory" in consumer.statistics().last_rejection
            putting()


def test_a_tensor_that_a_serializer_finds_no_memory_for_is_not_sent() -> None:
    """The error says so, and the queue can be used on."""

    class Short(Zlib):
        name = "short"

        def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
            if tensor.nbytes > 1_000_000:
                raise MemoryError("none")
            return super().encode(tensor)

    register_serializer(Short())
    there = tp.Queue(serializer="short")
    with pytest.raises(tp.OutOfMemory, match="serializer 'short' found no memory for torch.float32 .* It was not sent"):
        there.put(torch.zeros(300_000))
    there.put(torch.ones(1))
    assert there.get(timeout=10) == 1
