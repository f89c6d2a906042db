"""Token choice, each expert's count rounded to a multiple of the kernels' tile: SonicMoE §5 and appendix E.2."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blazeproto.router.choices.choice import VaryingChoice, choice_mask, keep_first, rank_tokens
from blazeproto.router.kinds import DRAWING_RULES, RULES, RoundingRule
from blazeproto.runtime import checks


@dataclass(frozen=True)
class TokenRounding(VaryingChoice):
    """Token choice rounded to whole tiles: SonicMoE §5.2, Algorithm 4.

    Every expert's token count becomes a multiple of ``tile`` (rows of the kernel's M tile) that is less than one tile
    away from token choice: the expert's lowest-scored tokens leave, or the best of the tokens that did not choose it
    come. Works on the micro-batch; the paper advises at least two tiles an expert on average (appendix E.3).
    """

    WAYS = RULES
    KERNELS = "blazeproto.router.pairs"
    RENORMALIZES = True  # SonicMoE §6.3.1
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

    def size(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        return self.tile

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        padding = {  # the most rows that rounding can add
            "nr_f": num_experts * ((self.tile - 1) // 2),
            "balance_f": self.tile // 2,
            "down": 0,
        }.get(self.rule, num_experts * (self.tile - 1))
        return min(num_tokens * top_k + padding, num_tokens * num_experts)

    def draws(self, num_experts: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor | None:
        """In fp32 whatever torch's default dtype is: in bf16 a probability of .999 is 1."""
        if self.rule not in DRAWING_RULES:
            return None
        return torch.rand(num_experts, device=device, dtype=torch.float32, generator=generator)

    @staticmethod
    def mask(scores: Tensor, experts: Tensor, draws: Tensor | None, by: str, options: list[float], size: int) -> Tensor:
        """Algorithm 4. by: the rule; size: the tile."""
        num_tokens, num_experts = scores.shape
        chosen = choice_mask(experts, num_experts)
        order = rank_tokens(chosen_first_keys(scores, chosen))
        ranked = scores.t().gather(1, order) if by == "nr_s" else None
        counts = chosen.sum(dim=0)
        counts = rounded_counts(counts, size, by, num_tokens=num_tokens, sorted_scores=ranked, draws=draws)
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
    num_tokens: int,
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

    An expert cannot take more tokens than there are: where the multiple above passes T, every rule rounds down.
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
        place = torch.arange(num_tokens, device=counts.device)
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
        up = torch.full_like(fits, rule == "up")
    return torch.where(up & fits, ceil, floor)
