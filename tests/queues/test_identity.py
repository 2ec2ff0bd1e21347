"""One object in a message that is put is one object in the message that get returns, as with multiprocessing.Queue.

This holds whatever went through the queue before. Objects may go as trees or as pickles, and nobody can tell.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import threading
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from crash_points import in_child, reap
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensorpipe_ipc as tp
from tensorpipe_ipc.serializers.raw import Raw

LIMIT = 20


class Node:
    """Any object: what it has, anything may refer to."""


class Slotted:
    __slots__ = ("left", "right")


@tp.register_type
class Couple(NamedTuple):
    left: Any
    right: Any


@tp.register_type
@dataclasses.dataclass(eq=False)
class Record:
    left: Any
    right: Any


class Reduced:
    """Counts how often it is reduced."""

    count = 0

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        Reduced.count += 1
        return Reduced, self.parts


HISTORIES: list[list[Any]] = [[], [3], [torch.ones(2)], [{"x": torch.ones(2)}, None], [None, [1, torch.ones(2)]]]
_VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))


@st.composite
def graphs(draw: st.DrawFn) -> Any:
    """An object graph: what is made later refers to what was made before, some more than once, and some back to later ones."""
    made: list[Any] = [draw(_VALUES)]
    for _ in range(draw(st.integers(0, 9))):
        few = [draw(st.sampled_from(made)) for _ in range(draw(st.integers(0, 3)))]
        left, right = (few + [None, None])[:2]
        kind = draw(st.sampled_from("list tuple dict node slotted pair record tensor large array bytes value".split()))
        if kind == "list":
            made.append(few)
        elif kind == "tuple":
            made.append(tuple(few))
        elif kind == "dict":
            made.append({draw(st.sampled_from(["a", 1, (2, "b")])): each for each in few})
        elif kind in ("node", "slotted", "pair", "record"):
            made.append(_instance(kind, left, right))
        elif kind in ("tensor", "large"):
            size = 3 if kind == "tensor" else 1 << 14
            made.append(torch.full((size,), float(len(made)), requires_grad=draw(st.booleans())))
        elif kind == "array":
            made.append(np.full(draw(st.sampled_from([0, 2])), len(made)))
        else:
            made.append(b"%d" % len(made) * 3 if kind == "bytes" else draw(_VALUES))
    whole = made[-1] if draw(st.booleans()) else made
    for back in [each for each in made if type(each) in (list, dict, Node)][:1]:
        if draw(st.booleans()):
            _refer(back, draw(st.sampled_from([made[-1], back])))
    return whole


def _instance(kind: str, left: Any, right: Any) -> Any:
    if kind == "pair":
        return Couple(left, right)
    if kind == "record":
        record = Record(left, right)
        record.more = 1  # type: ignore[attr-defined]  # what is no field travels, too
        return record
    made: Any = Node() if kind == "node" else Slotted()
    made.left, made.right = left, right
    return made


def _refer(back: Any, to: Any) -> None:
    if type(back) is list:
        back.append(to)
    elif type(back) is dict:
        back["back"] = to
    else:
        back.left = to


def _parts(obj: Any) -> list[Any]:
    if isinstance(obj, dict):
        return [*obj.keys(), *obj.values()]
    if isinstance(obj, (list, tuple)):
        return list(obj)
    if isinstance(obj, (Node, Record)):
        return [vars(obj)[name] for name in sorted(vars(obj))]
    return [obj.left, obj.right] if isinstance(obj, Slotted) else []


def same_graph(one: Any, other: Any) -> None:
    """See that two object graphs have the same types, values and identities, all the way round."""
    there: dict[int, Any] = {}
    back: dict[int, Any] = {}
    todo, alive = [(one, other)], list[Any]()
    while todo:
        a, b = todo.pop()
        assert type(a) is type(b), (a, b)
        if isinstance(a, (int, float, str, type(None))) or (type(a) in (tuple, bytes) and not a):
            assert a == b or (a != a and b != b), (a, b)
            continue
        assert there.setdefault(id(a), b) is b, f"{type(a)}: one object there is two here"
        assert back.setdefault(id(b), a) is a, f"{type(a)}: two objects there are one here"
        if any(a is each for each in alive):
            continue
        alive.append(a)
        if isinstance(a, (torch.Tensor, np.ndarray)):
            assert a.dtype == b.dtype
            assert a.tolist() == b.tolist()
            assert getattr(a, "requires_grad", None) == getattr(b, "requires_grad", None)
        elif isinstance(a, bytes):
            assert a == b
        else:
            mine, theirs = _parts(a), _parts(b)
            assert len(mine) == len(theirs)
            todo += zip(mine, theirs, strict=True)


def _arrives_as_pickle_makes_it(graph: Any, history: list[Any]) -> None:
    there = _one_queue()
    expected = pickle.loads(pickle.dumps(graph, 5))  # noqa: S301 - our own
    for before in history:
        there.put(before)
        there.get(timeout=LIMIT)
    for _ in range(2):
        there.put(graph)
        same_graph(expected, there.get(timeout=LIMIT))
    there.put_many([graph, graph])
    for got in there.get_many(2, timeout=LIMIT):
        same_graph(expected, got)


def test_a_list_of_lists_of_the_same_lists_arrives_so() -> None:
    """It has 120 items, and would have more than anybody can count if each were written where it stands."""
    there, start = tp.Queue(), list[Any]()
    there.put([torch.arange(3), functools.reduce(lambda inner, _: [inner, inner], range(60), start)])
    found = there.get(timeout=LIMIT)[1]
    for _ in range(60):
        first, second = found
        assert first is second
        found = first
    assert found == []


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.kills)])
def test_any_graph_of_objects_arrives_as_pickle_makes_it(examples: int) -> None:
    """Types, values and identities are those of a pickle round trip, after any history, and twice over."""
    some = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck]
    )
    some(given(graph=graphs(), history=st.sampled_from(HISTORIES))(_arrives_as_pickle_makes_it))()


_queues: list[tp.Queue] = []


def _one_queue() -> tp.Queue:
    if not _queues:
        _queues.append(tp.Queue())
    return _queues[0]


@pytest.fixture(autouse=True)
def _drop_the_queue() -> Any:
    yield
    _queues.clear()


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_a_list_twice_is_one_list(history: list[Any]) -> None:
    """The same list, dict, tensor, array, storage or tensor in two lists arrives as the same object."""
    there = tp.Queue()
    for before in history:
        there.put(before)
        there.get(timeout=LIMIT)
    tensor = torch.ones(3)
    for part in ([], [1], {"a": 1}, tensor, np.ones(3), tensor.untyped_storage(), b"bytes", torch.nn.Parameter(tensor)):
        for whole in ([part, part], {"a": part, "b": [part]}, (part, 1, [part])):
            there.put(whole)
            got = there.get(timeout=LIMIT)
            first, second = (got["a"], got["b"][0]) if isinstance(got, dict) else (got[0], got[-1])
            assert first is (second[0] if isinstance(got, tuple) else second)
    itself: list[Any] = [tensor]
    itself.append(itself)
    there.put(itself)
    got = there.get(timeout=LIMIT)
    assert got[1] is got


@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_an_object_is_reduced_once_for_a_put(history: list[Any], move: bool) -> None:
    """__reduce__ runs once, with tensors beside the object or not, by reference or not; and not at all for a tree."""
    ctx = tp.get_context("fork")
    there = ctx.Queue()
    for before in history:
        there.put(before)
        there.get(timeout=LIMIT)
    for make in (
        lambda: Reduced(1),
        lambda: [Reduced(torch.ones(2)), torch.ones(3)],
        lambda: {"x": ctx.empty(1 << 15).zero_(), "y": Reduced()},
        lambda: Reduced(ctx.empty(1 << 15).zero_()),
        lambda: [Reduced(torch.eye(3).to_sparse_csr().values())],
    ):
        obj = make()
        Reduced.count = 0
        there.put(obj, move=move)
        assert Reduced.count == 1
        got = there.get(timeout=LIMIT)
        assert type(got) is type(obj)
        del got, obj


def test_what_cannot_be_pickled_raises_once_and_the_queue_goes_on() -> None:
    """An object whose pickling fails after some of it was done costs nothing, whatever came before."""
    there = tp.Queue(1)
    for history in HISTORIES:
        for before in history:
            there.put(before)
            there.get(timeout=LIMIT)
        Reduced.count = 0
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
            there.put([torch.ones(3), Reduced(torch.ones(1 << 15)), lambda: 0])
        assert Reduced.count == 1
        assert there.empty()


def test_kinds_of_dicts_and_lists_keep_their_types() -> None:
    """An OrderedDict, a Counter and a memory-mapped array's copy arrive as what they are, next to tensors."""
    there = tp.Queue()
    sent = [OrderedDict(b=torch.ones(2), a=1), Counter("aab"), {1, 2}, torch.Size([2]), range(3)]
    for _ in range(2):
        there.put(sent)
        assert list(map(type, there.get(timeout=LIMIT))) == list(map(type, sent))
        there.put(1)
        assert there.get(timeout=LIMIT) == 1


