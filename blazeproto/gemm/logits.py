"""The kernel of a router's logits (cuda/logits.cu), for `blazeproto.router.logits_product`: rows times one matrix, in fp32."""

from functools import cache, lru_cache

from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Plan, num_sms
from blazeproto.gemm.product import PLAIN, SHAPES, build_of, tiled_kernel
from blazeproto.gemm.rows import ROWS_PARAMS, rows_plan
from blazeproto.gemm.tiles import BM, TileConfig
from blazeproto.runtime import driver

# Of a weight of one part and of two; sums beside the accumulators take the registers of wider tiles.
WIDTHS = {1: (128, 64), 2: (256, 128, 64)}
SEGMENT = 8  # stages that a tensor core adds up: 512 elements


def kernel(width: int, parts: int) -> Kernel:
    """width: columns of a tile, of all ``parts`` of the weight together."""
    return tiled_kernel(
        "logits.cu",
        "logits",
        TileConfig(tile_n=width, stages=8 if width == 64 else 4, deferred=False),
        build_of("logits"),
        widths=WIDTHS[parts],
        GATHER=False,
        B_MN=False,
        WEIGHT_PARTS=parts,
        SEGMENT=SEGMENT,
    )


def kernels() -> list[Kernel]:
    """All of them."""
    return [kernel(width, parts) for parts, widths in WIDTHS.items() for width in widths]


def width_for(num_rows: int, columns: int, parts: int, multiprocessors: int) -> int:
    """The widest tiles that are neither mostly empty nor fewer than the GPU computes at a time."""
    *wider, narrowest = WIDTHS[parts]
    row_blocks = -(-num_rows // BM)
    for width in wider:
        if width < 2 * parts * columns and row_blocks * -(-parts * columns // width) >= multiprocessors:
            return width
    return narrowest


@cache
def _load(parts: int, device: int) -> None:
    """Those of every width: another number of tokens must not compile in the middle of a CUDA graph's capture."""
    for width in WIDTHS[parts]:
        kernel(width, parts).handle(device)


@lru_cache(maxsize=SHAPES)
def _plan(num_rows: int, columns: int, reduction: int, parts: int, device: int) -> Plan:
    _load(parts, device)
    made = kernel(width_for(num_rows, columns, parts, num_sms(device)), parts)
    config = TileConfig(tile_n=int(made.defines["BN"]))
    where, shape = (num_rows, 1, device), (1, parts * columns, reduction)
    return rows_plan(made, config, where, shape, PLAIN, mn_major=False, columns=columns, halves=parts, biased=False)


def launch(
    x: int, weight: int, out: int, *, num_rows: int, columns: int, reduction: int, parts: int, device: int, stream: int
) -> None:
    """out (T, columns) fp32 = x (T, reduction) times the sum of the weight's parts (parts, columns, reduction), all addresses of
    dense arrays, x's and the weight's 16-byte aligned; T = ``num_rows``."""
    if num_rows:
        words = tuple(out if word == "reduction_out" else 0 for word in ROWS_PARAMS.words)
        driver.launch(*_plan(num_rows, columns, reduction, parts, device).fill((x, weight), words), stream)
