"""Staging on a real GPU. Skips itself with the reason where there is none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
REASON = "" if torch.version.cuda else "this torch is built without CUDA"

# In a process of its own: CUDA, once used, keeps threads, descriptors and mappings that the guard would find.
_ROUND_TRIP = """
import os, torch, warnings
warnings.simplefilter("error")
import tensorpipe_ipc as tp
from tensorpipe_ipc.memory.staging import staging
queue = tp.Queue(4)
x = torch.randn(1 << 22, device="cuda")
image = torch.randn(8, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
for device in ("cuda", "cuda:0", None, "cpu"):
    for _ in range(5):
        x.add_(1)
        queue.put({"x": x, "image": image, "small": x[:3], "n": 1})
        want = x.cpu()
        x.mul_(2)  # overwritten as soon as put has returned
        got = queue.get(device=device)
        assert got["x"].is_cuda == (device not in (None, "cpu"))
        assert torch.equal(got["x"].cpu(), want)
        assert torch.equal(got["image"].cpu(), image.cpu()) and got["image"].stride() == image.stride()
        assert torch.equal(got["small"].cpu(), want[:3])
print("page-locked" if not staging().pageable else staging().pageable)
staging().finish()
assert queue.statistics().leases == 0
narrow = tp.Queue(wire_dtype=torch.float16)
narrow.put(x)
got = narrow.get(device="cuda")
assert got.dtype is torch.float32 and torch.equal(got, x.half().float())
pid = os.fork()
if not pid:
    try:
        queue.get(device="cuda")
    except tp.Closed as refused:
        os._exit(7 if "spawn" in str(refused) else 1)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
with tp.MemoryTracker(None) as memory:
    pass
assert memory.peak.gpu > 0
print("done")
"""


def _has_gpu() -> bool:
    if REASON:
        return False
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    return subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout == "True\n"


@pytest.mark.limit(180)
def test_round_trip() -> None:
    """GPU tensors arrive on the GPU, the CPU and as narrow floats, bit for bit; put may be followed by overwriting."""
    if not _has_gpu():
        pytest.skip(REASON or "torch finds no CUDA device here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _ROUND_TRIP], env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.stdout.endswith("done\n"), done.stderr
