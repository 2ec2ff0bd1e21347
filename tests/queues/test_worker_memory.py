"""A DataLoader with one of our contexts and no collate of ours: torch's own batches lie in the context's memory, too."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from arenas import left_in, small_context
from programs import ran_in_fork, ran_with_small_dev_shm
from torch.utils.data import DataLoader, Dataset, default_collate

from tensorpipe_ipc.queues.tensor_queue import Queue
from tensorpipe_ipc.queues.worker_memory import work

ITEMS = 20_000  # of a sample: a batch of four is over what goes by reference


class Samples(Dataset):
    """Two large tensors, a small one, a number, a text, and what a put of this worker did."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        return {
            "x": torch.full((ITEMS,), float(i)),
            "y": [torch.full((ITEMS, 2), i), torch.tensor([i, i])],
            "i": i,
            "text": f"sample {i}",
            "shared": torch.rand(3),
        }


class Counted(Samples):
    """With how many of this worker's batches went by reference."""

    def __getitem__(self, i: int) -> Any:
        return {"by reference": _by_reference[0], **super().__getitem__(i)}


_by_reference = [0]


def count(worker: Any) -> None:
    """A worker_init_fn: count what is put by reference, in this worker."""
    real = Queue.put

    def put(self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        batch = obj[1]["x"] if isinstance(obj, tuple) and isinstance(obj[1], dict) else None
        held = id(batch)
        del batch
        real(self, obj, *args, **kwargs)
        _by_reference[0] += held != id(None) and obj[1]["x"].numel() == 0  # given away, it is empty

    Queue.put = put  # type: ignore[method-assign]  # of this process only


def correct(batch: Any) -> Any:
    """See that a batch is what its numbers say, and lies where all of it can be written."""
    for row, i in enumerate(batch["i"].tolist()):
        assert batch["x"][row].eq(i).all()
        assert batch["y"][0][row].eq(i).all()
        assert batch["y"][1][row].tolist() == [i, i]
        assert batch["text"][row] == f"sample {i}"
    assert not batch["x"].is_shared(), "of torch's shared memory nothing is used"
    batch["x"].zero_()
    return batch["i"].tolist()


def numbers_of(loader: Any, epochs: int = 1) -> Any:
    return [sorted(i for batch in loader for i in correct(batch)) for _ in range(epochs)]


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.kills)])
def test_torchs_batches_go_by_reference(method: str) -> None:
    """From the second batch on nothing is copied that torch's default_collate has stacked, several large tensors neither."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ctx = small_context(method)
    loader = DataLoader(Counted(), 4, num_workers=1, multiprocessing_context=ctx, worker_init_fn=count)
    for batch in loader:
        assert len(correct(batch)) == 4
    assert batch["by reference"].tolist() == [4] * 4, "all before it but the first"
    del batch
    del loader
    assert left_in(ctx) == {}
    vars(ctx).clear()
    torch.set_num_threads(threads)


def test_batches_that_vary_in_size_go_by_reference(ctx: Any) -> None:
    """A batch is copied only if it is the largest yet, or fills less than half of a block for that."""
    sizes = [2, 3, 1, 3, 2, 1, 4, 4]
    numbers, batches = iter(range(24)), []
    for size in sizes:
        batches.append([next(numbers) for _ in range(size)])
    loader = DataLoader(
        Counted(), batch_sampler=batches, num_workers=1, multiprocessing_context=ctx, worker_init_fn=count
    )
    for batch in loader:
        correct(batch)
    assert batch["by reference"].tolist() == [2] * 4, "of those before it the fourth and the fifth"
    del batch, loader
    assert left_in(ctx) == {}


@pytest.mark.parametrize(
    "options",
    [{"persistent_workers": True}, {"pin_memory": True}, {"drop_last": True, "batch_size": 5}],
    ids=lambda options: "".join(options),
)
def test_each_mode_of_the_loader_works(ctx: Any, options: Any) -> None:
    """Persistent workers, page-locked batches and others: what comes is right, and nothing stays."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*pin_memory.*", UserWarning)
        loader = DataLoader(Samples(), **{"batch_size": 4, **options}, num_workers=2, multiprocessing_context=ctx)
        expected = list(range(20 if "drop_last" in options else 24))
        assert numbers_of(loader, epochs=2) == [expected, expected]
    del loader
    assert left_in(ctx) == {}


