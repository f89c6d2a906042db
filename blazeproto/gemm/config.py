"""Which tiles each product runs with, in one place, and the kernels that follow from it.

Measured on an H200 (`scripts/bench_products.py --tune`); docs/kernels.md tells why the winners win.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from blazeproto.gemm.compile import Kernel

SMEM_BYTES = 227 * 1024  # mainloop.cuh: SMEM_LIMIT
WARPGROUP = 128  # threads; mainloop.cuh: WARPGROUP
MAX_EXPERTS = 512  # mainloop.cuh: MAX_EXPERTS
GATHERED_ELEMENTS = 2**35  # of a matrix whose rows are gathered, fewer than: gather.cuh counts chunks of 8 in 32 bits
BM, BK = 128, 64  # mainloop.cuh: rows of a tile, reduction steps of a stage
SUM_SLICES = 8  # of a CTA's tile, for blocks of weight_sum
SUM_THREADS = 2 * WARPGROUP  # of such a block: as many as weight.cu has consumers

GATED = ("swiglu", "geglu")
ACTIVATIONS = (*GATED, "relu", "silu", "gelu")


@dataclass(frozen=True)
class TileConfig:
    """Tile shape and pipeline of one kernel (mainloop.cuh draws it).

    tile_n: columns of a tile (128 or 256), which has 128 rows.  stages: depth of the ring.
    deferred: whether a tile's epilogue runs under the next tile's mainloop.
    cluster: CTAs of a weight gradient that share their B tiles; 1 for the other products.
    """

    tile_n: int = 256
    stages: int = 4
    deferred: bool = True
    cluster: int = 1


# product -> its tiles. Names as in blazeproto.gemm.
DEFAULTS = {
    "up_forward": TileConfig(),
    "down_forward": TileConfig(),
    "down_backward_act": TileConfig(deferred=False),
    "up_backward_act": TileConfig(),
    "down_backward_weight": TileConfig(cluster=2),
    "up_backward_weight": TileConfig(cluster=2),
}

# What scripts/bench_products.py --tune times.
_ROWS = [TileConfig(deferred=deferred) for deferred in (True, False)]
_WEIGHTS = [TileConfig(cluster=cluster, deferred=deferred) for deferred in (True, False) for cluster in (2, 1)]
CANDIDATES = {
    "up_forward": _ROWS,
    "down_forward": _ROWS,
    "down_backward_act": [TileConfig(deferred=False)],
    "up_backward_act": _ROWS,
    "down_backward_weight": _WEIGHTS,
    "up_backward_weight": _WEIGHTS,
}


def candidates(product: str) -> list[TileConfig]:
    """Tile configurations worth timing for ``product``."""
    return list(CANDIDATES[product])


def is_gated(activation: str) -> bool:
    return activation in GATED


@cache
def kernel_for(
    product: str,
    config: TileConfig,
    *,
    activation: str = "swiglu",
    bias: bool = False,
    fused: bool = False,
    f32: bool = False,
    gather: bool | None = None,
    debug: tuple[str, ...] = (),
) -> Kernel:
    """The kernel of ``product`` with these tiles.

    bias: adds a bias.  fused: down_forward that sums experts itself.  f32: a weight gradient in fp32.
    gather: overrides whether rows are gathered (the linear products, weight gradients).  debug: further macros, see ptx.cuh.
    """
    is_weight = product.endswith("_weight")
    gathers = is_weight or product in ("up_forward", "down_backward_act") if gather is None else gather
    # A fourth warpgroup: makes act, or stores where all of the producer's warps gather.
    finishers = int(product == "up_forward" or (gathers and product in ("down_forward", "up_backward_act")))
    threads, start_registers = (4 * WARPGROUP, 128) if finishers else (3 * WARPGROUP, None)
    macros: dict[str, int | str] = {
        "BN": config.tile_n,
        "CLUSTER": config.cluster,
        "STAGES": config.stages,
        "DEFERRED": config.deferred,
        "GATHER": gathers,
        "FINISHERS": finishers,
        # Making act is quicker with 56, but consumers that add biases need what 40 leave them.
        "FINISHER_REGISTERS": 56 if product == "up_forward" and not bias else 40,
    }
    if config.cluster != 1 and not is_weight:
        raise ValueError(f"config: expected cluster=1 for {product}, got {config}")
    options = tuple(f"-D{macro}" for macro in debug)
    if is_weight:
        macros |= {"TRANSPOSED": product == "up_backward_weight", "OUT_F32": f32}
        return Kernel("weight.cu", "weight_gradient", macros, SMEM_BYTES, threads, start_registers, options)
    if product == "up_forward":
        macros |= {
            "B_MN": 0,
            "HALVES": 2 if is_gated(activation) else 1,
            "HAS_BIAS": bias,
            "ACTIVATION": activation.upper(),
        }
        return Kernel("up.cu", "up_forward", macros, SMEM_BYTES, threads, start_registers, options)
    if product == "down_backward_act":
        macros |= {"B_MN": 1, "HALVES": 1, "ACTIVATION": activation.upper()}
        return Kernel("down_backward.cu", "down_backward", macros, SMEM_BYTES, threads, start_registers, options)
    macros |= {"B_MN": product == "up_backward_act", "HALVES": 1, "HAS_BIAS": bias, "FUSED_COMBINE": fused}
    return Kernel("linear.cu", "linear", macros, SMEM_BYTES, threads, start_registers, options)


@cache
def weight_sum_kernel(config: TileConfig) -> Kernel:
    """What sums the pieces that a weight gradient with these tiles may leave."""
    macros: dict[str, int | str] = {"BM": BM, "BN": config.tile_n, "SLICES": SUM_SLICES, "THREADS": SUM_THREADS}
    return Kernel("weight_sum.cu", "weight_sum", macros)


def all_kernels() -> Iterator[Kernel]:
    """Every kernel that the products can ask for, and every candidate of the tuner; nothing is compiled yet."""
    seen = set()

    def once(kernel: Kernel) -> Iterator[Kernel]:
        if (key := (kernel.file, kernel.macros)) not in seen:
            seen.add(key)
            yield kernel

    for product, config in DEFAULTS.items():
        if product in ("up_forward", "down_backward_act"):
            for activation in ACTIVATIONS:
                for bias in (False, True) if product == "up_forward" else (False,):
                    yield from once(kernel_for(product, config, activation=activation, bias=bias))
        elif product == "down_forward":
            for bias in (False, True):
                for fused in (False, True):
                    yield from once(kernel_for(product, config, bias=bias, fused=fused))
                yield from once(kernel_for(product, config, bias=bias, gather=True))
        elif product.endswith("_weight"):
            for f32 in (False, True):
                for gather in (True, False):
                    yield from once(kernel_for(product, config, f32=f32, gather=gather))
            yield from once(weight_sum_kernel(config))
        else:
            for gather in (False, True):
                yield from once(kernel_for(product, config, gather=gather))
    for product, configs in CANDIDATES.items():
        for config in configs:
            yield from once(kernel_for(product, config))
