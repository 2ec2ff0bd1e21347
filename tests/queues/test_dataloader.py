"""PyTorch's DataLoader with one of our contexts, in each of its modes: the stock loader's batches, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from arenas import left_in, small_context
from children import wait_until
from guard import others
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

SHAPE = (3, 60, 60)  # a batch of four is over what goes by reference
LIMIT = 6.0  # seconds within which the loader has to tell of a dead worker: it looks every five


class Sample(NamedTuple):
    """An item of a dataset."""

    image: torch.Tensor
    label: int
    name: str


class Images(Dataset):
    """Random images: of torch's, NumPy's and Python's generators, which the loader seeds in each worker."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        image = torch.rand(SHAPE) + float(np.random.rand()) + random.random()
        return Sample(image, i, f"image {i}")


class Stream(IterableDataset):
    """The same without an end known before; each worker has its part."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        return iter([Images()[i] for i in range(info.id, 23, info.num_workers)])


class Nested(Dataset):
    """Items that another loader, in the worker, has made."""

    def __init__(self, ctx: Any) -> None:
        self.collate = ctx.collate if ctx is not None else None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        return next(iter(DataLoader(Images(4), 4, collate_fn=self.collate))).image


def seeded(worker: Any) -> None:
    """A worker_init_fn."""
    torch.manual_seed(100 + worker)


def numbered_sampler() -> Any:
    """Return a sampler that takes its numbers from a generator of its own."""
    return RandomSampler(Images(), replacement=True, num_samples=17, generator=torch.Generator().manual_seed(3))


MODES: dict[str, dict[str, Any]] = {
    "as it is": {"batch_size": 4, "shuffle": True},
    "pin_memory": {"batch_size": 4, "pin_memory": True},
    "persistent_workers": {"batch_size": 4, "persistent_workers": True, "shuffle": True},
    "prefetch_factor": {"batch_size": 4, "prefetch_factor": 5, "drop_last": True},
    "worker_init_fn": {"batch_size": 5, "worker_init_fn": seeded},
    "iterable": {"dataset": Stream(), "batch_size": 4},
    "iterable, persistent": {"dataset": Stream(), "batch_size": 4, "persistent_workers": True},
    "sampler": {"batch_size": 4, "sampler": numbered_sampler},
    "weights": {"batch_size": 4, "sampler": lambda: WeightedRandomSampler(torch.arange(24.0), 9)},
    "batch_sampler": {"batch_sampler": [[1, 2, 3], [5], [8, 0]]},
    "no batches": {"batch_size": None, "collate_fn": None},
    "torch's collate": {"batch_size": 4, "collate_fn": None},
    "nested": {"dataset": Nested, "batch_size": 2},
    "timeout": {"batch_size": 4, "timeout": 30},
}


def loader_of(ctx: Any, mode: Any, workers: int = 2) -> Any:
    """A loader in a mode, of our context, or torch's own where there is none."""
    options = {"dataset": Images(), "collate_fn": ctx.collate if ctx is not None else None, **MODES[mode]}
    if callable(options.get("sampler")):
        options["sampler"] = options["sampler"]()
    if options["dataset"] is Nested:
        options["dataset"] = Nested(ctx)
    return DataLoader(num_workers=workers, multiprocessing_context="fork" if ctx is None else ctx, **options)


def epochs(loader: Any, count: int = 2) -> Any:
    """All that a loader gives, in memory of its own."""
    torch.manual_seed(1)
    return [[owned(batch) for batch in loader] for _ in range(count)]


