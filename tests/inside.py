"""Reach into ends and queues, for tests that hold, cut or damage what no user could."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, overload
from unittest import mock

import torch

import tensorpipe_ipc as tp
from tensorpipe_ipc import compiled, serializers
from tensorpipe_ipc.cuda import staging
from tensorpipe_ipc.endpoints import admission, conversation, rendezvous
from tensorpipe_ipc.endpoints.events import Event
from tensorpipe_ipc.endpoints.presence import Presence
from tensorpipe_ipc.endpoints.receiver import Receiver
from tensorpipe_ipc.endpoints.rendezvous import PairQueue
from tensorpipe_ipc.endpoints.rendezvous_file import QueueOffer
from tensorpipe_ipc.endpoints.sender import Sender
from tensorpipe_ipc.memory import arena as arena_module
from tensorpipe_ipc.memory import barrier, handover
from tensorpipe_ipc.memory.arena import Arena
from tensorpipe_ipc.memory.leases import Leases, _holding
from tensorpipe_ipc.memory.row import PUT, Operation
from tensorpipe_ipc.memory.segment import Segment
from tensorpipe_ipc.process import Identity, process_key
from tensorpipe_ipc.shared_queue import tasks
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.get_end import COPY, BeginAnew, _drop
from tensorpipe_ipc.shared_queue.open_queue import OpenQueue
from tensorpipe_ipc.shared_queue.put_end import PutEnd
from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue
from tensorpipe_ipc.shared_queue.token_pipe import TokenPipe

if TYPE_CHECKING:
    import pytest

__all__ = [
    "backlog_of",
    "before_a_put_counts_its_task",
    "be_at_block",
    "before_each_look_at_a_spilled_message",
    "before_each_try_of_a_block",
    "codec_of",
    "conversation_of",
    "drop_one",
    "finish_early_get",
    "first_unit_of",
    "forget_offered_queues",
    "give_up_free_extents",
    "have_no_time_for_strangers",
    "instead_of_barriers",
    "instead_of_hearing",
    "instead_of_looking_at_the_log",
    "is_in_use",
    "is_in_use_here",
    "keep_pure",
    "keep_spare",
    "leases_here",
    "leave_addresses",
    "lent_blocks",
    "lists_of",
    "log_of",
    "look_at_counts",
    "look_for_idle",
    "make_look_due",
    "open_queue_of",
    "own_memory",
    "reach_anew",
    "reader_of",
    "reading_end_of",
    "registered_serializers",
    "set_lease_budget",
    "shared_queue_of",
    "side_of",
    "size_of_file",
    "standby_attachment_of",
    "strangers_of",
    "take_all_extents",
    "take_in_at_most",
    "take_long_to_hear",
    "take_spilled",
    "take_turn",
    "tear_what_comes",
    "tell",
    "warn_of_page_locks_anew",
    "while_extents_are_taken",
    "zeros_without_memory",
]


@overload
def side_of(end: tp.Producer) -> Sender: ...
@overload
def side_of(end: tp.Consumer) -> Receiver: ...
def side_of(end: Any) -> Any:
    """Return what an end has besides its public face: a sender, or a receiver."""
    return end._sender if isinstance(end, tp.Producer) else end._receiver


def conversation_of(end: Any) -> Any:
    """Return an end's side of the conversation with others."""
    return side_of(end).conversation


def tell(end: Any, event: Event) -> Any:
    """Have an end deal with an event, as if its conversation had told it. Return the message that it is, if it is the next."""
    conversation_of(end).events.append(event)
    return side_of(end)._handle_events()


def shared_queue_of(queue: Any) -> Any:
    """Return the queue in shared memory that a queue of multiprocessing's kind has, or what such a queue works with."""
    return queue._queue


def open_queue_of(queue: SharedMemoryQueue) -> OpenQueue:
    """Return what both ends of a queue work with."""
    return queue.opened


def keep_pure(queue: Any) -> None:
    """Have a queue take no compiled path."""
    queue._compiled.drop()
    queue._compiled.is_asked = True


def have_messages_decoded_by(queue: Any, function: Callable[[bytes, Any], Any] | None) -> None:
    """Have a queue's gets call a function in the place of its codec's ``decode``, also for what the compiled path leaves.

    Args:
        function: None: the codec's own again.
    """
    queue._compiled.drop()
    codec = codec_of(queue)
    if function is None:
        del codec.decode
    else:
        codec.decode = function
    queue._compiled._decode = codec.decode


def have_values_decoded_by(function: Callable[[Any], list[Any]]) -> None:
    """Have the compiled path of this process, if there is one, call a function in the place of ``decode_values``."""
    compiled.decode_values = function  # type: ignore[assignment]
    compiled._load.cache_clear()
    compiled._load()  # now, for a queue that takes it already, too


