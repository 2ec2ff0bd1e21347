"""Around every test: it leaves nothing behind (``guard``), and its time is bounded (60 s, or its ``limit`` marker)."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import shutil
import signal
import socket
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import children
import pytest
from guard import hang_limit, left, snapshot, time_limit

import tensorpipe_ipc as tp

pytest_plugins = ["pytester", "arenas"]
LIMIT = 60.0  # seconds for each of setting up a test without a ``limit`` marker, the test, and tearing it down
FREEZES = 25  # after so many tests, what is there is not looked at again by the garbage collection
GRACE = 15.0  # seconds after all three until a test that hangs in C takes the whole run with it

_tests = itertools.count(1)


def pytest_configure() -> None:
    """Ctrl-C raises here and in all children, also where a shell that has started this in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases to ``make slow`` that show no value of any parameter for the first time, but a combination of them."""
    shown: dict[tuple[Path, str], set[tuple[str, int]]] = defaultdict(set)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            # By identity: some have no hash, or no equality.
            values = {(name, id(value)) for name, value in item.callspec.params.items()}
            others = shown[item.path, item.originalname]
            if values <= others:
                item.add_marker("slow")
            others |= values


@pytest.fixture(scope="session", autouse=True)
def own_runtime_folder() -> Iterator[Path]:
    """A runtime folder of this run's own: two runs on one machine do not meet, nor do their leftovers.

    It has a short name, for the path of a socket has at most 107 bytes.
    """
    folder = tempfile.mkdtemp(prefix="tp-")
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = folder
    resource_tracker.ensure_running()  # multiprocessing's own, which stays: every test begins with it
    children.start_fork_server()  # this too
    with children.Child():  # it has imported torch by then, which on a busy machine may take as long as a test may
        pass
    gc.freeze()  # what torch's import made is not looked at again: a collection takes 1 ms and not 50
    yield Path(folder)
    del os.environ["XDG_RUNTIME_DIR"]
    if before is not None:
        os.environ["XDG_RUNTIME_DIR"] = before
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest, own_runtime_folder: Path) -> Iterator[None]:
    """Every test ends with no child, thread, descriptor, shared memory or socket file that it did not begin with."""
    folders = [request.getfixturevalue("tmp_path")] if "tmp_path" in request.fixturenames else []
    if next(_tests) % FREEZES == 0:
        gc.collect()
        gc.freeze()  # as when the run began: what tests imported since (torch's compiler, say) is ten times that much
    before = snapshot(folders)
    yield
    found = left(before, folders)
    assert not found, "left behind:\n  " + "\n  ".join(found)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Bound the whole, once for its three parts: this costs a thread."""
    with hang_limit(3 * _limit(item) + GRACE):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Bound the fixtures."""
    with time_limit(_limit(item), f"setting up {item.name}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Bound the test."""
    with time_limit(_limit(item), item.name):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Bound what the fixtures do afterwards."""
    with time_limit(_limit(item), f"tearing down {item.name}"):
        return (yield)


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("limit")
    return float(marker.args[0]) if marker else LIMIT


@pytest.fixture
def free_port() -> int:
    """A tcp port of loopback that nobody had a moment ago, and that the kernel gives nobody who does not name it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(max(first // 2, 1024), max(first, 2048))))
            return int(probe.getsockname()[1])


@pytest.fixture(params=["shared memory", "frames"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test once with both ends as they are by default, and once with those of this process wanting frames."""
    if request.param == "frames":
        for end in (tp.Producer, tp.Consumer):
            monkeypatch.setitem(end.__init__.__kwdefaults__, "shared_memory", "off")
    return str(request.param)
