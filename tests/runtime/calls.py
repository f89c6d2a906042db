"""A sound call of every public function that has a twin, on float64 arrays; and how tests change and run it."""

import importlib
from dataclasses import fields

import numpy as np
import torch

from blazeproto import dispatch, gemm, router
from blazeproto.dispatch import Dispatch

T, K, D, N, E, R = 12, 2, 20, 8, 4, 21  # lengths that are no other's; R: of 24 pairs, 3 have no row
P = T * K
DRAW = np.random.default_rng(0)
IDS = np.argsort(DRAW.random((T, E)), axis=1)[:, :K].astype(np.int32)
PAIR_TOKENS = np.repeat(np.arange(T, dtype=np.int32), K)
TOKEN_OFFSETS = np.arange(0, P + 1, K, dtype=np.int32)


def drawn(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape)


X, D_OUT, H, ACT, Y = drawn(T, D), drawn(T, D), drawn(R, 2 * N), drawn(R, N), drawn(R, D)
UP, DOWN, UP_BIAS, DOWN_BIAS, SCORES = drawn(E, 2 * N, D), drawn(E, D, N), drawn(E, 2 * N), drawn(E, D), drawn(P)
LOGITS, PAIR_SCORES, LOSS = drawn(T, E), drawn(P), np.array(0.5)
CALLS = {  # every public function that has a twin, on float64 arrays
    "gemm": {
        "up_forward": {"x": X, "up_proj": UP, "bias": UP_BIAS},
        "grouped_mm": {"a": X, "weights": UP, "gather": True},
        "down_forward": {"act": ACT, "down_proj": DOWN, "bias": DOWN_BIAS},
        "down_forward_fused": {"act": ACT, "down_proj": DOWN, "scores": SCORES, "out_f32": np.zeros((T, D))},
        "combine": {"y": Y, "scores": SCORES},
        "down_backward_act": {"d_out": D_OUT, "down_proj": DOWN, "h": H, "scores": SCORES},
        "bias_score_grad": {"d_out": D_OUT, "down_bias": DOWN_BIAS, "d_scores": np.zeros(P)},
        "down_backward_weight": {"d_out": D_OUT, "a_scaled": ACT},
        "up_backward_act": {"dh": H, "up_proj": UP},
        "up_backward_act_fused": {"dh": H, "up_proj": UP, "dx_f32": np.zeros((T, D))},
        "up_backward_weight": {"dh": H, "x": X},
        "expert_row_sum": {"values": H},
    },
    "dispatch": {
        "build_dispatch": {"topk_experts": IDS, "num_experts": E},
        "build_dispatch_varying": {
            "pair_experts": IDS.reshape(-1),
            "pair_tokens": PAIR_TOKENS,
            "token_offsets": TOKEN_OFFSETS,
            "num_experts": E,
        },
    },
    "router": {
        "topk_route": {"logits": LOGITS, "top_k": K, "score": "sigmoid", "bias": drawn(E)},
        "topk_route_backward": {"logits": LOGITS, "experts": IDS, "d_scores": drawn(T, K)},
        "choose_pairs": {"scores": DRAW.random((T, E)), "experts": IDS, "by": "nr_f", "size": 4, "max_pairs": P},
        "score_pairs": {"logits": LOGITS, "pair_experts": np.sort(IDS).reshape(-1), "token_offsets": TOKEN_OFFSETS},
        "score_pairs_backward": {
            "logits": LOGITS,
            "pair_experts": np.sort(IDS).reshape(-1),
            "token_offsets": TOKEN_OFFSETS,
            "d_scores": PAIR_SCORES,
        },
        "hash_route": {"token_ids": np.arange(T), "num_experts": E, "top_k": K},
        "routing_losses": {"logits": LOGITS, "experts": IDS},
        "routing_losses_backward": {
            "logits": LOGITS,
            "load": np.bincount(IDS.reshape(-1), minlength=E).astype(np.int32),
            "d_balance_loss": LOSS,
            "d_z_loss": LOSS,
            "top_k": K,
        },
        "logits_product": {"x": drawn(T, 24), "weight": drawn(2 * E, 24), "parts": 2},
        "finish_logits": {"products": LOGITS},
        "split_gradient": {"d_logits": LOGITS, "logits": LOGITS, "parts": 3},
    },
}
NAMES = [(room, name) for room in CALLS for name in CALLS[room]]
FLOATS = [(room, name) for room, name in NAMES if room != "dispatch" and name != "hash_route"]
FP32 = {"d_scores", "out_f32", "dx_f32"}  # of gemm's outputs, those that kernels store in fp32
ROOMS = {"gemm": gemm, "dispatch": dispatch, "router": router}


def arguments_of(room: str, name: str, change=lambda array: array) -> dict:
    """Copies, changed; a dispatch for gemm."""

    def changed(value):
        return change(value.copy()) if isinstance(value, np.ndarray) else value

    made = {key: changed(value) for key, value in CALLS[room][name].items()}
    if room == "gemm":
        made["dispatch"] = dispatch.build_dispatch(changed(IDS), E, row_capacity=R)
    return made


def as_float(dtype):
    return lambda array: array.astype(dtype) if array.dtype == np.float64 else array


def to_bf16(array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def listed(result) -> list:
    if isinstance(result, Dispatch):
        return [value for field in fields(result) if hasattr(value := getattr(result, field.name), "shape")]
    return list(result) if isinstance(result, tuple) else [result]


def run(room: str, name: str, arguments: dict) -> list:
    return listed(getattr(ROOMS[room], name)(**arguments))


def twin(room: str, name: str, arguments: dict, **options) -> list:
    return listed(twins_of(room)[name](**arguments, **options))


def twins_of(room: str) -> dict:
    """By the names of the public functions."""
    module = "fallback" if room == "router" else "reference"
    return gemm.TWINS if room == "gemm" else vars(importlib.import_module(f"blazeproto.{room}.{module}"))
