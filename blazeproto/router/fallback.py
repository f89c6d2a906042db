"""The router's kernels in plain torch: this code runs where the kernels do not, and tests compare the kernels with it.

Public functions have their names and signatures here; ``out``, ``workspace`` and ``stream`` are ignored. They take tensors
or NumPy arrays, of any floating-point dtype, and compute in it.

    logits (T, E) ── topk_route ──> scores, experts (T, K)           scores (T, E), experts (T, K) ── choose_pairs ──> pairs (P,)
                  ── routing_losses ──> load (E,), two losses        logits (T, E), pairs (P,) ── score_pairs ──> scores (P,)

Gradients are of the same formulas, by torch.func. A token with a NaN or infinite logit has experts 0 ... K-1, NaN scores and
no gradient, and no other token notices. Everything has static shapes and never waits for the device.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.autograd.private import vjp
from blazeproto.router.choice import choice_mask
from blazeproto.router.choices import Hash, varying_choice
from blazeproto.router.scores import score_named, sums_to_one

Function = TypeVar("Function", bound=Callable[..., Any])


def _of_numpy_too(function: Function) -> Function:
    """For NumPy arrays results are NumPy's: bf16 numbers as their bits, in uint16."""

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        if isinstance(arguments[0] if arguments else next(iter(options.values())), Tensor):
            return function(*arguments, **options)
        made = function(*map(_to_torch, arguments), **{name: _to_torch(value) for name, value in options.items()})
        return tuple(map(_to_numpy, made)) if isinstance(made, tuple) else _to_numpy(made)

    return run  # type: ignore[return-value]


def _to_torch(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, np.ndarray) else value


def _to_numpy(made: Tensor) -> np.ndarray:
    return (made.view(torch.uint16) if made.dtype == torch.bfloat16 else made).numpy()


def _finite(logits: Tensor) -> Tensor:
    """(T, 1): whether all of a token's logits are numbers."""
    return torch.isfinite(logits).all(dim=1, keepdim=True)


def _gradient(formula: Callable[[Tensor], Any], logits: Tensor, gradients: Any) -> Tensor:
    """That of a formula's logits (T, E), from those of its results; 0 for a token with a NaN or infinite logit."""
    finite = _finite(logits)
    return vjp(formula, logits.where(finite, 0), gradients).masked_fill(~finite, 0)


# --- Scores ------------------------------------------------------------------------------------------------------------------


def chosen_scores(logits: Tensor, experts: Tensor, score: str, renormalize: bool | None, scale: float) -> Tensor:
    """The scores (T, K) of the experts (T, K) that were chosen; differentiable in the logits (T, E).

    score: a name in `SCORES`. A balancing bias chooses experts and never enters a score.
    ``renormalize`` makes a token's scores sum to one, then ``scale`` (DeepSeek-V3's routed scaling factor) multiplies.
    """
    index = experts.long()
    if sums_to_one(score, renormalize, experts.shape[1]):
        return score_named(score).logarithm(logits.gather(1, index)).softmax(dim=1) * scale
    return score_named(score).value(logits).gather(1, index) * scale


def pair_scores(
    logits: Tensor, experts: Tensor, token_offsets: Tensor, score: str, renormalize: bool | None, scale: float
) -> Tensor:
    """The scores (P,) of a flat list of distinct pairs, as `chosen_scores`; zero for the unused ones: expert -1, or behind
    ``token_offsets[T]``.

    With ``renormalize``, and with ``topk_softmax``, a token's scores sum to one over the experts that it has in the list.
    """
    num_tokens, num_experts = logits.shape
    place = torch.arange(len(experts), dtype=torch.int32, device=experts.device)
    token = torch.searchsorted(token_offsets[1:].contiguous(), place, right=True)
    # One more entry of the flat (T, E) scores takes the unused pairs.
    used = (experts >= 0) & (token < num_tokens)
    entry = torch.where(used, token * num_experts + experts, num_tokens * num_experts)
    if sums_to_one(score, renormalize):
        # Sums over a token's row keep one order; adding up pairs would not.
        mask = torch.zeros(logits.numel() + 1, dtype=torch.bool, device=logits.device).scatter(0, entry, True)
        # What is left out gets the lowest number and not -inf: a token without any pair would have NaN gradients.
        kept = torch.where(mask[:-1].view_as(logits), logits, torch.finfo(logits.dtype).min)
        scores = score_named(score).logarithm(kept).softmax(dim=1)
    else:
        scores = score_named(score).value(logits)
    return F.pad(scores.flatten(), (0, 1)).gather(0, entry) * scale


