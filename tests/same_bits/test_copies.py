"""Every copy of a layer that PyTorch makes (objects, files, state dicts, meta, casts) has the bits of the layer; float32 weights
keep their unrounded gradients. On the CPU with the torch backend, on a Hopper GPU with the kernels."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from places import PLACES, Place, assert_same_bits, backward, collect, plain, train
from torch import Tensor, nn

from blazeproto import MoE


def through_a_file(layer: MoE) -> MoE:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def state_through_a_file(layer: MoE) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    return torch.load(file)  # tensors alone


COPIES: dict[str, Callable[[Place, MoE], nn.Module]] = {
    "deepcopy": lambda place, layer: copy.deepcopy(layer),
    "pickle": lambda place, layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": lambda place, layer: through_a_file(layer),
    "share_memory": lambda place, layer: layer.share_memory(),
    "state dict": lambda place, layer: loaded(place.build(seed=9), layer),
    "assign": lambda place, layer: loaded(place.build(seed=9), layer, assign=True),
    "assign to meta": lambda place, layer: loaded(place.build(seed=9).to("meta"), layer, assign=True),
    "meta, to_empty": lambda place, layer: loaded(place.build(seed=9).to("meta").to_empty(device=place.device), layer),
    "cpu and back": lambda place, layer: layer.cpu().to(place.device),
    "requires_grad_ off and on": lambda place, layer: layer.requires_grad_(False).requires_grad_(True),
    "eval and back": lambda place, layer: layer.eval().train(),
}


def loaded(layer: nn.Module, source: MoE, **options: bool) -> nn.Module:
    layer.load_state_dict(state_through_a_file(source), **options)
    return layer


@PLACES
@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
def test_copies(place: Place, copy_of: Callable[[Place, MoE], nn.Module]) -> None:
    assert_same_bits(train(place, copy_of(place, place.build()), *place.batch()), plain(place))


@PLACES
def test_a_copy_of_a_layer_in_use(place: Place) -> None:
    """With gradients there already, and between forward and backward."""
    expected, layer, (x, d_out) = plain(place), place.build(), place.batch()
    out, aux_loss = place.forward(layer, x)
    other = copy.deepcopy(layer)
    backward(out, aux_loss, d_out)
    assert_same_bits(collect(out, x, layer), expected)
    for again in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(train(place, again, *place.batch()), expected)


@PLACES
def test_meta_to_empty_and_reset(place: Place) -> None:
    """Every module resets its own parameters and buffers: nothing stays uninitialised."""
    options = {"router": "aux_free", "d_shared": 64}
    made = place.build(**options).to("meta").to_empty(device=place.device)
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.data.fill_(torch.nan)
    fresh = place.build(seed=9, **options)
    for layer in (made, fresh):
        torch.manual_seed(3)
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name


@PLACES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_cast_to_another_dtype(place: Place, dtype: torch.dtype) -> None:
    """As one that was made in it; the balancing bias stays as it is, to the bit."""
    layer = place.build(router="aux_free")
    layer.router.expert_bias.copy_(torch.linspace(-0.01, 0.01, layer.num_experts) / 3)
    bias = layer.router.expert_bias.clone()
    expected = place.build(router="aux_free", dtype=dtype)
    with torch.no_grad():
        for parameter, source in zip(expected.parameters(), layer.parameters(), strict=True):
            parameter.copy_(source)
    expected.router.expert_bias.copy_(bias)
    layer = layer.to(dtype)
    assert torch.equal(layer.router.expert_bias, bias)
    results = []
    for each in (layer, expected):
        x, d_out = place.batch()
        with torch.autocast(place.device, torch.bfloat16):
            out, _ = each(x)
        out.backward(d_out)
        results.append(collect(out, x, each))
    assert_same_bits(*results)
