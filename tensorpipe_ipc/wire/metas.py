"""TensorMeta: what a receiver must know of one tensor before its bytes.

Packed, little-endian, one after another in a header::

    offset 0        1         2       3      4              12
           +--------+---------+-------+------+--------------+---------------------+----------------+
    PLAIN  | dtype  | layout  | ndim  | own  | nbytes   u64 | dims   ndim x i64   |                |
           +--------+---------+-------+------+--------------+---------------------+----------------+
    ORDERED   as PLAIN, then the order of the dimensions in memory, outermost first:  | ndim x u8   |
           +--------+---------+-------+------+--------------+---------------------+----------------+
    VIEW      nbytes is the index of a span; then   | offset u64 | strides  ndim x i64  |
           +--------+---------+-------+------+--------------+---------------------+----------------+
    OPAQUE    dtype, ndim and dims are absent (zero): only the serializer knows what its bytes are

``own`` is 0, or the dtype that the sender's tensor had: wider floats, which crossed as ``dtype`` (``wire_dtype``) and are
restored on arrival, for which at most eight times as many bytes are taken as arrived. All views of one span have the
same ``dtype`` and ``own``, if any has an ``own``.

* PLAIN: the payload is the tensor's items, last dimension fastest.
* ORDERED: the same for a tensor that is dense in memory with its dimensions in another order (channels_last,
  transposed): it travels as it lies and arrives with the strides it had.
* VIEW: a window on a *span*, which is memory that several leaves of one message share; dims and strides count items of
  ``dtype``, ``offset`` counts bytes.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tensorpipe_ipc.errors import ProtocolError, UnsupportedLeaf
from tensorpipe_ipc.wire.dtypes import BY_CODE, BY_TORCH, Dtype, is_narrowed

__all__ = [
    "MAX_DIMS",
    "MAX_NBYTES",
    "METAS",
    "NUMPY_DIMS",
    "OPAQUE",
    "LeafMeta",
    "TensorMeta",
    "meta_of",
    "narrowed_meta",
    "unpack_meta",
]

MAX_DIMS = 64  # that of most of torch's own functions, though it makes tensors of more
NUMPY_DIMS = 32 if np.lib.NumpyVersion(np.__version__) < "2.0.0" else 64
MAX_NBYTES = 1 << 48  # 256 TiB: more than any machine maps, and far from overflowing a signed 64-bit product

Window = Callable[[int], Any]

_PLAIN, _ORDERED, _VIEW, _OPAQUE = range(4)
_FIXED = struct.Struct("<BBBBQ")
_OFFSET = struct.Struct("<Q")


class TensorMeta:
    """Dtype, shape and memory order of one tensor, with everything that follows from them worked out once.

    Attributes:
        dtype: the torch dtype; None in an opaque meta.
        complex: whether it is a complex one.
        alignment: at whose multiples in memory its items must lie.
        shape: sizes of the dimensions.
        nbytes: bytes of the tensor's items: product of ``shape`` times the item size.
        order: the dimensions from outermost to innermost in memory; None where that is 0, 1, 2, ...
        numpy_dtype: the same dtype in NumPy, None where NumPy has none.
        direct: whether NumPy can show it as it lies: it has the dtype, the order is the usual, and there are bytes.
        alone: the last serializer by which such a tensor was a message by itself, and that message's metadata.
        window: makes a buffer of ``nbytes`` bytes at an address (which it does not keep alive).
    """

    __slots__ = (
        "_head",
        "_tail",
        "alignment",
        "alone",
        "complex",
        "direct",
        "dtype",
        "nbytes",
        "numpy_dtype",
        "order",
        "packed",
        "shape",
        "window",
    )

    def __init__(
        self,
        row: Dtype | None,
        shape: tuple[int, ...],
        order: tuple[int, ...] | None = None,
        own: Dtype | None = None,
    ) -> None:
        if len(shape) > MAX_DIMS:
            raise UnsupportedLeaf(
                f"a tensor of {len(shape)} dimensions, the limit is {MAX_DIMS}; send .flatten() of it"
            )
        # As the receiver counts them, with no regard to sizes of 0: see ``_shape``.
        if row is not None and math.prod(size for size in shape if size) * row.itemsize > MAX_NBYTES:
            raise UnsupportedLeaf(
                f"a tensor of shape {list(shape)}, whose sizes other than 0 make over {MAX_NBYTES} bytes, the limit"
            )
        self.dtype = row.torch if row else None
        self.numpy_dtype = row.numpy if row else None
        self.complex = row is not None and row.torch.is_complex
        self.alignment = row.alignment if row else 8
        self.shape = shape
        self.order = order
        self.nbytes = math.prod(shape) * row.itemsize if row else 0
        is_shown = self.numpy_dtype is not None and len(shape) <= NUMPY_DIMS
        self.direct = is_shown and order is None and self.nbytes > 0
        self.window: Window = self._first_window
        self.alone = "", b""
        layout = _OPAQUE if row is None else _PLAIN if order is None else _ORDERED
        self._head = (row.code if row else 0, layout, len(shape), own.code if own else 0)
        self._tail = struct.pack(f"<{len(shape)}q", *shape) + (bytes(order) if order else b"")
        self.packed = self.pack(self.nbytes)

    def __repr__(self) -> str:
        return f"<TensorMeta {self.dtype} {list(self.shape)}{f' order {list(self.order)}' if self.order else ''}>"

    def _first_window(self, address: int) -> Any:
        # Only senders need it: a meta that arrived must not make a ctypes type for whatever size it names.
        self.window = _window(self.nbytes)
        return self.window(address)

    def pack(self, nbytes: int) -> bytes:
        """Return the meta's bytes, for a payload of ``nbytes`` bytes (a serializer may make it longer or shorter)."""
        return _FIXED.pack(*self._head, nbytes) + self._tail

    def pack_view(self, span: int, offset: int, strides: tuple[int, ...]) -> bytes:
        """Return the meta's bytes, for a window on span number ``span``, ``offset`` bytes into it; strides in items.

        Raises:
            UnsupportedLeaf: a stride is out of range.
        """
        if strides and max(strides) > MAX_NBYTES:
            raise UnsupportedLeaf(
                f"strides {list(strides)}, the limit is {MAX_NBYTES}; send .clone(memory_format=torch.contiguous_format)"
            )
        code, _, ndim, own = self._head
        dims = struct.pack(f"<{ndim}q", *self.shape)
        return (
            _FIXED.pack(code, _VIEW, ndim, own, span) + dims + _OFFSET.pack(offset) + struct.pack(f"<{ndim}q", *strides)
        )


