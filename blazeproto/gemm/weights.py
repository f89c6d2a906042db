"""The weight gradients' launches (weight.cu): reductions over an expert's rows, which shares of CTAs may cut into pieces.

weight_schedule.cuh draws the shares. Their pieces lie in a workspace; how many shares there may be, and so how large it is,
follows from shapes and device alone. `blazeproto.gemm.unchecked` tells what is expected of arguments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from blazeproto.driver import launch_words
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.config import (
    BK,
    BM,
    DEFAULTS,
    SUM_SLICES,
    SUM_THREADS,
    TileConfig,
    kernel_for,
    weight_sum_kernel,
)
from blazeproto.gemm.launch import SHAPES, SLAB, Plan, box_2d, box_3d, num_sms, persistent_grid
from blazeproto.gemm.rows import RowAddresses

WORKSPACE_PART = 0.2  # of a weight gradient and its ordered rows
LEAST_SHARERS = 0.4  # of the clusters
BUSY_ENOUGH = 0.9  # of the clusters, in the mean over the rounds that the tiles of one expert take


class WeightPlan(NamedTuple):
    gradient: Plan
    sum_kernel: Kernel
    sum_grid: tuple[int, int]
    sum_numbers: tuple[int, ...]
    pieces_offset: int  # in the workspace, bytes


@lru_cache(maxsize=SHAPES)
def weight_plan(
    product: str,
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    gather: bool,
    f32: bool,
    accumulate: bool,
    shares: int,
    config: TileConfig | None,
    debug: tuple[str, ...],
) -> WeightPlan:
    """weight_schedule.cuh: WeightParams; weight_sum.cu."""
    config = config or DEFAULTS[product]
    num_rows, _, device = where
    experts, outer, inner = shape
    d, width = _gathered_and_ordered(product, shape)
    ordered = box_2d(width, num_rows, (SLAB, BK)) if num_rows else None
    in_order = box_2d(d, num_rows, (SLAB, BK)) if num_rows and not gather else None
    out = None if f32 else box_3d((inner, outer, experts), (SLAB, SLAB, 1))
    gradient = Plan(
        kernel_for(product, config, f32=f32, gather=gather, debug=debug),
        (ordered, in_order, out),
        9,
        (experts, d, width, int(accumulate), shares),
        grid=persistent_grid(device, config.cluster, _tiles(config, experts, d, width)),
        device=device,
    )
    transposed = product == "up_backward_weight"
    sum_numbers = (shares, config.cluster, d, width, int(transposed), int(f32), int(accumulate))
    sum_grid = (min(num_sms(device), shares * config.cluster * SUM_SLICES), 1)
    return WeightPlan(gradient, weight_sum_kernel(config), sum_grid, sum_numbers, _pieces_offset(shares))


def _gathered_and_ordered(product: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Widths of the gathered and of the ordered rows of a weight gradient of ``shape``."""
    _, outer, inner = shape
    return (outer, inner) if product == "down_backward_weight" else (inner, outer)


def _tiles(config: TileConfig, experts: int, d: int, width: int) -> int:
    return experts * -(-d // (BM * config.cluster)) * -(-width // config.tile_n)


def _pieces_offset(shares: int) -> int:
    """Bytes of the workspace before the pieces: an int2 a share, then 16-byte aligned."""
    return -(-8 * shares // 16) * 16


def _share_bytes(config: TileConfig) -> int:
    """Of the two pieces that a share may leave."""
    return 2 * config.cluster * BM * config.tile_n * 4


@lru_cache(maxsize=SHAPES)
def _shares(product: str, where: tuple[int, int, int], shape: tuple[int, ...], config: TileConfig | None) -> int:
    """Shares that a weight gradient may be cut into (weight_schedule.cuh): one a cluster of CTAs, if their pieces take no
    more than WORKSPACE_PART of the gradient and its ordered rows, for there a layer's memory may peak. None, 0, if
    they would be too few to gain anything, or if the whole tiles of one expert keep the clusters busy."""
    config, (num_rows, _, device), experts = config or DEFAULTS[product], where, shape[0]
    d, width = _gathered_and_ordered(product, shape)
    clusters = persistent_grid(device, config.cluster, _tiles(config, experts, d, width)) // config.cluster
    tiles = _tiles(config, 1, d, width)
    if tiles >= BUSY_ENOUGH * clusters * -(-tiles // clusters):
        return 0
    budget = WORKSPACE_PART * 2 * (experts * d * width + num_rows * width)
    shares = min(clusters, int(budget / _share_bytes(config))) if num_rows else 0
    return shares if shares >= LEAST_SHARERS * clusters else 0


def weight_workspace(product: str, rows: RowAddresses, shape: tuple[int, ...], config: TileConfig | None = None) -> int:
    """fp32 elements of the workspace of a weight gradient of ``shape``; 0 if it would not use any."""
    shares = _shares(product, rows.where, shape, config)
    return (_pieces_offset(shares) + shares * _share_bytes(config or DEFAULTS[product])) // 4


def weight_gradient(
    product: str,
    gathered: Any,
    ordered: Any,
    rows: RowAddresses,
    dw: Any,
    gather: bool,
    f32: bool,
    accumulate: bool,
    workspace: Any,
    config: TileConfig | None,
    debug: tuple[str, ...],
) -> None:
    """product: "down_backward_weight" or "up_backward_weight".  gather: False where the rows of `gathered` lie in order already.
    f32: whether dw is.  workspace: None makes every tile whole."""
    shares = 0 if workspace is None else _shares(product, rows.where, dw.shape, config)
    plan = weight_plan(product, rows.where, dw.shape, gather, f32, accumulate, shares, config, debug)
    ordered_at, dw_at, unfinished = ordered.data_ptr(), dw.data_ptr(), workspace.data_ptr() if shares else 0
    pieces = unfinished + plan.pieces_offset
    gathered_at = gathered.data_ptr()
    by_rows = (ordered_at,) if gather else (ordered_at, gathered_at)
    maps = (*(by_rows if rows.num_rows else ()), *(() if f32 else (dw_at,)))
    inputs = (gathered_at, ordered_at, *rows.pair_to_token, rows.offsets)
    plan.gradient.launch(rows.stream, maps, (*inputs, dw_at if f32 else 0, unfinished, pieces))
    if shares:
        words = (unfinished, pieces, dw_at, *plan.sum_numbers)
        launch_words(plan.sum_kernel.handle(rows.device), plan.sum_grid, SUM_THREADS, 0, rows.stream, words)
