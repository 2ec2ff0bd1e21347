"""Messages whose large GPU tensors stay on their GPU (``cuda_ipc=True``), and the consumers that may be sent one.

::

    put    which processes get from this queue?  ─ all have passed ─>  ON_DEVICE: names of device blocks, and what lies where
           │                                                           (the arena's block has all else)
           └─ one has not been asked, or has not passed ─>  staged, and OFFERS: the name of a test block
                                                            get  reads the test block, and answers in a word of its row

**The self-test, once for a pair.** Whoever offers goes by a random token. A consumer that wants a message with an offer on a
GPU opens the test block, compares its bytes, and writes what it found into its own row: ``token << 24 | incarnation << 8 |
answer``. The putting end looks there before each put, and ten times a second at who has ever begun to get from the queue.
A consumer that begins between two such looks may take a message that it has not been asked about. It reads the message all
the same, or gets an error that says why it cannot.

Where anything is in the way, messages are staged, and ``statistics()`` says what.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from typing import Annotated, Any

import msgspec
import torch

from tensorpipe_ipc.cuda.device_blocks import BlockName, DeviceBlock, DeviceBlocks, device_blocks, places_in
from tensorpipe_ipc.cuda.staging import Staged, wanted
from tensorpipe_ipc.errors import PeerLost, ProtocolError, SharedMemoryError
from tensorpipe_ipc.memory.arena import GENERATION_AT, GENERATIONS, HEADER, HELD, QUEUED
from tensorpipe_ipc.memory.row import GET, PID, answer_word, row_word
from tensorpipe_ipc.memory.rows import INCARNATIONS
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue
from tensorpipe_ipc.wire.arrival import DecodeOptions
from tensorpipe_ipc.wire.in_block import OFFERS, ON_DEVICE, in_one_block, metadata_of
from tensorpipe_ipc.wire.layout import ALIGN, BULK, Block
from tensorpipe_ipc.wire.message import EncodedMessage
from tensorpipe_ipc.wire.metas import TensorMeta
from tensorpipe_ipc.wire.schema import ALIAS, Schema

__all__ = ["CudaIpcSender", "DevicePlacement", "Undeliverable", "report_self_test", "unpack_placement", "tree_of"]

LOOK = 0.1  # seconds between two looks at which processes get from the queue
IN_THE_ARENA = -1
MOST_BLOCKS = 64  # of one message: a sender names one

PASSED, DECLINED, REFUSED, DIFFERED = 1, 2, 3, 4
_ANSWERS = {
    0: "has not answered yet",
    DECLINED: "takes tensors to the CPU",
    REFUSED: "does not see this GPU, or CUDA does not open its memory there",
    DIFFERED: "found other bytes in it than were written",
}


class DevicePlacement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The places of a message's tensors, in the place of its values.

    Attributes:
        values: the values.
        blocks: names of device blocks; of an offer, of the test block.
        frames: for each frame of the schema the block that it lies in (-1: the arena's), and where it begins there.
    """

    values: bytes
    blocks: Annotated[tuple[BlockName, ...], msgspec.Meta(min_length=1, max_length=MOST_BLOCKS)]
    frames: tuple[tuple[Annotated[int, msgspec.Meta(ge=-1, lt=MOST_BLOCKS)], Annotated[int, msgspec.Meta(ge=0)]], ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(DevicePlacement).decode


def unpack_placement(values: bytes) -> DevicePlacement:
    """Return the placement in the values of a message with ON_DEVICE or OFFERS.

    Raises:
        ProtocolError: the bytes cannot be read.
    """
    try:
        return _decode(values)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"names of device blocks that cannot be read: {error}") from None


