"""A tensor to bytes and back: three methods that people write by hand, beside this package's serializers.

The methods by hand give bare bytes; the reader must know dtype and shape from elsewhere (but for torch.save). What ours
give has them: ``encode`` returns the packed meta and the payload, and ``decode`` gets a meta and a writable buffer, as
a frame from a socket is. Rounds alternate between all, every result is checked, and the ratios are from this one run.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.measure import child, interleaved, keep, machine, peak_beyond, ratio
from bench.results import Result
from tensorpipe_ipc.serializers import serializer_named

__all__ = ["SHAPES", "Result", "add_arguments", "measure_memory", "rivals", "run"]

# Iterations for each shape, as in the comparison that this one repeats.
SHAPES: dict[tuple[int, ...], int] = {
    (100,): 10_000,
    (1000,): 10_000,
    (100, 100): 5_000,
    (1000, 1000): 1_000,
    (5000, 5000): 100,
}
OURS = ("raw", "numpy", "torch_save")
RAW = "raw (ours)"


class Rival(NamedTuple):
    """One way to turn a tensor into bytes and back."""

    label: str
    version: str
    serialize: Callable[[torch.Tensor], Any]
    received: Callable[[Any], Any]  # what arrives at the other end of what serialize gave; not timed
    deserialize: Callable[[Any, torch.Size], torch.Tensor]
    nbytes: Callable[[Any], int]


def rivals() -> dict[str, Rival]:
    """All that are compared, by label."""
    with_numpy, with_torch = f"numpy {np.__version__}", f"torch {torch.__version__}"
    by_hand = [
        Rival("numpy by hand", with_numpy, _numpy_out, bytes, _numpy_in, len),
        Rival("data_ptr by hand", with_torch, _data_ptr_out, bytes, _data_ptr_in, len),
        Rival("torch.save by hand", with_torch, _torch_save_out, bytes, _torch_save_in, len),
    ]
    return {rival.label: rival for rival in [*by_hand, *map(_ours, OURS)]}


def _cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cpu else tensor.cpu()


def _numpy_out(tensor: torch.Tensor) -> bytes:
    return _cpu(tensor).numpy().tobytes()


def _numpy_in(data: bytes, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy().reshape(shape))


def _data_ptr_out(tensor: torch.Tensor) -> bytes:
    tensor = _cpu(tensor)
    return ctypes.string_at(tensor.data_ptr(), tensor.nelement() * tensor.element_size())


def _data_ptr_in(data: bytes, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)


def _torch_save_out(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(_cpu(tensor), file)
    return file.getvalue()


def _torch_save_in(data: bytes, _: torch.Size) -> torch.Tensor:
    loaded: torch.Tensor = torch.load(io.BytesIO(data))
    return loaded


def _ours(name: str) -> Rival:
    serializer = serializer_named(name)
    decode = serializer.decode
    return Rival(
        f"{name} (ours)",
        "tensorpipe_ipc",
        serializer.encode,
        lambda sent: (sent[0], memoryview(bytearray(sent[1]))),
        lambda got, _: decode(*got),
        lambda sent: len(sent[0].packed) + len(sent[1]),
    )


def _noise(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def measure_memory(label: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Peak bytes beyond the tensor to serialize it, and beyond its bytes to deserialize them. For a fresh process."""
    rival, tensor = rivals()[label], _noise(shape)
    small = _noise((10,))
    rival.deserialize(rival.received(rival.serialize(small)), small.shape)  # imports and caches are not the tensor's
    serialize = peak_beyond(lambda: rival.serialize(tensor))
    got = rival.received(rival.serialize(tensor))
    return serialize, peak_beyond(lambda: rival.deserialize(got, tensor.shape))


def _memory_in_child(label: str, shape: tuple[int, ...]) -> tuple[int, int]:
    code = f"from bench.serializers import measure_memory as m; print(*m({label!r}, {shape!r}))"
    serialize, deserialize = map(int, child(code).split())
    return serialize, deserialize


def measure(shape: tuple[int, ...], iterations: int) -> list[Result]:
    """Time all rivals at one shape, and check each. A rival whose result is wrong is an error, not a row."""
    tensor, known = _noise(shape), rivals()
    sent = {label: rival.serialize(tensor) for label, rival in known.items()}
    got = {label: rival.received(sent[label]) for label, rival in known.items()}
    out = interleaved({label: partial(rival.serialize, tensor) for label, rival in known.items()}, iterations)
    into = interleaved(
        {label: partial(rival.deserialize, got[label], tensor.shape) for label, rival in known.items()}, iterations
    )
    results = []
    for label, rival in known.items():
        again = rival.deserialize(rival.received(rival.serialize(tensor)), tensor.shape)
        if again.shape != tensor.shape or again.dtype != tensor.dtype or not torch.equal(again, tensor):
            raise RuntimeError(f"{label} does not give the tensor of shape {shape} back")
        mib = tensor.nbytes / 2**20
        memory = _memory_in_child(label, shape)
        results.append(
            Result(
                method=label,
                shape=shape,
                serialize_ms=statistics.median(out[label]) * 1e3,
                deserialize_ms=statistics.median(into[label]) * 1e3,
                serialize_mb_s=mib / statistics.median(out[label]),
                deserialize_mb_s=mib / statistics.median(into[label]),
                buffer_kb=rival.nbytes(sent[label]) / 1024,
                max_difference=float((again - tensor).abs().max()),
                serialize_peak_kb=memory[0] / 1024 if memory[0] >= 0 else -1.0,
                deserialize_peak_kb=memory[1] / 1024 if memory[1] >= 0 else -1.0,
                serialize_vs_raw=ratio(out[label], out[RAW]),
                deserialize_vs_raw=ratio(into[label], into[RAW]),
            )
        )
    return results


def ratios(results: list[Result]) -> list[dict[str, Any]]:
    """Return how many times faster raw is: to serialize than data_ptr by hand, to deserialize than the best by hand."""
    found = []
    for shape in dict.fromkeys(result.shape for result in results):
        of = {result.method: result for result in results if result.shape == shape}
        best = min((of[label] for label in of if label.endswith("by hand")), key=lambda one: one.deserialize_ms)
        found.append(
            {
                "shape": shape,
                "serialize_vs_data_ptr": of["data_ptr by hand"].serialize_vs_raw,
                "deserialize_vs_best": best.deserialize_vs_raw,
                "best": best.method,
            }
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--scale", type=float, default=1.0, help="times the number of iterations (0.1: a quick look)")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--plot", metavar="PNG", help="draw them there")


def run(arguments: argparse.Namespace) -> None:
    """The command."""
    from bench import plot, table  # rich and matplotlib: the measuring children do without

    results: list[Result] = []
    for shape in table.progress(list(SHAPES)):
        results += measure(shape, max(1, round(SHAPES[shape] * arguments.scale)))
    host, versions = machine(), {label: rival.version for label, rival in rivals().items()}
    table.show(results, ratios(results), host)
    rows = [result._asdict() for result in results]
    keep(arguments.json, host, scale=arguments.scale, rivals=versions, results=rows, ratios=ratios(results))
    if arguments.plot:
        plot.draw(results, arguments.plot)
