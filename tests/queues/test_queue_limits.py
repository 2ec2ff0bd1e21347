"""A Queue at its limits: descriptors, /dev/shm, memory, room, and processes that are stopped or killed."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import queue
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from children import wait_until
from crash_points import SIGNAL_CHECKS, Interrupt, die, in_child, raise_interrupt, reap, run_traced
from guard import others
from inside import set_lease_budget, shared_queue_of
from programs import ran, ran_in_fork, ran_with_small_dev_shm, started

from tensorpipe_ipc import Consumer, Producer, headroom
from tensorpipe_ipc.errors import Full, SharedMemoryError
from tensorpipe_ipc.memory.segment import CAPACITY, Segment
from tensorpipe_ipc.queues.context import get_context
from tensorpipe_ipc.queues.tensor_queue import Queue

LIMIT = 20  # seconds
MIB = 1 << 20
LARGE = torch.ones(MIB, dtype=torch.uint8)  # a block of 2 MiB: there is metadata, too
MARGIN = 1.0  # seconds that a busy machine may add to a timeout


def queue_of(capacity: int, maxsize: int = 0) -> Queue:
    """A queue whose arena may cost so many bytes, all of them under leases."""
    made = Queue(maxsize)
    inner = shared_queue_of(made)
    inner.arena.words[CAPACITY] = capacity
    set_lease_budget(inner.leases, 1 << 40)
    return made


@contextlib.contextmanager
def child(action: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """A forked process that calls ``ready``, which is waited for, and goes on until it is killed at the end."""
    told, tell = os.pipe()

    def run() -> None:
        action(lambda: (os.write(tell, b"x"), None)[1])

    pid = in_child(run)
    os.close(tell)
    try:
        assert os.read(told, 1) == b"x", "the child failed"
        yield pid
    finally:
        os.close(told)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        reap(pid)


def test_a_queue_has_no_more_places_when_who_gave_one_and_who_took_it_were_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The taker at the moment at which it had it, and is found dead first."""
    there = Queue(1)
    there.put(0)

    def dies_after(owner: object, name: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: (call(*arguments), die()))

    def give() -> None:
        dies_after(shared_queue_of(there).credits, "give")
        there.get()

    def take() -> None:
        shared_queue_of(there).attachment.attach()  # its row is before the other's
        assert reap(in_child(give)) == -signal.SIGKILL
        dies_after(shared_queue_of(there).credits, "take_nowait")
        there.put(1)

    assert reap(in_child(take)) == -signal.SIGKILL
    shared_queue_of(there).attachment.recover_dead()
    there.put(2, timeout=0)
    with pytest.raises(Full):
        there.put(3, timeout=0)
    assert there.get() == 2


def free_again(there: Queue, count: int) -> None:
    """So many large messages find room, in time."""
    for _ in range(count):
        there.put(LARGE, timeout=LIMIT)


# ---- descriptors, and what a machine forbids ----

FEW_DESCRIPTORS = """
import os, resource, torch
from tensorpipe_ipc.queues.tensor_queue import Queue
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
queue, large = Queue(), torch.ones(40_000, dtype=torch.uint8)
def used():
    with open("/proc/self/maps") as lines:
        return len(os.listdir("/proc/self/fd")), len(lines.readlines())
queue.put(large)
queue.get(timeout=10)  # the first lease costs a descriptor
before = used()
small, held = torch.arange(10), []
for _ in range(10):
    for _ in range(10_000):
        queue.put(small)
    held += [queue.get(timeout=10) for _ in range(10_000)]
for _ in range(3000):
    queue.put(large)
    held.append(queue.get(timeout=10))
leases = len(queue._queue.leases.live)
after = used()
assert all(int(tensor.sum()) == 45 for tensor in held[:100_000]) and all(int(t.sum()) == 40_000 for t in held[100_000:])
print(len(held), leases, after[0] - before[0], after[1] - before[1] < 50)
"""