class CudaIpcSender:
    """Puts messages into one queue whose large GPU tensors stay on their GPU.

    Attributes:
        on_device: the number of messages whose GPU tensors stayed on their GPU.
        staged_because: why the last message with large GPU tensors was staged; "" if it was not, or none was put yet.
    """

    def __init__(self, queue: SharedMemoryQueue, blocks: DeviceBlocks | None = None) -> None:
        self._queue, self._blocks = weakref.proxy(queue), blocks  # whoever has the queue has its lender
        self.on_device, self.staged_because = 0, ""
        self._consumers: list[int] = []
        self._next_look = 0.0

    def in_one_block(self, message: EncodedMessage, flags: int = 0) -> tuple[Block, bytes]:
        """Return what goes into the arena's block: the payloads, or the names of where they stay; and the metadata."""
        staged = [payload for payload in message.payloads if isinstance(payload, Staged)]
        if not staged:
            return in_one_block(message, flags)
        try:
            return self._placed(message, staged, flags)
        except SharedMemoryError as error:
            self.staged_because = str(error)
            return in_one_block(message, flags)

    def _placed(self, message: EncodedMessage, staged: list[Staged], flags: int) -> tuple[Block, bytes]:
        blocks = self._blocks = self._blocks or device_blocks()
        device_of = blocks.staging.cuda.device_of
        staged = [payload for payload in staged if blocks.lends(device_of(payload.tensor).index)]
        if not staged:
            self.staged_because = f"this process lends memory of cuda:{blocks.index}, and of no other GPU"
            return in_one_block(message, flags)
        self.staged_because = self._what_is_in_the_way(blocks.token)
        if self.staged_because:
            said = DevicePlacement(message.values, (blocks.test_block().name,), ())
            block, _ = in_one_block(message)
            return block, metadata_of(flags | OFFERS, message.schema, _encode(said))
        lent = _Lent(self._queue, blocks, message, staged)
        if not lent.find_room():
            self.staged_because = "all device blocks are in use"
            return in_one_block(message, flags)
        self.on_device += 1
        metadata = metadata_of(flags | ON_DEVICE, message.schema, _encode(lent.said(message)))
        lent.metadata_room = len(metadata) + 63 & -64
        return lent, metadata

    def _what_is_in_the_way(self, token: int) -> str:
        rows, words = self._queue.rows, self._queue.words
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK
            self._consumers = self._who_gets()
        others = [
            row for row in self._consumers if row != rows.index
        ]  # a process reads its own blocks without opening them
        if not self._consumers:
            return "nobody has begun to get from the queue yet"
        for row in others:
            word = words[answer_word(row, token)]
            known = word >> 8 == token << 16 | words[INCARNATIONS + row]
            found = word & 0xFF if known else 0
            if found != PASSED:
                return f"pid {words[row_word(row) + PID]} {_ANSWERS.get(found, 'answered what is none')}"
        return ""

    def _who_gets(self) -> list[int]:
        self._queue.attachment.attach()  # without a row it is not known who is alive
        rows, number = self._queue.rows, self._queue.number
        return [
            row
            for row in rows.used()
            if rows.is_alive(row) and next(iter(rows.records(row, number, GET)), None) is not None
        ]


