"""``topk_route``: router logits to the K best experts of each token and their scores, and the gradient back. One
kernel each.

    logits (T, E) --> scores (T, K) fp32, experts (T, K) int32, best first      kernels and pictures: topk_kernels.py

Plain functions on device arrays: whoever differentiates wraps the two.
"""

from functools import lru_cache
from typing import Any

from blazeproto.router.scores import SCORES, Score, renormalizes, score_named
from blazeproto.runtime import arrays, checks, memory
from blazeproto.runtime.arrays import DeviceArray
from blazeproto.runtime.libraries import any_library
from blazeproto.runtime.numba_kernel import Kernel

MAX_TOP_K, MAX_EXPERTS = 16, 1024
THREADS = 256  # of a block
MIN_BLOCKS = 3  # on a multiprocessor, of topk_route, which bounds its registers
MAX_BLOCKS = 132 * 32  # then a block goes on with further tokens


def _check_forward(
    logits: Any, top_k: int, score: str, bias: Any, scale: float
) -> tuple[DeviceArray, DeviceArray | None]:
    """Views of the logits and of the bias, if there is one."""
    view = _check_logits(logits)
    num_experts = view.shape[1]
    _check_options(num_experts, top_k, score, scale)
    if bias is None:
        return view, None
    if not SCORES[score].elementwise:
        raise ValueError(f"bias: expected None with score={score!r}, for only sigmoid scores take one")
    return view, arrays.expect("bias", bias, "float32", (num_experts,), device=view.device, alignment=4)


@any_library(
    "blazeproto.router.fallback", {"scores": "float32", "experts": "int32"}, check=_check_forward, simulated=True
)
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
    """The K best experts of each token, best first, and their scores. MoEBlaze §2.1; Switch Transformer eq. 1; DeepSeek-V3
    eq. 15.

    logits (T, E) fp32 or bf16, contiguous, bias (E,) fp32 or None → scores (T, K) fp32, experts (T, K) int32.

    top_k: K, up to 16; E up to 1024.  score: "softmax_topk", "topk_softmax" or "sigmoid"; scores.py says what they are.
    bias: for sigmoid scores alone: added for the choice and not to the score (DeepSeek-V3 eq. 16).
    renormalize: divide a token's scores by their sum; default: with sigmoid alone.  scale: multiplies the scores at the end.
    Ties go to the lower expert id. A token with a NaN or infinite logit gets experts 0 … K-1 and NaN scores, and no other token
    notices.
    out: (scores, experts) to fill.

    Compiled when first called: before a CUDA-graph capture call it once with logits of the same shape, dtype and
    alignment (rows that begin at multiples of 16 bytes have a kernel of their own).

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
    view, offsets = _check_forward(logits, top_k, score, bias, scale)
    with memory.on_stream(view, stream) as stream:
        given, shape = out or (None, None), (view.shape[0], top_k)
        scores, scores_view = arrays.output("out[0] (scores)", given[0], "float32", shape, view, 4)
        experts, experts_view = arrays.output("out[1] (experts)", given[1], "int32", shape, view, 4)
        options = score, renormalizes(score, renormalize), float(scale)
        launch(view, offsets, scores_view, experts_view, options, view.device, stream)
    return scores, experts


def launch(
    logits: Any, bias: Any, scores: Any, experts: Any, options: tuple[str, bool, float], device: int, stream: int
) -> None:
    """`topk_route` of arrays that have been checked. options: score, renormalize, scale."""
    (num_tokens, num_experts), top_k = logits.shape, experts.shape[1]
    # Whether all rows begin at multiples of 16 bytes and hold whole groups of eight: then a load takes 16 bytes.
    aligned = num_experts % 8 == 0 and (arrays.simulated() or logits.data_ptr() % 16 == 0)
    kernel = forward_kernel(num_experts, top_k, *options, bias is not None, logits.dtype == "bfloat16", aligned)
    # Where there is no bias, any address will do.
    given = map(memory.argument, (logits, logits if bias is None else bias, scores, experts))
    if num_tokens:
        kernel.launch(device, stream, _blocks(kernel, num_tokens), 0, *given, num_tokens)


def _check_backward(logits: Any, experts: Any, d_scores: Any, score: str, scale: float) -> tuple[DeviceArray, ...]:
    """Views of the three arrays."""
    view = _check_logits(logits)
    num_tokens, num_experts = view.shape
    chosen = arrays.expect("experts", experts, "int32", (num_tokens, None), device=view.device, alignment=4)
    _check_options(num_experts, chosen.shape[1], score, scale)
    incoming = arrays.expect("d_scores", d_scores, "float32", chosen.shape, device=view.device, alignment=4)
    return view, chosen, incoming


@any_library("blazeproto.router.fallback", {"d_logits": "bfloat16"}, check=_check_backward, simulated=True)
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
    """The gradient of `topk_route`'s logits (MoEBlaze §2.1; DeepSeek-V3 eq. 15) from that of its scores.

    logits (T, E) fp32 or bf16, experts (T, K) int32, as they were chosen, d_scores (T, K) fp32 → d_logits (T, E) of the
    logits' dtype.

    The choice itself passes no gradient, and neither does a bias. A token with a NaN or infinite logit gets zeros.
    score, renormalize, scale: as in the forward.  out: (T, E) of the logits' dtype, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
    view, chosen, incoming = _check_backward(logits, experts, d_scores, score, scale)
    with memory.on_stream(view, stream) as stream:
        d_logits, outgoing = arrays.output("out", out, view.dtype, view.shape, view, 2)
        options = score, renormalizes(score, renormalize), float(scale)
        launch_backward(view, chosen, incoming, outgoing, options, view.device, stream)
    return d_logits


