"""``tensorpipe-ipc doctor``: what this machine allows, which ends are attached to an endpoint, by which transport, and why.

It tries each thing out, or reads it from the kernel. The ends have published their own status in files
(``endpoints.published_status``), so a busy or stopped program need not answer.

Exit status 0: shared memory works here, and between all ends of the endpoint that want it. Exit status 1: it does not work,
or no end is attached to the endpoint; the lines marked NO say why.
"""

from __future__ import annotations

import argparse

from tensorpipe_ipc.cli.doctor import attached, machine
from tensorpipe_ipc.cli.doctor.finding import Finding, State
from tensorpipe_ipc.cli.failure import Failure
from tensorpipe_ipc.wire.header import shown

__all__ = ["add_arguments", "run"]

WIDTH = 80
_STYLES = {State.OK: "green", State.NOTE: "dim", State.NO: "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "endpoint", nargs="?", metavar="ENDPOINT", help="ipc:///path, tcp://host:port, or a bare name: who is attached"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check everything, and print a table.

    Raises:
        Failure: another process cannot look at such an endpoint.
    """
    found = [*machine.findings()]
    _show("This machine", found)
    if arguments.endpoint is not None:
        try:
            here = [*attached.findings(arguments.endpoint)]
        except ValueError as error:
            raise Failure(str(error)) from None
        _show(arguments.endpoint, here)
        found += here
    return int(any(finding.state is State.NO for finding in found))


def _show(title: str, findings: list[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(shown(title)), title_justify="left", box=box.SIMPLE_HEAD, show_header=False, width=WIDTH)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = Text(finding.state.value, style=_STYLES[finding.state])
        # For root, the text includes the published status of other users' processes.
        table.add_row(Text(shown(finding.what)), mark, Text(shown(finding.text)))
    Console(width=WIDTH, highlight=False).print(table)
