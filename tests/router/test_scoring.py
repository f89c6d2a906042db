"""Scores, top-k, auxiliary losses and the balancing bias against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import play_kernels

from blazeproto.router import fallback, ops
from blazeproto.router.linear import router_logits
from blazeproto.router.router import updated_bias
from blazeproto.router.scores import SCORES

FEW = settings(max_examples=40, deadline=None)


def balancing(logits: torch.Tensor, experts: torch.Tensor, score: str = "softmax_topk") -> torch.Tensor:
    load = fallback.expert_load(experts, logits.shape[1])
    return fallback.load_balancing_loss(logits, load, experts.shape[1], score)


@st.composite
def tied_logits(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Logits (T, E) with many ties, and a K."""
    num_tokens, num_experts = draw(st.integers(0, 30)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    logits = torch.round(logits * draw(st.sampled_from([0.0, 0.5, 2.0, 1e3])))
    return logits, draw(st.integers(1, num_experts))


@FEW
@given(tied_logits())
def test_top_k_is_the_stable_sort(case: tuple[torch.Tensor, int]) -> None:
    logits, top_k = case
    experts = fallback.choose_top_k(logits, top_k)
    expected = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :top_k]
    assert experts.dtype == torch.int32
    assert torch.equal(experts.long(), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", SCORES)
def test_logits_that_are_not_finite(value: float, score: str) -> None:
    x = torch.randn(5, 8)
    weight = torch.randn(6, 8)
    clean = router_logits(x, weight, None)
    x[2, 3] = value
    logits = router_logits(x, weight, None)
    experts = fallback.choose_top_k(fallback.selection_keys(logits, score, None), 6)
    scores = fallback.chosen_scores(logits, experts, score=score, renormalize=False, scale=1.0)
    assert torch.equal(experts.sort(dim=1).values, torch.arange(6, dtype=torch.int32).expand(5, 6))
    assert scores[2].isnan().all()
    others = [0, 1, 3, 4]
    assert scores[others].isfinite().all()
    assert torch.equal(logits[others], clean[others])


def test_one_nan_logit_makes_the_whole_token_nan() -> None:
    weight = torch.randn(4, 8)
    weight[1, 0] = math.inf  # one expert's logits alone
    x = torch.randn(3, 8)
    x[0, 0], x[1, 0], x[2, 0] = 1.0, -1.0, 0.0
    assert router_logits(x, weight, None).isnan().all()


def test_logits_save_the_features_as_they_came() -> None:
    x = torch.randn(12, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 8, requires_grad=True)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = router_logits(x, weight, None)
    assert [t.dtype for t in saved if t.shape == x.shape] == [torch.bfloat16]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # backward keeps out of it too
        logits.sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, x.detach().float().sum(dim=0).expand(4, 8))
    torch.testing.assert_close(x.grad, weight.detach().sum(dim=0).bfloat16().expand(12, 8))


def test_scores_by_their_formulas() -> None:
    logits = torch.randn(7, 5, dtype=torch.float64)
    experts = fallback.choose_top_k(logits, 3)
    index = experts.long()

    def scores(score: str, renormalize: bool, scale: float = 1.0) -> torch.Tensor:
        return fallback.chosen_scores(logits, experts, score=score, renormalize=renormalize, scale=scale)

    p = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    torch.testing.assert_close(scores("softmax_topk", False), p.gather(1, index))
    chosen = logits.exp().gather(1, index)
    torch.testing.assert_close(scores("topk_softmax", False), chosen / chosen.sum(dim=1, keepdim=True))
    torch.testing.assert_close(scores("softmax_topk", True), scores("topk_softmax", False))
    s = (1 / (1 + (-logits).exp())).gather(1, index)
    torch.testing.assert_close(scores("sigmoid", False), s)
    torch.testing.assert_close(scores("sigmoid", True, 2.5), 2.5 * s / s.sum(dim=1, keepdim=True))


def test_bias_chooses_and_does_not_score() -> None:
    logits = torch.randn(20, 6, dtype=torch.float64)
    bias = torch.zeros(6, dtype=torch.float64)
    bias[4] = 2.0  # more than any sigmoid
    experts = fallback.choose_top_k(fallback.selection_keys(logits, "sigmoid", bias), 2)
    assert (experts[:, 0] == 4).all()
    scores = fallback.chosen_scores(logits, experts, score="sigmoid", renormalize=False, scale=1.0)
    torch.testing.assert_close(scores[:, 0], torch.sigmoid(logits[:, 4]))


