"""The programs of senders and receivers, and the moments at which the clock runs.

*One way*: from before the sender's call to after the receiver's, both read from CLOCK_MONOTONIC, which is one clock for
all processes. The receiver says that it is about to receive; then the sender makes a message in memory that is new and
its own, and stays awake until the receiver has long blocked.

*Stream*: all messages are made first; from before the first send to after the last receive.

A receiver is a generator that gets each message at a ``yield``: ``Taking`` runs it where messages are asked for, and
Ray's actor where they come as calls. It keeps the last two messages. Content is looked at when the clock has been read:
the first and last item of each message (of a stream's: of the last), and every item of a turn's last.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.queue.crew import Link, Program
from bench.queue.programs import send_one_way, send_stream
from bench.queue.rivals import ARRIVED, Rival, pattern

__all__ = ["HOLD", "LEAF", "LET_GO", "ONE_WAY", "SHARED", "STREAM", "Message", "Sharing", "Taking", "checked"]

LEAF = 1000  # bytes
_WORD = 8
_clock = time.monotonic_ns


class Message(NamedTuple):
    """A message: a tensor of so many bytes or, with ``leaves``, a dict of so many tensors of so many bytes each."""

    nbytes: int
    leaves: int = 0

    def fresh(self, rival: Rival) -> Any:
        """One in new memory."""
        if not self.leaves:
            return rival.fresh(self.nbytes)
        return {f"leaf {index}": rival.fresh(self.nbytes) for index in range(self.leaves)}

    def check(self, message: Any, whole: bool = False) -> None:
        """Look at the ends of what arrived, or at all of it.

        Raises:
            RuntimeError: it is not what was sent.
        """
        if not self.leaves:
            checked(message, self.nbytes, whole)
            return
        if list(message) != [f"leaf {index}" for index in range(self.leaves)]:
            raise RuntimeError("a dict came with other keys")
        for leaf in message.values() if whole else (message["leaf 0"],):
            checked(leaf, self.nbytes, whole)


def checked(message: Any, nbytes: int, whole: bool) -> None:
    """Look at one tensor or array of the ``pattern``."""
    if message is ARRIVED:  # of a floor, which carries nothing
        return
    tensor = _bytes_of(message)
    good = len(tensor) == nbytes and (int(tensor[0]), int(tensor[-1])) == (7 if nbytes > 1 else 9, 9)
    if not good or (whole and not torch.equal(tensor, pattern(nbytes))):
        raise RuntimeError(f"a message of {nbytes} bytes came damaged")


def _bytes_of(message: Any) -> torch.Tensor:
    if isinstance(message, np.ndarray):  # some are read-only, which torch warns of
        message = torch.from_numpy(message if message.flags.writeable else message.copy())
    assert isinstance(message, torch.Tensor)
    return message if message.dtype == torch.uint8 else message.view(torch.uint8)


Receiver = Generator[None, Any, Any]


class Taking:
    """Runs a receiver that is a generator, with messages that are asked for."""

    def __init__(self, take: Callable[..., Receiver]) -> None:
        self.take = take

    def __call__(self, link: Link, *arguments: Any) -> Any:
        receive, receiver = link.there.receive, self.take(link, *arguments)
        next(receiver)
        while True:
            try:
                receiver.send(receive())
            except StopIteration as end:
                return end.value


def _one_way_send(link: Link, what: Message, count: int) -> list[int]:
    return send_one_way(link, what.fresh, count)


def _one_way_take(link: Link, what: Message, count: int) -> Receiver:
    alone, times = link.there.alone, []
    kept: deque[Any] = deque(maxlen=2)
    for _ in range(count):
        link.is_ready()
        message = yield
        times.append(0 if alone else _clock())
        what.check(message)
        kept.append(message)
    what.check(kept[-1], whole=True)
    return times


def _stream_send(link: Link, what: Message, count: int) -> int:
    return send_stream(link, what.fresh, count)


def _stream_take(link: Link, what: Message, count: int) -> Receiver:
    kept: deque[Any] = deque(maxlen=2)
    link.is_ready()
    for _ in range(count):
        message = yield
        kept.append(message)
        del message
    end = _clock()
    what.check(kept[-1], whole=True)
    return 0 if link.there.alone else end


def _hold_send(link: Link, what: Message, count: int) -> None:
    for _ in range(count):
        link.wait_until_ready()
        link.there.send(what.fresh(link.there))


def _hold_take(link: Link, what: Message, count: int) -> Receiver:
    for _ in range(count):
        link.is_ready()
        message = yield
        what.check(message)
        link.kept.append(message)
    del message


def _let_go(link: Link) -> None:
    link.kept.clear()


class Sharing(NamedTuple):
    """The share of a stream between several processes: how many at each end, how many messages each sends, which turn."""

    senders: int
    receivers: int
    each: int
    turn: int


def _shared_send(link: Link, what: Message, sharing: Sharing) -> int:
    send, messages = link.there.send, [what.fresh(link.there) for _ in range(sharing.each)]
    for _ in range(sharing.receivers):
        link.wait_until_ready()
    start = _clock()
    for message in messages:
        send(message)
    if link.index == 0:  # the first wakes those who wait for more, once all was taken: however it was dealt out
        while _taken(link, sharing) < sharing.senders * sharing.each:
            time.sleep(1e-3)
        _write(link, 2 * sharing.receivers, sharing.turn)
        while _ended(link, sharing) < sharing.receivers:
            send(Message(1).fresh(link.there))
            time.sleep(1e-3)
    return start


def _shared_take(link: Link, what: Message, sharing: Sharing) -> Receiver:
    """Take until all together have taken all: how many, and when the last of them came."""
    taken = end = 0
    kept: deque[Any] = deque(maxlen=2)
    _write(link, link.index, 0)
    _write(link, sharing.receivers + link.index, 0)
    for _ in range(sharing.senders):
        link.is_ready()
    while True:
        message = yield
        if message.nbytes > 1:
            end = _clock()
            taken += 1
            kept.append(message)
            _write(link, link.index, taken)
        elif _sum(link, 2 * sharing.receivers, 1) == sharing.turn:  # else it is left from the turn before
            break
    if kept:
        what.check(kept[-1], whole=True)
    _write(link, sharing.receivers + link.index, 1)
    return taken, end


def _write(link: Link, place: int, value: int) -> None:
    link.board[place * _WORD : place * _WORD + _WORD] = value.to_bytes(_WORD, "little")


def _sum(link: Link, first: int, count: int) -> int:
    words = memoryview(link.board).cast("q")[first : first + count]
    return sum(words)


def _taken(link: Link, sharing: Sharing) -> int:
    return _sum(link, 0, sharing.receivers)


def _ended(link: Link, sharing: Sharing) -> int:
    return _sum(link, sharing.receivers, sharing.receivers)


ONE_WAY = Program(_one_way_send, Taking(_one_way_take))
STREAM = Program(_stream_send, Taking(_stream_take))
HOLD = Program(_hold_send, Taking(_hold_take))
LET_GO = Program(_let_go, _let_go)
SHARED = Program(_shared_send, Taking(_shared_take))
