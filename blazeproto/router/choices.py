"""Ways of choosing experts beyond a token's own top K.

Each is a frozen dataclass of options. Those whose number of experts varies from token to token are called with the
scores (T, E) and the token choice (T, K) and return a mask (T, E) of the pairs that run; `max_pairs` bounds their
number from host integers alone, so every shape is known before a kernel runs and nothing waits for the device.

All in plain torch, for any device and dtype. `Router` calls the operators of `pair_ops`, which choose the same by kernels
(`choose_pairs`, `hash_route`) where these run.

    TokenRounding    token choice, each expert's count rounded to a multiple of the kernel's tile   SonicMoE §5
    ExpertChoice     every expert takes the same number of tokens, its best                         Zhou et al. 2022
    Capacity         token choice, what overflows an expert's capacity is dropped                   GShard, Switch
    Hash             a fixed pseudo-random function of the token id                                 Roller et al. 2021
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, get_args

import torch
from torch import Tensor

from blazeproto.router.hashing import GOLDEN, MASK_32, start_of
from blazeproto.router.kinds import DRAWING_RULES, RULES, Priority, RoundingRule
from blazeproto.router.ops import choose_top_k
from blazeproto.runtime import checks

_WORDS, _WIDE_WORDS = (torch.float32, torch.int32, 30), (torch.float64, torch.int64, 62)


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


def choose_mask(scores: Tensor, experts: Tensor, by: str, size: int, draws: Tensor | None = None) -> Tensor:
    """The mask (T, E) of the pairs that run, of scores (T, E) and the token choice (T, K).

    by: a rule of `TokenRounding` (``size`` is the tile), "expert_choice" (``size`` tokens each expert), or a priority of
    `Capacity` (``size`` tokens an expert at most). draws (E,): see `rounded_counts`.
    """
    if by in RULES:
        return _rounding_mask(scores, experts, by, size, draws)
    if by == "expert_choice":
        keys = torch.where(scores.isnan(), torch.inf, scores)
        return keep_first(rank_tokens(keys), torch.full((scores.shape[1],), size, device=scores.device))
    return _capacity_mask(scores, experts, by, size)


# ---------------------------------------------------------------------------------------------------------------------
# Token rounding


def chosen_first_keys(scores: Tensor, chosen: Tensor) -> Tensor:
    """Algorithm 4 (3), S': keys (T, E) that rank the tokens that chose an expert first, by score in both parts.

    The paper subtracts one from the other tokens' scores in [0, 1]. Here the order is exact however small the scores:
    non-negative floating-point numbers sort like their bit patterns, which up to 1.0 leave the second highest bit free to
    say "chosen". A NaN token stands first where it chose (dropping it would hide the NaN) and last elsewhere.
    Returns int32, for float64 scores int64.
    """
    filled = torch.where(scores.isnan(), chosen.to(scores.dtype), scores)
    wide, word, free_bit = _WIDE_WORDS if scores.dtype == torch.float64 else _WORDS
    bits = filled.to(wide).contiguous().view(word)
    return bits + chosen.to(word) * (1 << free_bit)


def rounded_counts(
    counts: Tensor,
    tile: int,
    rule: str,
    *,
    num_tokens: int,
    sorted_scores: Tensor | None = None,
    draws: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``round_and_sparsify`` of Algorithm 4: each count rounded down or up to a multiple of the tile.

    counts (E,) integers: the tokens that chose each expert; sorted_scores (E, T), for ``nr_s`` alone: every expert's
    scores in the order of `chosen_first_keys`. Returns (E,) int64, each the multiple below or above its count.
    draws (E,) fp32 in [0, 1): what ``sr_f`` and ``nr_s`` compare with a probability; default: `draw` with the generator.
    Rules, SonicMoE appendix E.2 (M the tile, f the count):

    - ``nr_f``       up where that is nearer; down on a tie.
    - ``sr_f``       up with probability (f - floor) / M.
    - ``nr_s``       up with the probability of eq. 13, the share that the chosen tokens have in the last tile's scores.
    - ``balance_f``  Algorithm 6: up or down, so that the total stays within M / 2 of the sum of the counts (eq. 14).
    - ``up``, ``down``

    An expert cannot take more tokens than there are: where the multiple above passes T, every rule rounds down.
    """
    checks.one_of("rule", rule, RULES)
    if draws is None:
        draws = draw(counts.shape[0], counts.device, generator) if rule in DRAWING_RULES else counts.new_zeros(())
    counts = counts.to(torch.int64)
    floor = counts // tile * tile
    ceil = (counts + tile - 1) // tile * tile
    fits = ceil <= num_tokens
    if rule == "nr_f":
        up = ceil - counts < counts - floor
    elif rule == "sr_f":
        up = draws * tile < counts - floor
    elif rule == "nr_s":
        if sorted_scores is None:
            raise ValueError("rounded_counts: rule 'nr_s' needs sorted_scores (E, T), got None")
        place = torch.arange(num_tokens, device=counts.device)
        in_last_tile = (place >= floor[:, None]) & (place < ceil[:, None])
        last_tile = torch.where(in_last_tile, sorted_scores.detach().nan_to_num(), 0.0)
        total = last_tile.sum(dim=1)
        chosen = torch.where(place < counts[:, None], last_tile, 0.0).sum(dim=1)
        up = draws * total < chosen
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


