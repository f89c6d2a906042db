"""MegaBlocks' experts, forward and back, of the room's functions in float64: against each expert's own matrices."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from blazeproto import activations
from blazeproto.activations import activation_named
from blazeproto.blocksparse import padded_gather, padded_scatter, score_grad, topology_of
from blazeproto.gemm.block_activation import block_activate, block_activate_backward
from blazeproto.gemm.dsd import dsd
from blazeproto.gemm.sdd import sdd

from .room import dispatch_of

WIDTHS, D = (128, 384, 256, 128), 8


@pytest.mark.parametrize("name", ["skewed", "sentinels", "varying", "no tokens"])
@pytest.mark.parametrize("activation", ["swiglu", "alternating(clamped_swiglu)", "gelu"])
def test_experts(name: str, activation: str) -> None:
    dispatch, rng, G = dispatch_of(name), np.random.default_rng(0), activation_named(activation).halves
    up, down, padding = topology_of(dispatch, WIDTHS, G)
    x, d_out = rng.standard_normal((2, dispatch.num_tokens, D))
    scores, w1, w2 = (
        rng.standard_normal(shape) for shape in ((dispatch.num_pairs,), (D, up.shape[1]), (down.shape[1], D))
    )
    gathered = padded_gather(x, padding, dispatch)
    h = sdd(gathered, w1, up)
    act = block_activate(h, down, activation=activation)
    y = dsd(act, w2, down)
    out = padded_scatter(y, padding, dispatch, scores)

    d_y = padded_gather(d_out, padding, dispatch, scores)
    d_act = sdd(d_y, w2, down, transpose_b=True)
    d_h = block_activate_backward(h, d_act, down, activation=activation)
    d_x = padded_scatter(dsd(d_h, w1, up, transpose_b=True), padding, dispatch)
    made = (out, d_x, score_grad(d_out, y, padding, dispatch), dsd(d_h, gathered, up, transpose_s=True).T)
    made = (*made, dsd(act, d_y, down, transpose_s=True))

    rights = tuple(np.zeros_like(array) for array in (x, x, scores, w1, w2))
    tokens = np.arange(len(scores)) // dispatch.top_k if dispatch.top_k else dispatch.pair_tokens
    columns = np.append(0, np.cumsum(WIDTHS))
    for expert, (begin, end) in enumerate(pairwise(dispatch.expert_token_offsets.tolist())):
        pairs = dispatch.expert_pair_indices[begin:end]
        token, n = tokens[pairs], slice(*columns[expert : expert + 2])
        g_n = slice(G * n.start, G * n.stop)
        its_h = x[token] @ w1[:, g_n]
        its_act = activations.activate(its_h, activation)
        its_y, its_d_y = its_act @ w2[n], scores[pairs, None] * d_out[token]
        its_d_h = activations.activate_backward(its_h, its_d_y @ w2[n].T, activation)
        np.add.at(rights[0], token, scores[pairs, None] * its_y)
        np.add.at(rights[1], token, its_d_h @ w1[:, g_n].T)
        rights[2][pairs] = (its_y * d_out[token]).sum(1)
        rights[3][:, g_n], rights[4][n] = x[token].T @ its_d_h, its_act.T @ its_d_y
    for mine, right in zip(made, rights, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-9, atol=1e-9 * max(1.0, np.abs(right).max(initial=0)))
