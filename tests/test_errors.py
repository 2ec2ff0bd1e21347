"""The tree of exceptions: what each also is, and that the docstring draws it as it is."""

from __future__ import annotations

import queue
import re

import pytest

from tensorpipe_ipc import errors
from tensorpipe_ipc.errors import TensorPipeError, UnsupportedLeaf

ALSO = {
    "Closed": ValueError,
    "PeerLost": ConnectionError,
    "Busy": RuntimeError,
    "Full": queue.Full,
    "Empty": queue.Empty,
    "ProtocolError": ValueError,
    "VersionMismatch": errors.ProtocolError,
    "UnknownSerializer": LookupError,
    "UnsupportedLeaf": TypeError,
    "Refused": PermissionError,
    "SharedMemoryError": OSError,
    "MeasurementFailed": RuntimeError,
    "OutOfMemory": MemoryError,
}


@pytest.mark.parametrize("name", errors.__all__)
def test_each_is_in_the_tree(name: str) -> None:
    """Every exception is one of ours, and also what a user of queues or sockets catches already."""
    error = getattr(errors, name)
    assert issubclass(error, TensorPipeError)
    assert issubclass(error, ALSO.get(name, Exception))
    assert str(error("because")) in ("because", "tree: because")


def test_shutdown_is_the_queues_where_there_is_one() -> None:
    """From Python 3.13 on ShutDown is ``queue.ShutDown`` too."""
    assert issubclass(errors.ShutDown, getattr(queue, "ShutDown", Exception))


def test_the_docstring_draws_all_of_them() -> None:
    """The tree in the docstring has each exception once, under its parent, with the other parent in brackets."""
    drawn = dict(re.findall(r"── (\w+)(?:\((?:\w+\.)?(\w+)\))?", errors.__doc__ or ""))
    assert set(drawn) == set(errors.__all__) - {"TensorPipeError"}
    for name, parent in drawn.items():
        assert not parent or ALSO[name].__name__ == parent


def test_an_unsupported_leaf_grows_its_path_outwards() -> None:
    """Each container that the error passes puts its own step before the path."""
    error = UnsupportedLeaf("a set").within("[3]").within("['mask']")
    assert error.path == "['mask'][3]"
    assert error.reason == "a set"
    assert str(error) == "tree['mask'][3]: a set"
