"""Which tiles each product runs with, in one table, and the constants that host and device code share.

Measured on an H200 (`python -m scripts.bench.products --tune`); docs/kernels.md tells why the winners win.
"""

from dataclasses import dataclass

OPERAND_BYTES = 2  # of a bf16 number, which all operands are
ALIGNMENT = 16  # bytes: what TMA and a thread's loads move at least
CHUNK = ALIGNMENT // OPERAND_BYTES  # numbers in that many bytes
SMEM_LIMIT = 227 * 1024  # bytes of dynamic shared memory a CTA may have; the tiled kernels ask for all of it
WARPGROUP = 128  # threads
MAX_EXPERTS = 512  # whose row counts fit beside the stages
GATHERED_ELEMENTS = 2**35  # of a matrix whose rows are gathered, fewer than: gather.cuh counts chunks in 32 bits
BM, BK = 128, 64  # rows of a tile, reduction steps of a stage
SLAB = 64  # rows and columns that an epilogue stores at once
# Stated here alone: the device code has them as macros.
DEVICE_CONSTANTS = {
    "SMEM_LIMIT": SMEM_LIMIT,
    "MAX_EXPERTS": MAX_EXPERTS,
    "BM": BM,
    "BK": BK,
    "WARPGROUP": WARPGROUP,
    "SLAB": SLAB,
}
WIDTHS, DEPTHS, CLUSTERS = (128, 256), (2, 4), (1, 2)  # what the device code is written for


@dataclass(frozen=True)
class TileConfig:
    """Tile shape and pipeline of one kernel (cuda/mainloop.cuh draws it). ValueError for what no kernel can have.

    tile_n: columns of a tile (128 or 256), which has 128 rows.  stages: depth of the ring (2 or 4).
    deferred: whether a tile's epilogue runs under the next tile's mainloop.
    cluster: CTAs of a weight gradient that share their B tiles (1 or 2); 1 for the other products.
    """

    tile_n: int = 256
    stages: int = 4
    deferred: bool = True
    cluster: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (
            ("tile_n", WIDTHS),
            ("stages", DEPTHS),
            ("deferred", (False, True)),
            ("cluster", CLUSTERS),
        ):
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, allowed))}, got {value!r}")


# product -> its tiles. Launches look here each time, so a changed entry holds from the next call on.
TILES = {
    "up_forward": TileConfig(),
    "down_forward": TileConfig(),
    "down_backward_act": TileConfig(deferred=False),
    "up_backward_act": TileConfig(),
    "down_backward_weight": TileConfig(cluster=2),
    "up_backward_weight": TileConfig(cluster=2),
}

# What the tuner times beside them.
_ROWS = (TileConfig(), TileConfig(deferred=False))
_WEIGHTS = tuple(TileConfig(cluster=cluster, deferred=deferred) for deferred in (True, False) for cluster in (2, 1))
CANDIDATES = {
    "up_forward": _ROWS,
    "down_forward": _ROWS,
    "down_backward_act": (TileConfig(deferred=False),),
    "up_backward_act": _ROWS,
    "down_backward_weight": _WEIGHTS,
    "up_backward_weight": _WEIGHTS,
}
