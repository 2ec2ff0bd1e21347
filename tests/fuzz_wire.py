"""A fuzzer of the wire: valid messages, damaged in ways that know their structure, must end in a tree or in our errors.

Messages are frames from a socket, or lie in a block of shared memory (metadata and payload); so are what ends say of
themselves: HELLO, WELCOME and REFUSED in frames, the status in an end's file, and the rendezvous file.

The tests run some thousands. By hand, with the whole project's root as the working directory::

    python -m tests.fuzz_wire --examples 1000000 --seed 1

It prints how many inputs there were, how they ended, by class, and how long it took; an exception of any other class
ends it, with the seed and number that make the input again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import random
import struct
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))  # for the zoo, where this runs without pytest

import msgspec
import numpy as np
import torch
import zoo
from exchange import encoded, forget_schemas, read, sent

from tensorpipe_ipc.endpoints import resend_buffer
from tensorpipe_ipc.endpoints.published_status import Attached, PublishedStatus, framed, read_status
from tensorpipe_ipc.endpoints.reassembly import BufferPool, Reassembly
from tensorpipe_ipc.endpoints.rendezvous_file import QueueOffer, Rendezvous, packed, unpacked
from tensorpipe_ipc.errors import TensorPipeError, UnsupportedLeaf
from tensorpipe_ipc.memory import handover
from tensorpipe_ipc.memory.leases import Octets
from tensorpipe_ipc.process import Identity
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.serializers.narrowing import narrowing
from tensorpipe_ipc.wire import header
from tensorpipe_ipc.wire.in_block import BY_REFERENCE, in_one_block, metadata_of, parts_of
from tensorpipe_ipc.wire.layout import places_of
from tensorpipe_ipc.wire.message import encode
from tensorpipe_ipc.wire.schema import ALIAS, schema_of
from tensorpipe_ipc.wire.spec import Op

Frames = list[bytes]
SOMEBODY = Identity("host", "01234567-89ab-cdef-0123-456789abcdef", 4026531836, 4242, 123456.0)
INTERESTING = [0, 1, 2, 3, 4, 0x0F, 0x10, 0x20, 0x40, 0x41, 0x7F, 0x80, 0x90, 0xC1, 0xDD, 0xFE, 0xFF]
LENGTHS = [
    0,
    1,
    2,
    64,
    65,
    255,
    1 << 16,
    (1 << 17) + 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 48,
    (1 << 62),
    (1 << 63),
    (1 << 64) - 1,
]


def corpus() -> list[Frames]:
    """Frames of the zoo's small animals through each serializer, and of the control messages."""
    base = torch.arange(12.0)
    narrowed: list[Any] = [{"x": base, "views": [base[:4], base[2:]]}, base.view(3, 4).t().double()]
    found = [sent(tree, wire_dtype=dtype) for tree in narrowed for dtype in (torch.float16, torch.float8_e5m2)]
    for serializer in ("raw", "numpy", "torch_save"):
        for name in zoo.ZOO:
            if "large" not in name and (serializer == "raw" or name in _FEW):
                try:
                    found.append(sent(zoo.make(name), serializer))
                except UnsupportedLeaf:
                    continue
    for terms in (None, header.SharedMemoryTerms("auto", 1000), header.SharedMemoryTerms("require", 0, 5, 5, "no")):
        hello = header.Hello("consumer", SOMEBODY, 64, "", ("raw", "numpy"), 3, shared_memory=terms)
        found.append([header.pack_control(header.Kind.HELLO, hello)])
        found.append([header.pack_control(header.Kind.WELCOME, hello)])
    found.append([header.pack_control(header.Kind.REFUSED, header.Refusal("because"))])
    found += [[header.pack_piece(3, header.Piece(at, 128)), bytes(64)] for at in (0, 64)]
    found += [[header.pack_piece(3, header.Piece(0, 128)), bytes(128)]]
    large = torch.arange(40_000.0)
    found += [in_pieces(tree) for tree in (large, [large[1:], large[:-1]], {"x": large.double(), "n": large.int()})]
    return found + [[header.pack(header.Kind.CREDIT, 9)], [header.pack(header.Kind.GOODBYE, 9)]]


def in_pieces(tree: Any) -> Frames:
    """The frames of a message whose floats were narrowed, piece by piece, and at last its header."""
    encoder = narrowing(serializer_named("raw"), torch.float16)
    assert encoder is not None
    with mock.patch.object(resend_buffer, "PIECE", 1 << 16):  # there may be smaller ones
        parts = resend_buffer.ResendBuffer().keep(resend_buffer.SentMessage(3), encode(tree, encoder))
        return [bytes(frame) for part in parts for frame in part]


