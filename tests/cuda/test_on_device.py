"""``cuda_ipc=True`` between real processes, with a stand-in for CUDA in each (gpu_stand_in.py): who is sent what, and when a
device block is used again, whoever is killed."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import children
import gpu_stand_in
import msgspec
import pytest
import torch
import zoo
from arenas import left_in
from children import PATIENCE, Child, in_thread
from gpu_stand_in import GPU, OTHER, StandIn
from inside import lent_blocks, shared_queue_of

import tensorpipe_ipc as tp
from tensorpipe_ipc.cuda import on_device
from tensorpipe_ipc.cuda.on_device import DevicePlacement, unpack_placement
from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.wire.arrival import AS_SENT
from tensorpipe_ipc.wire.in_block import parts_of
from tensorpipe_ipc.wire.schema import schema_of

ITEMS = 100_000


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """This process's GPU, whose memory lies in a folder that goes with the test."""
    made = StandIn(tmp_path).install(monkeypatch.setattr)
    yield made
    _delete_all(tmp_path)
    made.close()


def _gpu(there: StandIn, seed: int = 0, device: torch.device = GPU, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return there.cuda.put_on(zoo.bits(dtype, ITEMS, seed=seed), device)


def _delete_all(folder: Path) -> None:
    """As the driver does with a dead process's memory."""
    for path in folder.iterdir():
        path.unlink()


def _bits(tree: Any) -> Any:
    return {key: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, value in tree.items()}


def _getting(queue: Any, line: Any, folder: Path, options: dict[str, Any]) -> None:
    """A consumer, which gets one object each time it is told to, and says what it got and what CUDA was asked for."""
    here = StandIn(folder).install()
    for told in iter(line.recv, None):
        if "refuses" in told:
            here.files.refuses = told["refuses"]
        if "visible" in told:
            here.files.visible = told["visible"]
        if told.get("stop") == "in the copy":
            here.cuda.event = lambda: _Stopping()  # type: ignore[method-assign]
        here.files.calls.clear()
        here.cuda.calls.clear()
        try:
            got = queue.get(timeout=10, **options, **told.get("options", {}))
        except (tp.TensorPipeError, OSError) as error:
            line.send((type(error).__name__, str(error), here.files.calls))
            continue
        here.staging.finish()
        devices = {key: str(here.cuda.device_of(value)) for key, value in got.items()}
        line.send((_bits(got), devices, here.files.calls))


class _Stopping:
    """An event that nobody sees the end of: who waits for it stops, and may be killed there."""

    def record(self, stream: Any) -> None:
        pass

    copies: list[Any] = []
    finished = False

    def synchronize(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Getting:
    """A process that gets."""

    def __init__(self, ctx: Any, queue: Any, folder: Path, **options: Any) -> None:
        self.line, theirs = ctx.Pipe()
        self.process = ctx.Process(target=_getting, args=(queue, theirs, folder, options), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, **told: Any) -> None:
        self.line.send(told)

    def result(self) -> Any:
        assert self.line.poll(10), "the consumer does not answer"
        return self.line.recv()

    def get(self, **told: Any) -> Any:
        self.begin(**told)
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


@contextmanager
def getting(ctx: Any, queue: Any, folder: Path, **options: Any) -> Iterator[Getting]:
    """One that ends with the block."""
    made = Getting(ctx, queue, folder, **{"device": "cuda:0", **options})
    try:
        yield made
    finally:
        if made.process.is_alive():
            made.line.send(None)
        made.process.join(10)
        made.kill()
        made.process.close()
        made.line.close()


def test_it_stays_on_its_gpu_once_the_consumer_has_passed(ctx: Any, there: StandIn, tmp_path: Path) -> None:
    """The first message is staged and offers a test block; when that was read, device blocks go, opened and made once."""
    queue = ctx.Queue(cuda_ipc=True)
    with getting(ctx, queue, tmp_path) as consumer:
        tree = {"x": _gpu(there), "small": torch.arange(5), "bulk": zoo.bits(torch.int16, ITEMS)}
        queue.put(tree)
        assert queue.statistics().on_device == 0
        assert "nobody has begun" in queue.statistics().staged_because
        bits, devices, calls = consumer.get()
        assert bits == _bits(tree)
        assert calls == ["open"], "the test block"
        for number in range(3):
            tree["x"] = _gpu(there, number)
            queue.put(tree)
            tree["x"] = there.cuda.put_on(tree["x"].zero_())  # put has read it
            tree["x"] = _gpu(there, number)
            bits, devices, calls = consumer.get()
            assert bits == _bits(tree)
            assert devices == {"x": "cuda:0", "small": "cuda:0", "bulk": "cuda:0"}
            assert calls == (["open"] if number == 0 else [])
        assert queue.statistics().on_device == 3
        assert queue.statistics().staged_because == ""
        made = [call for call in there.files.calls if call != "export"]
        assert made == ["allocate 2097152"] * 2, "the test block, and one block for three messages"
        assert there.files.calls.count("export") == 2
    assert not left_in(ctx)


def test_all_that_is_known_of_a_tensor_arrives(ctx: Any, there: StandIn, tmp_path: Path) -> None:
    """Every dtype, channels-last strides, parameters, views of one memory, storages, two GPUs' tensors in one tree."""
    queue = ctx.Queue(cuda_ipc=True)
    # Here both ends are this process: what it lent itself it reads without opening it.
    queue.put(_gpu(there))
    queue.get(device="cuda:0")
    last = there.cuda.put_on(torch.randn(4, 3, 100, 100).to(memory_format=torch.channels_last))
    base = there.cuda.put_on(torch.arange(2.0 * ITEMS))
    tree = {
        "last": last,
        "views": [base[:ITEMS], base[5:]],
        "parameter": torch.nn.Parameter(_gpu(there, 1), requires_grad=False),
        "other": _gpu(there, 2, OTHER),
        "number": 7,
    }
    there.cuda.put_on(tree["parameter"].data)
    there.cuda.calls.clear()
    queue.put(tree)
    assert queue.statistics().on_device == 1, "the other GPU's tensor was staged beside them"
    got = queue.get(device="cuda:0")
    assert queue.statistics().on_device == 1, queue.statistics().staged_because
    assert torch.equal(got["last"], last)
    assert got["last"].stride() == last.stride()
    assert torch.equal(got["views"][1], base[5:])
    got["views"][0][7] = -1
    assert got["views"][1][2] == -1
    assert isinstance(got["parameter"], torch.nn.Parameter)
    assert torch.equal(got["parameter"], tree["parameter"])
    assert torch.equal(got["other"], tree["other"])
    assert all(there.cuda.device_of(got[name]) == GPU for name in ("last", "other"))
    queue.put(_gpu(there, 2, OTHER))
    found = queue.get(device="cuda:0")
    there.staging.finish()
    assert torch.equal(found, tree["other"])
    assert queue.statistics().staged_because == "this process lends memory of cuda:0, and of no other GPU"
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64):
        sent = _gpu(there, 3, dtype=dtype)
        queue.put(sent)
        found = queue.get(device="cuda:0")
        assert found.dtype == dtype
        assert _bits({"x": found}) == _bits({"x": sent})
    storage = _gpu(there, 4).untyped_storage()
    queue.put([storage, 1])
    found = queue.get(device="cuda:0")[0]
    assert isinstance(found, torch.UntypedStorage)
    assert bytes(memoryview(torch.tensor([], dtype=torch.uint8).set_(found).numpy())) == _bits({"": _gpu(there, 4)})[""]
    queue.put((_gpu(there, 5), {1, 2}))  # a set is pickled
    found, numbers = queue.get(device="cuda:0")
    assert numbers == {1, 2}
    assert torch.equal(found, zoo.bits(torch.int32, ITEMS, seed=5))
    assert queue.statistics().on_device >= 8


def test_many_at_once_have_a_block_each(ctx: Any, there: StandIn) -> None:
    """``put_many`` names device blocks of all before any is queued: none is named twice."""
    queue = ctx.Queue(cuda_ipc=True)
    queue.put(_gpu(there))
    queue.get(device="cuda:0")
    queue.put_many([_gpu(there, number) for number in range(4)])
    assert queue.statistics().on_device == 4
    got = queue.get_many(4, 5, device="cuda:0")
    assert [_bits({"": tensor}) for tensor in got] == [_bits({"": _gpu(there, number)}) for number in range(4)]


def test_received_tensors_are_copies(ctx: Any, there: StandIn) -> None:
    """A received tensor stays as it is when its device block is used again. A program can put it again."""
    queue = ctx.Queue(cuda_ipc=True)
    queue.put(_gpu(there))
    queue.get(device="cuda:0")
    queue.put(_gpu(there, 1))
    first = queue.get(device="cuda:0")
    queue.put(first)
    again = queue.get(device="cuda:0")
    queue.put(_gpu(there, 2))
    queue.get(device="cuda:0")
    assert queue.statistics().on_device == 3
    assert torch.equal(first, zoo.bits(torch.int32, ITEMS, seed=1))
    assert torch.equal(again, first)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"refuses": "cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)"}, "does not see this GPU, or"),
        ({"visible": [b"another" + bytes(9)]}, "does not see this GPU, or"),
        ({"options": {"device": None}}, "takes tensors to the CPU"),
    ],
    ids=["refused", "another GPU", "to the CPU"],
)
def test_where_it_cannot_be_it_is_staged_and_said(
    ctx: Any, there: StandIn, tmp_path: Path, told: Any, says: str
) -> None:
    """A consumer that cannot read the test block, or wants no GPU, gets everything all the same, and statistics say why."""
    queue = ctx.Queue(cuda_ipc=True)
    options = {"device": "cuda:0"} if "options" not in told else told.pop("options")
    with getting(ctx, queue, tmp_path, **options) as consumer:
        for number in range(3):
            queue.put({"x": _gpu(there, number)})
            assert consumer.get(**told)[0] == _bits({"x": zoo.bits(torch.int32, ITEMS, seed=number)})
        queue.put({"x": _gpu(there)})
        assert f"pid {consumer.process.pid} {says}" in queue.statistics().staged_because
        assert queue.statistics().on_device == 0


