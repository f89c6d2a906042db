"""Choices by kernels: the twins against torch, how the operators call them, the kernels compiled and simulated, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulator import simulate
from test_topk import check_kernel, fresh_cache, on_device  # noqa: F401  fresh_cache is a fixture

from blazeproto.router import choose_pairs, hash_route, pair_ops, pairs, reference, score_pairs, scoring
from blazeproto.router.choices import Capacity, ExpertChoice, Hash, TokenRounding
from blazeproto.router.kinds import RULES, SCORES, WAYS
from blazeproto.router.ops import choose_top_k, pairs_from_mask

FULL = pytest.mark.full

EVERY: list[Any] = [
    *(TokenRounding(tile=8, rule=rule) for rule in RULES),
    ExpertChoice(),
    ExpertChoice(0.01),
    ExpertChoice(100),
    *(Capacity(factor, priority) for factor in (0.01, 0.7, 100) for priority in ("slot", "token", "score")),
]


def scores_of(kind: str, num_tokens: int, num_experts: int) -> torch.Tensor:
    logits = torch.randn(num_tokens, num_experts)
    if kind == "ties":
        logits = logits.round()
    if kind == "same":
        logits.zero_()
    if kind == "one_expert":
        logits[:, num_experts // 2] += 20
    if kind == "nan":
        logits[::5] = math.nan
    return torch.softmax(logits, dim=1)


def by_torch(choice: Any, scores: torch.Tensor, experts: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """What `pairs_of` makes where there are no kernels."""
    return pair_ops.pairs_of(choice, scores, experts, torch.Generator(scores.device).manual_seed(seed))


# --- The twins, and the operators ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "ties", "same", "one_expert", "nan"])
@pytest.mark.parametrize("choice", EVERY, ids=str)
def test_the_twin_chooses_as_torch(choice: Any, kind: str) -> None:
    for num_tokens, num_experts, top_k in [(0, 3, 2), (1, 1, 1), (61, 5, 2), (33, 4, 4), (40, 70, 3)]:
        scores = scores_of(kind, num_tokens, num_experts)
        experts = choose_top_k(scores, top_k)
        expected = by_torch(choice, scores, experts)
        draws = torch.rand(num_experts, generator=torch.Generator().manual_seed(0))
        by, size = choice.way(num_tokens, num_experts, top_k)
        most = choice.max_pairs(num_tokens, num_experts, top_k)
        made = reference.choose_pairs(scores.numpy(), experts.numpy(), by, size, most, draws=draws.numpy())
        for got, right in zip(made, expected, strict=True):
            np.testing.assert_array_equal(got, right.numpy())
        mask = torch.zeros(scores.shape, dtype=torch.bool)
        used = expected[0] >= 0
        mask[expected[1][used].long(), expected[0][used].long()] = True
        generator = torch.Generator().manual_seed(0)
        options = {"generator": generator} if isinstance(choice, TokenRounding) else {}
        assert torch.equal(mask, choice(scores, experts, **options))


def some_pairs(num_tokens: int, num_experts: int, spare: int = 4) -> tuple[torch.Tensor, ...]:
    mask = torch.rand(num_tokens, num_experts) < 0.5
    mask[num_tokens // 2] = False
    return pair_ops.ops.pairs_from_mask(mask, int(mask.sum()) + spare)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_the_twin_scores_as_torch(score: str, renormalize: bool) -> None:
    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": 1.5}
    logits = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    experts, tokens, offsets = some_pairs(9, 6)
    right = scoring.pair_scores(logits, experts, tokens, **options)
    d_scores = torch.randn_like(right)
    (d_logits,) = torch.autograd.grad(right, logits, d_scores)
    given = logits.detach().numpy(), experts.numpy(), offsets.numpy()
    np.testing.assert_allclose(reference.score_pairs(*given, **options), right.detach().numpy(), rtol=1e-12)
    made = reference.score_pairs_backward(*given, d_scores.numpy(), **options)
    np.testing.assert_allclose(made, d_logits.numpy(), rtol=1e-9, atol=1e-14)

    scores = pair_ops.score_pairs(logits, experts, tokens, offsets, *options.values())
    torch.testing.assert_close(scores, right)
    torch.testing.assert_close(torch.autograd.grad(scores, logits, d_scores)[0], d_logits)


def test_a_token_that_is_nan_scores_nan_and_passes_no_gradient() -> None:
    logits = torch.randn(5, 4)
    logits[1] = math.nan
    experts, _, offsets = pair_ops.ops.pairs_from_mask(torch.ones(5, 4, dtype=torch.bool), 20)
    for score in SCORES:
        made = reference.score_pairs(logits.numpy(), experts.numpy(), offsets.numpy(), score=score)
        assert np.isnan(made[4:8]).all() and np.isfinite(np.delete(made, range(4, 8))).all()
        d_logits = reference.score_pairs_backward(
            logits.numpy(), experts.numpy(), offsets.numpy(), np.ones(20, np.float32), score=score
        )
        assert (d_logits[1] == 0).all() and np.isfinite(d_logits).all()


def test_the_twin_hashes_as_torch() -> None:
    ids = torch.tensor([0, 5, -1, 2**40 + 3, 50256, -(2**62)])
    for num_experts, top_k, seed in [(1, 1, 0), (8, 2, 7), (100, 9, -3), (1000, 16, 2**70)]:
        made = reference.hash_route(ids.numpy(), num_experts, top_k, seed=seed)
        np.testing.assert_array_equal(made, Hash(seed)(ids, num_experts, top_k).numpy())
        assert torch.equal(pair_ops.hashed(Hash(seed), ids, num_experts, top_k), torch.from_numpy(made))


def test_operators_are_well_formed() -> None:
    scores = scores_of("normal", 12, 4)
    experts = choose_top_k(scores, 2)
    for by in WAYS:
        torch.library.opcheck(pair_ops.choose_pairs.overload, (scores, experts, torch.rand(4), by, 4, 48))
    listed = some_pairs(12, 4)
    for score in SCORES:
        logits = torch.randn(12, 4, requires_grad=True)
        torch.library.opcheck(pair_ops.score_pairs.overload, (logits, *listed, score, True, 1.5))
    torch.library.opcheck(pair_ops.hash_experts.overload, (torch.arange(5), 8, 2, 3))


def test_the_kernels_are_called_as_their_twins_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are kernels the operators call them, and take what they give: here their NumPy twins stand for them."""
    scores, ids = scores_of("ties", 30, 6), torch.arange(30)
    experts = choose_top_k(scores, 2)
    logits = torch.randn(30, 6, requires_grad=True)

    def outcome(choice: Any) -> list[torch.Tensor]:
        made = by_torch(choice, scores, experts)
        given = pair_ops.score_pairs(logits, *made[:3], "sigmoid", True, 1.5)
        (d_logits,) = torch.autograd.grad(given.square().sum(), logits)
        return [*made, given, d_logits, pair_ops.hashed(Hash(5), ids, 6, 2)]

    expected = [outcome(choice) for choice in EVERY]
    calls = set()

    def standing_for(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.add(name)

            def on_host(value: Any) -> Any:
                return value.detach().numpy() if isinstance(value, torch.Tensor) else value

            kept = {key: on_host(value) for key, value in options.items()}
            made = getattr(reference, name)(*map(on_host, arguments), **kept)
            return tuple(map(torch.from_numpy, made)) if isinstance(made, tuple) else torch.from_numpy(made)

        return call

    for name in ("choose_pairs", "score_pairs", "score_pairs_backward"):
        monkeypatch.setattr(pairs, name, standing_for(name))
    monkeypatch.setattr(pair_ops.hashing, "hash_route", standing_for("hash_route"))
    monkeypatch.setattr(pair_ops, "has_dispatch_kernels", lambda *_: True)
    for choice, right in zip(EVERY, expected, strict=True):
        torch.testing.assert_close(outcome(choice), right)
    assert calls == {"choose_pairs", "score_pairs", "score_pairs_backward", "hash_route"}


def test_a_way_that_no_kernel_has_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, experts = torch.rand(30, 5) < 0.4, torch.zeros(30, 2, dtype=torch.int32)
    monkeypatch.setattr(pair_ops, "has_dispatch_kernels", lambda *_: True)
    monkeypatch.setattr(pair_ops.choices, "choose_mask", lambda *_: mask)
    made = pair_ops.choose_pairs(torch.rand(30, 5), experts, None, "threshold", 0, 100)
    torch.testing.assert_close(made, (*pairs_from_mask(mask, 100), mask.sum(0, dtype=torch.int32)))


# --- The kernels without a GPU -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["score", *(pytest.param(w, marks=FULL) for w in WAYS if w != "score")])
def test_choosing_compiles(fresh_cache: None, by: str) -> None:  # noqa: F811
    kernels = [kernel for kernel in pairs.choosing_kernels(128, 8, by) if kernel is not None]
    assert len(kernels) == (6 if by == "score" else 5)
    for kernel in kernels:
        check_kernel(kernel)


@pytest.mark.parametrize(("score", "together"), [("softmax_topk", True), ("softmax_topk", False), ("sigmoid", True)])
def test_scoring_compiles(fresh_cache: None, score: str, together: bool) -> None:  # noqa: F811
    check_kernel(pairs.score_kernel(128, score, together, 1.0))
    check_kernel(pairs.score_backward_kernel(128, score, together, 1.0))


def test_hashing_compiles(fresh_cache: None) -> None:  # noqa: F811
    check_kernel(pair_ops.hashing.hash_kernel(128, 8))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["few", *(pytest.param(part, marks=FULL) for part in ("select", "scores"))])
