"""Staging with a recording in CUDA's place: which calls are made, in which order, and what happens when one fails.

What stands in for CUDA is in gpu_stand_in.py.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from arenas import left_in
from children import PATIENCE, in_thread
from gpu_stand_in import GPU, OTHER, Event, Recording
from inside import codec_of, shared_queue_of, warn_of_page_locks_anew
from programs import ran_in_fork

import tensorpipe_ipc as tp
from tensorpipe_ipc.cuda import staging
from tensorpipe_ipc.cuda.staging import Staging, StagingEncoder, unstager
from tensorpipe_ipc.memory.segment import PAGE_LOCKED
from tensorpipe_ipc.serializers import base, narrowing, serializer_named
from tensorpipe_ipc.wire.arrival import DecodeOptions
from tensorpipe_ipc.wire.in_block import in_one_block
from tensorpipe_ipc.wire.message import encode

LARGE = 100_000


@pytest.fixture
def cuda() -> Iterator[Recording]:
    warn_of_page_locks_anew()
    made = Recording()
    yield made
    made.events.clear()
    made.on_gpu.clear()


def _put(queue: Any, tree: Any, at_work: Staging) -> None:
    message = encode(tree, StagingEncoder(serializer_named("raw"), at_work))
    shared_queue_of(queue).put(*in_one_block(message))


def _get(queue: Any, at_work: Staging, device: torch.device = GPU) -> Any:
    arrival = DecodeOptions(unstage=functools.partial(at_work.unstage, device=device))
    return shared_queue_of(queue).get(1, functools.partial(codec_of(queue).decode, arrival=arrival))


def _gpu(cuda: Recording, *shape: int) -> torch.Tensor:
    return cuda.put_on(torch.randn(shape))


def test_put_copies_on_a_side_stream_and_waits(ctx: Any, cuda: Recording) -> None:
    """Registered, ordered after the caller's stream, copied, kept, waited for: then it is queued. The block once only."""
    at_work, queue = Staging(cuda), ctx.Queue()
    sent = _gpu(cuda, LARGE)
    _put(queue, {"x": sent, "n": torch.arange(3)}, at_work)
    steps = ["stream X", "side X after current X", "copy on side X", "keep for side X", "synchronize"]
    assert cuda.calls == ["register", *(step.replace("X", "cuda:0") for step in steps)]
    assert torch.equal(queue.get()["x"], sent)
    cuda.calls.clear()
    for _ in range(40):
        _put(queue, {"x": sent, "n": torch.arange(3)}, at_work)
        queue.get(copy=True)
    assert cuda.calls.count("register") < 40, "blocks that come again are locked already"
    assert "stream" not in " ".join(call.split()[0] for call in cuda.calls)


def test_small_and_strange_ones_go_the_usual_way(ctx: Any, cuda: Recording) -> None:
    """Small tensors are not staged; channels-last ones are, and keep their strides; with gaps they are gathered."""
    at_work, queue = Staging(cuda), ctx.Queue()
    _put(queue, _gpu(cuda, 3), at_work)
    assert cuda.calls == []
    last = torch.randn(4, 3, 100, 100).to(memory_format=torch.channels_last)
    gaps = torch.randn(LARGE, 2)[:, 0]
    cuda.put_on(last)
    cuda.put_on(gaps)
    _put(queue, last, at_work)
    _put(queue, gaps, at_work)
    assert cuda.calls.count("synchronize") == 1
    queue.get()
    got = queue.get()
    assert torch.equal(got, last)
    assert got.stride() == last.stride()
    assert torch.equal(queue.get(), gaps)