class LeafMeta(NamedTuple):
    """One leaf's meta as it was read and found valid: the tensor's, and where its bytes are."""

    row: Dtype | None  # None: opaque
    shape: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None
    nbytes: int = 0  # bytes of its own payload
    span: int | None = None  # the span it is a window on, instead of a payload of its own
    offset: int = 0  # bytes into that span
    strides: tuple[int, ...] = ()  # in items, for a view
    own: Dtype | None = None  # what the sender's tensor was, if it was narrowed

    def view_end(self) -> int:
        """Return bytes of its span that a view reaches, counted from the span's start."""
        assert self.row is not None
        if 0 in self.shape:
            return self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + (last + 1) * self.row.itemsize


_WINDOWS: dict[int, Window] = {}
_WINDOWS_LIMIT = 1024


def _window(nbytes: int) -> Window:
    """Return the type of a buffer of ``nbytes`` bytes, to be made at an address.

    ``(c_char * n).from_address`` is the fastest there is (0.06 us; through ``tensor.numpy()`` it is 3 us), but ctypes
    keeps every array type for ever. So the first thousand sizes get a type each, and all later ones a slice of
    the next power of two, of which there are few.
    """
    window = _WINDOWS.get(nbytes)
    if window is not None:
        return window
    if len(_WINDOWS) < _WINDOWS_LIMIT:
        window = _WINDOWS[nbytes] = (ctypes.c_char * nbytes).from_address
        return window
    wider = _WINDOWS.setdefault(1 << nbytes.bit_length(), (ctypes.c_char * (1 << nbytes.bit_length())).from_address)
    return lambda address: memoryview(wider(address))[:nbytes]


class _Shapes(dict[Any, TensorMeta]):
    """The metas of one dtype, each made once: by shape, or by (shape, order) where the order is not the usual.

    A dict with ``__missing__``, because a hit then costs no Python call: it is asked for every tensor that is sent.
    """

    def __init__(self, row: Dtype, own: Dtype | None = None) -> None:
        super().__init__()
        self._row, self._own, self._dims = row, own, 0

    def __missing__(self, key: Any) -> TensorMeta:
        shape, order = key if len(key) == 2 and isinstance(key[0], tuple) else (key, None)
        meta = TensorMeta(self._row, tuple(shape), order, self._own)
        self._dims += len(shape) + 7
        if self._dims > 8192:  # a stream has few shapes; one of ever new shapes starts over instead of growing
            self.clear()
            self._dims = len(shape) + 7
        self[meta.shape if order is None else (meta.shape, order)] = meta
        return meta


