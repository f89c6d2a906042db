"""The tiles of each product, in one table, and the constants that host and device code share.

Chosen on an H200; docs/kernels.md tells why the winners won. `python -m scripts.bench.products --tune` times them all again.
`python -m blazeproto tune` times ampere's on a user's GPU; the winners take effect there when `table_of` is first asked for
ampere's tiles.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import log2
from typing import Any

from blazeproto.gemm.tuned import MEASURED
from blazeproto.runtime import notes, optional
from blazeproto.runtime.arch import AMPERE, HOPPER, Arch
from blazeproto.runtime.shown import Shown


@dataclass(frozen=True, eq=False)  # one object a type, so that a launch looks its plan up quickly
class Element:
    """A type of the numbers that products multiply.

    name: in PTX too.  bits: of a number.  packing: numbers that are moved as one.  tma: the CUtensorMapDataType of what is moved.
    k: steps of a reduction that one wgmma takes.
    dtypes: of the arrays that hold it.  scales: what may share a scale (e4m3.py); () for numbers without.
    rate: of operations, over bf16's.
    """

    name: str
    bits: int
    packing: int
    tma: int
    k: int
    dtypes: tuple[str, ...]
    scales: tuple[str, ...] = ()
    rate: float = 1.0

    @property
    def bytes(self) -> int:
        """The bytes that one copy moves."""
        return self.bits * self.packing // 8


BF16 = Element("bf16", 16, 1, 9, 16, ("bfloat16",))
E4M3 = Element("e4m3", 8, 2, 9, 32, ("float8_e4m3fn", "uint8"), ("token", "1x128", "token 1x128", "128x128"), 2.0)
# Frozen weights, which are decoded to bf16 before they are multiplied (blazeproto/stored).
MXFP4 = Element("mxfp4", 4, 2, 0, 16, ("uint8", "int8"), ("1x32",))
NF4 = Element("nf4", 4, 2, 0, 16, ("uint8",), ("1x32", "1x64", "1x128"))
INT4 = Element("int4", 4, 2, 0, 16, ("int32",), ("1xgroup",))
ELEMENTS = {element.name: element for element in (BF16, E4M3, MXFP4, NF4, INT4)}
ALIGNMENT = 16  # bytes: what TMA and a thread's loads move at least
CHUNK = ALIGNMENT // BF16.bytes  # numbers in that many bytes
WARPGROUP = 128  # threads
MAX_EXPERTS = 512  # whose row counts fit beside the stages
GATHERED_ELEMENTS = 2**35  # of a matrix whose rows are gathered, fewer than: gather.cuh counts chunks in 32 bits
BM, BK = 128, 64  # rows of a tile, reduction steps of a stage
SLAB = 64  # rows and columns that an epilogue stores at once
# Stated here alone: the device code has them as macros.
DEVICE_CONSTANTS = {
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

    tile_n: columns of a tile, which has 128 rows: 128 or 256; 64 in linear.cu, weight.cu, logits.cu; 192 in linear.cu, dsd.cu.
    stages: depth of the ring: 2 or 4; 8 beside 64 columns.
    deferred: whether a tile's epilogue runs under the next tile's mainloop.
    cluster: CTAs that share what they read (1 or 2): B tiles of a weight gradient, weights elsewhere (cuda/pairs.cuh).
    tickets: whether CTAs take tiles as they get done, and skip what lies past an expert's end (cuda/tiles.cuh); in up_forward
    and down_backward_act alone.
    few_rows: whether what lies past an expert's end becomes zeros, unread, where rows are gathered, instead of copies of the
    expert's last row (cuda/varlen_m.cuh); in the same two.
    """

    tile_n: int = 256
    stages: int = 4
    deferred: bool = True
    cluster: int = 1
    tickets: bool = False
    few_rows: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("tile_n", WIDTHS),
            ("stages", DEPTHS),
            ("deferred", SWITCH),
            ("tickets", SWITCH),
            ("few_rows", SWITCH),
            ("cluster", CLUSTERS),
        ):
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, allowed))}, got {value!r}")


