"""The serializer ``torch_save``: every layout, and no code from the payload."""

from __future__ import annotations

import base64
import io
import pickle
import threading
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from children import PATIENCE, in_thread
from crash_points import in_child, reap
from exchange import parts, round_trip, sent
from programs import ran, ran_in_fork
from torch.utils.serialization import config

import tensorpipe_ipc as tp
from tensorpipe_ipc.errors import ProtocolError, UnsupportedLeaf
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.wire.metas import OPAQUE, meta_of

TORCH_SAVE = serializer_named("torch_save")
LAYOUTS = {
    "COO": lambda: torch.eye(3).to_sparse(),
    "CSR": lambda: torch.eye(4).to_sparse_csr(),
    "CSC": lambda: torch.eye(4).to_sparse_csc(),
    "BSR": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "BSC": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.quint8
    ),
}


def dense(tensor: torch.Tensor) -> list[Any]:
    if tensor.is_nested:
        return [part.tolist() for part in tensor.unbind()]
    if tensor.is_quantized:
        return [tensor.int_repr().tolist(), tensor.dequantize().tolist()]
    return tensor.to_dense().tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_takes_every_layout(layout: str) -> None:
    """Sparse, nested and quantized tensors arrive as what they were, alone and beside others, twice over."""
    tensor = LAYOUTS[layout]()
    for got in (round_trip(tensor, "torch_save"), *round_trip([torch.ones(2), tensor, tensor], "torch_save")[1:]):
        assert (got.layout, got.dtype, got.is_nested) == (tensor.layout, tensor.dtype, tensor.is_nested)
        assert dense(got) == dense(tensor)


def test_refuses_what_torch_cannot_save() -> None:
    """mkldnn and meta tensors are refused, with what to do."""
    for tensor, says in ((torch.ones(3).to_mkldnn(), "to_dense"), (torch.ones(2, device="meta"), "send its shape")):
        with pytest.raises(UnsupportedLeaf, match=says):
            sent(tensor, "torch_save")


def test_a_view_does_not_drag_its_storage_along() -> None:
    """Of a small view of a large storage only the view is saved."""
    assert len(parts(sent(torch.zeros(1 << 20)[:10], "torch_save"))[1]) < 4096


def rezip(payload: bytes, compression: int) -> memoryview:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(payload)) as before, zipfile.ZipFile(file, "w", compression) as after:
        for entry in before.infolist():
            after.writestr(entry.filename, before.read(entry.filename))
    return memoryview(bytearray(file.getvalue()))


def test_refuses_compressed_archives() -> None:
    """An archive that unpacks to more than it stores, which torch.load would read, is refused."""
    meta, payload = TORCH_SAVE.encode(torch.zeros(1 << 20))
    assert TORCH_SAVE.decode(meta, rezip(bytes(payload), zipfile.ZIP_STORED)).shape == (1 << 20,)
    bomb = rezip(bytes(payload), zipfile.ZIP_DEFLATED)
    assert len(bomb) < 50_000
    with pytest.raises(ProtocolError, match=r"bytes for a tensor of 4194304|compressed"):
        TORCH_SAVE.decode(meta, bomb)
    with pytest.raises(ProtocolError, match="compressed"):
        TORCH_SAVE.decode(OPAQUE, bomb)


def test_refuses_older_formats() -> None:
    """torch's format before archives, which allocates what it announces, is refused."""
    file = io.BytesIO()
    torch.save(torch.ones(3), file, _use_new_zipfile_serialization=False)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as empty:
        empty.writestr("a", "b")
    for behind in (b"", archive.getvalue()):  # as which zipfile takes the whole
        with pytest.raises(ProtocolError, match=r"no torch.save file"):
            TORCH_SAVE.decode(meta_of(torch.float32, (3,)), memoryview(file.getvalue() + behind))


def test_refuses_what_is_no_tensor_or_another() -> None:
    """A file of something else than the meta says is refused, with both."""
    file = io.BytesIO()
    torch.save({"a": 1}, file)
    with pytest.raises(ProtocolError, match="holds a dict, not a tensor"):
        TORCH_SAVE.decode(OPAQUE, memoryview(file.getvalue()))
    _, payload = TORCH_SAVE.encode(torch.ones(3))
    for meta in (meta_of(torch.float64, (3,)), meta_of(torch.float32, (4,))):
        with pytest.raises(ProtocolError, match=r"holds torch.float32 \[3\]"):
            TORCH_SAVE.decode(meta, memoryview(payload))


