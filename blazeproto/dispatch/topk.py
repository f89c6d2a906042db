"""``topk_route``: router logits to the K best experts of each token and their scores, and the gradient back. One
kernel each.

    logits (T, E) --> scores (T, K) fp32, experts (T, K) int32, best first      kernels and pictures: topk_kernels.py

Plain functions on device arrays: whoever differentiates wraps the two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

from blazeproto import arrays
from blazeproto.dispatch import launch
from blazeproto.dispatch.build import _argument, _empty, _on, _view

Score = Literal["softmax_topk", "topk_softmax", "sigmoid"]
SCORES = ("softmax_topk", "topk_softmax", "sigmoid")
MAX_TOP_K, MAX_EXPERTS = 16, 1024
THREADS = 256  # of a block
MIN_BLOCKS = 3  # on a multiprocessor, of topk_route, which bounds its registers
MAX_BLOCKS = 132 * 32  # then a block goes on with further tokens


def topk_route(
    logits: Any,
    top_k: int,
    *,
    score: Score = "softmax_topk",
    bias: Any = None,
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: tuple[Any, Any] | None = None,
    stream: int | None = None,
) -> tuple[Any, Any]:
    """(scores (T, K) fp32, experts (T, K) int32) of logits (T, E), fp32 or bf16, contiguous, on a CUDA device.

    score: "softmax_topk": softmax over all experts, then the K largest (Switch Transformer eq. 1).
        "topk_softmax": softmax over the K largest logits (Shazeer et al. 2017 eq. 3; Mixtral §2.1).
        "sigmoid": sigmoid of each logit (DeepSeek-V3 eq. 15); ``bias`` (E,) fp32 is added for the choice alone (eq.
        16).
    renormalize: divide a token's scores by their sum; default: with sigmoid (DeepSeek-V3 eq. 13), not with
        softmax_topk; topk_softmax sums to one by itself.  scale: multiplies the scores at the end.
    K up to 16, E up to 1024. Choices come in falling order, ties by the lower expert id. A token with a NaN or
    infinite logit gets experts 0 … K-1 and NaN scores, and no other token notices.
    out: (scores, experts) to fill. stream: a raw cudaStream_t; default: the caller's current one.

    Compiled when first called: before a CUDA-graph capture call it once with logits of the same shape, dtype and
    alignment (rows that begin at multiples of 16 bytes have a kernel of their own).
    """
    view = _check_logits(logits)
    renormalize = _check_options(view, top_k, score, bias, renormalize)
    num_tokens, num_experts = view.shape
    stream = _stream(view, stream)
    with _context(view, stream):
        made = out or (_new(view, (num_tokens, top_k), "float32"), _new(view, (num_tokens, top_k), "int32"))
        scores = _check_array(made[0], "out[0] (scores)", (num_tokens, top_k), "float32", view.device)
        experts = _check_array(made[1], "out[1] (experts)", (num_tokens, top_k), "int32", view.device)
        offsets = view if bias is None else _check_array(bias, "bias", (num_experts,), "float32", view.device)
        if num_tokens:
            kernel = forward_kernel(
                num_experts,
                top_k,
                score,
                bias is not None,
                renormalize,
                float(scale),
                view.dtype == "bfloat16",
                _aligned(view),
            )
            blocks = _blocks(num_tokens, kernel)
            pointers = (_argument(view), _argument(offsets), _argument(scores), _argument(experts))
            kernel.launch(view.device, stream, blocks, 0, *pointers, num_tokens)
    return made[0], made[1]


def topk_route_backward(
    logits: Any,
    experts: Any,
    d_scores: Any,
    *,
    score: Score = "softmax_topk",
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: Any = None,
    stream: int | None = None,
) -> Any:
    """d_logits (T, E), of the logits' dtype, from d_scores (T, K) fp32 and the experts (T, K) that `topk_route` chose.

    The choice itself passes no gradient, and neither does ``bias``. A token with a NaN or infinite logit gets zeros.
    """
    view = _check_logits(logits)
    num_tokens, num_experts = view.shape
    chosen = _view(experts, "experts")
    top_k = chosen.shape[-1] if chosen.shape else 0
    renormalize = _check_options(view, top_k, score, None, renormalize)
    _check_array(chosen, "experts", (num_tokens, top_k), "int32", view.device)
    incoming = _check_array(d_scores, "d_scores", (num_tokens, top_k), "float32", view.device)
    stream = _stream(view, stream)
    with _context(view, stream):
        made = _new(view, view.shape, view.dtype) if out is None else out
        outgoing = _check_array(made, "out", view.shape, view.dtype, view.device)
        if num_tokens:
            half = view.dtype == "bfloat16"
            kernel = backward_kernel(num_experts, top_k, score, renormalize, float(scale), half)
            blocks = _blocks(num_tokens, kernel)
            arguments = (_argument(view), _argument(chosen), _argument(incoming), _argument(outgoing), num_tokens)
            kernel.launch(view.device, stream, blocks, 0, *arguments)
    return made


# --- Kernels ---------------------------------------------------------------------------------------------------------


def forward_lanes(num_experts: int, top_k: int) -> int:
    """Lanes that share a token: up to 32 experts each, and four choices where E has groups of eight enough."""
    return _power_of_two(max(-(-num_experts // 32), min(-(-top_k // 4), -(-num_experts // 8))))


def backward_lanes(num_experts: int, top_k: int) -> int:
    """Lanes that share a token: four experts each, and a lane for each choice and one more."""
    return min(32, _power_of_two(max(-(-num_experts // 4), top_k + 1)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _aligned(logits: arrays.DeviceArray) -> bool:
    """Whether all rows begin at multiples of 16 bytes and hold whole groups of eight: then a load takes 16 bytes."""
    return logits.shape[1] % 8 == 0 and (launch.simulated() or logits.ptr % 16 == 0)


@lru_cache(maxsize=256)
def forward_kernel(
    num_experts: int, top_k: int, score: str, biased: bool, renormalize: bool, scale: float, half: bool, aligned: bool
) -> launch.Kernel:
    from blazeproto.dispatch import topk_kernels

    kind = "uint16*" if half else "float32*"
    return launch.Kernel(
        topk_kernels.topk_route,
        f"{kind} {'float32*' if biased else kind} float32* int32* int64",
        threads=THREADS,
        min_blocks=MIN_BLOCKS,
        lanes=forward_lanes(num_experts, top_k),
        num_experts=num_experts,
        top_k=top_k,
        score=score,
        biased=biased,
        renormalize=renormalize,
        scale=scale,
        half=half,
        aligned=aligned,
    )


@lru_cache(maxsize=256)
def backward_kernel(
    num_experts: int, top_k: int, score: str, renormalize: bool, scale: float, half: bool
) -> launch.Kernel:
    from blazeproto.dispatch import topk_kernels

    kind = "uint16*" if half else "float32*"
    return launch.Kernel(
        topk_kernels.topk_route_backward,
        f"{kind} int32* float32* {kind} int64",
        threads=THREADS,
        min_blocks=4 if num_experts <= 256 else 2,
        lanes=backward_lanes(num_experts, top_k),
        num_experts=num_experts,
        top_k=top_k,
        score=score,
        renormalize=renormalize,
        scale=scale,
        half=half,
    )


def _blocks(num_tokens: int, kernel: launch.Kernel) -> int:
    groups = kernel.threads // kernel.constants["lanes"]
    return min(-(-num_tokens // groups), MAX_BLOCKS)


# --- Checks and memory -----------------------------------------------------------------------------------------------


def _check_options(view: arrays.DeviceArray, top_k: int, score: str, bias: Any, renormalize: bool | None) -> bool:
    """Whether to renormalise; raises for what doesn't fit the logits."""
    if score not in SCORES:
        raise ValueError(f"score: expected one of {SCORES}, got {score!r}")
    if bias is not None and score != "sigmoid":
        raise ValueError(f"bias: expected None with score={score!r}, for only sigmoid scores take one")
    most = min(MAX_TOP_K, view.shape[1])
    if not 1 <= top_k <= most:
        raise ValueError(f"top_k: expected 1 to {most} for E={view.shape[1]}, got {top_k}")
    return score == "sigmoid" if renormalize is None else bool(renormalize)