METAS = {dtype: _Shapes(row) for dtype, row in BY_TORCH.items()}  # METAS[dtype][shape]
_NARROWED = {
    (own, to): _Shapes(row, BY_TORCH[own]) for own in BY_TORCH for to, row in BY_TORCH.items() if is_narrowed(own, to)
}
OPAQUE = TensorMeta(None, ())


def meta_of(dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> TensorMeta:
    """Return the meta of a tensor's dtype and shape, and of its order in memory if that is not the usual.

    Raises:
        KeyError: the dtype is not in the table.
    """
    return METAS[dtype][shape if order is None else (tuple(shape), order)]


def narrowed_meta(
    own: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...] | None = None
) -> TensorMeta:
    """Return the same for a tensor that crosses as ``dtype`` and is restored to ``own``.

    Raises:
        KeyError: none of ``own`` does so.
    """
    return _NARROWED[own, dtype][shape if order is None else (tuple(shape), order)]


def unpack_meta(data: bytes, at: int) -> tuple[LeafMeta, int]:
    """Read one packed meta, and keep nothing of it.

    Args:
        data: the schema's bytes.
        at: where the meta begins.

    Returns:
        The leaf's meta, and where the next one begins.

    Raises:
        ProtocolError: cut short, unknown dtype or layout, too many dimensions, a negative size, too many bytes, an
            order that is no permutation, a stride out of range, a misaligned view.
    """
    if at + _FIXED.size > len(data):
        raise ProtocolError(f"tensor meta cut short: {len(data) - at} bytes left, {_FIXED.size} needed")
    code, layout, ndim, wide, nbytes = _FIXED.unpack_from(data, at)
    if layout > _OPAQUE:
        raise ProtocolError(f"tensor meta: layout {layout}: known layouts are 0 to {_OPAQUE}")
    if nbytes > MAX_NBYTES:
        raise ProtocolError(f"a payload of {nbytes} bytes, the limit is {MAX_NBYTES}")
    at += _FIXED.size
    if layout == _OPAQUE:
        if code or ndim or wide:
            raise ProtocolError(
                f"opaque tensor meta with dtype {code}, {ndim} dimensions and own {wide}, all must be 0"
            )
        return LeafMeta(None, nbytes=nbytes), at
    row = BY_CODE.get(code)
    if row is None:
        raise ProtocolError(f"dtype code {code} is not in the table")
    own = BY_CODE.get(wide)
    if wide and (own is None or not is_narrowed(own.torch, row.torch)):
        raise ProtocolError(f"own dtype {wide} of a tensor that crosses as {code}: no such floats are narrowed to it")
    if ndim > MAX_DIMS:
        raise ProtocolError(f"{ndim} dimensions, the limit is {MAX_DIMS}")
    end = at + (8 * ndim, 9 * ndim, 8 + 16 * ndim)[layout]
    if end > len(data):
        raise ProtocolError(f"tensor meta cut short: {len(data) - at} bytes left, {end - at} needed")
    shape = _shape(data, at, ndim, row.itemsize)
    if layout == _VIEW:
        return LeafMeta(row, shape, None, 0, nbytes, *_view(data, at + 8 * ndim, ndim, row.itemsize), own), end
    order = tuple(data[end - ndim : end]) if layout == _ORDERED else None
    if order is not None and sorted(order) != list(range(ndim)):
        raise ProtocolError(f"order {list(order)} of {ndim} dimensions is no permutation")
    return LeafMeta(row, shape, order, nbytes, own=own), end


def _shape(data: bytes, at: int, ndim: int, itemsize: int) -> tuple[int, ...]:
    shape = struct.unpack_from(f"<{ndim}q", data, at)
    if ndim and min(shape) < 0:
        raise ProtocolError(f"shape {list(shape)} has a negative size")
    # torch multiplies the sizes other than 0 too, so a 0 beside 2**62 twice is refused as well
    if math.prod(size for size in shape if size) * itemsize > MAX_NBYTES:
        raise ProtocolError(f"shape {list(shape)} of {itemsize}-byte items is over the limit of {MAX_NBYTES} bytes")
    return shape


def _view(data: bytes, at: int, ndim: int, itemsize: int) -> tuple[int, tuple[int, ...]]:
    (offset,) = _OFFSET.unpack_from(data, at)
    strides = struct.unpack_from(f"<{ndim}q", data, at + _OFFSET.size)
    if any(not 0 <= stride <= MAX_NBYTES for stride in strides):
        raise ProtocolError(f"strides {list(strides)} out of range: each must be 0 to {MAX_NBYTES}")
    if offset > MAX_NBYTES or offset % itemsize:
        raise ProtocolError(f"a view {offset} bytes into its span, which is no multiple of its {itemsize}-byte items")
    return offset, strides
