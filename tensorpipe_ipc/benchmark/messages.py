"""The messages of a benchmark: of one size, each different from the next, and checked for damage on arrival."""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tensorpipe_ipc.memory.loans import TensorSpec

__all__ = ["Case", "Make", "Pattern", "case_of", "cases_of", "digest", "filled", "leaves_of", "nbytes_of", "specs_of"]

Make = Callable[[], Any]

PERIOD = 113  # items after which a pattern repeats itself: a prime, and all values are in every dtype's range
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})?")
_SHAPE = re.compile(r"\d+(?:x\d+)+")
_TREE = re.compile(r"tensor|dict:([1-9]\d*)")


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of message."""

    name: str
    """What people call it: its size, its shape, or the name of what makes it."""
    nbytes: int
    """Bytes of its tensors and arrays."""
    make: Make
    """Makes one, in memory that is new. It is handed to other processes, which call it before the clock starts."""


class Pattern:
    """Makes dense tensors, each message of other content than the last.

    ``PERIOD`` items come again and again; the next message begins one later.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, leaves: int = 0, device: str | None = None) -> None:
        """
        Args:
            shape: of each tensor.
            leaves: 0: a bare tensor; else a dict of so many.
            device: where the tensors lie.
        """
        self._shape, self._dtype, self._leaves, self._device = shape, dtype, leaves, device
        self._base: torch.Tensor | None = None
        self._made = 0

    def __call__(self) -> Any:
        """Return the next message."""
        if not self._leaves:
            return self._tensor()
        return {f"leaf {index}": self._tensor() for index in range(self._leaves)}

    def _tensor(self) -> torch.Tensor:
        items = math.prod(self._shape)
        if self._base is None:  # in the process that sends, at its first message
            values = torch.arange(PERIOD, device="cpu").square() % PERIOD  # squares: no two stretches are alike
            values = (values % 2 if self._dtype is torch.bool else values).to(self._dtype)
            self._base = values.view(torch.uint8).view(PERIOD, -1).repeat(-(-items // PERIOD) + 1, 1)
        self._made += 1
        start = self._made % PERIOD
        tensor = self._base[start : start + items].clone().view(-1).view(self._dtype).view(self._shape)
        return tensor if self._device is None else tensor.to(self._device)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_base": None}


def cases_of(
    sizes: Iterable[str | int], dtype: torch.dtype = torch.float32, tree: str = "tensor", device: str | None = None
) -> list[Case]:
    """Return a case for each size.

    Args:
        sizes: bytes of a message ("400B", "4 MB", "1MiB", 400), or the shape of its one tensor ("64x3x224x224").
        dtype: of all tensors.
        tree: "tensor": a message is one tensor; "dict:N": a dict of N tensors, which have the size together.
        device: where the tensors lie.

    Raises:
        ValueError: a size is none of these, is not a whole number of items, or the tree is none. What is meant is named.
    """
    kind = _TREE.fullmatch(tree)
    if kind is None:
        raise ValueError(f"tree={tree!r}: give 'tensor', or 'dict:N' for a dict of N tensors")
    leaves = int(kind[1] or 0)
    return [_case(str(size).strip(), dtype, leaves, device) for size in sizes]


def _case(size: str, dtype: torch.dtype, leaves: int, device: str | None) -> Case:
    if _SHAPE.fullmatch(size):
        shape = tuple(map(int, size.split("x")))
        nbytes = math.prod(shape) * dtype.itemsize * max(1, leaves)
    else:
        nbytes = _bytes(size)
        items, rest = divmod(nbytes, dtype.itemsize * max(1, leaves))
        if rest or not items:
            parts = f"{leaves} tensors of " if leaves else ""
            raise ValueError(
                f"size {size}: {nbytes} bytes are no whole number of items of {parts}{dtype}, which has {dtype.itemsize} "
                f"bytes; give a multiple of {dtype.itemsize * max(1, leaves)}"
            )
        shape = (items,)
    if not nbytes:
        raise ValueError(f"size {size}: has no items; give at least one")
    return Case(f"{size} B" if size.isdigit() else size, nbytes, Pattern(shape, dtype, leaves, device))


def _bytes(size: str) -> int:
    match = _SIZE.fullmatch(size)
    nbytes = float(match[1]) * _UNITS[match[2] or "B"] if match else 0.5
    if not nbytes.is_integer():
        raise ValueError(
            f"size {size!r}: give bytes, as 400B, 4kB, 1MiB, 100MB (known units: {', '.join(_UNITS)}), or a shape, as "
            "64x3x224x224"
        )
    return int(nbytes)


def case_of(make: Make) -> Case:
    """Return a case of what a caller's own function makes. It is called once, here, to see how large that is."""
    named = make if hasattr(make, "__name__") else type(make)
    return Case(str(getattr(named, "__name__", "own")), nbytes_of(make()), make)


def leaves_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """Return the leaves of a tree with their paths, also those that are not tensors."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    if isinstance(tree, Mapping):
        pairs: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, (list, tuple)):
        pairs = enumerate(tree)
    else:
        yield "", tree
        return
    for step, part in pairs:
        for path, leaf in leaves_of(part):
            yield f"[{step!r}]{path}", leaf


def nbytes_of(tree: Any) -> int:
    """Return bytes of a tree's tensors and arrays."""
    return sum(leaf.nbytes for _, leaf in leaves_of(tree) if isinstance(leaf, (torch.Tensor, np.ndarray)))


def digest(tree: Any) -> int:
    """Return a number that is another one, but for one case in four billion, if any bit of a message is: dtypes, shapes and
    paths count, strides and devices do not. It takes 0.5 ms for each MB."""
    found = 0
    for path, leaf in leaves_of(tree):
        if isinstance(leaf, torch.Tensor):
            said, octets = f"{path} {leaf.dtype} {tuple(leaf.shape)}", _octets(leaf)
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            said, octets = (
                f"{path} {leaf.dtype} {leaf.shape}",
                np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data,
            )
        else:
            said, octets = f"{path} {leaf!r}", memoryview(b"")
        found = zlib.crc32(octets, zlib.crc32(said.encode(), found))
    return found


def _octets(tensor: torch.Tensor) -> memoryview:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    octets: memoryview = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return octets


def specs_of(tree: Any) -> Any:
    """Return the specs to ask ``loan`` for, to be filled with a tree."""
    if isinstance(tree, torch.Tensor):
        return TensorSpec(tuple(tree.shape), tree.dtype)
    if isinstance(tree, dict):
        return {key: specs_of(part) for key, part in tree.items()}
    return type(tree)(map(specs_of, tree)) if type(tree) in (list, tuple) else tree


def filled(lent: Any, tree: Any) -> None:
    """Copy a tree's tensors into those that were lent for it."""
    for (_, place), (_, leaf) in zip(leaves_of(lent), leaves_of(tree), strict=True):
        if isinstance(place, torch.Tensor):
            place.copy_(leaf)
