"""Any picklable object, with its tensors out of the pickle: for queues, whose ends are one family of processes.

Endpoints never come here. The pickler is multiprocessing's own (so that locks, connections and whatever else knows how to
travel to a relative still do), with three things changed:

* A tensor, array or storage is not pickled, nor moved into torch's shared memory. It leaves its place, and travels beside
  the pickle as a leaf of the message.
* What the program itself put into torch's shared memory stays shared: torch's own reducers write a *handle* of it.
  Once its bytes are asked for, a handle is used up. One that is not sent must be taken back (``take_back``).
* torch's reducer writes a quantized tensor that nobody can read. It is written as ``torch.save`` does.
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
from multiprocessing import resource_sharer, util
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import Parameter
from torch.storage import TypedStorage, UntypedStorage

from tensorpipe_ipc.borrowed import reducers, shared_descriptor, storage_classes
from tensorpipe_ipc.errors import PeerLost
from tensorpipe_ipc.serializers.torch_save import TorchSave
from tensorpipe_ipc.wire.dtypes import BY_NUMPY
from tensorpipe_ipc.wire.metas import OPAQUE

__all__ = ["Handle", "Pickled", "dump", "dump_without_leaves", "is_shared_by_torch", "load", "take_back"]

Handle = tuple[Callable[..., Any], tuple[Any, ...]]  # what torch rebuilds a shared storage with
# An object's pickle; the leaves whose places are in it, in their order; handles of the shared storages that it refers to.
Pickled = tuple[bytes, Sequence[Any], Sequence[Handle]]


class _Reducers(dict[Any, Any]):
    """The reducers of objects, by type: the table that ForkingPickler has, but for tensors, arrays and storages.

    A table, and not ``reducer_override``, which is asked about every object: 1.3 us less for a small tuple.
    """

    leaves: Any = ()  # of most objects there are none, and these take no time
    handles: Any = ()

    def __missing__(self, kind: Any) -> Any:
        if kind in _KINDS:
            return self._reduce
        return _registered.get(kind) or copyreg.dispatch_table[kind]

    def _reduce(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is Parameter:
            return self._reduce_tensor(obj)
        if kind is np.memmap or kind is np.ndarray:
            is_leaf = obj.dtype in BY_NUMPY and obj.dtype.isnative
            return self._leave(obj) if is_leaf else obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        storage = obj if kind is UntypedStorage else obj._untyped_storage
        if _is_shared(storage):
            return self._share(storage) if storage is obj else _registered[kind](obj)
        # Not obj.device: torch warns of that, whoever asks.
        return self._leave(obj) if storage is obj or storage.device.type == "cpu" else _registered[kind](obj)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_quantized:
            return _from_file, (TorchSave().encode(tensor)[1],)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            return _registered[type(tensor)](tensor)
        if not is_shared_by_torch(tensor):
            return self._leave(tensor)
        return _rebuild_shared, _registered[type(tensor)](tensor)

    def _leave(self, leaf: Any) -> Any:
        if self.leaves == ():
            self.leaves = []
        self.leaves.append(leaf)
        return _itself, (_PLACE,)

    def _share(self, storage: UntypedStorage) -> Any:
        handle = _registered[UntypedStorage](storage)
        if self.handles == ():
            self.handles = []
        self.handles.append(handle)
        _sent.add(handle)
        return _of_handle, (os.getpid(), handle[0], *handle[1])


_KINDS: frozenset[Any] = frozenset((torch.Tensor, Parameter, np.ndarray, np.memmap, TypedStorage, *storage_classes))
_registered: Any = reducers
_PLACE = pickle.PickleBuffer(bytearray(1))  # what is pickled out of band, as the standard has it: there stands a leaf


def _is_data(buffer: pickle.PickleBuffer) -> bool:
    """Return whether a buffer goes into the pickle: any object's own does."""
    return buffer is not _PLACE


def _itself(leaf: Any) -> Any:
    return leaf


