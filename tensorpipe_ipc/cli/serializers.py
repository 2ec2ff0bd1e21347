"""``tensorpipe-ipc serializers``: lists the serializers: the tensors that each takes, and where it copies.

The command tries each serializer with a tensor of every kind, and prints only what it finds.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from tensorpipe_ipc.errors import UnsupportedLeaf
from tensorpipe_ipc.serializers import Serializer, serializer_named, serializer_names
from tensorpipe_ipc.wire.dtypes import BY_TORCH

__all__ = ["add_arguments", "copies_to_encode", "dtypes", "layouts", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each serializer."""
    del arguments
    print(f"{'':11} copies to\n{'name':11} {'encode':7} {'decode':7} takes tensors that are")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its prototypes and deprecations
        for name in serializer_names():
            print(_line(serializer_named(name)))
    return 0


def copies_to_encode(serializer: Serializer) -> bool:
    """Return whether a serializer copies a contiguous CPU tensor to encode it."""
    tensor = torch.zeros(64, device="cpu")
    _, payload = serializer.encode(tensor)
    return not np.shares_memory(np.frombuffer(payload, np.uint8), tensor.numpy())


def layouts(serializer: Serializer) -> list[str]:
    """Return the kinds of tensors that a serializer takes."""
    return [kind for kind, tensor in _kinds() if _takes(serializer, tensor)]


def dtypes(serializer: Serializer) -> list[torch.dtype]:
    """Return the dtypes that a serializer takes."""
    return [dtype for dtype in BY_TORCH if _takes(serializer, torch.empty(2, dtype=dtype, device="cpu"))]


def _line(serializer: Serializer) -> str:
    encode, decode = ("yes" if copies else "no" for copies in (copies_to_encode(serializer), not serializer.zero_copy))
    taken = len(dtypes(serializer))
    which = "every dtype" if taken == len(BY_TORCH) else f"{taken} of {len(BY_TORCH)} dtypes"
    return f"{serializer.name:11} {encode:7} {decode:7} {', '.join(layouts(serializer))}; {which}"


def _takes(serializer: Serializer, tensor: torch.Tensor) -> bool:
    try:
        serializer.encode(tensor)
    except UnsupportedLeaf:
        return False
    return True


def _kinds() -> Iterator[tuple[str, torch.Tensor]]:
    dense = torch.ones(2, 2, device="cpu")
    yield "strided", dense
    yield "sparse", dense.to_sparse()
    yield "quantized", torch.quantize_per_tensor(dense, 1.0, 0, torch.quint8)
    yield "nested", torch.nested.nested_tensor([dense, dense])
