"""Rows times weights with nothing but a bias at the end (cuda/linear.cu): two of the products; fused.py has two more.

down forward          Y = act W_down^T (+ bias)     MoEBlaze Algorithm 1, line 10
up backward, rows     dX~ = dH W_up                 MoEBlaze Algorithm 1, line 30
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product as every
from typing import Any

from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm.arguments import Arguments, Array, LowRankTerm
from blazeproto.gemm.combine import slice_widths
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.e4m3 import BLOCK, Quantized, blocks
from blazeproto.gemm.formulas import Namespace
from blazeproto.gemm.launch import Plan, dense_box, rows_box
from blazeproto.gemm.product import (
    BOTH,
    PACKAGE,
    PLAIN,
    QUANTIZED_VARIANTS,
    SHAPES,
    Build,
    Product,
    Sizes,
    Variant,
    build_of,
    quantized_kernel,
    tiled_kernel,
    variants,
)
from blazeproto.gemm.rows import address, element_of, last_maps, rank_of, rows_plan, scales, shape_of, variant_of, words
from blazeproto.gemm.sending import Sending, all_that_send
from blazeproto.gemm.specification import Specification, by_tile, low_rank
from blazeproto.gemm.stored import Storage, alone
from blazeproto.gemm.tiles import (
    BF16,
    CANDIDATES,
    E4M3,
    FACTOR_ROWS,
    SLAB,
    WIDTHS,
    Element,
    TileConfig,
    table_of,
    tiles_for,
)
from blazeproto.runtime import checks, driver
from blazeproto.runtime.arch import HOPPER, Arch, arch_on
from blazeproto.runtime.arrays import columns_within


def formula(
    m: Namespace,
    a: Any,
    weights: Any,
    *,
    gather: bool = False,
    transposed: bool = False,
    bias: Any = None,
    columns: range | None = None,
    low: tuple[Any, Any] | None = None,
) -> Any:
    """out_r = a_r W[e]^T + b."""
    rows = m.gather(a) if gather else a
    return m.product(rows, weights, transposed=transposed, bias=bias, low=low, columns=columns)


def _settle(given: Arguments, call: Mapping[str, Any], outputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """The output with as many columns as are made. It may lie over the rows where a tile has whole rows of both."""
    (out,) = outputs
    transposed = out is _DX_ROWS or call.get("transposed", False)
    width, reduction = given.sizes[out.shape.split()[1]], given.views[out.over].shape[1]
    checks.require(reduction or "r" not in given.sizes, "a", "at least one column beside low-rank factors", "none")
    columns = columns_within(call["columns"], width, given.multiple)
    if call["quantized"] and (columns.start % BLOCK or (columns.stop % BLOCK and columns.stop != width)):
        raise ValueError(f"columns: expected whole blocks of {BLOCK} with quantized operands, got {columns}")
    arch, in_order = arch_on(given.views[out.over].device), not (call.get("gather") or call["quantized"])
    over = in_order and may_lie_over(call["config"], transposed, (width, reduction), len(columns), arch)
    return (replace(out, shape=f"R {len(columns)}", over=out.over if over else ""),)


GROUPED_MM = Specification(
    inputs=(
        Array("weights", "E width reduction", transposed="E reduction width"),
        Array("a", "R reduction", gather="T reduction", fetched=True),
        Array("bias", "E width", optional=True),
        *low_rank("E width r", transposed="E r width"),
    ),
    outputs=(Array("out", "R width", over="a", tile=by_tile),),
    formula=formula,
    settle=_settle,
)
_DOWN = Specification(
    quantized=True,
    inputs=(Array("down_proj", "E d n"), Array("act", "R n"), Array("bias", "E d", optional=True)),
    outputs=(Array("y", "R d", over="act", tile=by_tile),),
    formula=lambda m, act, down_proj, bias=None, columns=None: formula(m, act, down_proj, bias=bias, columns=columns),
    settle=_settle,
)
_DX_ROWS = Array("dx_rows", "R d", over="dh", tile=by_tile)
_UP = Specification(
    quantized=True,
    inputs=(Array("up_proj", "E h d", quantized="E d h"), Array("dh", "R h")),
    outputs=(_DX_ROWS,),
    formula=lambda m, dh, up_proj, columns=None: formula(m, dh, up_proj, transposed=True, columns=columns),
    settle=_settle,
)


@GROUPED_MM.public
def grouped_mm(
    a: Any,
    weights: Any,
    dispatch: Dispatch,
    *,
    gather: bool = False,
    transposed: bool = False,
    bias: Any = None,
    columns: range | None = None,
    low: tuple[Any, Any] | None = None,
    out: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """out[r] = a[r or its token] . W[e]^T (+ bias): the row products with nothing after them but a store. SonicMoE §2.1:
    varlen-M grouped GEMM.

    a (R, reduction) or (T, reduction), weights (E, columns, reduction) or (E, reduction, columns), bias (E, columns) or None, all
    bf16, and a dispatch of E experts → out (R, columns) bf16.

    gather: a has a row for each token, (T, reduction).  transposed: weights (E, reduction, columns), read as they lie.
    columns: make only these of the columns, e.g. range(0, 1024): out (R, len(columns)). ``out`` may be ``a`` itself where
    a tile has whole rows of both (reduction = columns <= ``config.tile_n``); elsewhere the two must not overlap.
    low: rows (R, r) and factor (E, columns, r), with ``transposed`` (E, r, columns), both bf16: out gets rows factor^T too.

    config: tiles; default: from `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    return _checked_launch(GROUPED_MM, locals(), gather=gather, transposed=transposed)


@_DOWN.public
def down_forward(
    act: Any,
    down_proj: Any,
    dispatch: Dispatch,
    *,
    bias: Any = None,
    columns: range | None = None,
    y: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """y = act W_down^T (+ bias). MoEBlaze Algorithm 1, line 10; SonicMoE Algorithm 2.

    act (R, n), down_proj (E, d, n), bias (E, d) or None, all bf16, and a dispatch of E experts → y (R, d) bf16. Or act and
    down_proj `Quantized`, columns in multiples of 128.

    columns: as `grouped_mm`. y may be act itself where d = n is at most a tile's width (``config.tile_n``).

    config: tiles; default: from `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    return _checked_launch(_DOWN, locals())


