"""The products by rows of fp8 (e4m3) operands (cuda/fp8.cuh), launched: the up projection forward, the down projection forward
and the gradient of the rows (linear.cu), and the down projection's backward. Sums are fp32. What quantizes operands: quantize.py.

Widths: d a multiple of 16, n one of 128.
"""

from functools import lru_cache
from typing import Any

from blazeproto.activations import activation_named
from blazeproto.dispatch.structures import Addresses
from blazeproto.gemm import product, reduce
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Box, Params, Plan, dense_box, persistent_grid
from blazeproto.gemm.product import PACKAGE, PLAIN, SHAPES, Build, Variant, tiled_kernel
from blazeproto.gemm.quantize import BLOCK, Quantized, blocks, most_blocks
from blazeproto.gemm.rows import FP8_ROWS_PARAMS, h_box, rows_plan, words
from blazeproto.gemm.tiles import BF16, BK, BM, SLAB, TileConfig
from blazeproto.runtime import driver

PAIR = 2  # elements that are moved as if they were one bf16
TILES = TileConfig(deferred=False)
UP, DOWN_BACKWARD = "up_forward_fp8", "down_backward_fp8"
GATHERING = {UP: "up_fp8.cu", DOWN_BACKWARD: "down_backward_fp8.cu"}
"""Kernels that take tokens and quantize the rows that they make; others take rows that are quantized, in expert order."""


def _kernel(file: str, entry: str, build: Build, *, gather: bool, **macros: int | str) -> Kernel:
    options = {"B_MN": 0, "HAS_BIAS": 0, "FP8": 1, "BLOCK_SCALES": not gather, "PAIRED_ROWS": gather}
    return tiled_kernel(file, entry, TILES, build, tails=gather, widths=(256,), GATHER=gather, **options, **macros)


def gathering_kernel(entry: str, activation: str, build: Build = PACKAGE) -> Kernel:
    """entry: one of `GATHERING`."""
    return _kernel(GATHERING[entry], entry, build, gather=True, **activation_named(activation).macros)


def linear_kernel(build: Build = PACKAGE) -> Kernel:
    return _kernel("linear.cu", "linear", build, gather=False, FUSED_COMBINE=0)


