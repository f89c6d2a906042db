"""A layer whose experts are stored: state, copies, casts, compilation, and the layers that refuse it."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch

from blazeproto import MoE, stored
from blazeproto.autograd import moe_mlp
from blazeproto.blocksparse import DroppingMoE, dMoE
from blazeproto.distributed import expert_parallel
from blazeproto.lab import explain
from blazeproto.stored.module import hold
from tests.autograd.cases import assert_same_bits
from tests.refusals import refuses

SIZES = (128, 128, 4, 2)
SCALES = {"mxfp4": "_scales", "nf4": "_absmax", "int4": "_scale", "fp8": "_scale_inv"}


def layer_of(storage: str | None = "nf4", **more: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(*SIZES, storage=storage, **{"dtype": torch.bfloat16, **more})


def decoded(layer: MoE) -> MoE:
    """The same layer with the decoded weights as its parameters."""
    plain = layer_of(None, bias=layer.up_bias is not None)
    state = {name: t for name, t in layer.state_dict().items() if not name.endswith(("_zeros", *SCALES.values()))}
    state |= {layer.up_name: layer.up_proj_weight.decode(), "down_proj": layer.down_proj_weight.decode()}
    plain.load_state_dict(state)
    return plain


def results(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out, _ = layer(x)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (x, layer.router.weight))]


X = torch.randn(24, 128, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("storage", stored.FORMATS)
def test_a_layer_computes_what_its_decoded_weights_compute(storage):
    layer = layer_of(storage, bias=True)
    assert_same_bits(results(layer, X), results(decoded(layer), X))
    assert (
        layer.kernel_needs == ("stored weights",)
        and layer.runs_on().startswith("torch: ")
        and f"gate_up_proj stored as '{storage}" in repr(layer)
    )
    plain = layer_of(None, bias=True)
    assert torch.equal(layer.down_proj_weight.decode(), stored.quantize(plain.down_proj, storage).decode())
    assert layer.saved_bytes(24) == decoded(layer).requires_grad_(False).saved_bytes(24)


@pytest.mark.parametrize("storage", stored.FORMATS)
def test_state_copies_and_casts_keep_the_bits(storage):
    """A cast of the layer to another dtype too, which leaves bytes alone."""
    layer = layer_of(storage)
    expected, state = results(layer, X), layer.state_dict()
    assert {*state} == {
        "router.weight",
        *(f"{w}{end}" for w in ("gate_up_proj", "down_proj") for end in ("", SCALES[storage])),
    }
    assert all(t.dtype == torch.uint8 for name, t in state.items() if "proj" in name)
    torch.save(state, file := io.BytesIO())
    other = MoE(*SIZES, storage=storage, dtype=torch.bfloat16)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    torch.save(layer, whole := io.BytesIO())
    with torch.device("meta"):
        on_meta = MoE(*SIZES, storage=storage, dtype=torch.bfloat16).to_empty(device="cpu")
    on_meta.load_state_dict(state)
    made = (other, copy.deepcopy(layer), torch.load(io.BytesIO(whole.getvalue()), weights_only=False), on_meta)
    for each in (*made, copy.deepcopy(layer).double().bfloat16()):
        assert_same_bits(results(each, X), expected)
        each.reset_parameters()
        assert_same_bits([each.down_proj], [layer.down_proj])


def test_checkpoint_bytes_in_a_layer():
    """int4 with zero points; what is held is what was given."""
    layer = layer_of(None)
    for name in ("gate_up_proj", "down_proj"):
        experts, out, width = getattr(layer, name).shape
        packed, zeros = (
            torch.randint(-(2**31), 2**31, (experts, *shape)).int()
            for shape in ((out, width // 8), (out // 8, width // 32))
        )
        scales = torch.rand(experts, out, width // 32).bfloat16() / 64
        hold(layer, name, stored.int4(packed, scales, zeros, group=32))
        assert getattr(layer, name).data_ptr() == packed.data_ptr()
    assert_same_bits(results(copy.deepcopy(layer), X), results(decoded(layer), X))
    assert "gate_up_proj_zeros" in layer.state_dict()


def test_a_stored_layer_compiles():
    layer = layer_of("mxfp4")
    torch.compiler.reset()
    assert_same_bits(results(layer, X), expected := results(layer, X))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = X.clone().requires_grad_()
    assert_same_bits([compiled(x)[0].detach()], expected[:1])


def test_training_changes_no_weight():
    layer = layer_of("nf4")
    before = copy.deepcopy(layer.state_dict())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(X)[0].float().square().sum().backward()
    optimizer.step()
    changed = {name for name, t in layer.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {"router.weight"}


@pytest.mark.parametrize(("storage", "byte"), [("mxfp4", 253), ("mxfp4", 255), ("nf4", 255), ("fp8", 0xFF)])
def test_scales_of_a_state_are_checked(storage, byte):
    """And a layer takes a state without its experts, if that is asked for."""
    layer, name = layer_of(storage), f"down_proj{SCALES[storage]}"
    state = layer.state_dict() | {name: torch.full_like(getattr(layer, name), byte)}
    refuses(lambda: layer.load_state_dict(state), name)
    layer.load_state_dict({"router.weight": state["router.weight"]}, strict=False)


def test_what_is_refused():
    layer = layer_of("fp8")
    refuses(lambda: layer.load_state_dict(layer_of(None).state_dict()), "gate_up_proj")
    nan = {"down_proj": torch.full_like(layer.down_proj, 0x7F)}
    refuses(lambda: layer.load_state_dict(layer.state_dict() | nan), "down_proj")
    in_e8m0 = {"down_proj": torch.zeros(4, 128, 64, dtype=torch.uint8)}
    in_e8m0 |= {"down_proj_scales": torch.ones(4, 128, 4).to(torch.float8_e8m0fnu)}
    refuses(lambda: layer_of("mxfp4").load_state_dict(in_e8m0), "down_proj_scales")
    refuses(lambda: layer.store_weights("nf4"), "storage")
    given = layer_of("nf4").state_dict()  # of the same sizes
    for load in (partial(layer_of("int4").load_state_dict, given, strict=strict) for strict in (True, False)):
        refuses(load, "gate_up_proj_scale")
    refuses(lambda: layer_of("fp4"), "storage")
    refuses(lambda: MoE(48, 64, 4, 2, storage="nf4"), "gate_up_proj's block")
    refuses(lambda: explain(layer, X), "layer")
    refuses(lambda: expert_parallel(layer, None), "moe")
    for kind in (dMoE, DroppingMoE):
        refuses(lambda kind=kind: kind(*SIZES, storage="nf4"), "storage")
    for backend in ("hopper", "ampere"):
        layer.backend = backend
        refuses(lambda: layer(X), "backend")
    plain = layer_of(None)
    refuses(lambda: MoE(48, 64, 4, 2).store_weights("nf4"), "gate_up_proj's block")
    given = plain.up_proj_weight, layer.down_proj, torch.ones(24, 1), torch.zeros(24, 1).int()
    refuses(lambda: moe_mlp(X, *given, num_experts=4), "down_proj", TypeError)