def in_a_thread(samples: Any) -> Any:
    """A collate function that stacks here and in another thread at once."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(default_collate(samples)))
    thread.start()
    own = default_collate(samples)
    thread.join()
    assert torch.equal(own["x"], found[0]["x"])
    return found[0]


_cache: list[Any] = []


def keeping(samples: Any) -> Any:
    """A collate function that keeps what it gives."""
    _cache.append(default_collate(samples))
    for batch in _cache:
        correct(batch) if len(_cache) == 1 else None
    _cache[-1]["x"].copy_(torch.stack([sample["x"] for sample in samples]))
    for batch in _cache:
        assert batch["x"].shape == (4, ITEMS), "what is kept is not taken away"
    return _cache[-1]


def dropping(samples: Any) -> Any:
    """A collate function that makes more than it gives."""
    default_collate(samples)
    return default_collate(samples)


@pytest.mark.parametrize("collate", [in_a_thread, keeping, dropping])
def test_collate_functions_of_ones_own_may_call_torchs(ctx: Any, collate: Any) -> None:
    """From a thread, keeping what they return, or dropping some of it."""
    loader = DataLoader(Samples(), 4, num_workers=2, collate_fn=collate, multiprocessing_context=ctx)
    assert numbers_of(loader) == [list(range(24))]
    del loader
    assert left_in(ctx) == {}


class Batch(dict):  # type: ignore[type-arg]
    """A batch with an attribute."""

    target: Any


def keeping_an_attribute(samples: Any) -> Any:
    """A collate function that keeps an attribute of one that it gives, once some have gone."""
    batch = Batch(default_collate(samples))
    batch.target = default_collate([sample["x"] + 1 for sample in samples])
    _cache.append((batch.target, batch.target.clone()) if len(_cache) == 4 else ())
    for kept, content in filter(None, _cache):
        assert torch.equal(kept, content), "what is kept is not taken away"
    return batch


def keeping_a_key(samples: Any) -> Any:
    """A collate function that keeps a key of one that it gives, once some have gone."""
    batch = default_collate(samples)
    key = default_collate([sample["x"] + 1 for sample in samples])
    batch["by tensor"] = {key: 1}
    _cache.append((key, key.clone()) if len(_cache) == 4 else ())
    for kept, content in filter(None, _cache):
        assert torch.equal(kept, content), "what is kept is not taken away"
    return batch


@pytest.mark.parametrize("collate", [keeping_an_attribute, keeping_a_key])
def test_what_a_worker_keeps_of_a_batch_besides_its_items_stays(ctx: Any, collate: Any) -> None:
    _cache.clear()
    loader = DataLoader(Samples(), 2, num_workers=1, collate_fn=collate, multiprocessing_context=ctx)
    assert numbers_of(loader) == [list(range(24))]
    del loader
    assert left_in(ctx) == {}


def test_where_the_memory_is_full_batches_wait_for_room(ctx: Any) -> None:
    """All batches are kept, with room for few of them: they come nevertheless, as copies."""
    small = small_context(capacity=8 << 20)
    loader = DataLoader(Samples(), 4, num_workers=2, multiprocessing_context=small)
    kept = list(loader)
    assert sorted(i for batch in kept for i in correct(batch)) == list(range(24))
    del kept, loader
    assert left_in(small) == {}
    vars(small).clear()


side: Any = None


def putting_elsewhere(samples: Any) -> Any:
    """A collate function that also puts what it gives: into a queue of the context, as a pair."""
    batch = chosen_collate(samples)
    side.put(("seen", batch))
    return batch


chosen_collate: Any = default_collate


@pytest.mark.parametrize("ours", [False, True], ids=["torch's collate", "the context's"])
def test_what_a_worker_puts_into_another_queue_itself_is_copied(
    ctx: Any, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the loader's own put takes a batch away that was not said to be moved."""
    monkeypatch.setattr(sys.modules[__name__], "side", ctx.Queue())
    monkeypatch.setattr(sys.modules[__name__], "chosen_collate", ctx.collate if ours else default_collate)
    loader = DataLoader(Samples(), 4, num_workers=1, collate_fn=putting_elsewhere, multiprocessing_context=ctx)
    assert numbers_of(loader) == [list(range(24))]
    seen = [side.get(timeout=20)[1] for _ in range(6)]
    assert sorted(i for batch in seen for i in correct(batch)) == list(range(24))
    del loader, seen
    assert left_in(ctx) == {}


