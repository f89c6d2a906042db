"""What the arguments of ``moe_mlp`` must be. Everything is looked at on the host, before anything is launched."""

from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.backends import backend_on
from blazeproto.autograd.operators import autocast_dtype
from blazeproto.autograd.policy import check_options
from blazeproto.autograd.private import refuse_transforms
from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm.tiles import GATHERED_ELEMENTS
from blazeproto.runtime.checks import integer

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_arguments(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    scores: Tensor,
    topk_experts: Tensor | None,
    *,
    num_experts: int,
    activation: str,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    save: str,
    backend: str,
    combine: str,
    row_capacity: int | None,
    workspace_bytes: int | None,
    dispatch: Dispatch | None,
    pair_tokens: Tensor | None,
    token_offsets: Tensor | None,
) -> None:
    """Raise ValueError or TypeError naming the first argument that does not fit. See ``moe_mlp`` for what fits."""
    refuse_transforms("moe_mlp", (x, gate_up_proj, down_proj, scores, up_bias, down_bias))
    check_options(activation=activation, save=save, backend=backend, combine=combine)
    if not torch.compiler.is_compiling():
        integer("num_experts", num_experts, least=1)
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
    up_width = d_expert * activation_named(activation).halves
    weights = (
        ("gate_up_proj", gate_up_proj, (num_experts, up_width, d_model), "(E, 2n, d), ungated (E, n, d)"),
        ("down_proj", down_proj, (num_experts, d_model, d_expert), "(E, d, n)"),
        ("up_bias", up_bias, (num_experts, up_width), "(E, 2n), ungated (E, n)"),
        ("down_bias", down_bias, (num_experts, d_model), "(E, d)"),
    )
    autocast = autocast_dtype(device.type)
    weight: Any
    for name, weight, shape, words in weights:
        if weight is None and name.endswith("_bias"):
            continue
        _check_tensor(name, weight, FLOAT_DTYPES, device, shape, words)
        _check_dtype(name, weight, x)

    _check_tensor("scores", scores, FLOAT_DTYPES, device)
    if (pair_tokens is None) != (token_offsets is None):
        raise ValueError("pair_tokens: expected together with token_offsets, got one without the other")
    if dispatch is not None:
        if topk_experts is not None or pair_tokens is not None:
            raise ValueError("dispatch: expected without topk_experts, pair_tokens and token_offsets, got both")
        _check_dispatch(num_tokens, num_experts, device, scores, dispatch)
    else:
        _check_choice(num_tokens, num_experts, device, scores, topk_experts, pair_tokens, token_offsets)
    if row_capacity is not None:
        if not torch.compiler.is_compiling():  # to whom it may be a symbol
            integer("row_capacity", row_capacity, least=0)
        if dispatch is not None:
            raise ValueError(f"row_capacity: expected None with dispatch=, which has its rows, got {row_capacity}")
    if workspace_bytes is not None:
        if dispatch is not None or pair_tokens is not None:
            raise ValueError(
                "workspace_bytes: expected None with dispatch= or a varying number of experts per token (chunks of tokens "
                f"need a fixed K and a dispatch each), got {workspace_bytes}"
            )
        if not torch.compiler.is_compiling():
            integer("workspace_bytes", workspace_bytes, least=1)
    if x.numel() >= GATHERED_ELEMENTS and (backend == "hopper" or (backend == "auto" and device.type == "cuda")):
        raise ValueError(
            f'x: expected fewer than {GATHERED_ELEMENTS} elements unless backend="torch", got {tuple(x.shape)}'
        )
    if backend == "hopper" and not torch.compiler.is_compiling():  # traced, the operators raise the same
        backend_on(backend, device, autocast or x.dtype, num_experts, d_model, d_expert)


def check_frozen(**weights: Tensor | None) -> None:
    """ValueError for the first of these that requires a gradient."""
    for name, weight in weights.items():
        if weight is not None and weight.requires_grad:
            raise ValueError(f"{name}: expected frozen, requires_grad=False, got one that requires a gradient")


def check_factors(name: str, a: Any, b: Any, x: Tensor, weight_shape: tuple[int, ...]) -> None:
    """Raise ValueError or TypeError for the low-rank factors of a weight (E, out, in), a (E, r, in) and b (E, out, r)."""
    num_experts, width_out, width_in = weight_shape
    for which, factor in (("a", a), ("b", b)):
        _check_tensor(f"{name}.{which}", factor, FLOAT_DTYPES, x.device)
        _check_dtype(f"{name}.{which}", factor, x)
    if a.dim() != 3 or (a.shape[0], a.shape[2]) != (num_experts, width_in) or not a.shape[1]:
        expected = f"(E, r, in) = ({num_experts}, r, {width_in}), r >= 1"
        raise ValueError(f"{name}.a: expected shape {expected}, got {tuple(a.shape)}")
    shape = (num_experts, width_out, a.shape[1])
    _check_tensor(f"{name}.b", b, FLOAT_DTYPES, None, shape, "(E, out, r)")


