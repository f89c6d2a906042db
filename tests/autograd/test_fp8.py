"""``precision="fp8"`` on the torch backend: its formula written down again, what is saved, what is refused."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from copy import copy as shallow_copy
from copy import deepcopy
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import silu

from blazeproto import MoE, Recipe, gemm
from blazeproto.autograd import grouped_experts, moe_mlp, quantize_weights, saved_bytes
from blazeproto.autograd.low_rank import LowRank
from blazeproto.blocksparse import dMoE
from blazeproto.gemm import quantize, registry, weight_fp8
from blazeproto.gemm.e4m3 import scale_of
from blazeproto.gemm.product import Variant
from blazeproto.gemm.registry import quantized_kernels

SIZES = (37, 144, 256, 5, 3)


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


def formula(case) -> list[Tensor]:
    """Output and gradients, expert by expert, in float64, of what docs/fp8.md says is quantized."""
    x, up, down, scores, d_out = (
        t.detach() for t in (case.x, case.gate_up_proj, case.down_proj, case.scores, case.d_out)
    )
    of_token = {"group": x.shape[1]}
    xq, gq = rounded(x, 1, **of_token), rounded(d_out, 1, **of_token)
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
        d_down[expert] = gq[token].T @ rounded(s * silu(gate) * linear, 1)
        d_up[expert] = dh.T @ xq[token]
        dx.index_add_(0, token, dh @ up_q[expert])
    return [out, dx, d_up, d_down, d_scores]


@pytest.mark.parametrize("precision", ["fp8", Recipe()])
def test_it_is_the_formula(make_case, precision):
    case = make_case(*SIZES, sentinels=True, idle=(2,))
    for got, expected in zip(case.run(precision=precision), formula(case), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_no_tokens(make_case):
    case = make_case(0, *SIZES[1:])
    assert [tuple(t.shape) for t in case.run(precision="fp8")] == [tuple(t.shape) for t in (case.x, *case.parameters)]


def test_recomputing_gives_the_same(make_case):
    case = make_case(*SIZES, dtype=torch.bfloat16, varying=True)
    for a, b in zip(case.run(precision="fp8", save="recompute"), case.run(precision="fp8"), strict=True):
        assert torch.equal(a, b)


def test_what_is_quantized_makes_a_difference(make_case):
    case = make_case(*SIZES)
    pairs = zip(case.run(precision="fp8"), case.run(), strict=True)
    assert all(0.01 < (a - b).norm() / b.norm() < 0.1 for a, b in pairs)


@pytest.mark.parametrize("save", ["minimal", "recompute"])
@pytest.mark.parametrize("trained", ["all", "down", "up", "scores"])
def test_a_frozen_tensor_changes_no_other_gradient(make_case, save, trained):
    case = make_case(*SIZES)
    gradients = dict(zip(("x", "up", "down", "scores"), case.run(precision="fp8")[1:], strict=True))
    wanted = dict(zip(gradients, case.parameters, strict=True))
    for name, t in wanted.items():
        t.requires_grad_(trained in ("all", name))
    out = case.forward(precision="fp8", save=save)
    of = [name for name, t in wanted.items() if t.requires_grad]
    for name, got in zip(of, torch.autograd.grad(out, [wanted[name] for name in of], case.d_out), strict=True):
        assert torch.equal(got, gradients[name])


@pytest.mark.parametrize(("dtype", "of_x"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_kept_weights_give_the_same_bits(make_case, dtype, of_x, save, bytes_saved_by):
    case = make_case(*SIZES, dtype=dtype)
    case.x = case.x.detach().to(of_x).requires_grad_()
    case.d_out = case.d_out.to(of_x)
    weights = case.gate_up_proj, case.down_proj
    kept = quantize_weights(*weights, dtype=of_x)
    options = {"precision": "fp8", "save": save}
    for a, b in zip(case.run(**options, quantized=kept), case.run(**options), strict=True):
        assert torch.equal(a, b)
    assert kept.nbytes == sum(
        2 * (w.numel() + 4 * len(w) * -(-w.shape[1] // 128) * -(-w.shape[2] // 128)) for w in weights
    )
    ways: dict[str, dict[str, Any]] = {
        "both": {},
        "each": {"keep_transposed": False},
        "kept": {"quantized": kept},
    }
    saved = {
        name: bytes_saved_by(partial(case.forward, **options, **way), (*weights, kept.up, kept.down))
        for name, way in ways.items()
    }
    transposes = kept.nbytes // 2 if save == "minimal" else 0
    assert saved["each"] == saved["kept"] == saved["both"] - transposes
    case.x = case.x.detach()
    assert bytes_saved_by(partial(case.forward, **options), weights) == saved["each"]


@pytest.mark.parametrize("experts", [1, 5])
def test_both_orders_of_kept_weights_begin_where_kernels_can_read(experts):
    kept = quantize_weights(torch.randn(experts, 256, 64), torch.randn(experts, 64, 128))
    assert all(order.data_ptr() % 16 == 0 for record in (kept.up, kept.down) for order in record)


def test_kept_weights_are_those_that_were_kept(make_case):
    case, other = (make_case(*SIZES, dtype=torch.float32) for _ in range(2))
    kept = quantize_weights(case.gate_up_proj, case.down_proj)
    with pytest.raises(ValueError, match=r"quantized: expected x in torch\.float32, got torch\.bfloat16"):
        moe_mlp(
            case.x.bfloat16(),
            case.gate_up_proj,
            case.down_proj,
            case.scores,
            case.topk_experts,
            num_experts=5,
            precision="fp8",
            quantized=kept,
        )
    with pytest.raises(ValueError, match="quantized: expected precision in fp8, got bf16"):
        case.forward(quantized=kept)
    with pytest.raises(ValueError, match="quantized: expected of these weights, got of others"):
        other.forward(precision="fp8", quantized=kept)
    with torch.no_grad():
        case.down_proj.mul_(2)
    with pytest.raises(ValueError, match="or of them before they changed"):
        case.forward(precision="fp8", quantized=kept)


def distributed(weight: Tensor) -> Tensor:
    """As FSDP has it, on one rank."""
    return DTensor.from_local(weight, DeviceMesh("cpu", [0], _init_backend=False, _rank=0), run_check=False)


@pytest.mark.parametrize(
    ("sizes", "change", "error", "message"),
    [
        ((37, 136, 256, 5, 3), lambda w: w, ValueError, "precision: expected multiples of 16 and 128 as d and n"),
        (SIZES, lambda w: w.mT.contiguous().mT, ValueError, "precision: expected contiguous weights with 'fp8'"),
        (SIZES, distributed, TypeError, "gate_up_proj: expected a torch.Tensor that is local, got DTensor"),
    ],
)
def test_weights_that_cannot_be_kept(make_case, sizes, change, error, message):
    case = make_case(*sizes)
    with pytest.raises(error, match=message):
        quantize_weights(change(case.gate_up_proj.detach()), case.down_proj)


def test_kept_weights_are_for_autocasts_dtype(make_case):
    case = make_case(*SIZES, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = quantize_weights(case.gate_up_proj, case.down_proj)
        assert kept.dtype == torch.bfloat16
        assert torch.equal(case.forward(precision="fp8", quantized=kept), case.forward(precision="fp8"))


@pytest.mark.parametrize("m", [np, torch])
def test_a_scale_is_the_least_power_of_two_that_leaves_448(m):
    """And at least 2^-126. One step further is the next scale."""
    exponents = np.array([-126, -30, 0, 30])
    largest = np.ldexp(np.float32(448), exponents).astype(np.float32)
    above = np.nextafter(largest, np.float32(np.inf), dtype=np.float32)
    values = np.concatenate((largest, above, np.zeros(1, np.float32)))
    made = scale_of(m, values if m is np else torch.from_numpy(values))
    expected = np.ldexp(1.0, np.concatenate((exponents, exponents + 1, [-126])))
    np.testing.assert_array_equal(np.asarray(made), expected.astype(np.float32))


def test_a_layer_keeps_weights_until_it_is_told():
    torch.manual_seed(0)
    layer, x = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(8, 64)
    plain = layer(x)[0]
    layer.quantize_weights()
    assert torch.equal(layer(x)[0], plain) and f"quantized={layer.quantized.nbytes} bytes of weights" in repr(layer)
    assert layer.saved_bytes(8) == MoE(64, 128, 4, 2, precision="fp8", keep_transposed=False).saved_bytes(8)
    layer(x)[0].sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    with pytest.raises(ValueError, match="before they changed"):
        layer(x)
    layer.quantize_weights()
    again, layer.quantized = layer(x)[0], None
    assert torch.equal(again, layer(x)[0]) and not torch.equal(again, plain)


WRITERS = {
    "fused": lambda layer: torch.optim.AdamW(layer.parameters(), fused=True).step(),
    "fused sgd": lambda layer: torch.optim.SGD(layer.parameters(), fused=True).step(),
    "foreach": lambda layer: torch.optim.AdamW(layer.parameters(), foreach=True).step(),
    "loaded": lambda layer: layer.load_state_dict(layer.state_dict()),
    "other": lambda layer: setattr(layer, "down_proj", torch.nn.Parameter(layer.down_proj.detach().clone())),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_who_writes_to_kept_weights_is_noticed(writer, compiled):
    layer, x = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(8, 64)
    layer.quantize_weights()
    torch.compiler.reset()
    called = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    called(x)[0].sum().backward()
    WRITERS[writer](layer)
    with pytest.raises(ValueError, match="before they changed"):
        called(x)


def test_no_width_is_refused():
    x, ids = torch.empty(4, 0), torch.zeros(4, 1, dtype=torch.int32)
    weights = torch.empty(2, 256, 0), torch.empty(2, 0, 128)
    with pytest.raises(ValueError, match=r"down_proj: expected d and n of at least 1, got \(2, 0, 128\)"):
        moe_mlp(x, *weights, torch.rand(4, 1), ids, num_experts=2, precision="fp8")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_an_optimizer_s_own_hook_drops_was_stepped():
    """A fused step changes no version; its hooks run before ours, and here drop the gradients."""
    layer, x = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(8, 64)
    layer.quantize_weights()
    sparse = torch.nn.Parameter(torch.eye(3).to_sparse())
    sparse.grad = torch.eye(3).to_sparse()
    torch.optim.SGD([sparse], lr=0.1, foreach=False).step()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    optimizer.register_step_post_hook(lambda stepped, *_: stepped.zero_grad())
    layer(x)[0].sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="before they changed"):
        layer(x)


@pytest.mark.parametrize("dtype", ["fp8", torch.int32])
def test_weights_are_quantized_for_x_of_a_known_dtype(dtype):
    with pytest.raises(TypeError, match="dtype: expected None or one of torch"):
        MoE(64, 128, 4, 2, precision="fp8").quantize_weights(dtype)


def test_an_optimizer_of_other_weights_changes_nothing():
    layer, other, x = *(MoE(64, 128, 4, 2, precision="fp8") for _ in range(2)), torch.randn(8, 64)
    layer.quantize_weights()
    other(x)[0].sum().backward()
    torch.optim.AdamW([*other.parameters(), *layer.parameters()], fused=True).step()  # without gradients of layer's
    assert layer(x)[0].isfinite().all()


def test_memory_that_another_weight_has_got_is_noticed():
    case = [torch.randn(8, 64), torch.randn(4, 256, 64), torch.randn(4, 64, 128), torch.rand(8, 2)]
    memory, ids = case[1].data_ptr(), torch.tensor([[0, 1]] * 8)
    kept = quantize_weights(*case[1:3])
    del case[1]
    others = [torch.randn(4, 256, 64) for _ in range(50)]
    again = next((t for t in others if t.data_ptr() == memory), others[0])
    with pytest.raises(ValueError, match="expected of these weights, got of others"):
        moe_mlp(case[0], again, *case[1:], ids, num_experts=4, precision="fp8", quantized=kept)


def test_kept_weights_are_not_those_beside_them_in_memory(make_case):
    """Two layers' weights in one tensor: its storage and version are one."""
    case = make_case(*SIZES)
    ups, downs = (torch.stack((weight, weight)) for weight in (case.gate_up_proj, case.down_proj))
    with pytest.raises(ValueError, match="quantized: expected of these weights, got of others"):
        moe_mlp(
            *(case.x, ups[1], downs[1], case.scores, case.topk_experts),
            num_experts=5,
            precision="fp8",
            quantized=quantize_weights(ups[0], downs[0]),
        )


