"""Choices whose number of experts varies from token to token: from scores to a flat list of pairs, and that list's scores.

    choose_pairs            scores (T, E), token choice (T, K) -> pairs (P,)   kernels and pictures: select_kernels.py,
    score_pairs             logits (T, E), pairs -> scores (P,)                pair_kernels.py
    score_pairs_backward    d_scores (P,) -> d_logits (T, E)

Plain functions on device arrays; `pair_ops.py` wraps the last two for autograd. `choices.py` has the formulas, in torch.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from blazeproto.router.kinds import DRAWING_RULES, RULES, WAYS
from blazeproto.router.public import Place, RowKernel, parts_of, public
from blazeproto.router.scores import Score, sums_to_one
from blazeproto.router.topk import check_matrix, check_scoring, scoring
from blazeproto.runtime import arrays, checks, memory
from blazeproto.runtime.numba_kernel import NumbaKernel

MAX_TOP_K = 1024
MAX_TOKENS = 2**30
WORD = 32  # tokens in a word of the bits
THREADS = 256
SELECT_THREADS = 1024  # a digit of ten bits, so that three make a code
TILE_EXPERTS = 128  # of a block of key_columns
COUNT_CHUNKS = 64  # blocks that count experts: every block of select_tokens sums that many rows of a table
LIST_CHUNKS = 1024  # blocks that list pairs: each sums as many totals, and no more have fewer tokens than a word
MAX_BLOCKS = 132 * 32  # then a warp goes on with further tokens


def pair_rows(num_tokens: int, num_pairs: int) -> int:
    """Warps of `score_pairs`: each has a token, and 32 places, which may be unused."""
    return max(num_tokens, -(-num_pairs // WORD))


@lru_cache(maxsize=256)
def choosing_kernels(num_experts: int, top_k: int, by: str, masked: bool) -> tuple[Any, ...]:
    """In the order of their launches; None for `largest_codes` where it isn't needed."""
    from blazeproto.dispatch.tiled import count_pairs
    from blazeproto.router import pair_kernels, select_kernels

    kind = {"expert_choice": "score", "token": "chosen", "slot": "slot", "score": "slot"}.get(by, "rounding")
    slot_bits = (top_k - 1).bit_length()
    code_bits = {"token": 0, "slot": slot_bits, "score": slot_bits}.get(by, select_kernels.CODE_BITS)
    return (
        NumbaKernel(
            select_kernels.key_columns,
            "float32* int32* uint32* int64 int64 int64",
            threads=THREADS,
            min_blocks=3,
            kind=kind,
        ),
        NumbaKernel(select_kernels.largest_codes, "float32* uint32* int64 int64", threads=THREADS)
        if by == "score"
        else None,
        NumbaKernel(
            count_pairs,
            "int32* int32* int32* int64 int64 int64",
            threads=THREADS,
            min_blocks=8,
            per_thread=8,
            copy_ids=False,
        ),
        NumbaKernel(
            select_kernels.select_tokens,
            "uint32* uint32* float32* float32* int32* uint32* int32* int32* int64 int64 int64 int64",
            threads=SELECT_THREADS,
            by=by,
            code_bits=code_bits,
            masked=masked,
        ),
        NumbaKernel(pair_kernels.count_tokens, "uint32* int32* int64 int64", threads=THREADS),
        NumbaKernel(
            pair_kernels.list_pairs,
            "uint32* int32* int32* int32* int32* int64 int64 int64 int64",
            threads=THREADS,
            num_experts=num_experts,
        ),
    )


@lru_cache(maxsize=256)
def score_kernel(num_experts: int, score: str, renormalize: bool, scale: float, backward: bool = False) -> RowKernel:
    """`pair_kernels.score_pairs`, or ``_backward``, for one E and set of options."""
    from blazeproto.router import pair_kernels

    return RowKernel(
        pair_kernels.score_pairs_backward if backward else pair_kernels.score_pairs,
        "float32* int32* int32* float32* float32* int64" if backward else "float32* int32* int32* float32* int64 int64",
        threads=THREADS,
        rows=THREADS // WORD,
        most_blocks=MAX_BLOCKS,
        min_blocks=6,
        num_experts=num_experts,
        score=score,
        together=sums_to_one(score, renormalize),
        scale=scale,
    )


