"""Arrival: what becomes of a message's leaves before its tree is built: restored, moved to a device, shown to NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tensorpipe_ipc.errors import OutOfMemory, ProtocolError
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.wire.metas import LeafMeta
from tensorpipe_ipc.wire.restoring import restore
from tensorpipe_ipc.wire.room import see_room_to_take
from tensorpipe_ipc.wire.spec import Op
from tensorpipe_ipc.wire.threads import alone_in_a_child

__all__ = ["AS_SENT", "TENSORS", "DecodeOptions", "is_restored", "restored_span", "widened"]

TENSORS = (Op.TENSOR, Op.TENSOR_GRAD, Op.PARAMETER, Op.FROZEN)  # kinds of leaves that may move to a device


class DecodeOptions(NamedTuple):
    """A receiver's wishes for the leaves of a message."""

    restore: bool = True
    """Whether floats that were narrowed (``wire_dtype``) get their own dtype back, in memory of their own. If not, they
    stay what they crossed as, and may lie on what they came in. NumPy arrays of a dtype that NumPy lacks are restored
    in any case."""
    as_numpy: bool = False
    """Whether tensors arrive as NumPy arrays on the same memory."""
    unstage: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Moves a tensor to where it is wanted. Arrays, bytes and storages stay on the CPU."""


AS_SENT = DecodeOptions()


def is_restored(leaf: LeafMeta, kind: int, arrival: DecodeOptions) -> bool:
    """Return whether a leaf, of a kind (``Op``), gets its own dtype back."""
    if leaf.own is None or leaf.row is None:
        return False
    return arrival.restore or ((kind == Op.NDARRAY or arrival.as_numpy) and leaf.row.numpy is None)


def restored_span(span: torch.Tensor, of: LeafMeta) -> torch.Tensor:
    """Return a span's narrow items in their own dtype, as bytes."""
    assert of.row is not None
    assert of.own is not None
    if len(span) % of.row.itemsize:
        raise ProtocolError(f"a span of {len(span)} bytes, which are no items of {of.row.torch}")
    return widened(span.view(of.row.torch), of.own.torch).view(torch.uint8)


@alone_in_a_child  # torch fills new memory where a program wants all of its operations to be deterministic
def widened(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the items in another dtype, in memory of their own and in the same order there.

    Raises:
        OutOfMemory: there is none for them.
    """
    if tensor.is_cpu:
        see_room_to_take(tensor.numel() * dtype.itemsize)
    try:
        wide = torch.empty_like(tensor, dtype=dtype)
    except RuntimeError as error:  # torch has no type for it
        reraise_from_handler(error)
        raise OutOfMemory(
            f"floats are restored in {tensor.numel() * dtype.itemsize:,} bytes: {str(error).partition(chr(10))[0]}; "
            "let go of memory, or take them as they crossed (restore=False)"
        ) from None
    restore(wide, tensor)
    return wide
