"""Choices whose number of experts varies from token to token: from scores to a flat list of pairs, and that list's scores.

    choose_pairs            scores (T, E), token choice (T, K) -> pairs (P,)   kernels and pictures: select_kernels.py,
    score_pairs             logits (T, E), pairs -> scores (P,)                pair_kernels.py
    score_pairs_backward    d_scores (P,) -> d_logits (T, E)

Plain functions on device arrays: whoever differentiates wraps the last two. `choices.py` says what is chosen, in torch.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from blazeproto.router.kinds import DRAWING_RULES, RULES, WAYS
from blazeproto.router.scores import Score, score_named, sums_to_one
from blazeproto.runtime import arrays, checks, memory
from blazeproto.runtime.libraries import any_library
from blazeproto.runtime.numba_kernel import Kernel

MAX_EXPERTS, MAX_TOP_K = 1024, 1024
MAX_TOKENS = 2**30
WORD = 32  # tokens in a word of the bits


def _check_choosing(
    scores: Any, experts: Any, by: str, size: int, max_pairs: int, draws: Any
) -> tuple[arrays.DeviceArray, arrays.DeviceArray, arrays.DeviceArray | None]:
    """Views of the arrays; of the draws where they are needed."""
    view = _check_matrix("scores", scores)
    num_tokens, num_experts = view.shape
    checks.one_of("by", by, WAYS)
    checks.integer("size", size, least=1 if by in RULES else 0)
    checks.integer("max_pairs", max_pairs, least=0)
    chosen = arrays.expect("experts", experts, "int32", (num_tokens, None), device=view.device, alignment=4)
    top_k = chosen.shape[1]
    most = min(MAX_TOP_K, num_experts)
    if not 1 <= top_k <= most:
        raise ValueError(f"experts: expected (T, K) with K from 1 to {most}, got {chosen.shape}")
    if by == "expert_choice" and size > num_tokens:
        raise ValueError(f"size: expected at most T={num_tokens} tokens each expert, got {size}")
    if max(max_pairs, num_tokens * top_k) >= 2**31:
        raise ValueError(f"max_pairs, T*K: expected less than 2**31, got {max_pairs}, {num_tokens * top_k}")
    if by not in DRAWING_RULES:
        return view, chosen, None
    if draws is None:
        raise ValueError(f"draws: expected a number for each expert with by={by!r}, got None")
    return view, chosen, arrays.expect("draws", draws, "float32", (num_experts,), device=view.device, alignment=4)


PAIRS = dict.fromkeys(("pair_experts", "pair_tokens", "token_offsets", "load"), "int32")


@any_library("blazeproto.router.fallback", PAIRS, check=_check_choosing, simulated=True)
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
) -> tuple[Any, Any, Any, Any]:
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
    view, chosen, drawn = _check_choosing(scores, experts, by, size, max_pairs, draws)
    num_tokens, num_experts = view.shape
    with memory.on_stream(view, stream) as stream:
        shapes = ((max_pairs,), (max_pairs,), (num_tokens + 1,), (num_experts,))
        made = [
            arrays.output(f"out[{i}] ({name})", out[i] if out else None, "int32", shapes[i], view, 4)
            for i, name in enumerate(PAIRS)
        ]
        launch_choice(view, chosen, drawn, [a for _, a in made], by, (), size, view.device, stream)
    pair_experts, pair_tokens, token_offsets, load = (array for array, _ in made)
    return pair_experts, pair_tokens, token_offsets, load


def launch_choice(
    scores: Any,
    experts: Any,
    draws: Any,
    out: Sequence[Any],
    by: str,
    options: Sequence[float],
    size: int,
    device: int,
    stream: int,
) -> None:
    """`choose_pairs` of arrays that have been checked. options: none; another module's choice may have some."""
    (num_tokens, num_experts), top_k, max_pairs = scores.shape, experts.shape[1], out[0].shape[0]
    pair_experts, pair_tokens, token_offsets, load = map(memory.argument, out)
    # Where there are no draws, any address will do.
    given, ids, drawn = map(memory.argument, (scores, experts, scores if draws is None else draws))

    # The workspace: keys (E, T), bits (groups, E), the count of each expert in chunks of pairs, two numbers a token or chunk.
    groups = -(-num_tokens // WORD)
    group_chunk = max(1, -(-groups // LIST_CHUNKS))
    list_chunks = max(1, -(-groups // group_chunk))
    pair_chunk = max(1, -(-num_tokens * top_k // COUNT_CHUNKS))
    pair_chunks = max(1, -(-num_tokens * top_k // pair_chunk))
    sizes = [num_experts * num_tokens, groups * num_experts, pair_chunks * num_experts, num_tokens, list_chunks]
    workspace = arrays.empty((4 * sum(sizes),), "uint8", arrays.view(scores))
    memory_of = memory.argument(arrays.view(workspace))
    parts, first = [], 0
    for size_of, dtype in zip(sizes, ("uint32", "uint32", "int32", "uint32", "int32"), strict=True):
        parts.append(memory.part(memory_of, 4 * first, size_of, dtype))
        first += size_of
    keys, bits, table, seconds, totals = parts

    where = device, stream
    turn, largest, count, select, count_tokens, list_pairs = choosing_kernels(num_experts, top_k, by)
    tiles = groups * -(-num_experts // TILE_EXPERTS)
    if tiles:
        shared = 4 * TILE_EXPERTS * (WORD + 1)
        turn.launch(*where, tiles, shared, given, ids, keys, num_tokens, num_experts, top_k)
    if largest and num_tokens:
        warps = largest.threads // WORD
        largest.launch(*where, -(-num_tokens // warps), 0, given, seconds, num_tokens, num_experts)
    if by != "expert_choice":
        counted = (ids, table, ids, num_tokens * top_k, num_experts, pair_chunk)
        count.launch(*where, pair_chunks, 4 * (num_experts + 1), *counted)
    shared = 4 * (3 * select.threads + 4)
    selected = (
        keys,
        seconds,
        given,
        drawn,
        table,
        bits,
        load,
        num_tokens,
        num_experts,
        pair_chunks,
        min(size, MAX_TOKENS),
    )
    select.launch(*where, num_experts, shared, *selected)
    shared = 8 * count_tokens.threads
    words = groups * num_experts, group_chunk * num_experts
    count_tokens.launch(*where, list_chunks, shared, bits, totals, *words)
    shared = 4 * (2 * list_pairs.threads + WORD * (-(-num_experts // WORD) + 1))
    listed = (bits, totals, pair_experts, pair_tokens, token_offsets, num_tokens, list_chunks, group_chunk, max_pairs)
    list_pairs.launch(*where, list_chunks, shared, *listed)


def _check_matrix(name: str, array: Any) -> arrays.DeviceArray:
    view = arrays.expect(name, array, "float32", (None, None), alignment=4)
    if not 1 <= view.shape[1] <= MAX_EXPERTS or view.shape[0] > MAX_TOKENS:
        raise ValueError(f"{name}: expected (T, E) with T <= 2**30 and 1 <= E <= {MAX_EXPERTS}, got {view.shape}")
    return view


def _check_pairs(
    logits: Any, pair_experts: Any, token_offsets: Any, score: str, scale: float
) -> tuple[arrays.DeviceArray, arrays.DeviceArray, arrays.DeviceArray]:
    view = _check_matrix("logits", logits)
    score_named(score)
    checks.number("scale", scale)
    listed = arrays.expect("pair_experts", pair_experts, "int32", (None,), device=view.device, alignment=4)
    shape = (view.shape[0] + 1,)
    offsets = arrays.expect("token_offsets", token_offsets, "int32", shape, device=view.device, alignment=4)
    return view, listed, offsets


def _check_backward(
    logits: Any, pair_experts: Any, token_offsets: Any, d_scores: Any, score: str, scale: float
) -> tuple[arrays.DeviceArray, ...]:
    view, listed, offsets = _check_pairs(logits, pair_experts, token_offsets, score, scale)
    incoming = arrays.expect("d_scores", d_scores, "float32", listed.shape, device=view.device, alignment=4)
    return view, listed, offsets, incoming


@any_library("blazeproto.router.fallback", {"scores": "float32"}, check=_check_pairs, simulated=True)
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
    view, listed, offsets = _check_pairs(logits, pair_experts, token_offsets, score, scale)
    with memory.on_stream(view, stream) as stream:
        scores, scores_view = arrays.output("out", out, "float32", listed.shape, view, 4)
        options = score, renormalize, scale
        launch_scores(view, listed, offsets, scores_view, options, view.device, stream)
    return scores


Options = tuple[str, bool | None, float]


def launch_scores(
    logits: Any, pair_experts: Any, token_offsets: Any, scores: Any, options: Options, device: int, stream: int
) -> None:
    """`score_pairs` of arrays that have been checked. options: score, renormalize, scale."""
    (num_tokens, num_experts), num_pairs = logits.shape, scores.shape[0]
    kernel = score_kernel(num_experts, *options)
    blocks = _blocks(kernel, max(num_tokens, -(-num_pairs // WORD)))
    given = map(memory.argument, (logits, pair_experts, token_offsets, scores))
    if blocks:
        kernel.launch(device, stream, blocks, 0, *given, num_tokens, num_pairs)


@any_library("blazeproto.router.fallback", {"d_logits": "float32"}, check=_check_backward, simulated=True)
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
    """The gradient of `score_pairs`'s logits (MoEBlaze §2.1) from that of its scores.

    logits (T, E) fp32, pair_experts (P,) int32, token_offsets (T + 1,) int32, d_scores (P,) fp32 → d_logits (T, E) fp32.

    A token with a NaN logit gets zeros.  score, renormalize, scale: as in the forward.  out: (T, E) fp32, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
    view, listed, offsets, incoming = _check_backward(logits, pair_experts, token_offsets, d_scores, score, scale)
    with memory.on_stream(view, stream) as stream:
        d_logits, outgoing = arrays.output("out", out, "float32", view.shape, view, 4)
        options = score, renormalize, scale
        launch_scores_backward(view, listed, offsets, incoming, outgoing, options, view.device, stream)
    return d_logits


def launch_scores_backward(
    logits: Any,
    pair_experts: Any,
    token_offsets: Any,
    d_scores: Any,
    d_logits: Any,
    options: Options,
    device: int,
    stream: int,
) -> None:
    """`score_pairs_backward` of arrays that have been checked."""
    num_tokens, num_experts = logits.shape
    kernel = score_backward_kernel(num_experts, *options)
    given = map(memory.argument, (logits, pair_experts, token_offsets, d_scores, d_logits))
    if num_tokens:
        kernel.launch(device, stream, _blocks(kernel, num_tokens), 0, *given, num_tokens)


# --- Kernels -----------------------------------------------------------------------------------------------------------------

THREADS = 256
SELECT_THREADS = 1024  # a digit of ten bits, so that three make a code
TILE_EXPERTS = 128  # of a block of key_columns
COUNT_CHUNKS = 64  # blocks that count experts: every block of select_tokens sums that many rows of a table
LIST_CHUNKS = 1024  # blocks that list pairs: each sums as many totals, and no more have fewer tokens than a word
MAX_BLOCKS = 132 * 32  # then a warp goes on with further tokens


@lru_cache(maxsize=256)
def choosing_kernels(num_experts: int, top_k: int, by: str) -> tuple[Any, ...]:
    """In the order of their launches; None for `largest_codes` where it isn't needed."""
    from blazeproto.dispatch.tiled import count_pairs
    from blazeproto.router import pair_kernels, select_kernels

    kind = {"expert_choice": "score", "token": "chosen", "slot": "slot", "score": "slot"}.get(by, "rounding")
    slot_bits = (top_k - 1).bit_length()
    code_bits = {"token": 0, "slot": slot_bits, "score": slot_bits}.get(by, select_kernels.CODE_BITS)
    count = Kernel(
        count_pairs,
        "int32* int32* int32* int64 int64 int64",
        threads=THREADS,
        min_blocks=8,
        per_thread=8,
        copy_ids=False,
    )
    largest = Kernel(select_kernels.largest_codes, "float32* uint32* int64 int64", threads=THREADS)
    return (
        Kernel(
            select_kernels.key_columns,
            "float32* int32* uint32* int64 int64 int64",
            threads=THREADS,
            min_blocks=3,
            kind=kind,
        ),
        largest if by == "score" else None,
        count,
        Kernel(
            select_kernels.select_tokens,
            "uint32* uint32* float32* float32* int32* uint32* int32* int64 int64 int64 int64",
            threads=SELECT_THREADS,
            by=by,
            code_bits=code_bits,
        ),
        Kernel(pair_kernels.count_tokens, "uint32* int32* int64 int64", threads=THREADS),
        Kernel(
            pair_kernels.list_pairs,
            "uint32* int32* int32* int32* int32* int64 int64 int64 int64",
            threads=THREADS,
            num_experts=num_experts,
        ),
    )


@lru_cache(maxsize=256)
def score_kernel(num_experts: int, score: str, renormalize: bool | None, scale: float) -> Kernel:
    """`pair_kernels.score_pairs` for one E and set of options."""
    from blazeproto.router import pair_kernels

    parameters = "float32* int32* int32* float32* int64 int64"
    options = {"score": score, "together": sums_to_one(score, renormalize), "scale": float(scale)}
    options["num_experts"] = num_experts
    return Kernel(pair_kernels.score_pairs, parameters, threads=THREADS, min_blocks=6, **options)


@lru_cache(maxsize=256)
def score_backward_kernel(num_experts: int, score: str, renormalize: bool | None, scale: float) -> Kernel:
    """`pair_kernels.score_pairs_backward`, likewise."""
    from blazeproto.router import pair_kernels

    parameters = "float32* int32* int32* float32* float32* int64"
    options = {"score": score, "together": sums_to_one(score, renormalize), "scale": float(scale)}
    return Kernel(
        pair_kernels.score_pairs_backward, parameters, threads=THREADS, min_blocks=6, num_experts=num_experts, **options
    )


def _blocks(kernel: Kernel, num_warps: int) -> int:
    return min(-(-num_warps // (kernel.threads // WORD)), MAX_BLOCKS)
