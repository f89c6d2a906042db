"""The memory-bound kernels beside the products: `combine`, and the sums behind the gradients of scores and biases.

Arrays are bf16 (scores and their gradients fp32) and contiguous, widths multiples of 8; anything `blazeproto.arrays.view` takes.
``rows`` is a `blazeproto.gemm.Rows`. Outputs are allocated where none is handed in; the stream is the caller's current one unless
given. Twins: `blazeproto.gemm.reference`. Every parameter of the kernels has 64 bits. Each public function checks, then hands
over to the ``_unchecked`` one, which `blazeproto.gemm.unchecked` is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from blazeproto.arrays import DeviceArray, columns_within, expect, output, view
from blazeproto.driver import launch_words
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.config import DEFAULTS
from blazeproto.gemm.rows import RowAddresses, on_current_gpu

CHUNK = 8  # bf16 columns in the 16 bytes that a thread moves at once
LANES, VECTORS = (256, 128, 64, 32, 16, 8, 4), (4, 3, 2, 1)  # what combine.cu is compiled for
COMBINE_THREADS = 128  # of a block, or a token's lanes if they are more
# 16-byte loads that a thread of `combine` may have under way, at four registers each; half as many where it loops.
LOADS_IN_FLIGHT = 32
SLICE_BYTES = 256 * 2**20  # rows to be combined are cut into slices of that much or more,
LEAST_SLICE = 768  # and of so many columns or more in the mean: for each the product before reads its rows again
REDUCE_THREADS = 256
MAX_SHARES = 512  # of rows that `expert_row_sum` deals out


def _columns(name: str, width: int) -> int:
    if width % CHUNK:
        raise ValueError(f"{name}: expected a width that is a multiple of {CHUNK}, got {width}")
    return width


def _pair_scores(name: str, scores: Any, num_pairs: int) -> DeviceArray:
    checked = expect(name, scores, "float32")
    if checked.size != num_pairs:
        raise ValueError(f"{name}: expected {num_pairs} elements, one a pair, got shape {checked.shape}")
    return checked


# --- combine ---------------------------------------------------------------------------------------------------------


@cache
def combine_layout(d: int, top_k: int) -> tuple[int, int]:
    """(LANES, VECTORS): how many threads share a token, and the 16-byte chunks each takes. d: columns; top_k: 0 if it varies.

    Those that cover the row with the least waste, in one pass if they can; among these, the most loads under way.
    """
    chunks = d // CHUNK
    together = top_k if 0 < top_k <= 16 else 8  # combine.cu: GROUP

    def paid(layout: tuple[int, int]) -> int:
        return -(-chunks // (layout[0] * layout[1])) * layout[0] * layout[1]

    most = LOADS_IN_FLIGHT if together == top_k else LOADS_IN_FLIGHT // 2
    layouts = [(lanes, v) for v in VECTORS for lanes in LANES if v == 1 or v * together <= most]
    covering = [layout for layout in layouts if layout[0] * layout[1] >= chunks]
    return min(covering or layouts, key=paid)


@lru_cache(maxsize=1024)
def column_slices(num_rows: int, d: int, gradient_bytes: int) -> tuple[range, ...]:
    """The columns of Y or dX̃, (R, d), that are made and combined at a time, one slice after the other in the same place.

    gradient_bytes: about what the up projection's weight gradient takes. A backward allocates it where dX̃ has been, so that
    much smaller slices would not lower the peak.
    """
    return _in_slices(d, max(1, min(2 * num_rows * d // max(gradient_bytes, SLICE_BYTES), d // LEAST_SLICE)))


def _in_slices(d: int, count: int) -> tuple[range, ...]:
    """d columns in ``count`` slices of whole tiles, as even as that allows."""
    tile = DEFAULTS["down_forward"].tile_n
    tiles = -(-d // tile)
    bounds = [min(d, -(-i * tiles // count) * tile) for i in range(count + 1)]
    return tuple(range(*ends) for ends in pairwise(bounds))


def slice_widths(d: int) -> list[int]:
    """Of all slices that `column_slices` may cut."""
    counts = range(1, max(1, d // LEAST_SLICE) + 1)
    return sorted({len(columns) for count in counts for columns in _in_slices(d, count)})


def combine_kernel(d: int, top_k: int, has_scores: bool) -> Kernel:
    return _combine_kernel(*combine_layout(d, top_k), top_k, has_scores)


@cache
def _combine_kernel(lanes: int, vectors: int, top_k: int, has_scores: bool) -> Kernel:
    sizes = {"LANES": lanes, "VECTORS": vectors, "THREADS": max(lanes, COMBINE_THREADS)}
    return Kernel("combine.cu", "combine", {"TOP_K": top_k, "HAS_SCORES": int(has_scores), **sizes})


@lru_cache(maxsize=1024)
def _combine_plan(num_tokens: int, d: int, top_k: int, has_scores: bool) -> tuple[Kernel, tuple[int, int], int]:
    """The kernel, its grid and its threads."""
    lanes, vectors = combine_layout(d, top_k)
    threads = max(lanes, COMBINE_THREADS)
    grid = (-(-num_tokens * lanes // threads), -(-d // (CHUNK * lanes * vectors)))
    return combine_kernel(d, top_k, has_scores), grid, threads


def combine(
    y: Any,
    rows: Any,
    *,
    scores: Any = None,
    columns: range | None = None,
    out: Any = None,
    stream: int | None = None,
) -> Any:
    """y (R, d), scores (P,) → out (T, d) = Σ over a token's pairs of scores[p] · y[row of p], in slot order.

    Makes the output from Y with scores, dX from dX̃ without: a plain sum. Floor: (R + T)·d·2 bytes at the memory's speed.

    columns: those of a wider ``out`` that y (R, len(columns)) is summed to; the others are left alone.
    """
    rows = rows.views()
    y = expect("y", y, "bfloat16", (rows.num_rows, None))
    num_tokens, d = rows.num_tokens, _columns("y", y.shape[1])
    if columns is None:
        out, out_view = output("out", out, "bfloat16", (num_tokens, d))
    else:
        out_view = expect("out", out, "bfloat16", (num_tokens, None))
        if len(columns_within(columns, _columns("out", out_view.shape[1]))) != d:
            raise ValueError(f"columns: expected as many as y has, {d}, got {columns}")
    weights = None if scores is None else _pair_scores("scores", scores, rows.token_index_map.size)
    if num_tokens == 0 or d == 0:
        return out
    where = on_current_gpu(rows, stream, y=y, scores=weights, out=out_view)
    combine_unchecked(y, where, scores=weights, columns=columns, out=out_view)
    return out


def combine_unchecked(
    y: Any, rows: RowAddresses, *, scores: Any = None, columns: range | None = None, out: Any
) -> None:
    """columns: those of ``out`` that y is summed to, default all."""
    num_tokens, width = out.shape
    if num_tokens == 0:
        return
    first, count = (0, width) if columns is None else (columns.start, len(columns))
    kernel, grid, threads = _combine_plan(num_tokens, count, rows.top_k, scores is not None)
    inputs = (y.data_ptr(), 0 if scores is None else scores.data_ptr(), rows.token_index_map, rows.token_offsets)
    words = (*inputs, out.data_ptr() + 2 * first, num_tokens, count, width)
    launch_words(kernel.handle(rows.device), grid, threads, 0, rows.stream, words)


# --- reduce.cu -------------------------------------------------------------------------------------------------------


@cache
def reduce_kernel(entry: str, top_k: int) -> Kernel:
    return Kernel("reduce.cu", entry, {"TOP_K": top_k, "THREADS": REDUCE_THREADS})


def reduce_scores_grad_unchecked(partial: Any, d_scores: Any, rows: RowAddresses) -> None:
    """partial (J, R) fp32 → d_scores (P,) = Σ_j partial[j, row of p], in order; 0 for a pair without a row."""
    if rows.num_pairs:
        words = (partial.data_ptr(), rows.token_index_map, d_scores.data_ptr(), *partial.shape, rows.num_pairs)
        kernel, grid = reduce_kernel("reduce_scores_grad", 0), (-(-rows.num_pairs // REDUCE_THREADS), 1)
        launch_words(kernel.handle(rows.device), grid, REDUCE_THREADS, 0, rows.stream, words)


def bias_score_grad(d_out: Any, down_bias: Any, rows: Any, *, d_scores: Any, stream: int | None = None) -> Any:
    """Adds a down bias's share to d_scores (P,), in place: ⟨d_out[token], down_bias[expert]⟩. d_out (T, d), down_bias (E, d)."""
    rows = rows.views()
    num_tokens, num_experts = rows.num_tokens, rows.num_experts
    d_out = expect("d_out", d_out, "bfloat16", (num_tokens, None))
    d = _columns("d_out", d_out.shape[1])
    bias = expect("down_bias", down_bias, "bfloat16", (num_experts, d))
    d_scores_view = _pair_scores("d_scores", d_scores, rows.token_index_map.size)
    where = on_current_gpu(rows, stream, d_out=d_out, down_bias=bias, d_scores=d_scores_view)
    bias_score_grad_unchecked(d_out, bias, where, d_scores=d_scores_view)
    return d_scores


