"""The layer: shapes, parameters in Hugging Face's layout, state, options, errors."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blazeproto import MoE, Router, dispatch, gemm
from blazeproto.autograd import backends
from blazeproto.autograd import moe_mlp as expert_mlp
from blazeproto.blocksparse import DroppingMoE, SequentialMoE, dMoE
from blazeproto.router.router import ROUTERS
from tests.refusals import refuses


def test_parameters_have_hugging_faces_names_and_shapes():
    shapes = {name: tuple(p.shape) for name, p in MoE(16, 24, 5, 2, bias=True).named_parameters()}
    assert shapes == {
        "gate_up_proj": (5, 48, 16),
        "down_proj": (5, 16, 24),
        "gate_up_proj_bias": (5, 48),
        "down_proj_bias": (5, 16),
        "router.weight": (5, 16),
    }
    shapes = {name: tuple(p.shape) for name, p in MoE(16, 24, 5, 2, activation="gelu", bias=True).named_parameters()}
    assert shapes["up_proj"] == (5, 24, 16) and shapes["up_proj_bias"] == (5, 24)


def test_a_mixtral_layer_by_hand():
    """gate_up_proj holds the gate's rows, then up's: as transformers' experts compute it."""
    layer = MoE(16, 24, 4, 2, dtype=torch.float64)
    x = torch.randn(9, 16, dtype=torch.float64)
    probabilities = F.softmax(x @ layer.router.weight.T, dim=1)
    weights, experts = probabilities.topk(2)
    weights = weights / weights.sum(1, keepdim=True)
    expected = torch.zeros_like(x)
    for token in range(9):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            gate, up = F.linear(x[token], layer.gate_up_proj[expert]).chunk(2)
            expected[token] += weight * F.linear(F.silu(gate) * up, layer.down_proj[expert])
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("router", [name for name in ROUTERS if name.startswith("token_rounding")])
def test_rounding_leaves_a_small_batch_its_output(router):
    layer, x = MoE(16, 12, 16, 1, router=router), torch.randn(512, 16)
    out, stats = layer(x)
    out.sum().backward()
    assert stats.load.sum() == 512 and stats.dropped == 0 and (out != 0).any(1).all() and layer.down_proj.grad.any()
    assert layer.max_pairs(512) == 512
    torch.testing.assert_close(out, layer.eval()(x)[0])


def test_router_module_and_options():
    layer = MoE(16, 24, 4, 2, router=Router(16, 4, 2, z_loss=1e-3))
    assert set(layer(torch.randn(5, 16))[1].aux_losses) == {"z"}
    layer = MoE(16, 24, 4, 2, router="top_k", aux_loss=0.5, z_loss=1e-3)
    stats = layer(torch.randn(5, 16))[1]
    assert set(stats.aux_losses) == {"load_balancing", "z"}
    assert torch.equal(stats.aux_loss, sum(stats.aux_losses.values()))
    assert MoE(16, 24, 4, 2, router=Router(16, 4, 2))(torch.randn(5, 16))[1].aux_loss == 0.0


def test_options_are_options():
    layer = MoE(16, 24, 4, 2)
    for wrong in ({}, None, {"save": "paper"}):
        refuses(partial(setattr, layer, "options", wrong), "options", TypeError)
    layer.options = type(layer.options)(save="paper")
    assert layer.save == "paper" and layer(torch.randn(3, 16))[0].shape == (3, 16)


def test_shared_expert():
    layer = MoE(16, 24, 4, 2, d_shared=32, dtype=torch.float64)
    x = torch.randn(9, 16, dtype=torch.float64)
    out, _ = layer(x)
    gate, up = F.linear(x, layer.shared_expert.gate_up_proj).chunk(2, -1)
    shared = F.linear(F.silu(gate) * up, layer.shared_expert.down_proj)
    layer.shared_expert = None
    torch.testing.assert_close(out - layer(x)[0], shared)


