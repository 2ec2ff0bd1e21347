"""pyzmq's own recipes: an array as a JSON header and its memory; a tree as a pickle with its arrays out of band."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import zmq

from bench.all.links import Shape, address
from bench.queue.rivals import _Arrays

__all__ = ["PushPull"]


class PushPull(_Arrays):
    """PUSH and PULL over ipc, with the bound as high-water mark of both. Who is alone at its end binds."""

    def __init__(self, shape: Shape, copy: bool) -> None:
        self._endpoint, self._copy, self._bound = f"ipc://{address()}", copy, shape.bound
        self._producer_binds = shape.receivers > 1
        self.send, self.receive = self._put, self._get

    def open(self, sends: bool) -> None:
        """A context and a socket of this process's own."""
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.PUSH if sends else zmq.PULL)
        self._socket.set_hwm(self._bound)
        binds = sends == self._producer_binds
        (self._socket.bind if binds else self._socket.connect)(self._endpoint)

    def _put(self, message: Any) -> None:
        if isinstance(message, np.ndarray):
            header = {"dtype": str(message.dtype), "shape": message.shape}
            self._socket.send_json(header, zmq.SNDMORE)
            self._socket.send(message, 0, copy=self._copy, track=False)
            return
        buffers: list[pickle.PickleBuffer] = []
        packed = pickle.dumps(message, 5, buffer_callback=buffers.append)
        self._socket.send_json({}, zmq.SNDMORE)
        self._socket.send_multipart([packed, *(buffer.raw() for buffer in buffers)], copy=self._copy)

    def _get(self) -> Any:
        header: Any = self._socket.recv_json()
        if header:
            data = self._socket.recv(copy=self._copy)
            return np.frombuffer(data, dtype=header["dtype"]).reshape(header["shape"])
        packed, *frames = self._socket.recv_multipart(copy=self._copy)
        return pickle.loads(packed, buffers=frames)  # noqa: S301

    def close(self) -> None:
        """All was taken."""
        self._socket.close(0)
        self._context.term()
