"""ctx.collate: torch's own, whose batches go by reference where nobody else keeps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arenas import left_in, small_context
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import tensorpipe_ipc as tp
from tensorpipe_ipc.memory.segment import CAPACITY

LARGE = 60_000  # items: a stack of two is well over what goes by reference


class Own:
    """Of a type that only a function of one's own can collate."""

    def __init__(self, value: Any) -> None:
        self.value = value


def large(value: Any, dtype: Any = torch.float32) -> Any:
    return torch.full((LARGE,), value).to(dtype)


def to_sum(batch: Any, *, collate_fn_map: Any) -> Any:
    """A user's function: it reads what collate makes."""
    return torch_collate([each.value for each in batch], collate_fn_map=collate_fn_map).sum(0)


class WithOwn:
    """Collates with a map of one's own."""

    def __init__(self, ctx: Any) -> None:
        self.collate = ctx.collate

    def __call__(self, batch: Any) -> Any:
        return self.collate(batch, collate_fn_map={Own: to_sum, **default_collate_fn_map})


class Owns:
    """A dataset of what only a function of one's own can collate."""

    def __getitem__(self, i: int) -> Any:
        return {"own": Own(large(i)), "x": large(i)}

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("workers", [0, 1])
def test_takes_functions_of_ones_own(ctx: Any, workers: int) -> None:
    options = {"multiprocessing_context": ctx} if workers else {}
    batches = list(DataLoader(Owns(), 2, num_workers=workers, collate_fn=WithOwn(ctx), **options))
    assert [batch["x"][:, -1].tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert [batch["own"][-1].item() for batch in batches] == [1, 5]


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