def test_a_registered_type_that_has_no_name_crosses_all_the_same() -> None:
    """A NamedTuple of a function's own cannot be pickled; registered, it crosses as a tree, after any history."""

    class Local(NamedTuple):
        x: Any

    tp.register_type(Local)
    there = tp.Queue()
    for history in HISTORIES:
        for before in history:
            there.put(before)
            there.get(timeout=LIMIT)
        there.put(Local(torch.ones(2)))
        got = there.get(timeout=LIMIT)
        assert type(got) is Local
        there.put([Local(3)])
        assert there.get(timeout=LIMIT) == [Local(3)]


class Locked:
    """Pickle cannot take it, as it has a lock."""

    def __init__(self, parts: Any) -> None:
        self.parts, self.lock = parts, threading.Lock()


@pytest.mark.parametrize("kind", [tuple, list, lambda parts: {"parts": parts}], ids=["tuple", "list", "dict"])
def test_many_of_a_registered_type_that_pickle_cannot_take_cross(kind: Any) -> None:
    """Each is made a container of its own to be sent: one is not taken for another that was let go of."""
    tp.register_type(Locked, to=lambda locked: kind(locked.parts), from_=Locked)
    there = tp.Queue()
    for sent in ([Locked((1, "a"))], [Locked((number, torch.ones(2))) for number in range(8)]):
        there.put(sent)
        got = there.get(timeout=LIMIT)
        assert [type(each.parts) for each in got] == [type(kind(())) for _ in sent]
        assert len(got) == len(sent)