@pytest.mark.parametrize(
    "others", [lambda up, down: (up.view(4, 256, 256), down.view(4, 256, 128)), lambda up, down: (up[:2], down[:2])]
)
def test_kept_weights_are_not_the_same_memory_in_another_shape(others):
    weights = torch.randn(4, 512, 128), torch.randn(4, 128, 256)
    up, down = others(*weights)
    tokens = torch.randn(8, down.shape[1]), up, down, torch.rand(8, 1), torch.zeros(8, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="quantized: expected of these weights"):
        moe_mlp(*tokens, num_experts=len(up), precision="fp8", quantized=quantize_weights(*weights))


def test_a_shallow_copy_is_what_it_is_of():
    layer, x = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(8, 64)
    layer.quantize_weights()
    assert shallow_copy(layer.quantized) is layer.quantized and shallow_copy(layer)(x)[0].equal(layer(x)[0])


def test_copies_of_records_are_refused_in_a_compiled_call_too():
    layer, x = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(8, 64)
    layer.quantize_weights()
    kept = layer.quantized
    layer.quantized = dataclasses.replace(kept, up=kept.up.clone(), down=kept.down.clone())
    with pytest.raises(ValueError, match="got of others"), torch.no_grad():
        torch.compile(layer, backend="aot_eager")(x)


