"""Routers with any options, on any input, against `reference_router`: choices, scores, losses, gradients, records.

How far a result may be off follows from the arithmetic, in units of u = 2^-24 (2^-53 in float64):

    a logit     u (d + 2) Σ |x| |w|: any order of d products and sums            Higham 2002, §3.1
    a score     twice the logits' error of its token (numerator and sum), E + 10 roundings, and those of the logits and their
                differences, which an exponential makes relative errors
    a gradient  as much of the sum of the absolute values of its terms
"""

import contextlib
import math
from typing import Any

import reference_router as reference
import torch
from hypothesis import strategies as st
from profiles import SHARDS, check
from router_cases import (
    F32,
    F64,
    LEAST,
    UNIT,
    Case,
    Expected,
    check_choice,
    check_record,
    dense_mask,
    draw_case,
    expect,
    tokens_of,
)
from torch import Tensor

from blazeproto.router.choices import Capacity
from blazeproto.router.router import Router, Routing, make_router


def check_scores(case: Case, routing: Routing, scores: Tensor, expected: Expected) -> None:
    """scores: the reference's (T, E) of the pairs that run."""
    tokens = tokens_of(routing)
    used = routing.experts >= 0
    want = scores.detach()[tokens[used], routing.experts[used].long()]
    error = (routing.scores.detach().double()[used] - want).abs()
    bound = expected.score_error[tokens[used], 0] * want + case.router.scale * expected.least
    worst = int((error - bound).argmax()) if len(error) else 0
    assert (error <= bound).all(), f"score {want[worst]} is off by {error[worst]}, allowed {bound[worst]}"


def chosen_by_token(case: Case, routing: Routing, expected: Expected) -> list[list[int]]:
    """What the balancing loss counts: the router's own choice, which of experts that tie need not be the reference's."""
    chosen = expected.chosen if case.varies else routing.experts.tolist()
    return [[e for e in row if 0 <= e < case.router.num_experts] for row in chosen]


def gradient_terms(
    case: Case,
    expected: Expected,
    chosen: list[list[int]],
    scores: Tensor,
    d_scores: Tensor,
    weights: dict[str, float],
) -> Tensor:
    """(T, E): the sum of the absolute values of what is added to give the gradient of each logit.

    chosen: `chosen_by_token`.  scores, d_scores (T, E).  weights: by which each auxiliary loss is multiplied.
    """
    router, logits = case.router, expected.logits.detach()
    num_tokens, num_experts = logits.shape
    probabilities = reference.dense_scores(logits, router.score)
    d, s = d_scores.abs(), scores.detach() / router.scale
    terms = router.scale * s * (d + (d * s).sum(dim=1, keepdim=True))
    if router.score == "softmax_topk" and not router.renormalize:
        terms = router.scale * probabilities * (d + (d * probabilities * (s > 0)).sum(dim=1, keepdim=True))
    if "load_balancing" in weights:
        p = reference.probabilities(logits, router.score)
        choices = torch.tensor([e for row in chosen for e in row], dtype=torch.int64)
        share = torch.bincount(choices, minlength=num_experts)
        share = share * num_experts / max(int(share.sum()), 1)
        size = weights["load_balancing"] * router.aux_loss / max(num_tokens, 1)
        terms = terms + size * p * (share + (p * share).sum(dim=1, keepdim=True))
    if "z" in weights:
        size = weights["z"] * router.z_loss / max(num_tokens, 1)
        lse = torch.logsumexp(logits, dim=1, keepdim=True).abs() + 1
        terms = terms + 2 * size * lse * torch.softmax(logits, dim=1)
    return terms


