"""The serializer ``numpy``: files that NumPy reads, and no file that NumPy did not write."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import zoo

from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.wire.dtypes import BY_TORCH
from tensorpipe_ipc.wire.metas import OPAQUE, meta_of

NUMPY = serializer_named("numpy")
TWO = meta_of(torch.float64, (2,))


def test_numpy_reads_what_it_writes() -> None:
    """For each dtype that NumPy has, ``np.load`` gives the items, without pickle."""
    for dtype, row in BY_TORCH.items():
        if row.numpy is not None:
            tensor = zoo.bits(dtype, 3, 5)
            _, payload = NUMPY.encode(tensor)
            array = np.load(io.BytesIO(payload), allow_pickle=False)
            assert array.tobytes() == zoo.content(tensor)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(), (0,), (2,), (2, 3), (4, 0, 2), (1,) * 32])
def test_reads_what_numpy_writes(shape: tuple[int, ...], order: str) -> None:
    """A file that ``np.save`` wrote is read, in either order of dimensions, onto the payload's memory."""
    array = np.asarray(np.random.default_rng(0).random(shape), order=order)
    file = io.BytesIO()
    np.save(file, array)
    payload = bytearray(file.getvalue())
    tensor = NUMPY.decode(meta_of(torch.float64, shape), memoryview(payload))
    assert (tensor.numpy() == array).all()
    tensor.fill_(0.0)
    assert not any(payload[-array.nbytes :] if array.nbytes else b"")
    NUMPY.decode(meta_of(torch.float64, shape), memoryview(file.getvalue())).fill_(
        1.0
    )  # a copy, where it must not write


def npy(head: str, items: bytes = bytes(16), version: bytes = b"\1\0") -> memoryview:
    text = head.encode("latin-1")
    width = 2 if version == b"\1\0" else 4
    return memoryview(bytearray(b"\x93NUMPY" + version + len(text).to_bytes(width, "little") + text + items))


GOOD = "{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }\n"


@pytest.mark.parametrize(
    "payload",
    [
        npy(GOOD, bytes(15)),
        npy(GOOD, bytes(17)),
        npy(GOOD.replace("(2,)", "(3,)")),
        npy(GOOD.replace("(2,)", "(2, 1)")),
        npy(GOOD.replace("(2,)", "(-1,)")),
        npy(GOOD.replace("(2,)", "(2L,)")),  # Python 2's: NumPy warns of it
        npy(GOOD.replace("(2,)", "(True,)")),
        npy(GOOD.replace("(2,)", "(" + "9" * 2000 + ",)")),
        npy(GOOD.replace("(2,)", "(" + "1" * 3000)),
        npy(GOOD.replace("<f8", ">f8")),
        npy(GOOD.replace("<f8", "<f4")),
        npy(GOOD.replace("'<f8'", "'|O'")),
        npy(GOOD.replace("'<f8'", "[('a', '<f8')]")),
        npy(GOOD.replace("False", "open('x')")),
        npy(GOOD, version=b"\3\0"),
        npy(GOOD + " "),
        npy("(" * 5000),
        npy(""),
        npy(GOOD)[:20],
        npy(GOOD)[:9],
        memoryview(b""),
        memoryview(b"\x93NUMPX" + bytes(npy(GOOD))[6:]),
    ],
)
def test_other_files_are_refused(payload: memoryview) -> None:
    """Of another dtype, shape, size or version, damaged, or code to be evaluated: a ProtocolError, and no warning."""
    assert NUMPY.decode(TWO, npy(GOOD)).tolist() == [0.0, 0.0]
    assert NUMPY.decode(TWO, npy(GOOD, version=b"\2\0")).tolist() == [0.0, 0.0]
    with pytest.raises(ProtocolError, match=r"\.npy file"):
        NUMPY.decode(TWO, payload)


def test_metas_that_numpy_lacks_are_refused() -> None:
    """No file is of bfloat16, nor without a dtype; in particular a file of float64 is not."""
    _, payload = NUMPY.encode(torch.ones(2, dtype=torch.float64))
    for meta in (OPAQUE, meta_of(torch.bfloat16, (2,))):
        with pytest.raises(ProtocolError, match="holds '<f8'"):
            NUMPY.decode(meta, memoryview(payload))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.complex128])
@pytest.mark.parametrize("beyond", [1, 8])
def test_items_that_lie_crooked_are_copied(beyond: int, dtype: torch.dtype) -> None:
    """A file whose head has another length than NumPy gives it. Torch looks at bytes as any items."""
    payload = bytes(NUMPY.encode(torch.arange(32).to(dtype))[1])
    head = payload[10:128].rstrip(b" \n") + b" "
    head += b" " * ((beyond - 11 - len(head)) % 16) + b"\n"
    crooked = bytearray(payload[:8] + len(head).to_bytes(2, "little") + head + payload[128:])
    assert (10 + len(head)) % 16 == beyond
    tensor = NUMPY.decode(meta_of(dtype, (32,)), memoryview(crooked))
    assert tensor.data_ptr() % 16 == 0
    assert tensor.tolist() == list(range(32))