@pytest.mark.parametrize("dtype", ["f8", ">f8", "U3", "S3", [("price", "f8"), ("size", "i4")], "longdouble"], ids=str)
def test_a_read_only_array_arrives_as_the_receivers_own(dtype: Any) -> None:
    """As with multiprocessing's queue, which sends a copy: whoever got it may write to it."""
    there, sent = tp.Queue(), np.zeros(5, dtype)
    sent.flags.writeable = False
    there.put(sent)
    got = there.get()
    assert got.dtype.newbyteorder("=") == sent.dtype.newbyteorder("=")
    got[:] = np.ones(5, dtype)


def _put_records_of_complex_numbers(serializer: str) -> None:
    there = tp.Queue(serializer=serializer)
    for at in range(1, 16):
        for count in range(1, 9):
            sent = np.ndarray((40, count), np.complex128, bytearray(1 << 15), at, (16 * count + 32, 16))
            sent[...] = np.arange(40 * count).reshape(40, count)
            conjugate = torch.from_numpy(sent).conj()
            for each in (sent, torch.from_numpy(sent), conjugate):
                there.put(each)
                got = np.asarray(there.get(timeout=LIMIT))
                assert (got == (sent.conj() if each is conjugate else sent)).all()
            whole = np.ndarray(count, np.complex128, sent.base, at)
            tensor = torch.from_numpy(whole)
            for each, items in (
                (whole, whole),
                (tensor, whole),
                (tensor[0], whole[0]),
                (tensor.conj(), whole.conj()),
                (tensor[0].conj(), whole[0].conj()),
            ):
                there.put({"items": each})
                assert (np.asarray(there.get(timeout=LIMIT)["items"]) == items).all()
    record = np.ndarray((40, 7), np.complex128, bytearray(1 << 15), 8)
    record[...] = 7
    there.put([record, record[:, :5]])
    whole, part = there.get(timeout=LIMIT)
    assert (whole == 7).all()
    assert (part == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize("serializer", ["raw", "numpy", "torch_save"])
def test_arrays_of_complex_numbers_arrive_wherever_they_lie(serializer: str) -> None:
    """As behind a header of 8 bytes. torch's kernels load two halves at once there, and end the process."""
    assert reap(in_child(lambda: _put_records_of_complex_numbers(serializer))) == 0


def _put_and_get_where_new_memory_is_filled(sent: torch.Tensor) -> None:
    torch.use_deterministic_algorithms(True)
    there = tp.Queue(wire_dtype=torch.float16)
    there.put(sent)
    assert there.get(timeout=LIMIT)[0, 0] == 1
    there.put_many(each for each in ([sent, sent[:, :500]], 1))
    assert len(there.get_many(2, timeout=LIMIT)) == 2


@pytest.mark.slow
def test_a_forked_child_narrows_and_restores_where_operations_are_deterministic() -> None:
    """torch fills what it makes then, by threads that are the parent's."""
    sent = torch.ones(512, 512)  # by these threads
    assert reap(in_child(lambda: _put_and_get_where_new_memory_is_filled(sent))) == 0


def _send_four_bits_where_new_memory_is_filled() -> None:
    torch.use_deterministic_algorithms(True)
    four = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    tp.register_serializer(Plain())
    for serializer in ("raw", "numpy", "plain"):  # torch itself cannot load an empty one
        there = tp.Queue(serializer=serializer)
        for sent in (four, [four, four], [four[:4], four[2:]], torch.empty(0, dtype=torch.uint8).view(four.dtype)):
            try:
                there.put(sent)
            except tp.UnsupportedLeaf:
                continue
            came = there.get(timeout=LIMIT)
            pairs = zip(sent, came, strict=True) if type(sent) is list else [(sent, came)]
            assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


class Plain:
    """A user's serializer."""

    name, zero_copy = "plain", False

    def encode(self, tensor: torch.Tensor) -> Any:
        meta, payload = Raw().encode(tensor)
        return meta, bytes(payload)

    def decode(self, meta: Any, payload: memoryview) -> torch.Tensor:
        return Raw().decode(meta, memoryview(bytearray(payload)))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype")
def test_where_operations_are_deterministic_serializers_can_be_registered_and_four_bits_sent() -> None:
    """torch cannot fill new memory of that dtype."""
    assert reap(in_child(_send_four_bits_where_new_memory_is_filled)) == 0


class Image(torch.Tensor):
    """A user's own kind of tensor, as torchvision has."""


def _image(tensor: torch.Tensor, **attributes: Any) -> Image:
    image = tensor.as_subclass(Image)
    vars(image).update(attributes)
    return image


def test_a_slice_of_a_subclass_sends_what_it_shows() -> None:
    """It arrives with its type, values and attributes, and what shares memory shares it."""
    there, images = tp.Queue(), torch.arange(1e6).view(1000, 1000)
    first, turned = _image(images[3], label="cat"), _image(images[7:9].t()[:10])
    for sent in ([first, first, turned], _image(images[3], label="cat")):
        before = there.statistics().bytes_put
        there.put(sent)
        assert there.statistics().bytes_put - before < 30_000
        got = there.get(timeout=LIMIT)
        one = got[0] if isinstance(sent, list) else got
        assert (type(one), one.label, one.requires_grad) == (Image, "cat", False)
        assert one.tolist() == images[3].tolist()
        if isinstance(sent, list):
            assert got[1] is one
            assert got[2].tolist() == turned.tolist()
    there.put([_image(images[2]), images[2], _image(images[2, 5:]).requires_grad_()])
    whole, plain, part = there.get(timeout=LIMIT)
    plain[5] = -1
    assert (whole[5], part[0].item(), part.requires_grad) == (-1, -1, True)


def test_a_subclass_arrives_as_a_tensor_does_where_the_get_wants_another_kind() -> None:
    """As an array, or on another device."""
    there = tp.Queue()
    for _ in range(2):
        there.put({"image": _image(torch.arange(6).view(2, 3)), 1: {2}})
    got = there.get(as_numpy=True, timeout=LIMIT)["image"]
    assert isinstance(got, np.ndarray)
    assert got.tolist() == [[0, 1, 2], [3, 4, 5]]
    moved = there.get(device="meta", timeout=LIMIT)["image"]
    assert (type(moved), moved.device.type) == (Image, "meta")


@pytest.mark.filterwarnings("ignore")  # torch has one of its checks
def test_a_sparse_parameter_stays_one() -> None:
    """A weight that arrived as a mere tensor was no longer trained."""
    there, sent = tp.Queue(), torch.nn.Linear(3, 2)
    sent.weight = torch.nn.Parameter(torch.eye(2, 3).to_sparse())
    there.put(sent)
    got = there.get(timeout=LIMIT)
    assert [type(each) for each in got.parameters()] == [torch.nn.Parameter] * 2
    assert got.weight.requires_grad
    assert torch.equal(got.weight.detach().to_dense(), torch.eye(2, 3))


@pytest.mark.filterwarnings("ignore")  # torch deprecates them
def test_a_quantized_tensor_of_half_bytes_arrives() -> None:
    """torch can neither clone nor compare them."""
    scales, zeros = torch.rand(8) + 0.1, torch.zeros(8)
    sent = torch.quantize_per_channel(torch.rand(8, 16), scales, zeros, 0, torch.quint4x2)
    for there in (tp.Queue(), tp.Queue(serializer="torch_save")):
        there.put(sent)
        got = there.get(timeout=LIMIT)
        assert (got.dtype, got.shape, got.qscheme()) == (sent.dtype, sent.shape, sent.qscheme())
        assert bytes(got.untyped_storage()) == bytes(sent.untyped_storage())


@pytest.mark.filterwarnings("ignore")
def test_a_forked_child_puts_a_slice_of_a_large_quantized_tensor() -> None:
    """Nothing that torch shares out among threads is done there: they are the parent's."""
    rows = torch.quantize_per_tensor(torch.rand(1000, 1000), 0.01, 0, torch.quint8)  # by several threads
    there = tp.Queue()
    child = in_child(lambda: there.put(rows[:500]))
    assert torch.equal(there.get(timeout=LIMIT).int_repr(), rows[:500].int_repr())
    assert reap(child) == 0


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.complex32])
def test_a_subclass_of_any_dtype_arrives(dtype: torch.dtype) -> None:
    """As one of torchvision's does, of a file with 16 bits a pixel."""
    there = tp.Queue()
    sent = torch.arange(200).to(torch.uint8).view(dtype)
    there.put(_image(sent[3:20], label="deep"))
    got = there.get(timeout=LIMIT)
    assert (type(got), got.label, got.dtype) == (Image, "deep", dtype)
    assert got.as_subclass(torch.Tensor).view(torch.uint8).tolist() == sent[3:20].view(torch.uint8).tolist()


