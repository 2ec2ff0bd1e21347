"""A serializer of your own: compressed tensors.

A serializer says what one tensor's bytes are. This one lets ``raw`` read and make tensors, with zlib in between. Registering
it first sends every kind of tensor through it. Both ends do so, at the top of a module that both import.
"""

from __future__ import annotations

import multiprocessing
import os
import zlib

import torch

import tensorpipe_ipc as tp
from tensorpipe_ipc.serializers.raw import Raw


class Compressed:
    """The bytes that ``raw`` makes of a tensor, through zlib."""

    name = "zlib"
    zero_copy = False  # what decode returns lies on memory of its own
    _raw = Raw()

    def encode(self, tensor: torch.Tensor) -> tuple[tp.TensorMeta, bytes]:
        """The tensor's meta (dtype, shape) and its bytes."""
        meta, memory = self._raw.encode(tensor)
        return meta, zlib.compress(memory, level=1)

    def decode(self, meta: tp.TensorMeta, payload: memoryview) -> torch.Tensor:
        """The tensor again. Nobody has looked at the payload: it may not unpack to more than the meta says."""
        memory = bytearray(zlib.decompressobj().decompress(payload, meta.nbytes + 1))
        return self._raw.decode(meta, memoryview(memory))


tp.register_serializer(Compressed())
MASK = torch.eye(1000, dtype=torch.bool)  # mostly zero


def produce(endpoint: str) -> None:
    """Send a tensor."""
    with tp.Producer(endpoint, serializer="zlib") as producer:
        producer.put(MASK)


def main() -> None:
    """Receive it, accepting nothing else."""
    endpoint = f"own-serializer-{os.getpid()}"
    with tp.Consumer(endpoint, accept=["zlib"]) as consumer:
        other = multiprocessing.get_context("spawn").Process(target=produce, args=(endpoint,), daemon=True)
        other.start()
        assert torch.equal(consumer.get(timeout=60), MASK)
        print(f"a mask of {MASK.nbytes:,} bytes came as {consumer.statistics().bytes:,}, and is equal")
        other.join()


if __name__ == "__main__":
    main()
