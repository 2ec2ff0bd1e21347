"""Whole messages: every animal of the zoo through every serializer, and whose memory the frames are."""

from __future__ import annotations

import gc
import struct
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from exchange import OWN, read, received, round_trip, sent

from tensorpipe_ipc.errors import UnsupportedLeaf
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.wire import header, message
from tensorpipe_ipc.wire.layout import BULK

SERIALIZERS = ("raw", "numpy", "torch_save")
HUGE = 1 << 40


def _frames(tree: Any, serializer: str = "raw") -> tuple[message.EncodedMessage, list[Any]]:
    outgoing = message.encode(tree, serializer_named(serializer))
    return outgoing, outgoing.frames(1)


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_every_animal_comes_back(serializer: str) -> None:
    """Every kind of tree arrives bit for bit, whether its memory is its own or its frame's, or is refused by nature."""
    for name in zoo.ZOO:
        try:
            frames = sent(zoo.make(name), serializer)
        except UnsupportedLeaf as error:
            assert zoo.refused_by(serializer, name), f"{name}: {error}"
            assert "NumPy has no" in str(error), name
            continue
        assert not zoo.refused_by(serializer, name), name
        for own in (0, OWN, HUGE):
            zoo.same(zoo.make(name), received(frames, own), name, strides=serializer != "numpy")


@pytest.mark.parametrize("own", [0, HUGE])
def test_what_arrives_is_writable(own: int) -> None:
    """Every tensor and array that arrives can be written to, in its own memory and on its frame."""
    tree = round_trip({"x": torch.ones(3), "large": torch.ones(BULK), "a": np.ones(2)}, own=own)
    for leaf in tree.values():
        leaf[:] = 2
        assert (leaf == 2).all()


def test_own_decides_whose_memory_it_is() -> None:
    """Up to ``own`` bytes a tensor gets memory of its own, and above it lies on its frame."""
    frames = [memoryview(bytearray(frame)) for frame in sent([torch.zeros(BULK, dtype=torch.uint8)])]
    for own, shared in ((BULK, False), (BULK - 1, True)):
        (tensor,) = read(frames, own)
        frames[1][0] = 0
        tensor[0] = 7
        assert (frames[1][0] == 7) is shared


@pytest.mark.parametrize("name", ["small", "large", "channels last", "transposed", "0-d", "bfloat16", "requires_grad"])
def test_raw_copies_nothing_to_encode(name: str) -> None:
    """The payload of a dense tensor is its memory: what is written to the tensor is seen in the payload."""
    tensor = {
        "small": torch.zeros(5),
        "large": torch.zeros(BULK),
        "channels last": torch.zeros(2, 3, 50, 70).to(memory_format=torch.channels_last),
        "transposed": torch.zeros(40, 50).t(),
        "0-d": torch.zeros(()),
        "bfloat16": torch.zeros(3, 3, dtype=torch.bfloat16),
        "requires_grad": torch.zeros(4, requires_grad=True),
    }[name]
    outgoing = message.encode(tensor, serializer_named("raw"))
    (payload,) = outgoing.payloads
    assert not any(bytes(payload))
    with torch.no_grad():
        tensor.fill_(1)
    assert bytes(payload).count(b"\x00" * tensor.itemsize) == 0
    zoo.same(tensor, received(outgoing.frames(1)))
    assert outgoing.nbytes == tensor.nbytes


