"""What holds of every kind of scores: the kernels compile, gradients are those of the scores."""

import pytest
import torch
from test_topk import check_kernel, fresh_cache  # noqa: F401  a fixture

from blazeproto.router import fallback, losses, ops, pair_ops, pairs, topk
from blazeproto.router.scores import SCORES

ON_MACHINE = ("softmax_topk", "topk_softmax", "sigmoid")  # the PTX machine's tests compile and run their kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    "score",
    [pytest.param(name, marks=[pytest.mark.full] if name in ON_MACHINE else []) for name in SCORES],
)
def test_kernels_compile(score: str, fresh_cache: None) -> None:  # noqa: F811
    check_kernel(topk.forward_kernel(64, 4, score, True, 1.0, SCORES[score].elementwise, False, True))
    check_kernel(topk.backward_kernel(64, 4, score, True, 1.0, False))
    options = score, True, True, True
    for kernel in losses.kernels(64, *options):
        check_kernel(kernel)
    for backward in (False, True):
        check_kernel(pairs.score_kernel(64, score, True, 1.0, backward=backward))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_gradients_of_operators(score: str, renormalize: bool) -> None:
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    options = (score, renormalize, 1.5)
    experts = fallback.choose_top_k(logits.detach(), 3)
    pair_experts, _, token_offsets, _ = fallback.pairs_of(torch.rand(5, 6) < 0.5, 30)
    torch.autograd.gradcheck(lambda v: ops.route_top_k(v, None, 3, *options)[0], logits)
    torch.autograd.gradcheck(lambda v: pair_ops.score_pairs(v, pair_experts, token_offsets, *options), logits)
    torch.autograd.gradcheck(lambda v: ops.routing_losses(v, experts, score, 0.5, 0.1, False)[:2], logits)
