"""Pickles of any objects, with the tensors outside the pickle.

Only queues use it, because their processes are one family: endpoints never unpickle. It uses multiprocessing's own reducers,
so that locks, connections and other objects that may go to a related process still can. Four things differ:

* A tensor, array or storage is neither pickled nor moved into torch's shared memory. It crosses beside the pickle, as a leaf
  of the message.
* Memory that the program itself shared through torch stays shared: torch's own reducers write a *handle* of it.
  Rebuilding its storage uses a handle up. A handle that is not sent must be taken back (``take_back``).
* torch's reducer writes a quantized tensor in a form that cannot be read. It is written as ``torch.save`` does instead.
* torch's reducer writes a tensor of a subclass by its whole storage. It is written by the memory that it shows.
"""

from __future__ import annotations

import copyreg
import errno
import functools
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import util
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import Parameter
from torch.storage import TypedStorage, UntypedStorage

from tensorpipe_ipc.borrowed import (
    rebuild_subclass,
    rebuild_tensor,
    rebuild_untyped,
    reducers,
    shared_descriptor,
    sharer,
    storage_classes,
)
from tensorpipe_ipc.errors import PeerLost
from tensorpipe_ipc.forks import watch
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.serializers.torch_save import TorchSave
from tensorpipe_ipc.wire.dtypes import BY_NUMPY
from tensorpipe_ipc.wire.metas import METAS, OPAQUE

__all__ = ["Handle", "Pickled", "dump", "is_shared_by_torch", "load", "take_back", "watch_forks"]

Handle = tuple[Callable[..., Any], tuple[Any, ...]]  # torch's function to rebuild a shared storage, and its arguments
# An object's pickle; its leaves, in the order of their places in the pickle; the handles of the shared storages in it.
Pickled = tuple[bytes, Sequence[Any], Sequence[Handle]]


class _Reducers(dict[Any, Any]):
    """The reducers by type: ForkingPickler's table, with other ones for tensors, arrays and storages.

    It is a table, because ``reducer_override`` would be called for every object: 1.3 us more for a small tuple.
    """

    leaves: Any = ()  # most objects have no leaves: the empty tuples cost no time
    handles: Any = ()

    def __missing__(self, kind: Any) -> Any:
        if kind in _KINDS:
            return self._reduce
        known = _registered.get(kind) or copyreg.dispatch_table.get(kind)
        if known is None and issubclass(kind, torch.Tensor):
            return self._reduce_subclass
        if known is None:
            raise KeyError(kind)
        return known

    def _reduce(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is Parameter:
            return self._reduce_tensor(obj)
        if kind is np.memmap or kind is np.ndarray:
            is_leaf = obj.dtype in BY_NUMPY and obj.dtype.isnative
            # By protocol 5 one that is read-only would arrive so; by an older one it arrives writable.
            return self._leave(obj) if is_leaf else obj.__reduce_ex__(5 if obj.flags.writeable else 4)
        storage = obj if kind is UntypedStorage else obj._untyped_storage
        if _is_shared(storage):
            return self._share(storage) if storage is obj else _registered[kind](obj)
        # Not obj.device: torch warns when it is read.
        return self._leave(obj) if storage is obj or storage.device.type == "cpu" else _registered[kind](obj)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_quantized:
            return _from_file, (TorchSave().encode(tensor)[1],)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            if type(tensor) is Parameter:  # torch's reducer makes it a tensor
                return Parameter, (tensor.detach(), tensor.requires_grad)
            return _registered[type(tensor)](tensor)
        if not is_shared_by_torch(tensor):
            return self._leave(tensor)
        return _rebuild_shared, _registered[type(tensor)](tensor)

    def _reduce_subclass(self, tensor: torch.Tensor) -> Any:
        reduced: Any = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        is_torchs = type(reduced) is tuple and len(reduced) == 2 and reduced[0] is rebuild_subclass
        if rebuild_subclass is None or not is_torchs:
            return reduced  # by a method of its own
        rebuild, kind, arguments, state = reduced[1]
        if (rebuild, len(arguments)) == (rebuild_tensor, 6):
            storage, dtype = arguments[0]._untyped_storage, arguments[0].dtype
        elif (rebuild, len(arguments)) == (rebuild_untyped, 7):
            storage, dtype = arguments[0], arguments[6]
        else:  # of another layout, or conjugated
            return reduced
        _, offset, shape, strides, requires_grad, hooks = arguments[:6]
        if hooks or storage.device.type != "cpu" or dtype not in METAS or _is_shared(storage):
            return reduced
        shown = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, strides)
        if shown.nbytes > storage.nbytes():  # expanded
            return reduced
        return _of_subclass, (shown, kind, requires_grad, state)

    def _leave(self, leaf: Any) -> Any:
        if self.leaves == ():
            self.leaves = []
        self.leaves.append(leaf)
        return _restored_leaf, (_LEAF_MARK,)

    def _share(self, storage: UntypedStorage) -> Any:
        handle = _registered[UntypedStorage](storage)
        if self.handles == ():
            self.handles = []
        self.handles.append(handle)
        _sent.add(handle)
        return _of_handle, (os.getpid(), handle[0], *handle[1])


