"""The operators of choices whose number of experts varies from token to token; ops.py says what an operator is.

choose_pairs     scores (T, E), token choice (T, K) -> a flat list of pairs         kernels: the choice's, as pairs.py
score_pairs      logits (T, E), pairs -> their scores (P,)                          kernels: pairs.py
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.autograd.operators import define
from blazeproto.router import fallback, pairs
from blazeproto.router.choices import varying_choice
from blazeproto.router.ops import derivative, integers, kernels_take
from blazeproto.router.public import place_of


def _choose_fake(scores: Tensor, experts: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    max_pairs = rest[4]
    return integers(scores, (max_pairs,), (max_pairs,), (scores.shape[0] + 1,), scores.shape[1:])


@define(
    "choose_pairs(Tensor scores, Tensor experts, Tensor? draws, str by, float[] options, SymInt size, SymInt max_pairs, "
    "Tensor? limits) -> (Tensor pair_experts, Tensor pair_tokens, Tensor token_offsets, Tensor load)",
    _choose_fake,
    chooses=True,
)
def choose_pairs(
    scores: Tensor,
    experts: Tensor,
    draws: Tensor | None,
    by: str,
    options: list[float],
    size: Any,
    max_pairs: int,
    limits: Tensor | None,
) -> tuple[Tensor, ...]:
    """The pairs that a choice makes of scores (T, E) in [0, 1] and the token choice (T, K): see `VaryingChoice.crossing`.

    Returns pair_experts (P,), pair_tokens (P,), token_offsets (T + 1,) and load (E,), int32. ValueError for an unknown ``by``.
    With ``limits``, tokens of expert -1 are masked.
    """
    choice = varying_choice(by)
    if limits is not None:
        counted = experts[:, 0] >= 0
        order = torch.argsort(counted.to(torch.int8), descending=True, stable=True)  # masked tokens last
        scores, experts, size = scores[order], experts[order], limits[1]
    fits = experts.dtype == torch.int32 and max(max_pairs, experts.numel()) < 2**31
    if choice.KERNELS and fits and kernels_take(scores):
        made = _choose_fake(scores, experts, draws, by, options, size, max_pairs)
        launch = import_module(choice.KERNELS).launch_choice
        launch(place_of(scores), (scores, experts.contiguous(), draws, *made), by, options, size, limits)
    else:
        mask = choice.mask(scores, experts, draws, by, options, size)
        made = fallback.pairs_of(mask if limits is None else mask & (experts[:, :1] >= 0), max_pairs)
    if limits is None:
        return made
    pair_experts, pair_tokens, token_offsets, load = made
    pair_tokens = torch.where(pair_experts >= 0, order.to(torch.int32)[pair_tokens], 0)
    return pair_experts, pair_tokens, token_offsets[F.pad(counted.cumsum(0), (1, 0))], load


@define(
    "score_pairs_backward(Tensor logits, Tensor pair_experts, Tensor token_offsets, Tensor d_scores, str score, "
    "bool renormalize, float scale) -> Tensor",
    lambda logits, *_: torch.empty_like(logits),
)
def score_pairs_backward(
    logits: Tensor,
    pair_experts: Tensor,
    token_offsets: Tensor,
    d_scores: Tensor,
    score: str,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """d_logits (T, E) from d_scores (P,)."""
    given = logits, pair_experts, token_offsets, d_scores
    if not kernels_take(logits):
        return fallback.score_pairs_backward(*given, score=score, renormalize=renormalize, scale=scale)
    kernel = pairs.score_kernel(logits.shape[1], score, renormalize, scale, backward=True)
    return kernel.over(len(logits), place_of(logits), given, made=torch.empty_like(logits))


@define(
    "score_pairs(Tensor logits, Tensor pair_experts, Tensor token_offsets, str score, bool renormalize, float scale) -> Tensor",
    lambda logits, pair_experts, *_: logits.new_empty(pair_experts.shape),
    **derivative(score_pairs_backward, 1, lambda inputs, output: (inputs[:3], inputs[3:])),
)
def score_pairs(
    logits: Tensor, pair_experts: Tensor, token_offsets: Tensor, score: str, renormalize: bool, scale: float
) -> Tensor:
    """The scores (P,) of the pairs that `choose_pairs` lists; differentiable in the logits (T, E)."""
    given = logits, pair_experts, token_offsets
    if not kernels_take(logits):
        return fallback.score_pairs(*given, score=score, renormalize=renormalize, scale=scale)
    kernel, sizes = pairs.score_kernel(logits.shape[1], score, renormalize, scale), (len(logits), len(pair_experts))
    made = logits.new_empty(len(pair_experts))
    return kernel.over(pairs.pair_rows(*sizes), place_of(logits), given, *sizes, made=made)
