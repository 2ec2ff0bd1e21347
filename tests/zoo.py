"""The tensor zoo: every kind of tree that may travel, by name, and how to tell whether it came back as it was.

Everything is made anew by a call, from a fixed seed, so that two processes make the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from inside import zeros_without_memory

import tensorpipe_ipc as tp
from tensorpipe_ipc.wire.dtypes import BY_TORCH

LARGE = 1 << 18  # bytes: over the size from which a payload is a frame of its own


@tp.register_type
class Animal(NamedTuple):
    image: Any
    label: Any


@tp.register_type
@dataclasses.dataclass(frozen=True)
class Batch:
    samples: Any
    weight: float
    history: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "history", "made by __post_init__")


class Pose:
    """A class of a user's own, which says how it is taken apart."""

    def __init__(self, rotation: Any, frame: str) -> None:
        self.rotation, self.frame = rotation, frame


tp.register_type(Pose, to=lambda pose: (pose.rotation, pose.frame), from_=lambda parts: Pose(parts[0], parts[1]))


def ordered() -> OrderedDict[str, Any]:
    """An ordered dict with an attribute, as a state_dict is."""
    made: Any = OrderedDict(a=None)
    made._metadata = OrderedDict()
    return made  # type: ignore[no-any-return]


def _state_dict() -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    return module.state_dict()


def bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits as a tensor: every dtype has a number for all of them, but for bool."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def _expanded() -> torch.Tensor:
    return torch.tensor([1.5, 2.5]).expand(3, 2)


def _shared() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float32)
    return {"base": base, "head": base[:6], "grid": base.view(4, 6)[:, ::2], "bytes": base.view(torch.uint8)[3:9]}


