"""``python -m tensorpipe_ipc`` is ``tensorpipe-ipc``."""

import sys

from tensorpipe_ipc.cli import main

if __name__ == "__main__":  # processes that are spawned from here import this file too
    sys.exit(main())
