"""Torch's threads. A forked child has none of those that its parent had, and an operation that is split among them never ends.

So in a child this library's own operations on many items are done by one thread. Meanwhile ``torch.get_num_threads`` is 1, for
threads that start then, too. What the program itself computes in a forked child is its own affair, as with torch's own queues.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["alone_in_a_child", "always_alone_in_a_child"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SPLIT = 1 << 14  # items: half of those from which on torch splits an operation
_imported_by = os.getpid()
# A child of multiprocessing may be the first to import this. One that was not forked has its main module by another name.
_was_forked = multiprocessing.parent_process() is not None and "__mp_main__" not in sys.modules


def alone_in_a_child(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function that computes: in a forked child one thread does it all.

    Its first tensor has as many items as it deals with, or else its object's ``row`` has.
    """
    alone = always_alone_in_a_child(function)

    @functools.wraps(function)
    def called(*arguments: _P.args, **named: _P.kwargs) -> _T:
        return (function if _items(arguments) < _SPLIT else alone)(*arguments, **named)

    return called


def always_alone_in_a_child(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function that computes as ``alone_in_a_child`` does, however few items it deals with."""

    @functools.wraps(function)
    def called(*arguments: _P.args, **named: _P.kwargs) -> _T:
        is_child = _was_forked or os.getpid() != _imported_by
        if not is_child or (count := torch.get_num_threads()) == 1:
            return function(*arguments, **named)
        try:
            torch.set_num_threads(1)
            return function(*arguments, **named)
        finally:
            torch.set_num_threads(count)

    return called


def _items(arguments: tuple[Any, ...]) -> int:
    tensor = next((each for each in arguments if isinstance(each, torch.Tensor)), None)
    items: int = (arguments[0].row if tensor is None else tensor).numel()
    return items
