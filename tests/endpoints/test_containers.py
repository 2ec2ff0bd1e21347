"""Ends that cannot share memory: a container's, another user's. Messages come in frames, and one line says why."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import containers
import msgspec
import pytest
import secured
from children import PATIENCE, Child, in_thread, wait_until
from inside import side_of

import tensorpipe_ipc as tp
from tensorpipe_ipc.cli.doctor import attached
from tensorpipe_ipc.cli.doctor.finding import State
from tensorpipe_ipc.process import Identity, identity, is_alive

pytestmark = pytest.mark.limit(20)
SAID = {
    "no /proc": r"frames over tcp: /proc cannot be read at the producer",
    "read-only /dev/shm": r"shared memory",
    "other pids": r"frames over tcp: the other end is in another pid namespace \(\d+, \d+\)",
    "another clock": r"frames over tcp: the other end is in another time namespace",
    "hidden processes": rf"frames over tcp: the other end is another user's \(uid {os.geteuid()}, uid {containers.NOBODY}\)",
    "another user": rf"frames over tcp: the other end is another user's \(uid {os.geteuid()}, uid {containers.NOBODY}\)",
    "a long queue": r"frames over tcp: a maxsize of 6401 is more than 6400",
    "off": r"frames over tcp: it is off at the producer",
}


@pytest.mark.parametrize("way", [*containers.WAYS, "a long queue", "off"])
def test_what_is_in_the_way_is_told_on_both_ends_and_by_the_doctor(way: str) -> None:
    """A producer there: its messages arrive, in order, and all three say the same reason."""
    maxsize = 6401 if way == "a long queue" else 64
    with Child() as child, tp.Consumer("tcp://127.0.0.1:0", maxsize=maxsize) as consumer:
        child.begin(
            children.put_from_there,
            way,
            consumer.endpoint,
            maxsize=maxsize,
            shared_memory="off" if way == "off" else "auto",
        )
        assert consumer.get(PATIENCE) == 0
        said = consumer.statistics().transport
        assert re.fullmatch(SAID[way], said), said
        (found,) = [each for each in attached.findings(consumer.endpoint) if each.what == "  producer"]
        assert found.text.endswith(f": {said}")
        assert found.state is {"off": State.NOTE, "read-only /dev/shm": State.OK}.get(way, State.NO)
        assert [consumer.get(PATIENCE) for _ in range(9)] == list(range(1, 10))
        theirs = child.result()
        assert theirs.partition(":")[0] == said.partition(":")[0]
        assert (
            re.sub(r"\(.*|here|it is|shared memory| is off|at the \w+", "", theirs.partition(": ")[2]).strip() in said
        )


@pytest.mark.parametrize("way", [way for way in containers.WAYS if way != "read-only /dev/shm"])
def test_who_requires_shared_memory_refuses_them(way: str) -> None:
    """The reason is told to both."""
    with Child() as child, tp.Consumer("tcp://127.0.0.1:0", shared_memory="require") as consumer:
        child.begin(children.put_from_there, way, consumer.endpoint, linger=0.0)
        with pytest.raises(tp.Empty):
            consumer.get(1)
        reason = SAID[way].partition(": ")[2]
        assert re.search(reason, consumer.statistics().last_rejection)
        assert re.search(f"Refused: .*the consumer requires shared memory, but {reason}", child.result())


@pytest.mark.parametrize("way", [way for way in containers.WAYS if way in ("hidden processes", "another clock")])
def test_who_cannot_be_seen_is_not_taken_for_dead(way: str) -> None:
    """This process, from there; and one that has ended, whose number nobody has, is dead all the same."""
    me = identity()
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitpid(ended, 0)

    def look() -> None:
        assert is_alive(me)
        assert is_alive(msgspec.structs.replace(identity()))
        assert way == "another clock" or not is_alive(msgspec.structs.replace(me, pid=ended))

    assert containers.run_there(way, look) == 0


@pytest.mark.parametrize("way", [way for way in containers.WAYS if way == "other pids"])
def test_a_number_that_the_kernel_gives_again_is_another_process(way: str) -> None:
    """In a pid namespace, where one may say which number is next: the first that had it stays dead."""

    def sleeper(wanted: int = 0) -> Identity:
        if wanted:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(wanted - 1))
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(writer, msgspec.json.encode(identity()))
            signal.pause()
        said: Identity = msgspec.json.decode(os.read(reader, 4096), type=Identity)
        assert said.pid == pid
        return said

    def end(process: Identity) -> None:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)

    def look() -> None:
        first = sleeper()
        assert is_alive(first)
        end(first)
        while (second := sleeper(first.pid)).started == first.started:  # within one tick of the kernel's
            end(second)
        assert second.pid == first.pid
        assert is_alive(second)
        assert not is_alive(first)
        end(second)

    assert containers.run_there(way, look) == 0


@pytest.mark.parametrize("way", [way for way in containers.WAYS if way == "other pids"])
@pytest.mark.parametrize("does", ["uses the end", "opens an end", "ends"])
def test_a_descendant_that_has_a_dead_ancestors_number_is_not_that_ancestor(way: str, does: str) -> None:
    """A process opens an end, forks and dies; a child of that child gets its number, and its copy of the end."""

    def act(producer: tp.Producer) -> None:
        assert identity().pid == os.getpid()
        assert is_alive(identity())
        if does == "uses the end":
            with pytest.raises(tp.Closed, match="of which this is a fork"):
                producer.put(1, 0)
        elif does == "opens an end":
            with tp.Consumer("afresh") as consumer, tp.Producer("afresh") as other:
                putting = in_thread(lambda: other.put("crosses", PATIENCE))
                assert consumer.get(PATIENCE) == "crosses"
                putting()
        else:
            atexit._run_exitfuncs()  # as a program that ends

    def fork(action: Callable[[], None]) -> int:
        pid = os.fork()
        if not pid:
            try:
                action()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return pid

    def look() -> None:
        told, tell = os.pipe()

        def first() -> None:
            producer = tp.Producer("inproc://inherited", bind=True)
            mine = os.getpid()

            def second() -> None:
                wait_until(lambda: not os.path.exists(f"/proc/{mine}"))  # its parent has seen that it is dead
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(mine - 1))
                third = fork(lambda: act(producer))
                status = os.waitpid(third, 0)[1]
                os.write(tell, f"{third == mine} {status}".encode())
                os._exit(0)

            fork(second)
            os._exit(0)

        os.waitpid(fork(first), 0)
        assert os.read(told, 100) == b"True 0"

    assert containers.run_there(way, look) == 0


@pytest.mark.parametrize("end", [tp.Consumer, tp.Producer] if containers.HAS_NETWORKS else [])
def test_a_connector_that_waits_leaves_the_port_to_its_binder(end: type[tp.Consumer | tp.Producer]) -> None:
    """A waiting connector leaves the port to its binder, though it soon connects to itself where ports are few."""

    def wait_and_meet() -> None:
        containers.pick_ports_from(40000, 40003)
        with end("tcp://127.0.0.1:40002", bind=False) as connector:
            connecting: Any = side_of(connector).socket
            has_ended, attempt = threading.Event(), _get if isinstance(connector, tp.Consumer) else _put

            def wait() -> None:
                while not has_ended.is_set():
                    with contextlib.suppress(tp.Empty, tp.Full):
                        attempt(connector)
                        return

            waiting = in_thread(wait)
            try:
                wait_until(lambda: connecting.self_connections > 1)
                others: list[tp.Consumer | tp.Producer] = []
                wait_until(lambda: _binds(end, others))
                with others[0] as other:
                    if isinstance(other, tp.Producer):
                        other.put(1, PATIENCE)
                    else:
                        assert other.get(PATIENCE) == 1
                    waiting()
            finally:
                has_ended.set()

    assert containers.run_there(containers.APART, wait_and_meet) == 0


def _get(consumer: Any) -> None:
    assert consumer.get(0.1) == 1


def _put(producer: Any) -> None:
    producer.put(1, 0.1)


def _binds(end: type[tp.Consumer | tp.Producer], others: list[tp.Consumer | tp.Producer]) -> bool:
    """Return whether the other end could be bound. It cannot while the connector is connected to itself."""
    other = tp.Producer if end is tp.Consumer else tp.Consumer
    with contextlib.suppress(tp.Refused):
        others.append(other("tcp://127.0.0.1:40002", bind=True))
    return bool(others)


@pytest.mark.parametrize("mode", [0o700, 0o1777] if containers.HAS_SMALL else [], ids=oct)
def test_a_folder_that_containers_see_at_other_places(tmp_path: Path, mode: int) -> None:
    """Also one that other users may write to: the kernel tells who listens there, if not by which name."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        folder.chmod(mode)

    def put() -> None:
        with tp.Producer(f"ipc://{there}/end.sock") as producer:
            producer.put(1, PATIENCE)

    with tp.Consumer(f"ipc://{here}/end.sock") as consumer:
        getting = in_thread(lambda: consumer.get(2 * PATIENCE))
        assert containers.run_there(lambda: containers.see_folder_elsewhere(str(here), str(there)), put) == 0
        assert getting() == 1
        assert consumer.statistics().transport == "shared memory"


