"""collate: torch's default_collate, changed to stack all tensors of a batch straight into one block of shared memory.

A message goes by reference if its large tensors lie in one block (``handover.py``). So the size of the whole batch must be
known before the first stack. A first pass walks the batch and puts an empty tensor in the place of each stack. Then these
tensors get their memory, and are filled.

User code may read its arguments before they are filled: a function in ``collate_fn_map``, a mapping or sequence type, a
tensor subclass. For such code the samples are stacked immediately, into separate memory, which the put copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from tensorpipe_ipc.borrowed import torch_collate
from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory.leases import Leases
from tensorpipe_ipc.memory.loans import TensorSpec, make_tensors
from tensorpipe_ipc.shared_queue.attachment import Attachment
from tensorpipe_ipc.shared_queue.shared_memory import LEASE_FROM

__all__ = ["CollateMap", "collate"]

CollateMap = Mapping[Any, Callable[..., Any]]


def collate(batch: Any, attachment: Callable[[], Attachment], collate_fn_map: CollateMap | None = None) -> Any:
    """Return a batch of samples, as ``torch.utils.data.default_collate`` makes it.

    Args:
        batch: the samples.
        attachment: returns the attachment to the memory to stack into. It is called in a DataLoader's worker only.
        collate_fn_map: as for torch's ``collate``; None: torch's own map.

    Raises:
        TypeError, RuntimeError: torch cannot stack the samples.
    """
    if torch_collate is None:
        if collate_fn_map is not None:
            raise TypeError(f"collate_fn_map: torch {torch.__version__} has no collate function that takes one")
        return default_collate(batch)
    functions = torch_collate.default_collate_fn_map if collate_fn_map is None else collate_fn_map
    if get_worker_info() is None:
        return torch_collate.collate(batch, collate_fn_map=dict(functions))
    plan = _Plan(functions)
    collated = plan.collated(batch)
    if plan.stacks:
        plan.fill(attachment())
    return collated


class _Plan:
    """The leaves to stack, and their places in the batch.

    Attributes:
        stacks: for each stack, the tensors to stack, the stack's spec, and the tensor that will hold it.
    """

    def __init__(self, functions: CollateMap) -> None:
        self.stacks: list[tuple[list[torch.Tensor], TensorSpec, torch.Tensor]] = []
        self._functions = functions
        # For user code, which may read its tensors before they are filled.
        self._at_once = {
            kind: _stacked if function is torch_collate.collate_tensor_fn else function
            for kind, function in functions.items()
        }

    def collated(self, batch: Any) -> Any:
        """Return a batch as torch collates it, with empty tensors in the places of the stacks that ``fill`` makes later."""
        elem = batch[0]
        kind = type(elem)
        function = self._function_for(elem)
        if function is torch_collate.collate_tensor_fn and _can_be_stacked(batch):
            return self._later(batch)
        is_array = function is torch_collate.collate_numpy_array_fn
        if is_array and not torch_collate.np_str_obj_array_pattern.search(elem.dtype.str):
            return self.collated([torch.as_tensor(each) for each in batch])
        if function is not None or not _is_plain(kind):
            return torch_collate.collate(batch, collate_fn_map=self._at_once)
        if kind is dict:
            return {key: self.collated([each[key] for each in batch]) for key in elem}
        if kind is not list and kind is not tuple:
            return kind(*(self.collated(samples) for samples in zip(*batch, strict=False)))
        if any(len(each) != len(elem) for each in batch):
            return torch_collate.collate(batch, collate_fn_map=self._at_once)  # it raises the error
        return [self.collated(samples) for samples in zip(*batch, strict=False)]  # torch makes a tuple a list, too

    def _function_for(self, elem: Any) -> Callable[..., Any] | None:
        """Return the function that torch calls for a sample, looked up as torch does."""
        function = self._functions.get(type(elem))
        if function is not None:
            return function
        return next((made for kind, made in self._functions.items() if isinstance(elem, kind)), None)

    def _later(self, tensors: Any) -> torch.Tensor:
        spec, stack = TensorSpec((len(tensors), *tensors[0].shape), tensors[0].dtype), _empty(tensors[0].dtype)
        self.stacks.append((tensors, spec, stack))
        return stack

    def fill(self, attachment: Attachment) -> None:
        """Give the stacks their memory, and fill them."""
        specs = [spec for _, spec, _ in self.stacks]
        if sum(spec.nbytes for spec in specs) < LEASE_FROM or not _placed(specs, self.stacks, attachment):
            for _, spec, stack in self.stacks:
                stack.resize_(spec.shape)
        for tensors, _, stack in self.stacks:
            torch.stack(tensors, 0, out=stack)


def _placed(specs: list[TensorSpec], stacks: list[Any], attachment: Attachment) -> bool:
    """Place the stacks in one block, which the worker's next put hands over. Return whether there was room.

    There is no room if the worker keeps a part of an earlier batch: each part keeps its whole block.
    """
    leases: Leases = attachment.leases
    if leases.offered:
        return False
    try:
        places = make_tensors(specs, leases, attachment.allocate, offered=True)
    except SharedMemoryError:
        return False  # the put waits for room, and its error names the processes that hold memory
    for place, (_, _, stack) in zip(places, stacks, strict=True):
        stack.set_(place)
    return True


def _is_plain(kind: type) -> bool:
    """Return whether a container's constructor does not read the content."""
    return kind in (dict, list, tuple) or (kind.__bases__ == (tuple,) and hasattr(kind, "_fields"))


def _can_be_stacked(tensors: Any) -> bool:
    """Return whether tensors are plain and alike. Others go to torch, which stacks them or raises the error."""
    first = tensors[0]
    if first.layout is not torch.strided or first.device.type != "cpu" or first.is_nested or first.is_quantized:
        return False
    if first.is_conj() or first.is_neg():
        return False
    shape, dtype = first.shape, first.dtype
    return all(
        type(each) is torch.Tensor and each.shape == shape and each.dtype == dtype and not each.requires_grad
        for each in tensors
    )


def _stacked(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Stack tensors as torch does in a worker, but not into torch's shared memory, from which the put would copy them."""
    if not _can_be_stacked(batch):
        return torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    stack = _empty(batch[0].dtype).resize_(len(batch), *batch[0].shape)
    return torch.stack(tuple(batch), 0, out=stack)


def _empty(dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype)
