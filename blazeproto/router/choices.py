"""Ways of choosing experts beyond a token's own top K.

Each is a frozen dataclass of options. Those whose number of experts varies from token to token are called with the
scores (T, E) and the token choice (T, K) and return a mask (T, E) of the pairs that run; `max_pairs` bounds their
number from host integers alone, so every shape is known before a kernel runs and nothing waits for the device.

    TokenRounding    token choice, each expert's count rounded to a multiple of the kernel's tile   SonicMoE §5
    ExpertChoice     every expert takes the same number of tokens, its best                         Zhou et al. 2022
    Capacity         token choice, what overflows an expert's capacity is dropped                   GShard, Switch
    Hash             a fixed pseudo-random function of the token id                                 Roller et al. 2021
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from blazeproto.router.ops import choose_top_k
from blazeproto.runtime import checks

RoundingRule = Literal["nr_f", "sr_f", "nr_s", "balance_f", "up", "down"]
Priority = Literal["slot", "token", "score"]

_MASK_32 = 0xFFFFFFFF


# ---------------------------------------------------------------------------------------------------------------------
# Two steps that the choices share: rank the tokens of each expert, keep the first so many


def rank_tokens(keys: Tensor) -> Tensor:
    """Each expert's tokens from the largest key to the smallest, ties to the lower token.

    keys (T, E), any ordered dtype; returns (E, T) int64: element (e, i) is expert e's i-th token.
    """
    return torch.sort(keys.t().contiguous(), dim=1, descending=True, stable=True).indices


def keep_first(order: Tensor, counts: Tensor) -> Tensor:
    """The mask (T, E) of the first counts[e] tokens of each row of ``order`` (E, T); counts (E,) integers."""
    num_tokens = order.shape[1]
    kept = torch.arange(num_tokens, device=order.device) < counts[:, None]  # (E, T) by place
    return torch.zeros_like(kept).scatter(1, order, kept).t()  # by token


def choice_mask(experts: Tensor, num_experts: int) -> Tensor:
    """Token choice (T, K) as a mask (T, E)."""
    mask = torch.zeros(experts.shape[0], num_experts, dtype=torch.bool, device=experts.device)
    return mask.scatter(1, experts.long(), True)


# ---------------------------------------------------------------------------------------------------------------------
# Token rounding


def chosen_first_keys(scores: Tensor, chosen: Tensor) -> Tensor:
    """Algorithm 4 (3), S': keys (T, E) that rank the tokens that chose an expert first, by score in both parts.

    The paper subtracts one from the other tokens' scores in [0, 1]. Here the order is exact however small the scores:
    non-negative fp32 numbers sort like their bit patterns, which up to 1.0 leave bit 30 free to say "chosen".
    A NaN token stands first where it chose (dropping it would hide the NaN) and last elsewhere. Returns int32.
    """
    filled = torch.where(scores.isnan(), chosen.to(scores.dtype), scores)
    bits = filled.to(torch.float32).contiguous().view(torch.int32)
    return bits + chosen.to(torch.int32) * (1 << 30)


def rounded_counts(
    counts: Tensor,
    tile: int,
    rule: str,
    *,
    num_tokens: int,
    sorted_scores: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``round_and_sparsify`` of Algorithm 4: each count rounded down or up to a multiple of the tile.

    counts (E,) integers: the tokens that chose each expert; sorted_scores (E, T), for ``nr_s`` alone: every expert's
    scores in the order of `chosen_first_keys`. Returns (E,) int64, each the multiple below or above its count.
    Rules, SonicMoE appendix E.2 (M the tile, f the count):

    - ``nr_f``       up where that is nearer; down on a tie.
    - ``sr_f``       up with probability (f - floor) / M.
    - ``nr_s``       up with the probability of eq. 13, the share that the chosen tokens have in the last tile's scores.
    - ``balance_f``  Algorithm 6: up or down, so that the total stays within M / 2 of the sum of the counts (eq. 14).
    - ``up``, ``down``

    An expert cannot take more tokens than there are: where the multiple above passes T, every rule rounds down.
    """
    checks.one_of("rule", rule, get_args(RoundingRule))
    counts = counts.to(torch.int64)
    floor = counts // tile * tile
    ceil = (counts + tile - 1) // tile * tile
    fits = ceil <= num_tokens
    if rule == "nr_f":
        up = ceil - counts < counts - floor
    elif rule == "sr_f":
        draw = torch.rand(counts.shape, device=counts.device, generator=generator)
        up = draw * tile < counts - floor
    elif rule == "nr_s":
        if sorted_scores is None:
            raise ValueError("rounded_counts: rule 'nr_s' needs sorted_scores (E, T), got None")
        place = torch.arange(num_tokens, device=counts.device)
        in_last_tile = (place >= floor[:, None]) & (place < ceil[:, None])
        last_tile = torch.where(in_last_tile, sorted_scores.detach().nan_to_num(), 0.0)
        total = last_tile.sum(dim=1)
        chosen = torch.where(place < counts[:, None], last_tile, 0.0).sum(dim=1)
        draw = torch.rand(counts.shape, device=counts.device, generator=generator)
        up = draw * total < chosen
    elif rule == "balance_f":
        # Algorithm 6 keeps an accumulator z of the rounding errors and takes the choice that leaves |z| smaller. Since
        # z + (sum of counts so far) is then the multiple of M nearest to that sum (the lower one on a tie), rounding
        # the running sum and taking differences gives the same counts without a loop over the experts.
        running = torch.where(fits, counts, floor).cumsum(0)
        nearest = (running + (tile - 1) // 2) // tile * tile
        up = torch.diff(nearest, prepend=nearest.new_zeros(1)) > floor
    else:
        up = torch.full_like(fits, rule == "up")
    return torch.where(up & fits, ceil, floor)


@dataclass(frozen=True)
class TokenRounding:
    """Token choice rounded to whole tiles: SonicMoE §5.2, Algorithm 4.

    Every expert's token count becomes a multiple of ``tile`` (rows of the kernel's M tile) that is less than one tile
    away from token choice: the expert's lowest-scored tokens leave, or the best of the tokens that did not choose it
    come. Works on the micro-batch; the paper advises at least two tiles an expert on average (appendix E.3).
    """

    tile: int = 128
    rule: RoundingRule = "nr_f"
    eval_top_k: bool = True  # §6.3.1: plain token choice when not training

    def __post_init__(self) -> None:
        checks.integer("tile", self.tile, least=1)
        checks.one_of("rule", self.rule, get_args(RoundingRule))

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        padding = {  # the most rows that rounding can add
            "nr_f": num_experts * ((self.tile - 1) // 2),
            "balance_f": self.tile // 2,
            "down": 0,
        }.get(self.rule, num_experts * (self.tile - 1))
        return min(num_tokens * top_k + padding, num_tokens * num_experts)

    def __call__(self, scores: Tensor, experts: Tensor) -> Tensor:
        """scores (T, E) in [0, 1], experts (T, K) by token choice; returns the mask (T, E) of the pairs that run."""
        scores = scores.detach()
        num_tokens, num_experts = scores.shape
        chosen = choice_mask(experts, num_experts)
        order = rank_tokens(chosen_first_keys(scores, chosen))
        sorted_scores = scores.t().gather(1, order) if self.rule == "nr_s" else None
        counts = chosen.sum(dim=0)
        counts = rounded_counts(counts, self.tile, self.rule, num_tokens=num_tokens, sorted_scores=sorted_scores)
        return keep_first(order, counts)


# ---------------------------------------------------------------------------------------------------------------------
# Capacities


def expert_capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Tokens per expert: factor times an even share of the T*K pairs, rounded up, at most T (Switch eq. 3)."""
    return min(num_tokens, math.ceil(factor * num_tokens * top_k / num_experts))


@dataclass(frozen=True)
class ExpertChoice:
    """Experts choose tokens: Zhou et al. 2022, "Mixture-of-experts with expert choice routing", §3.2.

    Each expert takes its ``capacity_factor * T * K / E`` best tokens by score, so the load is even by construction and
    a token gets from 0 to E experts. A token's experts depend on the tokens after it, which a causal language model
    may not know, so evaluation falls back to token choice unless ``eval_top_k`` is False (SonicMoE §2).
    """

    capacity_factor: float = 1.0
    eval_top_k: bool = True

    def __post_init__(self) -> None:
        _check_positive("capacity_factor", self.capacity_factor)

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        return num_experts * expert_capacity(num_tokens, num_experts, top_k, self.capacity_factor)

    def __call__(self, scores: Tensor, experts: Tensor) -> Tensor:
        """scores (T, E), experts (T, K) of which only K counts; returns the mask (T, E). NaN tokens rank first."""
        num_tokens, num_experts = scores.shape
        keys = scores.detach()
        keys = torch.where(keys.isnan(), torch.inf, keys)
        capacity = expert_capacity(num_tokens, num_experts, experts.shape[1], self.capacity_factor)
        counts = torch.full((num_experts,), capacity, device=scores.device)
        return keep_first(rank_tokens(keys), counts)


@dataclass(frozen=True)
class Capacity:
    """Token choice with at most ``capacity_factor * T * K / E`` tokens an expert; what overflows is dropped.

    GShard (Lepikhin et al. 2021) §2.2 and Switch Transformer (Fedus et al. 2022) §2.2. Who stays, by ``priority``:

    - ``slot``   all first choices before any second choice, by token within each (GShard Algorithm 1).
    - ``token``  by token; a token's choices together.
    - ``score``  the highest scores (batch prioritised routing, Riquelme et al. 2021, V-MoE §4.1).
    """

    capacity_factor: float = 1.25
    priority: Priority = "slot"
    eval_top_k: bool = False

    def __post_init__(self) -> None:
        _check_positive("capacity_factor", self.capacity_factor)
        checks.one_of("priority", self.priority, get_args(Priority))

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        capacity = expert_capacity(num_tokens, num_experts, top_k, self.capacity_factor)
        return min(num_tokens * top_k, num_experts * capacity)

    def __call__(self, scores: Tensor, experts: Tensor) -> Tensor:
        """scores (T, E) in [0, 1], experts (T, K) by token choice; returns the mask (T, E) of the pairs that stay."""
        num_tokens, num_experts = scores.shape
        top_k = experts.shape[1]
        chosen = choice_mask(experts, num_experts)
        if self.priority == "slot":
            slot = torch.arange(top_k, device=experts.device).expand_as(experts)
            keys = torch.full_like(chosen, -top_k, dtype=torch.int64).scatter(1, experts.long(), -slot)
        elif self.priority == "token":
            keys = chosen.to(torch.int32)
        else:
            keys = chosen_first_keys(scores.detach(), chosen)
        capacity = expert_capacity(num_tokens, num_experts, top_k, self.capacity_factor)
        return keep_first(rank_tokens(keys), chosen.sum(dim=0).clamp(max=capacity))


# ---------------------------------------------------------------------------------------------------------------------
# Hash


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64) that scatters them: xor-shift-multiply, no product passes 2**63."""
    x = x & _MASK_32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK_32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK_32
    return x ^ (x >> 15)


@dataclass(frozen=True)
class Hash:
    """Experts by a hash of the token id, the same at any place and in any batch: Roller et al. 2021, "Hash layers", §3.1.

    The ids come from the model (``token_ids=``), or are positions. The router still learns the scores of the experts
    that the hash picks; with K = 1 and ``topk_softmax`` the score is one, which is the paper's layer.

    Highest-random-weight hashing: every (id, expert) gets a pseudo-random 24-bit weight, and the K largest win (ties to the
    lower expert). That is even over the experts for any E and K and needs no table the size of the vocabulary.
    """

    seed: int = 0

    def __call__(self, token_ids: Tensor, num_experts: int, top_k: int) -> Tensor:
        """K distinct experts of each token id: token_ids (T,) integers; returns (T, K) int32."""
        expert = torch.arange(num_experts, device=token_ids.device)
        start = 0x9E3779B9 * (self.seed + 1) & _MASK_32
        words = _mix(token_ids.long() + start)[:, None] + 0x9E3779B9 * expert
        weights = (_mix(words) >> 8).to(torch.float32)  # (T, E), exact below 2**24
        experts: Tensor = choose_top_k(weights, top_k)
        return experts


# ---------------------------------------------------------------------------------------------------------------------
# By name

Choice = TokenRounding | ExpertChoice | Capacity | Hash
CHOICES: dict[str, type[Choice]] = {
    "token_rounding": TokenRounding,
    "expert_choice": ExpertChoice,
    "capacity": Capacity,
    "hash": Hash,
}


def make_choice(name: str, **options: Any) -> Choice | None:
    """The choice of this name, with its options; None for ``"top_k"``, which has none."""
    if name == "top_k":
        if options:
            raise TypeError(f"choose='top_k' takes no options, got {sorted(options)}")
        return None
    checks.one_of("choose", name, ("top_k", *CHOICES))
    kind = CHOICES[name]
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"choose={name!r} takes the options {sorted(known)}, got {unknown}")
    return kind(**options)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, got {value}")
