"""The products as launches: for a caller that has checked its arrays and allocated the outputs, on the training path.

Functions of the same names in `blazeproto.gemm` check, allocate, and come here; their docstrings tell what is computed. An
array is a torch tensor or a DeviceArray, of which shape and address are used. It must be what the docstring there asks for:
contiguous, 16-byte aligned, of the right dtype, on the rows' device. ``rows`` is a `RowAddresses`. What a launch needs beside
addresses is worked out once a shape (`launch.Plan`), so that a call takes about 5 µs of the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from blazeproto.gemm.config import BK, BM, DEFAULTS, TileConfig, is_gated, kernel_for
from blazeproto.gemm.launch import SHAPES, SLAB, Box, Plan, box_2d, box_4d, persistent_grid
from blazeproto.gemm.rowops import bias_score_grad_unchecked as bias_score_grad
from blazeproto.gemm.rowops import combine_unchecked as combine
from blazeproto.gemm.rowops import expert_row_sum_unchecked as expert_row_sum
from blazeproto.gemm.rowops import reduce_scores_grad_unchecked as reduce_scores_grad
from blazeproto.gemm.rows import RowAddresses
from blazeproto.gemm.weights import weight_gradient, weight_workspace

__all__ = [
    "bias_score_grad",
    "combine",
    "down_backward_act",
    "down_backward_weight",
    "down_forward",
    "down_forward_fused",
    "expert_row_sum",
    "grouped_mm",
    "up_backward_act",
    "up_backward_weight",
    "up_forward",
    "weight_workspace",
]


DEBUG: tuple[str, ...] = ()
"""Further macros for every product's kernel (ptx.cuh: INJECT_DELAYS, SPIN_LIMIT=…), for tests."""


# --- Plans -----------------------------------------------------------------------------------------------------------


