"""Choices and hash routing on the GPU: the kernels against the torch code, to the pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_choice_kernels import EVERY, pairs_of

from blazeproto.router import ops, pair_ops
from blazeproto.router.choices import Capacity, ExpertChoice, Hash, TokenRounding
from blazeproto.router.kinds import DRAWING_RULES, MASK_32, RULES
from blazeproto.router.scores import SCORES

pytestmark = pytest.mark.gpu

SHAPES = [(32768, 128, 8), (16384, 512, 8), (5000, 1, 1), (777, 1000, 9), (1, 8, 2), (0, 8, 2), (70001, 16, 4)]
KINDS = ["normal", "ties", "same", "one_expert", "nan", "saturated"]
CHOICES: list[Any] = [
    *(TokenRounding(rule=rule) for rule in RULES),
    *(TokenRounding(tile=100, rule=rule) for rule in ("balance_f", "nr_s")),
    *(choice for choice in EVERY if not isinstance(choice, TokenRounding)),
]


def logits_of(kind: str, num_tokens: int, num_experts: int) -> torch.Tensor:
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    if kind == "ties":
        logits = (2 * logits).round()
    if kind == "same":
        logits.zero_()
    if kind == "one_expert":
        logits[:, num_experts // 2] += 20
    if kind == "nan":
        logits[::7] = math.nan
    if kind == "saturated":
        logits *= 300
    return logits


def top_k_of(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """The token choice, as `Router` makes it for a number of experts that varies."""
    return ops.route_top_k(logits, None, top_k, "topk_softmax", False, 1.0)[1]


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "has_dispatch_kernels", lambda *_: False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_same_pairs_as_torch(choice: Any, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, num_experts, top_k = shape
    for kind in KINDS:
        logits = logits_of(kind, num_tokens, num_experts)
        score = "sigmoid" if kind in ("ties", "saturated") else "softmax_topk"
        scores = SCORES[score].value(logits)

        def outcome() -> tuple[torch.Tensor, ...]:
            experts = top_k_of(logits, top_k)  # noqa: B023
            return (experts, *pairs_of(choice, scores, experts))  # noqa: B023

        made = outcome()
        again = outcome()
        with monkeypatch.context() as patch:
            without_kernels(patch)
            right = outcome()
        names = ("experts", "pair_experts", "pair_tokens", "token_offsets", "load")
        for name, got, second, expected in zip(names, made, again, right, strict=True):
            assert torch.equal(got, expected), f"{kind}: {name}"
            assert torch.equal(got, second), f"{kind}: {name}, the second time"


@pytest.mark.parametrize("shape", [(20000, 128, 8), (777, 1000, 9), (3, 8, 2)], ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_same_pairs_as_torch_with_masked_tokens(
    choice: Any, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, num_experts, top_k = shape
    for share, kind in ((0.4, "ties"), (0.9, "nan"), (0.05, "same"), (1.0, "normal")):
        logits, counted = logits_of(kind, num_tokens, num_experts), torch.rand(num_tokens, device="cuda") >= share
        scores = SCORES["softmax_topk"].value(logits).masked_fill(~counted[:, None], 0)
        experts = top_k_of(logits, top_k).masked_fill(~counted[:, None], -1)
        made = pairs_of(choice, scores, experts, counted=counted)
        with monkeypatch.context() as patch:
            without_kernels(patch)
            right = pairs_of(choice, scores, experts, counted=counted)
        for name, got, expected in zip(
            ("pair_experts", "pair_tokens", "token_offsets", "load"), made, right, strict=True
        ):
            assert torch.equal(got, expected), f"{kind}: {name}"


def test_many_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(8192, 64, device="cuda").softmax(1)
    experts = top_k_of(scores, 4)
    for rule in DRAWING_RULES:
        choice = TokenRounding(rule=rule)
        made = [pairs_of(choice, scores, experts, seed)[3] for seed in range(50)]
        with monkeypatch.context() as patch:
            without_kernels(patch)
            right = [pairs_of(choice, scores, experts, seed)[3] for seed in range(50)]
        assert all(map(torch.equal, made, right))
        assert len({tuple(load.tolist()) for load in made}) > 40


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", [(3000, 96, 6), (300, 1000, 9), (100, 1, 1), (0, 8, 2)], ids=str)
def test_scores_and_their_gradient_as_torch(
    shape: tuple[int, int, int], score: str, renormalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, num_experts, top_k = shape
    logits = (2 * torch.randn(num_tokens, num_experts, device="cuda")).requires_grad_()
    choice = ExpertChoice()  # from no expert to many a token
    experts = top_k_of(logits.detach(), top_k)
    pair_experts, _, token_offsets, _ = pairs_of(choice, SCORES[score].value(logits.detach()), experts)
    listed = torch.cat([pair_experts, pair_experts.new_full((7 if num_tokens else 0,), -1)]), token_offsets
    d_scores = torch.randn(len(listed[0]), device="cuda")

    def outcome() -> tuple[torch.Tensor, torch.Tensor]:
        scores = pair_ops.score_pairs(logits, *listed, score, renormalize, 1.5)
        return scores.detach(), torch.autograd.grad(scores, logits, d_scores)[0]

    made, again = outcome(), outcome()
    without_kernels(monkeypatch)
    right = outcome()
    torch.testing.assert_close(made[0], right[0], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(made[1], right[1], rtol=1e-4, atol=2e-6)
    assert all(map(torch.equal, made, again))


def test_a_nan_token_is_alone() -> None:
    logits = torch.randn(1000, 40, device="cuda")
    logits[33] = math.nan
    for score in SCORES:
        dense = SCORES[score].value(logits)
        experts = top_k_of(logits, 4)
        pair_experts, pair_tokens, offsets, _ = pairs_of(Capacity(100), dense, experts)
        leaf = logits.clone().requires_grad_()
        scores = pair_ops.score_pairs(leaf, pair_experts, offsets, score, True, 1.0)
        mine = pair_tokens == 33
        assert mine.sum() == 4 and scores[mine].isnan().all() and scores[~mine].isfinite().all()
        d_logits = torch.autograd.grad(scores, leaf, torch.ones_like(scores))[0]
        assert d_logits.isfinite().all() and (d_logits[33] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_hash_as_torch(dtype: torch.dtype) -> None:
    for num_tokens, num_experts, top_k in [(32768, 128, 8), (16384, 512, 8), (100, 1, 1), (999, 1000, 32), (0, 8, 2)]:
        ids = torch.randint(-(2**31), 2**31, (num_tokens,), device="cuda").to(dtype)
        for seed in (0, 5, 2**40):
            made = ops.hash_experts(ids, num_experts, top_k, seed & MASK_32)
            assert torch.equal(made, Hash(seed)(ids, num_experts, top_k))
