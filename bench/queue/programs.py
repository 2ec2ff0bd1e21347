"""The programs of the two ends, and the moments at which the clock runs.

*One way*: from before the sender's call to after the receiver's, both read from CLOCK_MONOTONIC, which is one clock for
all processes. The receiver says that it is about to receive; then the sender makes a message in memory that is new and
its own, and stays awake for ``PAUSE``, in which the receiver has long blocked (iceoryx2's polls).

*Round trip*: the receiver sends back what it received; the sender's clock.

*Stream*: all messages are made first; from before the first send to after the last receive.

Receivers keep the last two messages, and look at the first and last item of each; of a stream's, at every 64th and the
last, as a look costs more than a message.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

from bench.queue.crew import Link, Program
from bench.queue.rivals import Ours, Rival

__all__ = [
    "BATCH",
    "HOLD",
    "LEAF",
    "MEMORY",
    "ONE_WAY",
    "ROUND_TRIP",
    "SHARED_STREAM",
    "STREAM",
    "STREAM_MANY",
    "Fresh",
    "Sharing",
    "send_one_way",
    "send_stream",
    "warm",
]

PAUSE = 30e-6  # a receiver needs 5 us to block; an idle core that has slept for longer is woken more slowly
Fresh = Callable[[Rival], Any]  # makes a message as a rival has it, in new memory

BATCH = 64
LEAF = 1000  # bytes

_clock = time.monotonic_ns


def fresh_tree(rival: Rival, leaves: int) -> dict[str, Any]:
    """A dict of so many of them."""
    return {f"leaf {index}": rival.fresh(LEAF) for index in range(leaves)}


def looked_at(message: Any) -> Any:
    """The message, if its first and last items are what was sent.

    Raises:
        RuntimeError: they are not.
    """
    if (int(message[0]), int(message[-1])) != (7, 9):
        raise RuntimeError(f"a message of {len(message)} bytes came damaged")
    return message


def pause() -> None:
    """Stay awake until the receiver has blocked."""
    end = time.monotonic() + PAUSE
    while time.monotonic() < end:
        pass


def warm(times: list[int]) -> list[int]:
    """Without those that came first: the rival before has left the caches to us."""
    return times[max(1, len(times) // 5) :]


def send_one_way(link: Link, fresh: Fresh, count: int) -> list[int]:
    """The sender's part of one way: when each message's way began, or, with a rival that is alone, how long it took."""
    rival, send, times = link.there, link.there.send, []
    for _ in range(count):
        link.wait_until_ready()
        message = fresh(rival)
        pause()
        start = _clock()
        send(message)
        times.append(_clock() - start if rival.alone else start)
    return times


def send_stream(link: Link, fresh: Fresh, count: int) -> int:
    """The sender's part of a stream: when it began, or, with a rival that is alone, how long it took."""
    send, messages = link.there.send, [fresh(link.there) for _ in range(count)]
    link.wait_until_ready()
    start = _clock()
    for message in messages:
        send(message)
    return _clock() - start if link.there.alone else start


def _of(nbytes: int) -> Fresh:
    return lambda rival: rival.fresh(nbytes)


def _one_way_send(link: Link, nbytes: int, count: int) -> list[int]:
    return send_one_way(link, _of(nbytes), count)


def _one_way_receive(link: Link, nbytes: int, count: int) -> list[int]:  # noqa: ARG001
    rival, receive, times = link.there, link.there.receive, []
    kept: deque[Any] = deque(maxlen=2)
    for _ in range(count):
        link.is_ready()
        message = receive()
        times.append(0 if rival.alone else _clock())
        kept.append(looked_at(message))
    return times


def _round_trip_send(link: Link, leaves: int, count: int) -> list[int]:
    assert link.back is not None
    send, receive, times = link.there.send, link.back.receive, []
    for _ in range(count):
        link.wait_until_ready()
        message = fresh_tree(link.there, leaves)
        pause()
        start = _clock()
        send(message)
        answer = receive()
        times.append(_clock() - start)
        if list(answer) != list(message):
            raise RuntimeError("a dict came back with other keys")
        looked_at(answer["leaf 0"])
        looked_at(answer[f"leaf {leaves - 1}"])
    return times