def test_where_cuda_exports_nothing_it_is_asked_once(ctx: Any, there: StandIn) -> None:
    """If CUDA exports nothing, a queue asks it once, frees the memory, and stages messages. The reason quotes CUDA."""
    there.files.refuses = "cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED (801)"
    queue = ctx.Queue(cuda_ipc=True)
    for number in range(3):
        queue.put(_gpu(there, number))
        assert "CUDA_ERROR_NOT_SUPPORTED" in queue.statistics().staged_because
        assert _bits({"": queue.get()}) == _bits({"": _gpu(there, number)})
    assert there.files.calls == ["allocate 2097152", "export", "free"]


def test_other_bytes_than_were_written_are_not_trusted(ctx: Any, there: StandIn, tmp_path: Path) -> None:
    """If a consumer reads other bytes in the test block than the producer wrote, the producer stages all tensors."""
    queue = ctx.Queue(cuda_ipc=True)
    assert there.blocks.lends(0)
    there.blocks.test_block().memory[3] += 1
    with getting(ctx, queue, tmp_path) as consumer:
        for _ in range(2):
            queue.put({"x": _gpu(there)})
            consumer.get()
        queue.put({"x": _gpu(there)})
        assert "found other bytes" in queue.statistics().staged_because
        consumer.get()