def _check_choosing(sizes: dict[str, Any], call: dict[str, Any]) -> None:
    num_tokens, num_experts, top_k = (sizes[word] for word in "TEK")
    check_matrix("scores", sizes, num_tokens <= MAX_TOKENS, "T <= 2**30")
    by, size, max_pairs = call["by"], call["size"], call["max_pairs"]
    checks.one_of("by", by, WAYS)
    checks.integer("size", size, least=1 if by in RULES else 0)
    checks.integer("max_pairs", max_pairs, least=0)
    most = min(MAX_TOP_K, num_experts)
    checks.require(1 <= top_k <= most, "experts", f"(T, K) with K from 1 to {most}", (num_tokens, top_k))
    if by == "expert_choice":
        checks.require(size <= num_tokens, "size", f"at most T={num_tokens} tokens each expert", size)
    fits, got = max(max_pairs, num_tokens * top_k) < 2**31, f"{max_pairs}, {num_tokens * top_k}"
    checks.require(fits, "max_pairs, T*K", "less than 2**31", got)
    if by in DRAWING_RULES:
        checks.require(call["draws"] is not None, "draws", f"a number for each expert with by={by!r}", None)


def _check_scoring(sizes: dict[str, Any], call: dict[str, Any]) -> None:
    check_matrix("logits", sizes, sizes["T"] <= MAX_TOKENS, "T <= 2**30")
    check_scoring(call)


@public(
    {"scores": "float32 T E", "experts": "int32 T K", "draws": "float32 E"},
    {
        "pair_experts": "int32 max_pairs",
        "pair_tokens": "int32 max_pairs",
        "token_offsets": "int32 T+1",
        "load": "int32 E",
    },
    _check_choosing,
    lambda place, call, *arrays: launch_choice(place, arrays, call["by"], (), call["size"], None),
)
def choose_pairs(
    scores: Any,
    experts: Any,
    by: str,
    size: int,
    max_pairs: int,
    *,
    draws: Any = None,
    out: Sequence[Any] | None = None,
    stream: int | None = None,
) -> Any:
    """The choice of experts where their number varies: token rounding (SonicMoE §5 and appendix E.2), expert choice (Zhou et
    al. 2022, §3.2), capacities (GShard §2.2).

    scores (T, E) fp32 in [0, 1] or NaN, experts (T, K) int32, the token choice, distinct in a row, best first, draws (E,) fp32 in
    [0, 1) or None → pair_experts (P,), pair_tokens (P,), token_offsets (T + 1,), load (E,), all int32.

    by: a rule of token rounding (``size`` is the tile), "expert_choice" (``size`` tokens each expert, at most T), or the
    priority "slot", "token" or "score" of a capacity (``size`` tokens an expert at most). `choices` says what each means; ties
    go to the lower token. "expert_choice" does not read experts.
    max_pairs: P, which bounds the pairs there can be (what lies beyond is left out). They come by token and by ascending
    expert; places not used come last and hold expert -1, token 0.
    draws: for "sr_f" and "nr_s", which compare them with a probability.  out: the four to fill.

    E and K up to 1024. Compiled when first called: before a CUDA-graph capture call it once with arrays of the same shapes.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """


