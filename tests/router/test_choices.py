"""Token rounding, expert choice, capacity and hash: what each promises, over random cases with ties."""

import math
from typing import Any, NamedTuple

import by_the_papers as papers
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blazeproto.router import fallback
from blazeproto.router.choice import rank_tokens
from blazeproto.router.choices import (
    Capacity,
    ExpertChoice,
    Hash,
    TokenRounding,
    chosen_first_keys,
    rounded_counts,
)
from blazeproto.router.fallback import choose_top_k
from blazeproto.router.kinds import RULES
from blazeproto.router.pair_ops import choose_pairs

SOME = settings(max_examples=60, deadline=None)


class Case(NamedTuple):
    scores: Tensor  # (T, E)
    experts: Tensor  # (T, K), by token choice


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_tokens, num_experts = draw(st.integers(1, 80)), draw(st.integers(1, 12))
    top_k = draw(st.integers(1, num_experts))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    skew = torch.linspace(0, draw(st.sampled_from([0.0, 2.0, 60.0])), num_experts)
    logits = torch.randn(num_tokens, num_experts, dtype=draw(st.sampled_from([torch.float32, torch.float64]))) + skew
    if draw(st.booleans()):
        logits = torch.round(logits)  # ties
    scores = torch.sigmoid(logits) if draw(st.booleans()) else torch.softmax(logits, dim=1)
    return Case(scores, choose_top_k(logits, top_k))


FACTORS = st.sampled_from([0.2, 0.3, 1.0, 1.25, 2.0, 100.0])
PRIORITIES = st.sampled_from(["slot", "token", "score"])


@pytest.mark.parametrize(
    "choices",
    [
        *(st.builds(TokenRounding, st.sampled_from([1, 2, 3, 8, 16, 128]), st.just(rule)) for rule in RULES),
        st.builds(ExpertChoice, FACTORS),
        st.builds(Capacity, FACTORS, PRIORITIES),
    ],
    ids=str,
)
@SOME
@given(data=st.data(), case=cases())
def test_a_choice_is_what_its_paper_says(choices: st.SearchStrategy[Any], data: st.DataObject, case: Case) -> None:
    choice, generator = data.draw(choices), torch.Generator()
    (num_tokens, num_experts), top_k = case.scores.shape, case.experts.shape[1]
    draws = torch.rand(num_experts, generator=generator.manual_seed(3)).tolist()
    mask = choice(case.scores, case.experts, generator.manual_seed(3))
    pairs = papers.pairs_of_choice(choice, case.scores.tolist(), case.experts.tolist(), draws)
    assert [*map(tuple, mask.nonzero().tolist())] == pairs
    assert len(pairs) <= choice.max_pairs(num_tokens, num_experts, top_k)


# ---------------------------------------------------------------------------------------------------------------------
# Token rounding


@pytest.mark.parametrize("masked", [0, 7])
@pytest.mark.parametrize("rule", RULES)
def test_a_batch_too_small_to_round_keeps_every_pair(rule: str, masked: int) -> None:
    """T below a tile, or T K / E below half of one, where T counts unmasked tokens; from there on tiles are whole."""
    choice, size = TokenRounding(tile=16, rule=rule), (4, 2)
    for num_tokens, rounds in ((0, False), (1, False), (15, False), (16, True), (40, True)):
        scores = torch.rand(num_tokens + masked, 4)
        counted = torch.arange(num_tokens + masked) < num_tokens
        experts = choose_top_k(scores, 2).masked_fill(~counted[:, None], -1)
        scores[num_tokens:] = 0
        crossing = choice.crossing(scores, experts, counted=counted if masked else None)
        pair_experts, _, _, load = choose_pairs(*crossing)
        chosen = fallback.expert_load(experts, 4)
        if rounds:
            assert (load % 16 == 0).all()
        else:
            assert choice.max_pairs(num_tokens, *size) == 2 * num_tokens and torch.equal(load, chosen)
            assert (pair_experts >= 0).sum() == 2 * num_tokens
    for num_tokens, rounds in ((63, False), (64, True)):  # K = 1, E = 8: below and at half a tile
        assert (choice.size(num_tokens, 8, 1) == 16) == rounds
        assert (choice.size(torch.tensor(num_tokens), 8, 1) == 16) == rounds


