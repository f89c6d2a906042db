"""``precision="fp8"`` by the kernels, in a layer's ways. `scripts.bench.fp8` and the PTX machine check its products."""

import pytest
import torch

from blazeproto.autograd import grouped_experts, quantize_weights
from tests.autograd.cases import assert_same_bits
from tests.autograd.test_rollout import as_stored, run
from tests.gpu import Captured

pytestmark = pytest.mark.gpu

FP8 = {"precision": "fp8", "backend": "hopper"}
SHAPES = [
    (1, 64, 128, 1, 1),
    (37, 144, 256, 5, 3),
    (300, 64, 128, 5, 2),
    (4096, 512, 768, 16, 4),
    (2048, 256, 256, 128, 8),
]
OFF = 0.03  # H is rounded before it is quantized: where two programs round otherwise, a step of e4m3 lies between them


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("routing", ["fixed", "sentinels", "varying"])
def test_it_is_what_the_torch_backend_computes(gpu_case, poisoned, shape, routing):
    if routing != "fixed" and shape[3] == 1:
        pytest.skip("one expert has no choice")
    case = gpu_case(*shape, sentinels=routing == "sentinels", varying=routing == "varying")
    for a, b in zip(case.run(**FP8), case.run(precision="fp8", backend="torch"), strict=True):
        assert (a.float() - b.float()).norm() <= OFF * b.float().norm()


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_ways_give_the_same_bits(gpu_case, poisoned, shape, weights):
    """Again, recomputed, with transposes kept, with weights quantized before, captured in a graph."""
    case = gpu_case(*shape)
    case.gate_up_proj, case.down_proj = (
        t.detach().to(weights).requires_grad_() for t in (case.gate_up_proj, case.down_proj)
    )
    kept = quantize_weights(case.gate_up_proj, case.down_proj, dtype=torch.bfloat16)
    expected = case.run(**FP8)
    ways = ({}, {"save": "recompute"}, {"keep_transposed": False}, {"quantized": kept})
    for way in ways:
        assert_same_bits(case.run(**FP8, **way), expected)
    captured = Captured(lambda: [t for way in ways for t in case.run(**FP8, **way)])
    assert_same_bits(captured.replay(), expected * len(ways))


@pytest.mark.parametrize("keep", [False, True])
def test_a_pair_of_gate_and_up_gives_what_the_joined_weight_does(gpu_case, poisoned, keep):
    case = gpu_case(300, 64, 128, 5, 1)
    counts, made = torch.tensor([100, 0, 70, 1, 129], device="cuda"), []
    pair = tuple(half.detach().contiguous().requires_grad_() for half in case.gate_up_proj.chunk(2, 1))
    for up in (pair, (case.gate_up_proj,)):
        weights = up if len(up) == 2 else up[0], case.down_proj
        out = grouped_experts(case.x, *weights, counts, **FP8, keep_transposed=keep)
        dx, *d_up, d_down = torch.autograd.grad(out, (case.x, *up, case.down_proj), case.d_out)
        made.append((out, dx, torch.cat(d_up, 1), d_down))
    assert_same_bits(*made)


def test_a_token_s_bits_are_its_own(gpu_case):
    """Some tokens alone give the out and dx that they have in the whole batch; and a NaN stays in its token."""
    case = gpu_case(1000, 256, 256, 8, 2)
    out, dx, *_ = case.run(**FP8)
    some = gpu_case(1, 256, 256, 8, 2)
    for name in ("gate_up_proj", "down_proj"):
        setattr(some, name, getattr(case, name))
    for name in ("x", "scores"):
        setattr(some, name, getattr(case, name)[333:350].detach().requires_grad_())
    some.topk_experts, some.d_out = case.topk_experts[333:350].contiguous(), case.d_out[333:350].contiguous()
    assert_same_bits(some.run(**FP8)[:2], (out[333:350], dx[333:350]))
    with torch.no_grad():
        case.x[5, 7] = torch.nan
    spoiled = case.run(**FP8)[0]
    others = torch.arange(1000, device="cuda") != 5
    assert spoiled[5].isnan().all() and torch.equal(spoiled[others], out[others])


ROLLOUT = {"precision": "fp8_rollout", "backend": "hopper"}


@pytest.mark.parametrize("shape", [(300, 128, 128, 5, 2), (4096, 512, 768, 16, 4)])
def test_fp8_rollout_is_what_the_torch_backend_computes(gpu_case, poisoned, shape):
    """All ways give the same bits; `scripts.bench.rollout` compares them with DeepGEMM's."""
    case = gpu_case(*shape)
    expected = case.run(**ROLLOUT)
    for a, b in zip(expected, case.run(precision="fp8_rollout", backend="torch"), strict=True):
        assert (a.float() - b.float()).norm() <= OFF * b.float().norm()
    kept = quantize_weights(case.gate_up_proj, case.down_proj, precision="fp8_rollout")
    ways = ({}, {"save": "recompute"}, {"keep_transposed": False}, {"quantized": kept})
    for way in ways:
        assert_same_bits(case.run(**ROLLOUT, **way), expected)
    captured = Captured(lambda: [t for way in ways for t in case.run(**ROLLOUT, **way)])
    assert_same_bits(captured.replay(), expected * len(ways))


@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_stored_fp8_is_multiplied_as_it_is(gpu_case, poisoned, save):
    case = gpu_case(300, 256, 384, 5, 2)
    weights = {name: as_stored(getattr(case, name)) for name in ("gate_up_proj", "down_proj")}
    expected = run(case, backend="hopper", save=save)
    assert_same_bits(run(case, backend="hopper", save=save, **weights), expected)


def test_no_tokens(gpu_case, poisoned):
    out, dx, d_up, d_down, d_scores = gpu_case(0, 64, 128, 3, 2).run(**FP8)
    assert out.shape == dx.shape == (0, 64) and d_scores.shape == (0, 2) and not d_up.any() and not d_down.any()
