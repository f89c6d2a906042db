"""Scores that sum to one do so however far apart the logits are: operators, twin and flat pairs against decimal numbers."""

from decimal import Decimal, localcontext
from typing import Any

import by_the_papers as papers
import numpy as np
import pytest
import torch

from blazeproto.router import Router, fallback, ops

SUMMING = [("softmax_topk", True), ("topk_softmax", False), ("sigmoid", True)]
# Of five experts three are kept; the best of them lies 40, 90 and 150 nats below the best of all, or all lie far below 0.
FAR = [
    [0.0, -40.0, -41.0, -42.5, -3.0],
    [-1.0, -90.0, -90.5, -95.0, 5.0],
    [60.0, -90.0, -250.0, -90.0, 50.0],
    [-60.0, -60.5, -61.0, -62.0, -70.0],
    [-200.0, -200.5, -230.0, -203.0, -199.0],
    [1.0, 0.5, 0.0, -0.5, 2.0],
]
KEPT = [3, 1, 2]


def far(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(FAR, dtype=dtype), torch.tensor([KEPT] * len(FAR), dtype=torch.int32)


def exact(score: str, renormalize: bool, d_scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores (T, 3) of `KEPT`, and the gradient (T, 5) for d_scores."""

    def loss(rows: list[list[Decimal]]) -> Decimal:
        scores = (papers.token_scores(row, KEPT, score, renormalize, 2.0) for row in rows)
        return sum(
            (
                Decimal(d) * s
                for given, made in zip(d_scores.tolist(), scores, strict=True)
                for d, s in zip(given, made, strict=True)
            ),
            Decimal(0),
        )

    with localcontext(prec=60):
        rows = [papers.token_scores([*map(Decimal, row)], KEPT, score, renormalize, 2.0) for row in FAR]
    scores = torch.tensor([[*map(float, row)] for row in rows], dtype=torch.float64)
    return scores, torch.tensor(papers.gradient(loss, FAR), dtype=torch.float64)


def flat(scores: torch.Tensor) -> torch.Tensor:
    """From the order of `KEPT` to that of a flat list."""
    return scores[:, np.argsort(KEPT)].flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("score", "renormalize"), SUMMING)
def test_scores_and_gradients_are_exact_at_any_gap(score: str, renormalize: bool, dtype: torch.dtype) -> None:
    logits, experts = far(dtype)
    d_scores = torch.rand(len(FAR), 3, dtype=dtype) + 0.5
    expected, slopes = exact(score, renormalize, d_scores)
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}

    def check(scores: Any, d_logits: Any) -> None:
        torch.testing.assert_close(torch.as_tensor(scores).double(), expected, **close)
        torch.testing.assert_close(torch.as_tensor(scores).double().sum(dim=1), torch.full((len(FAR),), 2.0).double())
        torch.testing.assert_close(torch.as_tensor(d_logits).double(), slopes, **close)

    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": 2.0}
    leaf = logits.clone().requires_grad_()
    scores = fallback.chosen_scores(leaf, experts, **options)
    check(scores.detach(), torch.autograd.grad(scores, leaf, d_scores)[0])
    check(scores.detach(), ops.route_top_k_backward(logits, experts, d_scores, *options.values()))
    check(
        scores.detach(),
        fallback.topk_route_backward(logits.numpy(), experts.numpy(), d_scores.numpy(), **options),
    )
    mask = torch.zeros(len(FAR), 5, dtype=torch.bool)
    mask[:, KEPT] = True
    pair_experts, _, token_offsets, _ = fallback.pairs_of(mask, mask.numel())
    pairs = fallback.pair_scores(leaf, pair_experts, token_offsets, **options)
    used = pairs[: 3 * len(FAR)]
    check(
        used.detach().view(-1, 3)[:, np.argsort(np.argsort(KEPT))], torch.autograd.grad(used, leaf, flat(d_scores))[0]
    )


@pytest.mark.parametrize("score", ["softmax_topk", "topk_softmax"])
def test_a_bias_may_choose_what_scores_next_to_nothing(score: str) -> None:
    """Forward and backward agree where the bias keeps logits 40 nats and more below the largest."""
    logits = torch.tensor(FAR, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.0, 2.0, 3.0, 4.0, 0.0])
    assert ops.route_top_k(logits, bias, 3, score, True, 1.0)[1].tolist() == [[3, 2, 1]] * len(FAR)
    torch.autograd.gradcheck(lambda v: ops.route_top_k(v, bias, 3, score, True, 1.0)[0], logits, atol=1e-9)


def test_the_twin_sums_to_one_where_every_sigmoid_underflows() -> None:
    logits = np.array(FAR, np.float32)[3:5] - 100
    scores, experts = fallback.topk_route(logits, 3, score="sigmoid", scale=2.5)
    np.testing.assert_allclose(scores.sum(axis=1), 2.5, rtol=1e-6)
    assert (np.diff(scores, axis=1) < 0).all() and experts.tolist() == [[0, 1, 2], [4, 0, 1]]


def test_the_balancing_loss_is_one_where_every_sigmoid_underflows() -> None:
    logits, experts = torch.full((6, 6), -300.0), torch.arange(6)[:, None]
    load = fallback.expert_load(experts, 6)
    assert fallback.load_balancing_loss(logits, load, 1, "sigmoid").item() == pytest.approx(1)


@pytest.mark.parametrize(("score", "renormalize"), SUMMING)
@pytest.mark.filterwarnings("ignore:Anomaly")
def test_a_token_without_a_pair_has_no_nan(score: str, renormalize: bool) -> None:
    """A NaN token's pairs are NaN, and pass no gradient to another token; one without pairs makes nothing NaN."""
    logits = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        logits[0] = torch.nan
    experts = torch.tensor([2, 0, 3, -1], dtype=torch.int32)
    for offsets, broken in (([0, 0, 1, 3], 0), ([0, 1, 1, 3], 1)):
        token_offsets = torch.tensor(offsets, dtype=torch.int32)
        with torch.autograd.detect_anomaly(check_nan=broken == 0):
            made = fallback.pair_scores(logits, experts, token_offsets, score=score, renormalize=renormalize, scale=1.0)
            slopes = torch.autograd.grad(made[broken:].square().sum(), logits)[0]
        assert made.isnan().tolist() == [broken == 1, False, False, False] and slopes[1:].isfinite().all()


@pytest.mark.parametrize("name", ["token_rounding", "capacity", "expert_choice"])
def test_a_varying_number_of_scores_sums_to_one(name: str) -> None:
    router = Router(6, 6, 2, score="sigmoid", renormalize=True, choose=name)
    with torch.no_grad():
        router.weight.copy_(torch.eye(6))
    routing = router(torch.randn(40, 6) * 3 - 150)
    assert routing.pair_tokens is not None and routing.token_offsets is not None
    total = torch.zeros(40).index_add(0, routing.pair_tokens, routing.scores.detach())
    torch.testing.assert_close(total, (routing.token_offsets.diff() > 0).float())
