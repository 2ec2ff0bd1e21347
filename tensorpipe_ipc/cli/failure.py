"""Failure: an exception that ends a command with a sentence instead of a traceback."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping

from tensorpipe_ipc.errors import TensorPipeError

__all__ = ["Failure", "status_of"]


class Failure(Exception):
    """A command cannot do its work. The text is all that the user needs to see."""


def status_of(program: str, command: Callable[[], int], remedies: Mapping[str, str]) -> int:
    """Run a command.

    Args:
        program: the name at the beginning of the error line.
        command: the function to run. It returns the exit status.
        remedies: for each library that may be missing, how to install it.

    Returns:
        The exit status: 1 after a failure, 2 if a library is not installed, 130 after Ctrl-C.
    """
    logging.getLogger("tensorpipe_ipc").addHandler(logging.NullHandler())  # a command knows whom it waits for
    try:
        return command()
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as in shells
    except ModuleNotFoundError as missing:
        library = str(missing.name).partition(".")[0]
        if library not in remedies:
            raise
        sentence, status = f"this needs {library}: {remedies[library]}", 2
    except (Failure, TensorPipeError) as error:
        sentence, status = str(error), 1
    print(f"{program}: {sentence}", file=sys.stderr)
    return status
