"""The pipelines to measure: a queue, an endpoint, or the caller's own put and get.

A pipeline is a description. ``made`` makes what has to be there before processes are started (a queue), once for each kind
of message; each process then opens its end of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, cast

import torch

from tensorpipe_ipc.benchmark.messages import filled, leaves_of, specs_of
from tensorpipe_ipc.cuda.staging import unstager
from tensorpipe_ipc.endpoints.consumer import Consumer
from tensorpipe_ipc.endpoints.producer import Producer
from tensorpipe_ipc.errors import Empty
from tensorpipe_ipc.queues.tensor_queue import Queue
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.shared_queue.shared_memory import lease_from

__all__ = ["OVER", "End", "Ends", "Made", "OverEndpoint", "OverQueue", "Pipeline"]

OVER = None  # what the last consumers of several take, where all messages were taken
LOOK = 0.02  # seconds between two looks of an endpoint's consumer whether all is over
MOST_WAITING = 64  # messages, and at least FEWEST_WAITING, where these have more than ROOM bytes
FEWEST_WAITING = 4
ROOM = 64 << 20


def _as_it_is(tree: Any) -> Any:
    return tree


def _nothing() -> None:
    pass


@dataclasses.dataclass
class End:
    """One process's end of a pipeline."""

    put: Callable[[Any], Any]
    """Sends what ``ready`` returned. The clock runs from before it."""
    get: Callable[[], Any]
    """Takes a message. The clock stops after it."""
    ready: Callable[[Any], Any] = _as_it_is
    """What is done with a message before the clock starts."""
    finish: Callable[[], None] = _nothing
    """Returns when all that was put was taken, where somebody has to see to that."""
    close: Callable[[], None] = _nothing
    """Called last."""
    address: str | None = None
    """Where others find it."""


class Made(Protocol):
    """A pipeline for one kind of message, on its way to the processes that use it."""

    producer_binds: bool
    """Whether producers are asked for their address, and consumers are told it."""
    ends_by_message: bool
    """Whether consumers learn from a message that all is over. Otherwise they ask ``is_over``."""

    def open(self, produces: bool, address: str | None, is_over: Callable[[], bool]) -> End:
        """Open an end, in the process that uses it."""


