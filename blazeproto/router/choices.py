"""Ways of choosing experts beyond a token's own top K, in plain torch, for any device and dtype.

Each is a frozen dataclass of options; choice.py has what they share. `Router` calls operators (ops.py), which choose the same by
kernels where these run.

    TokenRounding    token choice, each expert's count rounded to a multiple of the kernel's tile   SonicMoE §5
    ExpertChoice     every expert takes the same number of tokens, its best                         Zhou et al. 2022
    Capacity         token choice, what overflows an expert's capacity is dropped                   GShard, Switch
    Hash             a fixed pseudo-random function of the token id                                 Roller et al. 2021
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from blazeproto.router.choice import VaryingChoice, by_expert, choice_mask, keep_first, rank_tokens
from blazeproto.router.kinds import GOLDEN, MASK_32, RULES, Priority, RoundingRule
from blazeproto.runtime import checks

# ---------------------------------------------------------------------------------------------------------------------
# Token rounding


@dataclass(frozen=True)
class TokenRounding(VaryingChoice):
    """Token choice rounded to whole tiles: SonicMoE §5.2, Algorithm 4.

    Every expert's token count becomes a multiple of ``tile`` (rows of the kernel's M tile) that is less than one tile
    away from token choice: the expert's lowest-scored tokens leave, or the best of the tokens that did not choose it
    come. Works on the micro-batch; the paper advises at least two tiles an expert on average (appendix E.3). If T is below
    a tile, or T K / E below half of one, most experts would round to no token at all: then every pair is kept as it is.
    """

    WAYS = RULES
    KERNELS = "blazeproto.router.pairs"
    RENORMALIZES = True  # SonicMoE §6.3.1
    DROPS = True
    tile: int = 128
    rule: RoundingRule = "nr_f"
    eval_top_k: bool = True  # §6.3.1: plain token choice when not training

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile", checks.integer("tile", self.tile, least=1))
        checks.one_of("rule", self.rule, RULES)
        checks.boolean("eval_top_k", self.eval_top_k)

    @property
    def by(self) -> str:
        return self.rule

    def size(self, num_tokens: Any, num_experts: int, top_k: int) -> Any:
        """The tile; 1, of which every count is a multiple, where rounding makes no sense. In integers alone, which torch.compile
        can trace."""
        halves, tiles = 2 * top_k * num_tokens // (self.tile * num_experts), num_tokens // self.tile
        whole = halves * tiles  # 0 where either is
        return 1 + (self.tile - 1) * -(-whole // (whole + 1))  # the quotient rounded up: 0 or 1

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        tile = self.size(num_tokens, num_experts, top_k)
        padding = {  # the most rows that rounding can add
            "nr_f": num_experts * ((tile - 1) // 2),
            "balance_f": tile // 2,
            "down": 0,
        }.get(self.rule, num_experts * (tile - 1))
        return min(num_tokens * top_k + padding, num_tokens * num_experts)

    def warn_of_few(self, num_tokens: int, num_experts: int, top_k: int) -> None:
        """A warning, once a process, where nothing is rounded."""
        if self.tile > 1 and num_tokens and self.size(num_tokens, num_experts, top_k) == 1:
            checks.warn_once(
                f"tile: expected T of at least {self.tile}, and T * K / E of at least half as many, to round to tiles with "
                f"E={num_experts} and K={top_k}; a batch of fewer tokens keeps all its pairs, and nothing is rounded"
            )

    @staticmethod
    def mask(scores: Tensor, experts: Tensor, draws: Tensor | None, by: str, options: list[float], size: int) -> Tensor:
        """Algorithm 4. by: the rule; size: the tile."""
        chosen = choice_mask(experts, scores.shape[1])
        order = rank_tokens(chosen_first_keys(scores, chosen))
        ranked = scores.t().gather(1, order) if by == "nr_s" else None
        num_tokens = (experts[:, 0] >= 0).sum()  # that are not masked
        counts = rounded_counts(chosen.sum(dim=0), size, by, num_tokens=num_tokens, sorted_scores=ranked, draws=draws)
        return keep_first(order, counts)


def chosen_first_keys(scores: Tensor, chosen: Tensor) -> Tensor:
    """Algorithm 4 (3), S': keys (T, E) that rank the tokens that chose an expert first, by score in both parts.

    The paper subtracts one from the other tokens' scores in [0, 1]. Here the order is exact however small the scores:
    non-negative floating-point numbers sort like their bit patterns, which up to 1.0 leave the second highest bit free to
    say "chosen". A NaN token stands first where it chose (dropping it would hide the NaN) and last elsewhere.
    Returns int32, for float64 scores int64.
    """
    filled = torch.where(scores.isnan(), chosen.to(scores.dtype), scores)
    double = scores.dtype == torch.float64
    wide, word, free_bit = (torch.float64, torch.int64, 62) if double else (torch.float32, torch.int32, 30)
    bits = filled.to(wide).contiguous().view(word)
    return bits + chosen.to(word) * (1 << free_bit)


def rounded_counts(
    counts: Tensor,
    tile: int,
    rule: str,
    *,
    num_tokens: Any,
    sorted_scores: Any = None,
    draws: Any = None,
) -> Tensor:
    """``round_and_sparsify`` of Algorithm 4: each count rounded down or up to a multiple of the tile.

    counts (E,) integers: the tokens that chose each expert; sorted_scores (E, T), for ``nr_s`` alone: every expert's
    scores in the order of `chosen_first_keys`. Returns (E,) int64, each the multiple below or above its count.
    draws (E,) fp32 in [0, 1): what ``sr_f`` and ``nr_s``, which need them, compare with a probability.
    Rules, SonicMoE appendix E.2 (M the tile, f the count):

    - ``nr_f``       up where that is nearer; down on a tie.
    - ``sr_f``       up with probability (f - floor) / M.
    - ``nr_s``       up with the probability of eq. 13, the share that the chosen tokens have in the last tile's scores.
    - ``balance_f``  Algorithm 6: up or down, so that the total stays within M / 2 of the sum of the counts (eq. 14).
    - ``up``, ``down``

    An expert cannot take more than T tokens: where the multiple above passes T, every rule rounds down.
    """
    counts = counts.to(torch.int64)
    floor = counts // tile * tile
    ceil = (counts + tile - 1) // tile * tile
    fits = ceil <= num_tokens
    if rule == "nr_f":
        up = ceil - counts < counts - floor
    elif rule == "sr_f":
        up = draws * tile < counts - floor
    elif rule == "nr_s":
        place = torch.arange(sorted_scores.shape[1], device=counts.device)
        in_last_tile = (place >= floor[:, None]) & (place < ceil[:, None])
        last_tile = torch.where(in_last_tile, sorted_scores.nan_to_num(), 0.0)
        of_chosen = torch.where(place < counts[:, None], last_tile, 0.0)
        chosen, total = (t.sum(dim=1, dtype=torch.float64).to(t.dtype) for t in (of_chosen, last_tile))
        up = draws * total < chosen
    elif rule == "balance_f":
        # Algorithm 6 keeps an accumulator z of the rounding errors and takes the choice that leaves |z| smaller. Since
        # z + (sum of counts so far) is then the multiple of M nearest to that sum (the lower one on a tie), rounding
        # the running sum and taking differences gives the same counts without a loop over the experts.
        running = torch.where(fits, counts, floor).cumsum(0)
        nearest = (running + (tile - 1) // 2) // tile * tile
        up = torch.diff(nearest, prepend=nearest.new_zeros(1)) > floor
    else:
        checks.one_of("rule", rule, RULES)
        up = torch.full_like(fits, rule == "up")
    return torch.where(up & fits, ceil, floor)


# ---------------------------------------------------------------------------------------------------------------------
# Capacities


FINEST = (
    10**6
)  # denominator of a factor: then a number of tokens times it fits 64 bits, where masks count on the device


class WithCapacity(VaryingChoice):
    """One by which an expert takes ``capacity_factor * T * K / E`` tokens, or at most as many."""

    KERNELS = "blazeproto.router.pairs"
    capacity_factor: float
    _factor: tuple[int, int]  # its numerator and denominator

    def __post_init__(self) -> None:
        checks.number("capacity_factor", self.capacity_factor, above=0)
        checks.boolean("eval_top_k", self.eval_top_k)
        nearest = Fraction(str(self.capacity_factor)).limit_denominator(FINEST)
        object.__setattr__(self, "_factor", max(nearest, Fraction(1, FINEST)).as_integer_ratio())

    def size(self, num_tokens: Any, num_experts: int, top_k: int) -> Any:
        """Tokens per expert: factor times an even share of the T*K pairs, rounded up, at most T (Switch eq. 3).

        Exact: a float counts as the nearest fraction over at most `FINEST`, so that 1.1 times 10 is 11 and 4/3 times 3 is 4. (The
        float nearest to 1.1 is a little larger, and would round up to 12.) In integers alone, which torch.compile can trace.
        """
        numerator, denominator = self._factor[0] * top_k, self._factor[1] * num_experts  # of the share of T
        return num_tokens if numerator >= denominator else -(-numerator * num_tokens // denominator)


@dataclass(frozen=True)
class ExpertChoice(WithCapacity):
    """Every expert takes its best tokens by score, the same number each: Zhou et al. 2022, §3.2.

    That number is ``capacity_factor * T * K / E``, so the load is even by construction and a token gets from 0 to E experts.
    A token's experts depend on the tokens after it, which a causal language model may not know, so evaluation falls back to
    token choice unless ``eval_top_k`` is False (SonicMoE §2). NaN tokens rank first.
    """

    WAYS = ("expert_choice",)
    LOAD_IS_CHOSEN = True
    capacity_factor: float = 1.0
    eval_top_k: bool = True

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        return num_experts * self.size(num_tokens, num_experts, top_k)

    @staticmethod
    def mask(scores: Tensor, experts: Tensor, draws: Tensor | None, by: str, options: list[float], size: int) -> Tensor:
        """size: the tokens of each expert, in which the token choice counts by its K alone."""
        keys = torch.where(scores.isnan(), torch.inf, scores)
        return keep_first(
            rank_tokens(keys), torch.zeros(scores.shape[1], dtype=torch.int64, device=scores.device) + size
        )


@dataclass(frozen=True)
class Capacity(WithCapacity):
    """Token choice with at most ``capacity_factor * T * K / E`` tokens an expert; what overflows is dropped.

    GShard (Lepikhin et al. 2021) §2.2 and Switch Transformer (Fedus et al. 2022) §2.2. ``priority`` orders the pairs that stay:

    - ``slot``   all first choices before any second choice, by token within each (GShard Algorithm 1).
    - ``token``  by token; a token's choices together.
    - ``score``  all first choices before any second choice; within each, tokens by their largest score, ties to the lower
      token (batch prioritised routing: Riquelme et al. 2021, V-MoE §4.1, Algorithm 2). A NaN token comes first.
    """

    WAYS = get_args(Priority)
    DROPS = True
    capacity_factor: float = 1.25
    priority: Priority = "slot"
    eval_top_k: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("priority", self.priority, self.WAYS)

    @property
    def by(self) -> str:
        return self.priority

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        return min(num_tokens * top_k, num_experts * self.size(num_tokens, num_experts, top_k))

    @staticmethod
    def mask(scores: Tensor, experts: Tensor, draws: Tensor | None, by: str, options: list[float], size: int) -> Tensor:
        """size: the capacity."""
        (num_tokens, num_experts), top_k = scores.shape, experts.shape[1]
        place = torch.arange(num_tokens, device=experts.device)  # of a token among all
        if by == "score":
            largest = torch.where(scores.isnan(), torch.inf, scores).amax(dim=1)
            by_score = torch.sort(largest, descending=True, stable=True).indices
            place = torch.zeros_like(place).scatter(0, by_score, place)
        places = place[:, None].expand_as(experts)
        if by != "token":
            places = places + num_tokens * torch.arange(top_k, device=experts.device)
        keys = by_expert(experts, num_experts, -places, -num_tokens * top_k)
        return keep_first(rank_tokens(keys), choice_mask(experts, num_experts).sum(dim=0).clamp(max=size))


# ---------------------------------------------------------------------------------------------------------------------
# Hash


@dataclass(frozen=True)
class Hash:
    """Experts by a hash of the token id, the same at any place and in any batch: Roller et al. 2021, "Hash layers", §3.1.

    The ids come from the model (``token_ids=``), or are positions. The router still learns the scores of the experts
    that the hash picks; with K = 1 and ``topk_softmax`` the score is one, which is the paper's layer.

    Highest-random-weight hashing: every (id, expert) gets a pseudo-random 24-bit weight, and the K largest win (ties to the
    lower expert). That is even over the experts for any E and K and needs no table the size of the vocabulary.
    """

    RENORMALIZES: ClassVar[bool] = False
    LOAD_IS_CHOSEN: ClassVar[bool] = True
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checks.integer("seed", self.seed))

    def __call__(self, token_ids: Tensor, num_experts: int, top_k: int) -> Tensor:
        """K distinct experts of each token id, the largest weight first: token_ids (T,) integers; returns (T, K) int32."""
        expert = torch.arange(num_experts, device=token_ids.device)
        words = _mix(token_ids.long() + (GOLDEN * (self.seed + 1) & MASK_32))[:, None] + GOLDEN * expert
        weights = _mix(words) >> 8  # (T, E)
        return torch.sort(weights, dim=1, descending=True, stable=True).indices[:, :top_k].to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64) that scatters them: xor-shift-multiply, no product passes 2**63."""
    x = x & MASK_32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK_32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK_32
    return x ^ (x >> 15)


