"""``python -m bench queue`` in small: it runs, checks its rivals, and writes what it says it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.queue import ITEMS
from bench.queue.crew import Crew
from bench.queue.field import FLOORS, OURS, THEIRS
from bench.queue.findings import Limit, ratio_of, row_of
from bench.queue.programs import ONE_WAY
from bench.queue.rivals import FasterFifo, Ours, missing, pattern

ROOT = Path(__file__).resolve().parents[2]
KINDS = {**FLOORS, OURS: Ours, **THEIRS}


@pytest.mark.kills
@pytest.mark.limit(120)
def test_the_command_writes_its_results(tmp_path: Path) -> None:
    """One short run of all items prints tables of at most 80 columns, and writes every rival's figures and a picture."""
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    code = (
        "from bench import __main__ as command\n"
        "from bench.queue import flat, loans, one_way, streams, trees\n"
        "for size in list(one_way.SIZES)[1:]: del one_way.SIZES[size]\n"  # 100 MB of all takes a minute
        "for leaves in list(trees.LEAVES)[3:]: del trees.LEAVES[leaves]\n"
        "flat.CHUNK, loans.LARGE, streams.LARGE, trees.COMPARED = 256, 100_000, 40_000, 5\n"
        f"command.main({['queue', '--scale', '0.001', *files]!r})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    written = json.loads((tmp_path / "b.json").read_text())
    assert set(written) == {"machine", "scale", "items"}
    assert [item["item"] for item in written["items"]] == list(ITEMS)
    for item in written["items"]:
        assert all(row["p50"] > 0 for row in item["rows"])
        assert all(ratio["value"] > 0 and ratio["limit"] for ratio in item["ratios"])
    one_way = written["items"][0]
    here = {name for name, kind in KINDS.items() if not missing(kind)}
    assert here <= {row["rival"] for row in one_way["rows"]}
    assert {name for name in KINDS if name not in here} <= {note.partition(":")[0] for note in one_way["notes"]}
    assert (tmp_path / "b.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# multiprocessing keeps the memory that faster-fifo's queue had. The run above sees to that one, and says who is not here.
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind is not FasterFifo and not missing(kind)])
def test_each_rival_gives_the_message_to_another_process(name: str) -> None:
    """Every rival that is to be had here passes messages on, and both ends end."""
    crew = Crew(KINDS[name](0, 4000))
    try:
        starts, ends = crew.run(ONE_WAY, 4000, 3)
    finally:
        crew.close()
    assert len(starts) == len(ends) == 3
    if not KINDS[name].alone:
        assert all(start < end for start, end in zip(starts, ends, strict=True))


class _Damaging(Ours):
    def fresh(self, nbytes: int) -> torch.Tensor:
        return pattern(nbytes).clone().zero_()


def test_a_rival_that_damages_messages_ends_the_run() -> None:
    """Wrong content is an error that says so, and leaves no process behind."""
    crew = Crew(_Damaging(0))
    try:
        with pytest.raises(RuntimeError, match="a message of 400 bytes came damaged"):
            crew.run(ONE_WAY, 400, 1)
    finally:
        crew.close()


def test_ratios_are_medians_of_rounds() -> None:
    """A limit on being faster turns the ratio round; who did not take part has none."""
    times = {"a": [[1.0, 2.0, 3.0], [4.0]], "b": [[8.0], [8.0]]}
    (slower,) = ratio_of(times, "a", Limit("b", most=0.4))
    assert (slower.value, slower.lowest, slower.highest, slower.met) == (0.375, 0.25, 0.5, True)
    (faster,) = ratio_of(times, "a", Limit("b", least=4))
    assert (faster.value, faster.limit, faster.met) == (3.0, ">= 4", False)
    assert ratio_of(times, "a", Limit("absent", most=1)) == []
    row = row_of("one way", "a", 400, times["a"])
    assert (row.p50, row.p90, row.p99, row.samples) == (3.0, None, None, 4)
