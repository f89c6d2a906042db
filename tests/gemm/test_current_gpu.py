"""Every array of a product must lie on the GPU that it is launched on. Addresses stand in for arrays: no GPU is needed."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from blazeproto import gemm
from blazeproto.dispatch import Dispatch
from blazeproto.gemm import arguments, weight
from blazeproto.runtime.arrays import DeviceArray

T, K, D, N, E = 64, 2, 128, 64, 4
R = T * K
PLACES = itertools.count(1 << 20, 1 << 20)  # arrays that don't overlap


def on_gpu_0(dtype: str, *shape: int) -> DeviceArray:
    strides = [1]
    for length in shape[:0:-1]:
        strides.insert(0, strides[0] * length)
    return DeviceArray(next(PLACES), shape, dtype, tuple(strides), 0, None)


def bf16(*shape: int) -> DeviceArray:
    return on_gpu_0("bfloat16", *shape)


def f32(*shape: int) -> DeviceArray:
    return on_gpu_0("float32", *shape)


UP, DOWN, UP_BIAS, DOWN_BIAS = bf16(E, 2 * N, D), bf16(E, D, N), bf16(E, 2 * N), bf16(E, D)
TOKENS, WIDE, NARROW, MODEL, SCORES = bf16(T, D), bf16(R, 2 * N), bf16(R, N), bf16(R, D), f32(R)
ARGUMENTS = {
    "up_forward": {"x": TOKENS, "up_proj": UP, "bias": UP_BIAS, "h": WIDE, "act": NARROW},
    "grouped_mm": {"a": NARROW, "weights": DOWN, "bias": DOWN_BIAS, "out": MODEL},
    "down_forward_fused": {
        "act": NARROW,
        "down_proj": DOWN,
        "scores": SCORES,
        "bias": DOWN_BIAS,
        "out_f32": f32(T, D),
    },
    "down_backward_act": {
        "d_out": TOKENS,
        "down_proj": DOWN,
        "h": WIDE,
        "scores": SCORES,
        "dh": WIDE,
        "a_scaled": NARROW,
        "d_scores": f32(R),
        "workspace": f32(gemm.score_partials(N), R),
    },
    "up_backward_act_fused": {"dh": WIDE, "up_proj": UP, "dx_f32": f32(T, D)},
    "down_backward_weight": {"d_out": TOKENS, "a_scaled": NARROW, "dw": DOWN, "workspace": f32(0)},
    "up_backward_weight": {"dh": WIDE, "x": TOKENS, "dw": UP, "workspace": f32(0)},
    "combine": {"y": MODEL, "scores": SCORES, "out": TOKENS},
    "bias_score_grad": {"d_out": TOKENS, "down_bias": DOWN_BIAS, "d_scores": SCORES},
    "expert_row_sum": {"values": MODEL, "scores": SCORES, "out": f32(E, D), "workspace": f32(6, D)},
}


@pytest.mark.parametrize("function", ARGUMENTS)
def test_an_array_on_another_gpu_is_named(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    monkeypatch.setattr(arguments, "current_device", lambda: 0)
    monkeypatch.setattr(weight, "current_device", lambda: 0)
    monkeypatch.setattr(weight, "workspace_elements", lambda *_: 0)
    arrays = ARGUMENTS[function]
    indices = {
        "expert_pair_indices": on_gpu_0("int32", R),
        "expert_token_offsets": on_gpu_0("int32", E + 1),
        "token_index_map": on_gpu_0("int32", R),
        "pair_tokens": on_gpu_0("int32", R),
        "token_offsets": on_gpu_0("int32", T + 1),
    }
    for name in (*arrays, *indices):
        elsewhere = {key: array._replace(device=int(key == name)) for key, array in (arrays | indices).items()}
        lists = {key: elsewhere.pop(key) for key in indices}
        dispatch = Dispatch(**lists, token_expert_indices=None, num_experts=E, top_k=None, num_tokens=T)
        full_name = f"dispatch.{name}" if name in indices else name
        expected = f"{full_name}: expected an array on the current GPU, cuda:0, got one on cuda:1"
        with pytest.raises(ValueError, match=re.escape(expected)):
            getattr(gemm, function)(**elsewhere, dispatch=dispatch)


def test_another_gpu_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "current_device", lambda: 1)
    dispatch = Dispatch(on_gpu_0("int32", R), on_gpu_0("int32", E + 1), on_gpu_0("int32", R), None, E, K, T)
    with pytest.raises(ValueError, match="y: expected an array on the current GPU, cuda:1, got one on cuda:0"):
        gemm.combine(MODEL, dispatch, out=TOKENS)


def test_arrays_in_different_places_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "current_device", lambda: 0)
    dispatch = Dispatch(on_gpu_0("int32", R), on_gpu_0("int32", E + 1), on_gpu_0("int32", R), None, E, K, T)
    cpu_tensor = torch.zeros(R, D, dtype=torch.bfloat16)
    expected = "dispatch.expert_pair_indices: expected an array in host memory, as y is, got one on a GPU"
    with pytest.raises(ValueError, match=expected):
        gemm.combine(cpu_tensor, dispatch)
    with pytest.raises(ValueError, match="scores: expected an array on a CUDA device, got a tensor on cpu"):
        gemm.combine(MODEL, dispatch, scores=cpu_tensor)
