"""The argument of the products by rows (cuda/tiles.cuh: RowsParams), which up.py, linear.py and down_backward.py share."""

from typing import Any

from blazeproto.dispatch.structures import Addresses
from blazeproto.gemm import tickets
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Box, Params, Plan, dense_box, persistent_grid
from blazeproto.gemm.tiles import BK, BM, OPERAND_BYTES, SLAB, TileConfig

ROWS_PARAMS = Params(
    "RowsParams",
    "tiles.cuh",
    maps=("a", "b", "h", "out0", "out1"),
    words=(
        "source",
        "pairs.pair_indices",
        "pairs.pair_tokens",
        "pairs.multiplier",
        "offsets",
        "out0_rows",
        "out1_rows",
        "bias",
        "scores",
        "reduction_out",
        "tickets",
    ),
    numbers=("rows", "experts", "reduction", "columns", "bias_stride"),
)


def rows_plan(
    kernel: Kernel,
    config: TileConfig,
    where: tuple[int, int, int],
    *,
    gather: bool,
    reduction: int,
    columns: int,
    tile_columns: int,
    weights: Box,
    h: Box | None = None,
    out0: Box | None = None,
    out1: Box | None = None,
    bias_stride: int = 0,
) -> Plan:
    """where: (rows, experts, device), as `Addresses` has it."""
    num_rows, num_experts, device = where
    a = None if gather else dense_box((reduction, num_rows), (BK, BM))
    blocks_at_most = num_rows // BM + min(num_experts, num_rows)
    if config.tickets:
        tickets.counters(device)  # now, because a later launch may be captured, and then no memory can be had
    grid = persistent_grid(device, config.cluster, blocks_at_most * -(-columns // tile_columns))
    numbers = (num_rows, num_experts, reduction, columns, bias_stride)
    return Plan(kernel, ROWS_PARAMS, (a, weights, h, out0, out1), numbers, grid=grid, device=device)


def words(
    at: Addresses,
    *,
    config: TileConfig,
    source: int = 0,
    out0: int = 0,
    out1: int = 0,
    bias: Any = None,
    first_column: int = 0,
    scores: int = 0,
    sums: int = 0,
) -> tuple[int, ...]:
    """The struct's addresses. config: the kernel's. first_column: of the bias, where the output is some columns only."""
    bias_at = 0 if bias is None else bias.data_ptr() + OPERAND_BYTES * first_column
    counter = tickets.counters(at.device).take(at.stream) if config.tickets else 0
    return (source, *at.pair_to_token, at.expert_token_offsets, out0, out1, bias_at, scores, sums, counter)


def h_box(n: int, halves: int, num_rows: int, box: tuple[int, int, int]) -> Box:
    """Of H, (R, G n), seen as (half, row, column): a box may hold gate and up of the same rows one after the other."""
    return Box((n, num_rows, halves), (OPERAND_BYTES * n * halves, OPERAND_BYTES * n), box)


def weight_box(shape: tuple[int, int, int], columns: int, config: TileConfig, transposed: bool) -> Box:
    """columns: of the output, so many of the weights' that begin where the map's address is."""
    experts, outer, inner = shape
    matrix, expert = OPERAND_BYTES * inner, OPERAND_BYTES * inner * outer  # strides
    if transposed:
        return Box((columns, outer, experts), (matrix, expert), (SLAB, BK, 1))
    return Box((inner, columns, 1, experts), (matrix, expert, expert), (BK, config.tile_n, 1, 1))
