"""The kernel of a router's logits (cuda/logits.cu), for `blazeproto.router.logits_product`: rows times one matrix, in fp32."""

from functools import cache, lru_cache

from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Plan, num_sms
from blazeproto.gemm.product import PLAIN, SHAPES, build_of, tiled_kernel
from blazeproto.gemm.rows import ROWS_PARAMS, rows_plan
from blazeproto.gemm.tiles import BM, TileConfig
from blazeproto.runtime import driver
from blazeproto.runtime.arch import AMPERE, HOPPER, Arch, arch_on

# Of a weight of one part and of two; sums beside the accumulators take the registers of wider tiles.
WIDTHS = {1: (128, 64), 2: (256, 128, 64)}
AMPERE_WIDTH = 128
SEGMENT = 8  # stages that a tensor core adds up: 512 elements


def kernel(width: int, parts: int, arch: Arch = HOPPER) -> Kernel:
    """width: columns of a tile, of all ``parts`` of the weight together."""
    shared: dict[str, int] = {"GATHER": False, "B_MN": False, "WEIGHT_PARTS": parts, "SEGMENT": SEGMENT}
    if arch is AMPERE:
        config = TileConfig(tile_n=width, stages=2, deferred=False)
        return tiled_kernel("logits.cu", "logits", config, build_of("logits"), arch=arch, WARP_ROWS=32, **shared)
    return tiled_kernel(
        "logits.cu",
        "logits",
        TileConfig(tile_n=width, stages=8 if width == 64 else 4, deferred=False),
        build_of("logits"),
        widths=WIDTHS[parts],
        **shared,
    )


def kernels() -> list[Kernel]:
    """All of them."""
    of_hopper = [kernel(width, parts) for parts, widths in WIDTHS.items() for width in widths]
    return of_hopper + [kernel(AMPERE_WIDTH, parts, AMPERE) for parts in WIDTHS]


def width_for(num_rows: int, columns: int, parts: int, multiprocessors: int, arch: Arch = HOPPER) -> int:
    """The widest tiles that are neither mostly empty nor fewer than the GPU computes at a time."""
    if arch is AMPERE:
        return AMPERE_WIDTH
    *wider, narrowest = WIDTHS[parts]
    row_blocks = -(-num_rows // BM)
    for width in wider:
        if width < 2 * parts * columns and row_blocks * -(-parts * columns // width) >= multiprocessors:
            return width
    return narrowest


@cache
def _load(parts: int, device: int, arch: Arch) -> None:
    """Those of every width: another number of tokens must not compile in the middle of a CUDA graph's capture."""
    for width in WIDTHS[parts] if arch is HOPPER else (AMPERE_WIDTH,):
        kernel(width, parts, arch).handle(device)


@lru_cache(maxsize=SHAPES)
def _plan(num_rows: int, columns: int, reduction: int, parts: int, device: int, arch: Arch) -> Plan:
    _load(parts, device, arch)
    made = kernel(width_for(num_rows, columns, parts, num_sms(device), arch), parts, arch)
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
        driver.launch(
            *_plan(num_rows, columns, reduction, parts, device, arch_on(device)).fill((x, weight), words), stream
        )