def bias_score_grad_unchecked(d_out: Any, down_bias: Any, rows: RowAddresses, *, d_scores: Any) -> None:
    num_tokens, d = d_out.shape
    if num_tokens and rows.num_experts:
        indices = (rows.token_index_map, rows.offsets, rows.token_offsets)
        words = (d_out.data_ptr(), down_bias.data_ptr(), *indices, d_scores.data_ptr(), num_tokens, rows.num_experts, d)
        kernel, grid = reduce_kernel("bias_score_grad", rows.top_k), (-(-num_tokens // (REDUCE_THREADS // 32)), 1)
        launch_words(kernel.handle(rows.device), grid, REDUCE_THREADS, 0, rows.stream, words)


def row_shares(num_rows: int) -> tuple[int, int]:
    """(shares, rows in each) that `expert_row_sum` deals out. By the shape alone, so that sums don't depend on the GPU."""
    rows_per_share = max(64, -(-num_rows // MAX_SHARES))
    return -(-num_rows // rows_per_share), rows_per_share


def expert_row_sum(
    values: Any,
    rows: Any,
    *,
    gather: bool = False,
    scores: Any = None,
    out: Any = None,
    accumulate: bool = False,
    workspace: Any = None,
    stream: int | None = None,
) -> Any:
    """A bias's gradient: out (E, m), bf16 or fp32 = Σ over an expert's rows r of values[r], values (R, m).

    gather: of values[token of r], values (T, m).  scores (P,): weighted by scores[pair of r].  accumulate: added to ``out``.
    workspace: fp32, (`row_sum_slots(R, E)`, m).
    """
    rows = rows.views()
    values = expect("values", values, "bfloat16", (rows.num_tokens if gather else rows.num_rows, None))
    num_experts, m = rows.num_experts, _columns("values", values.shape[1])
    if out is None and accumulate:
        raise ValueError("out: expected an array to accumulate into, got None")
    f32 = out is not None and view(out, "out").dtype == "float32"
    out, out_view = output("out", out, "float32" if f32 else "bfloat16", (num_experts, m))
    weights = None if scores is None else _pair_scores("scores", scores, rows.token_index_map.size)
    workspace, slots = output("workspace", workspace, "float32", (row_sum_slots(rows.num_rows, num_experts), m))
    if num_experts == 0 or m == 0:
        return out
    where = on_current_gpu(rows, stream, values=values, scores=weights, out=out_view, workspace=slots)
    options: dict[str, Any] = {"out": out_view, "f32": f32, "accumulate": accumulate, "workspace": slots}
    expert_row_sum_unchecked(values, where, gather=gather, scores=weights, **options)
    return out


def expert_row_sum_unchecked(
    values: Any,
    rows: RowAddresses,
    *,
    gather: bool = False,
    scores: Any = None,
    out: Any,
    f32: bool,
    accumulate: bool = False,
    workspace: Any,
) -> None:
    """f32: whether ``out`` is."""
    (num_experts, m), out_at, slots = out.shape, out.data_ptr(), workspace.data_ptr()
    shares, rows_per_share = row_shares(rows.num_rows)
    if shares:
        weights = 0 if scores is None else scores.data_ptr()
        inputs = (values.data_ptr(), rows.pair_indices, rows.offsets, rows.pair_tokens, weights)
        words = (*inputs, slots, num_experts, m, rows_per_share, int(gather))
        kernel, grid = reduce_kernel("expert_row_sum", rows.top_k), (-(-m // (32 * CHUNK)), shares)
        launch_words(kernel.handle(rows.device), grid, REDUCE_THREADS, 0, rows.stream, words)
    outs = (0, out_at) if f32 else (out_at, 0)
    words = (slots, rows.offsets, *outs, m, rows_per_share, int(accumulate))
    kernel, grid = reduce_kernel("expert_row_sum_finish", 0), (-(-m // REDUCE_THREADS), num_experts)
    launch_words(kernel.handle(rows.device), grid, REDUCE_THREADS, 0, rows.stream, words)


def row_sum_slots(num_rows: int, num_experts: int) -> int:
    """Lines of `expert_row_sum`'s workspace: one for every (share, expert) that can meet."""
    return row_shares(num_rows)[0] + num_experts


def all_kernels() -> Iterator[Kernel]:
    """Every kernel that the layers of the tests and benchmarks reach, and the corners beyond; not yet compiled."""
    for top_k in (0, 1, 2, 3, 4, 5, 8, 10, 16, 22):
        for d in (64, 256, 768, 2880, 4096):
            yield from (combine_kernel(d, top_k, has_scores) for has_scores in (False, True))
    for top_k in (0, 1, 8):
        for entry in ("reduce_scores_grad", "bias_score_grad", "expert_row_sum", "expert_row_sum_finish"):
            yield reduce_kernel(entry, top_k)
