"""Choices and their scores as torch operators: kernels where they run, the torch code of `choices` and `scoring` elsewhere.

    choose_pairs   scores (T, E), token choice (T, K) -> a flat list of pairs        kernels: pairs.py
    score_pairs    logits (T, E), pairs -> their scores (P,), differentiable         kernels: pairs.py
    hash_experts   token ids (T,) -> experts (T, K)                                  kernel: hashing.py

The operators ask inside whether the kernels run, so torch.compile sees one node whichever it is.
"""

from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd.backends import has_dispatch_kernels
from blazeproto.autograd.operators import define
from blazeproto.router import choices, hashing, ops, pairs, scoring
from blazeproto.router.kinds import WAYS, sums_to_one

# ---------------------------------------------------------------------------------------------------------------------
# The list of pairs


def _kernels_take(matrix: Tensor) -> bool:
    """Whether `pairs` and its kernels take a (T, E) matrix and lists of pairs beside it."""
    return (
        matrix.dtype == torch.float32
        and matrix.is_contiguous()
        and 1 <= matrix.shape[1] <= pairs.MAX_EXPERTS
        and matrix.shape[0] <= pairs.MAX_TOKENS
        and has_dispatch_kernels("auto", matrix.device)
    )


def _choose_fake(
    scores: Tensor, experts: Tensor, draws: Tensor | None, by: str, size: int, max_pairs: int
) -> tuple[Tensor, ...]:
    sizes = (max_pairs, max_pairs, scores.shape[0] + 1, scores.shape[1])
    return tuple(experts.new_empty(size_of, dtype=torch.int32) for size_of in sizes)


@define(
    "choose_pairs(Tensor scores, Tensor experts, Tensor? draws, str by, SymInt size, SymInt max_pairs) "
    "-> (Tensor pair_experts, Tensor pair_tokens, Tensor token_offsets, Tensor load)",
    _choose_fake,
    chooses=True,
)
def choose_pairs(
    scores: Tensor, experts: Tensor, draws: Tensor | None, by: str, size: int, max_pairs: int
) -> tuple[Tensor, ...]:
    """The pairs of `choices.choose_mask` as `ops.pairs_from_mask` lists them, and load (E,) int32, the tokens of each expert."""
    fits = experts.dtype == torch.int32 and max(max_pairs, experts.numel()) < 2**31
    if by in WAYS and fits and _kernels_take(scores):  # `choose_mask` may have ways that no kernel has
        return pairs.choose_pairs(scores, experts.contiguous(), by, size, max_pairs, draws=draws)
    mask = choices.choose_mask(scores, experts, by, size, draws)
    return *ops.pairs_from_mask.kernel(mask, max_pairs), mask.sum(dim=0, dtype=torch.int32)