def _from_file(data: bytes) -> torch.Tensor:
    return TorchSave().decode(OPAQUE, memoryview(data))


# ---- torch's shared memory ----


def is_shared_by_torch(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in torch's shared memory, and torch's handle of it says all about it.

    Not so a tensor on a GPU, on a mapped file, with history, or conjugated.
    """
    try:
        storage = tensor.untyped_storage()
        if not storage.is_shared():
            return False
    except (NotImplementedError, RuntimeError):
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
        return int(shared_descriptor(storage)) >= 0  # else torch has mapped a file
    except RuntimeError:
        return True  # shared by name, "file_system"


def _of_handle(process: int, rebuild: Any, *arguments: Any) -> Any:
    """Return a storage of torch's shared memory.

    Raises:
        PeerLost: who sent it is gone, or the handle was used before.
    """
    try:
        return rebuild(*arguments)
    except (OSError, EOFError, RuntimeError) as error:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # of this process
        raise PeerLost(
            f"process {process} sent a tensor that lies in torch's shared memory, and its handle is gone "
            f"({type(error).__name__}: {error}): the process ended first, or an earlier get of it failed. "
            "Keep the sender alive until the tensor was received, or send .clone()"
        ) from error


class _Sent:
    """The descriptors that wait, in this process, to be asked for: when it ends in order, it gives them a moment.

    Else a pool whose worker ends with its task (``maxtasksperchild``) could not take that worker's last result.
    """

    MOMENT = 1.0  # seconds

    def __init__(self) -> None:
        self._keys: set[Any] = set()  # of multiprocessing's resource_sharer
        self._process = 0

    def add(self, handle: Handle) -> None:
        if self._process != os.getpid():  # a forked child has sent nothing yet, and its finalizers were cleared
            self._process, self._keys = os.getpid(), set()
            util.Finalize(None, self._linger, exitpriority=0)
        waiting = getattr(getattr(resource_sharer, "_resource_sharer", None), "_cache", {})
        for key in [each._id[1] for each in handle[1] if hasattr(each, "_id")]:
            if key in waiting:
                send, close = waiting[key]
                self._keys.add(key)
                # The sharer's thread forgets a key before it sends, and closes when it has sent.
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
    made: Callable[[Any], Any] | None = getattr(_wanted, "made", None)
    return tensor if made is None else made(tensor)


def take_back(handles: Iterable[Handle]) -> None:
    """Use up handles that nobody will receive, so that no descriptor stays open for them."""
    for rebuild, arguments in handles:
        try:
            rebuild(*arguments)
        except (OSError, EOFError, RuntimeError):
            pass  # it was used


# ---- both ways ----


def dump(obj: Any) -> Pickled:
    """An object's pickle, and what is not in it. Each object in it is reduced once.

    Raises:
        Exception: whatever the object raises when it is pickled.
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


def dump_without_leaves(obj: Any) -> bytes | None:
    """Return an object's pickle; None if there are tensors, arrays or storages in it.

    Raises:
        Exception: whatever the object raises when it is pickled.
    """
    data, leaves, handles = dump(obj)
    take_back(handles)
    return None if leaves or handles else data


def load(data: Any, leaves: Sequence[Any] = (), made: Callable[[Any], Any] | None = None) -> Any:
    """Return the object of a pickle and its leaves.

    Args:
        made: what becomes of tensors in torch's shared memory; None: they are as they were sent.

    Raises:
        PeerLost: it refers to shared memory of a process that is gone.
        Exception: whatever the object raises when it is made again.
    """
    # Of the get in which an object that is being made, or a finalizer, gets another.
    before = getattr(_wanted, "made", None)
    if made is before:
        return pickle.loads(data, buffers=leaves)  # noqa: S301 - of a relative of this process
    _wanted.made = made
    try:
        return pickle.loads(data, buffers=leaves)  # noqa: S301 - as above
    finally:
        _wanted.made = before