def test_one_who_has_not_passed_keeps_all_on_the_usual_way(ctx: Any, there: StandIn, tmp_path: Path) -> None:
    """As anybody may take a message, all who get must have passed; one that is dead, and recovered, does not count."""
    queue = ctx.Queue(cuda_ipc=True)
    with getting(ctx, queue, tmp_path) as able:
        queue.put({"x": _gpu(there)})
        able.get()
        with getting(ctx, queue, tmp_path, device=None) as unable:
            queue.put({"x": _gpu(there, 1)})
            assert queue.statistics().on_device == 1, "nobody knows of the other one"
            assert unable.get()[:2] == (_bits({"x": _gpu(there, 1)}), {"x": "cpu"}), "who gets it all the same"
            queue.put({"x": _gpu(there)})
            assert "has not answered yet" in queue.statistics().staged_because
            unable.get()
            queue.put({"x": _gpu(there)})
            able.get()
            assert "takes tensors to the CPU" in queue.statistics().staged_because
        assert not left_in(ctx)
        queue.put({"x": _gpu(there)})
        able.get()
        assert queue.statistics().on_device == 2


def _getting_then_forking(queue: Any, line: Any) -> None:
    """A consumer on the CPU, which keeps what it got and forks a child that lives on."""
    held = [queue.get(timeout=10) for _ in range(2)]
    child = os.fork()
    if not child:
        signal.pause()
    line.send(child)
    signal.pause()
    del held