def owned(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    return type(batch)(*map(owned, batch)) if isinstance(batch, Sample) else batch


def assert_same(theirs: Any, ours: Any) -> None:
    assert type(theirs) is type(ours)
    if isinstance(theirs, torch.Tensor):
        assert theirs.dtype == ours.dtype
        assert torch.equal(theirs, ours)
    elif isinstance(theirs, (list, tuple)):
        for one, other in zip(theirs, ours, strict=True):
            assert_same(one, other)
    else:
        assert theirs == ours


@contextlib.contextmanager
def no_gpu() -> Iterator[Any]:
    """torch warns that there is none to page-lock for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*pin_memory.*", UserWarning)
        yield


LIGHT = ("as it is", "pin_memory", "iterable, persistent", "no batches", "nested")


@pytest.mark.parametrize(
    "mode", [mode if mode in LIGHT else pytest.param(mode, marks=pytest.mark.kills) for mode in MODES]
)
def test_gives_the_stock_loaders_batches_in_each_mode(ctx: Any, mode: Any) -> None:
    with no_gpu():
        ours = epochs(loader_of(ctx, mode))
        assert_same(epochs(loader_of(None, mode)), ours)
    assert left_in(ctx) == {}


def test_out_of_order_all_come_once(ctx: Any) -> None:
    loader = DataLoader(Images(), 4, num_workers=2, collate_fn=ctx.collate, multiprocessing_context=ctx, in_order=False)
    labels = [int(label) for batch in loader for label in batch.label]
    assert sorted(labels) == list(range(24))


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.kills), "forkserver"])
def test_started_anew_and_two_loaders_at_once(method: str) -> None:
    """The context, and its collate, travel to workers that share nothing."""
    ctx = small_context(method)
    one, other = (iter(loader_of(ctx, "as it is", workers=1)) for _ in range(2))
    labels = [(one_batch.label + other_batch.label).sum() for one_batch, other_batch in zip(one, other, strict=True)]
    assert sum(map(int, labels)) == 2 * sum(range(24))
    del one, other
    assert left_in(ctx) == {}
    vars(ctx).clear()


def test_an_early_break_leaves_nothing(ctx: Any) -> None:
    for mode in ("as it is", "pin_memory"):
        with no_gpu():
            for _ in range(3):
                for batch in loader_of(ctx, mode):
                    assert batch.image.shape == (4, *SHAPE)
                    break
        del batch
    assert left_in(ctx) == {}


def test_batches_outlive_their_loader(ctx: Any) -> None:
    kept = list(loader_of(ctx, "as it is"))
    gc.collect()
    assert sorted(int(label) for batch in kept for label in batch.label) == list(range(24))
    assert all(1e-9 < float(batch.image.min()) for batch in kept)


def residue() -> Any:
    """Descriptors, mappings of shared memory, and entries of /dev/shm that are no other program's."""
    with open("/proc/self/maps") as maps:
        shared = sum("memfd" in line or "/dev/shm" in line for line in maps)
    names = set(os.listdir("/dev/shm"))
    own = len(names - others(names))
    return len(os.listdir("/proc/self/fd")), shared, own


@pytest.mark.parametrize("mode", [pytest.param("as it is", marks=pytest.mark.kills), "persistent_workers"])
def test_nothing_grows_over_twenty_epochs(ctx: Any, mode: Any) -> None:
    loader, found, costs = loader_of(ctx, mode), [], []
    arena = ctx.tensorpipe_attachment().arena
    for _ in range(20):
        for batch in loader:
            assert int(batch.label.sum()) >= 0
        del batch
        found.append(residue())
        costs.append(arena.segment.resident())
    assert set(found[2:]) == {found[1]}
    assert max(costs[10:]) <= 1.5 * max(costs[:10])


class Failing(Images):
    """Fails, or dies, at one item."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, i: int) -> Any:
        if i == 9:
            self.how()
        return super().__getitem__(i)


def fail() -> None:
    raise KeyError("no such image")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_workers_error_arrives_with_its_traceback(ctx: Any, pin_memory: Any) -> None:
    loader = DataLoader(
        Failing(fail), 4, num_workers=2, collate_fn=ctx.collate, multiprocessing_context=ctx, pin_memory=pin_memory
    )
    with no_gpu(), pytest.raises(KeyError) as caught:
        list(loader)
    assert "no such image" in str(caught.value)
    assert "in fail" in str(caught.value)
    del caught
    wait_until(lambda: left_in(ctx) == {})  # a thread of the loader's may still be ending


def assert_tells_of_a_death(loader: Any) -> None:
    began = time.monotonic()
    with no_gpu(), pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\(?s?\)? .*") as caught:
        for _ in loader:
            pass
    assert time.monotonic() - began < LIMIT
    del caught


@pytest.mark.kills
@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_killed_worker_is_told_of(ctx: Any, pin_memory: Any) -> None:
    loader = DataLoader(
        Failing(die), 4, num_workers=2, collate_fn=ctx.collate, multiprocessing_context=ctx, pin_memory=pin_memory
    )
    assert_tells_of_a_death(loader)
    del loader
    assert left_in(ctx) == {}


class DiesInPut:
    """A worker_init_fn: the second worker dies at a system call of a put, before it or after it."""

    def __init__(self, call: Any, after: Any) -> None:
        self.call, self.after = call, after

    def __call__(self, worker: Any) -> None:
        if worker != 1:
            return
        real, left = os.writev, [self.call]

        def writev(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                return real(*arguments)
            if self.after:
                real(*arguments)
            die()

        os.writev = writev  # of this worker only, which really dies


@pytest.mark.parametrize(
    ("collate", "after"),
    [
        ("ours", False),
        pytest.param("ours", True, marks=pytest.mark.kills),
        pytest.param("torch's", False, marks=pytest.mark.kills),
        pytest.param("torch's", True, marks=pytest.mark.kills),
    ],
)
def test_a_worker_killed_in_a_put_is_told_of_and_leaves_nothing(ctx: Any, after: Any, collate: Any) -> None:
    collate_fn = ctx.collate if collate == "ours" else None  # by reference, or copied
    loader = DataLoader(
        Images(),
        4,
        num_workers=2,
        collate_fn=collate_fn,
        multiprocessing_context=ctx,
        worker_init_fn=DiesInPut(1, after),
    )
    assert_tells_of_a_death(loader)
    del loader
    assert left_in(ctx) == {}


@pytest.mark.slow
def test_epochs_with_fresh_workers_do_not_grow() -> None:
    """The last batch of each is alive when the next one's workers are forked, which keep it as long as they live."""
    ctx, resident, batch = small_context(), [], None
    loader = DataLoader(Images(8), batch_size=4, num_workers=1, multiprocessing_context=ctx, collate_fn=ctx.collate)
    for _ in range(18):
        for batch in loader:
            assert batch.image.shape == (4, *SHAPE)
        resident.append(ctx.tensorpipe_attachment().arena.segment.resident())
    # A worker's kept blocks are looked at ten times a second, so a few batches of those before may still lie there.
    assert resident[-1] - resident[0] < 7 * batch.image.nbytes, resident
    del batch
    loader = None
    assert left_in(ctx) == {}
    vars(ctx).clear()


def _graphs(samples: list[int]) -> dict[str, Any]:
    return {
        "features": default_collate([torch.full((5000,), float(each)) for each in samples]),
        "adjacency": torch.eye(len(samples)).to_sparse(),
        "text": "word " * 1_000_000,
    }


@pytest.mark.filterwarnings("ignore")  # torch has one of its checks
def test_what_a_worker_stacks_arrives_beside_what_is_pickled(ctx: Any) -> None:
    """The worker puts what it stacks by reference, where that can be."""
    loader = DataLoader(range(12), 4, num_workers=1, collate_fn=_graphs, multiprocessing_context=ctx)  # type: ignore[arg-type]
    batches = list(loader)
    assert [batch["features"][:, 0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(torch.equal(batch["adjacency"].to_dense(), torch.eye(4)) for batch in batches)
