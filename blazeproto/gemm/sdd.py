"""Some blocks of a product of two matrices (cuda/sdd.cu): SDD and SDD^T. MegaBlocks §5.1; appendix B.

H = X W_1     the first layer of all experts: a row of blocks has the columns of its expert alone
"""

from functools import lru_cache
from typing import Any

from blazeproto.gemm.arguments import Array
from blazeproto.gemm.blocks import BLOCK, BLOCK_PARAMS, SQUARE, BlockSpecification, TopologyArrays, values_box
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
from blazeproto.gemm.tiles import BK, SLAB, TileConfig
from blazeproto.runtime import checks, driver

TILES = TileConfig()
WIDTHS = (TILES.tile_n,)  # two blocks of a row


_SDD = BlockSpecification(
    inputs=(Array("a", "M k"), Array("b", "k N")),
    outputs=(Array("out", f"B {SQUARE}"),),
    # S[r, c] = a[r] b[:, c]
    formula=lambda m, a, b, transpose_b: m.sampled(a, b.T if transpose_b else b),
)


@_SDD.public
def sdd(
    a: Any,
    b: Any,
    topology: TopologyArrays,
    *,
    transpose_b: bool = False,
    out: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """values = the topology's blocks of a b. MegaBlocks §5.1: SDD, and with ``transpose_b`` SDD^T; appendix B.

    a (M, k), b (k, N), with ``transpose_b`` (N, k), both bf16, and a topology of (M, N) → values (B, 128, 128) bf16, where
    blocks beyond the topology's stay as they were.

    config: tiles, of 256 columns, two blocks.  out: (B, 128, 128) bf16, to fill.  stream: a raw cudaStream_t; default: the
    caller's current one. TypeError or ValueError names the argument, before anything is launched.
    """
    given = _SDD.check(locals())
    checks.require(given.sizes["k"] > 0, "a", "columns to sum over", "none")
    lists, (device, stream) = given.lists(), given.place()
    a, b, out = (given.views[name] for name in ("a", "b", "out"))
    if out.shape[0] and all(topology.shape):
        made = _plan(a.shape, b.shape, out.shape[0], transpose_b, config or TILES, build_of("sdd"), device)
        indices = ("row_indices", "column_indices", "row_offsets", "block_offsets_t", "tiles", "tile_count")
        driver.launch(
            *made.fill([x.data_ptr() for x in (a, b, out)], [lists[name].data_ptr() for name in indices]), stream
        )
    return _SDD.results(given)


def kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    """variant: transposed."""
    config = config or TILES
    return tiled_kernel("sdd.cu", "sdd", config, build, widths=WIDTHS, GATHER=False, B_MN=not variant.transposed)


@lru_cache(maxsize=SHAPES)
def _plan(
    a: tuple[int, int],
    b: tuple[int, int],
    count: int,
    transposed: bool,
    config: TileConfig,
    build: Build,
    device: int,
) -> Plan:
    maps = (
        dense_box(a[::-1], (BK, BLOCK)),
        dense_box(b[::-1], (BK, BLOCK) if transposed else (SLAB, BK)),
        values_box(count, (SLAB, SLAB)),
    )
    made = kernel(config, Variant(transposed=transposed), build)
    grid = min(num_sms(device), count)
    return Plan(made, BLOCK_PARAMS, maps, (0, a[1], 0), grid=grid, device=device)


SDD = Product(
    "sdd",
    sdd,
    _SDD,
    kernels=lambda: [kernel(None, variant) for variant in variants(transposed=BOTH)],
    kernel=kernel,
    options=("transposed",),
)
