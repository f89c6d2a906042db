"""The top-k kernels on the GPU against the twin."""

import numpy as np
import pytest
import torch
from routings import to_numpy
from test_topk import OPTIONS, by_torch

from blazeproto.router import fallback, ops, topk_route, topk_route_backward

pytestmark = pytest.mark.gpu

SHAPES = [
    (0, 8, 2),
    (1, 1, 1),
    (1000, 8, 2),
    (777, 16, 16),
    (1001, 40, 8),
    (2000, 37, 5),
    (3000, 64, 6),
    (5000, 128, 8),
    (900, 256, 8),
    (700, 512, 10),
    (600, 1000, 9),
    (501, 1024, 16),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_the_twin(options, dtype):
    # Each shape is a kernel of its own and takes seconds to compile: a sixth of them for each option, in turn.
    turn = OPTIONS.index(options) + (dtype == torch.bfloat16)
    for num_tokens, num_experts, top_k in SHAPES[turn % 6 :: 6]:
        logits = torch.randn(num_tokens, num_experts, device="cuda", dtype=torch.float32)
        if num_tokens > 500:  # equal and nearly equal logits, zeros of both signs, broken tokens
            logits[:100] = logits[:100].round()
            logits[100:200] = 1 + logits[100:200] * 1e-7
            logits[200:300, ::2] = 0.0
            close = torch.arange(num_experts, device="cuda") + 0x40200000  # the bits of 2.5, and just above
            logits[400:420] = close.int().view(torch.float32)
            logits[410:420].scatter_(1, logits[:10].argsort(1)[:, : top_k - 1], 5.0)
            logits[420:500] += 1000
            logits[460:480] -= 1200  # so low that every sigmoid underflows
            logits[480:500] = (logits[480:500] - 1000) * 80  # far apart
            logits[300:400:7, num_experts // 3] = torch.nan
            logits[301:400:7, num_experts // 2] = torch.inf
            logits[302:400:7, num_experts - 1] = -torch.inf
        logits = logits.to(dtype)
        scores, experts = topk_route(logits, top_k, **options)
        host = logits.float().cpu().numpy()
        right_scores, right = fallback.topk_route(host, top_k, **options)
        np.testing.assert_array_equal(to_numpy(experts), right)
        np.testing.assert_allclose(to_numpy(scores), right_scores, rtol=3e-6, atol=1e-8)

        d_scores = torch.randn_like(scores)
        anyhow = (
            torch.rand_like(logits, dtype=torch.float32).argsort(1)[:, :top_k].int()
        )  # as a balancing bias may choose
        for chosen in (experts, anyhow):
            d_logits = topk_route_backward(logits, chosen.contiguous(), d_scores, **options)
            assert d_logits.dtype == dtype
            given = to_numpy(chosen), to_numpy(d_scores)
            exact = fallback.topk_route_backward(host.astype(np.float64), *given, **options)
            rtol, atol = (1e-2, 1e-4) if dtype == torch.bfloat16 else (1e-4, 2e-6)
            np.testing.assert_allclose(to_numpy(d_logits.float()), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_begin_anywhere(dtype):
    logits = torch.randn(1000 * 64 + 1, device="cuda").to(dtype)[1:].view(1000, 64)
    scores, experts = topk_route(logits, 8)
    aligned_scores, aligned_experts = topk_route(logits.clone(), 8)
    assert torch.equal(scores, aligned_scores) and torch.equal(experts, aligned_experts)


def test_bias():
    """Sums of a sigmoid and a bias may differ in the last bit, and so may the order of what is nearly equal."""
    for num_experts, top_k in [(256, 8), (64, 6), (8, 2)]:
        logits, bias = torch.randn(4096, num_experts, device="cuda"), torch.randn(num_experts, device="cuda") * 0.1
        scores, experts = topk_route(logits, top_k, score="sigmoid", bias=bias, scale=2.5)
        keys = logits.double().sigmoid() + bias.double()
        best = keys.topk(top_k).values
        torch.testing.assert_close(keys.gather(1, experts.long()), best, rtol=0, atol=1e-6)
        assert (experts.sort(1).values.diff(dim=1) > 0).all()
        right = by_torch(logits.double(), experts, "sigmoid", scale=2.5)
        torch.testing.assert_close(scores.double(), right, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "num_groups", "top_groups"),
    [(1000, 8, 2, 4, 2), (777, 16, 3, 16, 5), (2000, 36, 5, 12, 4), (900, 256, 8, 8, 4), (501, 1024, 16, 32, 4)],
)
def test_groups_of_logits_as_the_twin(num_tokens, num_experts, top_k, num_groups, top_groups, dtype):
    """Their sums have one rounding, so that the choice is the twin's to the bit, with ties, and broken tokens."""
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    logits[:100] = logits[:100].round()
    logits[100:200] = 1 + logits[100:200] * 1e-7
    logits[200:300, ::2] = 0.0
    logits[300:400:7, num_experts // 3] = torch.nan
    logits[301:400:7, num_experts - 1] = -torch.inf
    logits[400:420] = (torch.arange(num_experts, device="cuda") + 0x40200000).int().view(torch.float32)
    logits = logits.to(dtype)
    options = {"score": "topk_softmax", "num_groups": num_groups, "top_groups": top_groups}
    scores, experts = topk_route(logits, top_k, **options)
    right_scores, right = fallback.topk_route(logits.float().cpu().numpy(), top_k, **options)
    np.testing.assert_array_equal(to_numpy(experts), right)
    np.testing.assert_allclose(to_numpy(scores), right_scores, rtol=3e-6, atol=1e-8)


@pytest.mark.parametrize("num_experts", [256, 160])
def test_deepseek_v3(num_experts):
    """8 groups, 4 of them chosen, K = 8, a bias, factor 2.5, with the gradient, against float64; through the operator too."""
    logits = torch.randn(4096, num_experts, device="cuda", requires_grad=True)
    bias, d_scores = torch.randn(num_experts, device="cuda") * 0.1, torch.randn(4096, 8, device="cuda")
    scores, experts = ops.route_top_k(logits, bias, 8, "sigmoid", True, 2.5, 8, 4)
    exact = logits.detach().double().requires_grad_()
    keys = exact.detach().sigmoid() + bias.double()
    right = fallback.choose_top_k(keys, 8, 8, 4)
    # Where float64 sees no two groups, and no two experts, so near to each other that rounding may exchange them.
    sums = keys.view(4096, 8, -1).topk(2).values.sum(2).sort(1, descending=True).values
    apart = (sums[:, 3] - sums[:, 4] > 1e-5) & (keys.sort(1).values.diff(dim=1).amin(1) > 1e-6)
    assert apart.float().mean() > 0.8 and torch.equal(experts[apart], right[apart])
    assert (experts.sort(1).values.diff(dim=1) > 0).all()
    groups = (experts // (num_experts // 8)).sort(1).values
    assert ((groups.diff(dim=1) > 0).sum(1) < 4).all()
    wanted = by_torch(exact, experts, "sigmoid", scale=2.5)
    torch.testing.assert_close(scores.double(), wanted, rtol=1e-5, atol=0)
    slopes = [torch.autograd.grad((s * d_scores).sum(), v)[0] for s, v in ((scores, logits), (wanted, exact))]
    torch.testing.assert_close(slopes[0].double(), slopes[1], rtol=1e-4, atol=2e-6)

    options = {"score": "sigmoid", "bias": bias, "scale": 2.5, "num_groups": 8, "top_groups": 4}
    part = topk_route(logits.detach()[1000:1003].flip(0).contiguous(), 8, **options)
    assert torch.equal(part[1].flip(0), experts[1000:1003]) and torch.equal(part[0].flip(0), scores[1000:1003])


def test_large_and_the_same_bits_each_time():
    logits = torch.randn(2**20 + 3, 128, device="cuda")
    scores, experts = topk_route(logits, 8)
    values, ids = logits.topk(8)
    assert (experts == ids).sum() > 0.999 * ids.numel()  # torch leaves the order of ties open
    assert torch.equal(logits.gather(1, experts.long()), values)
    torch.testing.assert_close(scores, logits.softmax(1).gather(1, ids), rtol=1e-5, atol=1e-7)
    for _ in range(5):
        again = topk_route(logits, 8)
        assert torch.equal(again[0], scores) and torch.equal(again[1], experts)


def test_all_equal_takes_the_exact_path():
    scores, experts = topk_route(torch.zeros(1000, 128, device="cuda"), 8)
    assert (experts == torch.arange(8, device="cuda", dtype=torch.int32)).all()
    torch.testing.assert_close(scores, torch.full_like(scores, 1 / 128))


def test_captured_in_a_graph():
    logits, other = torch.randn(2, 3000, 64, device="cuda")
    out = (torch.empty(3000, 4, device="cuda"), torch.empty(3000, 4, dtype=torch.int32, device="cuda"))
    topk_route(logits, 4, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk_route(logits, 4, out=out)
    logits.copy_(other)
    graph.replay()
    assert (to_numpy(out[1]) == fallback.topk_route(to_numpy(other), 4)[1]).all()
