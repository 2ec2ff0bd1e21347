"""Spares: the queues that a binder has ready for connectors to come, and the rendezvous file that offers them.

Each is for one connector, who claims it (``PairQueue.claim``) and puts or gets at once. The binder learns of it by the HELLO
that follows, which names the queue. Until then it knows only that there is somebody.
"""

from __future__ import annotations

import time

from tensorpipe_ipc.errors import Refused, SharedMemoryError
from tensorpipe_ipc.transport import rendezvous
from tensorpipe_ipc.transport.addresses import Address
from tensorpipe_ipc.transport.rendezvous import PairQueue
from tensorpipe_ipc.transport.rendezvous_file import RendezvousFile
from tensorpipe_ipc.transport.token_pipe import CAPACITY
from tensorpipe_ipc.wire.header import Hello

__all__ = ["Spares"]

_MOST = 2  # each takes nine descriptors and 0.2 ms; who finds none waits for the binder to answer
_PATIENCE = 0.5  # seconds that a HELLO may still be under way, when who said it is gone


class Spares:
    """One end's; of an end that does not bind, or never shares memory, always none."""

    def __init__(self) -> None:
        self._queues: list[PairQueue] = []
        self._file: RendezvousFile | None = None
        self._deserted: dict[int, float] = {}  # by token: when it was first seen to be

    def open(self, address: Address) -> None:
        """Have a file, from now on, if that can be."""
        try:
            self._file = RendezvousFile(address)
        except (OSError, Refused):
            self._file = None

    def stock(self, hello: Hello) -> None:
        """See that there are as many as there should be, and that the file says so.

        Args:
            hello: what this end says to everybody.
        """
        if self._file is None or hello.window > CAPACITY:
            return
        try:
            while sum(not queue.claimant for queue in self._queues) < _MOST:
                self._queues.append(rendezvous.make(hello.window))
        except SharedMemoryError:  # then those that there are have to do
            pass
        try:
            self._file.write(hello, tuple(queue.offer for queue in self._queues if not queue.claimant))
        except OSError:
            self.withdraw()

    def take(self, token: int) -> PairQueue | None:
        """Hand out the one that a connector says it has claimed, if it has."""
        for queue in self._queues:
            if queue.offer.token == token and queue.claimant:
                self._queues.remove(queue)
                queue.accept()
                return queue
        return None

    @property
    def any_claimed(self) -> bool:
        """Whether a connector has claimed one and was not heard of yet."""
        return any(queue.claimant for queue in self._queues)

    def deserted(self) -> list[PairQueue]:
        """Hand out those whose connector is gone for a while, and was never heard of."""
        now = time.monotonic()
        gone = [queue.offer.token for queue in self._queues if queue.is_deserted()]
        self._deserted = {token: self._deserted.get(token, now) for token in gone}
        late = [token for token, since in self._deserted.items() if now - since > _PATIENCE]
        return [queue for queue in map(self.take, late) if queue is not None]

    def withdraw(self) -> None:
        """Offer none any more. Those that were claimed are still there."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._queues = [queue for queue in self._queues if queue.claimant]

    def close(self) -> None:
        """Let go of all."""
        self.withdraw()
        self._queues = []
