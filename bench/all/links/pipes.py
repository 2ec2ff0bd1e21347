"""``multiprocessing.Pipe``, whose ends are closed where they are not used, so that either end's death is seen."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

from bench.all.links import Shape
from bench.queue.rivals import _Arrays, _Tensors, pattern
from bench.serializers import rivals

__all__ = ["Arrays", "ByHand"]


class _Pipe(_Tensors):
    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.get_context("fork").Pipe(duplex=False)

    def open(self, sends: bool) -> None:
        """Close the other end here."""
        (self._reader if sends else self._writer).close()

    def opened(self) -> None:
        """Close both in the process that made them, once the others have them."""
        self._reader.close()
        self._writer.close()

    dispose = opened


class Arrays(_Arrays, _Pipe):
    """Arrays, pickled."""

    def __init__(self, shape: Shape) -> None:  # noqa: ARG002
        super().__init__()
        self.send, self.receive = self._writer.send, self._reader.recv


class ByHand(_Pipe):
    """Tensors turned into bytes by hand. float32, as the ways by hand take no other; of their shape, the length travels."""

    def __init__(self, shape: Shape, label: str) -> None:  # noqa: ARG002
        super().__init__()
        way, reader, writer = rivals()[label], self._reader, self._writer

        def receive() -> Any:
            data = reader.recv_bytes()
            return way.deserialize(data, torch.Size([len(data) // 4]))

        self.send = lambda tensor: writer.send_bytes(way.serialize(tensor))
        self.receive = receive

    def fresh(self, nbytes: int) -> Any:
        """A tensor of as many bytes, as float32."""
        return pattern(nbytes).clone().view(torch.float32)
