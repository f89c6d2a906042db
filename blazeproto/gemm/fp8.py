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
from blazeproto.gemm.quantize import BLOCK, Quantized, most_blocks
from blazeproto.gemm.rows import FP8_ROWS_PARAMS, h_box, rows_plan, words
from blazeproto.gemm.tiles import BF16, BK, BM, SLAB, TileConfig
from blazeproto.runtime import driver

PAIR = 2  # elements that are moved as if they were one bf16
TILES = TileConfig(deferred=False)


def _kernel(
    file: str, entry: str, config: TileConfig | None, build: Build, *, gather: bool, **macros: int | str
) -> Kernel:
    """gather: of tokens, to rows that are quantized; else of quantized rows, which lie in expert order."""
    options = {"B_MN": 0, "HAS_BIAS": 0, "FP8": 1, "BLOCK_SCALES": not gather, "PAIRED_ROWS": gather}
    return tiled_kernel(
        file, entry, config or TILES, build, tails=gather, widths=(256,), GATHER=gather, **options, **macros
    )


def up_kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    """variant: activation."""
    return _kernel(
        "up_fp8.cu", "up_forward_fp8", config, build, gather=True, **activation_named(variant.activation).macros
    )


def linear_kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    return _kernel("linear.cu", "linear", config, build, gather=False, FUSED_COMBINE=0)


def down_backward_kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    """variant: activation."""
    return _kernel(
        "down_backward_fp8.cu",
        "down_backward_fp8",
        config,
        build,
        gather=True,
        **activation_named(variant.activation).macros,
    )


