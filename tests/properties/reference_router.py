"""Every router in float64, as the papers and the docstrings state it: loops over tokens and experts, and masked softmaxes.

Choices are made by Python's `sorted`, scores and losses by torch, so that autograd gives their gradients. Where two keys are
so close that rounding may exchange them, the choice is called uncertain: see `Order`.

    token choice     MoEBlaze §2.1; with a bias, eq. 16, and among the best groups: DeepSeek-V3 §2.1.2
    token rounding   SonicMoE §5, Algorithm 4; roundings: appendix E.2, Algorithm 6
    expert choice    Zhou et al. 2022, §3.2
    capacity         GShard Algorithm 1 (slot), Switch Transformer §2.2 (token), V-MoE §4.1 (score)
    losses           Switch Transformer eq. 4 to 6, ST-MoE eq. 5
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor


@dataclass
class Order:
    """Sorting that notices keys too close to tell apart. Exact ties of keys that are computed alike go to the lower number."""

    uncertain: bool = False
    within: set[int] = field(default_factory=set)  # tokens whose own choice is uncertain

    def falling(self, keys: list[float], alike: Callable[[int, int], bool], tolerance: float, until: int) -> list[int]:
        """The numbers of ``keys``, largest key first. Order matters among the first ``until``. tolerance: how far a computed
        key may be off. alike(i, j): whether equal keys i and j are equal in any arithmetic."""
        order = _falling(keys)
        for i, j in itertools.pairwise(order[: until + 1]):
            self._compare(keys, i, j, alike, tolerance)
        return order

    def first(
        self,
        groups: list[list[int]],
        keys: list[float],
        alike: Callable[[int, int], bool],
        tolerance: float,
        count: int,
    ) -> set[int]:
        """The first ``count`` numbers of the groups, one group after the other, each by falling key. Their order is free."""
        taken: set[int] = set()
        for group in groups:
            ranked = [group[i] for i in _falling([keys[i] for i in group])]
            wanted = count - len(taken)
            if 0 < wanted < len(ranked):
                self._compare(keys, ranked[wanted - 1], ranked[wanted], alike, tolerance)
            taken |= set(ranked[: max(wanted, 0)])
        return taken

    def _compare(self, keys: list[float], i: int, j: int, alike: Callable[[int, int], bool], tolerance: float) -> None:
        gap = keys[i] - keys[j]
        if gap <= 2 * tolerance and not (gap == 0 and alike(i, j)):
            self.uncertain = True


def _falling(keys: list[float]) -> list[int]:
    return sorted(range(len(keys)), key=lambda i: (-keys[i], i))


# ---- scores ----------------------------------------------------------------------------------------------------------


def dense_scores(logits: Tensor, score: str) -> Tensor:
    """(T, E) -> (T, E): softmax over the experts, or sigmoid."""
    return torch.sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, dim=1)


def probabilities(logits: Tensor, score: str) -> Tensor:
    """(T, E) -> (T, E): every expert's score over the sum of its token's."""
    return torch.softmax(_log_scores(logits, score), dim=1)


def kept_scores(logits: Tensor, mask: Tensor, score: str, renormalize: bool, scale: float) -> Tensor:
    """The scores (T, E) of the pairs in ``mask`` (T, E), zero elsewhere; a token's sum to ``scale`` where they are
    renormalised: then they are a softmax of the kept logarithms alone, which cannot underflow as a sum of scores can."""
    if score != "topk_softmax" and not renormalize:
        return torch.where(mask, dense_scores(logits, score), 0.0) * scale
    some = mask.any(dim=1, keepdim=True)
    kept = torch.where(mask, _log_scores(logits, score), -torch.inf)
    kept = torch.where(some, kept, 0.0)  # a token without a pair: any numbers, not used
    return torch.where(mask, torch.softmax(kept, dim=1), 0.0) * scale


def _log_scores(logits: Tensor, score: str) -> Tensor:
    """But for what a token's experts share."""
    return torch.nn.functional.logsigmoid(logits) if score == "sigmoid" else logits


# ---- choices ---------------------------------------------------------------------------------------------------------