def blocks() -> list[Frames]:
    """Return blocks of shared memory, as metadata and payload: small animals of the zoo, and messages by reference."""
    found = []
    for name in zoo.ZOO:
        if "large" not in name:
            with contextlib.suppress(UnsupportedLeaf):
                message = encoded(zoo.make(name))
                block, metadata = in_one_block(message)
                payload = bytearray(block.nbytes)
                block.write_into(memoryview(payload))
                found.append([metadata, bytes(payload)])
    for tree in (torch.arange(4.0), {"x": torch.arange(4.0), "y": 5}):
        message = encoded(tree)
        values = message.values
        where = struct.pack("<I", len(values)) + values + struct.pack("<Q", 64)
        found.append([metadata_of(BY_REFERENCE, message.schema, where), bytes(64) + bytes(message.payloads[0])])
    return found


def posted() -> list[Frames]:
    """Published statuses, as they stand in an end's file."""
    peer = Attached("producer", SOMEBODY, "shared memory", True)
    whole = PublishedStatus("tcp://127.0.0.1:5555", "consumer", True, SOMEBODY, (peer, peer), "because")
    return [[framed(whole)], [framed(PublishedStatus("ipc:///x", "producer", False, SOMEBODY))]]


def written() -> list[Frames]:
    """Rendezvous files."""
    offer = QueueOffer(5, 1 << 32 | 77, 64, (7, 1 << 30), (8, 123), (9, 124))
    terms = header.SharedMemoryTerms("auto", 1000)
    ends = [
        header.Hello("consumer", SOMEBODY, 64, "", ("raw", "numpy"), 0, shared_memory=terms, end=99, round=1),
        header.Hello("producer", SOMEBODY, 8, "raw", (), 0, shared_memory=terms, end=1 << 40),
    ]
    return [
        [packed(Rendezvous("0" * 24 + ".rendezvous", (25, 1 << 33), "", end, (offer,) * count))]
        for end in ends
        for count in (0, 1, 2)
    ]


def made_up(rng: random.Random, target: str) -> Frames:
    """A message put together by the rules of its format, of what once cost more than it was.

    Views of one span with any strides; keys that hash alike; ordered dicts, scalars and classes of one's own; short pieces of
    several dtypes; too many frames.
    """
    if target == "frames" and rng.random() < 0.1:
        return _made_up_pieces(rng)
    spec, kinds, values = _node(rng, 0)
    spans = [rng.choice((0, 1, 8, 64, 200, 4096)) for _ in range(rng.choice((0, 1, 1, 2)))]
    metas, sizes = [], list(spans)
    for kind in kinds:
        if spans and kind != Op.BYTES and rng.random() < 0.7:
            metas.append(_made_up_view(rng, kind, spans))
        else:
            code, item = rng.choice(((2, 1), (11, 4), (9, 8), (13, 2))) if kind in (Op.TENSOR, Op.PARAMETER) else (2, 1)
            shape = [rng.choice((0, 1, 2, 3, 17)) for _ in range(1 if kind != Op.TENSOR else rng.randrange(4))]
            sizes.append(item * math.prod(shape))
            metas.append(struct.pack(f"<BBBBQ{len(shape)}q", code, 0, len(shape), 0, sizes[-1], *shape))
    packed = b"".join(struct.pack("<QQ", nbytes, nbytes) for nbytes in spans)
    head = b"\x03raw" + struct.pack("<I", len(spec)) + spec + struct.pack("<I", len(spans)) + packed
    schema = head + struct.pack("<I", len(metas)) + b"".join(metas)
    said = msgspec.msgpack.encode(values) if values else b""
    places = places_of(sizes)[0]
    payload = rng.randbytes(max((end for _, _, end in places), default=0))
    if target == "blocks":
        return [metadata_of(0, schema, said), payload]
    surplus = [b"" if rng.random() < 0.5 else b"x"] * rng.choice((0, 0, 0, 0, 1, 50))
    return [header.pack(header.Kind.DATA, 1, schema, said) + payload, *surplus]


