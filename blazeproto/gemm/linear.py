"""Rows times weights with nothing but a bias at the end (cuda/linear.cu): two of the products; fused.py has the third.

down forward          Y = act W_down^T (+ bias)     MoEBlaze Algorithm 1, line 10
up backward, rows     dX~ = dH W_up                 MoEBlaze Algorithm 1, line 30
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm import product
from blazeproto.gemm.arguments import Arguments
from blazeproto.gemm.combine import slice_widths
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Plan, dense_box
from blazeproto.gemm.product import SHAPES, Layer, Product, tiled_kernel
from blazeproto.gemm.rows import (
    LowRank,
    low_maps,
    low_rank_of,
    rank_of,
    read_low,
    rows_plan,
    take_low,
    weight_box,
    words,
)
from blazeproto.gemm.tiles import (
    CANDIDATES,
    FACTOR_ROWS,
    OPERAND_BYTES,
    SLAB,
    TILES,
    WIDTHS,
    TileConfig,
    tiles_for,
)
from blazeproto.runtime import driver
from blazeproto.runtime.arrays import columns_within
from blazeproto.runtime.libraries import any_library


@any_library("blazeproto.gemm.reference", {"out": "bfloat16"})
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

    config: tiles; default: those of `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    arrays = (a, weights, gather, transposed, bias, columns, low, out)
    return _checked_launch(("a", "weights", "out"), dispatch, config, stream, *arrays)


@any_library("blazeproto.gemm.reference", {"y": "bfloat16"})
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

    act (R, n), down_proj (E, d, n), bias (E, d) or None, all bf16, and a dispatch of E experts → y (R, d) bf16.

    columns: as `grouped_mm`. y may be act itself where d = n is at most a tile's width (``config.tile_n``).

    config: tiles; default: those of `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    arrays = (act, down_proj, False, False, bias, columns, None, y)
    return _checked_launch(DOWN_NAMES, dispatch, config, stream, *arrays)


@any_library("blazeproto.gemm.reference", {"dx_rows": "bfloat16"})
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

    columns: as `grouped_mm`. `combine` sums a token's rows to dX.

    config: tiles; default: those of `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    arrays = (dh, up_proj, False, True, None, columns, None, dx_rows)
    return _checked_launch(UP_NAMES, dispatch, config, stream, *arrays)


# --- Checks ----------------------------------------------------------------------------------------------------------------

DOWN_NAMES = ("act", "down_proj", "y")
UP_NAMES = ("dh", "up_proj", "dx_rows")


def check(
    given: Arguments,
    names: tuple[str, str, str],
    config: TileConfig | None,
    a: Any,
    weights: Any,
    gather: bool,
    transposed: bool,
    bias: Any,
    columns: range | None,
    low: Any,
    out: Any,
) -> Arguments:
    """The arrays of `grouped_mm`. names: what its caller calls ``a``, ``weights`` and ``out``."""
    rows, experts, made = names
    given.read(experts, weights, "E reduction width" if transposed else "E width reduction")
    given.read(rows, a, "T reduction" if gather else "R reduction", gathered=gather)
    given.read("bias", bias, "E width", optional=True)
    read_low(given, low, "E r width" if transposed else "E width r")
    width = given.sizes["width"]
    count = len(columns_within(columns, width, given.multiple))
    tile = tiles(config, transposed, count).tile_n
    whole_rows = not gather and count == width == given.sizes["reduction"] <= tile
    return given.write(made, out, f"R {count}", over=rows if whole_rows else None)


def tiles(config: TileConfig | None, transposed: bool, columns: int) -> TileConfig:
    """``config``, or else the table's for so many columns."""
    return config or tiles_for(name_of(transposed), columns)


def name_of(transposed: bool) -> str:
    """The product whose tiles they are."""
    return "up_backward_act" if transposed else "down_forward"


def _checked_launch(
    names: tuple[str, str, str],
    dispatch: Dispatch,
    config: TileConfig | None,
    stream: int | None,
    a: Any,
    weights: Any,
    gather: bool,
    transposed: bool,
    bias: Any,
    columns: range | None,
    low: Any,
    out: Any,
) -> Any:
    """`grouped_mm`, whose arrays errors call by ``names``."""
    arguments = Arguments(dispatch, stream, config)
    given = check(arguments, names, config, a, weights, gather, transposed, bias, columns, low, out)
    columns = columns_within(columns, given.sizes["width"])
    if columns:
        at = given.located()
        rows, experts, made = (given.views[name] for name in names)
        options: dict[str, Any] = {"gather": gather, "transposed": transposed, "columns": columns, "config": config}
        options["low"] = take_low(given.views)
        launch(rows, experts, at, bias=given.views["bias"], out=made, **options)
    return given.arrays[names[2]]


# --- Kernels ---------------------------------------------------------------------------------------------------------------


