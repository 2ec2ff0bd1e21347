"""StandbyQueues: the queues that a binder has ready for future connectors, and the rendezvous file that offers them.

Each queue is for one connector, which claims it (``PairQueue.claim``) and puts or gets at once. The binder learns of the
connector by the HELLO that follows, which names the queue. Until then it knows only that some connector has claimed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tensorpipe_ipc.endpoints import rendezvous
from tensorpipe_ipc.endpoints.peer import Peer
from tensorpipe_ipc.endpoints.rendezvous import PairQueue
from tensorpipe_ipc.endpoints.rendezvous_file import QueueOffer, RendezvousFile
from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.shared_queue.token_pipe import CAPACITY
from tensorpipe_ipc.wire.header import Hello
from tensorpipe_ipc.zeromq.addresses import Address

__all__ = ["StandbyQueues"]

_FIRST = 2  # while nobody is attached, and then 1: each takes two descriptors and 0.1 ms; who finds none waits
PATIENCE = 0.5  # seconds that a HELLO may still be under way, when who said it is gone


class StandbyQueues:
    """One end's; of an end that does not bind, or never shares memory, always none.

    Attributes:
        trouble: why none can be had; "" as long as nothing is in the way.
    """

    def __init__(self) -> None:
        self._queues: list[PairQueue] = []
        self.trouble = ""
        self._file: RendezvousFile | None = None
        self._offered: tuple[QueueOffer, ...] = ()  # by the file, as it was last written
        # By token: when it was first seen to be, and after how many messages.
        self._deserted: dict[int, tuple[float, int]] = {}

    @property
    def is_open(self) -> bool:
        """Return whether there is a file."""
        return self._file is not None

    def open(self, address: Address, key: str, hello: Hello) -> None:
        """Have a file, from now on, if that can be. See RendezvousFile."""
        try:
            self._file = RendezvousFile(address, key)
            self._file.open(hello)
        except (OSError, Refused) as failed:
            self.withdraw()
            self.trouble = f"the binder has no rendezvous file: {failed}"

    def stock(self, hello: Hello, room: int, *, is_alone: bool = True) -> None:
        """See that there are as many as there should be, and that the file says so.

        Args:
            hello: what this end says to everybody.
            room: how many peers may still come.
            is_alone: whether nobody is attached.
        """
        if self._file is None:
            return
        wanted = max(0, min(_FIRST if is_alone else 1, room - sum(bool(queue.claimant) for queue in self._queues)))
        free = self._free()
        self._drop(free[wanted:])
        try:
            for _ in range(wanted - len(free)):
                self._queues.append(rendezvous.make(min(hello.window, CAPACITY)))
            self.trouble = ""
        except OSError as failed:  # then those that there are have to do
            self.trouble = "" if self._free() else failed.strerror or str(failed)
        if is_alone and self._free():
            self._free()[0].attachment.rest()
        offers = tuple(queue.offer for queue in self._free())
        if offers != self._offered:
            try:
                self._file.write(hello, offers)
                self._offered = offers
            except OSError as failed:
                self.trouble = f"the binder's rendezvous file cannot be written: {failed.strerror}"
                self.withdraw()

    def queues(self) -> list[PairQueue]:
        """Return those that no peer has yet."""
        return list(self._queues)

    def _free(self) -> list[PairQueue]:
        """Return those that a connector may claim: none that another one is about to, which may be stopped there."""
        return [queue for queue in self._queues if not queue.claimant and not queue.is_being_claimed()]

    def _drop(self, queues: list[PairQueue]) -> None:
        """Have some no more, but for those that a connector claims at this moment."""
        for queue in queues:
            if queue.claim(queue.maxsize):
                self._queues.remove(queue)

    def take(self, token: int, peer: Peer | None = None) -> PairQueue | None:
        """Hand out the one that a connector says it has claimed, if it has.

        Args:
            peer: that connector, whose it is from the moment on at which it is none of these.
        """
        for queue in self._queues:
            if queue.offer.token == token and queue.claimant:
                queue.accept()
                queue.leases.gives_back = False
                others = [each for each in self._queues if each is not queue]
                self._queues = others  # from here on no call, and so no exception, is in between
                if peer is not None:
                    peer.queue, peer.settled = queue, True
                return queue
        return None

    @property
    def any_claimed(self) -> bool:
        """Return whether a connector has claimed one and was not heard of yet."""
        return bool(self.claimants)

    @property
    def claimants(self) -> list[int]:
        """The processes of those."""
        return [queue.claimant for queue in self._queues if queue.claimant]

    @property
    def dead_claimants(self) -> list[int]:
        """Return the claimants that are dead, or have let go of theirs."""
        return [queue.claimant for queue in self._queues if queue.is_deserted()]

    def is_claimed(self, token: int) -> bool:
        """Return whether a connector has claimed the one of that token, and was not heard of yet."""
        return any(queue.offer.token == token and queue.claimant for queue in self._queues)

    def deserted(self, came: int, is_unread: Callable[[int], bool]) -> list[PairQueue]:
        """Hand out those whose connector is gone for a while, and was never heard of.

        Args:
            came: how many messages have come.
            is_unread: whether one may be unread that was there when so many had come: it may be the connector's HELLO.
        """
        now = time.monotonic()
        gone = [queue.offer.token for queue in self._queues if queue.is_deserted()]
        self._deserted = {token: self._deserted.get(token, (now, came)) for token in gone}
        late = [
            token for token, (since, after) in self._deserted.items() if now - since > PATIENCE and not is_unread(after)
        ]
        return [queue for queue in map(self.take, late) if queue is not None]

    def withdraw(self) -> None:
        """Offer none any more. Those that were claimed are still there."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._drop(self._free())

    def close(self) -> None:
        """Let go of all."""
        self.withdraw()
        self._queues = []
