"""A worker that runs an ONNX model on what a torch program puts: arrays on shared memory, and nothing is copied for it.

``get(as_numpy=True)`` gives what ONNX Runtime takes. Floats cross as float16 here, and ``get`` restores them.
"""

from __future__ import annotations

from typing import Any

import torch

import tensorpipe_ipc as tp

WEIGHTS, SIZES = {"w": (64, 8), "b": (8,)}, {"x": 64, "y": 8}


def model() -> bytes:
    """A small network as an ONNX file: y = max(0, x @ w + b)."""
    from onnx import TensorProto, helper, numpy_helper

    torch.manual_seed(0)
    weights = [numpy_helper.from_array(torch.randn(shape).numpy(), name) for name, shape in WEIGHTS.items()]
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["xw"]), helper.make_node("Relu", ["xw"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in SIZES.items())
    graph = helper.make_graph(nodes, "worker", [x], [y], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return bytes(made.SerializeToString())


def work(batches: Any, results: Any) -> None:
    """Run the model on each batch."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model(), providers=["CPUExecutionProvider"])
    while (batch := batches.get(as_numpy=True)) is not None:
        (scores,) = session.run(None, {"x": batch["x"]})
        results.put(scores)


def main() -> None:
    """Put batches, and check what comes back against torch."""
    ctx = tp.get_context("spawn")
    batches, results = ctx.Queue(8, wire_dtype=torch.float16), ctx.Queue()
    worker = ctx.Process(target=work, args=(batches, results), daemon=True)
    worker.start()
    torch.manual_seed(0)
    w, b = (torch.randn(shape) for shape in WEIGHTS.values())
    for step in range(5):
        x = torch.rand(1000, 64)
        batches.put({"step": step, "x": x})
        scores = torch.from_numpy(results.get(timeout=60))
        assert torch.allclose(scores, torch.relu(x.half().float() @ w + b), atol=1e-4), step
    batches.put(None)
    worker.join()
    print(f"5 batches through ONNX Runtime, scores as torch's; lost on the way: {batches.statistics().worst_error:.1e}")


if __name__ == "__main__":  # a spawned process imports this file again
    main()
