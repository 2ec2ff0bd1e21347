"""``numpy``: a tensor's bytes are a .npy file, which any NumPy reads without this package and without torch.

The format is NumPy's own (numpy.lib.format). Of what it allows only what NumPy writes of numbers is read: version 1.0
or 2.0, no Python objects, and a head that is compared with the meta instead of being evaluated.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tensorpipe_ipc.errors import ProtocolError, UnsupportedLeaf
from tensorpipe_ipc.serializers.base import any_size, copied, describe, expect, gathered, plain
from tensorpipe_ipc.wire.dtypes import WIDEST
from tensorpipe_ipc.wire.metas import NUMPY_DIMS, TensorMeta

__all__ = ["NumpyArray"]


class NumpyArray:
    """The serializer ``numpy``: dtypes that NumPy has too. Copies once to encode, and not to decode. Arrives
    C-contiguous, whatever its strides were.

    Attributes:
        most: tells the bytes that a tensor may have.
    """

    name = "numpy"
    zero_copy = True

    def __init__(self, most: Callable[[], int] = any_size) -> None:
        self.most = most

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        """Return the tensor's meta and a .npy file of it.

        Raises:
            UnsupportedLeaf: as ``plain`` says, and for a dtype that NumPy lacks (bfloat16, float8, complex32).
            SharedMemoryError: it has more bytes than it may have.
        """
        most = self.most()
        tensor = gathered(plain(tensor, most), most)
        meta = describe(tensor)
        if meta.numpy_dtype is None:
            raise UnsupportedLeaf(
                f"NumPy has no {tensor.dtype}: use serializer='raw', or send .view(torch.uint8) or .float() of it"
            )
        if tensor.dim() > NUMPY_DIMS:
            raise UnsupportedLeaf(
                f"NumPy here has {NUMPY_DIMS} dimensions at most, not {tensor.dim()}: use serializer='raw'"
            )
        return meta, copied(tensor, functools.partial(_file_of, tensor.numpy()))

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        """Return a tensor on the payload's memory; on a copy of it, where that may not be written to, or its items lie crooked.

        Raises:
            ProtocolError: no .npy file, or of another dtype or shape than ``meta``.
        """
        descr, fortran, shape, start = _head(payload)
        dtype = meta.numpy_dtype
        if dtype is None or descr != dtype.str or shape != tuple(meta.shape):
            raise ProtocolError(f"the .npy file holds {descr!r} {list(shape)}, not {meta!r}")
        items = payload[start:]
        if len(items) != meta.nbytes:
            raise ProtocolError(f"the .npy file holds {len(items)} bytes of items, {meta!r} has {meta.nbytes}")
        if items.readonly or start % WIDEST:  # NumPy's own begin at multiples of 64
            items = memoryview(bytearray(items))
        array = np.ndarray(shape, dtype, items, order="F" if fortran else "C")
        return expect(torch.from_numpy(array), meta)


def _file_of(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=None, allow_pickle=False)
    return file.getvalue()  # which is not copied


def _head(payload: memoryview) -> tuple[str, bool, tuple[int, ...], int]:
    """Read the head of a .npy file. Return descr, Fortran order, shape, and where the items begin.

    NumPy's own reader evaluates the head as Python, gives warnings, and fails in a dozen ways on a damaged one.
    """
    match = _HEAD.match(payload[:_MAX_HEAD])
    if match is None:
        raise ProtocolError(f"the payload is no .npy file of numbers: it begins with {bytes(payload[:16])!r}")
    version, length = match["version"], match["short"] or match["long"]
    start = match.start("text") + int.from_bytes(length, "little")
    if start != match.end():
        raise ProtocolError(f"a .npy file of version {version[0]} whose head ends at {match.end()}, not at {start}")
    shape = tuple(int(size) for size in match["shape"].split(b",") if size)
    return match["descr"].decode("ascii"), match["fortran"] == b"True", shape, start


_MAX_HEAD = 1 << 12  # 64 dimensions of 19 digits are 1.4 KiB
_HEAD = re.compile(
    rb"\x93NUMPY(?P<version>\x01\x00(?P<short>..)|\x02\x00(?P<long>....))"
    rb"(?P<text>\{'descr': '(?P<descr>[<|][a-z][0-9]{1,2})', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(?:[0-9]{1,19}(?:, [0-9]{1,19}){0,63},?)?)\), \} *\n)",
    re.DOTALL,
)
