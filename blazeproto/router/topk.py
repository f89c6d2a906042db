"""K experts for each token. ``topk_route``: the best by router logits, their scores, and the gradient back. ``hash_route``: by a
hash of the token's id. One kernel each.

    logits (T, E)  --> scores (T, K) fp32, experts (T, K) int32, best first     kernels and pictures: topk_kernels.py
    token ids (T,) --> experts (T, K) int32                                     kernel: hash_kernels.py

Plain functions on device arrays: the autograd wrapper is in ops.py.
"""

from functools import lru_cache
from typing import Any

from blazeproto.router.kinds import GOLDEN, MASK_32
from blazeproto.router.public import RowKernel, public
from blazeproto.router.scores import SCORES, Score, renormalizes, score_named
from blazeproto.runtime import arrays, checks

MAX_TOP_K, MAX_HASHED, MAX_EXPERTS, MAX_GROUPS = 16, 32, 1024, 32  # MAX_HASHED: K of `hash_route`
THREADS = 256  # of a block
MIN_BLOCKS = 3  # on a multiprocessor, of topk_route, which bounds its registers
MAX_BLOCKS = 132 * 32  # then a block goes on with further tokens


def power_of_two(least: int) -> int:
    """The smallest one that is at least ``least``."""
    return 1 << (least - 1).bit_length()


def route_kernel(
    logits: Any,
    top_k: int,
    biased: bool,
    score: str,
    renormalize: bool,
    scale: float,
    num_groups: int = 1,
    top_groups: int = 1,
) -> RowKernel:
    """`topk_kernels.topk_route` for these logits. Without a bias any address will do for it."""
    # Whether all rows begin at multiples of 16 bytes and hold whole groups of eight: then a load takes 16 bytes.
    aligned = logits.shape[1] % 8 == 0 and (arrays.simulated() or logits.data_ptr() % 16 == 0)
    options = score, renormalize, scale, biased, logits.dtype == "bfloat16", aligned
    return forward_kernel(logits.shape[1], top_k, *options, num_groups, top_groups)