def test_a_socket_file_that_was_given_another_name(tmp_path: Path) -> None:
    """As by a container that mounts the file alone. It is this user's socket still, also where others may put one."""
    tmp_path.chmod(0o1777)
    with tp.Consumer(f"ipc://{tmp_path}/bound.sock") as consumer:
        os.rename(tmp_path / "bound.sock", tmp_path / "other.sock")
        with tp.Producer(f"ipc://{tmp_path}/other.sock") as producer:
            putting = in_thread(lambda: producer.put(1, PATIENCE))
            assert consumer.get(PATIENCE) == 1
            putting()
    (tmp_path / "other.sock").unlink()


def test_a_binder_whose_descriptors_are_closed_to_its_own_user(free_port: int) -> None:
    """The kernel does not let the connector open what it is offered: frames, and all three say so."""
    endpoint = f"tcp://127.0.0.1:{free_port}"
    with containers.folder_of_one_user(), Child() as binder, Child() as connector:
        binder.begin(children.take_there, containers.CLOSED, endpoint)
        theirs = connector.call(children.put_from_there, containers.OPEN, endpoint)
        ours, _, told = binder.result().partition("\n")
    assert re.fullmatch(r"frames over tcp: the descriptors of pid \d+ on \S+ cannot be opened: Permission denied", ours)
    assert theirs == ours
    assert told.endswith(f": {ours}")


