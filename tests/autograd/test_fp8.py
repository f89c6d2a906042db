"""``precision="fp8"`` on the torch backend: its formula written down again, what is saved, what is refused."""

import gc
import weakref
from copy import copy as shallow_copy
from copy import deepcopy
from dataclasses import replace
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
from blazeproto.blocksparse import dMoE
from blazeproto.gemm import quantize, registry, weight_fp8
from blazeproto.gemm.e4m3 import scale_of
from blazeproto.gemm.product import Variant
from blazeproto.gemm.registry import quantized_kernels
from tests.autograd.cases import NAMES, assert_same_bits
from tests.refusals import refuses

SIZES = (37, 144, 256, 5, 3)


def rounded(values: Tensor, *grouped: int, group: int = 128, floats: bool = False) -> Tensor:
    """To e4m3 times a power of two, or a float32, shared along ``grouped`` dimensions by so many."""
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
    blocks = values.reshape(split).to(torch.float32 if floats else values.dtype)
    scales = (blocks.abs().amax(dims, keepdim=True) / 448).clamp_min(2.0**-126)
    scales = scales if floats else torch.exp2(scales.log2().ceil())
    made = ((blocks / scales).float().to(torch.float8_e4m3fn).double() * scales.double()).reshape(values.shape)
    return made[tuple(map(slice, shape))]


def formula(case, precision: str | Recipe = "fp8") -> list[Tensor]:
    """Output and gradients, expert by expert, in float64, of what docs/fp8.md says is quantized."""
    tensors = {name: t.detach() for name, t in case.trained.items()}
    x, up, down, scores = (tensors[name] for name in ("x", "gate_up_proj", "down_proj", "scores"))
    (E, d, n), d_out = down.shape, case.d_out
    absent = {"up_bias": (E, 2 * n), "down_bias": (E, d), "up_a": (E, 1, d), "up_b": (E, 2 * n, 1)}
    absent |= {"down_a": (E, 1, n), "down_b": (E, d, 1)}
    t = {name: torch.zeros(shape, dtype=x.dtype) for name, shape in absent.items()} | tensors
    grad = {name: torch.zeros_like(each) for name, each in t.items()}
    of_token = {"group": x.shape[1]}
    xq, gq, floats = rounded(x, 1, **of_token), rounded(d_out, 1, **of_token), {"floats": precision == "fp8_rollout"}
    x_up = rounded(x, 1, **floats) if floats["floats"] else xq
    up_q, down_q = rounded(up, 1, 2, **floats), rounded(down, 1, 2, **floats)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = (case.topk_experts == e).nonzero().unbind(1)
        s, xa, dob = scores[token, slot, None], x[token] @ t["up_a"][e].T, d_out[token] @ t["down_b"][e]
        made = x_up[token] @ up_q[e].T + xa @ t["up_b"][e].T + t["up_bias"][e]
        h = rounded(made, 1)
        act = rounded(silu(made.chunk(2, 1)[0]) * made.chunk(2, 1)[1], 1, **floats)
        act_a = act @ t["down_a"][e].T
        out.index_add_(0, token, s * (act @ down_q[e].T + act_a @ t["down_b"][e].T + t["down_bias"][e]))
        d_act, (gate, linear) = gq[token] @ down_q[e] + dob @ t["down_a"][e], h.chunk(2, 1)
        sigmoid = gate.sigmoid()
        grad["scores"][token, slot] = (d_act * silu(gate) * linear).sum(1) + d_out[token] @ t["down_bias"][e]
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        dh = rounded(torch.cat((s * d_act * linear * slope, s * d_act * silu(gate)), 1), 1)
        a_scaled = rounded(s * silu(gate) * linear, 1)
        dhb = dh @ t["up_b"][e]
        grad["x"].index_add_(0, token, dh @ up_q[e] + dhb @ t["up_a"][e])
        of_rows = {"gate_up_proj": (dh, xq[token]), "up_a": (dhb, x[token]), "up_b": (dh, xa)}
        of_rows |= {"down_proj": (gq[token], a_scaled), "down_a": (dob, a_scaled), "down_b": (d_out[token], s * act_a)}
        for name, (left, right) in of_rows.items():
            grad[name][e] = left.T @ right
        grad["up_bias"][e], grad["down_bias"][e] = dh.sum(0), (s * d_out[token]).sum(0)
    return [out, *(grad[name] for name in case.trained)]


