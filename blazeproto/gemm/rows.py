"""The argument of the products by rows (cuda/params.cuh: RowsParams), which up.py, linear.py and down_backward.py share."""

from math import prod
from typing import Any

from blazeproto.dispatch.structures import Addresses
from blazeproto.gemm import tickets
from blazeproto.gemm.arguments import LowRankTerm
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.e4m3 import Quantized
from blazeproto.gemm.launch import Box, Params, Plan, dense_box, num_sms, persistent_grid
from blazeproto.gemm.product import Variant
from blazeproto.gemm.sending import WORDS
from blazeproto.gemm.stored import FEW_BLOCK, FEW_CTAS, Packed, Storage, decoders, part_shift
from blazeproto.gemm.tiles import BF16, BK, BM, E4M3, SLAB, Element, TileConfig

ROWS_PARAMS = Params(
    "RowsParams",
    "params.cuh",
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
SCALES = ("a_scales", "b_scales", "h_scales", "out0_scales", "out1_scales")
QUANTIZED_ROWS_PARAMS = ROWS_PARAMS._replace(words=(*ROWS_PARAMS.words, *SCALES))
STORED_ROWS_PARAMS = ROWS_PARAMS._replace(
    maps=(*ROWS_PARAMS.maps, "decoded"),
    words=(*ROWS_PARAMS.words, "scales", "zeros", "first_column", "values", "progress"),
    numbers=(
        *ROWS_PARAMS.numbers,
        *("blocks_in_row", "blocks_in_expert"),
        *("parts", "part_columns", "part_shift", "slots", "slot_rows", "slot_columns", "decoders"),
    ),
)
SENDING_ROWS_PARAMS = ROWS_PARAMS._replace(words=(*ROWS_PARAMS.words, *(f"sending.{name}" for name in WORDS)))


def rows_plan(
    kernel: Kernel,
    config: TileConfig,
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    variant: Variant,
    *,
    mn_major: bool,
    columns: int,
    halves: int = 1,
    h: Box | None = None,
    out0: Box | None = None,
    out1: Box | None = None,
    biased: bool = True,
) -> Plan:
    """The plan of a product by rows. where: (rows, experts, device), from `Addresses`.  shape: of the weights, (E, m, reduction),
    or with ``mn_major`` (E, reduction, m).  columns: output columns of each of its ``halves``, 2 where gate and up lie apart.
    biased: whether a kernel of this kind may add a bias (E, m)."""
    num_rows, num_experts, device = where
    rank, element, stored = variant.rank, variant.element, variant.stored
    of_weights = stored.element if stored else element
    shape = (*shape[:2], shape[2] // element.packing)
    width, reduction = shape[:0:-1] if mn_major else shape[1:]
    lying = (*shape[:2], shape[2] // of_weights.packing) if stored else shape
    tile_columns, of_map = config.tile_n // halves, columns
    if stored and stored.ring:
        shift = part_shift(columns, tile_columns, halves * reduction * element.bytes)
        of_map = tile_columns << shift
        part = (reduction, of_map) if mn_major else (halves * of_map, reduction)
        parts = -(-columns // of_map)
        slots = min(num_experts * parts, stored.ring // (element.bytes * prod(part)))
        lying, of_weights = (slots, *part), element
    paired = element.packing == 2 and variant.gather  # PAIRED_ROWS (cuda/fp8.cuh)
    factor = (shape[0], rank, width) if mn_major else (shape[0], width, rank)
    if config.tickets:
        tickets.counters(device)  # now, because a later launch may be captured, and then no memory can be had
    blocks_at_most = num_rows // BM + min(num_experts, num_rows)
    maps: tuple[Box | None, ...] = (
        None if variant.gather else dense_box((reduction, num_rows), (BK, BM), element),
        _weight_box(lying, of_map, tile_columns, mn_major, halves, of_weights, config.cluster, paired=paired),
        h,
        out0,
        out1,
        dense_box((rank, num_rows), (BK, BM)) if rank else None,
        _weight_box(factor, columns, tile_columns, mn_major, halves, BF16, config.cluster, paired=paired)
        if rank
        else None,
    )
    numbers: tuple[int, ...] = (num_rows, num_experts, reduction, columns, width if biased else 0, rank)
    # All CTAs of a grid that sends rows begin, also those without a tile.
    tiles_at_most = num_sms(device) if variant.sends else blocks_at_most * -(-columns // tile_columns)
    grid = persistent_grid(device, config.cluster, tiles_at_most)
    params = QUANTIZED_ROWS_PARAMS if element.scales else SENDING_ROWS_PARAMS if variant.sends else ROWS_PARAMS
    if stored:
        in_row, of_ring, decoded = shape[2] // stored.columns, (0,) * 7, None
        if stored.few:
            tiles_at_most = (num_rows // FEW_BLOCK + min(num_experts, num_rows)) * -(-columns // tile_columns)
            grid = min(FEW_CTAS * num_sms(device), tiles_at_most)
        if stored.ring:
            decoding = decoders(stored.format, num_rows / num_experts, num_sms(device))
            grid = min(grid, num_sms(device) - decoding) + decoding
            of_ring = parts, of_map, shift, *lying, decoding
            decoded = dense_box((SLAB, prod(lying[1:]) // SLAB, lying[0]), (SLAB, stored.lines, 1))
        params, maps = STORED_ROWS_PARAMS, (*maps, decoded)
        numbers = (*numbers, in_row, shape[1] // stored.rows * in_row, *of_ring)
    return Plan(kernel, params, maps, numbers, grid=grid, device=device)


def _weight_box(
    shape: tuple[int, int, int],
    columns: int,
    tile_columns: int,
    mn_major: bool,
    halves: int,
    element: Element,
    cluster: int,
    *,
    paired: bool,
) -> Box:
    """shape: as the weights lie.  columns: output columns of this launch, from the map's address on.
    halves: 2 where such columns are gate, and as many up columns belong to them.  cluster: of how many CTAs.
    paired: of all columns, the even ones of 16 before the odd ones."""
    if paired:
        return _paired_box(shape, tile_columns, halves, element)
    experts, outer, inner = shape
    matrix, expert = element.bytes * inner, element.bytes * inner * outer  # strides
    half = columns * (element.bytes if mn_major else matrix) if halves == 2 else expert
    if not mn_major:
        # In a cluster each CTA loads a part: half of the columns, or gate or up.
        box = (BK, tile_columns * halves // cluster, 1, 1) if cluster > 1 else (BK, tile_columns, halves, 1)
        return Box((inner, columns, halves, experts), (matrix, half, expert), box, element)
    if halves == 1:
        return Box((columns, outer, experts), (matrix, expert), (SLAB, BK, 1), element)
    return Box((columns, outer, halves, experts), (matrix, half, expert), (SLAB, BK, 1, 1), element)


def _paired_box(shape: tuple[int, int, int], tile_columns: int, halves: int, element: Element) -> Box:
    """Weights (E, m, k), k counting pairs of fp8: of each 16 rows the even ones, then the odd ones; of each half its own."""
    experts, rows, k = shape
    columns, row = rows // halves, element.bytes * k
    strides = (2 * row, row, 16 * row, columns * row)
    return Box((k, 8, 2, columns // 16, experts * halves), strides, (BK, 8, 2, tile_columns // 16, halves), element)


def h_box(columns: int, halves: int, num_rows: int, box: tuple[int, int, int], element: Element) -> Box:
    """H, (R, G n), seen as (half, row, column): a box may hold gate and up of the same rows one after the other.

    halves: 2 where gate and up are halves of it, each of ``columns`` columns; else 1.
    """
    strides = (element.bytes * columns * halves, element.bytes * columns)
    return Box((columns, num_rows, halves), strides, box, element)


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
    bias_at = 0 if bias is None else bias.data_ptr() + BF16.bytes * first_column
    counter = tickets.counters(at.device).take(at.stream) if config.tickets else 0
    return (source, *at.pair_to_token, at.expert_token_offsets, out0, out1, bias_at, scores, sums, counter)


def element_of(operand: Any) -> Element:
    """The type of an operand's numbers."""
    return E4M3 if isinstance(operand, Quantized) else BF16


def address(operand: Any) -> int:
    """The address of an operand's numbers."""
    if isinstance(operand, Packed) and operand.ring is not None:
        operand = operand.ring
    return (operand.values if isinstance(operand, Quantized | Packed) else operand).data_ptr()  # type: ignore[no-any-return]


def shape_of(operand: Any) -> tuple[int, ...]:
    """The shape of an operand's numbers."""
    return (operand.values if isinstance(operand, Quantized) else operand).shape  # type: ignore[no-any-return]


def storage_of(weights: Any) -> Storage | None:
    """How weights that a kernel decodes are stored; None for others."""
    return weights.storage if isinstance(weights, Packed) else None


def variant_of(rows: Any, weights: Any, low: LowRankTerm | None, at: Addresses, **options: Any) -> Variant:
    """The variant of a product of these operands; ``options`` are its other fields."""
    return Variant(rank=rank_of(low), element=element_of(rows), arch=at.arch, stored=storage_of(weights), **options)


def scales(*operands: Any, first: int = 0) -> tuple[int, ...]:
    """The addresses of the scales of `SCALES`' arrays, 0 for an array without scales; () if A, the first, has none. first: of
    B's. If B is `Packed`: of its scales and zero points; ``first``, its first column; of its numbers and its progress."""
    if isinstance(b := operands[1], Packed):
        zeros, progress = (0 if t is None else t.data_ptr() for t in (b.zeros, b.progress))
        return b.scales.data_ptr(), zeros, first, b.values.data_ptr(), progress
    if not isinstance(operands[0], Quantized):
        return ()
    found = [each.scales.data_ptr() if isinstance(each, Quantized) else 0 for each in operands]
    return (found[0], found[1] + 4 * first, *found[2:])


def rank_of(low: LowRankTerm | None) -> int:
    """The rank of the low-rank term; 0 without one."""
    return 0 if low is None else int(low.rows.shape[1])


def last_maps(low: LowRankTerm | None, weights: Any, first_element: int = 0) -> tuple[int, ...]:
    """The addresses of a struct's last tensor maps: of a low-rank term's and of a ring. first_element: of the factor, where
    columns are left out."""
    of_low = () if low is None else (low.rows.data_ptr(), low.factor.data_ptr() + BF16.bytes * first_element)
    return (*of_low, weights.ring.data_ptr()) if isinstance(weights, Packed) and weights.ring is not None else of_low
