"""Choices by kernels: how the operators call them, the kernels compiled, refusals; on a GPU the pairs of the torch code."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import play_kernels
from test_topk import check_kernel, fresh_cache, on_device  # noqa: F401  fresh_cache is a fixture

from blazeproto.router import choose_pairs, fallback, hash_route, ops, pair_ops, pairs, score_pairs, topk
from blazeproto.router.choices import Capacity, ExpertChoice, Hash, TokenRounding
from blazeproto.router.fallback import choose_top_k
from blazeproto.router.kinds import DRAWING_RULES, MASK_32, RULES, WAYS
from blazeproto.router.router import make_router
from blazeproto.router.scores import SCORES
from tests.refusals import refuses

FULL = pytest.mark.full

EVERY: list[Any] = [
    *(TokenRounding(tile=8, rule=rule) for rule in RULES),
    ExpertChoice(),
    ExpertChoice(0.01),
    ExpertChoice(100),
    *(Capacity(factor, priority) for factor in (0.01, 0.7, 100) for priority in ("slot", "token", "score")),
]


def logits_of(kind: str, num_tokens: int, num_experts: int, device: str = "cpu") -> torch.Tensor:
    logits = torch.randn(num_tokens, num_experts, device=device)
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


def scores_of(kind: str, num_tokens: int, num_experts: int) -> torch.Tensor:
    return torch.softmax(logits_of(kind, num_tokens, num_experts), dim=1)


def pairs_of(
    choice: Any, scores: torch.Tensor, experts: torch.Tensor, seed: int = 0, counted: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """What the operator makes of a choice."""
    generator = torch.Generator(scores.device).manual_seed(seed)
    return pair_ops.choose_pairs(*choice.crossing(scores, experts, generator, counted))


# --- The operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "ties", "same", "one_expert", "nan"])
@pytest.mark.parametrize("choice", EVERY, ids=str)
def test_pairs_are_those_of_the_mask(choice: Any, kind: str) -> None:
    for num_tokens, num_experts, top_k in [(0, 3, 2), (1, 1, 1), (61, 5, 2), (33, 4, 4), (40, 70, 3)]:
        scores = scores_of(kind, num_tokens, num_experts)
        experts = choose_top_k(scores, top_k)
        pair_experts, pair_tokens, _, load = pairs_of(choice, scores, experts)
        mask = torch.zeros(scores.shape, dtype=torch.bool)
        used = pair_experts >= 0
        mask[pair_tokens[used].long(), pair_experts[used].long()] = True
        assert torch.equal(mask, choice(scores, experts, torch.Generator().manual_seed(0)))
        assert torch.equal(load, mask.sum(dim=0, dtype=torch.int32))


def some_pairs(num_tokens: int, num_experts: int, spare: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """pair_experts (P,) and token_offsets (T + 1,)."""
    mask = torch.rand(num_tokens, num_experts) < 0.5
    mask[num_tokens // 2] = False
    pair_experts, _, token_offsets, _ = fallback.pairs_of(mask, int(mask.sum()) + spare)
    return pair_experts, token_offsets


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", SCORES)
def test_a_token_with_one_logit_that_is_no_number(score: str, value: float) -> None:
    """It has experts 0 ... K-1 and NaN scores, and passes no gradient; no other token notices. As the kernels have it."""
    logits = torch.randn(5, 4, dtype=torch.float64)
    clean = fallback.topk_route(logits, 2, score=score)
    logits[1, 3] = value
    scores, experts = fallback.topk_route(logits, 2, score=score)
    assert scores[1].isnan().all() and experts[1].tolist() == [0, 1]
    others = [0, 2, 3, 4]
    assert torch.equal(scores[others], clean[0][others]) and torch.equal(experts[others], clean[1][others])
    leaf = logits.clone().requires_grad_()
    routed, _ = ops.route_top_k(leaf, None, 2, score, True, 1.0)
    balance, z, *_ = ops.routing_losses(leaf, experts, score, 1.0, 1.0, False)
    assert balance.isnan() and z.isnan()
    for total in (routed.sum(), balance + z):
        (d_logits,) = torch.autograd.grad(total, leaf)
        assert (d_logits[1] == 0).all() and d_logits.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("score", SCORES)
def test_pairs_of_a_token_with_a_logit_that_is_no_number(score: str, value: float) -> None:
    logits = torch.randn(5, 4)
    logits[1, 2] = value
    pair_experts, _, token_offsets, _ = fallback.pairs_of(torch.ones(5, 4, dtype=torch.bool), 20)
    for renormalize in (False, True):
        leaf = logits.clone().requires_grad_()
        made = pair_ops.score_pairs(leaf, pair_experts, token_offsets, score, renormalize, 1.0)
        if not SCORES[score].elementwise:
            assert made[4:8].isnan().all()
        assert made.detach()[[*range(4), *range(8, 20)]].isfinite().all()
        (d_logits,) = torch.autograd.grad(made.sum(), leaf)
        assert d_logits.isfinite().all() and (SCORES[score].elementwise or (d_logits[1] == 0).all())


@pytest.mark.parametrize("choose", ["capacity", "token_rounding"])
def test_a_gradient_that_is_no_number_shows_in_the_router(choose: str) -> None:
    router = make_router(choose, 16, 8, 2, **({"tile": 1} if choose == "token_rounding" else {}))
    routing = router(torch.randn(9, 16))
    gradient = torch.ones_like(routing.scores)
    gradient[int((routing.experts >= 0).nonzero()[0])] = torch.nan
    routing.scores.backward(gradient)
    assert router.weight.grad.isnan().any()


def test_operators_are_well_formed() -> None:
    scores = scores_of("normal", 12, 4)
    experts = choose_top_k(scores, 2)
    for by in WAYS:
        torch.library.opcheck(pair_ops.choose_pairs.overload, (scores, experts, torch.rand(4), by, [], 4, 48, None))
    pair_experts, token_offsets = some_pairs(12, 4)
    for score in SCORES:
        logits, options = torch.randn(12, 4, requires_grad=True), (score, True, 1.5)
        torch.library.opcheck(pair_ops.score_pairs.overload, (logits, pair_experts, token_offsets, *options))
        d_scores = torch.randn(len(pair_experts))
        backward = (logits.detach(), pair_experts, token_offsets, d_scores, *options)
        torch.library.opcheck(pair_ops.score_pairs_backward.overload, backward)
    torch.library.opcheck(ops.hash_experts.overload, (torch.arange(5), 8, 2, 3))


def test_the_kernels_are_called_as_the_fallback_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are kernels the operators launch them, and take what they give: here the fallback stands for them."""
    scores, ids = scores_of("ties", 30, 6), torch.arange(30)
    experts = choose_top_k(scores, 2)
    logits = torch.randn(30, 6, requires_grad=True)

    def outcome(choice: Any) -> list[torch.Tensor]:
        made = pairs_of(choice, scores, experts)
        given = pair_ops.score_pairs(logits, made[0], made[2], "sigmoid", True, 1.5)
        (d_logits,) = torch.autograd.grad(given.square().sum(), logits)
        return [*made, given, d_logits, ops.hash_experts(ids, 6, 2, 5)]

    expected = [outcome(choice) for choice in EVERY]
    called = play_kernels(monkeypatch)
    for choice, right in zip(EVERY, expected, strict=True):
        torch.testing.assert_close(outcome(choice), right)
    assert called == {"choose_pairs", "score_pairs", "score_pairs_backward", "hash_route"}