class _Lent(Block):
    """A message whose GPU tensors stay on their GPU. It writes everything else into the arena's block."""

    __slots__ = ("__weakref__", "_block", "_blocks", "_places", "_queue", "_staged", "metadata_room")

    def __init__(
        self, queue: SharedMemoryQueue, blocks: DeviceBlocks, message: EncodedMessage, staged: list[Staged]
    ) -> None:
        """
        Args:
            staged: the payloads that stay on their GPU.
        """
        there = set(map(id, staged))
        others = [payload for payload in message.payloads if id(payload) not in there]
        nbytes = sum(map(len, others))
        # At least one byte, as its place tells which block of the arena it is.
        super().__init__(others if nbytes else [bytes(ALIGN)], nbytes or ALIGN, message.keep)
        self._queue, self._blocks, self._staged, self.metadata_room = queue, blocks, staged, 0
        self._block: DeviceBlock | None = None
        self._places: dict[int, int] = {}  # by the payload's id, where it begins in the device block

    def find_room(self) -> bool:
        """Take a device block. Return whether there was one."""
        starts, end = places_in([len(payload) for payload in self._staged])
        self._places = dict(zip(map(id, self._staged), starts, strict=True))
        self._block = self._blocks.take(end, self)
        return self._block is not None

    def said(self, message: EncodedMessage) -> DevicePlacement:
        """Return the places of all frames."""
        frames, end = [], 0
        small = [payload for payload in message.payloads if 0 < len(payload) < BULK]
        if small:
            frames.append((IN_THE_ARENA, 0))
            _, end = places_in([len(payload) for payload in small])
        for payload in message.payloads:
            if len(payload) < BULK:
                continue
            start = self._places.get(id(payload))
            if start is not None:
                frames.append((0, start))
                continue
            start = -(-end // ALIGN) * ALIGN
            frames.append((IN_THE_ARENA, start))
            end = start + len(payload)
        assert self._block is not None
        return DevicePlacement(message.values, (self._block.name,), tuple(frames))

    def write_into(self, place: memoryview) -> None:
        """Write the arena's block, copy GPU tensors to the device block, and bind this to the arena's block."""
        super().write_into(place)
        words = self._queue.words
        word = (_address_of(place) - self._queue.arena.segment.octets.ctypes.data - self.metadata_room - HEADER) >> 3
        generation = ((words[word] >> GENERATION_AT) + 1) % GENERATIONS
        assert self._block is not None
        self._blocks.fill(self._block, [(payload, self._places[id(payload)]) for payload in self._staged])
        self._block.is_claimed = _Claim(words, word, generation)


def _address_of(place: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(place))


class _Claim:
    """A look at whether a message, queued in a block of the arena with a generation, is still there, or being taken."""

    __slots__ = ("_generation", "_word", "_words")

    def __init__(self, words: memoryview, word: int, generation: int) -> None:
        self._words, self._word, self._generation = words, word, generation

    def __call__(self) -> bool:
        state = self._words[self._word]
        return state >> GENERATION_AT == self._generation and state & 15 in (QUEUED, HELD)


# ---- the getting end


def report_self_test(
    queue: SharedMemoryQueue, said: DevicePlacement, arrival: DecodeOptions, blocks: DeviceBlocks | None = None
) -> None:
    """Read a test block that was offered, and write the result into this process's row."""
    name, rows, words = said.blocks[0], queue.rows, queue.words
    if wanted(arrival) is None:
        found = DECLINED
    else:
        try:
            found = PASSED if (blocks or device_blocks()).passes(name) else DIFFERED
        except (SharedMemoryError, PeerLost, ProtocolError, RuntimeError):
            found = REFUSED
    words[answer_word(rows.index, name.token)] = name.token << 24 | rows.incarnation << 8 | found


class Undeliverable:
    """The result of a get for a message that is gone, or that this process cannot read. The message counts as taken."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def tree_of(
    said: DevicePlacement,
    values: bytes | memoryview,
    schema: Schema,
    payload: Any,
    serializer: Any,
    arrival: DecodeOptions,
    blocks: DeviceBlocks | None = None,
) -> Any:
    """Return the tree of a message, in memory of the receiver's own; or Undeliverable.

    Args:
        values: of the tree.
        payload: of the arena's block.

    Raises:
        ProtocolError: names or places that do not fit.
        UnsupportedLeaf: as ``Schema.tree``.
    """
    sizes = schema.frame_sizes()
    if len(said.frames) != len(sizes):
        raise ProtocolError(f"places of {len(said.frames)} frames, the schema announces {len(sizes)}")
    reading = _Reading(blocks or device_blocks(), wanted(arrival))
    frames: list[Any] = []
    for (index, start), size in zip(said.frames, sizes, strict=True):
        end = start + size
        limit = len(payload) if index < 0 else said.blocks[index].nbytes if index < len(said.blocks) else 0
        if end > limit:
            raise ProtocolError(f"a frame of {size} bytes at {start} in device block {index}, of {limit}")
        if index < 0:
            frames.append(memoryview(bytearray(memoryview(payload)[start:end])))  # so that the block is soon free
        else:
            frames.append(_Frame(reading, said.blocks[index], start, size))
    try:
        with reading:
            return schema.tree(memoryview(values), frames, _Decoder(serializer), ALIAS, arrival)
    except (PeerLost, SharedMemoryError) as error:
        return Undeliverable(error)


class _Reading:
    """The copies of one message. Leaving ``with`` waits until they are complete."""

    def __init__(self, blocks: DeviceBlocks, device: torch.device | None) -> None:
        self.blocks, self.device = blocks, device
        self._events: list[Any] = []

    def copy(self, name: BlockName, start: int, size: int) -> torch.Tensor:
        """Return a copy of a device block's bytes, on the wanted device."""
        made, event = self.blocks.copy_out(name, start, size, self.device)
        if event is not None:
            self._events.append(event)
        return made

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for event in self._events:
            event.synchronize()


class _Frame:
    """A payload that lies in a device block."""

    __slots__ = ("_name", "_reading", "_size", "_start")

    def __init__(self, reading: _Reading, name: BlockName, start: int, size: int) -> None:
        self._reading, self._name, self._start, self._size = reading, name, start, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> _Frame:
        start, stop, _ = part.indices(self._size)
        return _Frame(self._reading, self._name, self._start + start, stop - start)

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        """Return the tensor, as ``Raw.decode`` does."""
        if meta.dtype is None or meta.nbytes != self._size:
            raise ProtocolError(f"a payload of {self._size} bytes for a tensor of {meta.nbytes} ({meta!r})")
        order = meta.order or tuple(range(len(meta.shape)))
        found = self._reading.copy(self._name, self._start, self._size)
        found = found.view(meta.dtype).view([meta.shape[dim] for dim in order])
        return found.permute([order.index(dim) for dim in range(len(order))])


class _Decoder:
    """A decoder for a serializer's payloads, and for payloads in device blocks, which only ``raw`` has."""

    def __init__(self, serializer: Any) -> None:
        self._serializer, self.zero_copy = serializer, serializer.zero_copy

    def decode(self, meta: TensorMeta, payload: Any) -> torch.Tensor:
        """See ``Serializer.decode``."""
        if isinstance(payload, _Frame):
            return payload.tensor(meta)
        return self._serializer.decode(meta, payload)  # type: ignore[no-any-return]
