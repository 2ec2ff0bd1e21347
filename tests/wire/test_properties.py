"""Properties over generated trees and bytes: what is sent arrives, and what was not sent ends in our errors.

Over 1,000 examples, the same in every run; 11,000 with ``make kills``; and ``python -m tests.fuzz_wire`` runs as many more
as one likes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import fuzz_wire
import numpy as np
import pytest
import torch
import zoo
from exchange import forget_schemas, round_trip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorpipe_ipc.wire.dtypes import BY_TORCH

MESSAGES = fuzz_wire.corpus()


LONG: dict[str, Callable[[], None]] = {}  # each property over many examples


def repeatable(examples: int) -> settings:
    """The same examples in every run, and no database of them in the working directory."""
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


def holds_for(*strategies: st.SearchStrategy[Any], few: int, many: int) -> Callable[..., Callable[[], None]]:
    """A property as a test over few examples, and in ``LONG`` over many."""

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        LONG[check.__name__] = repeatable(many)(given(*strategies)(check))
        return repeatable(few)(given(*strategies)(check))

    return decorate


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """Tensors of any dtype, with gaps, offsets, transposed, expanded, empty, with gradients."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = zoo.bits(draw(st.sampled_from(sorted(BY_TORCH, key=str))), *shape, seed=draw(st.integers(0, 9)))
    if shape and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[draw(st.integers(0, 2)) :: draw(st.integers(1, 2))]
    if draw(st.integers(0, 5)) == 0:
        tensor = tensor.expand(2, *tensor.shape)
    if tensor.is_floating_point() and tensor.itemsize > 1 and draw(st.integers(0, 5)) == 0:
        tensor = tensor.detach().requires_grad_()
    return tensor


def arrays() -> st.SearchStrategy[Any]:
    with_numpy = [row.torch for row in BY_TORCH.values() if row.numpy is not None]
    return st.builds(
        lambda dtype, size, step: zoo.bits(dtype, size).numpy()[::step],
        st.sampled_from(with_numpy),
        st.integers(0, 9),
        st.sampled_from([1, 2, -1]),
    )


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=9),
    st.binary(max_size=9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
    st.lists(st.integers(-5, 9), max_size=3).map(torch.Size),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    st.integers(0, 7).map(lambda size: zoo.bits(torch.uint8, size).untyped_storage()),
)
plain_keys = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.booleans(),
    st.floats(allow_nan=False),
    st.binary(max_size=5),
    st.none(),
)
keys = st.recursive(plain_keys, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(keys, inner, max_size=5),
        st.builds(zoo.Animal, inner, inner),
        st.builds(zoo.Batch, inner, st.floats(allow_nan=False)),
    )


trees = st.recursive(st.one_of(scalars, tensors(), arrays()), containers, max_leaves=12)


@pytest.mark.slow
@holds_for(trees, st.sampled_from([0, 1 << 16]), few=150, many=1500)
def test_any_tree_comes_back(tree: Any, own: int) -> None:
    """Any tree of any leaves and keys arrives bit for bit."""
    zoo.same(tree, round_trip(tree, own=own))


@holds_for(
    st.sampled_from([torch.uint8, torch.int16, torch.float64, torch.complex128]),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 3)), min_size=2, max_size=6),
    st.sampled_from(["raw", "torch_save"]),
    few=60,
    many=500,
)
def test_any_windows_on_one_memory_stay_windows(dtype: torch.dtype, windows: Any, serializer: str) -> None:
    """Any windows on one memory arrive with their items, and what is written through one is seen through the others."""
    base = zoo.bits(dtype, 40)
    tree = [base[start:stop:step] for start, stop, step in windows]
    got = round_trip(tree, serializer)
    zoo.same(tree, got, strides=False)
    for leaves in (tree, got):
        leaves[0].zero_()
    zoo.same(tree, got, strides=False)


@holds_for(st.lists(st.binary(max_size=200), min_size=1, max_size=4), st.booleans(), few=200, many=2000)
def test_any_bytes_end_in_our_errors(frames: list[bytes], framed: bool) -> None:
    """Any bytes, bare or behind a good prefix, end in a tree or in an exception of ours."""
    if framed:
        frames[0] = b"TPIC\x01\x04\0\0" + bytes(8) + len(frames[0]).to_bytes(4, "little") + bytes(4) + frames[0]
    fuzz_wire.outcome(frames)


@holds_for(st.integers(0, (1 << 64) - 1), few=700, many=7000)
def test_any_damage_ends_in_our_errors(seed: int) -> None:
    """Any valid message, damaged in any way, ends in a tree or in an exception of ours."""
    rng = random.Random(seed)
    fuzz_wire.outcome(fuzz_wire.damage(rng, rng.choice(MESSAGES), MESSAGES))


@pytest.mark.kills
@pytest.mark.limit(300)
@pytest.mark.parametrize("name", LONG)
def test_each_holds_for_many_more(name: str) -> None:
    """Each of the properties above, over ten times as many examples."""
    LONG[name]()


def test_the_fuzzer_gets_deep() -> None:
    """The fuzzer's damage is not all refused at the door: trees, our several errors, and many rules come up."""
    forget_schemas()
    ends = fuzz_wire.fuzz(2000, seed=0)
    assert ends["tree"] > 100
    assert ends["control"] > 5
    assert ends["ProtocolError"] > 500
    assert ends["UnsupportedLeaf"] >= 1
    assert ends["VersionMismatch"] > 1
    assert ends["UnknownSerializer"] > 1


def test_the_fuzzer_lets_other_errors_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that is not ours ends the fuzzer."""
    monkeypatch.setattr(fuzz_wire, "read", lambda frames: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fuzz_wire.fuzz(200, seed=0)


def test_arrays_with_no_place_in_torch_are_copied() -> None:
    """An array with negative strides is sent as a copy, in the order of its indices."""
    assert (round_trip(np.arange(6).reshape(2, 3)[::-1, ::-1]) == [[5, 4, 3], [2, 1, 0]]).all()
