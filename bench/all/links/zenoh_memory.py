"""zenoh: a publisher that allocates in zenoh's shared memory, and a subscriber, over a unix socket."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import zenoh
import zenoh.shm

from bench.all.links import Shape, address
from bench.queue.rivals import _Arrays

__all__ = ["Zenoh"]

PATIENCE = 20.0  # seconds until the two have met


class Zenoh(_Arrays):
    """The binding fills shared memory from ``bytes`` and reads it into ``bytes``: one copy more at each end."""

    def __init__(self, shape: Shape) -> None:
        self._endpoint, self._shape = f"unixsock-stream/{address()}", shape

    def open(self, sends: bool) -> None:
        """A session of this process's own; the receiver listens."""
        config = zenoh.Config()
        config.insert_json5("scouting/multicast/enabled", "false")
        config.insert_json5("transport/shared_memory/enabled", "true")
        config.insert_json5("listen/endpoints", "[]" if sends else f'["{self._endpoint}"]')
        if sends:
            config.insert_json5("connect/endpoints", f'["{self._endpoint}"]')
        self._session = zenoh.open(config)
        if sends:
            self._publish_when_met()
        else:
            bound = zenoh.handlers.FifoChannel(self._shape.bound)
            self._end = self._session.declare_subscriber("bench/tensor", bound)
            self.receive = self._get

    def _publish_when_met(self) -> None:
        self._end = self._session.declare_publisher(
            "bench/tensor",
            congestion_control=zenoh.CongestionControl.BLOCK,
            reliability=zenoh.Reliability.RELIABLE,
        )
        deadline = time.monotonic() + PATIENCE
        while not self._end.matching_status.matching:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no subscriber came within {PATIENCE:g} s")
            time.sleep(0.01)
        self._memory = zenoh.shm.ShmProvider.default_backend(max(1 << 20, (self._shape.bound + 2) * self._shape.nbytes))
        self._policy = zenoh.shm.BlockOn(zenoh.shm.GarbageCollect())
        self.send = self._put

    def _put(self, array: Any) -> None:
        memory = self._memory.alloc(array.nbytes, self._policy)
        memory[0 : array.nbytes] = array.tobytes()
        self._end.put(memory)

    def _get(self) -> Any:
        return np.frombuffer(self._end.recv().payload.to_bytes(), np.uint8)

    def close(self) -> None:
        """End the session."""
        self._end.undeclare()
        self._session.close()
