"""The spec of each kind of node as golden bytes, and the registry of types."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import zoo
from exchange import join, round_trip

import tensorpipe_ipc as tp
from tensorpipe_ipc.errors import ProtocolError, UnsupportedLeaf
from tensorpipe_ipc.wire.flatten import flatten
from tensorpipe_ipc.wire.rebuild import Plan
from tensorpipe_ipc.wire.spec import BY_NAME, BY_TYPE, Op, Registered, register_type

ONE = torch.ones(1)
# A change to any of these is a change of the format: it must change header.VERSION in the same commit.
GOLDEN: dict[str, tuple[Any, bytes, list[Any]]] = {
    "SCALAR": (np.float16(0.5), b"\x08\x0a", [0.5]),
    "SCALAR, complex": (np.complex64(1 - 2j), b"\x08\x15", [1.0, -2.0]),
    "ORDERED": (OrderedDict(a=None), join(["25 22 01000000", "0200 a161", "00 00"]), []),
    "ORDERED, with attributes": (
        zoo.ordered(),
        join(["25 22 01000000", "0200 a161", "00 22 01000000", "0a00 a9", b"_metadata", "25 22 00000000 00"]),
        [],
    ),
    "CUSTOM": (zoo.Pose(1, "map"), join(["26 0400", b"Pose", "21 02000000 01 01"]), [1, "map"]),
    "NONE": (None, b"\x00", []),
    "VALUE, bool": (True, b"\x01", [True]),
    "VALUE, int": (7, b"\x01", [7]),
    "VALUE, float": (0.5, b"\x01", [0.5]),
    "VALUE, str": ("é", b"\x01", ["é"]),
    "INT": (1 << 64, b"\x02", ["0x10000000000000000"]),
    "INT, negative": (-(1 << 64), b"\x02", ["-0x10000000000000000"]),
    "COMPLEX": (1 - 2j, b"\x03", [1.0, -2.0]),
    "STR": ("\ud800", b"\x04", ["\xed\xa0\x80"]),
    "DTYPE": (torch.float32, b"\x05\x0b", []),
    "SIZE": (torch.Size([2, 3]), join(["06 02000000 0200000000000000 0300000000000000"]), []),
    "DEVICE": (torch.device("cuda", 1), join(["07 0600", b"cuda:1"]), []),
    "TENSOR": (ONE, b"\x10", []),
    "TENSOR_GRAD": (torch.ones(1, requires_grad=True), b"\x11", []),
    "PARAMETER": (torch.nn.Parameter(ONE), b"\x12", []),
    "FROZEN": (torch.nn.Parameter(ONE, requires_grad=False), b"\x13", []),
    "NDARRAY": (np.ones(1), b"\x14", []),
    "BYTES": (b"x", b"\x15", []),
    "UNTYPED": (ONE.untyped_storage(), b"\x16", []),
    "TYPED": (zoo.typed_storage(torch.float16), b"\x17\x0a", []),
    "LIST": ([None, None], join(["20 02000000 00 00"]), []),
    "TUPLE": ((None,), join(["21 01000000 00"]), []),
    "DICT": (
        {"a": None, 1: None, (b"k", None): None},
        join(["22 03000000", "0200 a161", "0100 01", "0500 92c4016bc0", "00 00 00"]),
        [],
    ),
    "NAMEDTUPLE": (
        zoo.Animal(None, 1),
        join(["23 0600", b"Animal", "02000000", "0500", b"image", "0500", b"label", "00 01"]),
        [1],
    ),
    "DATACLASS": (
        zoo.Batch(None, 0.5),
        join(["24 0500", b"Batch", "03000000", "0700", b"samples", "0600", b"weight", "0700", b"history", "00 01 01"]),
        [0.5, "made by __post_init__"],
    ),
}


@pytest.mark.parametrize("node", GOLDEN)
def test_nodes_are_these_bytes(node: str) -> None:
    """A node of each kind has these bytes and values, and they are that node."""
    tree, golden, values = GOLDEN[node]
    flat = flatten(tree)
    assert b"".join(flat.spec) == golden
    assert flat.values == values
    plan = Plan(golden)
    assert (plan.leaves, plan.values) == (len(flat.leaves), len(values))
    zoo.same(tree, plan.build([leaf.clone().detach() for leaf in flat.leaves], values))


def test_every_kind_has_golden_bytes() -> None:
    """No kind of node is missing above."""
    kinds = {value for name, value in vars(Op).items() if name.isupper()}
    assert {golden[0] for _, golden, _ in GOLDEN.values()} == kinds


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Point:
    x: Any
    y: Any


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types that a test registers are forgotten after it."""
    names, types = dict(BY_NAME), dict(BY_TYPE)
    yield
    for table, before in ((BY_NAME, names), (BY_TYPE, types)):
        table.clear()
        table.update(before)