def try_router(data: Any) -> None:
    case = draw_case(data)
    router = case.router
    x_wants, weight_wants = (
        data.draw(st.booleans(), "x.requires_grad"),
        data.draw(st.booleans(), "weight.requires_grad"),
    )
    case.x.requires_grad_(x_wants)
    router.weight.requires_grad_(weight_wants)
    autocast = data.draw(st.booleans(), "autocast")
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        routing = router(case.x, case.ids)
    check_record(case, routing)

    x64, weight64 = (t.detach().double().requires_grad_() for t in (case.x, router.weight))
    expected = expect(case, x64, weight64)
    error = (routing.logits.detach().double() - expected.logits.detach()).abs()
    assert (error <= expected.logit_error + expected.least).all()
    check_choice(case, routing, expected)

    mask = dense_mask(routing, router.num_experts)
    options = (router.score, router.renormalize, router.scale)
    scores = reference.kept_scores(expected.logits, mask, *options)
    check_scores(case, routing, scores, expected)

    losses = {}
    if router.aux_loss:
        chosen = expected.chosen if case.varies else routing.experts.tolist()
        losses["load_balancing"] = router.aux_loss * reference.load_balancing_loss(
            expected.logits, chosen, router.score
        )
    if router.z_loss:
        losses["z"] = router.z_loss * reference.z_loss(expected.logits)
    assert set(losses) == set(routing.aux_losses)
    unknown_choice = case.varies and bool(expected.order.within)  # ours and theirs may count differently
    if unknown_choice:
        losses.pop("load_balancing", None)
    slack = float(expected.score_error.amax()) if len(x64) else 0.0
    for name, loss in losses.items():
        got, size = routing.aux_losses[name].item(), abs(loss.item()) + 1e-30
        if name == "z":  # the error of a logsumexp is absolute
            size = torch.logsumexp(expected.logits.detach(), dim=1).abs().add(1).square().mean().nan_to_num()
            size = router.z_loss * float(size)
        assert abs(got - loss.item()) <= 2 * (slack + expected.unit * (len(x64) + 10)) * size + 1e-30, name

    if not (x_wants or weight_wants) or unknown_choice:
        assert routing.scores.requires_grad == (x_wants or weight_wants)
        return
    check_gradients(case, routing, expected, scores, losses, x64, weight64)


def check_gradients(
    case: Case,
    routing: Routing,
    expected: Expected,
    scores: Tensor,
    losses: dict[str, Tensor],
    x64: Tensor,
    weight64: Tensor,
) -> None:
    router, (num_tokens, num_experts) = case.router, scores.shape
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(num_tokens, num_experts, generator=generator).double()
    tokens = tokens_of(routing)
    if num_tokens:
        d_scores = torch.where(routing.experts >= 0, dense[tokens, routing.experts.long().clamp_min(0)], torch.nan)
        d_scores = d_scores.nan_to_num(nan=3.0)  # a place without a pair passes nothing on
    else:
        d_scores = torch.zeros(routing.scores.shape, dtype=F64)
    weights = {"load_balancing": 1.5, "z": 0.5}
    weights = {name: weight for name, weight in weights.items() if name in losses}
    (scores * dense).sum().add(sum(weights[name] * loss for name, loss in losses.items())).backward()
    total = (routing.scores * d_scores.to(routing.scores.dtype)).sum()
    total = total + sum(weight * routing.aux_losses[name] for name, weight in weights.items())
    total.backward()

    terms = gradient_terms(case, expected, chosen_by_token(case, routing, expected), scores, dense, weights)
    d_logit_error = 2 * expected.score_error * terms + expected.least * router.scale * 100
    unit, x_size, weight_size = expected.unit, x64.detach().abs(), weight64.detach().abs()
    bounds = (
        (d_logit_error + unit * (num_experts + 2) * terms) @ weight_size,
        (d_logit_error + unit * (num_tokens + 2) * terms).T @ x_size,
    )
    for tensor, exact, bound, name in zip(
        (case.x, router.weight), (x64, weight64), bounds, ("x", "weight"), strict=True
    ):
        if not tensor.requires_grad:
            assert tensor.grad is None, name
            continue
        assert tensor.grad.dtype == tensor.dtype and tensor.grad.isfinite().all(), name
        error = (tensor.grad.double() - exact.grad).abs()
        bound = bound + UNIT[tensor.dtype] * (exact.grad.abs() + bound) + LEAST[tensor.dtype]
        assert (error <= bound).all(), f"gradient of {name}: off by {(error / bound).max():.3g} times what is allowed"


@SHARDS
def test_router_against_the_papers(shard: int) -> None:
    check(try_router, shard, examples=1900)


