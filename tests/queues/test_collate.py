"""ctx.collate: what default_collate makes, in one block, which goes by reference where nobody else keeps it."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from arenas import left_in, small_context
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import tensorpipe_ipc as tp
from tensorpipe_ipc.memory.segment import CAPACITY

LARGE = 60_000  # items: a stack of two is well over what goes by reference


class Point(NamedTuple):
    """As users define them, and do not register them."""

    x: Any
    y: Any


class Checked(Point):
    """Looks at what it is made of."""

    def __new__(cls, x: Any, y: Any) -> Any:
        assert float(torch.as_tensor(x).float().sum()) >= 0
        return super().__new__(cls, x, y)


class Frozen(collections.abc.Mapping):
    """A mapping that cannot be changed, and looks at what it is made of."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)
        self.total = float(sum(torch.as_tensor(each).float().sum() for each in self._items.values()))

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: Any) -> bool:
        return self.total == other.total

    def __reduce__(self) -> Any:
        return Frozen, (self._items,)


class Steps(collections.abc.Sequence):
    """A sequence that is no list."""

    def __init__(self, items: Any) -> None:
        self.items = list(items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


class Own:
    """Of a type that only a function of one's own can collate."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Tagged(torch.Tensor):
    """A subclass."""


def large(value: Any, dtype: Any = torch.float32) -> Any:
    return torch.full((LARGE,), value).to(dtype)


def ordered(i: int) -> Any:
    made = collections.OrderedDict(x=large(i), y=i)
    made.tag = "kept"
    return made


CASES = {
    "float": large,
    "bfloat16": lambda i: large(i, torch.bfloat16),
    "small bools": lambda i: torch.full((3,), i).bool(),
    "small integers": lambda i: torch.full((3,), i).to(torch.int8),
    "float8": lambda i: large(i, torch.float8_e5m2),
    "complex": lambda i: large(i, torch.complex64),
    "of no dimension": lambda i: torch.tensor(i),
    "without items": lambda i: torch.empty(0, 3),
    "a view": lambda i: large(i).reshape(300, 200)[::2, 5:].t(),
    "expanded": lambda i: torch.tensor([i]).expand(LARGE),
    "channels last": lambda i: large(i).reshape(3, 100, 200)[None].contiguous(memory_format=torch.channels_last)[0],
    "conjugate": lambda i: large(i, torch.complex64).conj(),
    "int": lambda i: i,
    "number": lambda i: i / 3,
    "bool": lambda i: i == 1,
    "str": lambda i: f"text {i}",
    "bytes": lambda i: b"bytes" * i,
    "array": lambda i: np.full((200, 300), i, np.float64),
    "array of integers": lambda i: np.full((2,), i, np.int16),
    "NumPy's scalars": lambda i: np.float32(i),
    "NumPy's bools": lambda i: np.bool_(i),
    "dict": lambda i: {"x": large(i), "y": i, 3: [large(i, torch.int64), "s"], "again": {"z": (large(i), b"b")}},
    "list": lambda i: [large(i), [i, i / 2], large(-i)],
    "tuple": lambda i: (large(i), (i, "a")),
    "named": lambda i: Point(large(i), {"y": Point(i, large(i))}),
    "named, and looks": lambda i: Checked(large(i), i),
    "ordered": ordered,
    "default": lambda i: collections.defaultdict(list, x=large(i)),
    "frozen": lambda i: Frozen({"x": large(i), "y": torch.tensor(i)}),
    "user's": lambda i: collections.UserDict(x=large(i)),
    "sequence": lambda i: Steps([large(i), i]),
    "range": lambda i: range(i, i + 3),
    "deque": lambda i: collections.deque([large(i), i]),
    "subclass": lambda i: large(i).as_subclass(Tagged),
    "other types": lambda i: torch.full((2,), i) if i % 2 else torch.full((2,), i / 2),
    # what cannot be collated
    "other shapes": lambda i: torch.ones(i + 1),
    "other lengths": lambda i: [i] * (i + 1),
    "other keys": lambda i: {i: large(i)},
    "history": lambda i: large(i).requires_grad_(),
    "sparse": lambda i: torch.eye(3).to_sparse(),
    "nothing": lambda i: None,
    "strings": lambda i: np.array(["a"]),
    "objects": lambda i: {"x": large(i), "y": Own(i)},
    "a tensor among numbers": lambda i: i if i else torch.tensor(i),
}


class Cases:
    """A dataset whose items are named by a case and a number."""

    def __getitem__(self, key: Any) -> Any:
        name, i = key
        return CASES[name](i)


BATCHES = [[(name, i) for i in range(3)] for name in CASES]


def outcome(function: Any, batch: Any) -> Any:
    """Return the result of a function on a batch, or its exception as text."""
    try:
        return function(batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Both:
    """Collates with torch's and with ours."""

    def __init__(self, ctx: Any) -> None:
        self.collate = ctx.collate

    def __call__(self, batch: Any) -> Any:
        return outcome(default_collate, batch), outcome(self.collate, batch)


def assert_same(theirs: Any, ours: Any) -> None:
    assert type(theirs) is type(ours)
    if isinstance(theirs, torch.Tensor):
        assert (theirs.dtype, theirs.shape, theirs.stride()) == (ours.dtype, ours.shape, ours.stride())
        assert torch.equal(theirs.contiguous().view(torch.uint8), ours.contiguous().view(torch.uint8))
    elif isinstance(theirs, collections.abc.Mapping):
        assert list(theirs) == list(ours)
        assert getattr(theirs, "tag", None) == getattr(ours, "tag", None)
        for key in theirs:
            assert_same(theirs[key], ours[key])
    elif isinstance(theirs, collections.abc.Sequence) and not isinstance(theirs, (str, bytes)):
        assert len(theirs) == len(ours)
        for one, other in zip(theirs, ours, strict=True):
            assert_same(one, other)
    else:
        assert theirs == ours


@pytest.mark.filterwarnings("ignore:.*functions with out=.*")
@pytest.mark.parametrize("workers", [0, 1])
def test_makes_what_default_collate_makes(ctx: Any, workers: int) -> None:
    options = {"multiprocessing_context": ctx} if workers else {}
    loader = DataLoader(Cases(), batch_sampler=BATCHES, num_workers=workers, collate_fn=Both(ctx), **options)
    made = dict(zip(CASES, loader, strict=True))
    for name, (theirs, ours) in made.items():
        try:
            assert_same(theirs, ours)
        except AssertionError as error:
            raise AssertionError(f"{name}: {theirs!r} and {ours!r}") from error
    assert sum(type(theirs) is str for theirs, _ in made.values()) >= 8, "the last are refused, by both"
    del made, theirs, ours
    assert left_in(ctx) == {}


def to_sum(batch: Any, *, collate_fn_map: Any) -> Any:
    """A user's function: it reads what collate makes."""
    return torch_collate([each.value for each in batch], collate_fn_map=collate_fn_map).sum(0)


class WithOwn:
    """Both, with a map of one's own."""

    def __init__(self, ctx: Any) -> None:
        self.collate = ctx.collate

    def __call__(self, batch: Any) -> Any:
        functions = {Own: to_sum, **default_collate_fn_map}
        return torch_collate(batch, collate_fn_map=functions), self.collate(batch, collate_fn_map=functions)


class Owns:
    """A dataset of what only a function of one's own can collate."""

    def __getitem__(self, i: int) -> Any:
        return {"own": Own(large(i)), "x": large(i)}

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("workers", [0, 1])
def test_takes_functions_of_ones_own(ctx: Any, workers: int) -> None:
    options = {"multiprocessing_context": ctx} if workers else {}
    for theirs, ours in DataLoader(Owns(), 2, num_workers=workers, collate_fn=WithOwn(ctx), **options):
        assert_same(theirs, ours)


class Kept:
    """Collates, and does something with the batch that somebody may do. Says where it lies."""

    def __init__(self, ctx: Any, keep: Any) -> None:
        self.collate, self.keep, self.kept = ctx.collate, keep, []

    def __call__(self, batch: Any) -> Any:
        made = self.collate(batch)
        first = made if isinstance(made, torch.Tensor) else made[0] if type(made) is list else made["x"]
        whole = all(bool((torch.as_tensor(each) == 3).all()) for each in map(_tensor_in, self.kept))
        where = torch.tensor([first.data_ptr(), whole])
        if self.keep is not None:
            self.kept.append(self.keep(made, first))
        del first
        return [made, where]


def _tensor_in(kept: Any) -> Any:
    while isinstance(kept, (dict, list)):
        kept = kept["x"] if isinstance(kept, dict) else kept[0]
    return kept


class Threes:
    """A dataset of threes, in a dict, a list or bare."""

    def __init__(self, wrap: Any) -> None:
        self.wrap = wrap

    def __getitem__(self, i: int) -> Any:
        return self.wrap(torch.full((LARGE,), 3.0))

    def __len__(self) -> int:
        return 8


WRAPS = {"bare": lambda x: x, "dict": lambda x: {"x": x, "y": 1}, "list": lambda x: [x, "text"]}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_batch_goes_by_reference(ctx: Any, wrap: Any) -> None:
    loader = DataLoader(Threes(WRAPS[wrap]), 2, num_workers=1, collate_fn=Kept(ctx, None), multiprocessing_context=ctx)
    for made, where in loader:
        first = made if wrap == "bare" else made["x" if wrap == "dict" else 0]
        assert first.data_ptr() == int(where[0]), "a fork has the memory where its parent has it"
        assert int(first.sum()) == 3 * 2 * LARGE
    del made, first, where
    assert left_in(ctx) == {}


KEEPS = {
    "the batch": lambda made, first: made,
    "a tensor": lambda made, first: first,
    "a list of it": lambda made, first: [first],
    "a view": lambda made, first: first[1:],
    "an array": lambda made, first: first.numpy(),
    "another container": lambda made, first: dict(made),
}


@pytest.mark.parametrize("keep", KEEPS)
def test_what_somebody_keeps_is_copied_and_stays(ctx: Any, keep: Any) -> None:
    collate = Kept(ctx, KEEPS[keep])
    loader = DataLoader(Threes(WRAPS["dict"]), 2, num_workers=1, collate_fn=collate, multiprocessing_context=ctx)
    for made, where in loader:
        assert made["x"].data_ptr() != int(where[0])
        assert int(where[1])
        assert int(made["x"].sum()) == 3 * 2 * LARGE
        made["x"].zero_()
    del made, where
    assert left_in(ctx) == {}


class Cached:
    """A dataset, or a collate function, with a cache: each batch is made once, and given out again and again."""

    def __init__(self, ctx: Any) -> None:
        self.collate, self.cache = ctx.collate, {}

    def __call__(self, batch: Any) -> Any:
        key = int(batch[0][0])
        if key not in self.cache:
            self.cache[key] = self.collate(batch)
        return self.cache[key]


class Numbers:
    """A dataset of large tensors, each full of its number."""

    def __init__(self, length: int = 8) -> None:
        self.length = length

    def __getitem__(self, i: int) -> Any:
        return large(i)

    def __len__(self) -> int:
        return self.length


def test_a_cache_of_batches_stays_whole(ctx: Any) -> None:
    loader = DataLoader(
        Numbers(4), 2, num_workers=1, collate_fn=Cached(ctx), multiprocessing_context=ctx, persistent_workers=True
    )
    for _ in range(3):
        assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2, 3]]


