"""Launching the memory-bound kernels of combine.cu and reduce.cu on views and a raw stream. No checks: products.py makes them.

``rows`` is a `Rows` of views (`blazeproto.arrays.DeviceArray`), ``stream`` a cudaStream_t as an int. Every integer parameter of
these kernels is 64 bits wide, so a Python int is passed as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from blazeproto.arrays import DeviceArray
from blazeproto.gemm.compile import Kernel

CHUNK = 8  # bf16 columns in the 16 bytes that a thread moves at once
COMBINE_THREADS = 128
LOADS_IN_FLIGHT = 8  # 16-byte loads that a thread of `combine` should have under way
WASTE = 1.125  # lanes kept per lane needed, at most, where the shape allows it
REDUCE_THREADS = 256
MAX_SHARES = 512  # of rows that `expert_row_sum` deals out
REGISTERS_PER_SM, THREADS_PER_SM = 65536, 2048


class _Stream:
    """A raw stream in the form CuPy's launch takes."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def _pointer(array: DeviceArray | None) -> int:
    return 0 if array is None else array.ptr


def _num_tokens(rows: Any) -> int:
    return rows.token_index_map.size // rows.top_k if rows.top_k else rows.token_offsets.size - 1


@cache
def _num_sms(device: int) -> int:
    from cupy.cuda import runtime

    return runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)


# --- combine ---------------------------------------------------------------------------------------------------------


