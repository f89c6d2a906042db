"""`Router` in float64 against by_the_papers.py: choices to the pair; scores, losses and gradients to 11 digits."""

import math
import random
from decimal import Decimal, localcontext
from typing import Any

import by_the_papers as papers
import pytest
import torch

from blazeproto.router import Router
from blazeproto.router.choices import Hash
from blazeproto.router.kinds import RULES
from blazeproto.router.scores import SCORES

CHOICES: list[dict[str, Any]] = [
    {"choose": "top_k"},
    *({"choose": "token_rounding", "rule": rule} for rule in RULES),
    {"choose": "expert_choice"},
    *({"choose": "capacity", "priority": priority} for priority in ("slot", "token", "score")),
    {"choose": "hash", "seed": 3},
    *(
        {"choose": choose, "score": "sigmoid", "num_groups": num_groups, "top_groups": 2}
        for choose, num_groups in (("top_k", 3), ("top_k", 4), ("token_rounding", 4), ("capacity", 3))
    ),
]


def expected_pairs(
    router: Router, logits: torch.Tensor, ids: list[int], draws: list[float]
) -> tuple[Any, papers.Pairs]:
    """The token choice (T, K), and the pairs that run."""
    rows, choice = logits.tolist(), router.choice
    scores = SCORES[router.score].value(logits)
    keys = rows if router.expert_bias is None else (scores + router.expert_bias).tolist()
    chosen = [papers.best_of_groups(row, router.top_k, router.num_groups, router.top_groups) for row in keys]
    if isinstance(choice, Hash):
        chosen = [papers.hashed(i, router.num_experts, router.top_k, choice.seed) for i in ids]
        return chosen, papers.pairs_of_choice(None, scores.tolist(), chosen, draws)
    return chosen, papers.pairs_of_choice(choice, scores.tolist(), chosen, draws)


def check_router(seed: int, options: dict[str, Any]) -> None:
    rng = random.Random(seed)
    num_groups = options.get("num_groups", 1)
    num_tokens, num_experts = rng.randint(1, 9), num_groups * rng.randint(1, 7 if num_groups == 1 else 3)
    top_k = rng.randint(1, num_experts // num_groups * options.get("top_groups", 1))
    score = options.get("score") or rng.choice(["softmax_topk", "topk_softmax", "sigmoid"])
    options = {
        "score": score,
        "renormalize": rng.choice([None, True, False]),
        "scale": rng.choice([1.0, 2.5]),
        **options,
    }
    options["z_loss"] = rng.choice([0.0, 0.5])
    if options["choose"] not in ("expert_choice", "hash"):
        options |= {"aux_loss": rng.choice([0.0, 0.25]), "bias_update_rate": rng.choice([0.0, 1e-3])}
    if options["choose"] == "token_rounding":
        options["tile"] = rng.choice([1, 2, 3, 4])
    if options["choose"] in ("expert_choice", "capacity"):
        options["capacity_factor"] = rng.choice([0.3, 1, 1.1, 1.25, 3.0])
    router = Router(num_experts, num_experts, top_k, dtype=torch.float64, **options)
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))  # logits are x
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.tensor([rng.choice([0.0, 0.25, 2.0]) for _ in range(num_experts)]))
    spread, offset = rng.choice([1, 4, 30, 300]), rng.choice([0, 0, -60, -200, 100])
    values = [[offset + round(spread * rng.gauss(0, 1) * 4) / 4 for _ in range(num_experts)] for _ in range(num_tokens)]
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    ids = [rng.choice([0, 1, 7, -5, 2**40]) for _ in range(num_tokens)]

    torch.manual_seed(seed)
    draws = torch.rand(num_experts).tolist()
    torch.manual_seed(seed)
    routing = router(x, token_ids=torch.tensor(ids))
    with torch.no_grad():
        chosen, pairs = expected_pairs(router, x, ids, draws)
    used = len(pairs)
    if routing.pair_tokens is None:
        assert [(t, e) for t, row in enumerate(routing.experts.tolist()) for e in row] == pairs
    else:
        assert list(zip(routing.pair_tokens.tolist(), routing.experts.tolist(), strict=True))[:used] == pairs
        assert (routing.experts[used:] == -1).all()
    assert routing.load.tolist() == [sum(e == other for _, other in pairs) for e in range(num_experts)]

    weights = torch.rand(used, dtype=torch.float64)

    def outcomes(rows: list[list[Decimal]]) -> tuple[list[Decimal], Decimal]:
        scores = []
        for t, row in enumerate(rows):
            experts = [e for token, e in pairs if token == t]
            scores += papers.token_scores(row, experts, score, router.renormalize, router.scale) if experts else []
        losses = Decimal(router.z_loss) * papers.z_loss(rows)
        if router.aux_loss:
            losses += Decimal(router.aux_loss) * papers.load_balancing(rows, chosen, score)
        return scores, losses

    def loss(rows: list[list[Decimal]]) -> Decimal:
        scores, losses = outcomes(rows)
        return sum((Decimal(w) * s for w, s in zip(weights.tolist(), scores, strict=True)), losses)

    with localcontext(prec=60):
        expected, losses = outcomes([[Decimal(value) for value in row] for row in values])
    got = routing.scores.flatten()[:used]
    double: dict[str, Any] = {"dtype": torch.float64}
    torch.testing.assert_close(got.detach(), torch.tensor([*map(float, expected)], **double), rtol=1e-11, atol=1e-300)
    mine = sum(routing.aux_losses.values(), torch.zeros((), **double))
    assert mine.item() == pytest.approx(float(losses), rel=1e-11)
    total = (got * weights).sum() + mine
    slopes = torch.autograd.grad(total, x)[0] if total.requires_grad else torch.zeros_like(x)
    right = torch.tensor(papers.gradient(loss, values), **double).view_as(x)
    torch.testing.assert_close(slopes, right, rtol=1e-9, atol=1e-11 * max(1, math.fabs(float(losses))))


@pytest.mark.parametrize("options", CHOICES, ids=lambda options: "-".join(map(str, options.values())))
def test_router_is_what_its_paper_says(options: dict[str, Any]) -> None:
    for seed in range(4):
        check_router(seed, options)
