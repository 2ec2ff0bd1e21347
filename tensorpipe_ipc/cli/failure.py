"""Failure: what ends a command with a sentence instead of a traceback."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping

from tensorpipe_ipc.errors import TensorPipeError

__all__ = ["Failure", "status_of"]


class Failure(Exception):
    """A command cannot do what it was asked to. Its text is all that the user needs to see."""


def status_of(program: str, command: Callable[[], int], remedies: Mapping[str, str]) -> int:
    """Run a command.

    Args:
        program: the name that its one line begins with, if it fails.
        command: what to run. It returns the exit status.
        remedies: by library: how to get what may not be installed.

    Returns:
        The exit status: 1 where it failed, 2 where something is not installed, 130 after Ctrl-C.
    """
    logging.getLogger("tensorpipe_ipc").addHandler(logging.NullHandler())  # a command knows whom it waits for
    try:
        return command()
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells count
    except ModuleNotFoundError as missing:
        library = str(missing.name).partition(".")[0]
        if library not in remedies:
            raise
        sentence, status = f"this needs {library}: {remedies[library]}", 2
    except (Failure, TensorPipeError) as error:
        sentence, status = str(error), 1
    print(f"{program}: {sentence}", file=sys.stderr)
    return status
