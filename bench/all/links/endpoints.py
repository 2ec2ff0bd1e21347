"""This package's Producer and Consumer, by a name, through the shared memory that they find by themselves."""

from __future__ import annotations

import tensorpipe_ipc as tp
from bench.all.links import Shape, address
from bench.queue.rivals import _Tensors

__all__ = ["Endpoints"]


class Endpoints(_Tensors):
    """Our endpoints. The end that is alone on its side binds."""

    def __init__(self, shape: Shape) -> None:
        self._endpoint, self._bound = f"ipc://{address()}", shape.bound or 64
        self._producer_binds, self._senders = shape.receivers > 1, shape.senders

    def open(self, sends: bool) -> None:
        """Bind or connect."""
        if sends:
            producer = tp.Producer(self._endpoint, bind=self._producer_binds, maxsize=self._bound)
            self.send, self.close = producer.put, producer.close  # type: ignore[method-assign]
        else:
            bind = not self._producer_binds
            consumer = tp.Consumer(self._endpoint, bind=bind, maxsize=self._bound, producers=self._senders)
            self.receive, self.close = consumer.get, consumer.close  # type: ignore[method-assign]