@_UP.public
def up_backward_act(
    dh: Any,
    up_proj: Any,
    dispatch: Dispatch,
    *,
    columns: range | None = None,
    dx_rows: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """dx_rows = dh W_up. MoEBlaze Algorithm 1, line 30; SonicMoE Algorithm 5.

    dh (R, G n), up_proj (E, G n, d), both bf16, and a dispatch of E experts → dx_rows (R, d) bf16.

    Both may be `Quantized`, up_proj as its transpose, with d before G n, and columns in multiples of 128.

    columns: as `grouped_mm`. `combine` sums a token's rows to dX.

    config: tiles; default: from `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    return _checked_launch(_UP, locals(), name="up_backward_act", transposed=not isinstance(up_proj, Quantized))


def _checked_launch(spec: Specification, call: Mapping[str, Any], **options: Any) -> Any:
    """`grouped_mm` by another specification; its call and what `launch` takes beside the arrays."""
    given = spec.check(call)
    experts, rows = (array.name for array in spec.inputs[:2])
    (out,) = spec.outputs
    arrays = given.operands()
    a, weights, made = arrays.pop(rows), arrays.pop(experts), arrays.pop(out.name)
    columns = columns_within(call["columns"], given.sizes[out.shape.split()[1]])
    if columns:
        launch(a, weights, given.located(), **arrays, out=made, columns=columns, config=call["config"], **options)
    return spec.results(given)


# --- Kernels ---------------------------------------------------------------------------------------------------------------


def tiles(
    config: TileConfig | None, transposed: bool, columns: int, element: Element = BF16, arch: Arch = HOPPER
) -> TileConfig:
    """``config``, or else the table's for this many columns."""
    return config or tiles_for(name_of(transposed), columns, element, arch)


def may_lie_over(
    config: TileConfig | None,
    transposed: bool,
    widths: tuple[int, ...],
    columns: int,
    arch: Arch,
    stored: Storage | None = None,
) -> bool:
    """Whether this many columns of the output may lie over the rows: a tile of the launch has whole rows of both.
    widths: all columns of the output, and of the rows."""
    return {*widths} == {columns} and columns <= alone(tiles(config, transposed, columns, arch=arch), stored).tile_n


def name_of(transposed: bool) -> str:
    """The product whose tiles they are."""
    return "up_backward_act" if transposed else "down_forward"


def of_dx(up: Variant) -> Variant:
    """The variant of the product that makes dX or its rows.  up: the up projection's."""
    return up._replace(transposed=not up.transposed, bias=False)


def kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    """variant: gather, transposed, bias, fused, scores, rank, element."""
    if variant.element is E4M3:
        return quantized_kernel("linear.cu", "linear", config, build, {"FUSED_COMBINE": 0}, variant, gather=False)
    return tiled_kernel(
        "linear.cu",
        "linear",
        config or table_of(variant.arch)[name_of(variant.transposed)],
        build,
        widths=WIDTHS,
        cluster_widths=(128, 256),
        epilogue_warpgroups=int(variant.gather),  # where all of the producer's warps gather, others must store
        GATHER=variant.gather,
        B_MN=variant.transposed,
        HAS_BIAS=variant.bias,
        FUSED_COMBINE=variant.fused * (1 if variant.scores else 2),
        low_rank=variant.low_rank,
        arch=variant.arch,
        **variant.macros,
    )


@lru_cache(maxsize=SHAPES)
def plan(
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    columns: int,
    variant: Variant,
    config: TileConfig,
    build: Build,
) -> Plan:
    out = None if variant.fused else rows_box(dense_box((columns, where[0]), (SLAB, SLAB)))
    made = kernel(config, variant, build)
    return rows_plan(made, config, where, shape, variant, mn_major=variant.transposed, columns=columns, out0=out)


def launch(
    a: Any,
    weights: Any,
    at: Addresses,
    *,
    gather: bool = False,
    transposed: bool = False,
    bias: Any = None,
    columns: range | None = None,
    low: LowRankTerm | None = None,
    out: Any,
    config: TileConfig | None = None,
    name: str = "",
    sending: Sending | None = None,
) -> None:
    """`grouped_mm` of arrays that have been checked, or of quantized ones. columns: of the output, default all.
    low: added to them.  name: of the product, where its weights do not say which it is.  sending: `PeerMemory.sending` of rows
    that a later product gathers."""
    if not at.num_rows:
        return
    _, outer, inner = shape = shape_of(weights)
    first, count = (0, inner if transposed else outer) if columns is None else (columns.start, len(columns))
    element = element_of(a)
    config = tiles(config, transposed, count, element, at.arch)
    options = {"transposed": transposed, "bias": bias is not None, "sends": sending is not None}
    variant = variant_of(a, weights, low, at, gather=gather, **options)
    config = alone(config, variant.stored)
    made = plan(at.where, shape, count, variant, config, build_of(name or name_of(transposed)))
    a_at, out_at = address(a), out.data_ptr()
    weights_at = address(weights)
    if variant.stored is None:  # else the kernel is told
        weights_at += element.bits // 8 * first * (1 if transposed else inner)
    maps: tuple[int, ...] = (weights_at, out_at) if gather else (a_at, weights_at, out_at)
    maps += last_maps(low, weights, first * (1 if transposed else rank_of(low)))
    addresses = words(at, config=config, source=a_at if gather else 0, out0=out_at, bias=bias, first_column=first)
    addresses += scales(a, weights, None, None, None, first=first if variant.stored else first // BLOCK * blocks(inner))
    addresses += sending.beside(config, outer if transposed else inner) if sending else ()
    driver.launch(*made.fill(maps, addresses), at.stream)


def _in_layer(sizes: Sizes, variant: Variant) -> list[tuple[Sizes, TileConfig, Variant]]:
    """With tiles for every slice of columns (combine.py) that a layer may make."""
    widths, name = slice_widths(sizes.d), name_of(variant.transposed)
    return [
        (sizes, config, variant)
        for config in dict.fromkeys(tiles_for(name, width, variant.element, variant.arch) for width in widths)
    ]


DOWN_FORWARD = Product(
    "down_forward",
    down_forward,
    _DOWN,
    kernels=lambda: [
        kernel(*call)
        for call in (
            *every(CANDIDATES["down_forward"], variants(gather=BOTH, bias=BOTH)),
            *every(CANDIDATES["up_backward_act"], variants(transposed=[True], bias=[True])),
            *every([None], variants(transposed=BOTH, rank=(16, 32, 48, 64))),
            *every([FACTOR_ROWS], variants(gather=BOTH, transposed=BOTH)),
            *every([None], QUANTIZED_VARIANTS),
        )
    ],
    variants=(*variants(gather=BOTH, transposed=BOTH, bias=BOTH), *variants(gather=BOTH, transposed=BOTH, rank=[16])),
    in_layer=lambda sizes, up, down: [] if down.fused else _in_layer(sizes, down),
    tiles=lambda sizes: tiles_for("down_forward", sizes.d),
    kernel=kernel,
    options=("gather", "transposed", "bias", "rank"),
    phases=("forward",),
)
UP_BACKWARD_ACT = Product(
    "up_backward_act",
    up_backward_act,
    _UP,
    kernels=lambda: [
        kernel(*call)
        for call in (
            *every(CANDIDATES["up_backward_act"], variants(gather=BOTH, transposed=[True])),
            (None, Variant(element=E4M3)),
            *((each, Variant(transposed=True, sends=True)) for each, _ in all_that_send("up_backward_act")),
        )
    ],
    in_layer=lambda sizes, up, down: [] if up.fused else _in_layer(sizes, of_dx(up)),
    tiles=lambda sizes: tiles_for("up_backward_act", sizes.d),
    kernel=kernel,
    variant=Variant(transposed=True),
    options=("gather", "bias", "rank"),
    phases=("backward",),
)
