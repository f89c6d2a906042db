"""Checks of the tensors of ``moe_mlp`` and ``grouped_experts``, on the host, before anything is launched."""

from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.backends import backend_on
from blazeproto.autograd.call import STORED
from blazeproto.autograd.low_rank import LowRank
from blazeproto.autograd.operators import autocast_dtype
from blazeproto.autograd.options import Options
from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm.quantize import BLOCK
from blazeproto.gemm.recipe import RECIPES
from blazeproto.gemm.tiles import GATHERED_ELEMENTS
from blazeproto.runtime.arch import ARCHES
from blazeproto.runtime.checks import instance
from blazeproto.stored.weight import StoredWeight

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_experts(
    x: Tensor,
    up: tuple[Tensor | StoredWeight, ...],
    down_proj: Tensor | StoredWeight,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    up_factors: LowRank | None,
    down_factors: LowRank | None,
    *,
    num_experts: int,
    options: Options,
    rows: str = "T",
) -> None:
    """Raise ValueError or TypeError naming the first of these that does not fit. See ``moe_mlp`` for what fits.

    up: gate_up_proj, or gate and up.  rows: what x has, in a shape.
    """
    _check_tensor("x", x, FLOAT_DTYPES)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape ({rows}, d), got {tuple(x.shape)}")
    d_model, device = x.shape[1], x.device
    _check_tensor("down_proj", down_proj, FLOAT_DTYPES, device)
    weights_have = [
        w.shape[0] if isinstance(w, Tensor | StoredWeight) and w.dim() == 3 else None for w in (*up, down_proj)
    ]
    have = weights_have[-1]  # compared one by one: neither a set nor `in` finds a symbolic int
    if all(each is not None and each == have for each in weights_have) and have != num_experts:
        raise ValueError(f"num_experts: expected {have} as the weights have, got {num_experts}")
    if down_proj.dim() != 3 or down_proj.shape[:2] != (num_experts, d_model):
        raise ValueError(
            f"down_proj: expected shape (E, d, n) = ({num_experts}, {d_model}, n), got {tuple(down_proj.shape)}"
        )
    if 0 in down_proj.shape[1:]:
        raise ValueError(f"down_proj: expected d and n of at least 1, got {tuple(down_proj.shape)}")
    d_expert, activation = down_proj.shape[2], activation_named(options.activation)
    halves = activation.halves
    if len(up) != 1 and (len(up) != 2 or not activation.gated or activation.layout != "HALVES"):
        expected = "one weight, or a pair with a gated activation whose halves lie apart"
        raise ValueError(f"gate_up_proj: expected {expected}, got {len(up)} with {options.activation!r}")
    up_shape = (num_experts, d_expert * halves // len(up), d_model)
    words = "(E, 2n, d), ungated (E, n, d)" if len(up) == 1 else "(E, n, d)"
    weights: list[tuple[str, Any, tuple[int, ...], str]] = [
        *(("gate_up_proj" if len(up) == 1 else f"gate_up_proj[{i}]", t, up_shape, words) for i, t in enumerate(up)),
        ("down_proj", down_proj, (num_experts, d_model, d_expert), "(E, d, n)"),
        ("up_bias", up_bias, (num_experts, d_expert * halves), "(E, 2n), ungated (E, n)"),
        ("down_bias", down_bias, (num_experts, d_model), "(E, d)"),
    ]
    for name, weight, shape, words in weights:
        if weight is None and name.endswith("_bias"):
            continue
        _check_tensor(name, weight, FLOAT_DTYPES, device, shape, words)
        _check_dtype(name, weight, x, up[0].dtype)
    if up[-1].dtype != up[0].dtype:
        raise ValueError(f"gate_up_proj[1]: expected dtype {up[0].dtype} as gate_up_proj[0] has, got {up[-1].dtype}")
    _check_factors("up_factors", up_factors, x, up[0].dtype, (num_experts, d_expert * halves, d_model))
    _check_factors("down_factors", down_factors, x, up[0].dtype, tuple(down_proj.shape))
    if down_factors is not None and options.combine != "gather":
        raise ValueError(f"combine: expected 'gather' with down_factors, got {options.combine!r}")
    if options.precision != "bf16":
        _check_fp8((*up, down_proj), options)
    on_gpu, backend = device.type == "cuda", options.backend
    if x.numel() >= GATHERED_ELEMENTS and (backend in ARCHES or (backend == "auto" and on_gpu)):
        raise ValueError(
            f'x: expected fewer than {GATHERED_ELEMENTS} elements unless backend="torch", got {tuple(x.shape)}'
        )
    if backend in ARCHES and not torch.compiler.is_compiling():  # traced, the operators raise the same
        dtype = autocast_dtype(device.type) or x.dtype
        needs = options.needs + STORED * any(isinstance(w, StoredWeight) for w in (*up, down_proj))
        backend_on(backend, device, dtype, num_experts, d_model, d_expert, needs=needs)


def check_dtype(dtype: object, name: str = "dtype") -> None:
    """TypeError for an argument of this name that is neither None nor a dtype of tokens and weights."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOAT_DTYPES):
        raise TypeError(f"{name}: expected None or one of {', '.join(map(str, FLOAT_DTYPES))}, got {dtype!r}")


def check_weights(up: Any, down_proj: Any, up_bias: Tensor | None, down_bias: Tensor | None, options: Options) -> None:
    """`check_experts` for weights alone, without tokens."""
    x = torch.empty(0, down_proj.shape[1], dtype=down_proj.dtype, device=down_proj.device)
    check_experts(x, (up,), down_proj, up_bias, down_bias, None, None, num_experts=len(down_proj), options=options)


def why_refused(*weights_and_options: Any) -> str:
    """The message of `check_weights`; "" if it accepts the weights."""
    try:
        check_weights(*weights_and_options)
    except ValueError as error:
        return str(error)
    return ""


def _check_fp8(weights: tuple[Any, ...], options: Options) -> None:
    """The check of quantized operands. weights: down_proj last."""
    (_, d_model, d_expert), activation = weights[-1].shape, activation_named(options.activation)
    whole = BLOCK if (floats := RECIPES[str(options.precision)].floats) else 16
    stored = [t.how for t in weights if isinstance(t, StoredWeight)]
    for wrong, expected, got in (
        (
            d_model % whole or d_expert % BLOCK,
            f"multiples of {whole} and {BLOCK} as d and n",
            (d_model, d_expert),
        ),
        (
            not activation.gated or activation.layout != "HALVES",
            "a gated activation whose halves lie apart",
            repr(options.activation),
        ),
        (
            not {*stored} <= ({"fp8 128 128"} if floats else {*()}) or 0 < len(stored) < len(weights),
            f"weights in x's dtype{', or all of them stored as fp8 in blocks of 128 x 128' * floats}",
            f"a StoredWeight, {', '.join(stored)}",
        ),
        (
            not all(isinstance(t, StoredWeight) or t.is_contiguous() for t in weights),
            "contiguous weights",
            "transposed weights",
        ),
        (options.combine != "gather", "combine='gather'", repr(options.combine)),
        (options.save == "paper", "save='minimal' or 'recompute'", "'paper'"),
        (options.workspace_bytes is not None, "workspace_bytes=None", options.workspace_bytes),
    ):
        if wrong:
            raise ValueError(f"precision: expected {expected} with {options.precision!r}, got {got}")


def check_choice(
    x: Tensor,
    scores: Tensor,
    topk_experts: Tensor | None,
    dispatch: Dispatch | None,
    pair_tokens: Tensor | None,
    token_offsets: Tensor | None,
    *,
    num_experts: int,
    options: Options,
    num_tokens: int | None = None,
) -> None:
    """The same for the experts of each token, and the options that not every choice takes. num_tokens: those that may have
    arrived, where they are not x's."""
    num_tokens, device = x.shape[0] if num_tokens is None else num_tokens, x.device
    _check_tensor("scores", scores, FLOAT_DTYPES, device)
    if (pair_tokens is None) != (token_offsets is None):
        raise ValueError("pair_tokens: expected together with token_offsets, got one without the other")
    if dispatch is not None:
        if topk_experts is not None or pair_tokens is not None:
            raise ValueError("dispatch: expected without topk_experts, pair_tokens and token_offsets, got both")
        _check_dispatch(num_tokens, num_experts, device, scores, dispatch)
        if options.row_capacity is not None:
            raise ValueError(
                f"row_capacity: expected None with dispatch=, which has its rows, got {options.row_capacity}"
            )
    else:
        _check_ids(num_tokens, device, scores, topk_experts, pair_tokens, token_offsets)
        if options.validate and topk_experts is not None and not topk_experts.is_meta:
            _validate(topk_experts, num_experts)
    if options.workspace_bytes is not None and (dispatch is not None or pair_tokens is not None):
        raise ValueError(
            "workspace_bytes: expected None with dispatch= or a varying number of experts per token (chunks of tokens "
            f"need a fixed K and a dispatch each), got {options.workspace_bytes}"
        )


def check_counts(x: Tensor, counts: Tensor, num_experts: int) -> None:
    """The same for the rows of each expert, where rows have arrived."""
    _check_tensor("counts", counts, INDEX_DTYPES, x.device, (num_experts,), "(E,)")
    if not num_experts:
        raise ValueError("down_proj: expected shape (E, d, n), E >= 1, got no experts")


def _check_factors(
    name: str, factors: LowRank | None, x: Tensor, dtype: torch.dtype, weight_shape: tuple[int, ...]
) -> None:
    """weight_shape: (E, out, in)."""
    if factors is None:
        return
    if not isinstance(factors, LowRank):
        raise TypeError(f"{name}: expected a LowRank or None, got {type(factors).__name__}")
    (a, b), (num_experts, width_out, width_in) = factors, weight_shape
    for which, factor in (("a", a), ("b", b)):
        _check_tensor(f"{name}.{which}", factor, FLOAT_DTYPES, x.device)
        _check_dtype(f"{name}.{which}", factor, x, dtype)
    if a.dim() != 3 or (a.shape[0], a.shape[2]) != (num_experts, width_in) or not a.shape[1]:
        expected = f"(E, r, in) = ({num_experts}, r, {width_in}), r >= 1"
        raise ValueError(f"{name}.a: expected shape {expected}, got {tuple(a.shape)}")
    shape = (num_experts, width_out, a.shape[1])
    _check_tensor(f"{name}.b", b, FLOAT_DTYPES, None, shape, "(E, out, r)")


def _check_dtype(name: str, weight: Any, x: Tensor, dtype: torch.dtype) -> None:
    """x has the weight's dtype, or is of 16 bits where that is float32. Autocast casts both.

    dtype: the first weight's. What does not fit x is x's fault where it is that, and otherwise the weight's.
    """
    seen = x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device.type)
    if isinstance(weight, StoredWeight) and (seen or x.dtype) == torch.float16:
        raise ValueError(
            f"x: expected torch.bfloat16, torch.float32 or torch.float64 with {name} stored, got torch.float16"
        )
    if autocast_dtype(x.device.type) or isinstance(weight, StoredWeight):
        return
    fitting = FLOAT_DTYPES[:3] if weight.dtype == torch.float32 else (weight.dtype,)
    if x.dtype not in fitting:
        expected = " or ".join(map(str, fitting))
        if weight.dtype != dtype:
            raise ValueError(f"{name}: expected dtype {dtype} as gate_up_proj has, got {weight.dtype}")
        raise ValueError(
            f"x: expected dtype {expected} with {name} in {weight.dtype} (outside autocast), got {x.dtype}"
        )