def _check_logits(logits: Any) -> arrays.DeviceArray:
    view = _as_bfloat16(_view(logits, "logits"))
    if view.dtype not in ("float32", "bfloat16"):
        raise TypeError(f"logits: expected float32 or bfloat16, got {view.dtype}")
    if len(view.shape) != 2 or not 1 <= view.shape[1] <= MAX_EXPERTS:
        raise ValueError(f"logits: expected (T, E) with 1 <= E <= {MAX_EXPERTS}, got {view.shape}")
    if not view.is_contiguous:
        raise ValueError(f"logits: expected a contiguous array, got strides {view.strides} for shape {view.shape}")
    if view.shape[0] >= 2**31:
        raise ValueError(f"logits: expected fewer than 2**31 tokens, got {view.shape[0]}")
    return view


def _as_bfloat16(view: arrays.DeviceArray) -> arrays.DeviceArray:
    """NumPy has no bfloat16: in the simulator uint16 stands for it."""
    return view._replace(dtype="bfloat16") if view.dtype == "uint16" else view


def _check_array(array: Any, name: str, shape: tuple[int, ...], dtype: str, device: int) -> arrays.DeviceArray:
    view = _as_bfloat16(_view(array, name))
    if view.shape != shape or view.dtype != dtype or not view.is_contiguous or view.device != device:
        raise ValueError(f"{name}: expected contiguous {dtype} {shape} on cuda:{device}, got {view!r}")
    return view


def _stream(view: arrays.DeviceArray, stream: int | None) -> int:
    if stream is None:
        return 0 if launch.simulated() else arrays.current_stream(view)
    return stream


def _context(view: arrays.DeviceArray, stream: int) -> Any:
    from contextlib import nullcontext

    return nullcontext() if launch.simulated() else _on(view.device, stream)


def _new(like: arrays.DeviceArray, shape: tuple[int, ...], dtype: str) -> Any:
    size = 1
    for length in shape:
        size *= length
    if launch.simulated() and dtype == "bfloat16":
        dtype = "uint16"
    flat = _empty(like, size, dtype)
    if isinstance(flat, arrays.BFloat16Array):
        return arrays.BFloat16Array(flat.bits.reshape(shape))
    return flat.reshape(shape)