def kernel(
    config: TileConfig | None = None,
    *,
    gather: bool = False,
    transposed: bool = False,
    bias: bool = False,
    fused: bool = False,
    low_rank: int = 0,
    debug: tuple[str, ...] = (),
    sources: Path | None = None,
) -> Kernel:
    """gather: rows fetched by index.  transposed: weights (E, reduction, columns).  fused: sums a token's experts itself.
    low_rank: as `low_rank_of` has it."""
    return tiled_kernel(
        "linear.cu",
        "linear",
        config or TILES[name_of(transposed)],
        debug,
        sources,
        widths=WIDTHS,
        epilogue_warpgroups=int(gather),  # where all of the producer's warps gather, others must store
        GATHER=gather,
        B_MN=transposed,
        HAS_BIAS=bias,
        FUSED_COMBINE=fused,
        low_rank=low_rank,
    )


@lru_cache(maxsize=SHAPES)
def plan(
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    columns: int,
    gather: bool,
    transposed: bool,
    bias: bool,
    fused: bool,
    rank: int,
    config: TileConfig,
    build: product.Build,
) -> Plan:
    width, reduction = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    factor = (shape[0], rank, width) if transposed else (shape[0], width, rank)
    variant: dict[str, Any] = {"gather": gather, "transposed": transposed, "bias": bias, "fused": fused}
    return rows_plan(
        kernel(config, **variant, low_rank=low_rank_of(rank), **build._asdict()),
        config,
        where,
        gather=gather,
        reduction=reduction,
        columns=columns,
        tile_columns=config.tile_n,
        weights=weight_box(shape, columns, config, transposed),
        out0=None if fused else dense_box((columns, where[0]), (SLAB, SLAB)),
        bias_stride=width,
        rank=rank,
        low_weights=weight_box(factor, columns, config, transposed) if rank else None,
    )


def launch(
    a: Any,
    weights: Any,
    at: Addresses,
    *,
    gather: bool = False,
    transposed: bool = False,
    bias: Any = None,
    columns: range | None = None,
    low: LowRank | None = None,
    out: Any,
    config: TileConfig | None = None,
) -> None:
    """`grouped_mm` of arrays that have been checked. columns: those of the output to make, default all.  low: added to them."""
    if not at.num_rows:
        return
    _, outer, inner = shape = weights.shape
    first, count = (0, inner if transposed else outer) if columns is None else (columns.start, len(columns))
    config = tiles(config, transposed, count)
    made = plan(
        at.where,
        shape,
        count,
        gather,
        transposed,
        bias is not None,
        False,
        rank_of(low),
        config,
        product.build_of(name_of(transposed)),
    )
    a_at, out_at = a.data_ptr(), out.data_ptr()
    weights_at = weights.data_ptr() + OPERAND_BYTES * first * (1 if transposed else inner)
    maps = (weights_at, out_at) if gather else (a_at, weights_at, out_at)
    maps += low_maps(low, first * (1 if transposed else rank_of(low)))
    addresses = words(at, config=config, source=a_at if gather else 0, out0=out_at, bias=bias, first_column=first)
    driver.launch(*made.fill(maps, addresses), at.stream)


def _tiles_of_layer(name: str, layer: Layer) -> list[TileConfig]:
    """Tiles for every slice of columns (combine.py) that the layer may make."""
    return list(dict.fromkeys(tiles_for(name, width) for width in slice_widths(layer.d_model)))


def _kernel_of_layer(config: TileConfig, transposed: bool, bias: bool = False) -> Kernel:
    return kernel(config, transposed=transposed, bias=bias, **product.build_of(name_of(transposed))._asdict())


DOWN_FORWARD = Product(
    "down_forward",
    down_forward,
    kernels=lambda: (
        [
            kernel(config, gather=gather, bias=bias)
            for config in CANDIDATES["down_forward"]
            for bias in (False, True)
            for gather in (False, True)
        ]
        + [kernel(config, transposed=True, bias=True) for config in CANDIDATES["up_backward_act"]]
        + [kernel(transposed=lies, low_rank=count) for lies in (False, True) for count in (1, 2, 3, 4)]
        + [kernel(FACTOR_ROWS, gather=gather, transposed=lies) for gather in (False, True) for lies in (False, True)]
    ),
    for_layer=lambda layer: [
        _kernel_of_layer(config, layer.transposed, bias=layer.down_bias)
        for config in _tiles_of_layer(name_of(layer.transposed), layer)
        if not layer.fused
    ],
    operations=lambda s: 2.0 * s.rows * s.n * s.d,
    least_bytes=lambda s: OPERAND_BYTES * (s.rows * s.n + s.E * s.n * s.d + s.rows * s.d),
    kernel=kernel,
)
UP_BACKWARD_ACT = Product(
    "up_backward_act",
    up_backward_act,
    kernels=lambda: [
        kernel(config, gather=gather, transposed=True)
        for config in CANDIDATES["up_backward_act"]
        for gather in (False, True)
    ],
    for_layer=lambda layer: [
        _kernel_of_layer(config, not layer.transposed)
        for config in _tiles_of_layer(name_of(not layer.transposed), layer)
    ],
    operations=lambda s: 2.0 * s.rows * s.halves * s.n * s.d,
    least_bytes=lambda s: OPERAND_BYTES * (s.halves * s.rows * s.n + s.halves * s.E * s.n * s.d + s.rows * s.d),
    kernel=lambda config=None, **variant: kernel(config, transposed=True, **variant),
)
