"""Objects that cannot be sent. The refusal names the path, the type and what to do instead."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import zoo
from exchange import round_trip, sent

from tensorpipe_ipc.errors import UnsupportedLeaf
from tensorpipe_ipc.wire.flatten import flatten, leaf_path
from tensorpipe_ipc.wire.spec import MAX_DEPTH, MAX_NODES


class Unregistered(NamedTuple):
    field: int


@dataclasses.dataclass
class UnregisteredData:
    field: int


class Colour(enum.IntEnum):
    RED = 1


def _in_itself() -> list[Any]:
    tree: list[Any] = []
    tree.append(tree)
    return tree


def _resized(offset: int = 0) -> torch.Tensor:
    tensor = torch.ones(5 + offset)[offset:]
    tensor.untyped_storage().resize_(0)
    return tensor


def _resized_conjugates() -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.ones(9, dtype=torch.complex64)[4:].conj()
    both = tensor, tensor.imag  # which has the negative bit
    tensor.untyped_storage().resize_(0)
    return both


REFUSED = [
    (object(), "builtins.object cannot travel .*nothing is pickled there.* use a Queue"),
    (len, "builtin_function_or_method cannot travel"),
    (
        Unregistered(1),
        r"Unregistered is not registered; call tensorpipe_ipc.register_type\(Unregistered\) on both ends",
    ),
    (UnregisteredData(1), "UnregisteredData is not registered"),
    ({1, 2}, r"builtins.set has no place on the wire; send list\(\) of it"),
    (frozenset(), "frozenset has no place"),
    (range(3), "range has no place"),
    (bytearray(b"x"), r"bytearray has no place on the wire; send bytes\(\)"),
    (memoryview(b"x"), "memoryview has no place"),
    (np.datetime64("2020-01-01"), r"NumPy scalar that torch has no dtype for; send .item\(\)"),
    (np.longdouble(1), r"NumPy scalar that torch has no dtype for; send .item\(\)"),
    (np.ma.masked_array([1.0]), r"array subclass; send np.asarray\(\)"),
    (np.array(["2020-01-01"], "M8[D]"), r"datetime64\[D\], which torch does not have; send .view\('int64'\)"),
    (np.array([1], "m8[s]"), r"timedelta64\[s\], which torch"),
    (np.array([object()]), "holds Python objects"),
    (np.array([1.0], ">f8"), r"foreign byte order; send .astype\('float64'\)"),
    (np.zeros(2, [("a", "i4")]), "which torch does not have"),
    (np.array(["text"]), "which torch does not have"),
    (np.zeros(2, np.longdouble), "longdouble|float128"),
    (collections.defaultdict(), r"is a subclass of dict and would lose its type; send dict\(\) of it"),
    (collections.defaultdict(list), "subclass of dict"),
    (Colour.RED, "subclass of int"),
    (type("Text", (str,), {})("x"), "subclass of str"),
    (torch.nn.UninitializedParameter(), "has no shape yet"),
    (
        torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {})),
        r"tensor subclass; send .as_subclass\(torch.Tensor\)",
    ),
    (torch.ones(2, requires_grad=True) * 2, r"requires_grad and has a history.*; send .detach\(\)"),
    (torch.bits8, r"torch.bits8 has no code on the wire; send its name"),
    (torch.empty(2, dtype=torch.uint4), "torch.uint4, which has no code"),
    (torch.eye(2).to_sparse(), "layout torch.sparse_coo; send .to_dense"),
    (torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr; send .to_dense"),
    (torch.ones(3).to_mkldnn(), r"mkldnn tensor, .*; send .to_dense\(\)"),
    (torch.ones(3, device="meta"), "meta tensor, which has no items; send its shape and dtype"),
    (torch.ones((1,) * 65), r"65 dimensions, the limit is 64; send .flatten\(\)"),
    (torch.ones((1,) * 300), "300 dimensions, the limit is 64"),
    (torch.nested.nested_tensor([torch.ones(2)]), r"nested tensor; send .unbind\(\)"),
    (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"quantized tensor; send .int_repr\(\)"),
    (_resized(), r"shape \[5\] whose memory was let go"),
    (_resized(1000), r"shape \[5\] whose memory was let go"),
    (_resized_conjugates()[0], r"shape \[5\] whose memory was let go"),
    (_resized_conjugates()[1], r"shape \[5\] whose memory was let go"),
    (torch.nn.Parameter(_resized(4)), r"shape \[5\] whose memory was let go"),
    ({object(): 1}, "a dict key is a object; keys may be str"),
    ({1j: 1}, "is a complex; keys may be"),
    ({(1, {2: 3}.keys().__class__): 1}, "is a type; keys may be"),
    ({1 << 70: 1}, "cannot be written"),
    ({10**5000: 1}, "dict key of type int cannot be written"),
    ({"\ud800": 1}, "cannot be written"),
    ({"k" * 70_000: 1}, "a dict key of 70,005 bytes, the limit is 65,535"),
]


def _tuples(depth: int) -> tuple[Any, ...]:
    found: tuple[Any, ...] = ()
    for _ in range(depth - 1):
        found = (found,)
    return found


def test_views_of_one_memory_of_a_dtype_without_a_code_are_refused() -> None:
    """As one of them alone is; so are views of memory that is gone."""
    packed, gone = torch.zeros(4, dtype=torch.uint4), torch.ones(2000)
    parts = [gone[4:1000], gone[1000:]]
    gone.untyped_storage().resize_(0)
    for tree, says in (([packed, packed[2:]], "has no code on the wire"), (parts, "memory was let go")):
        with pytest.raises(UnsupportedLeaf, match=says):
            sent(tree)


@pytest.mark.parametrize(("leaf", "says"), REFUSED)
def test_what_cannot_travel_is_named(leaf: Any, says: str) -> None:
    """Alone or in a tree it is refused: where it stands, what it is, what to do. In a tree, others stand beside it."""
    with pytest.raises(UnsupportedLeaf, match=f"^tree: .*{says}") as alone:
        sent(leaf)
    assert alone.value.path == ""
    tree = {"image": torch.ones(2), "mask": [0, 1, 2, leaf], "again": torch.ones(3)}
    with pytest.raises(UnsupportedLeaf, match=says) as inside:
        sent(tree)
    assert inside.value.path == "['mask'][3]"
    assert str(inside.value).startswith("tree['mask'][3]: ")
    assert isinstance(inside.value, TypeError)


def test_paths_go_through_every_container() -> None:
    """The path is what one would write in Python, through dicts, lists, tuples, NamedTuples and dataclasses."""
    with pytest.raises(UnsupportedLeaf) as raised:
        sent({"a": [(zoo.Animal(None, zoo.Batch({(1, "x"): object()}, 0.5)),)]})
    assert raised.value.path == "['a'][0][0].label.samples[(1, 'x')]"


def test_numpy_names_the_leaf_that_it_lacks() -> None:
    """bfloat16 through ``numpy`` is refused with the path of the leaf and the serializer that takes it."""
    with pytest.raises(UnsupportedLeaf, match=r"NumPy has no torch.bfloat16: use serializer='raw'") as raised:
        sent({"x": torch.ones(2), "y": [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]}, "numpy")
    assert raised.value.path == "['y'][1]"


@pytest.mark.parametrize("pair", [1, 2])
def test_a_tree_that_contains_itself_is_refused(pair: int) -> None:
    """A list that contains itself, once or twice over, is refused at once instead of walked for ever."""
    tree = _in_itself()
    tree.extend([tree] * (pair - 1))
    with pytest.raises(UnsupportedLeaf, match="nested deeper than 64 containers, or it contains itself"):
        sent(tree)


def test_depth_has_two_sides() -> None:
    """64 containers within each other travel, 65 do not."""
    zoo.same(zoo.nested(MAX_DEPTH), round_trip(zoo.nested(MAX_DEPTH)))
    with pytest.raises(UnsupportedLeaf, match="nested deeper than 64"):
        sent(zoo.nested(MAX_DEPTH + 1))


def test_the_number_of_nodes_has_two_sides() -> None:
    """As many nodes as the limit says travel, one more does not."""
    assert round_trip([None] * (MAX_NODES - 1)) == [None] * (MAX_NODES - 1)
    with pytest.raises(UnsupportedLeaf, match="131,073 nodes, the limit is 131,072; send numbers as a tensor"):
        sent([None] * MAX_NODES)


@pytest.mark.parametrize(
    "values",
    [
        list(range(200)),
        [[1.0] * 20] * 10,
        {"boxes": [{"box": (1, 2, 3, 4), "kind": "cat"}] * 20},
        {str(key): key for key in range(100)},
    ],
)
def test_many_values_beside_a_tensor_are_refused_where_few_are_wanted(values: Any) -> None:
    """Pickle is quicker with them. Beside many tensors they are few."""
    with pytest.raises(UnsupportedLeaf, match="many more numbers or strings than tensors"):
        flatten([torch.ones(2), values], few=True)
    assert flatten([torch.ones(2), values]).leaves
    assert flatten([[torch.ones(2) for _ in range(100)], values], few=True).leaves
    assert flatten([torch.ones(2), list(range(60))], few=True).values == list(range(60))


def test_a_list_of_lists_of_the_same_lists_is_refused_at_once() -> None:
    """It has 120 items, and would have more nodes than anybody can count."""
    with pytest.raises(UnsupportedLeaf, match="more than 131,072 nodes"):
        sent(functools.reduce(lambda inner, _: [inner, inner], range(60), list[Any]()))


@pytest.mark.parametrize(
    "keys",
    [
        [(x, y, z) for x in range(-2, 3) for y in range(-2, 3) for z in range(-2, 3)],  # hash(-1) == hash(-2)
        [2.0**power for power in range(-150, 151)],
    ],
)
def test_keys_of_grids_and_powers_arrive(keys: list[Any]) -> None:
    """Many of them hash alike, by no ill will."""
    assert round_trip(dict.fromkeys(keys)) == dict.fromkeys(keys)


def test_the_tuples_of_keys_count_as_nodes() -> None:
    """Each tuple of a dict's key counts, and each of its items: both ends count alike."""
    keys = [(index, ("x",)) for index in range((MAX_NODES - 1) // 6)]  # two tuples, three items, and a value
    fits: dict[Any, None] = dict.fromkeys(keys)
    assert round_trip(fits) == fits
    with pytest.raises(UnsupportedLeaf, match="nodes, the limit is 131,072"):
        sent(fits | dict.fromkeys([(-1, ("x",))]))


@pytest.mark.parametrize(
    ("inside", "outside", "says"),
    [
        pytest.param(b"k" * 65_532, b"k" * 65_533, "a dict key of 65,536 bytes, the limit is 65,535", id="length"),
        pytest.param(
            _tuples(MAX_DEPTH), _tuples(MAX_DEPTH + 1), "a dict key of tuples nested deeper than 64", id="depth"
        ),
        pytest.param(
            (b"\x90" * 499,),
            (b"\x90" * 500,),
            "a dict key of 504 bytes that is too long for a tuple",
            id="a long tuple",
        ),
        pytest.param(
            tuple(range(0x80, 0xA0)) * 12, tuple(range(0x80, 0xA0)) * 16, "too long for a tuple", id="many numbers"
        ),
        pytest.param((1 << 64) - 1, 1 << 64, "cannot be written", id="largest number"),
        pytest.param(-(1 << 63), -(1 << 63) - 1, "cannot be written", id="smallest number"),
    ],
)
def test_keys_have_two_sides(inside: Any, outside: Any, says: str) -> None:
    """A sender refuses a key that a receiver would not take. A key one step inside the limit arrives."""
    assert round_trip({inside: 1}) == {inside: 1}
    with pytest.raises(UnsupportedLeaf, match=says):
        sent({outside: 1})


def test_numbers_of_more_than_64_bits() -> None:
    """From the first that msgpack has no place for they go as text, and come as what they were."""
    for number in (-(1 << 63), (1 << 64) - 1):
        assert flatten(number).values == [number]
    for number in (-(1 << 63) - 1, 1 << 64):
        assert flatten(number).values == [hex(number)]
        assert round_trip(number) == number


def test_keys_of_many_streams_do_not_pile_up() -> None:
    """33,000 keys cost this process 3 MiB at most, which is less than they would all together."""
    most = 0
    tracemalloc.start()
    try:
        for number in range(33_000):
            flatten({f"key {number:05}": None})
            if number % 500 == 0:
                most = max(most, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert 1 << 20 < most < 3 << 20


def test_flatten_copies_nothing() -> None:
    """Leaves are the caller's tensors, and tensors on the caller's arrays and storages."""
    tensor, array, storage = torch.ones(3), np.ones(3), torch.ones(3).untyped_storage()
    leaves = flatten([tensor, array, storage]).leaves
    assert leaves[0] is tensor
    assert leaves[1].data_ptr() == array.ctypes.data
    assert leaves[2].data_ptr() == storage.data_ptr()


def test_leaf_paths_are_in_the_order_of_flatten() -> None:
    """``leaf_path`` finds the path of each leaf by its number."""
    tree = {"a": [torch.ones(1), None, np.ones(1)], "b": zoo.Animal(b"x", torch.ones(1).untyped_storage())}
    assert [leaf_path(tree, index) for index in range(5)] == ["['a'][0]", "['a'][2]", "['b'].image", "['b'].label", ""]