# --- The kernels without a GPU -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=FULL)])
@pytest.mark.parametrize("by", ["score", *(pytest.param(w, marks=FULL) for w in WAYS if w != "score")])
def test_choosing_compiles(fresh_cache: None, by: str, masked: bool) -> None:  # noqa: F811
    kernels = [kernel for kernel in pairs.choosing_kernels(128, 8, by, masked) if kernel is not None]
    assert len(kernels) == (6 if by == "score" else 5)
    for kernel in kernels:
        check_kernel(kernel)


@pytest.mark.parametrize(("score", "together"), [("softmax_topk", True), ("softmax_topk", False), ("sigmoid", True)])
def test_scoring_compiles(fresh_cache: None, score: str, together: bool) -> None:  # noqa: F811
    check_kernel(pairs.score_kernel(128, score, together, 1.0))
    check_kernel(pairs.score_kernel(128, score, together, 1.0, backward=True))


def test_hashing_compiles(fresh_cache: None) -> None:  # noqa: F811
    check_kernel(topk.hash_kernel(128, 8))


# --- Refusals ------------------------------------------------------------------------------------------------------------

IDS = on_device(4, 2, dtype="int32")


@pytest.mark.parametrize(
    ("arguments", "options", "argument", "error"),
    [
        ((on_device(4, 8), IDS, "nr_g", 8, 9), {}, "by", ValueError),
        ((on_device(4, 8), IDS, "nr_f", 0, 9), {}, "size", ValueError),
        ((on_device(4, 8), IDS, "slot", -1, 9), {}, "size", ValueError),
        ((on_device(4, 8), IDS, "expert_choice", 5, 9), {}, "size", ValueError),
        ((on_device(4, 8), IDS, "slot", 1, -1), {}, "max_pairs", ValueError),
        ((on_device(4, 8), IDS, "slot", 1, 2**31), {}, "max_pairs, T*K", ValueError),
        ((on_device(2**30, 2), on_device(2**30, 2, dtype="int32"), "slot", 1, 9), {}, "max_pairs, T*K", ValueError),
        ((on_device(4, 8), IDS, "sr_f", 8, 9), {}, "draws", ValueError),
        ((on_device(4, 8), IDS, "sr_f", 8, 9), {"draws": on_device(7)}, "draws", ValueError),
        ((on_device(5, 8), IDS, "slot", 1, 9), {}, "experts", ValueError),
        ((on_device(4, 1), IDS, "slot", 1, 9), {}, "experts", ValueError),
        ((on_device(4, 8, dtype="float64"), IDS, "slot", 1, 9), {}, "scores", TypeError),
        ((on_device(4, 1025), IDS, "slot", 1, 9), {}, "scores", ValueError),
        ((torch.zeros(4, 8), IDS, "slot", 1, 9), {}, "experts", ValueError),
        ((on_device(4, 8), np.zeros((4, 2), np.int32), "slot", 1, 9), {}, "experts", ValueError),
    ],
)
def test_choosing_that_is_refused(arguments: Any, options: Any, argument: str, error: type[Exception]) -> None:
    refuses(lambda: choose_pairs(*arguments, **options), argument, error)