def _made_up_view(rng: random.Random, kind: int, spans: list[int]) -> bytes:
    span = rng.randrange(len(spans))
    ndim = rng.choice((0, 1, 1, 2, 3)) if kind in (Op.TENSOR, Op.NDARRAY) else 1
    shape = [rng.choice((0, 1, 2, 3, spans[span], 1 << 20, 1 << 46)) for _ in range(ndim)]
    strides = [rng.choice((0, 0, 1, 1, 2, 8)) for _ in range(ndim)]
    code = rng.choice((2, 11)) if kind == Op.TENSOR else 2
    numbers = struct.pack(f"<{ndim}qQ{ndim}q", *shape, rng.choice((0, 0, 4)), *strides)
    return struct.pack("<BBBBQ", code, 2, ndim, 0, span) + numbers


def _node(rng: random.Random, depth: int) -> tuple[bytes, list[int], list[Any]]:
    """A node: its spec, the kinds of its leaves, its values."""
    op = rng.choice(_MADE_UP if depth < 3 else _MADE_UP[:12])
    if Op.TENSOR <= op <= Op.TYPED:
        return bytes([op, 2] if op == Op.TYPED else [op]), [op], []
    if op == Op.SCALAR:
        code = rng.choice((1, 2, 9, 10, 11, 12, 21))
        return bytes([op, code]), [], [1.0, 0.5] if code == 21 else [rng.choice((0, 1, 255, 0.5, "1", 1 << 63))]
    if op in (Op.NONE, Op.VALUE):
        return bytes([op]), [], [7] * (op == Op.VALUE)
    count = {Op.ORDERED: 2, Op.CUSTOM: 1}.get(op, rng.choice((0, 1, 2, 3, 12)))
    children = [_node(rng, depth + 1) for _ in range(count)]
    start = bytes([op]) + struct.pack("<I", count)
    if op == Op.DICT:
        packed = [msgspec.msgpack.encode(_key(rng, number)) for number in range(count)]
        start += b"".join(struct.pack("<H", len(key)) + key for key in packed)
    elif op == Op.CUSTOM:
        start = bytes([op]) + struct.pack("<H", 4) + b"Pose"
    elif op == Op.ORDERED:
        key = msgspec.msgpack.encode(rng.choice(("a", "_metadata", "items", 5)))
        own = b"\x22" + struct.pack("<IH", 1, len(key)) + key + b"\0" if rng.random() < 0.5 else b"\0"
        children = [(b"\x22" + bytes(4), [], []), (own, [], [])]
        start = bytes([op])
    return (
        start + b"".join(child[0] for child in children),
        [kind for child in children for kind in child[1]],
        [value for child in children for value in child[2]],
    )


def _key(rng: random.Random, number: int) -> Any:
    alike = (number >> bit & 1 for bit in range(5))
    return rng.choice((f"k{number}", number, number << 44, number + 0.5, tuple(bit * ((1 << 61) - 1) for bit in alike)))


_MADE_UP = [Op.TENSOR, Op.TENSOR, Op.TENSOR, Op.TENSOR, Op.NDARRAY, Op.BYTES, Op.UNTYPED, Op.TYPED, Op.PARAMETER]
_MADE_UP += [Op.NONE, Op.VALUE, Op.SCALAR]  # up to here, without nodes
_MADE_UP += [Op.LIST, Op.TUPLE, Op.DICT, Op.DICT, Op.ORDERED, Op.CUSTOM]


def _made_up_pieces(rng: random.Random) -> Frames:
    total = rng.choice((64, 1000, 100_000, 200_000))
    found, at = list[bytes](), 0
    while at < total and len(found) < 60:
        size = min(rng.choice((1, 2, 64, 4096, 1 << 16, 1 << 17)), total - at)
        found += [header.pack_piece(3, header.Piece(at, total)), bytes(size)]
        at += size
    return found


_FEW = (
    "torch.float32",
    "torch.bool",
    "0-d",
    "empty",
    "transposed",
    "parameter",
    "shared storage",
    "mixed",
    "dataclass",
)


def damage(rng: random.Random, frames: Frames, others: list[Frames]) -> Frames:
    """Damage one to four things of a message. Half the time its lengths are set right again, so as to get deeper."""
    damaged = list(frames)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        if rng.random() < 0.1:
            _damage_frames(rng, damaged, others)
        elif damaged:
            # Mostly the header: a payload of raw is only numbers.
            index = 0 if rng.random() < 0.8 else rng.randrange(len(damaged))
            how = rng.choice(_BYTE_DAMAGE)
            damaged[index] = bytes(how(rng, bytearray(damaged[index]), rng.choice(rng.choice(others))))
    damaged = damaged or [b""]
    if rng.random() < 0.5 and len(damaged[0]) >= 24 and frames[0].startswith(header.MAGIC):
        damaged[0] = _right_lengths(frames[0], damaged[0])
    return damaged


