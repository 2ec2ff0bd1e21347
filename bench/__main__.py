"""``python -m bench COMMAND``."""

from __future__ import annotations

import argparse
import sys

from bench import all as everything
from bench import dataloader, endpoints, figures, gpu, growth, page, precision, queue, serializers, tcp

COMMANDS = (everything, growth, page, serializers, endpoints, tcp, queue, dataloader, precision, gpu, figures)


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Side-by-side comparisons.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        about = (command.__doc__ or "").splitlines()[0]
        own = commands.add_parser(name, help=about, description=about)
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    chosen = parser.parse_args(arguments)
    try:
        chosen.run(chosen)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as shells count


if __name__ == "__main__":
    main()
