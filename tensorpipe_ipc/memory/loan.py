"""Loan: tensors that are made where they will be read, filled by the caller, and sent when the block is left."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

import torch

from tensorpipe_ipc.memory.loans import TensorSpec, build, is_size, shape_of, specs_of

__all__ = ["Lender", "Loan"]


class Lender(Protocol):
    """An end that has a place for tensors, and sends them."""

    def lend(self, specs: list[TensorSpec], timeout: float | None) -> list[torch.Tensor]:
        """Tensors, not initialised."""

    def put(self, obj: Any, /, *, timeout: float | None = None, move: bool = False) -> None:
        """Send a tree of them."""


class Loan:
    """A loan of tensors: to be used with ``with``, once."""

    def __init__(self, lender: Lender, tensors: Any, dtype: torch.dtype, timeout: float | None) -> None:
        """
        Args:
            tensors: a shape; or a tree of ``TensorSpec`` and plain values in dicts, lists and tuples.
            dtype: with a shape.
            timeout: seconds to wait for memory on entering, and for room on leaving; None: for ever.
        """
        shape = shape_of(tensors)
        if isinstance(shape, (tuple, list)) and all(map(is_size, shape)):
            tensors = TensorSpec(tuple(shape), dtype)
        self._lender, self._specs, self._timeout = lender, tensors, timeout
        self._tree: Any = None

    def __enter__(self) -> Any:
        """Return the tensors, not initialised.

        Raises:
            Full: there was no memory in time; nor, at an endpoint, anybody to read them.
            SharedMemoryError: there can never be so much.
            Closed: the queue, or the end, is closed here.
        """
        self._tree = build(self._specs, iter(self._lender.lend(specs_of(self._specs), self._timeout)))
        return self._tree

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Put them, unless there was an exception.

        Raises:
            Full: there was no room in time. The tensors stay as they are.
        """
        tree, self._tree = self._tree, None
        if kind is None:
            self._lender.put(tree, timeout=self._timeout, move=True)
