"""A message in a block of shared memory: its metadata, and in what form its payloads lie behind them.

::

    metadata   u8 PICKLED, BY_REFERENCE … | u32 n, schema (n bytes) | values
    payload    the small payloads as behind a header, then each large one, at multiples of 64 (``layout``)

PICKLED is said by queues only, whose ends are one family of processes: a pickle stands in the place of the values, and the
tree is the list of its leaves; or the first leaf is the pickle. BY_REFERENCE is said of what lay in its block before it was
put: then the metadata say where, in the place of the values; A_PICKLE of a payload that is nothing but a pickle, with
neither schema nor values. Endpoints take neither PICKLED nor A_PICKLE. ON_DEVICE is said of what stayed on its GPU, and
OFFERS of a message whose sender asks whether the next may: then the metadata say so in the place of the values
(``on_device``).
"""

from __future__ import annotations

import struct

import torch
from torch.storage import UntypedStorage

from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.wire.header import MAX_HEADER
from tensorpipe_ipc.wire.layout import Block
from tensorpipe_ipc.wire.message import EncodedMessage, Encoder, schema_of_one

__all__ = [
    "A_PICKLE",
    "BY_REFERENCE",
    "OFFERS",
    "ON_DEVICE",
    "PICKLED",
    "in_one_block",
    "metadata_of",
    "one_tensor_in_block",
    "parts_of",
]

PICKLED, BY_REFERENCE, A_PICKLE, ON_DEVICE, OFFERS = 1, 2, 4, 8, 16
_HEAD = struct.Struct("<BI")


def metadata_of(flags: int, schema: bytes, values: bytes) -> bytes:
    """Return a message's metadata."""
    return _HEAD.pack(flags, len(schema)) + schema + values


def one_tensor_in_block(tensor: torch.Tensor, storage: UntypedStorage, serializer: Encoder) -> tuple[Block, bytes]:
    """Return the same as ``in_one_block`` for a tree that is one tensor of the CPU's without history, quicker.

    Args:
        storage: the tensor's.

    Raises:
        UnsupportedLeaf: the serializer does not take it.
    """
    meta, payload = serializer.encode(tensor)
    nbytes, (name, metadata) = len(payload), meta.alone
    if name != serializer.name or nbytes != meta.nbytes:
        metadata = metadata_of(0, schema_of_one(serializer.name, meta, nbytes), b"")
        if nbytes == meta.nbytes:
            meta.alone = serializer.name, metadata
    if tensor.untyped_storage() is not storage:  # see ``storages_of``
        tensor = tensor.detach()
        return one_tensor_in_block(tensor, tensor.untyped_storage(), serializer)
    return Block([payload], nbytes, storage), metadata


def in_one_block(message: EncodedMessage, flags: int = 0) -> tuple[Block, bytes]:
    """Return the payloads and the metadata to write into a block."""
    return Block(message.payloads, message.nbytes, message.keep), metadata_of(flags, message.schema, message.values)


def parts_of(metadata: bytes) -> tuple[int, bytes, bytes]:
    """Flags, schema and values. None of them has been looked at.

    Raises:
        ProtocolError: they are too short to be any.
    """
    if len(metadata) < _HEAD.size:
        raise ProtocolError(f"metadata of {len(metadata)} bytes, the least is {_HEAD.size}")
    flags, length = _HEAD.unpack_from(metadata)
    end = _HEAD.size + length
    if end > len(metadata):
        raise ProtocolError(f"a schema of {length} bytes in metadata with {len(metadata) - _HEAD.size} left for it")
    if length > MAX_HEADER:
        raise ProtocolError(f"a schema of {length} bytes, the limit is {MAX_HEADER}")
    return flags, metadata[_HEAD.size : end], metadata[end:]
