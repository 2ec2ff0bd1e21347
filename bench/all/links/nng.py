"""pynng: Push0 and Pull0 over ipc, with the bytes of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pynng

from bench.all.links import Shape, address
from bench.queue.rivals import _Arrays

__all__ = ["PushPull"]


class PushPull(_Arrays):
    """The binding sends ``bytes`` only, so an array is copied into them. Who is alone at its end listens."""

    def __init__(self, shape: Shape) -> None:
        self._endpoint, self._bound = f"ipc://{address()}", shape.bound
        self._producer_listens = shape.receivers > 1

    def open(self, sends: bool) -> None:
        """Listen, or dial until somebody listens."""
        socket = pynng.Push0() if sends else pynng.Pull0()
        if sends:
            socket.send_buffer_size = self._bound
        else:
            socket.recv_buffer_size = self._bound
            socket.recv_max_size = 0
        if sends == self._producer_listens:
            socket.listen(self._endpoint)
        else:
            socket.dial(self._endpoint, block=None)
        self._socket = socket
        self.send = lambda array: socket.send(array.tobytes())
        self.receive = self._get

    def _get(self) -> Any:
        return np.frombuffer(self._socket.recv(), np.uint8)

    def close(self) -> None:
        """All was taken."""
        self._socket.close()