def selection_keys(logits: Tensor, score: str, bias: Tensor | None, grouped: bool = False) -> Tensor:
    """The keys that top-k ranks: the logits, or scores plus the balancing bias (DeepSeek-V3 §2.1.2). (T, E), no gradient.

    grouped: rank elementwise scores also without a bias, since groups add them up.
    """
    logits = logits.detach()
    if bias is None and not (grouped and score_named(score).elementwise):
        return logits
    keys = score_named(score).value(logits)
    # An infinite bias switches an expert off. As a number that is far enough, and two of which are one too, it breaks no token.
    return keys if bias is None else keys + bias.clamp(-1e30, 1e30)


def choose_top_k(keys: Tensor, top_k: int, num_groups: int | None = None, top_groups: int | None = None) -> Tensor:
    """The experts with the K largest keys of each token, largest first, ties to the lower expert id.

    keys (T, E) floating point; returns (T, K) int32, distinct in each row whatever the keys hold (NaN ranks last).
    num_groups, top_groups: choose among the experts of a token's best groups, as `topk.topk_route` says.
    """
    lowest, highest = torch.finfo(keys.dtype).min, torch.finfo(keys.dtype).max
    left = torch.nan_to_num(keys, nan=lowest, posinf=highest, neginf=lowest)  # a copy
    if num_groups is not None and num_groups != top_groups:
        grouped = keys.unflatten(1, (num_groups, keys.shape[1] // num_groups))
        sums = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)
        kept = choice_mask(choose_top_k(sums, top_groups or 1), num_groups)
        left = left.where(kept.repeat_interleave(grouped.shape[2], dim=1), -torch.inf)
    chosen = torch.empty(keys.shape[0], top_k, dtype=torch.int64, device=keys.device)
    # K times the first maximum: torch.topk leaves the order of ties open, and a stable sort of all E costs more.
    for slot in range(top_k):
        expert = chosen[:, slot : slot + 1]
        torch.argmax(left, dim=1, keepdim=True, out=expert)
        left.scatter_(1, expert, -torch.inf)
    return chosen.to(torch.int32)


@_of_numpy_too
def topk_route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax_topk",
    bias: Tensor | None = None,
    renormalize: bool | None = None,
    scale: float = 1.0,
    num_groups: int | None = None,
    top_groups: int | None = None,
    out: Any = None,
    stream: Any = None,
) -> tuple[Tensor, Tensor]:
    """scores (T, K) of the logits' dtype and experts (T, K) int32 of logits (T, E)."""
    finite = _finite(logits)
    logits = logits.where(finite, 0)
    keys = selection_keys(logits, score, bias, num_groups != top_groups)
    experts = choose_top_k(keys.where(finite, 0), top_k, num_groups, top_groups)  # ties throughout: experts 0 ... K-1
    return chosen_scores(logits, experts, score, renormalize, scale).masked_fill(~finite, torch.nan), experts


@_of_numpy_too
def topk_route_backward(
    logits: Tensor,
    experts: Tensor,
    d_scores: Tensor,
    *,
    score: str = "softmax_topk",
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: Any = None,
    stream: Any = None,
) -> Tensor:
    """d_logits (T, E) from d_scores (T, K)."""
    return _gradient(lambda values: chosen_scores(values, experts, score, renormalize, scale), logits, d_scores)


@_of_numpy_too
def score_pairs(
    logits: Tensor,
    pair_experts: Tensor,
    token_offsets: Tensor,
    *,
    score: str = "softmax_topk",
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: Any = None,
    stream: Any = None,
) -> Tensor:
    """scores (P,) of a list of pairs."""
    return pair_scores(logits, pair_experts, token_offsets, score, renormalize, scale)


