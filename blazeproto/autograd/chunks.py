"""Tokens in chunks, so that transient buffers are bounded (``workspace_bytes``); a whole batch is one chunk.

Each chunk has a dispatch of its own and goes the whole way, up and down, before the next begins, so that only one chunk's
act, Y, A' and dX~ exist at a time, and dH where it has a place of its own. What the save policy keeps is kept for all tokens,
in arrays whose slices are the chunks: pair p of a chunk counts from the chunk's first token.

    tokens         | chunk 0          | chunk 1          | chunk 2      |
    pairs, rows    | 0 ... 8 K c - 1  | 0 ...            | 0 ...        |      index lists (T K,), offsets (chunks, E+1)
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.policy import padded_rank
from blazeproto.dispatch.structures import Dispatch

WHOLE = 0
"""As ``chunk_tokens``: all tokens are one chunk."""
SUM_BYTES = 4  # float32
MULTIPLE = 8  # tokens of a chunk, so that slices of index arrays stay 16-byte aligned


class Chunk(NamedTuple):
    """Which slices of the batch's arrays a chunk has; None for all of them."""

    tokens: slice | None
    rows: slice | None  # pairs too: a chunk has as many rows as pairs
    dispatch: Dispatch


def take(t: Any, part: slice | None) -> Any:
    """The part of an array that a chunk has, of None, None."""
    return t if t is None or part is None else t[part]


def chunks_of(
    num_tokens: int,
    num_experts: int,
    expert_pair_indices: Tensor,
    expert_token_offsets: Tensor,
    token_index_map: Tensor,
    top_k: int,
    pair_tokens: Tensor | None,
    token_offsets: Tensor | None,
    chunk_tokens: int,
) -> Iterator[Chunk]:
    """The chunks of a batch, from the operators' index arrays. top_k: 0 if it varies, and then there is one chunk."""
    if chunk_tokens == WHOLE:
        lists = (expert_pair_indices, expert_token_offsets.view(-1), token_index_map, None)
        whole = Dispatch(*lists, num_experts, top_k or None, num_tokens, token_offsets, pair_tokens)
        yield Chunk(None, None, whole)
        return
    for number, begin in enumerate(range(0, num_tokens, chunk_tokens)):
        end = min(begin + chunk_tokens, num_tokens)
        rows = slice(begin * top_k, end * top_k)
        lists = (expert_pair_indices[rows], expert_token_offsets[number], token_index_map[rows], None)
        yield Chunk(slice(begin, end), rows, Dispatch(*lists, num_experts, top_k, end - begin))


def num_chunks(num_tokens: int, chunk_tokens: int) -> int:
    return 1 if chunk_tokens == WHOLE else -(-num_tokens // chunk_tokens)


def chunk_tokens_for(
    workspace_bytes: int | None,
    num_tokens: int,
    top_k: int,
    d_model: int,
    d_expert: int,
    activation: str,
    itemsize: int,
    row_capacity: int | None = None,
    up_rank: int = 0,
    down_rank: int = 0,
    *,
    combine: str = "gather",
) -> int:
    """Tokens in a chunk, spread evenly over as few chunks as fit the workspace; WHOLE where all do, or it is None.

    up_rank, down_rank: of low-rank factors.  combine: `Options.combine`: whether Y and dX~ are rows or float32 sums.
    row_capacity: bounds the rows of a whole batch, but not those of a chunk, which may have a row for each of its pairs.

    Counts what one token needs for what lives only during a chunk, in the widest moment of forward and backward: as the
    Hopper backend has it, and as if H were recomputed, whatever the save policy. So the chunks, and the order in which
    weight gradients are summed, are the same for all policies, which then agree to the bit.

    ValueError if not even one token fits.
    """
    if workspace_bytes is None or num_tokens == 0:
        return WHOLE
    up_width, up_rank, down_rank = (
        d_expert * activation_named(activation).halves,
        *map(padded_rank, (up_rank, down_rank)),
    )
    # Elements of Y and of dX~ a row, and float32 sums a token in their place.
    y, out_sums = (d_model, 0) if combine == "gather" else (0, d_model)
    dx_rows, dx_sums = (0, d_model) if combine == "fused_both" else (d_model, 0)
    moments = (
        (up_width + d_expert + up_rank, 0),  # up forward: H, act; X A^T
        (d_expert + y + down_rank, out_sums),  # down forward: act, Y; act A^T
        # Down backward: H, which dH is written over, or dH where H is saved and kept; and A'. With factors X A^T; dO B, act A^T,
        # and S act A^T in float32 and rounded.
        (up_width + d_expert + up_rank + 5 * down_rank, 0),
        (up_width + dx_rows + 2 * up_rank, dx_sums),  # up backward: dH, dX~; X A^T, dH B
    )

    def needed(rows: int, tokens: int) -> int:
        return max(itemsize * rows * of_row + SUM_BYTES * tokens * sums for of_row, sums in moments)

    bytes_per_token = needed(top_k, 1)
    fitting = workspace_bytes // bytes_per_token
    if fitting >= num_tokens or (row_capacity is not None and needed(row_capacity, num_tokens) <= workspace_bytes):
        return WHOLE
    if fitting == 0:
        raise ValueError(
            f"workspace_bytes: expected at least {bytes_per_token}, what one token needs, got {workspace_bytes}"
        )
    if fitting < MULTIPLE:
        return fitting
    fitting -= fitting % MULTIPLE
    even = -(-num_tokens // -(-num_tokens // fitting))
    return -(-even // MULTIPLE) * MULTIPLE
