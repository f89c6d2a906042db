"""``moe_mlp`` on the torch backend computes what the float64 oracle says, forward and backward: of plain weights, and of W + b a
where there are low-rank factors, with gradients for both."""

from functools import partial

import pytest
import torch

from blazeproto.activations import ACTIVATIONS, clamped_swiglu
from blazeproto.autograd import SavePolicy, torch_formulas
from blazeproto.dispatch import Dispatch
from tests.autograd.cases import assert_close, assert_same_bits

NAMED = [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)]
FACTORS = (None, "both", "up", "down")
ROUTINGS = {"fixed": {}, "sentinels": {"sentinels": True}, "varying": {"varying": True}}


@pytest.mark.parametrize("activation", NAMED)
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_agrees_with_the_oracle(make_case, activation, factors, bias, routing):
    case = make_case(activation=activation, factors=factors, bias=bias, idle=(2,), **ROUTINGS[routing])
    expected = case.reference()
    for save in (SavePolicy.MINIMAL,) if factors else SavePolicy:
        assert_close(case.run(save=save), expected, 1e-13)


GRADCHECKS = [
    *((activation, save, {"sentinels": save == "paper"}, None) for activation in NAMED for save in SavePolicy),
    *((activation, "minimal", {"factors": factors}, None) for activation in NAMED for factors in FACTORS[1:]),
    *(("swiglu", save, {"varying": True}, None) for save in SavePolicy),
    *(("swiglu", save, {"factors": "both"}, 2_000) for save in SavePolicy),
    ("swiglu", "minimal", {}, 1_000),
]


@pytest.mark.parametrize(("activation", "save", "options", "workspace_bytes"), GRADCHECKS)
def test_gradcheck(make_case, activation, save, options, workspace_bytes):
    case = make_case(5, 4, 3, 4, 2, activation=activation, bias=True, rank=3, **options)
    function = partial(case.function, save=save, workspace_bytes=workspace_bytes)
    assert torch.autograd.gradcheck(function, case.parameters, fast_mode=True)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("shape", [(64, 32, 48, 6, 2), (50, 21, 13, 4, 4), (1, 8, 8, 1, 1), (33, 1, 1, 3, 2)])
@pytest.mark.parametrize("rank", [None, 1, 8, 20])
def test_other_dtypes_widths_and_ranks(make_case, dtype, tolerance, shape, rank):
    """Widths that are no multiple of 16 bytes are padded on the way to the grouped product."""
    factors = {"factors": "both", "rank": rank} if rank else {}
    case = make_case(*shape, dtype=dtype, bias=True, sentinels=True, **factors)
    results = case.run()
    assert_close(results, case.reference(), tolerance)
    assert [(t.shape, t.dtype) for t in results[1:]] == [(p.shape, p.dtype) for p in case.parameters]


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)])
def test_with_and_without_instructions_for_the_dtype(make_case, monkeypatch, dtype, tolerance, multiplies):
    """Whatever the machine at hand has."""
    asked = []

    def answer(device_type, of):
        asked.append(of)
        return multiplies or of == torch.float32

    monkeypatch.setattr(torch_formulas, "_multiplies", answer)
    case = make_case(64, 32, 48, 6, 2, dtype=dtype, bias=True)
    assert_close(case.run(), case.reference(), tolerance)
    assert dtype in asked and (torch.float32 in asked) != multiplies


@pytest.mark.parametrize("workspace_bytes", [None, 40_000])
@pytest.mark.parametrize("factors", [None, "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policies_and_repeats_agree_to_the_bit(make_case, workspace_bytes, factors, dtype):
    case = make_case(64, 32, 48, 6, 3, dtype=dtype, bias=True, factors=factors)
    first = case.run(workspace_bytes=workspace_bytes)
    for save in SavePolicy:
        assert_same_bits(case.run(save=save, workspace_bytes=workspace_bytes), first)


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.parametrize("factors", [None, "both"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)])
def test_few_tokens(make_case, num_tokens, factors, dtype, tolerance):
    case = make_case(num_tokens, dtype=dtype, bias=True, factors=factors)
    results = case.run(workspace_bytes=100_000)
    assert [t.shape for t in results[1:]] == [p.shape for p in case.parameters]
    assert_close(results, case.reference(), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everyone_to_the_same_experts(make_case, dtype):
    """Idle experts' gradients are zeros, not None and not leftovers."""
    idle = (0, 2, 3, 5, 6, 7)
    case = make_case(num_experts=8, top_k=2, idle=idle, dtype=dtype, bias=True, factors="both")
    results = case.run()
    assert_close(results, case.reference(), 1e-5)
    for name, gradient in zip(case.trained, results[1:], strict=True):
        if name not in ("x", "scores"):
            assert gradient[list(idle)].abs().max() == 0 and gradient[[1, 4]].abs().min() > 0


def test_pairs_that_are_not_here(make_case):
    """A sentinel's score may be anything: nothing is read for the pair and its gradient is zero."""
    case = make_case(sentinels=True, bias=True, factors="both")
    away = (case.topk_experts < 0) | (case.topk_experts >= 5)
    clean = case.run()
    with torch.no_grad():
        case.scores[away] = torch.nan
    assert_same_bits(case.run(), clean)
    d_scores = clean[4]
    assert (d_scores[away] == 0).all() and (d_scores[~away] != 0).all()


def test_an_id_that_int32_has_no_room_for_is_not_here(make_case):
    """Whatever its lower half is: some expert's, at most of them."""
    case = make_case(sentinels=True)
    away = (case.topk_experts < 0) | (case.topk_experts >= 5)
    expected = case.run()
    wide = torch.tensor([2**32, 2**32 + 4, 1 - 2**32, -(2**63), 2**63 - 1])
    case.topk_experts = case.topk_experts.long().masked_scatter(away, wide.repeat(40))
    assert_same_bits(case.run(), expected)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_dispatch_built_before(make_case, routing):
    case = make_case(factors="both", **ROUTINGS[routing])
    expected, top_k = case.run(), None if routing == "varying" else 3
    pair_indices, offsets, token_index_map = torch.ops.blazeproto.dispatch(case.topk_experts, 5, 0, "torch")
    made = Dispatch(pair_indices, offsets[0], token_index_map, None, 5, top_k, 37, **case.varying)
    case.varying = {}
    assert_same_bits(case.run(dispatch=made, topk_experts=None), expected)


def test_tensors_that_are_not_contiguous(make_case):
    case = make_case(factors="both")
    expected = case.run()
    for name, tensor in case.trained.items():
        scattered = tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
        assert not scattered.is_contiguous()
        setattr(case, name, scattered.requires_grad_())
    assert_close(case.run(), expected, 1e-14)