def test_large_leaves_of_a_tree_are_not_copied_either() -> None:
    """In a tree each large leaf is a frame that is its memory, and shared memory is one frame."""
    base = torch.zeros(BULK)
    tree = {"large": torch.zeros(BULK, dtype=torch.uint8), "views": [base[10:], base[: BULK // 2]]}
    outgoing, frames = _frames(tree)
    assert [len(frame) for frame in frames[1:]] == [base.nbytes, BULK]
    tree["large"][5] = 9
    base[3] = 1.0
    assert frames[2][5] in (9, b"\x09")
    assert bytes(frames[1])[12:16] == b"\x00\x00\x80\x3f"
    del outgoing


def test_a_strided_tensor_is_gathered_once() -> None:
    """A tensor with gaps costs one copy of its items, and no more of its memory than that."""
    tensor = torch.zeros(1000, 64)[:, ::2]
    outgoing, (_, frame) = _frames(tensor)
    assert len(frame) == tensor.numel() * 4
    tensor.fill_(1)
    assert not any(bytes(frame))
    assert memoryview(frame).obj is not None
    del outgoing


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(20_000.0).view(100, 200)[:, ::2],
        lambda: torch.arange(6.0).expand(2000, 6),
        lambda: torch.view_as_complex(torch.arange(20_000.0).view(-1, 2)).conj(),
    ],
)
def test_a_gathered_copy_lives_as_long_as_its_frame(make: Any) -> None:
    """The payload of a copy keeps the copy: with all else gone and memory used anew, its bytes are what they were."""
    want = zoo.content(make())
    frame = message.encode(make(), serializer_named("raw")).payloads[0]  # the message and all it keeps are gone
    gc.collect()
    others = [torch.full((size,), -1.0) for size in (10_000, 12_000, 20_000) for _ in range(20)]
    assert bytes(frame) == want
    del others


@pytest.mark.parametrize(
    "make", [lambda: torch.arange(50_000.0), lambda: np.arange(50_000, dtype="f4")[::-1].copy()[::-1]]
)
def test_a_message_keeps_what_its_frames_are_views_of(make: Any) -> None:
    """As long as the message lives, so does the memory of a tensor (or of an array's copy) that nobody else holds."""
    outgoing, (_, frame) = _frames(make())
    gc.collect()
    others = [torch.full((50_000,), -1.0) for _ in range(20)]
    assert bytes(frame) == torch.arange(50_000.0).numpy().tobytes()
    del outgoing, others


def test_shared_memory_stays_shared() -> None:
    """Leaves that share memory arrive as views of one memory: what is written to one is seen in the other."""
    for serializer in SERIALIZERS:
        base = torch.arange(24.0)
        tree = round_trip({"base": base, "row": base.view(4, 6)[1], "bytes": base.view(torch.uint8)}, serializer)
        tree["base"][6] = 99
        assert tree["row"][0] == 99
        assert bytes(tree["bytes"][24:28].tolist()) == struct.pack("<f", 99.0)


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_arrays_of_two_lengths_at_one_address_share(serializer: str) -> None:
    """Two arrays that begin at one address are two storages of one memory, and the shorter may come first."""
    array = np.arange(24.0)
    head, whole = round_trip([array[:6], array], serializer)
    assert (whole == array).all()
    head[0] = 7
    assert whole[0] == 7


def test_a_storage_cut_under_its_tensors_is_left_alone() -> None:
    """Looking for shared memory never makes a storage grow."""
    tensor = torch.ones(100)
    views = [tensor[:2], tensor]
    tensor.untyped_storage().resize_(8)
    try:
        message.encode(views, serializer_named("raw"))
    finally:
        assert tensor.untyped_storage().nbytes() == 8


def test_only_the_window_that_is_used_travels() -> None:
    """Of a large memory that two small leaves share, only the bytes from the first to the last travel."""
    base = torch.zeros(1 << 20)
    outgoing, _ = _frames([base[1000:1010], base[1005:1020]])
    assert outgoing.nbytes <= 20 * 4 + 64


def test_windows_of_several_dtypes_stay_aligned() -> None:
    """A window of wide items stays aligned in its memory even where a window of bytes begins at an odd place."""
    base = torch.arange(160, dtype=torch.uint8)
    tree = [base[69:150], base.view(torch.complex128)[5:8]]
    zoo.same(tree, round_trip(tree))


OF_ANY_DTYPE: dict[str, tuple[Any, Any]] = {  # a tree, and the tensor of complex numbers that is made of what arrives
    "complex numbers": (torch.ones(BULK, dtype=torch.complex128), lambda tree: tree),
    "pairs of floats": (torch.ones(BULK, 2, dtype=torch.float64), torch.view_as_complex),
    "an array": (np.ones(BULK, complex), torch.from_numpy),
    "views of one memory": ((base := torch.ones(BULK, dtype=torch.complex128), base[1:]), lambda tree: tree[1]),
    "a storage": (
        torch.ones(BULK, dtype=torch.complex128).untyped_storage(),
        lambda tree: torch.empty(0, dtype=torch.complex128).set_(tree),
    ),
    "a view and its storage": (
        (base := torch.ones(4 * BULK, dtype=torch.uint8), base.untyped_storage()),
        lambda tree: torch.empty(0, dtype=torch.complex128).set_(tree[1]),
    ),
}


@pytest.mark.parametrize("name", ["two storages", "a storage and an array", "a typed storage and a tensor"])
def test_a_storage_arrives_as_long_as_it_was(name: str) -> None:
    """Also where another leaf begins at its address and is longer."""
    array = np.arange(80, dtype=np.uint8)
    short = torch.from_numpy(array[:16]).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=short, dtype=torch.float32, _internal=True)  # type: ignore[no-untyped-call]
    tree = {
        "two storages": [short, torch.from_numpy(array).untyped_storage()],
        "a storage and an array": [array, short],
        "a typed storage and a tensor": [typed, torch.from_numpy(array), torch.from_numpy(array)[3:]],
    }[name]
    zoo.same(tree, round_trip(tree))


@pytest.mark.parametrize("tree", [[(base := torch.ones(9)), base[2:]], [b"bytes", torch.ones(3)]])
def test_tuples_in_keys_change_nothing_of_the_leaves(tree: Any) -> None:
    """Each of them counts as a node, and is none."""
    for keys in (((1, 2), "b"), (((0,), ()), (1, "x"))):
        zoo.same(dict(zip(keys, tree, strict=True)), round_trip(dict(zip(keys, tree, strict=True))))


