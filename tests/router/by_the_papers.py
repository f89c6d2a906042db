"""Every router as its paper states it, one token and one expert at a time, in decimal numbers of 60 digits.

Nothing underflows here, and no formula is rearranged. `test_by_the_papers` compares `Router` with it.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

Scores = Sequence[Sequence[float]]  # (T, E)
Pairs = list[tuple[int, int]]  # (token, expert), in the order in which they are listed

# --- Scores and losses ---------------------------------------------------------------------------------------------------


def token_scores(
    logits: Sequence[Decimal], experts: Sequence[int], score: str, renormalize: bool, scale: float
) -> list[Decimal]:
    """A token's scores of the experts that it has: Shazeer et al. eq. 3, Switch Transformer eq. 1, DeepSeek-V3 eq. 13, 15."""
    if score == "sigmoid":
        every = [1 / (1 + (-logit).exp()) for logit in logits]
    else:
        exponentials = [logit.exp() for logit in logits]
        every = [e / sum(exponentials) for e in exponentials]
    scores = [every[e] for e in experts]
    if renormalize or score == "topk_softmax":
        scores = [s / sum(scores) for s in scores]
    return [s * Decimal(scale) for s in scores]


def load_balancing(logits: Sequence[Sequence[Decimal]], chosen: Sequence[Sequence[int]], score: str) -> Decimal:
    """Switch Transformer eq. 4 to 6 for any K, without the coefficient."""
    num_tokens, num_experts = len(logits), len(logits[0])
    fraction, probability = [Decimal(0)] * num_experts, [Decimal(0)] * num_experts
    for row, experts in zip(logits, chosen, strict=True):
        everyone = token_scores(row, range(num_experts), score, True, 1.0)
        for e in range(num_experts):
            fraction[e] += Decimal(list(experts).count(e)) / (num_tokens * len(experts))
            probability[e] += everyone[e] / num_tokens
    return num_experts * sum(f * p for f, p in zip(fraction, probability, strict=True))


def z_loss(logits: Sequence[Sequence[Decimal]]) -> Decimal:
    """ST-MoE eq. 5 without the coefficient."""
    return sum((sum(logit.exp() for logit in row).ln() ** 2 for row in logits), Decimal(0)) / len(logits)


def gradient(function: Callable[[list[list[Decimal]]], Decimal], logits: Scores) -> list[list[float]]:
    """Central differences, exact to some 20 digits."""
    with localcontext(prec=60):
        rows = [[Decimal(value) for value in row] for row in logits]
        step, made = Decimal("1e-20"), []
        for t, row in enumerate(rows):
            made.append([])
            for e, value in enumerate(row):
                ends = []
                for end in (value + step, value - step):
                    rows[t][e] = end
                    ends.append(function(rows))
                rows[t][e] = value
                made[-1].append(float((ends[0] - ends[1]) / (2 * step)))
        return made


# --- Choices -------------------------------------------------------------------------------------------------------------


def best(keys: Sequence[Any], count: int) -> list[int]:
    """The places of the largest keys, largest first, ties to the lower place."""
    return sorted(range(len(keys)), key=lambda i: (-keys[i], i))[:count]


def best_of_groups(keys: Sequence[Any], count: int, num_groups: int, top_groups: int) -> list[int]:
    """DeepSeek-V3 §2.1.2, node-limited routing, and its published code: no expert outside the best groups, by the sum of a
    group's two largest keys."""
    size = len(keys) // num_groups
    groups = best([sum(sorted(keys[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)], top_groups)
    return [e for e in best(keys, len(keys)) if e // size in groups][:count]


def token_rounding(
    scores: Scores, chosen: Sequence[Sequence[int]], tile: int, rule: str, draws: Sequence[float]
) -> Pairs:
    """SonicMoE Algorithm 4, and 6 for balance_f; S' is S for who chose the expert and S - 1 for the others."""
    num_tokens, num_experts = len(scores), len(scores[0])
    pairs: Pairs = []
    z = 0
    for e in range(num_experts):
        preference = [Fraction(scores[t][e]) - (e not in chosen[t]) for t in range(num_tokens)]
        order = best(preference, num_tokens)
        f = sum(e in experts for experts in chosen)
        floor, ceil = f // tile * tile, -(-f // tile) * tile
        if ceil > num_tokens:  # an expert cannot take more tokens than there are
            pairs += [(t, e) for t in order[:floor]]
            continue
        if rule == "nr_s":
            last_tile = [scores[t][e] for t in order[floor:ceil]]
            up = sum(last_tile) > 0 and draws[e] < sum(last_tile[: f - floor]) / sum(last_tile)
        else:
            up = {
                "nr_f": ceil - f < f - floor,
                "sr_f": draws[e] < (f - floor) / tile,
                "balance_f": abs(ceil - f + z) < abs(floor - f + z),
                "up": True,
                "down": False,
            }[rule]
        z += (ceil if up else floor) - f
        pairs += [(t, e) for t in order[: ceil if up else floor]]
    return sorted(pairs)


def expert_choice(scores: Scores, top_k: int, factor: str) -> Pairs:
    """Zhou et al. 2022 §3.2."""
    num_tokens, num_experts = len(scores), len(scores[0])
    count = min(num_tokens, math.ceil(Fraction(factor) * num_tokens * top_k / num_experts))
    return sorted((t, e) for e in range(num_experts) for t in best([row[e] for row in scores], count))


def capacity(scores: Scores, chosen: Sequence[Sequence[int]], factor: str, priority: str) -> Pairs:
    """GShard Algorithm 1; with priority "score" the loop of V-MoE's Algorithm 2."""
    num_tokens, num_experts, top_k = len(scores), len(scores[0]), len(chosen[0])
    most = min(num_tokens, math.ceil(Fraction(factor) * num_tokens * top_k / num_experts))
    tokens = best([max(row) for row in scores], num_tokens) if priority == "score" else range(num_tokens)
    order = [(t, k) for k in range(top_k) for t in tokens]
    if priority == "token":
        order.sort()
    load, pairs = [0] * num_experts, []
    for t, k in order:
        e = chosen[t][k]
        if load[e] < most:
            load[e] += 1
            pairs.append((t, e))
    return sorted(pairs)


def pairs_of_choice(choice: Any, scores: Scores, chosen: Sequence[Sequence[int]], draws: Sequence[float]) -> Pairs:
    """The pairs that run. choice: of `blazeproto.router.choices`, or None.  chosen (T, K): the token choice."""
    options, num_tokens, top_k = vars(choice) if choice is not None else {}, len(scores), len(chosen[0])
    if "rule" in options:
        tile = options["tile"]
        if num_tokens < tile or num_tokens * top_k < len(scores[0]) * tile / 2:
            tile = 1  # nothing is rounded, which no paper says
        return token_rounding(scores, chosen, tile, options["rule"], draws)
    if "priority" in options:
        return capacity(scores, chosen, str(options["capacity_factor"]), options["priority"])
    if "capacity_factor" in options:
        return expert_choice(scores, top_k, str(options["capacity_factor"]))
    return [(t, e) for t, experts in enumerate(chosen) for e in experts]


def hashed(token_id: int, num_experts: int, top_k: int, seed: int) -> list[int]:
    """Highest-random-weight hashing with 24-bit weights: what `Hash` promises never to change."""

    def mix(x: int) -> int:
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            x = (x ^ x >> shift) * factor % 2**32
        return x ^ x >> 15

    start = mix((token_id + 0x9E3779B9 * (seed + 1) % 2**32) % 2**32)
    return best([mix((start + 0x9E3779B9 * e) % 2**32) >> 8 for e in range(num_experts)], top_k)
