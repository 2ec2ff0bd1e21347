"""Install the peers of `make bench`, one by one, as the extra ``peers`` names them. Note those that could not be, and why.

``python -m bench.wanted COMMAND ...``: the command that installs what stands behind it, as ``pip install`` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["install", "not_installed", "wanted"]

SECONDS = 240.0  # for all of them together: on a slow line the page comes without the last ones, and says so


def wanted(declared: list[str]) -> list[str]:
    """Of all that the package declares, what the extra ``peers`` wants here, without the conditions."""
    found = []
    for one in map(Requirement, declared):
        if (
            one.marker is not None
            and one.marker.evaluate({"extra": "peers"})
            and not one.marker.evaluate({"extra": ""})
        ):
            found.append(f"{one.name}{one.specifier}")
    return found


def install(requirements: Sequence[str], command: Sequence[str], seconds: float = SECONDS) -> dict[str, str]:
    """Install each by itself.

    Args:
        command: installs what stands behind it.
        seconds: for all of them.

    Returns:
        Whom it could not, by name, and what it said of that.
    """
    failed = {}
    end = time.monotonic() + seconds
    for number, requirement in enumerate(requirements, 1):
        print(f"bench: peer {number} of {len(requirements)}: {requirement}", file=sys.stderr, flush=True)
        reason = _why_not([*command, requirement], max(1.0, end - time.monotonic()))
        if reason:
            failed[Requirement(requirement).name] = reason
            print(f"bench goes on without {requirement}: {reason}", file=sys.stderr, flush=True)
    return failed


def not_installed() -> dict[str, str]:
    """Return the reason for each peer that ``make bench`` could not install into this environment."""
    try:
        found: dict[str, str] = json.loads(_note().read_text())
    except OSError:
        return {}
    return found


def _why_not(command: Sequence[str], seconds: float) -> str:
    """Run a command: why it failed, or nothing."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what it has started ends with it
    ) as installing:
        try:
            said, _ = installing.communicate(timeout=seconds)
        except BaseException as ended:
            for number in (signal.SIGINT, signal.SIGKILL):  # first as Ctrl-C: it cleans up
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(installing.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    installing.wait(5)
            if isinstance(ended, subprocess.TimeoutExpired):
                return "the time for installing peers was over"
            raise
    return _last_error(said) if installing.returncode else ""


def _last_error(said: str) -> str:
    """Of many lines the last that calls itself an error, or the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it failed without a word"]
    errors = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("error:")]
    return (errors or lines)[-1][:300]


def _note() -> Path:
    return Path(sys.prefix) / "bench-not-installed.json"


if __name__ == "__main__":
    try:
        _note().write_text(json.dumps(install(wanted(requires("tensorpipe-ipc") or []), sys.argv[1:]), indent=1))
    except KeyboardInterrupt:
        sys.exit(130)
