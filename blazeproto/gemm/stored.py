"""A frozen weight as a launch takes it: a kernel decodes it to bf16 between load and tensor core (cuda/stored.cuh). On Hopper
some multiprocessors decode it, expert by expert, into a ring from which the others multiply (cuda/decoders.cuh)."""

from dataclasses import replace
from math import ceil, prod
from typing import Any, NamedTuple

from blazeproto.dispatch.structures import Addresses
from blazeproto.gemm.tiles import BF16, ELEMENTS, WIDTHS, Element, TileConfig
from blazeproto.runtime import checks
from blazeproto.runtime.arch import AMPERE

RUN = 32  # numbers of a row that a thread decodes at a time: one scale
FORMATS = {"mxfp4": 1, "int4": 2, "nf4": 3, "fp8": 4}
"""STORED of a format's kernels (cuda/stored.cuh), by the name that `blazeproto.stored` has for it."""

RING_BYTES = 60 << 20  # of a ring, or what an expert and two parts take, if that is more
PART_BYTES, MOST_PARTS = 8 << 20, 64  # bytes of a part, where a tile's columns do not need more; parts of an expert
FEW_ROWS = 64  # of an expert, in the mean: with fewer, kernels without a ring are faster
FEW_TILES = TileConfig(tile_n=64, stages=2, deferred=False)  # of cuda/ampere/few_rows.cu: by FEW_BLOCK rows
FEW_BLOCK, FEW_AHEAD, FEW_CTAS = 16, 3, 4  # rows of a tile; loads of a lane under way; CTAs a multiprocessor
DECODED_ROWS = {"mxfp4": 210, "int4": 350, "nf4": 290, "fp8": 290}
"""A multiprocessor decodes a weight in the time in which it multiplies so many rows by it, by format: what made the layers of
results/archive/tuning.md fastest."""


class Storage(NamedTuple):
    """All of a frozen weight that a kernel is compiled for.

    format: a name of `FORMATS`.  rows, columns: the block of numbers that share a scale.  scale_bytes: of a scale.
    zeros: whether the weight has zero points.  ring: bytes of the ring; 0: without one, as Ampere's kernels are.
    few: whether kernels for few rows read it (cuda/ampere/few_rows.cu), which are forward's.
    """

    format: str
    rows: int
    columns: int
    scale_bytes: int
    zeros: bool = False
    ring: int = 0
    few: bool = False

    @property
    def element(self) -> Element:
        """The type of its numbers."""
        return ELEMENTS.get(self.format) or ELEMENTS["e4m3"]

    @property
    def lines(self) -> int:
        """Lines of 64 numbers that a warp of decoders stores at a time."""
        return 256 // self.element.bits

    @property
    def macros(self) -> dict[str, int | str]:
        """The macros of cuda/stored.cuh."""
        blocks = {"BLOCK_ROWS": self.rows, "BLOCK_COLUMNS": self.columns}
        return {"STORED": FORMATS[self.format], **blocks, "SCALE_BYTES": self.scale_bytes, "HAS_ZEROS": self.zeros}


class Packed(NamedTuple):
    """values, scales, zeros (or None): the tensors of a `StoredWeight`.  shape: (E, out, in).
    ring, progress: ``storage.ring`` bytes, and (2, E, MOST_PARTS) int32 that are zero when a launch begins; or None."""

    values: Any
    scales: Any
    zeros: Any
    storage: Storage
    shape: tuple[int, int, int]
    ring: Any = None
    progress: Any = None


def ring_for(shape: tuple[int, ...], at: Addresses, *, always: bool = False) -> int:
    """Bytes of the ring for a weight (E, out, in) and the rows of a dispatch; 0 for kernels without a ring: Ampere's, which on
    Hopper are the faster ones for few rows. always: Hopper's own, whose sums of dS are others."""
    if at.arch is AMPERE or (few_rows(shape, at) and not always):
        return 0
    expert, tile = BF16.bytes * prod(shape[1:]), BF16.bytes * WIDTHS[-1] * max(shape[1:])
    part = max(PART_BYTES, 2 * tile, 2 * expert // MOST_PARTS)  # as `part_shift` cuts, at most
    return max(RING_BYTES, expert + 2 * part)


def part_shift(columns: int, tile_columns: int, bytes_of_one: int) -> int:
    """The base-2 logarithm of a part's tiles of columns. bytes_of_one: of a column's decoded weights."""
    tiles = -(-columns // tile_columns)
    wanted = min(max(PART_BYTES // (bytes_of_one * tile_columns), 1), tiles)
    return max(wanted.bit_length() - 1, (-(-tiles // MOST_PARTS) - 1).bit_length())


def few_rows(shape: tuple[int, ...], at: Addresses) -> bool:
    """Whether forward of a weight (E, out, in) takes the kernels for few rows, on every architecture."""
    return at.num_rows < FEW_ROWS * shape[0]


def alone(config: TileConfig, stored: Storage | None) -> TileConfig:
    """The tiles of kernels with a ring, whose CTAs do not share weights, and of those for few rows."""
    if stored and stored.few:
        return FEW_TILES
    return replace(config, cluster=1) if stored and stored.ring else config


def decoders(format: str, rows: float, sms: int) -> int:
    """Multiprocessors of ``sms`` that decode, so that the others do not wait for them. rows: of an expert, in the mean."""
    decoding = DECODED_ROWS[format]
    return max(1, min(sms // 2, ceil(sms * decoding / (decoding + rows))))


def packed(weight: Any, ring: int = 0, few: bool = False) -> Packed:
    """A `StoredWeight` as a launch takes it, without its ring. ValueError for a format or a block that no kernel decodes."""
    values, scales, zeros = weight.tensors
    checks.require(weight.format in FORMATS, "weight", f"a format of {', '.join(FORMATS)} for kernels", weight.format)
    rows, columns = weight.block
    checks.require(columns % RUN == 0, "weight", f"scales of a multiple of {RUN} numbers for kernels", columns)
    storage = Storage(weight.format, rows, columns, scales.element_size(), zeros is not None, ring, few)
    return Packed(values, scales, zeros, storage, tuple(weight.shape))
