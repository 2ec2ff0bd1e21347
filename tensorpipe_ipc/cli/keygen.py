"""``tensorpipe-ipc keygen``: makes a pair of CURVE keys, as files, for ends that talk between hosts.

``NAME.key`` goes to the peers that shall trust this end; ``NAME.key_secret`` stays here. Neither file is ever overwritten.
"""

from __future__ import annotations

import argparse

from tensorpipe_ipc.cli.failure import Failure
from tensorpipe_ipc.security import write_key_pair
from tensorpipe_ipc.zeromq.curve import key_pair

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="a name, or a path without ending: NAME.key and NAME.key_secret")


def run(arguments: argparse.Namespace) -> int:
    """Write the two files, and say which is which. No key is printed."""
    try:
        public, secret = write_key_pair(arguments.name, *key_pair())
    except ValueError as error:
        raise Failure(str(error)) from None
    print(f"{public}  public: copy it to the other side")
    print(f"{secret}  secret: stays here, readable by you alone")
    return 0