class PartOfOwn:
    """A collate function of one's own, which has a part collated, and adds many small tensors."""

    def __init__(self, ctx: Any) -> None:
        self.collate = ctx.collate

    def __call__(self, batch: Any) -> Any:
        images = self.collate(batch)
        return images, [{"boxes": torch.ones(i, 4), "at": images.data_ptr()} for i in range(40)]


def test_a_part_that_was_collated_takes_the_rest_with_it(ctx: Any) -> None:
    loader = DataLoader(Numbers(), 2, num_workers=1, collate_fn=PartOfOwn(ctx), multiprocessing_context=ctx)
    for images, targets in loader:
        assert images.data_ptr() == targets[0]["at"]
        assert [len(each["boxes"]) for each in targets] == list(range(40))


def test_without_room_it_stacks_in_memory_of_its_own(ctx: Any) -> None:
    ctx.tensorpipe_attachment().arena.words[CAPACITY] = 700_000  # for one batch, and not for two
    loader = DataLoader(Numbers(), 2, num_workers=1, collate_fn=ctx.collate, multiprocessing_context=ctx)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_it_may_be_another_contexts(ctx: Any) -> None:
    other = small_context()
    loader = DataLoader(Numbers(), 4, num_workers=1, collate_fn=other.collate, multiprocessing_context=ctx)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    vars(other).clear()


def test_only_what_was_offered_goes_by_itself(ctx: Any) -> None:
    """A put outside of a worker never empties what was not said to be moved."""
    there = ctx.Queue()
    made = ctx.empty(LARGE).fill_(3)
    there.put((0, made))
    assert made.sum() == 3 * LARGE
    assert there.get()[1].data_ptr() != made.data_ptr()
    assert tp.get_context("fork").collate([torch.ones(2)]).tolist() == [[1, 1]]