def draw(num_experts: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """A number in [0, 1) for each expert, in fp32 whatever torch's default dtype is: in bf16 a probability of .999 is 1.

    generator: default: torch's for the device.
    """
    return torch.rand(num_experts, device=device, dtype=torch.float32, generator=generator)


def _rounding_mask(scores: Tensor, experts: Tensor, rule: str, tile: int, draws: Tensor | None) -> Tensor:
    """Algorithm 4: scores (T, E), experts (T, K) by token choice; returns the mask (T, E)."""
    num_tokens, num_experts = scores.shape
    chosen = choice_mask(experts, num_experts)
    order = rank_tokens(chosen_first_keys(scores, chosen))
    counts = rounded_counts(
        chosen.sum(dim=0),
        tile,
        rule,
        num_tokens=num_tokens,
        sorted_scores=scores.t().gather(1, order) if rule == "nr_s" else None,
        draws=draws,
    )
    return keep_first(order, counts)


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
        object.__setattr__(self, "tile", checks.integer("tile", self.tile, least=1))
        checks.one_of("rule", self.rule, RULES)
        checks.boolean("eval_top_k", self.eval_top_k)

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        padding = {  # the most rows that rounding can add
            "nr_f": num_experts * ((self.tile - 1) // 2),
            "balance_f": self.tile // 2,
            "down": 0,
        }.get(self.rule, num_experts * (self.tile - 1))
        return min(num_tokens * top_k + padding, num_tokens * num_experts)

    def __call__(self, scores: Tensor, experts: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """scores (T, E) in [0, 1], experts (T, K) by token choice; returns the mask (T, E) of the pairs that run.

        generator: what ``sr_f`` and ``nr_s`` draw from; default: torch's for the device.
        """
        draws = self.draws(scores.shape[1], scores.device, generator)
        by, size = self.way(scores.shape[0], scores.shape[1], experts.shape[1])
        return choose_mask(scores.detach(), experts, by, size, draws)

    def way(self, num_tokens: int, num_experts: int, top_k: int) -> tuple[str, int]:
        """``by`` and ``size`` of `choose_mask`."""
        return self.rule, self.tile

    def draws(self, num_experts: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor | None:
        """What the rule compares with a probability; None for one that draws nothing."""
        return draw(num_experts, device, generator) if self.rule in DRAWING_RULES else None


# ---------------------------------------------------------------------------------------------------------------------
# Capacities


def expert_capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Tokens per expert: factor times an even share of the T*K pairs, rounded up, at most T (Switch eq. 3).

    Exact: a float counts as the decimal that Python prints for it, so that 1.1 times 10 is 11. (The float nearest to 1.1 is
    a little larger, and would round up to 12.)
    """
    return ExpertChoice(factor).capacity(num_tokens, num_experts, top_k)


class _WithCapacity:
    """What `ExpertChoice` and `Capacity` share."""

    capacity_factor: float
    eval_top_k: bool
    _factor: tuple[int, int]  # the capacity factor's numerator and denominator

    def __post_init__(self) -> None:
        checks.number("capacity_factor", self.capacity_factor, above=0)
        checks.boolean("eval_top_k", self.eval_top_k)
        object.__setattr__(self, "_factor", Fraction(str(self.capacity_factor)).as_integer_ratio())

    def capacity(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        """`expert_capacity` with this choice's factor. In integers alone, which torch.compile can trace."""
        numerator, denominator = self._factor
        return min(num_tokens, -(-numerator * num_tokens * top_k // (denominator * num_experts)))


@dataclass(frozen=True)
class ExpertChoice(_WithCapacity):
    """Experts choose tokens: Zhou et al. 2022, "Mixture-of-experts with expert choice routing", §3.2.

    Each expert takes its ``capacity_factor * T * K / E`` best tokens by score, so the load is even by construction and
    a token gets from 0 to E experts. A token's experts depend on the tokens after it, which a causal language model
    may not know, so evaluation falls back to token choice unless ``eval_top_k`` is False (SonicMoE §2).
    """

    capacity_factor: float = 1.0
    eval_top_k: bool = True

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        return num_experts * self.capacity(num_tokens, num_experts, top_k)

    def __call__(self, scores: Tensor, experts: Tensor) -> Tensor:
        """scores (T, E), experts (T, K) of which only K counts; returns the mask (T, E). NaN tokens rank first."""
        by, size = self.way(scores.shape[0], scores.shape[1], experts.shape[1])
        return choose_mask(scores.detach(), experts, by, size)

    def way(self, num_tokens: int, num_experts: int, top_k: int) -> tuple[str, int]:
        """``by`` and ``size`` of `choose_mask`."""
        return "expert_choice", self.capacity(num_tokens, num_experts, top_k)


@dataclass(frozen=True)
class Capacity(_WithCapacity):
    """Token choice with at most ``capacity_factor * T * K / E`` tokens an expert; what overflows is dropped.

    GShard (Lepikhin et al. 2021) §2.2 and Switch Transformer (Fedus et al. 2022) §2.2. Who stays, by ``priority``:

    - ``slot``   all first choices before any second choice, by token within each (GShard Algorithm 1).
    - ``token``  by token; a token's choices together.
    - ``score``  all first choices before any second choice; within each, tokens by their largest score, ties to the lower
      token (batch prioritised routing: Riquelme et al. 2021, V-MoE §4.1, Algorithm 2). A NaN token comes first.
    """

    capacity_factor: float = 1.25
    priority: Priority = "slot"
    eval_top_k: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("priority", self.priority, get_args(Priority))

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        capacity = self.capacity(num_tokens, num_experts, top_k)
        return min(num_tokens * top_k, num_experts * capacity)

    def __call__(self, scores: Tensor, experts: Tensor) -> Tensor:
        """scores (T, E) in [0, 1], experts (T, K) by token choice; returns the mask (T, E) of the pairs that stay."""
        by, size = self.way(scores.shape[0], scores.shape[1], experts.shape[1])
        return choose_mask(scores.detach(), experts, by, size)

    def way(self, num_tokens: int, num_experts: int, top_k: int) -> tuple[str, int]:
        """``by`` and ``size`` of `choose_mask`."""
        return self.priority, self.capacity(num_tokens, num_experts, top_k)


def _capacity_mask(scores: Tensor, experts: Tensor, priority: str, capacity: int) -> Tensor:
    """scores (T, E), experts (T, K) by token choice; returns the mask (T, E) of the pairs that stay."""
    num_tokens, num_experts = scores.shape
    top_k = experts.shape[1]
    chosen = choice_mask(experts, num_experts)
    place = torch.arange(num_tokens, device=experts.device)  # of a token among all
    if priority == "score":
        largest = scores.amax(dim=1)
        largest = torch.where(largest.isnan(), torch.inf, largest)
        by_score = torch.sort(largest, descending=True, stable=True).indices
        place = torch.zeros_like(place).scatter(0, by_score, place)
    places = place[:, None].expand_as(experts)
    if priority != "token":
        places = places + num_tokens * torch.arange(top_k, device=experts.device)
    keys = torch.full_like(chosen, -num_tokens * top_k, dtype=torch.int64).scatter(1, experts.long(), -places)
    return keep_first(rank_tokens(keys), chosen.sum(dim=0).clamp(max=capacity))


# ---------------------------------------------------------------------------------------------------------------------
# Hash


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64) that scatters them: xor-shift-multiply, no product passes 2**63."""
    x = x & MASK_32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK_32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK_32
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checks.integer("seed", self.seed))

    def __call__(self, token_ids: Tensor, num_experts: int, top_k: int) -> Tensor:
        """K distinct experts of each token id: token_ids (T,) integers; returns (T, K) int32."""
        expert = torch.arange(num_experts, device=token_ids.device)
        words = _mix(token_ids.long() + start_of(self.seed))[:, None] + GOLDEN * expert
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
    check_options(name, options)
    return None if name == "top_k" else CHOICES[name](**options)


def check_options(name: str, options: Iterable[str], keywords: Iterable[str] = ()) -> None:
    """ValueError unless there is a choice of this name, TypeError for an option that it does not take.

    keywords: further names that may have been meant, those of `Router`.
    """
    checks.one_of("choose", name, ("top_k", *CHOICES))
    options_of = {other: [field.name for field in fields(kind)] for other, kind in CHOICES.items()} | {"top_k": []}
    for option in options:
        if option in options_of[name]:
            continue
        owner = next((other for other, names in options_of.items() if option in names), None)
        hint = f"; choose={owner!r} takes it" if owner else checks.nearest(option, [*options_of[name], *keywords])
        takes = f"the options {', '.join(options_of[name])}" if options_of[name] else "no options"
        raise TypeError(f"{option}: unknown keyword (choose={name!r} takes {takes}){hint}")