@lru_cache(maxsize=256)
def forward_kernel(
    num_experts: int,
    top_k: int,
    score: str,
    renormalize: bool,
    scale: float,
    biased: bool,
    half: bool,
    aligned: bool,
    num_groups: int = 1,
    top_groups: int = 1,
) -> RowKernel:
    """`topk_kernels.topk_route` for one E, K and set of options. half: bf16 logits.  aligned: see `route_kernel`."""
    from blazeproto.router import topk_kernels

    kind = "uint16*" if half else "float32*"
    return RowKernel(
        topk_kernels.topk_route,
        f"{kind} {'float32*' if biased else kind} float32* int32* int64",
        threads=THREADS,
        most_blocks=MAX_BLOCKS,
        min_blocks=MIN_BLOCKS,
        # that share a token: up to 32 experts each, and four choices where E has eights enough; one for each group
        lanes=power_of_two(max(-(-num_experts // 32), min(-(-top_k // 4), -(-num_experts // 8)), num_groups)),
        num_experts=num_experts,
        top_k=top_k,
        score=score,
        biased=biased,
        renormalize=renormalize,
        scale=scale,
        half=half,
        aligned=aligned,
        num_groups=num_groups,
        top_groups=top_groups,
    )


@lru_cache(maxsize=256)
def backward_kernel(num_experts: int, top_k: int, score: str, renormalize: bool, scale: float, half: bool) -> RowKernel:
    """`topk_kernels.topk_route_backward`, likewise."""
    from blazeproto.router import topk_kernels

    kind = "uint16*" if half else "float32*"
    return RowKernel(
        topk_kernels.topk_route_backward,
        f"{kind} int32* float32* {kind} int64",
        threads=THREADS,
        most_blocks=MAX_BLOCKS,
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


def _check(sizes: dict[str, Any], call: dict[str, Any]) -> None:
    num_tokens, num_experts, top_k = sizes["T"], sizes["E"], sizes["K"] if "K" in sizes else call["top_k"]
    check_matrix("logits", sizes, num_tokens < 2**31, "T < 2**31")
    check_scoring(call)
    most = min(MAX_TOP_K, num_experts)
    checks.require(1 <= checks.integer("top_k", top_k) <= most, "top_k", f"1 to {most} for E={num_experts}", top_k)
    expected = f"None with score={call['score']!r}, for only sigmoid scores take one"
    checks.require(call.get("bias") is None or SCORES[call["score"]].elementwise, "bias", expected, "one")
    sizes["groups"] = check_groups(call.get("num_groups"), call.get("top_groups"), num_experts, top_k)
    checks.require(sizes["groups"][0] <= MAX_GROUPS, "num_groups", f"at most {MAX_GROUPS}", call.get("num_groups"))


def check_matrix(name: str, sizes: dict[str, Any], fits: bool, tokens: str) -> None:
    """ValueError unless a matrix has 1 to `MAX_EXPERTS` columns, and its number of tokens ``fits`` what ``tokens`` says."""
    expected = f"(T, E) with {tokens} and 1 <= E <= {MAX_EXPERTS}"
    checks.require(fits and 1 <= sizes["E"] <= MAX_EXPERTS, name, expected, (sizes["T"], sizes["E"]))


def check_groups(num_groups: int | None, top_groups: int | None, num_experts: int, top_k: int) -> tuple[int, int]:
    """Both numbers, 1 and 1 where every group stays. TypeError or ValueError unless they fit E and K, or both are None."""
    if num_groups is None and top_groups is None:
        return 1, 1
    if num_groups is None:
        checks.integer("top_groups", top_groups, least=1)
    groups = checks.integer("num_groups", num_groups, least=1)
    kept = checks.integer("top_groups", top_groups, least=1)
    checks.require(num_experts % groups == 0, "num_groups", f"a divisor of E={num_experts}", groups)
    checks.require(kept <= groups, "top_groups", f"at most num_groups={groups}", kept)
    most = num_experts // groups * kept
    checks.require(top_k <= most, "top_k", f"at most {most}, the experts of {kept} of {groups} groups", top_k)
    return (1, 1) if kept == groups else (groups, kept)


def check_scoring(call: dict[str, Any]) -> None:
    score_named(call["score"])
    checks.number("scale", call["scale"])


def scoring(call: dict[str, Any]) -> tuple[str, bool, float]:
    top_k = call.get("top_k", call.get("K"))
    return call["score"], renormalizes(call["score"], call["renormalize"], top_k), float(call["scale"])


@public(
    {"logits": "float32|bfloat16 T E", "bias": "float32 E"},
    {"scores": "float32 T top_k", "experts": "int32 T top_k"},
    _check,
    lambda place, call, logits, bias, *made: route_kernel(
        logits, call["top_k"], bias is not None, *scoring(call), *call["groups"]
    ).over(call["T"], place, (logits, logits if bias is None else bias, *made)),
)
def topk_route(
    logits: Any,
    top_k: int,
    *,
    score: Score = "softmax_topk",
    bias: Any = None,
    renormalize: bool | None = None,
    scale: float = 1.0,
    num_groups: int | None = None,
    top_groups: int | None = None,
    out: tuple[Any, Any] | None = None,
    stream: int | None = None,
) -> Any:
    """The K best experts of each token, best first, and their scores. MoEBlaze §2.1; Switch Transformer eq. 1; DeepSeek-V3
    eq. 15.

    logits (T, E) fp32 or bf16, contiguous, bias (E,) fp32 or None → scores (T, K) fp32, experts (T, K) int32.

    top_k: K, up to 16; E up to 1024.  score: "softmax_topk", "topk_softmax" or "sigmoid"; scores.py says what they are.
    bias: for sigmoid scores alone: added for the choice and not to the score (DeepSeek-V3 eq. 16).
    renormalize: divide a token's scores by their sum; default: with sigmoid and K > 1 alone.  scale: multiplies the scores at the
    end.
    num_groups, top_groups: G, up to 32, and how many of them stay, both or neither (DeepSeek-V3 §2.1.2). E / G neighbours are a
    group. Its score is the sum of its two largest keys, in fp32, and experts outside a token's best groups cannot be chosen. Keys
    are sigmoid scores, plus the bias if given; with the other kinds of scores they are the logits.
    Ties go to the lower expert id, among groups to the lower group. A token with a NaN or infinite logit gets experts 0 … K-1 and
    NaN scores, and no other token notices.
    out: (scores, experts) to fill.

    Compiled when first called: before a CUDA-graph capture call it once with logits of the same shape, dtype and
    alignment (rows that begin at multiples of 16 bytes have a kernel of their own).

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """


@public(
    {"logits": "float32|bfloat16 T E", "experts": "int32 T K", "d_scores": "float32 T K"},
    {"d_logits": "logits T E"},
    _check,
    lambda place, call, logits, *others: backward_kernel(
        call["E"], call["K"], *scoring(call), logits.dtype == "bfloat16"
    ).over(call["T"], place, (logits, *others)),
)
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
    """The backward of `topk_route` (MoEBlaze §2.1; DeepSeek-V3 eq. 15): the logits' gradient from the scores'.

    logits (T, E) fp32 or bf16, experts (T, K) int32, as they were chosen, d_scores (T, K) fp32 → d_logits (T, E) of the
    logits' dtype.

    The choice itself passes no gradient, and neither does a bias. A token with a NaN or infinite logit gets zeros.
    score, renormalize, scale: as in the forward.  out: (T, E) of the logits' dtype, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """


# --- Hash --------------------------------------------------------------------------------------------------------------------


def start_of(seed: int) -> int:
    """The 32-bit word that is added to every token id."""
    return GOLDEN * (seed + 1) & MASK_32


@lru_cache(maxsize=256)
def hash_kernel(num_experts: int, top_k: int) -> RowKernel:
    """`hash_kernels.hash_route` for one E and K. A warp has a token."""
    from blazeproto.router import hash_kernels

    return RowKernel(
        hash_kernels.hash_route,
        "int64* int32* int64 int64",
        threads=THREADS,
        rows=THREADS // 32,
        most_blocks=MAX_BLOCKS,
        num_experts=num_experts,
        top_k=top_k,
    )


def _check_hash(sizes: dict[str, Any], call: dict[str, Any]) -> None:
    num_experts, top_k, _ = (checks.integer(name, call[name]) for name in ("num_experts", "top_k", "seed"))
    checks.require(1 <= num_experts <= MAX_EXPERTS, "num_experts", f"1 to {MAX_EXPERTS}", num_experts)
    most = min(MAX_HASHED, num_experts)
    checks.require(1 <= top_k <= most, "top_k", f"1 to {most} for E={num_experts}", top_k)


@public(
    {"token_ids": "int64 T"},
    {"experts": "int32 T top_k"},
    _check_hash,
    lambda place, call, *arrays: hash_kernel(call["num_experts"], call["top_k"]).over(
        call["T"], place, arrays, start_of(call["seed"]), call["T"]
    ),
)
def hash_route(
    token_ids: Any, num_experts: int, top_k: int, *, seed: int = 0, out: Any = None, stream: int | None = None
) -> Any:
    """Experts by a hash of the token's id: those with the K largest weights, ties to the lower. Roller et al. 2021, §3.1.

    token_ids (T,) int64 → experts (T, K) int32.

    num_experts, top_k: E, up to 1024, and K, up to 32.  seed: of the hash.  out: (T, K) int32, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
