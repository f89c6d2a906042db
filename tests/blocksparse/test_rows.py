"""Padded gather and scatter and the scores' gradient: twins against loops over pairs, kernels against twins."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blazeproto.blocksparse import padded_gather, padded_scatter, score_grad, topology_of
from blazeproto.dispatch import Dispatch
from blazeproto.runtime.rounding import from_bfloat16_bits
from tests.refusals import refuses

from .room import DISPATCHES, bf16, dispatch_of, on_machine, some


def tokens_of(dispatch: Dispatch) -> Any:
    """The token of each pair."""
    return np.arange(dispatch.num_pairs) // dispatch.top_k if dispatch.top_k else dispatch.pair_tokens


@pytest.mark.parametrize("name", DISPATCHES)
def test_twins(name: str) -> None:
    """In float64, pair by pair."""
    dispatch, rng, d = dispatch_of(name), np.random.default_rng(0), 5
    (M, _), padding = (made := topology_of(dispatch, 128))[0].shape, made[2]
    x, rows = rng.standard_normal((dispatch.num_tokens, d)), rng.standard_normal((M, d))
    scores, weights = rng.standard_normal(dispatch.num_pairs), np.ones(dispatch.num_pairs)
    rows[padding.row_pairs < 0] = np.nan  # what a row of no pair holds is never read
    for given in (None, scores):
        gathered, summed = np.zeros((M, d)), np.zeros_like(x)
        for pair, (row, token) in enumerate(zip(padding.pair_rows, tokens_of(dispatch), strict=True)):
            weight = (weights if given is None else scores)[pair]
            if row >= 0:
                gathered[row] = weight * x[token]
                summed[token] += weight * rows[row]
        np.testing.assert_array_equal(padded_gather(x, padding, dispatch, given), gathered)
        np.testing.assert_allclose(padded_scatter(rows, padding, dispatch, given), summed, rtol=1e-12, atol=1e-12)
    right = [
        x[token] @ rows[row] if row >= 0 else 0.0
        for row, token in zip(padding.pair_rows, tokens_of(dispatch), strict=True)
    ]
    np.testing.assert_allclose(score_grad(x, rows, padding, dispatch), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name", some(DISPATCHES, "uniform", "limited", "busy", "empty experts", "nobody", "one expert")
)
def test_kernels(name: str) -> None:
    dispatch, rng, d = dispatch_of(name), np.random.default_rng(1), 280 if name == "sentinels" else 24
    (M, _), padding = (made := topology_of(dispatch, 128))[0].shape, made[2]
    (x, its_x), (rows, its_rows) = bf16(rng, dispatch.num_tokens, d), bf16(rng, M, d)
    rows[padding.row_pairs < 0] = 0x7FFF  # NaN
    scores = rng.standard_normal(dispatch.num_pairs).astype(np.float32)
    with on_machine():
        gathered = padded_gather(x, padding, dispatch)
        weighed = padded_gather(x, padding, dispatch, scores)
        sums = [padded_scatter(rows, padding, dispatch, given) for given in (None, scores)]
        d_scores = score_grad(x, rows, padding, dispatch)
    np.testing.assert_array_equal(from_bfloat16_bits(gathered), padded_gather(its_x, padding, dispatch))
    np.testing.assert_array_equal(from_bfloat16_bits(weighed), padded_gather(its_x, padding, dispatch, scores))
    for made, given in zip(sums, (None, scores), strict=True):
        right = padded_scatter(its_rows, padding, dispatch, given)
        np.testing.assert_allclose(from_bfloat16_bits(made), right, rtol=2**-7, atol=1e-5)
    right = score_grad(its_x, its_rows, padding, dispatch)
    np.testing.assert_allclose(d_scores, right, rtol=1e-5, atol=1e-5)
    assert (d_scores[padding.pair_rows < 0] == 0).all()


def test_bits_are_copied() -> None:
    """A NaN's too."""
    dispatch = dispatch_of("uniform")
    padding = topology_of(dispatch, 128)[2]
    x = np.random.default_rng(0).integers(0, 2**16, (dispatch.num_tokens, 16), np.uint16)
    with on_machine():
        made = padded_gather(x, padding, dispatch)
    used = padding.row_pairs >= 0
    np.testing.assert_array_equal(made[used], x[padding.row_pairs[used] // 2])
    assert not made[~used].any()


def test_memory_of_the_callers() -> None:
    dispatch = dispatch_of("sentinels")
    padding = topology_of(dispatch, 128)[2]
    x = np.ones((dispatch.num_tokens, 8), np.float32)
    out = np.empty((len(padding.row_pairs), 8), np.float32)
    assert padded_gather(x, padding, dispatch, out=out) is out
    np.testing.assert_array_equal(out, padded_gather(x, padding, dispatch))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("x", {"x": np.zeros((3, 8), np.uint16)}),
        ("scores", {"scores": np.zeros(3, np.float32)}),
        ("padding.pair_rows", {"pair_rows": np.zeros(3, np.int32)}),
        ("padding.row_pairs", {"row_pairs": np.array(0, np.int32)}),
        ("out", {"out": np.zeros((3, 8), np.uint16)}),
    ],
)
def test_what_is_refused(argument: str, given: dict[str, Any], kernels: bool) -> None:
    """Beside wrong types, by the twins in tests/test_wrong_arguments.py."""
    dispatch = dispatch_of("uniform")
    padding = topology_of(dispatch, 128)[2]
    call: dict[str, Any] = {"x": np.zeros((64, 8), np.uint16), "padding": padding, "dispatch": dispatch}
    if argument.startswith("padding."):
        given = {"padding": replace(padding, **given)}
    call |= given
    if not kernels:
        call |= {name: call[name].astype(np.float32) for name in ("x", "out") if name in call}
    with on_machine() if kernels else nullcontext():
        refuses(lambda: padded_gather(**call), argument)


def test_without_rows_nothing_is_launched() -> None:
    dispatch = dispatch_of("no tokens")
    *_, padding = topology_of(dispatch, 128)
    x = np.zeros((0, 24), np.uint16)
    with on_machine() as machine:
        assert padded_gather(x, padding, dispatch).shape == (0, 24)
        assert score_grad(x, x, padding, dispatch).shape == (0,)
    assert not machine.reports
