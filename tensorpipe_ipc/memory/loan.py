"""Loan: tensors in the memory where the consumer reads them. The caller fills them, and leaving ``with`` sends them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

import torch

from tensorpipe_ipc.memory.loans import TensorSpec, build, is_size, shape_of, specs_of

__all__ = ["Lender", "Loan"]


class Lender(Protocol):
    """A queue or an end that makes tensors in its memory, and sends them."""

    def lend(self, specs: list[TensorSpec], timeout: float | None) -> list[torch.Tensor]:
        """Return tensors, not initialised."""

    def put(self, obj: Any, /, *, timeout: float | None = None, move: bool = False) -> None:
        """Send a tree of such tensors."""


class Loan:
    """A loan of tensors: a context manager, for one block at a time."""

    def __init__(self, lender: Lender, tensors: Any, dtype: torch.dtype, timeout: float | None) -> None:
        """
        Args:
            tensors: a shape; or a tree of ``TensorSpec`` and plain values in dicts, lists and tuples.
            dtype: the dtype for a shape.
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
            Full: no memory within ``timeout``, or, at an endpoint, no consumer.
            SharedMemoryError: the tensors are larger than shared memory can ever be.
            OutOfMemory: they are to lie in this process's own memory, as in frames, and there is too little.
            Closed: the queue or the end is closed in this process.
            RuntimeError: the block of this loan has been entered, and not left.
        """
        if self._tree is not None:
            raise RuntimeError("a loan whose block has been entered and not left; make another: queue.loan(...)")
        self._tree = build(self._specs, iter(self._lender.lend(specs_of(self._specs), self._timeout)))
        return self._tree

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Put the tensors, unless the body raised an exception.

        Raises:
            Full: no room within ``timeout``. The caller keeps the tensors unchanged.
        """
        tree, self._tree = self._tree, None
        if kind is None:
            self._lender.put(tree, timeout=self._timeout, move=True)