def launch_backward(
    logits: Any, experts: Any, d_scores: Any, d_logits: Any, options: tuple[str, bool, float], device: int, stream: int
) -> None:
    """`topk_route_backward` of arrays that have been checked."""
    num_tokens, num_experts = logits.shape
    kernel = backward_kernel(num_experts, experts.shape[1], *options, logits.dtype == "bfloat16")
    given = map(memory.argument, (logits, experts, d_scores, d_logits))
    if num_tokens:
        kernel.launch(device, stream, _blocks(kernel, num_tokens), 0, *given, num_tokens)


# --- Kernels ---------------------------------------------------------------------------------------------------------


def power_of_two(least: int) -> int:
    """The smallest one that is at least ``least``."""
    return 1 << (least - 1).bit_length()


def _blocks(kernel: Kernel, num_tokens: int) -> int:
    return min(-(-num_tokens // (kernel.threads // kernel.constants["lanes"])), MAX_BLOCKS)


@lru_cache(maxsize=256)
def forward_kernel(
    num_experts: int, top_k: int, score: str, renormalize: bool, scale: float, biased: bool, half: bool, aligned: bool
) -> Kernel:
    """`topk_kernels.topk_route` for one E, K and set of options. half: bf16 logits.  aligned: see `launch`."""
    from blazeproto.router import topk_kernels

    kind = "uint16*" if half else "float32*"
    return Kernel(
        topk_kernels.topk_route,
        f"{kind} {'float32*' if biased else kind} float32* int32* int64",
        threads=THREADS,
        min_blocks=MIN_BLOCKS,
        # that share a token: up to 32 experts each, and four choices where E has groups of eight enough
        lanes=power_of_two(max(-(-num_experts // 32), min(-(-top_k // 4), -(-num_experts // 8)))),
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
def backward_kernel(num_experts: int, top_k: int, score: str, renormalize: bool, scale: float, half: bool) -> Kernel:
    """`topk_kernels.topk_route_backward`, likewise."""
    from blazeproto.router import topk_kernels

    kind = "uint16*" if half else "float32*"
    return Kernel(
        topk_kernels.topk_route_backward,
        f"{kind} int32* float32* {kind} int64",
        threads=THREADS,
        min_blocks=4 if num_experts <= 256 else 2,
        # that share a token: four experts each, and a lane for each choice and one more
        lanes=min(32, power_of_two(max(-(-num_experts // 4), top_k + 1))),
        num_experts=num_experts,
        top_k=top_k,
        score=score,
        renormalize=renormalize,
        scale=scale,
        half=half,
    )


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check_logits(logits: Any) -> DeviceArray:
    view = arrays.expect("logits", logits, ("float32", "bfloat16"), (None, None), alignment=2)
    if not 1 <= view.shape[1] <= MAX_EXPERTS or view.shape[0] >= 2**31:
        raise ValueError(f"logits: expected (T, E) with T < 2**31 and 1 <= E <= {MAX_EXPERTS}, got {view.shape}")
    return view


def _check_options(num_experts: int, top_k: int, score: str, scale: float) -> None:
    score_named(score)
    checks.integer("top_k", top_k)
    checks.number("scale", scale)
    most = min(MAX_TOP_K, num_experts)
    if not 1 <= top_k <= most:
        raise ValueError(f"top_k: expected 1 to {most} for E={num_experts}, got {top_k}")