class Pipeline(Protocol):
    """A pipeline that can be measured."""

    has_read: ClassVar[bool]
    """Whether a tree is the caller's again, as it was, when ``put`` has returned."""

    @property
    def device(self) -> str | None:
        """The device of tensors on both ends; None: the CPU."""

    @property
    def copies(self) -> bool:
        """Return whether a message crosses by a copy."""

    @property
    def back(self) -> Pipeline | None:
        """The way of answers, where round trips are measured; else None."""

    def check(self, producers: int, consumers: int) -> None:
        """Raise what is wrong with it, before anything is started."""

    def made(self, context: Any, nbytes: int, consumers: int, place: Path) -> Made:
        """Make what has to be there before processes are started.

        Args:
            context: multiprocessing's, with our queues.
            nbytes: of each message.
            consumers: how many there are.
            place: the path of a file that may be made, and is nobody else's.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OverOurs:
    """The common part of queues and endpoints."""

    serializer: str = "raw"
    """What the bytes of tensors are."""
    maxsize: int | None = None
    """How many messages may wait (a queue's 0: any number); None: 64, or as many as have 64 MiB, but at least 4."""
    loan: bool = False
    """Whether messages are filled where they will be read, before the clock starts, and handed over without a copy."""
    copy: bool | Literal["auto"] = "auto"
    """As ``get`` has it: True: into own memory; False: on what it came in, as a lease; "auto": large ones so."""
    device: str | None = None
    """Where tensors lie before put and after get; None: on the CPU."""
    has_read: ClassVar[bool] = True

    @property
    def copies(self) -> bool:
        """Return whether a message crosses by a copy."""
        return not self.loan

    @property
    def back(self) -> Pipeline:
        """Another one like it."""
        return cast("Pipeline", self)

    def _check(self) -> None:
        serializer_named(self.serializer)
        lease_from(self.copy)
        unstager(self.device)
        if self.loan and self.device is not None and torch.device(self.device).type != "cpu":
            raise ValueError(
                f"loan=True with device={self.device!r}: what is lent lies in shared memory; give one of the two"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverQueue(_OverOurs):
    """Through a ``Queue``."""

    spin: float = 0.0
    """Seconds, at most 0.001, for which ``get`` looks for a message before it sleeps. The producer takes its message's making
    and some 50 us from when it is told that ``get`` begins: a shorter spin has ended by then."""

    def check(self, producers: int, consumers: int) -> None:
        """As ``Queue`` raises it.

        Raises:
            ValueError: ``spin``, ``copy`` or ``device`` is out of range, or a loan is to lie on a device.
            UnknownSerializer: no serializer of that name.
        """
        del producers, consumers
        self._check()
        Queue(self.maxsize or 0, serializer=self.serializer, spin=self.spin).close()

    def made(self, context: Any, nbytes: int, consumers: int, place: Path) -> Made:
        """A queue of the context's."""
        del consumers, place
        maxsize = _waiting(nbytes) if self.maxsize is None else self.maxsize
        return _MadeQueue(self, context.Queue(maxsize, serializer=self.serializer, spin=self.spin))


@dataclasses.dataclass(frozen=True)
class OverEndpoint(_OverOurs):
    """From a ``Producer`` to a ``Consumer``. With several consumers the producer binds, otherwise the consumer."""

    transport: Literal["ipc", "tcp"] = "ipc"
    """A socket in a folder of its own, or a port of loopback's."""
    shared_memory: Literal["auto", "off"] = "auto"
    """Whether messages go through shared memory, or in frames."""

    @property
    def copies(self) -> bool:
        """Return whether a message crosses by a copy."""
        return super().copies or self.shared_memory == "off"

    def check(self, producers: int, consumers: int) -> None:
        """As the two ends raise it.

        Raises:
            ValueError: an option is out of range, a loan is to lie on a device, or several producers have several
                consumers.
            UnknownSerializer: no serializer of that name.
        """
        if self.transport not in ("ipc", "tcp"):
            raise ValueError(
                f"transport={self.transport!r}: give 'ipc' or 'tcp' (inproc is for threads of one process, whose times are "
                "those of the interpreter's lock)"
            )
        if self.shared_memory not in ("auto", "off"):
            raise ValueError(f"shared_memory={self.shared_memory!r}: give 'auto' or 'off'")
        if producers > 1 and consumers > 1:
            raise ValueError(
                f"{producers} producers and {consumers} consumers: one side of an endpoint binds, and is one; "
                "take a queue for many to many"
            )
        if self.maxsize is not None and self.maxsize < 1:
            raise ValueError(f"maxsize={self.maxsize}: an endpoint has at least 1")
        self._check()

    def made(self, context: Any, nbytes: int, consumers: int, place: Path) -> Made:
        """A description: both ends are made where they are used."""
        del context
        where = "tcp://127.0.0.1:*" if self.transport == "tcp" else f"ipc://{place}"
        return _MadeEndpoint(self, where, self.maxsize or _waiting(nbytes), consumers > 1)


@dataclasses.dataclass(frozen=True)
class Ends:
    """A put and a get of the caller's own::

        queue = torch.multiprocessing.get_context("fork").Queue()
        benchmark.latency(benchmark.Ends(queue.put, queue.get), method="fork")

    Both are handed to the processes that call them, by fork or as arguments of a process are. One consumer takes all
    messages, in whichever order they come.
    """

    put: Callable[[Any], Any]
    """Called in producers, with one message."""
    get: Callable[[], Any]
    """Called in the consumer: it waits for one, and returns it."""
    copies: bool = True
    """Whether one memcpy counts to the least that a message can take."""
    back: Ends | None = None
    """What the consumer puts and the producer gets, where round trips are measured."""
    device: None = None
    """Its tensors are where they are."""
    has_read: ClassVar[bool] = False

    def check(self, producers: int, consumers: int) -> None:
        """
        Raises:
            ValueError: there are several consumers.
        """
        del producers
        if consumers > 1:
            raise ValueError(f"{consumers} consumers: a put and a get of your own are measured with one")

    def made(self, context: Any, nbytes: int, consumers: int, place: Path) -> Made:
        """It is there already."""
        del context, nbytes, consumers, place
        return _MadeByCaller(self.put, self.get)


class _MadeQueue:
    producer_binds = False
    ends_by_message = True

    def __init__(self, asked: OverQueue, queue: Any) -> None:
        self._asked, self._queue = asked, queue

    def open(self, produces: bool, address: str | None, is_over: Callable[[], bool]) -> End:  # noqa: ARG002
        asked, queue = self._asked, self._queue
        plain = asked.copy == "auto" and asked.device is None
        get = queue.get if plain else functools.partial(queue.get, copy=asked.copy, device=asked.device)
        end = End(queue.put, _complete(get, asked.device), close=queue.close)
        return _lending(end, queue) if asked.loan else end


class _MadeEndpoint:
    ends_by_message = False

    def __init__(self, asked: OverEndpoint, where: str, maxsize: int, producer_binds: bool) -> None:
        self._asked, self._where, self._maxsize, self.producer_binds = asked, where, maxsize, producer_binds

    def open(self, produces: bool, address: str | None, is_over: Callable[[], bool]) -> End:
        asked, where = self._asked, address or self._where
        binds = produces is self.producer_binds
        if produces:
            producer = Producer(
                where,
                bind=binds,
                serializer=asked.serializer,
                maxsize=self._maxsize,
                shared_memory=asked.shared_memory,
                linger=0,
            )
            end = End(producer.put, _nothing, finish=producer.flush, close=producer.close, address=producer.endpoint)
            return _lending(end, producer) if asked.loan else end
        consumer = Consumer(
            where,
            bind=binds,
            accept=[asked.serializer],
            device=asked.device,
            copy=asked.copy,
            maxsize=self._maxsize,
            shared_memory=asked.shared_memory,
        )
        get: Callable[[], Any] = (
            functools.partial(_until_over, consumer, is_over) if self.producer_binds else consumer.get
        )
        return End(_nothing, _complete(get, asked.device), close=consumer.close, address=consumer.endpoint)  # type: ignore[arg-type]


class _MadeByCaller:
    producer_binds = False
    ends_by_message = True

    def __init__(self, put: Callable[[Any], Any], get: Callable[[], Any]) -> None:
        self._put, self._get = put, get

    def open(self, produces: bool, address: str | None, is_over: Callable[[], bool]) -> End:  # noqa: ARG002
        return End(self._put, self._get)


def _lending(end: End, lender: Any) -> End:
    """Return the end, where messages are filled before the clock starts; it runs from the end of their with block."""

    def ready(tree: Any) -> Any:
        loan = lender.loan(specs_of(tree))
        filled(loan.__enter__(), tree)
        return loan

    return dataclasses.replace(end, ready=ready, put=lambda loan: loan.__exit__(None, None, None))


def _complete(get: Callable[[], Any], device: str | None) -> Callable[[], Any]:
    """Return a get that returns when what it took may be read. Copies to a GPU go on after get: reading an item waits for
    them."""
    if device is None or torch.device(device).type == "cpu":
        return get

    def whole() -> Any:
        tree = get()
        for _, leaf in leaves_of(tree):
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                leaf[(-1,) * leaf.dim()].item()
        return tree

    return whole


def _until_over(consumer: Consumer, is_over: Callable[[], bool]) -> Any:
    while True:
        with contextlib.suppress(Empty):
            return consumer.get(LOOK)
        if is_over():
            return OVER


def _waiting(nbytes: int) -> int:
    return max(FEWEST_WAITING, min(MOST_WAITING, ROOM // max(1, nbytes)))