_KINDS: frozenset[Any] = frozenset((torch.Tensor, Parameter, np.ndarray, np.memmap, TypedStorage, *storage_classes))
_registered: Any = reducers
_LEAF_MARK = pickle.PickleBuffer(bytearray(1))  # the mark of a leaf's place, pickled out of band (PEP 574)


def _is_data(buffer: pickle.PickleBuffer) -> bool:
    """Return whether a buffer goes into the pickle: each one except the mark of a leaf's place does."""
    return buffer is not _LEAF_MARK


def _restored_leaf(leaf: Any) -> Any:
    return leaf


def _of_subclass(shown: Any, kind: Any, requires_grad: bool, state: Any) -> Any:
    if isinstance(shown, np.ndarray):  # as the get wants tensors
        return shown
    return rebuild_subclass(shown.requires_grad_, kind, (requires_grad,), state)


def _from_file(data: bytes) -> torch.Tensor:
    return TorchSave().decode(OPAQUE, memoryview(data))


# ---- torch's shared memory ----


def watch_forks() -> None:
    """Have children share descriptors by names of their own. ``Process`` sees to that, and ``os.fork`` does not."""
    if sharer is not None:
        watch(in_child=sharer._afterfork)


def is_shared_by_torch(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in torch's shared memory, and torch's handle describes it in full.

    It does not describe a tensor on a GPU or on a mapped file, or one that is conjugated or has autograd history.
    """
    try:
        storage = tensor.untyped_storage()
        if not storage.is_shared():
            return False
    except (NotImplementedError, RuntimeError) as error:
        reraise_from_handler(error)
        return False  # it has no storage
    return (
        _is_shared(storage)
        and (tensor.is_leaf or not tensor.requires_grad)
        and not (tensor.is_conj() or tensor.is_neg())
        and not tensor.is_quantized
    )


def _is_shared(storage: UntypedStorage) -> bool:
    if not storage.is_shared() or storage.device.type != "cpu":
        return False
    try:
        return int(shared_descriptor(storage)) >= 0  # without a descriptor, torch has mapped a file
    except RuntimeError as error:
        reraise_from_handler(error)
        return True  # shared by name: torch's "file_system" strategy


def _of_handle(process: int, rebuild: Any, *arguments: Any) -> Any:
    """Return a storage of torch's shared memory.

    Raises:
        PeerLost: the sending process is gone, or the handle was used before.
    """
    try:
        return rebuild(*arguments)
    except (OSError, EOFError, RuntimeError) as error:
        reraise_from_handler(error)
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # this process itself lacks descriptors or memory
        raise PeerLost(
            f"process {process} sent a tensor that lies in torch's shared memory, and its handle is gone "
            f"({type(error).__name__}: {error}): the process ended first, or an earlier get of it failed. "
            "Keep the sender alive until the tensor was received, or send .clone()"
        ) from error


class _Sent:
    """The descriptors that receivers have not fetched yet. When this process ends in order, it waits for them briefly.

    Otherwise a pool could not take the last result of a worker that ends with its task (``maxtasksperchild``).
    """

    MOMENT = 1.0  # seconds

    def __init__(self) -> None:
        self._keys: set[Any] = set()  # keys of multiprocessing's resource_sharer
        self._process = 0

    def add(self, handle: Handle) -> None:
        if self._process != os.getpid():  # a forked child has sent nothing yet, and its finalizers were cleared
            self._process, self._keys = os.getpid(), set()
            util.Finalize(None, self._linger, exitpriority=0)
        waiting = {} if sharer is None else sharer._cache
        for key in [each._id[1] for each in handle[1] if hasattr(each, "_id")]:
            if key in waiting:
                send, close = waiting[key]
                self._keys.add(key)
                # The sharer's thread removes a key before it sends the descriptor, and closes the descriptor afterwards.
                waiting[key] = send, functools.partial(self._close, self._keys, key, close)

    @staticmethod
    def _close(keys: set[Any], key: Any, close: Callable[[], None]) -> None:
        try:
            close()
        finally:
            keys.discard(key)

    def _linger(self) -> None:
        until = time.monotonic() + self.MOMENT
        while self._process == os.getpid() and self._keys and time.monotonic() < until:
            time.sleep(0.002)


_sent = _Sent()
_wanted = threading.local()


def _rebuild_shared(rebuild: Any, arguments: Any) -> Any:
    tensor = rebuild(*arguments)
    convert: Callable[[Any], Any] | None = getattr(_wanted, "convert", None)
    return tensor if convert is None else convert(tensor)


def take_back(handles: Iterable[Handle]) -> None:
    """Use up handles that no process will receive, so that no descriptor stays open for them.

    Those that this process would send are dropped: to fetch one takes descriptors, and a put may have failed for want of them.
    """
    waiting = {} if sharer is None else sharer._cache
    for rebuild, arguments in handles:
        found = [waiting.pop(each._id[1], None) for each in arguments if hasattr(each, "_id")]
        for _, close in filter(None, found):
            close()
        if any(found):
            continue
        try:
            rebuild(*arguments)
        except (OSError, EOFError, RuntimeError) as error:  # it was used before
            reraise_from_handler(error)


# ---- both ways ----


def dump(obj: Any) -> Pickled:
    """Return an object's pickle, and its leaves and handles. Each object in it is reduced once.

    Raises:
        Exception: any error that the object raises when it is pickled.
    """
    file, reducers = io.BytesIO(), _Reducers()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=_is_data)
    pickler.dispatch_table = reducers
    try:
        pickler.dump(obj)
    except BaseException:
        take_back(reducers.handles)
        raise
    return file.getvalue(), reducers.leaves, reducers.handles


def load(data: Any, leaves: Sequence[Any] = (), convert: Callable[[Any], Any] | None = None) -> Any:
    """Return the object of a pickle and its leaves.

    Args:
        convert: the function that converts each tensor in torch's shared memory; None: they stay as they were sent.

    Raises:
        PeerLost: the object refers to shared memory of a process that is gone.
        Exception: any error that the object raises when it is rebuilt.
    """
    # An object's constructor or a finalizer may call get inside this get: restore this get's function afterwards.
    before = getattr(_wanted, "convert", None)
    if convert is before:
        return pickle.loads(data, buffers=leaves)  # noqa: S301 - a related process wrote it
    _wanted.convert = convert
    try:
        return pickle.loads(data, buffers=leaves)  # noqa: S301 - as above
    finally:
        _wanted.convert = before