def _check_ids(
    num_tokens: int,
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


def _validate(topk_experts: Tensor, num_experts: int) -> None:
    """ValueError for an id that is neither -1 nor an expert's, or that is twice in a row of (T, K); waits for the device."""
    if torch.compiler.is_compiling() or (topk_experts.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise RuntimeError(
            "validate: expected False where a graph is captured or compiled, since the host reads the ids"
        )
    outside = (topk_experts < -1) | (topk_experts >= num_experts)
    rows = topk_experts.sort(dim=1).values if topk_experts.dim() == 2 else topk_experts[:, None]
    twice = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)
    for wrong, expected in (
        (outside, f"ids from 0 to {num_experts - 1}, or -1"),
        (twice, "distinct ids in a token's row"),
    ):
        if places := wrong.nonzero()[:1].tolist():
            place = places[0][0]
            raise ValueError(f"topk_experts: expected {expected}, got {topk_experts[place].tolist()} at [{place}]")


def _check_dispatch(
    num_tokens: int, num_experts: int, device: torch.device, scores: Tensor, dispatch: Dispatch
) -> None:
    """Index arrays that no operator made: the kernels trust them."""
    instance("dispatch", dispatch, Dispatch)
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


def check_dense(name: str, tensor: Any) -> None:
    """TypeError unless it is a tensor that lies on one rank, with a stride for each dimension."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if hasattr(tensor, "placements"):
        raise TypeError(f"{name}: expected a torch.Tensor that is local, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(
            f"{name}: expected a dense torch.Tensor, got {'a nested one' if tensor.is_nested else tensor.layout}"
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
    stored = isinstance(tensor, StoredWeight) and name in ("gate_up_proj", "down_proj")
    check_dense(name, tensor.values if stored else tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected on {device} as x is, got {tensor.device}")
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {words} = {shape}, got {tuple(tensor.shape)}")