BESIDE: dict[str, dict[str, Any]] = {
    "weights alone": {},
    "biases": {"bias": True},
    "factors": {"factors": "both", "rank": 5},
    "biases and factors of up": {"bias": True, "factors": "up"},
    "biases and factors of down": {"bias": True, "factors": "down", "rank": 80},
}


@pytest.mark.parametrize(
    ("precision", "beside"), [("fp8", beside) for beside in BESIDE] + [(Recipe(), "weights alone")]
)
def test_it_is_the_formula(make_case, precision, beside):
    case = make_case(*SIZES, sentinels=True, idle=(2,), **BESIDE[beside])
    torch.testing.assert_close(case.run(precision=precision), formula(case), rtol=1e-10, atol=1e-10)


def test_no_tokens(make_case):
    case = make_case(0, *SIZES[1:])
    assert [tuple(t.shape) for t in case.run(precision="fp8")] == [tuple(t.shape) for t in (case.x, *case.parameters)]


@pytest.mark.parametrize("beside", BESIDE)
def test_recomputing_gives_the_same(make_case, beside):
    case = make_case(*SIZES, dtype=torch.bfloat16, varying=True, **BESIDE[beside])
    assert_same_bits(case.run(precision="fp8", save="recompute"), case.run(precision="fp8"))


@pytest.mark.parametrize("save", ["minimal", "recompute"])
@pytest.mark.parametrize("trained", ["all", *NAMES])
def test_a_frozen_tensor_changes_no_other_gradient(make_case, save, trained):
    case = make_case(*SIZES, bias=True, factors="both")
    tensors, results = case.trained, dict(zip(("out", *case.trained), case.run(precision="fp8"), strict=True))
    for name, t in tensors.items():
        t.requires_grad_(trained in ("all", name))
    assert_same_bits(case.run(precision="fp8", save=save), [results[name] for name in ("out", *case.trained)])