def _damage_frames(rng: random.Random, frames: Frames, others: list[Frames]) -> None:
    how = rng.randrange(4)
    if how == 0 and frames:
        del frames[rng.randrange(len(frames))]
    elif how == 1:
        frames.insert(rng.randrange(len(frames) + 1), rng.choice(rng.choice(others)))
    elif how == 2:
        rng.shuffle(frames)
    elif frames:
        frames[rng.randrange(len(frames))] = rng.choice(rng.choice(others))


def _flip(rng: random.Random, data: bytearray, _: bytes) -> bytearray:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _byte(rng: random.Random, data: bytearray, _: bytes) -> bytearray:
    if data:
        data[rng.randrange(len(data))] = rng.choice(INTERESTING)
    return data


def _number(rng: random.Random, data: bytearray, _: bytes) -> bytearray:
    """Write a number over what may be a length or a size: 2, 4 or 8 bytes, near a limit."""
    width = rng.choice((2, 4, 8))
    if len(data) >= width:
        at = rng.randrange(len(data) - width + 1)
        value = (rng.choice(LENGTHS) + rng.choice((-1, 0, 0, 1))) % (1 << 8 * width)
        data[at : at + width] = value.to_bytes(width, "little")
    return data


def _cut(rng: random.Random, data: bytearray, _: bytes) -> bytearray:
    return data[: rng.randrange(len(data) + 1)]


def _delete(rng: random.Random, data: bytearray, _: bytes) -> bytearray:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.randrange(1, 17)]
    return data


def _insert(rng: random.Random, data: bytearray, _: bytes) -> bytearray:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randrange(1, 17))
    return data


def _repeat(rng: random.Random, data: bytearray, _: bytes) -> bytearray:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.randrange(1, 33)]
    data[start:start] = piece * rng.choice((1, 1, 2, 70))
    return data


def _splice(rng: random.Random, data: bytearray, other: bytes) -> bytearray:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


_BYTE_DAMAGE: list[Callable[[random.Random, bytearray, bytes], bytearray]]
_BYTE_DAMAGE = [_flip, _flip, _byte, _byte, _number, _number, _cut, _delete, _insert, _repeat, _splice]


def _right_lengths(before: bytes, after: bytes) -> bytes:
    """A header whose two lengths add up again: what it gained or lost is the schema's, or else the values'."""
    schema, values = struct.unpack_from("<II", before, 16)
    left = max(
        0, len(after) - 24 - (len(before) - 24 - schema - values)
    )  # the packed payloads stay as long as they were
    values = min(values, left)
    return after[:16] + struct.pack("<II", left - values, values) + after[24:]


def outcome(frames: Frames) -> str:
    """Return the outcome of a message: "tree", "control", or the class of our error. Let every other exception out."""

    def end() -> str:
        head = header.unpack(memoryview(frames[0]))
        body = {1: header.Hello, 2: header.Hello, 3: header.Refusal}.get(head.kind)
        if body is not None:
            header.unpack_control(head, body)
        if head.kind == header.Kind.PIECE:
            return _put_in_place(head, frames)
        if head.kind != header.Kind.DATA:
            return "control"
        read([memoryview(bytearray(frame)) for frame in frames])
        return "tree"

    return _ends(end)


def _put_in_place(head: header.Header, frames: Frames) -> str:
    """Return the outcome of pieces, and of their message if its header follows them."""
    assembly = Reassembly(head.sequence, header.piece_of(head), BufferPool())
    for at in range(0, len(frames) - 1, 2):
        head = header.unpack(memoryview(frames[at]))
        if head.kind != header.Kind.PIECE:
            return "control"
        if not assembly.add(header.piece_of(head), memoryview(bytearray(frames[at + 1]))):
            return "gap"
    if not len(frames) % 2:
        return "piece"
    head, found = assembly.completed(header.unpack(memoryview(frames[-1])), frames[-1:])
    schema = schema_of(head.schema)
    payloads = [memoryview(payload) for payload in head.payloads(found)]
    schema.check(payloads)
    schema.tree(head.values, payloads, serializer_named(schema.serializer), 0)
    return "tree"


def outcome_in_block(frames: Frames) -> str:
    """Return the outcome of a message in a block."""

    def end() -> str:
        payload: Octets = np.frombuffer(bytearray(frames[-1]), np.uint8)
        how, read, values = parts_of(frames[0])
        schema = schema_of(read)
        serializer = serializer_named(schema.serializer)
        if how & BY_REFERENCE:
            said, found = handover.values_and_frames(memoryview(values), schema.frame_sizes(), payload)
            schema.tree(said, found, serializer, ALIAS)
        else:
            schema.tree_in(values, memoryview(payload), serializer)
        return "tree"

    return _ends(end)


