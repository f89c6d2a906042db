"""``row_capacity`` and experts elsewhere (K > E) on the torch backend: the oracle, zero gradients, memory, the layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blazeproto.autograd import SavePolicy, saved_bytes, torch_backend
from blazeproto.dispatch import reference
from blazeproto.layer import MoE
from tests.autograd.comparison import assert_close, assert_same_bits

POLICIES = [policy.value for policy in SavePolicy]
ROUTINGS = {
    "fixed": {},
    "sentinels": {"sentinels": True},
    "varying": {"varying": True},
    "elsewhere": {"num_experts": 2, "top_k": 9},
}
CAPACITIES = [None, 1.5, 1.0, 0.6, 0.0]  # of the pairs that have an expert; 1.5 may be more than all pairs


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_agrees_with_the_oracle(make_case, routing, capacity, save, workspace_bytes):
    if routing == "varying" and workspace_bytes:
        pytest.skip("chunks need a fixed K")
    case = make_case(bias=True, capacity=capacity, **ROUTINGS[routing])
    assert_close(case.run(save=save, workspace_bytes=workspace_bytes), case.reference(), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_grouped_products(make_case, routing, dtype):
    """float64 goes expert by expert."""
    case = make_case(64, bias=True, capacity=0.6, dtype=dtype, **ROUTINGS[routing])
    assert_close(case.run(), case.reference(), 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_what_overflows_is_not_computed_and_has_zero_gradients(make_case, workspace_bytes):
    """Poison may lie in every row that is left out: tokens, scores and experts of which nothing runs."""
    case = make_case(capacity=0.3, bias=True)
    made = reference.build_dispatch(case.topk_experts.numpy(), 5, row_capacity=case.options["row_capacity"])
    left_out = torch.from_numpy(made.token_index_map < 0).view(case.scores.shape)
    idle = torch.from_numpy(made.expert_token_offsets[1:] == made.expert_token_offsets[:-1])
    assert left_out.sum() == made.overflow[0] > 0 and idle.any() and left_out.all(dim=1).any()
    clean = case.run(workspace_bytes=workspace_bytes)
    with torch.no_grad():
        case.scores[left_out] = torch.nan
        case.x[left_out.all(dim=1)] = torch.nan
        for weight in (case.gate_up_proj, case.down_proj, case.up_bias, case.down_bias):
            weight[idle] = torch.nan
    results = case.run(workspace_bytes=workspace_bytes)
    assert_same_bits(results, clean)
    out, d_x, d_up, d_down, d_scores, d_up_bias, d_down_bias = results
    assert (d_scores[left_out] == 0).all() and (d_scores[~left_out] != 0).all()
    for of_tokens in (out, d_x):
        assert (of_tokens[left_out.all(dim=1)] == 0).all()
    for of_experts in (d_up, d_down, d_up_bias, d_down_bias):
        assert (of_experts[idle] == 0).all() and (of_experts[~idle] != 0).any()


def test_a_capacity_that_is_not_reached_changes_no_bit(make_case):
    case = make_case(dtype=torch.float32, bias=True)
    expected = case.run()
    for row_capacity in (111, 10**6):
        assert_same_bits(case.run(row_capacity=row_capacity), expected)


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_h_has_no_more_rows_than_the_capacity(make_case, bytes_saved_by, save, workspace_bytes):
    case, options = make_case(96, 16, 24, 5, 3, dtype=torch.float32), {"save": save, "workspace_bytes": workspace_bytes}
    weights = (case.gate_up_proj, case.down_proj)
    saved = bytes_saved_by(lambda: case.forward(row_capacity=100, **options), weights)
    layer = MoE(16, 24, 5, 3, row_capacity=100, **options)
    assert layer.saved_bytes(96) == saved
    if workspace_bytes is None:
        sizes = {"num_tokens": 96, "d_model": 16, "d_expert": 24, "num_experts": 5, "top_k": 3, "itemsize": 4}
        of_a_row = 4 + 4 * 24 * {"minimal": 2, "paper": 3, "recompute": 0}[save]  # its pair, and its H and act
        assert saved == saved_bytes(save, **sizes) - (288 - 100) * of_a_row


def test_few_rows_need_no_chunks(make_case, monkeypatch):
    """The whole batch at once where its R rows fit, though not all its pairs would."""
    case, launches = make_case(capacity=0.2), []
    real = torch_backend.up_forward
    monkeypatch.setattr(torch_backend, "up_forward", lambda *a, **k: launches.append(1) or real(*a, **k))
    case.forward(workspace_bytes=20_000)
    assert len(launches) == 1
    case.forward(workspace_bytes=20_000, row_capacity=None)
    assert len(launches) > 2


# ---- the layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ["top_k", "expert_choice"])
def test_the_layer_counts_what_overflows(router):
    layer = MoE(16, 24, 4, 2, router=router)
    x = torch.randn(50, 16)
    out, stats = layer(x)
    pairs = int(stats.load.sum())
    assert stats.overflow is None
    for row_capacity in (0, 30, pairs, 1000):
        layer.row_capacity = row_capacity
        got, stats = layer(x)
        assert stats.overflow.dtype == torch.int32 and stats.overflow.tolist() == [max(0, pairs - row_capacity)]
        assert torch.equal(got, out) == (row_capacity >= pairs)
        assert row_capacity > 0 or not got.any()


def test_a_dispatch_with_a_capacity(make_case):
    """Built by whoever, with R < P rows."""
    case = make_case(capacity=0.5)
    expected = case.run()
    row_capacity = case.options.pop("row_capacity")
    made = reference.build_dispatch(case.topk_experts.numpy(), 5, row_capacity=row_capacity)
    made = replace(made, **{name: None if t is None else torch.from_numpy(t) for name, t in made.arrays.items()})
    case.topk_experts = None
    assert_same_bits(case.run(dispatch=made), expected)