def test_a_choice_that_there_is_not_is_refused_by_the_operator() -> None:
    given = torch.rand(6, 4), torch.zeros(6, 1, dtype=torch.int32), None, "sloot", [], 2, 24, None
    for choose in (pair_ops.choose_pairs.overload, pair_ops.choose_pairs.kernel):
        refuses(lambda: choose(*given), "by")  # noqa: B023


def test_scoring_and_hashing_that_is_refused() -> None:
    logits, listed, offsets = on_device(4, 8), on_device(9, dtype="int32"), on_device(5, dtype="int32")
    refuses(lambda: score_pairs(logits, listed, offsets, score="cosine"), "score")
    refuses(lambda: score_pairs(logits, listed, on_device(4, dtype="int32")), "token_offsets")
    refuses(lambda: pairs.score_pairs_backward(logits, listed, offsets, on_device(8)), "d_scores")
    refuses(lambda: hash_route(on_device(4, dtype="int32"), 8, 2), "token_ids", TypeError)
    refuses(lambda: hash_route(on_device(4, dtype="int64"), 8, 9), "top_k")
    refuses(lambda: hash_route(on_device(4, dtype="int64"), 1025, 9), "num_experts")


# --- On the GPU: choices, scores and hash routing against the torch code, to the pair ------------------------------------


SHAPES = [(32768, 128, 8), (16384, 512, 8), (5000, 1, 1), (777, 1000, 9), (1, 8, 2), (0, 8, 2), (70001, 16, 4)]
KINDS = ["normal", "ties", "same", "one_expert", "nan", "saturated"]
CHOICES: list[Any] = [
    *(TokenRounding(rule=rule) for rule in RULES),
    *(TokenRounding(tile=100, rule=rule) for rule in ("balance_f", "nr_s")),
    *(choice for choice in EVERY if not isinstance(choice, TokenRounding)),
]


def top_k_of(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """The token choice, as `Router` makes it for a number of experts that varies."""
    return ops.route_top_k(logits, None, top_k, "topk_softmax", False, 1.0)[1]


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "has_dispatch_kernels", lambda *_: False)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_same_pairs_as_torch(choice: Any, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, num_experts, top_k = shape
    for kind in KINDS:
        logits = logits_of(kind, num_tokens, num_experts, "cuda")
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


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(20000, 128, 8), (777, 1000, 9), (3, 8, 2)], ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_same_pairs_as_torch_with_masked_tokens(
    choice: Any, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, num_experts, top_k = shape
    for share, kind in ((0.4, "ties"), (0.9, "nan"), (0.05, "same"), (1.0, "normal")):
        logits, counted = (
            logits_of(kind, num_tokens, num_experts, "cuda"),
            torch.rand(num_tokens, device="cuda") >= share,
        )
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


@pytest.mark.gpu
def test_many_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(8192, 64, device="cuda").softmax(1)
    experts = top_k_of(scores, 4)
    for rule in DRAWING_RULES:
        choice = TokenRounding(rule=rule)
        made = [pairs_of(choice, scores, experts, seed)[3] for seed in range(50)]
        with monkeypatch.context() as patch:
            without_kernels(patch)
            right = [pairs_of(choice, scores, experts, seed)[3] for seed in range(50)]
        assert all(map(torch.equal, made, right)) and len({tuple(load.tolist()) for load in made}) > 40


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_hash_as_torch(dtype: torch.dtype) -> None:
    for num_tokens, num_experts, top_k in [(32768, 128, 8), (16384, 512, 8), (100, 1, 1), (999, 1000, 32), (0, 8, 2)]:
        ids = torch.randint(-(2**31), 2**31, (num_tokens,), device="cuda").to(dtype)
        for seed in (0, 5, 2**40):
            made = ops.hash_experts(ids, num_experts, top_k, seed & MASK_32)
            assert torch.equal(made, Hash(seed)(ids, num_experts, top_k))
