"""What a process lacks or gets wrong: descriptors, and the time of day."""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import pytest
from children import PATIENCE, Child
from secured import binders, connectors, make_keys

import tensorpipe_ipc as tp

ENDS: dict[str, Callable[[Path], Any]] = {
    "a consumer that binds": lambda keys: tp.Consumer("few"),
    "a producer that binds": lambda keys: tp.Producer("few", bind=True),
    "a producer that connects": lambda keys: tp.Producer("few"),
    "a binder with keys": lambda keys: tp.Consumer("tcp://127.0.0.1:*", security=binders(keys)),
    "a connector with keys": lambda keys: tp.Consumer("tcp://127.0.0.1:9", bind=False, security=connectors(keys)),
}
OPENED, REFUSED, LEFT_SOMETHING, SOMETHING_ELSE = range(4)


def _open_with(left: int, make: Callable[[], Any]) -> int:
    """What becomes of an end for which a process has so many descriptors left; minus a signal's number, if that."""
    child = os.fork()
    if not child:
        ending = SOMETHING_ELSE
        try:
            highest = max(map(int, os.listdir("/proc/self/fd")))
            while os.dup(0) < highest:  # numbers are what is limited, so there must be no gap
                pass
            before = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + left, 4096))
            try:
                make()
                ending = OPENED
            except tp.Refused as refused:
                ending = REFUSED if "ulimit -n" in str(refused) else SOMETHING_ELSE
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            if ending == REFUSED and len(os.listdir("/proc/self/fd")) != before:
                ending = LEFT_SOMETHING
        finally:
            sys.stderr.close()
            os._exit(ending)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("end", ENDS)
def test_an_end_for_which_no_descriptor_is_left_says_so_and_leaves_nothing(end: str, tmp_path: Path) -> None:
    """However many are left, it opens, or is refused with the limit; libzmq would end the process."""
    keys = make_keys(tmp_path)
    endings = [_open_with(left, lambda: ENDS[end](keys)) for left in range(0, 26, 2)]
    assert set(endings) == {OPENED, REFUSED}
    assert endings == sorted(endings, reverse=True)


def jumping_clock(ends: children.Ends) -> None:
    """Have this process's time of day be another at every look."""
    time.time = lambda: random.uniform(-1e10, 1e10)  # type: ignore[assignment]
    time.time_ns = lambda: random.randrange(1 << 62)


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_a_clock_that_jumps_changes_nothing(shared_memory: str) -> None:
    """Nobody looks at the time of day: timeouts are kept, nobody is taken for dead, and every message comes."""
    with Child() as one, Child() as other:
        for child in (one, other):
            child.call(jumping_clock)
        endpoint = one.call(children.open_consumer, "clock", shared_memory=shared_memory)
        other.call(children.open_producer, endpoint, shared_memory=shared_memory)
        other.begin(children.put_numbers, 0, 200, "n")
        assert one.call(children.take, 200) == [("n", number) for number in range(200)]
        other.result()
        began = time.monotonic()
        with pytest.raises(tp.Empty):
            one.call(children.take, 1, 0.2)
        assert 0.2 <= time.monotonic() - began < PATIENCE
        assert len(one.call(children.consumer_statistics).peers) == 1