# ---------------------------------------------------------------------------------------------------------------------
# By name

Choice = VaryingChoice | Hash
CHOICES: dict[str, Any] = {
    "token_rounding": TokenRounding,
    "expert_choice": ExpertChoice,
    "capacity": Capacity,
    "hash": Hash,
}


def varying_choice(by: str) -> type[VaryingChoice]:
    """The choice that has this name among its `WAYS`. ValueError for an unknown one."""
    named = {name: choice for choice in CHOICES.values() for name in getattr(choice, "WAYS", ())}
    checks.one_of("by", by, tuple(named))
    return named[by]


def make_choice(choose: str | Choice, options: dict[str, Any], keywords: Iterable[str] = ()) -> Choice | None:
    """The choice of this name, with its options; None for ``"top_k"``, which has none. An object is itself.

    ValueError for an unknown name, TypeError for an option that the choice does not take.
    keywords: further names that may have been meant, `Router`'s.
    """
    if isinstance(choose, Choice):
        if options:
            near = "".join(checks.nearest(name, keywords) for name in sorted(options)[:1])
            raise TypeError(f"choose: a choice object carries its own options, got {sorted(options)} too{near}")
        return choose
    if not isinstance(choose, str):
        raise TypeError(f"choose: expected a name or a choice object, got {choose!r}")
    checks.one_of("choose", choose, ("top_k", *CHOICES))
    options_of = {other: [field.name for field in fields(kind)] for other, kind in CHOICES.items()} | {"top_k": []}
    for option in options:
        if option not in options_of[choose]:
            owner = next((other for other, names in options_of.items() if option in names), None)
            hint = f"; choose={owner!r} takes it" if owner else checks.nearest(option, [*options_of[choose], *keywords])
            takes = f"the options {', '.join(options_of[choose])}" if options_of[choose] else "no options"
            raise TypeError(f"{option}: unknown keyword (choose={choose!r} takes {takes}){hint}")
    return None if choose == "top_k" else CHOICES[choose](**options)


_OTHERS_NAMES = {  # of a layer's sizes, in Hugging Face's configurations
    "hidden_size": "d_model",
    "intermediate_size": "d_expert",
    "moe_intermediate_size": "d_expert",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "top_k",
}


def check_keywords(keywords: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for a keyword that neither the layer nor any router takes, with the one that is meant or the nearest.
    known: the names that they take, beside the choices' options."""
    known = {*known, *(option.name for kind in CHOICES.values() for option in fields(kind))} - {"router_options"}
    if "router_options" in keywords:
        raise TypeError(
            "router_options: expected each as a keyword of its own, MoE(..., aux_loss=0.01), got them together"
        )
    for name in keywords:
        if name not in known:
            near = checks.nearest(_OTHERS_NAMES.get(name, name), known)
            raise TypeError(f"{name}: unknown keyword of MoE and its router{near}")
