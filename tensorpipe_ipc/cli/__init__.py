"""The command line: ``tensorpipe-ipc COMMAND``, and ``python -m tensorpipe_ipc COMMAND``. One file or folder per command.

Exit status: 0 done, 1 failed (one line says why), 2 wrong usage or something not installed, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Sequence

from tensorpipe_ipc.cli import doctor, keygen, latency, serializers, throughput, top
from tensorpipe_ipc.cli.failure import status_of

__all__ = ["main"]

COMMANDS = {
    "doctor": doctor,
    "keygen": keygen,
    "latency": latency,
    "serializers": serializers,
    "throughput": throughput,
    "top": top,
}
REMEDIES = {"rich": "pip install 'tensorpipe-ipc[cli]'", "matplotlib": "pip install 'tensorpipe-ipc[plot]'"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; None: the process's own.

    Returns:
        The exit status.
    """
    return status_of("tensorpipe-ipc", lambda: _run(_parser().parse_args(argv)), REMEDIES)


def _run(chosen: argparse.Namespace) -> int:
    status: int = chosen.run(chosen)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tensorpipe-ipc", description="PyTorch tensors between processes.")
    parser.add_argument("--version", action="version", version=f"tensorpipe-ipc {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = (command.__doc__ or "").partition("\n")[0].removeprefix(f"``tensorpipe-ipc {name}``: ")
        own = commands.add_parser(name, help=about, description=f"{about[:1].upper()}{about[1:]}")
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("tensorpipe-ipc")
    except importlib.metadata.PackageNotFoundError:
        return "(run from a checkout that is not installed)"