def keeping_a_part(samples: Any) -> Any:
    """A collate function that notes what its batches were of."""
    batch = chosen_collate(samples)
    _cache.append(batch["shared"])
    return batch


@pytest.mark.parametrize("ours", [False, True], ids=["torch's collate", "the context's"])
def test_a_small_part_that_a_worker_keeps_of_each_batch_does_not_keep_them(
    ctx: Any, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that the batches take does not grow."""
    monkeypatch.setattr(sys.modules[__name__], "chosen_collate", ctx.collate if ours else default_collate)
    loader = DataLoader(Samples(), 2, num_workers=1, collate_fn=keeping_a_part, multiprocessing_context=ctx)
    holds = []
    for batch in loader:
        correct(batch)
        del batch
        ctx.tensorpipe_attachment().leases.settle()
        holds.append(sum(nbytes for _, nbytes in ctx.tensorpipe_attachment().arena.holders().values()))
    assert len(holds) == 12
    assert max(holds) < 6 * 2 * 3 * ITEMS * 4 * 2, "of those on their way, and one that is kept"
    del loader
    assert left_in(ctx) == {}


class Varied(Dataset):
    """Samples of which the first few are long."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        return torch.full((1 << 20 if i < 4 else 20_000,), i, dtype=torch.uint8)


def test_one_long_batch_makes_no_later_one_take_more(ctx: Any) -> None:
    """Batches that the program keeps hold the memory that they are made of."""
    loader = DataLoader(Varied(), 4, num_workers=1, multiprocessing_context=ctx, prefetch_factor=1)
    batches = iter(loader)
    assert len(next(batches)) == 4
    kept = list(batches)
    assert [int(batch[0, 0]) for batch in kept] == [*range(4, 40, 4)]
    ctx.tensorpipe_attachment().leases.settle()
    assert sum(nbytes for _, nbytes in ctx.tensorpipe_attachment().arena.holders().values()) < 2 << 20
    del batches, loader, kept
    assert left_in(ctx) == {}


class Nested(Samples):
    """Each sample is made of batches of other samples."""

    def __getitem__(self, i: int) -> Any:
        sample = super().__getitem__(i)
        for batch in DataLoader(Samples(), 4):
            assert batch["x"].sum() == ITEMS * sum(batch["i"])
        return sample


def test_loaders_within_samples_do_not_make_batches_larger(ctx: Any) -> None:
    """A worker sizes a batch by what it put of the batch before, and not by all that was made meanwhile."""
    loader = DataLoader(Nested(), 4, num_workers=1, multiprocessing_context=ctx, prefetch_factor=1)
    most = 0
    for batch in loader:
        correct(batch)
        del batch
        most = max(most, ctx.tensorpipe_attachment().arena.segment.resident())
    assert most < 24 * 3 * ITEMS * 4 * 4
    del loader
    assert left_in(ctx) == {}


class Views(Dataset):
    """Parts of a tensor that the program shared itself."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, i: int) -> Any:
        self.whole[i, 0] = 100 + i
        return self.whole[i]


def test_samples_that_the_program_shared_stay_shared(ctx: Any) -> None:
    """Not stacked, a view of shared memory is a view of it in the training loop; a stack of such is a batch like others."""
    whole = torch.zeros(6, 3).share_memory_()
    loader = DataLoader(Views(whole), None, num_workers=1, multiprocessing_context=ctx)
    for i, row in enumerate(loader):
        assert row[0] == 100 + i
        row[1] = i
    assert whole[:, 1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    loader = DataLoader(Views(whole), 3, num_workers=1, multiprocessing_context=ctx)
    for batch in loader:
        assert not batch.is_shared()
        batch.fill_(-1)
    assert whole.min() >= 0
    del loader, batch, row


def test_a_torch_that_asks_for_memory_in_another_way_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch has no such method, one warning says what that costs, and the worker works."""
    monkeypatch.delattr(torch.storage._StorageBase, "_new_shared")
    there = Queue()
    with pytest.warns(UserWarning, match="batches are copied once more"):
        work(Queue.put, there, 1)
    assert there.get() == 1


IN_A_CONTAINER = """
import os, torch, tensorpipe_ipc as tp
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
data = torch.arange(64.0)[:, None].expand(64, 1 << 16).contiguous()
loader = DataLoader(TensorDataset(data), 16, num_workers=2, multiprocessing_context=tp.get_context("fork"))
found = [batch[0] for batch in loader]
assert sorted(float(row[0]) for batch in found for row in batch) == [float(i) for i in range(64)]
print(sum(batch.nbytes for batch in found), [n for n in os.listdir("/dev/shm") if not n.startswith("sem.")])
"""


def test_16_mib_of_batches_come_where_dev_shm_has_64_kib(tmp_path: Path) -> None:
    """A container's small /dev/shm does not matter to a loader that has the context and nothing else of ours."""
    done = ran_with_small_dev_shm(IN_A_CONTAINER, tmp_path)
    assert (done.status, done.out) == (0, f"{16 << 20} []\n"), done.err


FEW_ADDRESSES = """
import resource, torch
import tensorpipe_ipc as tp
from torch.utils.data import DataLoader
torch.set_num_threads(1)
with open("/proc/self/statm") as line:
    used = int(line.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (700 << 20),) * 2)
rows = [torch.full((500_000,), float(row)) for row in range(64)]
kept = []
for batch in DataLoader(rows, 8, num_workers=2, multiprocessing_context=tp.get_context("fork")):
    kept.append(batch[:, 0].tolist() and batch)
    del kept[:-3]
print(kept[-1][:, 0].tolist())
"""


def test_a_worker_with_few_addresses_left_makes_its_batches_in_memory_of_its_own(tmp_path: Path) -> None:
    """As an arena under ``ulimit -v`` keeps half of its addresses from what lasts."""
    done = ran_in_fork("-c", FEW_ADDRESSES, folder=tmp_path)
    assert (done.status, done.out) == (0, "[56.0, 57.0, 58.0, 59.0, 60.0, 61.0, 62.0, 63.0]\n"), done.err


def _worker_loop(there: Queue, back: Queue, *, by: int) -> None:
    """A program's own function, which has the name of a DataLoader's."""
    back.put(there.get() * by)
    assert not there.takes_offers


def test_a_programs_own_function_of_that_name_is_left_alone(ctx: Any) -> None:
    """Also with keywords."""
    there, back = ctx.Queue(), ctx.Queue()
    process = ctx.Process(target=_worker_loop, args=(there, back), kwargs={"by": 3})
    process.start()
    there.put(torch.ones(3))
    assert back.get(timeout=20).tolist() == [3.0] * 3
    process.join(20)
    assert process.exitcode == 0
    process.close()