@pytest.mark.kills
def test_100_000_tensors_and_3_000_leases_are_held_with_64_descriptors(tmp_path: Path) -> None:
    """Tensors and leases that a process holds cost no descriptor and no mapping."""
    done = ran_in_fork("-c", FEW_DESCRIPTORS, folder=tmp_path)
    assert (done.status, done.out) == (0, "103000 3000 0 True\n"), done.err


TINY_SHM = """
import os, torch
from tensorpipe_ipc.queues.tensor_queue import Queue
room = os.statvfs("/dev/shm")
queue = Queue()
queue.put(torch.ones(100 << 20, dtype=torch.uint8))
print(room.f_blocks * room.f_frsize, int(queue.get(timeout=10).sum()), os.listdir("/dev/shm"))
"""


MANY_QUEUES = """
import os, resource, torch
from tensorpipe_ipc.queues.tensor_queue import Queue
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
def descriptors():
    return len(os.listdir("/proc/self/fd"))
first = Queue()  # which brings the arena
first.put(0)
before, queues = descriptors(), []
for maxsize in (0, 10, 6400):
    queue = Queue(maxsize)
    queue.put(torch.ones(3))
    queues.append(queue)
    assert queue.get(timeout=0.01).sum() == 3
    assert descriptors() <= before + 4 * len(queues), (maxsize, descriptors() - before)
queues += [Queue(number % 2) for number in range(150)]
assert descriptors() <= before + 4 * len(queues)
for number, queue in enumerate(queues):
    queue.put(number)
assert [queue.get() for queue in queues] == list(range(len(queues)))
del queue, queues
assert descriptors() <= before
print("few enough")
"""


def test_a_queue_costs_at_most_4_descriptors_so_150_fit_into_a_process(tmp_path: Path) -> None:
    """multiprocessing's costs 2; a limit of 1,024 is what a process usually has."""
    done = ran_in_fork("-c", MANY_QUEUES, folder=tmp_path)
    assert (done.status, done.out) == (0, "few enough\n"), done.err


SMALL_PIPES = """
import ctypes, fcntl, os, resource
from tensorpipe_ipc.queues.tensor_queue import Queue
first = Queue(1)
first.put({1: 2})
first.get()
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
os.setresuid(65533, 65533, 65533)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self/fd is root's
pages = int(open("/proc/sys/fs/pipe-user-pages-soft").read())
pipes = [os.pipe() for _ in range(pages // 16)]
assert fcntl.fcntl(os.pipe()[1], 1032) < 1 << 16  # F_GETPIPE_SZ
for maxsize in (0, 1, 2, 449, 450, 2000):
    queue, count = Queue(maxsize), maxsize or 2000
    for several in (False, True, False):
        for start in range(0, count, 50) if several else ():
            queue.put_many(list(range(start, min(start + 50, count))), 0)
        for number in () if several else range(count):
            queue.put_nowait(number)
        assert queue.qsize() == count
        assert not maxsize or queue.full()
        assert [queue.get(timeout=10) for _ in range(count)] == list(range(count))
print("nobody waited")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="another user's budget of pipes is used up, which takes root")
def test_a_user_who_has_used_up_his_pipes_waits_for_nothing(tmp_path: Path) -> None:
    """The kernel gives him pipes of one or two pages: what they cannot hold at once lies beside them."""
    done = ran_in_fork("-c", SMALL_PIPES, folder=tmp_path)
    assert (done.status, done.out) == (0, "nobody waited\n"), done.err


@pytest.mark.slow
def test_100_mib_cross_where_dev_shm_has_64_kib(tmp_path: Path) -> None:
    """A container's small /dev/shm does not matter: nothing is put there."""
    done = ran_with_small_dev_shm(TINY_SHM, tmp_path)
    assert (done.status, done.out) == (0, f"{64 << 10} {100 << 20} []\n"), done.err


# ---- room ----


