"""``python -m bench serializers`` in small: it runs, checks its rivals, and writes what it says it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench.serializers as serializers
from bench.measure import interleaved, peak_beyond

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.kills
@pytest.mark.limit(120)
def test_the_command_writes_its_results(tmp_path: Path) -> None:
    """One short run prints tables of at most 100 columns and writes every rival at every shape, and a picture."""
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    # Only the smallest shape: a process is started for each rival at each.
    code = (
        "from bench import __main__ as command, serializers\n"
        "for shape in list(serializers.SHAPES)[1:]: del serializers.SHAPES[shape]\n"
        f"command.main({['serializers', '--scale', '0.0005', *files]!r})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "raw (ours)" in done.stdout
    written = json.loads((tmp_path / "b.json").read_text())
    assert set(written) == {"machine", "scale", "rivals", "results", "ratios"}
    assert [row["shape"] for row in written["ratios"]] == [[100]]
    assert {row["method"] for row in written["results"]} == set(serializers.rivals())
    for row in written["results"]:
        assert set(row) == set(serializers.Result._fields)
        assert row["max_difference"] == 0
        assert row["serialize_ms"] > 0 < row["deserialize_ms"]
        assert row["buffer_kb"] >= row["shape"][0] * 4 / 1024
    assert (tmp_path / "b.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_shapes_and_iterations_are_those_of_the_comparison() -> None:
    """Five shapes, with the number of iterations that each has in the comparison that is repeated."""
    want = {(100,): 10_000, (1000,): 10_000, (100, 100): 5_000, (1000, 1000): 1_000, (5000, 5000): 100}
    assert want == serializers.SHAPES


@pytest.mark.parametrize("label", serializers.rivals())
def test_each_rival_gives_the_tensor_back(label: str) -> None:
    """Every rival gives float32 tensors back, and its bytes are what they are counted as."""
    rival, tensor = serializers.rivals()[label], torch.randn(3, 5)
    sent = rival.serialize(tensor)
    assert torch.equal(rival.deserialize(rival.received(sent), tensor.shape), tensor)
    assert rival.nbytes(sent) >= tensor.nbytes


def test_a_rival_that_fails_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result ends the run instead of being a row."""
    monkeypatch.setattr(serializers, "_numpy_in", lambda data, shape: torch.zeros(shape))
    with pytest.raises(RuntimeError, match="numpy by hand does not give the tensor of shape"):
        serializers.measure((10,), 1)


def test_rounds_alternate() -> None:
    """Each action has its turn in each round, and the first round, which warms up, is over before any counts."""
    calls: list[str] = []
    times = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 20)
    assert "".join(calls) == "aaabbb" * 11
    assert set(times) == {"a", "b"}
    assert all(len(found) == 10 and min(found) > 0 for found in times.values())


def test_peak_sees_what_is_let_go_again() -> None:
    """Memory that an action takes and gives back within it is in its peak."""
    assert peak_beyond(lambda: len(b"x" * (64 << 20))) >= 63 << 20
