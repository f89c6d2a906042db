"""The argument of the products by rows (cuda/tiles.cuh: RowsParams), which up.py, linear.py and down_backward.py share."""

from typing import Any, NamedTuple

from blazeproto.dispatch.structures import Addresses
from blazeproto.gemm import tickets
from blazeproto.gemm.arguments import Arguments
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Box, Params, Plan, dense_box, persistent_grid
from blazeproto.gemm.tiles import BK, BM, OPERAND_BYTES, SLAB, TileConfig

ROWS_PARAMS = Params(
    "RowsParams",
    "tiles.cuh",
    maps=("a", "b", "h", "out0", "out1", "low_rows", "low_weights"),
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
    numbers=("rows", "experts", "reduction", "columns", "bias_stride", "rank"),
)


class LowRank(NamedTuple):
    """What a product by rows adds to its reduction: rows (R, r) . factor, of rank r, a multiple of 8.

    factor: (E, columns, r), or (E, r, columns) where the weights lie MN-major.
    """

    rows: Any
    factor: Any


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
    rank: int = 0,
    low_weights: Box | None = None,
) -> Plan:
    """where: (rows, experts, device), as `Addresses` has it.  rank: of a `LowRank`, or 0."""
    num_rows, num_experts, device = where
    a = None if gather else dense_box((reduction, num_rows), (BK, BM))
    blocks_at_most = num_rows // BM + min(num_experts, num_rows)
    if config.tickets:
        tickets.counters(device)  # now, because a later launch may be captured, and then no memory can be had
    grid = persistent_grid(device, config.cluster, blocks_at_most * -(-columns // tile_columns))
    numbers = (num_rows, num_experts, reduction, columns, bias_stride, rank)
    low_rows = dense_box((rank, num_rows), (BK, BM)) if rank else None
    maps = (a, weights, h, out0, out1, low_rows, low_weights)
    return Plan(kernel, ROWS_PARAMS, maps, numbers, grid=grid, device=device)


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


def h_box(columns: int, halves: int, num_rows: int, box: tuple[int, int, int]) -> Box:
    """Of H, (R, G n), seen as (half, row, column): a box may hold gate and up of the same rows one after the other.

    halves: 2 where gate and up are halves of it, each of so many columns; else 1.
    """
    return Box((columns, num_rows, halves), (OPERAND_BYTES * columns * halves, OPERAND_BYTES * columns), box)


def read_low(given: Arguments, low: Any, factor: str) -> None:
    """The arrays of a public function's ``low``, a pair or None.  factor: the second one's shape."""
    if low is None:
        return
    if not isinstance(low, tuple) or len(low) != 2:
        raise TypeError(f"low: expected (rows, factor) or None, got {type(low).__name__}")
    given.read("low rows", low[0], "R r").read("low factor", low[1], factor)


def take_low(views: dict[str, Any]) -> LowRank | None:
    """What `read_low` has put there, which is no longer there afterwards."""
    return LowRank(views.pop("low rows"), views.pop("low factor")) if "low rows" in views else None


def low_rank_of(rank: int) -> int:
    """LOW_RANK of a kernel for this rank: the wgmma of 16 elements in the last of its stages of 64; in full stages all."""
    return 0 if not rank else min(-(-rank // 16), BK // 16)


def rank_of(low: LowRank | None) -> int:
    """0 where there is none."""
    return 0 if low is None else int(low.rows.shape[1])


def low_maps(low: LowRank | None, first_element: int = 0) -> tuple[int, ...]:
    """The addresses of its tensor maps, which are a struct's last. first_element: of the factor, where columns are left out."""
    return () if low is None else (low.rows.data_ptr(), low.factor.data_ptr() + OPERAND_BYTES * first_element)


def weight_box(shape: tuple[int, int, int], columns: int, config: TileConfig, transposed: bool, halves: int = 1) -> Box:
    """shape: as the weights lie.  columns: of the output, so many of the weights' that begin where the map's address is.
    halves: 2 where such columns are gate, and as many up columns belong to them."""
    experts, outer, inner = shape
    matrix, expert = OPERAND_BYTES * inner, OPERAND_BYTES * inner * outer  # strides
    half = columns * (OPERAND_BYTES if transposed else matrix) if halves == 2 else expert
    if not transposed:
        box = (BK, config.tile_n // halves, halves, 1)
        return Box((inner, columns, halves, experts), (matrix, half, expert), box)
    if halves == 1:
        return Box((columns, outer, experts), (matrix, expert), (SLAB, BK, 1))
    return Box((columns, outer, halves, experts), (matrix, half, expert), (SLAB, BK, 1, 1))
