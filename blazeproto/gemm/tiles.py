"""Which tiles each product runs with, in one table, and the constants that host and device code share.

Chosen on an H200; docs/kernels.md tells why the winners won. `python -m scripts.bench.products --tune` times them all again.
"""

from dataclasses import dataclass, replace

from blazeproto.runtime.shown import Shown


@dataclass(frozen=True, eq=False)  # one object a type, so that a launch looks its plan up quickly
class Element:
    """A type of numbers: bytes, CUtensorMapDataType, its name in PTX, and how many steps of a reduction one wgmma takes of it."""

    bytes: int
    tma: int
    ptx: str
    k: int


BF16 = Element(2, 9, "bf16", 16)
ALIGNMENT = 16  # bytes: what TMA and a thread's loads move at least
CHUNK = ALIGNMENT // BF16.bytes  # numbers in that many bytes
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
WIDTHS, DEPTHS, CLUSTERS, SWITCH = (
    (64, 128, 192, 256),
    (2, 4, 8),
    (1, 2),
    (False, True),
)  # what the device code is written for


@dataclass(frozen=True)
class TileConfig(Shown):
    """Tile shape and pipeline of one kernel (cuda/mainloop.cuh draws it). ValueError for what no kernel can have.

    tile_n: columns of a tile, which has 128 rows: 128 or 256; 64 in linear.cu and weight.cu, 192 in linear.cu alone.
    stages: depth of the ring: 2 or 4; 8 beside 64 columns.
    deferred: whether a tile's epilogue runs under the next tile's mainloop.
    cluster: CTAs that share what they read (1 or 2): B tiles of a weight gradient, weights elsewhere (cuda/pairs.cuh).
    tickets: whether CTAs take tiles as they get done, and skip what lies past an expert's end (cuda/tiles.cuh); in up_forward
    and down_backward_act alone.
    """

    tile_n: int = 256
    stages: int = 4
    deferred: bool = True
    cluster: int = 1
    tickets: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("tile_n", WIDTHS),
            ("stages", DEPTHS),
            ("deferred", SWITCH),
            ("tickets", SWITCH),
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

# Products that take narrower tiles where those of the table would leave many columns idle: of 2880 columns, 15 tiles of 192
# leave none, 12 of 256 a sixteenth. Elsewhere wide tiles win, since they read rows fewer times.
NARROW = {"down_forward": 192, "up_backward_act": 192}
WORTH_NARROWING = 1 / 32  # of all columns that tiles cover


def tiles_for(product: str, columns: int) -> TileConfig:
    """Tiles for so many columns of the output."""
    wide = TILES[product]
    narrow = replace(wide, tile_n=NARROW.get(product, wide.tile_n))
    covered, by_narrow = (-(-columns // config.tile_n) * config.tile_n for config in (wide, narrow))
    return narrow if by_narrow <= covered * (1 - WORTH_NARROWING) else wide


# Of products with low-rank factors, whose narrow side is a few columns: the narrowest tiles, and a deep ring, since the bytes of
# the wide side bound them.
FACTOR_ROWS = FACTOR_GRADIENT = TileConfig(tile_n=64, stages=8)

WITH_TICKETS = ("up_forward", "down_backward_act")
# Rows of an expert, in the mean, for which `with_tickets` gives a product tickets. With more of them the last ones matter
# little. With fewer, half tiles are so many that those who share weights no longer read them at the same time; dH of wide
# experts gains nevertheless. And a short reduction takes hardly longer than to find a tile.
TICKET_ROWS, TICKET_REDUCTION = range(384, 769), 1024
WIDE_EXPERT, WIDE_TICKET_ROWS = 4 * 2**20, range(272, 769)  # numbers of a weight (n, d); rows for its dH


def with_tickets(product: str, num_rows: int, num_experts: int, reduction: int, d_expert: int) -> TileConfig:
    """The table's tiles of up_forward or down_backward_act, with tickets where they pay."""
    config = TILES[product]
    wide = product == "down_backward_act" and reduction * d_expert >= WIDE_EXPERT
    rows = WIDE_TICKET_ROWS if wide else TICKET_ROWS
    pays = reduction >= TICKET_REDUCTION and num_rows // num_experts in rows
    return replace(config, tickets=True) if pays else config


def tiles_of_layer(product: str, reduction: int) -> list[TileConfig]:
    """Those that `with_tickets` may choose."""
    config = TILES[product]
    return [config, replace(config, tickets=True)] if reduction >= TICKET_REDUCTION and not config.tickets else [config]


def give_tickets(value: bool) -> None:
    """Has the table's tiles take tickets, whatever the sizes, or only where they pay: for checks of small layers."""
    for product in WITH_TICKETS:
        TILES[product] = replace(TILES[product], tickets=value)


# What the tuner times beside them.
_ROWS = (TileConfig(), TileConfig(deferred=False), TileConfig(cluster=2))
_NARROW = (*_ROWS, TileConfig(tile_n=192))
_WEIGHTS = tuple(TileConfig(cluster=cluster, deferred=deferred) for deferred in (True, False) for cluster in (2, 1))
CANDIDATES = {
    "up_forward": (*_ROWS, TileConfig(tickets=True)),
    "down_forward": _NARROW,
    "down_backward_act": (
        TileConfig(deferred=False),
        TileConfig(deferred=False, tickets=True),
        TileConfig(deferred=False, cluster=2),
    ),
    "up_backward_act": _NARROW,
    "down_backward_weight": _WEIGHTS,
    "up_backward_weight": _WEIGHTS,
}
