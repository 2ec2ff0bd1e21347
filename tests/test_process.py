"""The identity of a process, its life, and its memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import signal
import threading

import msgspec
import psutil
import pytest
from children import wait_until
from crash_points import in_child, reap

from tensorpipe_ipc.process import Identity, identity, is_alive, memory


def test_an_identity_is_of_one_process() -> None:
    """It is the same at each call, has this process's id, and lives."""
    me = identity()
    assert me == identity()
    assert me.pid == os.getpid()
    assert str(me) == f"pid {os.getpid()} on {me.host}"
    assert is_alive(me)


def test_a_forked_child_has_its_own() -> None:
    """After fork the child is told apart from its parent."""
    me = identity()
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, b"own" if identity().pid == os.getpid() != me.pid else b"parent's")
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    said = os.read(reader, 100)
    os.close(reader)
    assert said == b"own"


def test_a_child_is_alive_until_it_is_killed() -> None:
    """A child of this namespace lives, is dead as a zombie, and stays dead once it was waited for."""
    reader, writer = os.pipe()
    pid = in_child(lambda: (os.write(writer, msgspec.json.encode(identity())), signal.pause()))
    who = msgspec.json.decode(os.read(reader, 1000), type=Identity)
    os.close(reader)
    os.close(writer)
    assert who.pid == pid
    assert who.same_namespace(identity())
    assert is_alive(who)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(who)
    assert reap(pid) == -signal.SIGKILL
    assert not is_alive(who)


def test_a_process_lives_as_long_as_one_of_its_threads() -> None:
    """Its first one may have ended before the others: so it is, for a moment, when it is killed."""
    reader, writer = os.pipe()

    def leave_a_thread_behind() -> None:
        os.write(writer, msgspec.json.encode(identity()))
        threading.Thread(target=signal.pause).start()
        ctypes.CDLL(None).syscall(
            ctypes.c_long(60 if platform.machine() == "x86_64" else 93), 0
        )  # exit, of this thread

    pid = in_child(leave_a_thread_behind)
    who = msgspec.json.decode(os.read(reader, 1000), type=Identity)
    os.close(reader)
    os.close(writer)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert is_alive(who)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(who)
    assert reap(pid) == -signal.SIGKILL


def test_a_process_id_used_again_is_another_process() -> None:
    """The same id with another start time is not the process that was meant."""
    assert not is_alive(msgspec.structs.replace(identity(), started=identity().started - 1))


@pytest.mark.parametrize("change", [{"boot": "another"}, {"namespace": 1}])
def test_what_cannot_be_seen_counts_as_alive(change: dict[str, object]) -> None:
    """Of a process on another host or in another container nothing is guessed."""
    other = msgspec.structs.replace(identity(), pid=1 << 22, **change)
    assert not other.same_namespace(identity())
    assert is_alive(other)


def test_without_a_descriptor_to_look_with_nobody_is_taken_for_dead() -> None:
    """A process without a free descriptor (ulimit -n) believes nothing of others, and raises nothing."""
    me = identity()

    def look() -> None:
        identity()  # which an end asks for when it is opened
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        assert is_alive(me)

    assert reap(in_child(look)) == 0


def test_memory_grows_with_what_is_held() -> None:
    """64 MiB that are touched are in the resident, unique and proportional memory; another's can be asked for."""
    before = memory()
    held = mmap.mmap(-1, 64 << 20)  # and not malloc's, which may have as much lying ready
    held.write(b"x" * len(held))
    after = memory()
    assert after.rss - before.rss > 60 << 20
    assert after.uss - before.uss > 60 << 20
    assert after.pss == 0 or after.pss - before.pss > 60 << 20
    assert memory(os.getpid()).rss > len(held)
    held.close()


def test_memory_of_nobody() -> None:
    """A process that is not there is a ProcessLookupError with its id."""
    with pytest.raises(ProcessLookupError, match="no process 4194305"):
        memory((1 << 22) + 1)
