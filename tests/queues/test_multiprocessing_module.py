"""tensorpipe_ipc.multiprocessing: the names of multiprocessing and of torch.multiprocessing, with our queues."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from programs import ran

import tensorpipe_ipc as tp
import tensorpipe_ipc.multiprocessing as mp


def test_it_has_every_name_of_both_modules() -> None:
    assert set(multiprocessing.__all__) <= set(mp.__all__)
    missing = [name for name in {*multiprocessing.__all__, *torch.multiprocessing.__all__} if not hasattr(mp, name)]
    assert missing == []
    assert mp.connection is multiprocessing.connection
    assert mp.reductions is torch.multiprocessing.reductions
    with pytest.raises(AttributeError, match="nosuch"):
        _ = mp.nosuch


SUBMODULES = """
import importlib, multiprocessing
import tensorpipe_ipc.multiprocessing as mp
from tensorpipe_ipc.multiprocessing import managers, pool, shared_memory, sharedctypes
for module in managers, pool, shared_memory, sharedctypes:
    assert module is importlib.import_module("multiprocessing." + module.__name__.split(".")[1]), module
for name in "context", "shared_memory", "spawn":
    try:
        importlib.import_module("tensorpipe_ipc.multiprocessing." + name)
    except ModuleNotFoundError as error:
        assert "not a package" in str(error), error
    else:
        raise AssertionError(name)
"""


@pytest.mark.slow
def test_there_is_one_of_each_module_of_multiprocessings() -> None:
    """A second one would have classes of its own, which are not what the first one raises and makes."""
    done = ran("-c", SUBMODULES)
    assert (done.status, done.out) == (0, ""), done.err


def test_queues_and_contexts_are_ours_and_the_rest_is_not() -> None:
    assert (mp.Queue, mp.JoinableQueue, mp.SimpleQueue) == (tp.Queue, tp.JoinableQueue, tp.SimpleQueue)
    assert mp.get_context is tp.get_context
    assert mp.Process is multiprocessing.Process
    assert mp.get_start_method() == multiprocessing.get_start_method()


def send_back(queue: Any, there: Any) -> None:
    """In a child."""
    torch.set_num_threads(1)
    there.put(queue.get(timeout=20) * 2)


def test_what_worked_with_multiprocessing_works_with_it() -> None:
    there, back, event = mp.Queue(), mp.SimpleQueue(), mp.Event()
    process = mp.Process(target=send_back, args=(there, back))
    process.start()
    there.put(torch.ones(50_000))
    assert back.get().sum() == 100_000
    process.join(20)
    assert process.exitcode == 0
    process.close()
    assert not event.is_set()
    with mp.Pool(1) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]


def test_the_strategy_is_torchs() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    try:
        mp.set_sharing_strategy("file_system")
        assert torch.multiprocessing.get_sharing_strategy() == mp.get_sharing_strategy() == "file_system"
    finally:
        mp.set_sharing_strategy(before)


_PROGRAM = """
import torch
import tensorpipe_ipc.multiprocessing as mp

def fill(rank, queue):
    queue.put((rank, torch.full((50_000,), rank)))

if __name__ == "__main__":
    mp.set_start_method("spawn")
    queue = mp.Queue()
    mp.spawn(fill, args=(queue,), nprocs=1)
    rank, filled = queue.get()
    with mp.Pool(1) as pool:
        print(mp.get_start_method(), rank, int(filled.sum()), pool.apply(torch.sum, (torch.ones(50_000),)).item())
"""


@pytest.mark.kills
@pytest.mark.limit(110)
def test_a_program_that_sets_its_start_method_and_spawns(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("spawn 0 0 50000.0\n", "")
