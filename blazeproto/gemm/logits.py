"""A router's products: its logits (cuda/logits.cu), for `blazeproto.router.logits_product`, rows times one matrix, in fp32; and
backward in fp16, by the kernels of an expert's dX and dW (linear.py, weight.py).

    dX[t] = s_t Σ_e half(F_e dL[t, e] / s_t) half(W[e] / F_e)            s_t, F_e powers of two that make the largest element of
    dW[e] = 1/F_e Σ_t half(F_e dL[t, e] / s_t) half(f s_t x[t]) / f      a row at least 2^14, less than 2^15; f of cuda/fp16.cuh
"""

from functools import cache, lru_cache
from typing import Any

from blazeproto.dispatch.structures import Addresses
from blazeproto.gemm import linear, weight
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Plan, num_sms
from blazeproto.gemm.product import PLAIN, SHAPES, Variant, build_of, tiled_kernel
from blazeproto.gemm.rows import ROWS_PARAMS, rows_plan
from blazeproto.gemm.tiles import BM, FP16, TileConfig, tiles_for
from blazeproto.runtime import driver
from blazeproto.runtime.arch import AMPERE, HOPPER, Arch, arch_on

# Of a weight of one part and of two; sums beside the accumulators take the registers of wider tiles.
WIDTHS = {1: (128, 64), 2: (256, 128, 64)}
AMPERE_WIDTH = 128
SEGMENT = 8  # stages that a tensor core adds up: 512 elements
LONGEST_SUM = 2**16  # tokens that it adds up for dW in bf16: what it cuts off is below 2^-11 of what it adds up
UP_ROWS = "up_backward_act"
FP16_WEIGHT = Variant(transposed=True, f32=True, element=FP16)


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
    of_hopper += [
        linear.kernel(tiles_for(UP_ROWS, width), Variant(transposed=True, element=FP16)) for width in (256, 192)
    ]
    of_hopper += [weight.kernel(backward_tiles(width), FP16_WEIGHT) for width in (256, 128)]
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


# --- Backward --------------------------------------------------------------------------------------------------------------


def backward_tiles(columns: int) -> TileConfig:
    """Those of dW."""
    return TileConfig(tile_n=256 if columns > 128 else 128, cluster=2, deferred=False)


def backward_parts(num_rows: int, columns: int, reduction: int, device: int) -> int:
    """Launches that `backward_weight` takes, for this many tokens, experts and elements of x, so that no sum is too long."""
    tiles = -(-reduction // (2 * BM)) * -(-columns // backward_tiles(columns).tile_n)
    return -(-num_rows * tiles // (LONGEST_SUM * max(num_sms(device) // 2, 1)))


def backward_rows(halves: Any, weights: Any, scales: Any, at: Addresses, out: Any) -> None:
    """out (T, d) bf16 = scales (T,) fp32 times halves (T, E) weights (1, E, d), both fp16."""
    linear.launch(halves, weights, at, transposed=True, out=out, row_scales=scales.data_ptr())


def backward_workspace(num_rows: int, columns: int, reduction: int, device: int) -> int:
    """fp32 elements of the workspace of `backward_weight`."""
    where, shape = (num_rows, 1, device), (1, columns, reduction)
    return weight.workspace_elements(weight.ROUTER, where, shape, backward_tiles(columns))


def backward_weight(
    halves: Any, x: Any, scales: Any, at: Addresses, out: Any, workspace: Any, accumulate: bool = False
) -> None:
    """out (1, E, d) fp32 = halves (T, E)^T, fp16, times scales (T to the next multiple of 64,) times x (T, d) bf16."""
    options = {"gather": False, "f32": True, "config": backward_tiles(halves.shape[1]), "row_scales": scales.data_ptr()}
    weight.launch(weight.ROUTER, x, halves, at, dw=out, workspace=workspace, accumulate=accumulate, **options)
