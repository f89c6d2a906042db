"""The layer: shapes, parameters in Hugging Face's layout, state, options, errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blazeproto.layer
from blazeproto import MoE, Router, dispatch, gemm
from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.autograd import backends
from blazeproto.autograd import moe_mlp as expert_mlp
from blazeproto.blocksparse import DroppingMoE, SequentialMoE, dMoE
from blazeproto.reference import moe_mlp
from blazeproto.router.router import ROUTERS

POLICIES = ["minimal", "paper", "recompute"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_output_is_the_oracles(activation, bias):
    layer = MoE(16, 24, 5, 2, activation=activation, bias=bias, dtype=torch.float64)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    out, stats = layer(x)
    routing = layer.router(x.view(-1, 16))
    expected = moe_mlp(
        x.view(-1, 16),
        layer.gate_up_proj if activation_named(activation).gated else layer.up_proj,
        layer.down_proj,
        routing.scores,
        routing.experts,
        num_experts=5,
        activation=activation,
        up_bias=(layer.gate_up_proj_bias if activation_named(activation).gated else layer.up_proj_bias)
        if bias
        else None,
        down_bias=layer.down_proj_bias,
    )
    assert out.shape == x.shape
    torch.testing.assert_close(out.view(-1, 16), expected, rtol=1e-12, atol=1e-12)
    assert stats.load.sum() == 42 and torch.equal(stats.load, routing.load)


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


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "hash"])
@pytest.mark.parametrize("save", POLICIES)
def test_every_router_trains(router, save):
    layer = MoE(16, 24, 4, 2, router=router, save=save)
    x = torch.randn(150, 16, requires_grad=True)
    out, stats = layer(x)
    (out.square().sum() + stats.aux_loss).backward()
    assert x.grad.isfinite().all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert layer.router.weight.grad.abs().sum() > 0
    layer.eval()
    assert layer(x)[0].isfinite().all()


@pytest.mark.parametrize("router", [name for name in ROUTERS if name.startswith("token_rounding")])
def test_rounding_leaves_a_small_batch_its_output(router):
    layer, x = MoE(16, 12, 16, 1, router=router), torch.randn(512, 16)
    out, stats = layer(x)
    out.sum().backward()
    assert stats.load.sum() == 512 and stats.dropped == 0
    assert (out != 0).any(1).all() and layer.down_proj.grad.any()
    assert layer.max_pairs(512) == 512
    torch.testing.assert_close(out, layer.eval()(x)[0])


def test_hash_router_takes_token_ids():
    layer = MoE(16, 24, 4, 2, router="hash")
    ids = torch.randint(0, 100, (3, 7))
    out, stats = layer(torch.randn(3, 7, 16), ids)
    assert out.shape == (3, 7, 16) and stats.load.sum() == 42


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
        with pytest.raises(
            TypeError, match=rf"options: expected blazeproto.autograd.Options, got {type(wrong).__name__}"
        ):
            layer.options = wrong
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


@pytest.mark.parametrize("options", [{}, {"activation": "relu", "bias": True}, {"d_shared": 8, "router": "aux_free"}])
def test_state_dict_round_trip(options):
    layer, other = (MoE(16, 24, 4, 2, **options) for _ in range(2))
    x = torch.randn(9, 16)
    assert not torch.equal(layer(x)[0], other(x)[0])
    result = other.load_state_dict(layer.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(layer(x)[0], other(x)[0])


def test_a_checkpoint_that_does_not_fit():
    with pytest.raises(RuntimeError, match="size mismatch for gate_up_proj"):
        MoE(16, 24, 4, 2).load_state_dict(MoE(16, 32, 4, 2).state_dict())
    with pytest.raises(RuntimeError, match="gate_up_proj_bias"):
        MoE(16, 24, 4, 2, bias=True).load_state_dict(MoE(16, 24, 4, 2).state_dict())


def test_repr():
    text = repr(MoE(16, 24, 4, 2, save="paper", bias=True))
    assert "d_model=16, d_expert=24, num_experts=4, top_k=2, activation=swiglu, bias=True, save=paper" in text
    assert "backend=auto (torch: the kernels need a CUDA GPU of compute capability 9.0; the tensors are on cpu)" in text
    assert "backend=torch\n" in repr(MoE(16, 24, 4, 2, backend="torch"))


def test_what_runs_is_said(monkeypatch):
    """For x of a dtype; float32 weights run on the kernels where x is in bf16."""
    layer = MoE(16, 24, 4, 2, device="meta")
    assert layer.runs_on() == "torch: the kernels need a CUDA GPU of compute capability 9.0; the tensors are on meta"
    missing = {torch.bfloat16: None}
    monkeypatch.setattr(backends, "missing_for_kernels", lambda device, dtype, *_: missing.get(dtype, "bf16"))
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


def test_autocast():
    layer = MoE(16, 24, 4, 2, d_shared=8, bias=True)
    x = torch.randn(64, 16)
    expected, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = layer(x)
    assert out.dtype == torch.bfloat16
    assert (out - expected).norm() < 2e-2 * expected.norm()
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_a_float32_layer_takes_bfloat16_tokens():
    layer = MoE(16, 24, 4, 2, bias=True, d_shared=8)
    out, _ = layer(torch.randn(9, 16, dtype=torch.bfloat16))
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    for parameter in layer.parameters():
        assert parameter.grad.dtype == torch.float32
    for weight in (layer.gate_up_proj, layer.down_proj):
        assert not torch.equal(weight.grad.bfloat16().float(), weight.grad)


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
        layer = MoE(32, 24, 6, 3, router=router, save=save, bias=True, **sizes)
        weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
        for training in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
                layer.train(training)(x, *ids)
                promised = layer.saved_bytes(300)
            saved = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
            assert promised == saved, (workspace_bytes, row_capacity, training)


def test_saved_bytes():
    layer = MoE(512, 256, 16, 4, dtype=torch.bfloat16)
    assert layer.saved_bytes(1000) == 1000 * (2 * 512 + 4 * 256 * 4 + 12 * 4) + 4 * 17


def test_nan_logits_spoil_one_token():
    layer = MoE(16, 24, 4, 2)
    x = torch.randn(9, 16)
    x[3, 5] = torch.nan
    out, stats = layer(x)
    assert out[3].isnan().all() and out.isnan().any(1).sum() == 1
    assert stats.load.sum() == 18


BAD = {
    "no experts": ({"num_experts": 0}, ValueError, r"num_experts: expected at least 1, got 0"),
    "width of a float": ({"d_model": 16.0}, TypeError, r"d_model: expected an int, got float"),
    "K above E": ({"top_k": 5}, ValueError, r"top_k: expected at most num_experts=4, got 5"),
    "negative capacity": ({"row_capacity": -1}, ValueError, r"row_capacity: expected at least 0, got -1"),
    "negative width of the shared expert": ({"d_shared": -1}, ValueError, r"d_shared: expected at least 0, got -1"),
    "a workspace of no bytes": ({"workspace_bytes": 0}, ValueError, r"workspace_bytes: expected at least 1, got 0"),
    "a workspace of half a byte": ({"workspace_bytes": 9.5}, TypeError, r"workspace_bytes: expected an int, got float"),
    "a misspelt option": (
        {"activaton": "relu"},
        TypeError,
        r"activaton: unknown keyword .*; did you mean 'activation'",
    ),
    "one of the router's": ({"aux_los": 0.1}, TypeError, r"aux_los: unknown keyword .*; did you mean 'aux_loss'"),
    "one of another choice": ({"tile": 64}, TypeError, r"tile: unknown keyword .*; choose='token_rounding' takes it"),
    "all of the router's": (
        {"router_options": {"aux_loss": 0.1}},
        TypeError,
        r"router_options: expected each as a keyword of its own, MoE\(\.\.\., aux_loss=0\.01\)",
    ),
    "a device that is not here": (
        {"device": "cuda:99", "router": Router(16, 4, 2)},
        ValueError,
        r"device: expected one .* here, got 'cuda:99' \(",
    ),
    "no device": ({"device": "gpu"}, ValueError, r"device: expected one that torch can use here, got 'gpu' \("),
    "a dropped option": ({"weight_grad_dtype": None}, TypeError, r"weight_grad_dtype: unknown keyword of MoE"),
    "no router": ({"router": None}, TypeError, r"router: expected a name or a module, got NoneType"),
    "activation": ({"activation": "tanh"}, ValueError, r"activation: expected one of 'swiglu'.* got 'tanh'"),
    "save": ({"save": "all"}, ValueError, r"save: expected one of 'minimal'.* got 'all'"),
    "backend": ({"backend": "triton"}, ValueError, r"backend: expected one of 'auto'.* got 'triton'"),
    "combine": ({"combine": "sum"}, ValueError, r"combine: expected one of 'gather'.* got 'sum'"),
    "router": ({"router": "random"}, ValueError, r"router: expected one of .* got 'random'"),
    "hopper on a CPU": ({"backend": "hopper"}, ValueError, r"backend: .* needs a CUDA GPU .* on cpu"),
    "a bias in words": ({"bias": "no"}, TypeError, r"bias: expected True or False, got 'no'"),
    "float8": (
        {"dtype": torch.float8_e4m3fn},
        TypeError,
        r"dtype: expected None or one of .*, got torch.float8_e4m3fn",
    ),
    "router for another K": (
        {"router": Router(16, 4, 3)},
        ValueError,
        r"router: expected top_k=2 as the layer has, got a router with top_k=3",
    ),
    "router for other experts": (
        {"router": Router(16, 8, 2)},
        ValueError,
        r"router: expected num_experts=4 as the layer has, got a router with num_experts=8",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments(what):
    replaced, error, message = BAD[what]
    with pytest.raises(error, match=message):
        MoE(**{"d_model": 16, "d_expert": 24, "num_experts": 4, "top_k": 2, **replaced})


@pytest.mark.parametrize("name", ["d_model", "d_expert", "num_experts", "top_k", "widths"])
def test_sizes_are_read_only(name):
    layers = {layer: layer.router for layer in (MoE(16, 24, 4, 2), dMoE(16, [128, 256, 128, 128], 4, 2))}
    for owner in [*layers, *layers.values()]:
        if hasattr(owner, name):
            value = getattr(owner, name)
            setattr(owner, name, copy.copy(value))
            with pytest.raises(
                AttributeError, match=rf"{name}: expected .*, which this \w+ was made for, got 1; make another"
            ):
                setattr(owner, name, 1)
            assert getattr(copy.deepcopy(owner), name) == value


def pruned(layer, num_experts=3):
    for name, weight in [*layer.named_parameters(recurse=False)]:
        setattr(layer, name, nn.Parameter(weight.detach()[: len(weight) * num_experts // layer.num_experts]))


def narrower(layer):
    layer.gate_up_proj = nn.Parameter(layer.gate_up_proj.detach()[:, :24])
    layer.down_proj = nn.Parameter(layer.down_proj.detach()[..., :12])


def with_router(router):
    return lambda layer: setattr(layer, "router", router)


def with_rows_of(name, num_rows):
    def change(layer):
        tensor = getattr(layer.router, name).detach()[:num_rows]
        setattr(layer.router, name, nn.Parameter(tensor) if name == "weight" else tensor)

    return change


LATER = {
    "experts": (pruned, r"down_proj: expected shape \(4, 16, 24\), which the layer was made for, got \(3, 16, 24\)"),
    "width": (narrower, r"down_proj: expected shape \(4, 16, 24\), which the layer was made for, got \(4, 16, 12\)"),
    "router": (
        with_router(Router(16, 8, 2)),
        "router: expected num_experts=4 as the layer has, got a router with num_experts=8",
    ),
    "K": (with_router(Router(16, 4, 3)), "router: expected top_k=2 as the layer has, got a router with top_k=3"),
    "router's weight": (
        with_rows_of("weight", 3),
        r"weight: expected shape \(4, 16\), which the router was made for, got \(3",
    ),
    "bias": (with_rows_of("expert_bias", 3), r"expert_bias: expected shape \(4,\), which the router .*, got \(3,\)"),
}


@pytest.mark.parametrize("what", LATER)
def test_sizes_that_part_after_construction(what):
    """The router's pairs of experts that are not there would vanish, as those of other ranks do."""
    change, message = LATER[what]
    layer = MoE(16, 24, 4, 2, router="aux_free")
    layer(torch.randn(9, 16))
    change(layer)
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(9, 16))