@pytest.mark.parametrize("kind", ["nested", "sparse"])
def test_refuses_a_tensor_of_another_layout(kind: str) -> None:
    """A file of a nested or sparse tensor is refused where the header says a plain one."""
    tensor = torch.nested.nested_tensor([torch.ones(2)]) if kind == "nested" else torch.ones(2).to_sparse()
    _, payload = TORCH_SAVE.encode(tensor)
    with pytest.raises(ProtocolError, match=f"{kind}.*the header says"):
        TORCH_SAVE.decode(meta_of(torch.float32, (2,)), memoryview(payload))


def test_threads_that_read_at_a_time_do_not_undo_each_others_checks() -> None:
    """torch checks by one setting of the process, and by lists of it; warnings have one setting, too."""
    filters, checks = list(warnings.filters), torch.sparse.check_sparse_tensor_invariants.is_enabled()
    wrong = torch.sparse_coo_tensor(torch.tensor([[1_000_000]]), torch.ones(1), (2,), check_invariants=False)
    good, bad = (memoryview(TORCH_SAVE.encode(tensor)[1]) for tensor in (torch.eye(10).to_sparse(), wrong))

    def read_good() -> None:
        for _ in range(100):
            assert TORCH_SAVE.decode(OPAQUE, good).to_dense().equal(torch.eye(10))

    def read_bad() -> None:
        for _ in range(100):
            with pytest.raises(ProtocolError, match="inconsistent with indices"):
                TORCH_SAVE.decode(OPAQUE, bad)

    for ended in [in_thread(read) for read in (read_good, read_bad, read_good)]:
        ended()
    assert warnings.filters == filters
    assert torch.sparse.check_sparse_tensor_invariants.is_enabled() == checks


@pytest.mark.parametrize("checks", [False, True], ids=["the program checks none", "it checks all"])
def test_a_file_that_ends_in_an_error_spoils_none_of_the_next_ones(checks: bool) -> None:
    """torch notes sparse tensors that are to be checked in a list of the process, and may leave them there."""
    wrong = torch.sparse_coo_tensor(torch.tensor([[1_000_000]]), torch.ones(1), (2,), check_invariants=False)
    file, (meta, payload) = io.BytesIO(), TORCH_SAVE.encode(torch.eye(3).to_sparse())
    torch.save([wrong, Path("x")], file)
    with torch.sparse.check_sparse_tensor_invariants(checks):  # type: ignore[no-untyped-call]
        for _ in range(2):
            with pytest.raises(ProtocolError):
                TORCH_SAVE.decode(OPAQUE, memoryview(file.getvalue()))
            assert TORCH_SAVE.decode(meta, memoryview(payload)).to_dense().equal(torch.eye(3))


def test_where_warnings_are_errors_what_torch_says_each_time_costs_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    load, (meta, payload) = torch.load, TORCH_SAVE.encode(torch.ones(3))

    def warning_load(*arguments: Any, **options: Any) -> Any:
        warnings.warn("as ever", UserWarning, stacklevel=2)
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", warning_load)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TORCH_SAVE.decode(meta, memoryview(payload)).equal(torch.ones(3))


@pytest.mark.slow
def test_where_warnings_are_errors_every_layout_arrives_and_no_filter_is_touched() -> None:
    """torch says of some layouts that they are young or old, once in a process."""
    payloads = [TORCH_SAVE.encode(make()) for make in LAYOUTS.values()]
    program = """
import base64, pickle, sys, warnings
from tensorpipe_ipc.serializers import serializer_named
warnings.simplefilter("error")
before = list(warnings.filters)
for meta, payload in pickle.loads(base64.b64decode(sys.argv[1])):
    serializer_named("torch_save").decode(meta, memoryview(payload))
assert warnings.filters == before
"""
    done = ran("-c", program, base64.b64encode(pickle.dumps(payloads)).decode())
    assert done.status == 0, done.err


def test_a_child_that_is_forked_while_another_thread_reads_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    filters, (meta, payload) = list(warnings.filters), TORCH_SAVE.encode(torch.eye(3).to_sparse())
    inside, on = threading.Event(), threading.Event()
    load = torch.load

    def slow_load(*arguments: Any, **options: Any) -> Any:
        inside.set()
        assert on.wait(PATIENCE)
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", slow_load)
    ended = in_thread(lambda: TORCH_SAVE.decode(meta, memoryview(payload)))
    assert inside.wait(PATIENCE)
    monkeypatch.undo()

    def read() -> None:
        assert warnings.filters == filters
        assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()
        assert TORCH_SAVE.decode(meta, memoryview(payload))._values().tolist() == [1, 1, 1]

    child = in_child(read)
    on.set()
    ended()
    assert reap(child) == 0


