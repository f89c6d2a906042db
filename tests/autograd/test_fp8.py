"""``precision="fp8"`` and ``"fp8_rows"`` on the torch backend: its formula written down again, what is saved, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from blazeproto import MoE, gemm
from blazeproto.autograd import moe_mlp, saved_bytes
from blazeproto.autograd.low_rank import LowRank
from blazeproto.gemm import fp8, quantize, registry
from blazeproto.lab import explain

SIZES = (37, 144, 256, 5, 3)
PRECISIONS = ("fp8", "fp8_rows")


def rounded(values: Tensor, *grouped: int, group: int = 128) -> Tensor:
    """To e4m3 times a power of two, shared along ``grouped`` dimensions by so many."""
    shape = list(values.shape)
    for dim in grouped:
        size = values.shape[dim]
        values = torch.cat(
            (values, values.new_zeros(*values.shape[:dim], -size % group, *values.shape[dim + 1 :])), dim
        )
    split, dims = [], []
    for dim, size in enumerate(values.shape):
        split += [size // group, group] if dim in grouped else [size]
        dims += [len(split) - 1] if dim in grouped else []
    blocks = values.reshape(split)
    scales = torch.exp2((blocks.abs().amax(dims, keepdim=True) / 448).clamp_min(2.0**-126).log2().ceil())
    made = ((blocks / scales).float().to(torch.float8_e4m3fn).double() * scales).reshape(values.shape)
    return made[tuple(map(slice, shape))]


def formula(case, precision: str) -> list[Tensor]:
    """Output and gradients, expert by expert, in float64, of what docs/fp8.md says is quantized."""
    x, up, down, scores, d_out = (
        t.detach() for t in (case.x, case.gate_up_proj, case.down_proj, case.scores, case.d_out)
    )
    of_token = {"group": x.shape[1]}
    xq, gq = rounded(x, 1, **of_token), rounded(d_out, 1, **of_token)
    x_of_dw, g_of_dw = (xq, gq) if precision == "fp8" else (x, d_out)
    up_q, down_q = rounded(up, 1, 2), rounded(down, 1, 2)
    out, dx, d_up, d_down, d_scores = map(torch.zeros_like, (x, x, up, down, scores))
    for expert in range(len(up)):
        token, slot = (case.topk_experts == expert).nonzero().unbind(1)
        s = scores[token, slot, None]
        h = rounded(xq[token] @ up_q[expert].T, 1)
        made = xq[token] @ up_q[expert].T
        act = rounded(silu(made.chunk(2, 1)[0]) * made.chunk(2, 1)[1], 1)
        out.index_add_(0, token, s * (act @ down_q[expert].T))
        d_act, (gate, linear) = gq[token] @ down_q[expert], h.chunk(2, 1)
        sigmoid = gate.sigmoid()
        d_scores[token, slot] = (d_act * silu(gate) * linear).sum(1)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        dh = rounded(torch.cat((s * d_act * linear * slope, s * d_act * silu(gate)), 1), 1)
        d_down[expert] = g_of_dw[token].T @ rounded(s * silu(gate) * linear, 1)
        d_up[expert] = dh.T @ x_of_dw[token]
        dx.index_add_(0, token, dh @ up_q[expert])
    return [out, dx, d_up, d_down, d_scores]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_is_the_formula(make_case, precision):
    case = make_case(*SIZES, sentinels=True, idle=(2,))
    for got, expected in zip(case.run(precision=precision), formula(case, precision), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_recomputing_gives_the_same(make_case):
    case = make_case(*SIZES, dtype=torch.bfloat16, varying=True)
    for a, b in zip(case.run(precision="fp8", save="recompute"), case.run(precision="fp8"), strict=True):
        assert torch.equal(a, b)


def test_what_is_quantized_makes_a_difference(make_case):
    case = make_case(*SIZES)
    plain, made = case.run(), {name: case.run(precision=name) for name in PRECISIONS}
    off = {
        name: [((a - b).norm() / b.norm()).item() for a, b in zip(some, plain, strict=True)]
        for name, some in made.items()
    }
    assert all(0.01 < each < 0.1 for each in (*off["fp8"], *off["fp8_rows"]))
    same = [torch.equal(a, b) for a, b in zip(made["fp8"], made["fp8_rows"], strict=True)]
    assert same == [True, True, False, False, True]


@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_saved_bytes(make_case, bytes_saved_by, save):
    case = make_case(*SIZES, dtype=torch.bfloat16)
    T, d, n, E, K = SIZES
    saved = bytes_saved_by(lambda: case.forward(precision="fp8", save=save), (case.gate_up_proj, case.down_proj))
    sizes = {"num_tokens": T, "d_model": d, "d_expert": n, "num_experts": E, "top_k": K}
    assert saved == saved_bytes(save, **sizes, precision="fp8")
    layer = MoE(d, n, E, K, dtype=torch.bfloat16, save=save, precision="fp8")
    assert layer.saved_bytes(T) == saved and "precision=fp8" in repr(layer)


@pytest.mark.full
def test_compiled_it_gives_the_same(make_case):
    case = make_case(*SIZES, dtype=torch.bfloat16)
    expected = case.run(precision="fp8")
    torch.compiler.reset()
    compiled = torch.compile(lambda: case.forward(precision="fp8"), fullgraph=True, backend="aot_eager")
    out = compiled()
    for a, b in zip((out, *torch.autograd.grad(out, case.parameters, case.d_out)), expected, strict=True):
        assert torch.equal(a, b)


def test_a_layer_trains(make_case):
    torch.manual_seed(0)
    layer, x = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(64, 64)
    optimizer, losses = torch.optim.Adam(layer.parameters(), 1e-2), []
    for _ in range(20):
        loss = (layer(x)[0] - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


FACTORS = LowRank(torch.zeros(5, 8, 144), torch.zeros(5, 512, 8))
REFUSED = {
    "width": ({}, (37, 136, 256, 5, 3), "multiples of 16 and 128 as d and n with 'fp8', got"),
    "expert width": ({}, (37, 144, 192, 5, 3), "multiples of 16 and 128 as d and n with 'fp8', got"),
    "no gate": ({"activation": "relu"}, SIZES, "a gated activation whose halves lie apart with 'fp8', got 'relu'"),
    "paper": ({"save": "paper"}, SIZES, "another save policy than 'paper' with 'fp8', got"),
    "fused": ({"combine": "fused"}, SIZES, "combine='gather' with 'fp8', got 'fused'"),
    "chunks": ({"workspace_bytes": 10**6}, SIZES, "workspace_bytes=None with 'fp8', got 1000000"),
    "factors": ({"up_factors": FACTORS}, SIZES, "neither biases nor factors with 'fp8', got 'some'"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_refusals(make_case, which):
    options, sizes, message = REFUSED[which]
    case = make_case(*sizes, dtype=torch.float32, activation=options.get("activation", "swiglu"))
    with pytest.raises(ValueError, match=f"precision: expected {message}"):
        case.forward(precision="fp8", **options)


def test_biases_and_transposed_weights_are_refused(make_case):
    case = make_case(*SIZES, bias=True)
    with pytest.raises(ValueError, match="precision: expected neither biases nor factors with 'fp8_rows', got 'some'"):
        case.forward(precision="fp8_rows")
    lying, choice = case.gate_up_proj.mT.contiguous().mT, (case.scores, case.topk_experts)
    with pytest.raises(ValueError, match="precision: expected contiguous weights with 'fp8', got 'transposed ones'"):
        moe_mlp(case.x, lying, case.down_proj, *choice, num_experts=5, precision="fp8")
    with pytest.raises(ValueError, match=r"precision: expected one of .*'fp8'.*got 'fp16'"):
        case.forward(precision="fp16")


def test_explain_refuses_it():
    layer = MoE(16, 128, 4, 2, precision="fp8")
    with pytest.raises(ValueError, match="layer: expected precision='bf16', whose steps these are, got 'fp8'"):
        explain(layer, torch.randn(3, 16))


def test_prepare_compiles_its_kernels(monkeypatch):
    monkeypatch.setattr(registry, "compile_many", lambda kernels, jobs: list(kernels))
    kernels = gemm.prepare(64, 128, 4, 2, activation="geglu", precision="fp8")
    assert {*fp8.kernels("geglu"), *quantize.kernels()} <= {*kernels}
    assert not {*quantize.kernels()} & {*gemm.prepare(64, 128, 4, 2)}
