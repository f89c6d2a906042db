"""Tokens in chunks, so that transient buffers are bounded (``workspace_bytes``); a whole batch is one chunk.

Each chunk has a dispatch of its own and goes the whole way, up and down, before the next begins, so that only one chunk's
act, Y, A' and dX~ exist at a time, and dH where it has a place of its own. Saved tensors are kept for all tokens,
in arrays whose slices are the chunks: pair p of a chunk counts from the chunk's first token.

    tokens         | chunk 0          | chunk 1          | chunk 2      |
    pairs, rows    | 0 ... 8 K c - 1  | 0 ...            | 0 ...        |      index lists (T K,), offsets (chunks, E+1)
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.backends import dispatch_backend
from blazeproto.autograd.operators import define
from blazeproto.autograd.policy import padded_rank
from blazeproto.dispatch.structures import Dispatch

WHOLE = 0
"""As ``chunk_tokens``: all tokens are one chunk."""
SUM_BYTES = 4  # float32
MULTIPLE = 8  # tokens of a chunk, so that slices of index arrays stay 16-byte aligned


class Chunk(NamedTuple):
    """A chunk's slices of the batch's arrays; None for all of them."""

    tokens: slice | None
    rows: slice | None  # pairs too: a chunk has as many rows as pairs
    dispatch: Dispatch


def take(t: Any, part: slice | None) -> Any:
    """The part of an array that a chunk has, of None, None."""
    return t if t is None or part is None else t[part]


def chunks_of(dispatch: Dispatch, chunk_tokens: int) -> Iterator[Chunk]:
    """The chunks of a batch. dispatch: of the batch, or the chunks' one behind the other, offsets (chunks, E+1)."""
    if chunk_tokens == WHOLE:
        yield Chunk(None, None, dispatch)
        return
    num_tokens, top_k = dispatch.num_tokens, dispatch.top_k or 1
    for number, begin in enumerate(range(0, num_tokens, chunk_tokens)):
        end = min(begin + chunk_tokens, num_tokens)
        rows = slice(begin * top_k, end * top_k)
        lists = (
            dispatch.expert_pair_indices[rows],
            dispatch.expert_token_offsets[number],
            dispatch.token_index_map[rows],
        )
        yield Chunk(slice(begin, end), rows, Dispatch(*lists, None, dispatch.num_experts, top_k, end - begin))


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
    row_capacity: bounds the rows of a whole batch. A chunk may still have a row for each of its pairs.

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


# ---- dispatch ----------------------------------------------------------------------------------------------------


def _dispatch_fake(
    topk_experts: Tensor, num_experts: int, chunk_tokens: int, backend: str, row_capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = num_pairs = topk_experts.numel()
    if row_capacity is not None and chunk_tokens == WHOLE:
        num_rows = torch.sym_min(num_pairs, row_capacity)
    shapes = (num_rows,), (num_chunks(topk_experts.shape[0], chunk_tokens), num_experts + 1), (num_pairs,)
    pair_indices, offsets, token_index_map = (topk_experts.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return pair_indices, offsets, token_index_map


@define(
    "dispatch(Tensor topk_experts, int num_experts, SymInt chunk_tokens, str backend, SymInt? row_capacity=None) "
    "-> (Tensor expert_pair_indices, Tensor expert_token_offsets, Tensor token_index_map)",
    _dispatch_fake,
    chooses=True,
)
def dispatch(
    topk_experts: Tensor, num_experts: int, chunk_tokens: int, backend: str, row_capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """topk_experts (T, K) or (P,), int32 or int64 -> expert_pair_indices (R,), expert_token_offsets (chunks, E+1) and
    token_index_map (P,), int32: a dispatch for each chunk of tokens, or one for all.

    A pair whose expert id is outside [0, E) gets no row: -1 in ``token_index_map``. The rows that are left over come
    last, with -1 in ``expert_pair_indices``. R is P, or min(P, row_capacity) in one dispatch for all; chunks leave out the
    pairs that this one leaves out, and have places for all of theirs.
    """
    made = _dispatch_fake(topk_experts, num_experts, chunk_tokens, backend, row_capacity)
    builder = dispatch_backend(backend, topk_experts.device)
    if row_capacity is not None and row_capacity < topk_experts.numel() and chunk_tokens != WHOLE:
        whole = _dispatch_fake(topk_experts, num_experts, WHOLE, backend, row_capacity)
        builder.build_dispatch(topk_experts, num_experts, (whole[0], whole[1][0], whole[2]))
        topk_experts = topk_experts.masked_fill(whole[2].view(topk_experts.shape) < 0, -1)
    top_k = topk_experts.shape[1] if topk_experts.dim() == 2 else 1
    pairs, offsets, index_map = made
    offsets = offsets.view(-1) if chunk_tokens == WHOLE else offsets
    of_all = Dispatch(pairs, offsets, index_map, None, num_experts, top_k, topk_experts.shape[0])
    for chunk in chunks_of(of_all, chunk_tokens):
        lists = (
            chunk.dispatch.expert_pair_indices,
            chunk.dispatch.expert_token_offsets,
            chunk.dispatch.token_index_map,
        )
        builder.build_dispatch(take(topk_experts, chunk.tokens), num_experts, lists)
    return made