def pairs_of(
    choice: choices.TokenRounding | choices.ExpertChoice | choices.Capacity,
    scores: Tensor,
    experts: Tensor,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a choice makes of scores (T, E) in [0, 1] and the token choice (T, K) int32: pair_experts (P,), pair_tokens (P,),
    token_offsets (T + 1,) and load (E,), int32.

    The pairs are those of ``choice(scores, experts)``. generator: what ``sr_f`` and ``nr_s`` draw from; default: torch's for the
    device.
    """
    sizes = scores.shape[0], scores.shape[1], experts.shape[1]
    draws = None
    if isinstance(choice, choices.TokenRounding):
        draws = choice.draws(scores.shape[1], scores.device, generator)
    by, size = choice.way(*sizes)
    made: tuple[Tensor, Tensor, Tensor, Tensor] = choose_pairs(
        scores.detach(), experts, draws, by, size, choice.max_pairs(*sizes)
    )
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Their scores


@define(
    "score_pairs_backward(Tensor logits, Tensor pair_experts, Tensor pair_tokens, Tensor token_offsets, Tensor d_scores, "
    "str score, bool renormalize, float scale) -> Tensor",
    lambda logits, *_: torch.empty_like(logits),
)
def score_pairs_backward(
    logits: Tensor,
    pair_experts: Tensor,
    pair_tokens: Tensor,
    token_offsets: Tensor,
    d_scores: Tensor,
    score: str,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """d_logits (T, E) from d_scores (P,): the derivative of `scoring.pair_scores`."""
    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": scale}
    if _kernels_take(logits):
        made: Tensor = pairs.score_pairs_backward(logits, pair_experts, token_offsets, d_scores.contiguous(), **options)
        return made
    num_tokens, num_experts = logits.shape
    used = pair_experts >= 0
    entry = pair_tokens.long() * num_experts + pair_experts.long()
    entry = torch.where(used, entry, num_tokens * num_experts)  # one more takes the unused pairs

    def spread(values: Tensor) -> Tensor:
        """A pair's value in its place (T, E); 0 elsewhere."""
        return values.new_zeros(num_tokens * num_experts + 1).scatter(0, entry, values)[:-1].view_as(logits)

    given = spread(d_scores * scale)
    if not sums_to_one(score, renormalize):
        dense = scoring.dense_scores(logits, score)
        if score == "sigmoid":
            return given * dense * (1 - dense)
        return dense * (given - (given * dense).sum(dim=1, keepdim=True))
    mask = spread(used)
    kept = torch.where(mask, logits, torch.finfo(logits.dtype).min)
    share = torch.softmax(scoring.log_scores(kept, score), dim=1)
    d_kept = share * (given - (given * share).sum(dim=1, keepdim=True))
    if score == "sigmoid":
        d_kept = d_kept * torch.sigmoid(-kept)  # the slope of log(sigmoid)
    return torch.where(mask, d_kept, 0.0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *kept, ctx.score, ctx.renormalize, ctx.scale = inputs
    ctx.save_for_backward(*kept)


def _backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor | None, ...]:
    d_logits = score_pairs_backward(*ctx.saved_tensors, d_scores, ctx.score, ctx.renormalize, ctx.scale)
    return d_logits, None, None, None, None, None, None


@define(
    "score_pairs(Tensor logits, Tensor pair_experts, Tensor pair_tokens, Tensor token_offsets, str score, bool renormalize, "
    "float scale) -> Tensor",
    lambda logits, pair_experts, *_: logits.new_empty(pair_experts.shape),
    setup=_keep,
    backward=_backward,
)
def score_pairs(
    logits: Tensor,
    pair_experts: Tensor,
    pair_tokens: Tensor,
    token_offsets: Tensor,
    score: str,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """The scores (P,) of the pairs that `choose_pairs` lists, as `scoring.pair_scores`; differentiable in the logits (T, E)."""
    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": scale}
    if _kernels_take(logits):
        made: Tensor = pairs.score_pairs(logits, pair_experts, token_offsets, **options)
        return made
    return scoring.pair_scores(logits, pair_experts, pair_tokens, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Hash


@define(
    "hash_experts(Tensor token_ids, SymInt num_experts, SymInt top_k, int seed) -> Tensor",
    lambda token_ids, num_experts, top_k, seed: token_ids.new_empty(token_ids.shape[0], top_k, dtype=torch.int32),
    chooses=True,
)
def hash_experts(token_ids: Tensor, num_experts: int, top_k: int, seed: int) -> Tensor:
    """The experts (T, K) int32 of `choices.Hash`; token_ids (T,) integers of any dtype."""
    takes = num_experts <= hashing.MAX_EXPERTS and top_k <= hashing.MAX_TOP_K
    if takes and has_dispatch_kernels("auto", token_ids.device):
        made: Tensor = hashing.hash_route(token_ids.to(torch.int64).contiguous(), num_experts, top_k, seed=seed)
        return made
    return choices.Hash(seed)(token_ids, num_experts, top_k)


def hashed(choice: choices.Hash, token_ids: Tensor, num_experts: int, top_k: int) -> Tensor:
    """K distinct experts (T, K) int32 of each token id: those of ``choice(token_ids, num_experts, top_k)``."""
    experts: Tensor = hash_experts(token_ids, num_experts, top_k, choice.seed & hashing.MASK_32)  # no more of it counts
    return experts
