"""A queue through shared memory: order, bounds, timeouts, leases, signals, forks, and random kills."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import multiprocessing
import os
import random
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_points import (
    LIMIT,
    PACKAGE,
    Interrupt,
    in_child,
    interrupted_at,
    interrupted_in_jump,
    reap,
)
from inside import finish_early_get, log_of, open_queue_of, set_lease_budget
from wholeness import check_whole

from tensorpipe_ipc.errors import Empty, Full, SharedMemoryError
from tensorpipe_ipc.memory.arena import Arena
from tensorpipe_ipc.memory.row import GET
from tensorpipe_ipc.memory.segment import Segment
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.get_end import GetEnd
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue

LARGE = 100_000
STEPS = 150  # more moments at which a handler may run than a put or a get has


def numbers(queue: Any, count: int) -> Any:
    return [int.from_bytes(queue.get(5).payload, "little") for _ in range(count)]


def number(payload: Any, value: Any) -> Any:
    return payload(value.to_bytes(8, "little"))


@pytest.mark.parametrize("maxsize", [0, 7, 10_000])
@pytest.mark.parametrize("size", [0, 1, 447, 448, 449, 4096, LARGE, 3 << 20])
def test_bytes_arrive_as_they_were_put(attachment: Attachment, payload: Any, maxsize: int, size: int) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    content = os.urandom(size)
    for metadata in (b"", b"m", b"m" * 65):
        queue.put(payload(content), metadata)
        message = queue.get(0)
        assert (message.metadata, bytes(message.payload)) == (metadata, content)


@pytest.mark.parametrize("maxsize", [1, 3, 5000, 9000])
def test_maxsize_is_exact(attachment: Attachment, payload: Any, maxsize: int) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    for i in range(maxsize):
        queue.put(number(payload, i), timeout=0)
    assert queue.qsize() == maxsize
    with pytest.raises(Full, match=f"maxsize {maxsize}, {maxsize} waiting"):
        queue.put(number(payload, 0), timeout=0)
    assert numbers(queue, maxsize) == list(range(maxsize))
    with pytest.raises(Empty):
        queue.get(0)


@pytest.mark.slow
def test_an_unbounded_queue_takes_more_than_its_pipe_holds_and_keeps_the_order(
    attachment: Attachment, payload: Any
) -> None:
    queue = SharedMemoryQueue.create(attachment)
    for i in range(20_000):
        queue.put(number(payload, i), timeout=0)
    assert queue.tickets.spilled() > 10_000
    assert numbers(queue, 10_000) == list(range(10_000))
    for i in range(20_000, 20_100):
        queue.put(number(payload, i), timeout=0)  # behind those that are spilled
    assert numbers(queue, 10_100) == list(range(10_000, 20_100))
    for i in range(4):  # each put looks at some thousands of those that were spilled
        queue.put(number(payload, i), timeout=0)
        spilled = queue.tickets.spilled()
        assert numbers(queue, 1) == [i]
    assert not spilled  # through the pipe again


@pytest.mark.parametrize("size", [1, 64])
def test_what_came_early_out_of_the_log_is_not_overtaken_by_what_is_behind_it_there(
    attachment: Attachment, payload: Any, size: int
) -> None:
    """A taker that was stopped between its two looks keeps the token; by then others may have emptied the pipe."""
    queue = SharedMemoryQueue.create(attachment)
    count = 9000
    for i in range(count):
        queue.put(number(payload, i), timeout=0)
    piped = count - queue.tickets.spilled()
    assert numbers(queue, piped) == list(range(piped))  # by others: this one believes the pipe to be full of them
    operation = open_queue_of(queue).operation(GET, size)
    assert os.readv(log_of(queue.tickets), operation.ticket_buffers) == 8 * size
    finish_early_get(queue, operation, 500)
    assert numbers(queue, count - piped) == list(range(piped, count))


@pytest.mark.parametrize("end", ["put", "get"])
def test_a_timeout_is_kept_to_50_ms(attachment: Attachment, payload: Any, end: Any) -> None:
    queue = SharedMemoryQueue.create(attachment, 1)
    if end == "put":
        queue.put(payload(b""))
    began = time.monotonic()
    with pytest.raises(Full if end == "put" else Empty):
        queue.put(payload(b""), timeout=0.2) if end == "put" else queue.get(0.2)
    assert time.monotonic() - began >= 0.2  # that it is not much later is for the bench to say


def test_a_lease_lies_in_shared_memory_until_the_last_array_on_it_dies(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment, 1)
    queue.put(payload(b"a" * LARGE))
    message = queue.get(0)
    part = message.payload[10:20]
    for i in range(5):
        queue.put(payload(bytes([i]) * LARGE))
        queue.get(0)
    assert bytes(part) == b"a" * 10
    assert attachment.leases.live
    del message, part
    gc.collect()
    assert not attachment.leases.live


def test_a_small_message_is_the_receivers_own(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment)
    queue.put(payload(b"a" * 400))
    message = queue.get(0)
    assert type(message.payload) is bytearray
    assert not attachment.leases.live


def test_a_full_arena_gives_full_with_sizes_and_holders_and_goes_on_when_a_lease_ends(payload: Any) -> None:
    attachment = Attachment(Arena(Segment.create(1 << 30), capacity=8 << 20))
    set_lease_budget(attachment.leases, 64 << 20)  # or it would give copies
    queue, other = (SharedMemoryQueue.create(attachment) for _ in range(2))
    with pytest.raises(SharedMemoryError, match="never fit"):
        queue.put(payload(bytes(9 << 20)))
    held = []
    for _ in range(3):
        queue.put(payload(bytes(1 << 20)), timeout=0)
        held.append(queue.get(0))
    for _ in range(4):
        queue.put(payload(bytes(1 << 20)), timeout=0)
    with pytest.raises(
        Full, match=rf"at most {8 << 20} bytes, and the machine leaves \d+; pid {os.getpid()} \(alive\) has \d+ blocks"
    ):
        queue.put(payload(bytes(1 << 20)), timeout=0)
    other.put(payload(bytes(1 << 20)), timeout=0)  # nothing in flight there: one may always be placed
    held.clear()
    queue.put(payload(bytes(1 << 20)), timeout=0)


def test_beyond_the_budget_messages_are_copied(payload: Any) -> None:
    attachment = Attachment(Arena(Segment.create(1 << 30), capacity=64 << 20))
    set_lease_budget(attachment.leases, 3 * (LARGE + 4096))
    queue = SharedMemoryQueue.create(attachment)
    held = []
    for i in range(10):
        queue.put(payload(bytes([i]) * LARGE))
        held.append(queue.get(0))
    assert len(attachment.leases.live) == 3
    assert [bytes(message.payload[:1]) for message in held] == [bytes([i]) for i in range(10)]


def test_a_closed_queue_has_no_descriptors(attachment: Attachment, payload: Any) -> None:
    before = os.listdir("/proc/self/fd")
    for maxsize in (0, 3):
        queue = SharedMemoryQueue.create(attachment, maxsize)
        queue.put(payload(b""))
        queue.get(1)
        queue.close()
        queue.close()
    assert os.listdir("/proc/self/fd") == before
    assert not attachment.queues


# ---- processes ----


def echo(source: Any, target: Any) -> None:
    for _ in range(20):
        message = source.get(LIMIT)
        target.put(Copied(bytes(message.payload)), message.metadata, timeout=LIMIT)


class Copied:
    def __init__(self, content: Any) -> None:
        self.content, self.nbytes = content, len(content)

    def write_into(self, place: Any) -> None:
        place[:] = self.content


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.kills)])
def test_a_queue_is_inherited_by_fork_and_passed_while_spawning(
    attachment: Attachment, payload: Any, method: str
) -> None:
    source, target = (SharedMemoryQueue.create(attachment, maxsize) for maxsize in (0, 2))
    process = multiprocessing.get_context(method).Process(target=echo, args=(source, target))
    process.start()
    for i in range(20):
        source.put(payload(bytes([i]) * (400 if i % 2 else LARGE)), b"m")
        assert bytes(target.get(LIMIT).payload[:1]) == bytes([i])
    process.join(LIMIT)
    assert process.exitcode == 0
    process.close()


def test_a_queue_is_pickled_only_while_spawning(attachment: Attachment) -> None:
    import pickle

    queue = SharedMemoryQueue.create(attachment)
    with pytest.raises(RuntimeError, match="should only be shared between processes through inheritance"):
        pickle.dumps(queue)


def test_a_producer_waits_for_a_place_that_a_killed_consumer_had(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment, 1)
    queue.put(payload(b"first"))
    told, tell = os.pipe()

    def take_and_stop() -> None:
        queue.credits.fd = os.open("/dev/null", os.O_WRONLY)  # the ticket is taken, its credit is never given
        queue.get(decode=lambda *_: (os.write(tell, b"x"), signal.pause()))

    pid = in_child(take_and_stop)
    os.read(told, 1)
    with pytest.raises(Full):
        queue.put(payload(b"second"), timeout=0.2)  # a living process has it, however slow it is
    os.kill(pid, signal.SIGKILL)
    reap(pid)
    queue.put(payload(b"second"), timeout=5)
    assert bytes(queue.get(0).payload) == b"second"
    assert attachment.recovery.lost() == 1
    os.close(told)
    os.close(tell)


def test_what_a_put_left_for_want_of_a_descriptor_the_next_get_finishes(attachment: Attachment, payload: Any) -> None:
    """Nobody could say whether its credit was given. It must not stay away until this process puts again."""
    queue, limits = SharedMemoryQueue.create(attachment, 2), resource.getrlimit(resource.RLIMIT_NOFILE)
    broken = payload(b"half")
    broken.write_into = lambda _: {}["a broken payload"]
    queue.put(payload(b"first"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(KeyError):
            queue.put(broken, timeout=0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert bytes(queue.get(0).payload) == b"first"
    assert reap(in_child(lambda: [queue.put(payload(b"another's"), timeout=0) for _ in range(2)])) == 0
    assert [bytes(queue.get(0).payload) for _ in range(2)] == [b"another's"] * 2


def test_leases_of_a_killed_consumer_come_back(payload: Any) -> None:
    attachment = Attachment(Arena(Segment.create(1 << 30), capacity=8 << 20))
    queue = SharedMemoryQueue.create(attachment)
    told, tell = os.pipe()
    for _ in range(6):
        queue.put(payload(bytes(1 << 20)), timeout=0)

    def hold() -> None:
        attachment.attach()
        set_lease_budget(attachment.leases, 64 << 20)
        held = [queue.get() for _ in range(6)]
        os.write(tell, bytes([len(held)]))
        signal.pause()

    pid = in_child(hold)
    os.read(told, 1)
    queue.put(payload(bytes(1 << 20)), timeout=0)
    with pytest.raises(Full, match=f"pid {pid} .alive. has 6 blocks with {6 << 20} bytes"):
        queue.put(payload(bytes(1 << 20)), timeout=0)
    os.kill(pid, signal.SIGKILL)
    reap(pid)
    for _ in range(5):
        queue.put(payload(bytes(1 << 20)), timeout=5)
    os.close(told)
    os.close(tell)


def test_a_lease_outlives_its_killed_producer_bytes_unchanged(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment)

    def produce() -> None:
        for i in range(4):
            queue.put(payload(bytes([i]) * LARGE))
        os.kill(os.getpid(), signal.SIGKILL)

    reap(in_child(produce))
    held = [queue.get(0) for _ in range(4)]
    attachment.recover_dead(adopt_extents=True)
    for _ in range(20):
        queue.put(payload(b"x" * LARGE))
        queue.get(0)
    assert [bytes(message.payload) for message in held] == [bytes([i]) * LARGE for i in range(4)]


def test_a_forked_child_keeps_what_its_parent_lets_go(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment)
    queue.put(payload(b"a" * LARGE))
    message = queue.get(0)
    go_read, go_write = os.pipe()

    def look_later() -> None:
        os.read(go_read, 1)
        assert bytes(message.payload) == b"a" * LARGE

    pid = in_child(look_later)
    message = None
    for _ in range(10):
        queue.put(payload(b"x" * LARGE))
        queue.get(0)
        attachment.leases.settle()
    assert attachment.arena.is_in_use()
    os.write(go_write, b"x")
    assert reap(pid) == 0
    attachment.leases.settle()
    assert not attachment.arena.is_in_use()
    os.close(go_read)
    os.close(go_write)


def test_a_forked_child_keeps_what_its_killed_parent_held(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment)
    queue.put(payload(b"a" * LARGE))
    told, tell = os.pipe()
    go_read, go_write = os.pipe()
    answer_read, answer_write = os.pipe()

    def parent() -> None:
        message = queue.get(0)

        def child() -> None:
            os.write(tell, b"x")
            os.read(go_read, 1)
            os.write(answer_write, b"y" if bytes(message.payload) == b"a" * LARGE else b"n")

        in_child(child)
        signal.pause()

    pid = in_child(parent)
    os.read(told, 1)
    os.kill(pid, signal.SIGKILL)
    reap(pid)
    for _ in range(10):
        attachment.recover_dead(adopt_extents=True)
        queue.put(payload(b"x" * LARGE))
        queue.get(0)
    os.write(go_write, b"x")
    assert os.read(answer_read, 1) == b"y"
    deadline = time.monotonic() + LIMIT
    while not attachment.recover_dead(adopt_extents=True):
        assert time.monotonic() < deadline, "the row is never finished"
    for end in (told, tell, go_read, go_write, answer_read, answer_write):
        os.close(end)


# ---- threads and signals ----


def test_threads_use_both_ends_at_once(attachment: Attachment, payload: Any) -> None:
    queue = SharedMemoryQueue.create(attachment, 5)
    got, count = [], 300

    def put(first: Any) -> None:
        for i in range(count):
            queue.put(number(payload, first + i), timeout=LIMIT)

    def get() -> None:
        for _ in range(count):
            got.append(int.from_bytes(queue.get(LIMIT).payload, "little"))

    threads = [threading.Thread(target=put, args=(k * count,)) for k in range(3)]
    threads += [threading.Thread(target=get) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(got) == list(range(3 * count))


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("maxsize", [0, 2])
@pytest.mark.parametrize("size", [400, LARGE], ids=["copied", "leased"])
def test_an_exception_at_any_moment_of_get_loses_its_message_at_most_and_counts_it(
    attachment: Attachment, payload: Any, maxsize: int, size: int
) -> None:
    """A message that is copied is not lost at all."""
    queue = SharedMemoryQueue.create(attachment, maxsize)
    for point in range(1, STEPS):
        content, lost = point.to_bytes(4, "little") * (size // 4), attachment.recovery.lost()
        queue.put(payload(content), timeout=0)
        got = []
        raised = interrupted_at(point, lambda: got.append(queue.get(0)))  # noqa: B023
        with contextlib.suppress(Empty):
            got.append(queue.get(0))
        lost = attachment.recovery.lost() - lost
        assert [bytes(message.payload) for message in got] == [content] * (1 - lost)
        assert lost == 0 or size == LARGE
        got.clear()
        check_whole(attachment, queue, payload)
        if not raised:
            break
    assert 5 < point < STEPS - 10


@pytest.mark.slow
@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("maxsize", [0, 2])
@pytest.mark.parametrize("size", [400, LARGE], ids=["copied", "leased"])
def test_an_exception_at_any_moment_of_the_get_after_it_loses_no_more(
    attachment: Attachment, payload: Any, maxsize: int, size: int
) -> None:
    """A second exception in get does not lose the message that the first left to be got again.

    This holds for a process that polls, too.
    """
    queue = SharedMemoryQueue.create(attachment, maxsize)
    queue.fileno()
    raised = 0
    for point in range(1, STEPS):
        for first in (2, 5, 8):
            content, lost = bytes([point, first]) * (size // 2), attachment.recovery.lost()
            queue.put(payload(content), timeout=0)
            got = []
            interrupted_at(first, lambda: got.append(queue.get(0)))  # noqa: B023
            if not got:
                raised += interrupted_at(point, lambda: got.append(queue.get(0)))  # noqa: B023
            with contextlib.suppress(Empty):
                got.append(queue.get(0))
            lost = attachment.recovery.lost() - lost
            assert [bytes(message.payload) for message in got] == [content] * (1 - lost)
            assert lost == 0 or size == LARGE
            got.clear()
        if point % 10 == 0:
            check_whole(attachment, queue, payload)
    assert raised > 20


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("many", [False, True])
def test_an_exception_at_any_moment_of_get_leaves_a_descriptor_that_tells_of_the_spill_log(
    attachment: Attachment, payload: Any, many: Any
) -> None:
    """Also where it comes when the doorbell that tells of the log has been taken."""
    queue = SharedMemoryQueue.create(attachment)
    fcntl.fcntl(queue.fileno(), 1031, 4096)  # F_SETPIPE_SZ: 512 tokens
    for i in range(1500):
        queue.put(number(payload, i), timeout=0)
    numbers(queue, 512)
    point = 1
    while interrupted_at(point, lambda: queue.get_many(2, 0) if many else queue.get(0)):
        assert queue.tickets.spilled()
        assert select.select([queue.fileno()], [], [], 0)[0], f"silent after an exception at moment {point}"
        point += 1
    assert point > 30


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("many", [False, True])
def test_an_exception_in_a_jump_back_of_get_leaves_a_descriptor_that_tells_of_the_spill_log(
    attachment: Attachment, payload: Any, many: Any
) -> None:
    """As the test before this one has it. A get jumps back when a doorbell has been taken."""
    queue = SharedMemoryQueue.create(attachment)
    fcntl.fcntl(queue.fileno(), 1031, 4096)  # F_SETPIPE_SZ: 512 tokens
    for i in range(550):
        queue.put(number(payload, i), timeout=0)
    numbers(queue, 500)
    function = GetEnd.get_many if many else GetEnd.get
    raised = 0
    while queue.tickets.spilled():
        raised += interrupted_in_jump(function, lambda: queue.get_many(2, 0) if many else queue.get(0))
        is_told = select.select([queue.fileno()], [], [], 0)[0]
        assert is_told or not queue.tickets.spilled(), f"silent after {raised} exceptions"
        queue.get(0)
    assert raised


# raised between open() and the with statement's own, which no code can be written to survive
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("maxsize", [0, 2])
def test_an_exception_at_any_moment_of_put_leaves_a_whole_message_or_none(
    attachment: Attachment, payload: Any, maxsize: int
) -> None:
    queue = SharedMemoryQueue.create(attachment, maxsize)
    raised, outcomes, point, misses = 0, set(), 0, 0
    while misses < 10:  # each put has moments of its own number
        point += 1
        content = point.to_bytes(4, "little") * 100
        is_raised = interrupted_at(point, functools.partial(queue.put, payload(content), timeout=0))
        raised, misses = raised + is_raised, 0 if is_raised else misses + 1
        count = queue.qsize()
        outcomes.add(count)
        assert [bytes(queue.get(0).payload) for _ in range(count)] == [content] * count
        for _ in range(maxsize):
            queue.put(payload(b""), timeout=0)
        for _ in range(maxsize):
            queue.get(0)
    assert outcomes == {0, 1}
    assert raised > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised inside what is being collected
@pytest.mark.parametrize("maxsize", [0, 5])
def test_a_signal_handler_that_raises_in_call_after_call_loses_nothing(
    attachment: Attachment, payload: Any, maxsize: int
) -> None:
    """Once in each call, wherever it is. What put returned from comes once; what it did not, at most once."""
    queue = SharedMemoryQueue.create(attachment, maxsize)
    generator = random.Random(maxsize)
    raised, may_raise = 0, False

    def handler(_: Any, frame: Any) -> None:
        nonlocal raised, may_raise
        signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-5, 1e-3))
        if may_raise and frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "__del__":
            raised, may_raise = raised + 1, False
            raise Interrupt

    def interrupted(action: Callable[[], Any]) -> Any:
        nonlocal may_raise
        may_raise = True
        try:
            action()
        except Interrupt:
            return True
        return False

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    try:
        for i in range(3000):
            got, done = [], not interrupted(lambda: queue.put(number(payload, i), timeout=LIMIT))  # noqa: B023
            with contextlib.suppress(Empty):
                while len(got) < 2:
                    interrupted(lambda: got.append(queue.get(0)))  # noqa: B023
            # 3.10 lets a handler run between the end of get and its return.
            is_sure = done and sys.version_info >= (3, 11)
            values = [int.from_bytes(message.payload, "little") for message in got]
            assert values in ([[i]] if is_sure else [[], [i]])
            got.clear()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised > 50
    for _ in range(maxsize):
        queue.put(payload(b""), timeout=0)


# ---- random kills ----


def journal(descriptor: int, *values: Any) -> None:
    os.write(descriptor, b"".join(value.to_bytes(8, "little") for value in values))


def read_journal(path: Any, width: int) -> Any:
    with open(path, "rb") as file:
        words = memoryview(file.read()).cast("Q").tolist()
    return [tuple(words[i : i + width]) for i in range(0, len(words) - width + 1, width)]


def produce(queue: Any, payload: Any, who: Any, log: Any) -> None:
    choose = random.Random(who)
    for i in range(1 << 40):
        body = os.urandom(choose.choice([16, 400, 40_000]))
        head = who.to_bytes(8, "little") + i.to_bytes(8, "little") + hashlib.blake2b(body, digest_size=8).digest()
        journal(log, who, i, 0)
        queue.put(payload(head + body), timeout=LIMIT)
        journal(log, who, i, 1)


def consume(queue: Any, log: Any, until: Any = None) -> None:
    """The journal is written while the message is decoded: before get lets go of the ticket. So the count is exact."""

    def note(_: Any, message: Any) -> None:
        message = bytes(message)
        who, i = int.from_bytes(message[:8], "little"), int.from_bytes(message[8:16], "little")
        intact = hashlib.blake2b(message[24:], digest_size=8).digest() == message[16:24]
        journal(log, who, i, intact)

    while True:
        try:
            queue.get(1, note)
        except Empty:
            if until is not None:
                return


@pytest.mark.kills
@pytest.mark.parametrize("maxsize", [0, 20])
def test_random_kills_and_stops_of_producers_and_consumers(
    attachment: Attachment, payload: Any, tmp_path: Path, maxsize: int
) -> None:
    """Journals are kept outside the killed processes; what was put and what was got is compared at the end."""
    queue = SharedMemoryQueue.create(attachment, maxsize)
    choose = random.Random(maxsize)
    kills = int(os.environ.get("TENSORPIPE_IPC_KILLS", "60"))
    put_log, files = os.open(tmp_path / "put", os.O_CREAT | os.O_APPEND | os.O_WRONLY), []
    next_who = 0

    def start(role: str) -> Any:
        nonlocal next_who
        next_who += 1
        if role == "put":
            return in_child(lambda: produce(queue, payload, next_who, put_log), alarm=0)
        files.append(tmp_path / f"got{next_who}")
        log = os.open(files[-1], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        pid = in_child(lambda: consume(queue, log), alarm=0)
        os.close(log)
        return pid

    roles = ["put", "put", "get", "get"]
    pids = [start(role) for role in roles]
    try:
        for _ in range(kills):
            time.sleep(choose.uniform(0.005, 0.03))  # when to kill; nothing waits for it
            k = choose.randrange(4)
            if choose.random() < 0.3:
                os.kill(pids[k], signal.SIGSTOP)
                time.sleep(choose.uniform(0, 0.02))
                if choose.random() < 0.5:
                    os.kill(pids[k], signal.SIGCONT)
                    continue
            os.kill(pids[k], signal.SIGKILL)
            reap(pids[k])
            pids[k] = start(roles[k])
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            reap(pid)
    attachment.recover_dead()
    files.append(tmp_path / "rest")
    log = os.open(files[-1], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    consume(queue, log, until=True)
    os.close(log)
    os.close(put_log)
    judge(read_journal(tmp_path / "put", 3), [read_journal(path, 3) for path in files], attachment.recovery.lost())
    for _ in range(maxsize):
        queue.put(payload(b""), timeout=0)
    if maxsize:
        with pytest.raises(Full):
            queue.put(payload(b""), timeout=0)


def judge(put: Any, got_by_consumer: Any, lost: int) -> None:
    begun = {(who, i) for who, i, _ in put}
    returned = {(who, i) for who, i, done in put if done}
    got = [entry for entries in got_by_consumer for entry in entries]
    assert all(intact for _, _, intact in got)
    keys = [(who, i) for who, i, _ in got]
    assert len(keys) == len(set(keys)), "a message came twice"
    assert set(keys) <= begun, "a message came that nobody put"
    assert len(keys) > 100, "hardly anything was sent"
    missing = returned - set(keys)
    assert len(missing) <= lost, f"{len(missing)} messages are missing, {lost} were counted as lost"
    for entries in got_by_consumer:
        last = {}
        for who, i, _ in entries:
            assert i > last.get(who, -1), f"{who}'s message {i} came after {last[who]}"
            last[who] = i
    print(f"{len(returned)} put, {len(keys)} got, {lost} counted as lost, {len(missing)} missing")