class Camera:
    """Pickle finds it by name."""

    def __init__(self, rotation: torch.Tensor) -> None:
        self.rotation = rotation


@pytest.mark.parametrize("beside", [None, {1, 2}], ids=["in a tree", "in a pickle"])
def test_a_registered_object_crosses_as_pickle_has_it_where_it_can(beside: Any) -> None:
    """Its receivers may not have registered it. What takes it apart for endpoints is not called in vain."""
    called: list[str] = []
    tp.register_type(
        Camera, to=lambda camera: called.append("to") or camera.rotation, from_=lambda parts: called.append("from_")
    )
    there, sent = tp.Queue(), Camera(torch.eye(3))
    for tree in (sent, [sent, "x"], {"a": sent, "b": beside}, [sent, sent]):
        there.put(tree)
        got = there.get(timeout=LIMIT)
        first = got if tree is sent else got["a"] if type(got) is dict else got[0]
        assert torch.equal(first.rotation, sent.rotation)
        if type(tree) is list:
            assert got[1] in (first, "x")
    assert not called


def test_a_registered_object_that_pickle_cannot_find_crosses_by_what_takes_it_apart() -> None:
    """As at an endpoint."""

    class Local:
        def __init__(self, rotation: torch.Tensor) -> None:
            self.rotation = rotation

    tp.register_type(Local, to=lambda local: (local.rotation, "parts"), from_=lambda parts: Local(parts[0]))
    there = tp.Queue()
    there.put({"a": Local(torch.eye(3))})
    assert torch.equal(there.get(timeout=LIMIT)["a"].rotation, torch.eye(3))


