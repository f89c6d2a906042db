"""A block-sparse matrix times a dense one (cuda/dsd.cu): DSD, DS^T D, DSD^T, and with the sparse one on the right DDS, DD^T S.

Y = H W_2         the second layer of all experts                      dW_2 = H^T dY       its weights' gradient
dX = dH W_1^T     the first layer's data gradient                      dW_1 = X^T dH       its weights'
MegaBlocks §5.1; appendix B.
"""

from functools import lru_cache
from itertools import product as every
from typing import Any

from blazeproto.gemm.arguments import Array
from blazeproto.gemm.blocks import (
    BLOCK,
    BLOCK_PARAMS,
    SQUARE,
    BlockArguments,
    BlockSpecification,
    TopologyArrays,
    values_box,
)
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Plan, dense_box, num_sms
from blazeproto.gemm.product import (
    BOTH,
    PACKAGE,
    PLAIN,
    SHAPES,
    Build,
    Product,
    Variant,
    build_of,
    tiled_kernel,
    variants,
)
from blazeproto.gemm.tiles import BK, SLAB, WORTH_NARROWING, TileConfig
from blazeproto.runtime import driver

WIDTHS = (256, 192)
CTAS = 132  # of a round, on an H100 or H200; a constant, so that tiles don't depend on the device


_VALUES = Array("values", f"B {SQUARE}")
_DSD = BlockSpecification(
    inputs=(_VALUES, Array("b", "N m")),
    outputs=(Array("out", "M m"),),
    # S b
    formula=lambda m, values, b, transpose_s, transpose_b: m.times(
        values, b.T if transpose_b else b, transposed=transpose_s
    ),
)
_DDS = BlockSpecification(
    inputs=(Array("a", "m M"), _VALUES),
    outputs=(Array("out", "m N"),),
    # a S = (S^T a^T)^T
    formula=lambda m, a, values, transpose_s, transpose_a: (
        m.times(values, a if transpose_a else a.T, transposed=not transpose_s).T
    ),
)


