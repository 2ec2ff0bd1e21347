"""torch.distributed's send and recv over gloo, on loopback."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from bench.all.links import Shape, address
from bench.queue.rivals import _Tensors

__all__ = ["Gloo"]


class Gloo(_Tensors):
    """The receiver must know dtype and shape beforehand, and receives into a new tensor: nothing but bytes travels."""

    def __init__(self, shape: Shape) -> None:
        self._meeting, self._nbytes = address(), shape.nbytes

    def open(self, sends: bool) -> None:
        """Meet the other process."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{self._meeting}", rank=0 if sends else 1, world_size=2)
        self.send, self.receive = (lambda tensor: dist.send(tensor, 1)), self._receive

    def _receive(self) -> torch.Tensor:
        tensor = torch.empty(self._nbytes, dtype=torch.uint8)
        dist.recv(tensor, 0)
        return tensor

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
