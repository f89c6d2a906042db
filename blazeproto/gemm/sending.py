"""Products that send rows to other ranks while they multiply (cuda/sending.cuh): what the host tells them, and their tiles."""

from dataclasses import replace
from typing import Any, NamedTuple

from blazeproto.gemm.tiles import BM, CANDIDATES, TileConfig

MEETING = ("bases", "progress", "ranks", "rank", "patience_ns")
SIZES = ("tokens", "row_bytes", "max_tokens", "rows_at", "counts_at", "blocks", "awaited", "senders", "late")
WORDS = (*(f"meeting.{name}" for name in MEETING), "rows", "line", "begins", *SIZES)
"""The fields of the struct, in order."""
SENDING_RATE = 250e9  # bytes a second that CTAs of a product send over NVLink, beside the others
TILE_RATE = 5.3e12  # operations a second, of a multiprocessor


class Sending(NamedTuple):
    """Rows that a product sends to other ranks while it multiplies (cuda/sending.cuh).

    words: the struct's, but for the last.  size: of what is sent, in bytes, an estimate.  rows: what is sent, which this record
    keeps alive until the launch."""

    words: tuple[int, ...]
    size: int
    rows: Any = None

    def beside(self, config: TileConfig, reduction: int) -> tuple[int, ...]:
        """The struct's words, for a product with these tiles: senders come to them when a sending at `SENDING_RATE` is over."""
        tile = 2 * BM * config.tile_n * reduction / TILE_RATE
        return (*self.words, round(self.size / SENDING_RATE / tile))


def that_sends(config: TileConfig, bias: bool = False) -> TileConfig:
    """The tiles of a kernel that sends rows, in place of ``config``: taken round robin, and with a bias, for which there would be
    too few registers, not in pairs."""
    return replace(config, tickets=False, cluster=1 if bias else config.cluster)


def all_that_send(product: str) -> list[tuple[TileConfig, bool]]:
    """The tiles of a product's kernels that may send rows, and whether the kernel adds a bias, which up_forward's alone can."""
    biases = (False, True) if product == "up_forward" else (False,)
    return [*dict.fromkeys((that_sends(each, bias), bias) for each in CANDIDATES[product] for bias in biases)]
