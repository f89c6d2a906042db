"""The sum over a token's experts (cuda/combine.cu): MoEBlaze §2.3 and §3.1. Memory-bound."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm.arguments import Arguments, Array
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.product import SHAPES, Product, Variant, build_of
from blazeproto.gemm.specification import Specification
from blazeproto.gemm.tiles import BF16, CHUNK, TILES
from blazeproto.runtime import driver
from blazeproto.runtime.arrays import columns_within

LANES, VECTORS = (256, 128, 64, 32, 16, 8, 4), (4, 3, 2, 1)  # what combine.cu is compiled for
THREADS = 128  # of a block, or a token's lanes if they are more
# 16-byte loads that a thread may have under way, at four registers each; half as many where it loops.
LOADS_IN_FLIGHT = 32
SLICE_BYTES = 256 * 2**20  # rows to be combined are cut into slices of that much or more,
LEAST_SLICE = 768  # columns of a slice in the mean, at least: the product before reads its rows again for each


def _settle(given: Arguments, call: Mapping[str, Any], outputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """The output, which for ``columns`` is wider and must be given."""
    columns = call["columns"]
    if columns is None:
        return outputs
    if isinstance(columns, range):  # what is none has no width that fits it
        given.write(replace(outputs[0], shape="T width", added=True), call["out"])
    if len(columns_within(columns, given.sizes.get("width", 0), given.multiple)) != given.sizes["d"]:
        raise ValueError(f"columns: expected as many as y has, {given.sizes['d']}, got {columns}")
    return ()


SPEC = Specification(
    inputs=(Array("y", "R d"), Array("scores", "P", "float32", optional=True, counted=True)),
    outputs=(Array("out", "T d"),),
    # out_t = Σ over a token's pairs of S_p y_r, or of y_r; pairs without a row are left out
    formula=lambda m, y, scores=None: m.combine(y, scores),
    settle=_settle,
    by_pair=("token_index_map",),
)


@SPEC.public
def combine(
    y: Any,
    dispatch: Dispatch,
    *,
    scores: Any = None,
    columns: range | None = None,
    out: Any = None,
    stream: int | None = None,
) -> Any:
    """out = Σ over a token's pairs of scores[p] · y[row of p], in slot order; without scores a plain sum. MoEBlaze §2.3, §3.1.

    y (R, d) bf16, scores (P,) or (T, K) fp32 or None, and a dispatch → out (T, d) bf16.

    Makes the output from Y with scores, dX from dX̃ without. Floor: (R + T)·d·2 bytes at the memory's speed.

    columns: the columns of a wider ``out`` that y (R, len(columns)) is summed to; the others stay as they were.

    stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    return SPEC.run(launch, locals(), "columns")


# --- Kernels ---------------------------------------------------------------------------------------------------------------


@cache
def layout(d: int, top_k: int) -> tuple[int, int]:
    """(LANES, VECTORS): how many threads share a token, and the 16-byte chunks each takes. d: columns; top_k: 0 if it varies.

    Those that cover the row with the least waste, in one pass if they can; among these, the most loads under way.
    """
    chunks = d // CHUNK
    together = top_k if 0 < top_k <= 16 else 8  # combine.cu: GROUP

    def paid(layout: tuple[int, int]) -> int:
        return -(-chunks // (layout[0] * layout[1])) * layout[0] * layout[1]

    most = LOADS_IN_FLIGHT if together == top_k else LOADS_IN_FLIGHT // 2
    layouts = [(lanes, v) for v in VECTORS for lanes in LANES if v == 1 or v * together <= most]
    covering = [layout for layout in layouts if layout[0] * layout[1] >= chunks]
    return min(covering or layouts, key=paid)


def kernel(d: int, top_k: int, has_scores: bool, sources: Path | None = None) -> Kernel:
    """For rows of d columns, top_k pairs a token (0 if they vary)."""
    return _kernel(*layout(d, top_k), top_k, has_scores, sources)


@cache
def _kernel(lanes: int, vectors: int, top_k: int, has_scores: bool, sources: Path | None) -> Kernel:
    sizes = {"LANES": lanes, "VECTORS": vectors, "THREADS": max(lanes, THREADS)}
    return Kernel("combine.cu", "combine", {"TOP_K": top_k, "HAS_SCORES": int(has_scores), **sizes}, sources=sources)


@lru_cache(maxsize=SHAPES)
def _plan(
    num_tokens: int, d: int, top_k: int, has_scores: bool, sources: Path | None
) -> tuple[Kernel, tuple[int, int], int]:
    """The kernel, its grid and its threads."""
    lanes, vectors = layout(d, top_k)
    threads = max(lanes, THREADS)
    grid = (-(-num_tokens * lanes // threads), -(-d // (CHUNK * lanes * vectors)))
    return kernel(d, top_k, has_scores, sources), grid, threads


def launch(y: Any, at: Addresses, *, scores: Any = None, columns: range | None = None, out: Any) -> None:
    """`combine` of arrays that have been checked."""
    num_tokens, width = out.shape
    first, count = (0, width) if columns is None else (columns.start, len(columns))
    if not (num_tokens and count):
        return
    made, grid, threads = _plan(num_tokens, count, at.top_k, scores is not None, build_of("combine").sources)
    inputs = (y.data_ptr(), 0 if scores is None else scores.data_ptr(), at.token_index_map, at.token_offsets)
    words = (*inputs, out.data_ptr() + BF16.bytes * first, num_tokens, count, width)
    driver.launch(made.handle(at.device), grid, threads, 0, at.stream, words)


# --- Slices of columns -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=SHAPES)
def column_slices(num_rows: int, d: int, gradient_bytes: int) -> tuple[range, ...]:
    """The columns of Y or dX̃, (R, d), that are made and combined at a time, one slice after the other in the same place.

    gradient_bytes: about what the up projection's weight gradient takes. A backward allocates it where dX̃ has been, so that
    much smaller slices would not lower the peak.
    """
    return in_slices(d, max(1, min(2 * num_rows * d // max(gradient_bytes, SLICE_BYTES), d // LEAST_SLICE)))


def in_slices(d: int, count: int) -> tuple[range, ...]:
    """d columns in ``count`` slices of whole tiles, as even as that allows; with fewer tiles than slices, one tile a slice."""
    tile = TILES["down_forward"].tile_n
    tiles = -(-d // tile)
    count = min(count, tiles)
    bounds = [min(d, -(-i * tiles // count) * tile) for i in range(count + 1)]
    return tuple(range(*ends) for ends in pairwise(bounds))


def slice_widths(d: int) -> list[int]:
    """The widths of all slices that `column_slices` may cut."""
    counts = range(1, max(1, d // LEAST_SLICE) + 1)
    return sorted({len(columns) for count in counts for columns in in_slices(d, count)})


COMBINE = Product(
    "combine",
    combine,
    SPEC,
    kernels=lambda: [
        kernel(d, top_k, has_scores)
        for top_k in (0, 1, 2, 3, 4, 5, 8, 10, 16, 22)
        for d in (64, 256, 768, 2880, 4096)
        for has_scores in (False, True)
    ],
    parts=lambda sizes, config, variant, build: [kernel(sizes.d, sizes.K, variant.scores, build.sources)],
    in_layer=lambda sizes, up, down: [
        (sizes._replace(d=width), None, Variant(scores=scores))
        for scores, fused in ((False, up.fused), (True, down.fused))
        if not fused
        for width in slice_widths(sizes.d)
    ],
    variant=Variant(scores=True),
    phases=("forward", "backward"),
)