@cache
def combine_layout(d: int, top_k: int) -> tuple[int, int]:
    """(LANES, VECTORS): how many threads share a token, and the 16-byte chunks each takes. d: columns; top_k: 0 if it varies.

    Few experts per token leave few loads under way, so a thread takes more chunks. Then the widest group of threads whose last
    pass over the row is not mostly idle: wide groups touch long pieces of a row at a time.
    """
    chunks = d // CHUNK
    vectors = {1: 4, 2: 4, 3: 2, 4: 2}.get(top_k, 1)
    while vectors > 1 and vectors * 4 > chunks:
        vectors //= 2

    def lanes_paid(lanes: int) -> int:
        return -(-chunks // (lanes * vectors)) * lanes * vectors

    choices = (128, 64, 32, 16, 8, 4)
    thrifty = [lanes for lanes in choices if lanes_paid(lanes) <= WASTE * chunks]
    return (thrifty[0] if thrifty else min(choices, key=lanes_paid)), vectors


@cache
def combine_kernel(d: int, top_k: int, has_scores: bool) -> Kernel:
    lanes, vectors = combine_layout(d, top_k)
    sizes = {"LANES": lanes, "VECTORS": vectors, "THREADS": COMBINE_THREADS}
    return Kernel("combine.cu", "combine", {"TOP_K": top_k, "HAS_SCORES": int(has_scores), **sizes})


@cache
def _combine_blocks(kernel: Kernel, device: int) -> int:
    """How many blocks the device holds at once: the kernel walks the tokens with that many."""
    registers = -(-kernel.registers // 8) * 8 * COMBINE_THREADS
    return _num_sms(device) * min(REGISTERS_PER_SM // registers, THREADS_PER_SM // COMBINE_THREADS)


def combine(y: DeviceArray, rows: Any, scores: DeviceArray | None, out: DeviceArray, stream: int) -> None:
    """out (T, d) = Σ over a token's pairs of scores[p] · y[row of p], in slot order. Floor: (R + T)·d·2 B at the memory's speed."""
    num_tokens, d = out.shape
    if num_tokens == 0:
        return
    top_k = rows.top_k or 0
    kernel = combine_kernel(d, top_k, scores is not None)
    lanes, vectors = combine_layout(d, top_k)
    columns = -(-d // (CHUNK * lanes * vectors))
    enough = -(-num_tokens * lanes // COMBINE_THREADS)
    grid = (min(enough, max(1, _combine_blocks(kernel, out.device) // columns)), columns)
    token_offsets = 0 if top_k else rows.token_offsets.ptr
    args = (y.ptr, _pointer(scores), rows.token_index_map.ptr, token_offsets, out.ptr, num_tokens, d)
    kernel.function()(grid, (COMBINE_THREADS,), args, 0, _Stream(stream))


# --- reduce.cu -------------------------------------------------------------------------------------------------------


@cache
def reduce_kernel(entry: str, top_k: int) -> Kernel:
    return Kernel("reduce.cu", entry, {"TOP_K": top_k, "THREADS": REDUCE_THREADS})


def _reduce(entry: str, rows: Any, grid: tuple[int, ...], args: tuple[int, ...], stream: int) -> None:
    reduce_kernel(entry, rows.top_k or 0).function()(grid, (REDUCE_THREADS,), args, 0, _Stream(stream))


def reduce_scores_grad(partial: DeviceArray, rows: Any, d_scores: DeviceArray, stream: int) -> None:
    """d_scores (P,) = Σ_j partial[j, row of p], 0 for a pair without a row. partial (J, R) fp32."""
    num_rows, num_pairs = rows.pair_indices.size, rows.token_index_map.size
    if num_pairs == 0:
        return
    lines = partial.size // num_rows if num_rows else 0
    args = (partial.ptr, rows.token_index_map.ptr, d_scores.ptr, lines, num_rows, num_pairs)
    _reduce("reduce_scores_grad", rows, (-(-num_pairs // REDUCE_THREADS),), args, stream)


def bias_score_grad(d_out: DeviceArray, bias: DeviceArray, rows: Any, d_scores: DeviceArray, stream: int) -> None:
    """d_scores[p] += ⟨d_out[token of p], bias[expert of p]⟩. d_out (T, d), bias (E, d) bf16."""
    num_tokens, d = d_out.shape
    if num_tokens == 0:
        return
    token_offsets = 0 if rows.top_k else rows.token_offsets.ptr
    indices = (rows.token_index_map.ptr, rows.offsets.ptr, token_offsets)
    args = (d_out.ptr, bias.ptr, *indices, d_scores.ptr, num_tokens, rows.offsets.size - 1, d)
    _reduce("bias_score_grad", rows, (-(-num_tokens // (REDUCE_THREADS // 32)),), args, stream)


def row_shares(num_rows: int) -> tuple[int, int]:
    """(shares, rows in each) that `expert_row_sum` deals the rows into. By the shape alone, so that sums don't depend on the GPU."""
    rows_per_share = max(64, -(-num_rows // MAX_SHARES))
    return -(-num_rows // rows_per_share), rows_per_share


def row_sum_slots(num_rows: int, num_experts: int) -> int:
    """Lines of the fp32 workspace (slots, m) that `expert_row_sum` needs."""
    return row_shares(num_rows)[0] + num_experts


def expert_row_sum(
    values: DeviceArray,
    rows: Any,
    out: DeviceArray,
    slots: DeviceArray,
    stream: int,
    *,
    gather: bool = False,
    scores: DeviceArray | None = None,
    accumulate: bool = False,
) -> None:
    """out (E, m) bf16 or fp32 = Σ over an expert's rows r of values[r]; ``gather``: of scores[pair of r] · values[token of r].

    slots: fp32 workspace, (`row_sum_slots`, m).
    """
    num_experts, m = out.shape
    shares, rows_per_share = row_shares(rows.pair_indices.size)
    if shares:
        indices = (rows.pair_indices.ptr, rows.offsets.ptr, _pointer(rows.pair_tokens), _pointer(scores))
        args = (values.ptr, *indices, slots.ptr, num_experts, m, rows_per_share, int(gather))
        _reduce("expert_row_sum", rows, (-(-m // (32 * CHUNK)), shares), args, stream)
    outs = (0, out.ptr) if out.dtype == "float32" else (out.ptr, 0)
    args = (slots.ptr, rows.offsets.ptr, *outs, m, rows_per_share, int(accumulate))
    _reduce("expert_row_sum_finish", rows, (-(-m // REDUCE_THREADS), num_experts), args, stream)


def all_kernels() -> Iterator[Kernel]:
    """Every kernel that the layers of the tests and benchmarks reach, and the corners beyond; not yet compiled."""
    for top_k in (0, 1, 2, 3, 4, 5, 8, 10, 16, 22):
        for d in (64, 256, 768, 2880, 4096):
            yield from (combine_kernel(d, top_k, has_scores) for has_scores in (False, True))
    for top_k in (0, 1, 8):
        for entry in ("reduce_scores_grad", "bias_score_grad", "expert_row_sum", "expert_row_sum_finish"):
            yield reduce_kernel(entry, top_k)
