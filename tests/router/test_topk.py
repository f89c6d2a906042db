"""Top-k routing: the twin against torch and finite differences, the kernels compiled, and what is refused."""

import itertools

import numpy as np
import pytest
import torch

from blazeproto.router import fallback, topk_route, topk_route_backward
from blazeproto.router.scores import SCORES
from blazeproto.runtime import arrays
from blazeproto.runtime.numba_kernel import NumbaKernel
from tests.refusals import refuses

OPTIONS = [
    {"score": score, "renormalize": together, "scale": scale}
    for score in SCORES
    for together, scale in ((None, 1.0), (True, 2.5), (False, 0.5))
]


def by_torch(logits: torch.Tensor, experts: torch.Tensor, score: str, renormalize=None, scale=1.0) -> torch.Tensor:
    kind = SCORES[score]
    scores = kind.value(logits).gather(1, experts.long())
    if renormalize or kind.over_chosen or (renormalize is None and kind.renormalized):
        scores = scores / scores.sum(1, keepdim=True)
    return scores * scale


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_twin_as_torch(options):
    logits = torch.randn(20, 13, dtype=torch.float64, requires_grad=True)
    scores, experts = fallback.topk_route(logits.detach().numpy(), 4, **options)
    assert (experts == logits.topk(4).indices.numpy()).all()
    right = by_torch(logits, torch.from_numpy(experts), **options)
    np.testing.assert_allclose(scores, right.detach().numpy(), rtol=1e-12)
    gradient = torch.randn_like(right)
    right.backward(gradient)
    got = fallback.topk_route_backward(logits.detach().numpy(), experts, gradient.numpy(), **options)
    np.testing.assert_allclose(got, logits.grad.numpy(), rtol=1e-10, atol=1e-14)


GROUPS = {"num_groups": 4, "top_groups": 2}


@pytest.mark.parametrize("logits", [torch.zeros(3, 12), torch.zeros(3, 12).numpy()], ids=["torch", "numpy"])
def test_ties_go_to_the_lower_group_and_to_the_lower_id(logits):
    logits[1, [3, 4, 9, 10]] = 1
    logits[2, [0, 9, 10]] = 1  # group 3 comes before group 0, and expert 0 before 9
    experts = fallback.topk_route(logits, 6, score="sigmoid", **GROUPS)[1].tolist()
    assert experts == [[0, 1, 2, 3, 4, 5], [3, 4, 9, 10, 5, 11], [0, 9, 10, 1, 2, 11]]


def test_a_group_is_worth_its_two_best():
    logits = np.array([[9.0, -9, -9, 1, 1, 0, 2, -1, 2, 0, 0, 0]])
    _, experts = fallback.topk_route(logits, 6, score="topk_softmax", **GROUPS)
    assert experts.tolist() == [[6, 8, 3, 4, 5, 7]]  # the one best expert, 9, is in a group worth 0
    one_each = fallback.topk_route(logits, 2, score="topk_softmax", num_groups=12, top_groups=2)
    assert one_each[1].tolist() == fallback.topk_route(logits, 2, score="topk_softmax")[1].tolist() == [[0, 6]]


def test_an_expert_of_another_group_cannot_win_where_every_key_is_negative():
    """Some code sets the keys of the other groups to 0, which is above these."""
    bias = np.full(12, -2.0)
    bias[6:] -= 1
    _, experts = fallback.topk_route(np.zeros((1, 12)), 6, score="sigmoid", bias=bias, **GROUPS)
    assert experts.tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("bias", [None, np.array([-np.inf] * 9 + [0.5] * 3)], ids=["plain", "infinite bias"])
