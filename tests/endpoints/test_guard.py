"""The guard itself: it sees each kind of thing that a test may leave behind, and ends what takes too long."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from guard import left, runtime_folder, snapshot, time_limit

Undo = Callable[[], object]


def _leave_child(folder: Path) -> Undo:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    return lambda: (child.kill(), child.wait())


def _leave_zombie(folder: Path) -> Undo:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has looked
    return child.wait


def _leave_thread(folder: Path) -> Undo:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left over")
    thread.start()
    return lambda: (stop.set(), thread.join())


def _leave_descriptor(folder: Path) -> Undo:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    return lambda: os.close(descriptor)


def _leave_shared_memory(folder: Path) -> Undo:
    path = Path("/dev/shm") / f"tensorpipe_ipc_guard_{os.getpid()}"
    path.write_bytes(b"left over")
    return path.unlink


def _leave_socket(folder: Path) -> Undo:
    path = folder / "socket"
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))
    return path.unlink


def _leave_runtime_file(folder: Path) -> Undo:
    runtime_folder().mkdir(exist_ok=True)
    path = runtime_folder() / "frames"
    path.write_bytes(b"")
    return lambda: (path.unlink(), runtime_folder().rmdir())


def _leave_mapping(folder: Path) -> Undo:
    descriptor = os.memfd_create("left over")
    os.ftruncate(descriptor, 4096)
    mapping = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
    return mapping.close


@pytest.mark.parametrize(
    ("leave", "names"),
    [
        (_leave_child, "children: process"),
        (_leave_zombie, "zombie"),
        (_leave_thread, "threads: left over"),
        (_leave_descriptor, "-> /dev/null"),
        (_leave_shared_memory, "shared_memory: tensorpipe_ipc_guard_"),
        (_leave_socket, "sockets: "),
        (_leave_runtime_file, "tensorpipe_ipc/frames"),
        (_leave_mapping, "mappings: /memfd:left over"),
    ],
)
def test_sees_what_is_left(leave: Callable[[Path], Undo], names: str, tmp_path: Path) -> None:
    """Each kind of leftover is named while it is there, and no longer once it is gone."""
    before = snapshot([tmp_path])
    undo = leave(tmp_path)
    found = left(before, [tmp_path], patience=0.0)
    undo()
    assert [line for line in found if names in line], found
    assert left(before, [tmp_path]) == []


def test_sees_zmq_threads() -> None:
    """A ZeroMQ context that is not terminated is seen by its threads, which Python does not list."""
    before = snapshot()
    context = zmq.Context()
    found: list[str] = []
    deadline = time.monotonic() + 10
    with context.socket(zmq.PAIR):
        while not any("threads: ZMQ" in line for line in found) and time.monotonic() < deadline:  # they name themselves
            found = left(before, patience=0.0)
    context.term()
    assert [line for line in found if line.startswith("threads: ZMQ")], found
    assert left(before) == []


def test_ends_what_takes_too_long() -> None:
    """A wait that would last a minute fails after its limit, and says what it was."""
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"a long sleep took over 0\.1 s"), time_limit(0.1, "a long sleep"):
        time.sleep(60)
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_guards_every_test(pytester: pytest.Pytester) -> None:
    """In a run with this conftest, the leaking and the slow test fail with the reason, and the clean one passes."""
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makepyfile("""
        import os, time
        import pytest

        def test_clean():
            pass

        def test_leaks():
            os.environ["LEAKED"] = str(os.open(os.devnull, os.O_RDONLY))

        @pytest.mark.limit(0.2)
        def test_is_slow():
            time.sleep(60)
        """)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")  # this process's fork server does for it too
    os.close(int(os.environ.pop("LEAKED")))
    result.assert_outcomes(passed=2, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*left behind:*", "*descriptors: * -> /dev/null*"])
    result.stdout.fnmatch_lines(["*test_is_slow took over 0.2 s*"])
