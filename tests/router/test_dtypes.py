"""A router computes in its own precision: fp64 ranks as fp64, and neither autocast nor torch's default dtype matters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from blazeproto.router import Routing
from blazeproto.router.choice import rank_tokens
from blazeproto.router.choices import TokenRounding, chosen_first_keys, rounded_counts
from blazeproto.router.fallback import choose_top_k
from blazeproto.router.router import ROUTERS, make_router


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def routed(name: str, x: torch.Tensor) -> Routing:
    torch.manual_seed(0)
    options = {"tile": 8} if name.startswith("token_rounding") else {}
    router = make_router(name, 16, 8, 2, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, **options)
    with torch.no_grad():
        router.weight.copy_(torch.linspace(-1, 1, 128, dtype=torch.float64).view(8, 16).sin())
    torch.manual_seed(1)
    return router(x, token_ids=torch.arange(len(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_autocast_and_the_default_dtype_change_nothing(name: str, dtype: torch.dtype, default_dtype: None) -> None:
    x = torch.randn(60, 16, dtype=dtype)
    expected = routed(name, x)
    assert expected.scores.dtype == expected.logits.dtype == dtype
    for reduced in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=reduced):
            torch.testing.assert_close(routed(name, x), expected, rtol=0, atol=0)
    for default in (torch.bfloat16, torch.float16, torch.float64):
        torch.set_default_dtype(default)
        torch.testing.assert_close(routed(name, x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ROUTERS)
def test_inference_mode_and_strides_change_nothing(name: str) -> None:
    x = torch.randn(60, 16)
    expected = routed(name, x)
    with torch.inference_mode():
        torch.testing.assert_close(routed(name, x), expected, rtol=0, atol=0)
    columns = x.t().contiguous().t()
    assert not columns.is_contiguous()
    torch.testing.assert_close(routed(name, columns), expected)


def test_float64_ranks_what_fp32_would_tie() -> None:
    """Scores that differ by 1e-12: the best come first, not the lower ids."""
    close = 0.5 + torch.arange(8, dtype=torch.float64)[:, None] * 1e-12
    assert choose_top_k(close.t(), 3).tolist() == [[7, 6, 5]]
    chosen = torch.tensor([[True], [False]] * 4)
    assert rank_tokens(chosen_first_keys(close, chosen)).tolist() == [[6, 4, 2, 0, 7, 5, 3, 1]]
    mask = TokenRounding(tile=3, rule="down")(close, torch.zeros(8, 1, dtype=torch.int32))
    assert mask.flatten().tolist() == [False, False, *[True] * 6]


@pytest.mark.parametrize("rule", ["sr_f", "nr_s"])
def test_draws_are_fp32_whatever_the_default(rule: str, default_dtype: None) -> None:
    """In bf16, .999 is 1 and a draw one of 256 numbers."""
    counts, row = torch.full((4000,), 999), torch.ones(4000, 1000)  # up with probability .999 by either rule

    def rounded() -> torch.Tensor:
        draws = TokenRounding(rule=rule).draws(4000, counts.device, torch.Generator().manual_seed(0))
        return rounded_counts(counts, 1000, rule, num_tokens=1000, sorted_scores=row, draws=draws)

    expected = rounded()
    assert expected.tolist().count(0) in range(1, 12)
    torch.set_default_dtype(torch.bfloat16)
    got = rounded()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("rule", ["sr_f", "nr_s"])
def test_a_generator_makes_the_draws(rule: str) -> None:
    scores = torch.rand(64, 16)
    choice, experts = TokenRounding(tile=8, rule=rule), choose_top_k(scores, 3)
    before = torch.get_rng_state()
    first, again, other = (choice(scores, experts, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    assert torch.equal(choice(scores, experts), first)