def test_a_full_arena_makes_put_wait_and_then_names_who_holds_what() -> None:
    """Full says which process holds how many bytes, and whether it lives; with a lease let go there is room."""
    there = queue_of(8 * MIB)

    def hold(ready: Callable[[], None]) -> None:
        inner = shared_queue_of(there)
        inner.attachment.attach()
        set_lease_budget(inner.leases, 1 << 40)
        held = [there.get(timeout=LIMIT) for _ in range(3)]
        ready()
        signal.pause()
        del held

    for _ in range(3):
        there.put(LARGE)
    with child(hold) as pid:
        there.put(LARGE)  # nothing was in flight: one may always be placed
        with contextlib.suppress(Full):
            for _ in range(8):
                there.put(LARGE, timeout=0)
        with pytest.raises(Full) as full:
            there.put(LARGE, timeout=0.01)
        assert f"at most {8 * MIB} bytes" in str(full.value)
        held = re.search(rf"pid {pid} \(alive\) has 3 blocks with (\d+) bytes", str(full.value))
        assert held, str(full.value)
        assert 3 * MIB <= int(held[1]) <= 3 * MIB + 1000
    free_again(there, 3)  # it was killed: its blocks are back


def test_a_put_that_does_not_wait_for_a_place_looks_for_no_holders_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that want the newest message put in a loop, beside memory that is full of others."""
    ctx = get_context("fork")
    there = ctx.Queue(1)
    there.put(LARGE)
    looks, arena = list[int](), ctx.tensorpipe_attachment().arena
    all_extents = arena.all_extents
    monkeypatch.setattr(arena, "all_extents", lambda: looks.append(1) or all_extents())
    with pytest.raises(Full, match=r"maxsize 1, 1 waiting\) has no free place$"):
        there.put_nowait(LARGE)
    assert not looks
    with pytest.raises(Full, match=rf"has no free place; .*pid {os.getpid()} \(alive\) has 1 blocks"):
        there.put(LARGE, timeout=0.01)


def test_a_message_larger_than_the_capacity_says_so_at_once() -> None:
    """No waiting for what can never be, not even without a timeout, and the bounded queue keeps its places."""
    there = queue_of(8 * MIB, maxsize=1)
    for _ in range(3):
        with pytest.raises(SharedMemoryError, match=rf"a message of \d+ bytes can never fit.*{8 * MIB}"):
            there.put(torch.ones(9 * MIB, dtype=torch.uint8))
    there.put("fits", timeout=0)
    assert there.get(timeout=0) == "fits"


@pytest.mark.kills
def test_100_000_puts_before_anybody_gets_do_not_block_and_come_in_order() -> None:
    """An unbounded queue is one: far more than the pipe holds, for a consumer that starts later."""
    there, count = Queue(), int(os.environ.get("TENSORPIPE_IPC_PUTS", "100000"))
    for number in range(count):
        there.put(number, timeout=0)
    assert there.qsize() == count

    def take(ready: Callable[[], None]) -> None:
        for number in range(count):
            assert there.get(timeout=LIMIT) == number
        ready()
        signal.pause()

    with child(take):
        assert there.empty()


_WITHOUT_PIPES = """
import contextlib, fcntl, os, signal, time
from queue import Empty
import torch
from tensorpipe_ipc import JoinableQueue, Queue

os.setgroups([]); os.setgid(54321); os.setuid(54321)  # root has no such budget
queue, joined = Queue(1), JoinableQueue()
joined.put(1)
joined.get()
joined.put(2)
pipes = []
with contextlib.suppress(PermissionError):
    while len(pipes) < 400:
        pipes += os.pipe()
        fcntl.fcntl(pipes[-1], 1031, 1 << 20)  # F_SETPIPE_SZ
while fcntl.fcntl(pipes[-1], 1032) > 8192:
    pipes += os.pipe()
large = torch.ones(32 << 20)
for after in range(20):  # milliseconds: at some of them it has a place, and reads the tensor's bytes
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        if not after:
            joined.get()
        os.write(tell, b"x")
        queue.put(large)
        signal.pause()
    os.read(told, 1)
    time.sleep(after / 1000)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(told), os.close(tell)
    with contextlib.suppress(Empty):
        queue.get_nowait()
