"""``torch_save``: a tensor's bytes are what ``torch.save`` writes. Slow, and the one that takes every layout.

It is read with ``weights_only=True``, and never otherwise: that is torch's allow-list of what a pickle may do, not a
safe format (CVE-2025-32434, CVE-2026-24747), and what it allows can ask for any amount of memory. So accept it only
from peers whose programs you would run.
"""

from __future__ import annotations

import io
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable
from typing import IO, Any

import torch

from tensorpipe_ipc.borrowed import check_sparse, to_be_checked, typed_storage_warning
from tensorpipe_ipc.errors import OutOfMemory, ProtocolError, UnsupportedLeaf
from tensorpipe_ipc.handlers import raise_signals
from tensorpipe_ipc.serializers.base import (
    any_size,
    check_memory,
    check_size,
    copied,
    describe,
    expect,
    plain,
    straight,
)
from tensorpipe_ipc.wire.metas import OPAQUE, TensorMeta
from tensorpipe_ipc.wire.room import lacks_memory, see_room_to_take
from tensorpipe_ipc.wire.threads import always_alone_in_a_child

__all__ = ["TorchSave"]


class TorchSave:
    """The serializer ``torch_save``: also sparse, quantized and nested tensors. Copies to encode and to decode.

    Attributes:
        most: tells the bytes that a tensor may have; of those of other layouts the size is known when they are saved.
    """

    name = "torch_save"
    zero_copy = False

    def __init__(self, most: Callable[[], int] = any_size) -> None:
        self.most = most

    def encode(self, tensor: torch.Tensor) -> tuple[TensorMeta, Any]:
        """Return the tensor's meta and a ``torch.save`` file of it.

        Raises:
            UnsupportedLeaf: a subclass, a meta tensor, an mkldnn tensor, or one that torch cannot save.
            SharedMemoryError: it has more bytes than it may have.
        """
        if not _has_own_layout(tensor):
            most = self.most()
            tensor = plain(tensor, most)
            check_size(tensor, most)
            # A view would drag its whole storage into the file.
            if tensor.numel() * tensor.itemsize != tensor.untyped_storage().nbytes():
                tensor = copied(tensor, lambda: straight(tensor).clone())
            check_memory(tensor)
            return describe(tensor), _save(tensor)
        return OPAQUE, _save(tensor.detach().cpu())

    def decode(self, meta: TensorMeta, payload: memoryview) -> torch.Tensor:
        """Return a tensor in memory of its own.

        Raises:
            ProtocolError: no ``torch.save`` file, one that asks for more than ``weights_only`` allows, or one that
                holds something else than the meta says.
            OutOfMemory: there is no memory for it.
        """
        see_room_to_take(len(payload))
        file, before = io.BufferedReader(_Memory(payload)), sys.exc_info()[1]
        _check_archive(meta, file, len(payload))
        try:
            loaded = _load(file)
        # A damaged file can end anywhere inside torch's reader, and does so with any exception.
        except Exception as error:
            raise_signals(error, before)
            if lacks_memory(error):  # what a message holds ends in an UnpicklingError, which is none
                raise OutOfMemory(f"a torch.save file of {len(payload):,} bytes is read: {error}") from None
            raise ProtocolError(
                f"the payload is no torch.save file of a tensor: {type(error).__name__}: {error}"
            ) from None
        tensor = expect(loaded, meta)
        # The sender's own stay behind. NumPy reads memory where one (``__array_interface__``) says.
        if vars(tensor) or tensor.grad is not None:
            raise ProtocolError(f"a torch.save file of a tensor with attributes {sorted(vars(tensor)) or ['grad']}")
        return tensor


_ZIP = b"PK\3\4"  # the first bytes of an archive
_WARNINGS = 8  # that torch may have for one file


@always_alone_in_a_child  # torch checks sparse tensors by operations that it splits among threads, however small they are
def _load(file: IO[bytes]) -> Any:
    """Read a file. No setting of the process is changed meanwhile where that can be: other threads have the same ones."""
    typed_storage_warning.has_warned = True  # of what torch deprecates in its own format
    before = sys.exc_info()[1]
    for _ in range(_WARNINGS):
        try:
            return _read(file)
        except Warning as error:  # the program makes errors of them. torch has most of them once
            raise_signals(error, before)
            file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _read(file)


def _read(file: IO[bytes]) -> Any:
    to_be_checked.clear()  # what was left of a file that ended in an error: it is not this one's
    return _checked(torch.load(file, map_location="cpu", weights_only=True, mmap=False))


def _checked(loaded: Any) -> Any:
    if isinstance(loaded, torch.Tensor) and loaded.layout in _SPARSE:
        check_sparse(loaded)
    return loaded


class _Memory(io.RawIOBase):
    """A file that is read where it lies; BytesIO would copy it first."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, len(self._memory))[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._memory[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _check_archive(meta: TensorMeta, file: IO[bytes], size: int) -> None:
    """Refuse what ``torch.save`` does not write: an older format, which allocates what it announces, and a compressed archive.

    torch tells the format by how a file begins, and zipfile looks for how it ends. One that is made to mislead may pass: of a
    peer's torch_save there is no bound (SECURITY.md).
    """
    if meta.nbytes > size:
        raise ProtocolError(f"a torch.save file of {size} bytes for a tensor of {meta.nbytes} ({meta!r})")
    if file.read(len(_ZIP)) != _ZIP:
        raise ProtocolError("the payload is no torch.save file: it does not begin as a zip archive does")
    before = sys.exc_info()[1]
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        file.seek(0)
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, struct.error) as error:
        raise_signals(error, before)
        raise ProtocolError(f"the payload is no torch.save file: {error}") from None
    if any(entry.compress_type for entry in entries) or sum(entry.file_size for entry in entries) > size:
        raise ProtocolError("a torch.save file that is compressed, which torch.save does not write")


def _has_own_layout(tensor: torch.Tensor) -> bool:
    nested = tensor.is_nested
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not nested:
        return False
    return nested or tensor.is_quantized or (tensor.layout is not torch.strided and tensor.layout in _SPARSE)


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _save(tensor: torch.Tensor) -> bytes:
    file, before = io.BytesIO(), sys.exc_info()[1]
    try:
        torch.save(tensor, file)
    except (RuntimeError, NotImplementedError) as error:
        raise_signals(error, before)
        raise UnsupportedLeaf(f"torch.save cannot write this tensor: {error}") from None
    return file.getvalue()  # which is not copied; a view would complain if the garbage collector met the file first