@_of_numpy_too
def score_pairs_backward(
    logits: Tensor,
    pair_experts: Tensor,
    token_offsets: Tensor,
    d_scores: Tensor,
    *,
    score: str = "softmax_topk",
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: Any = None,
    stream: Any = None,
) -> Tensor:
    """d_logits (T, E) from d_scores (P,)."""
    options = pair_experts, token_offsets, score, renormalize, scale

    def gradient(d_scores: Tensor) -> Tensor:
        return vjp(lambda values: pair_scores(values, *options), logits, d_scores)

    d_logits = gradient(d_scores)
    alone = score_named(score).elementwise and not sums_to_one(score, renormalize)
    # What broken logits make NaN is 0; a NaN in d_scores shows, but where a score depends on one logit alone.
    broken = d_logits if alone else gradient(torch.ones_like(d_scores))
    return d_logits.masked_fill(broken.isnan(), 0)


# --- Choices -----------------------------------------------------------------------------------------------------------------


@_of_numpy_too
def choose_pairs(
    scores: Tensor,
    experts: Tensor,
    by: str,
    size: int,
    max_pairs: int,
    *,
    draws: Tensor | None = None,
    out: Any = None,
    stream: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """pair_experts (P,), pair_tokens (P,), token_offsets (T + 1,) and load (E,), int32."""
    return pairs_of(varying_choice(by).mask(scores, experts, draws, by, [], size), max_pairs)


def pairs_of(mask: Tensor, max_pairs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The True entries of a (T, E) mask as a flat list of pairs, by token, ascending expert id inside one.

    Returns pair_experts (P,), pair_tokens (P,), token_offsets (T + 1,) and load (E,), the tokens of each expert, int32. P is
    ``max_pairs``, a host number, so no shape depends on the mask. Pairs that the mask does not fill come last, with expert -1
    and token 0; what lies beyond P is left out.
    """
    num_tokens, num_experts = mask.shape
    seen = mask.flatten().cumsum(0, dtype=torch.int32)  # (T*E,) how many pairs up to and with this entry
    wanted = torch.arange(1, max_pairs + 1, dtype=torch.int32, device=mask.device)
    entry = torch.searchsorted(seen, wanted)  # (P,) the first entry that has seen p + 1 pairs
    used = entry < num_tokens * num_experts
    pair_experts = torch.where(used, entry % num_experts, -1).to(torch.int32)
    pair_tokens = torch.where(used, entry // num_experts, 0).to(torch.int32)
    token_offsets = F.pad(mask.sum(dim=1).cumsum(0).clamp(max=max_pairs), (1, 0)).to(torch.int32)
    return pair_experts, pair_tokens, token_offsets, mask.sum(dim=0, dtype=torch.int32)


@_of_numpy_too
def hash_route(
    token_ids: Tensor, num_experts: int, top_k: int, *, seed: int = 0, out: Any = None, stream: Any = None
) -> Tensor:
    """experts (T, K) int32 of token_ids (T,)."""
    return Hash(seed)(token_ids, num_experts, top_k)


# --- The load and the losses -------------------------------------------------------------------------------------------------


def expert_load(experts: Tensor, num_experts: int) -> Tensor:
    """How many pairs each expert has: experts of any shape, ids outside [0, E) not counted; returns (E,) int32."""
    ids = experts.flatten().long()
    # One more bin takes the sentinels. (torch.bincount would ask the device for the largest id.)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    load = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    return load.scatter_add(0, ids, torch.ones_like(ids, dtype=torch.int32))[:num_experts]


Counted = tuple[Tensor, Tensor]
"""Which tokens have a part in the losses, (T,) bool, and their number ()."""


def _mean(values: Tensor, counted: Counted | None) -> Tensor:
    """Over the tokens, the first dimension."""
    if counted is None:
        return values.sum(dim=0) / max(len(values), 1)
    which, number = counted
    return values.where(which.unflatten(0, (-1, *[1] * (values.dim() - 1))), 0).sum(dim=0) / number.clamp(min=1)


def load_balancing_loss(
    logits: Tensor, load: Tensor, top_k: int, score: str = "softmax_topk", counted: Counted | None = None
) -> Tensor:
    """E * sum_e f_e P_e: Switch Transformer eq. 4 without its coefficient; 1 when the load (E,) is even.

    f_e is the fraction of the T*K choices that fell on expert e (eq. 5, for any K), P_e the mean router probability (eq. 6).
    Elementwise scores are first divided by their sum (DeepSeek-V3 §2.1.2). The gradient flows through P alone. Returns a
    scalar; zero for T = 0.
    counted: the tokens that have a part in it, and T, their number; default: all.
    """
    num_tokens, num_experts = logits.shape
    probabilities = score_named(score).logarithm(logits).softmax(dim=1)
    pairs = max(num_tokens * top_k, 1) if counted is None else load.sum().clamp(min=1)
    return num_experts * (load.to(logits.dtype) / pairs * _mean(probabilities, counted)).sum()


def z_loss(logits: Tensor, counted: Counted | None = None) -> Tensor:
    """The mean over the counted tokens of logsumexp(logits)²: ST-MoE eq. 5 without its coefficient. Scalar; zero for T = 0."""
    return _mean(torch.logsumexp(logits, dim=1).square(), counted)


@_of_numpy_too
def routing_losses(
    logits: Tensor,
    experts: Tensor,
    *,
    score: str = "softmax_topk",
    balance: bool = True,
    z: bool = True,
    masked: bool = False,
    out: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """load (E,) int32 and the two losses, of the logits' dtype; 0 where one is not asked for."""
    load = expert_load(experts, logits.shape[1])
    options = score, balance, z, experts[:, 0] >= 0 if masked else None
    return load, *_losses(logits.masked_fill(~_finite(logits), torch.nan), load, experts.shape[1], *options)


def _losses(
    logits: Tensor, load: Tensor, top_k: int, score: str, balance: bool, z: bool, which: Tensor | None
) -> tuple[Tensor, Tensor]:
    counted = None if which is None else (which, load.sum() // top_k)
    balance_loss = load_balancing_loss(logits, load, top_k, score, counted) if balance else logits.new_zeros(())
    return balance_loss, z_loss(logits, counted) if z else logits.new_zeros(())


@_of_numpy_too
def routing_losses_backward(
    logits: Tensor,
    load: Tensor,
    d_balance_loss: Tensor,
    d_z_loss: Tensor,
    top_k: int,
    *,
    score: str = "softmax_topk",
    balance: bool = True,
    z: bool = True,
    masked: bool = False,
    out: Any = None,
    stream: Any = None,
) -> Tensor:
    """d_logits (T, E) from the gradients () of the two losses."""
    options = load, top_k, score, balance, z, _finite(logits)[:, 0] if masked else None
    return _gradient(lambda values: _losses(values, *options), logits, (d_balance_loss, d_z_loss))


# --- The linear map ----------------------------------------------------------------------------------------------------------


@_of_numpy_too
def logits_product(x: Tensor, weight: Tensor, parts: int = 1, *, out: Any = None, stream: Any = None) -> Tensor:
    """x (T, d) times the sum of the weight's parts (parts, E, d), in fp32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) @ weight.to(wide).unflatten(0, (parts, -1)).sum(dim=0).t()


@_of_numpy_too
def finish_logits(products: Tensor, *, stream: Any = None) -> Tensor:
    """logits (T, E), always new; a token with a NaN or infinite one gets NaN throughout."""
    return products.masked_fill(~_finite(products), torch.nan)


@_of_numpy_too
def split_gradient(d_logits: Tensor, logits: Tensor, parts: int = 2, *, out: Any = None, stream: Any = None) -> Tensor:
    """(T, parts E) bf16: what is nearest to the gradient, the rest, and the first again."""
    values = d_logits.float().masked_fill(logits[:, :1].isnan(), 0)
    high = values.bfloat16()
    low = (values - high.float()).bfloat16()
    return torch.cat((high, low, high)[:parts], dim=1)