@pytest.mark.parametrize("score", SCORES)
def test_saturated_sigmoids_and_renormalisation_stay_finite(score: str) -> None:
    logits = torch.tensor([[-200.0, -300.0, -250.0], [200.0, 300.0, 250.0]])
    experts = fallback.choose_top_k(logits, 2)
    assert experts.tolist() == [[0, 2], [1, 2]]
    assert fallback.chosen_scores(logits, experts, score=score, renormalize=True, scale=1.0).isfinite().all()


@FEW
@given(tied_logits())
def test_pair_scores_equal_gathered_scores_on_the_same_pairs(case: tuple[torch.Tensor, int]) -> None:
    logits, top_k = case
    num_tokens = logits.shape[0]
    # Ascending ids, the order that pairs have inside a token.
    experts = fallback.choose_top_k(logits, top_k).sort(dim=1).values
    mask = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, experts.long(), True)
    pair_experts, _, token_offsets, _ = fallback.pairs_of(mask, num_tokens * top_k)
    assert torch.equal(pair_experts.view(num_tokens, top_k), experts)
    for score in SCORES:
        for renormalize in (False, True):
            options = {"score": score, "renormalize": renormalize, "scale": 1.5}
            expected = fallback.chosen_scores(logits, experts, **options)
            got = fallback.pair_scores(logits, pair_experts, token_offsets, **options)
            torch.testing.assert_close(got.view_as(expected), expected)


@FEW
@given(st.integers(0, 12), st.integers(1, 9), st.integers(0, 20), st.integers(0, 2**31))
def test_pairs_of_a_mask(num_tokens: int, num_experts: int, spare: int, seed: int) -> None:
    mask = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)) < 0.3
    pairs = mask.nonzero().tolist()  # by token, then by expert
    experts, tokens, offsets, load = fallback.pairs_of(mask, len(pairs) + spare)
    assert list(zip(tokens.tolist(), experts.tolist(), strict=True)) == [*map(tuple, pairs), *[(0, -1)] * spare]
    assert offsets.tolist() == [sum(t < token for t, _ in pairs) for token in range(num_tokens + 1)]
    assert load.tolist() == mask.sum(dim=0).tolist()


def test_operators_pass_opcheck() -> None:
    for score in SCORES:
        logits = torch.randn(4, 6, requires_grad=True)
        torch.library.opcheck(ops.route_top_k.overload, (logits, None, 2, score, True, 1.5))
    for groups in ((), (3, 2)):
        torch.library.opcheck(ops.route_top_k.overload, (logits, torch.randn(6), 2, "sigmoid", False, 1.0, *groups))


def test_expert_load_counts_ids_in_range_alone() -> None:
    experts = torch.tensor([[0, 3], [3, -1], [7, 4]], dtype=torch.int32)
    assert fallback.expert_load(experts, 4).tolist() == [1, 0, 0, 2]


def test_load_balancing_loss_is_switch_equation_4() -> None:
    logits = torch.randn(50, 8, dtype=torch.float64)
    experts = logits.argmax(dim=1, keepdim=True)
    p = torch.softmax(logits, dim=1)
    f = torch.stack([(experts == e).double().mean() for e in range(8)])
    torch.testing.assert_close(balancing(logits, experts), 8 * (f * p.mean(dim=0)).sum())


@pytest.mark.parametrize("score", SCORES)
def test_an_even_load_has_loss_one(score: str) -> None:
    experts = torch.arange(24).view(12, 2) % 8
    loss = balancing(torch.zeros(12, 8), experts, score)
    torch.testing.assert_close(loss, torch.tensor(1.0))


def test_z_loss_is_st_moe_equation_5() -> None:
    logits = torch.randn(9, 4, dtype=torch.float64)
    expected = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / 9
    assert fallback.z_loss(logits).item() == pytest.approx(expected)


def test_losses_of_no_tokens_are_zero() -> None:
    logits = torch.zeros(0, 4)
    assert balancing(logits, torch.zeros(0, 2, dtype=torch.int32)).item() == 0
    assert fallback.z_loss(logits).item() == 0