@lru_cache(maxsize=SHAPES)
def _gathering_plan(
    entry: str, where: tuple[int, int, int], shape: tuple[int, int, int], activation: str, build: Build
) -> Plan:
    halves = 2 if entry == UP else 1  # of the weights, gate and up
    n = shape[1] // halves
    return rows_plan(
        gathering_kernel(entry, activation, build),
        TILES,
        where,
        (*shape[:2], shape[2] // PAIR),
        Variant(gather=True),
        mn_major=False,
        columns=n,
        halves=halves,
        h=None if entry == UP else h_box(n // PAIR, 2, where[0], (SLAB, BM, 2), BF16),
        out0=h_box(n // PAIR, 2, where[0], (SLAB, SLAB, 1), BF16),
        out1=dense_box((n // PAIR, where[0]), (SLAB, SLAB)),
        params=FP8_ROWS_PARAMS,
        paired=True,
    )


def _launch_gathering(
    entry: str,
    tokens: Quantized,
    weights: Quantized,
    at: Addresses,
    activation: str,
    h: Quantized | None,
    out: tuple[Quantized, Quantized],
    **sums: int,
) -> None:
    """h: what is read beside.  out: like H, and like act.  sums: addresses of scores and partial sums."""
    if at.num_rows:
        plan = _gathering_plan(entry, at.where, tuple(weights.values.shape), activation, product.build_of(entry))
        out0, out1 = (made.values.data_ptr() for made in out)
        addresses = words(at, config=TILES, source=tokens.values.data_ptr(), out0=out0, out1=out1, **sums)
        maps = (weights.values.data_ptr(), *(() if h is None else (h.values.data_ptr(),)), out0, out1)
        driver.launch(*plan.fill(maps, addresses + _scales(tokens, weights, h, *out)), at.stream)


def launch_up(
    x: Quantized, up_proj: Quantized, at: Addresses, *, activation: str, h: Quantized, act: Quantized
) -> None:
    """H = x[token] W_up^T, act = f(gate) g(up), both rounded to bf16 and quantized. MoEBlaze Algorithm 1, lines 3-9.

    x (T, d) by token, up_proj (E, 2n, d) by block -> h (R, 2n), act (R, n), scales (2n / 128, R) and (n / 128, R).
    """
    _launch_gathering(UP, x, up_proj, at, activation, None, (h, act))


@lru_cache(maxsize=SHAPES)
def _linear_plan(where: tuple[int, int, int], shape: tuple[int, int, int], columns: int, build: Build) -> Plan:
    out0, made = dense_box((columns, where[0]), (SLAB, SLAB)), linear_kernel(build)
    how: dict[str, Any] = {"mn_major": False, "params": FP8_ROWS_PARAMS}
    return rows_plan(made, TILES, where, (*shape[:2], shape[2] // PAIR), PLAIN, columns=columns, out0=out0, **how)


def launch_linear(a: Quantized, weights: Quantized, at: Addresses, *, columns: range, out: Any) -> None:
    """out = a W^T, of these columns. MoEBlaze Algorithm 1, lines 10 and 30.

    a (R, k), scales (k / 128, R), weights (E, m, k) by block -> out (R, len(columns)) bf16. columns: begin at a block.
    """
    if at.num_rows:
        shape = tuple(weights.values.shape)
        made = _linear_plan(at.where, shape, len(columns), product.build_of("linear_fp8"))
        maps = (a.values.data_ptr(), weights.values.data_ptr() + shape[2] * columns.start, out.data_ptr())
        first = columns.start // BLOCK * blocks(shape[2])  # of the weights' scales
        addresses = words(at, config=TILES, out0=out.data_ptr()) + _scales(a, weights, None, None, None, first=first)
        driver.launch(*made.fill(maps, addresses), at.stream)


def launch_down_backward(
    d_out: Quantized,
    down_proj: Quantized,
    h: Quantized,
    scores: Any,
    at: Addresses,
    *,
    activation: str,
    dh: Quantized,
    a_scaled: Quantized,
    d_scores: Any,
    workspace: Any,
) -> None:
    """dA' = dO_t W_down; dS = <dA', act>; dH and A' = S act, both rounded to bf16 and quantized. Algorithm 1, lines 20-28.

    d_out (T, d) by token, down_proj (E, n, d), the transpose, by block, h (R, 2n), scales (2n / 128, R), scores (P,) fp32 -> dh
    like h, whose values may be h's, a_scaled (R, n), scales (n / 128, R), d_scores (P,). workspace: as `down_backward_act`.
    """
    sums = {"scores": scores.data_ptr(), "sums": workspace.data_ptr()}
    _launch_gathering(DOWN_BACKWARD, d_out, down_proj, at, activation, h, (dh, a_scaled), **sums)
    reduce.launch_reduce_scores_grad(workspace, d_scores, at)


# --- Weight gradients ------------------------------------------------------------------------------------------------------

WEIGHT_PARAMS = Params(
    "WeightParams",
    "weight_fp8.cu",
    maps=("left", "right", "out"),
    words=("offsets", "out_f32", "a_scales", "b_scales"),
    numbers=("experts", "gathered_width", "ordered_width", "accumulate", "rows", "blocks"),
)


def weight_kernel(f32: bool = False, build: Build = PACKAGE) -> Kernel:
    options = {"GATHER": 0, "FP8": 1, "BLOCK_SCALES": 1, "TRANSPOSED": 0, "OUT_F32": f32}
    return tiled_kernel("weight_fp8.cu", "weight_gradient_fp8", TILES, build, widths=(256,), **options)


@lru_cache(maxsize=SHAPES)
def _weight_plan(
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    part: tuple[int, int],
    f32: bool,
    accumulate: bool,
    build: Build,
) -> Plan:
    """shape: of the gradient.  part: rows and columns of it that are made."""
    (num_rows, experts, device), (_, outer, inner), (rows, columns) = where, shape, part
    made = most_blocks(num_rows, experts)
    turned = [
        dense_box((made * BLOCK // PAIR, width), (BK, tile)) if made else None
        for width, tile in ((rows, BM), (columns, 256))
    ]
    strides = (BF16.bytes * inner, BF16.bytes * inner * outer)
    out = None if f32 else Box((columns, rows, experts), strides, (SLAB, SLAB, 1))
    return Plan(
        weight_kernel(f32, build),
        WEIGHT_PARAMS,
        (*turned, out),
        (experts, rows, columns, int(accumulate), 1, made),
        grid=persistent_grid(device, 1, experts * -(-rows // BM) * -(-columns // TILES.tile_n)),
        device=device,
    )


def launch_weight(
    left: Quantized,
    right: Quantized,
    at: Addresses,
    blocks_before: Any,
    *,
    dw: Any,
    first: tuple[int, int] = (0, 0),
    f32: bool = False,
    accumulate: bool = False,
) -> None:
    """dw[e], from row and column ``first`` on, = left right^T over an expert's blocks of rows; operands of `launch_transpose`.

    left (rows, 128 B), right (columns, 128 B) -> dw (E, m, k) bf16, or fp32 with ``f32``, then all of it; zeros without rows.
    """
    part = (left.values.shape[0], right.values.shape[0])
    plan = _weight_plan(at.where, tuple(dw.shape), part, f32, accumulate, product.build_of("weight_fp8"))
    to = dw.data_ptr() + BF16.bytes * (first[0] * dw.shape[2] + first[1])
    maps = ((left.values.data_ptr(), right.values.data_ptr()) if at.num_rows else ()) + (() if f32 else (to,))
    addresses = (blocks_before.data_ptr(), dw.data_ptr() if f32 else 0)
    driver.launch(*plan.fill(maps, addresses + _scales(left, right)), at.stream)


def kernels(activation: str = "swiglu") -> list[Kernel]:
    """All that a layer launches."""
    gathering = (gathering_kernel(entry, activation) for entry in GATHERING)
    return [*gathering, linear_kernel(), *map(weight_kernel, (False, True))]


def _scales(a: Quantized, b: Quantized, *others: Quantized | None, first: int = 0) -> tuple[int, ...]:
    """Addresses, as the struct ends. first: of b's."""
    return (
        a.scales.data_ptr(),
        b.scales.data_ptr() + 4 * first,
        *(0 if other is None else other.scales.data_ptr() for other in others),
    )