def launch_choice(
    place: Place, operands: tuple[Any, ...], by: str, options: Sequence[float], size: Any, limits: Any
) -> None:
    """`choose_pairs` of checked arrays: scores, experts, draws; pair_experts, pair_tokens, token_offsets, load.

    options: none here; the choice of another module may have some.  limits: with masked tokens, which come last and have expert
    -1, (2,) int32: the number of the others, and the size for them; else None.
    """
    scores, experts, draws, *outputs = operands
    (num_tokens, num_experts), top_k, max_pairs = scores.shape, experts.shape[1], outputs[0].shape[0]
    # Where there are no draws, any address will do.
    everything = scores, experts, scores if draws is None else draws, experts if limits is None else limits, *outputs
    given, ids, drawn, limited, *lists, counts = map(memory.argument, everything)

    # The workspace: keys (E, T), bits (groups, E), the count of each expert in chunks of pairs, two numbers a token or chunk.
    groups = -(-num_tokens // WORD)
    group_chunk = max(1, -(-groups // LIST_CHUNKS))
    list_chunks = max(1, -(-groups // group_chunk))
    pair_chunk = max(1, -(-num_tokens * top_k // COUNT_CHUNKS))
    pair_chunks = max(1, -(-num_tokens * top_k // pair_chunk))
    sizes = num_experts * num_tokens, groups * num_experts, pair_chunks * num_experts, num_tokens, list_chunks
    if isinstance(scores, arrays.DeviceArray):
        workspace = arrays.view(arrays.empty((sum(sizes),), "float32", scores))
    else:
        workspace = scores.new_empty(sum(sizes))
    dtypes = "uint32", "uint32", "int32", "uint32", "int32"
    keys, bits, table, seconds, totals = parts_of(workspace, *zip(sizes, dtypes, strict=True))

    turn, largest, count, select, count_tokens, list_pairs = choosing_kernels(
        num_experts, top_k, by, limits is not None
    )
    tiles = groups * -(-num_experts // TILE_EXPERTS)
    if tiles:
        shared = 4 * TILE_EXPERTS * (WORD + 1)
        turn.launch(*place, tiles, shared, given, ids, keys, num_tokens, num_experts, top_k)
    if largest and num_tokens:
        warps = largest.threads // WORD
        largest.launch(*place, -(-num_tokens // warps), 0, given, seconds, num_tokens, num_experts)
    if by != "expert_choice":
        counted = ids, table, ids, num_tokens * top_k, num_experts, pair_chunk
        count.launch(*place, pair_chunks, 4 * (num_experts + 1), *counted)
    most = MAX_TOKENS if limits is not None else min(size, MAX_TOKENS)  # with limits not read
    selected = keys, seconds, given, drawn, table, limited, bits, counts, num_tokens, num_experts, pair_chunks, most
    select.launch(*place, num_experts, 4 * (3 * select.threads + 4), *selected)
    words = groups * num_experts, group_chunk * num_experts
    count_tokens.launch(*place, list_chunks, 8 * count_tokens.threads, bits, totals, *words)
    shared = 4 * (2 * list_pairs.threads + WORD * (-(-num_experts // WORD) + 1))
    list_pairs.launch(
        *place, list_chunks, shared, bits, totals, *lists, num_tokens, list_chunks, group_chunk, max_pairs
    )


@public(
    {"logits": "float32 T E", "pair_experts": "int32 P", "token_offsets": "int32 T+1"},
    {"scores": "float32 P"},
    _check_scoring,
    lambda place, call, *arrays: score_kernel(call["E"], *scoring(call)).over(
        pair_rows(call["T"], call["P"]), place, arrays, call["T"], call["P"]
    ),
)
def score_pairs(
    logits: Any,
    pair_experts: Any,
    token_offsets: Any,
    *,
    score: Score = "softmax_topk",
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: Any = None,
    stream: int | None = None,
) -> Any:
    """The scores of a list of pairs, as `topk_route`'s: MoEBlaze §2.1; SonicMoE §6.3.1 for those that sum to one.

    logits (T, E) fp32, pair_experts (P,) int32 and token_offsets (T + 1,) int32 as `choose_pairs` makes them → scores (P,)
    fp32, 0 in unused places.

    score, renormalize, scale: as `topk_route` has them; a token's scores that sum to one do so over the pairs that it has. A
    token with a NaN logit has NaN scores, and no other token notices.  out: (P,) fp32, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """


@public(
    {"logits": "float32 T E", "pair_experts": "int32 P", "token_offsets": "int32 T+1", "d_scores": "float32 P"},
    {"d_logits": "float32 T E"},
    _check_scoring,
    lambda place, call, *arrays: score_kernel(call["E"], *scoring(call), backward=True).over(call["T"], place, arrays),
)
def score_pairs_backward(
    logits: Any,
    pair_experts: Any,
    token_offsets: Any,
    d_scores: Any,
    *,
    score: Score = "softmax_topk",
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: Any = None,
    stream: int | None = None,
) -> Any:
    """The backward of `score_pairs` (MoEBlaze §2.1): the logits' gradient from the scores'.

    logits (T, E) fp32, pair_experts (P,) int32, token_offsets (T + 1,) int32, d_scores (P,) fp32 → d_logits (T, E) fp32.

    A token with a NaN logit gets zeros.  score, renormalize, scale: as in the forward.  out: (T, E) fp32, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
