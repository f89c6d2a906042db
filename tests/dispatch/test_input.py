"""What is refused before anything is launched. None of it needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blazeproto.dispatch import build_dispatch, build_dispatch_varying
from blazeproto.runtime import arrays


def on_device(shape, dtype="int32", strides=None, device=0):
    """What `arrays.view` would make of a device array; nothing may be read from it."""
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return arrays.DeviceArray(256, shape, dtype, strides, device, None)


@pytest.mark.parametrize(
    ("ids", "num_experts", "options", "error", "message"),
    [
        (on_device((4, 2)), 0, {}, ValueError, "num_experts: expected at least 1, got 0"),
        (on_device((4, 2)), 2.5, {}, TypeError, "num_experts: expected an int, got float"),
        (on_device((4, 2)), 8, {"method": "hash"}, ValueError, "method: expected one of .*, got 'hash'"),
        (on_device((8,)), 8, {}, ValueError, r"topk_experts: expected shape \(any, any\), got \(8,\)"),
        (on_device((8, 0)), 8, {}, ValueError, r"topk_experts: expected .*K >= 1, got \(8, 0\)"),
        (on_device((4, 2), "float32"), 8, {}, TypeError, "topk_experts: expected dtype int32 or int64, got float32"),
        (on_device((4, 2), strides=(1, 4)), 8, {}, ValueError, "topk_experts: expected a contiguous array"),
        (on_device((2**28, 8)), 8, {}, ValueError, r"topk_experts: expected at most 2147418112 pairs"),
        (on_device((4, 2)), 8, {"row_capacity": -1}, ValueError, "row_capacity: expected at least 0, got -1"),
        (on_device((4, 2)), 8, {"row_capacity": 2.0}, TypeError, "row_capacity: expected an int, got float"),
        (on_device((4, 2)), 8, {"row_capacity": True}, TypeError, "row_capacity: expected an int, got bool"),
        (torch.zeros(4, 2, dtype=torch.int32), 8, {}, ValueError, "topk_experts: expected an array on a CUDA device"),
        ([[0, 1]], 8, {}, TypeError, "topk_experts: expected a device array"),
    ],
)
def test_bad_ids(ids, num_experts, options, error, message):
    if isinstance(ids, list):
        pytest.importorskip("cupy", reason="telling arrays from other things needs CuPy")
    with pytest.raises(error, match=message):
        build_dispatch(ids, num_experts, **options)


def test_bad_varying():
    experts, tokens, offsets = on_device((9,)), on_device((9,)), on_device((5,))
    with pytest.raises(ValueError, match=r"pair_experts: expected shape \(any\), got \(9, 1\)"):
        build_dispatch_varying(on_device((9, 1)), tokens, offsets, 4)
    with pytest.raises(ValueError, match=r"pair_tokens: expected shape \(9\), got \(8,\)"):
        build_dispatch_varying(experts, on_device((8,)), offsets, 4)
    with pytest.raises(TypeError, match="token_offsets: expected dtype int32, got int64"):
        build_dispatch_varying(experts, tokens, on_device((5,), "int64"), 4)
    with pytest.raises(ValueError, match=r"token_offsets: expected \(T \+ 1,\), got \(0,\)"):
        build_dispatch_varying(experts, tokens, on_device((0,)), 4)
    with pytest.raises(ValueError, match="row_capacity: expected at least 0, got -3"):
        build_dispatch_varying(experts, tokens, offsets, 4, row_capacity=-3)
