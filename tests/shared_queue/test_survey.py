"""An onlooker's figures are those of the processes, of the living and the dead; looking changes nothing."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from children import wait_until
from crash_points import in_child, reap

import tensorpipe_ipc as tp
from tensorpipe_ipc import cli
from tensorpipe_ipc.cli import top
from tensorpipe_ipc.memory.arena import SMALLEST, UNIT
from tensorpipe_ipc.memory.row import MAX_ROWS, ROWS_END
from tensorpipe_ipc.memory.rows import INCARNATIONS
from tensorpipe_ipc.memory.segment import HEAD, MAGIC, NAME, VERSION
from tensorpipe_ipc.shared_queue import survey as onlooker
from tensorpipe_ipc.shared_queue.survey import SegmentView, Use, survey


def _of(ctx: object) -> SegmentView:
    inode = os.fstat(ctx.tensorpipe_attachment().arena.segment.descriptor).st_ino  # type: ignore[attr-defined]
    (found,) = [segment for segment in survey([os.getpid()]) if segment.inode == inode]
    return found


def test_its_figures_are_those_of_the_queue(ctx: Any) -> None:
    """Messages, bytes, what waits, what is held and by whom: as the queue's own statistics have it."""
    bounded, joinable = ctx.Queue(4), ctx.JoinableQueue()
    for size in (10, 100_000, 100_000):
        bounded.put(torch.ones(size))
    kept = [bounded.get(), bounded.get()]
    for number in range(40):
        joinable.put(number)
    with pytest.raises(tp.Full):
        bounded.put_many([torch.ones(3)] * 4, timeout=0.01)
    found = _of(ctx)
    of = {queue.kind: queue for queue in found.queues}
    assert set(of) == {"queue", "joinable queue"}
    assert (of["queue"].maxsize, of["queue"].waiting) == (4, 4)
    assert of["queue"].nbytes == 400_000 + 3 * 12
    assert of["joinable queue"].waiting == 40
    (use,) = of["queue"].uses
    known = bounded.statistics()
    assert (use.put, use.bytes_put, use.got, use.bytes_got) == (
        known.messages_put,
        known.bytes_put,
        known.messages_got,
        known.bytes_got,
    )
    assert (use.pid, use.alive, use.waits) == (os.getpid(), True, known.waits)
    assert use.waits == 1
    assert (found.capacity, found.lost) == (known.capacity, 0)
    assert found.leased == known.bytes_leased == 400_000
    (part,) = found.parts
    assert (part.pid, part.here, part.alive, part.written, part.queued, part.held) == (
        os.getpid(),
        True,
        True,
        0,
        44,
        1,
    )
    del kept


def test_looking_costs_no_memory(ctx: Any) -> None:
    """Holes stay holes, no row is taken, no descriptor stays open."""
    queue = ctx.Queue()
    queue.put(torch.ones(10))
    before = _of(ctx).resident
    for _ in range(3):
        found = _of(ctx)
    assert found.resident == before
    assert len(found.parts) == 1


def test_the_dead_are_counted_and_their_counters_end_with_them(ctx: Any) -> None:
    """A killed child is dead, unswept until somebody looks, then swept; who has its row next begins at 0."""
    queue = ctx.Queue()
    ready, says = os.pipe()

    def child(count: int) -> int:
        pid = os.fork()
        if not pid:
            try:
                for _ in range(count):
                    queue.put(torch.ones(3))
                os.write(says, b"x")
                signal.pause()
            finally:
                os._exit(1)
        os.read(ready, 1)
        return pid

    def use_of(pid: int) -> Use:
        return next(use for use in _of(ctx).queues[0].uses if use.pid == pid)

    first = child(5)
    assert use_of(first).put == 5
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    assert not use_of(first).alive
    assert (_of(ctx).unswept, _of(ctx).swept) == (1, 0)
    ctx.tensorpipe_attachment().recover_dead()
    assert (_of(ctx).unswept, _of(ctx).swept) == (0, 1)
    second = child(2)
    assert use_of(second).put == 2
    os.kill(second, signal.SIGKILL)
    os.waitpid(second, 0)
    os.close(ready)
    os.close(says)


def test_rates_are_what_was_done_in_between(ctx: Any) -> None:
    """Messages and bytes a second, by process; a queue that was not there before counts from nothing."""
    queue = ctx.Queue()
    queue.put(torch.ones(4))
    before = [_of(ctx)]
    queue.put_many([torch.ones(4)] * 10)
    queue.get_many(6)
    now = [_of(ctx)]
    assert list(top.rates(before, now, 2.0).values()) == [(5.0, 80.0, 3.0, 48.0)]
    assert list(top.rates([], now, 1.0).values())[0].put == 11


