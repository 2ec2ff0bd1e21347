"""``tensorpipe-ipc``: the script's way in. It stands outside the package, whose import takes a second or more: torch's."""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["main"]


def main() -> int:
    """Run the command line. Ctrl-C while libraries are imported ends it with status 130 and no word, as later."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in the background of a shell: so it stays
        signal.signal(signal.SIGINT, _leave)
    from tensorpipe_ipc.cli import main as run

    signal.signal(signal.SIGINT, before)
    return run()


def _leave(number: int, frame: FrameType | None) -> None:
    """At once: nothing is there yet that would have to be closed, and a library may not let KeyboardInterrupt through."""
    del frame
    os._exit(128 + number)
