"""The compiled path: put and get of everyday messages in C, where it was built and is wanted (docs/design/compiled.md).

The Python source stays the reference, works alone, and does all that is not of every day.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import math
import os
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from tensorpipe_ipc.errors import TensorPipeError
from tensorpipe_ipc.memory.leases import keeping
from tensorpipe_ipc.memory.segment import GROWN
from tensorpipe_ipc.shared_queue.get_end import BeginAnew, Decode
from tensorpipe_ipc.wire.flatten import KEYS
from tensorpipe_ipc.wire.message import encode_values
from tensorpipe_ipc.wire.schema import PLAIN_DIMS, Schema, decode_values, schema_of

if TYPE_CHECKING:
    from tensorpipe_ipc.shared_queue.shared_memory import SharedMemoryQueue

__all__ = ["CompiledPath", "why_off"]

_SWITCH = "TENSORPIPE_IPC_COMPILED"
_CLASSES = 40
_NUMBERS = struct.Struct(f"<15Q3qd{_CLASSES}Q")
_OBJECTS = 22  # of _path_of
_PLACE = struct.Struct(f"<{3 + 2 * PLAIN_DIMS}q")
_NAMES = "requires_grad", "append", "dtype", "is_direct"  # of attributes and methods
_log = logging.getLogger("tensorpipe_ipc")


@functools.cache
def _load() -> tuple[Any, str]:
    """Return the compiled module; or None, and why there is none."""
    try:
        if os.environ.get(_SWITCH, "1") == "0":
            raise ImportError(f"{_SWITCH}=0")
        _compiled = importlib.import_module("tensorpipe_ipc._compiled")
        if getattr(_compiled, "sizes", None) != (_NUMBERS.size, _OBJECTS, _PLACE.size):
            raise ImportError("it was built from another version of this package; install that again")
        if not _compiled.use(*_of_torch(), KEYS, encode_values, decode_values, *_NAMES):
            raise ImportError("this torch has another DLPack")
    except Exception as error:  # of a torch that looks otherwise, too
        _log.info("the compiled path is off: %s", error)
        return None, str(error)
    return _compiled, ""


def _of_torch() -> tuple[Any, ...]:
    """Return the table of functions that torch gives for DLPack, and what else the C source calls there."""
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is None:
        raise ImportError("this torch has no table of DLPack's functions (it came with torch 2.10)")
    any_ = torch.empty(0, device="cpu")
    storage, is_moded = any_.untyped_storage(), torch._C._is_torch_function_mode_enabled
    methods = any_.is_neg, any_.untyped_storage, storage.is_shared, storage.data_ptr, is_moded
    return table, torch.Tensor, *methods, (torch.uint8, torch.int8)


def why_off() -> str:
    """Return why the compiled path is off in this process; "" where it is on."""
    return _load()[1]


class CompiledPath:
    """The puts and gets of one queue ask this first. It answers for what it does; what it does not, the Python source does.

    Until ``open`` was called, and where there is nothing to open, it does nothing.

    Attributes:
        is_asked: whether ``open`` was called.
        put: puts a tree, and returns how many bytes its tensors have; 0: it was not put.
        put_many: puts the first trees of a list, and returns how many.
        coming: an iterator that takes the next message, and waits for one; what ends it, Python is to do, and may ask again.
        there: the same, without a wait.
        take: returns such an iterator for the numbers that it gets, of lists of so many messages at most; or for the
            ``decode`` to use, of single messages without a wait.
    """

    put: Callable[[Any], int]
    put_many: Callable[[list[Any]], int]
    take: Callable[[tuple[Any]], Iterable[list[Any]]]
    coming: Iterable[Any]
    there: Iterable[Any]

    def __init__(
        self, queue: SharedMemoryQueue, decode: Decode | None, *, is_everyday: bool, tells_size: bool = False
    ) -> None:
        """Make one that is not open.

        Args:
            queue: its messages are trees with the serializer raw.
            decode: decodes what the compiled path does not; None: each ``take`` says how.
            is_everyday: whether nothing else is in the way: nothing is narrowed, or stays on a GPU.
            tells_size: whether what is taken is a pair, of the tree and of the bytes that its tensors have.
        """
        self._queue, self._decode, self._is_everyday, self._tells_size = queue, decode, is_everyday, tells_size
        self._path: Any = None
        self._close()
        queue.rows.after_fork(self.drop)

    def open(self) -> None:
        """Take the compiled path, if there is one. The process has put into the queue, or got from it."""
        self.is_asked = True
        path = self._path = _path_of(self._queue, self._decode, self._tells_size) if self._is_everyday else None
        if path is not None:
            self.put, self.put_many, self.take = path.put, path.put_many, functools.partial(map, path.get)
            self.coming, self.there = map(path.get, itertools.repeat(0)), map(path.get, itertools.repeat(-1))

    def drop(self) -> None:
        """Leave it: this is a forked child. It may be opened again."""
        if self._path is not None:
            self._path.drop()
        self._close()

    def _close(self) -> None:
        self.is_asked, self._path = False, None
        self.put = self.put_many = _nothing
        self.take, self.coming, self.there = _nobody, (), ()


def _nothing(_: Any) -> int:
    return 0


def _nobody(_: Any) -> tuple[()]:
    return ()


def _path_of(queue: SharedMemoryQueue, decode: Decode | None, tells_size: bool) -> Any:
    """Return a queue's ``Path`` of the C source; None where there is none."""
    module, arena, credits = _load()[0], queue.arena, queue.credits
    if module is None or queue.record.has_tasks or (credits is not None and credits.spills) or queue.rows.index < 0:
        return None
    puts, gets, opened = queue.puts, queue.gets, queue.opened
    numbers = _NUMBERS.pack(  # in the order of the C source, as the objects are
        arena.segment.octets.ctypes.data,
        len(arena.segment.octets),
        queue.record.watch,
        queue.record.shut,
        queue.record.spilled,
        GROWN,
        queue.record.laps,
        queue.record.slots,
        arena.table,
        arena.floors,
        queue.number & 0xFFFFFFFF,
        arena.writing,
        arena.queued,
        arena.whole,
        tells_size,
        queue.tickets.fd,
        queue.tickets.read_end,
        -1 if credits is None else credits.fd,
        gets.spin,
        *arena.own[:_CLASSES],
    )
    objects = (
        opened.unfinished,
        keeping,
        puts.backlog,
        opened.aside,
        queue.leases.early,
        [arena.free[size_class] for size_class in range(_CLASSES)],
        [arena.recent[size_class] for size_class in range(_CLASSES)],
        puts.singles,
        puts.batches,
        gets.singles,
        gets.batches,
        puts.send_taken,
        puts.finish_sent,
        puts.look_for_freed,
        gets.get_taken,
        gets.see_to,
        gets.take_up,
        queue.leases.lease_and_state,
        _plan_of,
        BeginAnew,
        gets.stopped,
        decode,
    )
    return module.Path(numbers, objects)


def _plan_of(head: bytes) -> Any:
    """Return what the C source needs to know of metadata that begin so; None: nothing is known of them yet.

    Args:
        head: flags, the schema's length and the schema (``wire.in_block``).

    Returns:
        The head, its spec, its leaves as ``Place``, its dicts with their keys alone, the bytes of a payload and of the leaves
        in it, and the number of values. Without leaves: such messages are Python's.
    """
    try:
        schema = schema_of(head[5:])
        if schema.everyday is None and schema.is_opened():
            schema.everyday = _plan_from(head, schema) or False
    except TensorPipeError:
        return None
    return schema.everyday or None


def _plan_from(head: bytes, schema: Schema) -> Any:
    found = schema.plain()
    if found is None:
        return None
    spec, dicts, leaves, room, values = found
    return head, spec, b"".join(itertools.starmap(_packed, leaves)), dicts, room, schema.nbytes, values


def _packed(code: int, shape: tuple[int, ...], start: int) -> bytes:
    """Return a leaf as a ``Place``: its dtype's code, its shape, row after row, and where it lies."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    unused = [0] * (PLAIN_DIMS - len(shape))
    return _PLACE.pack(code, len(shape), start, *shape, *unused, *strides, *unused)