def test_a_user_who_has_no_pipes_left(free_port: int) -> None:
    """Short pipes do for few messages. No queue for many can be made: frames, and all three say so."""
    for maxsize, way in ((64, ""), (6400, "frames over tcp: no pipe of 64 KiB is to be had (fs.pipe-user-pages-soft)")):
        with containers.folder_of_one_user(), Child() as child:
            said = child.call(
                children.both_there, containers.WITHOUT_PIPES, f"tcp://127.0.0.1:{free_port}", maxsize
            ).splitlines()
        reason = way or "shared memory"
        assert said[:2] == [reason, reason]
        assert said[2].endswith(f": {reason}")


@pytest.mark.parametrize("way", [way for way in containers.WAYS if way == "no /proc"])
def test_an_end_for_other_hosts_that_closes_tells_what_was_not_taken(way: str, tmp_path: Path) -> None:
    """Also where nothing tells whether its goodbye has arrived."""
    with Child() as child:
        said = child.call(secured.lose_there, way, str(secured.make_keys(tmp_path)))
        assert re.match(r"PeerLost: .* with 2 messages that it had not taken", said), said


def test_what_this_machine_lets_us_try() -> None:
    """A machine skips a way of isolation only if its kernel refuses it. The test prints the ways that it skips."""
    missing = set(SAID) - {"a long queue", "off"} - set(containers.WAYS)
    if missing:
        restricted = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
        no_namespaces = Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0"
        assert os.geteuid() or no_namespaces or restricted.exists() or not _has_all_capabilities(), missing
        print("not to be tried here:", *sorted(missing))


def _has_all_capabilities() -> bool:
    found = re.search(r"^CapEff:\s+(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> 21 & 1)  # CAP_SYS_ADMIN