def test_bias_moves_against_the_load() -> None:
    bias = updated_bias(torch.zeros(4), torch.tensor([10, 2, 6, 6]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0, 0.0]


def test_bias_balances_a_skewed_router() -> None:
    torch.manual_seed(0)
    logits = torch.randn(512, 8) + torch.linspace(-2, 2, 8)
    bias = torch.zeros(8)

    def load() -> torch.Tensor:
        experts = fallback.choose_top_k(fallback.selection_keys(logits, "sigmoid", bias), 2)
        return fallback.expert_load(experts, 8)

    before = load()
    for _ in range(200):
        bias = updated_bias(bias, load(), 0.01)
    assert before.max() > 2 * 128
    assert load().max() < 1.15 * 128


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_route_top_k_is_choosing_then_gathering(score: str, renormalize: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 7, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64)

    def both(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.route_top_k(logits, bias, 3, score, renormalize, 1.5)

    scores, experts = both(logits)
    expected = fallback.choose_top_k(fallback.selection_keys(logits, score, bias), 3)
    assert torch.equal(experts, expected) and not experts.requires_grad
    gathered = fallback.chosen_scores(logits, expected, score=score, renormalize=renormalize, scale=1.5)
    torch.testing.assert_close(scores, gathered)
    torch.autograd.gradcheck(lambda v: both(v)[0], logits)
    weight = torch.randn_like(scores)
    got, plain = (torch.autograd.grad((s * weight).sum(), logits)[0] for s in (scores, gathered))
    torch.testing.assert_close(got, plain)


@pytest.mark.parametrize("score", SCORES)
def test_gradients(score: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    experts = fallback.choose_top_k(logits.detach(), 3)
    mask = torch.rand(5, 6) < 0.5
    pair_experts, _, token_offsets, _ = fallback.pairs_of(mask, 30)
    for renormalize in (False, True):
        options = {"score": score, "renormalize": renormalize, "scale": 1.5}
        torch.autograd.gradcheck(lambda v: fallback.chosen_scores(v, experts, **options), logits)  # noqa: B023
        torch.autograd.gradcheck(
            lambda v: fallback.pair_scores(v, pair_experts, token_offsets, **options),  # noqa: B023
            logits,
        )
    torch.autograd.gradcheck(lambda v: balancing(v, experts, score), logits)
    torch.autograd.gradcheck(fallback.z_loss, logits)


@pytest.mark.parametrize("groups", [(), (4, 2)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_the_kernels_are_called_as_the_fallback_is(
    score: str, biased: bool, groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are kernels the operators launch them, and take what they give: here the fallback stands for them."""
    if biased and score != "sigmoid":
        return
    torch.manual_seed(0)
    logits = torch.randn(9, 8, requires_grad=True)
    with torch.no_grad():
        logits[4] = math.nan
    bias = torch.randn(8) if biased else None
    weight = torch.randn(9, 3)

    def outcome() -> tuple[torch.Tensor, ...]:
        scores, experts = ops.route_top_k(logits, bias, 3, score, True, 1.5, *groups)
        return scores, experts, torch.autograd.grad((scores * weight).nansum(), logits)[0].nan_to_num(0.0)

    expected = outcome()
    called = play_kernels(monkeypatch)
    torch.testing.assert_close(outcome(), expected, equal_nan=True)
    assert called == {"topk_route", "topk_route_backward"}


@pytest.mark.gpu
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_fused_kernel_and_torch_agree(score: str, renormalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5000, 96, device="cuda", requires_grad=True)
    bias = torch.randn(96, device="cuda") / 8 if score == "sigmoid" else None
    weight = torch.randn(5000, 6, device="cuda")

    def outcome() -> tuple[torch.Tensor, ...]:
        scores, experts = ops.route_top_k(logits, bias, 6, score, renormalize, 1.5)
        return scores, experts, torch.autograd.grad((scores * weight).sum(), logits)[0]

    fused = outcome()
    monkeypatch.setattr(ops, "has_dispatch_kernels", lambda *_: False)
    plain = outcome()
    same = (fused[1] == plain[1]).all(dim=1)  # two sums s + b may round into another order
    assert same.float().mean() > 0.999
    torch.testing.assert_close(fused[0][same], plain[0][same])
    torch.testing.assert_close(fused[2][same], plain[2][same], rtol=1e-4, atol=1e-6)


def test_a_broken_token_has_the_first_experts_under_a_bias_too() -> None:
    logits = torch.randn(3, 6)
    logits[1, 2] = torch.nan
    bias = torch.arange(6.0)
    assert fallback.topk_route(logits, 2, score="sigmoid", bias=bias)[1][1].tolist() == [0, 1]


def test_a_balancing_loss_of_an_infinite_logit_is_nan() -> None:
    for value in (torch.inf, -torch.inf):
        logits = torch.zeros(3, 6)
        logits[1, 2] = value
        for score in ("softmax_topk", "sigmoid"):
            _, balance, z = fallback.routing_losses(logits, torch.zeros(3, 2, dtype=torch.int32), score=score)
            assert balance.isnan() and z.isnan(), (value, score)


def test_an_unknown_kind_of_scores_is_refused() -> None:
    with pytest.raises(ValueError, match=r"score: expected one of .*sigmod.*'sigmoid'"):
        fallback.chosen_scores(torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int32), "sigmod", False, 1.0)