def test_simulated(part: str) -> None:
    simulate(Path(__file__).with_name("simulate_choices.py"), part)


# --- Refusals ------------------------------------------------------------------------------------------------------------

IDS = on_device(4, 2, dtype="int32")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((on_device(4, 8), IDS, "nr_g", 8, 9), {}, ValueError, "by: expected one of .*, got 'nr_g'"),
        ((on_device(4, 8), IDS, "nr_f", 0, 9), {}, ValueError, "size: expected at least 1, got 0"),
        ((on_device(4, 8), IDS, "slot", -1, 9), {}, ValueError, "size: expected at least 0, got -1"),
        ((on_device(4, 8), IDS, "expert_choice", 5, 9), {}, ValueError, "size: expected at most T=4 .*, got 5"),
        ((on_device(4, 8), IDS, "slot", 1, -1), {}, ValueError, "max_pairs: expected at least 0, got -1"),
        ((on_device(4, 8), IDS, "slot", 1, 2**31), {}, ValueError, r"max_pairs, T\*K: expected less than 2\*\*31"),
        (
            (on_device(4, 8), IDS, "sr_f", 8, 9),
            {},
            ValueError,
            "draws: expected a number for each expert with by='sr_f'",
        ),
        ((on_device(4, 8), IDS, "sr_f", 8, 9), {"draws": on_device(7)}, ValueError, r"draws: expected shape \(8\)"),
        ((on_device(5, 8), IDS, "slot", 1, 9), {}, ValueError, r"experts: expected shape \(5, any\)"),
        ((on_device(4, 1), IDS, "slot", 1, 9), {}, ValueError, r"experts: expected \(T, K\) with K from 1 to 1"),
        ((on_device(4, 8, dtype="float64"), IDS, "slot", 1, 9), {}, TypeError, "scores: expected dtype float32"),
        ((on_device(4, 1025), IDS, "slot", 1, 9), {}, ValueError, "scores: expected .* 1 <= E <= 1024"),
        (
            (torch.zeros(4, 8), IDS, "slot", 1, 9),
            {},
            ValueError,
            "experts: expected an array in host memory, as scores is",
        ),
        ((on_device(4, 8), np.zeros((4, 2), np.int32), "slot", 1, 9), {}, ValueError, "experts: .* on a CUDA device"),
    ],
)
def test_bad_choosing(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_pairs(*arguments, **options)


def test_bad_scoring_and_hashing() -> None:
    listed, offsets = on_device(9, dtype="int32"), on_device(5, dtype="int32")
    with pytest.raises(ValueError, match=r"score: expected one of .*, got 'cosine'"):
        score_pairs(on_device(4, 8), listed, offsets, score="cosine")
    with pytest.raises(ValueError, match=r"token_offsets: expected shape \(5\), got \(4,\)"):
        score_pairs(on_device(4, 8), listed, on_device(4, dtype="int32"))
    with pytest.raises(ValueError, match=r"d_scores: expected shape \(9\), got \(8,\)"):
        pairs.score_pairs_backward(on_device(4, 8), listed, offsets, on_device(8))
    with pytest.raises(TypeError, match="token_ids: expected dtype int64, got int32"):
        hash_route(on_device(4, dtype="int32"), 8, 2)
    with pytest.raises(ValueError, match="top_k: expected 1 to 8 for E=8, got 9"):
        hash_route(on_device(4, dtype="int64"), 8, 9)
    with pytest.raises(ValueError, match="num_experts: expected 1 to 1024, got 1025"):
        hash_route(on_device(4, dtype="int64"), 1025, 9)
