"""``python -m bench gpu``: says in one line that there is no GPU; what does not need one is tried without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import ran

from bench import gpu

CODE = """
from bench import gpu
if __name__ == "__main__":
    gpu.SIZES, gpu.MESSAGES = {"small": 100_000}, {"small": 4}
    rows = list(gpu.measure("small", 0.1, "cpu"))
    gpu.show(rows, {"gpu": "none"})
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and measuring takes minutes")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the reason, status 1, and nothing was started."""
    from bench import __main__ as command

    with pytest.raises(SystemExit, match=r"^python -m bench gpu: (this torch|torch finds)") as ended:
        command.main(["gpu"])
    assert "\n" not in str(ended.value)
    monkeypatch.setattr(torch.version, "cuda", "12.0")
    assert gpu.why_not() == "torch finds no CUDA device here"


@pytest.mark.kills
@pytest.mark.limit(120)
def test_the_program_itself(tmp_path: Path) -> None:
    """On the CPU every way and ceiling gives a row, what arrives is checked, and the table is of at most 100 columns."""
    (tmp_path / "small.py").write_text(CODE)
    done = ran(str(tmp_path / "small.py"))
    assert done.status == 0, done.err
    for way in (*gpu.RIVALS, *gpu.CEILINGS):
        assert way in done.out, done.out
    assert max(map(len, done.out.splitlines())) <= 100


def test_what_comes_damaged_is_found() -> None:
    """A tensor that is not the one that was put ends the measurement."""

    class Damaging:
        there = back = None

        def put(self, queue: object, tensor: torch.Tensor) -> None:
            pass

        def get(self, queue: object) -> torch.Tensor:
            return torch.zeros(10, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="came damaged"):
        gpu.round_trip(Damaging(), gpu.pattern(10, "cpu"), 2)
