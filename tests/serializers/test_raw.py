"""The serializer ``raw``: views out, views in."""

from __future__ import annotations

import pytest
import torch
import zoo

from tensorpipe_ipc.errors import ProtocolError
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.wire.dtypes import BY_TORCH
from tensorpipe_ipc.wire.metas import OPAQUE, meta_of

RAW = serializer_named("raw")


def test_decodes_onto_a_writable_payload() -> None:
    """The tensor lies on the payload's memory: what is written to one is seen in the other."""
    for dtype in BY_TORCH:
        payload = bytearray(6 * dtype.itemsize)
        tensor = RAW.decode(meta_of(dtype, (2, 3)), memoryview(payload))
        tensor.view(torch.uint8).fill_(1)
        assert payload == b"\1" * len(payload), dtype


def test_decodes_a_read_only_payload_into_a_copy() -> None:
    """A payload that may not be written to is copied, so that the tensor can be."""
    payload = bytes(8)
    RAW.decode(meta_of(torch.float32, (2,)), memoryview(payload)).fill_(1)
    assert payload == bytes(8)


@pytest.mark.parametrize("nbytes", [0, 7, 9])
def test_the_payload_must_have_the_size_of_the_shape(nbytes: int) -> None:
    """A byte less or more than the shape has is refused, with both sizes."""
    with pytest.raises(ProtocolError, match=f"a payload of {nbytes} bytes for a tensor of 8"):
        RAW.decode(meta_of(torch.float32, (2,)), memoryview(bytearray(nbytes)))


def test_an_opaque_meta_is_refused() -> None:
    """A meta without a dtype is not answered with whatever lay in memory."""
    with pytest.raises(ProtocolError, match="a payload of 0 bytes for a tensor of 0"):
        RAW.decode(OPAQUE, memoryview(b""))


def test_dense_tensors_keep_their_strides() -> None:
    """channels_last and transposed tensors travel as they lie and arrive with the strides that they had."""
    for name in ("channels last", "channels last large", "transposed"):
        tensor = zoo.make(name)
        meta, payload = RAW.encode(tensor)
        assert RAW.decode(meta, memoryview(bytearray(payload))).stride() == tensor.stride()


def test_the_resized_slice_of_a_module_parameter_is_its_own() -> None:
    """Of a view only the items that it shows travel, not the storage behind it."""
    meta, payload = RAW.encode(torch.arange(1000.0)[10:20])
    assert len(payload) == meta.nbytes == 40
