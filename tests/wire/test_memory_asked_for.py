"""The memory that n received bytes can make their receiver allocate: n + 64 KiB, whatever they announce.

The tests measure with tracemalloc, from the first look at the frames to the refusal. Two costs are not in the promise.
The limit on nodes bounds both: they are at most the cost of the valid tree.

* A *valid* tree costs its own Python objects: a list of 100,000 None takes 8 bytes for each.
* A message that turns out wrong at the very end costs what had been made of it. Examples are a dict key that occurs
  twice, a value of the wrong type, and a payload that its serializer cannot read.
"""

from __future__ import annotations

import gc
import os
import resource
import struct
import traceback
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exchange import forget_schemas, read_parts, sent

from tensorpipe_ipc.errors import TensorPipeError
from tensorpipe_ipc.serializers.narrowing import NARROW
from tensorpipe_ipc.wire import header
from tensorpipe_ipc.wire.layout import BULK
from tensorpipe_ipc.wire.metas import MAX_NBYTES

MARGIN = 1 << 16
MANY = 9_000  # a list of so many has 72 kB: what is made for each of them is over the margin


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def meta(nbytes: int, dims: tuple[int, ...] = (), code: int = 2) -> bytes:
    return struct.pack("<BBBBQ", code, 0, len(dims), 0, nbytes) + struct.pack(f"<{len(dims)}q", *dims)


def data(spec: bytes, spans: bytes = b"", metas: bytes = b"", counts: tuple[int, int] = (0, 0)) -> bytes:
    return b"\x03raw" + u32(len(spec)) + spec + u32(counts[0]) + spans + u32(counts[1]) + metas


def several(op: int, count: int = MANY) -> bytes:
    return b"\x20" + u32(count) + bytes([op]) * count


def several_views(count: int) -> bytes:
    return b"".join(struct.pack("<BBBBQQ", 10, 2, 0, 11, span, 0) for span in range(count))


def message(schema: bytes, values: bytes = b"", *frames: bytes) -> list[bytes]:
    return [header.pack(4, 1, schema, values), *frames]