# Hopper's tiles by product, but for what `tuned.py` knows better.
PLAIN = {
    "up_forward": TileConfig(),
    "down_forward": TileConfig(),
    "down_backward_act": TileConfig(deferred=False),
    "up_backward_act": TileConfig(),
    "down_backward_weight": TileConfig(cluster=2),
    "up_backward_weight": TileConfig(cluster=2),
}
QUANTIZED = TileConfig(deferred=False)  # of quantized operands, whose sums leave no registers for what is deferred
TILES = HOPPER.tiles
TILES.update(PLAIN)
OF_AMPERE = {width: TileConfig(tile_n=width, stages=2, deferred=False) for width in (256, 128)}
"""Ampere's tiles by their columns, the plain ones first."""
AMPERE.tiles.update(dict.fromkeys(PLAIN, OF_AMPERE[256]))
"""Launches look here each time: a changed entry holds from the next call on, for layers of any sizes."""
TUNED = tuple(product for product in PLAIN if product != "down_backward_act")
"""Products whose tiles `tune` chooses on ampere. down_backward_act has tiles of 256 columns alone."""

# Products that take narrower tiles where those of the table would leave many columns idle: of 2880 columns, 15 tiles of 192
# leave none, 12 of 256 a sixteenth. Elsewhere wide tiles win, since they read rows fewer times.
NARROW = {"down_forward": 192, "up_backward_act": 192}
WORTH_NARROWING = 1 / 32  # of all columns that tiles cover


def tiles_for(product: str, columns: int, element: Element = BF16, arch: Arch = HOPPER) -> TileConfig:
    """Tiles for this many columns of the output."""
    if arch is not HOPPER:
        config = table_of(arch)[product]
        # An output of at most 256 columns may lie over the rows that it is made of: one tile has to make them all.
        return OF_AMPERE[256] if config is OF_AMPERE[128] and product in NARROW and columns <= 256 else config
    return QUANTIZED if element.scales else _narrowed(product, columns, table_of(arch)[product])


@cache
def table_of(arch: Arch) -> dict[str, TileConfig]:
    """``arch.tiles``, as launches read it. The first call for ampere reads the tiles that `tune` noted for the current GPU; an
    entry that was changed before stays."""
    if arch is AMPERE:
        with suppress(ImportError, RuntimeError):  # no CuPy, no driver, no GPU
            runtime = optional.cupy().cuda.runtime
            gpu = runtime.getDeviceProperties(runtime.getDevice())["name"].decode(errors="replace")
            widths = {k: w for k, w in notes.noted("tiles", gpu).items() if k in TUNED and w in (*OF_AMPERE,)}
            arch.tiles.update({k: OF_AMPERE[w] for k, w in widths.items() if arch.tiles[k] is OF_AMPERE[256]})
    return arch.tiles