def try_bad_tokens(data: Any) -> None:
    """Tokens with NaN or infinite features: NaN in their own scores, valid ids, and the others' scores as without them."""
    case = draw_case(data)
    if not len(case.x):
        return
    bad = torch.zeros(len(case.x), dtype=torch.bool)
    bad[data.draw(st.lists(st.integers(0, len(case.x) - 1), min_size=1, max_size=4), "bad tokens")] = True
    case.x = torch.where(bad[:, None], data.draw(st.sampled_from([math.nan, math.inf, -math.inf])), case.x)
    routing = case.router(case.x, case.ids)
    check_record(case, routing)
    assert routing.logits[bad].isnan().all() and routing.logits[~bad].isfinite().all()
    mask = dense_mask(routing, case.router.num_experts)
    mine = routing.experts >= 0
    if routing.pair_tokens is None:
        assert routing.scores[bad].isnan().all() and routing.scores[~bad].isfinite().all()
    else:
        mine &= bad[routing.pair_tokens.long()]
        assert routing.scores[mine].isnan().all() and routing.scores[~mine].isfinite().all()
    x64, weight64 = case.x[~bad].double(), case.router.weight.detach().double()
    logits = x64 @ weight64.T
    options = (case.router.score, case.router.renormalize, case.router.scale)
    want = torch.full(mask.shape, math.nan, dtype=F64)
    want[~bad] = reference.kept_scores(logits, mask[~bad], *options)
    tokens = tokens_of(routing)
    good = (routing.experts >= 0) & ~bad[tokens]
    want, got = want[tokens[good], routing.experts[good].long()], routing.scores[good].double()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-30)  # try_router looks closer


@SHARDS
def test_a_bad_token_harms_no_other(shard: int) -> None:
    check(try_bad_tokens, shard, examples=300)


def try_hash(data: Any) -> None:
    """A hash depends on the token id alone, gives distinct experts, and the first K of K + 1."""
    num_experts = data.draw(st.integers(1, 40), "E")
    top_k = data.draw(st.integers(1, num_experts), "K")
    seed = data.draw(st.integers(0, 2**40), "seed")
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 2**31), max_size=20), "ids"), dtype=torch.int64)
    router = make_router("hash", 4, num_experts, top_k, seed=seed)
    experts = router.choice(ids, num_experts, top_k)
    assert experts.shape == (len(ids), top_k) and ((experts >= 0) & (experts < num_experts)).all()
    assert all(len(set(row)) == top_k for row in experts.tolist())
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    assert torch.equal(router.choice(ids[order], num_experts, top_k), experts[order])
    if top_k > 1:
        assert torch.equal(router.choice(ids, num_experts, top_k - 1), experts[:, :-1])
    assert torch.equal(router(torch.randn(len(ids), 4), ids).experts, experts)


@SHARDS
def test_hash(shard: int) -> None:
    check(try_hash, shard, examples=100)


def try_capacities(data: Any) -> None:
    """factor T K / E rounded up, at most T, whatever the factor's nearest binary number is: Switch Transformer eq. 3."""
    # Sizes that make many products whole numbers, where rounding up goes wrong first.
    num_tokens, num_experts = (
        50 * data.draw(st.integers(0, 60), "T / 50"),
        data.draw(st.sampled_from([1, 2, 5, 8, 10]), "E"),
    )
    top_k = data.draw(st.integers(1, num_experts), "K")
    factor = data.draw(st.integers(1, 400), "hundredths") / 100
    want = min(num_tokens, -(-round(factor * 100) * num_tokens * top_k // (100 * num_experts)))
    assert Capacity(factor).size(num_tokens, num_experts, top_k) == want


@SHARDS
def test_capacities(shard: int) -> None:
    check(try_capacities, shard, examples=500)


def try_bias_steps(data: Any) -> None:
    """Up by the rate where the load was below its mean, down where above: Wang et al. 2024, Algorithm 1."""
    num_experts = data.draw(st.integers(1, 20), "E")
    load = data.draw(st.lists(st.integers(0, 2**24), min_size=num_experts, max_size=num_experts), "load")
    rate = data.draw(st.sampled_from([0.0, 1e-3, 0.5]), "rate")
    router = Router(4, num_experts, 1, score="sigmoid", bias_update_rate=rate)
    router.expert_bias.normal_()
    before = router.expert_bias.tolist()
    router.update_bias(torch.tensor(load, dtype=data.draw(st.sampled_from([torch.int32, torch.int64, F32]), "dtype")))
    total = sum(load)
    for got, was, count in zip(router.expert_bias.tolist(), before, load, strict=True):
        sign = (count * num_experts < total) - (count * num_experts > total)
        near = abs(count * num_experts - total) <= 2.0**-22 * total  # the mean is rounded
        assert near or abs(got - (was + rate * sign)) <= 2.0**-23 * (abs(was) + rate)


@SHARDS
def test_bias_steps(shard: int) -> None:
    check(try_bias_steps, shard, examples=60)
