"""The small sums beside the products (cuda/reduce.cu): gradients of scores and biases. Memory-bound, in a fixed order."""

from functools import cache
from pathlib import Path
from typing import Any

from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm.arguments import Array
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.product import Product, build_of
from blazeproto.gemm.specification import Specification
from blazeproto.gemm.tiles import CHUNK
from blazeproto.runtime import driver

THREADS = 256  # of a block
LEAST_ROWS, MOST_SPLITS = 64, 512  # of rows that `expert_row_sum` deals out


def sum_formula(m: Any, values: Any, *, gather: bool = False, scores: Any = None) -> Any:
    """out[e] = Σ values_r over an expert's rows, or of S_p values_r."""
    rows = m.gather(values) if gather else values
    return m.expert_sum(rows if scores is None else m.of_rows(scores) * rows)


SCORE_GRAD = Specification(
    inputs=(Array("d_out", "T d"), Array("down_bias", "E d")),
    outputs=(Array("d_scores", "P", "float32", added=True),),
    # dS_p gains ⟨dO_t, b_e⟩
    formula=lambda m, d_out, down_bias: m.by_pair(m.dot_expert(m.gather(d_out), down_bias)),
    by_pair=("token_index_map", "d_scores"),
)
_ROW_SUM = Specification(
    inputs=(Array("values", "R h", gather="T h"), Array("scores", "P", "float32", optional=True)),
    outputs=(Array("out", "E h", f32=True),),
    formula=sum_formula,
    workspace=lambda letters, config: (row_sum_slots(letters["R"], letters["E"]), letters["h"]),
)


@SCORE_GRAD.public
def bias_score_grad(d_out: Any, down_bias: Any, dispatch: Dispatch, *, d_scores: Any, stream: int | None = None) -> Any:
    """d_scores += ⟨d_out[token], down_bias[expert]⟩: a down bias's share. From MoEBlaze Algorithm 1, line 10, with a bias.

    d_out (T, d), down_bias (E, d), both bf16, and a dispatch of E experts → d_scores (P,) or (T, K) fp32, added to in place.
    JAX arrays are immutable: a new one is returned.

    stream: a raw cudaStream_t; default: the caller's current one. TypeError or ValueError names the argument, before anything
    is launched.
    """
    return SCORE_GRAD.run(launch_bias_score_grad, locals())