def outcome_of_status(frames: Frames) -> str:
    """Read bytes as a published status, and return "status" or "nothing".

    No bytes are an error: anybody may have posted them.
    """
    data = bytearray(frames[0])
    if len(data) >= 8 and data[0] & 1:  # so that half of them get past the checksum
        data[:8] = struct.pack("<II", zlib.crc32(data[8:]), len(data) - 8)
    return "nothing" if read_status(io.BytesIO(data)) is None else "status"


def outcome_of_file(frames: Frames) -> str:
    """Read bytes as a rendezvous file, and return "rendezvous" or "nothing".

    No bytes are an error, whoever wrote them.
    """
    data = bytearray(frames[0])
    if len(data) >= 16 and data[8] & 1:  # so that half of them get past the checksum
        data[:16] = struct.pack("<4sIII", b"TPIR", header.VERSION, zlib.crc32(data[16:]), len(data) - 16)
    return "nothing" if unpacked(bytes(data)) is None else "rendezvous"


def _ends(end: Callable[[], str]) -> str:
    try:
        return end()
    except TensorPipeError as error:
        if len(str(error)) > 5000:
            raise RuntimeError("an error that repeats what arrived") from error
        return type(error).__name__


TARGETS: dict[str, tuple[Callable[[], list[Frames]], Callable[[Frames], str]]] = {
    "frames": (corpus, outcome),
    "blocks": (blocks, outcome_in_block),
    "statuses": (posted, outcome_of_status),
    "files": (written, outcome_of_file),
}


def fuzz(examples: int, seed: int, progress: bool = False, target: str = "frames") -> Counter[str]:
    """Run so many damaged messages, and count how they end."""
    make, ending = TARGETS[target]
    messages = make()
    ends: Counter[str] = Counter()
    for number in range(examples):
        rng = random.Random(f"{seed} {number}")
        frames = rng.choice(messages)
        is_made_up = target in ("frames", "blocks") and rng.random() < 0.3
        if is_made_up:
            frames = made_up(rng, target)
        if not is_made_up or rng.random() < 0.5:
            frames = damage(rng, frames, messages)
        try:
            ends[ending(frames)] += 1
        except BaseException:
            print(f"{target}, seed {seed}, example {number}: {frames!r:.2000}", file=sys.stderr)
            raise
        if progress and not (number + 1) % 100_000:
            print(f"{number + 1:,}: {dict(ends)}", flush=True)
    forget_schemas()
    return ends


def keep(folder: Path, most: int = 12) -> None:
    """Write a few damaged messages of each end into a folder, one a line: how it ended, and its frames."""
    for target, (make, ending) in TARGETS.items():
        messages, kept = make(), dict[str, list[str]]()
        for number in range(20_000):
            rng = random.Random(f"corpus {number}")
            frames = damage(rng, rng.choice(messages), messages)
            if sum(map(len, frames)) < 600:
                line = " ".join([ending(frames), *(frame.hex() or "-" for frame in frames)])
                kept.setdefault(line.split()[0], []).append(line)
        lines = [line for end in sorted(kept) for line in kept[end][:most]]
        (folder / f"{target}.txt").write_text("\n".join(lines) + "\n")


def kept(folder: Path) -> Iterator[tuple[str, str, Frames]]:
    """Yield all that ``keep`` has written: the target, the outcome and the frames."""
    for target in TARGETS:
        for line in (folder / f"{target}.txt").read_text().splitlines():
            end, *frames = line.split()
            yield target, end, [bytes.fromhex(frame.strip("-")) for frame in frames]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_wire", description="Damage messages and read them.")
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=TARGETS, default="frames")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write a corpus there instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as under pytest: a warning that bytes can cause is an exception
    warnings.filterwarnings("ignore", "(Sparse|The PyTorch API of nested|TypedStorage|ComplexHalf|.*quantiz)")
    if arguments.keep:
        keep(arguments.keep)
        return
    start = time.perf_counter()
    ends = fuzz(arguments.examples, arguments.seed, progress=True, target=arguments.target)
    print(f"{arguments.examples:,} inputs in {time.perf_counter() - start:.0f} s, no exception but ours")
    for name, count in ends.most_common():
        print(f"{count:>12,}  {name}")


if __name__ == "__main__":
    main()