def group_scores(keys: Sequence[float], num_groups: int) -> list[float]:
    """The sum of each group's two largest keys."""
    size = len(keys) // num_groups
    return [sum(sorted(keys[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]


def token_choice(
    keys: Tensor, tolerances: Tensor, top_k: int, exact: bool, order: Order, num_groups: int = 1, top_groups: int = 1
) -> list[list[int]]:
    """The K experts with the largest keys (T, E) of each token, largest first, out of its best groups. tolerances (T, E): how
    far a computed key may be off. exact: keys are computed without rounding, so that equal ones are equal anywhere."""
    chosen = []
    for token, (row, tolerance) in enumerate(zip(keys.tolist(), tolerances.tolist(), strict=True)):
        mine = Order()
        alike = lambda i, j: exact  # noqa: E731
        sums = group_scores(row, num_groups)
        groups = mine.first([list(range(num_groups))], sums, alike, 3 * max(tolerance), top_groups)
        experts = [e for e in range(len(row)) if e // (len(row) // num_groups) in groups]
        best = mine.falling([row[e] for e in experts], alike, max(tolerance), top_k)[:top_k]
        best = [experts[place] for place in best]
        chosen.append(best)
        if mine.uncertain:
            order.uncertain = True
            order.within.add(token)
    return chosen


def expert_capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """factor T K / E, rounded up, at most T (Switch Transformer eq. 3), for the decimal number that ``factor`` prints as."""
    return min(num_tokens, math.ceil(Fraction(repr(factor)) * num_tokens * top_k / num_experts))


def rounded(rule: str, tile: int, counts: Sequence[int], num_tokens: int) -> list[list[int]]:
    """What each expert's count may become: one number, or two where the rule draws. SonicMoE appendix E.2, Algorithm 6."""
    results, z = [], 0
    for count in counts:
        floor, ceil = count // tile * tile, -(-count // tile) * tile
        fits = ceil <= num_tokens
        up, down = ceil - count, floor - count
        if not fits:  # no expert takes more tokens than there are
            possible, count = [floor], floor
        elif rule in ("sr_f", "nr_s"):
            possible = sorted({floor, ceil})
        elif rule == "nr_f":
            possible = [ceil if up < -down else floor]
        elif rule == "balance_f":
            possible = [ceil if abs(up + z) < abs(down + z) else floor]
        else:
            possible = [ceil if rule == "up" else floor]
        z += possible[0] - count
        results.append(possible)
    return results


def tile_of(options: dict[str, Any], num_tokens: int, num_experts: int, top_k: int) -> int:
    """1, which rounds nothing, below a tile of tokens, or half a tile an expert."""
    tile: int = options.get("tile", 128)
    return tile if num_tokens >= tile and num_tokens * top_k / num_experts >= tile / 2 else 1


def choice_masks(
    name: str,
    options: dict[str, Any],
    scores: Tensor,
    tolerances: Tensor,
    chosen: list[list[int]],
    top_k: int,
    same_token: Tensor,
    order: Order,
) -> list[list[set[int]]]:
    """For each expert the sets of tokens that it may end up with: one, or two where a rounding draws.

    scores, tolerances (T, E): every expert's score in float64, and how far a computed one may be off.
    same_token (T, T): pairs of tokens whose scores have the same bits.
    """
    num_tokens, num_experts = scores.shape
    slot_of = [{expert: slot for slot, expert in enumerate(row)} for row in chosen]
    same = same_token.tolist()
    counts = [sum(expert in row for row in chosen) for expert in range(num_experts)]
    factor = options.get("capacity_factor", 1.0 if name == "expert_choice" else 1.25)
    capacity = expert_capacity(num_tokens, num_experts, top_k, factor)
    possible = (
        rounded(options.get("rule", "nr_f"), tile_of(options, num_tokens, num_experts, top_k), counts, num_tokens)
        if name == "token_rounding"
        else [[capacity if name == "expert_choice" else min(capacity, count)] for count in counts]
    )
    priority = options.get("priority", "slot") if name == "capacity" else ""
    masks = []
    for expert in range(num_experts):
        took = [t for t in range(num_tokens) if expert in slot_of[t]]
        by_slot = [[t for t in took if slot_of[t][expert] == slot] for slot in range(top_k)]
        keys, tolerance = scores[:, expert].tolist(), float(tolerances[:, expert].amax()) if num_tokens else 0.0
        if name == "token_rounding":
            groups = [took, [t for t in range(num_tokens) if expert not in slot_of[t]]]
        elif name == "expert_choice":
            groups = [list(range(num_tokens))]
        elif priority == "score":
            groups = by_slot
            keys, tolerance = scores.amax(dim=1).tolist(), float(tolerances.amax()) if num_tokens else 0.0
        else:
            in_order = [t for tokens in by_slot for t in tokens] if priority == "slot" else took
            groups = [[token] for token in in_order]
        alike = lambda i, j: same[i][j]  # noqa: E731
        masks.append([order.first(groups, keys, alike, tolerance, count) for count in possible[expert]])
    return masks


def max_pairs(name: str, options: dict[str, Any], num_tokens: int, num_experts: int, top_k: int) -> int:
    """P, the places for pairs: the table of docs/routers.md."""
    if name == "token_rounding":
        tile, rule = tile_of(options, num_tokens, num_experts, top_k), options.get("rule", "nr_f")
        more = {"nr_f": num_experts * ((tile - 1) // 2), "balance_f": tile // 2, "down": 0}
        added = more.get(rule, num_experts * (tile - 1))
        return min(num_tokens * top_k + added, num_tokens * num_experts)
    factor = options.get("capacity_factor", 1.0 if name == "expert_choice" else 1.25)
    places = num_experts * expert_capacity(num_tokens, num_experts, top_k, factor)
    return places if name == "expert_choice" else min(num_tokens * top_k, places)


# ---- losses ----------------------------------------------------------------------------------------------------------


def load_balancing_loss(logits: Tensor, chosen: list[list[int]], score: str) -> Tensor:
    """E sum_e f_e P_e: f_e the share of the choices that fell on e, P_e its mean probability (sigmoids over their sum)."""
    num_tokens, num_experts = logits.shape
    choices = [expert for row in chosen for expert in row]
    share = torch.tensor([choices.count(expert) for expert in range(num_experts)], dtype=torch.float64)
    share = share / max(len(choices), 1)
    return num_experts * (share * probabilities(logits, score).sum(dim=0) / max(num_tokens, 1)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The mean of logsumexp(logits)²."""
    return torch.logsumexp(logits, dim=1).square().sum() / max(len(logits), 1)
