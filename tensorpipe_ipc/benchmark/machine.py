"""On what something was measured: processor, system and versions."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["versions"]


def versions() -> dict[str, str]:
    """The processor's name, the system's and Python's version, and those of what is installed."""
    found = {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for name in ("torch", "tensorpipe-ipc"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout that is not installed
            continue
    return found


def _processor() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()