def test_a_fused_step_whose_closure_makes_the_gradients_is_noticed():
    layer, x = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(8, 64)
    layer.quantize_weights()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    optimizer.register_step_post_hook(lambda stepped, *_: stepped.zero_grad())

    def closure():
        loss = layer(x)[0].sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(ValueError, match="before they changed"):
        layer(x)


def test_a_step_that_fails_keeps_no_weights():
    layer = MoE(64, 128, 4, 2, precision="fp8")
    layer.quantize_weights()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def closure():
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(closure)
    weight, optimizer.param_groups = weakref.ref(layer.down_proj.untyped_storage()), []
    del layer
    gc.collect()
    assert weight() is None


def test_copies_of_a_layer_quantize_anew(tmp_path):
    layer, x = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(8, 64)
    layer.quantize_weights()
    torch.save(layer, tmp_path / "layer.pt")
    for copy in (deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        with pytest.raises(ValueError, match="got of others"):
            copy(x)
        with pytest.raises(ValueError, match="got of others"), torch.no_grad():
            torch.compile(copy, backend="aot_eager")(x)
        copy.quantize_weights()
        assert torch.equal(copy(x)[0], layer(x)[0])


@pytest.mark.full
def test_an_exported_layer_keeps_its_weights():
    layer, x, file = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(8, 64), BytesIO()
    layer.quantize_weights()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(x)[0], layer(x)[0])


