"""Private names of other libraries: where a version lacks them, all goes on, and what is lost is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import threading, torch, torch.multiprocessing, zmq.utils.garbage as garbage


class Missing:
    def __get__(self, *_):
        raise AttributeError


bad_fork, reaper = torch.cuda._is_in_bad_fork, garbage.gc
{cut}

import warnings
from concurrent.futures import ProcessPoolExecutor

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import tensorpipe_ipc as tp
torch.cuda._is_in_bad_fork, garbage.gc = bad_fork, reaper  # torch and pyzmq need them themselves
for each in told:
    print("WARNED", each.message)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ctx = tp.get_context("fork")
    queue = ctx.Queue()
    queue.put(ctx.empty((1 << 16,)).fill_(3), move=True)
    queue.put(torch.ones(3).share_memory_())
    queue.put([torch.zeros(2), {{"a": object}}])
    assert queue.get(timeout=10).sum() == 3 << 16
    assert queue.get(timeout=10).sum() == 3
    assert queue.get(timeout=10)[1] == {{"a": object}}
    with ProcessPoolExecutor(1, mp_context=ctx) as pool:
        assert pool.submit(torch.square, torch.full((4,), 2.0)).result(20).sum() == 16
    batches = torch.utils.data.DataLoader(range(8), 4, num_workers=1, multiprocessing_context=ctx, collate_fn=ctx.collate)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for endpoint in ("tcp://127.0.0.1:*", "ipc://{folder}/end"):
        with tp.Consumer(endpoint, shared_memory="off") as consumer:
            with tp.Producer(consumer.endpoint, shared_memory="off") as producer:
                thread = threading.Thread(target=producer.put, args=(torch.ones(1 << 20),))
                thread.start()
                assert consumer.get(10).sum() == 1 << 20
                thread.join()
    print("DONE")
"""
_NAMES = {
    "torch.Tensor._is_zerotensor": "torch.Tensor._is_zerotensor = Missing()",
    "torch.cuda._is_in_bad_fork": "del torch.cuda._is_in_bad_fork",
    "torch._storage_classes": "del torch._storage_classes",
    "torch.UntypedStorage._get_shared_fd": "torch.UntypedStorage._get_shared_fd = Missing()",
    "zmq.utils.garbage.gc": "del garbage.gc",
}


def _run(cut: list[str], folder: Path) -> str:
    program = folder / "program.py"
    program.write_text(_PROGRAM.format(cut="\n".join(cut), folder=folder))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_without_private_names_all_goes_on_and_a_warning_says_what_is_lost(tmp_path: Path) -> None:
    """As with a version of a library that has renamed them all."""
    told = _run(list(_NAMES.values()), tmp_path)
    assert "DONE" in told
    for name in _NAMES:
        assert f"WARNED tensorpipe_ipc finds no {name} here: " in told, name


@pytest.mark.slow
def test_with_all_of_them_nothing_is_said(tmp_path: Path) -> None:
    """The versions that are installed have them."""
    assert _run([], tmp_path) == "DONE\n"