@lru_cache(maxsize=256)
def _narrowed(product: str, columns: int, wide: TileConfig) -> TileConfig:
    narrow = replace(wide, tile_n=NARROW.get(product, wide.tile_n))
    covered, by_narrow = (-(-columns // config.tile_n) * config.tile_n for config in (wide, narrow))
    return narrow if by_narrow <= covered * (1 - WORTH_NARROWING) else wide


# Of products with low-rank factors, whose narrow side is a few columns: the narrowest tiles, and a deep ring, since the bytes of
# the wide side bound them.
FACTOR_ROWS = FACTOR_GRADIENT = TileConfig(tile_n=64, stages=8)
FACTORS = {HOPPER: FACTOR_ROWS, AMPERE: TileConfig(tile_n=128, stages=2, deferred=False)}

CHOSEN = ("up_forward", "down_backward_act")  # products whose tiles `tuned.MEASURED` chooses
STEPS = 4  # an octave of an expert's rows has, in the table's eyes
FEW, MANY = -8, 20  # octaves of rows: with fewer the table is read as with 2^FEW, with more as with 2^MANY


def chosen(
    product: str, num_rows: int, num_experts: int, d: int, n: int, element: Element = BF16, arch: Arch = HOPPER
) -> TileConfig:
    """The tiles of up_forward or down_backward_act: the nearest measured layer's, or a user's entry in ``arch.tiles``."""
    if element.scales:
        return QUANTIZED
    config, octaves = table_of(arch)[product], log2(max(num_rows, 1) / num_experts)
    if config is not PLAIN[product]:  # a user's, or of an architecture that has no table of measured tiles
        return config
    return _nearest(product, round(STEPS * min(max(octaves, FEW), MANY)), d, n, arch.name)


@cache
def _nearest(product: str, step: int, d: int, n: int, arch: str) -> TileConfig:
    """By ratios: of rows an expert, which are 2^(step / STEPS), of d and of n."""

    def distance(layer: tuple[float, int, int]) -> float:
        rows, *widths = layer
        ratios = (log2(of / this) for of, this in zip(widths, (max(d, 1), max(n, 1)), strict=True))
        return (log2(rows) - step / STEPS) ** 2 + sum(ratio**2 for ratio in ratios)

    layers = MEASURED[arch][product]
    return replace(PLAIN[product], **layers[min(layers, key=distance)])


def chosen_for_any(product: str, d: int, n: int, element: Element = BF16, arch: Arch = HOPPER) -> list[TileConfig]:
    """Every tiles that `chosen` may give, whatever the number of rows."""
    if element.scales or table_of(arch)[product] is not PLAIN[product]:
        return [QUANTIZED if element.scales else table_of(arch)[product]]
    steps = range(STEPS * FEW, STEPS * MANY + 1)
    return [*dict.fromkeys(_nearest(product, step, d, n, arch.name) for step in steps)]


# What checks force, one after the other: the table's choice, and each of those that it may make.
FORCED: tuple[dict[str, Any], ...] = (
    {},
    {"few_rows": False},
    {"few_rows": True},
    {"cluster": 2},
    {"few_rows": True, "cluster": 2},
    {"few_rows": True, "tickets": True},
)


def force(**changes: Any) -> None:
    """Has the products that `chosen` is for take ``changes`` of their plain tiles, whatever the sizes, for checks of small
    layers. Without any, the table chooses again."""
    for product in CHOSEN:
        TILES[product] = replace(PLAIN[product], **changes) if changes else PLAIN[product]


# What the tuner times, the simple ones first: `scripts.bench.tuning` takes a later one where it is clearly faster. Of up_forward
# the first leaves rows unread: with plain tiles an H200 is often as fast, an H100 takes up to twice as long (docs/kernels.md).
_ROWS = (TileConfig(), TileConfig(deferred=False), TileConfig(cluster=2))
_NARROW = (*_ROWS, TileConfig(tile_n=192))
_WEIGHTS = tuple(TileConfig(cluster=cluster, deferred=deferred) for deferred in (True, False) for cluster in (2, 1))
CANDIDATES = {
    "up_forward": (
        TileConfig(few_rows=True),
        TileConfig(),
        TileConfig(few_rows=True, tile_n=128),
        TileConfig(cluster=2),
        TileConfig(deferred=False),
    ),
    "down_forward": _NARROW,
    "down_backward_act": tuple(
        TileConfig(deferred=False, **changes)
        for changes in (
            {},
            {"few_rows": True},
            {"few_rows": True, "cluster": 2},
            {"few_rows": True, "tickets": True},
            {"tickets": True},
            {"cluster": 2},
        )
    ),
    "up_backward_act": _NARROW,
    "down_backward_weight": _WEIGHTS,
    "up_backward_weight": _WEIGHTS,
}
QUANTIZED_CANDIDATES = (QUANTIZED,)
