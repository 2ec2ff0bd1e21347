"""``python -m bench dataloader`` in small: it runs, checks every batch, and writes what it says it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.dataloader.rows import OURS, STOCK, Turn, row_of
from bench.dataloader.samples import check_detection, check_pair

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.limit(110)
@pytest.mark.kills
def test_the_command_writes_its_results(tmp_path: Path) -> None:
    """One short run prints a table of at most 80 columns, and writes both rivals' figures and a picture."""
    cases = ["tabular", "images", "crops", "detection", "pool", "executor"]
    only = [word for case in cases for word in ("--only", case)]
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "dataloader", "--scale", "0.01", *only, *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    written = json.loads((tmp_path / "b.json").read_text())
    assert list(dict.fromkeys(row["case"] for row in written["rows"])) == cases
    assert len(written["rows"]) == 4 * len(cases)
    for row in written["rows"]:
        assert min(row[name] for name in ("stock", "ours", "ratio", "stock_uss", "ours_uss", "ours_pss")) > 0
    assert (tmp_path / "b.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_damaged_batch_is_seen() -> None:
    """The check of a rival's batches raises ValueError for a damaged one."""
    numbers = torch.arange(4)
    samples = numbers[:, None].expand(4, 9).float().clone()
    check_pair((samples, numbers))
    samples[2, 8] = 0
    with pytest.raises(ValueError, match="damaged"):
        check_pair((samples, numbers))
    targets = [{"id": number, "boxes": torch.full((1, 4), float(number))} for number in numbers]
    images = numbers[:, None, None].expand(4, 3, 3)
    check_detection((images, images > 7, targets))
    targets[1]["boxes"][0, 3] = 9
    with pytest.raises(ValueError, match="damaged"):
        check_detection((images, images > 7, targets))


def test_a_ratio_is_the_median_of_the_rounds_own() -> None:
    """Memory is that of the round that used most."""
    turns = {
        STOCK: [Turn(1, 0, 0), Turn(10, 0, 0), Turn(2, 2_000_000, 1)],
        OURS: [Turn(2, 0, 0), Turn(50, 0, 0), Turn(6, 1, 3_000_000)],
    }
    row = row_of("images", "ready", 1, 3.0, turns)
    assert (row.ratio, row.lowest, row.highest, row.met) == (3, 2, 5, True)
    assert (row.stock, row.ours, row.stock_uss, row.ours_pss) == (2, 6, 2.0, 3.0)
