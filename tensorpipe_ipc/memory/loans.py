"""Tensors that are made in shared memory, so that a queue can send them without a copy.

::

    a block that is held from the start
    0         64                    1024
    ├ header ─┼─ room for metadata ─┼─ small tensors, then each large one, at multiples of 64 ─┤

That is the order in which a message's payloads would be written (wire/message.py): so the tensors are the message as
they lie. What a message's metadata needs beyond the room goes behind the tensors, if there is space in the block.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tensorpipe_ipc.errors import OutOfMemory
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.memory.arena import HEADER, Taker
from tensorpipe_ipc.memory.leases import LEAST, Leases, Octets
from tensorpipe_ipc.wire.direct import mark
from tensorpipe_ipc.wire.layout import ALIGN, BULK
from tensorpipe_ipc.wire.room import lacks_room
from tensorpipe_ipc.wire.threads import always_alone_in_a_child

__all__ = ["TensorSpec", "build", "is_size", "make_tensors", "shape_of", "specs_of"]

ROOM = 1024 - HEADER


def is_size(value: Any) -> bool:
    """Return whether a value is the size of a dimension."""
    return isinstance(value, (int, np.integer))


def shape_of(given: Any) -> Any:
    """Return the shape for a single size; return any other value unchanged."""
    return (given,) if is_size(given) else given


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor to make."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        try:
            shape = tuple(map(operator.index, self.shape))
        except TypeError:
            raise TypeError(f"a shape of {self.shape!r}: give a tuple of whole numbers") from None
        if any(size < 0 for size in shape):
            raise ValueError(f"a shape of {shape}: sizes are not negative")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(
                f"dtype={self.dtype!r} is a {type(self.dtype).__name__}; give a torch.dtype, as torch.float32"
            )
        object.__setattr__(self, "shape", shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensor's items."""
        return math.prod(self.shape) * self.dtype.itemsize


def specs_of(tree: Any) -> list[TensorSpec]:
    """Return the specs in a tree of dicts, lists and tuples, in order."""
    found: list[TensorSpec] = []
    _map(tree, lambda spec: found.append(spec))
    return found


def build(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return the tree, with a tensor in the place of each spec."""
    return _map(tree, lambda spec: next(tensors))


def _map(node: Any, make: Callable[[TensorSpec], Any]) -> Any:
    kind = type(node)
    if kind is TensorSpec:
        return make(node)
    if kind is dict:
        return {key: _map(child, make) for key, child in node.items()}
    if kind is list or kind is tuple:
        return kind(_map(child, make) for child in node)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return kind(*(_map(child, make) for child in node))
    return node


def _room(nbytes: int) -> int:
    return max(ROOM + nbytes, LEAST)


def make_tensors(
    specs: list[TensorSpec],
    leases: Leases | None = None,
    allocate: Callable[[int, Taker], int] = lambda nbytes, taker: 0,
    *,
    offered: bool = False,
) -> list[torch.Tensor]:
    """Make the tensors in one block, which is HELD as long as one of them lasts.

    Args:
        allocate: a function that lets a taker take a block for a number of bytes, and returns the block. If it returns 0,
            the tensors get the process's own memory.
        offered: the next put of them may hand the block over without ``move``.
    """
    places, nbytes = _places(specs)
    array = None
    if leases is not None and nbytes and not leases.rows.is_within_fork():  # as for a lease
        with leases.taking() as taker:
            block = allocate(_room(nbytes), taker)
            if block and not leases.arena.is_for_tensors(block):
                leases.arena.give_up(taker)
                block = 0
            array = leases.hold(taker, block + HEADER + ROOM, nbytes) if block else None
    if leases is not None and array is not None and offered:
        leases.offer(block)
    return [_tensor(spec, array, place) for spec, place in zip(specs, places, strict=True)]


def _places(specs: list[TensorSpec]) -> tuple[list[int], int]:
    """Return where each tensor begins, and where the last one ends."""
    places, end = [0] * len(specs), 0
    for index in sorted(range(len(specs)), key=lambda index: specs[index].nbytes >= BULK):
        if specs[index].nbytes:
            places[index] = -(-end // ALIGN) * ALIGN
            end = places[index] + specs[index].nbytes
    return places, end


def _tensor(spec: TensorSpec, array: Octets | None, place: int) -> torch.Tensor:
    with torch.inference_mode(False):  # sending takes the tensor's memory from it, perhaps outside inference mode
        if array is None or not spec.nbytes:
            return _own_memory(spec)
        # Each tensor has a storage of its own, and is not a view of another: so its references show whether it has aliases.
        storage = torch.frombuffer(memoryview(array)[place : place + spec.nbytes], dtype=torch.uint8).untyped_storage()  # type: ignore[arg-type, unused-ignore]
        tensor = torch.empty(0, dtype=spec.dtype, device="cpu").set_(storage, 0, spec.shape, _strides(spec.shape))
        mark(tensor)
        return tensor


@always_alone_in_a_child  # torch fills new memory where a program wants all of its operations to be deterministic
def _own_memory(spec: TensorSpec) -> torch.Tensor:
    left = lacks_room(spec.nbytes)  # before it is filled
    if left is not None:
        raise OutOfMemory(
            f"a tensor of shape {spec.shape} takes {spec.nbytes:,} bytes of its own memory: {left:,} bytes are left; "
            "send it in parts"
        )
    try:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    except (RuntimeError, TypeError) as error:  # TypeError: a size of over 63 bits
        reraise_from_handler(error)
        raise OutOfMemory(
            f"a tensor of shape {spec.shape} takes {spec.nbytes} bytes of this process's own memory, which it has not: "
            f"{str(error).partition(chr(10))[0]}; send it in parts"
        ) from None


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
