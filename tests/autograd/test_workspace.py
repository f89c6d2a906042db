"""``workspace_bytes``: chunks of tokens give what the whole gives, in bounded memory."""

from __future__ import annotations

import pytest
import torch

from blazeproto.autograd import SavePolicy, hopper_backend, torch_backend, torch_formulas
from blazeproto.autograd.chunks import WHOLE, chunk_tokens_for
from blazeproto.dispatch import Dispatch

DISPATCH_LISTS = ("expert_pair_indices", "expert_token_offsets", "token_index_map", "pair_tokens", "token_offsets")
POLICIES = [policy.value for policy in SavePolicy]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_are_deterministic_and_no_less_accurate(make_case, dtype):
    case = make_case(256, 32, 48, 6, 3, dtype=dtype, bias=True)
    expected = case.reference()
    whole, chunks = case.run(), case.run(workspace_bytes=20_000)
    again = case.run(workspace_bytes=20_000)
    for a, b, c, reference in zip(whole, chunks, again, expected, strict=True):
        assert torch.equal(b, c)
        assert (b - reference).norm() <= 1.1 * (a - reference).norm() + 1e-6 * reference.norm()


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


@pytest.mark.parametrize("save", POLICIES)
def test_transient_rows_are_bounded(make_case, save, monkeypatch):
    """No product ever sees more rows than the workspace is for."""
    case = make_case(200, 16, 24, 5, 2, dtype=torch.float32)
    seen = []
    for name in ("up_forward", "down_forward", "down_backward_act", "up_backward_act"):
        real = getattr(torch_backend, name)

        def counted(*args, _real=real, **kwargs):
            seen.append(args[0].rows.num_rows)
            return _real(*args, **kwargs)

        monkeypatch.setattr(torch_backend, name, counted)
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
    assert chunk(1000, 50) == 5
    assert chunk(0, 50) == WHOLE


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
