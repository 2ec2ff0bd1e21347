"""``tensorpipe-ipc doctor``: what this machine allows, and who is attached to an endpoint, by which transport, and why.

Nothing is stated that is not tried out or read from the kernel; who is attached the ends themselves have written down
(``endpoints.published_status``), so a busy or stopped program is asked nothing. Exit status 0: shared memory works here, and
between all who are attached to the endpoint and want it. 1: it does not, or nobody has the endpoint; the lines marked NO say
why.
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
    """The command's arguments."""
    parser.add_argument(
        "endpoint", nargs="?", metavar="ENDPOINT", help="ipc:///path, tcp://host:port, or a bare name: who is attached"
    )


def run(arguments: argparse.Namespace) -> int:
    """Look at everything, and print a table.

    Raises:
        Failure: the endpoint is none that another process could look at.
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

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False, width=WIDTH)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = Text(finding.state.value, style=_STYLES[finding.state])
        # What other users' processes say of themselves is among it, where root asks.
        table.add_row(Text(shown(finding.what)), mark, Text(shown(finding.text)))
    Console(width=WIDTH, highlight=False).print(table)