def test_in_pieces_over_tcp_it_is_read_from_its_gpu(cuda: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message without a block goes in pieces. Each piece of a GPU tensor is copied when its turn comes."""
    at_work = Staging(cuda)
    monkeypatch.setattr(staging, "staging", lambda: at_work)
    last = cuda.put_on(torch.randn(8, 3, 100, 100).to(memory_format=torch.channels_last))
    sent = {"x": _gpu(cuda, 700_001), "cpu": torch.randn(LARGE), "small": torch.arange(3), "last": last}
    with tp.Consumer("tcp://127.0.0.1:0", shared_memory="off") as consumer:
        with tp.Producer(consumer.endpoint) as producer:
            getting = in_thread(lambda: consumer.get(PATIENCE))
            producer.put(sent, PATIENCE)
            got = getting()
    zoo.same(sent, got)
    assert cuda.calls == [], "nothing was locked, as the memory that it was copied to is no block"


def test_narrowed_on_its_gpu_it_is_cast_there_once() -> None:
    """A tensor that is not on the CPU is cast where it is, in one go, and fetched in pieces. Its loss counts once."""
    tensor = torch.randn(3, 100_000)
    tensor[1, 7] = 1e6
    narrows = narrowing.narrowing(serializer_named("raw"), torch.float16)
    payload = narrowing._Cast(narrows, tensor.as_subclass(_Elsewhere), 2 * tensor.numel())
    place = np.empty(len(payload), np.uint8)
    for _ in range(2):  # as when it has to be sent again
        for start in range(0, len(payload), 1 << 18):
            part = memoryview(place)[start : start + (1 << 18)]
            payload.write_part(part, start)
            payload.sent(part, start)
    assert torch.equal(torch.from_numpy(place).view(torch.float16).view(3, -1), tensor.half())
    assert narrows.overflowed == 1
    assert 0 < narrows.worst < 1


class _Elsewhere(torch.Tensor):
    is_cpu = False


def test_get_holds_the_block_until_the_copy_is_done(ctx: Any, cuda: Recording) -> None:
    """The block is HELD while the copy is under way, and free at the next look after it."""
    at_work, queue = Staging(cuda), ctx.Queue()
    sent = torch.randn(LARGE)
    queue.put(sent)
    got = _get(queue, at_work)
    assert cuda.calls == [
        "register",
        "empty on cuda:0",
        "stream cuda:0",
        "side cuda:0 after current cuda:0",
        "copy on side cuda:0",
        "current cuda:0 after side cuda:0",
        "keep for side cuda:0",
    ]
    assert queue.statistics().leases == 1
    at_work.release()
    assert queue.statistics().leases == 1, "the copy is under way"
    cuda.events[0].done()
    at_work.release()
    assert queue.statistics().leases == 0
    assert torch.equal(got, sent)


def test_all_tensors_of_a_message_are_copied_by_the_gpu(ctx: Any, cuda: Recording) -> None:
    """They lie one after the other, and share a page: CUDA takes each page once."""
    at_work, queue = Staging(cuda), ctx.Queue()
    for n in range(1, 21):
        queue.put({"image": torch.ones(150_000 + n), "mask": torch.zeros(50_000), "ids": torch.ones(n, 100_001)})
        _get(queue, at_work)
        at_work.finish()
        assert cuda.calls.count("copy on side cuda:0") == 3 * n


def test_a_sparse_tensor_is_moved_as_it_is(cuda: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no memory of its own that could be copied from a block."""
    sparse = torch.eye(3).to_sparse()
    monkeypatch.setattr(cuda, "is_on_gpu", lambda _: False)
    monkeypatch.setattr(cuda, "move", lambda tensor, _: tensor)
    assert Staging(cuda).unstage(sparse, GPU) is sparse


def test_not_too_many_are_held(ctx: Any, cuda: Recording) -> None:
    """Of copies that do not end the oldest is waited for; ``finish`` waits for all."""
    at_work, queue = Staging(cuda), ctx.Queue()
    for _ in range(staging.MOST_PENDING + 3):
        queue.put(torch.ones(LARGE))
        _get(queue, at_work)
    assert queue.statistics().leases == staging.MOST_PENDING
    at_work.finish()
    assert queue.statistics().leases == 0


def test_a_block_is_held_until_the_copy_out_of_it_was_waited_for(
    ctx: Any, cuda: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write to a block as soon as it is let go of, and the GPU still reads it."""
    at_work, queue, held = Staging(cuda), ctx.Queue(), list[int]()
    queue.put(torch.ones(LARGE))
    _get(queue, at_work)
    done = Event.synchronize
    monkeypatch.setattr(Event, "synchronize", lambda self: held.append(queue.statistics().leases) or done(self))
    at_work.finish()
    assert held == [1]
    assert queue.statistics().leases == 0


def test_threads_that_ask_first_at_one_moment_have_one_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is dropped would let go of what its copies lie on."""
    monkeypatch.setattr(staging, "_own", {})
    both, made = threading.Barrier(2, timeout=PATIENCE), Staging
    monkeypatch.setattr(staging, "Staging", lambda: both.wait() < 2 and made())
    first, second = [each() for each in [in_thread(staging.staging) for _ in range(2)]]
    assert first is second


def test_two_threads_that_wait_for_one_copy_let_go_of_that_one_alone(
    ctx: Any, cuda: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, queue, both, done = Staging(cuda), ctx.Queue(), threading.Barrier(2, timeout=PATIENCE), Event.synchronize
    for _ in range(staging.MOST_PENDING):
        queue.put(torch.ones(LARGE))
        _get(queue, at_work)

    def synchronize(event: Event) -> None:
        both.wait()
        done(event)

    monkeypatch.setattr(Event, "synchronize", synchronize)
    threads = [in_thread(at_work.release) for _ in range(2)]
    for thread in threads:
        thread()
    assert queue.statistics().leases == staging.MOST_PENDING - 1


@pytest.mark.parametrize("fails_in", ["keep_for", "synchronize"])
def test_an_exception_while_a_copy_is_under_way_lets_go_of_no_block_before_its_end(
    ctx: Any, cuda: Recording, fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler may raise at any moment."""
    at_work, queue = Staging(cuda), ctx.Queue()
    before, owner = [RuntimeError], Event if fails_in == "synchronize" else Recording
    function = getattr(owner, fails_in)

    def interrupted(*arguments: Any) -> Any:
        if before:
            raise before.pop()
        return function(*arguments)

    monkeypatch.setattr(owner, fails_in, interrupted)
    with pytest.raises(RuntimeError):
        _put(queue, _gpu(cuda, LARGE), at_work)
    assert all(event.query() for event in cuda.events)
    queue.put(torch.ones(LARGE))
    assert (queue.get(timeout=PATIENCE) == 1).all()


def test_several_devices_have_a_stream_each(ctx: Any, cuda: Recording) -> None:
    """Each device has one side stream, made once."""
    at_work, queue = Staging(cuda), ctx.Queue()
    for device in (GPU, OTHER, GPU, OTHER):
        queue.put(torch.ones(LARGE))
        _get(queue, at_work, device)
    assert [call for call in cuda.calls if call.startswith("stream")] == ["stream cuda:0", "stream cuda:1"]
    at_work.finish()


def test_tensors_of_several_devices_in_one_tree(ctx: Any, cuda: Recording) -> None:
    """Each is copied on its own GPU's side stream, after what the caller told that GPU; all are there when put returns."""
    at_work, queue = Staging(cuda), ctx.Queue()
    tree = [cuda.put_on(torch.randn(LARGE), device) for device in (GPU, OTHER, GPU)]
    _put(queue, tree, at_work)
    steps = [call for call in cuda.calls if call not in ("register", "synchronize")]
    for device, times in ((GPU, 2), (OTHER, 1)):
        assert steps.count(f"side {device} after current {device}") == steps.count(f"copy on side {device}") == times
        assert steps.count(f"stream {device}") == 1
    assert cuda.calls[-1] == "synchronize"
    assert all(map(torch.equal, queue.get(), tree))


def _killed_in(ctx: Any, queue: Any, action: Callable[[], Any]) -> None:
    """Run something in a forked child, which stops where a copy's end is waited for, and is killed there."""
    process = ctx.Process(target=action)
    process.start()
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "it got to the copy"
    process.kill()
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    process.close()


def _stopping() -> Recording:
    cuda = Recording()
    event = cuda.event()
    event.synchronize = lambda: os.kill(os.getpid(), signal.SIGSTOP)
    cuda.event = lambda: event  # type: ignore[method-assign]
    return cuda


def test_a_consumer_killed_in_its_copy_gives_the_block_back(ctx: Any) -> None:
    """The block that its GPU was reading is free again, for whoever puts next, and nobody else's message is missing."""
    queue = ctx.Queue()
    queue.put(torch.ones(LARGE))
    queue.put(torch.zeros(LARGE))

    def get() -> None:
        at_work = Staging(_stopping())
        kept = _get(queue, at_work)
        at_work.finish()
        del kept

    _killed_in(ctx, queue, get)
    assert torch.equal(queue.get(timeout=5), torch.zeros(LARGE))
    assert queue.empty()
    assert not left_in(ctx)


def test_a_producer_killed_in_its_copy_puts_nothing(ctx: Any) -> None:
    """A message is all or nothing: what was not copied to its end is not queued, and its block is free again."""
    queue = ctx.Queue(2)

    def put() -> None:
        cuda = _stopping()
        _put(queue, cuda.put_on(torch.ones(LARGE)), Staging(cuda))

    _killed_in(ctx, queue, put)
    for number in range(2):
        queue.put(torch.full((LARGE,), float(number)), timeout=5)
    assert [float(queue.get(timeout=5)[0]) for _ in range(2)] == [0, 1]
    assert queue.empty()
    assert not left_in(ctx)


def test_a_block_is_not_written_before_its_copy_is_done(ctx: Any, cuda: Recording) -> None:
    """However many messages follow, none is put into a block that a GPU is still reading."""
    at_work, queue = Staging(cuda), ctx.Queue()
    queue.put(torch.full((LARGE,), 5.0))
    got = _get(queue, at_work)
    for number in range(20):
        queue.put(torch.full((LARGE,), float(number)))
        assert float(queue.get(copy=True)[0]) == number
    cuda.events[0].done()
    assert torch.equal(got, torch.full((LARGE,), 5.0))
    at_work.finish()


def test_a_tree_is_moved_where_it_can_be(ctx: Any, cuda: Recording) -> None:
    """Tensors and parameters move, views of one storage together; arrays, bytes and storages stay."""
    queue, moved = ctx.Queue(), []

    def unstage(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.nbytes)
        return tensor.clone()

    base = torch.arange(64.0)
    tree = {
        "views": [base[:32], base[16:]],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "array": torch.ones(5).numpy(),
        "bytes": b"abc",
        "storage": torch.ones(7).untyped_storage(),
    }
    queue.put(tree)
    got = shared_queue_of(queue).get(
        1, functools.partial(codec_of(queue).decode, arrival=DecodeOptions(unstage=unstage))
    )
    assert sorted(moved) == [12, 256]
    got["views"][0][20] = -1
    assert got["views"][1][4] == -1
    assert isinstance(got["parameter"], torch.nn.Parameter)
    assert got["bytes"] == b"abc"


@pytest.mark.parametrize(("code", "says"), [(2, "ulimit -l"), (801, "WSL2"), (999, "error 999")])
def test_without_page_locks_it_copies_and_says_so_once(ctx: Any, code: int, says: str) -> None:
    """A registration that fails gives one warning with reason and remedy, and right bytes all the same."""
    warn_of_page_locks_anew()
    cuda = Recording(code)
    at_work, queue = Staging(cuda), ctx.Queue()
    sent = _gpu(cuda, LARGE)
    with pytest.warns(RuntimeWarning, match=says) as said:
        _put(queue, sent, at_work)
    assert len(said) == 1
    _put(queue, sent, at_work)  # a second warning would be an error
    assert cuda.calls == ["register"], "it is not tried again"
    assert torch.equal(queue.get(), sent)
    assert at_work.pageable


def test_what_is_no_segment_is_not_locked(cuda: Recording) -> None:
    """Memory that may be freed at any time is copied pageably."""
    at_work = Staging(cuda)
    place = torch.empty(LARGE)
    at_work.stage(torch.ones(LARGE), place)
    assert cuda.calls == []
    assert place.sum() == LARGE


def test_locked_pages_are_not_punched_out(ctx: Any, cuda: Recording) -> None:
    """Once any page is locked, free blocks keep their memory."""
    segment = ctx.tensorpipe_attachment().arena.segment
    queue = ctx.Queue()
    queue.put(torch.ones(1 << 20))
    at_work = Staging(cuda)
    _get(queue, at_work)
    at_work.finish()
    assert segment.words[PAGE_LOCKED] == 1
    before = segment.resident()
    segment.punch(0, segment.size)
    assert segment.resident() == before


def test_device_names(cuda: Recording) -> None:
    """The CPU is no staging; what names no device is said; a fork of CUDA's user is told before anything is taken."""
    at_work = Staging(cuda)
    assert unstager(None) is unstager("cpu") is unstager(torch.device("cpu")) is None
    with pytest.raises(ValueError, match="names no device"):
        unstager("nowhere")
    assert unstager("cuda", at_work).keywords == {"device": GPU}
    assert unstager("cuda:1", at_work).keywords == {"device": OTHER}
    assert unstager("meta")(torch.ones(3)).is_meta
    cuda.bad_fork = True
    with pytest.raises(tp.Closed, match="spawn or forkserver"):
        unstager("cuda", at_work)
    queue = tp.Queue()
    queue.put(torch.ones(3))
    if not torch.version.cuda:
        with pytest.raises(ValueError, match="torch has no such GPU here"):
            queue.get(device="cuda:7")
    with pytest.raises(ValueError, match="names no device"):
        tp.Consumer("inproc://x", device="nowhere")
    for device in ("hpu", "xpu", "vulkan"):
        with pytest.raises(ValueError, match=f"device='{device}': torch has no such device here"):
            queue.get(device=device)
        with pytest.raises(ValueError, match="torch has no such device here"):
            tp.Consumer("inproc://x", device=device)
    with pytest.raises(ValueError, match="as_numpy"):
        queue.get(device="cuda", as_numpy=True)
    assert torch.equal(queue.get(device="cpu"), torch.ones(3))


def test_a_gpu_tensor_after_a_fork_is_our_error() -> None:
    """The error of torch about CUDA in a forked process becomes Closed, with the remedy. Other errors stay."""

    class Inherited(torch.Tensor):
        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            raise RuntimeError(self.says)

    tensor = torch.ones(3).as_subclass(Inherited)
    tensor.says = "Cannot re-initialize CUDA in forked subprocess."
    with pytest.raises(tp.Closed, match="spawn or forkserver"):
        base._to_cpu(tensor)
    tensor.says = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        base._to_cpu(tensor)


_ALONE = """
import torch, warnings
warnings.simplefilter("error")
import tensorpipe_ipc as tp
queue = tp.Queue(wire_dtype=torch.float16)
queue.put(torch.ones(100_000)); queue.get(device="cpu"); queue.put([torch.ones(3)]); queue.get(as_numpy=True)
with tp.MemoryTracker(None): pass
assert not torch.cuda.is_initialized()
print("left alone")
"""


def test_cuda_is_left_alone(tmp_path: Path) -> None:
    """Without a GPU's tensor or name nothing initialises CUDA."""
    done = ran_in_fork("-c", _ALONE, folder=tmp_path)
    assert done.out == "left alone\n", done.err


def test_the_warning_is_no_error_elsewhere() -> None:
    """Nothing warns where nothing is staged."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tp.Queue().put(torch.ones(10))
