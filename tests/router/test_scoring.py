"""Scores, top-k, auxiliary losses and the balancing bias against their formulas."""

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
    assert experts.dtype == torch.int32 and torch.equal(experts.long(), expected)


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
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        logits = router_logits(x, weight, None)
    assert [t.dtype for t in saved if t.shape == x.shape] == [torch.bfloat16]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # backward keeps out of it too
        logits.sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, x.detach().float().sum(dim=0).expand(4, 8))
    torch.testing.assert_close(x.grad, weight.detach().sum(dim=0).bfloat16().expand(12, 8))


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


def test_losses_of_no_tokens_are_zero() -> None:
    logits = torch.zeros(0, 4)
    assert fallback.load_balancing_loss(logits, torch.zeros(4, dtype=torch.int32), 2, "softmax_topk").item() == 0
    assert fallback.z_loss(logits).item() == 0


def test_bias_balances_a_skewed_router() -> None:
    logits = torch.randn(512, 8) + torch.linspace(-2, 2, 8)
    bias = torch.zeros(8)

    def load() -> torch.Tensor:
        experts = fallback.choose_top_k(fallback.selection_keys(logits, "sigmoid", bias), 2)
        return fallback.expert_load(experts, 8)

    before = load()
    for _ in range(200):
        bias = updated_bias(bias, load(), 0.01)
    assert before.max() > 2 * 128 and load().max() < 1.15 * 128


@pytest.mark.parametrize("groups", [(), (4, 2)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_the_kernels_are_called_as_the_fallback_is(
    score: str, biased: bool, groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are kernels the operators launch them, and take what they give: here the fallback stands for them."""
    if biased and score != "sigmoid":
        return
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


def test_a_broken_token_has_the_first_experts_under_a_bias_too() -> None:
    logits = torch.randn(3, 6)
    logits[1, 2] = torch.nan
    bias = torch.arange(6.0)
    assert fallback.topk_route(logits, 2, score="sigmoid", bias=bias)[1][1].tolist() == [0, 1]