def test_what_runs_is_said(monkeypatch):
    """For x of a dtype; float32 weights run on the kernels where x is in bf16."""
    layer = MoE(16, 24, 4, 2, device="meta")
    assert (
        layer.runs_on()
        == "torch: the kernels need a CUDA GPU of compute capability 8.0 or later; the tensors are on meta"
    )
    missing = {torch.bfloat16: None}
    monkeypatch.setattr(backends, "missing_for_kernels", lambda device, dtype, *_, **__: missing.get(dtype, "bf16"))
    monkeypatch.setattr(backends, "kernels_on", lambda *_: "hopper")
    assert layer.runs_on() == "hopper" and "backend=auto (hopper)" in repr(layer)
    assert layer.runs_on(torch.float32) == layer.half().runs_on() == "torch: the kernels need bf16"
    layer.backend = "hopper"
    assert layer.runs_on(torch.float32) == "nothing: the kernels need bf16"


def test_factory_arguments():
    layer = MoE(16, 24, 4, 2, bias=True, d_shared=8, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in layer.parameters())
    layer = MoE(16, 24, 4, 2, dtype=torch.bfloat16)
    out, _ = layer(torch.randn(9, 16, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.gate_up_proj, layer.gate_up_proj)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, "autocast"])
@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("router", ROUTERS)
def test_saved_bytes_are_what_the_experts_save(monkeypatch, router, save, dtype):
    """What autograd is given to save, weights apart: in training and evaluation, whole and in chunks, with fewer rows."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def watched(*arguments, **options):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return expert_mlp(*arguments, **options)

    monkeypatch.setattr(MoE, "_experts", staticmethod(watched))
    parameters = torch.float32 if dtype == "autocast" else dtype
    x = torch.randn(300, 32, dtype=parameters, requires_grad=True)
    ids = (torch.arange(300),) if router == "hash" else ()
    fixed = router in ("top_k", "topk_softmax", "aux_free", "hash")
    for workspace_bytes, row_capacity in ((None, None), (40_000, None), (None, 500), (60_000, 500)):
        if workspace_bytes and not fixed:
            continue  # chunks need a fixed K
        sizes = {"workspace_bytes": workspace_bytes, "row_capacity": row_capacity, "dtype": parameters}
        activation = "relu" if row_capacity else "swiglu"
        layer = MoE(32, 24, 6, 3, router=router, save=save, bias=True, activation=activation, **sizes)
        weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
        for training in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
                layer.train(training)(x, *ids)
                promised = layer.saved_bytes(300)
            saved = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
            assert promised == saved, (workspace_bytes, row_capacity, training)


SIZES = {"d_model": 16, "d_expert": 24, "num_experts": 4, "top_k": 2}
BAD = {  # what no wrong value of tests/test_wrong_arguments.py is
    "K above E": ("top_k", {"top_k": 5}, ValueError),
    "a workspace of no bytes": ("workspace_bytes", {"workspace_bytes": 0}, ValueError),
    "all of the router's": ("router_options", {"router_options": {"aux_loss": 0.1}}, TypeError),
    "a device that is not here": ("device", {"device": "cuda:99", "router": Router(16, 4, 2)}, ValueError),
    "no router": ("router", {"router": None}, TypeError),
    "hopper on a CPU": ("backend", {"backend": "hopper"}, ValueError),
    "float8": ("dtype", {"dtype": torch.float8_e4m3fn}, TypeError),
    "router for another K": ("router", {"router": Router(16, 4, 3)}, ValueError),
    "router for other experts": ("router", {"router": Router(16, 8, 2)}, ValueError),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments(what):
    argument, replaced, error = BAD[what]
    refuses(lambda: MoE(**{**SIZES, **replaced}), argument, error)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"activaton": "relu"}, "did you mean 'activation'"),
        ({"aux_los": 0.1}, "did you mean 'aux_loss'"),
        ({"tile": 64}, "choose='token_rounding' takes it"),
        ({"hidden_size": 16, "d_model": None}, "did you mean 'd_model'"),
        ({"num_local_experts": 4, "num_experts": None}, "did you mean 'num_experts'"),
        ({"num_experts_per_tok": 2, "top_k": None}, "did you mean 'top_k'"),
    ],
)
def test_an_unknown_keyword_is_refused_with_what_is_meant(given, meant):
    """A size under another name is told from a missing one."""
    given = {name: value for name, value in {**SIZES, **given}.items() if value is not None}
    with pytest.raises(TypeError, match=rf"\w+: unknown keyword .*; {re.escape(meant)}"):
        MoE(**given)


@pytest.mark.parametrize("name", ["d_model", "d_expert", "num_experts", "top_k", "widths"])
def test_sizes_are_read_only(name):
    layers = {layer: layer.router for layer in (MoE(16, 24, 4, 2), dMoE(16, [128, 256, 128, 128], 4, 2))}
    for owner in [*layers, *layers.values()]:
        if hasattr(owner, name):
            value = getattr(owner, name)
            setattr(owner, name, copy.copy(value))
            for other in {1, float(value) if isinstance(value, int) else "1"}:
                text = rf"{name}: expected .*, which this \w+ was made for, got {other!r}; make another"
                with pytest.raises(AttributeError, match=text):
                    setattr(owner, name, other)
            assert getattr(copy.deepcopy(owner), name) == value


def pruned(layer, num_experts=3):
    for name, weight in [*layer.named_parameters(recurse=False)]:
        setattr(layer, name, nn.Parameter(weight.detach()[: len(weight) * num_experts // layer.num_experts]))


def narrower(layer):
    layer.gate_up_proj = nn.Parameter(layer.gate_up_proj.detach()[:, :24])
    layer.down_proj = nn.Parameter(layer.down_proj.detach()[..., :12])


def with_rows_of(name, num_rows):
    def change(layer):
        tensor = getattr(layer.router, name).detach()[:num_rows]
        setattr(layer.router, name, nn.Parameter(tensor) if name == "weight" else tensor)

    return change


LATER = {
    "experts": ("down_proj", pruned),
    "width": ("down_proj", narrower),
    "router": ("router", lambda layer: setattr(layer, "router", Router(16, 8, 2))),
    "K": ("router", lambda layer: setattr(layer, "router", Router(16, 4, 3))),
    "router's weight": ("weight", with_rows_of("weight", 3)),
    "bias": ("expert_bias", with_rows_of("expert_bias", 3)),
}


@pytest.mark.parametrize("what", LATER)
def test_sizes_that_part_after_construction(what):
    """The router's pairs of experts that are not there would vanish, as those of other ranks do."""
    argument, change = LATER[what]
    layer = MoE(16, 24, 4, 2, router="aux_free")
    layer(torch.randn(9, 16))
    change(layer)
    refuses(lambda: layer(torch.randn(9, 16)), argument)