def test_top_once(ctx: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``top --once`` prints tables, with ``--json`` everything, about this process too."""
    monkeypatch.setattr(top, "survey", lambda: survey([os.getpid()]))  # and not other programs' queues
    queue = ctx.Queue(7)
    queue.put(torch.ones(1 << 18))
    assert cli.main(["top", "--once", "--json", "--interval", "0.05"]) == 0
    segments = json.loads(capsys.readouterr().out)["segments"]
    (ours,) = [each for each in segments if os.getpid() in each["pids"] and each["queues"][0]["maxsize"] == 7]
    assert ours["queues"][0]["waiting"] == 1
    assert ours["queues"][0]["uses"][0]["per_second"] == {"put": 0, "bytes_put": 0, "got": 0, "bytes_got": 0}
    assert ours["processes"][0]["memory"]["rss"] > 1 << 20
    assert cli.main(["top", "--once", "--interval", "0.05"]) == 0
    said = capsys.readouterr().out
    assert "1 of 7" in said
    assert f"pid {os.getpid()}" in said


def test_top_shows_what_the_dead_hold_until_somebody_sees_to_it(
    ctx: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A put that waits does. Then its memory is free, and nothing is shown of it."""
    monkeypatch.setattr(top, "survey", lambda: survey([os.getpid()]))
    queue = ctx.Queue()
    queue.put(torch.ones(100_000))

    def hold_and_die() -> None:
        held = queue.get(copy=False)
        os.kill(os.getpid(), signal.SIGKILL)
        del held

    pid = os.fork()
    if not pid:
        hold_and_die()
    os.waitpid(pid, 0)

    def shown() -> str:
        assert cli.main(["top", "--once", "--interval", "0.01"]) == 0
        return capsys.readouterr().out

    assert f"pid {pid} (dead)" in shown()
    bounded = ctx.Queue(1)
    bounded.put(1)
    with pytest.raises(tp.Full):
        bounded.put(2, timeout=0.1)
    assert f"pid {pid} (dead)" not in shown()


def test_endpoints_are_seen(tmp_path: Path) -> None:
    """The queue between two endpoints is known as such."""
    from children import in_thread

    with tp.Consumer(f"ipc://{tmp_path}/x") as consumer, tp.Producer(consumer.endpoint) as producer:
        taken = in_thread(lambda: consumer.get(10))
        producer.put(torch.ones(5), timeout=10)
        taken()
        kinds = [queue.kind for segment in survey([os.getpid()]) for queue in segment.queues]
    assert kinds == ["endpoints"]


def test_a_message_is_not_read_as_headers_where_an_extent_changes_hands_meanwhile(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, read = ctx.Queue(), onlooker._Reader._headers
    for number in range(3000):
        there.put(number)
    while there.qsize():
        there.get()

    def late(self: Any, *extent: int) -> Any:
        monkeypatch.undo()
        ctx.trim()
        there.put(torch.full((1 << 18,), 2))  # as a block's state, it says that a message waits there
        return read(self, *extent)

    monkeypatch.setattr(onlooker._Reader, "_headers", late)
    assert _of(ctx).in_use in (0, 8 << 18)


def test_nonsense_is_looked_at_in_no_time() -> None:
    """The owner of a memfd of that name may write anything: extents that overlap, of holes, beyond the end; counts."""
    size = (1 << 38) + 100
    units = size // UNIT
    memory = os.memfd_create(NAME)
    try:
        os.ftruncate(memory, size)
        os.pwrite(memory, HEAD.pack(MAGIC, VERSION, size), 0)
        os.pwrite(memory, b"\xff" * 8 * MAX_ROWS, 8 * INCARNATIONS)
        os.pwrite(memory, struct.pack("<Q", units - 1 << 32 | 13 << 16 | 1) * 512, ROWS_END)
        os.pwrite(memory, struct.pack("<Q", 2 << 32 | SMALLEST << 16 | 1), ROWS_END + 8 * (units - 1))
        os.pwrite(memory, b"x", size - 1)
        began = time.process_time()
        found = survey([os.getpid()])
        assert time.process_time() - began < 1
        assert os.fstat(memory).st_ino in [segment.inode for segment in found]
    finally:
        os.close(memory)


def test_a_pipe_that_shows_that_name_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mount namespace of his own anybody can have one. Its writer, who waits for a reader, would go on."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(onlooker, "memfds", lambda *_: [(os.getpid(), str(tmp_path / "pipe"))])
    monkeypatch.setattr(onlooker, "_device_of_memfds", lambda: tmp_path.stat().st_dev)
    writer = in_child(lambda: os.close(os.open(tmp_path / "pipe", os.O_WRONLY)))
    wait_until(lambda: "wait_for_partner" in Path(f"/proc/{writer}/wchan").read_text())
    assert survey() == []
    assert os.waitpid(writer, os.WNOHANG) == (0, 0)
    os.close(os.open(tmp_path / "pipe", os.O_RDONLY))
    assert reap(writer) == 0


def test_a_terminal_that_shows_that_name_does_not_become_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    primary, terminal = os.openpty()
    name = os.ttyname(terminal)
    monkeypatch.setattr(onlooker, "memfds", lambda *_: [(os.getpid(), name)])
    monkeypatch.setattr(onlooker, "_device_of_memfds", lambda: os.stat(name).st_dev)

    def look() -> None:
        os.setsid()  # as cron and systemd start a program: without a terminal
        assert survey() == []
        with pytest.raises(OSError, match="No such device or address"):
            os.open("/dev/tty", os.O_RDWR)

    assert reap(in_child(look)) == 0
    os.close(primary)
    os.close(terminal)


def test_a_file_that_shows_that_name_is_no_segment(ctx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maker may choose its number, too, in a file system of his own: that of a segment."""
    there = ctx.Queue()
    there.put(1)
    segment = ctx.tensorpipe_attachment().arena.segment
    (tmp_path / "forged").write_bytes(os.pread(segment.descriptor, UNIT, 0))
    os.truncate(tmp_path / "forged", segment.size)
    monkeypatch.setattr(onlooker, "memfds", lambda *_: [(os.getpid(), str(tmp_path / "forged"))])
    assert survey() == []
