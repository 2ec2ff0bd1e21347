"""``python -m bench precision`` in small: every wire dtype crosses, as many bytes as it says, and what it says is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from programs import ran

from bench import precision

CODE = """
from bench import precision
if __name__ == "__main__":
    import json, os, sys
    precision.SIZES = {"small": 50_000}
    precision.ROUNDS = {"small": 1}
    rows = list(precision.measure("shared memory", "small", 1))
    precision.draw(rows, sys.argv[1])
    print(json.dumps([row._asdict() for row in rows]))
"""


@pytest.mark.kills
@pytest.mark.limit(120)
def test_each_wire_dtype_crosses(tmp_path: Path) -> None:
    """Bytes are those of the wire dtype, the error is none for float32 alone, and the picture is one."""
    (tmp_path / "small.py").write_text(CODE)
    done = ran(str(tmp_path / "small.py"), str(tmp_path / "p.png"))
    assert done.status == 0, done.err
    rows = [precision.Precise(**row) for row in json.loads(done.out.splitlines()[-1])]
    assert [row.nbytes for row in rows] == [50_000 * (dtype or torch.float32).itemsize for dtype in precision.WIRE]
    assert [row.largest_relative_error > 0 for row in rows] == [False, True, True, True, True]
    assert all(row.milliseconds > 0 for row in rows)
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