def _pairs(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """The shape of weights (E, m, k), as they are moved."""
    return (shape[0], shape[1], shape[2] // PAIR)


@lru_cache(maxsize=SHAPES)
def _up_plan(where: tuple[int, int, int], shape: tuple[int, int, int], activation: str, build: Build) -> Plan:
    n = shape[1] // 2
    return rows_plan(
        up_kernel(None, Variant(activation=activation), build),
        TILES,
        where,
        _pairs(shape),
        Variant(gather=True),
        mn_major=False,
        columns=n,
        halves=2,
        out0=h_box(n // PAIR, 2, where[0], (SLAB, SLAB, 1), BF16),
        out1=dense_box((n // PAIR, where[0]), (SLAB, SLAB)),
        params=FP8_ROWS_PARAMS,
        paired=True,
    )


def launch_up(
    x: Quantized, up_proj: Quantized, at: Addresses, *, activation: str, h: Quantized, act: Quantized
) -> None:
    """H = x[token] W_up^T, act = f(gate) g(up), both rounded to bf16 and quantized. MoEBlaze Algorithm 1, lines 3-9.

    x (T, d) by token, up_proj (E, 2n, d) by block -> h (R, 2n), act (R, n), scales (2n / 128, R) and (n / 128, R).
    """
    if not at.num_rows:
        return
    plan = _up_plan(at.where, tuple(up_proj.values.shape), activation, product.build_of("up_forward_fp8"))
    h_at, act_at = h.values.data_ptr(), act.values.data_ptr()
    addresses = words(at, config=TILES, source=x.values.data_ptr(), out0=h_at, out1=act_at)
    scales = _scales(x, up_proj, None, h, act)
    driver.launch(*plan.fill((up_proj.values.data_ptr(), h_at, act_at), addresses + scales), at.stream)


@lru_cache(maxsize=SHAPES)
def _linear_plan(where: tuple[int, int, int], shape: tuple[int, int, int], columns: int, build: Build) -> Plan:
    out, made = dense_box((columns, where[0]), (SLAB, SLAB)), linear_kernel(None, PLAIN, build)
    params = FP8_ROWS_PARAMS
    return rows_plan(made, TILES, where, _pairs(shape), PLAIN, mn_major=False, columns=columns, out0=out, params=params)


def launch_linear(a: Quantized, weights: Quantized, at: Addresses, *, columns: range, out: Any) -> None:
    """out = a W^T, of these columns. MoEBlaze Algorithm 1, lines 10 and 30.

    a (R, k), scales (k / 128, R), weights (E, m, k) by block -> out (R, len(columns)) bf16. columns: begin at a block.
    """
    if not at.num_rows:
        return
    shape = tuple(weights.values.shape)
    k = shape[2]
    made = _linear_plan(at.where, shape, len(columns), product.build_of("linear_fp8"))
    maps = (a.values.data_ptr(), weights.values.data_ptr() + k * columns.start, out.data_ptr())
    addresses = words(at, config=TILES, out0=out.data_ptr())
    first = columns.start // BLOCK * -(-k // BLOCK)  # of the weights' scales
    driver.launch(*made.fill(maps, addresses + _scales(a, weights, None, None, None, first=first)), at.stream)


@lru_cache(maxsize=SHAPES)
def _down_backward_plan(
    where: tuple[int, int, int], shape: tuple[int, int, int], activation: str, build: Build
) -> Plan:
    n = shape[1]
    return rows_plan(
        down_backward_kernel(None, Variant(activation=activation), build),
        TILES,
        where,
        _pairs(shape),
        Variant(gather=True),
        mn_major=False,
        columns=n,
        h=h_box(n // PAIR, 2, where[0], (SLAB, BM, 2), BF16),
        out0=h_box(n // PAIR, 2, where[0], (SLAB, SLAB, 1), BF16),
        out1=dense_box((n // PAIR, where[0]), (SLAB, SLAB)),
        params=FP8_ROWS_PARAMS,
        paired=True,
    )


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
    if at.num_rows:
        build = product.build_of("down_backward_act_fp8")
        plan = _down_backward_plan(at.where, tuple(down_proj.values.shape), activation, build)
        dh_at, a_at = dh.values.data_ptr(), a_scaled.values.data_ptr()
        addresses = words(
            at,
            config=TILES,
            source=d_out.values.data_ptr(),
            out0=dh_at,
            out1=a_at,
            scores=scores.data_ptr(),
            sums=workspace.data_ptr(),
        )
        maps = (down_proj.values.data_ptr(), h.values.data_ptr(), dh_at, a_at)
        driver.launch(*plan.fill(maps, addresses + _scales(d_out, down_proj, h, dh, a_scaled)), at.stream)
    reduce.launch_reduce_scores_grad(workspace, d_scores, at)


# --- Weight gradients ------------------------------------------------------------------------------------------------------

WEIGHT_PARAMS = Params(
    "WeightParams",
    "weight_fp8.cu",
    maps=("left", "right", "out"),
    words=("offsets", "out_f32", "a_scales", "b_scales"),
    numbers=("experts", "gathered_width", "ordered_width", "accumulate", "rows", "blocks"),
)


def weight_kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    """variant: f32."""
    options = {"GATHER": 0, "FP8": 1, "BLOCK_SCALES": 1, "TRANSPOSED": 0, "OUT_F32": variant.f32}
    return tiled_kernel("weight_fp8.cu", "weight_gradient_fp8", config or TILES, build, widths=(256,), **options)


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
    tiles = experts * -(-rows // BM) * -(-columns // TILES.tile_n)
    return Plan(
        weight_kernel(None, Variant(f32=f32), build),
        WEIGHT_PARAMS,
        (*turned, out),
        (experts, rows, columns, int(accumulate), 1, made),
        grid=persistent_grid(device, 1, tiles),
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
    scales = (left.scales.data_ptr(), right.scales.data_ptr())
    driver.launch(*plan.fill(maps, (blocks_before.data_ptr(), dw.data_ptr() if f32 else 0, *scales)), at.stream)


def kernels(activation: str = "swiglu") -> list[Kernel]:
    """All that a layer launches."""
    variant = Variant(activation=activation)
    by_rows = (up_kernel(None, variant), linear_kernel(), down_backward_kernel(None, variant))
    return [*by_rows, weight_kernel(), weight_kernel(None, variant._replace(f32=True))]


def _scales(a: Quantized, b: Quantized, *others: Quantized | None, first: int = 0) -> tuple[int, ...]:
    """Addresses, as the struct ends. first: of b's."""
    return (
        a.scales.data_ptr(),
        b.scales.data_ptr() + 4 * first,
        *(0 if other is None else other.scales.data_ptr() for other in others),
    )
