"""What the arguments of ``moe_mlp`` must be. Everything is looked at on the host, before anything is launched."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd.backends import BACKENDS, products_on
from blazeproto.autograd.policy import SavePolicy
from blazeproto.gemm.config import GATHERED_ELEMENTS
from blazeproto.reference import ACTIVATIONS, is_gated

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
COMBINES = ("gather", "fused")
SAVE_POLICIES = tuple(policy.value for policy in SavePolicy)  # torch.compile before 2.12 cannot iterate over an enum

_passed: set[tuple[Any, ...]] = set()  # what has been seen of arguments that passed
_PASSED_AT_MOST = 4096
_looked_at = attrgetter("dtype", "shape", "device")  # no check looks at anything else of a tensor


def check_arguments(tensors: tuple[Any, ...], dispatch: Any, *settings: Any) -> None:
    """Raise ValueError or TypeError naming the first argument that does not fit. See ``moe_mlp`` for what fits.

    tensors, settings: what :func:`_check` takes before and after the dispatch, in order. Most calls differ from an earlier one
    in nothing that is looked at, so what passed is kept.
    """
    seen = None
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        try:
            seen = (settings, *[t if t is None else _looked_at(t) for t in tensors])
            if dispatch is not None:
                seen += (dispatch.top_k, *[t if t is None else _looked_at(t) for t in _index_arrays(dispatch)])
            if seen in _passed:
                return
        except (AttributeError, TypeError):  # something is no tensor, or a size is a symbol, which has no hash
            seen = None
    arguments = (*tensors, dispatch, *settings)
    _check(*arguments)
    if seen is not None:
        if len(_passed) == _PASSED_AT_MOST:
            _passed.clear()
        _passed.add(seen)


def _index_arrays(dispatch: Any) -> tuple[Any, ...]:
    arrays = (dispatch.expert_pair_indices, dispatch.expert_token_offsets, dispatch.token_index_map)
    return (*arrays, dispatch.pair_tokens, dispatch.token_offsets)


def _check(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    scores: Tensor,
    topk_experts: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    pair_tokens: Tensor | None,
    token_offsets: Tensor | None,
    dispatch: Any,
    num_experts: int,
    activation: str,
    save: SavePolicy | str,
    backend: str,
    combine: str,
    workspace_bytes: int | None,
    weight_grad_dtype: torch.dtype | None,
) -> None:
    for name, value, choices in (
        ("activation", activation, ACTIVATIONS),
        ("save", save, SAVE_POLICIES),
        ("backend", backend, BACKENDS),
        ("combine", combine, COMBINES),
    ):
        if value not in choices:
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
    if weight_grad_dtype not in (None, torch.float32):
        raise ValueError(f"weight_grad_dtype: expected None or torch.float32, got {weight_grad_dtype}")

    _check_tensor("x", x, FLOAT_DTYPES)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (T, d), got {tuple(x.shape)}")
    (num_tokens, d_model), device = x.shape, x.device

    _check_tensor("down_proj", down_proj, FLOAT_DTYPES, device)
    if down_proj.dim() != 3 or down_proj.shape[:2] != (num_experts, d_model):
        raise ValueError(
            f"down_proj: expected shape (E, d, n) = ({num_experts}, {d_model}, n), got {tuple(down_proj.shape)}"
        )
    d_expert = down_proj.shape[2]
    up_width = d_expert * (1 + is_gated(activation))
    _check_weight(
        "gate_up_proj", gate_up_proj, device, (num_experts, up_width, d_model), "(E, 2n, d), ungated (E, n, d)"
    )
    if up_bias is not None:
        _check_weight("up_bias", up_bias, device, (num_experts, up_width), "(E, 2n), ungated (E, n)")
    if down_bias is not None:
        _check_weight("down_bias", down_bias, device, (num_experts, d_model), "(E, d)")
    if not torch.is_autocast_enabled(device.type):  # else weights are cast where they are used
        dtype = x.dtype
        for name, weight in (
            ("gate_up_proj", gate_up_proj),
            ("down_proj", down_proj),
            ("up_bias", up_bias),
            ("down_bias", down_bias),
        ):
            if weight is not None and weight.dtype != dtype:
                raise ValueError(f"{name}: expected dtype {dtype} as x has (outside autocast), got {weight.dtype}")

    _check_routing(num_tokens, device, scores, topk_experts, num_experts, dispatch, pair_tokens, token_offsets)
    if workspace_bytes is not None:
        if dispatch is not None or pair_tokens is not None:
            raise ValueError(
                "workspace_bytes: expected None with dispatch= or a varying number of experts per token (chunks of tokens "
                f"need a fixed K and a dispatch each), got {workspace_bytes}"
            )
        if workspace_bytes <= 0:
            raise ValueError(f"workspace_bytes: expected a positive number of bytes, got {workspace_bytes}")
    if x.numel() >= GATHERED_ELEMENTS and (backend == "hopper" or (backend == "auto" and device.type == "cuda")):
        raise ValueError(
            f'x: expected fewer than {GATHERED_ELEMENTS} elements unless backend="torch", got {tuple(x.shape)}'
        )
    if backend == "hopper" and not torch.compiler.is_compiling():  # traced, the operators raise the same
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        products_on(backend, device, dtype, num_experts, d_model, d_expert)


def _check_routing(
    num_tokens: int,
    device: torch.device,
    scores: Tensor,
    topk_experts: Tensor | None,
    num_experts: int,
    dispatch: Any,
    pair_tokens: Tensor | None,
    token_offsets: Tensor | None,
) -> None:
    _check_tensor("scores", scores, FLOAT_DTYPES, device)
    if (pair_tokens is None) != (token_offsets is None):
        raise ValueError("pair_tokens: expected together with token_offsets, got one without the other")
    if dispatch is not None:
        if topk_experts is not None or pair_tokens is not None:
            raise ValueError("dispatch: expected without topk_experts, pair_tokens and token_offsets, got both")
        num_pairs = dispatch.token_index_map.shape[0]
        if scores.numel() != num_pairs:
            raise ValueError(f"scores: expected {num_pairs} of them, one a pair of dispatch, got {tuple(scores.shape)}")
        if dispatch.expert_token_offsets.shape != (num_experts + 1,):
            raise ValueError(
                f"dispatch: expected one for num_experts={num_experts}, got offsets of shape "
                f"{tuple(dispatch.expert_token_offsets.shape)}"
            )
        _check_dispatch(num_tokens, device, dispatch)
        return
    if topk_experts is None:
        raise ValueError("topk_experts: expected (T, K) expert ids, or dispatch= instead, got neither")
    _check_tensor("topk_experts", topk_experts, INDEX_DTYPES, device)
    if pair_tokens is None:
        if topk_experts.dim() != 2 or topk_experts.shape[0] != num_tokens:
            raise ValueError(
                f"topk_experts: expected shape (T, K) = ({num_tokens}, K), got {tuple(topk_experts.shape)}"
            )
        top_k = topk_experts.shape[1]
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"topk_experts: expected 1 <= K <= num_experts={num_experts} experts per token, got K={top_k}"
            )
    else:
        assert token_offsets is not None
        if topk_experts.dim() != 1:
            raise ValueError(f"topk_experts: expected shape (P,) with pair_tokens, got {tuple(topk_experts.shape)}")
        _check_tensor("pair_tokens", pair_tokens, (torch.int32,), device)
        _check_tensor("token_offsets", token_offsets, (torch.int32,), device)
        _check_shape("pair_tokens", pair_tokens, tuple(topk_experts.shape), "(P,)")
        _check_shape("token_offsets", token_offsets, (num_tokens + 1,), "(T + 1,)")
    _check_shape("scores", scores, tuple(topk_experts.shape), "that of topk_experts")


def _check_dispatch(num_tokens: int, device: torch.device, dispatch: Any) -> None:
    """Index arrays that no operator made: the kernels trust them."""
    num_pairs = dispatch.token_index_map.shape[0]
    names = ["expert_pair_indices", "expert_token_offsets", "token_index_map"]
    if dispatch.top_k is None:
        names += ["pair_tokens", "token_offsets"]
        if dispatch.token_offsets is not None:
            _check_shape("dispatch.token_offsets", dispatch.token_offsets, (num_tokens + 1,), "(T + 1,)")
    elif num_pairs != num_tokens * dispatch.top_k:
        raise ValueError(f"dispatch: expected {num_tokens} tokens of top_k={dispatch.top_k}, got {num_pairs} pairs")
    for name in names:
        array = getattr(dispatch, name)
        _check_tensor(f"dispatch.{name}", array, (torch.int32,), device)
        if array.dim() != 1:
            raise ValueError(f"dispatch.{name}: expected one dimension, got shape {tuple(array.shape)}")


def _check_tensor(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], device: torch.device | None = None) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected on {device} as x is, got {tensor.device}")


def _check_shape(name: str, tensor: Any, shape: tuple[int, ...], words: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {words} = {shape}, got {tuple(tensor.shape)}")


def _check_weight(name: str, tensor: Any, device: torch.device, shape: tuple[int, ...], words: str) -> None:
    _check_shape(name, tensor, shape, words)
    _check_tensor(name, tensor, FLOAT_DTYPES, device)