def load_compiled_path_again(wanted: str) -> None:
    """Have this process take the compiled path from now on, as its environment would, or none ("0")."""
    os.environ[compiled._SWITCH] = wanted
    compiled._load.cache_clear()


def keep_spare(queue: SharedMemoryQueue, direction: int, size: int = 1) -> None:
    """Have an end keep a spare operation, so that its next put or get takes the same steps as later ones."""
    end = queue.puts if direction == PUT else queue.gets
    end._spare[size].append(open_queue_of(queue).operation(direction, size))


def finish_early_get(queue: SharedMemoryQueue, operation: Operation, before: int) -> None:
    """Finish a get as one that found its tickets early: so many messages go before them."""
    queue.gets.see_to([queue.gets.see_to, operation, None, BeginAnew(before)])


def drop_one(queue: SharedMemoryQueue) -> None:
    """Drop the next message, as a shutdown does."""
    queue.gets._get(0, _drop, COPY)


def backlog_of(queue: SharedMemoryQueue) -> int:
    """Return how many of its spilled tickets this process may still look at."""
    return len(queue.puts.backlog)


def instead_of_hearing(queue: SharedMemoryQueue, function: Callable[[int], object]) -> None:
    """Have a get that took a doorbell call a function, and not do what the doorbell says."""
    queue.gets._hear = function  # type: ignore[method-assign,assignment]


def before_a_put_counts_its_task(function: Callable[[], object]) -> None:
    """Have each put of this process call a function between its two looks whether the queue is shut. In a child only."""
    count = tasks.count_put

    def call_first(*arguments: Any) -> None:
        function()
        count(*arguments)

    tasks.count_put = call_first  # type: ignore[assignment]


def first_unit_of(arena: Arena) -> int:
    """Return the number of the first MiB of a segment that messages may lie in."""
    return arena._first_unit


def make_look_due(arena: Arena) -> None:
    """Have the next who allocates or waits look for idle memory, as after some seconds."""
    arena._look_at = 0


def look_for_idle(arena: Arena) -> None:
    """Look for idle memory, as the next who allocates does after some seconds."""
    make_look_due(arena)
    arena.mind_idle()


def give_up_free_extents(arena: Arena) -> None:
    """Have an arena give up its free extents, and no other memory, as one that lacks addresses does."""
    arena._take(
        [
            (start, size_class, units)
            for start, size_class, units, row in arena.all_extents()
            if row == arena.rows.index and arena._is_free(start, size_class, units)
        ]
    )


def take_all_extents(arena: Arena) -> None:
    """Have an arena take all extents, whoever's, as one that needs so much memory does."""
    arena._take([(start, size_class, units) for start, size_class, units, _ in arena.all_extents()])


@contextlib.contextmanager
def while_extents_are_taken(action: Callable[[], object]) -> Iterator[None]:
    """Act once as another thread could, when an arena has chosen extents and is about to take them."""
    take, done = arena_module.Arena._take, list[bool]()

    def act_first(arena: Arena, wanted: Any) -> Any:
        if wanted and not done:
            done.append(True)
            action()
        return take(arena, wanted)

    with mock.patch.object(arena_module.Arena, "_take", act_first):
        yield
    assert done, "no extents were taken"


def set_lease_budget(leases: Leases, nbytes: int) -> None:
    """Let a process that has no lease have so many bytes under lease, and not half of the capacity."""
    leases.budget = leases._room = nbytes


def be_at_block(arena: Arena, block: int) -> None:
    """Say that this process is just taking a block, as one that is stopped there has said."""
    arena.words[arena._hazard] = block


def leave_addresses(arena: Arena, units: int) -> None:
    """Leave an arena so many MiB of addresses, as under ``ulimit -v``."""
    arena._units = first_unit_of(arena) + units


def before_each_try_of_a_block(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Act each time that an arena tries whether a free block still is its own."""
    start = Arena._start
    monkeypatch.setattr(Arena, "_start", lambda *a, **k: (action(), start(*a, **k))[1])


def before_each_look_at_a_spilled_message(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Act each time that a put looks whether a message that it had spilled still waits."""
    waits = PutEnd._waits
    monkeypatch.setattr(PutEnd, "_waits", lambda *a: (action(), waits(*a))[1])


def instead_of_barriers(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[int, Callable[[int], int]], int]
) -> Callable[[int], int]:
    """Have a function stand for ``membarrier``: it gets the command and what the kernel would be asked by. Return that."""
    call = barrier._call
    monkeypatch.setattr(barrier, "_call", lambda command: function(command, call))
    return call


def standby_attachment_of(end: tp.Consumer) -> Attachment:
    """Return the shared memory in which a consumer has queues ready for producers that come."""
    attachment: Attachment = conversation_of(end).standby._queues[0].attachment
    return attachment


def registered_serializers() -> dict[str, Any]:
    """Return the serializers of this process by name, as they stand: what is taken out is forgotten."""
    return serializers._SERIALIZERS