@_ROW_SUM.public
def expert_row_sum(
    values: Any,
    dispatch: Dispatch,
    *,
    gather: bool = False,
    scores: Any = None,
    out: Any = None,
    accumulate: bool = False,
    workspace: Any = None,
    stream: int | None = None,
) -> Any:
    """out[e] = Σ over an expert's rows r of values[r]: a bias's gradient. From MoEBlaze Algorithm 1, lines 9 and 10, with biases.

    values (R, m) or (T, m) bf16, scores (P,) or (T, K) fp32 or None, and a dispatch of E experts → out (E, m) bf16, or fp32
    if ``out`` is.

    gather: sums values[token of r], values (T, m).  scores: weigh by scores[pair of r].  accumulate: add to an ``out`` that
    is given.
    workspace: (row_sum_slots(R, E), m) fp32; made where it is not given.

    stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    given = _ROW_SUM.check(locals())
    f32 = given.views["out"].dtype == "float32"
    launch_expert_row_sum(**given.views, at=given.located(), gather=gather, f32=f32, accumulate=accumulate)
    return _ROW_SUM.results(given)


@cache
def kernel(entry: str, top_k: int, sources: Path | None = None) -> Kernel:
    """entry: of reduce.cu.  top_k: 0 if it varies."""
    return Kernel("reduce.cu", entry, {"TOP_K": top_k, "THREADS": THREADS}, sources=sources)


def _run(product: str, entry: str, top_k: int, grid: tuple[int, int], at: Addresses, words: tuple[int, ...]) -> None:
    """product: whose launch it is."""
    driver.launch(kernel(entry, top_k, build_of(product).sources).handle(at.device), grid, THREADS, 0, at.stream, words)


def launch_reduce_scores_grad(partial: Any, d_scores: Any, at: Addresses) -> None:
    """partial (J, R) fp32 → d_scores (P,) = Σ_j partial[j, row of p], in order; 0 for a pair without a row."""
    if at.num_pairs:
        words = (partial.data_ptr(), at.token_index_map, d_scores.data_ptr(), *partial.shape, at.num_pairs)
        _run("down_backward_act", "reduce_scores_grad", 0, (-(-at.num_pairs // THREADS), 1), at, words)


def launch_bias_score_grad(d_out: Any, down_bias: Any, at: Addresses, *, d_scores: Any) -> None:
    """`bias_score_grad` of arrays that have been checked."""
    num_tokens, d = d_out.shape
    if num_tokens:
        indices = (at.token_index_map, at.expert_token_offsets, at.token_offsets)
        words = (d_out.data_ptr(), down_bias.data_ptr(), *indices, d_scores.data_ptr(), num_tokens, at.num_experts, d)
        _run("bias_score_grad", "bias_score_grad", at.top_k, (-(-num_tokens // (THREADS // 32)), 1), at, words)


def launch_expert_row_sum(
    values: Any,
    at: Addresses,
    *,
    gather: bool = False,
    scores: Any = None,
    out: Any,
    f32: bool,
    accumulate: bool = False,
    workspace: Any,
) -> None:
    """`expert_row_sum` of arrays that have been checked. f32: whether ``out`` is."""
    (num_experts, m), out_at, slots = out.shape, out.data_ptr(), workspace.data_ptr()
    if not m:
        return
    splits, rows_per_split = row_splits(at.num_rows)
    if splits:
        weights, (pairs_at, tokens_at, _) = 0 if scores is None else scores.data_ptr(), at.pair_to_token
        inputs = (values.data_ptr(), pairs_at, at.expert_token_offsets, tokens_at, weights)
        words: tuple[int, ...] = (*inputs, slots, num_experts, m, rows_per_split, int(gather))
        _run("expert_row_sum", "expert_row_sum", at.top_k, (-(-m // (32 * CHUNK)), splits), at, words)
    outs = (0, out_at) if f32 else (out_at, 0)
    words = (slots, at.expert_token_offsets, *outs, m, rows_per_split, int(accumulate))
    _run("expert_row_sum", "expert_row_sum_finish", 0, (-(-m // THREADS), num_experts), at, words)


def row_splits(num_rows: int) -> tuple[int, int]:
    """(splits, rows in each) that `expert_row_sum` deals out. By the shape alone, so that sums don't depend on the GPU."""
    rows_per_split = max(LEAST_ROWS, -(-num_rows // MOST_SPLITS))
    return -(-num_rows // rows_per_split), rows_per_split


def row_sum_slots(num_rows: int, num_experts: int) -> int:
    """Lines of `expert_row_sum`'s workspace: one for every (split, expert) that can meet."""
    return row_splits(num_rows)[0] + num_experts


def _some(*entries: str) -> list[Kernel]:
    return [kernel(entry, top_k) for top_k in (0, 1, 8) for entry in entries]


BIAS_SCORE_GRAD = Product(
    "bias_score_grad",
    bias_score_grad,
    SCORE_GRAD,
    kernels=lambda: _some("reduce_scores_grad", "bias_score_grad"),
    parts=lambda sizes, config, variant, build: [kernel("bias_score_grad", sizes.K, build.sources)],
    in_layer=lambda sizes, up, down: [(sizes, None, down)] if down.bias else [],
)
EXPERT_ROW_SUM = Product(
    "expert_row_sum",
    expert_row_sum,
    _ROW_SUM,
    kernels=lambda: _some("expert_row_sum", "expert_row_sum_finish"),
    parts=lambda sizes, config, variant, build: [
        kernel("expert_row_sum", sizes.K, build.sources),
        kernel("expert_row_sum_finish", 0, build.sources),
    ],
    in_layer=lambda sizes, up, down: [(sizes, None, up)] if up.bias or down.bias else [],
)