@pytest.mark.parametrize("kind", [dMoE, DroppingMoE, SequentialMoE])
def test_sizes_of_other_layers_that_part(kind):
    layer = kind(16, 128, 4, 2)
    pruned(layer)
    with pytest.raises(ValueError, match=r"down_proj: expected shape .*, which the layer was made for"):
        layer(torch.randn(9, 16))


def test_an_activation_that_is_set_later_is_the_shared_experts_too():
    layer, x = MoE(16, 24, 4, 2, d_shared=8), torch.randn(9, 16)
    other = MoE(16, 24, 4, 2, d_shared=8, activation="geglu")
    other.load_state_dict(layer.state_dict())
    layer.activation = "geglu"
    assert layer.shared_expert.activation == "geglu" and torch.equal(layer(x)[0], other(x)[0])


@pytest.mark.parametrize("call", ["saved_bytes", "runs_on"])
def test_a_dtype_by_its_name_is_refused(call):
    layer = MoE(16, 24, 4, 2)
    with pytest.raises(TypeError, match=r"dtype: expected None or one of torch.bfloat16, .*, got 'float32'"):
        getattr(layer, call)(*[5][: call == "saved_bytes"], dtype="float32")


def test_bad_input():
    layer = MoE(16, 24, 4, 2)
    with pytest.raises(ValueError, match=r"x: expected shape \(\.\.\., 16\), got \(3, 8\)"):
        layer(torch.randn(3, 8))
    with pytest.raises(ValueError, match=r"x: expected device cpu.*got meta"):
        layer(torch.randn(3, 16, device="meta"))
    with pytest.raises(ValueError, match=r"x: expected dtype torch.bfloat16 or"):
        layer(torch.randn(3, 16, dtype=torch.float64))
    x = torch.randn(2, 3, 16)
    with pytest.raises(TypeError, match=r"mask: expected a torch\.bool tensor, got torch\.int64"):
        layer(x, mask=torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"mask: expected a torch\.Tensor, got list"):
        layer(x, mask=[True] * 6)
    with pytest.raises(ValueError, match=r"mask: expected 6 bools, one a token, got shape \(2, 3, 1, 2\)"):
        layer(x, mask=torch.ones(2, 3, 1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask: expected shape \(2, 3\), x's, got \(3, 2\)"):
        layer(x, mask=torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask: expected device cpu, x's, got meta"):
        layer(x, mask=torch.ones(2, 3, dtype=torch.bool, device="meta"))


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
    with pytest.raises(TypeError, match="mask: expected a router whose Routing has it, got None from Ignoring"):
        MoE(16, 24, 4, 2, router=Ignoring())(x, mask=mask)
    with pytest.raises(TypeError, match="mask: expected a router that takes one, got Older"):
        MoE(16, 24, 4, 2, router=Older(16, 4, 2))(x, mask=mask)
    with pytest.raises(TypeError, match="mask: expected a router that takes one, got Plain"):
        MoE(16, 24, 4, 2, router=Plain())(x, mask=mask)
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
        assert how["activation"] == options.get("activation", "swiglu")
        prepared.append(how["f32_weight_grads"])

    def prepare_dispatch(num_tokens, top_k, num_experts, *, row_capacity, device):
        assert (num_experts, device, row_capacity) == (4, 3, options.get("row_capacity"))
        shapes.add((num_tokens, top_k))

    layer = MoE(16, 24, 4, 2, **{"dtype": torch.bfloat16, **options})
    monkeypatch.setattr(blazeproto.layer, "missing_for_kernels", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(gemm, "prepare", prepare)
    monkeypatch.setattr(dispatch, "prepare_dispatch", prepare_dispatch)
    layer.prepare(100)
    assert (sorted(prepared), shapes) == (weight_grads, dispatches)


def test_prepare_does_nothing_where_the_torch_backend_runs():
    MoE(16, 24, 4, 2).prepare(100)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hidden_size", "d_model"),
        ("num_local_experts", "num_experts"),
        ("num_experts_per_tok", "top_k"),
        ("d_modl", "d_model"),
    ],
)
def test_a_size_under_another_name_is_told_from_a_missing_one(name, meant):
    sizes = {"d_model": 16, "d_expert": 8, "num_experts": 4, "top_k": 2}
    with pytest.raises(TypeError, match=f"^{name}: unknown keyword of MoE and its router; did you mean '{meant}'"):
        MoE(**{name if key == meant else key: size for key, size in sizes.items()})