def _shared_large() -> list[torch.Tensor]:
    base = bits(torch.int32, LARGE)
    return [base[:1000], base[LARGE // 2 :], torch.ones(3)]


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.setflags(write=False)
    return array


def typed_storage(dtype: torch.dtype) -> Any:
    return torch.storage.TypedStorage(wrap_storage=bits(dtype, 5).untyped_storage(), dtype=dtype, _internal=True)


def nested(depth: int) -> Any:
    tree: Any = torch.ones(1)
    for level in range(depth):
        tree = [tree] if level % 2 else {"deeper": tree}
    return tree


TENSORS: dict[str, Callable[[], Any]] = {
    **{f"{dtype}": (lambda dtype=dtype: bits(dtype, 3, 5)) for dtype in BY_TORCH},
    **{f"{dtype} large": (lambda dtype=dtype: bits(dtype, LARGE // dtype.itemsize)) for dtype in BY_TORCH},
    **{f"{dtype} 0-d": (lambda dtype=dtype: bits(dtype)) for dtype in BY_TORCH},
    "0-d": lambda: torch.tensor(3.25),
    "0-d bool": lambda: torch.tensor(True),
    "empty": lambda: torch.empty(0),
    "empty of a shape": lambda: torch.empty(4, 0, 3, dtype=torch.int16),
    "one item": lambda: torch.ones(1, 1, 1),
    "64 dimensions": lambda: torch.ones([1] * 64),
    "every other item": lambda: torch.arange(40.0).view(4, 10)[:, ::2],
    "with an offset": lambda: torch.arange(40.0)[7:19],
    "transposed": lambda: torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
    "channels last": lambda: bits(torch.float32, 2, 3, 5, 7).to(memory_format=torch.channels_last),
    "channels last large": lambda: bits(torch.float32, 4, 3, 100, 100).to(memory_format=torch.channels_last),
    "expanded": _expanded,
    "expanded large": lambda: torch.arange(4.0).expand(LARGE, 4),
    "large with gaps": lambda: bits(torch.int16, LARGE, 2)[:, 0],
    "conjugated": lambda: bits(torch.complex64, 3, seed=1).conj(),
    "negative bit": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "negative bit, dense": lambda: torch._neg_view(torch.arange(3.0)),
    "zero tensor": lambda: zeros_without_memory(3),
    "nan and infinity": lambda: torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
    "requires_grad": lambda: torch.ones(3, requires_grad=True),
    "one item of an odd stride": lambda: torch.arange(4.0)[::2][:1],
    "parameter, one item of an odd stride": lambda: torch.nn.Parameter(torch.arange(4.0)[::2][:1]),
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "detached": lambda: (torch.ones(3, requires_grad=True) * 2).detach(),
}

ARRAYS: dict[str, Callable[[], Any]] = {
    **{
        f"array {row.numpy}": (lambda row=row: bits(row.torch, 3, 5).numpy())
        for row in BY_TORCH.values()
        if row.numpy is not None
    },
    "array 0-d": lambda: np.array(2.5),
    "array empty": lambda: np.zeros((0, 3), np.int8),
    "array in Fortran order": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "array reversed": lambda: np.arange(12)[::-1],
    "array reversed, one item": lambda: np.arange(1)[::-1],
    "array broadcast": lambda: np.broadcast_to(np.arange(3), (4, 3)),
    "array read-only": lambda: _read_only(np.arange(9.0)),
    "array large": lambda: bits(torch.float64, LARGE // 8).numpy(),
    "array field of a record": lambda: np.zeros(5, np.dtype([("a", "i4"), ("b", "u1")]))["a"],
}

STORAGES: dict[str, Callable[[], Any]] = {
    "untyped storage": lambda: bits(torch.int16, 7).untyped_storage(),
    "untyped storage empty": lambda: torch.UntypedStorage(0),
    **{
        f"storage of {dtype}": (lambda dtype=dtype: typed_storage(dtype))
        for dtype in (torch.float16, torch.float32, torch.float64, torch.uint8, torch.bool, torch.bfloat16)
    },
}

SCALAR_KINDS = ("bool", "int8", "uint8", "int64", "uint64", "float16", "float32", "float64", "complex64", "complex128")


def _scalar(kind: str) -> Any:
    least = {"uint64": (1 << 64) - 1, "int64": -(1 << 63)}
    return np.dtype(kind).type(least.get(kind, 1))


SCALARS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "zero": lambda: 0,
    "int64 least": lambda: -(1 << 63),
    "uint64 most": lambda: (1 << 64) - 1,
    "int beyond 64 bits": lambda: -(1 << 200) + 7,
    "int 2**64": lambda: 1 << 64,
    "float": lambda: 0.1,
    "minus zero": lambda: -0.0,
    "nan": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "complex": lambda: complex(1.5, -0.0),
    "str": lambda: "naïve 🚀\0",
    "str with a lone surrogate": lambda: "a\ud800b",
    "bytes": lambda: bytes(range(256)),
    "dtype": lambda: torch.bfloat16,
    "Size": lambda: torch.Size([2, 0, 5]),
    "device": lambda: torch.device("cuda", 1),
    **{f"NumPy {kind}": functools.partial(_scalar, kind) for kind in SCALAR_KINDS},
}

TREES: dict[str, Callable[[], Any]] = {
    "empty list": lambda: [],
    "empty tuple": lambda: (),
    "empty dict": lambda: {},
    "dict of tensors": lambda: {"x": bits(torch.float32, 4), "y": bits(torch.int64, 2, 2)},
    "large and small": lambda: [
        bits(torch.uint8, LARGE),
        bits(torch.uint8, 3),
        bits(torch.int32, LARGE),
        torch.ones(2),
    ],
    "hundred small": lambda: {f"leaf {index}": bits(torch.float32, 11, seed=index) for index in range(100)},
    "keys of all kinds": lambda: {"a": 1, 2: "b", 3.5: None, True: (), None: [], b"k": {}, (1, ("x", 2)): 0.5},
    "mixed": lambda: {"step": 7, "xs": (torch.ones(2), [np.arange(3), "text", None]), "lr": 1e-3, "z": 1j},
    "NamedTuple": lambda: Animal(bits(torch.uint8, 3, 4, 4), 7),
    "dataclass": lambda: Batch([Animal(torch.ones(2), 1), Animal(torch.zeros(2), 0)], 0.5),
    "ordered dict": lambda: OrderedDict(b=torch.ones(2), a=[1, np.float32(0.1)]),
    "state_dict": _state_dict,
    "class of one's own": lambda: [Pose(torch.eye(3), "map"), Pose({"q": np.ones(4)}, "")],
    "deep": lambda: nested(64),
    "shared storage": _shared,
    "shared storage, large": _shared_large,
    "same tensor twice": lambda: [torch.arange(5.0)] * 2,
    "shared, one conjugated": lambda: (lambda base: [base, base[1:], base.conj()])(bits(torch.complex64, 4)),
}

ZOO: dict[str, Callable[[], Any]] = {**TENSORS, **ARRAYS, **STORAGES, **SCALARS, **TREES}


def make(name: str) -> Any:
    """One animal, made anew."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on complex32
        return ZOO[name]()


def dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps or overlaps. Its strides travel with it only then."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[::-1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def content(tensor: torch.Tensor) -> bytes:
    """A tensor's items as bytes, in the order of its indices."""
    tensor = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _octets(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def same(sent: Any, got: Any, path: str = "tree", strides: bool = True) -> None:
    """Raise AssertionError, with the path, unless ``got`` is bit for bit what was sent."""
    assert type(got) is type(sent), f"{path}: {type(got)} for {type(sent)}"
    if isinstance(sent, torch.Tensor):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape), path
        assert got.requires_grad == sent.requires_grad, path
        assert content(got) == content(sent), path
        if strides and sent.numel() and dense(sent):
            assert got.stride() == sent.stride() or 1 in sent.shape, f"{path}: {got.stride()} for {sent.stride()}"
    elif isinstance(sent, np.ndarray):
        assert (got.dtype, got.shape, got.tobytes()) == (sent.dtype, sent.shape, sent.tobytes()), path
        assert got.flags.writeable, path
    elif isinstance(sent, torch.UntypedStorage):
        assert content(_octets(got)) == content(_octets(sent)), path
    elif isinstance(sent, torch.storage.TypedStorage):
        assert got.dtype is sent.dtype, path
        same(sent._untyped_storage, got._untyped_storage, path, strides)
    elif isinstance(sent, Pose):
        same((sent.rotation, sent.frame), (got.rotation, got.frame), path, strides)
    elif isinstance(sent, dict):
        if isinstance(sent, OrderedDict):
            same(vars(sent), vars(got), f"{path}.__dict__", strides)
        assert [(type(key), key) for key in got] == [(type(key), key) for key in sent], path
        for key in sent:
            same(sent[key], got[key], f"{path}[{key!r}]", strides)
    elif dataclasses.is_dataclass(sent):
        for field in dataclasses.fields(sent):
            same(getattr(sent, field.name), getattr(got, field.name), f"{path}.{field.name}", strides)
    elif isinstance(sent, (list, tuple)) and not isinstance(sent, torch.Size):
        assert len(got) == len(sent), path
        for index, (one, other) in enumerate(zip(sent, got, strict=True)):
            same(one, other, f"{path}[{index}]", strides)
    elif isinstance(sent, complex):
        same([sent.real, sent.imag], [got.real, got.imag], path)
    elif isinstance(sent, float):
        assert struct.pack("<d", got) == struct.pack("<d", sent), path
    else:
        assert got == sent, path


def refused_by(serializer: str, name: str) -> bool:
    """Return whether a serializer by its nature has no bytes for that animal. NumPy lacks some dtypes."""
    if serializer != "numpy":
        return False
    animal = make(name)
    return isinstance(animal, torch.Tensor) and BY_TORCH[animal.dtype].numpy is None
