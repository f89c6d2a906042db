"""``row_capacity`` and experts elsewhere (K > E) on the torch backend: the oracle, zero gradients, memory, the layer.
``workspace_bytes``: chunks of tokens."""

from dataclasses import replace

import pytest
import torch

from blazeproto.autograd import SavePolicy, hopper_backend, saved_bytes, torch_backend, torch_formulas
from blazeproto.autograd.chunks import WHOLE, chunk_tokens_for
from blazeproto.dispatch import Dispatch, reference
from blazeproto.layer import MoE
from tests.autograd.cases import assert_close, assert_same_bits

ROUTINGS = {
    "fixed": {},
    "sentinels": {"sentinels": True},
    "varying": {"varying": True},
    "elsewhere": {"num_experts": 2, "top_k": 9},
}
CAPACITIES = [None, 1.5, 1.0, 0.6, 0.0]  # of the pairs that have an expert; 1.5 may be more than all pairs


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("save", SavePolicy)
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


@pytest.mark.parametrize("save", SavePolicy)
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


def test_few_rows_need_no_chunks(make_case, watch):
    """The whole batch at once where its R rows fit, though not all its pairs would."""
    case, launches = make_case(capacity=0.2), []
    watch(torch_backend, "up_forward", lambda *_, **__: launches.append(1))
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
        assert torch.equal(got, out) == (row_capacity >= pairs) and (row_capacity > 0 or not got.any())


def test_a_dispatch_with_a_capacity(make_case):
    """Built by whoever, with R < P rows."""
    case = make_case(capacity=0.5)
    expected = case.run()
    row_capacity = case.options.pop("row_capacity")
    made = reference.build_dispatch(case.topk_experts.numpy(), 5, row_capacity=row_capacity)
    made = replace(made, **{name: None if t is None else torch.from_numpy(t) for name, t in made.arrays.items()})
    case.topk_experts = None
    assert_same_bits(case.run(dispatch=made), expected)


# --- ``workspace_bytes``: chunks of tokens give what the whole gives, in bounded memory ----------------------------------


DISPATCH_LISTS = ("expert_pair_indices", "expert_token_offsets", "token_index_map", "pair_tokens", "token_offsets")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_are_deterministic_and_no_less_accurate(make_case, dtype):
    case = make_case(256, 32, 48, 6, 3, dtype=dtype, bias=True)
    expected = case.reference()
    whole, chunks = case.run(), case.run(workspace_bytes=20_000)
    again = case.run(workspace_bytes=20_000)
    for a, b, c, right in zip(whole, chunks, again, expected, strict=True):
        assert torch.equal(b, c) and (b - right).norm() <= 1.1 * (a - right).norm() + 1e-6 * right.norm()


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_gradients_of_float32_weights_are_unrounded_sums(make_case, monkeypatch, workspace_bytes, multiplies):
    """Sums of products of bf16 numbers, whether a CPU has those or not. Summed over chunks too."""
    if not multiplies:
        monkeypatch.setattr(torch_formulas, "_multiplies", lambda device, dtype: dtype == torch.float32)
    case = make_case(256, 32, 48, 6, 3, dtype=torch.bfloat16)
    rounded = case.run(workspace_bytes=workspace_bytes)
    case.gate_up_proj, case.down_proj = (
        t.detach().float().requires_grad_() for t in (case.gate_up_proj, case.down_proj)
    )
    unrounded = case.run(workspace_bytes=workspace_bytes)
    for narrow, wide in zip(rounded[2:4], unrounded[2:4], strict=True):
        assert wide.dtype == torch.float32
        torch.testing.assert_close(wide.bfloat16(), narrow, rtol=2**-7, atol=0)  # sums may be in another order
        assert (wide != narrow).float().mean() > 0.9  # of sums, almost none is a bf16 number
    for same in (0, 1, 4):
        assert torch.equal(rounded[same], unrounded[same])


@pytest.mark.parametrize("save", SavePolicy)
def test_transient_rows_are_bounded(make_case, save, watch):
    """No product ever sees more rows than the workspace is for."""
    case = make_case(200, 16, 24, 5, 2, dtype=torch.float32)
    seen = []
    for name in ("up_forward", "down_forward", "down_backward_act", "up_backward_act"):
        watch(torch_backend, name, lambda step, *_, **__: seen.append(step.rows.num_rows))
    bytes_per_row = 4 * max(48 + 24, 24 + 16, 48 + 16)  # H and act, act and Y, dH and dX~
    case.run(save=save, workspace_bytes=bytes_per_row * 2 * 40)
    assert max(seen) <= 2 * 40 and len(seen) >= 4 * 5


def test_chunk_tokens():
    """A token takes 2 bytes each of H (2 n) and dX~ (d) for each of its experts: 10 here."""

    def chunk(num_tokens, workspace_bytes):
        return chunk_tokens_for(workspace_bytes, num_tokens, 1, 3, 1, "swiglu", 2)

    assert chunk(1000, None) == WHOLE and chunk(1000, 100_000) == WHOLE and chunk(1000, 10_000) == WHOLE
    assert chunk(1000, 9_990) == 504  # two even chunks, in multiples of 8
    assert chunk(1000, 5_000) == 336  # 500 fit, 496 in multiples of 8: three
    assert chunk(1000, 50) == 5 and chunk(0, 50) == WHOLE


@pytest.mark.parametrize(
    ("combine", "top_k", "of_a_token"),
    [
        ("gather", 1, 2 * (64 + 128)),  # dH and dX~
        ("fused", 1, 2 * 32 + 4 * 128),  # act and out's sums
        ("fused_both", 1, 2 * 64 + 4 * 128),  # dH and dX's sums
        ("gather", 8, 8 * 2 * (64 + 128)),
        ("fused", 8, 8 * 2 * (64 + 128)),
        ("fused_both", 8, 8 * 2 * (64 + 32)),  # H and act, beside which 4 bytes a sum are little
    ],
)
def test_a_tokens_sums_are_counted_once(combine, top_k, of_a_token):
    """float32, whatever the number of its experts; rows for each of them. d = 128, n = 32."""
    sizes = (top_k, 128, 32, "swiglu", 2)
    assert chunk_tokens_for(80 * of_a_token, 1000, *sizes, combine=combine) == 80
    assert chunk_tokens_for(80 * of_a_token - 1, 1000, *sizes, combine=combine) == 72
    sums = 1000 * 4 * 128  # which a capacity of no row needs too
    assert chunk_tokens_for(sums, 1000, *sizes, 0, combine=combine) == WHOLE
    assert (chunk_tokens_for(sums - 1, 1000, *sizes, 0, combine=combine) == WHOLE) == (combine == "gather")


@pytest.mark.parametrize("name", DISPATCH_LISTS)
def test_a_list_of_a_dispatch_that_is_not_aligned_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a chunk's may lie: a kernel reads 16 bytes at a time."""
    monkeypatch.setattr(hopper_backend, "current_stream", lambda _: 0)
    lists = {each: torch.zeros(8, dtype=torch.int32)[int(each == name) :] for each in DISPATCH_LISTS}
    at = hopper_backend.rows_of(Dispatch(**lists, token_expert_indices=None, num_experts=6, top_k=None, num_tokens=6))
    pairs, tokens, _ = at.pair_to_token
    places = (pairs, tokens, at.expert_token_offsets, at.token_index_map, at.token_offsets)
    assert [place % 16 for place in places] == [0] * len(DISPATCH_LISTS)