def _round_trip_receive(link: Link, leaves: int, count: int) -> None:  # noqa: ARG001
    assert link.back is not None
    receive, send = link.there.receive, link.back.send
    kept: deque[Any] = deque(maxlen=2)
    for _ in range(count):
        link.is_ready()
        kept.append(receive())
        send(kept[-1])


def _stream_send(link: Link, nbytes: int, count: int) -> int:
    return send_stream(link, _of(nbytes), count)


def _stream_receive(link: Link, nbytes: int, count: int) -> int:  # noqa: ARG001
    receive = link.there.receive
    kept: deque[Any] = deque(maxlen=2)
    link.is_ready()
    if link.there.alone:
        return 0
    for index in range(count):
        kept.append(receive())
        if not index % 64:
            looked_at(kept[-1])
    end = _clock()
    looked_at(kept[-1])
    return end


def _stream_many_send(link: Link, nbytes: int, count: int) -> int:
    queue: Any = getattr(link.there, "queue")  # noqa: B009
    messages = _many(link, nbytes, count)
    batches = [messages[start : start + BATCH] for start in range(0, count, BATCH)]
    link.wait_until_ready()
    start = _clock()
    for batch in batches:
        queue.put_many(batch)
    return start


def _stream_many_receive(link: Link, nbytes: int, count: int) -> int:  # noqa: ARG001
    queue: Any = getattr(link.there, "queue")  # noqa: B009
    name = "max_items" if isinstance(link.there, Ours) else "max_messages_to_get"
    link.is_ready()
    while count:
        batch = queue.get_many(**{name: BATCH})
        count -= len(batch)
        looked_at(batch[-1])
    return _clock()


def _many(link: Link, nbytes: int, count: int) -> list[Any]:
    return [link.there.fresh(nbytes) for _ in range(count)]


class Sharing(NamedTuple):
    """The share of a stream between several processes: how many at each end, and how many messages each sends."""

    senders: int
    receivers: int
    each: int


def _shared_stream_send(link: Link, nbytes: int, sharing: Sharing) -> int:
    send, messages = link.there.send, _many(link, nbytes, sharing.each)
    for _ in range(sharing.receivers):
        link.wait_until_ready()
    start = _clock()
    for message in messages:
        send(message)
    for _ in range(sharing.receivers):
        send(None)
    return start


def _shared_stream_receive(link: Link, nbytes: int, sharing: Sharing) -> tuple[int, int]:  # noqa: ARG001
    """Take what comes until as many Nones have come as there are senders: how many messages, and when it ended."""
    receive = link.there.receive
    kept: deque[Any] = deque(maxlen=2)
    taken = nones = 0
    for _ in range(sharing.senders):
        link.is_ready()
    while nones < sharing.senders:
        message = receive()
        if message is None:
            nones += 1
            continue
        kept.append(message)
        taken += 1
        if not taken % 64:
            looked_at(message)
    return taken, _clock()


def _memory(_: Link) -> int:
    """Unique memory of this process, without what was let go."""
    gc.collect()
    return int(psutil.Process().memory_full_info().uss)


def _hold_send(link: Link, nbytes: int, count: int) -> None:
    message = link.there.fresh(nbytes)
    for _ in range(count):
        link.there.send(message)


def _hold_receive(link: Link, nbytes: int, count: int) -> None:  # noqa: ARG001
    link.kept.extend(link.there.receive() for _ in range(count))


ONE_WAY = Program(_one_way_send, _one_way_receive)
ROUND_TRIP = Program(_round_trip_send, _round_trip_receive)
STREAM = Program(_stream_send, _stream_receive)
STREAM_MANY = Program(_stream_many_send, _stream_many_receive)
SHARED_STREAM = Program(_shared_stream_send, _shared_stream_receive)
MEMORY = Program(_memory, _memory)
HOLD = Program(_hold_send, _hold_receive)