def test_one_that_died_does_not_count_though_its_child_lives(ctx: Any, there: StandIn, tmp_path: Path) -> None:
    """The dead get nothing any more, though what their child still has is not given back yet."""
    queue = ctx.Queue(cuda_ipc=True)
    line, theirs = ctx.Pipe()
    process = ctx.Process(target=_getting_then_forking, args=(queue, theirs), daemon=True)
    process.start()
    with getting(ctx, queue, tmp_path) as able:
        for _ in range(2):
            queue.put({"x": torch.ones(ITEMS, dtype=torch.int32)})
        assert line.poll(10)
        child = line.recv()
        try:
            queue.put({"x": _gpu(there)})
            able.get()
            assert "has not answered yet" in queue.statistics().staged_because
            process.kill()
            process.join()  # with a timeout it would wait for the child
            monotonic = time.monotonic
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "monotonic", lambda: monotonic() + on_device.LOOK)
                queue.put({"x": _gpu(there, 1)})
            assert able.get()[0] == _bits({"x": _gpu(there, 1)})
            assert (queue.statistics().on_device, queue.statistics().staged_because) == (1, "")
        finally:
            os.kill(child, signal.SIGKILL)
            process.kill()
            process.join()
            process.close()
            line.close()
            theirs.close()


def test_a_consumer_killed_in_its_copy_gives_the_block_back(ctx: Any, there: StandIn, tmp_path: Path) -> None:
    """Its message is lost and counted, as any; the device block is used again; what comes next arrives elsewhere."""
    queue = ctx.Queue(cuda_ipc=True)
    with getting(ctx, queue, tmp_path) as consumer:
        queue.put({"x": _gpu(there)})
        consumer.get()
        queue.put({"x": _gpu(there, 1)})
        assert queue.statistics().on_device == 1
        consumer.begin(stop="in the copy")
        _, status = os.waitpid(consumer.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        (lent,) = lent_blocks(there.blocks)
        assert not lent.is_free(), "it is being read"
        consumer.kill()
    assert not left_in(ctx)
    assert lent.is_free()
    with getting(ctx, queue, tmp_path) as next_one:
        queue.put({"x": _gpu(there, 2)})
        assert next_one.get()[0] == _bits({"x": zoo.bits(torch.int32, ITEMS, seed=2)})
        queue.put({"x": _gpu(there, 3)})
        assert next_one.get()[0] == _bits({"x": zoo.bits(torch.int32, ITEMS, seed=3)})
        assert queue.statistics().on_device == 2
        assert lent_blocks(there.blocks) == [lent]
    assert queue.statistics().lost == 1


def _putting(queue: Any, line: Any, folder: Path) -> None:
    here = StandIn(folder).install()
    for number in iter(line.recv, None):
        queue.put({"x": here.cuda.put_on(zoo.bits(torch.int32, ITEMS, seed=number))})
        line.send(queue.statistics().on_device)


def _put_by_one_that_was_killed(ctx: Any, queue: Any, folder: Path) -> int:
    """Leave one message in the queue that lay in the GPU memory of a process which is gone. Its pid."""
    line, theirs = ctx.Pipe()
    producer = ctx.Process(target=_putting, args=(queue, theirs, folder))
    producer.start()
    theirs.close()
    line.send(0)
    assert line.recv() == 0
    queue.get(device="cuda:0")
    line.send(1)
    assert line.recv() == 1
    pid: int = producer.pid
    producer.kill()
    producer.join(10)
    producer.close()
    line.close()
    _delete_all(folder)
    return pid


def test_what_lay_in_a_dead_producers_gpu_is_lost_and_said(ctx: Any, there: StandIn, tmp_path: Path) -> None:
    """PeerLost names the process; the message is taken all the same, and the queue goes on."""
    queue = ctx.Queue(cuda_ipc=True)
    pid = _put_by_one_that_was_killed(ctx, queue, tmp_path)
    with pytest.raises(tp.PeerLost, match=f"GPU memory of pid {pid}"):
        queue.get(device="cuda:0", timeout=5)
    assert queue.empty()
    queue.put(_gpu(there))
    assert torch.equal(queue.get(device="cuda:0"), zoo.bits(torch.int32, ITEMS))


def test_of_many_only_the_lost_are_missing(ctx: Any, there: StandIn, tmp_path: Path) -> None:
    """``get_many`` gives what there is, and the next get says what was lost."""
    queue = ctx.Queue(cuda_ipc=True)
    _put_by_one_that_was_killed(ctx, queue, tmp_path)
    queue.put(5)
    assert queue.get_many(4, 5, device="cuda:0") == [5]
    with pytest.raises(tp.PeerLost):
        queue.get(timeout=0)
    with pytest.raises(tp.Empty):
        queue.get(timeout=0)


def test_device_blocks_are_bounded(ctx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all device blocks are in use, messages are staged without delay. A put that fails gives its block back."""
    there = StandIn(tmp_path, size=5 * (2 << 20) * 8 // 2).install(
        monkeypatch.setattr
    )  # two blocks and a half may be lent
    queue = ctx.Queue(3, cuda_ipc=True)
    queue.put(_gpu(there))
    queue.get(device="cuda:0")
    for _ in range(3):
        queue.put(_gpu(there))
    assert queue.statistics().on_device == 1
    assert queue.statistics().staged_because == "all device blocks are in use"
    with pytest.raises(tp.Full):
        queue.put(_gpu(there), timeout=0)
    for _ in range(3):
        queue.get(device="cuda:0")
    for number in range(20):
        queue.put(_gpu(there, number))
        assert torch.equal(queue.get(device="cuda:0"), zoo.bits(torch.int32, ITEMS, seed=number))
    assert queue.statistics().on_device == 21
    _delete_all(tmp_path)
    there.close()


def test_a_full_queue_gives_the_device_block_back(ctx: Any, there: StandIn) -> None:
    """A put that fails leaves no device block behind."""
    queue = ctx.Queue(1, cuda_ipc=True)
    queue.put(_gpu(there))
    queue.get(device="cuda:0")
    queue.put(1)
    for _ in range(3):
        with pytest.raises(tp.Full):
            queue.put(_gpu(there), timeout=0)
    there.blocks._take_back()
    assert lent_blocks(there.blocks) == []
    assert len(there.blocks._made) == 2
    assert queue.get() == 1


def test_opened_blocks_of_the_dead_are_closed(there: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is opened once. Those whose owner is gone are closed when the next one is opened."""
    other = StandIn(tmp_path)
    assert other.blocks.lends(0)
    made = [other.blocks._make(2 << 20) for _ in range(3)]
    for block in made * 2:
        there.blocks.copy_out(block.name, 0, 10, None)
    assert there.files.calls == ["open"] * 3
    monkeypatch.setattr("tensorpipe_ipc.cuda.device_blocks.is_alive", lambda owner: False)
    there.blocks.copy_out(other.blocks._make(2 << 20).name, 0, 10, None)
    assert there.files.calls[3:] == ["close"] * 3 + ["open"]
    other.close()


def test_two_threads_may_close_those_of_the_dead_at_one_moment(
    there: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, both = StandIn(tmp_path), threading.Barrier(2, timeout=PATIENCE)
    assert other.blocks.lends(0)
    first, *others = [other.blocks._make(2 << 20) for _ in range(3)]
    there.blocks.copy_out(first.name, 0, 10, None)
    monkeypatch.setattr("tensorpipe_ipc.cuda.device_blocks.is_alive", lambda owner: both.wait() > 1)
    opening = [in_thread(functools.partial(there.blocks.copy_out, each.name, 0, 10, None)) for each in others]
    for opened in opening:
        opened()
    assert there.files.calls.count("close") == 1
    other.close()


@pytest.mark.parametrize("name", ["gpu", "handle", "nbytes", "token", "frames", "start"])
def test_names_are_looked_at(ctx: Any, there: StandIn, name: str) -> None:
    """Whatever is no name, or goes beyond its block, is refused by a ProtocolError before CUDA is asked."""
    assert there.blocks.lends(0)
    block = there.blocks.test_block().name
    wrong = {"gpu": b"short", "handle": b"short", "nbytes": 5, "token": 0}
    frames = ((0, 0),)
    if name in wrong:
        block = msgspec.structs.replace(block, **{name: wrong[name]})
        with pytest.raises(ProtocolError, match="cannot be read"):
            unpack_placement(msgspec.msgpack.encode(DevicePlacement(b"", (block,), frames)))
        return
    frames = ((0, 0), (0, 0)) if name == "frames" else ((0, (2 << 20) - 4),)
    queue = ctx.Queue(cuda_ipc=True)
    queue.put(torch.zeros(ITEMS))
    there.files.calls.clear()

    def decode(metadata: bytes, payload: Any) -> Any:
        schema = schema_of(parts_of(metadata)[1])
        with pytest.raises(
            ProtocolError, match="places of 2 frames" if name == "frames" else "a frame of 400000 bytes"
        ):
            on_device.tree_of(
                DevicePlacement(b"", (block,), frames),
                b"",
                schema,
                payload,
                serializer_named("raw"),
                AS_SENT,
                there.blocks,
            )
        return "looked at"

    assert shared_queue_of(queue).get(1, decode) == "looked at"
    assert there.files.calls == []


@pytest.mark.parametrize("binds", [True, False])
def test_endpoints(there: StandIn, tmp_path: Path, binds: bool) -> None:
    """Unrelated processes do the same through shared memory: offered, tested, lent; and what dies with its producer is said."""
    with Child() as child:
        child.call(gpu_stand_in.install, str(tmp_path))
        endpoint = (
            f"ipc://{tmp_path}/s" if binds else child.call(children.open_consumer, "tcp://127.0.0.1:0", device="cuda:0")
        )
        with tp.Producer(endpoint, bind=binds, cuda_ipc=True) as producer:
            if binds:
                child.call(children.open_consumer, endpoint, bind=False, device="cuda:0")
            for number in range(4):
                sent = there.cuda.put_on(torch.full((ITEMS,), float(number)))
                child.begin(gpu_stand_in.take_sums, 1)
                producer.put(sent, 10)
                ((total, opened),) = child.result()
                assert total == ITEMS * number
                assert opened == (number < 2), "the test block, and the device block"
            assert producer.statistics().on_device == 3
            assert producer.statistics().staged_because == ""


def test_frames_never_carry_names(there: StandIn, tmp_path: Path) -> None:
    """Ends without shared memory between them send tensors as frames, whatever was asked for."""
    with (
        tp.Consumer("tcp://127.0.0.1:0", shared_memory="off", device="cuda:0") as consumer,
        tp.Producer(consumer.endpoint, cuda_ipc=True) as producer,
    ):
        for number in range(3):
            put = children.in_thread(functools.partial(producer.put, _gpu(there, number), 10))
            found = consumer.get(10)
            put()
            there.staging.finish()
            assert torch.equal(found, zoo.bits(torch.int32, ITEMS, seed=number))
        assert producer.statistics().on_device == 0
    assert there.files.calls == []


def test_it_is_off_by_default(ctx: Any, there: StandIn) -> None:
    """Nothing is offered, and nothing said, where it was not asked for."""
    queue = ctx.Queue()
    for _ in range(2):
        queue.put(_gpu(there))
        queue.get(device="cuda:0")
    assert there.files.calls == []
    assert queue.statistics().staged_because == ""