queue.put("after", timeout=5)
print(queue.get(timeout=5))
joined.task_done()
joined.join()
print("joined")
"""


@pytest.mark.limit(40)
@pytest.mark.skipif(os.getuid() != 0, reason="another user's budget of pipes is used up, which takes root")
def test_what_a_killed_process_had_comes_back_where_a_users_budget_of_pipes_is_used_up(tmp_path: Path) -> None:
    """A new pipe is small then, and what waits in a queue's is still to be seen."""
    done = ran_in_fork("-c", _WITHOUT_PIPES, folder=tmp_path)
    assert (done.status, done.out) == (0, "after\njoined\n"), done.err


# ---- memory that a cgroup leaves ----


@pytest.fixture
def fake_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that say of the machine what /proc does."""
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(headroom, "PROC", str(tmp_path / "proc"))
    return tmp_path / "proc"


@pytest.fixture
def fake_cgroup(tmp_path: Path, fake_proc: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Two cgroups, one in the other, in files; set limit and usage of the outer one, beside the 2 MiB that are left alone."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)

    def set_outer(limit: int, usage: int) -> None:
        (tmp_path / "outer" / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "outer" / "memory.current").write_text(f"{usage - 2 * MIB}\n")

    for limit in ("memory.max", "memory.high"):
        (inner / limit).write_text("max\n")
    (tmp_path / "outer" / "memory.high").write_text("max\n")
    (inner / "memory.current").write_text("4096\n")
    set_outer(1 << 40, 0)
    (fake_proc / "self").mkdir()
    (fake_proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    monkeypatch.setattr(headroom, "ROOT", str(tmp_path))
    files = tuple(headroom._limits())
    assert len(files) == 4
    monkeypatch.setattr(headroom, "_files", lambda process: files)
    return set_outer


def test_growth_near_a_cgroups_limit_is_refused_with_sizes(fake_cgroup: Callable[[int, int], None]) -> None:
    """The kernel would kill, not refuse: so the limit of every cgroup above is looked at before memory grows."""
    there = Queue()
    there.put("something")
    fake_cgroup(100 * MIB, 99 * MIB)
    with pytest.raises(Full, match=rf"finds no 20972\d\d bytes free.*the machine leaves {MIB}"):
        there.put(torch.ones(2 * MIB, dtype=torch.uint8), timeout=0.01)
    fake_cgroup(100 * MIB, 50 * MIB)
    there.put(torch.ones(2 * MIB, dtype=torch.uint8), timeout=0)


def test_an_empty_queue_does_not_grow_beyond_a_cgroups_limit_either(fake_cgroup: Callable[[int, int], None]) -> None:
    """One message may always be placed beyond the arena's capacity, but not beyond what the machine has."""
    there = Queue()
    fake_cgroup(100 * MIB, 99 * MIB)
    for timeout in (0, None):  # nothing that anybody holds could come free: it does not wait
        with pytest.raises(SharedMemoryError, match=rf"finds no 20972\d\d .*the machine leaves {MIB}"):
            there.put(torch.ones(2 * MIB, dtype=torch.uint8), timeout=timeout)
    there.put(1, timeout=0)
    assert there.get(timeout=0) == 1


@pytest.mark.parametrize("pages", range(0, 64, 3))
def test_memory_that_is_nearly_enough_is_not_waited_for(pages: int, fake_cgroup: Callable[[int, int], None]) -> None:
    """Nobody holds any: a put that cannot be served says so, and does not wait for what never comes."""
    there = Queue()
    there.put("something")
    there.get()
    fake_cgroup(100 * MIB, 98 * MIB - 4096 * pages)
    began = time.monotonic()
    with contextlib.suppress(SharedMemoryError):
        there.put(torch.ones(2 * MIB, dtype=torch.uint8), timeout=LIMIT)
    assert time.monotonic() < began + LIMIT / 2