ZERO_VIEW = struct.pack("<BBBBQ", 2, 2, 0, 0, 0) + struct.pack("<Q", 0)
HOSTILE: dict[str, Callable[[], list[bytes]]] = {
    "a huge shape": lambda: message(data(b"\x10", metas=meta(1 << 47, (1 << 47,)), counts=(0, 1))),
    "a huge shape, some bytes of it": lambda: message(
        data(b"\x10", metas=meta(1 << 47, (1 << 47,)), counts=(0, 1)), b"", bytes(BULK)
    ),
    "a huge shape and a small payload": lambda: message(
        data(b"\x10", metas=meta(4, (1 << 47,)), counts=(0, 1)), b"", bytes(4)
    ),
    "64 dimensions of one too many": lambda: message(data(b"\x10", metas=meta(4, (3,) * 64), counts=(0, 1))),
    "a list of 2**32 nodes": lambda: message(data(b"\x20" + u32(0xFFFFFFFF))),
    "a dict of 2**32 keys": lambda: message(data(b"\x22" + u32(0xFFFFFFFF) + bytes(1000))),
    "a Size of 2**32 numbers": lambda: message(data(b"\x06" + u32(0xFFFFFFFF))),
    "2**32 leaf metas": lambda: message(data(b"\x10", metas=meta(4), counts=(0, 0xFFFFFFFF))),
    "2**32 spans": lambda: message(data(b"\x10", counts=(0xFFFFFFFF, 1))),
    "spans of 2**48 bytes": lambda: message(
        data(b"\x10", struct.pack("<QQ", MAX_NBYTES, 4) * MANY, ZERO_VIEW, counts=(MANY, 1)), b"", bytes(4)
    ),
    "many leaves that no frame brings": lambda: message(data(several(0x10), b"", meta(1) * MANY, counts=(0, MANY))),
    "many large leaves, many empty frames": lambda: message(
        data(several(0x10), b"", meta(BULK, (BULK,)) * MANY, counts=(0, MANY)), b"", *[b""] * MANY
    ),
    "many metas, then a bad one": lambda: message(
        data(several(0x10), b"", meta(1) * (MANY - 1) + meta(1, code=99), counts=(0, MANY)), b"", bytes(MANY)
    ),
    "many views, then a bad one": lambda: message(
        data(several(0x10), struct.pack("<QQ", 8, 8) * MANY, several_views(MANY - 1) + meta(1), (MANY, MANY)), b"", b"x"
    ),
    "many metas and a small tree": lambda: message(data(b"\x10", b"", meta(0, (0,)) * MANY, counts=(0, MANY))),
    "many nodes, then a bad one": lambda: message(data(several(0x00)[:-1] + b"\xff")),
    "many lists, then a bad one": lambda: message(data(b"\x20" + u32(20_000) + (b"\x20" + u32(0)) * 19_999 + b"\xff")),
    "many keys, then a bad one": lambda: message(
        data(b"\x22" + u32(20_000) + b"\x01\0\x05" * 19_999 + b"\x01\0\xc1" * 2)
    ),
    "many names of a type that is unknown": lambda: message(
        data(b"\x24\x01\0x" + u32(20_000) + b"\x01\0a" * 20_000 + bytes(20_000))
    ),
    "nested 10,000 deep": lambda: message(data((b"\x20" + u32(1)) * 10_000 + b"\0")),
    "one key nested 60,000 deep": lambda: message(
        data(b"\x22" + u32(1) + struct.pack("<H", 60_001) + b"\x91" * 60_000 + b"\1\0")
    ),
    "values: an array of 2**32": lambda: message(data(b"\x01"), b"\xdd\xff\xff\xff\xff"),
    "values: more than the tree has": lambda: message(data(b"\x01"), b"\xdd" + struct.pack(">I", MANY) + bytes(MANY)),
    "values: as many as the tree has, but cut short": lambda: message(
        data(several(0x01)), b"\xdd" + struct.pack(">I", MANY) + b"\xa2ab" * (MANY - 1)
    ),
    "values: a text of 2**32 bytes": lambda: message(data(b"\x01"), b"\x91\xdb\xff\xff\xff\xff"),
    "values: an array of arrays of 2**32": lambda: message(data(b"\x01"), b"\x91" + b"\xdd\xff\xff\xff\xff" * 5000),
    "values: nested 100,000 deep": lambda: message(data(b"\x01"), b"\x91" * MANY + b"\1"),
    "a header over its limit": lambda: message(bytes(1 << 23)),
    "a HELLO over its limit": lambda: [header.pack(1, 0, bytes(1 << 20))],
    "garbage": lambda: [b"GET / HTTP/1.1\r\n" * 10_000],
}


def peak(frames: list[bytes]) -> tuple[int, BaseException | None]:
    """Bytes that Python asked for at most while it read the frames, and what it raised."""
    first, *payloads = [memoryview(frame) for frame in frames]
    forget_schemas()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        read_parts(first, payloads)
        raised = None
    except TensorPipeError as error:
        raised = error.with_traceback(None)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        gc.enable()
    return most, raised


@pytest.mark.parametrize("name", HOSTILE)
def test_a_refusal_asks_for_no_more_than_arrived(name: str) -> None:
    """Whatever a message announces, refusing it takes at most its own length and 64 KiB."""
    frames = HOSTILE[name]()
    most, raised = peak(frames)
    received = sum(map(len, frames))
    assert raised is not None, "it was not refused"
    assert most <= received + MARGIN, f"{most:,} bytes for {received:,} received ({raised})"