def reader_of(end: Any) -> Any:
    """Return what reads the messages that come to an end."""
    socket = side_of(end).socket
    return socket._reader if socket.binds else socket._line.reader


def tear_what_comes(monkeypatch: pytest.MonkeyPatch, end: Any, error: type[BaseException]) -> None:
    """Have an exception come when an end has taken a frame of a message off its socket, and has told nobody."""
    reader = reader_of(end)

    def tear(flags: Any) -> None:
        reader._socket.recv(*flags, copy=False)
        raise error

    monkeypatch.setattr(reader, "_receive_frame", tear)


def strangers_of(end: Any) -> Any:
    """Return an end's accounts of those who are no peers."""
    return conversation_of(end).strangers


def take_in_at_most(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ends of this process take in no more than so many peers each."""
    for module in (admission, conversation):
        monkeypatch.setattr(module, "MOST_PEERS", count)


def have_no_time_for_strangers(end: Any, seconds: float) -> None:
    """Have an end have no time for those who are no peers for so many seconds, as when many said something."""
    strangers_of(end)._heard_from = time.monotonic() + seconds


def take_long_to_hear(monkeypatch: pytest.MonkeyPatch, end: Any, seconds: float) -> None:
    """Have an end compute for so many seconds for each thing that is said to it."""
    conversation = conversation_of(end)
    hear = conversation._interpret

    def hear_slowly(*came: Any) -> Any:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return hear(*came)

    monkeypatch.setattr(conversation, "_interpret", hear_slowly)


def size_of_file(presence: Presence) -> int:
    """Return how many bytes the file has by which an end tells others of itself."""
    file: Any = presence._file
    return os.fstat(file.fileno()).st_size


def forget_offered_queues() -> None:
    """Let go of all queues that this process has made for other ends."""
    rendezvous._made.clear()


def own_memory(capacity: int) -> object:
    """Have the binders of this process share memory of so many bytes, as long as what is returned is kept."""
    attachment = Attachment(Arena(Segment.create(rendezvous._SIZE), capacity))
    rendezvous._own[process_key()] = attachment
    return attachment


def reach_anew(who: Identity, offer: QueueOffer, maxsize: int) -> PairQueue:
    """Open a queue as another process does, and do not take what this one has anyway."""
    return rendezvous._reach(who, offer, maxsize)


def codec_of(queue: Any) -> Any:
    """Return what makes messages of objects, and objects of messages, for a queue."""
    return queue._codec


def look_at_counts() -> Any:
    """Return the cached function that tells whether torch's counts of who has a tensor can be believed."""
    return handover._counts


def warn_of_page_locks_anew() -> None:
    """Warn the next time that memory cannot be locked, as if for the first time."""
    staging._warn.cache_clear()


def lent_blocks(blocks: Any) -> list[Any]:
    """Return the blocks of a device that a process has lent, and has not taken back."""
    return list(blocks._lent)


def is_in_use_here(end: Any) -> bool:
    """Return whether this thread is within a call of an end."""
    return bool(end._guard._is_owned())


def is_in_use(end: Any) -> bool:
    """Return whether a thread is within a call of an end. To ask the end itself may make that thread's call the second."""
    return repr(end._guard._lock).startswith("<locked")


def leases_here() -> int:
    """Return how many leases this process has."""
    return sum(len(leases.live) for leases in list(_holding))


def lists_of(arena: Arena) -> tuple[Any, ...]:
    """Return an arena's lists of blocks: free, fresh, taken last, taken before."""
    return arena.free, arena._fresh, arena.recent, arena._older


def log_of(tickets: TokenPipe) -> int:
    """Return the descriptor of the log for tickets that the pipe has no room for."""
    return tickets.log


def take_turn(tickets: TokenPipe) -> bool:
    """Take the turn at the log, as one that looks into it does. Whether nobody else has it."""
    return tickets._take_turn()


def take_spilled(tickets: TokenPipe, buffers: Any) -> int:
    """Take what the log has, as one that has its turn does. Return how many bytes."""
    return tickets._take_spilled(buffers)


@contextlib.contextmanager
def instead_of_looking_at_the_log(
    tickets: TokenPipe, function: Callable[[Callable[[], bytes]], bytes]
) -> Iterator[None]:
    """Have a function stand for each look at what is first in the log, and give it the look."""
    look = tickets._head
    with mock.patch.object(tickets, "_head", functools.partial(function, look)):
        yield


def reading_end_of(queue: Any) -> Any:
    """Return the reading end that libraries take out of a queue of multiprocessing's, and of ours."""
    return queue._reader


def zeros_without_memory(count: int) -> torch.Tensor:
    """Return one of torch's tensors that have no memory: it makes them in backward passes."""
    return torch._efficientzerotensor(count)
