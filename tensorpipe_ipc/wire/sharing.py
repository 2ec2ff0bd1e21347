"""Leaves of one message that share memory, so that they still do when they arrive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.storage import UntypedStorage

from tensorpipe_ipc.borrowed import is_zero_tensor
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.wire.dtypes import BY_TORCH, is_narrowed
from tensorpipe_ipc.wire.flatten import kinds_of
from tensorpipe_ipc.wire.layout import ALIGN, overlaps
from tensorpipe_ipc.wire.metas import meta_of, narrowed_meta
from tensorpipe_ipc.wire.spec import Op

__all__ = ["Sharing", "storages_of"]


def storages_of(leaves: list[torch.Tensor]) -> list[UntypedStorage]:
    """Return the storages of those leaves that have one.

    They keep the memory. The leaves do not: another thread may give one other memory at any time (``x.data = y``, a move).
    So whoever reads memory by its address asks before and after that was looked up, and keeps what it got. Where the two
    answers differ, ``detach()`` gives a tensor that no other thread has.
    """
    try:
        return list(map(torch.Tensor.untyped_storage, leaves))
    except (NotImplementedError, RuntimeError) as error:  # one has none: those are copied to be sent
        reraise_from_handler(error)
        return [storage for leaf in leaves for storage in _storage_of(leaf)]


class Sharing:
    """The spans of memory that leaves of one message share, and the leaves as views of them.

    Attributes:
        spans: a tensor for each, from the first byte that its leaves use to the last, with no gap between the leaves' extents:
            of uint8, or of the leaves' own dtype where all have the same, and it is to be narrowed.
        views: leaf index -> its packed meta as a view.
    """

    def __init__(
        self,
        leaves: list[torch.Tensor],
        storages: list[UntypedStorage],
        wire_dtype: torch.dtype | None = None,
        spec: Sequence[bytes] = (),
        *,
        arrays: bool = True,
    ) -> None:
        """
        Args:
            storages: of those leaves that have one.
            wire_dtype: what wider floats cross as.
            spec: of the tree, in pieces. Bytes share memory with nobody on arrival, and an array whose items overlap would
                be as large as it looks: such leaves are sent by themselves.
            arrays: whether arrays that begin at one place share memory on arrival, too. By pickle they would not.
        """
        self._wire_dtype, self._arrays = wire_dtype, arrays
        self.spans: list[torch.Tensor] = []
        self.views: dict[int, bytes] = {}
        if len(set(map(UntypedStorage.data_ptr, storages))) < len(leaves):
            self._find(leaves, spec)

    def _find(self, leaves: list[torch.Tensor], spec: Sequence[bytes]) -> None:
        kinds = kinds_of(spec)
        apart = _sent_apart(leaves, kinds, self._arrays)
        owners: dict[int, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if (
                index not in apart and leaf.layout is torch.strided and not is_zero_tensor(leaf)
            ):  # the others have no memory of their own
                owners.setdefault(leaf.untyped_storage().data_ptr(), []).append(index)
        if len(owners) < len(leaves):
            storages = {index for index, kind in enumerate(kinds) if kind in (Op.UNTYPED, Op.TYPED)}
            for address, members in owners.items():
                if address and len(members) > 1:
                    self._share(leaves, [index for index in members if _is_view(leaves[index])], storages)

    def _share(self, leaves: list[torch.Tensor], members: list[int], storages: set[int]) -> None:
        """Join members of one storage that overlap or lie side by side. What lies between others was not put."""
        run, end = list[int](), -1
        for start, stop, index in sorted((*_extent(leaves[index]), index) for index in members):
            if start > end:
                self._join(leaves, run, storages)
                run = []
            run.append(index)
            end = max(end, stop)
        self._join(leaves, run, storages)

    def _join(self, leaves: list[torch.Tensor], members: list[int], storages: set[int]) -> None:
        if len(members) < 2:
            return
        # Two arrays may begin at one address as two storages, of which one is shorter.
        storage = max((leaves[index].untyped_storage() for index in members), key=torch.UntypedStorage.nbytes)
        extents = [_extent(leaves[index]) for index in members]
        start = min(extent[0] for extent in extents) // ALIGN * ALIGN  # so that every leaf stays aligned in its span
        end = max(extent[1] for extent in extents)
        if end > storage.nbytes():
            return  # somebody cut the storage under its tensors; set_ would make it grow again
        whole = [
            index for index, extent in zip(members, extents, strict=True) if index not in storages or extent[1] == end
        ]
        if len(whole) < len(members):  # a shorter storage would arrive as long as the span
            self._share(leaves, whole, storages)
            return
        own = self._narrowed(leaves, members)
        for index, extent in zip(members, extents, strict=True):
            leaf = leaves[index]
            at = extent[0] - start
            if own is None or self._wire_dtype is None:
                meta = meta_of(leaf.dtype, leaf.shape)
            else:
                meta = narrowed_meta(own, self._wire_dtype, leaf.shape)
                at = at // own.itemsize * self._wire_dtype.itemsize
            self.views[index] = meta.pack_view(len(self.spans), at, leaf.stride())
        dtype = own or torch.uint8
        items = (end - start) // dtype.itemsize
        span = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start // dtype.itemsize, (items,), (1,))
        self.spans.append(span)

    def _narrowed(self, leaves: list[torch.Tensor], members: list[int]) -> torch.dtype | None:
        """Return the one dtype of the members, if it is to be narrowed."""
        dtypes = {leaves[index].dtype for index in members}
        if self._wire_dtype is None or len(dtypes) > 1:
            return None
        (own,) = dtypes
        return own if is_narrowed(own, self._wire_dtype) else None


def _storage_of(leaf: torch.Tensor) -> list[UntypedStorage]:
    try:
        return [leaf.untyped_storage()]
    except (NotImplementedError, RuntimeError) as error:
        reraise_from_handler(error)
        return []


def _sent_apart(leaves: list[torch.Tensor], kinds: list[int], arrays: bool) -> set[int]:
    return {
        index
        for index, (kind, leaf) in enumerate(zip(kinds, leaves, strict=False))
        if kind == Op.BYTES or (kind == Op.NDARRAY and not (arrays and not overlaps(leaf.shape, leaf.stride())))
    }


def _is_view(leaf: torch.Tensor) -> bool:
    """Return whether a code, strides and an offset describe the leaf in full. Of a conjugate or a sparse one they do not."""
    is_other = leaf.is_nested or leaf.is_quantized or leaf.is_conj() or leaf.is_neg() or leaf.dtype not in BY_TORCH
    return not is_other and leaf.numel() > 0


def _extent(leaf: torch.Tensor) -> tuple[int, int]:
    """First byte, and the one after the last, that a leaf uses of its storage."""
    items = sum(int(size - 1) * int(stride) for size, stride in zip(leaf.shape, leaf.stride(), strict=True)) + 1
    start = int(leaf.storage_offset()) * leaf.itemsize
    return start, start + items * leaf.itemsize