def _rows_plan(
    kernel: Any,
    config: TileConfig,
    where: tuple[int, int, int],
    *,
    gathered: bool,
    reduction: int,
    columns: int,
    tile_columns: int,
    weights: Box,
    h: Box | None = None,
    out0: Box | None = None,
    out1: Box | None = None,
    bias_stride: int = 0,
) -> Plan:
    """varlen_m.cuh: RowsParams. where: (rows, experts, device)."""
    num_rows, num_experts, device = where
    a = None if gathered else box_2d(reduction, num_rows, (BK, BM))
    blocks_at_most = num_rows // BM + min(num_experts, num_rows)
    grid = persistent_grid(device, config.cluster, blocks_at_most * -(-columns // tile_columns))
    numbers = (num_rows, num_experts, reduction, columns, bias_stride)
    return Plan(kernel, (a, weights, h, out0, out1), 10, numbers, grid=grid, device=device)


def _words(
    rows: RowAddresses,
    *,
    source: int = 0,
    out0: int = 0,
    out1: int = 0,
    bias: Any = None,
    first_column: int = 0,
    scores: int = 0,
    sums: int = 0,
) -> tuple[int, ...]:
    """The addresses in RowsParams."""
    b = 0 if bias is None else bias.data_ptr() + 2 * first_column
    return (source, *rows.pair_to_token, rows.offsets, out0, out1, b, scores, sums)


def _h_box(n: int, halves: int, num_rows: int, box: tuple[int, int, int]) -> Box:
    """Of H, (R, G n), seen as (half, row, column): a box may hold gate and up of the same rows one after the other."""
    return Box((n, num_rows, halves), (2 * n * halves, 2 * n), box)


def _weight_box(shape: tuple[int, int, int], columns: int, config: TileConfig, transposed: bool) -> Box:
    """columns: of the output, so many of the weights' that begin where the map's address is."""
    experts, outer, inner = shape
    matrix, expert = 2 * inner, 2 * inner * outer  # strides
    if transposed:
        return Box((columns, outer, experts), (matrix, expert), (SLAB, BK, 1))
    return Box((inner, columns, 1, experts), (matrix, expert, expert), (BK, config.tile_n, 1, 1))


@lru_cache(maxsize=SHAPES)
def _up_plan(
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    activation: str,
    bias: bool,
    config: TileConfig | None,
    debug: tuple[str, ...],
) -> Plan:
    config, halves = config or DEFAULTS["up_forward"], 1 + is_gated(activation)
    experts, width, d = shape
    n = width // halves
    return _rows_plan(
        kernel_for("up_forward", config, activation=activation, bias=bias, debug=debug),
        config,
        where,
        gathered=True,
        reduction=d,
        columns=n,
        tile_columns=config.tile_n // halves,
        weights=box_4d((d, n, halves, experts), (BK, config.tile_n // halves, halves, 1)),
        out0=_h_box(n, halves, where[0], (SLAB, SLAB, 1)),
        out1=box_2d(n, where[0], (SLAB, SLAB)),
        bias_stride=width,
    )


@lru_cache(maxsize=SHAPES)
def _linear_plan(
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    columns: int,
    gather: bool,
    transposed: bool,
    bias: bool,
    fused: bool,
    config: TileConfig | None,
    debug: tuple[str, ...],
) -> Plan:
    product = "up_backward_act" if transposed else "down_forward"
    width, reduction = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    config = config or DEFAULTS[product]
    return _rows_plan(
        kernel_for(product, config, bias=bias, fused=fused, gather=gather, debug=debug),
        config,
        where,
        gathered=gather,
        reduction=reduction,
        columns=columns,
        tile_columns=config.tile_n,
        weights=_weight_box(shape, columns, config, transposed),
        out0=None if fused else box_2d(columns, where[0], (SLAB, SLAB)),
        bias_stride=width,
    )


@lru_cache(maxsize=SHAPES)
def _down_backward_plan(
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    activation: str,
    config: TileConfig | None,
    debug: tuple[str, ...],
) -> Plan:
    config, halves = config or DEFAULTS["down_backward_act"], 1 + is_gated(activation)
    _, d, n = shape
    return _rows_plan(
        kernel_for("down_backward_act", config, activation=activation, debug=debug),
        config,
        where,
        gathered=True,
        reduction=d,
        columns=n,
        tile_columns=config.tile_n,
        weights=_weight_box(shape, n, config, True),
        h=_h_box(n, halves, where[0], (SLAB, BM, halves)),
        out0=_h_box(n, halves, where[0], (SLAB, SLAB, 1)),
        out1=box_2d(n, where[0], (SLAB, SLAB)),
    )


# --- Launches --------------------------------------------------------------------------------------------------------


def up_forward(
    x: Any,
    up_proj: Any,
    rows: RowAddresses,
    *,
    activation: str,
    bias: Any = None,
    h: Any,
    act: Any,
    config: TileConfig | None = None,
) -> None:
    if not rows.num_rows:
        return
    plan = _up_plan(rows.where, up_proj.shape, activation, bias is not None, config, DEBUG)
    h_at, act_at = h.data_ptr(), act.data_ptr()
    words = _words(rows, source=x.data_ptr(), out0=h_at, out1=act_at, bias=bias)
    plan.launch(rows.stream, (up_proj.data_ptr(), h_at, act_at), words)


def grouped_mm(
    a: Any,
    weights: Any,
    rows: RowAddresses,
    *,
    gather: bool = False,
    transposed: bool = False,
    bias: Any = None,
    columns: range | None = None,
    out: Any,
    config: TileConfig | None = None,
) -> None:
    """columns: those of the output to make, default all."""
    if not rows.num_rows:
        return
    _, outer, inner = shape = weights.shape
    first, count = (0, inner if transposed else outer) if columns is None else (columns.start, len(columns))
    plan = _linear_plan(rows.where, shape, count, gather, transposed, bias is not None, False, config, DEBUG)
    a_at, out_at = a.data_ptr(), out.data_ptr()
    weights_at = weights.data_ptr() + 2 * first * (1 if transposed else inner)
    maps = (weights_at, out_at) if gather else (a_at, weights_at, out_at)
    words = _words(rows, source=a_at if gather else 0, out0=out_at, bias=bias, first_column=first)
    plan.launch(rows.stream, maps, words)


def down_forward(
    act: Any,
    down_proj: Any,
    rows: RowAddresses,
    *,
    bias: Any = None,
    columns: range | None = None,
    y: Any,
    config: TileConfig | None = None,
) -> None:
    grouped_mm(act, down_proj, rows, bias=bias, columns=columns, out=y, config=config)


def up_backward_act(
    dh: Any,
    up_proj: Any,
    rows: RowAddresses,
    *,
    columns: range | None = None,
    dx_rows: Any,
    config: TileConfig | None = None,
) -> None:
    grouped_mm(dh, up_proj, rows, transposed=True, columns=columns, out=dx_rows, config=config)


def down_forward_fused(
    act: Any,
    down_proj: Any,
    scores: Any,
    rows: RowAddresses,
    *,
    bias: Any = None,
    out_f32: Any,
    config: TileConfig | None = None,
) -> None:
    if not rows.num_rows:
        return
    shape = down_proj.shape
    plan = _linear_plan(rows.where, shape, shape[1], False, False, bias is not None, True, config, DEBUG)
    words = _words(rows, bias=bias, scores=scores.data_ptr(), sums=out_f32.data_ptr())
    plan.launch(rows.stream, (act.data_ptr(), down_proj.data_ptr()), words)


def down_backward_act(
    d_out: Any,
    down_proj: Any,
    h: Any,
    scores: Any,
    rows: RowAddresses,
    *,
    activation: str,
    dh: Any,
    a_scaled: Any,
    d_scores: Any,
    workspace: Any,
    config: TileConfig | None = None,
) -> None:
    if not rows.num_rows:
        return
    plan = _down_backward_plan(rows.where, down_proj.shape, activation, config, DEBUG)
    dh_at, a_at, partials = dh.data_ptr(), a_scaled.data_ptr(), workspace.data_ptr()
    words = _words(rows, source=d_out.data_ptr(), out0=dh_at, out1=a_at, scores=scores.data_ptr(), sums=partials)
    plan.launch(rows.stream, (down_proj.data_ptr(), h.data_ptr(), dh_at, a_at), words)
    reduce_scores_grad(workspace, d_scores, rows)


def down_backward_weight(
    d_out: Any,
    a_scaled: Any,
    rows: RowAddresses,
    *,
    dw: Any,
    gather: bool = True,
    f32: bool,
    accumulate: bool = False,
    workspace: Any = None,
    config: TileConfig | None = None,
) -> None:
    """gather: False where the rows of d_out lie in order.  f32: whether dw is.  workspace: None makes every tile whole."""
    product = "down_backward_weight"
    weight_gradient(product, d_out, a_scaled, rows, dw, gather, f32, accumulate, workspace, config, DEBUG)


def up_backward_weight(
    dh: Any,
    x: Any,
    rows: RowAddresses,
    *,
    dw: Any,
    gather: bool = True,
    f32: bool,
    accumulate: bool = False,
    workspace: Any = None,
    config: TileConfig | None = None,
) -> None:
    """As `down_backward_weight`."""
    weight_gradient("up_backward_weight", x, dh, rows, dw, gather, f32, accumulate, workspace, config, DEBUG)