@_DSD.public
def dsd(
    values: Any,
    b: Any,
    topology: TopologyArrays,
    *,
    transpose_s: bool = False,
    transpose_b: bool = False,
    out: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """out = S b. MegaBlocks §5.1: DSD, with ``transpose_b`` DSD^T, with ``transpose_s`` DS^T D; appendix B.

    values (B, 128, 128) of S (M, N), b (N, m), both bf16, and S's topology of (M, N) → out (M, m) bf16; zeros in rows without
    blocks.

    transpose_s: S^T b, b (M, m) → out (N, m).  transpose_b: b lies transposed, (m, N) or (m, M).

    config: tiles, of 256 or 192 columns.  out, stream: memory for it; a raw cudaStream_t, default: the caller's current one.
    TypeError or ValueError names the argument, before anything is launched.
    """
    given = _DSD.check(locals())
    return _launch(given, given.views["b"], transpose_s, not transpose_b, False, config, "dsd")


@_DDS.public
def dds(
    a: Any,
    values: Any,
    topology: TopologyArrays,
    *,
    transpose_s: bool = False,
    transpose_a: bool = False,
    out: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """out = a S. MegaBlocks §5.1: DDS, and with ``transpose_a`` DD^T S.

    a (m, M), values (B, 128, 128) of S (M, N), both bf16, and S's topology of (M, N) → out (m, N) bf16; zeros in columns without
    blocks.

    transpose_s: a S^T, a (m, N) → out (m, M).  transpose_a: a lies transposed, (M, m) or (N, m).

    config: tiles, of 256 or 192 of the m.  out, stream: memory for it; a raw cudaStream_t, default: the caller's current
    one. TypeError or ValueError names the argument, before anything is launched.
    """
    given = _DDS.check(locals())
    return _launch(given, given.views["a"], not transpose_s, transpose_a, True, config, "dds")


def _launch(
    given: BlockArguments,
    dense: Any,
    transpose_s: bool,
    mn_major: bool,
    transpose_out: bool,
    config: TileConfig | None,
    name: str,
) -> Any:
    """out = S dense, or S^T dense; mn_major: dense lies as it is multiplied.  transpose_out: out lies transposed.  name: whose
    build it is."""
    lists, (device, stream) = given.lists(), given.place()
    values, out = given.views["values"], given.views["out"]
    columns, lines = given.sizes["m"], given.sizes["columns" if transpose_s else "rows"] - 1
    if columns and lines:
        variant = Variant(transposed=transpose_s, dense_transposed=not mn_major, out_transposed=transpose_out)
        config = config or tiles(columns, lines)
        made = _plan(dense.shape, out.shape, values.shape[0], variant, config, build_of(name), device)
        offsets = "column_offsets" if transpose_s else "row_offsets"
        indices = ("row_indices", "column_indices", offsets, "block_offsets_t", "tiles", "tile_count")
        # Without blocks nothing is loaded, and a tensor map only has to be some memory's.
        maps = [x.data_ptr() if x.size else out.data_ptr() for x in (values, dense, out)]
        driver.launch(*made.fill(maps, [lists[index].data_ptr() for index in indices]), stream)
    return given.arrays["out"]


def tiles(columns: int, lines: int) -> TileConfig:
    """Those for this many columns of the dense matrix and lines of blocks: narrow ones where CTAs are done earlier so.

    With lines of one length, a CTA computes a tile's columns in each round.
    """

    def columns_of_a_cta(width: int) -> int:
        return -(-lines * -(-columns // width) // CTAS) * width

    wide, narrow = map(columns_of_a_cta, WIDTHS)
    return TileConfig(tile_n=WIDTHS[1] if narrow <= wide * (1 - WORTH_NARROWING) else WIDTHS[0])


def kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    """variant: transposed (S), dense_transposed, out_transposed."""
    macros = {
        "S_TRANSPOSED": variant.transposed,
        "B_MN": not variant.dense_transposed,
        "OUT_TRANSPOSED": variant.out_transposed,
    }
    return tiled_kernel("dsd.cu", "dsd", config or TileConfig(), build, widths=WIDTHS, GATHER=False, **macros)


@lru_cache(maxsize=SHAPES)
def _plan(
    dense: tuple[int, int],
    out: tuple[int, int],
    count: int,
    variant: Variant,
    config: TileConfig,
    build: Build,
    device: int,
) -> Plan:
    columns, lines = (
        (out if variant.out_transposed else out[::-1])[0],
        (out[1] if variant.out_transposed else out[0]) // BLOCK,
    )
    maps = (
        values_box(count, (SLAB, BK) if variant.transposed else (BK, BLOCK)),
        dense_box(
            tuple(max(size, 1) for size in dense[::-1]), (BK, config.tile_n) if variant.dense_transposed else (SLAB, BK)
        ),
        dense_box(out[::-1], (SLAB, SLAB)),
    )
    grid = min(num_sms(device), lines * -(-columns // config.tile_n))
    return Plan(kernel(config, variant, build), BLOCK_PARAMS, maps, (lines, 0, columns), grid=grid, device=device)


def _kernels(transposed_out: bool) -> list[Kernel]:
    of_output = variants(transposed=BOTH, dense_transposed=BOTH, out_transposed=[transposed_out])
    return [kernel(TileConfig(tile_n=width), variant) for width, variant in every(WIDTHS, of_output)]


DSD = Product(
    "dsd", dsd, _DSD, kernels=lambda: _kernels(False), kernel=kernel, options=("transposed", "dense_transposed")
)
DDS = Product(
    "dds",
    dds,
    _DDS,
    kernels=lambda: _kernels(True),
    kernel=kernel,
    variant=Variant(out_transposed=True),
    options=("transposed", "dense_transposed"),
)