def test_weights_are_quantized_in_inference_mode_too():
    layer, x = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(8, 64)
    with torch.inference_mode():
        served = MoE(64, 128, 4, 2, precision="fp8")
        served.load_state_dict(layer.state_dict())
        for each in (layer, served):
            each.quantize_weights()
        assert torch.equal(served(x)[0], layer(x)[0])
    layer(x)[0].sum().backward()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bias": True}, "neither biases nor low-rank factors with 'fp8', got up_bias, down_bias"),
        ({"combine": "fused"}, "combine='gather'"),
        ({"activation": "relu"}, "a gated activation"),
    ],
)
def test_weights_of_a_layer_that_fp8_refuses_are_not_quantized(options, expected):
    layer = MoE(64, 128, 4, 2, precision="fp8", **options)
    with pytest.raises(ValueError, match=f"precision: expected {expected}"):
        layer.quantize_weights()
    assert layer.quantized is None


class Elsewhere:
    """A dispatcher."""


def test_a_layer_that_cannot_keep_weights_says_so():
    with pytest.raises(ValueError, match="precision: expected 'fp8' for quantize_weights, got 'bf16'"):
        dMoE(64, 128, 4, 2).quantize_weights()
    layer, x = MoE(64, 128, 4, 2, precision="fp8"), torch.randn(8, 64)
    layer.quantized = 3
    with pytest.raises(TypeError, match="quantized: expected a QuantizedWeights or None, got int"):
        layer(x)
    layer.quantize_weights()
    layer.dispatcher = Elsewhere()
    with pytest.raises(RuntimeError, match="quantized: expected a layer on one rank, got one with"):
        layer(x)