@pytest.mark.parametrize("size", [100, 100_000])
def test_arrays_on_one_memory_arrive_each_on_its_own(size: int) -> None:
    """As pickle makes them. Tensors on one storage stay so."""
    array = np.arange(float(size))
    tensor, there = torch.from_numpy(array), tp.Queue()
    there.put({"all": array, "train": array[: size // 2], "column": array.reshape(-1, 2)[:, 0], "tensor": tensor})
    got = there.get(timeout=LIMIT)
    got["train"][:] = -1.0
    got["tensor"][:] = -2.0
    assert (got["all"] == array).all()
    assert (got["column"] == array[::2]).all()
    assert (got["train"] == -1.0).all()


def test_objects_that_are_taken_apart_into_one_buffer_keep_their_own_content() -> None:
    """put_many reads each before it takes the next one apart. Pickle cannot find their class."""

    class Filled:
        buffer = torch.zeros(20)

        def __init__(self, number: float) -> None:
            self.number = number

    tp.register_type(Filled, to=lambda each: each.buffer.fill_(each.number), from_=lambda tensor: tensor.tolist())
    there = tp.Queue()
    there.put_many([Filled(number) for number in range(5)])
    assert [there.get(timeout=LIMIT) for _ in range(5)] == [[float(number)] * 20 for number in range(5)]