def test_registers_namedtuples_and_dataclasses(registry: None) -> None:
    """Both kinds can be registered, under their own name or another, and the class comes back."""
    assert register_type(Pair) is Pair
    assert register_type(Point, name="geometry.Point") is Point
    assert BY_NAME["Pair"] == Registered(Pair, Op.NAMEDTUPLE, "Pair", ("first", "second"))
    assert BY_NAME["geometry.Point"] == Registered(Point, Op.DATACLASS, "geometry.Point", ("x", "y"))


@pytest.mark.parametrize("cls", [int, dict, tuple, Pair(1, 2), Point(1, 2), None, type("Plain", (), {})])
def test_refuses_other_classes(registry: None, cls: Any) -> None:
    """Anything but the class of a NamedTuple or dataclass is a TypeError."""
    with pytest.raises(TypeError, match="neither a NamedTuple nor a dataclass"):
        register_type(cls)


@pytest.mark.parametrize("base", [dict, OrderedDict, list, str, Exception, functools.partial, random.Random])
def test_refuses_a_dataclass_that_only_a_builtin_can_make(registry: None, base: type) -> None:
    """As a transformers model's output is. It could be put, and each message was dropped where it came."""
    output = dataclasses.make_dataclass("Output", ["logits"], bases=(type("Base", (base,), {}),))
    with pytest.raises(TypeError, match=r"derives from \w+, .* give to= and from_="):
        register_type(output)


def test_a_name_belongs_to_one_class(registry: None) -> None:
    """A second class of a name is refused with advice; the same class defined anew replaces its elder."""
    register_type(Pair)
    with pytest.raises(ValueError, match=r"registered as 'Pair' already; give .* another name="):
        register_type(Point, name="Pair")
    again = dataclasses.make_dataclass("Point", ["x", "y"])
    again.__module__ = Point.__module__
    register_type(Point)
    register_type(again)
    assert BY_NAME["Point"].cls is again


def _through(tree: Any) -> Any:
    flat = flatten(tree)
    return Plan(b"".join(flat.spec)).build([leaf.clone() for leaf in flat.leaves], flat.values)


def test_a_class_of_ones_own_needs_both_ways(registry: None) -> None:
    """A registered class needs a function that takes an instance apart, and one that makes it.

    The error for a class without them names the remedy.
    """
    for options in ({"to": list}, {"from_": list}, {"to": 1, "from_": 2}):
        with pytest.raises(TypeError, match="give a class and two functions"):
            register_type(Pair, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="give to= and from_=, or send its parts"):
        register_type(range)
    register_type(range, to=lambda of: (of.start, of.stop, of.step), from_=lambda parts: range(*parts))
    assert _through([range(3), range(2, 9, 2)]) == [range(3), range(2, 9, 2)]


def test_whatever_a_class_raises_while_it_is_made_is_the_messages_fault(registry: None) -> None:
    """Also SystemExit, or what a foreign runtime raises: it does not end the program, and the message comes no more."""

    def make(parts: Any) -> Any:
        raise SystemExit(parts)

    register_type(range, to=lambda of: (of.start, of.stop, of.step), from_=make)
    with pytest.raises(ProtocolError, match="from_ of 'range' raised SystemExit"):
        round_trip(range(3))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError, ""),
        (torch.OutOfMemoryError, "CUDA out of memory"),
        (RuntimeError, "can't allocate memory"),
        (RuntimeError, "std::bad_alloc"),
    ],
)
def test_an_object_for_which_there_is_no_memory_comes_again(error: type[Exception], text: str, registry: None) -> None:
    """Torch's own errors are RuntimeErrors, and say nothing of the message."""
    lacks = [error, error]

    def make(parts: Any) -> Any:
        if lacks:
            raise lacks.pop()(text)
        return range(*parts)

    register_type(range, to=lambda of: (of.start, of.stop, of.step), from_=make)
    with tp.Consumer("makes", producers=1) as consumer, ThreadPoolExecutor(1) as other:
        putting = other.submit(_put_and_flush, [torch.ones(2), range(3)])
        tries = 0
        while True:
            try:
                assert consumer.get(20)[1] == range(3)
                break
            except tp.OutOfMemory as lack:
                assert "a message from producer pid" in str(lack)
                tries += 1
        putting.result()
    assert 0 < tries <= 2
    assert not lacks