def _check_dtype(name: str, weight: Tensor, x: Tensor) -> None:
    if autocast_dtype(x.device.type):
        return
    if weight.dtype not in (x.dtype, torch.float32) or x.dtype == torch.float64 != weight.dtype:
        raise ValueError(
            f"{name}: expected dtype {x.dtype} as x has, or torch.float32 (outside autocast), got {weight.dtype}"
        )


def _check_choice(
    num_tokens: int,
    num_experts: int,
    device: torch.device,
    scores: Tensor,
    topk_experts: Tensor | None,
    pair_tokens: Tensor | None,
    token_offsets: Tensor | None,
) -> None:
    if topk_experts is None:
        raise ValueError("topk_experts: expected (T, K) expert ids, or dispatch= instead, got neither")
    _check_tensor("topk_experts", topk_experts, INDEX_DTYPES, device)
    if pair_tokens is None:
        if topk_experts.dim() != 2 or topk_experts.shape[0] != num_tokens:
            raise ValueError(
                f"topk_experts: expected shape (T, K) = ({num_tokens}, K), got {tuple(topk_experts.shape)}"
            )
        if not topk_experts.shape[1]:
            raise ValueError(f"topk_experts: expected (T, K) with K >= 1, got {tuple(topk_experts.shape)}")
    else:
        if topk_experts.dim() != 1:
            raise ValueError(f"topk_experts: expected shape (P,) with pair_tokens, got {tuple(topk_experts.shape)}")
        _check_tensor("pair_tokens", pair_tokens, (torch.int32,), device, tuple(topk_experts.shape), "(P,)")
        _check_tensor("token_offsets", token_offsets, (torch.int32,), device, (num_tokens + 1,), "(T + 1,)")
    _check_tensor("scores", scores, FLOAT_DTYPES, device, tuple(topk_experts.shape), "that of topk_experts")


def _check_dispatch(
    num_tokens: int, num_experts: int, device: torch.device, scores: Tensor, dispatch: Dispatch
) -> None:
    """Index arrays that no operator made: the kernels trust them."""
    if not isinstance(dispatch, Dispatch):
        raise TypeError(f"dispatch: expected a Dispatch, got {type(dispatch).__name__}")
    num_pairs, top_k = dispatch.num_pairs, dispatch.top_k
    came = tuple(dispatch.expert_token_offsets.shape)
    if came != (num_experts + 1,):
        raise ValueError(f"dispatch: expected one for num_experts={num_experts}, got offsets of shape {came}")
    for name, array in dispatch.arrays.items():
        if top_k is None or name not in ("pair_tokens", "token_offsets"):
            _check_tensor(f"dispatch.{name}", array, (torch.int32,), device)
            if array.dim() != 1:
                raise ValueError(f"dispatch.{name}: expected one dimension, got shape {tuple(array.shape)}")
    if scores.numel() != num_pairs:
        raise ValueError(f"scores: expected {num_pairs} of them, one a pair of dispatch, got {tuple(scores.shape)}")
    num_rows = dispatch.num_rows
    if num_rows > num_pairs or (num_rows < num_pairs and dispatch.overflow is None):
        raise ValueError(
            f"dispatch.expert_pair_indices: expected {num_pairs} of them, as many as token_index_map has (fewer with overflow "
            f"alone), got {num_rows}"
        )
    if top_k is None and len(dispatch.pair_tokens) != num_pairs:
        raise ValueError(
            f"dispatch.pair_tokens: expected {num_pairs} of them, one a pair, got {len(dispatch.pair_tokens)}"
        )
    tokens = len(dispatch.token_offsets) - 1 if top_k is None else num_pairs / top_k
    if tokens != num_tokens:
        raise ValueError(
            f"dispatch: expected {num_tokens} tokens of top_k={top_k}, got {num_pairs} pairs, {tokens} tokens"
        )


def _check_tensor(
    name: str,
    tensor: Any,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    shape: tuple[int, ...] | None = None,
    words: str = "",
) -> None:
    """words: the shape in symbols."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected on {device} as x is, got {tensor.device}")
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {words} = {shape}, got {tuple(tensor.shape)}")