@pytest.mark.parametrize(("dtype", "of_x"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_kept_weights_give_the_same_bits(make_case, dtype, of_x, save, bytes_saved_by):
    case = make_case(*SIZES, dtype=dtype)
    case.x = case.x.detach().to(of_x).requires_grad_()
    case.d_out = case.d_out.to(of_x)
    weights = case.gate_up_proj, case.down_proj
    kept = quantize_weights(*weights, dtype=of_x)
    options = {"precision": "fp8", "save": save}
    assert_same_bits(case.run(**options, quantized=kept), case.run(**options))
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


WEIGHTS = torch.randn(4, 512, 128), torch.randn(4, 128, 256)
OTHERS = {  # which weights a call has beside what was kept of WEIGHTS
    "a copy": [weight.clone() for weight in WEIGHTS],
    "the same memory in another shape": [WEIGHTS[0].view(8, 256, 128), WEIGHTS[1].view(8, 128, 128).contiguous()],
    "some experts": [weight[:2] for weight in WEIGHTS],
}


@pytest.mark.parametrize("others", OTHERS)
def test_kept_weights_are_those_that_were_kept(others):
    up, down = OTHERS[others]
    tokens = torch.randn(8, 128), up, down, torch.rand(8, 1), torch.zeros(8, 1, dtype=torch.int64)
    kept = quantize_weights(*WEIGHTS)
    refuses(lambda: moe_mlp(*tokens, num_experts=len(up), precision="fp8", quantized=kept), "quantized")


def test_kept_weights_are_not_those_beside_them_in_memory(make_case):
    """Two layers' weights in one tensor: its storage and version are one."""
    case = make_case(*SIZES)
    ups, downs = (torch.stack((weight, weight)).detach() for weight in (case.gate_up_proj, case.down_proj))
    case.gate_up_proj, case.down_proj = ups[1], downs[1]
    kept = quantize_weights(ups[0], downs[0])
    refuses(lambda: case.forward(precision="fp8", quantized=kept), "quantized")


def test_memory_that_another_weight_has_got_is_noticed():
    case = [torch.randn(8, 64), torch.randn(4, 256, 64), torch.randn(4, 64, 128), torch.rand(8, 2)]
    memory, ids = case[1].data_ptr(), torch.tensor([[0, 1]] * 8)
    kept = quantize_weights(*case[1:3])
    del case[1]
    others = [torch.randn(4, 256, 64) for _ in range(50)]
    again = next((t for t in others if t.data_ptr() == memory), others[0])
    given = (case[0], again, *case[1:], ids)
    refuses(lambda: moe_mlp(*given, num_experts=4, precision="fp8", quantized=kept), "quantized")


def test_kept_weights_are_of_a_precision_and_a_dtype(make_case):
    case = make_case(*SIZES, dtype=torch.float32)
    kept = quantize_weights(case.gate_up_proj, case.down_proj)
    refuses(lambda: case.forward(quantized=kept), "quantized")
    refuses(lambda: case.forward(x=case.x.bfloat16(), precision="fp8", quantized=kept), "quantized")


def distributed(weight: Tensor) -> Tensor:
    """As FSDP has it, on one rank."""
    return DTensor.from_local(weight, DeviceMesh("cpu", [0], _init_backend=False, _rank=0), run_check=False)


@pytest.mark.parametrize(
    ("argument", "up", "down", "error"),
    [
        ("precision", torch.ones(5, 512, 136), torch.ones(5, 136, 256), ValueError),
        ("precision", torch.ones(5, 144, 512).mT, torch.ones(5, 144, 256), ValueError),
        ("gate_up_proj", distributed(torch.ones(5, 512, 144)), torch.ones(5, 144, 256), TypeError),
        ("down_proj", torch.ones(4, 256, 64), torch.zeros(64, 128), ValueError),
        ("down_proj", torch.ones(0, 256, 64), torch.zeros(0, 64, 128), ValueError),
        ("down_proj", torch.ones(4, 256, 64), torch.zeros(4, 64, 128).bfloat16(), ValueError),
    ],
)
def test_weights_that_cannot_be_kept(argument, up, down, error):
    refuses(lambda: quantize_weights(up, down), argument, error)


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


@pytest.fixture
def layer() -> MoE:
    """Which keeps its quantized weights."""
    made = MoE(64, 128, 4, 2, precision="fp8")
    made.quantize_weights()
    return made


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def test_a_layer_keeps_weights_until_it_is_told(layer):
    kept, layer.quantized = layer.quantized, None
    plain, layer.quantized = layer(X)[0], kept
    assert torch.equal(layer(X)[0], plain) and f"quantized={kept.nbytes} bytes of weights" in repr(layer)
    assert layer.saved_bytes(8) == MoE(64, 128, 4, 2, precision="fp8", keep_transposed=False).saved_bytes(8)
    layer(X)[0].sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    refuses(lambda: layer(X), "quantized")
    layer.quantize_weights()
    again, layer.quantized = layer(X)[0], None
    assert torch.equal(again, layer(X)[0]) and not torch.equal(again, plain)


def step_whose_hook_drops_gradients(layer):
    """A fused step changes no version; its hooks run before ours."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    optimizer.register_step_post_hook(lambda stepped, *_: stepped.zero_grad())
    optimizer.step()


def step_whose_closure_makes_gradients(layer):
    layer.zero_grad()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    optimizer.register_step_post_hook(lambda stepped, *_: stepped.zero_grad())

    def closure():
        loss = layer(X)[0].sum()
        loss.backward()
        return loss

    optimizer.step(closure)


WRITERS = {
    "fused": lambda layer: torch.optim.AdamW(layer.parameters(), fused=True).step(),
    "fused, one of both": lambda layer: torch.optim.AdamW([layer.down_proj], fused=True).step(),
    "fused sgd": lambda layer: torch.optim.SGD(layer.parameters(), fused=True).step(),
    "foreach": lambda layer: torch.optim.AdamW(layer.parameters(), foreach=True).step(),
    "loaded": lambda layer: layer.load_state_dict(layer.state_dict()),
    "other": lambda layer: setattr(layer, "down_proj", torch.nn.Parameter(layer.down_proj.detach().clone())),
    "copied records": lambda layer: setattr(
        layer,
        "quantized",
        replace(layer.quantized, up=layer.quantized.up.clone(), down=layer.quantized.down.clone()),
    ),
    "hook": step_whose_hook_drops_gradients,
    "closure": step_whose_closure_makes_gradients,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_who_writes_to_kept_weights_is_noticed(layer, writer, compiled):
    torch.compiler.reset()
    called = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    called(X)[0].sum().backward()
    WRITERS[writer](layer)
    with pytest.raises(ValueError, match="quantized: expected copies of these weights"):
        called(X)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_step_of_other_weights_changes_nothing(layer):
    """Sparse ones too, and the layer's own without gradients."""
    other = MoE(64, 128, 4, 2, precision="fp8")
    other(X)[0].sum().backward()
    torch.optim.AdamW([*other.parameters(), *layer.parameters()], fused=True).step()
    sparse = torch.nn.Parameter(torch.eye(3).to_sparse())
    sparse.grad = torch.eye(3).to_sparse()
    torch.optim.SGD([sparse], lr=0.1, foreach=False).step()
    assert layer(X)[0].isfinite().all()


def test_a_shallow_copy_is_what_it_is_of(layer):
    assert shallow_copy(layer.quantized) is layer.quantized and shallow_copy(layer)(X)[0].equal(layer(X)[0])


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


def test_copies_of_a_layer_quantize_anew(layer, tmp_path):
    torch.save(layer, tmp_path / "layer.pt")
    for copy in (deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        refuses(lambda copy=copy: copy(X), "quantized")
        with pytest.raises(ValueError, match="got copies of others"), torch.no_grad():
            torch.compile(copy, backend="aot_eager")(X)
        copy.quantize_weights()
        assert torch.equal(copy(X)[0], layer(X)[0])


@pytest.mark.full
def test_an_exported_layer_keeps_its_weights(layer):
    file = BytesIO()
    torch.export.save(torch.export.export(layer, (X,)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(X)[0], layer(X)[0])


def test_weights_are_quantized_in_inference_mode_too(layer):
    with torch.inference_mode():
        served = MoE(64, 128, 4, 2, precision="fp8")
        served.load_state_dict(layer.state_dict())
        for each in (layer, served):
            each.quantize_weights()
        assert torch.equal(served(X)[0], layer(X)[0])
    layer(X)[0].sum().backward()


@pytest.mark.parametrize("options", [{"combine": "fused"}, {"activation": "relu"}])
def test_weights_of_a_layer_that_fp8_refuses_are_not_quantized(options):
    layer = MoE(64, 128, 4, 2, precision="fp8", **options)
    refuses(layer.quantize_weights, "precision")
    assert layer.quantized is None


def test_a_layer_that_cannot_keep_weights_says_so(layer):
    refuses(dMoE(64, 128, 4, 2).quantize_weights, "precision")
    kept, layer.quantized = layer.quantized, 3
    refuses(lambda: layer(X), "quantized", TypeError)
    layer.quantized, layer.dispatcher = kept, object()
    refuses(lambda: layer(X), "quantized", RuntimeError)


class Other(Recipe):
    """A recipe of another kind."""


RECIPES = {
    "precision.x": Recipe(x=("e5m2", "token")),
    "precision.weights": Recipe(weights=("e4m3", "1x128")),
    "precision.products": Recipe(products=("up",)),
}


@pytest.mark.parametrize(
    ("argument", "precision"),
    [
        *RECIPES.items(),
        *(("precision", given) for given in (["fp8"], {"fp8": 1}, None, torch.bfloat16, Recipe, Other())),
    ],
)
def test_what_is_no_precision_is_refused(argument, precision):
    refuses(lambda: MoE(64, 128, 4, 2, precision=precision), argument)


def test_a_recipe_is_its_name():
    assert MoE(64, 128, 4, 2, precision=Recipe()).precision == "fp8"
    assert MoE(64, 128, 4, 2, precision=Recipe(products=())).precision == "bf16"


@pytest.mark.parametrize("save", ["minimal", "recompute"])
@pytest.mark.parametrize("keep", [False, True])
def test_saved_bytes(make_case, bytes_saved_by, save, keep):
    T, d, n, E, K = SIZES
    options, sizes = {"precision": "fp8", "keep_transposed": keep}, {"num_tokens": T, "d_model": d, "d_expert": n}
    sizes |= {"num_experts": E, "top_k": K}
    for factors in ("both", None):
        case = make_case(*SIZES, dtype=torch.bfloat16, factors=factors)
        weights = [t for name in NAMES if name not in ("x", "scores") and (t := getattr(case, name)) is not None]
        saved = bytes_saved_by(lambda case=case: case.forward(save=save, **options), weights)
        ranks = dict.fromkeys(("up_rank", "down_rank"), 8 if factors else 0)
        assert saved == saved_bytes(save, **sizes, **options, **ranks)
    layer = MoE(d, n, E, K, dtype=torch.bfloat16, save=save, **options)
    assert layer.saved_bytes(T) == saved and "precision=fp8" in repr(layer)
    for recipe, name in ((Recipe(), "fp8"), (Recipe(products=()), "bf16")):
        assert saved_bytes(save, **sizes, precision=recipe) == saved_bytes(save, **sizes, precision=name)


@pytest.mark.parametrize("sizes", [SIZES, (1, 48, 128, 5, 3)])
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_transposes_that_are_kept_give_the_same_bits(make_case, save, sizes):
    case = make_case(*sizes, dtype=torch.bfloat16 if sizes is SIZES else torch.float32)
    assert_same_bits(*(case.run(precision="fp8", save=save, keep_transposed=keep) for keep in (False, True)))


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
    case = make_case(*SIZES, dtype=torch.bfloat16, bias=True, factors="both")
    expected = case.run(precision="fp8")
    torch.compiler.reset()
    compiled = torch.compile(lambda: case.forward(precision="fp8"), fullgraph=True, backend="aot_eager")
    assert_same_bits(case.gradients(compiled()), expected)


REFUSED = {  # options of the case, of its call, its sizes
    "width": ({}, {}, (37, 136, 256, 5, 3)),
    "expert width": ({}, {}, (37, 144, 192, 5, 3)),
    "no gate": ({"activation": "relu"}, {}, SIZES),
    "paper": ({}, {"save": "paper"}, SIZES),
    "fused": ({}, {"combine": "fused"}, SIZES),
    "chunks": ({}, {"workspace_bytes": 10**6}, SIZES),
    "fp16": ({}, {"precision": "fp16"}, SIZES),
}


@pytest.mark.parametrize("which", REFUSED)
def test_refusals(make_case, which):
    options, given, sizes = REFUSED[which]
    case = make_case(*sizes, dtype=torch.float32, **options)
    refuses(lambda: case.forward(**{"precision": "fp8", **given}), "precision")


def test_transposed_weights_and_no_width_are_refused(make_case):
    case = make_case(*SIZES)
    refuses(lambda: case.forward(precision="fp8", gate_up_proj=case.gate_up_proj.mT.contiguous().mT), "precision")
    weights = {"gate_up_proj": torch.empty(5, 512, 0), "down_proj": torch.empty(5, 0, 256)}
    refuses(lambda: case.forward(precision="fp8", x=torch.empty(37, 0), **weights), "down_proj")


def test_prepare_compiles_its_kernels(monkeypatch):
    monkeypatch.setattr(registry, "compile_many", lambda kernels, jobs: list(kernels))
    kernels = gemm.prepare(64, 128, 4, 2, activation="geglu", precision="fp8")
    weights = {weight_fp8.kernel(variant=Variant(f32=f32)) for f32 in (False, True)}
    assert weights < {*quantized_kernels("geglu")} and {*quantized_kernels("geglu"), *quantize.kernels()} <= {*kernels}
    assert not {*quantize.kernels()} & {*gemm.prepare(64, 128, 4, 2)}
    biased = {*gemm.prepare(64, 128, 4, 2, activation="geglu", up_bias=True, precision="fp8")} - {*kernels}
    assert [kernel.entry for kernel in biased if "FP8" in kernel.defines] == ["up_forward_fp8"]


@pytest.mark.parametrize("floats", [False, True])
def test_a_launch_takes_the_kernel_that_was_prepared(floats):
    """The same object, which is loaded: a CUDA graph's capture can load none."""
    for kernel in quantize.kernels(floats=floats):
        assert quantize.kernel(kernel.entry, None, floats="FLOAT_SCALES" in kernel.defines) is kernel
