"""``moe_mlp`` on the torch backend computes what the float64 oracle says, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch

from blazeproto.activations import ACTIVATIONS, clamped_swiglu
from blazeproto.autograd import SavePolicy, moe_mlp, torch_formulas

POLICIES = [policy.value for policy in SavePolicy]


def assert_close(got, expected, tolerance):
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
        assert error <= tolerance, f"output {index} of shape {tuple(b.shape)} is off by {error:.2e}"


@pytest.mark.parametrize("activation", [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)])
@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("routing", ["fixed", "sentinels", "varying"])
def test_agrees_with_the_oracle(make_case, activation, save, bias, routing):
    case = make_case(
        activation=activation, bias=bias, sentinels=routing == "sentinels", varying=routing == "varying", idle=(2,)
    )
    assert_close(case.run(save=save), case.reference(), 1e-13)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)])
@pytest.mark.parametrize("save", POLICIES)
def test_gradcheck(make_case, activation, save):
    case = make_case(5, 4, 3, 4, 2, activation=activation, bias=True, sentinels=save == "paper")

    def function(x, gate_up_proj, down_proj, scores, up_bias, down_bias):
        return moe_mlp(
            x,
            gate_up_proj,
            down_proj,
            scores,
            case.topk_experts,
            up_bias=up_bias,
            down_bias=down_bias,
            save=save,
            **case.options,
        )

    assert torch.autograd.gradcheck(function, case.parameters, fast_mode=True)


@pytest.mark.parametrize("save", POLICIES)
def test_gradcheck_with_varying_experts_per_token(make_case, save):
    case = make_case(6, 4, 3, 4, 2, varying=True)

    def function(x, gate_up_proj, down_proj, scores):
        tensors = (x, gate_up_proj, down_proj, scores, case.topk_experts)
        return moe_mlp(*tensors, save=save, **case.options, **case.varying)

    assert torch.autograd.gradcheck(function, case.parameters, fast_mode=True)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("shape", [(64, 32, 48, 6, 2), (50, 21, 13, 4, 4), (1, 8, 8, 1, 1), (33, 1, 1, 3, 2)])
def test_other_dtypes_and_widths(make_case, dtype, tolerance, shape):
    """Widths that are no multiple of 16 bytes are padded on the way to the grouped product."""
    case = make_case(*shape, dtype=dtype, bias=True, sentinels=True)
    assert_close(case.run(), case.reference(), tolerance)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policies_agree_to_the_bit(make_case, dtype):
    case = make_case(64, 32, 48, 6, 3, dtype=dtype, bias=True)
    results = [case.run(save=save) for save in POLICIES]
    for first, second in itertools.pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_deterministic_to_the_bit(make_case):
    case = make_case(200, 32, 48, 6, 3, dtype=torch.bfloat16, bias=True)
    first = case.run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, case.run(), strict=True))


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_few_tokens(make_case, num_tokens, dtype):
    case = make_case(num_tokens, dtype=dtype, bias=True)
    out, *gradients = case.run()
    assert out.shape == (num_tokens, 16)
    assert [g.shape for g in gradients] == [p.shape for p in case.parameters]
    assert_close([out, *gradients], case.reference(), 1e-13 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everyone_to_the_same_experts(make_case, dtype):
    """Idle experts' weight gradients are zeros, not None and not leftovers."""
    case = make_case(num_experts=8, top_k=2, idle=(0, 2, 3, 5, 6, 7), dtype=dtype, bias=True)
    results = case.run()
    assert_close(results, case.reference(), 1e-5)
    for gradient in (results[2], results[3], results[5], results[6]):  # both weights, both biases
        assert gradient[[0, 2, 3, 5, 6, 7]].abs().max() == 0
        assert gradient[[1, 4]].abs().min() > 0


def test_pairs_that_are_not_here(make_case):
    """A sentinel's score may be anything: nothing is read for the pair and its gradient is zero."""
    case = make_case(sentinels=True, bias=True)
    away = (case.topk_experts < 0) | (case.topk_experts >= 5)
    clean = case.run()
    with torch.no_grad():
        case.scores[away] = torch.nan
    for a, b in zip(case.run(), clean, strict=True):
        assert torch.equal(a, b)
    d_scores = clean[4]
    assert (d_scores[away] == 0).all() and (d_scores[~away] != 0).all()


def test_an_id_that_int32_has_no_room_for_is_not_here(make_case):
    """Whatever its lower half is: some expert's, at most of them."""
    case = make_case(sentinels=True)
    away = (case.topk_experts < 0) | (case.topk_experts >= 5)
    expected = case.run()
    wide = torch.tensor([2**32, 2**32 + 4, 1 - 2**32, -(2**63), 2**63 - 1])
    case.topk_experts = case.topk_experts.long().masked_scatter(away, wide.repeat(40))
    assert all(torch.equal(a, b) for a, b in zip(case.run(), expected, strict=True))


def test_one_bad_token_shows_in_its_own_output_alone(make_case):
    case = make_case()
    with torch.no_grad():
        case.x[4] = torch.nan
    out = case.forward()
    assert out[4].isnan().all() and out.isnan().any(1).sum() == 1


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_ids_of_either_width_and_a_dispatch_built_before(make_case, index_dtype):
    case = make_case(sentinels=True)
    expected = case.run()
    case.topk_experts = case.topk_experts.to(index_dtype)
    assert all(torch.equal(a, b) for a, b in zip(case.run(), expected, strict=True))

    from blazeproto.dispatch import Dispatch

    pair_indices, offsets, token_index_map = torch.ops.blazeproto.dispatch(case.topk_experts, 5, 0, "torch")
    made = Dispatch(
        expert_pair_indices=pair_indices,
        expert_token_offsets=offsets[0],
        token_index_map=token_index_map,
        token_expert_indices=case.topk_experts.reshape(-1),
        num_experts=5,
        top_k=3,
        num_tokens=37,
    )
    case.topk_experts = None
    assert all(torch.equal(a, b) for a, b in zip(case.run(dispatch=made), expected, strict=True))


def test_tensors_that_are_not_contiguous(make_case):
    case = make_case()
    expected = case.run()
    for name in ("x", "gate_up_proj", "down_proj", "scores"):
        tensor = getattr(case, name).detach()
        scattered = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert not scattered.is_contiguous()
        setattr(case, name, scattered.requires_grad_())
    assert_close(case.run(), expected, 1e-14)