def _put_and_flush(tree: Any) -> None:
    with tp.Producer("makes") as producer:
        producer.put(tree, 20)
        producer.flush(20)


def test_what_is_registered_anew_is_what_arrives_from_then_on(registry: None) -> None:
    """Also of a stream whose plan was made before: the cell of a notebook was run again in between."""

    def define() -> type:
        made = dataclasses.make_dataclass("Cell", ["x"])
        made.__module__ = __name__
        return register_type(made)

    elder = define()
    flat = flatten(elder(1))
    plan = Plan(b"".join(flat.spec))
    assert type(plan.build([], [1])) is elder
    younger = define()
    assert type(plan.build([], [1])) is younger
    other = dataclasses.make_dataclass("Cell", ["y"])
    other.__module__ = __name__
    register_type(other)
    with pytest.raises(UnsupportedLeaf, match="registered anew here, with other fields"):
        plan.build([], [1])


@pytest.mark.parametrize(
    ("spec", "values", "says"),
    [
        (join(["08 0d"]), [], "not in the table"),
        (join(["08 02"]), [256], "256 for a NumPy scalar of uint8"),
        (join(["08 09"]), [1.5], "1.5 for a NumPy scalar of int64"),
        (join(["08 0c"]), ["1"], "'1' for a NumPy scalar of float64"),
        (join(["08 16"]), [1.0, "x"], "does not fit"),
        (join(["25 20 00000000 00"]), [], "which begins with a dict"),
        (join(["25 22 00000000 01"]), [5], "not its _metadata"),
        (join(["25 22 00000000 22 01000000 0600 a5", b"items", "01"]), [5], "not its _metadata"),
        (join(["25 22 00000000 22 01000000 1400 b3", b"__array_interface__", "01"]), [5], "not its _metadata"),
        (join(["25 22 00000000 22 01000000 0100 05 01"]), [5], "not its _metadata"),
        (join(["26 0400", b"Pose", "01"]), [5], "does not fit"),
        (join(["26 0600", b"Animal", "01"]), [5], "from_= on one end only"),
        (join(["23 0400", b"Pose", "00000000"]), [], "from_= on one end only"),
    ],
)
def test_new_kinds_that_are_none_are_refused(spec: bytes, values: list[Any], says: str) -> None:
    """NumPy's scalars of no dtype or out of range, ordered dicts that hide their methods, classes of one end only."""
    with pytest.raises((ProtocolError, UnsupportedLeaf), match=says):
        Plan(spec).build([], values)


def test_the_length_of_a_name_has_two_sides(registry: None) -> None:
    """``register_type`` refuses a name that has no place on the wire. The first put is too late for that."""
    register_type(Point, name="é" * 32_767 + "n")
    flat = flatten(Point(1, 2))
    assert Plan(b"".join(flat.spec)).build([], flat.values) == Point(1, 2)
    with pytest.raises(ValueError, match=r"a name of 65,536 bytes for .*Point'>, the limit is 65,535"):
        register_type(Point, name="é" * 32_768)
    with pytest.raises(ValueError, match="surrogates"):
        register_type(Point, name="\ud800")


def test_no_code_of_the_class_runs_on_arrival(registry: None) -> None:
    """A dataclass arrives without ``__init__`` and ``__post_init__``, a NamedTuple without ``__new__``."""

    @register_type
    @dataclasses.dataclass
    class Guarded:
        value: Any

        def __post_init__(self) -> None:
            raise AssertionError("ran")

    instance = object.__new__(Guarded)
    instance.value = 5
    flat = flatten(instance)
    assert Plan(b"".join(flat.spec)).build([], flat.values).value == 5


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (join(["23 0400", b"Nope", "01000000 0100", b"a", "00"]), "'Nope', which is not registered here"),
        (join(["23 0600", b"Animal", "01000000 0500", b"image", "00"]), "'Animal' has 1 fields"),
        (join(["24 0600", b"Animal", "02000000 0500", b"image", "0500", b"label", "0000"]), "'Animal' has 2 fields"),
        (join(["23 0600", b"Animal", "02000000 0500", b"label", "0500", b"image", "0000"]), "in the place of 'image'"),
    ],
)
def test_types_that_differ_are_refused(spec: bytes, says: str) -> None:
    """A type that is not registered here, or has other fields than there, is refused by name at once."""
    with pytest.raises(UnsupportedLeaf, match=says):
        Plan(spec)
