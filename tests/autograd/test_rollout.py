"""``precision="fp8_rollout"`` on the torch backend: its formula, a checkpoint's own e4m3 weights, what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from blazeproto import MoE, Recipe, stored
from blazeproto.autograd import quantize_weights
from blazeproto.gemm.e4m3 import in_e4m3, to_e4m3
from blazeproto.gemm.recipe import RECIPES, Operand
from tests.autograd.cases import assert_same_bits
from tests.autograd.test_fp8 import formula
from tests.refusals import refuses

SIZES, ROLLOUT = (37, 128, 256, 5, 3), {"precision": "fp8_rollout"}
FLOATS = {"x": Operand("e4m3", "token 1x128", "float32"), "weights": Operand("e4m3", "128x128", "float32")}


@pytest.mark.parametrize("precision", ["fp8_rollout", RECIPES["fp8_rollout"]])
def test_it_is_the_formula(make_case, precision):
    case = make_case(*SIZES, sentinels=True, idle=(2,))
    for got, expected in zip(case.run(precision=precision), formula(case, "fp8_rollout"), strict=True):
        assert (got - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize("way", [{"save": "recompute"}, {"keep_transposed": False}, {"quantized": True}])
def test_all_ways_give_the_same_bits(make_case, way):
    case = make_case(*SIZES, dtype=torch.float32)
    if "quantized" in way:
        way = {"quantized": quantize_weights(case.gate_up_proj, case.down_proj, **ROLLOUT)}
    assert_same_bits(case.run(**ROLLOUT, **way), case.run(**ROLLOUT))


def test_kept_weights_are_of_one_precision(make_case):
    case = make_case(*SIZES, dtype=torch.float32)
    kept = quantize_weights(case.gate_up_proj, case.down_proj)
    refuses(lambda: case.forward(**ROLLOUT, quantized=kept), "quantized")
    refuses(lambda: quantize_weights(case.gate_up_proj, case.down_proj, precision="bf16"), "precision")


def test_numpy_and_torch_round_alike():
    values = np.random.default_rng(0).standard_normal((20, 256)).astype(np.float32)
    values[0], values[1, 3], values[2, :128] = 0, np.inf, 1e-12
    for scale in ("token 1x128", "1x128", "128x128"):
        made, same = to_e4m3(np, values, scale, "float32"), to_e4m3(torch, torch.from_numpy(values), scale, "float32")
        np.testing.assert_array_equal(made.scales, same.scales.numpy())
        number = (made.values & 0x7F) != 0x7F
        np.testing.assert_array_equal(made.values[number], same.values.view(torch.uint8).numpy()[number])
    off = in_e4m3(np, values[3:], "1x128", "float32") - values[3:]
    assert 0 < np.abs(off).max() <= np.abs(values[3:]).max() / 16


# ---- a checkpoint's own e4m3 -----------------------------------------------------------------------------------------


def as_stored(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> stored.StoredWeight:
    made = to_e4m3(torch, weight.detach(), "128x128", "float32")
    return stored.fp8(made.values, made.scales.to(dtype))


def run(case: Any, **weights: Any) -> tuple[torch.Tensor, ...]:
    out = case.forward(**ROLLOUT, **weights)
    return out, *torch.autograd.grad(out, (case.x, case.scores), case.d_out)


@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_stored_weights_are_multiplied_as_they_are(make_case, save, bytes_saved_by):
    case = make_case(*SIZES, dtype=torch.float32)
    weights = {name: as_stored(getattr(case, name)) for name in ("gate_up_proj", "down_proj")}
    assert_same_bits(run(case, save=save, **weights), run(case, save=save))
    saved = MoE(*SIZES[1:], save=save, storage="fp8", **ROLLOUT).saved_bytes(SIZES[0], torch.float32)
    tensors = [t for weight in weights.values() for t in (weight.values, weight.scales)]
    assert bytes_saved_by(lambda: case.forward(**ROLLOUT, save=save, **weights), tensors) == saved


def test_a_layer_loads_them(make_case):
    layer, weights = MoE(*SIZES[1:], storage="fp8", **ROLLOUT), dict[str, torch.Tensor]()
    case = make_case(*SIZES, dtype=torch.float32)
    for name in ("gate_up_proj", "down_proj"):
        made = as_stored(getattr(case, name))
        weights |= {name: made.values.view(torch.uint8), f"{name}_scale_inv": made.scales.view(torch.uint8)}
    layer.load_state_dict(weights | {"router.weight": layer.router.weight})
    routes = {"experts": case.topk_experts, "scores": case.scores.detach()}
    assert torch.equal(layer(case.x, **routes)[0], case.forward(**ROLLOUT))
    refuses(layer.quantize_weights, "storage")


REFUSED = {
    "another format": {"down_proj": lambda w: stored.quantize(w.detach(), "nf4")},
    "other blocks": {"down_proj": lambda w: stored.quantize(w.detach(), "fp8", (64, 64))},
    "one of them": {"down_proj": as_stored, "gate_up_proj": lambda w: w},
    "for fp8": {"down_proj": as_stored, "precision": "fp8"},
}


@pytest.mark.parametrize("which", REFUSED)
def test_other_stored_weights_are_refused(make_case, which):
    case, how = make_case(*SIZES, dtype=torch.float32), {"gate_up_proj": as_stored, **REFUSED[which]}
    precision = how.pop("precision", "fp8_rollout")
    weights = {name: make(getattr(case, name)) for name, make in how.items()}
    refuses(lambda: case.forward(precision=precision, **weights), "precision")


def test_stored_weights_are_not_quantized_again(make_case):
    case = make_case(*SIZES, dtype=torch.float32)
    kept = quantize_weights(case.gate_up_proj, case.down_proj, **ROLLOUT)
    weights = {name: as_stored(getattr(case, name)) for name in ("gate_up_proj", "down_proj")}
    refuses(lambda: case.forward(**ROLLOUT, quantized=kept, **weights), "quantized")


def test_widths_are_whole_blocks_and_recipes_are_those_of_the_table(make_case):
    refuses(lambda: make_case(37, 144, 256, 5, 3).forward(**ROLLOUT), "precision")
    refuses(lambda: MoE(128, 128, 4, 2, precision=Recipe(**FLOATS, act=Operand("e4m3", "1x128"))), "precision.act")