def test_refuses_a_tensor_with_attributes() -> None:
    """NumPy reads memory where an attribute says."""
    tensor, file = torch.ones(3), io.BytesIO()
    tensor.__array_interface__ = {"version": 3, "shape": (3,), "typestr": "|u1", "data": (1234, False)}
    torch.save(tensor, file)
    with pytest.raises(ProtocolError, match="with attributes"):
        TORCH_SAVE.decode(meta_of(torch.float32, (3,)), memoryview(file.getvalue()))


def test_refuses_a_tensor_with_a_gradient() -> None:
    """Nobody has looked at it: it may be a sparse one whose indices lie outside."""
    data, file = torch.ones(3), io.BytesIO()

    class WithGradient:
        def __reduce__(self) -> Any:
            parts = data.storage(), 0, (3,), (1,), False, OrderedDict()  # type: ignore[no-untyped-call, var-annotated]
            state = {}, {"grad": torch.ones(3)}  # type: ignore[var-annotated]
            return torch._tensor._rebuild_from_type_v2, (torch._utils._rebuild_tensor_v2, torch.Tensor, parts, state)

    torch.save(WithGradient(), file)
    with pytest.raises(ProtocolError, match="with attributes"):
        TORCH_SAVE.decode(meta_of(torch.float32, (3,)), memoryview(file.getvalue()))


def test_a_file_that_is_cut_anywhere_is_refused() -> None:
    """No length of a damaged file lets another exception out."""
    meta, payload = TORCH_SAVE.encode(torch.ones(3))
    for end in range(0, len(payload), 7):
        with pytest.raises(ProtocolError):
            TORCH_SAVE.decode(meta, memoryview(payload)[:end])


_ATTACK = """
import io, os, pickle, struct, subprocess, sys
sys.path[:0] = {path!r}
import torch
from exchange import parts, received, sent
from tensorpipe_ipc.errors import ProtocolError

seen = []
sys.addaudithook(lambda event, arguments: seen.append(event) if event in EVENTS else None)
EVENTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class")

class Attack:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments
    def __reduce__(self):
        return self.call, self.arguments

attacks = [
    Attack(call, *arguments)
    for call, arguments in [
        (os.system, ("touch attacked",)),
        (subprocess.Popen, (["touch", "attacked"],)),
        (eval, ("__import__('os').system('touch attacked')",)),
        (exec, ("import os; os.system('touch attacked')",)),
        (torch.load, ("attacked",)),
    ]
]
payloads = []
for attack in attacks:
    file = io.BytesIO()
    torch.save(attack, file)
    payloads += [pickle.dumps(attack), pickle.dumps(attack, 2), file.getvalue()]

for serializer in ("raw", "numpy", "torch_save"):
    header, saved = parts(sent(torch.ones(3), serializer))
    for payload in payloads:
        # As a payload of the right length, and in the place of a text, a key and bytes.
        nbytes = header.index(struct.pack("<Q", len(saved)))
        frames = [header[:nbytes] + struct.pack("<Q", len(payload)) + header[nbytes + 8 :] + payload]
        seen.clear()
        try:
            received(frames)
            print("accepted", serializer)
        except ProtocolError:
            pass
        if seen:
            print("ran", serializer, seen)
        assert received(sent([payload, {{payload: 1}}], serializer))[0] == payload
        if seen:
            print("ran", serializer, seen)
seen.clear()
os.system("true")
print("hook works" if seen == ["os.system"] else "hook does not work", os.listdir("."))
"""


def test_no_payload_runs_code(tmp_path: Path) -> None:
    """Pickles that want to run a command are refused by every serializer; the interpreter sees nothing run, and no pickle
    look for a class."""
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    code = _ATTACK.format(path=path)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = ran_in_fork("-c", f"import os; os.chdir({str(empty)!r})\n{code}", folder=tmp_path)
    assert done.out == "hook works []\n", done.out + done.err


def test_a_program_that_maps_its_checkpoints_reads_what_came() -> None:
    """torch's own switch for that is for files, and what comes is none."""
    there, sent = tp.Queue(serializer="torch_save"), torch.arange(3)
    config.load.mmap = True  # its undoing by monkeypatch would delete it for good
    try:
        there.put(sent)
        assert torch.equal(there.get(timeout=20), sent)
    finally:
        config.load.mmap = False