def test_memory_that_others_had_just_while_a_put_looked_is_waited_for(
    fake_cgroup: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody holds any before the look, nor after it: others put and get in between, again and again."""
    there, turns = Queue(), iter(range(3))
    fake_cgroup(100 * MIB, 50 * MIB)
    there.put("something")
    there.get()
    attachment = shared_queue_of(there).attachment
    make_room, is_in_use = attachment.make_room, attachment.arena.is_in_use

    def take_and_make_room(nbytes: int) -> None:
        if next(turns, None) is not None:
            fake_cgroup(100 * MIB, 99 * MIB)
        make_room(nbytes)

    def give_back_and_tell() -> bool:
        fake_cgroup(100 * MIB, 50 * MIB)
        return is_in_use()

    monkeypatch.setattr(attachment, "make_room", take_and_make_room)
    monkeypatch.setattr(attachment.arena, "is_in_use", give_back_and_tell)
    fake_cgroup(100 * MIB, 99 * MIB)
    there.put(torch.ones(2 * MIB, dtype=torch.uint8), timeout=LIMIT)
    assert next(turns, None) is None


@pytest.mark.parametrize("waiting", [0, 1])
def test_what_another_process_is_about_to_use_is_not_taken(
    waiting: int, fake_cgroup: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that grow at once would have found the same room. The other is stopped before it has the first of its pages."""
    there, other, large = Queue(), Queue(), torch.ones(30 * MIB, dtype=torch.uint8)
    for _ in range(waiting):
        there.put("something")
    fake_cgroup(100 * MIB, 50 * MIB)

    def grow(ready: Callable[[], None]) -> None:
        reserve = Segment.reserve

        def stop(segment: Segment, start: int, end: int) -> bool:
            if start - end > -MIB:
                return reserve(segment, start, end)
            ready()
            os.kill(os.getpid(), signal.SIGSTOP)
            return False

        monkeypatch.setattr(Segment, "reserve", stop)
        other.put(large)

    with child(grow), pytest.raises((Full, SharedMemoryError), match="finds no"):
        there.put(large, timeout=0)
    there.put(large, timeout=LIMIT)


def test_growth_beyond_what_a_cgroup_is_slowed_at_is_refused(
    fake_cgroup: Callable[[int, int], None], tmp_path: Path
) -> None:
    """Beyond ``memory.high`` the kernel kills nobody, but each call that gets memory takes up to seconds."""
    there = Queue()
    fake_cgroup(1 << 40, 99 * MIB)
    (tmp_path / "outer" / "memory.high").write_text(f"{100 * MIB}\n")
    with pytest.raises(SharedMemoryError, match=f"the machine leaves {MIB}"):
        there.put(torch.ones(2 * MIB, dtype=torch.uint8), timeout=0)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_growth_beyond_what_the_kernel_commits_is_refused(fake_proc: Path, mode: int) -> None:
    """With ``vm.overcommit_memory=2`` it is a SIGBUS, however much is available."""
    there = Queue()
    (fake_proc / "sys" / "vm").mkdir(parents=True)
    for name, number in (("overcommit_memory", mode), ("admin_reserve_kbytes", 8192), ("user_reserve_kbytes", 131072)):
        (fake_proc / "sys" / "vm" / name).write_text(f"{number}\n")
    (fake_proc / "meminfo").write_text(
        f"MemAvailable: {1 << 20} kB\nCommitLimit: {200 << 10} kB\nCommitted_AS: {63 << 10} kB\n"
    )
    if mode < 2:
        there.put(torch.ones(2 * MIB, dtype=torch.uint8), timeout=0)
    else:
        with pytest.raises(SharedMemoryError, match=f"the machine leaves {MIB}"):
            there.put(torch.ones(2 * MIB, dtype=torch.uint8), timeout=0)


def test_files_that_were_read_leave_room(fake_cgroup: Callable[[int, int], None], tmp_path: Path) -> None:
    """A cgroup's usage counts what files left in memory, too. The kernel takes that back before it kills."""
    there, size = Queue(), 20 * MIB
    fake_cgroup(100 * MIB, 99 * MIB)
    statistics = tmp_path / "outer" / "memory.stat"
    of_version_1 = "inactive_file {}\ntotal_inactive_file {}\ntotal_active_file {}\n"
    statistics.write_text(of_version_1.format(size, 0, 0))  # what stands without "total_" is not of the cgroups below
    with pytest.raises(SharedMemoryError, match=f"the machine leaves {MIB}"):
        there.put(torch.ones(30 * MIB, dtype=torch.uint8), timeout=0)
    for lines in (of_version_1.format(0, size, size), f"file 9\nactive_file {size}\ninactive_file {size}\n"):
        statistics.write_text(lines)
        there.put(torch.ones(30 * MIB, dtype=torch.uint8), timeout=0)


OUT_OF_MEMORY = """
import os, sys, torch
from tensorpipe_ipc.errors import Full, SharedMemoryError
from tensorpipe_ipc.queues.tensor_queue import Queue
queue = Queue()
with open(sys.argv[1], "wb") as file:  # as much as the cgroup may have: its limit is reached from here on
    for _ in range(600):
        file.write(bytes(1 << 20))
    file.flush()
    os.fsync(file.fileno())
refused = 0
for _ in range(100):
    try:
        queue.put(torch.ones(8 << 20, dtype=torch.uint8), timeout=0)
    except (Full, SharedMemoryError) as error:
        refused += 1
print("refused", refused > 0, queue.qsize())
"""


@pytest.mark.kills
def test_a_real_cgroup_does_not_kill(tmp_path: Path) -> None:
    """A program in a cgroup of 512 MiB that puts 800 MiB nobody takes is refused, and lives; though it read files before."""
    for group in _cgroups(512 * MIB):
        try:
            enter = f"open('{group}/cgroup.procs', 'w').write('0')\n"
            done = ran("-c", enter + OUT_OF_MEMORY, str(tmp_path / "file"))
            assert done.status == 0, done.err
            assert re.fullmatch(r"refused True [23]\d\n", done.out), done.out  # half of what there was at first
        finally:
            _remove(group)
        return
    print("no memory cgroup may be made here: the tests before this one show it on files")


KEPT_COPIES = """
import multiprocessing, torch
from tensorpipe_ipc.errors import OutOfMemory
from tensorpipe_ipc.queues.tensor_queue import Queue
torch.set_num_threads(1)
queue, kept = Queue(), []
def feed():
    while True:
        queue.put(torch.ones(250_000))
feeder = multiprocessing.get_context("fork").Process(target=feed, daemon=True)
feeder.start()
try:
    while True:
        kept.append(queue.get(timeout=20, copy=True))
except OutOfMemory:
    print("refused")
finally:
    feeder.kill()
"""


@pytest.mark.kills
def test_copies_of_1_mb_do_not_have_a_real_cgroup_kill_either() -> None:
    """Another process puts meanwhile: both look at what is left, the more often the less that is."""
    for group in _cgroups(256 * MIB):
        try:
            done = ran("-c", f"open('{group}/cgroup.procs', 'w').write('0')\n" + KEPT_COPIES)
            assert (done.status, done.out) == (0, "refused\n"), done.err
        finally:
            _remove(group)
        return
    print("no memory cgroup may be made here: the tests before this one show it on files")


def _remove(group: Path) -> None:
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def _cgroups(limit: int) -> Iterator[Path]:
    """A memory cgroup under ours, of version 1 or 2, with a limit; none, where none may be made."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for controller, root, file in (
        ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("", "/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(root + groups.get(controller, "/nowhere")) / f"tensorpipe-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / file).write_text(str(limit))
            except OSError:
                group.rmdir()
                raise
            yield group


# ---- the stopped and the killed ----


def test_a_stopped_consumer_costs_bounded_memory_and_put_keeps_its_timeout() -> None:
    """Full comes at the timeout, nothing grows, and when the consumer goes on it gets everything."""
    there, back = Queue(4), Queue()

    def take(ready: Callable[[], None]) -> None:
        ready()
        while True:
            back.put(int(there.get()[0]))

    with child(take) as pid:
        there.put(torch.full((MIB,), 1))
        assert back.get(timeout=LIMIT) == 1
        os.kill(pid, signal.SIGSTOP)
        while not re.search(r"\) T ", Path(f"/proc/{pid}/stat").read_text()):
            pass
        for number in range(4):
            there.put(torch.full((MIB,), number), timeout=LIMIT)
        resident = shared_queue_of(there).arena.segment.resident()
        for _ in range(20):
            began = time.monotonic()
            with pytest.raises(Full):
                there.put(torch.full((MIB,), 5), timeout=0.05)
            assert 0.05 <= time.monotonic() - began < 0.1 + MARGIN
        assert shared_queue_of(there).arena.segment.resident() < resident + (64 << 10)  # not by one of the messages
        os.kill(pid, signal.SIGCONT)
        assert [back.get(timeout=LIMIT) for _ in range(4)] == list(range(4))


def test_a_lease_outlives_its_killed_producer() -> None:
    """A tensor keeps its bytes though its producer is dead, its row adopted and its memory used by others."""
    there = Queue()

    def produce(ready: Callable[[], None]) -> None:
        there.put(LARGE)
        ready()
        signal.pause()

    with child(produce):
        tensor = there.get(timeout=LIMIT)
    zeros = torch.zeros_like(LARGE)

    def others(ready: Callable[[], None]) -> None:
        for _ in range(20):
            there.put(zeros)
            there.get()
        ready()
        signal.pause()

    with child(others):
        shared_queue_of(there).attachment.recover_dead(adopt_extents=True)
    assert bool((tensor == 1).all())


@pytest.mark.kills
def test_survivors_descriptors_and_mappings_do_not_grow_with_the_dead() -> None:
    """30 processes come, put, get and are killed: the survivor holds what it held after the first."""

    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:tensorpipe")

    there = Queue(3)

    def work(ready: Callable[[], None]) -> None:
        there.put(LARGE, timeout=LIMIT)
        got = there.get(timeout=LIMIT)
        ready()
        signal.pause()
        del got

    after = []
    for _ in range(30):
        with child(work):
            there.put(1, timeout=LIMIT)
            assert there.get(timeout=LIMIT) == 1
        after.append(held())
    assert set(after) == {after[0]}
    assert len(shared_queue_of(there).rows.used()) <= 3


ALL_DIE = """
import os, signal, time, torch
from tensorpipe_ipc.queues.tensor_queue import Queue
torch.set_num_threads(1)
queue = Queue()
for _ in range(3):
    if os.fork() == 0:
        break
for _ in range(100):
    queue.put(torch.ones(1 << 20, dtype=torch.uint8))
os.write(1, b"ready\\n")
signal.pause()
"""


@pytest.mark.kills
def test_when_all_are_killed_nothing_is_left() -> None:
    """kill -9 of every process at once: /dev/shm is as it was, and the shared memory is the machine's again."""

    def shared() -> int:
        found = re.search(r"Shmem: +(\d+) kB", Path("/proc/meminfo").read_text())
        assert found
        return int(found[1]) << 10

    def entries() -> set[str]:  # that torch or multiprocessing make; other programs on this machine have others
        names = set(os.listdir("/dev/shm"))
        return names - others(names)

    before, there = shared(), entries()
    with started("-c", ALL_DIE) as program:
        assert program.stdout
        for _ in range(4):
            assert program.stdout.readline() == "ready\n"
        assert shared() - before > 300 * MIB
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        deadline = time.monotonic() + LIMIT
        while shared() - before > 100 * MIB:  # other programs on this machine may have some
            assert time.monotonic() < deadline, "the shared memory is not given back"
        assert entries() <= there


def by_queue(number: int) -> torch.Tensor:
    there = Queue()
    reap(in_child(lambda: there.put(result_of(number))))
    return there.get(timeout=LIMIT)


def by_pool(number: int) -> torch.Tensor:
    with get_context("fork").Pool(1) as pool:
        return pool.apply(result_of, (number,))


def by_ends(number: int) -> torch.Tensor:
    name = f"jobs-{os.getpid()}-{number}"
    with Consumer(name) as consumer:
        pid = in_child(lambda: send(name, number))
        got = consumer.get(timeout=LIMIT)
        reap(pid)
    return got


def send(name: str, number: int) -> None:
    with Producer(name) as producer:
        producer.put(result_of(number), timeout=LIMIT)


def result_of(number: int) -> torch.Tensor:
    return torch.full((30_000,), float(number))  # so few that torch starts no thread, which a fork would lack


def arenas_and_descriptors() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text()
    return maps.count("/memfd:tensorpipe_ipc"), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("job", [by_queue, by_pool, by_ends])
def test_results_kept_of_many_jobs_that_made_a_queue_each_lie_in_one_arena(job: Callable[[int], torch.Tensor]) -> None:
    """Each arena takes up to 1 TiB of addresses, of the 128 that a process has, and three descriptors."""
    before = arenas_and_descriptors()
    results = [job(0), job(1)]
    after = arenas_and_descriptors()
    results += [job(number) for number in range(2, 6)]
    assert arenas_and_descriptors() == after
    assert after[0] - before[0] <= 1
    assert [float(result[-1]) for result in results] == [0, 1, 2, 3, 4, 5]
    del results
    assert arenas_and_descriptors() == before


def test_what_is_dropped_after_a_fork_leaves_no_arena_to_the_garbage_collection() -> None:
    before = arenas_and_descriptors()
    gc.disable()
    try:
        kept = [by_queue(0), by_queue(1)]  # the second one forks while the first is leased
        del kept
        assert arenas_and_descriptors() == before
    finally:
        gc.enable()


def got_again(point: int) -> list[torch.Tensor] | None:
    """Return all that a get makes, and a second one after an exception at a point of it; None: it has no such point."""
    there, got = Queue(), list[torch.Tensor]()
    there.put(result_of(7))
    get = functools.partial(there.get, timeout=LIMIT, copy=False)
    try:
        run_traced(lambda: got.append(get()), point, raise_interrupt, SIGNAL_CHECKS, before=False)
    except Interrupt:
        with contextlib.suppress(queue.Empty):  # the exception came when the message was made
            got.append(there.get(block=False, copy=False))  # the traceback still has what the first one leased
        return got
    return None


@pytest.mark.slow
def test_what_is_got_again_after_a_handlers_exception_keeps_its_arena_wherever_that_came() -> None:
    """Else another process takes its row for a dead one's, and frees what the tensor lies on."""
    before, kept = arenas_and_descriptors()[0], 0
    handler = signal.signal(signal.SIGUSR2, raise_interrupt)  # by which the package knows that no message is at fault
    try:
        for point in itertools.count(1):
            got = got_again(point)
            if got is None:
                break
            gc.collect()  # the exception had cycles
            following = Queue()
            assert arenas_and_descriptors()[0] - before == 1, point
            assert [float(tensor[-1]) for tensor in got] == [7] * len(got)
            kept += len(got)
            del following, got  # the next is the first lease again
    finally:
        signal.signal(signal.SIGUSR2, handler)
    assert kept > 30


def test_memory_of_a_context_that_finds_its_arena_again_is_used_again() -> None:
    """A tensor that outlived the context before is no reason to give back each page as soon as it is free."""
    before = get_context("fork").Queue()
    before.put(torch.full((4 * MIB,), 7, dtype=torch.uint8))
    kept = before.get(timeout=LIMIT)
    del before
    ctx = get_context("fork")
    segment = ctx.tensorpipe_attachment().arena.segment
    tensor = ctx.empty(4 * MIB, dtype=torch.uint8).fill_(1)
    del tensor
    assert segment.resident() > 8 * MIB
    assert kept[0] == 7
