"""Try each wheel of a folder in an environment of its own: ``python -m tests.wheels dist``."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TESTS = ["tests/queues/test_tensor_queue.py", "tests/queues/test_compiled.py", "tests/endpoints/test_endpoints.py"]
_WHY_OFF = "from tensorpipe_ipc import compiled; print(compiled.__file__, '|', compiled.why_off())"


def main() -> int:
    """Try them; return 0 if all of them do what their names say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what has the wheels")
    wheels = sorted(parser.parse_args().folder.glob("*.whl"))
    if len(wheels) != 2:
        print(f"two wheels were to be made, not {[each.name for each in wheels]}")
        return 1
    return max(map(_try, wheels))


def _try(wheel: Path) -> int:
    is_compiled = "-abi3-" in wheel.name
    print(f"{wheel.name}: the compiled path is to be {'on' if is_compiled else 'off'}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder, python = Path(made), str(Path(made) / "venv" / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        constraint = ["--constraint", str(ROOT / "constraints.txt")]
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraint]
        subprocess.run([*install, f"{wheel.resolve()}[test]"], check=True)
        for each in ("tests", "bench", "examples", "docs"):  # beside no source of the package
            shutil.copytree(ROOT / each, folder / each)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, folder / name)
        told = subprocess.run([python, "-c", _WHY_OFF], cwd=folder, check=True, capture_output=True, text=True).stdout
        where, why_off = told.strip().split("|")
        if made not in where or bool(why_off.strip()) == is_compiled:
            print(f"{wheel.name}: the compiled path is off because of {why_off!r}, in {where}")
            return 1
        environment = {**os.environ, "PYTHONPATH": ""}
        return subprocess.run(
            [python, "-m", "pytest", "-q", *_TESTS], cwd=folder, env=environment, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