def test_experts_of_groups_are_valid_whatever_the_logits_are(bias):
    logits = np.array([[np.nan] * 12, [np.inf] * 12, [-1e30] * 12, [*range(12)]])
    scores, experts = fallback.topk_route(logits, 6, score="sigmoid", bias=bias, **GROUPS)
    assert (experts[:2] == np.arange(6)).all() and np.isnan(scores[:2]).all() and np.isfinite(scores[2:]).all()
    assert all(len({*row}) == 6 and len({e // 3 for e in row}) == 2 for row in experts.tolist())
    assert (fallback.topk_route_backward(logits, experts, scores, score="sigmoid")[:2] == 0).all()


def test_all_groups_are_no_groups():
    logits = np.array([[100.0, 200, 300, -300, -200, -100]])  # sigmoids of 1 and 0
    _, experts = fallback.topk_route(logits, 6, score="sigmoid", num_groups=3, top_groups=3)
    assert experts.tolist() == fallback.topk_route(logits, 6, score="sigmoid")[1].tolist() == [[2, 1, 0, 5, 4, 3]]


FULL = pytest.mark.full
FORWARD = [
    pytest.param(128, 8, "softmax_topk", False, False, True, 1, 1, marks=FULL),
    pytest.param(8, 2, "softmax_topk", False, False, True, 1, 1, marks=FULL),
    pytest.param(512, 10, "sigmoid", True, False, True, 1, 1, marks=FULL),
    pytest.param(1000, 9, "softmax_topk", False, False, False, 1, 1, marks=FULL),
    pytest.param(1024, 16, "sigmoid", True, True, True, 1, 1, marks=FULL),
    (256, 8, "sigmoid", True, False, True, 8, 4),
    pytest.param(160, 6, "sigmoid", True, True, True, 8, 3, marks=FULL),
    pytest.param(999, 9, "sigmoid", True, False, False, 27, 3, marks=FULL),
]


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    pytest.importorskip("cuda.core", reason="needs cuda.core")
    monkeypatch.setenv("BLAZEPROTO_CACHE", str(tmp_path))


@pytest.mark.parametrize(("num_experts", "top_k", "score", "biased", "half", "aligned", *GROUPS), FORWARD)
def test_forward_compiles(fresh_cache, num_experts, top_k, score, biased, half, aligned, num_groups, top_groups):
    from blazeproto.router import topk

    options = score, score == "sigmoid", 1.0, biased, half, aligned, num_groups, top_groups
    forward = topk.forward_kernel(num_experts, top_k, *options)
    assert ("ld.global.v4" in check_kernel(forward)) == aligned


@pytest.mark.parametrize(("num_experts", "top_k", "half"), [(8, 2, False), (128, 8, False), (512, 10, True)])
def test_backward_compiles(fresh_cache, num_experts, top_k, half):
    from blazeproto.router import topk

    check_kernel(topk.backward_kernel(num_experts, top_k, "sigmoid", True, 2.5, half))


def check_kernel(kernel: NumbaKernel) -> str:
    assert kernel.cubin((9, 0))[1][:4] == b"\x7fELF"
    ptx = kernel.ptx((9, 0))
    assert ".local" not in ptx, f"{kernel!r}: arrays meant for registers went to memory"
    return ptx


def test_sorting_networks(monkeypatch):
    """By the 0-1 principle a network that sorts zeros and ones sorts everything (Knuth 3, 5.3.4)."""
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    from blazeproto.router import best

    monkeypatch.setattr(best, "order", best.order.py_func)  # the kernels' own code, as plain Python
    for bits in itertools.product([0, 1], repeat=best.EIGHT):
        keys = list(bits)
        best.sort_eight.py_func(keys)
        assert keys == sorted(bits, reverse=True)
    for size, used in [(1, 1), (2, 2), (4, 4), (8, 6), (8, 8), (16, 11), (16, 16)]:
        merge = best.merge_of(size, used).py_func
        for count in {min(size, best.EIGHT), size}:  # of a sorted eight, of another list
            for ones, others in itertools.product(range(used + 1), range(count + 1)):
                kept, keys = [1] * ones + [0] * (size - ones), [1] * others + [0] * (count - others)
                everything = sorted(kept + keys, reverse=True)
                lost = merge(kept, keys, count)
                assert kept == everything[:used] + [0] * (size - used) and lost == everything[size]


def on_device(*shape, dtype="float32"):
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return arrays.DeviceArray(256, shape, dtype, strides, 0, None)


@pytest.mark.parametrize(
    ("logits", "top_k", "options", "argument", "error"),
    [
        (on_device(4, 8), 9, {}, "top_k", ValueError),
        (on_device(4, 64), 17, {}, "top_k", ValueError),
        (on_device(4, 8), 0, {}, "top_k", ValueError),
        (on_device(4, 8), 2.0, {}, "top_k", TypeError),
        (on_device(4, 8), 2, {"scale": float("nan")}, "scale", ValueError),
        (on_device(4, 1025), 2, {}, "logits", ValueError),
        (on_device(8), 2, {}, "logits", ValueError),
        (on_device(4, 8, dtype="float64"), 2, {}, "logits", TypeError),
        (on_device(4, 8), 2, {"score": "cosine"}, "score", ValueError),
        (on_device(4, 8), 2, {"bias": on_device(8)}, "bias", ValueError),
        (on_device(4, 8), 2, {"num_groups": 4}, "top_groups", TypeError),
        (on_device(4, 8), 2, {"num_groups": 3, "top_groups": 2}, "num_groups", ValueError),
        (on_device(4, 8), 5, GROUPS, "top_k", ValueError),
        (on_device(4, 64), 2, {"num_groups": 64, "top_groups": 4}, "num_groups", ValueError),
        (torch.zeros(4, 8), 5, GROUPS, "top_k", ValueError),
        (torch.zeros(4, 8), 9, {}, "top_k", ValueError),
        (np.zeros((4, 8), np.float32), 2, {"bias": np.zeros(8)}, "bias", ValueError),
        (np.zeros((4, 8), np.uint16), 2, {}, "logits", TypeError),
    ],
)
def test_input_that_is_refused(logits, top_k, options, argument, error):
    refuses(lambda: topk_route(logits, top_k, **options), argument, error)


def test_input_of_backward_that_is_refused():
    logits, experts, d_scores = on_device(4, 8), on_device(4, 2, dtype="int32"), on_device(4, 2)
    refuses(lambda: topk_route_backward(logits, on_device(4, 2, dtype="int64"), d_scores), "experts", TypeError)
    refuses(lambda: topk_route_backward(logits, experts, on_device(4, 3)), "d_scores")
    refuses(lambda: topk_route_backward(logits, experts, d_scores._replace(device=1)), "d_scores")