@pytest.mark.parametrize("serializer", ["raw", "numpy", "torch_save"])
def test_a_tensor_asks_for_no_more_than_arrived(serializer: str) -> None:
    """A valid tensor of 4 MB is read on its frame (writable) or copied once; nothing else of its size is made."""
    frames = [bytearray(frame) for frame in sent(torch.zeros(1 << 20), serializer)]
    most, raised = peak(frames)  # type: ignore[arg-type]
    assert raised is None
    assert most <= sum(map(len, frames)) + MARGIN


def test_a_valid_tree_costs_its_own_objects() -> None:
    """A list of 9,000 None: its list, and as much again for the plan of it, which is kept: 8 bytes a node each.

    More than n + 64 KiB, for a valid tree of one byte a node cannot be had for less.
    """
    frames = message(data(several(0x00)))
    most, raised = peak(frames)
    assert raised is None
    assert most <= sum(map(len, frames)) + 32 * MANY + MARGIN


SMALL: dict[str, Callable[[int], list[bytes]]] = {
    "empty tensors": lambda count: message(data(several(0x10, count), b"", meta(0, (0,)) * count, (0, count))),
    "empty arrays": lambda count: message(data(several(0x14, count), b"", meta(0, (0,)) * count, (0, count))),
    "parameters": lambda count: message(data(several(0x12, count), b"", meta(0, (0,), 11) * count, (0, count))),
    "dicts": lambda count: message(data(b"\x20" + u32(count) + (b"\x22" + u32(0)) * count)),
    "ordered dicts": lambda count: message(data(b"\x20" + u32(count) + (b"\x25\x22" + u32(0) + b"\0") * count)),
    "NumPy's scalars": lambda count: message(
        data(b"\x20" + u32(count) + b"\x08\x0c" * count), b"\xdc" + struct.pack(">H", count) + bytes(count)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_smallest_nodes_cost_a_bounded_number_of_bytes_each(name: str) -> None:
    """A tree of nothing but nodes: 1,200 bytes of Python objects each, plan and tree together, and not more."""
    count = 1000
    frames = SMALL[name](count)
    most, raised = peak(frames)
    assert raised is None
    assert most <= sum(map(len, frames)) + 1200 * count + MARGIN


def test_a_number_of_a_size_costs_six_times_its_bytes() -> None:
    """A torch.Size is a tuple of Python's numbers, made of another one: 48 bytes for each that took 8, of which 40 stay."""
    frames = message(data(b"\x06" + u32(MANY) + struct.pack(f"<{MANY}q", *range(1 << 40, (1 << 40) + MANY))))
    most, raised = peak(frames)
    assert raised is None
    assert most <= sum(map(len, frames)) + 48 * MANY + MARGIN


def _refuse_all(room: int) -> None:
    """Read all that is to be refused, in a process that may map so many bytes more than it has."""
    hostile = [(name, make()) for name, make in HOSTILE.items()]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room,) * 2)
    for name, frames in hostile:
        first, *payloads = [memoryview(frame) for frame in frames]
        try:
            read_parts(first, payloads)
        except TensorPipeError:
            continue
        raise AssertionError(name)


def _most_resident() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.parametrize("narrow", NARROW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_floats_that_crossed_narrow_cost_eight_times_their_bytes_at_most(
    dtype: torch.dtype, narrow: torch.dtype
) -> None:
    """As they are restored, and no second copy of them is made on the way."""
    count = 1 << 24  # so that malloc has none of it from before
    came = [memoryview(bytearray(frame)) for frame in sent(torch.ones(count, dtype=dtype), wire_dtype=narrow)]
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the most so far is what there is now
    before = _most_resident()
    restored = read_parts(came[0], came[1:])
    grown = _most_resident() - before
    assert restored.dtype == dtype
    assert restored.nbytes <= 8 * sum(map(len, came))
    assert grown <= 8 * sum(map(len, came)) + (1 << 22)


def test_refusals_fit_into_a_bounded_address_space() -> None:
    """All of it is refused, and nothing else raised, in a process that may map 32 MiB more than it has."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            forget_schemas()
            _refuse_all(32 << 20)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