def test_equation_14_first_bound_holds_within_a_tile_not_half_of_one() -> None:
    """The paper also bounds each expert's own error by M / 2. Its Algorithm 6 does not, nor can anything that keeps
    the total: of two experts with 4 tokens and tiles of 10, one must become 10 (6 off) or the total is 8 off. What
    holds for each expert is less than one tile: it is rounded to the multiple below or above."""
    assert rounded_counts(torch.tensor([4, 4]), 10, "balance_f", num_tokens=100).tolist() == [0, 10]


def test_token_choice_wins_however_small_its_score() -> None:
    # Sigmoids saturate: expert 0 is chosen (by its bias) with score 0 while others have 1.
    scores = torch.tensor([[0.0], [1.0], [1.0], [1e-30]])
    chosen = torch.tensor([[True], [False], [False], [True]])
    assert rank_tokens(chosen_first_keys(scores, chosen)).tolist() == [[3, 0, 1, 2]]


# ---------------------------------------------------------------------------------------------------------------------
# Capacity


def test_batch_priority_ties_go_to_the_lower_token_and_nan_comes_first() -> None:
    scores = torch.tensor([[0.5, 0.5]] * 3 + [[math.nan, math.nan]])
    experts = choose_top_k(scores, 1)
    one, two = (Capacity(capacity_factor=factor, priority="score")(scores, experts)[:, 0] for factor in (0.5, 1))
    assert one.tolist() == [False, False, False, True] and two.tolist() == [True, False, False, True]


def capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    return Capacity(factor).size(num_tokens, num_experts, top_k)


def test_capacity_is_exact() -> None:
    assert capacity(100, 10, 1, 1.1) == 11
    assert capacity(100, 10, 1, np.float32(1.1)) == capacity(100, 10, 1, np.float64(1.1)) == 11
    assert capacity(100, 10, 2, 2) == 40 and capacity(10, 10, 1, 1e-6) == 1
    wrong = []
    for hundredths in range(1, 400):
        for num_tokens, num_experts in ((100, 10), (7, 3), (4096, 64), (1000, 128)):
            exact = min(num_tokens, -(-hundredths * num_tokens * 2 // (100 * num_experts)))
            if capacity(num_tokens, num_experts, 2, hundredths / 100) != exact:
                wrong.append((hundredths, num_tokens, num_experts))
    assert not wrong


@pytest.mark.parametrize("factor", [1 / 3, 4 / 3, 5 / 3, 0.1234567890123456, 1.1, 1e-20, 1e20])
@pytest.mark.parametrize("num_tokens", [1, 3, 1000, 32768, 2**30])
def test_capacity_counted_on_the_device_is_the_hosts(factor: float, num_tokens: int) -> None:
    sizes = [int(Capacity(factor).size(number, 64, 8)) for number in (num_tokens, torch.tensor(num_tokens))]
    assert sizes[0] == sizes[1] and 1 <= sizes[0] <= num_tokens


def test_a_third_of_a_float_is_a_third() -> None:
    assert [capacity(3, 1, 1, thirds / 3) for thirds in (1, 2)] == [1, 2]
    assert [capacity(30, 10, 1, thirds / 3) for thirds in (4, 5, 7)] == [4, 5, 7]


# ---------------------------------------------------------------------------------------------------------------------
# Hash


@given(st.integers(1, 64), st.integers(0, 2**40), st.data())
def test_hash_is_a_function_of_the_id_with_distinct_experts(num_experts: int, seed: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    ids = torch.tensor([5, 9, 5, -1, 2**62, 50256])
    experts = Hash(seed=seed)(ids, num_experts, top_k)
    assert torch.equal(experts[0], experts[2])
    assert torch.equal(Hash(seed=seed)(ids.flip(0), num_experts, top_k).flip(0), experts)
    assert ((experts >= 0) & (experts < num_experts)).all()
    assert all(len(set(row)) == top_k for row in experts.tolist())


def test_hash_stays_what_it_was() -> None:
    """A trained layer depends on it: these values must never change."""
    assert Hash()(torch.tensor([0, 1, 2, 255]), 8, 2).tolist() == [[3, 1], [1, 5], [3, 4], [7, 6]]


def test_hash_is_even_and_seeds_differ() -> None:
    ids = torch.arange(20000)
    first, second = Hash(seed=0)(ids, 12, 2), Hash(seed=1)(ids, 12, 2)
    for experts in (first, second):
        load = torch.bincount(experts.flatten().long(), minlength=12).double()
        assert (load / load.mean() - 1).abs().max() < 0.06
    assert (first[:, 0] == second[:, 0]).double().mean().item() == pytest.approx(1 / 12, abs=0.02)