RECIPES = {
    "precision.x: expected Operand(element='e4m3', scale='token'), got ('e5m2', 'token')": {"x": ("e5m2", "token")},
    "precision.weights: expected Operand(element='e4m3', scale='128x128'), got ('e4m3', '1x128')": {
        "weights": ("e4m3", "1x128")
    },
    "precision.products: expected ('up', 'down', 'dH', 'dX', 'dW_down', 'dW_up'), got ('up',)": {"products": ("up",)},
}


@pytest.mark.parametrize("message", RECIPES)
def test_a_recipe_that_cannot_run_is_refused(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MoE(64, 128, 4, 2, precision=Recipe(**RECIPES[message]))


class Other(Recipe):
    """A recipe of another kind."""


@pytest.mark.parametrize("precision", [["fp8"], {"fp8": 1}, None, torch.bfloat16, Recipe, Other()])
def test_what_is_no_precision_is_refused(precision):
    with pytest.raises(ValueError, match=re.escape(f"or a Recipe, got {precision!r}")):
        MoE(64, 128, 4, 2, precision=precision)


@pytest.mark.parametrize(
    ("up", "down", "error", "message"),
    [
        ((4, 256, 64), 3, TypeError, "down_proj: expected a torch.Tensor, got int"),
        (
            (4, 256, 64),
            torch.zeros(64, 128),
            ValueError,
            "down_proj: expected shape (E, d, n) with E >= 1, got (64, 128)",
        ),
        (
            (0, 256, 64),
            torch.zeros(0, 64, 128),
            ValueError,
            "down_proj: expected shape (E, d, n) with E >= 1, got (0, 64, 128)",
        ),
        (
            (4, 256, 64),
            torch.zeros(4, 64, 128).bfloat16(),
            ValueError,
            "down_proj: expected dtype torch.float32 as gate_up_proj has, got torch.bfloat16",
        ),
    ],
)
def test_what_is_no_weight_is_not_quantized(up, down, error, message):
    with pytest.raises(error, match=re.escape(message)):
        quantize_weights(torch.randn(up), down)


def test_a_recipe_is_its_name():
    assert MoE(64, 128, 4, 2, precision=Recipe()).precision == "fp8"
    assert MoE(64, 128, 4, 2, precision=Recipe(products=())).precision == "bf16"


@pytest.mark.parametrize("save", ["minimal", "recompute"])
@pytest.mark.parametrize("keep", [False, True])
def test_saved_bytes(make_case, bytes_saved_by, save, keep):
    case = make_case(*SIZES, dtype=torch.bfloat16)
    T, d, n, E, K = SIZES
    options, weights = {"precision": "fp8", "keep_transposed": keep}, (case.gate_up_proj, case.down_proj)
    saved = bytes_saved_by(lambda: case.forward(save=save, **options), weights)
    sizes = {"num_tokens": T, "d_model": d, "d_expert": n, "num_experts": E, "top_k": K}
    assert saved == saved_bytes(save, **sizes, **options)
    layer = MoE(d, n, E, K, dtype=torch.bfloat16, save=save, **options)
    assert layer.saved_bytes(T) == saved and "precision=fp8" in repr(layer)
    for recipe, name in ((Recipe(), "fp8"), (Recipe(products=()), "bf16")):
        assert saved_bytes(save, **sizes, precision=recipe) == saved_bytes(save, **sizes, precision=name)


@pytest.mark.parametrize("sizes", [SIZES, (1, 48, 128, 5, 3)])
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_transposes_that_are_kept_give_the_same_bits(make_case, save, sizes):
    case = make_case(*sizes, dtype=torch.bfloat16 if sizes is SIZES else torch.float32)
    made = (case.run(precision="fp8", save=save, keep_transposed=keep) for keep in (False, True))
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("keep", [False, True])
def test_a_pair_of_gate_and_up_gives_what_the_joined_weight_does(make_case, keep):
    case = make_case(*SIZES, dtype=torch.bfloat16)
    pair = tuple(half.detach().contiguous().requires_grad_() for half in case.gate_up_proj.chunk(2, 1))
    counts, made = torch.tensor([10, 0, 7, 1, 12]), []
    for up in (pair, (case.gate_up_proj,)):
        weights = up if len(up) == 2 else up[0], case.down_proj
        out = grouped_experts(case.x, *weights, counts, precision="fp8", keep_transposed=keep)
        dx, *d_up, d_down = torch.autograd.grad(out, (case.x, *up, case.down_proj), case.d_out)
        made.append((out, dx, torch.cat(d_up, 1), d_down))
    assert all(map(torch.equal, *made))


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
    "width": ({}, (37, 136, 256, 5, 3), r"multiples of 16 and 128 as d and n with 'fp8', got \(136, 256\)"),
    "expert width": ({}, (37, 144, 192, 5, 3), "multiples of 16 and 128 as d and n with 'fp8', got"),
    "no gate": ({"activation": "relu"}, SIZES, "a gated activation whose halves lie apart with 'fp8', got 'relu'"),
    "paper": ({"save": "paper"}, SIZES, "save='minimal' or 'recompute' with 'fp8', got 'paper'"),
    "fused": ({"combine": "fused"}, SIZES, "combine='gather' with 'fp8', got 'fused'"),
    "chunks": ({"workspace_bytes": 10**6}, SIZES, "workspace_bytes=None with 'fp8', got 1000000"),
    "factors": ({"up_factors": FACTORS}, SIZES, "neither biases nor low-rank factors with 'fp8', got up_factors"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_refusals(make_case, which):
    options, sizes, message = REFUSED[which]
    case = make_case(*sizes, dtype=torch.float32, activation=options.get("activation", "swiglu"))
    with pytest.raises(ValueError, match=f"precision: expected {message}"):
        case.forward(precision="fp8", **options)


def test_biases_and_transposed_weights_are_refused(make_case):
    case = make_case(*SIZES, bias=True)
    with pytest.raises(ValueError, match="neither biases nor low-rank factors with 'fp8', got up_bias, down_bias"):
        case.forward(precision="fp8")
    lying, choice = case.gate_up_proj.mT.contiguous().mT, (case.scores, case.topk_experts)
    with pytest.raises(ValueError, match="precision: expected contiguous weights with 'fp8', got transposed weights"):
        moe_mlp(case.x, lying, case.down_proj, *choice, num_experts=5, precision="fp8")
    with pytest.raises(ValueError, match=r"precision: expected one of .*'fp8'.*got 'fp16'"):
        case.forward(precision="fp16")


def test_prepare_compiles_its_kernels(monkeypatch):
    monkeypatch.setattr(registry, "compile_many", lambda kernels, jobs: list(kernels))
    kernels = gemm.prepare(64, 128, 4, 2, activation="geglu", precision="fp8")
    weights = {weight_fp8.kernel(variant=Variant(f32=f32)) for f32 in (False, True)}
    assert weights < {*quantized_kernels("geglu")} and {*quantized_kernels("geglu"), *quantize.kernels()} <= {*kernels}
    assert not {*quantize.kernels()} & {*gemm.prepare(64, 128, 4, 2)}