@pytest.mark.parametrize("kind", [dMoE, DroppingMoE, SequentialMoE])
def test_sizes_of_other_layers_that_part(kind):
    layer = kind(16, 128, 4, 2)
    pruned(layer)
    refuses(lambda: layer(torch.randn(9, 16)), "down_proj")


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("x", {"x": torch.randn(2, 3, 16, dtype=torch.float64)}),
        ("mask", {"mask": torch.ones(2, 3, 1, 2, dtype=torch.bool)}),
        ("mask", {"mask": torch.ones(3, 2, dtype=torch.bool)}),
    ],
)
def test_bad_input(argument, given):
    refuses(lambda: MoE(16, 24, 4, 2)(**{"x": torch.randn(2, 3, 16), **given}), argument)


def test_an_activation_that_is_set_later_is_the_shared_experts_too():
    layer, x = MoE(16, 24, 4, 2, d_shared=8), torch.randn(9, 16)
    other = MoE(16, 24, 4, 2, d_shared=8, activation="geglu")
    other.load_state_dict(layer.state_dict())
    layer.activation = "geglu"
    assert layer.shared_expert.activation == "geglu" and torch.equal(layer(x)[0], other(x)[0])


def test_a_router_of_other_experts_inside_a_module():
    class Inside(torch.nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.inner, self.made = Router(16, experts, 2), lambda routing: routing

        def forward(self, x):
            return self.made(self.inner(x))

    layer, x = MoE(16, 24, 4, 2, router=Inside(4)), torch.randn(5, 16)
    assert layer(x)[0].shape == x.shape
    for made, error in (
        (tuple, TypeError),
        (type, TypeError),  # the class itself
        (lambda routing: routing._replace(load=None), ValueError),
        (lambda routing: routing._replace(load=[1, 2, 3, 4]), ValueError),
        (lambda routing: routing._replace(aux_losses=None), TypeError),
        (lambda routing: routing._replace(aux_losses={"balance": 0.1}), TypeError),
    ):
        layer.router.made = made
        refuses(partial(layer, x), "router", error)
    refuses(partial(MoE(16, 24, 4, 2, router=Inside(5)), x), "router")


def test_a_router_that_takes_no_mask():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Router(16, 4, 2)

        def forward(self, x):
            return self.inner(x)

    class Passing(Plain):
        def forward(self, x, **options):
            return self.inner(x, **options)

    class Ignoring(Plain):
        def forward(self, x, **options):
            return self.inner(x)

    class Older(Router):
        def forward(self, x, token_ids=None):
            return super().forward(x, token_ids)

    x, mask = torch.randn(5, 16), torch.tensor([True, False, True, True, False])
    for router in (Ignoring(), Older(16, 4, 2), Plain()):
        refuses(partial(MoE(16, 24, 4, 2, router=router), x, mask=mask), "mask", TypeError)
    out, stats = MoE(16, 24, 4, 2, router=Passing())(x, mask=mask)
    assert not out[~mask].any() and out[mask].all() and int(stats.load.sum()) == 6


@pytest.mark.parametrize(
    ("options", "weight_grads", "dispatches"),
    [
        ({}, [False], {(100, 2)}),
        ({"dtype": torch.float32, "bias": True, "activation": "relu"}, [True], {(100, 2)}),
        ({"router": "expert_choice"}, [False], {(200, 1)}),
        ({"workspace_bytes": 15_000}, [False, True], {(40, 2), (20, 2)}),
        ({"workspace_bytes": 15_000, "row_capacity": 150}, [False, True], {(40, 2), (20, 2), (100, 2)}),
        ({"backend": "torch"}, [], set()),
    ],
)
def test_prepare(monkeypatch, options, weight_grads, dispatches):
    """What is compiled for 100 tokens: the products once for each dtype of the weight gradients, every dispatch."""
    prepared, shapes = [], set()

    def prepare(*sizes, **how):
        varies = "router" in options
        assert sizes == (16, 24, 4, None if varies else 2)
        assert how["up_bias"] == how["down_bias"] == ("bias" in options) and how["device"] == 3 and not how["fused"]
        assert how["backend"] == "hopper" and how["activation"] == options.get("activation", "swiglu")
        prepared.append(how["f32_weight_grads"])

    def prepare_dispatch(num_tokens, top_k, num_experts, *, row_capacity, device):
        assert (num_experts, device, row_capacity) == (4, 3, options.get("row_capacity"))
        shapes.add((num_tokens, top_k))

    layer = MoE(16, 24, 4, 2, **{"dtype": torch.bfloat16, **options})
    monkeypatch.setattr(backends, "missing_for_kernels", lambda *_, **__: None)
    monkeypatch.setattr(backends, "kernels_on", lambda *_: "hopper")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(gemm, "prepare", prepare)
    monkeypatch.setattr(dispatch, "prepare_dispatch", prepare_dispatch)
    layer.prepare(100)
    assert (sorted(prepared), shapes) == (weight_grads, dispatches)


def test_prepare_does_nothing_where_the_torch_backend_runs():
    MoE(16, 24, 4, 2).prepare(100)