def _crooked(frames: list[bytes]) -> list[memoryview]:
    """The frames where libzmq puts large ones: at 8 beyond a multiple of 16."""
    found = []
    for frame in frames:
        memory = np.zeros(len(frame) + 16, np.uint8)
        at = (8 - memory.ctypes.data) % 16
        memory[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
        found.append(memoryview(memory)[at : at + len(frame)])  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("serializer", ["raw", "numpy"])
@pytest.mark.parametrize("name", OF_ANY_DTYPE)
def test_wide_items_lie_where_torch_computes(name: str, serializer: str) -> None:
    """Torch's kernels crash on complex numbers at no multiple of 16, and large frames lie at 8 beyond one."""
    tree, to_complex = OF_ANY_DTYPE[name]
    tensor = to_complex(read(_crooked(sent(tree, serializer)), own=0))
    assert tensor.data_ptr() % tensor.itemsize == 0
    assert tensor.gather(0, torch.arange(9)).tolist() == tensor[:9].tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
def test_other_items_stay_where_they_came(dtype: torch.dtype) -> None:
    """Images, floats and numbers of 8 bytes are not copied for that."""
    frames = _crooked(sent([torch.zeros(BULK, dtype=dtype), base := torch.zeros(BULK, dtype=dtype), base[1:]]))
    for leaf in read(frames, own=0):
        leaf[-1] = 1
    assert all(any(frame[-dtype.itemsize :]) for frame in frames[1:])


def test_frames_are_laid_out_as_documented() -> None:
    """Small payloads follow the header, each at a multiple of 64; large ones have a frame each; empty ones have none."""
    small, large = torch.full((3,), 1, dtype=torch.uint8), torch.full((BULK,), 2, dtype=torch.uint8)
    frames = sent([small, large, torch.empty(0), small + 1, torch.full((BULK - 1,), 3, dtype=torch.uint8)])
    packed = bytes(header.unpack(memoryview(frames[0])).packed)
    assert [len(frame) for frame in (packed, *frames[1:])] == [128 + BULK - 1, BULK]
    assert packed[:3] == b"\1\1\1"
    assert packed[64:67] == b"\2\2\2"
    assert packed[3:64] == bytes(61)
    assert packed[128:] == b"\3" * (BULK - 1)
    assert frames[1] == b"\2" * BULK


def test_a_tree_without_tensors_is_one_frame() -> None:
    """A tree of numbers and text needs no payload frame."""
    frames = sent({"step": 1, "name": "x"})
    assert len(frames) == 1
    assert received(frames) == {"step": 1, "name": "x"}


@pytest.mark.parametrize("tree", [{f"{index}" * 9000: None for index in range(1000)}, [torch.ones([1] * 64)] * 17_000])
def test_a_header_over_the_limit_is_refused_where_it_is_made(tree: Any) -> None:
    """A tree whose keys or shapes need too long a header is the sender's error, not the receiver's."""
    with pytest.raises(UnsupportedLeaf, match="over 8,388,584 together"):
        message.encode(tree, serializer_named("raw"))


def test_long_text_is_refused_with_advice() -> None:
    """Text of over 4 MiB is refused, and bytes are named instead; as bytes it goes."""
    with pytest.raises(UnsupportedLeaf, match="send long text as bytes"):
        message.encode("x" * (1 << 22), serializer_named("raw"))
    assert round_trip(b"x" * (1 << 22)) == b"x" * (1 << 22)


def test_the_length_of_text_has_two_sides() -> None:
    """Half of the header is for it, with the few bytes that say how long it is."""
    longest = "x" * (message.MAX_VALUES - 6)
    assert round_trip(longest) == longest
    with pytest.raises(UnsupportedLeaf, match="4,194,305 bytes of text and numbers, the limit is 4,194,304"):
        message.encode(longest + "x", serializer_named("raw"))


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_the_length_of_a_header_has_two_sides(leaves: int) -> None:
    """Schema and values fill it to the last byte, and no further; what fits is taken there, too."""

    def tree(length: int) -> Any:
        keys = [b"%5d" % number + b"k" * 65_000 for number in range(100)]
        return [dict.fromkeys([*keys, b"l" * length]), "v" * 1_840_000, *[torch.ones(1) for _ in range(leaves)]]

    def size(outgoing: message.EncodedMessage) -> int:
        return len(outgoing.schema) + len(outgoing.values)

    raw = serializer_named("raw")
    length = 300 + header.MAX_BODY - size(message.encode(tree(300), raw))
    assert size(message.encode(tree(length), raw)) == header.MAX_BODY
    got = round_trip(tree(length))
    assert [*got[0]] == [*tree(length)[0]]
    with pytest.raises(UnsupportedLeaf, match="over 8,388,584 together"):
        message.encode(tree(length + 1), raw)


@pytest.mark.parametrize("extra", [0, *range(1, 2000, 97)])
def test_a_large_frame_keeps_its_tensor(extra: int) -> None:
    """With the message and the tensor gone and memory used anew, a frame that was not copied has its bytes still."""
    frame = message.encode(torch.full((BULK + extra,), 7, dtype=torch.uint8), serializer_named("raw")).frames(1)[1]
    gc.collect()
    others = [torch.zeros(BULK + extra, dtype=torch.uint8) for _ in range(8)]
    assert bytes(frame) == b"\7" * (BULK + extra)
    del others
